"""Cox's model with one baseline for all sites, from sums over those at risk at the times of a grid.

Patients of different sites are compared here, so that the partial likelihood is no sum over sites. But at every time it
needs three sums over all patients at risk, of exp(x'b), of it times x, and times x x', and these add up. With times
rounded to the grid, and Breslow's ties, this is the partial likelihood of pooled patients exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fedcomposite.analysis.survival_curves import grid_of
from fedcomposite.problems import Problem
from fedcomposite.problems.losses import Cox
from fedcomposite.runtime.driver import CopiesDriver, Driver, driver_of
from fedcomposite.runtime.protocol import Request, Rows, Sums, risk_sums


class CommonBaseline:
    """A transport that answers what a fit asks with the partial likelihood of one baseline; all else it passes on."""

    centre = None

    def __init__(self, inner: Driver, grid: Tensor) -> None:
        self._ask, self._parties, self._grid = inner.ask, inner.transport, grid

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parties, name)

    def ask(self, requests: Sequence[Any]) -> list[Any]:
        """The answers, in one exchange."""
        asked = [self._asked(one) for one in requests]
        told = iter(self._ask([one for part in asked for one in part]))
        return [self._made(one, [next(told) for _ in part]) for one, part in zip(requests, asked, strict=True)]

    def _asked(self, request: Any) -> list[Any]:
        if not isinstance(request, Request) or request.name not in ("newton", "losses", "information"):
            return [request]
        if request.name == "information" or request.by_site:
            raise ValueError("with one baseline for all sites there are no sandwich errors and no fits of single sites")
        if request.name == "newton":
            return [risk_sums(request.arrays["x"], self._grid, request.arrays["working"], request.rows)]
        models = request.arrays["models"]
        none = torch.zeros(models.shape[1], dtype=torch.bool)
        return [risk_sums(x, self._grid, none, rows) for rows in _parts(request.rows) for x in models]

    def _made(self, request: Any, told: list[Any]) -> Any:
        if not isinstance(request, Request) or request.name not in ("newton", "losses"):
            return told[0]
        if request.name == "newton":
            return assembled(told[0], request.arrays["working"])
        k = len(request.arrays["models"])
        weight = told[0]["weight"][1].item()
        if request.rows.held:  # what the samples held out add to the others'; all are at the times of these two
            weight, others = float(told[0]["events"].sum()), told[k:]
            every = [{key: one[key] + more[key] for key in one} for one, more in zip(told[:k], others, strict=True)]
            total = _deviances(every) - _deviances(others)
        else:
            total = _deviances(told)
        none = total.new_zeros(k, 2, 2, 0)
        sums = torch.tensor([weight, weight], dtype=torch.float64)
        return {"weight": sums, "deviance": total, "error": total.new_zeros(0), "histogram": none}


class CommonDriver(Driver):
    """A driver of fits with one baseline: ``inner`` asks the parties, and is the one that counts, watches and logs."""

    def __init__(self, inner: Driver, grid: Tensor) -> None:
        self.inner, self.made = inner, CommonBaseline(inner, grid)
        super().__init__(self.made)

    def ask(self, requests: Sequence[Any]) -> list[Any]:
        """Answers made of what the parties tell of those at risk."""
        self.inner.tasks = self.tasks
        answers = self.made.ask(requests)
        inner = self.inner
        self.exchanges, self.bytes_up, self.bytes_down = inner.exchanges, inner.bytes_up, inner.bytes_down
        return answers


def _parts(rows: Rows) -> list[Rows]:
    return [rows, rows.others] if rows.held else [rows]


def _deviances(told: Sequence[Sums]) -> Tensor:
    return torch.stack([2 * (_loss(one) - _lowest(one)) for one in told])


def _loss(sums: Sums) -> Tensor:
    """Minus the logarithm of the partial likelihood."""
    d, there = sums["events"], sums["events"] > 0
    return (d * torch.where(there, sums["sizes"], 1.0).log()).sum() - sums["margins"].sum()


def _lowest(sums: Sums) -> Tensor:
    made: Tensor = torch.special.xlogy(sums["events"], sums["events"]).sum()
    return made


def assembled(sums: Sums, working: Tensor) -> Sums:
    """Loss, gradient and a piece of the Hessian from sums over those at risk, as a fit takes them."""
    d = torch.where(sums["events"] > 0, sums["events"], 0.0)
    size = torch.where(sums["events"] > 0, sums["sizes"], 1.0)
    means = sums["firsts"] / size.unsqueeze(1)
    at = working.nonzero().squeeze(1)
    i, j = torch.triu_indices(len(at), len(at))
    chosen = means[:, at]
    second = d @ (sums["seconds"] / size.unsqueeze(1)) - d @ (chosen[:, i] * chosen[:, j])
    weight, count = sums["weight"][1], sums["weight"][2]
    made = {"loss": _loss(sums).view(1), "gradient": d @ means - sums["features"], "hessian": second}
    return {"weight": torch.stack([weight, weight, count]), **made}


def common_baseline(problem: Problem, *, times: Sequence[float] | None = None, driver: Driver | None = None) -> Driver:
    """A driver for fits, paths, cross-validation and intervals of Cox models with one baseline for all sites.

    Parameters
    ----------
    problem : Problem
        With the loss ``"cox"``, Breslow's ties and ``weights="samples"``. Strata are not looked at.
    times : sequence of float, optional
        The grid to which times are rounded, up; all times of the samples if left out, which sites do not tell.
    driver : Driver, optional
        Who answers; the problem's own silos if left out.

    Examples
    --------
    >>> import fedcomposite as fc
    >>> silos = fc.data.load("survival", clients=3, samples=60)
    >>> problem = fc.Problem(silos, loss="cox", regularizer=fc.regularizers.L1(1.0), weights="samples")
    >>> found = fc.path(problem, count=5, driver=fc.analysis.common_baseline(problem, times=range(6, 130, 6)))
    >>> int(found.nonzeros[0]), bool(found.converged.all())
    (0, True)
    """
    loss = problem.loss
    if not isinstance(loss, Cox) or loss.ties != "breslow" or problem.weighting != "samples":
        raise ValueError("one baseline is for loss='cox' with Breslow's ties and weights='samples'")
    inner = driver_of(problem, driver)
    if inner.budgeted:
        raise ValueError("one baseline for all sites goes without a privacy budget: its sums over time have no noise")
    inner = inner.inner if isinstance(inner, CopiesDriver) else inner  # a likelihood of each copy; who fits takes means
    return CommonDriver(inner, grid_of(times, inner))
