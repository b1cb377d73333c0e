"""The one list: every registered method passes every law."""

import pytest

from fedcomposite.algorithms import REGISTRY
from fedcomposite.testing import LAWS, small_problem


@pytest.mark.parametrize("check", LAWS, ids=lambda c: c.__name__)
@pytest.mark.parametrize("name", REGISTRY)
def test_law(name, check):
    cls = REGISTRY[name]
    method = cls.auto(L=0.25, local_steps=3)
    assert small_problem(method).smoothness() < 0.25
    check(method)
