"""Sending to sites that come and go: who is missing is said, what is late is sent again, what is wrong is refused."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from fedcomposite._validation import Count, Positive, ZeroOrMore, validate
from fedcomposite.federation import wire
from fedcomposite.federation.engines.engine import Engine, Reply
from fedcomposite.federation.wire import Content, WireError, clean
from fedcomposite.runtime.transports import StoppedError

T = TypeVar("T")
_LOOK = 1.0  # seconds between two looks at who is there
_APPROVAL = 2.0  # seconds after which a site is asked again whether its people have approved
Policy = Literal["wait", "skip"]


class FederationError(RuntimeError):
    """The federation cannot go on; the message is one line and names the site."""


@dataclass(frozen=True)
class Settings:
    """How patient a run is."""

    policy: Policy = "wait"
    """What to do about missing sites: wait for them, or go on with the others."""
    round_timeout: Positive = 600.0
    """Seconds after which an order is sent again, doubled every time; an answer to any of them counts."""
    patience: ZeroOrMore = 30.0
    """Seconds that "skip" waits for a site before going on without it."""
    give_up: Positive = 86400.0
    """Seconds that "wait" waits for a site before the run stops (it can be resumed)."""
    min_sites: Count = 1
    """Fewest sites with which "skip" goes on."""
    tell_every: Positive = 10.0
    """Seconds between lines that name the missing sites."""
    max_entry: Positive = 1e15
    """Largest number that a site may report, as long as most of them stay below it."""
    max_ratio: Positive = 1e5
    """How much larger than the others' (their median, at least 1) a site's numbers may be, with three sites or more."""

    secure: bool = False
    """Whether only sums of the sites' numbers may be known."""

    def __post_init__(self) -> None:
        validate(self)


@dataclass
class _Sent:
    ids: list[str]  # of the order, and of its repetitions
    at: float  # of the last one
    session: str  # since when the site has been connected
    patience: float


class Delivery:
    """Requests to named sites over an engine, and their checked answers.

    ``permitted()`` gives the sites that may take part now; ``log`` receives one line per event; ``stop()`` is asked
    between looks.
    """

    def __init__(
        self,
        engine: Engine,
        permitted: Callable[[], Collection[str]],
        settings: Settings,
        log: Callable[[str], None],
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.engine, self.permitted, self.settings, self.log, self._stop = engine, permitted, settings, log, stop
        self.absent: set[str] = set()
        """Sites that "skip" went on without, until they are heard again."""
        self.missing: dict[str, float] = {}
        """Seconds for which sites have been waited for, now."""
        self.unapproved: dict[str, str] = {}
        """Sites whose people have to approve what is asked, now, and what these said."""

    def collect(
        self,
        requests: Mapping[str, Content],
        check: Callable[[str, Content], T],
        policy: Policy | None = None,
    ) -> dict[str, T]:
        """Send the requests and gather the answers that pass ``check``, by site.

        With "wait" all of them, or an error; with "skip" those of the sites that are there and answer well.
        """
        one = _Exchange(self, requests, check, policy or self.settings.policy)
        while one.pending:
            if self._stop():
                raise StoppedError
            now = time.monotonic()
            one.send(now)
            one.receive(now)
            one.lose_patience(now)
            if one.pending:
                self.engine.wait(one.numbers, _LOOK)
        self.missing, self.unapproved = {}, {}
        self.check_enough(one.answers, one.policy)
        return one.answers

    def present(self, sites: Sequence[str]) -> list[str]:
        """The sites that are there now, or come within the patience of "skip"."""
        ends = time.monotonic() + self.settings.patience
        while True:
            if not self.engine.settled():
                ends = time.monotonic() + self.settings.patience
            permitted, online = self.permitted(), self.engine.present()
            here = [site for site in sites if site in permitted and site in online]
            if len(here) == len(sites) or time.monotonic() > ends:
                return here
            if self._stop():
                raise StoppedError
            self.engine.wait([], _LOOK)

    def check_enough(self, answers: Mapping[str, T], policy: Policy | None = None) -> None:
        """Refuse to go on with fewer than ``min_sites``."""
        if (policy or self.settings.policy) == "skip" and len(answers) < self.settings.min_sites:
            few = f"{len(answers)} site(s) answered, fewer than min_sites = {self.settings.min_sites}"
            raise FederationError(few)

    def refuse(self, name: str, reason: str, policy: Policy | None = None) -> None:
        """Say that a site is not to be counted: the end of the run, or a line in its log."""
        if (policy or self.settings.policy) == "wait":
            raise FederationError(f"{name}: {clean(reason)}")
        self.log(f"refused: {name}: {clean(reason)}")


class _Exchange(Generic[T]):
    """One round of requests on its way."""

    def __init__(
        self,
        post: Delivery,
        requests: Mapping[str, Content],
        check: Callable[[str, Content], T],
        policy: Policy,
    ) -> None:
        self._post, self._check, self.policy = post, check, policy
        self.pending, self.answers = dict(requests), dict[str, T]()
        self._sent: dict[str, _Sent] = {}
        self._not_before: dict[str, float] = {}
        self._began = self._told = self._settled = time.monotonic()
        self._look, self._permitted, self._online = 0.0, post.permitted(), post.engine.present()

    @property
    def numbers(self) -> list[str]:
        """Of the orders on their way."""
        return [number for sent in self._sent.values() for number in sent.ids]

    def send(self, now: float) -> None:
        """Ask every site that is there and has not been asked, or not answered for too long."""
        if now >= self._look:
            self._permitted, self._look = self._post.permitted(), now + 1.0
        self._online = self._post.engine.present()
        for name in [p for p in self.pending if p not in self._permitted]:
            self._lose(name, "is not registered or was revoked")
        orders = {p: self._encoded(p) for p in self.pending if p in self._online and self._wants(p, now)}
        for name, number in (self._post.engine.push(orders) if orders else {}).items():
            old, session = self._sent.get(name), self._online[name]
            if old is None:
                self._sent[name] = _Sent([number], now, session, self._post.settings.round_timeout)
                continue
            why = f"has not answered for {now - old.at:.0f} s" if session == old.session else "has connected anew"
            self._post.log(f"{name} {why}; asked again")
            self._sent[name] = _Sent([*old.ids, number], now, session, 2 * old.patience)

    def _encoded(self, name: str) -> bytes:
        """A site's order as it travels."""
        return wire.encode(self.pending[name])

    def _wants(self, name: str, now: float) -> bool:
        if now < self._not_before.get(name, 0.0):
            return False
        sent = self._sent.get(name)
        # A site that was killed and is back before anybody noticed has lost its order.
        anew = sent is not None and self._online[name] != sent.session
        return sent is None or anew or now - sent.at > sent.patience

    def receive(self, now: float) -> None:
        """Take what has arrived."""
        owner = {number: name for name, sent in self._sent.items() for number in sent.ids}
        for reply in self._post.engine.pull(list(owner)) if owner else []:
            name = owner.get(reply.order, "")
            if name not in self.pending:
                continue
            if reply.report is None:
                self._again(name, reply, now)
                continue
            try:
                content = wire.decode(reply.report)
                if "waiting" in content:
                    self._await_approval(name, reply, wire.text(content, "waiting"), now)
                    continue
                self.answers[name] = self._check(name, content)
            except WireError as error:
                self._lose(name, str(error))
                continue
            except Exception as error:
                self._lose(name, f"its answer cannot be used ({type(error).__name__})")
                continue
            del self.pending[name], self._sent[name]
            if self._post.unapproved.pop(name, ""):
                self._post.log(f"approved at {name}")
            if name in self._post.absent:
                self._post.log(f"{name} is back")
                self._post.absent.discard(name)

    def _again(self, name: str, reply: Reply, now: float) -> None:
        """Have an order that was lost on its way sent again."""
        self._post.log(f"{name} did not answer: {clean(reply.lost or 'no reason given')}")
        self._take_back(name, reply, now + 1.0)
        self._look = 0.0

    def _await_approval(self, name: str, reply: Reply, said: str, now: float) -> None:
        """Have an order given again until the site's people have approved it."""
        if name not in self._post.unapproved:
            self._post.log(f"waiting for approval at {name}: {clean(said)}")
        self._post.unapproved[name] = clean(said)
        self._take_back(name, reply, now + _APPROVAL)

    def _take_back(self, name: str, reply: Reply, until: float) -> None:
        self._sent[name].ids.remove(reply.order)
        if not self._sent[name].ids:
            del self._sent[name]
        self._not_before[name] = until

    def _lose(self, name: str, reason: str) -> None:
        """A site that is not to be counted: the end of the run, or a line in its log."""
        self._post.refuse(name, reason, self.policy)
        self._post.unapproved.pop(name, "")
        del self.pending[name]
        self._sent.pop(name, None)

    def lose_patience(self, now: float) -> None:
        """Name the missing sites, and go on without them or give up when it is time."""
        post, waited = self._post, now - self._began
        if self.policy == "skip" and waited < self._post.settings.give_up and not post.engine.settled():
            self._settled = now  # an engine that starts, or is lost itself, says nothing about sites
        patient = now - self._settled
        away = [p for p in self.pending if p not in self._sent]
        post.missing = {p: waited for p in (away if waited < post.settings.patience else self.pending)}
        if self.policy == "skip":
            if patient > 1.0 or self.answers:
                for name in [p for p in away if p in post.absent]:
                    del self.pending[name]
            if patient > post.settings.patience:
                for name in self.pending:
                    post.log(f"going on without {name}, missing for {waited:.0f} s")
                post.absent |= set(self.pending)
                self.pending.clear()
        elif self.pending and waited > post.settings.give_up:
            if post.unapproved:
                refusals = [f"{name}: refuses: {said}" for name, said in post.unapproved.items()]
                raise FederationError("; ".join(refusals) + "; go on when it is approved")
            raise FederationError(f"{', '.join(self.pending)}: no answer for {waited:.0f} s; resume when back")
        if post.missing and now - self._told >= post.settings.tell_every:
            self._told = now
            post.log(in_wait(post.missing, post.unapproved))


def in_wait(missing: Mapping[str, float], unapproved: Collection[str]) -> str:
    """Who is waited for, and for how many seconds; those whose people have to approve first are named as such."""
    names = [f"{'approval at ' * (name in unapproved)}{name} ({seconds:.0f} s)" for name, seconds in missing.items()]
    return f"waiting for {', '.join(names)}"
