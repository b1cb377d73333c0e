"""Linear models: closed-form gradients for all clients at once."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedcomposite import rng
from fedcomposite.data.silos import DataError, Silos
from fedcomposite.data.sparse import Features, SparseRows, tensors_only
from fedcomposite.problems.base import Evaluation, Smooth
from fedcomposite.problems.losses import Loss, Multinomial
from fedcomposite.problems.measures import CountRows, MeanLoss, Measures, Part
from fedcomposite.problems.products import combine, hessians, margins, transposed
from fedcomposite.problems.risk_sets import EVENT, STRATUM
from fedcomposite.problems.sparse_products import Design, Stack
from fedcomposite.problems.spectrum import largest_eigenvalues

FAR = 10.0
"""Times its deviation: the mean from which on a feature is taken about it."""


def far_means(X: Tensor) -> Tensor:
    """The means of columns that are far from zero beside their deviation, zero for others."""
    if not X.numel():
        return X.new_zeros(X.shape[1])
    mean = X.mean(0)
    variance = torch.zeros_like(mean)
    for rows in torch.split(X, max(1, 2**16 // X.shape[1])):  # what a cache holds: no copy of all
        variance += (rows - mean).square().sum(0) / len(X)
    low, high = X.amin(0), X.amax(0)  # several times faster than both in one call
    far = torch.where(mean.abs() > FAR * variance.sqrt(), mean, 0.0)
    return torch.where(low == high, low, far)  # what is constant is zero without it, not rounding


def _far_means_of(X: Tensor, group: Tensor, groups: int) -> Tensor:
    """The same of every group, ``(groups, p)``."""
    number = torch.bincount(group, minlength=groups).unsqueeze(1)
    mean = X.new_zeros(groups, X.shape[1]).index_add_(0, group, X) / number
    variance = torch.zeros_like(mean).index_add_(0, group, (X - mean[group]).square()) / number
    at = group.unsqueeze(1).expand_as(X)
    low, high = (mean.scatter_reduce(0, at, X, kind, include_self=False) for kind in ("amin", "amax"))
    far = torch.where(mean.abs() > FAR * variance.sqrt(), mean, 0.0)
    return torch.where(low == high, low, far)


@dataclass(frozen=True)
class _Block:
    """Clients of similar size, padded to the longest: padding has zero features and zero weight."""

    members: Tensor  # positions in the cohort
    X: Tensor | Stack  # (c, m, d)
    b: Any  # (c, m), or (c, m, C) with several outputs; as the loss places them
    weight: Tensor  # (c, m) or (c, m, 1), 1/m_i on client i's samples (1 for a sum)
    offset: Tensor | None  # (c, m), what is added to the margins

    @property
    def data(self) -> tuple[Tensor | Stack, Any, Tensor, Tensor | None]:
        """What a gradient is computed from."""
        return self.X, self.b, self.weight, self.offset


class Linear(Smooth):
    """f_i(x) = (1/m_i) sum_j phi(a_ij'x + t_ij, b_ij), with an optional intercept as the last coordinate.

    The offsets t_ij are zero unless the silos have some. Samples with weights o_ij count o_ij / sum_j o_ij in place of
    1/m_i. A loss with C outputs has x = the
    ``(features, C)`` matrix, row by row, and C intercepts as the last coordinates. A loss with ``reduction="sum"``
    leaves out 1/m_i, or the division by the sum of weights.
    """

    def __init__(
        self,
        silos: Silos,
        loss: Loss,
        *,
        bias: bool,
        weights: npt.NDArray[np.float64],
        dtype: torch.dtype,
        device: torch.device,
        measures: Measures | None = None,
    ) -> None:
        if silos.features.ndim != 2:
            shape = "x".join(map(str, silos.features.shape[1:]))
            raise DataError(
                f"a linear model needs samples that are vectors, these are {shape}; flatten them or give a model"
            )
        self.loss = loss = loss.adapt(silos)
        self._silos = silos
        self.outputs = loss.outputs
        self.measures = Measures.of(loss) if measures is None else measures
        self.dtype, self.device = dtype, device
        self._bias = bias
        self.X = self._design(silos.features)
        self._offset = self._placed_offset(silos.margin_offsets)
        if bias and not loss.by_sample:
            raise DataError(f"{loss} has no intercept, which its baseline takes up: leave bias out")
        exact = dtype if loss.by_sample else torch.float64  # times that differ must not become ties
        self.b = loss.prepare(silos, silos.targets).to(device, exact)
        self.X = self._levelled(self.X)
        self.dimension = self.X.shape[1] * self.outputs
        self.bias_coordinates = self.outputs if bias else 0
        self.sizes = silos.sizes.astype(np.uint64)
        self.offsets = np.asarray(silos.offsets[:-1], np.uint64)
        self.ids = np.asarray(silos.ids, np.uint64)
        self._divisors = np.ones_like(weights) if loss.reduction == "sum" else silos.sizes.astype(np.float64)
        self._shares = torch.from_numpy(weights).to(device, dtype)
        self._importance = self._relative(silos)
        self._sample_weights = self._weighed(self._per_sample(weights / self._divisors))
        # A minibatch stands for all of its client's samples: the factor of its mean, where that is not 1.
        special = loss.reduction == "sum" or silos.weights is not None
        self._factors = self._weighed(self._per_sample(silos.sizes / self._divisors)) if special else None
        self._padded: tuple[bytes, list[_Block]] = (b"", [])
        sizes = silos.sizes.tolist() if self.measures.clients else [len(self.b)]
        self._rows, self._targets = CountRows.of(sizes, sizes, device), self._as_targets(self.b)
        self._held: dict[Part, tuple[Tensor | Design, Tensor, Tensor, CountRows]] = {}
        self._held_offsets: dict[Part, Tensor | None] = {}
        for part, held in silos.held_out.items():
            self._held_offsets[part] = self._placed_offset(silos.held_margin_offsets.get(part))
            b, count = loss.prepare(silos, held[1]).to(device, exact), [len(held[1])]
            if part in silos.held_by:
                b = loss.apart(b, silos.held_by[part].to(device))
            self._held[part] = self._design(held[0]), b, self._as_targets(b), CountRows.of(count, count, device)

    def _as_targets(self, b: Tensor) -> Tensor:
        """Prepared targets as metrics see them."""
        if not self.loss.classifier:
            return b
        return (b > 0).long() if self.outputs == 1 else b.argmax(-1)

    def _design(self, features: Features) -> Tensor | Design:
        if isinstance(features, SparseRows):
            if self.device.type != "cpu":
                raise DataError(f"sparse features are for the CPU, not {self.device}; make them dense: silos.dense()")
            return Design(features, self.dtype, self._bias)
        X = tensors_only(features, "a linear model").to(self.device, self.dtype)
        return torch.cat([X, X.new_ones(len(X), 1)], dim=1) if self._bias else X.contiguous()

    def _levelled(self, X: Tensor | Design) -> Tensor | Design:
        """Where a loss compares samples of a stratum alone: columns that are far from zero less their mean there.

        This changes no difference of margins, and what is constant becomes exactly zero.
        """
        if self.loss.by_sample or not isinstance(X, Tensor):
            return X
        made = X
        for rows in itertools.starmap(slice, itertools.pairwise(self._silos.offsets)):
            kinds, group = torch.unique(self.b[rows, STRATUM], return_inverse=True)
            far = far_means(X[rows]) if len(kinds) < 2 else _far_means_of(X[rows], group, len(kinds))[group]
            if bool(far.any()):
                made = X.clone() if made is X else made
                made[rows] -= far
        return made

    def _placed_offset(self, offset: Tensor | None) -> Tensor | None:
        if offset is not None and self.outputs > 1:
            raise DataError(f"margin offsets are for losses with one margin per sample; {self.loss} has {self.outputs}")
        return None if offset is None else offset.to(self.device, self.dtype)

    def _per_sample(self, values: npt.NDArray[np.float64]) -> Tensor:
        """A number per client, repeated for its samples, ``(samples,)``, or ``(samples, 1)`` with several outputs."""
        repeated = torch.from_numpy(np.repeat(values, self.sizes.astype(np.int64))).to(self.device, self.dtype)
        return repeated if self.outputs == 1 else repeated.unsqueeze(1)

    def _relative(self, silos: Silos) -> Tensor | None:
        """What each sample counts in its client, 1 on average (unchanged for a sum), ``(samples,)``."""
        if silos.weights is None:
            return None
        given = silos.weights.numpy()
        if self.loss.reduction == "mean":
            totals = np.add.reduceat(given, silos.offsets[:-1])
            given = given * np.repeat(silos.sizes / totals, silos.sizes)
        return torch.from_numpy(given).to(self.device, self.dtype)

    def _weighed(self, values: Tensor) -> Tensor:
        """Numbers of samples, ``(samples,)`` or ``(samples, 1)``, times their importance."""
        return values if self._importance is None else values * self._importance.view(values.shape)

    @property
    def sample_weights(self) -> Tensor:
        """What each sample's loss counts in f, ``(samples,)``."""
        return self._sample_weights.view(-1)

    def lowest(self) -> float | None:
        """The infimum of the samples' losses, as they count in f; None where it is not known."""
        found = self.loss.lowest(self.b) if self.loss.by_sample else None
        return None if found is None else float(self.sample_weights @ found)

    def rounding(self, x: Tensor) -> float:
        """By how much rounding of products in margins may raise a convex f at x."""
        z = self.pooled_margins(x)
        sizes = ((self.X.abs() if isinstance(self.X, Tensor) else self.X) @ x.abs()).abs().view_as(z)
        off = torch.finfo(x.dtype).eps * sizes
        worst = torch.maximum(self.loss.value(z - off, self.b), self.loss.value(z + off, self.b))
        return float(self.sample_weights @ (worst - self.loss.value(z, self.b)))

    def start(self) -> Tensor:
        return torch.zeros(self.dimension, dtype=self.dtype, device=self.device)

    def coordinate_names(self, features: tuple[str, ...]) -> tuple[str, ...]:
        """Names of the coordinates of x from those of the features: ``age``, or ``age[2]`` for class 2."""
        names = (*features, "(intercept)") if self._bias else features
        if isinstance(self.loss, Multinomial) and self.loss.labels is not None:
            return tuple(f"{name}[{label}]" for name in names for label in self.loss.labels)
        return names

    def full(self, clients: rng.Ints) -> Callable[[Tensor], Tensor]:
        """Gradients on all samples: one pair of products per block of similarly sized clients."""
        blocks = self._blocks(clients)

        def gradient(x: Tensor) -> Tensor:
            if len(blocks) == 1:
                return self._gradient(x, *blocks[0].data)
            out = torch.empty_like(x)
            for block in blocks:
                out[block.members] = self._gradient(x[block.members], *block.data)
            return out

        return gradient

    def losses(self, clients: rng.Ints, x: Tensor) -> Tensor:
        """Losses on all samples, ``(m, 1)``."""
        out = x.new_empty(len(x), 1)
        for block in self._blocks(clients):
            z = self._margins(x[block.members], block.X, block.offset)
            out[block.members, 0] = self.loss.total(z, block.b, block.weight)
        return out

    def hessians(self, clients: rng.Ints, x: Tensor, at: Tensor) -> Tensor:
        """Hessians on all samples and the coordinates ``at``, ``(m, k, k)``."""
        out = x.new_empty(len(x), len(at), len(at))
        for block in self._blocks(clients):
            z = self._margins(x[block.members], block.X, block.offset)
            out[block.members] = self.loss.hessians(block.X, z, block.b, block.weight, at)
        return out

    def _margins(self, x: Tensor, X: Tensor | Stack, offset: Tensor | None) -> Tensor:
        z = margins(X, x if self.outputs == 1 else x.reshape(len(x), -1, self.outputs))
        return z if offset is None else z + offset

    def minibatch(self, x: Tensor, rows: Tensor) -> Tensor:
        """Gradients on the given rows."""
        if not self.loss.by_sample:
            raise DataError(f"{self.loss} has no minibatches, since risk sets are of all samples: leave batch_size out")
        weight = 1.0 / rows.shape[1] if self._factors is None else self._factors[rows] / rows.shape[1]
        X = self.X.take(rows) if isinstance(self.X, Design) else self.X[rows]
        offset = None if self._offset is None else self._offset[rows]
        return self._gradient(x, X, self.b[rows], weight, offset)

    def _gradient(self, x: Tensor, X: Tensor | Stack, b: Any, weight: Tensor | float, offset: Tensor | None) -> Tensor:
        return combine(X, self.loss.slopes(self._margins(x, X, offset), b, weight)).flatten(1)

    # -- what single samples add, for privacy -------------------------------------------------------------------------

    @property
    def divisors(self) -> npt.NDArray[np.float64]:
        """Their numbers of samples as they are told, or ones for a sum."""
        return self._divisors if self.loss.reduction == "sum" else super().divisors

    def check_private(self) -> None:
        """Refuse weights of samples, which are relative to those of all the others, and sparse features."""
        if not self.loss.by_sample:
            raise ValueError(f"privacy: in {self.loss} one sample is part of the terms of all others at risk")
        if self._importance is not None:
            raise ValueError("privacy: weights of samples are relative to their sum, so one sample changes the others'")
        if isinstance(self.X, Design):
            raise ValueError("privacy needs dense features, these are sparse; make them dense with silos.dense()")

    def _samples(self, x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Features, margins and targets of some rows."""
        assert isinstance(self.X, Tensor)
        X = self.X[rows]
        return X, self._margins(x, X, None if self._offset is None else self._offset[rows]), self.b[rows]

    def clipped(self, x: Tensor, rows: Tensor, mask: Tensor, clip: float) -> Tensor:
        """By the norms |phi'| ||a||, in closed form; a sample that overflows adds nothing."""
        X, z, b = self._samples(x, rows)
        slope = torch.nan_to_num(self.loss.derivative(z, b), 0.0, 0.0, 0.0)
        size = slope.abs() if self.outputs == 1 else torch.linalg.vector_norm(slope, dim=2)
        factor = mask * _shrink(size * torch.linalg.vector_norm(X, dim=2), clip)
        return combine(X, slope * factor.view(*factor.shape, *(1,) * (slope.ndim - 2))).flatten(1)

    def clipped_losses(self, x: Tensor, rows: Tensor, mask: Tensor, clip: float) -> Tensor:
        """Values, cut off at ``clip``."""
        _, z, b = self._samples(x, rows)
        value = self.loss.value(z, b)
        return (torch.nan_to_num(value, clip).clamp(-clip, clip) * mask).sum(1, keepdim=True)

    def clipped_hessians(self, x: Tensor, rows: Tensor, mask: Tensor, at: Tensor, clip: float) -> Tensor:
        """By the norms ||phi''|| ||a||^2 of the whole Hessians."""
        X, z, b = self._samples(x, rows)
        second = torch.nan_to_num(self.loss.second(z, b), 0.0, 0.0, 0.0)
        size = second.abs() if self.outputs == 1 else torch.linalg.matrix_norm(second)
        weight = mask * _shrink(size * X.square().sum(2), clip)
        return hessians(X, second, weight if self.outputs == 1 else weight.unsqueeze(2), at, self.outputs)

    def seen(self, x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Responses to margins, and class numbers or targets."""
        w = x if self.outputs == 1 else x.reshape(-1, self.outputs)
        assert isinstance(self.X, Tensor)
        z = self.X[rows] @ w
        return self.loss.response(z if self._offset is None else z + self._offset[rows]), self._targets[rows]

    def curvature(self) -> float:
        return self.loss.curvature

    def _blocks(self, clients: rng.Ints) -> list[_Block]:
        """Pad the cohort's samples; the last cohort is kept, so full participation pads once."""
        key = clients.tobytes()
        if self._padded[0] != key:
            sizes = self.sizes[clients].astype(np.int64)
            if len(clients) * sizes.max() <= 1.5 * sizes.sum():
                groups = [np.arange(len(clients))]
            else:
                level = np.ceil(2 * np.log2(sizes))  # at most a factor sqrt(2) of padding within a level
                groups = [np.flatnonzero(level == v) for v in np.unique(level)]
            self._padded = key, [self._pad(clients, group) for group in groups]
        return self._padded[1]

    def _pad(self, clients: rng.Ints, group: npt.NDArray[np.int64]) -> _Block:
        who = clients[group]
        sizes, first = self.sizes[who].astype(np.int64), self.offsets[who].astype(np.int64)
        longest = int(sizes.max())
        members = torch.from_numpy(group).to(self.device)
        column = np.arange(longest)[None, :]
        inside = column < sizes[:, None]
        rows = torch.from_numpy(first[:, None] + np.where(inside, column, 0)).to(self.device)
        weight = self._weight(inside, who, rows)
        offset = None if self._offset is None else self._offset[rows] * torch.from_numpy(inside).to(self._offset)
        if isinstance(self.X, Design):
            return _Block(members, self.X.blocks(first, sizes), self.loss.placed(self.b[rows]), weight, offset)
        if len(who) == len(self.sizes) and (sizes == longest).all() and (np.diff(first) == longest).all():
            X, b = (t.view(len(who), longest, *t.shape[1:]) for t in (self.X, self.b))  # no copy
            return _Block(members, X, self.loss.placed(b), weight, offset)
        mask = torch.from_numpy(inside).to(self.device, self.dtype)
        return _Block(members, self.X[rows] * mask.unsqueeze(2), self.loss.placed(self.b[rows]), weight, offset)

    def _weight(self, inside: npt.NDArray[np.bool_], who: rng.Ints, rows: Tensor) -> Tensor:
        """The samples' weights within their clients, zero on padding."""
        weight = torch.from_numpy(inside / self._divisors[who][:, None]).to(self.device, self.dtype)
        if self._importance is not None:
            weight = weight * self._importance[rows]
        return weight if self.outputs == 1 else weight.unsqueeze(2)

    def evaluate(self, x: Tensor) -> Evaluation:
        """One pass over the pooled samples."""
        z = self.pooled_margins(x) if self.loss.by_sample or self.measures.metrics else x[:0]
        if self.loss.by_sample:
            loss = self._sample_weights.view(-1) @ self.loss.value(z, self.b)
            gradient = transposed(self.X, self.loss.derivative(z, self.b) * self._sample_weights).flatten()
        else:
            loss, gradient = self._by_clients(x)
        counts = self.measures.count("train", self.loss.response(z), self._targets, self._rows)
        for part, (X, b, targets, rows) in self._held.items():
            z = self._pooled(x, X, self._held_offsets.get(part))
            counts |= self.measures.count(part, self.loss.response(z), targets, rows)
            if self.measures.loss:
                counts[f"{part}/loss"] = MeanLoss().counts(self.loss.value(z, b), targets, rows.owner, 1)
        return Evaluation(loss, gradient, counts, self.measures)

    def _by_clients(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Loss and gradient of f from those of the clients."""
        everyone = np.arange(len(self.sizes), dtype=np.uint64)
        loss, gradient = x.new_zeros(()), torch.zeros_like(x)
        for block in self._blocks(everyone):
            z = self._margins(x.expand(len(block.members), -1), block.X, block.offset)
            total, slopes = self.loss.together(z, block.b, block.weight)
            shares = self._shares[block.members]
            loss, gradient = loss + shares @ total, gradient + shares @ combine(block.X, slopes).flatten(1)
        return loss, gradient

    def pooled_margins(self, x: Tensor) -> Tensor:
        """The margins of all training samples at one point, ``(samples,)`` or ``(samples, C)``."""
        return self._pooled(x, self.X, self._offset)

    def _pooled(self, x: Tensor, X: Tensor | Design, offset: Tensor | None) -> Tensor:
        z = X @ (x if self.outputs == 1 else x.reshape(-1, self.outputs))
        return z if offset is None else z + offset

    def scored(
        self, x: Tensor, features: Features, targets: Tensor, offset: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Responses to the samples' margins, and class numbers or targets."""
        b = self.loss.prepare(self._silos, targets).to(self.device, self.dtype)
        z = self._pooled(x, self._design(features), self._placed_offset(offset))
        return self.loss.response(z), self._as_targets(b)

    def smoothness(self, of: Literal["clients", "mean", "samples"] = "clients") -> float:
        """Curvature times the largest eigenvalue of X'X/m: of the clients, of f, or of single samples (||a||^2).

        Of a partial likelihood it is the share of events times the squared radius of the samples about their mean: a
        covariance over any risk set is below that.
        """
        if not math.isfinite(self.loss.curvature):
            reason = "its curvature is unbounded" if self.loss.smooth else "it has kinks"
            raise ValueError(
                f"{self.loss} has no smoothness constant ({reason}): choose the steps yourself, "
                f"on the scale of {1 / max(self.scale(of), 1e-300):.3g}, and decrease them if a run diverges"
            )
        return self.loss.curvature * self.scale(of)

    def scale(self, of: Literal["clients", "mean", "samples"] = "clients") -> float:
        """The largest eigenvalue of X'X/m, or at most 1 % more; see :mod:`fedcomposite.problems.spectrum`."""
        if not self.loss.by_sample:
            radii = self._radii()
            return float(self._shares.double() @ radii if of == "mean" else radii.max())
        if of == "samples":
            return float((self._row_norms().square() * self._worth()).max())
        if of == "mean":
            pooled = self.X.pooled if isinstance(self.X, Design) else self.X[None]
            return float(largest_eigenvalues(pooled, self._sample_weights.view(1, -1)))
        everyone = self._blocks(np.arange(len(self.sizes), dtype=np.uint64))
        return max(float(largest_eigenvalues(B.X, B.weight.view(B.X.shape[:2])).max()) for B in everyone)

    def _radii(self) -> Tensor:
        """Of every client, the weighted share of events times the largest squared distance from its mean."""
        weight, made = self._weighed(self._per_sample(1 / self._divisors)).double(), []
        for first, size in zip(self.offsets.astype(np.int64), self.sizes.astype(np.int64), strict=True):
            own = slice(int(first), int(first + size))
            if isinstance(self.X, Design):
                X = self.X.blocks(np.array([first]), np.array([size])).columns(torch.arange(self.dimension))[0]
            else:
                X = self.X[own].double()
            radius = (X - X.mean(0)).square().sum(1).max()
            made.append(float((weight[own] * self.b[own, EVENT]).sum() * radius))
        return torch.tensor(made, dtype=torch.float64, device=self.device)

    def lipschitz(self, of: Literal["clients", "samples"] = "clients") -> float:
        """Lipschitz constant of the f_i, slope * (1/m_i) sum_j ||a_ij||, or of single samples, slope * ||a_ij||.

        Infinite when the loss has unbounded slopes.
        """
        norms = self._row_norms()
        if of == "clients":
            norms = self._weighed(norms)
        if of == "samples":
            return self.loss.slope * float((norms * self._worth()).max())
        totals = norms.new_zeros(len(self.sizes)).index_add_(0, self._owners(), norms).cpu().numpy()
        return self.loss.slope * float((totals / self._divisors).max())

    def second_moment(self) -> float:
        """Bound on E||g||^2 for the gradient g on one random sample, the largest over the clients.

        It bounds the variance sigma^2 of a minibatch of size one: (slope^2 / m_i) sum_j ||a_ij||^2.
        """
        squares = (self._row_norms() * self._worth()).square()
        totals = squares.new_zeros(len(self.sizes)).index_add_(0, self._owners(), squares).cpu().numpy()
        return self.loss.slope**2 * float((totals / self.sizes).max())

    def _row_norms(self) -> Tensor:
        if isinstance(self.X, Design):
            return self.X.pooled.squares()[0].sqrt().to(self.dtype)
        norms: Tensor = torch.linalg.vector_norm(self.X, dim=1)
        return norms

    def _worth(self) -> Tensor | float:
        """How much a sample alone counts when it stands for its client: m_i for a sum."""
        return 1.0 if self._factors is None else self._factors.view(-1)

    def _owners(self) -> Tensor:
        return torch.from_numpy(np.repeat(np.arange(len(self.sizes)), self.sizes.astype(np.int64))).to(self.device)


def _shrink(norms: Tensor, clip: float) -> Tensor:
    """Factors that bring norms down to ``clip`` where they are above it, and to 0 where they overflow."""
    return torch.nan_to_num(clip / norms.clamp(min=clip), 0.0)
