"""The page of the command line, from the commands themselves."""

import inspect

import typer

from fedcomposite.cli.federation import federation_app
from fedcomposite.cli.main import app

INTRODUCTION = """# Command line

Made from the commands; `fedcomposite COMMAND --help` says the same.
"""


def page():
    """Every command: what it does, its arguments and options."""
    main = typer.main.get_command(app)
    commands = {**main.commands, "federation": typer.main.get_command(federation_app)}
    parts = [INTRODUCTION, paragraphs(main.help)]
    for name, command in commands.items():
        parts += described(f"fedcomposite {name}", command, 2)
    return "\n\n".join(parts) + "\n"


def described(name, command, level):
    """One command, or a group and all of its commands."""
    parts = [f"{'#' * level} {name}", paragraphs(command.help)]
    if hasattr(command, "commands"):
        for key, each in command.commands.items():
            parts += described(f"{name} {key}", each, level + 1)
        return parts
    shown = [p for p in command.params if not getattr(p, "hidden", False) and p.name != "help"]
    arguments = [p for p in shown if p.param_type_name == "argument"]
    options = [p for p in shown if p.param_type_name == "option"]
    usage = " ".join([name, *("[OPTIONS]" for _ in options[:1]), *map(placeholder, arguments)])
    parts.append(f"```text\n{usage}\n```")
    rows = [f"| `{placeholder(p)}` | {kind(p)} | {cell(p.help)} |" for p in arguments]
    rows += [f"| `{', '.join([*p.opts, *p.secondary_opts])}` | {kind(p)} | {cell(p.help)} |" for p in options]
    if rows:
        parts.append("\n".join(["| | | |", "| --- | --- | --- |", *rows]))
    return parts


def placeholder(argument):
    """An argument as a usage line has it."""
    text = (argument.metavar or argument.name or "").upper().strip("[].")
    text += "..." if argument.nargs == -1 else ""
    return text if argument.required else f"[{text}]"


def kind(parameter):
    """The type of a parameter, and its default."""
    choices = getattr(parameter.type, "choices", None)
    if getattr(parameter, "is_flag", False):
        return "flag"
    said = ", ".join(f"`{c}`" for c in choices) if choices else parameter.type.name
    default = parameter.default
    if default in (None, "", ()) or callable(default) or isinstance(default, list):
        return said
    return f"{said}; default `{default}`"


def paragraphs(text):
    """A help text without the marks of terminal layout."""
    return inspect.cleandoc(text or "").replace("\b\n", "")


def cell(text):
    """A text as a cell of a table."""
    return " ".join((text or "").split()).replace("|", "\\|").replace("<", "&lt;")
