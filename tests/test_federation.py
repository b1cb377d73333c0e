"""The adapter between methods and Flower, in one process: sites behind a local Grid, compared with the simulator."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import tomli_w
import torch

import fedcomposite as fc
from fedcomposite import algorithms
from fedcomposite.data import Silos
from fedcomposite.runtime.simulator import simulate
from fedcomposite.testing import small_problem

flwr_app = pytest.importorskip("flwr.app")

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict  # noqa: E402
from flwr.serverapp import Grid  # noqa: E402
from flwr.supercore.task_identity import TaskIdentity  # noqa: E402

from fedcomposite.federation import wire  # noqa: E402
from fedcomposite.federation.orders import Introduction, Order  # noqa: E402
from fedcomposite.federation.post import FederationError, Settings  # noqa: E402
from fedcomposite.federation.server import Coordinator  # noqa: E402
from fedcomposite.federation.shape import AgreementError, parse  # noqa: E402
from fedcomposite.federation.site import Limits, Site  # noqa: E402
from fedcomposite.federation.store import LostStateError, StateStore  # noqa: E402
from fedcomposite.federation.wire import WireError  # noqa: E402


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
    return Silos.from_arrays([(X, y)], names=[silos.names[i]], feature_names=silos.feature_names)


def make_sites(silos, folder, limits=None):
    return [
        Site(silos.names[i], alone(silos, i), StateStore(Path(folder) / f"site{i}"), limits or Limits(min_samples=1))
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


def close(a, b):
    assert a.keys() == b.keys()
    for key in a.keys() - {"seconds"}:
        assert math.isclose(a[key], b[key], rel_tol=1e-12, abs_tol=1e-12), (key, a[key], b[key])


# -- the same numbers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", ["uniform", "samples"])
@pytest.mark.parametrize("name", list(algorithms.REGISTRY))
def test_equals_the_simulator_round_by_round(name, weights, tmp_path):
    """Every method, full and minibatch gradients, all and some of the sites: models and records agree to 1e-12."""
    algorithm = method(name)
    problem = small_problem(algorithm)
    problem = fc.Problem(problem.silos, loss="logistic", regularizer=problem.regularizer, weights=weights)
    cases = [(None, 1.0), (4, 1.0)] + [(4, 0.5)] * algorithm.partial
    for case, (batch, share) in enumerate(cases):
        text = write(algorithm, regularizer_of(algorithm), participation=share, **({"batch_size": 4} if batch else {}))
        text = tomli_w.dumps({"problem": {"weights": weights}}) + text
        grid = LocalGrid(make_sites(problem.silos, tmp_path / str(case)))
        one, run = federate(grid, text)
        want = simulate(
            problem, algorithm, rounds=5, batch_size=batch, participation=share, stationarity_step=0.1, backend="loop"
        )
        torch.testing.assert_close(run.solution, want.solution, rtol=0, atol=1e-12)
        for a, b in zip(run.history, want.history, strict=True):
            close(a, b)
        for a, b in zip(run.server, want.server, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_a_network_with_buffers_equals_the_simulator(tmp_path):
    """Batch-norm buffers travel beside the vectors, and evaluation uses them."""
