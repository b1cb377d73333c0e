"""Gradient clipping: torch's clip_grad_norm_ on each client's gradient, in every local step and every transport."""

import pytest
import tomli_w
import torch

import fedcomposite as fc
from fedcomposite import algorithms
from fedcomposite.algorithms import FedAvg, FedNMap, Scaffold, Zhang
from fedcomposite.experiments import Config
from fedcomposite.testing import small_problem


def network():
    torch.manual_seed(0)
    silos = fc.data.load("synthetic", clients=3, features=5, samples=12)
    module = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    return fc.Problem(silos, model=module)


def test_a_network_equals_clip_grad_norm_and_a_linear_model_too():
    problem = network()
    run = fc.simulate(problem, FedAvg(3, 0.5), rounds=4, clip_norm=0.2, dtype=torch.float64)
    x, clipped = problem.smooth().start(), 0
    for _ in range(4):
        changes = []
        for i in range(3):
            X, y = problem.silos[i]
            module = problem.module(x).double()
            for _ in range(3):
                module.zero_grad()
                torch.nn.functional.cross_entropy(module(X.double()), (y > 0).long()).backward()
                clipped += float(torch.nn.utils.clip_grad_norm_(module.parameters(), 0.2)) > 0.2
                with torch.no_grad():
                    for p in module.parameters():
                        p -= 0.5 * p.grad
            changes.append(torch.nn.utils.parameters_to_vector(module.parameters()).detach() - x)
        x = x + torch.stack(changes).mean(0)
    assert 0 < clipped < 36  # some gradients are long, some are not
    torch.testing.assert_close(run.solution, x, rtol=0, atol=1e-12)
    linear = small_problem(Zhang(2, 0.5), fc.regularizers.Zero())
    run = fc.simulate(linear, FedAvg(1, 2.0), rounds=1, clip_norm=0.1)
    pairs = [(X.double(), y.double()) for X, y in (linear.silos[i] for i in range(len(linear.silos)))]
    g = [-(X.T @ y) / (2 * len(y)) for X, y in pairs]  # of the logistic loss at zero
    short = torch.stack([v * min(1.0, 0.1 / (float(v.norm()) + 1e-6)) for v in g])
    torch.testing.assert_close(run.solution, -2.0 * short.mean(0), rtol=0, atol=1e-14)


@pytest.mark.parametrize("method", [Scaffold(2, 0.5), Scaffold(2, 0.5, option=1), FedNMap(2, 0.5, gamma=1.0)], ids=str)
def test_loop_stack_and_resume_agree_and_control_variates_stay_what_they_are(method, tmp_path):
    """Gradients are clipped before they are corrected, so that c stays the mean of the c_i."""
    problem, settings = small_problem(method), {"batch_size": 4, "clip_norm": 0.1}
    whole = fc.simulate(problem, method, rounds=6, **settings)
    loop = fc.simulate(problem, method, rounds=6, backend="loop", **settings)
    torch.testing.assert_close(whole.solution, loop.solution, rtol=0, atol=1e-13)
    for rounds in (2, 6):
        parts = fc.simulate(problem, method, rounds=rounds, checkpoint=tmp_path / "c", resume=True, **settings)
    assert torch.equal(parts.solution, whole.solution)
    if isinstance(method, Scaffold):
        torch.testing.assert_close(whole.server.c, whole.clients.c.mean(0), rtol=0, atol=1e-14)
    with pytest.raises(fc.CheckpointError, match="batches"):
        fc.simulate(problem, method, rounds=7, checkpoint=tmp_path / "c", resume=True, batch_size=4)


def test_a_recorded_round_clips():
    from fedcomposite.problems import Batches
    from fedcomposite.runtime import Simulator

    method = FedNMap(2, 0.5, gamma=1.0)
    runs = [Simulator(small_problem(method), method, batches=Batches(0, 4, clip_norm=0.1)) for _ in range(2)]
    runs[1].transport.mode = "record"  # without a GPU the program carries its rounds out as they are
    for _ in range(3):
        for sim in runs:
            sim.step()
    torch.testing.assert_close(runs[0].solution, runs[1].solution, rtol=0, atol=1e-14)


def test_what_clipping_would_spoil_is_refused():
    problem = small_problem(Zhang(2, 0.5))
    with pytest.raises(ValueError, match="clip_norm = 0, must be a number > 0"):
        fc.simulate(problem, Zhang(2, 0.5), rounds=1, clip_norm=0)
    with pytest.raises(ValueError, match="ProxNewton solves with gradients and Hessians as they are"):
        fc.simulate(problem, algorithms.ProxNewton(), rounds=1, clip_norm=1.0)
    private = fc.privacy.SampleLevel(clip=1.0, noise=1.0, rate=0.5)
    with pytest.raises(ValueError, match="each sample's gradient is clipped already"):
        fc.simulate(problem, Zhang(2, 0.5), rounds=1, clip_norm=1.0, privacy=private)


def test_a_federation_clips_as_its_file_says(tmp_path):
    from local_federation import LocalSites, federate, make_sites

    method = FedNMap(2, 0.5, gamma=1.0)
    problem, ramp = small_problem(method), {"schedule": "ramp", "start": 0.1, "end": 1.0, "rounds": 3}
    content = {
        "algorithm": algorithms.spec(method),
        "regularizer": {"name": "L1", "lam": 0.05, "strength": ramp},
        "run": {"rounds": 5, "stationarity_step": 0.1, "clip_norm": 0.1},
    }
    assert Config.check({**content, "data": {"name": "synthetic"}}).settings()["clip_norm"] == 0.1
    _, run = federate(LocalSites(make_sites(problem.silos, tmp_path)), tomli_w.dumps(content))
    h = fc.regularizers.L1(0.05).ramped(fc.schedules.Ramp(0.1, 1.0, rounds=3))
    problem = fc.Problem(problem.silos, loss="logistic", regularizer=h)
    want = fc.simulate(problem, method, rounds=5, stationarity_step=0.1, clip_norm=0.1)
    torch.testing.assert_close(run.solution, want.solution, rtol=0, atol=1e-12)
    assert run.history[-1].objective == pytest.approx(want.history[-1].objective, rel=1e-12)
    plain = fc.simulate(problem, method, rounds=5)
    assert not torch.allclose(plain.solution, want.solution)
