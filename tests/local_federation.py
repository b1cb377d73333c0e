"""Sites in this process, and a coordinator that runs experiments with them."""

import dataclasses
import math
from pathlib import Path

import tomli_w

from fedcomposite import algorithms
from fedcomposite.data import Silos
from fedcomposite.federation import wire
from fedcomposite.federation.coordinator.coordinator import Coordinator
from fedcomposite.federation.engines.engine import Reply
from fedcomposite.federation.engines.local import InProcess
from fedcomposite.federation.shape import parse
from fedcomposite.federation.site.client_states import StateStore
from fedcomposite.federation.site.site import Limits, Site


class LocalSites(InProcess):
    """Sites in this process. ``meddle(site, order, reply)`` may lie on the way back; a ``Lost`` loses the order."""

    def __init__(self, sites, meddle=None):
        super().__init__(sites)
        self.meddle, self.log, self.away = meddle, [], set()

    def present(self):
        return {name: session for name, session in super().present().items() if name not in self.away}

    def carried(self, site, order, payload):
        asked = wire.decode(payload)
        answer = self.sites[site].answer(asked)
        if self.meddle is not None:
            answer = self.meddle(site, asked, answer)
        self.log.append((site, asked, answer))
        return Reply(order, lost=str(answer)) if isinstance(answer, Lost) else Reply(order, wire.encode(answer))


class Lost(str):
    """Why an order is not answered."""


def alone(silos, i):
    X, y = silos[i]
    rows, extra = slice(*silos.offsets[i : i + 2]), {"weights": silos.weights, "margin_offsets": silos.margin_offsets}
    own = {k: [v[rows]] for k, v in extra.items() if v is not None}
    return Silos.from_arrays([(X, y)], names=[silos.names[i]], feature_names=silos.feature_names, **own)


def opened(**limits):
    """Limits of a site that trusts everybody: a handful of samples, batches as in the simulator, any model."""
    everything = {"losses": [], "metrics": [], "networks": True, "parameter_share": math.inf, "max_margin": math.inf}
    least = {"min_samples": 1, "min_class": 1, "min_batch": 1, "min_evaluation": 1, "min_parties": 1}
    same = {"reproducible_batches": True, "reproducible_parts": True, "foreign_reading": True, "exact_counts": True}
    return Limits(**{**everything, **least, **same, **limits})


def make_sites(silos, folder, limits=None):
    return [
        Site(
            silos.names[i],
            alone(silos, i),
            StateStore(Path(folder) / f"site{i}"),
            limits or opened(),
            classes=None if silos.classes is None else silos.classes.tolist(),
        )
        for i in range(len(silos))
    ]


def write(algorithm, regularizer=None, **run):
    content = {"algorithm": algorithm.table, "run": {"rounds": 5, "stationarity_step": 0.1, **run}}
    if regularizer is not None:
        content["regularizer"] = regularizer
    return tomli_w.dumps(content)


def federate(grid, text, settings=None, job="job", checkpoint=None, log=None, **options):
    lines = [] if log is None else log
    names = [s.name for s in grid.sites.values()]
    one = Coordinator(grid, names, grid.permitted, parse(text), job, settings, log=lines.append, **options)
    one.prepare()
    return one, one.run(checkpoint)


def method(name, **changes):
    return dataclasses.replace(algorithms.REGISTRY[name].auto(5.0, local_steps=3), **changes)


L1 = {"name": "L1", "lam": 0.003}


def regularizer_of(algorithm):
    return None if algorithm.info.regularizer == "none" else L1
