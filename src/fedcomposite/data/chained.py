"""Multiple imputation by chained equations: gaps are drawn, several times, from models of each column given all others.

A column with gaps has a conditional model on all other columns and the target: normal (of numbers, of logarithms where
the recipe takes them), logistic or multinomial (of categories). Its parameters are drawn from their posterior, and the
values by them (Rubin 1987; van Buuren 2018, sections 3 and 4). A site completes its table by models of its own, fitted
to its own rows, with random numbers of its own: sites may differ, and no asker has a word in it. A column of which a
site has too few values for that, or none, follows after that, by parameters that are fitted to the sums of the sites
that have it. Let a visit be one column's turn. Its rows X are the other columns, standardized, at their present values,
and a 1. With the prior N(0, 2.5^2) of each coefficient, which makes all of them finite,

    b, H:  the maximum of the posterior, and the curvature there
    normal:  s^2 = RSS / chi2(n - k),  b* ~ N(b, s^2 H^-1),  value ~ N(x'b*, s^2)
    others:  b* ~ N(b, H^-1),  level ~ softmax(x'b*)

At a site that tells sums with minimum counts, no answer may be about fewer rows. A column that few of its rows have is
drawn in all of them. One with few gaps is filled with values of its own, alike in all copies; so is a category where
two copies would differ in few rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, model_validator

if TYPE_CHECKING:
    from fedcomposite.data.sheets import Sheet

Floats = npt.NDArray[np.float64]
PRIOR = 0.16
"""The precision of a coefficient's prior, on standardized columns: a deviation of 2.5."""
_UNSEEN = 1e6  # that of a column that is constant where a model is fitted: it has no part in the model
MARGIN = 4.0
"""Where margins of levels are cut that follow others' parameters: no row's level is certain then."""
_ROWS = 2  # for each number that a row has: with fewer a site takes the others' model
_STEPS = 25  # of Newton's method for one visit
_CLOSE = 1e-6  # deviations of the posterior: a step so short is the last
_OWN, _LOCAL, _BORROWED = range(3)  # streams of a site's random numbers


@dataclass
class Drawing:
    """What a site draws its values by: a secret number, and how many rows must share what sums are told of."""

    seed: int
    least: int = 1
    kept: dict[str, dict[str, npt.NDArray[Any]]] = field(default_factory=dict, repr=False)
    """The table that was completed last, by what it was made of."""


class ConditionalModels(BaseModel):
    """Conditional models in their order of visits, with the parameters that were drawn so far."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    columns: dict[str, list[str]]
    """All features: the levels of a category, the first is the reference; none for numbers."""
    equations: list[str]
    """Those with gaps, in their order."""
    scale: dict[str, tuple[FiniteFloat, FiniteFloat]]
    """Mean and deviation of numbers (of their logarithms), the target and times among them."""
    logs: dict[str, FiniteFloat] = {}
    """What is added before a logarithm is taken."""
    start: dict[str, FiniteFloat | str]
    """What gaps begin with; new samples, whose outcome is not known, keep it."""
    outcomes: list[str]
    """The target, and the time of an event."""
    levels: dict[str, FiniteFloat] = {}
    """Numbers for the levels of a text target."""
    copies: int = Field(ge=1, le=200)
    iterations: int = Field(ge=1, le=200)
    """Visits of a site to each of its columns."""
    borrowed: list[str] = []
    """The columns that some sites lack, in the order of their visits."""
    draws: list[list[list[FiniteFloat]]] = []
    """Of every visit to these so far, for each copy: coefficients, class by class, and of a normal model the deviation.
    """

    @model_validator(mode="after")
    def _fitting(self) -> Self:
        if not {*self.equations, *self.borrowed} <= self.columns.keys() or not set(self.borrowed) <= {*self.equations}:
            raise ValueError("an equation of no column")
        for visit, each in enumerate(self.draws):
            name = self.borrowed[visit % len(self.borrowed)] if self.borrowed else ""
            width = self.outputs(name) * self.width(name) + (not self.columns[name]) if name else -1
            if [len(one) for one in each] != [width] * self.copies:
                raise ValueError(f"the draws of visit {visit + 1} must be {self.copies} lists of {width} numbers")
        return self

    @property
    def digest(self) -> str:
        """Of all that a site's own models hang on."""
        return hashlib.sha256(self.model_dump_json(exclude={"borrowed", "draws"}).encode()).hexdigest()

    def width(self, name: str) -> int:
        """How many numbers an equation's rows have."""
        numbers = sum(max(len(levels) - 1, 1) for column, levels in self.columns.items() if column != name)
        return numbers + len(self.outcomes) + 1

    def outputs(self, name: str) -> int:
        """Coefficients of each number: one, or one for each level but the reference."""
        return max(len(self.columns[name]) - 1, 1)

    def completed(self, sheet: Sheet) -> list[Sheet]:
        """The copies of a table without gaps; one, with what gaps begin with, where nothing may be drawn."""
        state, made = State(self, sheet), []
        for k in range(self.copies if sheet.drawing is not None else 1):
            columns, filled = dict(sheet.columns), dict(sheet.filled)
            for name in self.equations:
                columns[name], filled[name] = state.filled(name, k), state.gone[name]
            made.append(replace(sheet, columns=columns, filled=filled))
        return made


class State:
    """The present values of all copies of a site's table."""

    def __init__(self, chain: ConditionalModels, sheet: Sheet) -> None:
        self.chain, self.sheet = chain, sheet
        drawing = sheet.drawing
        self.least = 1 if drawing is None else drawing.least
        self.gone = {name: sheet.missing(name) for name in chain.equations}
        seen = {name: int((~gone).sum()) for name, gone in self.gone.items()}
        self.share = {name: count / max(sheet.rows, 1) for name, count in seen.items()}
        self.lacking = [name for name, count in seen.items() if count < max(_ROWS * chain.width(name), self.least)]
        self.few = [
            name for name, gone in self.gone.items() if 0 < gone.sum() < self.least and name not in self.lacking
        ]
        if self.least > 1:  # sums of a column that few rows have, and of its filling, would be about these
            self.gone |= {name: np.ones(sheet.rows, bool) for name in self.lacking}
        copies = chain.copies if drawing is not None else 1
        self.values: dict[str, npt.NDArray[Any]] = {}  # (copies, rows): scaled numbers, or places of levels
        for name in chain.columns:
            self.values[name] = np.tile(self._own(name), (copies, 1))
        self.outcomes = [self._outcome(name) for name in chain.outcomes]
        if drawing is None:
            return
        keys = self._keys()
        done = max((i for i, key in enumerate(keys) if key in drawing.kept), default=-1)
        if done < 0:
            self._complete()
        else:
            self.values = {name: values.copy() for name, values in drawing.kept[keys[done]].items()}
        for visit, drawn in list(enumerate(chain.draws))[max(done, 0) :]:
            name = chain.borrowed[visit % len(chain.borrowed)]
            if name in self.lacking:
                self._put(name, np.array(drawn), self._numbers(_BORROWED, visit), MARGIN)
        if done < len(keys) - 1:
            drawing.kept.clear()
            drawing.kept[keys[-1]] = {name: values.copy() for name, values in self.values.items()}

    def _keys(self) -> list[str]:
        """What completed values hang on, before the visits to borrowed columns and after each."""
        made = hashlib.sha256(self.chain.digest.encode())
        for name in [*self.chain.columns, *self.chain.outcomes]:
            if name in self.sheet.columns:
                values = self.sheet.columns[name]
                made.update(values.tobytes() if values.dtype == np.float64 else repr(values.tolist()).encode())
        keys = [made.hexdigest()]
        for drawn in self.chain.draws:
            made.update(repr(drawn).encode())
            keys.append(made.hexdigest())
        return keys

    def _numbers(self, stream: int, *place: int) -> np.random.Generator:
        """The site's random numbers of one visit."""
        assert self.sheet.drawing is not None
        return np.random.default_rng([self.sheet.drawing.seed, int(self.chain.digest[:16], 16), stream, *place])

    def _own(self, name: str) -> npt.NDArray[Any]:
        """A column as the file has it, its gaps filled with their start; few of them with values of the site's own."""
        chain, levels = self.chain, self.chain.columns[name]
        if levels:
            texts = self.sheet.texts(name).copy()
            if name in self.gone:
                texts[self.gone[name]] = chain.start[name]
            place = {text: i for i, text in enumerate(levels)}
            values: npt.NDArray[Any] = np.array([place.get(text, 0) for text in texts], np.int64)
        else:
            numbers = self.sheet.numbers(name)
            if name in self.gone:
                numbers = np.where(self.gone[name], float(chain.start[name]), numbers)
            if name in chain.logs:
                numbers = np.log(numbers + chain.logs[name])
            mean, sd = chain.scale[name]
            values = (numbers - mean) / sd
        if name in self.few and self.sheet.drawing is not None:
            gone = self.gone[name]
            picked = self._numbers(_OWN, chain.equations.index(name)).integers(int((~gone).sum()), size=len(gone))
            values[gone] = values[~gone][picked[gone]]
        return values

    def _outcome(self, name: str) -> Floats:
        """The target, or the logarithm of a time."""
        if name not in self.sheet.columns:
            return np.zeros(self.sheet.rows)
        if name == self.chain.outcomes[0] and self.chain.levels:
            values = np.array([self.chain.levels.get(t or "", np.nan) for t in self.sheet.texts(name)], np.float64)
        else:
            values = self.sheet.numbers(name)
        if name in self.chain.logs:
            values = np.log(values + self.chain.logs[name])
        mean, sd = self.chain.scale[name]
        return np.nan_to_num((values - mean) / sd)

    def design(self, name: str) -> Floats:
        """The rows of an equation, ``(copies, rows, width)``."""
        copies, rows = next(iter(self.values.values())).shape
        parts: list[Floats] = []
        for column, levels in self.chain.columns.items():
            if column == name:
                continue
            now = self.values[column]
            parts += [now == i + 1 for i in range(len(levels) - 1)] if levels else [now]
            if levels and len(levels) == 1:
                parts.append(np.zeros_like(now))
        shared = [np.broadcast_to(one, (copies, rows)) for one in self.outcomes]
        return np.stack([*parts, *shared, np.ones((copies, rows))], axis=-1).astype(np.float64)

    def margins(self, name: str, points: Floats) -> Floats:
        """Margins of the levels of a category at some coefficients, ``(copies, rows, levels - 1)``."""
        X, outputs = self.design(name), self.chain.outputs(name)
        made: Floats = X @ points.reshape(len(X), outputs, X.shape[2]).transpose(0, 2, 1)
        return made

    def known(self) -> Floats:
        """What the site's rows are known by in sums, but for columns that follow others' parameters."""
        kept = [name for name in self.chain.columns if name not in self.lacking]
        parts = [one for name in kept for one in self._coded(name)]
        return np.stack([*parts, *self.outcomes, np.ones(self.sheet.rows)], axis=1).astype(np.float64)

    def _coded(self, name: str) -> list[npt.NDArray[Any]]:
        now, levels = self.values[name][0], self.chain.columns[name]
        return [now == i + 1 for i in range(len(levels) - 1)] if levels else [now]

    def _complete(self) -> None:
        """Visits to all columns that the site has models of its own for."""
        chain = self.chain
        own = [name for name in chain.equations if self.gone[name].any() and name not in [*self.few, *self.lacking]]
        last: dict[str, Floats] = {}
        for turn in range(chain.iterations):
            for name in own:
                there, normal = ~self.gone[name], not chain.columns[name]
                X, now = self.design(name)[:, there], self.values[name][:, there]
                B = last.get(name, np.zeros((chain.copies, chain.outputs(name) * chain.width(name))))
                found = maximum(partial(sums, X, now, normal), B, normal, X.shape[2])
                last[name], generator = found.B, self._numbers(_LOCAL, turn, chain.equations.index(name))
                self._put(name, parameters(found, normal, generator), generator)
        for name in own:
            if chain.columns[name] and self._nearly_alike(self.values[name]):
                self.values[name][:] = self.values[name][0]

    def _nearly_alike(self, now: npt.NDArray[Any]) -> bool:
        """Whether two copies of a category differ in some, but few rows."""
        differing = (int((a != b).sum()) for a, b in combinations(now, 2))
        return self.least > 1 and any(0 < count < self.least for count in differing)

    def _put(self, name: str, drawn: Floats, generator: np.random.Generator, most: float = np.inf) -> None:
        """Put new values in the gaps of a column."""
        X, gone = self.design(name), self.gone[name]
        k = X.shape[2]
        if not self.chain.columns[name]:
            noise = generator.normal(size=X.shape[:2])
            new: npt.NDArray[Any] = (X @ drawn[:, :k, None])[..., 0] + drawn[:, k:] * noise
        else:
            z = self.margins(name, drawn)
            p = shares(z.clip(-most, most)).cumsum(-1)
            new = (generator.random(X.shape[:2])[..., None] > p[..., :-1]).sum(-1)
        self.values[name][:, gone] = new[:, gone]

    def filled(self, name: str, copy: int) -> npt.NDArray[Any]:
        """A column of a copy, as the file would have it."""
        gone, now, own = self.gone[name], self.values[name][copy], self.sheet.columns[name]
        levels = self.chain.columns[name]
        if levels and own.dtype == object:
            texts = own.copy()
            texts[gone] = np.array(levels, object)[now[gone]]
            return texts
        if levels:
            return np.where(gone, np.array([float(one) for one in levels])[now], self.sheet.numbers(name))
        mean, sd = self.chain.scale[name]
        values = mean + sd * now
        if name in self.chain.logs:
            values = np.exp(values) - self.chain.logs[name]
        return np.where(gone, values, self.sheet.numbers(name))


def shares(z: Floats) -> Floats:
    """Probabilities of the levels, the reference first, from margins ``(..., levels - 1)``."""
    whole = np.concatenate([np.zeros_like(z[..., :1]), z], -1)
    whole = np.exp(whole - whole.max(-1, keepdims=True))
    made: Floats = whole / whole.sum(-1, keepdims=True)
    return made


class Terms(NamedTuple):
    """Rows, and of each copy loss, gradient and Hessian of an equation at some coefficients."""

    n: float
    loss: Floats
    gradient: Floats
    hessian: Floats


def sums(X: Floats, now: npt.NDArray[Any], normal: bool, points: Floats) -> Terms:
    """Sums over rows ``X``, ``(copies, rows, width)``, of an equation of the values ``now``, ``(copies, rows)``."""
    k = X.shape[2]
    outputs = points.shape[1] // k
    z = X @ points.reshape(len(X), outputs, k).transpose(0, 2, 1)
    if normal:
        residual = z[..., 0] - now
        return Terms(X.shape[1], 0.5 * (residual**2).sum(1), _times(residual, X), X.transpose(0, 2, 1) @ X)
    p, y = shares(z), np.eye(outputs + 1)[now]
    loss = -np.log(np.maximum((p * y).sum(-1), 1e-300)).sum(1)
    slope, q = (p - y)[..., 1:], p[..., 1:]
    gradient = np.concatenate([_times(slope[..., o], X) for o in range(outputs)], 1)
    H = np.zeros((len(X), outputs, k, outputs, k))
    for o in range(outputs):
        for r in range(o, outputs):
            weight = q[..., o] * ((o == r) - q[..., r])
            H[:, o, :, r] = H[:, r, :, o] = X.transpose(0, 2, 1) @ (weight[..., None] * X)
    return Terms(X.shape[1], loss, gradient, H.reshape(len(X), outputs * k, outputs * k))


def _times(weights: Floats, X: Floats) -> Floats:
    made: Floats = (weights[:, None] @ X)[:, 0]
    return made


def told_sums(state: State, name: str, points: Floats, least: int) -> Terms | None:
    """A site's sums over all of its rows for others that lack a column; None if it has too little to say.

    Each row counts by the share of rows that have the column: drawn values say nothing new. A column of X in which few
    rows are unlike the others is constant; None where the column itself is such.
    """
    normal = not state.chain.columns[name]
    if name in state.lacking:
        return None
    X, now = state.design(name), state.values[name]
    for X_k, values_k in zip(X if least > 1 else [], now, strict=False):
        for j in range(X.shape[2] - 1):
            values, counts = np.unique(X_k[:, j], return_counts=True)
            if 0 < len(X_k) - counts.max(initial=0) < least:
                X_k[:, j] = values[counts.argmax()]
        _, counts = np.unique(values_k, return_counts=True)
        rare = len(values_k) - int(counts.max(initial=0)) if normal else min(counts, default=0)
        if len(values_k) < least or (len(counts) > 1 and rare < least):
            return None
    share, (n, loss, gradient, H) = state.share[name], sums(X, now, normal, points)
    return Terms(share * n, share * loss, share * gradient, share * H)


class Maximum(NamedTuple):
    """The maximum of the posterior in every copy, the curvature there, squares of a normal model, and rows."""

    B: Floats
    H: Floats
    squares: Floats
    n: float


def _precision(H: Floats, width: int) -> Floats:
    """Of the prior of each coefficient; the last of ``width`` columns is the intercept's."""
    blocks = [H[:, i : i + width, i : i + width] for i in range(0, H.shape[1], width)]
    made = []
    for one in blocks:
        squares, level = np.einsum("mjj->mj", one), one[:, :, -1]
        spread = squares - level**2 / np.maximum(level[:, -1:], 1e-300)
        unseen = spread <= 1e-6 * squares
        unseen[:, -1] = False
        made.append(np.where(unseen, _UNSEEN, PRIOR))
    return np.concatenate(made, axis=1)


def maximum(ask: Callable[[Floats], Terms], B: Floats, normal: bool, width: int) -> Maximum:
    """Newton's method from ``B``, ``(copies, coefficients)``; a normal model takes one step."""
    d = B.shape[1]
    for _ in range(_STEPS):
        n, loss, gradient, H = ask(B)
        precision = _precision(H, width)
        whole = H + precision[:, None] * np.eye(d)
        step = np.linalg.solve(whole, (gradient + precision * B)[..., None])[..., 0]
        gain = np.einsum("md,mde,me->m", step, whole, step)
        length = np.minimum(1.0, 3.0 / np.sqrt(np.maximum(gain, 1e-300)) * np.sqrt(d)) if not normal else 1.0
        B = B - step * np.broadcast_to(length, (len(B),))[:, None]
        if normal or float(gain.max()) < _CLOSE**2:
            break
    # a normal model's loss at the end of the step is that at its beginning less half of what it gained
    gained = 2 * np.einsum("md,md->m", gradient, step) - np.einsum("md,mde,me->m", step, H, step)
    return Maximum(B, whole, np.maximum(2 * loss - gained, 1e-12), n)


def parameters(found: Maximum, normal: bool, generator: np.random.Generator) -> Floats:
    """Draws from the posterior, ``(copies, coefficients)``, and beside them the deviation of a normal model."""
    B, H, squares, n = found
    spread = np.ones(len(B))
    if normal:
        spread = np.sqrt(squares / generator.chisquare(max(n - B.shape[1], 1.0), size=len(B)))
    roots = np.linalg.cholesky(np.linalg.inv(H))
    B = B + spread[:, None] * np.einsum("mde,me->md", roots, generator.normal(size=B.shape))
    return np.column_stack([B, spread]) if normal else B
