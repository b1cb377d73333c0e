"""The one protocol: everything that can be asked of the parties, and the function that answers it for a silo.

=================  ================================================================================================
:class:`Round`     a method's round, a measurement of its model, or both
:class:`Request`   sums over samples: what fits, paths, intervals and quality are made of
``data.queries``   counts and sums of a table: what recipes and descriptions are made of
:class:`Introduce` how the parties' samples look, where they are somewhere else
=================  ================================================================================================

Whoever wants something is a :data:`Task`: it yields requests and receives their answers. The driver runs tasks, a
transport carries what they ask, and every answer is a tuple or table of arrays that add up over parties.

A :class:`Request` is a name, some arrays and numbers, and :class:`Rows`: which of the site's samples count. A site
decides that by itself, from a seed, its number and its own targets, so that folds, halves and bootstrap weights need no
exchange and come out alike in a simulation and in a federation.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedcomposite import rng
from fedcomposite.algorithms import ProxNewton
from fedcomposite.algorithms.base import Empty
from fedcomposite.algorithms.proxnewton import Message, bounded
from fedcomposite.data.sparse import tensors_only
from fedcomposite.problems import event_tables
from fedcomposite.problems.linear import Linear, far_means
from fedcomposite.problems.losses import Cox, Loss
from fedcomposite.problems.problem import Problem
from fedcomposite.problems.products import hessians
from fedcomposite.problems.risk_sets import CAUSE, EVENT, TIME
from fedcomposite.problems.smoothed import Smoothed
from fedcomposite.regularizers import Zero

Sums = dict[str, Tensor]
"""Arrays that add up over sites."""

_LEVEL = ("newton", "losses", "information", "schoenfeld")
"""Questions about differences of a site's samples, where the loss is about these."""
_NEVER = 1e300  # a time that is behind all others
_METHOD = ProxNewton()
_FOLD, _HALF, _BOOTSTRAP, _HALF_OF_SITES = range(4)  # streams of random numbers
_AT_ONCE = 1 << 20  # numbers of a silo's samples and models that are worked on side by side
_MOST = 12  # a Poisson(1) number is larger with a probability below 1e-10


@dataclass(frozen=True)
class Rows:
    """Which samples of a site count, and how much.

    Parameters
    ----------
    kind : str
        ``"all"``; ``"fold"``: those outside fold ``number`` of ``of``; ``"site"``: those of all sites but ``number``;
        ``"half"``: a random half, number ``number``; ``"sites"``: those of a random half of the ``of`` sites;
        ``"bootstrap"``: all, counted Poisson(1) times.
    number, of : int
        Which one, of how many.
    held : bool
        The others instead: the fold, the site, the other half.
    seed : int
        Of the random numbers. Folds and halves are balanced within a site, and within its classes.
    copy_number : int
        Of which completed copy of the table, from 1 on, where gaps were imputed by draws; 0 is the table as it is.
    """

    kind: Literal["all", "fold", "site", "half", "sites", "bootstrap"] = "all"
    number: int = 0
    of: int = 1
    held: bool = False
    seed: int = 0
    copy_number: int = 0

    @property
    def others(self) -> Rows:
        """The samples that are left out."""
        return replace(self, held=not self.held)

    @property
    def division(self) -> list[Rows]:
        """The parts into which the samples are divided: all folds, both halves, the samples of a site and no others."""
        if self.kind == "fold":
            return [replace(self, number=k, held=True) for k in range(self.of)]
        return [self, self.others]

    def counts(self, id: int, strata: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """How often each sample of site ``id`` counts; ``strata`` are its samples' classes."""
        m = len(strata)
        match self.kind:
            case "all":
                inside = np.ones(m, bool)
            case "fold":
                inside = folds_of(self.seed, id, strata, self.of) != self.number
            case "site":
                inside = np.full(m, id != self.number)
            case "half":
                inside = dealt(self.seed, id, self.number, _HALF, strata, 2) == 0
            case "sites":
                drawn = rng.words(self.seed, rng.Use.FOLD, rng.SERVER, self.number, _HALF_OF_SITES, self.of)
                inside = np.full(m, id in np.argsort(drawn, kind="stable")[: self.of // 2])
            case "bootstrap":
                drawn = rng.words(self.seed, rng.Use.FOLD, id, self.number, _BOOTSTRAP, m)
                return np.asarray(np.searchsorted(_POISSON, (drawn + 0.5) / 2.0**32), np.float64)
        return np.asarray(inside != self.held, np.float64)


ALL = Rows()
"""Every sample, once."""

_POISSON = np.cumsum(np.exp(-1.0) / np.cumprod([1.0, *range(1, _MOST + 1)]))


def dealt(
    seed: int, id: int, round: int, stream: int, strata: npt.NDArray[np.int64], parts: int
) -> npt.NDArray[np.int64]:
    """The part of each sample: shuffled within their classes, then dealt out like cards, from a random part on."""
    m = len(strata)
    drawn = rng.words(seed, rng.Use.FOLD, id, round, stream, m + 1)
    order = np.lexsort((drawn[:m], strata))
    place = np.empty(m, np.int64)
    place[order] = np.arange(m)
    return (place + int(drawn[m])) % parts


def folds_of(seed: int, id: int, strata: npt.NDArray[np.int64], folds: int) -> npt.NDArray[np.int64]:
    """The fold of each sample of site ``id``."""
    return dealt(seed, id, 0, _FOLD, strata, folds)


@dataclass(frozen=True)
class Request:
    """One question to all sites; it can be written down, so that it can travel."""

    name: str
    arrays: Mapping[str, Tensor]
    numbers: Mapping[str, float] = field(default_factory=dict)
    rows: Rows = ALL
    part: str = "train"
    by_site: bool = False
    """Whether each site's own answer is wanted, in place of their sum; only where every site's policy allows it."""

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        return sum(v.nbytes for v in self.arrays.values())


@dataclass(frozen=True)
class Introduce:
    """Ask the parties how their samples look: features, classes, counts; the answers are texts, by site."""

    name = "introduction"


def in_words(requests: Sequence[Any]) -> str:
    """What an exchange is about: ``11 newton (fold)``."""
    parts = [(r.part if r.part != "train" else r.rows.kind) if isinstance(r, Request) else "all" for r in requests]
    names = [str(r.name) if p == "all" else f"{r.name} ({p})" for p, r in zip(parts, requests, strict=True)]
    return ", ".join(f"{count} {name}" for name, count in Counter(names).items())


@dataclass(frozen=True)
class Round:
    """What one exchange of a method is for: a round, a measurement, or both."""

    round: int
    buffers: Tensor
    """What a model keeps beside its parameters, ``(b,)``."""
    message: NamedTuple | None = None
    """For the participants; None if nobody trains."""
    participants: rng.Ints | None = None
    """Their numbers, sorted."""
    model: Tensor | None = None
    """To be measured by everybody."""
    stop: bool = False
    """Whether this process wants the run to end after the round."""


T = TypeVar("T")
Task = Generator[list[Any], list[Any], T]
"""A method's rounds, one fit, one fold, a recipe being learned: it yields requests, receives their answers, and returns
its result. The answer to a :class:`Request` is its sums, or a list of them by site; that to a :class:`Round` is an
``Exchange``; that to a query about tables is a list of the sites' answers."""


Held = tuple[Tensor, Tensor, Tensor | None]
"""Held-out samples: X, b, and what is added to their margins."""


@dataclass(frozen=True)
class Silo:
    """A site's samples as its answers are made from them."""

    X: Tensor  # (m, p), with a column of ones for the intercept
    b: Tensor  # (m,), or (m, C) with several outputs
    importance: Tensor  # (m,)
    loss: Loss
    id: int
    by_samples: bool  # whether the site counts by the weight of its samples, or as one
    offset: Tensor | None = None  # (m,), what is added to the margins
    parts: Mapping[str, Held] = field(default_factory=dict)  # held-out X, b and offsets
    kept: dict[Rows, Tensor] = field(default_factory=dict, repr=False)  # weights of rows
    ranked: list[Any] = field(default_factory=list, repr=False)  # targets as a loss that is not by sample places them
    origin: Silo | None = None  # the site's own samples, where this is a part that was held out
    about: Tensor | None = None  # X with features taken about a common centre, where their means are far from zero
    level: Tensor | None = None  # X less the site's own means where these are far, for a loss that no shift changes

    @property
    def strata(self) -> npt.NDArray[np.int64]:
        """The samples' classes, those with and without an event; all alike for a regression."""
        if isinstance(self.loss, Cox):
            return self.b[:, EVENT].long().numpy()
        return self.labels(self.b).numpy() if self.loss.classifier else np.zeros(len(self.b), np.int64)

    def labels(self, b: Tensor) -> Tensor:
        """Class numbers of prepared targets."""
        return (b > 0).long() if b.ndim == 1 else b.argmax(-1)

    def weights(self, rows: Rows) -> Tensor:
        """What each sample counts among these rows; kept, since a fit asks for the same ones again."""
        if rows not in self.kept:
            self.kept[rows] = self.importance * torch.from_numpy(rows.counts(self.id, self.strata))
        return self.kept[rows]

    def share(self, total: float) -> float:
        """What the site counts among the sites."""
        return total if self.by_samples else float(total > 0)

    def of_part(self, part: str) -> Silo:
        """The same site with a held-out part in place of its samples."""
        if part == "train":
            return self
        X, b, offset = self.parts.get(part, (self.X[:0], self.b[:0], None))
        return replace(self, X=X, b=b, offset=offset, importance=X.new_ones(len(X)), kept={}, ranked=[], origin=self)

    def counted(self, rows: Rows) -> Silo:
        """The same site with every sample that is among some rows counted once, and no other."""
        return replace(self, importance=(self.weights(rows) > 0).double(), kept={})

    def margins(self, x: Tensor) -> Tensor:
        """Margins of all samples at a model, ``(m,)`` or ``(m, C)``."""
        z = self.linear(x)
        return z if self.offset is None else z + self.offset

    def linear(self, x: Tensor) -> Tensor:
        """Margins without what is added to them."""
        return self.X @ (x if self.loss.outputs == 1 else x.view(-1, self.loss.outputs))

    @property
    def placed(self) -> Any:
        """The targets as sums over all samples take them; kept, since sorting takes longer than a sum."""
        if not self.ranked:
            self.ranked.append(self.loss.placed(self.b.unsqueeze(0)))
        return self.ranked[0]

    @property
    def shift(self) -> Tensor:
        """What is added to the margins of samples with one output."""
        return self.X.new_zeros(len(self.X)) if self.offset is None else self.offset


def centre_of(X: Tensor, bias: bool) -> Tensor | None:
    """The means of features that are far from zero beside their deviation, zero for others; None if all are near.

    With an intercept, features may be taken about any centre: the intercept moves, and nothing else. Newton steps need
    that where columns of mean 1000 have a deviation of 1e-4, since their Hessian forgets the difference.
    """
    if not bias or not len(X):
        return None
    far = far_means(X[:, :-1])
    return far if bool(far.any()) else None


def of_copy(problem: Problem, number: int) -> Problem:
    """The problem on another completed copy of its silos."""
    made = copy.copy(problem)
    features = problem.silos.copies[number]
    made.silos, made._placed = replace(problem.silos, features=features, copies=()), {}
    return made


def silos_of(problem: Problem) -> list[Silo]:
    """The silos of a problem, as they answer requests."""
    smooth = problem.smooth()
    if not isinstance(smooth, Linear):
        raise ValueError("this needs a linear model; a network has no Hessian to send")
    if smooth.loss.reduction != "mean":
        raise ValueError(f"{smooth.loss}: a sum over samples; take the loss that is their mean")
    silos, nobody = problem.silos, len(problem.silos)
    tensors_only(silos.features, "an analysis by requests")
    X_all, held = (smooth.X if smooth.loss.by_sample else smooth._design(silos.features)), {}
    assert isinstance(X_all, Tensor)
    assert isinstance(smooth.X, Tensor)
    level = None if smooth.loss.by_sample or torch.equal(X_all, smooth.X) else smooth.X
    for part, (X, y) in silos.held_out.items():
        owner = silos.held_by.get(part, torch.full((len(y),), nobody))
        design = smooth._design(X)
        assert isinstance(design, Tensor)
        held[part] = design, smooth.loss.prepare(silos, y), silos.held_margin_offsets.get(part), owner
    weights = torch.ones(len(silos.targets), dtype=torch.float64) if silos.weights is None else silos.weights
    made, ids = [], list(silos.ids)
    if any(bool((owner == nobody).any()) for *_, owner in held.values()):
        ids.append(rng.SERVER)  # a party with held-out samples only
    for i, id in enumerate(ids):
        rows = slice(*(silos.offsets[i : i + 2] if i < nobody else (0, 0)))
        parts: dict[str, Held] = {
            part: (X[owner == i], b[owner == i], None if t is None else t[owner == i])
            for part, (X, b, t, owner) in held.items()
        }
        by_samples = problem.weighting == "samples"
        offset = None if silos.margin_offsets is None else silos.margin_offsets[rows]
        own = None if level is None else level[rows]
        fields = weights[rows], smooth.loss, id, by_samples, offset, parts
        made.append(Silo(X_all[rows], smooth.b[rows], *fields, level=own))
    return made


class _Oracle:
    """Loss, gradient and Hessian of a site's mean loss over weighted samples: what a method's client asks for."""

    def __init__(self, silo: Silo, weights: Tensor) -> None:
        some = weights > 0
        if float(some.double().mean()) < 0.75:  # most samples are left out
            offset = None if silo.offset is None else silo.offset[some]
            silo = replace(silo, X=silo.X[some], b=silo.b[some], offset=offset)
            weights = weights[some]
        self._silo, self._weights = silo, weights / weights.sum()
        self._seen: tuple[Tensor | None, Tensor] = (None, weights)

    def _margins(self, x: Tensor) -> Tensor:
        if self._seen[0] is not x:
            self._seen = x, self._silo.margins(x)
        return self._seen[1]

    def loss(self, x: Tensor) -> Tensor:
        """The mean loss, ``(1,)``."""
        return (self._weights @ self._silo.loss.value(self._margins(x), self._silo.b)).view(1)

    def full(self, x: Tensor) -> Tensor:
        """The gradient of the mean loss, ``(d,)``."""
        slope = self._silo.loss.derivative(self._margins(x), self._silo.b)
        return (self._silo.X.T @ (slope * self._weights.view(-1, *(1,) * (slope.ndim - 1)))).flatten()

    def hessian(self, x: Tensor, where: Tensor) -> Tensor:
        """Its Hessian on the marked coordinates."""
        s, at = self._silo, where.nonzero().squeeze(1)
        if not len(at):  # a loss with kinks has no second derivative
            return s.X.new_zeros(0, 0)
        second = s.loss.second(self._margins(x), s.b)
        return hessians(s.X[None], second[None], self._weights[None], at, s.loss.outputs)[0]


class _JointOracle(_Oracle):
    """The same for a loss that is no sum over samples: what a sample adds depends on the others."""

    def __init__(self, silo: Silo, weights: Tensor) -> None:
        self._silo, self._weights = silo, weights / weights.sum()
        self._seen = (None, weights)

    def loss(self, x: Tensor) -> Tensor:
        return self._silo.loss.total(self._margins(x)[None], self._silo.placed, self._weights[None])

    def full(self, x: Tensor) -> Tensor:
        slopes = self._silo.loss.slopes(self._margins(x)[None], self._silo.placed, self._weights[None])
        return self._silo.X.T @ slopes[0]

    def hessian(self, x: Tensor, where: Tensor) -> Tensor:
        s, at = self._silo, where.nonzero().squeeze(1)
        return s.loss.hessians(s.X[None], self._margins(x)[None], s.placed, self._weights[None], at)[0]


def _oracle(silo: Silo, weights: Tensor) -> _Oracle:
    return _Oracle(silo, weights) if silo.loss.by_sample else _JointOracle(silo, weights)


def answer(silo: Silo, request: Request) -> Sums:
    """What a site says to a request."""
    silo = _asked(silo, request)
    return _ANSWERS[request.name](silo, silo.weights(request.rows), request)


def answer_all(silo: Silo, requests: Sequence[Request]) -> list[Sums]:
    """What a site says to some requests; Newton sums of small silos at many models are made side by side."""
    made: dict[int, Sums] = {}
    alike: dict[Any, list[int]] = {}
    many = _AT_ONCE // max(1, silo.X.numel())
    if len(requests) > 1 and many > 1 and silo.loss.by_sample and silo.loss.outputs == 1:
        for k, one in enumerate(requests):
            if one.name == "newton":
                key = one.part, tuple(one.numbers.items()), one.arrays["working"].numpy().tobytes()
                alike.setdefault(key, []).append(k)
    for places in alike.values():
        own = _asked(silo, requests[places[0]])
        for at in range(0, len(places), many):
            some = places[at : at + many]
            made |= zip(some, _newtons(own, [requests[k] for k in some]), strict=True)
    return [made[k] if k in made else answer(silo, one) for k, one in enumerate(requests)]


def _asked(silo: Silo, request: Request) -> Silo:
    """The silo with the samples and the loss that a request is about."""
    width = request.numbers.get("width", 0.0)
    if width > 0:
        silo = replace(silo, loss=Smoothed(silo.loss, width))
    if request.numbers.get("centred") and silo.about is not None:
        silo = replace(silo, X=silo.about)
    elif silo.level is not None and request.name in _LEVEL:
        silo = replace(silo, X=silo.level)
    return silo.of_part(request.part)


def newton(x: Tensor, working: Tensor, rows: Rows, width: float = 0.0, centred: bool = False) -> Request:
    """Ask for loss, gradient and a piece of the Hessian at x, as means over the rows.

    ``centred`` asks for them in coordinates in which features are taken about the centre that the silos were given.
    """
    numbers: dict[str, float] = {"width": width} | ({"centred": 1.0} if centred else {})
    return Request("newton", {"x": x, "working": working}, numbers, rows)


def _weight(share: float, total: float, count: float) -> Tensor:
    """What the site counts among the sites, the weight of its samples, and how many have some."""
    return torch.tensor([share, total, count], dtype=torch.float64)


def _newton(silo: Silo, weights: Tensor, request: Request) -> Sums:
    total, counted = float(weights.sum()), float((weights > 0).sum())
    share = silo.share(total)
    if share == 0:
        weights = torch.ones_like(weights)  # shapes only
    message: Any = Message(**{k: request.arrays[k] for k in Message._fields})
    reply, _ = _METHOD.local_round(message, Empty(), _oracle(silo, weights), Zero())  # type: ignore[arg-type]
    made = {k: share * v if share > 0 else torch.zeros_like(v) for k, v in reply._asdict().items()}
    return {"weight": _weight(share, total, counted), **made}


def _newtons(silo: Silo, requests: Sequence[Request]) -> list[Sums]:
    """The same at several models, on the same coordinates, for a loss of one margin per sample."""
    W = torch.stack([silo.weights(one.rows) for one in requests])
    totals, counts = W.sum(1), (W > 0).sum(1).tolist()
    shares = [silo.share(total) for total in totals.tolist()]
    o = torch.where(totals > 0, 1 / totals, 0.0).unsqueeze(1) * W
    z, b = torch.stack([one.arrays["x"] for one in requests]) @ silo.X.T, silo.b.expand(len(W), -1)
    if silo.offset is not None:
        z = z + silo.offset
    at = requests[0].arrays["working"].nonzero().squeeze(1)
    k = len(at)
    i, j = torch.triu_indices(k, k)
    parts = {"loss": (o * silo.loss.value(z, b)).sum(1, keepdim=True)}
    parts["gradient"] = (silo.loss.derivative(z, b) * o) @ silo.X
    H = hessians(silo.X.expand(len(W), -1, -1), silo.loss.second(z, b), o, at, 1) if k else z.new_zeros(len(W), 0, 0)
    parts["hessian"] = H[:, i, j]
    counted = torch.tensor(shares, dtype=torch.float64)
    made = {key: (bounded(value) * counted.unsqueeze(1)).unbind(0) for key, value in parts.items()}
    weights = torch.stack([counted, totals, torch.tensor(counts, dtype=torch.float64)], dim=1).unbind(0)
    keys = ("weight", *made)
    return [dict(zip(keys, each, strict=True)) for each in zip(weights, *made.values(), strict=True)]


def losses(
    models: Tensor, rows: Rows, bins: int = 0, errors: bool = False, width: float = 0.0, centred: bool = False
) -> Request:
    """Ask for the deviance of several models, with ``errors`` also their errors, with ``bins`` the counts of an AUC.

    The counts ``(models, 2, 2, bins)`` are of class 1 and of class 0 in bins of z / (1 + |z|), first as if each sample
    were in the lowest bin where it may be, then in the highest one: a site that joins bins tells no more.
    """
    numbers: dict[str, float] = {"bins": bins, "errors": int(errors)}
    numbers |= ({"width": width} if width else {}) | ({"centred": 1.0} if centred else {})
    return Request("losses", {"models": models}, numbers, rows)


def _losses(silo: Silo, weights: Tensor, request: Request) -> Sums:
    if isinstance(silo.loss, Cox):
        return _partial_deviances(silo, weights, request)
    total, bins, models = float(weights.sum()), int(request.numbers["bins"]), request.arrays["models"]
    share = silo.share(total)
    o = weights / total if total > 0 else weights
    errors = bool(request.numbers.get("errors", 0))
    deviance, error = models.new_zeros(len(models)), models.new_zeros(len(models) * errors)
    counts = models.new_zeros(len(models), 2, 2, bins)
    lowest = silo.loss.lowest(silo.b)
    for k, x in enumerate(models):
        z = silo.margins(x)
        each = silo.loss.value(z, silo.b)
        deviance[k] = 2 * share * (o @ (each if lowest is None else each - lowest))
        if errors:
            error[k] = share * (o @ _errors(silo, z))
        if bins:
            counts[k] = _histogram(z, silo.labels(silo.b), weights, bins)
    weight = torch.tensor([share, total], dtype=torch.float64)
    return {"weight": weight, "deviance": deviance, "error": error, "histogram": counts}


def _partial_deviances(silo: Silo, weights: Tensor, request: Request) -> Sums:
    """The deviances of partial likelihoods; of samples that are held out, by what they add to that of the others.

    Samples that are held out have few others at risk beside them, so that the partial likelihood of these alone would
    say little (Verweij & van Houwelingen 1993). They count by their events.
    """
    models, rows = request.arrays["models"], request.rows
    parts = [(1.0, weights)]
    counted = weights
    if rows.held and rows.kind != "site":
        parts = [(1.0, silo.weights(ALL)), (-1.0, silo.weights(rows.others))]
        counted = weights * silo.b[:, EVENT]
    total = float(counted.sum())
    share = silo.share(total)
    deviance = models.new_zeros(len(models))
    for sign, w in parts:
        if share == 0 or not float(w.sum()) > 0:
            continue
        unit = sign * float(w.sum()) / total
        o = (w / w.sum())[None]
        lowest = float(silo.placed.saturated(o))
        for k, x in enumerate(models):
            deviance[k] += 2 * share * unit * (float(silo.loss.total(silo.margins(x)[None], silo.placed, o)) - lowest)
    weight = torch.tensor([share, total], dtype=torch.float64)
    none = models.new_zeros(len(models), 2, 2, 0)
    return {"weight": weight, "deviance": deviance, "error": models.new_zeros(0), "histogram": none}


def _errors(silo: Silo, z: Tensor) -> Tensor:
    """Wrong classes, or absolute errors."""
    if not silo.loss.classifier:
        return (silo.loss.response(z) - silo.b).abs()
    return ((z > 0) != (silo.b > 0) if z.ndim == 1 else z.argmax(-1) != silo.b.argmax(-1)).double()


def _histogram(z: Tensor, labels: Tensor, weights: Tensor, bins: int) -> Tensor:
    """Weights of class 1 and of class 0 in bins of z / (1 + |z|), ``(2, bins)``."""
    place = z / (1 + z.abs())
    at = ((place + 1) * (bins / 2)).long().clamp(0, bins - 1)
    made = torch.zeros(2 * bins, dtype=torch.float64).index_add_(0, torch.where(labels > 0, at, at + bins), weights)
    return made.view(2, bins)


def information(x: Tensor, rows: Rows = ALL, centred: bool = False) -> Request:
    """Ask for the whole Hessian at x and the sum of the samples' outer products of gradients.

    ``centred`` as for :func:`newton`.
    """
    return Request("information", {"x": x}, {"centred": 1.0} if centred else {}, rows)


def _information(silo: Silo, weights: Tensor, request: Request) -> Sums:
    """Sums over samples, in the site's share: gradient, Hessian, and squares of what each sample adds to the gradient.

    ``outer`` adds up squared weights, so that it is divided by the square of the summed weight.
    """
    x, total = request.arrays["x"], float(weights.sum())
    share, d = silo.share(total), len(x)
    weight = _weight(share, total, float((weights > 0).sum()))
    if share == 0:
        none = x.new_zeros(d, d)
        return {"weight": weight, "loss": x.new_zeros(1), "gradient": x.new_zeros(d), "hessian": none, "outer": none}
    oracle = _oracle(silo, weights)
    z = silo.margins(x)
    if isinstance(silo.loss, Cox):
        rows = silo.placed.residuals(silo.X[None], z[None], (share * weights / total)[None])[0]
    else:
        slope = silo.loss.derivative(z, silo.b) * (share * weights / total).view(-1, *(1,) * (z.ndim - 1))
        rows = (silo.X.unsqueeze(2) * slope.view(len(z), -1).unsqueeze(1)).flatten(1)
    everything = torch.ones(d, dtype=torch.bool)
    return {
        "weight": weight,
        "loss": share * oracle.loss(x),
        "gradient": share * oracle.full(x),
        "hessian": share * oracle.hessian(x, everything),
        "outer": rows.T @ rows,
    }


NEW = "new"
"""The part of a site's new patients: it scores them for its own people, and tells sums over those with an outcome."""


def scores(x: Tensor, edges: Tensor, part: str, rows: Rows = ALL) -> Request:
    """Ask for the counts behind every measure of a classifier's quality, in bins of its margins."""
    return Request("scores", {"x": x, "edges": edges}, {}, rows, part)


LOWEST, HIGHEST = 0, 1
"""Places of a cell's weight among the sums of ``scores``: as if its samples were in the lowest bin where they may be,
and in the highest one."""


def ranges_of(counts: Tensor) -> Tensor:
    """A site's ``counts`` of scores so that its ranges can be told from the sum over sites, ``(2, 2, bins, 7)``.

    For each class first by the lowest bins of ranges, then by the highest: how many begin (end) here, sums of their
    other ends and of the squares of these, weight, sums of z, p and z p. Where the ranges that begin in a bin all end
    in the same one, the squares say so; ``analysis.score_bins`` takes the sum apart.
    """
    classes, bins, _ = counts.shape
    made = counts.new_zeros(classes, 2, bins, 7)
    for kind, sums in enumerate(counts):
        low, high = (torch.nonzero(sums[:, end]).flatten() for end in (LOWEST, HIGHEST))
        more = sums[low][:, [i for i in range(sums.shape[1]) if i != HIGHEST]]
        for end, (here, there) in enumerate(((low, high), (high, low))):
            other = there.double().unsqueeze(1)
            made[kind, end].index_add_(0, here, torch.cat([torch.ones_like(other), other, other**2, more], 1))
    return made


def _scores(silo: Silo, weights: Tensor, request: Request) -> Sums:
    """In each class and bin, ``(2, bins, 5)``: weight twice (see :data:`LOWEST`), sums of z, p and z p; squares of p.

    z are margins and p probabilities. The squares are summed over each class; only the Brier score needs them.
    """
    edges, z, labels = request.arrays["edges"], silo.margins(request.arrays["x"]), silo.labels(silo.b)
    p, one = torch.sigmoid(z), torch.ones_like(z)
    at = torch.bucketize(z, edges, right=True) + labels * (len(edges) + 1)
    each = torch.stack([one, one, z, p, z * p], 1) * weights.unsqueeze(1)
    made = torch.zeros(2 * (len(edges) + 1), 5, dtype=torch.float64).index_add_(0, at, each)
    squares = torch.zeros(2, dtype=torch.float64).index_add_(0, labels, p * p * weights)
    return {"counts": made.view(2, -1, 5), "squares": squares}


def tallies(x: Tensor, edges: Tensor, part: str, rows: Rows = ALL) -> Request:
    """Ask how many samples of each class are in some bins of a classifier's margins; sites tell it with noise."""
    return Request("tallies", {"x": x, "edges": edges}, {}, rows, part)


def _tallies(silo: Silo, weights: Tensor, request: Request) -> Sums:
    """Weights ``(2, bins)``; of each class weight, sums of p and of its square ``(2, 3)``; and the noise.

    ``variance`` is that of the noise of each part of the bins (``tally_noise``), where a site has put some on it, and
    that of what it has taken from one class's sum of p to the other's.
    """
    told = _scores(silo, weights, request)
    counts = told["counts"]
    sums = torch.stack([counts[..., 0].sum(1), counts[..., 3].sum(1), told["squares"]], 1)
    return {"tallies": counts[..., 0].clone(), "totals": sums, "variance": counts.new_zeros(2)}


CALIBRATION = ("weight", "ones", "z", "zz", "z_ones", "loss", "p", "zp", "v", "vz", "vzz")
"""Sums behind the line a + b z of a classifier's calibration: weight, that of class 1, sums of the margins z and of
their squares, of z in class 1, the logistic loss at the line, and there sums of p, z p, v, z v and z z v, v being
p (1 - p)."""


def calibration(x: Tensor, lines: Tensor, part: str, rows: Rows = ALL) -> Request:
    """Ask for the sums behind a classifier's calibration slope and intercept, at some lines ``(k, 2)``: a and b."""
    return Request("calibration", {"x": x, "lines": lines}, {}, rows, part)


def _calibration(silo: Silo, weights: Tensor, request: Request) -> Sums:
    """:data:`CALIBRATION` at each line, ``(lines, 11)``."""
    z, ones = silo.margins(request.arrays["x"]), silo.labels(silo.b).double()
    fixed, made = [torch.ones_like(z), ones, z, z * z, z * ones], []
    for a, b in request.arrays["lines"]:
        t = a + b * z
        p = torch.sigmoid(t)
        v = p * (1 - p)
        loss = torch.nn.functional.softplus(t) - ones * t
        made.append(torch.stack([*fixed, loss, p, z * p, v, z * v, z * z * v]) @ weights)
    return {"sums": torch.stack(made) if made else weights.new_zeros(0, len(CALIBRATION))}


RESIDUALS = (
    *("weight", "squares", "targets", "target_squares", "absolute", "deviance", "means", "mean_squares", "products"),
    *("lowest", "exposure", "shifted", "margins", "kept"),
)
"""Sums behind the measures of a regression; products are of targets and means, exposure is the mean at the offset
alone, shifted and margins are targets times offset and times margin. ``kept`` is the weight of samples whose absolute
errors a site does not tell."""


def residuals(x: Tensor, edges: Tensor, part: str, rows: Rows = ALL) -> Request:
    """Ask for the sums behind every measure of a regression, and for some of them in bins of its margins."""
    return Request("residuals", {"x": x, "edges": edges}, {}, rows, part)


def _residuals(silo: Silo, weights: Tensor, request: Request) -> Sums:
    """:data:`RESIDUALS`; in each bin of margins weight, sums of means and of targets, ``(1, bins, 3)``."""
    edges, z, b = request.arrays["edges"], silo.margins(request.arrays["x"]), silo.b.double()
    mean, lowest, one = silo.loss.response(z), silo.loss.lowest(b), torch.ones_like(b)
    lowest = torch.zeros_like(b) if lowest is None else lowest
    offset = silo.shift
    wrong, deviance = mean - b, 2 * (silo.loss.value(z, silo.b) - lowest)
    sums = [one, wrong.square(), b, b.square(), wrong.abs(), deviance, mean, mean.square(), b * mean]
    sums += [lowest, silo.loss.response(offset), b * offset, b * z, torch.zeros_like(b)]
    each = torch.stack([one, mean, b], 1) * weights.unsqueeze(1)
    made = torch.zeros(len(edges) + 1, 3, dtype=torch.float64)
    return {
        "sums": torch.stack(sums) @ weights,
        "counts": made.index_add_(0, torch.bucketize(z, edges, right=True), each).unsqueeze(0),
    }


def rates(x: Tensor, slopes: Tensor, part: str, rows: Rows = ALL) -> Request:
    """Ask for the sums behind the calibration slope of a model of counts, at some slopes.

    At the slope b the margin a'x + t of a sample with the offset t becomes b a'x + t.
    """
    return Request("rates", {"x": x, "slopes": slopes}, {}, rows, part)


def _rates(silo: Silo, weights: Tensor, request: Request) -> Sums:
    """At each slope: weight, sum of means, of means times a'x, and of means times its square, ``(slopes, 4)``."""
    plain, offset, one = silo.linear(request.arrays["x"]), silo.shift, torch.ones_like(silo.b)
    made = []
    for slope in request.arrays["slopes"]:
        mean = silo.loss.response(slope * plain + offset)
        made.append(torch.stack([one, mean, mean * plain, mean * plain.square()]) @ weights)
    return {"sums": torch.stack(made) if made else weights.new_zeros(0, 4)}


# -- times to an event ------------------------------------------------------------------------------------------------


def timetable(
    times: Tensor, x: Tensor, edges: Tensor, causes: int = 1, part: str = "train", rows: Rows = ALL
) -> Request:
    """Ask how many are at risk, censored and have events of each cause, at the times of a grid.

    Groups are bins of the margins a'x between ``edges``: none, for one group; a unit vector, for those of a feature.
    """
    return Request("timetable", {"times": times, "x": x, "edges": edges}, {"causes": causes}, rows, part)


def totals(x: Tensor, cause: int | None) -> Request:
    """Ask for the samples and the events in all: a grid of one time behind all others, where everyone is at risk."""
    return timetable(x.new_full((1,), _NEVER), torch.zeros_like(x), x.new_zeros(0), cause or 1)


def share_of_events(sums: Sums) -> float:
    """The share of samples with an event, from the answer to :func:`totals`."""
    table = sums["counts"][0, :, 0]
    return float(table[-1] / table[0])


def _timetable(silo: Silo, weights: Tensor, request: Request) -> Sums:
    groups = len(request.arrays["edges"]) + 1
    causes = int(request.numbers["causes"])
    made = event_tables.counted(silo.b, weights, request.arrays["times"], group_of(silo, request), groups, causes)
    return {"counts": made}


def _least(silo: Silo) -> int:
    """Fewest samples at risk at an event that counts."""
    return silo.loss.least_at_risk if isinstance(silo.loss, Cox) else 1


def group_of(silo: Silo, request: Request) -> Tensor:
    """The group of each sample, by the margins that a question about times asks for."""
    return torch.bucketize(silo.linear(request.arrays["x"]).contiguous(), request.arrays["edges"], right=True)


def logrank(x: Tensor, edges: Tensor, rows: Rows = ALL) -> Request:
    """Ask for the sums of a log-rank test between groups, each site's samples compared among themselves."""
    return Request("logrank", {"x": x, "edges": edges}, {}, rows)


def _logrank(silo: Silo, weights: Tensor, request: Request) -> Sums:
    groups = len(request.arrays["edges"]) + 1
    group, least = group_of(silo, request), _least(silo)
    observed, expected, covariance = event_tables.compared(silo.b, weights, group, groups, least)
    return {"observed": observed, "expected": expected, "covariance": covariance}


def schoenfeld(x: Tensor, times: Tensor, values: Tensor, rows: Rows = ALL) -> Request:
    """Ask for the sums of a test of proportional hazards, for the function of time that steps to ``values``."""
    return Request("schoenfeld", {"x": x, "times": times, "values": values}, {}, rows)


def _schoenfeld(silo: Silo, weights: Tensor, request: Request) -> Sums:
    z = silo.margins(request.arrays["x"])
    g = event_tables.step_values(request.arrays["times"], request.arrays["values"], silo.b[:, TIME], 0.0)
    if not float((weights * silo.b[:, EVENT]).sum()) > 0:
        d = silo.X.shape[1]
        zeros = silo.X.new_zeros
        return {"events": zeros(3), "total": zeros(d), "residuals": zeros(d), "covariances": zeros(2, d, d)}
    return event_tables.schoenfeld(silo.placed, silo.X, z, weights, g)


def risk_sums(x: Tensor, times: Tensor, working: Tensor | None = None, rows: Rows = ALL) -> Request:
    """Ask for events and sums over those at risk at the times of a grid; with ``working`` what a common fit needs."""
    arrays = {"x": x, "times": times} | ({} if working is None else {"working": working})
    return Request("risk_sums", arrays, {}, rows)


def _risk_sums(silo: Silo, weights: Tensor, request: Request) -> Sums:
    z, working = silo.margins(request.arrays["x"]), request.arrays.get("working")
    made = event_tables.risk_sums(silo.b, silo.X, z, weights, request.arrays["times"], working)
    total, counted = float(weights.sum()), float((weights > 0).sum())
    return {"weight": _weight(silo.share(total), total, counted), **made}


def concordance(x: Tensor, part: str = "train", rows: Rows = ALL) -> Request:
    """Ask for the pairs of samples that a model has in the order of their times, and for all pairs."""
    return Request("concordance", {"x": x}, {}, rows, part)


def _concordance(silo: Silo, weights: Tensor, request: Request) -> Sums:
    events = weights * silo.b[:, EVENT]
    counts = torch.stack([weights.sum(), (weights > 0).sum().double(), events.sum()])
    pairs = event_tables.concordance(silo.b, silo.margins(request.arrays["x"]), weights, _least(silo))
    return {"pairs": pairs, "counts": counts}


def horizon(
    x: Tensor,
    at: float,
    edges: Tensor,
    groups: Tensor,
    hazard: float = -1.0,
    part: str = "train",
    rows: Rows = ALL,
) -> Request:
    """Ask how well a model tells at a time who has the event by then.

    ``edges`` are those of bins of margins, ``groups`` of groups of predictions. ``hazard`` is the baseline's until then
    for sites that the model was not made from, if it is not negative; others have their own. Samples are weighted by
    each site's own curve of censoring.
    """
    return Request("horizon", {"x": x, "edges": edges, "groups": groups}, {"at": at, "hazard": hazard}, rows, part)


def _horizon(silo: Silo, weights: Tensor, request: Request) -> Sums:
    z, seen = _by_horizon(silo, weights, request)
    return seen.sums(z, weights, request.arrays["edges"], request.arrays["groups"])


def horizon_numbers(silo: Silo, request: Request) -> tuple[Tensor, Tensor]:
    """How many samples with an event by a horizon, without, and in all are in each bin of margins, and each group."""
    own = silo.of_part(request.part)
    inside = (own.weights(request.rows) > 0).double()
    z, seen = _by_horizon(own, inside, request)
    return seen.numbers(z, inside, request.arrays["edges"], request.arrays["groups"])


def _by_horizon(silo: Silo, weights: Tensor, request: Request) -> tuple[Tensor, event_tables.Horizon]:
    z, at = silo.margins(request.arrays["x"]), request.numbers["at"]
    own, rows = silo.origin or silo, request.rows
    curve, hazard = _own_censoring(own, own.weights(ALL)), request.numbers["hazard"]
    trained = own.weights(ALL if silo.origin else rows.others if rows.held else rows)
    hazard = own_hazard(own, trained, request.arrays["x"], at, hazard)
    return z, event_tables.Horizon.of(silo.b, z, weights, at, curve, hazard)


def own_hazard(silo: Silo, weights: Tensor, x: Tensor, at: float, other: float) -> float:
    """The cumulated hazard of a site's own baseline until a time; ``other``, if not negative, where it has no event."""
    if other >= 0 and not float((weights * silo.b[:, EVENT]).sum()) > 0:
        return other
    until = torch.tensor([at], dtype=torch.float64)
    times = torch.unique(silo.b[:, TIME])
    grid = torch.cat([times[times < until], until])
    sums = event_tables.risk_sums(silo.b, silo.X, silo.margins(x), weights, grid, None)
    return float(event_tables.steps(sums["events"], sums["sizes"]).sum())


def _own_censoring(silo: Silo, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The curve of a site's samples that are not censored yet; at the same time events come first."""
    times = torch.unique(silo.b[:, TIME])
    if not len(times):
        return times, times
    none = torch.zeros(len(silo.b), dtype=torch.long)
    at_risk, censored, *events = event_tables.counted(silo.b, weights, times, none, 1, int(silo.b[:, CAUSE].max()))[0]
    return times, event_tables.kaplan_meier(at_risk - sum(events), censored)


_ANSWERS = {
    "timetable": _timetable,
    "logrank": _logrank,
    "schoenfeld": _schoenfeld,
    "risk_sums": _risk_sums,
    "concordance": _concordance,
    "horizon": _horizon,
    "rates": _rates,
    "newton": _newton,
    "losses": _losses,
    "information": _information,
    "scores": _scores,
    "tallies": _tallies,
    "calibration": _calibration,
    "residuals": _residuals,
}
