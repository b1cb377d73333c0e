"""The command line: ``fedcomposite run | solve | compare | export | list | plot | data | federation``.

Exit codes: 0 done, 1 failed (diverged, interrupted, a client failed), 2 wrong usage or configuration, 3 not converged.
"""

from fedcomposite.cli.console import err, out
from fedcomposite.cli.main import app, main

__all__ = ["app", "err", "main", "out"]
