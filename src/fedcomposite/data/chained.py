"""Multiple imputation by chained equations: gaps are drawn, several times, from models of each column given all others.

A column with gaps has a conditional model on all other columns and the target: normal (of numbers, of logarithms where
the recipe takes them), logistic or multinomial (of categories). Its parameters are fitted to the rows that have the
column, from sums over sites, and drawn from their posterior; the values are drawn with random numbers of each site's
own (Rubin 1987; van Buuren 2018, sections 3 and 4). So far the sites' files are at hand: an asker who chose other
parameters could make columns that single patients stand out in, so that sites of a federation refuse the query.

Let a visit be one column's turn. Its rows X are the other columns, standardized, at their present values, and a 1. With
the prior N(0, 100) of each coefficient, which makes all of them finite,

    b, H:  the maximum of the posterior, and the curvature there
    normal:  s^2 = RSS / chi2(n - k),  b* ~ N(b, s^2 H^-1),  value ~ N(x'b*, s^2)
    others:  b* ~ N(b, H^-1),  level ~ softmax(x'b*)

All copies take their visits at the same time, in the same exchanges. A site that tells sums with minimum counts leaves
rows out whose pattern of gaps few others share, and fills the gaps of a column that has few with values of its own, so
that no asked model is about them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

if TYPE_CHECKING:
    from fedcomposite.data.sheets import Sheet

Floats = npt.NDArray[np.float64]
Marks = npt.NDArray[np.bool_]
PRIOR = 0.01
"""The precision of a coefficient's prior, on standardized columns."""
_OWN = 1 << 20  # streams of random numbers from here on are a site's own fillings


class Drawing(NamedTuple):
    """What a site draws its values by: a secret number, and how many rows must share what sums are told of."""

    seed: int
    least: int = 1


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
    draws: list[list[list[FiniteFloat]]] = []
    """Of every visit so far, for each copy: coefficients, class by class, and of a normal model the deviation."""

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
        self.gone = {name: sheet.missing(name) for name in chain.equations}
        self.values: dict[str, npt.NDArray[Any]] = {}  # (copies, rows): scaled numbers, or places of levels
        drawing = sheet.drawing
        self._least = 1 if drawing is None else drawing.least
        self.few = {name: bool(0 < gone.sum() < self._least) for name, gone in self.gone.items()}
        copies = chain.copies if drawing is not None else 1
        for name in chain.columns:
            self.values[name] = np.tile(self._own(name), (copies, 1))
        self.outcomes = [self._outcome(name) for name in chain.outcomes]
        for visit, drawn in enumerate(chain.draws if drawing is not None else []):
            name = chain.equations[visit % len(chain.equations)]
            gone = self.gone[name]
            if gone.any() and not self.few[name]:
                self.values[name][:, gone] = self._drawn(name, np.array(drawn), visit)[:, gone]

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
        if self.few.get(name) and self.sheet.drawing is not None and not self.gone[name].all():
            generator = np.random.default_rng([self.sheet.drawing.seed, _OWN + chain.equations.index(name)])
            picked = generator.integers(int((~self.gone[name]).sum()), size=self.sheet.rows)
            values[self.gone[name]] = values[~self.gone[name]][picked[self.gone[name]]]
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

    def _drawn(self, name: str, drawn: Floats, visit: int) -> npt.NDArray[Any]:
        """New values for all rows."""
        assert self.sheet.drawing is not None
        generator, X = np.random.default_rng([self.sheet.drawing.seed, visit]), self.design(name)
        k, outputs = X.shape[2], self.chain.outputs(name)
        if not self.chain.columns[name]:
            noise = generator.normal(size=X.shape[:2])
            numbers: npt.NDArray[Any] = np.einsum("mrk,mk->mr", X, drawn[:, :k]) + drawn[:, k:] * noise
            return numbers
        z = np.einsum("mrk,mok->mro", X, drawn.reshape(len(drawn), outputs, k))
        p = shares(z).cumsum(-1)
        place: npt.NDArray[Any] = (generator.random(X.shape[:2])[..., None] > p[..., :-1]).sum(-1)
        return place

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

    def fitted_rows(self, name: str) -> Marks:
        """The rows that an equation is fitted to: those that have the column, in patterns that enough rows share."""
        told = [self.gone[one] for one in self.chain.equations if not self.few[one]]
        here = np.zeros(self.sheet.rows, bool) if self.few[name] else self.gone[name]
        if self._least <= 1 or not told:
            return ~here
        _, pattern, sizes = np.unique(np.stack(told, 1), axis=0, return_inverse=True, return_counts=True)
        pattern, out = pattern.ravel(), sizes < self._least
        while 0 < sizes[out].sum() < self._least and not out.all():
            out[np.flatnonzero(~out)[sizes[~out].argmin()]] = True
        return ~here & ~out[pattern]


def shares(z: Floats) -> Floats:
    """Probabilities of the levels, the reference first, from margins ``(..., levels - 1)``."""
    whole = np.concatenate([np.zeros_like(z[..., :1]), z], -1)
    whole = np.exp(whole - whole.max(-1, keepdims=True))
    made: Floats = whole / whole.sum(-1, keepdims=True)
    return made


def sums_of(state: State, name: str, points: Floats, least: int) -> dict[str, Floats] | None:
    """Rows, and of each copy loss, gradient and Hessian of an equation at ``points``, ``(copies, outputs * width)``.

    A column of X in which few rows are unlike the others is constant; None where the column itself is such, or where it
    has few rows.
    """
    chain, mask = state.chain, state.fitted_rows(name)
    X, now = state.design(name)[:, mask], state.values[name][0][mask]
    for copy in X if least > 1 else []:
        for j in range(copy.shape[1] - 1):
            values, counts = np.unique(copy[:, j], return_counts=True)
            if 0 < len(copy) - counts.max(initial=0) < least:
                copy[:, j] = values[counts.argmax()]
    _, counts = np.unique(now, return_counts=True)
    rare = min(counts, default=0) if chain.columns[name] else len(now) - int(counts.max(initial=0))
    if len(now) < least or (len(counts) > 1 and rare < least):
        return None
    k, outputs = X.shape[2], chain.outputs(name)
    B = points.reshape(len(X), outputs, k)
    z = np.einsum("mrk,mok->mro", X, B)
    if not chain.columns[name]:
        residual = z[..., 0] - now
        loss, slope = 0.5 * (residual**2).sum(1), residual[..., None]
        H = np.einsum("mrj,mrk->mjk", X, X)
    else:
        p, y = shares(z), np.eye(outputs + 1)[now]
        loss = -np.log(np.maximum((p * y).sum(-1), 1e-300)).sum(1)
        slope, q = (p - y)[..., 1:], p[..., 1:]
        weight = np.einsum("mro,op->mrop", q, np.eye(outputs)) - np.einsum("mro,mrp->mrop", q, q)
        H = np.einsum("mrop,mrj,mrk->mojpk", weight, X, X, optimize=True).reshape(len(X), outputs * k, outputs * k)
    gradient = np.einsum("mro,mrk->mok", slope, X).reshape(len(X), -1)
    return {"loss": loss, "gradient": gradient, "hessian": H, "n": np.array([float(len(now))])}
