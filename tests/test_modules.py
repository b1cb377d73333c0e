"""Modules of every kind in every mode, against torch's own autograd on a copy of the module."""

import copy
import warnings

import numpy as np
import pytest
import torch
from network_modules import DEVICES, MODULES, silos_for
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.checkpoint import checkpoint

import fedcomposite as fc
from fedcomposite.algorithms import FedNMap
from fedcomposite.problems.base import RoundInputs

CLIENTS, SAMPLES, WORDS, LENGTH = 3, 8, 12, 5
WAYS = ("loop", "vmap", "streams")


class Block(nn.Module):
    """A residual block whose norms know single samples only."""

    def __init__(self, channels, norm):
        super().__init__()
        self.a, self.b = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.first, self.second = norm(channels), norm(channels)

    def forward(self, x):
        return (x + self.second(self.b(self.first(self.a(x)).relu()))).relu()


class Residual(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.stem, self.block = nn.Conv2d(3, 4, 3, stride=2), Block(4, norm)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.block(self.stem(x)).mean((2, 3)))


class Tokens(nn.Module):
    """A language model: an output for every token, through the embedding's own matrix."""

    def __init__(self, kind):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 6)
        self.inner = kind
        self.out = nn.Linear(6, WORDS, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, x):
        hidden = self.inner(self.embedding(x))
        return self.out(hidden[0] if isinstance(hidden, tuple) else hidden)


class Adapted(nn.Module):
    """A frozen layer with a trained product of thin matrices beside it."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(7, 6).requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(7, 2) / 3), nn.Parameter(torch.randn(2, 6) / 3)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head((self.base(x) + x @ self.down @ self.up).tanh())


class Tuned(nn.Module):
    """A frozen body, batch norm included, and a head."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).requires_grad_(False)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.body(x).mean((2, 3)))


class Recomputed(nn.Module):
    """Activations of the first layer are computed again on the way back."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(7, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.last(checkpoint(lambda t: self.first(t).tanh(), x, use_reentrant=False))


class Causal(nn.Module):
    """Attention by torch's own function."""

    def __init__(self):
        super().__init__()
        self.embedding, self.last = nn.Embedding(WORDS, 6, sparse=True), nn.Linear(6, WORDS)

    def forward(self, x):
        hidden = self.embedding(x)[:, None]
        return self.last(nn.functional.scaled_dot_product_attention(hidden, hidden, hidden, is_causal=True)[:, 0])


def per_sample(outputs, targets):
    return binary_cross_entropy_with_logits(outputs, targets, reduction="none").sum(1)


def encoder():
    return nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)


images = lambda rng: rng.standard_normal((SAMPLES, 3, 8, 8))  # noqa: E731
words = lambda rng: rng.integers(0, WORDS, (SAMPLES, LENGTH))  # noqa: E731
vectors = lambda rng: rng.standard_normal((SAMPLES, 7))  # noqa: E731
classes = lambda rng: rng.integers(0, 3, SAMPLES)  # noqa: E731
flags = lambda rng: (rng.random((SAMPLES, 4)) > 0.5).astype(float)  # noqa: E731


def padded(rng):
    labels = rng.integers(0, WORDS, (SAMPLES, LENGTH))
    labels[1, 2:], labels[2] = -100, -100
    return labels


CASES = {
    "group norm": (lambda: Residual(lambda c: nn.GroupNorm(2, c)), images, classes, "cross_entropy"),
    "layer norm": (lambda: Residual(lambda c: nn.LayerNorm([c, 3, 3])), images, classes, "cross_entropy"),
    "tied tokens": (lambda: Tokens(encoder()), words, words, "cross_entropy"),
    "padded tokens": (lambda: Tokens(nn.GRU(6, 6, batch_first=True)), words, padded, "cross_entropy"),
    "adapter": (Adapted, vectors, classes, "cross_entropy"),
    "head": (Tuned, images, classes, "cross_entropy"),
    "flags": (lambda: nn.Linear(7, 4), vectors, flags, nn.BCEWithLogitsLoss()),
    "flags, each": (lambda: nn.Linear(7, 4), vectors, flags, per_sample),
    "recomputed": (Recomputed, vectors, classes, "cross_entropy"),
    "causal": (Causal, words, words, "cross_entropy"),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(7, 3)), vectors, classes, "cross_entropy"),
    "bags": (lambda: nn.Sequential(nn.EmbeddingBag(WORDS, 4), nn.Linear(4, 3)), words, classes, "cross_entropy"),
    "several numbers": (lambda: nn.Linear(7, 4), vectors, flags, "mse"),
}
ALL = [*MODULES, *CASES]


def made(name):
    """A module, silos and a loss."""
    torch.manual_seed(3)
    if name in MODULES:
        return MODULES[name](), silos_for(name, CLIENTS, SAMPLES), "cross_entropy"
    build, features, targets, loss = CASES[name]
    rng = np.random.default_rng(4)
    return build(), fc.Silos.from_arrays([(features(rng), targets(rng)) for _ in range(CLIENTS)]), loss


def mean_loss(loss):
    """The mean over samples as one would write it."""
    if loss == "mse":
        return nn.functional.mse_loss
    if loss != "cross_entropy":
        return lambda o, b: loss(o, b).mean()

    def each(outputs, targets):
        if targets.ndim == 1:
            return nn.functional.cross_entropy(outputs, targets)
        counting = [(o[b >= 0], b[b >= 0]) for o, b in zip(outputs, targets, strict=True)]
        return sum(nn.functional.cross_entropy(o, b) for o, b in counting if len(b)) / len(targets)

    return each


def autograd(module, loss, x, X, b, train):
    """The gradient at x by torch alone, and the buffers after it."""
    own = copy.deepcopy(module).double().train(train)
    trained = [p for p in own.parameters() if p.requires_grad]
    vector_to_parameters(x, trained)
    gradient = torch.autograd.grad(mean_loss(loss)(own(X.double() if X.is_floating_point() else X), b), trained)
    gradient = [g.to_dense() for g in gradient]
    buffers = [v.double().flatten() for v in own.buffers()]
    return parameters_to_vector(gradient), torch.cat(buffers) if buffers else torch.zeros(0, dtype=torch.float64)


def check(name, way, device, dtype, tolerance):
    module, silos, loss = made(name)
    smooth = fc.Problem(silos, model=module, loss=loss, gradients=way).smooth(dtype, device)
    if way == "vmap" and smooth.gradients._reason_against_vmap() is not None:
        pytest.skip("vmap has no rule for it")
    x = torch.stack([smooth.start() * (1 + 0.1 * i) for i in range(CLIENTS)])
    rows = torch.tensor([[i * SAMPLES + j for j in (0, 3, 1, 2)] for i in range(CLIENTS)])
    local = RoundInputs(smooth.buffers().repeat(CLIENTS, 1), np.arange(CLIENTS, dtype=np.uint64))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = smooth.during(local).minibatch(x, rows.to(device)).cpu().double()
        evaluated = smooth.evaluate(x[1])
    for i in range(CLIENTS):
        given = module, loss, x[i].cpu().double(), silos.features[rows[i]], silos.targets[rows[i]]
        gradient, buffers = autograd(*given, train=True)
        torch.testing.assert_close(found[i], gradient, rtol=0, atol=tolerance)
        torch.testing.assert_close(local.buffers[i].cpu().double(), buffers, rtol=0, atol=tolerance)
    at = module, loss, x[1].cpu().double()
    means = [autograd(*at, *silos[i], train=False)[0] for i in range(CLIENTS)]
    torch.testing.assert_close(evaluated.gradient.cpu().double(), torch.stack(means).mean(0), rtol=0, atol=tolerance)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ALL)
def test_gradients_are_those_of_autograd(name, way, device):
    """Minibatches in training mode, and the mean over clients in evaluation mode, without a warning."""
    check(name, way, device, torch.float64, 1e-10)


def test_vmap_on_demand_gives_up_channels_last_where_it_has_to():
    """As the rule does: in float32 group norm does not allow both."""
    module, silos, loss = made("group norm")
    each = [fc.Problem(silos, model=module, loss=loss, gradients=way) for way in ("vmap", "auto", "loop")]
    found = [fc.simulate(problem, FedNMap(2, 0.1, gamma=1), rounds=2, batch_size=4).solution for problem in each]
    assert torch.equal(found[0], found[1])
    torch.testing.assert_close(found[0], found[2], rtol=0, atol=1e-5)


def test_modules_that_do_not_fit_are_refused():
    rng = np.random.default_rng(0)
    silos = fc.Silos.from_arrays([(words(rng), classes(rng))] * 2)
    problem = lambda first, **options: fc.Problem(silos, model=nn.Sequential(first, nn.Linear(4, 3)), **options)  # noqa: E731
    with pytest.raises(ValueError, match="EmbeddingBag '0' has max_norm"):
        problem(nn.EmbeddingBag(WORDS, 4, max_norm=1.0))
    with pytest.raises(ValueError, match="DataParallel keeps its tensors to itself"):
        fc.Problem(silos, model=nn.DataParallel(nn.Linear(4, 3)))
    with pytest.raises(
        ValueError, match=r"cannot be vectorised over clients \(.*random.*\); take gradients='auto' or 'loop'"
    ):
        fc.simulate(
            problem(nn.Sequential(nn.EmbeddingBag(WORDS, 4), nn.Dropout()), gradients="vmap"),
            FedNMap(1, 0.1, gamma=1),
            rounds=1,
        )
    hashed = nn.EmbeddingBag(WORDS, 4)
    hashed.register_buffer("salt", torch.tensor([2**40 + 1]))
    assert problem(hashed).smooth(torch.float64).state(problem(hashed).smooth().start())["0.salt"] == 2**40 + 1
    with pytest.raises(ValueError, match=r"buffer '0\.salt' has integers that torch\.float32 cannot hold"):
        fc.simulate(problem(hashed), FedNMap(1, 0.1, gamma=1), rounds=1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_of_classes_go_along_with_the_model(dtype, device):
    module, silos, _ = made("adapter")
    weights = torch.tensor([1.0, 2.0, 4.0])
    found = [
        fc.Problem(silos, model=module, loss=nn.CrossEntropyLoss(weight=w)).smooth(dtype, device)
        for w in (weights, weights.double())
    ]
    gradients = [smooth.evaluate(smooth.start()).gradient.cpu().double() for smooth in found]
    x = found[0].start().cpu().double()
    loss = nn.CrossEntropyLoss(weight=weights.double())
    expected = torch.stack([autograd(module, loss, x, *silos[i], train=False)[0] for i in range(CLIENTS)]).mean(0)
    for gradient in gradients:
        torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-6 if dtype == torch.float32 else 1e-12)


@pytest.mark.parametrize("name", ["tied tokens", "flags", "several numbers", "padded tokens"])
def test_samples_with_several_targets_are_learned(name):
    module, silos, loss = made(name)
    silos = fc.Silos.from_arrays([silos[i] for i in range(CLIENTS)], test=silos[0])
    problem = fc.Problem(silos, model=module, loss=loss, regularizer=fc.regularizers.L1(1e-4))
    run = fc.simulate(problem, FedNMap(3, 0.1, gamma=0.5), rounds=15, batch_size=4)
    assert run.history[-1].loss < run.history[0].loss
    first = run.history[0]
    assert ("test_accuracy" in first) == ("tokens" in name)
    assert ("test_loss" in first) != ("tokens" in name)
    if "tokens" in name:
        X, b = silos.test
        outputs = problem.module(run.solution)(X)
        there = [(o.argmax(-1) == t)[t >= 0] for o, t in zip(outputs, b, strict=True)]
        expected = np.mean([float(t.double().mean()) if len(t) else 0.0 for t in there])
        assert run.history[-1].test_accuracy == pytest.approx(expected)


def test_targets_that_do_not_fit_are_refused():
    rng = np.random.default_rng(0)
    X, b = rng.standard_normal((6, 4)), rng.integers(0, 3, (6, 2))
    with pytest.raises(fc.data.DataError, match=r"client 1 has targets of shape \(\), the first client \(2,\)"):
        fc.Silos.from_arrays([(X, b), (X, b[:, 0])])
    silos = fc.Silos.from_arrays([(X, b), (X, b)])
    with pytest.raises(fc.data.DataError, match="a linear model has one per sample"):
        fc.Problem(silos)
    with pytest.raises(fc.data.DataError, match=r"needs outputs \(batch, tokens, classes\)"):
        fc.Problem(silos, model=nn.Linear(4, 3))
    with pytest.raises(fc.data.DataError, match=r"mse needs outputs \(2,\) per sample"):
        fc.Problem(silos, model=nn.Linear(4, 3), loss="mse")

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 3)

        def forward(self, x):
            return self.a(x), x

    with pytest.raises(fc.data.DataError, match="the module gives a tuple"):
        fc.Problem(fc.Silos.from_arrays([(X, b[:, 0])]), model=Two())


def test_what_would_fail_in_the_run_is_told_before():
    """Labels and words that no client's first samples show, and losses that compare each output with all targets."""
    rng = np.random.default_rng(0)
    X, W, b, t = vectors(rng), words(rng), classes(rng), rng.standard_normal(SAMPLES)
    far, late = W.copy(), b.copy()
    far[-1, -1], late[-1] = WORDS, 3
    embedded = nn.Sequential(nn.Embedding(WORDS, 4), nn.Flatten(), nn.Linear(4 * LENGTH, 3))
    for parts in ({"arrays": [(W, b), (far, b)]}, {"arrays": [(W, b)], "test": (far, b)}):
        with pytest.raises(
            fc.data.DataError, match=r"does not take these samples \(5, torch.int64, 0 to 12\): index out"
        ):
            fc.Problem(fc.Silos.from_arrays(**parts), model=embedded)
    for parts in ({"arrays": [(X, b), (X, late)]}, {"arrays": [(X, b)], "test": (X, late)}):
        with pytest.raises(fc.data.DataError, match=r"the loss does not take .* Target 3 is out of bounds"):
            fc.Problem(fc.Silos.from_arrays(**parts), model=nn.Linear(7, 3), loss=nn.CrossEntropyLoss())
    for loss in (nn.MSELoss(), nn.BCEWithLogitsLoss(), nn.HuberLoss(reduction="none")):
        with pytest.raises(fc.data.DataError, match=r"targets \(2,\) .*; let the module give a number per sample"):
            fc.Problem(fc.Silos.from_arrays([(X, t)]), model=nn.Linear(7, 1), loss=loss)
    silos = fc.Silos.from_arrays([(X, b)])
    with pytest.raises(fc.data.DataError, match=r"augment = Crop\(padding=2\) does not take these samples \(7, torch"):
        fc.Problem(silos, model=nn.Linear(7, 3), augment=fc.data.augmentation.Crop(2))
    with pytest.raises(
        fc.data.DataError, match=r"the module does not take these samples \(6, torch.float32, augmented\)"
    ):
        fc.Problem(silos, model=nn.Linear(7, 3), augment=lambda x: x[:, 1:])
    complex_valued = nn.Linear(7, 3)
    complex_valued.phase = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(ValueError, match="parameter 'phase' is complex"):
        fc.Problem(fc.Silos.from_arrays([(X, b)]), model=complex_valued)
