"""Findings about the papers' methods that need no figure: what docs/findings.md tells of them, measured.

    python -m benchmarks.findings [--rounds N]

``twice``: FedMid with one client and one local step, beside the minima of f + h and f + 2h. ``relaxed``: FedDR with
alpha = 1 beside FedADMM. ``same``: FedCanon beside SCAFFOLD without h, in double precision; and what two runs that are
one method end with in single precision, a network, from the data of fedcanon-fig2. ``drift``: the control variates as
the papers write them, in single precision, beside the forms of this package. ``constants``: those that the proofs do
not give.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor

import fedcomposite as fc
from fedcomposite import theory
from fedcomposite.algorithms import AnyAlgorithm, FedADMM, FedCanon, FedDR, FedMid, FedNMap, Scaffold, Zhang
from fedcomposite.problems import Problem
from fedcomposite.regularizers import L1

FIGURE = Path(__file__).parent.parent / "docs" / "reproductions" / "fedcanon-fig2" / "data.csv"
TAU, LAM = 5, 0.05


def silos(clients: int, seed: int = 0, features: int = 12, samples: int = 40) -> fc.Silos:
    """Least squares: every client has coefficients and shifts of its own."""
    rng = np.random.default_rng(seed)
    parts = []
    for _ in range(clients):
        X = rng.normal(rng.normal(size=features), 1, (samples, features))
        parts.append((X, X @ (np.arange(features) % 3 + 2 * rng.normal(size=features)) + rng.normal(size=samples)))
    return fc.Silos.from_arrays(parts)


def problem(clients: int = 10, lam: float = LAM) -> Problem:
    """The problem of most findings."""
    return Problem(silos(clients), loss="least_squares", regularizer=L1(lam) if lam else None)


def twice() -> list[tuple[str, float]]:
    """Where FedMid ends with one client and one local step."""
    one = problem(1, 0.5)
    rule = FedMid(local_steps=1, step=1 / one.smoothness(), server_step=1.0)
    end = fc.simulate(one, rule, rounds=4000, evaluate_every=4000, progress=False).solution
    doubled = Problem(one.silos, loss="least_squares", regularizer=L1(1.0))
    goals = {"f + h": fc.solve(one, tolerance=1e-13).solution, "f + 2h": fc.solve(doubled, tolerance=1e-13).solution}
    return [
        (f"FedMid, one client, one step: distance to argmin {k}", float((end - x).norm())) for k, x in goals.items()
    ]


def relaxed() -> list[tuple[str, float]]:
    """The largest difference of FedDR's models with alpha = 1 and FedADMM's, with all clients and with some."""
    given, found = problem(), []
    eta = 1 / given.smoothness()
    same = {"local_steps": 3, "step": 0.4 * eta, "prox_step": eta}
    for share in (1.0, 0.3):
        options = {"rounds": 200, "keep_solutions": True, "participation": share, "evaluate_every": 200}
        a, b = (
            fc.simulate(given, m, progress=False, **options).solutions
            for m in (FedDR(alpha=1.0, **same), FedADMM(**same))
        )
        found.append((f"FedDR(1) - FedADMM, participation {share:g}: largest difference", float((a - b).abs().max())))
    return found


def same() -> list[tuple[str, float]]:
    """FedCanon is SCAFFOLD where h = 0; in single precision rounding alone tells two runs apart."""
    given = problem(lam=0.0)
    step = 0.2 / given.smoothness()
    options = {"rounds": 200, "keep_solutions": True, "batch_size": 8, "evaluate_every": 200, "progress": False}
    a, b = (
        fc.simulate(given, m, **options).solutions
        for m in (FedCanon(TAU, step, TAU * step), Scaffold(local_steps=TAU, step=step))
    )
    found = [("FedCanon - SCAFFOLD, h = 0, double precision: largest difference", float((a - b).abs().max()))]
    data = pd.read_csv(FIGURE)
    both = data[data["method"].isin(["FedCanon", "Scaffold"]) & (data["round"] > 0)]
    for (part, name), rows in both.groupby(["part", "partition"], sort=False):
        table = rows.pivot_table(index=["seed", "round"], columns="method", values="test_accuracy")
        gap = 100 * (table["FedCanon"] - table["Scaffold"]).abs()
        ends = gap[gap.index.get_level_values("round") == gap.index.get_level_values("round").max()]
        what = f"points of accuracy between them, float32 network, {name}" + (", K = 50" if part == "longer" else "")
        found += [(f"{what}: mean over records", float(gap.mean())), (f"{what}: most at the end", float(ends.max()))]
    return found


def canon(grad: Callable[[Tensor], Tensor], z: Tensor, c: Tensor, s: float, lam: float) -> tuple[Tensor, Tensor]:
    """A round of FedCanon as printed: Delta_i with c_i in it goes up, c_i + Delta - Delta_i stays."""
    y = z.expand_as(c)
    for _ in range(TAU):
        y = y - s * (grad(y) + c)
    delta = (z - y) / (s * TAU)
    mean = delta.mean(0)
    return shrink(z - s * TAU * mean, s * TAU * lam), c + mean - delta


def zhang(grad: Callable[[Tensor], Tensor], x_bar: Tensor, c: Tensor, s: float, lam: float) -> tuple[Tensor, Tensor]:
    """A round of Zhang's method as printed, eta_g = 1: z^ with c_i in it goes up."""
    start = shrink(x_bar, s * TAU * lam)
    pre, own = start.expand_as(c), torch.zeros_like(c)
    for t in range(TAU):
        g = grad(shrink(pre, t * s * lam) if t else start.expand_as(c))
        pre, own = pre - s * (g + c), own + g / TAU
    new = start + (pre.mean(0) - start)
    return new, (start - new) / (s * TAU) - own


def nmap(grad: Callable[[Tensor], Tensor], z: Tensor, c: Tensor, s: float, lam: float) -> tuple[Tensor, Tensor]:
    """A round of FedNMap as printed, gamma the effective step: y_i with c_i in it goes up."""
    gamma, local = s * TAU, z.expand_as(c)
    for _ in range(TAU):
        x = shrink(local, gamma * lam)
        local = local - s * (grad(x) + (local - x) / gamma + c)
    sent = (z - local) / (s * TAU)
    mean = sent.mean(0)
    return z - s * TAU * mean, c + mean - sent


def shrink(v: Tensor, by: float) -> Tensor:
    """The prox of l1."""
    return v.sign() * (v.abs() - by).clamp(min=0)


def printed(name: str, given: Problem, s: float, rounds: int, every: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The models of a method as printed, every so many rounds, and the last c_i."""
    X = torch.stack([given.silos[i][0] for i in range(10)]).to(dtype)
    y = torch.stack([given.silos[i][1] for i in range(10)]).to(dtype)

    def grad(at: Tensor) -> Tensor:
        return torch.einsum("nmd,nm->nd", X, torch.einsum("nmd,nd->nm", X, at) - y) / X.shape[1]

    model, c, models = torch.zeros(X.shape[2], dtype=dtype), torch.zeros(10, X.shape[2], dtype=dtype), []
    for number in range(1, rounds + 1):
        model, c = {"FedCanon": canon, "Zhang": zhang, "FedNMap": nmap}[name](grad, model, c, s, LAM)
        if number % every == 0:
            models.append(model if name == "FedCanon" else shrink(model, s * TAU * LAM))
    return torch.stack(models), c


def as_here(s: float) -> dict[str, AnyAlgorithm]:
    """The same methods in the forms of this package, with an effective step of s tau."""
    return {
        "FedCanon": FedCanon(TAU, s, s * TAU), "Zhang": Zhang(TAU, s, 1.0), "FedNMap": FedNMap(TAU, s, gamma=s * TAU)
    }  # fmt: skip


def drift(rounds: int) -> list[tuple[str, float]]:
    """Stationarity in single precision, the least of 40 looks and the last, as printed and as here."""
    given, every, found = problem(), rounds // 40, []
    s = 0.5 / given.smoothness() / TAU
    for name, method in as_here(s).items():
        models, c = printed(name, given, s, rounds, every, torch.float32)
        run = fc.simulate(
            given, method, rounds=rounds, evaluate_every=every, dtype=torch.float32, progress=False, keep_solutions=True
        )
        ours = run.solutions[every::every]
        for what, seen in (("as printed", models), ("as here", ours)):
            values = [_stationarity(given, x.double()) for x in seen]
            found += [
                (f"{name} {what}, float32: least stationarity", min(values)),
                (f"{name} {what}, float32: stationarity after {rounds} rounds", values[-1]),
            ]
        found.append((f"{name} as printed: norm of the mean of the c_i at the end", float(c.mean(0).norm())))
    return found


def _stationarity(given: Problem, x: Tensor) -> float:
    """||x - P_s(x - s grad f(x))|| / s, s = 1 / L, in double precision."""
    s = 1 / given.smoothness()
    return float((x - given.regularizer.prox(x - s * given.gradient(x), s)).norm()) / s


def constants() -> list[tuple[str, float]]:
    """Printed and derivable constants, at the steps of the theorems themselves."""
    found = []
    for name, number, n in (
        ("FedCanon", "1", 10), ("FedCanon", "2", 10), ("Zhang", "3.5", 10), ("Zhang", "3.5", 100), ("Zhang", "3.6", 10),
        ("Zhang", "3.6", 100), ("FedMLS", "3.2", 10),
    ):  # fmt: skip
        c = theory.Constants(L=1.0, mu=0.1, n=n, G=1.0, B=1.0, distance=1.0, rounds=100)
        method = fc.algorithms.build(name, **theory.steps(name, c, 5, theorem=number))
        for one in theory.corrections(method, c, theorem=number):
            what = f"{name}, {number}, n = {n}: factor of {one.what}"
            found += [(f"{what}, printed", one.printed), (f"{what}, from the proof", one.derivable)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20_000, help="of the runs in single precision")
    rounds = parser.parse_args().rounds
    for what, value in [*twice(), *relaxed(), *same(), *drift(rounds), *constants()]:
        print(f"{what:<95} {value:.3g}")


if __name__ == "__main__":
    main()
