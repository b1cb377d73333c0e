"""Flower as a program: which version, in which environment, and its own command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

TESTED = "1.41."
"""Versions of flwr whose internals the warm executor and the guarded service know."""


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


def flwr(home: Path, *arguments: str, timeout: float = 60.0) -> dict[str, Any]:
    """Run a command of ``flwr`` against the federation's service and read its JSON answer."""
    command = [str(Path(sys.executable).parent / "flwr"), *arguments, "--format", "json"]
    try:
        done = subprocess.run(
            command, env=environment(home), capture_output=True, text=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired:
        raise EngineError(f"flwr {arguments[0]} did not come back within {timeout:g} s") from None
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise EngineError(f"flwr {' '.join(arguments[:2])} failed: {lines[-1] if lines else 'no output'}") from None
    if not answer.get("success"):
        raise EngineError(f"flwr {' '.join(arguments[:2])} failed: {answer.get('error-message', 'no reason given')}")
    return answer
