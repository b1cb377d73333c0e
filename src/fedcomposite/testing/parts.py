"""The laws of losses, metrics and partitions, as checks that anyone can run on their own.

``check_loss(MyLoss(), targets)``, ``check_metric(MyMetric(), outputs, targets)`` and ``check_partition(rule, silos)``
run every law and report all that are broken; those of the package pass the same lists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedcomposite.data import Silos
from fedcomposite.problems import Loss, Problem
from fedcomposite.problems.metrics import Metric

_SCALES = 0.0, 0.3, 2.0  # of the models that a loss is tried at
_STEP = 1e-5  # of differences


def _report(what: object, laws: Sequence[tuple[str, Callable[[], None]]]) -> None:
    """Run laws by name; raise with all that are broken."""
    broken = []
    for name, law in laws:
        try:
            law()
        except Exception as error:  # what a law did not expect is a breach as well
            kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
            broken.append(f"  {name}: {kind}{' '.join(str(error).split())}")
    if broken:
        lines = "\n".join(broken)
        raise AssertionError(f"{what} breaks {len(broken)} of {len(laws)} laws:\n{lines}")


# -- losses -----------------------------------------------------------------------------------------------------------


class _LossProbe:
    """A loss in a linear problem with two sites, and models to try it at."""

    def __init__(self, loss: Loss | str, targets: Any, features: int, seed: int) -> None:
        random = np.random.default_rng(seed)
        b = np.asarray(targets)
        X = random.normal(size=(len(b), features))
        half = len(b) // 2
        self.silos = Silos.from_arrays([(X[:half], b[:half]), (X[half:], b[half:])])
        self.problem = Problem(self.silos, loss=loss)
        assert isinstance(self.problem.loss, Loss)
        self.loss: Loss = self.problem.loss.adapt(self.silos)
        d = self.problem.dimension
        self.models = [torch.from_numpy(scale * random.normal(size=d)) for scale in _SCALES]
        self.directions = [torch.from_numpy(random.normal(size=d) / d**0.5) for _ in self.models]

    def gradient_is_the_slope_of_the_value(self) -> None:
        """By central differences; where the loss has kinks its slope lies under it."""
        for x, v in zip(self.models[1:], self.directions[1:], strict=True):
            told = float(self.problem.gradient(x) @ v)
            up, down = (self.problem.objective(x + t * v) for t in (_STEP, -_STEP))
            if not self.loss.smooth:
                here = self.problem.objective(x)
                assert up - here >= _STEP * told - 1e-9 * (1 + abs(here)), f"a subgradient tells {told:.6g}"
                continue
            found = (up - down) / (2 * _STEP)
            assert abs(found - told) <= 1e-5 * (1 + abs(found)), f"derivative tells {told:.6g}, value says {found:.6g}"

    def hessian_is_the_slope_of_the_gradient(self) -> None:
        """By central differences, where there is a second derivative."""
        if not self.loss.twice:
            return
        smooth, who, d = self.problem.smooth(), np.arange(2, dtype=np.uint64), self.problem.dimension
        for x, v in zip(self.models, self.directions, strict=True):
            told = smooth.hessians(who, x.expand(2, d), torch.arange(d)).mean(0) @ v
            found = (self.problem.gradient(x + _STEP * v) - self.problem.gradient(x - _STEP * v)) / (2 * _STEP)
            worst, size = float((told - found).abs().max()), 1 + float(found.abs().max())
            assert worst <= 1e-4 * size, f"second is off by {worst:.3g} at a model of size {float(x.norm()):.2g}"

    def slope_and_curvature_are_bounds(self) -> None:
        """Of what a sample adds."""
        if not self.loss.by_sample:
            return
        b = self.loss.prepare(self.silos, self.silos.targets)
        shape = (len(b),) if self.loss.outputs == 1 else (len(b), self.loss.outputs)
        generator = torch.Generator().manual_seed(0)
        z, y = (3 * torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
        first, second = (self.loss.derivative(t.clone(), b).view(len(b), -1) for t in (z, y))
        steepest = float(first.norm(dim=1).max())
        assert steepest <= self.loss.slope * (1 + 1e-9), f"slope = {self.loss.slope:g}, found {steepest:g}"
        bends = float(((first - second).norm(dim=1) / (z - y).view(len(b), -1).norm(dim=1)).max())
        assert bends <= self.loss.curvature * (1 + 1e-9), f"curvature = {self.loss.curvature:g}, found {bends:g}"
        if self.loss.nonnegative:
            least = float(self.loss.value(z, b).min())
            assert least >= -1e-12, f"nonnegative, but a value is {least:g}"
            middle = self.loss.value((z + y) / 2, b) - (self.loss.value(z, b) + self.loss.value(y, b)) / 2
            assert float(middle.max()) <= 1e-9, (
                "nonnegative says convex, but the value between two points is above them"
            )

    def inputs_are_kept(self) -> None:
        """Targets are not written to."""
        before = self.silos.targets.clone()
        for x in self.models:
            self.problem.evaluate(x)
        assert torch.equal(before, self.silos.targets), "targets were modified"

    def numbers_are_finite(self) -> None:
        """Values and gradients at models of usual size."""
        for x in self.models:
            assert np.isfinite(self.problem.objective(x)), f"value at a model of size {float(x.norm()):.2g}"
            assert bool(self.problem.gradient(x).isfinite().all()), f"gradient at a model of size {float(x.norm()):.2g}"


def check_loss(loss: Loss | str, targets: Any, *, features: int = 3, seed: int = 0) -> None:
    """Run every law on a loss of linear models.

    Parameters
    ----------
    loss : Loss or str
        The loss.
    targets : array
        Targets that it is for, twenty or more.
    features : int
        Of the samples that are drawn for them.
    seed : int
        Of these.

    Raises
    ------
    AssertionError
        Names every law that is broken, and how.
    """
    probe = _LossProbe(loss, targets, features, seed)
    laws = (
        probe.gradient_is_the_slope_of_the_value,
        probe.hessian_is_the_slope_of_the_gradient,
        probe.slope_and_curvature_are_bounds,
        probe.inputs_are_kept,
        probe.numbers_are_finite,
    )
    _report(probe.loss, [(law.__name__, law) for law in laws])


# -- metrics ----------------------------------------------------------------------------------------------------------


class _MetricProbe:
    """A metric, and samples of three clients."""

    def __init__(self, metric: Metric, outputs: Any, targets: Any, seed: int) -> None:
        self.metric = metric
        self.outputs, self.targets = (torch.as_tensor(np.asarray(t)) for t in (outputs, targets))
        self.order = torch.from_numpy(np.random.default_rng(seed).permutation(len(self.targets)))
        self.owner = torch.arange(len(self.targets)) * 3 // len(self.targets)

    def _counts(self, rows: Tensor | slice, owner: Tensor, n: int) -> Tensor:
        return self.metric.counts(self.outputs[rows], self.targets[rows], owner, n)

    def counts_are_a_row_per_client(self) -> None:
        """In double precision, zeros for a client without samples."""
        counts = self._counts(slice(None), self.owner, 4)
        assert counts.shape == (4, counts.shape[-1]), f"counts of 4 clients have shape {tuple(counts.shape)}"
        assert counts.dtype == torch.float64, f"counts are {counts.dtype}, must be float64"
        assert not bool(counts[3].any()), "a client without samples must have zeros"

    def a_client_counts_alone_what_it_counts_beside_others(self) -> None:
        """Its row depends on its own samples."""
        counts = self._counts(slice(None), self.owner, 3)
        for client in range(3):
            rows = self.owner == client
            alone = self._counts(rows, torch.zeros(int(rows.sum()), dtype=torch.long), 1)[0]
            assert torch.allclose(counts[client], alone, rtol=1e-9, atol=1e-12), f"client {client}'s counts differ"

    def order_says_nothing(self) -> None:
        """Samples in another order have the same counts."""
        there, here = (self._counts(rows, self.owner[rows], 3) for rows in (self.order, torch.arange(len(self.order))))
        assert torch.allclose(there, here, rtol=1e-9, atol=1e-12), "counts depend on the order of the samples"

    def values_come_from_sums_of_counts(self) -> None:
        """Of one sum and of many at once, which they leave as they are."""
        counts = self._counts(slice(None), self.owner, 3)
        whole, before = counts.sum(0), counts.clone()
        many = self.metric.value(torch.stack([whole, counts[0]]))
        assert many.shape == (2,), f"value of 2 rows of counts has shape {tuple(many.shape)}"
        one = float(self.metric.value(whole))
        assert float(many[0]) == one or np.isnan(one), "value differs when it is given several rows"
        assert torch.equal(before, counts), "value modified the counts"

    def inputs_are_kept(self) -> None:
        """Outputs and targets are not written to."""
        before = self.outputs.clone(), self.targets.clone()
        self._counts(slice(None), self.owner, 3)
        assert torch.equal(before[0], self.outputs), "outputs were modified"
        assert torch.equal(before[1], self.targets), "targets were modified"


def check_metric(metric: Metric, outputs: Any, targets: Any, *, seed: int = 0) -> None:
    """Run every law on a metric.

    Parameters
    ----------
    metric : Metric
        The metric.
    outputs, targets : array
        Samples that it is for, thirty or more: what a model says of them, and what is true.
    seed : int
        Of the order in which they are counted again.

    Raises
    ------
    AssertionError
        Names every law that is broken, and how.
    """
    probe = _MetricProbe(metric, outputs, targets, seed)
    laws = (
        probe.inputs_are_kept,
        probe.counts_are_a_row_per_client,
        probe.a_client_counts_alone_what_it_counts_beside_others,
        probe.order_says_nothing,
        probe.values_come_from_sums_of_counts,
    )
    _report(metric, [(law.__name__, law) for law in laws])


# -- partitions -------------------------------------------------------------------------------------------------------


def check_partition(rule: Callable[..., Iterable[Any]], silos: Silos, *, clients: int = 5, **options: Any) -> None:
    """Run every law on a rule that deals samples out, ``rule(silos, clients, minimum, rng, **options)``.

    Parameters
    ----------
    rule : callable
        Returns one array of row numbers of the pooled samples for each client.
    silos : Silos
        Samples to deal out.
    clients : int
        To how many.
    **options
        Of the rule.

    Raises
    ------
    AssertionError
        Names every law that is broken, and how.
    """

    def dealt(minimum: int = 1, seed: int = 0) -> list[Any]:
        groups = rule(silos, clients, minimum, np.random.default_rng(seed), **options)
        return [np.asarray(g) for g in groups]

    def a_group_for_every_client() -> None:
        assert len(dealt()) == clients, f"{len(dealt())} groups for {clients} clients"

    def every_sample_once() -> None:
        times = np.bincount(np.concatenate(dealt()), minlength=len(silos.targets))
        assert len(times) == len(silos.targets), f"row {len(times) - 1} of {len(silos.targets)} samples is dealt"
        wrong = np.flatnonzero(times != 1)
        assert not len(wrong), f"row {wrong[0]} is dealt {times[wrong[0]]} times" if len(wrong) else ""

    def the_same_seed_deals_the_same() -> None:
        assert all(np.array_equal(a, b) for a, b in zip(dealt(seed=3), dealt(seed=3), strict=True)), "deals differ"

    def samples_are_kept() -> None:
        before = silos.targets.clone()
        dealt()
        assert torch.equal(before, silos.targets), "targets were modified"

    laws = a_group_for_every_client, every_sample_once, the_same_seed_deals_the_same, samples_are_kept
    _report(getattr(rule, "__name__", rule), [(law.__name__, law) for law in laws])
