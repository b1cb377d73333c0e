"""Regularizers of a matrix's singular values."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedcomposite._validation import Count, ZeroOrMore
from fedcomposite.regularizers.base import Regularizer, Step, power_of_two
from fedcomposite.regularizers.group import as_matrix


def _sound(X: Tensor) -> Tensor:
    """Whether each matrix is finite, ``(..., 1, 1)``; of others a decomposition ends in an error."""
    return X.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)


def _decomposition(X: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Singular vectors and values of each matrix, not a number where it is not finite."""
    sound = _sound(X)
    U, S, Vh = torch.linalg.svd(torch.where(sound, X, 0.0), full_matrices=False)
    return torch.where(sound, U, torch.nan), torch.where(sound.squeeze(-1), S, torch.nan), Vh


def _singular_values(X: Tensor) -> Tensor:
    sound = _sound(X)
    values: Tensor = torch.linalg.svdvals(torch.where(sound, X, 0.0))
    return torch.where(sound.squeeze(-1), values, torch.nan)


@dataclass(frozen=True)
class NuclearNorm(Regularizer):
    """h(x) = lam sum_i sigma_i(X), where the vector x holds the matrix X row by row: low rank (Fazel 2002).

    The prox soft-thresholds the singular values at lam * step (one batched decomposition).

    Parameters
    ----------
    lam : float
        Strength.
    shape : tuple of int, optional
        Shape of X; a convolution's ``(out, in, h, w)`` is seen as ``(out, in * h * w)``. With named parameters,
        ``NuclearNorm(lam).on("*.weight")``, it is taken from each of them.
    """

    lam: ZeroOrMore
    shape: tuple[Count, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shape is not None:
            as_matrix("NuclearNorm", self.shape)

    def value(self, x: Tensor) -> Tensor:
        """The sum of the singular values, times lam."""
        return self.lam * _singular_values(self._matrix(x)).sum(-1)

    def formula(self, v: Tensor, step: Step) -> Tensor:
        """The matrix with its singular values soft-thresholded."""
        power = power_of_two(v)
        U, S, Vh = _decomposition(self._matrix(v / power))
        small = (S - self.lam * step / power).clamp(min=0)
        return (U * small.unsqueeze(-2) @ Vh).flatten(-2) * power

    def subgradient(self, x: Tensor) -> Tensor:
        """The matrix lam U V' over the singular values above rounding."""
        U, Vh = self._factors(x)
        return self.lam * (U @ Vh).flatten(-2)

    def optimality(self, x: Tensor, gradient: Tensor) -> Tensor:
        """Distance to lam {U V' + W : U'W = 0, W V = 0, largest singular value of W at most 1}."""
        U, Vh = self._factors(x)
        G = -self._matrix(gradient)
        left = G - U @ (U.mT @ G)
        outer = left - (left @ Vh.mT) @ Vh  # the part that W can meet
        inner = G - outer - self.lam * U @ Vh
        excess = (_singular_values(outer) - self.lam).clamp(min=0)
        distance: Tensor = torch.linalg.vector_norm(torch.cat([inner.flatten(-2), excess], dim=-1), dim=-1)
        return distance

    def for_shape(self, shape: tuple[int, ...]) -> NuclearNorm:
        """The nuclear norm of a parameter of that shape."""
        return self if self.shape is not None else replace(self, shape=tuple(shape))

    def _matrix(self, x: Tensor) -> Tensor:
        if self.shape is None:
            raise ValueError(
                "NuclearNorm needs the shape of a matrix: give shape=(rows, columns), "
                "or name the parameters, .on('*.weight')"
            )
        rows, columns = as_matrix("NuclearNorm", self.shape)
        if rows * columns != x.shape[-1]:
            raise ValueError(
                f"NuclearNorm: shape {self.shape} has {rows * columns} entries, the vector has {x.shape[-1]}"
            )
        return x.reshape(*x.shape[:-1], rows, columns)

    def _factors(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Singular vectors, zero where the singular value is zero up to rounding."""
        X = self._matrix(x)
        U, S, Vh = _decomposition(X)
        rounding = max(X.shape[-2:]) * torch.finfo(X.dtype).eps
        kept = S.gt(rounding * S[..., :1])
        return U * kept.unsqueeze(-2), Vh * kept.unsqueeze(-1)
