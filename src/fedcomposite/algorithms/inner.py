"""The server's problem inside a proximal Newton step, a quadratic plus h on k coordinates:

    minimise over u    g'(u - x) + (1/2) (u - x)' H (u - x) + h(u)

Proximal gradient with momentum and restart (O'Donoghue & Candes 2015) finds which pieces of h are active, and
semismooth Newton steps on the fixed-point equation u = P_s(u - s (g + H (u - x))) then land on the solution, since the
prox of most h is linear, or nearly so, on each piece. A separable h has a step per coordinate, 1 / (lambda H_jj), where
lambda is the largest eigenvalue of H scaled to a unit diagonal: how the features are scaled does not matter then.

Every accepted point lowers the model, also where h is weakly convex and the model is not convex: the limit is
a stationary point, and what is returned is a value of the prox, so zeros are exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

_MOST = 500  # proximal gradient steps
_NEWTONS = 100  # semismooth Newton steps in a row
_PARTS = (1.0, 0.5, 0.25, 0.1, 0.03, 0.01)  # lengths of such a step that are tried
_DENSE = 2000  # coordinates up to which the prox of a coupled h is differentiated entry by entry
_ROOM = 1 << 22  # entries of the vectors that are differentiated at a time


@dataclass(frozen=True)
class Model:
    """A quadratic plus h near x."""

    x: Tensor  # (k,)
    g: Tensor  # (k,), gradient of f at x
    H: Tensor  # (k, k)
    prox: Callable[[Tensor, Tensor], Tensor]  # of h on the k coordinates, for (..., k) and (k,) or (1,) steps
    value: Callable[[Tensor], Tensor]  # of h on the k coordinates
    separable: bool
    rho: float

    def change(self, u: Tensor) -> float:
        """The model at u, up to a constant."""
        d = u - self.x
        return float(self.g @ d + d @ (self.H @ d) / 2 + self.value(u))

    def gradient(self, u: Tensor) -> Tensor:
        """The gradient of the quadratic at u."""
        return self.g + self.H @ (u - self.x)


class _State(NamedTuple):
    """A point, its image under the prox-gradient map, and how far apart they are."""

    u: Tensor
    v: Tensor  # before the prox
    p: Tensor  # after it
    residual: float


def minimise(model: Model, tolerance: float) -> Tensor:
    """A stationary point of the model, no larger than at x, to a prox-gradient residual of ``tolerance``.

    A model that resists is solved by proximal point steps: with a multiple of its diagonal added, which falls tenfold.
    """
    if not len(model.x):
        return model.x
    u, solved = _descend(model, tolerance)
    added = 1.0
    while not solved and added > 1e-12:
        near = replace(model, x=u, g=model.gradient(u), H=model.H + torch.diag(added * model.H.diagonal()))
        u, _ = _descend(near, tolerance)
        state = _look(model, u, _steps(model))
        solved, added = state.residual <= max(tolerance, _rounding(model, u)), added / 10
    return u


def _descend(model: Model, tolerance: float) -> tuple[Tensor, bool]:
    """Lower the model from x on; also whether the tolerance was reached, or nothing more can be."""
    steps = _steps(model)
    best, lowest = model.x, model.change(model.x)
    slack = 10 * torch.finfo(best.dtype).eps * (1 + abs(lowest))
    momentum, y, tries, due = 1.0, best, 0, 0
    for iteration in range(_MOST):
        if iteration == due:
            tries, due = tries + 1, due + 5 * 2 ** min(tries, 7)
            goal = max(tolerance, _rounding(model, best))
            found = _polish(model, best, steps, goal)
            value = model.change(found.p)
            if value <= lowest + slack:
                best, lowest, y, momentum = found.p, min(value, lowest), found.p, 1.0
                if found.residual <= goal:
                    return best, True
        u = model.prox(y - steps * model.gradient(y), steps)
        value = model.change(u)
        if value > lowest + slack or float((y - u) @ ((u - best) / steps)) > 0:
            if y is best:  # a plain step that does not lower the model: as far as rounding allows
                return best, True
            y, momentum = best, 1.0
            continue
        following = (1 + math.sqrt(1 + 4 * momentum**2)) / 2
        y = u + (momentum - 1) / following * (u - best)
        if momentum == 1.0 and torch.equal(u, best):
            return best, True
        best, lowest, momentum = u, min(value, lowest), following
    return best, False


def _rounding(model: Model, u: Tensor) -> float:
    """The residual that rounding leaves near u."""
    eps, size = torch.finfo(u.dtype).eps, torch.linalg.vector_norm
    return 4 * eps * float(size(model.H.abs() @ (u.abs() + model.x.abs())) + size(model.g))


def _steps(model: Model) -> Tensor:
    """Steps at which a plain proximal gradient step lowers the model, ``(k,)`` or ``(1,)``."""
    H = model.H
    tiny = torch.finfo(H.dtype).tiny
    diagonal = H.diagonal().clamp(min=tiny) if model.separable else H.new_ones(1)
    root = diagonal.sqrt()
    largest = 1.02 * _largest(H / root / root.unsqueeze(-1))
    steps = 1 / (diagonal * max(largest, tiny))
    return steps.clamp(max=0.5 / model.rho) if model.rho > 0 else steps


def _largest(H: Tensor) -> float:
    """The largest eigenvalue: exactly for small matrices, by power iteration for others."""
    if len(H) <= 300:
        return float(torch.linalg.eigvalsh(H)[-1])
    v = torch.linalg.vector_norm(H, dim=1)
    for _ in range(60):
        u = H @ v
        v = u / torch.linalg.vector_norm(u).clamp(min=torch.finfo(u.dtype).tiny)
    return 1.05 * float(v @ (H @ v))


def _look(model: Model, u: Tensor, steps: Tensor) -> _State:
    v = u - steps * model.gradient(u)
    p = model.prox(v, steps)
    return _State(u, v, p, float(torch.linalg.vector_norm((u - p) / steps)))


def _polish(model: Model, start: Tensor, steps: Tensor, tolerance: float) -> _State:
    """Semismooth Newton steps, each of which halves the residual or lowers a convex model more than a plain step."""
    now = _look(model, start, steps)
    for _ in range(_NEWTONS):
        if now.residual <= tolerance:
            break
        move = _newton(model, now, steps)
        if move is None or not bool(torch.isfinite(move).all()):
            break
        lowest = model.change(now.p)
        for part in _PARTS:
            then = _look(model, now.u + part * move, steps)
            if then.residual <= 0.5 * now.residual or (model.rho == 0 and model.change(then.p) < lowest):
                break
        else:
            break
        now = then if then.residual <= 0.5 * now.residual else _look(model, then.p, steps)
    return now


def _newton(model: Model, at: _State, steps: Tensor) -> Tensor | None:
    """The move to the solution of u - P(u - s grad(u)) = 0 with P linearised; None where that has none."""
    gap = at.u - at.p
    if model.separable:
        slope = _slopes(model, at.v, steps)
        active = slope > 1e-8
        move = -gap
        if not bool(active.any()):
            return move
        # On active coordinates (1 - p) z + p s (H z) = -gap, where z is known on the others; divided by p s.
        scale = (slope * steps)[active]
        rest = model.H[active] @ move.masked_fill(active, 0.0)
        A = model.H[active][:, active] + torch.diag((1 - slope[active]) / scale)
        solved, failed = torch.linalg.solve_ex(A, -gap[active] / scale - rest)
        move[active] = solved
        return None if int(failed) else move
    if len(at.u) > _DENSE:
        return None
    J = _jacobian(model, at.v, steps)
    A = torch.eye(len(gap), dtype=gap.dtype, device=gap.device) - J + J @ (steps * model.H)
    solved, failed = torch.linalg.solve_ex(A, -gap)
    return None if int(failed) else solved


def _widths(v: Tensor) -> Tensor:
    """Half the width of a difference quotient at each entry."""
    relative = 10 * math.pow(torch.finfo(v.dtype).eps, 0.45)
    return relative * (v.abs() + 1e-3 * v.abs().mean()) + torch.finfo(v.dtype).tiny


def _slopes(model: Model, v: Tensor, steps: Tensor) -> Tensor:
    """The derivative of each coordinate's prox, by differences: exact on the pieces where it is linear."""
    e = _widths(v)
    return (model.prox(v + e, steps) - model.prox(v - e, steps)) / (2 * e)


def _jacobian(model: Model, v: Tensor, steps: Tensor) -> Tensor:
    """The Jacobian of the prox, by differences along each coordinate."""
    e = _widths(v)
    columns = []
    per = max(1, _ROOM // len(v))
    for a in range(0, len(v), per):
        some = torch.arange(a, min(a + per, len(v)), device=v.device)
        shift = torch.zeros(len(some), len(v), dtype=v.dtype, device=v.device)
        shift[torch.arange(len(some)), some] = e[some]
        difference = model.prox(v + shift, steps) - model.prox(v - shift, steps)
        columns.append(difference / (2 * e[some].unsqueeze(1)))
    return torch.cat(columns).T
