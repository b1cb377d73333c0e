"""New samples: the recipe of a run applied to a file, its model's predictions, and how good they are."""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from fedcomposite.data import DataError, FittedRecipe, Silos
from fedcomposite.data.sheets import Sheet, read_sheets
from fedcomposite.estimators.quality import quality
from fedcomposite.experiments.store import RunFolder, StoreError
from fedcomposite.problems import Problem
from fedcomposite.problems.losses import Logistic, Multinomial, get_loss

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Scored:
    """A file with its predictions."""

    table: pd.DataFrame
    """The columns of the file, and ``margin``, ``prediction`` and for a classifier ``class``."""
    measures: pd.DataFrame | None
    """How good they are, if the file has the target; one row."""


def predict(run: str | Path, file: str | Path, *, site: str | None = None, threshold: float = 0.5) -> Scored:
    """Apply the model of a run folder to a new file.

    Parameters
    ----------
    run : path
        A folder of ``solve``, ``fit``, ``path`` or ``cv``, with a linear model.
    file : path
        A table with the columns that the run's files had; the target may be missing.
    site : str, optional
        The site whose names, units and style the file has; the common ones if left out.
    threshold : float
        Probability from which on a sample is of class 1.
    """
    if not 0 < threshold < 1:
        raise DataError(f"threshold = {threshold}, must be between 0 and 1")
    folder = RunFolder(run)
    folder.summary()  # refuses what is no finished run
    content = tomllib.loads(folder.config.read_text(encoding="utf-8"))
    if "model" in content:
        raise StoreError(f"{folder.path}: its model is a network; predict is for linear models")
    section = content.get("problem", {})
    loss = get_loss(section.get("loss") or "logistic", section.get("loss_options", {}))
    if isinstance(loss, Multinomial):
        raise StoreError(f"{folder.path}: predict is for models with one output, not for several classes")
    x = load_file(folder.path / "model.safetensors")["x"].double()
    bias = bool(section.get("bias", False))
    if (folder.path / "recipe.json").is_file():
        names, sheet, X, held = _prepared(folder.path / "recipe.json", Path(file), site)
    else:
        names, sheet, X, held = _plain(folder, content, Path(file), len(x) - bias)
    weights, intercept = x[: len(x) - bias], float(x[-1]) if bias else 0.0
    margins = torch.from_numpy(X) @ weights + intercept
    made = {"margin": margins.numpy(), "prediction": loss.response(margins).numpy()}
    if isinstance(loss, Logistic):
        made["prediction"] = torch.sigmoid(margins).numpy()
        made["class"] = (made["prediction"] >= threshold).astype(int)
    taken = {f"{k} (file)" if k in made else k: v for k, v in sheet.columns.items()}
    table = pd.DataFrame({**taken, **made})
    return Scored(table, None if held is None else _measures(loss, names, *held, x, bias, threshold))


Held = tuple[Floats, Floats]


def _prepared(path: Path, file: Path, site: str | None) -> tuple[list[str], Sheet, Floats, Held | None]:
    """Features by the run's recipe; every row is scored, also one without a target."""
    recipe = FittedRecipe.read(path)
    if site is not None and site not in recipe.sites and site not in recipe.recipe.sites:
        raise DataError(f"site = {site!r}: the run's sites are {', '.join(recipe.sites)}")
    part = recipe.recipe.sites.get(site or "")
    style = part.style if part else {}
    (sheet,) = read_sheets([file], text=recipe.recipe.texts([site or ""]), **style)  # type: ignore[arg-type]
    own = recipe.recipe.local(site or "").rename.get(recipe.target, recipe.target)
    without = sheet.having({k: v for k, v in sheet.columns.items() if k not in (own, recipe.target)})
    X, _ = recipe.table(without, site or "")
    held = None
    if own in sheet.columns or recipe.target in sheet.columns:
        known, y = recipe.table(sheet, site or "")
        assert y is not None
        there = ~np.isnan(y)
        held = (known[there], y[there]) if bool(there.any()) else None
    return recipe.features, sheet, X, held


def _plain(
    folder: RunFolder, content: dict[str, object], file: Path, count: int
) -> tuple[list[str], Sheet, Floats, Held | None]:
    """Features as columns of numbers, by the names that the run knows."""
    with safe_open(folder.path / "model.safetensors", "pt") as opened:
        names = [str(n) for n in json.loads(opened.metadata()["coordinates"])[:count]]
    (sheet,) = read_sheets([file])
    X = np.stack([sheet.numbers(name) for name in names], axis=1)
    if gaps := int(np.isnan(X).any(1).sum()):
        raise DataError(f"{file}: {gaps} row(s) with gaps; the run has no recipe that says how to fill them")
    source = content.get("data")
    target = source.get("target") if isinstance(source, dict) else None
    if not isinstance(target, str) or target not in sheet.columns:
        return names, sheet, X, None
    y = sheet.numbers(target)
    return names, sheet, X, (X[~np.isnan(y)], y[~np.isnan(y)])


def _measures(
    loss: object, names: list[str], X: Floats, y: Floats, x: torch.Tensor, bias: bool, threshold: float
) -> pd.DataFrame | None:
    """AUROC and its like of a classifier; errors of a regression."""
    weights, intercept = x[: len(x) - bias].numpy(), float(x[-1]) if bias else 0.0
    if not isinstance(loss, Logistic):
        wrong = X @ weights + intercept - y
        spread = float(((y - y.mean()) ** 2).sum())
        r2 = 1 - float((wrong**2).sum()) / spread if spread else float("nan")
        return pd.DataFrame([{"samples": len(y), "r2": r2, "mean absolute error": float(np.abs(wrong).mean())}])
    if len(np.unique(y)) < 2:
        return None
    silos = Silos.from_arrays([(X, y)], feature_names=names)
    overall = quality(Problem(silos, loss="logistic", bias=bias), x, exact=True).overall
    rates = overall.confusion(threshold)
    told = {k: rates[k] for k in ("sensitivity", "specificity")}
    return pd.DataFrame([{**overall.summary(), **told}]).drop(columns=["auroc_error", "auprc_error"])
