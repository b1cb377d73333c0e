"""The contracts of methods, regularizers, losses, metrics and partitions, as checks for anyone's own."""

from fedcomposite.testing.algorithms import (
    LAWS,
    Traffic,
    broken_laws,
    check_algorithm,
    inputs_are_kept,
    law,
    measure_traffic,
    small_problem,
    stacked_equals_loop,
)
from fedcomposite.testing.longrun import residual
from fedcomposite.testing.parts import check_loss, check_metric, check_partition
from fedcomposite.testing.referee import Verdict, judge
from fedcomposite.testing.regularizers import REGULARIZER_LAWS, check_regularizer

__all__ = [
    "LAWS",
    "REGULARIZER_LAWS",
    "Traffic",
    "Verdict",
    "broken_laws",
    "check_algorithm",
    "check_loss",
    "check_metric",
    "check_partition",
    "check_regularizer",
    "inputs_are_kept",
    "judge",
    "law",
    "measure_traffic",
    "residual",
    "small_problem",
    "stacked_equals_loop",
]
