"""The client side: an order is data, checked against the site's own limits before any of its samples are touched."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedcomposite import files
from fedcomposite._version import __version__
from fedcomposite.data import DataError, Silos
from fedcomposite.data.mapped import MappedRows
from fedcomposite.data.sparse import SparseRows
from fedcomposite.experiments.config import Config, ConfigError
from fedcomposite.federation import wire
from fedcomposite.federation.coordinator import claims
from fedcomposite.federation.orders import AnalysisOrder, Introduction, Order, Shape
from fedcomposite.federation.secure.keys import MaskKeys
from fedcomposite.federation.secure.masked_answers import Sums, Told, Worked, asked_of
from fedcomposite.federation.secure.masking import MaskError
from fedcomposite.federation.shape import arrange, local_problem, parse, skeleton
from fedcomposite.federation.site import minimum_counts, noised_answers, policy
from fedcomposite.federation.site.analyses import Desk, check_allowed, check_prepared
from fedcomposite.federation.site.approval import Approvals
from fedcomposite.federation.site.audit import Audit, AuditError
from fedcomposite.federation.site.budgeted_gradients import BudgetedGradients, margins_within
from fedcomposite.federation.site.client_states import LostStateError, StateStore
from fedcomposite.federation.site.data_versions import DataVersions
from fedcomposite.federation.site.gate import Gate
from fedcomposite.federation.site.ledger import Ledger
from fedcomposite.federation.site.noise import NOISED_METRICS, metric_counts
from fedcomposite.federation.site.peer_heads import PeerHeads
from fedcomposite.federation.site.policy import DataRefusalError, Limits, RefusalError, UnapprovedError
from fedcomposite.federation.site.privacy_account import PrivacyAccount, level
from fedcomposite.federation.site.row_sets import KeptRows
from fedcomposite.federation.site.table_files import Newcomers
from fedcomposite.federation.wire import Content, Vectors, WireError
from fedcomposite.privacy import Query, SampleLevel, Source, System
from fedcomposite.problems import Counter, Problem, private
from fedcomposite.problems.linear import Linear
from fedcomposite.problems.losses import Loss
from fedcomposite.problems.network import IGNORED
from fedcomposite.regularizers.base import StepError
from fedcomposite.runtime import messages, process
from fedcomposite.runtime.client import Client
from fedcomposite.runtime.fit import autocast_fault

__all__ = ["Limits", "RefusalError", "Site"]

_FAULTLESS = (RefusalError, WireError, LostStateError, ConfigError, MaskError)  # whatever the samples are
_PAIRS = ({-1.0, 1.0}, {0.0, 1.0})  # labels that say nothing about a site


@dataclass(frozen=True)
class _Job:
    """What is built once per experiment."""

    problem: Problem
    client: Client  # this site's side of a round
    purse: BudgetedGradients  # its gradients
    start: Tensor  # the form of a model
    buffers: Tensor
    state: Any  # a client's state at the start
    message: NamedTuple  # a message, for its form
    privacy: SampleLevel | None
    query: Query | None  # as the accountant sees an answer
    said: dict[str, int]  # samples of each part as they are told
    threads: int | None  # that fit a local step


def rows_of(silos: Silos) -> list[bytes]:
    """The samples of a site, each as bytes that equal ones have in common; those of mapped files are not looked at."""
    made = []
    for part, (X, y) in [("train", (silos.features, silos.targets)), *silos.held_out.items()]:
        if isinstance(X, Tensor):
            rows = [X.flatten(1), y.view(len(y), -1)]
            made += [part.encode() + b"".join(row) for row in zip(*(map(_bytes, t.numpy()) for t in rows), strict=True)]
    return made


def _bytes(row: np.ndarray[Any, Any]) -> bytes:
    return row.tobytes()


def _samples_by_label(targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The labels that count, and the number of samples that have each, once or in several places."""
    places = targets.reshape(len(targets), -1).sort(1).values
    new = torch.ones_like(places, dtype=torch.bool)
    new[:, 1:] = places[:, 1:] != places[:, :-1]
    labels, counts = torch.unique(places[new & (places != IGNORED)], return_counts=True)
    return labels, counts


def reconcile(ledger: Ledger, audit: Audit | None) -> None:
    """Have a ledger refuse to be older than what the audit log has seen of it.

    With a log that cannot be read nothing is answered anyway.
    """
    if audit is not None:
        with contextlib.suppress(AuditError):
            ledger.number = audit.ledger()


class Site:
    """One party: its samples, its limits, its memory.

    ``classes`` are the labels that its targets may have, where it has declared them; ``log`` receives one line per
    thing worth telling the site's own people; ``device`` is where rounds are computed (analyses and noise: the CPU).
    """

    def __init__(
        self,
        name: str,
        silos: Silos,
        store: StateStore,
        limits: Limits | None = None,
        log: Callable[[str], None] = lambda line: None,
        classes: Sequence[float] | None = None,
        *,
        vault: MaskKeys | None = None,
        approvals: Approvals | None = None,
        audit: Audit | None = None,
        newcomers: Newcomers | None = None,
        device: str = "cpu",
    ) -> None:
        self.device = device
        self.name, self.silos, self.store, self.limits, self._log = name, silos, store, limits or Limits(), log
        if len(silos) != 1:
            raise DataError(f"{name}: a site holds one silo, these are {len(silos)}")
        self.sizes = {"train": int(silos.sizes[0])} | {k: len(y) for k, (_, y) in silos.held_out.items()}
        if self.sizes["train"] < self.limits.min_samples:
            raise DataError(f"{name}: {silos.sizes[0]} samples, fewer than min_samples = {self.limits.min_samples}")
        for part, size in self.sizes.items():
            if size < self.limits.min_evaluation:
                least = self.limits.min_evaluation
                raise DataError(f"{name}: {size} {part} samples, fewer than min_evaluation = {least}")
        self._approvals, self._audit, self.newcomers = approvals, audit, newcomers
        self.head: Callable[[], str] = (lambda: "") if audit is None else audit.signed_head
        self.kept: KeptRows | None = None
        """Places of the samples in the data set, where they are not all of it."""
        self._labels = self._declared(classes)
        self.ledger = Ledger(store.folder, self.limits, self._digest())
        reconcile(self.ledger, audit)
        self.gate = Gate(self.ledger, self.limits, store.folder, self._digest())
        self._versions = DataVersions(
            store.folder, self._digest(), self.limits.min_count, self.ledger, lambda: rows_of(silos)
        )
        self.account = PrivacyAccount(self.ledger, self.limits)
        self.source: Source = System()
        """Of noise: the operating system's."""
        self._sums = Sums(vault or MaskKeys(name, self.limits), self.ledger, self.limits)
        self._desk = Desk(self)
        self._parsed: tuple[str, Config] | None = None
        self._cache: tuple[tuple[object, ...], _Job] | None = None
        self._waiting = set[str]()  # orders that wait for approval, and may be given many times
        self._noticed = dict[str, float]()  # what was refused unread, and until when it is not taken down again

    def said(self, config: Config) -> dict[str, int]:
        """How many samples each part has, as they are told: with noise under a privacy budget."""
        return self.account.samples(config, self.sizes, self.source)

    def known_sizes(self, config: Config) -> dict[str, int]:
        """How many samples the parts have, for limits that depend on it; under a budget nothing may."""
        budget = config.budget is not None or (self.limits.epsilon is not None and not self.limits.exact_counts)
        return dict.fromkeys(self.sizes, sys.maxsize) if budget else self.sizes

    def _declared(self, classes: Sequence[float] | None) -> list[float] | None:
        """The labels that may be told: those of the site's own file, or a pair that everybody uses."""
        targets = [self.silos.targets, *(y for _, y in self.silos.held_out.values())]
        found = {float(v) for y in targets for v in torch.unique(y).tolist()}
        if self.silos.targets.ndim > 1:
            found.discard(IGNORED)
        if classes is not None:
            if other := sorted(found - set(map(float, classes))):
                raise DataError(f"{self.name}: the target {other[0]:g} is not among its classes ({list(classes)})")
            return sorted(map(float, classes))
        if len(found) == 1 and found <= {-1.0, 0.0, 1.0}:
            return []  # which pair it is of, others have to say
        return next((sorted(pair) for pair in _PAIRS if found <= pair), None)

    def _digest(self) -> str:
        silos = self.silos
        parts = {"features": silos.features, "targets": silos.targets}
        for part, (X, y) in silos.held_out.items():
            parts |= {f"{part} features": X, f"{part} targets": y}
        extra = {"weights": silos.weights, "offsets": silos.margin_offsets}
        extra |= {f"{part} offsets": t for part, t in silos.held_margin_offsets.items()}
        parts |= {k: v for k, v in extra.items() if v is not None}
        plain = {k: v for k, v in parts.items() if isinstance(v, torch.Tensor)}
        for name, rows in parts.items():
            plain |= {f"{name} {k}": v for k, v in rows.tensors().items()} if isinstance(rows, SparseRows) else {}
        mapped = {name: rows.identity() for name, rows in parts.items() if isinstance(rows, MappedRows)}
        return files.digest(plain, {"names": repr(silos.feature_names), **mapped})

    def answer(self, request: Content) -> Content:
        """Do what a message asks, or refuse it in one line; never raises because of what a message says.

        What leaves is in the audit log before it does; that an order waits for approval once.
        """
        made, here = self._judged(request)
        return self._noted(request, made, self.account.told(), self.ledger.number, here)

    def _noted(self, request: Content, made: Content, epsilon: float | None, ledger: int, here: str) -> Content:
        """An answer that is in the audit log, with what it cost, the ledger's number and why it was refused here."""
        if "waiting" in made:
            if (order := wire.digest(request)) in self._waiting:
                return made
            self._waiting.add(order)
            self._log(f"{wire.text(made, 'waiting')}: fedcomposite federation pending | approve | reject SITE DIGEST")
        try:
            if self._audit is not None:
                self._audit.note(request, made, epsilon, ledger, here)
        except AuditError as error:
            self._log(f"refused: {error}")
            return wire.content(refusal="its audit log cannot be continued; the site's people have to look at it")
        return made

    def note_refusal(self, what: str, reason: str) -> None:
        """Take down in the audit log what came to the site and was refused unread; the same once in a minute."""
        now = time.monotonic()
        if self._audit is None or now < self._noticed.get(f"{what}: {reason}", 0.0):
            return
        self._noticed = {f"{what}: {reason}": now + 60.0, **{k: v for k, v in self._noticed.items() if v > now}}
        try:
            self._audit.append({"asked by": "unknown", "what": what, "refused": reason})
        except AuditError as error:
            self._log(f"refused: {error}")

    def _judged(self, request: Content) -> tuple[Content, str]:
        """The answer, and what a refusal has to do with the data, for the site's own people."""
        here = ""
        try:
            return self._counted(request), here
        except DataError as error:  # may quote samples, so its text stays here
            self._log(f"refused: {wire.clean(error)}")
            reason = "its data do not fit this experiment (see the site's log)"
        except UnapprovedError as error:
            return wire.content(waiting=str(error)), here
        except _FAULTLESS as error:
            reason = wire.clean(str(error).splitlines()[0] if str(error) else "")
            here = wire.clean(error.here) if isinstance(error, RefusalError) else ""
            self._log(f"refused: {reason}" + (f" (here: {here})" if here else ""))
        except Exception as error:
            self._log(f"failed: {type(error).__name__}: {wire.clean(error)}")
            reason = f"failed with {type(error).__name__} (see the site's log)"
        return wire.content(refusal=reason), here

    def _counted(self, request: Content) -> Content:
        """The answer, with nobody else at the books; a refusal that hangs on the samples is taken down."""
        with self.ledger.alone():
            self.ledger.check_refusals()
            try:
                return self._answer(request)
            except Exception as error:
                if isinstance(error, DataRefusalError) or not isinstance(error, _FAULTLESS):
                    self.ledger.refused(wire.digest(request))
                raise

    def _order_of(self, request: Content) -> tuple[Order, Config]:
        """The order and its experiment; a message that is too large, or for another site, is refused."""
        if (weight := wire.weight(request)) > self.limits.max_message_mb * 1e6:
            most = self.limits.max_message_mb
            raise RefusalError(f"a message of {weight / 1e6:.0f} MB is over this site's max_message_mb = {most:g}")
        order = Order.read(wire.text(request, "order"))
        if order.site != self.name:
            raise RefusalError(f"the order is for {order.site!r}")
        if self._parsed is None or self._parsed[0] != order.config:
            self._parsed = order.config, parse(policy.short(order.config), recipe=True)
        return order, self._parsed[1]

    def _answer(self, request: Content) -> Content:
        order, config = self._order_of(request)
        check_allowed(self.limits, config, order)
        policy.permit(self.limits, config, order)
        check_prepared(self.silos, config)
        if self._approvals is not None:
            features = math.prod(self.silos.features.shape[1:])
            rule = self._approvals.check(config, order, features, lambda: self._cost(order, config))
            self.gate.allow(order, rule)
        if order.secure is None:
            policy.check_plain(self.limits)
        self.gate.bind(order, config)
        self._check_version(config)
        if order.shape is not None:
            if (order.shape.targets, order.shape.target_dtype) != self._targets(config):
                raise RefusalError("the experiment's targets have another shape or type than this site's")
            heads = {site: head for site, head in order.heads.items() if site in order.shape.sites}
            PeerHeads(self.store.folder / "heads.json").keep(self.name, heads, self._sums.vault.peers)
        if order.secure is not None:
            return self._sums.answer(order, order.secure, config, request, self)
        if order.analysis is not None and not order.analysis.introduces:
            return self._desk.answer(order, order.analysis, config, request)
        if order.shape is None:
            return wire.content(introduction=self.introduce(order, config).model_dump_json())
        done = self.work(order, order.shape, config, request)
        return wire.content(report=done.report, vectors=done.vectors)

    def _check_version(self, config: Config) -> None:
        """Refuse to answer of data that differ from earlier ones by few rows, unless noise hides these."""
        if config.privacy is None:
            self._versions.check()

    def _timed(self, order: Order, job: _Job, given: Vectors) -> tuple[dict[str, float], Vectors]:
        began = time.perf_counter()
        with process.threads(job.threads):
            done = self._work(order, job, given)
        what = f"round {order.round + 1}" if order.train else f"evaluation after round {order.round}"
        self._log(f"job {order.job}: {what} in {time.perf_counter() - began:.2f} s")
        return done

    def work(self, order: Order, shape: Shape, config: Config, request: Content) -> Worked:
        """Carry out a round, an evaluation, or both."""
        job = self._job(order, shape, config)
        given = self._given(order, job, request)
        report, vectors = self._timed(order, job, {k: v.to(job.start.device) for k, v in given.items()})
        return Worked(given, report, {k: v.cpu() for k, v in vectors.items()}, job.problem.measures)

    def tell(self, order: Order, analysis: AnalysisOrder, config: Config, request: Content) -> Told:
        """Answer queries about the samples as a table, or questions about them."""
        return self._desk.tell(order, analysis, config, request)

    # -- introduction -------------------------------------------------------------------------------------------------

    def introduce(self, order: Order, config: Config) -> Introduction:
        """What this site says about its data."""
        labels, shape = self._told(config), self._shape(config)
        self.gate.let_out(np.ones(self.sizes["train"]), self.kept)
        policy.judge(self.limits, config, shape, self.known_sizes(config))
        problem = self._problem(config, shape, self.silos)
        noised_answers.check_samples(self.silos, config)
        smooth = problem.smooth()
        if level(config) is not None:
            smooth.check_private()
        self.account.afford(order, config, problem)
        scale = smooth.scale() if isinstance(smooth, Linear) and config.privacy is None else None
        curvature = problem.loss.curvature if isinstance(problem.loss, Loss) else math.inf
        return Introduction(
            site=self.name,
            version=__version__,
            samples=self.said(config)["train"] if config.budget is None else self.limits.min_samples,
            weight=None if self.silos.weights is None else float(self.silos.weights.sum()),
            weighted=self.silos.weights is not None,
            noised=minimum_counts.blurs(self.limits),
            head=self.head(),
            features=shape.features,
            dtype=shape.dtype,
            names=shape.names,
            labels=labels,
            targets=shape.targets,
            target_dtype=shape.target_dtype,
            smoothness=curvature * scale if scale is not None and math.isfinite(curvature) else None,
            scale=scale,
            honest=None if config.privacy is None else self.limits.honest_parties,
        )

    def _shape(self, config: Config) -> Shape:
        """The form of this site's samples."""
        dtype = str(self.silos.features.dtype).removeprefix("torch.")
        if dtype not in wire.DTYPES:
            raise RefusalError(f"samples of type {dtype} cannot be used in a federation; store float64 or uint8")
        weighted = config.problem.settings["class_weight"] or {}  # by labels that other sites may have
        labels = self._told(config)
        if not (labels or weighted) and policy.classifies(config) and not policy.may_be_numbers(config):
            labels = [0.0, 1.0]
        several, kind = self._targets(config)
        return Shape(
            features=list(self.silos.features.shape[1:]),
            dtype=dtype,  # type: ignore[arg-type]
            targets=several,
            target_dtype=kind,  # type: ignore[arg-type]
            names=list(self.silos.feature_names),
            labels=sorted({*labels, *weighted}),
            clients=1,
        )

    def _targets(self, config: Config) -> tuple[list[int] | None, str]:
        """Shape and type of a sample's target, which matter to a network."""
        targets = self.silos.targets
        if config.model is None:
            return None, "float64"
        return list(targets.shape[1:]) or None, str(targets.dtype).removeprefix("torch.")

    def _cost(self, order: Order, config: Config) -> float | None:
        if config.budget is not None:
            return self.account.study_cost(order, config)
        return self.account.cost(order, config, skeleton(config, self._shape(config), self.silos.recipe))

    def _told(self, config: Config) -> list[float]:
        """The labels of a classifier, as this site tells them; refuses one for targets that are no declared classes."""
        if not policy.classifies(config):
            return []
        if self._labels is None:
            if policy.may_be_numbers(config):
                return []
            raise DataError("these targets are not two labels in {-1, 1} or {0, 1}: declare [data] classes = [...]")
        parts = {"train": self.silos.targets}
        if set(config.problem.metrics) & set(policy.PER_CLASS):
            parts |= {part: y for part, (_, y) in self.silos.held_out.items()}
        for part, y in parts.items():
            classes, counts = _samples_by_label(y)
            if config.privacy is None and len(counts) and int(counts.min()) < self.limits.min_class:  # noise hides it
                here = f"class {float(classes[counts.argmin()]):g} has {int(counts.min())} {part} samples"
                raise DataRefusalError(f"a class has fewer samples here than min_class = {self.limits.min_class}", here)
        if not self._labels and self.limits.epsilon is not None:  # that there is one class only would tell on samples
            return [-1.0, 1.0] if float(self.silos.targets.min()) < 0 else [0.0, 1.0]
        return self._labels

    @staticmethod
    def _problem(config: Config, shape: Shape, silos: Silos) -> Problem:
        general = skeleton(
            config, shape, silos.recipe
        )  # what is wrong here is the experiment's fault, not that of the data
        try:
            return local_problem(general, config, shape, silos)
        except ValueError as error:
            raise DataError(str(error)) from None

    # -- work ---------------------------------------------------------------------------------------------------------

    def _job(self, order: Order, shape: Shape, config: Config) -> _Job:
        key = order.config, shape, order.client, order.job, self.account.query(order, config)
        if self._cache is None or self._cache[0] != key:
            self._cache = None  # two of them might not fit
            self._cache = key, self._build(order, shape, config)
        return self._cache[1]

    def _build(self, order: Order, shape: Shape, config: Config) -> _Job:
        own = self.silos.features
        if set(shape.names) != set(self.silos.feature_names) or len(shape.names) != len(self.silos.feature_names):
            raise RefusalError("the experiment's columns are not this site's")
        if (tuple(shape.features), wire.DTYPES[shape.dtype]) != (tuple(own.shape[1:]), own.dtype):
            raise RefusalError(f"the experiment's samples have shape {shape.features}, {shape.dtype}: not this site's")
        self._told(config)
        self.gate.let_out(np.ones(self.sizes["train"]), self.kept)
        steps = policy.judge(self.limits, config, shape, self.known_sizes(config))
        silos = dataclasses.replace(arrange(self.silos, shape.names), ids=(order.client,))
        problem = self._problem(config, shape, silos)
        algorithm = config.make_algorithm(config.specs[0], None)
        where = self.device if config.privacy is None else "cpu"  # noise is drawn by the system, in memory
        if fault := autocast_fault(problem, where):
            raise RefusalError(fault)
        smooth = problem.smooth(config.dtype, where)
        if isinstance(smooth, Linear) and self.account.query(order, config) is None:
            minimum_counts.check_features(self.limits, silos, shape.names)
        smooth.check_batches(config.run.batch_size, silos)
        per = config.run.batch_size or int(silos.sizes[0])
        batches = self.gate.batches(config, self._seed(order, config), int(silos.sizes[0]), self.kept)
        look: Callable[[Tensor], None] = functools.partial(margins_within, smooth, self.limits, self.gate.most)
        privacy, query, said = level(config), self.account.query(order, config), self.sizes
        if query is not None:
            smooth.check_private()
            self.account.afford(order, config, problem)
            said = self.said(config)
            smooth.said = np.array([said["train"]], np.float64)
            look = functools.partial(self._charge, order.job, query)  # a refused margin would tell on a sample
        purse = BudgetedGradients(self.ledger, order.job, steps, look)
        client = Client(
            algorithm, smooth, problem.regularizer, batches, Counter(), guard=purse.guard,
            privacy=privacy, source=self.source,
        )  # fmt: skip
        start, rules = smooth.start(), algorithm.at(0)
        server, state = rules.init(start, problem.regularizer.during(0))
        threads = process.fitting_threads(smooth.reach(per, 1), smooth.device)
        return _Job(
            problem,
            client,
            purse,
            start,
            smooth.buffers(),
            state,
            rules.broadcast(server),
            privacy,
            query,
            said,
            threads,
        )

    def _charge(self, job: str, query: Query, x: Tensor) -> None:
        self.account.charge(job, query)

    def _seed(self, order: Order, config: Config) -> int:
        """The seed of minibatches and random layers: nobody else's business, unless this site says so.

        Without either of them it only tosses a method's coins, which are no secret.
        """
        if self.limits.reproducible_batches or (config.run.batch_size is None and config.model is None):
            return config.seed
        return self.ledger.secret_seed(order.job, config.seed, order.client)

    @staticmethod
    def _given(order: Order, job: _Job, request: Content) -> Vectors:
        """The vectors of an order."""
        expected = wire.form({"buffers": job.buffers})
        if order.train:
            longest = max(len(job.start), *(t.numel() for t in job.message))
            sent = wire.named("message", job.message)
            expected |= {k: wire.Form((longest,), v.dtype, exact=False) for k, v in sent.items()}
            if order.last < 0:
                expected |= wire.form({"start": job.start})
        if order.evaluate:
            expected |= wire.form({"model": job.start})
        return wire.unpack(request, expected)

    def _work(self, order: Order, job: _Job, given: Vectors) -> tuple[dict[str, float], Vectors]:
        self._admit(order, job, given)
        report: dict[str, float] = {"round": order.round, "samples": job.said["train"]}
        vectors: Vectors = {}
        try:
            if order.evaluate:
                vectors |= self._evaluate(order, job, given, report)
            if order.train:
                vectors |= self._train(order, job, given, report)
        finally:
            if order.train:
                job.purse.settle()
        return report, vectors

    def _admit(self, order: Order, job: _Job, given: Vectors) -> None:
        """Take the order down in the ledger, before anything is computed."""
        sent, asked = {k: v for k, v in given.items() if k != "model"}, dict[str, str]()
        if "start" in given:
            self.gate.start(order, files.digest({"start": given["start"]}, {}))
        if order.train:
            asked["train"] = files.digest(sent, order.depends("last", "position", "cohort"))[:16]
        if order.evaluate:
            asked["evaluate"] = files.digest({k: given[k] for k in ("model", "buffers")}, order.depends())[:16]
        if order.secure is not None:
            asked = asked_of(order, order.secure, asked, given)
        work = {"gradients": job.purse.expected} if order.train else {}
        work |= {"evaluations": 1} if order.evaluate else {}
        self.ledger.admit(order.job, order.round, asked, None, **work)

    def _train(self, order: Order, job: _Job, given: Vectors, report: dict[str, float]) -> Vectors:
        client, counter = job.client, job.client.counter
        gradients, proxes = counter.gradients, counter.proxes
        message = wire.tuple_of(type(job.message), "message", given)
        place = order.position, order.cohort
        if order.last < 0:
            state = client.algorithm.at(0).init(given["start"], job.problem.regularizer.during(0))[1]
        else:
            state = self.store.load(order.job, order.last, job.state)
        try:
            reply, after, buffers, _ = client.train(message, state, order.round, place, given["buffers"])
        except StepError as error:
            raise RefusalError(f"round {order.round + 1}: {error}") from None
        if not (messages.finite(reply) and messages.finite(after) and messages.all_finite(buffers)):
            raise DataRefusalError("its numbers left the finite range: the steps are probably too large")
        if after:
            self.store.save(order.job, order.round, order.last, after)
        report |= {"gradients": counter.gradients - gradients, "proxes": counter.proxes - proxes}
        if order.secure is not None:
            reply = messages.decoded(client.algorithm.at(order.round), reply)
        return {**wire.named("reply", reply), "buffers": buffers}

    def _evaluate(self, order: Order, job: _Job, given: Vectors, report: dict[str, float]) -> Vectors:
        model = given["model"]
        if job.privacy is None or job.query is None:
            margins_within(job.client.smooth, self.limits, self.gate.most, model)
            seen = job.client.evaluate(model, given["buffers"])
        else:
            self.account.charge(order.job, job.query)
            summed = order.secure is not None and job.privacy.share < 1
            seen = private.evaluate(
                job.client.smooth, model, job.privacy, self.source, job.problem.silos.held_out, job.problem.measures,
                claims.least_loss(job.problem.loss), job.said, bounded=not summed,
            )  # fmt: skip
        gradient = seen.gradient
        report["loss"] = float(seen.loss)
        if not (messages.all_finite(gradient) and messages.all_finite(seen.loss)):
            if job.query is not None and order.secure is not None:
                raise RefusalError("its numbers left the finite range")  # zeros would lack its share of the noise
            # The model has diverged: say so in a scalar, since vectors must be finite.
            report["loss"], gradient = math.inf, torch.zeros_like(gradient)
        counts = {k: v for k, v in seen.counts.items() if messages.all_finite(v)}
        if job.query is None and self.gate.scale > 0:
            counted = model.detach().cpu().numpy().tobytes()
            for part in {k.partition("/")[0] for k in counts if k.partition("/")[2] in NOISED_METRICS}:
                draw, scale = self.gate.count_at(part, counted)
                mine = sorted(k for k in counts if k.startswith(f"{part}/"))
                counts |= {k: metric_counts(k.partition("/")[2], counts[k], scale, draw) for k in mine}
        return {"gradient": gradient, **{f"counts.{k}": v for k, v in counts.items()}}
