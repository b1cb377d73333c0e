"""Step-size conditions written out again, and runs with theory steps against the theorems' bounds."""

import math

import numpy as np
import pytest
import torch

import fedcomposite as fc
from fedcomposite import theory
from fedcomposite.algorithms import REGISTRY, build
from fedcomposite.experiments import Config
from fedcomposite.experiments.config import ConfigError
from fedcomposite.regularizers import L1, MCP, SCAD, Box, ElasticNet, Zero
from fedcomposite.theory import Constants

needs = {name: pytest.mark.skipif(name not in REGISTRY, reason=f"{name} is not registered") for name in theory.THEOREMS}
GRID = [(L, rho, n, tau) for L in (0.03, 1.0, 40.0) for rho in (0.0, 0.5) for n in (1, 10, 200) for tau in (1, 7)]


@pytest.mark.parametrize(("L", "rho", "n", "tau"), GRID)
def test_zhang_conditions(L, rho, n, tau):
    f = theory.steps("Zhang", Constants(L=L, n=n), tau)
    whole = f["step"] * f["server_step"] * tau
    assert whole == pytest.approx(1 / (10 * L))
    assert f["server_step"] >= 1.5
    assert f["server_step"] ** 2 >= n / 8 * (1 - 1e-12)
    mu = L / 3
    f = theory.steps("Zhang", Constants(L=L, n=n, mu=mu), tau, theorem="3.8")
    assert f["step"] * f["server_step"] * tau == pytest.approx(mu / (150 * L * L))
    assert f["server_step"] ** 2 == pytest.approx(n)


@pytest.mark.parametrize(("L", "rho", "n", "tau"), GRID)
def test_fedcanon_conditions(L, rho, n, tau):
    f = theory.steps("FedCanon", Constants(L=L, rho=rho, n=n), tau)
    alpha, beta = f["server_step"], f["step"]
    delta = 1 / (1 - alpha * rho) ** 2
    assert alpha * (rho + L) + 4 * alpha**2 * L**2 == pytest.approx(0.5)
    assert 192 * (6 + delta) * beta**2 * tau**2 * L**2 == pytest.approx(1.0)
    assert alpha * rho < 1
    mu = L
    f = theory.steps("FedCanonII", Constants(L=L, rho=rho, n=n, mu=mu), tau, theorem="2")
    alpha, beta = f["server_step"], f["step"]
    delta = 1 / (1 - alpha * rho) ** 2
    used = alpha * (rho + L) + 4 * alpha**2 * L**2
    assert used == pytest.approx(min(0.5, (4 * mu * (rho + L) + 64 * L**2) / mu**2))
    assert 12 * (6 + delta) * beta**2 * tau**2 * L**2 == pytest.approx(min(1 / 16, 1 - alpha * mu / 4))


def test_scaffold_and_proximal_gradient_conditions():
    c = Constants(L=2.0, rho=0.5, n=27, cohort=8)
    f = theory.steps("Scaffold", c, 5)
    assert f["server_step"] >= 1
    assert f["step"] == pytest.approx((8 / 27) ** (2 / 3) / (24 * 5 * f["server_step"] * 2.0))
    assert theory.steps("ProximalGradient", c) == {"step": 0.4}


def test_feddr_conditions():
    c = Constants(L=2.0)
    f = theory.steps("FedDR", c, 5)
    alpha, eta = f["alpha"], f["prox_step"]
    assert 0 < alpha < (math.sqrt(17) - 1) / 2
    limit = (math.sqrt(17) - 1 - 2 * alpha) / (2 * 2.0 * (alpha + 2))
    assert 0.9 * limit < eta < limit


def test_scaffnew_conditions():
    f = theory.steps("Scaffnew", Constants(L=4.0, mu=0.25))
    assert f == {"step": 0.25, "p": 0.25}  # kappa = 16
    assert theory.steps("ProxScaffnew", Constants(L=4.0), local_steps=5) == {"step": 0.25, "p": 0.2}


@needs["FedProx"]
def test_fedprox_conditions():
    L, G, T, I = 2.0, 3.0, 50, 6  # noqa: E741
    f = theory.steps("FedProx", Constants(L=L, G=G, n=12, cohort=I, rounds=T))
    eta = min(T ** (-1 / 3), math.sqrt(I / T)) / (3 * L)
    assert f["prox_step"] == pytest.approx(eta)
    allowed = min(2 * L**2 * G**2 * eta**3 / (I**2 * (L * eta + 1)), G**2 * eta / (2 * I * (L * eta + 1)))
    # A gradient of this norm leaves at most tolerance^2 / (2 m) of an m-strongly convex local problem.
    assert f["tolerance"] ** 2 / (2 * (1 / eta - L)) <= allowed * (1 + 1e-12)
    rough = theory.steps("FedProx", Constants(L=None, G=G, rho=0.2, rounds=T))
    assert rough["prox_step"] * math.sqrt(T) < 1 / (2 * 0.2)


@needs["FedMSPP"]
def test_fedmspp_conditions():
    L, G, T, I, b = 2.0, 3.0, 5000, 6, 4  # noqa: E741
    f = theory.steps("FedMSPP", Constants(L=L, G=G, n=12, cohort=I, batch=b, rounds=T))
    eta = min(T ** (-1 / 3), math.sqrt(b * I / T)) / (8 * L)
    assert f["prox_step"] == pytest.approx(eta)
    terms = [
        G**2 * eta / (2 * (L * eta + 1)),
        G**2 * eta / (8 * b**2),
        L**2 * G**2 * eta**3 / (2 * b * I * (L * eta + 1)),
    ]
    assert f["tolerance"] ** 2 / (2 * (1 / eta - L)) <= min(terms) * (1 + 1e-12)


def test_fedmls_conditions():
    G, D, n, K = 2.0, 3.0, 4, 60
    f = theory.steps("FedMLS", Constants(L=None, G=G, B=0.0, distance=D, n=n, rounds=K))
    eps = f["lambda0"] * G**2
    assert math.ceil(6 * math.sqrt(n) * D * G / eps - 1e-9) == K
    # The accuracy follows from Theorem 3.1 on the product space: choose its D so that all local steps suffice.
    lam, T = f["lambda0"], f["first_steps"]
    free = 4 * G**2 * lam**2 * K * K**2 / (2 * T)
    assert (10 * n * D**2 + 8 * free) / (lam * K * (K + 1)) + G**2 * lam / 2 <= eps


def test_fedmls_on_the_product_space_needs_fewer_rounds_and_local_steps():
    G, D, n, eps, var = 2.0, 3.0, 16, 0.5, 1.3
    (found,) = theory.corrections(build("FedMLS", lambda0=1.0), Constants(L=None, n=n))
    theorem, work = theory.find("FedMLS"), D * (4 * G**2 + var) / (G * eps)

    def end(lam, T, K):  # Theorem 3.1 with the Lipschitz constant and the variance of the mean of the f_i(x_i)
        d = (4 * G**2 + var) / n * lam**2 * K**3 / (2 * T)
        return (10 * n * D**2 + 8 * d) / (lam * K * (K + 1)) + G**2 / n * lam / 2

    K = math.ceil(6 * math.sqrt(n) * D * G / eps)
    for T in (found.derivable * work, found.printed * work, 108 / math.sqrt(n) * work):
        assert end(eps / G**2, math.ceil(T), K) <= eps
    sooner, T = math.ceil(6 * D * G / eps), math.ceil(108 * work)
    assert end(n * eps / G**2, T, sooner) <= eps
    c = Constants(L=None, G=G, B=0.0, distance=D, n=n, sigma=math.sqrt(var), batch=1)
    method = build("FedMLS", lambda0=n * eps / G**2, first_steps=T, schedule="constant")
    assert theorem.bound(method, c, np.array([sooner]))[0] == pytest.approx(end(method.lambda0, T, sooner))


def test_printed_constants_that_their_proofs_do_not_give():
    """The proofs' sums, term by term from their lemmas, beside what :meth:`Theorem.corrections` says."""
    for number, printed, least in (("1", 50, 56), ("2", 25, 28)):
        c = Constants(L=1.5, rho=0.3, mu=0.1, n=10)
        method = build("FedCanon", **theory.steps("FedCanon", c, 5, theorem=number))
        (found,) = theory.corrections(method, c, number)
        a, b, K, L, var, batch = method.server_step, method.step, 5, c.L, 2.0, 3
        delta = (1 - a * c.rho) ** -2
        rounds = a * (6 + delta) * (1 + 3 * b**2 * K**3 * L**2) * var / (batch * K)  # the noise in (27) and (30)
        times = 8 / a if number == "1" else 4 / (a * c.mu)  # (27) divided by alpha / 8, or summed geometrically
        rest = var / (8 * batch) if number == "1" else var / (16 * c.mu * batch)
        scale = 1 if number == "1" else 1 / c.mu
        assert found.derivable * scale * var / (batch * K) + rest >= times * rounds * (1 - 1e-12)
        assert found.derivable * scale * var / (batch * K) <= times * rounds  # and no less is proved
        assert found.printed == printed < least <= found.derivable
    for number, printed, scale in (("3.5", 20, 1 / 0.3), ("3.6", 18, 3.0)):
        worst = 0.0
        for n in (1, 10, 18, 200):
            for more in (1.0, 3.0):
                c = Constants(L=2.0, n=n, mu=0.1)
                given = theory.steps("Zhang", c, 7, theorem=number)
                given["server_step"] *= more
                given["step"] /= more
                method = build("Zhang", **given)
                (found,) = theory.corrections(method, c, number)
                eta, tau, L, whole = method.step, 7, c.L, method.round_step
                drift = 8 * n * tau * eta**2 * tau * 1.25  # (A.8), of sigma^2 / b: printed with 10 for 1.15 * 8
                server = whole * (whole / 2) * (2 * L**2 / (n * tau) * drift + 2 / (tau * n))  # (A.30), times eta~
                clients = 4 * eta**2 * tau * L**2 * drift / n + 4 * eta**2 * n**2 * tau**2 / (n * tau) / n  # A.2
                added = (server + clients) / (whole**2 / (n * tau))  # where (A.32) has 6
                assert found.derivable == pytest.approx(scale * added)
                worst = max(worst, added)
                assert (added <= 6) == (found.derivable <= printed * (1 + 1e-9))
        assert 35 < worst < 35.3
    (found,) = theory.corrections(build("FedMLS", lambda0=1.0), Constants(L=None, n=4))
    assert found.derivable == 216 > found.printed == pytest.approx(36 * math.sqrt(12))


CHOSEN = {
    "Zhang": Constants(L=1.5, n=10),
    "FedCanon": Constants(L=1.5, rho=0.2, n=10),
    "FedCanonII": Constants(L=1.5, rho=0.2, n=10),
    "Scaffold": Constants(L=1.5, n=10, cohort=4),
    "ProximalGradient": Constants(L=1.5, rho=0.2),
    "FedDR": Constants(L=1.5, n=10),
    "Scaffnew": Constants(L=1.5, mu=0.1, n=10),
    "ProxScaffnew": Constants(L=1.5, mu=0.1, n=10),
    "FedProx": Constants(L=1.5, G=2.0, n=10, rounds=30),
    "FedMSPP": Constants(L=1.5, G=2.0, n=10, batch=3, rounds=30),
    "FedMLS": Constants(L=None, G=2.0, B=0.0, distance=1.0, n=10, rounds=30),
}


@pytest.mark.parametrize("name", [pytest.param(k, marks=needs[k]) for k in CHOSEN])
def test_theory_steps_build_and_stay_inside(name):
    c = CHOSEN[name]
    method = build(name, **theory.steps(name, c, 5))
    assert theory.outside(method, c) == []


@pytest.mark.parametrize("name", [pytest.param(k, marks=needs[k]) for k in CHOSEN])
def test_auto_is_the_methods_own(name):
    c = Constants(L=1.5, rho=0.2)
    assert theory.auto(name, c, 4) == REGISTRY[name].auto(L=1.5, rho=0.2, local_steps=4)
    assert theory.auto(name, Constants(L=None, scale=2.0), 4) == REGISTRY[name].auto(L=2.0, rho=0.0, local_steps=4)


@pytest.mark.parametrize(
    ("name", "fields", "more", "words"),
    [
        ("ProximalGradient", {"step": 1.4}, {}, ["step = 1.4 is above 2 / (L + rho) = 1.33"]),
        ("Zhang", {"local_steps": 5, "step": 0.1}, {"n": 10}, ["step * local_steps = 0.5 is above 1 / (10 L) = 0.0667",
                                                               "server_step = 1 is below max(1.5, sqrt(n / 8)) = 1.5"]),
        ("Zhang", {"local_steps": 1, "step": 0.001, "server_step": 2.0, "growing_prox": False},
         {"rho": 0.1, "n": 4, "cohort": 3}, ["needs a convex one", "only 3 of 4 clients", "ablation"]),
        ("FedCanon", {"local_steps": 5, "step": 0.1, "server_step": 0.5}, {}, ["alpha^2 L^2", "(6 + delta)"]),
        ("FedCanon", {"local_steps": 1, "step": 1e-3, "server_step": 2.0}, {"rho": 0.5}, ["not below 1 / rho = 2"]),
        ("Scaffold", {"local_steps": 5, "step": 0.1, "server_step": 0.5}, {}, ["24 L", "server_step = 0.5 is below 1"]),
        ("Scaffnew", {"step": 1.0, "local_steps": 4}, {}, ["mu = 0", "step = 1 is above 1 / L = 0.667", "a coin"]),
        ("FedDR", {"prox_step": 1.0, "alpha": 1.9, "local_steps": 5, "step": 0.1}, {}, ["alpha = 1.9 is not below"]),
        ("FedDR", {"prox_step": 1.0, "alpha": 1.0, "local_steps": 5, "step": 0.1}, {}, ["prox_step = 1 is above"]),
        ("FedProx", {"prox_step": 1.0, "local_steps": 5, "step": 0.1}, {"G": 1.0, "rounds": 8},
         ["prox_step = 1 is above", "tolerance"]),
        ("FedMLS", {"lambda0": 1.0}, {}, ["Remark 3.3", "needs a radius"]),
    ],
)  # fmt: skip
def test_outside_says_what_is_wrong(name, fields, more, words):
    if name not in REGISTRY:
        pytest.skip(f"{name} is not registered")
    found = theory.outside(build(name, **fields), Constants(**{"L": 1.5, **more}))
    assert len(found) == len(words)
    for word in words:
        assert any(word in sentence for sentence in found), (word, found)


def test_outside_without_a_theorem_is_silent():
    assert theory.outside(build("FedAvg", local_steps=3, step=9.0), Constants(L=1.0)) == []


def test_non_smooth_losses_are_outside_smooth_theory():
    rough = Constants(L=None)
    assert theory.outside(build("ProximalGradient", step=0.1), rough) == [
        "the loss has no smoothness constant, and the theorem needs one"
    ]


def test_errors():
    with pytest.raises(ValueError, match="no theorem on 'Zang'; did you mean 'Zhang'"):
        theory.steps("Zang", Constants(L=1.0))
    for name in REGISTRY.keys() - theory.THEOREMS.keys():  # a method's own name is not a slip for another's
        with pytest.raises(ValueError, match=f"no theorem on '{name}'.*theory.auto") as refused:
            theory.steps(name, Constants(L=1.0))
        assert "did you mean" not in str(refused.value)
    assert theory.steps("zhang", Constants(L=1.0)) == theory.steps("Zhang", Constants(L=1.0))
    with pytest.raises(ValueError, match=r"no theorem '9' on Zhang \(known: 3.5, 3.6, 3.8\)"):
        theory.steps("Zhang", Constants(L=1.0), theorem="9")
    with pytest.raises(ValueError, match="constant L is not known"):
        theory.steps("Zhang", Constants(L=None))
    with pytest.raises(ValueError, match="needs mu > 0"):
        theory.steps("Zhang", Constants(L=1.0), theorem="3.8")
    with pytest.raises(ValueError, match="unknown algorithm 'Zang'"):
        theory.auto("Zang", Constants(L=1.0))


# -- constants -------------------------------------------------------------------------------------------------------


def arrays(seed=0, sizes=(30, 18, 40, 25), d=4, kind="real"):
    rng = np.random.default_rng(seed)
    out = []
    for m in sizes:
        X = rng.normal(rng.normal(size=d) / 2, 1, (m, d))
        w = rng.normal(size=d)
        out.append((X, X @ w + 0.3 * rng.normal(size=m) if kind == "real" else np.where(X @ w > 0, 1.0, -1.0)))
    return out


def test_measured_constants():
    data = arrays()
    problem = fc.Problem(fc.Silos.from_arrays(data), loss="least_squares", regularizer=L1(0.1))
    best = solve(problem).numpy() + 0.01
    c = theory.constants(problem, rounds=7, batch=3, participation=0.5, solution=best)
    spectra = [np.linalg.eigvalsh(X.T @ X / len(X)) for X, _ in data]
    assert pytest.approx(max(s[-1] for s in spectra), rel=1e-6) == c.L
    assert c.mu == pytest.approx(min(s[0] for s in spectra), rel=1e-9)
    assert (c.G, c.sigma) == (None, None)
    assert pytest.approx(0.1 * 2) == c.B
    assert (c.n, c.cohort, c.batch, c.rounds, c.rho) == (4, 2, 3, 7, 0.0)

    def objective(x):
        return np.mean([np.mean((X @ x - y) ** 2) / 2 for X, y in data]) + 0.1 * np.abs(x).sum()

    at0 = np.stack([-X.T @ y / len(y) for X, y in data])
    at_best = np.stack([X.T @ (X @ best - y) / len(y) for X, y in data])
    assert c.gap == pytest.approx(objective(np.zeros(4)) - objective(best))
    assert c.distance == pytest.approx(np.linalg.norm(best))
    assert c.drift == pytest.approx(np.mean(np.sum((at0 - at0.mean(0)) ** 2, 1)))
    assert c.spread == pytest.approx(np.mean(np.sum(at_best**2, 1)))
    assert theory.constants(problem, mu=0.5).mu == 0.5
    with pytest.raises(ValueError, match="solution is no minimiser"):
        theory.constants(problem, solution=-best)


def test_measured_constants_of_samples_and_rough_losses():
    data = arrays(kind="sign")
    norms = [np.linalg.norm(X, axis=1) for X, _ in data]
    logistic = fc.Problem(fc.Silos.from_arrays(data), loss="logistic")
    c, each = theory.constants(logistic), theory.constants(logistic, of="samples")
    assert pytest.approx(max(v.mean() for v in norms)) == c.G
    assert pytest.approx(max(v.max() for v in norms)) == each.G
    assert pytest.approx(max(v.max() for v in norms) ** 2 / 4) == each.L
    assert c.sigma == pytest.approx(math.sqrt(max((v**2).mean() for v in norms)))
    hinge = theory.constants(fc.Problem(fc.Silos.from_arrays(data), loss="hinge"))
    assert hinge.L is None
    assert pytest.approx(4 * c.L, rel=1e-6) == hinge.scale
    assert hinge.G == c.G


@pytest.mark.parametrize("h", [Zero(), L1(0.3), MCP(0.5, 3.0, kappa=2.0), SCAD(0.4, kappa=0.5)])
def test_subgradient_bounds_hold_and_are_reached(h):
    limit = theory.subgradient_bound(h, 6)
    x = torch.randn(500, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert float(h.subgradient(x).norm(dim=-1).max()) <= limit * (1 + 1e-12)
    near = h.subgradient(torch.full((6,), 1e-9, dtype=torch.float64))
    assert float(near.norm()) == pytest.approx(limit, abs=1e-6)
    assert theory.subgradient_bound(h.on([True] * 6 + [False] * 3), 9) == pytest.approx(limit)


def test_unbounded_subgradients_have_no_bound():
    assert theory.subgradient_bound(ElasticNet(0.1, 0.1), 3) is None
    assert theory.subgradient_bound(Box(-1.0, 1.0), 3) is None


# -- runs under theory steps ---------------------------------------------------------------------------------------


def solve(problem, rounds=20_000):
    step, x = problem.default_step(), torch.zeros(problem.dimension, dtype=torch.float64)
    for _ in range(rounds):
        new = problem.regularizer.prox(x - step * problem.gradient(x), step)
        if float((new - x).norm()) < 1e-14:
            break
        x = new
    return new


@pytest.fixture(scope="module")
def lasso():
    problem = fc.Problem(fc.Silos.from_arrays(arrays()), loss="least_squares", regularizer=L1(0.05))
    return problem, solve(problem)


@pytest.fixture(scope="module")
def smooth():
    problem = fc.Problem(fc.Silos.from_arrays(arrays()), loss="least_squares")
    return problem, solve(problem)


def measured(run, bounds, problem, best):
    if bounds == "stationarity":
        squares = np.asarray([r["stationarity"] for r in run.history]) ** 2
        return np.cumsum(squares) / np.arange(1, len(squares) + 1)
    if bounds == "objective":
        return np.asarray([r["objective"] for r in run.history]) - problem.objective(best)
    return (run.solutions - best).square().sum(1).numpy()


CASES = [("ProximalGradient", "10.15"), ("Zhang", "3.5"), ("Zhang", "3.6"), ("Zhang", "3.8"), ("FedCanon", "1"),
         ("FedCanon", "2"), ("FedCanonII", "1"), ("Scaffnew", "3.6"), ("ProxScaffnew", "3.6")]  # fmt: skip


@pytest.mark.parametrize("batch", [None, 4])
@pytest.mark.parametrize(("name", "theorem"), CASES)
def test_runs_decrease_and_stay_below_the_bound(name, theorem, batch, lasso, smooth):
    if name not in REGISTRY:
        pytest.skip(f"{name} is not registered")
    if batch is not None and name in ("ProximalGradient", "Scaffnew", "ProxScaffnew"):
        pytest.skip("the theorem is about full gradients")
    # (14) of the FedCanon paper with mu is strong convexity when h = 0; Scaffnew has no h.
    problem, best = smooth if theorem == "2" or name == "Scaffnew" else lasso
    # The variance on the path, measured at the two ends: least squares have no global one.
    sigma = max(noise(problem, torch.zeros(4, dtype=torch.float64)), noise(problem, best))
    c = theory.constants(problem, batch=batch, rounds=60, solution=best, sigma=sigma)
    assert c.mu > 0
    method = build(name, **theory.steps(name, c, 5, theorem))
    at = theory.find(name, c, theorem).measured_at(method)
    run = fc.simulate(problem, method, rounds=60, batch_size=batch, keep_solutions=True, stationarity_step=at)
    limits = theory.bound(run, method, c, theorem)
    values = measured(run, theory.find(name, c, theorem).bounds, problem, best)
    assert limits.shape == values.shape == (61,)
    assert np.all(values <= limits * (1 + 1e-12) + 1e-12)
    assert run.history[-1]["objective"] < run.history[0]["objective"]
    if batch is None and "Scaffnew" not in name:
        assert np.all(np.diff([r["objective"] for r in run.history]) <= 1e-12)


def noise(problem, x):
    """Root of the largest variance over clients of a single sample's gradient."""
    worst = 0.0
    for X, y in map(problem.silos.__getitem__, range(4)):
        each = X * (X @ x - y)[:, None]
        worst = max(worst, float((each - each.mean(0)).square().sum(1).mean()))
    return math.sqrt(worst)


@needs["FedMLS"]
def test_fedmls_reaches_its_accuracy():
    problem = fc.Problem(fc.Silos.from_arrays(arrays(kind="sign")), loss="huber", loss_options={"delta": 0.1})
    best = solve(problem)
    c = theory.constants(problem, rounds=12, solution=best)
    method = build("FedMLS", **theory.steps("FedMLS", c))
    run = fc.simulate(problem, method, rounds=12)
    limits = theory.bound(run, method, c)
    values = np.asarray([r["objective"] for r in run.history]) - problem.objective(best)
    assert np.isinf(limits[0])
    assert np.all(values <= limits)
    eps = method.lambda0 * c.G**2
    assert limits[-1] <= eps
    assert values[-1] <= eps


def test_bound_says_what_is_missing(lasso):
    problem, best = lasso
    c = theory.constants(problem)
    method = build("Zhang", **theory.steps("Zhang", c))
    run = fc.simulate(problem, method, rounds=2, stationarity_step=method.round_step)
    with pytest.raises(ValueError, match="the constant gap is not known"):
        theory.bound(run, method, c)
    full = theory.constants(problem, solution=best)
    with pytest.raises(ValueError, match="the constant distance is not known"):
        theory.bound(run, method, c, "3.8")
    with pytest.raises(ValueError, match="the constant sigma is not known"):
        theory.bound(run, method, theory.constants(problem, solution=best, batch=2))
    elsewhere = fc.simulate(problem, method, rounds=2)
    with pytest.raises(ValueError, match="simulate with stationarity_step"):
        theory.bound(elsewhere, method, full)
    large = build("Zhang", local_steps=2, step=1.0)
    with pytest.raises(ValueError, match=r"Theorem 3.5 does not apply: server_step \* step \* local_steps"):
        theory.bound(fc.simulate(problem, method, rounds=1), large, full)
    scaffold = build("Scaffold", **theory.steps("Scaffold", full))
    with pytest.raises(ValueError, match="unnamed constant factor"):
        theory.bound(run, scaffold, full)


# -- steps from a configuration -------------------------------------------------------------------------------------


def config(algorithm, loss="logistic", run=None, **more):
    content = {
        "data": {"name": "synthetic", "clients": 5, "samples": 20, "seed": 0},
        "problem": {"loss": loss, **more},
        "algorithm": algorithm,
        "run": {"rounds": 10, **(run or {})},
    }
    return Config.check(content)


def made(*args, **kwargs):
    checked = config(*args, **kwargs)
    problem = checked.make_problem()
    return checked.make_algorithm(checked.specs[0], problem), problem, checked


@pytest.mark.parametrize("name", theory.THEOREMS)
def test_theory_steps_of_every_theorem_in_a_configuration(name):
    """Checked without constants, then made from measured and given ones, within the theorem."""
    table = {"distance": 2.0, "mu": 0.01}
    loss = "logistic" if name != "FedMLS" else "hinge"
    algorithm = {"name": name, "steps": "theory", "constants": table}
    method, problem, checked = made(algorithm, loss, {"batch_size": 4} if name == "FedMSPP" else None)
    known = theory.constants(problem, rounds=10, batch=checked.run.batch_size, **table)
    assert theory.outside(method, known) == []


def test_theory_says_which_constant_is_missing_and_where_to_give_it():
    checked = config({"name": "FedMLS", "steps": "theory"}, "hinge")
    with pytest.raises(ConfigError, match=r"the constant distance is not known: .* constants = \{distance = \.\.\.\}"):
        checked.make_algorithm(checked.specs[0], checked.make_problem())
    with pytest.raises(ConfigError, match="Constants has no field 'distanse'; did you mean 'distance'"):
        config({"name": "FedMLS", "steps": "theory", "constants": {"distanse": 1.0}})
    with pytest.raises(ConfigError, match=r"Constants: distance = 'far', must be a number or none"):
        config({"name": "FedMLS", "steps": "theory", "constants": {"distance": "far"}})
    with pytest.raises(ConfigError, match="no theorem on 'FedAvg'"):
        config({"name": "FedAvg", "steps": "theory"})


def test_fedmspp_takes_the_constants_of_single_samples():
    """A minibatch may consist of the worst sample, whose curvature is ||a||^2 / 4; a client's mean has less."""
    method, problem, _ = made({"name": "FedMSPP", "steps": "theory"}, run={"batch_size": 1})
    worst = max(float(problem.silos[i][0].square().sum(1).max()) for i in range(5)) / 4
    assert method.prox_step == pytest.approx(min(10 ** (-1 / 3), math.sqrt(5 / 10)) / (8 * worst))
    assert worst > 1.1 * problem.smoothness()
    c = theory.constants(problem, rounds=10, batch=1)
    assert (c.L_sample, c.G_sample) == (pytest.approx(worst), pytest.approx(math.sqrt(4 * worst)))
    larger = build("FedMSPP", **{**vars(method), "prox_step": 1.01 * method.prox_step})
    assert any("prox_step" in sentence for sentence in theory.outside(larger, c))


def test_subgradient_bound_of_weighted_l1():
    h = L1(0.05, weights=(200.0, *[0.0] * 9))
    assert theory.subgradient_bound(h, 10) == pytest.approx(10.0)
    steep = L1(0.5, weights=(3.0, 4.0))
    x = torch.tensor([1.0, -1.0], dtype=torch.float64)
    assert theory.subgradient_bound(steep, 2) == pytest.approx(float(steep.subgradient(x).norm())) == 2.5


def test_theorems_are_about_equal_weights():
    sizes = arrays(kind="sign")
    sentence = "the clients weigh by their samples, the theorem is about equal weights"
    for weights, found in (("uniform", []), ("samples", [sentence])):
        problem = fc.Problem(fc.Silos.from_arrays(sizes), loss="logistic", weights=weights)
        c = theory.constants(problem, rounds=5, batch=2, distance=1.0, mu=0.01)
        for name in theory.THEOREMS:
            assert theory.outside(build(name, **theory.steps(name, c, 3)), c) == found, name
    problem = fc.Problem(fc.Silos.from_arrays([(X[:18], y[:18]) for X, y in sizes]), loss="logistic", weights="samples")
    assert theory.constants(problem).uniform
    run = fc.simulate(problem, build("ProximalGradient", step=0.1), rounds=1)
    with pytest.raises(ValueError, match="does not apply: the clients weigh by their samples"):
        theory.bound(run, build("ProximalGradient", step=0.1), Constants(L=1.0, gap=1.0, uniform=False))


@pytest.mark.parametrize("steps", ["auto", "theory"])
@pytest.mark.parametrize(
    ("field", "value", "must"),
    [
        ("local_steps", 0, "must be an integer >= 1"),
        ("local_steps", -3, "must be an integer >= 1"),
        ("local_steps", 2.5, "must be an integer >= 1"),
        ("local_steps", "ten", "must be an integer >= 1"),
        ("local_steps", True, "must be an integer >= 1"),
        ("step", 0.0, "must be a number > 0"),
        ("step", float("inf"), "must be a number > 0"),
        ("server_step", [1.0], "must be a number > 0"),
        ("lokal_steps", 3, "did you mean 'local_steps'"),
    ],
)
def test_nonsense_beside_chosen_steps_is_one_line(steps, field, value, must):
    with pytest.raises(ConfigError, match=rf"^config: \[algorithm\] .*{must}") as error:
        config({"name": "Zhang", "steps": steps, field: value})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("steps", ["car", "", 3, True, ["auto"]])
def test_unknown_rules_are_one_line(steps):
    with pytest.raises(ConfigError, match=r"^config: \[algorithm\] steps = .*, must be 'auto' or 'theory'"):
        config({"name": "Zhang", "steps": steps})


@pytest.mark.parametrize("name", REGISTRY)
def test_steps_with_nothing_left_to_choose_are_refused(name):
    """``--set algorithm.steps=auto`` over explicit steps would be ignored, so it is an error that says what to do."""
    full = {k: v for k, v in vars(REGISTRY[name].auto(1.0, local_steps=3)).items() if v is not None}
    with pytest.raises(ConfigError, match=r"\[algorithm\] steps = 'auto' has nothing left to choose: .* given; leave"):
        config({"name": name, "steps": "auto", **full})
    assert config({"name": name, **full})
    if name in theory.THEOREMS:
        chosen = {k: v for k, v in theory.steps(name, CHOSEN[name], 3).items() if v is not None}
        with pytest.raises(ConfigError, match="steps = 'theory' has nothing left to choose"):
            config({"name": name, "steps": "theory", **chosen})


def test_given_fields_win_over_chosen_ones():
    method, problem, _ = made({"name": "Zhang", "steps": "theory", "server_step": 4.0, "local_steps": 3})
    assert (method.server_step, method.local_steps) == (4.0, 3)
    L = problem.smoothness()
    fixed, *_ = made({"name": "Scaffnew", "steps": "auto", "local_steps": 4})  # local_steps excludes p
    assert (fixed.local_steps, fixed.p, fixed.step) == (4, None, pytest.approx(0.5 / L))
    coin, *_ = made({"name": "Scaffnew", "steps": "theory", "p": 0.3})
    assert (coin.local_steps, coin.p, coin.step) == (None, 0.3, pytest.approx(1 / L))


def test_choosing_without_constants_only_checks():
    assert theory.choose(REGISTRY["FedMLS"], "theory", None, {"radius": 2.0}).radius == 2.0
    with pytest.raises(ValueError, match="must be a table"):
        theory.choose(REGISTRY["FedMLS"], "theory", None, {"constants": 3.0})


@pytest.mark.parametrize("batch", [None, 5])
@pytest.mark.parametrize("name", REGISTRY)
def test_practical_steps_follow_the_scale_of_the_data(name, batch):
    """Features times 16, and h so that h(16 x) is the old one: the run is the same in units of 1/16, to the bit."""
    cls, found = REGISTRY[name], []
    base = fc.data.load("synthetic", clients=5, features=6, samples=30, seed=2)
    for c in (1.0, 16.0, 1 / 1024):
        silos = fc.Silos.from_arrays([(c * base[i][0], base[i][1]) for i in range(5)])
        h = Zero() if cls.info.regularizer == "none" else L1(0.003 * c)
        problem = fc.Problem(silos, loss="logistic", regularizer=h)
        method = theory.choose(cls, "auto", theory.constants(problem), {})
        found.append(c * fc.simulate(problem, method, rounds=6, batch_size=batch, evaluate_every=6).solution)
    assert float(found[0].norm()) > 0
    for scaled in found[1:]:
        torch.testing.assert_close(scaled, found[0], rtol=1e-12, atol=0)
