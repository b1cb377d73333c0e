"""Privacy against accuracy.

Four hospitals clip what each patient adds to a gradient and add noise, so that nobody can tell from all that is sent
whether a given patient was there: epsilon says how sure. The smaller it is, the more noise. Above about 1 the model of
these 740 patients hardly suffers; below 0.3 it is guessing more and more. Each dot is a run with noise of its own.
"""

import warnings

import matplotlib.pyplot as plt
import numpy as np

import fedcomposite as fc

plt.rcParams |= {"axes.spines.top": False, "axes.spines.right": False}
warnings.simplefilter("ignore", fc.GrowthWarning)  # much noise makes the objective grow, as it will
hospitals = fc.data.load("heart_disease", test=0.25)
problem = fc.Problem(hospitals, loss="logistic", bias=True, weights="samples")
without = fc.solve(problem).history[-1].test_accuracy
method = fc.algorithms.ChordNewton(damping=0.3)
fig, axes = plt.subplots(figsize=(7.5, 4.2), layout="constrained")
middle = {}
for epsilon in (0.05, 0.1, 0.3, 1.0, 3.0, 10.0):
    noise = fc.privacy.noise_for(epsilon=epsilon, delta=1e-5, queries=5 + 1)  # five gradients and one Hessian
    level = fc.privacy.SampleLevel(clip=1.0, noise=noise, hessian_clip=2.0, delta=1e-5)
    runs = [fc.simulate(problem, method, rounds=5, privacy=level, seed=s, evaluate_every=5) for s in range(8)]
    scores = [run.history[-1].test_accuracy for run in runs]
    middle[epsilon] = np.mean(scores)
    axes.plot([epsilon] * len(scores), scores, "o", color="C0", alpha=0.3)
    print(f"epsilon {epsilon:5}: noise {noise:6.2f}, accuracy {np.mean(scores):.3f} +- {np.std(scores):.3f}")
axes.plot(middle.keys(), middle.values(), color="C0", label="mean of eight runs")
axes.axhline(without, color="black", ls="--", lw=1, label="without privacy")
axes.set(xscale="log", xlabel="epsilon (delta = 1e-5)", ylabel="test accuracy")
axes.legend(frameon=False, loc="lower right")
fig.savefig("privacy.png", dpi=130)
