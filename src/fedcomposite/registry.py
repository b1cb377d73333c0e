"""One way to find a method, regularizer, loss, model, metric or data set by name, ours or an installed package's.

A package offers its own through an entry point, for example in its ``pyproject.toml``::

    [project.entry-points."fedcomposite.algorithms"]
    ServerMomentum = "their_package.momentum:ServerMomentum"

Then a configuration can name it, ``fedcomposite list`` shows it with the package it is from, and a federation runs it
wherever it is installed. Nothing of another package is imported before its name is looked up or listed. One that
cannot be imported is left out of the list, and whoever names it is told why in one line.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import typing
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from typing import Any, TypeVar

from fedcomposite._validation import hints_of, lacking, suggest, wrong_names, wrong_values

T = TypeVar("T")
OURS = "fedcomposite"


class RegistryError(ValueError, KeyError):
    """A name that cannot be used: unknown, offered by two packages, or of something that cannot be imported."""

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError would show it in quotes


class Registry(Mapping[str, T]):
    """What can be named in a configuration: a read-only mapping from names to classes, functions or objects.

    Names are found whatever their case, and with ``-`` for ``_``. Listing leaves out what cannot be used;
    :meth:`problems` says why.

    Parameters
    ----------
    kind : str
        What is registered, in the words of messages: "algorithm".
    own : mapping
        What this package itself offers.
    group : str
        The group of entry points through which other packages offer more.
    accept : function, optional
        Takes a name and what an entry point leads to, and returns what is registered, or raises a TypeError that says
        what is wrong with it.

    Examples
    --------
    >>> colours = Registry("colour", {"Red": 1, "dark_blue": 2}, group="fedcomposite.colours")
    >>> colours["red"], colours["Dark-Blue"]
    (1, 2)
    >>> colours["rad"]
    Traceback (most recent call last):
    fedcomposite.registry.RegistryError: unknown colour 'rad'; did you mean 'Red'? (known: Red, dark_blue)
    """

    def __init__(
        self, kind: str, own: Mapping[str, T], *, group: str, accept: Callable[[str, Any], T] | None = None
    ) -> None:
        self.kind, self.group = kind, group
        self._own = dict(own)
        self._folded = {fold(name): name for name in own}
        self._accept = accept
        self._loaded: dict[EntryPoint, tuple[T] | str] = {}  # the thing, or why there is none

    def __getitem__(self, name: str) -> T:
        own, offers = self._find(name)
        if (own is not None) + len(offers) > 1:
            givers = [*([OURS] if own is not None else []), *map(_package, offers)]
            raise RegistryError(
                f"the {self.kind} {name!r} is offered by {' and by '.join(givers)}: "
                f"one of them has to give its entry point in {self.group!r} another name, or to go"
            )
        if own is not None:
            return self._own[own]
        if not offers:
            known = sorted(self.names())
            raise RegistryError(f"unknown {self.kind} {name!r}{suggest(str(name), known)} (known: {', '.join(known)})")
        found = self._load(offers[0])
        if isinstance(found, str):
            raise RegistryError(found)
        return found[0]

    def __iter__(self) -> Iterator[str]:
        return (name for name in self.names() if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def names(self) -> list[str]:
        """Every name, also of what cannot be used; imports nothing."""
        theirs = sorted({point.name for point in self._points() if fold(point.name) not in self._folded})
        return [*self._own, *theirs]

    def lookup(self, name: str, error: type[ValueError]) -> T:
        """What has this name; a name that cannot be used is an ``error``."""
        try:
            return self[name]
        except RegistryError as unusable:
            raise error(str(unusable)) from None

    def canonical(self, name: str) -> str:
        """The name as it is listed."""
        own, offers = self._find(name)
        return own or (offers[0].name if offers else name)

    def origin(self, name: str) -> str:
        """The package that offers this name, with its version where it is another's."""
        own, offers = self._find(name)
        return OURS if own is not None or not offers else _package(offers[0])

    def problems(self) -> dict[str, str]:
        """Why names cannot be used, a line for each."""
        found = {}
        for name in self.names():
            try:
                self[name]
            except RegistryError as error:
                found[name] = str(error)
        return found

    def summary(self) -> dict[str, str]:
        """A line per name: the first of its documentation and the package it is from, or why it cannot be used."""
        lines = {}
        for name, thing in self.items():
            first = next(iter((thing.__doc__ or "").strip().splitlines()), "").rstrip(":")
            origin = self.origin(name)
            lines[name] = first if origin == OURS else f"{first} (of {origin})".strip()
        return lines | self.problems()

    def build(self, name: str, fields: Mapping[str, Any]) -> Any:
        """:func:`make` the registered dataclass ``name`` from ``fields``."""
        return make(typing.cast("type[Any]", self[name]), fields)

    def _find(self, name: str) -> tuple[str | None, list[EntryPoint]]:
        """Our own name for it, and the entry points that offer it."""
        key = fold(str(name))
        return self._folded.get(key), [point for point in self._points() if fold(point.name) == key]

    def _points(self) -> EntryPoints:
        return _installed(self.group, tuple(sys.path))

    def _load(self, point: EntryPoint) -> tuple[T] | str:
        if point not in self._loaded:
            try:
                thing = point.load()
                self._loaded[point] = (thing if self._accept is None else self._accept(point.name, thing),)
            except (Exception, SystemExit) as error:  # whatever somebody else's module does when it is imported
                reason = next(iter(str(error).strip().splitlines()), "")
                self._loaded[point] = (
                    f"the {self.kind} {point.name!r} of {_package(point)} cannot be used: "
                    f"{type(error).__name__}{f': {reason}' if reason else ''} ({point.value})"
                )
        return self._loaded[point]


@functools.lru_cache(maxsize=32)
def _installed(group: str, path: tuple[str, ...]) -> EntryPoints:
    """The entry points of all installed packages; read again when the path changes."""
    return entry_points(group=group)


def _package(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist is not None else "an installed package"


def fold(name: str) -> str:
    """A name without its case, and with ``_`` for ``-``: what has one such form is the same name."""
    return name.casefold().replace("-", "_")


def of_class(base: type[Any]) -> Callable[[str, Any], Any]:
    """Accept what an entry point leads to if it is a dataclass that derives from ``base`` and has the entry's name."""

    def accept(name: str, thing: Any) -> Any:
        if not (isinstance(thing, type) and issubclass(thing, base) and dataclasses.is_dataclass(thing)):
            raise TypeError(f"it must be a dataclass that derives from {base.__name__}")
        if fold(thing.__name__) != fold(name):
            raise TypeError(f"the entry point must have the name of its class, {thing.__name__}")
        return thing

    return accept


def callable_only(name: str, thing: Any) -> Any:
    """Accept what an entry point leads to if it can be called."""
    if not callable(thing):
        raise TypeError("it must be a function")
    return thing


def make(cls: type[Any], fields: Mapping[str, Any]) -> Any:
    """Make a dataclass from ``fields``, with errors that a configuration's author can act on."""
    hints = hints_of(cls)  # type: ignore[arg-type]  # a class is hashable
    own = {f.name: f for f in dataclasses.fields(cls) if f.init}
    needed = {k: hints[k] for k, f in own.items() if f.default is f.default_factory is dataclasses.MISSING}
    faults = [*wrong_names(cls, fields), *lacking(cls.__name__, needed, fields)]
    if faults:  # the class itself cannot say what else is wrong; what it reads tables and lists as is its own matter
        plain = {k: v for k, v in fields.items() if k in own and not isinstance(v, Mapping | list | tuple)}
        raise ValueError("\n".join([*faults, *wrong_values(cls, plain)]))
    return cls(**fields)
