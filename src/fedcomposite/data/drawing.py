"""Learning the conditional models of an imputation: fits from sums over sites, and draws from their posterior."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fedcomposite.data.chained import PRIOR, ConditionalModels, Floats
from fedcomposite.data.faults import DataError
from fedcomposite.data.queries import Answer, Conditional

_STEPS = 25  # of Newton's method for one visit
_CLOSE = 1e-6  # deviations of the posterior: a step so short is the last


def drawn(
    total: Callable[[Conditional], Answer], chain: ConditionalModels, iterations: int, seed: int
) -> ConditionalModels:
    """The chain with all of its visits: every one is fitted at the present values of all copies, and drawn.

    ``total`` asks the sites and adds their answers up. Numbers are those of ``seed``, rounded to nine digits.
    """
    generator = np.random.default_rng([seed, 11])
    last: dict[str, Floats] = {}
    for _ in range(iterations):
        for name in chain.equations:
            made = _visit(total, chain, name, last, generator)
            rounded = [[float(f"{v:.9g}") for v in copy] for copy in made]
            chain = chain.model_copy(update={"draws": [*chain.draws, rounded]})
    return chain


def _visit(
    total: Callable[[Conditional], Answer],
    chain: ConditionalModels,
    name: str,
    last: dict[str, Floats],
    generator: np.random.Generator,
) -> Floats:
    """Parameters of an equation for every copy, ``(copies, outputs * width)``, and the deviation of a normal one."""
    d, normal = chain.outputs(name) * chain.width(name), not chain.columns[name]
    B = last.get(name, np.zeros((chain.copies, d)))
    for _ in range(_STEPS):
        told = total(Conditional(chain=chain, equation=name, points=B.tolist()))
        n, loss, gradient, H = unpacked(told, chain.copies, d)
        if n < 2:
            raise DataError(
                f"impute: sites tell too little about {name!r} for a conditional model; fill it otherwise, or drop it"
            )
        H = H + PRIOR * np.eye(d)
        step = np.linalg.solve(H, (gradient + PRIOR * B)[..., None])[..., 0]
        gain = np.einsum("md,mde,me->m", step, H, step)
        length = np.minimum(1.0, 3.0 / np.sqrt(np.maximum(gain, 1e-300)) * np.sqrt(d)) if not normal else 1.0
        B = B - step * np.broadcast_to(length, (chain.copies,))[:, None]
        if normal or float(gain.max()) < _CLOSE**2:
            break
    last[name] = B
    if normal:  # the step was exact, and the loss at its end is that at its beginning less half of what it gained
        squares = np.maximum(2 * loss - 2 * np.einsum("md,md->m", gradient, step)
                             + np.einsum("md,mde,me->m", step, H - PRIOR * np.eye(d), step), 1e-12)  # fmt: skip
        spread = np.sqrt(squares / generator.chisquare(max(n - d, 1.0), size=chain.copies))
    else:
        spread = np.ones(chain.copies)
    roots = np.linalg.cholesky(np.linalg.inv(H))
    B = B + spread[:, None] * np.einsum("mde,me->md", roots, generator.normal(size=B.shape))
    return np.column_stack([B, spread]) if normal else B


def unpacked(told: Answer, copies: int, d: int) -> tuple[float, Floats, Floats, Floats]:
    """Rows, losses, gradients and whole Hessians of an answer."""
    i, j = np.triu_indices(d)
    H = np.zeros((copies, d, d))
    H[:, i, j] = H[:, j, i] = told["hessian"].reshape(copies, -1)
    return float(told["n"][0]), told["loss"].astype(float), told["gradient"].reshape(copies, d).astype(float), H
