"""Weights, offsets and sparse samples against other people's solvers, in files, and in a federation."""

import dataclasses
import re
import tomllib
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import optimize, sparse
from sklearn.datasets import dump_svmlight_file
from sklearn.linear_model import Lasso, LogisticRegression, PoissonRegressor

import fedcomposite as fc
from fedcomposite import regularizers as reg
from fedcomposite.algorithms import FedNMap, Zhang
from fedcomposite.data import DataError
from fedcomposite.experiments import Config, ConfigError
from fedcomposite.problems.linear import Linear
from fedcomposite.runtime.distributed import Group, shard


def pool(samples=90, features=40, density=0.2, seed=0):
    generator = np.random.default_rng(seed)
    X = sparse.random_array((samples, features), density=density, format="csr", rng=generator)
    w = np.where(np.arange(features) < 5, 3.0, 0.0) * (-1.0) ** np.arange(features)
    return X, X @ w, generator


def dealt(X, y, **extra):
    """Three clients of unequal size."""
    cuts = [slice(0, 20), slice(20, 55), slice(55, None)]
    per = {k: [v[c] for c in cuts] for k, v in extra.items()}
    return fc.Silos.from_arrays([(X[c], y[c]) for c in cuts], **per)


# -- pooled solvers ---------------------------------------------------------------------------------------------------


def test_lasso_is_scikit_learns_on_pooled_sparse_data():
    X, z, generator = pool()
    y = z + 0.1 * generator.normal(size=len(z))
    problem = fc.Problem(dealt(X, y), loss="least_squares", regularizer=reg.L1(0.01), weights="samples")
    pooled = Lasso(alpha=0.01, fit_intercept=False, tol=1e-14, max_iter=100_000).fit(X, y)
    run = fc.solve(problem, tolerance=1e-11)
    best = torch.from_numpy(pooled.coef_)
    assert problem.objective(run.solution) == pytest.approx(problem.objective(best), rel=1e-10)
    np.testing.assert_array_equal(run.solution.numpy() != 0, pooled.coef_ != 0)


def test_sparse_logistic_regression_is_scikit_learns_on_pooled_sparse_data():
    X, z, generator = pool(samples=120)
    y = np.where(z + 0.3 * generator.normal(size=len(z)) > 0, 1.0, -1.0)
    problem = fc.Problem(dealt(X, y), regularizer=reg.L1(0.01), bias=True, weights="samples")
    pooled = LogisticRegression(C=1 / (0.01 * 120), l1_ratio=1.0, solver="saga", tol=1e-13, max_iter=100_000).fit(X, y)
    best = torch.from_numpy(np.append(pooled.coef_.ravel(), pooled.intercept_))
    run = fc.solve(problem, tolerance=1e-11)
    assert problem.objective(run.solution) == pytest.approx(problem.objective(best), rel=1e-10)
    np.testing.assert_array_equal(run.solution[:-1].numpy() != 0, pooled.coef_.ravel() != 0)


def test_weights_are_scikit_learns():
    X, z, generator = pool(features=10)
    y = np.where(z + generator.normal(size=len(z)) > 0, 1.0, -1.0)
    weights = generator.random(len(y)) * 5
    lam = 0.02
    silos = dealt(X, y, weights=weights)
    problem = fc.Problem(silos, regularizer=reg.L2Squared(lam), bias=True, weights="samples")
    pooled = LogisticRegression(C=1 / lam, tol=1e-13, max_iter=100_000)
    pooled.fit(X, y, sample_weight=weights / weights.sum())
    run = fc.solve(problem, tolerance=1e-11)
    np.testing.assert_allclose(run.solution, np.append(pooled.coef_, pooled.intercept_), atol=1e-6)


@pytest.mark.parametrize("form", [sparse.csr_array, lambda X: X.toarray()], ids=["sparse", "dense"])
def test_exposures_are_scikit_learns_weights(form):
    """Counts over exposures e with offsets log e: rates y / e that weigh e."""
    X, z, generator = pool(samples=300, features=8)
    exposure = generator.uniform(0.5, 4.0, len(z))
    y = generator.poisson(exposure * np.exp(0.4 * z - 0.5)).astype(float)
    lam = 0.01
    silos = dealt(form(X), y, margin_offsets=np.log(exposure))
    problem = fc.Problem(silos, loss="poisson", regularizer=reg.L2Squared(lam), bias=True, weights="samples")
    run = fc.solve(problem, tolerance=1e-10)
    alpha = lam * len(y) / exposure.sum()
    pooled = PoissonRegressor(alpha=alpha, tol=1e-12, max_iter=10_000, solver="newton-cholesky")
    pooled.fit(X.toarray(), y / exposure, sample_weight=exposure)
    np.testing.assert_allclose(run.solution, np.append(pooled.coef_, pooled.intercept_), atol=1e-7)
    assert run.certificate.value < 1e-8


def brute(X, y, offset, weights, lam):
    """The minimum of a weighted logistic loss with offsets and a ridge, by scipy."""

    def value(x):
        z = y * (X @ x[:-1] + x[-1] + offset)
        slope = -y * weights / (1 + np.exp(z))
        gradient = np.append(X.T @ slope + lam * x[:-1], slope.sum())
        return weights @ np.logaddexp(0, -z) + lam / 2 * x[:-1] @ x[:-1], gradient

    options = {"ftol": 1e-16, "gtol": 1e-12, "maxiter": 10_000, "maxfun": 100_000}
    return optimize.minimize(value, np.zeros(X.shape[1] + 1), jac=True, method="L-BFGS-B", options=options)


@pytest.mark.parametrize("form", [sparse.csr_array, lambda X: X.toarray()], ids=["sparse", "dense"])
def test_offsets_of_a_logistic_regression(form):
    X, z, generator = pool(features=6)
    offset, weights = generator.normal(size=len(z)), generator.random(len(z)) + 0.2
    y = np.where(z + offset > 0, 1.0, -1.0)
    silos = dealt(form(X), y, weights=weights, margin_offsets=offset)
    problem = fc.Problem(silos, regularizer=reg.L2Squared(0.05), bias=True, weights="samples")
    found = brute(X, y, offset, weights / weights.sum(), 0.05)
    x = torch.from_numpy(found.x)
    assert problem.objective(x) == pytest.approx(found.fun, rel=1e-12)
    run = fc.solve(problem, tolerance=1e-11)
    assert problem.objective(run.solution) == pytest.approx(found.fun, rel=1e-11)
    torch.testing.assert_close(run.solution, x, rtol=0, atol=1e-5)
    assert problem.objective(run.solution) - found.fun <= run.certificate.value + 1e-12


def test_an_offset_is_a_column_with_coefficient_one():
    """Every quantity at x equals that of the problem with the offsets as a feature, at (1, x)."""
    X, z, generator = pool(features=6)
    t = generator.normal(size=len(z))
    y = np.where(z > 0, 1.0, -1.0)
    wide = np.column_stack([t, X.toarray()])
    for form in (sparse.csr_array, np.asarray):
        silos = dealt(form(wide[:, 1:]), y, margin_offsets=t).split(0.3, validation=0.2)
        full = dealt(form(wide), y).split(0.3, validation=0.2)
        one = fc.Problem(silos, bias=True, metrics=["auc", "log_loss"])
        two = fc.Problem(full, bias=True, metrics=["auc", "log_loss"])
        x = torch.linspace(-1, 1, one.dimension, dtype=torch.float64)
        u = torch.cat([torch.ones(1, dtype=torch.float64), x])
        a, b = one.evaluate(x), two.evaluate(u)
        torch.testing.assert_close(a.loss, b.loss, rtol=1e-12, atol=0)
        torch.testing.assert_close(a.gradient, b.gradient[1:], rtol=1e-12, atol=1e-14)
        for key, value in a.metrics.items():
            torch.testing.assert_close(value, b.metrics[key], rtol=1e-12, atol=0)
        np.testing.assert_allclose(one.scores(x), two.scores(u), rtol=1e-12)
        p, q = one.smooth(), two.smooth()
        rows = torch.tensor([[0, 3], [15, 14], [44, 40]])
        each, other = x.expand(3, -1).contiguous(), u.expand(3, -1).contiguous()
        torch.testing.assert_close(p.minibatch(each, rows), q.minibatch(other, rows)[:, 1:], rtol=1e-12, atol=1e-14)


# -- files ------------------------------------------------------------------------------------------------------------


def write_tables(folder, kind=".csv"):
    X, z, generator = pool(samples=90, features=4, density=0.7)
    frame = pd.DataFrame(X.toarray(), columns=list("abcd"))
    frame["y"], frame["n"], frame["t"] = (
        np.sign(z + 0.1),
        generator.integers(1, 5, len(z)),
        generator.normal(size=len(z)),
    )
    paths = []
    for name, part in {"north": frame[:20], "south": frame[20:55], "test": frame[55:]}.items():
        path = folder / f"{name}{kind}"
        if kind == ".npz":
            np.savez(path, X=part[list("abcd")], **{c: part[c] for c in ("y", "n", "t")})
        else:
            part.to_csv(path, index=False)
        paths.append(path)
    return paths, frame


@pytest.mark.parametrize("kind", [".csv", ".npz"])
def test_columns_of_weights_and_offsets(kind, tmp_path):
    (*files, test), frame = write_tables(tmp_path, kind)
    silos = fc.Silos.from_files(files, target="y", weight="n", offset="t", test=test)
    assert silos.features.shape == (55, 4)
    np.testing.assert_allclose(silos.weights, frame["n"][:55])
    np.testing.assert_allclose(silos.margin_offsets, frame["t"][:55])
    np.testing.assert_allclose(silos.held_margin_offsets["test"], frame["t"][55:])
    plain = fc.Silos.from_arrays(
        [(frame[list("abcd")][c], frame["y"][c]) for c in (slice(0, 20), slice(20, 55))],
        weights=[frame["n"][:20], frame["n"][20:55]],
        margin_offsets=[frame["t"][:20], frame["t"][20:55]],
    )
    content = {
        "data": {"files": [str(f) for f in files], "target": "y", "weight": "n", "offset": "t", "test": str(test)},
        "problem": {"bias": True, "weights": "samples"},
        "algorithm": {"name": "ProxNewton"},
        "run": {"rounds": 3},
    }
    x = torch.linspace(-1, 1, 5, dtype=torch.float64)
    made = Config.check(content).make_problem()
    want = fc.Problem(plain, bias=True, weights="samples")
    assert made.objective(x) == pytest.approx(want.objective(x), rel=1e-14)


def test_wrong_columns(tmp_path):
    (*files, _), frame = write_tables(tmp_path)
    for options, message in [
        ({"weight": "m"}, "no column 'm'"),
        ({"offset": "tt"}, "no column 'tt'; did you mean 't'"),
        ({"weight": "n", "drop": "n"}, "drop = 'n' is the weight"),
        ({"weight": "y"}, "target, weight must be different columns"),
        ({"weight": 3}, "weight"),
        ({"weight": "t"}, "north: weights must be finite, >= 0"),
        ({"features": 3}, "only for .svm files"),
        ({"weight": "n", "offset": "t", "drop": list("abcd")}, "no features left"),
    ]:
        with pytest.raises(DataError, match=message):
            fc.Silos.from_files(files, target="y", **options)
    frame.assign(t=np.nan)[:20].to_csv(files[0], index=False)
    with pytest.raises(DataError, match=r"column 't' has 20 missing value\(s\)"):
        fc.Silos.from_files(files, target="y", offset="t")


def svm_files(folder):
    X, z, _ = pool(features=30)
    y = np.where(z > 0, 1.0, -1.0)
    narrow = np.where(np.arange(len(y))[:, None] > 60, np.arange(30) < 29, np.arange(30) < 7)
    X = sparse.csr_array(X.toarray() * narrow)
    cuts = [slice(0, 20), slice(20, 55), slice(55, None)]
    paths = [folder / f"{name}.svm" for name in ("north", "south", "east")]
    for path, c in zip(paths, cuts, strict=True):
        dump_svmlight_file(X[c], y[c], str(path), zero_based=False)
    return paths, X, y


def test_libsvm_files_stay_sparse(tmp_path):
    paths, X, y = svm_files(tmp_path)
    silos = fc.Silos.from_files(paths)
    assert silos.names == ("north", "south", "east")
    assert silos.features.shape == (90, 29)
    np.testing.assert_allclose(silos.features.csr().toarray(), X.toarray()[:, :29], rtol=1e-14)
    np.testing.assert_array_equal(silos.targets, y)
    assert fc.Silos.from_files(paths, features=30, test=paths[0]).test[0].shape == (20, 30)
    config = {"data": {"files": [str(p) for p in paths]}, "algorithm": {"name": "ProxNewton"}, "run": {"rounds": 1}}
    assert Config.check(config).make_problem().dimension == 29


def test_wrong_libsvm_files(tmp_path):
    paths, *_ = svm_files(tmp_path)
    for text, message in [
        ("1 0:2\n", "not a readable file of LIBSVM"),
        ("1 3:2 2:1\n", "sorted and unique"),
        ("1 3:2 3:1\n", "sorted and unique"),
        ("yes 1:2\n", "not a readable file of LIBSVM"),
        ("", "an empty silo"),
        ("1 1:nan\n", "NaN or infinite"),
        ("1 40:1\n", "not a readable file of LIBSVM"),
    ]:
        paths[1].write_text(text)
        with pytest.raises(DataError, match=message):
            fc.Silos.from_files(paths, features=30)
    for options in ({"target": "y"}, {"drop": "a"}, {"weight": "w"}, {"separator": ";"}, {"missing": "9"}):
        with pytest.raises(DataError, match=next(iter(options))):
            fc.Silos.from_files(paths[:1], **options)
    with pytest.raises(DataError, match="no such file"):
        fc.Silos.from_files(tmp_path / "none.svm")
    with pytest.raises(DataError, match="all of one kind"):
        fc.Silos.from_files([paths[0], tmp_path / "a.csv"], target="y")


# -- the rest of the house --------------------------------------------------------------------------------------------


def everything():
    """Sparse, standardised, weighted silos with offsets and held-out samples."""
    X, z, generator = pool(features=12)
    y = np.where(z + generator.normal(size=len(z)) > 0, 1.0, -1.0)
    silos = dealt(X, y, weights=generator.random(len(y)) * 9 + 0.1, margin_offsets=generator.normal(size=len(y)))
    return silos.split(0.2).standardize()


@pytest.mark.parametrize("size", [2, 3])
def test_shards_of_a_process_group_add_up(size):
    problem = fc.Problem(everything(), bias=True, weights="samples", metrics=["auc"])
    x = torch.linspace(-1, 1, problem.dimension, dtype=torch.float64)
    parts = [shard(problem, Group(rank, size), torch.float64, torch.device("cpu")) for rank in range(size)]
    assert all(isinstance(part, Linear) for part in parts)
    seen, want = [part.evaluate(x) for part in parts], problem.evaluate(x)
    torch.testing.assert_close(sum(s.gradient for s in seen), want.gradient, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(sum(s.loss for s in seen), want.loss, rtol=1e-12, atol=0)
    total = sum(s.counts["test/loss"].sum(0) for s in seen if "test/loss" in s.counts)
    if "test/loss" in want.counts:
        torch.testing.assert_close(total, want.counts["test/loss"].sum(0), rtol=1e-12, atol=0)


def test_resumed_runs_repeat_every_bit_and_know_their_data(tmp_path):
    problem, method = fc.Problem(everything(), regularizer=reg.L1(0.01)), Zhang(3, 0.05, 1.0)
    whole = fc.simulate(problem, method, rounds=8, batch_size=4)
    fc.simulate(problem, method, rounds=4, batch_size=4, checkpoint=tmp_path / "c")
    run = fc.simulate(problem, method, rounds=8, batch_size=4, checkpoint=tmp_path / "c", resume=True)
    assert torch.equal(run.solution, whole.solution)
    silos = problem.silos
    moved = [
        dataclasses.replace(silos, margin_offsets=silos.margin_offsets + 1),
        dataclasses.replace(silos, features=dataclasses.replace(silos.features, sd=silos.features.sd * 2)),
        dataclasses.replace(silos, features=dataclasses.replace(silos.features, values=silos.features.values * 2)),
    ]
    for other in moved:
        changed = fc.Problem(other, regularizer=reg.L1(0.01))
        with pytest.raises(ValueError, match="data"):
            fc.simulate(changed, method, rounds=9, batch_size=4, checkpoint=tmp_path / "c", resume=True)


def test_offsets_stay_with_their_samples():
    X, z, _ = pool()
    silos = dealt(X, z, margin_offsets=z).split(0.3, validation=0.1)
    for made in (silos, silos.partition("iid", clients=2), silos.standardize(), silos.dense()):
        torch.testing.assert_close(made.margin_offsets, made.targets)
        for part, (_, y) in made.held_out.items():
            torch.testing.assert_close(made.held_margin_offsets[part], y)


def test_refused_offsets():
    X, z, _ = pool()
    labels = np.digitize(z, [-1, 1])
    with pytest.raises(DataError, match="one margin per sample"):
        fc.Problem(dealt(X, labels, margin_offsets=z), loss="multinomial")
    with pytest.raises(ValueError, match="margin offsets are for linear models"):
        fc.Problem(dealt(X, labels, margin_offsets=z).dense(), model=torch.nn.Linear(40, 3))
    for wrong in (z[:, None], z * np.nan):
        with pytest.raises(DataError, match=r"margin.offsets"):
            dealt(X, z, margin_offsets=wrong)
    with pytest.raises(DataError, match="one for each of the 90 test samples"):
        fc.Silos.from_arrays([(X, z)], test=(X, z), margin_offsets=[z])


def test_a_federation_of_weighted_sparse_sites_is_the_simulator(tmp_path):
    """Sites count by the sums of their samples' weights, not by their numbers."""
    import tomli_w
    from local_federation import LocalSites, federate, opened

    from fedcomposite import algorithms
    from fedcomposite.federation.site.client_states import StateStore
    from fedcomposite.federation.site.site import Site

    silos = everything()
    silos = dataclasses.replace(silos, test=None, held_by={}, held_margin_offsets={}, names=("north", "south", "east"))
    method = FedNMap(2, 0.02, 1.0, gamma=0.5)
    for weights in ("uniform", "samples"):
        text = tomli_w.dumps({
            "problem": {"weights": weights, "bias": True}, "algorithm": algorithms.spec(method),
            "regularizer": {"name": "L1", "lam": 0.01}, "run": {"rounds": 4, "stationarity_step": 0.1},
        })  # fmt: skip
        sites = [
            Site(
                name,
                silos.subset([np.arange(*silos.offsets[i : i + 2])], [name]),
                StateStore(tmp_path / weights / name),
                opened(min_count=1),
            )
            for i, name in enumerate(silos.names)
        ]
        one, run = federate(LocalSites(sites), text)
        problem = fc.Problem(silos, regularizer=reg.L1(0.01), bias=True, weights=weights)
        want = fc.simulate(problem, method, rounds=4, backend="loop", stationarity_step=0.1)
        torch.testing.assert_close(run.solution, want.solution, rtol=0, atol=1e-12)
        assert run.history[-1].objective == pytest.approx(want.history[-1].objective, rel=1e-12)
        np.testing.assert_allclose(one.transport.weights, problem.weights, rtol=1e-12)


def test_the_docs_show_what_runs():
    text = (Path(__file__).parent.parent / "docs" / "datasets.md").read_text(encoding="utf-8")
    scope = {"fc": fc}
    shown = [b for b in re.findall(r"```python\n(.*?)```", text, re.S) if "fc.solve" in b]
    for block in shown:
        exec(block, scope)
        assert scope["run"].status == "converged"
    assert len(shown) == 2


def test_weights_of_classes_in_an_experiment():
    content = {"data": {"name": "wisconsin"}, "algorithm": {"name": "ProxNewton"}, "run": {"rounds": 1}}
    plain = Config.check(content).make_silos()
    for given, want in (
        ("balanced", plain.class_weighted()),
        ({"-1": 2.0, "1": 3.5}, plain.class_weighted({-1: 2, 1: 3.5})),
        ({"1": 3.5}, plain.class_weighted({-1: 1, 1: 3.5})),
    ):
        made = Config.check({**content, "problem": {"class_weight": given}})
        torch.testing.assert_close(made.make_problem().silos.weights, want.weights)
        assert Config.check(tomllib.loads(made.text)).problem == made.problem
        with pytest.warns(DeprecationWarning, match="class_weight of .problem."):
            old = Config.check({**content, "data": {"name": "wisconsin", "class_weights": given}})
        assert old.problem == made.problem
        assert old.data == made.data
    for wrong in ("even", {"2": 2.0}, {"a": 1.0}, {"1": 0.0}, {"1": "3"}):
        with pytest.raises(ConfigError, match="class_weight"):
            Config.check({**content, "problem": {"class_weight": wrong}}).make_problem()


@pytest.mark.parametrize("option", ["weight", "offset", "class_weights"])
def test_a_federation_leaves_weights_to_its_sites(option):
    from fedcomposite.federation.shape import parse

    text = (
        f'[data]\nfiles = ["a.csv"]\ntarget = "y"\n{option} = "n"\n[algorithm]\nname = "ProxNewton"\n[run]\nrounds = 1'
    )
    with pytest.raises(ConfigError, match=rf"\[data\] {option}: the data of a federation are at its sites"):
        parse(text)


def test_a_federation_leaves_weights_of_classes_to_its_sites():
    from fedcomposite.federation.shape import parse

    text = '[problem]\nclass_weight = "balanced"\n[algorithm]\nname = "ProxNewton"\n[run]\nrounds = 1'
    with pytest.raises(ConfigError, match=r"\[problem\] class_weight: .* its site"):
        parse(text)
