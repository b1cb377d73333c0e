"""Weights and offsets that a recipe names: at hand, on a test part, for new patients, at sites and in secure sums."""

import tomllib

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
import tomli_w
from analyst import PLAIN, inquiry
from local_federation import opened
from secure_sites import secure_tables

import fedcomposite as fc
from fedcomposite.experiments import Config, ConfigError
from fedcomposite.federation.coordinator import inquiry as inquiries
from fedcomposite.federation.coordinator.delivery import FederationError, Settings
from fedcomposite.federation.site.client_states import StateStore
from fedcomposite.federation.site.table_files import TableFile
from fedcomposite.federation.site.table_site import TableSite
from fedcomposite.runtime import Driver

ROLES = {"weight": "copies", "offset": "log years"}


@pytest.fixture(scope="module")
def frames():
    rng, made = np.random.default_rng(1), {}
    for name in ("north", "south", "west"):
        frame = pd.DataFrame({"age": rng.normal(60, 8, 80), "sex": rng.choice(["f", "m"], 80)})
        frame["log years"] = np.log(rng.uniform(1, 5, 80))
        frame["copies"] = rng.integers(1, 4, 80)
        rate = np.exp(0.03 * (frame["age"] - 60) + 0.4 * (frame["sex"] == "m") + frame["log years"] - 1)
        frame["falls"] = rng.poisson(rate)
        made[name] = frame
    return made


def written_out(frames):
    pooled = pd.concat(frames.values(), ignore_index=True)
    age = (pooled["age"] - pooled["age"].mean()) / pooled["age"].std(ddof=0)
    return pooled, np.column_stack([age, pooled["sex"] == "m", np.ones(len(pooled))])


def test_equal_to_statsmodels(frames):
    silos = fc.Recipe(one_hot=["sex"], **ROLES).prepare(frames, target="falls")
    assert silos.feature_names == ("age", "sex=m")
    problem = fc.Problem(silos, loss="poisson", bias=True, weights="samples")
    pooled, Z = written_out(frames)
    model = sm.GLM(pooled["falls"], Z, sm.families.Poisson(), offset=pooled["log years"], freq_weights=pooled["copies"])
    right = model.fit(tol=1e-14)
    found = fc.confidence(problem, fc.solve(problem, tolerance=1e-12))
    np.testing.assert_allclose(found["estimate"], right.params, atol=1e-8)
    scores = (Z * (pooled["copies"] * (pooled["falls"] - right.mu)).to_numpy()[:, None]).T
    bread = np.linalg.inv((Z * (pooled["copies"] * right.mu).to_numpy()[:, None]).T @ Z)
    np.testing.assert_allclose(found["se"], np.diag(bread @ scores @ scores.T @ bread) ** 0.5, rtol=1e-8)


def test_a_test_part_and_new_patients_have_their_offsets(frames, tmp_path):
    for name, frame in frames.items():
        frame.to_csv(tmp_path / f"{name}.csv", index=False)
    content = {
        "data": {"files": [str(tmp_path / f"{name}.csv") for name in frames], "target": "falls", "test": 0.25},
        "recipe": {"one_hot": ["sex"], **ROLES},
        "problem": {"loss": "poisson", "bias": True, "weights": "samples"},
    }
    path = tmp_path / "study.toml"
    path.write_text(tomli_w.dumps(content))
    problem = Config.read(path).make_problem()
    found = fc.analyse(problem, "fit")
    X, y = problem.silos.test
    margin = problem.predict(found.x, X) + problem.silos.held_margin_offsets["test"]
    assert found.tested.overall.summary()["rmse"] == pytest.approx(float((margin.exp() - y).square().mean() ** 0.5))
    found.write(fc.experiments.store.RunFolder(tmp_path / "run"), path.read_text(), [])
    made = fc.predict(tmp_path / "run", tmp_path / "west.csv").table
    learned = problem.silos.recipe.apply(tmp_path / "west.csv").to_numpy() @ found.x[:-1].numpy() + float(found.x[-1])
    np.testing.assert_allclose(made["margin"], learned + frames["west"]["log years"])
    content["data"]["weight"] = "copies"
    path.write_text(tomli_w.dumps(content))
    with pytest.raises(ConfigError, match="say it there: weight = 'copies'"):
        Config.read(path)


@pytest.mark.parametrize("secure", [False, True])
def test_at_sites_that_name_the_same_columns(frames, tmp_path, secure):
    files = {name: tmp_path / f"{name}.csv" for name in frames}
    for name, path in files.items():
        frames[name].to_csv(path, index=False)
    content = tomllib.loads(PLAIN)
    content["problem"]["loss"], content["recipe"] = "poisson", {"one_hot": ["sex"], **ROLES}
    here = fc.Recipe(one_hot=["sex"], **ROLES).prepare(list(files.values()), target="falls")
    h = fc.regularizers.L1(0.02)
    ours = fc.analyse(fc.Problem(here, loss="poisson", bias=True, weights="samples", regularizer=h), "fit")
    limits = opened(min_count=5, losses=["poisson"])

    def asked(where, **roles):
        if secure:
            sites, settings = secure_tables(files, tmp_path / where, limits, **roles), Settings(secure=True)
        else:
            source = {n: TableFile(n, p, **roles) for n, p in files.items()}
            sites = [TableSite(n, StateStore(tmp_path / where / n), limits, source=source[n]) for n in files]
            settings = Settings()
        asking, _ = inquiry(sites, tomli_w.dumps(content), settings=settings)
        driver = Driver(asking)
        asking.recipe = inquiries.learn(driver, asking.config, "falls")
        return fc.analyse(asking.meet(driver), "fit", driver=driver)

    with pytest.raises(FederationError, match="the site's word"):
        asked("without")
    theirs = asked("with", **ROLES)
    np.testing.assert_allclose(theirs.x, ours.x, atol=1e-8)
    np.testing.assert_allclose(theirs.intervals["se"], ours.intervals["se"], rtol=1e-6)


def test_weights_that_few_rows_have_are_refused(frames, tmp_path):
    """A sum with weights less one without them would be that of the rows whose weight is another one."""
    files = {name: tmp_path / f"{name}.csv" for name in frames}
    for name, path in files.items():
        frames[name].assign(copies=1.0 + (np.arange(80) < 2)).to_csv(path, index=False)
    content = tomllib.loads(PLAIN)
    content["problem"]["loss"], content["recipe"] = "poisson", {"one_hot": ["sex"], **ROLES}
    source = {n: TableFile(n, p, **ROLES) for n, p in files.items()}
    limits = opened(min_count=5, losses=["poisson"])
    sites = [TableSite(n, StateStore(tmp_path / "s" / n), limits, source=source[n]) for n in files]
    asking, _ = inquiry(sites, tomli_w.dumps(content))
    driver = Driver(asking)
    asking.recipe = inquiries.learn(driver, asking.config, "falls")
    with pytest.raises(FederationError, match="combination of columns"):
        fc.analyse(asking.meet(driver), "fit", driver=driver)


def test_what_does_not_fit_is_refused(frames):
    with pytest.raises(fc.DataError, match="weight"):
        fc.Recipe(one_hot=["sex"], weight="nothing").fit(frames, target="falls")
    words = {k: v.assign(copies="many") for k, v in frames.items()}
    with pytest.raises(fc.DataError, match="as numbers"):
        fc.Recipe(one_hot=["sex"], **ROLES).fit(words, target="falls")
