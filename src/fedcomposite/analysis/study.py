"""A whole analysis: the model, which strength and why, how sure, how good; and what it leaves in a run folder.

=====================  =====================================================================================
config.toml            the experiment
analysis.json          everything that was found: path, cross-validation, intervals, quality, communication
model.safetensors      the chosen model; coefficients.csv, recipe.json as for every run
summary.json           status, message, versions
=====================  =====================================================================================
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import math
import pathlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd
import tomli_w
import torch
from torch import Tensor

from fedcomposite._validation import Count, Inside, Natural, Positive, ZeroOrMore, renamed
from fedcomposite._version import SCHEMA
from fedcomposite.analysis.common_baseline import common_baseline
from fedcomposite.analysis.cross_validation import CrossValidation, Score, cross_validate
from fedcomposite.analysis.effects import EffectCurves, effect_curves
from fedcomposite.analysis.inference import LIKELIHOODS, TooFewError, confidence, outputs_of
from fedcomposite.analysis.newton import fit, plan_of
from fedcomposite.analysis.paths import Path, Several, Share, path
from fedcomposite.analysis.quality import WIDEST, Quality, Report, is_regression, quality
from fedcomposite.analysis.regression_quality import Errors
from fedcomposite.analysis.site_effects import SiteEffects, site_coefficients
from fedcomposite.analysis.site_effects import by_site as fit_by_site
from fedcomposite.analysis.solve import explained
from fedcomposite.analysis.survival_curves import EventCurves, baseline_hazard, event_curves, schoenfeld_test
from fedcomposite.analysis.survival_quality import SurvivalQuality
from fedcomposite.analysis.table_one import TableOne
from fedcomposite.experiments.store import RunFolder
from fedcomposite.files import write_atomic
from fedcomposite.locks import FolderLock
from fedcomposite.privacy import StudyBudget
from fedcomposite.problems import Loss, Problem
from fedcomposite.problems.base import Evaluation
from fedcomposite.problems.losses import LOSSES, Cox, LeastSquares, Logistic
from fedcomposite.regularizers import Blocks, On
from fedcomposite.regularizers.factors import strength, varied
from fedcomposite.results import Result
from fedcomposite.runtime.certificate import Certificate, certify
from fedcomposite.runtime.driver import Driver, driving, over_copies
from fedcomposite.runtime.fit import check_given
from fedcomposite.runtime.protocol import ALL, newton
from fedcomposite.runtime.transports.silo_answers import SiloTransport

Kind = Literal["fit", "path", "cv"]
Baseline = Literal["site", "common"]


@dataclass(frozen=True, repr=False)
class Analysis(Result):
    """What an analysis found."""

    kind: Kind
    problem: Problem
    """The one whose solution the model is: with the strength that was chosen."""
    x: Tensor
    """The chosen model."""
    lam: float
    """Its strength of the regularizer."""
    choice: str
    """How it was chosen."""
    sites: list[str]
    reason: str
    """Why it is not the solution, and what to do; empty if it is."""
    path: Path | None
    cv: CrossValidation | None
    intervals: pd.DataFrame | None
    """Of linear, logistic and Poisson models."""
    quality: Report | None
    """Of logistic and Cox models and regressions: on the folds held out, or on the samples the model was made from."""
    tested: Report | None
    """Of those whose silos have a test part: on that part, which took no part in any choice."""
    certificate: Certificate | None
    exchanges: int
    bytes_up: int
    bytes_down: int
    curves: EventCurves | None = None
    """Of times to an event: how many are at risk and survive, at every site and over all."""
    proportional: pd.DataFrame | None = None
    """Of times to an event: the test of proportional hazards, where the estimates are known."""
    baseline: pd.DataFrame | None = None
    """Of times to an event: the cumulated baseline hazards of the model on the grid of the curves."""
    horizon: float | None = None
    """Of times to an event: by when the quality is measured."""
    by_site: SiteEffects | None = None
    """A model of each site on its own, and what they have in common, if that was asked for."""
    one_baseline: bool = False
    """Of times to an event: whether all sites have one, and not each its own."""
    effects: EffectCurves | None = None
    """Of a recipe with splines or products: what their columns do, value by value."""

    @property
    def solution(self) -> Tensor:
        """:attr:`x`, by the name that a run has for it."""
        return self.x

    @property
    def converged(self) -> bool:
        """Whether the model is the solution, and every model of its path."""
        return not self.reason

    @property
    def message(self) -> str:
        """In one line: what was done and how good the answer is."""
        kept = int((self.x != 0).sum())
        blend = "" if self.path is None or self.path.gamma == 1 else f", gamma = {self.path.gamma:g}"
        said = (
            f"{self.kind}: lambda = {self.lam:.4g} ({self.choice}){blend}, {kept} of {len(self.x)} coordinates nonzero"
        )
        said += ", one baseline for all sites" if self.one_baseline else ""
        said += f", {self.exchanges} exchanges with {len(self.sites)} sites"
        said += f"; {self.reason}" if self.reason else ""
        return said + (f"; {self.certificate}" if self.certificate is not None else "")

    def to_frame(self) -> pd.DataFrame:
        """One row per coordinate: its coefficient in the chosen model; with :attr:`intervals` where there are some."""
        if self.intervals is not None:
            return self.intervals
        return pd.DataFrame({"coefficient": self.x.numpy()}, index=list(self.problem.coordinate_names))

    def _line(self) -> str:
        return self.message

    def content(self) -> dict[str, Any]:
        """All of it as plain data."""
        found: dict[str, Any] = {
            "kind": self.kind,
            "sites": self.sites,
            "coordinates": self.problem.coordinate_names,
            "features": int(np.prod(self.problem.layout[0].shape)),
            "model": self.x.tolist(),
            "lambda": self.lam,
            "choice": self.choice,
            "gamma": 1.0 if self.path is None else self.path.gamma,
            "communication": {"exchanges": self.exchanges, "bytes_up": self.bytes_up, "bytes_down": self.bytes_down},
        }
        if self.certificate is not None:
            found["certificate"] = {"kind": self.certificate.kind, "value": self.certificate.value}
        if self.path is not None:
            table = self.path.table().to_dict("list")
            converged = self.path.converged.tolist()
            found["path"] = {**table, "solutions": self.path.solutions.tolist(), "converged": converged}
        if self.cv is not None:
            one = self.cv
            found["cv"] = {
                "score": one.scoring, "mean": one.mean.tolist(), "se": one.se.tolist(),
                "mean_error": one.mean_error.tolist(), "folds": len(one.rows),
                "left_out": "sites" if one.rows[0].kind == "site" else "samples",
                "lambda_min": one.lambda_min, "lambda_1se": one.lambda_1se,
            }  # fmt: skip
        if (recipe := self.problem.silos.recipe) is not None and recipe.gaps:
            ways = {name: recipe.recipe.filling(name) for name in recipe.gaps}
            found["gaps"] = {
                "rows": recipe.seen,
                "kept": recipe.rows,
                "copies": recipe.copies,
                "columns": {k: {"missing": n, "filled": ways[k] if isinstance(ways[k], str) else "constant"}
                            for k, n in recipe.gaps.items()},
            }  # fmt: skip
        if self.intervals is not None:
            found["intervals"] = self.intervals.reset_index(names="name").to_dict("records")
        for name, report in (("quality", self.quality), ("test", self.tested)):
            if report is not None:
                found[name] = {k: _measured(one) for k, one in report.rows.items()}
                if report.reason:
                    notes = [found[name]["all"]["note"], f"sites: {report.reason}"]
                    found[name]["all"]["note"] = "; ".join(filter(None, notes))
        for name, drawn in (("effects", self.effects), ("curves", self.curves)):
            if drawn is not None:
                found[name] = drawn.table.to_dict("records")
        if self.baseline is not None:
            found |= {"baseline": self.baseline.to_dict("records"), "horizon": self.horizon}
        if self.proportional is not None:
            found["proportional"] = self.proportional.reset_index(names="name").to_dict("records")
        if self.by_site is not None:
            combined = self.by_site.combined.reset_index(names="name").to_dict("records")
            found["by_site"] = {"sites": self.by_site.sites.to_dict("records"), "combined": combined}
            found["by_site"] |= {"notes": self.by_site.notes, "ratio": self.by_site.ratio}
        if (recipe := self.problem.silos.recipe) is not None and recipe.per_site is not None:
            of_sites = site_coefficients(self.problem, self.x, unit=True)
            found["site_coefficients"] = of_sites.reset_index(names="name").to_dict("records")
        if self.quality is not None:
            found["quality_on"] = "held-out folds" if self.cv is not None else "training samples"
        return found

    def save(
        self,
        folder: str | pathlib.Path,
        description: pd.DataFrame | None = None,
        *,
        table_one: TableOne | None = None,
        overwrite: bool = False,
    ) -> None:
        """Leave a run folder, for ``fc.write_report`` and ``fc.predict``; ``description`` is of ``fc.describe``.

        ``table_one`` is of ``fc.table_one``. ``overwrite`` replaces a run that the folder holds.
        """
        place = RunFolder(folder)
        with FolderLock(place.path):
            place.check_new(overwrite, instead="overwrite=True, or another folder")
            rows = [] if description is None else description.to_dict("records")
            seen = [{str(k): v for k, v in row.items()} for row in rows]
            self.write(place, _written(self.problem), seen, table_one=table_one)

    def write(
        self,
        folder: RunFolder,
        config: str,
        description: list[dict[str, Any]],
        seconds: float | None = None,
        absent: Sequence[str] = (),
        table_one: TableOne | None = None,
    ) -> None:
        """Leave a run folder with the text of an experiment; ``description`` has a row per feature and site.

        ``absent`` are sites that were left out. What an earlier run has left there goes.
        """
        folder.path.mkdir(parents=True, exist_ok=True)
        folder.remove("summary.json", "history.jsonl", "recipe.json", "best.safetensors", "checkpoint.safetensors*")
        folder.remove("plot.png", "report*")
        write_atomic(folder.config, config.encode())
        content = {"schema": SCHEMA, **self.content(), "description": description, "seconds": seconds}
        content |= {"absent": list(absent)} if absent else {}
        content |= {} if table_one is None else {"table_one": table_one.content()}
        text = json.dumps(plain(content), indent=1, allow_nan=False)
        write_atomic(folder.path / "analysis.json", text.encode())
        folder.keep_model(self.problem, self.x)
        status = "converged" if self.converged else "not_converged"
        folder.conclude({"status": status, "message": self.message, "label": self.kind, "rounds": self.exchanges})


def _written(problem: Problem) -> str:
    """What a problem is, as an experiment says it; its regularizer in words."""
    loss = problem.loss
    names = [name for name, one in LOSSES.items() if type(one) is type(loss)]
    if not names:
        return f"# loss: {loss}\n# regularizer: {problem.regularizer}\n"
    fields = {f.name: getattr(loss, f.name) for f in dataclasses.fields(loss)}  # type: ignore[arg-type]
    numbers = {k: v for k, v in fields.items() if isinstance(v, float) or (isinstance(loss, Cox) and v is not None)}
    section = {"loss": names[0], "loss_options": numbers, "bias": problem.bias, "weights": problem.weighting}
    return f"# regularizer: {problem.regularizer}\n" + tomli_w.dumps({"problem": section})


def _measured(one: Quality | Errors | SurvivalQuality) -> dict[str, Any]:
    """A site's measures, its curves among them; those of a classifier as far as they can be told."""
    groups = int(min(10, max(2, one.samples // 10)))  # of ten or more, so that a small site's curve is not mere noise
    found: dict[str, Any] = {
        **one.summary(),
        "note": one.untold(),
        "calibration": one.calibration(groups).to_dict("records"),
    }
    if isinstance(one, Errors | SurvivalQuality):
        return found
    roc = [] if math.isnan(found["auroc"]) else one.roc().drop_duplicates().to_numpy().tolist()
    decision: dict[Hashable, Any] = {}
    if one.positives and one.positives < one.samples:
        curve = one.decision_curve()
        curve["model"] = curve["model"].where(curve["model_error"] <= WIDEST["net_benefit"])
        decision = curve.to_dict("list")
    return {**found, "roc": roc, "decision": decision}


def plain(value: Any) -> Any:
    """Data as JSON has them: what is not a number is None."""
    match value:
        case dict():
            return {str(k): plain(v) for k, v in value.items()}
        case list() | tuple():
            return [plain(v) for v in value]
        case np.generic():
            return plain(value.item())
        case float():
            return value if math.isfinite(value) else None
    return value


@renamed(score="scoring")
def analyse(
    problem: Problem,
    kind: Kind = "cv",
    *,
    folds: Literal["sites"] | Several = 10,
    seed: Natural = 0,
    scoring: Score = "deviance",
    choice: Literal["min", "1se", "aic", "bic", "ebic"] | Positive | None = None,
    count: Several = 100,
    ratio: Inside | None = None,
    gamma: Share | Sequence[Share] = 1.0,
    tolerance: ZeroOrMore = 1e-8,
    segments: Count | None = None,
    seconds: Positive | None = None,
    horizon: Positive | None = None,
    times: Sequence[float] | None = None,
    baseline: Baseline = "site",
    by_site: bool = False,
    privacy: StudyBudget | None = None,
    driver: Driver | None = None,
    checkpoint: str | pathlib.Path | None = None,
    resume: bool = False,
    on_exchange: Callable[[Driver], None] | None = None,
) -> Analysis:
    """Fit a linear model to sites' samples, and measure how sure and how good it is.

    Parameters
    ----------
    problem : Problem
        A linear model with a smooth loss.
    kind : {"fit", "path", "cv"}
        The problem as it is; a path of strengths; a path and cross-validation.
    folds, seed, scoring, count, ratio, gamma, tolerance, segments, seconds
        As in :func:`fedcomposite.cross_validate`.
    choice : str, optional
        Which model of a path: ``"bic"`` (the default), ``"aic"``, ``"ebic"``; of a cross-validation also ``"1se"`` (the
        default) and ``"min"``.
    horizon : float, optional
        Of times to an event, the time by which it is looked at who has had it; see :func:`fedcomposite.quality`.
    times : sequence of float, optional
        The grid of its curves. If left out it is 40 steps to the last time at hand; of sites elsewhere twenty to the
        horizon, and without one there are no curves.
    baseline : {"site", "common"}
        Of times to an event: whether each site has a baseline of its own, or all have one, at the ``times``; see
        :func:`fedcomposite.analysis.common_baseline`. Curves and quality are of each site's own either way.
    by_site : bool
        Also a model of each site on its own, and what they have in common: :func:`fedcomposite.by_site`.
    privacy, driver, checkpoint, resume, on_exchange
        As in :func:`fedcomposite.path`.

    Examples
    --------
    >>> import fedcomposite as fc
    >>> silos = fc.data.load("synthetic", clients=5, features=6, samples=40)
    >>> problem = fc.Problem(silos, regularizer=fc.regularizers.L1(1.0), bias=True, weights="samples")
    >>> found = fc.analysis.analyse(problem, "cv", folds=3, count=10)
    >>> found.kind, found.choice, len(found.intervals)
    ('cv', '1se', 7)
    """
    check_given(analyse, locals())
    if kind == "path" and choice not in (None, "aic", "bic", "ebic"):
        raise ValueError(f"choice = {choice!r}, must be 'aic', 'bic' or 'ebic' for a path")
    with driving(analyse, locals()) as driver:
        along, cv, fitting = None, None, _of_one_baseline(problem, times, driver) if baseline == "common" else driver
        options: dict[str, Any] = {"count": count, "ratio": ratio, "tolerance": tolerance, "seconds": seconds}
        options |= {"segments": segments, "driver": fitting}
        if kind == "cv":
            cv = cross_validate(problem, folds=folds, seed=seed, scoring=scoring, gamma=gamma, **options)
            along, choice = cv.path, choice or "1se"
            place = cv.index(choice)
        elif kind == "path":
            along, choice = path(problem, gamma=gamma, **options), choice or "bic"  # type: ignore[arg-type]
            place = along.index(choice)
        if along is not None:
            x, lam, converged = along.solutions[place], float(along.lambdas[place]), bool(along.converged.all())
            reason = "" if converged else f"{int((~along.converged).sum())} strengths of the path did not converge"
            problem = copy.copy(problem)
            problem.regularizer = varied(problem.regularizer, lam / strength(problem.regularizer))
        else:
            if not (isinstance(problem.loss, Loss) and problem.loss.smooth):
                raise ValueError(f"{problem.loss} has kinks, and a fit takes Newton steps; take a smooth loss")
            plan = plan_of(problem, fitting.centre, tolerance=tolerance, deadline=driver.deadline(seconds))
            start = torch.zeros(problem.dimension, dtype=torch.float64)
            [made] = fitting.run([fit(problem.regularizer, start, plan)])
            h = problem.regularizer
            lam = strength(h) if h.coefficients or isinstance(h, On | Blocks) else 0.0
            x, converged = made.x, made.converged
            reason = "" if converged else explained(problem, made.end, made.rounds, made.grown)
        chosen = "as given" if along is None else str(choice)
        found = _measure(problem, kind, x, lam, chosen, reason, along, cv, driver, fitting, horizon)
        found = _of_times(found, driver, horizon, times) if isinstance(problem.loss, Cox) else found
        if by_site:
            found = dataclasses.replace(found, by_site=fit_by_site(problem, driver=driver))
        return _with_all_exchanges(found, driver)


def _of_one_baseline(problem: Problem, times: Sequence[float] | None, driver: Driver) -> Driver:
    """Who tells the likelihood of patients that are compared over all sites, and over all copies of their tables."""
    return over_copies(common_baseline(problem, times=times, driver=driver))


def _with_all_exchanges(made: Analysis, driver: Driver) -> Analysis:
    """With what was sent until now."""
    sent = driver.exchanges, driver.bytes_up, driver.bytes_down
    return dataclasses.replace(made, exchanges=sent[0], bytes_up=sent[1], bytes_down=sent[2])


def _of_times(made: Analysis, driver: Driver, horizon: float | None, times: Sequence[float] | None) -> Analysis:
    """With curves and a test of proportional hazards."""
    silos = driver.transport.silos if isinstance(driver.transport, SiloTransport) else None
    grid = None if times is None else list(times)
    if grid is None and silos is not None:
        grid = (max(float(s.b[:, 0].max()) for s in silos if len(s.b)) * np.arange(1, 41) / 40).tolist()
    elif grid is None and horizon is not None:
        grid = (horizon * np.arange(1, 21) / 20).tolist()
    if grid is None:
        return made
    curves = event_curves(made.problem, times=grid, driver=driver)
    estimate, test = None if made.intervals is None else made.intervals["estimate"].to_numpy(), None
    if estimate is not None and np.isfinite(estimate).all() and not made.one_baseline:
        at = torch.tensor(estimate)
        test = schoenfeld_test(made.problem, at, times=None if silos else grid, driver=driver)
    every = sorted({*grid, *([] if horizon is None else [horizon])})
    baseline = baseline_hazard(made.problem, made.x, times=None if silos else every, driver=driver)
    return dataclasses.replace(made, curves=curves, proportional=test, baseline=baseline, horizon=horizon)


def _measure(
    problem: Problem,
    kind: Kind,
    x: Tensor,
    lam: float,
    choice: str,
    reason: str,
    along: Path | None,
    cv: CrossValidation | None,
    driver: Driver,
    fitting: Driver,
    horizon: float | None,
) -> Analysis:
    """How sure and how good a model is; ``fitting`` is asked for its likelihood."""
    intervals = effects = None
    if isinstance(problem.loss, LIKELIHOODS):
        with contextlib.suppress(TooFewError):
            intervals = confidence(problem, x, driver=fitting)
            if outputs_of(problem) == 1 and problem.silos.recipe is not None and problem.silos.recipe.joint:
                effects = effect_curves(problem, x, driver=fitting)
                effects = effects if len(effects.table) else None
    seen = tested = None
    told = is_regression(problem) and (isinstance(problem.loss, LeastSquares) or not driver.budgeted)
    if isinstance(problem.loss, Logistic | Cox) or told:
        seen = quality(problem, x if cv is None else cv, choice=lam, horizon=horizon, driver=driver)
        if "test" in problem.silos.held_out:
            tested = quality(problem, x, part="test", horizon=horizon, driver=driver)

    def look(at: Tensor) -> Evaluation:
        [sums] = fitting.ask([newton(at, torch.zeros_like(at, dtype=torch.bool), ALL)])
        weight = sums["weight"][0]
        return Evaluation((sums["loss"] / weight)[0], sums["gradient"] / weight)

    certificate = certify(problem, x, look) if kind == "fit" else None
    sent = driver.exchanges, driver.bytes_up, driver.bytes_down
    names = [name for name in driver.names if name != "(held by nobody)"]
    return Analysis(
        kind, problem, x, lam, choice, names, reason, along, cv, intervals, seen, tested, certificate, *sent,
        effects=effects, one_baseline=fitting is not driver,
    )  # fmt: skip
