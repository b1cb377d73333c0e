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
impute = "median"
one_hot = {{ stage = "I", receptor = "negative", treated = "no" }}
log = {{ nodes = 1.0 }}
standardize = true

[problem]
loss = "cox"
weights = "samples"
loss_options = {{ least_at_risk = 5 }}      # events with fewer at risk do not count: apart, sites tell no less

[regularizer]
name = "L1"
lam = 0.01
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


def survivor_files(folder: str | Path, clients: int = 4, samples: int = 250, seed: int = 0) -> dict[str, Path]:
    """Write the tables as ``FOLDER/hospital_1.csv``, ..., with an ``experiment.toml`` beside them."""
    place = Path(folder)
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{place}: {error.strerror or error}; name a folder that can be made") from None
    files = {}
    for name, table in survivor_tables(clients, samples, seed=seed).items():
        files[name] = place / f"{name}.csv"
        table.to_csv(files[name], index=False)
    listed = ", ".join(f'"{path.name}"' for path in files.values())
    (place / "experiment.toml").write_text(EXPERIMENT.format(files=listed), encoding="utf-8")
    return files
