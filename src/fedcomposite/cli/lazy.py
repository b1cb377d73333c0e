"""Commands that are loaded when they are used: their names and what they are for are known before."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, MutableMapping
from typing import Any, NamedTuple

import click
import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from fedcomposite._faults import UserError


class LazyCommand(NamedTuple):
    """A command before it is loaded."""

    place: str
    """``module:name`` of its function, or of its group of commands."""
    help: str
    """The first paragraph of its documentation."""
    extra: str = ""
    """The extra that it is installed with, if any."""
    package: str = ""
    """What that extra brings."""


class CommandTable(MutableMapping[str, click.Command]):
    """The commands by name; what is looked up is imported."""

    def __init__(self, entries: dict[str, LazyCommand]) -> None:
        self.entries = entries
        self._loaded: dict[str, click.Command] = {}

    def __getitem__(self, name: str) -> click.Command:
        if name not in self._loaded:
            self._loaded[name] = _load(name, self.entries[name])
        return self._loaded[name]

    def __setitem__(self, name: str, command: click.Command) -> None:
        self._loaded[name] = command

    def __delitem__(self, name: str) -> None:
        del self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter({**self.entries, **self._loaded})

    def __len__(self) -> int:
        return len({**self.entries, **self._loaded})


def _load(name: str, entry: LazyCommand) -> click.Command:
    """Import a command; one whose extra is not installed says how it is."""
    found = load(name, entry.place, entry.extra)
    if isinstance(found, typer.Typer):
        group = get_command(found)
        group.name = name
        return group
    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    alone.command(name)(found)
    return get_command(alone)


def load(name: str, place: str, extra: str = "") -> Any:
    """What lies at ``module:name``; where its extra is not installed, the error says how it is."""
    module, _, attribute = place.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as missing:
        package = str(missing.name).partition(".")[0]
        if not extra or package == "fedcomposite":
            raise
        raise UserError(f"a {name} needs the package {package!r}: pip install 'fedcomposite[{extra}]'") from None


class LazyGroup(TyperGroup):
    """A group whose help is printed without importing its commands."""

    entries: dict[str, LazyCommand] = {}  # noqa: RUF012  # each group is a class of its own

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands = CommandTable(self.entries)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Their names, in the order of the table."""
        return list(self.commands)

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Print the help of a group with the same words and empty commands."""
        shown: list[click.Command] = [TyperCommand(k, help=_said(v)) for k, v in self.entries.items()]
        TyperGroup(name=self.name, commands=shown, params=self.params, help=self.help).format_help(ctx, formatter)


def _said(entry: LazyCommand) -> str:
    """What a command is for, and what it lacks."""
    if not entry.package or _installed(entry.package):
        return entry.help
    return f"{entry.help} Not installed: pip install 'fedcomposite\\[{entry.extra}]'"


def _installed(package: str) -> bool:
    """Whether a package could be imported, without importing it."""
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:  # it is marked as missing
        return False
