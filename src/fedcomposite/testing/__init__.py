"""The contracts of methods and regularizers, as checks that anyone can run on their own."""

from fedcomposite.testing.algorithms import (
    LAWS,
    Traffic,
    check_algorithm,
    inputs_are_kept,
    law,
    measure_traffic,
    small_problem,
    stacked_equals_loop,
)

__all__ = [
    "LAWS",
    "Traffic",
    "check_algorithm",
    "inputs_are_kept",
    "law",
    "measure_traffic",
    "small_problem",
    "stacked_equals_loop",
]
