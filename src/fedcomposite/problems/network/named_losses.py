"""Losses of a model's outputs that have names, and those that installed packages offer."""

from __future__ import annotations

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import annotated_types as at
from torch import Tensor, nn

from fedcomposite._validation import Positive, refuse, suggest, validate, wrong_arguments
from fedcomposite.problems.metrics import Kind
from fedcomposite.registry import Registry, callable_only, fold


@dataclass(frozen=True)
class CrossEntropy:
    """-log of the probability of a sample's label; where it has several labels (tokens, pixels), the mean over them."""

    label_smoothing: Annotated[float, at.Ge(0), at.Lt(1)] = 0.0
    """The share of a label's weight that is spread evenly over all classes."""

    def __post_init__(self) -> None:
        validate(self)


@dataclass(frozen=True)
class TargetLoss(ABC):
    """A loss of an output for each target; of a sample with several targets it is their mean."""

    name: ClassVar[str]
    kinds: ClassVar[tuple[Kind, ...]] = ("regression",)
    """What metrics are for, where a sample has one target."""

    def __post_init__(self) -> None:
        validate(self)

    @abstractmethod
    def each(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of each target."""

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        each = self.each(outputs.reshape(targets.shape), targets.to(outputs.dtype))
        return each if targets.ndim == 1 else each.flatten(1).mean(1)


@dataclass(frozen=True)
class SquaredError(TargetLoss):
    """(z - b)^2."""

    name = "mse"

    def each(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).square()


@dataclass(frozen=True)
class AbsoluteError(TargetLoss):
    """|z - b|."""

    name = "mae"

    def each(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).abs()


@dataclass(frozen=True)
class HuberError(TargetLoss):
    """Quadratic up to ``delta`` from the target, linear beyond: (z - b)^2 / 2, or delta (|z - b| - delta / 2)."""

    delta: Positive = 1.0

    name = "huber"

    def each(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.huber_loss(outputs, targets, reduction="none", delta=self.delta)


@dataclass(frozen=True)
class PoissonDeviance(TargetLoss):
    """exp(z) - b z: counts b whose mean is exp(z)."""

    name = "poisson"
    kinds = ()

    def each(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.exp() - targets * outputs


@dataclass(frozen=True)
class BinaryCrossEntropy(TargetLoss):
    """-log of the probability of a flag, 0 or 1, by its log-odds z: one flag per sample, or several."""

    name = "binary_cross_entropy"
    kinds = ("binary",)

    def each(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.binary_cross_entropy_with_logits(outputs, targets, reduction="none")


MODEL_LOSSES: Registry[Callable[..., Any]] = Registry(
    "loss of a model",
    {"cross_entropy": CrossEntropy}
    | {one.name: one for one in (SquaredError, AbsoluteError, HuberError, PoissonDeviance, BinaryCrossEntropy)},
    group="fedcomposite.model_losses",
    accept=callable_only,
)
"""By name: ours, and what installed packages offer, each a function of (outputs, targets, options) or a class that is
made with its options and is one of (outputs, targets). In a federation every site runs only what is installed there."""


def named_loss(name: str, options: Mapping[str, Any] | None = None) -> Any:
    """A loss by name, with its options.

    >>> named_loss("huber", {"delta": 2.0})
    HuberError(delta=2.0)
    """
    if fold(name) not in map(fold, names := MODEL_LOSSES.names()):
        raise ValueError(
            f"loss = {name!r} is not for a model{suggest(name, names)} (known: {', '.join(names)}; installed packages "
            f"offer others as entry points in {MODEL_LOSSES.group!r})"
        )
    found, given = MODEL_LOSSES[name], dict(options or {})
    made = inspect.isclass(found)
    known = list(inspect.signature(found).parameters)[0 if made else 2 :]
    said = ", ".join(known) or "none"
    strange = [one for one in given if one not in known]
    faults = [f"loss {name!r} has no option {one!r}{suggest(one, known)} (its options: {said})" for one in strange]
    maker: Any = vars(found).get("__init__", found) if made else found
    refuse([*faults, *(wrong_arguments(maker, given) if given else ())])
    if made:
        return found(**given)
    return functools.partial(found, **given) if given else found


def needs(name: str | None) -> Literal["classes", "flags", "numbers", "either"]:
    """What a loss's targets are, as its name says: classes, flags or numbers with an output for each, or it is open."""
    found = MODEL_LOSSES[name or "cross_entropy"]
    if found is CrossEntropy:
        return "classes"
    if found is BinaryCrossEntropy:
        return "flags"
    return "numbers" if inspect.isclass(found) and issubclass(found, TargetLoss) else "either"
