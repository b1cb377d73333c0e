"""DP-SGD of Opacus on pooled data: a linear classifier, with the noise that its own accountant asks for.

    python benchmarks/peers/run_opacus.py TASK.npz     # prints one JSON object per run

The file holds X, y (0 or 1), test_X, test_y and, as JSON, the epsilons, delta, seeds and settings to try.
"""

from __future__ import annotations

import json
import sys
import warnings

import numpy as np
import torch
from opacus import PrivacyEngine
from opacus.accountants.utils import get_noise_multiplier
from torch import nn


def main() -> None:
    warnings.simplefilter("ignore")
    task = np.load(sys.argv[1])
    plan = json.loads(str(task["plan"]))
    X, y, X2, y2 = (torch.as_tensor(task[k], dtype=torch.float32) for k in ("X", "y", "test_X", "test_y"))
    data = torch.utils.data.TensorDataset(X, y)
    for epsilon in plan["epsilons"]:
        for setting in plan["settings"]:
            noise = get_noise_multiplier(
                target_epsilon=epsilon,
                target_delta=plan["delta"],
                sample_rate=1 / -(-len(X) // setting["batch"]),
                epochs=setting["epochs"],
                accountant="rdp",
            )
            for seed in plan["seeds"]:
                torch.manual_seed(seed)
                model = nn.Linear(X.shape[1], 1)
                nn.init.zeros_(model.weight)
                nn.init.zeros_(model.bias)
                model, optimizer, loader = PrivacyEngine(accountant="rdp").make_private(
                    module=model,
                    optimizer=torch.optim.SGD(model.parameters(), lr=setting["lr"]),
                    data_loader=torch.utils.data.DataLoader(data, batch_size=setting["batch"]),
                    noise_multiplier=noise,
                    max_grad_norm=setting["clip"],
                )
                for _ in range(setting["epochs"]):
                    for inputs, targets in loader:
                        optimizer.zero_grad()
                        nn.functional.binary_cross_entropy_with_logits(model(inputs).squeeze(1), targets).backward()
                        optimizer.step()
                with torch.no_grad():
                    z = model(X2).squeeze(1)
                    right, pairs = ((z > 0) == (y2 > 0)).float().mean(), z[y2 > 0].unsqueeze(1) - z[y2 <= 0]
                    auroc = ((pairs > 0).double() + (pairs == 0).double() / 2).mean()
                    loss = nn.functional.binary_cross_entropy_with_logits(model(X).squeeze(1), y)
                made = {"epsilon": epsilon, "setting": setting, "seed": seed, "accuracy": float(right)}
                print(json.dumps(made | {"loss": float(loss), "auroc": float(auroc)}), flush=True)


if __name__ == "__main__":
    main()
