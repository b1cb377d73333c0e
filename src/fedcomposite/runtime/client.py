"""One client's side of a round: what a real site does, and what the loop does for one client after another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from fedcomposite.algorithms.base import AnyAlgorithm, Gradient
from fedcomposite.privacy import Privacy, Source
from fedcomposite.problems import Batches, Counter, Evaluation, Smooth
from fedcomposite.problems.base import RoundInputs
from fedcomposite.problems.private import gradients
from fedcomposite.regularizers import Regularizer
from fedcomposite.runtime.counted import Counted


class Outcome(NamedTuple):
    """What a client's round leaves."""

    reply: NamedTuple
    state: Any
    buffers: Tensor
    queries: int = 0


class Client:
    """A client of a method: its functions (row ``number`` of ``smooth``), its minibatches, and a count of its work.

    ``guard`` wraps the gradient oracle of every round, for parties that limit what is asked of them; ``privacy`` noises
    its answers with numbers from ``source``.
    """

    def __init__(
        self,
        algorithm: AnyAlgorithm,
        smooth: Smooth,
        h: Regularizer,
        batches: Batches,
        counter: Counter,
        *,
        number: int = 0,
        guard: Callable[[Gradient], Gradient] = lambda grad: grad,
        privacy: Privacy | None = None,
        source: Source | None = None,
    ) -> None:
        self.algorithm, self.smooth, self.batches, self.counter = algorithm, smooth, batches, counter
        self.privacy, self.source = privacy, source
        self._h, self._number, self._guard, self._expect = Counted(h, counter), number, guard, 1

    def train(self, message: Any, state: Any, round: int, place: tuple[int, int], buffers: Tensor) -> Outcome:
        """Carry out a round; ``place`` is the position among the participants and their number."""
        grad = gradients(
            self.smooth, np.asarray([self._number], np.uint64), round, self.batches, self.counter,
            self.privacy, self.source, stacked=False, expect=self._expect, place=place, buffers=buffers,
        )  # fmt: skip
        reply, after = self.algorithm.at(round).local_round(message, state, self._guard(grad), self._h.during(round))
        self._expect = grad.steps_used
        return Outcome(reply, after, grad.buffers, grad.queries)

    def evaluate(self, model: Tensor, buffers: Tensor) -> Evaluation:
        """Loss, gradient and counts at a model, on this client's data."""
        return self.smooth.during(RoundInputs(buffers[None])).evaluate(model)
