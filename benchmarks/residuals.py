"""Which methods reach a stationary point, and what the others leave behind.

Ten clients with different logistic models, twelve features, full gradients, five local steps, every method with its own
``auto`` steps, on three problems: no regularizer ("smooth"), l1, and the weakly convex MCP. The table shows the final
norm of the prox-gradient mapping beside what is expected of it: exact, or the residual that the method's rule explains.

    python benchmarks/residuals.py [--rounds N]
"""

from __future__ import annotations

import argparse
import time
import warnings

import numpy as np
import torch

import fedcomposite as fc
from fedcomposite.algorithms import REGISTRY

CLIENTS, FEATURES, SAMPLES, LOCAL_STEPS = 10, 12, 60, 5
EXACT = 1e-10
MOST_LOCAL_WORK = 120  # rounds of FedMLS, whose local steps grow with the round
EXPECTED = {
    ("FedAvg", "smooth"): "drift, O(step)",
    ("FedAvg", "l1"): "drift, and a subgradient gives no zeros",
    ("FedAvgM", "smooth"): "beta times the drift of FedAvg",
    ("MimeLite", "smooth"): "drift, damped by momentum",
    ("STEM", "smooth"): "drift, O(step)",
    ("FedMid", "smooth"): "drift, O(step)",
    ("FedMid", "l1"): "drift, and h counted twice",
    ("FedMid", "mcp"): "drift, and h counted twice",
    ("FedDA", "smooth"): "drift, O(step)",
    ("FedDA", "l1"): "drift, O(step)",
    ("FastFedDA", "smooth"): "O(1/rounds)",
    ("FastFedDA", "l1"): "O(1/rounds)",
    ("FedCanon", "smooth"): "exact",
    ("FedCanonII", "smooth"): "exact",
    ("FedProx", "smooth"): "O(prox_step)",
    ("FedProx", "l1"): "O(prox_step), and a subgradient gives no zeros",
    ("FedMSPP", "smooth"): "O(prox_step)",
    ("FedMSPP", "l1"): "O(prox_step), and a subgradient gives no zeros",
    ("FedMLS", "smooth"): f"O(1/rounds), {MOST_LOCAL_WORK} rounds",
    ("FedMLS", "l1"): f"O(1/rounds), {MOST_LOCAL_WORK} rounds",
    ("Scaffold", "l1"): "a subgradient gives no zeros",
    ("Scaffnew", "l1"): "a subgradient gives no zeros",
}


def silos(seed: int = 0) -> fc.Silos:
    """Clients with their own coefficients and shifted features; labels are noisy, so that a minimiser exists."""
    rng = np.random.default_rng(seed)
    arrays = []
    for _ in range(CLIENTS):
        X = rng.normal(0.3 * rng.normal(size=FEATURES), 1, (SAMPLES, FEATURES))
        w = np.where(np.arange(FEATURES) < 5, 1.0, 0.0) + 0.7 * rng.normal(size=FEATURES)
        arrays.append((X, np.where(X @ w + rng.logistic(0, 1.5, SAMPLES) > 0, 1.0, -1.0)))
    return fc.Silos.from_arrays(arrays)


def problems() -> dict[str, fc.Problem]:
    data = silos()
    return {
        "smooth": fc.Problem(data, loss="logistic"),
        "l1": fc.Problem(data, loss="logistic", regularizer=fc.regularizers.L1(0.03)),
        "mcp": fc.Problem(data, loss="logistic", regularizer=fc.regularizers.MCP(0.03, 30.0)),
    }


def fits(name: str, problem: str) -> bool:
    """Whether a method has a rule for the problem's regularizer."""
    handled = REGISTRY[name].info.regularizer
    return problem == "smooth" or handled == "weakly convex" or (problem == "l1" and handled != "none")


def fedcanon_residual(problem: fc.Problem, x: torch.Tensor, beta: float) -> float:
    """(beta/2) (tau - 1) ||[H grad f]_support||, H the Hessian of f, by a difference quotient."""
    g, small = problem.gradient(x), 1e-6
    curved = (problem.gradient(x + small * g) - problem.gradient(x - small * g)) / (2 * small)
    return beta / 2 * (LOCAL_STEPS - 1) * float(curved[x != 0].norm())


def expected(name: str, kind: str) -> str:
    return EXPECTED.get((name, kind), "exact" if REGISTRY[name].info.exact else "a residual")


def row(name: str, kind: str, problem: fc.Problem, rounds: int) -> tuple[str, ...]:
    method = REGISTRY[name].auto(L=problem.smoothness(), rho=problem.regularizer.rho, local_steps=LOCAL_STEPS)
    claim = expected(name, kind)
    # Exact methods stop when they are there; a residual is settled long before.
    count = rounds if claim == "exact" else min(rounds, MOST_LOCAL_WORK if name == "FedMLS" else 1000)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fc.DivergenceWarning)  # shown as the status
        run = fc.simulate(problem, method, rounds=count, evaluate_every=50, tolerance=EXACT / 100)
    final = run.history[-1]["stationarity"]
    if name.startswith("FedCanon") and kind != "smooth":
        claim = f"(step/2)(tau-1)||H grad f|| = {fedcanon_residual(problem, run.solution, method.step):.2e}"
    verdict = "yes" if final <= EXACT else "no"
    flag = "" if (claim == "exact") == (verdict == "yes") else "  <- not so"
    shown = "diverged" if run.status == "diverged" else f"{final:.2e}"
    return name, kind, shown, str(run.rounds), verdict, claim + flag


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=4000, help="at most this many rounds per run (default 4000)")
    rounds = parser.parse_args().rounds
    began = time.perf_counter()
    print(f"{'method':<18}{'problem':<9}{'||G||':<11}{'rounds':<8}{'exact':<7}expected")
    for kind, problem in problems().items():
        for name in REGISTRY:
            if fits(name, kind):
                a, b, c, d, e, f = row(name, kind, problem, rounds)
                print(f"{a:<18}{b:<9}{c:<11}{d:<8}{e:<7}{f}", flush=True)
    print(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
