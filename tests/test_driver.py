"""The one driver: every way to an answer goes through its loop, and through nothing else to a transport."""

import ast
from pathlib import Path

import pytest
import torch
from benchmarks.walks import passed

import fedcomposite as fc
from fedcomposite.runtime import Driver
from fedcomposite.runtime.protocol import ALL, Rows, answer, answer_all, losses, newton, silos_of
from fedcomposite.runtime.transports import SiloTransport

HOME = Path(fc.__file__).parent
METHOD = fc.algorithms.FedNMap(local_steps=2, step=0.5, gamma=1.0)


@pytest.fixture(scope="module")
def problem():
    silos = fc.data.load("synthetic", clients=3, features=4, samples=30)
    return fc.Problem(silos, loss="logistic", regularizer=fc.regularizers.L1(0.02), bias=True, weights="samples")


WAYS = {
    "simulate": lambda p: fc.simulate(p, METHOD, rounds=2, progress=False),
    "solve": lambda p: fc.solve(p),
    "estimator": lambda p: fc.LogisticRegression(regularizer=fc.regularizers.L1(0.02)).fit(p.silos),
    "path": lambda p: fc.path(p, count=3),
    "cv": lambda p: fc.analyse(p, "cv", folds=2, count=3),
    "confidence": lambda p: fc.confidence(p, torch.zeros(p.dimension, dtype=torch.float64)),
    "bootstrap": lambda p: fc.bootstrap(p, torch.zeros(p.dimension, dtype=torch.float64), draws=2),
    "quality": lambda p: fc.quality(p, torch.zeros(p.dimension, dtype=torch.float64)),
    "stability": lambda p: fc.stability(p, draws=2, count=3),
}


@pytest.mark.parametrize("name", WAYS)
def test_every_way_to_an_answer_enters_the_driver(name, problem, monkeypatch):
    asked = []
    before = Driver.ask

    def ask(self, requests):
        asked.append(len(requests))
        return before(self, requests)

    monkeypatch.setattr(Driver, "ask", ask)
    WAYS[name](problem)
    assert asked


def test_only_the_driver_asks_a_transport():
    """A call ``....transport.ask(`` or ``....exchange(`` of a transport is nowhere but in the driver."""
    found = set()
    for file in HOME.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            called = node.func if isinstance(node, ast.Call) else None
            if isinstance(called, ast.Attribute) and ast.unparse(called).endswith("transport.ask"):
                found.add(str(file.relative_to(HOME)))
    assert found == {"runtime/driver.py"}


def test_tasks_share_their_exchanges_and_end_on_their_own(problem):
    def task(count):
        for k in range(count):
            [sums] = yield [losses(torch.full((1, problem.dimension), float(k), dtype=torch.float64), ALL)]
        return count, float(sums["deviance"][0])

    driver = Driver(SiloTransport(problem))
    found = driver.run([task(2), task(5), task(1)])
    assert [count for count, _ in found] == [2, 5, 1]
    assert driver.exchanges == 5
    alone = Driver(SiloTransport(problem)).run([task(5)])
    assert alone[0] == found[1]


def test_a_walk_counts_the_files_that_are_entered(problem):
    assert {"runtime/driver.py", "runtime/rounds.py"} <= set(passed(lambda: WAYS["simulate"](problem)))


@pytest.mark.parametrize("loss", ["logistic", "least_squares", "huber", "squared_hinge"])
def test_answers_side_by_side_are_those_of_one_request_each(loss):
    """Whoever asks for many models at once learns what he would learn one by one."""
    silos = fc.data.load("synthetic", clients=3, features=5, samples=30)
    drawn = torch.Generator().manual_seed(0)
    models = torch.randn(8, 6, generator=drawn, dtype=torch.float64)
    every, some = torch.ones(6, dtype=torch.bool), torch.tensor([1, 0, 1, 0, 0, 1], dtype=torch.bool)
    kinds = ["all", "fold", "site", "half", "bootstrap"]
    asked = [newton(models[k], every if k < 6 else some, Rows(kinds[k % 5], k, 5)) for k in range(8)]
    asked.insert(2, losses(models, ALL))
    for silo in silos_of(fc.Problem(silos, loss=loss, bias=True)):
        for one, request in zip(answer_all(silo, asked), asked, strict=True):
            alone = answer(silo, request)
            assert list(one) == list(alone)
            for key, value in alone.items():
                torch.testing.assert_close(one[key], value, rtol=1e-12, atol=1e-13)
