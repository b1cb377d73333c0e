"""Secure sums, the coordinator's side: it carries keys and boxes between sites, adds masked numbers, opens sums.

It can read none of what it carries. See ``secure`` for the protocol.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from fedcomposite.federation import wire
from fedcomposite.federation.coordinator.delivery import Delivery, FederationError, Policy
from fedcomposite.federation.orders import AnalysisOrder, Key, Order, Secure
from fedcomposite.federation.secure import keys, masking, shamir
from fedcomposite.federation.secure.masking import Mask, MaskError, Numbers
from fedcomposite.federation.wire import Content, WireError

_TRIES = 20  # epochs in a row that sites may spoil by being restarted


class Stale:
    """The answer of a site that has lost its keys."""


@dataclass
class Epoch:
    """The keys of one epoch, as the coordinator knows them."""

    name: str
    config: str
    recover: bool
    keys: dict[str, Key]
    boxes: dict[str, dict[str, str]] = field(default_factory=dict)  # by sender, then by receiver
    used: set[str] = field(default_factory=set)

    @property
    def parties(self) -> list[str]:
        """Those who can take part in a sum."""
        return sorted(self.boxes) if self.recover else sorted(self.keys)

    def order(self, site: str, trainers: Sequence[str] = (), samples: int = 0) -> Secure:
        """What an order for a sum says to one site."""
        boxes = {s: sent[site] for s, sent in self.boxes.items() if s != site and site in sent}
        return Secure(
            phase="sum", epoch=self.name, recover=self.recover, parties=self.parties, trainers=sorted(trainers),
            boxes=boxes if self.recover else {}, samples=samples,
        )  # fmt: skip


@dataclass(frozen=True)
class Asked:
    """A sum that was asked for: by purpose, the digest of its content and its parties."""

    epoch: Epoch
    order: Order
    """Any of its orders."""
    sums: dict[str, tuple[str, list[str]]]


class Assembly:
    """The keys of a job's sites, and their sums."""

    def __init__(self, post: Delivery, job: str) -> None:
        self._post, self._job = post, job
        self._epoch: Epoch | None = None

    def epoch(self, order: Order, sites: Sequence[str], policy: Policy, use: Sequence[str]) -> Epoch:
        """Keys with which some sums (``use``) can be asked for: those there are, unless they are spent.

        ``order`` is any of those for the sums: keys are for its experiment, and for an analysis if it is one.
        """
        old, wanted = self._epoch, (order.config, sorted(sites), policy)
        lasting = old is not None and (old.config, old.parties, "wait") == wanted and not old.recover
        if old is None or not lasting or set(use) & old.used:
            analysis = (
                None
                if order.analysis is None
                else AnalysisOrder(number=order.analysis.number, plan=order.analysis.plan)
            )
            plain = Order(job=self._job, site="", config=order.config, round=order.round, analysis=analysis)
            self._epoch = self._begin(plain, sites, policy)
        assert self._epoch is not None
        self._epoch.used |= set(use)
        return self._epoch

    def forget(self) -> None:
        """Begin with fresh keys next time."""
        self._epoch = None

    def _begin(self, order: Order, sites: Sequence[str], policy: Policy) -> Epoch:
        for _ in range(_TRIES):
            name, recover = secrets.token_hex(16), policy == "skip"
            first = Secure(phase="keys", epoch=name, recover=recover, parties=sorted(sites))
            keys = self._ask(order, dict.fromkeys(sites, first), policy, _key)
            found = [keys[s] for s in sorted(keys)]
            second = Secure(phase="shares", epoch=name, recover=recover, keys=found)
            boxes = self._ask(order, dict.fromkeys(keys, second), policy, _boxes)
            if not any(isinstance(b, Stale) for b in boxes.values()):
                return Epoch(name, order.config, recover, keys, boxes)
        raise FederationError("sites were restarted again and again while they made keys")

    def _ask(
        self, order: Order, what: Mapping[str, Secure], policy: Policy, read: Callable[[str, str], Any]
    ) -> dict[str, Any]:
        """One small exchange."""
        requests = {
            site: wire.content(order=order.model_copy(update={"site": site, "secure": one}).model_dump_json())
            for site, one in what.items()
        }

        def check(site: str, content: Content) -> Any:
            return answer(content, policy) or read(site, wire.text(content, "secure"))

        return self._post.collect(requests, check, policy)

    # -- opening ------------------------------------------------------------------------------------------------------

    def total(self, asked: Asked, parts: Mapping[str, Mapping[str, Numbers]], policy: Policy) -> dict[str, Numbers]:
        """The sums, by purpose, of what has arrived from some sites."""
        sums = {}
        for purpose, (_, parties) in asked.sums.items():
            there = [parts[s][purpose] for s in parties if s in parts]
            if there:
                sums[purpose] = masking.total(there)
        if not asked.epoch.recover:
            return sums
        own, gone = self._opened(asked, sorted(parts), policy)
        bound = keys.bundle(list(asked.epoch.keys.values()))
        for purpose, numbers in sums.items():
            content, parties = asked.sums[purpose]
            assert asked.order.secure is not None
            where = keys.context(asked.order, asked.order.secure, bound, purpose, content, parties)
            for site in (s for s in parties if s in parts):
                numbers = Mask(own[site], where).add(numbers, -1)
                for other in (o for o in parties if o not in parts):
                    seed = masking.pair_seed(gone[other], asked.epoch.keys[site].mask, site, other, bound)
                    numbers = Mask(seed, where).add(numbers, -masking.side(site, other))
            sums[purpose] = numbers
        return sums

    def _opened(
        self, asked: Asked, alive: list[str], policy: Policy
    ) -> tuple[dict[str, bytes], dict[str, X25519PrivateKey]]:
        """The seeds of the masks of those who are in a sum, and the keys of those who are not."""
        epoch, names = asked.epoch, sorted(asked.epoch.keys)
        last = Secure(phase="open", epoch=epoch.name, recover=True, survivors=alive)
        told = self._ask(asked.order, dict.fromkeys(alive, last), policy, _shares)
        threshold = shamir.least(len(names))
        if len(told) < threshold:
            raise FederationError(
                f"{len(told)} sites helped to open a secure sum, {threshold} are needed; the round is void"
            )
        place = {name: i for i, name in enumerate(names, 1)}

        def secret(kind: str, site: str) -> bytes:
            return shamir.join({place[s]: one[kind][site] for s, one in told.items() if site in one[kind]}, threshold)

        try:
            own = {s: secret("own", s) for s in alive}
            gone = {s: X25519PrivateKey.from_private_bytes(secret("gone", s)) for s in epoch.parties if s not in alive}
        except MaskError as error:
            raise FederationError(f"a secure sum cannot be opened: {error}; the round is void") from None
        good = all(keys.commitment(seed) == epoch.keys[s].commitment for s, seed in own.items())
        if not good or any(masking.public(key) != epoch.keys[s].mask for s, key in gone.items()):
            raise FederationError("a secure sum cannot be opened: a share is false; the round is void")
        return own, gone


def answer(content: Content, policy: Policy) -> Stale | None:
    """Take a refusal as such; whether a site has lost its keys, which "skip" does not wait for."""
    if wire.kind(content) == "refusal":
        raise WireError("refuses: " + (wire.clean(wire.text(content, "refusal")) or "without a reason"))
    if wire.kind(content) != "secure" or '"stale"' not in wire.text(content, "secure"):
        return None
    if policy == "skip":
        raise WireError("was restarted and has lost its keys for this round")
    return Stale()


def _json(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text) if len(text) < 1 << 22 else None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise WireError("its keys cannot be read")
    return found


def _key(site: str, text: str) -> Key:
    key = Key.read(text)
    if key.site != site:
        raise WireError(f"gives the keys of {wire.clean(key.site, 60)!r}")
    return key


def _boxes(site: str, text: str) -> dict[str, str]:
    return {str(k): str(v) for k, v in _json(text).items() if len(str(v)) <= 1000}


def _shares(site: str, text: str) -> dict[str, dict[str, bytes]]:
    found = _json(text)
    try:
        return {kind: {str(s): bytes.fromhex(v) for s, v in found[kind].items()} for kind in ("own", "gone")}
    except (KeyError, TypeError, ValueError, AttributeError):
        raise WireError("its shares cannot be read") from None
