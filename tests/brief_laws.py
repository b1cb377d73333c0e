"""The laws of methods with as many rounds as one waits for; make test-slow runs them with all that they ask for."""

from fedcomposite.testing import LAWS
from fedcomposite.testing.longrun import does_not_drift, exactness_is_measured, steps_may_change

ROUNDS = {does_not_drift: 3000, exactness_is_measured: 1800, steps_may_change: 1800}


def briefly(check, method):
    """One law of a method."""
    if check in ROUNDS:
        check(method, rounds=ROUNDS[check])
    else:
        check(method)


def check_briefly(method):
    """Every law of a method."""
    for check in LAWS:
        briefly(check, method)
