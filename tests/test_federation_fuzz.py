"""Malformed messages in both directions: a site refuses in one line, and a coordinator in the site's name."""

import contextlib
import json
import math

import numpy as np
import pytest
import safetensors.torch
import tomli_w
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from local_federation import LocalSites, Lost, make_sites, opened
from orders import CONFIG, DEEP, ORDER

from fedcomposite.data import Silos
from fedcomposite.federation import wire
from fedcomposite.federation.coordinator.coordinator import Coordinator
from fedcomposite.federation.coordinator.delivery import Settings
from fedcomposite.federation.engines.engine import Reply
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
    """A message: mostly a text and vectors, as the package makes them."""
    kind = draw(st.integers(0, 19))
    if kind == 0:
        return draw(st.sampled_from([{}, {"x": ""}, {"vectors": b""}, {"": "", "\x1b": b"1"}]))
    if kind == 1:
        part = st.one_of(st.text(max_size=5), st.binary(max_size=5))
        names = st.sampled_from(["order", "report", "introduction", "refusal", "vectors", "", "\x1b"])
        return draw(st.dictionaries(names, part, max_size=3))
    if kind == 2:
        return {"refusal": draw(TEXTS)}
    parts = {key: draw(mutated(honest)) if draw(st.booleans()) else json.dumps(honest)}
    if vectors is not None:
        parts["vectors"] = draw(blocks(vectors)) if draw(st.booleans()) else safetensors.torch.save(dict(vectors))
    return parts


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


@pytest.mark.filterwarnings("ignore::fedcomposite.OneClassWarning")  # a word to who tries things out
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


test_a_site_answers_a_thousand_things = pytest.mark.filterwarnings("ignore::fedcomposite.OneClassWarning")(
    thousand(test_a_site_answers_anything_with_an_answer, request=ORDERS)
)


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


class Replay(LocalSites):
    """Answers of the first exchange are kept for the next ones; site b's are what ``lie(honest)`` makes of them."""

    def __init__(self, sites):
        super().__init__(sites)
        self.kept, self.lie = {}, lambda honest: honest

    def carried(self, site, order, payload):
        asked = wire.decode(payload)
        key = site, "introduction" if '"shape":null' in asked["order"] else "report"
        if key not in self.kept:
            self.kept[key] = self.sites[site].answer(asked)
        made = self.lie(self.kept[key]) if site == "b" else self.kept[key]
        if isinstance(made, Lost):
            return Reply(order, lost=str(made))
        return Reply(order, made if isinstance(made, bytes) else wire.encode(made))


@pytest.fixture(scope="module")
def coordinator(silos, tmp_path_factory):
    grid = Replay(make_sites(silos, tmp_path_factory.mktemp("sites")))
    names = [s.name for s in grid.sites.values()]
    settings = Settings(policy="skip", patience=0.05)
    one = Coordinator(grid, names, grid.permitted, parse(CONFIG), "job", settings)
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
    one.grid.lie = lambda honest: honest
    exchange(one)
    kept = one.grid.kept["b", "report"]
    return wire.numbers(kept), safetensors.torch.load(kept["vectors"])


@pytest.fixture(scope="module")
def report(coordinator):
    return honest_report(coordinator)


@HUNDRED
@given(data=st.data())
def test_the_coordinator_refuses_in_the_sites_name(coordinator, report, data):
    """Whatever b sends, the others' round goes on, and b's part of it is all there or named as refused."""
    content = data.draw(contents("report", *report))
    coordinator.grid.lie = lambda honest: content
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


ODD = {
    "not a message of this package": lambda honest: b"",
    "not a message of this package ": lambda honest: b"\x80\x04pickle" * 9,
    "not a message of this package  ": lambda honest: wire.encode(honest)[:-1],
    "not a message of this package   ": lambda honest: wire.encode(honest) + b"x",
    "not a message of this package    ": lambda honest: wire.encode({"report": 3}),
    "refuses: without a reason": lambda honest: wire.content(refusal=""),
    "refuses: without a reason ": lambda honest: wire.content(refusal="\n\x1b\n"),
    "refuses: a b": lambda honest: wire.content(refusal="a\x07\nb"),
}


@pytest.mark.parametrize("odd", list(ODD))
def test_odd_messages_cost_their_site_only(coordinator, report, odd):
    coordinator.grid.lie = ODD[odd]
    there, log = exchange(coordinator)
    assert there == ["a", "c", "d"]
    assert log == [f"refused: b: {odd.strip()}"]


@HUNDRED
@given(st.one_of(st.binary(max_size=200), st.tuples(VALUES, st.binary(max_size=9)).map(lambda two: framed(*two))))
def test_any_bytes_are_a_message_or_are_refused(payload):
    """Nothing but a message of texts and blocks comes out, and what comes out goes in again."""
    try:
        found = wire.decode(payload)
    except WireError:
        return
    assert all(isinstance(v, str | bytes) for v in found.values())
    assert wire.decode(wire.encode(found)) == found


def framed(front, rest):
    text = json.dumps(front).encode()
    return len(text).to_bytes(8, "big") + text + rest


def test_an_engine_error_is_the_engines(coordinator, report):
    coordinator.grid.lie = lambda honest: Lost("gone\x1b")
    there, log = exchange(coordinator)
    assert there == ["a", "c", "d"]
    assert log[0] == "b did not answer: gone"
