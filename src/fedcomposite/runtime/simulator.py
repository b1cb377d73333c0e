"""All clients on one machine: every round of every client at once, or one client after another."""

from __future__ import annotations

import math
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from fedcomposite import rng
from fedcomposite.algorithms.base import AnyAlgorithm
from fedcomposite.problems import Batches, ClientGradients, Counter, Problem, Smooth, prox_gradient_norm
from fedcomposite.problems.base import Local, UnsuitableError
from fedcomposite.regularizers import Zero
from fedcomposite.runtime import checkpoint as checkpoints
from fedcomposite.runtime import messages
from fedcomposite.runtime.compiled import Program
from fedcomposite.runtime.history import Record, Run, Status
from fedcomposite.runtime.wrapped import Counted

Backend = Literal["stacked", "loop"]
Mode = Literal["eager", "record", "compile"]

RECORD_ROUNDS, COMPILE_ROUNDS = 10, 100
"""Rounds from which a GPU run is recorded as one program per round, and from which it is compiled as well."""

_SMALL = 1 << 18  # elements of data in a local step below which a second thread costs more than it gives


class ClientError(RuntimeError):
    """A client failed; the message names it and the round."""


class DivergenceWarning(RuntimeWarning):
    """A run left the finite numbers; its history is kept up to there."""


class NonSmoothWarning(UserWarning):
    """A method that needs a smooth loss was given one with kinks."""


class EagerWarning(UserWarning):
    """A round could not be recorded as one GPU program, and why."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C at a run: it stopped after a whole round, and ``run`` holds what was done."""

    def __init__(self, run: Run) -> None:
        super().__init__(run.message)
        self.run = run


class Simulator:
    """One method on one problem, round by round. :func:`simulate` drives it; use it directly to look inside a run.

    ``server`` and ``clients`` are the states after ``round`` rounds; ``buffers`` is what a model keeps beside its
    parameters, averaged over the participants of each round (empty for most models).
    """

    def __init__(
        self,
        problem: Problem,
        algorithm: AnyAlgorithm,
        *,
        batches: Batches,
        participation: float = 1.0,
        replace: bool = False,
        seed: int = 0,
        dtype: torch.dtype = torch.float64,
        device: str | torch.device = "cpu",
        backend: Backend = "stacked",
        x0: Any = None,
        mode: Mode = "eager",
    ) -> None:
        n = len(problem.silos)
        if not 0 < participation <= 1:
            raise ValueError(f"participation = {participation}, must be in (0, 1]")
        if backend not in ("stacked", "loop"):
            raise ValueError(f"backend = {backend!r}, must be 'stacked' or 'loop'")
        if torch.device(device).type == "cuda" and not torch.cuda.is_available():
            raise ValueError("device = 'cuda', but this torch sees no GPU; use device = 'cpu'")
        self.problem, self.algorithm, self.batches, self.backend = problem, algorithm, batches, backend
        self.smooth: Smooth = problem.smooth(dtype, device)
        self.cohort = max(1, round(participation * n))
        self.replace, self.seed = replace, seed
        self.counter = Counter()
        self.h = Counted(problem.regularizer, self.counter)
        self.round, self.bytes_up, self.bytes_down = 0, 0, 0
        self.x0, self.buffers = self._start(x0), self.smooth.buffers()
        self.server, client = algorithm.init(self.x0, problem.regularizer)
        self._check_fit(client)
        self.clients = messages.stack(client, n)
        if self.cohort < n:
            self.clients = messages.each(self.clients, torch.clone)  # rows are written one by one
        weights = problem.weights * n
        self._weights = None if problem.weighting == "uniform" else torch.from_numpy(weights).to(self.smooth.device)
        self._expect = 1
        self.mode: Mode = mode
        self._program: Program | None = None

    def _start(self, x0: Any) -> Tensor:
        if x0 is None:
            return self.smooth.start()
        start = torch.as_tensor(x0).detach().to(self.smooth.device, self.smooth.dtype).clone()
        if start.shape != (self.smooth.dimension,):
            raise ValueError(f"x0 has shape {tuple(start.shape)}, expected ({self.smooth.dimension},)")
        if not bool(torch.isfinite(start).all()):
            raise ValueError("x0 has NaN or infinite entries")
        return start

    def _check_fit(self, client: NamedTuple) -> None:
        """Refuse what the method cannot do, and name methods that can."""
        from fedcomposite.algorithms import REGISTRY

        info, name, n = self.algorithm.info, type(self.algorithm).__name__, len(self.problem.silos)
        if self.cohort < n and not self.algorithm.partial:
            able = ", ".join(k for k, v in REGISTRY.items() if v.info.participation == "any")
            raise ValueError(
                f"{name} needs every client in every round, but participation asks for {self.cohort} of {n}; "
                f"methods that allow it: {able}"
            )
        if self.replace and len(client):
            raise ValueError(
                f"{name} keeps state at its clients, so a client must not be drawn twice in a round; use replace=False"
            )
        if info.regularizer == "none" and not isinstance(self.problem.regularizer, Zero):
            able = ", ".join(k for k, v in REGISTRY.items() if "convex" in v.info.regularizer)
            raise ValueError(f"{name} has no rule for a regularizer; leave it out, or use a composite method: {able}")
        if not self.problem.loss.smooth and not info.nonsmooth_loss:
            able = ", ".join(k for k, v in REGISTRY.items() if v.info.nonsmooth_loss) or "none yet"
            warnings.warn(
                f"{name} is made for smooth losses and {self.problem.loss} has kinks: expect slow or no convergence; "
                f"methods made for it: {able}",
                NonSmoothWarning,
                stacklevel=4,
            )

    @property
    def threads(self) -> int | None:
        """One thread for small problems on a CPU (a second one only adds waiting); None leaves the setting alone."""
        if self.smooth.device.type != "cpu":
            return None
        per = self.batches.size or int(self.smooth.sizes.max())
        rows = per * (self.cohort if self.backend == "stacked" else 1)
        return 1 if rows * self.smooth.dimension < _SMALL else None

    @property
    def solution(self) -> Tensor:
        """The model to evaluate now."""
        return self.algorithm.solution(self.server, self.problem.regularizer)

    def participants(self, r: int) -> rng.Ints:
        """The clients of round r, sorted."""
        n = len(self.problem.silos)
        if self.cohort == n and not self.replace:
            return np.arange(n, dtype=np.uint64)
        return rng.choose(self.seed, r // self.algorithm.exchanges, n, self.cohort, self.replace).astype(np.uint64)

    def step(self) -> None:
        """Do one round."""
        who = self.participants(self.round)
        message = self.algorithm.broadcast(self.server)
        run = self._stacked if self.backend == "stacked" else self._loop
        replies, buffers = run(who, message)
        weights = None if self._weights is None else self._weights[torch.from_numpy(who.astype(np.int64))]
        share = len(who) / len(self.problem.silos)
        mean = messages.mean(self.algorithm.decode(replies), weights)
        self.server = self.algorithm.aggregate(self.server, mean, share, self.h)
        if weights is None:
            self.buffers = buffers.mean(0)
        else:
            self.buffers = torch.tensordot((weights / weights.sum()).to(buffers), buffers, dims=1)
        self.bytes_down += len(who) * (messages.nbytes(message) + self.buffers.nbytes)
        self.bytes_up += messages.nbytes(replies) + buffers.nbytes
        self.round += 1

    def _gradients(self, who: rng.Ints, place: tuple[int, int] | None = None) -> ClientGradients:
        return ClientGradients(
            self.smooth, who, self.round, self.batches, self.counter,
            stacked=place is None, expect=self._expect, place=place, buffers=self.buffers,
        )  # fmt: skip

    def _stacked(self, who: rng.Ints, message: NamedTuple) -> tuple[NamedTuple, Tensor]:
        grad = self._gradients(who)
        everyone = len(who) == len(self.problem.silos) and not self.replace
        rows = torch.from_numpy(who.astype(np.int64)).to(self.smooth.device)
        mine = self.clients if everyone else messages.take(self.clients, rows)
        program = self._recorded(message, mine, who, everyone)
        if program is None:
            replies, new = self.algorithm.local_round(messages.stack(message, len(who)), mine, grad, self.h)
            buffers, self._expect = grad.buffers, grad.steps_used
        else:
            replies, new, buffers = program(message, mine, self.buffers, who, self.round)
            self.counter.gradients += program.gradients
            self.counter.proxes += program.proxes
        if everyone:
            self.clients = new
        else:
            messages.put(self.clients, rows, new)
        stacked: NamedTuple = replies
        return stacked, buffers

    def _recorded(self, message: NamedTuple, mine: NamedTuple, who: rng.Ints, everyone: bool) -> Program | None:
        """The round as one program, made in the first round; None where it is carried out eagerly."""
        if self.mode != "eager" and self._program is None:
            try:
                self._program = Program(
                    self.algorithm, self.smooth, self.problem.regularizer, self.batches, message, mine, self.buffers,
                    who, everyone=everyone, compile=self.mode == "compile",
                )  # fmt: skip
            except UnsuitableError as reason:
                self.mode = "eager"
                name = type(self.algorithm).__name__
                warnings.warn(f"{name} runs step by step on the GPU: {reason}", EagerWarning, stacklevel=5)
        return self._program

    def _loop(self, who: rng.Ints, message: NamedTuple) -> tuple[NamedTuple, Tensor]:
        replies, states, buffers = [], [], []
        for position, i in enumerate(who):
            grad = self._gradients(np.asarray([i]), (position, len(who)))
            mine = messages.each(self.clients, lambda t, i=i: t[int(i)])
            try:
                reply, state = self.algorithm.local_round(message, mine, grad, self.h)
            except Exception as error:
                name = self.problem.silos.names[int(i)]
                raise ClientError(f"{name} (number {i}) failed in round {self.round + 1}: {error}") from error
            if not (messages.finite(reply) and messages.finite(state)):
                name = self.problem.silos.names[int(i)]
                warnings.warn(
                    f"{name} (number {i}) sent NaN or infinity in round {self.round + 1}",
                    DivergenceWarning,
                    stacklevel=4,
                )
            replies.append(reply)
            states.append(state)
            buffers.append(grad.buffers)
            self._expect = grad.steps_used
        if states[0]:
            rows = torch.from_numpy(who.astype(np.int64))
            self.clients = messages.each(self.clients, torch.clone)
            messages.put(self.clients, rows, type(states[0])(*map(torch.stack, zip(*states, strict=True))))
        stacked: NamedTuple = type(replies[0])(*map(torch.stack, zip(*replies, strict=True)))
        return stacked, torch.stack(buffers)

    def measure(self, stationarity_step: float, seconds: float) -> Record:
        """Evaluate the model: one pass over all the data."""
        h, x = self.problem.regularizer, self.solution
        seen = self.smooth.during(Local(self.buffers[None])).evaluate(x)
        loss = float(seen.loss)
        nonzeros = int((x != 0).sum())
        return Record(
            round=self.round,
            objective=loss + float(h.value(x)),
            loss=loss,
            stationarity=float(prox_gradient_norm(x, seen.gradient, h, stationarity_step)),
            stationarity_step=stationarity_step,
            nonzeros=nonzeros,
            sparsity=1 - nonzeros / len(x),
            bytes_up=self.bytes_up,
            bytes_down=self.bytes_down,
            prox_evaluations=self.counter.proxes,
            gradient_evaluations=self.counter.gradients,
            **{k: v.item() for k, v in seen.metrics.items()},
            seconds=seconds,
        )


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    if count is not None and count != before:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if count is not None and count != before:
            torch.set_num_threads(before)


@contextmanager
def _interrupts() -> Iterator[threading.Event]:
    """Turn Ctrl-C into a flag that is read between rounds; a second one stops at once."""
    flag = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield flag
        return
    before = signal.getsignal(signal.SIGINT)

    def on_signal(number: int, frame: Any) -> None:
        if flag.is_set():
            raise KeyboardInterrupt
        flag.set()

    signal.signal(signal.SIGINT, on_signal)
    try:
        yield flag
    finally:
        signal.signal(signal.SIGINT, before)


def simulate(
    problem: Problem,
    algorithm: AnyAlgorithm,
    *,
    rounds: int,
    batch_size: int | None = None,
    sampling: Literal["replacement", "epoch"] = "replacement",
    participation: float = 1.0,
    replace: bool = False,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    device: str | torch.device = "cpu",
    evaluate_every: int = 1,
    x0: Any = None,
    tolerance: float | None = None,
    stationarity_step: float | None = None,
    backend: Backend = "stacked",
    mode: Mode | Literal["auto"] = "auto",
    keep_solutions: bool = False,
    checkpoint: str | Path | None = None,
    checkpoint_every: int = 0,
    resume: bool = False,
    on_record: Callable[[Record], None] | None = None,
) -> Run:
    """Run a method on a problem and measure it.

    Parameters
    ----------
    problem, algorithm
        What to solve, and how.
    rounds : int
        Exchanges between server and clients.
    batch_size : int, optional
        Samples per local step; None uses all of a client's samples.
    sampling : {"replacement", "epoch"}
        Whether minibatches are drawn with replacement, or by shuffling each client's samples anew every round.
    participation : float
        Share of the clients that take part in a round, drawn at random; ``replace=True`` draws with replacement.
    seed : int
        Determines cohorts, minibatches and the methods' coins.
    evaluate_every : int
        Rounds between records; the first and the last model are always evaluated.
    x0 : array, optional
        Starting model; if left out, zero for linear models and a network's own parameters.
    tolerance : float, optional
        Stop when the stationarity of an evaluated model is at most this.
    stationarity_step : float, optional
        Step of the prox-gradient mapping whose norm is reported; :meth:`Problem.default_step` if left out.
    backend : {"stacked", "loop"}
        All clients at once, or one after another through the same code (slow; names a failing client).
    mode : {"auto", "eager", "record", "compile"}
        On a GPU, whether a local round is carried out operation by operation, recorded as one CUDA graph, or compiled
        and recorded (some seconds at the start). ``"auto"`` records from 10 rounds and compiles from 100; on a CPU it
        is eager. See :mod:`fedcomposite.runtime.compiled`.
    keep_solutions : bool
        Keep the model of every round in ``run.solutions``.
    checkpoint : path, optional
        A file for the state, replaced every ``checkpoint_every`` rounds, at the end, and at Ctrl-C.
        ``resume=True`` goes on from it (or starts, if there is none) and gives bit-identical results.
    on_record : callable, optional
        Called with every new record.

    Returns
    -------
    Run
        Solution, history, and why it stopped. A run that diverges warns and returns what it had.

    Raises
    ------
    Interrupted
        At Ctrl-C, after the current round; it is a KeyboardInterrupt that carries the run.

    Examples
    --------
    >>> import fedcomposite as fc
    >>> silos = fc.data.load("synthetic", clients=5, features=6, samples=20)
    >>> problem = fc.Problem(silos, loss="logistic", regularizer=fc.regularizers.L1(0.02))
    >>> method = fc.algorithms.FedNMap(local_steps=5, step=2.0, gamma=10.0)
    >>> run = fc.simulate(problem, method, rounds=500, tolerance=1e-8)
    >>> run.status
    'converged'
    """
    for name, value, least in (
        ("rounds", rounds, 0),
        ("evaluate_every", evaluate_every, 1),
        ("checkpoint_every", checkpoint_every, 0),
    ):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{name} = {value!r}, must be an integer >= {least}")
    if resume and keep_solutions:
        raise ValueError(
            "keep_solutions=True cannot be combined with resume=True: earlier models are not in the checkpoint"
        )
    sim = Simulator(
        problem, algorithm, batches=Batches(seed, batch_size, sampling), participation=participation, replace=replace,
        seed=seed, dtype=dtype, device=device, backend=backend, x0=x0, mode=_mode(mode, device, backend, rounds),
    )  # fmt: skip
    step = problem.default_step() if stationarity_step is None else stationarity_step
    path = None if checkpoint is None else Path(checkpoint)
    identity = "" if path is None else checkpoints.fingerprint(
        problem, sim.x0, algorithm=algorithm, batches=sim.batches, cohort=sim.cohort, replace=replace, seed=seed,
        dtype=dtype, evaluate_every=evaluate_every, backend=backend, step=step,
    )  # fmt: skip
    history: list[Record] = []
    elapsed = 0.0
    if resume and path is not None and path.exists():
        snapshot = checkpoints.load(path, sim.server, sim.clients, identity)
        sim.round, sim.server, sim.clients = snapshot.round, snapshot.server, snapshot.clients
        sim.bytes_up, sim.bytes_down, elapsed = snapshot.bytes_up, snapshot.bytes_down, snapshot.seconds
        sim.counter.gradients, sim.counter.proxes = snapshot.counter.gradients, snapshot.counter.proxes
        history, sim.buffers = snapshot.history, snapshot.buffers
        if on_record is not None:
            for old in history:
                on_record(old)
    began = time.perf_counter() - elapsed

    def snap() -> None:
        if path is not None:
            seconds = time.perf_counter() - began
            checkpoints.save(
                path,
                checkpoints.Snapshot(
                    sim.round,
                    sim.server,
                    sim.clients,
                    sim.counter,
                    sim.bytes_up,
                    sim.bytes_down,
                    seconds,
                    history,
                    sim.buffers,
                ),
                identity,
            )

    def record() -> Record:
        made = sim.measure(step, time.perf_counter() - began)
        history.append(made)
        if on_record is not None:
            on_record(made)
        return made

    def reached(made: Record) -> bool:
        return tolerance is not None and made["stationarity"] <= tolerance

    with _threads(sim.threads), _interrupts() as interrupted:
        last = history[-1] if history else record()
        solution, first = sim.solution, history[0]["objective"]
        kept = [solution] if keep_solutions else []
        status: Status = "converged" if reached(last) else "completed"
        while status == "completed" and sim.round < rounds and not interrupted.is_set():
            before = sim.server, sim.buffers
            sim.step()
            if not messages.finite(sim.server):
                status, (sim.server, sim.buffers) = "diverged", before
                break
            if keep_solutions:
                kept.append(sim.solution)
            if sim.round % evaluate_every == 0 or sim.round == rounds:
                last = record()
                if not math.isfinite(last["objective"]) or last["objective"] > 1e10 * max(1.0, abs(first)):
                    if math.isfinite(first):
                        status = "diverged"
                elif reached(last):
                    status = "converged"
            if status == "completed" and checkpoint_every and sim.round % checkpoint_every == 0:
                snap()
        stopped = interrupted.is_set() and status == "completed" and sim.round < rounds
        if stopped:
            status = "interrupted"
        if status != "diverged":
            snap()
        if stopped and history[-1]["round"] != sim.round:
            record()
    message = {
        "completed": f"all {rounds} rounds done",
        "converged": f"stationarity reached {last['stationarity']:.2e} in round {last['round']}",
        "interrupted": f"stopped by Ctrl-C after round {sim.round}",
        "diverged": _blame(problem, algorithm, sim.round),
    }[status]
    run = Run(
        sim.solution, history, status, message, sim.round, sim.server, sim.clients,
        torch.stack(kept) if keep_solutions else None, sim.buffers,
    )  # fmt: skip
    if status == "diverged":
        warnings.warn(message, DivergenceWarning, stacklevel=2)
    if status == "interrupted":
        raise Interrupted(run)
    return run


def _mode(mode: str, device: str | torch.device, backend: str, rounds: int) -> Mode:
    """How to carry out local rounds; a rule, never a timing, so that a resumed run does the same."""
    if mode not in ("auto", "eager", "record", "compile"):
        raise ValueError(f"mode = {mode!r}, must be 'auto', 'eager', 'record' or 'compile'")
    gpu = torch.device(device).type == "cuda"
    if mode in ("record", "compile") and not (gpu and backend == "stacked"):
        raise ValueError(f"mode = {mode!r} is for device = 'cuda' and backend = 'stacked'")
    if mode != "auto":
        return cast(Mode, mode)
    if not gpu or backend != "stacked" or rounds < RECORD_ROUNDS:
        return "eager"
    return "compile" if rounds >= COMPILE_ROUNDS else "record"


def _blame(problem: Problem, algorithm: AnyAlgorithm, r: int) -> str:
    """Say why a run probably diverged."""
    try:
        L = problem.smoothness()
    except ValueError:  # unknown for networks and for losses with kinks
        L = 0.0
    steps = {k: v for k, v in vars(algorithm).items() if k in ("step", "server_step")}
    shown = ", ".join(f"{k} = {v:g}" for k, v in steps.items())
    advice = f"the largest client has L = {L:g}, so try step <= {1 / L:.3g}" if L > 0 else "try a smaller step"
    return f"{type(algorithm).__name__} diverged in round {r}: the step is probably too large ({shown}); {advice}"
