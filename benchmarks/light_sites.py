"""Many sites of one federation in one process, each with a FLARE client of its own: ``python light_sites.py FED DATA``.

What a site's process takes, PyTorch above all, is there once. A site differs in nothing else from one of ``join``:
its folder, keys, ledger, socket and engine are its own.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import torch

from fedcomposite.cli.federation_parties import say
from fedcomposite.federation.engines import selection
from fedcomposite.federation.folders import FederationFolder
from fedcomposite.federation.site.enrolment import open_site
from fedcomposite.federation.site_folders import SiteFolder


def main() -> None:
    """Join for every site of a federation, until Ctrl-C."""
    fed, data = FederationFolder(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    for name in fed.sites:
        place = SiteFolder(fed.path / "sites" / name)

        def told(line: str, name: str = name) -> None:
            say(f"{name}: {line}")

        site = open_site(place, data / f"{name}.csv", "num", told)
        threading.Thread(target=selection.join, args=(place, site, told), daemon=True).start()
    while True:
        time.sleep(1.0)


if __name__ == "__main__":
    main()
