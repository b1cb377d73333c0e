"""Networks at sites: every loss that a simulation takes by name, with what belongs to it, plain and in secure sums."""

import sys
import types
from importlib.metadata import EntryPoint

import numpy as np
import pytest
import safetensors.torch
import tomli_w
import torch
from local_federation import LocalSites, federate, make_sites, method, opened, write
from secure_sites import secure_sites
from torch import nn

import fedcomposite as fc
from fedcomposite import simulate
from fedcomposite.data import Silos
from fedcomposite.experiments import RunFolder
from fedcomposite.experiments.config import ConfigError
from fedcomposite.federation import wire
from fedcomposite.federation.coordinator.coordinator import Coordinator
from fedcomposite.federation.coordinator.delivery import FederationError, Settings
from fedcomposite.federation.coordinator.jobs import Job, carry_out
from fedcomposite.federation.folders import FederationFolder
from fedcomposite.federation.orders import Order
from fedcomposite.federation.shape import AgreementError, parse
from fedcomposite.registry import Registry

NAMES = list("abc")


class Tokens(nn.Module):
    """Labels of a sample's d features: scores ``(N, classes, d)``, or with the classes last."""

    def __init__(self, shape, classes, last=False):
        super().__init__()
        self.scores, self.last, self.shape = nn.Linear(shape[0], classes * shape[0]), last, (classes, shape[0])

    def forward(self, x):
        made = self.scores(x).unflatten(1, self.shape)
        return made.movedim(1, -1) if self.last else made


def normed(shape, classes):
    """A network with a batch norm."""
    return nn.Sequential(nn.Linear(shape[0], 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, classes))


def ordinal(outputs, targets, scale=1.0):
    """Labels 0, ..., k: log-odds of being above each of k thresholds; a value per sample."""
    above = (targets.unsqueeze(1) > torch.arange(outputs.shape[1], device=outputs.device)).to(outputs.dtype)
    return nn.functional.binary_cross_entropy_with_logits(scale * outputs, above, reduction="none").sum(1)


class Logcosh(nn.Module):
    """Of somebody else: the mean over a batch."""

    def __init__(self, width: float = 1.0) -> None:
        super().__init__()
        self.width = width

    def forward(self, outputs, targets):
        return ((outputs.squeeze(-1) - targets) / self.width).cosh().log().mean()


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    """Networks and losses of a package that is installed here."""
    package = types.ModuleType("ward")
    package.__dict__.update(Tokens=Tokens, normed=normed, ordinal=ordinal, Logcosh=Logcosh)
    monkeypatch.setitem(sys.modules, "ward", package)
    given = {
        "fedcomposite.models": {"tokens": "Tokens", "normed": "normed"},
        "fedcomposite.model_losses": {"ordinal": "ordinal", "logcosh": "Logcosh"},
    }

    def points(registry):
        return [EntryPoint(k, f"ward:{v}", registry.group) for k, v in given.get(registry.group, {}).items()]

    monkeypatch.setattr(Registry, "_points", points)


def drawn(kind):
    """Samples of three sites whose targets are of a kind."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(3, 20, 4))
    targets = {
        "classes": lambda: rng.integers(0, 3, (3, 20)),
        "lacking": lambda: np.stack([rng.integers(0, 3 - (i == 1), 20) for i in range(3)]),
        "numbers": lambda: rng.normal(size=(3, 20)),
        "whole numbers": lambda: rng.integers(0, 4, (3, 20)).astype(float),
        "several": lambda: rng.normal(size=(3, 20, 2)),
        "signs": lambda: rng.choice([-1.0, 1.0], (3, 20)),
        "flags": lambda: rng.integers(0, 2, (3, 20, 3)).astype(float),
        "labels": lambda: np.where(rng.uniform(size=(3, 20, 4)) < 0.2, -100, rng.integers(0, 3, (3, 20, 4))),
    }[kind]()
    return Silos.from_arrays(list(zip(X, targets, strict=True)), names=NAMES)


MLP = {"name": "mlp", "options": {"hidden": [5]}}
CASES = {
    "cross-entropy": ("classes", {}, MLP),
    "a class lacking": ("lacking", {"metrics": ["f1", "log_loss"]}, MLP),
    "batch norm": ("classes", {}, {"name": "normed"}),
    "class weights": ("lacking", {"class_weight": {"2": 5.0}}, MLP),
    "weights of signs": ("signs", {"class_weight": {"-1": 3.0}}, MLP),
    "label smoothing": ("classes", {"loss_options": {"label_smoothing": 0.2}, "class_weight": {"1": 2.0}}, MLP),
    "mse": ("numbers", {"loss": "mse", "metrics": ["r2", "mae"]}, MLP),
    "mse of counts": ("whole numbers", {"loss": "mse"}, MLP),
    "mse of several": ("several", {"loss": "mse"}, MLP),
    "mae": ("numbers", {"loss": "mae"}, MLP),
    "huber": ("numbers", {"loss": "huber", "loss_options": {"delta": 0.3}}, MLP),
    "poisson": ("whole numbers", {"loss": "poisson"}, MLP),
    "a flag": ("signs", {"loss": "binary_cross_entropy", "metrics": ["auc"]}, MLP),
    "flags": ("flags", {"loss": "binary_cross_entropy"}, MLP),
    "labels second": ("labels", {"metrics": ["iou", "dice"]}, {"name": "tokens", "class_axis": 1}),
    "labels last": ("labels", {"metrics": ["perplexity"]}, {"name": "tokens", "options": {"last": True}}),
    "labels weighted": ("labels", {"class_weight": {"1": 4.0}}, {"name": "tokens", "class_axis": 1}),
    "ordinal": ("whole numbers", {"loss": "ordinal", "loss_options": {"scale": 2.0}}, MLP | {"outputs": 3}),
    "a mean": ("numbers", {"loss": "logcosh", "loss_options": {"width": 2.0}}, MLP),
}


def sites(silos, folder, make=make_sites, **limits):
    made = make(silos, folder, opened(**limits))
    labels = torch.unique(silos.targets)
    if len(labels) < 10:
        for one in made:
            one._labels = [float(v) for v in labels if v != -100]  # what site.toml declares
    return made


def both(kind, problem, model, folder, secure=False, name="Scaffold", **run):
    """The federation's run, and the simulator's."""
    silos, algorithm = drawn(kind), method(name)
    given = {"problem": problem, "model": {"evaluation_samples": 0, **model}}
    text = tomli_w.dumps(given) + write(algorithm, rounds=2, dtype="float64", **run)
    _, found = federate(
        LocalSites(sites(silos, folder, secure_sites if secure else make_sites)), text, Settings(secure=secure)
    )
    same = {"stationarity_step": 0.1, "backend": "loop", "dtype": torch.float64, **run}
    for part in ("sparsity", "structure"):  # the experiment's problem has them
        same.pop(part, None)
    return found, simulate(parse(text).make_problem(silos), algorithm, rounds=2, **same)


def compare(found, want, to):
    torch.testing.assert_close(found.solution, want.solution, rtol=0, atol=to)
    assert not torch.equal(want.solution, torch.zeros_like(want.solution))
    mine, other = dict(found.history[-1]), dict(want.history[-1])
    measured = {k for k in other if k.startswith(("train_", "client_", "objective", "stationarity"))}
    assert measured
    for key in measured & mine.keys():
        assert mine[key] == pytest.approx(other[key], abs=10 * to, nan_ok=True), key
    return measured - mine.keys()


@pytest.mark.parametrize("case", CASES)
def test_a_loss_of_networks_equals_the_simulator(case, tmp_path):
    found, want = both(*CASES[case], tmp_path, batch_size=4)
    assert not compare(found, want, 1e-12)


@pytest.mark.parametrize("case", ["batch norm", "class weights", "mse of several", "huber", "labels second", "ordinal"])
def test_a_loss_of_networks_in_secure_sums(case, tmp_path):
    """Full gradients; what single sites have is not told."""
    found, want = both(*CASES[case], tmp_path, secure=True)
    assert {k.split("_")[0] for k in compare(found, want, 1e-9)} <= {"client"}


def test_whole_units_at_sites_equal_the_simulator(tmp_path):
    """Sites find the same units as the coordinator, whatever data they have."""
    run = {"batch_size": 4, "sparsity": 0.6, "structure": "filters"}
    model = {"name": "mlp", "options": {"hidden": [64]}}
    found, want = both("classes", {}, model, tmp_path, name="FedMid", **run)
    compare(found, want, 1e-12)
    assert torch.equal(found.solution == 0, want.solution == 0)
    assert abs(float((found.solution == 0).double().mean()) - 0.6) < 0.02
    assert found.history[-1].bytes_down == want.history[-1].bytes_down


def asked(silos, folder, problem, model=MLP, **limits):
    """Run an experiment at sites until one of them refuses."""
    text = tomli_w.dumps({"problem": problem, "model": model}) + write(method("FedAvg"), rounds=1)
    return federate(LocalSites(sites(silos, folder, **limits)), text, Settings(patience=0))


def test_what_a_site_refuses_says_what_to_do(tmp_path):
    """Losses that nobody offers, options that a loss lacks, weights of unknown classes, networks that are forbidden."""
    silos = drawn("classes")
    with pytest.raises(FederationError, match=r"allows linear models only .networks = true"):
        asked(silos, tmp_path / "1", {}, networks=False)
    with pytest.raises(ConfigError, match=r"'ordinall' is not for a model; did you mean 'ordinal'.*entry points in"):
        asked(silos, tmp_path / "2", {"loss": "ordinall"})
    with pytest.raises(ConfigError, match=r"loss 'ordinal' has no option 'scales'; did you mean 'scale'"):
        asked(silos, tmp_path / "3", {"loss": "ordinal", "loss_options": {"scales": 2.0}})
    with pytest.raises(ConfigError, match=r"delta = -1.0, must be a number > 0"):
        asked(silos, tmp_path / "4", {"loss": "huber", "loss_options": {"delta": -1.0}})
    with pytest.raises(ConfigError, match=r"class_weight = 'balanced': .* number by label"):
        asked(silos, tmp_path / "5", {"class_weight": "balanced"})
    with pytest.raises(ConfigError, match=r"class_weight = .* by label .0, 1, 2"):
        asked(silos, tmp_path / "7", {"class_weight": {"7": 2.0}})
    with pytest.raises(FederationError, match=r"a class has fewer samples here than min_class = 8"):
        asked(silos, tmp_path / "8", {}, min_class=8)


def test_a_loss_that_a_site_lacks(tmp_path):
    """The coordinator has the package, a site has not: its refusal names the loss and where losses come from."""
    silos = drawn("numbers")
    there = sites(silos, tmp_path)
    text = tomli_w.dumps({"problem": {"loss": "logcosh"}, "model": MLP}) + write(method("FedAvg"), rounds=1)
    config = parse(text)
    parse.cache_clear()
    with pytest.MonkeyPatch.context() as lacking:
        lacking.setattr(Registry, "_points", lambda self: [])
        grid = LocalSites(there)
        made = Coordinator(grid, NAMES, grid.permitted, config, "job", Settings(patience=0))
        with pytest.raises(
            FederationError, match=r"refuses: .*'logcosh' is not for a model.*fedcomposite.model_losses"
        ):
            made.prepare()


def test_targets_of_another_shape_are_refused_before_memory_is_taken(tmp_path):
    """An order may name a shape of targets, of which a site would make zeros."""
    there = sites(drawn("labels"), tmp_path)
    grid = LocalSites(there)
    text = tomli_w.dumps({"model": {"name": "tokens", "class_axis": 1}}) + write(method("FedAvg"), rounds=1)
    federate(grid, text)
    _, asked, _ = grid.log[-1]
    order = Order.read(wire.text(asked, "order"))
    assert order.shape.targets == [4]
    assert order.shape.target_dtype == "int64"
    for i, change in enumerate(({"targets": [2**31, 2**31]}, {"targets": None}, {"target_dtype": "float64"})):
        wrong = order.model_copy(update={"job": f"other-{i}", "shape": order.shape.model_copy(update=change)})
        said = there[NAMES.index(order.site)].answer({**asked, **wire.content(order=wrong.model_dump_json())})
        assert "targets have another shape or type" in wire.text(said, "refusal")


def test_sites_whose_targets_differ_in_shape(tmp_path):
    several, single = drawn("several"), drawn("numbers")
    there = [*sites(several, tmp_path / "1")[:2], sites(single, tmp_path / "2")[2]]
    text = tomli_w.dumps({"problem": {"loss": "mse"}, "model": MLP}) + write(method("FedAvg"), rounds=1)
    with pytest.raises(AgreementError, match=r"c has targets of shape \[\], float64, a of shape \[2\]"):
        federate(LocalSites(there), text)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["batch norm", "class weights", "mse", "flags", "labels second", "ordinal", "a mean"])
def test_a_federated_network_is_exported_where_no_data_are(case, tmp_path, cli, monkeypatch):
    """The run folder is enough for every format, whatever the loss, and what the file computes is the network's."""
    kind, problem, model = CASES[case]
    silos = drawn(kind)
    made = FederationFolder.create(tmp_path / "fed", "127.0.0.1", 9443, NAMES, engine="local")
    folder = RunFolder(tmp_path / "run")
    folder.create()
    folder.config.write_text(tomli_w.dumps({"problem": problem, "model": model}) + write(method("FedAvg"), rounds=2))
    made.job("j1").parent.mkdir()
    made.job("j1").write_text(Job(name="j1", out=str(folder.path)).model_dump_json())
    run = carry_out(LocalSites(sites(silos, tmp_path / "s")), made, "j1")
    monkeypatch.setattr(fc.data, "load", lambda *a, **k: pytest.fail("export loads data"))
    for form, suffix in (("safetensors", "safetensors"), ("csr", "npz"), ("onnx", "onnx")):
        cli("export", folder.path, "--format", form, check=0)
        assert (folder.path / f"exported.{suffix}").is_file()
    state = safetensors.torch.load_file(folder.path / "exported.safetensors")
    module = parse(folder.config.read_text()).make_problem(silos).module(run.solution, run.buffers)
    assert set(state) <= set(module.state_dict())
    for name, tensor in module.state_dict().items():
        assert name not in state or torch.equal(state[name], tensor)
    session = pytest.importorskip("onnxruntime").InferenceSession(folder.path / "exported.onnx")
    inputs = silos.features[:5].float()
    (found,) = session.run(None, {session.get_inputs()[0].name: inputs.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), module(inputs).detach(), rtol=1e-5, atol=1e-5)
