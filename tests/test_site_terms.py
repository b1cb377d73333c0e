"""`site` as a term of a recipe: intercepts at hand, at sites and in secure sums are those of pooled dummies."""

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
from fedcomposite.data import DataError
from fedcomposite.experiments import Config
from fedcomposite.federation.coordinator import inquiry as inquiries
from fedcomposite.federation.coordinator.delivery import FederationError, Settings
from fedcomposite.federation.site.client_states import StateStore
from fedcomposite.federation.site.table_files import TableFile
from fedcomposite.federation.site.table_site import TableSite
from fedcomposite.runtime import Driver

HEART = {**Config.read("heart-recipe").recipe, "indicators": False, "rare": 0}


def pooled(silos):
    """Features with an intercept, labels, and whose they are."""
    X, y = (np.concatenate([one[i].numpy() for one in silos]) for i in (0, 1))
    return np.column_stack([np.ones(len(y)), X]), y.ravel(), np.repeat(silos.names, [len(b) for _, b in silos])


@pytest.fixture(scope="module")
def hospitals():
    return fc.data.frames("heart_disease")


@pytest.mark.parametrize("wish", [True, "hungary"])
def test_unpenalised_intercepts_are_those_of_dummies(hospitals, wish):
    """The README's model: Switzerland's adjusted odds ratio, beside Cleveland, is statsmodels' 16.2."""
    silos = fc.Recipe(**HEART, site=wish).prepare(hospitals, target="num")
    Z, y, site = pooled(fc.Recipe(**HEART).prepare(hospitals, target="num"))
    others = [name for name in hospitals if name != ("cleveland" if wish is True else wish)]
    Z = np.column_stack([Z, *[(site == name).astype(float) for name in others]])
    right = sm.Logit(y, Z).fit(disp=0, method="newton", tol=1e-14)
    problem = fc.Problem(silos, loss="logistic", bias=True, weights="samples")
    found = fc.confidence(problem, np.zeros(problem.dimension), jeffreys=0)
    terms = [f"site={name}" for name in others]
    np.testing.assert_allclose(found.loc[terms, "unit_estimate"], right.params[-3:], rtol=1e-8)
    np.testing.assert_allclose(found.loc[terms, "se"], right.bse[-3:], rtol=1e-8)
    if wish is True:
        assert round(found.loc["site=switzerland", "unit_odds_ratio"], 1) == 16.2


@pytest.mark.parametrize(
    "how", [{"site": True}, {"site": "hungary", "standardize": "all", "min_count": 1}, {"site": "all"}]
)
def test_a_model_of_a_site_alone_has_its_intercept_and_no_such_terms(hospitals, how):
    """Those of recipes without a term for sites."""
    alike = {name: value for name, value in how.items() if name != "site"}
    right, found = (
        fc.by_site(fc.Problem(fc.Recipe(**HEART | one).prepare(hospitals, target="num"), bias=True, weights="samples"))
        for one in (alike, how)
    )
    assert not right.combined.loc["(intercept)"].isna().any()
    for one in ("sites", "combined"):
        a, b = (getattr(made, one) for made in (found, right))
        np.testing.assert_allclose(a.select_dtypes("number"), b.select_dtypes("number"), rtol=1e-6, atol=1e-8)
    assert list(found.combined.index) == list(right.combined.index)
    assert found.notes.keys() == right.notes.keys()


def test_sites_in_products_without_a_reference_and_of_new_samples(hospitals, tmp_path):
    recipe = fc.Recipe(**HEART, site="all", interactions=[("site", "age")])
    silos = recipe.prepare(hospitals, target="num")
    names = list(silos.feature_names)
    for i, name in enumerate(hospitals):
        X = silos[i][0].numpy()
        mine = [names.index(f"site={one}") for one in hospitals]
        np.testing.assert_array_equal(X[:, mine], np.tile([one == name for one in hospitals], (len(X), 1)))
    frame = hospitals["switzerland"]
    of = silos.recipe.apply(frame, site="switzerland")
    assert (of["site=switzerland"] == 1).all()
    assert (silos.recipe.apply(frame)[[f"site={one}" for one in hospitals]] == 0).all().all()
    problem = fc.Problem(silos, bias=True, weights="samples", regularizer=fc.regularizers.L1(0.01))
    with pytest.warns(fc.analysis.UndeterminedWarning, match="site=cleveland"):  # they add up to the intercept
        fc.analyse(problem, "fit").save(tmp_path / "run")
    scored = []
    for name in ("switzerland", "elsewhere"):
        frame.to_csv(tmp_path / f"{name}.csv", index=False)
        scored.append(fc.predict(tmp_path / "run", tmp_path / f"{name}.csv").table["margin"].mean())
    assert scored[0] > scored[1] + 0.5


def test_a_left_out_site_has_the_intercept_of_the_reference(hospitals):
    silos = fc.Recipe(**HEART, site=True).prepare(hospitals, target="num")
    h = fc.regularizers.L1(1.0)
    problem = fc.Problem(silos, bias=True, weights="samples", regularizer=h, penalty_factor={"site": 0})
    found = fc.cross_validate(problem, folds="sites", count=4, ratio=0.1)
    for j, name in enumerate(silos.names):
        if name != "cleveland":
            at = problem.coordinate_names.index(f"site={name}")
            assert (found.models[j][:, at] == 0).all()
            assert (found.path.solutions[:, at] != 0).all()


def test_what_does_not_fit_is_refused(hospitals):
    with pytest.raises(DataError, match="nowhere"):
        fc.Recipe(**HEART, site="nowhere").fit(hospitals, target="num")
    with pytest.raises(DataError, match="site"):
        fc.Recipe(**HEART, site="")
    own = {name: frame.assign(site=np.arange(len(frame))) for name, frame in hospitals.items()}
    with pytest.raises(DataError, match="a column 'site', too"):
        fc.Recipe(**HEART, site=True).fit(own, target="num")


@pytest.mark.parametrize("secure", [False, True])
def test_at_sites(tmp_path, secure):
    rng, files = np.random.default_rng(0), {}
    for k, name in enumerate(("north", "south", "west")):
        frame = pd.DataFrame({"age": rng.normal(60, 8, 80), "sex": rng.choice(["f", "m"], 80)})
        frame["sick"] = (rng.random(80) < 1 / (1 + np.exp(1 - k - (frame["age"] - 60) / 8))).astype(int)
        files[name] = tmp_path / f"{name}.csv"
        frame.to_csv(files[name], index=False)
    recipe = {"one_hot": ["sex"], "site": True}
    text = tomli_w.dumps({**tomllib.loads(PLAIN), "recipe": recipe})
    here = fc.Recipe(**recipe).prepare(list(files.values()), target="sick")
    h = fc.regularizers.L1(0.02)
    ours = fc.analyse(fc.Problem(here, loss="logistic", bias=True, weights="samples", regularizer=h), "fit")

    def asked(limits):
        if secure:
            sites, settings = secure_tables(files, tmp_path / str(limits.left_out), limits), Settings(secure=True)
        else:
            sites = [TableSite(n, StateStore(tmp_path / n), limits, source=TableFile(n, p)) for n, p in files.items()]
            settings = Settings()
        asking, _ = inquiry(sites, text, settings=settings)
        driver = Driver(asking)
        asking.recipe = inquiries.learn(driver, asking.config, "sick")
        return fc.analyse(asking.meet(driver), "fit", driver=driver)

    if secure:
        with pytest.raises(FederationError, match="left_out = true"):
            asked(opened(min_count=5))
    theirs = asked(opened(min_count=5, left_out=True) if secure else opened(min_count=5))
    assert theirs.problem.coordinate_names == ours.problem.coordinate_names
    np.testing.assert_allclose(theirs.x.numpy(), ours.x.numpy(), atol=1e-8)
    np.testing.assert_allclose(theirs.intervals["estimate"], ours.intervals["estimate"], atol=1e-8)
