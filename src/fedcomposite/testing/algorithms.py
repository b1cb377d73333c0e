"""The contract of a method, as checks that anyone can run on their own.

``check_algorithm(MyMethod(...))`` runs every law; the package's own methods pass the same list.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedcomposite.algorithms.base import Algorithm, AnyAlgorithm
from fedcomposite.data import synthetic
from fedcomposite.problems import Batches, ClientGradients, Counter, Problem
from fedcomposite.regularizers import L1, Regularizer, Zero
from fedcomposite.runtime import messages
from fedcomposite.runtime.simulator import Simulator, simulate

Law = Callable[[AnyAlgorithm], None]
LAWS: list[Law] = []


def law(check: Law) -> Law:
    """Add a check to the contract."""
    LAWS.append(check)
    return check


def small_problem(algorithm: AnyAlgorithm, regularizer: Regularizer | None = None, equal: bool = False) -> Problem:
    """Heterogeneous logistic regression that fits the method: six clients, eight features, unequal sizes."""
    silos = synthetic(clients=6, features=8, samples=40, seed=1)
    if not equal:
        cuts = [40, 13, 25, 7, 40, 31]
        silos = silos.subset([silos.offsets[i] + np.arange(m) for i, m in enumerate(cuts)])
    h = regularizer or (Zero() if algorithm.info.regularizer == "none" else L1(0.003))
    return Problem(silos, loss="logistic", regularizer=h)


class Traffic(NamedTuple):
    """What a method sends and computes per step of the method (one round, or ``exchanges`` of them)."""

    up: float
    """Vectors from each client."""
    down: float
    """Vectors to each client."""
    proxes: float
    """Proxes of h in the whole system."""
    gradients: float
    """Gradients of each client."""


def measure_traffic(cls: type[AnyAlgorithm], clients: int = 4, local_steps: int = 5) -> Traffic:
    """Measure a method on a small probe run, with its own practical steps."""
    silos = synthetic(clients=clients, features=500, samples=5, seed=1)
    algorithm = cls.auto(L=0.25, local_steps=local_steps)
    h = Zero() if cls.info.regularizer == "none" else L1(0.003)
    sim = Simulator(Problem(silos, loss="logistic", regularizer=h), algorithm, batches=Batches())
    times = 8
    for _ in range(times * cls.exchanges):
        sim.step()
    vectors = times * clients * 500 * 8
    return Traffic(
        sim.counter.bytes_up / vectors,
        sim.counter.bytes_down / vectors,
        sim.counter.proxes / times,
        sim.counter.gradients / times / clients,
    )


def _settings(algorithm: AnyAlgorithm) -> list[tuple[int | None, float]]:
    shares = (1.0, 0.5) if algorithm.partial else (1.0,)
    return [(batch, share) for batch in (None, 4) for share in shares]


def _models(problem: Problem, algorithm: AnyAlgorithm, rounds: int = 6, **settings: Any) -> Tensor:
    run = simulate(problem, algorithm, rounds=rounds, keep_solutions=True, evaluate_every=rounds, **settings)
    assert run.solutions is not None
    return run.solutions


@law
def frozen_dataclass(algorithm: AnyAlgorithm) -> None:
    """A method is a frozen dataclass, final, with its card filled in."""
    cls = type(algorithm)
    assert dataclasses.is_dataclass(cls), f"{cls.__name__} must be a dataclass"
    assert cls.__dataclass_params__.frozen, f"{cls.__name__} must be frozen"
    assert [b for b in cls.__mro__[1:] if isinstance(b, type) and issubclass(b, Algorithm)] == [Algorithm], (
        f"{cls.__name__} must derive from Algorithm alone: no method inherits from another"
    )
    assert algorithm.info.paper, f"{cls.__name__}.info must name the paper"


@law
def stacked_equals_loop(algorithm: AnyAlgorithm) -> None:
    """All clients at once give what one client after another gives."""
    problem = small_problem(algorithm)
    for batch, share in _settings(algorithm):
        one, two = (
            _models(problem, algorithm, batch_size=batch, participation=share, backend=backend)
            for backend in ("stacked", "loop")
        )
        torch.testing.assert_close(one, two, rtol=0, atol=1e-12)


@law
def bytes_are_measured(algorithm: AnyAlgorithm) -> None:
    """The bytes reported are the bytes of the tuples sent."""
    problem = small_problem(algorithm)
    sim = Simulator(problem, algorithm, batches=Batches())
    down = up = 0
    for r in range(3):
        message = algorithm.broadcast(sim.server)
        for i in sim.participants(r):
            one = sim.participants(r)[int(i) : int(i) + 1]
            mine = messages.each(sim.clients, lambda t, i=i: t[int(i)])
            grad = ClientGradients(
                sim.smooth, one, r, sim.batches, Counter(), stacked=False, place=(int(i), len(problem.silos))
            )
            reply, _ = algorithm.local_round(message, mine, grad, problem.regularizer)
            down, up = down + messages.nbytes(message), up + messages.nbytes(reply)
        sim.step()
    assert (sim.counter.bytes_down, sim.counter.bytes_up) == (down, up)


@law
def inputs_are_kept(algorithm: AnyAlgorithm) -> None:
    """No rule modifies its inputs, and floating-point states keep their dtype."""
    for dtype in (torch.float32, torch.float64):
        problem = small_problem(algorithm, equal=True)
        sim = Simulator(problem, algorithm, batches=Batches(), dtype=dtype)
        sim.step()
        message = algorithm.broadcast(sim.server)
        before = [messages.each(t, torch.clone) for t in (sim.server, sim.clients, message)]
        who = sim.participants(1)
        grad = ClientGradients(sim.smooth, who, 1, sim.batches, Counter())
        stacked = messages.stack(message, len(who))
        reply, clients = algorithm.local_round(stacked, sim.clients, grad, problem.regularizer)
        mean = messages.mean(algorithm.decode(reply))
        server = algorithm.aggregate(sim.server, mean, 1.0, problem.regularizer)
        algorithm.solution(server, problem.regularizer)
        for old, now in zip(before, (sim.server, sim.clients, message), strict=True):
            for a, b in zip(old, now, strict=True):
                assert torch.equal(a, b), f"{type(algorithm).__name__} modified an input"
        narrow = {dtype, torch.float32} if algorithm.single_precision else {dtype}
        for t, able in [(t, {dtype}) for t in (*server, *clients)] + [(t, narrow) for t in (*message, *reply)]:
            assert t.dtype in able or not t.is_floating_point(), (
                f"{type(algorithm).__name__} changed {dtype} to {t.dtype}"
            )


@law
def deterministic(algorithm: AnyAlgorithm) -> None:
    """Two runs with one seed agree to the bit."""
    problem = small_problem(algorithm)
    assert torch.equal(_models(problem, algorithm, batch_size=4), _models(problem, algorithm, batch_size=4))


@law
def resume_is_exact(algorithm: AnyAlgorithm) -> None:
    """A run continued from a checkpoint is the uninterrupted run, bit for bit."""
    problem = small_problem(algorithm)
    for batch, share in _settings(algorithm):
        whole = simulate(problem, algorithm, rounds=7, batch_size=batch, participation=share)
        with TemporaryDirectory() as folder:
            path = Path(folder) / "state.safetensors"
            for rounds in (3, 7):
                parts = simulate(
                    problem,
                    algorithm,
                    rounds=rounds,
                    batch_size=batch,
                    participation=share,
                    checkpoint=path,
                    resume=True,
                )
        assert torch.equal(whole.solution, parts.solution)
        for a, b in zip(whole.history, parts.history, strict=True):
            assert {**a, "seconds": 0} == {**b, "seconds": 0}


def broken_laws(algorithm: AnyAlgorithm) -> dict[str, str]:
    """Every law of the contract that a method breaks, and how."""
    broken = {}
    for check in LAWS:
        try:
            check(algorithm)
        except Exception as error:  # a law that cannot even be checked is broken, and hides no other
            said = " ".join(str(error).split())
            how = said if isinstance(error, AssertionError) else f"{type(error).__name__}: {said}"
            broken[check.__name__] = how or (check.__doc__ or "").strip()
    return broken


def check_algorithm(algorithm: AnyAlgorithm) -> None:
    """Run every law of the contract on a method; raises one AssertionError that lists every broken law, and how."""
    if broken := broken_laws(algorithm):
        lines = "\n".join(f"{name}: {how}" for name, how in broken.items())
        raise AssertionError(f"{type(algorithm).__name__} breaks {len(broken)} of {len(LAWS)} laws:\n{lines}")
