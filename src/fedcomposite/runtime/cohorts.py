"""Who takes part in which round."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedcomposite import rng


@dataclass(frozen=True)
class Cohorts:
    """Who takes part in which round: ``size`` of ``clients``, drawn by the counters of ``seed``."""

    clients: int
    participation: float = 1.0
    replace: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.participation <= 1:
            raise ValueError(f"participation = {self.participation}, must be in (0, 1]")

    @property
    def size(self) -> int:
        """How many take part in a round."""
        return max(1, round(self.participation * self.clients))

    @property
    def everyone(self) -> bool:
        """Whether all take part in every round."""
        return self.size == self.clients and not self.replace

    def draw(self, number: int) -> rng.Ints:
        """The participants of draw ``number``, sorted."""
        if self.everyone:
            return np.arange(self.clients, dtype=np.uint64)
        return rng.choose(self.seed, number, self.clients, self.size, self.replace).astype(np.uint64)
