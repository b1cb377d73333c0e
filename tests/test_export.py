"""Exported files, read back by other means than the exporter's."""

import csv
import importlib.util

import numpy as np
import pytest
import torch
from scipy import sparse
from torch import nn

import fedcomposite as fc
from fedcomposite.experiments.store import RunFolder
from fedcomposite.exporting import ExportError, export, read_csr


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))


def silos(flat=False):
    generator = torch.Generator().manual_seed(1)
    return fc.Silos.from_arrays(
        [
            (
                torch.randint(0, 256, (7, 36) if flat else (7, 1, 6, 6), generator=generator, dtype=torch.uint8),
                torch.randint(0, 3, (7,), generator=generator),
            )
            for _ in range(3)
        ]
    )


@pytest.fixture(scope="module")
def trained():
    problem = fc.Problem(
        silos(), model=network(), regularizer=fc.regularizers.L1(0.05), normalization=(0.5, 0.25), evaluation_samples=5
    )
    method = fc.algorithms.Zhang(local_steps=3, step=0.05, server_step=1.0)
    run = fc.simulate(problem, method, rounds=10, batch_size=4, dtype=torch.float32)
    assert 0 < run.history[-1].nonzeros < problem.dimension
    return problem, run


def outputs(state):
    """A fresh module with a file's tensors, on inputs prepared by hand."""
    module = network()
    module.load_state_dict(state)
    return module.eval()((silos().features.float() / 255 - 0.5) / 0.25)


@pytest.mark.parametrize("format", ["state_dict", "safetensors", "csr"])
def test_network_files(trained, tmp_path, format):
    problem, run = trained
    made = export(problem, run, tmp_path / "deep" / "model.bin", format=format)
    if format == "state_dict":
        state = torch.load(made.path, weights_only=True)
    elif format == "safetensors":
        from safetensors.torch import load_file

        state = load_file(made.path)
    else:
        with np.load(made.path, allow_pickle=False) as file:
            parts = tuple(file[f"4.weight.{k}"] for k in ("data", "indices", "indptr"))
            matrix = sparse.csr_array(parts, shape=tuple(file["4.weight.shape"]))
            assert file["0.weight.shape"].tolist() == [4, 1, 3, 3]
        state = read_csr(made.path)
        assert np.array_equal(matrix.toarray(), state["4.weight"].numpy())
    assert state["1.num_batches_tracked"].dtype == torch.int64
    assert state["1.num_batches_tracked"] == 30
    assert not torch.equal(state["1.running_var"], torch.ones(4))
    wanted = problem.predict(run.solution, problem.silos.features, run.buffers)
    torch.testing.assert_close(outputs(state), wanted)
    zeros = sum(int((state[k] == 0).sum()) for k in ("0.weight", "4.weight"))
    assert made.parameters - made.nonzeros >= zeros > 0
    assert made.nonzeros == run.history[-1].nonzeros
    assert made.dense_bytes == 4 * (problem.dimension + 8) + 8
    assert made.file_bytes == made.path.stat().st_size
    assert made.difference == 0


def test_sparse_files_are_small(tmp_path):
    data = fc.Silos.from_arrays([(torch.rand(5, 400), torch.tensor([0, 1, 2, 0, 1]))])
    problem = fc.Problem(data, model=nn.Linear(400, 100))
    x = torch.zeros(problem.dimension)
    x[::97] = 1.5
    sizes = {f: export(problem, x, tmp_path / f, format=f).file_bytes for f in ("safetensors", "csr")}
    assert sizes["csr"] < sizes["safetensors"] / 50


def tabular(bias, classes=2):
    generator = torch.Generator().manual_seed(0)
    arrays = [
        (torch.randn(9, 4, generator=generator, dtype=torch.float64), torch.arange(9) % classes) for _ in range(2)
    ]
    named = fc.Silos.from_arrays(arrays, feature_names=["age", "dose", "weight, kg", "sex"])
    return fc.Problem(named, loss="logistic", bias=bias, regularizer=fc.regularizers.L1(0.02))


@pytest.mark.parametrize("bias", [False, True])
def test_coefficient_table(tmp_path, bias):
    problem = tabular(bias)
    run = fc.simulate(problem, fc.algorithms.ProximalGradient(step=0.7), rounds=30)
    made = export(problem, run, tmp_path / "table.csv", format="csv")
    with made.path.open(newline="") as file:
        rows = list(csv.reader(file))
    assert rows[0] == ["name", "coefficient"]
    assert [r[0] for r in rows[1:]] == ["age", "dose", "weight, kg", "sex"] + ["(intercept)"] * bias
    assert [float(r[1]) for r in rows[1:]] == run.solution.tolist()


@pytest.mark.parametrize("format", ["state_dict", "safetensors", "csr"])
@pytest.mark.parametrize("bias", [False, True])
def test_linear_models_fit_torch_linear(tmp_path, bias, format):
    problem = tabular(bias)
    x = torch.tensor([1.0, 0.0, -0.25, 3.0, 0.5][: problem.dimension], dtype=torch.float64)
    made = export(problem, x, tmp_path / "model", format=format)
    if format == "csr":
        state = read_csr(made.path)
    elif format == "state_dict":
        state = torch.load(made.path, weights_only=True)
    else:
        from safetensors.torch import load_file

        state = load_file(made.path)
    module = nn.Linear(4, 1, bias=bias).double()
    module.load_state_dict(state)
    X = problem.silos.features
    torch.testing.assert_close(module(X)[:, 0], X @ x[:4] + (0.5 if bias else 0.0))


def test_several_classes(tmp_path):
    data = fc.Silos.from_arrays([(torch.rand(8, 3, dtype=torch.float64), torch.arange(8) % 4) for _ in range(2)])
    problem = fc.Problem(data, loss="multinomial", bias=True)
    x = torch.arange(16, dtype=torch.float64)
    made = export(problem, x, tmp_path / "model", format="state_dict")
    module = nn.Linear(3, 4).double()
    module.load_state_dict(torch.load(made.path, weights_only=True))
    X = data.features
    torch.testing.assert_close(module(X), X @ x[:12].view(3, 4) + x[12:])
    assert export(problem, x, tmp_path / "table", format="csv").parameters == 16


def spoil_reading(monkeypatch, module, change):
    """What the writer reads back of a file is something else."""
    read = module.files.read

    def spoiled(path):
        state, *rest = read(path)
        return change(state), *rest

    monkeypatch.setattr(module.files, "read", spoiled)


def test_a_file_that_differs_is_refused(trained, tmp_path, monkeypatch):
    problem, run = trained
    import fedcomposite.exporting.writing as module

    spoil_reading(monkeypatch, module, lambda state: {k: v + (v.ndim > 1) for k, v in state.items()})
    with pytest.raises(ExportError, match="predictions differ"):
        export(problem, run, tmp_path / "model", format="safetensors")


def convolutions(channels=1):
    """Two convolutions over images of one channel: in another memory layout they sum in another order."""
    generator = torch.Generator().manual_seed(2)
    images = torch.randint(0, 256, (40, channels, 28, 28), generator=generator, dtype=torch.uint8)
    data = fc.Silos.from_arrays([(images, torch.arange(40) % 10)])
    torch.manual_seed(3)
    model = nn.Sequential(
        *(nn.Conv2d(channels, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10)),
    )
    problem = fc.Problem(data, model=model, normalization=(0.5, 0.25))
    return problem, 3 * torch.cat([p.detach().reshape(-1) for p in model.parameters()])


@pytest.mark.parametrize("format", ["state_dict", "safetensors", "csr"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_is_no_reason_to_refuse(tmp_path, format, dtype):
    problem, x = convolutions()
    made = export(problem, x.to(dtype), tmp_path / "model", format=format)
    size = float(problem.predict(x.to(dtype), problem.silos.features).abs().max())
    assert made.difference <= 1e3 * torch.finfo(dtype).eps * size


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize("change", [1e-6, 1e-3, 1.0])
def test_a_wrong_model_is_refused(tmp_path, monkeypatch, scale, change):
    """However little a weight of the file differs, and however small or large the outputs are."""
    import fedcomposite.exporting.writing as module

    problem, x = convolutions()
    x[-650:] *= scale  # the last layer

    def wrong(state):
        state["9.weight"][3, 7] *= 1 + change
        return state

    spoil_reading(monkeypatch, module, wrong)
    with pytest.raises(ExportError, match=r"predictions differ|tensor '9\.weight' is not the model's"):
        export(problem, x, tmp_path / "model", format="safetensors")


def test_predictions_are_compared_at_the_size_of_the_outputs(tmp_path, monkeypatch):
    """The module that is written, not only its tensors: an other activation is another model."""
    import fedcomposite.exporting.writing as module

    problem, x = convolutions()
    x[-650:] *= 1e-5
    original = module._read

    def elsewhere(state, x, problem, samples):
        return original(state, x, problem, samples)._replace(predictions=1.001 * problem.predict(x, samples))

    monkeypatch.setattr(module, "_read", elsewhere)
    with pytest.raises(ExportError, match="rounding explains"):
        export(problem, x, tmp_path / "model")


@pytest.mark.parametrize("existing", [None, b"an older model"])
@pytest.mark.parametrize("format", ["state_dict", "safetensors", "csr", "csv"])
def test_a_refused_export_leaves_nothing(tmp_path, monkeypatch, format, existing):
    import fedcomposite.exporting.writing as module

    def refuse(*_):
        raise ExportError("no")

    monkeypatch.setattr(module, "_compare", refuse)
    problem = tabular(bias=True)
    if existing is not None:
        (tmp_path / "model.bin").write_bytes(existing)
    with pytest.raises(ExportError):
        export(problem, torch.ones(problem.dimension), tmp_path / "model.bin", format=format)
    assert [p.name for p in tmp_path.iterdir()] == ([] if existing is None else ["model.bin"])
    assert existing is None or (tmp_path / "model.bin").read_bytes() == existing


def test_an_existing_file_is_replaced(tmp_path):
    problem = tabular(bias=True)
    (tmp_path / "model.csv").write_text("old")
    export(problem, torch.ones(problem.dimension), tmp_path / "model.csv", format="csv")
    assert (tmp_path / "model.csv").read_text().startswith("name,coefficient")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ExportError, match="cannot be written"):
        export(problem, torch.ones(problem.dimension), tmp_path / "folder")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder", "model.csv"]


@pytest.mark.parametrize("format", ["state_dict", "safetensors", "csr", "csv"])
def test_files_have_the_usual_mode(tmp_path, format):
    problem = tabular(bias=True)
    (tmp_path / "plain").touch()
    made = export(problem, torch.ones(problem.dimension), tmp_path / "model", format=format)
    assert made.path.stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_identical_runs_give_identical_files(tmp_path):
    """Whatever the files are called; the order of metadata is drawn anew each time a library writes them."""
    problem, seen = tabular(bias=True), []
    for i in range(5):
        run = fc.simulate(problem, fc.algorithms.ProximalGradient(step=0.7), rounds=2)
        folder = RunFolder(tmp_path / str(i))
        folder.create()
        folder.finish(run, problem, "run")
        files = [folder.path / "model.safetensors"]
        for format in ("state_dict", "safetensors", "csr", "csv"):
            files.append(export(problem, run, folder.path / f"{format}{'x' * i}", format=format).path)
        seen.append([file.read_bytes() for file in files])
    assert all(one == seen[0] for one in seen)


def test_serialised_files_are_safetensors():
    from safetensors.torch import load

    from fedcomposite.files import pack as serialise

    tensors = {
        "b": torch.arange(3),
        "größe": torch.ones(2, 2).double(),
        "a": torch.tensor(1.5),
        "c": torch.ones(3).half(),
    }
    notes = {"zeta": "1", "alpha": 'quoted "text"', "mü": "2"}
    raw = serialise(tensors, notes)
    back = load(raw)
    assert set(back) == set(tensors)
    assert all(torch.equal(back[k], v) and back[k].dtype == v.dtype for k, v in tensors.items())
    for _ in range(20):
        assert serialise(dict(reversed(tensors.items())), dict(reversed(notes.items()))) == raw


def test_serialised_metadata(tmp_path):
    from safetensors import safe_open

    from fedcomposite.files import pack as serialise

    notes = {"zeta": "1", "alpha": 'quoted "text"', "mü": "2"}
    (tmp_path / "f").write_bytes(serialise({"a": torch.ones(2)}, notes))
    with safe_open(str(tmp_path / "f"), "pt") as file:
        assert file.metadata() == notes


def test_errors(trained, tmp_path):
    problem, run = trained
    with pytest.raises(ValueError, match="did you mean 'csv'"):
        export(problem, run, tmp_path / "model", format="cvs")
    with pytest.raises(ValueError, match="for linear models"):
        export(problem, run, tmp_path / "model", format="csv")
    with pytest.raises(ExportError, match="NaN or infinite"):
        export(problem, run.solution * torch.nan, tmp_path / "model")
    (tmp_path / "text").write_text("nothing")
    with pytest.raises(ExportError, match=r"not a readable \.npz"):
        read_csr(tmp_path / "text")


def thinned():
    """A network with two dead filters, one of which is a constant behind its batch norm, and a dead neuron."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Unflatten(1, (1, 6, 6)), nn.Conv2d(1, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(80, 7), nn.ReLU(), nn.Linear(7, 3)),
    )
    with torch.no_grad():
        model[1].weight[[1, 3]] = 0
        model[2].bias[1] = 0.8
        model[5].weight[4] = 0
    problem = fc.Problem(silos(flat=True), model=model, normalization=(0.5, 0.25))
    return problem, torch.cat([p.detach().reshape(-1) for p in model.parameters()])


@pytest.mark.parametrize("format", ["state_dict", "safetensors", "csr"])
def test_pruned_files(tmp_path, format):
    from safetensors.torch import load_file

    problem, x = thinned()
    made = export(problem, x, tmp_path / "model", format=format, pruned=True)
    read = {"state_dict": lambda p: torch.load(p, weights_only=True), "safetensors": load_file, "csr": read_csr}
    state = read[format](made.path)
    assert {k: tuple(v.shape) for k, v in state.items() if k.endswith("weight")} == {
        "1.weight": (3, 1, 3, 3),
        "2.weight": (3,),
        "5.weight": (6, 48),
        "7.weight": (3, 6),
    }
    assert made.parameters == 27 + 3 + 6 + 6 * 48 + 6 + 18 + 3
    assert made.pruned.parameters == len(x)
    assert made.dense_bytes == 4 * (len(x) + 10) + 8
    again = fc.exporting.fit(problem.module(x), state)
    samples = problem.options.inputs(problem.silos.features, torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(again(samples), problem.predict(x, problem.silos.features))


def test_linear_models_have_no_units(tmp_path):
    problem = tabular(bias=True)
    with pytest.raises(ValueError, match="is for networks"):
        export(problem, torch.ones(problem.dimension), tmp_path / "model", pruned=True)


def test_all_that_is_wrong_is_told_at_once(tmp_path):
    problem = fc.Problem(fc.data.load("synthetic", clients=3, features=4, samples=10), loss="logistic")
    with pytest.raises(
        ValueError, match=r"path = 3, must be[^\0]*unknown format 'crs'[^\0]*pruned = True is for networks"
    ):
        export(problem, torch.zeros(4), 3, format="crs", pruned=True)
    with pytest.raises(ValueError, match=r"unknown format 'cvs'[^\0]*multiple = 4 is for pruned layers"):
        export(problem, torch.zeros(4), tmp_path / "m", format="cvs", multiple=4)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("pruned", [False, True])
@pytest.mark.parametrize("multiple", [0, -1, 2.5, "8", True])
def test_what_no_size_is_a_multiple_of(tmp_path, pruned, multiple):
    problem, x = thinned()
    with pytest.raises(ValueError, match=rf"multiple = {multiple!r}, must be an integer >= 1"):
        export(problem, x, tmp_path / "model", pruned=pruned, multiple=multiple)


def test_a_refused_export_leaves_no_folders(tmp_path, monkeypatch):
    """No folders that were made for it either, and what was there stays."""
    import fedcomposite.exporting.writing as module

    problem, x = thinned()
    old = export(problem, x, tmp_path / "model", format="safetensors").path
    before = old.read_bytes()
    with pytest.raises(ValueError, match="for linear models"):
        export(problem, x, tmp_path / "some" / "where" / "table.csv", format="csv")
    with pytest.raises(ExportError, match="cannot be written"):
        export(problem, x, old / "model")  # a file is no folder
    spoil_reading(monkeypatch, module, lambda state: {k: v + (v.ndim > 1) for k, v in state.items()})
    for target in (tmp_path / "some" / "where" / "model", old):
        with pytest.raises(ExportError, match="predictions differ"):
            export(problem, 2 * x, target, format="safetensors")
    assert [p.name for p in tmp_path.rglob("*")] == ["model"]
    assert old.read_bytes() == before


@pytest.mark.skipif(importlib.util.find_spec("onnx") is not None, reason="onnx is installed")
def test_onnx_names_what_is_missing(trained, tmp_path):
    problem, run = trained
    with pytest.raises(ExportError, match="needs the packages onnx"):
        export(problem, run, tmp_path / "model.onnx", format="onnx")


onnx = pytest.mark.skipif(
    any(importlib.util.find_spec(m) is None for m in ("onnx", "onnxscript", "onnxruntime")), reason="needs onnx"
)


@onnx
def test_onnx_gives_the_same_predictions(trained, tmp_path):
    problem, run = trained
    assert export(problem, run, tmp_path / "model.onnx", format="onnx").difference < 1e-4


@onnx
def test_onnx_is_quiet_takes_any_batch_and_repeats(tmp_path, capfd):
    import onnxruntime

    problem, x = thinned()
    files = [export(problem, x, tmp_path / name, format="onnx", pruned=True).path for name in ("a.onnx", "b")]
    assert capfd.readouterr() == ("", "")
    assert files[0].read_bytes() == files[1].read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.onnx", "b"]
    session = onnxruntime.InferenceSession(files[0])
    inputs = problem.options.inputs(problem.silos.features, torch.float32)
    for samples in (inputs[:1], inputs[:5], inputs):
        (found,) = session.run(None, {session.get_inputs()[0].name: samples.numpy()})
        wanted = problem.predict(x, problem.silos.features)[: len(samples)]
        torch.testing.assert_close(torch.from_numpy(found), wanted, rtol=1e-4, atol=1e-5)


class OneSize(nn.Sequential):
    """A module whose graph has one size of batches."""

    def forward(self, x):
        return super().forward(x.reshape(len(x), 36))


@onnx
def test_onnx_of_one_size_of_batches_is_refused(tmp_path):
    model = OneSize(nn.Linear(36, 3))
    problem = fc.Problem(silos(), model=model)
    x = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    with pytest.raises(ExportError, match="batches of 21 only"):
        export(problem, x, tmp_path / "model.onnx", format="onnx")
    assert not list(tmp_path.iterdir())


@onnx
@pytest.mark.parametrize("convolves", [True, False])
def test_onnx_in_eight_bits(tmp_path, convolves):
    """Weights are stored as int8, what flows is rounded, and predictions stay close to the model's."""
    from onnx import TensorProto, load

    torch.manual_seed(0)
    deep = nn.Sequential(nn.Flatten(), nn.Linear(36, 64), nn.ReLU(), nn.Linear(64, 3))
    problem = fc.Problem(silos(), model=network() if convolves else deep, normalization=(0.5, 0.25))
    x = problem.smooth(torch.float32).start()
    whole = export(problem, x, tmp_path / "whole.onnx", format="onnx")
    made = export(problem, x, tmp_path / "small.onnx", format="onnx", int8=True)
    graph = load(made.path).graph
    kinds = [t.data_type for t in graph.initializer if len(t.dims) > 1]
    assert kinds == [TensorProto.INT8] * 2
    assert {n.op_type for n in graph.node} & ({"QuantizeLinear"} if convolves else {"MatMulInteger"})
    wanted = problem.predict(x, problem.silos.features)
    assert whole.difference < made.difference < 0.1 * float(wanted.abs().max())


def test_eight_bits_that_cannot_be(trained, tmp_path):
    problem, run = trained
    with pytest.raises(ValueError, match="int8"):
        export(problem, run, tmp_path / "model.pt", int8=True)
    linear = fc.Problem(fc.data.load("synthetic", clients=2, features=4, samples=9))
    with pytest.raises(ValueError, match="int8"):
        export(linear, torch.zeros(4), tmp_path / "model.onnx", format="onnx", int8=True)


class Answer:
    def __init__(self, logits):
        self.logits = logits


class TwoInputs(nn.Module):
    """Called by names, and what it gives is an object."""

    def __init__(self):
        super().__init__()
        self.words, self.first, self.last = nn.Embedding(9, 6), nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, input_ids, attention_mask):
        there = attention_mask.unsqueeze(-1).to(self.first.weight.dtype)
        return Answer(self.last(self.first((self.words(input_ids) * there).sum(1)).relu()))


def test_several_inputs_and_objects_are_pruned(tmp_path):
    X = torch.cat([torch.randint(9, (12, 5)), torch.randint(2, (12, 5))], 1)
    problem = fc.Problem(
        fc.Silos.from_arrays([(X, torch.arange(12) % 3)]),
        model=TwoInputs(),
        named_inputs={"input_ids": (5,), "attention_mask": (5,)},
    )
    x = problem.with_zeros(0.4, "filters").regularizer.prox(problem.smooth(torch.float32).start(), 0.1)
    made = export(problem, x, tmp_path / "small.safetensors", format="safetensors", pruned=True)
    assert isinstance(made.pruned.module, TwoInputs)
    assert [layer.name for layer in made.pruned.layers] == ["first", "last"]
    assert made.pruned.layers[0].pruned[0] < 8
