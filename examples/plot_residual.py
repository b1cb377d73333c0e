"""FedCanon's residual.

FedCanon takes one prox per round, at the server. Its clients take plain steps along the gradient, which is not zero at
a solution of a composite problem: with several local steps they walk away from it. So it stops at a distance that is
proportional to the local step beta while that is small, and the formula (beta/2) (tau - 1) ||[H grad f] on the
support|| says at which, before anything is run (dashed). It is the first order in beta and fails for large steps: the
residual is 48 % above it at beta = 3.5, a tenth of 1/L, 25 % at 1.8, and within 1 % at 0.035. FedNMap, with the same
number of local steps, goes on.
"""

import matplotlib.pyplot as plt
import torch

import fedcomposite as fc

plt.rcParams |= {"axes.spines.top": False, "axes.spines.right": False}
silos = fc.data.load("synthetic", clients=10, features=12, samples=100, scale=True, seed=1)
problem = fc.Problem(silos, loss="logistic", regularizer=fc.regularizers.L1(0.003))
step, tau = 1 / problem.smoothness("mean"), 10

x = fc.solve(problem, tolerance=1e-12).solution  # the solution, and the Hessian of the mean loss there
p = torch.sigmoid(silos.features @ x)
H = (silos.features * (p * (1 - p))[:, None]).T @ silos.features / len(p)  # every client has 100 samples
drift = (H @ problem.gradient(x))[x != 0].norm()

fig, axes = plt.subplots(figsize=(7.5, 4.4), layout="constrained")
for place, share in enumerate((0.1, 0.05, 0.005, 0.001)):
    beta = share * step
    run = fc.simulate(problem, fc.algorithms.FedCanon(tau, beta, step), rounds=1000, evaluate_every=20)
    predicted = float(beta / 2 * (tau - 1) * drift)
    axes.plot(
        [r.round for r in run.history], [r.stationarity for r in run.history], label=f"FedCanon, beta = {beta:.2g}"
    )
    axes.axhline(predicted, color=f"C{place}", ls="--", lw=1)
    end = run.history[-1].stationarity
    print(f"beta = {beta:.2g}: ends at {end:.3e}, predicted {predicted:.3e}, {end / predicted - 1:.1%} above that")
exact = fc.algorithms.FedNMap(tau, step / tau, gamma=step)
run = fc.simulate(problem, exact, rounds=1000, evaluate_every=20)
axes.plot([r.round for r in run.history], [r.stationarity for r in run.history], color="black", label="FedNMap")
axes.set(yscale="log", xlabel="round", ylabel="stationarity")
axes.legend(frameon=False)
fig.savefig("residual.png", dpi=130)
