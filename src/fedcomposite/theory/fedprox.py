"""FedProx and FedMSPP: Yuan & Li, *On convergence of FedProx*, 2022."""

from __future__ import annotations

import dataclasses
import math
from abc import abstractmethod
from typing import Any

from fedcomposite.algorithms.fedmspp import FedMSPP
from fedcomposite.algorithms.fedprox import FedProx
from fedcomposite.theory.base import Theorem, above
from fedcomposite.theory.measured import Constants


class _SmoothProximalPoint(Theorem):
    """The common part of the theorems on FedProx and FedMSPP with smooth losses: one eta and one accuracy."""

    chooses = ("prox_step", "step", "tolerance")

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
        found = above("prox_step", step, right.prox_step, f"the theorem's for {c.rounds} rounds,")
        if method.tolerance is None:
            return [*found, "the local problems are not solved to a tolerance, the theorem needs one"]
        return [*found, *above("tolerance", method.tolerance, right.tolerance, "the theorem's accuracy,")]


class FedProx1(_SmoothProximalPoint):
    """E ||grad f||^2 <~ (L gap + G^2) max(T^(-2/3), (T I)^(-1/2)) for L-smooth, G-Lipschitz losses, I of n clients.

    Conditions: eta = min(T^(-1/3), sqrt(I / T)) / (3 L), and local problems solved to eps <= min(2 L^2 G^2 eta^3 / I^2,
    G^2 eta / (2 I)) / (L eta + 1). eta = ``prox_step``; T = rounds. <~ hides a constant factor. The paper's L and G are
    those of a sample's loss; the local problems are on all of a client's samples, so its whole loss may stand for one.
    """

    paper = "Yuan & Li (2022), Theorem 1"

    def made(self, c: Constants) -> Any:
        """As the method's own ``from_theory`` has it."""
        L, G, rounds = c.need("L", "G", "rounds")
        return FedProx.from_theory(L, G, int(rounds), c.participants)


class FedMSPP3(_SmoothProximalPoint):
    """E ||grad f||^2 <~ (L gap + G^2) max(T^(-2/3), (T b I)^(-1/2)): FedProx on minibatches of b samples.

    Conditions: eta = min(T^(-1/3), sqrt(b I / T)) / (8 L), and local problems solved to eps <= min(G^2 eta / (2 (L
    eta + 1)), G^2 eta / (8 b^2), L^2 G^2 eta^3 / (2 b I (L eta + 1))). L and G are those of single samples, of which
    a minibatch may consist.
    """

    paper = "Yuan & Li (2022), Theorem 3"

    def made(self, c: Constants) -> Any:
        """As the method's own ``from_theory`` has it."""
        rounds, batch = c.need("rounds", "batch")
        return FedMSPP.from_theory(*c.of_samples, int(rounds), c.participants, int(batch))

    def violations(self, method: Any, c: Constants) -> list[str]:
        """As for FedProx, where the batch size is known as well."""
        return [] if c.batch is None else super().violations(method, c)


class ProximalPointNonSmooth(Theorem):
    """E ||grad F_r||^2 <~ (gap_r + r G^2) / (r sqrt(T)), F_r the r-Moreau envelope; losses weakly convex, G-Lipschitz.

    Theorems 2 (FedProx) and 4 (FedMSPP). Conditions: eta = r / sqrt(T) for any r < 1 / (2 nu), nu = rho the weak
    convexity of the losses, and exact local solutions. For convex losses r is free; 1 is taken.
    """

    bounds = None
    chooses = ("prox_step", "step", "local_steps")

    def __init__(self, paper: str) -> None:
        self.paper = paper  # type: ignore[misc]

    def steps(self, c: Constants, local_steps: int) -> dict[str, Any]:
        """Eta = r / sqrt(T); the local problems get ``local_steps`` subgradient steps of eta / local_steps."""
        eta = self._radius(c) / math.sqrt(c.need("rounds")[0])
        return {"prox_step": eta, "step": eta / local_steps, "local_steps": local_steps}

    def _radius(self, c: Constants) -> float:
        return 0.99 / (2 * c.rho) if c.rho else 1.0

    def violations(self, method: Any, c: Constants) -> list[str]:
        """Eta sqrt(T) < 1 / (2 nu), which binds for weakly convex problems only."""
        if c.rounds is None or not c.rho:
            return []
        step = math.inf if method.prox_step is None else method.prox_step
        return above("prox_step * sqrt(rounds)", step * math.sqrt(c.rounds), 1 / (2 * c.rho), "1 / (2 rho)")
