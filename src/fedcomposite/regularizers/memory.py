"""A pure formula carried out at the speed of memory: block by block, in a few buffers that stay in cache.

A prox is a handful of elementwise operations. Written down on a whole vector, each of them reads and writes memory and
makes a new tensor. Here they are learned by running the formula once on no entries, and carried out on one block after
another: results go to buffers that are used again, and the last one straight to its place, so that memory is read once
and written once. That does not change a bit of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

Formula = Callable[[Tensor, float | Tensor], Tensor]

_BLOCK = 1 << 18  # entries per block and thread: a few buffers of this size stay in a core's caches
LITTLE = 1 << 16  # the same where groups are seen together, which takes more temporaries; no more is not cut
_THREADS = 8  # threads up to which blocks grow, so that buffers stay small

# Elementwise operations that write where they are told to.
_DIRECTED: dict[str, Callable[..., Tensor]] = {
    name: getattr(torch, name) for name in ("sub", "mul", "div", "clamp", "minimum", "addcmul", "hardshrink")
} | {"softshrink": torch.nn.functional.softshrink}


def give(result: Tensor, out: Tensor | None) -> Tensor:
    """The result, in ``out`` where there is one."""
    return result if out is None else out.copy_(result)


def in_blocks(formula: Formula, v: Tensor, step: float | Tensor, out: Tensor | None, grain: int) -> Tensor:
    """The result of a formula that treats every ``grain`` consecutive entries alike; ``out`` may be ``v``.

    A tensor of steps has one per vector, ``(..., 1)``, or one per entry.
    """
    most = (_BLOCK if grain == 1 else LITTLE) * min(torch.get_num_threads(), _THREADS)  # torch shares out each block
    strided = any(t is not None and t.dim() > 2 and not t.is_contiguous() for t in (v, out))  # rows need a copy
    if v.numel() <= most or v.device.type != "cpu" or strided:
        return give(formula(v, step), out)
    sink = torch.empty_like(v) if out is None else out
    flat = not isinstance(step, Tensor) and v.is_contiguous() and sink.is_contiguous()
    source, target = (t.view(1, -1) if flat else t.view(-1, v.shape[-1]) for t in (v, sink))
    steps = None
    if isinstance(step, Tensor):
        each = step.shape[-1] if step.dim() else 1
        steps = step.broadcast_to((*v.shape[:-1], each)).reshape(len(source), each)
    with torch.no_grad():
        program = _learned(formula, source, step if steps is None else steps) if grain == 1 else None
        if program is not None and len(program) == 1 and steps is None:
            most = v.numel()  # one operation is one pass already
        scratch: list[Tensor] = []
        for rows, columns in _cuts(source.shape, most, grain):
            block, place = source[rows, columns], target[rows, columns]
            own = step if steps is None else steps[rows, columns if steps.shape[1] > 1 else slice(None)]
            if program is None:
                place.copy_(formula(block, own))
            else:
                _carry_out(program, block, own, place, scratch)
    return sink


def _cuts(shape: tuple[int, ...], most: int, grain: int) -> Iterator[tuple[slice, slice]]:
    """Cut a matrix into blocks of at most ``most`` entries: several rows, or equal pieces of a row, whole in groups."""
    rows, columns = shape
    wide = -(-columns // -(-columns // most))
    wide = -(-wide // grain) * grain
    tall = max(1, most // wide)
    for i in range(0, rows, tall):
        yield from ((slice(i, i + tall), slice(j, j + wide)) for j in range(0, columns, wide))


class _Recorder(TorchFunctionMode):
    """Writes down every operation and its result."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result


class _Operation(NamedTuple):
    function: Callable[..., Tensor]
    arguments: tuple[Any, ...]
    values: tuple[tuple[int, int], ...]  # (argument, value): 0 is the block, 1 the step, 2 + i the result of i
    options: dict[str, Any]
    buffer: int | None  # a result that has the size of a step, not of the block, is a new tensor


def _learned(formula: Formula, source: Tensor, steps: float | Tensor) -> list[_Operation] | None:
    """The formula's operations, or None unless all of them on entries can be directed and the last gives the result."""
    inputs = source[:, :0], steps[:, :0] if isinstance(steps, Tensor) and steps.shape[1] > 1 else steps
    with _Recorder() as recorder:
        result = formula(*inputs)
    calls = [call for call in recorder.calls if not isinstance(call[3], torch.dtype)]
    number = {id(t): i for i, t in enumerate((*inputs, *(call[3] for call in calls)))}
    last = {number[id(a)]: i for i, (_, args, _, _) in enumerate(calls) for a in args if id(a) in number}
    program: list[_Operation] = []
    held: dict[int, int] = {}  # value -> its buffer
    free: list[int] = []
    for i, (func, args, kwargs, value) in enumerate(calls):
        values = tuple((j, number[id(a)]) for j, a in enumerate(args) if id(a) in number)
        if not isinstance(value, Tensor) or any(id(option) in number for option in kwargs.values()):
            return None
        buffer = None
        if any(n == 0 or n in held for _, n in values):
            func = _DIRECTED.get(func.__name__)
            if func is None:
                return None
            free += [held[n] for n in {n for _, n in values} if n in held and last[n] == i]  # may be written in place
            buffer = held[i + 2] = free.pop() if free else len(held)
        program.append(_Operation(func, args, values, kwargs, buffer))
    return program if program and program[-1].buffer is not None and calls[-1][3] is result else None


def _carry_out(
    program: list[_Operation], block: Tensor, step: float | Tensor, target: Tensor, scratch: list[Tensor]
) -> None:
    """The program on a block, with its last result in ``target``; ``scratch`` is filled with buffers as needed."""
    values: list[Any] = [block, step]
    for operation in program:
        arguments = list(operation.arguments)
        for j, n in operation.values:
            arguments[j] = values[n]
        options = operation.options
        if operation is program[-1]:
            options = options | {"out": target}
        elif operation.buffer is not None:
            while len(scratch) <= operation.buffer:
                scratch.append(torch.empty(block.numel(), dtype=block.dtype))
            options = options | {"out": scratch[operation.buffer][: block.numel()].view(block.shape)}
        values.append(operation.function(*arguments, **options))
