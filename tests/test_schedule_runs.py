"""Steps that follow a schedule: a pure function of the round, in every transport, after a resume, and in TOML."""

import pytest
import tomli_w
import torch

import fedcomposite as fc
from fedcomposite import algorithms, schedules
from fedcomposite._validation import UserError
from fedcomposite.algorithms import FedAvg
from fedcomposite.experiments import Config
from fedcomposite.testing import small_problem

SCHEDULE = schedules.Cosine(start=0.8, end=0.01, rounds=8, warmup=2)
METHODS = [
    name for name, cls in algorithms.REGISTRY.items() if cls.info.participation == "any" and "step" in cls.schedulable
]


def scheduled(name):
    method = algorithms.REGISTRY[name].auto(0.25, local_steps=3)
    return fc.algorithms.build(name, **{**vars(method), "step": SCHEDULE})


def test_it_is_the_method_with_another_step_in_every_round():
    """By hand: FedAvg with the step of each round."""
    problem = small_problem(FedAvg(2, 0.1), fc.regularizers.Zero())
    run = fc.simulate(problem, FedAvg(2, SCHEDULE), rounds=10, keep_solutions=True)
    x = torch.zeros(8, dtype=torch.float64)
    for r in range(10):
        moved = []
        for i in range(len(problem.silos)):
            X, y = (t.double() for t in problem.silos[i])
            z = x.clone()
            for _ in range(2):
                z = z - SCHEDULE(r) * (X.T @ (-y * torch.sigmoid(-y * (X @ z)))) / len(y)
            moved.append(z - x)
        x = x + torch.stack(moved).mean(0)
        torch.testing.assert_close(run.solutions[r + 1], x, rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", METHODS)
def test_every_transport_and_a_resumed_run_give_the_same(name, tmp_path):
    method = scheduled(name)
    problem = small_problem(method)
    settings = {"batch_size": 4, "participation": 0.5}
    whole = fc.simulate(problem, method, rounds=7, **settings)
    loop = fc.simulate(problem, method, rounds=7, backend="loop", **settings)
    torch.testing.assert_close(whole.solution, loop.solution, rtol=0, atol=1e-12)
    for rounds in (3, 7):
        parts = fc.simulate(problem, method, rounds=rounds, checkpoint=tmp_path / "c", resume=True, **settings)
    assert torch.equal(parts.solution, whole.solution)


def test_a_schedule_belongs_to_the_run(tmp_path):
    problem = small_problem(FedAvg(2, 0.1))
    fc.simulate(problem, FedAvg(2, SCHEDULE), rounds=2, checkpoint=tmp_path / "c")
    other = schedules.Cosine(start=0.8, end=0.02, rounds=8, warmup=2)
    with pytest.raises(fc.CheckpointError, match="method"):
        fc.simulate(problem, FedAvg(2, other), rounds=4, checkpoint=tmp_path / "c", resume=True)


@pytest.mark.parametrize(
    "schedule",
    [
        SCHEDULE,
        schedules.Piecewise((0.5, 0.1), (5,)),
        schedules.Warmup(3, schedules.Exponential(0.5, 0.9)),
        schedules.InverseSqrt(0.3),
    ],
    ids=repr,
)
def test_it_goes_through_a_configuration(schedule, tmp_path):
    spec = algorithms.spec(FedAvg(2, schedule))
    content = {"data": {"name": "synthetic"}, "algorithm": spec, "run": {"rounds": 3}}
    (tmp_path / "e.toml").write_text(tomli_w.dumps(content))
    config = Config.read(tmp_path / "e.toml")
    assert config.make_algorithm(config.specs[0], None) == FedAvg(2, schedule)


def test_a_federation_follows_it(tmp_path):
    from local_federation import LocalSites, federate, make_sites

    method = scheduled("FedAvg")
    problem = small_problem(method)
    content = {
        "algorithm": algorithms.spec(method),
        "regularizer": {"name": "L1", "lam": 0.003},
        "run": {"rounds": 5, "stationarity_step": 0.1},
    }
    _, run = federate(LocalSites(make_sites(problem.silos, tmp_path)), tomli_w.dumps(content))
    want = fc.simulate(problem, method, rounds=5, stationarity_step=0.1, backend="loop")
    torch.testing.assert_close(run.solution, want.solution, rtol=0, atol=1e-12)


def test_a_recorded_round_says_that_it_cannot_follow_it():
    from fedcomposite.problems import Batches
    from fedcomposite.runtime import Simulator

    sim = Simulator(small_problem(FedAvg(2, 0.1)), FedAvg(2, SCHEDULE), batches=Batches(), mode="record")
    with pytest.warns(fc.EagerWarning, match="step changes from round to round"):
        sim.step()


RISING = algorithms.FedMid(2, schedules.Piecewise((0.1, 50.0), (3,)))
MCP = {"name": "MCP", "lam": 0.01, "theta": 2.0}


@pytest.mark.parametrize("backend", ["stacked", "loop"])
def test_a_step_that_comes_to_1_over_rho_later_is_named_with_its_round(backend):
    problem = small_problem(RISING, fc.regularizers.MCP(0.01, 2.0))
    with pytest.raises(UserError, match=r"round 4: prox of MCP.*must be below 1/rho"):
        fc.simulate(problem, RISING, rounds=6, backend=backend)


def test_and_it_is_the_users_to_set_right(cli, tmp_path):
    content = {
        "data": {"name": "synthetic"}, "algorithm": algorithms.spec(RISING), "regularizer": MCP,
        "run": {"rounds": 6, "stationarity_step": 0.1},
    }  # fmt: skip
    (tmp_path / "e.toml").write_text(tomli_w.dumps(content))
    said = cli("run", tmp_path / "e.toml", "--out", tmp_path / "out", check=2).err
    assert "error: round 4: prox of MCP" in said
    assert "internal" not in said


def test_a_federation_names_the_round_as_well(tmp_path):
    from local_federation import LocalSites, federate, make_sites

    from fedcomposite.federation.coordinator.delivery import FederationError

    content = {"algorithm": algorithms.spec(RISING), "regularizer": MCP, "run": {"rounds": 6, "stationarity_step": 0.1}}
    grid = LocalSites(make_sites(small_problem(RISING).silos, tmp_path))
    with pytest.raises(FederationError, match=r"refuses: round 4: prox of MCP.*must be below 1/rho"):
        federate(grid, tomli_w.dumps(content))
