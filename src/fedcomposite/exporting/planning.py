"""Which units of a network can go: its graph, the layers that read a unit, and what its parameters become then."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, fx, nn

from fedcomposite.exporting.constants import constants
from fedcomposite.exporting.errors import ExportError
from fedcomposite.problems.network.graph import ModuleGraph, UntraceableError
from fedcomposite.problems.network.units import Contraction, Units, operation

State = dict[str, Tensor]
Mask = npt.NDArray[np.bool_]

_ADD_A_BIAS = {layer.forward for layer in (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)}


@dataclass(frozen=True)
class Layer:
    """A linear layer or a convolution, before and after."""

    name: str
    shape: tuple[int, ...]
    """Of its weight, before."""
    pruned: tuple[int, ...]
    flops: int
    """Two per weight and position, for one sample, before."""
    pruned_flops: int


@dataclass(frozen=True)
class Kept:
    """Dead units of a layer that stay."""

    layer: str
    count: int
    reason: str


class ValuedGraph(ModuleGraph):
    """The graph of a module, and what is the same in it whatever the input is."""

    def __init__(self, module: nn.Module, example: Tensor) -> None:
        try:
            super().__init__(module, example)
        except UntraceableError as error:
            raise ExportError(str(error)) from error
        self.values = constants(self.graph, self.given)


class PruningPlan:
    """Which units go, and what the parameters become."""

    def __init__(self, network: ValuedGraph, fixed: bool, multiple: int = 1) -> None:
        self.network, self._multiple = network, multiple
        self.units = units = network.units(fixed)
        self.readers = [_Reader(network, units, c) for c in units.contractions]
        self.labels = {node: [units.roots(labels) for labels in units.axes[node]] for node in network.tensors}
        self._last: set[int] = set()
        self._filling: set[int] = set()
        self.gone: set[int] = set()
        axes = [labels for node in self.labels.values() for labels in node if len(labels)]
        parts_first = sorted(axes, key=lambda labels: len(set(labels.tolist())))  # what fills them fills what they make
        while True:
            self.gone = self._removable()
            emptied = [int(a[0]) for a in axes if self.gone.issuperset(a.tolist())]
            if emptied:
                self._last.add(emptied[-1])  # the last layer first: what its unit reads may be enough for those before
            elif filling := self._missing(parts_first):
                self._filling |= filling
            else:
                break

    def _removable(self) -> set[int]:
        """The units that no reader needs; a reader that goes needs nothing any more."""
        read = {int(u) for reader in self.readers for u in reader.inputs}
        free = {u for u in read if self.units.pinned(u) is None} - self._last - self._filling
        gone: set[int] = set()
        while True:
            needed = {int(u) for reader in self.readers for u in reader.inputs[reader.needs(gone)]}
            if free - needed == gone:
                return gone
            gone = free - needed

    def _missing(self, axes: list[npt.NDArray[np.int64]]) -> set[int]:
        """Dead units of one axis that fill its size up to a multiple; those of zeros first, which need no others."""
        for labels in axes:
            dead = Counter(u for u in labels.tolist() if u in self.gone)
            size, filling = len(labels) - dead.total(), set()
            if dead and size % self._multiple:
                alive = {int(u) for reader in self.readers for u in reader.outputs[reader.reads]}
                for unit in sorted(dead, key=alive.__contains__):
                    filling.add(unit)
                    size += dead[unit]  # a channel is there once for each of its pixels behind a flattening
                    if size % self._multiple == 0:
                        break
                return filling
        return set()

    def _masks(self, node: fx.Node) -> list[Mask]:
        """Which entries of a tensor stay, axis by axis."""
        return [~np.isin(labels, list(self.gone)) for labels in self.labels[node]]

    def state(self) -> State:
        """All tensors, smaller, constants added to biases."""
        tensors = self.network.tensors
        known = {id(tensor): self._masks(node) for node, tensor in tensors.items()}  # a shared one has several names
        state = dict(self.network.state)
        masks = {name: known.get(id(tensor), []) for name, tensor in state.items()}
        for reader in self.readers:
            weight, added = reader.takes_over(self.gone)
            if weight is not None:
                state[reader.weight_name] = weight
            if added is not None:
                name, old = reader.bias_name, state.get(reader.bias_name)
                state[name] = (added if old is None else old.double() + added).to(reader.weight.dtype)
                masks.setdefault(name, [~np.isin(reader.outputs, list(self.gone))])
        return {name: _cut(tensor, masks[name]) for name, tensor in state.items()}

    def layers(self) -> tuple[Layer, ...]:
        """Every linear layer and convolution."""
        rows: dict[str, Layer] = {}
        for _, weight, positions in self.network.weighed():
            name, tensor = self.network.called(weight), self.network.tensors[weight]
            cut = _cut(tensor, self._masks(weight))
            before = rows.get(name, Layer(name, (), (), 0, 0))
            flops = [old + 2 * positions * t.numel() for old, t in ((before.flops, tensor), (before.pruned_flops, cut))]
            rows[name] = Layer(name, tuple(tensor.shape), tuple(cut.shape), *flops)
        return tuple(rows.values())

    def kept(self) -> tuple[Kept, ...]:
        """Dead units that stay, by layer and reason."""
        counts: Counter[tuple[str, str]] = Counter()
        reasons, constant = self._reasons(), {int(u) for r in self.readers for u in r.inputs[~r.unknown]} - {0}
        dead: dict[str, Mask] = {}  # of a layer that is used twice, in any of its uses
        for reader in self.readers:
            found = reader.dead | np.isin(reader.outputs, list(constant))
            dead[reader.name] = found | dead.get(reader.name, found)
        for name, outputs in {reader.name: reader.outputs for reader in self.readers}.items():
            for unit in map(int, outputs[dead[name] & ~np.isin(outputs, list(self.gone))]):
                counts[name, self.units.pinned(unit) or reasons.get(unit, "no layer reads it")] += 1
        return tuple(Kept(layer, count, reason) for (layer, reason), count in counts.items())

    def _reasons(self) -> dict[int, str]:
        """Why a unit that is read stays, of those that nothing pins."""
        reasons = dict.fromkeys(self._last, "it is the last one of its layer")
        reasons |= dict.fromkeys(self._filling, f"it makes the size of its layer a multiple of {self._multiple}")
        for reader in self.readers:
            for place in np.flatnonzero(reader.needs(self.gone)):
                reasons.setdefault(int(reader.inputs[place]), reader.why(int(place)))
        return reasons


class _Reader:
    """A layer that sums over units: which of its inputs it can do without."""

    def __init__(self, network: ValuedGraph, units: Units, contraction: Contraction) -> None:
        c = self.contraction = contraction
        self.name = network.called(c.weight)
        x, weight, out = (network.values[n] for n in (c.inputs, c.weight, c.node))
        at = x.ndim - 1 if operation(c.node) == "linear" else 1
        self.inputs = units.roots(units.axes[c.inputs][at])
        self.outputs = units.roots(units.axes[c.weight][1 - c.reads])
        weight = weight.transpose(0, 1) if c.transposed else weight  # here outputs come first
        self.weight, self.weight_name = weight, network.names.get(c.weight, "")
        lines = x.movedim(at, 0).flatten(1)
        self.unknown = lines.isnan().any(1).numpy()
        self._zero: Mask = (lines == 0).all(1).numpy()
        self._same: Mask = (lines == lines[:, :1]).all(1).numpy()  # never true of NaN
        self._value = lines[:, 0].double()
        self._nonzero: Mask = (weight.flatten(2) if weight.ndim > 2 else weight[..., None]).ne(0).any(2).numpy()
        self.reads: Mask = self._nonzero.any(1)
        """Of every output, whether it has a weight."""
        self.dead: Mask = (~out.movedim(at, 0).flatten(1).isnan()).all(1).numpy()
        own, owner = network.once(c.weight) and not bool(weight.isnan().any()), network.owner(c.weight)
        if c.bias is not None:
            self.bias_name = network.names.get(c.bias, "")
            room = network.once(c.bias)
        else:
            self.bias_name = self.weight_name.removesuffix("weight") + "bias"
            known = getattr(type(owner), "forward", None) in _ADD_A_BIAS and network.calls(c.node, c.weight)
            room = own and known and getattr(owner, "bias", c) is None
        self._folds = own and room and not c.padded
        # Constants that the bias cannot take: one of them stays, and takes the others over into its own weights.
        several = np.flatnonzero(self._same & ~self._zero & self._nonzero.any(0))
        self.carrier: int | None = None
        if own and not self._folds and len(set(self.inputs[several].tolist()) - {0}) > 1:
            self.carrier = int(several[int(self._value[several].abs().argmax())])
        self._carried: Mask = np.isin(np.arange(len(self.inputs)), several)
        self._replaced = self._same & (self._folds or self.carrier is not None)
        if self.carrier is not None:
            self._replaced &= self.inputs != self.inputs[self.carrier]

    def needs(self, gone: set[int]) -> Mask:
        """Of every input, whether the layer needs it when some units are gone."""
        alive = ~np.isin(self.outputs, list(gone))
        read = self._nonzero[alive].any(0)
        needed: Mask = ~self._zero & ~self._replaced & read
        if self.carrier is not None:
            needed[self.carrier] |= bool((read & self._carried).any())
        return needed

    def takes_over(self, gone: set[int]) -> tuple[Tensor | None, Tensor | None]:
        """The whole new weight, and what is added to the bias, to replace constants that are gone; None: nothing."""
        away = np.flatnonzero(np.isin(self.inputs, list(gone)) & ~self._zero & self._replaced)
        if not self._nonzero[:, away].any():
            return None, None
        weight = self.weight.double()
        if self.carrier is None:
            columns = weight[:, away].flatten(2).sum(2) if weight.ndim > 2 else weight[:, away]
            return None, columns @ self._value[away]
        ratios = self._value[away] / self._value[self.carrier]
        weight[:, self.carrier] += torch.tensordot(ratios, weight[:, away], dims=([0], [1]))
        whole = weight.to(self.weight.dtype)
        return whole.transpose(0, 1) if self.contraction.transposed else whole, None

    def why(self, place: int) -> str:
        """Why the layer needs what comes in at some place."""
        if self.unknown[place]:
            return f"{self.name} reads it joined with something that is not constant"
        if not self._same[place]:
            return f"its constant is another at the border of the image that {self.name} reads"
        if self.carrier is not None:
            return f"{self.name} reads its constant in place of all others"
        if self.contraction.padded:
            return f"{self.name} pads its input, at whose border the constant would be missing"
        return f"{self.name} has no bias of its own that could take the constant"


def _cut(tensor: Tensor, keep: list[Mask]) -> Tensor:
    """The kept entries along every axis."""
    out = tensor.detach()
    for axis, kept in enumerate(keep):
        if not kept.all():
            out = out.index_select(axis, torch.from_numpy(np.flatnonzero(kept)))
    return out.clone()
