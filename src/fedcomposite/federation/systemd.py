"""Units of systemd: a party that is started with the machine, and again when it fails, with few rights.

The system's form is for an account of its own and takes away whatever a party does not need. A user's form has only
what a user's own service manager can do. Exit code 2 (wrong data or configuration) is not tried again.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from fedcomposite.federation.engines.pki import write_private

Form = Literal["user", "system"]

_BOTH = """\
NoNewPrivileges=yes
LockPersonality=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX
RestrictNamespaces=yes
SystemCallArchitectures=native
SystemCallFilter=@system-service
UMask=0077
"""
_SYSTEM = """\
User={user}
ProtectSystem=strict
ReadWritePaths={places}
ProtectHome=read-only
PrivateTmp=yes
PrivateDevices=yes
ProtectClock=yes
ProtectControlGroups=yes
ProtectHostname=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
ProtectProc=invisible
CapabilityBoundingSet=
"""


def unit(
    form: Form,
    title: str,
    folder: Path,
    arguments: Sequence[str],
    log: Path | None = None,
    user: str = "fedcomposite",
) -> str:
    """The text of a unit that runs ``fedcomposite federation`` with some arguments.

    It can write to ``folder`` and to where its ``log`` is, and nowhere else.
    """
    words = [sys.executable, "-m", "fedcomposite", "federation", *arguments]
    command = " ".join(quoted(word).replace("$", "$$") for word in words)
    places = " ".join(quoted(str(p)) for p in [folder, *([log.absolute().parent] if log else [])])
    own = _SYSTEM.format(user=user, places=places) if form == "system" else ""
    proxies = [f"{k}={os.environ[k]}" for k in ("HTTPS_PROXY", "NO_PROXY") if os.environ.get(k)]
    environment = "".join(f"Environment={quoted(p)}\n" for p in ["OMP_NUM_THREADS=1", *proxies])
    return (
        f"[Unit]\nDescription={title.replace('%', '%%')}\nAfter=network-online.target\nWants=network-online.target\n\n"
        f"[Service]\nType=exec\nExecStart={command}\nWorkingDirectory={str(folder).replace('%', '%%')}\n"
        f"{environment}Restart=on-failure\nRestartSec=10\nRestartPreventExitStatus=2\nKillSignal=SIGINT\n"
        f"{own}{_BOTH}\n[Install]\nWantedBy={'multi-user' if form == 'system' else 'default'}.target\n"
    )


def quoted(word: str) -> str:
    """A word as systemd reads it back: no specifiers, no end of the word in its middle."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"'


def write_unit(
    form: Form, name: str, title: str, folder: Path, arguments: Sequence[str], log: Path | None = None
) -> tuple[Path, str]:
    """Write the unit into the folder; returns where, and the commands that install it."""
    path = folder / f"fedcomposite-{name}.service"
    path.unlink(missing_ok=True)
    write_private(path, unit(form, title, folder, arguments, log).encode())  # a proxy's address may hold a password
    if form == "user":
        return path, f"systemctl --user enable --now '{path}' && loginctl enable-linger"
    # A copy: an account that could change its own unit could become root by it.
    return path, f"install -m 600 '{path}' /etc/systemd/system/ && systemctl enable --now {path.stem}"
