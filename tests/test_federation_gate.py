"""A coordinator that follows no protocol against what sites bind, choose and remember: each attack succeeds where a
site opts out, and fails by default."""

import itertools
import json
import os

import pytest
import tomli_w
import torch
from local_federation import L1, LocalSites, alone, federate, method, opened, write
from lone_site import D, experiment, people
from secure_sites import make_keys, secure_sites

from fedcomposite.data import Silos
from fedcomposite.federation import wire
from fedcomposite.federation.coordinator.delivery import FederationError, Settings
from fedcomposite.federation.orders import Order, Shape
from fedcomposite.federation.shape import parse
from fedcomposite.federation.site.approval import Approval, Approvals, Rule, digest
from fedcomposite.federation.site.audit import Audit
from fedcomposite.federation.site.client_states import StateStore
from fedcomposite.federation.site.policy import Limits
from fedcomposite.federation.site.site import Site
from fedcomposite.testing import small_problem

WAIT = Settings(secure=True)
SKIP = Settings("skip", secure=True, patience=0.0)
NAMES = [f"f{j}" for j in range(D)]


@pytest.fixture(autouse=True)
def volatile(monkeypatch):
    """Files of a test need not survive a power cut."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(scope="module")
def silos():
    base = small_problem(method("FedNMap")).silos
    return Silos.from_arrays([base[i] for i in range(4)], names=["a", "b", "c", "d"])


class Tampering(LocalSites):
    """Orders that are changed on their way: ``tamper(order, vectors)`` gives both anew."""

    def __init__(self, sites, tamper):
        super().__init__(sites)
        for site in sites:
            answer = site.answer
            site.answer = lambda content, answer=answer: answer(self._changed(content, tamper))

    def _changed(self, content, tamper):
        record = dict(content)
        vectors = wire.deserialise(record["vectors"]) if "vectors" in record else {}
        order, vectors = tamper(Order.read(wire.text(content, "order")), vectors)
        return wire.content(order=order.model_dump_json(), **({"vectors": vectors} if vectors else {}))


def refusal(answer):
    return wire.text(answer, "refusal") if wire.kind(answer) == "refusal" else ""


# -- 1. bound ---------------------------------------------------------------------------------------------------------


def replies(silos, folder, start, settings, **limits):
    """The mean reply of round 1, when site a alone is told to begin elsewhere."""

    def elsewhere(order, vectors):
        if order.site == "a" and "start" in vectors:
            vectors["start"] = vectors["start"] + start
        return order, vectors

    grid = Tampering(secure_sites(silos, folder, opened(**limits)), elsewhere)
    text = write(method("FedDR"), L1, rounds=1)
    _, run = federate(grid, text, settings)
    return run.solution


def test_another_start_for_one_site_gives_nothing_of_it_alone(silos, tmp_path):
    """Where sites may go away each begins when it first takes part, and a difference of two jobs is of one site."""
    away = torch.linspace(-1, 1, 8, dtype=torch.float64)
    loose = [replies(silos, tmp_path / str(i), i * away, SKIP, changing_cohorts=True) for i in range(2)]
    assert float((loose[1] - loose[0]).abs().max()) > 1e-3
    replies(silos, tmp_path / "honest", 0.0 * away, WAIT)
    with pytest.raises(FederationError, match="do not cancel"):
        replies(silos, tmp_path / "tight", away, WAIT)


@pytest.mark.parametrize("fields", [{"last": -1}, {"position": 3}, {"cohort": 3}, {"client": 1}])
def test_a_sites_own_numbers_follow_from_what_all_are_told(silos, tmp_path, fields):
    def lying(order, vectors):
        wrong = order.site == "a" and order.train and order.round == 1
        if wrong and "last" in fields:
            vectors["start"] = vectors["message.x"].clone() if "message.x" in vectors else vectors["message.z"].clone()
        return (order.model_copy(update=fields) if wrong else order), vectors

    grid = Tampering(secure_sites(silos, tmp_path), lying)
    with pytest.raises(FederationError, match=r"refuses: .*(not those that follow|do not fit together)"):
        federate(grid, write(method("FedNMap"), L1, rounds=3), WAIT)


def named_site(folder, **limits):
    """The lone site of 46 rows, with names of columns."""
    silos = Silos.from_arrays([people()], names=["a"], feature_names=NAMES)
    return Site("a", silos, StateStore(folder), Limits(**limits))


def evaluations(site, orders):
    """Gradients at one model under several orders of the columns, in a job for each order or in one."""
    model = torch.linspace(-0.3, 0.4, D, dtype=torch.float64)
    found = []
    for names, job in orders:
        shape = Shape(features=[D], dtype="float64", labels=[0.0, 1.0], names=names, clients=1)
        order = Order(job=job, site="a", config=experiment(), shape=shape, evaluate=True)
        vectors = {"buffers": torch.zeros(0, dtype=torch.float64), "model": model}
        answer = site.answer(wire.content(order=order.model_dump_json(), vectors=vectors))
        if wire.kind(answer) != "refusal":
            found.append(wire.deserialise(answer["vectors"])["gradient"])
    return found


def test_columns_in_another_order_are_no_further_models(tmp_path):
    """One model under 100 permutations was 100 models in one round of one job."""
    some = [list(names) for names in itertools.islice(itertools.permutations(NAMES), 100)]
    assert (
        len(evaluations(named_site(tmp_path / "a", jobs_per_day=1000), [(n, f"j{i}") for i, n in enumerate(some)]))
        == 100
    )
    assert len(evaluations(named_site(tmp_path / "b"), [(n, "job") for n in some])) == 1


def asked(site, config, plan, kind, job="job", number=1):
    """One question of an analysis with a plan, at the site of 46 rows."""
    shape = None if kind in ("schema", "introduction") else {
        "features": [D], "dtype": "float64", "labels": [0.0, 1.0], "names": NAMES, "clients": 1, "sites": ["a"],
    }  # fmt: skip
    analysis = {"number": number, "plan": plan}
    if kind == "schema":
        analysis["queries"] = ['{"name": "schema"}']
    elif kind != "introduction":
        analysis["questions"] = [{"name": kind}]
    order = Order.model_validate({"job": job, "site": "a", "config": config, "shape": shape, "analysis": analysis})
    vectors = {"0.x": torch.zeros(D, dtype=torch.float64)}
    more = {"vectors": vectors} if shape is not None else {}
    return site.answer(wire.content(order=order.model_dump_json(), **more))


def test_a_yes_is_for_the_kinds_and_numbers_of_answers_that_were_shown(tmp_path):
    """To a question about columns it was one to every question."""
    config = experiment()
    free = named_site(tmp_path / "free")
    assert wire.kind(asked(free, config, {}, "schema")) == "answers"
    assert wire.kind(asked(free, config, {}, "information", number=2)) == "report"
    site, approvals = named_site(tmp_path / "a"), Approvals(tmp_path / "a", Approval(required=True))
    site._approvals = approvals
    assert "does not say what it will ask" in refusal(asked(site, config, {}, "schema"))
    plan = {"schema": 2}
    assert "waits for approval" in refusal(asked(site, config, plan, "schema"))
    (name,) = approvals.all()
    assert approvals.all()[name]["plan"] == plan
    approvals.decide(name, "approved")
    assert wire.kind(asked(site, config, plan, "schema")) == "answers"
    assert "not among what this job said" in refusal(asked(site, config, plan, "information", number=2))
    more = {"schema": 2, "information": 1}
    assert "waits for approval" in refusal(asked(site, config, more, "information", number=2))
    assert wire.kind(asked(site, config, plan, "schema", number=3)) == "answers"
    assert "said that it would ask for 2 'schema'" in refusal(asked(site, config, plan, "schema", number=4))
    assert "waits for approval at the site once more" in refusal(asked(site, config, plan, "schema", job="other"))
    approvals.decide(name, "approved", jobs=2)
    for job in ("other", "another"):
        assert wire.kind(asked(site, config, plan, "schema", job=job)) == "answers"
    assert "once more" in refusal(asked(site, config, plan, "schema", job="a-third"))


def test_a_plan_is_part_of_a_job(tmp_path):
    site = named_site(tmp_path)
    asked(site, experiment(), {"schema": 1}, "schema")
    assert "its plan is not the one" in refusal(asked(site, experiment(), {"schema": 9}, "schema", number=2))


def test_a_yes_to_open_steps_is_one_to_steps(tmp_path):
    """Whatever else is filled in is another experiment."""

    def text(**fields):
        content = {"algorithm": {"name": "FedNMap", **fields}, "run": {"rounds": 3}, "regularizer": L1}
        return tomli_w.dumps(content)

    approvals = Approvals(tmp_path, Approval(required=True))
    site = named_site(tmp_path)
    site._approvals = approvals

    def introduced(config):
        return refusal(site.answer(wire.content(order=Order(job="job", site="a", config=config).model_dump_json())))

    assert "waits" in introduced(text(steps="auto", local_steps=2))
    approvals.decide(digest(parse(text(steps="auto", local_steps=2))), "approved")
    steps = {"step": 0.1, "server_step": 1.0, "gamma": 0.2}
    assert not introduced(text(**steps, local_steps=2))
    assert "waits" in introduced(text(**steps, local_steps=2, partial_participation=True))
    assert "waits" in introduced(text(**steps, local_steps=7))


def measured(site, count, job=lambda r: "job"):
    """How many evaluations are answered, of experiments with two measured models, each asked for at two."""
    shape = Shape(features=[D], dtype="float64", labels=[0.0, 1.0], names=NAMES, clients=1)
    config, answered = experiment(rounds=1), 0
    for r in range(count):
        model = torch.full((D,), r / count, dtype=torch.float64)
        order = Order(job=job(r), site="a", config=config, shape=shape, round=r % 4 // 2, evaluate=True)
        vectors = {"buffers": torch.zeros(0, dtype=torch.float64), "model": model}
        answered += wire.kind(site.answer(wire.content(order=order.model_dump_json(), vectors=vectors))) == "report"
    return answered


def test_evaluations_of_a_class_of_experiments_are_counted(tmp_path):
    """Three for each job were 300 in a day."""
    rule = {"methods": ["FedAvg"], "losses": ["logistic"], "max_rounds": 9, "max_evaluations": 3, "secure": False}
    for place, more, most in (
        ("a", {}, 9),
        ("b", {"max_jobs": 1}, 3),
        ("c", {"max_jobs": 100, "max_evaluations": 9}, 100),
    ):
        site = named_site(tmp_path / place)
        site._approvals = Approvals(tmp_path / place, Approval(required=True, allow=[Rule(**{**rule, **more})]))
        assert measured(site, 100, lambda r: f"j{r // 4}") == most


def test_a_line_of_the_audit_log_commits_to_the_question(silos, tmp_path):
    key = make_keys(["a"])["a"]
    site = Site("a", alone(silos, 0), StateStore(tmp_path), opened(), audit=Audit(tmp_path, key))
    grid = LocalSites([site])
    federate(grid, write(method("FedNMap"), L1, rounds=2))
    lines = Audit(tmp_path, key).verify()
    assert [line["question"] for line in lines] == [wire.digest(content) for _, content, _ in grid.log]
    assert len({line["question"] for line in lines}) == len(lines)
    assert json.loads((tmp_path / "ledger.json").read_text())["jobs"]["job"]["bound"].keys() >= {"experiment", "shape"}
