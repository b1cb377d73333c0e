"""What the papers prove: step-size conditions and convergence bounds, as functions of a problem's constants.

    c = constants(problem, rounds=200, solution=x_star)      # measure L, rho, G, ...
    method = build("Zhang", **steps("Zhang", c))             # the largest steps its theorem allows
    outside(method, c)                                       # [] or a sentence per violated condition
    bound(run, method, c)                                    # the theorem's right-hand side, per record

The theorems of the five papers are read from them; those on SCAFFOLD, ProxSkip and FedDR are restated as generally
published.

Theory steps are safe and small; :func:`auto` gives the practical ones. Every theorem is a class below, with its number
and formula; x+ is the next model, tau = ``local_steps``, eta = ``step``, eta_g = ``server_step``, b the batch size, and
sigma^2 the variance of a gradient on one sample (zero with full gradients). The theorems are about equal weights,
w_i = 1/n. Methods without an entry in :data:`THEOREMS` have none that could be stated with all its constants.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import torch

from fedcomposite._validation import suggest
from fedcomposite.algorithms import REGISTRY
from fedcomposite.algorithms.base import AnyAlgorithm, amplification
from fedcomposite.problems import Linear, Problem
from fedcomposite.problems.losses import LeastSquares
from fedcomposite.regularizers import L1, MCP, SCAD, On, Regularizer, Zero
from fedcomposite.runtime.history import Run

Floats = npt.NDArray[np.float64]
Bounded = Literal["stationarity", "objective", "distance"]


@dataclass(frozen=True)
class Constants:
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
    n: int = 1
    """Clients."""
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

    @property
    def participants(self) -> int:
        """Clients per round."""
        return self.n if self.cohort is None else self.cohort

    def need(self, *names: str) -> tuple[float, ...]:
        """The named constants, or a ValueError that says which one is missing and how to get it."""
        for name in names:
            if getattr(self, name) is None:
                raise ValueError(f"the constant {name} is not known: {_REMEDIES[name]}")
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


def constants(
    problem: Problem,
    *,
    batch: int | None = None,
    rounds: int | None = None,
    participation: float = 1.0,
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
    x0 : array, optional
        The first model; the problem's own start if left out.
    solution : array, optional
        A minimiser of F, for the gap, the distance and the spread.
    of : {"clients", "samples"}
        Whether L and G are those of the clients' losses or of single samples, as the theorems on FedProx have it.
    **known
        Constants that you know better, for example ``mu``; they replace measured ones.
    """
    smooth, h, n = problem.smooth(), problem.regularizer, len(problem.silos)
    first = smooth.start() if x0 is None else torch.as_tensor(x0, dtype=torch.float64)
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
        if math.isfinite(smooth.loss.slope):
            measured |= {"G": smooth.lipschitz(of), "sigma": math.sqrt(smooth.second_moment())}
        if isinstance(smooth.loss, LeastSquares):
            measured["mu"] = _least_curvature(problem, smooth)
    if solution is not None:
        best = torch.as_tensor(solution, dtype=torch.float64)
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
    grams = [X.t() @ X / len(X) for X in torch.split(smooth.X.double(), problem.silos.sizes.tolist())]
    return max(0.0, min(float(torch.linalg.eigvalsh(gram)[0]) for gram in grams))


def subgradient_bound(h: Regularizer, dimension: int) -> float | None:
    """The supremum of ||h'(x)|| over all x and all subgradients, or None where no finite bound is known.

    kappa lam sqrt(d) for l1, MCP and SCAD, whose slopes are steepest at zero.
    """
    match h:
        case Zero():
            return 0.0
        case L1():
            return h.lam * math.sqrt(dimension)
        case MCP() | SCAD():
            return h.kappa * h.lam * math.sqrt(dimension)
        case On():
            return subgradient_bound(h.h, sum(b - a for a, b in h.runs))
    return None


class Theorem(ABC):
    """What a paper guarantees for a method."""

    paper: ClassVar[str]
    bounds: ClassVar[Bounded | None] = None
    """What :meth:`bound` limits: the mean of ||G_s||^2 over the models so far, F - min F, or ||x - x*||^2."""

    @abstractmethod
    def steps(self, c: Constants, local_steps: int) -> dict[str, Any]:
        """The fields of the method with the largest steps that the theorem allows."""

    @abstractmethod
    def violations(self, method: Any, c: Constants) -> list[str]:
        """A sentence for every condition that does not hold."""

    def bound(self, method: Any, c: Constants, rounds: Floats) -> Floats:
        """The theorem's right-hand side after each number of rounds."""
        raise ValueError(f"{self}: the bound is stated up to an unnamed constant factor, so it has no number")

    def measured_at(self, method: Any) -> float | None:
        """The step s of the prox-gradient mapping that the theorem bounds."""
        return None

    def __str__(self) -> str:
        return self.paper


def _above(what: str, value: float, limit: float, formula: str) -> list[str]:
    """A sentence if value > limit, with room for rounding."""
    return [f"{what} = {value:.3g} is above {formula} = {limit:.3g}"] if value > limit * (1 + 1e-9) else []


def _below(what: str, value: float, limit: float, formula: str) -> list[str]:
    return [f"{what} = {value:.3g} is below {formula} = {limit:.3g}"] if value < limit * (1 - 1e-9) else []


def _everyone(c: Constants) -> list[str]:
    few = c.participants < c.n
    return [f"only {c.participants} of {c.n} clients take part in a round, the theorem needs all"] if few else []


def _convex(c: Constants) -> list[str]:
    return [f"the regularizer is weakly convex (rho = {c.rho:.3g}), the theorem needs a convex one"] if c.rho else []


def _smooth(c: Constants) -> list[str]:
    return ["the loss has no smoothness constant, and the theorem needs one"] if c.L is None else []


class ProximalGradientDescent(Theorem):
    """mean ||G_s||^2 <= gap / (s (1 - s (L + rho) / 2) T) over T models, for s (L + rho) < 2.

    From F(x+) <= F(x) - s (1 - s (L + rho) / 2) ||G_s(x)||^2 (Beck, First-order methods in optimization, 2017, Lemma
    10.4 for rho = 0). The guaranteed decrease is largest at s = 1 / (L + rho), the step chosen here.
    """

    paper = "Beck (2017), Theorem 10.15"
    bounds = "stationarity"

    def steps(self, c: Constants, local_steps: int) -> dict[str, Any]:
        """The step 1 / (L + rho)."""
        return {"step": 1 / (c.need("L")[0] + c.rho)}

    def violations(self, method: Any, c: Constants) -> list[str]:
        """Only s (L + rho) < 2."""
        if c.L is None:
            return _smooth(c)
        return _above("step", method.step, 2 / (c.L + c.rho), "2 / (L + rho)")

    def measured_at(self, method: Any) -> float | None:
        """The step itself."""
        return float(method.step)

    def bound(self, method: Any, c: Constants, rounds: Floats) -> Floats:
        """As stated, for full gradients."""
        L, gap = c.need("L", "gap")
        if c.batch is not None:
            raise ValueError(f"{self} is about full gradients")
        s = float(method.step)
        return gap / (s * (1 - s * (L + c.rho) / 2) * (rounds + 1))


class _Zhang(Theorem):
    """The common part of the theorems on Zhang's method: eta~ = eta_g eta tau is small and eta_g is not."""

    formula: ClassVar[str]

    @abstractmethod
    def limit(self, c: Constants) -> float:
        """The largest eta~, which ``formula`` shows."""

    @abstractmethod
    def server(self, c: Constants) -> float:
        """The eta_g of the theorem."""

    def steps(self, c: Constants, local_steps: int) -> dict[str, Any]:
        """Equality in both conditions."""
        server = self.server(c)
        step = self.limit(c) / (server * local_steps)
        return {"local_steps": local_steps, "step": step, "server_step": server}

    def violations(self, method: Any, c: Constants) -> list[str]:
        """Both step conditions, a convex h and full participation."""
        found = [*_smooth(c), *_convex(c), *_everyone(c)]
        if not method.growing_prox:
            found.append("growing_prox = False is the paper's ablation, which the theorem does not cover")
        if c.L is not None:
            found += _above("server_step * step * local_steps", method.round_step, self.limit(c), self.formula)
        return found


class Zhang35(_Zhang):
    """mean ||G||^2 <= Omega / (0.3 eta~ R) + 20 sigma^2 / (n tau b) + 187 L^2 eta~^2 B^2 / eta_g^2.

    Conditions (13): eta~ = eta_g eta tau <= 1 / (10 L) and eta_g >= max(1.5, sqrt(n / 8)). G is taken at eta~, the mean
    over R models. Omega = F(x) - min F + ||Lambda - mean Lambda||^2 / (n eta~), (10); at the start the corrections are
    zero, so the second term is eta~ drift / eta_g^2.
    """

    paper = "Zhang, Hu & Johansson (2025), Theorem 3.5"
    bounds = "stationarity"
    formula = "1 / (10 L)"

    def limit(self, c: Constants) -> float:
        """1 / (10 L)."""
        return 1 / (10 * c.need("L")[0])

    def server(self, c: Constants) -> float:
        """max(1.5, sqrt(n / 8)), the least eta_g."""
        return max(1.5, math.sqrt(c.n / 8))

    def violations(self, method: Any, c: Constants) -> list[str]:
        """Conditions (13), a convex h and full participation."""
        least = _below("server_step", method.server_step, self.server(c), "max(1.5, sqrt(n / 8))")
        return [*super().violations(method, c), *least]

    def measured_at(self, method: Any) -> float | None:
        """Eta~."""
        return float(method.round_step)

    def bound(self, method: Any, c: Constants, rounds: Floats) -> Floats:
        """As stated."""
        L, B = c.need("L", "B")
        s = float(method.round_step)
        rest = 20 * c.noise / (c.n * method.local_steps) + 187 * (L * s * B / method.server_step) ** 2
        values: Floats = _omega(method, c) / (0.3 * s * (rounds + 1)) + rest
        return values


class Zhang36(_Zhang):
    """F - min F <= (1 - mu eta~ / 3)^R Omega + 18 sigma^2 / (mu n tau b) + 168 L^2 eta~^2 B^2 / (mu eta_g^2).

    The conditions of Theorem 3.5, and the proximal Polyak-Lojasiewicz inequality with mu, which strong convexity of f
    implies.
    """

    paper = "Zhang, Hu & Johansson (2025), Theorem 3.6"
    bounds = "objective"
    formula = "1 / (10 L)"

    def limit(self, c: Constants) -> float:
        """1 / (10 L)."""
        return 1 / (10 * c.need("L")[0])

    def server(self, c: Constants) -> float:
        """max(1.5, sqrt(n / 8)), the least eta_g."""
        return max(1.5, math.sqrt(c.n / 8))

    def violations(self, method: Any, c: Constants) -> list[str]:
        """Those of Theorem 3.5, and mu > 0."""
        least = _below("server_step", method.server_step, self.server(c), "max(1.5, sqrt(n / 8))")
        return [*super().violations(method, c), *least, *_curved(c)]

    def bound(self, method: Any, c: Constants, rounds: Floats) -> Floats:
        """As stated."""
        L, B = c.need("L", "B")
        mu, s = _positive_mu(self, c), float(method.round_step)
        rest = 18 * c.noise / (mu * c.n * method.local_steps) + 168 * (L * s * B / method.server_step) ** 2 / mu
        values: Floats = (1 - mu * s / 3) ** rounds * _omega(method, c) + rest
        return values


class Zhang38(_Zhang):
    """||x - x*||^2 <= (1 - mu eta~ / 3)^R Omega_sc + 30 eta~ sigma^2 / (mu n tau b) + 21 eta~ B^2 / (mu eta_g^2).

    Conditions: f mu-strongly convex, eta~ <= mu / (150 L^2) and eta_g = sqrt(n). Omega_sc = ||x - x*||^2 + ||Lambda -
    mean Lambda||^2 / n, whose second term is (eta~ / eta_g)^2 drift at the start.
    """

    paper = "Zhang, Hu & Johansson (2025), Theorem 3.8"
    bounds = "distance"
    formula = "mu / (150 L^2)"

    def limit(self, c: Constants) -> float:
        """The largest eta~."""
        return _positive_mu(self, c) / (150 * c.need("L")[0] ** 2)

    def server(self, c: Constants) -> float:
        """sqrt(n)."""
        return math.sqrt(c.n)

    def violations(self, method: Any, c: Constants) -> list[str]:
        """A convex h, full participation, strong convexity and both step conditions."""
        if not c.mu:
            return [*_convex(c), *_everyone(c), *_curved(c)]
        found = super().violations(method, c)
        if not math.isclose(method.server_step, self.server(c), rel_tol=1e-6):
            found.append(f"server_step = {method.server_step:.3g} is not sqrt(n) = {self.server(c):.3g}")
        return found

    def bound(self, method: Any, c: Constants, rounds: Floats) -> Floats:
        """As stated."""
        B, distance, drift = c.need("B", "distance", "drift")
        mu, s = _positive_mu(self, c), float(method.round_step)
        start = distance**2 + (s / method.server_step) ** 2 * drift
        rest = 30 * s * c.noise / (mu * c.n * method.local_steps) + 21 * s * (B / method.server_step) ** 2 / mu
        values: Floats = (1 - mu * s / 3) ** rounds * start + rest
        return values


def _omega(method: Any, c: Constants) -> float:
    """Omega of the first model, (10)."""
    gap, drift = c.need("gap", "drift")
    return gap + float(method.round_step) * drift / float(method.server_step) ** 2


class _FedCanon(Theorem):
    """The common part of the theorems on FedCanon: alpha (rho + L) + 4 alpha^2 L^2 <= q and (6 + delta) (beta tau L)^2
    <= r.

    Here delta = (1 - alpha rho)^-2, beta = ``step``, alpha = ``server_step``.
    """

    @abstractmethod
    def q(self, c: Constants) -> float:
        """Limit of alpha (rho + L) + 4 alpha^2 L^2."""

    @abstractmethod
    def r(self, c: Constants, alpha: float) -> float:
        """Limit of (6 + delta) (beta tau L)^2."""

    def steps(self, c: Constants, local_steps: int) -> dict[str, Any]:
        """Equality in both conditions: the positive root of a quadratic, then beta."""
        (L,) = c.need("L")
        alpha = (math.hypot(c.rho + L, 4 * math.sqrt(self.q(c)) * L) - (c.rho + L)) / (8 * L**2)
        beta = math.sqrt(self.r(c, alpha) / (6 + (1 - alpha * c.rho) ** -2)) / (local_steps * L)
        return {"local_steps": local_steps, "step": beta, "server_step": alpha}

    def violations(self, method: Any, c: Constants) -> list[str]:
        """Both step conditions and full participation."""
        if c.L is None:
            return [*_smooth(c), *_everyone(c)]
        alpha, reach = method.server_step, method.step * method.local_steps * c.L
        if alpha * c.rho >= 1:
            return [f"server_step = {alpha:.3g} is not below 1 / rho = {1 / c.rho:.3g}", *_everyone(c)]
        used = alpha * (c.rho + c.L) + 4 * (alpha * c.L) ** 2
        drift = (6 + (1 - alpha * c.rho) ** -2) * reach**2
        return [
            *_above("alpha (rho + L) + 4 alpha^2 L^2 at alpha = server_step", used, self.q(c), "its limit"),
            *_above("(6 + delta) (step * local_steps * L)^2", drift, self.r(c, alpha), "its limit"),
            *_everyone(c),
        ]


class FedCanon1(_FedCanon):
    """mean ||G_alpha||^2 <= 8 (gap + alpha drift) / (alpha T) + 50 sigma^2 / (b tau) + sigma^2 / (8 b) + B^2.

    Conditions: alpha (rho + L) + 4 alpha^2 L^2 <= 1/2 and 192 (6 + delta) beta^2 tau^2 L^2 <= 1. The mean is over T
    models; the paper's B_h bounds the squared norm of subgradients, B_h = B^2.
    """

    paper = "Zhou et al. (2025), Theorem 1"
    bounds = "stationarity"

    def q(self, c: Constants) -> float:
        """1/2."""
        return 0.5

    def r(self, c: Constants, alpha: float) -> float:
        """1/192."""
        return 1 / 192

    def measured_at(self, method: Any) -> float | None:
        """Alpha."""
        return float(method.server_step)

    def bound(self, method: Any, c: Constants, rounds: Floats) -> Floats:
        """As stated."""
        gap, drift, B = c.need("gap", "drift", "B")
        alpha = float(method.server_step)
        rest = (50 / method.local_steps + 1 / 8) * c.noise + B**2
        values: Floats = 8 * (gap + alpha * drift) / (alpha * (rounds + 1)) + rest
        return values


class FedCanon2(_FedCanon):
    """F - min F <= (1 - alpha mu / 4)^T (gap + alpha drift) + (25 / tau + 1 / 16) sigma^2 / (mu b) + B^2 / (2 mu).

    Conditions: ||G_alpha||^2 >= 2 mu (F - min F), (14); alpha (rho + L) + 4 alpha^2 L^2 <= min(1/2, (4 mu (rho + L) +
    64 L^2) / mu^2) and 12 (6 + delta) beta^2 tau^2 L^2 <= min(1/16, 1 - alpha mu / 4).
    """

    paper = "Zhou et al. (2025), Theorem 2"
    bounds = "objective"

    def q(self, c: Constants) -> float:
        """min(1/2, (4 mu (rho + L) + 64 L^2) / mu^2)."""
        (L,), mu = c.need("L"), _positive_mu(self, c)
        return min(0.5, (4 * mu * (c.rho + L) + 64 * L**2) / mu**2)

    def r(self, c: Constants, alpha: float) -> float:
        """min(1/16, 1 - alpha mu / 4) / 12."""
        return min(1 / 16, 1 - alpha * c.mu / 4) / 12

    def violations(self, method: Any, c: Constants) -> list[str]:
        """Both step conditions, full participation and mu > 0."""
        return super().violations(method, c) if c.mu else [*_curved(c), *_everyone(c)]

    def bound(self, method: Any, c: Constants, rounds: Floats) -> Floats:
        """As stated."""
        gap, drift, B = c.need("gap", "drift", "B")
        mu, alpha = _positive_mu(self, c), float(method.server_step)
        rest = ((25 / method.local_steps + 1 / 16) * c.noise + B**2 / 2) / mu
        values: Floats = (1 - alpha * mu / 4) ** rounds * (gap + alpha * drift) + rest
        return values


class FedMLS32(Theorem):
    """f(x_K) - min f <= (10 n D^2 + 8 d) / (lam K (K + 1)) + G^2 lam / (2 n), D = ||x0 - x*||, constant lam and T.

    This is Theorem 3.1 on the product space, where the mean of the f_i(x_i) is G / sqrt(n)-Lipschitz and T >= (4 G^2 +
    sigma^2) lam^2 K^3 / (2 n d) local steps give d. Corollary 3.2 fixes an accuracy eps = 6 sqrt(n) D G / K, lam =
    eps / G^2 and T = 108 sqrt(n) D (4 G^2 + sigma^2) / (G eps). (It prints 36 sqrt(3 n) for 108 sqrt(n) = 36 * 3
    sqrt(n); only the latter follows from Theorem 3.1 for n = 1.) A regularizer's subgradients count in G. ``lambda0``
    and ``first_steps`` with ``schedule="growing"``, lam_0 / k and T_0 k, are the practical rule of Remark 3.3, which is
    not proved.
    """

    paper = "Palenzuela et al. (2025), Corollary 3.2"
    bounds = "objective"

    def steps(self, c: Constants, local_steps: int) -> dict[str, Any]:
        """Corollary 3.2 for the accuracy that the planned rounds can reach; it sets the local steps itself."""
        G, noise = self._lipschitz(c), c.noise
        distance, rounds = c.need("distance", "rounds")
        eps = 6 * math.sqrt(c.n) * distance * G / rounds
        local = math.ceil(108 * math.sqrt(c.n) * distance * (4 * G**2 + noise) / (G * eps))
        return {"lambda0": eps / G**2, "first_steps": local, "schedule": "constant"}

    def _lipschitz(self, c: Constants) -> float:
        G, B = c.need("G", "B")
        return G + B

    def violations(self, method: Any, c: Constants) -> list[str]:
        """A constant schedule, convexity and full participation; any lam and T then have a bound."""
        found = [*_convex(c), *_everyone(c)]
        if method.schedule == "growing":
            found.append("schedule = 'growing' is the practical rule of Remark 3.3, the theorem has a constant one")
        if c.G is None and method.radius is None:
            found.append("the losses are not Lipschitz on the whole space, the theorem then needs a radius")
        return found

    def bound(self, method: Any, c: Constants, rounds: Floats) -> Floats:
        """Theorem 3.1 with the d that the number of local steps gives; no bound before the first round."""
        if method.schedule == "growing":
            raise ValueError(f"{self} has no bound for schedule = 'growing'; use schedule = 'constant'")
        G, noise = self._lipschitz(c), c.noise
        (distance,) = c.need("distance")
        lam, K = method.lambda0, np.where(rounds > 0, rounds, np.nan)
        d = (4 * G**2 + noise) / c.n * lam**2 * K**3 / (2 * method.first_steps)
        out: Floats = (10 * c.n * distance**2 + 8 * d) / (lam * K * (K + 1)) + G**2 * lam / (2 * c.n)
        return np.where(rounds > 0, out, np.inf)


class _SmoothProximalPoint(Theorem):
    """The common part of the theorems on FedProx and FedMSPP with smooth losses: one eta and one accuracy."""

    @abstractmethod
    def made(self, c: Constants) -> Any:
        """The method with the theorem's eta and a tolerance that ensures its accuracy."""

    def steps(self, c: Constants, local_steps: int) -> dict[str, Any]:
        """The theorem's eta; the inner solver stops at its accuracy, however many steps that takes."""
        return dataclasses.asdict(self.made(c))

    def violations(self, method: Any, c: Constants) -> list[str]:
        """Eta and the accuracy of the local problems, where the rounds are known."""
        if c.L is None or c.G is None or c.rounds is None:
            return []
        right = self.made(c)
        step = math.inf if method.prox_step is None else method.prox_step
        found = _above("prox_step", step, right.prox_step, f"the theorem's for {c.rounds} rounds,")
        if method.tolerance is None:
            return [*found, "the local problems are not solved to a tolerance, the theorem needs one"]
        return [*found, *_above("tolerance", method.tolerance, right.tolerance, "the theorem's accuracy,")]


class FedProx1(_SmoothProximalPoint):
    """E ||grad f||^2 <~ (L gap + G^2) max(T^(-2/3), (T I)^(-1/2)) for L-smooth, G-Lipschitz losses, I of n clients.

    Conditions: eta = min(T^(-1/3), sqrt(I / T)) / (3 L), and local problems solved to eps <= min(2 L^2 G^2 eta^3 / I^2,
    G^2 eta / (2 I)) / (L eta + 1). eta = ``prox_step``; T = rounds. <~ hides a constant factor.
    """

    paper = "Yuan & Li (2022), Theorem 1"

    def made(self, c: Constants) -> Any:
        """As the method's own ``from_theory`` has it."""
        L, G, rounds = c.need("L", "G", "rounds")
        maker: Any = REGISTRY["FedProx"]
        return maker.from_theory(L, G, int(rounds), c.participants)


class FedMSPP3(_SmoothProximalPoint):
    """E ||grad f||^2 <~ (L gap + G^2) max(T^(-2/3), (T b I)^(-1/2)): FedProx on minibatches of b samples.

    Conditions: eta = min(T^(-1/3), sqrt(b I / T)) / (8 L), and local problems solved to eps <= min(G^2 eta / (2 (L
    eta + 1)), G^2 eta / (8 b^2), L^2 G^2 eta^3 / (2 b I (L eta + 1))). L and G are those of single samples.
    """

    paper = "Yuan & Li (2022), Theorem 3"

    def made(self, c: Constants) -> Any:
        """As the method's own ``from_theory`` has it."""
        L, G, rounds, batch = c.need("L", "G", "rounds", "batch")
        maker: Any = REGISTRY["FedMSPP"]
        return maker.from_theory(L, G, int(rounds), c.participants, int(batch))

    def violations(self, method: Any, c: Constants) -> list[str]:
        """As for FedProx, where the batch size is known as well."""
        return [] if c.batch is None else super().violations(method, c)


class ProximalPointNonSmooth(Theorem):
    """E ||grad F_r||^2 <~ (gap_r + r G^2) / (r sqrt(T)), F_r the r-Moreau envelope; losses weakly convex, G-Lipschitz.

    Theorems 2 (FedProx) and 4 (FedMSPP). Conditions: eta = r / sqrt(T) for any r < 1 / (2 nu), nu = rho the weak
    convexity of the losses, and exact local solutions. For convex losses r is free; 1 is taken.
    """

    bounds = None

    def __init__(self, paper: str) -> None:
        self.paper = paper  # type: ignore[misc]

    def steps(self, c: Constants, local_steps: int) -> dict[str, Any]:
        """Eta = r / sqrt(T); the local problems get ``local_steps`` subgradient steps of eta / local_steps."""
        eta = self._radius(c) / math.sqrt(c.need("rounds")[0])
        return {"prox_step": eta, "inner_step": eta / local_steps, "inner_steps": local_steps}

    def _radius(self, c: Constants) -> float:
        return 0.99 / (2 * c.rho) if c.rho else 1.0

    def violations(self, method: Any, c: Constants) -> list[str]:
        """Eta sqrt(T) < 1 / (2 nu), which binds for weakly convex problems only."""
        if c.rounds is None or not c.rho:
            return []
        step = math.inf if method.prox_step is None else method.prox_step
        return _above("prox_step * sqrt(rounds)", step * math.sqrt(c.rounds), 1 / (2 * c.rho), "1 / (2 rho)")


class ProxSkip(Theorem):
    """E ||x - x*||^2 <= (1 - min(gamma mu, p^2))^T (||x0 - x*||^2 + (gamma / p)^2 spread) after T iterations.

    Conditions: f_i mu-strongly convex, gamma = ``step`` <= 1 / L, a coin of probability p; p = 1 / sqrt(kappa), kappa =
    L / mu, is best. A round has one iteration or more, so T is at least the number of rounds: that is what the bound
    takes. Control variates start at zero and tend to grad f_i(x*), whence the spread.
    """

    paper = "Mishchenko et al. (2022), Theorem 3.6"
    bounds = "distance"

    def steps(self, c: Constants, local_steps: int) -> dict[str, Any]:
        """Gamma = 1 / L, p = sqrt(mu / L), or 1 / local_steps where no strong convexity is known."""
        (L,) = c.need("L")
        return {"step": 1 / L, "p": math.sqrt(c.mu / L) if c.mu else 1 / local_steps}

    def violations(self, method: Any, c: Constants) -> list[str]:
        """Gamma <= 1 / L, a coin, a convex h, strong convexity and full participation."""
        found = [*_smooth(c), *_convex(c), *_everyone(c), *_curved(c)]
        if c.L is not None:
            found += _above("step", method.step, 1 / c.L, "1 / L")
        if method.p is None:
            found.append("local_steps is a fixed number, the theorem tosses a coin; give p = 1 / local_steps")
        return found

    def bound(self, method: Any, c: Constants, rounds: Floats) -> Floats:
        """As stated, with one iteration per round."""
        distance, spread = c.need("distance", "spread")
        mu, p = _positive_mu(self, c), method.probability
        start = distance**2 + (method.step / p) ** 2 * spread
        values: Floats = (1 - min(method.step * mu, p**2)) ** rounds * start
        return values


class Scaffold(Theorem):
    """eta <= (I / n)^(2/3) / (24 L tau eta_g), eta_g >= 1, I of n clients: non-convex; O(.) bounds.

    For convex f_i the published condition is eta <= 1 / (81 L tau eta_g).
    """

    paper = "Karimireddy et al. (2020), Theorem VII"

    def steps(self, c: Constants, local_steps: int) -> dict[str, Any]:
        """eta_g = sqrt(I), which the theory recommends, and equality for eta."""
        server = math.sqrt(c.participants)
        return {
            "local_steps": local_steps,
            "step": self._limit(c) / (server * local_steps),
            "server_step": server,
        }

    def _limit(self, c: Constants) -> float:
        return math.pow(c.participants / c.n, 2 / 3) / (24 * c.need("L")[0])

    def violations(self, method: Any, c: Constants) -> list[str]:
        """Both step conditions."""
        if c.L is None:
            return _smooth(c)
        reach = method.server_step * method.step * method.local_steps
        return [
            *_above("server_step * step * local_steps", reach, self._limit(c), "(I / n)^(2/3) / (24 L)"),
            *_below("server_step", method.server_step, 1, "1, the least allowed,"),
        ]


class DouglasRachford(Theorem):
    """alpha < (sqrt(17) - 1) / 2 and eta < (sqrt(17) - 1 - 2 alpha) / (2 L (alpha + 2)); h convex; O(1/T) bounds.

    The condition for exact local solutions.
    """

    paper = "Tran-Dinh et al. (2021), Theorem 3.1"
    _ROOT: ClassVar[float] = math.sqrt(17) - 1

    def steps(self, c: Constants, local_steps: int) -> dict[str, Any]:
        """Alpha = 1 and 0.99 of the limit for eta, which is not allowed itself."""
        (L,) = c.need("L")
        eta = 0.99 * self._limit(c, 1.0)
        return {"eta": eta, "alpha": 1.0, "inner_steps": local_steps, "inner_step": 1 / (L + 1 / eta)}

    def _limit(self, c: Constants, alpha: float) -> float:
        return (self._ROOT - 2 * alpha) / (2 * c.need("L")[0] * (alpha + 2))

    def violations(self, method: Any, c: Constants) -> list[str]:
        """Both conditions and a convex h."""
        if c.L is None:
            return [*_smooth(c), *_convex(c)]
        if method.alpha >= self._ROOT / 2:
            return [*_convex(c), f"alpha = {method.alpha:.3g} is not below (sqrt(17) - 1) / 2 = {self._ROOT / 2:.3g}"]
        formula = "(sqrt(17) - 1 - 2 alpha) / (2 L (alpha + 2))"
        return [*_convex(c), *_above("eta", method.eta, self._limit(c, method.alpha), formula)]


def _curved(c: Constants) -> list[str]:
    return [] if c.mu else ["mu = 0: no strong convexity is known, the theorem needs some"]


def _positive_mu(theorem: Theorem, c: Constants) -> float:
    if not c.mu:
        raise ValueError(f"{theorem} needs mu > 0; give mu")
    return c.mu


THEOREMS: dict[str, dict[str, Theorem]] = {
    "ProximalGradient": {"10.15": ProximalGradientDescent()},
    "Zhang": {"3.5": Zhang35(), "3.6": Zhang36(), "3.8": Zhang38()},
    "FedCanon": {"1": FedCanon1(), "2": FedCanon2()},
    "FedCanonII": {"1": FedCanon1(), "2": FedCanon2()},
    "FedMLS": {"3.2": FedMLS32()},
    "FedProx": {"1": FedProx1(), "2": ProximalPointNonSmooth("Yuan & Li (2022), Theorem 2")},
    "FedMSPP": {"3": FedMSPP3(), "4": ProximalPointNonSmooth("Yuan & Li (2022), Theorem 4")},
    "Scaffnew": {"3.6": ProxSkip()},
    "ProxScaffnew": {"3.6": ProxSkip()},
    "Scaffold": {"VII": Scaffold()},
    "FedDR": {"3.1": DouglasRachford()},
}
"""Theorems by method and number; the first is the one meant when no number is given (the second of FedProx and FedMSPP
when the loss is not smooth)."""


def find(name: str, constants: Constants | None = None, number: str | None = None) -> Theorem:
    """The theorem on a method, by number, or the one that fits the constants."""
    if name not in THEOREMS:
        raise ValueError(f"no theorem on {name!r}{suggest(name, THEOREMS)} (there are some on: {', '.join(THEOREMS)})")
    known = THEOREMS[name]
    if number is None:
        rough = constants is not None and constants.L is None and name in ("FedProx", "FedMSPP")
        number = list(known)[1 if rough else 0]
    if number not in known:
        raise ValueError(f"no theorem {number!r} on {name} (known: {', '.join(known)})")
    return known[number]


def steps(name: str, constants: Constants, local_steps: int = 10, theorem: str | None = None) -> dict[str, Any]:
    """The fields of a method with the largest steps that a theorem allows.

    >>> c = Constants(L=1.0, n=32)
    >>> {k: round(v, 6) for k, v in steps("Zhang", c, local_steps=5).items()}
    {'local_steps': 5, 'step': 0.01, 'server_step': 2.0}
    """
    if math.isinf(constants.rho):
        raise ValueError("the regularizer is not even weakly convex, so no theorem gives steps; choose them yourself")
    return find(name, constants, theorem).steps(constants, local_steps)


def auto(name: str, constants: Constants, local_steps: int = 10) -> AnyAlgorithm:
    """The method with practical steps, larger than theory's: the class's own ``auto``.

    Losses without smoothness constant are treated as if their curvature were 1. When a round's clients may weigh more
    than on average, the steps are for clients that much less smooth.
    """
    if name not in REGISTRY:
        raise ValueError(f"unknown algorithm {name!r}{suggest(name, REGISTRY)} (known: {', '.join(sorted(REGISTRY))})")
    L = constants.need("scale")[0] if constants.L is None else constants.L
    return REGISTRY[name].auto(L * constants.amplification, constants.rho, local_steps)


def outside(algorithm: AnyAlgorithm, constants: Constants, theorem: str | None = None) -> list[str]:
    """A sentence for every condition of the method's theorem that does not hold; none where there is no theorem.

    >>> from fedcomposite.algorithms import build
    >>> outside(build("ProximalGradient", step=3.0), Constants(L=1.0))
    ['step = 3 is above 2 / (L + rho) = 2']
    """
    name = type(algorithm).__name__
    if name not in THEOREMS:
        return []
    if math.isinf(constants.rho):
        return ["the regularizer is not even weakly convex, so no theorem applies"]
    return find(name, constants, theorem).violations(algorithm, constants)


def bound(run: Run, algorithm: AnyAlgorithm, constants: Constants, theorem: str | None = None) -> Floats:
    """The theorem's right-hand side for every record of a run's history.

    What it limits, in expectation, is told by the theorem's ``bounds``: ``"stationarity"``, the mean over the models so
    far of the squared stationarity, measured at the theorem's own step (:meth:`Theorem.measured_at`; other steps are
    refused); ``"objective"``, F - min F; or ``"distance"``, ||x - x*||^2.

    Raises
    ------
    ValueError
        When a constant is missing (it says which), when a condition is violated, or when the paper gives no number.
    """
    chosen = find(type(algorithm).__name__, constants, theorem)
    rounds = np.asarray([record["round"] for record in run.history], np.float64)
    values = chosen.bound(algorithm, constants, rounds)
    if broken := chosen.violations(algorithm, constants):
        raise ValueError(f"{chosen} does not apply: {'; '.join(broken)}")
    if (step := chosen.measured_at(algorithm)) is not None:
        used = run.history[0]["stationarity_step"]
        if not math.isclose(used, step, rel_tol=1e-9):
            raise ValueError(
                f"{chosen} bounds the prox-gradient mapping at step {step:.6g}, this run measured it at {used:.6g}; "
                f"simulate with stationarity_step = {step!r}"
            )
    return values
