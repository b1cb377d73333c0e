"""NVIDIA FLARE's project and startup kits, with its unsafe defaults taken back.

``flare/project.yml`` at the coordinator says who takes part; FLARE's own provisioning makes the authority,
the certificates and the kits from it, and again when a site is added: what was made before stays. A site's kit allows
no code that a job brings, no shell commands, no streaming of its logs, and a job may name this package's classes only.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from fedcomposite.durable import write_atomic
from fedcomposite.federation.engines.engine import EngineError
from fedcomposite.federation.engines.nvflare_job_files import ADAPTER

SERVER, ADMIN, PROJECT = "coordinator", "coordinator@fedcomposite.local", "federation"
DAYS = 3650
"""For how long the authority is good; FLARE gives the others 360 days."""
_NOTHING = {
    "submit_job": "none", "clone_job": "none", "manage_job": "none", "download_job": "none", "view": "none",
    "operate": "none", "shell_commands": "none", "byoc": "none", "server-predeployed-flwr": "none",
}  # fmt: skip
PERMISSIONS = {
    "project_admin": {**_NOTHING, "submit_job": "any", "manage_job": "any", "view": "any", "operate": "any"},
    "org_admin": {**_NOTHING, "view": "o:site"},
    "lead": _NOTHING,
    "member": _NOTHING,
}
"""What FLARE's roles may do at a party. Nobody brings code, reads files or logs, or runs commands."""


def write_project(folder: Path, host: str, port: int, sites: Sequence[str]) -> Path:
    """The project file, as FLARE's provisioning reads it."""
    import yaml  # it comes with FLARE

    names = list(dict.fromkeys([host, "localhost", "127.0.0.1"]))
    server = {
        "name": SERVER, "type": "server", "org": "coordinator", "fed_learn_port": port, "admin_port": port,
        "default_host": host, "host_names": names,
    }  # fmt: skip
    clients = [{"name": name, "type": "client", "org": "sites", "allow_log_streaming": False} for name in sites]
    admin = {"name": ADMIN, "type": "admin", "org": "coordinator", "role": "project_admin"}
    builders = "nvflare.lighter.impl."
    content = {
        "api_version": 3,
        "name": PROJECT,
        "description": "a federation of fedcomposite",
        "participants": [server, *clients, admin],
        "builders": [
            {"path": f"{builders}workspace.WorkspaceBuilder", "args": {}},
            {"path": f"{builders}static_file.StaticFileBuilder", "args": {"config_folder": "config", "scheme": "grpc"}},
            {"path": f"{builders}cert.CertBuilder", "args": {"root_valid_days": DAYS}},
            {"path": f"{builders}signature.SignatureBuilder", "args": {}},
        ],
    }
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomic(folder / "project.yml", yaml.safe_dump(content, sort_keys=False).encode())
    return folder / "project.yml"


def provision(folder: Path) -> dict[str, Path]:
    """Have FLARE make the kits of a project file, by the names of their owners."""
    import yaml
    from nvflare.lighter.provision import prepare_builders, prepare_project
    from nvflare.lighter.provisioner import Provisioner

    content = yaml.safe_load((folder / "project.yml").read_text(encoding="utf-8"))
    said = StringIO()
    with redirect_stdout(said):
        made = Provisioner(str(folder), prepare_builders(content)).provision(prepare_project(content))
    place = made.get("current_prod_dir")
    if not place or made.get("__build_error__"):
        raise EngineError(f"FLARE could not make its kits: {said.getvalue().strip().splitlines()[-1:]}")
    return {path.name: path for path in sorted(Path(place).iterdir()) if path.is_dir()}


def forget_certificates(folder: Path) -> None:
    """Have the next provisioning make new certificates for all parties, under the authority that there is."""
    path = folder / PROJECT / "state" / "cert.json"
    known = json.loads(path.read_text(encoding="utf-8"))
    write_atomic(path, json.dumps({k: v for k, v in known.items() if not isinstance(v, dict)}).encode())


def harden(kit: Path, storage: Path | None = None) -> None:
    """Write a party's own settings over FLARE's defaults; ``storage`` is where a server keeps its jobs."""
    local = kit / "local"
    content = json.loads((local / "resources.json.default").read_text(encoding="utf-8"))
    content["class_list_enforcement_mode"], content["class_allow_list"] = "enforce", [ADAPTER]
    drop = {"site_log_streamer", "log_receiver"}
    components = [one for one in content["components"] if one["id"] not in drop]
    if storage is None:
        content["allow_log_streaming"] = False
        components = [one for one in components if one["id"] not in ("resource_manager", "resource_consumer")]
        components += [
            _component("resource_manager", "nvflare.app_common.resource_managers.passthrough_resource_manager."
                       "PassthroughResourceManager"),
            _component("resource_consumer", "nvflare.app_common.resource_consumers.passthrough_resource_consumer."
                       "PassthroughResourceConsumer"),
            _component("app_deployer", f"{ADAPTER}JobGate"),
        ]  # fmt: skip
    else:
        content["servers"][0]["heart_beat_timeout"] = 30
        content["snapshot_persistor"]["args"]["storage"]["args"]["root_dir"] = str(storage / "snapshots")
        args: dict[str, dict[str, Any]] = {
            "job_scheduler": {"max_jobs": 100, "min_schedule_interval": 1.0, "max_schedule_interval": 5.0,
                              "max_schedule_count": 10_000_000},
            "job_manager": {"uri_root": str(storage / "jobs"), "job_store_id": "job_store"},
        }  # fmt: skip
        for one in components:
            one["args"] = args.get(one["id"], one.get("args", {}))
    content["components"] = components
    write_atomic(local / "resources.json", json.dumps(content, indent=1).encode())
    rights = {"format_version": "1.0", "permissions": PERMISSIONS}
    write_atomic(local / "authorization.json", json.dumps(rights, indent=1).encode())


def _component(name: str, path: str) -> dict[str, Any]:
    return {"id": name, "path": path, "args": {}}


def carry(kit: Path, target: Path) -> None:
    """Put a new kit where it is used, in place of an older one's files; what its owner added stays."""
    shutil.copytree(kit, target, dirs_exist_ok=True)
    for path in (target / "startup").iterdir():
        path.chmod(0o600 if path.suffix == ".key" else path.stat().st_mode & 0o700)
