"""Fused lasso for a signal across sensors.

Six sensors listen to one source, each through 40 noisy linear measurements of its own; none has enough of them to know
the 120 values of the source. Together they have, if they also know that the source is constant over stretches: the
fused lasso finds the stretches, the lasso does not. Measurements stay at their sensors.
"""

import matplotlib.pyplot as plt
import numpy as np

import fedcomposite as fc

plt.rcParams |= {"axes.spines.top": False, "axes.spines.right": False}
rng = np.random.default_rng(0)
source = np.repeat([0.0, 2.0, 0.0, -1.5, 1.0, 0.0], [20, 15, 25, 20, 15, 25])
sensors = []
for noise in (0.5, 0.5, 1.0, 1.0, 2.0, 2.0):
    A = rng.normal(size=(40, 120))
    sensors.append((A, A @ source + noise * rng.normal(size=40)))
silos = fc.Silos.from_arrays(sensors)

terms = {
    "lasso": fc.regularizers.L1(0.3),
    "fused lasso": fc.regularizers.FusedLasso(0.4, l1=0.02),
}
fig, panels = plt.subplots(2, 1, figsize=(8, 4.8), layout="constrained", sharex=True, sharey=True)
for axes, (name, h) in zip(panels, terms.items(), strict=True):
    found = fc.solve(fc.Problem(silos, loss="least_squares", regularizer=h)).solution.numpy()
    error = np.linalg.norm(found - source) / np.linalg.norm(source)
    jumps = np.count_nonzero(np.abs(np.diff(found)) > 1e-6)
    print(f"{name:12} relative error {error:.3f}, {jumps:3} jumps (the source has 5)")
    axes.step(range(120), source, where="mid", color="grey", lw=4, alpha=0.4, label="source")
    axes.step(range(120), found, where="mid", color="C0", lw=1.5, label=f"{name}, error {error:.0%}")
    axes.legend(frameon=False, loc="upper right")
panels[1].set_xlabel("position")
fig.savefig("sensors.png", dpi=130)
