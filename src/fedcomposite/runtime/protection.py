"""What privacy and robust means ask of a run, refused before it starts; and clipped, noised means of replies."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from fedcomposite.aggregators import Aggregator
from fedcomposite.algorithms.base import AnyAlgorithm
from fedcomposite.privacy import ClientLevel, Privacy, SampleLevel, Source
from fedcomposite.problems import Batches, Counter, Smooth
from fedcomposite.runtime.cohorts import Cohorts

T = TypeVar("T", bound=NamedTuple)


def check_privacy(
    privacy: Privacy | None,
    algorithm: AnyAlgorithm,
    smooth: Smooth,
    batches: Batches,
    cohorts: Cohorts,
    weights: npt.NDArray[np.float64],
) -> None:
    """Refuse what the accountant does not know about."""
    if privacy is None:
        return
    if not isinstance(privacy, SampleLevel | ClientLevel):
        raise ValueError(
            f"privacy = {privacy!r:.80}, must be a privacy.SampleLevel or a privacy.ClientLevel; a StudyBudget is for "
            "analyses"
        )
    if cohorts.replace:
        raise ValueError("privacy: a client must not be drawn twice in a round; use replace=False")
    if isinstance(privacy, ClientLevel):
        if algorithm.feedback:
            raise ValueError("ClientLevel clips replies, which compressed ones would make up for; leave one out")
        if weights.max() > (1 + 1e-12) * weights.min() or smooth.buffers().numel():
            raise ValueError("ClientLevel: clients must weigh the same, and the model must have no running statistics")
        return
    smooth.check_private()
    if batches.clip_norm is not None:
        raise ValueError("clip_norm and privacy: each sample's gradient is clipped already; leave clip_norm out")
    if batches.size is not None:
        raise ValueError(
            f"batch_size = {batches.size} and privacy: samples are drawn one by one; leave batch_size out and set rate"
        )
    if privacy.share < 1:
        check_shares(privacy, algorithm, weights / smooth.divisors)


def check_shares(privacy: SampleLevel, algorithm: AnyAlgorithm, worths: npt.NDArray[np.float64]) -> None:
    """Refuse shares of noise that do not add up to the whole; ``worths`` are what a sample of each client counts."""
    if worths.max() > (1 + 1e-9) * worths.min():
        raise ValueError(
            f"SampleLevel: share = {privacy.share:g}, but samples of small clients count more than the others' noise "
            "hides; use weights='samples', or clients of the same size"
        )
    if not algorithm.linear_replies:
        raise ValueError(
            f"SampleLevel: share = {privacy.share:g}, but the replies of {algorithm.name} are not linear in "
            "its gradients, so shares of noise do not add up to the whole; use ProximalGradient or ChordNewton"
        )


def check_aggregator(
    aggregator: Aggregator | None, privacy: Privacy | None, algorithm: AnyAlgorithm, cohort: int, weighting: str
) -> None:
    """Refuse a robust mean where only the mean will do."""
    if aggregator is None:
        return
    if not isinstance(aggregator, Aggregator):
        raise ValueError(f"aggregator = {aggregator!r}, must be an aggregators.Aggregator, for example TrimmedMean(1)")
    shown, name = type(aggregator).__name__, algorithm.name
    aggregator.check(cohort)
    if algorithm.feedback:
        raise ValueError(f"{shown}: compressed replies add up to those of {name} in their mean alone; leave one out")
    if isinstance(privacy, ClientLevel):
        raise ValueError(f"{shown}: the noise of ClientLevel is for the mean of clipped replies; choose one of them")
    if weighting != "uniform":
        raise ValueError(f"{shown} takes all clients alike; use weights='uniform'")
    if algorithm.info.uniform_only:
        raise ValueError(f"{shown}: {name} sends masked replies, which only the mean puts together")
    if algorithm.info.lead:
        raise ValueError(f"{shown}: some rounds of {name} hold one client's reply alone, which no robust mean keeps")
    if algorithm.info.second_order and not aggregator.convex:
        raise ValueError(f"{shown} does not keep Hessians positive; with {name} use GeometricMedian")


def noised_mean(replies: T, privacy: ClientLevel, source: Source, round: int) -> T:
    """The mean of clipped replies, all tensors of a reply together, with noise; one that is not finite counts as 0."""
    flat = torch.cat([t.reshape(len(t), -1) for t in replies], dim=1)
    flat = torch.where(torch.isfinite(flat).all(1, keepdim=True), flat, 0.0)
    norms = torch.linalg.vector_norm(flat, dim=1)
    drawn = torch.from_numpy(source.normal(np.zeros(1, np.uint64), round, 0, flat.shape[1])[0]).to(flat)
    total = (privacy.clip / norms.clamp(min=privacy.clip)) @ flat + privacy.clip * privacy.noise * drawn
    parts = (total / len(flat)).split_with_sizes([t[0].numel() for t in replies])
    mean: T = type(replies)(*(p.view(t.shape[1:]).to(t.dtype) for p, t in zip(parts, replies, strict=True)))
    return mean


class Spending:
    """What the client that was asked most has spent after some rounds."""

    def __init__(
        self,
        privacy: Privacy,
        cohorts: Cohorts,
        exchanges: int,
        *,
        everybody: bool = False,
        parties: int | None = None,
    ) -> None:
        """``everybody``: whether clients are asked in rounds that they sit out as well, for evaluations.

        ``parties`` are those whose shares of noise nobody can take away; the whole cohort if left out.
        """
        self._everybody, self._parties = everybody, parties or cohorts.size
        self._privacy, self._cohorts, self._exchanges = privacy, cohorts, exchanges
        self._done, self._counts = 0, np.zeros(cohorts.clients, np.int64)

    def epsilon(self, rounds: int, counter: Counter) -> float:
        """At most what this many queries cost: those of all rounds, or the most in a round times the client's."""
        queries = counter.queries
        if not (self._everybody or self._cohorts.everyone):
            queries = min(queries, counter.most_queries * self._participations(rounds))
        return self._privacy.epsilon(queries, self._parties)

    def _participations(self, rounds: int) -> int:
        """Rounds with the client that had the most."""
        for r in range(self._done, rounds):
            self._counts[self._cohorts.draw(r // self._exchanges).astype(np.int64)] += 1
        self._done = rounds
        return int(self._counts.max())
