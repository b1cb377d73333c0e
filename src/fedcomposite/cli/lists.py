"""``list``: what can be named in a configuration."""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated, Any, Literal

import pandas as pd
import typer

from fedcomposite import aggregators, algorithms, callbacks, compressors, data, models, problems, regularizers
from fedcomposite.cli.console import AsJson, err, first_sentence, show_frame
from fedcomposite.cli.papers import paper_table
from fedcomposite.experiments.toml import shipped
from fedcomposite.registry import OURS, Registry
from fedcomposite.testing import Traffic, measure_traffic

_KNOWN: dict[str, Registry[Any]] = {
    "regularizers": regularizers.REGISTRY,
    "datasets": data.DATASETS,
    "partitions": data.PARTITIONERS,
    "losses": problems.LOSSES,
    "model-losses": problems.MODEL_LOSSES,
    "models": models.MODELS,
    "metrics": problems.METRICS,
    "callbacks": callbacks.REGISTRY,
    "aggregators": aggregators.REGISTRY,
    "compressors": compressors.REGISTRY,
}


def list_names(
    what: Annotated[
        Literal[
            "algorithms", "regularizers", "datasets", "partitions", "losses", "model-losses", "models",
            "metrics", "callbacks", "aggregators", "compressors", "experiments", "papers",
        ],
        typer.Argument(help="What to list."),
    ],
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """List what can be named in a configuration."""
    if what == "algorithms":
        caption = (
            "clients: who must take part in a round (*: all, unless partial_participation is set);\n"
            "exact: no residual with full gradients and several local steps; full only: if all clients take part;\n"
            "up, down: vectors per client; proxes of h, all clients: measured with 4 clients and 5 local steps;\n"
            "†: written from secondary sources, checked by reductions to other methods and by convergence"
        )
        show_frame(algorithm_table(), as_json, caption, drop=("down", "up", "proxes", "paper", "clients"))
        _complain(algorithms.REGISTRY)
    elif what == "papers":
        caption = "minutes of the full form, estimated from 60 on a CPU; run here: in the folder reproductions"
        show_frame(paper_table(), as_json, caption, drop=("run here", "GPU min"))
    elif what == "experiments":
        show_frame(pd.DataFrame({"name": shipped().keys(), "what": shipped().values()}), as_json)
    else:
        known = _KNOWN[what]
        rows = [{"name": k, "what": _about(known, k), "fields": _fields(v)} for k, v in known.items()]
        frame = pd.DataFrame(rows)
        show_frame(frame if frame["fields"].any() else frame.drop(columns="fields"), as_json)
        _complain(known)


def _about(known: Registry[Any], name: str) -> str:
    origin = known.origin(name)
    return first_sentence(known[name]) + ("" if origin == OURS else f" (of {origin})")


def _complain(known: Registry[Any]) -> None:
    """Say why names that other packages offer cannot be used."""
    for problem in known.problems().values():
        err.print(problem, markup=False, highlight=False, soft_wrap=True)


def _fields(thing: Any) -> str:
    """What may be set: a class's fields, with their defaults."""
    if not dataclasses.is_dataclass(thing):
        return ""
    chosen = [f for f in dataclasses.fields(thing) if f.init]
    return ", ".join(f.name if f.default is dataclasses.MISSING else f"{f.name} = {f.default!r}" for f in chosen)


def algorithm_table() -> pd.DataFrame:
    """What each method handles and needs; traffic and work are measured on a probe run (4 clients, 5 local steps)."""
    rows = []
    for name, cls in algorithms.REGISTRY.items():
        origin = algorithms.REGISTRY.origin(name)
        try:
            seen = measure_traffic(cls)
        except Exception:  # another package's method may fail at anything, the list goes on
            if origin == OURS:
                raise
            seen = Traffic(*[math.nan] * 4)
        rows.append(
            {
                "name": name if origin == OURS else f"{name} ({origin})",
                "paper": _cite(cls.info.paper, cls.info.year) + " †" * cls.info.secondary,
                "handles h": cls.info.regularizer,
                "clients": "any*" if "partial_participation" in algorithms.fields(cls) else cls.info.participation,
                "exact": ("yes" if cls.info.exact_partial else "full only") if cls.info.exact else "no",
                "up": f"{seen.up:.2g}",
                "down": f"{seen.down:.2g}",
                "proxes": f"{seen.proxes:.3g}",
                "fields": ", ".join(algorithms.fields(cls)),
            }
        )
    return pd.DataFrame(rows)


def _cite(paper: str, year: int) -> str:
    """First author, et al., year."""
    first, *others = paper.partition(":")[0].split(", ")
    return f"{first} et al. {year}" if len(others) > 1 else f"{' & '.join([first, *others])} {year}"
