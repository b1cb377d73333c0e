"""The pictures of a report."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pandas as pd

from fedcomposite.plots.charts import draw_effects, draw_forests
from fedcomposite.plots.inline import Picture, plain
from fedcomposite.plots.looks import COLORS
from fedcomposite.reports.reading import Found, followed, shown_times

_FOREST = 40  # coefficients that are drawn
_NAMED = 20  # lines of a path with their names beside them


def figures(found: Found) -> dict[str, str]:
    """All pictures that this run has, by their captions."""
    makers: dict[str, Callable[[Found], str]] = {
        "Coefficients along the path": path,
        "Cross-validation": cross_validation,
        "Coefficients with 95 % confidence intervals": forest,
        "What columns do": effects,
        "Coefficients by site": by_site,
        "Survival curves": survival,
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
    named = sorted(range(len(drawn)), key=lambda i: -abs(models[-1][drawn[i]]))[:_NAMED]
    picture = _by_strength(found, "coefficient", 400)
    picture.axes.axhline(0.0, color="#999", linewidth=1)
    for i, j in enumerate(drawn):
        points = [(lam, model[j]) for lam, model in zip(lambdas, models, strict=True)]
        picture.line(points, _color(i), str(names[j]), kind="trace")
    picture.ends([(str(names[drawn[i]]), models[-1][drawn[i]], _color(i)) for i in named])
    picture.mark(found.analysis["lambda"], str(found.analysis["choice"]))
    return picture.svg("coefficients for falling strengths of the regularizer")


def _by_strength(found: Found, y: str, height: int) -> Picture:
    """Axes on which the strength falls to the right."""
    lambdas = _strengths(found)
    picture = Picture((760, height), ("lambda", y), log_x=True)
    if lambdas[0] != lambdas[-1]:
        picture.axes.set_xlim(lambdas[0], lambdas[-1])
    return picture


def cross_validation(found: Found) -> str:
    """The score on samples held out, with standard errors."""
    if "cv" not in found.analysis:
        return ""
    cv, lambdas = found.analysis["cv"], _strengths(found)
    rows = [(lam, m, s or 0.0) for lam, m, s in zip(lambdas, cv["mean"], cv["se"], strict=True) if m is not None]
    picture = _by_strength(found, str(cv["score"]), 320)
    for lam, mean, se in rows:
        picture.axes.vlines(lam, mean - se, mean + se, color="#bbb", linewidth=1.2, clip_on=False)
    titles = [f"lambda {lam:.4g}: {mean:.5g} ± {se:.2g}" for lam, mean, se in rows]
    picture.dots([(lam, mean) for lam, mean, _ in rows], COLORS[1], titles)
    picture.mark(cv["lambda_min"], "min")
    if cv["lambda_1se"] != cv["lambda_min"]:
        picture.mark(cv["lambda_1se"], "1se")
    return picture.svg("cross-validated score by strength")


def forest(found: Found) -> str:
    """Estimates without the regularizer's bias, and their intervals."""
    intercepts = {"(intercept)", "bias"}
    rows = [r for r in found.analysis.get("intervals", []) if r["name"] not in intercepts]
    rows = sorted(rows, key=lambda r: -abs(r["coefficient"]))[:_FOREST]
    if not rows:
        return ""
    picture = Picture((760, 70 + 22 * len(rows)), ("estimate, on the scale of the model", ""))
    picture.axes.axvline(0.0, color="#999", linewidth=1)
    picture.axes.set_yticks(range(len(rows)), [plain(str(row["name"])) for row in rows])
    picture.axes.set_ylim(len(rows) - 0.5, -0.5)
    picture.axes.grid(False, axis="y")
    for i, row in enumerate(rows):
        color = COLORS[0] if row["coefficient"] else "#999"
        if row["lower"] is not None and row["upper"] is not None:
            picture.axes.hlines(i, row["lower"], row["upper"], color=color, linewidth=2)
        if row["estimate"] is not None:
            p = "" if row["p"] is None else f", p = {row['p']:.2g}"
            picture.dots([(row["estimate"], i)], color, [f"{row['name']}: {row['estimate']:.3g}{p}"])
    return picture.svg("estimates with confidence intervals")


def effects(found: Found) -> str:
    """A curve with a band for each column with a spline or products."""
    rows = found.analysis.get("effects")
    return Picture.of(draw_effects(pd.DataFrame(rows))).svg("effect curves with 95 % bands") if rows else ""


def by_site(found: Found) -> str:
    """A forest for each coefficient: sites, their mean, and where a further site lies."""
    if not (told := found.analysis.get("by_site")):
        return ""
    sites = pd.DataFrame(told["sites"]).astype(dict.fromkeys(("estimate", "se", "lower", "upper"), float))
    combined = pd.DataFrame(told["combined"]).set_index("name").astype(float)
    rows = combined[~combined.index.isin(["(intercept)", "bias"])].head(_FOREST)
    return (
        Picture.of(draw_forests(sites, rows, ratio=told["ratio"])).svg("coefficients of every site")
        if len(rows)
        else ""
    )


def survival(found: Found) -> str:
    """Steps of survival at every site, and below them the numbers at risk."""
    rows = found.analysis.get("curves")
    if not rows:
        return ""
    curves = pd.DataFrame(rows)
    sites, times = list(dict.fromkeys(curves["site"])), shown_times(curves)
    picture = Picture((760, 340 + 18 * len(sites)), ("time", "survival"))
    picture.axes.set(xlim=(0, float(curves["time"].max())), ylim=(0, 1.02))
    for i, site in enumerate(sites):
        own = followed(curves[curves["site"] == site])
        x, y = np.append(0.0, own["time"]), np.append(1.0, own["survival"])
        points = list(zip(np.repeat(x, 2)[1:].tolist(), np.repeat(y, 2)[:-1].tolist(), strict=True))
        picture.line(points, _site_color(site, i), site, dashed=site == "all")
        if site == "all":
            low, high = (np.append(1.0, own[f"survival_{end}"]) for end in ("lower", "upper"))
            picture.axes.fill_between(x, low, high, step="post", color="#000", alpha=0.08, linewidth=0)
        for t in [0.0, *times]:
            first = own[own["time"] >= t]["at_risk"]
            number = f"{first.iloc[0]:g}" if len(first) else "0"
            picture.axes.annotate(
                number, (t, 0), (0, -52 - 16 * i), xycoords=("data", "axes fraction"), textcoords="offset points",
                ha="center", fontsize=10, color=_site_color(site, i), annotation_clip=False,
            )  # fmt: skip
        picture.axes.annotate(
            plain(site), (0, 0), (-22, -52 - 16 * i), xycoords="axes fraction", textcoords="offset points",
            ha="right", fontsize=10, color=_site_color(site, i), annotation_clip=False,
        )  # fmt: skip
    picture.axes.legend(loc="lower left", frameon=False, fontsize=11)
    return picture.svg("survival at every site, with numbers at risk")


def _square(labels: tuple[str, str], ends: tuple[float, float] = (0.0, 1.0)) -> Picture:
    """Axes alike, with their diagonal."""
    picture = Picture((420, 400), labels)
    picture.axes.plot(ends, ends, color="#bbb", linewidth=1)
    picture.axes.set(xlim=ends, ylim=ends)
    return picture


def roc(found: Found, part: str = "quality") -> str:
    """A curve per site."""
    measured = {k: v for k, v in found.analysis.get(part, {}).items() if v.get("roc")}
    if not measured:
        return ""
    picture = _square(("false positive rate", "true positive rate"))
    for i, (site, one) in enumerate(measured.items()):
        name = f"{site} {one['auroc']:.3f}"
        picture.line([(a, b) for a, b in one["roc"]], _site_color(site, i), name, dashed=site == "all")
    picture.axes.legend(loc="lower right", frameon=False, fontsize=11)
    return picture.svg("ROC curve of every site")


def _site_color(site: str, i: int) -> str:
    return "#000000" if site == "all" else [c for c in COLORS if c != "#000000"][i % (len(COLORS) - 1)]


def calibration(found: Found, part: str = "quality") -> str:
    """Observed shares by predicted probability, or observed by predicted means, per site."""
    measured = {k: v for k, v in found.analysis.get(part, {}).items() if "calibration_slope" in v or "horizon" in v}
    if not measured:
        return ""
    ends, labels = (0.0, 1.0), ("predicted probability", "observed share")
    if "horizon" in (one := next(iter(measured.values()))):
        labels = (f"predicted share of events by {one['horizon']:g}", "observed share")
    elif "auroc" not in one:
        values = [r[k] for one in measured.values() for r in one["calibration"] for k in ("predicted", "observed")]
        low, high = min(values or [0.0]), max(values or [0.0])
        more = 0.05 * (high - low or 1.0)
        ends, labels = (low - more, high + more), ("predicted mean", "observed mean")
    picture = _square(labels, ends)
    for i, (site, one) in enumerate(measured.items()):
        points = [(r["predicted"], r["observed"]) for r in one["calibration"]]
        if points:
            picture.line(points, _site_color(site, i), site, dashed=site == "all")
            titles = [f"{site}: {r['samples']:.0f} samples" for r in one["calibration"]]
            picture.dots(points, _site_color(site, i), titles)
    picture.axes.legend(loc="lower right", frameon=False, fontsize=11)
    return picture.svg("calibration of every site")


def decision(found: Found, part: str = "quality") -> str:
    """Net benefit by threshold, over all sites, beside that of treating everyone and no one."""
    curve = found.analysis.get(part, {}).get("all", {}).get("decision")
    if not curve:
        return ""
    top = max(*(v for v in curve["model"] if v is not None), curve["everyone"][0], 0.01)
    picture = Picture((420, 400), ("threshold", "net benefit"))
    picture.axes.set(xlim=(0, 1), ylim=(-0.25 * top, 1.05 * top))
    for kind, color in {"model": COLORS[0], "everyone": COLORS[1], "no one": "#999"}.items():
        known = [(t, v) for t, v in zip(curve["threshold"], curve[kind], strict=True) if v is not None]
        points = [(t, v) for t, v in known if v >= -0.25 * top]
        if len(points) > 1:
            picture.line(points, color, kind)
    picture.axes.legend(loc="upper right", frameon=False, fontsize=11)
    return picture.svg("net benefit of acting on the model")


def convergence(found: Found) -> str:
    """Stationarity by round of a run; exchanges by strength of a path."""
    points = [(r["round"], r["stationarity"]) for r in found.history]
    points = [(a, b) for a, b in points if isinstance(b, int | float) and b > 0 and math.isfinite(b)]
    if len(points) > 1:
        picture = Picture((760, 300), ("round", "stationarity"), log_y=True)
        picture.line(points, COLORS[0], "stationarity")
        picture.dots(points, COLORS[0], [f"round {a}: {b:.2e}" for a, b in points])
        return picture.svg("stationarity by round")
    if "path" not in found.analysis:
        return ""
    along, picture = found.analysis["path"], _by_strength(found, "exchanges", 240)
    colors = [COLORS[0] if good else COLORS[1] for good in along["converged"]]
    picture.axes.vlines(along["lambda"], 0, along["rounds"], color=colors, linewidth=4, clip_on=False)
    picture.axes.locator_params(axis="y", integer=True)
    picture.axes.set_ylim(0, max(along["rounds"]) + 1)
    return picture.svg("exchanges that each strength took")
