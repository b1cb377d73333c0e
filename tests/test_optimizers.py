"""Momentum at clients, momentum and Adam at the server, against torch.optim; and where they are refused."""

import pytest
import tomli_w
import torch
from brief_laws import check_briefly

import fedcomposite as fc
from fedcomposite import algorithms, schedules
from fedcomposite.algorithms import FedAvg, FedMid
from fedcomposite.algorithms.optimizers import Adam, Momentum
from fedcomposite.experiments import Config
from fedcomposite.testing import check_algorithm, small_problem

ADAM, BALL = Adam(0.8, 0.95), Momentum(0.7)
METHODS = [
    FedAvg(3, 0.3, momentum=0.6),
    FedAvg(2, 0.3, 0.05, server_optimizer=ADAM),
    FedAvg(2, 0.3, server_optimizer=BALL, momentum=0.5),
    FedMid(3, 0.3, momentum=0.6),
    FedMid(2, 0.3, 0.05, server_prox_only=True, server_optimizer=ADAM),
    FedMid(2, 0.3, server_prox_only=True, server_optimizer=BALL),
]


@pytest.fixture(scope="module")
def one():
    """One client, so that a round is a step of an optimizer."""
    silos = fc.data.load("synthetic", clients=1, features=6, samples=40, alpha=1.0, beta=1.0, seed=0)
    return fc.Problem(silos, loss="logistic")


def soft(v, threshold):
    return v.sign() * (v.abs() - threshold).clamp(min=0)


def descend(problem, make, steps, after=lambda x: None, x0=None):
    """Steps of a torch optimizer on the pooled loss."""
    x = torch.zeros(problem.dimension, dtype=torch.float64) if x0 is None else x0.clone()
    x.requires_grad_()
    optimizer = make([x])
    for _ in range(steps):
        x.grad = problem.gradient(x.detach())
        optimizer.step()
        after(x)
    return x.detach()


@pytest.mark.parametrize(
    ("server", "make"),
    [
        (Adam(), lambda p: torch.optim.Adam(p, lr=0.05)),
        (ADAM, lambda p: torch.optim.Adam(p, lr=0.05, betas=(0.8, 0.95))),
        (BALL, lambda p: torch.optim.SGD(p, lr=0.05 * 0.5, momentum=0.7, dampening=0.7)),
    ],
    ids=["Adam", "Adam with its own decay", "Momentum"],
)
def test_a_server_optimizer_is_torchs(one, server, make):
    run = fc.simulate(one, FedAvg(1, 0.5, 0.05, server_optimizer=server), rounds=30)
    torch.testing.assert_close(run.solution, descend(one, make, 30), rtol=0, atol=1e-12)


@pytest.mark.parametrize("cls", [FedAvg, FedMid])
def test_client_momentum_is_torchs_sgd_made_anew_in_each_round(one, cls):
    lam = 0.02 if cls is FedMid else 0.0
    problem = fc.Problem(one.silos, loss="logistic", regularizer=fc.regularizers.L1(lam) if lam else None)
    method = cls(5, 0.4, momentum=0.7)
    run = fc.simulate(problem, method, rounds=6)
    x = torch.zeros(6, dtype=torch.float64)

    def shrink(y):
        with torch.no_grad():
            y.copy_(soft(y, 0.4 * lam))

    for _ in range(6):
        x = descend(one, lambda p: torch.optim.SGD(p, lr=0.4, momentum=0.7, dampening=0.7), 5, shrink, x)
        x = soft(x, 5 * 0.4 * lam)
    torch.testing.assert_close(run.solution, x, rtol=0, atol=1e-12)


@pytest.mark.parametrize("server", [ADAM, BALL], ids=str)
def test_with_a_prox_it_comes_to_the_composite_solution(one, server):
    """Fixed points are those of f + h, not of a scaled f: one local step, against the pooled solver."""
    h = fc.regularizers.L1(0.05)
    problem = fc.Problem(one.silos, loss="logistic", regularizer=h)
    rate = schedules.InverseSqrt(0.3) if server is ADAM else 2.0
    method = FedMid(1, 0.5, rate, server_prox_only=True, server_optimizer=server)
    run = fc.simulate(problem, method, rounds=4000, evaluate_every=4000)
    want = fc.solve(problem).solution
    torch.testing.assert_close(run.solution, want, rtol=0, atol=1e-5)
    assert torch.equal(run.solution == 0, want == 0)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_the_laws_of_methods_hold(method):
    check_briefly(method)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_the_laws_of_methods_hold_over_many_rounds(method):
    check_algorithm(method)


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_a_federation_does_the_same(method, tmp_path):
    from local_federation import LocalSites, federate, make_sites

    problem = small_problem(method)
    content = {
        "algorithm": algorithms.spec(method),
        "regularizer": {"name": "L1", "lam": 0.003},
        "run": {"rounds": 4, "stationarity_step": 0.1, "batch_size": 4},
    }
    _, run = federate(LocalSites(make_sites(problem.silos, tmp_path)), tomli_w.dumps(content))
    want = fc.simulate(problem, method, rounds=4, stationarity_step=0.1, batch_size=4)
    torch.testing.assert_close(run.solution, want.solution, rtol=0, atol=1e-12)
    config = Config.check({**content, "data": {"name": "synthetic"}})
    assert config.make_algorithm(config.specs[0], None) == method


def test_a_resumed_run_goes_on_with_its_moments(tmp_path):
    method = FedMid(2, schedules.Cosine(0.3, 0.1, rounds=9), 0.05, server_prox_only=True, server_optimizer=ADAM)
    problem, settings = small_problem(method), {"batch_size": 4, "participation": 0.5}
    whole = fc.simulate(problem, method, rounds=9, **settings)
    for rounds in (4, 9):
        parts = fc.simulate(problem, method, rounds=rounds, checkpoint=tmp_path / "c", resume=True, **settings)
    assert torch.equal(whole.solution, parts.solution)
    assert whole.history[-1].bytes_down == 9 * 8 * 8 * max(1, round(0.5 * len(problem.silos)))  # the model, no moments


def test_where_it_would_break_something_it_is_refused():
    for name in ("Zhang", "FedNMap", "Scaffold", "FedDyn"):
        for field in ({"momentum": 0.9}, {"server_optimizer": {"optimizer": "adam"}}):
            with pytest.raises(ValueError, match=f"{name} takes no .*: its rules hold for plain steps only"):
                algorithms.build(name, **field)
    with pytest.raises(ValueError, match="server_optimizer needs server_prox_only"):
        FedMid(1, 0.1, server_optimizer=ADAM)
    grouped = small_problem(FedMid(1, 0.1), fc.regularizers.GroupLasso(0.1, groups=[4, 4]))
    method = FedMid(1, 0.1, server_prox_only=True, server_optimizer=ADAM)
    with pytest.raises(ValueError, match="Adam gives each coordinate a step of its own"):
        fc.simulate(grouped, method, rounds=1)
    with pytest.raises(ValueError, match="unknown optimizer 'adan'"):
        algorithms.build("FedAvg", local_steps=1, step=0.1, server_optimizer={"optimizer": "adan"})
    with pytest.raises(ValueError, match=r"momentum = 1\.0, must be"):
        FedAvg(1, 0.1, momentum=1.0)
