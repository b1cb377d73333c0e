"""A U-Net that marks discs in noisy pictures: half of its parameters become zero in whole filters, and are cut out.

Four clinics' cameras have different noise. Masks are (samples, height, width), outputs (batch, classes, height, width).
"""

import tempfile
import timeit

import torch

import fedcomposite as fc

generator = torch.Generator().manual_seed(0)
lines = torch.arange(16.0)


def clinic(noise, samples=30):
    """Pictures and masks."""
    centre = 4 + 8 * torch.rand(samples, 2, 1, 1, generator=generator)
    radius = 2 + 2 * torch.rand(samples, 1, 1, generator=generator)
    masks = (lines.view(-1, 1) - centre[:, 0]) ** 2 + (lines - centre[:, 1]) ** 2 < radius**2
    return (masks + noise * torch.randn(masks.shape, generator=generator)).unsqueeze(1), masks.long()


silos = fc.Silos.from_arrays([clinic(noise) for noise in (0.3, 0.5, 0.7, 0.9)], test=clinic(0.6))
network = fc.models.build("unet", silos, width=8, depth=2)
problem = fc.Problem(silos, model=network, metrics=["iou", "dice"])
method = fc.algorithms.FedMid(local_steps=4, step=0.2, server_prox_only=True)
run = fc.simulate(problem, method, rounds=30, batch_size=8, sparsity=0.5, structure="filters", evaluate_every=5)
print(run)
print(f"IoU {run.history[-1].test_iou:.3f}, Dice {run.history[-1].test_dice:.3f}, zeros {run.history[-1].sparsity:.1%}")

with tempfile.TemporaryDirectory() as folder:
    made = fc.export(problem, run, f"{folder}/unet.safetensors", format="safetensors", pruned=True)
print(made.pruned)
whole, pictures = problem.module(run.solution, run.buffers), silos.test[0][:16]
each = [timeit.timeit(lambda m=m: m(pictures), number=10) for m in (whole, made.pruned.module)]
print(f"{each[0] / each[1]:.1f} times as fast")

if __name__ == "__main__":
    run.plot("unet.png")
