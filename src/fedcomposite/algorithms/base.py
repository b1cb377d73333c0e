"""The contract: a federated method is five pure rules and the tuples that move between them."""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Generic, Literal, NamedTuple, Protocol, Self, TypeVar

from torch import Tensor

from fedcomposite._validation import validate
from fedcomposite.algorithms.optimizers import Optimizer
from fedcomposite.algorithms.optimizers import read as read_optimizer
from fedcomposite.regularizers.base import Regularizer
from fedcomposite.schedules import Schedule, read


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
    """Authors and title: ``"Huang, Pu: Achieving linear speedup"``."""
    year: int
    regularizer: Literal["none", "subgradient", "convex", "weakly convex"]
    """The most general h that the method handles, and how."""
    participation: Literal["full", "any"]
    exact: bool
    """Whether, with full gradients and several local steps, it reaches a stationary point of f + h with no residual."""
    exact_partial: bool = True
    """Whether an exact method stays so when clients sit rounds out; without meaning where it allows no such rounds."""
    nonsmooth_loss: bool = False
    """Whether the method is meant for losses that are themselves non-smooth."""
    uniform_only: bool = False
    """Whether the server's mean must weigh all clients alike."""
    second_order: bool = False
    """Whether it needs Hessians, which linear models with a smooth loss offer."""
    lead: bool = False
    """Whether some rounds hold the reply of a single client, the lead, and zeros from all others."""
    secondary: bool = False
    """Whether it was written from secondary sources, without the paper or its authors' code at hand."""
    doi: str = ""
    arxiv: str = ""
    """Number of the preprint."""
    bibtex: str = ""
    """Key of the paper in ``references.bib``; without one, :meth:`entry` is what is cited."""

    def entry(self, name: str) -> str:
        """BibTeX made from this card."""
        authors, _, title = self.paper.partition(": ")
        given = {
            "author": authors.replace(", ", " and ") if title else "",
            "title": title or authors,
            "year": str(self.year),
            "doi": self.doi,
            "eprint": self.arxiv,
            "archiveprefix": "arXiv" if self.arxiv else "",
        }
        lines = ",\n".join(f"  {field} = {{{value}}}" for field, value in given.items() if value)
        return f"@misc{{{name.lower()}{self.year},\n{lines}\n}}"


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

    A field that ``schedulable`` names may hold a :class:`fedcomposite.schedules.Schedule` in place of a number. The
    rules know numbers only: whoever runs rounds calls :meth:`at` first. In round r = 0, 1, ..., ``broadcast``,
    ``local_round``, ``decode`` and ``aggregate`` are those of ``at(r)``; ``init`` and the model before the first round
    are those of ``at(0)``; the model after r rounds is that of ``at(r - 1)``. So what a rule reads in a state was
    made with the steps of an earlier round: a state in units of a step must remember which.
    """

    info: ClassVar[Info]
    exchanges: ClassVar[int] = 1
    """Successive rounds that keep the same cohort; a method whose step needs two exchanges says 2."""
    recordable: ClassVar[bool] = True
    """Whether a round is the same operations every time; not if it reads a count, a phase or a coin off its tensors."""
    schedulable: ClassVar[frozenset[str]] = frozenset()
    """Fields that may change from round to round: no state or message is in units of what they were before."""

    varying: ClassVar[bool] = False
    """Whether the sizes of replies follow from the message, and so change from round to round."""
    linear_replies: ClassVar[bool] = False
    """Whether replies are linear in what a client computes on its data, so that shares of noise add up in their sum."""

    single_precision: ClassVar[bool] = False
    """Whether some of what is sent is in single precision, to save bytes; states never are."""

    compressible: ClassVar[bool] = True
    """Whether vectors of a reply may come in part and the rest later; not where the server adds up whole changes."""

    feedback: ClassVar[bool] = False
    """Whether clients remember what the server has not heard of their replies, so that only the plain mean will do."""

    one_regularizer: ClassVar[str] = ""
    """Why h must be the same in all rounds; empty if its strength may follow a schedule."""

    def __post_init__(self) -> None:
        for name in (f.name for f in fields(self)):  # type: ignore[arg-type]
            object.__setattr__(self, name, read_optimizer(read(getattr(self, name))))
        if fixed := [name for name in self.schedules if name not in self.schedulable]:
            able = ", ".join(sorted(self.schedulable)) or "none; FedAvg, FedNMap, FedCanon and others take a schedule"
            raise ValueError(
                f"{type(self).__name__}: {fixed[0]} cannot follow a schedule, since it must not change from round to "
                f"round; its fields that can: {able}"
            )
        validate(self, skip=self.schedules)

    @property
    def name(self) -> str:
        """What it is called in configurations and messages."""
        return type(self).__name__

    @property
    def table(self) -> dict[str, Any]:
        """The method as a configuration's table: its name and fields, schedules as tables."""
        given = {
            k: v.table if isinstance(v, Schedule | Optimizer) else v for k, v in vars(self).items() if v is not None
        }
        return {"name": self.name, **given}

    @property
    def schedules(self) -> dict[str, Schedule]:
        """The fields that change from round to round."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Schedule)}

    def at(self, round: int) -> Self:
        """The same method with the numbers of a round, counted from 0, in place of schedules."""
        return _at(self, round) if self.schedules else self

    @classmethod
    def auto(cls, L: float, rho: float = 0.0, local_steps: int = 10) -> Self:
        """The method with practical steps for L-smooth clients and a rho-weakly convex h.

        The whole round moves by :func:`round_step`, shared equally between the local steps, so that the drift of
        methods that do not correct it stays small.
        """
        return cls(local_steps=local_steps, step=round_step(L, rho) / local_steps)  # type: ignore[call-arg]

    @classmethod
    def auto_partial(cls, L: float, rho: float = 0.0, local_steps: int = 10) -> Self:
        """As :meth:`auto`, for rounds with some of the clients; a method whose steps must then be smaller says so."""
        return cls.auto(L, rho, local_steps)

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
A = TypeVar("A", bound=AnyAlgorithm)


@functools.lru_cache(maxsize=64)
def _at(algorithm: A, round: int) -> A:
    return replace(algorithm, **{name: schedule(round) for name, schedule in algorithm.schedules.items()})  # type: ignore[type-var]


def amplification(weights: Iterable[float], cohort: int) -> float:
    """The most that a cohort's replies may weigh together, in units of what they weigh on average.

    A reply counts n w_i / |S|, so that its mean over all cohorts is right; a cohort with a heavy client moves as if its
    clients were that much less smooth than they are. Practical steps under partial participation are for this times L;
    it is 1 when all clients take part, or weigh the same.
    """
    ordered = sorted(weights, reverse=True)
    return max(1.0, len(ordered) * sum(ordered[:cohort]) / (cohort * sum(ordered)))


def round_step(L: float, rho: float = 0.0, local_steps: int = 1) -> float:
    """A practical step for one round: half of 1/L, and at most half of 1/rho where h is weakly convex.

    With ``local_steps`` it is half of 1/L for each of them: for methods whose control variates correct the drift.
    """
    step = 0.5 * local_steps / L if L > 0 else 1.0
    return min(step, 0.5 / rho) if 0 < rho < math.inf else step
