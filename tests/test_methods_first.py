"""FedMLS, FedProx, FedMSPP, Scaffnew, ProxScaffnew, FedMid, FedDA, FastFedDA, FedDR and FedADMM.

Each is compared with a plain NumPy version of the published rule, with the method it turns into in a special case,
or with the pooled solution.
"""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from oracle_fedmls import fedmls

import fedcomposite as fc
from fedcomposite.algorithms import (
    FastFedDA,
    FedADMM,
    FedAvg,
    FedDA,
    FedDR,
    FedMid,
    FedMLS,
    FedMSPP,
    FedProx,
    ProximalGradient,
    ProxScaffnew,
    Scaffnew,
    Scaffold,
)
from fedcomposite.problems import Batches, ClientGradients, Counter
from fedcomposite.regularizers import L1, MCP, SCAD, Zero
from fedcomposite.rng import geometric
from fedcomposite.runtime.simulator import Simulator
from fedcomposite.testing.algorithms import inputs_are_kept, stacked_equals_loop

N, D, M = 10, 12, 40
LAM = 0.01
X0 = np.linspace(-1, 1, D)
CLOSE = {"rtol": 0, "atol": 1e-10}


def draw(kind, clients=N, seed=3):
    """Clients that disagree: shifted features and different true coefficients."""
    rng = np.random.default_rng(seed)
    shared = rng.standard_normal(D)
    arrays = []
    for _ in range(clients):
        X = (0.3 * rng.standard_normal(D) + rng.standard_normal((M, D))) / np.sqrt(D)
        z = X @ (shared + rng.standard_normal(D)) + 0.5 * rng.standard_normal(M)
        arrays.append((X, z if kind == "least_squares" else np.where(z > 0, 1.0, -1.0)))
    return arrays


def problem(kind="logistic", h=None, clients=N):
    return fc.Problem(fc.Silos.from_arrays(draw(kind, clients)), loss=kind, regularizer=h or L1(LAM))


LASSO, SMOOTH = problem(), problem(h=Zero())
L = SMOOTH.smoothness()
STEP = 0.7 / L


def models(problem, method, rounds=12, x0=X0, **settings):
    run = fc.simulate(problem, method, rounds=rounds, keep_solutions=True, evaluate_every=rounds, x0=x0, **settings)
    assert run.status == "completed"
    assert (run.solutions[-1] - run.solutions[0]).norm() > 0.1, "nothing happened, so nothing is compared"
    return run.solutions


def same(one, two):
    torch.testing.assert_close(one, torch.as_tensor(np.asarray(two)), **CLOSE)


def last(problem, method, rounds, **settings):
    return fc.simulate(problem, method, rounds=rounds, evaluate_every=rounds, **settings)


# Plain NumPy: gradients, proxes, solvers ----------------------------------------------------------------------------


def logistic_gradients(clients=N):
    def make(X, b):
        return lambda u: -X.T @ (b / (1 + np.exp(b * (X @ u)))) / len(b)

    return [make(X, b) for X, b in draw("logistic", clients)]


def mean_gradient(gradients, x):
    return sum(g(x) for g in gradients) / len(gradients)


def soft(v, threshold):
    return np.sign(v) * np.maximum(np.abs(v) - threshold, 0)


def exact_proxes(eta, clients=N):
    """The prox of eta f_i for least squares, by a linear solve: v -> argmin f_i + ||. - v||^2 / (2 eta)."""

    def make(X, b):
        H, c = X.T @ X / len(b), X.T @ b / len(b)
        return lambda v: np.linalg.solve(H + np.eye(D) / eta, c + v / eta)

    return [make(X, b) for X, b in draw("least_squares", clients)]


def stationarity(gradient, x, step, lam=LAM):
    return np.linalg.norm(x - soft(x - step * gradient, step * lam)) / step


# FedAvg -------------------------------------------------------------------------------------------------------------


def test_fedavg_with_one_step_is_gradient_descent():
    gradients, x, path = logistic_gradients(), X0, [X0]
    for _ in range(12):
        x = x - 1.6 * STEP * mean_gradient(gradients, x)
        path.append(x)
    same(models(SMOOTH, FedAvg(1, STEP, 1.6)), path)


# Scaffnew and ProxScaffnew ------------------------------------------------------------------------------------------


def proxskip(gradients, gamma, p, coin, x, lam):
    """ProxSkip on consensus plus lam ||.||_1, one iteration per toss; the models at the communications."""
    n = len(gradients)
    xs, ks, path = [x] * n, [np.zeros(D)] * n, [x]
    for toss in coin:
        hats = [xi - gamma * (g(xi) - k) for xi, g, k in zip(xs, gradients, ks, strict=True)]
        if toss:
            v = sum(hat - gamma / p * k for hat, k in zip(hats, ks, strict=True)) / n
            new = soft(v, gamma / p * lam)
            ks = [k + p / gamma * (new - hat) for k, hat in zip(ks, hats, strict=True)]
            xs = [new] * n
            path.append(new)
        else:
            xs = hats
    return np.stack(path)


def tosses(p, seed, rounds):
    return [t for r in range(rounds) for t in [False] * (geometric(p, seed, r) - 1) + [True]]


@pytest.mark.parametrize("p", [1.0, 0.4])
@pytest.mark.parametrize("lam", [0.0, LAM])
def test_scaffnew_is_proxskip(p, lam):
    """A round is the run of iterations up to the next head; with h = 0 the shift by k drops out of the mean."""
    path = proxskip(logistic_gradients(), STEP, p, tosses(p, 5, 12), X0, lam)
    same(models(LASSO if lam else SMOOTH, ProxScaffnew(STEP, p=p, seed=5)), path)
    if not lam:
        same(models(SMOOTH, Scaffnew(STEP, p=p, seed=5)), path)


def test_scaffnew_that_always_communicates_is_gradient_descent():
    same(models(SMOOTH, Scaffnew(STEP, p=1)), models(SMOOTH, FedAvg(1, STEP)))
    same(models(SMOOTH, Scaffnew(STEP, local_steps=1)), models(SMOOTH, FedAvg(1, STEP)))


@pytest.mark.parametrize("batch_size", [None, 7])
def test_scaffnew_every_few_steps_is_scaffold(batch_size):
    settings = {"batch_size": batch_size, "rounds": 15}
    expected = models(SMOOTH, Scaffold(5, STEP, 1.0, option=2), **settings)
    same(models(SMOOTH, Scaffnew(STEP, local_steps=5), **settings), expected)
    same(models(SMOOTH, ProxScaffnew(STEP, local_steps=5), **settings), expected)


@pytest.mark.parametrize("field", [{"p": 1}, {"local_steps": 1}], ids=str)
@pytest.mark.parametrize("h", [L1(LAM), MCP(0.02, 60.0)], ids=repr)
def test_proxscaffnew_that_always_communicates_is_proximal_gradient(field, h):
    composite = problem(h=h)
    same(models(composite, ProxScaffnew(STEP, **field)), models(composite, ProximalGradient(STEP)))


@pytest.mark.parametrize("fields", [{"p": 0.3}, {"local_steps": 4}], ids=str)
def test_control_variates_sum_to_zero_and_find_the_gradients(fields):
    gradients = logistic_gradients()
    smooth = Simulator(SMOOTH, Scaffnew(STEP, **fields), batches=Batches(), x0=X0)
    composite = Simulator(LASSO, ProxScaffnew(STEP, **fields), batches=Batches(), x0=X0)

    def k(sim):
        method = sim.algorithm
        return ((sim.server.x - sim.clients.own) * method.probability / method.step).numpy()

    for _ in range(300):
        smooth.step()
        composite.step()
        assert np.abs(k(smooth).mean(0)).max() < 1e-12
    for sim in (smooth, composite):
        at = sim.server.x.numpy()
        np.testing.assert_allclose(k(sim), [g(at) for g in gradients], **CLOSE)
    # With h the control variates follow grad f(x*), which is not zero.
    assert np.abs(k(composite).mean(0)).max() > LAM / 2


def test_shared_coin_is_geometric():
    p, rounds = 0.3, 5000
    drawn = np.array([geometric(p, 1, r) for r in range(rounds)])
    assert drawn.min() == 1
    for value in (1, 2, 3, 7):
        expected = p * (1 - p) ** (value - 1)
        assert abs((drawn == value).mean() - expected) < 4 * math.sqrt(expected * (1 - expected) / rounds)
    assert abs(drawn.mean() - 1 / p) < 4 * math.sqrt((1 - p) / p**2 / rounds)
    assert [geometric(p, 2, r) for r in range(20)] != list(drawn[:20])
    assert geometric(1.0, 0, 3) == 1


def test_average_taken_too_early_turns_scaffnew_into_fedavg():
    """A released implementation overwrites x_i by the mean before it forms p/gamma (mean - x_i): k_i stays zero."""
    gradients = logistic_gradients()
    xs, ks, path = [X0] * N, [np.zeros(D)] * N, [X0]
    for iteration in range(1, 4 * 12 + 1):
        xs = [x - STEP * (g(x) - k) for x, g, k in zip(xs, gradients, ks, strict=True)]
        if iteration % 4 == 0:
            xs = [sum(xs) / N] * N
            ks = [k + 0.25 / STEP * (sum(xs) / N - x) for k, x in zip(ks, xs, strict=True)]
            path.append(xs[0])
    same(models(SMOOTH, FedAvg(4, STEP)), path)
    assert (models(SMOOTH, Scaffnew(STEP, local_steps=4)) - torch.as_tensor(np.stack(path))).abs().max() > 1e-3


def test_proxscaffnew_costs_one_prox_and_one_vector():
    run = last(LASSO, ProxScaffnew(STEP, local_steps=5), 7)
    record = run.history[-1]
    assert record["prox_evaluations"] == 7
    assert record["bytes_up"] == 7 * N * 8 * D
    assert record["bytes_down"] == 7 * N * (8 * D + 8)  # and the number of local steps


@pytest.mark.parametrize("cls", [Scaffnew, ProxScaffnew])
@pytest.mark.parametrize("fields", [{}, {"p": 0.5, "local_steps": 2}], ids=str)
def test_exactly_one_of_p_and_local_steps(cls, fields):
    with pytest.raises(ValueError, match="exactly one"):
        cls(0.1, **fields)


# FedMid -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"participation": 0.5, "batch_size": 7}], ids=str)
def test_fedmid_and_fedda_without_h_are_fedavg(settings):
    expected = models(SMOOTH, FedAvg(5, STEP, 1.3), **settings)
    same(models(SMOOTH, FedMid(5, STEP, 1.3), **settings), expected)
    same(models(SMOOTH, FedMid(5, STEP, 1.3, server_prox_only=True), **settings), expected)
    same(models(SMOOTH, FedDA(5, STEP, 1.3), **settings), expected)


def test_fedmid_regularizes_twice():
    """One client, one step: proximal gradient on f + 2h; with more clients the limit is still nearer to that."""
    one, doubled = problem(clients=1), problem(h=L1(2 * LAM), clients=1)
    same(models(one, FedMid(1, STEP)), models(doubled, ProximalGradient(STEP)))
    limit = last(LASSO, FedMid(1, STEP), 600).solution
    right, wrong = (last(problem(h=L1(a * LAM)), ProximalGradient(STEP), 600).solution for a in (1, 2))
    assert (limit - right).norm() > 5 * (limit - wrong).norm()


def test_fedmid_with_the_server_prox_only():
    """One local step is proximal gradient descent, whatever the clients."""
    same(models(LASSO, FedMid(1, STEP, 1.4, server_prox_only=True)), models(LASSO, ProximalGradient(1.4 * STEP)))


def test_fedmid_server_prox_is_the_step_of_the_round():
    gradients, x, path = logistic_gradients(), X0, [X0]
    for _ in range(12):
        ys = []
        for g in gradients:
            y = x
            for _ in range(3):
                y = soft(y - STEP * g(y), STEP * LAM)
            ys.append(y)
        x = soft(x + 0.8 * (sum(ys) / N - x), 0.8 * STEP * 3 * LAM)
        path.append(x)
    same(models(LASSO, FedMid(3, STEP, 0.8)), path)
    assert last(LASSO, FedMid(3, STEP), 5).history[-1]["prox_evaluations"] == 5 * (3 * N + 1)


# FedDA and FastFedDA ------------------------------------------------------------------------------------------------


def test_fedda_with_one_step_is_dual_averaging():
    """x_r = P_{r eta~}(x0 - eta~ sum of the gradients so far), and it solves the problem."""
    gradients, total, step, path = logistic_gradients(), np.zeros(D), 1.4 * STEP, []
    for r in range(13):
        x = soft(X0 - step * total, r * step * LAM)
        path.append(x)
        total = total + mean_gradient(gradients, x)
    same(models(LASSO, FedDA(1, STEP, 1.4)), path)
    assert last(LASSO, FedDA(1, STEP), 1500, x0=X0).history[-1]["stationarity"] < 1e-12


@pytest.mark.parametrize("settings", [{}, {"participation": 0.5, "batch_size": 7}], ids=str)
def test_fedda_is_fastfedda_without_strong_convexity(settings):
    expected = models(LASSO, FedDA(5, STEP), **settings)
    same(models(LASSO, FastFedDA(5, mu=0.0, gamma=1 / STEP), **settings), expected)


def test_fedda_residual_is_linear_in_the_step():
    squares = problem("least_squares")
    step = 0.7 / squares.smoothness()
    best = last(squares, ProximalGradient(step), 400).solution
    error = [float((last(squares, FedDA(5, step * 2**-j), 60 * 2**j).solution - best).norm()) for j in range(5)]
    assert error[0] > 0.4
    for large, small in pairwise(error):
        assert 1.9 < large / small < 2.3


@pytest.mark.parametrize("h", [MCP(0.02, 60.0), SCAD(0.02, kappa=0.05)], ids=repr)
def test_growing_prox_refuses_weakly_convex(h):
    for method in (FedDA(5, STEP), FastFedDA(5, mu=0.0, gamma=1.0)):
        with pytest.raises(ValueError, match=r"grows"):
            fc.simulate(problem(h=h), method, rounds=1)


def fast_fedda(gradients, tau, mu, gamma, rounds, weight, x, guarded=True):
    """The published loop with explicit w, W and sums of weights; unguarded is the released code's."""
    n, G, W, w, path = len(gradients), np.zeros(D), weight(0) * x, x, [x]
    x0, totals = x, np.cumsum([weight(T) for T in range(rounds * tau)])

    def rule(G, W, A):
        q = mu * A / 2 + gamma
        return soft((mu / 2 * W + gamma * x0 - G) / q, A / q * LAM)

    for r in range(rounds):
        Gs, Ws = [], []
        for g in gradients:
            Gi, Wi, wi = G, W, w
            for t in range(tau):
                T = r * tau + t
                Gi = Gi + weight(T) * g(wi)
                if t < tau - 1 or not guarded:
                    wi = rule(Gi, Wi, totals[T])
                    Wi = Wi + weight(T + 1) * wi
            Gs.append(Gi)
            Ws.append(Wi)
        G, W = sum(Gs) / n, sum(Ws) / n
        w = rule(G, W, totals[(r + 1) * tau - 1])
        W = W + weight((r + 1) * tau) * w
        path.append(w)
    return np.stack(path)


@pytest.mark.parametrize(
    ("weighting", "weight"), [("constant", lambda T: 1.0), ("quadratic", lambda T: (T + 1.0) ** 2)]
)
def test_fastfedda_is_the_guarded_rule(weighting, weight):
    for tau in (1, 4):
        path = fast_fedda(logistic_gradients(), tau, 0.2 * L, 1.5 * L, 12, weight, X0)
        same(models(LASSO, FastFedDA(tau, mu=0.2 * L, gamma=1.5 * L, weighting=weighting)), path)


def test_fastfedda_error_falls_like_one_over_rounds():
    for weighting in ("constant", "quadratic"):
        method = FastFedDA(5, mu=0.1 * L, gamma=2 * L, weighting=weighting)
        residual = [last(LASSO, method, rounds).history[-1]["stationarity"] for rounds in (200, 400, 800)]
        assert residual[0] < 1e-3
        for large, small in pairwise(residual):
            assert 1.8 < large / small < 2.2


def test_unguarded_fastfedda_solves_another_problem():
    """One point too many per round: the limit is stationary for f - mu/(4 tau) ||w||^2 + h instead."""
    squares, mu, gamma = problem("least_squares"), 0.05, 0.3
    gradients = [lambda u, X=X, b=b: X.T @ (X @ u - b) / len(b) for X, b in draw("least_squares")]
    for tau in (1, 2, 5):
        path = fast_fedda(gradients, tau, mu, gamma, 400, lambda T: 1.0, X0, guarded=False)
        modified, original = [], []
        for w in (path[200], path[400]):
            gradient = mean_gradient(gradients, w)
            modified.append(stationarity(gradient - mu / (2 * tau) * w, w, 1.0))
            original.append(stationarity(gradient, w, 1.0))
        assert modified[1] < 1e-3
        assert 1.9 < modified[0] / modified[1] < 2.3
        assert original[1] == pytest.approx(original[0], rel=0.02)
        assert original[1] > 0.02
        guarded = last(squares, FastFedDA(tau, mu=mu, gamma=gamma), 400, x0=X0)
        assert squares.stationarity(guarded.solution, 1.0) < 1e-3


# FedDR and FedADMM --------------------------------------------------------------------------------------------------


def inner(eta, steps=5, smoothness=L):
    return {"prox_step": eta, "local_steps": steps, "step": 1 / (smoothness + 1 / eta)}


@pytest.mark.parametrize("settings", [{}, {"participation": 0.3}, {"participation": 0.5, "batch_size": 7}], ids=str)
@pytest.mark.parametrize("h", [L1(LAM), MCP(0.02, 200.0)], ids=repr)
def test_feddr_without_relaxation_is_fedadmm(settings, h):
    composite, inexact = problem(h=h), inner(3 / L)
    same(models(composite, FedADMM(**inexact), **settings), models(composite, FedDR(alpha=1.0, **inexact), **settings))


def quadratic(h=None):
    """Least squares with an inner solver that is exact to rounding, and the exact proxes."""
    squares = problem("least_squares", h)
    smoothness = squares.smoothness()
    eta = 1 / smoothness
    return squares, inner(eta, 60, smoothness), exact_proxes(eta)


@pytest.mark.parametrize("alpha", [0.8, 1.0, 1.9])
@pytest.mark.parametrize("participation", [1.0, 0.3])
def test_feddr_is_the_published_rule(alpha, participation):
    """With every variable kept, exact local proxes, and x~ as the mean over all clients, stale ones included."""
    squares, solver, proxes = quadratic()
    sim = Simulator(squares, FedDR(alpha=alpha, **solver), batches=Batches(), x0=X0, participation=participation)
    y, x, x_hat = ([X0] * N for _ in range(3))
    x_bar = X0
    for r in range(15):
        for i in map(int, sim.participants(r)):
            y[i] = y[i] + alpha * (x_bar - x[i])
            x[i] = proxes[i](y[i])
            x_hat[i] = 2 * x[i] - y[i]
        x_bar = soft(sum(x_hat) / N, solver["prox_step"] * LAM)
        sim.step()
        same(sim.solution, x_bar)


def test_fedadmm_is_the_published_rule():
    squares, solver, proxes = quadratic()
    eta = solver["prox_step"]
    sim = Simulator(squares, FedADMM(**solver), batches=Batches(), x0=X0, participation=0.3)
    dual, x_hat, x_bar = [np.zeros(D)] * N, [X0] * N, X0
    for r in range(15):
        for i in map(int, sim.participants(r)):
            x = proxes[i](x_bar - eta * dual[i])
            dual[i] = dual[i] + (x - x_bar) / eta
            x_hat[i] = x + eta * dual[i]
        x_bar = soft(sum(x_hat) / N, eta * LAM)
        sim.step()
        same(sim.solution, x_bar)


def test_feddr_without_h_is_fedpd_feddyn_and_gongs_fedadmm():
    """Full participation, alpha = 1: three smooth methods, written out with exact local solves."""
    squares, solver, proxes = quadratic(Zero())
    eta = solver["prox_step"]
    pd, dyn, gong = [X0], [X0], [X0]
    lam_pd, grad_dyn, lam_gong = ([np.zeros(D)] * N for _ in range(3))
    w_gong, server_dyn = [X0] * N, np.zeros(D)
    for _ in range(12):
        at = pd[-1]
        x = [p(at - eta * m) for p, m in zip(proxes, lam_pd, strict=True)]
        lam_pd = [m + (xi - at) / eta for m, xi in zip(lam_pd, x, strict=True)]
        pd.append(sum(xi + eta * m for xi, m in zip(x, lam_pd, strict=True)) / N)

        at = dyn[-1]
        theta = [p(at + eta * g) for p, g in zip(proxes, grad_dyn, strict=True)]
        grad_dyn = [g - (th - at) / eta for g, th in zip(grad_dyn, theta, strict=True)]
        server_dyn = server_dyn - (sum(theta) / N - at) / eta
        dyn.append(sum(theta) / N - eta * server_dyn)

        at = gong[-1]
        w = [p(at - eta * m) for p, m in zip(proxes, lam_gong, strict=True)]
        new = [m + (wi - at) / eta for m, wi in zip(lam_gong, w, strict=True)]
        change = sum(a - b + eta * (c - d) for a, b, c, d in zip(w, w_gong, new, lam_gong, strict=True))
        w_gong, lam_gong = w, new
        gong.append(at + change / N)
    for path in (pd, dyn, gong):
        same(models(squares, FedDR(alpha=1.0, **solver)), path)
        same(models(squares, FedADMM(**solver)), path)


def test_fully_relaxed_feddr_is_fedsplit():
    squares, solver, proxes = quadratic(Zero())
    z, path = [X0] * N, [X0]
    for _ in range(12):
        x = path[-1]
        z = [zi + 2 * (p(2 * x - zi) - x) for zi, p in zip(z, proxes, strict=True)]
        path.append(sum(z) / N)
    same(models(squares, FedDR(alpha=2.0, **solver)), path)


def test_feddr_of_one_client_is_the_proximal_point_method():
    squares = problem("least_squares", Zero(), clients=1)
    smoothness = squares.smoothness()
    (prox,) = exact_proxes(1 / smoothness, clients=1)
    sim = Simulator(squares, FedDR(alpha=1.0, **inner(1 / smoothness, 60, smoothness)), batches=Batches(), x0=X0)
    x = X0
    for _ in range(12):
        before, x = x, prox(x)
        sim.step()
        same(sim.clients.x[0], x)
        same(sim.solution, 2 * x - before)


def test_inconsistent_start_shifts_feddr():
    """x_i at the prox of x0 but x~ at x0: the limit is stationary for f + h - <b, x> / eta, b = x0 - mean of x^_i."""
    squares, solver, proxes = quadratic()
    method, eta = FedDR(alpha=1.0, **solver), solver["prox_step"]
    sim = Simulator(squares, method, batches=Batches(), x0=X0)
    x = np.stack([p(X0) for p in proxes])
    sim.clients = type(sim.clients)(torch.as_tensor(np.stack([X0] * N)), torch.as_tensor(x))
    b = X0 - (2 * x - X0).mean(0)
    for _ in range(150):
        sim.step()
    at = sim.solution
    gradient = squares.gradient(at).numpy()
    assert stationarity(gradient - b / eta, at.numpy(), eta) < 1e-10
    assert squares.stationarity(at) > 1e-2
    assert last(squares, method, 150, x0=X0).history[-1]["stationarity"] < 1e-10


def test_local_solver_must_start_warm():
    """A fixed number of gradient steps from y_i stops short of x*; from x_i a single one is enough."""
    gradients, eta = logistic_gradients(), 5 / L
    step = 1 / (L + 1 / eta)

    def cold(local_steps):
        y, x, x_bar = [X0] * N, [X0] * N, X0
        for _ in range(400):
            for i, g in enumerate(gradients):
                y[i] = y[i] + x_bar - x[i]
                u = y[i]
                for _ in range(local_steps):
                    u = u - step * (g(u) + (u - y[i]) / eta)
                x[i] = u
            x_bar = soft(sum(2 * a - b for a, b in zip(x, y, strict=True)) / N, eta * LAM)
        return stationarity(mean_gradient(gradients, x_bar), x_bar, 1 / L)

    assert cold(1) > 5 * cold(5) > 1e-6
    assert last(LASSO, FedDR(alpha=1.0, **inner(eta, 1)), 1000, x0=X0).history[-1]["stationarity"] < 1e-10


def test_mean_is_over_all_clients():
    """Under sampling x~ stays the mean of every client's reflection, and one prox is taken per round."""
    sim = Simulator(LASSO, FedDR(alpha=1.7, **inner(3 / L)), batches=Batches(), x0=X0, participation=0.3)
    other = Simulator(LASSO, FedADMM(**inner(3 / L)), batches=Batches(), x0=X0, participation=0.3)
    for r in range(20):
        sim.step()
        other.step()
        same(sim.server.x_tilde, (2 * sim.clients.x - sim.clients.y).mean(0))
        same(other.server.x_tilde, (other.clients.x + 3 / L * other.clients.dual).mean(0))
        assert sim.counter.proxes == other.counter.proxes == r + 1


def test_relaxation_stays_within_two():
    with pytest.raises(ValueError, match="alpha"):
        FedDR(alpha=2.1, **inner(1.0))


# FedProx and FedMSPP ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"participation": 0.5, "batch_size": 7}], ids=str)
@pytest.mark.parametrize("h", [Zero(), L1(LAM)], ids=repr)
def test_fedprox_without_its_term_is_fedavg(settings, h):
    expected = models(problem(h=h), FedAvg(5, STEP), **settings)
    same(models(problem(h=h), FedProx(None, STEP, 5), **settings), expected)
    same(models(problem(h=h), FedProx(1e14, STEP, 5), **settings), expected)


def test_fedprox_steps():
    """Perturbed gradient steps from the server's model, with the sign of y for l1."""
    gradients, x, path, mu = logistic_gradients(), X0, [X0], 0.5 * L
    for _ in range(12):
        ys = []
        for g in gradients:
            y = x
            for _ in range(5):
                y = y - STEP * (g(y) + LAM * np.sign(y) + mu * (y - x))
            ys.append(y)
        x = sum(ys) / N
        path.append(x)
    same(models(LASSO, FedProx(1 / mu, STEP, 5)), path)
    same(models(LASSO, FedMSPP(1 / mu, STEP, 5)), path)


@pytest.mark.parametrize("cls", [FedProx, FedMSPP])
def test_fedprox_of_one_client_is_the_proximal_point_method(cls):
    squares = problem("least_squares", Zero(), clients=1)
    smoothness = squares.smoothness()
    eta = 2 / smoothness
    (prox,) = exact_proxes(eta, clients=1)
    path = [X0]
    for _ in range(12):
        path.append(prox(path[-1]))
    same(models(squares, cls(eta, 1 / (smoothness + 1 / eta), tolerance=1e-13)), path)


def test_fedprox_averages_the_clients_proxes():
    squares, smoothness = problem("least_squares", Zero()), problem("least_squares").smoothness()
    eta = 2 / smoothness
    proxes, path = exact_proxes(eta), [X0]
    for _ in range(12):
        path.append(sum(p(path[-1]) for p in proxes) / N)
    for cls in (FedProx, FedMSPP):
        same(models(squares, cls(eta, 1 / (smoothness + 1 / eta), tolerance=1e-13)), path)


def test_fedprox_bias_is_linear_in_the_prox_step():
    squares = problem("least_squares", Zero())
    smoothness = squares.smoothness()
    best = last(squares, ProximalGradient(1 / smoothness), 1500).solution
    error = []
    for eta in (0.4, 0.04, 0.004):
        proxes = exact_proxes(eta / smoothness)
        # The mean prox is affine, x -> A x + a, so its fixed point is known without iterating.
        a = sum(p(np.zeros(D)) for p in proxes) / N
        A = np.stack([sum(p(e) for p in proxes) / N - a for e in np.eye(D)], axis=1)
        x = np.linalg.solve(np.eye(D) - A, a)
        method = FedProx(eta / smoothness, 1 / (smoothness + smoothness / eta), tolerance=1e-13)
        same(last(squares, method, 12, x0=x).solution, x)
        error.append(np.linalg.norm(x - best.numpy()))
    assert error[0] > 0.01
    assert 7 < error[0] / error[1] < 13
    assert 9 < error[1] / error[2] < 11


def oracle(problem, batch_size, r=0):
    clients = np.arange(len(problem.silos), dtype=np.uint64)
    return ClientGradients(problem.smooth(), clients, r, Batches(0, batch_size), Counter())


def stacked(x):
    return torch.as_tensor(x).expand(N, D)


def test_tolerance_stops_each_client_by_itself():
    """Every client ends within the tolerance, after exactly the steps it would take alone."""
    eta, tolerance = 4 / L, 1e-4
    method = FedProx(eta, 1 / (L + 1 / eta), tolerance=tolerance)
    start = type(method.init(torch.as_tensor(X0), Zero())[0])(stacked(X0))
    reply, _ = method.local_round(start, fc.algorithms.Empty(), oracle(SMOOTH, None), Zero())
    taken = []
    for g, change in zip(logistic_gradients(), reply.dx.numpy(), strict=True):
        y, steps = X0, 0
        while np.linalg.norm(d := g(y) + (y - X0) / eta) > tolerance:
            y, steps = y - method.step * d, steps + 1
        np.testing.assert_allclose(change, y - X0, **CLOSE)
        taken.append(steps)
    assert len(set(taken)) > 1
    capped = FedProx(eta, 1 / (L + 1 / eta), min(taken) - 1, tolerance)
    same(models(SMOOTH, capped), models(SMOOTH, FedProx(eta, 1 / (L + 1 / eta), min(taken) - 1)))


def test_done_clients_stay_done_on_fresh_minibatches():
    """With a new minibatch per step a client that stopped once does not start again."""
    method = FedProx(4 / L, 0.5 / L, local_steps=30, tolerance=0.12)
    settings = {"batch_size": 3, "rounds": 12}
    one, two = (models(SMOOTH, method, backend=b, **settings) for b in ("stacked", "loop"))
    same(one, two)
    assert (one - models(SMOOTH, FedProx(4 / L, 0.5 / L, 30), **settings)).abs().max() > 1e-3


def test_fedmspp_solves_on_one_minibatch():
    """The reply is the proximal point of the loss on the round's first minibatch; FedProx's is not."""
    eta, batch = 1 / L, 5
    for cls, solves in ((FedMSPP, True), (FedProx, False)):
        method = cls(eta, 1 / (3 * L + 1 / eta), local_steps=400)
        start = type(method.init(torch.as_tensor(X0), Zero())[0])(stacked(X0))
        grad = oracle(SMOOTH, batch)
        reply, _ = method.local_round(start, fc.algorithms.Empty(), grad, Zero())
        left = grad(stacked(X0) + reply.dx, 0) + reply.dx / eta
        assert (left.norm(dim=-1) < 1e-12).all() == solves
    same(models(LASSO, FedMSPP(eta, STEP, 5)), models(LASSO, FedProx(eta, STEP, 5)))


def test_theorem_tolerance_reaches_the_theorem_accuracy():
    """The gradient tolerance guarantees the suboptimality epsilon that the theorems ask for."""
    squares = problem("least_squares", Zero())
    smoothness, G, T, cohort, batch = squares.smoothness(), 2.0, 100, 5, 8
    eta = min(T ** (-1 / 3), (cohort / T) ** 0.5) / (3 * smoothness)
    eta_b = min(T ** (-1 / 3), (batch * cohort / T) ** 0.5) / (8 * smoothness)
    e1 = min(
        2 * smoothness**2 * G**2 * eta**3 / (cohort**2 * (smoothness * eta + 1)),
        G**2 * eta / (2 * cohort * (smoothness * eta + 1)),
    )
    e3 = min(
        G**2 * eta_b / (2 * (smoothness * eta_b + 1)),
        G**2 * eta_b / (8 * batch**2),
        smoothness**2 * G**2 * eta_b**3 / (2 * batch * cohort * (smoothness * eta_b + 1)),
    )
    for method, prox_step, epsilon in (
        (FedProx.from_theory(smoothness, G, T, cohort), eta, e1),
        (FedMSPP.from_theory(smoothness, G, T, cohort, batch), eta_b, e3),
    ):
        assert method.prox_step == pytest.approx(prox_step)
        assert method.tolerance == pytest.approx(math.sqrt(2 * (1 / prox_step - smoothness) * epsilon))
        start = type(method.init(torch.as_tensor(X0), Zero())[0])(stacked(X0))
        reply, _ = method.local_round(start, fc.algorithms.Empty(), oracle(squares, None), Zero())
        proxes = exact_proxes(prox_step)
        for (X, b), prox, change in zip(draw("least_squares"), proxes, reply.dx.numpy(), strict=True):

            def value(u, X=X, b=b, prox_step=prox_step):
                return ((X @ u - b) ** 2).mean() / 2 + ((u - X0) ** 2).sum() / (2 * prox_step)

            assert value(X0 + change) - value(prox(X0)) <= epsilon


@pytest.mark.parametrize("cls", [FedProx, FedMSPP])
def test_a_local_problem_needs_an_end(cls):
    with pytest.raises(ValueError, match="local_steps"):
        cls(1.0, 0.1)


# FedMLS -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("radius", [None, 3.0, 1.2])
@pytest.mark.parametrize("schedule", ["growing", "constant"])
def test_fedmls_is_the_published_rule(radius, schedule):
    """Sixty rounds of l1 logistic regression with subgradients; the radii cut the unconstrained solution off."""
    lambda0, first = (300.0, 1) if schedule == "growing" else (20.0, 9)
    start = X0 / np.linalg.norm(X0)
    path, largest = fedmls(
        [lambda u, g=g: g(u) + LAM * np.sign(u) for g in logistic_gradients()],
        start,
        60,
        lam=(lambda k: lambda0 / k) if schedule == "growing" else lambda k: lambda0,
        steps=(lambda k: first * k) if schedule == "growing" else lambda k: first,
        radius=radius or np.inf,
    )
    method = FedMLS(lambda0, first, radius, schedule)
    same(models(LASSO, method, rounds=60, x0=start)[1:], path)
    assert largest <= radius + 1e-12 if radius else largest > 3.0


def hinge_subgradients(clients=N):
    def make(X, b):
        return lambda u: -X.T @ (b * (b * (X @ u) < 1)) / len(b)

    return [make(X, b) for X, b in draw("logistic", clients)]


class Hinge:
    """The oracle of a non-smooth loss, from the NumPy subgradients."""

    cohort = N

    def __init__(self):
        self.each = hinge_subgradients()

    def __call__(self, x, k):
        return torch.as_tensor(np.stack([g(u) for g, u in zip(self.each, x.numpy(), strict=True)]))


def test_fedmls_on_hinge_losses():
    """The rules driven by hand on a loss with kinks, against the oracle."""
    path, _ = fedmls(hinge_subgradients(), X0, 60, lam=lambda k: 40.0 / k, steps=lambda k: k)
    method, grad = FedMLS(40.0), Hinge()
    server, client = method.init(torch.as_tensor(X0), Zero())
    clients = type(client)(*(t.expand(N, D) for t in client))
    for x in path:
        message = method.broadcast(server)
        message = type(message)(*(t.expand(N, *t.shape) for t in message))
        reply, clients = method.local_round(message, clients, grad, Zero())
        server = method.aggregate(server, type(reply)(*(t.mean(0) for t in reply)), 1.0, Zero())
        same(method.solution(server, Zero()), x)


def test_fedmls_clients_stay_in_the_ball():
    sim = Simulator(LASSO, FedMLS(300.0, radius=1.2), batches=Batches(0, 5), x0=3 * X0)
    for _ in range(30):
        sim.step()
        for t in sim.clients:
            assert (t.norm(dim=-1) <= 1.2 + 1e-12).all()


def test_fedmls_error_falls_faster_than_one_over_rounds():
    best = last(LASSO, ProximalGradient(1 / L), 1500).history[-1]["objective"]
    run = fc.simulate(LASSO, FedMLS(20 / L), rounds=120, evaluate_every=30, x0=X0)
    gap = [record["objective"] - best for record in run.history[1:]]
    assert gap[0] > gap[1] > gap[3] > 0
    assert gap[0] / gap[3] > 4
    assert run.history[-1]["gradient_evaluations"] == N * 120 * 121 // 2


# Convergence --------------------------------------------------------------------------------------------------------


def converged(problem, method, rounds, **settings):
    run = fc.simulate(problem, method, rounds=rounds, evaluate_every=20, tolerance=1e-10, x0=X0, **settings)
    assert run.status == "converged"
    return run


@pytest.mark.parametrize(
    ("method", "rounds", "participation"),
    [
        (ProxScaffnew(1 / L, p=1.0), 800, 1.0),
        (ProxScaffnew(1 / L, p=0.5), 500, 1.0),
        (ProxScaffnew(1 / L, p=0.2), 400, 1.0),
        (ProxScaffnew(1 / L, p=0.1), 400, 1.0),
        (ProxScaffnew(0.5 / L, local_steps=5), 400, 1.0),
        (FedDR(alpha=1.0, **inner(5 / L)), 300, 1.0),
        (FedDR(alpha=1.0, **inner(5 / L)), 600, 0.3),
        (FedDR(alpha=1.9, **inner(5 / L)), 300, 1.0),
        (FedDR(alpha=1.9, **inner(5 / L)), 600, 0.3),
        (FedADMM(**inner(5 / L)), 300, 1.0),
        (FedADMM(**inner(5 / L)), 600, 0.3),
    ],
    ids=str,
)
def test_exact_on_sparse_logistic_regression(method, rounds, participation):
    run = converged(LASSO, method, rounds, participation=participation)
    assert 0 < run.history[-1]["nonzeros"] < D


@pytest.mark.parametrize("fields", [{"step": 1 / L, "p": 0.2}, {"step": 0.5 / L, "local_steps": 5}], ids=str)
def test_scaffnew_is_exact_on_smooth_problems(fields):
    converged(SMOOTH, Scaffnew(**fields), 600)


@pytest.mark.parametrize("h", [MCP(0.02, 200.0), SCAD(0.02, kappa=0.01)], ids=repr)
def test_exact_on_weakly_convex_regularizers(h):
    composite = problem(h=h)
    for method in (FedDR(alpha=1.0, **inner(5 / L)), FedDR(alpha=1.9, **inner(5 / L)), ProxScaffnew(1 / L, p=0.2)):
        converged(composite, method, 800)


def test_composite_minibatch_runs_improve_with_partial_participation():
    """The practical settings of every method here make progress on minibatches."""
    start = LASSO.objective(X0)
    for cls in (FedMLS, FedProx, FedMSPP, ProxScaffnew, FedMid, FedDA, FastFedDA, FedDR, FedADMM, Scaffnew):
        method = cls.auto(L, local_steps=5)
        share = 0.5 if method.partial else 1.0
        run = last(LASSO, method, 30, participation=share, batch_size=8, x0=X0)
        assert run.history[-1]["objective"] < start, cls.__name__


@pytest.mark.parametrize(
    "method",
    [
        FedProx(1.0, 0.5, tolerance=0.05),
        FedMSPP(1.0, 0.5, 20, tolerance=0.05),
        FastFedDA(3, mu=0.01, gamma=0.3, weighting="quadratic"),
        Scaffnew(1.0, local_steps=3),
        ProxScaffnew(1.0, local_steps=3),
        FedMid(3, 1.0, 1.5, server_prox_only=True),
        FedMLS(20.0, 4, radius=0.1, schedule="constant"),
    ],
    ids=str,
)
def test_options_keep_the_contract(method):
    """The common list of laws covers the practical settings; these are the other branches."""
    stacked_equals_loop(method)
    inputs_are_kept(method)
