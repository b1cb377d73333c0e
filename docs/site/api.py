"""The reference of the package: a page for each room, an entry for each public name, from the docstrings."""

import functools
import importlib
import inspect
import re

import fedcomposite

ROOMS = {
    "fedcomposite": "what an analyst calls: silos, problems, solving, paths, intervals, reports",
    "algorithms": "the methods, and what one is made of",
    "algorithms.optimizers": "momentum and Adam at the server",
    "regularizers": "h: value, prox, rho",
    "data": "silos, data sets, partitions, recipes",
    "data.augmentation": "random changes of training samples",
    "metrics": "what is measured beside the loss",
    "problems": "losses and problems",
    "models": "networks by name",
    "runtime": "rounds, records, runs",
    "callbacks": "what is called after a round",
    "schedules": "steps that change from round to round",
    "aggregators": "robust means",
    "privacy": "levels of privacy and their accounting",
    "theory": "step rules and bounds",
    "errors": "what can go wrong, and what is warned of",
    "exporting": "models as files; networks that their zeros make smaller or faster",
    "experiments": "TOML files, run folders, comparisons",
    "testing": "the laws, for methods and regularizers of your own",
}
"""What there is a page for, and what is on it; what several rooms show is written out in the first of them."""


def pages():
    """The pages, by address."""
    made = {f"reference/api/{room}.md": page(room) for room in ROOMS}
    return made | {"reference/index.md": index()}


def module(room):
    """The module of a room."""
    return fedcomposite if room == "fedcomposite" else importlib.import_module(f"fedcomposite.{room}")


def public(room):
    """The classes and functions that a room shows: where they are written, by the name under which it shows them."""
    home = module(room)
    names = getattr(home, "__all__", None) or [n for n in vars(home) if not n.startswith("_")]
    found = {}
    for name in sorted(names, key=str.lower):
        thing = getattr(home, name)
        ours = getattr(thing, "__module__", "").startswith("fedcomposite")
        if ours and (inspect.isclass(thing) or inspect.isroutine(thing)) and not hasattr(thing, "__origin__"):
            found[name] = f"{thing.__module__}.{thing.__qualname__}"
    return found


def page(room):
    """One room."""
    title = "fedcomposite" if room == "fedcomposite" else f"fedcomposite.{room}"
    text = plain(inspect.cleandoc(module(room).__doc__ or ""))
    written = {name: path for name, path in public(room).items() if home(path) == room}
    others = [link(name, path, "") for name, path in public(room).items() if name not in written]
    also = [f"On other pages: {', '.join(others)}."] if others else []
    parts = [f"# {title}", text, *also, *(f"::: {path}" for path in written.values())]
    return "\n\n".join(parts) + "\n"


@functools.cache
def home(path):
    """The room on whose page a thing is written out."""
    return next(room for room in ROOMS if path in public(room).values())


def link(name, path, folder):
    """A name that leads to where it is written out."""
    return f"[`{name}`]({folder}{home(path)}.md#{path})"


def index():
    """Every room with the names in it."""
    parts = [
        "# Reference",
        "The classes and functions, from their docstrings; `help(fc.solve)` shows the same. "
        "Then [experiment files](../experiments.md), [their fields](toml.md) and [the command line](cli.md).",
        "`import fedcomposite as fc` is assumed throughout.",
    ]
    for room, about in ROOMS.items():
        names = ", ".join(link(name, path, "api/") for name, path in public(room).items())
        title = "fc" if room == "fedcomposite" else f"fc.{room}"
        parts += [f"## [{title}](api/{room}.md)", f"{about[0].upper()}{about[1:]}.", names]
    return "\n\n".join(parts) + "\n"


def plain(text):
    """A docstring without the roles of another markup."""
    return re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text)
