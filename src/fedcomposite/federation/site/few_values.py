"""What answers about columns of the asker's making say of values that few have: whether somebody has them.

Over a level that the asker names, or a spline's term, a site withholds sums if few rows have it, and tells them if
nobody does: so the asker knows that somebody has the level. Such answers are counted as refusals are. Sums of columns
that are told are in the book of columns: with enough knots their combinations would be a histogram of single patients.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fedcomposite.data.queries import Below, Moments, Outside, Query, enough
from fedcomposite.data.sheets import Origin, Sheet
from fedcomposite.data.steps import Chained, Log, OneHot, Spline, Step, logarithm, natural_spline, prepared
from fedcomposite.federation.site.learned_steps import ways_of

Marks = npt.NDArray[np.bool_]


def hinted(sheet: Sheet, query: Query, least: int) -> list[tuple[str, Marks]]:
    """The sets of fewer than ``least`` rows of which an answer says that they are there, and by what column."""
    table, made = prepared(sheet, query.steps), list[tuple[str, Marks]]()
    if isinstance(query, Outside):
        for name, levels in query.known.items():
            known = set(levels)
            strange = [text is not None and text not in known for text in table.texts(name)]
            made.append((sheet.origin(name).name, np.array(strange, bool)))
    elif isinstance(query, Moments | Below):
        of = {f"{k}={one}": k for step in query.steps if isinstance(step, OneHot)
              for k, coding in step.columns.items() for one in coding.coded}  # fmt: skip
        names = query.columns if isinstance(query, Moments) else query.edges
        own = [name for name in names if name in table.columns and name not in sheet.columns]
        made += [(sheet.origin(of.get(name, name)).name, unlike(table.numbers(name))) for name in own]
    return [(name, rows) for name, rows in made if 0 < rows.sum() < least]


def unlike(values: npt.NDArray[np.float64]) -> Marks:
    """The rows whose values are not the commonest one."""
    found, counts = np.unique(values[~np.isnan(values)], return_counts=True)
    made: Marks = ~np.isnan(values) & (values != found[counts.argmax()]) if len(found) else np.zeros(len(values), bool)
    return made


def told_columns(sheet: Sheet, query: Query, least: int) -> npt.NDArray[np.float64] | None:
    """The columns of which an answer has the sums, beside those that they were made from; None if none was made."""
    if not isinstance(query, Moments):
        return None
    table = prepared(sheet, query.steps)
    bases = [name for step in query.steps if isinstance(step, Spline) for name in step.knots]
    names = [name for name in dict.fromkeys([*query.columns, *bases]) if name in table.columns]
    if all(name in sheet.columns for name in names):
        return None
    told = [table.numbers(name) for name in names if _has_sums(table, name, least)]
    return np.nan_to_num(np.stack(told, axis=1)) if told else None


def _has_sums(table: Sheet, name: str, least: int) -> bool:
    values = table.numbers(name)
    there = ~np.isnan(values)
    return enough(values[there], least) and enough(values[there & table.own(name)], least)


def bends(sheet: Sheet, steps: Sequence[Step], least: int) -> tuple[dict[str, list[float]], list[str]]:
    """The constants of logarithms and splines, by what they are of, and those of which somebody learns single values.

    These are offsets with which few values have no logarithm, or some, and knots beyond which few values lie. Names and
    constants are those of the file: by others an asker would choose anew.
    """
    found, odd = dict[str, list[float]](), list[str]()
    origins: dict[str, Origin] = {}
    for step in steps:
        if isinstance(step, Log):
            for name, offset in step.offsets.items():
                own = sheet.origin(name)
                what = f"offsets of the logarithm of {own.name!r}"
                found[what] = _in_file(own, [-offset])
                if name in sheet.columns and bool((sheet.numbers(name) + offset <= 0).any()):
                    return found, [*odd, what]  # what comes after is not made
                origins[logarithm(name, offset)] = own._replace(name=f"log {own.name} from {found[what][0]:g}")
        elif isinstance(step, Spline):
            for name, knots in step.knots.items():
                log = name in origins
                own = origins.get(name, sheet.origin(name))
                what = f"knots of {own.name!r}"
                found[what] = list(knots) if log else _in_file(own, knots)
                terms = natural_spline(sheet.numbers(name), knots).T if name in sheet.columns else np.zeros((0, 0))
                odd += [what] * any(not enough(term[~np.isnan(term)], least) for term in terms)
        elif isinstance(step, Chained):
            found |= ways_of(step.chain)
        sheet = step.apply(sheet)
    return found, odd


def _in_file(own: Origin, values: Sequence[float]) -> list[float]:
    return [float(f"{(v - own.shift) / own.scale:.9g}") for v in values]
