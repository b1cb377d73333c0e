"""Sums with noise: what a silo answers under a budget for a whole study, and the most that one sample adds to each.

==============  =====================================================================================================
``quadratic``   count, loss, gradient and Hessian at a model: what fits, paths, folds and intervals are made of
``placed``      classes in bins of a model's margins: what the quality of a classifier is made of
``strayed``     sums of targets, predictions, their squares and products: the same of a linear regression
``lasting``     samples in cells of time, by cause of the event: what curves of times to an event are made of
==============  =====================================================================================================

The table of a site has a fourth one, :class:`fedcomposite.data.queries.Census`, see
:func:`fedcomposite.data.census.noised_census`.

An answer is made of blocks. The piece that one sample adds to block b has at most the norm B_b; the block gets normal
noise of deviation s B_b / sqrt(p_b), where s is the noise of the budget and the parts p_b add up to 1. Divided by
B_b / sqrt(p_b), the whole answer is a vector in which one sample has at most the norm

    sqrt(sum_b p_b |piece_b|^2 / B_b^2)  <=  sqrt(sum_b p_b)  =  1,

with noise of deviation s: one Gaussian query of sensitivity 1, whether the sample is there or not. Answers about the
parts of one division of the samples are one query together, since a sample is in one part only; every sample is put
into its part by a coin of its own, so that the others do not move when one goes.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedcomposite import rng
from fedcomposite.privacy import BudgetError, StudyBudget
from fedcomposite.problems.losses import Cox, LeastSquares, Loss
from fedcomposite.problems.risk_sets import CAUSE, TIME
from fedcomposite.runtime.protocol import ALL, Request, Rows, Silo, Sums

PARTS = {"count": 0.05, "loss": 0.05, "gradient": 0.6, "hessian": 0.3}
"""Of the budget of a quadratic, for its blocks: the loss is a constant where models are compared."""
_COINS = 4  # a stream of random numbers beside those of protocol.Rows
_WITHIN = 1 - 1e-12  # rounding does not lengthen a row beyond its bound

Normal = Callable[[int], npt.NDArray[np.float64]]
"""Gives so many standard normal numbers."""


class BoundedSums(NamedTuple):
    """Sums to which a sample adds a piece of bounded norm."""

    sums: Tensor
    bound: float
    part: float = 1.0
    unit: Tensor | None = None  # entries are so many times the coordinates in which the norm is taken

    def noised(self, budget: StudyBudget, normal: Normal) -> Tensor:
        """The sums with this site's noise."""
        drawn = torch.from_numpy(normal(self.sums.numel())).view(self.sums.shape)
        return self.sums + deviation(budget, self.bound, self.part) * (
            drawn if self.unit is None else drawn * self.unit
        )


def deviation(budget: StudyBudget, bound: float, part: float = 1.0) -> float:
    """Of the noise that one site adds to a block."""
    return budget.noise * math.sqrt(budget.share / part) * bound


# -- requests ---------------------------------------------------------------------------------------------------------


def quadratic(x: Tensor, rows: Rows = ALL) -> Request:
    """Ask for count, loss, gradient and the Hessian's upper triangle at x, as sums over the rows."""
    return Request("quadratic", {"x": x}, {}, rows)


def placed(scored: Tensor, edges: Tensor, part: str = "train", rows: Rows = ALL) -> Request:
    """Ask how many samples of class 0 and of class 1 are in the bins of margins between edges.

    ``scored`` is one model, ``(1, d)``; or one for each fold of a division, by which the fold's samples are scored:
    ``rows`` is then the first fold.
    """
    return Request("placed", {"scored": scored, "edges": edges}, {}, rows, part)


def strayed(scored: Tensor, part: str = "train", rows: Rows = ALL) -> Request:
    """Ask for sums of targets and predictions of a linear regression; models are as for :func:`placed`."""
    return Request("strayed", {"scored": scored}, {}, rows, part)


STRAYED = ("weight", "targets", "target_squares", "means", "mean_squares", "products", "absolute")
"""The sums of ``strayed``, as ``protocol.RESIDUALS`` calls them."""


def lasting(times: Tensor, x: Tensor, edges: Tensor, causes: int = 1, part: str = "train", rows: Rows = ALL) -> Request:
    """Ask how many samples are censored or have an event of each cause in the cells of time up to a grid's times.

    Groups are bins of the margins a'x between ``edges``, as for ``protocol.timetable``.
    """
    return Request("lasting", {"times": times, "x": x, "edges": edges}, {"causes": causes}, rows, part)


def cost(requests: Sequence[Request], loss: Loss) -> int:
    """How many Gaussian queries the answers of one exchange are for the sample that is in most of them.

    Refuses what has no noised form.
    """
    smooth = loss.by_sample and loss.smooth and loss.outputs == 1
    fits = {
        "quadratic": smooth,
        "strayed": isinstance(loss, LeastSquares),
        "placed": loss.classifier and loss.outputs == 1,
        "lasting": isinstance(loss, Cox),
    }
    everybody, parts = 0, defaultdict[tuple[int, int, str], Counter[int]](Counter)
    for one in requests:
        if not fits.get(one.name, False):
            raise BudgetError(f"{one.name!r} of {loss} has no noised form; a study under a budget is without it")
        if one.rows == ALL or len(one.arrays.get("scored", ())) == one.rows.of:
            everybody += 1
        elif one.rows.kind == "fold" and one.rows.held:
            parts[one.rows.of, one.rows.seed, one.part][one.rows.number] += 1
        else:
            raise BudgetError(f"rows of kind {one.rows.kind!r} have no noised form: ask about all, or about one fold")
    return everybody + sum(max(each.values()) for each in parts.values())


def noised(silo: Silo, requests: Sequence[Request], budget: StudyBudget, bias: bool, normal: Normal) -> list[Sums]:
    """What a site says to requests under a budget; whoever calls this has charged :func:`cost` before.

    ``bias``: whether the last column of the features is the intercept's.
    """
    made = []
    for one in requests:
        own = silo.of_part(one.part)
        blocks = _BLOCKS[one.name](own, _weights(own, one.rows), one, budget, bias)
        made.append({key: block.noised(budget, normal) for key, block in blocks.items()})
    return made


def _folds(silo: Silo, rows: Rows) -> Tensor:
    """The fold of each sample, drawn for it alone."""
    drawn = rng.words(rows.seed, rng.Use.FOLD, silo.id, 0, _COINS, len(silo.X))
    return torch.from_numpy(((np.asarray(drawn, np.uint64) * np.uint64(rows.of)) >> np.uint64(32)).astype(np.int64))


def _weights(silo: Silo, rows: Rows) -> Tensor:
    """1 for the samples that count, 0 for the others."""
    return silo.X.new_ones(len(silo.X)) if rows == ALL else (_folds(silo, rows) == rows.number).double()


# -- the blocks -------------------------------------------------------------------------------------------------------


def bounds(loss: Loss, budget: StudyBudget, bias: bool) -> dict[str, float]:
    """The most that one sample adds to each block of a quadratic.

    A row a has |a|^2 <= row_clip^2 + 1 with an intercept. With |phi'| <= s and 0 <= phi'' <= k, clipped where the loss
    has no such bounds, the gradient phi' a has at most the norm s |a|, and the Hessian phi'' a a' has the Frobenius
    norm phi'' |a|^2 <= k |a|^2.
    """
    squared = budget.row_clip**2 + bias
    slope = loss.slope if math.isfinite(loss.slope) else budget.slope_clip
    curvature = loss.curvature if math.isfinite(loss.curvature) else budget.slope_clip
    return {
        "count": 1.0,
        "loss": budget.loss_clip,
        "gradient": slope * math.sqrt(squared),
        "hessian": curvature * squared,
    }


def clipped(X: Tensor, most: float, bias: bool) -> Tensor:
    """Rows whose features have at most this norm; longer ones are shortened, the intercept's 1 stays."""
    features = torch.nan_to_num(X[:, : X.shape[1] - bias])
    shorter = (_WITHIN * most / torch.linalg.vector_norm(features, dim=1, keepdim=True)).clamp(max=1.0)
    return torch.cat([features * shorter, X.new_ones(len(X), int(bias))], 1)


def triangle(d: int) -> tuple[Tensor, Tensor, Tensor]:
    """Places of an upper triangle, and the unit of its entries.

    Off the diagonal an entry stands for two of the matrix, so that it counts sqrt(2) in the Frobenius norm: the noise
    of the entry itself is by this smaller.
    """
    i, j = torch.triu_indices(d, d)
    return i, j, torch.full((len(i),), math.sqrt(0.5), dtype=torch.float64).masked_fill(i == j, 1.0)


def _quadratic(
    silo: Silo, weights: Tensor, request: Request, budget: StudyBudget, bias: bool
) -> dict[str, BoundedSums]:
    """Count, loss, gradient and Hessian; see :func:`bounds` for the most that a sample adds."""
    loss, x = silo.loss, request.arrays["x"]
    X, most = clipped(silo.X, budget.row_clip, bias), bounds(loss, budget, bias)
    z = torch.nan_to_num(X @ x + silo.shift)
    value = torch.nan_to_num(loss.value(z, silo.b)).clamp(-budget.loss_clip, budget.loss_clip)
    s = most["gradient"] / math.sqrt(budget.row_clip**2 + bias)
    k = most["hessian"] / (budget.row_clip**2 + bias)
    slope = torch.nan_to_num(loss.derivative(z, silo.b)).clamp(-s, s)
    second = torch.nan_to_num(loss.second(z, silo.b)).clamp(0.0, k)
    i, j, unit = triangle(len(x))
    sums = {
        "count": weights.sum().view(1),
        "loss": (weights @ value).view(1),
        "gradient": X.T @ (weights * slope),
        "hessian": (X.T @ (X * (weights * second).unsqueeze(1)))[i, j],
    }
    return {key: BoundedSums(v, most[key], PARTS[key], unit if key == "hessian" else None) for key, v in sums.items()}


def _placed(silo: Silo, weights: Tensor, request: Request, budget: StudyBudget, bias: bool) -> dict[str, BoundedSums]:
    """Classes in bins: a sample is in one cell, so that it adds a vector of norm 1."""
    edges, labels = request.arrays["edges"], silo.labels(silo.b)
    z, weights = _margins(silo, weights, request)
    at = torch.bucketize(z, edges, right=True)
    cells = torch.zeros(2 * (len(edges) + 1), dtype=torch.float64)
    counts = cells.index_add_(0, at + labels.clamp(0, 1) * (len(edges) + 1), weights)
    return {"counts": BoundedSums(counts.view(2, -1), 1.0)}


def _strayed(silo: Silo, weights: Tensor, request: Request, budget: StudyBudget, bias: bool) -> dict[str, BoundedSums]:
    """With targets b and predictions p within B = ``slope_clip``: 1, |b| and |p| up to B, products up to B^2.

    |b - p| is at most 2 B. Seven sums have a seventh of the query each.
    """
    most = budget.slope_clip
    z, weights = _margins(silo, weights, request)
    b, p = torch.nan_to_num(silo.b).clamp(-most, most), z.clamp(-most, most)
    pieces = [torch.ones_like(b), b, b * b, p, p * p, b * p, (b - p).abs()]
    bound = [1.0, most, most**2, most, most**2, most**2, 2 * most]
    found = zip(STRAYED, pieces, bound, strict=True)
    return {name: BoundedSums((weights @ piece).view(1), up_to, 1 / len(STRAYED)) for name, piece, up_to in found}


def _margins(silo: Silo, weights: Tensor, request: Request) -> tuple[Tensor, Tensor]:
    """Margins of samples by their models, and what they count: one model for all, or each fold its own."""
    scored = request.arrays["scored"]
    z = torch.stack([torch.nan_to_num(silo.margins(x)) for x in scored])
    if len(scored) == 1:
        return z[0].contiguous(), weights
    return z.gather(0, _folds(silo, request.rows).unsqueeze(0))[0].contiguous(), torch.ones_like(weights)


def _lasting(silo: Silo, weights: Tensor, request: Request, budget: StudyBudget, bias: bool) -> dict[str, BoundedSums]:
    """Groups, causes and cells of time: a sample is in one of them, so that it adds a vector of norm 1."""
    times, edges, causes = request.arrays["times"], request.arrays["edges"], int(request.numbers["causes"])
    group = torch.bucketize(torch.nan_to_num(silo.linear(request.arrays["x"])).contiguous(), edges, right=True)
    cell = torch.bucketize(torch.nan_to_num(silo.b[:, TIME]).contiguous(), times)
    cause = silo.b[:, CAUSE].long().clamp(0, causes)
    shape = len(edges) + 1, causes + 1, len(times) + 1
    at = (group * shape[1] + cause) * shape[2] + cell
    counts = torch.zeros(math.prod(shape), dtype=torch.float64).index_add_(0, at, weights)
    return {"counts": BoundedSums(counts.view(shape), 1.0)}


_BLOCKS: dict[str, Callable[[Silo, Tensor, Request, StudyBudget, bool], dict[str, BoundedSums]]] = {
    "quadratic": _quadratic,
    "placed": _placed,
    "strayed": _strayed,
    "lasting": _lasting,
}
NOISED = tuple(_BLOCKS)
"""The requests that have a noised form."""
