"""Gradients of many clients at their own parameters: in one vectorised pass, or in one pass per client.

On a GPU the passes of different clients go to streams of their own, which overlap once a round is recorded.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.func import grad, vmap

from fedcomposite import rng
from fedcomposite.data.augmentation import Augmentation
from fedcomposite.problems.base import RoundInputs
from fedcomposite.problems.network.flat import COMPILED_LAYERS, LARGE, FlatModule
from fedcomposite.problems.network.options import ModelLoss, NetworkOptions
from fedcomposite.problems.network.samples import Held, Window
from fedcomposite.problems.network.streams import SideBySide
from fedcomposite.problems.traced import listed

Way = Literal["vmap", "loop", "streams"]

Pass = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""From parameters, buffers, rows and weights of the samples to gradients and buffers."""

_GROUPED = 12  # largest batch at which torch's own vectorised convolutions are faster than one pass per client
_REPEATS = 16  # passes over the same shapes after which their operations are listed once, which takes a second
_PIECE = 256  # samples of a client that one pass of a full gradient takes
_ACTIVATIONS = 32  # rough ratio of a network's activations to its inputs


class LoopWarning(UserWarning):
    """A module cannot be vectorised over clients; its gradients are computed one client at a time."""


class Gradients:
    """Gradients of a module's loss on rows of the samples.

    A network and its views share the object: what it finds out about the module, and the lists of operations that it
    makes, are there for all of them.
    """

    def __init__(
        self,
        flat: FlatModule,
        loss: ModelLoss,
        options: NetworkOptions,
        samples: Held | Window,
        *,
        compile: bool = False,
        vectorises: bool | None = None,
    ) -> None:
        self.flat, self.loss, self.options, self.samples, self.compile = flat, loss, options, samples, compile
        self.vectorises = vectorises
        """Whether vmap takes the module; None as long as it has not been tried."""
        self.listed: dict[Any, Pass] = {}
        """Passes as lists of operations, by their names and shapes."""
        self._asked: dict[Any, int] = {}
        self._constants = options.constants(flat.dtype, flat.device)
        self._side_by_side = SideBySide(flat, self._loss)
        self._counts = torch.zeros_like(flat.buffers())
        self._draws: bool | None = None

    def for_recording(self, compile: bool) -> Gradients:
        """The same for the recorded rounds of one run, with compiled passes if asked."""
        flat, samples = self.flat.for_compilation() if compile else self.flat, self.samples.for_recording()
        return Gradients(flat, self.loss, self.options, samples, compile=compile, vectorises=self.vectorises)

    # -- how ----------------------------------------------------------------------------------------------------------

    def mode(self, clients: int, batch: int) -> Way:
        """The way gradients of so many clients on batches of this size are computed."""
        way = self.options.gradients
        if way != "auto" and (way != "vmap" or self.check_vectorises()):
            return way
        flat = self.flat
        if flat.device.type == "cuda":
            alone = clients == 1 or flat.random
            deep = flat.sequential or flat.layers > COMPILED_LAYERS
            return "loop" if alone else "streams" if deep or not self.check_vectorises() else "vmap"
        if clients == 1 or flat.random or (flat.convolves and flat.dimension >= LARGE) or not self.check_vectorises():
            return "loop"
        return "loop" if flat.convolves and not flat.channels_last and batch > _GROUPED else "vmap"

    def check_vectorises(self) -> bool:
        """Whether vmap takes the module: tried once, on two clients with two samples each."""
        if self.vectorises is None:
            reason = self._reason_against_vmap()
            if reason is not None and self.flat.restore_layout():
                reason = self._reason_against_vmap()
            why = f"{type(self.flat.module).__name__} cannot be vectorised over clients ({reason})"
            if reason is not None and self.options.gradients == "vmap":
                raise ValueError(f"{why}; take gradients='auto' or 'loop'")
            self.vectorises = reason is None
            if reason is not None and self.flat.device.type == "cpu":
                what = "are computed one client at a time, which gradients='loop' asks for without this warning"
                warnings.warn(f"{why}; its gradients {what}", LoopWarning, stacklevel=2)
        return self.vectorises

    def check_draws(self) -> bool:
        """Whether a pass in training mode draws random numbers: tried once, on one client with two samples.

        What the pass adds to the counters among the buffers is kept.
        """
        if self._draws is None:
            rows = torch.zeros(2, dtype=torch.long, device=self.flat.device)
            x, weight = self.flat.start(), torch.ones(2, dtype=self.flat.dtype, device=self.flat.device)
            cuda = self.flat.device.type == "cuda"
            with torch.random.fork_rng(devices=[self.flat.device] if cuda else []):
                torch.manual_seed(0)
                before, buffers = self._generators(), self.flat.buffers()
                after = self._pass(x, buffers, rows, weight, self._prepared(rows), torch.empty_like(x))
                for slot in self.flat.buffer_layout:
                    if slot.name in self.flat.counters:
                        at = slice(slot.start, slot.stop)
                        self._counts[at] = after[at] - buffers[at]
                self._draws = any(not torch.equal(a, b) for a, b in zip(before, self._generators(), strict=True))
        return self._draws

    def _generators(self) -> list[Tensor]:
        """The states of torch's generators that a pass may draw from."""
        host = [torch.get_rng_state()]
        return [*host, torch.cuda.get_rng_state(self.flat.device)] if self.flat.device.type == "cuda" else host

    def _reason_against_vmap(self) -> str | None:
        """Why vmap does not take the module, if it does not."""
        rows = torch.zeros(2, 2, dtype=torch.long, device=self.flat.device)
        x, buffers = (v.repeat(2, 1) for v in (self.flat.start(), self.flat.buffers()))
        try:
            with self.flat.listening():
                self._vectorised(x, buffers, rows, torch.ones_like(x[:, :2]))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            return str(error).strip().split("\n")[0]
        return None

    def try_one_client(self) -> None:
        """Try a gradient of one client, since a module may do in training what channels last do not allow."""
        rows = torch.zeros(2, dtype=torch.long, device=self.flat.device)
        x, weight = self.flat.start(), torch.ones(2, dtype=self.flat.dtype, device=self.flat.device)
        try:
            with torch.random.fork_rng(devices=[]):
                self._pass(x, self.flat.buffers(), rows, weight, self._seeded(rows, 0), torch.empty_like(x))
        except Exception:  # if it is not the layout, the first gradient will say so
            self.flat.restore_layout()

    @property
    def draws_nothing(self) -> bool:
        """Whether the module is known to draw no random numbers: vmap, which would refuse that, has taken it."""
        return self.vectorises is True and not self.flat.random and self.options.augment is None

    @property
    def counted(self) -> bool:
        """Whether samples are augmented from the counters' words, not from torch's generator."""
        return isinstance(self.options.augment, Augmentation)

    @property
    def determined(self) -> bool:
        """Whether a pass never asks torch's generator for anything."""
        foreign = self.options.augment is not None and not self.counted
        return not (foreign or self.flat.random or self.check_draws())

    # -- for a cohort -------------------------------------------------------------------------------------------------

    def minibatch(self, x: Tensor, rows: Tensor, local: RoundInputs) -> Tensor:
        """Gradients of a cohort on the given rows, in training mode; updates the buffers of ``local``.

        A batch is passed in pieces of ``microbatch`` samples, whose gradients add up.
        """
        rows = self.samples.batch(rows)
        weight = torch.full(rows.shape, 1 / rows.shape[1], dtype=self.flat.dtype, device=self.flat.device)
        most = self.options.microbatch or rows.shape[1]
        if most >= rows.shape[1]:
            return self._on_piece(x, rows, weight, local)
        total = torch.zeros_like(x)
        for piece, first in enumerate(range(0, rows.shape[1], most)):
            some, share = (v[:, first : first + most].contiguous() for v in (rows, weight))
            total += self._on_piece(x, some, share, local, piece, first)
        return total

    def _on_piece(
        self, x: Tensor, rows: Tensor, weight: Tensor, local: RoundInputs, piece: int = 0, before: int = 0
    ) -> Tensor:
        """Gradients of a cohort on some samples of each, before which the batch has others."""
        way = self.mode(*rows.shape)
        if way == "vmap" and (self.options.augment is None or self.counted):  # without the host: it can be recorded
            each = [(x[c], local.buffers[c], rows[c], weight[c]) for c in self._chunks(*rows.shape)]
            if self.counted:
                inputs = self._inputs_of(rows, local, np.arange(len(rows)), piece, before)
                cut = inputs.split_with_sizes([len(given[0]) for given in each])
                parts = [self._stacked(*g[:2], i, *g[2:]) for g, i in zip(each, cut, strict=True)]
            else:
                parts = [self._listed_if_repeated(self._vectorised, *given) for given in each]
            gradient, local.buffers = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
            return gradient
        if way == "streams" and self.determined:
            inputs = self._inputs_of(rows, local, np.arange(len(rows)), piece, before)
            gradient, local.buffers = self._on_streams(x, local.buffers, inputs, rows, weight)
            return gradient
        if self.draws_nothing:
            clients = zip(x, local.buffers, rows, weight, strict=True)
            alone = [self._listed_if_repeated(self._single, *given) for given in clients]
            gradient, local.buffers = map(torch.stack, zip(*alone, strict=True))
            return gradient
        return self.of_members(x, np.arange(len(rows)), rows, weight, local, piece, before)

    def full(self, x: Tensor, sizes: npt.NDArray[np.int64], first: npt.NDArray[np.int64], local: RoundInputs) -> Tensor:
        """Gradients of a cohort on all samples: in pieces, and whole silos where there is batch norm."""
        total = torch.zeros_like(x)
        length = int(sizes.max()) if self.flat.batch_norm else _PIECE  # batch statistics: a silo is one batch
        for piece, members, rows, weight in self._pieces(sizes, first, length):
            at = torch.from_numpy(members).to(self.flat.device)
            rows = self.samples.at(rows)
            total[at] += self.of_members(x[at], members, rows, weight, local, piece, piece * length)
        return total

    def _pieces(
        self, sizes: npt.NDArray[np.int64], first: npt.NDArray[np.int64], length: int
    ) -> Iterator[tuple[int, npt.NDArray[np.int64], Tensor, Tensor]]:
        """Number of the piece, members of the cohort, their rows and the samples' weights.

        A piece holds as many samples of each member, up to padding (weight zero) by a factor of sqrt(2) where
        neither batch statistics nor random layers nor a loss without per-sample values could notice it.
        """
        padded = self.loss.per_sample and not self.flat.batch_norm and self.mode(len(sizes), length) == "vmap"
        for a in range(0, int(sizes.max()), length):
            left = np.minimum(sizes - a, length)
            level = np.ceil(2 * np.log2(np.maximum(left, 1))) if padded else left
            for value in np.unique(level[left > 0]):
                members = np.flatnonzero((level == value) & (left > 0))
                column = np.arange(left[members].max())[None, :]
                inside = column < left[members, None]
                rows = torch.from_numpy(first[members, None] + a + np.where(inside, column, 0)).to(self.flat.device)
                weight = torch.from_numpy(inside / sizes[members, None]).to(self.flat.device, self.flat.dtype)
                yield a // length, members, rows, weight

    def of_members(
        self,
        x: Tensor,
        members: npt.NDArray[np.int64],
        rows: Tensor,
        weight: Tensor,
        local: RoundInputs,
        piece: int = 0,
        before: int = 0,
    ) -> Tensor:
        """Gradients of some members of the cohort on a piece of their samples, before which there are others."""
        at = torch.from_numpy(members).to(self.flat.device)
        out, held = torch.empty_like(x), local.buffers[at]
        after = torch.empty_like(held)
        way = self.mode(len(local.clients), rows.shape[1])
        with self._generator_kept():
            if way == "vmap":
                for c in self._chunks(*rows.shape):
                    inputs = self._inputs_of(rows[c], local, members[c], piece, before)
                    out[c], after[c] = self._stacked(x[c], held[c], inputs, rows[c], weight[c])
            elif way == "streams" and self.determined:
                inputs = self._inputs_of(rows, local, members, piece, before)
                out, after = self._on_streams(x, held, inputs, rows, weight)
            else:
                seeds = [0] * len(x) if self.draws_nothing else self._seeds(local, members, piece)
                ready = self._inputs_of(rows, local, members, piece, before) if self.counted else None
                for i, seed in enumerate(seeds):
                    inputs = self._seeded(rows[i], seed, None if ready is None else ready[i])
                    after[i] = self._pass(x[i], held[i], rows[i], weight[i], inputs, out[i])
        local.buffers = local.buffers.index_copy(0, at, after)
        return out

    def _generator_kept(self) -> AbstractContextManager[Any]:
        """Give torch's generator back as it was."""
        if self.draws_nothing:
            return nullcontext()
        return torch.random.fork_rng(devices=[self.flat.device] if self.flat.device.type == "cuda" else [])

    @staticmethod
    def _seeds(local: RoundInputs, members: npt.NDArray[np.int64], piece: int) -> list[int]:
        """A 64-bit seed per client, from the counters of the round, the step and the piece."""
        words = rng.words(local.seed, rng.Use.MODEL, local.clients[members], local.round, local.step, 2 * piece + 2)
        return [int(high) << 32 | int(low) for high, low in words[:, -2:]]

    def _chunks(self, clients: int, batch: int) -> list[slice]:
        """Clients that are worked on together: as many as asked for, or as a temporary's size allows."""
        each = self.flat.dimension + _ACTIVATIONS * batch * self.samples.X[0].numel()
        room = 1 << (25 if self.flat.device.type == "cpu" else 30)
        per = self.options.chunk or max(1, room // each)
        return [slice(a, a + per) for a in range(0, clients, per)]

    def clipped(self, x: Tensor, rows: Tensor, mask: Tensor, clip: float) -> Tensor:
        """Sums of the samples' gradients, each with norm at most ``clip``; as many samples at once as memory allows."""
        out, empty, rows = torch.zeros_like(x), self.flat.buffers(), self.samples.at(rows)

        def one(x: Tensor, inputs: Tensor, b: Tensor) -> Tensor:
            return self._objective(x, empty, inputs[None], b[None], inputs.new_ones(1))[0]

        each = vmap(grad(one), in_dims=(None, 0, 0))
        per = max(1, (1 << 25) // (self.flat.dimension + _ACTIVATIONS * self.samples.X[0].numel()))
        for i, client in enumerate(x):
            real = rows[i][mask[i] > 0]
            for part in real.split_with_sizes(_sizes(len(real), per)):
                inputs = self.options.inputs(self.samples.X[part], self.flat.dtype, self._constants)
                found = torch.nan_to_num(each(client, inputs, self.samples.b[part]), 0.0, 0.0, 0.0)
                norms = torch.linalg.vector_norm(found, dim=1)
                out[i] += torch.nan_to_num(clip / norms.clamp(min=clip), 0.0) @ found
        return out

    # -- passes -------------------------------------------------------------------------------------------------------

    def _listed_if_repeated(self, function: Pass, *given: Tensor) -> tuple[Tensor, Tensor]:
        """The function's result; where it is asked for the same shapes again and again, from its list of operations."""
        key = function.__name__, self.samples.X.data_ptr(), *(t.shape for t in given)
        self._asked[key] = asked = self._asked.get(key, 0) + 1
        if self.compile:
            if asked == 1:
                self.listed[key] = torch.compile(listed(function, *given), dynamic=False)
        elif asked == _REPEATS and self.flat.lists:
            self.listed[key] = self._faithful(listed(function, *given), function, *given)
        with torch.no_grad():
            return self.listed.get(key, function)(*given)

    def _faithful(self, made: Pass, function: Pass, x: Tensor, buffers: Tensor, rows: Tensor, weight: Tensor) -> Pass:
        """The list of operations, if it gives the same bits here and at another point; otherwise the function."""
        other = 0.9 * x, buffers, (rows + 1) % len(self.samples.X), weight  # what was taken for a constant shows
        try:
            with torch.no_grad():  # as it will be called: some kernels leave out what only a gradient would need
                both = (x, buffers, rows, weight), other
                pairs = [pair for g in both for pair in zip(made(*g), function(*g), strict=True)]
        except RuntimeError:
            return function
        return made if all(torch.equal(a, b) for a, b in pairs) else function

    def _vectorised(self, x: Tensor, buffers: Tensor, rows: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Gather, convert and differentiate, all on the device."""
        return self._stacked(x, buffers, self._prepared(rows), rows, weight)

    def _stacked(
        self, x: Tensor, buffers: Tensor, inputs: Tensor, rows: Tensor, weight: Tensor
    ) -> tuple[Tensor, Tensor]:
        differentiate = vmap(grad(self._objective, has_aux=True))
        with self.flat.quiet():
            gradient: tuple[Tensor, Tensor] = differentiate(x, buffers, inputs, self.samples.b[rows], weight)
        return gradient

    def _single(self, x: Tensor, buffers: Tensor, rows: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The same for one client: gradient ``(d,)`` and buffers."""
        given = x, buffers, self._prepared(rows), self.samples.b[rows], weight
        gradient: tuple[Tensor, Tensor] = grad(self._objective, has_aux=True)(*given)
        return gradient

    def _on_streams(
        self, x: Tensor, buffers: Tensor, inputs: Tensor, rows: Tensor, weight: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Gradients ``(m, d)`` and buffers, each client's pass on the next of some streams."""
        return self._side_by_side(x, buffers, inputs, self.samples.b[rows], weight, self._counts)

    def _pass(self, x: Tensor, buffers: Tensor, rows: Tensor, weight: Tensor, inputs: Tensor, out: Tensor) -> Tensor:
        """The gradient of one client by autograd, into ``out``, and its buffers."""
        leaves = self.flat.leaves(x.detach())
        state = leaves | self.flat.unpack(buffers)
        with torch.enable_grad(), self.flat.holding(state, train=True) as module:
            value = self._loss(module, self.flat.placed(inputs), self.samples.b[rows], weight)
            gradients = torch.autograd.grad(value, list(leaves.values()), materialize_grads=True)
        torch.cat([g.reshape(-1) for g in gradients], out=out)
        return self.flat.pack(state).detach()

    def _prepared(self, rows: Tensor) -> Tensor:
        """Inputs as they are stored, converted, ``(*rows.shape, ...)``."""
        flat = self.options.inputs(self.samples.X[rows.flatten()], self.flat.dtype, self._constants)
        return flat.reshape(*rows.shape, *flat.shape[1:])

    def _inputs_of(
        self, rows: Tensor, local: RoundInputs, members: npt.NDArray[np.int64], piece: int, before: int
    ) -> Tensor:
        """Inputs of some members of the cohort, augmented."""
        augment, inputs = self.options.augment, self._prepared(rows)
        if augment is None:
            return inputs
        if isinstance(augment, Augmentation):
            words = local.words((before + rows.shape[1]) * augment.draws, self.flat.device)
            drawn = words[:, before * augment.draws :]
            if len(members) < len(drawn):
                drawn = drawn[torch.from_numpy(members).to(self.flat.device)]
            changed = augment(inputs.flatten(0, 1), drawn.reshape(-1, augment.draws))
            return changed.reshape(*rows.shape, *changed.shape[1:])
        seeds = self._seeds(local, members, piece)
        return torch.stack([self._seeded(r, s) for r, s in zip(rows, seeds, strict=True)])

    def _seeded(self, rows: Tensor, seed: int, ready: Tensor | None = None) -> Tensor:
        """One client's inputs; torch's generator is left where the module's random layers take it up."""
        if not self.draws_nothing:
            torch.manual_seed(seed)
        if ready is not None:
            return ready
        inputs, augment = self._prepared(rows), self.options.augment
        return inputs if augment is None or isinstance(augment, Augmentation) else augment(inputs)

    def _objective(
        self, x: Tensor, buffers: Tensor, inputs: Tensor, b: Tensor, weight: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The loss of one client, and its buffers afterwards."""
        state = self.flat.state(x, buffers)
        with self.flat.holding(state, train=True) as module:
            return self._loss(module, inputs, b, weight), self.flat.pack(state)

    def _loss(self, module: Callable[[Tensor], Tensor], inputs: Tensor, b: Tensor, weight: Tensor) -> Tensor:
        values = self.loss.function(module(inputs), b)
        return (values * weight).sum() if self.loss.per_sample else values * weight.sum()


def _sizes(count: int, most: int) -> list[int]:
    return [min(most, count - a) for a in range(0, count, most)]
