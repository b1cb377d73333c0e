"""Problems: losses and models over silos, with stacked gradient oracles."""

from fedcomposite.problems.base import Batches, ClientGradients, Counter, Evaluation, Smooth
from fedcomposite.problems.linear import Linear
from fedcomposite.problems.losses import LOSSES, Loss
from fedcomposite.problems.problem import Problem, prox_gradient_norm

__all__ = [
    "LOSSES",
    "Batches",
    "ClientGradients",
    "Counter",
    "Evaluation",
    "Linear",
    "Loss",
    "Problem",
    "Smooth",
    "prox_gradient_norm",
]
