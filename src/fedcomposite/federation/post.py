"""Sending to sites that come and go: who is missing is said, what is late is sent again, what is wrong is refused."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedcomposite._validation import Count, NonNegative, Positive, validate
from fedcomposite.federation.wire import WireError

T = TypeVar("T")


class FederationError(RuntimeError):
    """The federation cannot go on; the message is one line and names the site."""


class StoppedError(Exception):
    """Somebody asked the run to stop."""


@dataclass(frozen=True)
class Settings:
    """How patient a run is."""

    policy: Literal["wait", "skip"] = "wait"
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
        self._grid, self._nodes, self._settings, self._log, self._stop = grid, nodes, settings, log, stop
        self._absent: set[str] = set()
        self.missing: dict[str, float] = {}
        """Seconds for which sites have been waited for, now."""

    def collect(
        self,
        requests: Mapping[str, RecordDict],
        group: str,
        check: Callable[[str, RecordDict], T],
        policy: Literal["wait", "skip"] | None = None,
    ) -> dict[str, T]:
        """Send the requests and gather the answers that pass ``check``, by site.

        With "wait" all of them, or an error; with "skip" those of the sites that are there and answer well.
        """
        policy = policy or self._settings.policy
        pending, answers = dict(requests), {}
        sent: dict[str, _Sent] = {}
        not_before: dict[str, float] = {}
        began = told = time.monotonic()
        look, nodes, online = 0.0, self._nodes(), set[int]()
        while pending:
            if self._stop():
                raise StoppedError
            now = time.monotonic()
            if now >= look:
                nodes, online, look = self._nodes(), set(self._grid.get_node_ids()), now + 1.0
            for name in [p for p in pending if p not in nodes]:
                self._lose(name, "is not registered or was revoked", policy)
                del pending[name]
            late = [n for n, s in sent.items() if now - s.at > s.patience]
            for name in late:
                self._log(f"{name} has not answered for {now - sent[name].at:.0f} s; asking again")
            ready = [
                p
                for p in pending
                if (p in late or p not in sent) and nodes[p] in online and now >= not_before.get(p, 0.0)
            ]
            for name, number in zip(ready, self._push([(nodes[p], pending[p]) for p in ready], group), strict=True):
                old = sent.get(name, _Sent([], now, self._settings.round_timeout / 2))
                sent[name] = _Sent([*old.ids, number], now, 2 * old.patience)
            owner = {number: name for name, s in sent.items() for number in s.ids}
            for message in self._grid.pull_messages(list(owner)) if owner else ():
                number = message.metadata.reply_to_message_id
                name = owner[number]
                if name not in pending:
                    continue
                if message.has_error() and f"{name} refuses" not in message.error.reason:
                    # The engine speaks here (the site went away), not the site: its order is sent again.
                    self._log(f"{name} did not answer: {message.error.reason}")
                    sent[name].ids.remove(number)
                    if not sent[name].ids:
                        del sent[name]
                    not_before[name], look = now + 1.0, 0.0
                    continue
                try:
                    if message.has_error():
                        raise WireError(message.error.reason.removeprefix(f"{name} "))
                    answers[name] = check(name, message.content)
                    if name in self._absent:
                        self._log(f"{name} is back")
                        self._absent.discard(name)
                except WireError as error:
                    self._lose(name, str(error), policy)
                del pending[name], sent[name]
            away = [p for p in pending if p not in sent]
            self.missing = {p: now - began for p in (away if now - began < self._settings.patience else pending)}
            if policy == "skip":
                for name in [p for p in away if p in self._absent] if now - began > 1.0 or answers else []:
                    del pending[name]
                if now - began > self._settings.patience:
                    for name in pending:
                        self._log(f"going on without {name}, missing for {now - began:.0f} s")
                    self._absent |= set(pending)
                    break
            elif now - began > self._settings.give_up:
                raise FederationError(f"{', '.join(pending)}: no answer for {now - began:.0f} s; resume when back")
            if now - told >= self._settings.tell_every and self.missing:
                told = now
                self._log("waiting for " + ", ".join(f"{n} ({s:.0f} s)" for n, s in self.missing.items()))
            if pending:
                time.sleep(self._settings.poll)
        self.missing = {}
        if policy == "skip" and len(answers) < self._settings.min_sites:
            raise FederationError(f"{len(answers)} site(s) answered, fewer than min_sites = {self._settings.min_sites}")
        return answers

    def _lose(self, name: str, reason: str, policy: str) -> None:
        """A site that is not to be counted: the end of the run, or a line in its log."""
        if policy == "wait":
            raise FederationError(f"{name}: {reason}")
        self._log(f"refused: {name}: {reason}")

    def _push(self, orders: list[tuple[int, RecordDict]], group: str) -> list[str]:
        if not orders:
            return []
        made = [Message(content, dst_node_id=n, message_type="train", group_id=group) for n, content in orders]
        return list(self._grid.push_messages(made))
