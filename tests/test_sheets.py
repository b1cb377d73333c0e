"""Tables as people have them: read with all their habits, described, and prepared in an experiment."""

import json

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.impute import SimpleImputer

import fedcomposite as fc
from fedcomposite.cli.described import page
from fedcomposite.data.cells import level
from fedcomposite.data.faults import DataWarning
from fedcomposite.data.messy import CHOLESTEROL, clean_consortium
from fedcomposite.data.queries import Rules
from fedcomposite.data.sheets import read_sheets, sheet_of
from fedcomposite.experiments import Config, ConfigError
from fedcomposite.experiments.store import RunFolder, coefficients
from fedcomposite.experiments.toml import parse


def sheet(tmp_path, content, **options):
    path = tmp_path / "a.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_sheets(path, **options)[0]


def test_text_numbers_dates_and_gaps(tmp_path):
    content = (
        '\ufeffid;name ;dose;born;seen\nA1;"Ann; M.";1,5;01.02.1950;true\n\nA2;Bo;NA;3.4.1951;false\nA3;-;2,25;;?\n'
    )
    found = sheet(tmp_path, content)
    assert list(found.columns) == ["id", "name", "dose", "born", "seen"]
    assert [found.kind(name) for name in found.columns] == ["text", "text", "number", "date", "number"]
    assert found["name"].tolist() == ["Ann; M.", "Bo", None]
    np.testing.assert_array_equal(found["dose"], [1.5, np.nan, 2.25])
    np.testing.assert_array_equal(found["seen"], [1, 0, np.nan])


def test_encodings(tmp_path):
    with pytest.warns(DataWarning, match="read as cp1252"):
        assert sheet(tmp_path, "a,b\nKäthe,1\n".encode("latin-1"))["a"].tolist() == ["Käthe"]
    assert sheet(tmp_path, "a,b\nKäthe,1\n".encode("latin-1"), encoding="latin-1")["a"].tolist() == ["Käthe"]
    assert sheet(tmp_path, "a,b\nKäthe,1\n".encode("utf-16"))["a"].tolist() == ["Käthe"]


@pytest.mark.parametrize(
    ("mark", "decimal", "cells", "expected"),
    [
        (",", ".", ["1,234.5", "12", "-1,000,000"], [1234.5, 12, -1e6]),
        (".", ",", ["1.234,5", "12", "-1.000.000"], [1234.5, 12, -1e6]),
        (" ", ".", ["1 234", "12\u00a0345", "7.5"], [1234, 12345, 7.5]),
        ("'", ".", ["1'234", "12’345.25", "7"], [1234, 12345.25, 7]),
    ],
)
def test_thousands(tmp_path, mark, decimal, cells, expected):
    content = "a\tb\n" + "".join(f"{cell}\t1\n" for cell in cells)
    assert sheet(tmp_path, content, thousands=mark, decimal=decimal)["a"].tolist() == expected
    silos = fc.Silos.from_files(tmp_path / "a.csv", target="a", thousands=mark, decimal=decimal)
    assert silos.targets.tolist() == expected
    with pytest.raises(fc.DataError, match="thousands"):
        sheet(tmp_path, content, thousands=decimal, decimal=decimal)


def test_commas_between_thousands_of_a_file_with_decimal_points(tmp_path):
    content = b"a\tb\n338,000\t256.0\n1,250\t1\n"
    with pytest.warns(DataWarning, match=r"'338,000' in column 'a' is read as thousands.*say thousands = ','"):
        assert sheet(tmp_path, content)["a"].tolist() == [338000, 1250]
    with pytest.raises(fc.DataError, match="the decimal mark is unclear"):  # not every comma has three digits behind
        sheet(tmp_path, content + b"1,5\t2.0\n")
    with pytest.raises(fc.DataError, match="may be a thousand or a fraction"):
        sheet(tmp_path, b"a\tb\n338,000\t256\n")


def test_every_problem_of_every_file_at_once(tmp_path):
    (tmp_path / "a.csv").write_text("p,q,r\n1,<0.1,1.5\n2,3,2\n3,<0.1,3\n4,5\n")
    (tmp_path / "b.csv").write_text("p,p,q\n1,2,inf\n")
    with pytest.raises(fc.DataError) as caught:
        read_sheets([tmp_path / "a.csv", tmp_path / "b.csv", tmp_path / "c.csv"])
    said = str(caught.value)
    for part in ("1 row(s) are shorter", "'q' mixes numbers with 2 text(s), such as '<0.1' (lines 2, 4)",
                 "two columns are called 'p'", "c.csv: no such file"):  # fmt: skip
        assert part in said
    assert sorted(fault.count for fault in caught.value.faults) == [1, 1, 2, 2]
    told = [fault.told for fault in caught.value.faults]
    assert not any("<0.1" in text or str(tmp_path) in text for text in told)
    assert any(text.startswith("column 'q': 2 problem(s)") for text in told)
    assert sheet(tmp_path, "p,q\n1,<0.1\n2,3\n", missing=["<0.1"])["q"].tolist()[1] == 3
    assert sheet(tmp_path, "p,q\n1,<0.1\n2,3.0\n", text=["q"])["q"].tolist() == ["<0.1", "3"]


def test_levels_are_written_alike():
    assert [level(v) for v in (1, 1.0, "1", " 1.0 ", 2.5, "2.50", "a", "1_0", "nan")] == [
        "1", "1", "1", "1", "2.5", "2.5", "a", "1_0", "nan",
    ]  # fmt: skip


def test_an_unknown_option_is_named(tmp_path):
    (tmp_path / "a.csv").write_text("a,y\n1,0\n")
    with pytest.raises(fc.DataError, match="no option 'seperator'; did you mean 'separator'"):
        fc.Recipe().prepare([tmp_path / "a.csv"], target="y", seperator=";")


# -- the messy consortium ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mess(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mess")
    return folder, fc.data.messy_consortium(folder, seed=3)


def test_the_mess_holds_the_clean_patients(mess):
    folder, _ = mess
    clean = clean_consortium(3)
    silos = Config.read(folder / "experiment.toml", ["recipe.rare=0"]).make_silos()  # what few have, as it is
    every = pd.concat(clean.values(), ignore_index=True)
    fitted = silos.recipe
    assert silos.targets.tolist() == (every["sick"] == "yes").astype(float).tolist()
    step = {step.kind: step for step in fitted.steps}
    low, high = step["impute"].within["chol"]
    south = every["patient"].str.startswith("S")
    chol = every["chol"].where(~south, (every["chol"] / CHOLESTEROL).round(2) * CHOLESTEROL)
    assert low <= SimpleImputer(strategy="median").fit(chol.to_frame()).statistics_[0] <= high
    frame = pd.DataFrame(silos.features.numpy(), columns=silos.feature_names)
    for name in ("smoker=current", "smoker=former", "sex=m", "stage=3"):
        column, value = name.split("=")
        values = every[column].fillna(step["impute"].values.get(column, "never"))
        values = values.map(lambda v: v if isinstance(v, str) else level(v))
        assert frame[name].tolist() == (values == value).astype(float).tolist()
    assert frame["chol missing"].tolist() == every["chol"].isna().astype(float).tolist()
    filled = every["crp"].fillna(step["impute"].values["crp"])
    np.testing.assert_allclose(
        frame["log(crp)"], (np.log(filled) - np.log(filled).mean()) / np.log(filled).std(ddof=0), atol=1e-10
    )
    filled = chol.fillna(step["impute"].values["chol"])
    np.testing.assert_allclose(frame["chol"], (filled - filled.mean()) / filled.std(ddof=0), atol=1e-10)
    np.testing.assert_allclose(
        frame["platelets"], (every.platelets - every.platelets.mean()) / every.platelets.std(ddof=0), atol=1e-10
    )


def test_describe_finds_what_is_odd(mess):
    _, files = mess
    content = parse(files["south"].parent / "experiment.toml")["recipe"]
    del content["sites"]["south"]["units"], content["sites"]["west"]["units"], content["missing"]
    table = fc.describe(files.values(), target="sick", recipe=fc.Recipe(**content))
    flags = {(r.feature, r.site): r.flags for r in table.itertuples() if r.flags}
    assert "less than elsewhere: another unit? (cholesterol: mmol/L and mg/dL?)" in flags["chol", "south"]
    assert "zeros far from the other values" in flags["chol", "west"]
    assert "a power of ten" in flags["platelets", "west"]
    assert flags["smoker", "west"] == "no former here"
    assert set(flags) == {("chol", "south"), ("chol", "west"), ("platelets", "west"), ("smoker", "west")}
    assert all(len(line) <= 80 for line in page(table))


def test_describe_equals_pandas():
    clean = clean_consortium(5)
    table = fc.describe(
        {name: frame.drop(columns=["patient", "visit"]) for name, frame in clean.items()}, target="sick"
    )
    for name, frame in clean.items():
        for column in ("age", "chol", "crp", "platelets"):
            row = table[(table["site"] == name) & (table["feature"] == column)].iloc[0]
            values = frame[column].dropna().astype(float)
            assert (row["n"], row["missing"]) == (len(values), len(frame) - len(values))
            assert row["mean"] == pytest.approx(values.mean(), rel=1e-12)
            assert row["sd"] == pytest.approx(values.std(ddof=0), rel=1e-10)
            assert abs(row["50 %"] - values.median()) < 0.25 * values.std()
        counts = frame["sex"].value_counts()
        row = table[(table["site"] == name) & (table["feature"] == "sex")].iloc[0]
        assert row["levels"] == f"f {counts['f']}, m {counts['m']}"


def test_constants_gaps_classes_and_spellings():
    rng = np.random.default_rng(0)
    a = pd.DataFrame(
        {"x": rng.normal(size=40), "g": ["yes", "no"] * 20, "c": 1.0, "y": [0, 1] * 20, "z": rng.normal(size=40)}
    )
    b = a.assign(g=["Yes", "no"] * 20, y=1, x=None, z=a["z"].where(a.index < 12))
    table = fc.describe({"a": a, "b": b}, target="y").set_index(["feature", "site"])["flags"]
    assert table["x", "b"] == "all missing"
    assert "'Yes' is 'yes' elsewhere" in table["g", "b"]
    assert table["c", "a"] == table["c", "b"] == "constant: 1"
    assert "one class only: 1" in table["y", "b"]
    assert table["z", "b"] == "70 % missing, elsewhere 0 %"


# -- experiments ------------------------------------------------------------------------------------------------------


def test_an_experiment_with_a_recipe_leaves_it_with_the_model(mess, tmp_path):
    from fedcomposite.analysis import solve

    folder, files = mess
    problem = Config.read(folder / "experiment.toml", ["recipe.rare=0"]).make_problem()  # as new patients are prepared
    run = solve(problem)
    RunFolder(tmp_path / "run").finish(run, problem, "solve")
    read = fc.FittedRecipe.read(tmp_path / "run" / "recipe.json")
    assert read == problem.silos.recipe
    table = pd.read_csv(tmp_path / "run" / "coefficients.csv").set_index("name")
    scale = next(step for step in read.steps if step.kind == "standardize")
    assert table.loc["age", "original"] == pytest.approx(table.loc["age", "coefficient"] / scale.sd["age"], rel=1e-12)
    assert table.loc["sex=m", "original"] == table.loc["sex=m", "coefficient"]
    features = read.apply(files["south"], site="south")
    np.testing.assert_array_equal(features.to_numpy(), problem.silos[1][0].numpy())
    predicted = problem.predict(run.solution, features)  # a table, which pandas gives as a read-only array
    torch.testing.assert_close(predicted, problem.predict(run.solution, problem.silos[1][0]))
    # The coefficients of the original scale give the same margins from unscaled features.
    content = json.loads(read.text)
    content["steps"] = [step for step in content["steps"] if step["kind"] != "standardize"]
    plain = fc.FittedRecipe.parse(json.dumps(content)).apply(files["south"], site="south")
    margins = plain @ table["original"].reindex(plain.columns).fillna(0.0) + table.loc["(intercept)", "original"]
    np.testing.assert_allclose(margins, problem.predict(run.solution, problem.silos[1][0]).numpy(), atol=1e-9)
    for form, name in (("csv", "m.csv"), ("safetensors", "m.safetensors")):
        fc.export(problem, run, tmp_path / name, format=form)
        assert fc.FittedRecipe.read(tmp_path / f"{name}.recipe.json") == read
    written = pd.read_csv(tmp_path / "m.csv").set_index("name")["original"]
    assert written["age"] == pytest.approx(table.loc["age", "original"], rel=1e-15)


def test_a_model_without_an_intercept_needs_one_on_the_original_scale():
    sites = {name: frame[["age", "chol", "sick"]].dropna() for name, frame in clean_consortium(1).items()}
    silos = fc.Recipe(target={"yes": 1, "no": -1}).prepare(sites, target="sick")
    problem = fc.Problem(silos, loss="logistic")
    x = torch.tensor([0.5, -0.25], dtype=torch.float64)
    table = coefficients(problem, x).set_index("name")
    raw = sites["north"][["age", "chol"]].to_numpy(float)
    margins = raw @ table["original"][["age", "chol"]].to_numpy() + table.loc["(intercept)", "original"]
    np.testing.assert_allclose(margins, (silos[0][0] @ x).numpy(), atol=1e-10)


def test_the_swiss_zeros_are_missing():
    config = Config.read("heart-recipe")
    silos = config.make_silos()
    assert silos.sizes.tolist() == [303, 294, 123, 200]
    every = pd.concat(fc.data.frames("heart_disease").values())
    step = {step.kind: step for step in silos.recipe.steps}
    chol = every["chol"].replace(0, np.nan)
    assert step["impute"].values["chol"] == pytest.approx(chol.mean(), rel=1e-13)
    at = silos.feature_names.index("chol missing")
    assert silos.features[:, at].tolist() == chol.isna().astype(float).tolist()
    assert set(silos.targets.tolist()) == {0.0, 1.0}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": {"name": "digits", "target": "y"}}, r"\[recipe\] 'digits' has no tables to prepare"),
        ({"data": {"name": "heart_disease"}}, r"\[data\] a recipe needs a target"),
        ({"recipe": {"inpute": "mean"}}, r"\[recipe\] inpute is not a known field; did you mean 'impute'"),
        (
            {"data": {"files": ["a.csv"], "target": "y", "offset": "a"}},
            r"\[data\] offset is for files without a \[recipe\]; say it there: offset = 'a'",
        ),
        ({"data": {"files": ["a.csv"], "target": "y", "drop": ["a"]}}, r"\[data\] with a recipe has no option 'drop'"),
    ],
)
def test_wrong_recipes_in_an_experiment(change, message):
    content = {"data": {"name": "heart_disease", "target": "num"}, "recipe": {}, "run": {"rounds": 0}} | change
    with pytest.raises(ConfigError, match=message):
        Config.check(content)


def test_the_recipe_is_part_of_the_written_experiment():
    config = Config.read("heart-recipe")
    assert "missing = { chol" in config.text or "[recipe.missing]" in config.text
    assert Rules().min_count == fc.Recipe().min_count


def test_tables_of_pandas():
    frame = pd.DataFrame({"a": pd.Categorical(["x", None, "y"]), "b": ["1", "2.5", None], "e": [True, False, True]})
    frame["c"], frame["d"] = pd.array([1, None, 3], "Int64"), pd.to_datetime(["2020-01-01", None, "2020-01-03"])
    found = sheet_of(frame, "s")
    assert [found.kind(name) for name in frame] == ["text", "number", "number", "number", "date"]
    np.testing.assert_array_equal(found["c"], [1, np.nan, 3])
    with pytest.raises(fc.DataError, match="infinite"):
        sheet_of(pd.DataFrame({"a": [1.0, np.inf]}), "s")


def test_whole_numbers_that_a_float_would_change_stay_texts(tmp_path):
    """Identifiers of 17 digits, in a table of pandas as in a file."""
    frame = pd.DataFrame({"id": [2**53 + 1, 7], "a": [1, 2]})
    frame.to_csv(tmp_path / "a.csv", index=False)
    for found in (sheet_of(frame, "s"), read_sheets(tmp_path / "a.csv")[0]):
        assert found["id"].tolist() == ["9007199254740993", "7"]
        assert found["a"].tolist() == [1, 2]


# -- the command line -------------------------------------------------------------------------------------------------


def test_from_a_mess_to_an_answer_in_three_commands(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cli("data", "messy", "mess", check=0)
    assert "already there" in cli("data", "messy", "mess", check=2).err
    described = cli("data", "describe", "mess/experiment.toml", check=0)
    assert "! smoker, west: no former here" in described.out
    assert max(map(len, described.out.splitlines())) <= 80
    solved = cli("solve", "mess/experiment.toml", "--out", "run", check=0)
    assert "original" in solved.out
    assert (tmp_path / "run" / "recipe.json").is_file()
    rows = json.loads(cli("data", "describe", "mess/north.csv", "mess/south.csv", "--json", check=0).out)
    assert {row["site"] for row in rows} == {"north", "south"}
    assert any("no such column" in row["flags"] for row in rows)
    said = cli("data", "describe", "heart_disease", "--target", "num", check=2).err
    assert "--target is for tables" in said


def test_a_federation_takes_a_recipe_and_knows_units(tmp_path):
    from fedcomposite.federation.folders import FolderError
    from fedcomposite.federation.shape import parse as parse_order
    from fedcomposite.federation.site.enrolment import _in_units

    assert parse_order(Config.read("heart-recipe").text).recipe == Config.read("heart-recipe").recipe
    from fedcomposite.data.steps import Unit

    silos = fc.Silos.from_arrays([([[1.0, 2.0]], [1.0])], feature_names=["a", "b"], test=([[3.0, 4.0]], [0.0]))
    found = _in_units(silos, {"b": Unit(scale=10, shift=1)}, "site.toml")
    assert found.features.tolist() == [[1, 21]]
    assert found.test[0].tolist() == [[3, 41]]
    with pytest.raises(FolderError, match="is no feature"):
        _in_units(silos, {"c": Unit()}, "site.toml")
