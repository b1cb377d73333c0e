"""The constants that theorems are stated in, given or measured on a problem."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch

from fedcomposite._validation import Count, Probability, as_vector, refuse, wrong_arguments, wrong_names
from fedcomposite.algorithms.base import amplification
from fedcomposite.problems import Linear, Problem
from fedcomposite.problems.losses import LeastSquares
from fedcomposite.problems.sparse_products import Design
from fedcomposite.regularizers import L1, MCP, SCAD, On, Regularizer, Zero
from fedcomposite.results import Result


@dataclass(frozen=True, repr=False)
class Constants(Result):
    """The numbers that theorems are stated in; None is unknown."""

    L: float | None
    """Smoothness of every f_i; None when a loss has none."""
    scale: float | None = None
    """The L that a loss with curvature 1 would have."""
    rho: float = 0.0
    """Weak convexity of h."""
    mu: float = 0.0
    """Strong convexity of every f_i; stands for the constant of the Polyak-Lojasiewicz condition as well."""
    G: float | None = None
    """Every f_i is G-Lipschitz."""
    B: float | None = None
    """Bound on the norm of h's subgradients."""
    sigma: float | None = None
    """Root of the variance of a gradient on one sample."""
    L_sample: float | None = None
    """Smoothness of every sample's loss; None is as L."""
    G_sample: float | None = None
    """Every sample's loss is G-Lipschitz; None is as G."""
    n: int = 1
    """Clients."""
    uniform: bool = True
    """Whether all clients weigh alike."""
    cohort: int | None = None
    """Clients per round; None is all."""
    amplification: float = 1.0
    """How much more than on average the clients of a round may weigh together."""
    batch: int | None = None
    """Samples per local step; None is all."""
    rounds: int | None = None
    """Rounds that are planned."""
    gap: float | None = None
    """F(x0) - min F."""
    distance: float | None = None
    """||x0 - x*||."""
    drift: float | None = None
    """mean_i ||grad f_i(x0) - grad f(x0)||^2."""
    spread: float | None = None
    """mean_i ||grad f_i(x*)||^2."""

    def to_frame(self) -> pd.DataFrame:
        """The value of each, missing where it is unknown; the index has their names."""
        known = asdict(self)
        return pd.DataFrame({"value": list(known.values())}, index=pd.Index(known, name="constant"), dtype=object)

    def _line(self) -> str:
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        known = [each.name for each in fields(self) if given[each.name] not in (None, each.default)]
        return ", ".join(f"{name} = {given[name]:.4g}" for name in known)

    @property
    def participants(self) -> int:
        """Clients per round."""
        return self.n if self.cohort is None else self.cohort

    @property
    def of_samples(self) -> tuple[float, float]:
        """L and G of single samples, for theorems on minibatches."""
        L, G = self.need("L", "G")
        return (L if self.L_sample is None else self.L_sample), (G if self.G_sample is None else self.G_sample)

    @property
    def of_batches(self) -> float | None:
        """Smoothness of f_i as local steps on minibatches of b samples feel it: L + (L_sample - L) / b.

        The expected smoothness of b samples drawn with replacement (Gower et al., *SGD: general analysis and improved
        rates*, 2019): for g on such a batch E||g(x) - g(y)||^2 is at most 2 of_batches times f_i's Bregman divergence.
        A step that is safe for L alone can grow without end on few samples at a time.
        """
        if self.L is None or self.batch is None or self.L_sample is None:
            return self.L
        return self.L + max(0.0, self.L_sample - self.L) / self.batch

    def need(self, *names: str) -> tuple[float, ...]:
        """The named constants, or a ValueError that says which one is missing and how to get it."""
        for name in names:
            if getattr(self, name) is None:
                where = f"in a configuration: constants = {{{name} = ...}}"
                raise ValueError(f"the constant {name} is not known: {_REMEDIES[name]} ({where})")
        return tuple(float(getattr(self, name)) for name in names)

    @property
    def noise(self) -> float:
        """sigma^2 / b, zero with full gradients."""
        return 0.0 if self.batch is None else self.need("sigma")[0] ** 2 / self.batch


_REMEDIES = {
    "scale": "give scale = the largest eigenvalue of the clients' X'X/m",
    "L": "the loss has no smoothness constant, and the theorem needs one",
    "G": "the loss has unbounded slopes; give G = a bound on the clients' gradients on your region",
    "B": "give B = a bound on the norm of the regularizer's subgradients, if it has one",
    "sigma": "give sigma = the root of the variance of a gradient on one sample",
    "rounds": "give rounds",
    "batch": "the theorem is about minibatches; give batch",
    "gap": "give gap = F(x0) - min F, or solution to measure it",
    "distance": "give distance = ||x0 - x*||, or solution to measure it",
    "drift": "give drift = mean_i ||grad f_i(x0) - grad f(x0)||^2",
    "spread": "give spread = mean_i ||grad f_i(x*)||^2, or solution to measure it",
}


_MANY = 2000  # sparse features whose squared matrix is not formed


def constants(
    problem: Problem,
    *,
    batch: Count | None = None,
    rounds: Count | None = None,
    participation: Probability = 1.0,
    x0: Any = None,
    solution: Any = None,
    of: Literal["clients", "samples"] = "clients",
    **known: float,
) -> Constants:
    """Measure a problem's constants.

    Parameters
    ----------
    problem : Problem
        A linear model; for others give what is known as keywords.
    batch, rounds, participation
        As for :func:`fedcomposite.simulate`.
    x0 : tensor, run or estimator, optional
        The first model; the problem's own start if left out.
    solution : tensor, run or estimator, optional
        A minimiser of F, for the gap, the distance and the spread.
    of : {"clients", "samples"}
        Whether L and G are those of the clients' losses or of single samples. The latter are ``L_sample`` and
        ``G_sample`` in any case.
    **known
        Constants that you know better, for example ``mu``; they replace measured ones.
    """
    if not isinstance(problem, Problem):
        raise ValueError(f"problem is a {type(problem).__name__}; make one: fc.Problem(silos, ...)")
    lines = wrong_arguments(constants, {"batch": batch, "rounds": rounds, "participation": participation, "of": of})
    refuse([*lines, *wrong_names(Constants, known)])
    smooth, h, n = problem.smooth(), problem.regularizer, len(problem.silos)
    first = smooth.start() if x0 is None else as_vector(x0, "x0").double()
    everyone = smooth.full(np.arange(n, dtype=np.uint64))
    weights = torch.from_numpy(problem.weights)

    def gradients(x: torch.Tensor) -> torch.Tensor:
        return everyone(x.expand(n, -1))

    at_start = gradients(first)
    cohort = max(1, round(participation * n))
    measured: dict[str, Any] = {
        "L": None,
        "rho": h.rho,
        "B": subgradient_bound(h, problem.dimension),
        "n": n,
        "uniform": bool(np.allclose(problem.weights, 1 / n)),
        "cohort": cohort,
        "amplification": amplification(problem.weights.tolist(), cohort),
        "batch": batch,
        "rounds": rounds,
        "drift": float(weights @ (at_start - weights @ at_start).square().sum(1)),
    }
    if isinstance(smooth, Linear):
        measured["scale"] = smooth.scale(of)
        if math.isfinite(smooth.loss.curvature):
            measured["L"] = smooth.loss.curvature * measured["scale"]
            measured["L_sample"] = smooth.loss.curvature * smooth.scale("samples")
        if math.isfinite(smooth.loss.slope):
            measured |= {"G": smooth.lipschitz(of), "G_sample": smooth.lipschitz("samples")}
            measured["sigma"] = math.sqrt(smooth.second_moment())
        if isinstance(smooth.loss, LeastSquares):
            measured["mu"] = _least_curvature(problem, smooth)
    if solution is not None:
        best = as_vector(solution, "solution").double()
        gap = problem.objective(first) - problem.objective(best)
        if gap < -1e-9 * max(1.0, abs(problem.objective(first))):
            raise ValueError(f"solution is no minimiser: its objective is {-gap:.3g} above that of x0")
        measured |= {
            "gap": max(0.0, gap),
            "distance": float((first - best).norm()),
            "spread": float(weights @ gradients(best).square().sum(1)),
        }
    return Constants(**{**measured, **known})


def _least_curvature(problem: Problem, smooth: Linear) -> float:
    """Smallest eigenvalue of X_i'X_i/m_i over the clients: the strong convexity of least squares."""
    sizes = problem.silos.sizes.tolist()
    if min(sizes) < smooth.dimension or (isinstance(smooth.X, Design) and smooth.dimension > _MANY):
        return 0.0  # fewer samples than features leave directions flat; of many sparse features zero is a bound
    if isinstance(smooth.X, Design):
        stack = smooth.X.blocks(smooth.offsets.astype(np.int64), problem.silos.sizes)
        weight = torch.nn.utils.rnn.pad_sequence(
            [w / w.sum() for w in torch.split(smooth.sample_weights.double(), sizes)], batch_first=True
        )
        return max(0.0, float(torch.linalg.eigvalsh(stack.grams(weight))[:, 0].min()))
    pairs = zip(torch.split(smooth.X.double(), sizes), torch.split(smooth.sample_weights.double(), sizes), strict=True)
    grams = [(X * (w / w.sum()).unsqueeze(1)).t() @ X for X, w in pairs]
    return max(0.0, min(float(torch.linalg.eigvalsh(gram)[0]) for gram in grams))


def subgradient_bound(h: Regularizer, dimension: int) -> float | None:
    """The supremum of ||h'(x)|| over all x and all subgradients, or None where no finite bound is known.

    kappa lam sqrt(d) for l1, MCP and SCAD, whose slopes are steepest at zero; lam ||w|| for l1 with weights w.
    """
    match h:
        case Zero():
            return 0.0
        case L1():
            return h.lam * (math.sqrt(dimension) if h.weights is None else math.hypot(*h.weights))
        case MCP() | SCAD():
            return h.kappa * h.lam * math.sqrt(dimension)
        case On():
            return subgradient_bound(h.h, sum(b - a for a, b in h.runs))
    return None
