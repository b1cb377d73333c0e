"""What a run is: told apart from every other run, kept on resume, and never taken from a damaged file."""

import functools
import math

import pytest
import safetensors.torch
import torch
from torch import nn

import fedcomposite as fc
from fedcomposite import files
from fedcomposite.algorithms import FedAvg, Scaffold, Zhang
from fedcomposite.regularizers import L1
from fedcomposite.runtime import checkpoint, identity, messages
from fedcomposite.runtime import simulator as module
from fedcomposite.testing import small_problem


def double(x):
    return 2 * x


def triple(x):
    return 3 * x


def scale(x, by):
    return by * x


def network(transform=None, seed=0):
    silos = fc.data.load("digits").partition("iid", clients=3)
    torch.manual_seed(seed)
    return fc.Problem(silos, model=nn.Linear(64, 10), transform=transform)


def test_other_functions_are_other_runs(tmp_path):
    """Two transforms are told apart by the names that import them, and by the arguments bound to them."""
    settings = {"checkpoint": tmp_path / "c", "batch_size": 8, "resume": True}
    fc.simulate(network(double), FedAvg(2, 0.1), rounds=1, **settings)
    fc.simulate(network(double), FedAvg(2, 0.1), rounds=2, **settings)
    for other in (triple, functools.partial(scale, by=2), None):
        with pytest.raises(fc.CheckpointError, match="other data, method or settings: model options"):
            fc.simulate(network(other), FedAvg(2, 0.1), rounds=3, **settings)
    assert identity.describe(functools.partial(scale, by=2)) != identity.describe(functools.partial(scale, by=3))


def test_functions_without_a_name_are_refused_where_they_could_be_confused(tmp_path):
    def inner(x):
        return 2 * x

    for unnamed in (lambda x: 2 * x, inner):
        problem = network(unnamed)
        assert fc.simulate(problem, FedAvg(2, 0.1), rounds=1, batch_size=8).status == "completed"
        with pytest.raises(ValueError, match="no name that can be imported"):
            fc.simulate(problem, FedAvg(2, 0.1), rounds=1, batch_size=8, checkpoint=tmp_path / "c")
    assert list(tmp_path.iterdir()) == []


class Sharpened(nn.Linear):
    """Neither its text nor its saved tensors show the factor."""

    def __init__(self, factor):
        torch.manual_seed(0)
        super().__init__(64, 10)
        self.factor = factor
        self.register_buffer("shift", torch.full((10,), factor), persistent=False)

    def forward(self, x):
        return self.factor * super().forward(x)


def test_constants_of_modules_count(tmp_path):
    silos = fc.Silos.from_arrays([(torch.randn(20, 64), torch.arange(20) % 10)] * 3)
    settings = {"checkpoint": tmp_path / "c", "batch_size": 8, "resume": True}

    def run(rounds, factor, smoothing):
        problem = fc.Problem(silos, model=Sharpened(factor), loss=nn.CrossEntropyLoss(label_smoothing=smoothing))
        return fc.simulate(problem, FedAvg(2, 0.1), rounds=rounds, **settings)

    run(1, 2.0, 0.1)
    run(2, 2.0, 0.1)
    with pytest.raises(fc.CheckpointError, match="other data, method or settings: loss;"):
        run(3, 2.0, 0.2)
    with pytest.raises(fc.CheckpointError, match="other data, method or settings: model;"):
        run(3, 3.0, 0.1)


def test_long_tensors_count_to_the_last_entry(tmp_path):
    """A regularizer's weights are not told apart by what a printed tensor shows."""
    silos = fc.data.load("synthetic", clients=2, features=2000, samples=3)
    weights = torch.ones(2000)
    other = weights.clone()
    other[1000] = 2.0
    one, two = (fc.Problem(silos, regularizer=L1(0.1, weights=tuple(w.tolist()))) for w in (weights, other))
    fc.simulate(one, Zhang(1, 0.1), rounds=1, checkpoint=tmp_path / "c")
    with pytest.raises(fc.CheckpointError, match="regularizer"):
        fc.simulate(two, Zhang(1, 0.1), rounds=2, checkpoint=tmp_path / "c", resume=True)


def test_the_difference_is_named(tmp_path):
    problem = small_problem(Zhang(2, 0.5))
    fc.simulate(problem, Zhang(2, 0.5), rounds=1, checkpoint=tmp_path / "c", seed=1)
    with pytest.raises(fc.CheckpointError, match=r"seed \(1 there, 2 here\)"):
        fc.simulate(problem, Zhang(2, 0.5), rounds=2, checkpoint=tmp_path / "c", seed=2, resume=True)


def test_a_resumed_run_keeps_its_mode(tmp_path):
    """Fifty rounds are recorded and a hundred and fifty compiled; a run of fifty that goes on stays recorded."""
    problem = small_problem(Zhang(2, 0.5))
    known = identity.identify(problem, torch.zeros(8), mode="record")
    snapshot = checkpoint.Snapshot(
        1, Zhang(2, 0.5).init(torch.zeros(8), problem.regularizer)[0], fc.algorithms.Empty(), fc.problems.Counter(),
        0.0, [], torch.zeros(0),
    )  # fmt: skip
    checkpoint.save(tmp_path / "c", snapshot, known)
    assert module._mode("auto", "cuda", "stacked", 50) == "record"
    assert module._mode("auto", "cuda", "stacked", 150) == "compile"
    assert module._mode("auto", "cuda", "stacked", 150, tmp_path / "c") == "record"


def test_mode_and_device_belong_to_a_run(tmp_path):
    problem = small_problem(Zhang(2, 0.5))
    fc.simulate(problem, Zhang(2, 0.5), rounds=1, checkpoint=tmp_path / "c")
    found = checkpoint.identity_of(tmp_path / "c")
    assert (found["mode"], found["device"], found["backend"]) == ("eager", "cpu", "stacked")


@pytest.mark.parametrize("beside", [False, True])
def test_every_flipped_bit_is_noticed(tmp_path, beside, monkeypatch):
    """A checkpoint, and the states beside it, that differ in a single bit are refused."""
    if beside:
        monkeypatch.setattr("fedcomposite.runtime.states._SMALL", 0)
    problem, method = small_problem(Scaffold(2, 0.5)), Scaffold(2, 0.5)
    settings = {"participation": 0.5, "checkpoint": tmp_path / "c", "resume": True}
    fc.simulate(problem, method, rounds=2, **settings)
    files = sorted(tmp_path.iterdir())
    assert len(files) == 1 + beside
    for file in files:
        whole = file.read_bytes()
        for at in range(0, len(whole), max(1, len(whole) // 60)):
            file.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
            with pytest.raises(fc.CheckpointError):
                fc.simulate(problem, method, rounds=3, **settings)
        file.write_bytes(whole)
    fc.simulate(problem, method, rounds=3, **settings)


def test_what_killed_writers_leave_is_removed(tmp_path):
    problem, path = small_problem(Zhang(2, 0.5)), tmp_path / "c"
    (tmp_path / ".c.999999999.tmp").write_bytes(b"half a checkpoint")
    fc.simulate(problem, Zhang(2, 0.5), rounds=1, checkpoint=path)
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_the_same_run_gives_the_same_bytes(tmp_path):
    from fedcomposite import files

    problem = small_problem(Zhang(2, 0.5))
    run = fc.simulate(problem, Zhang(2, 0.5), rounds=3)
    made = {files.pack({"x": run.solution, "a": run.solution}, {c: c for c in "zyxwvu"}) for _ in range(10)}
    assert len(made) == 1


def test_growth_is_told():
    problem = small_problem(FedAvg(1, 1.0), fc.regularizers.Zero())
    with pytest.warns(fc.GrowthWarning, match="grew from 0.6931 to .* the step is probably too large"):
        run = fc.simulate(problem, FedAvg(1, 1e4), rounds=30)
    assert run.status == "diverged"
    assert "grew" in run.message


def test_vectors_without_entries_are_packed_whatever_their_stride():
    """NumPy's empty arrays may have a stride of zero: a secure introduction of a real site failed on it."""
    odd, usual = torch.empty(0, dtype=torch.int64).as_strided((0,), (0,)), torch.empty(0, dtype=torch.int64)
    assert files.pack({"a": odd}) == files.pack({"a": usual})
    assert files.digest({"a": odd}, {}) == files.digest({"a": usual}, {})


def test_packed_tensors_are_the_librarys_to_the_byte():
    """Every type of numbers, empty vectors, single numbers, views and names in any order; metadata in one order."""
    kinds = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
             torch.int8, torch.uint8, torch.bool]  # fmt: skip
    tensors = {f"{'zyx'[i % 3]}{i}": torch.arange(6).reshape(2, 3).to(kind) for i, kind in enumerate(kinds)}
    tensors |= {"empty": torch.zeros(0), "one": torch.tensor(3.5), "view": torch.arange(12.0).reshape(3, 4).T}
    tensors |= {"twin": tensors["view"]}
    alone = {k: v.contiguous().clone() for k, v in tensors.items()}
    assert files.pack(tensors) == safetensors.torch.save(alone)
    noted = files.pack(tensors, {"b": "2", "a": "1"})
    assert noted == files.pack(dict(reversed(tensors.items())), {"a": "1", "b": "2"})
    for name, found in safetensors.torch.load(noted).items():
        assert torch.equal(found, tensors[name])


def test_finite_is_finite():
    largest = torch.finfo(torch.float32).max
    for numbers, expected in [
        ([largest, largest], True), ([largest, -largest], True), ([], True),
        ([1.0, math.inf], False), ([math.inf, -math.inf], False), ([math.nan, 1.0], False),
    ]:  # fmt: skip
        assert messages.all_finite(torch.tensor(numbers)) is expected
    assert messages.all_finite(torch.tensor([True, True]))
