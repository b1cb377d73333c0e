"""Many clients: states that cost nothing until they are used, files in place of memory, rounds that do not see n."""

import dataclasses
import hashlib
import json
import os
import re
import runpy
import shutil
import tracemalloc
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

import fedcomposite as fc
from fedcomposite import files
from fedcomposite.algorithms import REGISTRY, TAMUNA, FedAvg, FedNMap, Scaffold, Zhang
from fedcomposite.algorithms.base import Empty
from fedcomposite.problems import Batches
from fedcomposite.regularizers import L1
from fedcomposite.runtime import Simulator, checkpoint, states
from fedcomposite.runtime.states import ClientStates, available_memory
from fedcomposite.testing import small_problem


def ready(name):
    """The method with practical steps, in its form for partial participation."""
    made = REGISTRY[name].auto(L=0.25, local_steps=3)
    return dataclasses.replace(made, partial_participation=True) if hasattr(made, "partial_participation") else made


STATEFUL = [
    name
    for name in REGISTRY
    if ready(name).partial and not isinstance(ready(name).init(torch.zeros(2, dtype=torch.float64), L1(0.1))[1], Empty)
]


class State(NamedTuple):
    c: torch.Tensor
    count: torch.Tensor
    flag: torch.Tensor
    nothing: torch.Tensor


def start():
    return State(
        torch.tensor([0.5, -1.0, 2.0], dtype=torch.float32), torch.tensor([7]), torch.tensor([True]), torch.zeros(0)
    )


def drawn(rng, m):
    return State(
        torch.from_numpy(rng.standard_normal((m, 3)).astype(np.float32)),
        torch.from_numpy(rng.integers(0, 9, (m, 1))),
        torch.from_numpy(rng.random((m, 1)) < 0.5),
        torch.zeros(m, 0),
    )


def many(n, features=4, samples=2, seed=0):
    """Silos of n clients, made at once."""
    rng = np.random.default_rng(seed)
    X = torch.from_numpy(rng.standard_normal((n * samples, features)))
    y = torch.from_numpy(np.sign(rng.standard_normal(n * samples)))
    return fc.Silos(X, y, tuple(range(0, n * samples + 1, samples)))


# -- the store ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [None, 0])
@pytest.mark.parametrize("seed", range(5))
def test_store_against_a_table(tmp_path, limit, seed):
    """Random reads and writes of some or all rows, against NumPy arrays that hold every row."""
    n, rng = 11, np.random.default_rng(seed)
    store = ClientStates(start(), n, folder=tmp_path, limit=limit)
    table = [np.stack([t.numpy()] * n) for t in start()]

    def same(got, rows):
        for t, whole in zip(got, table, strict=True):
            np.testing.assert_array_equal(t, whole[rows])

    for _ in range(30):
        rows = np.sort(rng.choice(n, rng.integers(1, 5), replace=False))
        action = rng.integers(0, 8)
        if action < 4:
            new = drawn(rng, len(rows))
            store.put(rows, new)
            for t, whole in zip(new, table, strict=True):
                whole[rows] = t
        elif action == 4:
            new = drawn(rng, n)
            given = [t.clone() for t in new]
            store.put(None, new)
            table = [t.numpy().copy() for t in new]
            store.put(rows[:1], drawn(rng, 1))
            assert all(torch.equal(a, b) for a, b in zip(new, given, strict=True)), "a given tensor was written"
            for t, whole in zip(store.take(rows[:1]), table, strict=True):
                whole[rows[:1]] = t
        elif action == 5:
            same(store.everyone(), np.arange(n))
        else:
            same(store.take(rows), rows)
    same(store.take(), np.arange(n))
    assert store.spilled == (limit == 0)
    assert not list(tmp_path.iterdir())  # the file has no name


def resident():
    """Bytes of memory that this process occupies."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")
@pytest.mark.parametrize("limit", [1 << 60, 0])
def test_rows_that_never_took_part_cost_nothing(tmp_path, limit, monkeypatch):
    """A million clients, 4 GB of states, of which a hundred take part."""
    monkeypatch.setattr(states.os, "unlink", lambda name: None)  # the files keep their names, so that they can be seen
    store = ClientStates(State(torch.zeros(1000), *start()[1:]), 10**6, folder=tmp_path, limit=limit)
    assert store.nbytes > 4e9
    before = resident()
    rows = np.arange(100) * 9973
    new = State(torch.ones(100, 1000), *(t.expand(100, *t.shape) for t in start()[1:]))
    store.put(rows, new)
    assert torch.equal(store.take(rows).c, new.c)
    assert not store.take(rows + 1).c.any()
    assert store.spilled == (limit == 0)
    assert resident() - before < 512 * 2**20  # a row of 4 kB takes a page, which may be one of 2 MiB
    blocks = [file.stat().st_blocks * 512 for file in tmp_path.iterdir()]
    assert bool(blocks) == store.spilled
    assert sum(blocks) < 1e9


def test_default_limit_is_half_of_the_available_memory(monkeypatch, tmp_path):
    found = available_memory(torch.device("cpu"))
    assert 1e8 < found <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    size = 100 * sum(t.nbytes for t in start())
    for memory, spilled in ((2 * size, False), (2 * size - 2, True)):
        monkeypatch.setattr(states, "available_memory", lambda device, memory=memory: memory)
        store = ClientStates(start(), 100, folder=tmp_path)
        store.put([3], drawn(np.random.default_rng(0), 1))
        assert store.spilled == spilled


def test_a_full_disk_is_said_before_the_write(monkeypatch, tmp_path):
    store = ClientStates(start(), 100, folder=tmp_path, limit=0)
    store.put([3], drawn(np.random.default_rng(0), 1))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 90, 10))
    with pytest.raises(OSError, match=r"0 MiB free.*2 more clients.*state_dir"):
        store.put([3, 4, 5], drawn(np.random.default_rng(0), 3))
    with pytest.raises(OSError, match="99 more clients"):
        store.everyone()
    store.put([3], drawn(np.random.default_rng(0), 1))  # its row is there already


def test_numbers_outside_are_refused():
    store = ClientStates(start(), 5)
    for rows in ([0, 5], [-1]):
        with pytest.raises(IndexError, match="numbered from 0 to 4"):
            store.take(rows)


def test_wrong_limits_are_refused():
    with pytest.raises(ValueError, match="memory_limit = -1, must be a number of bytes >= 0"):
        fc.simulate(fc.Problem(many(3)), Scaffold(1, 0.1), rounds=1, memory_limit=-1)


# -- runs -----------------------------------------------------------------------------------------------------------


def table_run(problem, algorithm, rounds, cohort, batch, seed):
    """The method by hand: the states of all clients in a list, one client after another through the public rules."""
    sim = Simulator(problem, algorithm, batches=Batches(seed, batch), participation=cohort / 6, seed=seed)
    server, client = algorithm.init(sim.x0, problem.regularizer)
    held, models = [client] * 6, [algorithm.solution(server, problem.regularizer)]
    for r in range(rounds):
        sim.round = r
        replies = []
        who = sim.participants(r)
        for position, i in enumerate(who):
            grad = sim.gradients(np.asarray([i]), (position, len(who)), stacked=False)
            reply, held[int(i)] = algorithm.local_round(
                algorithm.broadcast(server), held[int(i)], grad, sim.transport.h
            )
            replies.append(algorithm.decode(reply))
        mean = type(replies[0])(*(torch.stack(t).mean(0) for t in zip(*replies, strict=True)))
        server = algorithm.aggregate(server, mean, len(who) / 6, problem.regularizer)
        models.append(algorithm.solution(server, problem.regularizer))
    return torch.stack(models), type(client)(*(torch.stack(t) for t in zip(*held, strict=True)))


@pytest.mark.parametrize("name", STATEFUL)
def test_spilled_runs_equal_a_list_of_states(name, tmp_path):
    """To rounding by hand, and to the bit between memory and file."""
    algorithm = ready(name)
    problem = small_problem(algorithm)
    settings = {"rounds": 6, "batch_size": 4, "participation": 0.5, "seed": 3, "keep_solutions": True}
    memory = fc.simulate(problem, algorithm, **settings)
    file = fc.simulate(problem, algorithm, state_dir=tmp_path / "new", memory_limit=0, **settings)
    models, held = table_run(problem, algorithm, 6, 3, 4, 3)
    torch.testing.assert_close(memory.solutions, models, rtol=0, atol=1e-12)
    assert torch.equal(memory.solutions, file.solutions)
    for a, b, c in zip(memory.clients, file.clients, held, strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, c, rtol=0, atol=1e-12)
    assert (tmp_path / "new").is_dir()
    assert not list((tmp_path / "new").iterdir())


def test_the_loop_backend_spills_too():
    problem = fc.Problem(many(9))
    one, two = (
        fc.simulate(problem, Scaffold(2, 0.5), rounds=5, participation=0.4, backend=b, memory_limit=0)
        for b in ("stacked", "loop")
    )
    torch.testing.assert_close(one.solution, two.solution, rtol=0, atol=1e-13)
    torch.testing.assert_close(one.clients.c, two.clients.c, rtol=0, atol=1e-13)


def test_large_states_come_as_a_store(monkeypatch):
    """``run.clients`` is a tuple of tensors as long as that is cheap; else the store, to be asked for rows."""
    problem = fc.Problem(many(9))
    small = fc.simulate(problem, Scaffold(2, 0.5), rounds=3, participation=0.4)
    monkeypatch.setattr(states, "_SMALL", 0)
    large = fc.simulate(problem, Scaffold(2, 0.5), rounds=3, participation=0.4)
    assert isinstance(large.clients, ClientStates)
    assert len(large.clients) == 9
    assert "9 clients" in repr(large.clients)
    assert torch.equal(large.clients.take([8, 2]).c, small.clients.c[[8, 2]])
    assert torch.equal(large.clients.everyone().c, small.clients.c)
    everyone = fc.simulate(problem, Zhang(2, 0.5), rounds=3)  # dense anyway
    assert everyone.clients[0].shape == (9, 4)


def test_a_run_that_ends_well_does_not_look_for_the_cause_of_divergence(monkeypatch):
    """The smoothness constant, which an error message would quote, is a long computation over all clients."""

    def fail(*_):
        raise AssertionError

    problem = fc.Problem(many(9))
    monkeypatch.setattr(fc.Problem, "smoothness", fail)
    assert fc.simulate(problem, Scaffold(2, 0.5), rounds=3, stationarity_step=1.0).status == "completed"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("name", STATEFUL)
def test_states_of_a_gpu_run(name):
    """On the device, or in a file of the host, with the same numbers; as on a CPU up to rounding."""
    algorithm = ready(name)
    problem = small_problem(algorithm)
    settings = {"rounds": 6, "batch_size": 4, "participation": 0.5, "seed": 3, "keep_solutions": True}
    cpu = fc.simulate(problem, algorithm, **settings)
    gpu, file = (
        fc.simulate(problem, algorithm, device="cuda", mode="eager", memory_limit=limit, **settings)
        for limit in (None, 0)
    )
    assert torch.equal(gpu.solutions, file.solutions)
    torch.testing.assert_close(gpu.solutions.cpu(), cpu.solutions, rtol=0, atol=1e-12)
    for a, b, c in zip(gpu.clients, file.clients, cpu.clients, strict=True):
        assert (a.device.type, b.device.type) == ("cuda", "cpu")
        assert torch.equal(a.cpu(), b)
        torch.testing.assert_close(b, c, rtol=0, atol=1e-12)


class Largest(TorchDispatchMode):
    """The largest tensor that was made, in elements."""

    def __init__(self):
        super().__init__()
        self.size = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        old = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
        for t in out if isinstance(out, tuple | list) else [out]:
            if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() not in old:
                self.size = max(self.size, t.numel())
        return out


@pytest.mark.parametrize("backend", ["stacked", "loop"])
@pytest.mark.parametrize(
    "algorithm",
    [FedAvg(3, 0.1), Scaffold(3, 0.1), FedNMap(3, 0.1, gamma=0.2, partial_participation=True)],
    ids=lambda m: type(m).__name__,
)
@pytest.mark.parametrize("batch", [None, 2])
def test_a_round_makes_nothing_of_the_size_of_all_clients(algorithm, backend, batch):
    """After the first round, which reserves the rows, no array has as many elements as there are clients."""
    n = 20_000
    problem = fc.Problem(many(n), regularizer=L1(0.001), weights="samples")
    sim = Simulator(problem, algorithm, batches=Batches(0, batch), participation=5 / n, backend=backend, memory_limit=0)
    sim.step()
    with Largest() as largest:
        sim.step()
    assert 0 < largest.size < 1000
    tracemalloc.start()
    sim.step()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * n  # NumPy's arrays are traced; one of n numbers would take 8n bytes


def test_a_hundred_thousand_clients(tmp_path):
    problem = fc.Problem(many(100_000), regularizer=L1(0.001))
    path = tmp_path / "c.safetensors"
    settings = {"participation": 20 / 100_000, "evaluate_every": 100, "stationarity_step": 1.0}
    whole = fc.simulate(problem, Scaffold(5, 0.1), rounds=30, **settings)
    for rounds in (10, 30):
        parts = fc.simulate(
            problem, Scaffold(5, 0.1), rounds=rounds, checkpoint=path, resume=True, memory_limit=0, **settings
        )
    assert torch.equal(whole.solution, parts.solution)
    assert torch.equal(whole.clients.c, parts.clients.c)
    assert 20 < int(whole.clients.c.any(1).sum()) <= 600
    torch.testing.assert_close(whole.server.c, whole.clients.c.mean(0), rtol=0, atol=1e-12)


# -- checkpoints ----------------------------------------------------------------------------------------------------


SETTINGS = {"batch_size": 2, "participation": 0.1, "evaluate_every": 2}
METHODS = [Scaffold(3, 0.3), TAMUNA(0.3, p=0.5, s=2)]  # the second keeps a state that does not start at zero


@pytest.fixture
def beside(monkeypatch):
    """States count as large, so that they are written beside the checkpoint."""
    monkeypatch.setattr(states, "_SMALL", 0)
    monkeypatch.setattr(states, "_BLOCK", 100)  # several blocks


@pytest.mark.parametrize("algorithm", METHODS, ids=lambda m: type(m).__name__)
def test_resume_with_states_beside_is_exact(algorithm, tmp_path, beside):
    problem = fc.Problem(many(40))
    path = tmp_path / "run" / "c.safetensors"
    whole = fc.simulate(problem, algorithm, rounds=12, **SETTINGS)
    for rounds, limit in ((4, 0), (6, None), (12, 0)):  # a file may be taken up in memory, and the other way round
        parts = fc.simulate(
            problem, algorithm, rounds=rounds, checkpoint=path, resume=True, memory_limit=limit, checkpoint_every=3,
            **SETTINGS,
        )  # fmt: skip
        assert len(list(path.parent.iterdir())) == 2
    assert torch.equal(whole.solution, parts.solution)
    for a, b in zip(whole.clients.everyone(), parts.clients.everyone(), strict=True):
        assert torch.equal(a, b)
    assert [{**r, "seconds": 0} for r in whole.history] == [{**r, "seconds": 0} for r in parts.history]


def test_only_rows_that_took_part_are_written(tmp_path, beside):
    problem = fc.Problem(many(40))
    run = fc.simulate(problem, METHODS[1], rounds=4, checkpoint=tmp_path / "c.safetensors", **SETTINGS)
    (file,) = tmp_path.glob("*.clients")
    stored = load_file(file)
    sim = Simulator(problem, METHODS[1], batches=Batches(), participation=0.1)
    present = sorted({int(i) for r in range(4) for i in sim.participants(r)})
    assert stored["rows"].tolist() == present
    assert len(present) < 40
    for name in ("k", "x"):
        assert torch.equal(stored[f"clients.{name}"], getattr(run.clients.take(present), name))


def test_a_crash_while_saving_leaves_the_last_checkpoint(tmp_path, beside, monkeypatch):
    problem, path = fc.Problem(many(40)), tmp_path / "c.safetensors"
    whole = fc.simulate(problem, METHODS[0], rounds=10, **SETTINGS)
    fc.simulate(problem, METHODS[0], rounds=4, checkpoint=path, **SETTINGS)

    def fail(*_):
        raise KeyboardInterrupt

    for place, name in ((states.os, "replace"), (checkpoint, "save"), (states, "tidy")):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, fail)
            with pytest.raises(KeyboardInterrupt):
                fc.simulate(problem, METHODS[0], rounds=7, checkpoint=path, resume=True, **SETTINGS)
        # what it left is the fourth round until the seventh is wholly there
        copy = tmp_path / name
        copy.mkdir()
        for file in tmp_path.glob("c.*"):
            shutil.copy(file, copy)
        parts = fc.simulate(problem, METHODS[0], rounds=10, checkpoint=copy / path.name, resume=True, **SETTINGS)
        assert torch.equal(parts.solution, whole.solution)
        assert len(list(copy.iterdir())) == 2  # files of rounds that never became a checkpoint are gone
    assert not list(tmp_path.glob(".*"))


def test_lost_or_damaged_states_are_said(tmp_path, beside):
    problem, path = fc.Problem(many(40)), tmp_path / "c.safetensors"
    fc.simulate(problem, METHODS[0], rounds=4, checkpoint=path, **SETTINGS)
    (file,) = tmp_path.glob("*.clients")
    content = file.read_bytes()
    for spoil in (lambda: file.write_bytes(content[:-9]), file.unlink):
        spoil()
        with pytest.raises(fc.CheckpointError, match=r"clients' states beside it, c\.safetensors\..*cannot be read"):
            fc.simulate(problem, METHODS[0], rounds=6, checkpoint=path, resume=True, **SETTINGS)


def test_small_states_stay_in_the_checkpoint(tmp_path):
    path = tmp_path / "c.safetensors"
    run = fc.simulate(fc.Problem(many(40)), METHODS[0], rounds=4, checkpoint=path, memory_limit=0, **SETTINGS)
    assert [p.name for p in tmp_path.iterdir()] == ["c.safetensors"]
    assert torch.equal(load_file(path)["clients.c"], run.clients.c)


def test_every_dtype_survives_a_checkpoint(tmp_path):
    class Kinds(NamedTuple):
        rows: torch.Tensor  # a name that the file uses as well
        b: torch.Tensor
        c: torch.Tensor

    for dtype in files.DTYPES.values():
        first = Kinds(torch.zeros(2, dtype=dtype), torch.ones(1, 3, dtype=dtype), torch.zeros(0, dtype=dtype))
        store, other = (ClientStates(first, 5, folder=tmp_path, limit=0) for _ in range(2))
        new = Kinds(*(torch.randint(0, 2, (2, *t.shape)).to(dtype) for t in first))
        store.put([1, 3], new)
        path = tmp_path / "c"
        part = (0, 2)  # as one of two processes: beside
        held = store.save(path, "name", 10, part)
        assert int(held.files) == 2
        from safetensors.torch import save_file

        save_file({"clients.files": torch.tensor([1])}, path)
        os.replace(tmp_path / "c.name.1-of-2.clients", tmp_path / "c.name.1-of-1.clients")
        other.load(path, "name", 10)
        for a, b in zip(store.everyone(), other.everyone(), strict=True):
            assert a.dtype == b.dtype == dtype
            assert torch.equal(a, b)


def test_states_and_checkpoints_of_the_last_version_are_read(tmp_path):
    """Byte by byte as 0.2 wrote them: spaces in the states' header, the digest filled in afterwards."""

    class State(NamedTuple):
        c: torch.Tensor

    def written(header, body, **spelling):
        text = json.dumps(header, **spelling).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text + body

    rows, values = np.array([1, 3]), np.array([[1.5, 2.5], [3.5, 4.5]], np.float32)
    header = {
        "__metadata__": {"digest": "0" * 64},
        "rows": {"dtype": "I64", "shape": [2], "data_offsets": [0, 16]},
        "clients.c": {"dtype": "F32", "shape": [2, 2], "data_offsets": [16, 32]},
    }
    whole = written(header, rows.tobytes() + values.tobytes())
    digest = hashlib.sha256(whole).hexdigest()
    (tmp_path / "c.name.1-of-1.clients").write_bytes(whole.replace(b"0" * 64, digest.encode(), 1))
    head = {"clients.files": {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]}}
    (tmp_path / "c").write_bytes(written(head, np.array([1]).tobytes(), separators=(",", ":")))
    store = ClientStates(State(torch.zeros(2)), 5)
    store.load(tmp_path / "c", "name")
    assert store.everyone().c.tolist() == [[0, 0], [1.5, 2.5], [0, 0], [3.5, 4.5], [0, 0]]

    metadata = {"fedcomposite": "checkpoint 2", "identity": json.dumps({"method": "m"})}
    made = hashlib.sha256()
    for part in sorted(metadata.items()):
        made.update(repr(part).encode())
    made.update(repr(("server.x", "torch.float32", (2,))).encode() + values[0].tobytes())
    head = {"__metadata__": {**metadata, "digest": made.hexdigest()}}
    head["server.x"] = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    (tmp_path / "c").write_bytes(written(head, values[0].tobytes(), separators=(",", ":")))
    assert checkpoint.identity_of(tmp_path / "c") == {"method": "m"}


# -- the benchmark --------------------------------------------------------------------------------------------------


def test_the_page_shows_what_works(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parent.parent / "docs" / "scale.md").read_text(encoding="utf-8")
    shown = re.findall(r"```python\n(.*?)```", page, re.S)
    assert len(shown) >= 2
    for block in shown:
        exec(compile(block, "docs/scale.md", "exec"), {"__name__": "shown"})
    assert "round" in capsys.readouterr().out


def test_the_benchmark_runs(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["scale.py", "--quick"])
    runpy.run_path(str(Path(__file__).parent.parent / "benchmarks" / "scale.py"), run_name="__main__")
    shown = capsys.readouterr().out
    assert "ms per round" in shown
    assert "mlp" in shown
