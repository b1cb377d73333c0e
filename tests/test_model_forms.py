"""Networks as engineers bring them: pixels, tokens, several inputs, objects as outputs, batches in pieces."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import fedcomposite as fc
from fedcomposite.data.augmentation import Crop, Flip

C, H = 3, 6


class Segmenter(nn.Module):
    """Classes second, as torch has them."""

    def __init__(self, classes=C):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, classes, 1)

    def forward(self, x):
        return self.last(self.first(x.reshape(-1, 1, H, H)).relu())


class ClassesLast(Segmenter):
    def forward(self, x):
        return super().forward(x).movedim(1, -1)


class Masked(nn.Module):
    """Tokens and a mask by name; an object with logits comes out."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 2)

    def forward(self, input_ids, attention_mask):
        mask = attention_mask.unsqueeze(-1).to(self.embed.weight.dtype)
        mean = (self.embed(input_ids) * mask).sum(1) / mask.sum(1).clamp(min=1)
        return SimpleNamespace(logits=self.head(mean), hidden_states=None)


def pixels(sizes=(9, 14), ignored=True):
    rng = np.random.default_rng(0)
    made = []
    for m in sizes:
        b = rng.integers(0, C, (m, H, H))
        if ignored:
            b[rng.random(b.shape) < 0.1] = -100
        made.append((rng.normal(size=(m, 1, H, H)), b))
    return fc.Silos.from_arrays(made)


def words(sizes=(10, 17)):
    rng = np.random.default_rng(1)
    made = []
    for m in sizes:
        ids, mask = rng.integers(0, 11, (m, 5)), (np.arange(5) < rng.integers(1, 6, (m, 1))).astype(int)
        made.append((np.concatenate([ids, mask], 1), rng.integers(0, 2, m)))
    return fc.Silos.from_arrays(made)


def by_hand(problem, module, loss):
    """The mean over clients of their mean losses, and its gradient, by torch alone."""
    module = module.double()
    total = sum(loss(module, X.double(), y.long()) for X, y in problem.silos) / len(problem.silos)
    found = torch.autograd.grad(total, list(module.parameters()))
    return float(total.detach()), torch.cat([g.reshape(-1) for g in found])


def of_pixels(module, X, y):
    each = nn.functional.cross_entropy(module(X), y, reduction="none", ignore_index=-100)
    return (each.flatten(1).sum(1) / (y != -100).flatten(1).sum(1)).mean()


@pytest.mark.parametrize("module", [Segmenter, ClassesLast])
def test_pixels_with_the_classes_second_or_last(module):
    problem = fc.Problem(pixels(), model=module(), metrics=["iou", "dice"], evaluation_samples=None)
    value, slope = by_hand(problem, Segmenter(), of_pixels)
    x = problem.smooth(torch.float64).start()
    assert problem.objective(x) == pytest.approx(value, rel=1e-12)
    torch.testing.assert_close(problem.gradient(x), slope, rtol=1e-10, atol=1e-12)
    trained = problem.smooth(torch.float64).full(np.arange(2, dtype=np.uint64))(x.repeat(2, 1)).mean(0)
    torch.testing.assert_close(trained, slope, rtol=1e-10, atol=1e-12)
    run = fc.simulate(problem, fc.algorithms.FedAvg(local_steps=2, step=0.1), rounds=2, batch_size=4)
    first = run.history[0]
    assert 0 < first.train_iou < first.train_dice < 1


def test_overlaps_are_those_of_all_labels():
    problem = fc.Problem(pixels(), model=Segmenter(), metrics=["iou", "dice", "perplexity"], evaluation_samples=None)
    module, X, b = Segmenter().double(), problem.silos.features, problem.silos.targets
    with torch.no_grad():
        outputs = module(X)
    guess, there = outputs.argmax(1), b >= 0
    shares = []
    for c in range(C):
        one, two = (guess == c) & there, b == c
        both = float((one & two).sum())
        shares.append((both / float((one | two).sum()), 2 * both / float(one.sum() + two.sum())))
    lost = nn.functional.cross_entropy(outputs, b.long(), ignore_index=-100)
    found = problem.scores(problem.smooth(torch.float64).start()).iloc[-1]
    assert (found["train_iou"], found["train_dice"]) == pytest.approx(tuple(np.mean(shares, 0)), rel=1e-12)
    assert found["train_perplexity"] == pytest.approx(float(lost.exp()), rel=1e-10)


def test_where_shapes_allow_both_it_has_to_be_said():
    rng = np.random.default_rng(0)
    silos = fc.Silos.from_arrays([(rng.normal(size=(7, H, H)), rng.integers(0, H, (7, H, H)))] * 2)
    for axis, classes_second in ((1, True), (-1, False)):
        problem = fc.Problem(silos, model=Segmenter(H), class_axis=axis)
        assert problem.loss.classes_second is classes_second
    with pytest.raises(fc.DataError, match="class_axis=1"):
        fc.Problem(silos, model=Segmenter(H))
    with pytest.raises(fc.DataError, match=r"needs outputs .* the module gives \(2, 3, 6, 6\)"):
        fc.Problem(silos, model=Segmenter(), class_axis=-1)


def test_metrics_of_labels_with_a_loss_of_ones_own():
    def dice_and_entropy(outputs, targets):
        p = outputs.softmax(1)
        hit = p.gather(1, targets.unsqueeze(1).clamp(min=0)).squeeze(1)
        return nn.functional.cross_entropy(outputs, targets, reduction="none").flatten(1).mean(1) - hit.flatten(1).mean(
            1
        )

    problem = fc.Problem(pixels(ignored=False), model=Segmenter(), loss=dice_and_entropy, metrics=["iou"])
    run = fc.simulate(problem, fc.algorithms.FedAvg(local_steps=1, step=0.1), rounds=1, batch_size=4)
    usual = fc.Problem(pixels(ignored=False), model=Segmenter(), metrics=["iou"])
    same = fc.simulate(usual, fc.algorithms.FedAvg(local_steps=1, step=0.1), rounds=0, batch_size=4)
    assert run.history[0].train_iou == same.history[0].train_iou


class Largest(fc.metrics.Metric):
    """The mean of the largest output, which makes sense of any."""

    name = "largest"

    def counts(self, outputs, targets, owner, n):
        return fc.metrics.per_client([outputs.flatten(1).amax(1).double(), 1.0], owner, n)

    def value(self, counts):
        return counts[..., 0] / counts[..., 1]


def test_a_metric_of_ones_own_goes_with_any_loss():
    rng = np.random.default_rng(0)
    flags = fc.Silos.from_arrays([(rng.normal(size=(8, 4)), rng.integers(0, 2, (8, 3)).astype(float))] * 2)
    problem = fc.Problem(flags, model=nn.Linear(4, 3), loss=nn.BCEWithLogitsLoss(), metrics=[Largest()])
    run = fc.simulate(problem, fc.algorithms.FedAvg(local_steps=1, step=0.1), rounds=1)
    with torch.no_grad():
        wanted = problem.module(run.solution)(flags.features.float()).amax(1).mean()
    assert run.history[-1].train_largest == pytest.approx(float(wanted), rel=1e-6)


def test_classes_that_are_rare():
    silos = pixels()
    b = silos.targets[silos.targets >= 0]
    counts = np.bincount(b.numpy().astype(int), minlength=C)
    balanced = len(b) / (C * counts)
    for given, each in (("balanced", balanced), ({2: 5.0}, [1, 1, 5])):
        problem = fc.Problem(silos, model=Segmenter(), class_weight=given, evaluation_samples=None)

        def weighted(module, X, y, each=each):
            w = torch.as_tensor(np.asarray(each, float))[y.clamp(min=0)]
            each = nn.functional.cross_entropy(module(X), y, reduction="none", ignore_index=-100) * w
            return (each.flatten(1).sum(1) / (y != -100).flatten(1).sum(1)).mean()

        value, slope = by_hand(problem, Segmenter(), weighted)
        x = problem.smooth(torch.float64).start()
        assert problem.objective(x) == pytest.approx(value, rel=1e-12)
        torch.testing.assert_close(problem.gradient(x), slope, rtol=1e-10, atol=1e-12)
    signs = fc.Silos.from_arrays([(np.eye(4), np.array([-1, 1, 1, 1]))] * 2)
    torch.manual_seed(0)
    module = nn.Linear(4, 2)
    plain, heavy = (fc.Problem(signs, model=module, class_weight=w) for w in (None, {-1: 3.0}))
    rows = nn.functional.cross_entropy(module(torch.eye(4)), torch.tensor([0, 1, 1, 1]), reduction="none")
    x = plain.smooth().start()
    wanted = (rows * torch.tensor([3.0, 1, 1, 1])).mean().detach()
    assert heavy.objective(x) == pytest.approx(float(wanted), rel=1e-6)
    with pytest.raises(ValueError, match="'cross_entropy'"):
        fc.Problem(signs, model=module, loss=lambda o, t: o.sum(1), class_weight={1: 2.0})


WAYS = ("vmap", "loop")
NAMED = {"input_ids": (5,), "attention_mask": (5,)}


def test_several_inputs_and_an_object_as_output():
    problem = fc.Problem(words(), model=Masked(), named_inputs=NAMED, evaluation_samples=None)

    def loss(module, X, y):
        X = X.long()
        return nn.functional.cross_entropy(module(X[:, :5], X[:, 5:]).logits, y)

    value, slope = by_hand(problem, Masked(), loss)
    x = problem.smooth(torch.float64).start()
    assert problem.objective(x) == pytest.approx(value, rel=1e-12)
    torch.testing.assert_close(problem.gradient(x), slope, rtol=1e-10, atol=1e-12)
    ways = [
        fc.simulate(problem_of, fc.algorithms.FedNMap(local_steps=3, step=0.1, gamma=0.5), rounds=3, batch_size=4)
        for problem_of in (
            fc.Problem(words(), model=Masked(), named_inputs=NAMED, gradients=g) for g in ("vmap", "loop")
        )
    ]
    torch.testing.assert_close(ways[0].solution, ways[1].solution, rtol=1e-5, atol=1e-6)
    assert not problem.dead(ways[0].solution, ways[0].buffers)
    with pytest.raises(fc.DataError, match="9 numbers in all, a sample has 10"):
        fc.Problem(words(), model=Masked(), named_inputs={"input_ids": (5,), "attention_mask": (4,)})


@pytest.mark.parametrize("format", ["safetensors", "csr", "onnx"])
def test_what_has_several_inputs_is_exported(tmp_path, format):
    if format == "onnx":
        pytest.importorskip("onnxruntime")
        pytest.importorskip("onnxscript")
    problem = fc.Problem(words(), model=Masked(), named_inputs=NAMED)
    run = fc.simulate(problem, fc.algorithms.FedAvg(local_steps=1, step=0.1), rounds=1, batch_size=4)
    assert fc.export(problem, run, tmp_path / "model", format=format).difference < 1e-5
    dense = fc.Problem(pixels(), model=Segmenter())
    run = fc.simulate(dense, fc.algorithms.FedAvg(local_steps=1, step=0.1), rounds=1, batch_size=4)
    assert fc.export(dense, run, tmp_path / "dense", format=format).difference < 1e-5


def test_items_with_several_keys():
    rng = np.random.default_rng(0)
    items = [{"ids": rng.integers(0, 9, 4), "mask": np.ones(4, int), "label": int(k % 2)} for k in range(6)]
    silos = fc.Silos.from_datasets([items, items], features=["ids", "mask"], target="label")
    assert silos.features.shape == (12, 8)
    assert silos.features[0].tolist() == [*items[0]["ids"], *items[0]["mask"]]
    mixed = [{**item, "mask": np.ones(4)} for item in items]
    with pytest.raises(fc.DataError, match="integers beside other numbers"):
        fc.Silos.from_datasets([mixed], features=["ids", "mask"], target="label")
    with pytest.raises(fc.DataError, match="a pair, which has no ids, mask"):
        fc.Silos.from_datasets([[(1.0, 0)]], features=["ids", "mask"], target="label")


@pytest.mark.parametrize("gradients", ["vmap", "loop"])
@pytest.mark.parametrize("augment", [None, fc.data.augmentation.Chain((Crop(1), Flip()))], ids=["", "augmented"])
def test_batches_in_pieces_are_the_batch(gradients, augment):
    """Pieces of 4 of a batch of 10: two whole ones and a rest."""
    settings = {"model": Segmenter(), "gradients": gradients, "augment": augment}
    method, rounds = (
        fc.algorithms.FedAvg(local_steps=2, step=0.1),
        {"rounds": 3, "batch_size": 10, "dtype": torch.float64},
    )
    whole, pieces = (
        fc.simulate(fc.Problem(pixels((12, 16)), microbatch=m, **settings), method, **rounds) for m in (None, 4)
    )
    torch.testing.assert_close(pieces.solution, whole.solution, rtol=1e-10, atol=1e-12)
    assert not torch.equal(whole.solution, torch.zeros_like(whole.solution))


def test_pieces_of_a_mean_loss_and_of_random_layers():
    loss = nn.CrossEntropyLoss()
    rng = np.random.default_rng(0)
    silos = fc.Silos.from_arrays([(rng.normal(size=(20, 5)), rng.integers(0, 3, 20))] * 3)
    method, rounds = (
        fc.algorithms.Zhang(local_steps=2, step=0.1),
        {"rounds": 2, "batch_size": 10, "dtype": torch.float64},
    )
    torch.manual_seed(0)
    module = nn.Linear(5, 3)
    one, two = (
        fc.simulate(fc.Problem(silos, model=module, loss=loss, microbatch=m), method, **rounds) for m in (None, 3)
    )
    torch.testing.assert_close(one.solution, two.solution, rtol=1e-10, atol=1e-12)
    random = nn.Sequential(nn.Linear(5, 16), nn.Dropout(0.5), nn.BatchNorm1d(16), nn.Linear(16, 3))
    runs = [fc.simulate(fc.Problem(silos, model=random, microbatch=5), method, **rounds) for _ in range(2)]
    assert torch.equal(runs[0].solution, runs[1].solution)


def test_autocast_is_refused_where_it_would_be_left_out():
    problem = fc.Problem(pixels(), model=Segmenter(), precision="bf16")
    with pytest.raises(ValueError, match="bf16"):
        fc.simulate(problem, fc.algorithms.FedAvg(local_steps=1, step=0.1), rounds=1)
    assert problem.objective(problem.smooth().start()) > 0
