"""Multiple imputation by chained equations: by hand on pooled rows, statsmodels, Rubin's rules, complete cases."""

from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
import scipy.stats
import statsmodels.api as sm
import torch

import fedcomposite as fc
from fedcomposite.data.chained import PRIOR
from fedcomposite.regularizers import L1


def patients(n=600, seed=0):
    """Numbers, a category and a yes or no, with gaps that hang on what is seen."""
    g = np.random.default_rng(seed)
    age = g.normal(60, 10, n)
    pressure = 130 + 0.8 * (age - 60) + g.normal(0, 8, n)
    grade = np.array(["a", "b", "c"], object)[
        (np.column_stack([0 * age, (age - 60) / 8, -(pressure - 130) / 12]) + g.gumbel(size=(n, 3))).argmax(1)
    ]
    smoker = (g.random(n) < 1 / (1 + np.exp((age - 60) / 10))).astype(float)
    y = (g.random(n) < 1 / (1 + np.exp(-((age - 60) / 10 + 0.05 * (pressure - 130) - 0.5 * smoker)))).astype(float)
    whole = pd.DataFrame({"age": age, "pressure": pressure, "smoker": smoker, "grade": grade, "y": y})
    seen = whole.copy()
    seen.loc[g.random(n) < 0.15 + 0.25 * y, "pressure"] = np.nan
    seen.loc[g.random(n) < 0.2, "smoker"] = np.nan
    seen.loc[g.random(n) < 0.1 + 0.1 * (age > 60), "grade"] = None
    return whole, seen


def at_sites(frame, cuts=(250, 400)):
    ends = [0, *cuts, len(frame)]
    return {f"s{i}": frame.iloc[a:b] for i, (a, b) in enumerate(pairwise(ends))}


RECIPE = {"impute": "chained", "one_hot": ["grade"], "copies": 3, "iterations": 2, "min_count": 1}


def softmax(z):
    p = np.exp(z - z.max(1, keepdims=True))
    return p / p.sum(1, keepdims=True)


def by_hand(frame, chain, seeds, sizes, copies):
    """The same visits on the pooled rows with the parameters that were drawn; each site's rows have its own numbers."""
    age, y = ((frame[c].to_numpy(float) - chain.scale[c][0]) / chain.scale[c][1] for c in ("age", "y"))
    scale = chain.scale["pressure"]
    made = []
    for m in range(copies):
        pressure = ((frame.pressure.fillna(chain.start["pressure"]) - scale[0]) / scale[1]).to_numpy()
        smoker = frame.smoker.fillna(float(chain.start["smoker"])).to_numpy().astype(int)
        grade = frame.grade.fillna(chain.start["grade"]).map({"a": 0, "b": 1, "c": 2}).to_numpy()
        for visit, drawn in enumerate(chain.draws):
            name, one = chain.equations[visit % 3], np.array(drawn[m])
            g = [np.random.default_rng([seed, visit]) for seed in seeds]
            parts = {"age": [age], "pressure": [pressure], "smoker": [smoker], "grade": [grade == 1, grade == 2]}
            X = np.column_stack([c for k, v in parts.items() if k != name for c in v] + [y, np.ones(len(y))])
            if name == "pressure":
                noise = np.concatenate([r.normal(size=(copies, n))[m] for r, n in zip(g, sizes, strict=True)])
                new = X @ one[:-1] + one[-1] * noise
                pressure = np.where(frame.pressure.isna(), new, pressure)
                continue
            u = np.concatenate([r.random((copies, n))[m] for r, n in zip(g, sizes, strict=True)])
            z = np.column_stack([np.zeros(len(y)), X @ one.reshape(-1, X.shape[1]).T])
            place = (u[:, None] > softmax(z).cumsum(1)[:, :-1]).sum(1)
            if name == "smoker":
                smoker = np.where(frame.smoker.isna(), place, smoker)
            else:
                grade = np.where(frame.grade.isna(), place, grade)
        made.append(np.column_stack([frame.age, pressure * scale[1] + scale[0], smoker, grade == 1, grade == 2]))
    return made


def test_copies_are_those_of_pooled_rows_with_the_same_numbers():
    _, seen = patients()
    sheets = fc.Recipe(**RECIPE, standardize=False)
    silos = sheets.prepare(at_sites(seen), target="y", seed=4)
    chain = next(step for step in silos.recipe.steps if step.kind == "chained").chain
    assert set(chain.equations) == {"pressure", "smoker", "grade"}
    assert chain.columns["smoker"] == ["0", "1"]
    seeds = [int(np.random.SeedSequence([4, i]).generate_state(1, np.uint64)[0]) for i in range(3)]
    for mine, theirs in zip(silos.copies, by_hand(seen, chain, seeds, [250, 150, 200], 3), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-8, atol=1e-8)
    assert silos.recipe.gaps == {c: int(seen[c].isna().sum()) for c in ("pressure", "smoker", "grade")}
    gone = seen.pressure.isna().to_numpy()
    first, second = (one[:, 1].numpy() for one in silos.copies[:2])
    assert (first[~gone] == seen.pressure[~gone]).all()
    assert (first[gone] != second[gone]).all()


def test_parameters_are_drawn_from_their_posterior():
    """Of a column with gaps alone, whose model does not change from visit to visit: many copies, statsmodels."""
    whole, _ = patients()
    g = np.random.default_rng(1)
    seen = whole.drop(columns="grade")
    seen.loc[g.random(600) < 0.3, "pressure"] = np.nan
    recipe = fc.Recipe(impute="chained", copies=100, iterations=1, min_count=1)
    fitted = recipe.fit(at_sites(seen), target="y", seed=1)
    chain = next(step for step in fitted.steps if step.kind == "chained").chain
    there = seen.dropna()
    scaled = {k: (there[k] - chain.scale[k][0]) / chain.scale[k][1] for k in there}
    X = np.column_stack([scaled["age"], scaled["smoker"], scaled["y"], np.ones(len(there))])
    oracle = sm.OLS(scaled["pressure"], X).fit()
    draws = np.array(chain.draws[0])
    error = oracle.bse.to_numpy() / np.sqrt(len(draws))
    assert (np.abs(draws[:, :-1].mean(0) - oracle.params) < 4 * error + PRIOR / len(there)).all()
    np.testing.assert_allclose(draws[:, :-1].std(0), oracle.bse, rtol=0.35)
    np.testing.assert_allclose((draws[:, -1] ** 2).mean(), oracle.scale, rtol=0.05)


def test_rubins_rules():
    g = np.random.default_rng(0)
    q, u = g.normal(size=(7, 3)), g.random((7, 3)) + 0.5
    found = fc.combine_imputations(q, np.sqrt(u), df=40)
    b, n = q.var(0, ddof=1), 40
    t = u.mean(0) + 8 / 7 * b
    share = 8 / 7 * b / t
    v = 6 / share**2
    w = (1 - share) * n * (n + 1) / (n + 3)
    df = v * w / (v + w)
    np.testing.assert_allclose(found.estimate, q.mean(0))
    np.testing.assert_allclose(found.se, np.sqrt(t))
    np.testing.assert_allclose(found.df, df)
    np.testing.assert_allclose(found.upper, q.mean(0) + scipy.stats.t.ppf(0.975, df) * np.sqrt(t))
    np.testing.assert_allclose(found.p, 2 * scipy.stats.t.sf(np.abs(q.mean(0) / np.sqrt(t)), df))
    alike = fc.combine_imputations(np.ones((3, 1)), np.ones((3, 1)))
    np.testing.assert_allclose(alike[["lower", "upper"]], [[1 - 1.959964, 1 + 1.959964]], rtol=1e-6)


@pytest.fixture(scope="module")
def imputed():
    _, seen = patients()
    silos = fc.Recipe(**RECIPE).prepare(at_sites(seen), target="y")
    return fc.Problem(silos, bias=True, weights="samples", regularizer=L1(0.01))


def test_tables_of_results_are_rubins_of_every_copy(imputed):
    oracles = [
        sm.Logit(imputed.silos.targets.numpy(), np.column_stack([X.numpy(), np.ones(600)])).fit(disp=0, tol=1e-14)
        for X in imputed.silos.copies
    ]
    q, se = np.stack([one.params for one in oracles]), np.stack([one.bse for one in oracles])
    expected = fc.combine_imputations(q, se, df=600 - 6)
    found = fc.confidence(imputed, torch.zeros(6), jeffreys=0)
    for name in ("estimate", "se", "lower", "upper", "p", "df", "missing_share"):
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(found.odds_ratio, np.exp(expected.estimate), rtol=1e-6)
    np.testing.assert_allclose(found.unit_z[:-1], found.z[:-1], rtol=1e-6)
    V = fc.covariance(imputed, torch.zeros(6), jeffreys=0)
    np.testing.assert_allclose(np.sqrt(np.diag(V)), found.se, rtol=1e-6)
    one = fc.wald_test(imputed, ["pressure"]).loc["pressure"]
    np.testing.assert_allclose(one["statistic"], found.z["pressure"] ** 2, rtol=1e-6)
    with pytest.raises(ValueError, match="wald_test"):
        fc.likelihood_ratio_test(imputed)


def test_paths_and_cross_validations_are_those_of_all_copies_together(imputed):
    stacked = [
        (torch.cat([X[a:b] for X in imputed.silos.copies]).numpy(), imputed.silos.targets[a:b].repeat(3).numpy())
        for a, b in ((0, 250), (250, 400), (400, 600))
    ]
    pooled = fc.Problem(fc.Silos.from_arrays(stacked), bias=True, weights="samples", regularizer=L1(0.01))
    mine, theirs = (fc.path(one, lambdas=[0.1, 0.03, 0.01]) for one in (imputed, pooled))
    np.testing.assert_allclose(mine.solutions, theirs.solutions, atol=1e-8)
    assert mine.samples == 600
    cv = fc.cross_validate(imputed, folds=3, count=8, seed=1)
    each = [
        fc.cross_validate(
            fc.Problem(
                fc.Silos.from_arrays(
                    [
                        (X[a:b].numpy(), imputed.silos.targets[a:b].numpy())
                        for a, b in ((0, 250), (250, 400), (400, 600))
                    ]
                ),
                bias=True,
                weights="samples",
                regularizer=L1(0.01),
            ),
            folds=3,
            lambdas=cv.lambdas.tolist(),
            seed=1,
        )
        for X in imputed.silos.copies
    ]
    assert np.abs(cv.mean - np.mean([one.mean for one in each], axis=0)).max() < 0.02
    found = fc.analyse(imputed, "path", count=5)
    assert "missing_share" in found.intervals
    assert found.quality.table.loc["all", "samples"] == 600


def test_complete_cases_are_the_rows_without_gaps():
    _, seen = patients()
    silos = fc.Recipe(impute={"default": "complete"}, one_hot=["grade"], standardize=False).prepare(
        at_sites(seen), target="y"
    )
    left = seen.dropna()
    np.testing.assert_allclose(silos.features[:, 0], left.age)
    assert silos.recipe.rows == len(left)


def test_new_patients_are_filled_without_their_outcome_and_a_recipe_reads_back():
    _, seen = patients()
    silos = fc.Recipe(**RECIPE, standardize=False).prepare(at_sites(seen), target="y", test=0.2)
    again = fc.FittedRecipe.parse(silos.recipe.text)
    new = again.apply(seen.head(50).drop(columns="y"))
    pd.testing.assert_frame_equal(new, again.apply(seen.head(50)))
    chain = next(step for step in again.steps if step.kind == "chained").chain
    assert (new.pressure[seen.head(50).pressure.isna()] == chain.start["pressure"]).all()


def test_few_gaps_are_filled_by_the_sites_own_values_and_few_patterns_are_left_out():
    _, seen = patients()
    few = seen.copy()
    few["grade"] = few["grade"].fillna("a")
    few["smoker"] = few["smoker"].fillna(0.0)
    few.loc[few.index[[3, 9]], "smoker"] = np.nan  # at the first site
    few.loc[few.index[260:280], "smoker"] = np.nan
    recipe = fc.Recipe(**{**RECIPE, "min_count": 5})
    silos = recipe.prepare(at_sites(few), target="y")
    chosen = {float(one[i, 2]) for one in silos.copies for i in (3, 9)}
    assert len({float(one[3, 2]) for one in silos.copies}) == 1
    assert chosen <= set(np.unique(silos.copies[0][:, 2].numpy()).tolist())


def test_the_benchmark_runs_and_means_are_those_of_statsmodels(capsys):
    from benchmarks import imputation

    found = imputation.coverage(1, 0, 2)
    assert set(found.index.get_level_values("way")) == set(imputation.WAYS)
    one = imputation.beside_statsmodels(600, 0, 10).iloc[0]
    assert abs(one["ours"] - one["statsmodels"]) < 4 * one["error"]
