"""Exported files, read back by other means than the exporter's."""

import csv
import importlib.util

import numpy as np
import pytest
import torch
from scipy import sparse
from torch import nn

import fedcomposite as fc
from fedcomposite.exporting import ExportError, export, read_csr


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))


def silos():
    generator = torch.Generator().manual_seed(1)
    return fc.Silos.from_arrays(
        [
            (
                torch.randint(0, 256, (7, 1, 6, 6), generator=generator, dtype=torch.uint8),
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
    made = export(run, problem, tmp_path / "deep" / "model.bin", format=format)
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
    sizes = {f: export(x, problem, tmp_path / f, format=f).file_bytes for f in ("safetensors", "csr")}
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
    made = export(run, problem, tmp_path / "table.csv", format="csv")
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
    made = export(x, problem, tmp_path / "model", format=format)
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
    made = export(x, problem, tmp_path / "model", format="state_dict")
    module = nn.Linear(3, 4).double()
    module.load_state_dict(torch.load(made.path, weights_only=True))
    X = data.features
    torch.testing.assert_close(module(X), X @ x[:12].view(3, 4) + x[12:])
    assert export(x, problem, tmp_path / "table", format="csv").parameters == 16


def test_a_file_that_differs_is_refused(trained, tmp_path, monkeypatch):
    problem, run = trained
    import fedcomposite.exporting as module

    read = module.load_file
    monkeypatch.setattr(module, "load_file", lambda path: {k: v + (v.ndim > 1) for k, v in read(path).items()})
    with pytest.raises(ExportError, match="predictions differ"):
        export(run, problem, tmp_path / "model", format="safetensors")


def test_errors(trained, tmp_path):
    problem, run = trained
    with pytest.raises(ValueError, match="did you mean 'csv'"):
        export(run, problem, tmp_path / "model", format="cvs")
    with pytest.raises(ValueError, match="for linear models"):
        export(run, problem, tmp_path / "model", format="csv")
    with pytest.raises(ExportError, match="NaN or infinite"):
        export(run.solution * torch.nan, problem, tmp_path / "model")
    (tmp_path / "text").write_text("nothing")
    with pytest.raises(ExportError, match=r"not a readable \.npz"):
        read_csr(tmp_path / "text")


@pytest.mark.skipif(importlib.util.find_spec("onnx") is not None, reason="onnx is installed")
def test_onnx_names_what_is_missing(trained, tmp_path):
    problem, run = trained
    with pytest.raises(ExportError, match="needs the packages onnx"):
        export(run, problem, tmp_path / "model.onnx", format="onnx")


@pytest.mark.skipif(
    any(importlib.util.find_spec(m) is None for m in ("onnx", "onnxscript", "onnxruntime")), reason="needs onnx"
)
@pytest.mark.filterwarnings("default")
def test_onnx_gives_the_same_predictions(trained, tmp_path):
    problem, run = trained
    assert export(run, problem, tmp_path / "model.onnx", format="onnx").difference < 1e-4
