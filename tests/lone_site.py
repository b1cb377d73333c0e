"""One site and an order by hand: what a rogue coordinator would send, and what comes back."""

import numpy as np
import safetensors.torch
import tomli_w
import torch

from fedcomposite.data import Silos
from fedcomposite.federation import wire
from fedcomposite.federation.orders import Order, Shape
from fedcomposite.federation.site.client_states import StateStore
from fedcomposite.federation.site.policy import Limits, RefusalError
from fedcomposite.federation.site.site import Site

M, D = 46, 5


def people(seed=0, classes=2):
    """A silo of M rows that are all different."""
    generator = np.random.default_rng(seed)
    return generator.normal(size=(M, D)), generator.integers(0, classes, M).astype(float)


def make_site(folder, pairs=None, test=None, classes=None, **limits):
    pairs = people() if pairs is None else pairs
    silos = Silos.from_arrays([pairs], names=["a"], test=test)
    return Site("a", silos, StateStore(folder), Limits(**limits), classes=classes)


def experiment(loss="logistic", bias=False, model=None, method=None, **run):
    content = {
        "problem": {"loss": loss, "bias": bias} if model is None else {},
        "algorithm": {"name": "FedAvg", "local_steps": 1, "step": 1.0} if method is None else method,
        "run": {"rounds": 1000, "stationarity_step": 1.0, "dtype": "float64", **run},
    }
    return tomli_w.dumps(content | ({} if model is None else {"model": model}))


def ask(site, config, round=0, model=None, message=None, labels=(0.0, 1.0), clients=3, job="job"):
    """One order; the numbers and vectors of the answer, or its refusal as an error."""
    vectors = {"buffers": torch.zeros(0, dtype=torch.float64)}
    vectors |= {} if model is None else {"model": torch.as_tensor(model)}
    vectors |= {} if message is None else {"message.x": torch.as_tensor(message), "start": torch.as_tensor(message)}
    shape = Shape(features=[D], dtype="float64", labels=list(labels), clients=clients)
    order = Order(
        job=job,
        site="a",
        config=config,
        shape=shape,
        round=round,
        cohort=min(3, clients),
        train=message is not None,
        evaluate=model is not None,
    )
    answer = site.answer(wire.content(order=order.model_dump_json(), vectors=vectors))
    if wire.kind(answer) == "refusal":
        raise RefusalError(wire.text(answer, "refusal"))
    return wire.numbers(answer), safetensors.torch.load(answer["vectors"])
