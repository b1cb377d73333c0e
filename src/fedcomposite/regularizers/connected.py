"""Whole filters and neurons as zeros that pay: a unit is all that goes with it, and is judged by what its end frees.

A filter alone pays nothing: the channel that it writes is there until every layer that adds to the channel (over
residual connections, all of a stage) has lost its filter for it and every layer that reads it its weights for it. So a
unit is all of this, found by the dependencies that :func:`fedcomposite.prune` follows, and becomes zero as a whole.

What is kept maximises the sum, over all rows and columns of all layers, of the logarithm of the part of the layer's
square sum that is left, at a given cost: the r-th unit of its kind, by its own part e_r, is worth
e_r / (e_1 + ... + e_r) in each of the layers it belongs to. So the scale of a layer does not matter, the last units of
a kind are worth much, and many small ones go before them. A unit's cost is half its share of all weights, which is what
the share of zeros counts, and half its share of the time: of multiply-adds, and of numbers moved between operations,
which take most of the time where a layer has few channels and large images. Units of a kind go by eights where there
are many, since accelerators take sizes in such steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedcomposite.regularizers.base import Layout
from fedcomposite.regularizers.target import SparsityTarget, _Layer, _Layers

TIMED = 0.5
"""How much of a unit's cost is time; the rest is its number of weights."""

MOVED = 200.0
"""Multiply-adds in half precision that an H200 carries out while a number is written and read again."""

MANY, STEPS = 64, 8
"""From so many units on, a kind loses them in steps of so many."""


class Piece(NamedTuple):
    """A weight of which each row and column belongs to a unit, by number, or to none: -1."""

    start: int
    stop: int
    shape: tuple[int, int, int]  # rows, columns, entries of each: a kernel's
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    uses: int  # of each entry, for one sample


class _Tables(NamedTuple):
    """What a prox looks up, on one device; U units in G groups of at most m, L pieces of S rows and columns."""

    unit: Tensor  # (S,): the unit of each row and column, all rows first; U where there is none
    members: Tensor  # (U, n): rows and columns of each unit, S where it has fewer
    placed: Tensor  # (G, m): units of each group, U where it has fewer
    middle: Tensor  # (G, m): the rank whose score counts, for every rank
    order: Tensor  # (G, m): a little less than one within a step, so that a part of one can fill the share
    price: Tensor  # (G, 1): how many layers' rows and columns a unit of each group has, by its cost
    steps: Tensor  # (G, 1)
    group: Tensor  # (U, G): one where a unit is in a group
    axes: Tensor  # (G, 2 L): how many rows, then columns, a unit of each group has
    fixed: Tensor  # (2 L,): rows, then columns, of no unit
    kernels: Tensor  # (L,)


@dataclass(frozen=True)
class Connected:
    """The units of a network whose parameters are a vector of length ``dimension``."""

    pieces: tuple[Piece, ...]
    moved: tuple[float, ...]
    """Numbers that operations write for each unit, for one sample."""
    dimension: int

    @cached_property
    def weights(self) -> npt.NDArray[np.float64]:
        """How many each unit has."""
        return self._summed(lambda piece: 1)

    @cached_property
    def time(self) -> npt.NDArray[np.float64]:
        """Multiply-adds of each unit for one sample, and what its movements are worth."""
        return self._summed(lambda piece: piece.uses) + MOVED * np.array(self.moved)

    def _summed(self, worth: Callable[[Piece], int]) -> npt.NDArray[np.float64]:
        found = np.zeros(len(self.moved) + 1)  # the last: of no unit
        for piece in self.pieces:
            rows, columns, kernel = piece.shape
            np.add.at(found, np.array(piece.rows), worth(piece) * columns * kernel)
            np.add.at(found, np.array(piece.columns), worth(piece) * rows * kernel)
        return found[:-1]

    @property
    def cost(self) -> npt.NDArray[np.float64]:
        """In weights: what each unit's end frees; of all units as many as they have weights."""
        weights, time = self.weights, self.time
        cost: npt.NDArray[np.float64] = (1 - TIMED) * weights + TIMED * time * (weights.sum() / time.sum())
        return cost

    @cached_property
    def _placed(self) -> dict[torch.device, _Tables]:
        return {}

    def tables(self, device: torch.device) -> _Tables:
        """What a prox looks up, on a device."""
        if device not in self._placed:
            self._placed[device] = _Tables(*(t.to(device) for t in self._made()))
        return self._placed[device]

    def _made(self) -> _Tables:
        count, axes = len(self.moved), [p.rows for p in self.pieces] + [p.columns for p in self.pieces]
        where: list[Counter[int]] = [Counter() for _ in range(count)]
        members: list[list[int]] = [[] for _ in range(count)]
        for a, labels in enumerate(axes):
            for place, unit in enumerate(labels, sum(map(len, axes[:a]))):
                if unit >= 0:
                    where[unit][a] += 1
                    members[unit].append(place)
        kinds = {kind: g for g, kind in enumerate(dict.fromkeys(frozenset(w.items()) for w in where))}
        of = torch.tensor([kinds[frozenset(w.items())] for w in where])
        sizes = of.bincount(minlength=len(kinds))
        most, steps = int(sizes.max()), torch.where(sizes >= MANY, STEPS, 1)[:, None]
        placed = torch.full((len(kinds), most), count)
        for g in range(len(kinds)):
            placed[g, : sizes[g]] = (of == g).nonzero()[:, 0]
        ranks = torch.arange(most)
        middle = (ranks // steps * steps + steps // 2).minimum(sizes[:, None] - 1).clamp(min=0)
        order = 1 - 1e-5 * (ranks % steps)
        total, widest = sum(map(len, axes)), max(map(len, members))
        padded = torch.tensor([places + [total] * (widest - len(places)) for places in members])
        per = torch.zeros(len(kinds), len(axes), dtype=torch.float64)
        for kind, g in kinds.items():
            for a, times in kind:
                per[g, a] = times
        fixed = torch.tensor([sum(unit < 0 for unit in labels) for labels in axes], dtype=torch.float64)
        kernels = torch.tensor([p.shape[2] for p in self.pieces], dtype=torch.float64)
        one_hot = torch.nn.functional.one_hot(of, len(kinds)).to(torch.float64)
        cost = torch.from_numpy(np.bincount(of, self.cost) / sizes.numpy())
        price = torch.tensor([len(kind) for kind in kinds])[:, None] / cost[:, None].clamp(min=1e-9)
        unit_of = torch.tensor([count if one < 0 else one for labels in axes for one in labels])
        return _Tables(unit_of, padded, placed, middle, order, price, steps, one_hot, per, fixed, kernels)

    def energy(self, u: Tensor) -> Tensor:
        """The units' parts of the square sums of the layers that they belong to, summed over these."""
        squares = [u[..., p.start : p.stop].square().reshape(*u.shape[:-1], *p.shape).sum(-1) for p in self.pieces]
        squares = [s / s.sum((-1, -2), keepdim=True).clamp(min=torch.finfo(u.dtype).tiny) for s in squares]
        rows, columns = [s.sum(-1) for s in squares], [s.sum(-2) for s in squares]
        each = torch.cat([*rows, *columns, u.new_zeros(*u.shape[:-1], 1)], -1)
        return each[..., self.tables(u.device).members].sum(-1)

    def kept(self, alive: Tensor) -> Tensor:
        """Weights that stay, if so many units of each group do: of (..., G) numbers."""
        tables = self.tables(alive.device)
        rows, columns = (alive @ tables.axes + tables.fixed).chunk(2, -1)
        return rows * columns @ tables.kernels


@dataclass(frozen=True)
class FilterTarget(SparsityTarget):
    """A share of all parameters is zero, in whole units of a network; see the module's text.

    Made by a problem, which knows the network: ``structure="filters"``.
    """

    connected: Connected | None = field(default=None, repr=False)

    def resolve(self, layout: Layout) -> FilterTarget:
        """The term on the weights that have units; the layout is known already."""
        found = tuple(_Layer(p.start, p.stop, p.shape) for p in self._connected.pieces)
        placed = _Layers(found, self._connected.dimension, "filters")
        made = replace(self, placed=placed)
        made._check_share(placed.entries / placed.dimension)
        tables = self._connected.tables(torch.device("cpu"))
        least = float(self._connected.kept(tables.steps.squeeze(-1).double()))
        if least > made._kept_share * placed.entries:
            raise ValueError(
                f"sparsity = {self.share:g}, but what no layer can do without is {least / placed.dimension:.1%} of all "
                "parameters; ask for less"
            )
        return made

    def _cut(self, u: Tensor, entries: Tensor) -> Tensor:
        """The entries, but zero in all of the units that cost more than u has in them; what is not a number stays."""
        alive = self.alive(u)
        alive = torch.cat([alive, torch.ones_like(alive[..., :1])], -1)  # the last: what belongs to no unit
        pieces = self._connected.pieces
        lines = alive.index_select(-1, self._connected.tables(u.device).unit)
        parts = lines.split_with_sizes([len(p.rows) for p in pieces] + [len(p.columns) for p in pieces], -1)
        out = entries.clone()
        for piece, rows, columns in zip(pieces, parts[: len(pieces)], parts[len(pieces) :], strict=True):
            whole = entries[..., piece.start : piece.stop].reshape(*u.shape[:-1], *piece.shape)
            cut = torch.where((rows[..., :, None] & columns[..., None, :])[..., None], whole, 0.0)
            out[..., piece.start : piece.stop] = cut.flatten(-3)
        return out

    def alive(self, u: Tensor) -> Tensor:
        """Which units stay, (..., U)."""
        tables, keep = self._connected.tables(u.device), self._number(u.device)
        tiny, none = torch.finfo(u.dtype).tiny, u.new_zeros(*u.shape[:-1], 1)
        parts = torch.cat([self._connected.energy(u), none], -1)[..., tables.placed]
        part, place = parts.sort(dim=-1, descending=True, stable=True)
        each = part / part.cumsum(-1).clamp(min=tiny) * tables.price.to(u.dtype)
        each = each.gather(-1, tables.middle.expand_as(each)) * tables.order.to(u.dtype)
        each = each.masked_fill(torch.arange(each.shape[-1], device=u.device) < tables.steps, torch.inf)
        units = tables.placed.expand_as(place).gather(-1, place).flatten(-2)
        worth = u.new_zeros(*u.shape[:-1], len(tables.members) + 1).scatter(-1, units, each.flatten(-2))[..., :-1]
        alive = self._fitting(worth, keep)
        counts = alive.double() @ tables.group  # a head of an attention may not fit where a neuron does
        more = self._connected.kept(counts[..., None, :] + torch.eye(counts.shape[-1]).to(counts))
        small = (more <= keep.double() * self._layers.entries).to(tables.group) @ tables.group.T > 0
        return self._fitting(worth.masked_fill(alive, torch.inf).masked_fill(~alive & ~small, -1.0), keep)

    def _fitting(self, worth: Tensor, keep: Tensor) -> Tensor:
        """The units of most worth, so many that the share is met; those without an end are among them."""
        falling = worth.sort(dim=-1, descending=True, stable=True)
        kept = self._connected.kept(self._connected.tables(worth.device).group[falling.indices].cumsum(-2))
        fitting = (kept <= keep.double() * self._layers.entries).sum(-1, keepdim=True)
        bound = falling.values.gather(-1, fitting.clamp(max=worth.shape[-1] - 1))
        return ~(worth <= bound) | (worth == torch.inf) | (fitting == worth.shape[-1])

    @property
    def _connected(self) -> Connected:
        if self.connected is None:
            raise TypeError("a share of zeros in whole filters needs to know the network: give it to a problem")
        return self.connected
