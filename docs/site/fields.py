"""The page of the fields of experiment and site files, from the models that check them."""

import ast
import inspect
import itertools
import re
import textwrap

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
    said = comments(model)
    if hasattr(model, "model_fields"):
        for name, field in model.model_fields.items():
            default = field.default
            if field.default_factory is not None:
                default = field.default_factory()
            written = "required" if default is PydanticUndefined else f"`{value(default)}`"
            limits = ", ".join(limit(m) for m in field.metadata if limit(m))
            yield name, kind(field.annotation, limits), written, said.get(name, "")
        return
    for name, parameter in inspect.signature(model).parameters.items():
        written = "required" if parameter.default is parameter.empty else f"`{value(parameter.default)}`"
        yield name, kind(parameter.annotation, ""), written, said.get(name, "")


def value(default):
    """A default as TOML has it."""
    if default is None:
        return "none"
    return str(default).lower() if isinstance(default, bool) else repr(default).replace("'", '"').replace("|", "\\|")


def limit(mark):
    """What an annotation demands of a number."""
    for name, sign in (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<")):
        if hasattr(mark, name):
            return f"{sign} {getattr(mark, name)}"
    return ""


def kind(annotation, limits):
    """A type in words."""
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    text = str(annotation) if "[" in str(annotation) or "|" in str(annotation) else text
    text = re.sub(r"(typing|builtins|fedcomposite[\w.]*|pydantic[\w.]*|annotated_types|[\w.]*faults)\.", "", text)
    text = re.sub(r"Annotated\[(\w+), [^\[\]]*?\]", r"\1", text)
    text = re.sub(r"Literal\[([^]]*)\]", lambda m: " or ".join(m[1].split(", ")).replace("'", '"'), text)
    text = text.replace(" | None", "").replace("|", "or")
    return f"`{text}`" + (f", {limits}" if limits else "")


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
