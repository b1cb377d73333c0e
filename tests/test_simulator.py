"""The runtime: sampling, weights, sizes, stopping, divergence, checkpoints."""

import dataclasses
import math
import os
import signal
import time
import warnings

import numpy as np
import pytest
import torch

import fedcomposite as fc
from fedcomposite.algorithms import REGISTRY, FedAvg, FedCanon, FedNMap, ProximalGradient, ProxNewton, Scaffold, Zhang
from fedcomposite.problems import Batches
from fedcomposite.regularizers import L1, MCP, Box
from fedcomposite.runtime import Record, Simulator, messages
from fedcomposite.runtime.records import ending


@pytest.fixture(scope="module")
def uneven():
    """Five clients with 3 to 200 samples: several padded blocks."""
    silos = fc.data.load("synthetic", clients=5, features=7, samples=200, seed=2)
    cuts = (200, 3, 40, 41, 9)
    return fc.Silos.from_arrays([(silos[i][0][:m], silos[i][1][:m]) for i, m in enumerate(cuts)])


def naive_gradient(X, b, x):
    """The logistic gradient of one silo, in NumPy."""
    return X.T @ (-b / (1 + np.exp(b * (X @ x)))) / len(b)


def test_unequal_silos_against_numpy(uneven):
    problem = fc.Problem(uneven, loss="logistic", regularizer=L1(0.01))
    run = fc.simulate(problem, ProximalGradient(1.5), rounds=5, keep_solutions=True)
    x = np.zeros(7)
    for r in range(5):
        g = np.mean([naive_gradient(X.numpy(), b.numpy(), x) for X, b in (uneven[i] for i in range(5))], axis=0)
        v = x - 1.5 * g
        x = np.sign(v) * np.maximum(np.abs(v) - 0.015, 0)
        np.testing.assert_allclose(run.solutions[r + 1], x, atol=1e-14)


def test_sample_weights_give_the_pooled_problem(uneven):
    pooled = fc.Silos.from_arrays([(uneven.features, uneven.targets)])
    one = fc.Problem(uneven, loss="logistic", regularizer=L1(0.01), weights="samples")
    two = fc.Problem(pooled, loss="logistic", regularizer=L1(0.01))
    a, b = (fc.simulate(p, ProximalGradient(1.5), rounds=8, keep_solutions=True) for p in (one, two))
    torch.testing.assert_close(a.solutions, b.solutions, rtol=0, atol=1e-13)
    assert a.history[-1].objective == pytest.approx(b.history[-1].objective, abs=1e-13)
    assert a.history[-1].stationarity == pytest.approx(b.history[-1].stationarity, abs=1e-13)


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["uniform", "samples"])
def test_sampled_cohorts_are_unbiased(uneven, weights):
    """The mean over all cohorts of the weighted mean reply is the full gradient."""
    problem = fc.Problem(uneven, loss="logistic", weights=weights)
    steps = []
    for seed in range(400):
        run = fc.simulate(problem, ProximalGradient(1.0), rounds=1, participation=0.4, seed=seed, evaluate_every=1)
        steps.append(-run.solution)
    full = problem.gradient(torch.zeros(7))
    spread = torch.stack(steps).std(0) / math.sqrt(len(steps))
    assert ((torch.stack(steps).mean(0) - full).abs() < 4 * spread + 1e-12).all()


def test_minibatches_are_the_same_in_a_larger_federation(uneven):
    """Client 3 draws the same samples whether it is simulated alone or with the others."""
    alone = dataclasses.replace(fc.Silos.from_arrays([uneven[3]]), ids=(3,))
    both = []
    for silos in (uneven, alone):
        problem = fc.Problem(silos, loss="logistic")
        sim = Simulator(problem, FedAvg(3, 1.0), batches=Batches(5, 4))
        grad = sim.gradients(np.asarray([3 if silos is uneven else 0], np.uint64))
        both.append(grad(torch.ones(1, 7, dtype=torch.float64), 2))
    torch.testing.assert_close(*both, rtol=0, atol=1e-14)


@pytest.mark.parametrize("sampling", ["replacement", "epoch"])
def test_minibatch_gradients_against_numpy(uneven, sampling):
    problem = fc.Problem(uneven, loss="logistic")
    sim = Simulator(problem, FedAvg(3, 1.0), batches=Batches(1, 6, sampling))
    who = np.arange(5, dtype=np.uint64)
    grad = sim.gradients(who)
    x = torch.randn(5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for k in (2, 0):
        got = grad(x, k)
        rows = sim.batches.draw(who, sim.smooth.sizes, 0, range(k, k + 1))[0].astype(int)
        for i in range(5):
            X, b = uneven[i][0].numpy()[rows[i]], uneven[i][1].numpy()[rows[i]]
            np.testing.assert_allclose(got[i], naive_gradient(X, b, x[i].numpy()), atol=1e-14)


def test_sampling_with_replacement_counts_clients_twice(uneven):
    problem = fc.Problem(uneven, loss="logistic")
    run = fc.simulate(problem, FedAvg(2, 0.5), rounds=4, participation=1.0, replace=True)
    assert run.history[-1].bytes_up == 4 * 5 * 7 * 8
    with pytest.raises(ValueError, match="Scaffold keeps state"):
        fc.simulate(problem, Scaffold(2, 0.5), rounds=1, replace=True)


def test_partial_participation_is_refused_by_name(uneven):
    with pytest.raises(ValueError, match=r"Zhang needs every client.*2 of 5.*FedAvg.*Scaffold"):
        fc.simulate(fc.Problem(uneven), Zhang(2, 0.5), rounds=1, participation=0.4)


def test_non_participants_keep_their_state(uneven):
    problem = fc.Problem(uneven)
    sim = Simulator(problem, Scaffold(2, 0.5), batches=Batches(), participation=0.4, seed=3)
    sim.step()
    present = set(sim.participants(0).tolist())
    for i in range(5):
        assert bool(sim.clients.c[i].any()) == (i in present)


def test_float32_follows_float64(uneven):
    problem = fc.Problem(uneven, regularizer=L1(0.01))
    exact, single = (
        fc.simulate(problem, FedNMap(3, 0.5, gamma=1.0), rounds=10, dtype=t) for t in (torch.float64, torch.float32)
    )
    assert single.solution.dtype == torch.float32
    torch.testing.assert_close(single.solution.double(), exact.solution, rtol=0, atol=1e-5)
    assert single.history[-1].bytes_up * 2 == exact.history[-1].bytes_up


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_cuda_follows_cpu(uneven):
    problem = fc.Problem(uneven, regularizer=L1(0.01))
    for batch in (None, 5):
        one, two = (
            fc.simulate(problem, FedNMap(3, 0.5, gamma=1.0), rounds=10, batch_size=batch, device=d)
            for d in ("cpu", "cuda")
        )
        torch.testing.assert_close(two.solution.cpu(), one.solution, rtol=0, atol=1e-12)


def test_tolerance_stops_early(lasso):
    run = fc.simulate(lasso, ProximalGradient(20.0), rounds=500, tolerance=1e-3)
    assert run.status == "converged"
    assert run.history[-1].stationarity <= 1e-3 < run.history[-2].stationarity
    assert run.rounds == run.history[-1].round < 500
    assert "round" in run.message


def test_records(lasso):
    run = fc.simulate(lasso, Zhang(3, 1.0), rounds=7, evaluate_every=3)
    assert [r.round for r in run.history] == [0, 3, 6, 7]
    first, last = run.history[0], run.history[-1]
    assert first["objective"] == pytest.approx(math.log(2))
    assert last.objective == pytest.approx(lasso.objective(run.solution), abs=1e-15)
    assert last.stationarity == lasso.stationarity(run.solution)
    assert last.stationarity_step == lasso.default_step()
    assert last.nonzeros == int((run.solution != 0).sum())
    assert last.sparsity == 1 - last.nonzeros / 20
    assert 0 <= last.train_accuracy <= 1
    with pytest.raises(AttributeError, match="no 'test_accuracy'"):
        _ = last.test_accuracy
    assert list(run.frame["round"]) == [0, 3, 6, 7]
    assert "stationarity" in repr(run)


def test_zero_rounds_evaluates_the_start(lasso):
    run = fc.simulate(lasso, FedAvg(1, 1.0), rounds=0)
    assert [r.round for r in run.history] == [0]
    assert run.status == "completed"


def test_divergence_keeps_the_history_and_names_the_cause():
    silos = fc.data.load("diabetes").partition("iid", clients=5)
    problem = fc.Problem(silos, loss="least_squares")
    for method in (FedAvg(10, 50.0), ProximalGradient(1e200), FedCanon(10, 3.0, 30.0)):
        with pytest.warns(fc.DivergenceWarning, match=r"diverged in round \d+: the step is probably too large.*L = "):
            run = fc.simulate(problem, method, rounds=400)
        assert run.status == "diverged"
        assert 0 < run.rounds < 400
        assert torch.isfinite(run.solution).all()
        assert math.isfinite(run.history[0].objective)


GROWING = {  # 1/L of a silo, and more, with two samples at a time
    "TAMUNA": {"step": 0.35, "p": 0.1, "s": 2},
    "GradSkip": {"step": 0.35, "p": 0.1},
    "Scaffnew": {"step": 0.35, "p": 0.1},
    "FedDR": {"prox_step": 0.7, "alpha": 1.0, "local_steps": 10, "step": 0.3},
    "FedAvg": {"local_steps": 10, "step": 0.35},
    "FedMid": {"local_steps": 10, "step": 0.35},
    "Zhang": {"local_steps": 10, "step": 0.35},
    "FedNMap": {"local_steps": 10, "step": 0.35, "gamma": 3.5},
}


@pytest.mark.parametrize("name", GROWING)
def test_completed_is_not_said_of_a_run_that_grew(name):
    """One rule for every method and every length: up to 1 % more is noise, up to twice not converged, else diverged."""
    rng, shared = np.random.default_rng(0), np.random.default_rng(1).normal(size=20) * 2
    draws = [rng.normal(size=(40, 20)) for _ in range(8)]
    problem = fc.Problem(fc.Silos.from_arrays([(X, X @ shared) for X in draws]), loss="least_squares")
    seen = set()
    for rounds in (0, 1, 2, 3, 4, 6):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", fc.DivergenceWarning)
            run = fc.simulate(problem, REGISTRY[name](**GROWING[name]), rounds=rounds, batch_size=2)
        first, last = run.history[0].objective, run.history[-1].objective
        grown = (last - first) / first
        expected = "completed" if grown <= 0.01 else "not_converged" if grown <= 1 else "diverged"
        assert run.status == expected, (rounds, first, last)
        assert ("grew from" in run.message) == (grown > 0.01)
        assert run.status == "completed" or rounds > 0
        seen.add(run.status)
    assert "diverged" in seen
    assert run.rounds == 6  # long before 1e10, at which a run is ended


@pytest.mark.parametrize(("start", "end", "status"), [
    (39.0, 1.1e9, "diverged"), (1.0, 2.5, "diverged"), (-4.0, 1.0, "diverged"),
    (39.0, 50.0, "not_converged"), (1.0, 1.9, "not_converged"), (-4.0, -3.0, "not_converged"),
    (39.0, 39.1, "completed"), (0.5, 0.1, "completed"), (-4.0, -9.0, "completed"), (0.0, 0.0, "completed"),
    (math.inf, 7.0, "completed"),
])  # fmt: skip
def test_endings(start, end, status):
    """A start outside of h's domain has no value to compare with."""
    assert ending(Record(objective=end), Record(objective=start)) == status


def test_a_run_that_grew_can_go_on(tmp_path):
    """A model may go up before it comes down, so the checkpoint of a run that grew is kept."""
    problem = fc.Problem(fc.data.load("diabetes").partition("iid", clients=5), loss="least_squares")
    method = ProximalGradient(2.1 / problem.smoothness("mean"))
    with pytest.warns(fc.GrowthWarning, match="ProximalGradient diverged in round 100"):
        whole = fc.simulate(problem, method, rounds=100, evaluate_every=20)
    with pytest.warns(fc.GrowthWarning):
        fc.simulate(problem, method, rounds=80, evaluate_every=20, checkpoint=tmp_path / "c")
    with pytest.warns(fc.GrowthWarning):
        more = fc.simulate(problem, method, rounds=100, evaluate_every=20, checkpoint=tmp_path / "c", resume=True)
    assert torch.equal(whole.solution, more.solution)


def test_loop_backend_names_the_failing_client(uneven):
    @dataclasses.dataclass(frozen=True)
    class Broken(FedAvg):
        def local_round(self, message, client, grad, h):
            if int(grad.position[0]) == 3:
                raise ZeroDivisionError("no luck")
            return super().local_round(message, client, grad, h)

    with pytest.raises(fc.ClientError, match=r"client 3 \(number 3\) failed in round 1: no luck"):
        fc.simulate(fc.Problem(uneven), Broken(1, 0.1), rounds=2, backend="loop")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rounds": -1}, r"rounds = -1, must be an integer >= 0"),
        ({"rounds": 1.5}, r"rounds = 1.5"),
        ({"rounds": 1, "participation": 0}, r"participation = 0, must be in \(0, 1\]"),
        ({"rounds": 1, "batch_size": 0}, r"batch_size = 0"),
        ({"rounds": 1, "sampling": "x"}, r"sampling = 'x'"),
        ({"rounds": 1, "backend": "x"}, r"backend = 'x'"),
        ({"rounds": 1, "x0": torch.zeros(3)}, r"x0 has shape \(3,\), expected \(7,\)"),
        ({"rounds": 1, "x0": torch.full((7,), torch.nan)}, r"x0 has NaN"),
        ({"rounds": 1, "evaluate_every": 0}, r"evaluate_every = 0"),
    ],
)
def test_wrong_settings(uneven, settings, message):
    with pytest.raises(ValueError, match=message):
        fc.simulate(fc.Problem(uneven), FedAvg(1, 0.1), **settings)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is present")
def test_missing_gpu_is_said(uneven):
    with pytest.raises(ValueError, match="sees no GPU"):
        fc.simulate(fc.Problem(uneven), FedAvg(1, 0.1), rounds=1, device="cuda")
    with pytest.raises(ValueError, match=r"device = 'cuda', .*sees no GPU; use device = 'cpu'"):
        fc.solve(fc.Problem(uneven), device="cuda")
    with pytest.raises(ValueError, match=r"device = 'cuda:1'.*sees no GPU"):
        fc.solve(fc.Problem(uneven), device=torch.device("cuda", 1), participation=0.5)


def test_a_gpu_that_is_not_there_is_said(uneven, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match=r"device = 'cuda:2'.* 2 GPUs"):
        fc.solve(fc.Problem(uneven), device="cuda:2")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_refused_where_linear_systems_are_solved_and_taken_elsewhere(uneven, dtype):
    problem = fc.Problem(uneven)
    for ask in (
        lambda: fc.solve(problem, dtype=dtype),
        lambda: fc.simulate(problem, ProxNewton(), rounds=1, dtype=dtype),
    ):
        with pytest.raises(ValueError, match=rf"dtype = {dtype}, but ProxNewton .*torch\.float64"):
            ask()
    assert fc.simulate(problem, FedAvg(1, 0.1), rounds=1, dtype=dtype).solution.dtype == dtype


def test_prox_step_past_the_limit_is_refused(uneven):
    problem = fc.Problem(uneven, regularizer=MCP(0.01, theta=2.0))
    with pytest.raises(ValueError, match=r"step = 5, must be below 1/rho = 2"):
        fc.simulate(problem, Zhang(5, 1.0), rounds=1)


def test_constraints_hold_and_have_no_subgradient(uneven):
    problem = fc.Problem(uneven, regularizer=Box(-0.1, 0.2))
    run = fc.simulate(problem, FedNMap(4, 0.5, gamma=2.0), rounds=500, tolerance=1e-10)
    assert run.status == "converged"
    assert float(run.solution.min()) >= -0.1
    assert float(run.solution.max()) <= 0.2
    assert problem.optimality(run.solution) < 1e-9
    with pytest.raises(TypeError, match="FedNMap"):
        fc.simulate(problem, FedAvg(1, 0.1), rounds=1)


def test_threads_are_restored(lasso, two_threads):
    assert Simulator(lasso, FedAvg(1, 0.1), batches=Batches()).transport.threads == 1
    fc.simulate(lasso, FedAvg(1, 0.1), rounds=1)
    assert torch.get_num_threads() == 2


def perceptron(inputs, hidden):
    return torch.nn.Sequential(torch.nn.Linear(inputs, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, 2))


@pytest.mark.parametrize("batch", [32, None])
def test_threads_of_a_network_follow_its_operations_not_their_terms(batch, two_threads):
    """A small MLP has 2,000 products per sample and 64 numbers between two layers: a second thread would only wait."""
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(6, 250, 64, generator=generator)
    silos = fc.Silos.from_arrays([(x, (x[:, 0] > 0).double()) for x in X])
    used, model = set(), perceptron(64, 32)
    assert 6 * 32 * sum(p.numel() for p in model.parameters()) > 1 << 18
    model[1].register_forward_pre_hook(lambda *_: used.add(torch.get_num_threads()))
    problem = fc.Problem(silos, model=model, loss="cross_entropy")
    assert Simulator(problem, FedAvg(1, 0.1), batches=Batches(size=batch)).transport.threads == 1
    used.clear()
    fc.simulate(problem, FedAvg(1, 0.1), rounds=2, batch_size=batch)
    assert used == {1}
    assert torch.get_num_threads() == 2


def test_threads_are_kept_for_large_operations(two_threads):
    X = torch.zeros(2, 40, 64)
    silos = fc.Silos.from_arrays([(x, torch.arange(40.0) % 2) for x in X])
    image = torch.nn.Sequential(
        torch.nn.Unflatten(1, (1, 8, 8)), torch.nn.Conv2d(1, 100, 3, padding=1), torch.nn.ReLU(),
        torch.nn.AvgPool2d(8), torch.nn.Flatten(), torch.nn.Linear(100, 2),
    )  # fmt: skip

    def chosen(model, batch):
        problem = fc.Problem(silos, model=model, loss="cross_entropy")
        return Simulator(problem, FedAvg(1, 0.1), batches=Batches(size=batch)).transport.threads

    assert chosen(perceptron(64, 4096), 8) is None  # 2 x 274,434 parameters
    assert chosen(perceptron(64, 1024), 8) == 1
    assert chosen(image, None) is None  # 2 x 40 x 6,400 numbers after the convolution
    assert chosen(image, 8) == 1


# -- checkpoints ----------------------------------------------------------------------------------------------------


def test_checkpoint_of_another_run_is_refused(uneven, tmp_path):
    path = tmp_path / "c.safetensors"
    problem = fc.Problem(uneven, regularizer=L1(0.01))
    fc.simulate(problem, Zhang(2, 0.5), rounds=2, checkpoint=path)
    for other in (Zhang(3, 0.5), FedAvg(2, 0.5)):
        with pytest.raises(fc.CheckpointError, match="other data, method or settings"):
            fc.simulate(problem, other, rounds=4, checkpoint=path, resume=True)
    changed = fc.Problem(fc.Silos.from_arrays([(X + 1e-9, y) for X, y in (uneven[i] for i in range(5))]))
    with pytest.raises(fc.CheckpointError, match="other data"):
        fc.simulate(changed, Zhang(2, 0.5), rounds=4, checkpoint=path, resume=True)


def test_damaged_checkpoints_are_refused(uneven, tmp_path):
    problem = fc.Problem(uneven)
    path = tmp_path / "c.safetensors"
    fc.simulate(problem, Zhang(2, 0.5), rounds=2, checkpoint=path)
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"", b"not a checkpoint at all"):
        path.write_bytes(damaged)
        with pytest.raises(fc.CheckpointError, match="not a readable checkpoint"):
            fc.simulate(problem, Zhang(2, 0.5), rounds=4, checkpoint=path, resume=True)
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(1)}, path)
    with pytest.raises(fc.CheckpointError, match="not a fedcomposite checkpoint"):
        fc.simulate(problem, Zhang(2, 0.5), rounds=4, checkpoint=path, resume=True)


def test_nothing_but_the_checkpoint_is_left(uneven, tmp_path):
    fc.simulate(fc.Problem(uneven), Zhang(2, 0.5), rounds=6, checkpoint=tmp_path / "c.safetensors", checkpoint_every=2)
    assert [p.name for p in tmp_path.iterdir()] == ["c.safetensors"]


def test_ctrl_c_stops_after_a_round_and_resumes_exactly(uneven, tmp_path):
    problem = fc.Problem(uneven, regularizer=L1(0.01))
    method, path = Scaffold(4, 0.5), tmp_path / "c.safetensors"
    settings = {"rounds": 200, "batch_size": 3, "participation": 0.6, "evaluate_every": 10}
    whole = fc.simulate(problem, method, **settings)

    def press(record):
        if record.round == 80:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(fc.Interrupted) as stopped:
        fc.simulate(problem, method, checkpoint=path, on_record=press, **settings)
    partial = stopped.value.run
    assert partial.status == "interrupted"
    assert 80 <= partial.rounds < 90
    assert partial.history[-1].round == partial.rounds
    resumed = fc.simulate(problem, method, checkpoint=path, resume=True, **settings)
    assert torch.equal(resumed.solution, whole.solution)
    assert [{**r, "seconds": 0} for r in resumed.history] == [{**r, "seconds": 0} for r in whole.history]


def test_messages_mean_with_weights():
    class Pair(messages.NamedTuple):
        a: torch.Tensor
        b: torch.Tensor

    pair = Pair(torch.arange(6.0).reshape(3, 2), torch.ones(3, 1))
    weights = torch.tensor([3.0, 0.0, 0.0])
    assert messages.mean(pair, weights).a.tolist() == [0.0, 1.0]
    assert messages.mean(pair).a.tolist() == [2.0, 3.0]
    assert messages.nbytes(pair) == 9 * 4


def test_no_warning_in_an_ordinary_run(lasso):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        began = time.perf_counter()
        run = fc.simulate(lasso, Zhang(3, 1.0), rounds=3)
    assert 0 < run.history[-1].seconds <= time.perf_counter() - began


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"problem": "a"}, "problem is a str; make one: fc.Problem"),
        ({"algorithm": "FedAvg"}, "algorithm = FedAvg, must be a method with its steps"),
        ({"algorithm": fc.algorithms.FedAvg}, "algorithm = FedAvg, must be a method with its steps"),
        ({"dtype": "float32"}, "dtype = 'float32', must be torch.float64 or torch.float32"),
        ({"dtype": torch.int32}, "dtype = torch.int32, must be"),
        ({"device": "gpu"}, "device = 'gpu', must be 'cpu', 'cuda'"),
        ({"participation": "half"}, "participation = 'half', must be a number"),
        ({"tolerance": "small"}, "tolerance = 'small', must be a number"),
        ({"clip_norm": "1"}, "clip_norm = '1', must be a number"),
        ({"seed": "a"}, "seed = 'a', must be an integer >= 0"),
    ],
)
def test_what_is_given_wrongly_is_named(lasso, wrong, says):
    given = {"problem": lasso, "algorithm": fc.algorithms.FedAvg(2, 0.1), "rounds": 1, **wrong}
    with pytest.raises((TypeError, ValueError), match=says):
        fc.simulate(**given)
