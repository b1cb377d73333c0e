"""Federated methods, one file each.

The registry reads the files of this folder: a new file is a new method, listed, configurable and reachable as
``fedcomposite.algorithms.Name``. The imports below are for readers and type checkers.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import warnings
from importlib import resources
from typing import TYPE_CHECKING, Any

from fedcomposite.algorithms.accsdane import AccSDANE
from fedcomposite.algorithms.base import Algorithm, AnyAlgorithm, Empty, Gradient, Info
from fedcomposite.algorithms.chordnewton import ChordNewton
from fedcomposite.algorithms.econtrolda import EControlDA
from fedcomposite.algorithms.fastfedda import FastFedDA
from fedcomposite.algorithms.fedadmm import FedADMM
from fedcomposite.algorithms.fedavg import FedAvg
from fedcomposite.algorithms.fedavgm import FedAvgM
from fedcomposite.algorithms.fedcanon import FedCanon
from fedcomposite.algorithms.fedcanon2 import FedCanonII
from fedcomposite.algorithms.fedda import FedDA
from fedcomposite.algorithms.feddc import FedDC
from fedcomposite.algorithms.feddr import FedDR
from fedcomposite.algorithms.feddyn import FedDyn
from fedcomposite.algorithms.fedmid import FedMid
from fedcomposite.algorithms.fedmls import FedMLS
from fedcomposite.algorithms.fedmspp import FedMSPP
from fedcomposite.algorithms.fednmap import FedNMap
from fedcomposite.algorithms.fedpd import FedPD
from fedcomposite.algorithms.fedprox import FedProx
from fedcomposite.algorithms.fedsplit import FedSplit
from fedcomposite.algorithms.gradskip import GradSkip
from fedcomposite.algorithms.mime import Mime
from fedcomposite.algorithms.mimelite import MimeLite
from fedcomposite.algorithms.proxcsl import ProxCSL
from fedcomposite.algorithms.proximal_gradient import ProximalGradient
from fedcomposite.algorithms.proxnewton import ProxNewton
from fedcomposite.algorithms.proxscaffnew import ProxScaffnew
from fedcomposite.algorithms.scaffnew import Scaffnew
from fedcomposite.algorithms.scaffold import Scaffold
from fedcomposite.algorithms.scaffoldm import ScaffoldM
from fedcomposite.algorithms.sdane import SDANE
from fedcomposite.algorithms.sketchnewton import SketchNewton
from fedcomposite.algorithms.stem import STEM
from fedcomposite.algorithms.tamuna import TAMUNA
from fedcomposite.algorithms.zhang import Zhang
from fedcomposite.registry import Registry, of_class

__all__ = [
    "REGISTRY",
    "SDANE",
    "STEM",
    "TAMUNA",
    "AccSDANE",
    "Algorithm",
    "AnyAlgorithm",
    "ChordNewton",
    "EControlDA",
    "Empty",
    "FastFedDA",
    "FedADMM",
    "FedAvg",
    "FedAvgM",
    "FedCanon",
    "FedCanonII",
    "FedDA",
    "FedDC",
    "FedDR",
    "FedDyn",
    "FedMLS",
    "FedMSPP",
    "FedMid",
    "FedNMap",
    "FedPD",
    "FedProx",
    "FedSplit",
    "GradSkip",
    "Gradient",
    "Info",
    "Mime",
    "MimeLite",
    "ProxCSL",
    "ProxNewton",
    "ProxScaffnew",
    "ProximalGradient",
    "Scaffnew",
    "Scaffold",
    "ScaffoldM",
    "SketchNewton",
    "Zhang",
    "build",
    "cite",
    "fields",
    "lookup",
    "spec",
]


def _discover() -> dict[str, type[AnyAlgorithm]]:
    """Every final method of every module beside this one, by class name."""
    found: dict[str, type[AnyAlgorithm]] = {}
    for module in pkgutil.iter_modules(__path__):
        loaded = importlib.import_module(f"{__name__}.{module.name}")
        for value in vars(loaded).values():
            method = isinstance(value, type) and issubclass(value, Algorithm) and value is not Algorithm
            if method and value.__module__ == loaded.__name__:
                found[value.__name__] = value
    return dict(sorted(found.items()))


_OURS = _discover()
REGISTRY: Registry[type[AnyAlgorithm]] = Registry(
    "algorithm", _OURS, group="fedcomposite.algorithms", accept=of_class(Algorithm)
)

if not TYPE_CHECKING:  # a type checker shall find misspelt names, and knows the classes from the imports

    def __getattr__(name: str) -> type[AnyAlgorithm]:
        """A method of a file that is not imported above."""
        if name not in _OURS:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return _OURS[name]


def fields(cls: type[AnyAlgorithm]) -> list[str]:
    """The names that a method's configuration may set."""
    return [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]


def lookup(name: str) -> type[AnyAlgorithm]:
    """Find a method's class by name; case does not matter."""
    return REGISTRY[name]


def build(name: str, **fields: Any) -> AnyAlgorithm:
    """Make a method by name: ``build("FedNMap", local_steps=10, step=0.1, gamma=0.5)``; case does not matter."""
    own = dataclasses.fields(cls := lookup(name))  # type: ignore[arg-type]
    for field in fields.keys() & {"momentum", "server_optimizer"} - {f.name for f in own}:
        raise ValueError(
            f"{cls.__name__} takes no {field}: its rules hold for plain steps only (control variates, dual variables, "
            "or a momentum of its own); FedAvg and FedMid take it"
        )
    algorithm: AnyAlgorithm = REGISTRY.build(name, fields)
    return algorithm


def current(table: dict[str, Any]) -> dict[str, Any]:
    """A method's table of a configuration with the names that its fields have now, and a warning where they differ."""
    name = table.get("name")
    old = getattr(REGISTRY.get(name), "formerly", {}) if isinstance(name, str) else {}
    if not old.keys() & table.keys():
        return table
    names = {k: old[k] for k in table if k in old}
    warnings.warn(f"{name}: {', '.join(f'{k} is now {v}' for k, v in names.items())}", DeprecationWarning, 2)
    return {names.get(k, k): v for k, v in table.items()}


def cite(name: str) -> str:
    """BibTeX of the paper that a method is from; case does not matter.

    >>> print(cite("fednmap"))
    @misc{huang2026achieving,
      author = {Huang, Kun and Pu, Shi},
      title = {Achieving linear speedup for composite federated learning},
      year = {2026},
      eprint = {2602.03357},
      archiveprefix = {arXiv}
    }
    """
    cls = lookup(name)
    if cls.info.bibtex in (entries := _references()):
        return entries[cls.info.bibtex]
    return cls.info.entry(cls.__name__)


def _references() -> dict[str, str]:
    """The entries of ``references.bib`` by key."""
    text = resources.files("fedcomposite").joinpath("references.bib").read_text(encoding="utf-8")
    entries = [entry.strip() for entry in text.split("\n\n") if entry.lstrip().startswith("@")]
    return {entry[entry.index("{") + 1 : entry.index(",")]: entry for entry in entries}


def spec(algorithm: AnyAlgorithm) -> dict[str, Any]:
    """A method as a configuration's table: its name and fields, schedules as tables; :func:`build` takes it back.

    >>> spec(FedAvg(local_steps=2, step=0.1))
    {'name': 'FedAvg', 'local_steps': 2, 'step': 0.1, 'server_step': 1.0, 'momentum': 0.0}
    """
    return algorithm.table
