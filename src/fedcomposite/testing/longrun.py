"""Laws about long runs: rounding does not add up, claims of exactness hold, practical steps are safe, steps may change.

They run on a problem so small that 20,000 rounds take a second: quadratic losses whose gradients are one product. The
rounds are carried out here, by the book (:class:`fedcomposite.algorithms.Algorithm`), without a runtime.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedcomposite.algorithms.base import AnyAlgorithm, amplification
from fedcomposite.regularizers import L1, Regularizer, Zero
from fedcomposite.schedules import Constant, Piecewise
from fedcomposite.testing.algorithms import law

PERIOD = 60
"""Steps of a method after which cohorts and private coins come round again; each client was in as many cohorts."""
CLIENTS, COHORT = 6, 3
"""All of them, and those of a round when some sit out."""
LARGEST = 0.24
"""Smoothness of every client of the probe."""


class LongRunProbe:
    """Clients with losses x'A_i x / 2 - b_i'x, very different ones, and a regularizer that the method handles."""

    def __init__(self, algorithm: AnyAlgorithm, clients: int = CLIENTS, features: int = 4, weights: Any = None) -> None:
        generator = torch.Generator().manual_seed(5)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        X = normal(clients, 2 * features, features) + 0.5 * normal(clients, 1, features)
        A = X.mT @ X / (2 * features)
        A = A / torch.linalg.eigvalsh(A)[:, -1:, None] + 0.1 * torch.eye(features, dtype=torch.float64)
        # Numbers of single precision, so that all precisions have the same solution.
        self.A = (A * LARGEST / 1.1).float().double()
        self.b = normal(clients, features).float().double()
        equal = torch.full((clients,), 1 / clients, dtype=torch.float64)
        self.weights = equal if weights is None else torch.as_tensor(weights)
        composite = "convex" in algorithm.info.regularizer
        self.h: Regularizer = L1(0.05) if composite else Zero()
        self.clients, self.features = clients, features

    def objective(self, x: Tensor) -> float:
        """F of a model, in double precision."""
        x = x.double()
        return float(self.weights @ ((self.A @ x) @ x / 2 - self.b @ x) + self.h.value(x))

    def stationarity(self, x: Tensor) -> float:
        """Norm of the prox-gradient mapping at step 1, in double precision."""
        x = x.double()
        return float((x - self.h.prox(x - self.weights @ (self.A @ x - self.b), 1.0)).norm())


class _Gradients:
    """The oracle of some clients of a probe, stacked."""

    def __init__(self, probe: LongRunProbe, who: Sequence[int], dtype: torch.dtype) -> None:
        rows = torch.tensor(who)
        self._A, self._b = probe.A[rows].to(dtype), probe.b[rows].to(dtype).unsqueeze(-1)
        self._minus = -self._b
        self.position, self.cohort, self.round, self.calls = torch.arange(len(who)).unsqueeze(-1), len(who), 0, 0

    def __call__(self, x: Tensor, k: int) -> Tensor:
        self.calls += 1
        return torch.baddbmm(self._minus, self._A, x.unsqueeze(-1)).squeeze(-1)

    def full(self, x: Tensor) -> Tensor:
        return self(x, 0)

    def loss(self, x: Tensor) -> Tensor:
        """x'Ax/2 - b'x."""
        value: Tensor = (x * (self(x, 0) - self._b.squeeze(-1))).sum(-1, keepdim=True) / 2
        return value

    def hessian(self, x: Tensor, where: Tensor) -> Tensor:
        at = where[0].nonzero().squeeze(1)
        part: Tensor = self._A[:, at][:, :, at]
        return part

    def uniform(self, k: int, count: int = 1) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * k + self.round)
        return torch.rand(self.cohort, count, generator=generator, dtype=torch.float64)


class Observation(NamedTuple):
    """A look at a run."""

    round: int
    x: Tensor
    stationarity: float


def play(
    algorithm: AnyAlgorithm,
    probe: LongRunProbe,
    rounds: int,
    *,
    every: int,
    dtype: torch.dtype = torch.float64,
    cohort: int | None = None,
    most: float = math.inf,
) -> Iterator[Observation]:
    """Run rounds and look at the model every so many.

    It ends early when nothing can happen any more, because the states are those of the look before and what the run
    draws has come round; and when the clients' local work has grown to ``most`` gradients in a round.
    """
    n, h, first = probe.clients, probe.h, algorithm.at(0)
    server, client = first.init(torch.zeros(probe.features, dtype=dtype), h)
    states = type(client)(*(t.expand(n, *t.shape).clone() for t in client))
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(PERIOD, generator=generator).tolist()
    drawn = [sorted((i + j) % n for j in range(cohort or n)) for i in order]
    oracles = [_Gradients(probe, who, dtype) for who in drawn]
    shares = [probe.weights[who].to(dtype).unsqueeze(-1) * (n / len(who)) for who in drawn]
    before: tuple[Tensor, ...] = ()
    for r in range(rounds):
        step = r // algorithm.exchanges % PERIOD
        who, grad, now = drawn[step], oracles[step], algorithm.at(r)
        grad.round, grad.calls = step, 0
        message = now.broadcast(server)
        stacked = type(message)(*(t.expand(len(who), *t.shape) for t in message))
        mine = states if cohort is None else type(states)(*(t[who] for t in states))
        reply, new = now.local_round(stacked, mine, grad, h)
        states = new if cohort is None else type(states)(*map(_put, states, [who] * len(new), new))
        reply = now.decode(reply)
        mean = type(reply)(*((shares[step].to(t.dtype) * t).sum(0) for t in reply))
        server = now.aggregate(server, mean, len(who) / n, h)
        full = grad.calls > most
        if full or (r + 1) % every == 0:
            x = now.solution(server, h)
            yield Observation(r + 1, x, probe.stationarity(x))
            after = (*server, *states)
            settled = len(before) == len(after) and all(map(torch.equal, before, after))
            if full or (settled and every % (PERIOD * algorithm.exchanges) == 0):
                return
            before = after


def _put(old: Tensor, rows: list[int], new: Tensor) -> Tensor:
    moved = old.clone()
    moved[rows] = new
    return moved


def _practical(cls: type[AnyAlgorithm], L: float, some: bool = False) -> AnyAlgorithm:
    """The method with the steps that it chooses for itself; ``some`` says that not all clients will take part."""
    try:
        return cls.auto_partial(L, local_steps=3) if some else cls.auto(L, local_steps=3)
    except TypeError as error:
        raise AssertionError(f"auto does not make the method: {error}") from error


def _forms(algorithm: AnyAlgorithm) -> list[tuple[AnyAlgorithm, int | None]]:
    """The method with everybody present, and with some clients sitting out where it allows that."""
    forms: list[tuple[AnyAlgorithm, int | None]] = [(algorithm, None)]
    if algorithm.partial:
        return [*forms, (algorithm, COHORT)]
    if "partial_participation" in (f.name for f in dataclasses.fields(algorithm)):  # type: ignore[arg-type]
        other = dataclasses.replace(algorithm, partial_participation=True)  # type: ignore[type-var]
        return [*forms, (other, None), (other, COHORT)]
    return forms


@law
def does_not_drift(algorithm: AnyAlgorithm, rounds: int = 20_000) -> None:
    """In single precision the model does not leave the solution again: rounding does not add up.

    The stationarity of the last 600 rounds is at most ten times the best that 600 rounds had. A method that is exact
    with cohorts is tried with cohorts (others move by the error of sampling, which would hide it), and one whose local
    work grows with the rounds is followed until a round has 200 local steps.
    """
    samples = algorithm.partial and algorithm.info.exact and algorithm.info.exact_partial
    forms = [(algorithm, COHORT)] if samples else [(algorithm, None)] if algorithm.partial else _forms(algorithm)
    for form, cohort in forms:
        probe, every, looks = LongRunProbe(form), 2 * PERIOD, 5
        run = play(form, probe, rounds, every=every, dtype=torch.float32, cohort=cohort, most=200)
        seen = [look.stationarity for look in run]
        parts = [max(seen[i : i + looks]) for i in range(0, len(seen), looks)]
        best, last = max(min(parts), 1e-7), parts[-1]
        assert last <= 10 * best, (
            f"with {cohort or 'all'} of {probe.clients} clients, stationarity in float32 was {best:.1e} and grew to "
            f"{last:.1e} in round {len(seen) * every}"
        )


@law
def exactness_is_measured(algorithm: AnyAlgorithm, rounds: int = 6000) -> None:
    """A method whose card says exact reaches a stationary point, or its residual keeps falling at a sublinear rate.

    The card is that of the class: the method is tried with its practical steps.
    """
    if not algorithm.info.exact:
        return
    for form, cohort in _forms(_practical(type(algorithm), LARGEST)):
        if cohort is not None and not form.info.exact_partial:
            continue
        left = residual(form, rounds, cohort)
        assert left <= 1e-8, (
            f"exact with {cohort or 'all'} of {CLIENTS} clients? {form} ends at stationarity {left:.1e}"
        )


def residual(algorithm: AnyAlgorithm, rounds: int = 6000, cohort: int | None = None) -> float:
    """The stationarity that a method is left with on the probe; 0 where it keeps falling."""
    seen = []
    for look in play(algorithm, LongRunProbe(algorithm), rounds, every=PERIOD, cohort=cohort, most=300):
        if look.stationarity <= 1e-9:
            return look.stationarity
        seen.append(look.stationarity)
    tenth = -(-len(seen) // 10)
    early, late = (sum(part) / tenth for part in (seen[tenth : 2 * tenth], seen[-tenth:]))
    return 0.0 if late < 0.5 * early else late


@law
def auto_steps_bear_weights(algorithm: AnyAlgorithm, rounds: int = 300) -> None:
    """Practical steps do not diverge when one silo of twenty holds 90 % of the data and 15 % take part in a round."""
    info, cls = algorithm.info, type(algorithm)
    weights = torch.tensor([0.9, *[0.1 / 19] * 19], dtype=torch.float64)
    L = LARGEST * amplification(weights.tolist(), 3)
    form = _forms(_practical(cls, L, some=True))[-1][0]
    if info.uniform_only or not form.partial:
        return
    probe = LongRunProbe(form, clients=20, weights=weights)
    looks = list(play(form, probe, rounds * cls.exchanges, every=5, cohort=3))
    first, values = probe.objective(torch.zeros(probe.features)), [probe.objective(s.x) for s in looks]
    start = probe.stationarity(torch.zeros(probe.features))
    assert max(values) <= first + 0.05 * (first - min(values)), (
        f"the objective grows from {first:.3g} to {max(values):.3g}"
    )
    assert looks[-1].stationarity <= start, f"stationarity grows from {start:.3g} to {looks[-1].stationarity:.3g}"


@law
def constant_schedules_change_nothing(algorithm: AnyAlgorithm) -> None:
    """A schedule that is constant gives the numbers of the constant, bit for bit."""
    plain = algorithm.at(0)
    for name in sorted(plain.schedulable):
        value = getattr(plain, name)
        if value is None:
            continue
        scheduled = _with(plain, name, Constant(value))
        assert scheduled.at(3) == plain
        for cohort in (None, COHORT) if plain.partial else (None,):
            one, two = (list(play(m, LongRunProbe(plain), 8, every=1, cohort=cohort)) for m in (plain, scheduled))
            assert all(torch.equal(a.x, b.x) for a, b in zip(one, two, strict=True)), f"{name} as a schedule differs"


@law
def steps_may_change(algorithm: AnyAlgorithm, rounds: int = 6000) -> None:
    """An exact method stays exact when a step that may change is halved along the way."""
    if not algorithm.info.exact:
        return
    practical = _practical(type(algorithm), LARGEST)
    for name in sorted(algorithm.schedulable):
        value = getattr(practical, name)
        halved = _with(practical, name, Piecewise((value, value / 2), (30,)))
        for form, cohort in _forms(halved):
            if cohort is not None and not form.info.exact_partial:
                continue
            left = residual(form, rounds, cohort)
            assert left <= 1e-8, f"after {name} was halved, stationarity ends at {left:.1e}"


def _with(algorithm: AnyAlgorithm, name: str, value: Any) -> AnyAlgorithm:
    changed: AnyAlgorithm = dataclasses.replace(algorithm, **{name: value})  # type: ignore[type-var]
    return changed
