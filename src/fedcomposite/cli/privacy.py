"""``fedcomposite privacy``: from epsilon to noise, and back."""

from __future__ import annotations

import math
from typing import Annotated

import typer

from fedcomposite.cli.console import AsJson, out, results
from fedcomposite.experiments import ConfigError
from fedcomposite.privacy import Query, compose, noise_for


def privacy_command(
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of the run.")],
    epsilon: Annotated[float | None, typer.Option(help="What the run may cost; the answer is the noise.")] = None,
    noise: Annotated[float | None, typer.Option(help="A noise multiplier; the answer is epsilon.")] = None,
    delta: Annotated[float, typer.Option(help="Delta.")] = 1e-5,
    queries: Annotated[
        int, typer.Option("--queries", min=1, help="Gradients in a round: the local steps of most methods.")
    ] = 1,
    more: Annotated[
        int, typer.Option("--more", min=0, help="Further queries of the whole run: Hessians, evaluations at sites.")
    ] = 0,
    rate: Annotated[float, typer.Option(help="Probability with which a sample takes part in a query.")] = 1.0,
    clip: Annotated[float, typer.Option(help="Clipping norm, for the size of the noise.")] = 1.0,
    samples: Annotated[int | None, typer.Option(min=1, help="A client's samples, for the size of the noise.")] = None,
    parties: Annotated[
        int, typer.Option("--parties", min=1, help="Clients that share the noise under secure aggregation.")
    ] = 1,
    as_json: AsJson = False,
) -> None:
    """Say what noise an epsilon needs, or what epsilon a noise gives; accounting by dp-accounting."""
    if (epsilon is None) == (noise is None):
        raise ConfigError("give either --epsilon or --noise")
    asked = rounds * queries + more
    try:
        found = noise_for(epsilon=epsilon, delta=delta, queries=asked, rate=rate) if epsilon is not None else noise
        if found is None or not found > 0:
            raise ValueError(f"noise = {noise!r}, must be a number > 0")
        spent = compose({Query(found, rate): asked}, delta)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    with results(as_json) as told:
        deviation = None if samples is None else found * clip / (rate * samples)
        told |= {"noise": found, "epsilon": spent, "delta": delta, "queries": asked, "rate": rate, "parties": parties}
        told |= {"deviation": deviation, "share": found / math.sqrt(parties)}
        shown = f"{found:.4g}" if noise is not None else f"{math.ceil(found * 1e4) / 1e4:.4f}"
        _say(f"{asked} queries at rate {rate:g}: noise = {shown} times the clip, "
             f"epsilon = {spent:.4g} at delta = {delta:g}")  # fmt: skip
        if deviation is not None:
            _say(f"a gradient of {samples} samples clipped to {clip:g} has noise of deviation {deviation:.3g} "
                 "per coordinate")  # fmt: skip
        if parties > 1:
            _say(
                f"each of {parties} parties adds the share 1/{parties}: {found / math.sqrt(parties):.4g} times the clip"
            )


def _say(line: str) -> None:
    out.print(line, highlight=False, soft_wrap=True)
