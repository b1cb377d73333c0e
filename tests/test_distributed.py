"""Two processes give what one gives: the cases below are run by both and compared.

The file is also the program that ``torchrun`` starts: each process runs every case and writes what it found.
"""

import contextlib
import dataclasses
import functools
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fedcomposite as fc
from fedcomposite.algorithms import REGISTRY, EControlDA, FedAvg, Scaffold
from fedcomposite.algorithms.base import Empty
from fedcomposite.problems import Batches
from fedcomposite.regularizers import L1
from fedcomposite.runtime import Simulator, distributed
from fedcomposite.runtime.distributed import Group
from fedcomposite.testing import small_problem

ROUNDS = 6


def tables(kind):
    """Seven clients of 3 to 30 samples and 23 test samples, with a target of this kind."""
    generator = torch.Generator().manual_seed(3)
    sizes = (30, 3, 12, 7, 21, 5, 9, 23)
    pairs = []
    for shift, m in enumerate(sizes):
        X = torch.randn(m, 5, generator=generator, dtype=torch.float64) + 0.1 * shift
        z = X[:, 0] - X[:, 1] + 0.3 * torch.randn(m, generator=generator, dtype=torch.float64)
        # the first four clients have never seen the last class
        label = (z > 0).long() + (z > 1.5).long() * (shift >= 4)
        pairs.append((X, {"real": z, "binary": (z > 0).long(), "classes": label}[kind]))
    return fc.Silos.from_arrays(pairs[:-1], test=pairs[-1])


def network(**options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.ReLU(), nn.Linear(6, 3))
    return fc.Problem(tables("classes"), model=model, regularizer=L1(0.01), weights="samples", **options)


def method(name):
    return REGISTRY[name].auto(L=0.25, local_steps=3)


@functools.cache
def cases():
    """Name of the case -> problem, method, settings of the run."""
    out = {}
    for name in REGISTRY:
        made = method(name)
        problem = small_problem(made)
        out[f"{name} everyone"] = problem, made, {"batch_size": 4}
        if hasattr(made, "partial_participation"):
            made = dataclasses.replace(made, partial_participation=True)
        if made.partial:  # two of six: in some rounds a process has no participant
            out[f"{name} some"] = problem, made, {"batch_size": 4, "participation": 1 / 3, "seed": 8}
    binary = fc.Problem(tables("binary"), regularizer=L1(0.01), weights="samples", bias=True)
    half = {"participation": 3 / 7, "batch_size": 3}
    out["sample weights"] = binary, Scaffold(3, 0.5), half | {"seed": 2}
    out["epochs"] = binary, FedAvg(3, 0.5), half | {"sampling": "epoch"}
    out["drawn twice"] = binary, FedAvg(3, 0.5), half | {"replace": True}
    out["loop"] = binary, Scaffold(3, 0.5), half | {"backend": "loop"}
    out["compressed"] = binary, EControlDA(step=0.2, compressor="random", ratio=0.4), {}
    out["classes"] = fc.Problem(tables("classes"), loss="multinomial", regularizer=L1(0.01)), Scaffold(3, 0.1), half
    out["regression"] = fc.Problem(tables("real"), loss="least_squares"), Scaffold(3, 0.05), half
    out["network"] = network(), FedAvg(3, 0.1), {**half, "dtype": torch.float64}
    out["network, few samples seen"] = (
        network(evaluation_samples=10),
        Scaffold(3, 0.1),
        {"batch_size": 3, "dtype": torch.float64},
    )
    return out


def run(problem, algorithm, settings, **more):
    return fc.simulate(problem, algorithm, rounds=ROUNDS, evaluate_every=2, keep_solutions=True, **settings, **more)


# -- the program ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Stopped(Scaffold):
    """Process 1 gets a Ctrl-C in the third round."""

    def aggregate(self, server, reply, share, h):
        if next(Stopped.calls) == 3 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return super().aggregate(server, reply, share, h)


def in_a_group(folder):
    """Everything that needs two processes; returns what this one found."""
    torch.set_num_threads(1)
    found = {}
    seen = []
    for name, (problem, algorithm, settings) in cases().items():
        done = run(problem, algorithm, settings, distributed=True, on_record=seen.append)
        found[name] = done.solutions, [dict(r) for r in done.history], tuple(done.clients), done.buffers
    found["records"] = len(seen)
    found["all-reduces"] = count_reductions()
    problem, algorithm, settings = cases()["sample weights"]
    settings = settings | {"evaluate_every": 1}
    whole = fc.simulate(problem, algorithm, rounds=9, **settings)
    path = folder / "c.safetensors"
    for rounds in (3, 5, 9):
        parts = fc.simulate(problem, algorithm, rounds=rounds, checkpoint=path, resume=True, **settings)
        dist.barrier()
        if rounds == 5 and dist.get_rank() == 0:
            for file in folder.glob("c.safetensors*"):
                (folder / file.name.replace("c.", "five.", 1)).write_bytes(file.read_bytes())
        dist.barrier()
    same = [{**a, "seconds": 0} == {**b, "seconds": 0} for a, b in zip(whole.history, parts.history, strict=True)]
    found["resumed"] = torch.equal(whole.solution, parts.solution) and all(same)
    Stopped.calls = iter(range(1, 100))
    with contextlib.suppress(fc.Interrupted):
        fc.simulate(problem, Stopped(3, 0.5), rounds=50, checkpoint=folder / "s.safetensors")
    found["stopped after"] = next(Stopped.calls) - 1
    alone = fc.Problem(fc.Silos.from_arrays([tables("binary")[0]]))
    with pytest.raises(ValueError, match="1 clients cannot be shared by 2 processes"):
        fc.simulate(alone, FedAvg(1, 0.1), rounds=1)
    with pytest.raises(ValueError, match="mode = 'record'"):
        fc.simulate(problem, FedAvg(1, 0.1), rounds=1, mode="record")
    found["recorded"] = recorded()
    found["by itself"] = fc.simulate(problem, algorithm, rounds=2, distributed=False, **settings).solution
    return found


EAGER = ("EControlDA everyone",)  # its first round is another one
RECORDED = ("Scaffold everyone", "FedNMap some", *EAGER, "sample weights", "epochs")


def recorded(device="cpu", dtype=torch.float64):
    """Rounds as programs on static buffers, and eagerly: the largest difference, and the sizes that have a program."""
    found = {}
    for name in RECORDED:
        problem, algorithm, settings = cases()[name]
        size = settings.get("batch_size")
        batches = Batches(3, size, settings.get("sampling", "replacement"))
        sims = [
            Simulator(problem, algorithm, batches=batches, participation=settings.get("participation", 1.0), seed=3,
                      group=Group(dist.get_rank(), 2), mode=mode, device=device, dtype=dtype)
            for mode in ("eager", "record")
        ]  # fmt: skip
        worst = 0.0
        for _ in range(ROUNDS):
            for sim in sims:
                sim.step()
            solutions = [sim.algorithm.solution(sim.server, problem.regularizer) for sim in sims]
            worst = max(worst, float((solutions[0] - solutions[1]).abs().max()))
        assert sims[0].transport.counter == sims[1].transport.counter
        found[name] = worst, sorted(sims[1].transport._programs)
    return found


def count_reductions():
    """All-reduces in five rounds."""
    problem, algorithm, _ = cases()["sample weights"]
    sim = Simulator(problem, algorithm, batches=Batches(), group=Group(dist.get_rank(), 2))
    calls, reduce = [], dist.all_reduce

    def counted(tensor):
        calls.append(tensor.numel())
        return reduce(tensor)

    dist.all_reduce = counted
    try:
        for _ in range(5):
            sim.step()
    finally:
        dist.all_reduce = reduce
    return calls


def main(folder, device):
    if device == "cuda":  # two processes on one GPU
        fc.simulate(*cases()["epochs"][:2], rounds=12, batch_size=3, device=device, distributed=True, mode="record")
        found = {"recorded": recorded(device), "backend": dist.get_backend()}
    else:
        found = in_a_group(folder)
    torch.save(found, folder / f"found-{dist.get_rank()}.pt")


# -- the tests ------------------------------------------------------------------------------------------------------


def start(folder, device):
    """Run this file in two processes, by torchrun on a free port of this machine."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1"]
    done = subprocess.run(
        [*command, "--master-port", str(port), __file__, str(folder), device],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-5000:]
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What the two processes wrote."""
    return start(tmp_path_factory.mktemp("group"), "cpu")


@pytest.fixture(scope="module")
def both(folder):
    return [torch.load(folder / f"found-{r}.pt") for r in (0, 1)]


def check_history(history, expected):
    assert [list(r) for r in history] == [list(r) for r in expected]  # the same columns in the same order
    for ours, theirs in zip(history, expected, strict=True):
        for key in set(ours) - {"seconds"}:
            assert type(ours[key]) is type(theirs[key])
            assert ours[key] == pytest.approx(theirs[key], rel=1e-12, abs=1e-12), key


@pytest.mark.parametrize("name", list(cases()))
def test_two_processes_equal_one(both, name):
    problem, algorithm, settings = cases()[name]
    one = run(problem, algorithm, settings)
    for found in both:  # the server is at both, bit for bit the same
        solutions, history, _, buffers = found[name]
        torch.testing.assert_close(solutions, one.solutions, rtol=0, atol=1e-12)
        assert torch.equal(solutions, both[0][name][0])
        check_history(history, one.history)
        torch.testing.assert_close(buffers, one.buffers, rtol=0, atol=1e-12)
    n = len(problem.silos)
    for k, whole in enumerate(one.clients):  # each has the states of its half of the clients
        parts = [found[name][2][k] for found in both]
        assert [len(p) for p in parts] == [n // 2, n - n // 2]
        torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["Scaffold", "TAMUNA", "Mime"])
def test_each_process_was_without_participants_in_some_round(name):
    """The cases with two of six clients exercise it, for one exchange and for two."""
    problem, algorithm, settings = cases()[f"{name} some"]
    sim = Simulator(problem, algorithm, batches=Batches(), participation=1 / 3, seed=settings["seed"])
    busy = [set((sim.participants(r) // 3).tolist()) for r in range(ROUNDS)]
    assert {0} in busy
    assert {1} in busy


def test_one_all_reduce_per_round(both):
    """Of the two vectors that Scaffold sends, and one number: whether a process wants to stop."""
    assert both[0]["all-reduces"] == [2 * 6 + 1] * 5


def check_recorded(found, tolerance):
    for name in RECORDED:
        worst = [f["recorded"][name][0] for f in found]
        sizes = [f["recorded"][name][1] for f in found]
        assert max(worst) <= tolerance, name
        assert all(bool(s) != (name in EAGER) for s in sizes), f"{name}: recorded for {sizes}"
        assert name != "FedNMap some" or max(map(len, sizes)) > 1  # cohorts of several sizes


def test_recorded_rounds_are_the_eager_ones(both):
    """Bit for bit: each process has a program for its clients, and the all-reduce is outside of it."""
    check_recorded(both, 0.0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_two_processes_on_one_gpu(tmp_path):
    start(tmp_path, "cuda")
    found = [torch.load(tmp_path / f"found-{r}.pt") for r in (0, 1)]
    assert {f["backend"] for f in found} == {"gloo" if torch.cuda.device_count() == 1 else "nccl"}
    check_recorded(found, 1e-12)


@pytest.mark.parametrize(("here", "gpus", "backend"), [("2", 1, "gloo"), ("2", 2, "nccl"), ("8", 8, "nccl")])
def test_nccl_needs_a_gpu_for_each_process(monkeypatch, here, gpus, backend):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", here)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert distributed._backend(torch.device("cuda")) == backend
    assert distributed._backend(torch.device("cpu")) == "gloo"


def test_process_0_alone_reports(both):
    assert both[0]["records"] == 4 * len(cases())
    assert both[1]["records"] == 0


def test_checkpoints_are_exact(folder, both):
    assert [found["resumed"] for found in both] == [True, True]
    names = sorted(p.name for p in folder.glob("c.safetensors*"))
    assert names[0] == "c.safetensors"
    assert [n.split("-9.")[1] for n in names[1:]] == ["1-of-2.clients", "2-of-2.clients"]  # of the last round only


def test_checkpoint_of_two_processes_goes_on_in_one(folder):
    problem, algorithm, settings = cases()["sample weights"]
    whole = fc.simulate(problem, algorithm, rounds=9, **settings)
    parts = fc.simulate(problem, algorithm, rounds=9, checkpoint=folder / "five.safetensors", resume=True, **settings)
    assert parts.history[5].round == 5
    torch.testing.assert_close(parts.solution, whole.solution, rtol=0, atol=1e-12)
    torch.testing.assert_close(parts.clients.c, whole.clients.c, rtol=0, atol=1e-12)
    check_history(parts.history, whole.history)
    assert not list(folder.glob("five.*.clients"))  # small states of one process are in the checkpoint itself


def test_ctrl_c_at_one_process_stops_all_after_the_same_round(both):
    """The third round is over when the signal is seen; the fourth tells the other process."""
    assert [found["stopped after"] for found in both] == [4, 4]


def test_a_group_can_be_ignored(both):
    problem, algorithm, settings = cases()["sample weights"]
    one = fc.simulate(problem, algorithm, rounds=2, **settings)
    assert all(torch.equal(found["by itself"], one.solution) for found in both)


def test_a_group_must_exist(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    problem, algorithm, settings = cases()["sample weights"]
    with pytest.raises(ValueError, match="start the program with torchrun"):
        fc.simulate(problem, algorithm, rounds=1, distributed=True, **settings)


@pytest.mark.parametrize(("n", "size"), [(7, 2), (2, 2), (100, 7), (5, 1)])
def test_spans_cut_the_clients(n, size):
    spans = Group(0, size).spans(n)
    assert [i for a, b in spans for i in range(a, b)] == list(range(n))
    lengths = [b - a for a, b in spans]
    assert max(lengths) - min(lengths) <= 1


def test_stateless_and_stateful_methods_are_both_here():
    x = torch.zeros(3, dtype=torch.float64)
    kinds = {isinstance(method(name).init(x, L1(0.1))[1], Empty) for name in REGISTRY}
    assert kinds == {True, False}
    assert {REGISTRY[name].exchanges for name in REGISTRY} == {1, 2}


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
