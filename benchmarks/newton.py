"""Rounds and bytes until a linear model is solved: Newton steps beside every composite method and federated FISTA.

    python -m benchmarks.newton                  # ProxNewton on all problems, checked against pooled solvers
    python -m benchmarks.newton --against        # six problems with every composite method and FISTA, as a table
    python -m benchmarks.newton --path           # 30 strengths, 20,000 features, 10 sites of 100 samples
    python -m benchmarks.newton --solve          # Heart Disease with kinks, or half of the clients
    python -m benchmarks.newton --sketch         # without Hessians, on sites alike and different, beside ProxNewton

``--only heart`` takes the problems whose name starts so. FISTA is what dsMTL does: one gradient per client and round,
an accelerated step at the server. The table has the rounds to a stationarity of 1e-6 and of 1e-9, and the kilobytes
from each client until then; in at most ``--rounds`` of 10 local steps, a tenth of that where a pass takes long.

Where columns depend on each other the minimiser is not unique: supports then agree up to ties, coordinates whose
gradient is exactly as large as lambda.
"""

from __future__ import annotations

import argparse
import math
import os
import resource
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import ClassVar, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import Tensor

import fedcomposite as fc
from fedcomposite import regularizers as reg
from fedcomposite.algorithms import REGISTRY, ProxNewton, SketchNewton
from fedcomposite.algorithms.base import Algorithm, Empty, Gradient, Info
from fedcomposite.analysis import certify
from fedcomposite.regularizers import Regularizer

TIGHT, LOOSE = 1e-9, 1e-6
AGAINST = ("heart, l1", "synthetic, l1", "a9a, l1", "mushrooms, l1", "ilea, l1", "digits, l1")
_CATEGORIES = (
    *("Killip", "miloc", "pmi", "sex", "smk", "dia", "htn", "hyp", "hrt", "ttr", "ant", "fam"),
    *("prevcvd", "prevcabg", "sho", "hig", "ste", "pan"),
)
STAYS = 40  # records without a better one after which a method will not get there
LARGE = 1_000_000  # numbers in the data from which on a tenth of the rounds has to do


class State(NamedTuple):
    """Server state and message of FISTA."""

    x: Tensor
    y: Tensor
    momentum: Tensor


class Reply(NamedTuple):
    """A gradient."""

    gradient: Tensor


@dataclass(frozen=True)
class FISTA(Algorithm[State, Empty, State, Reply]):
    """Beck and Teboulle's accelerated proximal gradient on the mean gradient."""

    info: ClassVar[Info] = Info("Beck, Teboulle: FISTA", 2009, regularizer="convex", participation="full", exact=True)
    step: float = 1.0

    def init(self, x0: Tensor, h: Regularizer) -> tuple[State, Empty]:
        """Start at x0."""
        return State(x0, x0, x0.new_ones(1)), Empty()

    def broadcast(self, server: State) -> State:
        """Send the state."""
        return server

    def local_round(self, message: State, client: Empty, grad: Gradient, h: Regularizer) -> tuple[Reply, Empty]:
        """One gradient at the extrapolated model."""
        return Reply(grad.full(message.y)), client

    def aggregate(self, server: State, reply: Reply, share: float, h: Regularizer) -> State:
        """One accelerated step."""
        x = h.prox(server.y - self.step * reply.gradient, self.step)
        momentum = (1 + (1 + 4 * server.momentum**2).sqrt()) / 2
        return State(x, x + (server.momentum - 1) / momentum * (x - server.x), momentum)

    def solution(self, server: State, h: Regularizer) -> Tensor:
        """The model."""
        return server.x


def _split(name: str, how: str = "iid") -> fc.Silos:
    return fc.data.load(name).partition(how, clients=10)


def _gusto(columns: int = 125) -> fc.Silos:
    """Sixteen regions: measurements, parts of their squares, categories, and products in order up to a number."""
    import pandas as pd

    table = pd.read_csv(Path(os.environ["FEDCOMPOSITE_DATA"]) / "multicentre" / "gusto.csv.gz")
    made: list[np.ndarray] = []
    for name in ("age", "sysbp", "pulse", "height", "weight"):
        v = table[name].fillna(table[name].median()).to_numpy(float)
        v = (v - v.mean()) / v.std()
        made += [v, np.maximum(v, 0) ** 2, np.maximum(v - 1, 0) ** 2]
    for name in _CATEGORIES:
        levels = pd.get_dummies(table[name], drop_first=True).to_numpy(float).T
        made += [level for level in levels if level.sum() > 20]
    pairs = (made[i] * made[j] for i in range(len(made)) for j in range(i))
    made += islice((v for v in pairs if v.std() > 0.05), columns - len(made))
    X = np.column_stack(made)
    X, dead = (X - X.mean(0)) / X.std(0), table["day30"].to_numpy()
    return fc.Silos.from_arrays([(X[rows], dead[rows]) for rows in table.groupby("regl").indices.values()])


def _logistic(silos: Callable[[], fc.Silos], h: Regularizer) -> Callable[[], fc.Problem]:
    return lambda: fc.Problem(silos(), loss="logistic", regularizer=h, bias=True, weights="samples")


def _heart() -> fc.Silos:
    return fc.data.load("heart_disease")


def _synthetic() -> fc.Silos:
    return fc.data.load("synthetic", clients=30, features=20, samples=100, alpha=1.0, beta=1.0, seed=0)


def _digits(h: Regularizer) -> fc.Problem:
    silos = fc.data.load("digits").partition("dirichlet", clients=5, alpha=0.5)
    return fc.Problem(silos, loss="multinomial", regularizer=h, weights="samples")


PROBLEMS: dict[str, Callable[[], fc.Problem]] = {
    "heart, l1": _logistic(_heart, reg.L1(0.005)),
    "heart, SCAD": _logistic(_heart, reg.SCAD(1.0, kappa=0.02)),
    "heart, MCP": _logistic(_heart, reg.MCP(0.02, 3.0)),
    "heart, group lasso": _logistic(_heart, reg.GroupLasso(0.005, groups=2)),
    "synthetic, l1": _logistic(_synthetic, reg.L1(0.005)),
    "a9a, l1": _logistic(lambda: _split("a9a"), reg.L1(0.005)),
    "w8a, l1": _logistic(lambda: _split("w8a"), reg.L1(0.0005)),
    "mushrooms, l1": _logistic(lambda: _split("mushrooms"), reg.L1(0.005)),
    "ilea, l1": lambda: fc.Problem(
        fc.data.load("ilea_schools"), loss="least_squares", regularizer=reg.L1(0.05), bias=True, weights="samples"
    ),
    "digits, l1": lambda: _digits(reg.L1(0.003)),
    "digits, ridge": lambda: _digits(reg.L2Squared(0.01)),
}


SPREADS: dict[str, Callable[[], fc.Problem]] = {
    "A9A, 10 sites alike": _logistic(lambda: _split("a9a"), reg.L1(0.005)),
    "A9A, sorted by label": _logistic(lambda: _split("a9a", "sorted"), reg.L1(0.005)),
    "mushrooms, 10 sites alike": _logistic(lambda: _split("mushrooms"), reg.L1(0.005)),
    "mushrooms, sorted by label": _logistic(lambda: _split("mushrooms", "sorted"), reg.L1(0.005)),
    "GUSTO-I, 16 regions, l1 0.005": _logistic(_gusto, reg.L1(0.005)),
    "GUSTO-I, 16 regions, l1 0.001": _logistic(_gusto, reg.L1(0.001)),
}


def pooled(problem: fc.Problem) -> tuple[str, Tensor] | None:
    """Another solver's answer on the pooled data, where one takes the problem."""
    X, y = problem.silos.features.double().numpy(), problem.silos.targets.double().numpy()
    h = problem.regularizer.h if isinstance(problem.regularizer, reg.On) else problem.regularizer
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if type(problem.loss).__name__ == "Multinomial" and isinstance(h, reg.L2Squared):
            from sklearn.linear_model import LogisticRegression

            model = LogisticRegression(C=1 / (h.lam * len(X)), fit_intercept=False, tol=1e-10, max_iter=5000)
            return "scikit-learn", torch.from_numpy(model.set_params(solver="newton-cg").fit(X, y).coef_.T.ravel())
        if type(problem.loss).__name__ == "LeastSquares":
            from sklearn.linear_model import Lasso

            lasso = Lasso(alpha=h.lam, tol=1e-14, max_iter=100_000).fit(X, y)  # type: ignore[attr-defined]
            return "scikit-learn", torch.from_numpy(np.r_[lasso.coef_, lasso.intercept_])
        if type(problem.loss).__name__ != "Logistic" or not isinstance(h, reg.L1 | reg.GroupLasso):
            return None
        return "skglm", _skglm(X, np.where(y > 0, 1.0, -1.0), h)


def _skglm(X: np.ndarray, y: np.ndarray, h: reg.L1 | reg.GroupLasso) -> Tensor:
    from skglm import GeneralizedLinearEstimator, datafits, penalties, solvers

    X = np.asfortranarray(X)
    if isinstance(h, reg.L1):
        estimator = GeneralizedLinearEstimator(
            datafits.Logistic(), penalties.L1(h.lam), solvers.ProxNewton(tol=1e-13, max_iter=500, max_pn_iter=5000)
        ).fit(X, y)
        return torch.from_numpy(np.r_[estimator.coef_.ravel(), np.ravel(estimator.intercept_)])
    size = int(h.groups)  # type: ignore[arg-type]
    pointer = np.arange(0, X.shape[1] + 1, size, dtype=np.int32)
    weights = np.full(len(pointer) - 1, math.sqrt(size))
    solver = solvers.GroupProxNewton(tol=1e-12, max_iter=500, fit_intercept=True)
    indices = np.arange(X.shape[1], dtype=np.int32)
    datafit = datafits.LogisticGroup(pointer, indices)
    penalty = penalties.WeightedGroupL2(h.lam, weights, pointer, indices)
    found = GeneralizedLinearEstimator(datafit, penalty, solver).fit(X, y)
    return torch.from_numpy(np.r_[found.coef_.ravel(), np.ravel(found.intercept_)])


def newton(name: str, problem: fc.Problem) -> bool:
    """One line: rounds and bytes, and how it compares with the pooled answer; whether all of it is as it should be."""
    began = time.perf_counter()
    run = fc.simulate(problem, ProxNewton(), rounds=50, tolerance=TIGHT)
    seconds, last = time.perf_counter() - began, run.history[-1]
    line = f"{name:20} ProxNewton       {run.rounds:5d} rounds  {last.stationarity:.0e}"
    line += f"  {_megabytes(problem, last):8.3f} MB up  {seconds:6.1f} s  {last.nonzeros:4d} of {problem.dimension}"
    right = run.status == "converged" and run.rounds <= 12
    other = pooled(problem)
    if other is not None:
        best = problem.objective(other[1])
        difference = (last.objective - best) / abs(best)
        support = _supports(problem, run.solution, other[1])
        line += f"  F - {other[0]} {difference:+.0e}, {support} support"
        right &= difference <= 1e-10 and support != "another"
    print(f"{line}  {certify(problem, run.solution)}", flush=True)
    return right


def sketched(name: str, problem: fc.Problem, draws: int) -> bool:
    """A row: rounds and kilobytes with Hessians and without, for some draws of directions, and how models agree."""
    exact = fc.simulate(problem, ProxNewton(), rounds=50, tolerance=1e-13)
    cells, found, right = [_reached(problem, exact, TIGHT)], [], True
    for draw in range(draws):
        run = fc.simulate(problem, SketchNewton(draw=draw), rounds=100, tolerance=TIGHT)
        found.append((run.rounds, 1000 * _megabytes(problem, run.history[-1])))
        right &= run.status == "converged" and run.rounds <= 45 and found[-1][1] <= 60
    rounds, kilobytes = (sorted(column) for column in zip(*found, strict=True))
    cells += [f"{found[0][0]} ({found[0][1]:.0f})"]
    cells += [f"{rounds[0]} to {rounds[-1]} ({kilobytes[0]:.0f} to {kilobytes[-1]:.0f})"]
    run = fc.simulate(problem, SketchNewton(), rounds=100, tolerance=1e-12)
    apart = run.solution - exact.solution
    margins = problem.silos.features.double() @ apart[:-1] + apart[-1]  # unique, also where the minimiser is not
    cells += [str(problem.dimension), f"{float(margins.abs().max()):.0e}"]
    print(f"| {name} | {' | '.join(cells)} |", flush=True)
    return right


def _supports(problem: fc.Problem, ours: Tensor, theirs: Tensor) -> str:
    """Whether two models have the same nonzeros, perhaps up to coordinates where both values are optimal."""
    differ = (ours != 0) != (theirs.abs() > 1e-9)
    if not bool(differ.any()):
        return "same"
    without = torch.where(differ, 0.0, ours)
    inside, outside = (float(problem.regularizer.optimality(x, problem.gradient(ours))) for x in (ours, without))
    return "same up to ties" if max(inside, outside) <= 1e-8 else "another"


def against(name: str, problem: fc.Problem, rounds: int, only: str = "") -> dict[str, str]:
    """The composite methods with practical steps, FISTA and ProxNewton: rounds and kilobytes to both accuracies."""
    L, rho = problem.smoothness(), problem.regularizer.rho
    able = [c for c in REGISTRY.values() if "convex" in c.info.regularizer]
    methods = {c.__name__: c.auto(L, rho) for c in able if rho == 0 or c.info.regularizer == "weakly convex"}
    if rho == 0:
        methods["FISTA"] = FISTA(step=1 / problem.smoothness("mean"))
    most, cells = rounds if problem.silos.features.numel() < LARGE else max(1, rounds // 10), {}
    for label, method in methods.items():
        if only and label not in only.split(","):
            continue
        began, every = time.perf_counter(), 1 if method.info.second_order else 5
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            stays = fc.callbacks.EarlyStopping("stationarity", patience=STAYS)
            plan = {"tolerance": TIGHT, "evaluate_every": every, "callbacks": [stays]}
            run = fc.simulate(problem, method, rounds=most, **plan)  # type: ignore[arg-type]
        cells[label] = " / ".join(dict.fromkeys(_reached(problem, run, goal) for goal in (LOOSE, TIGHT)))
        print(f"{name:20} {label:16} {cells[label]:30} {run.history[-1].stationarity:.0e}  "
              f"{time.perf_counter() - began:6.1f} s", flush=True)  # fmt: skip
    return cells


def _reached(problem: fc.Problem, run: fc.Run, goal: float) -> str:
    """Rounds and kilobytes from each client until a stationarity, or that it is not reached."""
    for record in run.history:
        if record.stationarity <= goal:
            return f"{record.round} ({1000 * _megabytes(problem, record):.0f})"
    if run.status == "stopped":
        return f"> stays at {min(record.stationarity for record in run.history):.0e}"
    return f">{run.rounds}"


def table(columns: dict[str, dict[str, str]]) -> str:
    """Methods in rows, those that are there first on most problems on top; problems in columns."""
    methods = list(dict.fromkeys(method for cells in columns.values() for method in cells))

    def far(method: str) -> tuple[float, ...]:
        firsts = [cells.get(method, ">").split(" ")[0] for cells in columns.values()]
        return sum(">" in first for first in firsts), sum(float(f) for f in firsts if ">" not in f)

    lines = [f"| method | {' | '.join(columns)} |", f"| --- |{' --- |' * len(columns)}"]
    for method in sorted(methods, key=far):
        cells = (column.get(method, "").replace("> s", "s") for column in columns.values())
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _megabytes(problem: fc.Problem, last: fc.Record) -> float:
    """Megabytes from each client."""
    return float(last.bytes_up / len(problem.silos) / 1e6)


def wide_path(features: int, sites: int = 10, samples: int = 100, count: int = 30, least: float = 0.05) -> bool:
    """A path of l1 logistic regressions down to a share of the largest useful strength."""
    generator = np.random.default_rng(0)
    truth = np.zeros(features)
    truth[:20] = generator.normal(size=20)
    arrays = []
    for _ in range(sites):
        X = generator.normal(size=(samples, features))
        arrays.append((X, np.sign(X @ truth + generator.normal(size=samples))))
    problem = fc.Problem(fc.Silos.from_arrays(arrays), loss="logistic", regularizer=reg.L1(1.0))
    top = float(problem.gradient(torch.zeros(features)).abs().max())
    worst, began = 0.0, time.perf_counter()
    factors = [top * least ** (k / count) for k in range(1, count + 1)]
    found = fc.path(problem, lambdas=factors)
    for factor, x, rounds in zip(factors, found.solutions, found.rounds, strict=True):
        miss = float(reg.L1(factor).optimality(x, problem.gradient(x)))
        worst = max(worst, miss)
        print(f"lambda {factor:.4f}  {rounds:2d} rounds  KKT {miss:.0e}  {int((x != 0).sum()):4d} nonzero")
    total, up = int(found.rounds.sum()), found.bytes_up / sites / 8
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{count} strengths, {features} features: {total} exchanges, KKT at most {worst:.0e}, "
          f"{up / 1e6:.1f} M floats up per site, {time.perf_counter() - began:.0f} s, {peak:.1f} GiB "
          f"(d x d would take {8 * features**2 / 2**30:.1f})")  # fmt: skip
    return total <= 5 * count and worst <= 1e-7


def kinks(tolerance: float = 1e-4) -> Iterator[tuple[str, fc.Run]]:
    """Losses with kinks, to a duality gap."""
    terms = {"ridge": reg.L2Squared(0.1), "group lasso": reg.GroupLasso(0.02, groups=2), "l1": reg.L1(0.02)}
    for loss, name in (("hinge", "ridge"), ("hinge", "group lasso"), ("hinge", "l1"), ("absolute", "l1")):
        problem = fc.Problem(_heart(), loss=loss, regularizer=terms[name], bias=True)
        yield f"{loss}, {name}", fc.solve(problem, tolerance=tolerance)


def halves(rounds: int) -> Iterator[tuple[str, fc.Run]]:
    """Half of the hospitals in a round: local steps, and features of very different sizes with and without scaling."""
    plan = {"participation": 0.5, "rounds": rounds}
    for steps in (1, 5, 20):
        problem = _logistic(_heart, reg.L1(0.005))()
        yield f"half of the clients, {steps} local steps", fc.solve(problem, local_steps=steps, tolerance=1e-8, **plan)
    hospitals, sizes = _heart(), 10.0 ** np.array([-2, 1, 0, 2, -1, 0, 1, 0, -2, 2])
    apart = fc.Silos.from_arrays([(np.asarray(X) * sizes, y) for X, y in (hospitals[i] for i in range(4))])
    problem = fc.Problem(apart, loss="logistic", regularizer=reg.L1(0.005), bias=True)
    yield "features from 0.01 to 100, scaled", fc.solve(problem, tolerance=1e-7, **plan)
    with mock.patch.object(sys.modules["fedcomposite.analysis.solve"], "worthwhile", return_value=False):
        yield "features from 0.01 to 100, as they are", fc.solve(problem, tolerance=1e-7, **plan)


def solved(rounds: int, tolerance: float = 1e-4) -> None:
    """A line for each problem that takes more than Newton steps."""
    for name, run in (*kinks(tolerance), *halves(rounds)):
        print(f"{name:40} {run.rounds:5d} rounds  {run.status}  {run.certificate}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", action="store_true", help="every composite method as well")
    parser.add_argument("--path", action="store_true", help="the path with many features")
    parser.add_argument("--only", default="", help="problems whose name starts so")
    parser.add_argument("--methods", default="", help="of --against, with commas; all if left out")
    parser.add_argument("--rounds", type=int, default=1000, help="most rounds of the first-order methods")
    parser.add_argument("--features", type=int, default=20_000, help="of the path")
    parser.add_argument("--solve", action="store_true", help="kinks, and half of the clients in a round")
    parser.add_argument("--sketch", action="store_true", help="without Hessians, beside ProxNewton")
    parser.add_argument("--draws", type=int, default=5, help="of the directions that --sketch tries")
    given = parser.parse_args()
    if given.sketch:
        print(
            "| problem | ProxNewton | SketchNewton | other draws | coordinates | margins differ by |\n|" + " --- |" * 6
        )
        chosen = {name: make for name, make in SPREADS.items() if name.startswith(given.only)}
        raise SystemExit(0 if all([sketched(name, make(), given.draws) for name, make in chosen.items()]) else 1)
    if given.solve:
        return solved(3 * given.rounds)
    if given.path:
        raise SystemExit(0 if wide_path(given.features) else 1)
    chosen = {name: make for name, make in PROBLEMS.items() if name.startswith(given.only)}
    if given.against:
        names = [name for name in chosen if given.only or name in AGAINST]
        print(table({name: against(name, chosen[name](), given.rounds, given.methods) for name in names}))
        return
    right = [newton(name, make()) for name, make in chosen.items()]
    raise SystemExit(0 if all(right) else 1)


if __name__ == "__main__":
    main()
