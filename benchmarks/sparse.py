"""Sparse samples: the cost of a pass beside bare products, and a fit of 10,000 x 47,000 without a dense copy.

    python -m benchmarks.sparse            # both
    python -m benchmarks.sparse --quick    # small: does it run, not how fast

A pass is loss and gradient of a logistic regression over all samples. Its limit are the two products that it cannot do
without, scipy's X w and X' r; scikit-learn's pass (``LinearModelLoss.loss_gradient``) stands beside it. The fit goes on
to a duality gap of 1e-8, in float32 values and float64 vectors, with implicitly centred features or without; memory is
what the process grew by, next to what the dense matrix would take.
"""

from __future__ import annotations

import argparse
import itertools
import resource
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from scipy import sparse
from sklearn._loss.loss import HalfBinomialLoss
from sklearn.linear_model._linear_loss import LinearModelLoss

import fedcomposite as fc
from fedcomposite import regularizers as reg

CLIENTS = 10


def generate(samples: int, features: int, density: float, seed: int = 0) -> tuple[sparse.csr_array, np.ndarray]:
    """Counts of words, as it were: random places, and labels that 50 of the features decide."""
    generator = np.random.default_rng(seed)
    X = sparse.random_array((samples, features), density=density, format="csr", rng=generator, dtype=np.float32)
    telling = sparse.random_array((samples, 50), density=0.1, format="csr", rng=generator, dtype=np.float32)
    X = sparse.hstack([telling, X[:, 50:]], format="csr")
    w = generator.normal(size=50) * 3
    return X, np.where(telling @ w + 0.5 * generator.normal(size=samples) > 0, 1.0, -1.0)


def silos_of(X: sparse.csr_array, y: np.ndarray) -> fc.Silos:
    """The samples of ten clients."""
    cuts = np.linspace(0, len(y), CLIENTS + 1).astype(int)
    return fc.Silos.from_arrays([(X[a:b], y[a:b]) for a, b in itertools.pairwise(cuts)])


def seconds(works: Sequence[Callable[[], object]], repetitions: int) -> list[float]:
    """Processor time of each, the least of several repetitions, in turns."""
    best = [np.inf] * len(works)
    for _ in range(repetitions):
        for i, work in enumerate(works):
            began = time.process_time()
            work()
            best[i] = min(best[i], time.process_time() - began)
    return best


def passes(samples: int, features: int, repetitions: int) -> None:
    """The cost of a pass as nonzeros grow."""
    head = f"{'density':>8}{'nonzeros':>12}{'products':>11}{'pass':>9}{'clients':>9}{'sklearn':>9}{'ns/value':>10}"
    print(f"\nmilliseconds of processor time per pass, {samples} x {features}, float64\n{head}")
    for density in (0.0005, 0.0015, 0.005, 0.015):
        X, y = generate(samples, features, density)
        X = X.astype(np.float64)
        problem = fc.Problem(silos_of(X, y))
        smooth, everyone = problem.smooth(), np.arange(CLIENTS, dtype=np.uint64)
        x = torch.from_numpy(np.random.default_rng(1).normal(size=features) * 0.01)
        each = x.repeat(CLIENTS, 1)
        full = smooth.full(everyone)
        w, r, T = x.numpy(), np.ones(samples), X.T
        theirs = LinearModelLoss(base_loss=HalfBinomialLoss(), fit_intercept=False)
        labels = (y > 0).astype(np.float64)
        works = [
            lambda: (X @ w, T @ r),  # noqa: B023
            lambda: smooth.evaluate(x),  # noqa: B023
            lambda: full(each),  # noqa: B023
            lambda: theirs.loss_gradient(w, X, labels),  # noqa: B023
        ]
        timed = seconds(works, repetitions)
        cells = "".join(f"{1e3 * t:>{width}.2f}" for t, width in zip(timed, (11, 9, 9, 9), strict=True))
        print(f"{density:>8.2%}{X.nnz:>12,}{cells}{1e9 * timed[1] / X.nnz:>10.2f}")


def fits(samples: int, features: int) -> None:
    """A fit, and what it needs."""
    X, y = generate(samples, features, 0.0015)
    dense = samples * features * 8 / 1e6
    print(f"\nfit of {samples} x {features}, {X.nnz:,} nonzeros, float32; dense: {dense:,.0f} MB in float64")
    for standard, lam in ((False, 2e-3), (True, 2e-2)):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        silos = silos_of(X, y)
        silos = silos.standardize() if standard else silos
        problem = fc.Problem(silos, regularizer=reg.L1(lam), bias=True)
        began = time.perf_counter()
        run = fc.solve(problem, tolerance=1e-8)
        took = time.perf_counter() - began
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1e3
        kind = "centred" if standard else "as it is"
        found = f"{run.rounds} rounds, {took:.1f} s, {int((run.solution != 0).sum())} nonzeros, {run.certificate}"
        print(f"  {kind:<9} {run.status}: {found}; {grown:,.0f} MB more")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sparse", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small, and few repetitions")
    quick = parser.parse_args(argv).quick
    torch.set_num_threads(1)
    samples, features = (300, 1000) if quick else (10_000, 47_000)
    fits(samples, features)
    passes(samples, features, 3 if quick else 200)
    return 0


if __name__ == "__main__":
    sys.exit(main())
