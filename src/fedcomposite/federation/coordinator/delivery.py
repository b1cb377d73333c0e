"""Sending to sites that come and go: who is missing is said, what is late is sent again, what is wrong is refused."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedcomposite._validation import Count, Positive, ZeroOrMore, validate
from fedcomposite.federation.wire import WireError, clean
from fedcomposite.runtime.transports import StoppedError

T = TypeVar("T")
_BROKEN = (AttributeError, LookupError, TypeError, ValueError, RecursionError, AssertionError)
"""What decoding somebody's bytes may come to; connections fail otherwise."""
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
    poll: Positive = 0.1
    """Seconds between looks for replies."""
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
    """Requests to named sites over a Grid, and their checked answers.

    ``nodes()`` gives the registered sites and their node numbers now; ``log`` receives one line per event;
    ``stop()`` is asked between looks.
    """

    def __init__(
        self,
        grid: Grid,
        nodes: Callable[[], Mapping[str, int]],
        settings: Settings,
        log: Callable[[str], None],
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.grid, self.nodes, self.settings, self.log, self._stop = grid, nodes, settings, log, stop
        self.absent: set[str] = set()
        """Sites that "skip" went on without, until they are heard again."""
        self.missing: dict[str, float] = {}
        """Seconds for which sites have been waited for, now."""

    def collect(
        self,
        requests: Mapping[str, RecordDict],
        group: str,
        check: Callable[[str, RecordDict], T],
        policy: Policy | None = None,
    ) -> dict[str, T]:
        """Send the requests and gather the answers that pass ``check``, by site.

        With "wait" all of them, or an error; with "skip" those of the sites that are there and answer well.
        """
        one = _Exchange(self, requests, group, check, policy or self.settings.policy)
        while one.pending:
            if self._stop():
                raise StoppedError
            now = time.monotonic()
            one.send(now)
            one.receive(now)
            one.lose_patience(now)
            if one.pending:
                self._wait(one.numbers)
        self.missing = {}
        self.check_enough(one.answers, one.policy)
        return one.answers

    def present(self, sites: Sequence[str]) -> list[str]:
        """The sites that are there now, or come within the patience of "skip"."""
        ends = time.monotonic() + self.settings.patience
        while True:
            nodes, online = self.nodes(), {n.node_id for n in self.grid.get_nodes()}
            here = [site for site in sites if nodes.get(site) in online]
            if len(here) == len(sites) or time.monotonic() > ends:
                return here
            if self._stop():
                raise StoppedError
            self._wait([])

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

    def _wait(self, numbers: list[str]) -> None:
        """Until there may be something new; a Grid that can tell is asked to."""
        wait = getattr(self.grid, "wait", None)
        if wait is None:
            time.sleep(self.settings.poll)
        else:
            wait(numbers, 1.0)


class _Exchange(Generic[T]):
    """One round of requests on its way."""

    def __init__(
        self,
        post: Delivery,
        requests: Mapping[str, RecordDict],
        group: str,
        check: Callable[[str, RecordDict], T],
        policy: Policy,
    ) -> None:
        self._post, self._group, self._check, self.policy = post, group, check, policy
        self.pending, self.answers = dict(requests), dict[str, T]()
        self._sent: dict[str, _Sent] = {}
        self._one_by_one = False
        self._tickets: dict[str, str] = {}  # groups of orders, and whose they are
        self._not_before: dict[str, float] = {}
        self._began = self._told = time.monotonic()
        self._look, self._nodes, self._online = 0.0, post.nodes(), dict[int, str]()

    @property
    def numbers(self) -> list[str]:
        """Of the orders on their way."""
        return [number for sent in self._sent.values() for number in sent.ids]

    def send(self, now: float) -> None:
        """Ask every site that is there and has not been asked, or not answered for too long."""
        if now >= self._look:
            self._nodes, self._look = self._post.nodes(), now + 1.0
            self._online = {n.node_id: n.last_activated_at for n in self._post.grid.get_nodes()}
        for name in [p for p in self.pending if p not in self._nodes]:
            self._lose(name, "is not registered or was revoked")
        ready = [p for p in self.pending if self._nodes[p] in self._online and self._wants(p, now)]
        messages = [
            Message(self.pending[p], dst_node_id=self._nodes[p], message_type="train", group_id=self._ticket(p))
            for p in ready
        ]
        numbers = list(self._post.grid.push_messages(messages)) if messages else []
        for name, number in zip(ready, numbers, strict=True):
            old, session = self._sent.get(name), self._online[self._nodes[name]]
            if old is None:
                self._sent[name] = _Sent([number], now, session, self._post.settings.round_timeout)
                continue
            why = f"has not answered for {now - old.at:.0f} s" if session == old.session else "has connected anew"
            self._post.log(f"{name} {why}; asked again")
            self._sent[name] = _Sent([*old.ids, number], now, session, 2 * old.patience)

    def _ticket(self, name: str) -> str:
        """The group of a site's orders: a name that others cannot guess."""
        for group, owner in self._tickets.items():
            if owner == name:
                return group
        group = f"{self._group}.{secrets.token_hex(16)}"
        self._tickets[group] = name
        return group

    def _wants(self, name: str, now: float) -> bool:
        if now < self._not_before.get(name, 0.0):
            return False
        sent = self._sent.get(name)
        # A site that was killed and is back before anybody noticed has lost its order.
        anew = sent is not None and self._online[self._nodes[name]] != sent.session
        return sent is None or anew or now - sent.at > sent.patience

    def receive(self, now: float) -> None:
        """Take what has arrived."""
        owner = {number: name for name, sent in self._sent.items() for number in sent.ids}
        for name, message in self._pulled(owner):
            if not name:
                self._post.log("left out: an answer that belongs to no site's order")
            if name not in self.pending:
                continue
            if not isinstance(message, Message) or not (message.has_error() or message.has_content()):
                self._lose(name, "its answer cannot be read")
                continue
            number = message.metadata.reply_to_message_id
            if owner.get(number) != name:
                self._lose(name, "answers an order that it was not given")
                continue
            reason = clean(message.error.reason or "no reason given") if message.has_error() else ""
            if reason and not reason.startswith(f"{name} refuses"):
                # The engine speaks here (the site went away), not the site: its order is sent again.
                self._post.log(f"{name} did not answer: {reason}")
                self._sent[name].ids.remove(number)
                if not self._sent[name].ids:
                    del self._sent[name]
                self._not_before[name], self._look = now + 1.0, 0.0
                continue
            try:
                if reason:
                    raise WireError(reason.removeprefix(f"{name} "))
                self.answers[name] = self._check(name, message.content)
            except WireError as error:
                self._lose(name, str(error))
                continue
            except Exception as error:
                self._lose(name, f"its answer cannot be used ({type(error).__name__})")
                continue
            del self.pending[name], self._sent[name]
            if name in self._post.absent:
                self._post.log(f"{name} is back")
                self._post.absent.discard(name)

    def _pulled(self, owner: Mapping[str, str]) -> list[tuple[str, Any]]:
        """What has arrived, and from whom.

        All answers come with one request, until one of them cannot be decoded: then it is not known whose it was, and
        others may be lost with it. So the sites are asked again, and their answers taken one by one.
        """
        if not owner:
            return []
        pull = self._post.grid.pull_messages
        if self._one_by_one:
            taken: list[tuple[str, Any]] = []
            for name in dict.fromkeys(owner.values()):
                try:
                    taken += [(name, m) for m in pull([i for i, site in owner.items() if site == name])]
                except _BROKEN:
                    taken.append((name, None))
            return taken
        found: list[Any] = []
        try:
            found += pull(list(owner))
        except _BROKEN:
            found.append(None)
        good = [(self._sender(m, owner), m) for m in found if isinstance(m, Message)]
        if len(good) < len(found):
            self._post.log("an answer cannot be decoded; asking again, one by one")
            self._one_by_one, heard = True, {name for name, _ in good}
            self._sent = {name: sent for name, sent in self._sent.items() if name in heard}
        return good

    def _sender(self, message: Any, owner: Mapping[str, str]) -> str:
        """Whose message this is; empty if it is nobody's.

        A message says itself what it answers and where it is from. That a site was given the order shows in the name of
        its group, which holds a number that only this site knows. Errors may be the engine's, which knows no groups.
        """
        about = message.metadata
        if about.group_id in self._tickets:
            return self._tickets[about.group_id]
        ours = message.has_error() and " refuses" not in str(message.error.reason)
        return owner.get(about.reply_to_message_id, "") if ours else ""

    def _lose(self, name: str, reason: str) -> None:
        """A site that is not to be counted: the end of the run, or a line in its log."""
        self._post.refuse(name, reason, self.policy)
        del self.pending[name]
        self._sent.pop(name, None)

    def lose_patience(self, now: float) -> None:
        """Name the missing sites, and go on without them or give up when it is time."""
        post, waited = self._post, now - self._began
        away = [p for p in self.pending if p not in self._sent]
        post.missing = {p: waited for p in (away if waited < post.settings.patience else self.pending)}
        if self.policy == "skip":
            if waited > 1.0 or self.answers:
                for name in [p for p in away if p in post.absent]:
                    del self.pending[name]
            if waited > post.settings.patience:
                for name in self.pending:
                    post.log(f"going on without {name}, missing for {waited:.0f} s")
                post.absent |= set(self.pending)
                self.pending.clear()
        elif self.pending and waited > post.settings.give_up:
            raise FederationError(f"{', '.join(self.pending)}: no answer for {waited:.0f} s; resume when back")
        if post.missing and now - self._told >= post.settings.tell_every:
            self._told = now
            post.log("waiting for " + ", ".join(f"{n} ({s:.0f} s)" for n, s in post.missing.items()))
