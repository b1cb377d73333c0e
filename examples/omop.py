"""Four hospitals whose tables are those of the OMOP common data model, in DuckDB: from SQL to a report.

    python examples/omop.py study                             # four made-up hospitals, and study/experiment.toml
    fedcomposite data describe study/experiment.toml --table-one --out study/table-one.tex
    fedcomposite cv study/experiment.toml --folds sites --by-site --out study/run
    fedcomposite report study/run

Table 1; gaps filled, a penalised model by cross-validation that leaves one hospital out at a time; a model of each
hospital on its own and their meta-analysis; a report of all of it. In a federation each site has the query and its
database in its own site.toml, and the commands are ``federation describe``, ``federation cv`` and ``report``.
"""

import sys
from pathlib import Path

import duckdb
import numpy as np
import pandas as pd
import tomli_w

QUERY = """
WITH latest AS (
  SELECT person_id, measurement_concept_id AS concept, last(value_as_number ORDER BY measurement_date) AS value
  FROM measurement GROUP BY person_id, measurement_concept_id
)
SELECT 2024 - p.year_of_birth AS age,
       CASE p.gender_concept_id WHEN 8532 THEN 'female' WHEN 8507 THEN 'male' END AS sex,
       sbp.value AS systolic, ldl.value AS ldl, hba1c.value AS hba1c,
       EXISTS (SELECT * FROM condition_occurrence c WHERE c.person_id = p.person_id
               AND c.condition_concept_id = 201826)::INT AS diabetes,
       EXISTS (SELECT * FROM drug_exposure d WHERE d.person_id = p.person_id
               AND d.drug_concept_id = 1539403)::INT AS statin,
       EXISTS (SELECT * FROM condition_occurrence c WHERE c.person_id = p.person_id
               AND c.condition_concept_id = 4329847 AND c.condition_start_date >= DATE '2024-01-01')::INT AS infarction
FROM person p
LEFT JOIN latest sbp ON sbp.person_id = p.person_id AND sbp.concept = 3004249
LEFT JOIN latest ldl ON ldl.person_id = p.person_id AND ldl.concept = 3028437
LEFT JOIN latest hba1c ON hba1c.person_id = p.person_id AND hba1c.concept = 3004410
"""
HOSPITALS = {"north": (420, -0.3), "south": (360, 0.0), "east": (300, 0.2), "west": (240, 0.4)}
EXPERIMENT = {
    "name": "omop",
    "data": {"target": "infarction", "query": QUERY, "databases": {name: f"{name}.duckdb" for name in HOSPITALS}},
    "table_one": {"median": ["hba1c"]},
    "recipe": {"impute": {"default": "mean", "sex": "most_frequent"}, "one_hot": {"sex": "female"}, "rare": 5},
    "problem": {"loss": "logistic", "bias": True, "weights": "samples"},
    "regularizer": {"name": "L1", "lam": 0.01},
}


def hospital(path: Path, patients: int, level: float, draw: np.random.Generator) -> None:
    """A database with the four tables that the query asks, of made-up patients."""
    ids = np.arange(1, patients + 1)
    born, male = draw.integers(1935, 1985, patients), draw.random(patients) < 0.55
    diabetes, statin = draw.random(patients) < 0.25, draw.random(patients) < 0.35
    values = {
        3004249: draw.normal(130 + 0.3 * (1960 - born), 15),
        3028437: draw.normal(125 - 25 * statin, 30),
        3004410: draw.normal(5.6 + 1.4 * diabetes, 0.6),
    }
    margin = level - 1.6 + 0.04 * (1960 - born) + 0.5 * male + 0.7 * diabetes + 0.02 * (values[3004249] - 135)
    sick = draw.random(patients) < 1 / (1 + np.exp(-margin))
    person = pd.DataFrame({"person_id": ids, "year_of_birth": born, "gender_concept_id": np.where(male, 8507, 8532)})
    measured = []
    for concept, given in values.items():
        for day in ("2023-03-01", "2023-09-01"):
            there = draw.random(patients) < 0.7
            value = (given + draw.normal(0, 0.1, patients))[there].round(1)
            columns = {"person_id": ids[there], "measurement_concept_id": concept, "value_as_number": value}
            measured.append(pd.DataFrame(columns).assign(measurement_date=pd.Timestamp(day)))
    conditions = [(201826, "2020-05-01", diabetes), (4329847, "2024-06-01", sick)]
    occurred = [
        pd.DataFrame({"person_id": ids[who], "condition_concept_id": c, "condition_start_date": pd.Timestamp(day)})
        for c, day, who in conditions
    ]
    tables = {
        "person": person,
        "measurement": pd.concat(measured),
        "condition_occurrence": pd.concat(occurred),
        "drug_exposure": pd.DataFrame({"person_id": ids[statin], "drug_concept_id": 1539403}),
    }
    with duckdb.connect(str(path)) as connection:
        for name, frame in tables.items():
            connection.register("frame", frame)
            connection.execute(f"CREATE TABLE {name} AS SELECT * FROM frame")


def write(folder: Path, seed: int = 0) -> Path:
    """Write the hospitals' databases and an experiment for them."""
    folder.mkdir(parents=True)
    for i, (name, (patients, level)) in enumerate(HOSPITALS.items()):
        hospital(folder / f"{name}.duckdb", patients, level, np.random.default_rng([seed, i]))
    made = folder / "experiment.toml"
    made.write_text(tomli_w.dumps(EXPERIMENT, multiline_strings=True))
    return made


if __name__ == "__main__":
    print(write(Path(sys.argv[1] if len(sys.argv) > 1 else "study")))
