"""A study under a budget: few noised sums are asked for, and whatever an analysis asks is made of them.

First a private fit: some Newton steps, each with noised count, loss, gradient and Hessian. At the model x0 where it
ends these are asked for once more, and for a cross-validation once more for each fold. Every loss, gradient and Hessian
that a path, its folds or intervals ask for is then that of the quadratic

    q(x) = loss + g'(x - x0) + (x - x0)'H (x - x0) / 2,

and costs nothing more. For a linear regression this is exact; for other losses it is the least squares approximation of
Wang & Leng (Unified LASSO estimation by least squares approximation, 2007), as good as x0 is near.

Eigenvalues of H that noise may have made alone are raised to the norm that such noise has. Along these directions
nothing is known: intervals are given a standard error of :data:`UNKNOWN` there. Other standard errors have the noise of
the gradient, and that of the Hessian times the step from x0, beside the samples' own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fedcomposite.data.census import NoisedTables, nonnegative
from fedcomposite.data.queries import Query
from fedcomposite.privacy import BudgetError, StudyBudget
from fedcomposite.problems import Counter
from fedcomposite.problems.losses import LeastSquares, Loss
from fedcomposite.runtime.noised_sums import PARTS, bounds, deviation, lasting, placed, quadratic, strayed, triangle
from fedcomposite.runtime.protocol import ALL, RESIDUALS, Introduce, Request, Rows, Sums
from fedcomposite.runtime.transports.base import Parties

UNKNOWN = 10.0
"""The standard error along a direction whose curvature is lost in the noise."""
_REACH, _WIDTH = 6.0, 0.5  # bins of margins
_LEAST = 1.0  # samples that a sum is taken to have, whatever its noised count says


@dataclass(frozen=True)
class Quadratic:
    """Noised sums at a model; ``noises`` are how many of the mechanism's noises are in them."""

    x: Tensor
    count: float
    loss: float
    gradient: Tensor
    hessian: Tensor
    noises: int

    @classmethod
    def of(cls, x: Tensor, sums: Sums, parties: int) -> Quadratic:
        """From the answer to a request."""
        i, j, _ = triangle(len(x))
        H = x.new_empty(len(x), len(x))
        H[i, j] = H[j, i] = sums["hessian"]
        return cls(x, float(sums["count"]), float(sums["loss"]), sums["gradient"], H, parties)

    def __add__(self, other: Quadratic) -> Quadratic:
        """The same of the samples of both."""
        sums = (getattr(self, k) + getattr(other, k) for k in ("count", "loss", "gradient", "hessian", "noises"))
        return Quadratic(self.x, *sums)

    @property
    def samples(self) -> float:
        """Their number, as far as it is known."""
        return max(self.count, _LEAST)


class NoisedModel:
    """A quadratic as a function of models, with what is known of its noise."""

    def __init__(self, q: Quadratic, deviations: dict[str, float]) -> None:
        self.q = q
        self._gradient, self._hessian = (math.sqrt(q.noises) * deviations[k] for k in ("gradient", "hessian"))
        self.least = self._hessian * math.sqrt(2 * len(q.x))
        """The norm of the Hessian's noise: entries of deviation s, on the diagonal, have about s sqrt(2 d)."""

    @cached_property
    def _spectrum(self) -> tuple[Tensor, Tensor]:
        values, vectors = torch.linalg.eigh(self.q.hessian)
        return values, vectors

    @cached_property
    def hessian(self) -> Tensor:
        """The Hessian, positive."""
        values, vectors = self._spectrum
        made: Tensor = (vectors * values.clamp(min=max(self.least, 1e-12))) @ vectors.T
        return made

    def look(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Loss ``(1,)`` and gradient, as sums."""
        move = x - self.q.x
        bent = self.hessian @ move
        return (self.q.loss + self.q.gradient @ move + move @ bent / 2).view(1), self.q.gradient + bent

    def following(self) -> Tensor:
        """The model of the next Newton step: the minimum with a ridge as strong as the noise."""
        damped = self.hessian + self.least * torch.eye(len(self.q.x), dtype=self.q.x.dtype)
        made: Tensor = torch.linalg.solve(damped, self.hessian @ self.q.x - self.q.gradient)
        return made

    def covariance(self, x: Tensor, dispersion: float) -> Tensor:
        """Of the gradient at x: of the samples, by the model; of both noises; and of what noise has hidden."""
        values, vectors = self._spectrum
        move, eye = x - self.q.x, torch.eye(len(x), dtype=x.dtype)
        bent = self._hessian**2 / 2 * (move @ move * eye + torch.outer(move, move))
        hidden = vectors[:, values < self.least]
        blind = (UNKNOWN * self.least) ** 2 * hidden @ hidden.T
        return dispersion * self.hessian + self._gradient**2 * eye + bent + blind


class StudyTransport:
    """What analyses ask, made of noised sums that are asked of parties once.

    Parameters
    ----------
    ask : callable
        Asks the parties for noised sums, in one exchange.
    parties : Parties
        Who they are.
    budget : StudyBudget
        What they noise by.
    loss : Loss
        Of the model.
    bias : bool
        Whether it has an intercept.
    """

    by_site = noised = False
    centre = None

    def __init__(
        self,
        ask: Callable[[Sequence[Any]], list[Any]],
        parties: Parties,
        budget: StudyBudget,
        loss: Loss,
        bias: bool,
    ) -> None:
        self._ask, self._parties, self._budget, self._loss = ask, parties, budget, loss
        self._deviations = {k: deviation(budget, b, PARTS[k]) for k, b in bounds(loss, budget, bias).items()}
        self._models: dict[Rows, NoisedModel] = {}
        self._tables = NoisedTables(lambda query: list(self._ask([query])[0]), budget, parties.names)
        self.counter = Counter()

    @property
    def names(self) -> list[str]:
        """The parties."""
        return self._parties.names

    @property
    def ids(self) -> list[int]:
        """The numbers of those with samples."""
        return self._parties.ids

    def running(self) -> AbstractContextManager[None]:
        """As the parties have it."""
        return self._parties.running()

    def recalled(self, requests: Sequence[Any]) -> None:
        """Logs are of the parties' answers, not of these."""

    def ask(self, requests: Sequence[Any]) -> list[Any]:
        """The answers: counts are asked of the parties in one exchange, the rest is computed."""
        places = {kind: [i for i, one in enumerate(requests) if _is(one, kind)] for kind in _COUNTED}
        asked, made = list[Request](), dict[int, Any]()
        for kind, (counts, _) in _COUNTED.items():
            asked += counts([requests[i] for i in places[kind]])
        told = self._ask(asked) if asked else []
        for kind, (_, answers) in _COUNTED.items():
            made |= zip(places[kind], answers([requests[i] for i in places[kind]], told), strict=True)
        return [made[i] if i in made else self._made(one) for i, one in enumerate(requests)]

    def _made(self, one: Any) -> Any:
        if isinstance(one, Introduce):
            return self._ask([one])[0]
        if isinstance(one, Query):
            return self._tables(one)
        match one.name:
            case "newton":
                return self._newton(one)
            case "losses":
                return self._losses(one)
            case "information":
                return self._information(one)
        raise BudgetError(f"{one.name!r} has no noised form; a study under a budget is without it")

    # -- quadratics ---------------------------------------------------------------------------------------------------

    def model(self, rows: Rows, d: int) -> NoisedModel:
        """The quadratic of some rows, asked for when it is needed first."""
        if ALL not in self._models:
            self._fit(d)
        if rows not in self._models:
            self._fold(rows, d)
        return self._models[rows]

    def _quadratics(self, x: Tensor, each: Sequence[Rows]) -> list[Quadratic]:
        sums = self._ask([quadratic(x, rows) for rows in each])
        return [Quadratic.of(x, one, len(self.names)) for one in sums]

    def _fit(self, d: int) -> None:
        """Go to where quadratics are taken, and take that of all samples."""
        x = torch.zeros(d, dtype=torch.float64)
        for _ in range(0 if isinstance(self._loss, LeastSquares) else self._budget.steps):
            x = NoisedModel(self._quadratics(x, [ALL])[0], self._deviations).following()
        self._models[ALL] = NoisedModel(self._quadratics(x, [ALL])[0], self._deviations)

    def _fold(self, rows: Rows, d: int) -> None:
        """Take those of all folds of a division; each was drawn by itself, so that the others' sum has not seen it."""
        if rows.kind != "fold":
            raise BudgetError(f"rows of kind {rows.kind!r} have no noised form: ask about all, or about folds")
        held = [Rows("fold", k, rows.of, True, rows.seed) for k in range(rows.of)]
        found = self._quadratics(self._models[ALL].q.x, held)
        for one, q in zip(held, found, strict=True):
            first, *rest = [other for other in found if other is not q]
            self._models[one] = NoisedModel(q, self._deviations)
            self._models[one.others] = NoisedModel(sum(rest, first), self._deviations)

    def _newton(self, one: Request) -> Sums:
        x, at = one.arrays["x"], one.arrays["working"].nonzero().squeeze(1)
        found = self.model(one.rows, len(x))
        loss, gradient = found.look(x)
        i, j = torch.triu_indices(len(at), len(at))
        tri = found.hessian[at][:, at][i, j]
        return {"weight": _weight(found, 3), "loss": loss, "gradient": gradient, "hessian": tri}

    def _losses(self, one: Request) -> Sums:
        if one.numbers.get("bins") or one.numbers.get("errors"):
            raise BudgetError("under a budget folds are scored by their deviance: scoring = 'deviance'")
        models = one.arrays["models"]
        found = self.model(one.rows, models.shape[1])
        deviance = 2 * torch.cat([found.look(x)[0] for x in models])
        none = models.new_zeros(len(models), 2, 2, 0)
        return {"weight": _weight(found, 2), "deviance": deviance, "error": models.new_zeros(0), "histogram": none}

    def _information(self, one: Request) -> Sums:
        x = one.arrays["x"]
        found = self.model(one.rows, len(x))
        loss, gradient = found.look(x)
        dispersion = 1.0
        if isinstance(self._loss, LeastSquares):
            dispersion = max(2 * float(loss), 1e-12) / max(found.q.samples - len(x), _LEAST)
        sums = {"loss": loss, "gradient": gradient, "hessian": found.hessian}
        return {"weight": _weight(found, 3), **sums, "outer": found.covariance(x, dispersion)}


def _weight(found: NoisedModel, entries: int) -> Tensor:
    return torch.full((entries,), found.q.samples, dtype=torch.float64)


def margin_cells() -> Tensor:
    """The edges of the cells in which margins are counted under a budget."""
    return torch.arange(-_REACH, _REACH + _WIDTH / 2, _WIDTH, dtype=torch.float64)


def on_simplex(counts: Tensor) -> Tensor:
    """The nearest counts that are not negative and have the same sum; all zero where that is not positive."""
    total = float(counts.sum())
    if total <= 0:
        return torch.zeros_like(counts)
    return torch.from_numpy(nonnegative(counts.flatten().numpy(), total)).view(counts.shape)


# -- counts -----------------------------------------------------------------------------------------------------------
# Of each kind of request: what is asked of the parties for some of them, and the answers, which take their part of what
# was told from its beginning.


def _is(one: Any, kind: str) -> bool:
    return isinstance(one, Request) and one.name == kind


def _together(requests: Sequence[Request]) -> list[list[Request]]:
    """Groups of requests that are one noised request: of all samples, or of all folds, each by its own model."""
    made, rest = [], list(requests)
    while rest:
        first = rest[0].rows
        folds = [ALL] if first == ALL else [Rows("fold", k, first.of, True, first.seed) for k in range(first.of)]
        own, rest = rest[: len(folds)], rest[len(folds) :]
        if [one.rows for one in own] != folds:
            raise BudgetError("single folds are not scored under a budget: ask about all samples, or about all folds")
        made.append(own)
    return made


def _models(group: Sequence[Request]) -> Tensor:
    return torch.stack([one.arrays["x"] for one in group])


def _ask_scores(requests: Sequence[Request]) -> list[Request]:
    return [placed(_models(g), margin_cells(), g[0].part, g[0].rows) for g in _together(requests)]


def _scores(requests: Sequence[Request], told: list[Sums]) -> list[Sums]:
    """Sums of margins and probabilities as if all samples of a cell were in its middle; all folds' are the first's."""
    cells = margin_cells()
    middle = torch.cat([cells - _WIDTH / 2, cells[-1:] + _WIDTH / 2])
    p, found = torch.sigmoid(middle), list[Sums]()
    each = torch.stack([torch.ones_like(p), torch.ones_like(p), middle, p, middle * p], 1)
    for group in _together(requests):
        counts = torch.stack([on_simplex(one) for one in told.pop(0)["counts"]])
        for one in group:
            at = torch.bucketize(middle, one.arrays["edges"], right=True)
            made = torch.zeros(2, len(one.arrays["edges"]) + 1, 5, dtype=torch.float64)
            for kind in (0, 1):
                made[kind].index_add_(0, at, each * counts[kind].unsqueeze(1))
            found.append({"counts": made, "squares": counts @ p.square()})
            counts = torch.zeros_like(counts)
    return found


def _ask_residuals(requests: Sequence[Request]) -> list[Request]:
    return [strayed(_models(g), g[0].part, g[0].rows) for g in _together(requests)]


def _residuals(requests: Sequence[Request], told: list[Sums]) -> list[Sums]:
    """The sums of a regression, squared errors from targets, predictions and products; all folds' are the first's."""
    found = list[Sums]()
    for group in _together(requests):
        sums = {name: float(value) for name, value in told.pop(0).items()}
        sums["weight"] = max(sums["weight"], _LEAST)
        squared = sums["target_squares"] - 2 * sums["products"] + sums["mean_squares"]
        sums["squares"] = sums["deviance"] = max(squared, 0.0)
        for one in group:
            made = torch.tensor([sums.get(name, 0.0) for name in RESIDUALS], dtype=torch.float64)
            cells = torch.zeros(1, len(one.arrays["edges"]) + 1, 3, dtype=torch.float64)
            cells[0, 0] = torch.tensor([sums.get(name, 0.0) for name in ("weight", "means", "targets")])
            found.append({"sums": made, "counts": cells})
            sums = {}
    return found


def _ask_times(requests: Sequence[Request]) -> list[Request]:
    made = []
    for one in requests:
        times, x, edges = (one.arrays[key] for key in ("times", "x", "edges"))
        made.append(lasting(times, x, edges, int(one.numbers["causes"]), one.part, one.rows))
    return made


def _timetables(requests: Sequence[Request], told: list[Sums]) -> list[Sums]:
    """At risk are all whose time is here or later."""
    found = list[Sums]()
    for _ in requests:
        counts = torch.stack([on_simplex(each) for each in told.pop(0)["counts"]])
        here = counts.sum(1)
        at_risk = here.flip(1).cumsum(1).flip(1)[:, :-1]
        found.append({"counts": torch.cat([at_risk.unsqueeze(1), counts[:, :, :-1]], 1)})
    return found


_Asks = Callable[[Sequence[Request]], list[Request]]
_Answers = Callable[[Sequence[Request], list[Sums]], list[Sums]]
_COUNTED: dict[str, tuple[_Asks, _Answers]] = {
    "scores": (_ask_scores, _scores),
    "residuals": (_ask_residuals, _residuals),
    "timetable": (_ask_times, _timetables),
}
