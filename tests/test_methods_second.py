"""The second tier of methods against plain loops, against each other, and against pooled solutions.

The references are the published iterations, written once more in NumPy, one client after another and with nothing
rearranged: full tables of masks, every client's model kept, exact local solves.
"""

import itertools

import numpy as np
import pytest
import torch
from brief_laws import ROUNDS, briefly, check_briefly

import fedcomposite as fc
from fedcomposite import rng
from fedcomposite.algorithms import (
    STEM,
    TAMUNA,
    EControlDA,
    FedADMM,
    FedAvg,
    FedAvgM,
    FedCanon,
    FedDA,
    FedDC,
    FedDR,
    FedDyn,
    FedNMap,
    FedPD,
    FedSplit,
    GradSkip,
    Mime,
    MimeLite,
    ProximalGradient,
    Scaffnew,
    Scaffold,
    ScaffoldM,
    Zhang,
)
from fedcomposite.algorithms.tamuna import kept
from fedcomposite.compressors import Identity, KeepLargest, KeepRandom, dense
from fedcomposite.problems import Batches
from fedcomposite.regularizers import L1, MCP, SCAD
from fedcomposite.runtime.simulator import Simulator
from fedcomposite.testing import LAWS
from fedcomposite.testing.longrun import does_not_drift

N, D, M, TAU = 10, 12, 40, 5
X0 = np.linspace(-0.5, 1, D)


def clients(kind):
    """Heterogeneous silos; every second logistic sample appears with both labels, so that no client is separable."""
    random = np.random.default_rng(7)
    shared, pairs = random.normal(size=D), []
    for _ in range(N):
        X = random.normal(0.3 * random.normal(size=D), 1, (M, D)) * random.uniform(0.6, 1.4, D)
        z = X @ (shared + random.normal(size=D))
        if kind == "least_squares":
            pairs.append((X, z + random.normal(size=M)))
            continue
        y = np.where(random.uniform(size=M) < 1 / (1 + np.exp(-z / 2)), 1.0, -1.0)
        pairs.append((np.vstack([X, X[::2]]), np.concatenate([y, -y[::2]])))
    return pairs


class World:
    """A problem, and what a reference may know about it, in plain NumPy."""

    def __init__(self, kind, h=None):
        self.kind, self.data = kind, clients(kind)
        self.problem = fc.Problem(fc.Silos.from_arrays(self.data), loss=kind, regularizer=h)
        self.L = self.problem.smoothness()

    def gradient(self, i, x):
        X, y = self.data[i]
        slope = X @ x - y if self.kind == "least_squares" else -y / (1 + np.exp(y * (X @ x)))
        return X.T @ slope / len(y)

    def hessian(self, i, x):
        X, y = self.data[i]
        z = X @ x
        weight = np.ones_like(y) if self.kind == "least_squares" else 1 / (2 + np.exp(z) + np.exp(-z))
        return X.T @ (X * weight[:, None]) / len(y)

    def mean(self, x):
        return np.mean([self.gradient(i, x) for i in range(N)], axis=0)

    def minimiser(self):
        """Newton's method on the pooled loss."""
        x = np.zeros(D)
        for _ in range(40):
            x = x - np.linalg.solve(np.mean([self.hessian(i, x) for i in range(N)], axis=0), self.mean(x))
        assert np.abs(self.mean(x)).max() < 1e-14
        return x

    def prox(self, i, v, eta):
        """The exact minimiser of f_i + ||. - v||^2 / (2 eta), f_i quadratic."""
        H = self.hessian(i, v)
        return v - np.linalg.solve(H + np.eye(D) / eta, self.gradient(i, v))

    def models(self, method, rounds=15, **settings):
        settings = {"x0": X0, "evaluate_every": rounds, **settings}
        return fc.simulate(self.problem, method, rounds=rounds, keep_solutions=True, **settings).solutions.numpy()

    def limit(self, method, rounds, **settings):
        """The last model."""
        settings = {"x0": X0, **settings}
        run = fc.simulate(self.problem, method, rounds=rounds, evaluate_every=rounds, **settings)
        return run.solution.numpy()


@pytest.fixture(scope="module")
def logistic():
    return World("logistic")


@pytest.fixture(scope="module")
def quadratic():
    return World("least_squares")


@pytest.fixture(scope="module")
def sparse():
    return World("logistic", L1(0.02))


@pytest.fixture(scope="module")
def optimum(logistic):
    return logistic.minimiser()


def same(one, two, atol=1e-10):
    assert np.linalg.norm(one[-1] - one[0]) > 0.05, "nothing moved: the comparison would be empty"
    np.testing.assert_allclose(one, two, rtol=0, atol=atol)


def cohorts(count, rounds, seed=0):
    """The participants that the simulator draws, which the tests of the random numbers cover."""
    return [range(N) if count == N else rng.choose(seed, r, N, count).tolist() for r in range(rounds)]


def local_counts(world, method, rounds, **settings):
    """Local steps of each round, read from the work that was counted."""
    run = fc.simulate(world.problem, method, rounds=rounds, **settings)
    return np.diff([r["gradient_evaluations"] for r in run.history]) // N


# -- local training with random communication -------------------------------------------------------------------------


def scaffnew(world, gamma, p, counts):
    """One iteration at a time; control variates after the average of the same iteration."""
    x, k, out = np.tile(X0, (N, 1)), np.zeros((N, D)), [X0]
    for count in counts:
        for t in range(count):
            moved = np.array([x[i] - gamma * (world.gradient(i, x[i]) - k[i]) for i in range(N)])
            if t < count - 1:
                x = moved
                continue
            x = np.tile(moved.mean(0), (N, 1))
            k = k + p / gamma * (x - moved)
            assert np.abs(k.sum(0)).max() < 1e-12
        out.append(x[0])
    return np.array(out)


def test_gradskip_without_skipping_is_scaffnew(logistic):
    method = GradSkip(0.8 / logistic.L, p=0.3, seed=5)
    counts = local_counts(logistic, method, 15)
    assert counts.min() == 1
    assert counts.max() > 3
    same(logistic.models(method), scaffnew(logistic, 0.8 / logistic.L, 0.3, counts))
    same(
        logistic.models(method, batch_size=6),
        logistic.models(Scaffnew(step=0.8 / logistic.L, p=0.3, seed=5), batch_size=6),
    )


def test_scaffnew_every_tau_steps_is_scaffold(logistic):
    step = 0.3 / logistic.L
    same(logistic.models(Scaffnew(step=step, local_steps=TAU)), logistic.models(Scaffold(TAU, step, option=2)))


def test_gradskip_is_its_iteration(logistic):
    """Clients that stop computing do what the published iteration does with all its gradients."""
    gamma, p, rounds = 0.8 / logistic.L, 0.2, 12
    q = tuple(np.linspace(0.3, 1, N).tolist())
    counts = local_counts(logistic, GradSkip(gamma, p), rounds)
    ids = torch.arange(N)
    x, k, out = np.tile(X0, (N, 1)), np.zeros((N, D)), [X0]
    for r, count in enumerate(counts):
        for t in range(count):
            keep = rng.uniforms(0, rng.Use.METHOD, ids, r, t, 1).squeeze(1).numpy() < q
            g = np.array([logistic.gradient(i, x[i]) for i in range(N)])
            k_hat = np.where(keep[:, None], k, g)
            x_hat = x - gamma * (g - k_hat)
            x = np.tile((x_hat - gamma / p * k_hat).mean(0), (N, 1)) if t == count - 1 else x_hat
            k = k_hat + p / gamma * (x - x_hat)
        out.append(x[0])
    assert counts.max() > 4
    same(logistic.models(GradSkip(gamma, p, q), rounds), np.array(out))


def test_gradskip_saves_gradients(logistic):
    """At a single site, a client that stopped asks for no more gradients."""
    work = [
        fc.simulate(logistic.problem, GradSkip(0.8, 0.1, q), rounds=6, backend="loop").history[-1]
        for q in (1.0, 0.5, 0.0)
    ]
    many, some, few = (w["gradient_evaluations"] for w in work)
    assert few == 6 * N
    assert few < some < many / 2


@pytest.mark.parametrize(("cohort", "s"), [(N, None), (N, 3), (4, 2), (4, None), (5, 3), (7, 7)])
def test_tamuna_is_its_iteration(logistic, cohort, s):
    """The d x c table of masks, written out."""
    gamma, p, chi, steps = 0.8 / logistic.L, 0.4, 0.5, 12
    ones = s or cohort
    table = np.zeros((D, cohort))
    for e in range(ones * D):
        table[e // ones, e % cohort] += 1
    assert (table.sum(1) == ones).all()
    assert table.max() == 1
    assert table.sum(0).max() == -(-ones * D // cohort)
    method = TAMUNA(gamma, p, s, chi, seed=3)
    counts = local_counts(logistic, method, 2 * steps)
    assert (counts[1::2] == 0).all()
    x_bar, k, out = X0, np.zeros((N, D)), [X0]
    for number, who in enumerate(cohorts(cohort, steps)):
        words = rng.words(3, rng.Use.METHOD, np.uint64(2**32 - 1), number, np.uint64(1), cohort)
        mask, x = table[:, np.argsort(words)].T, np.zeros((cohort, D))
        for j, i in enumerate(who):
            x[j] = x_bar
            for _ in range(counts[2 * number]):
                x[j] = x[j] - gamma * (logistic.gradient(i, x[j]) - k[i])
        x_bar = (mask * x).sum(0) / ones
        for j, i in enumerate(who):
            k[i] = k[i] + p * chi / gamma * mask[j] * (x_bar - x[j])
        assert np.abs(k.sum(0)).max() < 1e-12
        out.append(x_bar)
    found = logistic.models(method, 2 * steps, participation=cohort / N)
    same(found[::2], np.array(out))
    np.testing.assert_array_equal(found[1::2], found[2::2])


def test_tamuna_with_everybody_and_everything_is_scaffnew(logistic):
    method = TAMUNA(0.8 / logistic.L, p=0.3, chi=1.0)
    counts = local_counts(logistic, method, 30)[::2]
    assert counts.max() > 3
    found = logistic.models(method, 30)[::2]
    same(found, scaffnew(logistic, 0.8 / logistic.L, 0.3, counts))
    same(found, logistic.models(Scaffnew(step=0.8 / logistic.L, p=0.3)))


@pytest.mark.parametrize(("cohort", "s", "d"), [(4, 2, 12), (5, 3, 11), (10, 2, 3), (3, 3, 4), (7, 2, 1)])
def test_tamuna_columns_are_those_of_the_table(cohort, s, d):
    table = np.zeros((d, cohort), int)
    for e in range(s * d):
        table[e // s, e % cohort] = 1
    rows, ones = kept(torch.arange(cohort).unsqueeze(1), cohort, s, d)
    assert rows.shape == (cohort, -(-s * d // cohort))
    for j in range(cohort):
        assert sorted(rows[j][ones[j] > 0].tolist()) == np.flatnonzero(table[:, j]).tolist()


@pytest.mark.parametrize("s", [2, 4])
def test_tamuna_converges_where_a_late_control_variate_does_not(logistic, optimum, s):
    """The known mistake: k_i updated at the next participation, with the model of that later round."""
    gamma, p = 1 / logistic.L, 0.6
    x = logistic.limit(TAMUNA(gamma, p, s), 1200, participation=0.4)
    assert np.linalg.norm(x - optimum) < 1e-10

    random = np.random.default_rng(0)
    x_bar, k, late = np.zeros(D), np.zeros((N, D)), {}
    table = np.zeros((D, 4))
    for e in range(s * D):
        table[e // s, e % 4] = 1
    for _ in range(200):
        if np.linalg.norm(x_bar) > 100:
            break
        who, mask, x = random.choice(N, 4, replace=False), table[:, random.permutation(4)].T, np.zeros((4, D))
        for j, i in enumerate(who):
            if i in late:
                k[i] = k[i] + p * (s - 1) / s / gamma * late[i][0] * (x_bar - late[i][1])
            x[j] = x_bar
            for _ in range(random.geometric(p)):
                x[j] = x[j] - gamma * (logistic.gradient(i, x[j]) - k[i])
            late[i] = mask[j], x[j]
        x_bar = (mask * x).sum(0) / s
    assert not np.linalg.norm(x_bar - optimum) < 1e-3


# -- primal-dual and splitting methods --------------------------------------------------------------------------------


def test_feddyn_and_fedpd_and_fedadmm_agree(quadratic):
    """With all clients present they are one method, also with a short inner solve; exactly solved, it is ADMM."""
    eta = 1.5 / quadratic.L
    inner = 1 / (quadratic.L + 1 / eta)
    for steps in (1, 3, 120):
        pd = quadratic.models(FedPD(eta, steps, inner))
        same(pd, quadratic.models(FedDyn(1 / eta, steps, inner)))
    same(pd, quadratic.models(FedADMM(prox_step=eta, local_steps=120, step=inner)))

    x_bar, dual, out = X0, np.zeros((N, D)), [X0]
    for _ in range(15):
        x = np.array([quadratic.prox(i, x_bar - eta * dual[i], eta) for i in range(N)])
        dual = dual + (x - x_bar) / eta
        x_bar = (x + eta * dual).mean(0)
        out.append(x_bar)
    same(pd, np.array(out))


def test_feddyn_is_its_iteration_under_sampling_and_not_fedadmm(quadratic):
    alpha, rounds = quadratic.L / 1.5, 15
    inner = 1 / (quadratic.L + alpha)
    theta, linear, server, out = X0, np.zeros((N, D)), np.zeros(D), [X0]
    for who in cohorts(4, rounds):
        local = {i: quadratic.prox(i, theta + linear[i] / alpha, 1 / alpha) for i in who}
        for i in who:
            linear[i] = linear[i] - alpha * (local[i] - theta)
        server = server - alpha / N * sum(local[i] - theta for i in who)
        np.testing.assert_allclose(server, linear.mean(0), rtol=0, atol=1e-11)
        theta = np.mean(list(local.values()), axis=0) - server / alpha
        out.append(theta)
    found = quadratic.models(FedDyn(alpha, 120, inner), participation=0.4)
    same(found, np.array(out))
    other = quadratic.models(FedADMM(prox_step=1 / alpha, local_steps=120, step=inner), participation=0.4)
    assert np.linalg.norm(found[-1] - other[-1]) > 1e-2


def test_fedpd_is_its_iteration_when_it_skips(quadratic):
    eta, p, rounds = 1.5 / quadratic.L, 0.4, 12
    method = FedPD(eta, 120, 1 / (quadratic.L + 1 / eta), p=p, seed=2)
    updates = local_counts(quadratic, method, rounds) // 120
    assert updates.max() > 1
    x0, dual, out = np.tile(X0, (N, 1)), np.zeros((N, D)), [X0]
    for count in updates:
        for _ in range(count):
            x = np.array([quadratic.prox(i, x0[i] - eta * dual[i], eta) for i in range(N)])
            dual = dual + (x - x0) / eta
            x0 = x + eta * dual
        x0 = np.tile(x0.mean(0), (N, 1))
        out.append(x0[0])
    same(quadratic.models(method, rounds), np.array(out))


def test_fedpd_that_skips_keeps_an_error(logistic, optimum):
    L = logistic.L
    exact, skips = (logistic.limit(FedPD(2 / L, 5, 1 / (1.5 * L), p=p), 300) for p in (0.0, 0.3))
    assert np.linalg.norm(exact - optimum) < 1e-10
    assert np.linalg.norm(skips - optimum) > 1e-3


def test_fedsplit_is_peaceman_rachford_and_feddr(quadratic):
    eta = 1.5 / quadratic.L
    inner = 1 / (quadratic.L + 1 / eta)
    y, x, x_bar, out = np.tile(X0, (N, 1)), np.tile(X0, (N, 1)), X0, [X0]
    for _ in range(15):
        y = y + 2 * (x_bar - x)
        x = np.array([quadratic.prox(i, y[i], eta) for i in range(N)])
        x_bar = (2 * x - y).mean(0)
        out.append(x_bar)
    found = quadratic.models(FedSplit(eta, 120, inner))
    same(found, np.array(out))
    same(found, quadratic.models(FedDR(prox_step=eta, alpha=2.0, local_steps=120, step=inner)))


def test_fedsplit_converges_where_forgetful_clients_do_not(quadratic):
    """The known mistake: z_i reset to x in every round."""
    eta = 3 / quadratic.L
    star = quadratic.minimiser()
    x = quadratic.limit(FedSplit(eta, 4, 1 / (quadratic.L + 1 / eta)), 1500)
    assert np.linalg.norm(x - star) < 1e-10
    x = np.zeros(D)
    for _ in range(400):
        x = x + 2 * np.mean([quadratic.prox(i, x, eta) - x for i in range(N)], axis=0)
    assert np.linalg.norm(x - star) > 1e-2


@pytest.mark.parametrize("count", [N, 4])
def test_feddc_is_its_iteration(logistic, count):
    step, alpha, rounds = 0.3 / logistic.L, 0.1, 15
    w, c, drift, own, out = X0, np.zeros(D), np.zeros((N, D)), np.zeros((N, D)), [X0]
    for who in cohorts(count, rounds):
        theta, c_next = {}, c
        for i in who:
            y = w
            for _ in range(TAU):
                y = y - step * (logistic.gradient(i, y) + alpha * (y - (w - drift[i])) - own[i] + c)
            fresh = own[i] - c - (y - w) / (TAU * step)
            c_next = c_next + (fresh - own[i]) / N
            theta[i], own[i], drift[i] = y, fresh, drift[i] + y - w
        w, c = np.mean(list(theta.values()), axis=0) + drift.mean(0), c_next
        out.append(w)
    same(logistic.models(FedDC(TAU, step, alpha), participation=count / N), np.array(out))


# -- momentum ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [None, 7])
@pytest.mark.parametrize("server_step", [1.0, 1.6])
def test_momentum_of_one_is_no_momentum(logistic, batch_size, server_step):
    step = 0.3 / logistic.L
    plain = logistic.models(FedAvg(TAU, step, server_step), batch_size=batch_size)
    same(plain, logistic.models(FedAvgM(TAU, step, server_step, beta=1.0), batch_size=batch_size))
    for share in (1.0, 0.5):
        settings = {"batch_size": batch_size, "participation": share}
        controlled = logistic.models(Scaffold(TAU, step, server_step, option=2), **settings)
        same(controlled, logistic.models(ScaffoldM(TAU, step, server_step, beta=1.0), **settings))


@pytest.mark.parametrize("controlled", [False, True])
def test_momentum_methods_are_their_iterations(logistic, controlled):
    step, beta, server_step, rounds = 0.3 / logistic.L, 0.2, 1.3, 15
    gamma, count = server_step * step * TAU, 4 if controlled else N
    x, g, c, own, out = X0, np.zeros(D), np.zeros(D), np.zeros((N, D)), [X0]
    for who in cohorts(count, rounds):
        ends, c_next = [], c
        for i in who:
            y, seen = x, []
            for _ in range(TAU):
                seen.append(logistic.gradient(i, y))
                shift = c - own[i] if controlled else 0
                y = y - step * (beta * (seen[-1] + shift) + (1 - beta) * g)
            ends.append(y)
            if controlled:
                c_next = c_next + (np.mean(seen, axis=0) - own[i]) / N
                own[i] = np.mean(seen, axis=0)
        g, c = (x - np.mean(ends, axis=0)) / (step * TAU), c_next
        np.testing.assert_allclose(c, own.mean(0), rtol=0, atol=1e-12)
        x = x - gamma * g
        out.append(x)
    method = (ScaffoldM if controlled else FedAvgM)(TAU, step, server_step, beta)
    same(logistic.models(method, rounds, participation=count / N), np.array(out))


def test_fedavgm_drifts_beta_times_as_much(logistic, optimum):
    full, tenth, hundredth = (
        np.linalg.norm(logistic.limit(FedAvgM(TAU, 0.2 / logistic.L, beta=b), 600, x0=optimum) - optimum)
        for b in (1.0, 0.1, 0.01)
    )
    assert full > 1e-2
    assert tenth / full == pytest.approx(0.1, rel=0.1)
    assert hundredth / full == pytest.approx(0.01, rel=0.1)


def test_mime_with_one_plain_step_is_gradient_descent(logistic):
    step = 1 / logistic.L
    gd = logistic.models(ProximalGradient(step))
    same(gd, logistic.models(Mime(1, step, beta=0.0), 30)[::2])
    same(gd, logistic.models(Mime(1, step, beta=0.0), 30, batch_size=5)[::2])


@pytest.mark.parametrize("settings", [{}, {"batch_size": 6}, {"participation": 0.4, "batch_size": 6}])
def test_mimelite_without_momentum_is_fedavg(logistic, settings):
    step = 0.3 / logistic.L
    same(logistic.models(MimeLite(TAU, step, beta=0.0), **settings), logistic.models(FedAvg(TAU, step), **settings))


@pytest.mark.parametrize("count", [N, 4])
@pytest.mark.parametrize("lite", [False, True])
def test_mime_is_its_iteration(logistic, lite, count):
    step, beta, rounds = 0.3 / logistic.L, 0.7, 15
    x, m, out = X0, np.zeros(D), [X0]
    for who in cohorts(count, rounds):
        c = np.mean([logistic.gradient(i, x) for i in who], axis=0)
        ends = []
        for i in who:
            y = x
            for _ in range(TAU):
                g = logistic.gradient(i, y) + (0 if lite else c - logistic.gradient(i, x))
                y = y - step * ((1 - beta) * g + beta * m)
            ends.append(y)
        x, m = np.mean(ends, axis=0), (1 - beta) * c + beta * m
        out.append(x)
    if lite:
        found = logistic.models(MimeLite(TAU, step, beta), participation=count / N)
    else:
        found = logistic.models(Mime(TAU, step, beta), 2 * rounds, participation=count / N)[::2]
    same(found, np.array(out))


def test_mime_and_stem_vectors(logistic):
    """In vectors of d float64 (and 8 bytes of a flag): Mime 2 up, 3 down per step; MimeLite 2, 2; STEM 2, 2."""
    for method, rounds, up, down in (
        (Mime(TAU, 0.1), 2, 2 * D * 8, 3 * D * 8 + 16),
        (MimeLite(TAU, 0.1), 1, 2 * D * 8, 2 * D * 8),
        (STEM(TAU, 0.1), 1, 2 * D * 8, 2 * D * 8 + 8),
    ):
        last = fc.simulate(logistic.problem, method, rounds=rounds).history[-1]
        assert (last["bytes_up"], last["bytes_down"]) == (N * up, N * down)


def test_mime_is_exact_with_everybody_and_lite_or_sampled_is_not(logistic, optimum):
    step = 0.2 / logistic.L
    whole = np.linalg.norm(logistic.limit(Mime(TAU, step, beta=0.5), 600) - optimum)
    sampled = np.linalg.norm(logistic.limit(Mime(TAU, step, beta=0.5), 600, participation=0.3) - optimum)
    lite = np.linalg.norm(logistic.limit(MimeLite(TAU, step), 600) - optimum)
    assert whole < 1e-10
    assert sampled > 1e-2
    assert 1e-5 < lite < 1e-3


def test_stem_is_its_iteration(logistic):
    """Step by step in the published order: estimate, average both every tau steps, move."""
    step, a, rounds = 0.3 / logistic.L, 0.3, 12
    x = np.tile(X0, (N, 1))
    d, out = np.array([logistic.gradient(i, x[i]) for i in range(N)]), [X0]
    old, x = x, x - step * d
    for t in range(2, rounds * TAU + 1):
        g, g_old = (np.array([logistic.gradient(i, u[i]) for i in range(N)]) for u in (x, old))
        d = g + (1 - a) * (d - g_old)
        if t % TAU == 0:
            d, x = np.tile(d.mean(0), (N, 1)), np.tile(x.mean(0), (N, 1))
        old, x = x, x - step * d
        if t % TAU == 0:
            out.append(x[0])
    same(logistic.models(STEM(TAU, step, a), rounds), np.array(out))


def test_stem_reductions(logistic):
    step = 0.3 / logistic.L
    same(logistic.models(STEM(TAU, step, a=1.0)), logistic.models(FedAvg(TAU, step)))
    for a in (0.1, 1.0):
        same(logistic.models(STEM(1, step, a)), logistic.models(ProximalGradient(step)))


def test_stem_drifts(logistic, optimum):
    x = logistic.limit(STEM(TAU, 0.2 / logistic.L, a=0.1), 600)
    assert 1e-3 < np.linalg.norm(x - optimum) < 0.1


# -- exact limits -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [1.0, 0.3])
def test_exact_methods_reach_the_pooled_minimiser(logistic, optimum, share):
    L = logistic.L
    methods = [
        FedDyn(L / 2, 5, 1 / (1.5 * L)),
        FedDyn(L / 2, 1, 1 / (1.5 * L)),
        FedDC(TAU, 0.2 / L),
        ScaffoldM(TAU, 0.2 / L, beta=0.3),
    ]
    if share == 1:
        methods += [
            FedPD(2 / L, 5, 1 / (1.5 * L)),
            FedSplit(4 / L, 5, 1 / (1.25 * L)),
            FedSplit(4 / L, 1, 1 / (1.25 * L)),
            GradSkip(1 / L, 0.4),
        ]
    for method in methods:
        x = logistic.limit(method, 400, participation=share)
        assert np.linalg.norm(x - optimum) < 1e-10, method


def test_gradskip_with_the_paper_s_probabilities(logistic, optimum):
    """q_i = (1 - 1/kappa_i) / (1 - 1/kappa_max): fewer gradients, the same solution."""
    H = [np.linalg.eigvalsh(logistic.hessian(i, optimum)) for i in range(N)]
    kappa = np.array([e[-1] / e[0] for e in H])
    q = tuple(((1 - 1 / kappa) / (1 - 1 / kappa.max())).tolist())
    x = logistic.limit(GradSkip(1 / logistic.L, 1 / np.sqrt(kappa.max()), q), 300)
    assert np.linalg.norm(x - optimum) < 1e-10


def test_means_are_kept_under_sampling(logistic):
    """What the server holds is the mean of what the clients hold, always."""
    for method, mine, theirs in (
        (ScaffoldM(TAU, 0.2), "c", "c"),
        (FedDC(TAU, 0.2), "c", "c"),
        (FedDC(TAU, 0.2), "drift", "drift"),
        (FedDyn(0.5, 3, 0.5), "linear", "linear"),
        (Scaffold(TAU, 0.2), "c", "c"),
        (Zhang(TAU, 0.2, partial_participation=True), "mean", "own"),
        (FedNMap(TAU, 0.2, gamma=1.0, partial_participation=True), "mean", "own"),
    ):
        sim = Simulator(logistic.problem, method, batches=Batches(size=5), participation=0.4, x0=X0)
        for _ in range(12):
            sim.step()
            held = getattr(sim.clients, theirs).mean(0)
            assert held.norm() > 1e-3
            torch.testing.assert_close(getattr(sim.server, mine), held, rtol=0, atol=1e-13)
    sim = Simulator(
        logistic.problem, FedCanon(TAU, 0.2, 1.0, partial_participation=True), batches=Batches(), participation=0.4
    )
    for _ in range(12):
        sim.step()
        torch.testing.assert_close(sim.server.delta, -sim.clients.pending.mean(0), rtol=0, atol=1e-13)


# -- clients that sit out, in Zhang, FedCanon and FedNMap -------------------------------------------------------------


def composite(step, tau=TAU, server_step=1.0, **settings):
    return [
        Zhang(tau, step, server_step, **settings),
        FedCanon(tau, step, server_step * step * tau, **settings),
        FedNMap(tau, step, server_step, gamma=2.0, **settings),
    ]


def soft(v, threshold):
    return np.sign(v) * np.maximum(np.abs(v) - threshold, 0)


def test_zhang_takes_normal_map_steps(sparse):
    """The server's step is x- - eta~ (mean gradient + (x- - P(x-)) / eta~), and the corrections sum to zero."""
    step, server_step, rounds = 0.2, 1.4, 12
    whole = server_step * step * TAU
    x_bar, c, out = X0, np.zeros((N, D)), [soft(X0, 0.02 * whole)]
    for _ in range(rounds):
        x, V = soft(x_bar, 0.02 * whole), np.zeros((N, D))
        for i in range(N):
            y = z = x
            for t in range(TAU):
                g = sparse.gradient(i, z)
                V[i] += g / TAU
                y = y - step * (g + c[i])
                z = soft(y, 0.02 * (t + 1) * step)
        x_bar = x_bar - whole * (V.mean(0) + (x_bar - x) / whole)
        c = V.mean(0) - V
        assert np.abs(c.sum(0)).max() < 1e-13
        out.append(soft(x_bar, 0.02 * whole))
    same(sparse.models(Zhang(TAU, step, server_step), rounds), np.array(out))


def test_fednmap_is_its_equations(sparse):
    """(4)-(7) of the paper as printed, and (8), (9), (12) and (17) along the way."""
    step, server_step, gamma, rounds = 0.2, 1.4, 0.7, 12
    z, c, before, out = X0, np.zeros((N, D)), None, [soft(X0, 0.02 * gamma)]
    for _ in range(rounds):
        y, v = np.zeros((N, D)), np.zeros((N, D))
        for i in range(N):
            local = z
            for _ in range(TAU):
                x = soft(local, 0.02 * gamma)
                F = sparse.gradient(i, x) + (local - x) / gamma
                v[i] += F / TAU
                local = local - step * (F + c[i])
            y[i] = (z - local) / (step * TAU)
        np.testing.assert_allclose(y.mean(0), v.mean(0), rtol=0, atol=1e-12)  # (9)
        if before is not None:
            np.testing.assert_allclose(y, before[0] + v - before[1], rtol=0, atol=1e-12)  # (8)
        x = soft(z, 0.02 * gamma)
        normal = np.linalg.norm(sparse.mean(x) + (z - x) / gamma)
        mapping = np.linalg.norm(x - soft(x - gamma * sparse.mean(x), 0.02 * gamma)) / gamma
        assert mapping <= normal + 1e-12  # (17) with rho = 0
        c, before = c + y.mean(0) - y, (y.mean(0), v)
        assert np.abs(c.sum(0)).max() < 1e-12
        z = z - server_step * step * TAU * v.mean(0)  # (12)
        out.append(soft(z, 0.02 * gamma))
    same(sparse.models(FedNMap(TAU, step, server_step, gamma=gamma), rounds), np.array(out))


@pytest.mark.parametrize("batch_size", [None, 7])
def test_with_everybody_present_nothing_changes(sparse, batch_size):
    settings = {"batch_size": batch_size, "rounds": 20}
    for old, new in zip(
        composite(0.2, server_step=1.4), composite(0.2, server_step=1.4, partial_participation=True), strict=True
    ):
        same(sparse.models(old, **settings), sparse.models(new, **settings))


@pytest.mark.parametrize("batch_size", [None, 7])
def test_without_a_regularizer_sampling_is_scaffold_s(logistic, batch_size):
    settings = {"batch_size": batch_size, "participation": 0.4}
    scaffold = logistic.models(Scaffold(TAU, 0.2, 1.4, option=2), **settings)
    for method in composite(0.2, server_step=1.4, partial_participation=True):
        same(scaffold, logistic.models(method, **settings))


def kkt(world, x, lam):
    """Distance from optimality of min f + lam ||x||_1: the conditions themselves."""
    g = world.mean(x)
    return np.abs(np.where(x == 0, np.maximum(np.abs(g) - lam, 0), g + lam * np.sign(x))).max()


def test_sampled_limits_are_the_full_ones(sparse):
    zhang, fedcanon, fednmap = composite(0.2, partial_participation=True)
    for method in (zhang, fednmap):
        x = sparse.limit(method, 350, participation=0.5)
        assert kkt(sparse, x, 0.02) < 1e-10
        assert 0 < (x == 0).sum() < D
    full = sparse.limit(FedCanon(TAU, 0.2, 0.2 * TAU), 250)
    half = sparse.limit(fedcanon, 350, participation=0.5)
    np.testing.assert_allclose(half, full, rtol=0, atol=1e-10)


def test_sampled_fedcanon_stops_at_its_predicted_residual(sparse):
    """(beta/2) (tau - 1) ||[H grad f]_support||, to first order in beta, from the solution of the pooled problem."""
    star = sparse.limit(ProximalGradient(1 / sparse.L), 400)
    assert kkt(sparse, star, 0.02) < 1e-10
    H, on = np.mean([sparse.hessian(i, star) for i in range(N)], axis=0), star != 0
    for beta in (0.04, 0.02):
        predicted = beta / 2 * (TAU - 1) * np.linalg.norm((H @ sparse.mean(star))[on])
        x = sparse.limit(FedCanon(TAU, beta, 1.0, partial_participation=True), 350, participation=0.5)
        assert sparse.problem.stationarity(x) == pytest.approx(predicted, rel=0.6 * beta)


@pytest.mark.parametrize("regularizer", [MCP(0.05, 20.0), SCAD(0.05, kappa=0.05)], ids=repr)
def test_sampled_limits_with_weakly_convex_regularizers(regularizer):
    world = World("logistic", regularizer)
    zhang, _, fednmap = composite(0.2, partial_participation=True)
    for method in (zhang, fednmap):
        x = world.limit(method, 350, participation=0.5)
        assert world.problem.optimality(x) < 1e-10


def test_sampled_limits_with_weights(sparse):
    """A reply is a change, so clients may also be weighed by their samples."""
    sizes = np.arange(15, 15 + 5 * N, 5)
    pairs = [(X[:m], y[:m]) for (X, y), m in zip(sparse.data, sizes, strict=True)]
    problem = fc.Problem(fc.Silos.from_arrays(pairs), loss="logistic", regularizer=L1(0.02), weights="samples")
    zhang, _, fednmap = composite(0.15, partial_participation=True)
    X, y = (np.concatenate(part) for part in zip(*pairs, strict=True))
    for method in (zhang, fednmap):
        x = fc.simulate(problem, method, rounds=400, evaluate_every=400, participation=0.5).solution.numpy()
        g = -X.T @ (y / (1 + np.exp(y * (X @ x)))) / len(y)
        gap = np.where(x == 0, np.maximum(np.abs(g) - 0.02, 0), g + 0.02 * np.sign(x))
        assert np.abs(gap).max() < 1e-10


def test_vectors_when_clients_may_sit_out(sparse):
    """One vector up as ever; one more down for Zhang and FedNMap, none for FedCanon; unless asked for, nothing."""
    for settings, down in (({}, (1, 2, 1)), ({"partial_participation": True}, (2, 2, 2))):
        for method, vectors in zip(composite(0.2, **settings), down, strict=True):
            last = fc.simulate(sparse.problem, method, rounds=3).history[-1]
            assert (last["bytes_up"], last["bytes_down"]) == (3 * N * D * 8, 3 * N * D * 8 * vectors)


def test_sitting_out_must_be_asked_for(sparse):
    for method in composite(0.2):
        with pytest.raises(ValueError, match="needs every client in every round"):
            fc.simulate(sparse.problem, method, rounds=1, participation=0.5)


@pytest.mark.parametrize("rule", composite(1.0, 3, partial_participation=True), ids=lambda m: type(m).__name__)
def test_contract_of_the_sampled_forms(rule):
    check_briefly(rule)


# -- compression ------------------------------------------------------------------------------------------------------


VARIANTS = [
    EControlDA(0.5, "random", 0.4),
    EControlDA(0.5, "identity"),
    TAMUNA(1.0, 0.4),
    TAMUNA(1.0, 0.4, s=3, chi=0.5),
    GradSkip(1.0, 0.3, q=(0.5,) * 6),
    FedPD(2.0, 2, 0.5, p=0.4),
]


@pytest.mark.parametrize("method", VARIANTS, ids=repr)
def test_contract_of_the_variants(method):
    """Of TAMUNA and GradSkip without many rounds in single precision: other numbers make no other memory there."""
    for check in LAWS:
        if check is not does_not_drift or not isinstance(method, TAMUNA | GradSkip):
            briefly(check, method)


@pytest.mark.slow
@pytest.mark.parametrize("check", ROUNDS, ids=lambda c: c.__name__)
@pytest.mark.parametrize("method", [*VARIANTS, *composite(1.0, 3, partial_participation=True)], ids=repr)
def test_contract_of_the_variants_in_as_many_rounds_as_it_asks_for(method, check):
    if check is not does_not_drift or not isinstance(method, TAMUNA | GradSkip):
        check(method)


def test_keep_largest_is_the_best_choice_of_k():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 7, generator=generator, dtype=torch.float64)
    values, indices = KeepLargest(3 / 7).compress(x, lambda count: x)
    assert indices.dtype == torch.int32
    assert values.shape == indices.shape == (5, 3)
    error = (dense(values, indices, 7) - x).square().sum(-1)
    for row in range(5):
        best = min(float(x[row, list(left)].square().sum()) for left in itertools.combinations(range(7), 4))
        assert float(error[row]) == pytest.approx(best, abs=1e-12)


def test_keep_random_contracts_on_average_by_k_over_d():
    generator = torch.Generator().manual_seed(0)
    x = torch.tensor([3.0, -1.0, 0.5, 2.0, 0.0, 1.0], dtype=torch.float64)
    many = x.expand(20000, 6)
    values, indices = KeepRandom(1 / 3).compress(many, lambda count: torch.rand(20000, count, generator=generator))
    kept_x = dense(values, indices, 6)
    assert ((kept_x == 0) | (kept_x == x)).all()
    error = (kept_x - x).square().sum(-1).mean() / x.square().sum()
    assert float(error) == pytest.approx(1 - 2 / 6, abs=0.01)


def test_everything_kept_needs_no_indices():
    x = torch.arange(4.0)
    for compressor in (Identity(), KeepLargest(1.0), KeepRandom(1.0)):
        values, indices = compressor.compress(x, lambda count: torch.rand(count))
        assert torch.equal(dense(values, indices, 4), x)
        assert indices.shape == (0,)
    assert KeepLargest(1e-6).kept(1000) == 1
    with pytest.raises(ValueError, match="KeepLargest: ratio = 0"):
        KeepLargest(0)


def test_econtrolda_without_compression_is_dual_averaging(sparse):
    step = 0.7 / sparse.L
    found = sparse.models(EControlDA(step, "identity"))
    same(found, sparse.models(FedDA(1, step / 2, 2.0)))
    total, out = np.zeros(D), [X0]
    for r in range(15):
        total = total + sparse.mean(out[-1])
        out.append(soft(X0 - step * total, step * (r + 1) * 0.02))
    same(found, np.array(out))


def test_econtrolda_is_its_iteration(sparse):
    step, k, rounds = 0.3 / sparse.L, 4, 20
    delta = k / D
    theta = delta / (3 * np.sqrt(1 - delta) * (1 + np.sqrt(1 - delta)))
    x, total, estimate, error, out = X0, np.zeros(D), np.zeros((N, D)), np.zeros((N, D)), [X0]
    for r in range(rounds):
        g = np.array([sparse.gradient(i, x) for i in range(N)])
        news = g - estimate - theta * error
        if r:
            for i in range(N):
                news[i, np.argsort(np.abs(news[i]))[: D - k]] = 0
        estimate = estimate + news
        error = error + estimate - g
        total = total + estimate.mean(0)
        z = X0 - step * total
        x = soft(z, step * (r + 1) * 0.02)
        out.append(x)
    same(sparse.models(EControlDA(step, "largest", k / D), rounds), np.array(out))


@pytest.mark.parametrize("compressor", ["identity", "largest", "random"])
def test_econtrolda_reaches_the_solution(sparse, compressor):
    x = sparse.limit(EControlDA(0.3 / sparse.L, compressor, 4 / D), 1200)
    assert kkt(sparse, x, 0.02) < 1e-10


def test_bytes_of_compressed_replies(sparse, logistic):
    """First whole; then 4 values, 4 indices and the length. TAMUNA: ceil(sd/c) values and three numbers."""
    run = fc.simulate(sparse.problem, EControlDA(0.1, "largest", 4 / D), rounds=3)
    up = np.diff([r["bytes_up"] for r in run.history])
    assert up.tolist() == [N * D * 8, *[N * (4 * 8 + 4 * 4 + 4)] * 2]
    assert run.history[-1]["bytes_down"] == 3 * N * D * 8

    run = fc.simulate(logistic.problem, TAMUNA(0.5, 0.5, s=2), rounds=4, participation=0.5)
    up = np.diff([r["bytes_up"] for r in run.history])
    assert up.tolist() == [5 * (5 * 8 + 3 * 4), 0] * 2  # ceil(2 * 12 / 5) = 5
    assert run.history[-1]["bytes_down"] == 4 * 5 * (D * 8 + 8)


def test_refusals(logistic):
    weak = fc.Problem(logistic.problem.silos, loss="logistic", regularizer=MCP(0.1, 5.0))
    with pytest.raises(ValueError, match=r"convex regularizer: its prox step grows .* 1/rho = 5"):
        fc.simulate(weak, EControlDA(0.1), rounds=1)
    with pytest.raises(ValueError, match="s = 6, must be at most the number of participants, 5"):
        fc.simulate(logistic.problem, TAMUNA(0.1, 0.5, s=6), rounds=1, participation=0.5)
    with pytest.raises(ValueError, match="q has 3 numbers for 10 clients"):
        fc.simulate(logistic.problem, GradSkip(0.1, 0.5, q=(0.1, 0.2, 0.3)), rounds=1)
    with pytest.raises(ValueError, match="TAMUNA: s = 1"):
        TAMUNA(0.1, 0.5, s=1)
    with pytest.raises(ValueError, match="no rule for a regularizer"):
        fc.simulate(weak, FedDyn(1.0, 1, 0.1), rounds=1)
