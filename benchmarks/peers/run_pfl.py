"""FedMid in pfl-research: FederatedAveraging with a proximal optimizer at the clients and another at the server."""

from __future__ import annotations

import os
import types
from importlib.metadata import version
from typing import Any

import common
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel


class Timer(TrainingProcessCallback):
    """Notes the ends of rounds."""

    def __init__(self, task: common.Task, clock: common.Clock) -> None:
        self.task, self.clock = task, clock

    def on_train_begin(self, *, model: Any) -> Metrics:
        """Start the clock."""
        self.clock.start()
        return Metrics()

    def after_central_iteration(self, metrics: Any, model: Any, *, central_iteration: int) -> tuple[bool, Metrics]:
        """A round is over."""
        self.task.synchronize()
        self.clock.lap()
        return False, Metrics()


def main() -> None:
    task, clock, _ = common.arguments()
    os.environ["PFL_PYTORCH_DEVICE"] = task.device.type
    module = task.module()
    module.loss = types.MethodType(lambda self, inputs, targets: task.loss(self(inputs), targets), module)
    module.metrics = types.MethodType(
        lambda self, inputs, targets: {"loss": Weighted(0.0, len(targets))}, module
    )  # asked for, but nothing is evaluated after the first round
    places = iter((r, position) for r in range(task.rounds) for position in range(len(task.cohorts[r])))

    def dataset(place: tuple[int, int]) -> Dataset:
        if task.rows is None:
            inputs, targets = next(task.batches(*place))
            return Dataset((inputs, targets))
        rows = task.rows[place].flatten()
        return Dataset((task.X[rows], task.y[rows]))  # the minibatches one after another: one epoch reads them in order

    model = PyTorchModel(
        model=module,
        local_optimizer_create=lambda parameters, lr: common.ProxSGD(parameters, lr=lr, prox=task.prox),
        central_optimizer=common.ProxSGD(
            module.parameters(), lr=1.0, prox=task.prox, prox_step=task.lr * task.steps
        ),  # the mean change counts as a gradient
    )
    data = FederatedDataset(dataset, lambda: next(places))
    full = task.rows is None
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=task.rounds,
            evaluation_frequency=task.rounds + 1,
            train_cohort_size=len(task.cohorts[0]),
            val_cohort_size=None,
        ),
        SimulatedBackend(training_data=data, val_data=data),
        model,
        NNTrainHyperParams(
            local_num_epochs=task.steps if full else 1,
            local_learning_rate=task.lr,
            local_batch_size=None if full else task.rows.shape[3],
        ),
        callbacks=[Timer(task, clock)],
        send_metrics_to_platform=False,
    )
    clock.save(task, task.get(module), f"pfl {version('pfl')}, torch {torch.__version__}")


if __name__ == "__main__":
    main()
