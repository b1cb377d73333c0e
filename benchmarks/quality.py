"""Quality told by small sites under minimum counts, beside exact values of the same samples: does every bound hold?

    python -m benchmarks.quality                     # 200 random splits of logistic models and of counts
    python -m benchmarks.quality --splits 20 --seed 7

Each split has 2 to 6 sites of 12 to 60 samples, a minimum count of 1 to 8, sometimes weights, ties, constant models and
margins that are far too large or have the wrong sign. The sites answer as those of a federation do. Exact values come
from the pooled samples that the sites tell of: scikit-learn's areas, statsmodels' regressions of calibration, plain
counts. Every logistic model is measured a second time at sites that put noise on counts, as they do by default; bounds
hold but with the probability of four standard deviations. A class of which a site has fewer than its minimum count is
not told, and left out of both. Per measure: numbers compared, how many were told, the largest difference and the median
bound among these, and violations, which end the program with an error.
"""

from __future__ import annotations

import argparse
import math
import warnings
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import statsmodels.api as sm
import torch
from scipy.optimize import brentq
from scipy.special import expit, logit
from sklearn.metrics import average_precision_score, roc_auc_score

import fedcomposite as fc
from fedcomposite.analysis.quality import told
from fedcomposite.federation.site import minimum_counts
from fedcomposite.federation.site.noise import deviation
from fedcomposite.federation.site.policy import Limits
from fedcomposite.runtime import Driver
from fedcomposite.runtime.protocol import Request, Silo
from fedcomposite.runtime.tally_noise import factor
from fedcomposite.runtime.transports.silo_answers import SiloTransport, added

Floats = npt.NDArray[np.float64]

_ROUNDING = 1e-7
_THRESHOLDS = (0.2, 0.5, 0.3337)  # the last one is no edge of a bin


class Guarded(SiloTransport):
    """Silos that answer as the sites of a federation do, each under its minimum counts."""

    def __init__(self, problem: fc.Problem, limits: Limits, draw: np.random.Generator | None = None) -> None:
        super().__init__(problem)
        self.limits, self.guard = limits, minimum_counts.NO_GUARD
        if draw is not None and limits.min_count > 1:
            off = deviation(limits.min_count)

            def blur(part: str, question: str, bins: int) -> Floats:
                return off * (factor(bins) @ draw.normal(size=(bins - 1, 2))).T

            self.guard = minimum_counts.AnswerGuard(blur=blur)

    def ask(self, requests: Sequence[Request]) -> list[Any]:
        """What the sites tell."""
        told = [minimum_counts.told(self.limits, silo, requests, self.guard) for silo in self.silos]
        made = [list(each) for each in zip(*told, strict=True)]
        return [each if one.by_site else added(each) for one, each in zip(requests, made, strict=True)]


class _Federated:
    """The same, without the samples at hand."""

    by_site, centre = True, None

    def __init__(self, guarded: Guarded) -> None:
        self.names, self.ids, self.ask = guarded.names, guarded.ids, guarded.ask
        self.counter, self.running = guarded.counter, guarded.running
        self.noised = guarded.guard is not minimum_counts.NO_GUARD


def compare(splits: int = 200, seed: int = 0) -> pd.DataFrame:
    """One row per measure."""
    seen: dict[str, list[tuple[float, float, float, float]]] = defaultdict(list)
    for split in range(splits):
        generator = np.random.default_rng([seed, split])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _logistic(generator, seen)
            _counts(generator, seen)
    rows = {}
    for name, found in seen.items():
        shown, exact, low, high = np.array(found).T
        known, there = ~np.isnan(shown), ~np.isnan(exact)
        off = np.abs(shown - exact)[known & there]
        wrong = there & ~((low - _ROUNDING <= exact) & (exact <= high + _ROUNDING))
        rows[name] = {
            "compared": int(there.sum()),
            "told": int((known & there).sum()),
            "largest difference": off.max(initial=0.0),
            "median bound": float(np.median((high - low)[known & there])) / 2 if len(off) else math.nan,
            "violations": int(wrong.sum()),
        }
    return pd.DataFrame(rows).T.rename_axis("measure").reset_index()


def _sites(generator: np.random.Generator) -> tuple[list[int], list[Floats], list[Floats] | None, int]:
    """Sizes and features of some sites, weights of their samples, and their minimum count."""
    sizes = [int(n) for n in generator.integers(12, 61, int(generator.integers(2, 7)))]
    features = [generator.normal(generator.normal(0, 0.5), 1.0, (n, 3)) for n in sizes]
    if generator.random() < 0.3:
        features = [np.round(X) for X in features]  # ties
    heavy = generator.random() < 0.4
    weights = [generator.choice([0.25, 0.5, 1.0, 1.7], n) for n in sizes] if heavy else None
    return sizes, features, weights, int(generator.choice([1, 3, 5, 8]))


def _logistic(generator: np.random.Generator, seen: dict[str, list[tuple[float, float, float, float]]]) -> None:
    sizes, features, weights, least = _sites(generator)
    truth, wild = generator.normal(size=3) * generator.uniform(0.3, 1.5), generator.random() < 0.2
    scale, shift = generator.uniform(-3.0, 6.0) if wild else generator.uniform(0.4, 2.0), generator.normal()
    pairs = [(X, (generator.random(len(X)) < 1 / (1 + np.exp(-X @ truth))).astype(float)) for X in features]
    silos = fc.Silos.from_arrays(pairs, weights=weights)
    regularizer = fc.regularizers.L1(0.05)
    problem = fc.Problem(silos, loss="logistic", regularizer=regularizer, bias=True, weights="samples")
    noisy = truth * scale + generator.normal(size=3) * 0.2
    x = torch.tensor([*(noisy if generator.random() < 0.95 else 0 * noisy), shift], dtype=torch.float64)
    sites = Guarded(problem, Limits(min_count=least))
    parts = {name: _samples(silo, x, least) for name, silo in zip(sites.names, sites.silos, strict=True)}
    parts = {name: part for name, part in parts.items() if len(part[0])}
    _compare(fc.quality(problem, x, driver=Driver(_Federated(sites))), parts, "", seen)
    noised = _Federated(Guarded(problem, Limits(min_count=least), generator))
    if parts and noised.noised:
        _compare(fc.quality(problem, x, driver=Driver(noised)), parts, "with noise, ", seen)
    _cross_validated(problem, sites, parts, sizes, seen)


def _compare(report: Any, parts: dict[str, Any], noise: str, seen: dict[str, Any]) -> None:
    """The measures of a report beside those of the samples."""
    everyone = tuple(np.concatenate([part[k] for part in parts.values()]) for k in range(3))
    for name, one in report.rows.items():
        z, y, w = everyone if name == "all" else parts[name]
        who = noise + ("all" if name == "all" else "site")
        exact, summary = _exact(z, y, w), one.summary()
        for measure in ("auroc", "auprc", "calibration_slope", "calibration_intercept"):
            seen[f"{measure} ({who})"].append((summary[measure], exact[measure], *one.bounds(measure)))
        for measure in ("brier", "ici"):
            value = summary[measure]
            if not math.isnan(value):
                seen[f"{measure} ({who})"].append((value, _rounded(one, z, y, w, exact)[measure], value, value))
        for threshold in _THRESHOLDS:
            _rates(one, threshold, z, y, w, who, seen)


def _cross_validated(
    problem: fc.Problem, sites: Guarded, parts: dict[str, Any], sizes: list[int], seen: dict[str, Any]
) -> None:
    """The AUC of a cross-validation, beside that of samples at hand."""
    if (least := sites.limits.min_count) > 1 and min(sizes) > 4 * least:
        options: dict[str, Any] = {"folds": 2, "count": 4, "ratio": 0.1, "scoring": "auc"}
        theirs = fc.cross_validate(problem, driver=Driver(_Federated(sites)), **options)
        ours = fc.cross_validate(problem, **options)
        if all(len(part[0]) == len(silo.X) for part, silo in zip(parts.values(), sites.silos, strict=True)):
            for value, off, right in zip(theirs.mean, theirs.mean_error, ours.mean, strict=True):
                seen["cross-validated AUC"].append((value, right, value - off, value + off))


def _samples(silo: Silo, x: torch.Tensor, least: int) -> tuple[Floats, Floats, Floats]:
    """Margins, classes and weights of the samples that a site tells of."""
    z, y, w = silo.margins(x).numpy(), (silo.b > 0).double().numpy(), silo.importance.numpy()
    kept = np.isin(y, [v for v in (0.0, 1.0) if (y == v).sum() >= least])
    return z[kept], y[kept], w[kept]


def _exact(z: Floats, y: Floats, w: Floats) -> dict[str, float]:
    names = ("auroc", "auprc", "brier", "calibration_slope", "calibration_intercept")
    if len(np.unique(y)) < 2:
        return dict.fromkeys(names, math.nan) | {"brier": float(np.average((y - _sigmoid(z)) ** 2, weights=w))}
    slope = math.nan
    if len(np.unique(z)) > 1 and not _separated(z, y):
        made = sm.GLM(y, sm.add_constant(z), sm.families.Binomial(), freq_weights=w).fit(tol=1e-12, maxiter=200)
        score = w * (y - _sigmoid(made.params[0] + made.params[1] * z))
        slope = float(made.params[1]) if abs(score.sum()) + abs(score @ z) < 1e-8 * w.sum() else math.nan
    intercept = float(brentq(lambda a: w @ (y - _sigmoid(z + a)), -1e3, 1e3, xtol=1e-13))  # the GLM often diverges
    brier = float(np.average((y - _sigmoid(z)) ** 2, weights=w))
    areas = roc_auc_score(y, z, sample_weight=w), average_precision_score(y, z, sample_weight=w)
    return dict(zip(names, (*areas, brier, slope, intercept), strict=True))


def _separated(z: Floats, y: Floats) -> bool:
    zero, one = z[y == 0], z[y == 1]
    return bool(zero.max() <= one.min() or one.max() <= zero.min())


def _sigmoid(z: Floats) -> Floats:
    return np.asarray(expit(z))


def _rounded(one: Any, z: Floats, y: Floats, w: Floats, exact: dict[str, float]) -> dict[str, float]:
    """With the calibration index of probabilities rounded to the means of their bins."""
    at = np.searchsorted(one.cells.edges, z, side="right")
    means = np.bincount(at, w * _sigmoid(z)) / np.maximum(np.bincount(at, w), 1e-300)
    margins = logit(np.clip(means[at], 1e-15, 1 - 1e-15))
    silo = fc.Silos.from_arrays([(margins[:, None], y)], weights=[w])
    lone = fc.Problem(silo, loss="logistic", weights="samples")
    return {**exact, "ici": fc.quality(lone, torch.ones(1, dtype=torch.float64), exact=True).overall.ici}


def _rates(one: Any, threshold: float, z: Floats, y: Floats, w: Floats, who: str, seen: dict[str, Any]) -> None:
    up = z >= math.log(threshold / (1 - threshold))
    tp, fp, fn, tn = (float(w[(up == a) & (y == b)].sum()) for a, b in ((1, 1), (1, 0), (0, 1), (0, 0)))
    right = {"sensitivity": (tp, tp + fn), "specificity": (tn, tn + fp), "precision": (tp, tp + fp)}
    right |= {"negative_predictive_value": (tn, tn + fn), "accuracy": (tp + tn, float(w.sum()))}
    found = one.rates(threshold)
    for name, (a, b) in right.items():
        value, bounds = found[name]
        seen[f"{name} ({who})"].append((told(name, value, bounds), a / b if b else math.nan, *_or_any(bounds)))
    curve = one.decision_curve([threshold]).iloc[0]
    benefit = (tp - fp * threshold / (1 - threshold)) / w.sum()
    ends = curve["model"] - curve["model_error"], curve["model"] + curve["model_error"]
    seen[f"net benefit ({who})"].append((told("net_benefit", curve["model"], ends), benefit, *ends))


def _or_any(bounds: tuple[float, float]) -> tuple[float, float]:
    """Of a share of nothing nothing is known."""
    return (0.0, 1.0) if math.isnan(bounds[0]) else bounds


def _counts(generator: np.random.Generator, seen: dict[str, list[tuple[float, float, float, float]]]) -> None:
    sizes, features, weights, least = _sites(generator)
    truth, scale = 0.4 * generator.normal(size=3), generator.uniform(0.5, 1.5)
    offsets = [np.log(generator.uniform(0.2, 5.0, n)) for n in sizes]
    targets = [
        generator.poisson(np.exp(X @ truth + 0.3 + t)).astype(float) for X, t in zip(features, offsets, strict=True)
    ]
    silos = fc.Silos.from_arrays(list(zip(features, targets, strict=True)), weights=weights, margin_offsets=offsets)
    problem = fc.Problem(silos, loss="poisson", bias=True, weights="samples")
    x = torch.tensor([*(truth * scale), 0.1], dtype=torch.float64)
    report = fc.quality(
        problem, x, driver=Driver(_Federated(Guarded(problem, Limits(min_count=least, max_margin=50.0))))
    )
    for name, one in report.rows.items():
        at = slice(None) if name == "all" else slice(*silos.offsets[(i := silos.names.index(name)) : i + 2])
        X, y, t = silos.features[at], silos.targets[at].numpy(), silos.margin_offsets[at].numpy()
        w = np.ones(len(y)) if silos.weights is None else silos.weights[at].numpy()
        z = (X @ x[:-1] + x[-1]).numpy()
        if len(np.unique(z)) > 1 and y.sum() > 0:
            family = sm.families.Poisson()
            made = sm.GLM(y, sm.add_constant(z), family, offset=t, freq_weights=w).fit(tol=1e-13, maxiter=200)
            value = one.calibration_slope
            who = "all" if name == "all" else "site"
            seen[f"calibration_slope of counts ({who})"].append((value, float(made.params[1]), *_near(value)))


def _near(value: float) -> tuple[float, float]:
    """It is exact where it is told."""
    return (-math.inf, math.inf) if math.isnan(value) else (value, value)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--splits", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    table = compare(given.splits, given.seed)
    print(table.to_string(index=False, float_format=lambda v: f"{v:.3g}"))
    if table["violations"].any():
        raise SystemExit("a bound does not hold")


if __name__ == "__main__":
    main()
