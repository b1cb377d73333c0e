"""The smoothness constant is an upper bound, within 1 %, whatever the spectrum."""

import numpy as np
import pytest
import torch

import fedcomposite as fc
from fedcomposite.problems.spectrum import largest_eigenvalues


def with_spectrum(values, samples, seed=0):
    """A matrix X with these eigenvalues of X'X."""
    rng = np.random.default_rng(seed)
    d = len(values)
    V, _ = np.linalg.qr(rng.standard_normal((d, d)))
    U, _ = np.linalg.qr(rng.standard_normal((samples, d)))
    return (U * np.sqrt(values)) @ V.T


def zeros_at(places, d):
    """Eigenvalues where Chebyshev's polynomial has its zeros: the slowest spectrum for Krylov's spaces."""
    return np.repeat(0.5 + 0.5 * np.cos(np.pi * (np.arange(places) + 0.5) / places), d // places)


def one_above(d, top):
    return np.r_[np.ones(d - 1), top]


SPECTRA = {
    "one direction in 1,000": one_above(1000, 1.3),
    "hardly above": one_above(1000, 1.02),
    "flat": np.ones(600),
    "cluster at the top": np.r_[np.linspace(0, 1, 700), 1 + 1e-4 * np.arange(20)],
    "linear": np.linspace(0, 1, 800),
    "geometric": 0.9 ** np.arange(600.0),
    "one": np.r_[np.zeros(599), 5.0],
    "far apart": np.r_[np.full(599, 1e-12), 1e6],
    "zero": np.zeros(600),
    "Chebyshev": np.r_[zeros_at(200, 800), 1.008],
    "dense at the top": 1 - np.linspace(1, 0, 900) ** 4,
    "small and exact": one_above(40, 1.0001),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECTRA)
def test_upper_bound_within_one_percent(name):
    values = SPECTRA[name]
    top = values.max()
    for seed in range(2):
        X = torch.tensor(with_spectrum(values, len(values) + 20, seed))
        for single in (False, True):
            given = X.float() if single else X
            found = float(largest_eigenvalues(given[None], torch.ones(1, len(X), dtype=given.dtype))[0])
            slack = 1e-6 if single else 1e-12
            assert top * (1 - slack) <= found <= 1.0102 * top
            if len(values) <= 512:
                assert found == pytest.approx(top, rel=1e-5 if single else 1e-12)


def test_many_starts_with_a_spectrum_that_hides_its_top():
    """The top is one direction among many equal ones, where a change from step to step says nothing."""
    d = 600
    generator = torch.Generator().manual_seed(1)
    diagonal = torch.eye(d, dtype=torch.float64).repeat(8, 1, 1)
    places = torch.randint(d, (8,), generator=generator)
    diagonal[torch.arange(8), places, places] = 1.3**0.5
    found = largest_eigenvalues(diagonal, torch.ones(8, d, dtype=torch.float64))
    assert bool((found >= 1.3).all())
    assert bool((found <= 1.3 * 1.0102).all())


def test_of_problems():
    d = 1000
    start = torch.randn(d, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    hidden = int(start.abs().argmin())  # the direction that a random vector points in least
    X = np.eye(d)
    X[hidden, hidden] = 1.3**0.5
    problem = fc.Problem(fc.Silos.from_arrays([(X * d**0.5, np.zeros(d))]), loss="least_squares")
    for of in ("clients", "mean"):
        assert 1.3 <= problem.smoothness(of) <= 1.32
    rng = np.random.default_rng(0)
    arrays = [(rng.standard_normal((m, 6)) * (1 + m), rng.standard_normal(m)) for m in (3, 50, 8)]
    for bias in (False, True):
        problem = fc.Problem(fc.Silos.from_arrays(arrays), loss="least_squares", bias=bias)
        designs = [np.c_[X, np.ones(len(X))] if bias else X for X, _ in arrays]
        each = [np.linalg.eigvalsh(A.T @ A / len(A))[-1] for A in designs]
        mean = np.linalg.eigvalsh(sum(A.T @ A / len(A) for A in designs) / 3)[-1]
        assert problem.smoothness() == pytest.approx(max(each), rel=1e-12)
        assert problem.smoothness() >= max(each)
        assert problem.smoothness("mean") == pytest.approx(mean, rel=1e-12)
        assert fc.Problem(fc.Silos.from_arrays(arrays), loss="least_squares", bias=bias).smoothness() == (
            problem.smoothness()
        )
