"""Regularizers: each prox against an independent solver, then one list of them all against one list of laws."""

import dataclasses
import itertools
import math
import pickle
import warnings

import cvxpy as cp
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import fedcomposite as fc
from fedcomposite.regularizers import (
    L0,
    L1,
    MCP,
    REGISTRY,
    SCAD,
    Affine,
    Blocks,
    Box,
    ClusteredLasso,
    ElasticNet,
    FusedLasso,
    GroupLasso,
    Indicator,
    L1Ball,
    L2Ball,
    L2Squared,
    LinfNorm,
    NonNegative,
    NuclearNorm,
    On,
    PositivePart,
    Separable,
    Simplex,
    SparseGroupLasso,
    Sparsity2to4,
    TopK,
    Zero,
    build,
)
from fedcomposite.regularizers.fused import short_total_variation, total_variation
from fedcomposite.runtime.program import CompiledProx
from fedcomposite.runtime.program.prox import compiled_formula
from fedcomposite.testing import REGULARIZER_LAWS, check_regularizer

D = 12
W = tuple(np.linspace(0.0, 2.0, D).tolist())
SIZES = (3, 1, 4, 1, 3)
CUTS = np.cumsum(SIZES)[:-1]
A = np.stack([np.ones(D), np.arange(D) / 10.0, np.arange(D) / 5.0])  # the third row depends on the second
B = np.array([1.0, 0.5, 1.0])
MASK = np.array([True] * 3 + [False] * 2 + [True] * 7)


def inside(ok):
    return 0.0 if ok else math.inf


def scad(u, lam, a):
    u = abs(u)
    if u <= lam:
        return lam * u
    return (2 * a * lam * u - u * u - lam * lam) / (2 * (a - 1)) if u <= a * lam else lam * lam * (a + 1) / 2


def mcp(u, lam, theta):
    u = abs(u)
    return lam * u - u * u / (2 * theta) if u <= theta * lam else theta * lam * lam / 2


def triples(x):
    return sum(abs(math.prod(t)) for block in x.reshape(-1, 4) for t in itertools.combinations(block.tolist(), 3))


def apart(x, size):
    return sum(abs(a - b) for g in x.reshape(-1, size) for a, b in itertools.combinations(g.tolist(), 2))


def norms(x, cuts):
    return [np.linalg.norm(g) for g in np.split(x, cuts)]


# name -> (regularizer, naive value of a NumPy vector)
CASES = {
    "zero": (Zero(), lambda x: 0.0),
    "l1": (L1(0.4), lambda x: 0.4 * sum(abs(x))),
    "l1-weights": (L1(0.4, weights=W), lambda x: 0.4 * sum(abs(x) * W)),
    "l2": (L2Squared(0.7), lambda x: 0.35 * sum(x * x)),
    "enet": (ElasticNet(0.4, 0.7), lambda x: 0.4 * sum(abs(x)) + 0.35 * sum(x * x)),
    "positive": (PositivePart(0.5), lambda x: 0.5 * sum(max(u, 0) for u in x)),
    "mcp": (MCP(0.5, 2.0), lambda x: sum(mcp(u, 0.5, 2.0) for u in x)),
    "mcp-kappa": (MCP(0.5, 2.0, kappa=1.5), lambda x: 1.5 * sum(mcp(u, 0.5, 2.0) for u in x)),
    "scad": (SCAD(0.4), lambda x: sum(scad(u, 0.4, 3.7) for u in x)),
    "scad-kappa": (SCAD(0.4, 2.6, kappa=0.8), lambda x: 0.8 * sum(scad(u, 0.4, 2.6) for u in x)),
    "l0": (L0(0.3), lambda x: 0.3 * np.count_nonzero(x)),
    "topk": (TopK(4), lambda x: inside(np.count_nonzero(x) <= 4)),
    "group": (GroupLasso(0.3, 3), lambda x: 0.3 * math.sqrt(3) * sum(norms(x, [3, 6, 9]))),
    "group-sizes": (
        GroupLasso(0.3, SIZES),
        lambda x: 0.3 * sum(math.sqrt(s) * n for s, n in zip(SIZES, norms(x, CUTS), strict=True)),
    ),
    "group-weights": (
        GroupLasso(0.3, SIZES, weights=(1, 2, 0, 0.5, 1)),
        lambda x: 0.3 * np.dot((1, 2, 0, 0.5, 1), norms(x, CUTS)),
    ),
    "group-equal-weights": (
        GroupLasso(0.3, 4, weights=(1, 2, 0)),
        lambda x: 0.3 * np.dot((1, 2, 0), norms(x, [4, 8])),
    ),
    "group-rows": (
        GroupLasso(0.3, "rows", weights="equal", shape=(3, 2, 2)),
        lambda x: 0.3 * sum(np.linalg.norm(x.reshape(3, 4), axis=1)),
    ),
    "group-columns": (
        GroupLasso(0.3, "columns", shape=(3, 4)),
        lambda x: 0.3 * math.sqrt(3) * sum(np.linalg.norm(x.reshape(3, 4), axis=0)),
    ),
    "sparse-group": (
        SparseGroupLasso(0.2, 0.3, SIZES),
        lambda x: 0.2 * sum(abs(x)) + 0.3 * sum(math.sqrt(s) * n for s, n in zip(SIZES, norms(x, CUTS), strict=True)),
    ),
    "linf": (LinfNorm(1.5), lambda x: 1.5 * max(abs(x))),
    "nuclear": (NuclearNorm(0.8, (3, 4)), lambda x: 0.8 * np.linalg.norm(x.reshape(3, 4), "nuc")),
    "nuclear-conv": (NuclearNorm(0.8, (4, 3, 1, 1)), lambda x: 0.8 * np.linalg.norm(x.reshape(4, 3), "nuc")),
    "fused": (FusedLasso(0.6), lambda x: 0.6 * sum(abs(np.diff(x)))),
    "fused-l1": (FusedLasso(0.6, 0.3), lambda x: 0.6 * sum(abs(np.diff(x))) + 0.3 * sum(abs(x))),
    "clustered": (ClusteredLasso(0.2, 4), lambda x: 0.2 * apart(x, 4)),
    "clustered-l1": (ClusteredLasso(0.2, 6, l1=0.1), lambda x: 0.2 * apart(x, 6) + 0.1 * sum(abs(x))),
    "2:4": (Sparsity2to4(0.5), lambda x: 0.5 * triples(x)),
    "box": (Box(-0.5, 0.8), lambda x: inside(all(x >= -0.5) and all(x <= 0.8))),
    "nonnegative": (NonNegative(), lambda x: inside(all(x >= 0))),
    "l2-ball": (L2Ball(1.5), lambda x: inside(np.linalg.norm(x) <= 1.5 + 1e-12)),
    "l1-ball": (L1Ball(2.0), lambda x: inside(sum(abs(x)) <= 2.0 + 1e-12)),
    "simplex": (Simplex(1.5), lambda x: inside(all(x >= 0) and abs(sum(x) - 1.5) < 1e-12)),
    "affine": (Affine(A.tolist(), B.tolist()), lambda x: inside(np.linalg.norm(A @ x - B) < 1e-12)),
    "on": (L1(0.4).on(MASK.tolist()), lambda x: 0.4 * sum(abs(x[MASK]))),
    "on-run": (LinfNorm(1.0).on([False] * 2 + [True] * 10), lambda x: max(abs(x[2:]))),
    "blocks": (
        L1(0.4).on(MASK.tolist()) + GroupLasso(0.5, 2, weights="equal").on((~MASK).tolist()),
        lambda x: 0.4 * sum(abs(x[MASK])) + 0.5 * np.linalg.norm(x[~MASK]),
    ),
}
NAMES = list(CASES)
WEAK = [n for n in NAMES if CASES[n][0].weakly_convex]
JUMPS = [n for n in NAMES if n not in WEAK]
CONSTRAINTS = [n for n in NAMES if isinstance(CASES[n][0], Indicator)]


def draw(*shape, seed=0, scale=1.0, dtype=torch.float64):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def steps(h):
    """Small, middling, and close to the limit."""
    return (0.01, 0.3, 0.97) if h.rho in (0.0, math.inf) else tuple(s / h.rho for s in (0.01, 0.3, 0.97))


def structured(h, seed=0):
    """Points with the zeros, ties and boundaries of h: outputs of its prox, in rows, and random points if finite."""
    v = torch.cat([draw(4, D, seed=seed, scale=s) for s in (0.2, 1.0, 3.0)])
    points = h.prox(v, steps(h)[1])
    return torch.cat([points, v, torch.zeros(1, D, dtype=v.dtype)]) if h.value(v).isfinite().all() else points


# ---------------------------------------------------------------------------------------------------------------------
# Each prox against an independent solver.


def pairs(u, size):
    each = [c for i in range(0, D, size) for c in itertools.combinations(range(i, i + size), 2)]
    return cp.norm1(u[[a for a, _ in each]] - u[[b for _, b in each]])


GROUP_SIZES = list(zip(np.split(np.arange(D), CUTS), SIZES, strict=True))
CONVEX = {
    "l1-weights": lambda u: (0.4 * cp.norm1(cp.multiply(np.array(W), u)), []),
    "l2": lambda u: (0.35 * cp.sum_squares(u), []),
    "enet": lambda u: (0.4 * cp.norm1(u) + 0.35 * cp.sum_squares(u), []),
    "positive": lambda u: (0.5 * cp.sum(cp.pos(u)), []),
    "group": lambda u: (0.3 * math.sqrt(3) * sum(cp.norm2(u[i : i + 3]) for i in range(0, D, 3)), []),
    "group-sizes": lambda u: (0.3 * sum(math.sqrt(s) * cp.norm2(u[g]) for g, s in GROUP_SIZES), []),
    "group-rows": lambda u: (0.3 * sum(cp.norm2(u[i : i + 4]) for i in range(0, D, 4)), []),
    "group-columns": lambda u: (0.3 * math.sqrt(3) * sum(cp.norm2(u[np.arange(i, D, 4)]) for i in range(4)), []),
    "sparse-group": lambda u: (
        0.2 * cp.norm1(u) + 0.3 * sum(math.sqrt(s) * cp.norm2(u[g]) for g, s in GROUP_SIZES),
        [],
    ),
    "linf": lambda u: (1.5 * cp.norm_inf(u), []),
    "nuclear": lambda u: (0.8 * cp.normNuc(cp.reshape(u, (3, 4), order="C")), []),
    "nuclear-conv": lambda u: (0.8 * cp.normNuc(cp.reshape(u, (4, 3), order="C")), []),
    "fused": lambda u: (0.6 * cp.norm1(cp.diff(u)), []),
    "fused-l1": lambda u: (0.6 * cp.norm1(cp.diff(u)) + 0.3 * cp.norm1(u), []),
    "clustered": lambda u: (0.2 * pairs(u, 4), []),
    "clustered-l1": lambda u: (0.2 * pairs(u, 6) + 0.1 * cp.norm1(u), []),
    "box": lambda u: (0, [u >= -0.5, u <= 0.8]),
    "nonnegative": lambda u: (0, [u >= 0]),
    "l2-ball": lambda u: (0, [cp.norm2(u) <= 1.5]),
    "l1-ball": lambda u: (0, [cp.norm1(u) <= 2.0]),
    "simplex": lambda u: (0, [u >= 0, cp.sum(u) == 1.5]),
    "affine": lambda u: (0, [A[:2] @ u == B[:2]]),
    "on": lambda u: (0.4 * cp.norm1(u[MASK]), []),
    "blocks": lambda u: (0.4 * cp.norm1(u[MASK]) + 0.5 * cp.norm2(u[~MASK]), []),
}


@pytest.mark.parametrize("name", CONVEX)
def test_prox_agrees_with_a_convex_solver(name):
    h, naive = CASES[name]
    for seed, (scale, step) in enumerate([(0.3, 0.3), (1.5, 0.9)]):
        v = draw(D, seed=seed, scale=scale)
        u = cp.Variable(D)
        term, constraints = CONVEX[name](u)
        distance = cp.sum_squares(u - v.numpy()) / (2 * step)
        cp.Problem(cp.Minimize(term + distance), constraints).solve(
            solver="CLARABEL", tol_gap_abs=1e-9, tol_gap_rel=1e-9, tol_feas=1e-9
        )
        p = h.prox(v, step).numpy()
        best = (0.0 if constraints else naive(u.value)) + sum((u.value - v.numpy()) ** 2) / (2 * step)
        assert naive(p) + sum((p - v.numpy()) ** 2) / (2 * step) <= best + 1e-8
        np.testing.assert_allclose(p, u.value, rtol=0, atol=1e-4)


SCALAR = {
    "l1": (lambda k: L1(k), lambda k, u: k * np.abs(u)),
    "l2": (lambda k: L2Squared(k), lambda k, u: k / 2 * u**2),
    "enet": (lambda k: ElasticNet(k, 1.3), lambda k, u: k * np.abs(u) + 0.65 * u**2),
    "positive": (lambda k: PositivePart(k), lambda k, u: k * np.maximum(u, 0)),
    "mcp": (lambda k: MCP(0.7, 1.8, k), lambda k, u: k * np.vectorize(mcp)(u, 0.7, 1.8)),
    "scad": (lambda k: SCAD(0.7, 3.1, k), lambda k, u: k * np.vectorize(scad)(u, 0.7, 3.1)),
    "l0": (lambda k: L0(k), lambda k, u: k * (u != 0)),
}


@pytest.mark.parametrize("name", SCALAR)
@settings(deadline=None, max_examples=40)
@given(v=st.floats(-4, 4), kappa=st.floats(0.05, 2.0), part=st.floats(0.01, 0.97))
def test_scalar_prox_beats_a_grid(name, v, kappa, part):
    make, phi = SCALAR[name]
    h = make(kappa)
    step = part / h.rho if 0 < h.rho < math.inf else 3 * part
    p = h.prox(torch.tensor([v], dtype=torch.float64), step).item()

    def cost(u):
        return phi(kappa, u) + (u - v) ** 2 / (2 * step)

    grid = np.append(np.linspace(-4.5, 4.5, 1801), [0.0, v])
    costs = cost(grid)
    near = grid[np.argmin(costs)] + np.linspace(-0.01, 0.01, 401)
    assert cost(np.array([p]))[0] <= min(costs.min(), cost(near).min()) + 1e-12
    if h.weakly_convex and part < 0.9:  # the minimiser is unique, and the grid is 5e-5 fine
        assert abs(p - near[np.argmin(cost(near))]) < 1e-3


def test_mcp_and_scad_agree_with_skglm():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from skglm.utils.prox_funcs import prox_MCP, prox_SCAD
    v = np.linspace(-3, 3, 241) + 1e-4
    for theirs, ours in ((prox_MCP, MCP(0.6, 2.5)), (prox_SCAD, SCAD(0.6, 3.7))):
        shape = 2.5 if theirs is prox_MCP else 3.7
        p = ours.prox(torch.from_numpy(v), 1.0).numpy()
        np.testing.assert_allclose(p, [theirs(u, 1.0, 0.6, shape) for u in v], rtol=0, atol=1e-12)


def test_scad_is_not_the_unit_step_formula_with_a_smaller_lam():
    v = torch.linspace(0, 4, 401, dtype=torch.float64)
    assert (SCAD(1.0).prox(v, 0.5) - SCAD(0.5).prox(v, 1.0)).abs().max() > 0.4


@settings(deadline=None, max_examples=30)
@given(values=st.lists(st.integers(-6, 6), min_size=2, max_size=6), k=st.integers(1, 6))
def test_topk_beats_every_support(values, k):
    v = np.array(values, float)
    p = TopK(k).prox(torch.from_numpy(v), 0.5).numpy()
    best = min(
        sum(v[list(set(range(len(v))) - set(s))] ** 2) for s in itertools.combinations(range(len(v)), min(k, len(v)))
    )
    assert np.count_nonzero(p) <= k
    assert sum((p - v) ** 2) == best


def fused_by_enumeration(v, lam):
    """Every pattern of jumps (up, down, none); each gives constants in closed form; the cheapest is the solution."""
    best = math.inf, v
    for jumps in itertools.product((-1, 0, 1), repeat=len(v) - 1):
        cuts = [i + 1 for i, s in enumerate(jumps) if s]
        push = np.zeros(len(v))
        for i, s in enumerate(jumps):
            push[i] += lam * s
            push[i + 1] -= lam * s
        u = np.concatenate([np.full(len(g), g.mean()) for g in np.split(v + push, cuts)])
        cost = lam * sum(abs(np.diff(u))) + sum((u - v) ** 2) / 2
        best = min(best, (cost, u), key=lambda t: t[0])
    return best


@settings(deadline=None, max_examples=60)
@given(
    values=st.lists(st.integers(-4, 4) | st.floats(-4, 4), min_size=1, max_size=6),
    lam=st.sampled_from([0.5, 1.0, 2.0]) | st.floats(0.01, 3),
)
def test_fused_lasso_agrees_with_enumeration(values, lam):
    v = np.array(values, float)
    cost, u = fused_by_enumeration(v, lam)
    p = FusedLasso(lam).prox(torch.from_numpy(v), 1.0).numpy()
    assert lam * sum(abs(np.diff(p))) + sum((p - v) ** 2) / 2 <= cost + 1e-12
    np.testing.assert_allclose(p, u, rtol=0, atol=1e-6)


def test_fused_lasso_of_long_vectors_meets_the_dual_bounds():
    # u solves the problem iff the partial sums of v - u stay within lam, reach it at jumps, and end at zero.
    for d, lam, seed in ((5000, 0.3, 0), (5000, 20.0, 1), (777, 1e3, 2), (4096, 1.0, 3)):
        v = draw(d, seed=seed, scale=2.0)
        v[d // 3 : d // 2] += 5
        u = FusedLasso(lam).prox(v, 1.0)
        dual = (v - u).cumsum(0)
        jump = u.diff()
        assert dual.abs().max() <= lam + 1e-9
        assert abs(dual[-1]) <= 1e-9
        assert ((dual[:-1] + lam * jump.sign())[jump != 0].abs() <= 1e-9).all()


@pytest.mark.parametrize("seed", range(20))
def test_fused_lasso_one_after_another_and_all_at_once(seed):
    rng = np.random.default_rng(seed)
    for d in rng.integers(1, 60, size=20).tolist():
        v = rng.normal(size=d) * 10 ** rng.uniform(-3, 3)
        v = np.round(v) if seed % 2 else v.cumsum()
        first = rng.random(d) < 0.1
        first[0] = True
        lam = np.repeat(10 ** rng.uniform(-3, 2, first.sum()) * (seed % 3 > 0), np.diff([*np.flatnonzero(first), d]))
        short, whole = (way(v.copy(), lam.copy(), first.copy()) for way in (short_total_variation, total_variation))
        np.testing.assert_allclose(short, whole, rtol=1e-13, atol=1e-13 * abs(v).max())


def test_fused_lasso_of_a_growing_sequence_needs_many_levels():
    v = torch.cumsum(1.5 ** torch.arange(60, dtype=torch.float64), 0)
    u = FusedLasso(0.25).prox(v, 1.0)
    expected = v.clone()
    expected[0] += 0.25
    expected[-1] -= 0.25
    torch.testing.assert_close(u, expected, rtol=1e-14, atol=0)


def best_block(z, s, generator):
    """Coordinate descent on e3 from many starts: each coordinate's problem is solved exactly."""
    w = np.concatenate([generator.random((400, 4)) * z, np.eye(4)[[0, 1]] * z, [z]])
    pairs = [[p for p in itertools.combinations(range(4), 2) if i not in p] for i in range(4)]
    for _ in range(300):
        for i in range(4):
            w[:, i] = np.maximum(0, z[i] - s * sum(w[:, a] * w[:, b] for a, b in pairs[i]))
    cost = s * np.array([triples(u) for u in w]) + ((w - z) ** 2).sum(1) / 2
    return cost.min()


def test_2_to_4_prox_beats_many_starts():
    generator = np.random.default_rng(0)
    blocks, shares, counts = [], [], set()
    for k in range(60):
        z = np.sort(generator.random(4))[::-1] if k % 3 else 1 + 0.05 * generator.random(4)
        z = np.full(4, z[0]) if k % 10 == 0 else z
        blocks.append(z)
        shares.append(10 ** generator.uniform(-1.2, 0.6))
    v = torch.tensor(np.array(blocks))
    signs = draw(*v.shape).sign()
    p = Sparsity2to4(2.0).prox(signs * v, torch.tensor(shares, dtype=torch.float64).unsqueeze(1) / 2)
    assert (p * signs >= 0).all()
    for z, s, u in zip(blocks, shares, p.abs().numpy(), strict=True):
        assert s * triples(u) + sum((u - z) ** 2) / 2 <= best_block(z, s, generator) + 1e-12
        counts.add(np.count_nonzero(u))
    assert counts == {2, 3, 4}


@example(v=[1.175494351e-38] * 4, s=1e-9)
@example(v=[3e-20, 2e-20, 1e-20, 1e-25], s=1.0)
@example(v=[0.0, 2.2250738585072014e-308, 1.0, 2.2250738585072014e-308], s=1e-9)
@settings(deadline=None, max_examples=60)
@given(
    v=st.lists(st.integers(-3, 3) | st.floats(-5, 5, allow_subnormal=False), min_size=4, max_size=4),
    s=st.sampled_from([1e-9, 0.1, 0.5, 1.0, 1e3, 1e9]) | st.floats(0.01, 5),
)
def test_2_to_4_prox_beats_a_grid_and_keeps_order(v, s):
    v = np.array(v, float)
    p = Sparsity2to4(1.0).prox(torch.from_numpy(v), s).numpy()
    assert np.isfinite(p).all()
    assert (abs(p) <= abs(v) * (1 + 1e-12)).all()

    def cost(u):
        a, b, c, d = np.moveaxis(np.abs(u), -1, 0)
        return s * (a * b * c + a * b * d + a * c * d + b * c * d) + ((u - v) ** 2).sum(-1) / 2

    grid = np.stack(np.meshgrid(*[np.linspace(0, 1, 13)] * 4), -1).reshape(-1, 4) * v
    assert cost(p) <= cost(grid).min() * (1 + 1e-12) + 1e-28 * v @ v
    if np.count_nonzero(p) <= 2:
        assert set(p[p != 0]) <= set(v)  # kept entries are kept to the bit


@pytest.mark.parametrize(("dtype", "digits"), [(torch.float64, 1e-14), (torch.float32, 5e-6)])
def test_2_to_4_prox_is_stationary_to_rounding(dtype, digits):
    v = draw(2000, 4, dtype=dtype)
    v[::5] = v[::5].sign() * (1 + 0.01 * v[::5])
    v[::7, 0] = 0
    v[1::9, :2] = v[1::9, 2:]
    v[2::9] = 1
    for lam in 10.0 ** np.arange(-6, 7, 1.5):
        h = Sparsity2to4(float(lam))
        p = h.prox(v, 1.0)
        assert (h.optimality(p, p - v) <= digits * v.norm(dim=-1)).all()


# ---------------------------------------------------------------------------------------------------------------------
# One list, every law.

everyone = pytest.mark.parametrize("name", NAMES)


@everyone
def test_value_is_the_formula(name):
    h, naive = CASES[name]
    x = structured(h)
    np.testing.assert_allclose(h.value(x).numpy(), [naive(row) for row in x.numpy()], rtol=1e-12, atol=1e-13)
    if name in CONSTRAINTS:
        assert (h.value(draw(5, D, scale=10.0)) == math.inf).all()


@everyone
def test_prox_meets_the_optimality_condition(name):
    h, _ = CASES[name]
    for step in steps(h):
        for scale in (0.1, 1.0, 4.0):
            v = draw(6, D, seed=3, scale=scale)
            p = h.prox(v, step)
            assert (h.optimality(p, (p - v) / step) <= 1e-11 / step).all()


@everyone
def test_optimality_is_the_limit_of_the_prox_gradient_mapping(name):
    # ||x - prox_t(x - t g)|| / t tends to the distance from -g to the subdifferential as t falls to zero.
    h, _ = CASES[name]
    x = structured(h)
    if name == "topk":
        x = x[(x != 0).sum(-1) == 4]  # with fewer nonzeros the mapping fills the free places, however small t is
    t = 1e-7
    for scale in (0.1, 1.0):
        g = draw(*x.shape, seed=5, scale=scale)
        moved = (x - h.prox(x - t * g, t)).norm(dim=-1) / t
        torch.testing.assert_close(h.optimality(x, g), moved, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_optimality_is_infinite_outside_a_constraint(name):
    h, _ = CASES[name]
    x = draw(3, D, scale=10.0)
    assert (h.optimality(x, torch.zeros_like(x)) == math.inf).all()


@everyone
def test_subgradient_is_in_the_subdifferential(name):
    h, _ = CASES[name]
    if name in CONSTRAINTS or name == "l0":
        with pytest.raises(TypeError, match=r"no useful subgradient.*FedNMap"):
            h.subgradient(draw(D))
        return
    x = structured(h)
    assert (h.optimality(x, -h.subgradient(x)) <= 1e-12).all()


@pytest.mark.parametrize("name", WEAK)
def test_prox_is_lipschitz(name):
    h, _ = CASES[name]
    for step in steps(h):
        for scale in (0.01, 1.0):
            a = draw(200, D, seed=1)
            b = a + draw(200, D, seed=2, scale=scale)
            moved = (h.prox(a, step) - h.prox(b, step)).norm(dim=-1)
            assert (moved <= (a - b).norm(dim=-1) / (1 - h.rho * step) * (1 + 1e-9)).all()


@pytest.mark.parametrize("name", WEAK)
def test_h_plus_half_rho_square_is_midpoint_convex(name):
    h, _ = CASES[name]
    if name in CONSTRAINTS:
        return
    a, b = draw(3000, D, seed=7), draw(3000, D, seed=8)

    def lifted(x, rho):
        return h.value(x) + rho / 2 * x.square().sum(-1)

    assert (lifted((a + b) / 2, h.rho) <= (lifted(a, h.rho) + lifted(b, h.rho)) / 2 + 1e-10).all()


@pytest.mark.parametrize("name", ["mcp", "mcp-kappa", "scad", "scad-kappa"])
def test_rho_is_the_smallest_modulus(name):
    h, _ = CASES[name]
    u = torch.linspace(-2, 2, 801, dtype=torch.float64).unsqueeze(-1)
    lifted = h.value(u) + 0.9 * h.rho / 2 * u.square().sum(-1)
    assert (lifted[1:-1] > (lifted[2:] + lifted[:-2]) / 2 + 1e-9).any()


def test_2_to_4_modulus_on_a_box():
    modulus = (math.sqrt(13) - 1) * 0.5 * 2.0  # lam = 0.5 on the box of half-width 2
    h = Sparsity2to4(0.5)
    a, b = (
        4 * torch.rand(20000, 4, generator=torch.Generator().manual_seed(i), dtype=torch.float64) - 2 for i in (0, 1)
    )
    corner = torch.tensor([2.0, 2.0, 2.0, 1e-3], dtype=torch.float64)
    bend = torch.linalg.eigh(torch.tensor([[0, 1, 1, 2], [1, 0, 1, 2], [1, 1, 0, 2], [2, 2, 2, 0.0]]).double())[1][:, 0]

    def gap(a, b, rho):
        lifted = [h.value(x) + rho / 2 * x.square().sum(-1) for x in (a, b, (a + b) / 2)]
        return (lifted[0] + lifted[1]) / 2 - lifted[2]

    assert (gap(a, b, modulus) >= -1e-10).all()
    assert gap(corner - 1e-3 * bend, corner + 1e-3 * bend, 0.9 * modulus) < 0


@everyone
def test_steps_out_of_range_are_refused(name):
    h, _ = CASES[name]
    v = draw(2, D)
    for bad in (-0.1, math.nan, torch.tensor([[0.1], [-0.1]])):
        with pytest.raises(ValueError, match="must be >= 0"):
            h.prox(v, bad)
    if name in JUMPS:
        assert h.rho == math.inf
        h.prox(v, 1e6)
    elif h.rho > 0:
        for bad in (1 / h.rho, 5.0 / h.rho, torch.tensor([[0.1 / h.rho], [1.01 / h.rho]])):
            with pytest.raises(ValueError, match=rf"below 1/rho = {1 / h.rho:g}"):
                h.prox(v, bad)


@everyone
def test_a_zero_step_is_a_projection_onto_the_domain(name):
    h, _ = CASES[name]
    if name not in CONSTRAINTS:
        v = draw(3, D)
        torch.testing.assert_close(h.prox(v, 0.0), v, rtol=0, atol=1e-14)


@everyone
def test_batch_equals_loop(name):
    h, _ = CASES[name]
    v, g = draw(2, 3, D, seed=4), draw(2, 3, D, seed=5)
    each = torch.linspace(0.1, 0.9, 6, dtype=torch.float64).reshape(2, 3, 1) / max(1.0, min(h.rho, 10.0))
    one, own, p = h.prox(v, 0.3), h.prox(v, each), h.prox(v, 0.2)
    for i, j in itertools.product(range(2), range(3)):
        torch.testing.assert_close(one[i, j], h.prox(v[i, j], 0.3), rtol=0, atol=1e-14)
        torch.testing.assert_close(own[i, j], h.prox(v[i, j], float(each[i, j])), rtol=0, atol=1e-14)
        torch.testing.assert_close(h.value(p)[i, j], h.value(p[i, j]), rtol=1e-13, atol=0)
        torch.testing.assert_close(h.optimality(p, g)[i, j], h.optimality(p[i, j], g[i, j]), rtol=1e-12, atol=1e-14)


@everyone
def test_inputs_are_kept_and_out_is_filled(name):
    h, _ = CASES[name]
    wide = draw(4, 2 * D)
    for v in (wide[:, :D].clone(), wide[:, ::2], wide[:, :D], draw(D, 4).T):  # contiguous, strided, slice, transpose
        before = v.clone()
        expected = h.prox(v, 0.3)
        assert torch.equal(v, before)
        assert expected.data_ptr() != v.data_ptr()
        for out in (torch.full_like(before, math.nan), torch.full((4, 3 * D), math.nan, dtype=v.dtype)[:, D : 2 * D]):
            assert h.prox(v, 0.3, out=out) is out
            assert torch.equal(out, expected)
            assert torch.equal(v, before)
        h.value(v), h.optimality(v, before)
        assert torch.equal(v, before)
        again = v.clone()
        expected = h.prox(again, 0.3)  # a sum may round differently in another memory layout
        assert h.prox(again, 0.3, out=again) is again
        assert torch.equal(again, expected)


@everyone
def test_dtype_is_kept(name):
    h, _ = CASES[name]
    v = draw(5, D, scale=2.0)
    exact = h.prox(v, 0.3)
    for dtype in (torch.float32, torch.float64):
        p = h.prox(v.to(dtype), 0.3)
        results = [p, h.value(p), h.optimality(p, p)]
        results += [] if name in CONSTRAINTS or name == "l0" else [h.subgradient(p)]
        assert all(t.dtype == dtype for t in results)
        torch.testing.assert_close(p.double(), exact, rtol=4e-7, atol=1e-6)  # a few roundings of numbers up to 7
        assert h.value(p).isfinite().all()  # a projection in float32 is inside its set
        assert h.prox(v.to(dtype), torch.full((5, 1), 0.3, dtype=dtype)).dtype == dtype


@everyone
def test_scaled_is_kappa_h(name):
    h, _ = CASES[name]
    v = draw(4, D, seed=9)
    for kappa in (0.3, 2.0):
        scaled, step = h.scaled(kappa), 0.2
        x = structured(h)
        torch.testing.assert_close(scaled.value(x), kappa * h.value(x), rtol=1e-13, atol=0)
        torch.testing.assert_close(scaled.prox(v, step), h.prox(v, kappa * step), rtol=0, atol=1e-13)
        assert scaled.rho == pytest.approx(h.rho if name in CONSTRAINTS else kappa * h.rho)
        assert type(scaled) is type(h)
    for kappa in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="must be a number > 0"):
            h.scaled(kappa)


@everyone
def test_is_a_value(name):
    h, _ = CASES[name]
    h.prox(draw(D), 0.1)  # fills caches, which are no part of the value
    assert pickle.loads(pickle.dumps(h)) == h
    assert hash(h) == hash(CASES[name][0])
    assert "tensor" not in repr(h)


@everyone
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_agrees_with_cpu(name):
    h, _ = CASES[name]
    v, g = draw(5, D), draw(5, D, seed=1)
    p, q = h.prox(v, 0.3), h.prox(v.cuda(), torch.full((5, 1), 0.3, dtype=v.dtype, device="cuda"))
    assert q.is_cuda
    torch.testing.assert_close(q.cpu(), p, rtol=0, atol=1e-12)
    for ours, theirs in ((h.value(p), h.value(p.cuda())), (h.optimality(p, g), h.optimality(p.cuda(), g.cuda()))):
        torch.testing.assert_close(theirs.cpu(), ours, rtol=0, atol=1e-10)


def test_every_registered_regularizer_is_in_the_list():
    parts = [h for h, _ in CASES.values()]
    assert {type(h) for h in parts} == {*REGISTRY.values(), On, Blocks}


# ---------------------------------------------------------------------------------------------------------------------
# The laws that anyone can run.

MORE = {
    "l1-none": (L1(0.0), 3),
    "l1-small": (L1(1e-3), 1),
    "l2-small": (L2Squared(1e-6), 3),
    "enet-one-sided": (ElasticNet(0.0, 1e-5), 2),
    "positive": (PositivePart(2.0), 1),
    "mcp": (MCP(0.1, 1.5, kappa=3.0), 2),
    "mcp-none": (MCP(0.0, 2.0), 2),
    "scad": (SCAD(1.0, kappa=0.02), 1),
    "l0": (L0(2.0), 2),
    "topk-all": (TopK(5), 2),
    "group-one": (GroupLasso(1.0, 1), 2),
    "group-none": (GroupLasso(0.0, 2), 4),
    "linf": (LinfNorm(0.3), 2),
    "linf-one": (LinfNorm(0.3), 1),
    "nuclear-row": (NuclearNorm(0.3, (1, 2)), 2),
    "fused-pair": (FusedLasso(0.3, 0.1), 2),
    "fused-one": (FusedLasso(0.3, 0.1), 1),
    "2:4-strong": (Sparsity2to4(20.0), 4),
    "2:4-none": (Sparsity2to4(0.0), 4),
    "box-half": (Box(-math.inf, 0.2), 2),
    "l2-ball-small": (L2Ball(1e-6), 2),
    "l2-ball-large": (L2Ball(1e6), 3),
    "l1-ball": (L1Ball(1e-3), 2),
    "simplex-one": (Simplex(), 1),
    "simplex": (Simplex(100.0), 40),
    "affine-point": (Affine([[1.0, 0.0], [1.0, 1.0]], [2.0, 3.0]), 2),
    "affine-scales": (Affine([[1.0, 1.0, 0.0], [0.0, 1e-18, 1e-18]], [1.0, 2e-18]), 3),
    "on-coordinates": (SCAD(0.4).on([0, 2, 5]), 7),
    "on-scattered": (LinfNorm(0.5).on([j % 3 != 0 for j in range(9)]), 9),
    "on-groups": (Sparsity2to4(0.5).on([True] * 4 + [False] + [True] * 4), 9),
    "on-many": (MCP(0.5, 2.0).on([j % 2 == 0 for j in range(140)]), 140),
    "blocks-of-constraints": (
        Simplex().on([0, 1, 2]) + L2Ball(1.0).on([3, 4]) + NuclearNorm(0.2, (2, 2)).on(range(6, 10)),
        11,
    ),
}


@everyone
def test_laws(name):
    check_regularizer(CASES[name][0], D)


@pytest.mark.parametrize("name", MORE)
def test_laws_of_other_parameters_and_lengths(name):
    h, dimension = MORE[name]
    check_regularizer(h, dimension)


@dataclasses.dataclass(frozen=True)
class Careless(Separable):
    """h(x) = |x|_1 with the usual mistakes: a prox for unit steps, which also forgets what is not a number."""

    lam: float = 1.0
    kind: str = "l1"

    def value(self, x):
        return self.lam * (x.square() if self.kind == "overflows" else x.abs()).sum(-1)

    def formula(self, v, step):
        if self.kind == "modifies":
            return v.sub_(v.clamp(-self.lam * step, self.lam * step))
        if self.kind == "unit":
            return v - v.clamp(-self.lam, self.lam)
        if self.kind == "moves":
            return v + 2 * v * (v.abs() > 1) - v.clamp(-self.lam * step, self.lam * step)
        if self.kind == "forgets":
            return (v - v.clamp(-self.lam * step, self.lam * step)).nan_to_num(0.0, 0.0, 0.0)
        if self.kind == "double":
            return v - torch.tensor(1.0, dtype=torch.float64).reshape(1) * v.clamp(-self.lam * step, self.lam * step)
        return v - v.clamp(-self.lam * step, self.lam * step)

    def interval(self, x):
        slope = 0 if self.kind == "flat" else self.lam
        return slope * x.sign() - slope * (x == 0), slope * x.sign() + slope * (x == 0)

    def scaled(self, kappa):
        return self if self.kind == "stays" else dataclasses.replace(self, lam=kappa * self.lam)

    def check_step(self, step):
        if self.kind != "accepts":
            super().check_step(step)


@pytest.mark.parametrize(
    ("kind", "laws"),
    [
        ("unit", ["prox_is_the_minimiser", "optimality_is_zero_at_fixed_points_only", "scaled_is_kappa_times_h"]),
        ("moves", ["prox_is_the_minimiser", "prox_is_lipschitz"]),
        ("accepts", ["steps_out_of_range_are_refused"]),
        ("modifies", ["inputs_are_kept_and_out_is_filled", "formula_is_the_prox"]),
        ("forgets", ["what_is_not_finite_stays_so"]),
        ("double", ["dtype_is_that_of_the_vector"]),
        ("flat", ["optimality_is_zero_at_fixed_points_only"]),
        ("stays", ["scaled_is_kappa_times_h"]),
    ],
)
def test_laws_name_what_is_broken(kind, laws):
    with pytest.raises(AssertionError) as broken:
        check_regularizer(Careless(kind=kind), 3)
    message = str(broken.value)
    assert all(f"\n  {law}: " in message for law in laws)
    assert message.startswith(f"Careless(lam=1.0, kind={kind!r}) breaks ")


def test_the_careless_one_needs_only_a_kappa_that_is_checked():
    with pytest.raises(AssertionError, match=rf"breaks 1 of {len(REGULARIZER_LAWS)} laws:\n  scaled_.*kappa = 0.0"):
        check_regularizer(Careless(), 3)


# ---------------------------------------------------------------------------------------------------------------------
# Sizes and dtypes.


def test_projections_far_from_a_set_are_inside_it():
    for h in (Simplex(), Simplex(3.0), L1Ball(1.0)):
        for d, scale in ((20, 100.0), (20, 1e6), (3000, 100.0), (1000, 1e-3)):
            v = scale + 0.1 * draw(100, d, dtype=torch.float32)
            p = h.prox(v, 1.0)
            assert (h.value(p) == 0).all()
            total = h.radius if isinstance(h, L1Ball) else h.total
            torch.testing.assert_close(p.double().abs().sum(-1), torch.full((100,), total).double())


def test_a_projection_onto_a_simplex_depends_on_differences_only():
    v = draw(50, 30, scale=0.2).float().double()
    for shift in (2.0**20, 2.0**40):
        moved = v.mul(2**10).round().div(2**10)  # representable after the shift
        torch.testing.assert_close(Simplex().prox(moved + shift, 1.0), Simplex().prox(moved, 1.0), rtol=0, atol=1e-15)


@pytest.mark.parametrize("size", [1e-25, 1e-10, 1e10, 1e20, 1e37])
def test_norms_of_large_and_small_vectors(size):
    v = draw(20, 8)
    for dtype, digits in ((torch.float32, 1e-6), (torch.float64, 1e-14)):
        x = (size * v).to(dtype)
        unit = v / v.norm(dim=-1, keepdim=True)
        ball = L2Ball(0.5 * size).prox(x, 1.0).double() / size
        expected = v * (0.5 / v.norm(dim=-1, keepdim=True)).clamp(max=1)
        torch.testing.assert_close(ball, expected, rtol=10 * digits, atol=digits)
        if size >= 1:
            torch.testing.assert_close(L2Ball(1.5).prox(x, 1.0).double(), 1.5 * unit, rtol=10 * digits, atol=digits)
        shrunk = GroupLasso(size, 8, weights="equal").prox(x, 0.5).double() / size
        expected = v * (1 - 0.5 / v.norm(dim=-1, keepdim=True)).clamp(min=0)
        torch.testing.assert_close(shrunk, expected, rtol=10 * digits, atol=digits)
        assert torch.equal(GroupLasso(0.0, 8).prox(x, 0.5), x)


@pytest.mark.parametrize("size", [1e-30, 1e-12, 1e12, 1e20, 1e37])
def test_2_to_4_of_large_and_small_blocks(size):
    v = draw(50, 8, dtype=torch.float32)
    x = size * v
    for lam in (0.0, 0.7):  # the prox of size * v with lam / size is size times that of v with lam
        p = Sparsity2to4(lam / size).prox(x, 1.0)
        torch.testing.assert_close(p.double() / size, Sparsity2to4(lam).prox(v.double(), 1.0), rtol=1e-4, atol=1e-5)
    if size > 1:
        h = Sparsity2to4(0.7)
        assert torch.equal(h.prox(x, 1.0), torch.where(h.prox(10 * v, 1.0) == 0, 0, x))  # two of four are kept
        assert (h.value(h.prox(x, 1.0)) == 0).all()


def test_rows_of_any_scale_are_constraints():
    rows, b = [[1.0, 2.0, 0.0], [0.0, 1.0, 1.0]], [1.0, 2.0]
    v = draw(5, 3)
    expected = Affine(rows, b).prox(v, 1.0)
    for scale in (1e-200, 1e-20, 1e20, 1e200):
        h = Affine([rows[0], [scale * a for a in rows[1]]], [b[0], scale * b[1]])
        torch.testing.assert_close(h.prox(v, 1.0), expected, rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="no x satisfies"):
        Affine([[1.0, 2.0], [1e-20, 2e-20]], [1.0, 2e-20])
    with pytest.raises(ValueError, match="no x satisfies"):
        Affine([[1.0, 2.0], [0.0, 0.0]], [1.0, 1e-9])


@pytest.mark.parametrize("h", [L1(0.1), FusedLasso(0.1), NuclearNorm(0.1, (2, 4)), GroupLasso(0.1, 2)])
def test_a_run_that_diverges_says_so_whatever_the_regularizer(h):
    silos = fc.data.load("synthetic", clients=3, features=8, samples=20, seed=0)
    problem = fc.Problem(silos, loss="least_squares", regularizer=h)
    with pytest.warns(RuntimeWarning, match="FedMid diverged in round 1"):
        run = fc.simulate(problem, fc.algorithms.FedMid(40, 1e30), rounds=2)
    assert run.status == "diverged"


def test_a_step_close_to_the_limit_in_another_dtype():
    v = draw(4, D, dtype=torch.float32)
    for h in (MCP(0.5, 3.0, kappa=0.7), SCAD(0.4, 2.6, kappa=0.3)):
        step = torch.full((4, 1), (1 - 1e-12) / h.rho, dtype=torch.float64)
        torch.testing.assert_close(h.prox(v, step), h.prox(v, float(step[0])), rtol=1e-4, atol=1e-4)


def test_steps_beyond_the_numbers_of_a_dtype():
    v = draw(4, D, dtype=torch.float32)
    for h in (
        L1(2.0),
        ElasticNet(2.0, 2.0),
        PositivePart(2.0),
        L2Squared(2.0),
        L0(2.0),
        LinfNorm(2.0),
        GroupLasso(2.0, 3),
    ):
        for step in (1e60, torch.full((4, 1), 1e60, dtype=torch.float64)):
            assert (h.prox(v, step) <= 0).all()
        assert torch.equal(h.scaled(1e-300).scaled(1e-300).prox(v, 1.0), v)
    assert torch.equal(L1(0.0).prox(v, math.inf), v)


def test_no_entries_at_all():
    v = torch.zeros(3, 0)
    for h in (
        Zero(),
        L1(0.1),
        LinfNorm(0.1),
        L0(0.1),
        FusedLasso(0.1),
        Sparsity2to4(0.1),
        L1Ball(1.0),
        L2Ball(1.0),
        TopK(1),
    ):
        assert h.prox(v, 0.5).shape == (3, 0)
        assert (h.value(v) == 0).all()
    with pytest.raises(ValueError, match="a vector of no entries cannot sum to 1"):
        Simplex().prox(v, 0.5)


# ---------------------------------------------------------------------------------------------------------------------
# Large vectors, which are worked through in blocks.


@pytest.mark.parametrize(
    "h", [Zero(), L1(0.4), ElasticNet(0.4, 0.2), MCP(0.5, 3.0), SCAD(0.4), L0(0.1), Box(-1, 1), Sparsity2to4(0.3)]
)
@pytest.mark.parametrize("shape", [(70_000,), (3, 40_000), (700, 100)])
def test_blocks_of_large_vectors(h, shape):
    v = draw(*shape)
    pieces = v.reshape(-1, 100)
    expected = torch.cat([h.prox(piece, 0.3) for piece in pieces.split(50)]).reshape(shape)
    assert torch.equal(h.prox(v, 0.3), expected)
    wide = torch.cat([v, v], dim=-1)
    assert torch.equal(h.prox(wide[..., : shape[-1]], 0.3), expected)
    assert torch.equal(h.prox(v, torch.full((*shape[:-1], 1), 0.3, dtype=v.dtype)), expected)
    target = torch.cat([v, v], dim=-1)[..., : shape[-1]]
    assert torch.equal(h.prox(target, 0.3, out=target), expected)


def test_weights_of_large_vectors():
    d = 50_000
    w = torch.rand(d, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    v = draw(2, d)
    expected = v.sign() * (v.abs() - 0.15 * w).clamp(min=0)
    torch.testing.assert_close(L1(0.5, tuple(w.tolist())).prox(v, 0.3), expected, rtol=0, atol=1e-15)


# ---------------------------------------------------------------------------------------------------------------------
# Algebra: masks, names, sums.

LAYOUT = [
    ("conv.weight", 0, 36, (2, 2, 3, 3)),
    ("conv.bias", 36, 38, (2,)),
    ("fc.weight", 38, 62, (3, 8)),
    ("fc.bias", 62, 65, (3,)),
]


def test_coordinates_become_runs():
    h = L1(0.5).on([0, 2, 5])
    assert (
        h
        == On(L1(0.5), ((0, 1), (2, 3), (5, 6)))
        == L1(0.5).on(np.array([5, 0, 2]))
        == L1(0.5).on(torch.tensor([0, 2, 5]))
    )
    assert h.prox(torch.full((7,), 3.0), 1.0).tolist() == [2.5, 3, 2.5, 3, 3, 2.5, 3]
    assert h.prox(torch.full((6,), 3.0), 1.0).tolist() == [2.5, 3, 2.5, 3, 3, 2.5]
    assert L1(0.5).on(range(2, 5)) == On(L1(0.5), ((2, 5),))
    assert L1(0.5).on([1, 0, 1]) == L1(0.5).on(np.array([1, 0, 1])) == L1(0.5).on([True, False, True])
    both = h + L2Squared(1.0).on([1, 3])
    assert both.prox(torch.full((6,), 3.0), 1.0).tolist() == [2.5, 1.5, 2.5, 1.5, 3, 2.5]


def test_names_become_coordinates():
    h = L1(0.5).on("*.weight").resolve(LAYOUT)
    assert h == On(L1(0.5), ((0, 36), (38, 62)), 65)
    mask = [True] * 36 + [False] * 2 + [True] * 24 + [False] * 3
    assert h == L1(0.5).on(mask) == L1(0.5).on(torch.tensor(mask)) == L1(0.5).on(np.array(mask))
    assert L1(0.5).on(("conv.*", "fc.bias")).resolve(LAYOUT) == On(L1(0.5), ((0, 36), (36, 38), (62, 65)), 65)


def test_shapes_come_from_the_layout():
    x = draw(65)
    conv, fc = x[:36].reshape(2, 18), x[38:62].reshape(3, 8)
    nuclear = NuclearNorm(0.5).on("*.weight").resolve(LAYOUT)
    torch.testing.assert_close(
        nuclear.value(x), 0.5 * (torch.linalg.svdvals(conv).sum() + torch.linalg.svdvals(fc).sum())
    )
    rows = GroupLasso(0.5, "rows", weights="equal").on("*.weight").resolve(LAYOUT)
    torch.testing.assert_close(rows.value(x), 0.5 * (conv.norm(dim=1).sum() + fc.norm(dim=1).sum()))
    columns = SparseGroupLasso(0.0, 0.5, "columns", weights="equal").on("fc.weight").resolve(LAYOUT)
    torch.testing.assert_close(columns.value(x), 0.5 * fc.norm(dim=0).sum())
    assert Sparsity2to4(1.0).on("fc.weight").resolve(LAYOUT) == On(Sparsity2to4(1.0), ((38, 62),), 65)
    p = nuclear.prox(x, 1.0)
    assert torch.equal(p[36:38], x[36:38])
    assert nuclear.optimality(p, p - x) < 1e-10


def test_sums_of_named_terms():
    h = NuclearNorm(0.5).on("fc.weight") + L1(0.2).on("*.bias") + Sparsity2to4(1.0).on("fc.weight").scaled(2.0)
    with pytest.raises(ValueError, match="both act on coordinate 38"):
        h.resolve(LAYOUT)
    h = (NuclearNorm(0.5).on("fc.weight") + L1(0.2).on("*.bias")).resolve(LAYOUT)
    x = draw(65)
    expected = 0.5 * torch.linalg.svdvals(x[38:62].reshape(3, 8)).sum() + 0.2 * x[[36, 37, 62, 63, 64]].abs().sum()
    torch.testing.assert_close(h.value(x), expected)
    assert torch.equal(h.prox(x, 0.3)[:36], x[:36])
    assert L1(0.3).resolve(LAYOUT) == L1(0.3)


def test_blocks_of_the_largest_rho():
    left, right = [True] * 2 + [False] * 2, [False] * 2 + [True] * 2
    assert (MCP(1.0, 4.0).on(left) + SCAD(1.0, 3.0).on(right)).rho == 0.5
    assert not (MCP(1.0, 4.0).on(left) + L0(1.0).on(right)).weakly_convex
    assert not L0(1.0).on(left).weakly_convex
    assert MCP(1.0, 4.0).weakly_convex


LEFT, RIGHT = [True, False], [False, True]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: L1(-1), ValueError, r"L1: lam = -1, must be a number >= 0"),
        (lambda: L1(math.inf), ValueError, "lam = inf"),
        (lambda: L1("a"), ValueError, "lam = 'a', must be a number >= 0"),
        (lambda: L1(1, weights=(1, -1)), ValueError, r"weights = \(1, -1\)"),
        (lambda: L1(1, weights=(1, 1)).prox(draw(3), 0.1), ValueError, "2 weights, the vector has 3 coordinates"),
        (lambda: ElasticNet(1, -1), ValueError, "l2 = -1"),
        (lambda: MCP(1, 0), ValueError, "theta = 0, must be a number > 0"),
        (lambda: SCAD(1, 2), ValueError, "a = 2, must be a number > 2"),
        (lambda: TopK(0), ValueError, "k = 0, must be an integer >= 1"),
        (lambda: TopK(1.5), ValueError, "k = 1.5"),
        (lambda: Box(1, 0), ValueError, "low = 1 is above high = 0"),
        (lambda: L2Ball(0), ValueError, "radius = 0"),
        (lambda: L1Ball(-1), ValueError, "radius = -1"),
        (lambda: Simplex(0), ValueError, "total = 0"),
        (lambda: Affine([[1, 2], [3]], [1, 2]), ValueError, "rows of one length"),
        (lambda: Affine([], []), ValueError, "at least one row"),
        (lambda: Affine([[1, 2]], [1, 2]), ValueError, "A has 1 rows, b has 2 entries"),
        (
            lambda: Affine([[1, 2], [2, 4]], [1, 3]),
            ValueError,
            r"no x satisfies A x = b \(the best one misses by 0.447\)",
        ),
        (lambda: Affine([[math.inf, 2]], [1]), ValueError, "must be finite"),
        (lambda: Affine([[1, 2]], [1]).prox(draw(3), 1.0), ValueError, "A has 2 columns, the vector has 3"),
        (lambda: GroupLasso(1, 0), ValueError, "groups = 0, must be an integer >= 1 or a list of"),
        (lambda: GroupLasso(1, ()), ValueError, "groups is empty"),
        (lambda: GroupLasso(1, "diagonals"), ValueError, "groups = 'diagonals'"),
        (lambda: GroupLasso(1, 2, shape=(2, 2)), ValueError, "shape belongs to groups = 'rows' or 'columns'"),
        (lambda: GroupLasso(1, "rows", shape=(4,)), ValueError, r"needs a matrix, got a parameter of shape \(4,\)"),
        (
            lambda: GroupLasso(1, "rows", weights=(1, 2)),
            ValueError,
            "weights by group need groups given by their sizes",
        ),
        (lambda: GroupLasso(1, (2, 2), weights=(1,)), ValueError, "2 groups, but 1 weights"),
        (lambda: GroupLasso(1, 2, weights=(1,)).value(draw(4)), ValueError, "2 groups, but 1 weights"),
        (lambda: GroupLasso(1, 3).value(draw(4)), ValueError, "groups of 3 do not divide a vector of length 4"),
        (lambda: GroupLasso(1, (3, 2)).value(draw(4)), ValueError, "5 coordinates in all, the vector has 4"),
        (lambda: GroupLasso(1, "rows").value(draw(4)), ValueError, "needs the shape of a matrix"),
        (lambda: GroupLasso(1, "rows", shape=(2, 3)).value(draw(4)), ValueError, "6 entries, the vector has 4"),
        (lambda: NuclearNorm(1).value(draw(4)), ValueError, "needs the shape of a matrix"),
        (lambda: NuclearNorm(1, (4,)), ValueError, "needs a matrix"),
        (lambda: NuclearNorm(1, (2, 3)).value(draw(4)), ValueError, "6 entries, the vector has 4"),
        (lambda: Sparsity2to4(1).value(draw(6)), ValueError, "length 6 is not a whole number of blocks of 4"),
        (lambda: L1(1).on([False, False]), ValueError, "the mask is false everywhere"),
        (lambda: L1(1).on(LEFT).value(draw(3)), ValueError, "vectors of length 2, got 3"),
        (lambda: L1(1).on([0, 2, 5]).value(draw(4)), ValueError, "set on coordinate 5, the vector has 4"),
        (lambda: L1(1).on([0, 1]), ValueError, r"\[False, True\] for the mask, range\(0, 2\) for the coordinates"),
        (lambda: L1(1).on([1]), ValueError, r"\[True\] for the mask, range\(1, 2\) for the coordinates"),
        (lambda: L1(1).on([0, 2, 2]), ValueError, "a coordinate is named twice"),
        (lambda: L1(1).on([-1, 2]), ValueError, "integers from 0 on"),
        (lambda: L1(1).on([0.5, 2.0]), ValueError, "a mask holds true and false"),
        (lambda: L1(1).on([]), ValueError, "the mask is false everywhere"),
        (lambda: L1(1) + L1(2), TypeError, r"only terms on disjoint coordinates can be added.*a\.on\(mask\)"),
        (lambda: L1(1).on(LEFT) + L1(2), TypeError, "acts on all coordinates"),
        (lambda: L1(1).on(LEFT) + 1, TypeError, "unsupported operand"),
        (lambda: L1(1).on(LEFT) + L1(2).on(LEFT), ValueError, "both act on coordinate 0"),
        (lambda: L1(1).on(LEFT) + L1(2).on([False, False, True]), ValueError, "different lengths were added: 2, 3"),
        (lambda: Blocks(()), ValueError, "parts is empty"),
        (lambda: L1(1).on("*.weight").value(draw(3)), TypeError, r"named '\*.weight'.*call .resolve\(layout\)"),
        (lambda: L1(1).on("*.weight").prox(draw(3), 0.1), TypeError, "not known yet"),
        (lambda: (L1(1).on("a") + L1(1).on("b")).optimality(draw(3), draw(3)), TypeError, "not known yet"),
        (
            lambda: L1(1).on("*.wait").resolve(LAYOUT),
            ValueError,
            r"no parameter matches '\*.wait' \(the parameters: conv.weight",
        ),
        (
            lambda: NuclearNorm(1).on("*").resolve(LAYOUT),
            ValueError,
            "parameter 'conv.bias': NuclearNorm needs a matrix",
        ),
        (
            lambda: Sparsity2to4(1).on("*").resolve(LAYOUT),
            ValueError,
            "'conv.weight': Sparsity2to4: rows .* multiple of 4",
        ),
        (lambda: build("lasso"), ValueError, "unknown regularizer 'lasso'"),
        (lambda: build("l1", lamb=1), ValueError, "L1 has no field 'lamb'; did you mean 'lam'"),
        (lambda: build("grouplasso", lam=1), ValueError, "GroupLasso needs groups"),
    ],
)
def test_wrong_calls_say_what_is_wrong(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    ("built", "expected"),
    [
        (("l1", {"lam": 1}), L1(1.0)),
        (("L1", {"lam": 1, "weights": [1, 2]}), L1(1.0, (1.0, 2.0))),
        (("grouplasso", {"lam": 0.1, "groups": 3}), GroupLasso(0.1, 3)),
        (("grouplasso", {"lam": 0.1, "groups": [3, 2], "weights": "equal"}), GroupLasso(0.1, (3, 2), "equal")),
        (("nuclearnorm", {"lam": 0.1, "shape": [3, 2]}), NuclearNorm(0.1, (3, 2))),
        (("affine", {"A": [[1, 1]], "b": [2]}), Affine(((1.0, 1.0),), (2.0,))),
        (("sparsity2to4", {"lam": 0.1}), Sparsity2to4(0.1)),
        (("simplex", {}), Simplex(1.0)),
    ],
)
def test_build_from_config_values(built, expected):
    name, fields = built
    h = build(name, **fields)
    assert h == expected
    assert hash(h) == hash(expected)


def test_a_part_of_a_part_and_an_output_that_overlaps():
    inner = L1(1.0).on([True, True, True, False])
    outer = inner.on([True] * 4 + [False] * 2)
    v = torch.full((6,), 3.0)
    assert outer.prox(v, 0.5).tolist() == [2.5, 2.5, 2.5, 3, 3, 3]
    x = v[:4].clone()
    inner.prox(x, 0.5, out=x[:])
    assert x.tolist() == [2.5, 2.5, 2.5, 3]


@pytest.mark.parametrize("mask", [[True] + [False] * 5, [False] + [True] * 5, [True, False, True, False, False, True]])
def test_a_prox_on_a_part_can_be_differentiated(mask):
    for h in (L1(0.1), SCAD(0.1), L1(0.1, weights=(1.0,) * sum(mask))):
        v = torch.linspace(-1, 1, 6, dtype=torch.float64).requires_grad_()
        h.on(mask).prox(v, 0.3).square().sum().backward()
        w = v.detach().clone().requires_grad_()
        torch.where(torch.tensor(mask), (L1(0.1) if isinstance(h, L1) else h).prox(w, 0.3), w).square().sum().backward()
        torch.testing.assert_close(v.grad, w.grad)


def test_a_tensor_of_steps_has_the_dtype_of_the_vector_and_is_followed():
    for size in (10, 1 << 20):
        v, step = torch.ones(2, size), torch.tensor([[0.1], [0.2]], dtype=torch.float64, requires_grad=True)
        found = L1(1.0).prox(v, step)
        assert found.dtype == torch.float32
        found.sum().backward()
        torch.testing.assert_close(step.grad, torch.full((2, 1), -float(size), dtype=torch.float64))


# ---------------------------------------------------------------------------------------------------------------------
# Formulas.


@pytest.mark.parametrize("name", [n for n in NAMES if n != "2:4" and "fused" not in n])  # these look at numbers
def test_formulas_can_be_compiled(name):
    h = dataclasses.replace(CASES[name][0])  # another one, which has kept nothing from other tests
    v = draw(3, D, dtype=torch.float32)
    torch.compiler.reset()  # one formula is compiled for a few regularizers at most
    compiled = compiled_formula(h, backend="eager", fullgraph=True)
    for step in (0.1, 0.2):
        torch.testing.assert_close(compiled(v, torch.full((1,), step)), h.prox(v, step), rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@everyone
def test_compiled_prox_agrees(name):
    h, _ = CASES[name]
    v = draw(3, D, dtype=torch.float32).cuda()
    compiled = CompiledProx(h)
    for step in (0.1, 0.2, torch.tensor([[0.1], [0.2], [0.3]], dtype=torch.float64, device="cuda")):
        torch.testing.assert_close(compiled.prox(v, step), h.prox(v, step), rtol=1e-5, atol=1e-6)


def test_every_registered_regularizer_says_what_it_is_in_a_sentence():
    for cls in REGISTRY.values():
        first = cls.__doc__.strip().splitlines()[0]
        assert first.endswith("."), f"{cls.__name__}: {first}"
        assert dataclasses.is_dataclass(cls)


@pytest.mark.parametrize(
    "h",
    [Zero(), L1(0.4), L1(0.4, weights=(0.0, 1.0, 2.0, 0.5, 1.0, 1.0)), ElasticNet(0.3, 0.7), L1(0.4).on([1, 2, 4])],
    ids=str,
)
@pytest.mark.parametrize("each", [False, True])
def test_the_slope_of_a_prox_is_its_derivative(h, each):
    v = torch.tensor([3.0, -0.01, -2.0, 0.3, 0.7, -0.1], dtype=torch.float64)
    step = torch.linspace(0.5, 1.5, 6 if each else 1, dtype=torch.float64)
    at = v.clone().requires_grad_()
    [right] = torch.autograd.grad(h.prox(at, step).sum(), at)
    torch.testing.assert_close(h.prox_slope(v, step), right, rtol=1e-14, atol=0)
