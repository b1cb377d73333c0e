"""All clients on one machine: a driver on a local transport."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypedDict, cast

import torch
from torch import Tensor

from fedcomposite import rng, theory
from fedcomposite._validation import Count, Natural, Positive, ZeroOrMore, as_vector
from fedcomposite.aggregators import AnyAggregator, read
from fedcomposite.algorithms.base import AnyAlgorithm
from fedcomposite.compressed import Compressed
from fedcomposite.compressors import Compressor
from fedcomposite.privacy import Privacy
from fedcomposite.problems import Batches, ClientGradients, Counter, Problem, Smooth
from fedcomposite.regularizers.target import Share, Structure
from fedcomposite.runtime import checkpoint as checkpoints
from fedcomposite.runtime import distributed as processes
from fedcomposite.runtime.callbacks.base import AnyCallback, OnRecord
from fedcomposite.runtime.callbacks.progress import Progress, somebody_watches
from fedcomposite.runtime.callbacks.stopping import BestModel, EarlyStopping
from fedcomposite.runtime.cohorts import Cohorts
from fedcomposite.runtime.fit import autocast_fault, check_fit, check_given, device_fault, model_fault
from fedcomposite.runtime.history import DeadNetworkWarning, DivergenceWarning, GrowthWarning, Interrupted, Record, Run
from fedcomposite.runtime.identity import Identity, identify
from fedcomposite.runtime.program import Mode
from fedcomposite.runtime.protection import Spending, check_aggregator, check_privacy
from fedcomposite.runtime.records import DOUBLED, growth
from fedcomposite.runtime.rounds import Plan, Rounds
from fedcomposite.runtime.states import ClientStates
from fedcomposite.runtime.transports import LocalTransport, Loop, Stacked

Backend = Literal["stacked", "loop"]

RECORD_ROUNDS, COMPILE_ROUNDS = 10, 100
"""Rounds from which a GPU run is recorded as one program per round, and from which it is compiled as well."""


class Simulator(Rounds):
    """A driver whose clients are here. :func:`simulate` runs it; use it directly to look inside a run.

    ``server`` and ``clients`` are the states after ``round`` rounds. In a ``group`` of processes it has the rows of
    this process's clients, which are consecutive, and ``counter`` counts for these.
    """

    transport: LocalTransport

    def __init__(
        self,
        problem: Problem,
        algorithm: AnyAlgorithm,
        *,
        batches: Batches,
        participation: float = 1.0,
        replace: bool = False,
        seed: int = 0,
        dtype: torch.dtype | None = None,
        device: str | torch.device = "cpu",
        backend: Backend = "stacked",
        x0: Any = None,
        mode: Mode = "eager",
        state_dir: str | Path | None = None,
        memory_limit: float | None = None,
        group: processes.Group | processes.Alone | None = None,
        stationarity_step: float | None = None,
        privacy: Privacy | None = None,
        aggregator: AnyAggregator | None = None,
    ) -> None:
        if backend not in ("stacked", "loop"):
            raise ValueError(f"backend = {backend!r}, must be 'stacked' or 'loop'")
        if fault := device_fault(device) or autocast_fault(problem, device):
            raise ValueError(fault)
        self.problem, self.batches, self.backend = problem, batches, backend
        dtype = problem.dtype if dtype is None else dtype
        cohorts, aggregator = Cohorts(len(problem.silos), participation, replace, seed), read(aggregator)
        check_fit(algorithm, problem, cohorts, clip_norm=batches.clip_norm, dtype=dtype, stacklevel=3)
        shared: dict[str, Any] = {
            "batches": batches, "dtype": dtype, "device": torch.device(device), "cohort": cohorts.size,
            "replace": replace, "state_dir": state_dir, "memory_limit": memory_limit, "group": group,
            "privacy": privacy, "aggregator": aggregator,
        }  # fmt: skip
        transport = (
            Stacked(problem, algorithm, mode=mode, **shared)
            if backend == "stacked"
            else Loop(problem, algorithm, **shared)
        )
        transport.smooth.check_batches(batches.size, problem.silos)
        check_privacy(privacy, algorithm, transport.smooth, batches, cohorts, problem.weights)
        check_aggregator(aggregator, privacy, algorithm, cohorts.size, problem.weighting)
        start = _start(transport.smooth, x0)
        super().__init__(
            algorithm, problem.regularizer, transport, start, cohorts=cohorts, buffers=transport.smooth.buffers(),
            stationarity_step=problem.default_step() if stationarity_step is None else stationarity_step,
            spending=None if privacy is None else Spending(privacy, cohorts, algorithm.exchanges),
        )  # fmt: skip
        transport.begin(algorithm.at(0).init(start, problem.regularizer.during(0))[1])

    @property
    def clients(self) -> Any:
        """The clients' states, a tuple of tensors ``(n, ...)``; for very many clients see ``states.take(rows)``."""
        return self.states.everyone()

    @clients.setter
    def clients(self, new: NamedTuple) -> None:
        self.states.put(None, new)

    @property
    def states(self) -> ClientStates:
        """The clients' states, row by row."""
        return self.transport.rows

    @property
    def smooth(self) -> Smooth:
        """The clients' functions."""
        return self.transport.smooth

    @property
    def counter(self) -> Counter:
        """Work and bytes so far, of this process."""
        return self.transport.counter

    @property
    def mode(self) -> Mode:
        """How local rounds are carried out."""
        return self.transport.mode if isinstance(self.transport, Stacked) else "eager"

    def gradients(
        self, who: rng.Ints, place: tuple[int, int] | None = None, *, stacked: bool = True
    ) -> ClientGradients:
        """The gradient oracle of some clients in the next round."""
        return self.transport.gradients(who, self.round, self.buffers, place, stacked=stacked)


def _start(smooth: Smooth, x0: Any) -> Tensor:
    if x0 is None:
        return smooth.start()
    start = as_vector(x0, "x0").detach().to(smooth.device, smooth.dtype).clone()
    if fault := model_fault("x0", start, smooth.dimension):
        raise ValueError(fault)
    return start


class SimulateOptions(TypedDict, total=False):
    """Those settings of :func:`simulate` that a function which runs a method passes on."""

    batch_size: Count | None
    sampling: Literal["replacement", "epoch"]
    clip_norm: Positive | None
    participation: float
    replace: bool
    seed: Natural
    dtype: torch.dtype | None
    device: str | torch.device
    evaluate_every: Count
    stationarity_step: Positive | None
    backend: Backend
    mode: Mode | Literal["auto"]
    keep_solutions: bool
    checkpoint: str | Path | None
    checkpoint_every: Natural
    resume: bool
    on_record: Callable[[Record], None] | None
    callbacks: Sequence[AnyCallback]
    progress: bool | None
    state_dir: str | Path | None
    memory_limit: float | None
    distributed: bool | None
    process_settings: bool
    privacy: Privacy | None
    aggregator: AnyAggregator | None
    compressor: Compressor | None
    sparsity: Share | None
    structure: Structure


def simulate(
    problem: Problem,
    algorithm: AnyAlgorithm,
    *,
    rounds: Natural,
    batch_size: Count | None = None,
    sampling: Literal["replacement", "epoch"] = "replacement",
    clip_norm: Positive | None = None,
    participation: float = 1.0,
    replace: bool = False,
    seed: Natural = 0,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    evaluate_every: Count = 1,
    x0: Any = None,
    tolerance: ZeroOrMore | None = None,
    stationarity_step: Positive | None = None,
    backend: Backend = "stacked",
    mode: Mode | Literal["auto"] = "auto",
    keep_solutions: bool = False,
    checkpoint: str | Path | None = None,
    checkpoint_every: Natural = 0,
    resume: bool = False,
    on_record: Callable[[Record], None] | None = None,
    callbacks: Sequence[AnyCallback] = (),
    progress: bool | None = None,
    state_dir: str | Path | None = None,
    memory_limit: float | None = None,
    distributed: bool | None = None,
    process_settings: bool = True,
    privacy: Privacy | None = None,
    aggregator: AnyAggregator | None = None,
    compressor: Compressor | None = None,
    sparsity: Share | None = None,
    structure: Structure = "weights",
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
    clip_norm : float, optional
        Clients scale a gradient of theirs that is longer than this down to it, in every local step and before a method
        corrects it. The fixed points of a method are then those of the clipped gradients.
    participation : float
        Share of the clients that take part in a round, drawn at random; ``replace=True`` draws with replacement.
    seed : int
        Determines cohorts, minibatches and the methods' coins.
    dtype : torch.dtype, optional
        Of models, messages and states; float64 for linear models and float32 for networks if left out.
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
        is eager; a resumed run keeps the mode it began with. See :mod:`fedcomposite.runtime.program`.
    keep_solutions : bool
        Keep the model of every round in ``run.solutions``.
    checkpoint : path, optional
        A file for the state, replaced every ``checkpoint_every`` rounds, at the end, and at Ctrl-C.
        ``resume=True`` goes on from it (or starts, if there is none) and gives bit-identical results. Functions that
        determine the numbers (a model's loss, ``transform``, ``augment``) must then have names that can be imported.
    on_record : callable, optional
        Called with every record, those before a resumed run's checkpoint included.
    callbacks : sequence, optional
        Called after each record with a view of the run (:class:`fedcomposite.callbacks.View`); they may stop it.
    progress : bool, optional
        A live line with round, objective and time left; if left out, it is shown in a notebook, and elsewhere when the
        error output is a terminal.
    process_settings : bool
        While the run lasts, use one thread for small problems, keep freed memory, and end after a whole round at
        Ctrl-C. All of it is undone at the end, and left alone off the main thread.
    memory_limit : int, optional
        Bytes of clients' states above which they are kept in a file that is mapped into memory, with
        ``participation`` below 1; half of the available memory if left out.
    state_dir : path, optional
        Folder of that file; the system's temporary folder if left out. It should not be a disk in memory.
    distributed : bool, optional
        Share the clients out to the processes of ``torch.distributed``. If left out, it is done when a process group
        is there; True initialises one under ``torchrun``. Process 0 calls ``on_record`` and writes the checkpoint, and
        each process the states of its own clients beside it, in a folder that all must see in order to resume.
    privacy : privacy.SampleLevel or privacy.ClientLevel, optional
        Clip and noise what clients compute, or what they reply; records then tell the epsilon that the run has cost so
        far. The records themselves are exact: a simulator's own look, which no site would give away.
    aggregator : aggregators.Aggregator or callable, optional
        A robust mean of the replies in place of the mean.
    compressor : compressors.Compressor, optional
        What clients keep of their replies; the rest comes later, by error feedback
        (:class:`fedcomposite.compressed.Compressed`). Steps must be smaller then.
    sparsity : float, optional
        The share of all parameters that is to be zero at the end: strengths, layers and the way there are found by the
        run (:class:`fedcomposite.regularizers.SparsityTarget`).
    structure : {"weights", "filters", "2:4"}
        What becomes zero: single weights, whole filters, or two of every four weights along the inputs.

    Returns
    -------
    Run
        Solution, history, and why it stopped. A run that diverges warns and returns what it had; so does one that ends
        with more than twice its first objective.

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
    problem, algorithm = _asked(dict(locals()))
    group = processes.join(distributed, torch.device(device))
    _check_protected(privacy, aggregator, group.size, mode, tolerance, callbacks)
    path = None if checkpoint is None else Path(checkpoint)
    old = path if resume and path is not None and path.exists() else None
    sim = Simulator(
        problem, algorithm, batches=Batches(seed, batch_size, sampling, clip_norm),
        participation=participation, replace=replace, seed=seed, dtype=dtype, device=device, backend=backend, x0=x0,
        stationarity_step=stationarity_step,
        mode=_mode(mode, device, backend, rounds if privacy is None else 0, old),
        state_dir=state_dir, memory_limit=memory_limit, group=group, privacy=privacy, aggregator=aggregator,
    )  # fmt: skip
    if path is not None:
        sim.identity = _identity(sim, evaluate_every)
    if old is not None:
        sim.resume(old)
    watchers = [*([OnRecord(on_record)] if on_record is not None else []), *callbacks]
    if somebody_watches() if progress is None else progress:
        watchers.append(Progress())
    plan = Plan(
        rounds, evaluate_every, tolerance, path, checkpoint_every, keep_solutions, watchers, process_settings,
        blame=lambda r: _blame(sim, r), dead=problem.dead,
    )  # fmt: skip
    return _told(sim.run(plan))


def _asked(given: dict[str, Any]) -> tuple[Problem, AnyAlgorithm]:
    """The problem, with the zeros that are wanted, and the method, compressed if it shall be.

    Wrong arguments of :func:`simulate` are told in one error.
    """
    checkpoint, resume, lines = given["checkpoint"], given["resume"], []
    if checkpoint is None and (resume or given["checkpoint_every"]):
        lines.append(f"{'resume' if resume else 'checkpoint_every'} needs a file: checkpoint=PATH")
    if resume and given["keep_solutions"]:
        lines.append("keep_solutions=True and resume=True: earlier models are not in the checkpoint; leave one of them")
    check_given(simulate, given, *lines)
    if checkpoint is not None and Path(checkpoint).is_dir():
        raise ValueError(f"checkpoint = {str(checkpoint)!r} is a folder; give a file in it")
    problem, algorithm = given["problem"], given["algorithm"]
    if given["sparsity"] is not None:
        problem = problem.with_zeros(given["sparsity"], given["structure"], rounds=given["rounds"])
    if given["compressor"] is not None:
        algorithm = Compressed(algorithm, given["compressor"], everybody=given["participation"] == 1)
    return problem, algorithm


def _identity(sim: Simulator, evaluate_every: int) -> Identity:
    """What a checkpoint of this run is known by."""
    carrier, cohorts = sim.transport, sim.cohorts
    return identify(
        sim.problem, sim.x0, method=sim.algorithm, batches=sim.batches, participants=cohorts.size,
        replace=cohorts.replace, seed=cohorts.seed, dtype=str(sim.smooth.dtype), device=sim.smooth.device.type,
        mode=sim.mode, backend=sim.backend, evaluate_every=evaluate_every, stationarity_step=sim.stationarity_step,
        **({} if carrier.privacy is None else {"privacy": carrier.privacy}),
        **({} if carrier.aggregator is None else {"aggregator": carrier.aggregator}),
    )  # fmt: skip


def _told(run: Run) -> Run:
    """The run, with a warning if it diverged; one that was interrupted goes on as an exception."""
    if run.status == "diverged":
        slowly = growth(run.history[-1], run.history[0]) > DOUBLED and math.isfinite(run.history[-1]["objective"])
        warnings.warn(run.message, GrowthWarning if slowly else DivergenceWarning, stacklevel=3)
    if run.status == "dead":
        warnings.warn(run.message, DeadNetworkWarning, stacklevel=3)
    if run.status == "interrupted":
        raise Interrupted(run)
    return run


def _check_protected(
    privacy: Privacy | None,
    aggregator: AnyAggregator | None,
    processes: int,
    mode: str,
    tolerance: float | None,
    callbacks: Sequence[AnyCallback],
) -> None:
    """Refuse settings that go with neither noise nor robust means."""
    if processes > 1 and not (privacy is None and aggregator is None):
        raise ValueError("privacy and aggregator are for runs in one process")
    if privacy is None:
        return
    if mode in ("record", "compile"):
        raise ValueError(f"mode = {mode!r}: a private round draws new samples and noise, so it is carried out eagerly")
    if tolerance is not None or any(isinstance(c, BestModel | EarlyStopping) for c in callbacks):
        raise ValueError(
            "privacy: when to stop must not depend on exact measurements, nor which model to keep; "
            "leave tolerance, EarlyStopping and BestModel out"
        )


def _mode(mode: str, device: str | torch.device, backend: str, rounds: int, old: Path | None = None) -> Mode:
    """How to carry out local rounds; a rule, never a timing, so that a resumed run does the same.

    A run that goes on from the checkpoint ``old`` keeps its mode, however many rounds are added.
    """
    if mode not in ("auto", "eager", "record", "compile"):
        raise ValueError(f"mode = {mode!r}, must be 'auto', 'eager', 'record' or 'compile'")
    gpu = torch.device(device).type == "cuda"
    if mode in ("record", "compile") and not (gpu and backend == "stacked"):
        raise ValueError(f"mode = {mode!r} is for device = 'cuda' and backend = 'stacked'")
    if mode != "auto":
        return cast(Mode, mode)
    if not gpu or backend != "stacked":
        return "eager"
    if old is not None:
        return cast(Mode, checkpoints.identity_of(old)["mode"])
    if rounds < RECORD_ROUNDS:
        return "eager"
    return "compile" if rounds >= COMPILE_ROUNDS else "record"


def _blame(sim: Simulator, r: int) -> str:
    """Say why a run probably diverged."""
    problem, algorithm, batch = sim.problem, sim.algorithm, sim.batches.size
    try:
        L = problem.smoothness()
    except ValueError:  # unknown for networks and for losses with kinks
        L = 0.0
    whose = "the largest client has"
    if L > 0 and batch is not None:
        L, whose = theory.constants(problem, batch=batch).of_batches or L, f"batches of {batch} have"
    steps = {k: v for k, v in algorithm.at(r).table.items() if k in ("step", "server_step")}
    shown = ", ".join(f"{k} = {v:g}" for k, v in steps.items())
    advice = f"{whose} L = {L:g}, so try step <= {1 / L:.3g}" if L > 0 else "try a smaller step"
    cause = "the step" if sim.transport.privacy is None else "the noise of privacy, or the step,"
    return f"{algorithm.name} diverged in round {r}: {cause} is probably too large ({shown}); {advice}"
