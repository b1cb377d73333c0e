"""Rounds as one program: the same numbers as operation by operation, for every method that allows it."""

import warnings

import pytest
import torch
from torch import nn

import fedcomposite as fc
from fedcomposite.algorithms import REGISTRY, FedAvg, FedNMap, Zhang
from fedcomposite.problems import Batches
from fedcomposite.regularizers import SCAD
from fedcomposite.runtime import EagerWarning, Simulator
from fedcomposite.testing import small_problem

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def both(problem, method, mode="record", rounds=5, **settings):
    """Two simulators after the same rounds; without a GPU the program runs on its static buffers, unrecorded."""
    batches = Batches(0, settings.pop("batch_size", None))
    sims = [Simulator(problem, method, batches=batches, device=DEVICE, mode=m, **settings) for m in ("eager", mode)]
    for sim in sims:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", EagerWarning)
            for _ in range(rounds):
                sim.step()
    return sims


@pytest.mark.parametrize("batch_size", [None, 4])
@pytest.mark.parametrize("name", REGISTRY)
def test_recorded_rounds_equal_eager_ones(name, batch_size):
    method = REGISTRY[name].auto(L=0.25, local_steps=3)
    for share in (1.0, 0.5) if method.partial else (1.0,):
        eager, recorded = both(small_problem(method), method, batch_size=batch_size, participation=share)
        torch.testing.assert_close(recorded.solution, eager.solution, rtol=0, atol=1e-12)
        for a, b in zip(eager.clients, recorded.clients, strict=True):
            torch.testing.assert_close(b, a, rtol=0, atol=1e-12)
        assert recorded.counter == eager.counter  # gradients, proxes and bytes


def network(batch_norm=True):
    silos = fc.data.load("digits").partition("dirichlet", clients=4, alpha=0.5)
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(16) if batch_norm else nn.Identity()
    model = nn.Sequential(nn.Linear(64, 16), norm, nn.ReLU(), nn.Linear(16, 10))
    return fc.Problem(silos, model=model, regularizer=SCAD(0.05, kappa=0.01))


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_recorded_networks_with_buffers(share):
    method = FedNMap(3, 0.1, gamma=0.3, partial_participation=share < 1)
    eager, recorded = both(network(), method, batch_size=8, participation=share)
    torch.testing.assert_close(recorded.solution, eager.solution, rtol=0, atol=1e-12)
    torch.testing.assert_close(recorded.buffers, eager.buffers, rtol=0, atol=1e-12)


@pytest.mark.skipif(DEVICE == "cpu", reason="compiling on a CPU is slow and not what it is for; needs a CUDA GPU")
@pytest.mark.parametrize("method", [Zhang(3, 0.1), FedNMap(3, 0.1, gamma=0.3), FedAvg(3, 0.1)], ids=repr)
def test_compiled_networks(method):
    eager, compiled = both(network(), method, mode="compile", batch_size=8, dtype=torch.float32)
    torch.testing.assert_close(compiled.solution, eager.solution, rtol=0, atol=1e-4)


def test_the_reason_is_said():
    method = REGISTRY["GradSkip"].auto(0.25, local_steps=3)
    sim = Simulator(small_problem(method), method, batches=Batches(), device=DEVICE, mode="record")
    with pytest.warns(EagerWarning, match="GradSkip runs step by step on the GPU: "):
        sim.step()
    silos = fc.data.load("digits").partition("iid", clients=3)
    model = nn.Sequential(nn.Linear(64, 8), nn.Dropout(0.5), nn.Linear(8, 10))
    sim = Simulator(fc.Problem(silos, model=model), FedAvg(2, 0.1), batches=Batches(0, 4), device=DEVICE, mode="record")
    with pytest.warns(EagerWarning, match="random layers"):
        sim.step()
    assert sim.mode == "eager"


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA GPU")
def test_resume_of_recorded_rounds(tmp_path):
    problem, method, path = network(), Zhang(3, 0.1), tmp_path / "c.safetensors"
    settings = {"batch_size": 8, "mode": "record", "device": DEVICE}
    whole = fc.simulate(problem, method, rounds=6, **settings)
    for rounds in (2, 6):
        parts = fc.simulate(problem, method, rounds=rounds, checkpoint=path, resume=True, **settings)
    assert torch.equal(whole.solution, parts.solution)
    assert torch.equal(whole.buffers, parts.buffers)


@pytest.mark.parametrize(("mode", "message"), [("turbo", "mode = 'turbo'"), ("record", "is for device = 'cuda'")])
def test_wrong_mode(mode, message):
    with pytest.raises(ValueError, match=message):
        fc.simulate(small_problem(FedAvg(1, 0.1)), FedAvg(1, 0.1), rounds=1, mode=mode)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA GPU")
@pytest.mark.parametrize("name", REGISTRY)
def test_a_gpu_gives_what_a_cpu_gives(name):
    """Float32, minibatches, recorded where possible, against the eager CPU."""
    method = REGISTRY[name].auto(L=0.25, local_steps=3)
    problem = small_problem(method)
    settings = {"rounds": 12, "batch_size": 4, "dtype": torch.float32}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EagerWarning)
        gpu = fc.simulate(problem, method, device="cuda", **settings)
    cpu = fc.simulate(problem, method, **settings)
    torch.testing.assert_close(gpu.solution.cpu(), cpu.solution, rtol=0, atol=1e-4)
    for a, b in zip(cpu.history, gpu.history, strict=True):
        assert a.objective == pytest.approx(b.objective, abs=1e-5)


@pytest.mark.parametrize(("mode", "word"), [("record", "recorded"), ("eager", None)])
def test_the_cost_of_preparing_is_told(monkeypatch, mode, word):
    method = FedAvg(local_steps=2, step=0.1)
    monkeypatch.setattr("fedcomposite.runtime.simulator._mode", lambda *_: mode)
    run = fc.simulate(small_problem(method), method, rounds=2)
    assert run.message.startswith("all 2 rounds done")
    assert (f"rounds {word} for the GPU in " in run.message) == (word is not None)
