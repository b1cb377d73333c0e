"""Cox's partial likelihood over sites: equal to brute force, and to other packages on pooled data."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from network_modules import gpu

import fedcomposite as fc
from fedcomposite.problems.concordance import pairs
from fedcomposite.problems.losses import Cox
from fedcomposite.problems.risk_sets import RiskSets

L1, ElasticNet = fc.regularizers.L1, fc.regularizers.ElasticNet


def drawn(m: int, p: int = 3, seed: int = 0, ticks: int = 8, *, entry: bool = False, strata: int = 0) -> Any:
    """Features and targets with many ties."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(m, p)) + 3.0
    columns = [rng.integers(1, ticks, m).astype(float), rng.integers(0, 2, m).astype(float)]
    if entry or strata:
        columns.append(columns[0] - rng.integers(1, ticks, m) if entry else np.full(m, -99.0))
    if strata:
        columns.append(rng.integers(0, strata, m).astype(float))
    return X, np.stack(columns, 1)


def brute(x: torch.Tensor, X: Any, y: Any, w: Any, efron: bool, offset: Any = None) -> torch.Tensor:
    """Minus the logarithm of the partial likelihood of one site, by loops, over the sum of the weights."""
    X, y, w = (torch.as_tensor(v, dtype=torch.float64) for v in (X, y, w))
    w = w * (w > 0).sum() / w.sum()
    z = X @ x + (0.0 if offset is None else torch.as_tensor(offset))
    full = torch.cat([y, torch.tensor([[-math.inf, 0.0]]).repeat(len(y), 1)[:, y.shape[1] - 2 :]], 1).double()
    time, event, entry, stratum = full.T
    total = torch.zeros((), dtype=torch.float64)
    for s, t in itertools.product(stratum.unique(), time.unique()):
        tied = (stratum == s) & (time == t) & (event > 0) & (w > 0)
        if not tied.any():
            continue
        risk = (w * z.exp())[(stratum == s) & (time >= t) & (entry < t)].sum()
        own, count = (w * z.exp())[tied].sum(), int(tied.sum())
        total = total - (w * z)[tied].sum()
        for r in range(count):
            total = total + w[tied].sum() / count * (risk - (r / count * own if efron else 0.0)).log()
    return total / w.sum()


def close(a: Any, b: Any, to: float = 1e-10) -> None:
    assert float((torch.as_tensor(a).detach().double() - torch.as_tensor(b).detach().double()).abs().max()) <= to


@pytest.mark.parametrize("ties", ["breslow", "efron"])
@pytest.mark.parametrize(("entry", "strata"), [(False, 0), (True, 0), (False, 3), (True, 3)])
@pytest.mark.parametrize("weighted", [False, True])
def test_loss_gradient_and_hessian_are_those_of_loops(ties: Any, entry: bool, strata: int, weighted: bool) -> None:
    sizes, rng = (40, 23, 7), np.random.default_rng(3)
    data = [drawn(m, seed=i, entry=entry, strata=strata) for i, m in enumerate(sizes)]
    weights = [np.where(rng.uniform(size=m) < 0.2, 0.0, rng.uniform(0.5, 2, m)) for m in sizes] if weighted else None
    offsets = [rng.normal(size=m) for m in sizes]
    silos = fc.Silos.from_arrays(data, weights=weights, margin_offsets=offsets)
    problem = fc.Problem(silos, loss="cox", loss_options={"ties": ties})
    x = torch.tensor([0.3, -0.5, 0.1], dtype=torch.float64)

    def at(i: int, x: torch.Tensor) -> torch.Tensor:
        return brute(x, *data[i], np.ones(sizes[i]) if weights is None else weights[i], ties == "efron", offsets[i])

    point = x.clone().requires_grad_()
    value = sum(at(i, point) for i in range(3)) / 3
    (gradient,) = torch.autograd.grad(value, point)
    seen = problem.evaluate(x)
    close(seen.loss, value)
    close(seen.gradient, gradient)
    found = problem.smooth().hessians(np.arange(3, dtype=np.uint64), x.expand(3, -1), torch.tensor([0, 2]))
    for i in range(3):
        H = torch.autograd.functional.hessian(lambda u, i=i: at(i, u), x)
        close(found[i], H[[0, 2]][:, [0, 2]])


@pytest.mark.parametrize("ties", ["breslow", "efron"])
def test_residuals_add_up_and_are_those_of_leaving_a_sample_out(ties: Any) -> None:
    """A score residual is the derivative of the gradient in the sample's weight: the infinitesimal jackknife."""
    X, y = drawn(30, entry=True, strata=2)
    b = Cox(ties).prepare(None, torch.from_numpy(y))  # type: ignore[arg-type]
    sets, Z = RiskSets.of(b[None], ties == "efron"), torch.from_numpy(X)[None]
    x = torch.tensor([0.3, -0.5, 0.1], dtype=torch.float64)
    z, w = Z @ x, torch.ones(1, 30, dtype=torch.float64)
    found = sets.residuals(Z, z, w)[0]
    close(found.sum(0), Z[0].T @ sets.slopes(z, w)[0])
    for k in range(30):
        more, less = (w.clone(), w.clone())
        more[0, k] += 1e-6
        less[0, k] -= 1e-6
        slope = (Z[0].T @ sets.slopes(z, more)[0] - Z[0].T @ sets.slopes(z, less)[0]) / 2e-6
        close(found[k], slope, 1e-7)


def test_sites_and_strata_are_the_same_thing() -> None:
    data = [drawn(m, seed=i) for i, m in enumerate((40, 25))]
    apart = fc.Problem(fc.Silos.from_arrays(data), loss="cox", weights="samples", regularizer=L1(0.01))
    y = np.concatenate([np.c_[y, np.full(len(y), -99.0), np.full(len(y), i)] for i, (_, y) in enumerate(data)])
    together = fc.Silos.from_arrays([(np.concatenate([X for X, _ in data]), y)])
    one = fc.Problem(together, loss="cox", regularizer=L1(0.01))
    a, b = fc.solve(apart), fc.solve(one)
    close(a.solution, b.solution, 1e-9)


def test_margins_far_apart_lose_nothing() -> None:
    """One stratum's exponentials are 1e86 times another's; and a shift of all features changes nothing."""
    X, y = drawn(40, p=2, strata=2)
    X[:, 0] += 200 * y[:, 3]
    problem = fc.Problem(fc.Silos.from_arrays([(X, y)]), loss="cox")
    moved = fc.Problem(fc.Silos.from_arrays([(np.c_[X[:, 0] - 200 * y[:, 3], X[:, 1]], y)]), loss="cox")
    x = torch.tensor([1.0, 0.5], dtype=torch.float64)
    close(problem.evaluate(x).loss, moved.evaluate(x).loss, 1e-12)
    everyone, at = np.zeros(1, np.uint64), torch.arange(2)
    far = fc.Problem(fc.Silos.from_arrays([(drawn(40, p=2)[0] + 1e6, y)]), loss="cox")
    near = fc.Problem(fc.Silos.from_arrays([(drawn(40, p=2)[0], y)]), loss="cox")
    close(*(p.smooth().hessians(everyone, x[None], at) for p in (far, near)), 1e-8)


def by_logarithms(z: torch.Tensor, y: torch.Tensor, w: torch.Tensor, efron: bool) -> torch.Tensor:
    """Minus the logarithm of the partial likelihood by loops, whatever the size of margins."""
    time, event, entry, stratum = y.T
    total = torch.zeros((), dtype=torch.float64)
    for s, t in itertools.product(stratum.unique(), time.unique()):
        tied = (stratum == s) & (time == t) & (event > 0) & (w > 0)
        risk = (stratum == s) & (time >= t) & (entry < t) & (w > 0)
        count = int(tied.sum())
        for r in range(count):
            share = 1 - tied.double() * (r / count if efron else 0.0)
            total = total + w[tied].sum() / count * torch.logsumexp((z + (share * w).log())[risk], 0)
        total = total - (w * z)[tied].sum()
    return total


@pytest.mark.parametrize("efron", [False, True])
@pytest.mark.parametrize("entry", [False, True])
@pytest.mark.parametrize("apart", [3.0, 40.0, 1000.0, 1e5])
def test_margins_of_any_size_lose_nothing(efron: bool, entry: bool, apart: float) -> None:
    """Loss, slopes and Hessian, with tied and late samples, strata and spread weights."""
    rng = np.random.default_rng(int(apart))
    for _ in range(3):
        X, y = drawn(30, 2, int(rng.integers(1000)), entry=entry, strata=2)
        b = Cox("breslow").prepare(None, torch.from_numpy(y))  # type: ignore[arg-type]
        z = torch.from_numpy(rng.normal(size=30) * apart)
        w = torch.from_numpy(np.where(rng.uniform(size=30) < 0.2, 0.0, 10.0 ** rng.uniform(-6, 0, 30)))
        sets = RiskSets.of(b[None], efron)
        point = z.clone().requires_grad_()
        value = by_logarithms(point, torch.from_numpy(y), w, efron)
        (slopes,) = torch.autograd.grad(value, point)
        unit = float(w.sum() / (w > 0).sum())
        found = sets.terms(z[None], w[None]).sum() + math.log(unit) * (w * b[:, 1]).sum()
        assert abs(float(found - value.detach())) < 1e-11 * (1 + apart)
        close(sets.slopes(z[None], w[None])[0], slopes, 1e-10)
        Z = torch.from_numpy(X)
        bent = torch.autograd.functional.hessian(lambda u, z=z, Z=Z, y=y, w=w: by_logarithms(
            z + Z @ u, torch.from_numpy(y), w, efron), torch.zeros(2, dtype=torch.float64))  # fmt: skip
        close(sets.hessians(Z[None], z[None], w[None], torch.arange(2))[0], bent, 1e-9)
        residuals = sets.residuals(Z[None], z[None], w[None])[0]
        close(residuals.sum(0), Z.T @ slopes, 1e-9)


def test_sparse_samples_have_the_same_fit() -> None:
    from scipy import sparse

    X, y = drawn(60, p=5)
    X = X * (np.random.default_rng(0).uniform(size=X.shape) < 0.3)
    dense = fc.Problem(fc.Silos.from_arrays([(X, y)]).standardize(), loss="cox", regularizer=L1(0.01))
    thin = fc.Problem(fc.Silos.from_arrays([(sparse.csr_array(X), y)]).standardize(), loss="cox", regularizer=L1(0.01))
    close(fc.solve(dense).solution, fc.solve(thin).solution, 1e-9)


def test_smoothness_is_a_bound() -> None:
    data = [drawn(m, seed=i) for i, m in enumerate((40, 25))]
    problem = fc.Problem(fc.Silos.from_arrays(data), loss="cox")
    L, rng = problem.smoothness(), np.random.default_rng(0)
    for _ in range(20):
        x = torch.from_numpy(rng.normal(size=3) * 3).expand(2, -1)
        H = problem.smooth().hessians(np.arange(2, dtype=np.uint64), x, torch.arange(3))
        assert float(torch.linalg.eigvalsh(H).max()) <= L * (1 + 1e-12)
    assert problem.smoothness("mean") <= L


@pytest.mark.parametrize("method", ["FedNMap", "Scaffold", "FedCanon", "ProxScaffnew", "FedDR", "ProximalGradient"])
def test_first_order_methods_find_the_solution(method: str) -> None:
    data = [(X - 3.0, y) for X, y in (drawn(40, seed=i) for i in range(3))]
    h = fc.regularizers.L2Squared(0.1) if method == "Scaffold" else L1(0.01)
    problem = fc.Problem(fc.Silos.from_arrays(data), loss="cox", regularizer=h)
    best = fc.solve(problem)
    made = fc.theory.auto(method, fc.theory.constants(problem))
    run = fc.simulate(problem, made, rounds=150, evaluate_every=150)
    assert run.history[-1].objective - problem.objective(best.solution) < 1e-3 * abs(problem.objective(torch.zeros(3)))


def test_single_precision_and_refusals() -> None:
    X, y = drawn(50)
    silos = fc.Silos.from_arrays([(X, y)])
    problem = fc.Problem(silos, loss="cox", regularizer=L1(0.01))
    run = fc.simulate(problem, fc.algorithms.ProximalGradient(step=0.5), rounds=200, dtype=torch.float32)
    close(run.solution, fc.solve(problem).solution, 1e-3)
    with pytest.raises(ValueError, match="no minibatches"):
        fc.simulate(problem, fc.algorithms.ProximalGradient(step=0.5), rounds=2, batch_size=5)
    with pytest.raises(ValueError, match="no intercept"):
        fc.Problem(silos, loss="cox", bias=True)
    with pytest.raises(ValueError, match="columns time and event"):
        fc.Problem(fc.Silos.from_arrays([(X, y[:, 0])]), loss="cox")
    with pytest.raises(ValueError, match="found 2"):
        fc.Problem(fc.Silos.from_arrays([(X, y * [1, 2])]), loss="cox")
    with pytest.raises(ValueError, match="enter when they leave"):
        fc.Problem(fc.Silos.from_arrays([(X, np.c_[y, y[:, 0]])]), loss="cox")
    with pytest.raises(ValueError, match="one per sample"):
        fc.Problem(silos, loss="logistic")
    with pytest.raises(ValueError, match="all others at risk"):
        fc.simulate(
            problem,
            fc.algorithms.ProximalGradient(step=0.5),
            rounds=2,
            privacy=fc.privacy.SampleLevel(noise=1.0, clip=1.0),
        )


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
@pytest.mark.parametrize("ties", ["breslow", "efron"])
def test_single_precision_is_that_of_double(ties: Any, device: str) -> None:
    """Loss and gradient at a model, to 1e-4 of their size; sums over risk sets are float64 in both.

    Features of mean 1000 are as good as others: single precision would forget their deviation.
    """
    data = [drawn(m, p=20, seed=i, ticks=m // 2, strata=2) for i, m in enumerate((4000, 1500))]
    data = [(X + 1000 * (np.arange(20) < 3), y) for X, y in data]
    problem = fc.Problem(fc.Silos.from_arrays(data), loss="cox", loss_options={"ties": ties}, weights="samples")
    x = torch.from_numpy(np.random.default_rng(0).normal(size=20)) * 0.1
    seen = {}
    for dtype, where in ((torch.float32, device), (torch.float64, "cpu")):
        found = problem.smooth(dtype, torch.device(where)).evaluate(x.to(where, dtype))
        assert (found.gradient.dtype, found.gradient.device.type) == (dtype, where)
        seen[dtype] = float(found.loss), found.gradient.cpu().double()
    (loss, gradient), (true_loss, truth) = seen.values()
    assert abs(loss / true_loss - 1) < 1e-4
    assert float((gradient - truth).norm() / truth.norm()) < 1e-4
    method = fc.algorithms.ProximalGradient(step=0.05)
    runs = [
        fc.simulate(problem, method, rounds=30, dtype=dtype, device=where).solution.cpu().double()
        for dtype, where in ((torch.float32, device), (torch.float64, "cpu"))
    ]
    assert float((runs[0] - runs[1]).norm() / runs[1].norm()) < 1e-4


@pytest.mark.parametrize("efron", [False, True])
def test_work_stays_on_the_device_of_the_samples(efron: bool) -> None:
    """On "meta", which has no numbers and refuses to be mixed with other devices: nothing is brought to the CPU."""
    _, y = drawn(30, entry=True, strata=2)
    b = Cox("efron").prepare(None, torch.from_numpy(y))  # type: ignore[arg-type]
    sets = RiskSets.of(b[None], efron, least=3)

    def there(thing: Any) -> Any:
        moved = {f.name: getattr(thing, f.name) for f in dataclasses.fields(thing)}
        moved = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in moved.items()}
        return dataclasses.replace(thing, **moved)

    moved = dataclasses.replace(there(sets), parts=tuple(there(part) for part in sets.parts))
    z = torch.empty(1, 30, device="meta")
    for made in (moved.terms(z, z), *moved.together(z, z), moved.slopes(z, z), moved.saturated(z)):
        assert made.device.type == "meta"
    with pytest.raises(RuntimeError, match="device"):
        moved.slopes(torch.zeros(1, 30), torch.zeros(1, 30))


def test_structured_arrays_are_read() -> None:
    X, y = drawn(20)
    made = np.array([(bool(e), t) for t, e in y], dtype=[("event", bool), ("time", float)])
    assert torch.equal(fc.Silos.from_arrays([(X, made)]).targets, torch.from_numpy(y))
    with pytest.raises(fc.DataError, match="two fields"):
        fc.Silos.from_arrays([(X, np.zeros(20, dtype=[("a", float), ("b", float)]))])
    with pytest.raises(fc.DataError, match="masked"):
        fc.Silos.from_arrays([(X, np.ma.masked_where(np.arange(20) == 3, made))])
    for option in ({"weights": [made]}, {"margin_offsets": [made]}):  # they are targets only
        with pytest.raises(fc.DataError, match="not numbers"):
            fc.Silos.from_arrays([(X, y)], **option)


def test_pairs_are_those_of_loops() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        m = int(rng.integers(1, 25))
        margin, time = (rng.integers(0, 6, m).astype(float) for _ in range(2))
        event, entry = rng.integers(0, 2, m).astype(float), time - rng.integers(1, 5, m)
        group, weight = rng.integers(0, 2, m), rng.integers(0, 3, m).astype(float)
        right = tied = every = 0.0
        for i, j in itertools.product(range(m), repeat=2):
            later = time[j] > time[i] or (time[j] == time[i] and not event[j])
            if event[i] and group[i] == group[j] and later and entry[j] < time[i]:
                w = weight[i] * weight[j]
                right, tied, every = right + w * (margin[i] > margin[j]), tied + w * (margin[i] == margin[j]), every + w
        found = pairs(margin, time, event, entry, group, weight)
        assert [v.sum() for v in found] == [right, tied, every]


@pytest.mark.parametrize("by", ["site", "stratum"])
def test_what_is_alike_within_a_stratum_has_no_coefficient(by):
    """It has no slope and no curvature but for rounding, whose quotient was 1e13 where h lets it go."""
    rng, arrays = np.random.default_rng(1), []
    for site in range(3):
        X = 1000 + 1e-4 * rng.normal(size=(30, 4))
        stratum = rng.integers(0, 2, 30)
        time = rng.exponential(size=30) * np.exp(-5e3 * (X[:, 0] - 1000))
        X[:, 3] = 1.7 * site + (0.3 * stratum if by == "stratum" else 0.0) + 2010.0
        arrays.append((X, np.column_stack([time, rng.random(30) < 0.7, np.zeros(30), stratum])))
    free = fc.regularizers.Box(-math.inf, 1e8)
    runs = [fc.solve(fc.Problem(fc.Silos.from_arrays([(X[:, :k], y) for X, y in arrays]), loss="cox", regularizer=free))
            for k in (3, 4)]  # fmt: skip
    assert [run.status for run in runs] == ["converged"] * 2
    assert abs(float(runs[1].solution[3])) < 1e-3
    close(runs[1].solution[:3] / runs[0].solution, torch.ones(3), 1e-6)
    model = fc.CoxRegression(regularizer=free).fit(fc.Silos.from_arrays(arrays))
    close(torch.as_tensor(model.coef_)[:3] / runs[0].solution, torch.ones(3), 1e-6)
