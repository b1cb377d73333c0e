"""Losses with kinks: Newton steps on smooth losses that come ever closer, and a duality gap of the problem itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fedcomposite.algorithms import ProxNewton
from fedcomposite.problems import Problem
from fedcomposite.problems.smoothed import KINKED, Smoothed
from fedcomposite.runtime import Record, Run, simulate
from fedcomposite.runtime.certificate import Certificate, duality_gap

KINK_ROUNDS = 300
"""Rounds after which a problem with kinks counts as not solved, unless a number is given."""

_FACTOR = 0.2  # between the widths of two stages
_STAGE = 60  # most rounds of a stage
_LEAST = 1e-9  # the last width, in units of the first
_ACCURACY = 3e-3  # of a stage, in units of its width and of the first gradient
_SUMS = ("bytes_up", "bytes_down", "prox_evaluations", "gradient_evaluations", "seconds")


def smoothable(problem: Problem) -> bool:
    """Whether the loss is one whose kink :class:`Smoothed` takes away."""
    return isinstance(problem.loss, KINKED)


def solve_kinked(
    problem: Problem,
    *,
    tolerance: float,
    rounds: int | None,
    on_record: Callable[[Record], None] | None,
    x0: Any = None,
    **settings: Any,
) -> Run:
    """Solve a problem whose loss has a kink, until the objective is within ``tolerance`` of its minimum.

    A stage makes the loss smooth over a width and takes Newton steps from the last stage's solution; the next one has a
    fifth of the width. The dual point of a stage's solution is one of the problem itself, which bounds what is left.
    Where a conjugate is not known, the difference of the two objectives and the stage's own stationarity decide.
    """
    left = KINK_ROUNDS if rounds is None else rounds
    width = first = 1.0 if problem.loss.classifier else float(problem.silos.targets.double().std()) or 1.0
    x, history, totals = x0, list[Record](), dict.fromkeys(_SUMS, 0.0)
    slope = float(torch.linalg.vector_norm(problem.gradient(torch.zeros(problem.dimension))))
    while True:
        smooth = _smoothed(problem, width)
        accuracy = _ACCURACY * max(slope, 1e-12) * width / first
        run = simulate(smooth, ProxNewton(), rounds=min(left, _STAGE), tolerance=accuracy, x0=x, **settings)
        done = (history[-1]["round"] if history else 0) + run.rounds
        x, left = run.solution, left - run.rounds
        if not history:
            history.append(
                _translated(problem, run.history[0], problem.smooth().start() if x0 is None else x0, 0, totals)
            )
        history.append(_translated(problem, run.history[-1], x, done, totals))
        totals = {name: history[-1][name] for name in _SUMS}
        if on_record is not None:
            on_record(history[-1])
        certificate, over = _judge(problem, smooth, width, x.double().cpu())
        solved = over <= tolerance and (certificate.kind == "duality gap" or run.status == "converged")
        if solved or left <= 0 or width <= _LEAST * first:
            status: Any = "converged" if solved else "not converged"
            return dataclasses.replace(run, history=history, rounds=done, status=status, certificate=certificate)
        width *= _FACTOR


def _smoothed(problem: Problem, width: float) -> Problem:
    made = Problem(
        problem.silos,
        loss=Smoothed(problem.loss, width),  # type: ignore[arg-type]
        regularizer=problem.regularizer,
        bias=problem.bias,
        weights=problem.weighting,
    )
    made.measures = problem.measures
    return made


def _translated(problem: Problem, record: Record, x: Any, round: int, before: dict[str, float]) -> Record:
    """A stage's record as one of the problem itself: its own objective at x, and totals since the start."""
    at = torch.as_tensor(x, dtype=torch.float64).cpu()
    value = problem.objective(at)
    loss = value - float(problem.regularizer.value(at))
    sums = {name: record[name] + before[name] for name in _SUMS}
    return Record({**record, "objective": value, "loss": loss, "round": round, **sums})


def _judge(problem: Problem, smooth: Problem, width: float, x: Tensor) -> tuple[Certificate, float]:
    """How far the objective is above its minimum: the gap, or what smoothing has taken away."""
    value, wider = problem.objective(x), _smoothed(problem, 1.01 * width)

    def slack(y: Tensor) -> float:
        """A lower bound on (w/2) sum_j o_j t_j^2, since the smooth loss is convex in its width w with that slope."""
        return max(0.0, float(smooth.evaluate(y).loss) - float(wider.evaluate(y).loss)) / 0.01

    gap = duality_gap(smooth, x, value=value, slack=slack)
    if gap is not None:
        return Certificate("duality gap", gap), gap
    measure = float(problem.regularizer.optimality(x, smooth.gradient(x)))
    return Certificate("optimality measure", measure), value - smooth.objective(x)
