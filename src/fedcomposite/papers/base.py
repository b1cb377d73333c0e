"""What a reproduction is made of, and small functions of its data that claims and figures use.

A reproduction ``NAME`` is two files here, ``NAME.toml`` and ``NAME.py`` (with ``_`` for ``-``). The TOML is an
experiment (grids and all) with a table ``[paper]``; the Python file has

=============================  ==============================================================================
``claims(data)``               a list of :class:`Claim`, from the data alone
``draw(data, path)``           writes the figure to ``path``
``measure(study)``, optional   makes the data; the runs of the experiment (``study.sweep()``) if left out
=============================  ==============================================================================
"""

from __future__ import annotations

import copy
import importlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd

from fedcomposite._validation import suggest
from fedcomposite.experiments import ConfigError, toml

_OWN = ("paper", "settings")
RECORD = (
    "round", "objective", "loss", "stationarity", "nonzeros", "bytes_up", "bytes_down", "gradient_evaluations",
    "prox_evaluations", "seconds", "train_accuracy", "test_accuracy", "suboptimality",
)  # fmt: skip
"""What data.csv keeps of a record, where it is there."""


@dataclass(frozen=True)
class Paper:
    """A figure or table to reproduce."""

    name: str
    content: Mapping[str, Any]
    module: ModuleType

    @property
    def card(self) -> Mapping[str, Any]:
        """``[paper]``: title, source, about, minutes, quick, points, reference, columns, data."""
        card: Mapping[str, Any] = self.content["paper"]
        return card

    def experiment(self, *, quick: bool = False, overrides: Sequence[str] = ()) -> dict[str, Any]:
        """The content of the TOML without ``[paper]``, in its reduced form or in full."""
        content = copy.deepcopy(dict(self.content))
        for wish in [*(self.card.get("quick", ()) if quick else ()), *overrides]:
            toml.override(content, wish)
        content.pop("paper")
        return content

    def datasets(self, content: Mapping[str, Any]) -> list[str]:
        """The data sets of an experiment that lie in files: its own, and those of ``[settings]`` and ``[paper]``."""
        settings = content.get("settings", {})
        found = [content.get("data", {}).get("name"), *self.card.get("data", ())]
        found += [d["name"] for d in settings.get("data", ())] + [m[0] for m in settings.get("models", ())]
        return [name for name in dict.fromkeys(found) if name and name != "synthetic"]


def names() -> list[str]:
    """Every reproduction."""
    folder = resources.files("fedcomposite.papers")
    return sorted(p.name.removesuffix(".toml") for p in folder.iterdir() if p.name.endswith(".toml"))


def load(name: str) -> Paper:
    """A reproduction by name."""
    known = names()
    if name not in known:
        raise ConfigError(f"no reproduction is called {name!r}{suggest(name, known)} (known: {', '.join(known)})")
    content = toml.parse(Path(str(resources.files("fedcomposite.papers"))) / f"{name}.toml")
    return Paper(name, content, importlib.import_module(f"fedcomposite.papers.{name.replace('-', '_')}"))


def split(content: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The experiment, and the table ``[settings]`` for a reproduction's own ``measure``."""
    return {k: v for k, v in content.items() if k not in _OWN}, dict(content.get("settings", {}))


# -- functions of the data ------------------------------------------------------------------------------------------


def only(data: pd.DataFrame, **where: Any) -> pd.DataFrame:
    """The rows with these values; a list allows several."""
    for key, value in where.items():
        data = data[data[key].isin(value)] if isinstance(value, list | tuple) else data[data[key] == value]
    return data


def parts(data: pd.DataFrame, key: str) -> dict[int, pd.DataFrame]:
    """The rows of each value of a key that counts something, in ascending order."""
    return {int(value): data[data[key] == value] for value in sorted(data[key].unique())}


def skewed(data: pd.DataFrame, alpha: float | None) -> pd.DataFrame:
    """The rows of the Dirichlet partition with this alpha, of the iid one for None."""
    return data[
        data["partition"].str.contains(r"^iid " if alpha is None else rf"^dirichlet \S+ {alpha:g} ", regex=True)
    ]


def histories(data: pd.DataFrame, label: str = "method", **where: Any) -> dict[str, list[list[dict[str, Any]]]]:
    """The runs of each label as records, for :func:`fedcomposite.plots.draw_panels`.

    A run that converged keeps its last values for the rounds that other seeds still took.
    """
    found: dict[str, list[list[dict[str, Any]]]] = {}
    rows = only(data, **where)
    for (name, _), run in rows.groupby([label, "seed"], sort=False):
        records: list[dict[str, Any]] = run.sort_values("round").to_dict("records")  # type: ignore[assignment]
        found.setdefault(str(name), []).append(records)
    for runs in found.values():
        every = sorted({r["round"] for one in runs for r in one})
        for one in runs:
            if one[-1].get("status") == "converged":
                one += [{**one[-1], "round": r} for r in every if r > one[-1]["round"]]
    return found


def classes(data: pd.DataFrame, label: str = "method") -> dict[str, str]:
    """The class of the method behind each label, which decides its looks."""
    return {str(k): str(v) for k, v in data.groupby(label)["class"].first().items()}


def last(data: pd.DataFrame) -> pd.DataFrame:
    """The last record of every run."""
    return data.loc[data.groupby("run", sort=False)["round"].idxmax()]


def relative(data: pd.DataFrame, key: str = "stationarity") -> pd.Series:
    """A quantity over its first value in the same run, for every record."""
    first = data.sort_values("round").groupby("run")[key].transform("first")
    return data[key] / first.reindex(data.index)


def first_at(data: pd.DataFrame, values: pd.Series, target: float, key: str = "round") -> pd.Series:
    """For every run the value of ``key`` at the first record whose ``values`` are at most ``target``; nan if none."""
    found = {}
    for run, rows in data.groupby("run", sort=False):
        there = rows[values.loc[rows.index] <= target]
        found[run] = float(there.sort_values("round")[key].iloc[0]) if len(there) else math.nan
    return pd.Series(found)


def slope(x: Any, y: Any) -> tuple[float, float]:
    """The slope of log y against log x by least squares, and half its 95 % confidence interval."""
    from scipy import stats

    fit = stats.linregress(np.log(np.asarray(x, float)), np.log(np.asarray(y, float)))
    freedom = len(list(x)) - 2
    half = float(stats.t.ppf(0.975, freedom) * fit.stderr) if freedom > 0 else math.inf
    return float(fit.slope), half


def read_state(folder: Path) -> dict[str, Any]:
    """What is known of a reproduction's folder; nothing if it is not one."""
    try:
        state: dict[str, Any] = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return state


def digest_of(content: Mapping[str, Any]) -> str:
    """What tells two forms of an experiment apart; the device does not."""
    import hashlib

    plain = json.loads(json.dumps(content, sort_keys=True))
    plain.get("run", {}).pop("device", None)
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]
