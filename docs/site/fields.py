"""The page of the fields of experiment and site files, from the models that check them."""

import ast
import inspect
import itertools
import textwrap
import types
import typing

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from fedcomposite.data.spec import RecipeSpec, SitePart
from fedcomposite.experiments.config import Config
from fedcomposite.experiments.sections import ModelSection, ProblemSection, RunSection, TrialsSection
from fedcomposite.federation.approval import Approval, Rule
from fedcomposite.federation.policy import Limits
from fedcomposite.privacy import ClientLevel, SampleLevel

INTRODUCTION = """# Fields of the files

Made from the models that check a file before anything runs: a field that is not here is refused, with the nearest name.
[Experiments](../experiments.md) and [the site's page](../site-it.md) explain them with examples.
The fields of `[regularizer]` and `[algorithm]` are those of the classes: [regularizers](../regularizers.md),
[methods](api/algorithms.md); `[data]` takes the options of [the data set](../datasets.md).
"""

SECTIONS = {
    "An experiment": Config,
    "[recipe]": RecipeSpec,
    "[recipe.sites.NAME]": SitePart,
    "[problem]": ProblemSection,
    "[model]": ModelSection,
    "[run]": RunSection,
    "[trials]": TrialsSection,
    '[privacy], level = "sample"': SampleLevel,
    '[privacy], level = "client"': ClientLevel,
    "[limits] of site.toml": Limits,
    "[approval] of site.toml": Approval,
    "[[approval.allow]] of site.toml": Rule,
}


def page():
    """A table for every section."""
    parts = [INTRODUCTION]
    for title, model in SECTIONS.items():
        parts += [f"## `{title}`" if title.startswith("[") else f"## {title}", about(model)]
        rows = [f"| `{name}` | {kind} | {default} | {text} |" for name, kind, default, text in fields(model)]
        parts.append("\n".join(["| field | type | default | |", "| --- | --- | --- | --- |", *rows]))
    return "\n\n".join(parts) + "\n"


def about(model):
    """The first paragraph of a class's docstring."""
    return inspect.cleandoc(model.__doc__ or "").partition("\n\n")[0]


def fields(model):
    """Name, type, default and meaning of every field."""
    said, hints = comments(model), typing.get_type_hints(model, include_extras=True)
    if hasattr(model, "model_fields"):
        for name, field in model.model_fields.items():
            default = field.default if field.default_factory is None else field.default_factory()
            limits = [limit(mark) for mark in field.metadata]
            yield name, ", ".join([kind(field.annotation), *filter(None, limits)]), written(default), said.get(name, "")
        return
    for name, parameter in inspect.signature(model).parameters.items():
        yield name, kind(hints[name]), written(parameter.default), said.get(name, "")


def written(default):
    """A default as TOML has it."""
    if default in (PydanticUndefined, inspect.Parameter.empty):
        return "required"
    if isinstance(default, BaseModel):
        return "its defaults"
    if default is None:
        return ""
    text = str(default).lower() if isinstance(default, bool) else repr(default).replace("'", '"')
    return f"`{text}`".replace("|", "\\|")


def limit(mark):
    """What an annotation demands of a number."""
    signs = (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"))
    return ", ".join(f"{sign} {getattr(mark, name):g}" for name, sign in signs if getattr(mark, name, None) is not None)


def kind(hint):
    """A type in words."""
    inner, outer = typing.get_args(hint), typing.get_origin(hint)
    if outer is typing.Annotated:
        marks = [m for part in inner[1:] for m in getattr(part, "metadata", [part])]
        return ", ".join([kind(inner[0]), *filter(None, map(limit, marks))])
    if outer is typing.Literal:
        return " or ".join(f'`"{choice}"`' if isinstance(choice, str) else f"`{choice}`" for choice in inner)
    if outer in (typing.Union, types.UnionType):
        return " or ".join(kind(each) for each in inner if each is not types.NoneType)
    if outer is dict:
        return f"table of {kind(inner[1])}"
    if outer in (list, tuple):
        return f"list of {kind(inner[0])}"
    if isinstance(hint, type) and issubclass(hint, BaseModel):
        return "table"
    return {typing.Any: "values", str: "text", bool: "true or false", dict: "table"}.get(
        hint, getattr(hint, "__name__", str(hint))
    )


def comments(model):
    """The texts under the fields of a class, and of those that it inherits from."""
    found = {}
    for cls in reversed(model.__mro__):
        if not cls.__module__.startswith("fedcomposite"):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body
        for field, after in itertools.pairwise(body):
            text = getattr(getattr(after, "value", None), "value", None)
            if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(text, str):
                found[field.target.id] = " ".join(text.split()).replace("|", "\\|")
    return found
