"""Table 1: every number is that of pandas and scipy on the pooled table, at hand, at sites and in secure sums."""

import itertools
import json
import math

import numpy as np
import pandas as pd
import pytest
import tomli_w
from analyst import PLAIN, inquiry
from local_federation import opened
from scipy import stats
from secure_sites import secure_tables

import fedcomposite as fc
from fedcomposite.analysis.table_one import Wishes, table_from
from fedcomposite.data.queries import Gaps, Moments, RefusedQueryError, Rules, answer, rows_of
from fedcomposite.data.sheets import sheet_of
from fedcomposite.data.steps import Absent
from fedcomposite.federation.coordinator.delivery import FederationError, Settings
from fedcomposite.federation.coordinator.plans import plan_of
from fedcomposite.federation.shape import parse
from fedcomposite.federation.site.client_states import StateStore
from fedcomposite.federation.site.table_files import TableFile
from fedcomposite.federation.site.table_site import TableSite
from fedcomposite.runtime import Driver

MEANS, MIDDLES = ["trestbps", "thalach"], ["age", "oldpeak", "chol"]
SHARES = ["sex", "cp", "restecg", "exang"]


@pytest.fixture(scope="module")
def heart():
    frames = fc.data.frames("heart_disease")
    return frames, pd.concat([frame.assign(site=name) for name, frame in frames.items()])


def smd_of_shares(a, b):
    """Yang and Dalton's formula, by the pseudoinverse over all levels."""
    levels = sorted({*a, *b})
    p, q = (np.array([(s == one).mean() for one in levels]) for s in (a, b))
    middle = (np.diag(p) - np.outer(p, p) + np.diag(q) - np.outer(q, q)) / 2
    return math.sqrt((p - q) @ np.linalg.pinv(middle) @ (p - q))


@pytest.mark.parametrize("by", ["site", "num"])
def test_every_number_is_that_of_the_pooled_table(heart, by):
    frames, pooled = heart
    made = fc.table_one(frames, by=None if by == "site" else by, median=MIDDLES)
    numbers = made.numbers.set_index(["variable", "level", "group"])
    tests = made.tests.set_index("variable")
    groups = {"total": pooled} | {
        f"{key:g}" if by != "site" else key: part for key, part in pooled.groupby(by, sort=False)
    }
    for (name, key), (column, part) in zip(
        itertools.product([*MEANS, *MIDDLES], groups),
        itertools.product([*MEANS, *MIDDLES], groups.values()),
        strict=True,
    ):
        one, values = numbers.loc[(name, "", key)], part[column].dropna()
        assert (one["n"], one["missing"]) == (len(values), part[column].isna().sum())
        assert one["mean"] == pytest.approx(values.mean(), rel=1e-12)
        assert one["sd"] == pytest.approx(values.std(ddof=1), rel=1e-10, abs=1e-10)
        if name in MIDDLES:
            three = [one["q1"], one["median"], one["q3"]]
            np.testing.assert_allclose(three, values.quantile([0.25, 0.5, 0.75]), rtol=1e-8, atol=1e-12)
    rest = list(groups.values())[1:]
    for name in SHARES:
        for key, part in groups.items():
            for level, count in part[name].value_counts().items():
                found = numbers.loc[(name, f"{level:g}", key)]
                assert found["count"] == count
                assert found["percent"] == pytest.approx(100 * count / part[name].notna().sum())
        table = pd.crosstab(pooled[name], pooled[by])
        assert tests.loc[name, "p"] == pytest.approx(stats.chi2_contingency(table).pvalue, rel=1e-10)
        pairs = itertools.combinations([part[name].dropna() for part in rest], 2)
        assert tests.loc[name, "smd"] == pytest.approx(max(smd_of_shares(a, b) for a, b in pairs), rel=1e-8)
    for name in [*MEANS, *MIDDLES]:
        each = [part[name].dropna() for part in rest]
        found = stats.kruskal(*each) if name in MIDDLES else stats.f_oneway(*each)
        row = tests.loc[name]
        assert row["test"] == ("Kruskal-Wallis" if name in MIDDLES else "ANOVA")
        if name in MIDDLES:
            assert row["p_low"] * (1 - 1e-9) <= found.pvalue <= row["p_high"] * (1 + 1e-9)
            assert row["p"] == pytest.approx(found.pvalue, rel=5e-3)
        else:
            assert row["p"] == pytest.approx(found.pvalue, rel=1e-8)
        each = [(s.mean(), s.std()) for s in each]
        away = [abs(a - c) / math.sqrt((b**2 + d**2) / 2) for (a, b), (c, d) in itertools.combinations(each, 2)]
        assert row["smd"] == pytest.approx(max(away), rel=1e-8)


def test_two_groups_have_welch_fisher_and_yates(heart):
    frames, pooled = heart
    made = fc.table_one(frames, by="sex", columns=["age", "exang", "thal"]).tests.set_index("variable")
    men, women = (pooled[pooled["sex"] == one] for one in (0, 1))
    right = stats.ttest_ind(men["age"], women["age"], equal_var=False)
    assert tuple(made.loc["age", ["statistic", "p"]]) == pytest.approx((right.statistic, right.pvalue), rel=1e-9)
    table = pd.crosstab(pooled["exang"], pooled["sex"])
    assert made.loc["exang", "p"] == pytest.approx(stats.chi2_contingency(table).pvalue, rel=1e-10)
    few = {
        "a": pd.DataFrame({"x": [0] * 9 + [1] * 2, "y": [0, 1] * 5 + [1]}),
        "b": pd.DataFrame({"x": [1, 0], "y": [0, 1]}),
    }
    row = fc.table_one(few, by="y").tests.set_index("variable").loc["x"]
    both = pd.concat(few.values())
    assert row["test"] == "Fisher's exact"
    assert row["p"] == pytest.approx(stats.fisher_exact(pd.crosstab(both["x"], both["y"])).pvalue)


@pytest.mark.parametrize("least", [1, 5])
@pytest.mark.parametrize("seed", range(4))
def test_bounds_of_the_rank_test_hold(seed, least):
    draw = np.random.default_rng(seed)
    frames = {}
    for i, name in enumerate("abc"):
        n = int(draw.integers(30, 200))
        tied = draw.poisson(6, n) if seed % 2 else np.zeros(n)
        frames[name] = pd.DataFrame(
            {"x": draw.normal(size=n) * (seed % 2 == 0) + tied + 0.3 * i, "g": draw.integers(0, 2, n)}
        )
    for by in (None, "g"):
        row = fc.table_one(frames, by=by, median=["x"], columns=["x"], rules=Rules(least)).tests.iloc[0]
        pooled = pd.concat([frame.assign(site=name) for name, frame in frames.items()])
        right = stats.kruskal(*(part["x"] for _, part in pooled.groupby(by or "site")))
        assert row["p_low"] - 1e-12 <= right.pvalue <= row["p_high"] + 1e-12
        assert row["p_low"] <= row["p"] <= row["p_high"]
        if least == 1:
            assert row["p_high"] - row["p_low"] < 0.01
            assert row["statistic"] == pytest.approx(right.statistic, rel=1e-2)


# -- at sites ---------------------------------------------------------------------------------------------------------


def asked(folder, frames, wished, secure=False, job="job", **limits):
    """Table 1 as the sites of a federation tell it."""
    files = {}
    for name, frame in frames.items():
        files[name] = folder / f"{name}.csv"
        frame.to_csv(files[name], index=False)
    kept = opened(min_count=5, min_parties=3 if secure else 1, **limits)
    stores = {name: StateStore(folder / f"state-{name}") for name in files}
    if secure:
        sites = secure_tables(files, folder / "secure", kept)
    else:
        sites = [TableSite(n, stores[n], kept, lambda line: None, source=TableFile(n, p)) for n, p in files.items()]
    text = PLAIN + tomli_w.dumps({"recipe": {}, "table_one": wished})
    options = {"settings": Settings(secure=True)} if secure else {}
    asking, _ = inquiry(sites, text, plan=plan_of("table_one", parse(text, recipe=True)), **options)
    asking.job = job
    driver = Driver(asking)
    wishes = Wishes.of(fc.Recipe(), None, **wished)
    return table_from(lambda query: list(driver.ask([query])[0]), driver.names, wishes, together=not driver.by_site)


def numbers_of(made):
    return made.numbers.set_index(["variable", "level", "group"])


def test_sites_tell_what_their_files_would_under_their_minimum_counts(heart, tmp_path):
    frames, _ = heart
    names = ["age", "trestbps", "cp", "fbs", "num"]
    for wished in ({"median": ["age"], "columns": names}, {"median": ["age"], "columns": names, "by": "sex"}):
        place = tmp_path / str(len(wished))
        place.mkdir()
        found = asked(place, frames, wished)
        here = fc.table_one(frames, **wished, rules=Rules(5))
        pd.testing.assert_frame_equal(found.table, here.table)
        pd.testing.assert_frame_equal(found.numbers, here.numbers, rtol=1e-12)
        pd.testing.assert_frame_equal(found.tests, here.tests, rtol=1e-12)
        assert found.notes == here.notes


def test_secure_sums_have_the_total_and_groups(heart, tmp_path):
    frames, pooled = heart
    wished = {"median": ["age"], "columns": ["age", "cp", "exang"], "by": "sex"}
    found = asked(tmp_path, frames, wished, secure=True)
    here = fc.table_one(frames, **wished, rules=Rules(5))
    pd.testing.assert_frame_equal(found.numbers, here.numbers, rtol=1e-9)
    pd.testing.assert_frame_equal(found.tests, here.tests, rtol=1e-6)
    (tmp_path / "alone").mkdir()
    alone = asked(tmp_path / "alone", frames, {"columns": ["age"]}, secure=True)
    assert list(alone.table.columns) == ["variable", "total"]
    assert numbers_of(alone).loc[("age", "", "total"), "mean"] == pytest.approx(pooled["age"].mean(), rel=1e-9)


def test_a_group_of_few_is_not_told_and_neither_is_what_would_tell_it():
    frame = pd.DataFrame({"sex": ["m"] * 20 + ["f"] * 3, "age": np.arange(23.0)})
    sheet = sheet_of(frame, "north")
    assert [int(rows_of(sheet, "sex", one, Rules(5)).sum()) for one in ("m", "f")] == [0, 0]
    assert [int(rows_of(sheet, "sex", one, Rules(3)).sum()) for one in ("m", "f")] == [20, 3]
    three = sheet_of(pd.DataFrame({"sex": ["m"] * 9 + ["f"] * 6 + [None] * 2}), "north")  # two gaps: f would tell them
    assert [int(rows_of(three, "sex", one, Rules(5)).sum()) for one in ("m", "f")] == [9, 0]
    steps = [Absent(columns=["sex", "age"])]
    told = answer(sheet, Moments(columns=["age"], only=("sex", "m"), steps=steps), Rules(5))
    assert not told["n"].any()
    assert not told["sum"].any()
    with pytest.raises(ValueError, match="as it is"):
        Gaps(columns=["age"], only=("sex", "m"), repeats=True)
    with pytest.raises(RefusedQueryError):
        answer(sheet, Moments(columns=["age"], only=("sex", "m")), Rules(30))


@pytest.mark.parametrize("secure", [False, True])
def test_a_site_divides_its_rows_by_the_column_of_the_experiment_alone(heart, tmp_path, secure):
    frames, _ = heart
    files = {}
    for name, frame in frames.items():
        files[name] = tmp_path / f"{name}.csv"
        frame.to_csv(files[name], index=False)
    limits = opened(min_count=5, min_parties=3)
    sites = secure_tables(files, tmp_path / "sites", limits)
    text = PLAIN + tomli_w.dumps({"recipe": {}, "table_one": {"by": "sex"}})
    options = {"settings": Settings(secure=True)} if secure else {}
    asking, _ = inquiry(sites, text, **options)
    with pytest.raises(FederationError, match="table_one"):
        Driver(asking).ask([Moments(columns=["age"], only=("cp", "1"))])


def test_groups_of_two_jobs_do_not_tell_few_rows_apart(tmp_path):
    """By one column, then by another that is the same but for two rows."""
    draw = np.random.default_rng(0)
    frames = {}
    for name in "ab":
        sex = draw.integers(0, 2, 60)
        other = sex.copy()
        other[:2] = 1 - other[:2]
        frames[name] = pd.DataFrame({"sex": sex, "other": other, "age": draw.normal(50, 9, 60).round()})
    asked(tmp_path, frames, {"by": "sex", "columns": ["age"]})
    with pytest.raises(FederationError, match="min_count"):
        asked(tmp_path, frames, {"by": "other", "columns": ["age"]}, job="another")


# -- what it says -----------------------------------------------------------------------------------------------------


def test_what_is_odd_is_noted(heart):
    texts = {"free": [f"t{i}" for i in range(30)], "visit": ["2020-01-02"] * 30}
    frame = pd.DataFrame({"patient": [*range(1, 30), 29], "age": np.linspace(40, 80, 30), **texts})
    made = fc.table_one({"north": frame}, rules=Rules(1, max_levels=20))
    assert list(made.table["variable"]) == ["n", "patient, mean (SD)", "age, mean (SD)"]
    said = " | ".join(made.notes)
    assert "visit" in said
    assert "free" in said
    assert "north: some values of patient occur again" in said
    with pytest.raises(fc.DataError, match="sexx"):
        fc.table_one(heart[0], by="sexx")
    for names in (3, "age"):
        with pytest.raises(fc.DataError, match="median"):
            fc.table_one(heart[0], median=names)
    budget = fc.privacy.StudyBudget(epsilon=5.0, columns={"age": [20, 90], "sex": [0, 1]})
    with pytest.raises(fc.DataError, match="by"):
        fc.table_one(heart[0], by="sex", privacy=budget)
    noised = fc.table_one(heart[0], privacy=budget, columns=["age"])
    assert numbers_of(noised).loc[("age", "", "total"), "mean"] == pytest.approx(53.5, abs=2)


def test_it_is_written_as_papers_have_it(heart, tmp_path):
    made = fc.table_one(heart[0], columns=["age", "cp"], median=["age"])
    for suffix in ("tex", "md", "html", "csv"):
        text = made.write(tmp_path / f"one.{suffix}").read_text()
        assert "54 [47, 60]" in text
        assert "496 (53.9)" in text
    assert r"\quad 4 & 496 (53.9)" in made.to_latex("Patients.")
    assert r"\caption{n (\%) of those with a value, mean (standard deviation)" in made.to_latex()
    assert pd.read_csv(tmp_path / "one.csv").shape == made.table.shape
    with pytest.raises(ValueError, match="docx"):
        made.write(tmp_path / "one.docx")
    assert "2 variables, cleveland" in repr(made)


def test_the_command_and_the_report_have_it(tmp_path, cli):
    out = tmp_path / "one.md"
    done = cli(
        "data", "describe", "heart-recipe", "--table-one", "--by", "sex", "--columns", "age,cp", "--out", out, check=0
    )
    assert "496 (53.9)" in done.out
    assert "496 (53.9)" in out.read_text()
    told = json.loads(cli("data", "describe", "heart_disease", "--table-one", "--json", "--median", "age", check=0).out)
    assert told.keys() == {"schema", "table", "numbers", "tests", "notes"}
    assert "--table-one" in cli("data", "describe", "heart_disease", "--by", "sex", check=2).err
    assert ".docx" in cli("data", "describe", "heart_disease", "--table-one", "--out", "x.docx", check=2).err
    cli("fit", "heart-recipe", "--set", "table_one.by=sex", "--out", tmp_path / "run", check=0)
    cli("report", tmp_path / "run", check=0)
    for name in ("report.html", "report.tex", "report.md", "report-table-1.csv"):
        assert "53.9" in (tmp_path / "run" / name).read_text()
    for name, level in {"html": "<td>\u20034</td>", "tex": r"\quad 4 &", "md": "| &emsp;4 |"}.items():
        assert level in (tmp_path / "run" / f"report.{name}").read_text()  # below its variable
