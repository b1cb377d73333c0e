"""The pictures of a report."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from fedcomposite.reports.drawing import COLORS, Axes
from fedcomposite.reports.reading import Found

_FOREST = 40  # coefficients that are drawn
_NAMED = 20  # lines of a path with their names beside them


def figures(found: Found) -> dict[str, str]:
    """All pictures that this run has, by their captions."""
    makers: dict[str, Callable[[Found], str]] = {
        "Coefficients along the path": path,
        "Cross-validation": cross_validation,
        "Coefficients with 95 % confidence intervals": forest,
        "ROC curves": roc,
        "Calibration": calibration,
        "Decision curve": decision,
        "ROC curves on the test part": partial(roc, part="test"),
        "Calibration on the test part": partial(calibration, part="test"),
        "Decision curve on the test part": partial(decision, part="test"),
        "Convergence": convergence,
    }
    made = {caption: draw(found) for caption, draw in makers.items()}
    return {caption: svg for caption, svg in made.items() if svg}


def _color(i: int) -> str:
    return COLORS[i % len(COLORS)]


def _strengths(found: Found) -> list[float]:
    return list(found.analysis["path"]["lambda"])


def path(found: Found) -> str:
    """Coefficients by strength, the strongest on the left."""
    if "path" not in found.analysis:
        return ""
    lambdas, models = _strengths(found), found.analysis["path"]["solutions"]
    names, count = found.analysis["coordinates"], found.analysis["features"]
    drawn = [j for j in range(count) if any(model[j] for model in models)]
    values = [model[j] for model in models for j in drawn] or [0.0]
    named = sorted(range(len(drawn)), key=lambda i: -abs(models[-1][drawn[i]]))[:_NAMED]
    axes = Axes(
        (lambdas[0], lambdas[-1]), _room(values), labels=("lambda", "coefficient"), size=(760, 400),
        logarithmic=(True, False), right=min(200, 30 + 7 * max((len(str(names[drawn[i]])) for i in named), default=0)),
    )  # fmt: skip
    axes.bar((lambdas[0], 0.0), (lambdas[-1], 0.0), "#999", 1.0)
    for i, j in enumerate(drawn):
        points = [(lam, model[j]) for lam, model in zip(lambdas, models, strict=True)]
        axes.line(points, _color(i), title=str(names[j]), kind="trace")
    axes.names([(str(names[drawn[i]]), models[-1][drawn[i]], _color(i)) for i in named])
    axes.mark(found.analysis["lambda"], str(found.analysis["choice"]))
    return axes.svg("coefficients for falling strengths of the regularizer")


def cross_validation(found: Found) -> str:
    """The score on samples held out, with standard errors."""
    if "cv" not in found.analysis:
        return ""
    cv, lambdas = found.analysis["cv"], _strengths(found)
    rows = [(lam, m, s) for lam, m, s in zip(lambdas, cv["mean"], cv["se"], strict=True) if m is not None]
    ends = [m + side * (s or 0.0) for _, m, s in rows for side in (-1, 1)]
    axes = Axes(
        (lambdas[0], lambdas[-1]), _room(ends), labels=("lambda", str(cv["score"])), size=(760, 320),
        logarithmic=(True, False),
    )  # fmt: skip
    for lam, mean, se in rows:
        axes.bar((lam, mean - (se or 0.0)), (lam, mean + (se or 0.0)), "#bbb", 1.2)
    titles = [f"lambda {lam:.4g}: {mean:.5g} ± {se or 0.0:.2g}" for lam, mean, se in rows]
    axes.dots([(lam, mean) for lam, mean, _ in rows], COLORS[1], titles)
    axes.mark(cv["lambda_min"], "min")
    if cv["lambda_1se"] != cv["lambda_min"]:
        axes.mark(cv["lambda_1se"], "1se")
    return axes.svg("cross-validated score by strength")


def forest(found: Found) -> str:
    """Estimates without the regularizer's bias, and their intervals."""
    intercepts = {"(intercept)", "bias"}
    rows = [r for r in found.analysis.get("intervals", []) if r["name"] not in intercepts]
    rows = sorted(rows, key=lambda r: -abs(r["coefficient"]))[:_FOREST]
    if not rows:
        return ""
    ends = [0.0, *(r[k] for r in rows for k in ("lower", "upper") if r[k] is not None)]
    count = len(rows)
    wide = min(240, 20 + 7 * max(len(str(r["name"])) for r in rows))
    axes = Axes(
        _room(ends), (count + 0.5, 0.5), labels=("estimate, on the scale of the model", ""),
        size=(760, 70 + 22 * count), left=wide,
    )  # fmt: skip
    axes.bar((0.0, 0.5), (0.0, count + 0.5), "#999", 1.0)
    for i, row in enumerate(rows, 1):
        color = COLORS[0] if row["coefficient"] else "#999"
        axes.left_text(i, str(row["name"]))
        if row["lower"] is not None and row["upper"] is not None:
            axes.bar((row["lower"], i), (row["upper"], i), color, 2.0)
        if row["estimate"] is not None:
            p = "" if row["p"] is None else f", p = {row['p']:.2g}"
            axes.dots([(row["estimate"], i)], color, [f"{row['name']}: {row['estimate']:.3g}{p}"])
    return axes.svg("estimates with confidence intervals", numbers=(True, False))


def roc(found: Found, part: str = "quality") -> str:
    """A curve per site."""
    measured = {k: v for k, v in found.analysis.get(part, {}).items() if v.get("roc")}
    if not measured:
        return ""
    axes = Axes((0, 1), (0, 1), labels=("false positive rate", "true positive rate"), size=(420, 400))
    axes.bar((0, 0), (1, 1), "#bbb", 1.0)
    for i, (site, one) in enumerate(measured.items()):
        axes.line([(a, b) for a, b in one["roc"]], _site_color(site, i), title=site, dashed=site == "all")
    names = [f"{site} {one['auroc']:.3f}" for site, one in measured.items()]
    axes.legend(names, [_site_color(site, i) for i, site in enumerate(measured)])
    return axes.svg("ROC curve of every site")


def _site_color(site: str, i: int) -> str:
    return "#000000" if site == "all" else [c for c in COLORS if c != "#000000"][i % (len(COLORS) - 1)]


def calibration(found: Found, part: str = "quality") -> str:
    """Observed shares by predicted probability, or observed by predicted means, per site."""
    measured = {k: v for k, v in found.analysis.get(part, {}).items() if "calibration_slope" in v}
    if not measured:
        return ""
    ends, labels = (0.0, 1.0), ("predicted probability", "observed share")
    if "auroc" not in next(iter(measured.values())):
        values = [r[k] for one in measured.values() for r in one["calibration"] for k in ("predicted", "observed")]
        ends, labels = _room(values or [0.0]), ("predicted mean", "observed mean")
    axes = Axes(ends, ends, labels=labels, size=(420, 400))
    axes.bar((ends[0], ends[0]), (ends[1], ends[1]), "#bbb", 1.0)
    for i, (site, one) in enumerate(measured.items()):
        points = [(r["predicted"], r["observed"]) for r in one["calibration"]]
        color = _site_color(site, i)
        axes.line(points, color, title=site, dashed=site == "all")
        axes.dots(points, color, [f"{site}: {r['samples']:.0f} samples" for r in one["calibration"]])
    axes.legend(list(measured), [_site_color(site, i) for i, site in enumerate(measured)])
    return axes.svg("calibration of every site")


def decision(found: Found, part: str = "quality") -> str:
    """Net benefit by threshold, over all sites, beside that of treating everyone and no one."""
    curve = found.analysis.get(part, {}).get("all", {}).get("decision")
    if not curve:
        return ""
    share = curve["everyone"][0]
    top = max(*(v for v in curve["model"] if v is not None), share, 0.01)
    axes = Axes((0, 1), (-0.25 * top, 1.05 * top), labels=("threshold", "net benefit"), size=(420, 400))
    kinds = {"model": COLORS[0], "everyone": COLORS[1], "no one": "#999"}
    for kind, color in kinds.items():
        known = [(t, v) for t, v in zip(curve["threshold"], curve[kind], strict=True) if v is not None]
        points = [(t, v) for t, v in known if v >= -0.25 * top]
        if len(points) > 1:
            axes.line(points, color, title=kind)
    axes.legend(list(kinds), list(kinds.values()))
    return axes.svg("net benefit of acting on the model")


def convergence(found: Found) -> str:
    """Stationarity by round of a run; exchanges by strength of a path."""
    if len(found.history) > 1:
        points = [(r["round"], r["stationarity"]) for r in found.history]
        points = [(a, b) for a, b in points if isinstance(b, int | float) and b > 0 and math.isfinite(b)]
        if len(points) > 1:
            values = [b for _, b in points]
            axes = Axes(
                (points[0][0], points[-1][0]), (min(values), max(values)), labels=("round", "stationarity"),
                size=(760, 300), logarithmic=(False, True),
            )  # fmt: skip
            axes.line(points, COLORS[0], title="stationarity")
            axes.dots(points, COLORS[0], [f"round {a}: {b:.2e}" for a, b in points])
            return axes.svg("stationarity by round")
    if "path" not in found.analysis:
        return ""
    lambdas, rounds = _strengths(found), found.analysis["path"]["rounds"]
    axes = Axes(
        (lambdas[0], lambdas[-1]), (0, max(rounds) + 1), labels=("lambda", "exchanges"), size=(760, 240),
        logarithmic=(True, False),
    )  # fmt: skip
    done = found.analysis["path"]["converged"]
    for lam, count, good in zip(lambdas, rounds, done, strict=True):
        axes.bar((lam, 0), (lam, count), COLORS[0] if good else COLORS[1], 4.0)
    return axes.svg("exchanges that each strength took")


def _room(values: list[Any]) -> tuple[float, float]:
    """The range of some values, and a little more."""
    low, high = min(values), max(values)
    more = 0.05 * (high - low or 1.0)
    return low - more, high + more
