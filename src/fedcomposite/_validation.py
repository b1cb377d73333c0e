"""Checks of hyperparameters, driven by the annotations of a dataclass.

A field says what it accepts in its type: ``step: Positive``, ``local_steps: Count``,
``option: Literal[1, 2] = 2``, ``radius: Positive | None = None``. :func:`validate` reads those types and raises
a :class:`ValueError` that names the class, the field, the value and the allowed range. The same types are
the schema of a configuration file.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import operator
import sys
import types
import typing
import warnings
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from typing import Annotated, Any, Literal, ParamSpec, TypeVar

import annotated_types as at
import numpy as np
import torch

from fedcomposite._faults import UserError as UserError
from fedcomposite._faults import suggest as suggest

Positive = Annotated[float, at.Gt(0)]
ZeroOrMore = Annotated[float, at.Ge(0)]
Probability = Annotated[float, at.Gt(0), at.Le(1)]
Count = Annotated[int, at.Ge(1)]
Natural = Annotated[int, at.Ge(0)]
Inside = Annotated[float, at.Gt(0), at.Lt(1)]

_P = ParamSpec("_P")
_R = TypeVar("_R")
_SYMBOLS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}


@functools.cache
def _limits(hint: Any) -> list[tuple[str, float]]:
    """The limits of a type as the names of operators and numbers."""
    limits = {type(limit).__name__.casefold(): limit for limit in typing.get_args(hint)[1:]}
    return [(name, float(getattr(limit, name))) for name, limit in limits.items() if name in _SYMBOLS]


@functools.cache
def _form(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """The origin of a type and its arguments, which are taken apart once."""
    return typing.get_origin(hint), typing.get_args(hint)


def describe(hint: Any) -> str:
    """Say in words what values a type accepts: ``"a number > 0"``, ``"one of 1, 2"``."""
    if hint is type(None):
        return "none"
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        limits = " and ".join(f"{_SYMBOLS[a]} {v:g}" for a, v in _limits(hint))
        return f"{describe(args[0])} {limits}".strip()
    if origin is Literal:
        return "one of " + ", ".join(map(repr, args)) if len(args) > 1 else repr(args[0])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(describe, args))
    if origin is tuple:
        return "a list of " + describe(args[0])
    if origin is Callable:
        return "a function"
    return {float: "a number", int: "an integer", bool: "true or false", str: "a string"}.get(
        hint, getattr(hint, "__name__", str(hint))
    )


def _accept(hint: Any, value: Any) -> tuple[bool, Any]:
    """Whether ``value`` fits ``hint``, and the value in its normal form."""
    origin, args = _form(hint)
    if hint is Any:
        return True, value
    if isinstance(value, np.generic):
        value = value.item()
    if hint is type(None):
        return value is None, value
    if origin is Annotated:
        ok, value = _accept(args[0], value)
        if not ok:
            return False, value
        return math.isfinite(value) and all(getattr(operator, a)(value, v) for a, v in _limits(hint)), value
    if origin is Literal:
        return any(type(value) is type(a) and value == a for a in args), value
    if origin in (typing.Union, types.UnionType):
        for option in args:
            ok, converted = _accept(option, value)
            if ok:
                return True, converted
        return False, value
    if origin is tuple:
        if isinstance(value, np.ndarray | torch.Tensor) and value.ndim == 1:
            value = value.tolist()
        if not isinstance(value, list | tuple):
            return False, value
        parts = [_accept(args[0], v) for v in value]
        return all(ok for ok, _ in parts), tuple(v for _, v in parts)
    if origin is Callable:
        return callable(value), value
    if hint is float:
        ok = isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
        return ok, float(value) if ok else value
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool), value
    if isinstance(hint, type):
        return isinstance(value, hint), value
    return True, value


@functools.cache
def hints_of(cls: Hashable) -> dict[str, Any]:
    """The annotations of a class; evaluating them takes longer than building most regularizers."""
    return typing.get_type_hints(cls, include_extras=True)


def validate(instance: Any, skip: Collection[str] = ()) -> None:
    """Check the fields of a dataclass instance against their annotations, and normalise ints to floats."""
    cls = type(instance)
    given = {f.name: getattr(instance, f.name) for f in dataclasses.fields(cls) if f.name not in skip}
    hints = hints_of(cls)  # type: ignore[arg-type]  # a class is hashable
    for name, value in given.items():
        ok, converted = _accept(hints[name], value)
        if not ok:
            refuse(wrong_values(cls, given))
        object.__setattr__(instance, name, converted)


def refuse(faults: Collection[str], error: type[ValueError] = ValueError) -> None:
    """One error for all faults, a line for each."""
    if faults:
        raise error("\n".join(faults))


def wrong_values(cls: type[Any], fields: Mapping[str, Any]) -> list[str]:
    """A line for every value that a dataclass's field does not accept."""
    hints = hints_of(cls)  # type: ignore[arg-type]
    return [f"{cls.__name__}: {line}" for line in _wrong(hints, fields)]


def _wrong(hints: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    wrong = {name: value for name, value in given.items() if not _accept(hints[name], value)[0]}
    shown = {name: "a tensor" if isinstance(value, torch.Tensor) else repr(value) for name, value in wrong.items()}
    return [f"{name} = {shown[name]:.80}, must be {describe(hints[name])}" for name in wrong]


def wrong_arguments(function: Callable[..., Any], given: Mapping[str, Any]) -> list[str]:
    """A line for every argument that is not what the function's annotations say; other names are passed over."""
    hints = hints_of(function)
    return _wrong(hints, {name: value for name, value in given.items() if name in hints})


def wrong_names(cls: type[Any], fields: Iterable[str]) -> list[str]:
    """A line for every name that is no field of a dataclass."""
    return _unknown(cls.__name__, "field", fields, [f.name for f in dataclasses.fields(cls) if f.init])


def _unknown(what: str, kind: str, names: Iterable[str], known: Collection[str]) -> list[str]:
    listed = f"(its {kind}s: {', '.join(known) or 'none'})"
    return [f"{what} has no {kind} {n!r}{suggest(n, known)} {listed}" for n in names if n not in known]


def check_fields(cls: type[Any], fields: Mapping[str, Any]) -> None:
    """Check some of the fields of a dataclass: every name known, every value of its type."""
    known = {f.name for f in dataclasses.fields(cls) if f.init}
    refuse([*wrong_names(cls, fields), *wrong_values(cls, {k: v for k, v in fields.items() if k in known})])


def check_call(
    what: str, function: Callable[..., Any], options: Mapping[str, Any], error: type[ValueError] = ValueError
) -> dict[str, Any]:
    """Check options against the keyword-only parameters of a function: every name known, every value of its type.

    Returns the options in normal form, ready for the call. ``what`` names the function in messages; NumPy scalars count
    as numbers. Without an annotation any value will do.
    """
    known = {p.name: p for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY}
    hints = dict.fromkeys(known, Any) | (hints_of(function) if inspect.isroutine(function) else {})
    given = {name: value for name, value in options.items() if name in known}
    faults = [*_unknown(what, "option", options, known), *(f"{what}: {line}" for line in _wrong(hints, given))]
    refuse([*faults, *lacking(what, {n: hints[n] for n, p in known.items() if p.default is p.empty}, options)], error)
    return {name: _accept(hints[name], value)[1] for name, value in given.items()}


def lacking(what: str, needed: Mapping[str, Any], given: Iterable[str]) -> list[str]:
    """A line about the names that are needed, with their types, and are neither given nor misspelt."""
    meant = "".join(suggest(name, needed) for name in given if name not in needed)
    missing = [name for name in needed if name not in given and repr(name) not in meant]
    return [f"{what} needs " + ", ".join(f"{name} ({describe(needed[name])})" for name in missing)] if missing else []


def renamed(**names: str | tuple[str, Callable[[Any], Any]]) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Let a function take arguments by the names that they had in the last version, with a warning that says the new.

    A value is taken as it is, or made into the new one by a function: ``renamed(weights=("pooled", is_pooled))``.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(function)
        def made(*args: _P.args, **given: _P.kwargs) -> _R:
            for old in [name for name in names if name in given]:
                now = names[old]
                new, convert = (now, None) if isinstance(now, str) else now
                if new in given:
                    raise TypeError(f"{old} is now {new}; give {new} alone")
                said = f"{old} is now {new}; the old name goes with the next version"
                warnings.warn(said, DeprecationWarning, _callers())
                value = given.pop(old)
                given[new] = value if convert is None else convert(value)
            return function(*args, **given)

        return made

    return decorate


def _callers() -> int:
    """The stack level, of who asks for it, of the code that calls this package: Python shows what that is warned of."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == "fedcomposite":
        level, frame = level + 1, frame.f_back
    return level


def formerly(**names: str) -> Callable[[type[_R]], type[_R]]:
    """Let a dataclass take fields by the names that they had in the last version; ``formerly`` of it are the names."""

    def decorate(cls: type[_R]) -> type[_R]:
        cls.__init__ = renamed(**names)(cls.__init__)  # type: ignore[method-assign]
        cls.formerly = names  # type: ignore[attr-defined]
        return cls

    return decorate


def as_model(x: Any) -> Any:
    """The vector of whatever holds a model; what holds none is given back as it is.

    That is ``solution`` of a run or of a run's best model, ``solution()`` of a path or a cross-validation with its
    usual choice, ``solution_`` of a fitted estimator.
    """
    for name in ("solution", "solution_"):
        if (found := getattr(x, name, None)) is not None:
            return found() if callable(found) else found
    return x


def buffers_of(x: Any) -> torch.Tensor | None:
    """The running statistics that a run keeps beside its model; None where there are none."""
    found = getattr(x, "buffers", None)
    return found if isinstance(found, torch.Tensor) and found.numel() else None


def as_vector(x: Any, name: str = "x") -> torch.Tensor:
    """A model as a vector: a tensor or an array in its own floating-point type, everything else in float64."""
    x = as_model(x)
    try:
        point = torch.as_tensor(x, dtype=None if isinstance(x, torch.Tensor | np.ndarray) else torch.float64)
    except (TypeError, ValueError, RuntimeError):
        point = torch.zeros(0, dtype=torch.complex64)
    if point.is_complex():
        hint = "; fit it first" if hasattr(x, "fit") else ""
        raise ValueError(f"{name} = {x!r:.60}, must be a vector of numbers, or a run or estimator that has one{hint}")
    return point if point.is_floating_point() else point.double()
