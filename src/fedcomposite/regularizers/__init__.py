"""Regularizers h: value, prox, weak-convexity modulus and optimality, each a small frozen dataclass."""

from typing import Any

from fedcomposite._validation import build as _build
from fedcomposite.regularizers.algebra import On
from fedcomposite.regularizers.base import Regularizer, Separable
from fedcomposite.regularizers.indicators import Box
from fedcomposite.regularizers.separable import L1, MCP, SCAD, ElasticNet, Zero

__all__ = [
    "L1",
    "MCP",
    "REGISTRY",
    "SCAD",
    "Box",
    "ElasticNet",
    "On",
    "Regularizer",
    "Separable",
    "Zero",
    "build",
]

REGISTRY: dict[str, type[Regularizer]] = {c.__name__: c for c in (Zero, L1, ElasticNet, MCP, SCAD, Box)}


def build(name: str, **fields: Any) -> Regularizer:
    """Make a regularizer by name: ``build("l1", lam=0.01)``; case does not matter."""
    regularizer: Regularizer = _build("regularizer", REGISTRY, name, fields)
    return regularizer
