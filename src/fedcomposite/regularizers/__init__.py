"""Regularizers h: value, prox, weak-convexity modulus and optimality, each a small frozen dataclass."""

from typing import Any

from fedcomposite.registry import Registry, of_class
from fedcomposite.regularizers.algebra import Blocks, Named, On
from fedcomposite.regularizers.base import Boxed, Layout, Regularizer, Separable
from fedcomposite.regularizers.clustered import ClusteredLasso
from fedcomposite.regularizers.fused import FusedLasso
from fedcomposite.regularizers.group import Grouped, GroupLasso, SparseGroupLasso
from fedcomposite.regularizers.indicators import Affine, Box, Indicator, L1Ball, L2Ball, NonNegative, Simplex, TopK
from fedcomposite.regularizers.matrix import NuclearNorm
from fedcomposite.regularizers.norms import LinfNorm
from fedcomposite.regularizers.semistructured import Sparsity2to4
from fedcomposite.regularizers.separable import L0, L1, MCP, SCAD, ElasticNet, L2Squared, PositivePart, Zero
from fedcomposite.regularizers.support import Support
from fedcomposite.regularizers.target import SparsityTarget
from fedcomposite.regularizers.wrapped import Ramped

__all__ = [
    "L0",
    "L1",
    "MCP",
    "REGISTRY",
    "SCAD",
    "Affine",
    "Blocks",
    "Box",
    "Boxed",
    "ClusteredLasso",
    "ElasticNet",
    "FusedLasso",
    "GroupLasso",
    "Grouped",
    "Indicator",
    "L1Ball",
    "L2Ball",
    "L2Squared",
    "Layout",
    "LinfNorm",
    "Named",
    "NonNegative",
    "NuclearNorm",
    "On",
    "PositivePart",
    "Ramped",
    "Regularizer",
    "Separable",
    "Simplex",
    "SparseGroupLasso",
    "Sparsity2to4",
    "SparsityTarget",
    "Support",
    "TopK",
    "Zero",
    "build",
]

_SHIPPED: tuple[type[Regularizer], ...] = (
    *(Zero, L1, L2Squared, ElasticNet, PositivePart, MCP, SCAD, L0, TopK),
    *(GroupLasso, SparseGroupLasso, LinfNorm, NuclearNorm, FusedLasso, ClusteredLasso, Sparsity2to4),
    *(Box, NonNegative, L2Ball, L1Ball, Simplex, Affine),
)

REGISTRY: Registry[type[Regularizer]] = Registry(
    "regularizer",
    {c.__name__: c for c in _SHIPPED},
    group="fedcomposite.regularizers",
    accept=of_class(Regularizer),
)


def build(name: str, **fields: Any) -> Regularizer:
    """Make a regularizer by name: ``build("l1", lam=0.01)``; case does not matter.

    Examples
    --------
    >>> build("grouplasso", lam=0.1, groups=[3, 2])
    GroupLasso(lam=0.1, groups=(3, 2), weights='sqrt', shape=None)
    """
    regularizer: Regularizer = REGISTRY.build(name, fields)
    return regularizer
