"""Sites in this process behind a local Grid, and a coordinator that runs experiments with them."""

import dataclasses
import math
from pathlib import Path

import tomli_w
from flwr.app import Error, Message
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from fedcomposite import algorithms
from fedcomposite.data import Silos
from fedcomposite.federation.coordinator.coordinator import Coordinator
from fedcomposite.federation.shape import parse
from fedcomposite.federation.site.client_states import StateStore
from fedcomposite.federation.site.site import Limits, Site


class LocalGrid(Grid):
    """Sites in this process: an order is answered when it is sent. ``meddle(site, reply)`` may lie on the way back."""

    def __init__(self, sites, meddle=None):
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 0, 1
        self.sites = dict(enumerate(sites, 1))
        self.meddle, self.log, self.away, self._box = meddle, [], set(), {}

    def set_run(self, run): ...

    @property
    def run(self):
        raise NotImplementedError

    def create_message(self, *args, **kwargs):
        raise NotImplementedError

    def get_node_ids(self):
        return [n for n, site in self.sites.items() if site.name not in self.away]

    def push_messages(self, messages):
        ids = []
        for message in messages:
            name = message.object_id
            message.metadata.__dict__["_message_id"] = name
            site = self.sites[message.metadata.dst_node_id]
            answer = site.answer(message.content)
            if self.meddle is not None:
                answer = self.meddle(site.name, message.content, answer)
            self.log.append((site.name, message.content, answer))
            kind = {"error": answer} if isinstance(answer, Error) else {"content": answer}
            self._box[name] = Message(**kind, reply_to=message)
            ids.append(name)
        return ids

    def pull_messages(self, message_ids):
        return [self._box.pop(i) for i in list(message_ids) if i in self._box]

    def send_and_receive(self, messages, *, timeout=None):
        raise NotImplementedError

    @property
    def nodes(self):
        return lambda: {site.name: n for n, site in self.sites.items()}


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
    spec = {"name": type(algorithm).__name__, **{k: v for k, v in vars(algorithm).items() if v is not None}}
    content = {"algorithm": spec, "run": {"rounds": 5, "stationarity_step": 0.1, **run}}
    if regularizer is not None:
        content["regularizer"] = regularizer
    return tomli_w.dumps(content)


def federate(grid, text, settings=None, job="job", checkpoint=None, log=None, **options):
    lines = [] if log is None else log
    names = [s.name for s in grid.sites.values()]
    one = Coordinator(grid, names, grid.nodes, parse(text), job, settings, log=lines.append, **options)
    one.prepare()
    return one, one.run(checkpoint)


def method(name, **changes):
    return dataclasses.replace(algorithms.REGISTRY[name].auto(5.0, local_steps=3), **changes)


L1 = {"name": "L1", "lam": 0.003}


def regularizer_of(algorithm):
    return None if algorithm.info.regularizer == "none" else L1
