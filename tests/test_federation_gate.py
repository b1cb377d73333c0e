"""A coordinator that follows no protocol against what sites bind, choose and remember: each attack succeeds where a
site opts out, and fails by default."""

import itertools
import json
import tomllib
from typing import NamedTuple

import numpy as np
import pandas as pd
import pytest
import tomli_w
import torch
from analyst import PLAIN as ANALYST
from local_federation import L1, LocalSites, alone, federate, make_sites, method, opened, write
from lone_site import D, M, ask, experiment, people
from lone_site import make_site as make_lone
from secure_sites import make_keys, secure_sites

import fedcomposite as fc
from fedcomposite.data import Recipe, Silos
from fedcomposite.data.describing import look_at
from fedcomposite.data.queries import Below, Gaps, LevelCounts, Moments, Outside, Rules, Schema
from fedcomposite.data.queries import answer as tell
from fedcomposite.data.sheets import Sheet
from fedcomposite.data.steps import (
    OTHER,
    Complete,
    Impute,
    Interact,
    Levels,
    Local,
    Log,
    OneHot,
    Spline,
    Standardize,
    natural_spline,
    prepared,
)
from fedcomposite.experiments import Config
from fedcomposite.federation import wire
from fedcomposite.federation.coordinator.delivery import FederationError, Settings
from fedcomposite.federation.coordinator.inquiry import Inquiry, learn
from fedcomposite.federation.coordinator.plans import PLANS
from fedcomposite.federation.engines import pki
from fedcomposite.federation.folders import FederationFolder
from fedcomposite.federation.orders import Order, Shape
from fedcomposite.federation.secure.keys import MaskKeys
from fedcomposite.federation.shape import parse
from fedcomposite.federation.site import noise, table_site
from fedcomposite.federation.site.approval import Approval, Approvals, Rule, digest
from fedcomposite.federation.site.audit import Audit
from fedcomposite.federation.site.client_states import LostStateError, StateStore
from fedcomposite.federation.site.column_spans import heaviest, spanned
from fedcomposite.federation.site.policy import Limits, RefusalError
from fedcomposite.federation.site.row_sets import blocks, folds_of_blocks
from fedcomposite.federation.site.site import Site
from fedcomposite.federation.site.table_files import TableFile
from fedcomposite.federation.site.table_site import TableSite
from fedcomposite.privacy import Query, compose
from fedcomposite.problems import Problem
from fedcomposite.runtime import Driver
from fedcomposite.runtime.protocol import ALL, Introduce, Rows, information, losses, newton, silos_of, tallies
from fedcomposite.testing import small_problem

WAIT = Settings(secure=True)
SKIP = Settings("skip", secure=True, patience=0.0)
NAMES = [f"f{j}" for j in range(D)]


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
    return next((str(answer[kind]) for kind in ("refusal", "waiting") if kind in answer), "")


# -- tables ------------------------------------------------------------------------------------------------------------

PLAIN = tomllib.loads(ANALYST)


def frame_of(name, size=60, seed=0):
    """Patients of one site: an identifier, two measurements, one of them with gaps, a kind, an outcome."""
    draw = np.random.default_rng([seed, *name.encode()])
    made = pd.DataFrame({"id": [f"{name}-{i:04d}" for i in draw.permutation(size)], "age": draw.normal(50, 9, size)})
    made["dose"] = draw.normal(3, 1, size).round(2)
    made["kind"] = draw.choice(["x", "y"], size)
    made["sick"] = (draw.random(size) < 0.5).astype(float)
    return made


@pytest.fixture
def consortium(tmp_path):
    """``make(recipe, **limits)``: sites with tables and a way to ask them; the limits of a first try by default."""
    times = itertools.count()

    def make(recipe, frames=None, secure=None, folder=None, job=None, drop=("id",), **limits):
        place, jobs = tmp_path / (folder or str(next(times))), job or f"job{next(times)}"
        frames = frames or {name: frame_of(name) for name in ("a", "b", "c")}
        keys, sites = make_keys(frames), []
        for name, frame in frames.items():
            place.mkdir(exist_ok=True, parents=True)
            frame.to_csv(place / f"{name}.csv", index=False)
            source = TableFile(name, place / f"{name}.csv", Local(drop=list(drop)))
            peers = {k: v.public_key() for k, v in keys.items() if k != name}
            own = Limits(**limits)
            sites.append(
                TableSite(
                    name, StateStore(place / name), own, source=source, vault=MaskKeys(name, own, keys[name], peers)
                )
            )
        grid = LocalSites(sites)
        text = tomli_w.dumps({**PLAIN, "recipe": recipe})
        return Inquiry(grid, list(frames), grid.permitted, parse(text, recipe=True), jobs, secure)

    return make


def ready(asking, target="sick"):
    """After the recipe was learned and the sites were met."""
    asking.recipe = learn(Driver(asking), asking.config, target)
    asking.meet()
    return asking


def gradient(asking, x=None, by_site=True):
    """Plain sums over rows at a model: of the first site, or over all."""
    d = len(asking.recipe.features) + 1
    x = torch.zeros(d, dtype=torch.float64) if x is None else x
    asked = newton(x, torch.zeros(d, dtype=torch.bool), ALL)
    return (Driver(asking).each([asked])[0][0] if by_site else asking.ask([asked])[0])["gradient"].numpy()


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
        shape = Shape(features=[D], dtype="float64", labels=[0.0, 1.0], names=names, clients=3)
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
        "features": [D], "dtype": "float64", "labels": [0.0, 1.0], "names": NAMES, "clients": 3,
        "sites": ["a", "b", "c"],
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


def test_another_experiment_under_an_approved_name(tmp_path):
    """A title is no approval: in the approved job it is refused, in another it waits, and both are in the audit log."""

    def text(**run):
        content = {"name": "heart", "algorithm": {"name": "FedAvg", "local_steps": 2, "step": 0.1}}
        return tomli_w.dumps({**content, "run": {"rounds": 3, **run}, "regularizer": L1})

    key, approvals = make_keys(["a"])["a"], Approvals(tmp_path, Approval(required=True))
    site = named_site(tmp_path)
    site._approvals, site._audit = approvals, Audit(tmp_path, key)

    def introduced(config, job="job"):
        return refusal(site.answer(wire.content(order=Order(job=job, site="a", config=config).model_dump_json())))

    waits = introduced(text())
    approvals.decide(digest(parse(text())), "approved")
    assert not introduced(text())
    refused = [introduced(text(rounds=300)), introduced(text(rounds=2)), introduced(text(rounds=300), "other")]
    assert all("waits for approval" in one for one in refused)
    approvals.decide(digest(parse(text(rounds=300))), "approved")  # and then it is not that job's
    refused += [introduced(text(rounds=300))]
    assert "experiment" in refused[-1]
    kept = [line.get("refused") for line in Audit(tmp_path, key).verify()]
    assert kept == [waits, None, *refused]


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
    others = [text(**steps, local_steps=2, partial_participation=True), text(**steps, local_steps=7)]
    assert all("waits" in introduced(other) for other in others)
    site = named_site(tmp_path / "free")  # asks for nobody's word, and does what it is told
    assert not any(introduced(other) for other in others)


def measured(site, count, job=lambda r: "job"):
    """How many evaluations are answered, of experiments with two measured models, each asked for at two."""
    shape = Shape(features=[D], dtype="float64", labels=[0.0, 1.0], names=NAMES, clients=3)
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
    (order, _), *_ = [(asked, line) for (_, asked, _), line in zip(grid.log, lines, strict=True) if "vectors" in asked]
    vectors = wire.deserialise(order["vectors"])
    changed = {name: v + (v.is_floating_point() and 1e-9) for name, v in vectors.items()}  # "that is what I asked"
    claimed = wire.content(order=wire.text(order, "order"), vectors=changed)
    assert wire.digest(claimed) not in {line["question"] for line in lines}
    site.answer(claimed)
    *_, last = Audit(tmp_path, key).verify()
    words = ("job", "round", "what", "experiment")
    assert [{k: line[k] for k in words} for line in lines].count({k: last[k] for k in words}) == 1  # of either question
    assert last["question"] == wire.digest(claimed)
    assert json.loads((tmp_path / "ledger.json").read_text())["jobs"]["job"]["bound"].keys() >= {"experiment", "shape"}


# -- 2. the asker chooses no rows and reads no files -------------------------------------------------------------------


def known_folds(site, jobs):
    """Sums of y x over folds whose rows follow from a seed: a linear system for the rows times their labels."""
    system, right = [], []
    for seed in range(jobs):
        config = f"seed = {seed}\n" + experiment("least_squares")
        shape = {"features": [D], "dtype": "float64", "names": NAMES, "clients": 3, "sites": ["a", "b", "c"]}
        rows = {"kind": "fold", "number": 0, "of": 2, "held": True, "seed": seed}
        analysis = {"questions": [{"name": "newton", "rows": rows}]}
        order = {"job": f"j{seed}", "site": "a", "config": config, "shape": shape, "analysis": analysis}
        vectors = {"0.x": torch.zeros(D, dtype=torch.float64), "0.working": torch.zeros(D, dtype=torch.bool)}
        answer = site.answer(wire.content(order=Order.model_validate(order).model_dump_json(), vectors=vectors))
        if wire.kind(answer) == "refusal":
            raise RefusalError(wire.text(answer, "refusal"))
        got = wire.deserialise(answer["vectors"])
        inside = Rows("fold", 0, 2, True, seed).counts(0, np.zeros(M, np.int64))
        system.append(inside / inside.sum())
        right.append(-got["0.gradient"].numpy())
    return np.linalg.lstsq(np.stack(system), np.stack(right), rcond=None)[0]


def test_folds_tell_no_rows(tmp_path):
    """70 jobs with folds that the asker knows were all rows and labels of the site."""
    X, y = people()
    found = known_folds(named_site(tmp_path / "a", reproducible_parts=True, min_count=1), 70)
    np.testing.assert_allclose(found, X * y[:, None], atol=1e-6)
    with pytest.raises(RefusalError, match="would tell of fewer than min_count = 5 rows"):
        known_folds(named_site(tmp_path / "b", reproducible_parts=True), 70)
    found = known_folds(named_site(tmp_path / "c"), 70)
    assert not (np.abs(found - X * y[:, None]).max(1) < 1e-3)[y > 0].any()


def test_parts_are_unions_of_blocks(tmp_path):
    """The same in every job, whatever its seed: folds, halves and weights are constant on blocks of five or more."""
    site = named_site(tmp_path)
    X, y = people()
    problem = Problem(site.silos, loss="logistic")
    (silo,) = silos_of(problem)
    labels = []
    for kind, number, of in [("fold", k, n) for n in (2, 3, 5) for k in range(n)] + [("half", k, 1) for k in range(9)]:
        labels.append((silo.weights(site.gate.choose(silo, Rows(kind, number, of, seed=number), None))).numpy())
    labels.append(silo.weights(site.gate.choose(silo, Rows("bootstrap", 3, seed=2), None)).numpy())
    _, counts = np.unique(np.stack(labels, 1), axis=0, return_counts=True)
    assert counts.min() >= 5
    assert len(counts) == M // 5
    sizes = [float(silo.weights(site.gate.choose(silo, Rows("fold", k, 4, True), None)).sum()) for k in range(4)]
    assert sum(sizes) == M
    assert max(sizes) - min(sizes) <= 11
    assert len(X) == len(y)


def test_folds_of_a_small_site_have_enough_of_each_class():
    """30 of 100 patients with an event, in blocks of five: dealt out like cards, one of five folds often had four."""
    for secret in range(40):
        block = blocks(secret, 100, 5)
        events = np.random.default_rng(secret).permutation(100) < 30
        fold = folds_of_blocks(secret, block, events, 5)[block]
        assert set(np.bincount(fold)) == {20}
        assert np.bincount(fold, weights=events).min() >= 5


def batches(site, rounds):
    """Gradients of least squares at zero on minibatches, one each round."""
    config, zero = experiment("least_squares", batch_size=10), np.zeros(D)
    return np.stack([ask(site, config, round=r, message=zero, labels=())[1]["reply.dx"].numpy() for r in range(rounds)])


def test_minibatches_are_of_whole_blocks(tmp_path):
    """An outlier is in some batches and not in others, of which the differences are about that patient."""
    X, y = people()
    loose = batches(make_lone(tmp_path / "a", reproducible_batches=True), 200)
    assert len(np.unique(loose.round(12), axis=0)) == 200
    told = batches(make_lone(tmp_path / "b"), 200)
    count = M // 5
    assert len(np.unique(told.round(9), axis=0)) <= count * (count + 1) // 2  # two blocks each
    np.testing.assert_allclose(told.mean(0), (X * y[:, None]).mean(0), atol=0.15)
    site = make_lone(tmp_path / "c")
    drawn = site.gate.batches(parse(experiment(batch_size=10)), 3, M, None)
    rows = drawn.draw(np.zeros(1, np.uint64), np.array([M], np.uint64), 0, range(4000))
    weight = np.bincount(rows.astype(int).ravel(), minlength=M) / rows.size * M
    np.testing.assert_allclose(weight, 1.0, atol=0.15)  # every row counts alike


def test_minibatches_of_a_network_are_of_whole_blocks(tmp_path):
    """As those of linear models; four of 49 rows are never drawn, and no row twice."""
    network = experiment(model={"name": "mlp", "options": {"hidden": [3]}}, batch_size=10, sampling="replacement")
    start = torch.linspace(-1, 1, 3 * D + 3 + 2 * 3 + 2, dtype=torch.float64).numpy()

    def replies(site):
        each = [ask(site, network, round=r, message=start)[1]["reply.dx"].numpy() for r in range(150)]
        return len(np.unique(np.stack(each).round(12), axis=0))

    more = {"networks": True, "min_class": 1, "min_evaluation": 1}
    count = M // 5
    assert replies(make_lone(tmp_path / "a", reproducible_batches=True, **more)) == 150
    assert replies(make_lone(tmp_path / "b", **more)) <= count * (count + 1) // 2  # two blocks each
    drawn = make_lone(tmp_path / "c").gate.batches(parse(network), 3, 49, None)
    rows = drawn.draw(np.zeros(1, np.uint64), np.array([49], np.uint64), 0, range(4000)).astype(int)
    assert rows.shape[-1] == 10
    weight = np.bincount(rows.ravel(), minlength=49)
    assert (weight == 0).sum() == 4
    pairs = rows.reshape(-1, 2, 5)
    assert len(np.unique(np.sort(pairs, -1).reshape(-1, 5), axis=0)) == 9


def test_a_file_is_read_as_the_site_says(consortium):
    """With another separator it is one column: whole lines, identifiers among them."""
    foreign = {"sites": {"a": {"separator": "|"}}, "absent": "missing"}
    asking = consortium(foreign, foreign_reading=True, drop=())
    (columns, *_) = asking.ask([Schema()])[0]
    assert "id" in columns["columns"][0]
    with pytest.raises(FederationError, match=r"how its file is written .separator. is the site's word"):
        consortium(foreign).ask([Schema()])
    (columns, *_) = consortium({}).ask([Schema()])[0]
    assert "id" not in columns["columns"]


def test_a_recipe_makes_no_site_stand_out_in_a_secure_sum(consortium):
    """Units of nearly zero at all other sites leave one site's rows in the sum."""
    tiny = {"units": {"age": {"scale": 1e-30}, "dose": {"scale": 1e-30}}}
    recipe = {"drop": ["kind"], "standardize": False, "sites": {"b": tiny, "c": tiny}}
    alone = gradient(ready(consortium(recipe, secure=WAIT, foreign_reading=True)), by_site=False)
    frame = frame_of("a")
    np.testing.assert_allclose(
        alone[:2], (frame[["age", "dose"]].to_numpy() * (0.5 - frame[["sick"]].to_numpy())).sum(0)
    )
    with pytest.raises(FederationError, match=r"belongs into its site\.toml"):
        ready(consortium(recipe, secure=WAIT))
    ready(consortium({"drop": ["kind"]}, secure=WAIT))


def filtered(asking, steps):
    """The number of rows that is told under steps of somebody's own in a learned recipe."""
    asking.recipe = learn(Driver(asking), asking.config, "sick")
    asking.recipe = asking.recipe.model_copy(update={"steps": [*steps, *asking.recipe.steps]})
    (first, *_) = Driver(asking).ask([Introduce()])[0]
    return json.loads(first)["samples"]


def test_a_learned_recipe_is_no_filter_of_rows(consortium, monkeypatch):
    recipe, oldest = {"drop": ["kind"]}, float(frame_of("a")["age"].max())
    chosen = [Local(missing={"age": [oldest]}), Complete(columns=["age"])]
    with pytest.raises(FederationError, match="not those of a recipe"):
        filtered(consortium(recipe), chosen)
    with pytest.raises(FederationError, match="'complete' is not that of the experiment's recipe"):
        filtered(consortium(recipe), chosen[1:])
    assert filtered(consortium(recipe), []) == 60
    monkeypatch.setattr(table_site, "check_learned", lambda *given: None)  # as it was
    with pytest.raises(FederationError, match="would tell of fewer than min_count"):
        filtered(consortium(recipe), chosen)
    assert filtered(consortium(recipe, min_count=1), chosen) == 59


def wrong(learned, **steps):
    """A learned recipe with another step of a kind."""
    return learned.model_copy(update={"steps": [steps.get(step.kind, step) for step in learned.steps]})


def test_constants_are_learned_and_nothing_else(consortium):
    """Each step is held against the recipe: its columns, its constants, its levels."""
    recipe = {
        "impute": {"dose": 3.0, "age": "mean"}, "one_hot": ["kind"], "log": {"dose": 9.0}, "splines": {"age": 3},
        "interactions": [["age", "kind"]], "indicators": ["dose"],
    }  # fmt: skip
    asking = consortium(recipe)
    learned = learn(Driver(asking), asking.config, "sick")
    kinds = {step.kind: step for step in learned.steps}
    assert set(kinds) == {"impute", "one_hot", "log", "spline", "interact", "standardize"}
    others = [
        {"impute": Impute(values={"dose": 9.0, "age": 50.0}, indicators=["dose"])},
        {"impute": Impute(values={"dose": 3.0, "age": 50.0}, indicators=["age"])},
        {"one_hot": OneHot(columns={"kind": {"levels": ["x", "(other)"], "reference": "x"}})},
        {"log": Log(offsets={"dose": 8.0})},
        {"spline": Spline(knots={"age": [1.0, 2.0, 3.0, 4.0]})},
        {"interact": Interact(pairs=[("age", "age")])},
    ]
    for i, change in enumerate(others):
        asking = consortium(recipe, job=f"other{i}", folder="same")
        asking.recipe = wrong(learned, **change)
        with pytest.raises(FederationError, match=r"is not that of the experiment's recipe|levels of a category"):
            asking.meet()
    asking = consortium(recipe, job="right", folder="same")
    asking.recipe = learned
    asking.meet()


def test_values_are_read_alike_in_all_jobs(consortium):
    """What one patient has, called missing, is a difference of two jobs."""
    frames = {name: frame_of(name) for name in ("a", "b", "c")}
    frames["a"].loc[7, "age"] = 97.0
    plain, marked = (
        {"drop": ["kind"], "impute": 0.0, "standardize": False, **more} for more in ({}, {"missing": {"age": [97.0]}})
    )
    row, sick = frames["a"].loc[7, ["age", "dose"]].to_numpy(float), frames["a"].loc[7, "sick"]
    one, two = (gradient(ready(consortium(r, frames, folder="loose", min_count=1))) for r in (plain, marked))
    assert (one - two)[0] == pytest.approx((0.5 - sick) * row[0])
    gradient(ready(consortium(plain, frames, folder="tight")))
    with pytest.raises(FederationError, match="read otherwise than in an earlier job"):
        ready(consortium(marked, frames, folder="tight"))
    ready(consortium(marked, frames, folder="first"))  # one way of reading is as good as another


def test_labels_are_the_same_in_all_jobs(consortium):
    frames = {name: frame_of(name).assign(sick=lambda f: f["sick"].astype(int).astype(str)) for name in ("a", "b", "c")}
    frames["a"].loc[7, "sick"] = "2"
    ready(consortium({"target": {"0": 0, "1": 1, "2": 1}, "drop": ["kind"]}, frames, folder="x"))
    with pytest.raises(FederationError, match="read otherwise than in an earlier job"):
        ready(consortium({"target": {"0": 0, "1": 1, "2": 0}, "drop": ["kind"]}, frames, folder="x"))


# -- 3. one gate -------------------------------------------------------------------------------------------------------


def lone(folder, X, y, loss, x, **limits):
    """What one round of ProxNewton tells of a site's rows at a model."""
    site = make_lone(folder, (X, y), **limits)
    config = experiment(loss, method={"name": "ProxNewton"})
    shape = Shape(features=[D], dtype="float64", labels=[0.0, 1.0], clients=3)
    order = Order(job="job", site="a", config=config, shape=shape, train=True, cohort=3)
    vectors = {"buffers": torch.zeros(0, dtype=torch.float64), "start": torch.zeros(D, dtype=torch.float64)}
    vectors |= {"message.x": torch.as_tensor(x), "message.working": torch.ones(D, dtype=torch.bool)}
    answer = site.answer(wire.content(order=order.model_dump_json(), vectors=vectors))
    if wire.kind(answer) == "refusal":
        raise RefusalError(wire.text(answer, "refusal"))
    return wire.deserialise(answer["vectors"])


def test_a_column_of_one_patient_is_no_row_of_a_rounds_hessian(tmp_path):
    """It was refused in an analysis, and told in a round."""
    X, y = people()
    X[:, 2] = 0.0
    X[7, 2] = 1.0
    got = lone(tmp_path / "a", X, y, "logistic", np.zeros(D), min_count=1)
    packed = got["reply.hessian"].numpy()
    H = np.zeros((D, D))
    H[np.triu_indices(D)] = packed
    H = H + np.triu(H, 1).T
    np.testing.assert_allclose(H[2] / H[2, 2], X[7], atol=1e-9)
    with pytest.raises(RefusalError, match="min_count = 5 samples differ from the others"):
        lone(tmp_path / "b", X, y, "logistic", np.zeros(D))


def test_rows_without_one_value_or_another_are_no_patient(consortium):
    """Rows with a target in one column against those with one in another differ by a few patients."""
    frames = {name: frame_of(name) for name in ("a", "b", "c")}
    for name in frames:
        frames[name]["other"] = 1 - frames[name]["sick"]
        frames[name].loc[10:17, ["sick", "other"]] = np.nan
    frames["a"].loc[7, "other"] = np.nan
    recipe = {"drop": ["kind"], "missing_target": "drop", "impute": 0.0, "standardize": False}

    def total(target, **more):
        query = Moments(columns=["age"], steps=[Complete(columns=[target])])
        return consortium(recipe, frames, **more).ask([query])[0][0]["sum"][0]

    one, two = (total(target, folder="loose", min_count=1) for target in ("sick", "other"))
    assert one - two == pytest.approx(frames["a"].loc[7, "age"])
    total("sick", folder="tight")
    with pytest.raises(FederationError, match="with what was answered before"):
        total("other", folder="tight")


def pooled(asking):
    """Gradient at zero and Hessian, with the intercept last: of site a alone, or in a secure sum of all."""
    d = len(asking.recipe.features) + 1
    x = torch.zeros(d, dtype=torch.float64)
    asked_for = newton(x, torch.ones(d, dtype=torch.bool), ALL)
    told = asking.ask([asked_for])[0] if asking.assembly else Driver(asking).each([asked_for])[0][0]
    H = np.zeros((d, d))
    H[np.triu_indices(d)] = told["hessian"].numpy()
    return told["gradient"].numpy(), 4 * (H + np.triu(H, 1).T)


class Memory(NamedTuple):
    """A state of one vector."""

    z: torch.Tensor


LEVELS = {"standardize": False, "impute": 0.0}


@pytest.mark.parametrize(
    ("recipe", "combine"),
    [
        # all patients less those of every level but the one that others are compared with
        ({"one_hot": {"kind": "z"}}, {"(1)": 1, "kind=x": -1, "kind=y": -1}),
        # a level less its product with another level
        ({"one_hot": {"kind": "x", "pain": "no"}, "interactions": [["kind", "pain"]]},
         {"kind=y": 1, "kind=y:pain=yes": -1}),
    ],
)  # fmt: skip
def test_a_combination_of_columns_is_no_patient(consortium, recipe, combine):
    """Sums of products tell every combination of columns; one that is zero but for a patient is that patient's row."""
    frames = {name: frame_of(name) for name in ("a", "b", "c")}
    for frame in frames.values():
        frame["pain"] = np.where(frame.index % 4 == 0, "no", "yes")
        frame.loc[frame["kind"] == "y", "pain"] = "yes"
    products = "interactions" in recipe
    frames["a"].loc[7, ["kind", "pain"]] = ["y", "no"] if products else ["z", "yes"]
    if not products:
        frames["b"].loc[7:15, "kind"] = "z"
    given = {**LEVELS, "drop": [] if products else ["pain"], **recipe}
    loose = ready(consortium(given, frames, folder="loose", min_count=1))
    gradient, H = pooled(loose)
    names = [*loose.recipe.features, "(1)"]
    row = dict(zip(names, H @ [combine.get(name, 0) for name in names], strict=True))
    assert [row[n] / row["(1)"] for n in ("age", "dose")] == pytest.approx(list(frames["a"].loc[7, ["age", "dose"]]))
    assert np.abs([combine.get(name, 0) for name in names] @ gradient) == pytest.approx(0.5)
    with pytest.raises(FederationError, match="combination of columns would be that of fewer than min_count"):
        ready(consortium(given, frames, folder="tight"))


def test_a_combination_that_one_patient_outweighs_is_refused(consortium):
    """Sums weighted by a function of a column that is large for one patient are this one's values, nearly."""
    frames = {name: frame_of(name) for name in ("a", "b", "c")}
    frames["a"].loc[7, "dose"] = 45.0
    given = {**LEVELS, "drop": ["kind"]}
    loose = ready(consortium(given, frames, folder="loose", min_count=1))
    _, H = pooled(loose)
    names = [*loose.recipe.features, "(1)"]
    row = H[names.index("dose")] - 2.9 * H[-1]  # less the others' share
    assert row[names.index("age")] / row[-1] == pytest.approx(frames["a"].loc[7, "age"], abs=6)
    with pytest.raises(FederationError, match="most of its weight on one row"):
        ready(consortium(given, frames, folder="tight"))
    ready(consortium({**given, "log": {"dose": 1.0}}, frames, folder="log"))


def test_an_honest_file_with_forty_rare_diagnoses_spends_little(consortium, tmp_path):
    """A recipe's queries never name rare levels; that there are others is told once, one of twenty for a column."""
    draw, frames = np.random.default_rng(0), {}
    for name in ("a", "b", "c"):
        p = draw.dirichlet(np.full(40, 0.4))
        frames[name] = frame_of(name, 300).assign(kind=[f"D{k:02d}" for k in draw.choice(40, 300, p=p)])
        counts = frames[name]["kind"].value_counts()
        assert (counts < 5).sum() >= 8
    recipe = {"one_hot": ["kind"], "rare": 5, "splines": {"age": 3}, "impute": "mean"}
    for i, more in enumerate(({}, {"rare": 10}, {"splines": {}, "log": {"dose": 9.0}})):
        asking = ready(consortium({**recipe, **more}, frames, folder="same"))
        assert len(asking.recipe.features) > 20, i
    told = [json.loads((tmp_path / "same" / name / "ledger.json").read_text())["refusals"] for name in frames]
    assert max(map(len, told)) <= 1


def test_one_heavy_row_is_found_and_no_other():
    """Beyond the second largest value a function is one patient's; a level of five, and many columns, are nobody's."""
    draw = np.random.default_rng(0)
    x = np.r_[draw.normal(50, 9, 199), 110.0]

    def named(columns):
        columns = np.asarray(columns, float)
        return heaviest(spanned(np.full((len(columns), 1), len(columns) ** -0.5), columns))

    assert not named(x[:, None])
    assert named(np.c_[x, np.maximum(x - 70.0, 0.0)]) == [199]
    assert not named((np.arange(60) < 5)[:, None])
    assert not any(named(draw.normal(size=(46, 14))) for _ in range(50))


def test_gaps_are_filled_alike_in_all_jobs(consortium):
    """The difference of two fillings is a column that is zero but for the patients with gaps."""
    frames = {name: frame_of(name) for name in ("a", "b", "c")}
    frames["a"].loc[7, "dose"] = np.nan
    made = [{**LEVELS, "drop": ["kind"], "impute": {"dose": value}} for value in (0.0, 1.0, 1e-7)]

    def row(other, **more):
        one, two = (pooled(ready(consortium(r, frames, **more)))[1] for r in (made[0], other))
        return (two - one)[1] / (two - one)[1, 2]  # that of the doses: age, dose, 1

    for other in made[1:]:
        assert row(other, folder="loose", min_count=1)[0] == pytest.approx(frames["a"].loc[7, "age"], rel=1e-3)
        with pytest.raises(FederationError, match="filled otherwise than in an earlier job"):
            row(other, folder="tight")
    asked_for = {**made[0], "impute": {"dose": 2.0}, "interactions": [["age", "dose"]]}
    product = Moments(columns=["age:dose"], steps=[Impute(values={"dose": 2.0}), Interact(pairs=[("age", "dose")])])
    with pytest.raises(FederationError, match="filled otherwise than in an earlier job"):
        consortium(asked_for, frames, folder="tight").ask([product])


def of_outcomes(asking, b=1.0):
    """Second moments of the sick alone, with an intercept last, from one question: p is the same for all there."""
    d, p = len(asking.recipe.features) + 1, 1 / (1 + np.exp(-b))
    x = torch.zeros(d, dtype=torch.float64)
    x[-1] = b
    told = Driver(asking).ask([information(x)])[0] if asking.assembly else Driver(asking).each([information(x)])[0][0]
    share, total = told["weight"][:2].tolist()
    outer, every = told["outer"].numpy() * (total / share) ** 2, told["hessian"].numpy() * total / share / (p * (1 - p))
    return (outer - p**2 * every) / ((1 - p) ** 2 - p**2), every


def one_sick_of_a_level():
    """Sites whose level y is that of about thirty patients, of whom one is sick at a; and that patient's values."""
    frames = {name: frame_of(name) for name in ("a", "b", "c")}
    for name, frame in frames.items():
        frame.loc[frame["kind"] == "y", "sick"] = 0.0
        if name == "a":
            frame.loc[7, ["kind", "sick"]] = ["y", 1.0]
    return frames, frames["a"].loc[7, ["age", "dose"]].to_numpy(float)


@pytest.mark.parametrize("secure", [None, WAIT])
def test_residuals_tell_no_row_of_the_one_patient_of_a_class_with_a_level(consortium, secure):
    """Squares of residuals at a model of an intercept alone are sums over the sick and over the others."""
    frames, mine = one_sick_of_a_level()
    recipe = {**LEVELS, "one_hot": {"kind": "x"}}

    def row(folder, **limits):
        asking = ready(consortium(recipe, frames, secure, folder=folder, **limits))
        names = [*asking.recipe.features, "(1)"]
        sick, every = of_outcomes(asking)
        at = names.index("kind=y")
        assert every[at, at] > 20
        return sick[at, [names.index(name) for name in ("age", "dose", "(1)")]]

    np.testing.assert_allclose(row("loose", min_count=1), [*mine, 1.0], rtol=1e-9)
    told = row("tight")
    if secure is None:  # what a model that is right expects: nothing of the outcomes
        asking = ready(consortium(recipe, frames, folder="again"))
        sick, every = of_outcomes(asking)
        np.testing.assert_allclose(sick, every * (1 / (1 + np.exp(-1.0))), rtol=1e-9)
    assert abs(told[2] - 1.0) > 1.0
    common = {name: frame_of(name) for name in ("a", "b", "c")}  # many of both classes: as it is
    sick, _ = of_outcomes(ready(consortium(recipe, common, folder="common")))
    chosen = common["a"].loc[common["a"]["sick"] == 1, ["age", "dose"]]
    np.testing.assert_allclose(sick[0, 1], (chosen["age"] * chosen["dose"]).sum(), rtol=1e-9)


@pytest.mark.parametrize("secure", [None, WAIT])
def test_products_with_a_level_are_no_row_of_the_one_patient_of_a_class_with_it(consortium, secure):
    """A gradient has the sums of all columns over the sick; of products with a level these are that patient's row."""
    frames, mine = one_sick_of_a_level()
    pairs = [["age", "kind"], ["dose", "kind"]]
    recipe = {**LEVELS, "one_hot": {"kind": "x"}, "interactions": pairs}
    asking = ready(consortium(recipe, frames, secure, folder="loose", min_count=1))
    names = [*asking.recipe.features, "(1)"]
    gradient, H = pooled(asking)
    sick = H[-1] / 2 - gradient  # the sums of all columns over the sick
    products = [next(i for i, name in enumerate(names) if name.startswith(f"{value}:")) for value in ("age", "dose")]
    np.testing.assert_allclose(sick[products], mine, rtol=1e-9)
    assert sick[names.index("kind=y")] == pytest.approx(1.0)
    with pytest.raises(FederationError, match="of those with an outcome, where it is in products"):
        ready(consortium(recipe, frames, secure, folder="tight"))
    ready(consortium({**recipe, "interactions": [["age", "dose"]]}, frames, secure, folder="other"))


def test_probabilities_over_a_class_tell_no_row_of_its_one_patient_with_a_level(consortium):
    """At a model that is nearly zero beside a level they are a logistic function of that patient's value."""
    frames, mine = one_sick_of_a_level()
    recipe, edges = {**LEVELS, "one_hot": {"kind": "x"}}, torch.linspace(-5, 5, 9, dtype=torch.float64)

    def values(folder, **limits):
        asking = ready(consortium(recipe, frames, folder=folder, **limits))
        names, found, shifted = [*asking.recipe.features, "(1)"], [], []
        for value in ("age", "dose"):
            sums = []
            for level in (6.0, 0.0):
                x = torch.zeros(len(names), dtype=torch.float64)
                for name, coefficient in (("kind=y", level), ("(1)", -7.0), (value, 0.01)):
                    x[names.index(name)] = coefficient
                told = Driver(asking).each([tallies(x, edges, "train")])[0][0]
                sums.append(float(told["totals"][1, 1]))
                shifted.append(float(told["variance"][1]))
            p = min(max(sums[0] - sums[1], 1e-9), 1 - 1e-9)
            found.append((np.log(p / (1 - p)) + 1.0) / 0.01)
        return np.array(found), shifted

    found, shifted = values("loose", min_count=1)
    np.testing.assert_allclose(found, mine, atol=0.1 * mine[0])
    assert not any(shifted)
    found, shifted = values("tight")
    assert np.abs(found - mine).max() > mine[0]
    assert shifted == [1.0] * 4
    common = {name: frame_of(name) for name in ("a", "b", "c")}
    asking = ready(consortium(recipe, common, folder="common"))  # many of either class with either level
    x = torch.zeros(len(asking.recipe.features) + 1, dtype=torch.float64)
    told = Driver(asking).each([tallies(x, edges, "train")])[0][0]
    assert float(told["variance"][1]) == 0.0
    assert float(told["totals"][1, 1]) == pytest.approx(common["a"]["sick"].sum() / 2)
    assert told["totals"][:, 2].tolist() == [pytest.approx(15.0), 0.0]  # a quarter of each of sixty, not by class


@pytest.mark.parametrize("secure", [None, WAIT])
def test_a_file_that_has_grown_by_a_patient_is_not_asked(consortium, secure):
    """Yesterday's sums and today's differ by who came in between, also where they are of all sites."""
    before = {name: frame_of(name) for name in ("a", "b", "c")}
    came = pd.concat([before["a"], frame_of("a", 1, seed=5)], ignore_index=True)
    recipe = {**LEVELS, "drop": ["kind"]}

    def sums(frame, folder, **limits):
        asking = consortium(recipe, {**before, "a": frame}, secure, folder=folder, **limits)
        return pooled(ready(asking))[1][-1]

    if secure is None:
        more, less = sums(came, "loose", min_count=1), sums(before["a"], "loose", min_count=1)
        (age, dose, one) = 61 * more / more[-1] - 60 * less / less[-1]
        assert (age, dose, one) == pytest.approx((came["age"].iloc[-1], came["dose"].iloc[-1], 1.0))
    sums(before["a"], "tight")
    changed = before["a"].assign(age=before["a"]["age"].where(before["a"].index != 3, 99.0))
    for other in (came, before["a"].iloc[1:], changed):
        with pytest.raises(FederationError, match="differ from those of an earlier answer by fewer than min_count = 5"):
            sums(other, "tight")
    sums(pd.concat([before["a"], frame_of("a", 5, seed=5)], ignore_index=True), "tight")
    with pytest.raises(FederationError, match="differ from those of an earlier answer"):  # of any earlier one
        sums(pd.concat([before["a"], frame_of("a", 6, seed=6)], ignore_index=True).iloc[2:], "tight")


def test_two_folders_with_the_same_books_are_one_site(tmp_path):
    """Tables of scores at two coordinators: each folder had 20 of its own, with noise of its own."""

    def told(books, edges):
        site = named_site(tmp_path / books)
        each = [tallied(site, [float(e)], i + 1, job=f"{books}{int(1e6 * e) + 10**9}") for i, e in enumerate(edges)]
        return [one for one in each if not isinstance(one, str)]

    edges = np.linspace(-1, 1, 24)
    first, second = told("north", edges[:12]), told("south", edges[:12])
    assert len(first) == len(second) == 12
    assert any(np.abs(a["0.tallies"] - b["0.tallies"]).max() > 0 for a, b in zip(first, second, strict=True))
    assert len(told("north", edges[12:])) == 8  # the other coordinator, of the same books


def test_old_jobs_are_forgotten_and_books_are_not(tmp_path):
    store = StateStore(tmp_path, keep=1, days=-1.0)
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "book.json").write_text("{}")
    for job in ("one", "two"):
        store.save(job, 0, -1, Memory(torch.zeros(2)))
    assert {p.name for p in tmp_path.iterdir()} == {"rows", "two"}
    store.forget()
    assert {p.name for p in tmp_path.iterdir()} == {"rows"}
    with pytest.raises(LostStateError, match="not a job's name"):
        store.save("rows", 0, -1, Memory(torch.zeros(2)))


def test_samples_that_are_no_table_are_the_same_ones_too(tmp_path):
    X, y = people()
    for name, limits in (("a", {"min_count": 1}), ("b", {})):
        for rows in (46, 45):
            silos = Silos.from_arrays([(X[:rows], y[:rows])], names=["a"], feature_names=NAMES)
            site = Site("a", silos, StateStore(tmp_path / name), Limits(**limits))
            said = refusal(asked(site, experiment(), {}, "information", job=f"job{rows}"))
            assert ("differ from those of an earlier answer" in said) == (name == "b" and rows == 45)


def test_a_file_that_changes_under_a_running_site_is_noticed(consortium, tmp_path):
    asking = ready(consortium({"drop": ["kind"]}, folder="x"))
    frame_of("a", 70).to_csv(tmp_path / "x" / "a.csv", index=False)
    grid, text = asking.post.engine, tomli_w.dumps({**PLAIN, "recipe": {"drop": ["kind"], "standardize": False}})
    with pytest.raises(FederationError, match="its file has changed since the site was started"):
        ready(Inquiry(grid, asking.names, grid.permitted, parse(text, recipe=True), "other"))


def one_edge(asking, column, low, high):
    """Single values from histograms with one edge each: bisection until the count changes by one."""
    asking.plan, edges, counts, found = {}, np.linspace(low, high, 400), [], []
    for edge in edges.tolist():
        told = asking.ask([Below(edges={column: [edge]})])[0][0]
        counts.append(int(told[f"low:{column}"][0]) if told[f"low:{column}"] == told[f"high:{column}"] else None)
    for a, b, left, right in zip(counts, counts[1:], edges, edges[1:], strict=False):
        if a is not None and b is not None and b - a == 1:
            found.append((left, right))
    return found


def test_histograms_of_one_edge_tell_no_single_value(consortium):
    ages = frame_of("a")["age"].to_numpy()
    found = one_edge(consortium({"drop": ["kind"]}, min_count=1), "age", ages.min() - 1, ages.max() + 1)
    assert sum(any(a <= age < b for a, b in found) for age in ages) >= 40
    assert not one_edge(consortium({"drop": ["kind"]}), "age", ages.min() - 1, ages.max() + 1)


def hinges(asking, at):
    """Sums of a spline's term with its knots close around a number: a hinge there."""
    asking.plan, found = {}, []
    for v in at:
        steps = [Spline(knots={"age": [v - 1e-2, v, v + 1e-2]})]
        found.append(asking.ask([Moments(columns=["age spline 1"], steps=steps)])[0][0]["sum"][0])
    return np.array(found)


def test_knots_that_move_past_patients_are_counted(consortium):
    """The second difference of the sums is how many patients are between."""
    recipe, ages = {"drop": ["kind"], "splines": {"age": 3}}, frame_of("a")["age"].to_numpy()
    at = np.linspace(np.quantile(ages, 0.3), np.quantile(ages, 0.6), 60)
    second = np.diff(hinges(consortium(recipe, min_count=1), at), 2)
    there = np.array([((ages > low) & (ages < high)).any() for low, high in zip(at, at[2:], strict=False)])
    assert ((second > 1e-3 * second.max()) == there).mean() > 0.9
    with pytest.raises(FederationError, match="a combination of columns would be that of fewer than min_count"):
        hinges(consortium(recipe), at)
    asking = consortium(recipe)
    asking.plan, ways = {}, [Spline(knots={"age": [v - 9, v, v + 9]}) for v in at[:11]]
    for step in ways[:-1]:  # whatever is asked about them
        asking.ask([Gaps(columns=["age"], steps=[step])])
    with pytest.raises(FederationError, match="the knots of 'age' were chosen in 10 ways already"):
        asking.ask([Gaps(columns=["age"], steps=ways[-1:])])


def whole_years(name):
    """Patients whose ages are whole numbers; the least is 31 and the largest 70 at the first site."""
    frame = frame_of(name)
    frame["age"] = np.r_[31.0, 70.0, np.random.default_rng(5).integers(33, 68, len(frame) - 2)]
    return frame


def who_is_there(asking, ways):
    """Ages that somebody has, by asking about each."""
    asking.plan, found = {}, []
    for age in range(30, 75):
        if ways == "outside":
            levels = [str(other) for other in range(100) if other != age]
            answers = asking.ask([Outside(known={"age": levels})])[0]
            found += [age] * int(answers[0]["outside:age"][0])
        else:
            coding = OneHot(columns={"age": Levels(levels=[str(age), OTHER], reference=OTHER)})
            told = asking.ask([Moments(columns=[f"age={age}"], steps=[coding])])[0][0]
            found += [age] * int(told["withheld"][0] or told["sum"][0] > 0)
    return found


@pytest.mark.parametrize("ways", ["outside", "moments"])
def test_few_values_are_said_to_be_somebodys(consortium, ways):
    """Of all levels but one, or of one of its own, an asker learns whether somebody has it."""
    frames = {name: whole_years(name) for name in "abc"}
    recipe = {"one_hot": ["age"], "drop": ["kind"]}
    assert who_is_there(consortium(recipe, frames, min_count=1), ways) == sorted({*frames["a"]["age"].astype(int)})
    with pytest.raises(FederationError, match="levels of 'age' that few have were chosen in 20 ways already"):
        who_is_there(consortium(recipe, frames), ways)
    with pytest.raises(FederationError, match="refusals = 3 that hang on its samples are used up"):
        who_is_there(consortium(recipe, frames, refusals=3), ways)


def test_other_names_of_a_column_are_no_further_column(consortium):
    frames, step = {name: whole_years(name) for name in "abc"}, Spline(knots={"years": [40.0, 50.0, 60.0]})
    for i in range(11):
        unit = {"scale": 2.0 + i, "shift": 3.0}
        recipe = {"drop": ["kind"], "splines": {"years": 3}, "units": {"years": unit}}
        recipe["sites"] = {name: {"rename": {"years": "age"}} for name in "abc"}
        asking = consortium(recipe, frames, folder="names")
        asking.plan = {}
        if i < 10:
            asking.ask([Gaps(columns=["years"], steps=[step])])
            continue
        with pytest.raises(FederationError, match="the knots of 'age' were chosen in 10 ways already"):
            asking.ask([Gaps(columns=["years"], steps=[step])])


def extremes(consortium, frames, **limits):
    """The least and the largest age of the first site, by units in which an edge of a histogram lies beyond them."""
    found = []
    for sign in (1, -1):
        low, high = 0.0, 128.0
        for _ in range(9):
            middle = (low + high) / 2
            unit = {"age": {"scale": sign, "shift": 500.0 - sign * middle}}
            asking = consortium({"drop": ["kind"], "sites": {"a": {"units": unit}}}, frames, folder="units", **limits)
            none = asking.ask([Below(edges={"age": [499.99]})])[0][0]["high:age"][0] == 0
            low, high = (middle, high) if none == (sign > 0) else (low, middle)
        found.append((low + high) / 2)
    return found


def test_units_of_the_askers_choice_move_no_ends_of_groups(consortium, tmp_path):
    frames = {name: whole_years(name) for name in "abc"}
    np.testing.assert_allclose(extremes(consortium, frames, min_count=1), [31, 70], atol=0.3)
    (tmp_path / "units").rename(tmp_path / "before")
    low, high = extremes(consortium, frames)
    assert abs(low - 31) > 5
    assert abs(high - 70) > 5


def test_units_do_not_round_values_to_groups_of_the_askers_choice(consortium):
    """Numbers beside a very large one are multiples of 16: counts of such levels would end at any patient's value."""
    recipe = {"drop": ["kind"], "sites": {"a": {"units": {"age": {"scale": 1.7, "shift": 1e17}}}}}
    with pytest.raises(FederationError, match="its data do not fit this experiment"):
        consortium(recipe, {name: whole_years(name) for name in "abc"}).ask([LevelCounts(columns=["age"])])
    scaled = Standardize(mean={"age": 1e17}, sd={"age": 1.0})
    with pytest.raises(FederationError, match="levels are told of columns before they are coded, scaled"):
        consortium({"drop": ["kind"]}).ask([LevelCounts(columns=["age"], steps=[scaled])])


def least_by_logarithms(consortium, frames, **limits):
    """The least age of the first site, by logarithms that it has or has not."""
    low, high = 0.0, 128.0
    for _ in range(9):
        middle = (low + high) / 2
        recipe = {"drop": ["kind"], "log": ["age"], "sites": {"a": {"units": {"age": {"shift": -middle}}}}}
        asking = consortium(recipe, frames, folder=f"logarithms{len(limits)}", **limits)
        try:
            asking.ask([Moments(columns=["log(age)"], steps=[Log(offsets={"age": 0.0})])])
            low = middle
        except FederationError as error:
            if "more would tell" in str(error):
                break
            high = middle
    return low, high


def test_few_logarithms_that_values_have_not_are_tried(consortium):
    frames = {name: whole_years(name) for name in "abc"}
    low, high = least_by_logarithms(consortium, frames, min_count=1)
    assert 30.7 < low < 31 <= high < 31.3
    low, high = least_by_logarithms(consortium, frames)
    assert high - low > 15


def test_a_spline_with_a_knot_at_every_value_is_no_histogram(consortium):
    frames, ages = {name: whole_years(name) for name in "abc"}, np.arange(25.0, 76.0)
    step = Spline(knots={"age": ages.tolist()})
    query = Moments(columns=step.terms("age"), steps=[step])
    recipe = {"drop": ["kind"], "splines": {"age": ages.tolist()}}
    sums = consortium(recipe, frames, min_count=1).ask([query])[0][0]["sum"]
    terms = np.vstack([natural_spline(ages, ages.tolist()).T, np.ones((1, len(ages)))])
    found = np.rint(np.linalg.lstsq(terms, np.append(sums, 60), rcond=1e-13)[0])
    assert (found == (frames["a"]["age"].to_numpy()[:, None] == ages).sum(0))[1:-1].all()
    with pytest.raises(FederationError, match="a combination of columns would be that of fewer than min_count"):
        consortium(recipe, frames).ask([query])


def test_a_table_under_a_budget_is_prepared_for_a_study_only(consortium):
    """Whether the steps of somebody's recipe fit would be an answer that no noise is on."""
    asking, levels = consortium({"one_hot": ["age"], "drop": ["kind"]}, epsilon=1.0), {"age": ["50"]}
    learned = Recipe(one_hot={"age": ""}, drop=["kind", "id"]).fit({"a": whole_years("a")}, target="sick")
    asking.recipe, asking.plan = learned, {}
    with pytest.raises(FederationError, match=r"budget .* \[privacy\] level = 'study' is needed"):
        asking.meet()
    with pytest.raises(FederationError, match="level = 'study' is needed"):
        asking.ask([Outside(known=levels)])


def test_other_levels_are_asked_of_categories(consortium):
    """Products of columns have as many levels as there are patients."""
    recipe = {"one_hot": ["kind"], "interactions": [["age", "dose"]]}
    product = Interact(pairs=[("age", "dose")])
    frame = frame_of("a")
    sheet = Sheet("a", {name: frame[name].to_numpy() for name in ("age", "dose")}, len(frame))
    products = list(prepared(sheet, [product]).texts("age:dose"))

    def has(i, text):
        """Whether patient i has a product of age and dose, asked without a gate by somebody who has the others'."""
        query = Outside(known={"age:dose": [*products[:i], *products[i + 1 :], text]}, steps=[product])
        return not tell(sheet, query, Rules(min_count=1))["outside:age:dose"][0]

    assert all(has(i, products[i]) and not has(i, products[i] + "1") for i in range(len(products)))
    with pytest.raises(FederationError, match="recipe's categories, before they are coded"):
        consortium(recipe).ask([Outside(known={"age:dose": ["1"]}, steps=[product])])
    with pytest.raises(FederationError, match="recipe's categories, before they are coded"):
        consortium(recipe).ask([Outside(known={"age": ["1"]})])
    assert consortium(recipe).ask([Outside(known={"kind": ["x", "y"]})])[0][0]["outside:kind"][0] == 0


def tallied(site, edges, number, x=(1.0, 0, 0, 0, 0), job="job", kind="tallies"):
    """Counts of scores between some edges, or the refusal."""
    shape = {"features": [D], "dtype": "float64", "labels": [0.0, 1.0], "names": NAMES, "clients": 3,
             "sites": ["a", "b", "c"]}  # fmt: skip
    analysis = {"number": number, "questions": [{"name": kind, "count": len(edges)}]}
    asked_for = {"job": job, "site": "a", "config": experiment(), "shape": shape, "analysis": analysis}
    vectors = {"0.x": torch.tensor(x, dtype=torch.float64), "0.edges": torch.tensor(edges, dtype=torch.float64)}
    answer = site.answer(wire.content(order=Order.model_validate(asked_for).model_dump_json(), vectors=vectors))
    return refusal(answer) or {k: v.numpy() for k, v in wire.deserialise(answer["vectors"]).items()}


def moved_edges(site, X, y):
    """Patients' labels, guessed from counts below edges on either side of each of them."""
    order = np.argsort(X[:, 0])
    guessed = []
    for k in range(3, 42):
        edges = [float(X[order[i : i + 2], 0].mean()) for i in (k - 1, k)]  # the patient order[k] is between
        before, after = (tallied(site, [edge], 2 * k + i)["0.tallies"][:, 0] for i, edge in enumerate(edges))
        zeros, ones = after - before
        guessed.append((ones > zeros) == bool(y[order[k]]))
    return np.array(guessed)


def test_an_edge_that_moves_past_a_patient_tells_nothing(tmp_path):
    """At an exact site every label; where counts have noise hardly more than by guessing, and only so often."""
    X, y = people()
    assert moved_edges(named_site(tmp_path / "a", exact_counts=True), X, y).all()
    assert moved_edges(named_site(tmp_path / "b", score_tables=1000), X, y).mean() < 0.85
    site = named_site(tmp_path / "c")
    order = np.sort(X[:, 0])
    edges = [[float(e)] for e in (order[10:31] + order[11:32]) / 2]
    told = [tallied(site, edge, i + 1) for i, edge in enumerate(edges)]
    assert not any(isinstance(one, str) for one in told[:20])
    assert "score_tables = 20" in told[20]
    again = tallied(named_site(tmp_path / "c"), edges[3], 1, job="again")  # the same, also at a site that was restarted
    np.testing.assert_array_equal(again["0.tallies"], told[3]["0.tallies"])
    assert "score_tables = 20" in tallied(named_site(tmp_path / "c"), edges[20], 1, job="another")


def test_every_question_has_noise_of_its_own_and_few_are_told(tmp_path):
    """Edges close to a patient of whom everything but the label is known; models that differ in length only."""
    X, y = people()
    exact, around = named_site(tmp_path / "exact", exact_counts=True), [[X[7, 0] + off] for off in (-1e-9, 1e-9)]
    below, above = (tallied(exact, edges, i + 1)["0.tallies"][:, 0] for i, edges in enumerate(around))
    np.testing.assert_array_equal(above - below, [1 - y[7], y[7]])
    found = set()
    for k in range(6):
        site = named_site(tmp_path / str(k))
        below, above = (tallied(site, edges, i + 1)["0.tallies"][:, 0] for i, edges in enumerate(around))
        found.add(tuple(above - below))
    assert len(found) == 6
    site = named_site(tmp_path / "long")
    first, second = (tallied(site, [-0.5 * s, 0.5 * s], i + 1, (s, 0, 0, 0, 0)) for i, s in enumerate((1.0, 2.0)))
    assert np.abs(first["0.tallies"] - second["0.tallies"]).max() > 0
    counts = np.stack([np.histogram(X[y == k, 0], [-np.inf, -0.5, 0.5, np.inf])[0] for k in (0, 1)])
    np.testing.assert_allclose(first["0.tallies"].sum(1), counts.sum(1), rtol=1e-12)
    np.testing.assert_allclose(first["0.variance"], [2.5**2, 0.0])
    assert "tells tallies" in tallied(site, [0.0], 9, kind="scores")
    assert "at most 64" in tallied(site, list(np.linspace(-1, 1, 65)), 10)
    more = [tallied(site, [-0.5 * s, 0.5 * s], i + 11, (s, 0, 0, 0, 0)) for i, s in enumerate(np.linspace(3, 4, 19))]
    assert not any(isinstance(one, str) for one in more[:18])
    assert "score_tables = 20" in more[18]


def test_no_answer_says_that_nobody_is_between_two_edges(tmp_path):
    """Edges that pass nobody: the same answer would say so, of one class or of both."""
    order = np.sort(people()[0][:, 0])
    low, high = order[40:42]
    edges = [[float(low + share * (high - low))] for share in (0.2, 0.8)]
    exact = [tallied(named_site(tmp_path / "a", exact_counts=True), edge, i + 1) for i, edge in enumerate(edges)]
    np.testing.assert_array_equal(exact[0]["0.tallies"], exact[1]["0.tallies"])
    site = named_site(tmp_path / "b")
    told = [tallied(site, edge, i + 1)["0.tallies"] for i, edge in enumerate(edges)]
    assert (np.abs(told[0] - told[1]) > 1e-3).all()
    both = tallied(site, [edges[0][0], edges[1][0]], 3)["0.tallies"]  # in one table
    assert (np.abs(both[:, 1]) > 1e-3).all()


def test_two_plain_sites_are_too_few(silos, tmp_path):
    """Each would have the other's gradient from the mean."""
    two = Silos.from_arrays([silos[i] for i in range(2)], names=["a", "b"])
    grid = LocalSites(make_sites(two, tmp_path / "a", opened(min_parties=2)))
    _, run = federate(grid, write(method("FedAvg"), rounds=1))
    vectors = [(site, wire.deserialise(reply["vectors"])) for site, _, reply in grid.log if "vectors" in reply]
    own, other = (next(v["reply.dx"] for site, v in vectors if site == name and "reply.dx" in v) for name in "ba")
    torch.testing.assert_close(2 * run.solution - own, other)  # what the other has computed, from the mean and its own
    with pytest.raises(FederationError, match="below this site's min_parties = 3"):
        federate(LocalSites(make_sites(two, tmp_path / "b", opened(min_parties=3))), write(method("FedAvg"), rounds=1))


LIES = {
    "gradient": lambda v: {**v, "0.gradient": v["0.gradient"] * -1e12},
    "weight": lambda v: {**v, "0.weight": -v["0.weight"]},
}


@pytest.mark.parametrize("lie", LIES)
def test_an_analysis_does_not_take_anything_for_a_sum(silos, tmp_path, lie):
    grid = LocalSites(make_sites(silos, tmp_path))
    asking = Inquiry(grid, list(silos.names), grid.permitted, parse(ANALYST, recipe=True), "job")
    problem = asking.meet()
    x = torch.zeros(problem.dimension, dtype=torch.float64)
    grid.meddle = lambda site, order, reply: reply if site != "b" else wire.content(
        report=wire.numbers(reply), vectors=LIES[lie](wire.deserialise(reply["vectors"]))
    )  # fmt: skip
    with pytest.raises(FederationError, match=r"b: .*(as large as|below 0)"):
        asking.ask([newton(x, x.bool(), ALL)])
    if lie == "gradient":  # a coordinator that believes everything
        believes, lies, grid.meddle = Settings(max_entry=1e300, max_ratio=1e300), grid.meddle, None
        asking = Inquiry(grid, list(silos.names), grid.permitted, parse(ANALYST, recipe=True), "job", believes)
        asking.meet()
        grid.meddle = lies
        assert float(asking.ask([newton(x, x.bool(), ALL)])[0]["gradient"].abs().max()) > 1e9


@pytest.mark.parametrize(
    ("query", "answer"),
    [
        (Schema(), '{"columns": ["a"]}'), (Schema(), '{"columns": ["a"], "kinds": [], "rows": [3]}'),
        (LevelCounts(columns=["kind"]), '{"levels:kind": ["x"]}'), (Moments(columns=["age"]), '{"n": [3]}'),
        (Below(edges={"age": [1.0]}), '{"low:age": [1], "high:age": [2]}'),
        (Gaps(columns=["age"]), '{"n": [-3], "missing": [0]}'),
        (Outside(known={"kind": ["x"]}), "{}"), (Gaps(columns=["age"]), '{"n": ["3"], "missing": [0]}'),
    ],
)  # fmt: skip
def test_answers_of_another_form_are_refused_by_name(consortium, query, answer):
    asking = consortium({"one_hot": ["kind"]})
    asking.post.engine.meddle = lambda site, order, reply: wire.content(answers=json.dumps([answer]))
    with pytest.raises(FederationError, match=r"a: .*(lacks or adds|another form|cannot be)"):
        asking.ask([query])


def test_honest_work_goes_on_at_default_limits(tmp_path):
    """Heart disease at four hospitals: description, recipe, path, 5 folds, intervals and quality, with secret folds."""
    here = Config.read("heart-recipe")
    frames = fc.data.frames("heart_disease")
    sites = []
    for name, frame in frames.items():
        frame.to_csv(tmp_path / f"{name}.csv", index=False)
        sites.append(
            TableSite(name, StateStore(tmp_path / name), Limits(), source=TableFile(name, tmp_path / f"{name}.csv"))
        )
    grid, text = LocalSites(sites), tomli_w.dumps({**tomllib.loads(here.text), "algorithm": {"name": "ProxNewton"}})
    asking = Inquiry(grid, list(frames), grid.permitted, parse(text, recipe=True), "job", plan=PLANS["cv"])
    driver = Driver(asking)
    look_at(lambda query: driver.ask([query])[0], asking.names)
    asking.recipe = learn(driver, asking.config, "num")
    there, problem = asking.meet(), here.make_problem()
    assert asking.recipe.model_dump() == problem.silos.recipe.model_dump()
    options = {"folds": 5, "count": 5, "ratio": 0.05, "seed": here.seed}
    found, ours = fc.analyse(there, "cv", driver=driver, **options), fc.analyse(problem, "cv", **options)
    np.testing.assert_allclose(found.path.solutions, ours.path.solutions, atol=1e-9)
    np.testing.assert_allclose(found.cv.mean, ours.cv.mean, atol=3 * float(np.max(ours.cv.se)))
    assert abs(found.quality.overall.auroc - ours.quality.overall.auroc) < 0.03
    assert found.quality.overall.auroc_error < 0.06


# -- 4. refusals and counts --------------------------------------------------------------------------------------------


def largest_margin(site, direction, job="job", steps=40):
    """Bisection of the scale at which a model is refused: the largest margin of a sample in a direction."""
    low, high = 0.0, 1e3
    for i in range(steps):
        middle = (low + high) / 2
        try:
            ask(site, experiment(), round=i, model=middle * direction, job=job)
            low = middle
        except RefusalError:
            high = middle
    return 10.0 / low


def test_bisection_of_the_largest_margin_finds_no_patient(tmp_path):
    """D directions were a patient's row, exactly; now a margin has an error of its own in each question."""
    X, _ = people()
    far = np.argmax(np.abs(X[:, 0]))
    directions = [np.eye(D)[0] + 0.05 * e for e in np.vstack([np.zeros(D), np.eye(D)[1:]])]
    exact = [largest_margin(make_lone(tmp_path / f"a{i}", exact_counts=True), d) for i, d in enumerate(directions)]
    signs = np.sign(X[far, 0])
    row = np.linalg.solve(np.stack(directions), signs * np.array(exact))
    np.testing.assert_allclose(row, X[far], atol=1e-6)
    noised = [largest_margin(make_lone(tmp_path / f"b{i}"), d) for i, d in enumerate(directions)]
    off = np.abs(np.array(noised) / np.array(exact) - 1)
    assert np.median(off) > 0.1
    again = [largest_margin(make_lone(tmp_path / f"b{i}"), d, "again") for i, d in enumerate(directions[:2])]
    assert again == noised[:2]  # the same questions, in another process, have the same answers


def test_refusals_that_hang_on_the_samples_are_counted(tmp_path):
    """For good, over all jobs; the same question again has the same answer, and what is no matter of data is free."""
    steep, mild = np.r_[1e6, np.zeros(D - 1)], np.zeros(D)

    def says(site, model, job):
        try:
            return ask(site, experiment(), model=model, job=job) and ""
        except RefusalError as error:
            return str(error)

    free = make_lone(tmp_path / "a", refusals=10**6)
    assert all("max_margin" in says(free, steep, f"j{i}") for i in range(9))
    assert not says(free, mild, "mild")
    site = make_lone(tmp_path / "b", refusals=3)
    assert all("max_margin" in says(site, steep, job) for job in ("j0", "j0", "j0", "j1"))
    for _ in range(4):
        assert "max_rounds" in refusal(asked(site, experiment(rounds=10**6), {}, "schema"))
    assert not says(site, mild, "mild")
    assert "max_margin" in says(site, steep, "j2")
    for again in (site, make_lone(tmp_path / "b", refusals=3)):
        assert {says(again, x, job) for x in (steep, mild) for job in ("j0", "new")} == {
            "its refusals = 3 that hang on its samples are used up; the site's people have to look at what was asked, "
            "and may allow more"
        }
    assert not says(make_lone(tmp_path / "b", refusals=4), mild, "new")


def accuracies(site, X, steps, job="job"):
    """Right predictions at planes between neighbours in one direction, as counts."""
    order = np.sort(X[:, 0])
    found = []
    for i, k in enumerate(steps):
        model = np.r_[1.0, np.zeros(D - 1), -(order[k] + order[k + 1]) / 2]
        _, got = ask(site, experiment(bias=True), round=i, model=model, job=job)
        found.append(float(got["counts.train/accuracy"][0, 0]))
    return np.array(found)


def test_accuracies_at_two_planes_tell_no_label(tmp_path):
    """Planes on either side of a patient: the count of right predictions changes by one, up or down by the label."""
    X, y = people()
    order = np.argsort(X[:, 0])
    exact = accuracies(make_lone(tmp_path / "a", exact_counts=True), X, range(2, 42))
    np.testing.assert_array_equal(np.diff(exact) > 0, y[order[3:42]] == 0)
    told = accuracies(make_lone(tmp_path / "b"), X, range(2, 42))
    right = (np.diff(told) > 0) == (y[order[3:42]] == 0)
    assert right.mean() < 0.85
    scales = 2.5 * np.sqrt(1 + np.arange(40) / 5)  # of Laplace noise, whose absolute value has this mean and deviation
    assert abs(np.abs(told - exact).mean() - scales.mean()) < 4 * np.sqrt((scales**2).sum()) / 40
    np.testing.assert_array_equal(told, accuracies(make_lone(tmp_path / "b"), X, range(2, 42), "again"))


def test_counts_do_not_say_whether_a_known_patient_is_there(tmp_path):
    """Right predictions at planes on either side of a point: at an exact site they differ where a patient is."""
    X, _ = people()
    points = np.concatenate([X[:20], np.random.default_rng(9).normal(size=(20, D))])
    there = np.arange(40) < 20

    def differ(site, points):
        told = []
        for i, point in enumerate(points):
            v = (np.roll(point, 1) * [1, -1, 1, -1, 1] + 0.3) / 5
            planes = [np.r_[v, -v @ point + off] for off in (-1e-9, 1e-9)]
            each = [ask(site, experiment(bias=True), 2 * i + j, x)[1] for j, x in enumerate(planes)]
            told.append(float(each[1]["counts.train/accuracy"][0, 0] - each[0]["counts.train/accuracy"][0, 0]))
        return np.array(told)

    np.testing.assert_array_equal(differ(make_lone(tmp_path / "a", exact_counts=True), points) != 0, there)
    found = differ(make_lone(tmp_path / "b"), points)
    assert (found[~there] != 0).mean() > 0.5
    right = max((np.sign(found) == s * np.where(there, 1, 0)).mean() for s in (-1, 1))
    assert right < 0.7


def test_noise_of_counts_grows_with_their_number(tmp_path):
    """A plane asked about at models that differ in length only does not average out; the same model tells the same."""
    X, _ = people()
    model = np.r_[1.0, np.zeros(D - 1), -float(np.median(X[:, 0])) - 0.01]
    scales = 1 + np.arange(60) / 1e6

    def told(site, job="job"):
        each = [ask(site, experiment(bias=True), round=i, model=s * model, job=job)[1] for i, s in enumerate(scales)]
        return np.array([float(one["counts.train/accuracy"][0, 0]) for one in each])

    (exact,) = set(told(make_lone(tmp_path / "exact", exact_counts=True)))
    sites = np.stack([told(make_lone(tmp_path / f"b{i}")) for i in range(8)])
    off = np.abs(sites - exact)
    assert off[:, 40:].mean() > 1.5 * off[:, :10].mean()
    np.testing.assert_array_equal(told(make_lone(tmp_path / "b0"), "again"), sites[0])


def test_errors_and_areas_of_a_cross_validation_have_noise(tmp_path, silos):
    """Whole numbers whose mean is right; histograms, which end at single samples, are for exact sites."""
    draw, values = noise.generator(3), torch.full((4000,), 70.0, dtype=torch.float64)
    made = noise.noised(values, 2.5, draw)
    assert float(made.mean()) == pytest.approx(70.0, abs=0.3)
    assert float(made.std()) == pytest.approx(2.5 * 2**0.5, rel=0.1)
    grid = LocalSites(make_sites(silos, tmp_path, opened(exact_counts=False, min_count=5)))
    asking = Inquiry(grid, list(silos.names), grid.permitted, parse(ANALYST, recipe=True), "job")
    problem = asking.meet()
    models = torch.linspace(-1, 1, 3 * problem.dimension, dtype=torch.float64).view(3, -1)
    exact = LocalSites(make_sites(silos, tmp_path / "exact", opened(min_count=1)))
    other = Inquiry(exact, list(silos.names), exact.permitted, parse(ANALYST, recipe=True), "job")
    other.meet()
    with pytest.raises(FederationError, match="score 'deviance'"):
        Driver(asking).each([losses(models, ALL, bins=64)])
    assert float(Driver(other).each([losses(models, ALL, bins=64)])[0][0]["histogram"].sum()) > 0
    request = losses(models, ALL, errors=True)
    told, true = ([one[0] for one in Driver(by).each([request])] for by in (asking, other))
    assert any(not torch.equal(a["error"], b["error"]) for a, b in zip(told, true, strict=True))
    for sums in told:
        assert bool((sums["error"] <= sums["weight"][0]).all())


NOISY = "\n[privacy]\nclip = 1.0\nnoise = 8.0\n"


def budgeted(site, job="job", noisy=NOISY, rounds=3):
    """What a site says of its samples before a round, and after one that is evaluated."""
    config = experiment().replace("rounds = 1000", f"rounds = {rounds}") + noisy
    first = site.answer(wire.content(order=Order(job=job, site="a", config=config).model_dump_json()))
    said = json.loads(wire.text(first, "introduction"))["samples"]
    shape = Shape(features=[D], dtype="float64", labels=[0.0, 1.0], clients=3)
    order = Order(job=job, site="a", config=config, shape=shape, evaluate=True)
    vectors = {"buffers": torch.zeros(0, dtype=torch.float64), "model": torch.zeros(D, dtype=torch.float64)}
    answer = site.answer(wire.content(order=order.model_dump_json(), vectors=vectors))
    assert wire.numbers(answer)["samples"] == said
    told = wire.deserialise(answer["vectors"])
    assert told["counts.train/samples"].tolist() == [[said, said]]
    return said, told["gradient"]


def test_a_budgeted_site_does_not_say_how_many_samples_it_has(tmp_path):
    """Their number is a noised answer as any other, told once; what is divided by it says no more."""
    exact = make_lone(tmp_path / "a", epsilon=20.0, exact_counts=True)
    assert {budgeted(exact, f"j{i}")[0] for i in range(3)} == {M}
    sites = [make_lone(tmp_path / f"b{i}", epsilon=20.0) for i in range(40)]
    told = np.array([budgeted(site)[0] for site in sites])
    assert abs(told.mean() - M) < 4 * 8 / np.sqrt(40)
    assert 4 < told.std() < 13
    site = sites[0]
    spent = site.ledger.spent()
    assert spent == pytest.approx(compose({Query(8.0): 2}, 1e-5))  # their number, and an evaluation
    again = make_lone(tmp_path / "b0", epsilon=20.0)
    assert {budgeted(again, f"j{i}")[0] for i in range(4)} == {told[0]}
    assert again.ledger.spent() == pytest.approx(compose({Query(8.0): 6}, 1e-5))
    other = budgeted(again, "other", NOISY.replace("8.0", "5.0"))[0]  # at another noise it is another answer
    assert again.ledger.spent() == pytest.approx(compose({Query(8.0): 6, Query(5.0): 2}, 1e-5))
    assert budgeted(again, "last", NOISY.replace("8.0", "5.0"))[0] == other


def test_no_answer_under_a_budget_is_divided_by_the_number_of_samples(tmp_path):
    """The same noise at two sites of which one has a sample more: answers differ by that sample, not in their scale."""
    X, y = people()

    class Silent:
        """No noise; all samples take part."""

        def chosen(self, clients, sizes, round, query, rate):
            return [np.arange(int(m), dtype=np.uint64) for m in sizes]

        def normal(self, clients, round, query, count):
            return np.full((len(clients), count), 0.7)

    made = []
    for rows in (M, M - 1):
        site = make_lone(tmp_path / str(rows), (X[:rows], y[:rows]), epsilon=20.0)
        site.source = Silent()
        site.ledger.once(Query(8.0), lambda: {"train": 50})  # what both have told
        made.append(budgeted(site))
    (said, one), (_, other) = made
    assert said == 50
    row = torch.from_numpy(X[-1] * (0.5 - y[-1]))
    torch.testing.assert_close(50 * (one - other), row / max(1.0, float(row.norm())))


def test_a_site_whose_budget_is_small_tells_not_even_how_many_samples_it_has(tmp_path):
    """The whole experiment has to be affordable, with the number of samples."""
    queries = 3 + 4  # three rounds, evaluations before and after each
    per = experiment().replace("rounds = 1000", "rounds = 3") + NOISY
    for extra, said in ((1, True), (0, False)):
        enough = compose({Query(8.0): queries + extra}, 1e-5) * 1.0001
        site = make_lone(tmp_path / str(extra), epsilon=enough)
        answer = site.answer(wire.content(order=Order(job="job", site="a", config=per).model_dump_json()))
        assert (wire.kind(answer) == "introduction") == said
        assert site.ledger.spent() == pytest.approx(compose({Query(8.0): 1}, 1e-5) if said else 0.0)


# -- 6. books ----------------------------------------------------------------------------------------------------------


def kept_site(folder, key):
    silos = Silos.from_arrays([people()], names=["a"], feature_names=NAMES)
    return Site("a", silos, StateStore(folder), Limits(), audit=Audit(folder, key))


def asks(site, number):
    return refusal(asked(site, experiment(), {}, "information", job=f"j{number}"))


def copied(folder):
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != "secret"}


def restored(files):
    for path, content in files.items():
        path.write_bytes(content)


def test_a_running_site_notices_that_its_books_were_turned_back(tmp_path):
    key = make_keys(["a"])["a"]
    site = kept_site(tmp_path, key)
    assert not asks(site, 1)
    before = copied(tmp_path)
    assert not asks(site, 2)
    now = copied(tmp_path)
    (ledger,) = (p for p in before if p.name == "ledger.json")
    for change, reason in (
        ({ledger: before[ledger]}, "ledger was removed, or turned back"),
        ({p: c for p, c in before.items() if p.name.startswith("audit")}, "audit log cannot be continued"),
        ({tmp_path / "audit.jsonl": before[tmp_path / "audit.jsonl"]}, "audit log cannot be continued"),
    ):
        restored({**now, **change})
        assert reason in asks(site, 3)
        now = {**copied(tmp_path), **{p: c for p, c in now.items() if p in change}}
        restored(now)
        if "audit" in reason:
            break


def test_a_site_that_is_started_notices_a_ledger_that_is_gone(tmp_path):
    """A log without the ledger that it speaks of, or with one from before."""
    key = make_keys(["a"])["a"]
    assert not asks(kept_site(tmp_path, key), 1)
    old = (tmp_path / "ledger.json").read_bytes()
    assert not asks(kept_site(tmp_path, key), 2)
    new = (tmp_path / "ledger.json").read_bytes()
    (tmp_path / "ledger.json").unlink()
    assert "ledger was removed, or turned back" in asks(kept_site(tmp_path, key), 3)
    (tmp_path / "ledger.json").write_bytes(old)
    assert "ledger was removed, or turned back" in asks(kept_site(tmp_path, key), 3)
    (tmp_path / "ledger.json").write_bytes(new)
    assert not asks(kept_site(tmp_path, key), 3)


def test_a_ledger_that_was_written_in_is_noticed(tmp_path):
    """Counts of today put back, with the number as it was; and a secret that is gone, with which all noise is new."""
    key = make_keys(["a"])["a"]
    site, path = kept_site(tmp_path, key), tmp_path / "ledger.json"
    assert not asks(site, 1)
    whole, secret = path.read_bytes(), (tmp_path / "secret").read_bytes()
    book = json.loads(whole)
    for put in ({**book, "today": dict.fromkeys(book["today"], 0)}, {k: v for k, v in book.items() if k != "seal"}):
        path.write_text(json.dumps(put))
        assert "changed by other hands" in asks(site, 2)
        assert "changed by other hands" in asks(kept_site(tmp_path, key), 2)
    path.write_bytes(whole)
    (tmp_path / "secret").unlink()
    assert "or its secret was" in asks(kept_site(tmp_path, key), 2)
    (tmp_path / "secret").write_bytes(secret)
    assert not asks(kept_site(tmp_path, key), 2)
    old = {k: v for k, v in json.loads(path.read_text()).items() if k in ("day", "today", "jobs")}
    for place, known in (("0.2", old), ("now", {**old, "number": 1})):
        (tmp_path / place).mkdir()
        (tmp_path / place / "ledger.json").write_text(json.dumps(known))
        assert bool(asks(kept_site(tmp_path / place, key), 3)) == (place == "now")
    assert "seal" in json.loads((tmp_path / "0.2" / "ledger.json").read_text())


def test_a_book_of_rows_that_is_gone_is_noticed(consortium, tmp_path):
    frames = {name: frame_of(name) for name in ("a", "b", "c")}
    for name in frames:
        frames[name].loc[10:17, "sick"] = np.nan
    recipe = {"drop": ["kind"], "missing_target": "drop"}
    ready(consortium(recipe, frames, folder="x"))
    (book,) = (tmp_path / "x" / "a" / "rows").glob("*.json")
    whole = book.read_bytes()
    book.unlink()
    with pytest.raises(FederationError, match=r"rows/.* was removed, changed or turned back"):
        ready(consortium(recipe, frames, folder="x"))
    book.write_bytes(whole)
    ready(consortium(recipe, frames, folder="x"))


def test_heads_are_kept_elsewhere(tmp_path):
    key = make_keys(["a"])["a"]
    log = Audit(tmp_path / "a", key)
    heads = [log.head()]
    for i in range(4):
        log.append({"what": str(i)})
        heads.append(log.head())
    assert all(log.holds(head) for head in heads)
    other = Audit(tmp_path / "b", key)  # begun anew with the same key
    for i in range(5):
        other.append({"what": str(i)})
    assert not any(other.holds(head) for head in heads[1:])
    assert not log.holds(other.head())
    assert not log.holds("nonsense")


def test_other_sites_keep_the_heads_of_a_log(silos, tmp_path, cli):
    """Log, head and ledger are turned back together while nothing runs: another site's file shows it."""
    fed = FederationFolder.create(tmp_path / "fed", "127.0.0.1", 0, list(silos.names), engine="local")
    places = {name: fed.path / "sites" / name for name in silos.names}
    keys = {name: pki.read_private(place / "site.key") for name, place in places.items()}
    peers = {name: {k: v.public_key() for k, v in keys.items() if k != name} for name in keys}

    def work(job):
        sites = [
            Site(name, alone(silos, i), StateStore(places[name] / "state"), opened(),
                 audit=Audit(places[name] / "state", keys[name]),
                 vault=MaskKeys(name, opened(), keys[name], peers[name]))
            for i, name in enumerate(silos.names)
        ]  # fmt: skip
        grid = LocalSites(sites)
        grid.meddle = lambda site, order, reply: reply
        asking = Inquiry(grid, list(silos.names), grid.permitted, parse(ANALYST, recipe=True), job)
        x = torch.zeros(asking.meet().dimension, dtype=torch.float64)
        asking.ask([newton(x, x.bool(), ALL)])
        federate(LocalSites(sites), write(method("FedAvg"), rounds=1))

    work("one")
    before = copied(places["a"] / "state")
    work("two")
    kept = places["b"] / "state" / "heads.json"
    (last,) = json.loads(kept.read_text())["a"][-1:]
    assert int(last.split()[0]) > 2
    command = ["federation", "audit", str(places["a"]), "--holds", str(kept)]
    assert "holds all" in cli(*command, check=0).out
    lie = json.loads(kept.read_text())
    lie["a"].append(f"3 {'0' * 64} {last.split()[2]}")  # not signed by the site: nothing is held against it
    (tmp_path / "lie.json").write_text(json.dumps(lie))
    assert "holds all" in cli(*command[:-1], tmp_path / "lie.json", check=0).out
    restored(before)
    assert Audit(places["a"] / "state", keys["a"]).verify()  # as such it is in order
    assert "was turned back, or replaced" in cli(*command, check=2).err
    assert "holds all" in cli("federation", "audit", places["c"], "--holds", kept, check=0).out


def test_a_refusal_names_what_is_rare_to_the_sites_own_people_only(tmp_path):
    """Which column, and which class, few have is told to nobody else."""
    X, y = people()
    rare = X.copy()
    rare[:, 2] = 0.0
    rare[:3, 2] = 1.0
    few = np.zeros(len(y))
    few[:3] = 1.0
    for data, kind, name in (((rare, y), "information", "f2"), ((X, few), "introduction", "class 1 has 3")):
        folder, lines, key = tmp_path / kind, [], make_keys(["a"])["a"]
        silos = Silos.from_arrays([data], names=["a"], feature_names=NAMES)
        site = Site("a", silos, StateStore(folder), Limits(), lines.append, audit=Audit(folder, key))
        said = refusal(asked(site, experiment(), {}, kind))
        assert "fewer" in said
        assert name not in said
        assert "3" not in said
        (line,) = Audit(folder, key).verify()
        assert name in line["here"]
        assert line["refused"] == said
        assert any(name in one for one in lines)
