"""What a run *is*: everything that determines its numbers, as one value that is stored and compared on resume."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import types
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedcomposite._validation import UserError
from fedcomposite.data.mapped import MappedRows
from fedcomposite.problems import Problem

Identity = dict[str, str]


class CheckpointError(UserError):
    """A checkpoint that is not there, is damaged, is of another run, or could not tell this run from another."""


def identify(problem: Problem, x0: Tensor, **settings: Any) -> Identity:
    """The identity of a run: data, start, problem and settings, each as a short text or a digest."""
    silos = problem.silos
    data: tuple[Any, ...] = silos.features, silos.targets, silos.offsets, silos.ids
    data += () if silos.weights is None else (silos.weights,)
    data += () if silos.margin_offsets is None else (silos.margin_offsets,)
    parts: dict[str, Any] = {
        "data": hashlib.sha256(describe(data).encode()).hexdigest(),
        "start": describe(x0),
        "loss": problem.loss,
        "regularizer": problem.regularizer,
        "bias": problem.bias,
        "weights": problem.weighting,
        "model": problem.model,
        "model options": problem.options if problem.model is not None else None,
        **settings,
    }
    return {key: value if isinstance(value, str) else describe(value) for key, value in parts.items()}


def differences(one: Mapping[str, str], two: Mapping[str, str]) -> list[str]:
    """The parts in which two identities differ, with the values where they are short."""
    found = []
    for key in [*one, *(k for k in two if k not in one)]:
        a, b = one.get(key, "-"), two.get(key, "-")
        if a != b:
            found.append(f"{key} ({a} there, {b} here)" if max(len(a), len(b)) <= 60 else key)
    return found


def describe(value: Any) -> str:
    """A text that tells values apart: tensors by their content, functions by the name that imports them."""
    if isinstance(value, Tensor):
        return _tensor(value)
    if isinstance(value, MappedRows):
        return value.identity()
    if isinstance(value, np.ndarray):
        return f"array {value.dtype} {value.shape} {_digest(np.ascontiguousarray(value))}"
    if isinstance(value, nn.Module):
        state = dict(value.state_dict(keep_vars=True))
        trained = [k for k, v in state.items() if v.requires_grad]
        return f"{type(value).__module__}.{value} {trained} {describe(state)}{_unseen(value, state)}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k!r}: {describe(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}({', '.join(map(describe, value))})"
    if isinstance(value, functools.partial):
        return f"partial({describe(value.func)}, {describe(value.args)}, {describe(value.keywords)})"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return type(value).__qualname__ + describe(fields)
    if isinstance(value, types.FunctionType | types.BuiltinFunctionType | type):
        return importable_name(value)
    plain = value is None or isinstance(value, bool | int | float | str | bytes | torch.dtype | torch.device)
    if plain or not hasattr(value, "__dict__"):
        return repr(value)
    return f"{importable_name(type(value))}{describe(vars(value))}"


def _unseen(module: nn.Module, state: Mapping[str, Any]) -> str:
    """Constants of a module and its layers, which neither their texts nor their saved tensors need to show."""
    found: dict[str, Any] = {k: v for k, v in module.named_buffers() if k not in state}
    for place, layer in module.named_modules():
        own = {k: v for k, v in vars(layer).items() if not k.startswith("_") and k != "training"}
        found |= {f"{place}.{k}": v for k, v in own.items() if _constant(v)}
    return describe(found)


def _constant(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_constant, value))
    return value is None or isinstance(value, bool | int | float | str | torch.dtype | Tensor)


def importable_name(function: Callable[..., Any]) -> str:
    """``module:name`` of a function or class that can be imported; others are refused, since two of them look alike."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    try:
        found: Any = importlib.import_module(module) if module else None
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        found = None
    if found is not function:
        raise CheckpointError(
            f"{name or function!r} has no name that can be imported, so a checkpoint could not tell it from another "
            "function: define it at the top level of a module (no lambda, no function inside a function)"
        )
    return f"{module}:{name}"


def _tensor(value: Tensor) -> str:
    raw = value.detach().cpu().contiguous()
    content = _digest(raw.view(-1).view(torch.uint8).numpy())
    return f"tensor {raw.dtype} {tuple(raw.shape)} {content}"


def _digest(content: Any) -> str:
    return hashlib.sha256(memoryview(content).cast("B") if content.size else b"").hexdigest()
