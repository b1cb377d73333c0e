"""The gradients of a site, as a method may have them: counted, paid for in the ledger, and at bounded margins only."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

from fedcomposite.algorithms.base import Gradient
from fedcomposite.federation.site.ledger import Ledger
from fedcomposite.federation.site.minimum_counts import counted_margins
from fedcomposite.federation.site.policy import DataRefusalError, Limits, RefusalError, affine
from fedcomposite.problems import Smooth
from fedcomposite.problems.linear import Linear


def margins_within(smooth: Smooth, limits: Limits, most: Callable[[Tensor], float], x: Tensor) -> None:
    """Refuse a model at which samples have such large margins that a gradient tells single ones apart.

    Only a quadratic loss has none of it: its gradients are linear in x. ``most(x)`` is a bit more than ``max_margin``.
    """
    if not isinstance(smooth, Linear) or affine(smooth.loss) or math.isinf(limits.max_margin):
        return
    if not float(counted_margins(smooth.loss, smooth.pooled_margins(x)).abs().max()) <= most(x):
        raise DataRefusalError(
            f"samples have margins beyond this site's max_margin = {limits.max_margin:g}: "
            "the steps are probably too large"
        )


class Guard:
    """A gradient oracle that stops at ``most`` calls.

    ``paid`` of them were counted before; ``pay(count)`` counts more, before they are computed. ``look(x)`` may refuse.
    """

    def __init__(
        self, grad: Gradient, most: int, paid: int, pay: Callable[[int], None], look: Callable[[Tensor], None]
    ) -> None:
        self._grad, self._most, self._pay, self._look = grad, most, pay, look
        self.used, self.paid = 0, paid

    def _spend(self, x: Tensor, count: int = 1) -> None:
        if self.used + count > self._most:
            raise RefusalError(f"a round needs more gradients than this site's max_local_steps = {self._most}")
        if self.used + count > self.paid:
            more = min(max(count, self.paid), self._most - self.paid)
            self._pay(more)
            self.paid += more
        self.used += count
        self._look(x)

    def __call__(self, x: Tensor, k: int) -> Tensor:
        """The gradient on the minibatch of step k."""
        self._spend(x)
        return self._grad(x, k)

    def full(self, x: Tensor) -> Tensor:
        """The gradient on all samples."""
        self._spend(x)
        return self._grad.full(x)

    def loss(self, x: Tensor) -> Tensor:
        """The loss on all samples: one more number of what an evaluation tells."""
        self._spend(x)
        return self._grad.loss(x)

    def hessian(self, x: Tensor, where: Tensor) -> Tensor:
        """The Hessian on some coordinates: it tells as much as a gradient for each of them."""
        self._spend(x, max(1, int(where.sum())))
        return self._grad.hessian(x, where)

    def uniform(self, k: int, count: int = 1) -> Tensor:
        """The method's own coins."""
        return self._grad.uniform(k, count)

    @property
    def position(self) -> Tensor:
        """Place among the participants."""
        return self._grad.position

    @property
    def cohort(self) -> int:
        """Number of participants."""
        return self._grad.cohort


class BudgetedGradients:
    """The gradients of a job's rounds: each round is paid for as the one before it came to."""

    def __init__(self, ledger: Ledger, job: str, most: int, look: Callable[[Tensor], None]) -> None:
        self._ledger, self._job, self._most, self._look = ledger, job, most, look
        self.expected = 1
        """Gradients that the next order pays for."""
        self._guard: Guard | None = None

    def guard(self, grad: Gradient) -> Guard:
        """The oracle of a round whose order is in the ledger."""
        self._guard = Guard(grad, self._most, self.expected, self._pay, self._look)
        return self._guard

    def _pay(self, count: int) -> None:
        self._ledger.spend(self._job, gradients=count)

    def settle(self) -> None:
        """Give back what the round did not use."""
        used, paid = (0, self.expected) if self._guard is None else (self._guard.used, self._guard.paid)
        if paid > used:
            self._ledger.refund(self._job, paid - used)
        self.expected, self._guard = max(1, used), None
