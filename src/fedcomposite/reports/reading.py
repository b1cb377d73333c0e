"""What a run folder has to report, as tables: the same for a page, Markdown, LaTeX and CSV."""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from fedcomposite.experiments.store import RunFolder, StoreError

_QUALITY = {
    "samples": "samples", "events": "events", "c_index": "C-index", "horizon": "horizon", "positives": "positives",
    "auroc": "AUROC", "auroc_error": "AUROC ±", "auprc": "AUPRC", "auprc_error": "AUPRC ±", "brier": "Brier",
    "mean": "mean", "predicted": "predicted", "observed": "observed", "r2": "R2", "rmse": "RMSE", "mae": "MAE",
    "mean_loss": "mean loss", "deviance_explained": "deviance explained",
    "calibration_slope": "calibration slope", "calibration_slope_error": "slope ±",
    "calibration_intercept": "calibration intercept", "calibration_intercept_error": "intercept ±", "ici": "ICI",
}  # fmt: skip
_SEEN = 5e-4  # bounds that are closer in every row are not shown


@dataclass(frozen=True)
class Found:
    """A run, read back."""

    name: str
    summary: dict[str, Any]
    config: str
    coefficients: pd.DataFrame | None
    history: list[dict[str, Any]]
    analysis: dict[str, Any]
    """What ``analysis.json`` says; empty for a run of rounds."""
    recipe: bool
    tables: dict[str, pd.DataFrame] = field(default_factory=dict)
    """Named tables, in the order of the page."""

    @property
    def flags(self) -> list[str]:
        """What was odd in the data."""
        rows = self.analysis.get("description", [])
        return [f"{r['feature']}, {r['site']}: {r['flags']}" for r in rows if r.get("flags")]

    def untold(self, table: str) -> dict[str, str]:
        """What a table of quality does not tell of a site, and why."""
        rows = self.analysis.get({"Quality": "quality", "Test": "test"}.get(table, ""), {})
        return {site: one["note"] for site, one in rows.items() if one.get("note")}


def read_run(path: str | Path) -> Found:
    """Read a folder of ``solve``, ``run``, ``fit``, ``path`` or ``cv``, here or of a federation."""
    folder = RunFolder(path)
    summary = folder.summary()
    analysis = _json(folder.path / "analysis.json")
    table = folder.path / "coefficients.csv"
    history = [dict(r) for r in folder.history()] if (folder.path / "history.jsonl").is_file() else []
    try:
        config = folder.config.read_text(encoding="utf-8")
    except OSError:
        raise StoreError(f"{folder.path}: no config.toml, so this is not a run folder") from None
    coefficients = pd.read_csv(table) if table.is_file() else None
    recipe = (folder.path / "recipe.json").is_file()
    title = _title(config) or folder.path.resolve().name
    found = Found(title, summary, config, coefficients, history, analysis, recipe)
    found.tables.update(_tables(found))
    return found


def _title(config: str) -> str:
    """What the experiment is called, unless it has no name of its own."""
    try:
        named = tomllib.loads(config).get("name")
    except ValueError:
        return ""
    return named if isinstance(named, str) and named != "run" else ""


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        made: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise StoreError(f"{path}: unreadable") from None
    return made


def _tables(found: Found) -> dict[str, pd.DataFrame]:
    """All tables that this run has."""
    made: dict[str, pd.DataFrame] = {}
    if first := found.analysis.get("table_one"):
        made["Table 1"] = pd.DataFrame(first["table"])
    if rows := found.analysis.get("description"):
        made["Data"] = _described(pd.DataFrame(rows))
    if found.coefficients is not None:
        made["Coefficients"] = _coefficients(found)
    if each := found.analysis.get("site_coefficients"):
        made["Coefficients of the sites"] = pd.DataFrame(each)
    for part, title in (("quality", "Quality"), ("test", "Test")):
        if measured := found.analysis.get(part):
            told = [{label: v[name] for name, label in _QUALITY.items() if name in v} for v in measured.values()]
            table = pd.DataFrame([{"site": k, **v} for k, v in zip(measured, told, strict=True)])
            close = [c for c in table if str(c).endswith("±") and not (table[c].astype(float) > _SEEN).any()]
            made[title] = table.drop(columns=close)
    if models := found.analysis.get("by_site"):
        shown = ("name", "sites", "estimate", "lower", "upper", "p", "tau2", "i2", "predict_lower", "predict_upper")
        made["Sites"] = pd.DataFrame(models["combined"])[[*shown]]
    if rows := found.analysis.get("curves"):
        made["Survival"] = _survival(pd.DataFrame(rows))
    if rows := found.analysis.get("proportional"):
        made["Proportionality"] = pd.DataFrame(rows)
    if (along := found.analysis.get("path")) is not None:
        named = ("lambda", "nonzeros", "deviance", "rounds", "aic", "bic", "ebic")
        columns = {"deviance explained" if k == "deviance" else k: along[k] for k in named}
        if cv := found.analysis.get("cv"):
            columns |= {f"cv {cv['score']}": cv["mean"], "standard error": cv["se"]}
            if any((v or 0.0) > _SEEN for v in cv.get("mean_error", [])):
                columns[f"cv {cv['score']} ±"] = cv["mean_error"]
        made["Path"] = pd.DataFrame(columns)
    return made


def shown_times(curves: pd.DataFrame) -> list[float]:
    """Up to eight times, evenly spread, at which numbers at risk are told."""
    times = sorted(curves["time"].unique())
    every = -(-len(times) // 8)
    return [float(t) for t in times[every - 1 :: every]]


def followed(curves: pd.DataFrame) -> pd.DataFrame:
    """Curves until nobody is left: of what comes later a site knows nothing."""
    last = curves["time"].where(curves["at_risk"] > 0).groupby([curves["site"], curves["group"]]).transform("max")
    made: pd.DataFrame = curves[curves["time"] <= last]
    return made


def _survival(curves: pd.DataFrame) -> pd.DataFrame:
    """A row per site and time at which somebody is left: at risk, events until then, survival with its bounds."""
    some = curves["time"].isin(shown_times(curves))
    curves = followed(curves.assign(until=curves.groupby(["site", "group"])["events"].cumsum())[some])
    names = {"site": "site", "time": "time", "at_risk": "at risk", "until": "events until then"}
    names |= {"survival": "survival", "survival_lower": "from", "survival_upper": "to"}
    made: pd.DataFrame = curves[list(names)].rename(columns=names)
    return made.reset_index(drop=True)


def _described(rows: pd.DataFrame) -> pd.DataFrame:
    """A row per feature and a column per site: mean (deviation) or levels, and the gaps."""
    if "feature" not in rows:
        return rows
    cells = rows.assign(text=[_cell(row) for row in rows.to_dict("records")])
    order = list(dict.fromkeys(rows["feature"])), list(dict.fromkeys(rows["site"]))
    wide = cells.pivot(index="feature", columns="site", values="text").reindex(index=order[0], columns=order[1])
    first = cells[cells["feature"] == order[0][0]].set_index("site")
    rows_of = pd.DataFrame({site: [str(first.loc[site, ["n", "missing"]].sum())] for site in order[1]}, ["(rows)"])
    made: pd.DataFrame = pd.concat([rows_of, wide])
    return made.rename_axis(index="feature", columns=None).reset_index()


def _cell(row: dict[Any, Any]) -> str:
    if not row["n"]:
        return "none" if row["missing"] else "absent"
    gaps = f"; {row['missing']} missing" if row["missing"] else ""
    if row["levels"]:
        return f"{row['levels']}{gaps}"
    if row["mean"] is None or row["mean"] != row["mean"]:
        return f"{row['n']} values{gaps}"
    return f"{row['mean']:.4g} ({row['sd']:.3g}){gaps}"


def _coefficients(found: Found) -> pd.DataFrame:
    """The coefficients, with intervals where there are some; the kept ones first, the largest ahead."""
    kept = found.coefficients
    assert kept is not None
    if not (rows := found.analysis.get("intervals")):
        return kept
    table = pd.DataFrame(rows).rename(columns={"estimate": "debiased", "lower": "from", "upper": "to"})
    table = table.rename(columns={"missing_share": "missing share"})
    units = "unit_" if "unit_estimate" in table else ""
    ratios: dict[str, str] = {}
    for kind, short in (("odds", "OR"), ("rate", "RR"), ("hazard", "HR")):
        ratios |= {f"{units}{kind}_ratio": f"{short} per unit" if units else short}
        ratios |= {f"{units}{kind}_lower": f"{short} from", f"{units}{kind}_upper": f"{short} to"}
    if not ratios.keys().isdisjoint(table):
        ratios |= {"unit_p": "p per unit"}  # of the intercept it is another one than that of the coefficient
    table = table.rename(columns=ratios)
    wanted = ["name", "coefficient", "debiased", "from", "to", "p", *ratios.values(), "missing share"]
    table = table[[c for c in wanted if c in table]]
    if "original" in kept:
        per_unit = kept.set_index("name")["original"]
        table.insert(2, "original", [per_unit.get(name, 0.0) for name in table["name"]])
    size = table["coefficient"].abs().sort_values(ascending=False, kind="stable").index
    return table.loc[size].reset_index(drop=True)
