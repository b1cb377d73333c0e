"""A site's audit log: who asked, what was computed, digest and size of what left; one line of JSON each, in a chain.

Every line holds the digest of the one before it and is signed with the site's key, and ``audit.head`` holds the number
and the digest of the last line, signed as well. So a line that was changed, removed or put in is found, and so is a log
that lost its end. The head is renewed after the line: a crash may leave the log one line ahead of it, never behind.

A file that has grown large is put aside as ``audit-NUMBER.jsonl``, named by its last line, and the chain goes on in the
next one. Nothing is ever removed, and a part that somebody removes is a gap in the chain.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from cryptography.hazmat.primitives.asymmetric import ec

from fedcomposite._validation import UserError
from fedcomposite.federation import wire
from fedcomposite.federation.engines import signing
from fedcomposite.federation.orders import Order
from fedcomposite.federation.site import analyses
from fedcomposite.federation.wire import Content, WireError
from fedcomposite.files import write_atomic

START = "0" * 64
PART = 64 << 20
"""Bytes after which a file of the log is put aside."""


def head_signed(key: ec.EllipticCurvePublicKey, head: str) -> bool:
    """Whether a head, "NUMBER DIGEST SIGNATURE", is that of the log of a key's owner."""
    number, digest, signature = ([*head.split(), "", "", ""])[:3]
    return signing.is_signed(key, signature, "audit head", number, digest)


class AuditError(UserError):
    """A log that was tampered with, or cannot be read; says where."""


class Audit:
    """The log of one site; ``coordinator`` is the fingerprint of the key that signs orders."""

    def __init__(self, state: Path, key: ec.EllipticCurvePrivateKey, coordinator: str = "") -> None:
        self.path, self._head, self._key, self._coordinator = (
            state / "audit.jsonl",
            state / "audit.head",
            key,
            coordinator,
        )
        self._last: tuple[int, str] | None = None
        self._seen: tuple[int, int] | None = None  # the file as this process left it

    # -- writing ------------------------------------------------------------------------------------------------------

    def note(
        self, request: Content, answer: Content, epsilon: float | None = None, ledger: int = 0, here: str = ""
    ) -> None:
        """Take down an order, what it was answered, and what all noised answers have cost if this was one.

        ``ledger`` is the number of the ledger after it; ``here`` is what a refusal has to do with the data.
        """
        entry: dict[str, Any] = {"asked by": self._coordinator, **_asked(request), "question": wire.digest(request)}
        kind = wire.kind(answer)
        if kind in ("refusal", "waiting"):
            entry["refused"] = wire.text(answer, kind)
        if here:
            entry["here"] = here
        if epsilon is not None:
            entry["epsilon"] = epsilon
        if ledger:
            entry["ledger"] = ledger
        self.append({**entry, "sent": {"kind": kind, "bytes": wire.weight(answer), "sha256": wire.digest(answer)}})

    def append(self, entry: dict[str, Any]) -> None:
        """Add a line, then renew the head; several processes may, one after another."""
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._opened(self.path.with_name("audit.lock")) as lock:  # the log's own file may be put aside
                fcntl.flock(lock, fcntl.LOCK_EX)
                count, previous = self._end()
                self._put_aside(count)
                now = datetime.now(UTC).isoformat(timespec="seconds")
                line = {"number": count + 1, "time": now, **entry, "previous": previous}
                line["signature"] = signing.sign(self._key, "audit", _digest(line))
                with self._opened(self.path) as file:
                    file.write(json.dumps(line).encode() + b"\n")
                    file.flush()
                    os.fsync(file.fileno())
                    self._seen = _extent(file.fileno())
                self._last = count + 1, _digest(line)
                self._seal(*self._last)
        except OSError as error:
            raise AuditError(f"{self.path}: cannot be written ({error.strerror})") from None

    @staticmethod
    def _opened(path: Path) -> IO[bytes]:
        return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab")

    def _put_aside(self, count: int) -> None:
        if self.path.exists() and self.path.stat().st_size >= PART:
            os.replace(self.path, self.path.with_name(f"audit-{count:012d}.jsonl"))

    def _end(self) -> tuple[int, str]:
        """Number and digest of the last line; the log is verified unless this process wrote it.

        A file that is not the one that it left, or that was taken back to an earlier day, is found.
        """
        unchanged = self.path.exists() and _extent(self.path) == self._seen
        if self._last is not None and unchanged and self._last == self._sealed(self._key.public_key()):
            return self._last
        found = self.verify()
        if self._last is not None:
            count, digest = self._last
            if len(found) < count or (count and _digest(found[count - 1]) != digest):
                raise AuditError(f"{self.path}: was taken back to before line {count}, which this process has written")
        return len(found), (_digest(found[-1]) if found else START)

    def ledger(self) -> int:
        """The number that the ledger had at the last answer that is in the log."""
        return max((int(line.get("ledger", 0)) for line in self.verify()), default=0)

    def head(self) -> str:
        """The number and the digest of the last line, to be kept where nobody can change it."""
        found = self.verify()
        return f"{len(found)} {_digest(found[-1]) if found else START}"

    def signed_head(self) -> str:
        """The head as it was sealed, with its signature; empty if there is none yet."""
        try:
            head = json.loads(self._head.read_text(encoding="utf-8"))
            return f"{head['lines']} {head['digest']} {head['signature']}"
        except (OSError, ValueError, KeyError, TypeError):
            return ""

    def signed(self, head: str) -> bool:
        """Whether a head that others have kept is signed by this site, so that the coordinator did not make it up."""
        return head_signed(self._key.public_key(), head)

    def holds(self, head: str) -> bool:
        """Whether a head that was kept elsewhere is one of this log's."""
        found = self.verify()
        number, digest = ([*head.split(), "", ""])[:2]
        if not number.isdigit() or int(number) > len(found):
            return False
        return digest == (_digest(found[int(number) - 1]) if int(number) else START)

    def _seal(self, count: int, digest: str) -> None:
        signature = signing.sign(self._key, "audit head", str(count), digest)
        write_atomic(self._head, json.dumps({"lines": count, "digest": digest, "signature": signature}).encode())

    # -- reading ------------------------------------------------------------------------------------------------------

    def verify(self) -> list[dict[str, Any]]:
        """All lines, oldest first; an error that names the first line that is not as it was written."""
        public, lines = self._key.public_key(), self._lines()
        count, digest = self._sealed(public)
        previous, found = START, []
        for number, (path, raw) in enumerate(lines, 1):
            where = f"{path}, line {number}"
            try:
                line = json.loads(raw)
                signed = {k: v for k, v in line.items() if k != "signature"}
                good = signing.is_signed(public, str(line["signature"]), "audit", _digest(signed))
            except (ValueError, KeyError, TypeError, AttributeError):
                raise AuditError(f"{where}: cannot be read; the log was changed") from None
            if not good:
                raise AuditError(f"{where}: was changed, or not written by this site")
            if line["number"] != number or line["previous"] != previous:
                raise AuditError(f"{where}: does not follow the line before it; lines were removed, moved or put in")
            previous = _digest(line)
            found.append(line)
            if number == count and previous != digest:
                raise AuditError(f"{where}: is not the line that audit.head names")
        if len(found) < count:
            raise AuditError(f"{self.path}: has {len(found)} lines, audit.head says {count}; its end was removed")
        if len(found) > count + 1:
            raise AuditError(f"{self.path}: has {len(found)} lines, audit.head says {count}; the head was replaced")
        return found

    def _lines(self) -> list[tuple[Path, bytes]]:
        """All lines of all files, and where each is from; lines are numbered through."""
        found = []
        for path in [*sorted(self.path.parent.glob("audit-*.jsonl")), self.path]:
            try:
                content = path.read_bytes()
            except FileNotFoundError:
                continue
            except OSError as error:
                raise AuditError(f"{path}: cannot be read ({error.strerror})") from None
            if content and not content.endswith(b"\n"):
                raise AuditError(f"{path}: its last line is not complete; the log was changed, or a disk was full")
            found += [(path, line) for line in content.splitlines()]
        return found

    def _sealed(self, public: ec.EllipticCurvePublicKey) -> tuple[int, str]:
        """Number and digest of the last line that was sealed."""
        try:
            head = json.loads(self._head.read_text(encoding="utf-8"))
            count, digest = int(head["lines"]), str(head["digest"])
            good = signing.is_signed(public, str(head["signature"]), "audit head", str(count), digest)
        except FileNotFoundError:
            if len(self._lines()) > 1:
                raise AuditError(f"{self._head}: is missing") from None
            return 0, START
        except (ValueError, KeyError, TypeError):
            good, count, digest = False, 0, START
        if not good:
            raise AuditError(f"{self._head}: was changed, or not written by this site")
        return count, digest


def _extent(file: Path | int) -> tuple[int, int]:
    """Which file it is, and how long."""
    found = os.stat(file)
    return found.st_ino, found.st_size


def _digest(line: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(line, sort_keys=True).encode()).hexdigest()


def _asked(request: Content) -> dict[str, Any]:
    """What an order is about, in the words of the log."""
    try:
        order = Order.read(wire.text(request, "order"))
    except WireError:
        return {"what": "not an order"}
    phase = "" if order.secure is None else f", secure {order.secure.phase}"
    keys = phase.endswith(("keys", "shares", "open"))
    what = "introduction" if order.shape is None and not keys else "masks"
    if order.train or order.evaluate:
        what = " and ".join(["round"] * order.train + ["evaluation"] * order.evaluate)
    if order.analysis is not None and not keys:
        what = f"analysis: {analyses.asked(order.analysis)}"
    found = {"job": order.job, "what": what + phase, "round": order.round + 1}
    found["experiment"] = hashlib.sha256(order.config.encode()).hexdigest()
    if order.secure is not None and order.secure.parties:
        found["parties"] = order.secure.parties
    return found
