"""Coefficients of each site that share a core: equal to a pooled solver on features written out by hand."""

import json
import tomllib

import cvxpy as cp
import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
import tomli_w
import torch
from analyst import PLAIN, inquiry
from local_federation import opened
from secure_sites import secure_tables
from sklearn.linear_model import Lasso, LogisticRegression
from typer.testing import CliRunner

import fedcomposite as fc
from fedcomposite import regularizers as reg
from fedcomposite.cli.main import app
from fedcomposite.data import DataError
from fedcomposite.federation.coordinator import inquiry as inquiries
from fedcomposite.federation.coordinator.delivery import FederationError, Settings
from fedcomposite.federation.site.client_states import StateStore
from fedcomposite.federation.site.table_files import TableFile
from fedcomposite.federation.site.table_site import TableSite
from fedcomposite.runtime import Driver

SITES = ("north", "south", "west")
TERMS = {
    "l1": lambda d: cp.norm1(d),
    "group": lambda d: np.sqrt(3) * sum(cp.norm(d[j]) for j in range(3)),
    "fused": lambda d: (cp.norm1(d) + sum(cp.norm1(d[:, i] - d[:, k]) for i, k in ((0, 1), (0, 2), (1, 2))) / 3) / 2,
}


@pytest.fixture(scope="module")
def frames():
    rng, made = np.random.default_rng(0), {}
    for k, name in enumerate(SITES):
        frame = pd.DataFrame({"age": rng.normal(60, 8, 90), "bmi": rng.normal(26, 4, 90)})
        frame["sex"] = rng.choice(["f", "m"], 90)
        z = (0.1 if name == "west" else 0.02) * (frame["age"] - 60) + 0.1 * (frame["bmi"] - 26) + 0.3 * (k - 1)
        frame["cost"] = np.round(z + rng.normal(0, 1, 90), 3)
        frame["sick"] = (rng.random(90) < 1 / (1 + np.exp(-z))).astype(int)
        made[name] = frame
    return made


def made(frames, target="sick", **more):
    tables = {k: v.drop(columns="cost" if target == "sick" else "sick") for k, v in frames.items()}
    return fc.Recipe(one_hot=["sex"], per_site=True, **more).prepare(tables, target=target)


def written_out(frames, target="sick"):
    """The features of all samples, and beside each one for every site, by hand."""
    pooled = pd.concat(frames.values(), ignore_index=True)
    site = np.repeat(SITES, [len(one) for one in frames.values()])
    X = np.column_stack([(pooled[c] - pooled[c].mean()) / pooled[c].std(ddof=0) for c in ("age", "bmi")])
    X = np.column_stack([X, pooled["sex"] == "m"])
    each = [X[:, j] * (site == name) for j in range(3) for name in SITES]
    return np.column_stack([X, *each]), pooled[target].to_numpy(float)


def problem_of(silos, kind, ratio=0.5, lam=0.03, **more):
    h = reg.L1(lam)
    return fc.Problem(
        silos, bias=True, weights="samples", regularizer=h, deviations=kind, deviation_ratio=ratio, **more
    )


@pytest.mark.parametrize("kind", TERMS)
def test_equals_a_convex_solver_on_features_written_out(frames, kind):
    Z, y = written_out(frames, "cost")
    problem = problem_of(made(frames, "cost"), kind, 0.8, loss="least_squares")
    run = fc.solve(problem, tolerance=1e-12)
    b, d, c = cp.Variable(3), cp.Variable((3, 3)), cp.Variable()
    fitted = Z[:, :3] @ b + sum(Z[:, 3 + 3 * j : 6 + 3 * j] @ d[j] for j in range(3)) + c
    value = cp.sum_squares(fitted - y) / (2 * len(y)) + 0.03 * (cp.norm1(b) + 0.8 * TERMS[kind](d))
    tight = {"tol_gap_abs": 1e-11, "tol_gap_rel": 1e-11, "tol_feas": 1e-11}
    best = cp.Problem(cp.Minimize(value)).solve(solver="CLARABEL", **tight)
    assert problem.objective(run.solution) == pytest.approx(best, rel=1e-8)
    want = np.concatenate([b.value, d.value.ravel(), [c.value]])
    np.testing.assert_allclose(run.solution, want, atol=1e-6)
    assert 0 < int((run.solution[3:12] == 0).sum()) < 9


@pytest.mark.parametrize("loss", ["least_squares", "logistic"])
def test_single_deviations_are_scikit_learns(frames, loss):
    target = "cost" if loss == "least_squares" else "sick"
    Z, y = written_out(frames, target)
    scale = np.r_[np.ones(3), np.full(9, 2.0)]  # a feature that is twice as large costs half as much
    if loss == "least_squares":
        right = Lasso(alpha=0.03, tol=1e-14, max_iter=10**6).fit(Z * scale, y)
        want, free = right.coef_ * scale, right.intercept_
    else:
        ones = np.full((len(y), 1), 1e3)  # an intercept that costs next to nothing
        right = LogisticRegression(l1_ratio=1, C=1 / (0.03 * len(y)), solver="saga", tol=1e-12, max_iter=10**5)
        right = right.fit(Z * scale, y)
        want, free = right.coef_[0] * scale, right.intercept_[0]
        del ones
    x = fc.solve(problem_of(made(frames, target), "l1", loss=loss), tolerance=1e-12).solution
    np.testing.assert_allclose(x[:-1], want, atol=1e-8)
    np.testing.assert_allclose(x[-1], free, atol=1e-8)


def test_a_path_varies_both_strengths_and_a_site_that_is_left_out_has_the_core(frames):
    problem = problem_of(made(frames), "group", lam=1.0, loss="logistic")
    found = fc.path(problem, count=6, ratio=0.05)
    assert found.nonzeros[0] == 0
    for lam, x in zip(found.lambdas, found.solutions, strict=True):
        one = problem_of(problem.silos, "group", lam=float(lam), loss="logistic")
        assert one.optimality(x) < 1e-7
    left = fc.cross_validate(problem, folds="sites", count=4, ratio=0.05)
    names = list(problem.coordinate_names)
    for i, site in enumerate(SITES):
        own = [names.index(f"{term}@{site}") for term in ("age", "bmi", "sex=m")]
        assert (left.models[i][:, own] == 0).all()
        assert bool((left.path.solutions[:, own] != 0).any())


def test_factors_and_other_terms_hold_for_the_core(frames):
    silos = made(frames, site=True)
    problem = problem_of(silos, "l1", loss="logistic", penalty_factor={"age": 0, "site": 0})
    run = fc.solve(problem, tolerance=1e-11)
    names = list(problem.coordinate_names)
    assert not [n for n in names if n.startswith("site=") and "@" in n]
    g = problem.gradient(run.solution)
    free = [names.index(n) for n in ("age", "site=south", "site=west", "(intercept)")]
    assert float(g[free].abs().max()) < 1e-10
    held = [j for j, n in enumerate(names) if "@" in n]
    assert float(g[held].abs().max()) <= 0.015 + 1e-9
    scad = fc.Problem(silos, bias=True, regularizer=reg.SCAD(1.0, kappa=0.02), deviations="fused")
    assert fc.path(scad, count=3).converged.all()


def test_new_patients_have_their_sites_coefficients_or_the_common_ones(frames, tmp_path):
    problem = problem_of(made(frames), "group", loss="logistic")
    found = fc.analyse(problem, "fit")
    found.save(tmp_path / "run")
    table = fc.site_coefficients(problem, found.x)
    assert list(table.columns) == ["common", *SITES]
    X = problem.silos["west"][0]
    frames["west"].drop(columns=["cost"]).to_csv(tmp_path / "west.csv", index=False)
    frames["west"].drop(columns=["cost"]).to_csv(tmp_path / "nowhere.csv", index=False)
    for name, column in (("west", "west"), ("nowhere", "common")):
        margin = fc.predict(tmp_path / "run", tmp_path / f"{name}.csv").table["margin"]
        np.testing.assert_allclose(margin, X[:, :3].numpy() @ table[column] + float(found.x[-1]), atol=1e-12)
    units = fc.site_coefficients(problem, found.x, unit=True)
    sd = pd.concat(frames.values())["age"].std(ddof=0)
    np.testing.assert_allclose(units.loc["age"] * sd, table.loc["age"])


def test_intervals_are_of_whole_coefficients_and_of_their_mean(frames):
    problem = problem_of(made(frames), "l1", loss="logistic")
    Z, y = written_out(frames)
    right = sm.Logit(y, np.column_stack([Z[:, 3:], np.ones(len(y))])).fit(disp=0, method="newton", tol=1e-14)
    x = fc.solve(problem).solution
    found = fc.confidence(problem, x, jeffreys=0)
    own = [f"{term}@{site}" for term in ("age", "bmi", "sex=m") for site in SITES]
    np.testing.assert_allclose(found.loc[own, "estimate"], right.params[:9], atol=1e-8)
    np.testing.assert_allclose(found.loc[own, "se"], right.bse[:9], rtol=1e-8)
    mean = np.kron(np.eye(3), np.full((1, 3), 1 / 3))
    np.testing.assert_allclose(found["estimate"][:3], mean @ right.params[:9], atol=1e-8)
    np.testing.assert_allclose(found["se"][:3], np.diag(mean @ right.cov_params()[:9, :9] @ mean.T) ** 0.5, rtol=1e-8)
    whole = fc.site_coefficients(problem, x).loc["age", "west"]
    assert found.loc["age@west", "coefficient"] == pytest.approx(whole)


@pytest.mark.parametrize("secure", [False, True])
def test_at_sites(frames, tmp_path, secure):
    files = {name: tmp_path / f"{name}.csv" for name in SITES}
    for name, path in files.items():
        frames[name].drop(columns="cost").to_csv(path, index=False)
    recipe = {"one_hot": ["sex"], "site": True, "per_site": ["age", "sex"]}
    content = tomllib.loads(PLAIN)
    content["problem"] |= {"deviations": "group", "deviation_ratio": 0.7, "penalty_factor": {"site": 0.0}}
    text = tomli_w.dumps({**content, "recipe": recipe})
    here = fc.Recipe(**recipe).prepare(list(files.values()), target="sick")
    given = {"deviations": "group", "deviation_ratio": 0.7, "penalty_factor": {"site": 0.0}}
    h = reg.L1(0.02)
    ours = fc.analyse(fc.Problem(here, bias=True, weights="samples", regularizer=h, **given), "path", count=8)

    def asked(limits):
        if secure:
            sites, settings = secure_tables(files, tmp_path / str(limits.left_out), limits), Settings(secure=True)
        else:
            sites = [TableSite(n, StateStore(tmp_path / n), limits, source=TableFile(n, p)) for n, p in files.items()]
            settings = Settings()
        asking, _ = inquiry(sites, text, settings=settings)
        driver = Driver(asking)
        asking.recipe = inquiries.learn(driver, asking.config, "sick")
        return fc.analyse(asking.meet(driver), "path", count=8, driver=driver)

    if secure:
        with pytest.raises(FederationError, match="left_out = true"):
            asked(opened(min_count=5))
    theirs = asked(opened(min_count=5, left_out=True) if secure else opened(min_count=5))
    assert theirs.problem.coordinate_names == ours.problem.coordinate_names
    np.testing.assert_allclose(theirs.path.solutions, ours.path.solutions, atol=1e-7)
    assert int((ours.x[4:-1] != 0).sum())


def test_one_file_and_its_report(frames, tmp_path):
    files = []
    for name, frame in frames.items():
        files.append(str(tmp_path / f"{name}.csv"))
        frame.drop(columns="cost").to_csv(files[-1], index=False)
    content = {
        "data": {"files": files, "target": "sick"},
        "recipe": {"one_hot": ["sex"], "per_site": True},
        "problem": {"loss": "logistic", "bias": True, "weights": "samples", "deviations": "fused"},
        "regularizer": {"name": "L1", "lam": 0.02},
    }
    (tmp_path / "study.toml").write_text(tomli_w.dumps(content))
    run = ["path", str(tmp_path / "study.toml"), "--count", "5", "--out", str(tmp_path / "run"), "--json"]
    told = CliRunner().invoke(app, run)
    assert told.exit_code == 0, told.output
    table = pd.DataFrame(json.loads(told.stdout)["site_coefficients"]).set_index("name")
    assert list(table.columns) == ["common", *SITES]
    fc.write_report(tmp_path / "run")
    assert "age@west" in (tmp_path / "run" / "report.html").read_text()


def test_what_does_not_fit_is_refused(frames):
    silos = made(frames)
    with pytest.raises(DataError, match="per_site"):
        made(frames, **{"drop": ["age"]}) and fc.Recipe(per_site=["nothing"], drop=["sex"]).fit(frames, target="sick")
    with pytest.raises(ValueError, match="per_site = true"):
        problem_of(fc.data.load("synthetic", clients=3, features=4, samples=10), "l1")
    with pytest.raises(ValueError, match="deviations = 'l2'"):
        problem_of(silos, "l2")
    with pytest.raises(ValueError, match="strength"):
        fc.Problem(silos, bias=True, deviations="l1")
    with pytest.raises(ValueError, match="deviation_ratio"):
        problem_of(silos, "l1", ratio=0.0)
    three = {k: v.assign(sick=np.arange(len(v)) % 3) for k, v in frames.items()}
    with pytest.raises(ValueError, match="one output"):
        problem_of(made(three), "fused", loss="multinomial")
    assert torch.isfinite(fc.solve(problem_of(made(three), "group", loss="multinomial")).solution).all()
