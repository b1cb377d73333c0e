"""Twelve small problems over several sites on which methods meet: what each of them is hard for, and its optimum."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from fedcomposite import data
from fedcomposite.analysis.solve import solve
from fedcomposite.problems import Problem
from fedcomposite.regularizers import L1, MCP, SCAD, ElasticNet, Zero
from fedcomposite.runtime.simulator import SimulateOptions

CLIENTS, FEATURES, SAMPLES = 8, 20, 40


class Bout(NamedTuple):
    """A problem of the arena."""

    what: str
    make: Callable[[], Problem]
    options: SimulateOptions
    """How rounds are carried out on it."""
    seeds: tuple[int, ...] = (0,)


class Optimum(NamedTuple):
    """What :func:`fedcomposite.solve` found, and how certain that is."""

    value: float
    certificate: str
    bound: float
    """How far the optimum may be below the value; nan where no bound is known, as without convexity."""


def _drift(h: Any, **options: Any) -> Problem:
    return Problem(_silos(1.0), regularizer=h, **options)


def _silos(spread: float, copies: bool = False) -> data.Silos:
    """Sites that differ by ``spread``; with ``copies`` all of them have the samples of all."""
    made = data.load(
        "synthetic", clients=CLIENTS, features=FEATURES, samples=SAMPLES, alpha=spread, beta=spread, seed=3
    )
    if not copies:
        return made
    everything = made.features, made.targets
    return data.Silos.from_arrays([everything for _ in range(CLIENTS)])  # type: ignore[misc]


def _plain() -> Problem:
    return Problem(_silos(1.0), loss="least_squares", bias=True, regularizer=Zero())


def _sorted() -> Problem:
    return Problem(data.load("breast_cancer").partition("sorted", clients=CLIENTS), regularizer=L1(0.01))


def _unequal() -> Problem:
    silos = data.load("breast_cancer").partition("quantity", clients=CLIENTS, alpha=0.5, seed=1)
    return Problem(silos, weights="samples", regularizer=ElasticNet(0.01, 0.01))


def _lasso() -> Problem:
    silos = data.load("diabetes").partition("kmeans", clients=5, seed=1)
    return Problem(silos, loss="least_squares", bias=True, regularizer=L1(1.0))


ARENA: dict[str, Bout] = {
    "alike": Bout("logistic + l1, sites alike", lambda: Problem(_silos(0.0), regularizer=L1(0.01)), {}),
    "drift": Bout("logistic + l1, sites differ", lambda: _drift(L1(0.01)), {}),
    "lasso": Bout("least squares + l1, sites of clusters", _lasso, {}),
    "mcp": Bout("logistic + MCP, weakly convex", lambda: _drift(MCP(0.02, theta=3.0)), {}),
    "scad": Bout("logistic + SCAD, weakly convex", lambda: _drift(SCAD(0.02)), {}),
    "hinge": Bout("hinge + l1: a loss with a kink", lambda: _drift(L1(0.01), loss="hinge"), {}),
    "absolute": Bout("absolute + l1: a loss with a kink", lambda: _drift(L1(0.01), loss="absolute"), {}),
    "sorted": Bout("logistic + l1, sorted by label", _sorted, {}),
    "unequal": Bout("logistic + elastic net, unequal sites, weighted", _unequal, {}),
    "partial": Bout(
        "logistic + l1, half of the sites a round", lambda: _drift(L1(0.01)), {"participation": 0.5}, (0, 1)
    ),
    "noise": Bout("logistic + l1, minibatches of 8", lambda: _drift(L1(0.01)), {"batch_size": 8}, (0, 1)),
    "float32": Bout("least squares without h, single precision", _plain, {"dtype": torch.float32}),
}
"""Convex and weakly convex h, losses with kinks, sites alike, apart, sorted and unequal, rounds with some of the sites,
minibatches, single precision."""


@functools.lru_cache(maxsize=len(ARENA))
def optimum(name: str) -> Optimum:
    """The optimal value of a problem, certified; without convexity that of the point which Newton steps find."""
    problem = ARENA[name].make()
    run = solve(problem, tolerance=1e-10)
    found = run.certificate
    known = found is not None and found.kind == "duality gap"
    return Optimum(
        float(problem.objective(run.solution)),
        str(found) if found is not None else "no certificate",
        found.value if known and found is not None else float("nan"),
    )


def twin() -> Problem:
    """The problem "drift" with all samples at all sites: the same optimum, and what a method leaves is not drift."""
    return Problem(_silos(1.0, copies=True), regularizer=L1(0.01))
