"""A language model on stories at ten clients: what it forgets are whole heads and neurons, and its file shrinks.

The stories are made up (``fc.data.load("stories")``): every client tells of a few topics, a story has a hero.
"""

import tempfile
import timeit

import torch

import fedcomposite as fc
from fedcomposite.data.stories import WORDS

silos = fc.data.load("stories", clients=8, samples=50, length=24, alpha=0.5, test=0.2)
print(" ".join(WORDS[word] for word in silos.features[0]))
network = fc.models.build("gpt-small", silos, width=32, depth=2, heads=4)
problem = fc.Problem(silos, model=network, metrics=["perplexity"])
method = fc.algorithms.FedMid(local_steps=5, step=0.3, server_prox_only=True)
run = fc.simulate(
    problem, method, rounds=60, batch_size=16, participation=0.5, sparsity=0.5, structure="filters", evaluate_every=10
)
print(run)
print(f"perplexity {run.history[-1].test_perplexity:.1f} ({run.history[0].test_perplexity:.0f} at the start)")

with tempfile.TemporaryDirectory() as folder:
    made = fc.export(problem, run, f"{folder}/gpt.safetensors", format="safetensors", pruned=True)
print(made.pruned)
whole, words = problem.module(run.solution, run.buffers), silos.test[0][:32]
each = [timeit.timeit(lambda m=m: m(words), number=10) for m in (whole, made.pruned.module)]
print(f"{each[0] / each[1]:.1f} times as fast")
story = words[:1, :3]
for _ in range(20):
    story = torch.cat([story, made.pruned.module(story)[:, -1:].argmax(-1)], 1)
print(" ".join(WORDS[word] for word in story[0]))

if __name__ == "__main__":
    run.plot("gpt.png")
