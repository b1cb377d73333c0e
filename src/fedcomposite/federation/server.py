"""The coordinator's side of a run: the rounds of the simulator, with the clients elsewhere.

A round is one exchange. The order to a site carries the message of the round and, when the model is due for
evaluation, the model itself; the site's report carries its reply, and its loss, gradient and counts at that model. So
round r + 1 is on its way while round r is being measured, and evaluation costs no extra exchange.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from flwr.app import RecordDict
from flwr.serverapp import Grid
from torch import Tensor

from fedcomposite import algorithms, theory
from fedcomposite.algorithms.base import AnyAlgorithm
from fedcomposite.experiments.config import Config, ConfigError
from fedcomposite.federation import wire
from fedcomposite.federation.orders import Introduction, Order, Shape
from fedcomposite.federation.post import FederationError, Post, Settings, StoppedError
from fedcomposite.federation.shape import agree, skeleton, write
from fedcomposite.federation.wire import Form, Vectors, WireError
from fedcomposite.problems import Batches, Evaluation, Problem
from fedcomposite.runtime import checkpoint as checkpoints
from fedcomposite.runtime import messages, rounds
from fedcomposite.runtime.history import Record, Run, Status
from fedcomposite.runtime.simulator import Simulator

_OPTIONAL = {"correct", "evaluated", "test_samples", "test_correct", "test_total"}


class Seen(NamedTuple):
    """What the server remembers of its sites."""

    last: Tensor  # last round of each


@dataclass(frozen=True)
class Answer:
    """One site's checked report."""

    numbers: dict[str, float]
    vectors: Vectors


class Coordinator:
    """One experiment across registered sites.

    Parameters
    ----------
    grid : Grid
        Flower's, or any other that carries messages to node numbers.
    sites : sequence of str
        All sites of the federation in their order: site i is client i.
    nodes : callable
        The registered sites and their node numbers, now.
    config : Config
        The experiment.
    job : str
        Its name at the sites; the same when it is resumed.
    settings : Settings
        Policy and timeouts.
    log, stop : callable
        Receives one line per event; tells whether to stop.
    """

    def __init__(
        self,
        grid: Grid,
        sites: list[str],
        nodes: Callable[[], Mapping[str, int]],
        config: Config,
        job: str,
        settings: Settings | None = None,
        *,
        log: Callable[[str], None] = lambda line: None,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.sites, self.config, self.job, self.settings = sites, config, job, settings or Settings()
        self._log = log
        self.post = Post(grid, nodes, self.settings, log, stop)
        self.history: list[Record] = []
        self._forms: dict[tuple[bool, int, int], dict[str, Form]] = {}
        self._rehearsed: Any = None
        self._reply: Any = None

    # -- before the first round ---------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Meet the sites, check that their data fit together, and set up the server's state."""
        text = write(self.config)
        orders = {s: Order(job=self.job, site=s, config=text) for s in self.sites}
        requests = {s: wire.content(order=o.model_dump_json()) for s, o in orders.items()}
        met = self.post.collect(requests, "introduction", self._check_introduction, "wait")
        self.introductions = [met[s] for s in self.sites]
        self.shape: Shape = agree(self.introductions)
        self.problem: Problem = skeleton(self.config, self.shape)
        self.sizes = np.asarray([i.samples for i in self.introductions], float)
        weights = self.sizes / self.sizes.sum() if self.problem.weighting == "samples" else None
        self._weights = np.full(len(self.sites), 1 / len(self.sites)) if weights is None else weights
        (spec,) = self.config.specs
        self.algorithm: AnyAlgorithm = self._method(spec)
        chosen = {k: v for k, v in vars(self.algorithm).items() if v is not None}
        label = {"label": spec["label"]} if "label" in spec else {}
        self.config = self.config.only({"name": type(self.algorithm).__name__, **chosen, **label}, self.config.seed)
        self.step = self._stationarity_step()
        run = self.config.run
        # The simulator on the skeleton: its checks, its cohorts, its counters and its h; it has no data to work on.
        self.sim = Simulator(
            self.problem,
            self.algorithm,
            batches=Batches(self.config.seed, run.batch_size, run.sampling),
            participation=run.participation,
            seed=self.config.seed,
            dtype=getattr(torch, run.dtype),
        )
        self._start = self.sim.x0
        self.last = [-1] * len(self.sites)
        if self.settings.policy == "skip" and not (self.algorithm.partial and self.algorithm.exchanges == 1):
            raise FederationError(
                f"{type(self.algorithm).__name__} needs every site in every round, so the policy must be 'wait'"
            )

    def _check_introduction(self, site: str, content: RecordDict) -> Introduction:
        _check_refusal(content)
        met = Introduction.read(wire.text(content, "introduction"))
        if met.site != site:
            raise WireError(f"introduces itself as {met.site!r}")
        return met

    def _constants(self) -> tuple[list[float], list[float]]:
        """The sites' smoothness constants and scales; empty where a site has none."""
        found = [i.smoothness for i in self.introductions], [i.scale for i in self.introductions]
        smoothness, scale = ([v for v in one if v is not None] for one in found)
        n = len(self.sites)
        return smoothness if len(smoothness) == n else [], scale if len(scale) == n else []

    def _method(self, spec: dict[str, Any]) -> AnyAlgorithm:
        """The method; steps that are to be chosen come from the largest constants of the sites."""
        steps, run = spec.get("steps"), self.config.run
        if steps is None:
            return self.config.make_algorithm(spec, None)
        smoothness, scale = self._constants()
        if not scale:
            raise ConfigError("[algorithm] the smoothness of a network is unknown; give the steps yourself")
        known = theory.Constants(
            L=max(smoothness) if smoothness else None,
            scale=max(scale),
            rho=self.problem.regularizer.rho,
            n=len(self.sites),
            cohort=max(1, round(run.participation * len(self.sites))),
            batch=run.batch_size,
            rounds=run.rounds,
        )
        fields = {k: v for k, v in spec.items() if k not in ("name", "label", "steps")}
        name, local_steps = algorithms.lookup(spec["name"]).__name__, fields.get("local_steps", 10)
        if steps == "theory":
            chosen = theory.steps(name, known, local_steps)
        else:
            chosen = vars(theory.auto(name, known, local_steps))
        return algorithms.build(name, **{**chosen, **fields})

    def _stationarity_step(self) -> float:
        """The step of the experiment; or 1/L with L the weighted mean of the sites' constants, an upper bound."""
        given = self.config.run.stationarity_step
        if given is not None:
            return given
        if self.problem.model is not None:
            return self.problem.default_step()
        smoothness, scale = self._constants()
        L, rho = float(self._weights @ (smoothness or scale)), self.problem.regularizer.rho
        step = 1 / L if L > 0 else 1.0
        return min(step, 0.5 / rho) if rho > 0 else step

    @property
    def identity(self) -> str:
        """A digest of everything that determines the run's numbers, except the sites' data."""
        known = (write(self.config), self.sites, self.shape.model_dump_json(), self.sizes.tolist())
        return hashlib.sha256(repr(known).encode()).hexdigest()

    # -- rounds -------------------------------------------------------------------------------------------------------

    def run(self, checkpoint: Path | None = None, on_record: Callable[[Record], None] = lambda record: None) -> Run:
        """Do the rounds that are left; the state is written to ``checkpoint`` after each of them."""
        sim, total = self.sim, self.config.run.rounds
        elapsed = self._resume(checkpoint)
        for old in self.history:
            on_record(old)
        began = time.perf_counter() - elapsed
        status: Status = "completed"
        if self.history:
            status = rounds.verdict(self.history[-1], self.history[0], self.config.run.tolerance)
        text = write(self.config)
        try:
            while status == "completed":
                due = self._due(total)
                if not due and sim.round >= total:
                    break
                answers, who = self._exchange(text, due, sim.round < total)
                if due:
                    made = self._measure(answers, time.perf_counter() - began)
                    self.history.append(made)
                    on_record(made)
                    status = rounds.verdict(made, self.history[0], self.config.run.tolerance)
                if status == "completed" and sim.round < total:
                    status = self._advance(answers, who)
                if checkpoint is not None and status != "diverged":
                    self._save(checkpoint, time.perf_counter() - began)
        except StoppedError:
            status = "interrupted"
        if not self.history:
            raise FederationError("stopped before the first model was measured")
        message = {
            "completed": f"all {total} rounds done",
            "converged": f"stationarity reached {self.history[-1]['stationarity']:.2e} in round {sim.round}",
            "interrupted": f"stopped after round {sim.round}",
            "diverged": f"{type(self.algorithm).__name__} diverged in round {sim.round}: try smaller steps",
        }[status]
        seen = Seen(torch.tensor(self.last))
        return Run(sim.solution, self.history, status, message, sim.round, sim.server, seen, buffers=sim.buffers)

    def _due(self, total: int) -> bool:
        """Whether the model of now has to be measured."""
        r = self.sim.round
        if self.history and self.history[-1]["round"] == r:
            return False
        return r % self.config.run.evaluate_every == 0 or r == total

    def _exchange(self, text: str, due: bool, training: bool) -> tuple[dict[str, Answer], list[int]]:
        """Send the orders of a round and gather the reports; also the clients of the round."""
        sim = self.sim
        who = [int(i) for i in sim.participants(sim.round)] if training else []
        message = self.algorithm.broadcast(sim.server)
        expected = self._form(message, len(who)) if training else {}
        requests, wanted = {}, {}
        for i, site in enumerate(self.sites):
            train = i in who
            if not (train or due):
                continue
            order = Order(
                job=self.job,
                site=site,
                config=text,
                shape=self.shape,
                client=i,
                round=sim.round,
                last=self.last[i],
                position=who.index(i) if train else 0,
                cohort=max(1, len(who)),
                train=train,
                evaluate=due,
            )
            vectors: Vectors = {"buffers": sim.buffers}
            if train:
                vectors |= wire.named("message", message)
                if self.last[i] < 0:
                    vectors["start"] = self._start
            if due:
                vectors["model"] = sim.solution
            requests[site] = wire.content(order=order.model_dump_json(), vectors=vectors)
            forms = dict(expected) if train else {}
            if due:
                forms |= wire.form({"gradient": self._start})
            wanted[site] = order, forms
        answers = self.post.collect(
            requests, str(sim.round + 1), lambda site, content: self._check_report(site, content, *wanted[site])
        )
        return answers, [i for i in who if self.sites[i] in answers]

    def _form(self, message: NamedTuple, cohort: int) -> dict[str, Form]:
        """What a reply must look like: found out by rehearsing the round with zero gradients, when it may change."""
        key = self.sim.round > 0, self.sim.round % self.algorithm.exchanges, cohort
        if key not in self._forms or self.algorithm.varying:
            h = self.problem.regularizer
            if self._rehearsed is None:
                first = self.algorithm.broadcast(self.algorithm.init(self._start, h)[0])
                client = self.algorithm.init(self._start, h)[1]
                reply, self._rehearsed = rounds.rehearse(self.algorithm, first, client, h, cohort)
                if self.sim.round > 0:
                    reply, _ = rounds.rehearse(self.algorithm, message, self._rehearsed, h, cohort)
            else:
                reply, _ = rounds.rehearse(self.algorithm, message, self._rehearsed, h, cohort)
            self._reply = type(reply)
            self._forms[key] = wire.form({**wire.named("reply", reply), "buffers": self.sim.buffers})
        return self._forms[key]

    def _check_report(self, site: str, content: RecordDict, order: Order, forms: dict[str, Form]) -> Answer:
        _check_refusal(content)
        numbers = wire.numbers(content)
        must = {"round", "samples"} | ({"gradients", "proxes"} if order.train else set())
        must |= {"loss"} if order.evaluate else set()
        if absent := sorted(must - set(numbers)):
            raise WireError(f"{absent[0]!r} is missing from its report")
        if extra := sorted(set(numbers) - must - (_OPTIONAL if order.evaluate else set())):
            raise WireError(f"{extra[0]!r} was not asked for")
        if numbers["round"] != order.round:
            raise WireError(f"answers round {numbers['round'] + 1:g} in round {order.round + 1}")
        if numbers["samples"] != self.introductions[order.client].samples:
            raise WireError("has another number of samples than it said before the first round")
        if any(not np.isfinite(v) or v < 0 for k, v in numbers.items() if k not in ("loss", "test_total")):
            raise WireError("a count in its report is negative, NaN or infinite")
        if np.isnan(numbers.get("loss", 0.0)):
            raise WireError("its loss is NaN")
        return Answer(numbers, wire.unpack(content, forms))

    def _advance(self, answers: dict[str, Answer], who: list[int]) -> Status:
        """Average the replies and move on by a round."""
        sim = self.sim
        if not who:
            raise FederationError(f"no site took part in round {sim.round + 1}")
        got = [answers[self.sites[i]] for i in who]
        each = [wire.tuple_of(self._reply, "reply", a.vectors) for a in got]
        replies = self._reply(*map(torch.stack, zip(*each, strict=True)))
        buffers = torch.stack([a.vectors["buffers"] for a in got])
        n = len(self.sites)
        weights = None if self.problem.weighting == "uniform" else torch.from_numpy((self._weights * n)[who])
        message = self.algorithm.broadcast(sim.server)
        moved = rounds.advance(self.algorithm, sim.server, replies, weights, len(who) / n, sim.h)
        for a in got:
            sim.counter.gradients += int(a.numbers["gradients"])
            sim.counter.proxes += int(a.numbers["proxes"])
        sim.bytes_down += len(who) * (messages.nbytes(message) + sim.buffers.nbytes)
        sim.bytes_up += messages.nbytes(replies) + buffers.nbytes
        for i in who:
            self.last[i] = sim.round
        sim.round += 1
        if not messages.finite(moved):
            return "diverged"
        sim.server, sim.buffers = moved, rounds.mean_buffers(buffers, weights)
        return "completed"

    def _measure(self, answers: dict[str, Answer], seconds: float) -> Record:
        """The record of the model that the sites have just seen; without missing sites it is the simulator's."""
        sim = self.sim
        there = [i for i, site in enumerate(self.sites) if site in answers]
        got = [answers[self.sites[i]] for i in there]
        weights = self._weights[there] / self._weights[there].sum()
        stacked = torch.stack([a.vectors["gradient"] for a in got])
        gradient = torch.tensordot(torch.from_numpy(weights).to(stacked), stacked, dims=1)
        loss = torch.tensor(sum(w * a.numbers["loss"] for w, a in zip(weights, got, strict=True)))
        seen = Evaluation(loss, gradient, _metrics([a.numbers for a in got]))
        made = rounds.make_record(
            sim.solution,
            seen,
            self.problem.regularizer,
            round=sim.round,
            step=self.step,
            bytes_up=sim.bytes_up,
            bytes_down=sim.bytes_down,
            counter=sim.counter,
            seconds=seconds,
        )
        if len(there) < len(self.sites):
            made["sites"] = len(there)
        return made

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def _save(self, path: Path, seconds: float) -> None:
        sim = self.sim
        snapshot = checkpoints.Snapshot(
            sim.round, sim.server, Seen(torch.tensor(self.last)), sim.counter, sim.bytes_up, sim.bytes_down, seconds,
            self.history, sim.buffers,
        )  # fmt: skip
        checkpoints.save(path, snapshot, self.identity)

    def _resume(self, path: Path | None) -> float:
        """Go back to a checkpoint, if there is one; its seconds."""
        if path is None or not path.exists():
            return 0.0
        sim = self.sim
        old = checkpoints.load(path, sim.server, Seen(torch.tensor(self.last)), self.identity)
        sim.round, sim.server, sim.buffers = old.round, old.server, old.buffers
        sim.bytes_up, sim.bytes_down = old.bytes_up, old.bytes_down
        sim.counter.gradients, sim.counter.proxes = old.counter.gradients, old.counter.proxes
        self.history, self.last = old.history, old.clients[0].tolist()
        self._log(f"going on after round {sim.round}")
        return old.seconds


def _check_refusal(content: RecordDict) -> None:
    if wire.kind(content) == "refusal":
        raise WireError("refuses: " + wire.text(content, "refusal").splitlines()[0][:300])


def _metrics(numbers: list[dict[str, float]]) -> dict[str, Tensor]:
    """The simulator's metrics from the sites' counts."""
    made: dict[str, Tensor] = {}
    samples = np.asarray([x["samples"] for x in numbers])
    if all("evaluated" in x for x in numbers):
        made["evaluated_samples"] = torch.tensor(int(sum(x["evaluated"] for x in numbers)))
    if all("correct" in x for x in numbers):
        correct = np.asarray([x["correct"] for x in numbers])
        made["train_accuracy"] = torch.tensor(correct.sum() / samples.sum())
        if "evaluated_samples" in made:
            each = correct / samples
            for name, value in (("min", each.min()), ("mean", each.mean()), ("max", each.max())):
                made[f"client_accuracy_{name}"] = torch.tensor(value)
    held = [x for x in numbers if "test_samples" in x]
    for part, name in (("test_correct", "test_accuracy"), ("test_total", "test_loss")):
        if held and all(part in x for x in held):
            made[name] = torch.tensor(sum(x[part] for x in held) / sum(x["test_samples"] for x in held))
    return made
