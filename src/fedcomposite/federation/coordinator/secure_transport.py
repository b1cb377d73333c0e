"""The transport of a secure federation: the same orders and rounds, but reports are masked and only sums are opened.

What is lost: a single site's numbers cannot be compared with the others', and there are no least and largest values of
a metric over the sites.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from fedcomposite.algorithms.base import AnyAlgorithm
from fedcomposite.federation import wire
from fedcomposite.federation.coordinator.delivery import Delivery, FederationError, Policy
from fedcomposite.federation.coordinator.transport import JobParties, SiteTransport
from fedcomposite.federation.orders import Order
from fedcomposite.federation.secure import assembly, encoding
from fedcomposite.federation.secure.assembly import Asked, Assembly, Stale
from fedcomposite.federation.secure.keys import alike
from fedcomposite.federation.secure.masked_answers import contents_of
from fedcomposite.federation.secure.masking import MaskError, Numbers
from fedcomposite.federation.wire import Content, Form, Vectors, WireError
from fedcomposite.problems import Evaluation, Problem
from fedcomposite.runtime import messages
from fedcomposite.runtime.protocol import Round
from fedcomposite.runtime.transports import Gathered

T = TypeVar("T")
_TRIES = 20  # exchanges in a row that restarted sites may spoil


class SecureTransport(SiteTransport):
    """Sites of which only sums are known; ``samples`` of all of them together."""

    def __init__(
        self,
        post: Delivery,
        sites: JobParties,
        algorithm: AnyAlgorithm,
        problem: Problem,
        start: Tensor,
        assembly: Assembly,
        samples: int,
        *,
        private: bool = False,
    ) -> None:
        super().__init__(post, sites, algorithm, problem, start, private=private)
        self.assembly, self.samples = assembly, samples

    def exchange(self, request: Round) -> SecureExchange:  # type: ignore[override]
        """Ask for a sum, until all who have to be in it are."""
        for _ in range(_TRIES):
            done = self._attempt(request)
            if done is not None:
                return done
            self.assembly.forget()
            self.post.log("a site has lost its keys; everybody is asked again, with fresh masks")
        raise FederationError("sites were restarted again and again; go on when they are stable")

    def _attempt(self, request: Round) -> SecureExchange | None:
        """One try; None if a site that was restarted needs other keys."""
        who = [] if request.participants is None or request.message is None else [int(i) for i in request.participants]
        names, policy = self.sites.names, self.post.settings.policy
        everybody = request.model is not None or policy == "wait"
        asked_for = list(names) if everybody else [names[i] for i in who]
        purposes = ["train"] * bool(who) + ["evaluate"] * (request.model is not None)
        first = Order(job=self.sites.job, site="", config=self.sites.config, round=request.round)
        epoch = self.assembly.epoch(first, asked_for, policy, [f"{request.round} {p}" for p in purposes])
        trainers = [names[i] for i in who if names[i] in epoch.parties]
        contents: dict[str, str] = {}
        requests, orders = {}, dict[str, Order]()
        for i, site in enumerate(names):
            if site in epoch.parties and (site in trainers or request.model is not None):
                plain, vectors = self._order(i, who, request)
                secure = epoch.order(site, trainers, self.samples)
                orders[site] = plain.model_copy(update={"secure": secure})
                requests[site] = wire.content(order=orders[site].model_dump_json(), vectors=vectors)
                contents |= contents_of(vectors, plain.train, plain.evaluate, alike(secure))
        parties = {"train": sorted(trainers), "evaluate": epoch.parties}
        asked = Asked(
            epoch, next(iter(orders.values())), {p: (contents[p], parties[p]) for p in purposes if p in contents}
        )
        expected, like = self._expected(request, len(who))

        def check(site: str, content: Content) -> Stale | dict[str, Numbers]:
            return assembly.answer(content, policy) or _report(content, orders[site], expected)

        got = self.post.collect(requests, check)
        if any(isinstance(a, Stale) for a in got.values()):
            return None
        there = {site: a for site, a in got.items() if not isinstance(a, Stale)}
        sums = self.assembly.total(asked, there, policy)
        counted = {p: [s for s in parties[p] if s in there] for p in sums}
        return SecureExchange(self, request, sums, counted, like)

    def _expected(self, request: Round, cohort: int) -> tuple[dict[str, dict[str, Form]], Any]:
        """What masked reports must look like, by purpose, and the form of the mean reply."""
        forms, like = {}, None
        if cohort and request.message is not None:
            rules = self.algorithm.at(request.round)
            like = messages.decoded(rules, self.rehearsed(request, cohort))
            size = sum(t.numel() for t in like) + request.buffers.numel()
            forms["train"] = encoding.forms("train", size, encoding.SCALARS["train"])
        if request.model is not None:
            counts = 3 * sum(self.widths().values())
            forms["evaluate"] = encoding.forms("evaluate", request.model.numel(), encoding.SCALARS["evaluate"] + counts)
        return forms, like

    def widths(self) -> dict[str, int]:
        """How many counts each metric has."""
        return encoding.widths(self._measured_forms(), self.problem.measures)

    @property
    def least(self) -> float:
        """The least that a loss can be."""
        return self._least


class Summed(NamedTuple, Generic[T]):
    """What has come of asking some sites for one sum."""

    said: dict[str, T]
    """What each of them says in plain text."""
    sum: Numbers


def summed(
    post: Delivery,
    assembled: Assembly,
    orders: Mapping[str, Order],
    purpose: str,
    form: Mapping[str, Form],
    read: Callable[[str, Content], T],
    *,
    policy: Policy,
    group: str,
    content: str = "",
    vectors: bytes | None = None,
) -> Summed[T]:
    """Ask sites for a sum of one purpose, until all who have to be in it are; ``read`` takes what is not masked."""
    more: dict[str, Any] = {} if vectors is None else {"vectors": vectors}
    for _ in range(_TRIES):
        epoch = assembled.epoch(next(iter(orders.values())), list(orders), policy, [f"{group} {purpose}"])
        asked = {s: orders[s].model_copy(update={"secure": epoch.order(s)}) for s in epoch.parties}
        requests = {s: wire.content(order=o.model_dump_json(), **more) for s, o in asked.items()}

        def check(site: str, content: Content) -> Stale | tuple[T, Numbers]:
            return assembly.answer(content, policy) or (
                read(site, content), encoding.numbers_of(purpose, wire.unpack(content, form))
            )  # fmt: skip

        got = post.collect(requests, check, policy)
        there = {s: a for s, a in got.items() if not isinstance(a, Stale)}
        if len(there) < len(got):
            assembled.forget()
            post.log("a site has lost its keys; everybody is asked again, with fresh masks")
            continue
        what = Asked(epoch, next(iter(asked.values())), {purpose: (content, epoch.parties)})
        sums = assembled.total(what, {s: {purpose: a[1]} for s, a in there.items()}, policy)
        return Summed({s: a[0] for s, a in there.items()}, sums[purpose])
    raise FederationError("sites were restarted again and again; go on when they are stable")


def introductions(
    post: Delivery,
    assembled: Assembly,
    orders: Mapping[str, Order],
    policy: Policy,
    read: Callable[[str, Content], T],
) -> tuple[dict[str, T], encoding.IntroductionSums]:
    """The sites' introductions, and the sums of the numbers that they leave out."""
    form = encoding.forms("introduce", 0, encoding.SCALARS["introduce"])
    met = summed(post, assembled, orders, "introduce", form, read, policy=policy, group="introduction")
    with void():
        return met.said, encoding.moments(met.sum, len(met.said))


def _report(content: Content, order: Order, expected: dict[str, dict[str, Form]]) -> dict[str, Numbers]:
    if wire.numbers(content) != {"round": order.round}:
        raise WireError(f"does not answer round {order.round + 1}")
    wanted = ["train"] * order.train + ["evaluate"] * order.evaluate
    vectors: Vectors = wire.unpack(content, {k: v for p in wanted for k, v in expected[p].items()})
    return {p: encoding.numbers_of(p, vectors) for p in wanted}


@dataclass(frozen=True)
class SecureExchange:
    """An exchange whose sums are open."""

    _transport: SecureTransport
    _request: Round
    _sums: dict[str, Numbers]
    _counted: dict[str, list[str]]
    _like: Any

    def measured(self) -> Evaluation:
        """The weighted means of the sites' losses and gradients, and one row of counts."""
        carried, model = self._transport, self._request.model
        assert model is not None
        with void():
            loss, gradient, counts = encoding.evaluation_of(
                self._sums["evaluate"], len(self._counted["evaluate"]), model, carried.widths()
            )
        carried.asked(1)
        if carried.private:  # sums of noised numbers may lie beyond what these can be
            loss = loss.clamp(min=carried.least)
            counts = {k: _within(v) if k.endswith("/accuracy") else v for k, v in counts.items()}
        if float(loss) < carried.least - 1e-9:
            raise FederationError(f"the mean loss is {float(loss):.3g}, less than it can be: a site lies")
        measures = replace(carried.problem.measures, clients=False)
        return Evaluation(loss, gradient, counts, measures)

    def remarks(self) -> dict[str, int]:
        """How many sites were there, if not all."""
        there = len(self._counted["evaluate"])
        return {} if there == self._transport.clients else {"sites": there}

    def gathered(self) -> Gathered:
        """The mean of the replies."""
        carried, message, request = self._transport, self._request.message, self._request
        if "train" not in self._sums or message is None:
            raise FederationError(f"no site took part in round {request.round + 1}")
        who = self._counted["train"]
        with void():
            found = encoding.round_of(self._sums["train"], len(who), self._like, request.buffers)
        carried.counter.gradients += found.gradients
        each, rest = divmod(found.gradients, len(who))
        carried.asked(found.gradients if rest else each)  # sites ask alike; if not, none asked more than all together
        carried.counter.proxes += found.proxes
        carried.counter.bytes_down += len(who) * (messages.sent(message) + request.buffers.nbytes)
        carried.counter.bytes_up += len(who) * self._sums["train"].words.nbytes
        for site in who:
            carried.last[list(carried.sites.names).index(site)] = request.round
        return Gathered(found.mean, found.buffers, len(who), False)


def _within(counts: Tensor) -> Tensor:
    """Rows (right, all) with a number of right ones that can be."""
    return torch.stack([counts[:, 0].clamp(min=0.0).minimum(counts[:, 1]), counts[:, 1]], dim=1)


@contextlib.contextmanager
def void() -> Iterator[None]:
    """Sums whose masks do not cancel end the run; a wrong sum is never used."""
    try:
        yield
    except MaskError as error:
        raise FederationError(str(error)) from None
