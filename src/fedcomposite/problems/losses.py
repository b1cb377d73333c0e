"""Losses of linear models, as functions of the margin z = a'x and the target b of one sample."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from fedcomposite._validation import suggest
from fedcomposite.data.silos import DataError, Silos


class Loss(ABC):
    """A loss phi(z, b): value, derivative in z, and the bound on its second derivative."""

    curvature: float
    """Bound on phi'': the smoothness constant of a client is curvature * lambda_max(X'X / m)."""
    classifier: bool = False
    smooth: bool = True
    """False for losses with kinks, whose :meth:`derivative` is a subgradient."""

    @abstractmethod
    def prepare(self, silos: Silos, targets: Tensor) -> Tensor:
        """Check targets and bring them to the form that :meth:`value` expects (float64)."""

    @abstractmethod
    def value(self, z: Tensor, b: Tensor) -> Tensor:
        """phi(z, b) of each sample."""

    @abstractmethod
    def derivative(self, z: Tensor, b: Tensor) -> Tensor:
        """The derivative of phi in z, of each sample."""

    def correct(self, z: Tensor, b: Tensor) -> Tensor:
        """Whether each sample is classified right (classifiers only)."""
        raise TypeError(f"{type(self).__name__} is not a classifier")


@dataclass(frozen=True)
class Logistic(Loss):
    """phi(z, b) = log(1 + exp(-b z)), b in {-1, +1}; labels 0 and 1 are read as -1 and +1."""

    curvature = 0.25
    classifier = True

    def prepare(self, silos: Silos, targets: Tensor) -> Tensor:
        """Check that there are two labels, {-1, +1} or {0, 1} (one of a pair is fine for one silo)."""
        found = set(torch.unique(silos.targets).tolist()) | set(torch.unique(targets).tolist())
        if not (found <= {-1.0, 1.0} or found <= {0.0, 1.0}):
            shown = ", ".join(f"{v:g}" for v in sorted(found)[:5]) + (", ..." if len(found) > 5 else "")
            raise DataError(
                f"the logistic loss needs labels in {{-1, +1}} or {{0, 1}}, found {len(found)} kinds: {shown}; "
                "map them to two, or choose another loss"
            )
        b = targets.double()
        return b if -1.0 in found or 0.0 not in found else 2 * b - 1

    def value(self, z: Tensor, b: Tensor) -> Tensor:
        """log(1 + exp(-b z)), without overflow."""
        return torch.nn.functional.softplus(-b * z)

    def derivative(self, z: Tensor, b: Tensor) -> Tensor:
        """-b / (1 + exp(b z))."""
        return torch.sigmoid_(b * z * -1).mul_(b).neg_()

    def correct(self, z: Tensor, b: Tensor) -> Tensor:
        """Sign of the margin against the label; a margin of zero counts as +1."""
        return (z >= 0) == (b > 0)


@dataclass(frozen=True)
class LeastSquares(Loss):
    """phi(z, b) = (z - b)^2 / 2."""

    curvature = 1.0

    def prepare(self, silos: Silos, targets: Tensor) -> Tensor:
        """Take any real targets."""
        return targets.double()

    def value(self, z: Tensor, b: Tensor) -> Tensor:
        """Half the squared residual."""
        return (z - b).square_().div_(2)

    def derivative(self, z: Tensor, b: Tensor) -> Tensor:
        """The residual."""
        return z - b


LOSSES: dict[str, Loss] = {"logistic": Logistic(), "least_squares": LeastSquares()}


def get_loss(name: str) -> Loss:
    """Look a loss up by name."""
    if name not in LOSSES:
        raise ValueError(f"unknown loss {name!r}{suggest(name, LOSSES)} (known: {', '.join(sorted(LOSSES))})")
    return LOSSES[name]
