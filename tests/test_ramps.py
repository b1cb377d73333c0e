"""Strengths of h that follow a schedule: strength(r) h in round r, and h itself where models are judged."""

import pytest
import tomli_w
import torch

import fedcomposite as fc
from fedcomposite import algorithms, schedules
from fedcomposite.algorithms import FedMid, FedNMap, ProximalGradient, Zhang
from fedcomposite.experiments import Config
from fedcomposite.regularizers import L1, MCP
from fedcomposite.testing import small_problem

RAMP = schedules.Ramp(0.1, 1.0, rounds=6)
PROX = [n for n, c in algorithms.REGISTRY.items() if "convex" in c.info.regularizer and not c.one_regularizer]


def ramped(problem, h):
    return fc.Problem(problem.silos, loss="logistic", regularizer=h.ramped(RAMP))


def test_a_ramp_is_a_line_or_a_cubic():
    line = schedules.Ramp(1.0, 3.0, rounds=4, power=1, delay=2)
    assert [line(r) for r in range(8)] == [1, 1, 1, 1.5, 2, 2.5, 3, 3]
    cubic = schedules.Ramp(0.1, 1.0, rounds=10)
    assert [cubic(r) for r in (0, 5, 10, 50)] == [pytest.approx(v) for v in (0.1, 1 - 0.9 / 8, 1.0, 1.0)]
    assert schedules.read(cubic.table) == cubic


def test_proximal_gradient_by_hand_with_the_strength_of_every_round():
    problem = ramped(small_problem(ProximalGradient(0.5)), L1(0.05))
    run = fc.simulate(problem, ProximalGradient(0.5), rounds=9, keep_solutions=True)
    x = torch.zeros(8, dtype=torch.float64)
    for r in range(9):
        v = x - 0.5 * problem.gradient(x)
        x = v.sign() * (v.abs() - 0.5 * 0.05 * RAMP(r)).clamp(min=0)
        torch.testing.assert_close(run.solutions[r + 1], x, rtol=0, atol=1e-14)
    last = run.history[-1]
    assert last.objective == pytest.approx(last.loss + 0.05 * float(x.abs().sum()), abs=1e-14)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROX)
def test_every_method_ends_as_if_it_had_begun_with_the_last_strength(name):
    """After the ramp a method goes on with h, from another start: exact ones come to the same model."""
    cls = algorithms.REGISTRY[name]
    problem = small_problem(cls.auto(0.25, local_steps=2), L1(0.02))
    method = cls.auto(problem.smoothness(), local_steps=2)
    one = fc.simulate(problem, method, rounds=600, evaluate_every=600)
    two = fc.simulate(ramped(problem, L1(0.02)), method, rounds=600, evaluate_every=600)
    torch.testing.assert_close(one.solution, two.solution, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "method", [FedNMap(2, 0.4, gamma=1.0), Zhang(2, 0.4), FedMid(2, 0.4)], ids=lambda m: type(m).__name__
)
def test_loop_stack_and_resume_agree(method, tmp_path):
    problem = ramped(small_problem(method), MCP(0.05, 3.0))
    settings = {"batch_size": 4}
    whole = fc.simulate(problem, method, rounds=8, **settings)
    loop = fc.simulate(problem, method, rounds=8, backend="loop", **settings)
    torch.testing.assert_close(whole.solution, loop.solution, rtol=0, atol=1e-13)
    for rounds in (3, 8):
        parts = fc.simulate(problem, method, rounds=rounds, checkpoint=tmp_path / "c", resume=True, **settings)
    assert torch.equal(parts.solution, whole.solution)
    other = fc.Problem(problem.silos, loss="logistic", regularizer=MCP(0.05, 3.0))
    with pytest.raises(fc.CheckpointError, match="regularizer"):
        fc.simulate(other, method, rounds=9, checkpoint=tmp_path / "c", resume=True, **settings)


def test_a_ramp_goes_where_its_term_goes():
    silos = fc.data.load("synthetic", clients=3, features=4, samples=10)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    named = L1(0.1).ramped(RAMP).on("0.weight")
    for h in (named, L1(0.1).on("0.weight").ramped(RAMP)):
        problem = fc.Problem(silos, model=model, regularizer=h)
        assert problem.regularizer.during(99) == L1(0.1).on("0.weight").resolve(problem.layout)
        assert problem.regularizer.during(0).h.lam == pytest.approx(0.01)
    assert fc.Problem(silos, model=model, regularizer=L1(0.1).ramped(RAMP)).regularizer.h.runs == ((0, 12), (15, 21))


@pytest.mark.parametrize("name", [n for n, c in algorithms.REGISTRY.items() if c.one_regularizer])
def test_methods_of_one_regularizer_say_why(name):
    cls = algorithms.REGISTRY[name]
    method = cls() if name == "ProxNewton" else cls.auto(0.25)
    with pytest.raises(ValueError, match=f"{name} takes no strength that changes from round to round: "):
        fc.simulate(ramped(small_problem(Zhang(2, 0.5)), L1(0.1)), method, rounds=2)


def test_solvers_and_sums_refuse_it():
    problem = ramped(small_problem(Zhang(2, 0.5)), L1(0.1))
    for ask in (fc.solve, fc.path):
        with pytest.raises(ValueError, match=r"strength of L1.* changes: leave ramped out"):
            ask(problem)
    with pytest.raises(TypeError, match="ramp the sum"):
        L1(0.1).ramped(RAMP) + L1(0.1).on([True, False])
    with pytest.raises(TypeError, match="say where each acts"):
        L1(0.1).on([True, False]) + L1(0.1).ramped(RAMP)
    with pytest.raises(ValueError, match="one schedule"):
        L1(0.1).ramped(RAMP).ramped(RAMP)


def test_a_file_says_it_too(tmp_path):
    table = {
        "data": {"name": "synthetic", "clients": 3, "features": 5, "samples": 10},
        "regularizer": {
            "name": "L1",
            "lam": 0.1,
            "strength": {"schedule": "ramp", "start": 0.1, "end": 1.0, "rounds": 6},
        },
        "algorithm": {"name": "FedNMap", "local_steps": 2, "step": 0.1, "gamma": 0.2},
        "run": {"rounds": 2},
    }
    (tmp_path / "e.toml").write_text(tomli_w.dumps(table))
    config = Config.read(tmp_path / "e.toml")
    assert config.make_regularizer() == L1(0.1).ramped(RAMP)
    assert Config.check(table).text == config.text
    for wrong in (0.5, {"schedule": "rump"}):
        with pytest.raises(fc.experiments.ConfigError, match=r"\[regularizer\] (strength|unknown schedule)"):
            Config.check({**table, "regularizer": {**table["regularizer"], "strength": wrong}})
