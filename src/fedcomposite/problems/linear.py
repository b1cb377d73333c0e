"""Linear models: closed-form gradients for all clients at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedcomposite import rng
from fedcomposite.data.silos import DataError, Silos
from fedcomposite.problems.base import Evaluation, Smooth
from fedcomposite.problems.contract import combine, margins
from fedcomposite.problems.losses import Loss


@dataclass(frozen=True)
class _Block:
    """Clients of similar size, padded to the longest: padding has zero features and zero weight."""

    members: Tensor  # positions in the cohort
    X: Tensor  # (c, m, d)
    b: Tensor  # (c, m)
    weight: Tensor  # (c, m), 1/m_i on client i's samples


class Linear(Smooth):
    """f_i(x) = (1/m_i) sum_j phi(a_ij'x, b_ij), with an optional intercept as the last coordinate."""

    def __init__(
        self,
        silos: Silos,
        loss: Loss,
        *,
        bias: bool,
        weights: npt.NDArray[np.float64],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        if silos.features.ndim != 2:
            shape = "x".join(map(str, silos.features.shape[1:]))
            raise DataError(
                f"a linear model needs samples that are vectors, these are {shape}; flatten them or give a model"
            )
        self.loss, self.dtype, self.device = loss, dtype, device
        self._bias = bias
        self.X = self._design(silos.features)
        self.b = loss.prepare(silos, silos.targets).to(device, dtype)
        self._test = (
            (self._design(silos.test[0]), loss.prepare(silos, silos.test[1]).to(device, dtype))
            if silos.test is not None
            else None
        )
        self.dimension = self.X.shape[1]
        self.sizes = silos.sizes.astype(np.uint64)
        self.offsets = np.asarray(silos.offsets[:-1], np.uint64)
        self.ids = np.asarray(silos.ids, np.uint64)
        self._client_weights = weights
        per_sample = np.repeat(weights / silos.sizes, silos.sizes)
        self._sample_weights = torch.from_numpy(per_sample).to(device, dtype)
        self._padded: tuple[bytes, list[_Block]] = (b"", [])

    def _design(self, features: Tensor) -> Tensor:
        X = features.to(self.device, self.dtype)
        return torch.cat([X, X.new_ones(len(X), 1)], dim=1) if self._bias else X.contiguous()

    def start(self) -> Tensor:
        """Zero."""
        return self.X.new_zeros(self.dimension)

    def full(self, clients: rng.Ints) -> Callable[[Tensor], Tensor]:
        """Gradients on all samples: one pair of products per block of similarly sized clients."""
        blocks = self._blocks(clients)

        def gradient(x: Tensor) -> Tensor:
            if len(blocks) == 1:
                return self._gradient(x, blocks[0].X, blocks[0].b, blocks[0].weight)
            out = torch.empty_like(x)
            for block in blocks:
                out[block.members] = self._gradient(x[block.members], block.X, block.b, block.weight)
            return out

        return gradient

    def minibatch(self, x: Tensor, rows: Tensor) -> Tensor:
        """Gradients on the given rows."""
        return self._gradient(x, self.X[rows], self.b[rows], 1.0 / rows.shape[1])

    def _gradient(self, x: Tensor, X: Tensor, b: Tensor, weight: Tensor | float) -> Tensor:
        return combine(X, self.loss.derivative(margins(X, x), b).mul_(weight))

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
        if len(who) == len(self.sizes) and (sizes == longest).all() and (np.diff(first) == longest).all():
            X, b = self.X.view(len(who), longest, -1), self.b.view(len(who), longest)  # no copy
            return _Block(members, X, b, torch.full_like(b, 1.0 / longest))
        column = np.arange(longest)[None, :]
        inside = column < sizes[:, None]
        rows = torch.from_numpy(first[:, None] + np.where(inside, column, 0)).to(self.device)
        mask = torch.from_numpy(inside).to(self.device, self.dtype)
        weight = torch.from_numpy(inside / sizes[:, None]).to(self.device, self.dtype)
        return _Block(members, self.X[rows] * mask.unsqueeze(2), self.b[rows], weight)

    def evaluate(self, x: Tensor) -> Evaluation:
        """One pass over the pooled samples."""
        z = self.X @ x
        loss = self._sample_weights @ self.loss.value(z, self.b)
        gradient = (self.loss.derivative(z, self.b) * self._sample_weights) @ self.X
        metrics: dict[str, Tensor] = {}
        if self.loss.classifier:
            metrics["train_accuracy"] = self.loss.correct(z, self.b).double().mean()
            if self._test is not None:
                X, b = self._test
                metrics["test_accuracy"] = self.loss.correct(X @ x, b).double().mean()
        elif self._test is not None:
            X, b = self._test
            metrics["test_loss"] = self.loss.value(X @ x, b).mean()
        return Evaluation(loss, gradient, metrics)

    def smoothness(self, of: Literal["clients", "mean"] = "clients") -> float:
        """Curvature times the largest eigenvalue of X'X/m, by power iteration (no d x d matrix is formed)."""
        if of == "mean":
            largest = _power(lambda v: ((self.X @ v[0]) * self._sample_weights @ self.X)[None], self.start()[None])
            return self.loss.curvature * float(largest)
        largest = torch.stack([self._largest(B) for B in self._blocks(np.arange(len(self.sizes), dtype=np.uint64))])
        return self.loss.curvature * float(largest.max())

    def _largest(self, block: _Block) -> Tensor:
        """Largest eigenvalue of X_i'X_i/m_i over a block's clients."""
        like = block.X.new_empty(len(block.X), self.dimension)
        return _power(lambda v: combine(block.X, margins(block.X, v) * block.weight), like).max()


def _power(product: Callable[[Tensor], Tensor], like: Tensor, tolerance: float = 1e-10, most: int = 5000) -> Tensor:
    """Largest eigenvalue of positive semidefinite operators, one per row of ``like``."""
    generator = torch.Generator().manual_seed(0)
    v = torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like)
    v = v / v.norm(dim=1, keepdim=True)
    value = like.new_zeros(len(like))
    for _ in range(most):
        u = product(v)
        previous, value = value, (u * v).sum(1)
        v = u / u.norm(dim=1, keepdim=True).clamp_min(torch.finfo(u.dtype).tiny)
        if bool(((value - previous).abs() <= tolerance * value.abs().clamp_min(1e-300)).all()):
            break
    return value
