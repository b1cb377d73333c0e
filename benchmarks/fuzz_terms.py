"""Regularizers as the fuzz sees them: from their formulas alone, beside the package's own classes.

A :class:`Term` has the value of h in extended precision, the same as a cvxpy expression, the directions in which h
stays bounded, and a projection that makes a nearly feasible point feasible. Only :meth:`Term.build` knows the package.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import cvxpy as cp
import numpy as np

import fedcomposite as fc

Array = np.ndarray[Any, Any]
NONCONVEX = ("MCP", "SCAD", "L0", "TopK", "Sparsity2to4")
CONSTRAINTS = ("Box", "NonNegative", "L1Ball", "L2Ball", "Simplex", "Affine", "TopK")
FEASIBLE = 1e-9  # relative to the size of the set: what rounding may leave


@dataclass(frozen=True)
class Term:
    """One regularizer: its class's name and fields; ``Blocks`` has parts on ranges of coordinates."""

    name: str
    fields: dict[str, Any] = field(default_factory=dict)
    parts: tuple[tuple[Term, int, int], ...] = ()

    def __str__(self) -> str:
        if self.parts:
            return " + ".join(f"{term}.on(range({a}, {b}))" for term, a, b in self.parts)
        inner = ", ".join(f"{k}={_short(v)}" for k, v in self.fields.items())
        return f"{self.name}({inner})"

    def __getitem__(self, key: str) -> Any:
        return self.fields[key]

    @property
    def convex(self) -> bool:
        """Whether a minimum over all of the space can be asked for."""
        return all(t.convex for t, _, _ in self.parts) if self.parts else self.name not in NONCONVEX

    def build(self) -> fc.regularizers.Regularizer:
        """The package's regularizer."""
        if self.parts:
            made = [term.build().on(range(a, b)) for term, a, b in self.parts]
            return fc.regularizers.Blocks.of(*made)
        return fc.regularizers.build(self.name, **self.fields)

    def multiplied(self, factor: float) -> Term:
        """The term with its strength multiplied: lam of MCP and SCAD, every coefficient of the others."""
        names = [n for n in ("lam", "l1", "l2") if n in self.fields]
        return replace(self, fields=self.fields | {n: factor * self.fields[n] for n in names})

    @property
    def strength(self) -> float:
        """What a path calls lambda."""
        if self.name in ("MCP", "SCAD"):
            return float(self["lam"] * self.fields.get("kappa", 1.0))
        if self.name == "ElasticNet":
            return float(self["l1"] + self["l2"])
        return float(max(self.fields[n] for n in ("lam", "l1", "l2") if n in self.fields))

    # -- the mathematics ----------------------------------------------------------------------------------------------

    def value(self, w: Array) -> float:
        """h(w); infinite outside a constraint by more than rounding."""
        if self.parts:
            return float(sum(term.value(w[a:b]) for term, a, b in self.parts))
        if self.name in CONSTRAINTS:
            return 0.0 if self._violation(w) <= FEASIBLE else float("inf")
        return float(_VALUES[self.name](self, w))

    def _violation(self, w: Array) -> float:
        """How far outside the set, relative to its size."""
        match self.name:
            case "Box":
                size = max([1e-300, *(abs(v) for v in (self["low"], self["high"]) if np.isfinite(v))])
                return float(max(self["low"] - w.min(), w.max() - self["high"], 0.0)) / (size + float(abs(w).max()))
            case "NonNegative":
                return float(max(-w.min(), 0.0) / (abs(w).max() + 1e-300))
            case "L1Ball":
                return float(abs(w).sum() / self["radius"] - 1)
            case "L2Ball":
                return float(np.sqrt((w**2).sum()) / self["radius"] - 1)
            case "Simplex":
                return float(max(-w.min(), abs(w.sum() - self["total"])) / self["total"])
            case "Affine":
                A, b = np.asarray(self["A"], w.dtype), np.asarray(self["b"], w.dtype)
                return float((abs(A @ w - b) / (abs(A) @ abs(w) + abs(b) + 1e-300)).max())
            case _:  # TopK
                return float((w != 0).sum() > self["k"])

    def repaired(self, w: Array) -> Array:
        """A point of the constraint's set near w, which is nearly one."""
        if self.parts:
            w = w.copy()
            for term, a, b in self.parts:
                w[a:b] = term.repaired(w[a:b])
            return w
        match self.name:
            case "WeightedL1":
                return np.where(np.isinf(self["weights"]), 0.0, w)
            case "Box":
                return np.clip(w, self["low"], self["high"])
            case "NonNegative":
                return np.maximum(w, 0)
            case "L1Ball":
                return w / max(1.0, float(abs(w).sum()) / self["radius"])
            case "L2Ball":
                return w / max(1.0, float(np.linalg.norm(w.astype(float))) / self["radius"])
            case "Simplex":
                w = np.maximum(w, 0)
                return w + (self["total"] - w.sum()) / len(w) if not w.any() else w * (self["total"] / w.sum())
            case "Affine":
                A, b = np.asarray(self["A"], float), np.asarray(self["b"], float)
                for _ in range(3):
                    w = w + np.linalg.lstsq(A, (b - A @ w).astype(float), rcond=None)[0]
                return w
        return w

    def expression(self, w: Any) -> tuple[Any, list[Any]]:
        """The term as a cvxpy expression of w, and constraints; convex terms only."""
        if self.parts:
            made = [term.expression(w[a:b]) for term, a, b in self.parts]
            return sum(e for e, _ in made), [c for _, cs in made for c in cs]
        match self.name:
            case "Box":
                bounds = [(w >= self["low"], self["low"]), (w <= self["high"], self["high"])]
                return 0.0, [c for c, v in bounds if np.isfinite(v)]
            case "NonNegative":
                return 0.0, [w >= 0]
            case "L1Ball":
                return 0.0, [cp.norm1(w) <= self["radius"]]
            case "L2Ball":
                return 0.0, [cp.norm2(w) <= self["radius"]]
            case "Simplex":
                return 0.0, [w >= 0, cp.sum(w) == self["total"]]
            case "Affine":
                return 0.0, [np.asarray(self["A"]) @ w == np.asarray(self["b"])]
        return _EXPRESSIONS[self.name](self, w)

    def receding(self, d: int) -> tuple[Array, Array, Array]:
        """Directions along which h does not grow: lower and upper bounds of each entry, and rows that must vanish."""
        low, high, rows = np.zeros(d), np.zeros(d), np.zeros((0, d))
        if self.parts:
            low[:], high[:] = -1, 1
            for term, a, b in self.parts:
                low[a:b], high[a:b], own = term.receding(b - a)
                rows = np.vstack([rows, np.pad(own, ((0, 0), (a, d - b)))])
            return low, high, rows
        match self.name:
            case "Zero":
                low[:], high[:] = -1, 1
            case "WeightedL1":
                low[:] = -(np.asarray(self["weights"]) == 0).astype(float)
                high = -low
            case "L1" if self.fields.get("weights") is not None:
                low[:] = -(np.asarray(self["weights"]) == 0).astype(float)
                high = -low
            case "PositivePart":
                low[:] = -1
            case "NonNegative":
                high[:] = 1
            case "Box":
                low[:] = -float(self["low"] == -np.inf)
                high[:] = float(self["high"] == np.inf)
            case "Affine":
                low[:], high[:] = -1, 1
                rows = np.asarray(self["A"], float)
            case "FusedLasso" if self.fields.get("l1", 0) == 0:
                low[:], high[:] = -1, 1
                rows = np.diff(np.eye(d), axis=0)
            case "ClusteredLasso" if self["l1"] == 0:
                low[:], high[:] = -1, 1
                rows = np.vstack([np.diff(np.eye(d)[m], axis=0) for m, _ in _groups(self, d)])
        return low, high, rows

    def convexified(self, w: Array) -> Term:
        """The convex term whose minimisers are the stationary points of a nonconvex one, as seen from w.

        The subdifferential of MCP, SCAD and 2:4 sparsity at w is that of sum_j s_j |w_j| there, with the slopes s_j at
        w; that of a number of nonzeros fixes what is zero. So w is stationary where it minimises f plus this.
        """
        if self.parts:
            return replace(self, parts=tuple((t.convexified(w[a:b]), a, b) for t, a, b in self.parts))
        if self.convex:
            return self
        a, f = abs(np.asarray(w, float)), self.fields
        kappa = f.get("kappa", 1.0)
        match self.name:
            case "MCP":
                slope = kappa * np.maximum(f["lam"] - a / f["theta"], 0)
            case "SCAD":
                slope = kappa * np.clip((f["a"] * f["lam"] - a) / (f["a"] - 1), 0, f["lam"])
            case "Sparsity2to4":
                b = a.reshape(-1, 4)
                pairs = [(b[:, [k for k in range(4) if k != j]]) for j in range(4)]
                slope = f["lam"] * np.stack([(p.sum(1) ** 2 - (p**2).sum(1)) / 2 for p in pairs], 1).ravel()
            case "TopK" if (a != 0).sum() < f["k"]:
                slope = np.zeros(len(a))
            case _:
                slope = np.where(a != 0, 0.0, np.inf)
        return Term("WeightedL1", {"weights": tuple(slope.tolist())})


def _short(v: Any) -> str:
    if isinstance(v, float):
        return f"{v:.4g}"
    if isinstance(v, tuple) and len(v) > 3:
        return f"({_short(v[0])}, ... {len(v)})"
    return f"({', '.join(map(_short, v))})" if isinstance(v, tuple) else str(v)


def _groups(t: Term, d: int) -> list[tuple[Array, float]]:
    """Coordinates and weight of each group."""
    sizes = t["groups"]
    if isinstance(sizes, str):
        rows, columns = t["shape"]
        at = np.arange(d).reshape(rows, columns)
        members = list(at if sizes == "rows" else at.T)
    else:
        each = [sizes] * (d // sizes) if isinstance(sizes, int) else list(sizes)
        members = np.split(np.arange(d), np.cumsum(each)[:-1])
    weights = t.fields.get("weights", "sqrt")
    if weights == "sqrt":
        weights = [np.sqrt(len(m)) for m in members]
    elif weights == "equal":
        weights = [1.0] * len(members)
    return list(zip(members, weights, strict=True))


def _norms(t: Term, w: Array) -> float:
    return float(sum(v * np.sqrt((w[m] ** 2).sum()) for m, v in _groups(t, len(w))))


def _norms_of(t: Term, w: Any) -> Any:
    return cp.sum(cp.hstack([v * cp.norm2(w[m]) for m, v in _groups(t, w.shape[0])]))


def _apart(t: Term, w: Array) -> float:
    """Every pair of a group on its own."""
    found = w[0] * 0
    for m, v in _groups(t, len(w)):
        pairs = sum((abs(w[i] - w[k]) for n, i in enumerate(m) for k in m[:n]), w[0] * 0)
        found = found + v * (t["lam"] * pairs + t["l1"] * abs(w[m]).sum())
    return float(found)


def _apart_of(t: Term, w: Any) -> tuple[Any, list[Any]]:
    parts = []
    for m, v in _groups(t, w.shape[0]):
        parts.append(v * t["l1"] * cp.norm1(w[m]))
        i, k = np.triu_indices(len(m), 1)
        if len(i):
            parts.append(v * t["lam"] * cp.norm1(w[m[i]] - w[m[k]]))
    return cp.sum(cp.hstack(parts)), []


def _mcp(t: Term, w: Array) -> float:
    u = np.minimum(abs(w), t["theta"] * t["lam"])
    return float(t.fields.get("kappa", 1.0) * (t["lam"] * u - u**2 / (2 * t["theta"])).sum())


def _scad(t: Term, w: Array) -> float:
    lam, a, u = t["lam"], t["a"], abs(w)
    middle = (2 * a * lam * u - u**2 - lam**2) / (2 * (a - 1))
    each = np.where(u <= lam, lam * u, np.where(u <= a * lam, middle, lam**2 * (a + 1) / 2))
    return float(t.fields.get("kappa", 1.0) * each.sum())


def _triples(t: Term, w: Array) -> float:
    a, b, c, d = abs(w).reshape(-1, 4).T
    return float(t["lam"] * (a * b * c + a * b * d + a * c * d + b * c * d).sum())


def _weighted(t: Term, w: Array) -> float:
    v = np.asarray(t["weights"], float)
    return float((np.where(np.isinf(v), 0.0, v) * abs(w)).sum()) if not w[np.isinf(v)].any() else float("inf")


def _weighted_of(t: Term, w: Any) -> tuple[Any, list[Any]]:
    v = np.asarray(t["weights"], float)
    none = np.flatnonzero(np.isinf(v))
    finite = np.where(np.isinf(v), 0.0, v)
    return cp.sum(cp.multiply(finite, cp.abs(w))), [w[none] == 0] if len(none) else []


def _l1_weights(t: Term, d: int) -> Array:
    given = t.fields.get("weights")
    return np.ones(d) if given is None else np.asarray(given, float)


def _matrix(t: Term, w: Array) -> float:
    return float(t["lam"] * np.linalg.svd(np.asarray(w, float).reshape(t["shape"]), compute_uv=False).sum())


def _matrix_of(t: Term, w: Any) -> tuple[Any, list[Any]]:
    if min(t["shape"]) == 1:  # one singular value: the norm
        return t["lam"] * cp.norm2(w), []
    return t["lam"] * cp.normNuc(cp.reshape(w, t["shape"], order="C")), []


_VALUES: dict[str, Any] = {
    "Zero": lambda t, w: 0.0,
    "L1": lambda t, w: t["lam"] * (_l1_weights(t, len(w)) * abs(w)).sum(),
    "WeightedL1": _weighted,
    "L2Squared": lambda t, w: t["lam"] / 2 * (w**2).sum(),
    "ElasticNet": lambda t, w: t["l1"] * abs(w).sum() + t["l2"] / 2 * (w**2).sum(),
    "PositivePart": lambda t, w: t["lam"] * np.maximum(w, 0).sum(),
    "MCP": _mcp,
    "SCAD": _scad,
    "L0": lambda t, w: t["lam"] * (w != 0).sum(),
    "Sparsity2to4": _triples,
    "GroupLasso": lambda t, w: t["lam"] * _norms(t, w),
    "SparseGroupLasso": lambda t, w: t["l1"] * abs(w).sum() + t["l2"] * _norms(t, w),
    "ClusteredLasso": _apart,
    "LinfNorm": lambda t, w: t["lam"] * abs(w).max(),
    "NuclearNorm": _matrix,
    "FusedLasso": lambda t, w: t["lam"] * abs(np.diff(w)).sum() + t.fields.get("l1", 0.0) * abs(w).sum(),
}

_EXPRESSIONS: dict[str, Any] = {
    "Zero": lambda t, w: (0.0, []),
    "L1": lambda t, w: (t["lam"] * cp.sum(cp.multiply(_l1_weights(t, w.shape[0]), cp.abs(w))), []),
    "WeightedL1": _weighted_of,
    "L2Squared": lambda t, w: (t["lam"] / 2 * cp.sum_squares(w), []),
    "ElasticNet": lambda t, w: (t["l1"] * cp.norm1(w) + t["l2"] / 2 * cp.sum_squares(w), []),
    "PositivePart": lambda t, w: (t["lam"] * cp.sum(cp.pos(w)), []),
    "GroupLasso": lambda t, w: (t["lam"] * _norms_of(t, w), []),
    "SparseGroupLasso": lambda t, w: (t["l1"] * cp.norm1(w) + t["l2"] * _norms_of(t, w), []),
    "ClusteredLasso": _apart_of,
    "LinfNorm": lambda t, w: (t["lam"] * cp.norm_inf(w), []),
    "NuclearNorm": _matrix_of,
    "FusedLasso": lambda t, w: (
        (t["lam"] * cp.norm1(cp.diff(w)) if w.shape[0] > 1 else 0.0) + t.fields.get("l1", 0.0) * cp.norm1(w),
        [],
    ),
}
