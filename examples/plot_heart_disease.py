"""Four hospitals, one sparse model: federated SCAD logistic regression on the Heart Disease data.

The hospitals differ a lot (38 % to 98 % of the patients are sick). Federated or pooled, the solution is the same.
"""

import fedcomposite as fc

hospitals = fc.data.load("heart_disease")
print(hospitals.summary().to_string(index=False))

problem = fc.Problem(hospitals, loss="logistic", bias=True, regularizer=fc.regularizers.SCAD(1.0, kappa=0.02))
L = problem.smoothness()
method = fc.algorithms.FedNMap(local_steps=10, step=0.1 / L, gamma=1 / L)
federated = fc.simulate(problem, method, rounds=3000, tolerance=1e-10, evaluate_every=10)
pooled = fc.simulate(problem, fc.algorithms.ProximalGradient(1 / L), rounds=20_000, tolerance=1e-10, evaluate_every=50)

print(federated)
print(f"objective: federated {federated.history[-1].objective:.10f}, pooled {pooled.history[-1].objective:.10f}")
for name, a, b in zip(problem.coordinate_names, federated.solution.tolist(), pooled.solution.tolist(), strict=True):
    print(f"{name:14} {a:+.6f} {b:+.6f}")

if __name__ == "__main__":
    federated.plot("heart_disease.png")
    hospitals.plot("heart_disease_silos.png")
