"""What a column with a spline, or with products, does: a curve with a band, in place of its terms' coefficients.

With f(v) the features of somebody whose column is v, all others being as they mostly are, the curve is

    (f(v) - f(v0))' b,        variance (f(v) - f(v0))' V (f(v) - f(v0)),

the difference of margins to a reference v0: its exponential is an odds, rate or hazard ratio. A column with products
has a curve for each of some values of the other one.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch

from fedcomposite._validation import Inside, ZeroOrMore, as_vector
from fedcomposite.analysis.imputed import combined_table, each_copy
from fedcomposite.analysis.inference import bias_power, found_of, intervals, needs_sandwich, outputs_of
from fedcomposite.data.fitted import FittedRecipe
from fedcomposite.data.sheets import Sheet
from fedcomposite.data.steps import (
    SITE,
    Complete,
    Impute,
    Interact,
    Log,
    OneHot,
    Spline,
    Standardize,
    logarithm,
    prepared,
)
from fedcomposite.problems import Problem
from fedcomposite.results import Result, counted
from fedcomposite.runtime.driver import Driver, driver_of
from fedcomposite.runtime.fit import check_given

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Floats = npt.NDArray[np.float64]
_POINTS = 41
_BINARY = 1e-6  # by how much the variance of zeros and ones may differ from mean (1 - mean)


@dataclass(frozen=True, repr=False)
class EffectCurves(Result):
    """What columns do, value by value."""

    table: pd.DataFrame
    """A row per column, value of another one (``given``) and ``value``: ``estimate`` beside ``reference``, ``se``,
    ``lower``, ``upper``, ``z``, ``p``, and ratios where the model has them."""

    def to_frame(self) -> pd.DataFrame:
        return self.table

    def _line(self) -> str:
        names = self.table["column"].unique()
        return f"{counted(len(names), 'effect curve')}: {', '.join(names)}"

    def plot(self, path: str | pathlib.Path | None = None) -> Figure:
        """A panel for each column; a file if ``path`` is given."""
        from fedcomposite.plots.charts import draw_effects

        return draw_effects(self.table, path)


def effect_curves(
    problem: Problem,
    x: Any = None,
    columns: Sequence[str] | Mapping[str, Sequence[float]] | None = None,
    *,
    reference: Mapping[str, float] | None = None,
    level: Inside = 0.95,
    robust: bool | None = None,
    jeffreys: ZeroOrMore | None = None,
    driver: Driver | None = None,
) -> EffectCurves:
    """What a column does to the margin of a linear, logistic, Poisson or Cox model, with a pointwise band.

    Parameters
    ----------
    problem : Problem
        Of silos that a recipe prepared.
    x : Tensor, array, Run or estimator, optional
        As for :func:`fedcomposite.confidence`; zeros if left out.
    columns : list or mapping, optional
        Columns, and the values at which they are looked at: from the first knot to the last, or two deviations around
        the mean, if left out. All columns with a spline or a product if left out.
    reference : mapping, optional
        The value of a column that others are compared with: the middle knot, or the mean, if left out.
    level, robust, jeffreys, driver
        As for :func:`fedcomposite.confidence`.

    Examples
    --------
    >>> import fedcomposite as fc
    >>> import numpy as np, pandas as pd
    >>> age = np.linspace(40, 80, 200)
    >>> table = pd.DataFrame({"age": age, "sick": (np.sin(age) > np.cos(age / 9)).astype(float)})
    >>> silos = fc.Recipe(splines={"age": [45, 60, 75]}).prepare({"north": table}, target="sick")
    >>> curve = fc.effect_curves(fc.Problem(silos, bias=True), columns={"age": [45, 60, 75]}).table
    >>> curve[["value", "reference"]].values.tolist()
    [[45.0, 60.0], [60.0, 60.0], [75.0, 60.0]]
    """
    check_given(effect_curves, locals())
    recipe = problem.silos.recipe
    if recipe is None or outputs_of(problem) > 1:
        raise ValueError("effect_curves: this needs silos that a recipe prepared, and a model with one output")
    someone, driver = _Someone(recipe), driver_of(problem, driver)
    chosen = someone.bent if columns is None else list(columns)
    for name in [*chosen, *(reference or {})]:
        someone.check(name)
    start = torch.zeros(problem.dimension, dtype=torch.float64) if x is None else as_vector(x).double()
    sandwich, power = needs_sandwich(problem, robust, driver), bias_power(jeffreys, driver)
    every = [found_of(problem, start, "auto", sandwich, power, one) for one in each_copy(driver)]
    made = []
    for name in chosen:
        values = someone.values(name) if not isinstance(columns, Mapping) else np.asarray(columns[name], float)
        base = (reference or {}).get(name, someone.middle(name))
        values = np.union1d(values, [base])
        for given, others in someone.companions(name):
            rows = someone.features(name, values, others) - someone.features(name, np.array([base]), others)
            R = torch.zeros(len(values), problem.dimension, dtype=torch.float64)
            R[:, : rows.shape[1]] = torch.from_numpy(rows)
            tables = [pd.DataFrame(intervals(problem, R, found, level)) for found in every]
            freedom = max(every[0].samples - problem.dimension, 1.0)
            table = tables[0] if len(tables) == 1 else combined_table(tables, freedom, level)
            same = table.index[values == base]
            table.loc[same, [c for c in ("estimate", "se", "lower", "upper") if c in table]] = 0.0
            table.insert(0, "value", values)
            made.append(table.assign(column=name, given=given, reference=base))
    every_one = pd.concat(made, ignore_index=True) if made else pd.DataFrame(columns=["column", "given", "value"])
    first = ["column", "given", "value", "reference"]
    return EffectCurves(every_one[[*first, *(c for c in every_one if c not in first)]] if made else every_one)


class _Someone:
    """A patient as most are, by what a recipe has learned: numbers at their means, categories at their references."""

    def __init__(self, recipe: FittedRecipe) -> None:
        self.recipe = recipe
        self.logs: dict[str, float] = {}
        self.knots: dict[str, list[float]] = {}
        self.levels: dict[str, OneHot] = {}
        self.scale: dict[str, tuple[float, float]] = {}
        self.pairs: list[tuple[str, str]] = []
        self.fillings: dict[str, float | str] = {}
        for step in recipe.steps:
            match step:
                case Log():
                    self.logs |= step.offsets
                case Spline():
                    self.knots |= step.knots
                case OneHot():
                    self.levels |= dict.fromkeys(step.columns, step)
                case Impute():
                    self.fillings |= step.values
                case Interact():
                    self.pairs += step.pairs
                case Standardize():
                    self.scale |= {name: (mean, step.sd[name]) for name, mean in step.mean.items()}
        products = {f"{a}:{b}" for a, b in recipe.recipe.interactions}
        sources = recipe.sources
        self.columns = [s for s in dict.fromkeys(sources.values()) if s not in products and s != SITE and "@" not in s]

    def base(self, name: str) -> str:
        """What a column is before splines and products."""
        return logarithm(name, self.logs[name]) if name in self.logs else name

    def check(self, name: str) -> None:
        """Refuse a name that is no column of numbers."""
        if name not in self.columns or name in self.levels:
            numbers = [one for one in self.columns if one not in self.levels]
            raise ValueError(f"effect_curves: no column of numbers {name!r}; there are {', '.join(numbers)}")

    def _partners(self, name: str) -> list[str]:
        source = self.recipe.sources
        pairs = [(source.get(a, a), source.get(b, b)) for a, b in self.pairs]
        return list(dict.fromkeys(b if a == name else a for a, b in pairs if name in (a, b)))

    @property
    def bent(self) -> list[str]:
        """The columns of numbers with a spline, or with a product."""
        numbers = [name for name in self.columns if name not in self.levels and not self._binary(name)]
        return [name for name in numbers if self.base(name) in self.knots or self._partners(name)]

    def _spread(self, name: str) -> tuple[float, float]:
        """Mean and deviation of what a column is before splines; those of its filling where it was not standardized."""
        value = self.fillings.get(name, 0.0)
        return self.scale.get(self.base(name), (value if isinstance(value, float) else 0.0, 1.0))

    def _binary(self, name: str) -> bool:
        mean, sd = self._spread(name)
        return 0 < mean < 1 and abs(sd**2 - mean * (1 - mean)) < _BINARY

    def _back(self, name: str, values: npt.ArrayLike) -> Floats:
        """Values of a column from those of its logarithm, where one is taken."""
        found = np.asarray(values, np.float64)
        return np.exp(found) - self.logs[name] if name in self.logs else found

    def values(self, name: str) -> Floats:
        """Where a curve is drawn."""
        mean, sd = self._spread(name)
        knots = self.knots.get(self.base(name), [mean - 2 * sd, mean + 2 * sd])
        return self._back(name, np.linspace(knots[0], knots[-1], _POINTS))

    def middle(self, name: str) -> float:
        """What the values of a column are compared with."""
        knots = self.knots.get(self.base(name))
        return float(self._back(name, self._spread(name)[0] if knots is None else knots[len(knots) // 2]))

    def companions(self, name: str) -> list[tuple[str, dict[str, float | str]]]:
        """Values of the columns that it has products with, one after another, each with a word for them."""
        made: list[tuple[str, dict[str, float | str]]] = []
        for other in self._partners(name):
            values: list[float | str]
            if other in self.levels:
                values = list(self.levels[other].columns[other].levels)
            elif other.startswith(f"{SITE}=") or other == SITE:
                values = list(self.recipe.sites)
            elif self._binary(other):
                values = [0.0, 1.0]
            else:
                mean, sd = self._spread(other)
                values = [float(v) for v in self._back(other, [mean - sd, mean, mean + sd])]
            key = SITE if other.startswith(f"{SITE}=") else other
            made += [(f"{key} = {v if isinstance(v, str) else f'{v:.4g}'}", {key: v}) for v in values]
        return list(dict(made).items()) or [("", {})]

    def features(self, name: str, values: Floats, others: Mapping[str, float | str]) -> Floats:
        """The features of somebody with each of these values."""
        rows, columns = len(values), dict[str, npt.NDArray[Any]]()
        for column in self.columns:
            if column in self.levels:
                reference = self.levels[column].columns[column].reference
                columns[column] = np.full(rows, others.get(column, reference), object)
            else:
                usual = float(self._back(column, self._spread(column)[0]))
                columns[column] = np.full(rows, float(others.get(column, usual)))
        columns[name] = values.astype(np.float64)
        steps = [step for step in self.recipe.steps if not isinstance(step, Complete)]
        sheet = Sheet(str(others.get(SITE, "someone")), columns, rows)
        made = prepared(replace(sheet, drawing=None), steps)
        return np.stack([made.numbers(one) for one in self.recipe.features], axis=1)
