"""Which entries of which tensors are one unit: a filter with its row of every weight, statistic and activation.

Every axis of every tensor in a network's graph carries an array of labels, one per entry. An operation says which
labels are the same: an addition joins the channels of its two sides, flattening repeats the label of a channel for all
its pixels. What is left at the end are classes of labels, the units: removing one is deleting, from every parameter,
all entries that carry its label. A label that an operation needs to stay is pinned, with a reason; 0 is always pinned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import fx

Labels = npt.NDArray[np.int64]
Axes = list[Labels]  # the labels of a tensor, axis by axis

ELEMENTWISE = {
    "add", "sub", "mul", "div", "neg", "abs", "exp", "sqrt", "pow", "square", "sin", "cos", "log1p", "expm1", "to",
    "relu", "relu6", "hardtanh", "clamp", "clamp_min", "clamp_max", "leaky_relu", "elu", "celu", "selu", "gelu", "silu",
    "mish", "sigmoid", "tanh", "hardswish", "hardsigmoid", "softplus", "dropout", "feature_dropout", "alpha_dropout",
    "clone", "contiguous", "detach", "alias",
}  # fmt: skip
TRANSPOSED = ("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
CONTRACTIONS = ("linear", "conv1d", "conv2d", "conv3d", *TRANSPOSED)
POOLS = {"max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool"}
"""Their names end in the number of dimensions."""


def operation(node: fx.Node) -> str:
    """The name of what a node does, without its overload and the sign of working in place."""
    schema = getattr(node.target, "_schema", None)
    name = getattr(node.target, "__name__", str(node.target)) if schema is None else schema.name.split("::")[-1]
    return str(name).removesuffix("_") if schema is not None and schema.is_mutable else str(name)


def pool(name: str) -> bool:
    """Whether an operation is a pooling, which keeps channels apart."""
    return name[-1:] == "d" and name[:-2] in POOLS


def pooled(node: fx.Node) -> bool:
    """Whether a node takes one of the two results of a pooling: maxima, and their places."""
    return operation(node) == "getitem" and pool(operation(node.all_input_nodes[0]))


@dataclass(frozen=True)
class Contraction:
    """A linear layer or a convolution: it sums over the channels of its input."""

    node: fx.Node
    inputs: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    padded: bool
    transposed: bool = False
    """Whether the first axis of its weight is that of its inputs."""

    @property
    def reads(self) -> int:
        """The axis of its weight that it sums over."""
        return 0 if self.transposed else 1


@dataclass
class Units:
    """Labels of every tensor of a graph, which are joined or pinned as operations ask for it.

    ``depthwise`` says of a weight whether its layer's number of groups may shrink; ``fixed`` takes every reshape for
    one to sizes that are written down in the module.
    """

    depthwise: Callable[[fx.Node], bool]
    fixed: bool = False
    axes: dict[fx.Node, Axes] = field(default_factory=dict)
    contractions: list[Contraction] = field(default_factory=list)
    _parent: list[int] = field(default_factory=lambda: [0])
    _pinned: dict[int, str] = field(default_factory=lambda: {0: ""})

    # -- labels -------------------------------------------------------------------------------------------------------

    def fresh(self, count: int) -> Labels:
        """New labels."""
        first = len(self._parent)
        self._parent.extend(range(first, first + count))
        return np.arange(first, first + count)

    def root(self, label: int) -> int:
        """The one label that stands for its unit."""
        while (up := self._parent[label]) != label:
            self._parent[label] = label = self._parent[up]
        return label

    def roots(self, labels: Iterable[int]) -> Labels:
        """The units of an axis."""
        return np.array([self.root(int(label)) for label in labels], dtype=np.int64)

    def pinned(self, unit: int) -> str | None:
        """Why a unit has to stay."""
        return self._pinned.get(self.root(unit))

    def join(self, a: Labels, b: Labels) -> None:
        """Make the labels of two axes the same, entry by entry."""
        for one, other in zip(a.tolist(), b.tolist(), strict=True):
            p, q = self.root(one), self.root(other)
            if p == q:
                continue
            if 0 in (p, q):
                self._pinned.setdefault(p + q, "it is joined with something that stays")
                continue
            self._parent[q] = p
            if q in self._pinned:
                self._pinned.setdefault(p, self._pinned[q])

    def pin(self, axes: Iterable[Labels], reason: str) -> None:
        """Labels that stay."""
        for labels in axes:
            for label in set(labels.tolist()):
                self._pinned.setdefault(self.root(label), reason)

    # -- operations -----------------------------------------------------------------------------------------------

    def visit(self, node: fx.Node) -> None:
        """What an operation of the graph does with the labels of its inputs."""
        name = operation(node)
        value: Any = node.meta.get("val")
        rule = _RULES.get(name)
        given = [a for a in node.all_input_nodes if a in self.axes]
        if name in ELEMENTWISE:
            self.axes[node] = self._elementwise(given, value)
        elif pooled(node) and self.axes[given[0]]:
            self.axes[node] = self.axes[given[0]]
        elif pool(name) and len(first := self.axes[given[0]]) == int(name[-2]) + 2:  # not one sample without its axis
            self.pin(first[2:], "it is pooled over")
            shape = value[0].shape if isinstance(value, tuple | list) else value.shape
            self.axes[node] = [*first[:2], *_zeros(shape[2:])]
        elif name.startswith("_assert"):  # of types, which stay
            self.axes[node] = []
        elif rule is None or (axes := rule(self, node)) is None:
            for argument in given:
                self.pin(self.axes[argument], f"{name} has no rule that removes a part of it")
            self.axes[node] = _zeros(value.shape) if hasattr(value, "shape") else []
        else:
            self.axes[node] = axes

    def _elementwise(self, given: Sequence[fx.Node], value: Any) -> Axes:
        """Axes are aligned at the end; an axis of length 1 is repeated along the other's."""
        out: Axes = _zeros(value.shape)
        for back in range(1, len(out) + 1):
            present = [self.axes[a][-back] for a in given if len(self.axes[a]) >= back]
            whole = [labels for labels in present if len(labels) == value.shape[-back]]
            self.pin([labels for labels in present if len(labels) != value.shape[-back]], "it is repeated")
            for other in whole[1:]:
                self.join(whole[0], other)
            out[-back] = whole[0]
        return out


def _zeros(shape: Iterable[int]) -> Axes:
    return [np.zeros(n, dtype=np.int64) for n in shape]


def _arguments(node: fx.Node, *names: str) -> list[Any]:
    """The arguments of these names, given or by default."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    found = {a.name: a.default_value for a in schema if a.has_default_value()}
    found |= dict(zip((a.name for a in schema), node.args, strict=False)) | node.kwargs
    return [found.get(name) for name in names]


def _contract(units: Units, node: fx.Node) -> Axes | None:
    """Linear layers, and convolutions of one group or of one channel per group."""
    x, weight, bias, padding, groups = _arguments(node, "input", "weight", "bias", "padding", "groups")
    axes, rows = units.axes[x], units.axes[weight]
    transposed = operation(node) in TRANSPOSED
    if transposed and (groups != 1 or len(rows) < 2):
        return None
    rows = [rows[1], rows[0], *rows[2:]] if transposed else rows
    at = len(axes) - 1 if operation(node) == "linear" else 1
    if len(rows) < 2 or (at == 1 and len(rows) != len(axes)):
        return None
    if bias is not None:
        units.join(rows[0], units.axes[bias][0])
    if operation(node) != "linear":
        units.pin([*axes[2:], *rows[2:]], "a convolution slides along it")
    out = axes[:-1] if operation(node) == "linear" else [axes[0], *_zeros(node.meta["val"].shape[1:])]
    out = [*out[:at], rows[0], *out[at + 1 :]]
    padded = padding not in (None, "valid") and (isinstance(padding, str) or any(padding))
    if groups in (None, 1):
        units.join(axes[at], rows[1])
        units.contractions.append(Contraction(node, x, weight, bias, padded or transposed, transposed))
    elif groups == len(axes[at]) and units.depthwise(weight):
        units.join(np.repeat(axes[at], len(rows[0]) // groups), rows[0])
        units.pin([rows[1]], "it is the only one of its group")
    else:
        units.pin([axes[at], *rows[:2]], "a convolution in groups needs groups of equal size")
    return out


def _normalise(units: Units, node: fx.Node) -> Axes | None:
    """Batch norm by running statistics: a channel by itself."""
    x, training, *given = _arguments(node, "input", "training", "weight", "bias", "running_mean", "running_var")
    if training:
        return None
    for statistic in given:
        if statistic is not None:
            units.join(units.axes[x][1], units.axes[statistic][0])
    return units.axes[x]


def _reduce(units: Units, node: fx.Node) -> Axes | None:
    """A mean, sum or maximum over some axes."""
    x, dims, keep = _arguments(node, "self", "dim", "keepdim")
    axes = units.axes[x]
    over = {d % len(axes) for d in (dims or range(len(axes)))}
    units.pin([axes[d] for d in over], "it is summed over")
    kept = [(d, labels) for d, labels in enumerate(axes) if keep or d not in over]
    return [np.zeros(1, dtype=np.int64) if d in over else labels for d, labels in kept]


def _reshape(units: Units, node: fx.Node) -> Axes | None:
    """Axes that are merged, or that get neighbours of length 1; anything else is pinned."""
    x, shape = node.all_input_nodes[0], tuple(node.meta["val"].shape)
    axes = units.axes[x]
    if units.fixed and operation(node) in ("view", "reshape", "unflatten"):
        units.pin(axes, "a reshape to sizes that are written down in the module")
        return _zeros(shape)
    if units.fixed and operation(node) == "squeeze" and len(node.args) == 1:
        units.pin(axes, "squeeze would drop its axis if it had one entry")
        return _zeros(shape)
    old, out = [a for a in axes if len(a) != 1], []
    units.pin([a for a in axes if len(a) == 1], "it is the only one of its axis")
    for n in shape:
        if n == 1:
            out.append(np.zeros(1, dtype=np.int64))
            continue
        merged = [old.pop(0)] if old else []
        while old and np.prod([len(a) for a in merged]) < n:
            merged.append(old.pop(0))
        named = [i for i, a in enumerate(merged) if a.any()]
        if np.prod([len(a) for a in merged]) != n or len(named) > 1:
            return None
        grid = [a.reshape([-1 if i == j else 1 for j in range(len(merged))]) for i, a in enumerate(merged)]
        out.append(np.sum(np.broadcast_arrays(*grid), axis=0).reshape(-1))
    return out


def _unflatten(units: Units, node: fx.Node) -> Axes | None:
    """One axis as two, of which the first may lose entries: heads of a size that the module's code knows."""
    x, dim = _arguments(node, "self", "dim")
    axes, shape = units.axes[x], tuple(node.meta["val"].shape)
    dim %= len(axes)
    if units.fixed or len(shape) != len(axes) + 1:
        return None
    grid = axes[dim].reshape(shape[dim], shape[dim + 1])
    for other in grid.T[1:]:
        units.join(grid[:, 0], other)
    return [*axes[:dim], grid[:, 0], *_zeros(shape[dim + 1 : dim + 2]), *axes[dim + 1 :]]


def _attend(units: Units, node: fx.Node) -> Axes | None:
    """Attention by (batch, heads, tokens, size): a head by itself."""
    heads = [units.axes[t] for t in _arguments(node, "query", "key", "value")]
    mask = _arguments(node, "attn_mask")[0]
    if any(len(axes) != 4 for axes in heads) or len({len(axes[1]) for axes in heads}) > 1:
        return None
    for axes in heads:
        units.join(heads[0][1], axes[1])
        units.pin([axes[0], *axes[2:]], "attention sums over it")
    if mask is not None:
        units.pin(units.axes[mask], "it masks an attention")
    return [*_zeros(node.meta["val"].shape[:1]), heads[0][1], *_zeros(node.meta["val"].shape[2:])]


def _enlarge(units: Units, node: fx.Node) -> Axes | None:
    """A larger image, by repeating or interpolating pixels."""
    axes = units.axes[node.all_input_nodes[0]]
    units.pin(axes[2:], "it is interpolated")
    return [*axes[:2], *_zeros(node.meta["val"].shape[2:])]


def _permute(units: Units, node: fx.Node) -> Axes | None:
    axes, n = units.axes[node.all_input_nodes[0]], len(units.axes[node.all_input_nodes[0]])
    if operation(node) == "permute":
        return [axes[d] for d in _arguments(node, "dims")[0]]
    a, b = (d % n for d in (_arguments(node, "dim0", "dim1") if operation(node) == "transpose" else (-1, -2)))
    return [axes[{a: b, b: a}.get(d, d)] for d in range(n)]


def _cat(units: Units, node: fx.Node) -> Axes | None:
    tensors, dim = _arguments(node, "tensors", "dim")
    parts = [units.axes[t] for t in tensors]
    dim %= len(parts[0])
    for other in parts[1:]:
        for d, (a, b) in enumerate(zip(parts[0], other, strict=True)):
            if d != dim:
                units.join(a, b)
    return [np.concatenate([p[d] for p in parts]) if d == dim else a for d, a in enumerate(parts[0])]


_RULES: dict[str, Callable[[Units, fx.Node], Axes | None]] = {
    **dict.fromkeys(CONTRACTIONS, _contract),
    "batch_norm": _normalise,
    **dict.fromkeys(("mean", "sum", "amax"), _reduce),
    **dict.fromkeys(("flatten", "view", "reshape", "squeeze", "unsqueeze"), _reshape),
    **dict.fromkeys(("permute", "transpose", "t", "mT"), _permute),
    "unflatten": _unflatten,
    "scaled_dot_product_attention": _attend,
    **dict.fromkeys(("upsample_nearest2d", "upsample_bilinear2d"), _enlarge),
    "cat": _cat,
}
VIEWS = {name for name, rule in _RULES.items() if rule in (_reshape, _permute, _unflatten)}
"""What moves no numbers."""
KNOWN = (ELEMENTWISE | set(_RULES)) - {"scaled_dot_product_attention"}
"""What may be carried out on constants, poolings aside."""
