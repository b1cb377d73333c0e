"""The transport over the network: orders go to sites, their checked reports come back.

An exchange is one order to each site that has something to do. It carries the message of the round and, when the model
is due for evaluation, the model itself; the report carries the reply, and loss, gradient and counts at that model. So
round r + 1 is on its way while round r is being measured, and evaluation costs no extra exchange.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedcomposite import files
from fedcomposite.aggregators import Aggregator
from fedcomposite.algorithms.base import AnyAlgorithm
from fedcomposite.federation import wire
from fedcomposite.federation.coordinator import claims
from fedcomposite.federation.coordinator.delivery import Delivery, FederationError
from fedcomposite.federation.orders import Order, Shape
from fedcomposite.federation.wire import Content, Form, Vectors, WireError
from fedcomposite.problems import Counter, Evaluation, Problem
from fedcomposite.problems.measures import PARTS
from fedcomposite.runtime import messages, records
from fedcomposite.runtime.protocol import Round
from fedcomposite.runtime.transports import Gathered


class LastRounds(NamedTuple):
    """What the server remembers of its sites."""

    last: Tensor  # last round of each


@dataclass(frozen=True)
class Answer:
    """One site's checked report."""

    numbers: dict[str, float]
    vectors: Vectors


@dataclass(frozen=True)
class JobParties:
    """The parties of a job, and what is known about them before the first round."""

    job: str
    names: Sequence[str]
    samples: Sequence[int]
    config: str
    """The experiment, as it goes to every site."""
    shape: Shape
    weights: Sequence[float] = ()
    """What the sites count, where that is not their samples."""
    recipe: str = ""
    """How their tables become features, as JSON."""
    heads: Mapping[str, str] = field(default_factory=dict)
    """Of their audit logs; each site is told those of the others when it first takes part."""


class SiteTransport:
    """Clients that are sites of a federation; see :class:`fedcomposite.runtime.Transport`."""

    lockstep = False
    leads = True
    remark = ""

    def __init__(
        self,
        post: Delivery,
        sites: JobParties,
        algorithm: AnyAlgorithm,
        problem: Problem,
        start: Tensor,
        *,
        aggregator: Aggregator | None = None,
        private: bool = False,
    ) -> None:
        self.aggregator, self.private = aggregator, private
        self.post, self.sites, self.algorithm, self.problem, self._start = post, sites, algorithm, problem, start
        self.clients = n = len(sites.names)
        self.counter = Counter()
        self.last = [-1] * n
        sizes = np.asarray(sites.weights or sites.samples, float)
        self.weights = sizes / sizes.sum() if problem.weighting == "samples" else np.full(n, 1 / n)
        self._replies: dict[tuple[bool, int, int], Any] = {}
        self._measurement: dict[str, Form] = {}
        self._least = claims.least_loss(problem.loss)
        self._held: list[dict[str, float]] = [{} for _ in sites.names]
        self._rehearsed: Any = None
        self.reply: Any = None
        """The type of the method's replies, once a round was asked for."""

    # -- an exchange ------------------------------------------------------------------------------------------------

    def ask(self, requests: Sequence[Round]) -> list[Any]:
        """Send the orders of a round, and gather the reports."""
        return [self.exchange(request) for request in requests]

    def exchange(self, request: Round) -> SiteExchange:
        """Send the orders, and gather the reports."""
        who = [] if request.participants is None else [int(i) for i in request.participants]
        expected = {} if request.message is None else self._form(request, len(who))
        requests, wanted, blocks = {}, {}, dict[tuple[str, ...], bytes]()
        for i, site in enumerate(self.sites.names):
            if i in who or request.model is not None:
                order, vectors = self._order(i, who, request)
                forms = (dict(expected) if order.train else {}) | (self._measured_forms() if order.evaluate else {})
                same = tuple(vectors)  # sites that are sent vectors of these names are sent the same ones
                blocks[same] = blocks.get(same) or wire.block(vectors)
                requests[site] = wire.content(order=order.model_dump_json(), vectors=blocks[same])
                wanted[site] = order, forms
        answers = self.post.collect(requests, lambda site, content: self._check(content, *wanted[site]))
        answers = self._familiar(answers)
        return SiteExchange(self, request, answers, [i for i in who if self.sites.names[i] in answers])

    def asked(self, queries: int) -> None:
        """Count what every site was asked for, where answers are noised."""
        if self.private:
            self.counter.queries += queries
            self.counter.most_queries = max(self.counter.most_queries, queries)

    def _order(self, i: int, who: list[int], request: Round) -> tuple[Order, Vectors]:
        train = i in who
        order = Order(
            job=self.sites.job,
            site=self.sites.names[i],
            config=self.sites.config,
            shape=self.sites.shape,
            client=i,
            round=request.round,
            last=self.last[i],
            position=who.index(i) if train else 0,
            cohort=max(1, len(who)),
            train=train,
            evaluate=request.model is not None,
            recipe=self.sites.recipe,
            heads=dict(self.sites.heads) if self.last[i] < 0 else {},
        )
        vectors: Vectors = {"buffers": request.buffers}
        if train and request.message is not None:
            vectors |= wire.named("message", request.message)
            if self.last[i] < 0:
                vectors["start"] = self._start
        if request.model is not None:
            vectors["model"] = request.model
        return order, vectors

    def _form(self, request: Round, cohort: int) -> dict[str, Form]:
        """What a reply must look like."""
        reply = self.rehearsed(request, cohort)
        return wire.form({**wire.named("reply", reply), "buffers": request.buffers})

    def rehearsed(self, request: Round, cohort: int) -> Any:
        """A reply, found out by rehearsing the round with zero gradients, when it may change."""
        assert request.message is not None
        key = request.round > 0, request.round % self.algorithm.exchanges, cohort
        if key not in self._replies or self.algorithm.varying:
            h, rules = self.problem.regularizer, self.algorithm.at(request.round)
            if self._rehearsed is None:
                early = self.algorithm.at(0)
                server, client = early.init(self._start, h)
                reply, self._rehearsed = records.rehearse(early, early.broadcast(server), client, h, cohort)
                if request.round > 0:
                    reply, _ = records.rehearse(rules, request.message, self._rehearsed, h, cohort)
            else:
                reply, _ = records.rehearse(rules, request.message, self._rehearsed, h, cohort)
            self.reply = type(reply)
            self._replies[key] = reply
        return self._replies[key]

    def _measured_forms(self) -> dict[str, Form]:
        """What a measurement must look like: a gradient, and rows of counts for the parts that a site has."""
        if not self._measurement:
            seen = self.problem.smooth(self._start.dtype).evaluate(self._start)  # of the skeleton
            widths = {name.partition("/")[2]: rows.shape[1] for name, rows in seen.counts.items()}
            if seen.measures.loss:
                widths["loss"] = 2
            self._measurement = wire.form({"gradient": self._start}) | {
                f"counts.{part}/{name}": Form((1, width), torch.float64, required=False)
                for part in PARTS
                for name, width in widths.items()
            }
        return self._measurement

    def _check(self, content: Content, order: Order, forms: dict[str, Form]) -> Answer:
        check_refusal(content)
        numbers, samples = wire.numbers(content), self.sites.samples[order.client]
        claims.check_numbers(numbers, order, samples, self._least)
        vectors = wire.unpack(content, forms)
        claims.check_counts(vectors, samples, self._held[order.client], signed=self._least < 0)
        return Answer(numbers, vectors)

    def _familiar(self, answers: dict[str, Answer]) -> dict[str, Answer]:
        """The reports without those that one site alone could spoil the round with."""
        settings = self.post.settings
        reports = {site: claims.sizes(a.numbers, a.vectors) for site, a in answers.items()}
        for site, reason in claims.strangers(reports, settings.max_entry, settings.max_ratio).items():
            self.post.refuse(site, reason)
            del answers[site]
        self.post.check_enough(answers)
        return answers

    # -- around the rounds ------------------------------------------------------------------------------------------

    def totals(self) -> Counter:
        """What the sites reported, and what the server did."""
        return replace(self.counter)

    def agree(self, stop: bool) -> bool:
        """One process decides."""
        return stop

    def running(self) -> AbstractContextManager[None]:
        """The sites have processes of their own."""
        return nullcontext()

    def save(self, path: Path, name: str) -> NamedTuple:
        """The sites keep their states; the server keeps which of them counted."""
        return self.states

    def saved(self, path: Path, name: str) -> None:
        """Nothing lies beside a checkpoint."""

    def load(self, path: Path, name: str) -> None:
        """Take up where each site was."""
        self.last = files.read(path)[0]["clients.last"].tolist()

    @property
    def states(self) -> LastRounds:
        """The last round of each site."""
        return LastRounds(torch.tensor(self.last))


@dataclass(frozen=True)
class SiteExchange:
    """An exchange whose reports are here."""

    _transport: SiteTransport
    _request: Round
    _answers: dict[str, Answer]
    _who: list[int]

    def _there(self) -> tuple[list[Answer], npt.NDArray[np.float64]]:
        """The reports of the sites that measured the model, and their weights, which sum to 1."""
        names = self._transport.sites.names
        there = [i for i, site in enumerate(names) if site in self._answers]
        weights = self._transport.weights[there]
        return [self._answers[names[i]] for i in there], weights / weights.sum()

    def measured(self) -> Evaluation:
        """The weighted means of the sites' losses and gradients, and their rows of counts."""
        got, weights = self._there()
        self._transport.asked(1)
        stacked = torch.stack([a.vectors["gradient"] for a in got])
        gradient = torch.tensordot(torch.from_numpy(weights).to(stacked), stacked, dims=1)
        loss = torch.tensor(sum(w * a.numbers["loss"] for w, a in zip(weights, got, strict=True)))
        rows: dict[str, list[Tensor]] = {}
        for answer in got:
            for name, row in answer.vectors.items():
                if name.startswith("counts."):
                    rows.setdefault(name.removeprefix("counts."), []).append(row)
        counts = {k: torch.cat(v) for k, v in rows.items() if len(v) == len(got) or not k.startswith("train/")}
        return Evaluation(loss, gradient, counts, self._transport.problem.measures)

    def remarks(self) -> dict[str, int]:
        """How many sites were there, if not all."""
        there = len(self._answers)
        return {} if there == self._transport.clients else {"sites": there}

    def gathered(self) -> Gathered:
        """The mean of the replies."""
        carried, who, message = self._transport, self._who, self._request.message
        if not who or message is None:
            raise FederationError(f"no site took part in round {self._request.round + 1}")
        got = [self._answers[carried.sites.names[i]] for i in who]
        each = [wire.tuple_of(carried.reply, "reply", a.vectors) for a in got]
        replies = carried.reply(*map(torch.stack, zip(*each, strict=True)))
        buffers = torch.stack([a.vectors["buffers"] for a in got])
        uniform = carried.problem.weighting == "uniform"
        weights = None if uniform else torch.from_numpy((carried.weights * carried.clients)[who])
        for answer in got:
            carried.counter.gradients += int(answer.numbers["gradients"])
            carried.counter.proxes += int(answer.numbers["proxes"])
        carried.counter.bytes_down += len(who) * (messages.sent(message) + self._request.buffers.nbytes)
        carried.counter.bytes_up += messages.sent(replies, clients=True) + buffers.nbytes
        for i in who:
            carried.last[i] = self._request.round
        carried.asked(max(int(answer.numbers["gradients"]) for answer in got))
        decoded = carried.algorithm.at(self._request.round).decode(replies)
        if (robust := carried.aggregator) is not None:
            together = robust.rule(buffers) if buffers.numel() else buffers[0]
            return Gathered(robust.combine(decoded), together, len(who), False)
        return Gathered(messages.mean(decoded, weights), messages.mean_buffers(buffers, weights), len(who), False)


def check_refusal(content: Content) -> None:
    """Take a site's refusal as such."""
    if wire.kind(content) == "refusal":
        raise WireError("refuses: " + (wire.clean(wire.text(content, "refusal")) or "without a reason"))
