"""What a type checker has to accept, and to refuse, of the public names; ``make lint`` reads it, nothing runs it.

A line with ``type: ignore[...]`` is one that has to be refused: mypy warns of an ignore that ignores nothing.
"""

import numpy as np
import torch

import fedcomposite as fc
from fedcomposite.algorithms import FedAvg, FedCanon, FedNMap
from fedcomposite.regularizers import L1

FedAvg(local_steps=5, step=fc.schedules.Cosine(0.1, 0.001, 200))
FedAvg(5, fc.schedules.Warmup(5, fc.schedules.Inverse(0.1, 10.0)), server_step=fc.schedules.Power(1.0, 0.5))
FedCanon(5, 0.1, fc.schedules.Constant(0.5))
FedNMap(local_steps=10, step=0.1, server_step=1.0, gamma=0.5)
FedAvg(5, "0.1")  # type: ignore[arg-type]

silos: fc.Silos = fc.data.load("synthetic", clients=3)
problem: fc.Problem = fc.Problem(silos, regularizer=L1(0.1), penalty_factor={"age": 0.0}, class_weight="balanced")
fc.Problem(silos, penalty_factor=np.ones(3), class_weight={0: 1.0, 1: 2.0})
fc.Problem(silos, weights="sample")  # type: ignore[arg-type]

fc.LogisticRegression("cv", regularizer="l1", folds="sites", choice="1se", class_weight={"ill": 2.0}, pooled=False)
fc.LinearRegression(0.1, regularizer=L1(1.0), penalty_factor=[1.0, 0.0], rounds=50, seconds=2.0)
fc.LinearSVC(0.1, regularizer="l2", loss="hinge", class_weight="balanced")
fc.HuberRegression(0.1, regularizer="l1", delta=1.5, fit_intercept=False)
fc.LinearRegression(0.1, regularizer="l3")  # type: ignore[arg-type]
fc.LinearRegression(class_weight="balanced")  # type: ignore[call-arg]
fc.HuberRegression(0.1, fold=5)  # type: ignore[call-arg]
fc.QuantileRegression(0.1, folds="site")  # type: ignore[arg-type]

run: fc.Run = fc.solve(problem, tolerance=1e-8)
intervals = fc.confidence(problem, run)
again: torch.Tensor = fc.refit(problem, fc.LogisticRegression())
trained: fc.Run = fc.refit(problem, run, FedAvg(5, 0.1), rounds=3, seed=1)
fc.refit(problem, run, FedAvg(5, 0.1), rounds=3, sed=1)  # type: ignore[call-overload]
fc.cross_validate(problem, scoring="auc").solution("1se")
fc.cross_validate(problem, scoring="accuracy")  # type: ignore[arg-type]
fc.export(problem, run, "model.csv", format="csv")

try:
    fc.solve(problem)
except fc.errors.DataError as error:
    print(error.faults)
except (fc.errors.UserError, fc.errors.ClientError):
    raise
