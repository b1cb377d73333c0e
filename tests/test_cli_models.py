"""Networks, exports and data sets on the command line; the files are read back by other means than the package's."""

import functools
import gzip
import hashlib
import importlib.util
import json
import shutil
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.numpy import load_file, save_file
from scipy import sparse

import fedcomposite as fc
from fedcomposite.data.catalog import FILES
from fedcomposite.data.fetch import SHIPPED, File
from fedcomposite.experiments import Config
from fedcomposite.experiments.runner import execute
from fedcomposite.experiments.store import RunFolder

NETWORK = """
name = "network"
[data]
name = "digits"
test = 0.2
[partition]
name = "dirichlet"
clients = 4
alpha = 0.5
[model]
name = "mlp"
options = { hidden = [12] }
[regularizer]
name = "L1"
lam = 0.02
[algorithm]
name = "FedNMap"
local_steps = 3
step = 0.1
gamma = 0.3
[run]
rounds = 4
batch_size = 10
dtype = "float32"
"""
LINEAR = """
name = "linear"
[data]
name = "heart_disease"
[problem]
bias = true
[regularizer]
name = "L1"
lam = 0.05
[algorithm]
name = "ProximalGradient"
step = 0.5
[run]
rounds = 30
"""


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "network.toml"
    path.write_text(NETWORK)
    return path


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with a finished run of a network and of a linear model."""
    folder = tmp_path_factory.mktemp("runs")
    for name, text in (("network", NETWORK), ("linear", LINEAR)):
        (folder / f"{name}.toml").write_text(text)
        (folder / name).mkdir()
        execute(Config.read(folder / f"{name}.toml"), RunFolder(folder / name))
    return folder


# -- [model] --------------------------------------------------------------------------------------------------------


def test_a_network_runs_from_a_file(config, tmp_path, cli):
    done = cli("run", config, "--out", tmp_path / "r", check=0)
    records = [json.loads(line) for line in (tmp_path / "r" / "history.jsonl").read_text().splitlines()]
    assert f"test accuracy {records[-1]['test_accuracy']:.4f}" in done.out
    assert records[-1]["objective"] < records[0]["objective"]
    start = fc.models.build("mlp", fc.data.load("digits"), seed=0, hidden=(12,))
    assert load_file(tmp_path / "r" / "model.safetensors")["x"].shape == (64 * 12 + 12 + 12 * 10 + 10,)
    own = torch.cat([p.detach().flatten() for p in start.parameters()])
    shrunk = own.clone()
    for at in (slice(0, 768), slice(780, 900)):  # FedNMap's first model is the prox of the start, on the weights
        shrunk[at] = torch.sign(own[at]) * (own[at].abs() - 0.02 * 0.3).clamp(min=0)
    assert records[0]["nonzeros"] == int((shrunk != 0).sum())
    cli("run", tmp_path / "r" / "config.toml", "--out", tmp_path / "s", check=0)
    again = [json.loads(line) for line in (tmp_path / "s" / "history.jsonl").read_text().splitlines()]
    assert [{**r, "seconds": 0} for r in again] == [{**r, "seconds": 0} for r in records]


@pytest.mark.parametrize(("samples", "of_each", "tested"), [(0, 10_000, 359), (2000, 500, 359), (40, 10, 40)])
def test_evaluation_samples_bound_training_and_test_samples(config, samples, of_each, tested):
    problem = Config.read(config, [f"model.evaluation_samples={samples}"]).make_problem()
    x = problem.smooth().start()
    metrics = problem.evaluate(x).metrics
    assert int(metrics["evaluated_samples"]) == np.minimum(problem.silos.sizes, of_each).sum()
    X, y = problem.silos.test
    assert len(y) == 359
    spread = (np.arange(tested) * 2 + 1) * 359 // (2 * tested)  # every sample, or evenly spaced ones
    right = (problem.module(x)(X[spread]).argmax(1) == y[spread]).double().mean()
    assert float(metrics["test_accuracy"]) == pytest.approx(float(right))


def test_the_seed_of_the_model_may_be_its_own(config):
    def start(*overrides):
        return Config.read(config, overrides).make_problem().smooth().start()

    assert torch.equal(start("seed=1", "model.seed=7"), start("seed=2", "model.seed=7"))
    assert not torch.equal(start("seed=1"), start("seed=2"))


MODEL = {
    "unknown model": (('"mlp"', '"mpl"'), "[model] unknown model 'mpl'; did you mean 'mlp'?"),
    "misspelt option": (("hidden =", "hiden ="), "[model] model 'mlp' has no option 'hiden'; did you mean 'hidden'?"),
    "option of another type": (
        ("[12]", '["many"]'),
        "[model] model 'mlp': hidden = ['many'], must be a list of an integer",
    ),
    "option below zero": (("[12]", "[-12]"), "[model] model 'mlp': hidden = [-12], must be a list of an integer >= 1"),
    "option out of range": (
        ('"mlp"\noptions = { hidden = [12] }', '"mobilenetv3-small"\noptions = { dropout = 2.0 }'),
        "[model] model 'mobilenetv3-small': dropout = 2.0, must be a number >= 0 and <= 1",
    ),
    "unknown field": (('"mlp"', '"mlp"\nchunks = 3'), "[model] chunks is not a known field; did you mean 'chunk'?"),
    "unknown way": (('"mlp"', '"mlp"\ngradients = "fast"'), "[model] gradients = 'fast'"),
    "no name": (('name = "mlp"\n', ""), "[model] name is missing"),
    "loss of a linear model": (
        ("[model]", '[problem]\nloss = "logistic"\n[model]'),
        "[problem] loss = 'logistic' is not for a model",
    ),
    "intercept of a linear model": (
        ("[model]", "[problem]\nbias = true\n[model]"),
        "[problem] bias is for linear models",
    ),
    "steps from theory": (
        ("step = 0.1\ngamma = 0.3", 'steps = "auto"'),
        "[algorithm] the smoothness of a network is unknown; give the steps yourself",
    ),
    "targets are no classes": (
        ('"digits"\ntest = 0.2\n[partition]\nname = "dirichlet"\nclients = 4\nalpha = 0.5', '"diabetes"'),
        "[model] these targets are not classes",
    ),
    "not an image": (
        ('"digits"\ntest = 0.2', '"wine"\n'),
        "[model] samples with 13 features are not square images",
    ),
    "unknown device": (
        ("rounds = 4", 'rounds = 4\ndevice = "toaster"'),
        "[run] device = 'toaster' cannot be used here",
    ),
}


@pytest.mark.parametrize("name", MODEL)
def test_wrong_models_are_one_clear_line(config, tmp_path, name, cli):
    (old, new), message = MODEL[name]
    text = NETWORK
    if name == "not an image":
        text = text.replace('"mlp"\noptions = { hidden = [12] }', '"zhang-cnn"')
    assert old in text
    config.write_text(text.replace(old, new))
    stderr = cli("run", config, "--out", tmp_path / "r", check=2).err
    assert message in stderr
    assert len(stderr.strip().splitlines()) == 1
    assert not (tmp_path / "r" / "history.jsonl").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there(config, tmp_path, cli):
    stderr = cli("run", config, "--set", "run.device=cuda", "--out", tmp_path / "r", check=2).err
    assert stderr.startswith("error: [run] device = 'cuda' cannot be used here: ")
    assert not (tmp_path / "r").exists()


@pytest.fixture
def images(tmp_path):
    """Two clients with files of small pictures, and an experiment without a model."""
    rng = np.random.default_rng(0)
    for client in ("a", "b"):
        pixels = rng.integers(0, 256, (20, 1, 6, 6), dtype=np.uint8)
        np.savez(tmp_path / f"{client}.npz", X=pixels, y=np.arange(20) % 2)
    path = tmp_path / "images.toml"
    path.write_text(
        '[data]\nfiles = ["a.npz", "b.npz"]\ntarget = "y"\n[algorithm]\nname = "FedAvg"\nlocal_steps = 2\nstep = 0.1\n'
        "[run]\nrounds = 2\nbatch_size = 4\n"
    )
    return path


def test_images_need_a_model(images, tmp_path, cli):
    stderr = cli("run", images, "--out", tmp_path / "r", check=2).err
    assert stderr.startswith("error: [problem] ")
    assert "samples that are vectors, these are 1x6x6; flatten them or give a model" in stderr
    assert len(stderr.strip().splitlines()) == 1
    cli("run", images, "--set", "model.name=linear", "--out", tmp_path / "r", check=0)


def test_mnist_into_a_linear_loss(real_data, tmp_path, cli):
    path = tmp_path / "c.toml"
    path.write_text(LINEAR.replace('"heart_disease"', '"mnist"'))
    stderr = cli("run", path, "--out", tmp_path / "r", check=2).err
    assert "these are 1x28x28; flatten them or give a model" in stderr
    assert len(stderr.strip().splitlines()) == 1


def test_a_mistake_never_costs_an_earlier_run(config, tmp_path, cli):
    cli("run", config, "--out", tmp_path / "r", check=0)
    before = (tmp_path / "r" / "model.safetensors").read_bytes()
    cli("run", config, "--out", tmp_path / "r", "--overwrite", "--set", "data.name=diabetes", check=2)
    assert (tmp_path / "r" / "model.safetensors").read_bytes() == before


def test_relative_files_are_found_again(images, tmp_path, cli, monkeypatch):
    """The resolved experiment lies in another folder than the one it was written in."""
    monkeypatch.chdir(tmp_path)
    cli("run", "images.toml", "--set", "model.name=mlp", "--out", "deep/er/run", check=0)
    monkeypatch.chdir(tmp_path.parent)
    cli("run", "--resume", tmp_path / "deep/er/run", "--set", "run.rounds=3", check=0)
    cli("export", tmp_path / "deep/er/run", check=0)


# -- export ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("format", "suffix"), [("state_dict", "pt"), ("safetensors", "safetensors"), ("csr", "npz")])
def test_export_of_a_network(runs, cli, format, suffix):
    x = load_file(runs / "network" / "model.safetensors")["x"]
    shown = cli("export", runs / "network", "--format", format, check=0).out
    path = runs / "network" / f"exported.{suffix}"
    if format == "state_dict":
        state = {k: v.numpy() for k, v in torch.load(path, weights_only=True).items()}
    elif format == "safetensors":
        state = load_file(path)
    else:
        with np.load(path, allow_pickle=False) as file:
            state = {k: file[k] for k in ("1.bias", "3.bias")}
            for k in ("1.weight", "3.weight"):
                parts = tuple(file[f"{k}.{part}"] for part in ("data", "indices", "indptr"))
                state[k] = sparse.csr_array(parts, shape=tuple(file[f"{k}.shape"])).toarray()
    own = np.concatenate([state[k].ravel() for k in ("1.weight", "1.bias", "3.weight", "3.bias")])
    assert np.array_equal(own, x)
    zeros = int((x == 0).sum())
    assert zeros > 0
    assert f"zeros: {zeros} of {len(x)} parameters ({100 * zeros / len(x):.1f} %)" in shown
    assert (
        f"size: {4 * len(x) / 1000:.1f} kB of dense tensors, {path.stat().st_size / 1000:.1f} kB in the file" in shown
    )
    assert "predictions of the file and of the run agree (largest difference 0)" in shown
    assert "1.weight" in shown


def test_export_without_dead_neurons(runs, tmp_path, cli):
    shutil.copytree(runs / "network", tmp_path / "run")
    kept = tmp_path / "run" / "model.safetensors"
    tensors = load_file(kept)
    tensors["x"][: 3 * 64] = 0  # the first three neurons of twelve
    save_file(tensors, kept)
    shown = cli("export", tmp_path / "run", "--format", "safetensors", "--pruned", check=0).out
    state = load_file(tmp_path / "run" / "exported.safetensors")
    left = len(state["1.weight"])
    assert left <= 9
    assert {k: v.shape for k, v in state.items()} == {
        "1.weight": (left, 64), "1.bias": (left,), "3.weight": (10, left), "3.bias": (10,)
    }  # fmt: skip
    assert f"pruned: 910 -> {75 * left + 10} parameters" in shown
    assert "is for networks" in cli("export", runs / "linear", "--pruned", check=2).err
    cli("export", tmp_path / "run", "--format", "safetensors", "--pruned", "--multiple", "5", check=0)
    assert len(load_file(tmp_path / "run" / "exported.safetensors")["1.weight"]) == 5 * -(-left // 5)
    missing = tmp_path / "run" / "config.toml"  # what is wrong is told before the data are looked for
    missing.write_text(missing.read_text().replace('name = "digits"', 'name = "no-such-data"'))
    assert "add --pruned" in cli("export", tmp_path / "run", "--multiple", "8", check=2).err
    assert "--multiple" in cli("export", tmp_path / "run", "--pruned", "--multiple", "0", check=2).err


def test_export_with_running_statistics(tmp_path, cli):
    path = tmp_path / "norm.toml"
    text = NETWORK.replace('"mlp"\noptions = { hidden = [12] }', '"mobilenetv3-small"\nevaluation_samples = 10')
    path.write_text(text.replace("rounds = 4", "rounds = 1").replace("clients = 4", "clients = 2"))
    cli("run", path, "--out", tmp_path / "r", check=0)
    cli("export", tmp_path / "r", "--format", "safetensors", "--out", tmp_path / "deep" / "model.st", check=0)
    state = load_file(tmp_path / "deep" / "model.st")
    counted = [v for k, v in state.items() if k.endswith("num_batches_tracked")]
    assert counted
    assert all(v == 3 for v in counted)
    network = fc.models.MobileNetV3Small((64,), 10)
    network.load_state_dict({k: torch.from_numpy(v.copy()) for k, v in state.items()})
    assert sum(v.size for v in load_file(tmp_path / "r" / "model.safetensors").values()) == sum(
        v.size for v in state.values()
    )


def test_export_of_a_linear_model(runs, tmp_path, cli):
    x = load_file(runs / "linear" / "model.safetensors")["x"]
    shown = cli("export", runs / "linear", "--format", "csv", check=0).out
    table = pd.read_csv(runs / "linear" / "exported.csv", dtype=str)
    assert table["name"].tolist()[-2:] == ["oldpeak", "(intercept)"]
    assert [float(digits) for digits in table["coefficient"]] == x.tolist()
    assert f"zeros: {int((x == 0).sum())} of 11" in shown
    cli("export", runs / "linear", "--out", tmp_path / "weights.pt", check=0)
    linear = torch.nn.Linear(10, 1).double()
    linear.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
    X = fc.data.load("heart_disease").features
    np.testing.assert_allclose(linear(X).detach().numpy()[:, 0], X.numpy() @ x[:10] + x[10], rtol=1e-12)


def test_export_refuses(runs, tmp_path, cli):
    own = runs / "network" / "model.safetensors"
    before = own.read_bytes()
    wrong = {
        ("--format", "csv"): "format = 'csv' is a table of coefficients, for linear models",
        ("--format", "safetensors", "--out", own): "is the run's own file",
        ("--out", tmp_path): "is a folder; give a file",
    }
    for arguments, message in wrong.items():
        assert message in cli("export", runs / "network", *arguments, check=2).err
    assert own.read_bytes() == before
    assert "failed: " in cli("export", runs / "network", "--out", own / "below a file", check=1).err
    cli("export", runs / "network", "--format", "pickle", check=2)
    assert "no config.toml" in cli("export", tmp_path, check=2).err
    (tmp_path / "config.toml").write_text(NETWORK)
    assert "no model.safetensors" in cli("export", tmp_path, check=2).err
    (tmp_path / "model.safetensors").write_bytes(before[:100])
    assert "not a readable model" in cli("export", tmp_path, check=2).err
    shutil.copy(runs / "linear" / "model.safetensors", tmp_path)
    assert "x has shape (11,), expected (158,)" in cli("export", tmp_path, check=2).err


@pytest.mark.skipif(importlib.util.find_spec("onnx") is not None, reason="onnx is installed")
def test_export_names_missing_packages(runs, cli):
    assert "needs the packages onnx" in cli("export", runs / "network", "--format", "onnx", check=1).err


# -- data -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """No data folder, and an empty cache."""
    monkeypatch.delenv("FEDCOMPOSITE_DATA", raising=False)
    monkeypatch.setenv("FEDCOMPOSITE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A web server on this machine that has the mushrooms: its folder and the requests it got."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *args):
            asked.append(self.path)

    asked = []
    folder = tmp_path / "site"
    folder.mkdir()
    text = b"1 3:1 9:1\n2 1:1\n" * 20
    (folder / "mushrooms.gz").write_bytes(gzip.compress(text))
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        address = f"http://127.0.0.1:{server.server_port}/mushrooms.gz"
        file = File("libsvm-extra/mushrooms", hashlib.sha256(text).hexdigest(), (address,))
        monkeypatch.setitem(FILES, "mushrooms", (file,))
        yield folder, asked
        server.shutdown()
        thread.join()


def places(shown):
    """The table of `data list`: name and last column."""
    rows = [line.strip("│ ").split("│") for line in shown.splitlines() if line.startswith("│")]
    return {cells[0].strip(): cells[-1].strip() for cells in rows}


def test_data_list_says_where(alone, tmp_path, monkeypatch, cli):
    found = places(cli("data", "list", check=0).out)
    assert set(found) == set(fc.data.DATASETS)
    assert found["heart_disease"] == found["wisconsin"] == "shipped"
    assert found["synthetic"] == found["digits"] == "no files needed"
    assert found["mapped"] == found["image_folders"] == "your own files"
    assert found["mnist"] == found["cifar10"] == "to download"
    (alone / "a9a").mkdir(parents=True)
    (alone / "a9a" / "a9a.bz2").write_bytes(b"")
    beside = tmp_path / "data-cifar10"
    beside.mkdir()
    for file in FILES["cifar10"]:
        (beside / f"{file.path.partition('/')[2]}.xz").write_bytes(b"")
    own = tmp_path / "mine"
    shutil.copytree(SHIPPED / "heart-disease", own / "heart-disease")
    monkeypatch.setenv("FEDCOMPOSITE_DATA", str(own))
    found = places(cli("data", "list", check=0).out)
    assert found["a9a"] == "cached, to download"  # one of its two files
    assert found["cifar10"] == f"found in {beside}"
    assert found["heart_disease"] == f"found in {own}"
    assert found["wisconsin"] == "shipped"


def test_data_fetch_fills_the_cache(alone, site, cli):
    _, asked = site
    assert places(cli("data", "list", check=0).out)["mushrooms"] == "to download"
    shown = cli("data", "fetch", "mushrooms", "wine", "heart_disease", check=0).out
    assert shown.splitlines() == ["mushrooms: cached", "wine: no files needed", "heart_disease: shipped"]
    assert (alone / "libsvm-extra" / "mushrooms.gz").exists()
    cli("data", "fetch", "mushrooms", check=0)
    assert len(asked) == 1
    assert "40" in cli("data", "describe", "mushrooms", check=0).out
    assert len(asked) == 1


def test_data_fetch_failures(alone, site, tmp_path, monkeypatch, cli):
    folder, _ = site
    assert "did you mean 'mushrooms'" in cli("data", "fetch", "mushroom", check=2).err
    whole = (folder / "mushrooms.gz").read_bytes()
    (folder / "mushrooms.gz").write_bytes(whole[:-12])
    assert "cannot be decompressed" in cli("data", "fetch", "mushrooms", check=1).err
    (folder / "mushrooms.gz").write_bytes(gzip.compress(b"something else"))
    assert "wrong checksum" in cli("data", "fetch", "mushrooms", check=1).err
    (folder / "mushrooms.gz").unlink()
    monkeypatch.setenv("FEDCOMPOSITE_DATA", str(tmp_path / "nowhere"))
    stderr = cli("data", "fetch", "mushrooms", check=1).err
    for tried in (tmp_path / "nowhere" / "libsvm-extra", alone / "libsvm-extra", "HTTP 404"):
        assert str(tried) in stderr
    assert not any(p.is_file() for p in alone.rglob("*"))


def test_missing_data_stop_a_run_before_it_begins(alone, site, tmp_path, cli):
    folder, _ = site
    (folder / "mushrooms.gz").unlink()
    path = tmp_path / "c.toml"
    path.write_text(LINEAR.replace('"heart_disease"', '"mushrooms"'))
    assert "[data] mushrooms: mushrooms was not found. Tried" in cli("run", path, "--out", tmp_path / "r", check=2).err
    assert not (tmp_path / "r").exists()


def test_models_are_listed(cli):
    shown = cli("list", "models", check=0).out
    for name in fc.models.MODELS:
        assert name in shown
