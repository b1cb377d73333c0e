"""Why averaging kills sparsity.

Four hospitals fit a lasso each, and each model is sparse. But they keep different coefficients, so the mean of the
models has the union of the supports: nearly all of them. FedAvg, with subgradients of the lasso's term, has no zero at
all. FedNMap averages what comes *before* the prox, and ends at the solution of the common problem.
"""

import matplotlib.pyplot as plt
import torch

import fedcomposite as fc

plt.rcParams |= {"axes.spines.top": False, "axes.spines.right": False}
hospitals = fc.data.load("heart_disease", one_hot=True)
h = fc.regularizers.L1(0.04)
problem = fc.Problem(hospitals, loss="logistic", bias=True, regularizer=h)
alone = []
for i in range(4):
    own = fc.Problem(fc.Silos.from_arrays([hospitals[i]]), loss="logistic", bias=True, regularizer=h)
    alone.append(fc.solve(own).solution)
models = torch.stack([*alone, torch.stack(alone).mean(0), fc.solve(problem).solution])[:, :-1]  # without intercepts
rows = [*hospitals.names, "their mean", "federated"]
for name, model in zip(rows, models, strict=True):
    print(f"{name:12} {int((model != 0).sum()):2} of {models.shape[1]} coefficients")

step = 0.1 / problem.smoothness()
methods = fc.algorithms.FedAvg(10, step), fc.algorithms.FedNMap(10, step, gamma=10 * step)
fig, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained", width_ratios=[1.3, 1])
shown = models.where(models != 0, torch.nan).numpy()
picture = left.imshow(shown, cmap="RdBu_r", vmin=-0.8, vmax=0.8, aspect="auto")
left.set_yticks(range(len(rows)), rows)
left.set_xticks(range(models.shape[1]), problem.coordinate_names[:-1], rotation=60, ha="right", fontsize=8)
left.set_title("coefficients; white is exactly zero", fontsize=10)
fig.colorbar(picture, ax=left, shrink=0.8)
for method in methods:
    records = fc.simulate(problem, method, rounds=150).history
    right.plot([r.round for r in records], [r.nonzeros for r in records], label=type(method).__name__)
right.axhline(int((models[4] != 0).sum()) + 1, color="grey", ls="--", label="the mean of the four")
right.set(xlabel="round", ylabel="nonzeros, with the intercept", ylim=(0, None))
right.legend(frameon=False)
fig.savefig("averaging.png", dpi=130)
