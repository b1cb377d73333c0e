"""Flower as a program: which version, and in which environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

TESTED = "1.41."
"""Versions of flwr whose internals the service knows."""


class EngineError(RuntimeError):
    """Flower is missing, of another version, or refused a command."""


def check_version() -> None:
    """Refuse a Flower whose internals are not known."""
    try:
        found = version("flwr")
    except PackageNotFoundError:
        raise EngineError("a federation needs Flower: pip install 'fedcomposite[flower]'") from None
    if not found.startswith(TESTED):
        raise EngineError(f"flwr {found} is installed, but this release knows flwr {TESTED}*; install that")


def environment(home: Path, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Variables for a Flower process: its files in ``home``, nothing sent anywhere, nothing installed at run time."""
    return {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.5",
        **(extra or {}),
    }
