"""Claims and what becomes of them: the numbers that a verdict rests on, paired intervals, and Holm's correction.

A claim is decided in one of two ways. Either it is so or not (``right``): proxes are counted, residuals lie below a
level with every seed. Or it compares methods: then every comparison is a mean of paired differences over seeds with a
95 % interval of Student's t, and the p-values of all comparisons of a page are corrected by Holm. The claim holds if
every comparison is won by more than ``least`` and significantly, does not hold if one is lost so, and otherwise no
difference was measured; or, where only a difference of more than :data:`BLUNT` standard deviations over seeds could
have decided it, with so few seeds for so many comparisons, the claim was not testable.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

HOLDS, FAILS, EQUAL = "holds", "does not hold", "no difference measured"
NOT_TESTABLE = "not testable with these settings"
NOT_JUDGED = "not judged"
"""Of what the reduced form measured in too few rounds, of numbers that are missing, and of what was not run."""
VERDICTS = (HOLDS, FAILS, EQUAL, NOT_TESTABLE, NOT_JUDGED)
LEVEL = 0.05
BLUNT = 3.0
"""More standard deviations of the paired differences than this, and a comparison could not have told a difference."""
NOT_RUN = "not run"


class Lead(NamedTuple):
    """How far ahead something is of another, in paired differences over seeds: positive is ahead."""

    mean: float
    low: float
    high: float
    p: float
    least: float
    text: str
    pairs: int = 0
    """How many paired seeds it rests on; 0 for another test than Student's."""


class Row(NamedTuple):
    """A number that a verdict rests on."""

    quantity: str
    ours: str
    paper: str = "–"
    source: str = "ours"
    """Where the settings of the number come from: the paper, the authors' code, or ours."""
    seeds: int = 1
    lead: Lead | None = None


class Claim(NamedTuple):
    """Something a paper says, and what became of it."""

    says: str
    """The claim in our words, with the paper's number where it gives one."""
    rows: tuple[Row, ...] = ()
    right: bool | None = None
    """Whether it is so; None where the leads of the rows decide."""
    note: str = ""
    verdict: str = ""
    """One of :data:`VERDICTS`, once :func:`decide` has seen all claims of a page."""

    @property
    def measured(self) -> str:
        """What was measured, in a line."""
        told_ = "; ".join(f"{r.quantity}: {r.ours}" if r.quantity else r.ours for r in self.rows)
        return ". ".join(part for part in (told_, self.note) if part) or NOT_RUN


def told(values: Any, digits: int = 2, factor: float = 1.0) -> str:
    """Mean ± standard deviation over seeds, in few letters; a single seed has no deviation."""
    numbers = np.asarray(list(values), float) * factor
    if not len(numbers):
        return NOT_RUN
    mean = f"{numbers.mean():.{digits}g}"
    return mean if len(numbers) < 2 else f"{mean} ± {float(f'{numbers.std(ddof=1):.1g}'):g}"


def row(quantity: str, values: Any, paper: str = "–", source: str = "ours", *, digits: int = 2) -> Row:
    """The row of a number, or of one for each seed."""
    if isinstance(values, int | float):
        return Row(quantity, f"{values:.{digits}g}", paper, source)
    if isinstance(values, str):
        return Row(quantity, values, paper, source)
    return Row(quantity, told(values, digits), paper, source, len(values))


def fact(says: str, right: bool, *rows: Row, note: str = "") -> Claim:
    """A claim that is so or not."""
    return Claim(says, rows, bool(right), note)


def open_claim(says: str, *rows: Row, note: str, verdict: str = NOT_TESTABLE) -> Claim:
    """A claim that these settings cannot decide, or that was not run; the note says why."""
    return Claim(says, rows, None, note, verdict)


def lead(ours: pd.Series, other: pd.Series, *, least: float = 0.0, lower: bool = False, ratio: bool = False) -> Lead:
    """The paired comparison of two series by seed; ``ratio`` compares logarithms, ``least`` then being a share."""
    if ratio:
        with np.errstate(divide="ignore", invalid="ignore"):
            ours, other, least = np.log(ours), np.log(other), math.log1p(least)
    differences = ((other - ours) if lower else (ours - other)).dropna()
    low, high, p = interval(differences)
    mean = float(differences.mean()) if len(differences) else math.nan
    sign = -1.0 if lower else 1.0
    ends = sorted((sign * low, sign * high))
    if ratio:
        text = f"ratio {math.exp(sign * mean):.3g} ({math.exp(ends[0]):.3g} to {math.exp(ends[1]):.3g})"
    else:
        shown = (f"{value + 0.0:.2g}" for value in (sign * mean, *ends))  # no minus before a zero
        text = "difference {} ({} to {})".format(*shown)
    return Lead(mean, low, high, p, least, text if len(differences) > 1 else "one seed: no interval", len(differences))


def interval(differences: Any) -> tuple[float, float, float]:
    """The 95 % interval of a mean by Student's t, and the two-sided p-value of zero; nan for fewer than two.

    Differences that are all alike have no deviation to judge by (rounds are counted where records are): the p-value is
    that of all their signs, 2 / 2^n.
    """
    from scipy import stats

    d = np.asarray(differences, float)
    if len(d) < 2:
        return math.nan, math.nan, math.nan
    error = float(d.std(ddof=1) / len(d) ** 0.5)
    mean = float(d.mean())
    if error == 0 or not math.isfinite(error):
        return mean, mean, 1.0 if mean == 0 or not math.isfinite(mean) else 2.0 ** (1 - len(d))
    half = float(stats.t.ppf(0.975, len(d) - 1)) * error
    return mean - half, mean + half, 2 * float(stats.t.sf(abs(mean) / error, len(d) - 1))


def ahead(
    says: str,
    each: Mapping[str, pd.Series],
    *,
    least: float = 0.0,
    lower: bool = False,
    ratio: bool = False,
    paper: Mapping[str, str] | None = None,
    source: str = "ours",
    digits: int = 3,
    note: str = "",
) -> Claim:
    """The claim that the first of ``each`` is ahead of all others; the series are indexed by seed.

    Parameters
    ----------
    says : str
        The claim.
    each : mapping of str to Series
        What was measured, by method.
    least : float
        Less is no difference; with ``ratio`` a share.
    lower : bool
        Whether less is better.
    ratio : bool
        Compare logarithms.
    paper : mapping of str to str, optional
        The paper's values.
    source : str
        Where the settings come from.
    digits : int
        Of what is told.
    note : str
        More words.
    """
    (name, ours), *others = each.items()
    printed = paper or {}
    rows = [row(name, ours, printed.get(name, "–"), source, digits=digits)]
    for other, values in others:
        compared = lead(ours, values, least=least, lower=lower, ratio=ratio)
        rows.append(row(other, values, printed.get(other, "–"), source, digits=digits)._replace(lead=compared))
    return Claim(says, tuple(rows), None, note)


def over_rows(says: str, each: Mapping[str, pd.Series], *, least: float = 0.0, note: str = "") -> Claim:
    """The claim that the first of ``each`` is ahead of all others over the rows of a table, one number for each row.

    By Wilcoxon's signed ranks of the differences, which asks nothing of their sizes from row to row; it tells what the
    rows together say where each has few seeds.
    """
    from scipy import stats

    (name, ours), *others = each.items()
    rows = [Row(name, f"{ours.median():.4g}, the median of the rows", seeds=0)]
    for other, values in others:
        d = (ours - values).dropna()
        p = float(stats.wilcoxon(d).pvalue) if (d != 0).any() else math.nan
        text = f"median difference {d.median():.2g}, ahead in {(d > 0).sum()} of {len(d)} rows"
        compared = Lead(float(d.median()), math.nan, math.nan, p, least, f"{text} (signed ranks, p = {p:.1g})")
        rows.append(Row(other, f"{values.median():.4g}, the median of the rows", seeds=0, lead=compared))
    return Claim(says, tuple(rows), None, note)


def against(
    says: str, quantity: str, values: pd.Series, level: float, *, above: bool, paper: str = "–", source: str = "ours"
) -> Claim:
    """The claim that a number, one for each seed, lies above or below a level."""
    compared = lead(values, pd.Series(level, index=values.index), lower=not above)
    low, high, _ = interval(values)
    if len(values) > 1:
        compared = compared._replace(text=f"mean {low:.2f} to {high:.2f}")
    return Claim(says, (row(quantity, values, paper, source)._replace(lead=compared),))


def decide(claims: Sequence[Claim], *, quick: bool = False) -> list[Claim]:
    """The claims with their verdicts: those of all comparisons of a page together, corrected by Holm.

    What the ``quick`` form measured is told but not judged, since a claim is about runs of full length; nor is what was
    not measured, nan.
    """
    leads = [(i, r.lead) for i, claim in enumerate(claims) for r in claim.rows if r.lead is not None]
    corrected = holm([found.p for _, found in leads])
    by_claim: dict[int, list[tuple[Lead, float]]] = {}
    for (i, found), p in zip(leads, corrected, strict=True):
        by_claim.setdefault(i, []).append((found, p))
    count = sum(not math.isnan(p) for p in corrected)
    return [c._replace(verdict=_verdict(c, by_claim.get(i, []), count, quick)) for i, c in enumerate(claims)]


def tellable(pairs: int, comparisons: int) -> float:
    """The smallest mean difference, in standard deviations of the paired differences, that is significant.

    After Bonferroni, the first step of Holm's correction, for so many comparisons on a page.
    """
    from scipy import stats

    if pairs < 2:
        return math.inf
    return float(stats.t.ppf(1 - LEVEL / (2 * comparisons), pairs - 1)) / math.sqrt(pairs)


def _verdict(claim: Claim, leads: Sequence[tuple[Lead, float]], count: int, quick: bool) -> str:
    if quick or not claim.rows or any(_missing(r.ours) for r in claim.rows):
        return claim.verdict if claim.verdict == NOT_TESTABLE and not quick else NOT_JUDGED
    if claim.verdict:
        return claim.verdict
    if claim.right is not None:
        return HOLDS if claim.right else FAILS
    if any(math.isnan(found.p) for found, _ in leads):
        return NOT_TESTABLE
    if all(p < LEVEL and found.mean > found.least for found, p in leads):
        return HOLDS
    if any(p < LEVEL and found.mean < -found.least for found, p in leads):
        return FAILS
    return NOT_TESTABLE if any(f.pairs and tellable(f.pairs, count) > BLUNT for f, _ in leads) else EQUAL


def _missing(text: str) -> bool:
    return text == NOT_RUN or "nan" in text.split() or "nan" in text.replace(",", " ").replace("(", " ").split()


def holm(values: Sequence[float]) -> list[float]:
    """P-values corrected for their number by Holm's rule; nan stays, and does not count."""
    known = sorted((p, i) for i, p in enumerate(values) if not math.isnan(p))
    found, largest = [math.nan] * len(values), 0.0
    for rank, (p, i) in enumerate(known):
        largest = max(largest, min(1.0, (len(known) - rank) * p))
        found[i] = largest
    return found


def table(claims: Sequence[Claim]) -> list[str]:
    """Markdown: every number behind the verdicts."""
    lines = ["| | quantity | the paper's value | ours | settings from | seeds | paired, 95 % interval |"]
    lines += ["| --- | --- | --- | --- | --- | --- | --- |"]
    for number, claim in enumerate(claims, 1):
        for r in claim.rows:
            seeds = str(r.seeds) if r.seeds else "–"
            cells = (str(number), r.quantity, r.paper, r.ours, r.source, seeds, r.lead.text if r.lead else "")
            lines.append(f"| {' | '.join(map(cell, cells))} |")
    return lines


def multiplicity(claims: Sequence[Claim]) -> str:
    """How many comparisons a page makes, and what is done about it."""
    leads = [r.lead for c in claims for r in c.rows if r.lead is not None and not math.isnan(r.lead.p)]
    count, pairs = len(leads), sorted({found.pairs for found in leads if found.pairs})
    if not count:
        return "No verdict here rests on a comparison of means over seeds."
    told_ = (
        f"{count} comparison{'s' if count > 1 else ''} of paired seeds {'are' if count > 1 else 'is'} behind these "
        f"verdicts; their p-values are corrected by Holm, at {100 * LEVEL:g} %."
    )
    if not pairs:
        return told_
    least = ", ".join(f"{tellable(n, count):.3g} with {n} seed{'s' if n > 1 else ''}" for n in pairs)
    return (
        f"{told_} The smallest difference that they can tell, in standard deviations of the paired differences: "
        f"{least}; where it is more than {BLUNT:g}, a claim that nothing decided was not testable."
    )


def cell(text: str) -> str:
    """Text that fits a cell of a Markdown table."""
    return " ".join(text.replace("|", "\\|").split())
