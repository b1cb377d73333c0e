"""A share of zeros as the one thing to say; how strong the term must be for it is found anew in every prox.

The prox of an l0 term keeps what is larger than a threshold, and the other way round any threshold is the prox of an
l0 term of some strength. So instead of a strength that a run would have to find and to remember, the threshold is read
off the vector itself: the quantile that leaves the wanted share of zeros. Nothing is remembered between calls, so that
every client, the server, a resumed run and a recorded one find the same zeros at the same vector.

All layers share one threshold, which makes most zeros where most small weights are; but no layer keeps less than a
part of what the Erdos-Renyi rule would leave it (Mocanu et al. 2018; with kernels Evci et al. 2020), so that none dies.

What is compared with the threshold is a score of each entry. It is the entry's size; in blocks of four it puts the
larger two of each block before all smaller ones: the smaller ones go first, and at half of the entries the pattern is
whole. Whole filters are units of a network, which :mod:`fedcomposite.regularizers.connected` judges.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Literal, NamedTuple, NoReturn

import annotated_types as at
import torch
from torch import Tensor

from fedcomposite import rng
from fedcomposite.regularizers.base import Layout, Regularizer, Step
from fedcomposite.regularizers.separable import Zero
from fedcomposite.schedules import Ramp, Schedule, read

Structure = Literal["weights", "filters", "2:4"]
Share = Annotated[float, at.Gt(0), at.Lt(1)]

SAMPLED = 1 << 14
"""Entries of a layer that its quantiles are read off; of larger layers so many, the same ones at every call."""

PROTECTED = 0.5
"""The part of its Erdos-Renyi share that a layer keeps whatever its weights are."""

START, END = 0.05, 0.6
"""Between which shares of the rounds zeros grow."""

_LARGER = float(1 << 31)
"""Above all scores of the smaller two of a block of four, and at most those of the larger two."""


_NEEDED = {
    "weights": "parameters with two axes or more",
    "2:4": "weights whose rows are a multiple of four long",
}


class _Layer(NamedTuple):
    """A parameter in which zeros are made: coordinates ``start`` to ``stop`` hold its entries."""

    start: int
    stop: int
    shape: tuple[int, ...]

    @property
    def density(self) -> float:
        """The Erdos-Renyi share of its entries, up to a factor for all layers: thin layers keep more."""
        return sum(self.shape) / math.prod(self.shape)

    @property
    def row(self) -> int:
        """How many entries one index of the first axis has; of a vector, all."""
        return math.prod(self.shape[1:] or self.shape)


class _Tables(NamedTuple):
    """What a prox looks up, on one device; L layers with up to m sampled entries each."""

    places: Tensor  # (L, m): coordinates of sampled entries
    pad: Tensor  # (L, m): true where a layer has fewer
    weight: Tensor  # (L * m,): how many entries a sampled one stands for
    sampled: Tensor  # (L,): how many entries are sampled
    most: Tensor  # (L,): of how many of them at most the layer is sure
    floor: Tensor  # (L,): what is kept at least, in units of the share that is kept of all
    layer: Tensor  # (d,): the layer of each coordinate, L outside of all


@dataclass(frozen=True)
class _Layers:
    """Where zeros are made, in vectors of length ``dimension``."""

    layers: tuple[_Layer, ...]
    dimension: int
    structure: Structure = "weights"

    @property
    def entries(self) -> int:
        return sum(layer.stop - layer.start for layer in self.layers)

    @cached_property
    def _placed(self) -> dict[torch.device, _Tables]:
        return {}

    def tables(self, device: torch.device) -> _Tables:
        if device not in self._placed:
            self._placed[device] = _Tables(*(t.to(device) for t in self._made()))
        return self._placed[device]

    def _made(self) -> _Tables:
        sizes = [layer.stop - layer.start for layer in self.layers]
        most = min(SAMPLED, max(sizes))
        places = torch.zeros(len(sizes), most, dtype=torch.int64)
        of = torch.full((self.dimension,), len(sizes), dtype=torch.int32)
        for i, (layer, count) in enumerate(zip(self.layers, sizes, strict=True)):
            drawn = self._drawn(i, count, most)
            places[i, : len(drawn)] = layer.start + drawn
            of[layer.start : layer.stop] = i
        sampled = torch.tensor(sizes).clamp(max=most)
        weight = torch.tensor(sizes) / sampled
        pad = torch.arange(most) >= sampled[:, None]
        spread = torch.tensor([layer.density for layer in self.layers])
        floor = PROTECTED * spread * self.entries / float((spread * torch.tensor(sizes)).sum())
        each = weight[:, None].expand_as(pad).masked_fill(pad, 0.0).flatten()
        sure = sampled // 2 if self.structure == "2:4" else sampled
        return _Tables(places, pad, each, sampled, sure, floor, of)

    def _drawn(self, i: int, count: int, most: int) -> Tensor:
        """Which of the entries of layer i thresholds are read off: the same ones for everybody, blocks whole."""
        if count <= most:
            return torch.arange(count)
        if self.structure == "2:4":
            blocks = torch.from_numpy(rng.choose(i, 0, count // 4, most // 4))
            return (4 * blocks[:, None] + torch.arange(4)).flatten()
        return torch.from_numpy(rng.choose(i, 0, count, most))

    def scores(self, u: Tensor) -> Tensor:
        """What is compared with thresholds, for each entry; see the module's text."""
        if self.structure == "weights":
            return u.abs()
        found = torch.zeros_like(u, dtype=torch.float64)
        for layer in self.layers:
            found[..., layer.start : layer.stop] = _larger_first(u[..., layer.start : layer.stop])
        return found


def _larger_first(u: Tensor) -> Tensor:
    """Numbers in the order of the entries' sizes in single precision, the larger two of each block after all others."""
    bits = u.detach().abs().float().contiguous().view(torch.int32).double().reshape(*u.shape[:-1], -1, 4)
    rank = bits.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    return (bits + _LARGER * (rank < 2)).flatten(-2)


@dataclass(frozen=True)
class SparsityTarget(Regularizer):
    """The term ``h`` and the constraint that a share of all parameters is zero: the prox keeps the largest entries.

    ``share`` counts all parameters of the model; zeros are made in weights alone, not in biases and the like. With a
    ``ramp``, a schedule of the rounds, the share grows: it is ramp(r) * share in round r. The share is met within the
    sampling of large layers, about a tenth of a point.

    ``structure`` is what becomes zero: single ``"weights"``; whole ``"filters"`` of a network, with all
    that goes with them (:func:`fedcomposite.prune` cuts them out; a problem makes the term, which needs to know the
    network); or ``"2:4"``, where at most two of every four consecutive entries of a row stay, as accelerators want it,
    in layers whose rows are a multiple of four long. A share beyond the half that the pattern makes is met by further
    single zeros.

    Not weakly convex, so rho is infinite: as with ``TopK``, methods can be run and their guarantees do not apply.
    """

    share: Share
    structure: Structure = "weights"
    h: Regularizer = field(default_factory=Zero)
    ramp: Schedule | None = None
    placed: _Layers | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ramp", read(self.ramp))
        super().__post_init__()

    # -- where and when -----------------------------------------------------------------------------------------------

    def resolve(self, layout: Layout) -> SparsityTarget:
        """The term on the parameters with two axes or more (of a linear model: on the weights)."""
        if self.structure == "filters":
            raise TypeError("a share of zeros in whole filters needs to know the network: give it to a problem")
        found = [_Layer(a, b, tuple(shape)) for _, a, b, shape in layout if len(shape) > 1]
        found = found or [_Layer(a, b, tuple(shape)) for name, a, b, shape in layout if name == "weight"]
        if self.structure == "2:4":
            found = [layer for layer in found if layer.row % 4 == 0]
        if not found:
            raise ValueError(f"a share of zeros needs {_NEEDED[self.structure]}, and this model has none")
        placed = _Layers(tuple(found), max(entry[2] for entry in layout), self.structure)
        self._check_share(placed.entries / placed.dimension)
        return replace(self, placed=placed)

    def _check_share(self, largest: float) -> None:
        """Whether the share can be had where so much of all parameters may become zero."""
        if self.share >= largest:
            raise ValueError(
                f"sparsity = {self.share:g} of all parameters, but only {largest:.1%} of them are weights, in which "
                "zeros are made; ask for less"
            )
        if self.structure == "2:4" and self.share < largest / 2 - 5e-5:
            raise ValueError(
                f"sparsity = {self.share:g}, but two zeros in every four weights make {largest / 2:.2%} of all "
                f"parameters zero; ask for {math.ceil(largest / 2 * 1e4) / 1e4:g} or more"
            )

    def growing(self, rounds: int) -> SparsityTarget:
        """The share grows over the middle of so many rounds, fast at first, unless a ramp was given."""
        if self.ramp is not None:
            return self
        delay = int(START * rounds)
        return replace(self, ramp=Ramp(1e-3, 1.0, rounds=max(1, int(END * rounds) - delay), delay=delay))

    def during(self, round: int) -> Regularizer:
        """The term of a round, counted from 0."""
        if self.ramp is None:
            return self
        share = self.share * self.ramp(round)
        if share not in self._kept:
            if len(self._kept) > 4:
                self._kept.clear()
            self._kept[share] = replace(self, share=share, ramp=None)
        return self._kept[share]

    @cached_property
    def _kept(self) -> dict[float, Regularizer]:
        return {}

    def recorded(self, round: int) -> Regularizer:
        """One term for all rounds, whose share is a tensor that :meth:`turn` fills."""
        return self._recorded

    @cached_property
    def _recorded(self) -> SparsityTarget:
        return replace(self, ramp=None)

    def turn(self, round: int) -> None:
        now = self.during(round)
        assert isinstance(now, SparsityTarget)
        for number in self._recorded._numbers.values():
            number.fill_(now._kept_share)

    # -- the prox -----------------------------------------------------------------------------------------------------

    @property
    def rho(self) -> float:
        """Infinite."""
        return math.inf

    def check_step(self, step: Step) -> None:
        self.h.check_step(step)

    def formula(self, v: Tensor, step: Step) -> Tensor:
        """The prox of h, and zeros for the entries below their layer's threshold; what is not a number stays."""
        u = self.h.formula(v, step)
        return self._cut(u, u)

    def _cut(self, u: Tensor, entries: Tensor) -> Tensor:
        """The entries, but zero where those of u are below their layer's threshold."""
        tables, scores = self._tables(u), self._layers.scores(u)
        bound = self._thresholds(scores).index_select(-1, tables.layer)
        return torch.where(scores < bound, 0.0, entries)

    def descent(self, x: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
        """Steps of the weights that are not zero at x, or zero though nothing asked for it: a start may have zeros."""
        free = (x != 0) | (self._cut(x, torch.ones_like(x)) != 0)
        return lambda y, g: torch.where(free, g + self.h.subgradient(y), 0.0)

    def nearest(self, x: Tensor) -> Tensor:
        """The largest entries stay."""
        return self._cut(x, x)

    def _thresholds(self, scores: Tensor) -> Tensor:
        """The score below which entries become zero, for every layer and once more, zero, for the rest."""
        tables, keep = self._tables(scores), self._number(scores.device)
        q = scores[..., tables.places].masked_fill(tables.pad, -1.0).sort(dim=-1, descending=True).values
        least = (keep * tables.floor * tables.sampled).ceil().minimum(tables.most).long().clamp(min=1)
        sure = torch.arange(q.shape[-1], device=q.device) < least[:, None]
        ordered = q.masked_fill(sure, torch.inf).flatten(-2).sort(dim=-1, descending=True)
        covered = tables.weight[ordered.indices].cumsum(-1)
        last = (covered <= keep * self._layers.entries).sum(-1, keepdim=True).clamp(min=1) - 1
        shared = ordered.values.gather(-1, last)
        own = q.gather(-1, (least[:, None] - 1).expand(*q.shape[:-1], 1)).squeeze(-1)
        bounds = torch.minimum(own, shared)
        if self.structure == "2:4":  # with half of the entries kept, the smaller two of each block are all gone
            bounds = torch.where(keep <= 0.5001, bounds.clamp(min=_LARGER), bounds)
        return torch.cat([bounds, torch.zeros_like(shared)], dim=-1)

    @property
    def _kept_share(self) -> float:
        """The share of the weights that is kept."""
        return 1 - self.share * self._layers.dimension / self._layers.entries

    @cached_property
    def _numbers(self) -> dict[torch.device, Tensor]:
        return {}

    def _number(self, device: torch.device) -> Tensor:
        if device not in self._numbers:
            self._numbers[device] = torch.full((), self._kept_share, dtype=torch.float32, device=device)
        return self._numbers[device]

    @property
    def _layers(self) -> _Layers:
        if self.placed is None:
            raise TypeError("a share of zeros needs to know a model's layers: give it to a problem, or call .resolve()")
        return self.placed

    def _tables(self, like: Tensor) -> _Tables:
        if like.shape[-1] != self._layers.dimension:
            raise ValueError(f"{self} was set on vectors of length {self._layers.dimension}, got {like.shape[-1]}")
        return self._layers.tables(like.device)

    # -- judging a model ----------------------------------------------------------------------------------------------

    def value(self, x: Tensor) -> Tensor:
        """The value of h: models before the share is reached are judged, too."""
        return self.h.value(x)

    def subgradient(self, x: Tensor) -> NoReturn:
        """Refused: a method without a prox makes no zeros."""
        raise TypeError(
            "a share of zeros is reached by a prox, and this method takes subgradients; use FedAvg, or a method with a "
            "prox, for example FedNMap, FedMid, Zhang, FedCanon or ProximalGradient"
        )

    def optimality(self, x: Tensor, gradient: Tensor) -> Tensor:
        """The distance for h on the entries that are not zero, or are not to be."""
        inside = self._tables(x).layer < len(self._layers.layers)
        return self.h.optimality(x, gradient.masked_fill(inside & (x == 0), 0.0))

    def scaled(self, kappa: float) -> SparsityTarget:
        """The same with kappa * h for h."""
        return replace(self, h=self.h.scaled(kappa))

    def acts_on(self, dimension: int) -> Tensor:
        """The weights in which zeros are made, and what h acts on."""
        made = self._layers.tables(torch.device("cpu")).layer < len(self._layers.layers)
        return made | self.h.acts_on(dimension)
