"""``list``: what can be named in a configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from importlib.metadata import EntryPoint
from typing import Annotated, Any, Literal

import pandas as pd
import typer

from fedcomposite import algorithms, data, models, problems, regularizers
from fedcomposite.cli.console import first_sentence, print_frame
from fedcomposite.experiments.config import shipped


def list_names(
    what: Annotated[
        Literal["algorithms", "regularizers", "datasets", "partitions", "losses", "models", "experiments"],
        typer.Argument(help="What to list."),
    ],
) -> None:
    """List what can be named in a configuration."""
    if what == "algorithms":
        caption = (
            "clients: who must take part in a round (*: all, unless partial_participation is set);\n"
            "exact: no residual with full gradients and several local steps;\n"
            "up, down: vectors per client; proxes of h, all clients: measured with 4 clients and 5 local steps"
        )
        print_frame(algorithm_table(), caption)
        return
    if what == "experiments":
        print_frame(pd.DataFrame({"name": shipped().keys(), "what": shipped().values()}))
        return
    known: dict[str, Mapping[str, Any]] = {
        "regularizers": regularizers.REGISTRY,
        "datasets": data.DATASETS,
        "partitions": data.PARTITIONERS,
        "losses": problems.LOSSES,
        "models": models.available() if what == "models" else {},
    }
    rows = [{"name": k, "what": _about(v), "fields": _fields(v)} for k, v in known[what].items()]
    frame = pd.DataFrame(rows)
    print_frame(frame if frame["fields"].any() else frame.drop(columns="fields"))


def _about(thing: Any) -> str:
    return f"of {thing.value}" if isinstance(thing, EntryPoint) else first_sentence(thing)


def _fields(thing: Any) -> str:
    """What may be set: a class's fields, with their defaults."""
    if not dataclasses.is_dataclass(thing):
        return ""
    chosen = [f for f in dataclasses.fields(thing) if f.init]
    return ", ".join(f.name if f.default is dataclasses.MISSING else f"{f.name} = {f.default!r}" for f in chosen)


def algorithm_table() -> pd.DataFrame:
    """What each method handles and needs; traffic and work are measured on a probe run (4 clients, 5 local steps)."""
    from fedcomposite.testing import measure_traffic

    rows = []
    for name, cls in algorithms.REGISTRY.items():
        seen = measure_traffic(cls)
        rows.append(
            {
                "name": name,
                "paper": _cite(cls.info.paper, cls.info.year),
                "handles h": cls.info.regularizer,
                "clients": "any*" if "partial_participation" in algorithms.fields(cls) else cls.info.participation,
                "exact": "yes" if cls.info.exact else "no",
                "up": f"{seen.up:.2g}",
                "down": f"{seen.down:.2g}",
                "proxes": f"{seen.proxes:.3g}",
                "fields": ", ".join(algorithms.fields(cls)),
            }
        )
    return pd.DataFrame(rows)


def _cite(paper: str, year: int) -> str:
    """First author, et al., year."""
    first, *others = paper.partition(":")[0].split(", ")
    return f"{first} et al. {year}" if len(others) > 1 else f"{' & '.join([first, *others])} {year}"
