"""FedMid in Flower's simulation engine (Ray): one actor per core, the model as one array, data read once per actor."""

from __future__ import annotations

import os
import time
from importlib.metadata import version

os.environ.update(FLWR_TELEMETRY_ENABLED="0", FLWR_DISABLE_UPDATE_CHECK="1", RAY_USAGE_STATS_ENABLED="0")

import common
import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation


def main() -> None:
    task, clock, cores = common.arguments()
    folder, gpu = str(task.folder), task.device.type == "cuda"
    client, server = ClientApp(), ServerApp()

    @client.train()
    def train(message: Message, context: Context) -> Message:
        torch.set_num_threads(1)  # the actors have the cores
        mine = common.load(folder)
        module = mine.module()
        mine.put(module, torch.from_numpy(message.content["model"]["x"].numpy()).to(mine.device))
        config = message.content["config"]
        mine.train(module, mine.optimizer(module), mine.batches(config["round"], config["position"]))
        x = mine.get(module).cpu().numpy()
        return Message(RecordDict({"model": ArrayRecord({"x": Array(x)})}), reply_to=message)

    @server.main()
    def serve(grid: Grid, context: Context) -> None:
        module = task.module()
        while len(nodes := list(grid.get_node_ids())) < len(task.cohorts[0]):
            time.sleep(0.01)  # they register one by one
        clock.start()
        for r in range(task.rounds):
            x = task.get(module).cpu().numpy()
            messages = [
                Message(
                    RecordDict(
                        {
                            "model": ArrayRecord({"x": Array(x)}),
                            "config": ConfigRecord({"round": r, "position": position}),
                        }
                    ),
                    dst_node_id=nodes[position],
                    message_type="train",
                    group_id=str(r),
                )
                for position in range(len(task.cohorts[r]))
            ]
            replies = list(grid.send_and_receive(messages))
            for reply in replies:
                if reply.has_error():
                    raise RuntimeError(f"a client failed in round {r}: {reply.error}")
            mean = np.mean([reply.content["model"]["x"].numpy() for reply in replies], axis=0)
            task.put(module, torch.from_numpy(mean).to(task.device))
            task.server_prox(module)
            clock.lap()
        clock.save(task, task.get(module), f"flwr {version('flwr')}, ray {version('ray')}")

    run_simulation(
        server_app=server,
        client_app=client,
        num_supernodes=len(task.cohorts[0]),
        backend_config={
            "init_args": {"num_cpus": cores, "include_dashboard": False, "log_to_driver": False},
            "client_resources": {"num_cpus": 1, "num_gpus": 1 / cores if gpu else 0.0},
        },
    )


if __name__ == "__main__":
    main()
