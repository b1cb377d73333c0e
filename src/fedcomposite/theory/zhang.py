"""Zhang, Hu & Johansson, *Non-convex composite federated learning with heterogeneous data*, 2025."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any, ClassVar

from fedcomposite.theory.base import (
    Correction,
    Floats,
    Theorem,
    above,
    below,
    convex,
    curved,
    everyone,
    positive_mu,
    smooth_only,
)
from fedcomposite.theory.measured import Constants


class _Zhang(Theorem):
    """The common part of the theorems on Zhang's method: eta~ = eta_g eta tau is small and eta_g is not."""

    chooses = ("step", "server_step")
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
        found = [*smooth_only(c), *convex(c), *everyone(c)]
        if not method.growing_prox:
            found.append("growing_prox = False is the paper's ablation, which the theorem does not cover")
        if c.L is not None:
            found += above("server_step * step * local_steps", method.round_step, self.limit(c), self.formula)
        return found


class _General(_Zhang):
    """Conditions (13) of Theorems 3.5 and 3.6: eta~ <= 1 / (10 L) and eta_g >= max(1.5, sqrt(n / 8))."""

    formula = "1 / (10 L)"
    noise: ClassVar[tuple[float, float]]
    """The printed factor of sigma^2 / (n tau b), and what multiplies what a round adds in the derivable one."""

    def corrections(self, method: Any, c: Constants) -> list[Correction]:
        """The factor of the noise, which is the printed one only where eta_g is about sqrt(n) or more.

        A round adds eta~^2 sigma^2 / (n tau b) times 1, from (A.29); 4 n / eta_g^2, from Lemma A.2, where the clients'
        noise is not averaged; and (10 + 40 / eta_g^2) n (eta~ L)^2 / eta_g^2, from the drift (A.8) in both. (A.32) has
        6 for the sum, but (13) allows n / eta_g^2 = 8, where it is 35.
        """
        printed, times = self.noise
        square, reach = method.server_step**2, method.round_step * c.need("L")[0]
        own = 1 + 4 * c.n / square + (10 + 40 / square) * c.n * reach**2 / square
        note = (
            f"(A.32) has 6 for 1 + 4 n / eta_g^2 + (10 + 40 / eta_g^2) n (eta~ L)^2 / eta_g^2 = {own:.3g}: it needs "
            "eta_g of about sqrt(n), (13) allows sqrt(n / 8)"
        )
        return [Correction("sigma^2 / (n tau b)", printed, times * own, note)]

    def limit(self, c: Constants) -> float:
        """1 / (10 L)."""
        return 1 / (10 * c.need("L")[0])

    def server(self, c: Constants) -> float:
        """max(1.5, sqrt(n / 8)), the least eta_g."""
        return max(1.5, math.sqrt(c.n / 8))

    def violations(self, method: Any, c: Constants) -> list[str]:
        """Conditions (13), a convex h and full participation."""
        least = below("server_step", method.server_step, self.server(c), "max(1.5, sqrt(n / 8))")
        return [*super().violations(method, c), *least]


class Zhang35(_General):
    """mean ||G||^2 <= Omega / (0.3 eta~ R) + A sigma^2 / (n tau b) + 187 L^2 eta~^2 B^2 / eta_g^2.

    Conditions (13): eta~ = eta_g eta tau <= 1 / (10 L) and eta_g >= max(1.5, sqrt(n / 8)). G is taken at eta~, the mean
    over R models. Omega = F(x) - min F + ||Lambda - mean Lambda||^2 / (n eta~), (10); at the start the corrections are
    zero, so the second term is eta~ drift / eta_g^2. The paper has A = 20; its proof gives up to 117, as
    :meth:`corrections` tells.
    """

    paper = "Zhang, Hu & Johansson (2025), Theorem 3.5"
    bounds = "stationarity"
    noise = (20.0, 1 / 0.3)

    def measured_at(self, method: Any) -> float | None:
        """Eta~."""
        return float(method.round_step)

    def bound(self, method: Any, c: Constants, rounds: Floats) -> Floats:
        L, B = c.need("L", "B")
        s = float(method.round_step)
        (own,) = self.corrections(method, c)
        rest = own.derivable * c.noise / (c.n * method.local_steps) + 187 * (L * s * B / method.server_step) ** 2
        values: Floats = _omega(method, c) / (0.3 * s * (rounds + 1)) + rest
        return values


class Zhang36(_General):
    """F - min F <= (1 - mu eta~ / 3)^R Omega + A sigma^2 / (mu n tau b) + 168 L^2 eta~^2 B^2 / (mu eta_g^2).

    The conditions of Theorem 3.5, and the proximal Polyak-Lojasiewicz inequality with mu, which strong convexity of f
    implies. The paper has A = 18; its proof gives up to 106, as :meth:`corrections` tells.
    """

    paper = "Zhang, Hu & Johansson (2025), Theorem 3.6"
    bounds = "objective"
    noise = (18.0, 3.0)

    def violations(self, method: Any, c: Constants) -> list[str]:
        """Those of Theorem 3.5, and mu > 0."""
        return [*super().violations(method, c), *curved(c)]

    def bound(self, method: Any, c: Constants, rounds: Floats) -> Floats:
        L, B = c.need("L", "B")
        mu, s = positive_mu(self, c), float(method.round_step)
        (own,) = self.corrections(method, c)
        rest = (
            own.derivable * c.noise / (mu * c.n * method.local_steps) + 168 * (L * s * B / method.server_step) ** 2 / mu
        )
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
        return positive_mu(self, c) / (150 * c.need("L")[0] ** 2)

    def server(self, c: Constants) -> float:
        """sqrt(n)."""
        return math.sqrt(c.n)

    def violations(self, method: Any, c: Constants) -> list[str]:
        """A convex h, full participation, strong convexity and both step conditions."""
        if not c.mu:
            return [*convex(c), *everyone(c), *curved(c)]
        found = super().violations(method, c)
        if not math.isclose(method.server_step, self.server(c), rel_tol=1e-6):
            found.append(f"server_step = {method.server_step:.3g} is not sqrt(n) = {self.server(c):.3g}")
        return found

    def bound(self, method: Any, c: Constants, rounds: Floats) -> Floats:
        B, distance, drift = c.need("B", "distance", "drift")
        mu, s = positive_mu(self, c), float(method.round_step)
        start = distance**2 + (s / method.server_step) ** 2 * drift
        rest = 30 * s * c.noise / (mu * c.n * method.local_steps) + 21 * s * (B / method.server_step) ** 2 / mu
        values: Floats = (1 - mu * s / 3) ** rounds * start + rest
        return values


def _omega(method: Any, c: Constants) -> float:
    """Omega of the first model, (10)."""
    gap, drift = c.need("gap", "drift")
    return gap + float(method.round_step) * drift / float(method.server_step) ** 2
