"""How a module is fed and evaluated, and the losses of its outputs."""

from __future__ import annotations

import copy
import functools
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
from torch import Tensor, nn

from fedcomposite._faults import first_line
from fedcomposite._validation import Count, validate
from fedcomposite.data.augmentation import Augmentation
from fedcomposite.data.mapped import in_memory
from fedcomposite.data.silos import DataError, Silos
from fedcomposite.data.sparse import not_sparse
from fedcomposite.problems.losses import LossFunction
from fedcomposite.problems.metrics import CLASSIFIERS, Kind
from fedcomposite.problems.network.named_losses import (
    MODEL_LOSSES,
    BinaryCrossEntropy,
    CrossEntropy,
    TargetLoss,
)

IGNORED = -100
"""A token's label that counts for nothing, as in torch."""


def single_tensor(made: Any) -> Any:
    """What a module gives; of an object or a dictionary with logits, as those of Hugging Face give, these."""
    if isinstance(made, Tensor):
        return made
    return made.get("logits", made) if isinstance(made, Mapping) else getattr(made, "logits", made)


@dataclass(frozen=True)
class ModelLoss:
    """A loss of a module's outputs and the targets: per-sample values, or their mean."""

    name: str
    function: LossFunction = field(repr=False, compare=False)
    classifier: bool
    per_sample: bool
    kinds: tuple[Kind, ...] = ()
    classes_second: bool = False
    """Whether the module's outputs are (batch, classes, ...), which metrics see with the classes last."""
    smooth: ClassVar[bool] = True
    probabilistic: ClassVar[bool] = True

    def weighted(self, weights: Mapping[float, float]) -> Self:
        """The same with each label's loss multiplied by a number, by label; the mean is over labels as before."""
        if self.name != "cross_entropy":
            raise ValueError(f"class_weight is for loss='cross_entropy'; let {self.name} weigh its classes")
        mine = self.function
        smoothing = mine.smoothing if isinstance(mine, _CrossEntropy) else 0.0
        known = sorted(weights)
        if set(known) <= {-1.0, 1.0}:  # as ``prepare`` numbers them
            known, weights = [0.0, 1.0], {0.0: weights.get(-1.0, 1.0), 1.0: weights.get(1.0, 1.0)}
        each = torch.ones(int(known[-1]) + 1, dtype=torch.float64)
        for label in known:
            each[int(label)] = weights[label]
        return replace(self, function=_CrossEntropy(each, self.classes_second, smoothing))

    def prepare(self, targets: Tensor, outputs: int) -> Tensor:
        """Class labels as integers from 0, with -1 and +1 read as 0 and 1; other targets as they are."""
        if self.name == BinaryCrossEntropy.name:
            return _flags(targets)
        if self.name != "cross_entropy":
            return targets
        labels = torch.unique(targets)
        if targets.ndim > 1:
            labels = labels[labels != IGNORED]
        elif set(labels.tolist()) <= {-1, 1}:
            return (targets > 0).long()
        if bool((labels != labels.round()).any()) or labels[0] < 0 or labels[-1] >= outputs:
            raise DataError(
                f"cross_entropy needs labels 0, ..., {outputs - 1} for a module with {outputs} outputs, found "
                f"{labels[0]:g} to {labels[-1]:g}; renumber the labels or change the last layer"
            )
        return targets.long()

    def placed(self, dtype: torch.dtype, device: torch.device) -> Self:
        """The same for outputs of this type on this device, to which weights of classes in a module go along."""
        return replace(self, function=_placed(self.function, dtype, device))

    def shown(self, outputs: Tensor) -> Tensor:
        """Outputs as metrics see them: classes last; one per sample is a margin or a prediction, ``(N,)``."""
        made = outputs.movedim(1, -1) if self.classes_second else outputs
        return made.reshape(-1) if made.numel() == len(made) else made

    def of_rows(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The samples' losses; a mean, where that is all there is, stands for each of them."""
        values = self.function(outputs, targets)
        return values if self.per_sample else values.expand(len(targets))


def _flags(targets: Tensor) -> Tensor:
    """Flags as 0 and 1, where they may be -1 and +1; probabilities as they are."""
    least, most = targets.aminmax()
    if bool(((targets == -1) | (targets == 1)).all()):
        return (targets > 0).to(targets.dtype)
    if least < 0 or most > 1:
        raise DataError(f"binary_cross_entropy needs flags 0 and 1, found {float(least):g} to {float(most):g}")
    return targets


def _placed(function: LossFunction, dtype: torch.dtype, device: torch.device | str) -> LossFunction:
    return copy.deepcopy(function).to(device, dtype) if isinstance(function, nn.Module) else function


class _CrossEntropy(nn.Module):
    """Cross-entropy with a weight for each class (1 for those not named), the classes second, or smoothed labels."""

    def __init__(self, weights: Tensor | None, second: bool, smoothing: float = 0.0) -> None:
        super().__init__()
        self.register_buffer("weights", weights)
        self._second, self.smoothing = second, smoothing

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        shown = outputs.movedim(1, -1) if self._second else outputs
        given: Tensor | None = self.weights  # type: ignore[assignment]
        if given is not None and (more := shown.shape[-1] - len(given)) > 0:
            given = torch.cat([given, given.new_ones(more)])
        return _cross_entropy(shown, targets, given, self.smoothing)


def _cross_entropy(outputs: Tensor, targets: Tensor, weight: Tensor | None = None, smoothing: float = 0.0) -> Tensor:
    """Of each sample; where it has several labels (tokens), the mean over those that count."""
    of = functools.partial(nn.functional.cross_entropy, weight=weight, reduction="none", label_smoothing=smoothing)
    if targets.ndim == 1:
        return of(outputs, targets)
    each = of(outputs.flatten(0, -2), targets.flatten(), ignore_index=IGNORED)
    there = (targets != IGNORED).flatten(1).sum(1).clamp(min=1)
    return each.view(targets.shape).flatten(1).sum(1) / there


@dataclass(frozen=True)
class NetworkOptions:
    """How a module is fed, differentiated and evaluated; :class:`fedcomposite.Problem` documents the fields."""

    gradients: Literal["auto", "vmap", "loop", "streams"] = "auto"
    chunk: Count | None = None
    microbatch: Count | None = None
    named_inputs: Mapping[str, tuple[int, ...]] | None = None
    class_axis: Literal[1, -1] | None = None
    normalization: Any = None
    transform: Callable[[Tensor], Tensor] | None = None
    augment: Augmentation | Callable[[Tensor], Tensor] | None = None
    precision: Literal["full", "bf16"] = "full"
    evaluation_samples: Count | None = 2000

    def __post_init__(self) -> None:
        validate(self)
        if self.normalization is not None:
            try:
                mean, std = (np.atleast_1d(np.asarray(v, float)) for v in self.normalization)
            except (TypeError, ValueError):
                mean = std = np.zeros(1)
            if not (np.isfinite(mean).all() and np.isfinite(std).all() and (std > 0).all()):
                raise ValueError(f"normalization = {self.normalization}, must be (mean, std) with std > 0")
        if self.named_inputs is not None:
            if not self.named_inputs or self.normalization is not None:
                raise ValueError("named_inputs: name at least one input, and leave normalization to the module")
            object.__setattr__(self, "named_inputs", {k: tuple(s) for k, s in self.named_inputs.items()})

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

    def called(self, module: Callable[..., Any], inputs: Tensor) -> Any:
        """What the module makes of a batch: called with it, or with its pieces by name."""
        if self.named_inputs is None:
            return module(inputs)
        flat = inputs.flatten(1)
        pieces = flat.split_with_sizes([math.prod(shape) for shape in self.named_inputs.values()], 1)
        named = zip(self.named_inputs.items(), pieces, strict=True)
        return module(**{name: v.reshape(-1, *shape) for (name, shape), v in named})

    def __str__(self) -> str:
        shown = {k: getattr(v, "__qualname__", v) for k, v in vars(self).items()}
        return ", ".join(f"{k}={v}" for k, v in shown.items())


class Plain(nn.Module):
    """A module that is called with one tensor and gives one, whatever it takes and gives itself."""

    def __init__(self, module: nn.Module, options: NetworkOptions) -> None:
        super().__init__()
        self.module, self._options = module, options

    def forward(self, inputs: Tensor) -> Any:
        return single_tensor(self._options.called(self.module, inputs))


def model_loss(
    loss: CrossEntropy | LossFunction | ModelLoss, module: nn.Module, silos: Silos, options: NetworkOptions
) -> ModelLoss:
    """Read the loss, and try it on two samples, so that a wrong shape is found before the run.

    One that was read already, of all samples, is tried on these, which may be some of them.
    """
    if isinstance(loss, ModelLoss):
        given = CrossEntropy() if loss.name == "cross_entropy" else loss.function
        return replace(loss, kinds=model_loss(given, module, silos, options).kinds)
    dtype = next(p.dtype for p in module.parameters())
    inputs = options.inputs(in_memory(not_sparse(silos.features, "a model")[:2]), dtype)
    outputs = _outputs(module, inputs, options)
    if options.augment is not None:
        _outputs(module, _augmented(options.augment, inputs), options, ", augmented")
    for features in (silos.features, *(X for X, _ in silos.held_out.values())):
        if isinstance(features, Tensor) and not features.is_floating_point() and features.dtype != torch.uint8:
            each = features.flatten(1)  # the least and the largest: words that an embedding does not have
            ends = torch.stack([each.amin(1).argmin(), each.amax(1).argmax()])
            _outputs(module, options.inputs(features[ends], dtype), options, f", {each.min()} to {each.max()}")
    targets = silos.targets[:2]
    if isinstance(loss, CrossEntropy):
        second = _classes_second(outputs, targets, options.class_axis)
        if outputs.shape[1 if second else -1] < 2:
            raise DataError("cross_entropy needs an output per class, the module gives one; change its last layer")
        kinds = ("labels",) if targets.ndim > 1 else CLASSIFIERS if outputs.shape[1] == 2 else ("multiclass",)
        smoothing = loss.label_smoothing
        function = _CrossEntropy(None, second, smoothing) if second or smoothing else _cross_entropy
        return ModelLoss("cross_entropy", function, True, True, kinds, classes_second=second)
    if isinstance(loss, TargetLoss):
        if outputs.numel() != targets.numel():
            many = "one output" if targets.ndim == 1 else f"outputs {tuple(targets.shape[1:])}"
            raise DataError(
                f"{loss.name} needs {many} per sample, the module gives {tuple(outputs.shape)} for 2 samples"
            )
        kinds = loss.kinds if targets.ndim == 1 else ()
        return ModelLoss(loss.name, loss, classifier=False, per_sample=True, kinds=kinds)
    return _theirs(loss, outputs, silos, dtype, options)


def _theirs(
    loss: LossFunction, outputs: Tensor, silos: Silos, dtype: torch.dtype, options: NetworkOptions
) -> ModelLoss:
    """Read a loss of somebody else's: whether it is of classes, and whether it gives a value per sample."""
    if not callable(loss):
        raise ValueError(
            f"loss = {loss!r} is not for a model (known: {', '.join(MODEL_LOSSES)}, or a function of outputs and "
            "targets)"
        )
    targets = silos.targets[:2]
    given = targets.to(dtype) if targets.is_floating_point() else targets
    tried = _placed(loss, dtype, "cpu")
    values = _tried(tried, outputs, given)
    if values.shape not in ((), targets.shape[:1]):
        raise ValueError(f"the loss gives shape {tuple(values.shape)} for 2 samples, expected (2,) or a mean ()")
    if values.ndim == 0 and values != 0:
        twice = _tried(tried, torch.cat([outputs, outputs]), torch.cat([given, given]))
        if torch.isclose(twice, 2 * values, rtol=1e-4):
            raise ValueError("the loss gives a sum over samples, which grows with the batch; give their mean")
    classes = targets.ndim == outputs.ndim - 1 == 1 and outputs.shape[1] > 1 and not targets.is_floating_point()
    if classes:
        labels = torch.unique(torch.cat([silos.targets, *(b for _, b in silos.held_out.values())]))
        _tried(tried, outputs[:1].expand(len(labels), -1), labels)
    name, kinds, second = getattr(loss, "__qualname__", repr(loss)), _kinds(outputs, silos, classes), False
    if name in MODEL_LOSSES.names():  # a function of torch, say, which is not ours
        name = f"{loss.__module__}.{name}"
    known = options.class_axis is not None or sum(_places(outputs, targets)) == 1  # otherwise it may be anything
    if known and targets.ndim > 1 and not targets.is_floating_point():
        second, kinds = _classes_second(outputs, targets, options.class_axis), ("labels",)
    return ModelLoss(name, loss, classes, values.ndim == 1, kinds, classes_second=second)


def _places(outputs: Tensor, targets: Tensor) -> tuple[bool, bool]:
    """Whether the classes may be last among the outputs, and whether they may be second, as torch has them."""
    last = outputs.ndim >= 2 and outputs.shape[:-1] == targets.shape
    return last, outputs.ndim > 2 and (outputs.shape[0], *outputs.shape[2:]) == tuple(targets.shape)


def _classes_second(outputs: Tensor, targets: Tensor, axis: int | None) -> bool:
    """Whether outputs are (batch, classes, d1, ...) for targets (batch, d1, ...)."""
    last, second = _places(outputs, targets)
    given = f"the module gives {tuple(outputs.shape)} for targets {tuple(targets.shape)} of 2 samples"
    if last and second and axis is None:
        raise DataError(f"{given}: say class_axis=1 if classes come second, as in torch, or class_axis=-1 if last")
    if not (second if axis == 1 else last if axis == -1 else last or second):
        wanted = "batch, classes" if targets.ndim == 1 else "batch, tokens, classes) or (batch, classes, tokens"
        raise DataError(f"cross_entropy needs outputs ({wanted}), {given}")
    return second and axis != -1


def _outputs(module: nn.Module, inputs: Tensor, options: NetworkOptions, values: str = "") -> Tensor:
    """What the module gives for some samples: one tensor, or a line about why there is none."""
    if options.named_inputs is not None:
        wanted, numbers = sum(map(math.prod, options.named_inputs.values())), inputs[0].numel()
        if wanted != numbers:
            raise DataError(f"named_inputs have {wanted} numbers in all, a sample has {numbers}")
    try:
        with torch.no_grad():
            outputs = Plain(copy.deepcopy(module).cpu().eval(), options)(inputs)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        shape = "x".join(map(str, inputs.shape[1:]))
        raise DataError(
            f"the module does not take these samples ({shape}, {inputs.dtype}{values}): {first_line(error)}"
        ) from error
    if not isinstance(outputs, Tensor):
        kind = type(outputs).__name__
        raise DataError(f"the module gives a {kind} without logits; let it return one tensor, for example torch.cat")
    return outputs


def _augmented(augment: Augmentation | Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
    """Some samples as training sees them, or one line about why it would not."""
    try:
        if isinstance(augment, Augmentation):
            return augment(inputs, inputs.new_zeros((len(inputs), augment.draws), dtype=torch.long))
        with torch.random.fork_rng(devices=[]):
            return augment(inputs)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        shape = "x".join(map(str, inputs.shape[1:]))
        name = getattr(augment, "__qualname__", augment)
        raise DataError(
            f"augment = {name} does not take these samples ({shape}, {inputs.dtype}): {first_line(error)}"
        ) from error


def _tried(loss: LossFunction, outputs: Tensor, targets: Tensor) -> Tensor:
    """The loss of two samples, or one line about why there is none."""
    if isinstance(loss, type):
        raise ValueError(f"loss = {loss.__name__} is a class: make one of it, loss={loss.__name__}()")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "Using a target size")  # each output would be compared with all targets
            values = loss(outputs, targets)
    except (RuntimeError, ValueError, TypeError, IndexError, UserWarning) as error:
        hint = "; give flags as floating-point numbers" if targets.shape == outputs.shape else ""
        if targets.is_floating_point():
            hint = "; class labels are integers (or take loss='cross_entropy')"
        if outputs.shape == (*targets.shape, 1):
            hint = "; let the module give a number per sample, for example with squeeze(-1)"
        raise DataError(
            f"the loss does not take outputs {tuple(outputs.shape)} and targets {tuple(targets.shape)} of type "
            f"{targets.dtype}: {first_line(error)}{hint}"
        ) from error
    if not isinstance(values, Tensor):
        raise ValueError(f"loss = {loss!r} gives a {type(values).__name__}, expected a tensor of outputs and targets")
    return values


def _kinds(outputs: Tensor, silos: Silos, classes: bool) -> tuple[Kind, ...]:
    """What a loss of somebody else's may be for; a single output for two labels is a margin or a prediction."""
    if classes:
        return CLASSIFIERS if outputs.shape[1] == 2 else ("multiclass",)
    if outputs.numel() != len(outputs) or silos.targets.ndim > 1:
        return ()
    labels = set(torch.unique(silos.targets).tolist())
    return ("binary", "regression") if labels <= {0, 1} else ("regression",)
