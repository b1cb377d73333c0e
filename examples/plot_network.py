"""Your own network over silos with label skew: most weights end at exactly zero, and the file shrinks with them.

Six clients hold handwritten digits, each mostly a few of the ten. Any ``torch.nn.Module`` will do.
"""

import tempfile

import torch
from torch import nn

import fedcomposite as fc

silos = fc.data.load("digits", test=0.2).partition("dirichlet", clients=6, alpha=0.3, seed=1)
print(silos.summary().to_string(index=False))

torch.manual_seed(0)
network = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))
problem = fc.Problem(silos, model=network, regularizer=fc.regularizers.SCAD(0.1, kappa=0.04))  # acts on the weights
method = fc.algorithms.FedNMap(local_steps=10, step=0.05, server_step=2.0, gamma=1.0)
run = fc.simulate(problem, method, rounds=100, batch_size=20, dtype=torch.float32, evaluate_every=5)

print(run)
print(f"test accuracy {run.history[-1].test_accuracy:.3f}")
print(problem.layers(run.solution).to_string(index=False))
with tempfile.TemporaryDirectory() as folder:
    made = fc.export(problem, run, f"{folder}/digits.npz", format="csr")  # read back and compared
print(f"{made.dense_bytes} bytes of dense tensors, {made.file_bytes} in a sparse file")

if __name__ == "__main__":
    run.plot("network.png")
