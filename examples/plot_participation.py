"""Partial participation.

Of 40 clients only some answer in a round. FedAvg then ends where the last few clients pulled it. FedNMap with control
variates that remember the absent ones reaches the solution whoever takes part: with a tenth of the clients in more
rounds, but not with more work, since each of these costs a tenth.
"""

import matplotlib.pyplot as plt

import fedcomposite as fc

plt.rcParams |= {"axes.spines.top": False, "axes.spines.right": False}
silos = fc.data.load("synthetic", clients=40, features=10, samples=40, scale=True, seed=3)
problem = fc.Problem(silos, loss="logistic", regularizer=fc.regularizers.L1(0.003))
step = 1 / problem.smoothness()
fig, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained", sharey=True)
for share, colour in ((1.0, "C0"), (0.5, "C1"), (0.1, "C2")):
    exact = fc.algorithms.FedNMap(5, share * step, gamma=5 * step, partial_participation=True)
    drifting = fc.algorithms.FedAvg(5, share * step)
    for method, style in ((exact, "-"), (drifting, ":")):
        run = fc.simulate(problem, method, rounds=1500, participation=share, evaluate_every=25, tolerance=1e-8)
        name = type(method).__name__
        values = [r.stationarity for r in run.history]
        left.plot([r.round for r in run.history], values, style, color=colour, label=f"{name}, {share:.0%}")
        right.plot([r.bytes_up / 1e6 for r in run.history], values, style, color=colour)
        print(f"{name:8} {share:4.0%} of the clients: {values[-1]:.1e} after {run.rounds} rounds")
left.set(yscale="log", xlabel="round", ylabel="stationarity")
right.set(xlabel="MB sent by all clients")
left.legend(frameon=False, fontsize=8)
fig.savefig("participation.png", dpi=130)
