"""Malformed messages in both directions: a site refuses in one line, and a coordinator in the site's name."""

import contextlib
import json
import math

import numpy as np
import pytest
import tomli_w
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedcomposite.data import Silos

pytest.importorskip("flwr", reason="the extra [flower] is not installed")

import safetensors.torch
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from local_federation import LocalGrid, make_sites, opened
from orders import CONFIG, DEEP, ORDER

from fedcomposite.federation import wire
from fedcomposite.federation.coordinator.coordinator import Coordinator
from fedcomposite.federation.coordinator.delivery import Settings
from fedcomposite.federation.shape import AgreementError, agree, misfits, parse
from fedcomposite.federation.wire import WireError
from fedcomposite.runtime.protocol import Round

HUNDRED = settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)


def thousand(test, **strategies):
    """The same property over a thousand examples, which takes a while."""
    return pytest.mark.slow(settings(HUNDRED, max_examples=1000)(given(**strategies)(test.hypothesis.inner_test)))


NUMBERS = st.one_of(
    st.integers(-3, 9),
    st.sampled_from([2**31, 2**53 + 1, 10**18, -(10**30), 10**400, 0.5, -0.0, 1e308, 1e-320, 1e6]),
    st.floats(),
)
TEXTS = st.one_of(
    st.sampled_from(
        ["", "\x1b[2J\x07", "\n\n", "\u202eabc", "a" * 5000, "../../x", "nan", "1e999", "FedAvg", "float64"]
    ),
    st.text(max_size=20),
)
LEAVES = st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=3), max_leaves=8
)


@st.composite
def mutated(draw, honest):
    """An honest JSON object with some of its parts replaced, removed or added; or any text at all."""
    kind = draw(st.integers(0, 9))
    if kind == 0:
        return draw(st.sampled_from(["", "{", "null", "[]", DEEP, '{"a":' * 5000 + "1" + "}" * 5000, "1e999", '"x"']))
    if kind == 1:
        return draw(TEXTS)
    made = json.loads(json.dumps(honest))
    for _ in range(draw(st.integers(1, 3))):
        where = made
        while True:
            keys = sorted(where) if isinstance(where, dict) else list(range(len(where)))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            if isinstance(where[key], dict | list) and where[key] and draw(st.booleans()):
                where = where[key]
                continue
            action = draw(st.integers(0, 5))
            if action == 0 and isinstance(where, dict):
                del where[key]
            elif action == 1 and isinstance(where, dict):
                where[draw(TEXTS)] = draw(VALUES)
            else:
                where[key] = draw(VALUES)
            break
    return json.dumps(made).replace("1e+308", "1e999" if draw(st.booleans()) else "1e308")


@st.composite
def blocks(draw, honest):
    """Vectors as bytes: some other shapes, types and numbers than asked for, broken headers, or any bytes at all."""
    kind = draw(st.integers(0, 6))
    if kind == 0:
        return draw(st.binary(max_size=64))
    if kind == 1:
        header = draw(mutated({k: {"dtype": "F64", "shape": [3], "data_offsets": [0, 24]} for k in honest})).encode()
        return len(header).to_bytes(8, "little") + header + bytes(24)
    if kind == 2:
        return (draw(st.sampled_from([0, 2**16, 2**63, 2**64 - 1]))).to_bytes(8, "little") + draw(
            st.binary(max_size=32)
        )
    made = dict(honest)
    for _ in range(draw(st.integers(0, 2))):
        name = draw(st.sampled_from([*honest, "other", "reply.", "counts.test/accuracy", "counts.test/samples"]))
        action = draw(st.integers(0, 4))
        like = made.get(name, torch.zeros(1, 2, dtype=torch.float64))
        if action == 0:
            made.pop(name, None)
        elif action == 1:
            value = draw(st.sampled_from([math.nan, math.inf, 1e308, -1e308, -1.0, 1e7, 0.0]))
            made[name] = torch.full(like.shape, value, dtype=torch.float64).to(like.dtype)  # infinite in single
        elif action == 2:
            made[name] = like.float()
        elif action == 3:
            made[name] = torch.zeros(draw(st.lists(st.integers(0, 9), max_size=3)), dtype=torch.float64)
        else:
            made[name] = like + draw(st.floats(-1e3, 1e3))
    block = safetensors.torch.save({k: v.contiguous().clone() for k, v in made.items()})
    return block[: draw(st.integers(0, len(block)))] if draw(st.integers(0, 9)) == 0 else block


@st.composite
def contents(draw, key, honest, vectors=None):
    """A message's content: mostly one record with a text and vectors, as the package makes them."""
    kind = draw(st.integers(0, 19))
    if kind == 0:
        records = [
            RecordDict({}),
            RecordDict({"x": ConfigRecord({})}),
            RecordDict({wire.RECORD: MetricRecord({"a": 1})}),
        ]
        return draw(st.sampled_from([*records, RecordDict({wire.RECORD: ArrayRecord({})})]))
    if kind == 1:
        part = st.one_of(st.integers(0, 5), st.floats(), st.text(max_size=5), st.binary(max_size=5), st.booleans())
        names = st.sampled_from(["order", "report", "introduction", "refusal", "vectors", "", "\x1b"])
        return RecordDict({wire.RECORD: ConfigRecord(draw(st.dictionaries(names, part, max_size=3)))})
    if kind == 2:
        return RecordDict({wire.RECORD: ConfigRecord({"refusal": draw(TEXTS)})})
    parts = {key: draw(mutated(honest)) if draw(st.booleans()) else json.dumps(honest)}
    if vectors is not None:
        parts["vectors"] = draw(blocks(vectors)) if draw(st.booleans()) else safetensors.torch.save(dict(vectors))
    return RecordDict({wire.RECORD: ConfigRecord(parts)})


# -- to a site --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def silos():
    generator = np.random.default_rng(0)
    pairs = [(generator.normal(size=(12, 3)), np.arange(12) % 2.0) for _ in range(4)]
    return Silos.from_arrays(pairs, names=["a", "b", "c", "d"], feature_names=["x", "y", "z"])


SENT = {
    "buffers": torch.zeros(0, dtype=torch.float64),
    **{k: torch.zeros(3, dtype=torch.float64) for k in ("message.x", "start", "model")},
}


@pytest.fixture(scope="module")
def site(silos, tmp_path_factory):
    return make_sites(silos, tmp_path_factory.mktemp("site"), opened(models_per_round=10_000))[0]


def proper(line):
    return bool(line) and line.isprintable() and len(line) <= 300


ORDERS = contents("order", ORDER, SENT)
EXPERIMENTS = mutated({"name": "x", **parse(CONFIG).model_dump(exclude_none=True, exclude={"data", "callbacks"})})


@HUNDRED
@given(request=ORDERS)
def test_a_site_answers_anything_with_an_answer(site, request):
    """No exception, and no refusal that only says that something went wrong."""
    answer = site.answer(request)
    kind = wire.kind(answer)
    assert kind in ("report", "introduction", "refusal")
    if kind == "refusal":
        line = wire.text(answer, "refusal")
        assert proper(line)
        assert not line.startswith("failed with"), line


test_a_site_answers_a_thousand_things = thousand(test_a_site_answers_anything_with_an_answer, request=ORDERS)


@HUNDRED
@given(config=EXPERIMENTS)
def test_a_site_reads_any_experiment(site, config):
    try:
        text = tomli_w.dumps(json.loads(config))
    except (ValueError, TypeError, AttributeError, RecursionError):
        text = config
    answer = site.answer(wire.content(order=json.dumps({**ORDER, "shape": None, "config": text})))
    if wire.kind(answer) == "refusal":
        line = wire.text(answer, "refusal")
        assert proper(line)
        assert not line.startswith("failed with"), (line, text)


test_a_site_reads_a_thousand_experiments = thousand(test_a_site_reads_any_experiment, config=EXPERIMENTS)


def test_what_others_say_is_printed_without_control_characters(silos, tmp_path):
    said = []
    one = make_sites(silos, tmp_path)[0]
    one._log = said.append
    one.answer(wire.content(order=json.dumps({**ORDER, "site": "\x1b[2Jb\x07\u202e"})))
    assert said == ["refused: the order is for '\\x1b[2Jb\\x07\\u202e'"]
    one.answer(wire.content(order=json.dumps({**ORDER, "config": "x = '\x1b]0;owned\x07'"})))
    assert all(proper(line) for line in said)
    assert wire.clean("a\x1b[31m\n\tb\u202ec\x00") == "a [31m b c"
    assert len(wire.clean("x" * 10_000)) == 300


# -- to the coordinator -----------------------------------------------------------------------------------------------


class Replay(LocalGrid):
    """Answers of the first exchange are kept for the next ones; site b's are what ``lie(message, honest)`` makes."""

    def __init__(self, sites):
        super().__init__(sites)
        self.kept, self.lie = {}, lambda message, honest: honest

    def pull_messages(self, message_ids):
        found = super().pull_messages(message_ids)
        if any(isinstance(m, Unreadable) for m in found):
            raise AttributeError("no content")  # all that came with it is lost
        return found

    def push_messages(self, messages):
        ids = []
        for message in messages:
            name = message.object_id
            message.metadata.__dict__["_message_id"] = name
            site = self.sites[message.metadata.dst_node_id]
            key = site.name, "introduction" if '"shape":null' in message.content[wire.RECORD]["order"] else "report"
            if key not in self.kept:
                self.kept[key] = site.answer(message.content)
            honest = Message(self.kept[key], reply_to=message)
            self._box[name] = self.lie(message, honest) if site.name == "b" else honest
            ids.append(name)
        return ids


@pytest.fixture(scope="module")
def coordinator(silos, tmp_path_factory):
    grid = Replay(make_sites(silos, tmp_path_factory.mktemp("sites")))
    names = [s.name for s in grid.sites.values()]
    settings = Settings(policy="skip", patience=0.05, poll=0.005)
    one = Coordinator(grid, names, grid.nodes, parse(CONFIG), "job", settings)
    one.prepare()
    one.grid = grid
    return one


def exchange(one):
    """A round; the sites that were counted, and the log."""
    log = []
    one.post.log = log.append
    one.post.absent.clear()
    driver = one.rounds
    request = Round(0, driver.buffers, one.algorithm.broadcast(driver.server), np.arange(4, dtype=np.uint64), driver.x0)
    got = one.transport.exchange(request)
    seen, gathered = got.measured(), got.gathered()
    assert math.isfinite(float(seen.loss))
    assert all(bool(torch.isfinite(t).all()) for t in gathered.mean)
    return sorted(got._answers), log


def honest_report(one):
    one.grid.lie = lambda message, honest: honest
    exchange(one)
    kept = one.grid.kept["b", "report"]
    return wire.numbers(kept), safetensors.torch.load(kept[wire.RECORD]["vectors"])


@pytest.fixture(scope="module")
def report(coordinator):
    return honest_report(coordinator)


@HUNDRED
@given(data=st.data())
def test_the_coordinator_refuses_in_the_sites_name(coordinator, report, data):
    """Whatever b sends, the others' round goes on, and b's part of it is all there or named as refused."""
    content = data.draw(contents("report", *report))
    coordinator.grid.lie = lambda message, honest: Message(content, reply_to=message)
    there, log = exchange(coordinator)
    assert set(there) >= {"a", "c", "d"}
    assert ("b" in there) == (log == [])
    assert all(line.startswith("refused: b: ") and proper(line[12:]) for line in log), log


test_the_coordinator_refuses_a_thousand_times = thousand(test_the_coordinator_refuses_in_the_sites_name, data=st.data())


INTRODUCTIONS = contents("introduction", json.loads("{}") | {
    "site": "b", "version": "1", "samples": 12, "features": [3], "dtype": "float64", "names": ["x", "y", "z"],
    "labels": [0.0, 1.0], "smoothness": 0.5, "scale": 2.0,
})  # fmt: skip


@HUNDRED
@given(content=INTRODUCTIONS)
def test_introductions_are_refused_with_one_kind_of_error(coordinator, content):
    try:
        met = coordinator._check_introduction("b", content)
    except WireError:
        return
    others = [i for i in coordinator.introductions if i.site != "b"]
    assert set(misfits([*others, met])) <= {"b"}
    with contextlib.suppress(AgreementError):
        agree([*others, met])


test_a_thousand_introductions = thousand(test_introductions_are_refused_with_one_kind_of_error, content=INTRODUCTIONS)


class Unreadable:
    """What cannot be decoded: the engine fails in the middle of taking everybody's answers."""

    def __init__(self, message, honest):
        self.metadata = honest.metadata


def meddled(message, honest, **about):
    for key, value in about.items():
        honest.metadata.__dict__[f"_{key}"] = value
    return honest


ODD = {
    "answers an order that it was not given": lambda m, h: meddled(m, h, reply_to_message_id="elsewhere"),
    "cannot be read": lambda m, h: None,
    "cannot be read ": lambda m, h: "not a message",
    "cannot be read  ": Unreadable,
    "refuses: without a reason": lambda m, h: Message(wire.content(refusal=""), reply_to=m),
    "refuses: without a reason ": lambda m, h: Message(wire.content(refusal="\n\x1b\n"), reply_to=m),
    "refuses: a b": lambda m, h: Message(wire.content(refusal="a\x07\nb"), reply_to=m),
}


@pytest.mark.parametrize("odd", list(ODD))
def test_odd_messages_cost_their_site_only(coordinator, report, odd):
    coordinator.grid.lie = ODD[odd]
    there, log = exchange(coordinator)
    assert there == ["a", "c", "d"]
    assert [line for line in log if line != "an answer cannot be decoded; asking again, one by one"] == [
        f"refused: b: {odd.strip()}" if "refuses" in odd or "given" in odd else f"refused: b: its answer {odd.strip()}"
    ]


def test_nobody_answers_for_another(coordinator, report):
    """A message says itself whose it is; b cannot speak for a, nor make a's order be refused."""

    def impostor(message, honest):
        order = next(i for i in coordinator.grid._box if coordinator.grid._box[i].metadata.src_node_id == 1)
        return meddled(message, honest, reply_to_message_id=order, src_node_id=1, group_id="1.guessed")

    coordinator.grid.lie = impostor
    there, log = exchange(coordinator)
    assert there == ["a", "c", "d"]
    assert log[0] == "left out: an answer that belongs to no site's order"
    assert log[1].startswith("going on without b")


def test_an_engine_error_is_the_engines(coordinator, report):
    coordinator.grid.lie = lambda m, h: Message(error=Error(3, "gone\x1b"), reply_to=m)
    there, log = exchange(coordinator)
    assert there == ["a", "c", "d"]
    assert log[0] == "b did not answer: gone"
