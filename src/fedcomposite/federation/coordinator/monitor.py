"""What the coordinator's machine may see of a federation while it runs: a live page, its JSON, health and metrics.

It listens on this machine's loopback only, answers GET only, and only to requests for a loopback name (a page from
elsewhere whose name was made to point here gets nothing). It shows what the coordinator knows anyway; other accounts of
the machine can read it, so it is off unless a port is given.
"""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fedcomposite.federation.coordinator.jobs import Job
from fedcomposite.federation.coordinator.monitor_page import PAGE, POLICY
from fedcomposite.federation.engines import certificate_lifetimes
from fedcomposite.federation.engines.mailbox import Mailbox
from fedcomposite.federation.engines.site_api import Scope
from fedcomposite.federation.folders import FederationFolder

_HOSTS = ("127.0.0.1", "localhost", "[::1]")
_TAIL = 1 << 18  # bytes of a history that are read
_OF_ANALYSES = ("exchanges", "fits", "asked")
_SHOWN = ("round", "objective", "stationarity", "nonzeros", "bytes_up", "bytes_down", "seconds", "epsilon")


def snapshot(federation: FederationFolder, exchange: Mailbox) -> dict[str, Any]:
    """Sites, the newest job, and certificates, as they are now."""
    here, now = exchange.present(), time.monotonic()
    known = {p.name: p for p in exchange.parties.values()}
    sites = []
    for name in FederationFolder(federation.path).sites:
        party = known.get(name)
        state = "online" if name in here else "offline"
        if party is None:
            state = "revoked" if name in exchange.revoked else "awaited"
        heard = None if party is None or party.heard < 0 else round(now - party.heard, 1)
        sites.append({"site": name, "state": state, "silent": heard})
    return {"sites": sites, "job": newest_job(federation), "certificates": certificate_lifetimes.days(federation)}


def newest_job(federation: FederationFolder) -> dict[str, Any]:
    """What the newest job says about itself; nothing if there is none."""
    try:
        files = sorted((federation.state / "jobs").glob("*.json"), key=lambda p: p.stat().st_mtime)
        job = Job.model_validate_json(files[-1].read_text(encoding="utf-8"))
        folder = Path(job.out)
        said = json.loads((folder / "status.json").read_text(encoding="utf-8"))
        found = {k: said.get(k) for k in ("state", "round", "rounds", "missing", "message", *_OF_ANALYSES)}
    except (IndexError, OSError, ValueError, ValidationError, AttributeError):
        return {}
    if found["state"] in ("preparing", "running") and not _alive(said.get("pid")):
        found["state"] = "gone"
    records = _records(folder / "history.jsonl")
    last = {k: records[-1][k] for k in _SHOWN if k in records[-1]} if records else {}
    curve = [[r["round"], r["objective"]] for r in records if {"round", "objective"} <= r.keys()]
    about = {"name": folder.name, "kind": job.kind, "secure": bool(job.settings.get("secure"))}
    return {**about, **found, "last": last, "curve": curve[-300:]}


def _records(path: Path) -> list[dict[str, Any]]:
    """The last records of a run; a line that is being written is left out."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL))
            lines = file.read().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            one = json.loads(line)
        except ValueError:
            continue
        if isinstance(one, dict):
            found.append(one)
    return found


def _alive(pid: Any) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, TypeError, ValueError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def metrics(seen: dict[str, Any]) -> str:
    """The same in Prometheus's text format; what is not known has no line."""
    from prometheus_client import CollectorRegistry, Gauge, generate_latest

    job, last, registry = seen["job"], seen["job"].get("last", {}), CollectorRegistry()

    def gauge(name: str, told: str, values: dict[str, Any], label: str | None = None) -> None:
        there = {k: v for k, v in values.items() if isinstance(v, int | float)}
        if there:
            family = Gauge(f"fedcomposite_{name}", told, [label] if label else [], registry=registry)
            for key, value in there.items():
                (family.labels(key) if label else family).set(value)

    sites = seen["sites"]
    gauge("up", "Whether the service runs.", {"": 1})
    gauge("site_online", "Whether a site is connected.", {s["site"]: s["state"] == "online" for s in sites}, "site")
    gauge("site_silent_seconds", "Seconds since a site was heard.", {s["site"]: s["silent"] for s in sites}, "site")
    gauge("certificate_days", "Days until a certificate expires.", seen["certificates"], "of")
    gauge("job_state", "What the newest job is doing.", {job["state"]: 1} if job else {}, "state")
    gauge("round", "Rounds of the newest job that are done.", {"": job.get("round")})
    gauge("exchanges", "Exchanges so far, if it is an analysis.", {"": job.get("exchanges")})
    gauge("rounds", "Rounds that it has in all.", {"": job.get("rounds")})
    gauge("objective", "Its objective.", {"": last.get("objective")})
    gauge("epsilon", "What it has cost of a privacy budget.", {"": last.get("epsilon")})
    gauge("missing_seconds", "For how long it has waited for a site.", job.get("missing") or {}, "site")
    gauge("sent_bytes", "Bytes of its vectors.", {way: last.get(f"bytes_{way}") for way in ("up", "down")}, "way")
    return generate_latest(registry).decode()


class Monitor:
    """The application that answers on the loopback."""

    def __init__(self, federation: FederationFolder, exchange: Mailbox) -> None:
        self._federation, self._exchange = federation, exchange

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        host = dict(scope["headers"]).get(b"host", b"").decode("latin-1").rsplit(":", 1)[0]
        status, kind, body = 200, "text/plain; charset=utf-8", ""
        if scope["method"] != "GET" or host not in _HOSTS:
            status, body = 403, "refused\n"
        elif scope["path"] == "/health":
            kind, body = "application/json", '{"status": "ok"}\n'
        elif scope["path"] == "/metrics":
            try:
                kind, body = "text/plain; version=0.0.4; charset=utf-8", metrics(self._seen())
            except ModuleNotFoundError:
                status, body = 501, "metrics need prometheus_client: pip install 'fedcomposite[flower]'\n"
        elif scope["path"] == "/status.json":
            kind, body = "application/json", json.dumps(_plain(self._seen()))
        elif scope["path"] == "/":
            kind, body = "text/html; charset=utf-8", PAGE
        else:
            status, body = 404, "not here\n"
        content = body.encode()
        headers = {"content-type": kind, "content-length": str(len(content)), "cache-control": "no-store",
                   "content-security-policy": POLICY, "x-content-type-options": "nosniff", "x-frame-options": "DENY",
                   "referrer-policy": "no-referrer"}  # fmt: skip
        raw = [(k.encode(), v.encode()) for k, v in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": raw})
        await send({"type": "http.response.body", "body": content})

    def _seen(self) -> dict[str, Any]:
        return snapshot(self._federation, self._exchange)


def _plain(value: Any) -> Any:
    """The same without numbers that JSON does not have."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_plain(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
