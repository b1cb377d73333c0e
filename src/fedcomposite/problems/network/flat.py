"""A module as a function of two flat vectors: its trainable parameters and its persistent buffers."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import accumulate
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn.utils.stateless import _reparametrize_module

from fedcomposite.problems.base import Slot
from fedcomposite.problems.layers import fuse_convolutions, restore_layout, use_channels_last
from fedcomposite.problems.network.options import NetworkOptions, single_tensor

LARGE = 1 << 20
"""Parameters from which vectorised convolutions are slower on a CPU, whatever the batch and layout."""

COMPILED_LAYERS = 24
"""Layers up to which compiling takes seconds and not minutes; deeper models are recorded as they are."""

_RANDOM = (nn.modules.dropout._DropoutNd, nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)
_CONVOLUTION = nn.modules.conv._ConvNd
_BATCH_NORM = nn.modules.batchnorm._BatchNorm
_WEIGHT_NORM = nn.utils.parametrizations._WeightNorm
_EMBEDDING = (nn.Embedding, nn.EmbeddingBag)
_REMARKS = ("RNN module weights are not part of single", "There is a performance drop because we have not yet")
_SEQUENTIAL = (nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)


def layout(module: nn.Module) -> tuple[Slot, ...]:
    """Where each trainable parameter lies in x, in the module's order."""
    for name, m in module.named_modules():
        what = f"{type(m).__name__} {name!r}" if name else type(m).__name__
        if isinstance(m, _EMBEDDING) and m.max_norm is not None:
            raise ValueError(f"{what} has max_norm, with which it changes its own weights; leave it out")
        if isinstance(m, torch.jit.ScriptModule | nn.DataParallel):
            raise ValueError(f"{what} keeps its tensors to itself; give the plain module that it was made of")
    slots = _slots({name: p for name, p in module.named_parameters() if p.requires_grad})
    if wrong := [name for name, p in module.named_parameters() if p.is_complex()]:
        raise ValueError(f"parameter {wrong[0]!r} is complex; give real and imaginary parts (torch.view_as_real)")
    if not slots:
        raise ValueError("this module has no parameters to train (requires_grad is false for all, or there are none)")
    return slots


def _slots(tensors: Mapping[str, Tensor]) -> tuple[Slot, ...]:
    """Where tensors lie in one vector, one after another."""
    ends = list(accumulate(t.numel() for t in tensors.values()))
    each = zip(tensors.items(), ends, strict=True)
    return tuple(Slot(name, end - t.numel(), end, tuple(t.shape)) for (name, t), end in each)


def _counters(module: nn.Module) -> set[str]:
    """Names of the batches that batch norms have seen, where the number does not matter to them."""
    found = [(k, m) for k, m in module.named_modules() if isinstance(m, _BATCH_NORM) and m.momentum is not None]
    return {f"{place}.num_batches_tracked" if place else "num_batches_tracked" for place, _ in found}


def _aliases(module: nn.Module) -> dict[str, list[str]]:
    """Further names of shared parameters, by their first: one for every layer and attribute that holds them."""
    names: dict[int, list[str]] = {}
    for place, layer in module.named_modules():
        for key, p in layer._parameters.items():
            if p is not None and p.requires_grad:
                names.setdefault(id(p), []).append(f"{place}.{key}" if place else key)
    return {first: others for first, *others in names.values() if others}


class FlatModule:
    """A copy of a module on one device in one dtype, and what is known about its layers.

    Everybody who works with it shares the object, so that a layout that is given up is given up for all.
    """

    def __init__(
        self,
        module: nn.Module,
        options: NetworkOptions,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.module = copy.deepcopy(module).to(device, dtype)
        for m in self.module.modules():
            if isinstance(m, _EMBEDDING):
                m.sparse = False  # gradients are parts of a vector
            if isinstance(m, _WEIGHT_NORM) and device.type == "cuda" and dtype == torch.float64:
                m.forward = partial(_weight_norm, m.dim)  # type: ignore[method-assign]  # torch's kernel has roots in single precision
        self.dtype, self.device = dtype, device
        self.layout = layout(module)
        self.dimension = self.layout[-1].stop
        self.sizes = [s.stop - s.start for s in self.layout]
        self._aliases = _aliases(self.module)
        kept = self.module.state_dict()
        self._buffers = {k: b for k, b in self.module.named_buffers() if k in kept}
        self.buffer_layout = _slots(self._buffers)
        """Where each persistent buffer lies in the second vector."""
        self.integers = {k for k, b in self._buffers.items() if not b.is_floating_point()}
        """Names of the buffers that hold integers."""
        for k in self.integers:
            if not torch.equal(self._buffers[k], self._buffers[k].to(dtype).to(self._buffers[k].dtype)):
                raise ValueError(
                    f"buffer {k!r} has integers that {dtype} cannot hold; register it with persistent=False"
                )
        self.counters = self.integers & _counters(self.module)
        """Those that only count passes: a batch norm works without."""
        self._options = options
        kinds = list(self.module.modules())
        self.layers = sum(not list(m.children()) for m in kinds)
        self.convolves = any(isinstance(m, _CONVOLUTION) for m in kinds)
        self.recurrent = any(isinstance(m, nn.RNNBase) for m in kinds)
        self.sequential = any(isinstance(m, _SEQUENTIAL) for m in kinds)
        """Whether it has recurrent or attention layers, whose kernels take one set of weights."""
        self._remarked = self.sequential
        frozen = any(not p.requires_grad for p in module.parameters())
        crashes = frozen and any(isinstance(m, nn.GroupNorm) for m in kinds)  # torch's, on inputs without gradients
        small = self.dimension < LARGE and not crashes
        self.fits_channels_last = device.type == "cpu" and dtype == torch.float32 and small
        self.channels_last = self.fits_channels_last and use_channels_last(self.module)
        """Whether all its convolutions have channels last in memory."""
        self.batch_norm = any(isinstance(m, _BATCH_NORM) for m in kinds)
        attention = any(isinstance(m, nn.MultiheadAttention) and m.dropout > 0 for m in kinds)
        self.random = attention or any(isinstance(m, _RANDOM) and getattr(m, "p", 1) > 0 for m in kinds)
        if options.precision == "bf16":
            for m in kinds:
                if isinstance(m, _BATCH_NORM):
                    m.register_forward_pre_hook(partial(_alike, dtype))

    @property
    def lists(self) -> bool:
        """Whether a pass may become a list of operations; a CPU's recurrent kernels crash outside autograd."""
        return self.device.type == "cpu" and self.layers <= COMPILED_LAYERS and not self.recurrent

    def restore_layout(self) -> bool:
        """Give the module's layers their usual layout back; whether that changes anything."""
        self.channels_last = False
        return restore_layout(self.module)

    def for_compilation(self) -> Self:
        """The same with a module of its own, whose convolutions of single channels a compiler can fuse."""
        other = copy.copy(self)
        other.module = copy.deepcopy(self.module)
        fuse_convolutions(other.module, convert=self._options.precision == "full")  # autocast does not look inside
        return other

    # -- flat vectors -------------------------------------------------------------------------------------------------

    def start(self) -> Tensor:
        """The module's own parameters, flattened."""
        trained = [p.detach().reshape(-1) for p in self.module.parameters() if p.requires_grad]
        return torch.cat(trained).to(self.dtype)

    def buffers(self) -> Tensor:
        """The module's own persistent buffers, flattened."""
        return self.pack(self._buffers)

    def pack(self, buffers: dict[str, Tensor]) -> Tensor:
        """Buffers by name as one vector."""
        parts = [buffers[k].reshape(-1).to(self.dtype) for k in self._buffers]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=self.dtype, device=self.device)

    def unpack(self, flat: Tensor, slots: Iterable[Slot] | None = None) -> dict[str, Tensor]:
        """Buffers out of one vector, all or some: fresh tensors, since training modifies them in place."""
        found = {}
        for name, start, stop, shape in self.buffer_layout if slots is None else slots:
            v = flat[start:stop]
            fresh = v.round().to(self._buffers[name].dtype) if name in self.integers else v.clone()
            found[name] = fresh.view(shape)
        return found

    def leaves(self, x: Tensor) -> dict[str, Tensor]:
        """Parameters by name that autograd differentiates by.

        On a GPU each has memory of its own, since a row of stacked vectors is not aligned as its libraries need it,
        and weights of two-dimensional convolutions have channels last.
        """
        parts = zip(self.layout, x.split_with_sizes(self.sizes), strict=True)
        made = {slot.name: v.view(slot.shape) for slot, v in parts}
        if self.device.type == "cuda":
            made = {k: v.clone(memory_format=_memory(v)) for k, v in made.items()}
        return {k: v.requires_grad_() for k, v in made.items()}

    def placed(self, inputs: Tensor) -> Tensor:
        """Inputs of one client as its convolutions take them fastest."""
        if self.device.type == "cuda" and self.convolves and inputs.ndim == 4 and inputs.is_floating_point():
            return inputs.contiguous(memory_format=torch.channels_last)
        return inputs

    def state(self, x: Tensor, buffers: Tensor) -> dict[str, Tensor]:
        """The module's tensors by name, out of two flat vectors."""
        parts = zip(self.layout, x.split_with_sizes(self.sizes), strict=True)
        return {slot.name: v.view(slot.shape) for slot, v in parts} | self.unpack(buffers)

    @contextmanager
    def holding(self, state: Mapping[str, Tensor | None], *, train: bool) -> Iterator[Callable[[Tensor], Tensor]]:
        """The module with these tensors, as long as this lasts; training moves the buffers among them.

        Differentiate inside: a module with activation checkpoints looks at its tensors again then.
        """
        module = self.module
        if module.training != train:
            module.train(train)

        def outputs(inputs: Tensor) -> Tensor:
            with self._autocast(), self.quiet():
                made: Tensor = single_tensor(self._options.called(module, inputs))
            return made if made.dtype == self.dtype else made.to(self.dtype)

        named = {alias: state[name] for name, aliases in self._aliases.items() for alias in aliases}
        with _reparametrize_module(module, {**state, **named}, tie_weights=False):  # type: ignore[dict-item]
            yield outputs

    def forward(self, state: Mapping[str, Tensor | None], inputs: Tensor, *, train: bool) -> Tensor:
        """Outputs of the module with these tensors."""
        with self.holding(state, train=train) as outputs:
            return outputs(inputs)

    @contextmanager
    def watched(self, note: Callable[[Tensor], None]) -> Iterator[None]:
        """Show what enters and leaves each layer to ``note`` inside."""

        def look(layer: nn.Module, given: tuple[Any, ...], made: Any) -> None:
            for value in (*given, *(made if isinstance(made, tuple) else (made,))):
                if isinstance(value, Tensor):
                    note(value)

        hooks = [m.register_forward_hook(look) for m in self.module.modules()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def starved(self, one: Tensor) -> str | None:
        """The first batch norm that has a single value per channel when it trains on one sample; torch refuses that."""
        found: list[str] = []

        def watch(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
            def look(layer: nn.Module, given: tuple[Tensor, ...]) -> None:
                if layer.training and given[0].numel() == given[0].shape[1]:
                    found.append(f"{type(layer).__name__} {name!r}")

            return look

        layers = [(k, m) for k, m in self.module.named_modules() if isinstance(m, _BATCH_NORM)]
        hooks = [m.register_forward_pre_hook(watch(k)) for k, m in layers]
        devices = [self.device] if self.device.type == "cuda" else []
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=devices):
                self.forward(self.state(self.start(), self.buffers()), one, train=True)
        except ValueError:
            if not found:
                raise
        finally:
            for hook in hooks:
                hook.remove()
        return found[0] if found else None

    def _autocast(self) -> AbstractContextManager[Any]:
        if self._options.precision == "bf16" and self.device.type == "cuda":
            return torch.autocast("cuda", torch.bfloat16, cache_enabled=False)  # a cache does not survive recording
        return nullcontext()

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Without torch's remarks on speed that nobody can act on: weights are parts of a vector, clients stacked."""
        if not self._remarked:
            yield
            return
        with warnings.catch_warnings():
            for remark in _REMARKS:
                warnings.filterwarnings("ignore", message=remark)
            yield

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Try something, and be quiet from then on if torch has remarks on it; what else is said will be said again."""
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            yield
        self._remarked |= any(str(w.message).startswith(_REMARKS) for w in said)

    def differentiable(self) -> AbstractContextManager[Any]:
        """Where gradients are taken in evaluation mode: cuDNN's recurrent layers have them in training mode only."""
        if self.recurrent and self.device.type == "cuda":
            return torch.backends.cudnn.flags(enabled=False)
        return nullcontext()


def _weight_norm(dim: int, length: Tensor, direction: Tensor) -> Tensor:
    """Weights of some lengths along directions, by torch's own norm."""
    return direction * (length / torch.norm_except_dim(direction, 2, dim))


def _alike(dtype: torch.dtype, _: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """What a batch norm is given, in its own dtype where vmap is at work, which refuses a mixture.

    Elsewhere its kernels take bfloat16, add up in float32 themselves, and move half the bytes.
    """
    return (inputs[0].to(dtype),) if is_functorch_wrapped_tensor(inputs[0]) else inputs


def _memory(v: Tensor) -> torch.memory_format:
    return torch.channels_last if v.ndim == 4 else torch.contiguous_format
