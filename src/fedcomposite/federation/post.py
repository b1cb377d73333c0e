"""Sending to sites that come and go: who is missing is said, what is late is sent again, what is wrong is refused."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedcomposite._validation import Count, NonNegative, Positive, validate
from fedcomposite.federation.wire import WireError
from fedcomposite.runtime.transports import StoppedError

T = TypeVar("T")
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
    patience: NonNegative = 30.0
    """Seconds that "skip" waits for a site before going on without it."""
    give_up: Positive = 86400.0
    """Seconds that "wait" waits for a site before the run stops (it can be resumed)."""
    min_sites: Count = 1
    """Fewest sites with which "skip" goes on."""
    tell_every: Positive = 10.0
    """Seconds between lines that name the missing sites."""
    poll: Positive = 0.1
    """Seconds between looks for replies."""

    def __post_init__(self) -> None:
        validate(self)


@dataclass
class _Sent:
    ids: list[str]  # of the order, and of its repetitions
    at: float  # of the last one
    session: str  # since when the site has been connected
    patience: float


class Post:
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
        if one.policy == "skip" and len(one.answers) < self.settings.min_sites:
            few = f"{len(one.answers)} site(s) answered, fewer than min_sites = {self.settings.min_sites}"
            raise FederationError(few)
        return one.answers

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
        post: Post,
        requests: Mapping[str, RecordDict],
        group: str,
        check: Callable[[str, RecordDict], T],
        policy: Policy,
    ) -> None:
        self._post, self._group, self._check, self.policy = post, group, check, policy
        self.pending, self.answers = dict(requests), dict[str, T]()
        self._sent: dict[str, _Sent] = {}
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
            Message(self.pending[p], dst_node_id=self._nodes[p], message_type="train", group_id=self._group)
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
        for message in self._post.grid.pull_messages(list(owner)) if owner else ():
            number = message.metadata.reply_to_message_id
            name = owner.get(number, "")
            if name not in self.pending:
                continue
            reason = (message.error.reason or "no reason given") if message.has_error() else ""
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
            del self.pending[name], self._sent[name]
            if name in self._post.absent:
                self._post.log(f"{name} is back")
                self._post.absent.discard(name)

    def _lose(self, name: str, reason: str) -> None:
        """A site that is not to be counted: the end of the run, or a line in its log."""
        if self.policy == "wait":
            raise FederationError(f"{name}: {reason}")
        self._post.log(f"refused: {name}: {reason}")
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
