"""The one list: every registered method passes every law."""

import dataclasses

import pytest

from fedcomposite.algorithms import REGISTRY
from fedcomposite.testing import LAWS, residual, small_problem


@pytest.mark.parametrize("check", LAWS, ids=lambda c: c.__name__)
@pytest.mark.parametrize("name", REGISTRY)
def test_law(name, check):
    cls = REGISTRY[name]
    method = cls.auto(L=0.25, local_steps=3)
    assert small_problem(method).smoothness() < 0.25
    check(method)


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
