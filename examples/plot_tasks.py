"""Nuclear norm for ten tasks that share directions.

Handwritten digits at eight sites: ten tasks, "is it a 0?", "is it a 1?" and so on, with 64 coefficients each. As a
matrix, 64 by 10, these are asked to have low rank: the tasks then share a few directions in the space of images. The
stronger the nuclear norm, the fewer directions are left, and the less they can tell. Below is what the tasks share in
the model of the highest rank up to seven, as images.
"""

import matplotlib.pyplot as plt
import torch

import fedcomposite as fc

plt.rcParams |= {"axes.spines.top": False, "axes.spines.right": False}
silos = fc.data.load("digits", test=0.3).partition("dirichlet", clients=8, alpha=0.5, seed=0)
strengths, ranks, scores, start, chosen = [0.5, 0.35, 0.25, 0.18, 0.12, 0.08, 0.05], [], [], None, None
for lam in strengths:
    h = fc.regularizers.NuclearNorm(lam, shape=(64, 10))
    problem = fc.Problem(silos, loss="multinomial", regularizer=h, weights="samples")
    method = fc.algorithms.ProximalGradient(1 / problem.smoothness("mean"))
    run = fc.simulate(problem, method, rounds=150, evaluate_every=150, x0=start)
    start, matrix = run.solution, run.solution.reshape(64, 10)
    ranks.append(int(torch.linalg.matrix_rank(matrix, rtol=1e-8)))
    scores.append(run.history[-1].test_accuracy)
    chosen = matrix if ranks[-1] <= 7 else chosen
    print(f"strength {lam:5}: rank {ranks[-1]}, test accuracy {scores[-1]:.3f}")

fig = plt.figure(figsize=(8, 5), layout="constrained")
top, bottom = fig.subfigures(2, 1, height_ratios=[2, 1])
axes = top.subplots()
axes.plot(ranks, scores, "o-")
axes.set(xlabel="rank of the matrix of coefficients", ylabel="test accuracy")
U, _, _ = torch.linalg.svd(chosen, full_matrices=False)
for panel, direction in zip(bottom.subplots(1, 6), U.T, strict=False):
    panel.imshow(direction.reshape(8, 8).numpy(), cmap="RdBu_r", vmin=-0.3, vmax=0.3)
    panel.set_axis_off()
bottom.suptitle("the six strongest directions of one of the models", fontsize=10)
fig.savefig("tasks.png", dpi=130)
