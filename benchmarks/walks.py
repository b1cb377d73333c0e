"""How many files of the package a call passes through: what a newcomer has to open to follow it.

python -m benchmarks.walks
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import fedcomposite as fc
from fedcomposite.federation.coordinator.coordinator import Coordinator
from fedcomposite.federation.engines.local import InProcess
from fedcomposite.federation.shape import parse
from fedcomposite.federation.site.client_states import StateStore
from fedcomposite.federation.site.policy import Limits
from fedcomposite.federation.site.site import Site

EXPERIMENT = """
algorithm = {name = "FedNMap", local_steps = 2, step = 0.5, gamma = 1.0}
problem = {loss = "least_squares"}
regularizer = {name = "L1", lam = 0.02}
run = {rounds = 3}
"""
HOME = Path(fc.__file__).parent


def passed(call: Callable[[], object]) -> list[str]:
    """The files whose functions are entered while a call lasts; what is done at import does not count."""
    seen: set[str] = set()

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and frame.f_code.co_name != "<module>" and name.startswith(str(HOME)):
            seen.add(str(Path(name).relative_to(HOME)))

    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)
    return sorted(seen)


def federated(silos: fc.Silos) -> None:
    """A run with sites of this process: both halves of a federation, without an engine between them."""
    with tempfile.TemporaryDirectory() as folder:
        sites = []
        for i, name in enumerate(silos.names):
            sites.append(Site(name, silos.subset([i]), StateStore(Path(folder) / name), Limits()))
        engine = InProcess(sites)
        coordinator = Coordinator(engine, list(silos.names), engine.permitted, parse(EXPERIMENT), uuid.uuid4().hex)
        coordinator.prepare()
        coordinator.run(None)


def main() -> None:
    """Print a line for each walk."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", action="store_true", help="list them")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    silos = fc.data.load("synthetic", clients=3, features=4, samples=50)
    problem = fc.Problem(silos, loss="logistic", regularizer=fc.regularizers.L1(0.02), bias=True, weights="samples")
    method = fc.algorithms.FedNMap(local_steps=2, step=0.5, gamma=1.0)
    walks: dict[str, Callable[[], object]] = {
        "simulate": lambda: fc.simulate(problem, method, rounds=3, progress=False),
        "solve": lambda: fc.solve(problem),
        "federation run": lambda: federated(silos),
        "analyse cv": lambda: fc.analyse(problem, "cv", folds=2, count=4),
    }
    for call in walks.values():
        call()  # what is loaded when it is first needed is loaded
    for name, call in walks.items():
        found = passed(call)
        print(f"{name}: {len(found)} files")
        if chosen.files:
            print("  " + "\n  ".join(found))


if __name__ == "__main__":
    main()
