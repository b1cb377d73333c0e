"""Files of hospitals that disagree: what is found odd in them, what a recipe does about it, and what new files lack."""

import numpy as np
import pandas as pd
import pytest

import fedcomposite as fc
from fedcomposite.data import DataError
from fedcomposite.data.faults import DataWarning
from fedcomposite.data.queries import parse_query


def hospital(seed, n=80, **columns):
    g = np.random.default_rng(seed)
    frame = pd.DataFrame({"age": g.integers(30, 90, n).astype(float), "sex": g.choice(["f", "m"], n)})
    frame["sick"] = (g.random(n) < 1 / (1 + np.exp(-(frame["age"] - 60) / 10))).astype(int)
    return frame.assign(**columns)


def flags(frames, feature, **options):
    table = fc.describe(frames, **options)
    rows = table[table["feature"] == feature]
    return dict(zip(rows["site"], rows["flags"], strict=True))


def test_codes_of_absence_and_typing_errors_are_pointed_out():
    """999 and -9 among ages, and one 1e20: quantiles hide them, sums do not."""
    coded, wrong, fine = hospital(0), hospital(1), hospital(2)
    coded.loc[:6, "age"], wrong.loc[3, "age"] = 999.0, 1e20
    found = flags({"coded": coded, "wrong": wrong, "fine": fine}, "age")
    assert "7 values are 999, far from the others: not measured?" in found["coded"]
    assert "mean and deviation come from a few values far from all others" in found["wrong"]
    assert found["fine"] == ""
    row = fc.describe({"wrong": wrong, "fine": fine}).set_index(["site", "feature"]).loc[("fine", "age")]
    assert (row["mean"], row["sd"]) == pytest.approx((fine["age"].mean(), fine["age"].std(ddof=0)), rel=1e-10)
    coded.loc[:6, "age"] = -9.0
    assert "7 values are -9" in flags({"coded": coded, "fine": fine}, "age")["coded"]
    counts = hospital(3, 200, age=np.random.default_rng(3).poisson(2.0, 200).astype(float))
    assert flags({"a": counts, "b": counts}, "age") == {"a": "", "b": ""}


def test_numbers_of_rows_are_identifiers():
    frames = {name: hospital(i, number=np.arange(80.0) + 100 * i) for i, name in enumerate("ab")}
    shuffled = frames["b"].sample(frac=1.0, random_state=0)
    for found in flags({"a": frames["a"], "b": shuffled}, "number").values():
        assert "consecutive numbers: an identifier?" in found


def test_an_absent_column_lacks_no_levels():
    frames = {"a": hospital(0), "b": hospital(1), "c": hospital(2).drop(columns="sex")}
    assert flags(frames, "sex") == {"a": "", "b": "", "c": "no such column"}


def test_levels_are_called_alike():
    """1 and 2 at one site, words at another: the recipe says what they mean, for new patients as well."""
    one = hospital(0)
    other = one.assign(sex=one["sex"].map({"f": "1", "m": "2"}))
    recipe = fc.Recipe(one_hot=["sex"], sites={"other": {"recode": {"sex": {1: "f", "2": "m"}}}})
    made = recipe.prepare({"one": one, "other": other}, target="sick")
    assert made.feature_names == ("age", "sex=m")
    np.testing.assert_array_equal(made[0][0], made[1][0])
    np.testing.assert_array_equal(made.recipe.apply(other, site="other"), made[1][0])
    assert flags({"one": one, "other": other}, "sex", recipe=recipe) == {"one": "", "other": ""}
    with pytest.raises(DataError, match="recode: no column 'gender'"):
        fc.Recipe(recode={"gender": {"1": "f"}}).fit({"one": one}, target="sick")


def test_levels_of_files_are_called_alike(tmp_path):
    one = hospital(0)
    one.to_csv(tmp_path / "one.csv", index=False)
    one.assign(sex=one["sex"].map({"f": "1", "m": "male"})).to_csv(tmp_path / "other.csv", index=False)
    recode = {"recode": {"sex": {"1": "f", "male": "m"}}}
    recipe = fc.Recipe(one_hot=["sex"], sites={"other": recode})
    made = recipe.prepare([tmp_path / "one.csv", tmp_path / "other.csv"], target="sick")
    np.testing.assert_array_equal(made[0][0], made[1][0])


def test_columns_without_a_name_and_without_values_are_left_out(tmp_path):
    """As spreadsheets write them, behind the last column or between others."""
    frame = hospital(0)
    lines = frame.to_csv(index=False).splitlines()
    (tmp_path / "plain.csv").write_text("\n".join(lines))
    (tmp_path / "commas.csv").write_text("\n".join(f"{line},," for line in lines))
    recipe = fc.Recipe(one_hot=["sex"])
    with pytest.warns(DataWarning, match=r"2 column\(s\) have neither a name nor values"):
        made = recipe.prepare([tmp_path / "plain.csv", tmp_path / "commas.csv"], target="sick")
    np.testing.assert_array_equal(made[0][0], made[1][0])
    with pytest.warns(DataWarning, match="neither a name nor values"):
        fc.Silos.from_csv([tmp_path / "commas.csv"], target="sick", drop="sex")
    (tmp_path / "filled.csv").write_text("\n".join(f"{line},{'' if i == 0 else i}" for i, line in enumerate(lines)))
    with pytest.raises(DataError, match=r"column number 4 has no name; name it in the header$"):
        recipe.prepare([tmp_path / "filled.csv"], target="sick")


def test_all_that_a_new_file_lacks_is_told_at_once(tmp_path):
    """With the site whose names it has."""
    one = hospital(0, chol=np.random.default_rng(9).normal(200, 30, 80))
    own = {"age": "Alter", "sex": "Geschlecht", "chol": "Cholesterin"}
    recipe = fc.Recipe(one_hot=["sex"], sites={"south": {"rename": own}})
    made = recipe.fit({"north": one, "south": one.rename(columns=own)}, target="sick")
    with pytest.raises(DataError, match=r"no column 'age', 'sex', 'chol'.*say site = 'south', whose names it has"):
        made.apply(one.rename(columns=own))
    with pytest.raises(DataError, match="no column 'age', 'chol'; "):
        made.apply(one[["sex"]])
    odd = one.assign(sex="x")
    with pytest.raises(DataError, match="80 value"):
        made.apply(odd)


def test_all_that_a_recipe_misnames_is_told_at_once():
    with pytest.raises(DataError) as caught:
        fc.Recipe(one_hot=["sexx"], impute={"ages": "mean"}, log=["crp"]).fit({"a": hospital(0)}, target="sick")
    said = str(caught.value)
    for part in ("one_hot: no column 'sexx'; did you mean 'sex'?", "impute: no column 'ages'", "log: no column 'crp'"):
        assert part in said
    assert "column 'sex': is text" in said
    with pytest.raises(DataError, match="2 problems"):
        fc.Recipe(drop=["x"], missing={"y": [0]}).fit({"a": hospital(0)}, target="sick")


def _patients(n, first, seed):
    g = np.random.default_rng(seed)
    return pd.DataFrame({
        "patient_id": first + np.arange(n), "record": [f"R{first + i}" for i in range(n)],
        "age": g.normal(60, 9, n).round(), "chol": g.normal(200, 30, n).round(1), "sex": g.choice(["m", "f"], n),
    })  # fmt: skip


def _again(frames, **options):
    table = fc.describe(frames, **options)
    odd = table[table["flags"].str.contains("occur again")]
    return dict(zip(zip(odd["site"], odd["feature"], strict=True), odd["flags"], strict=True))


def test_patients_who_are_there_twice_are_flagged():
    one, other = _patients(80, 1000, 0), _patients(90, 5000, 1)
    assert _again({"one": one, "other": other}) == {}
    twice = _again({"one": one, "other": pd.concat([other, other[:7]], ignore_index=True)})
    assert set(twice) == {("other", "patient_id"), ("other", "record")}
    assert all("7 values of an identifier" in flag for flag in twice.values())
    assert "7 whole rows" in twice["other", "patient_id"]
    whole = _again({"one": one, "other": pd.concat([other, other], ignore_index=True)})
    assert "90 whole rows" in whole["other", "patient_id"]
    changed = other.copy()
    changed.loc[4, ["patient_id", "record"]] = other.loc[
        3, ["patient_id", "record"]
    ].to_numpy()  # other values: a visit
    few = _again({"one": one, "other": changed})
    assert all("some values of an identifier" in flag and "rows" not in flag for flag in few.values())  # not how many
    assert len(few) == 2


def test_repeats_are_counted_in_the_table_as_it_is():
    """Steps could choose rows until the answer is about one of them."""
    choosing = '{"name": "gaps", "columns": ["a"], "repeats": true, "steps": [{"kind": "complete", "columns": ["a"]}]}'
    with pytest.raises(DataError, match="the table as it is"):
        parse_query(choosing)
    assert parse_query(choosing.replace("complete", "absent")).repeats


def test_equal_measurements_and_small_tables_are_no_patients_twice():
    """Age and blood pressure have equal values, and rows of three categories are equal, by chance."""
    g = np.random.default_rng(2)
    plain = pd.DataFrame(
        {"age": g.integers(30, 90, 200), "bp": g.normal(130, 15, 200).round(), "y": g.integers(0, 2, 200)}
    )
    levels = pd.DataFrame({k: g.choice(["a", "b"], 200) for k in ("p", "q", "r")})
    assert _again({"one": plain[:100], "other": plain[100:].reset_index(drop=True)}) == {}
    assert _again({"one": levels[:100], "other": levels[100:].reset_index(drop=True)}) == {}
    without = _patients(90, 1, 3).drop(columns=["patient_id", "record"])  # no identifier: rows tell
    found = _again({"one": without, "other": pd.concat([without, without[:6]], ignore_index=True)})
    assert found == {("other", "age"): "6 whole rows of this table occur again: patients twice?"}
