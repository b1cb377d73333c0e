"""The page of the fields of experiment and site files, from the models that check them."""

import ast
import inspect
import itertools
import re
import textwrap
import types
import typing

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

import fedcomposite as fc
from fedcomposite.data.spec import RecipeSpec, SitePart
from fedcomposite.experiments.config import (
    Config,
    ModelSection,
    ProblemSection,
    RunSection,
    TableOneSection,
    TrialsSection,
)
from fedcomposite.federation.site.approval import Approval, Rule
from fedcomposite.federation.site.policy import Limits
from fedcomposite.federation.site_folders import DataSection
from fedcomposite.privacy import ClientLevel, SampleLevel

INTRODUCTION = """# Fields of the files

Made from the models that check a file before anything runs: a field that is not here is refused, with the nearest name.
[Experiments](../experiments.md) and [the site's page](../site-it.md) explain them with examples.
"""

OPEN = {
    "[data]": {
        "name": "A data set of `fedcomposite list datasets`; the other fields are [its options](../datasets.md)",
        "files, target": "In place of a name: [files](../datasets.md#files), one per client, with their options",
    },
    "[partition]": {
        "name": "How pooled samples are dealt out: `fedcomposite list partitions`",
        "clients": "How many clients there are then; the other fields are [the partition's](../datasets.md)",
    },
    "[regularizer]": {
        "name": "One of [the regularizers](../regularizers.md), whose fields are the others here",
        "on": 'Parameters by pattern, `"*.weight"`, or a list of patterns; what h acts on',
        "strength": "A [schedule](../training.md#sparsity-that-grows) that h is multiplied with, round by round",
    },
    "[algorithm]": {
        "name": "One of [the methods](../methods.md), whose [fields](api/algorithms.md) are the others here, "
        'or `"auto"`, which leaves it to the package',
        "steps": '`"auto"` or `"theory"`: [steps that are left out](../experiments.md) come from constants',
        "constants": "For `steps`: what cannot be measured, or what you know better",
        "label": "Its name in tables and pictures",
        "server_optimizer": 'Of `FedAvg` and `FedMid`: `{ optimizer = "adam" }` or `{ optimizer = "momentum" }`, '
        "[with its numbers](../training.md#momentum-and-adam)",
    },
    "[[callbacks]]": {
        "name": "One of [the callbacks](../callbacks.md), whose fields are the others here",
    },
}
"""Tables whose other fields are those of a class: what they have beside."""

TWINS = {RecipeSpec: fc.Recipe, SitePart: fc.Recipe, ProblemSection: fc.Problem, ModelSection: fc.Problem}
TWINS |= {RunSection: fc.simulate}
"""Where the fields of a table are explained, if not under them."""

FILE = {
    "file": "The samples: .csv, .parquet, .npz or .svm; a folder of .csv or .parquet files is one table",
    "target": "The column that is to be predicted",
    "test": "A file of samples on which the common model is tested here",
    "drop": "Columns that are not used",
    "missing": "Texts that mean a missing value",
    "separator": "Between columns; recognised if left out",
    "decimal": "Sign of decimals; recognised if left out",
    "encoding": "If it is not UTF-8, or UTF-16 with a byte order mark",
    "thousands": "Sign between thousands",
}
"""What a site says about its file."""

TOP = {
    "name": "Of the experiment, and of its folder",
    "seed": "Used wherever a section does not set its own",
    "seeds": "A comparison is repeated for each",
    "data": "[`[data]`](#data)",
    "recipe": "[`[recipe]`](#recipe): how tables become features",
    "table_one": "[`[table_one]`](#table_one): who was studied, at the head of the report",
    "partition": "[`[partition]`](#partition)",
    "problem": "[`[problem]`](#problem)",
    "model": "[`[model]`](#model): a network in place of a linear model",
    "regularizer": "[`[regularizer]`](#regularizer), or several `[[regularizer]]`, which are added up",
    "algorithm": "[`[algorithm]`](#algorithm): the method of `run`",
    "algorithms": "Several `[[algorithms]]`: the methods of `compare`",
    "callbacks": "[`[[callbacks]]`](#callbacks)",
    "trials": "[`[trials]`](#trials)",
    "privacy": '`[privacy]`, with its level: [`"sample"`](#privacy-level-sample) or '
    '[`"client"`](#privacy-level-client)',
    "run": "[`[run]`](#run)",
}
"""The tables of an experiment."""

WORDS = {
    Config: TOP,
    DataSection: FILE,
    SitePart: {name: FILE[name] for name in ("separator", "decimal", "encoding", "thousands")},
    RunSection: {"batch_size": "Samples per local step; all of a client's if left out"},
}
"""What is said here, since it is nowhere else, or there in Python's words."""

SECTIONS = {
    "An experiment": Config,
    "[recipe]": RecipeSpec,
    "[recipe.sites.NAME]": SitePart,
    "[table_one]": TableOneSection,
    "[problem]": ProblemSection,
    "[model]": ModelSection,
    "[run]": RunSection,
    "[trials]": TrialsSection,
    '[privacy], level = "sample"': SampleLevel,
    '[privacy], level = "client"': ClientLevel,
    "[data] of site.toml": DataSection,
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
        if model is Config:
            parts += [part for name, said in OPEN.items() for part in opened(name, said)]
    return "\n\n".join(parts) + "\n"


def opened(title, said):
    """A table of which only some fields are known here."""
    rows = [f"| `{name}` | {text} |" for name, text in said.items()]
    return f"## `{title}`", "\n".join(["| field | |", "| --- | --- |", *rows])


def about(model):
    """The first paragraph of a class's docstring."""
    return inspect.cleandoc(model.__doc__ or "").partition("\n\n")[0]


def fields(model):
    """Name, type, default and meaning of every field."""
    said, hints = explained(model), typing.get_type_hints(model, include_extras=True)
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


def explained(model):
    """What is said about the fields: under them, in the class's docstring, or where they are explained."""
    found = parameters(TWINS.get(model)) | parameters(model) | WORDS.get(model, {})
    return {name: re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text) for name, text in (found | comments(model)).items()}


def parameters(thing):
    """The texts of a docstring's parameters."""
    sections = r"^(?:(?:Other )?Parameters|Attributes)\n-+\n(.*?)(?=\n\n\w|\Z)"
    text = "\n".join(re.findall(sections, inspect.getdoc(thing) or "", re.S | re.M))
    entries = re.findall(r"^(\w.*)\n((?:[ ]+.*\n?|\n)+)", text + "\n", re.M)
    said = {names.partition(" : ")[0]: " ".join(text.split()).replace("|", "\\|") for names, text in entries}
    return {name: text for names, text in said.items() for name in names.split(", ")}


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
