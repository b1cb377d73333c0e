"""All clients on one machine: every round of every client at once, or one client after another."""

from __future__ import annotations

import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from fedcomposite import rng
from fedcomposite.algorithms.base import AnyAlgorithm, Empty
from fedcomposite.problems import Batches, ClientGradients, Counter, Problem, Smooth
from fedcomposite.problems.base import Local, UnsuitableError
from fedcomposite.regularizers import Zero
from fedcomposite.runtime import checkpoint as checkpoints
from fedcomposite.runtime import distributed as processes
from fedcomposite.runtime import memory, messages, states
from fedcomposite.runtime.compiled import Program
from fedcomposite.runtime.history import Record, Run, Status
from fedcomposite.runtime.rounds import make_record, mean_buffers, verdict
from fedcomposite.runtime.wrapped import Counted

Backend = Literal["stacked", "loop"]
Mode = Literal["eager", "record", "compile"]

RECORD_ROUNDS, COMPILE_ROUNDS = 10, 100
"""Rounds from which a GPU run is recorded as one program per round, and from which it is compiled as well."""

_ROOM = 1 << 22  # entries of a stacked vector up to which temporaries stay near the cores, on a CPU
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
    parameters, averaged over the participants of each round (empty for most models). ``states`` holds the clients'
    states row by row. In a ``group`` of processes it has the rows of this process's clients, which are consecutive,
    and bytes and evaluations are counted for these; :attr:`totals` are everyone's.
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
        state_dir: str | Path | None = None,
        memory_limit: float | None = None,
        group: processes.Group | None = None,
    ) -> None:
        n = len(problem.silos)
        if not 0 < participation <= 1:
            raise ValueError(f"participation = {participation}, must be in (0, 1]")
        if backend not in ("stacked", "loop"):
            raise ValueError(f"backend = {backend!r}, must be 'stacked' or 'loop'")
        if torch.device(device).type == "cuda" and not torch.cuda.is_available():
            raise ValueError("device = 'cuda', but this torch sees no GPU; use device = 'cpu'")
        self.problem, self.algorithm, self.batches, self.backend = problem, algorithm, batches, backend
        self.group, self.span = group, processes.Span(0, n) if group is None else group.span(n)
        self.smooth: Smooth = (
            problem.smooth(dtype, device)
            if group is None
            else processes.shard(problem, group, dtype, torch.device(device))
        )
        self.cohort = max(1, round(participation * n))
        self.replace, self.seed = replace, seed
        self.counter = Counter()
        self.h = Counted(problem.regularizer, self.counter)
        self.round, self.bytes_up, self.bytes_down = 0, 0, 0
        self.x0, self.buffers = self._start(x0), self.smooth.buffers()
        self.server, client = algorithm.init(self.x0, problem.regularizer)
        self._check_fit(client)
        size = self.span.stop - self.span.start
        self.states = states.ClientStates(client, size, folder=state_dir, limit=memory_limit)
        self._everyone = self.cohort == n and not replace
        weights = problem.weights * n
        self._weights = None if problem.weighting == "uniform" else torch.from_numpy(weights).to(self.smooth.device)
        self._expect = 1
        self.mode: Mode = mode
        self._program: Program | None = None
        self.stop = False
        """Set to ask for an end; in a group, a round tells the others, and it is true for all after the round."""

    @property
    def clients(self) -> Any:
        """The clients' states, a tuple of tensors ``(n, ...)``; for very many clients see ``states.take(rows)``."""
        return self.states.everyone()

    @clients.setter
    def clients(self, new: NamedTuple) -> None:
        self.states.put(None, new)

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
        from fedcomposite.algorithms import REGISTRY, fields

        info, name, n = self.algorithm.info, type(self.algorithm).__name__, len(self.problem.silos)
        if self.cohort < n and not self.algorithm.partial:
            able = ", ".join(k for k, v in REGISTRY.items() if v.info.participation == "any")
            own = "partial_participation" in fields(type(self.algorithm))
            hint = f"; or set partial_participation=True, {name}'s own form for it" if own else ""
            raise ValueError(
                f"{name} needs every client in every round, but participation asks for {self.cohort} of {n}; "
                f"methods that allow it: {able}{hint}"
            )
        if self.replace and len(client):
            raise ValueError(
                f"{name} keeps state at its clients, so a client must not be drawn twice in a round; use replace=False"
            )
        if info.uniform_only and self.problem.weighting != "uniform":
            raise ValueError(f"{name} averages masked replies, which only works with weights='uniform'")
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

    @contextmanager
    def running(self) -> Iterator[None]:
        """Settings of the process under which rounds are fastest: threads, and memory that is not given back."""
        with threads(self.threads), memory.kept() if self.smooth.device.type == "cpu" else nullcontext():
            yield

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
        n, mine, place = len(self.problem.silos), who, (0, len(who))
        if self.group is not None:
            first, last = np.searchsorted(who, np.asarray(self.span, np.uint64)).tolist()
            mine, place = who[first:last] - np.uint64(self.span.start), (first, len(who))
        if len(mine):
            replies, buffers = run(mine, message, place)
            decoded = self.algorithm.decode(replies)
            self.bytes_up += messages.nbytes(replies) + buffers.nbytes
        else:
            decoded, buffers = self._nothing(message, len(who))
        weights = None if self._weights is None else self._weights[torch.from_numpy(who.astype(np.int64))]
        if self.group is None:
            mean, self.buffers = messages.mean(decoded, weights), mean_buffers(buffers, weights)
        else:
            mean, self.buffers = self._meet(decoded, buffers, weights, place)
        # Every process does what the server does; it counts once.
        h = self.h if self.group is None or self.group.rank == 0 else self.problem.regularizer
        self.server = self.algorithm.aggregate(self.server, mean, len(who) / n, h)
        self.bytes_down += len(mine) * (messages.nbytes(message) + self.buffers.nbytes)
        self.round += 1

    def _meet(
        self, decoded: NamedTuple, buffers: Tensor, weights: Tensor | None, place: tuple[int, int]
    ) -> tuple[NamedTuple, Tensor]:
        """The mean reply and buffers of all participants, from those of this process: one all-reduce."""
        assert self.group is not None
        first, cohort = place
        everyone = torch.ones(cohort, device=buffers.device) if weights is None else weights
        mine = everyone[first : first + len(buffers)]
        sums = [torch.tensordot(mine.to(t.dtype), t, dims=1) for t in (*decoded, buffers)]
        *sums, stop = self.group.add([*sums, torch.full((1,), float(self.stop)).to(buffers)])
        self.stop = bool(stop > 0)
        mean = iter(t / cohort for t in sums[:-1])
        return messages.each(decoded, lambda t: next(mean)), sums[-1] / everyone.sum().to(sums[-1])

    def _nothing(self, message: NamedTuple, cohort: int) -> tuple[NamedTuple, Tensor]:
        """Decoded replies and buffers of no client; the first client here does the round for their shape alone."""
        grad = ClientGradients(
            self.smooth, np.zeros(1, np.uint64), self.round, self.batches, Counter(),
            expect=self._expect, place=(0, cohort), buffers=self.buffers,
        )  # fmt: skip
        replies, _ = self.algorithm.local_round(
            messages.stack(message, 1), self.states.take([0]), grad, self.problem.regularizer
        )
        decoded: NamedTuple = messages.each(self.algorithm.decode(replies), lambda t: t[:0])
        return decoded, grad.buffers[:0]

    def _gradients(
        self, who: rng.Ints, place: tuple[int, int] | None = None, *, stacked: bool = True
    ) -> ClientGradients:
        return ClientGradients(
            self.smooth, who, self.round, self.batches, self.counter,
            stacked=stacked, expect=self._expect, place=place, buffers=self.buffers,
        )  # fmt: skip

    def _stacked(self, who: rng.Ints, message: NamedTuple, place: tuple[int, int]) -> tuple[NamedTuple, Tensor]:
        rows = None if self._everyone else who
        mine = self.states.take(rows)
        program = self._recorded(message, mine, who, self._everyone)
        if program is None:
            cpu = self.smooth.device.type == "cpu"
            per = max(1, _ROOM // self.smooth.dimension) if cpu else len(who)
            chunks = [slice(a, a + per) for a in range(0, len(who), per)]
            parts = [self._together(who[c], message, mine, c, place) for c in chunks]
            replies, new, buffers = parts[0] if len(parts) == 1 else map(messages.join, zip(*parts, strict=True))
        else:
            replies, new, buffers = program(message, mine, self.buffers, who, self.round)
            self.counter.gradients += program.gradients
            self.counter.proxes += program.proxes
        self.states.put(rows, new)
        stacked: NamedTuple = replies
        return stacked, buffers

    def _together(
        self, who: rng.Ints, message: NamedTuple, mine: NamedTuple, chunk: slice, place: tuple[int, int]
    ) -> tuple[NamedTuple, NamedTuple, Tensor]:
        """Replies, states and buffers of some clients, as one stacked computation."""
        grad = self._gradients(who, (place[0] + chunk.start, place[1]))
        states = messages.each(mine, lambda t: t[chunk])
        replies, new = self.algorithm.local_round(messages.stack(message, len(who)), states, grad, self.h)
        self._expect = grad.steps_used
        return replies, new, grad.buffers

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

    def _loop(self, who: rng.Ints, message: NamedTuple, place: tuple[int, int]) -> tuple[NamedTuple, Tensor]:
        replies, after, buffers = [], [], []
        for position, i in enumerate(who, place[0]):
            grad = self._gradients(np.asarray([i]), (position, place[1]), stacked=False)
            mine = messages.each(self.states.take([int(i)]), lambda t: t[0])
            try:
                reply, state = self.algorithm.local_round(message, mine, grad, self.h)
            except Exception as error:
                raise ClientError(f"{self._name(i)} failed in round {self.round + 1}: {error}") from error
            if not (messages.finite(reply) and messages.finite(state)):
                warnings.warn(
                    f"{self._name(i)} sent NaN or infinity in round {self.round + 1}",
                    DivergenceWarning,
                    stacklevel=4,
                )
            replies.append(reply)
            after.append(state)
            buffers.append(grad.buffers)
            self._expect = grad.steps_used
        new = type(after[0])(*map(torch.stack, zip(*after, strict=True)))
        self.states.put(None if self._everyone else who, new)
        stacked: NamedTuple = type(replies[0])(*map(torch.stack, zip(*replies, strict=True)))
        return stacked, torch.stack(buffers)

    def _name(self, i: Any) -> str:
        number = int(i) + self.span.start
        return f"{self.problem.silos.names[number]} (number {number})"

    @property
    def totals(self) -> tuple[int, int, int, int]:
        """Gradients, proxes, bytes up and bytes down since the start, of all processes."""
        mine = self.counter.gradients, self.counter.proxes, self.bytes_up, self.bytes_down
        if self.group is None:
            return mine
        gradients, proxes, up, down = self.group.add_integers(*mine, device=self.smooth.device)
        return gradients, proxes, up, down

    def measure(self, stationarity_step: float, seconds: float) -> Record:
        """Evaluate the model: one pass over all the data."""
        h, x = self.problem.regularizer, self.solution
        seen = self.smooth.during(Local(self.buffers[None])).evaluate(x)
        if self.group is not None:
            seen = processes.merge(self.group, seen)
        gradients, proxes, up, down = self.totals
        return make_record(
            x, seen, h, round=self.round, step=stationarity_step, bytes_up=up, bytes_down=down,
            counter=Counter(gradients, proxes), seconds=seconds,
        )  # fmt: skip


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """With so many of torch's threads; None leaves the setting alone."""
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
    state_dir: str | Path | None = None,
    memory_limit: float | None = None,
    distributed: bool | None = None,
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
    memory_limit : int, optional
        Bytes of clients' states above which they are kept in a file that is mapped into memory, with
        ``participation`` below 1; half of the available memory if left out.
    state_dir : path, optional
        Folder of that file; the system's temporary folder if left out. It should not be a disk in memory.
    distributed : bool, optional
        Share the clients out to the processes of ``torch.distributed``. If left out, it is done when a process group
        is there; True initialises one under ``torchrun``. Local rounds are then carried out eagerly. Process 0 calls
        ``on_record`` and writes the checkpoint, and each process the states of its own clients beside it, in a folder
        that all must see in order to resume.

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
    group = processes.join(distributed, torch.device(device))
    if group is not None and mode in ("record", "compile"):
        raise ValueError(f"mode = {mode!r} is for one process; several carry out local rounds eagerly")
    if group is not None and group.rank > 0:
        on_record = None
    sim = Simulator(
        problem, algorithm, batches=Batches(seed, batch_size, sampling), participation=participation, replace=replace,
        seed=seed, dtype=dtype, device=device, backend=backend, x0=x0,
        mode=_mode(mode, device, backend, rounds if group is None else 0),
        state_dir=state_dir, memory_limit=memory_limit, group=group,
    )  # fmt: skip
    step = problem.default_step() if stationarity_step is None else stationarity_step
    path = None if checkpoint is None else Path(checkpoint)
    identity = "" if path is None else checkpoints.fingerprint(
        problem, sim.x0, algorithm=algorithm, batches=sim.batches, cohort=sim.cohort, replace=replace, seed=seed,
        dtype=dtype, evaluate_every=evaluate_every, backend=backend, step=step,
    )  # fmt: skip
    history: list[Record] = []
    elapsed = 0.0

    def named() -> str:
        return f"{identity[:16]}-{sim.round}"

    if resume and path is not None and path.exists():
        snapshot = checkpoints.load(path, sim.server, Empty(), identity)
        sim.round, sim.server, sim.buffers = snapshot.round, snapshot.server, snapshot.buffers
        sim.states.load(path, named(), sim.span.start)
        history, elapsed = snapshot.history, snapshot.seconds
        if group is None or group.rank == 0:  # what was counted before
            sim.bytes_up, sim.bytes_down = snapshot.bytes_up, snapshot.bytes_down
            sim.counter.gradients, sim.counter.proxes = snapshot.counter.gradients, snapshot.counter.proxes
        if on_record is not None:
            for old in history:
                on_record(old)
    began = time.perf_counter() - elapsed
    saved = -1

    def snap() -> None:
        nonlocal saved
        if path is None or saved == sim.round:
            return
        saved = sim.round
        part = (0, 1) if group is None else (group.rank, group.size)
        held = sim.states.save(path, named(), sim.span.start, part)
        gradients, proxes, up, down = sim.totals  # in a group, nobody gets past this before all have come to it
        if part[0] == 0:
            checkpoints.save(
                path,
                checkpoints.Snapshot(
                    sim.round, sim.server, held, Counter(gradients, proxes), up, down,
                    time.perf_counter() - began, history, sim.buffers,
                ),
                identity,
            )  # fmt: skip
            states.tidy(path, named())
        if group is not None:
            group.wait()

    def record() -> Record:
        made = sim.measure(step, time.perf_counter() - began)
        history.append(made)
        if on_record is not None:
            on_record(made)
        return made

    with sim.running(), _interrupts() as interrupted:

        def stop() -> bool:  # the processes of a group must end after the same round
            return interrupted.is_set() if group is None else sim.stop

        last = history[-1] if history else record()
        kept = [sim.solution] if keep_solutions else []
        status: Status = verdict(last, history[0], tolerance)
        while status == "completed" and sim.round < rounds and not stop():
            before = sim.server, sim.buffers
            sim.stop = interrupted.is_set()
            sim.step()
            if not messages.finite(sim.server):
                status, (sim.server, sim.buffers) = "diverged", before
                break
            if keep_solutions:
                kept.append(sim.solution)
            if sim.round % evaluate_every == 0 or sim.round == rounds:
                last = record()
                status = verdict(last, history[0], tolerance)
            if status == "completed" and checkpoint_every and sim.round % checkpoint_every == 0:
                snap()
        stopped = stop() and status == "completed" and sim.round < rounds
        if stopped:
            status = "interrupted"
        if status != "diverged":
            snap()
        if stopped and history[-1]["round"] != sim.round:
            record()
    if status == "diverged":
        message = _blame(problem, algorithm, sim.round)
    else:
        message = {
            "completed": f"all {rounds} rounds done",
            "converged": f"stationarity reached {last['stationarity']:.2e} in round {last['round']}",
            "interrupted": f"stopped by Ctrl-C after round {sim.round}",
        }[status]
        if sim._program is not None:
            done = "compiled" if sim.mode == "compile" else "recorded"
            message += f" (rounds {done} for the GPU in {sim._program.seconds:.1f} s)"
    run = Run(
        sim.solution, history, status, message, sim.round, sim.server,
        sim.clients if sim.states.small or sim._everyone else sim.states,
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
