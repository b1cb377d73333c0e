"""Recipes: how tables of several sites become features, written once and learned from aggregates alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Unpack

import numpy as np
import pandas as pd

from fedcomposite.data.census import NoisedTables
from fedcomposite.data.chained import Drawing
from fedcomposite.data.faults import DataError, refuse
from fedcomposite.data.fitted import FittedRecipe
from fedcomposite.data.learning import Learner
from fedcomposite.data.queries import Ask, Rules, TablesAtHand
from fedcomposite.data.sheets import Sheet, Source, Style, sheets_of
from fedcomposite.data.silos import Silos
from fedcomposite.data.spec import RecipeSpec
from fedcomposite.data.steps import known, unknown
from fedcomposite.privacy import StudyBudget

Given = Mapping[str, pd.DataFrame] | Iterable[Source] | Source


class Recipe(RecipeSpec):
    """How tables become features: the same at every site, learned from counts and sums, and kept with the model.

    The order is fixed. Each site renames, marks values as missing, changes units and drops, on its own table; then all
    sites impute, code categories, take logarithms, splines and interactions, and standardize.

    Attributes
    ----------
    rename : dict
        ``{"common name": "name in a file"}``.
    missing : dict
        Values that mean "not measured", as the files have them: ``{"chol": [0], "trestbps": [0, -9]}``.
    recode : dict
        Levels of categories that are written differently: ``{"sex": {"1": "f", "2": "m"}}``.
    units : dict
        ``{"chol": {"scale": 38.67, "shift": 0}}``; a number is a scale.
    drop : list of str
        Columns to leave out.
    sites : dict
        Per site, its own ``rename``, ``missing``, ``recode``, ``units``, ``drop``, and how its file is written
        (``separator``, ``decimal``, ``encoding``, ``thousands``).
    absent : {"refuse", "missing"}
        Whether a column that a site does not have is an error, or all missing there.
    target : dict
        Numbers for the levels of the target, ``{"yes": 1, "no": 0}``.
    missing_target : {"refuse", "drop"}
        Whether rows without a target are an error or left out.
    time, entry, strata : str, optional
        Columns of times to an event, which the target then says (1, or 0 if it was censored; numbers of causes): when
        it was, when observation began if that was late, and groups with baselines of their own. They are no features.
    weight, offset : str, optional
        Columns of what each sample counts in the model, and of what is added to its margin, such as the logarithm of an
        exposure. They are no features; means, levels and knots are those of the rows as they are, unweighted.
    impute : str, number or dict
        "mean", "median", "most_frequent", a number, or ``{"constant": value}``; for all columns, or per column with
        "default" for the others. Categories take "most_frequent" where "mean" or "median" is the default. "chained":
        drawn from conditional models on all other columns and the target, several times (multiple imputation).
        "complete": rows with a gap there are left out.
    copies, iterations : int
        Of "chained": how many completed copies, and after how many visits to each column.
    indicators : bool or list of str
        Columns of 0 and 1 that say where values were missing: for all columns with gaps, or for some.
    one_hot : list of str or dict
        Categories, of text or of whole numbers; a dict names their reference levels (the first if left out). Levels
        that no site has ``min_count`` rows of become "(other)".
    unknown : {"refuse", "reference"}
        A level of new samples that nobody had, in a column without "(other)": an error, or coded as the reference.
    site : bool or str
        An intercept of its own for each site, ``site=NAME``: beside that of the first site (true) or of the one that is
        named, or for every site ("all", for a penalty that draws them to a common one). New samples of a site are
        told by ``site=`` or the name of their file, and have the reference's if it is none of these. It can be in
        interactions; ``penalty_factor={"site": 0}`` leaves the intercepts unpenalised.
    per_site : bool or list of str
        Beside the common coefficients, for each site what its own differ by: features ``age@north``, after
        standardizing, of all features (but those of ``site``) or of some columns. ``deviations`` of the problem says
        how they are regularized. New samples of no such site have the common coefficients.
    log : list of str or dict
        Logarithms; a dict has what is added before.
    splines : dict
        Natural cubic splines, ``{"age": 4}`` knots at quantiles or ``{"age": [40, 50, 60]}``.
    interactions : list of pairs
        Products of columns, after coding.
    standardize : bool, "all" or list of str
        Mean 0 and deviation 1: of everything but columns of 0 and 1 that the recipe made, of all, or of some.
    rare : int
        A feature in which fewer rows of a site than this (but some) differ from the site's others is made constant
        there, at the commonest value: a level that five patients have, an indicator of two gaps. Sites of a federation
        do not tell sums over such features; new samples are not changed. 0 leaves all as they are.
    min_count : int
        Fewest rows behind a count that a site tells, here; a site of a federation has its own.

    Examples
    --------
    >>> import pandas as pd
    >>> north = pd.DataFrame({"age": [40.0, 50, 60, 70, 80], "sex": ["f", "m", "f", "m", "f"], "sick": [0, 0, 1, 1, 1]})
    >>> south = north.assign(age=[45.0, None, 65, 75, 85])
    >>> recipe = Recipe(impute="mean", one_hot=["sex"], min_count=2)
    >>> silos = recipe.prepare({"north": north, "south": south}, target="sick")
    >>> silos.feature_names
    ('age', 'sex=m')
    >>> silos.recipe.steps[0].values["age"]
    63.333333333333336
    """

    def learn(self, ask: Ask, sites: Sequence[str], target: str, seed: int = 0) -> FittedRecipe:
        """Learn the steps from sites that answer queries; each has done its own part (:meth:`local`) before.

        ``seed`` is that of the parameters of conditional models, where gaps are imputed by draws.
        """
        state = Learner(self, ask, sites, target, seed)
        state.learn()
        if not state.features:
            raise DataError("recipe: no feature is left beside the target; drop fewer columns")
        spec = RecipeSpec(**self.model_dump())
        return FittedRecipe(
            recipe=spec,
            target=target,
            steps=state.steps,
            sources=state.features,
            sites=list(sites),
            rows=state.rows,
            gaps=state.gaps,
            seen=state.seen,
        )

    def sheets(
        self, given: Given, *, names: Sequence[str] = (), text: Iterable[str] = (), **options: Unpack[Style]
    ) -> list[Sheet]:
        """Read tables as this recipe's sites write them; columns of ``text`` are categories, too."""
        styles = {site: part.style for site, part in self.sites.items()}
        extra = options if _has_tables(given) else {"styles": styles, **options}
        labels = [*names, *self.sites, ""]
        return sheets_of(given, names=names, text={*self.texts(labels), *text}, **extra)

    def fit(
        self,
        given: Given,
        *,
        target: str,
        names: Sequence[str] = (),
        rules: Rules | None = None,
        privacy: StudyBudget | None = None,
        seed: int = 0,
        **options: Unpack[Style],
    ) -> FittedRecipe:
        """Learn the recipe from one table per site: files, ``{"site": DataFrame}``, DataFrames or sheets.

        With ``privacy`` it is learned from one noised census of the budget's columns, by the noise that ``seed`` gives.
        ``options`` are those of :func:`fedcomposite.data.sheets.read_sheets`, for files.
        """
        sheets = self._drawing(self.sheets(given, names=names, **options), seed)
        return self._fit(sheets, target, rules, privacy, seed)

    def _drawing(self, sheets: Sequence[Sheet], seed: int) -> list[Sheet]:
        """The sheets with random numbers of each site's own, by which values for gaps are drawn."""
        words = [int(np.random.SeedSequence([seed, i]).generate_state(1, np.uint64)[0]) for i in range(len(sheets))]
        made = [s.drawing or Drawing(word, self.min_count) for s, word in zip(sheets, words, strict=True)]
        return [replace(s, drawing=own) for s, own in zip(sheets, made, strict=True)]

    def _fit(
        self, sheets: Sequence[Sheet], target: str, rules: Rules | None, privacy: StudyBudget | None, seed: int
    ) -> FittedRecipe:
        labels = [sheet.name for sheet in sheets]
        if not isinstance(target, str):
            raise DataError(f"target = {target!r}, must be the name of a column")
        known("recipe: sites", self.sites, labels)
        everything = {name: None for sheet in sheets for name in (*sheet.columns, *self.local(sheet.name).rename)}
        parts = {k: list(getattr(self, k)) for k in ("drop", "missing", "recode", "units")}
        parts |= {"rename": list(self.rename.values())}
        refuse([fault for what, columns in parts.items() for fault in unknown(what, columns, everything)])
        local = [self.local(sheet.name).apply(sheet) for sheet in sheets]
        if privacy is not None:
            return self.learn(NoisedTables.at_hand(local, privacy, seed), labels, target)
        return self.learn(TablesAtHand(local, rules or Rules(self.min_count)), labels, target, seed)

    def prepare(
        self,
        given: Given,
        *,
        target: str,
        names: Sequence[str] = (),
        test: str | Path | pd.DataFrame | Sheet | float | None = None,
        seed: int = 0,
        rules: Rules | None = None,
        privacy: StudyBudget | None = None,
        **options: Unpack[Style],
    ) -> Silos:
        """Learn the recipe and give the prepared tables as silos; ``silos.recipe`` is what was learned.

        ``privacy`` as in :meth:`fit`.
        ``test`` is a table with held-out samples, or the share of every site's rows that is held out, drawn from
        ``seed``: they are prepared, and nothing is learned from them.
        """
        sheets = self.sheets(given, names=names, **options)
        if isinstance(test, int | float):
            kept, out = zip(*(held_out(sheet, test, seed, i) for i, sheet in enumerate(sheets)), strict=True)
            drawing = self._drawing(kept, seed)
            return self._fit(drawing, target, rules, privacy, seed).silos(drawing, out)
        held = None if test is None else self.sheets([test], names=["test"], **options)[0]
        if held is not None and held.name in [sheet.name for sheet in sheets]:
            raise DataError(f"test: a site is called {held.name!r} as well")
        sheets = self._drawing(sheets, seed)
        return self._fit(sheets, target, rules, privacy, seed).silos(sheets, held)


def held_out(sheet: Sheet, share: float, seed: int, site: int) -> tuple[Sheet, Sheet]:
    """A site's sheet without a random share of its rows, and these rows; at least one of each."""
    if not isinstance(seed, int) or seed < 0:
        raise DataError(f"seed = {seed!r}, must be an integer >= 0")
    if not 0 < share < 1:
        raise DataError(f"test = {share}, must be a share between 0 and 1, or a table")
    if sheet.rows < 2:
        raise DataError(f"test = {share}: {sheet.name} has {sheet.rows} row(s), of which none can be held out")
    out = np.zeros(sheet.rows, bool)
    count = min(max(1, round(share * sheet.rows)), sheet.rows - 1)
    out[np.random.default_rng([seed, site]).permutation(sheet.rows)[:count]] = True
    return sheet.taking(~out), sheet.taking(out)


def _has_tables(given: Given) -> bool:
    if isinstance(given, Mapping | pd.DataFrame | Sheet):
        return True
    if isinstance(given, str | Path) or not isinstance(given, Iterable):
        return False
    return any(isinstance(one, pd.DataFrame | Sheet) for one in list(given))
