"""The oracle of a client that protects its samples: every answer is a sum of clipped parts with noise.

A method sees gradients, losses and Hessians through it alone, so whatever it computes, sends and remembers (control
variates, models, messages) is made of noised answers and costs nothing more.

Each call is a query of its own, with its own samples and its own noise, also at the same k. The divisor is the expected
number of samples, rate * m: the number m of a client's samples is taken as known, or was told with noise of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedcomposite import rng
from fedcomposite.data.sparse import Features
from fedcomposite.privacy import Privacy, SampleLevel, Source
from fedcomposite.problems.base import Batches, ClientGradients, Counter, Evaluation, Smooth
from fedcomposite.problems.measures import Counts, Measures
from fedcomposite.problems.metrics import Accuracy


class Mechanism:
    """Noised sums over the samples of some clients in one round, and how many there were."""

    def __init__(self, smooth: Smooth, clients: rng.Ints, round: int, privacy: SampleLevel, source: Source) -> None:
        self.smooth, self.privacy = smooth, privacy
        self._clients, self._round, self._source = clients, round, source
        self.queries = 0

    def ask(self, total: Callable[[Tensor, Tensor], Tensor], norm: float) -> Tensor:
        """Answer a query: ``total`` of (rows, mask) adds up what each sample has, at most ``norm`` in size."""
        summed = total(*self._sample())
        noise = self._normal(summed[0].numel()).view(summed.shape).to(summed)
        return self._divided(summed + self._deviation(norm) * noise)

    def ask_symmetric(self, total: Callable[[Tensor, Tensor], Tensor], norm: float) -> Tensor:
        """The same for symmetric matrices of Frobenius norm at most ``norm``; so is the noise.

        A matrix lies in the space of its diagonal and sqrt(2) times its upper triangle, with the same norm: noise of
        deviation s there is s on the diagonal and s / sqrt(2) off it.
        """
        summed = total(*self._sample())
        k = summed.shape[-1]
        i, j = torch.triu_indices(k, k, device=summed.device)
        drawn = self._normal(len(i)).to(summed) / torch.where(i == j, 1.0, math.sqrt(2.0)).to(summed)
        noise = torch.zeros_like(summed)
        noise[:, i, j] = noise[:, j, i] = drawn
        return self._divided(summed + self._deviation(norm) * noise)

    def ask_jointly(self, parts: Sequence[tuple[Callable[[Tensor, Tensor], Tensor], float]]) -> list[Tensor]:
        """Several sums of the same samples in one query: p of them need noise sqrt(p) times as large."""
        sample = self._sample()
        sums = [total(*sample) for total, _ in parts]
        noise = self._normal(sum(s[0].numel() for s in sums)).split_with_sizes([s[0].numel() for s in sums], dim=1)
        scales = [math.sqrt(len(parts)) * self._deviation(norm) for _, norm in parts]
        noised = [s + scale * one.view(s.shape).to(s) for s, scale, one in zip(sums, scales, noise, strict=True)]
        return [self._divided(s) for s in noised]

    def _sample(self) -> tuple[Tensor, Tensor]:
        """Rows and mask ``(m, b)`` of the samples that take part in this query."""
        s, who = self.smooth, self._clients
        self.queries += 1
        chosen = self._source.chosen(s.ids[who], s.sizes[who], self._round, self.queries, self.privacy.rate)
        longest = max(1, *(len(c) for c in chosen))
        rows, mask = np.zeros((len(who), longest), np.int64), np.zeros((len(who), longest))
        for i, (one, first) in enumerate(zip(chosen, s.offsets[who], strict=True)):
            rows[i] = int(first)
            rows[i, : len(one)] += one.astype(np.int64)
            mask[i, : len(one)] = 1
        return torch.from_numpy(rows).to(s.device), torch.from_numpy(mask).to(s.device, s.dtype)

    def _normal(self, count: int) -> Tensor:
        return torch.from_numpy(self._source.normal(self.smooth.ids[self._clients], self._round, self.queries, count))

    def _deviation(self, norm: float) -> float:
        return norm * self.privacy.noise * math.sqrt(self.privacy.share)

    def _divided(self, summed: Tensor) -> Tensor:
        expected = torch.from_numpy(self.privacy.rate * self.smooth.divisors[self._clients]).to(summed)
        return summed / expected.view(-1, *(1,) * (summed.ndim - 1))


class PrivateGradients(ClientGradients):
    """The oracle ``grad(x, k)`` of some clients in one round, with noised answers; k makes no difference."""

    def __init__(self, smooth: Smooth, clients: rng.Ints, round: int, *given: Any, privacy: SampleLevel, source: Source,
                 **named: Any) -> None:  # fmt: skip
        super().__init__(smooth, clients, round, *given, **named)
        self._mechanism = Mechanism(smooth, clients, round, privacy, source)
        self._privacy = privacy

    @property
    def queries(self) -> int:
        """How many answers each of the clients has given."""
        return self._mechanism.queries

    def __call__(self, x: Tensor, k: int) -> Tensor:
        return self.full(x)

    def full(self, x: Tensor) -> Tensor:
        """A noised gradient: the same query, since all samples at once would cost more."""
        clip = self._privacy.clip
        return self._asked(lambda u: self._mechanism.ask(lambda r, w: self._smooth.clipped(u, r, w, clip), clip), x)

    def loss(self, x: Tensor) -> Tensor:
        clip = self._privacy.loss_clip
        return self._asked(
            lambda u: self._mechanism.ask(lambda r, w: self._smooth.clipped_losses(u, r, w, clip), clip), x
        )

    def hessian(self, x: Tensor, where: Tensor) -> Tensor:
        """A noised Hessian: one query, whatever its size."""
        at = (where[0] if self._stacked else where).nonzero().squeeze(1)
        clip = self._privacy.hessian_clip or self._smooth.curvature() * self._privacy.clip**2
        if not math.isfinite(clip):
            raise ValueError("privacy: the loss has unbounded curvature; give hessian_clip")
        return self._asked(
            lambda u: self._mechanism.ask_symmetric(
                lambda r, w: self._smooth.clipped_hessians(u, r, w, at, clip), clip
            ),
            x,
        )

    def _asked(self, answer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        self._counter.gradients += len(self._clients)
        return self._shaped(answer, x)


def evaluate(
    smooth: Smooth,
    x: Tensor,
    privacy: SampleLevel,
    source: Source,
    held: Mapping[Any, tuple[Features, Tensor]],
    measures: Measures,
    least: float = -math.inf,
    said: Mapping[str, int] | None = None,
    *,
    bounded: bool = True,
) -> Evaluation:
    """Gradient, loss and accuracy of one client at a model, as one query; held-out samples are asked beside it.

    A sample is either for training or held out, so the held-out counts cost nothing more. Counts are brought back
    to what counts can be (``said`` are the samples of each part as they are told, where their numbers are a secret),
    and the loss to at least ``least``; unless ``bounded`` is false, where noise is shared: bounds are not linear, so
    shares of noise behind them would not add up to the whole.
    """
    client, scored = np.zeros(1, np.uint64), bool([m for m in measures.metrics if isinstance(m, Accuracy)])

    def hits(rows: Tensor, mask: Tensor) -> Tensor:
        return _hits(*smooth.seen(x, rows[0][mask[0] > 0])).to(smooth.dtype)

    asked: list[tuple[Callable[[Tensor, Tensor], Tensor], float]] = [
        (lambda r, w: smooth.clipped(x[None], r, w, privacy.clip), privacy.clip),
        (lambda r, w: smooth.clipped_losses(x[None], r, w, privacy.loss_clip), privacy.loss_clip),
    ]
    mechanism = Mechanism(smooth, client, 0, privacy, source)
    found = mechanism.ask_jointly([*asked, *([(hits, 1.0)] if scored else [])])
    sizes = said or {"train": int(smooth.sizes[0])} | {str(part): len(y) for part, (_, y) in held.items()}
    counts: Counts = {f"{part}/samples": torch.tensor([[m, m]], dtype=torch.float64) for part, m in sizes.items()}
    if scored:
        counts["train/accuracy"] = _counted(
            float(found[2] * smooth.divisors[0] / sizes["train"]), sizes["train"], bounded
        )
        for part, (X, y) in held.items():
            chosen = source.chosen(client, np.asarray([len(y)], np.uint64), 0, 0, privacy.rate)[0].astype(np.int64)
            right = float(_hits(*smooth.scored(x, X[chosen], y[chosen]))) if len(chosen) else 0.0
            # Not every client has such a part, so in a sum nobody can count on the others' shares.
            own = math.sqrt(privacy.share) if bounded else 1.0
            noise = privacy.noise * own * float(source.normal(client, 0, 0, 1)[0, 0])
            counts[f"{part}/accuracy"] = _counted((right + noise) / (privacy.rate * sizes[part]), sizes[part], bounded)
    loss = found[1].squeeze()
    return Evaluation(loss.clamp(min=least) if bounded else loss, found[0][0], counts, measures)


def _hits(outputs: Tensor, targets: Tensor) -> Tensor:
    """How many are right, ``(1, 1)``."""
    return Accuracy().counts(outputs, targets, torch.zeros(len(targets), dtype=torch.long, device=targets.device), 1)[
        :, :1
    ]


def _counted(share: float, of: int, bounded: bool) -> Tensor:
    """A noised share of samples as a count; if it is ``bounded``, as one that can be."""
    return torch.tensor([[(min(max(share, 0.0), 1.0) if bounded else share) * of, of]], dtype=torch.float64)


def gradients(
    smooth: Smooth,
    clients: rng.Ints,
    round: int,
    batches: Batches,
    counter: Counter,
    privacy: Privacy | None,
    source: Source | None,
    **named: Any,
) -> ClientGradients:
    """The oracle of some clients in one round: as it is, or with noised answers where samples are protected."""
    if not isinstance(privacy, SampleLevel):
        return ClientGradients(smooth, clients, round, batches, counter, **named)
    assert source is not None
    return PrivateGradients(smooth, clients, round, batches, counter, privacy=privacy, source=source, **named)
