"""The other side of the fuzz: the objective from its formula, its minimum by cvxpy, and whether there is one.

    F(w, c) = sum_i o_i phi(x_i'w + c + t_i, y_i) + h(w)

on pooled samples, with o_i = v_i / sum v (``"samples"``) or v_i / (sites * the site's sum of v) (``"uniform"``); of
times to an event ``benchmarks/fuzz_cox.py`` has the sum. Values
are in extended precision, so that a point with a lower value proves an answer wrong, whoever found that point.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import cvxpy as cp
import mpmath
import numpy as np
import scipy.linalg
import scipy.optimize
import scipy.special

from benchmarks.fuzz_cox import Likelihood
from benchmarks.fuzz_terms import Array, Term

LONG = np.longdouble
_SETTINGS = {"tol_gap_abs": 1e-11, "tol_gap_rel": 1e-11, "tol_feas": 1e-11, "max_iter": 400, "time_limit": 20.0}


@dataclass(frozen=True)
class Pooled:
    """All samples of a problem in one place."""

    loss: str
    option: float  # delta of Huber, tau of a quantile, 1 for Efron's way with ties
    X: Array
    y: Array  # labels -1 and +1 of two classes, 0, 1, ... of several; of times to an event five columns
    o: Array  # what each sample counts; they sum to 1
    t: Array  # margin offsets
    term: Term
    bias: bool
    classes: int = 1

    @property
    def d(self) -> int:
        """Features."""
        return self.X.shape[1]

    @property
    def centred(self) -> bool:
        """Whether a constant that is added to a column changes nothing."""
        return self.bias or self.loss == "cox"

    @cached_property
    def likelihood(self) -> Likelihood:
        """Of times to an event."""
        return Likelihood.of(self.y, self.o, self.option == 1)

    def split(self, x: Array) -> tuple[Array, Array]:
        """Coefficients ``(d, C)`` and intercepts ``(C,)`` of a model as the package has it."""
        C, cut = self.classes, self.d * self.classes
        return x[:cut].reshape(self.d, C), (x[cut:] if self.bias else np.zeros(C, x.dtype))

    def value(self, x: Array) -> float:
        """F(x)."""
        x = np.asarray(x).astype(LONG)
        W, c = self.split(x)
        h = self.term.value(W.ravel())
        return float(mean(self, self.X.astype(LONG) @ W + c + self.t[:, None]) + LONG(h))

    def rounding(self, x: Array) -> float:
        """By how much F(x) changes if every product in a margin is rounded to double precision, about."""
        W, c = self.split(np.asarray(x, float))
        sizes = abs(self.X) @ abs(W) + abs(c) + abs(self.t[:, None])
        kinked = self.loss in ("hinge", "absolute", "quantile")  # whose slopes are at most 1
        slope = self.o[:, None] if kinked else abs(slopes(self, self.X @ W + c + self.t[:, None]))
        if self.loss in ("logistic", "multinomial", "poisson", "cox"):  # a slope grows e-fold with its margin, at most
            slope = slope * np.exp(min(4 * np.finfo(float).eps * sizes.max(initial=0.0), 50.0))
        return 4 * float(np.finfo(float).eps * (slope * sizes).sum() + np.finfo(LONG).eps * sizes.max(initial=0.0))

    def start(self) -> Array:
        """The zero model, or the point of the constraint's set that is made from it."""
        W = self.term.repaired(np.zeros(self.d * self.classes))
        return np.concatenate([W, np.zeros(self.classes if self.bias else 0)])


def mean(p: Pooled, Z: Array) -> Any:
    """The samples' part of F at margins ``(n, C)``, in their dtype."""
    if p.loss == "cox":
        return p.likelihood.value(Z[:, 0])
    return (p.o * losses(p, Z)).sum()


def losses(p: Pooled, Z: Array) -> Array:
    """The loss of each sample at margins ``(n, C)``, in the dtype of the margins."""
    z, y, k = Z[:, 0], p.y.astype(Z.dtype), p.option
    r = z - y
    match p.loss:
        case "least_squares":
            return r**2 / 2
        case "logistic":
            return np.logaddexp(0, -y * z)
        case "hinge":
            return np.maximum(0, 1 - y * z)
        case "squared_hinge":
            return np.maximum(0, 1 - y * z) ** 2
        case "absolute":
            return abs(r)
        case "quantile":
            return np.maximum(-k * r, (1 - k) * r)
        case "huber":
            return np.where(abs(r) <= k, r**2 / 2, k * (abs(r) - LONG(k) / 2))
        case "poisson":
            with np.errstate(over="ignore"):
                return np.exp(z) - y * z
    top = Z.max(1)
    return top + np.log(np.exp(Z - top[:, None]).sum(1)) - Z[np.arange(len(Z)), p.y.astype(int)]


def _expression(p: Pooled, r: Any, size: float, Z: Any) -> Any:
    """The mean loss for cvxpy: of residuals in units of ``size``, or of margins."""
    o, k = p.o, p.option
    z = None if Z is None else Z[:, 0]
    match p.loss:
        case "least_squares":
            return size**2 / 2 * cp.sum_squares(cp.multiply(np.sqrt(o), r))
        case "absolute":
            return size * cp.sum(cp.multiply(o, cp.abs(r)))
        case "quantile":
            return size * cp.sum(cp.multiply(o, cp.maximum(-k * r, (1 - k) * r)))
        case "huber":
            return size**2 / 2 * cp.sum(cp.multiply(o, cp.huber(r, k / size)))
        case "logistic":
            return cp.sum(cp.multiply(o, cp.logistic(cp.multiply(-p.y, z))))
        case "hinge":
            return cp.sum(cp.multiply(o, cp.pos(1 - cp.multiply(p.y, z))))
        case "squared_hinge":
            return cp.sum_squares(cp.multiply(np.sqrt(o), cp.pos(1 - cp.multiply(p.y, z))))
        case "poisson":
            return cp.sum(cp.multiply(o, cp.exp(z) - cp.multiply(p.y, z)))
        case "cox":
            return p.likelihood.expression(z)
    chosen = np.eye(p.classes)[p.y.astype(int)]
    return cp.sum(cp.multiply(o, cp.log_sum_exp(Z, axis=1) - cp.sum(cp.multiply(chosen, Z), axis=1)))


def standardised(p: Pooled) -> tuple[Array, Array, Array]:
    """Columns of mean 0 and size 1 (0 for a constant), their means and sizes."""
    m = (p.o[:, None] * p.X).sum(0)
    s = np.sqrt((p.o[:, None] * (p.X - m) ** 2).sum(0))
    flat = s <= 1e-13 * abs(p.X).max(0, initial=0.0)
    m = np.where(flat, 0.0, m)  # a constant column stays what it is
    s = np.where(flat, np.maximum(abs(p.X).max(0, initial=0.0), 1e-300), s)
    s = np.where(s <= 1e-299, 1.0, s)
    return (p.X - m) / s, m, s


def minimised(p: Pooled, **settings: Any) -> tuple[Array, str]:
    """The minimiser by cvxpy's Clarabel in standard units, as the package has models, and cvxpy's word on it."""
    Xs, m, s = standardised(p)
    C, real = p.classes, p.loss in ("least_squares", "absolute", "quantile", "huber")
    target = p.y - p.t if real else np.zeros(len(p.t))
    size = float(np.sqrt((p.o * (target - (p.o * target).sum()) ** 2).sum())) if real else 1.0
    size = size or float(abs(target).max()) or 1.0
    U, c = cp.Variable((p.d, C)), cp.Variable((1, C))
    center = (p.o * target).sum() / size if real and p.bias else 0.0
    W = cp.multiply(size / s[:, None], U)
    margins = Xs @ U + np.ones((len(Xs), 1)) @ c
    r = Z = None
    if real:
        r = margins[:, 0] - (target / size - center)
    else:
        Z = margins + p.t[:, None]
    h, constraints = p.term.expression(cp.reshape(W, (p.d * C,), order="C"))
    if not p.bias:
        constraints = [*constraints, c == (0 if p.centred else (m / s)[None, :] @ U)]
    scale = max(abs(p.value(p.start())), 1e-300)
    problem = cp.Problem(cp.Minimize((_expression(p, r, size, Z) + h) / scale), constraints)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            problem.solve(solver="CLARABEL", **(_SETTINGS | settings))
        except cp.SolverError:
            return p.start(), "failed"
    if U.value is None:
        return p.start(), str(problem.status)
    w = (U.value * (size / s[:, None])).ravel()
    w = p.term.repaired(w)
    if not p.bias:
        return w, str(problem.status)
    c0 = size * (c.value[0] + center) - (m[:, None].astype(LONG) * w.reshape(p.d, C)).sum(0)
    return np.concatenate([w, c0.astype(float)]), str(problem.status)


def polished(p: Pooled, x: Array) -> Array:
    """A better point than x by L-BFGS-B in standard units with positive and negative parts; x itself if none is found.

    A second method, for smooth losses and terms on each coordinate by itself.
    """
    if p.loss in ("hinge", "absolute", "quantile") or p.term.name not in _SPLIT:
        return x
    Xs, m, s = standardised(p)
    if not p.centred:
        Xs, m = p.X / s, np.zeros(p.d)
    C, D = p.classes, p.d * p.classes
    sizes = np.repeat(s, C)
    slope, ridge = _parts(p.term, D)

    def model(u: Array) -> Array:
        w = (u[:D] - u[D : 2 * D]) / sizes
        if not p.bias:
            return w
        return np.concatenate([w, u[2 * D :] - (m[:, None] * w.reshape(p.d, C)).sum(0)])

    def target(u: Array) -> tuple[float, Array]:
        W = (u[:D] - u[D : 2 * D]).reshape(p.d, C)
        G = slopes(p, Xs @ W + (u[2 * D :] if p.bias else 0.0) + p.t[:, None])
        g = (Xs.T @ G).ravel() + ridge * W.ravel() / sizes**2
        h = slope / sizes
        return p.value(model(u)), np.concatenate([g + h, -g + h, G.sum(0) if p.bias else []])

    W, c = p.split(x)
    u0 = W.ravel() * sizes
    ends = c + (m[:, None] * W).sum(0) if p.bias else []
    bounds = [(0, 0 if np.isinf(v) else None) for v in np.tile(slope, 2)] + [(None, None)] * len(ends)
    slope = np.where(np.isinf(slope), 0.0, slope)
    start = np.concatenate([np.maximum(u0, 0), np.maximum(-u0, 0), ends])
    options = {"maxiter": 3000, "ftol": 1e-15, "gtol": 1e-12}
    done = scipy.optimize.minimize(target, start, jac=True, method="L-BFGS-B", bounds=bounds, options=options)
    return min((x, model(done.x)), key=p.value)


_SPLIT = ("Zero", "L1", "WeightedL1", "L2Squared", "ElasticNet")


def _parts(term: Term, D: int) -> tuple[Array, Array]:
    """The slopes of the absolute values in a term, and the factors of the half squares."""
    f = term.fields
    weights = np.ones(D) if f.get("weights") is None else np.asarray(f["weights"], float)
    first = {"L1": f.get("lam", 0.0), "WeightedL1": 1.0, "ElasticNet": f.get("l1", 0.0)}.get(term.name, 0.0)
    second = {"L2Squared": f.get("lam", 0.0), "ElasticNet": f.get("l2", 0.0)}.get(term.name, 0.0)
    return first * weights, np.full(D, second)


def slopes(p: Pooled, Z: Array) -> Array:
    """The derivatives of the mean loss in the margins, ``(n, C)``; smooth losses only."""
    if p.loss == "cox":
        return p.likelihood.slopes(Z[:, 0])[:, None]
    z, y = Z[:, 0], p.y
    match p.loss:
        case "least_squares":
            d = z - y
        case "huber":
            d = np.clip(z - y, -p.option, p.option)
        case "logistic":
            d = -y * scipy.special.expit(-y * z)
        case "squared_hinge":
            d = -2 * y * np.maximum(0, 1 - y * z)
        case "poisson":
            d = np.exp(np.minimum(z, 700)) - y
        case _:
            return p.o[:, None] * (scipy.special.softmax(Z, axis=1) - np.eye(p.classes)[y.astype(int)])
    return np.asarray(p.o * d)[:, None]


# -- is there a minimiser? --------------------------------------------------------------------------------------------


def attained(p: Pooled) -> bool | None:
    """Whether a convex F has a minimiser; None where rounding leaves it open.

    It has none where the loss falls for ever along a direction in which h does not grow: classes that a direction
    separates, counts that are zero wherever a direction lowers the margin, events whose margins a direction makes the
    largest of all at risk.
    """
    if p.loss not in ("logistic", "multinomial", "poisson", "cox"):
        return True
    keep = p.o > 0
    if p.centred:
        Xs, _, s = standardised(p)
    else:
        s = np.maximum(abs(p.X).max(0, initial=0.0), 1e-300)
        Xs = p.X / s
    Xs, y, C = Xs[keep], p.y[keep], p.classes
    low, high, rows = p.term.receding(p.d * C)
    A = np.hstack([Xs, np.ones((len(Xs), 1))]) if p.bias else Xs
    free = C if p.bias else 0
    bounds = list(zip(np.append(low, -np.ones(free)), np.append(high, np.ones(free)), strict=True))
    rows = np.hstack([rows / np.repeat(s, C), np.zeros((len(rows), free))])
    rows = rows / np.maximum(abs(rows).max(1, keepdims=True), 1e-300) if len(rows) else rows
    if p.loss == "logistic":
        G, equal = y[:, None] * A, rows
    elif p.loss == "poisson":
        G, equal = -A[y == 0], np.vstack([rows, A[y > 0]])
    elif p.loss == "cox":
        G, equal = replace(p, y=y, o=p.o[keep]).likelihood.ascents(A), rows
    else:
        own = y.astype(int)
        pairs = [(i, k) for i in range(len(A)) for k in range(C) if k != own[i]]
        G = np.zeros((len(pairs), A.shape[1] * C))
        for row, (i, k) in zip(G, pairs, strict=True):
            row.reshape(-1, C)[:, own[i]] += A[i]
            row.reshape(-1, C)[:, k] -= A[i]
        equal = rows
    if not len(G):
        return True
    tight = {"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10}
    done = scipy.optimize.linprog(
        -G.sum(0), A_ub=-G, b_ub=np.zeros(len(G)), A_eq=equal if len(equal) else None,
        b_eq=np.zeros(len(equal)) if len(equal) else None, bounds=bounds, method="highs", options=tight,
    )  # fmt: skip
    if done.status != 0:
        return None
    if -done.fun <= 1e-8:
        return True
    gains = G @ done.x
    sound = gains.max() > 1e-5 and gains.min() > -1e-8 * gains.max()
    sound &= not len(equal) or abs(equal @ done.x).max() <= 1e-8 * gains.max()
    return False if sound else None


# -- intervals --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wald:
    """Estimates and standard errors of an unregularized model; NaN where the samples do not determine one."""

    estimate: Array
    se: Array


def wald(p: Pooled, robust: bool) -> Wald:
    """Least squares or maximum likelihood in standard units, and its covariance there, taken back.

    Only samples with weight count. Everything is by singular values of the weighted design, so that directions are told
    apart to 1e-12 of its size where a Hessian, which has their squares, would have lost them. Samples whose curvature
    is far below that of others have it lost there, too, and get more digits.
    """
    keep = p.o > 0
    p = replace(p, X=p.X[keep], y=p.y[keep], o=p.o[keep], t=p.t[keep])
    Xs, m, s = standardised(p)
    if not p.centred:
        s = np.sqrt((p.o[:, None] * p.X**2).sum(0))
        s = np.where(s > 0, s, 1.0)
    A = np.hstack([Xs, np.ones((len(Xs), 1))]) if p.bias else Xs if p.centred else p.X / s
    back = np.zeros((p.d + p.bias, A.shape[1]))
    back[: p.d, : p.d] = np.diag(1 / s)
    if p.bias:
        back[-1, : p.d], back[-1, -1] = -m / s, 1.0
    seen = p.likelihood.design(A, p.t) if p.loss == "cox" else A  # what differs between those at risk
    _, sizes, Vt = scipy.linalg.svd(seen, full_matrices=len(seen) < A.shape[1])
    told = np.append(sizes, np.zeros(len(Vt) - len(sizes))) > _NULL * sizes[0]  # none of those at risk may differ
    unknown = np.linalg.norm(back @ Vt[~told].T, axis=1) > 1e-7 * np.linalg.norm(back, axis=1)
    start = np.zeros(A.shape[1])
    if p.loss == "poisson" and p.bias:
        start[-1] = np.log((p.o * p.y).sum() / (p.o * np.exp(p.t)).sum())
    if not told.any():
        return Wald(np.full(len(back), np.nan), np.full(len(back), np.nan))
    A, back, start = A @ Vt[told].T, back @ Vt[told].T, Vt[told] @ start
    theta, root = _newton(p, A, start)
    if p.loss in ("logistic", "poisson") and not (heavy := _heavy(p, A @ theta + p.t)).min() > _GRADED * heavy.max():
        theta, root = _newton_exactly(p, A, start)
    n, rank = len(A), root.shape[1]
    z = A @ theta + p.t
    if robust:
        scores = p.likelihood.scores(A, z) if p.loss == "cox" else slopes(p, z[:, None]) * A
        half = root @ (root.T @ scores.T)
    else:
        half = root * np.sqrt((((p.y - z) ** 2).sum() / (n - rank) if p.loss == "least_squares" else 1.0) / n)
    estimate, se = back @ theta, np.linalg.norm(back @ half, axis=1)
    return Wald(np.where(unknown, np.nan, estimate), np.where(unknown, np.nan, se))


_NULL = 1e-12
_GRADED = 1e-6  # between roots of samples' curvatures: beyond, steps take more digits


def _newton(p: Pooled, A: Array, theta: Array) -> tuple[Array, Array]:
    """The maximum of the likelihood, and its root."""
    for _ in range(200):
        root, g = _root(p, A, theta)
        move = root @ g
        now = _mean(p, A, theta)
        step = 1.0
        while step > 1e-12 and _mean(p, A, theta - step * move) > now + 1e-15 * abs(now):
            step /= 2
        theta = theta - step * move
        if abs(move).max() < 1e-13 * (1 + abs(theta).max()):
            break
    return theta, _root(p, A, theta)[0]


def _newton_exactly(p: Pooled, A: Array, theta: Array) -> tuple[Array, Array]:
    """The same in sixty digits, where few samples, or ones with little weight, are all that keeps margins finite."""
    with mpmath.workdps(60):
        A, x, o, y, t = (np.vectorize(mpmath.mpf, otypes=[object])(v) for v in (A, theta, p.o, p.y, p.t))
        exp, log1p = np.frompyfunc(mpmath.exp, 1, 1), np.frompyfunc(mpmath.log1p, 1, 1)

        def value(x: Array) -> Any:
            z = A @ x + t
            return (o * (log1p(exp(-y * z)) if p.loss == "logistic" else exp(z) - y * z)).sum()

        for _ in range(500):
            z = A @ x + t
            q = 1 / (1 + exp(y * z)) if p.loss == "logistic" else exp(z)
            slope, second = (-y * q, q * (1 - q)) if p.loss == "logistic" else (q - y, q)
            H, g = mpmath.matrix((A.T @ ((o * second)[:, None] * A)).tolist()), A.T @ (o * slope)
            move = np.array(list(mpmath.cholesky_solve(H, mpmath.matrix(g.tolist()))), object)
            gain, now, step = g @ move, value(x), 1
            while not value(x - step * move) <= now - step * gain / 10**4 and gain > mpmath.mpf("1e-50") * now:
                step = step / mpmath.mpf(2)
            x = x - step * move
            if gain <= mpmath.mpf("1e-50") * now:
                break
        root = mpmath.cholesky(H) ** -1
        return x.astype(float), np.array(root.T.tolist(), float)


def _heavy(p: Pooled, z: Array) -> Array:
    """The root of each sample's curvature."""
    match p.loss:
        case "least_squares":
            second = np.ones(len(z))
        case "poisson":
            second = np.exp(z)
        case _:
            second = scipy.special.expit(z) * scipy.special.expit(-z)
    return np.asarray(np.sqrt(p.o * second))


def _root(p: Pooled, A: Array, theta: Array) -> tuple[Array, Array]:
    """S with S S' the inverse of the Hessian on what it determines, and S' times the gradient."""
    z = A @ theta + p.t
    heavy = np.ones(len(z)) if p.loss == "cox" else _heavy(p, z)
    B = p.likelihood.design(A, z) if p.loss == "cox" else heavy[:, None] * A
    scale = np.linalg.norm(B, axis=0)
    scale = np.where(scale > 0, scale, 1.0)
    U, sizes, Vt = scipy.linalg.svd(B / scale, full_matrices=False)
    kept = sizes > _NULL * sizes[0]
    S = Vt.T / scale[:, None]
    S = S[:, kept] / sizes[kept]
    slope = slopes(p, z[:, None])[:, 0]
    return S, S.T @ (A.T @ slope) if p.loss == "cox" else U[:, kept].T @ (slope / np.maximum(heavy, 1e-300))


def _mean(p: Pooled, A: Array, theta: Array) -> float:
    return float(mean(p, (A @ theta + p.t).astype(LONG)[:, None]))


def convexified(p: Pooled, x: Array) -> Pooled:
    """The convex problem that a stationary point x of a nonconvex one solves; itself, if it is convex."""
    return p if p.term.convex else replace(p, term=p.term.convexified(p.split(np.asarray(x, float))[0].ravel()))
