"""The client side: an order is data, checked against the site's own limits before any of its samples are touched."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from flwr.app import RecordDict
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from fedcomposite import algorithms
from fedcomposite._version import __version__
from fedcomposite.algorithms.base import Gradient
from fedcomposite.choice import AUTO
from fedcomposite.data import DataError, Silos
from fedcomposite.experiments.config import Config, ConfigError
from fedcomposite.federation import wire
from fedcomposite.federation.orders import Introduction, Order, Shape
from fedcomposite.federation.shape import arrange, local_problem, parse
from fedcomposite.federation.store import LostStateError, StateStore
from fedcomposite.federation.wire import Vectors, WireError
from fedcomposite.problems import Batches, Counter, Problem
from fedcomposite.problems.linear import Linear
from fedcomposite.problems.loss import Loss
from fedcomposite.runtime import messages
from fedcomposite.runtime.client import Client
from fedcomposite.runtime.process import fitting_threads


class RefusalError(ValueError):
    """A site will not do what it was asked; the text is one line and goes to the server."""


class Limits(BaseModel):
    """``[limits]`` of site.toml: what this site agrees to, whatever an experiment says."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    max_rounds: int = Field(default=100_000, ge=1)
    max_local_steps: int = Field(default=10_000, ge=1)
    """Gradients in one round."""
    methods: list[str] = []
    """Allowed methods; empty allows all."""
    min_samples: int = Field(default=10, ge=1)
    """Fewest samples with which this site takes part."""
    min_batch: int = Field(default=1, ge=1)
    """Smallest minibatch: a gradient is a mean over at least so many samples."""
    max_message_mb: float = Field(default=1024.0, gt=0)
    """Largest message taken from the server."""


class _Limited:
    """A gradient oracle that counts its calls and stops at a limit."""

    def __init__(self, grad: Gradient, most: int) -> None:
        self._grad, self._left, self._most = grad, most, most

    def _spend(self) -> None:
        if self._left == 0:
            raise RefusalError(f"a round needs more gradients than this site's max_local_steps = {self._most}")
        self._left -= 1

    def __call__(self, x: Tensor, k: int) -> Tensor:
        self._spend()
        return self._grad(x, k)

    def full(self, x: Tensor) -> Tensor:
        self._spend()
        return self._grad.full(x)

    def loss(self, x: Tensor) -> Tensor:
        return self._grad.loss(x)

    def hessian(self, x: Tensor, where: Tensor) -> Tensor:
        self._spend()
        return self._grad.hessian(x, where)

    def uniform(self, k: int, count: int = 1) -> Tensor:
        return self._grad.uniform(k, count)

    @property
    def position(self) -> Tensor:
        return self._grad.position

    @property
    def cohort(self) -> int:
        return self._grad.cohort


@dataclass(frozen=True)
class _Job:
    """What is built once per experiment."""

    problem: Problem
    client: Client  # this site's side of a round
    start: Tensor  # the form of a model
    buffers: Tensor
    state: Any  # a client's state at the start
    message: NamedTuple  # a message, for its form


class Site:
    """One party: its samples, its limits, its memory.

    ``log`` receives one line per thing worth telling the site's own people.
    """

    def __init__(
        self,
        name: str,
        silos: Silos,
        store: StateStore,
        limits: Limits | None = None,
        log: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.name, self.silos, self.store, self.limits, self._log = name, silos, store, limits or Limits(), log
        if len(silos) != 1:
            raise DataError(f"{name}: a site holds one silo, these are {len(silos)}")
        if silos.sizes[0] < self.limits.min_samples:
            raise DataError(f"{name}: {silos.sizes[0]} samples, fewer than min_samples = {self.limits.min_samples}")
        self._parsed: tuple[str, Config] | None = None
        self._cache: tuple[tuple[str, Shape, int], _Job] | None = None

    def answer(self, request: RecordDict) -> RecordDict:
        """Do what a message asks, or refuse it in one line; never raises because of what a message says."""
        try:
            return self._answer(request)
        except DataError as error:  # may quote samples, so its text stays here
            self._log(f"refused: {error}")
            reason = "its data do not fit this experiment (see the site's log)"
        except (RefusalError, WireError, LostStateError, ConfigError) as error:
            self._log(f"refused: {error}")
            reason = str(error)
        except Exception as error:
            self._log(f"failed: {type(error).__name__}: {error}")
            reason = f"failed with {type(error).__name__} (see the site's log)"
        return wire.content(refusal=reason.splitlines()[0])

    def _answer(self, request: RecordDict) -> RecordDict:
        if (weight := wire.nbytes(request)) > self.limits.max_message_mb * 1e6:
            most = self.limits.max_message_mb
            raise RefusalError(f"a message of {weight / 1e6:.0f} MB is over this site's max_message_mb = {most:g}")
        order = Order.read(wire.text(request, "order"))
        if order.site != self.name:
            raise RefusalError(f"the order is for {order.site!r}")
        if self._parsed is None or self._parsed[0] != order.config:
            self._parsed = order.config, parse(order.config)
        config = self._parsed[1]
        self._permit(config, order)
        if order.shape is None:
            return wire.content(introduction=self._introduce(config).model_dump_json())
        job = self._job(order, order.shape, config)
        began = time.perf_counter()
        report, vectors = self._work(order, job, request)
        what = f"round {order.round + 1}" if order.train else f"evaluation after round {order.round}"
        self._log(f"job {order.job}: {what} in {time.perf_counter() - began:.2f} s")
        return wire.content(report=report, vectors=vectors)

    # -- permission ---------------------------------------------------------------------------------------------------

    def _permit(self, config: Config, order: Order) -> None:
        limits = self.limits
        if max(config.run.rounds, order.round) > limits.max_rounds:
            raise RefusalError(f"{config.run.rounds} rounds are over this site's max_rounds = {limits.max_rounds}")
        chosen = config.specs[0]["name"]
        if chosen == AUTO and order.shape is not None:
            raise RefusalError("the coordinator has not said which method it chose")
        name = AUTO if chosen == AUTO else algorithms.lookup(chosen).__name__  # before the first round it may be open
        if limits.methods and name != AUTO and name.casefold() not in {m.casefold() for m in limits.methods}:
            raise RefusalError(f"{name} is not among this site's methods ({', '.join(limits.methods)})")
        if config.run.batch_size is not None and config.run.batch_size < limits.min_batch:
            size = config.run.batch_size
            raise RefusalError(f"batch_size = {size} is below this site's min_batch = {limits.min_batch}")
        steps = config.specs[0].get("local_steps")
        if isinstance(steps, int) and steps > limits.max_local_steps:
            raise RefusalError(f"local_steps = {steps} is over this site's max_local_steps = {limits.max_local_steps}")

    # -- introduction -------------------------------------------------------------------------------------------------

    def _introduce(self, config: Config) -> Introduction:
        labels = [] if self.silos.classes is None else self.silos.classes.astype(float).tolist()
        dtype = str(self.silos.features.dtype).removeprefix("torch.")
        if dtype not in wire.DTYPES:
            raise RefusalError(f"samples of type {dtype} cannot be used in a federation; store float64 or uint8")
        shape = Shape(
            features=list(self.silos.features.shape[1:]),
            dtype=dtype,  # type: ignore[arg-type]
            names=list(self.silos.feature_names),
            labels=labels if len(labels) > 1 else sorted({-1.0 if -1.0 in labels else 0.0, 1.0, *labels}),
            clients=1,
        )
        problem = self._problem(config, shape, self.silos)
        smooth = problem.smooth()
        scale = smooth.scale() if isinstance(smooth, Linear) else None
        curvature = problem.loss.curvature if isinstance(problem.loss, Loss) else math.inf
        return Introduction(
            site=self.name,
            version=__version__,
            samples=int(self.silos.sizes[0]),
            features=shape.features,
            dtype=shape.dtype,
            names=shape.names,
            labels=labels if problem.loss.classifier else [],
            smoothness=curvature * scale if scale is not None and math.isfinite(curvature) else None,
            scale=scale,
        )

    @staticmethod
    def _problem(config: Config, shape: Shape, silos: Silos) -> Problem:
        try:
            return local_problem(config, shape, silos)
        except ValueError as error:
            raise DataError(str(error)) from None

    # -- work ---------------------------------------------------------------------------------------------------------

    def _job(self, order: Order, shape: Shape, config: Config) -> _Job:
        key = order.config, shape, order.client
        if self._cache is None or self._cache[0] != key:
            if set(shape.names) != set(self.silos.feature_names):
                raise RefusalError("the experiment's columns are not this site's")
            silos = dataclasses.replace(arrange(self.silos, shape.names), ids=(order.client,))
            problem = self._problem(config, shape, silos)
            algorithm = config.make_algorithm(config.specs[0], None)
            batches = Batches(config.seed, config.run.batch_size, config.run.sampling)
            smooth = problem.smooth(getattr(torch, config.run.dtype))
            per = config.run.batch_size or int(silos.sizes[0])
            if (count := fitting_threads(per * smooth.dimension, smooth.device)) is not None:
                torch.set_num_threads(count)
            client = Client(algorithm, smooth, problem.regularizer, batches, Counter(), guard=self._guard)
            start = smooth.start()
            rules = algorithm.at(0)
            server, state = rules.init(start, problem.regularizer)
            job = _Job(problem, client, start, smooth.buffers(), state, rules.broadcast(server))
            self._cache = key, job
        return self._cache[1]

    def _guard(self, grad: Gradient) -> Gradient:
        return _Limited(grad, self.limits.max_local_steps)

    def _work(self, order: Order, job: _Job, request: RecordDict) -> tuple[dict[str, float], Vectors]:
        expected = wire.form({"buffers": job.buffers})
        if order.train:
            longest = max(len(job.start), *(t.numel() for t in job.message))
            sent = wire.named("message", job.message)
            expected |= {k: wire.Form((longest,), v.dtype, exact=False) for k, v in sent.items()}
            if order.last < 0:
                expected |= wire.form({"start": job.start})
        if order.evaluate:
            expected |= wire.form({"model": job.start})
        given = wire.unpack(request, expected)
        report: dict[str, float] = {"round": order.round, "samples": int(self.silos.sizes[0])}
        vectors: Vectors = {}
        if order.evaluate:
            vectors |= self._evaluate(job, given, report)
        if order.train:
            vectors |= self._train(order, job, given, report)
        return report, vectors

    def _train(self, order: Order, job: _Job, given: Vectors, report: dict[str, float]) -> Vectors:
        client, counter = job.client, job.client.counter
        if order.last < 0:
            state = client.algorithm.at(0).init(given["start"], job.problem.regularizer)[1]
        else:
            state = self.store.load(order.job, order.last, job.state)
        gradients, proxes = counter.gradients, counter.proxes
        message = wire.tuple_of(type(job.message), "message", given)
        place = order.position, order.cohort
        reply, after, buffers = client.train(message, state, order.round, place, given["buffers"])
        if not (messages.finite(reply) and messages.finite(after) and bool(torch.isfinite(buffers).all())):
            raise RefusalError("its numbers left the finite range: the steps are probably too large")
        if after:
            self.store.save(order.job, order.round, order.last, after)
        report |= {"gradients": counter.gradients - gradients, "proxes": counter.proxes - proxes}
        return {**wire.named("reply", reply), "buffers": buffers}

    def _evaluate(self, job: _Job, given: Vectors, report: dict[str, float]) -> Vectors:
        seen = job.client.evaluate(given["model"], given["buffers"])
        gradient = seen.gradient
        report["loss"] = float(seen.loss)
        if not bool(torch.isfinite(gradient).all() and torch.isfinite(seen.loss)):
            # The model has diverged: say so in a scalar, since vectors must be finite.
            report["loss"], gradient = math.inf, torch.zeros_like(gradient)
        counts = {f"counts.{k}": v for k, v in seen.counts.items() if bool(torch.isfinite(v).all())}
        return {"gradient": gradient, **counts}
