"""Times to an event as an analyst sees them: equal to lifelines, scikit-survival and statsmodels on pooled data."""

import itertools
import math
import os
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import fedcomposite as fc
from fedcomposite.problems.losses import Cox
from fedcomposite.regularizers import L1, MCP, ElasticNet, GroupLasso
from fedcomposite.runtime.protocol import Rows, losses, silos_of

lifelines = pytest.importorskip("lifelines")
sksurv = pytest.importorskip("sksurv")

pytestmark = pytest.mark.filterwarnings("ignore:Starting with pandas", "ignore::FutureWarning")

TIGHT = {"precision": 1e-14}


def exactly(value):
    return pytest.approx(value, rel=1e-8, abs=0.0)


def rossi():
    from lifelines.datasets import load_rossi

    table = load_rossi().astype(float)
    table["site"] = np.random.default_rng(0).integers(0, 3, len(table))
    return table


def sites_of(table, time, event, *, sites="site", **options):
    X = table.drop(columns=[time, event, sites])
    parts = [table[sites] == s for s in sorted(table[sites].unique())]
    return fc.Silos.from_arrays([(X[p], table.loc[p, [time, event]].to_numpy()) for p in parts], **options)


@pytest.fixture(scope="module")
def table():
    return rossi()


@pytest.fixture(scope="module")
def problem(table):
    return fc.Problem(sites_of(table, "week", "arrest"), loss="cox", loss_options={"ties": "efron"}, weights="samples")


@pytest.fixture(scope="module")
def solution(problem):
    return fc.solve(problem, tolerance=1e-13).solution


@pytest.fixture(scope="module")
def lifelines_fit(table):
    return lifelines.CoxPHFitter().fit(table, "week", "arrest", strata=["site"], fit_options=TIGHT)


@pytest.fixture(scope="module")
def plain():
    """Three sites with features about zero, and the table of :func:`confidence`."""
    rng, data = np.random.default_rng(0), []
    for m in (60, 50, 40):
        X = rng.normal(size=(m, 3))
        time, last = rng.exponential(size=m) * np.exp(-0.7 * X[:, 0] + 0.3 * X[:, 2]), 2 * rng.exponential(size=m)
        data.append((X, np.c_[np.minimum(time, last), time <= last]))
    problem = of(data)
    return data, fc.confidence(problem, fc.solve(problem, tolerance=1e-13).solution)


def of(data, h=None, **options):
    return fc.Problem(fc.Silos.from_arrays(data), loss="cox", regularizer=h, weights="samples", **options)


# -- coefficients -----------------------------------------------------------------------------------------------------


def test_coefficients_and_errors_are_those_of_lifelines(table, problem, solution, lifelines_fit):
    found = fc.confidence(problem, solution, jeffreys=0)  # the maximum as it is: 16 events per coefficient
    assert np.abs(found["estimate"] - lifelines_fit.params_).max() < 1e-8
    assert np.abs(found["se"] - lifelines_fit.standard_errors_).max() < 1e-8
    np.testing.assert_allclose(found["hazard_ratio"], np.exp(lifelines_fit.params_[found.index]), rtol=1e-8)
    np.testing.assert_allclose(found["p"], lifelines_fit.summary.loc[found.index, "p"], atol=1e-8)
    assert -problem.objective(solution) * len(table) == pytest.approx(lifelines_fit.log_likelihood_, rel=1e-12)
    apart = table.assign(week=table["week"] + np.random.default_rng(0).uniform(0, 0.5, len(table)))
    silos = sites_of(apart, "week", "arrest")
    own = fc.Problem(silos, loss="cox", loss_options={"ties": "efron"}, weights="samples")
    robust = lifelines.CoxPHFitter().fit(apart, "week", "arrest", strata=["site"], robust=True, fit_options=TIGHT)
    made = fc.confidence(own, fc.solve(own, tolerance=1e-13).solution, robust=True)
    assert np.abs(made["se"] - robust.standard_errors_).max() < 1e-8


def test_weights_are_those_of_lifelines(table):
    weights = np.random.default_rng(1).uniform(0.5, 2.0, len(table))
    each = [weights[table["site"] == s] for s in range(3)]
    silos = sites_of(table, "week", "arrest", weights=each)
    problem = fc.Problem(silos, loss="cox", loss_options={"ties": "efron"}, weights="samples")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pooled = lifelines.CoxPHFitter().fit(
            table.assign(w=weights), "week", "arrest", strata=["site"], weights_col="w", robust=True, fit_options=TIGHT
        )
    found = fc.solve(problem, tolerance=1e-13).solution.numpy()
    assert np.abs(found - pooled.params_.to_numpy()).max() < 1e-8


@pytest.mark.parametrize("name", ["lung", "tcga_brca"])
def test_real_sites_are_those_of_lifelines(name):
    path = Path(os.environ.get("FEDCOMPOSITE_DATA", "")) / "multicentre" / f"{name}.csv.gz"
    if not path.is_file():
        pytest.skip(f"{path} is not at hand")
    table = pd.read_csv(path)
    if name == "lung":
        table = table[["inst", "time", "status", "age", "sex", "ph.ecog", "wt.loss"]].dropna()
        table = table.rename(columns={"inst": "site"}).assign(status=table["status"] - 1.0)
    else:
        kept = ["age_at_index", "race_white", "ajcc_pathologic_t_T2", "morphology_8500/3", "treatment_or_therapy_yes"]
        table = table[["site", "T", "E", *kept]].rename(columns={"T": "time", "E": "status"}).astype(float)
        table = table[table["time"] > 0]
    problem = fc.Problem(
        sites_of(table, "time", "status"), loss="cox", loss_options={"ties": "efron"}, weights="samples"
    )
    pooled = lifelines.CoxPHFitter().fit(table, "time", "status", strata=["site"], fit_options=TIGHT)
    found = fc.confidence(problem, fc.solve(problem, tolerance=1e-13).solution)
    assert np.abs(found["estimate"] - pooled.params_).max() < 1e-8
    assert np.abs(found["se"] - pooled.standard_errors_).max() < 1e-8


@pytest.mark.parametrize("terms", [{"splines": {"age": 4}}, {"interactions": [("site", "age")]}, {"per_site": ["age"]}])
def test_splines_and_site_terms_are_those_of_statsmodels(terms):
    """Of the same columns, made by hand where that is short; what a baseline takes up has no estimate."""
    from statsmodels.duration.hazard_regression import PHReg

    tables = fc.data.frames("survival")
    options = {
        "one_hot": {"stage": "I"},
        "drop": ["patient", "receptor", "treated", "nodes"],
        "site": "interactions" in terms,
    }
    recipe = fc.Recipe(time="months", target={"yes": 1, "no": 0}, standardize="splines" in terms, **options, **terms)
    silos = recipe.prepare(tables, target="died")
    problem = fc.Problem(silos, loss="cox", loss_options={"ties": "efron"}, weights="samples")
    run = fc.solve(problem, tolerance=1e-13)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fc.analysis.UndeterminedWarning)
        found = fc.confidence(problem, run, jeffreys=0)
    pooled = pd.DataFrame(silos.features.numpy(), columns=silos.feature_names)
    if "per_site" in terms:  # whole slopes of each site
        pooled = pooled.drop(columns="age")
    pooled = pooled.drop(columns=[c for c in pooled if c.startswith("site=") and ":" not in c])
    at = np.repeat(np.arange(len(silos)), silos.sizes)
    if "site" in str(terms):
        age = np.concatenate([t["age"].to_numpy(float) for t in tables.values()])
        for k, name in enumerate(tables):
            for column in (f"age@{name}", f"site={name}:age"):
                if column in pooled:
                    np.testing.assert_allclose(pooled[column], age * (at == k))
    time, event = silos.targets.numpy().T
    model = PHReg(time, pooled.to_numpy(), event, strata=at, ties="efron")  # from zero its steps lead away
    fitted = model.fit(
        start_params=found.loc[list(pooled), "estimate"].to_numpy() * 0.9, method="newton", disp=0, tol=1e-14
    )
    names = list(pooled)
    np.testing.assert_allclose((found.loc[names, "estimate"] - fitted.params) / fitted.bse, 0, atol=1e-8)
    np.testing.assert_allclose(found.loc[names, "se"], fitted.bse, rtol=1e-8)
    bare = [c for c in silos.feature_names if c.startswith("site=") and ":" not in c]
    assert found.loc[bare, "estimate"].isna().all()


@pytest.mark.parametrize("ties", ["breslow", "efron"])
def test_recurrent_events_are_those_of_statsmodels(ties):
    """Patients with several intervals (start, stop]; statsmodels counts who enters at a time as at risk then."""
    from statsmodels.duration.hazard_regression import PHReg

    rng = np.random.default_rng(0)
    rows = []
    for patient in range(120):
        x, start = rng.normal(size=2), 0.0
        for _ in range(rng.integers(1, 4)):
            stop = start + max(1.0, round(rng.exponential(5 * math.exp(-0.5 * x[0]))))
            rows.append([*x, start, stop, float(rng.uniform() < 0.7), patient % 2])
            start = stop
    X, start, stop, event, site = np.split(np.array(rows), [2, 3, 4, 5], axis=1)
    y = np.c_[stop, event, start]
    parts = [site[:, 0] == s for s in range(2)]
    problem = fc.Problem(
        fc.Silos.from_arrays([(X[p], y[p]) for p in parts]), loss="cox", loss_options={"ties": ties}, weights="samples"
    )
    pooled = PHReg(stop[:, 0], X, event[:, 0], entry=start[:, 0] + 1e-3, strata=site[:, 0], ties=ties).fit(
        method="newton", disp=0, tol=1e-14
    )
    found = fc.solve(problem, tolerance=1e-13).solution.numpy()
    assert np.abs(found - pooled.params).max() < 1e-8


@pytest.mark.parametrize("name", ["recur", "stanford_heart_transplants"])
def test_patients_with_several_rows_are_those_of_lifelines(name):
    """Episodes of 400 patients over their follow-up; transplants during it. Tied events in Efron's way."""
    table = getattr(lifelines.datasets, f"load_{name}")().astype(float).rename(columns=str.lower)
    table = table.rename(columns={"time0": "start", "time1": "stop"})
    if name == "recur":  # what was the event's number is not known before
        table = table.drop(columns="event").rename(columns={"censor": "event"})
        table = table[table["stop"] > table["start"]]
    table["site"] = table["id"] % 3
    features = [c for c in table if c not in ("id", "start", "stop", "event", "site")]
    pooled = lifelines.CoxTimeVaryingFitter().fit(
        table, "event", "start", "stop", id_col="id", strata=["site"], fit_options={"precision": 1e-12}
    )
    parts = [table[table["site"] == s] for s in range(3)]
    silos = fc.Silos.from_arrays([(p[features], p[["stop", "event", "start"]].to_numpy()) for p in parts])
    problem = fc.Problem(silos, loss="cox", loss_options={"ties": "efron"}, weights="samples")
    found = fc.confidence(problem, fc.solve(problem, tolerance=1e-13).solution, jeffreys=0)
    assert np.abs(found["estimate"] - pooled.params_[found.index]).max() < 1e-8
    assert np.abs(found["se"] - pooled.standard_errors_[found.index]).max() < 1e-8
    assert -problem.objective(torch.tensor(found["estimate"].to_numpy())) * len(table) == exactly(
        pooled.log_likelihood_
    )


def test_gbsg2_is_that_of_lifelines():
    from sksurv.datasets import load_gbsg2

    X, y = load_gbsg2()
    table = pd.get_dummies(X, drop_first=True).astype(float).assign(time=y["time"], cens=y["cens"].astype(float))
    table["site"] = np.arange(len(table)) % 4
    silos = sites_of(table, "time", "cens")
    problem = fc.Problem(silos, loss="cox", loss_options={"ties": "efron"}, weights="samples")
    pooled = lifelines.CoxPHFitter().fit(table, "time", "cens", strata=["site"], fit_options=TIGHT)
    found = fc.confidence(problem, fc.solve(problem, tolerance=1e-13).solution)
    assert np.abs(found["estimate"] - pooled.params_).max() < 1e-8
    assert np.abs(found["se"] - pooled.standard_errors_).max() < 1e-8


def test_a_maximum_of_the_likelihood_needs_events(plain):
    """Not samples: with fewer than two events for each coefficient, two steps from the regularized model."""
    data, _ = plain
    events = int(sum(y[:, 1].sum() for _, y in data))
    rng = np.random.default_rng(4)
    for number, way in ((events // 2 - 12, "exact"), (events // 2 + 1, "nodewise")):
        problem = of([(rng.normal(size=(len(y), number)), y) for _, y in data], L1(0.05))
        x = fc.solve(problem)
        pd.testing.assert_frame_equal(fc.confidence(problem, x), fc.confidence(problem, x, inverse=way))


# -- the bias of a maximum of the likelihood --------------------------------------------------------------------------


@pytest.mark.parametrize("ties", ["breslow", "efron"])
def test_the_bias_that_is_taken_off_is_that_of_loops(ties):
    """Half of M times the slope of tr(M J) - tr(V H), from sums over samples by loops; in units of any size."""
    rng, data = np.random.default_rng(2), []
    for m in (40, 25):
        X = rng.normal(size=(m, 4))
        time = np.ceil(9 * rng.exponential(size=m) * np.exp(-0.7 * X[:, 0]))
        data.append((X * (1.0, 1.0, 100.0, 0.01), np.c_[time, rng.uniform(size=m) < 0.8]))
    problem = of(data, loss_options={"ties": ties})
    run = fc.solve(problem, tolerance=1e-13)
    maximum, found = (fc.confidence(problem, run, jeffreys=prior) for prior in (0, None))
    x = torch.tensor(maximum["estimate"].to_numpy())

    def bread(u):
        return sum(
            torch.autograd.functional.hessian(lambda v, s=s: _likelihood(problem, s, v, ties), u) for s in range(2)
        ).numpy()

    def meat(u):
        rows = np.vstack([score_residuals(X, *y.T, u.numpy(), ties == "efron") for X, y in data])
        return rows.T @ rows

    M = np.linalg.inv(bread(x))
    V, slope = M @ meat(x) @ M, []
    for j, se in enumerate(np.sqrt(np.diag(M))):
        step = torch.zeros(4, dtype=torch.float64)
        step[j] = 1e-4 * se
        ends = [np.trace(M @ meat(u)) - np.trace(V @ bread(u)) for u in (x + step, x - step)]
        slope.append((ends[0] - ends[1]) / (2e-4 * se))
    off = (maximum["estimate"] - found["estimate"]).to_numpy()
    np.testing.assert_allclose(off, M @ slope / 2, rtol=1e-5, atol=1e-6 * np.abs(off).max())
    np.testing.assert_allclose(found["se"], maximum["se"], rtol=1e-12)


# -- robust errors ----------------------------------------------------------------------------------------------------


def score_residuals(X, time, event, x, efron):
    """By loops, as Therneau and Grambsch have them (2000, section 3.3 and appendix E): of tied events, the k-th meets
    its fellows with the share 1 - k/d of their weight, and each event is compared with the mean of the d means."""
    size, out = np.exp(X @ x), np.zeros_like(X)
    for t in np.unique(time[event > 0]):
        at_risk, tied = time >= t, (time == t) & (event > 0)
        d = int(tied.sum())
        for k in range(d):
            weight = at_risk * size * np.where(tied, 1 - (k / d if efron else 0.0), 1.0)
            mean = weight @ X / weight.sum()
            out += tied[:, None] * (X - mean) / d - (weight / weight.sum())[:, None] * (X - mean)
    return out


def test_score_residuals_are_the_published_ones():
    """Test data 1 of Therneau and Grambsch's appendix E, at a coefficient of zero and at the estimates."""
    y = np.array([[1, 1], [1, 0], [6, 1], [6, 1], [8, 0], [9, 1]], float)
    X = np.array([[1.0], [1], [1], [0], [0], [0]])
    wanted = {"breslow": (np.array([10, -2, 7, -1, 5, 5]) / 24, 1.475285), "efron": (
        np.array([60, -12, 55, -5, 29, 29]) / 144, 1.676857)}  # fmt: skip
    for ties, (residuals, estimate) in wanted.items():
        problem = fc.Problem(fc.Silos.from_arrays([(X, y)]), loss="cox", loss_options={"ties": ties})
        [silo] = silos_of(problem)
        zero, one = torch.zeros(1, 6, dtype=torch.float64), torch.ones(1, 6, dtype=torch.float64)
        np.testing.assert_allclose(-silo.placed.residuals(silo.X[None], zero, one)[0, :, 0], residuals, atol=1e-14)
        np.testing.assert_allclose(score_residuals(X, *y.T, np.zeros(1), ties == "efron")[:, 0], residuals, atol=1e-14)
        assert float(fc.solve(problem).solution) == pytest.approx(estimate, abs=5e-7)


@pytest.mark.parametrize("ties", ["breslow", "efron"])
def test_robust_errors_with_ties(table, ties):
    """Those of loops; of statsmodels with Breslow's ties. Lifelines has none: its own hang on the order of the rows."""
    from statsmodels.duration.hazard_regression import PHReg

    problem = fc.Problem(sites_of(table, "week", "arrest"), loss="cox", loss_options={"ties": ties}, weights="samples")
    x = fc.solve(problem, tolerance=1e-13).solution
    found = fc.confidence(problem, x, robust=True)
    meat = np.zeros((7, 7))
    for own in (table[table["site"] == s] for s in range(3)):
        X, y = (v.to_numpy() if isinstance(v, pd.DataFrame) else v for v in problem_pair(own))
        rows = score_residuals(X, *y.T, x.numpy(), ties == "efron")
        meat += rows.T @ rows
    H = sum(torch.autograd.functional.hessian(lambda u, s=s: _likelihood(problem, s, u, ties), x) for s in range(3))
    bread = np.linalg.inv(H.numpy())
    np.testing.assert_allclose(found["se"], np.sqrt(np.diag(bread @ meat @ bread)), rtol=1e-8)
    if ties == "breslow":
        X, y = problem_pair(table)
        pooled = PHReg(y[:, 0], X.to_numpy(), y[:, 1], strata=table["site"].to_numpy(), ties=ties)
        made = pooled.fit(groups=np.arange(len(X)), method="newton", disp=0, tol=1e-14)
        np.testing.assert_allclose(found["se"], np.sqrt(np.diag(made.cov_params())), rtol=1e-8)
    else:
        orders = [table.sample(frac=1, random_state=k) for k in range(2)]
        fits = [lifelines.CoxPHFitter().fit(t, "week", "arrest", strata=["site"], robust=True) for t in orders]
        assert np.abs(fits[0].standard_errors_ - fits[1].standard_errors_).max() > 1e-6


def _likelihood(problem, site, x, ties):
    """Minus the logarithm of a site's partial likelihood, by loops."""
    X, y = problem.silos[site]
    z, (time, event), total = X.double() @ x, y.T, 0.0
    for t in time[event > 0].unique():
        tied = (time == t) & (event > 0)
        d = int(tied.sum())
        for k in range(d):
            total = total + (z[time >= t].exp().sum() - (k / d if ties == "efron" else 0.0) * z[tied].exp().sum()).log()
        total = total - z[tied].sum()
    return total


def test_a_path_is_that_of_scikit_survival():
    """One site: no strata there. Efron's ties are those of their ridge model, Breslow's those of their path."""
    from sksurv.datasets import load_gbsg2
    from sksurv.linear_model import CoxnetSurvivalAnalysis, CoxPHSurvivalAnalysis

    X, y = load_gbsg2()
    X = pd.get_dummies(X, drop_first=True).astype(float)
    X = (X - X.mean()) / X.std()
    silos = fc.Silos.from_arrays([(X, y)])
    pooled = CoxnetSurvivalAnalysis(l1_ratio=0.7, n_alphas=12, tol=1e-20, max_iter=1_000_000).fit(X, y)
    path = fc.path(
        fc.Problem(silos, loss="cox", regularizer=ElasticNet(0.7, 0.3), weights="samples"),
        lambdas=pooled.alphas_, tolerance=1e-12,
    )  # fmt: skip
    assert np.abs(path.coefficients.T - pooled.coef_).max() < 1e-8
    np.testing.assert_array_equal(path.coefficients.T != 0, pooled.coef_ != 0)
    own = fc.path(fc.Problem(silos, loss="cox", regularizer=L1(1.0), weights="samples"), count=3)
    lasso = CoxnetSurvivalAnalysis(l1_ratio=1.0, n_alphas=3).fit(X, y)
    assert own.lambdas[0] == pytest.approx(lasso.alphas_[0], rel=1e-12)
    ridge = CoxPHSurvivalAnalysis(alpha=2.0, ties="efron", tol=1e-14).fit(X, y)
    h = fc.regularizers.L2Squared(2.0 / len(X))
    made = fc.solve(fc.Problem(silos, loss="cox", loss_options={"ties": "efron"}, regularizer=h), tolerance=1e-13)
    assert np.abs(made.solution.numpy() - ridge.coef_).max() < 1e-8


@pytest.mark.parametrize(
    "h", [L1(0.02), ElasticNet(0.02, 0.1), MCP(0.03, 3.0), GroupLasso(0.03, groups=[2, 2, 3])], ids=repr
)
def test_regularized_strata_are_stationary_by_brute_force(problem, h):
    """No other package has strata with exact zeros: the certificate is checked against autograd through loops."""
    own = fc.Problem(problem.silos, loss="cox", regularizer=h, weights="samples")
    run = fc.solve(own, tolerance=1e-12)
    x = run.solution.clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for i in range(3):
        X, y = own.silos[i]
        z = X.double() @ x
        for j in torch.nonzero(y[:, 1] > 0).flatten():
            total = total + torch.logsumexp(z[y[:, 0] >= y[j, 0]], 0) - z[j]
    (gradient,) = torch.autograd.grad(total / len(own.silos.targets), x)
    assert float(h.optimality(run.solution, gradient)) < 1e-9
    assert run.status == "converged"
    assert int((run.solution == 0).sum()) > 0


def test_what_has_no_end_is_told():
    X = np.c_[np.arange(20.0), np.random.default_rng(0).normal(size=20)]
    y = np.c_[np.arange(20.0)[::-1] + 1, np.ones(20)]  # the largest feature has the event first
    problem = fc.Problem(fc.Silos.from_arrays([(X, y)]), loss="cox")
    assert "can be told from all at risk" in fc.solve(problem).message
    with pytest.warns(fc.analysis.SeparationWarning):
        fc.confidence(problem, torch.zeros(2), inverse="exact")


def test_firths_penalty_is_heinze_and_schempers():
    """The maximum of the likelihood times the root of its information's determinant, by loops; also without an end."""
    rng = np.random.default_rng(0)
    X = np.c_[rng.uniform(size=50) < 0.2, rng.normal(size=50)].astype(float)
    time, event = np.ceil(9 * rng.exponential(size=50) * np.exp(-0.5 * X[:, 1])), rng.uniform(size=50) < 0.6
    event[X[:, 0] > 0] = False  # nobody with it has an event
    problem = of([(X, np.c_[time, event])])
    with pytest.warns(fc.analysis.SeparationWarning, match="jeffreys=1"):
        assert math.isnan(fc.confidence(problem, torch.zeros(2))["estimate"].iloc[0])
    found = fc.confidence(problem, torch.zeros(2), jeffreys=1)["estimate"].to_numpy()

    def penalised(b):
        x = torch.tensor(b)
        H = torch.autograd.functional.hessian(lambda u: _likelihood(problem, 0, u, "breslow"), x)
        return float(_likelihood(problem, 0, x, "breslow") - H.logdet() / 2)

    slopes = [(penalised(found + e) - penalised(found - e)) / 1e-4 for e in 5e-5 * np.eye(2)]
    np.testing.assert_allclose(slopes, 0, atol=1e-4)
    for move in ([0.3, 0], [-0.3, 0], [0, 0.1], [0, -0.1]):
        assert penalised(found + move) > penalised(found)


# -- cross-validation -------------------------------------------------------------------------------------------------


def test_cross_validation_is_verweij_and_van_houwelingens(problem):
    """Of each fold: the deviance of all samples less that of the others, over the fold's events, as in glmnet."""
    own = fc.Problem(problem.silos, loss="cox", regularizer=L1(1.0), weights="samples")
    cv = fc.cross_validate(own, folds=4, count=6, ratio=0.1)
    folds = fc.analysis.fold_of_samples(own, 4)
    silos = own.silos
    X, y = silos.features.double(), silos.targets
    site = torch.from_numpy(np.repeat(np.arange(3), silos.sizes))

    def deviance(x, inside):
        made = 0.0
        for s in range(3):
            z, (time, event) = X[inside & (site == s)] @ x, y[inside & (site == s)].T
            for t in time[event > 0].unique():
                d = (event > 0) & (time == t)
                made += 2 * float(d.sum() * torch.logsumexp(z[time >= t], 0) - z[d].sum())
                made -= 2 * float(d.sum()) * math.log(float(d.sum()))  # the largest likelihood that there can be
        return made

    everyone = torch.ones(len(X), dtype=torch.bool)
    for k in range(4):
        left = torch.from_numpy(folds) != k
        events = float(y[~left, 1].sum())
        wanted = [(deviance(x, everyone) - deviance(x, left)) / events for x in cv.models[k]]
        np.testing.assert_allclose(cv.each[k], wanted, rtol=1e-9)
        assert cv.fold_weights[k] == events
    assert cv.lambda_min <= cv.lambda_1se
    assert cv.path.nonzeros[0] == 0
    assert np.all(np.diff(cv.path.deviance) > -1e-12)
    by_site = fc.cross_validate(own, folds="sites", count=5, ratio=0.1)
    assert by_site.each.shape == (3, 5)


def test_segments_of_a_path_have_the_same_models_in_fewer_exchanges(problem):
    own = fc.Problem(problem.silos, loss="cox", regularizer=L1(1.0), weights="samples")
    options = {"folds": 3, "count": 10, "ratio": 0.05, "tolerance": 1e-11}
    one, several = fc.cross_validate(own, **options, segments=1), fc.cross_validate(own, **options, segments=5)
    assert several.exchanges < 0.6 * one.exchanges
    np.testing.assert_allclose(several.models, one.models, atol=1e-8)
    np.testing.assert_allclose(several.mean, one.mean, rtol=1e-9)
    with pytest.raises(ValueError, match="not convex"):
        fc.path(fc.Problem(problem.silos, loss="cox", regularizer=MCP(1.0, 3.0)), count=4, segments=2)


@pytest.mark.slow
def test_a_cross_validation_of_fifty_strengths_takes_sixty_exchanges(problem):
    """By itself; a path that may be ended early, and one that is not convex, go from strength to strength."""
    own = fc.Problem(problem.silos, loss="cox", regularizer=L1(1.0), weights="samples")
    options = {"count": 50, "ratio": 0.05, "tolerance": 1e-10}
    cv = fc.cross_validate(own, folds=5, **options)
    one, timed = fc.path(own, **options, segments=1), fc.path(own, **options, seconds=1e6)
    assert cv.exchanges <= 60 < one.exchanges == timed.exchanges
    np.testing.assert_allclose(cv.path.solutions, one.solutions, atol=1e-7)
    bent = fc.Problem(problem.silos, loss="cox", regularizer=MCP(1.0, 30.0), weights="samples")
    assert fc.path(bent, count=24, ratio=0.3).converged.all()


def test_deviance_of_a_path_is_that_of_the_saturated_model(problem):
    own = fc.Problem(problem.silos, loss="cox", regularizer=L1(1.0), weights="samples")
    path = fc.path(own, count=4, ratio=0.1)
    silo = silos_of(own)
    top = sum(float(s.placed.saturated(torch.ones(1, len(s.X), dtype=torch.float64))) for s in silo)
    assert path.saturated == pytest.approx(top / len(own.silos.targets), rel=1e-9)


@pytest.mark.parametrize("weight", [None, 3.0])
def test_bayesian_criteria_count_events(table, weight):
    """Volinsky and Raftery's: minus twice the partial likelihood, and the logarithm of the events per coefficient."""
    parts = [table["site"] == s for s in range(3)]
    weights = None if weight is None else [np.full(int(p.sum()), weight) for p in parts]
    silos = sites_of(table, "week", "arrest", weights=weights)
    own = fc.Problem(silos, loss="cox", loss_options={"ties": "efron"}, regularizer=L1(1.0), weights="samples")
    path = fc.path(own, count=8, ratio=0.02)
    events = table["arrest"].sum()
    assert path.events == exactly(events)
    for k, x in enumerate(path.solutions):
        nonzeros, fit = int((x != 0).sum()), 2 * sum(float(_likelihood(own, s, x, "efron")) for s in range(3))
        assert path.aic[k] == exactly(fit + 2 * nonzeros)
        assert path.bic[k] == exactly(fit + math.log(events) * nonzeros)
        assert path.ebic[k] == exactly(path.bic[k] + math.log(math.comb(7, nonzeros)))
    assert path.index("bic") == int(np.argmin(path.bic))
    cause = fc.Problem(silos, loss="cox", loss_options={"cause": 1}, regularizer=L1(1.0), weights="samples")
    assert fc.path(cause, count=3, ratio=0.5).events == exactly(events)
    grid = fc.path(fc.Problem(silos, loss="cox", regularizer=L1(1.0), weights="samples"), count=3, ratio=0.5,
                   driver=fc.analysis.common_baseline(cause))  # fmt: skip
    assert grid.events == exactly(events)


def test_bootstrap_stability_and_refit_work(problem):
    own = fc.Problem(problem.silos, loss="cox", regularizer=L1(0.02), weights="samples")
    x = fc.solve(own).solution
    drawn = fc.bootstrap(own, x, draws=20)
    assert len(drawn) == 7
    chosen = fc.stability(fc.Problem(problem.silos, loss="cox", regularizer=L1(1.0), weights="samples"), draws=6)
    assert len(chosen.names) == 7
    assert torch.equal(fc.refit(own, x) != 0, x != 0)


# -- the estimator ----------------------------------------------------------------------------------------------------


def test_the_estimator_has_scikit_learns_manners(table):
    from sklearn.base import clone
    from sksurv.linear_model import CoxPHSurvivalAnalysis
    from sksurv.metrics import concordance_index_censored
    from sksurv.util import Surv

    X, site = table.drop(columns=["week", "arrest", "site"]), table["site"]
    y = Surv.from_arrays(table["arrest"] > 0, table["week"])
    one = clone(fc.CoxRegression(ties="breslow", tolerance=1e-13)).fit(X, y)
    pooled = CoxPHSurvivalAnalysis(ties="breslow", tol=1e-14).fit(X, y)
    assert np.abs(one.coef_ - pooled.coef_).max() < 1e-8
    assert one.score(X, y) == exactly(concordance_index_censored(y["event"], y["time"], one.predict(X))[0])
    times = [10.0, 30.0, 52.0]
    theirs = np.stack([f(times) for f in pooled.predict_survival_function(X.iloc[:5])])
    np.testing.assert_allclose(one.predict_survival_function(X.iloc[:5], times), theirs, rtol=1e-8)
    strata = fc.CoxRegression(tolerance=1e-13).fit(X, y, strata=site.to_numpy())
    sites = fc.CoxRegression(tolerance=1e-13).fit(X, y, sites=site.to_numpy())
    assert np.abs(strata.coef_ - sites.coef_).max() < 1e-8
    assert set(sites.baseline_["site"]) == {"0", "1", "2", "all"}
    cut = fc.CoxRegression("cv", regularizer="l1", folds=3, count=8).fit(X, y, sites=site.to_numpy())
    assert cut.lambda_min_ <= cut.lambda_1se_
    with pytest.raises(ValueError, match="expected"):
        fc.CoxRegression().fit(X, table["week"])
    with pytest.raises(ValueError, match="must be one of"):
        sites.predict_survival_function(X, site="nowhere")


def test_baselines_are_breslows(table):
    censored = np.random.default_rng(2).uniform(size=len(table)) < 0.3
    table = table.assign(week=np.where(censored, np.ceil(table["week"] / 2), table["week"]))
    breslow = fc.Problem(sites_of(table, "week", "arrest"), loss="cox", weights="samples")
    x = fc.solve(breslow, tolerance=1e-13)
    found = fc.baseline_hazard(breslow, x)
    for s in range(3):
        own = table[table["site"] == s]
        z = own.drop(columns=["week", "arrest", "site"]).to_numpy() @ x.solution.numpy()
        mine = found[found["site"] == breslow.silos.names[s]]
        for t, cumulated in zip(mine["time"], mine["cumulative_hazard"], strict=True):
            events = own.loc[(own["arrest"] > 0) & (own["week"] <= t), "week"]
            wanted = sum(1 / np.exp(z[own["week"] >= u]).sum() for u in events)
            assert cumulated == pytest.approx(wanted, rel=1e-10, abs=1e-300)


def test_one_baseline_is_the_pooled_model(table):
    """All times as grid: the unstratified model of pooled data; a coarser one: that of rounded times."""
    from statsmodels.duration.hazard_regression import PHReg

    silos = sites_of(table, "week", "arrest")
    problem = fc.Problem(silos, loss="cox", weights="samples")
    X = table.drop(columns=["week", "arrest", "site"]).to_numpy()
    for times, week in ((None, table["week"]), (range(13, 53, 13), np.ceil(table["week"] / 13) * 13)):
        driver = fc.analysis.common_baseline(problem, times=times)
        pooled = PHReg(week, X, table["arrest"], ties="breslow").fit(method="newton", disp=0, tol=1e-14)
        found = fc.confidence(problem, torch.zeros(7), driver=driver)
        assert np.abs(found["estimate"] - pooled.params).max() < 1e-8
        np.testing.assert_allclose(found["se"], pooled.bse, rtol=1e-7)
    one = fc.Problem(fc.Silos.from_arrays([problem_pair(table)]), loss="cox", regularizer=L1(1.0), weights="samples")
    many = fc.Problem(silos, loss="cox", regularizer=L1(1.0), weights="samples")
    alone, together = (fc.path(one, count=5), fc.path(many, count=5, driver=fc.analysis.common_baseline(many)))
    np.testing.assert_allclose(alone.coefficients, together.coefficients, atol=1e-8)
    np.testing.assert_allclose(alone.deviance, together.deviance, rtol=1e-8)
    cv = fc.cross_validate(many, folds=3, count=5, driver=fc.analysis.common_baseline(many))
    assert cv.fold_weights.sum() == table["arrest"].sum()
    y = table[["week", "arrest"]].to_numpy()
    model = fc.CoxRegression(baseline="common", tolerance=1e-12).fit(X, y, sites=table["site"].to_numpy())
    assert np.abs(model.coef_ - fc.CoxRegression(tolerance=1e-12).fit(X, y).coef_).max() < 1e-8
    with pytest.raises(ValueError, match="Breslow"):
        fc.analysis.common_baseline(fc.Problem(silos, loss="cox"))


# -- curves and tests -------------------------------------------------------------------------------------------------


def test_curves_are_those_of_lifelines(table, problem):
    curves = fc.event_curves(problem)
    for site, rows in [("all", table), *((n, table[table["site"] == s]) for s, n in enumerate(problem.silos.names))]:
        mine = curves.of(site)
        mine = mine[mine["time"].isin(rows["week"])]
        km = lifelines.KaplanMeierFitter().fit(rows["week"], rows["arrest"])
        at = km.survival_function_.index > 0
        np.testing.assert_allclose(mine["survival"], km.survival_function_[at].iloc[:, 0], rtol=1e-12)
        band = mine[["survival_lower", "survival_upper"]]
        np.testing.assert_allclose(band, km.confidence_interval_[at], rtol=1e-10)
        na = lifelines.NelsonAalenFitter(nelson_aalen_smoothing=False).fit(rows["week"], rows["arrest"])
        np.testing.assert_allclose(mine["cumulative_hazard"], na.cumulative_hazard_[at].iloc[:, 0], rtol=1e-12)
        np.testing.assert_allclose(mine[["hazard_lower", "hazard_upper"]], na.confidence_interval_[at], rtol=1e-10)
    assert curves.median() == math.inf
    rounded = np.ceil(table["week"] / 13) * 13
    km = lifelines.KaplanMeierFitter().fit(rounded, table["arrest"])
    coarse = fc.event_curves(problem, times=[13.0, 26, 39, 52]).of()
    np.testing.assert_allclose(coarse["survival"], km.survival_function_.iloc[1:, 0], rtol=1e-12)
    by = fc.event_curves(problem, by="fin")
    assert by.at(20, group="fin = 1")["survival"] > by.at(20, group="fin = 0")["survival"]


def test_curves_with_late_entries_and_grids(problem):
    """Counts on a grid with every time are those of loops; who enters between two times is at risk at the second."""
    rng = np.random.default_rng(0)
    time = rng.integers(2, 12, 60).astype(float)
    y = np.c_[time, rng.integers(0, 2, 60), time - rng.integers(1, 8, 60)]
    own = fc.Problem(fc.Silos.from_arrays([(rng.normal(size=(60, 1)), y)]), loss="cox")
    found = fc.event_curves(own).of()
    for t, n, d in zip(found["time"], found["at_risk"], found["events"], strict=True):
        assert n == ((y[:, 0] >= t) & (y[:, 2] < t)).sum()
        assert d == ((y[:, 0] == t) & (y[:, 1] > 0)).sum()


def test_incidences_are_those_of_lifelines():
    rng = np.random.default_rng(1)
    time, cause = rng.exponential(size=200), rng.integers(0, 3, 200)
    X = rng.normal(size=(200, 2))
    data = [(X[i::2], np.c_[time, cause][i::2]) for i in range(2)]
    problem = fc.Problem(fc.Silos.from_arrays(data), loss="cox", loss_options={"cause": 2}, weights="samples")
    found = fc.event_curves(problem).of()
    for k in (1, 2):
        theirs = lifelines.AalenJohansenFitter(calculate_variance=True).fit(time, cause, event_of_interest=k)
        np.testing.assert_allclose(found[f"incidence_{k}"], theirs.cumulative_density_.iloc[1:, 0], rtol=1e-10)
        mine = found[[f"incidence_{k}_lower", f"incidence_{k}_upper"]].to_numpy()
        there = np.isfinite(theirs.confidence_interval_.iloc[1:].to_numpy()).all(1)
        np.testing.assert_allclose(mine[there], theirs.confidence_interval_.iloc[1:][there], rtol=1e-8)
    censored = fc.Silos.from_arrays([(X, np.c_[y[:, 0], y[:, 1] == 2]) for X, y in data])
    same = fc.Problem(censored, loss="cox", weights="samples")
    assert torch.equal(fc.solve(problem).solution, fc.solve(same).solution)


def test_log_rank_tests_are_those_of_lifelines(table, problem):
    from lifelines.statistics import logrank_test, multivariate_logrank_test
    from sksurv.compare import compare_survival
    from sksurv.util import Surv

    rng = np.random.default_rng(2)
    censored = rng.uniform(size=len(table)) < 0.3
    table = table.assign(week=np.where(censored, np.ceil(table["week"] * rng.uniform(size=len(table))), table["week"]))
    table.loc[censored, "arrest"] = 0.0
    problem = fc.Problem(sites_of(table, "week", "arrest"), loss="cox")
    one = fc.Problem(fc.Silos.from_arrays([problem_pair(table)]), loss="cox")
    a, b = (table[table["fin"] == v] for v in (0, 1))
    theirs = logrank_test(a["week"], b["week"], a["arrest"], b["arrest"])
    mine = fc.logrank_test(one, "fin")
    assert (mine.statistic, mine.p) == (exactly(theirs.test_statistic), exactly(theirs.p_value))
    several = multivariate_logrank_test(table["week"], np.digitize(table["prio"], [1, 3]), table["arrest"])
    assert fc.logrank_test(one, "prio", cuts=[1, 3]).statistic == exactly(several.test_statistic)
    y = Surv.from_arrays(table["arrest"] > 0, table["week"])
    assert fc.logrank_test(one, "prio", cuts=[1, 3]).statistic == exactly(
        compare_survival(y, np.digitize(table["prio"], [1, 3]))[0]
    )
    excess = variance = 0.0
    for _, own in table.groupby("site"):
        alone = fc.logrank_test(fc.Problem(fc.Silos.from_arrays([problem_pair(own)]), loss="cox"), "fin")
        difference = float(alone.table["observed"][1] - alone.table["expected"][1])
        excess, variance = excess + difference, variance + difference**2 / alone.statistic
    assert fc.logrank_test(problem, "fin").statistic == exactly(excess**2 / variance)


def problem_pair(table):
    return table.drop(columns=["week", "arrest", "site"]), table[["week", "arrest"]].to_numpy()


@pytest.mark.parametrize("transform", ["rank", "identity", "log", "km"])
def test_schoenfeld_tests_are_those_of_lifelines(table, transform):
    from lifelines.statistics import proportional_hazard_test

    apart = table.assign(week=table["week"] + np.random.default_rng(0).uniform(0, 0.5, len(table)))
    pooled = apart.drop(columns="site")
    cox = lifelines.CoxPHFitter().fit(pooled, "week", "arrest", fit_options=TIGHT)
    theirs = proportional_hazard_test(cox, pooled, time_transform=transform).summary["test_statistic"]
    one = fc.Problem(fc.Silos.from_arrays([problem_pair(apart)]), loss="cox")
    mine = fc.schoenfeld_test(one, fc.solve(one, tolerance=1e-13), transform=transform)
    np.testing.assert_allclose(mine["statistic"].drop("(all)"), theirs[mine.index[:-1]], rtol=1e-8)


# -- quality ----------------------------------------------------------------------------------------------------------


def test_quality_is_that_of_scikit_survival():
    from sksurv.metrics import brier_score, concordance_index_censored, cumulative_dynamic_auc
    from sksurv.util import Surv

    problem = fc.Problem(fc.data.load("survival", clients=3, samples=200), loss="cox", weights="samples")
    x = fc.solve(problem).solution
    report = fc.quality(problem, x, horizon=40.0)
    for i, name in enumerate(problem.silos.names):
        X, target = problem.silos[i]
        order = np.flatnonzero((target[:, 0] < target[target[:, 1] == 0, 0].max()).numpy())
        X, target = X[order].numpy(), target[order].numpy()
        alone = fc.Problem(fc.Silos.from_arrays([(X, target)]), loss="cox")
        hazards, mine = fc.baseline_hazard(alone, x).assign(site=name), fc.quality(alone, x, horizon=40.0).overall
        y = Surv.from_arrays(target[:, 1] > 0, target[:, 0])
        z = X @ x.numpy()
        assert mine.c_index == exactly(concordance_index_censored(y["event"], y["time"], z)[0])
        assert mine.auroc == exactly(cumulative_dynamic_auc(y, y, z, [40.0])[0][0])
        base = hazards[(hazards["site"] == name) & (hazards["time"] <= 40)]["cumulative_hazard"].iloc[-1]
        survival = np.exp(-base * np.exp(z))
        assert mine.brier == exactly(brier_score(y, y, survival[:, None], [40.0])[1][0])
        assert mine.predicted == exactly(1 - survival.mean())
    assert abs(report.overall.predicted - report.overall.observed) < 0.03
    assert report.table.loc["all", "events"] == float(problem.silos.targets[:, 1].sum())
    groups = report.overall.calibration(4)
    assert groups["samples"].sum() == len(problem.silos.targets)
    held = fc.Problem(problem.silos.split(0.3), loss="cox", weights="samples")
    assert 0.4 < fc.quality(held, fc.solve(held), part="test", horizon=40.0).overall.auroc < 0.95
    with pytest.raises(ValueError, match="horizon is a time"):
        fc.quality(fc.Problem(fc.data.load("synthetic", clients=2)), torch.zeros(20), horizon=1.0)


def test_quality_of_cross_validation_by_sites():
    silos = fc.data.load("survival", clients=4, samples=120)
    problem = fc.Problem(silos, loss="cox", regularizer=L1(1.0), weights="samples")
    for folds in (3, "sites"):
        cv = fc.cross_validate(problem, folds=folds, count=6, ratio=0.05)
        report = fc.quality(problem, cv, choice="min", horizon=48.0)
        assert report.overall.c_index > 0.65
        assert abs(report.overall.predicted - report.overall.observed) < 0.15


def test_the_metric_is_counted_in_runs():
    silos = fc.data.load("survival", clients=3, samples=80, test=0.25)
    problem = fc.Problem(silos, loss="cox", regularizer=L1(0.01), metrics=["c_index"])
    run = fc.solve(problem)
    assert run.history[-1]["test_c_index"] > 0.6
    scores = problem.scores(run)
    assert scores.loc["all", "train_c_index"] == pytest.approx(fc.quality(problem, run).overall.c_index)
    assert math.isfinite(run.history[-1]["test_loss"])
    with pytest.raises(ValueError, match="survival problems"):
        fc.Problem(fc.data.load("synthetic", clients=2), metrics=["c_index"])


def test_drawn_survivors_have_the_effects_that_are_told():
    from fedcomposite.data.survivors import EFFECTS, survivor_tables

    tables = survivor_tables(3, 4000, seed=1)
    X = pd.concat(tables, names=["site"]).reset_index("site")
    table = pd.DataFrame({"months": X["months"], "died": (X["died"] == "yes").astype(float), "site": X["site"]})
    table["age"], table["size"] = X["age"], X["size"]
    for s in ("II", "III", "IV"):
        table[f"stage_{s}"] = (X["stage"] == s).astype(float)
    table["nodes"] = np.log2(1 + X["nodes"])
    table["receptor"], table["treated"] = (X["receptor"] == "positive").astype(float), (X["treated"] == "yes") * 1.0
    problem = fc.Problem(sites_of(table, "months", "died"), loss="cox", weights="samples")
    found = fc.confidence(problem, fc.solve(problem))
    away = [(found.loc[name, "estimate"] - value) / found.loc[name, "se"] for name, value in EFFECTS.items()]
    assert max(map(abs, away)) < 3.5


def test_rows_of_a_request_are_whole(problem):
    """A fold's own deviance and the deviance of the others add up to that of all samples."""
    silo = silos_of(problem)[0]
    x = torch.zeros(1, 7, dtype=torch.float64)
    fold = Rows("fold", 1, 4)
    from fedcomposite.runtime.protocol import ALL, answer

    whole, rest, held = (answer(silo, losses(x, rows)) for rows in (ALL, fold, fold.others))
    assert float(rest["deviance"] + held["deviance"]) == pytest.approx(float(whole["deviance"]), rel=1e-12)
    assert float(held["weight"][0]) == float(silo.b[silo.weights(fold.others) > 0, 1].sum())
    assert isinstance(silo.loss, Cox)
    assert list(itertools.islice(silo.strata, 2)) == [int(v) for v in silo.b[:2, 1]]


# -- awkward data -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mean", "scale"), [(1000.0, 1e-4), (1e6, 1e-3), (0.0, 1e6), (0.0, 1e-6)])
def test_units_and_origins_do_not_matter(plain, mean, scale):
    data, wanted = plain
    problem = of([(mean + scale * X, y) for X, y in data])
    run = fc.solve(problem)
    assert run.status == "converged"
    found = fc.confidence(problem, run)
    for name in ("estimate", "se"):
        np.testing.assert_allclose(scale * found[name], wanted[name], rtol=1e-6 if mean else 1e-9)


def test_columns_that_tell_nothing_within_sites_or_strata(plain):
    """Constant everywhere, at each site, in each stratum; and one that is there twice."""
    data, wanted = plain
    rng = np.random.default_rng(1)
    strata = [rng.integers(0, 3, len(y)) for _, y in data]
    several = [(X, np.c_[y, np.full(len(y), -1e30), s]) for (X, y), s in zip(data, strata, strict=True)]
    inside = fc.confidence(of(several), fc.solve(of(several)))
    for given, extra, known in (
        (data, [np.full(len(y), 0.1) for _, y in data], wanted),
        (data, [np.full(len(y), float(i)) for i, (_, y) in enumerate(data)], wanted),
        (several, strata, inside),
    ):
        problem = of([(np.c_[X, e], y) for (X, y), e in zip(given, extra, strict=True)])
        run = fc.solve(problem)
        assert (run.status, float(run.solution[3])) == ("converged", 0.0)
        with pytest.warns(fc.analysis.UndeterminedWarning, match="x3: columns are constant among those at risk"):
            found = fc.confidence(problem, run)
        np.testing.assert_allclose(found["estimate"], [*known["estimate"], math.nan], rtol=1e-7)
        np.testing.assert_allclose(found["se"], [*known["se"], math.nan], rtol=1e-7)
    twice = of([(np.c_[X, X[:, 0]], y) for X, y in data])
    assert fc.solve(twice).status == "converged"
    with pytest.warns(fc.analysis.UndeterminedWarning, match="x0, x3"):
        found = fc.confidence(twice, fc.solve(twice))
    np.testing.assert_allclose(found["se"].iloc[1:3], wanted["se"].iloc[1:], rtol=1e-7)


@pytest.mark.parametrize("ties", ["breslow", "efron"])
def test_a_hazard_without_end_is_no_solution(plain, ties):
    """Whoever has the largest feature goes first; a category without an event; a far start leads back."""
    data, _ = plain
    ranked = [(np.c_[X[:, 0], -y[:, 0].argsort().argsort()], y) for X, y in data]
    rng = np.random.default_rng(3)
    spared = [(np.c_[X, (y[:, 1] == 0) & (rng.uniform(size=len(y)) < 0.4)], y) for X, y in data]
    for given, name, others in ((ranked, "x1", 0), (spared, "x3", 3)):
        problem = of(given, loss_options={"ties": ties})
        run = fc.solve(problem)
        assert run.status == "not_converged"
        assert "there is no solution, whoever has the event can be told from all at risk" in run.message
        assert f"coefficients of {name}" in run.message
        with pytest.warns(fc.analysis.SeparationWarning, match=name):
            found = fc.confidence(problem, run)
        assert int(found["estimate"].notna().sum()) == others
    far = fc.solve(of(data, L1(0.01)), x0=np.array([1e3, -1e3, 1e3]))
    assert far.status == "converged"
    assert torch.allclose(far.solution, fc.solve(of(data, L1(0.01))).solution, atol=1e-8)


def test_what_is_wrong_with_times_is_told(plain):
    data, _ = plain
    (X, y), *rest = data

    def told(y, message):
        others = [(Z, np.c_[b, b[:, 0] - 1][:, : y.shape[1]]) for Z, b in rest]
        with pytest.raises(fc.DataError, match=message):
            of([*others, (X, y)])

    told(np.c_[np.r_[-3.0, y[1:, 0]], y[:, 1]], "a time below 0.*at client 2, row 0, time -3")
    assert of([(X, np.c_[y[:, 0] - 5, y[:, 1], y[:, 0] - 6])])  # a clock that began at an earlier time
    told(np.c_[y, np.r_[y[:4, 0] - 1, y[4, 0] + 1, y[5:, 0] - 1]], "1 sample.*enter when.*at client 2, row 4")
    with pytest.raises(fc.DataError, match="none of the 150 samples has the event"):
        fc.solve(of([(X, y * [1, 0]) for X, y in data]))
    with pytest.raises(fc.DataError, match="none of the 150 samples has the event"):
        fc.path(of(data, L1(1.0), loss_options={"cause": 2}))
    few = of([*rest, (X, y * [1, 0])])  # one site without
    found = fc.by_site(few)
    assert "x0, x1, x2" in found.notes["client 2"]
    assert list(found.combined["sites"]) == [2, 2, 2]
    last = y * [1, 0]
    last[y[:, 0].argmax(), 1] = 1  # nobody else is at risk
    with pytest.warns(fc.analysis.UndeterminedWarning):
        assert fc.confidence(of([(X, last)]), torch.zeros(3))["estimate"].isna().all()
