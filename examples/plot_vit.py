"""A vision transformer on digits: heads and neurons become zero, are cut out, and what is left is exported and timed.

Six clients hold mostly a few of the ten digits each; half of them take part in a round.
"""

import tempfile
import timeit

import fedcomposite as fc

silos = fc.data.load("digits", test=0.2).partition("dirichlet", clients=6, alpha=1.0)
network = fc.models.build("vit-small", silos, patch=2, width=32, depth=2, heads=4)
problem = fc.Problem(silos, model=network)
method = fc.algorithms.FedMid(local_steps=10, step=0.3, server_prox_only=True)
run = fc.simulate(
    problem, method, rounds=100, batch_size=16, participation=0.5, sparsity=0.6, structure="filters", evaluate_every=10
)
print(run)
print(f"test accuracy {run.history[-1].test_accuracy:.3f}, zeros {run.history[-1].sparsity:.1%}")

with tempfile.TemporaryDirectory() as folder:
    made = fc.export(problem, run, f"{folder}/vit.safetensors", format="safetensors", pruned=True)
print(made.pruned.table()[["layer", "weight", "pruned"]].to_string(index=False))
print(made.pruned)
whole, digits = problem.module(run.solution, run.buffers), silos.test[0][:64].float()
each = [timeit.timeit(lambda m=m: m(digits), number=10) for m in (whole, made.pruned.module)]
print(f"{each[0] / each[1]:.1f} times as fast")

if __name__ == "__main__":
    run.plot("vit.png")
