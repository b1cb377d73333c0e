"""Learning a recipe: what its steps need is asked of the sites as counts and sums, step after step."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from fedcomposite.data.cells import spread_of
from fedcomposite.data.chained import ConditionalModels
from fedcomposite.data.drawing import borrowing
from fedcomposite.data.faults import DataError, DataWarning, Fault, refuse
from fedcomposite.data.quantiles import BoundedQuantile, quantiles
from fedcomposite.data.queries import Answer, Ask, Gaps, LevelCounts, Moments, Outside, Query, Schema
from fedcomposite.data.spec import KNOTS, METHODS, ConstantFill, RecipeSpec
from fedcomposite.data.steps import (
    OTHER,
    SITE,
    Absent,
    AnyStep,
    Chained,
    Complete,
    Impute,
    Interact,
    Levels,
    Log,
    OneHot,
    PerSite,
    SiteTerms,
    Spline,
    Standardize,
    indicator,
    known,
    logarithm,
    unknown,
)

Floats = npt.NDArray[np.float64]


class Learner:
    """The state of learning: the steps so far, and the terms that each column has become."""

    def __init__(self, spec: RecipeSpec, ask: Ask, sites: Sequence[str], target: str, seed: int = 0) -> None:
        self.spec, self.ask, self.sites, self.target, self.seed = spec, ask, list(sites), target, seed
        self.steps: list[AnyStep] = []
        self.terms: dict[str, list[str]] = {}
        self.coded: set[str] = set()  # terms that are 0 or 1
        self.kinds: dict[str, str] = {}
        self.rows = self.seen = 0
        self.gaps: dict[str, int] = {}

    def learn(self) -> None:
        """All steps in their order."""
        self._look()
        self._impute()
        self._chained()
        self._one_hot()
        self._site()
        self._log()
        self._splines()
        self._interactions()
        self._standardize()
        self._per_site()

    @property
    def features(self) -> dict[str, str]:
        """The features in their order, each with the column it is made from."""
        return {term: source for source, terms in self.terms.items() for term in terms}

    def _answers(self, query: Query) -> list[Answer]:
        return self.ask(query.model_copy(update={"steps": list(self.steps)}))

    def _total(self, query: Query) -> Answer:
        return query.combine(self._answers(query))

    # -- what there is ------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """The columns; all that does not fit is told at once."""
        query = Schema()
        answers = self._answers(query)
        total = query.combine(answers)
        self.kinds = dict(zip(total["columns"].tolist(), total["kinds"].tolist(), strict=True))
        special = [self.target, *self.spec.special]
        known("target", [self.target], self.kinds)
        known("recipe: time, entry, strata, weight or offset", self.spec.special, self.kinds)
        features = [name for name in self.kinds if name not in special]
        faults = [fault for part, names in self.spec.named.items() for fault in unknown(part, names, features)]
        for site, one in zip(self.sites, answers, strict=True):
            absent = sorted(set(self.kinds) - set(one["columns"].tolist()))
            if set(special) & set(absent) or (absent and self.spec.absent == "refuse"):
                remedy = "rename or drop them, or set absent = 'missing'"
                faults.append(Fault(site, f"no column {', '.join(map(repr, absent))}", remedy, count=len(absent)))
        for name in features:
            if self.kinds[name] in ("text", "date", "mixed") and name not in self.spec.one_hot_columns:
                what = {"text": "is text", "date": "holds dates", "mixed": "is text at some sites, numbers at others"}
                remedy = f"put it in drop{'' if self.kinds[name] == 'date' else ' or one_hot'}"
                faults.append(Fault(f"column {name!r}", what[self.kinds[name]], remedy, name))
        if self.kinds[self.target] in ("text", "date", "mixed") and not self.spec.target:
            remedy = "say which number each level is: target = {yes = 1, no = 0}"
            faults.append(Fault(f"target {self.target!r}", "is text", remedy, self.target))
        remedies = {one: "give times as numbers, of days or months" for one in (self.spec.time, self.spec.entry)}
        remedies |= dict.fromkeys((self.spec.weight, self.spec.offset), "give weights and offsets as numbers")
        for given, remedy in remedies.items():
            if given is not None and self.kinds[given] in ("text", "date", "mixed"):
                faults.append(Fault(f"column {given!r}", "is no number", remedy, given))
        refuse(faults)
        if self.spec.absent == "missing" and any(set(self.kinds) - set(a["columns"].tolist()) for a in answers):
            self.steps.append(Absent(columns=features))
        if self.spec.missing_target == "drop":
            self.steps.append(Complete(columns=special))
        gaps = self._total(Gaps(columns=special))
        for name, missing in zip(special, gaps["missing"].tolist(), strict=True):
            if missing:
                role = "the target" if name == self.target else "the column"
                lacking = f"{int(missing)} missing value(s) in {role} {name!r}"
                raise DataError(f"{lacking}; mend them, or set missing_target = 'drop'")
        self.rows = self.seen = int(gaps["n"][0])
        self.terms = {name: [name] for name in features}

    # -- the steps ----------------------------------------------------------------------------------------------------

    def _impute(self) -> None:
        names = list(self.terms)
        found = self._total(Gaps(columns=names))
        gaps = {name: int(count) for name, count in zip(names, found["missing"], strict=True) if count}
        open_ = [f"{name!r} ({count})" for name, count in gaps.items() if self.spec.filling(name) is None]
        if open_:
            raise DataError(f"missing values in {', '.join(open_)}; say how to impute them, or drop the columns")
        flagged = self.spec.indicators if isinstance(self.spec.indicators, list) else []
        flagged = list(gaps) if self.spec.indicators is True else flagged
        self.gaps = gaps
        whole = [name for name in gaps if self.spec.filling(name) == "complete"]
        if whole:
            self._only_complete(whole)
        drawn_or_left_out = ("chained", "complete")
        values, within = self._fillings([n for n in names if self.spec.filling(n) not in drawn_or_left_out], gaps)
        if values or flagged:
            self.steps.append(Impute(values=values, indicators=flagged, within=within))
        for name in flagged:
            self.terms[name].append(indicator(name))
            self.coded.add(indicator(name))

    def _only_complete(self, columns: list[str]) -> None:
        """Leave out the rows that have gaps in these columns."""
        before = [step for step in self.steps if isinstance(step, Complete)]
        self.steps = [step for step in self.steps if not isinstance(step, Complete)]
        self.steps.append(Complete(columns=[*(name for step in before for name in step.columns), *columns]))
        self.rows = int(self._total(Gaps(columns=[self.target]))["n"][0])
        if not self.rows:
            raise DataError(f"impute: no row is complete in {', '.join(map(repr, columns))}")

    def _fillings(
        self, names: Sequence[str], gaps: dict[str, int]
    ) -> tuple[dict[str, float | str], dict[str, tuple[float, float]]]:
        """The value for the gaps of each column; those without gaps get one for new patients, where sites tell it."""
        ways: dict[str, list[str]] = {way: [] for way in METHODS}
        values: dict[str, float | str] = {}
        for name in names:
            way = self.spec.filling(name)
            text = name in self.spec.one_hot_columns
            if isinstance(way, ConstantFill):
                values[name] = str(way.constant) if text else way.constant
            elif isinstance(way, str):
                ways["most_frequent" if text else way].append(name)
            elif way is not None:
                values[name] = f"{way:g}" if text else way
        if ways["mean"]:
            mean, _, told = self._moments(ways["mean"])
            values |= {n: float(m) for n, m, ok in zip(ways["mean"], mean, told, strict=True) if ok}
        middle = quantiles(self.ask, {name: [0.5] for name in ways["median"]}, self.steps) if ways["median"] else {}
        values |= {name: found[0].value for name, found in middle.items()}
        values |= self._commonest(ways["most_frequent"])
        if untold := [name for name in gaps if name in names and name not in values]:
            raise DataError(_withheld(untold))
        return values, {name: (found[0].low, found[0].high) for name, found in middle.items()}

    def _commonest(self, names: list[str]) -> dict[str, float | str]:
        if not names:
            return {}
        found = self._total(LevelCounts(columns=names))
        values: dict[str, float | str] = {}
        for name in names:
            levels, counts = found[f"levels:{name}"].tolist(), found[f"counts:{name}"]
            if levels:
                text = in_order([one for one, c in zip(levels, counts, strict=True) if c == counts.max()])[0]
                values[name] = text if name in self.spec.one_hot_columns else float(text)
        return values

    def _chained(self) -> None:
        """Conditional models of the columns that are imputed by draws, and parameters for the sites that lack some."""
        equations = [name for name in self.terms if self.spec.filling(name) == "chained" and name in self.gaps]
        if not equations:
            return
        equations.sort(key=lambda name: self.gaps[name])
        levels = self._levels_of(equations)
        numbers = [name for name in self.terms if not levels[name]]
        start = self._commonest([name for name in equations if levels[name]])
        start = {name: str(value) if isinstance(value, str) else f"{value:g}" for name, value in start.items()}
        if len(start) < sum(bool(levels[name]) for name in equations):
            raise DataError(_withheld([name for name in equations if levels[name] and name not in start]))
        outcomes = [self.target, *([self.spec.time] if self.spec.time else [])]
        logs = self.spec.log_offsets | ({self.spec.time: 0.0} if self.spec.time else {})
        known_ = [name for name in numbers + outcomes if not (name == self.target and self.spec.target)]
        scale = self._scales(known_, {name: offset for name, offset in logs.items() if name in known_})
        plain = [name for name in equations if not levels[name]]
        means, _, _ = self._moments(plain)  # of the sites that have the column
        chain = ConditionalModels(
            columns=levels,
            equations=equations,
            scale={self.target: (0.5, 0.5)} | scale,
            logs=logs,
            start={**start, **{name: _six(mean) for name, mean in zip(plain, means.tolist(), strict=True)}},
            outcomes=outcomes,
            levels=self.spec.target,
            copies=self.spec.copies,
            iterations=self.spec.iterations,
        )
        self.steps.append(Chained(chain=borrowing(self._total, chain, self.seed)))

    def _levels_of(self, equations: Sequence[str]) -> dict[str, list[str]]:
        """The levels of categories, and of equations' numbers that are one of two; none of other numbers."""
        wanted = self.spec.one_hot_columns
        asked = [name for name in self.terms if name in wanted or name in equations]
        found = self._total(LevelCounts(columns=asked))
        made: dict[str, list[str]] = {}
        for name in self.terms:
            told = in_order(found[f"levels:{name}"].tolist()) if name in asked else []
            two = len(told) == 2 and not found[f"rest:{name}"][0] and not found[f"many:{name}"][0]
            made[name] = (told or ["", OTHER]) if name in wanted else told if two else []
        return made

    def _scales(self, names: Sequence[str], logs: dict[str, float]) -> dict[str, tuple[float, float]]:
        """Mean and deviation of numbers, of logarithms where these are taken; 0 and 1 where no site tells enough."""
        plain = [name for name in names if name not in logs]
        found: dict[str, tuple[float, float]] = {}
        for group, steps in ((plain, []), (list(logs), [Log(offsets=logs)])):
            if group:
                before, self.steps = self.steps, [*self.steps, *steps]
                mean, sd, _ = self._moments([logarithm(n, logs[n]) if n in logs else n for n in group])
                self.steps = before
                found |= {
                    name: (_six(m), _six(s)) if s > 0 else (0.0, 1.0)
                    for name, m, s in zip(group, mean, sd, strict=True)
                }
        return found

    def _one_hot(self) -> None:
        wanted = self.spec.one_hot_columns
        if not wanted:
            return
        found = self._total(LevelCounts(columns=list(wanted)))
        told = {name: in_order(found[f"levels:{name}"].tolist()) for name in wanted}
        for name, levels in told.items():
            if found[f"many:{name}"][0] or not levels:
                why = "too many levels" if found[f"many:{name}"][0] else "no level that enough rows have"
                raise DataError(f"one_hot: {name!r} has {why}; drop it if it is an identifier, or pool levels")
        others = self._total(Outside(known=told))
        columns: dict[str, Levels] = {}
        for name, levels in told.items():
            every = [*levels, OTHER] if others[f"outside:{name}"][0] else levels
            reference = wanted[name] or every[0]
            known(f"one_hot: reference of {name!r}", [reference], every)
            if len(every) == 1:
                message = f"column {name!r} has the one level {every[0]!r} everywhere, so it gives no feature"
                warnings.warn(message, DataWarning, stacklevel=2)
            columns[name] = Levels(levels=every, reference=reference)
            coded = [f"{name}={one}" for one in columns[name].coded]
            self.terms[name] = coded + self.terms[name][1:]
            self.coded |= set(coded)
        self.steps.append(OneHot(columns=columns, unknown=self.spec.unknown))

    def _site(self) -> None:
        wish = self.spec.site
        if not wish:
            return
        if SITE in self.terms:
            raise DataError(f"recipe: site: the tables have a column {SITE!r}, too; rename it, or drop it")
        if isinstance(wish, str) and wish != "all":
            known("recipe: site", [wish], self.sites)
        step = SiteTerms(sites=self.sites, reference=self.sites[0] if wish is True else None if wish == "all" else wish)
        self.steps.append(step)
        self.terms[SITE] = list(step.terms)
        self.coded |= set(step.terms)

    def _log(self) -> None:
        offsets = self.spec.log_offsets
        if offsets:
            self.steps.append(Log(offsets=offsets))
        for name, offset in offsets.items():
            self.terms[name][0] = logarithm(name, offset)

    def _splines(self) -> None:
        if not self.spec.splines:
            return
        at = {self.terms[name][0]: knots for name, knots in self.spec.splines.items()}
        wanted = {name: KNOTS[count] for name, count in at.items() if isinstance(count, int)}
        found: dict[str, list[BoundedQuantile]] = quantiles(self.ask, wanted, self.steps) if wanted else {}
        knots = {
            name: [q.value for q in found[name]] if isinstance(given, int) else list(given)
            for name, given in at.items()
        }
        for source in self.spec.splines:
            name, *rest = self.terms[source]
            each = knots[name]
            if any(b <= a for a, b in pairwise(each)):
                shown = ", ".join(f"{k:g}" for k in each)
                raise DataError(f"splines: the knots of {name!r} would be {shown}; ask for fewer, or give them")
            self.terms[source] = [name, *(f"{name} spline {j + 1}" for j in range(len(each) - 2)), *rest]
        within = {name: [(q.low, q.high) for q in each] for name, each in found.items()}
        self.steps.append(Spline(knots=knots, within=within))

    def _interactions(self) -> None:
        pairs: list[tuple[str, str]] = []
        for a, b in self.spec.interactions:
            sides = [self._of(name) for name in (a, b)]
            made = [(x, y) for x in sides[0] for y in sides[1] if x != y]
            self.terms[f"{a}:{b}"] = [f"{x}:{y}" for x, y in made]
            self.coded |= {f"{x}:{y}" for x, y in made if x in self.coded and y in self.coded}
            pairs += made
        if pairs:
            self.steps.append(Interact(pairs=pairs))

    def _of(self, name: str) -> list[str]:
        """The terms of a column, or a term itself; indicators of gaps take no part."""
        if name in self.terms:
            return [term for term in self.terms[name] if term != indicator(name)]
        known("interactions", [name], [*self.terms, *self.features])
        return [name]

    def _standardize(self) -> None:
        wish = self.spec.standardize
        every = list(self.features)
        if isinstance(wish, list):
            known("standardize", wish, [*self.terms, *every])
            chosen = [t for t, source in self.features.items() if t in wish or source in wish]
        else:
            chosen = every if wish == "all" else [t for t in every if t not in self.coded] if wish else []
        if not chosen:
            return
        mean, sd, told = self._moments(chosen)
        if not all(told):
            raise DataError(_withheld([name for name, ok in zip(chosen, told, strict=True) if not ok]))
        if constant := [name for name, s in zip(chosen, sd, strict=True) if s == 0]:
            warnings.warn(f"constant over all sites: {', '.join(map(repr, constant))}", DataWarning, stacklevel=2)
        sd = np.where(sd == 0, 1.0, sd)
        made = dict(zip(chosen, mean.tolist(), strict=True)), dict(zip(chosen, sd.tolist(), strict=True))
        self.steps.append(Standardize(mean=made[0], sd=made[1], constant=constant))

    def _per_site(self) -> None:
        wish = self.spec.per_site
        if not wish:
            return
        every = {term: source for term, source in self.features.items() if source != SITE}
        if isinstance(wish, list):
            known("per_site", wish, [*self.terms, *every])
        step = PerSite(
            sites=self.sites, columns=[t for t, s in every.items() if wish is True or t in wish or s in wish]
        )
        self.steps.append(step)
        self.terms |= {f"{name}@": step.terms(name) for name in step.columns}

    def _moments(self, names: Sequence[str]) -> tuple[Floats, Floats, npt.NDArray[np.bool_]]:
        """Mean and deviation over all sites, and whether all of them told theirs; 0 for a constant's deviation."""
        first = self._total(Moments(columns=list(names)))
        n = np.maximum(first["n"], 1)
        told = (first["withheld"] == 0) & (first["n"] > 0)
        mean = first["sum"] / n
        second = self._total(Moments(columns=list(names), centres=mean.tolist()))
        mean = mean + second["sum"] / n
        variance = np.maximum(second["squares"] / n - (second["sum"] / n) ** 2, 0.0)
        return mean, spread_of(mean, np.sqrt(variance)), told


def in_order(levels: Iterable[str]) -> list[str]:
    """Levels by size where all are numbers, and by the alphabet otherwise."""
    names = list(levels)
    try:
        return sorted(names, key=float)
    except ValueError:
        return sorted(names)


def _six(value: float) -> float:
    """Six digits: a sum under masks has not all those of a plain one, and draws should be the same after both."""
    return float(f"{value:.6g}")


def _withheld(names: Sequence[str]) -> str:
    return (
        f"sites tell too little about {', '.join(map(repr, names))}: fewer than min_count rows have a value, or one "
        "that is unlike the commonest; put it in one_hot or drop, give a constant, or ask for a smaller min_count"
    )
