"""Networks: any ``torch.nn.Module`` as the clients' functions, its parameters one flat vector.

Stacked gradients
-----------------
The gradients of m clients at their own parameters, ``(m, d)``, come from one vectorised pass (``torch.func.vmap``) or
from one pass per client. The rule depends on the module and on shapes, never on a timing, so that a resumed run repeats
every bit: one pass per client for a single client, for layers that draw random numbers, for modules that vmap refuses
(data-dependent branches, writing into unbatched tensors), and on a CPU for models with convolutions and a million
parameters; vectorised otherwise. ``gradients="vmap"`` or ``"loop"`` forces it.

On a CPU, two-dimensional convolutions and pooling of smaller models in float32 keep channels last in memory
(:mod:`fedcomposite.problems.layers`), unless the module takes views that this layout does not allow; other
convolutions are vectorised for batches up to 12 only. A pass that is asked for again and again is turned into the list
of its operations (:mod:`fedcomposite.problems.traced`), if that gives the same bits.

Training and evaluation
-----------------------
Gradients are taken in training mode, where batch norm uses the statistics of the minibatch (of the whole silo for a
full gradient) and updates its buffers; evaluation uses the buffers. Persistent buffers travel as one vector beside x;
integer ones (``num_batches_tracked``) are rounded when they are read.

Random numbers
--------------
Dropout and augmentation draw from torch's generator, which is seeded before each client's pass by the counter-based
stream ``Use.MODEL`` of (seed, client, round, k). A run is thus a function of its seed, whatever the
backend; torch's own streams differ between a CPU and a GPU.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NoReturn, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fedcomposite import rng
from fedcomposite._validation import Count, suggest, validate
from fedcomposite.data.silos import DataError, Silos
from fedcomposite.problems.base import Evaluation, Local, Slot, Smooth, UnsuitableError
from fedcomposite.problems.layers import fusing, quicken, slacken
from fedcomposite.problems.measures import Counts, MeanLoss, Measures, Part, Rows
from fedcomposite.problems.metrics import CLASSIFIERS, Kind
from fedcomposite.problems.traced import trace

LossFunction = Callable[[Tensor, Tensor], Tensor]
Pass = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""From parameters, buffers, rows and weights of the samples to gradients and buffers."""

_GROUPED = 12  # largest batch at which torch's own vectorised convolutions are faster than one pass per client
_COMPILED = 24  # layers up to which compiling takes seconds and not minutes; deeper models are recorded as they are
_OFTEN = 16  # passes over the same shapes after which their operations are listed once, which takes a second
_LARGE = 1 << 20  # parameters from which they are slower whatever the batch and layout
_PIECE = 256  # samples of a client that one pass of a full gradient takes
_PASS = 512  # samples that one pass of an evaluation takes
_ACTIVATIONS = 32  # rough ratio of a network's activations to its inputs
_RANDOM = (nn.modules.dropout._DropoutNd, nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)
_CONVOLUTION = nn.modules.conv._ConvNd
_BATCH_NORM = nn.modules.batchnorm._BatchNorm


class LoopWarning(UserWarning):
    """A module cannot be vectorised over clients; its gradients are computed one client at a time."""


@dataclass(frozen=True)
class ModelLoss:
    """A loss of a module's outputs and the targets: per-sample values, or their mean."""

    name: str
    function: LossFunction = field(repr=False, compare=False)
    classifier: bool
    per_sample: bool
    kinds: tuple[Kind, ...] = ()
    smooth: ClassVar[bool] = True
    probabilistic: ClassVar[bool] = True

    def prepare(self, targets: Tensor, outputs: int) -> Tensor:
        """Class labels as integers from 0, with -1 and +1 read as 0 and 1; other targets as they are."""
        if self.name != "cross_entropy":
            return targets
        labels = torch.unique(targets)
        if set(labels.tolist()) <= {-1, 1}:
            return (targets > 0).long()
        if bool((labels != labels.round()).any()) or labels[0] < 0 or labels[-1] >= outputs:
            raise DataError(
                f"cross_entropy needs labels 0, ..., {outputs - 1} for a module with {outputs} outputs, found "
                f"{labels[0]:g} to {labels[-1]:g}; renumber the labels or change the last layer"
            )
        return targets.long()

    def of_rows(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The samples' losses; a mean, where that is all there is, stands for each of them."""
        values = self.function(outputs, targets)
        return values if self.per_sample else values.expand(len(targets))


def _cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


def _squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.reshape(targets.shape) - targets).square()


@dataclass(frozen=True)
class NetworkOptions:
    """How a module is fed, differentiated and evaluated; :class:`fedcomposite.Problem` documents the fields."""

    gradients: Literal["auto", "vmap", "loop"] = "auto"
    chunk: Count | None = None
    normalization: Any = None
    transform: Callable[[Tensor], Tensor] | None = None
    augment: Callable[[Tensor], Tensor] | None = None
    precision: Literal["full", "bf16"] = "full"
    evaluation_samples: Count | None = 2000

    def __post_init__(self) -> None:
        validate(self)
        if self.normalization is not None:
            mean, std = (np.atleast_1d(np.asarray(v, float)) for v in self.normalization)
            if not (np.isfinite(mean).all() and np.isfinite(std).all() and (std > 0).all()):
                raise ValueError(f"normalization = {self.normalization}, must be (mean, std) with std > 0")

    def constants(self, dtype: torch.dtype, device: torch.device | str) -> tuple[Tensor, ...]:
        """Mean and standard deviation on a device, if there are any: placed once, so that no batch waits for them."""
        return tuple(torch.as_tensor(v, dtype=dtype, device=device) for v in self.normalization or ())

    def inputs(self, raw: Tensor, dtype: torch.dtype, constants: tuple[Tensor, ...] | None = None) -> Tensor:
        """Stored samples as a module takes them: bytes from 0 to 1, other integers unchanged, then normalised."""
        x = raw.to(dtype) if raw.is_floating_point() or raw.dtype == torch.uint8 else raw
        if raw.dtype == torch.uint8:
            x = x / 255
        if self.normalization is not None:
            mean, std = self.constants(dtype, x.device) if constants is None else constants
            tail = (1,) * (x.ndim - 2)  # one number per channel, the first axis of a sample
            x = (x - mean.reshape(-1, *tail)) / std.reshape(-1, *tail)
        return self.transform(x) if self.transform is not None else x

    def __str__(self) -> str:
        shown = {k: getattr(v, "__qualname__", v) for k, v in vars(self).items()}
        return ", ".join(f"{k}={v}" for k, v in shown.items())


def layout(module: nn.Module) -> tuple[Slot, ...]:
    """Where each trainable parameter lies in x, in the module's order."""
    slots, at = [], 0
    for name, p in module.named_parameters():
        if p.requires_grad:
            slots.append(Slot(name, at, at + p.numel(), tuple(p.shape)))
            at += p.numel()
    if not slots:
        raise ValueError("this module has no parameters to train (requires_grad is false for all, or there are none)")
    return tuple(slots)


def model_loss(loss: str | LossFunction, module: nn.Module, silos: Silos, options: NetworkOptions) -> ModelLoss:
    """Read the loss, and try it on two samples, so that a wrong shape is found before the run."""
    dtype = next(p.dtype for p in module.parameters())
    inputs = options.inputs(silos.features[:2], dtype)
    try:
        with torch.no_grad():
            outputs = copy.deepcopy(module).cpu().eval()(inputs)
    except (RuntimeError, ValueError, TypeError) as error:
        shape = "x".join(map(str, silos.features.shape[1:]))
        raise DataError(f"the module does not take these samples ({shape}, {inputs.dtype}): {error}") from error
    if loss == "cross_entropy":
        if outputs.ndim != 2:
            raise DataError(
                f"cross_entropy needs outputs (batch, classes), the module gives {tuple(outputs.shape)} for 2 samples"
            )
        kinds = CLASSIFIERS if outputs.shape[1] == 2 else ("multiclass",)
        return ModelLoss("cross_entropy", _cross_entropy, classifier=True, per_sample=True, kinds=kinds)
    targets = silos.targets[:2]
    if loss == "mse":
        if outputs.numel() != targets.numel():
            raise DataError(f"mse needs one output per sample, the module gives {tuple(outputs.shape)} for 2 samples")
        return ModelLoss("mse", _squared_error, classifier=False, per_sample=True, kinds=("regression",))
    if not callable(loss):
        known = ("cross_entropy", "mse")
        raise ValueError(
            f"loss = {loss!r} is not for a model{suggest(str(loss), known)} (known: {', '.join(known)}, "
            "or a function of outputs and targets)"
        )
    values = loss(outputs, targets.to(dtype) if targets.is_floating_point() else targets)
    if values.shape not in ((), targets.shape):
        raise ValueError(f"the loss gives shape {tuple(values.shape)} for 2 samples, expected (2,) or a mean ()")
    classes = outputs.ndim == 2 and outputs.shape[1] > 1 and not targets.is_floating_point()
    name = getattr(loss, "__qualname__", repr(loss))
    return ModelLoss(name, loss, classifier=classes, per_sample=values.ndim == 1, kinds=_kinds(outputs, silos, classes))


def _kinds(outputs: Tensor, silos: Silos, classes: bool) -> tuple[Kind, ...]:
    """What a loss of somebody else's may be for; a single output for two labels is a margin or a prediction."""
    if classes:
        return CLASSIFIERS if outputs.shape[1] == 2 else ("multiclass",)
    if outputs.numel() != len(outputs):
        return ()
    labels = set(torch.unique(silos.targets).tolist())
    return ("binary", "regression") if labels <= {0, 1} else ("regression",)


def _aliases(module: nn.Module) -> dict[str, list[str]]:
    """Further names of shared parameters, by their first: one for every layer and attribute that holds them."""
    names: dict[int, list[str]] = {}
    for place, layer in module.named_modules():
        for key, p in layer._parameters.items():
            if p is not None and p.requires_grad:
                names.setdefault(id(p), []).append(f"{place}.{key}" if place else key)
    return {first: others for first, *others in names.values() if others}


class Network(Smooth):
    """f_i(x) = (1/m_i) sum_j phi(model(x; a_ij), b_ij)."""

    def __init__(
        self,
        silos: Silos,
        module: nn.Module,
        loss: ModelLoss,
        options: NetworkOptions,
        *,
        weights: npt.NDArray[np.float64],
        dtype: torch.dtype,
        device: torch.device,
        measures: Measures | None = None,
    ) -> None:
        self.measures = Measures.of(loss, clients=True) if measures is None else measures
        self.loss, self.options, self.dtype, self.device = loss, options, dtype, device
        self._module = copy.deepcopy(module).to(device, dtype)
        self.layout = layout(module)
        self.dimension = self.layout[-1].stop
        self._sizes = [s.stop - s.start for s in self.layout]
        self._aliases = _aliases(self._module)
        kept = self._module.state_dict()
        self._buffers = {k: b for k, b in self._module.named_buffers() if k in kept}
        self._buffer_sizes = [b.numel() for b in self._buffers.values()]
        kinds = list(self._module.modules())
        self._layers = sum(not list(m.children()) for m in kinds)
        self._convolves = any(isinstance(m, _CONVOLUTION) for m in kinds)
        fits = device.type == "cpu" and dtype == torch.float32 and self.dimension < _LARGE
        self._fast = [
            fits and quicken(self._module)
        ]  # whether all its convolutions have channels last; shared by views
        self._whole = any(isinstance(m, _BATCH_NORM) for m in kinds)  # batch statistics: a silo is one batch
        attention = any(isinstance(m, nn.MultiheadAttention) and m.dropout > 0 for m in kinds)
        if options.precision == "bf16":
            for m in kinds:
                if isinstance(m, _BATCH_NORM):  # statistics need the digits, and vmap refuses a mixture of dtypes here
                    m.register_forward_pre_hook(lambda _, inputs: (inputs[0].to(dtype),))
        self._random = attention or any(isinstance(m, _RANDOM) and getattr(m, "p", 1) > 0 for m in kinds)
        self._refused: list[bool] = []  # whether vmap refuses the module, once it has been tried
        self._constants = options.constants(dtype, device)
        self._compile = False
        self._asked: dict[Any, int] = {}
        self._traces: dict[Any, Pass] = {}
        self._local: Local | None = None
        self._place_data(silos, weights)
        if fits and self._convolves:
            self._settle()

    def _place_data(self, silos: Silos, weights: npt.NDArray[np.float64]) -> None:
        def placed(features: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            X = features.to(self.device, self.dtype) if features.is_floating_point() else features.to(self.device)
            b = self.loss.prepare(targets, self._outputs(X))
            return X, b.to(self.device, self.dtype) if b.is_floating_point() else b.to(self.device)

        self.X, self.b = placed(silos.features, silos.targets)
        self.sizes = silos.sizes.astype(np.uint64)
        self.offsets = np.asarray(silos.offsets[:-1], np.uint64)
        self.ids = np.asarray(silos.ids, np.uint64)
        most = self.options.evaluation_samples
        counts = silos.sizes if most is None else np.minimum(silos.sizes, -(-most // len(silos)))
        spread = [_spread(m, c) for m, c in zip(silos.sizes.tolist(), counts.tolist(), strict=True)]
        self._rows = Rows.of(counts.tolist(), silos.sizes.tolist(), self.device)
        self._counts = counts.tolist()
        self._seen = torch.from_numpy(np.concatenate([o + s for o, s in zip(silos.offsets[:-1], spread, strict=True)]))
        self._weights = torch.from_numpy(np.repeat(weights / counts, counts)).to(self.device, self.dtype)
        self._held: dict[Part, tuple[Tensor, Tensor, Rows]] = {}
        for part, (features, targets) in silos.held_out.items():
            count = min(most or len(targets), len(targets))
            seen = torch.from_numpy(_spread(len(targets), count))
            self._held[part] = *placed(features[seen], targets[seen]), Rows.of([count], [len(targets)], self.device)

    def _outputs(self, X: Tensor) -> int:
        """Width of the module's output."""
        inputs, state = self.options.inputs(X[:2], self.dtype), self.state(self.start(), self.buffers())
        with torch.no_grad():
            try:
                return int(self._forward(state, inputs, train=False).shape[-1])
            except RuntimeError:  # a view of what has channels last in memory, perhaps
                if not self._slacken():
                    raise
                return int(self._forward(state, inputs, train=False).shape[-1])

    @property
    def _quick(self) -> bool:
        return self._fast[0]

    def _slacken(self) -> bool:
        """Give the module's layers their usual layout back; whether that changes anything."""
        self._fast[0] = False
        return slacken(self._module)

    def _settle(self) -> None:
        """Try a gradient of one client, since a module may do in training what channels last do not allow."""
        rows = torch.zeros(2, dtype=torch.long, device=self.device)
        x, weight = self.start(), torch.ones(2, dtype=self.dtype, device=self.device)
        try:
            with torch.random.fork_rng(devices=[]):
                self._alone(x, self.buffers(), rows, weight, 0, torch.empty_like(x))
        except Exception:  # if it is not the layout, the first gradient will say so
            self._slacken()

    # -- the module as a function of flat vectors ---------------------------------------------------------------------

    def start(self) -> Tensor:
        """The module's own parameters, flattened."""
        trained = [p.detach().reshape(-1) for p in self._module.parameters() if p.requires_grad]
        return torch.cat(trained).to(self.dtype)

    def buffers(self) -> Tensor:
        """The module's own persistent buffers, flattened."""
        return self._pack(self._buffers)

    def _pack(self, buffers: dict[str, Tensor]) -> Tensor:
        parts = [buffers[k].reshape(-1).to(self.dtype) for k in self._buffers]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=self.dtype, device=self.device)

    def _unpack(self, flat: Tensor) -> dict[str, Tensor]:
        """Fresh tensors, since training modifies them in place."""
        parts = flat.split_with_sizes(self._buffer_sizes)
        return {
            k: (v.clone() if b.is_floating_point() else v.round().to(b.dtype)).view(b.shape)
            for (k, b), v in zip(self._buffers.items(), parts, strict=True)
        }

    def state(self, x: Tensor, buffers: Tensor) -> dict[str, Tensor]:
        """The module's tensors by name, out of two flat vectors."""
        parts = zip(self.layout, x.split_with_sizes(self._sizes), strict=True)
        return {slot.name: v.view(slot.shape) for slot, v in parts} | self._unpack(buffers)

    def _forward(self, state: dict[str, Tensor], inputs: Tensor, *, train: bool) -> Tensor:
        """Outputs of the module with these tensors; training moves the buffers among them."""
        module = self._module
        if module.training != train:
            module.train(train)
        with self._precision():
            named = {alias: state[name] for name, aliases in self._aliases.items() for alias in aliases}
            outputs: Tensor = functional_call(module, state | named, (inputs,), tie_weights=False)
        return outputs if outputs.dtype == self.dtype else outputs.to(self.dtype)

    def _precision(self) -> AbstractContextManager[Any]:
        if self.options.precision == "bf16" and self.device.type == "cuda":
            return torch.autocast("cuda", torch.bfloat16)
        return nullcontext()

    def _objective(
        self, x: Tensor, buffers: Tensor, inputs: Tensor, b: Tensor, weight: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The loss of one client, and its buffers afterwards."""
        state = self.state(x, buffers)
        return self._loss(state, inputs, b, weight), self._pack(state)

    def _loss(self, state: dict[str, Tensor], inputs: Tensor, b: Tensor, weight: Tensor) -> Tensor:
        values = self.loss.function(self._forward(state, inputs, train=True), b)
        return (values * weight).sum() if self.loss.per_sample else values * weight.sum()

    # -- gradients ----------------------------------------------------------------------------------------------------

    def during(self, local: Local) -> Self:
        """The same functions with the clients' buffers and counters."""
        view = copy.copy(self)
        view._local = local
        return view

    def minibatch(self, x: Tensor, rows: Tensor) -> Tensor:
        """Gradients on the given rows, in training mode."""
        everyone = np.arange(len(rows))
        weight = torch.full(rows.shape, 1 / rows.shape[1], dtype=self.dtype, device=self.device)
        local = self._state_of(everyone.astype(np.uint64))
        if self.options.augment is None and self._mode(len(rows), rows.shape[1]) == "vmap":
            each = [(x[c], local.buffers[c], rows[c], weight[c]) for c in self._chunks(*rows.shape)]
            parts = [self._often(self._vectorised, *given) for given in each]
            gradient, local.buffers = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
            return gradient
        if self._steady:
            each = list(zip(x, local.buffers, rows, weight, strict=True))
            gradient, local.buffers = map(torch.stack, zip(*(self._often(self._single, *g) for g in each), strict=True))
            return gradient
        return self._gradient(x, everyone, rows, weight, local)

    def _often(self, function: Pass, *given: Tensor) -> tuple[Tensor, Tensor]:
        """The function's result; where it is asked for the same shapes again and again, from its list of operations."""
        key = function.__name__, *(t.shape for t in given)
        self._asked[key] = asked = self._asked.get(key, 0) + 1
        if self._compile:
            if asked == 1:
                with fusing():
                    self._traces[key] = torch.compile(self._listed(function, given), dynamic=False)
        elif asked == _OFTEN and self._layers <= _COMPILED and self.device.type == "cpu":
            listed = self._listed(function, given)
            x, buffers, rows, weight = given
            other = 0.9 * x, buffers, (rows + 1) % len(self.X), weight  # what was taken for a constant shows
            same = all(torch.equal(a, b) for g in (given, other) for a, b in zip(listed(*g), function(*g), strict=True))
            self._traces[key] = listed if same else function
        with torch.no_grad():
            return self._traces.get(key, function)(*given)

    @staticmethod
    def _listed(function: Pass, given: tuple[Tensor, ...]) -> Pass:
        """The list of a function's operations; itself, where a module does what cannot be listed."""
        try:
            return trace(function, *given)
        except Exception:
            return function

    def ready(self, compile: bool) -> Self:
        """Refuse what cannot be recorded; compile the vectorised gradient if asked."""
        if self._random or self.options.augment is not None:
            raise UnsuitableError("random layers or augmentation draw new numbers in every step")
        if self.options.gradients == "loop" or self._refuses():
            raise UnsuitableError("the model's gradients are computed one client at a time")
        self._module.train(True)
        if not compile or self._layers > _COMPILED:
            return self
        view = copy.copy(self)  # the problem's other runs go on without compiled passes
        view._compile, view._asked, view._traces = True, {}, {}
        if self.options.precision == "full":  # autocast does not look inside
            view._module = copy.deepcopy(self._module)
            quicken(view._module, single=True)
        return view

    def full(self, clients: rng.Ints) -> Callable[[Tensor], Tensor]:
        """Gradients on all samples, in training mode: in pieces, and whole silos where there is batch norm."""

        def gradient(x: Tensor) -> Tensor:
            total, local = torch.zeros_like(x), self._state_of(clients)
            for piece, members, rows, weight in self._pieces(clients):
                at = torch.from_numpy(members).to(self.device)
                total[at] += self._gradient(x[at], members, rows, weight, local, piece)
            return total

        return gradient

    def _state_of(self, clients: rng.Ints) -> Local:
        """The round's state, or a fresh one outside rounds."""
        return self._local or Local(self.buffers().repeat(len(clients), 1), clients)

    def _pieces(self, clients: rng.Ints) -> Iterator[tuple[int, npt.NDArray[np.int64], Tensor, Tensor]]:
        """Number of the piece, members of the cohort, their rows and the samples' weights.

        A piece holds as many samples of each member, up to padding (weight zero) by a factor of sqrt(2) where
        neither batch statistics nor random layers nor a loss without per-sample values could notice it.
        """
        sizes, first = self.sizes[clients].astype(np.int64), self.offsets[clients].astype(np.int64)
        length = int(sizes.max()) if self._whole else _PIECE
        padded = self.loss.per_sample and not self._whole and self._mode(len(clients), length) == "vmap"
        for a in range(0, int(sizes.max()), length):
            left = np.minimum(sizes - a, length)
            level = np.ceil(2 * np.log2(np.maximum(left, 1))) if padded else left
            for value in np.unique(level[left > 0]):
                members = np.flatnonzero((level == value) & (left > 0))
                column = np.arange(left[members].max())[None, :]
                inside = column < left[members, None]
                rows = torch.from_numpy(first[members, None] + a + np.where(inside, column, 0)).to(self.device)
                weight = torch.from_numpy(inside / sizes[members, None]).to(self.device, self.dtype)
                yield a // length, members, rows, weight

    def _mode(self, clients: int, batch: int) -> Literal["vmap", "loop"]:
        if self.options.gradients != "auto":
            return self.options.gradients
        convolves = self._convolves and self.device.type == "cpu"
        if clients == 1 or self._random or (convolves and self.dimension >= _LARGE) or self._refuses():
            return "loop"
        return "loop" if convolves and not self._quick and batch > _GROUPED else "vmap"

    def _refuses(self) -> bool:
        """Whether vmap cannot take the module: tried once, on two clients with two samples each."""
        if not self._refused:
            reason = self._trial()
            if reason is not None and self._slacken():
                reason = self._trial()
            self._refused.append(reason is not None)
            if reason is not None:
                warnings.warn(
                    f"{type(self._module).__name__} cannot be vectorised over clients ({reason}); its gradients are "
                    "computed one client at a time, which gradients='loop' asks for without this warning",
                    LoopWarning,
                    stacklevel=2,
                )
        return self._refused[0]

    def _trial(self) -> str | None:
        """Why vmap does not take the module, if it does not."""
        rows = torch.zeros(2, 2, dtype=torch.long, device=self.device)
        x, buffers = (v.repeat(2, 1) for v in (self.start(), self.buffers()))
        try:
            self._vectorised(x, buffers, rows, torch.ones_like(x[:, :2]))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            return str(error).strip().split("\n")[0]
        return None

    def _gradient(
        self,
        x: Tensor,
        members: npt.NDArray[np.int64],
        rows: Tensor,
        weight: Tensor,
        local: Local,
        piece: int = 0,
    ) -> Tensor:
        """Gradients of some members of the cohort; updates their buffers."""
        at = torch.from_numpy(members).to(self.device)
        out, before = torch.empty_like(x), local.buffers[at]
        after = torch.empty_like(before)
        with self._generator():
            if self._mode(len(local.clients), rows.shape[1]) == "vmap":
                seeds = self._seeds(local, members, piece) if self.options.augment is not None else []
                for c in self._chunks(*rows.shape):
                    out[c], after[c] = self._together(x[c], before[c], rows[c], weight[c], seeds[c])
            else:
                for i, seed in enumerate([0] * len(x) if self._steady else self._seeds(local, members, piece)):
                    after[i] = self._alone(x[i], before[i], rows[i], weight[i], seed, out[i])
        local.buffers = local.buffers.index_copy(0, at, after)
        return out

    @property
    def _steady(self) -> bool:
        """Whether the module is known to draw no random numbers: vmap, which would refuse that, has taken it."""
        return self._refused == [False] and not self._random and self.options.augment is None

    def _generator(self) -> AbstractContextManager[Any]:
        """Give torch's generator back as it was."""
        if self._steady:
            return nullcontext()
        return torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else [])

    @staticmethod
    def _seeds(local: Local, members: npt.NDArray[np.int64], piece: int) -> list[int]:
        """A 64-bit seed per client, from the counters of the round, the step and the piece."""
        words = rng.words(local.seed, rng.Use.MODEL, local.clients[members], local.round, local.step, 2 * piece + 2)
        return [int(high) << 32 | int(low) for high, low in words[:, -2:]]

    def _chunks(self, clients: int, batch: int) -> list[slice]:
        """Clients that are worked on together: as many as asked for, or as a temporary's size allows."""
        each = self.dimension + _ACTIVATIONS * batch * self.X[0].numel()
        room = 1 << (25 if self.device.type == "cpu" else 30)
        per = self.options.chunk or max(1, room // each)
        return [slice(a, a + per) for a in range(0, clients, per)]

    def _together(
        self, x: Tensor, buffers: Tensor, rows: Tensor, weight: Tensor, seeds: list[int]
    ) -> tuple[Tensor, Tensor]:
        """Gradients ``(m, d)`` and buffers, in one vectorised pass."""
        if self.options.augment is None:
            return self._vectorised(x, buffers, rows, weight)
        inputs = torch.stack([self._inputs(r, s) for r, s in zip(rows, seeds, strict=True)])
        gradient: tuple[Tensor, Tensor] = vmap(grad(self._objective, has_aux=True))(
            x, buffers, inputs, self.b[rows], weight
        )
        return gradient

    def _vectorised(self, x: Tensor, buffers: Tensor, rows: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Gather, convert and differentiate, all on the device."""
        flat = self.options.inputs(self.X[rows.flatten()], self.dtype, self._constants)
        inputs = flat.reshape(*rows.shape, *flat.shape[1:])
        gradient: tuple[Tensor, Tensor] = vmap(grad(self._objective, has_aux=True))(
            x, buffers, inputs, self.b[rows], weight
        )
        return gradient

    def _single(self, x: Tensor, buffers: Tensor, rows: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The same for one client: gradient ``(d,)`` and buffers."""
        inputs = self.options.inputs(self.X[rows], self.dtype, self._constants)
        gradient: tuple[Tensor, Tensor] = grad(self._objective, has_aux=True)(x, buffers, inputs, self.b[rows], weight)
        return gradient

    def _alone(self, x: Tensor, buffers: Tensor, rows: Tensor, weight: Tensor, seed: int, out: Tensor) -> Tensor:
        """The gradient of one client, into ``out``, and its buffers."""
        parts = zip(self.layout, x.detach().split_with_sizes(self._sizes), strict=True)
        leaves = {slot.name: v.view(slot.shape).requires_grad_() for slot, v in parts}
        state = leaves | self._unpack(buffers)
        with torch.enable_grad():
            value = self._loss(state, self._inputs(rows, seed), self.b[rows], weight)
        gradients = torch.autograd.grad(value, list(leaves.values()), materialize_grads=True)
        torch.cat([g.reshape(-1) for g in gradients], out=out)
        return self._pack(state).detach()

    def _inputs(self, rows: Tensor, seed: int) -> Tensor:
        """One client's inputs; torch's generator is left where the module's random layers take it up."""
        if not self._steady:
            torch.manual_seed(seed)
        inputs = self.options.inputs(self.X[rows], self.dtype, self._constants)
        return inputs if self.options.augment is None else self.options.augment(inputs)

    # -- evaluation ---------------------------------------------------------------------------------------------------

    def predict(self, x: Tensor, features: Tensor) -> Tensor:
        """The module's outputs for some samples, in evaluation mode."""
        buffers = self.buffers() if self._local is None else self._local.buffers[0]
        with torch.no_grad():
            state = self.state(x, buffers)
            parts = [
                self._forward(state, self.options.inputs(raw.to(self.device), self.dtype), train=False)
                for raw in (features[a : a + _PASS] for a in range(0, len(features), _PASS))
            ]
        return torch.cat(parts)

    def evaluate(self, x: Tensor) -> Evaluation:
        """Loss, gradient and metrics in evaluation mode, on ``evaluation_samples`` spread evenly over the clients."""
        buffers = self.buffers() if self._local is None else self._local.buffers[0]
        leaf, loss, gradient = x.detach().requires_grad_(), x.new_zeros(()), torch.zeros_like(x)
        passed: list[Tensor] = []
        at = 0
        for rows in self._passes():
            seen = rows.to(self.device)
            with torch.enable_grad():
                inputs = self.options.inputs(self.X[seen], self.dtype)
                outputs = self._forward(self.state(leaf, buffers), inputs, train=False)
                values = self.loss.function(outputs, self.b[seen])
                weight = self._weights[at : at + len(rows)]
                part = values @ weight if self.loss.per_sample else values * weight.sum()
            gradient += torch.autograd.grad(part, leaf)[0]
            loss = loss + part.detach()
            passed.append(outputs.detach())
            at += len(rows)
        counts = self._counted("train", torch.cat(passed), self.b[self._seen.to(self.device)], self._rows)
        for name, (X, b, held) in self._held.items():
            outputs = self.predict(x, X)
            counts |= self._counted(name, outputs, b, held)
            if self.measures.loss:
                counts[f"{name}/loss"] = MeanLoss().counts(self.loss.of_rows(outputs, b), b, held.owner, 1)
        return Evaluation(loss, gradient, counts, self.measures)

    def _passes(self) -> Iterator[Tensor]:
        """The evaluated rows; a mean loss must not mix clients."""
        for rows in [self._seen] if self.loss.per_sample else self._seen.split_with_sizes(self._counts):
            yield from (rows[a : a + _PASS] for a in range(0, len(rows), _PASS))

    def _counted(self, part: Part, outputs: Tensor, b: Tensor, rows: Rows) -> Counts:
        """The counts of a part."""
        return self.measures.count(part, _flattened(outputs), b, rows)

    def scored(self, x: Tensor, features: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The module's outputs, and class numbers or targets."""
        outputs = self.predict(x, features)
        b = self.loss.prepare(targets, outputs.shape[-1])
        return _flattened(outputs), b.to(self.device, self.dtype if b.is_floating_point() else None)

    def smoothness(self, of: Literal["clients", "mean", "samples"] = "clients") -> NoReturn:
        """Refused: a network's smoothness constant is unknown."""
        raise ValueError(
            "a network's smoothness constant is unknown: give the steps yourself, for example step = 0.01 to 0.1, "
            "and halve them if the run diverges"
        )


def _flattened(outputs: Tensor) -> Tensor:
    """Outputs as metrics see them: a single one per sample is a margin or a prediction."""
    return outputs.reshape(-1) if outputs.numel() == len(outputs) else outputs


def _spread(size: int, count: int) -> npt.NDArray[np.int64]:
    """``count`` different numbers below ``size``, evenly spaced."""
    return ((2 * np.arange(count) + 1) * size) // (2 * count)
