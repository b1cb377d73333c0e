"""Imputation by draws, and complete cases, at sites of a federation: refused, by the coordinator and by the gate."""

import pytest
from analyst import PLAIN
from local_federation import LocalSites, opened

import fedcomposite as fc
from fedcomposite.data.queries import Conditional, Gaps, LevelCounts
from fedcomposite.errors import ConfigError
from fedcomposite.federation.coordinator.delivery import FederationError, Settings
from fedcomposite.federation.coordinator.inquiry import Inquiry, learn
from fedcomposite.federation.shape import parse
from fedcomposite.federation.site.client_states import StateStore
from fedcomposite.federation.site.table_files import TableFile
from fedcomposite.federation.site.table_site import TableSite
from fedcomposite.runtime import Driver

PATIENTS = fc.data.frames("heart_disease")["hungary"][["age", "trestbps", "chol", "num"]]
RECIPE = '[recipe]\nimpute = "mean"\n'


@pytest.fixture
def asked(tmp_path):
    """Who asks sites of an experiment whose recipe says something else than what was read."""
    PATIENTS.to_csv(tmp_path / "a.csv", index=False)
    names = ["a", "b", "c"]
    limits = opened(min_count=5)
    sites = [TableSite(n, StateStore(tmp_path / n), limits, source=TableFile(n, tmp_path / "a.csv")) for n in names]

    def made(**changes):
        config = parse(PLAIN + RECIPE, recipe=True)
        config = config.model_copy(update={"recipe": {**config.recipe, **changes}})
        grid = LocalSites(sites)
        plan = {"gaps": 50, "schema": 50, "levels": 50, "moments": 50, "conditional": 50}
        asking = Inquiry(grid, names, grid.permitted, config, "job", Settings(), plan=plan)
        return Driver(asking), config

    return made


@pytest.mark.parametrize("impute", ['"chained"', '"complete"', '{ chol = "chained", default = "mean" }'])
def test_an_experiment_of_a_federation_says_that_it_is_not_offered(impute):
    with pytest.raises(ConfigError, match=r'not offered yet; take "mean"'):
        parse(PLAIN + f"[recipe]\nimpute = {impute}\n", recipe=True)


@pytest.mark.parametrize("way", ["chained", "complete"])
def test_a_site_refuses_the_experiment_whoever_wrote_it(asked, way):
    driver, config = asked(impute=way)
    with pytest.raises(FederationError, match="not offered yet"):
        learn(driver, config, "num")


def test_a_site_refuses_conditional_models_and_their_steps_under_any_recipe(asked):
    drawing = fc.Recipe(impute="chained", copies=2, iterations=1, min_count=1)
    silos = drawing.prepare([PATIENTS, PATIENTS], names=["a", "b"], target="num")
    step = next(one for one in silos.recipe.steps if one.kind == "chained")
    driver, _ = asked()
    assert driver.ask([Gaps(columns=["chol"])])
    name = step.chain.equations[0]
    points = [[0.0] * step.chain.outputs(name) * step.chain.width(name)] * 2
    with pytest.raises(FederationError, match="conditional"):
        driver.ask([Conditional(chain=step.chain, equation=name, points=points)])
    for query in (Gaps(columns=["chol"], steps=[step]), LevelCounts(columns=["chol"], steps=[step])):
        with pytest.raises(FederationError, match="steps"):
            driver.ask([query])
