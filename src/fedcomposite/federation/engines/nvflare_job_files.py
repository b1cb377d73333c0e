"""FLARE's job as files: names of installed classes, and the coordinator's signature; written here, checked at sites.

A site's FLARE client shows every job to the site's own process before it is deployed. One that is not exactly such a
job, signed by the coordinator for this site, is refused: code, other classes, other settings, jobs of an administrator
who does not have the coordinator's key, or has an old one.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec

from fedcomposite.federation.engines import signing

ADAPTER = "fedcomposite.federation.engines.nvflare_job."
"""Where the classes are that a job may name."""
_TASKS = 5.0  # seconds between two questions of FLARE's own for tasks, of which there are none; a job ends within them
_MOST = 1 << 20  # bytes of a job, at most
_SERVER, _CLIENT, _WORD = "config/config_fed_server.json", "config/config_fed_client.json", "config/fedcomposite.json"
_SIGNED = (".__nvfl_sig.json", ".__nvfl_submitter.crt")  # what FLARE puts into each folder: who submitted it
_SITE: dict[str, Any] = {
    "format_version": 2,
    "executors": [{"tasks": ["*"], "executor": {"path": f"{ADAPTER}SiteRelay", "args": {}}}],
    "components": [],
}


def write_job(folder: Path, job: str, sites: Sequence[str], key: ec.EllipticCurvePrivateKey) -> Path:
    """The job as FLARE takes it, for some sites, signed by the coordinator."""
    place = folder / f"fedcomposite-{job}"
    meta = {"name": place.name, "resource_spec": {}, "deploy_map": {"app": ["server", *sites]}, "min_clients": 1}
    relay = {"id": "relay", "path": f"{ADAPTER}ServerRelay", "args": {"job": job}}
    server = {"format_version": 2, "server": {"task_request_interval": _TASKS}, "workflows": [relay], "components": []}
    word = {"job": job, "sites": list(sites), "signature": signing.sign(key, "job", job, *sites)}
    app = {_SERVER: server, _CLIENT: _SITE, _WORD: word}
    for name, content in {"meta.json": meta, **{f"app/{name}": content for name, content in app.items()}}.items():
        path = place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1), encoding="utf-8")
    return place


def foreign(app: bytes, site: str, key: ec.EllipticCurvePublicKey) -> str:
    """Why a job, packed as FLARE brings it to a site, is none of the coordinator's; empty if it is one."""
    try:
        with zipfile.ZipFile(io.BytesIO(app)) as packed:
            files = [one for one in packed.infolist() if not one.is_dir()]
            files = [one for one in files if one.filename.removeprefix("config/") not in _SIGNED]
            if other := sorted({one.filename for one in files} - {_SERVER, _CLIENT, _WORD}):
                return f"it brings {other[-1][:60]!r}"
            if len(files) > 3 or sum(one.file_size for one in files) > _MOST:
                return "it is too large"
            content = {one.filename: json.loads(packed.read(one)) for one in files}
        brought = dict(content.get(_CLIENT, {}))
        if other := sorted(str(k) for k in brought.keys() | _SITE.keys() if brought.get(k) != _SITE.get(k)):
            return f"its {other[0][:60]!r} are not this package's"
        word = content.get(_WORD, {"job": "", "sites": [], "signature": ""})
        job, sites, signature = str(word["job"]), [str(one) for one in word["sites"]], str(word["signature"])
    except (zipfile.BadZipFile, ValueError, KeyError, TypeError, RuntimeError, NotImplementedError, RecursionError):
        return "it cannot be read"
    if site not in sites or not signing.is_signed(key, signature, "job", job, *sites):
        return f"{job[:60]!r} is not signed by the coordinator for this site"
    return ""
