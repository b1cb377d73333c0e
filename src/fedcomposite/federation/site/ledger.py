"""A site's account of what it was asked for: one file that survives restarts, written before anything is computed.

For every job: the digest of the data it began with, the gradients and evaluations so far, and the models of its latest
rounds; for every day: gradients, evaluations and new jobs. Beside it lies the site's secret, which nobody else knows.

It is numbered: each writing has the next number, which the audit log takes down with every answer, and a process knows
the last one it saw. So a ledger that was removed, or taken back to an earlier day, is found. It ends with a seal by the
secret, so that one that was written in is found, too, and one whose secret is gone; those of version 0.2 have no number
and no seal, and get both.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock

from fedcomposite.federation.site.policy import Limits, RefusalError
from fedcomposite.files import write_atomic
from fedcomposite.privacy import Query, compose

Kind = Literal["gradients", "evaluations"]
_DAYS = 60  # after which an unused job is forgotten
_SECURE = {"content": "a secure sum has one model", "sum": "a secure sum has one model and one set of parties"}
_SEAL = b', "seal": "'
_ALSO = {"introduce": " or another recipe"}


def today() -> date:
    """The day of now, everywhere the same."""
    return datetime.now(UTC).date()


class Ledger:
    """What one site was asked for, in one folder; ``data`` is the digest of its samples."""

    def __init__(self, folder: Path, limits: Limits, data: str, day: Callable[[], date] = today) -> None:
        self._folder, self._limits, self._data, self._day = folder, limits, data, day
        self._path, self._secret = folder / "ledger.json", b""
        self._lock = FileLock(folder / "ledger.lock", mode=0o600)
        self.number = 0
        """The least number that the file can have: the last that was seen."""

    def alone(self) -> AbstractContextManager[Any]:
        """Keep other processes from the books meanwhile: two federations may share them."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return self._lock

    # -- the file -----------------------------------------------------------------------------------------------------

    def _read(self) -> dict[str, Any]:
        try:
            raw = self._path.read_bytes()
            found = json.loads(raw)
            book: dict[str, Any] = {
                "day": str(found["day"]),
                "today": dict(found["today"]),
                "jobs": dict(found["jobs"]),
            } | {
                "privacy": [[float(n), float(r), int(c)] for n, r, c in found.get("privacy", [])],
                "number": int(found.get("number", 0)),
                "files": dict(found.get("files", {})),
                "refusals": [str(one) for one in found.get("refusals", [])],
                "told": {
                    str(k): {str(part): int(n) for part, n in v.items()} for k, v in found.get("told", {}).items()
                },
            }
        except FileNotFoundError:
            book = {"day": "", "today": {}, "jobs": {}, "privacy": [], "number": 0, "files": {}, "refusals": [],
                    "told": {}}  # fmt: skip
        except (ValueError, KeyError, TypeError, OSError):
            raise RefusalError("its ledger cannot be read; the site's people have to look at it") from None
        else:
            body, _, seal = raw.rpartition(_SEAL)
            if book["number"] and not hmac.compare_digest(seal, self._seal(body + b"}")):
                raise RefusalError(
                    "its ledger was changed by other hands, or its secret was; the site's people have to look at it"
                )
        if book["number"] < self.number:
            raise RefusalError("its ledger was removed, or turned back; the site's people have to look at it")
        self.number = book["number"]
        return book

    def _write(self, book: dict[str, Any]) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        book["number"] += 1
        content = json.dumps(book).encode()
        write_atomic(self._path, content[:-1] + _SEAL + self._seal(content))
        self.number = book["number"]

    def _seal(self, content: bytes) -> bytes:
        """What the ledger ends with: nobody without the site's secret can make it."""
        return hmac.new(self._key(), content, hashlib.sha256).hexdigest().encode() + b'"}'

    def _open(self) -> dict[str, Any]:
        """The book of today."""
        book, now = self._read(), self._day()
        if book["day"] != now.isoformat():
            book |= {"day": now.isoformat(), "today": {"gradients": 0, "evaluations": 0, "jobs": 0}}
            old = [k for k, v in book["jobs"].items() if (now - date.fromisoformat(v["used"])).days > _DAYS]
            for name in old:
                del book["jobs"][name]
        return book

    # -- asking -------------------------------------------------------------------------------------------------------

    def admit(
        self,
        job: str,
        round: int,
        asked: dict[str, str],
        kinds: Mapping[str, tuple[int, int | None]] | None = None,
        **work: int,
    ) -> None:
        """Take an order down: the digests of the models it is about, by what is done with them, and its work.

        ``kinds`` are the kinds of answers that it asks for: how many, and how many the whole job may have.

        Each round of a job has its models, and rounds do not go back. So an order that was lost may come again, and one
        that goes through many models may not.
        """
        book, limits = self._open(), self._limits
        entry = self._entry(book, job)
        for what, digest in asked.items():
            most = limits.models_per_round if what in ("train", "evaluate") else 1
            seen = entry["seen"].setdefault(f"{what} {round}", [])
            if digest in seen:
                continue
            unit = "exchange" if what.endswith("-analysis") else "round"
            if round < entry["round"]:
                raise RefusalError(f"job {job} has reached {unit} {entry['round'] + 1}; this order is for {round + 1}")
            if len(seen) == most:
                why = _SECURE.get(what.partition("-")[0], f"models_per_round = {most}")
                what = "question" if unit == "exchange" else "model"
                raise RefusalError(f"another {what} in {unit} {round + 1}: {why}")
            seen.append(digest)
        answers = entry.setdefault("answers", {})
        for kind, (count, allowed) in (kinds or {}).items():
            answers[kind] = answers.get(kind, 0) + count
            if allowed is not None and answers[kind] > allowed:
                raise RefusalError(f"job {job} said that it would ask for {allowed} {kind!r}, and asks for more")
        entry |= {"round": max(round, entry["round"]), "used": book["day"]}
        entry["seen"] = {k: v for k, v in entry["seen"].items() if int(k.split()[1]) >= entry["round"] - 1}
        self._spend(book, job, work)
        self._write(book)

    def _entry(self, book: dict[str, Any], job: str) -> dict[str, Any]:
        """What is known of a job; a new one is counted."""
        entry: dict[str, Any] | None = book["jobs"].get(job)
        if entry is None:
            self._count(book["today"], "jobs", 1, self._limits.jobs_per_day, "new jobs a day")
            entry = book["jobs"][job] = {"data": self._data, "round": 0, "gradients": 0, "evaluations": 0, "seen": {}}
        if entry["data"] != self._data:
            raise RefusalError(f"job {job} began with other data here; start the job anew")
        return entry

    def hold(self, job: str, what: str, digest: str) -> None:
        """Take down what must stay as it is for a whole job: the parties of its secure sums, the recipe they are of."""
        book = self._open()
        held = self._entry(book, job).setdefault("held", {})
        if held.get(what) == digest:
            return
        if what in held:
            raise RefusalError(f"job {job} began with other parties{_ALSO.get(what, '')}; start the job anew")
        held[what] = digest
        book["jobs"][job]["used"] = book["day"]
        self._write(book)

    def bind(self, job: str, what: Mapping[str, str]) -> None:
        """Take down what a job is about, by digests; one that was taken down before is refused if it differs."""
        book = self._open()
        bound = self._entry(book, job).setdefault("bound", {})
        if other := [name for name, digest in what.items() if bound.get(name, digest) != digest]:
            raise RefusalError(f"job {job}: its {other[0]} is not the one it began with; start the job anew")
        if what.items() <= bound.items():
            return
        bound |= what
        book["jobs"][job]["used"] = book["day"]
        self._write(book)

    def grant(self, job: str, rule: str, jobs: int, evaluations: int) -> None:
        """Let a job be one of those that a rule allows: so many in a day, each with so many evaluations."""
        book = self._open()
        entry = self._entry(book, job)
        if entry.get("rule") == [rule, evaluations]:
            return
        begun = book["today"].setdefault("rules", {})
        if begun.get(rule, 0) >= jobs:
            raise RefusalError(f"over max_jobs = {jobs} of a class of approved experiments in a day")
        begun[rule] = begun.get(rule, 0) + 1
        entry |= {"rule": [rule, evaluations], "used": book["day"]}
        self._write(book)

    def spend(self, job: str, **work: int) -> None:
        """Count work before it is done."""
        book = self._open()
        self._spend(book, job, work)
        self._write(book)

    def refund(self, job: str, gradients: int) -> None:
        """Give back what was counted and not done."""
        book = self._open()
        for place in (book["jobs"].get(job, {}), book["today"]):
            if "gradients" in place:
                place["gradients"] = max(0, place["gradients"] - gradients)
        self._write(book)

    def _spend(self, book: dict[str, Any], job: str, work: dict[str, int]) -> None:
        for kind, count in work.items():
            for place, span in ((book["jobs"][job], "job"), (book["today"], "day")):
                name = f"{kind}_per_{span}"
                self._count(place, kind, count, getattr(self._limits, name), f"this site's {name}")
        if "rule" in (entry := book["jobs"][job]) and entry["evaluations"] > entry["rule"][1]:
            raise RefusalError(f"over max_evaluations = {entry['rule'][1]} of its class of approved experiments")

    @staticmethod
    def _count(place: dict[str, Any], kind: str, count: int, most: int, what: str) -> None:
        if place[kind] + count > most:
            raise RefusalError(f"over {what} = {most}")
        place[kind] += count

    # -- the privacy budget -------------------------------------------------------------------------------------------

    def spent(self) -> float:
        """Epsilon of all noised answers so far, whatever job they were for."""
        return self._cost(self._read()["privacy"])

    def price(self, query: Query, count: int, once: Query | None = None) -> float:
        """Epsilon of so many answers, had there been none before, and of numbers that are told once."""
        return self._cost([[*query, count], *([] if once is None else [[*once, 1]])])

    def afford(self, job: str, query: Query, count: int, once: Query | None = None) -> None:
        """Refuse a job whose ``count`` queries, less those it has had, would exceed the budget.

        ``once`` is the query of numbers that are told once, if this job will be told them.
        """
        book = self._read()
        left = count - book["jobs"].get(job, {}).get("queries", 0)
        past = book["privacy"]
        if once is not None and self._once(once) not in book["told"]:
            past = self._within(past, once, 1, "this experiment needs")
        self._within(past, query, max(0, left), "this experiment needs")

    def once(self, query: Query, make: Callable[[], dict[str, int]]) -> dict[str, int]:
        """Noised numbers of this data set that are told once: one query, and the same ever after, in all jobs."""
        book = self._open()
        if (known := book["told"].get(self._once(query))) is not None:
            return dict(known)
        book["privacy"] = self._within(book["privacy"], query, 1, "this answer needs")
        made = book["told"][self._once(query)] = make()
        self._write(book)
        return made

    def _once(self, query: Query) -> str:
        return f"{self._data[:32]} {query.noise!r} {query.rate!r}"

    def charge(self, job: str, query: Query, count: int = 1) -> None:
        """Take noised answers down, before they are computed; the budget has no day on which it begins anew."""
        book = self._open()
        book["privacy"] = self._within(book["privacy"], query, count, "this answer needs")
        entry = book["jobs"].get(job)
        if entry is not None:
            entry["queries"] = entry.get("queries", 0) + count
        self._write(book)

    def _within(self, past: list[list[float]], query: Query, count: int, what: str) -> list[list[float]]:
        """The past with these queries, if the budget is large enough."""
        counts: dict[tuple[float, ...], float] = {(n, r): c for n, r, c in past}
        counts[query] = counts.get(query, 0) + count
        after: list[list[float]] = [[n, r, c] for (n, r), c in counts.items()]
        budget = self._limits.epsilon
        if budget is not None and (total := self._cost(after)) > budget:
            before = self._cost(past)
            raise RefusalError(
                f"{what} epsilon = {total:.3g} in all, over this site's {budget:g} at delta = {self._limits.delta:g}: "
                f"{before:.3g} is spent, {max(0.0, budget - before):.3g} left"
            )
        return after

    def _cost(self, past: list[list[float]]) -> float:
        return compose({Query(n, r): int(c) for n, r, c in past}, self._limits.delta)

    # -- refusals ----------------------------------------------------------------------------------------------------

    def check_refusals(self) -> None:
        """Refuse all there is once the refusals that say something about the samples are used up, whatever is asked."""
        if len(self._read()["refusals"]) >= self._limits.refusals:
            raise RefusalError(
                f"its refusals = {self._limits.refusals} that hang on its samples are used up; the site's people have "
                "to look at what was asked, and may allow more"
            )

    def refused(self, question: str) -> None:
        """Take down a refusal that hangs on the samples; the same question again has the same answer."""
        book = self._open()
        if question[:16] not in book["refusals"]:
            book["refusals"].append(question[:16])
            self._write(book)

    # -- other books -------------------------------------------------------------------------------------------------

    def files(self) -> list[str]:
        """The files beside the ledger that it knows."""
        return list(self._read()["files"])

    def vouch(self, name: str, content: bytes) -> None:
        """Take down what a file beside the ledger holds, before it is written."""
        book = self._read()
        known = book["files"].get(name, [])
        book["files"][name] = [*known[-1:], hashlib.sha256(content).hexdigest()]
        self._write(book)

    def check(self, name: str, content: bytes | None) -> None:
        """Refuse to go on with a file that is not the one that was written; a crash may have left the one before."""
        known = self._read()["files"].get(name)
        first = known is not None and len(known) == 1 and content is None
        if known is None or first or (content is not None and hashlib.sha256(content).hexdigest() in known):
            return
        raise RefusalError(f"its {name} was removed, changed or turned back; the site's people have to look at it")

    # -- the secret ---------------------------------------------------------------------------------------------------

    def secret_seed(self, *known: object) -> int:
        """A 64-bit seed that depends on what others know and on what they do not."""
        mixed = hmac.new(self._key(), repr(known).encode(), hashlib.sha256).digest()
        return int.from_bytes(mixed[:8], "little")

    def _key(self) -> bytes:
        path = self._folder / "secret"
        if not self._secret and not path.is_file():
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            scratch = path.with_suffix(f".{os.getpid()}")
            with os.fdopen(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(secrets.token_bytes(32))
                os.fsync(file.fileno())
            os.replace(scratch, path)
        self._secret = self._secret or path.read_bytes()
        return self._secret
