"""What a reader has to know beside the numbers: who was studied, how the model was chosen, what tables say."""

from __future__ import annotations

from typing import Any

from fedcomposite.analysis.table_one import LEGEND
from fedcomposite.reports.reading import Found

_CHOICES = {
    "min": "the best cross-validated {score}",
    "1se": "the largest strength within one standard error of the best cross-validated {score}",
    "aic": "the least AIC along the path",
    "bic": "the least BIC along the path",
    "ebic": "the least EBIC along the path",
    "as given": "as the experiment gives it",
}


def studied(found: Found) -> dict[str, str]:
    """How many samples and events there are, and how the strength of the regularizer was chosen."""
    one = found.analysis
    if not one:
        return {}
    made = {}
    if overall := one.get("quality", {}).get("all"):
        n, events = overall["samples"], overall.get("positives")
        if "events" in overall:
            about = f"{overall['events']:.6g} events"
        else:
            about = f"mean {overall['mean']:.4g}" if events is None else f"{events:.6g} of them of class 1 (events)"
        made["samples"] = f"{n:.6g}, {about}, at {len(one['sites'])} sites"
    elif rows := one.get("description"):
        first = rows[0].get("feature")
        counts = [r["n"] + r["missing"] if "n" in r else r["samples"] for r in rows if r.get("feature") == first]
        made["samples"] = f"{sum(counts)}, at {len(one['sites'])} sites"
    if gaps := one.get("gaps"):
        made["missing"] = _missing(gaps)
    choice = _CHOICES.get(one["choice"], one["choice"])
    made["strength"] = f"lambda = {one['lambda']:.4g}, {choice.format(score=one.get('cv', {}).get('score'))}"
    if cv := one.get("cv"):
        by_site = cv.get("left_out") == "sites"
        made["cross-validation"] = (
            f"{cv['folds']} folds, each of them a site"
            if by_site
            else f"{cv['folds']} folds, dealt out within each site"
        )
    return made


_FILLED = {"chained": "drawn", "complete": "rows left out", "most_frequent": "commonest"}


def _missing(gaps: dict[str, Any]) -> str:
    """Which columns have gaps, how many, and what was done about them."""
    rows = gaps["rows"]
    each = [
        f"{name} {one['missing']} ({100 * one['missing'] / rows:.1f} %, {_FILLED.get(one['filled'], one['filled'])})"
        for name, one in gaps["columns"].items()
    ]
    said = ", ".join(each)
    if gaps["copies"] > 1:
        said += f"; {gaps['copies']} completed copies by chained equations"
    left = rows - gaps["kept"]
    return said + (f"; {left} of {rows} rows left out, since they are not complete" if left else "")


def notes(found: Found) -> dict[str, str]:
    """What each table shows, and what it does not."""
    made = {
        "Data": "Mean (standard deviation), or levels with counts, as the sites told them.",
        "Coefficients of the sites": "Of the model, per unit of the column: what a patient of no site here would have "
        "(common), and what those of each site have; shrunk by the regularizer.",
        "Survival": "Kaplan-Meier estimates with 95 % bands; all: as if the sites were one.",
        "Proportionality": "Test of proportional hazards by Schoenfeld residuals, of the estimates without the "
        "regularizer: whether an effect changes with time (rank of the event); (all): of all together.",
        "Test": "Measured on the test part, which neither the fit nor the choice of the model has seen.",
    }
    if first := found.analysis.get("table_one"):
        made["Table 1"] = "; ".join([LEGEND, *first["notes"]]) + "."
    if "intervals" in found.analysis:
        made["Coefficients"] = _coefficients(found)
    if "quality" in found.analysis:
        made["Quality"] = " ".join(filter(None, [_quality(found), _regression(found), _times(found)]))
    for name in ("Quality", "Test"):
        if name in made and any(str(c).endswith("±") for c in found.tables.get(name, ())):
            made[name] += " ±: the most that the number before it can be off, since sites tell samples in bins."
    return made


def _times(found: Found) -> str:
    """What the measures of times to an event mean."""
    one = found.analysis["quality"]["all"]
    if "c_index" not in one:
        return ""
    said = "C-index: share of pairs of patients of a site whose order in time the model has right. "
    if "horizon" in one:
        said += f"By the horizon {one['horizon']:g}: AUROC, Brier score, predicted and observed share of events, by "
        said += "weights for censoring; predictions with each site's own baseline."
    return said.strip()


def _regression(found: Found) -> str:
    """What the measures of a regression mean."""
    one = found.analysis["quality"]["all"]
    if "r2" not in one:
        return ""
    said = "Mean, predicted: means of what was observed and predicted. R2: against the mean of the same samples. "
    if "deviance_explained" in one:
        said += "Deviance explained: against one rate for all of them. Calibration: intercept, log of observed over "
        return said + "predicted counts; slope, of a Poisson regression on the linear predictor beside the offset."
    if "mean_loss" in one:
        said += "Mean loss: what the fit minimises, without the regularizer. "
    if "calibration_slope" in one:
        said += "Calibration: intercept, mean observed less mean predicted; slope, of a line through both."
    return said.strip()


def _coefficients(found: Found) -> str:
    rows = found.analysis["intervals"]
    units = bool(rows) and "unit_estimate" in rows[0]
    said = "coefficient: of the model, shrunk by the regularizer; "
    said += "original: the same per unit of the column; " if units else ""
    said += "debiased, from, to, p: estimate without the regularizer, its 95 % confidence interval and p of no effect, "
    said += "on the scale of the coefficient, not adjusted for the number of coefficients. "
    for short, ratio in (("OR", "odds"), ("RR", "rate"), ("HR", "hazard")):
        if bool(rows) and f"{ratio}_ratio" in rows[0]:
            per = (
                "per unit of the column (one year, 1 against 0)" if units else "per unit of the feature as it was given"
            )
            said += f"{short}: {ratio} ratio without the bias of the regularizer, {per}, with its 95 % confidence "
            said += "interval" + (_per_unit(ratio) if units else ". ")
            said += _joint(rows) if units else ""
    if rows and "missing_share" in rows[0]:
        said += "Estimates and intervals combine the completed copies (Rubin's rules, Barnard and Rubin's degrees of "
        said += (
            "freedom); missing share: of the variance, what is due to gaps; coefficients are of all copies together. "
        )
    return said + "Intervals do not know how the model was chosen."


def _per_unit(ratio: str) -> str:
    return " and p per unit. " if ratio == "hazard" else " and p per unit; of the intercept, at columns of 0. "


def _joint(rows: list[dict[str, Any]]) -> str:
    """Why terms of splines and products have no ratio per unit."""
    known = [r for r in rows if r["estimate"] is not None and r["name"] != "(intercept)"]
    names = [str(r["name"]) for r in known if r["unit_estimate"] is None]
    if not names:
        return ""
    return (
        f"No ratio per unit for {', '.join(names)}: terms of a spline, products and their factors share the effect of "
        "their columns, which is not that of one unit of one term; the curves with bands show it, value by value. "
    )


def _quality(found: Found) -> str:
    cv = found.analysis.get("cv")
    if cv is None:
        return (
            "Apparent performance: measured on training samples, those that the model was fitted to. It is too good "
            "for new patients; cross-validate, or hold a test part out."
        )
    by_site = cv.get("left_out") == "sites"
    whose = "the other sites, as a new site would be" if by_site else "the other folds"
    return (
        f"Measured on held-out folds: every sample by a model of {whose}, at the strength that was chosen. The "
        "preparation and the strength were learned from all samples, so that this may still be a little too good."
    )
