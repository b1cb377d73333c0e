"""FedCanon: Zhou, Zhong, Shi, Wen & Yu, *Non-convex composite federated learning*, 2025."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any, ClassVar

from fedcomposite.theory.base import Correction, Floats, Theorem, above, curved, everyone, positive_mu, smooth_only
from fedcomposite.theory.measured import Constants


class _FedCanon(Theorem):
    """The common part of the theorems on FedCanon: alpha (rho + L) + 4 alpha^2 L^2 <= q and (6 + delta) (beta tau L)^2
    <= r.

    Here delta = (1 - alpha rho)^-2, beta = ``step``, alpha = ``server_step``.
    """

    chooses = ("step", "server_step")

    noise: ClassVar[tuple[float, float]]
    """The printed factor of sigma^2 / (b tau), and what multiplies 6 + delta in the derivable one."""

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

    def corrections(self, method: Any, c: Constants) -> list[Correction]:
        """The factor of the noise: Appendices D and E reach one with 6 + delta, delta >= 1, and print less."""
        printed, each = self.noise
        own = each * (6 + (1 - method.server_step * c.rho) ** -2)
        note = (
            f"the proof ends with {each:g} (6 + delta), delta = (1 - alpha rho)^-2 >= 1, so at least {7 * each:g}; "
            f"{printed:g} would need delta <= {printed / each - 6:g}"
        )
        return [Correction("sigma^2 / (b tau)", printed, own, note)]

    def violations(self, method: Any, c: Constants) -> list[str]:
        """Both step conditions and full participation."""
        if c.L is None:
            return [*smooth_only(c), *everyone(c)]
        alpha, reach = method.server_step, method.step * method.local_steps * c.L
        if alpha * c.rho >= 1:
            return [f"server_step = {alpha:.3g} is not below 1 / rho = {1 / c.rho:.3g}", *everyone(c)]
        used = alpha * (c.rho + c.L) + 4 * (alpha * c.L) ** 2
        drift = (6 + (1 - alpha * c.rho) ** -2) * reach**2
        return [
            *above("alpha (rho + L) + 4 alpha^2 L^2 at alpha = server_step", used, self.q(c), "its limit"),
            *above("(6 + delta) (step * local_steps * L)^2", drift, self.r(c, alpha), "its limit"),
            *everyone(c),
        ]


class FedCanon1(_FedCanon):
    """mean ||G_alpha||^2 <= 8 (gap + alpha drift) / (alpha T) + A sigma^2 / (b tau) + sigma^2 / (8 b) + B^2.

    Conditions: alpha (rho + L) + 4 alpha^2 L^2 <= 1/2 and 192 (6 + delta) beta^2 tau^2 L^2 <= 1. The mean is over T
    models; the paper's B_h bounds the squared norm of subgradients, B_h = B^2. It prints A = 50; its proof gives
    8 (6 + delta), 56 or more: see :meth:`corrections`.
    """

    paper = "Zhou et al. (2025), Theorem 1"
    bounds = "stationarity"
    noise = (50.0, 8.0)

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
        gap, drift, B = c.need("gap", "drift", "B")
        alpha = float(method.server_step)
        (own,) = self.corrections(method, c)
        rest = (own.derivable / method.local_steps + 1 / 8) * c.noise + B**2
        values: Floats = 8 * (gap + alpha * drift) / (alpha * (rounds + 1)) + rest
        return values


class FedCanon2(_FedCanon):
    """F - min F <= (1 - alpha mu / 4)^T (gap + alpha drift) + (A / tau + 1 / 16) sigma^2 / (mu b) + B^2 / (2 mu).

    Conditions: ||G_alpha||^2 >= 2 mu (F - min F), (14); alpha (rho + L) + 4 alpha^2 L^2 <= min(1/2, (4 mu (rho + L) +
    64 L^2) / mu^2) and 12 (6 + delta) beta^2 tau^2 L^2 <= min(1/16, 1 - alpha mu / 4). The paper prints
    A = 25; its proof gives 4 (6 + delta), 28 or more: see :meth:`corrections`.
    """

    paper = "Zhou et al. (2025), Theorem 2"
    bounds = "objective"
    noise = (25.0, 4.0)

    def q(self, c: Constants) -> float:
        """min(1/2, (4 mu (rho + L) + 64 L^2) / mu^2)."""
        (L,), mu = c.need("L"), positive_mu(self, c)
        return min(0.5, (4 * mu * (c.rho + L) + 64 * L**2) / mu**2)

    def r(self, c: Constants, alpha: float) -> float:
        """min(1/16, 1 - alpha mu / 4) / 12."""
        return min(1 / 16, 1 - alpha * c.mu / 4) / 12

    def violations(self, method: Any, c: Constants) -> list[str]:
        """Both step conditions, full participation and mu > 0."""
        return super().violations(method, c) if c.mu else [*curved(c), *everyone(c)]

    def bound(self, method: Any, c: Constants, rounds: Floats) -> Floats:
        gap, drift, B = c.need("gap", "drift", "B")
        mu, alpha = positive_mu(self, c), float(method.server_step)
        (own,) = self.corrections(method, c)
        rest = ((own.derivable / method.local_steps + 1 / 16) * c.noise + B**2 / 2) / mu
        values: Floats = (1 - alpha * mu / 4) ** rounds * (gap + alpha * drift) + rest
        return values
