"""Federated methods, one file each. The registry is read from the files: a new file is a new method."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from typing import TYPE_CHECKING, Any

from fedcomposite._validation import build as _build
from fedcomposite._validation import lookup as _lookup
from fedcomposite.algorithms.base import Algorithm, AnyAlgorithm, Empty, Gradient, Info

if TYPE_CHECKING:
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
    from fedcomposite.algorithms.proximal_gradient import ProximalGradient
    from fedcomposite.algorithms.proxnewton import ProxNewton
    from fedcomposite.algorithms.proxscaffnew import ProxScaffnew
    from fedcomposite.algorithms.scaffnew import Scaffnew
    from fedcomposite.algorithms.scaffold import Scaffold
    from fedcomposite.algorithms.scaffoldm import ScaffoldM
    from fedcomposite.algorithms.stem import STEM
    from fedcomposite.algorithms.tamuna import TAMUNA
    from fedcomposite.algorithms.zhang import Zhang

__all__ = [
    "REGISTRY",
    "STEM",
    "TAMUNA",
    "Algorithm",
    "AnyAlgorithm",
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
    "ProxNewton",
    "ProxScaffnew",
    "ProximalGradient",
    "Scaffnew",
    "Scaffold",
    "ScaffoldM",
    "Zhang",
    "build",
    "fields",
    "lookup",
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


REGISTRY = _discover()
globals().update(REGISTRY)


def fields(cls: type[AnyAlgorithm]) -> list[str]:
    """The names that a method's configuration may set."""
    return [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]


def lookup(name: str) -> type[AnyAlgorithm]:
    """Find a method's class by name; case does not matter."""
    return _lookup("algorithm", REGISTRY, name)


def build(name: str, **fields: Any) -> AnyAlgorithm:
    """Make a method by name: ``build("FedNMap", local_steps=10, step=0.1, gamma=0.5)``; case does not matter."""
    algorithm: AnyAlgorithm = _build("algorithm", REGISTRY, name, fields)
    return algorithm
