"""Samples in a file: a run on them is the run in memory, bit for bit, with no more of them at hand than it needs."""

import json
import os
import pickle
import shutil

import numpy as np
import pytest
import torch
from torch import nn

import fedcomposite as fc
from fedcomposite.algorithms import FedAvg, FedMid, FedNMap, Mime, Scaffold, Zhang
from fedcomposite.data import DataError
from fedcomposite.data.augmentation import Chain, Crop, Flip
from fedcomposite.data.mapped import MappedRows
from fedcomposite.data.saved import ArrayFile
from fedcomposite.problems import Batches
from fedcomposite.problems.network.samples import Loader, Window
from fedcomposite.regularizers import L1
from fedcomposite.runtime import Simulator
from fedcomposite.runtime.distributed import Span, _part
from fedcomposite.runtime.program import Program

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def make(sizes=(8, 202, 5, 7), shape=(3, 8, 8), bytes_=True, seed=0):
    """Silos of images, one of them with 91 % of the samples."""
    generator = np.random.default_rng(seed)
    draw = (lambda n: generator.integers(0, 256, (n, *shape), np.uint8)) if bytes_ else (
        lambda n: generator.normal(size=(n, *shape))
    )  # fmt: skip
    return fc.Silos.from_arrays(
        [(draw(n), generator.integers(0, 3, n)) for n in sizes], test=(draw(30), generator.integers(0, 3, 30))
    )


class Convolution(nn.Module):
    def __init__(self, norm=False):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4) if norm else nn.Identity()
        self.head = nn.Linear(4 * 9, 3)

    def forward(self, x):
        return self.head(nn.functional.max_pool2d(self.norm(self.conv(x)).relu(), 2).flatten(1))


class Drops(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(192, 6), nn.ReLU(), nn.Dropout(0.3), nn.Linear(6, 3))


def module(kind=Convolution, **options):
    torch.manual_seed(0)
    return kind(**options)


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    silos = make()
    return silos, silos.save(tmp_path_factory.mktemp("silos") / "saved")


def same(one, other):
    assert torch.equal(one.solution, other.solution)
    assert torch.equal(one.buffers, other.buffers)
    for a, b in zip(one.history, other.history, strict=True):
        assert a.objective == b.objective
        assert a.stationarity == b.stationarity
        assert a.test_accuracy == b.test_accuracy
        assert (a.gradient_evaluations, a.bytes_up) == (b.gradient_evaluations, b.bytes_up)


METHODS = [
    FedAvg(local_steps=3, step=0.1),
    Scaffold(local_steps=3, step=0.1),
    Zhang(local_steps=3, step=0.1, server_step=1.0, partial_participation=True),
    FedNMap(local_steps=3, step=0.1, server_step=1.0, gamma=0.5, partial_participation=True),
    FedMid(local_steps=2, step=0.1),
    Mime(local_steps=2, step=0.1),
]
SETTINGS = {
    "batches": {"batch_size": 7},
    "epochs, half of the clients": {"batch_size": 5, "sampling": "epoch", "participation": 0.5},
    "drawn with replacement": {"batch_size": 3, "participation": 0.75, "replace": True},
    "full gradients": {"batch_size": None},
    "one after another": {"batch_size": 4, "backend": "loop"},
}


CASES = [(m, s) for m in METHODS for s in list(SETTINGS)[: len(SETTINGS) if m is METHODS[0] else 2]]


@pytest.mark.parametrize(("method", "setting"), CASES, ids=[f"{type(m).__name__}, {s}" for m, s in CASES])
def test_a_run_on_a_file_is_the_run_in_memory(both, method, setting):
    options = {"rounds": 4, "dtype": torch.float32, "evaluate_every": 2, **SETTINGS[setting]}
    h = None if isinstance(method, Mime) else L1(1e-3)
    problems = (fc.Problem(silos, model=module(), regularizer=h, weights="samples") for silos in both)
    same(*(fc.simulate(problem, method, **options) for problem in problems))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options", "settings"),
    [
        (Convolution, {"normalization": ((0.4, 0.5, 0.6), (0.2, 0.3, 0.2)), "augment": Chain((Crop(1), Flip()))}, {}),
        (Convolution, {"evaluation_samples": None}, {"dtype": torch.float64}),
        (Drops, {}, {}),
        (Convolution, {"gradients": "loop"}, {}),
        (Convolution, {"gradients": "streams"}, {}),
        (Convolution, {"chunk": 2}, {"rounds": 8}),
    ],
    ids=["augmented", "everything, float64", "dropout", "loop", "streams", "chunks, listed"],
)
def test_every_way_of_taking_gradients(both, kind, options, settings):
    given = {"rounds": 4, "batch_size": 6, "dtype": torch.float32, **settings}
    problems = [fc.Problem(s, model=module(kind), **options) for s in both]
    same(*(fc.simulate(problem, METHODS[0], **given) for problem in problems))
    if "chunk" in options:  # from the window, too, operations are listed
        listed = problems[1].smooth(torch.float32).gradients.listed
        assert listed
        assert all("forward" in run.__name__ for run in listed.values())


@pytest.mark.parametrize("batch", [6, None])
def test_batch_norm(both, batch):
    given = {"rounds": 3, "batch_size": batch, "dtype": torch.float32}
    same(*(fc.simulate(fc.Problem(s, model=module(norm=True)), METHODS[2], **given) for s in both))


def test_numbers_in_float64_files_and_one_client(tmp_path):
    silos = make((30,), (5,), bytes_=False)
    kept = silos.save(tmp_path / "saved")
    given = {"rounds": 20, "batch_size": 4, "dtype": torch.float32}
    same(*(fc.simulate(fc.Problem(s, model=module(nn.Linear, in_features=5, out_features=3)), METHODS[0], **given)
           for s in (silos, kept)))  # fmt: skip


def test_a_run_is_resumed_on_either(both, tmp_path):
    """What was begun in memory goes on from the file, and the other way round: their identity is one."""
    method, given = METHODS[3], {"batch_size": 5, "participation": 0.5, "dtype": torch.float32}
    problems = [fc.Problem(s, model=module(), regularizer=L1(1e-3)) for s in both]
    whole = fc.simulate(problems[0], method, rounds=6, **given)
    for i, first in enumerate(problems):
        path = tmp_path / f"{i}.safetensors"
        fc.simulate(first, method, rounds=2, checkpoint=path, **given)
        again = fc.simulate(problems[1 - i], method, rounds=6, checkpoint=path, resume=True, **given)
        assert torch.equal(again.solution, whole.solution)


def test_protected_samples(both):
    privacy = fc.privacy.SampleLevel(clip=1.0, noise=0.5, rate=0.1)
    given = {"rounds": 2, "dtype": torch.float32, "privacy": privacy}
    same(*(fc.simulate(fc.Problem(s, model=module()), METHODS[0], **given) for s in both))


def test_the_share_of_a_process(both):
    parts = [_part(s, Span(1, 3), 12) for s in both]
    assert isinstance(parts[1].features, MappedRows)
    assert torch.equal(parts[1].features.read(), parts[0].features)
    assert torch.equal(parts[1].test[0].read(), parts[0].test[0])
    x = torch.cat([p.detach().flatten() for p in module().parameters()])
    one, other = (fc.Problem(s, model=module()).gradient(x) for s in parts)
    assert torch.equal(one, other)


def test_partitions_and_splits_read_nothing(both, monkeypatch):
    silos, kept = both
    monkeypatch.setattr(MappedRows, "read", lambda *_: pytest.fail("rows were read"))
    dealt = [s.partition("dirichlet", clients=3, seed=1).split(validation=0.25, test=0, seed=2) for s in both]
    assert isinstance(dealt[1].features, MappedRows)
    monkeypatch.undo()
    for i in range(3):
        assert torch.equal(dealt[1][i][0].read(), dealt[0][i][0])
    assert torch.equal(dealt[1].validation[0].read(), dealt[0].validation[0])
    assert kept.summary().equals(silos.summary())
    given = {"rounds": 3, "batch_size": 5}
    same(*(fc.simulate(fc.Problem(s, model=module()), METHODS[1], **given) for s in dealt))


def test_no_more_samples_are_at_hand_than_a_step_needs(both, monkeypatch):
    """Reads of a run: two at the start, m * b per minibatch, at most 512 in evaluations; the window has no more."""
    _, kept = both
    sizes, read = [], MappedRows.read
    monkeypatch.setattr(MappedRows, "read", lambda self, *out: sizes.append(len(self)) or read(self, *out))
    problem = fc.Problem(kept, model=module(), evaluation_samples=40)
    run = fc.simulate(problem, METHODS[0], rounds=3, batch_size=7, dtype=torch.float32, evaluate_every=3)
    assert run.history[-1].evaluated_samples == 30  # 10 of a client, or all it has
    assert max(sizes) <= 30
    assert sizes.count(4 * 7) >= 3 * 3
    samples = problem.smooth(torch.float32).gradients.samples
    assert isinstance(samples, Window)
    assert len(samples.X) == 28
    sizes.clear()
    everything = problem.objective(run.solution.double(), evaluation_samples=None)
    assert max(sizes) <= 512
    memory = fc.Problem(kept.dense(), model=module())
    assert everything == memory.objective(run.solution.double(), evaluation_samples=None)
    assert len(memory.scores(run.solution)) == len(problem.scores(run.solution)) == 5
    assert memory.scores(run.solution).equals(problem.scores(run.solution))


def test_minibatches_are_gathered_before_they_are_asked_for(both, monkeypatch):
    """From the second round on, no step waits: each minibatch was begun by the thread."""
    in_step, take = [], Loader.take

    def taken(self, rows):
        in_step.append(any(torch.equal(begun, rows) for begun, _ in self._begun))
        return take(self, rows)

    monkeypatch.setattr(Loader, "take", taken)
    problem = fc.Problem(both[1], model=module(), evaluation_samples=4)
    fc.simulate(problem, METHODS[0], rounds=4, batch_size=7, dtype=torch.float32)
    assert len(in_step) == 1 + 4 * 3  # one to try the module on
    assert all(in_step[1 + 3 :])


def test_a_wrong_guess_changes_nothing(both):
    loader = Loader(both[1].features, both[1].targets, pin=False)
    steps = torch.arange(12).view(3, 2, 2)
    loader.expect(steps, lambda: 20 + steps)
    for rows in (torch.tensor([7, 7]), steps[1].flatten(), steps[0].flatten(), 20 + steps[0].flatten()):
        X, b = loader.take(rows)
        assert torch.equal(X, both[0].features[rows])
        assert torch.equal(b, both[0].targets[rows])
    loader.expect(torch.full((1, 2, 2), 10**6), None)
    with pytest.raises(IndexError, match="of 222"):
        loader.take(torch.full((4,), 10**6))


def program(silos, compile=False, device="cpu", batch=5, **options):
    problem = fc.Problem(silos, model=module(), regularizer=L1(1e-3), **options)
    method = METHODS[3]
    sim = Simulator(problem, method, batches=Batches(0, batch), dtype=torch.float32, device=device)
    who = np.arange(len(silos), dtype=np.uint64)
    message = method.broadcast(sim.server)
    made = Program(method, sim.smooth, problem.regularizer, sim.batches, message, sim.clients, sim.buffers, who,
                   (0, len(who)), everyone=True, compile=compile)  # fmt: skip
    return [made(message, sim.clients, sim.buffers, who, r, 0)[0] for r in (0, 1, 5)]


@pytest.mark.parametrize("options", [{}, {"augment": Chain((Crop(1), Flip()))}], ids=["plain", "augmented"])
def test_a_recorded_round_reads_from_a_window_of_its_own(both, options):
    for one, other in zip(*(program(s, **options) for s in both), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_what_cannot_be_recorded_says_why(both, monkeypatch):
    with pytest.raises(RuntimeError, match="full gradients of samples that are read from a file"):
        program(both[1], batch=None)
    monkeypatch.setattr("fedcomposite.problems.network.samples.MOST", 100)
    with pytest.raises(RuntimeError, match=r"samples of a round, read from a file, are 0\.0 GiB"):
        program(both[1])


@gpu
@pytest.mark.parametrize("mode", ["eager", "record", "compile"])
@pytest.mark.parametrize("gradients", ["vmap", "streams"])
@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_on_a_gpu(both, mode, gradients, participation):
    """Without convolutions, whose gradients a GPU need not repeat; of augmented passes only the rule is compiled."""
    options = {"gradients": gradients, "augment": Chain((Crop(1), Flip())), "normalization": (0.5, 0.3)}
    given = {"rounds": 12, "batch_size": 6, "dtype": torch.float32, "device": "cuda", "participation": participation}
    problems = (fc.Problem(s, model=nn.Sequential(*list(module(Drops))[:3]), loss=loss, **options) for s in both)
    memory, kept = (fc.simulate(p, METHODS[0], mode=mode, **given) for p in problems)
    assert torch.equal(memory.solution, kept.solution)


def loss(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


# -- the folder -------------------------------------------------------------------------------------------------------


def test_everything_comes_back(tmp_path):
    generator = np.random.default_rng(3)
    X = generator.normal(size=(40, 3))
    silos = fc.Silos.from_arrays(
        [(X[:10], generator.normal(size=10)), (X[10:], generator.normal(size=30))],
        names=["north", "south"], feature_names=["age", "sex", "dose"], weights=[np.ones(10), np.full(30, 2.0)],
        margin_offsets=[np.zeros(10), np.ones(30)],
    ).split(0.2, validation=0.1)  # fmt: skip
    kept = silos.save(tmp_path / "a" / "saved")
    back = kept.dense()
    for name in ("features", "targets", "weights", "margin_offsets"):
        assert torch.equal(getattr(back, name), getattr(silos, name)), name
    for part in ("test", "validation"):
        assert all(torch.equal(a, b) for a, b in zip(getattr(back, part), getattr(silos, part), strict=True))
        assert torch.equal(back.held_by[part], silos.held_by[part])
        assert torch.equal(back.held_margin_offsets[part], silos.held_margin_offsets[part])
    assert (back.names, back.feature_names, back.offsets, back.ids) == (
        silos.names, silos.feature_names, silos.offsets, silos.ids,
    )  # fmt: skip
    again = kept.partition("iid", clients=3).save(tmp_path / "b")
    assert torch.equal(again.dense().features, silos.partition("iid", clients=3).features)
    copied = pickle.loads(pickle.dumps(kept.features))
    assert len(pickle.dumps(kept.features)) < 1000
    assert torch.equal(copied.read(), silos.features)


def test_what_is_not_for_files(both, tmp_path):
    kept = both[1]
    flat = make((20, 20), (4,), bytes_=False).save(tmp_path / "flat")
    with pytest.raises(DataError, match=r"a linear model needs samples in memory.*silos\.dense\(\)"):
        fc.Problem(flat, loss="logistic")
    assert fc.Problem(flat.dense(), loss="multinomial").dimension == 12
    for wrong in (flat.standardize, lambda: kept.partition("kmeans", clients=2)):
        with pytest.raises(DataError, match="in memory"):
            wrong()
    sparse = fc.Silos.from_arrays([(torch.eye(4).to_sparse(), np.arange(4.0))])
    with pytest.raises(DataError, match=r"sparse samples are kept in \.svm files"):
        sparse.save(tmp_path / "sparse")
    assert not (tmp_path / "sparse").exists()


def test_a_run_keeps_the_file_that_it_opened(tmp_path, monkeypatch):
    """Whoever replaces or removes the folder during a run changes no number of it, nor does another working folder."""
    silos = make((9, 12))
    silos.save(tmp_path / "saved")
    monkeypatch.chdir(tmp_path)
    opened = fc.Silos.open("saved")

    def meddle(view):
        if view.round == 1:
            (tmp_path / "saved" / "features.npy").rename(tmp_path / "was.npy")
            np.save(tmp_path / "saved" / "features.npy", np.zeros((21, 3, 8, 8), np.uint8))
            monkeypatch.chdir("/")
        if view.round == 3:
            shutil.rmtree(tmp_path / "saved")

    settings = {"rounds": 6, "batch_size": 4}
    found = fc.simulate(fc.Problem(opened, model=module()), FedAvg(2, 0.1), callbacks=[meddle], **settings)
    wanted = fc.simulate(fc.Problem(silos, model=module()), FedAvg(2, 0.1), **settings)
    assert torch.equal(found.solution, wanted.solution)


def test_a_file_that_is_written_to_during_a_run_is_refused(tmp_path):
    make((9, 12)).save(tmp_path / "saved")
    problem = fc.Problem(fc.Silos.open(tmp_path / "saved"), model=module())

    def cut(view):
        os.truncate(tmp_path / "saved" / "features.npy", 64)  # a read beyond it would end the process

    with pytest.raises(DataError, match=r"features\.npy was changed while it was in use"):
        fc.simulate(problem, FedAvg(2, 0.1), rounds=6, batch_size=4, callbacks=[cut])


def test_samples_in_a_file_as_an_array(tmp_path):
    silos = make((9, 12))
    silos.save(tmp_path / "saved")
    rows = fc.Silos.open(tmp_path / "saved").features
    assert np.array_equal(np.asarray(rows[3:7]), silos.features[3:7].numpy())
    assert np.asarray(rows, float).dtype == float
    with pytest.raises(IndexError, match="by a slice or a list of rows"):
        rows[3]


def test_a_folder_that_is_not_what_was_written(tmp_path):
    silos = make((5, 6))
    folder = tmp_path / "saved"
    silos.save(folder)
    with pytest.raises(DataError, match="is there and not empty"):
        silos.save(folder)
    with pytest.raises(DataError, match="another process writes this folder"):  # it began after new_folder had looked
        ArrayFile(folder / "features.npy", np.dtype("u1"), (2,))
    content = (folder / "features.npy").read_bytes()
    Silos = fc.Silos
    (folder / "features.npy").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    Silos.open(folder)
    with pytest.raises(DataError, match=r"features\.npy: its content is not what was written"):
        Silos.open(folder, verify=True)
    (folder / "features.npy").write_bytes(content[:-9])
    with pytest.raises(DataError, match=r"features.npy is not an array of numbers"):
        Silos.open(folder)
    np.save(folder / "features.npy", np.zeros((11, 3, 8, 9), np.uint8))
    with pytest.raises(DataError, match=r"holds \|u1 \(11, 3, 8, 9\), silos.json says \|u1 \(11, 3, 8, 8\)"):
        Silos.open(folder)
    np.save(folder / "features.npy", np.array([{}], object), allow_pickle=True)
    with pytest.raises(DataError, match="is not an array of numbers"):
        Silos.open(folder)
    (folder / "features.npy").write_bytes(b"something else")
    with pytest.raises(DataError, match="is not an array of numbers; write the folder again"):  # no advice to unpickle
        Silos.open(folder)
    (folder / "features.npy").unlink()
    with pytest.raises(DataError, match=r"features\.npy is missing"):
        Silos.open(folder)
    (folder / "silos.json").write_text(json.dumps({"format": 9}))
    with pytest.raises(DataError, match="not of the kind"):
        Silos.open(folder)
    (folder / "silos.json").write_text("{")
    with pytest.raises(DataError, match="cannot be read"):
        Silos.open(folder)
    with pytest.raises(DataError, match=r"has no silos\.json"):
        Silos.open(tmp_path)
