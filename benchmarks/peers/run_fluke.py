"""FedMid in fluke: its client with a proximal optimizer, its server with a prox after the mean."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import common
import torch

try:
    import torchvision  # noqa: F401  # fluke imports it
except RuntimeError:
    # The published wheel is built for CUDA, and beside a CPU build of torch its operators do not load. Nothing here
    # uses them, but the import wants these two to be declared.
    _declared = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _declared.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from fluke import FlukeENV
from fluke.algorithms import CentralizedFL
from fluke.client import Client
from fluke.config import OptimizerConfigurator
from fluke.server import Server


def main() -> None:
    task, clock, _ = common.arguments()

    class Batches:
        """A client's loader: a pass over it is this round's minibatches."""

        def __init__(self, i: int) -> None:
            self.i = i

        def __len__(self) -> int:
            return task.steps

        def __iter__(self) -> Iterator[common.Pair]:
            r = len(clock.ends) - 1
            return task.batches(r, task.cohorts[r].index(self.i))

    class ProxServer(Server):
        """The round's cohort, mean, prox, time."""

        def get_eligible_clients(self, eligible_perc: float) -> list[Client]:
            return [self.clients[i] for i in task.cohorts[len(clock.ends) - 1]]

        def broadcast_model(self, eligible: Any) -> None:
            if len(clock.ends) == 1:  # the first round
                clock.start()
            super().broadcast_model(eligible)

        def aggregate(self, eligible: Any, client_models: Any) -> None:
            super().aggregate(eligible, client_models)
            task.server_prox(self.model)
            task.synchronize()
            clock.lap()

    FlukeENV().set_device(task.device.type)
    FlukeENV().set_eval_cfg(pre_fit=False, post_fit=False, locals=False, server=False)
    optimizer = OptimizerConfigurator({"name": common.ProxSGD, "lr": task.lr, "prox": task.prox})
    clients = [
        Client(index=i, train_set=Batches(i), test_set=None, optimizer_cfg=optimizer, loss_fn=task.loss, local_epochs=1)
        for i in range(task.clients)
    ]
    server = ProxServer(task.module(), None, clients, weighted=False)
    CentralizedFL(len(clients), None, {}, clients=clients, server=server).run(task.rounds, 1.0)
    clock.save(task, task.get(server.model), f"fluke {version('fluke-fl')}, torch {torch.__version__}")


if __name__ == "__main__":
    main()
