"""A recipe that has been learned: it prepares tables, old and new, and reads coefficients on the original scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack, cast

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from fedcomposite._version import __version__
from fedcomposite.data.arrays import NO_ENTRY
from fedcomposite.data.faults import DataError
from fedcomposite.data.queries import enough
from fedcomposite.data.sheets import Sheet, Source, Style, sheets_of
from fedcomposite.data.silos import HeldOut, Silos
from fedcomposite.data.spec import RecipeSpec
from fedcomposite.data.steps import (
    SITE,
    Absent,
    AnyStep,
    Chained,
    Complete,
    Interact,
    PerSite,
    SiteTerms,
    Spline,
    Standardize,
    prepared,
)
from fedcomposite.files import write_atomic
from fedcomposite.results import Result, counted

Floats = npt.NDArray[np.float64]


class FittedRecipe(Result, BaseModel):
    """What :meth:`fedcomposite.Recipe.learn` gives: the steps with their numbers, all of them aggregates."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    recipe: RecipeSpec
    target: str
    steps: list[AnyStep]
    sources: dict[str, str]
    """The features in their order, and the column each is made from."""
    sites: list[str]
    rows: int
    gaps: dict[str, int] = {}
    """Of columns with gaps, how many."""
    seen: int = 0
    """Rows among which these are: those with a target."""
    version: str = __version__

    @property
    def features(self) -> list[str]:
        """The names of the features."""
        return list(self.sources)

    @property
    def joint(self) -> dict[str, list[str]]:
        """Terms whose coefficient is not the effect of a column by itself, and the terms that share its effect.

        Those of a spline, the column itself among them; products and their factors. What a unit of the column does is
        in all of them together, and depends on where it is (:func:`fedcomposite.effect_curves`).
        """
        groups: list[list[str]] = []
        for step in self.steps:
            if isinstance(step, Spline):
                groups += [[name, *step.terms(name)] for name in step.knots]
            elif isinstance(step, Interact):
                groups += [[a, b, f"{a}:{b}"] for a, b in step.pairs]
        together = {
            name: dict.fromkeys(t for group in groups if name in group for t in group) for name in self.features
        }
        if self.per_site is not None:
            for name in self.per_site.columns:
                together |= dict.fromkeys(self.per_site.terms(name), together[name])
        return {name: list(terms) for name, terms in together.items() if terms}

    def to_frame(self) -> pd.DataFrame:
        """The features: the column that each is made from, and the mean and deviation by which it was standardized."""
        mean, sd = self._scale()
        columns = {"source": list(self.sources.values()), "mean": mean, "sd": sd}
        return pd.DataFrame(columns, index=pd.Index(self.features, name="feature"))

    def site_values(self, site: str) -> dict[int, float]:
        """The features that tell sites apart, by their numbers: what each is for all samples of a site."""
        step, scale = next((one for one in self.steps if isinstance(one, SiteTerms)), None), self.to_frame()
        terms = {} if step is None else step.terms
        values = {term: (float(own == site) - scale["mean"][term]) / scale["sd"][term] for term, own in terms.items()}
        return {self.features.index(term): float(value) for term, value in values.items()}

    @property
    def per_site(self) -> PerSite | None:
        """Which features have coefficients for each site, and whose these are."""
        return next((step for step in self.steps if isinstance(step, PerSite)), None)

    def _line(self) -> str:
        return f"{counted(len(self.features), 'feature')} of {self.target!r} at {counted(len(self.sites), 'site')}"

    # -- preparing ----------------------------------------------------------------------------------------------------

    def table(self, sheet: Sheet, site: str | None = None) -> tuple[Floats, Floats | None]:
        """Features ``(rows, features)`` and targets of a sheet; no targets if it has no such columns.

        ``site`` says whose names, units and markers the sheet has; its own name's if left out.
        """
        labelled, made = self._made(sheet, site)
        return self._numbers(sheet, made), self._targets(made) if labelled else None

    def _numbers(self, sheet: Sheet, made: Sheet) -> Floats:
        """The features of what the steps have made of a sheet."""
        features = np.stack([made.numbers(name) for name in self.features], axis=1)
        if gaps := int(np.isnan(features).any(1).sum()):
            names = [name for j, name in enumerate(self.features) if bool(np.isnan(features[:, j]).any())]
            raise DataError(
                f"{sheet.name}: {gaps} row(s) with gaps in {', '.join(names)}; the recipe does not say how to fill them"
            )
        return features

    @property
    def copies(self) -> int:
        """How many completed copies of the sites' tables there are."""
        return next((step.chain.copies for step in self.steps if isinstance(step, Chained)), 1)

    def _made(self, sheet: Sheet, site: str | None) -> tuple[bool, Sheet]:
        """Whether a sheet has targets, and what the steps make of it, of several copies the first."""
        labelled, made = self._copies(sheet, site)
        return labelled, made[0]

    def _copies(self, sheet: Sheet, site: str | None) -> tuple[bool, list[Sheet]]:
        """The same, of every copy."""
        given, sheet = sheet, self.recipe.local(site or sheet.name).apply(sheet)
        self._check_columns(given, sheet)
        labelled = self._has_targets(sheet)
        steps = [step for step in self.steps if labelled or not isinstance(step, Complete)]
        cut = next((i for i, step in enumerate(steps) if isinstance(step, Chained)), len(steps))
        made = prepared(replace(sheet, name=site or sheet.name), steps[:cut])
        drawn = [made] if cut == len(steps) else steps[cut].chain.completed(made)  # type: ignore[union-attr]
        return labelled, [prepared(one, steps[cut + 1 :]) for one in drawn]

    def _check_columns(self, given: Sheet, sheet: Sheet) -> None:
        """Refuse a table that lacks columns: all of them, and the site by whose names it would have them."""
        if any(isinstance(step, Absent) for step in self.steps):
            return
        made = {f"{a}:{b}" for a, b in self.recipe.interactions} | ({SITE} if self.recipe.site else set())
        made |= set() if self.per_site is None else {f"{name}@" for name in self.per_site.columns}
        lacking = [name for name in dict.fromkeys(self.sources.values()) if name not in {*sheet.columns, *made}]
        if not lacking:
            return
        named = [s for s in self.recipe.sites if set(lacking) <= set(self.recipe.local(s).apply(given).columns)]
        hint = f"say site = {named[0]!r}, whose names it has" if named else f"it has: {', '.join(sheet.columns)}"
        raise DataError(f"{sheet.name}: no column {', '.join(map(repr, lacking))}; {hint}")

    def few(self, sheet: Sheet, least: int) -> list[str]:
        """Features of a site in which few of its own values, not put into a gap by a step, are unlike the others."""
        X, _ = self._samples(sheet)
        own = self._own(sheet)
        varying = [j for j in range(X.shape[1]) if bool((X[:, j] != X[0, j]).any())]
        return [self.features[j] for j in varying if not enough(X[own[:, j], j], least)]

    def _own(self, sheet: Sheet) -> npt.NDArray[np.bool_]:
        """Where features are made from the site's own values, ``(rows, features)``."""
        _, made = self._made(sheet, None)
        return np.stack([made.own(name) for name in self.features], axis=1)

    def _samples(self, sheet: Sheet) -> tuple[Floats, Floats]:
        """What a model is fitted to: features, without what is rare, and targets."""
        X, y = self._labelled(sheet)
        return _without_rare(X, self._own(sheet), self.recipe.rare), y

    def all_rows(self, sheet: Sheet, site: str | None = None) -> tuple[Floats, Floats | None]:
        """As :meth:`table`, with every row, also those without a target, whose target is then NaN."""
        local = self.recipe.local(site or sheet.name)
        special = [self.target, *self.recipe.times]
        own = {*special, *(local.rename.get(name, name) for name in special)}
        without = sheet.having({k: v for k, v in sheet.columns.items() if k not in own})
        features, _ = self.table(without, site)
        labelled = local.apply(sheet)
        return features, self._targets(labelled) if self._has_targets(labelled) else None

    def _has_targets(self, sheet: Sheet) -> bool:
        return {self.target, *self.recipe.times} <= set(sheet.columns)

    def _targets(self, sheet: Sheet) -> Floats:
        """What is predicted, ``(rows,)``; of times to an event the columns that the loss "cox" takes."""
        if self.recipe.time is None:
            return self._outcomes(sheet)
        columns = [sheet.numbers(self.recipe.time), self._outcomes(sheet)]
        if self.recipe.times[1:]:
            entry = self.recipe.entry
            columns.append(np.full(sheet.rows, NO_ENTRY) if entry is None else sheet.numbers(entry))
        if self.recipe.strata is not None:
            groups = np.array([text or "" for text in sheet.texts(self.recipe.strata)])
            columns.append(np.unique(groups, return_inverse=True)[1].astype(float))
        return np.stack(columns, axis=1)

    def _outcomes(self, sheet: Sheet) -> Floats:
        if not self.recipe.target:
            return sheet.numbers(self.target)
        texts = sheet.texts(self.target)
        strange = {text for text in texts if text is not None} - set(self.recipe.target)
        if strange:
            levels = ", ".join(self.recipe.target)
            count = sum(text in strange for text in texts)
            raise DataError(f"{sheet.name}: {count} target(s) are none of {levels}; add them to target = {{...}}")
        return np.array([np.nan if text is None else self.recipe.target[text] for text in texts])

    def margin_offsets(self, sheet: Sheet, site: str | None = None) -> Floats | None:
        """What is added to the margin of each row of a table, as it is; None where the recipe names no such column."""
        if self.recipe.offset is None:
            return None
        found = self.recipe.local(site or sheet.name).apply(sheet).numbers(self.recipe.offset)
        if gaps := int(np.isnan(found).sum()):
            raise DataError(f"{sheet.name}: {gaps} row(s) without a number in {self.recipe.offset!r}, the offset")
        return found

    def _beside(self, sheets: Sequence[Sheet], name: str | None) -> list[Floats] | None:
        """A column that is no feature, for the samples of each table; None where the recipe names none."""
        return None if name is None else [self._made(sheet, None)[1].numbers(name) for sheet in sheets]

    def silos(self, sheets: Sequence[Sheet], test: Sheet | Sequence[Sheet] | None = None) -> Silos:
        """The sites' tables as silos, with this recipe in ``silos.recipe``; ``test`` is nobody's, or one of each."""
        if strange := [type(one).__name__ for one in sheets if not isinstance(one, Sheet)]:
            raise DataError(f"a {strange[0]} is no sheet; take recipe.prepare(tables, target=...)")
        pairs, names = map(self._samples, sheets), [sheet.name for sheet in sheets]
        made = Silos.from_arrays(
            pairs,
            names=names,
            feature_names=self.features,
            weights=self._beside(sheets, self.recipe.weight),
            margin_offsets=self._beside(sheets, self.recipe.offset),
        )
        if self.copies > 1 and all(sheet.drawing is not None for sheet in sheets):
            each = [self._every_copy(sheet) for sheet in sheets]
            made = replace(made, copies=tuple(torch.from_numpy(np.concatenate(one)) for one in zip(*each, strict=True)))
        if test is None:
            return replace(made, recipe=self)
        apart = [test] if isinstance(test, Sheet) else test
        held = [self._labelled(sheet) for sheet in apart]
        X, y = (torch.from_numpy(np.concatenate(column)) for column in zip(*held, strict=True))
        owner = torch.arange(len(held)).repeat_interleave(torch.tensor([len(b) for _, b in held]))
        owners: dict[HeldOut, torch.Tensor] = {} if isinstance(test, Sheet) else {"test": owner}
        shifts = self._beside(apart, self.recipe.offset)
        offsets: dict[HeldOut, torch.Tensor] = (
            {} if shifts is None else {"test": torch.from_numpy(np.concatenate(shifts))}
        )
        return replace(made, recipe=self, test=(X, y), held_by=owners, held_margin_offsets=offsets)

    def _every_copy(self, sheet: Sheet) -> list[Floats]:
        own, made = self._own(sheet), self._copies(sheet, None)[1]
        return [_without_rare(self._numbers(sheet, one), own, self.recipe.rare) for one in made]

    def _labelled(self, sheet: Sheet) -> tuple[Floats, Floats]:
        X, y = self.table(sheet)
        if y is None:
            raise DataError(f"{sheet.name}: no column {self.target!r}, the target")
        return X, y

    def apply(self, source: Source, site: str | None = None, **style: Unpack[Style]) -> pd.DataFrame:
        """The features of new samples, from a file or a table; a target is not needed.

        Parameters
        ----------
        source : path, DataFrame or Sheet
            The samples, with the columns that the sites had.
        site : str, optional
            The site whose names and units the samples have; the common ones if left out.
        **style
            How a file is written: ``separator``, ``decimal``, ``encoding``, ``thousands``.
        """
        part = self.recipe.sites.get(site or "")
        own = cast(Style, {} if _is_table(source) else {**(part.style if part else {}), **style})
        (sheet,) = sheets_of(source, text=self.recipe.texts([site or ""]), **own)
        features, _ = self.table(sheet, site or "")
        return pd.DataFrame(features, columns=self.features)

    # -- the original scale -------------------------------------------------------------------------------------------

    def original(self, weights: npt.ArrayLike, intercept: npt.ArrayLike = 0.0) -> tuple[Floats, Floats]:
        """Coefficients and intercept for the features before they were standardized.

        A feature is then in the common unit of its column, 0 or 1, a logarithm, a spline term or a product.

        Parameters
        ----------
        weights : array
            ``(features,)``, or ``(features, outputs)``.
        intercept : array
            A number, or ``(outputs,)``.
        """
        weights = np.asarray(weights, np.float64)
        mean, sd = self._scale()
        shape = (-1,) + (1,) * (weights.ndim - 1)
        per_unit = weights / sd.reshape(shape)
        return per_unit, np.asarray(intercept, np.float64) - (per_unit * mean.reshape(shape)).sum(0)

    def _scale(self) -> tuple[Floats, Floats]:
        mean, sd = dict.fromkeys(self.features, 0.0), dict.fromkeys(self.features, 1.0)
        for step in self.steps:
            if isinstance(step, Standardize):
                mean, sd = mean | step.mean, sd | step.sd
            elif isinstance(step, PerSite):
                sd |= {term: sd[name] for name in step.columns for term in step.terms(name)}
        return np.array([mean[name] for name in self.features]), np.array([sd[name] for name in self.features])

    # -- on disk ------------------------------------------------------------------------------------------------------

    @property
    def text(self) -> str:
        """The recipe as JSON."""
        return self.model_dump_json(indent=2) + "\n"

    def write(self, path: str | Path) -> None:
        """Write the recipe as JSON."""
        write_atomic(Path(path), self.text.encode())

    @classmethod
    def parse(cls, text: str, where: str = "recipe") -> FittedRecipe:
        """A recipe that was written as JSON, checked."""
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            raise DataError(f"{where}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None

    @classmethod
    def read(cls, path: str | Path) -> FittedRecipe:
        """Read a recipe's file."""
        try:
            return cls.parse(Path(path).read_text(encoding="utf-8"), str(path))
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{path}: not a readable recipe ({error})") from None


def _without_rare(X: Floats, own: npt.NDArray[np.bool_], least: int) -> Floats:
    """The features, those in which fewer than ``least`` rows differ from the commonest value made constant.

    So are those of whose own values, beside filled gaps, so few differ.
    """
    made = X.copy()
    for j in range(X.shape[1]):
        values, counts = np.unique(X[:, j], return_counts=True)
        hidden = not own[:, j].all() and not enough(X[own[:, j], j], least)
        if 0 < len(X) - int(counts.max()) < least or hidden:
            made[:, j] = values[counts.argmax()]
    return made


def _is_table(source: Any) -> bool:
    return isinstance(source, pd.DataFrame | Sheet | Mapping)
