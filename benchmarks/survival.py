"""Cox models over sites: TCGA-BRCA with FLamby's split, coverage of hazard ratios' intervals, speed of a pass.

    python -m benchmarks.survival tcga          # FEDCOMPOSITE_DATA/multicentre/tcga_brca.csv.gz
    python -m benchmarks.survival coverage      # 200 data sets per row, some minutes of one core
    python -m benchmarks.survival speed         # loss and gradient of 1,000,000 samples x 50 features

FLamby (Ogier du Terrail et al., NeurIPS 2022) has six sites with the patients' train and test parts fixed and a linear
Cox model, trained by seven strategies of averaging in five rounds of 100 local updates each. Its measure is lifelines'
concordance index, of each site's test part and of all test patients together ("Pooled Test"): both are told. Here the
partial likelihood is stratified by site, and every fit is solved to an optimality of 1e-9 of the first slope. Exchanges
of a fit are those until then.
"""

from __future__ import annotations

import argparse
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch

import fedcomposite as fc
from fedcomposite.problems.concordance import pairs
from fedcomposite.regularizers import L1, L2Squared

Floats = npt.NDArray[np.float64]
STRENGTHS = 0.03, 0.01, 0.003
FLAMBY = {  # means over seeds 42 to 46 of flamby/results/results_benchmark_fed_tcga_brca: of the sites' indices, of all
    "FedAdam": (0.815, 0.842),
    "FedYogi": (0.815, 0.842),
    "FedAdagrad": (0.813, 0.834),
    "FedAvg": (0.732, 0.735),
    "FedProx": (0.729, 0.717),
    "Scaffold": (0.687, 0.699),
    "Cyclic": (0.658, 0.661),
    "pooled training": (0.676, 0.704),
}


def tcga() -> tuple[fc.Silos, list[tuple[np.ndarray, np.ndarray]]]:
    """The training parts of FLamby's six sites, standardized by their moments, and the test parts."""
    table = pd.read_csv(Path(os.environ["FEDCOMPOSITE_DATA"]) / "multicentre" / "tcga_brca.csv.gz")
    names = [c for c in table if c not in ("pid", "E", "T", "fold", "fold2", "site")]
    train = table["fold"] == "train"
    mean, sd = table.loc[train, names].mean(), table.loc[train, names].std(ddof=0)
    X = (table[names] - mean) / sd.where(sd > 0, 1.0)
    y = table[["T", "E"]].to_numpy(float)
    parts = [(table["site"] == s, s) for s in sorted(table["site"].unique())]
    silos = fc.Silos.from_arrays(
        [(X[mine & train], y[mine & train]) for mine, _ in parts], names=[f"site {s}" for _, s in parts]
    )
    return silos, [(X[mine & ~train].to_numpy(), y[mine & ~train]) for mine, _ in parts]


def c_index(x: torch.Tensor, X: np.ndarray, y: np.ndarray) -> float:
    """The concordance index of some samples."""
    found = pairs(X @ x.numpy(), y[:, 0], y[:, 1])
    return float((found.right.sum() + found.tied.sum() / 2) / found.all.sum())


def tested(x: torch.Tensor, tests: list[tuple[np.ndarray, np.ndarray]]) -> str:
    """The mean over sites of the concordance index on their test part, and that of all test samples together."""
    pooled = (np.concatenate(column) for column in zip(*tests, strict=True))
    return f"{np.mean([c_index(x, X, y) for X, y in tests]):.3f} | {c_index(x, *pooled):.3f}"


def compare_tcga() -> None:
    """Single fits, and a cross-validation of 50 strengths and 5 folds."""
    silos, tests = tcga()
    print(f"{len(silos.targets)} training samples, {int(silos.targets[:, 1].sum())} events, {len(silos)} sites")
    print("| model | exchanges | optimality / first slope | mean C-index of the sites | C-index of all |")
    print("| --- | --- | --- | --- | --- |")
    for name, kind in (("l1", L1), ("ridge", L2Squared)):
        for lam in (*STRENGTHS, 0.0001) if kind is L2Squared else STRENGTHS:
            problem = fc.Problem(silos, loss="cox", regularizer=kind(lam), weights="samples")
            run = fc.solve(problem, tolerance=1e-9)
            first = float(problem.gradient(torch.zeros(problem.dimension)).abs().max())
            ratio = problem.optimality(run.solution) / first
            score = tested(run.solution, tests)
            print(f"| {name}, lambda = {lam:g} | {run.rounds} | {ratio:.1e} | {score} |", flush=True)
    problem = fc.Problem(silos, loss="cox", regularizer=L1(1.0), weights="samples")
    began = time.perf_counter()
    cv = fc.cross_validate(problem, folds=5, count=50, ratio=0.05)
    took = time.perf_counter() - began
    for choice in ("min", "1se"):
        score = tested(cv.solution(choice), tests)
        kept = int((cv.solution(choice) != 0).sum())
        print(f"| l1, lambda.{choice} of 50 strengths x 5 folds ({kept} of {problem.dimension}) | {cv.exchanges} | "
              f"all converged: {bool(cv.path.converged.all())} | {score} |")  # fmt: skip
    for name, (mean, pooled) in FLAMBY.items():
        print(f"| FLamby: {name} | {'' if name == 'pooled training' else 5} | | {mean:.3f} | {pooled:.3f} |")
    print(f"cross-validation in {took:.1f} s")


def drawn(samples: int, features: int, used: int, seed: int) -> tuple[fc.Silos, np.ndarray]:
    """Four sites of unequal size with baselines of their own, half of the samples censored."""
    rng = np.random.default_rng(seed)
    at = np.arange(features)
    root = np.linalg.cholesky(0.5 ** np.abs(at[:, None] - at[None, :]))
    truth = np.zeros(features)
    truth[rng.choice(features, used, replace=False)] = rng.choice([-0.5, 0.5], used)
    arrays = []
    for share in (0.4, 0.2, 0.2, 0.2):
        m = int(samples * share)
        X = rng.normal(size=(m, features)) @ root.T
        event = np.exp(rng.normal(0, 0.5)) * (rng.exponential(size=m) * np.exp(-X @ truth)) ** (
            1 / rng.uniform(0.8, 1.5)
        )
        censored = rng.exponential(size=m) * np.median(event) * 1.4
        arrays.append((X, np.c_[np.minimum(event, censored), event <= censored]))
    return fc.Silos.from_arrays(arrays), truth


CASES = (  # features, those that matter, samples
    (11, 6, 240),
    (11, 6, 600),
    (20, 8, 600),
    (40, 8, 240),
    (60, 8, 400),
    (40, 8, 200),
)


def coverage(sets: int, first: int, rows: list[int], every: int) -> None:
    """How often 95 % intervals hold the truth, of coefficients that are not zero and of those that are.

    Intervals are at the maximum of the likelihood, or about it less its bias, wherever a path was left. So they are
    worked out in NumPy; every ``every``-th set they are compared with fc.confidence at both strengths and lifelines.
    """
    print("| features | samples | events | fc.confidence | maximum of the likelihood | apart by, in standard errors |")
    print("| --- | --- | --- | --- | --- | --- |")
    for features, used, samples in (CASES[row - 1] for row in rows):
        inside: dict[str, list[Floats]] = {"unbiased": [], "maximum": []}
        some, events, apart = [], [], 0.0
        for seed in range(first, first + sets):
            silos, truth = drawn(samples, features, used, seed)
            found = Pooled.of(silos).estimates()
            some.append(truth != 0)
            events.append(float(silos.targets[:, 1].sum()))
            corrected = "unbiased" if events[-1] < 20 * features else "maximum"
            for name, kind in (("unbiased", corrected), ("maximum", "maximum")):
                inside[name].append(np.abs(found[kind] - truth) < 1.959964 * found["se"])
            if (seed - first) % every == 0:
                apart = max(apart, _apart(silos, found, corrected, seed))
        at = np.array(some)
        shown = [np.array(v) for v in inside.values()]
        cells = [f"{100 * v[at].mean():.1f} %, {100 * v[~at].mean():.1f} %" for v in shown]
        print(f"| {features} | {samples} | {np.mean(events):.0f} | {' | '.join(cells)} | {apart:.0e} |", flush=True)


class Pooled(NamedTuple):
    """Pooled samples with times that all differ, stratified by site: what a Cox model is made of, in NumPy."""

    parts: list[tuple[Floats, Floats, Floats]]  # of each site: features; who is at risk at its events; whose these are

    @classmethod
    def of(cls, silos: fc.Silos) -> Pooled:
        """From silos with times and events."""
        made = []
        for k in range(len(silos)):
            X, y = (np.asarray(v) for v in silos[k])
            event = y[:, 1] > 0
            made.append((X, (y[:, 0] >= y[event, :1]).astype(float), np.eye(len(X))[event]))
        return cls(made)

    def at(self, b: Floats) -> tuple[Floats, Floats]:
        """What each sample adds to the gradient, (n, p), and the Hessian."""
        rows, H = [], np.zeros((len(b), len(b)))
        for X, at_risk, own in self.parts:
            share = at_risk * np.exp(X @ b)
            share /= share.sum(1, keepdims=True)
            means, bent = share @ X, share.sum(0)
            rows.append(X * (bent - own.sum(0))[:, None] - (share - own).T @ means)
            H += X.T @ (X * bent[:, None]) - means.T @ means
        return np.vstack(rows), H

    def estimates(self) -> dict[str, Floats]:
        """The maximum of the likelihood, the same less its bias to first order, and standard errors."""
        b = np.zeros(self.parts[0][0].shape[1])
        for _ in range(50):
            rows, H = self.at(b)
            move = np.linalg.solve(H, rows.sum(0))
            b = b - move * min(1.0, 1.0 / np.abs(move).max())
            if np.abs(move).max() < 1e-10:
                break
        rows, H = self.at(b)
        M = np.linalg.inv(H)
        V = M @ rows.T @ rows @ M
        root = np.linalg.cholesky(M)

        def trace(x: Floats) -> float:
            U, H = self.at(x)
            return float(np.square(U @ root).sum() - (V * H).sum())

        slopes = [(trace(b + 1e-3 * s) - trace(b - 1e-3 * s)) / 2e-3 for s in root.T]
        return {"maximum": b, "unbiased": b - root @ slopes / 2, "se": np.sqrt(M.diagonal())}


def _apart(silos: fc.Silos, found: dict[str, Floats], corrected: str, seed: int) -> float:
    """By how many standard errors estimates of the package at both strengths, and lifelines', differ from these."""
    problem = fc.Problem(silos, loss="cox", regularizer=L1(1.0), weights="samples")
    cv = fc.cross_validate(problem, folds=3, count=4, ratio=0.1, seed=seed, tolerance=1e-2)
    tables = [fc.confidence(problem, cv.solution(choice)) for choice in ("min", "1se")]
    gaps = [table["estimate"].to_numpy() - found[corrected] for table in tables]
    gaps += [table["se"].to_numpy() - found["se"] for table in tables]
    gaps.append(_pooled(silos) - found["maximum"])
    return float(max(np.abs(gap / found["se"]).max() for gap in gaps))


def _pooled(silos: fc.Silos) -> Floats:
    """The coefficients of lifelines' fit to the pooled samples, stratified by site."""
    from lifelines import CoxPHFitter

    table = pd.DataFrame(silos.features.numpy()).add_prefix("x")
    table[["time", "event"]] = silos.targets.numpy()
    table["site"] = np.repeat(np.arange(len(silos)), silos.sizes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return CoxPHFitter().fit(table, "time", "event", strata=["site"]).params_.to_numpy()


def speed(samples: int, features: int) -> None:
    """Loss and gradient, gradient alone and Hessian, of one site and a hundred: on one thread and on two."""
    rng, before = np.random.default_rng(0), torch.get_num_threads()
    print("| sites | dtype | threads | loss and gradient | gradient | Hessian |")
    print("| --- | --- | --- | --- | --- | --- |")
    for sites in (1, 100):
        m = samples // sites
        data = []
        for _ in range(sites):
            X = rng.normal(size=(m, features))
            data.append((X, np.c_[rng.exponential(size=m) * np.exp(-0.3 * X[:, 0]), rng.integers(0, 2, m)]))
        problem = fc.Problem(fc.Silos.from_arrays(data), loss="cox", weights="samples")
        del data
        for dtype in (torch.float64, torch.float32):
            for threads in (1, 2):
                torch.set_num_threads(threads)
                cells = " | ".join(f"{cpu:.2f} s, {wall:.2f} s" for cpu, wall in passes(problem, dtype))
                print(f"| {sites} | {str(dtype)[6:]} | {threads} | {cells} |", flush=True)
    torch.set_num_threads(before)


def passes(problem: fc.Problem, dtype: torch.dtype) -> list[tuple[float, float]]:
    """Seconds of processors, and by the clock, of each: the least of five passes, of a Hessian of one."""
    smooth, features = problem.smooth(dtype), problem.dimension
    x, everyone = torch.full((features,), 0.01, dtype=dtype), np.arange(len(problem.silos), dtype=np.uint64)
    each, gradient = x.expand(len(everyone), -1), smooth.full(everyone)
    ways: list[Callable[[], object]] = [lambda: smooth.evaluate(x), lambda: gradient(each)]
    ways += [lambda: smooth.hessians(everyone, each, torch.arange(features))]
    times = []
    for way in ways:
        way()
        seen = []
        for _ in range(1 if way is ways[-1] else 5):
            cpu, wall = time.process_time(), time.perf_counter()
            way()
            seen.append((time.process_time() - cpu, time.perf_counter() - wall))
        times.append((min(cpu for cpu, _ in seen), min(wall for _, wall in seen)))
    return times


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["tcga", "coverage", "speed"])
    parser.add_argument("--sets", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 3, 4, 5, 6], help="of the table of coverage")
    parser.add_argument("--every", type=int, default=20, help="so many data sets are compared with fc.confidence")
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--features", type=int, default=50)
    given = parser.parse_args()
    if given.part == "tcga":
        compare_tcga()
    elif given.part == "coverage":
        coverage(given.sets, given.seed, given.rows, given.every)
    else:
        speed(given.samples, given.features)


if __name__ == "__main__":
    main()
