"""Secure sums, the site's side: what leaves is masked, and each mask is used once.

The protocol is that of Bonawitz et al. (Practical secure aggregation for privacy-preserving machine learning, 2017),
with keys that the sites sign themselves. An ``epoch`` is a set of keys. Its phases, each an order of the coordinator:

========== ============================================================================================================
keys       every site makes two X25519 keys and signs them with its own key, which the others know from their enrolment
shares     every site gets all keys, checks the signatures and derives a seed with each other site; if sites may go
           away, it also has the seed of its own mask and its private mask key shared among the others, encrypted
sum        every site computes and sends its numbers under its masks
open       only if sites may go away: for every site whose numbers arrived the others give shares of the seed of its own
           mask, for every other one shares of its mask key; nobody gives both
========== ============================================================================================================

Without ``recover`` (policy "wait") there are no masks of one's own and nothing is ever opened: the sum is that of all
parties or none, and an epoch lasts for the job. With it (policy "skip") an epoch is good for one round.

Keys live in the memory of this process only. A site that was restarted says that it does not know an epoch, and the
coordinator begins another with fresh keys.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from fedcomposite.federation import wire
from fedcomposite.federation.engines import signing
from fedcomposite.federation.orders import Key, Order, Secure
from fedcomposite.federation.secure import masking, shamir
from fedcomposite.federation.secure.masking import MaskError, Numbers, frame, seal
from fedcomposite.federation.site.policy import Limits, RefusalError
from fedcomposite.federation.wire import Content

_EPOCHS = 4  # that are remembered


def bundle(keys: list[Key]) -> str:
    """The digest of all keys of an epoch: what masks and encrypted shares are bound to."""
    parts = [p for k in sorted(keys, key=lambda k: k.site) for p in (k.site, k.channel, k.mask, k.commitment)]
    return seal("bundle", *parts)


def signed_words(key: Key, order: Order, secure: Secure) -> tuple[str, ...]:
    """What a site signs of its keys: for which job, experiment and epoch they are."""
    mode = "recover" if secure.recover else "all"
    return ("masks", order.job, seal(order.config), secure.epoch, mode, key.site, key.channel, key.mask, key.commitment)


def context(order: Order, secure: Secure, bound: str, purpose: str, content: str, parties: list[str]) -> bytes:
    """What a mask belongs to; two sums with different contexts have nothing to do with each other."""
    shape = "" if order.shape is None else order.shape.model_dump_json()
    begun = order.last if purpose == "train" and alike(secure) else ""
    return frame(
        "sum", order.job, secure.epoch, bound, place(order), purpose, seal(order.config), shape, content,
        seal(order.recipe), secure.samples, begun, *parties,
    )  # fmt: skip


def alike(secure: Secure) -> bool:
    """Whether all parties train, in every round, so that each is sent the same and has trained as often."""
    return not secure.recover and secure.trainers == secure.parties


def place(order: Order) -> int:
    """The number of a sum within a job: of the round, or of the exchange of an analysis."""
    return order.round if order.analysis is None else order.analysis.number


def box_key(key: X25519PrivateKey, theirs: str, bound: str, sender: str, receiver: str) -> ChaCha20Poly1305:
    """The cipher of one box: its key is used once, so that the nonce may be zero."""
    return ChaCha20Poly1305(masking.agree(key, theirs, frame("box", bound, sender, receiver)))


@dataclass
class _Epoch:
    """What a site knows of one."""

    about: tuple[str, str, bool]  # job, experiment, whether sites may go away
    channel: X25519PrivateKey
    mask: X25519PrivateKey
    own: bytes
    key: Key
    keys: dict[str, Key] = field(default_factory=dict)
    bound: str = ""
    told: str = ""  # the answer to "shares"
    seeds: dict[str, bytes] = field(default_factory=dict)
    shares: dict[str, tuple[bytes, bytes]] = field(default_factory=dict)  # of own masks and of mask keys
    used: set[str] = field(default_factory=set)  # masks
    last: tuple[str, Content] | None = None  # the latest sum that was asked for, and what was answered
    parties: list[str] = field(default_factory=list)  # of the latest sum
    summed: dict[str, tuple[str, list[str]]] = field(default_factory=dict)  # purposes: contents and parties
    opened: list[str] | None = None

    @property
    def threshold(self) -> int:
        return shamir.least(len(self.keys))


class MaskKeys:
    """A site's keys for secure sums, and the rules by which they are used."""

    def __init__(
        self,
        name: str,
        limits: Limits,
        key: ec.EllipticCurvePrivateKey | None = None,
        peers: Mapping[str, ec.EllipticCurvePublicKey] | None = None,
    ) -> None:
        self._name, self._limits, self._key, self._peers = name, limits, key, dict(peers or {})
        self._epochs: dict[str, _Epoch] = {}

    @property
    def peers(self) -> Mapping[str, ec.EllipticCurvePublicKey]:
        """The other sites' public keys, as far as they are known."""
        return self._peers

    # -- before a sum -------------------------------------------------------------------------------------------------

    def prepare(self, order: Order, secure: Secure) -> Content:
        """Answer the phases "keys" and "shares"."""
        if secure.phase == "keys":
            return wire.content(secure=self._keys(order, secure).model_dump_json())
        epoch = self._known(order, secure)
        if epoch is None:
            return stale()
        return wire.content(secure=self._agree(order, secure, epoch))

    def _keys(self, order: Order, secure: Secure) -> Key:
        self._check_parties(secure.parties)
        if secure.recover and not self._limits.changing_cohorts:
            raise RefusalError(
                "its secure sums are over all parties or none (policy 'wait'; changing_cohorts = true in its [limits] "
                "would allow 'skip')"
            )
        if (epoch := self._known(order, secure)) is not None:
            return epoch.key
        if self._key is None:
            raise RefusalError("it has no key with which it could sign")
        channel, mask, own = X25519PrivateKey.generate(), X25519PrivateKey.generate(), secrets.token_bytes(masking.SEED)
        key = Key(
            site=self._name, channel=masking.public(channel), mask=masking.public(mask), signature="",
            commitment=commitment(own),
        )  # fmt: skip
        key = key.model_copy(update={"signature": signing.sign(self._key, *signed_words(key, order, secure))})
        self._epochs[secure.epoch] = _Epoch(_about(order, secure), channel, mask, own, key)
        while len(self._epochs) > _EPOCHS:
            del self._epochs[next(iter(self._epochs))]
        return key

    def _known(self, order: Order, secure: Secure) -> _Epoch | None:
        epoch = self._epochs.get(secure.epoch)
        if epoch is not None and epoch.about != _about(order, secure):
            raise RefusalError("these keys were made for another job or experiment")
        return epoch

    def _check_parties(self, parties: list[str]) -> None:
        if self._name not in parties or len(set(parties)) < len(parties):
            raise RefusalError("the parties of a secure sum are not told apart, or this site is not among them")
        if len(parties) < max(2, self._limits.min_parties):
            raise RefusalError(
                f"a sum of {len(parties)} parties is below this site's min_parties = {self._limits.min_parties}"
            )

    def _agree(self, order: Order, secure: Secure, epoch: _Epoch) -> str:
        """Take the keys of all parties; answers with boxes for them where sites may go away."""
        bound = bundle(secure.keys)
        if epoch.bound:
            if bound != epoch.bound:
                raise RefusalError("other keys for the same masks")
            return epoch.told
        self._check_parties([k.site for k in secure.keys])
        for key in secure.keys:
            if key.site == self._name:
                if key != epoch.key:
                    raise RefusalError("the keys that are said to be this site's are not")
            elif key.site not in self._peers:
                raise RefusalError(f"the public key of {key.site} is not among its peers/ (carry {key.site}.pub there)")
            elif not signing.is_signed(self._peers[key.site], key.signature, *signed_words(key, order, secure)):
                raise RefusalError(f"the keys for masks of {key.site} are not signed by it")
        others = {k.site: k for k in secure.keys if k.site != self._name}
        seeds = {s: masking.pair_seed(epoch.mask, k.mask, self._name, s, bound) for s, k in others.items()}
        epoch.keys, epoch.seeds, epoch.bound = {k.site: k for k in secure.keys}, seeds, bound
        epoch.told = json.dumps(self._boxes(epoch) if secure.recover else {})
        return epoch.told

    def _boxes(self, epoch: _Epoch) -> dict[str, str]:
        names = sorted(epoch.keys)
        private = epoch.mask.private_bytes_raw()
        each = [shamir.split(one, len(names), epoch.threshold) for one in (epoch.own, private)]
        boxes = {}
        for name, own, mask in zip(names, *each, strict=True):
            if name == self._name:
                epoch.shares[name] = own, mask
            else:
                cipher = box_key(epoch.channel, epoch.keys[name].channel, epoch.bound, self._name, name)
                boxes[name] = cipher.encrypt(bytes(12), own + mask, None).hex()
        return boxes

    # -- a sum --------------------------------------------------------------------------------------------------------

    def again(self, order: Order, secure: Secure, request: str) -> Content | None:
        """The answer to an order for a sum that came before, or that needs other keys; None if it is to be computed.

        ``request`` is the digest of the whole order: another one may not be answered under the same masks.
        """
        epoch = self._known(order, secure)
        if epoch is None or not epoch.bound:
            return stale()
        if epoch.last is not None and epoch.last[0] == request:
            return epoch.last[1]
        if epoch.used & {f"{place(order)} {p}" for p in _purposes(order)} or (secure.recover and epoch.used):
            raise RefusalError(_used(order))
        return None

    def check(self, order: Order, secure: Secure) -> None:
        """Refuse a sum that says too much: of too few parties, or of others than those whose keys are known."""
        epoch = self._epochs[secure.epoch]
        self._check_parties(secure.parties)
        if secure.parties != sorted(secure.parties) or not set(secure.parties) <= epoch.keys.keys():
            raise RefusalError("the parties of a secure sum are not those whose keys were given")
        if not secure.recover and len(secure.parties) != len(epoch.keys):
            raise RefusalError("a second set of parties for the same keys")
        if secure.recover and len(secure.parties) < epoch.threshold:
            raise RefusalError(f"{len(secure.parties)} parties cannot be opened by {epoch.threshold}")
        _check_place(order, secure)
        if order.train:
            self._check_parties(secure.trainers)
            if secure.trainers != sorted(secure.trainers) or not set(secure.trainers) <= set(secure.parties):
                raise RefusalError("those who train are not among the parties")
            if secure.trainers != secure.parties and not self._limits.changing_cohorts:
                raise RefusalError(_CHANGING)
        for sender in secure.parties if secure.recover else []:
            if sender not in epoch.shares:
                epoch.shares[sender] = self._unbox(epoch, sender, secure.boxes.get(sender, ""))

    def _unbox(self, epoch: _Epoch, sender: str, box: str) -> tuple[bytes, bytes]:
        cipher = box_key(epoch.channel, epoch.keys[sender].channel, epoch.bound, sender, self._name)
        try:
            both = cipher.decrypt(bytes(12), bytes.fromhex(box), None)
        except (InvalidTag, ValueError):
            raise RefusalError(f"the shares that are said to be from {sender} are not") from None
        return both[: shamir.SIZE], both[shamir.SIZE :]

    def conceal(self, order: Order, secure: Secure, purpose: str, content: str, numbers: Numbers) -> Numbers:
        """A site's numbers under the masks of one sum."""
        epoch, parties = self._epochs[secure.epoch], secure.trainers if purpose == "train" else secure.parties
        if (mask := f"{place(order)} {purpose}") in epoch.used:
            raise RefusalError(_used(order))
        epoch.used.add(mask)
        epoch.parties = secure.parties
        epoch.summed[purpose] = content, parties
        seeds = {s: epoch.seeds[s] for s in parties if s != self._name}
        own = epoch.own if secure.recover else None
        return masking.conceal(
            numbers, self._name, seeds, own, context(order, secure, epoch.bound, purpose, content, parties)
        )

    def remember(self, secure: Secure, request: str, answer: Content) -> None:
        """Keep an answer, to be given again if it is lost on the way; only the latest, since it may be large."""
        for epoch in self._epochs.values():
            epoch.last = None
        self._epochs[secure.epoch].last = request, answer

    # -- opening ------------------------------------------------------------------------------------------------------

    def survivors(self, order: Order, secure: Secure) -> dict[str, tuple[str, list[str]]] | None:
        """What would be opened: by purpose, the content of a sum and whose it is; None for an unknown epoch."""
        epoch = self._known(order, secure)
        if epoch is None:
            return None
        alive = secure.survivors
        if not secure.recover or not epoch.summed or alive != sorted(alive):
            raise RefusalError("there is nothing to open")
        if epoch.opened is not None and epoch.opened != alive:
            raise RefusalError("a second opening of the same sum")
        self._check_parties(alive)
        if len(alive) < epoch.threshold or not set(alive) <= set(epoch.parties):
            raise RefusalError(f"{len(alive)} of {len(epoch.keys)} parties are too few to open a sum")
        found = {}
        for purpose, (content, parties) in epoch.summed.items():
            left = [p for p in parties if p in alive]
            if len(left) < self._limits.min_parties:
                raise RefusalError(
                    f"a sum of {len(left)} parties is below this site's min_parties = {self._limits.min_parties}"
                )
            found[purpose] = content, left
        return found

    def open(self, secure: Secure) -> Content:
        """The shares that open a sum: of the masks of those who are in it, and of the keys of those who are not."""
        epoch = self._epochs[secure.epoch]
        epoch.opened = secure.survivors
        alive = set(secure.survivors)
        own = {s: epoch.shares[s][0].hex() for s in epoch.parties if s in alive}
        gone = {s: epoch.shares[s][1].hex() for s in epoch.parties if s not in alive}
        return wire.content(secure=json.dumps({"own": own, "gone": gone}))


_CHANGING = (
    "its secure sums are always over the same parties (changing_cohorts = true in its [limits] would allow others)"
)


def _check_place(order: Order, secure: Secure) -> None:
    """Refuse numbers of a site that are not those that follow from what all sites are told."""
    if order.shape is None:
        return
    if order.site not in order.shape.sites:
        raise RefusalError("a secure sum needs the names of all clients in their order")
    if not (order.train and alike(secure)):
        return
    trainers = [site for site in order.shape.sites if site in secure.trainers]
    if (order.position, order.cohort, order.last) != (trainers.index(order.site), len(trainers), order.round - 1):
        raise RefusalError("its place, its cohort or its last round are not those that follow from the others'")


def _about(order: Order, secure: Secure) -> tuple[str, str, bool]:
    return order.job, seal(order.config), secure.recover


def _used(order: Order) -> str:
    return f"the masks of this {'round' if order.analysis is None else 'exchange'} were used for another answer"


def _purposes(order: Order) -> list[str]:
    if order.analysis is not None and not order.analysis.introduces:
        return ["analysis"]
    if order.shape is None:
        return ["introduce"]
    return ["train"] * order.train + ["evaluate"] * order.evaluate


def commitment(seed: bytes) -> str:
    """The digest by which a seed is recognised."""
    return seal("own", seed)


def stale() -> Content:
    """The answer of a site that does not know an epoch."""
    return wire.content(secure=json.dumps({"stale": True}))


__all__ = ["MaskError", "MaskKeys", "box_key", "bundle", "commitment", "context", "place", "signed_words", "stale"]
