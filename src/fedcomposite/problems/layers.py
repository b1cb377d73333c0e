"""Convolutions and max pooling as a CPU likes them: channels last in memory, for one client and for many.

With that layout torch's kernels for pooling and for convolutions of single channels work on many channels at once.
Under vmap, which knows only the other layout, stacked clients become groups of channels here: ``(m, b, c, h, w)`` is
seen as ``(b, m c, h, w)``. Shapes and values are those of torch's own layers; only the strides differ, so a module that
asks for a ``view`` of them, where ``reshape`` or ``flatten`` would do, cannot have them.
"""

from __future__ import annotations

import functools
import operator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

_LAST = torch.channels_last
_ATEN = torch.ops.aten


def use_channels_last(module: nn.Module, *, single: bool = False) -> bool:
    """Let the module's plain convolutions and max pooling run as below; whether it has no other convolutions.

    ``single`` asks for convolutions of a single channel only.
    """
    all_plain = True
    for layer in module.modules():
        if single and not (isinstance(layer, nn.Conv2d) and layer.in_channels == 1):
            continue
        own = "forward" in vars(layer) and not _ours(layer)  # somebody else has given it another rule
        if own:
            all_plain &= not isinstance(layer, nn.modules.conv._ConvNd)
        elif type(layer) is nn.Conv2d and layer.padding_mode == "zeros" and not isinstance(layer.padding, str):
            layer.forward = partial(_convolve, layer, fused=False)  # type: ignore[method-assign]
        elif type(layer) is nn.MaxPool2d and not layer.return_indices:
            layer.forward = partial(_pool, layer)  # type: ignore[method-assign]
        else:
            all_plain &= not isinstance(layer, nn.modules.conv._ConvNd)
    return all_plain


def fuse_convolutions(module: nn.Module, *, convert: bool) -> None:
    """Prepare a module that will be compiled: convolutions of single channels are written out.

    Those with torch's rule are first given ours, if ``convert`` asks for it.
    """
    if convert:
        use_channels_last(module, single=True)
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d) and _ours(layer):
            layer.forward = partial(_convolve, layer, fused=True)  # type: ignore[method-assign]


def restore_layout(module: nn.Module) -> bool:
    """Undo :func:`use_channels_last`; whether there was anything to undo."""
    ours = [layer for layer in module.modules() if _ours(layer)]
    for layer in ours:
        del layer.forward
    return bool(ours)


def _ours(layer: nn.Module) -> bool:
    rule = vars(layer).get("forward")
    return isinstance(rule, partial) and rule.func in (_convolve, _pool)


def _convolve(layer: nn.Conv2d, input: Tensor, *, fused: bool) -> Tensor:
    if input.ndim != 4:
        return nn.Conv2d.forward(layer, input)
    sizes = layer.stride, layer.padding, layer.dilation
    out: Tensor = _call(_Convolution, input, layer.weight, sizes, layer.groups, fused)
    if layer.bias is not None:
        out = out + layer.bias[:, None, None]
    return out


def _pool(layer: nn.MaxPool2d, input: Tensor) -> Tensor:
    out: Tensor
    if input.ndim != 4:
        out = nn.MaxPool2d.forward(layer, input)
        return out
    sizes = [_pair(v) for v in (layer.kernel_size, layer.stride, layer.padding, layer.dilation)]
    out = _call(_Pool, input, sizes, layer.ceil_mode)[0]
    return out


def _call(function: type[Function], *given: Any) -> Any:
    return function.apply(*given)  # type: ignore[no-untyped-call]


def _pair(value: Any) -> list[int]:
    return [value, value] if isinstance(value, int) else list(value)


def _last(x: Tensor) -> Tensor:
    """With channels last, also for a single channel, where torch sees no difference and takes the other layout."""
    done = x.is_cuda or (x.stride(1) == 1 and x.is_contiguous(memory_format=_LAST))
    return x if done else x.clone(memory_format=_LAST)


def _stacked(x: Tensor, axis: int | None, clients: int) -> Tensor:
    """``(m, b, c, ...)`` with m at ``axis`` as ``(b, m c, ...)``; the same for all clients if there is no axis."""
    each = x.expand(clients, *x.shape) if axis is None else x.movedim(axis, 0)
    return each.movedim(0, 1).flatten(1, 2)


def _weights(w: Tensor, axis: int | None, clients: int) -> Tensor:
    """``(m, o, c, ...)`` as ``(m o, c, ...)``."""
    return (w.expand(clients, *w.shape) if axis is None else w.movedim(axis, 0)).flatten(0, 1)


def _apart(x: Tensor, clients: int) -> Tensor:
    """``(b, m c, ...)`` as ``(b, m, c, ...)``, with the clients' axis in the second place."""
    return x.view(len(x), clients, -1, *x.shape[2:])


def _written(fused: bool, x: Tensor, sizes: Any, groups: int) -> bool:
    """Whether to write a convolution, which will be compiled, out as a sum over shifted images.

    A GPU has no good kernel for many clients with one channel each: that sum, fused with what follows, and a product of
    matrices for its gradient are faster.
    """
    stride, _, dilation = sizes
    return fused and groups == x.shape[1] and tuple(stride) == tuple(dilation) == (1, 1)


def _windows(x: Tensor, w: Tensor, padding: Any) -> list[Tensor]:
    """The image shifted by every place of the kernel."""
    (top, left), (height, width) = padding, w.shape[2:]
    x = nn.functional.pad(x, (left, left, top, top))
    rows, columns = x.shape[2] - height + 1, x.shape[3] - width + 1
    return [x[:, :, i : i + rows, j : j + columns] for i in range(height) for j in range(width)]


class _Convolution(Function):
    @staticmethod
    def forward(x: Tensor, w: Tensor, sizes: Any, groups: int, fused: bool) -> Tensor:
        if _written(fused, x, sizes, groups):
            kernels = w.view(groups, -1, w[0].numel(), 1, 1).unbind(2)
            windows = _windows(x, w, sizes[1])
            products = (k * v.unsqueeze(2) for k, v in zip(kernels, windows, strict=True))
            return functools.reduce(operator.add, products).flatten(1, 2)
        out: Tensor = _ATEN.convolution(_last(x), _last(w), None, *sizes, False, [0, 0], groups)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        x, w, ctx.sizes, ctx.groups, ctx.fused = inputs
        ctx.save_for_backward(x, w)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        wanted = ctx.needs_input_grad[:2]
        gx, gw = _call(_Convolved, gradient, *ctx.saved_tensors, ctx.sizes, ctx.groups, ctx.fused, wanted)
        return gx if wanted[0] else None, gw if wanted[1] else None, None, None, None

    @staticmethod
    def vmap(info: Any, axes: Any, x: Tensor, w: Tensor, sizes: Any, groups: int, fused: bool) -> tuple[Tensor, int]:
        m = info.batch_size
        out = _call(_Convolution, _stacked(x, axes[0], m), _weights(w, axes[1], m), sizes, m * groups, fused)
        return _apart(out, m), 1


class _Convolved(Function):
    """The gradient of a convolution; what is not wanted is empty."""

    @staticmethod
    def forward(
        gradient: Tensor, x: Tensor, w: Tensor, sizes: Any, groups: int, fused: bool, wanted: tuple[bool, bool]
    ) -> tuple[Tensor, Tensor]:
        if _written(fused, x, sizes, groups) and wanted == (False, True):
            each = _apart(gradient, groups).flatten(3)
            sums = each @ torch.stack(_windows(x, w, sizes[1]), 2).flatten(3).transpose(2, 3)
            return x.new_empty(0), sums.sum(0).view(w.shape)
        gx, gw, _ = _ATEN.convolution_backward(
            _last(gradient), _last(x), _last(w), None, *sizes, False, [0, 0], groups, [*wanted, False]
        )
        return gx if wanted[0] else x.new_empty(0), gw if wanted[1] else x.new_empty(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        return

    @staticmethod
    def vmap(
        info: Any,
        axes: Any,
        gradient: Tensor,
        x: Tensor,
        w: Tensor,
        sizes: Any,
        groups: int,
        fused: bool,
        wanted: tuple[bool, bool],
    ) -> tuple[tuple[Tensor, Tensor], tuple[int | None, int | None]]:
        m = info.batch_size
        stacked = _stacked(gradient, axes[0], m), _stacked(x, axes[1], m), _weights(w, axes[2], m)
        gx, gw = _call(_Convolved, *stacked, sizes, m * groups, fused, wanted)
        found = _apart(gx, m) if wanted[0] else gx, gw.view(m, -1, *gw.shape[1:]) if wanted[1] else gw
        return found, (1 if wanted[0] else None, 0 if wanted[1] else None)


class _Pool(Function):
    @staticmethod
    def forward(x: Tensor, sizes: Any, ceil: bool) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = _ATEN.max_pool2d_with_indices(_last(x), *sizes, ceil)
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, ctx.sizes, ctx.ceil = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(x, output[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Any, ...]:
        return _call(_Pooled, gradient, *ctx.saved_tensors, ctx.sizes, ctx.ceil), None, None

    @staticmethod
    def vmap(info: Any, axes: Any, x: Tensor, sizes: Any, ceil: bool) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        m = info.batch_size
        out, where = _call(_Pool, _stacked(x, axes[0], m), sizes, ceil)
        return (_apart(out, m), _apart(where, m)), (1, 1)


class _Pooled(Function):
    """The gradient of pooling."""

    @staticmethod
    def forward(gradient: Tensor, x: Tensor, where: Tensor, sizes: Any, ceil: bool) -> Tensor:
        out: Tensor = _ATEN.max_pool2d_with_indices_backward(_last(gradient), _last(x), *sizes, ceil, where)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        return

    @staticmethod
    def vmap(info: Any, axes: Any, *given: Any) -> tuple[Tensor, int]:
        m = info.batch_size
        stacked = [_stacked(t, a, m) for t, a in zip(given[:3], axes[:3], strict=True)]
        return _apart(_call(_Pooled, *stacked, *given[3:]), m), 1
