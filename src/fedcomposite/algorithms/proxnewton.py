"""ProxNewton: proximal Newton across clients, with a working set W (linear models with a smooth loss).

After Lee, Sun, Saunders: Proximal Newton-type methods for minimizing composite functions, SIAM Journal on Optimization,
2014, Algorithm 1. What one exchange carries is ours. Down go a point y and W; up come the client's loss and gradient at
y, on all coordinates, and its Hessian on W x W. All three are means over clients, and clients keep no state.

    if F(y) <= F(x) + (t/10^4) D:  x = y             (Armijo; F = f + h)
        p = argmin over u = x off W  g'(u - x) + (u - x)'(H + damping)(u - x)/2 + h(u)     (the server's own work)
        D = g'(p - x) + h(p) - h(x),  t = 1
    else:  t is cut, to between a tenth and a half, where a parabola through what is known has its minimum
    y = x + t (p - x)

The exchange that tests a point delivers the next gradient and Hessian, so an accepted step costs nothing extra. W
starts as the support of x0 and the coordinates that h leaves alone; it grows by the worst violators of optimality, at
most doubling. With up to ``everything`` coordinates it is all of them. Parts of h (groups) enter whole. An h that
couples all coordinates has them all in W, which is refused for many.

Damping adds a multiple of H's diagonal, or of that of its Schur complement where h leaves coordinates alone, so that
units of the features and shifts of them do not matter. It is 0 until t is cut; then it is the curvature that the failed
test has shown beyond H's, and falls tenfold with every accepted step. Once t is below 1/1000 the same point is asked
for again. Where |D| is below the rounding of F, a point is accepted if it is nearer to optimality.

:func:`at_rest` says when x is the solution: D is what the model of F at x promises to gain, so that a small |D| says
more than a small gradient, whose size hangs on the units of the features.

Assumptions: f twice differentiable, or with a semismooth gradient (Huber, squared hinge). h convex or weakly convex;
the limit is then a stationary point. All clients in every round. Minibatches are not used: gradients are full ones.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from fedcomposite._validation import Count, Positive
from fedcomposite.algorithms.base import Algorithm, Empty, Gradient, Info
from fedcomposite.algorithms.inner import EffortError, QuadraticModel, minimise
from fedcomposite.regularizers.base import Regularizer
from fedcomposite.regularizers.wrapped import restricted

_COUPLED = 4000  # coordinates up to which an h that couples them all is taken
_STEEP = 1e-10  # of the largest slope: one that is no rounding, in a coordinate without curvature
_LARGEST = 10000  # coordinates of the largest working set: half of its square is sent by every client


class Server(NamedTuple):
    x: Tensor  # accepted model
    trial: Tensor  # model under test
    gradient: Tensor  # of f at x
    working: Tensor  # mask of W
    value: Tensor  # F at x
    decrease: Tensor  # D, the predicted change
    step: Tensor  # t; 0 accepts anything
    damping: Tensor  # multiple of the diagonal that is added
    size: Tensor  # of p - x in the norm of that diagonal, squared
    solved: Tensor  # 1 where p is the minimiser of the model, 0 where the search for it was given up
    slack: Tensor  # rounding of F near x
    noise: Tensor  # rounding of its gradient


class Message(NamedTuple):
    x: Tensor  # model under test
    working: Tensor  # mask of W


class Reply(NamedTuple):
    """What a client sends, all of it at the model under test."""

    loss: Tensor  # of the client
    gradient: Tensor  # on all coordinates
    hessian: Tensor  # upper triangle on W


@dataclass(frozen=True)
class ProxNewton(Algorithm[Server, Empty, Message, Reply]):
    """Loss, gradient and a piece of the Hessian up, a Newton step with h at the server.

    Parameters
    ----------
    everything : int
        Coordinates up to which W is all of them.
    grow : int
        Violators that may enter W at once, while W is smaller than that; then as many as W has.
    start : tuple of int
        Coordinates in the first W, beside the support of the starting model.
    precision : float
        Of the server's own work: the residual of p, in units of x's. By default to rounding, so that how a mean is
        summed up does not matter.
    """

    info: ClassVar[Info] = Info(
        "Lee, Sun, Saunders: Proximal Newton-type methods for minimizing composite functions",
        2014,
        regularizer="weakly convex",
        participation="full",
        exact=True,
        second_order=True,
        doi="10.1137/130921428",
    )
    varying: ClassVar[bool] = True
    recordable: ClassVar[bool] = False
    one_regularizer: ClassVar[str] = "it solves one problem, to the end"
    linear_replies: ClassVar[bool] = True

    everything: Count = 1000
    grow: Count = 50
    start: tuple[int, ...] = ()
    precision: Positive = 1e-13

    @classmethod
    def auto(cls, L: float, rho: float = 0.0, local_steps: int = 10) -> Self:
        return cls()

    def init(self, x0: Tensor, h: Regularizer) -> tuple[Server, Empty]:
        """Nothing known yet; refuses an h without modulus, and one that couples too many coordinates."""
        if not h.weakly_convex:
            raise ValueError(f"ProxNewton needs a convex or weakly convex h, and {h} has no finite rho; try FedNMap")
        d = len(x0)
        working = x0 != 0
        working[list(self.start)] = True
        parts = h.coupling(d).to(x0.device)
        if d <= self.everything:
            working = torch.ones_like(working)
        elif not bool(parts.any()):
            if d > _COUPLED:
                raise ValueError(
                    f"ProxNewton: {h} couples all {d} coordinates, and it takes Hessians of up to {_COUPLED}; "
                    "use a first-order method, for example FedNMap or ProxScaffnew"
                )
            working = torch.ones_like(working)
        else:
            free = ~h.acts_on(d).to(x0.device)
            working = _whole(working | free if int(free.sum()) <= self.grow else working, parts)
        none = x0.new_zeros(1)
        return Server(x0, x0, torch.zeros_like(x0), working, *(none,) * 8), Empty()

    def broadcast(self, server: Server) -> Message:
        """Send the model under test and W."""
        return Message(server.trial, server.working)

    def local_round(self, message: Message, client: Empty, grad: Gradient, h: Regularizer) -> tuple[Reply, Empty]:
        """Loss, gradient and Hessian; numbers that overflow become large ones, which the server turns down."""
        x = message.x
        H = grad.hessian(x, message.working)
        i, j = _upper(H.shape[-1], x.device)
        return Reply(*(bounded(t) for t in (grad.loss(x), grad.full(x), H[..., i, j]))), client

    def aggregate(self, server: Server, reply: Reply, share: float, h: Regularizer) -> Server:
        """Accept the model under test and look for the next one, or go back towards the accepted one."""
        own = float(h.value(server.trial))
        value = float(reply.loss) + own
        lowest, t, D = float(server.value), float(server.step), float(server.decrease)
        slack = float(server.slack)
        if t > 0 and not value <= lowest + 1e-4 * t * D + slack:
            return self._back(server, value - lowest)
        if (
            t > 0
            and slack > -D
            and h.optimality(server.trial, reply.gradient) > h.optimality(server.x, server.gradient)
        ):
            return server._replace(trial=server.x, step=torch.zeros_like(server.step))
        damping = float(server.damping) / (10 if t > 0 else 1)
        model = self._model(server.trial, reply, server.working, damping, h)
        slack, noise = _rounding(float(reply.loss), value, model)
        residual = float(h.optimality(server.trial, reply.gradient))
        found = server.trial.clone()
        found[server.working], solved = minimise(model, self.precision * residual)
        solved = solved and (residual <= 100 * noise or not _swallowed(found, h, residual))
        move = found - server.trial
        decrease = float(reply.gradient @ move) + (float(h.value(found)) - own)
        moved = decrease < slack and not torch.equal(found, server.trial)
        size = model.diagonal_norm(move[server.working]) if moved else 0.0
        promised = min(decrease, 0.0) if moved else 0.0
        numbers = value, promised, float(moved), damping, size, float(solved), slack, noise
        return Server(
            server.trial,
            found if moved else server.trial,
            reply.gradient,
            self._grown(server.trial, reply.gradient, server.working, h),
            *(_number(v, server.x) for v in numbers),
        )

    def solution(self, server: Server, h: Regularizer) -> Tensor:
        return server.x

    def _back(self, server: Server, rise: float) -> Server:
        """A shorter move along the same direction; after a few, the same point once more with damping."""
        t, D, size = float(server.step), float(server.decrease), float(server.size)
        move = (server.trial - server.x) / t
        bend = (rise - t * D) / t**2  # F(x + t p) = F(x) + t D + t^2 bend
        seen = max(0.0, 2 * bend + D)  # -D is about p'Hp
        damping = float(server.damping)
        best = -D / (2 * bend) if bend > 0 else 0.0
        if best >= 1e-3:
            shorter, damping = max(best, 0.02 * t), max(damping, seen / size)
        else:  # far from a parabola: an overflow, say
            shorter = 0.1 * t
        if shorter < 1e-3:
            shorter, damping = 0.0, 10 * max(damping, -D / size)
        shorter = min(shorter, 0.5 * t)
        trial = server.x + shorter * move
        return server._replace(trial=trial, step=_number(shorter, trial), damping=_number(damping, trial))

    def _model(self, x: Tensor, reply: Reply, working: Tensor, damping: float, h: Regularizer) -> QuadraticModel:
        """F near x on the coordinates in W: a quadratic, and h."""
        at = working.nonzero().squeeze(1)
        k = len(at)
        i, j = _upper(k, x.device)
        H = x.new_empty(k, k)
        H[i, j] = H[j, i] = reply.hessian
        diagonal = H.diagonal()
        if k:
            diagonal.clamp_(min=0).mul_(1 + 4 * torch.finfo(x.dtype).eps)  # of a covariance rounding may leave less
            diagonal.copy_(_with_some_curvature(diagonal, reply.gradient[at], float(reply.loss)))

        parts = h.coupling(len(x))
        separable = torch.equal(parts, torch.arange(len(x), device=parts.device))
        free = ~h.acts_on(len(x)).to(x.device)[at]
        reach = math.sqrt(2 * abs(float(reply.loss))) + float(x[at].abs() @ diagonal.sqrt())
        h = restricted(h, x, at)
        return QuadraticModel(x[at], reply.gradient[at], H, h, separable, free, damping, reach, parts.to(x.device)[at])

    def _grown(self, x: Tensor, gradient: Tensor, working: Tensor, h: Regularizer) -> Tensor:
        """W and the worst violators of optimality outside it."""
        room = len(x) - int(working.sum())
        if not room:
            return working
        step = min(1.0, 0.5 / h.rho) if h.rho > 0 else 1.0
        parts = h.coupling(len(x)).to(x.device)
        try:
            miss = (x - h.prox(x - step * gradient, step)).square() / step**2
        except EffortError:
            return working
        score = torch.zeros_like(x).index_add_(
            0, parts, miss.masked_fill(working, 0.0)
        )  # by part, at its first coordinate
        most = min(room, max(self.grow, len(x) - room), _LARGEST - (len(x) - room))
        if most <= 0:
            raise ValueError(
                f"ProxNewton: the working set has reached {_LARGEST} coordinates; regularize more, "
                "or use a first-order method, for example FedNMap or ProxScaffnew"
            )
        worst = score.topk(most)
        chosen = working.clone()
        chosen[worst.indices[worst.values > 0]] = True
        return _whole(chosen, parts)


def at_rest(server: Server, h: Regularizer, tolerance: float, scale: float, floor: float = 100.0) -> tuple[bool, bool]:
    """Whether x is stationary, and whether it is the solution as well as one can tell.

    Stationary: the optimality measure is at most ``tolerance`` times ``scale``, a size of gradients, or ``floor`` times
    what rounding leaves of it. The solution: the model of F at x, too, promises no gain of more than ``tolerance``
    times |F|.
    """
    measure = float(h.optimality(server.x, server.gradient))
    stationary = measure <= max(tolerance * scale, floor * float(server.noise))
    left = -float(server.decrease) if float(server.solved) else math.inf
    return stationary, stationary and left <= tolerance * abs(float(server.value)) + float(server.slack)


def _swallowed(x: Tensor, h: Regularizer, residual: float) -> bool:
    """Whether x is so far out that its rounding swallows steps as short as rho allows: that it rests shows nothing."""
    return h.rho > 0 and 4 * h.rho * torch.finfo(x.dtype).eps * float(torch.linalg.vector_norm(x)) > residual


def _rounding(loss: float, value: float, model: QuadraticModel) -> tuple[float, float]:
    """What rounding does to F and to its gradient near x, from sizes of margins: sqrt(loss) and |x_j| sqrt(H_jj)."""
    eps, size = torch.finfo(model.x.dtype).eps, math.sqrt(2 * abs(loss))
    spread = math.sqrt(float(model.H.diagonal().sum()))
    return 20 * eps * (abs(value) + size * model.reach), eps * spread * model.reach


def _with_some_curvature(diagonal: Tensor, gradient: Tensor, loss: float) -> Tensor:
    """The diagonal of H with a little where it is zero, so that steps are defined.

    A column of zeros moves for h's sake alone, so that next to nothing is right; a coordinate with a slope (residuals
    all beyond Huber's delta) gets what makes its step end where the loss would vanish.
    """
    none = diagonal == 0
    if not bool(none.any()):
        return diagonal
    steep = gradient.abs() > _STEEP * float(gradient.abs().max())
    level = float(gradient[none].square().sum()) / loss if loss > 0 else 0.0  # events alone at risk have a loss of zero
    level = min(level, torch.finfo(diagonal.dtype).max ** 0.5)
    typical = float(diagonal.mean()) or level or 1.0
    least = float(diagonal[~none].min()) if bool((~none).any()) else typical
    flat = diagonal.new_full((len(diagonal),), 1e-10 * least)
    return torch.where(none, torch.where(steep, level or typical, flat), diagonal)


@lru_cache(maxsize=16)
def _upper(k: int, device: torch.device) -> Tensor:
    """The rows and columns of a triangle, which every reply of a fit has."""
    return torch.triu_indices(k, k, device=device)


def _number(value: float, like: Tensor) -> Tensor:
    return like.new_full((1,), value)


def bounded(t: Tensor) -> Tensor:
    """Numbers that overflow become large ones."""
    big = torch.finfo(t.dtype).max ** 0.5
    return torch.nan_to_num(t, nan=big, posinf=big, neginf=-big).clamp(-big, big)


def _whole(mask: Tensor, parts: Tensor) -> Tensor:
    """The mask with every part that it touches."""
    touched = torch.zeros_like(mask)
    touched[parts[mask]] = True
    return touched[parts]
