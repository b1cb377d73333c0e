"""The contracts of methods and regularizers, as checks that anyone can run on their own."""

from fedcomposite.testing.algorithms import LAWS, Traffic, check_algorithm, law, measure_traffic, small_problem
from fedcomposite.testing.longrun import residual

__all__ = ["LAWS", "Traffic", "check_algorithm", "law", "measure_traffic", "residual", "small_problem"]
