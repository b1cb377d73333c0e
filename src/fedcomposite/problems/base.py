"""What the runtime asks of the smooth part f, and the gradient oracle that methods call."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from torch import Tensor

from fedcomposite import rng
from fedcomposite.data.silos import Silos
from fedcomposite.data.sparse import Features
from fedcomposite.problems.measures import Counts, Measures
from fedcomposite.results import Result

_FIRST_ORDER = "a network offers gradients only, no Hessians; use a first-order method, for example FedNMap or Zhang"
FULL = 2**32 - 1
"""The step that stands for a full gradient in the counters of random layers."""


@dataclass(frozen=True)
class Batches:
    """How clients' gradients are made: ``size=None`` takes all of a client's samples, ``clip_norm`` bounds the norm."""

    seed: int = 0
    size: int | None = None
    sampling: Literal["replacement", "epoch"] = "replacement"
    clip_norm: float | None = None

    def __post_init__(self) -> None:
        if isinstance(self.size, np.integer):
            object.__setattr__(self, "size", int(self.size))
        if self.size is not None and (not isinstance(self.size, int) or self.size < 1):
            raise ValueError(f"batch_size = {self.size!r}, must be an integer >= 1, or None for all samples")
        if self.sampling not in ("replacement", "epoch"):
            raise ValueError(f"sampling = {self.sampling!r}, must be 'replacement' or 'epoch'")
        if self.clip_norm is not None and not 0 < self.clip_norm < math.inf:
            raise ValueError(f"clip_norm = {self.clip_norm!r}, must be a number > 0, or None")

    def clipped(self, gradient: Tensor) -> Tensor:
        """Gradients ``(..., d)``, each scaled down to ``clip_norm`` where it is longer, as torch's clip_grad_norm_."""
        if self.clip_norm is None:
            return gradient
        norm = torch.linalg.vector_norm(gradient, dim=-1, keepdim=True)
        scale: Tensor = (self.clip_norm / (norm + 1e-6)).clamp(max=1.0)
        return gradient * scale

    def draw(self, ids: rng.Ints, sizes: rng.Ints, round: int, steps: range) -> rng.Ints:
        """Sample numbers within each client, ``(steps, clients, size)``."""
        assert self.size is not None
        rule = rng.batches if self.sampling == "replacement" else rng.epochs
        return rule(self.seed, ids, sizes, round, steps, self.size)


@dataclass(frozen=True, repr=False)
class Evaluation(Result):
    """What one pass over all the data at one point gives."""

    loss: Tensor
    gradient: Tensor
    counts: Counts = field(default_factory=dict)
    """Rows of counts by ``"part/metric"``, which add up over parties; see :mod:`fedcomposite.problems.metrics`."""
    measures: Measures = field(default_factory=Measures)
    """What the counts are of."""

    @property
    def samples(self) -> int:
        """How many training samples loss and gradient are of."""
        return int(self.counts["train/samples"][:, 0].sum())

    @property
    def metrics(self) -> dict[str, Tensor]:
        """The counts' values, by their names in a record."""
        found = self.measures.summarise(self.counts)
        return {k: torch.tensor(v, dtype=torch.float64 if isinstance(v, float) else None) for k, v in found.items()}

    def to_frame(self) -> pd.DataFrame:
        """One row: loss, norm of the gradient, metrics."""
        numbers = {"loss": float(self.loss), "gradient_norm": float(self.gradient.norm())}
        return pd.DataFrame([numbers | self.measures.summarise(self.counts)])

    def _line(self) -> str:
        return f"loss {float(self.loss):.6g}, gradient of norm {float(self.gradient.norm()):.3g}"


@dataclass
class Counter:
    """Work done, counted where it happens: one unit per client and call, or per vector; and the bytes sent.

    A Hessian on k coordinates counts as k gradients, what its columns would cost one by one. The loss at a point is not
    counted: it comes from the margins of the gradient there.
    """

    gradients: int = 0
    proxes: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    queries: int = 0
    """Noised queries of a client that takes part in every round."""
    most_queries: int = 0
    """The most of them in one round."""


class Slot(NamedTuple):
    """Where a named parameter lies in the flat vector x: ``x[start:stop]``, of this shape."""

    name: str
    start: int
    stop: int
    shape: tuple[int, ...]


@dataclass
class RoundInputs:
    """What a model needs in one round beside its parameters: buffers that move, and the counters of its random layers.

    ``buffers`` is ``(m, b)``, one row per client, and is replaced by gradient calls.
    """

    buffers: Tensor
    clients: rng.Ints = field(default_factory=lambda: np.zeros(1, np.uint64))
    """The clients' numbers in the whole federation."""
    seed: int = 0
    round: int | Tensor = 0
    step: int = 0
    ids: Tensor | None = None
    """The clients' numbers on the device, where a recorded program has them."""

    def words(self, count: int, device: torch.device) -> Tensor:
        """``count`` words of every client in this round and step, ``(m, count)``."""
        ids = torch.from_numpy(self.clients.astype(np.int64)).to(device) if self.ids is None else self.ids
        drawn: Tensor = rng.words(self.seed, rng.Use.MODEL, ids, self.round, torch.full_like(ids, self.step), count)
        return drawn


def measuring_step(L: float, rho: float) -> float:
    """The step at which stationarity is measured: 1/L, and at most half of 1/rho where h is weakly convex."""
    step = 1 / L if L > 0 else 1.0
    return min(step, 0.5 / rho) if 0 < rho < math.inf else step


class UnsuitableError(RuntimeError):
    """A round that cannot be recorded as one program; the message says why."""


class Smooth(ABC):
    """The functions f_1, ..., f_n on one device in one dtype."""

    dimension: int
    device: torch.device
    dtype: torch.dtype
    sizes: rng.Ints  # samples per client
    ids: rng.Ints  # the clients' numbers in the whole federation
    offsets: rng.Ints  # first row of each client
    said: npt.NDArray[np.float64] | None = None  # samples per client that are told, where these are not their number

    @abstractmethod
    def full(self, clients: rng.Ints) -> Callable[[Tensor], Tensor]:
        """The map ``(m, d) -> (m, d)`` to the gradients of these clients on all their samples."""

    @abstractmethod
    def minibatch(self, x: Tensor, rows: Tensor) -> Tensor:
        """Gradients at ``x`` ``(m, d)`` on the samples ``rows`` ``(m, b)`` of the pooled data."""

    @property
    def rows_on(self) -> torch.device:
        """Where the rows of minibatches are wanted: on the device, or on the host by functions that read files."""
        return self.device

    def expect(self, rows: Tensor, after: Callable[[], Tensor] | None = None) -> None:  # noqa: B027
        """Take note of the minibatches ``(steps, m, b)`` that come next, then those of ``after``, to read ahead."""

    def reach(self, rows: int, clients: int) -> int:
        """The numbers that the largest operation of a local step looks at: by it, threads are chosen."""
        return clients * rows * self.dimension

    def stage(self, rows: Tensor) -> Tensor:
        """Bring the samples of a recorded round where the program reads them; their rows as it takes them."""
        return rows

    def losses(self, clients: rng.Ints, x: Tensor) -> Tensor:
        """The clients' losses at ``x`` ``(m, d)``, on all their samples, ``(m, 1)``; refused by networks."""
        raise TypeError(_FIRST_ORDER)

    def hessians(self, clients: rng.Ints, x: Tensor, at: Tensor) -> Tensor:
        """The clients' Hessians at ``x`` ``(m, d)`` on the coordinates ``at``, ``(m, k, k)``; refused by networks."""
        raise TypeError(_FIRST_ORDER)

    # -- what single samples add, for privacy -------------------------------------------------------------------------

    @property
    def divisors(self) -> npt.NDArray[np.float64]:
        """What each client's sum over samples is divided by in f_i: its samples as they are told, or 1."""
        return self.sizes.astype(np.float64) if self.said is None else self.said

    def check_private(self) -> None:  # noqa: B027
        """Refuse what lets one sample change the gradients of others."""

    def check_batches(self, size: int | None, silos: Silos) -> None:  # noqa: B027
        """Refuse batches that are too small for the functions: minibatches of ``size``, or whole silos."""

    @abstractmethod
    def clipped(self, x: Tensor, rows: Tensor, mask: Tensor, clip: float) -> Tensor:
        """Sums of the samples' gradients, each with norm at most ``clip``, ``(m, d)``.

        ``rows`` and ``mask`` are ``(m, b)``; samples where the mask is 0 are padding.
        """

    @abstractmethod
    def clipped_losses(self, x: Tensor, rows: Tensor, mask: Tensor, clip: float) -> Tensor:
        """Sums of the samples' losses, each at most ``clip`` in size, ``(m, 1)``."""

    @abstractmethod
    def seen(self, x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs at one model and targets of some training samples, as metrics see them."""

    def clipped_hessians(self, x: Tensor, rows: Tensor, mask: Tensor, at: Tensor, clip: float) -> Tensor:
        """Sums of the samples' Hessians on the coordinates ``at``, ``(m, k, k)``, each of norm at most ``clip``."""
        raise TypeError(_FIRST_ORDER)

    def curvature(self) -> float:
        """The most that one sample's second derivative can be, where it does not depend on the sample."""
        raise TypeError(_FIRST_ORDER)

    @abstractmethod
    def evaluate(self, x: Tensor) -> Evaluation:
        """Loss and gradient of f = sum_i w_i f_i at one point, and metrics."""

    def measured_on(self, samples: int | None) -> Self:
        """The same functions, evaluated on so many training samples, or on all; refused where that is no choice."""
        if samples is not None:
            raise ValueError(f"evaluation_samples = {samples}: only for a problem with a model")
        return self

    @abstractmethod
    def scored(
        self, x: Tensor, features: Features, targets: Tensor, offset: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Outputs and targets of some samples as metrics see them; see :mod:`fedcomposite.problems.metrics`."""

    @abstractmethod
    def smoothness(self, of: Literal["clients", "mean"] = "clients") -> float:
        """Smoothness constant: the largest over the clients, or that of f."""

    @abstractmethod
    def start(self) -> Tensor:
        """The model before the first round."""

    def buffers(self) -> Tensor:
        """The state beside the parameters before the first round, ``(b,)``: running statistics; empty for most."""
        return torch.zeros(0, dtype=self.dtype, device=self.device)

    def ready(self, compile: bool) -> Self:
        """The same functions for a recorded round, compiled if asked; refuses with :class:`UnsuitableError`."""
        return self

    def during(self, local: RoundInputs) -> Self:
        """The same functions, reading and updating ``local``; those without buffers and random layers ignore it."""
        return self


class ClientGradients:
    """The oracle ``grad(x, k)`` of some clients in one round; see :class:`fedcomposite.algorithms.Gradient`.

    For one client (``stacked=False``) x is ``(d,)``, as at a real site; otherwise ``(m, d)``. A model's buffers
    start the round from the server's, ``buffers``, and every gradient updates them; :attr:`buffers` holds the result.
    """

    def __init__(
        self,
        smooth: Smooth,
        clients: rng.Ints,
        round: int,
        batches: Batches,
        counter: Counter,
        *,
        stacked: bool = True,
        expect: int = 1,
        place: tuple[int, int] | None = None,
        buffers: Tensor | None = None,
    ) -> None:
        """``place`` is (position, cohort) of a single client among the round's participants."""
        start = smooth.buffers() if buffers is None else buffers
        self._local = RoundInputs(start.repeat(len(clients), 1), smooth.ids[clients], batches.seed, round)
        self._smooth, self._clients, self._round = smooth.during(self._local), clients, round
        self._place = (0, len(clients)) if place is None else place
        self._batches, self._counter, self._stacked = batches, counter, stacked
        self._rows: list[Tensor] = []
        self._expect = expect
        self._full: Callable[[Tensor], Tensor] | None = None

    @property
    def steps_used(self) -> int:
        """How many local steps have drawn a minibatch: a hint for the next round."""
        return self._expect

    @property
    def queries(self) -> int:
        """Noised answers of each client: none here."""
        return 0

    @property
    def buffers(self) -> Tensor:
        """The clients' buffers now, ``(..., b)``."""
        return self._local.buffers if self._stacked else self._local.buffers[0]

    def __call__(self, x: Tensor, k: int) -> Tensor:
        """Gradient on the minibatch of step k."""
        self._local.step = k
        if self._batches.size is None:
            return self._everything(x)
        self._counter.gradients += len(self._clients)
        rows = self._draw(k)
        return self._batches.clipped(self._shaped(lambda u: self._smooth.minibatch(u, rows), x))

    def full(self, x: Tensor) -> Tensor:
        """Gradient on all samples."""
        self._local.step = FULL
        return self._everything(x)

    def loss(self, x: Tensor) -> Tensor:
        """Losses on all samples, ``(..., 1)``."""
        return self._shaped(lambda u: self._smooth.losses(self._clients, u), x)

    def hessian(self, x: Tensor, where: Tensor) -> Tensor:
        """Hessians on all samples and the marked coordinates, ``(..., k, k)``; each counts as k gradients."""
        at = (where[0] if self._stacked else where).nonzero().squeeze(1)
        self._counter.gradients += len(self._clients) * len(at)
        return self._shaped(lambda u: self._smooth.hessians(self._clients, u, at), x)

    def _everything(self, x: Tensor) -> Tensor:
        self._counter.gradients += len(self._clients)
        if self._full is None:
            self._full = self._smooth.full(self._clients)
        return self._batches.clipped(self._shaped(self._full, x))

    def uniform(self, k: int, count: int = 1) -> Tensor:
        """Private random numbers of each client."""
        ids = torch.from_numpy(self._smooth.ids[self._clients].astype(np.int64)).to(self._smooth.device)
        drawn = rng.uniforms(self._batches.seed, rng.Use.METHOD, ids, self._round, k, count)
        return drawn if self._stacked else drawn.squeeze(0)

    @property
    def position(self) -> Tensor:
        """Place among the participants, ``(..., 1)``."""
        first, device = self._place[0], self._smooth.device
        if not self._stacked:
            return torch.tensor([first], device=device)
        return torch.arange(first, first + len(self._clients), device=device).unsqueeze(1)

    @property
    def cohort(self) -> int:
        """Number of participants."""
        return self._place[1]

    def _shaped(self, gradient: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return gradient(x) if self._stacked else gradient(x.unsqueeze(0)).squeeze(0)

    def _draw(self, k: int) -> Tensor:
        """Rows of step k; several steps are drawn at once, as many as the last round used."""
        while k >= len(self._rows):
            self._expect = max(self._expect, k + 1)
            steps = range(len(self._rows), self._expect)
            rows = self._rows_of(self._round, steps)
            self._rows.extend(rows.to(self._smooth.rows_on).unbind(0))
            everyone = len(self._clients) == len(self._smooth.sizes)  # then it is known who takes part next
            self._smooth.expect(rows, self._next_round if everyone else None)
        return self._rows[k]

    def _next_round(self) -> Tensor:
        return self._rows_of(self._round + 1, range(len(self._rows)))

    def _rows_of(self, round: int, steps: range) -> Tensor:
        s = self._smooth
        local = self._batches.draw(s.ids[self._clients], s.sizes[self._clients], round, steps)
        return torch.from_numpy((local + s.offsets[self._clients][None, :, None]).astype(np.int64))
