"""Noise, clipping, sampling and accounting are what the guarantee says."""

import dataclasses
import itertools
import math

import dp_accounting
import numpy as np
import pytest
import torch
from scipy import stats

import fedcomposite as fc
from fedcomposite.algorithms import REGISTRY
from fedcomposite.privacy import ClientLevel, Counters, Query, SampleLevel, System, compose, noise_for
from fedcomposite.problems import Batches, Counter
from fedcomposite.problems.private import Mechanism, PrivateGradients

LOUD = SampleLevel(clip=0.7, noise=1.3, rate=0.4)


def silos(sizes=(30, 17, 8), features=5, seed=0, scale=3.0):
    make = np.random.default_rng(seed)
    return fc.Silos.from_arrays(
        [(scale * make.normal(size=(m, features)), np.where(make.normal(size=m) > 0, 1.0, -1.0)) for m in sizes]
    )


def network(**given):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    data = silos(**given)
    data = dataclasses.replace(data, targets=(data.targets > 0).double())
    return fc.Problem(data, model=model, loss="cross_entropy")


def three_classes():
    make = np.random.default_rng(1)
    parts = [(3 * make.normal(size=(m, 5)), make.integers(0, 3, size=m).astype(float)) for m in (30, 17, 8)]
    return fc.Problem(fc.Silos.from_arrays(parts), loss="multinomial", bias=True)


PROBLEMS = {
    "logistic": lambda: fc.Problem(silos(), loss="logistic", bias=True),
    "least squares": lambda: fc.Problem(silos(), loss="least_squares"),
    "multinomial": three_classes,
    "network": network,
}


def everything(smooth):
    """Rows and mask of all samples of every client."""
    longest = int(smooth.sizes.max())
    column = np.arange(longest)[None]
    inside = column < smooth.sizes.astype(int)[:, None]
    rows = smooth.offsets.astype(int)[:, None] + np.where(inside, column, 0)
    return torch.from_numpy(rows), torch.from_numpy(inside.astype(float))


# -- clipping ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", PROBLEMS)
def test_clipped_sums_are_those_of_the_samples_one_by_one(kind):
    """Norms in closed form or vectorised agree with one minibatch gradient per sample."""
    smooth = PROBLEMS[kind]().smooth()
    x = torch.randn(
        len(smooth.sizes), smooth.dimension, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    rows, mask = everything(smooth)
    clipped = 0
    expected = torch.zeros_like(x)
    for i, j in itertools.product(*map(range, rows.shape)):
        if mask[i, j]:
            own = smooth.minibatch(x[i : i + 1], rows[i : i + 1, j : j + 1])[0]
            clipped += int(own.norm() > 0.7)
            expected[i] += own * min(1.0, 0.7 / float(own.norm()))
    assert clipped > 0
    torch.testing.assert_close(smooth.clipped(x, rows, mask, 0.7), expected, rtol=1e-9, atol=1e-9)
    whole = smooth.clipped(x, rows, mask, 1e9) / torch.from_numpy(smooth.divisors)[:, None]
    clients = np.arange(len(smooth.sizes), dtype=np.uint64)
    torch.testing.assert_close(whole, smooth.full(clients)(x), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", ["logistic", "least squares", "multinomial"])
def test_clipped_hessians_and_losses_are_those_of_the_samples_one_by_one(kind):
    problem = PROBLEMS[kind]()
    smooth, at = problem.smooth(), torch.tensor([0, 2, 3])
    x = 0.3 * torch.randn(3, smooth.dimension, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    rows, mask = everything(smooth)
    hessian, loss = torch.zeros(3, 3, 3, dtype=torch.float64), torch.zeros(3, 1, dtype=torch.float64)
    every = torch.arange(smooth.dimension)
    for i, j in itertools.product(*map(range, rows.shape)):
        if mask[i, j]:
            one = rows[i : i + 1, j : j + 1], torch.ones(1, 1, dtype=torch.float64)
            own = smooth.clipped_hessians(x[i : i + 1], *one, every, 1e12)[0]
            factor = min(1.0, 1.1 / float(own.norm()))
            hessian[i] += own[at][:, at] * factor
            loss[i] += smooth.clipped_losses(x[i : i + 1], *one, 1e12)[0].clamp(max=0.9)
    torch.testing.assert_close(smooth.clipped_hessians(x, rows, mask, at, 1.1), hessian)
    torch.testing.assert_close(smooth.clipped_losses(x, rows, mask, 0.9), loss)
    clients = np.arange(3, dtype=np.uint64)
    whole = smooth.clipped_hessians(x, rows, mask, at, 1e12) / torch.from_numpy(smooth.divisors)[:, None, None]
    torch.testing.assert_close(whole, smooth.hessians(clients, x, at))


@pytest.mark.parametrize("kind", ["logistic", "least squares", "network"])
def test_one_sample_more_or_less_changes_a_sum_by_at_most_the_clip(kind):
    """The sensitivity that the accountant assumes, by brute force over all neighbours of a data set."""
    problem = PROBLEMS[kind]()
    smooth = problem.smooth()
    generator = torch.Generator().manual_seed(2)
    rows, mask = everything(smooth)
    largest = 0.0
    for scale in (0.1, 1.0, 30.0):
        x = scale * torch.randn(3, smooth.dimension, dtype=torch.float64, generator=generator)
        whole = smooth.clipped(x, rows, mask, 0.7)
        for j in range(rows.shape[1]):
            less = mask.clone()
            less[:, j] = 0
            moved = (smooth.clipped(x, rows, less, 0.7) - whole).norm(dim=1)
            largest = max(largest, float(moved.max()))
    assert 0.7 - 1e-6 <= largest <= 0.7 + 1e-9


def test_a_sample_that_overflows_adds_nothing():
    data = silos(sizes=(4,))
    data.features[0] = 1e200
    smooth = fc.Problem(data, loss="least_squares").smooth()
    rows, mask = everything(smooth)
    x = torch.full((1, 5), 1e200, dtype=torch.float64)
    assert bool(torch.isfinite(smooth.clipped(x, rows, mask, 1.0)).all())


# -- noise and samples ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", [System(), Counters(3)], ids=["system", "counters"])
def test_noise_is_standard_normal_and_independent(source):
    clients = np.arange(4, dtype=np.uint64)
    one, two = (source.normal(clients, 0, query, 5000) for query in (1, 2))
    assert stats.kstest(np.concatenate([one.ravel(), two.ravel()]), "norm").pvalue > 1e-4
    both = np.concatenate([one, two])
    correlations = np.corrcoef(both)[np.triu_indices(8, 1)]
    assert np.abs(correlations).max() < 6 / math.sqrt(5000)
    assert abs(np.corrcoef(one.ravel()[:-1], one.ravel()[1:])[0, 1]) < 6 / math.sqrt(20000)


@pytest.mark.parametrize("source", [System(), Counters(3)], ids=["system", "counters"])
def test_samples_take_part_independently_with_the_rate(source):
    clients, sizes = np.arange(2, dtype=np.uint64), np.asarray([40, 300], np.uint64)
    there = np.zeros((2, 400, 300))
    for query in range(400):
        for i, chosen in enumerate(source.chosen(clients, sizes, 0, query, 0.3)):
            assert len(set(chosen.tolist())) == len(chosen)
            there[i, query, chosen.astype(int)] = 1
    assert not there[0, :, 40:].any()
    for i, m in enumerate((40, 300)):
        own = there[i, :, :m]
        assert stats.binomtest(int(own.sum()), own.size, 0.3).pvalue > 1e-4
        counts = own.sum(1)  # of a binomial, not of a fixed batch
        assert 0.6 < counts.var() / (m * 0.21) < 1.5
    assert [len(c) for c in source.chosen(clients, sizes, 0, 0, 1.0)] == [40, 300]


def test_the_systems_numbers_do_not_repeat():
    one, two = (System().normal(np.zeros(1, np.uint64), 0, 0, 8) for _ in range(2))
    assert not np.array_equal(one, two)


def test_what_the_oracle_adds_is_the_noise_that_is_accounted_for():
    """Answers minus the clipped mean are normal with deviation noise * clip / (rate * m)."""
    problem = PROBLEMS["logistic"]()
    smooth, privacy = problem.smooth(), SampleLevel(clip=0.7, noise=1.3)
    rows, mask = everything(smooth)
    x = torch.zeros(3, smooth.dimension, dtype=torch.float64)
    exact = smooth.clipped(x, rows, mask, 0.7) / torch.from_numpy(smooth.divisors)[:, None]
    clients, counter = np.arange(3, dtype=np.uint64), Counter()
    seen = []
    for round in range(300):
        grad = PrivateGradients(
            smooth, clients, round, Batches(), counter, privacy=privacy, source=Counters(5), stacked=True
        )
        seen += [(grad(x, 0) - exact), (grad(x, 0) - exact)]
    unit = torch.stack(seen) * torch.from_numpy(smooth.divisors)[:, None] / (1.3 * 0.7)
    assert stats.kstest(unit.ravel().numpy(), "norm").pvalue > 1e-4
    assert counter.gradients == 2 * 3 * 300


def test_the_noise_of_a_hessian_is_symmetric_and_isotropic():
    smooth = PROBLEMS["logistic"]().smooth()
    privacy = SampleLevel(clip=1.0, noise=2.0)
    asked = Mechanism(smooth, np.arange(3, dtype=np.uint64), 0, privacy, Counters(1))
    drawn = [asked.ask_symmetric(lambda r, w: torch.zeros(3, 4, 4, dtype=torch.float64), 0.5) for _ in range(400)]
    noise = torch.stack(drawn) * torch.from_numpy(smooth.divisors)[:, None, None]
    assert torch.equal(noise, noise.transpose(-1, -2))
    i, j = torch.triu_indices(4, 4, 1)
    assert float(noise.diagonal(dim1=-2, dim2=-1).std()) == pytest.approx(1.0, rel=0.05)
    assert float(noise[..., i, j].std()) == pytest.approx(math.sqrt(0.5), rel=0.05)


def test_answers_are_unbiased_under_sampling():
    smooth = PROBLEMS["logistic"]().smooth()
    privacy = SampleLevel(clip=100.0, noise=1e-9, rate=0.4)
    clients, x = np.arange(3, dtype=np.uint64), torch.ones(3, smooth.dimension, dtype=torch.float64)
    grad = PrivateGradients(smooth, clients, 0, Batches(), Counter(), privacy=privacy, source=Counters(0))
    mean = torch.stack([grad.full(x) for _ in range(1000)]).mean(0)
    torch.testing.assert_close(mean, smooth.full(clients)(x), rtol=0, atol=0.15)


# -- the accountant ------------------------------------------------------------------------------------------------


def test_epsilon_of_the_gaussian_mechanism_is_analytic():
    """Balle & Wang (2018): delta = Phi(1/2s - e s) - exp(e) Phi(-1/2s - e s), here for compositions as well."""
    for noise, count in ((1.0, 1), (3.0, 7), (20.0, 100)):
        s, epsilon = noise / math.sqrt(count), compose({Query(noise): count}, 1e-5)
        phi = stats.norm.cdf
        delta = phi(0.5 / s - epsilon * s) - math.exp(epsilon) * phi(-0.5 / s - epsilon * s)
        assert delta == pytest.approx(1e-5, rel=1e-6)


@pytest.mark.parametrize(("noise", "rate", "count"), [(1.1, 0.1, 100), (0.8, 0.01, 1000), (4.0, 0.5, 30)])
def test_epsilon_is_that_of_dp_accounting(noise, rate, count):
    event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise))
    tight = dp_accounting.pld.PLDAccountant().compose(event, count).get_epsilon(1e-5)
    usual = dp_accounting.rdp.RdpAccountant(range(2, 257)).compose(event, count).get_epsilon(1e-5)
    found = compose({Query(noise, rate): count}, 1e-5)
    assert tight <= found <= usual * (1 + 1e-9)
    assert found <= 1.25 * tight


def test_kinds_of_queries_add_up():
    one, two = {Query(2.0, 0.1): 50}, {Query(5.0): 3}
    both = compose({**one, **two}, 1e-5)
    assert max(compose(one, 1e-5), compose(two, 1e-5)) < both < compose(one, 1e-5) + compose(two, 1e-5)
    assert compose({Query(1.0): 0}, 1e-5) == 0.0


def test_noise_for_is_the_least():
    for rate in (1.0, 0.05):
        noise = noise_for(epsilon=2.0, delta=1e-5, queries=40, rate=rate)
        assert compose({Query(noise, rate): 40}, 1e-5) <= 2.0 < compose({Query(noise / 1.01, rate): 40}, 1e-5)
    with pytest.raises(ValueError, match="epsilon = -1"):
        noise_for(epsilon=-1.0, delta=1e-5, queries=1)
    with pytest.raises(ValueError, match="delta = 1"):
        noise_for(epsilon=1.0, delta=1.0, queries=1)


def test_shares_of_noise_make_the_whole():
    shared = SampleLevel(clip=1.0, noise=2.0, share=0.25)
    assert shared.query(parties=4) == Query(2.0)
    assert shared.query(parties=3).noise < 2.0
    assert shared.query().noise == 1.0


# -- runs ----------------------------------------------------------------------------------------------------------


def runnable(name):
    cls = REGISTRY[name]
    return cls.auto(20.0, local_steps=3)


FIRST_ORDER = [
    name for name in REGISTRY if not REGISTRY[name].info.second_order and REGISTRY.origin(name) == "fedcomposite"
]


@pytest.mark.parametrize("name", FIRST_ORDER)
def test_every_method_runs_on_noised_gradients_alike_on_both_backends(name):
    problem = fc.Problem(silos(), loss="logistic")
    method = runnable(name)
    runs = [
        fc.simulate(problem, method, rounds=3, privacy=LOUD, backend=backend, process_settings=False)
        for backend in ("stacked", "loop")
    ]
    torch.testing.assert_close(runs[0].solution, runs[1].solution)
    one, two = (run.history[-1] for run in runs)
    assert one["epsilon"] == two["epsilon"] > 0
    queries = one["gradient_evaluations"] / len(problem.silos)
    assert one["epsilon"] == pytest.approx(LOUD.epsilon(int(queries)))


def test_a_method_sees_nothing_but_noised_answers():
    """With the samples' gradients clipped to almost nothing, all data give the same run."""
    runs = []
    for seed in (0, 1):
        problem = fc.Problem(silos(seed=seed), loss="logistic", regularizer=fc.regularizers.L1(0.01))
        privacy = SampleLevel(clip=1e-12, noise=1e13)
        method = fc.algorithms.FedNMap(local_steps=3, step=0.1, gamma=0.5)
        runs.append(fc.simulate(problem, method, rounds=5, privacy=privacy).solution)
    torch.testing.assert_close(runs[0], runs[1], rtol=0, atol=1e-9)
    assert float(runs[0].abs().max()) > 0


def test_networks_run_on_noised_gradients_alike_on_both_backends():
    problem = network()
    method = fc.algorithms.FedAvg(local_steps=2, step=0.1)
    one, two = (
        fc.simulate(problem, method, rounds=2, privacy=LOUD, backend=backend).solution
        for backend in ("stacked", "loop")
    )
    torch.testing.assert_close(one, two)


def test_without_noise_and_clipping_a_private_run_is_the_plain_one():
    problem = fc.Problem(silos(), loss="logistic", regularizer=fc.regularizers.L1(0.01))
    method = fc.algorithms.FedNMap(local_steps=3, step=0.05, gamma=0.2)
    quiet = SampleLevel(clip=1e6, noise=1e-18)
    one = fc.simulate(problem, method, rounds=5).solution
    two = fc.simulate(problem, method, rounds=5, privacy=quiet).solution
    torch.testing.assert_close(one, two)


def test_clients_are_protected_by_clipped_replies_and_noise_on_their_mean():
    """The mean of a FedAvg round is that of the clipped changes plus noise of the stated deviation."""
    problem = fc.Problem(silos(), loss="logistic")
    method = fc.algorithms.FedAvg(local_steps=3, step=0.5)
    arrays = [problem.silos[i] for i in range(3)]
    alone = [
        fc.simulate(fc.Problem(fc.Silos.from_arrays([pair]), loss="logistic"), method, rounds=1).solution
        for pair in arrays
    ]
    exact = fc.simulate(problem, method, rounds=1, privacy=ClientLevel(clip=0.2, noise=1e-15)).solution
    expected = torch.stack([a * min(1.0, 0.2 / float(a.norm())) for a in alone]).mean(0)
    torch.testing.assert_close(exact, expected)
    noisy = torch.stack(
        [
            fc.simulate(problem, method, rounds=1, seed=s, privacy=ClientLevel(clip=0.2, noise=1.5)).solution - exact
            for s in range(60)
        ]
    )
    assert float(noisy.std()) == pytest.approx(1.5 * 0.2 / 3, rel=0.12)


def test_epsilon_of_a_client_counts_the_rounds_with_it():
    problem = fc.Problem(silos(sizes=(10,) * 8), loss="logistic")
    method, privacy = fc.algorithms.FedAvg(local_steps=1, step=0.1), ClientLevel(clip=0.01, noise=4.0)
    run = fc.simulate(problem, method, rounds=12, participation=0.25, privacy=privacy, seed=3)
    drawn = np.concatenate([fc.runtime.Cohorts(8, 0.25, seed=3).draw(r) for r in range(12)])
    most = int(np.bincount(drawn.astype(int)).max())
    assert 3 < most < 12
    assert run.history[-1]["epsilon"] == pytest.approx(privacy.epsilon(most))


def test_a_resumed_run_goes_on_spending(tmp_path):
    problem = fc.Problem(silos(), loss="logistic")
    method = fc.algorithms.Scaffnew(step=0.1, p=0.4)  # a random number of steps a round
    given = {"privacy": LOUD, "checkpoint": tmp_path / "c", "checkpoint_every": 1}
    fc.simulate(problem, method, rounds=3, **given)
    on = fc.simulate(problem, method, rounds=6, resume=True, **given)
    whole = fc.simulate(problem, method, rounds=6, privacy=LOUD)
    assert torch.equal(on.solution, whole.solution)
    assert [r["epsilon"] for r in on.history] == [r["epsilon"] for r in whole.history]
    louder = dataclasses.replace(LOUD, noise=2.0)
    with pytest.raises(fc.CheckpointError, match="privacy"):
        fc.simulate(problem, method, rounds=7, resume=True, **(given | {"privacy": louder}))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"batch_size": 4}, "leave batch_size out and set rate"),
        ({"tolerance": 1e-3}, "when to stop must not depend"),
        ({"callbacks": [fc.callbacks.EarlyStopping("objective", patience=2)]}, "when to stop must not depend"),
        ({"privacy": SampleLevel(clip=1.0, noise=1.0, share=0.5)}, "use weights='samples'"),
        ({"privacy": 3.0}, "must be a privacy.SampleLevel"),
        ({"replace": True, "participation": 0.5}, "drawn twice"),
    ],
)
def test_what_the_accountant_does_not_know_is_refused(given, words):
    problem = fc.Problem(silos(), loss="logistic")
    method = fc.algorithms.FedAvg(local_steps=2, step=0.1)
    with pytest.raises(ValueError, match=words):
        fc.simulate(problem, method, rounds=2, **{"privacy": LOUD, **given})


def test_shares_of_noise_need_replies_that_add_up():
    """The sum's noise is the whole for every sample only if samples count alike and replies are linear."""
    problem = fc.Problem(silos(), loss="logistic", weights="samples")
    third = SampleLevel(clip=1.0, noise=2.0, share=1 / 3)
    with pytest.raises(ValueError, match="not linear in its gradients"):
        fc.simulate(problem, fc.algorithms.FedAvg(2, 0.1), rounds=1, privacy=third)
    run = fc.simulate(problem, fc.algorithms.ProximalGradient(1.0), rounds=3, privacy=third)
    assert run.history[-1]["epsilon"] == pytest.approx(compose({Query(2.0): 3}, 1e-5))
    plain = SampleLevel(clip=1.0, noise=1e-3)  # the noise of the mean is noise * clip / all samples
    exact = fc.simulate(problem, fc.algorithms.ProximalGradient(1.0), rounds=1, privacy=plain).solution
    runs = [
        fc.simulate(problem, fc.algorithms.ProximalGradient(1.0), rounds=1, privacy=third, seed=s).solution - exact
        for s in range(150)
    ]
    assert float(torch.stack(runs).std()) == pytest.approx(2.0 / 55, rel=0.1)


def test_layers_and_weights_that_mix_samples_are_refused():
    data = dataclasses.replace(silos(), targets=(silos().targets > 0).double())
    for layer, words in ((torch.nn.BatchNorm1d(5), "batch norm mixes"), (torch.nn.Dropout(0.5), "random layers")):
        model = torch.nn.Sequential(layer, torch.nn.Linear(5, 2))
        with pytest.raises(ValueError, match=words):
            fc.simulate(fc.Problem(data, model=model), fc.algorithms.FedAvg(1, 0.1), rounds=1, privacy=LOUD)
    make = np.random.default_rng(0)
    weighed = fc.Silos.from_arrays(
        [(make.normal(size=(9, 2)), np.sign(make.normal(size=9)))] * 2, weights=[make.uniform(1, 2, 9)] * 2
    )
    with pytest.raises(ValueError, match="weights of samples"):
        fc.simulate(fc.Problem(weighed, loss="logistic"), fc.algorithms.FedAvg(1, 0.1), rounds=1, privacy=LOUD)


@pytest.mark.parametrize("name", [n for n in FIRST_ORDER if REGISTRY[n].linear_replies])
def test_replies_that_call_themselves_linear_are(name):
    """Half of two clients' gradients gives half of their replies."""
    method, h = runnable(name), fc.regularizers.L1(0.1)
    server, client = method.init(torch.zeros(4, dtype=torch.float64), h)

    class Oracle:
        cohort, position = 1, torch.zeros(1)

        def __init__(self, gradient):
            self.gradient = gradient

        def __call__(self, x, k):
            return self.gradient

        full = __call__

    one, two = torch.randn(2, 4, dtype=torch.float64)
    replies = [method.local_round(method.broadcast(server), client, Oracle(g), h)[0] for g in (one, two, one + two)]
    for a, b, both in zip(*replies, strict=True):
        torch.testing.assert_close(a + b, both)


# -- an attack -----------------------------------------------------------------------------------------------------


def test_membership_inference_does_no_better_than_the_bound():
    """An attacker who knows everything but one sample, and sees a whole run's answers, stays below the bound.

    The sample is the worst one there is: its gradient has the full clip at every model. The best test between "there"
    and "not there" is a threshold on the likelihood ratio, which for known models is linear in the answers. Any
    (epsilon, delta)-private mechanism has true positives <= exp(epsilon) false positives + delta, and the Gaussian
    mechanism's own curve Phi(Phi^-1(alpha) + mu) is reached, so the noise is not larger than it is said to be either.
    """
    make = np.random.default_rng(0)
    X, y = make.normal(size=(20, 2)), np.sign(make.normal(size=20))
    X[0] = [100.0, 0.0]
    queries, trials = 4, 1500
    smooth = fc.Problem(fc.Silos.from_arrays([(X, y)] * trials), loss="logistic").smooth()  # a client per trial
    privacy = SampleLevel(clip=1.0, noise=4.0)
    x = torch.zeros(trials, 2, dtype=torch.float64)
    rows, mask = everything(smooth)
    without = mask.clone()
    without[:, 0] = 0
    shift = (smooth.clipped(x, rows, mask, 1.0) - smooth.clipped(x, rows, without, 1.0))[0]
    assert float(shift.norm()) == pytest.approx(1.0)
    clients = np.arange(trials, dtype=np.uint64)
    scores = {}
    for member, chosen in ((True, mask), (False, without)):
        asked = Mechanism(smooth, clients, 0, privacy, Counters(11 + member))
        answers = [asked.ask(lambda r, w, m=chosen: smooth.clipped(x, r, w * m, 1.0), 1.0) for _ in range(queries)]
        scores[member] = (20 * torch.stack(answers).sum(0) @ shift).numpy()
    epsilon, mu = privacy.epsilon(queries), math.sqrt(queries) / privacy.noise
    slack = 4 * math.sqrt(0.25 / trials)
    for threshold in np.quantile(scores[False], np.linspace(0.02, 0.98, 25)):
        false, true = (np.mean(scores[m] > threshold) for m in (False, True))
        assert true <= math.exp(epsilon) * false + privacy.delta + slack
        assert 1 - false <= math.exp(epsilon) * (1 - true) + privacy.delta + slack
        assert true == pytest.approx(stats.norm.cdf(stats.norm.ppf(false) + mu), abs=2 * slack)
