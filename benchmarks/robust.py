"""Robust means: what they do to methods among honest clients, and what attacks do to them.

    python benchmarks/robust.py

First table: nine honest clients with different least-squares models; the norm of the gradient of f at the model that a
method rests at, relative to that at the start, for the mean and each robust mean. Second table: ten clients with
different logistic models, two of which lie; the objective of the eight others above its minimum, after 60 rounds.
"""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

import fedcomposite as fc
from fedcomposite.aggregators import Aggregator, CoordinateMedian, GeometricMedian, NormClipping, TrimmedMean

RULES: dict[str, Aggregator | None] = {
    "mean": None,
    "CoordinateMedian": CoordinateMedian(),
    "TrimmedMean(2)": TrimmedMean(2),
    "GeometricMedian": GeometricMedian(),
    "NormClipping": NormClipping(),
}
METHODS = (
    "ProximalGradient", "FedAvg", "FedNMap", "Zhang", "Scaffold", "FedDyn", "FedDC", "FedPD", "Scaffnew",
    "ProxScaffnew", "FedSplit", "FedDR", "FedADMM",
)  # fmt: skip
ATTACKS = ("none", "sign flip", "large norm", "inner product", "label flip")


def different(clients: int = 9, features: int = 6, samples: int = 40, apart: float = 1.0, seed: int = 0) -> fc.Silos:
    """Clients with models of their own around a common one, least squares."""
    make = np.random.default_rng(seed)
    common, parts = make.normal(size=features), []
    for _ in range(clients):
        X = make.normal(size=(samples, features)) * make.uniform(0.7, 1.3)
        own = common + apart * make.normal(size=features)
        parts.append((X, X @ own + 0.1 * make.normal(size=samples)))
    return fc.Silos.from_arrays(parts)


def residual(name: str, rule: Aggregator | None, rounds: int = 200) -> float:
    """The gradient's norm at the end, in units of that at the start."""
    problem = fc.Problem(different(), loss="least_squares")
    method = fc.algorithms.REGISTRY[name].auto(problem.smoothness(), local_steps=5)
    run = fc.simulate(problem, method, rounds=rounds, evaluate_every=rounds, aggregator=rule)
    return run.history[-1]["stationarity"] / run.history[0]["stationarity"]


@dataclass(frozen=True)
class Attacked(Aggregator):
    """A rule whose first ``liars`` vectors are replaced by lies."""

    attack: Literal["none", "sign flip", "large norm", "inner product", "label flip"]
    rule_of: Aggregator | None = None
    liars: int = 2

    def rule(self, vectors: torch.Tensor) -> torch.Tensor:
        """Lie, then take the rule, or the mean."""
        lies, honest = vectors.clone(), vectors[self.liars :]
        if self.attack == "sign flip":
            lies[: self.liars] *= -3
        elif self.attack == "large norm":
            lies[: self.liars] = 100 * honest.norm(dim=1).max()
        elif self.attack == "inner product":
            lies[: self.liars] = -2 * honest.mean(0)
        return lies.mean(0) if self.rule_of is None else self.rule_of.rule(lies)


def logistic(flipped: int, clients: int = 10, apart: float = 0.3, seed: int = 1) -> tuple[fc.Silos, fc.Silos]:
    """All clients, the labels of the first ones flipped; and the others."""
    make = np.random.default_rng(seed)
    common, parts = make.normal(size=8), []
    for i in range(clients):
        X = make.normal(size=(60, 8))
        y = np.where(X @ (common + apart * make.normal(size=8)) + make.logistic(size=60) > 0, 1.0, -1.0)
        parts.append((X, -y if i < flipped else y))
    return fc.Silos.from_arrays(parts), fc.Silos.from_arrays(parts[2:])


def gap(name: str, attack: str, rule: Aggregator | None) -> float:
    """The honest clients' objective above its minimum."""
    everyone, honest = logistic(2 if attack == "label flip" else 0)
    h = fc.regularizers.L2Squared(0.01)
    problem, judge = (fc.Problem(s, loss="logistic", regularizer=h) for s in (everyone, honest))
    method = fc.algorithms.REGISTRY[name].auto(problem.smoothness(), local_steps=5)
    lying = Attacked(attack, rule)  # type: ignore[arg-type]
    run = fc.simulate(problem, method, rounds=60, evaluate_every=60, aggregator=lying)
    least = judge.objective(fc.solve(judge).solution)
    return judge.objective(run.solution) - least


def print_table(head: str, rows: dict[str, dict[str, float]]) -> None:
    columns = list(next(iter(rows.values())))
    print(f"\n| {head} | " + " | ".join(columns) + " |\n|" + " --- |" * (len(columns) + 1))
    for name, row in rows.items():
        print(f"| {name} | " + " | ".join(f"{v:.0e}" if v < 1e-2 else f"{v:.2g}" for v in row.values()) + " |")


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if "--attacks" not in sys.argv:
        shown = {k: rule for k, rule in RULES.items() if k != "GeometricMedian"}  # slow, and like the others
        print_table("at rest", {m: {k: residual(m, rule) for k, rule in shown.items()} for m in METHODS})
    for method in ("FedAvg", "FedNMap"):
        table = {a: {k: gap(method, a, rule) for k, rule in RULES.items()} for a in ATTACKS}
        print_table(f"{method}: attack", table)


if __name__ == "__main__":
    main()
