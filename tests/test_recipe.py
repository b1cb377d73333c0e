"""Recipes learned from the sites' counts and sums equal pandas and scikit-learn on the pooled tables."""

import json

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.interpolate import CubicSpline
from sklearn.compose import ColumnTransformer
from sklearn.impute import SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

import fedcomposite as fc
from fedcomposite.data.faults import DataWarning
from fedcomposite.data.fitted import FittedRecipe
from fedcomposite.data.queries import (
    GRID,
    QUERIES,
    Rules,
    TablesAtHand,
    answer,
    parse_answer,
    parse_query,
    told_below,
    write_answer,
)
from fedcomposite.data.recipe import Recipe
from fedcomposite.data.sheets import sheet_of
from fedcomposite.data.steps import natural_spline


@pytest.mark.parametrize("ratio", [1e-7, 1e-10, 3e-14])
def test_a_small_deviation_is_divided_by_and_rounding_is_not(ratio):
    """Whatever the number of rows: a mean of 1000 with a deviation of 3e-11 has 260 digits in the last place."""
    g = np.random.default_rng(0)
    noise = g.normal(size=900)
    frame = pd.DataFrame({"small": 1000 * (1 + ratio * noise), "same": 0.3, "age": noise, "y": np.arange(900) % 2})
    frame.loc[::7, "same"] = 0.1 + 0.2  # the same number by another way
    frames = {"north": frame[:400], "south": frame[400:]}
    with pytest.warns(DataWarning, match="constant over all sites: 'same'"):
        silos = Recipe().prepare(frames, target="y")
    x = frame["small"].to_numpy() - 1000
    expected = (x - x.mean()) / x.std()
    tolerance = 0.01 if ratio == 3e-14 else 10 * 1e-16 / ratio  # half a digit of the mean, in deviations
    np.testing.assert_allclose(silos.features[:, 0], expected, atol=tolerance)
    assert (silos.features[:, 1] == 0).all()
    pooled = fc.Silos.from_arrays([(frame[["small", "same"]].to_numpy(), frame["y"])]).standardize()
    np.testing.assert_allclose(pooled.features[:, 0], expected, atol=tolerance)
    assert (pooled.features[:, 1].numpy() == frame["same"].to_numpy()).all()
    again = FittedRecipe.parse(silos.recipe.text)
    assert (again.apply(frame.assign(same=0.4))["same"] == 0).all()


def test_a_site_far_from_the_others_has_its_own_deviation():
    """A column of zeros at one of three sites has none, and one of a thousandth beside millions keeps its digits."""
    g = np.random.default_rng(0)
    chol = {"north": g.normal(240, 40, 50), "south": np.zeros(50), "west": g.normal(230, 30, 50)}
    crp = {"north": g.normal(1e6, 1e5, 50), "south": g.normal(5, 1e-3, 50), "west": g.normal(1e6, 1e5, 50)}
    table = fc.describe({k: pd.DataFrame({"chol": chol[k], "crp": crp[k]}) for k in chol})
    found = table.set_index(["feature", "site"])
    assert found.loc[("chol", "south"), ["mean", "sd"]].tolist() == [0.0, 0.0]
    for name, values in {"chol": chol, "crp": crp}.items():
        for site in values:
            assert found.loc[(name, site), "sd"] == pytest.approx(values[site].std(), rel=1e-10, abs=0)
            assert found.loc[(name, site), "mean"] == pytest.approx(values[site].mean(), rel=1e-12, abs=0)


def tables(seed=0, sizes=(60, 45, 80)):
    """Sites that differ, with gaps, text and whole-number categories."""
    rng = np.random.default_rng(seed)
    out = {}
    for i, n in enumerate(sizes):
        frame = pd.DataFrame(
            {
                "age": rng.normal(50 + 8 * i, 9, n).round(1),
                "crp": rng.lognormal(1, 0.8, n).round(2),
                "cp": rng.integers(1, 5, n).astype(float),
                "smoker": rng.choice(["no", "yes", "former"], n),
                "sick": rng.integers(0, 2, n),
            }
        )
        for name in ("age", "crp", "cp", "smoker"):
            frame.loc[rng.random(n) < 0.1, name] = None
        out[f"site {i}"] = frame
    return out


def pooled(sites):
    return pd.concat(sites.values(), ignore_index=True)


def test_a_whole_recipe_equals_scikit_learn():
    sites = tables()
    recipe = Recipe(impute="mean", one_hot=["cp", "smoker"], standardize=True)
    silos = recipe.prepare(sites, target="sick")
    every = pooled(sites)
    numeric = make_pipeline(SimpleImputer(), StandardScaler())
    category = make_pipeline(SimpleImputer(strategy="most_frequent"), OneHotEncoder(drop="first", sparse_output=False))
    reference = ColumnTransformer([("n", numeric, ["age", "crp"]), ("c", category, ["cp", "smoker"])])
    expected = reference.fit_transform(every)
    assert silos.feature_names == ("age", "crp", "cp=2", "cp=3", "cp=4", "smoker=no", "smoker=yes")
    np.testing.assert_allclose(silos.features.numpy(), expected, atol=1e-10, rtol=0)
    assert silos.targets.tolist() == every["sick"].tolist()
    assert silos.sizes.tolist() == [60, 45, 80]


@pytest.mark.parametrize("shift", [0.0, 1e6])
def test_standard_deviations_survive_large_means(shift):
    sites = {
        name: frame[["age", "sick"]].dropna().assign(age=lambda f: f.age + shift) for name, frame in tables().items()
    }
    found = Recipe().fit(sites, target="sick").steps[-1]
    scaler = StandardScaler().fit(pooled(sites)[["age"]])
    assert found.mean["age"] == pytest.approx(scaler.mean_[0], rel=1e-14)
    assert found.sd["age"] == pytest.approx(scaler.scale_[0], rel=1e-9)


def test_indicators_constants_and_most_frequent_numbers():
    sites = tables(1)
    recipe = Recipe(
        impute={"default": "most_frequent", "age": -1, "crp": "mean", "smoker": {"constant": "unknown"}},
        indicators=True, one_hot={"smoker": "no"}, standardize=False,
    )  # fmt: skip
    silos = recipe.prepare(sites, target="sick")
    every = pooled(sites)
    frame = pd.DataFrame(silos.features.numpy(), columns=silos.feature_names)
    assert frame["age missing"].tolist() == every["age"].isna().astype(float).tolist()
    assert frame["age"].tolist() == every["age"].fillna(-1).tolist()
    mode = SimpleImputer(strategy="most_frequent").fit(every[["cp"]]).statistics_[0]
    assert frame["cp"].tolist() == every["cp"].fillna(mode).tolist()
    assert frame["smoker=unknown"].tolist() == every["smoker"].isna().astype(float).tolist()
    assert "smoker=no" not in frame


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(-300, 300).map(lambda v: v / 4), min_size=12, max_size=60), min_size=1, max_size=4),
    st.sampled_from([1, 3, 5]),
    st.floats(0, 1),
)
def test_quantiles_lie_where_they_are_said_to(values, least, share):
    from fedcomposite.data.quantiles import quantiles

    sheets = [sheet_of(pd.DataFrame({"a": each}), f"s{i}") for i, each in enumerate(values)]
    (found,) = quantiles(TablesAtHand(sheets, Rules(least)), {"a": [share]})["a"]
    true = np.quantile(np.concatenate([np.array(v) for v in values]), share)
    assert found.low - 1e-9 <= true <= found.high + 1e-9
    assert found.low <= found.value <= found.high
    if least == 1:
        assert found.value == pytest.approx(true, abs=1e-9)


def test_the_median_is_exact_where_sites_tell_small_counts():
    sites = tables(2)
    every = pooled(sites)
    recipe = Recipe(impute="median", drop=["cp", "smoker"], standardize=False)
    step = recipe.fit(sites, target="sick", rules=Rules(1)).steps[0]
    expected = SimpleImputer(strategy="median").fit(every[["age", "crp"]]).statistics_
    assert [step.values["age"], step.values["crp"]] == pytest.approx(expected, abs=1e-12)
    strict = recipe.fit(sites, target="sick").steps[0]
    for name, median in zip(("age", "crp"), expected, strict=True):
        low, high = strict.within[name]
        assert low <= median <= high
        assert high - low < 0.25 * every[name].std()


def test_renaming_units_and_markers_of_one_site():
    sites = tables(3)
    plain = {name: frame[["age", "crp", "sick"]].fillna(1.5) for name, frame in sites.items()}
    strange = dict(plain)
    one = plain["site 1"].rename(columns={"age": "Alter"}).assign(crp=lambda f: f.crp * 10)[["sick", "crp", "Alter"]]
    one.loc[[3, 4], "crp"] = -9
    strange["site 1"] = one
    part = {"rename": {"age": "Alter"}, "units": {"crp": {"scale": 0.1}}, "missing": {"crp": [-9]}}
    silos = Recipe(sites={"site 1": part}, impute={"crp": 7.0}, standardize=False).prepare(strange, target="sick")
    expected = plain["site 1"].copy()
    expected.loc[[3, 4], "crp"] = 7.0
    np.testing.assert_allclose(silos[1][0].numpy(), expected[["age", "crp"]].to_numpy(), rtol=1e-12)


def test_splines_logs_and_interactions():
    sites = {name: frame.dropna() for name, frame in tables(4, (150, 120)).items()}
    recipe = Recipe(
        drop=["smoker"], one_hot=["cp"], log={"crp": 1}, splines={"age": 4},
        interactions=[("age", "cp"), ("crp", "age")], standardize=False,
    )  # fmt: skip
    fitted = recipe.fit(sites, target="sick", rules=Rules(1))
    every = pooled(sites)
    frame = pd.DataFrame(
        np.concatenate([fitted.table(sheet_of(f, n))[0] for n, f in sites.items()]), columns=fitted.features
    )
    assert list(frame) == [
        "age", "age spline 1", "age spline 2", "log(crp + 1)", "cp=2", "cp=3", "cp=4",
        *(f"{a}:cp={c}" for a in ("age", "age spline 1", "age spline 2") for c in (2, 3, 4)),
        *(f"log(crp + 1):{a}" for a in ("age", "age spline 1", "age spline 2")),
    ]  # fmt: skip
    (knots,) = (step.knots["age"] for step in fitted.steps if step.kind == "spline")
    assert knots == pytest.approx(np.quantile(every["age"], [0.05, 0.35, 0.65, 0.95]), abs=1e-9)
    np.testing.assert_allclose(frame["log(crp + 1)"], np.log(every["crp"] + 1), rtol=1e-14)
    np.testing.assert_allclose(frame["age:cp=3"], every["age"] * (every["cp"] == 3), rtol=1e-14)


def test_the_spline_terms_span_the_natural_cubic_splines():
    knots = np.array([1.0, 2.5, 4.0, 7.0, 8.0])
    x = np.linspace(-2, 12, 200)
    basis = np.column_stack([np.ones_like(x), x, natural_spline(x, knots)])
    rng = np.random.default_rng(0)
    for _ in range(5):
        curve = CubicSpline(knots, rng.normal(size=5), bc_type="natural")
        inside = (x >= 1) & (x <= 8)
        wanted = np.where(inside, curve(x), 0.0)
        left, right = x < 1, x > 8
        wanted[left] = curve(1.0) + curve(1.0, 1) * (x[left] - 1)
        wanted[right] = curve(8.0) + curve(8.0, 1) * (x[right] - 8)
        fit, *_ = np.linalg.lstsq(basis, wanted, rcond=None)
        np.testing.assert_allclose(basis @ fit, wanted, atol=1e-9)


def test_rare_levels_are_pooled_and_never_named():
    rng = np.random.default_rng(5)
    sites = {
        f"s{i}": pd.DataFrame({"g": rng.choice(["a", "b"], 50), "x": rng.normal(size=50), "y": rng.integers(0, 2, 50)})
        for i in range(3)
    }
    sites["s0"].loc[:1, "g"] = "secret"
    sites["s1"].loc[:9, "g"] = "c"
    sites["s2"].loc[:1, "g"] = "c"  # rare here, known from s1
    fitted = Recipe(one_hot=["g"]).fit(sites, target="y")
    assert "secret" not in fitted.text
    assert fitted.features == ["g=b", "g=c", "g=(other)", "x"]
    X, _ = fitted.table(sheet_of(sites["s2"], "s2"))
    assert X[:2, 1].tolist() == [1, 1]
    other = pd.DataFrame({"g": ["new", "b"], "x": [0.0, 1.0]})
    assert fitted.apply(other)["g=(other)"].tolist() == [1, 0]


def test_a_level_that_was_filled_in_keeps_its_name():
    sites = tables(11)
    silos = Recipe(impute={"default": "mean", "smoker": {"constant": "01"}}, one_hot=["cp", "smoker"]).prepare(
        sites, target="sick"
    )
    at = silos.feature_names.index("smoker=former") - 1  # "01" is the first, so the reference
    assert "smoker=01" not in silos.feature_names
    assert at == silos.feature_names.index("cp=4")


def test_unknown_levels_follow_the_rule():
    sites = {name: frame.dropna() for name, frame in tables().items()}
    new = pd.DataFrame({"age": [50.0], "crp": [1.0], "cp": [9.0], "smoker": ["no"]})
    with pytest.raises(fc.DataError, match=r"1 value\(s\) of 'cp' are none of its levels \(1, 2, 3, 4\)"):
        Recipe(one_hot=["cp", "smoker"]).fit(sites, target="sick").apply(new)
    found = Recipe(one_hot=["cp", "smoker"], unknown="reference").fit(sites, target="sick").apply(new)
    assert found[["cp=2", "cp=3", "cp=4"]].to_numpy().tolist() == [[0, 0, 0]]


def test_coefficients_on_the_original_scale_give_the_same_margins():
    sites = tables(6)
    recipe = Recipe(impute="mean", one_hot=["cp", "smoker"], splines={"age": 3}, interactions=[("age", "crp")])
    silos = recipe.prepare(sites, target="sick")
    plain = recipe.model_copy(update={"standardize": False}).prepare(sites, target="sick")
    rng = np.random.default_rng(0)
    w, b = rng.normal(size=silos.features.shape[1]), 0.7
    original, intercept = silos.recipe.original(w, b)
    np.testing.assert_allclose(silos.features.numpy() @ w + b, plain.features.numpy() @ original + intercept, atol=1e-9)
    W, B = rng.normal(size=(len(w), 3)), rng.normal(size=3)
    original, intercept = silos.recipe.original(W, B)
    np.testing.assert_allclose(silos.features.numpy() @ W + B, plain.features.numpy() @ original + intercept, atol=1e-9)


def test_a_fitted_recipe_survives_json_and_prepares_new_patients(tmp_path):
    sites = tables(7)
    silos = Recipe(impute="median", one_hot=["cp", "smoker"], splines={"age": 3}, indicators=["crp"]).prepare(
        sites, target="sick"
    )
    silos.recipe.write(tmp_path / "recipe.json")
    read = FittedRecipe.read(tmp_path / "recipe.json")
    assert read == silos.recipe
    new = sites["site 1"].drop(columns="sick")
    new.to_csv(tmp_path / "new.csv", index=False)
    for source in (new, tmp_path / "new.csv"):
        np.testing.assert_array_equal(read.apply(source).to_numpy(), silos[1][0].numpy())
    content = json.loads(read.text)
    content["steps"][0]["kind"] = "exec"
    (tmp_path / "recipe.json").write_text(json.dumps(content))
    with pytest.raises(fc.DataError, match=r"recipe\.json: steps"):
        FittedRecipe.read(tmp_path / "recipe.json")


def test_a_held_out_table_teaches_nothing():
    sites = tables(8)
    held = sites.pop("site 2")
    recipe = Recipe(impute="mean", one_hot=["cp", "smoker"])
    silos = recipe.prepare(sites, target="sick", test=held)
    assert silos.recipe == recipe.prepare(sites, target="sick").recipe
    assert len(silos.test[1]) == 80
    np.testing.assert_array_equal(silos.test[0].numpy(), silos.recipe.apply(held).to_numpy())
    assert silos.standardize().recipe == silos.recipe


def test_a_share_is_held_out_at_every_site_and_teaches_nothing():
    sites = tables()
    recipe = Recipe(impute="mean", one_hot=["cp", "smoker"])
    silos = recipe.prepare(sites, target="sick", test=0.2, seed=3)
    assert silos.sizes.tolist() == [48, 36, 64]
    X, y = silos.test
    owner = silos.held_by["test"].numpy()
    assert np.bincount(owner).tolist() == [12, 9, 16]
    again = silos.recipe.silos([sheet_of(frame, name) for name, frame in sites.items()])
    for i, name in enumerate(sites):  # train and test together are the site's rows
        both = np.concatenate([silos[i][0].numpy(), X.numpy()[owner == i]])
        np.testing.assert_allclose(np.sort(both, 0), np.sort(again[i][0].numpy(), 0), atol=1e-12)
        assert float(silos[i][1].sum() + y[torch.from_numpy(owner == i)].sum()) == sites[name]["sick"].sum()
    np.testing.assert_allclose(silos.features.double().mean(0)[:2], 0, atol=1e-12)  # learned from what is left alone
    other = recipe.prepare(sites, target="sick", test=0.2, seed=4)
    assert not torch.equal(silos.features, other.features)
    with pytest.raises(fc.data.DataError, match=r"test = 1\.5, must be a share"):
        recipe.prepare(sites, target="sick", test=1.5)


def test_all_that_does_not_fit_is_told_at_once():
    sites = tables()
    sites["site 1"] = (
        sites["site 1"].drop(columns="crp").assign(visit="2020-01-0" + pd.Series(range(45)).mod(9).add(1).astype(str))
    )
    with pytest.raises(fc.DataError) as caught:
        Recipe().fit(sites, target="sick")
    said = str(caught.value)
    for part in ("site 0: no column 'visit'", "site 1: no column 'crp'", "'smoker': is text", "'visit': holds dates"):
        assert part in said
    with pytest.raises(fc.DataError, match=r"missing values in 'age' \(\d+\), 'crp' \(\d+\), 'cp'"):
        Recipe(drop=["smoker"]).fit(tables(), target="sick")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"standardise": True}, "recipe: standardise is not a known field; did you mean 'standardize'"),
        ({"splines": {"age": 9}}, "splines: age = 9, must be 3 to 7 knots"),
        ({"one_hot": ["cp"], "log": ["cp"]}, "log: 'cp' is also in one_hot"),
        ({"min_count": 0}, "recipe: min_count"),
        ({"sites": {"a": {"unit": {}}}}, "recipe: sites.a.unit is not a known field; did you mean 'units'"),
    ],
)
def test_a_recipe_that_makes_no_sense_is_refused_in_one_line(fields, message):
    with pytest.raises(fc.DataError) as caught:
        Recipe(**fields)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_names_that_nobody_has_are_refused():
    for fields in (
        {"drop": ["agee"]},
        {"impute": {"agee": "mean"}},
        {"sites": {"site 9": {}}},
        {"splines": {"agee": 3}},
    ):
        with pytest.raises(fc.DataError, match="did you mean"):
            Recipe(**fields).fit(tables(), target="sick")


def test_absent_columns_and_targets():
    sites = tables(9)
    sites["site 2"] = sites["site 2"].drop(columns="crp")
    sites["site 0"] = sites["site 0"].astype({"sick": object})
    for frame in sites.values():
        frame["sick"] = frame["sick"].map({0: "healthy", 1: "ill"})
    sites["site 0"].loc[0, "sick"] = None
    recipe = Recipe(
        absent="missing",
        impute="mean",
        one_hot=["cp", "smoker"],
        target={"ill": 1, "healthy": -1},
        missing_target="drop",
    )
    silos = recipe.prepare(sites, target="sick")
    assert silos.sizes.tolist() == [59, 45, 80]
    assert set(silos.targets.tolist()) == {-1.0, 1.0}
    crp = pd.concat([sites["site 0"]["crp"].iloc[1:], sites["site 1"]["crp"]]).mean()
    step = next(step for step in silos.recipe.steps if step.kind == "impute")
    assert step.values["crp"] == pytest.approx(crp, rel=1e-14)
    with pytest.raises(fc.DataError, match="1 missing value"):
        recipe.model_copy(update={"missing_target": "refuse"}).prepare(sites, target="sick")


# -- queries ----------------------------------------------------------------------------------------------------------


def captured(recipe, sites, **options):
    """All that is asked and told while a recipe is learned."""
    sent = []
    sheets = [recipe.local(n).apply(sheet_of(f, n, text=recipe.one_hot_columns)) for n, f in sites.items()]
    here = TablesAtHand(sheets, **options)

    def ask(query):
        text = query.model_dump_json()
        answers = [write_answer(answer(s, parse_query(text), r)) for s, r in zip(here.sheets, here.rules, strict=True)]
        sent.append((text, answers))
        return [parse_answer(a) for a in answers]

    return recipe.learn(ask, list(sites), "sick"), sent


def test_what_travels_as_text_gives_the_same_recipe():
    sites = tables(10)
    recipe = Recipe(impute="median", one_hot=["cp", "smoker"], splines={"age": 3}, interactions=[("age", "crp")])
    fitted, sent = captured(recipe, sites)
    assert fitted == recipe.fit(sites, target="sick")
    assert {json.loads(text)["name"] for text, _ in sent} <= set(QUERIES)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([3, 5, 8]))
def test_no_count_below_the_minimum_leaves_a_site(seed, least):
    sites = tables(seed, (90, 80))
    _, sent = captured(Recipe(impute="median", one_hot=["cp", "smoker"], standardize=False), sites, rules=Rules(least))
    for text, answers in sent:
        for told in map(json.loads, answers):
            if json.loads(text)["name"] == "below":
                for key in (k for k in told if k.startswith("low:")):
                    for bound in (told[key], told[key.replace("low:", "high:")]):
                        steps = np.diff([0, *bound, told[key.replace("low:", "n:")][0]])
                        assert all(step == 0 or step >= least for step in steps)
            for key, counts in told.items():
                if key.startswith(("counts:", "rest:")):
                    assert all(c == 0 or c >= least for c in counts)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.floats(-50, 50).map(lambda v: round(v, 2)), min_size=8, max_size=40),
    st.lists(st.floats(-60, 60).map(lambda v: round(v, 2)), min_size=1, max_size=30, unique=True),
    st.sampled_from([2, 5, 8]),
)
def test_groups_of_values_hold_enough_and_hide_the_outermost(values, edges, least):
    """Whatever the edges of other histograms are: no two known counts differ by fewer than the minimum."""
    edges, values = np.array(sorted(edges)), np.sort(values)
    low, high = told_below(values, edges, least)
    true = np.searchsorted(values, edges)
    assert (low <= true).all()
    assert (true <= high).all()
    for one, a, b in zip(edges, low, high, strict=True):
        assert told_below(values, np.array([one]), least) == (np.array([a]), np.array([b]))
    every = np.unique([*edges, *values, *np.nextafter(values, np.inf), *GRID])
    below, upto = told_below(values, every, least)
    told = np.diff([0, *below[below == upto], len(values)])
    assert all(step == 0 or step >= min(least, len(values)) for step in told)
    assert (np.diff(below) >= 0).all()
    grid, counts = np.array(GRID), np.unique(values, return_counts=True)[1]
    floor, ceiling = grid[grid <= values[0]][-1], grid[grid > values[-1]][0]
    if counts[0] < least:  # nobody learns that an edge off the grid has nothing below it, but the next has
        assert all(high[j] > 0 for j in range(len(edges)) if edges[j] > floor)
    if counts[-1] < least:
        assert all(low[j] < len(values) for j in range(len(edges)) if edges[j] < ceiling)


def test_sums_over_few_are_held_back():
    rare = np.zeros(40)
    rare[:3] = 1
    frame = pd.DataFrame({"rare": rare, "few": [1.0, 2, 3] + [None] * 37, "ok": np.arange(40.0)})
    moments = QUERIES["moments"](columns=["rare", "few", "ok"])
    told = answer(sheet_of(frame, "s"), moments, Rules(5))
    assert told["withheld"].tolist() == [1, 1, 0]
    assert told["sum"].tolist() == [0, 0, 780]
    assert told["n"].tolist() == [0, 0, 40]
    with pytest.raises(fc.DataError, match=r"tell too little about 'rare'"):
        Recipe().fit({"s": frame.drop(columns="few").assign(y=rare)}, target="y")
    with pytest.raises(fc.DataError, match="fewer rows than its min_count"):
        answer(sheet_of(frame.head(4), "s"), moments, Rules(5))
    with pytest.raises(fc.DataError, match="not answered here"):
        answer(sheet_of(frame, "s"), moments, Rules(5, refuse=("moments",)))


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "rows"}', '{"name": "moments"}', "[]", "no JSON", '{"name": "below", "edges": {"a": [1, 1]}}',
        '{"name": "below", "edges": {"a": [1, "x"]}}', '{"name": "schema", "steps": [{"kind": "eval"}]}',
        '{"name": "moments", "columns": ["a"], "centres": [NaN]}', '{"name": "schema", "more": 1}',
    ],
)  # fmt: skip
def test_queries_from_outside_are_checked(text):
    with pytest.raises(fc.DataError):
        parse_query(text)


@pytest.mark.parametrize(
    "text", ["", "[]", '{"n": 1}', '{"n": [null]}', '{"n": [1e999]}', '{"n": [true]}', '{"n": [[1]]}']
)
def test_answers_from_outside_are_checked(text):
    with pytest.raises(fc.DataError):
        parse_answer(text)
