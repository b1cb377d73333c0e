"""SketchNewton: proximal quasi-Newton steps from gradients and a few Hessian-vector products.

After Gower, Goldfarb, Richtárik: Stochastic block BFGS: squeezing more curvature out of data, ICML 2016, with h, across
clients. What an exchange carries, and the guards, are ours. Down go a point y and k directions V on a working set W; up
come the client's loss and gradient at y and the rows in W of its H(y) V, all of them means over clients:

    if F(y) <= F(x) + D/10^4:  x = y               (Armijo; F = f + h)
        B = c B                                    (c: mean of v'Hv / v'Bv over V and the last step, within a factor 2)
    else:  B = c B, c between 2 and 4
    B learns H V = Y, and the last step's s and change of gradient, by
        B+ = B - B V (V'BV)^-1 V'B + Y (V'Y)^-1 Y'                                              (block BFGS)
    p = argmin_u  g'(u - x) + (u - x)'B(u - x)/2 + h(u),   D = g'(p - x) + h(p) - h(x),   y = p

B+ is the matrix nearest to B, in the norm that B weighs, with B+ V = Y, so that it stays positive definite. The first
B is Nyström's from ``start`` random directions, Y (V'Y)^-1 Y', with the mean Hessian's diagonal, one more vector. W is
the support of y and the coordinates that h leaves alone; V is drawn from N(0, B^-1) there, orthogonal in B to what was
drawn before until W is exhausted: then B is H on W, up to how far x has moved since. ``numbers`` bounds what V costs,
|W| k, between 2 and 8 directions. Outside W rows of B V are left as they are, and a coordinate there keeps at least a
third of its own curvature beside W's, since what is foretold of it may be wrong.

Curvature and early gradients are sent in single precision, gradients in double once optimality is within 3 10^-6 of
their size, so that the end is exact.

Theory: where h and f are convex, a y that is refused shows a curvature s'y of more than 0.9999 s'Bs, and B at least
doubles: steps shorten until F falls, with L-smooth f after log2(L / least eigenvalue of B) refusals at most. In units
of its diagonal B's least eigenvalue is at least 10^-9 of the largest, so that with bounded diagonals accepted steps
make optimality go to zero (Lee, Sun, Saunders 2014, Theorem 3.1). Superlinear convergence is what is seen, as V spans W
again and again while x moves less and less; it is not proved. All of it is a function of means: how samples are spread
over clients changes nothing but their weights, and secure sums do nothing to it.

What a client's products tell: a few directions of its Hessian in every exchange, as differences of its gradients would;
it refuses more than ``start`` or 8 at once, whoever asks.
Over many exchanges they add up to its Hessian on the support, at different models; the server needs their mean alone.

Assumptions: f twice differentiable, h convex or weakly convex (the limit is then a stationary point), all clients in
every round, up to 2,000 coordinates. Minibatches are not used: gradients are full ones.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from fedcomposite._validation import Count, Natural
from fedcomposite.algorithms.base import Algorithm, Empty, Gradient, Info
from fedcomposite.algorithms.inner import QuadraticModel, minimise
from fedcomposite.algorithms.proxnewton import bounded
from fedcomposite.regularizers.base import Regularizer

_LARGEST = 2000  # coordinates: the server decomposes matrices of that size
_FEWEST, _MOST = 2, 8  # directions of an exchange
_PRECISE = 3e-6  # of the size of gradients: the optimality from which on they are sent in double precision
_LEAST = 1e-9  # of the largest eigenvalue of B, in units of its diagonal
_OWN = 0.3  # of a coordinate's first curvature that is left beside what W explains


class Server(NamedTuple):
    x: Tensor  # accepted model
    trial: Tensor  # model under test, y
    gradient: Tensor  # of f at x
    metric: Tensor  # B, row by row; empty before the first exchange
    diagonal: Tensor  # of the mean Hessian at x0
    directions: Tensor  # V on W, one after the other
    working: Tensor  # mask of W
    drawn: Tensor  # directions since W was last exhausted, one after the other
    value: Tensor  # F at x
    loss: Tensor  # f at x
    decrease: Tensor  # D, the predicted change
    precise: Tensor  # 1 once gradients are sent in double precision
    asked: Tensor  # exchanges so far


class Message(NamedTuple):
    x: Tensor  # model under test
    directions: Tensor  # V on W, in single precision
    working: Tensor  # mask of W
    precise: Tensor  # 1 for a gradient in double precision
    diagonal: Tensor  # one number if the Hessian's diagonal is asked for


class Reply(NamedTuple):
    """What a client sends, all of it at the model under test."""

    loss: Tensor  # of the client
    gradient: Tensor  # on all coordinates
    products: Tensor  # H V on W, one after the other
    diagonal: Tensor  # of H, or nothing


@dataclass(frozen=True)
class SketchNewton(Algorithm[Server, Empty, Message, Reply]):
    """Gradients and a few Hessian-vector products up, quasi-Newton steps with h at the server.

    Parameters
    ----------
    start : int
        Directions of the first exchange.
    numbers : int
        Numbers that the products of a later one may take: ``numbers / |W|`` directions, at least 2 and at most 8.
    draw : int
        Which directions are drawn; any will do.
    """

    info: ClassVar[Info] = Info(
        "Gower, Goldfarb, Richtárik: Stochastic block BFGS: squeezing more curvature out of data",
        2016,
        regularizer="weakly convex",
        participation="full",
        exact=True,
        second_order=True,
        arxiv="1603.09649",
    )
    varying: ClassVar[bool] = True
    recordable: ClassVar[bool] = False
    single_precision: ClassVar[bool] = True
    one_regularizer: ClassVar[str] = "it solves one problem, to the end"

    start: Count = 5
    numbers: Count = 100
    draw: Natural = 0

    @classmethod
    def auto(cls, L: float, rho: float = 0.0, local_steps: int = 10) -> Self:
        return cls()

    def init(self, x0: Tensor, h: Regularizer) -> tuple[Server, Empty]:
        """Nothing known yet; refuses an h without modulus, and too many coordinates."""
        if not h.weakly_convex:
            raise ValueError(f"SketchNewton needs a convex or weakly convex h, and {h} has no finite rho; try FedNMap")
        d = len(x0)
        if d > _LARGEST:
            raise ValueError(f"SketchNewton takes up to {_LARGEST} coordinates, not {d}; try ProxNewton or FedNMap")
        V, none = self._normal(x0, d, min(self.start, d), 0), x0.new_zeros(1)
        everything = torch.ones_like(x0, dtype=torch.bool)
        return Server(
            x0, x0, torch.zeros_like(x0), x0[:0], torch.zeros_like(x0), _flat(V), everything, x0[:0], *(none,) * 5
        ), Empty()

    def broadcast(self, server: Server) -> Message:
        """Send the model under test, and directions in single precision."""
        diagonal = server.asked[: 0 if len(server.metric) else 1]
        return Message(server.trial, server.directions.float(), server.working, server.precise, diagonal)

    def local_round(self, message: Message, client: Empty, grad: Gradient, h: Regularizer) -> tuple[Reply, Empty]:
        """Loss, gradient and products; numbers that overflow become large ones, which the server turns down."""
        x = message.x
        most, size = max(self.start, _MOST), int(message.working.sum(-1).max())
        if message.directions.shape[-1] > most * size:
            raise ValueError(f"SketchNewton: more than {most} directions of a Hessian were asked for in one exchange")
        V = _columns(message.directions.to(x.dtype), size)
        H = grad.hessian(x, message.working)
        gradient = grad.full(x)
        if not bool(message.precise.any()):
            gradient = gradient.float()
        diagonal = H.diagonal(dim1=-2, dim2=-1) if message.diagonal.shape[-1] else x[..., :0]
        parts = grad.loss(x), gradient, _flat(H @ V).float(), diagonal.float()
        return Reply(*(bounded(t) for t in parts)), client

    def decode(self, reply: Reply) -> Reply:
        """Sum up in the precision of the model."""
        return Reply(*(t.to(reply.loss.dtype) for t in reply))

    def aggregate(self, server: Server, reply: Reply, share: float, h: Regularizer) -> Server:
        """Accept the model under test or not, learn curvature, and look for the next one."""
        own = float(h.value(server.trial))
        value, first = float(reply.loss) + own, not len(server.metric)
        accepted = first or self._falls(server, value, reply.gradient, h)
        W, drawn = server.working.nonzero().squeeze(1), server.drawn
        diagonal = _positive(reply.diagonal) if first else server.diagonal
        if first:
            V, Y = (_columns(t, len(W)) for t in (server.directions.float().to(server.x), reply.products))
            B = _started(V, Y, diagonal)
        else:
            B, drawn = _learned(server, reply, W, accepted)
        if accepted:
            server = server._replace(x=server.trial, gradient=reply.gradient, value=_number(value, B), loss=reply.loss)
        x, g = server.x, server.gradient
        residual = float(h.optimality(x, g))
        free = ~h.acts_on(len(x)).to(x.device)
        separable = torch.unique(h.coupling(len(x))).numel() == len(x)
        found, _ = minimise(QuadraticModel(x, g, B, h, separable, free), 1e-13 * residual)
        decrease = float(g @ (found - x)) + float(h.value(found)) - float(h.value(x))
        moved = decrease < _slack(server) and not torch.equal(found, x)
        trial, asked = found if moved else x, server.asked + 1
        size = float((2 * server.loss.abs() * diagonal).sum()) ** 0.5
        precise = bool(server.precise) or residual <= _PRECISE * size or not moved
        working = (trial != 0) | free
        W = working.nonzero().squeeze(1)
        # Sites take no message that is longer than the first.
        most = min(len(W), _MOST, len(x) * min(self.start, len(x)) // max(1, len(W)))
        k = min(most, max(_FEWEST, round(self.numbers / max(1, len(W)))))
        V, drawn = _conjugate(B, W, drawn, self._normal(B, len(W), k, int(asked)))
        return Server(
            x, trial, g, B.reshape(-1), diagonal, _flat(V), working, drawn, server.value, server.loss,
            _number(min(decrease, 0.0), x), _number(float(precise), x), asked,
        )  # fmt: skip

    def solution(self, server: Server, h: Regularizer) -> Tensor:
        return server.x

    def _falls(self, server: Server, value: float, gradient: Tensor, h: Regularizer) -> bool:
        """Whether F is low enough at the model under test; where rounding hides that, whether it is nearer."""
        D, slack = float(server.decrease), _slack(server)
        if not value <= float(server.value) + 1e-4 * D + slack:
            return False
        return 10 * slack < -D or not h.optimality(server.trial, gradient) > h.optimality(server.x, server.gradient)

    def _normal(self, like: Tensor, size: int, count: int, asked: int) -> Tensor:
        """Normal numbers of one exchange."""
        generator = torch.Generator().manual_seed(1000003 * self.draw + asked)
        return torch.randn(size, count, generator=generator, dtype=torch.float64).to(like)


def _slack(server: Server) -> float:
    """Rounding of F near x."""
    return 50 * torch.finfo(server.x.dtype).eps * abs(float(server.value))


def _started(V: Tensor, Y: Tensor, diagonal: Tensor) -> Tensor:
    """Nyström's approximation of H from Y = H V, with H's diagonal."""
    values, Q = torch.linalg.eigh(_symmetric(V.T @ Y))
    known = values > 1e-7 * values[-1].clamp(min=torch.finfo(V.dtype).tiny)
    Z: Tensor = (Y @ Q)[:, known] / values[known].sqrt()
    rest = torch.maximum(diagonal - Z.square().sum(1), 1e-3 * diagonal)
    return Z @ Z.T + torch.diag(rest)


def _learned(server: Server, reply: Reply, W: Tensor, accepted: bool) -> tuple[Tensor, Tensor]:
    """B after an exchange, and the directions that it has learned of since W was last exhausted."""
    d = len(server.x)
    B, s, y = server.metric.view(d, d), server.trial - server.x, reply.gradient - server.gradient
    V = s.new_zeros(d, len(server.directions) // max(1, len(W)))
    V[W] = _columns(server.directions.float().to(s), len(W))
    Y = _columns(reply.products, len(W))
    sBs, bends = float(s @ B @ s), float(s @ y)
    seen = torch.cat([(V[W] * Y).sum(0) / (V * (B @ V)).sum(0), s.new_tensor([bends / sBs] if sBs > 0 else [])])
    if accepted:
        B = B * (float(seen.mean().clamp(0.5, 2.0)) if len(seen) else 1.0)
    else:
        B = B * min(max(bends / sBs if sBs > 0 else 2.0, 2.0), 4.0)
    if bends > 1e-14 * float(s @ s):
        B = _updated(B, s.unsqueeze(1), y.unsqueeze(1))
    if not len(W) or not (accepted or bends <= 0.1 * abs(float(server.loss))):  # far away curvature is another
        return B, server.drawn
    whole = B @ V
    whole[W] = Y
    B = _updated(B, V, whole)
    rest = (~server.working).nonzero().squeeze(1)
    if len(rest):
        across = torch.linalg.solve_triangular(_root(B[W][:, W]), B[W][:, rest], upper=False)
        own = B[rest, rest] - across.square().sum(0)
        B[rest, rest] += (_OWN * server.diagonal[rest] - own).clamp(min=0)
    return B, torch.cat([server.drawn, _flat(V)])


def _updated(B: Tensor, V: Tensor, Y: Tensor) -> Tensor:
    """Block BFGS in units of B's own root, where directions that repeat others or show no curvature are left out."""
    scale = B.diagonal().rsqrt()
    values, Q = torch.linalg.eigh(_symmetric(B * scale * scale.unsqueeze(1)))
    values = values.clamp(min=_LEAST * values[-1])
    root, inverse = (Q * values.sqrt()) @ Q.T, (Q / values.sqrt()) @ Q.T
    U = root @ (V / scale.unsqueeze(1))
    size = torch.linalg.vector_norm(U, dim=0)
    size = size.clamp(min=torch.finfo(U.dtype).tiny)
    U, spread, turn = torch.linalg.svd(U / size, full_matrices=False)
    T = inverse @ (Y * scale.unsqueeze(1) / size) @ turn.T / spread  # what H makes of U, in these units
    apart = spread > 1e-6 * spread[0]
    U, T = U[:, apart], T[:, apart]
    bends, P = torch.linalg.eigh(_symmetric(U.T @ T))
    curved = bends > 1e-6
    U, T = (U @ P)[:, curved], (T @ P)[:, curved]
    made = torch.eye(len(B), dtype=B.dtype, device=B.device) - U @ U.T + (T / bends[curved]) @ T.T
    return _symmetric(root @ made @ root) / scale / scale.unsqueeze(1)


def _conjugate(B: Tensor, W: Tensor, drawn: Tensor, Z: Tensor) -> tuple[Tensor, Tensor]:
    """Directions on W from N(0, B^-1), B-orthogonal to those before; also these, without any if W is exhausted."""
    size, k = Z.shape
    if not size:
        return Z, drawn[:0]
    L, before = _root(B[W][:, W]), _columns(drawn, len(B))[W]
    if before.shape[1] + k > size:
        drawn = drawn[:0]
    elif before.shape[1]:
        Q, _ = torch.linalg.qr(L.T @ before)
        Z = Z - Q @ (Q.T @ Z)
        Z = Z - Q @ (Q.T @ Z)
    V: Tensor = torch.linalg.solve_triangular(L.T, Z, upper=True)
    return V / torch.linalg.vector_norm(V, dim=0), drawn


def _root(B: Tensor) -> Tensor:
    """Cholesky's factor of B, with eigenvalues that rounding has taken put back."""
    values, Q = torch.linalg.eigh(_symmetric(B))
    least = 0.1 * _LEAST * values[-1]
    L: Tensor = torch.linalg.cholesky(_symmetric((Q * values.clamp(min=least)) @ Q.T))
    return L


def _positive(diagonal: Tensor) -> Tensor:
    """The diagonal with the least curvature that there is where there is none."""
    some = diagonal > 0
    least = float(diagonal[some].min()) if bool(some.any()) else 1.0
    return torch.where(some, diagonal, least)


def _columns(flat: Tensor, size: int) -> Tensor:
    """Vectors of a size, which were sent one after the other, as the columns of a matrix."""
    return flat.reshape(*flat.shape[:-1], -1, max(1, size)).transpose(-1, -2)[..., :size, :]


def _flat(columns: Tensor) -> Tensor:
    return columns.transpose(-1, -2).flatten(-2)


def _symmetric(B: Tensor) -> Tensor:
    return (B + B.T) / 2


def _number(value: float, like: Tensor) -> Tensor:
    return like.new_full((1,), value)
