"""Problems: losses and models over silos, with stacked gradient oracles."""

from fedcomposite.problems.base import Batches, ClientGradients, Counter, Evaluation, Smooth
from fedcomposite.problems.linear import Linear
from fedcomposite.problems.losses import LOSSES, Loss
from fedcomposite.problems.measures import Counts, Measures, summarise
from fedcomposite.problems.metrics import METRICS, Metric
from fedcomposite.problems.network import MODEL_LOSSES
from fedcomposite.problems.problem import LinearProblem, NetworkProblem, OneClassWarning, Problem, prox_gradient_norm

__all__ = [
    "LOSSES",
    "METRICS",
    "MODEL_LOSSES",
    "Batches",
    "ClientGradients",
    "Counter",
    "Counts",
    "Evaluation",
    "Linear",
    "LinearProblem",
    "Loss",
    "Measures",
    "Metric",
    "NetworkProblem",
    "OneClassWarning",
    "Problem",
    "Smooth",
    "prox_gradient_norm",
    "summarise",
]
