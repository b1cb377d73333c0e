"""Commands that are loaded when they are used: their names and what they are for are known before."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator, MutableMapping
from typing import Any, NamedTuple

import click
import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command


class LazyCommand(NamedTuple):
    """A command before it is loaded."""

    place: str
    """``module:name`` of its function, or of its group of commands."""
    help: str
    """The first paragraph of its documentation."""


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
    found = load(entry.place)
    if isinstance(found, typer.Typer):
        group = get_command(found)
        group.name = name
        return group
    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    alone.command(name)(found)
    return get_command(alone)


def load(place: str) -> Any:
    """What lies at ``module:name``; nothing that an import makes is garbage, so none is looked for meanwhile."""
    module, _, attribute = place.partition(":")
    gc.disable()
    try:
        return getattr(importlib.import_module(module), attribute)
    finally:
        gc.enable()


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
        shown: list[click.Command] = [TyperCommand(k, help=v.help) for k, v in self.entries.items()]
        TyperGroup(name=self.name, commands=shown, params=self.params, help=self.help).format_help(ctx, formatter)
