"""The one list: every registered method passes every law."""

import dataclasses

import pytest
import torch
from brief_laws import ROUNDS, briefly

from fedcomposite.algorithms import REGISTRY
from fedcomposite.testing import LAWS, residual, small_problem
from fedcomposite.testing.longrun import LongRunProbe, play


@pytest.mark.parametrize("check", LAWS, ids=lambda c: c.__name__)
@pytest.mark.parametrize("name", REGISTRY)
def test_law(name, check):
    cls = REGISTRY[name]
    method = cls.auto(L=0.25, local_steps=3)
    assert small_problem(method).smoothness() < 0.25
    briefly(check, method)


@pytest.mark.slow
@pytest.mark.parametrize("check", ROUNDS, ids=lambda c: c.__name__)
@pytest.mark.parametrize("name", REGISTRY)
def test_law_in_as_many_rounds_as_it_asks_for(name, check):
    check(REGISTRY[name].auto(L=0.25, local_steps=3))


@pytest.mark.parametrize("name", REGISTRY)
def test_a_card_claims_no_less_than_is_true(name):
    """What is not called exact leaves a residual; FedCanon does where h is not zero."""
    cls = REGISTRY[name]
    method = cls.auto(L=0.25, local_steps=3)
    if not cls.info.exact:
        assert residual(method, rounds=1500) > 1e-5
    switch = "partial_participation" in cls.__dataclass_fields__
    if switch:
        method = dataclasses.replace(method, partial_participation=True)
    if method.partial and not (cls.info.exact and cls.info.exact_partial):
        assert residual(method, rounds=1500, cohort=3) > 1e-5


def test_dual_averaging_keeps_its_growing_sums():
    """EControlDA's model is a small difference of numbers that grow with the rounds: single precision must do."""
    method = REGISTRY["EControlDA"].auto(L=0.25)
    *_, last = play(method, LongRunProbe(method), 6000, every=1000, dtype=torch.float32)
    assert last.stationarity < 1e-6
