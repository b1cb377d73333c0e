"""Several seeds as one stacked computation: what they give alone."""

import numpy as np
import pandas as pd
import pytest
import torch

import fedcomposite as fc
from fedcomposite.algorithms import build
from fedcomposite.papers import fedmls_fig1, seed_stack
from fedcomposite.papers.searches import Tunable, tuned
from fedcomposite.regularizers import Zero

EXPERIMENT = {
    "data": {"name": "synthetic", "clients": 4, "features": 5, "samples": 20},
    "problem": {"loss": "logistic"},
    "regularizer": {"name": "L1", "lam": 0.01},
}
METHODS = [
    {"name": "FedNMap", "local_steps": 3, "step": 1.0, "gamma": 2.0},
    {"name": "Zhang", "local_steps": 3, "step": 1.0, "server_step": 2.0},
    {"name": "FedCanon", "local_steps": 3, "step": 1.0, "server_step": 3.0},
    {"name": "FedCanonII", "local_steps": 3, "step": 1.0, "server_step": 3.0},
    {"name": "FedMid", "local_steps": 3, "step": 1.0},
    {"name": "FedDA", "local_steps": 3, "step": 1.0},
    {"name": "FastFedDA", "local_steps": 3, "mu": 0.01, "gamma": 1.0},
    {"name": "FedDR", "local_steps": 3, "step": 0.5, "prox_step": 2.0, "alpha": 1.5},
    {"name": "FedADMM", "local_steps": 3, "step": 0.5, "prox_step": 2.0},
    {"name": "ProxScaffnew", "local_steps": 3, "step": 1.0},
    {"name": "ProximalGradient", "step": 2.0},
    {"name": "FedAvg", "local_steps": 3, "step": 1.0},
    {"name": "Scaffold", "local_steps": 3, "step": 1.0},
]


@pytest.mark.parametrize("given", METHODS, ids=lambda m: m["name"])
def test_seeds_that_run_together_are_those_that_run_alone(given):
    method = build(**given)
    stack = seed_stack.stack_of(EXPERIMENT, (3, 4))
    made = pd.DataFrame(seed_stack.follow(stack, method, rounds=6, every=3))
    for place, problem in enumerate(stack.problems):
        x0 = seed_stack.start_at(method, problem.smooth().start(), problem.regularizer)
        run = fc.simulate(problem, method, rounds=6, evaluate_every=3, x0=x0, progress=False)
        ours = made[made["place"] == place]
        for key in ("objective", "stationarity", "gradient_evaluations", "prox_evaluations", "bytes_up", "bytes_down"):
            np.testing.assert_allclose(ours[key], [r[key] for r in run.history], rtol=1e-9, err_msg=key)


def test_minibatches_of_the_first_seed_are_those_of_a_run():
    method = build("FedNMap", local_steps=3, step=0.1, gamma=2.0)
    stack = seed_stack.stack_of(EXPERIMENT, (3, 4))
    made = pd.DataFrame(seed_stack.follow(stack, method, rounds=5, every=5, batch_size=2, seed=7))
    run = fc.simulate(stack.problems[0], method, rounds=5, batch_size=2, seed=7, evaluate_every=5, progress=False)
    assert made[made["place"] == 0]["objective"].iloc[-1] == pytest.approx(run.history[-1]["objective"], rel=1e-12)


@pytest.mark.parametrize("given", METHODS[:2], ids=lambda m: m["name"])
@pytest.mark.parametrize("h", [{"name": "L1", "lam": 0.1}, {"name": "ElasticNet", "l1": 0.1, "l2": 0.3}])
def test_all_methods_start_at_the_same_model(given, h):
    method, term = build(**given), getattr(fc.regularizers, h["name"])(**{k: v for k, v in h.items() if k != "name"})
    x = torch.tensor([0.0, 0.5, -2.0, 1e-3], dtype=torch.float64)
    server, _ = method.init(seed_stack.start_at(method, x, term), term)
    torch.testing.assert_close(method.solution(server, term), x)


@pytest.mark.parametrize("method", fedmls_fig1.CLASSES)
def test_the_compiled_loop_is_the_packages_methods(method, real_data):
    """With full subgradients, where nothing is drawn but the times of Scaffnew's communications."""
    if method.startswith("Scaffnew"):
        pytest.skip("its coin is drawn: the test of its first rounds is below")
    rows, _ = fedmls_fig1.clients(0)
    rows = [r[:9] / 10 for r in rows]
    first = {"FedMLS": 1.0, "FedAvg": 1e-2, "Scaffold": 1e-2}[method]
    found = fedmls_fig1.follow(method, rows, first, [0, 1, 2, 7], 5, share=1.0)
    n, rounds = len(rows), 7
    A = torch.from_numpy(np.stack(rows))

    def grad(x, k):
        return -(A * ((A @ x[..., None]).squeeze(-1) < 1)[..., None]).sum(1)

    grad.cohort = n

    def rule(k):
        if method == "FedAvg":
            return build("FedAvg", local_steps=k, step=first / k**0.5)
        if method == "Scaffold":
            return build("Scaffold", local_steps=k, step=first / (n**0.5 * k), server_step=n**0.5)
        return build("FedMLS", lambda0=first)

    h = Zero()
    server, client = rule(1).init(torch.zeros(A.shape[2], dtype=torch.float64), h)
    clients = type(client)(*(t.expand(n, *t.shape) for t in client))
    models = [rule(1).solution(server, h)]
    for k in range(1, rounds + 1):
        message = rule(k).broadcast(server)
        sent = type(message)(*(t.expand(n, *t.shape) for t in message))
        reply, clients = rule(k).local_round(sent, clients, grad, h)
        server = rule(k).aggregate(server, type(reply)(*(t.mean(0) for t in reply)), 1.0, h)
        models.append(rule(k).solution(server, h))
    expected = torch.stack([models[k] for k in (0, 1, 2, 7)]).numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)


def test_both_scaffnews_communicate_first_after_one_step_and_differ_afterwards(real_data):
    rows, _ = fedmls_fig1.clients(0)
    rows = [r[:9] / 10 for r in rows]
    right, wrong = (
        fedmls_fig1.follow(m, rows, 0.1, [0, 1, 30], 5, share=1.0) for m in ("Scaffnew", "Scaffnew, uncorrected")
    )
    step = 0.1 * np.mean([r.sum(0) for r in rows], axis=0)  # every margin is 0 at zero, below 1
    np.testing.assert_allclose(right[1], step, rtol=1e-12)
    np.testing.assert_array_equal(right[1], wrong[1])
    assert np.abs(right[2] - wrong[2]).max() > 1e-3


def test_minibatches_are_tenths_drawn_without_replacement(real_data):
    """One FedAvg step of a single client from zero, where every sample is wrong: each sum has ceil(m/10) rows."""
    A = np.eye(12)[:, :11] + 0.0
    A[11] = 1.0
    drawn = np.array([fedmls_fig1.follow("FedAvg", [A[:11]], 1.0, [0, 1], s)[1] for s in range(400)])
    assert set(np.unique(drawn.round(9))) == {0.0, 5.5}  # two of eleven, each times 11 / 2
    assert ((drawn > 0).sum(1) == 2).all()
    assert drawn.mean() == pytest.approx(1.0)
    assert (np.abs((drawn > 0).mean(0) - 2 / 11) < 0.08).all()


class _Measured:
    """A study that measures a quadratic in two numbers."""

    partial = False

    def __init__(self, trials=None):
        self.asked, self.trials = 0, pd.DataFrame() if trials is None else trials

    def noted(self, name):
        return self.trials

    def has(self, function, cell):
        return False

    @staticmethod
    def key(function, cell):
        return str(sorted(cell.items()))

    def measured(self, function, cells):
        self.asked = len(cells)
        return {self.key(function, cell): function(cell) for cell in cells}


def _bowl(cell):
    return pd.DataFrame({"score": [(np.log2(cell["a"]) - 3) ** 2 + (np.log2(cell["b"]) + 1) ** 2]})


def test_a_grid_grows_until_its_best_point_lies_inside():
    study = _Measured()
    wanted = {
        "one": Tunable({"kind": 1}, {"a": [0.5, 1.0, 2.0], "b": [0.25, 0.5, 1.0]}),
        "short": Tunable({"kind": 2}, {"a": [0.0625, 0.125], "b": [0.5, 1.0]}),
    }
    chosen, trials = tuned(study, _bowl, wanted, lambda rows: float(rows["score"].iloc[0]), extensions=3)
    assert chosen["one"] == {"a": 8.0, "b": 0.5}
    assert trials.groupby("search")["inside"].first().to_dict() == {"one": True, "short": False}
    assert trials.groupby("search")["chosen"].sum().to_dict() == {"one": 1, "short": 1}
    kept = _Measured(trials)  # trials that an earlier call told of are not made again
    assert tuned(kept, _bowl, wanted, lambda rows: float(rows["score"].iloc[0]), extensions=3)[0] == chosen
    assert kept.asked == 0
