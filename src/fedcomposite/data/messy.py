"""Four hospitals' files as people have them, to try a preparation on, and the same patients as clean tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from fedcomposite.data.faults import DataError

HOSPITALS = ("north", "south", "east", "west")
CHOLESTEROL = 38.67
"""Milligrams per decilitre in a millimole of cholesterol per litre."""

EXPERIMENT = f"""\
# Four hospitals' files, as they came, and what has to be done to them.
name = "hospitals"

[data]
files = ["north.csv", "south.csv", "east.csv", "west.csv"]
target = "sick"

[recipe]
drop = ["patient", "visit", "note"]
target = {{ yes = 1, no = 0 }}
missing = {{ chol = [0] }}                # not measured
impute = {{ default = "median", smoker = "most_frequent" }}
indicators = ["chol"]
one_hot = {{ sex = "f", smoker = "never", stage = "1" }}
log = ["crp"]
splines = {{ age = 3 }}
standardize = true
rare = 5                                # what fewer patients of a hospital have is constant there: apart, sites tell no less

[recipe.sites.south]
rename = {{ patient = "Patient", visit = "Datum", age = "Alter", sex = "Geschlecht", smoker = "Raucher", chol = "Cholesterin", crp = "CRP", stage = "Stadium", platelets = "Thrombozyten", sick = "krank" }}
units = {{ chol = {{ scale = {CHOLESTEROL} }} }}  # mmol/L there, mg/dL elsewhere

[recipe.sites.east]
encoding = "latin-1"

[recipe.sites.west]
thousands = ","
units = {{ platelets = {{ scale = 0.001 }} }}

[problem]
loss = "logistic"
bias = true
weights = "samples"

[regularizer]
name = "L1"
lam = 0.01
"""  # noqa: E501
_GERMAN = {
    "patient": "Patient", "visit": "Datum", "age": "Alter", "sex": "Geschlecht", "smoker": "Raucher",
    "chol": "Cholesterin", "crp": "CRP", "stage": "Stadium", "platelets": "Thrombozyten", "sick": "krank",
}  # fmt: skip


def clean_consortium(seed: int = 0, sizes: Sequence[int] = (220, 160, 130, 90)) -> dict[str, pd.DataFrame]:
    """The patients of four hospitals in common units, with gaps (NaN, None) where something was not measured."""
    if len(sizes) != len(HOSPITALS) or min(sizes) < 40:
        raise DataError(f"sizes = {tuple(sizes)}: give four numbers of at least 40 patients")
    rng = np.random.default_rng(seed)
    out = {}
    for i, (name, n) in enumerate(zip(HOSPITALS, sizes, strict=True)):
        age = np.clip(rng.normal(54 + 4 * i, 11, n), 20, 95).round()
        levels = ["never", "current"] if name == "west" else ["never", "former", "current"]
        smoker = rng.choice(levels, n)
        chol = np.clip(rng.normal(215 + 6 * i, 38, n), 110, 400).round()
        crp = np.clip(rng.lognormal(1.0, 0.9, n), 0.1, 200).round(1)
        stage = rng.integers(1, 5, n)
        platelets = np.clip(rng.normal(250, 60, n), 60, 600).round()
        sex = rng.choice(["f", "m"], n)
        score = -1.0 + 0.05 * (age - 55) + 0.015 * (chol - 215) + 0.8 * (smoker == "current") + 0.5 * (stage - 2.5)
        sick = rng.random(n) < 1 / (1 + np.exp(-score - 0.4 * (sex == "m")))
        frame = pd.DataFrame(
            {
                "patient": [f"{name[0].upper()}{j:05d}" for j in rng.permutation(90000)[:n]],
                "visit": pd.Timestamp("2021-01-01") + pd.to_timedelta(rng.integers(0, 700, n), unit="D"),
                "age": age,
                "sex": sex,
                "smoker": smoker.astype(object),
                "chol": chol,
                "crp": crp,
                "stage": stage.astype(float),
                "platelets": platelets,
                "sick": np.where(sick, "yes", "no"),
            }
        )
        for column, share in (("smoker", 0.06), ("chol", 0.15 if name == "west" else 0.05), ("crp", 0.1)):
            frame.loc[rng.random(n) < share, column] = None
        out[name] = frame
    return out


def messy_consortium(folder: str | Path, seed: int = 0, sizes: Sequence[int] = (220, 160, 130, 90)) -> dict[str, Path]:
    """Write the files of four hospitals, each with its own habits, and ``experiment.toml`` with a recipe for them.

    North is plain. South writes semicolons, decimal commas and a byte order mark, German names in another order, and
    cholesterol in mmol/L. East writes latin-1, quotes, spaces and a note. West writes tabs, blank lines, thousands
    separators, 0 for a cholesterol that was not measured, platelets a thousandfold, and has no former smokers.
    ``clean_consortium(seed, sizes)`` has the same patients.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     files = messy_consortium(folder)
    ...     print(files["south"].read_text(encoding="utf-8-sig").splitlines()[0])
    krank;Thrombozyten;Stadium;CRP;Cholesterin;Raucher;Geschlecht;Alter;Datum;Patient
    """
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    frames = clean_consortium(seed, sizes)
    texts = {name: _WRITERS[name](frame) for name, frame in frames.items()}
    files = {name: place / f"{name}.csv" for name in frames}
    for name, content in texts.items():
        files[name].write_bytes(content)
    (place / "experiment.toml").write_text(EXPERIMENT, encoding="utf-8")
    return files


def _north(frame: pd.DataFrame) -> bytes:
    return frame.assign(visit=frame["visit"].dt.strftime("%Y-%m-%d")).to_csv(index=False, na_rep="NA").encode()


def _south(frame: pd.DataFrame) -> bytes:
    own = frame.assign(visit=frame["visit"].dt.strftime("%d.%m.%Y"), chol=(frame["chol"] / CHOLESTEROL).round(2))
    own = own.rename(columns=_GERMAN).iloc[:, ::-1]
    return own.to_csv(index=False, sep=";", decimal=",", na_rep="").encode("utf-8-sig")


def _east(frame: pd.DataFrame) -> bytes:
    own = frame.assign(visit=frame["visit"].dt.strftime("%d/%m/%Y"), note='"Müller, Käthe"')
    lines = [",".join(own.columns)]
    for row in own.itertuples(index=False):
        lines.append(" ,".join("-" if value is None or value != value else str(value) for value in row))
    return ("\r\n".join(lines) + "\r\n").encode("latin-1")


def _west(frame: pd.DataFrame) -> bytes:
    own = frame[[*frame.columns[3:], *frame.columns[:3]]]
    lines = ["\t".join(own.columns), ""]
    for number, row in enumerate(own.to_dict("records")):
        row |= {
            "chol": 0 if row["chol"] != row["chol"] else row["chol"],
            "platelets": f"{row['platelets'] * 1000:,.0f}",
        }
        row |= {"visit": row["visit"].strftime("%Y-%m-%d")}
        lines.append("\t".join("?" if value is None or value != value else str(value) for value in row.values()))
        if number % 40 == 39:
            lines.append("")
    return "\n".join(lines).encode()


_WRITERS = {"north": _north, "south": _south, "east": _east, "west": _west}
