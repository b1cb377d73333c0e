"""Server optimizers: the mean change of a round as a gradient (FedOpt, Reddi et al. 2021).

A method that takes one divides the mean change by -step * local_steps, which makes it a mean of gradients, and moves by
rate * scale * direction. The prox of h, where the method has one, is taken with the step rate * scale, so that fixed
points are stationary points of f + h and of nothing else:

* :class:`Momentum`: the mean of past gradients with weights (1 - beta) beta^k, torch's ``SGD(momentum=beta,
  dampening=beta)``. Without the damping, fixed points would be those of f / (1 - beta) + h.
* :class:`Adam`: each coordinate has a step of its own, and the prox is taken in that metric (ProxGen, Yun et al. 2021),
  which is known where h is a sum over coordinates.

In a configuration file an optimizer is a table: ``server_optimizer = { optimizer = "adam", beta1 = 0.9 }``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, NamedTuple

import annotated_types as at
import torch
from torch import Tensor

from fedcomposite._validation import Positive, suggest, validate
from fedcomposite.registry import make
from fedcomposite.regularizers.base import Regularizer, Step

__all__ = ["Adam", "Momentum", "Optimizer", "OptimizerState"]

Decay = Annotated[float, at.Ge(0), at.Lt(1)]


class OptimizerState(NamedTuple):
    """What an optimizer remembers; empty tensors where it does not."""

    first: Tensor  # mean of gradients
    second: Tensor  # mean of their squares
    rounds: Tensor  # how many went in


class Optimizer(ABC):
    """A rule of the server; subclasses are frozen dataclasses."""

    def __post_init__(self) -> None:
        validate(self)

    @abstractmethod
    def init(self, x: Tensor) -> OptimizerState:
        """Before the first round."""

    @abstractmethod
    def move(self, moments: OptimizerState, gradient: Tensor) -> tuple[Tensor, Tensor | float, OptimizerState]:
        """The direction, the scale of its coordinates, and what is remembered."""

    @abstractmethod
    def rate(self, server_step: float, reach: float) -> float:
        """The step of the server, from its own and from that of a whole round."""

    def check(self, h: Regularizer, dimension: int) -> None:  # noqa: B027
        """Refuse an h whose prox is not known in the optimizer's metric."""

    @property
    def table(self) -> dict[str, Any]:
        """The optimizer as a configuration file says it; :func:`read` takes it back."""
        return {"optimizer": type(self).__name__.casefold(), **asdict(self)}  # type: ignore[call-overload]


@dataclass(frozen=True)
class Momentum(Optimizer):
    """m = beta m + (1 - beta) g, and the first m is the first g."""

    beta: Decay = 0.9

    def init(self, x: Tensor) -> OptimizerState:
        return OptimizerState(torch.zeros_like(x), x[:0], x.new_zeros(1))

    def move(self, moments: OptimizerState, gradient: Tensor) -> tuple[Tensor, Tensor | float, OptimizerState]:
        """Along the mean of gradients."""
        mixed = self.beta * moments.first + (1 - self.beta) * gradient
        m = torch.where(moments.rounds > 0, mixed, gradient)
        return m, 1.0, OptimizerState(m, moments.second, moments.rounds + 1)

    def rate(self, server_step: float, reach: float) -> float:
        """That of a whole round."""
        return reach


@dataclass(frozen=True)
class Adam(Optimizer):
    """m / (sqrt(v) + epsilon), means of gradients and of their squares, both with torch's correction for few rounds."""

    beta1: Decay = 0.9
    beta2: Decay = 0.999
    epsilon: Positive = 1e-8

    def init(self, x: Tensor) -> OptimizerState:
        return OptimizerState(torch.zeros_like(x), torch.zeros_like(x), x.new_zeros(1))

    def move(self, moments: OptimizerState, gradient: Tensor) -> tuple[Tensor, Tensor | float, OptimizerState]:
        """Along the mean, every coordinate in units of its size."""
        m = self.beta1 * moments.first + (1 - self.beta1) * gradient
        v = self.beta2 * moments.second + (1 - self.beta2) * gradient.square()
        t = moments.rounds + 1
        scale = 1 / ((v / (1 - self.beta2**t)).sqrt() + self.epsilon)
        return m / (1 - self.beta1**t), scale, OptimizerState(m, v, t)

    def rate(self, server_step: float, reach: float) -> float:
        """The server's own: sizes of gradients do not matter."""
        return server_step

    def check(self, h: Regularizer, dimension: int) -> None:
        """A step per coordinate is for sums over coordinates."""
        if not torch.equal(h.coupling(dimension), torch.arange(dimension)):
            raise ValueError(
                "Adam gives each coordinate a step of its own, and the prox of an h that couples coordinates is not "
                "known there; take Momentum, or a sum over coordinates such as L1 or MCP"
            )


OPTIMIZERS: dict[str, type[Optimizer]] = {"adam": Adam, "momentum": Momentum}
"""By the name that a configuration file uses."""


def read(table: Any) -> Any:
    """The optimizer that a table says; what is no table with the key ``optimizer`` is given back as it is.

    >>> read({"optimizer": "momentum", "beta": 0.5})
    Momentum(beta=0.5)
    """
    if not isinstance(table, Mapping) or "optimizer" not in table:
        return table
    name = table["optimizer"]
    if not isinstance(name, str) or name not in OPTIMIZERS:
        known = ", ".join(OPTIMIZERS)
        raise ValueError(f"unknown optimizer {name!r}{suggest(str(name), OPTIMIZERS)} (known: {known})")
    return make(OPTIMIZERS[name], {k: v for k, v in table.items() if k != "optimizer"})


def nothing(x: Tensor) -> OptimizerState:
    """The moments of a server without an optimizer."""
    return OptimizerState(x[:0], x[:0], x[:0])


def moved(
    optimizer: Optimizer, x: Tensor, change: Tensor, moments: OptimizerState, step: float, server_step: float
) -> tuple[Tensor, Step, OptimizerState]:
    """The model after a mean ``change`` that local steps of ``step`` in all have made, and the step of the prox."""
    direction, scale, after = optimizer.move(moments, change / -step)
    rate = optimizer.rate(server_step, server_step * step) * scale
    return x - rate * direction, rate, after
