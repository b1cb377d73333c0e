"""check_loss, check_metric and check_partition: the package's own parts pass, and each law catches what it is for."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

import fedcomposite as fc
from fedcomposite.data.partition import PARTITIONERS
from fedcomposite.problems.losses import LOSSES, Logistic
from fedcomposite.problems.metrics import METRICS, Accuracy
from fedcomposite.testing import check_loss, check_metric, check_partition

RANDOM = np.random.default_rng(0)
LABELS, CLASSES = RANDOM.integers(0, 2, 40).astype(float), RANDOM.integers(0, 3, 40).astype(float)
NUMBERS, COUNTS = RANDOM.normal(size=40), RANDOM.poisson(1.0, 40).astype(float)
TIMES = np.c_[RANDOM.exponential(size=40).round(3) + 0.01, RANDOM.integers(0, 2, 40)]


@pytest.mark.parametrize("name", LOSSES)
def test_losses_keep_the_laws(name):
    if name == "cox":
        targets = TIMES
    elif name == "poisson":
        targets = COUNTS
    elif name == "multinomial":
        targets = CLASSES
    else:
        targets = LABELS if LOSSES[name].classifier else NUMBERS
    check_loss(LOSSES[name], targets)


@dataclass(frozen=True)
class WrongSlope(Logistic):
    def derivative(self, z, b):
        return 0.9 * super().derivative(z, b)


@dataclass(frozen=True)
class WrongSecond(Logistic):
    def second(self, z, b):
        return 2 * super().second(z, b)


@dataclass(frozen=True)
class TooFlat(Logistic):
    curvature = 0.1


@dataclass(frozen=True)
class Negative(Logistic):
    def value(self, z, b):
        return super().value(z, b) - 1


@dataclass(frozen=True)
class Endless(Logistic):
    def value(self, z, b):
        return super().value(z, b) * torch.inf


@pytest.mark.parametrize(
    ("loss", "law"),
    [
        (WrongSlope(), "gradient_is_the_slope_of_the_value"),
        (WrongSecond(), "hessian_is_the_slope_of_the_gradient"),
        (TooFlat(), "slope_and_curvature_are_bounds: curvature = 0.1"),
        (Negative(), "nonnegative, but a value is -"),
        (Endless(), "numbers_are_finite"),
    ],
    ids=lambda p: type(p).__name__,
)
def test_a_broken_loss_is_told(loss, law):
    with pytest.raises(AssertionError, match=law):
        check_loss(loss, LABELS)


def samples_for(metric):
    if "survival" in metric.fits and len(metric.fits) == 1:
        rest = np.zeros((40, 3))
        return RANDOM.normal(size=40), np.c_[TIMES, rest]
    if metric.fits == ("labels",):
        return RANDOM.normal(size=(40, 5, 3)), RANDOM.integers(0, 3, (40, 5))
    if metric.fits == ("regression",):
        return RANDOM.normal(size=40), NUMBERS
    return RANDOM.normal(size=40), LABELS.astype(int)


@pytest.mark.parametrize("name", METRICS)
def test_metrics_keep_the_laws(name):
    metric = METRICS[name]()
    check_metric(metric, *samples_for(metric))


@dataclass(frozen=True)
class Single(Accuracy):
    def counts(self, outputs, targets, owner, n):
        return super().counts(outputs, targets, owner, n).float()


@dataclass(frozen=True)
class Ordered(Accuracy):
    def counts(self, outputs, targets, owner, n):
        places = torch.arange(len(owner), dtype=torch.float64)
        return super().counts(outputs, targets, owner, n) * 0 + torch.bincount(owner, places, minlength=n).view(-1, 1)


@dataclass(frozen=True)
class Writing(Accuracy):
    def counts(self, outputs, targets, owner, n):
        made = super().counts(outputs, targets, owner, n)
        outputs.zero_()
        return made


@pytest.mark.parametrize(
    ("metric", "law"), [(Single(), "must be float64"), (Ordered(), "order of the samples"), (Writing(), "modified")]
)
def test_a_broken_metric_is_told(metric, law):
    with pytest.raises(AssertionError, match=law):
        check_metric(metric, *samples_for(metric))


@pytest.mark.parametrize("name", PARTITIONERS)
def test_partitions_keep_the_laws(name):
    check_partition(PARTITIONERS[name], fc.Silos.from_arrays([(RANDOM.normal(size=(60, 3)), np.arange(60) % 3)]))


def test_a_broken_partition_is_told():
    silos = fc.Silos.from_arrays([(RANDOM.normal(size=(60, 3)), np.arange(60) % 3)])

    def twice(silos, clients, minimum, rng):
        return [np.arange(12)] * clients

    def at_random(silos, clients, minimum, rng):
        return np.array_split(np.random.default_rng().permutation(60), clients)

    with pytest.raises(AssertionError, match="twice breaks 1 of 4 laws:\n  every_sample_once: row 0 is dealt 5 times"):
        check_partition(twice, silos)
    with pytest.raises(AssertionError, match="the_same_seed_deals_the_same"):
        check_partition(at_random, silos)
