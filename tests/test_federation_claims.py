"""What sites claim, against what can be: impossible claims are refused by name, and the others go on."""

import json
import math

import numpy as np
import pytest
import safetensors.torch
import tomli_w
import torch
from local_federation import LocalSites, federate, make_sites, method, write
from orders import DEEP, ORDER

import fedcomposite as fc
from fedcomposite.data import Silos
from fedcomposite.federation import wire
from fedcomposite.federation.coordinator import claims
from fedcomposite.federation.coordinator.coordinator import Coordinator
from fedcomposite.federation.coordinator.delivery import FederationError, Settings
from fedcomposite.federation.orders import Introduction, Order
from fedcomposite.federation.shape import AgreementError, parse
from fedcomposite.federation.wire import WireError


@pytest.fixture(scope="module")
def silos():
    generator = np.random.default_rng(0)
    pairs = [(generator.normal(size=(12, 3)), np.arange(12) % 2.0) for _ in range(4)]
    return Silos.from_arrays(pairs, names=["a", "b", "c", "d"], feature_names=["x", "y", "z"])


def lying(change):
    """Site b says something else in round 3 (of a run with test data at every site)."""

    def lie(site, order, answer):
        if site != "b" or wire.kind(answer) != "report" or wire.numbers(answer)["round"] != 2:
            return answer
        numbers, vectors = wire.numbers(answer), safetensors.torch.load(answer["vectors"])
        change(numbers, vectors)
        return wire.content(report=numbers, vectors=vectors)

    return lie


def row(name, *values):
    return lying(lambda numbers, vectors: vectors.update({f"counts.{name}": torch.tensor([values]).double()}))


CLAIMS = {
    "its loss is as large as inf": lying(lambda n, v: n.update(loss=math.inf)),
    "its loss is -2.5e+299, which is below 0": lying(lambda n, v: n.update(loss=-2.5e299)),
    "its loss is as large as 1e+300": lying(lambda n, v: n.update(loss=1e300)),
    "its vector 'reply.dx' is as large as 1e+308": lying(
        lambda n, v: v.update({"reply.dx": v["reply.dx"] * 0 + 1e308})
    ),
    "its vector 'reply.dx' is as large as 1e+06": lying(lambda n, v: v.update({"reply.dx": v["reply.dx"] * 0 + 1e6})),
    "its vector 'gradient' is as large as 1e+200": lying(lambda n, v: v.update(gradient=v["gradient"] * 0 + 1e200)),
    "its counts of train/accuracy cannot be: 1.35135e+06 of 12": row("train/accuracy", 1351351.0, 12.0),
    "its counts of train/accuracy cannot be: 12 of 1.35135e+06": row("train/accuracy", 12.0, 1351351.0),
    "its counts of train/samples cannot be: 0 of 12": row("train/samples", 0.0, 12.0),
    "its counts of test/samples cannot be: 0 of 0": row("test/samples", 0.0, 0.0),
    "has 1000 test samples now, 12 before": row("test/samples", 12.0, 1000.0),
    "its counts of test/accuracy cannot be: 0 of 0": row("test/accuracy", 0.0, 0.0),
    "its counts of validation/accuracy come without": row("validation/accuracy", 1.0, 2.0),
}


@pytest.mark.parametrize("claim", list(CLAIMS))
def test_impossible_claims_are_refused_by_name(silos, claim, tmp_path):
    """With "skip" the run goes on to its end and is not "diverged"; with "wait" one line names the site."""
    text = write(method("FedAvg"), rounds=4)
    tested = Silos.from_arrays([silos[i] for i in range(4)], names=silos.names)

    def sites(folder):
        made = make_sites(tested, folder)
        for one in made:
            one.silos = Silos.from_arrays([one.silos[0]], names=[one.name], test=silos[0])
        return made

    log = []
    grid = LocalSites(sites(tmp_path / "1"), CLAIMS[claim])
    _, run = federate(grid, text, Settings(policy="skip"), log=log)
    assert (run.status, run.rounds) == ("completed", 4)
    assert [line for line in log if line.startswith(f"refused: b: {claim}")], log
    assert len(log) == 1
    with pytest.raises(FederationError, match=r"^b: "):
        federate(LocalSites(sites(tmp_path / "2"), CLAIMS[claim]), text)


def test_a_run_that_diverges_everywhere_is_diverged(silos, tmp_path):
    """Huge steps: all sites report infinite or enormous losses, and nobody is blamed."""
    algorithm = fc.algorithms.FedAvg(local_steps=1, step=1e9)
    text = write(algorithm, rounds=30) + '[problem]\nloss = "least_squares"\n'
    for policy in ("wait", "skip"):
        _, run = federate(LocalSites(make_sites(silos, tmp_path / policy)), text, Settings(policy=policy))
        assert run.status == "diverged"


def test_strangers():
    """One beyond the limit among several is a stranger, most of them are not; ratios need two others."""
    assert set(claims.strangers({"a": {"x": math.inf}, "b": {"x": 1.0}, "c": {"x": 2.0}}, 1e15, 1e5)) == {"a"}
    assert claims.strangers({"a": {"x": math.inf}, "b": {"x": math.inf}, "c": {"x": 2.0}}, 1e15, 1e5) == {}
    assert claims.strangers({"a": {"x": math.inf}}, 1e15, 1e5) == {}
    assert set(claims.strangers({"a": {"x": 1e7}, "b": {"x": 1.0}, "c": {"x": 2.0}}, 1e15, 1e5)) == {"a"}
    assert claims.strangers({"a": {"x": 1e7}, "b": {"x": 1e6}, "c": {"x": 2e5}}, 1e15, 1e5) == {}
    assert claims.strangers({"a": {"x": 1e7}, "b": {"x": 1.0}}, 1e15, 1e5) == {}
    assert claims.strangers({"a": {"x": 1e4}, "b": {"x": 0.0}, "c": {"x": 0.0}}, 1e15, 1e5) == {}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"samples": 10**400}, "samples"),
        ({"scale": -1.0}, "scale"),
        ({"smoothness": math.nan}, "smoothness"),
        ({"names": ["x", "y", "w"]}, "has no column 'z'"),
        ({"scale": 1e300}, "on the scale 1e+300"),
        ({"version": "9\x1b"}, "runs fedcomposite 9"),
        ({"labels": [0.0, 1.0, 2.0]}, "has labels"),
    ],
)
def test_one_bad_introduction_does_not_stop_the_others(silos, change, reason, tmp_path):
    def lie(site, order, answer):
        if site != "b" or wire.kind(answer) != "introduction":
            return answer
        return wire.content(introduction=json.dumps(json.loads(wire.text(answer, "introduction")) | change))

    log = []
    text = write(method("FedAvg"), rounds=2)
    one, run = federate(LocalSites(make_sites(silos, tmp_path / "1"), lie), text, Settings(policy="skip"), log=log)
    assert run.rounds == 2
    assert one.sites == ["a", "c", "d"]
    assert log[0].startswith("refused: b: ")
    assert reason in log[0]
    assert log[0].isprintable()
    assert log[1] == "this run is without b"
    with pytest.raises((FederationError, AgreementError), match=r"^b"):
        federate(LocalSites(make_sites(silos, tmp_path / "2"), lie), text)


def test_a_run_without_a_site_resumes_without_it(silos, tmp_path):
    """The site that was missing at the start is back when the run is resumed; the run stays what it was."""
    text = write(method("FedAvg"), rounds=4)
    path = tmp_path / "state.safetensors"
    grid = LocalSites(make_sites(silos, tmp_path / "1"))
    grid.away.add("b")
    settings = Settings(policy="skip", patience=0.05)
    names = ["a", "b", "c", "d"]
    one = Coordinator(grid, names, grid.permitted, parse(text), "job", settings, stop=lambda: len(grid.log) > 9)
    one.prepare()
    assert one.run(path).status == "interrupted"
    grid.away.clear()
    again = Coordinator(grid, names, grid.permitted, parse(text), "job", settings)
    again.prepare(path)
    run = again.run(path)
    assert again.sites == ["a", "c", "d"]
    assert (run.status, run.rounds) == ("completed", 4)


def test_constants_of_sites_are_those_of_the_simulator(tmp_path):
    """steps = "auto" gives the same steps: unequal silos, padded in the simulator, alone at their sites."""
    generator = np.random.default_rng(0)
    pairs = [
        (generator.normal(size=(m, 6)) * s, np.arange(m) % 2.0) for m, s in ((17, 1), (40, 3), (23, 2.99), (61, 2.9))
    ]
    silos = Silos.from_arrays(pairs, names=["a", "b", "c", "d"])
    text = tomli_w.dumps({"algorithm": {"name": "FedNMap", "local_steps": 4, "steps": "auto"}, "run": {"rounds": 1}})
    one, _ = federate(LocalSites(make_sites(silos, tmp_path)), text)
    config = parse(text)
    simulated = config.make_algorithm(config.specs[0], config.make_problem(silos))
    assert math.isclose(one.algorithm.step, simulated.step, rel_tol=2e-15)
    problem = fc.Problem(silos, loss="logistic")
    alone = [fc.Problem(Silos.from_arrays([p]), loss="logistic").smoothness() for p in pairs]
    assert math.isclose(max(alone), problem.smoothness(), rel_tol=2e-15)


def test_orders_and_introductions_have_bounds():
    for changes in ({"round": 10**400}, {"round": 2**31 + 1}, {"client": -1}, {"cohort": 0}, {"last": -2}):
        with pytest.raises(WireError, match="not a valid order"):
            Order.read(json.dumps({**ORDER, **changes}))
    with pytest.raises(WireError, match="not a valid introduction"):
        Introduction.read(DEEP)


def test_the_regularized_demo_needs_no_opt_in(tmp_path):
    """Heart Disease at the sites' default limits, with full gradients, equals the simulator.

    One hospital has a single patient without the disease, and few with some columns: ``demo`` sets min_class = 1 and
    min_count = 1 for these public data.
    """
    from fedcomposite.federation.demo import CONFIG as DEMO
    from fedcomposite.federation.site.site import Limits

    silos = fc.data.load("heart_disease")
    text = DEMO.format(rounds=5)
    _, run = federate(LocalSites(make_sites(silos, tmp_path, Limits(min_class=1, min_count=1))), text)
    config = parse(text)
    want = fc.simulate(
        config.make_problem(silos), config.make_algorithm(config.specs[0], None), rounds=5, stationarity_step=1.0
    )
    torch.testing.assert_close(run.solution, want.solution, rtol=0, atol=1e-12)
