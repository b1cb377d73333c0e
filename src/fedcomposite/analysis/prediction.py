"""New samples: the recipe of a run applied to a file, its model's predictions, and how good they are."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from fedcomposite._validation import Inside, Positive, ZeroOrMore, refuse, wrong_arguments
from fedcomposite.analysis.quality import Quality, constants, edges_of, noised_quality, quality, with_points
from fedcomposite.analysis.regression_quality import Errors
from fedcomposite.analysis.survival_quality import GROUPS, SurvivalQuality
from fedcomposite.data import DataError, FittedRecipe, Silos
from fedcomposite.data.sheets import Sheet, read_sheets
from fedcomposite.experiments.store import RunFolder, StoreError
from fedcomposite.problems import Loss, Problem
from fedcomposite.problems.losses import Cox, Logistic, Multinomial, Poisson, get_loss
from fedcomposite.problems.metrics import AUC, Accuracy, BalancedAccuracy, Brier, LogLoss
from fedcomposite.problems.predictions import beside, predicted
from fedcomposite.results import Result, counted
from fedcomposite.runtime.driver import Driver
from fedcomposite.runtime.protocol import ALL, NEW, concordance, residuals, scores
from fedcomposite.runtime.protocol import horizon as horizon_of

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, repr=False)
class Scored(Result):
    """A file with its predictions."""

    table: pd.DataFrame
    """The columns of the file, and ``margin``, ``prediction`` and for a classifier ``class``; with several classes
    ``margin[c]`` and ``prediction[c]``, the probability, of each. Of times to an event the prediction is the
    probability of one by the horizon of the run, if it had one."""
    measures: pd.DataFrame | None
    """How good they are, if the file has the target; one row."""
    site: str | None = None
    """Whose names, units and style were taken."""

    def to_frame(self) -> pd.DataFrame:
        """The file with its predictions."""
        return self.table

    def _line(self) -> str:
        said = counted(len(self.table), "sample") + (f" in the style of {self.site}" if self.site else "")
        if self.measures is None:
            return f"{said}, without outcomes"
        told = self.measures.iloc[0].dropna()
        shown = [f"{name} {value:.4g}" for name, value in told.items() if name != "samples"][:4]
        return f"{said}: {', '.join(shown)}"


def predict(
    run: str | Path, file: str | Path, *, site: str | None = None, threshold: Inside = 0.5, offset: str | None = None
) -> Scored:
    """Apply the model of a run folder to a new file.

    Parameters
    ----------
    run : path
        A folder of ``solve``, ``fit``, ``path`` or ``cv``, with a linear model.
    file : path
        A table with the columns that the run's files had; the target may be missing.
    site : str, optional
        The site whose names, units and style the file has; if left out, the one that the file is called after, or
        the common ones.
    threshold : float
        Probability from which on a sample is of class 1; of several classes the most probable one is taken.
    offset : str, optional
        The column that is added to each sample's margin, such as the logarithm of an exposure; if left out, the one
        that the run's ``[data]`` or ``[recipe]`` names.
    """
    refuse(wrong_arguments(predict, locals()), DataError)
    folder = RunFolder(run)
    folder.summary()  # refuses what is no finished run
    content = tomllib.loads(folder.config.read_text(encoding="utf-8"))
    if "model" in content:
        raise StoreError(f"{folder.path}: its model is a network; predict is for linear models")
    section = content.get("problem", {})
    x, coordinates = load_file(folder.path / "model.safetensors")["x"].double(), _coordinates(folder)
    loss = get_loss(section.get("loss") or "logistic", section.get("loss_options", {}))
    if isinstance(loss, Multinomial):
        loss, coordinates = _with_classes(coordinates)
    outputs = len(x) // len(coordinates)
    bias = bool(section.get("bias", False))
    if (folder.path / "recipe.json").is_file():
        site = site or _named_after(folder.path / "recipe.json", Path(file))
        sheet, X, y, added = _prepared(folder.path / "recipe.json", Path(file), site, offset)
    else:
        added = None
        sheet, X, y = _plain(coordinates[: len(coordinates) - bias], content, Path(file))
    model = _Model(loss, x if outputs == 1 else x.view(-1, outputs), bias)
    if added is None:
        added = _offsets(sheet, offset or _named(content, "offset"))
    base = baseline_of(folder, site or Path(file).stem) if isinstance(loss, Cox) else None
    table = beside(sheet.columns, predicted(model.margins(X, added), loss, threshold, base and base[1]))
    known = np.zeros(len(X), bool) if y is None else ~np.isnan(y.reshape(len(y), -1)).any(1)
    try:
        measures = None if y is None or not known.any() else model.measures(X[known], y[known], added[known], threshold)
    except DataError as error:
        raise DataError(f"{file}: {error}") from None
    return Scored(table, measures, site)


def _named(content: dict[str, Any], option: str) -> str | None:
    """A column that the run's ``[data]`` names."""
    source = content.get("data")
    name = source.get(option) if isinstance(source, dict) else None
    return name if isinstance(name, str) else None


def _offsets(sheet: Sheet, name: str | None) -> Floats:
    """What is added to the margins of a file's samples."""
    if name is None:
        return np.zeros(sheet.rows)
    found = sheet.numbers(name)
    if gaps := int(np.isnan(found).sum()):
        raise DataError(f"{sheet.name}: {gaps} row(s) without a number in {name!r}, which is added to the margins")
    return found


def _named_after(recipe: Path, file: Path) -> str | None:
    learned = FittedRecipe.read(recipe)
    own = learned.sites if learned.recipe.site or learned.per_site else ()
    return file.stem if file.stem in [*learned.recipe.sites, *own] else None


def _coordinates(folder: RunFolder) -> list[str]:
    with safe_open(folder.path / "model.safetensors", "pt") as opened:
        return [str(name) for name in json.loads(opened.metadata()["coordinates"])]


def _with_classes(coordinates: list[str]) -> tuple[Multinomial, list[str]]:
    """The loss with its classes and the names of the features, from ``age[0], age[1], age[2], ...``."""
    split = [name.removesuffix("]").rpartition("[") for name in coordinates]
    labels, names = dict.fromkeys(int(label) for *_, label in split), dict.fromkeys(name for name, *_ in split)
    return Multinomial(tuple(labels)), list(names)


def predict_at_sites(
    problem: Problem,
    x: torch.Tensor,
    driver: Driver,
    *,
    threshold: Inside = 0.5,
    horizon: Positive | None = None,
    hazard: ZeroOrMore = 0.0,
) -> pd.DataFrame:
    """Have a federation's sites score their new patients; what they tell is how good that is, where enough is known.

    The scored files stay at the sites. One row per site that tells something, and one for all. What cannot be
    told is NaN, and the column ``note`` says why. In secure sums sites score, and tell nothing.

    Parameters
    ----------
    problem : Problem
        What the sites were met with.
    x : Tensor
        The model.
    driver : Driver
        Those of a federation.
    threshold : float
        Probability from which on a sample is of class 1.
    horizon : float, optional
        Of times to an event, the time by which the probability of one is predicted; without it there are margins only.
    hazard : float
        The baseline's cumulated hazard by then, at sites whose own patients had no event: others take their own.
    """
    given = {"threshold": threshold, "horizon": horizon, "hazard": hazard}
    refuse(wrong_arguments(predict_at_sites, given), DataError)
    if isinstance(problem.loss, Cox):
        return _rows(_times_at_sites(x, driver, horizon, hazard))
    if not isinstance(problem.loss, Logistic):
        return _rows(_regression_at_sites(problem, x, driver, threshold))
    if driver.noised:
        rows = noised_quality(driver, [(x, ALL)], NEW, True, threshold)
    else:
        edges = with_points(edges_of(), constants(problem, [x]))
        told = driver.told([replace(scores(x, edges, NEW), numbers={"threshold": threshold})])
        each = {name: Quality.told(one, edges, unit=True) for name, one in told.items()}
        known = {name: one for name, one in each.items() if one.samples > 0}
        rows = {**known, **({"all": Quality.all(list(known.values()))} if known else {})}
    return _rows({n: {**one.summary(threshold), "note": one.untold(threshold)} for n, one in rows.items()})


def _rows(measured: Mapping[str, Mapping[str, float | str]]) -> pd.DataFrame:
    return pd.DataFrame(list(measured.values()), index=pd.Index(measured, name="site")).reset_index()


def _regression_at_sites(
    problem: Problem, x: torch.Tensor, driver: Driver, threshold: float
) -> dict[str, dict[str, float]]:
    """Measures that need no bins, so that patients are scored once."""
    asked = replace(residuals(x, torch.zeros(0, dtype=torch.float64), NEW), numbers={"threshold": threshold})
    assert isinstance(problem.loss, Loss)
    each = {name: Errors.told(one, problem.loss) for name, one in driver.told([asked]).items()}
    known = {name: one for name, one in each.items() if one.samples > 0}
    rows = {**known, **({"all": Errors.all(list(known.values()))} if known else {})}
    unknown = {"calibration_slope"} if isinstance(problem.loss, Poisson) else set[str]()
    return {name: {k: v for k, v in one.summary().items() if k not in unknown} for name, one in rows.items()}


def _times_at_sites(x: torch.Tensor, driver: Driver, at: float | None, hazard: float) -> dict[str, dict[str, float]]:
    """Pairs in order, and with a horizon who has had the event by then."""
    asked = [concordance(x, NEW)]
    if at is not None:
        asked.append(horizon_of(x, at, edges_of(), torch.from_numpy(GROUPS), hazard, NEW))
    when = math.nan if at is None else at
    each = {name: SurvivalQuality.told(one, 1, when) for name, one in driver.told(asked).items()}
    known = {name: one for name, one in each.items() if one.samples > 0}
    rows = {**known, **({"all": SurvivalQuality.all(list(known.values()))} if known else {})}
    return {name: one.summary() for name, one in rows.items()}


def baseline_of(folder: RunFolder, site: str | None = None) -> tuple[float, float] | None:
    """The horizon of a run and the baseline's cumulated hazard by then: that of the site, or of all."""
    path = folder.path / "analysis.json"
    told = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if told.get("horizon") is None:
        return None
    rows = told["baseline"]
    named = site if site in {row["site"] for row in rows} else "all"
    early = [row["cumulative_hazard"] for row in rows if row["site"] == named and row["time"] <= told["horizon"]]
    return float(told["horizon"]), float(early[-1]) if early else 0.0


def _prepared(
    path: Path, file: Path, site: str | None, offset: str | None
) -> tuple[Sheet, Floats, Floats | None, Floats | None]:
    """Features by the run's recipe, and its offsets unless another column is named; every row is scored."""
    recipe = FittedRecipe.read(path)
    if site is not None and site not in recipe.sites and site not in recipe.recipe.sites:
        raise DataError(f"site = {site!r}: the run's sites are {', '.join(recipe.sites)}")
    part = recipe.recipe.sites.get(site or "")
    style = part.style if part else {}
    (sheet,) = read_sheets([file], text=recipe.recipe.texts([site or ""]), **style)  # type: ignore[arg-type]
    added = recipe.margin_offsets(sheet, site or "") if offset is None else None
    return sheet, *recipe.all_rows(sheet, site or ""), added


def _plain(names: list[str], content: dict[str, Any], file: Path) -> tuple[Sheet, Floats, Floats | None]:
    """Features as columns of numbers, by the names that the run knows."""
    (sheet,) = read_sheets([file])
    X = np.stack([sheet.numbers(name) for name in names], axis=1)
    if gaps := int(np.isnan(X).any(1).sum()):
        raise DataError(f"{file}: {gaps} row(s) with gaps; the run has no recipe that says how to fill them")
    target, time, entry = (_named(content, role) for role in ("target", "time", "entry"))
    if target is None or not {n for n in (target, time, entry) if n is not None} <= set(sheet.columns):
        return sheet, X, None
    event = sheet.numbers(target)
    if time is None:
        return sheet, X, event
    columns = [sheet.numbers(time), event, *([] if entry is None else [sheet.numbers(entry)])]
    return sheet, X, np.stack(columns, axis=1)


@dataclass(frozen=True)
class _Model:
    """A run's model; ``x`` is a vector, or a matrix with a column per class."""

    loss: Loss
    x: torch.Tensor
    bias: bool

    def margins(self, X: Floats, added: Floats) -> torch.Tensor:
        """Of samples, ``(m,)`` or ``(m, C)``."""
        Z, more = torch.from_numpy(X), torch.from_numpy(added)
        made = Z @ self.x[:-1] + self.x[-1] if self.bias else Z @ self.x
        return made + (more if made.ndim == 1 else more.unsqueeze(1))

    def measures(self, X: Floats, y: Floats, added: Floats, threshold: float) -> pd.DataFrame | None:
        """AUROC and its like of a classifier, accuracy and its like of several classes; errors of a regression."""
        if isinstance(self.loss, Multinomial):
            return self._of_classes(X, y, added, self.loss.labels or ())
        if isinstance(self.loss, Cox):
            return self._of_times(X, y, added)
        if not self.loss.classifier:
            return pd.DataFrame([self._quality(X, y, added).summary()])
        if len(np.unique(y)) < 2:
            return None
        if not isinstance(self.loss, Logistic):
            z, classes = self.margins(X, added), torch.from_numpy(y > y.min()).long()
            told = {m.name: m.exact(z, classes) for m in (Accuracy(), BalancedAccuracy(), AUC())}
            return pd.DataFrame([{"samples": len(y), **told}])
        found = self._quality(X, y, added).summary(threshold)
        return pd.DataFrame([{name: v for name, v in found.items() if not name.endswith("_error")}])  # all are 0

    def _quality(self, X: Floats, y: Floats, added: Floats) -> Any:
        problem = Problem(Silos.from_arrays([(X, y)], margin_offsets=[added]), loss=self.loss, bias=self.bias)
        return quality(problem, self.x, exact=not isinstance(self.loss, Cox)).overall

    def _of_times(self, X: Floats, y: Floats, added: Floats) -> pd.DataFrame | None:
        if not (y[:, 1] > 0).any():
            return None
        return pd.DataFrame([self._quality(X, y, added).summary()])

    def _of_classes(self, X: Floats, y: Floats, added: Floats, labels: tuple[int, ...]) -> pd.DataFrame:
        if strange := sorted(set(y.tolist()) - set(labels)):
            shown = ", ".join(f"{v:g}" for v in strange[:5])
            raise DataError(f"the target has classes that the run does not know: {shown}")
        z, classes = self.margins(X, added), torch.tensor([labels.index(int(v)) for v in y])
        metrics = (Accuracy(), BalancedAccuracy(), LogLoss(), Brier())
        return pd.DataFrame([{"samples": len(y), **{m.name: m.exact(z, classes) for m in metrics}}])
