"""Multiple imputation by chained equations: by hand at every site, statsmodels, Rubin's rules, complete cases."""

import numpy as np
import pandas as pd
import pytest
import scipy.optimize
import scipy.special
import scipy.stats
import statsmodels.api as sm
import torch
from gaps import at_sites, patients

import fedcomposite as fc
from fedcomposite.data.chained import PRIOR
from fedcomposite.regularizers import L1

RECIPE = {"impute": "chained", "one_hot": ["grade"], "copies": 3, "iterations": 2, "min_count": 1}


def softmax(z):
    p = np.exp(z - z.max(1, keepdims=True))
    return p / p.sum(1, keepdims=True)


def drawn_by_hand(X, values, B, normal, width, g):
    """Parameters of every copy: least squares, or a likelihood that a general optimiser climbs, with the prior."""
    H, best, squares = [], [], []
    for Xm, vm in zip(X, values, strict=True):
        if normal:
            one = Xm.T @ Xm
            best.append(np.linalg.solve(one + PRIOR * np.eye(width), Xm.T @ vm))
            squares.append(((vm - Xm @ best[-1]) ** 2).sum())
            H.append(one + PRIOR * np.eye(width))
            continue
        y = np.eye(vm.max() + 1 if vm.max() else 2)[vm]

        def loss(b, Xm=Xm, y=y):
            z = np.column_stack([np.zeros(len(Xm)), Xm @ b.reshape(-1, width).T])
            return scipy.special.logsumexp(z, axis=1).sum() - (z * y).sum() + PRIOR / 2 * (b**2).sum()

        def slope(b, Xm=Xm, y=y):
            p = softmax(np.column_stack([np.zeros(len(Xm)), Xm @ b.reshape(-1, width).T]))
            return ((p - y)[:, 1:].T @ Xm).ravel() + PRIOR * b

        d = B.shape[1]
        found = scipy.optimize.root(slope, scipy.optimize.minimize(loss, np.zeros(d), jac=slope).x, tol=1e-13).x
        best.append(found)
        step = 1e-6 * np.eye(d)
        H.append(np.stack([(slope(found + e) - slope(found - e)) / 2e-6 for e in step]))
    spread = np.ones(len(X))
    if normal:
        spread = np.sqrt(np.array(squares) / g.chisquare(X.shape[1] - width, size=len(X)))
    roots = np.stack([np.linalg.cholesky(np.linalg.inv((h + h.T) / 2)) for h in H])
    made = np.array(best) + spread[:, None] * np.einsum("mde,me->md", roots, g.normal(size=B.shape))
    return made, spread


def by_hand(frame, chain, seed):
    """A site's completed copies by its own rows: visits in turn, each with random numbers of its own."""
    n, m = len(frame), chain.copies
    age, y = ((frame[c].to_numpy(float) - chain.scale[c][0]) / chain.scale[c][1] for c in ("age", "y"))
    mean, sd = chain.scale["pressure"]
    pressure = np.tile(((frame.pressure.fillna(chain.start["pressure"]) - mean) / sd).to_numpy(), (m, 1))
    smoker = np.tile(frame.smoker.fillna(float(chain.start["smoker"])).to_numpy().astype(int), (m, 1))
    grade = np.tile(frame.grade.fillna(chain.start["grade"]).map({"a": 0, "b": 1, "c": 2}).to_numpy(), (m, 1))
    now = {"pressure": pressure, "smoker": smoker, "grade": grade}
    for turn in range(chain.iterations):
        for j, name in enumerate(chain.equations):
            g = np.random.default_rng([seed, int(chain.digest[:16], 16), 1, turn, j])
            parts = {"age": [np.tile(age, (m, 1))], "pressure": [pressure], "smoker": [smoker],
                     "grade": [grade == 1, grade == 2]}  # fmt: skip
            columns = [c for k, v in parts.items() if k != name for c in v]
            X = np.stack([*columns, np.tile(y, (m, 1)), np.ones((m, n))], axis=-1).astype(float)
            gone, width, outputs = frame[name].isna().to_numpy(), X.shape[2], 2 if name == "grade" else 1
            start = np.zeros((m, outputs * width))
            normal = name == "pressure"
            b, spread = drawn_by_hand(X[:, ~gone], now[name][:, ~gone], start, normal, width, g)
            if normal:
                new = np.einsum("mrk,mk->mr", X, b) + spread[:, None] * g.normal(size=(m, n))
            else:
                z = np.einsum("mrk,mok->mro", X, b.reshape(m, outputs, width))
                p = np.stack([softmax(np.column_stack([np.zeros(n), one])) for one in z]).cumsum(-1)
                new = (g.random((m, n))[..., None] > p[..., :-1]).sum(-1)
            now[name][:, gone] = new[:, gone]
    columns = [np.tile(frame.age, (m, 1)), pressure * sd + mean, smoker, grade == 1, grade == 2]
    return np.stack(columns, axis=-1)


def test_copies_are_those_of_visits_by_hand_at_every_site():
    _, seen = patients()
    sheets = fc.Recipe(**RECIPE, standardize=False)
    silos = sheets.prepare(at_sites(seen), target="y", seed=4)
    chain = next(step for step in silos.recipe.steps if step.kind == "chained").chain
    assert set(chain.equations) == {"pressure", "smoker", "grade"}
    assert chain.columns["smoker"] == ["0", "1"]
    assert not chain.borrowed
    seeds = [int(np.random.SeedSequence([4, i]).generate_state(1, np.uint64)[0]) for i in range(3)]
    each = [by_hand(frame, chain, seed) for frame, seed in zip(at_sites(seen).values(), seeds, strict=True)]
    for mine, theirs in zip(silos.copies, np.concatenate(each, axis=1), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6, atol=1e-6)
    assert silos.recipe.gaps == {c: int(seen[c].isna().sum()) for c in ("pressure", "smoker", "grade")}
    gone = seen.pressure.isna().to_numpy()
    first, second = (one[:, 1].numpy() for one in silos.copies[:2])
    assert (first[~gone] == seen.pressure[~gone]).all()
    assert (first[gone] != second[gone]).all()


def test_a_site_that_lacks_a_column_borrows_parameters_from_the_posterior_of_the_others():
    """Many copies, statsmodels on the pooled rows of the others; the site's values follow them."""
    whole, _ = patients()
    seen = whole.drop(columns="grade")
    frames = at_sites(seen)
    frames["s1"] = frames["s1"].assign(pressure=np.nan)
    recipe = fc.Recipe(impute="chained", copies=100, iterations=1, min_count=1, standardize=False)
    silos = recipe.prepare(frames, target="y", seed=1)
    chain = next(step for step in silos.recipe.steps if step.kind == "chained").chain
    assert chain.borrowed == ["pressure"]
    there = pd.concat([frames["s0"], frames["s2"]])
    scaled = {k: (there[k] - chain.scale[k][0]) / chain.scale[k][1] for k in there}
    X = np.column_stack([scaled["age"], scaled["smoker"], scaled["y"], np.ones(len(there))])
    oracle = sm.OLS(scaled["pressure"], X).fit()
    draws = np.array(chain.draws[0])
    error = oracle.bse.to_numpy() / np.sqrt(len(draws))
    assert (np.abs(draws[:, :-1].mean(0) - oracle.params) < 4 * error + PRIOR / len(there)).all()
    np.testing.assert_allclose(draws[:, :-1].std(0), oracle.bse, rtol=0.35)
    np.testing.assert_allclose((draws[:, -1] ** 2).mean(), oracle.scale, rtol=0.05)
    drawn = np.stack([one[250:400, 1].numpy() for one in silos.copies])
    assert abs(drawn.mean() - whole.pressure[250:400].mean()) < 2
    assert abs(drawn.std() / whole.pressure[250:400].std() - 1) < 0.15


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
