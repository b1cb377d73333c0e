"""A sparse CNN.

Five clients hold handwritten digits, each mostly a few of the ten, and train one small convolutional network. With a
group term on the filters of the convolutions whole filters become zero and can be cut out; l1 on the dense layer
removes single weights. What is white below is exactly zero, so it need not be stored or sent.
"""

import matplotlib.pyplot as plt
import torch
from torch import nn

import fedcomposite as fc

silos = fc.data.load("digits", test=0.2).partition("dirichlet", clients=5, alpha=0.3, seed=1)
torch.manual_seed(0)
network = nn.Sequential(
    nn.Unflatten(1, (1, 8, 8)),
    nn.Conv2d(1, 24, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
    nn.Linear(24 * 16, 10),
)  # fmt: skip
R = fc.regularizers
h = R.GroupLasso(0.03, groups="rows").on("1.weight") + R.L1(0.004).on("5.weight")
problem = fc.Problem(silos, model=network, regularizer=h)
method = fc.algorithms.FedNMap(local_steps=10, step=0.05, server_step=2.0, gamma=1.0)
run = fc.simulate(problem, method, rounds=80, batch_size=20, dtype=torch.float32, evaluate_every=80)
trained = problem.module(run.solution)
filters, dense = trained[1].weight.detach()[:, 0], trained[5].weight.detach()
filters = filters[filters.flatten(1).norm(dim=1).argsort(descending=True)]
kept = int((filters.flatten(1).norm(dim=1) > 0).sum())
zeros = float((dense == 0).double().mean())
print(problem.layers(run.solution).to_string(index=False))
print(f"{kept} of 24 filters, {zeros:.0%} zeros in the dense layer, test accuracy {run.history[-1].test_accuracy:.3f}")

fig = plt.figure(figsize=(9, 4.6), layout="constrained")
top, bottom = fig.subfigures(2, 1, height_ratios=[1.1, 1])
for panel, weights in zip(top.subplots(3, 8).flat, filters, strict=True):
    panel.imshow(weights.where(weights != 0, torch.nan).numpy(), cmap="RdBu_r", vmin=-0.6, vmax=0.6)
    panel.set(xticks=[], yticks=[])
top.suptitle(f"the 24 filters: {24 - kept} are exactly zero", fontsize=10)
axes = bottom.subplots()
axes.imshow(
    dense.where(dense != 0, torch.nan).numpy(),
    cmap="RdBu_r",
    vmin=-0.3,
    vmax=0.3,
    aspect="auto",
    interpolation="nearest",
)
axes.set(xlabel="input of the dense layer", ylabel="digit", yticks=range(0, 10, 3))
axes.set_title(f"the dense layer: {zeros:.0%} of 3840 weights are exactly zero", fontsize=10)
fig.savefig("cnn.png", dpi=130)
