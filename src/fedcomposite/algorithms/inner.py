"""The server's problem inside a proximal Newton step, a quadratic plus h on k coordinates:

    minimise over u    g'(u - x) + (1/2) (u - x)' H (u - x) + h(u)

Coordinates that h leaves alone (an intercept, features that are not regularized) are eliminated first: what is left is
the Schur complement of H, which does not change where features are shifted. So columns of mean 1000 and spread 1e-4
are no harder than centred ones, as far as H itself knows them.

Proximal gradient steps with momentum and restart (O'Donoghue & Candes 2015) find which pieces of h are active, and
semismooth Newton steps on the fixed-point equation u = P_s(u - s (g + H (u - x))) then land on the solution. An h that
is separable has a step per coordinate, 1 / (lambda H_jj), lambda being the largest eigenvalue of H scaled to a unit
diagonal: how the features are scaled does not matter then.

The prox of an h that couples coordinates knows one step only, and features of different scale make it tiny. What such
steps do not solve is solved by the augmented Lagrangian of u = w,

    q(u) + min over w of h(w) + y'(u - w) + (s/2) ||u - w||^2,

which is smooth and convex in u: it is minimised by semismooth Newton steps with H + s (I - P'), P' being the Jacobian
of the prox; then y moves (Li, Sun, Toh 2018 solve the lasso so). Newton steps do not see the scale of the features.

All of this is bounded work. Every accepted point lowers the model, also where h is weakly convex and the model is not
convex: the limit is a stationary point, and what is returned is a value of the prox, so zeros are exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from fedcomposite.regularizers.base import Regularizer
from fedcomposite.regularizers.wrapped import restricted

_MOST, _FEW = 500, 60  # proximal gradient steps, of a separable h and of others
_NEWTONS, _INNER = 20, 100  # semismooth Newton steps in a row, of an augmented Lagrangian
_PARTS = (1.0, 0.5, 0.25, 0.1, 0.03, 0.01)  # lengths of such a step that are tried
_MULTIPLIERS = 40  # moves of the multipliers
_SHORTER = 25  # shorter steps of the augmented Lagrangian
_PROXES = 1500  # evaluations of the prox that an augmented Lagrangian may take
_DENSE = 2000  # coordinates up to which the prox of a coupled h is differentiated
_RIDGE = 1e-12  # of the diagonal of H, in Newton steps: where H has no curvature (equal columns) h alone leads
_BLUR = 10.0  # times the rounding of margins: a gradient that is known
_POINTS = 10  # proximal points of a coupled h that is not convex


@dataclass(frozen=True)
class QuadraticModel:
    """A quadratic plus h near x."""

    x: Tensor  # (k,)
    g: Tensor  # (k,), gradient of f at x
    H: Tensor  # (k, k)
    h: Regularizer  # on the k coordinates
    separable: bool
    free: Tensor | None = None  # (k,), mask of the coordinates that h leaves alone
    damping: float = 0.0  # multiple of the diagonal, or of that of the Schur complement, that is added to H
    reach: float = math.inf  # the size of margins, in units of a unit diagonal of H
    parts: Tensor | None = None  # (k,), the label of the part of h that each coordinate is in; one part if left out

    def change(self, u: Tensor) -> float:
        """The model at u, up to a constant."""
        return self.change_with(u, self.bend(u))

    def change_with(self, u: Tensor, bend: Tensor) -> float:
        """The same where :meth:`bend` is known."""
        return float((u - self.x) @ (self.g + bend / 2) + self.h.value(u))

    def bend(self, u: Tensor) -> Tensor:
        """H (u - x), by which the gradient has changed since x."""
        return self.H @ (u - self.x)

    def gradient(self, u: Tensor) -> Tensor:
        """The gradient of the quadratic at u."""
        return self.g + self.bend(u)

    @property
    def blind(self) -> bool:
        """Whether g points along a free direction whose curvature H has lost: what is left is unknown."""
        if self.free is None or not bool(self.free.any()):
            return False
        at = self.free.nonzero().squeeze(1)
        inverse, g = InverseOf(self.H[at][:, at]), self.g[at]
        return not inverse.exact and not torch.equal(inverse(g), inverse(g, self.blur))

    @property
    def blur(self) -> float:
        """Rounding of g, in units of a unit diagonal of H."""
        return _BLUR * torch.finfo(self.x.dtype).eps * self.reach

    def diagonal_norm(self, move: Tensor) -> float:
        """The square of a move in the norm of the diagonal that damping multiplies."""
        if self.free is None or not bool(self.free.any()):
            return float(self.H.diagonal() @ move.square())
        f, r, inverse, K, S = self.parted
        follows, rest = move[f] + K @ move[r], move[r]
        return float(inverse.H.diagonal() @ follows.square() + S.diagonal() @ rest.square())

    @cached_property
    def places(self) -> tuple[Tensor, Tensor, int]:
        """Which coordinates are in one part, the place of each in its part, and the size of the largest."""
        parts = torch.zeros_like(self.x, dtype=torch.int64) if self.parts is None else self.parts
        same = parts.unsqueeze(1) == parts
        place = same.tril(-1).sum(1)
        return same, place, int(place.max()) + 1

    @cached_property
    def parted(self) -> tuple[Tensor, Tensor, InverseOf, Tensor, Tensor]:
        """Free coordinates f and the others r, H_ff^-1, K = H_ff^-1 H_fr, and the Schur complement on r."""
        assert self.free is not None
        f, r = self.free.nonzero().squeeze(1), (~self.free).nonzero().squeeze(1)
        rows = self.H[f]
        inverse, across = InverseOf(rows[:, f]), rows[:, r]
        K = inverse(across)
        rest = self.H[r][:, r]
        S = rest - across.T @ K
        S = (S + S.T) / 2
        # What rounding has left of a difference is noise; a negative curvature would have no minimiser.
        S.diagonal().clamp_(min=0).add_(rest.diagonal(), alpha=8 * torch.finfo(S.dtype).eps)
        return f, r, inverse, K, S


class EffortError(Exception):
    """What a prox raises that has been evaluated as often as it may be; a search then ends with what it has."""


def minimise(model: QuadraticModel, tolerance: float) -> tuple[Tensor, bool]:
    """A stationary point of the model, no larger than at x, and whether it is one, to a residual of ``tolerance``."""
    if not len(model.x):
        return model.x, True
    if model.free is not None and bool(model.free.any()):
        return _eliminated(model, tolerance)
    if model.damping > 0:
        model = replace(model, H=model.H + torch.diag(model.damping * model.H.diagonal()), damping=0.0)
    small, u = len(model.x) <= _DENSE, model.x
    try:
        u, solved = _descend(model, tolerance, _FEW if small and not model.separable else _MOST)
        if solved or not small:
            return u, solved
        u, solved = _resisting(model, u, tolerance)
        steps = _steps(model)  # the pieces are known by now, which Newton steps end on exactly
        return _polish(model, _look(model, u, model.bend(u), steps), steps, _rounding(model, u), True).p, solved
    except EffortError:
        return u, False


class InverseOf:
    """H^-1 for a positive semidefinite H; what H does not determine stays zero, in units of its diagonal.

    What a right side knows all the same, beyond ``blur``, has a curvature that H has lost in rounding (columns of mean
    1000 and deviation 1e-4 without an intercept): it counts as the largest one that can be lost.
    """

    def __init__(self, H: Tensor) -> None:
        self.H, tiny = H, torch.finfo(H.dtype).tiny
        self._alone = len(H) == 1 and tiny <= float(H) < math.inf  # an intercept, most often
        self.exact = self._alone
        """Whether H determines everything."""
        if self._alone:
            return
        self._scale = H.diagonal().clamp(min=tiny).rsqrt()
        self._C = H * self._scale * self._scale.unsqueeze(1)
        self._L, failed = torch.linalg.cholesky_ex(self._C)
        least = 16 * len(H) * torch.finfo(H.dtype).eps
        self.exact = int(failed) == 0 and float(self._L.diagonal().min()) ** 2 > least

    def __call__(self, b: Tensor, blur: float = math.inf) -> Tensor:
        """H^-1 b, for one or more columns b."""
        if self._alone:
            return b / self.H.view(1)
        right = self._scale.unsqueeze(1) * b.view(len(b), -1)
        if self.exact:
            made = torch.cholesky_solve(right, self._L)
        else:
            values, V = self._spectrum
            least, inside = 4 * len(b) * torch.finfo(b.dtype).eps * values[-1], V.T @ right
            known = (values > least).unsqueeze(1) | (inside.abs() > blur)
            made = V @ torch.where(known, inside / values.clamp(min=least).unsqueeze(1), 0.0)
        return (self._scale.unsqueeze(1) * made).view_as(b)

    @cached_property
    def _spectrum(self) -> tuple[Tensor, Tensor]:
        values, V = torch.linalg.eigh(self._C)
        return values, V


def _eliminated(model: QuadraticModel, tolerance: float) -> tuple[Tensor, bool]:
    """The solution by the Schur complement: free coordinates follow the others linearly."""
    f, r, inverse, K, S = model.parted
    g_f = model.g[f]
    damped = inverse if model.damping == 0 else InverseOf(inverse.H + torch.diag(model.damping * inverse.H.diagonal()))
    h, x_r = restricted(model.h, model.x, r), model.x[r]
    parts = None if model.parts is None else model.parts[r]
    inner = QuadraticModel(x_r, model.g[r] - K.T @ g_f, S, h, model.separable, damping=model.damping, parts=parts)
    found, solved = minimise(inner, tolerance)
    made = model.x.index_copy(0, r, found)
    made[f] -= damped(g_f, model.blur) + K @ (found - x_r)
    return made, solved


# -- proximal gradient steps ------------------------------------------------------------------------------------------


class _State(NamedTuple):
    """A point, its image under the prox-gradient map, and how far apart they are."""

    u: Tensor
    bend: Tensor  # H (u - x)
    v: Tensor  # before the prox
    p: Tensor  # after it
    residual: float


def _descend(model: QuadraticModel, tolerance: float, most: int) -> tuple[Tensor, bool]:
    """Lower the model from x on; also whether the tolerance was reached, or nothing more can be."""
    steps = _steps(model)
    best, lowest = model.x, float(model.h.value(model.x))
    slack = 10 * torch.finfo(best.dtype).eps * abs(lowest)
    momentum, y, tries, due = 1.0, best, 0, 0
    bend = bend_y = torch.zeros_like(best)  # H (best - x) and H (y - x)
    for iteration in range(most + 1):
        if iteration in (due, most):  # the last steps, too, may have found the pieces
            tries, due = tries + 1, due + 5 * 2 ** min(tries, 7)
            goal = max(tolerance, _rounding(model, best))
            found = _polish(model, _look(model, best, bend, steps), steps, goal, tries % 2 == 1)
            bent = model.bend(found.p)
            value = model.change_with(found.p, bent)
            if value <= lowest + slack:
                best, lowest, y, momentum = found.p, min(value, lowest), found.p, 1.0
                bend = bend_y = bent
                if found.residual <= goal:
                    return best, True
        if iteration == most:
            break
        u = model.h.prox(y - steps * (model.g + bend_y), steps)
        bent = model.bend(u)
        value = model.change_with(u, bent)
        if value > lowest + slack or float((y - u) @ ((u - best) / steps)) > 0:
            if y is best:  # a plain step that does not lower the model: as far as rounding allows
                return best, True
            y, bend_y, momentum = best, bend, 1.0
            continue
        following = (1 + math.sqrt(1 + 4 * momentum**2)) / 2
        ahead = (momentum - 1) / following
        if momentum == 1.0 and torch.equal(u, best):
            return best, True
        y, bend_y = u + ahead * (u - best), bent + ahead * (bent - bend)
        best, bend, lowest, momentum = u, bent, min(value, lowest), following
    return best, False


def _rounding(model: QuadraticModel, u: Tensor) -> float:
    """The residual that rounding leaves near u."""
    eps, size = torch.finfo(u.dtype).eps, torch.linalg.vector_norm
    return 4 * eps * float(size(model.H.abs() @ (u.abs() + model.x.abs())) + size(model.g))


def _steps(model: QuadraticModel) -> Tensor:
    """Steps at which a plain proximal gradient step lowers the model, ``(k,)`` or ``(1,)``."""
    H = model.H
    tiny = torch.finfo(H.dtype).tiny
    diagonal = H.diagonal().clamp(min=tiny) if model.separable else H.new_ones(1)
    root = diagonal.sqrt()
    largest = 1.02 * _largest(H / root / root.unsqueeze(-1))
    steps = 1 / (diagonal * max(largest, tiny))
    return steps.clamp(max=0.5 / model.h.rho) if model.h.rho > 0 else steps


def _largest(H: Tensor) -> float:
    """The largest eigenvalue: exactly for small matrices, by power iteration for others."""
    if len(H) <= 300:
        return float(torch.linalg.eigvalsh(H)[-1])
    v = torch.linalg.vector_norm(H, dim=1)
    for _ in range(60):
        u = H @ v
        v = u / torch.linalg.vector_norm(u).clamp(min=torch.finfo(u.dtype).tiny)
    return 1.05 * float(v @ (H @ v))


def _look(model: QuadraticModel, u: Tensor, bend: Tensor, steps: Tensor) -> _State:
    v = u - steps * (model.g + bend)
    p = model.h.prox(v, steps)
    return _State(u, bend, v, p, float(torch.linalg.vector_norm((u - p) / steps)))


def _polish(model: QuadraticModel, now: _State, steps: Tensor, tolerance: float, exactly: bool) -> _State:
    """Semismooth Newton steps, each of which halves the residual or lowers a convex model more than a plain step."""
    for _ in range(_NEWTONS):
        if now.residual <= tolerance:
            break
        move = _newton(model, now, steps, exactly)
        if move is None or not bool(torch.isfinite(move).all()):
            break
        along, lowest = model.H @ move, math.nan
        for part in _PARTS:
            then = _look(model, now.u + part * move, now.bend + part * along, steps)
            if then.residual <= 0.5 * now.residual:
                now = then
                break
            if model.h.rho == 0:
                lowest = model.change(now.p) if math.isnan(lowest) else lowest
                bent = model.bend(then.p)
                if model.change_with(then.p, bent) < lowest:
                    now = _look(model, then.p, bent, steps)
                    break
        else:
            break
    return now


def _newton(model: QuadraticModel, at: _State, steps: Tensor, exactly: bool) -> Tensor | None:
    """The move to the solution of u - P(u - s grad(u)) = 0 with P linearised; None where that has none."""
    if not model.separable:
        if len(at.u) > _DENSE:
            return None
        J = _jacobian(model.h.prox, at.v, steps, model.places)
        A = torch.eye(len(at.u), dtype=at.u.dtype, device=at.u.device) - J + J @ (steps * model.H)
        solved, failed = torch.linalg.solve_ex(A, at.p - at.u)
        return None if int(failed) else solved
    known = model.h.prox_slope(at.v, steps) if exactly else None
    slope = known if known is not None else (_derivatives if exactly else _slopes)(model.h.prox, at.v, steps)
    active = slope > 1e-8
    move = at.p - at.u
    if not bool(active.any()):
        return move
    # On active coordinates (1 - p) z + p s (H z) = -gap, where z is known on the others; divided by p s.
    scale = (slope * steps)[active]
    rest = model.H[active] @ move.masked_fill(active, 0.0)
    A = model.H[active][:, active] + torch.diag((1 - slope[active]) / scale + _RIDGE * model.H.diagonal()[active])
    solved, failed = torch.linalg.solve_ex(A, move[active] / scale - rest)
    move[active] = solved
    return None if int(failed) else move


def _slopes(prox: Callable[[Tensor, Tensor], Tensor], v: Tensor, steps: Tensor) -> Tensor:
    """The derivative of each coordinate's prox, by differences.

    Where curvature is below their rounding (the tail of a logistic loss) they mislead; where H is singular and h not
    convex that rounding gets past points at which exact derivatives stay. So steps with both take turns.
    """
    relative = 10 * math.pow(torch.finfo(v.dtype).eps, 0.45)
    e = relative * (v.abs() + 1e-3 * v.abs().mean()) + torch.finfo(v.dtype).tiny
    return (prox(v + e, steps) - prox(v - e, steps)) / (2 * e)


# -- augmented Lagrangians --------------------------------------------------------------------------------------------


def _resisting(model: QuadraticModel, start: Tensor, tolerance: float) -> tuple[Tensor, bool]:
    """The solution of a model that resists: one augmented Lagrangian, or some around proximal points if rho > 0."""
    best, solved = start, False
    for _ in range(_POINTS if model.h.rho > 0 else 1):
        near = replace(model, x=best, g=model.gradient(best))
        found, solved = _augmented(near, tolerance, best if model.h.rho > 0 else None)
        if not near.change(found) < near.change(best):
            break
        moved, best = float(torch.linalg.vector_norm(found - best)), found
        if model.h.rho == 0 or (solved and model.h.rho * moved <= max(tolerance, _rounding(model, best))):
            return best, solved
        solved = False
    return best, solved


class _Lagrangian(NamedTuple):
    """The augmented Lagrangian at u."""

    u: Tensor
    v: Tensor  # u + y / s
    p: Tensor  # its prox, w
    gradient: Tensor
    value: float


def _augmented(model: QuadraticModel, tolerance: float, center: Tensor | None) -> tuple[Tensor, bool]:
    """The minimiser by augmented Lagrangians, and whether it was reached.

    With a center it is that of the model plus (rho/2) ||u - center||^2.
    """
    diagonal = model.H.diagonal().clamp(min=torch.finfo(model.x.dtype).tiny)
    prox = model.h.prox if center is None else _shifted(model, center)
    typical = diagonal if model.separable else diagonal.log().mean().exp().view(1)
    factor, last, evaluations = 1.0, math.inf, 0
    u, y = model.x, -model.g
    best, least = model.x, math.inf
    for _ in range(_MULTIPLIERS):
        s = factor * typical
        made, used = _inner_newton(model, prox, u, y, s, 0.1 * tolerance, center)
        evaluations += used
        u, y = made.u, s * (made.v - made.p)
        residual = float(torch.linalg.vector_norm(model.H @ (made.p - made.u) + made.gradient))
        if residual < least:
            best, least = made.p, residual
        goal = max(tolerance, _rounding(model, u))
        if residual <= goal:
            return made.p, True
        if residual > 0.2 * last:
            factor *= 10
        last = residual
        if factor > 1e14 or evaluations > _PROXES:
            break
    return best, least <= 1e3 * goal


def _shifted(model: QuadraticModel, center: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """The prox of h + (rho/2) ||. - center||^2, which is convex."""

    def prox(v: Tensor, step: Tensor) -> Tensor:
        more = 1 + model.h.rho * step
        return model.h.prox(
            (v + model.h.rho * step * center) / more, (step / more).clamp(max=(1 - 1e-14) / model.h.rho)
        )

    return prox


def _inner_newton(
    model: QuadraticModel,
    prox: Callable[[Tensor, Tensor], Tensor],
    u: Tensor,
    y: Tensor,
    s: Tensor,
    tolerance: float,
    center: Tensor | None,
) -> tuple[_Lagrangian, int]:
    """Minimise an augmented Lagrangian in u; also the evaluations of the prox that this took."""
    eps, size = torch.finfo(u.dtype).eps, torch.linalg.vector_norm

    def look(u: Tensor) -> _Lagrangian:
        v = u + y / s
        p = prox(v, 1 / s)
        d, w = u - model.x, u - p
        value = float(model.g @ d + d @ (model.H @ d) / 2 + model.h.value(p) + y @ w + (s * w) @ w / 2)
        if center is not None:
            value += model.h.rho / 2 * float((p - center).square().sum())
        return _Lagrangian(u, v, p, model.gradient(u) + s * (v - p), value)

    now, used = look(u), 1
    for _ in range(_INNER):
        sizes = model.H.abs() @ (now.u.abs() + model.x.abs()) + s * now.v.abs()
        noise = 4 * eps * float(size(sizes) + size(model.g))
        if float(size(now.gradient)) <= max(tolerance, noise):
            break
        if model.separable:
            A = model.H + torch.diag(s * (1 - _derivatives(prox, now.v, 1 / s)))
        else:
            J = _jacobian(prox, now.v, 1 / s, model.places)
            A = model.H + s * (torch.eye(len(u), dtype=u.dtype, device=u.device) - (J + J.T) / 2)
        move = -InverseOf(A + torch.diag(_RIDGE * model.H.diagonal()))(now.gradient)
        slope, part = float(now.gradient @ move), 1.0
        used += 1
        for _ in range(_SHORTER):
            then, used = look(now.u + part * move), used + 1
            rise = then.value - now.value
            if rise <= 1e-4 * part * slope + 4 * eps * abs(now.value):
                break
            best = -slope * part**2 / (2 * (rise - slope * part)) if math.isfinite(rise) else 0.0
            part = min(max(best, 0.01 * part), 0.5 * part)  # where a parabola has its minimum
        else:
            break
        now = then
    return now, used


def _derivatives(prox: Callable[[Tensor, Tensor], Tensor], v: Tensor, steps: Tensor) -> Tensor:
    """The derivative of each coordinate's prox."""
    at = v.detach().clone().requires_grad_()
    with torch.enable_grad():
        [made] = torch.autograd.grad(prox(at, steps).sum(), at)
    return made


def _jacobian(
    prox: Callable[[Tensor, Tensor], Tensor], v: Tensor, steps: Tensor, places: tuple[Tensor, Tensor, int]
) -> Tensor:
    """The Jacobian of the prox: as many rows as its largest part has coordinates, all of them at once.

    Parts know nothing of each other, so that a row of its own for a coordinate of each is differentiated together.
    """
    same, place, most = places
    rows = v.detach().repeat(most, 1).requires_grad_()
    with torch.enable_grad():
        [made] = torch.autograd.grad(prox(rows, steps).gather(0, place.unsqueeze(0)).sum(), rows)
    return torch.where(same, made[place], 0.0)
