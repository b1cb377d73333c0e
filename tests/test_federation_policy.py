"""What a site agrees to by default: budgets, one model per round, its own data, and memory judged beforehand."""

import json
import os
import subprocess
import sys
from datetime import date
from pathlib import Path

import numpy as np
import pytest
from lone_site import D, ask, experiment, make_site, people

from fedcomposite.federation.orders import Shape
from fedcomposite.federation.shape import parse, skeleton
from fedcomposite.federation.site.ledger import Ledger
from fedcomposite.federation.site.policy import Limits, RefusalError


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (experiment("hinge"), "hinge is not among this site's losses"),
        (experiment("poisson"), "poisson is not among this site's losses"),
        (experiment().replace("[problem]", '[problem]\nmetrics = ["auc"]'), "auc is not among this site's metrics"),
        (experiment(evaluate_every=2), "round 1 is not one in which this experiment evaluates"),
        (experiment(rounds=0), "round 2 of an experiment of 0 rounds"),
    ],
)
def test_default_limits(tmp_path, config, reason):
    with pytest.raises(RefusalError, match=reason):
        ask(make_site(tmp_path), config, round=1, model=np.zeros(D))


def test_parameters_are_a_share_of_the_samples(tmp_path):
    X, _ = people()
    ask(make_site(tmp_path / "1", (X[:15], np.tile([0.0, 1.0, 0.0], 5))), experiment(), model=np.zeros(D))
    with pytest.raises(RefusalError, match="5 parameters are more than this site's samples allow"):
        ask(make_site(tmp_path / "2", (X[:14], np.tile([0.0, 1.0], 7))), experiment(), model=np.zeros(D))


def test_a_round_has_one_model_and_rounds_do_not_go_back(tmp_path):
    """An order that was lost may come again, also to a site that was restarted; another model may not."""
    config, zero = experiment(), np.zeros(D)
    limits = {"models_per_round": 1}
    first = ask(make_site(tmp_path, **limits), config, round=3, model=zero)
    again = ask(make_site(tmp_path, **limits), config, round=3, model=zero)
    assert first[0]["loss"] == again[0]["loss"]
    with pytest.raises(RefusalError, match="another model in round 4: models_per_round = 1"):
        ask(make_site(tmp_path, **limits), config, round=3, model=zero + 1)
    with pytest.raises(RefusalError, match="has reached round 4; this order is for 3"):
        ask(make_site(tmp_path, **limits), config, round=2, model=zero)
    ask(make_site(tmp_path, **limits), config, round=4, model=zero + 1)
    ask(make_site(tmp_path, **limits), config, round=0, model=zero, job="other")


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"evaluations_per_job": 2}, "evaluations_per_job = 2"),
        ({"evaluations_per_day": 2}, "evaluations_per_day = 2"),
        ({"gradients_per_job": 2}, "gradients_per_job = 2"),
        ({"gradients_per_day": 2}, "gradients_per_day = 2"),
        ({"jobs_per_day": 2}, "new jobs a day = 2"),
    ],
)
def test_budgets_survive_restarts(tmp_path, limits, reason):
    (name,) = limits
    jobs = ["a", "b", "c"] if name in ("jobs_per_day", "evaluations_per_day", "gradients_per_day") else ["a"] * 3
    what = {"message": np.zeros(D)} if name.startswith("gradients") else {"model": np.zeros(D)}
    for r in range(2):
        ask(make_site(tmp_path, **limits), experiment(), round=r, job=jobs[r], **what)
    with pytest.raises(RefusalError, match=reason):
        ask(make_site(tmp_path, **limits), experiment(), round=2, job=jobs[2], **what)


def test_a_new_day_has_a_new_budget_and_unused_work_is_given_back(tmp_path):
    day = [date(2026, 1, 1)]
    ledger = Ledger(tmp_path, Limits(gradients_per_day=5, gradients_per_job=8), "data", lambda: day[0])
    ledger.admit("job", 0, {"train": "x"}, gradients=4)
    ledger.refund("job", 2)
    ledger.spend("job", gradients=3)
    with pytest.raises(RefusalError, match="gradients_per_day = 5"):
        ledger.spend("job", gradients=1)
    day[0] = date(2026, 1, 2)
    ledger.spend("job", gradients=3)
    with pytest.raises(RefusalError, match="gradients_per_job = 8"):
        ledger.spend("job", gradients=1)
    (tmp_path / "ledger.json").write_text("{")
    with pytest.raises(RefusalError, match="its ledger cannot be read"):
        ledger.spend("job", gradients=1)


def test_other_data_in_the_middle_of_a_job_is_refused(tmp_path):
    """Also for a method whose clients remember nothing, for data of the same size, and where one patient may tell."""
    X, y = people()
    ask(make_site(tmp_path, min_count=1), experiment(), message=np.zeros(D))
    other = X.copy()
    other[7, 2] += 1e-9
    with pytest.raises(RefusalError, match="job job began with other data here"):
        ask(make_site(tmp_path, (other, y), min_count=1), experiment(), round=1, message=np.zeros(D))
    ask(make_site(tmp_path, (other, y), min_count=1), experiment(), round=1, message=np.zeros(D), job="anew")


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (experiment("logistik"), r"unknown loss 'logistik'; did you mean 'logistic'"),
        (
            experiment().replace('loss = "logistic"', 'loss = "logistic"\nloss_options = {delta = 1.0}'),
            "no option 'delta'",
        ),
        (experiment().replace("step = 1.0", "step = -1.0"), "step = -1.0"),
    ],
)
def test_a_mistake_in_the_experiment_is_told_as_such(tmp_path, config, reason):
    """It is no secret of the site's: only what could quote samples is kept back."""
    with pytest.raises(RefusalError, match=reason):
        ask(make_site(tmp_path, losses=[]), config, model=np.zeros(D))


# -- memory ---------------------------------------------------------------------------------------------------------

HUGE = {
    "clients": ({"clients": 20_000_000}, experiment(), "20000000 clients are over"),
    "features": ({"features": [300_000_000]}, experiment(), "not this site's"),
    "labels": ({"labels": [float(i) for i in range(1000)]}, experiment("multinomial"), "5000 parameters are more"),
    "batch": ({}, experiment(batch_size=30_000_000), "max_memory_mb"),
    "width": (None, experiment(model={"name": "mlp", "options": {"hidden": [30_000, 30_000]}}), "max_parameters"),
    "rounds": ({}, experiment(rounds=10**9), "rounds are over"),
}

CHILD = """
import json, resource, sys
from pathlib import Path
from lone_site import make_site, wire
site = make_site(Path(sys.argv[1]), networks=True)
size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + (256 << 20), resource.RLIM_INFINITY))
for order in json.loads(sys.stdin.read()):
    print(wire.text(site.answer(wire.content(order=json.dumps(order))), "refusal"))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="address space is limited as on Linux")
def test_an_order_is_judged_before_anything_is_allocated(tmp_path):
    """With 256 MB of address space to spare, absurd numbers are refused by name and not by running out of memory."""
    orders = []
    for i, (shape, config, _) in enumerate(HUGE.values()):
        order = {"job": f"j{i}", "site": "a", "config": config}
        if shape is not None:
            whole = {"features": [D], "dtype": "float64", "labels": [0.0, 1.0], "clients": 3}
            order |= {"shape": whole | shape, "train": True, "cohort": 3}
        orders.append(order)
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path)],
        input=json.dumps(orders),
        env={"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    said = done.stdout.splitlines()
    assert len(said) == len(HUGE), done.stderr[-2000:]
    for line, (_, _, reason) in zip(said, HUGE.values(), strict=True):
        assert reason in line


def test_the_skeleton_does_not_grow_with_the_clients():
    shape = Shape(features=[D], dtype="float64", labels=[0.0, 1.0], clients=2**31)
    assert skeleton(parse(experiment()), shape).silos.features.shape == (2, D)
