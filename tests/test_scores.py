"""Metrics as additive counts, against scikit-learn, and over parties."""

import warnings
from dataclasses import dataclass

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.special import expit, softmax
from sklearn import metrics as sk
from sklearn.calibration import calibration_curve
from torch import nn

import fedcomposite as fc
from fedcomposite import metrics
from fedcomposite.problems import Evaluation, Measures, summarise
from fedcomposite.problems.losses import LOSSES

M = metrics.METRICS


def overall(metric, outputs, targets):
    """The value from counts of all samples, and from those of seven clients."""
    owner = torch.arange(len(targets)) * 7 // max(1, len(targets))
    one = metric.counts(outputs, targets, torch.zeros(len(targets), dtype=torch.long), 1)
    seven = metric.counts(outputs, targets, owner, 7)
    assert one.dtype == seven.dtype == torch.float64
    assert len(seven) == 7
    torch.testing.assert_close(one, seven.sum(0, keepdim=True), rtol=1e-12, atol=1e-9, equal_nan=True)
    return float(metric.value(one[0])), float(metric.value(seven.sum(0)))


def samples(kind, seed, count=200):
    """Outputs and targets, with ties, equal outputs and a class that is never predicted or never there."""
    rng = np.random.default_rng(seed)
    if kind == "regression":
        y = 5 + rng.standard_normal(count)
        return torch.tensor(y + rng.standard_normal(count)), torch.tensor(y)
    if kind == "binary":
        z = np.round(rng.standard_normal(count) * 2, seed % 3)
        return torch.tensor(z), torch.tensor((z + 2 * rng.standard_normal(count) > 0.5).astype(int))
    each = (count, 3) if kind == "labels" else (count,)
    z = rng.standard_normal((*each, 5))
    z[..., 3] -= 20 * (seed % 2)  # never predicted
    y = np.where(rng.random(each) < 0.5, z.argmax(-1), rng.integers(0, 4 + seed % 2, each))
    return torch.tensor(z), torch.tensor(y)


def probability(z):
    return expit(z) if z.ndim == 1 else softmax(z, axis=1)


def labels(z):
    return (z >= 0).astype(int) if z.ndim == 1 else z.argmax(1)


def expected_calibration_error(z, y, bins=15):
    p = probability(z)
    said, so = (p, y) if p.ndim == 1 else (p.max(1), p.argmax(1) == y)
    so = np.asarray(so, int)
    if len(np.unique(so)) < 2:
        return None
    true, guess = calibration_curve(so, said, n_bins=bins)
    inside = np.bincount(np.searchsorted(np.linspace(0, 1, bins + 1)[1:-1], said), minlength=bins)
    return float((np.abs(true - guess) * inside[inside > 0]).sum() / len(y))


ORACLES = {
    "accuracy": lambda z, y: sk.accuracy_score(y, labels(z)),
    "balanced_accuracy": lambda z, y: sk.balanced_accuracy_score(y, labels(z)),
    "f1": lambda z, y: sk.f1_score(y, labels(z), average="macro"),
    "log_loss": lambda z, y: sk.log_loss(y, probability(z), labels=np.arange(2 if z.ndim == 1 else z.shape[1])),
    "brier": lambda z, y: (
        sk.brier_score_loss(y, expit(z)) if z.ndim == 1 else np.mean(((softmax(z, axis=1) - np.eye(5)[y]) ** 2).sum(1))
    ),
    "calibration_error": expected_calibration_error,
    "iou": lambda z, y: sk.jaccard_score(y, labels(z), average="macro"),
    "dice": lambda z, y: sk.f1_score(y, labels(z), average="macro"),
    "perplexity": lambda z, y: np.exp(sk.log_loss(y, probability(z), labels=np.arange(5))),
    "r2": lambda z, y: sk.r2_score(y, z),
    "mae": lambda z, y: sk.mean_absolute_error(y, z),
}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("name", "kind"),
    [(n, k) for n, cls in M.items() for k in cls.fits if n not in ("auc", "c_index")],
    ids=lambda v: str(v),
)
def test_metrics_against_scikit_learn(name, kind, seed):
    outputs, targets = samples(kind, seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # predicted classes that y_true does not have
        flat = outputs.flatten(0, -2) if kind == "labels" else outputs
        expected = ORACLES[name](flat.numpy(), targets.flatten().numpy())
    assert overall(M[name](), outputs, targets) == pytest.approx((expected, expected), rel=1e-10)


@pytest.mark.parametrize("seed", range(12))
def test_auc_exact_and_in_bins_within_the_stated_error(seed):
    rng = np.random.default_rng(seed)
    outputs, targets = samples("binary", seed, 150)
    if seed > 5:  # scales from all in one bin to all in the outermost ones
        outputs = outputs * 10.0 ** rng.integers(-6, 6)
    expected = sk.roc_auc_score(targets, outputs)
    assert metrics.exact_auc(outputs, targets) == pytest.approx(expected, abs=1e-12)
    assert metrics.exact_auc(outputs, 2 * targets - 1) == pytest.approx(expected, abs=1e-12)
    for bins in (1, 2, 8, 64, 1024):
        metric = metrics.AUC(bins)
        counts = metric.counts(outputs, targets, torch.zeros(150, dtype=torch.long), 1)[0]
        error = metric.details(counts)["error"]
        assert abs(float(metric.value(counts)) - expected) <= error + 1e-12
        assert 0 <= error <= 0.5
    assert overall(metrics.AUC(), outputs, targets) == pytest.approx((float(metric.value(counts)),) * 2)
    two = torch.stack([-outputs / 2, outputs / 2], 1)  # two outputs stand for their difference
    assert metrics.AUC().exact(two, targets) == pytest.approx(expected, abs=1e-12)


def test_auc_of_distinct_scores_that_share_no_bin_is_exact():
    z = torch.linspace(-3, 3, 100, dtype=torch.float64)
    y = (torch.arange(100) % 3 == 0).long()
    metric = metrics.AUC(4096)
    counts = metric.counts(z, y, torch.zeros(100, dtype=torch.long), 1)[0]
    assert metric.details(counts) == {"error": 0.0}
    assert float(metric.value(counts)) == pytest.approx(sk.roc_auc_score(y, z), abs=1e-14)


def test_one_class_and_empty_parts():
    z, y = torch.tensor([0.5, -1.0, 2.0]), torch.tensor([1, 1, 1])
    assert np.isnan(metrics.exact_auc(z, y))
    assert np.isnan(overall(metrics.AUC(), z, y)).all()
    assert overall(metrics.BalancedAccuracy(), z, y) == pytest.approx((2 / 3, 2 / 3))
    for cls in M.values():
        kind = cls.fits[0]
        nothing = torch.zeros(0, 5) if kind in ("multiclass", "labels") else torch.zeros(0, dtype=torch.float64)
        assert np.isnan(overall(cls(), nothing, torch.zeros(0, dtype=torch.long))).all(), cls
    assert np.isnan(metrics.exact_auc([], []))
    assert np.isnan(overall(metrics.R2(), torch.ones(1), torch.ones(1))).all()
    flat = torch.full((5,), 1 / 3, dtype=torch.float64)
    assert overall(metrics.R2(), flat, flat) == (1.0, 1.0) == (sk.r2_score(flat, flat),) * 2
    assert overall(metrics.R2(), flat + 1, flat) == (0.0, 0.0) == (sk.r2_score(flat, flat + 1),) * 2


def test_a_model_of_nan_has_metrics_of_nan():
    z, y = torch.tensor([0.5, torch.nan, 2.0]), torch.tensor([0, 1, 1])
    for metric in (metrics.AUC(), metrics.LogLoss(), metrics.Brier()):
        assert np.isnan(overall(metric, z, y)).all()
    assert np.isnan(metrics.exact_auc(z, y))


def test_reliability_table():
    outputs, targets = samples("binary", 1, 400)
    metric = metrics.Calibration(bins=10)
    counts = metric.counts(outputs, targets, torch.zeros(400, dtype=torch.long), 1)[0]
    table = metric.table(counts)
    true, said = calibration_curve(targets.numpy(), expit(outputs.numpy()), n_bins=10)
    there = table[table["samples"] > 0]
    np.testing.assert_allclose(there["observed"], true)
    np.testing.assert_allclose(there["predicted"], said)
    assert table["samples"].sum() == 400
    assert len(table) == 10


# -- problems -------------------------------------------------------------------------------------------------------


def split_silos(kind="logistic", clients=5):
    rng = np.random.default_rng(0)
    arrays = []
    for i in range(clients):
        X = rng.standard_normal((20 + 9 * i, 4))
        y = X @ [1.0, -2.0, 0.5, 0.0] + rng.standard_normal(len(X))
        arrays.append((X, y if kind == "regression" else np.digitize(y, [-1, 1]) if kind == "many" else (y > 0) * 1.0))
    return fc.Silos.from_arrays(arrays).split(test=0.2, validation=0.25)


CASES = {
    "logistic": ("logistic", ["auc", "f1", "log_loss", "brier", "calibration_error", "balanced_accuracy"]),
    "hinge": ("logistic", ["auc", "f1"]),
    "multinomial": ("many", ["f1", "log_loss", "brier", "calibration_error", "balanced_accuracy"]),
    "least_squares": ("regression", ["r2", "mae"]),
    "network": ("many", ["f1", "log_loss", "brier"]),
    "network of two": ("logistic", ["auc", "f1", "log_loss", "brier"]),
    "network mse": ("regression", ["r2", "mae"]),
}


def make(case, **options):
    kind, names = CASES[case]
    silos = split_silos(kind)
    if not case.startswith("network"):
        return fc.Problem(silos, loss=case, metrics=names, bias=True, **options)
    torch.manual_seed(0)
    width = {"network": 3, "network of two": 2, "network mse": 1}[case]
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, width)).double()
    return fc.Problem(silos, model=model, loss="mse" if width == 1 else "cross_entropy", metrics=names, **options)


def point(problem, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(problem.dimension, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("case", CASES)
def test_every_part_and_silo_against_scikit_learn(case):
    problem = make(case)
    x, silos = point(problem), problem.silos
    values = problem.evaluate(x).metrics
    table = problem.scores(x)
    assert list(table.index) == [*silos.names, "all"]
    owner = np.repeat(np.arange(5), silos.sizes)
    parts = {"train": (silos.features, silos.targets, owner)}
    parts |= {k: (*v, silos.held_by[k].numpy()) for k, v in silos.held_out.items()}
    assert set(parts) == {"train", "validation", "test"}
    for part, (X, y, who) in parts.items():
        z = problem.predict(x, X).numpy()
        z = z[:, 0] if z.ndim == 2 and z.shape[1] == 1 else z
        for metric in problem.measures.metrics:
            for row, where in [("all", np.ones(len(y), bool)), ("client 3", who == 3)]:
                target = y.numpy()[where].astype(float if case in ("least_squares", "network mse") else int)
                if metric.name == "auc":
                    score = z[where] if z.ndim == 1 else z[where, 1] - z[where, 0]
                    expected = sk.roc_auc_score(target, score)
                elif metric.name == "brier" and z.ndim == 2:
                    square = (softmax(z[where], axis=1) - np.eye(z.shape[1])[target]) ** 2
                    expected = square.sum(1).mean() / (2 if z.shape[1] == 2 else 1)
                else:
                    expected = ORACLES[metric.name](z[where], target)
                assert table.loc[row, f"{part}_{metric.name}"] == pytest.approx(expected, rel=1e-9), metric
                if row == "all" and metric.name != "auc":
                    assert float(values[f"{part}_{metric.name}"]) == pytest.approx(expected, rel=1e-9)
                if row == "all" and metric.name == "auc":
                    error = float(values[f"{part}_auc_error"])
                    assert abs(float(values[f"{part}_auc"]) - expected) <= error + 1e-12
                    assert error < 0.01
            each = table[f"train_{metric.name}"].drop("all")
            if part == "train" and metric.name != "auc":
                got = [float(values[f"client_{metric.name}_{k}"]) for k in ("min", "mean", "max")]
                assert got == pytest.approx([each.min(), each.mean(), each.max()], rel=1e-9)
        assert table[f"{part}_samples"].tolist() == [*np.bincount(who, minlength=5), len(y)]


def shares(silos, cuts):
    """The silos of consecutive clients, as parties hold them."""
    for a, b in zip([0, *cuts], [*cuts, len(silos)], strict=True):
        held = {k: (X[(o >= a) & (o < b)], y[(o >= a) & (o < b)]) for k, (X, y) in silos.held_out.items()
                for o in [silos.held_by[k]]}  # fmt: skip
        yield fc.Silos.from_arrays([silos[i] for i in range(a, b)], **held)


@pytest.mark.parametrize("samples", [None, 40])
@pytest.mark.parametrize("cuts", [[1], [2, 4], [1, 2, 3, 4]])
@pytest.mark.parametrize("case", CASES)
def test_any_division_into_parties_gives_the_same_values(case, cuts, samples):
    network = case.startswith("network")
    if samples and not network:
        pytest.skip("a linear model is measured on all samples")
    problem = make(case, **({"evaluation_samples": samples} if network else {}))
    x = point(problem)
    whole = problem.evaluate(x)
    gathered = {}
    for silos in shares(problem.silos, cuts):
        options = {"evaluation_samples": samples and 8 * len(silos)} if network else {}
        part = fc.Problem(
            silos, loss=problem.loss.name if network else problem.loss.adapt(problem.silos), bias=problem.bias,
            model=problem.model, metrics=problem.measures.metrics, **options,
        )  # fmt: skip
        for name, rows in part.evaluate(x).counts.items():
            assert rows.ndim == 2
            gathered.setdefault(name, []).append(rows)
    values = problem.measures.summarise({k: torch.cat(v) for k, v in gathered.items()})
    expected = problem.measures.summarise(whole.counts)
    if samples is None:
        assert values == pytest.approx(expected, rel=1e-10)
    else:  # held-out samples are chosen by each party
        alike = {k for k in expected if k.startswith(("train", "client", "evaluated"))}
        assert {k: values[k] for k in alike} == pytest.approx({k: expected[k] for k in alike}, rel=1e-10)
        assert set(values) == set(expected)


def test_widths_tell_the_form_of_counts():
    for case in CASES:
        problem = make(case)
        seen = problem.evaluate(point(problem))
        outputs = problem.predict(point(problem), problem.silos.features)
        widths = problem.measures.widths(outputs.shape[1] if outputs.ndim == 2 else 1)
        for name, rows in seen.counts.items():
            assert rows.shape[1] == widths[name.split("/")[1]]


def test_rows_that_saw_some_samples_stand_for_all():
    rows = {
        "train/samples": torch.tensor([[2.0, 10.0], [5.0, 5.0]]),
        "train/accuracy": torch.tensor([[1.0, 2.0], [5.0, 5.0]]),
    }
    made = summarise([metrics.Accuracy()], rows, clients=True)
    assert made == {
        "evaluated_samples": 7,
        "train_accuracy": pytest.approx((0.5 * 10 + 5) / 15),
        "client_accuracy_min": 0.5,
        "client_accuracy_mean": 0.75,
        "client_accuracy_max": 1.0,
    }
    assert Evaluation(torch.zeros(()), torch.zeros(1), rows, Measures((metrics.Accuracy(),))).metrics.keys() == {
        "train_accuracy"
    }


def test_defaults_are_accuracy_and_otherwise_the_loss_on_held_out_parts():
    def names(problem):
        return set(problem.evaluate(problem.smooth().start()).metrics)

    silos = split_silos()
    assert names(fc.Problem(silos)) == {"train_accuracy", "validation_accuracy", "test_accuracy"}
    regression = fc.Problem(split_silos("regression"), loss="huber")
    assert names(regression) == {"validation_loss", "test_loss"}
    X, y = regression.silos.validation
    x = point(regression)
    value = LOSSES["huber"].value(X @ x, y).mean()
    assert float(regression.evaluate(x).metrics["validation_loss"]) == pytest.approx(float(value), rel=1e-12)
    assert names(fc.Problem(silos, model=nn.Linear(4, 2))) == names(fc.Problem(silos)) | {
        "evaluated_samples", "client_accuracy_min", "client_accuracy_mean", "client_accuracy_max"
    }  # fmt: skip


def test_poisson_is_measured_in_counts():
    rng = np.random.default_rng(0)
    X = rng.standard_normal((60, 3)) / 3
    y = rng.poisson(np.exp(X @ [1.0, 0.0, -1.0])).astype(float)
    problem = fc.Problem(fc.Silos.from_arrays([(X, y)]), loss="poisson", metrics=["mae", "r2"])
    x = torch.tensor([1.0, 0.5, -1.0])
    seen = problem.evaluate(x.double()).metrics
    assert float(seen["train_mae"]) == pytest.approx(sk.mean_absolute_error(y, np.exp(X @ x.numpy())), rel=1e-12)
    assert float(seen["train_r2"]) == pytest.approx(sk.r2_score(y, np.exp(X @ x.numpy())), rel=1e-10)


def test_one_class_silos_are_left_out_of_the_range_over_clients():
    X = np.random.default_rng(0).standard_normal((12, 2))
    silos = fc.Silos.from_arrays([(X[:4], [1, 1, 1, 1]), (X[4:], [0, 1] * 4)])
    seen = fc.Problem(silos, metrics=["auc"]).evaluate(torch.ones(2, dtype=torch.float64)).metrics
    assert float(seen["client_auc_min"]) == float(seen["client_auc_max"]) == float(seen["client_auc_mean"])
    assert not np.isnan(float(seen["train_auc"]))
    with pytest.warns(fc.OneClassWarning, match="all 4 training samples have the label 1"):
        lone = fc.Problem(fc.Silos.from_arrays([silos[0]]), metrics=["auc"])
    assert np.isnan(float(lone.evaluate(torch.ones(2, dtype=torch.float64)).metrics["client_auc_min"]))


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"metrics": ["acuracy"]}, "unknown metric 'acuracy'; did you mean 'accuracy'"),
        ({"metrics": ["r2"]}, "'r2' is for regression problems; with this loss it is binary"),
        ({"metrics": "auc"}, "must be a list of names or metrics"),
        ({"metrics": [3]}, "unknown metric 3"),
        ({"metrics": [metrics.AUC]}, r"AUC is a class: make one of it, AUC\(\)"),
        ({"metrics": ["brier"], "loss": "hinge"}, "'brier' needs probabilities, which Hinge"),
        ({"metrics": ["auc", metrics.AUC(10)]}, "the name 'auc' of a metric is taken"),
        (
            {"metrics": ["auc"], "loss": "least_squares"},
            "'auc' is for binary problems; with this loss it is regression",
        ),
        ({"metrics": ["auc"], "model": nn.Linear(4, 3)}, "'auc' is for binary problems"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(options, line):
    with pytest.raises(ValueError, match=line) as caught:
        fc.Problem(split_silos(), **options)
    assert "\n" not in str(caught.value)


@dataclass(frozen=True)
class Sensitivity(metrics.Metric):
    """The share of class 1 that is found."""

    name = "sensitivity"
    fits = ("binary",)

    def counts(self, outputs, targets, owner, n):
        ones = targets == 1
        return metrics.per_client([ones & (metrics.predicted(outputs) == 1), ones], owner, n)

    def value(self, counts):
        return counts[..., 0] / counts[..., 1]


def test_a_metric_of_ones_own_in_ten_lines():
    problem = fc.Problem(split_silos(), metrics=[Sensitivity(), "auc"])
    run = fc.simulate(problem, fc.algorithms.FedAvg(local_steps=2, step=0.1), rounds=3)
    X, y = problem.silos.test
    expected = sk.recall_score(y, (problem.predict(run.solution, X) >= 0).numpy())
    assert run.history[-1].test_sensitivity == pytest.approx(expected, rel=1e-12)
    assert {"client_sensitivity_min", "test_auc", "test_auc_error"} <= set(run.history[-1])


def test_a_loss_of_ones_own_with_one_output_has_margins():
    silos = split_silos()
    model = nn.Linear(4, 1).double()
    problem = fc.Problem(
        silos, model=model, metrics=["auc", "accuracy"],
        loss=lambda z, y: nn.functional.binary_cross_entropy_with_logits(z[:, 0], y, reduction="none"),
    )  # fmt: skip
    x = point(problem)
    z = problem.predict(x, silos.features)[:, 0]
    table = problem.scores(x).loc["all"]
    assert table["train_auc"] == pytest.approx(sk.roc_auc_score(silos.targets, z))
    assert table["train_accuracy"] == pytest.approx(sk.accuracy_score(silos.targets, z >= 0))
    assert "test_loss" in problem.evaluate(x).metrics


# -- the validation part --------------------------------------------------------------------------------------------


def test_split_holds_out_both_parts_and_knows_whose_they_are():
    silos = fc.Silos.from_arrays([(np.arange(20.0).reshape(10, 2) + 100 * i, [i] * 10) for i in range(3)])
    parts = silos.split(test=0.2, validation=0.3, seed=1)
    assert parts.sizes.tolist() == [5, 5, 5]
    for name, each in (("test", 2), ("validation", 3)):
        _, y = parts.held_out[name]
        assert y.tolist() == parts.held_by[name].tolist() == [i for i in range(3) for _ in range(each)]
    everything = torch.cat([parts.features, parts.test[0], parts.validation[0]])
    assert sorted(map(tuple, everything.tolist())) == sorted(map(tuple, silos.features.tolist()))
    again = silos.split(test=0.2, seed=1)
    assert torch.equal(again.test[0], parts.test[0])  # asking for validation data leaves the test data as they are
    only = again.split(test=0.0, validation=0.25)
    assert torch.equal(only.test[0], again.test[0])
    assert len(only.validation[1]) == 6
    assert set(only.held_by) == {"test", "validation"}
    with pytest.raises(fc.data.DataError, match="have validation data already"):
        parts.split(test=0.0, validation=0.1)
    with pytest.raises(fc.data.DataError, match=r"split: test = 0\.0, must be between 0 and 1"):
        silos.split(test=0.0)
    with pytest.raises(fc.data.DataError, match="split: validation = -1"):
        silos.split(validation=-1)


def test_validation_parts_travel():
    silos = fc.data.load("breast_cancer", test=0.1, validation=0.2)
    assert (len(silos.test[1]), len(silos.validation[1]), len(silos.targets)) == (57, 114, 398)
    dealt = silos.partition("dirichlet", clients=4)
    assert torch.equal(dealt.validation[0], silos.validation[0])
    assert {k: len(v) for k, v in dealt.held_by.items()} == {"validation": 114, "test": 57}  # whose they are now
    raw = fc.data.load("breast_cancer", test=0.1, validation=0.2, standardize=False)
    scaled = (raw.validation[0] - raw.features.mean(0)) / raw.features.std(0, correction=0)
    torch.testing.assert_close(silos.validation[0], scaled)
    assert fc.data.load("synthetic", clients=2, samples=20, validation=0.1).validation[0].shape == (4, 20)
    with pytest.raises(fc.data.DataError, match="validation data has samples of shape"):
        fc.Silos.from_arrays([(np.ones((3, 2)), [0, 1, 0])], validation=(np.ones((3, 4)), [0, 1, 0]))


def test_metrics_in_a_configuration(tmp_path, cli):
    (tmp_path / "c.toml").write_text(
        """
seed = 0
[data]
name = "synthetic"
clients = 3
samples = 40
features = 5
test = 0.2
validation = 0.2
[problem]
metrics = ["auc", "log_loss"]
[algorithm]
name = "FedAvg"
local_steps = 2
step = 0.5
[run]
rounds = 2
"""
    )
    cli("run", tmp_path / "c.toml", "--out", tmp_path / "r", check=0)
    last = pd.read_json(tmp_path / "r" / "history.jsonl", lines=True).iloc[-1]
    for name in ("validation_auc", "test_auc_error", "train_log_loss", "client_auc_min"):
        assert np.isfinite(last[name])
    seen = cli("run", tmp_path / "c.toml", "--out", tmp_path / "s", "--set", "problem.metrics=['r2']", check=2)
    assert "'r2' is for regression problems" in seen.err


@dataclass(frozen=True)
class Positive(metrics.Metric):
    """The share of samples whose largest output is positive, whatever it says."""

    name = "positive"

    def counts(self, outputs, targets, owner, n):
        return metrics.per_client([outputs.view(len(outputs), -1).amax(1) > 0, 1.0], owner, n)

    def value(self, counts):
        return counts[..., 0] / counts[..., 1]


def any_problem(kind):
    """A problem of each kind that a metric may meet."""
    if kind == "cox":
        return fc.Problem(fc.data.load("survival"), loss="cox", metrics=[Positive()])
    if kind == "multinomial":
        return fc.Problem(fc.data.load("wine").standardize(), loss=kind, metrics=[Positive()])
    if kind == "network":
        return fc.Problem(split_silos(), model=nn.Linear(4, 2), metrics=[Positive()])
    if kind == "mse":
        return fc.Problem(split_silos(), model=nn.Linear(4, 1), loss="mse", metrics=[Positive()])
    return fc.Problem(split_silos(), loss=kind, metrics=[Positive()])


@pytest.mark.parametrize(
    "kind", ["logistic", "least_squares", "hinge", "quantile", "poisson", "multinomial", "cox", "network", "mse"]
)
def test_a_metric_of_ones_own_goes_with_any_loss(kind):
    problem = any_problem(kind)
    x = torch.linspace(-1, 1, problem.dimension).to(problem.dtype)
    seen = problem.evaluate(x).metrics
    outputs = problem.predict(x, problem.silos.features)
    outputs = outputs.exp() if kind == "poisson" else outputs  # the mean, as for all metrics
    share = float((outputs.view(len(outputs), -1).amax(1) > 0).double().mean())
    assert seen["train_positive"] == pytest.approx(share, abs=1e-12)
    assert problem.scores(x)["train_positive"].iloc[-1] == pytest.approx(share, abs=1e-12)
