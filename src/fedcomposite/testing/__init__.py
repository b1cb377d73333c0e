"""The contracts of methods and regularizers, as checks that anyone can run on their own."""

from fedcomposite.testing.algorithms import LAWS, Traffic, check_algorithm, law, measure_traffic, small_problem
from fedcomposite.testing.regularizers import REGULARIZER_LAWS, check_regularizer

__all__ = [
    "LAWS",
    "REGULARIZER_LAWS",
    "Traffic",
    "check_algorithm",
    "check_regularizer",
    "law",
    "measure_traffic",
    "small_problem",
]
