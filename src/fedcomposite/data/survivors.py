"""Times to death of made-up patients with breast cancer at several hospitals, to try an analysis of times on.

Ages, stages, lymph nodes, sizes and receptors have about the shares that large registries report. Hazards are
proportional with the coefficients :data:`EFFECTS`; every hospital has a baseline of its own, of Weibull's kind, and its
own length of follow-up.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from fedcomposite._validation import Count, check_call
from fedcomposite.data.faults import DataError
from fedcomposite.data.silos import Seed, Share, Silos

EFFECTS = {
    "age": 0.03, "stage_II": 0.4, "stage_III": 1.0, "stage_IV": 2.0, "nodes": 0.25, "size": 0.008, "receptor": -0.5,
    "treated": -0.4,
}  # fmt: skip
"""Logarithms of hazard ratios: per year of age, against stage I, per doubling of 1 + nodes, per millimetre, for
positive receptors, for treatment; ``marker_1``, ``marker_2``, ... have none."""

EXPERIMENT = """\
# Hospitals' files of patients with breast cancer: months until death, or until they were last seen.
name = "survivors"

[data]
files = [{files}]
time = "months"
event = "died"

[recipe]
drop = ["patient"]
target = {{ yes = 1, no = 0 }}
{gaps}one_hot = {{ stage = "I", receptor = "negative", treated = "no" }}
log = {{ nodes = 1.0 }}
standardize = true

{habits}[problem]
loss = "cox"
weights = "samples"
loss_options = {{ least_at_risk = 5 }}      # events with fewer at risk do not count: apart, sites tell no less

[regularizer]
name = "L1"
lam = 0.01
"""
_NO_GAPS = 'impute = "median"\n'
_GAPS = 'impute = { default = "median", receptor = "most_frequent" }\n'
_DAYS = 365.25 / 12
_GERMAN = {
    "patient": "Patient", "age": "Alter", "stage": "Stadium", "nodes": "Lymphknoten", "size": "Größe",
    "receptor": "Rezeptor", "treated": "behandelt", "months": "Tage", "died": "verstorben",
}  # fmt: skip
_GERMAN_HABITS = f"""\
rename = {{ {", ".join(f'{name} = "{own}"' for name, own in _GERMAN.items())} }}
units = {{ months = {{ scale = {1 / _DAYS:.6f} }} }}  # days there
recode = {{ died = {{ ja = "yes", nein = "no" }} }}
"""
_CENTIMETRES = """\
units = { size = { scale = 10.0 } }  # centimetres there
recode = { stage = { 1 = "I", 2 = "II", 3 = "III", 4 = "IV" }, died = { dead = "yes", alive = "no" } }
"""


def survivor_tables(clients: int = 4, samples: int = 250, markers: int = 4, seed: int = 0) -> dict[str, pd.DataFrame]:
    """A table per hospital: patient, age, stage, nodes, size, receptor, treated, marker_1, ..., months, died."""
    rng = np.random.default_rng(seed)
    made = {}
    for k in range(clients):
        m = max(20, round(samples * rng.uniform(0.6, 1.4)))
        stage = rng.choice(4, m, p=[0.35, 0.42, 0.18, 0.05])
        nodes = rng.negative_binomial(0.6, 0.6 / (0.6 + 1.0 + 2.5 * stage), m)
        age = np.clip(rng.normal(59 + rng.normal(0, 2), 13, m), 25, 92).round()
        size = np.clip(rng.lognormal(2.6 + 0.35 * stage, 0.45, m), 2, 150).round()
        receptor, treated = rng.uniform(size=m) < 0.75, rng.uniform(size=m) < 0.6
        risk = (
            EFFECTS["age"] * (age - 59) + np.array([0.0, *(EFFECTS[f"stage_{s}"] for s in ("II", "III", "IV"))])[stage]
        )
        risk += EFFECTS["nodes"] * np.log2(1 + nodes) + EFFECTS["size"] * (size - 20)
        risk += EFFECTS["receptor"] * receptor + EFFECTS["treated"] * treated
        scale, shape = 160 * np.exp(rng.normal(0, 0.35)), rng.uniform(1.0, 1.5)
        death = scale * (rng.exponential(size=m) * np.exp(-risk)) ** (1 / shape)
        seen = rng.uniform(6, rng.uniform(70, 130), m)
        table = {"patient": [f"{chr(65 + k % 26)}{i:04d}" for i in range(m)], "age": age}
        table |= {"stage": np.array(["I", "II", "III", "IV"])[stage], "nodes": nodes, "size": size}
        table |= {"receptor": np.where(receptor, "positive", "negative"), "treated": np.where(treated, "yes", "no")}
        table |= {f"marker_{j + 1}": rng.normal(size=m).round(3) for j in range(markers)}
        table |= {
            "months": np.maximum(np.minimum(death, seen), 0.1).round(1),
            "died": np.where(death <= seen, "yes", "no"),
        }
        made[f"hospital_{k + 1}"] = pd.DataFrame(table)
    return made


def survival(
    *, clients: Count = 4, samples: Count = 250, markers: Count = 4, seed: Seed = 0, test: Share = 0.0
) -> Silos:
    """Features of :func:`survivor_tables` as numbers, standardized, and targets of months and deaths.

    Hospitals have about ``samples`` patients each, of whom the share ``test`` is held out.
    """
    check_call("survival", survival, locals(), DataError)
    tables = survivor_tables(clients, samples, markers, seed)
    pairs = []
    for table in tables.values():
        X = table[["age"]].astype(float)
        for stage in ("II", "III", "IV"):
            X[f"stage_{stage}"] = (table["stage"] == stage).astype(float)
        X["nodes"], X["size"] = np.log2(1 + table["nodes"]), table["size"].astype(float)
        X["receptor"] = (table["receptor"] == "positive").astype(float)
        X["treated"] = (table["treated"] == "yes").astype(float)
        X[[f"marker_{j + 1}" for j in range(markers)]] = table[[f"marker_{j + 1}" for j in range(markers)]]
        pairs.append((X, np.column_stack([table["months"], table["died"] == "yes"]).astype(float)))
    silos = Silos.from_arrays(pairs, names=list(tables))
    return (silos.split(test, seed) if test else silos).standardize()


def survivor_files(
    folder: str | Path, clients: int = 4, samples: int = 250, seed: int = 0, messy: bool = False
) -> dict[str, Path]:
    """Write the tables as ``FOLDER/hospital_1.csv``, ..., with an ``experiment.toml`` beside them.

    If ``messy``, the second hospital writes semicolons, decimal commas, German names and days in place of months; the
    third centimetres, numbers for stages, dead and alive, and has gaps; the fourth tabs, and a size of 0 where none was
    measured. The experiment has a recipe for them. Further hospitals have the habits of the first four.
    """
    place = Path(folder)
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{place}: {error.strerror or error}; name a folder that can be made") from None
    files, habits, tables = {}, "", survivor_tables(clients, samples, seed=seed)
    for k, (name, table) in enumerate(tables.items()):
        files[name] = place / f"{name}.csv"
        write, habit = _HABITS[k % 4 if messy else 0]
        write(files[name], table)
        habits += f"[recipe.sites.{name}]\n{habit}\n" if habit else ""
    listed = ", ".join(f'"{path.name}"' for path in files.values())
    text = EXPERIMENT.format(files=listed, gaps=_GAPS if messy else _NO_GAPS, habits=habits)
    (place / "experiment.toml").write_text(text, encoding="utf-8")
    return files


def _plainly(path: Path, table: pd.DataFrame) -> None:
    table.to_csv(path, index=False)


def _in_german(path: Path, table: pd.DataFrame) -> None:
    own = table.assign(months=(table["months"] * _DAYS).round()).rename(columns=_GERMAN)
    own["verstorben"] = own["verstorben"].map({"yes": "ja", "no": "nein"})
    own.to_csv(path, index=False, sep=";", decimal=",", encoding="utf-8-sig")


def _in_centimetres(path: Path, table: pd.DataFrame) -> None:
    own = table.assign(size=table["size"] / 10, died=table["died"].map({"yes": "dead", "no": "alive"}))
    own["stage"] = own["stage"].map({"I": "1", "II": "2", "III": "3", "IV": "4"})
    own.loc[::17, "nodes"] = np.nan
    own.loc[5::23, "receptor"] = None
    own.to_csv(path, index=False, na_rep="?")


def _with_zeros(path: Path, table: pd.DataFrame) -> None:
    own = table.copy()
    own.loc[3::19, "size"] = 0
    own.to_csv(path, index=False, sep="\t")


_HABITS = (
    (_plainly, ""),
    (_in_german, _GERMAN_HABITS),
    (_in_centimetres, _CENTIMETRES),
    (_with_zeros, "missing = { size = [0] }  # not measured\n"),
)
