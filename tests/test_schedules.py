"""Steps that change from round to round: the formulas, their tables in TOML, and where methods accept them."""

import math
import tomllib
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fedcomposite as fc
from fedcomposite.algorithms import REGISTRY, FedAvg, FedDR, FedNMap, Scaffold, Zhang, build, spec
from fedcomposite.experiments import Config
from fedcomposite.schedules import (
    SCHEDULES,
    Constant,
    Cosine,
    Exponential,
    Inverse,
    InverseSqrt,
    Piecewise,
    Power,
    Ramp,
    Schedule,
    Staircase,
    Warmup,
    read,
)

ALL = [
    Constant(0.3),
    Power(0.3, 1 / 3, offset=8),
    InverseSqrt(0.3),
    Inverse(0.3, offset=4),
    Cosine(0.3, 0.01, rounds=50, warmup=5),
    Exponential(0.3, 0.9),
    Piecewise((0.3, 0.1, 0.2), (5, 9)),
    Warmup(4, Cosine(0.3, 0.01, rounds=20)),
    Staircase(5, Cosine(0.3, 0.01, rounds=20)),
    Ramp(0.01, 1.0, rounds=20, delay=3),
]


def test_formulas():
    rounds = (0, 1, 3, 8, 1000)
    assert [InverseSqrt(0.6)(t) for t in rounds] == [0.6 / math.sqrt(t + 1) for t in rounds]
    assert [Inverse(0.6, offset=3)(t) for t in rounds] == [0.6 / (t + 3) for t in rounds]
    assert Power(0.6, 0.5, offset=4)(12) == pytest.approx(0.3)
    assert [Piecewise((3, 2, 1), (2, 5))(t) for t in (0, 1, 2, 4, 5, 99)] == [3, 3, 2, 2, 1, 1]
    assert [Exponential(1.0, 0.5, least=0.2)(t) for t in (0, 1, 2, 3, 10_000)] == [1, 0.5, 0.25, 0.2, 0.2]
    cosine = Cosine(1.0, 0.2, rounds=11)
    assert (cosine(0), cosine(10), cosine(500)) == (1.0, 0.2, 0.2)
    assert cosine(5) == pytest.approx(0.6)
    warm = Cosine(1.0, 0.2, rounds=14, warmup=3)
    assert [warm(t) for t in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert warm(8) == pytest.approx(1 - 0.8 * (1 - math.cos(math.pi / 2)) / 2)
    later = Warmup(3, InverseSqrt(2.0))
    assert [later(t) for t in range(5)] == [0.5, 1.0, 1.5, 2.0, 2 / math.sqrt(2)]


def test_edges():
    """The first value is the start and the last the end, to the last digit; a schedule of one round is its start."""
    for start, end in ((0.3, 0.01), (0.1, 0.7), (1e-3, 3.3)):
        for cls in (Cosine, Ramp):
            assert [cls(start, end, rounds=1)(t) for t in (0, 1, 2)] == [start, end, end]
            assert cls(start, end, rounds=7)(0) == start
            assert cls(start, end, rounds=7)(7) == end
        assert Cosine(start, end, rounds=2)(1) == Cosine(start, end, rounds=7)(6) == end
        assert [Cosine(start, end, rounds=3, warmup=2)(t) for t in (2, 3)] == [start, end]  # one round is left
        assert [Ramp(start, end, rounds=1, delay=2)(t) for t in (1, 2, 3)] == [start, start, end]
        then = Cosine(start, end, rounds=5)
        assert [Warmup(0, then)(t) for t in range(9)] == [then(t) for t in range(9)]
        assert [Warmup(3, then)(t) for t in (3, 7, 99)] == [start, end, end]
        assert [Staircase(3, then)(t) for t in range(9)] == [then(3 * (t // 3)) for t in range(9)]
        assert Staircase(100, then)(99) == start
    climb = Warmup(100, Constant(1.0))  # longer than any run that uses it
    assert [climb(t) for t in (0, 9)] == pytest.approx([1 / 101, 10 / 101])


@given(st.sampled_from(ALL), st.integers(0, 10**7))
def test_positive_in_every_round(schedule, t):
    value = schedule(t)
    assert isinstance(value, float)
    assert 0 < value < math.inf
    assert schedule(t) == value


@pytest.mark.parametrize("schedule", ALL, ids=repr)
def test_a_repr_identifies_it(schedule):
    assert eval(repr(schedule)) == schedule
    assert hash(eval(repr(schedule))) == hash(schedule)


def test_every_schedule_has_a_table():
    text = """
    a = {schedule = "cosine", start = 0.1, end = 0.001, rounds = 200}
    b = {schedule = "piecewise", values = [0.1, 0.05], boundaries = [100]}
    c = {schedule = "warmup", rounds = 10, then = {schedule = "inverse_sqrt", start = 1}}
    d = 0.1
    """
    a, b, c, d = map(read, tomllib.loads(text).values())
    assert a == Cosine(0.1, 0.001, 200)
    assert b == Piecewise((0.1, 0.05), (100,))
    assert c == Warmup(10, InverseSqrt(1.0))
    assert d == 0.1
    assert {type(s) for s in ALL} == set(SCHEDULES.values())


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"schedule": "cosin"}, "unknown schedule 'cosin'; did you mean 'cosine'?"),
        ({"schedule": ["cosine"]}, "unknown schedule"),
        ({"schedule": "inverse", "begin": 1}, "schedule 'inverse' has no field 'begin' .*start, offset"),
        ({"schedule": "cosine", "start": 1.0}, "schedule 'cosine' needs end, rounds"),
        ({"schedule": "inverse", "start": 0}, "Inverse: start = 0, must be a number > 0"),
        ({"schedule": "cosine", "start": 1, "end": 0.1, "rounds": 5, "warmup": 5}, "warmup = 5, must be below rounds"),
        (
            {"schedule": "exponential", "start": 1e-3, "decay": 0.5, "least": 0.1},
            "least = 0.1, must not be above start",
        ),
        ({"schedule": "piecewise", "values": [1, 2], "boundaries": [3, 4]}, "must be one value more"),
        ({"schedule": "piecewise", "values": [1, 2, 3], "boundaries": [4, 4]}, "must increase"),
        ({"schedule": "warmup", "rounds": 3, "then": 0.1}, "Warmup: then = 0.1, must be Schedule"),
    ],
)
def test_wrong_tables(table, says):
    with pytest.raises(ValueError, match=says) as caught:
        read(table)
    assert "\n" not in str(caught.value)


def test_a_method_at_a_round():
    method = FedAvg(5, Piecewise((0.4, 0.1), (10,)), server_step=2)
    assert method.at(9) == FedAvg(5, 0.4, 2.0)
    assert method.at(10) == FedAvg(5, 0.1, 2.0)
    assert method.at(10) is method.at(10)
    plain = FedAvg(5, 0.1)
    assert plain.at(3) is plain
    assert not plain.schedules
    assert method.schedules == {"step": Piecewise((0.4, 0.1), (10,))}
    assert "Piecewise(values=(0.4, 0.1), boundaries=(10,))" in repr(method)
    with pytest.raises(ValueError, match="local_steps"):
        FedAvg(0, Constant(0.1))


def test_fields_that_must_not_change_refuse_schedules():
    with pytest.raises(ValueError, match=r"FedNMap: gamma cannot follow a schedule.* can: server_step, step$"):
        FedNMap(5, 0.1, gamma=Constant(0.1))
    with pytest.raises(ValueError, match=r"Zhang: step cannot follow a schedule.*FedNMap"):
        Zhang(5, InverseSqrt(0.1))
    with pytest.raises(ValueError, match="FedDR: alpha cannot"):
        FedDR(1.0, Constant(1.0), 3, 0.1)


def test_what_is_schedulable_is_a_field():
    for cls in REGISTRY.values():
        assert cls.schedulable <= set(cls.__dataclass_fields__)


def test_tables_in_a_configuration():
    table = {"schedule": "cosine", "start": 0.1, "end": 0.001, "rounds": 200}
    assert build("scaffold", local_steps=3, step=table) == Scaffold(3, Cosine(0.1, 0.001, 200))
    content = {
        "data": {"name": "synthetic", "clients": 5, "samples": 20, "seed": 0},
        "run": {"rounds": 10},
    }
    for extra in ({"gamma": 0.5}, {"steps": "auto"}):
        config = Config.check({**content, "algorithm": {"name": "FedNMap", "local_steps": 4, "step": table, **extra}})
        made = config.make_algorithm(config.specs[0], config.make_problem())
        assert made.at(0).step == 0.1
        assert made.step == Cosine(0.1, 0.001, 200)
    wrong = {"name": "FedAvg", "local_steps": 4, "step": {"schedule": "cosine", "start": 0.1}}
    with pytest.raises(ValueError, match=r"\[algorithm\] schedule 'cosine' needs end, rounds"):
        Config.check({**content, "algorithm": wrong})


def halved(t):
    return 0.1 / (1 + t // 2)


@dataclass(frozen=True)
class Own(Schedule):
    """start / (t + 1)."""

    start: float

    def formula(self, round):
        return self.start / (round + 1)


def test_schedules_of_ones_own():
    """A function of the round, or a class; what a file cannot name is told by its name."""
    made = FedAvg(2, step=halved)
    assert [made.at(t).step for t in range(5)] == [0.1, 0.1, 0.05, 0.05, 0.1 / 3]
    assert FedAvg(2, step=halved) == made
    assert spec(made)["step"] == {"schedule": "halved"}
    assert str(made.step) == "halved"
    assert Staircase(2, halved)(3) == 0.05
    assert spec(FedAvg(2, step=Own(0.3)))["step"] == {"schedule": "Own", "start": 0.3}
    problem = fc.Problem(fc.data.load("synthetic", clients=3, features=4, samples=20))
    run = fc.simulate(problem, FedAvg(2, step=partial(pow, 0.5)), rounds=3)
    same = fc.simulate(problem, FedAvg(2, step=Piecewise((1.0, 0.5, 0.25), (1, 2))), rounds=3)
    assert torch.equal(run.solution, same.solution)
    with pytest.raises(ValueError, match="<lambda> is -1 in round 0, must be positive"):
        FedAvg(2, step=lambda t: -1.0).at(0)
    with pytest.raises(ValueError, match="cannot follow a schedule"):
        FedDR(1.0, halved, 3, 0.1)
