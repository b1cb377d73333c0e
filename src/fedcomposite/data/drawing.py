"""The conditional models of columns that some sites lack: fits from sums over the others, and draws of parameters."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fedcomposite.data.chained import ConditionalModels, Floats, Terms, maximum, parameters
from fedcomposite.data.faults import DataError
from fedcomposite.data.queries import Answer, Conditional, Lacking


def borrowing(
    total: Callable[[Conditional | Lacking], Answer], chain: ConditionalModels, seed: int
) -> ConditionalModels:
    """The chain with visits to the columns that some sites lack: each is fitted at all copies' values, and drawn.

    ``total`` asks the sites and adds their answers up. Numbers are those of ``seed``, rounded to nine digits. One such
    column needs one visit, since nothing that it follows follows it.
    """
    lacking = total(Lacking(chain=chain))["lacking"]
    names = [name for name, count in zip(chain.equations, lacking.tolist(), strict=True) if count]
    chain = chain.model_copy(update={"borrowed": names})
    generator = np.random.default_rng([seed, 11])
    last: dict[str, Floats] = {}
    for _ in range(chain.iterations if len(names) > 1 else 1):
        for name in names:
            found = _visit(total, chain, name, last, generator)
            rounded = [[float(f"{v:.9g}") for v in copy] for copy in found]
            chain = chain.model_copy(update={"draws": [*chain.draws, rounded]})
    return chain


def _visit(
    total: Callable[[Conditional | Lacking], Answer],
    chain: ConditionalModels,
    name: str,
    last: dict[str, Floats],
    generator: np.random.Generator,
) -> Floats:
    """Parameters of an equation for every copy."""
    d, normal = chain.outputs(name) * chain.width(name), not chain.columns[name]

    def ask(points: Floats) -> Terms:
        told = unpacked(total(Conditional(chain=chain, equation=name, points=points.tolist())), chain.copies, d)
        if told.n < 2:
            raise DataError(
                f"impute: sites tell too little about {name!r} for a conditional model; fill it otherwise, or drop it"
            )
        return told

    found = maximum(ask, last.get(name, np.zeros((chain.copies, d))), normal, chain.width(name))
    last[name] = found.B
    return parameters(found, normal, generator)


def unpacked(told: Answer, copies: int, d: int) -> Terms:
    """Rows, losses, gradients and whole Hessians of an answer."""
    i, j = np.triu_indices(d)
    H = np.zeros((copies, d, d))
    H[:, i, j] = H[:, j, i] = told["hessian"].reshape(copies, -1)
    return Terms(float(told["n"][0]), told["loss"].astype(float), told["gradient"].reshape(copies, d).astype(float), H)
