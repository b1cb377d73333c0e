"""The contract: a federated method is five pure rules and the tuples that move between them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, NamedTuple, Protocol, Self, TypeVar

from torch import Tensor

from fedcomposite._validation import validate
from fedcomposite.regularizers.base import Regularizer


class Gradient(Protocol):
    """What a client can compute on its own data in one round; ``x`` is ``(..., d)``.

    Everything is a function of (seed, client, round, k) and of x alone: calling twice gives the same answer, at
    two points it uses the same minibatch, and every backend, device and process draws the same numbers.
    """

    def __call__(self, x: Tensor, k: int) -> Tensor:
        """Gradient of f_i at x on the minibatch of local step k."""

    def full(self, x: Tensor) -> Tensor:
        """Gradient of f_i at x on all of the client's samples."""

    def loss(self, x: Tensor) -> Tensor:
        """f_i at x on all of the client's samples, ``(..., 1)``; linear models only."""

    def hessian(self, x: Tensor, where: Tensor) -> Tensor:
        """Hessian of f_i at x on the coordinates that the mask ``where`` marks, ``(..., k, k)``; linear models only.

        The mask is ``(..., d)``, the same for all clients.
        """

    def uniform(self, k: int, count: int = 1) -> Tensor:
        """``(..., count)`` numbers in (0, 1), private to the client, for the method's own coins at step k."""

    @property
    def position(self) -> Tensor:
        """The client's place among this round's participants, ``(..., 1)``, counted from 0."""

    @property
    def cohort(self) -> int:
        """How many clients take part in this round."""


class Empty(NamedTuple):
    """The state of a client that remembers nothing."""


@dataclass(frozen=True)
class Info:
    """What a reader wants to know before choosing a method."""

    paper: str
    """Authors and title."""
    year: int
    regularizer: Literal["none", "subgradient", "convex", "weakly convex"]
    """The most general h that the method handles, and how."""
    participation: Literal["full", "any"]
    exact: bool
    """Whether, with full gradients and several local steps, it reaches a stationary point of f + h with no residual."""
    nonsmooth_loss: bool = False
    """Whether the method is meant for losses that are themselves non-smooth."""
    uniform_only: bool = False
    """Whether the server's mean must weigh all clients alike."""
    second_order: bool = False
    """Whether it needs Hessians, which linear models with a smooth loss offer."""


S = TypeVar("S", bound=NamedTuple)  # server state
C = TypeVar("C", bound=NamedTuple)  # client state
M = TypeVar("M", bound=NamedTuple)  # message, server to client
R = TypeVar("R", bound=NamedTuple)  # reply, client to server


class Algorithm(ABC, Generic[S, C, M, R]):
    """A federated method for ``min_x (1/n) sum_i f_i(x) + h(x)``.

    A method is a frozen dataclass: its fields are what a user chooses, validated from their annotations, and they are
    also its configuration schema. States and messages are ``NamedTuple``s of tensors with shape ``(..., size)``.

    The rules never see the client axis: written for ``(d,)`` and reducing over ``dim=-1`` only, they run
    unchanged on ``(m, d)`` in the simulator. They are pure: nothing is stored in ``self``, no input is modified.

    A reply is a *change* (a difference of models, a gradient, a change of a control variate), so that a weighted sum
    of replies makes sense whatever the weights sum to.
    """

    info: ClassVar[Info]
    exchanges: ClassVar[int] = 1
    """Successive rounds that keep the same cohort; a method whose step needs two exchanges says 2."""

    varying: ClassVar[bool] = False
    """Whether the sizes of replies follow from the message, and so change from round to round."""

    def __post_init__(self) -> None:
        validate(self)

    @classmethod
    def auto(cls, L: float, rho: float = 0.0, local_steps: int = 10) -> Self:
        """The method with practical steps for L-smooth clients and a rho-weakly convex h.

        The whole round moves by :func:`round_step`, shared equally between the local steps.
        """
        return cls(local_steps=local_steps, step=round_step(L, rho) / local_steps)  # type: ignore[call-arg]

    @property
    def partial(self) -> bool:
        """Whether some clients may sit a round out."""
        return self.info.participation == "any"

    @abstractmethod
    def init(self, x0: Tensor, h: Regularizer) -> tuple[S, C]:
        """Server state, and one client's state, before the first round."""

    @abstractmethod
    def broadcast(self, server: S) -> M:
        """The message that every participating client receives."""

    @abstractmethod
    def local_round(self, message: M, client: C, grad: Gradient, h: Regularizer) -> tuple[R, C]:
        """One client's round: its reply and its new state."""

    def decode(self, reply: R) -> R:
        """What is averaged: the reply itself, unless a method sends it compressed."""
        return reply

    @abstractmethod
    def aggregate(self, server: S, reply: R, share: float, h: Regularizer) -> S:
        """New server state from the mean reply of the participants, who are ``share`` of all clients."""

    @abstractmethod
    def solution(self, server: S, h: Regularizer) -> Tensor:
        """The model to evaluate."""


AnyAlgorithm = Algorithm[Any, Any, Any, Any]


def round_step(L: float, rho: float = 0.0) -> float:
    """A practical step for one round: half of 1/L, and at most half of 1/rho where h is weakly convex."""
    step = 0.5 / L if L > 0 else 1.0
    return min(step, 0.5 / rho) if 0 < rho < math.inf else step
