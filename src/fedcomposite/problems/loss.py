"""What a linear model asks of its loss."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal

from torch import Tensor

from fedcomposite._validation import validate
from fedcomposite.data.silos import Silos
from fedcomposite.problems.metrics import CLASSIFIERS, Kind


class Loss(ABC):
    """A loss phi(z, b): value, derivative in z, and bounds on its first two derivatives.

    Subclasses are frozen dataclasses: their fields are the loss's options, validated from their annotations.
    """

    curvature: float
    """Bound on phi'': the smoothness constant of a client is curvature * lambda_max(X'X / m). Infinite if none."""
    slope: float
    """Bound on |phi'|, which makes a sample's loss slope * ||a||-Lipschitz. Infinite if there is none."""
    classifier: bool = False
    probabilistic: bool = False
    """Whether margins are logarithms of odds, which metrics of probabilities need."""
    smooth: bool = True
    """False for losses with kinks, whose :meth:`derivative` is a subgradient."""
    nonnegative: bool = False
    """Whether phi is convex in z and its infimum is 0 for every target, which makes duality gaps computable."""
    reduction: Literal["mean", "sum"] = "mean"
    """Whether f_i is the mean of its samples' losses or their sum."""

    def __post_init__(self) -> None:
        validate(self)

    @property
    def outputs(self) -> int:
        """Margins per sample."""
        return 1

    @property
    def twice(self) -> bool:
        """Whether it has a second derivative, which Newton steps need."""
        return type(self).second is not Loss.second

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of problems that its metrics are for."""
        if not self.classifier:
            return ("regression",)
        return {1: ("binary",), 2: CLASSIFIERS}.get(self.outputs, ("multiclass",))

    def adapt(self, silos: Silos) -> Loss:
        """The loss with what it has to know of the data filled in."""
        return self

    @abstractmethod
    def prepare(self, silos: Silos, targets: Tensor) -> Tensor:
        """Check targets and bring them to the form that :meth:`value` expects (float64)."""

    @abstractmethod
    def value(self, z: Tensor, b: Tensor) -> Tensor:
        """phi(z, b) of each sample."""

    @abstractmethod
    def derivative(self, z: Tensor, b: Tensor) -> Tensor:
        """The derivative of phi in z, of each sample, as a new tensor."""

    def second(self, z: Tensor, b: Tensor) -> Tensor:
        """The second derivative of phi in z: a number per sample, or a C x C matrix ``(..., C, C)``.

        Where phi' has a kink it is one of the values that make phi' semismooth.
        """
        raise TypeError(f"{self} has no second derivative, which a Newton step needs; use a first-order method")

    def lowest(self, b: Tensor) -> Tensor | None:
        """The infimum of phi over z, of each sample; None where phi is not convex or it is not known."""
        return None

    def response(self, z: Tensor) -> Tensor:
        """What margins say about targets: themselves, for most losses."""
        return z
