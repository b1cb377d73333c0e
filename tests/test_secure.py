"""Secure sums: the same results as ever, and nothing but sums for whoever carries the messages."""

import math

import pytest
import tomli_w
import torch

import fedcomposite as fc
from fedcomposite import algorithms
from fedcomposite.data import Silos
from fedcomposite.runtime.simulator import simulate
from fedcomposite.testing import small_problem

pytest.importorskip("flwr", reason="the extra [flower] is not installed")

from secure_sites import secure_sites
from test_federation import L1, LocalGrid, federate, method, opened, regularizer_of, write

from fedcomposite.federation.post import FederationError, Settings

SECURE = Settings(secure=True)
SKIP = Settings("skip", secure=True, patience=0.0)
CHANGING = {"changing_cohorts": True}


def near(a, b, tolerance=1e-9):
    """Records agree, apart from the clock, the bytes of compressed replies and what only single sites know."""
    hidden = {k for k in b if k.startswith("client_")} | {"evaluated_samples", "seconds", "bytes_up"}
    assert a.keys() - hidden == b.keys() - hidden
    for key in b.keys() - hidden:
        assert math.isclose(a[key], b[key], rel_tol=tolerance, abs_tol=tolerance), (key, a[key], b[key])


# -- the same numbers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "weights"),
    [(name, "uniform") for name in algorithms.REGISTRY]
    + [(name, "samples") for name in ("FedNMap", "Scaffold", "FedDR", "EControlDA")],
)
def test_equals_the_simulator(name, weights, tmp_path):
    """Every method, all and some of the sites, sums of all and sums that can be opened: models agree to 1e-9."""
    algorithm = method(name)
    problem = small_problem(algorithm)
    problem = fc.Problem(problem.silos, loss="logistic", regularizer=problem.regularizer, weights=weights)
    partial = algorithm.partial and algorithm.exchanges == 1
    cases = [(1.0, SECURE)] + [(0.5, SECURE)] * algorithm.partial + [(1.0, SKIP)] * partial
    for case, (share, settings) in enumerate(cases):
        text = write(algorithm, regularizer_of(algorithm), participation=share, batch_size=4)
        text = tomli_w.dumps({"problem": {"weights": weights}}) + text
        limits = opened(min_parties=2, changing_cohorts=case > 0)
        grid = LocalGrid(secure_sites(problem.silos, tmp_path / str(case), limits))
        _, run = federate(grid, text, settings)
        want = simulate(
            problem, algorithm, rounds=5, batch_size=4, participation=share, stationarity_step=0.1, backend="loop"
        )
        torch.testing.assert_close(run.solution, want.solution, rtol=0, atol=1e-9)
        for a, b in zip(run.history, want.history, strict=True):
            near(a, b)
