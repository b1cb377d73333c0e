"""Several seeds of one setting as one stacked computation: a seed costs little beside the first.

The rules of a method are written for tensors ``(..., d)``, so the clients of S seeds are S * n rows; the server's
tensors have a row for each seed, and a reply is the mean over the n rows of its seed. A seed has its own data, start
and minibatches, and all methods start at the same *model*: methods whose state is a point before a prox start at a
point that the prox takes there.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from fedcomposite.algorithms import AnyAlgorithm, FedNMap, Zhang, build
from fedcomposite.data import Silos
from fedcomposite.experiments import Config
from fedcomposite.problems import Problem
from fedcomposite.problems.base import Batches, ClientGradients, Counter
from fedcomposite.regularizers import Regularizer
from fedcomposite.runtime import messages
from fedcomposite.runtime.counted import Counted

OPTIONS = ("rounds", "every", "since", "batch_size", "stationarity_step", "device")
SECTIONS = ("data", "partition", "problem", "model", "regularizer")


class SeedStack(NamedTuple):
    """The problems of some seeds, and that of all their clients together."""

    problems: tuple[Problem, ...]
    joint: Problem

    @property
    def clients(self) -> int:
        """Clients of a seed."""
        return len(self.problems[0].silos)


def stack_of(experiment: Mapping[str, Any], seeds: Sequence[int]) -> SeedStack:
    """The problems of an experiment's seeds; the last ones are kept."""
    sections = {k: experiment[k] for k in SECTIONS if k in experiment}
    return _stack(json.dumps(sections, sort_keys=True), tuple(seeds))


@functools.lru_cache(maxsize=2)  # of ten seeds of images a stack takes gigabytes
def _stack(sections: str, seeds: tuple[int, ...]) -> SeedStack:
    configs = [
        Config.model_validate({**json.loads(sections), "seed": s, "run": {"rounds": 0}})
        for s in seeds
    ]  # fmt: skip
    problems = tuple(c.make_problem() for c in configs)
    pairs: Any = [p.silos[i] for p in problems for i in range(len(p.silos))]
    return SeedStack(problems, configs[0].make_problem(Silos.from_arrays(pairs)))


def start_at(method: AnyAlgorithm, x: Tensor, h: Regularizer) -> Tensor:
    """The start of a method whose first model is x: a point that its prox takes to x, where it starts before one."""
    step = method.gamma if isinstance(method, FedNMap) else method.round_step if isinstance(method, Zhang) else 0.0
    return x + step * h.subgradient(x) if step else x


def follow(
    stack: SeedStack,
    method: AnyAlgorithm,
    *,
    rounds: int,
    every: int,
    since: int = 0,
    batch_size: int | None = None,
    stationarity_step: float | None = None,
    starts: Sequence[Tensor] | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
) -> list[dict[str, Any]]:
    """The records of every seed (its place in the stack under ``place``), every so many rounds and at the end.

    Rounds before ``since`` have no records.
    ``starts`` are states before the first round, one for each seed; the models that :func:`start_at` leads to if left
    out. A seed that diverges goes on with nan, and the others do not notice.
    """
    n, count, counter = stack.clients, len(stack.problems), Counter()
    smooth, plain = stack.joint.smooth(dtype, device), stack.joint.regularizer
    h, everyone = Counted(plain, counter), np.arange(n * count, dtype=np.uint64)
    if starts is None:
        models = [p.smooth(dtype, device).start().to(device, dtype) for p in stack.problems]
        starts = [start_at(method, x, plain) for x in models]
    pairs = [method.init(x.to(device, dtype), h) for x in starts]
    server = _rows([s for s, _ in pairs], 1)
    clients = _rows([c for _, c in pairs], n)
    records, expect = [], 1
    for number in range(rounds + 1):
        if (number >= since and number % every == 0) or number == rounds:
            x = method.solution(server, plain)
            records += _records(stack, x, number, counter, stationarity_step)
        if number == rounds:
            break
        rules = method.at(number)
        message = rules.broadcast(server)
        grad = ClientGradients(smooth, everyone, number, Batches(seed, batch_size), counter, expect=expect)
        sent = messages.each(message, lambda t: t.repeat_interleave(n, 0))
        reply, clients = rules.local_round(sent, clients, grad, h)
        expect = grad.steps_used
        counter.bytes_up += messages.nbytes(reply)
        counter.bytes_down += messages.nbytes(sent)
        mean = messages.each(rules.decode(reply), lambda t: t.unflatten(0, (count, n)).mean(1))
        server = rules.aggregate(server, mean, 1.0, h)
    return records


def _rows(states: Sequence[Any], copies: int) -> Any:
    """Tuples of the seeds as one, a row for each seed or for each of its clients."""
    return type(states[0])(*(torch.stack(t).repeat_interleave(copies, 0) for t in zip(*states, strict=True)))


def _records(
    stack: SeedStack, x: Tensor, number: int, counter: Counter, stationarity_step: float | None
) -> list[dict[str, Any]]:
    """One record for each seed; work and bytes are those of one seed."""
    found, share = [], len(stack.problems)
    work = {
        "gradient_evaluations": counter.gradients / share,
        "prox_evaluations": counter.proxes / share,
        "bytes_up": counter.bytes_up / share,
        "bytes_down": counter.bytes_down / share,
    }
    for place, problem in enumerate(stack.problems):
        model, h = x[place], problem.regularizer
        seen = problem.evaluate(model)
        step = problem.default_step() if stationarity_step is None else stationarity_step
        moved = h.prox(model - step * seen.gradient, step)
        accuracy = {k: float(v) for k, v in seen.metrics.items() if k.endswith("accuracy")}
        found.append(
            {
                "place": place, "round": number, "loss": float(seen.loss),
                "objective": float(seen.loss) + float(h.value(model)),
                "stationarity": float((model - moved).norm()) / step,
                "nonzeros": int((model != 0).sum()), **work, **accuracy,
            }
        )  # fmt: skip
    return found


def run(cell: Mapping[str, Any]) -> pd.DataFrame:
    """The records of a cell: ``experiment``, ``method`` (a table), ``seeds``, and the options of :func:`follow`."""
    torch.set_num_threads(1)
    stack = stack_of(cell["experiment"], cell["seeds"])
    given = dict(cell["method"])
    options = {k: cell[k] for k in OPTIONS if k in cell}
    records = follow(
        stack, build(given.pop("name"), **given), dtype=getattr(torch, cell.get("dtype", "float64")), **options
    )
    table = pd.DataFrame(records)
    return table.assign(seed=table.pop("place").map(dict(enumerate(cell["seeds"]))))


def late(rows: pd.DataFrame, key: str = "stationarity") -> pd.Series:
    """For each seed the mean over the last quarter of its records: a single one is as noisy as its minibatch."""
    found: pd.Series = rows[rows["round"] > 0.75 * rows["round"].max()].groupby("seed")[key].mean()
    return found
