"""A program that ends when its parent does, however that ends: ``python -m ...engines.watched PROGRAM ...``.

A party that was killed leaves nobody behind who speaks in its name. It is the leader of its process group, and takes
the group with it. FLARE's job processes watch their own parents.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from types import FrameType

_LOOK = 0.5  # seconds between two looks at the parent


def main() -> None:
    """Run the command of the arguments."""
    parent, child = os.getppid(), subprocess.Popen(sys.argv[1:])

    def end(number: int, frame: FrameType | None) -> None:
        child.terminate()

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    while os.getppid() == parent:
        with contextlib.suppress(subprocess.TimeoutExpired):
            sys.exit(child.wait(_LOOK))
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
