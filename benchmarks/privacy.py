"""What privacy costs: accuracy and support recovery against epsilon, beside DP-SGD of Opacus on pooled data.

Heart Disease (four hospitals, a quarter of the rows held out) and A9A (ten equal clients, its own test set), logistic
regression, delta 1e-5, epsilon per site. Every row of the table is the best of a small grid of settings by mean test
accuracy; that choice is not paid for, in any row. Then a sparse problem with known support.

    python benchmarks/privacy.py --opacus PYTHON [--figure docs/images/privacy.png]

``PYTHON`` is that of an environment with benchmarks/peers/requirements-opacus.txt; without it that row is left out.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedcomposite as fc
from fedcomposite.privacy import SampleLevel, noise_for
from fedcomposite.schedules import Inverse

DELTA, EPSILONS = 1e-5, (1.0, 3.0, 10.0)
SPARSE = (0.3, 1.0, 3.0, 10.0, 30.0)


def heart() -> fc.Silos:
    return fc.data.load("heart_disease", test=0.25)


def a9a() -> fc.Silos:
    return fc.data.load("a9a").partition("iid", clients=10)


TASKS: dict[str, dict[str, Any]] = {
    "heart": {
        "silos": heart,
        "seeds": 10,
        "newton": [{"rounds": r, "clip": 1.0, "hessian_clip": 2.0, "damping": d} for r in (3, 5) for d in (0.1, 0.3)],
        "gradient": [{"rounds": r, "clip": 1.0, "step": s} for r in (10, 20) for s in (0.5, 1.0)],
        "local": [{"rounds": r, "clip": 1.0, "step": s, "rate": 0.2} for r in (10, 20) for s in (0.1, 0.3)],
        "opacus": [{"clip": 1.0, "lr": lr, "batch": 64, "epochs": e} for e in (5, 20) for lr in (0.5, 2.0)],
    },
    "a9a": {
        "silos": a9a,
        "seeds": 2,
        "newton": [{"rounds": r, "clip": c, "hessian_clip": 1.0, "damping": 0.02} for r, c in ((4, 2.0), (8, 1.0))],
        "gradient": [{"rounds": 30, "clip": c, "step": s} for c, s in ((3.0, 1.0), (1.0, 5.0))],
        "local": [{"rounds": 20, "clip": 1.0, "step": s, "rate": 0.05} for s in (0.5, 1.5)],
        "opacus": [{"clip": 1.0, "lr": lr, "batch": 512, "epochs": 5} for lr in (2.0, 8.0)],
    },
}


def problem(silos: fc.Silos) -> fc.Problem:
    return fc.Problem(silos, loss="logistic", bias=True, weights="samples")


def newton(setting: dict[str, Any], epsilon: float, share: float) -> tuple[Any, SampleLevel]:
    noise = noise_for(epsilon=epsilon, delta=DELTA, queries=setting["rounds"] + 1)
    method = fc.algorithms.ChordNewton(damping=setting["damping"])
    return method, SampleLevel(setting["clip"], noise, delta=DELTA, share=share, hessian_clip=setting["hessian_clip"])


def gradient(setting: dict[str, Any], epsilon: float, share: float) -> tuple[Any, SampleLevel]:
    noise = noise_for(epsilon=epsilon, delta=DELTA, queries=setting["rounds"])
    return fc.algorithms.ProximalGradient(setting["step"]), SampleLevel(
        setting["clip"], noise, delta=DELTA, share=share
    )


def local(setting: dict[str, Any], epsilon: float, share: float) -> tuple[Any, SampleLevel]:
    noise = noise_for(epsilon=epsilon, delta=DELTA, queries=5 * setting["rounds"], rate=setting["rate"])
    method = fc.algorithms.FedAvg(local_steps=5, step=setting["step"])
    return method, SampleLevel(setting["clip"], noise, setting["rate"], DELTA)


ROWS = {
    "ChordNewton": ("newton", newton, False),
    "ChordNewton, shared noise": ("newton", newton, True),
    "ProximalGradient": ("gradient", gradient, False),
    "ProximalGradient, shared noise": ("gradient", gradient, True),
    "FedAvg, 5 local steps": ("local", local, False),
}


def best(runs: dict[str, list[tuple[float, float]]]) -> tuple[float, float, float]:
    """Mean accuracy, half its range and mean loss of the setting with the best accuracy."""
    means = {k: np.mean([a for a, _ in v]) for k, v in runs.items()}
    chosen = runs[max(means, key=lambda k: float(means[k]))]
    accuracies = [a for a, _ in chosen]
    return float(np.mean(accuracies)), float(np.ptp(accuracies) / 2), float(np.mean([loss for _, loss in chosen]))


def ours(task: dict[str, Any], name: str, epsilon: float) -> tuple[float, float, float]:
    grid, make, shared = ROWS[name]
    posed = problem(task["silos"]())
    share = 1 / len(posed.silos) if shared else 1.0
    runs: dict[str, list[tuple[float, float]]] = {}
    for setting in task[grid]:
        method, privacy = make(setting, epsilon, share)
        for seed in range(task["seeds"]):
            done = fc.simulate(
                posed, method, rounds=setting["rounds"], evaluate_every=setting["rounds"], privacy=privacy, seed=seed
            ).history[-1]
            assert done["epsilon"] <= epsilon * (1 + 1e-9)
            runs.setdefault(str(setting), []).append((done["test_accuracy"], done["loss"]))
    return best(runs)


def opacus(task: dict[str, Any], python: str) -> dict[float, tuple[float, float, float]]:
    found: dict[float, dict[str, list[tuple[float, float]]]] = {}
    for one in opacus_runs(task, python):
        found.setdefault(one["epsilon"], {}).setdefault(str(one["setting"]), []).append((one["accuracy"], one["loss"]))
    return {epsilon: best(runs) for epsilon, runs in found.items()}


def opacus_runs(task: dict[str, Any], python: str) -> list[dict[str, Any]]:
    """Every run of Opacus on the pooled features of a task: its epsilon, setting, accuracy, AUROC and loss."""
    silos = task["silos"]()
    X, y = silos.held_out["test"]
    plan = {
        "epsilons": EPSILONS,
        "delta": DELTA,
        "seeds": list(range(min(5, task["seeds"]))),
        "settings": task["opacus"],
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "task.npz"
        labels = (silos.targets > 0).numpy().astype(float)
        np.savez(path, X=silos.features.numpy(), y=labels, test_X=X.numpy(), test_y=y.numpy(), plan=json.dumps(plan))
        script = Path(__file__).parent / "peers" / "run_opacus.py"
        out = subprocess.run([python, str(script), str(path)], check=True, capture_output=True, text=True).stdout
    return [json.loads(line) for line in out.splitlines()]


def sparse(seeds: int = 5) -> dict[float, tuple[float, float, float]]:
    """F1 of the support, its precision and recall, by epsilon: ten clients, 40 features of which 8 matter."""
    found = {}
    for epsilon in SPARSE:
        scores = []
        for seed in range(seeds):
            make = np.random.default_rng(seed)
            truth = np.where(np.arange(40) < 8, make.choice([-1.0, 1.0], 40), 0.0)
            parts = []
            for _ in range(10):
                X = make.normal(size=(500, 40))
                parts.append((X, np.where(X @ truth + make.logistic(size=500) > 0, 1.0, -1.0)))
            posed = fc.Problem(fc.Silos.from_arrays(parts), loss="logistic", regularizer=fc.regularizers.L1(0.03))
            rounds = 6
            noise = noise_for(epsilon=epsilon, delta=DELTA, queries=rounds + 1)
            privacy = SampleLevel(4.0, noise, delta=DELTA, hessian_clip=4.0)
            method = fc.algorithms.ChordNewton(damping=0.1, step=Inverse(start=1.0))
            x = fc.simulate(posed, method, rounds=rounds, evaluate_every=rounds, privacy=privacy, seed=seed).solution
            chosen, real = (x != 0).numpy(), truth != 0
            hits = int((chosen & real).sum())
            scores.append(
                (2 * hits / max(1, chosen.sum() + real.sum()), hits / max(1, chosen.sum()), hits / real.sum())
            )
        found[epsilon] = tuple(np.mean(scores, axis=0).tolist())
    return found


def draw(table: dict[str, Any], support: dict[float, tuple[float, float, float]], path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(table) + 1, figsize=(4.2 * (len(table) + 1), 3.4), layout="constrained")
    for axis, (name, rows) in zip(axes, table.items(), strict=False):
        for label, by in rows.items():
            if label == "exact":
                axis.axhline(by[0], color="black", linestyle="--", linewidth=1, label="without privacy")
            else:
                axis.plot(EPSILONS, [v[0] for v in by], marker="o", label=label)
        axis.set(
            xscale="log", xlabel="epsilon", ylabel="test accuracy", title={"heart": "Heart Disease"}.get(name, "A9A")
        )
    axes[0].legend(fontsize=7)
    for i, label in enumerate(("F1", "precision", "recall")):
        axes[-1].plot(list(support), [v[i] for v in support.values()], marker="o", label=label)
    axes[-1].set(xscale="log", xlabel="epsilon", ylabel="support", title="support recovery, 8 of 40", ylim=(0, 1.05))
    axes[-1].legend(fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def measure(task: dict[str, Any], label: str, python: str | None) -> list[tuple[float, float, float]]:
    """One row: mean accuracy, half its range, and mean loss, by epsilon."""
    if label in ROWS:
        return [ours(task, label, epsilon) for epsilon in EPSILONS]
    assert python is not None
    found = opacus(task, python)
    return [found[epsilon] for epsilon in EPSILONS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--opacus", help="python of an environment with Opacus")
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--results", type=Path, help="rows that are in this file are not measured again")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    table: dict[str, Any] = json.loads(given.results.read_text()) if given.results and given.results.exists() else {}
    for name, task in TASKS.items():
        rows = table.setdefault(name, {})
        if "exact" not in rows:
            exact = fc.solve(problem(task["silos"]())).history[-1]
            rows["exact"] = (exact["test_accuracy"], 0.0, exact["loss"])
        cells = " | ".join(f"epsilon {e:g}" for e in EPSILONS)
        print(f"\n| {name} | {cells} |\n|" + " --- |" * (len(EPSILONS) + 1))
        print(f"| without privacy | {100 * rows['exact'][0]:.1f} % ({rows['exact'][2]:.3f}) |" + " |" * 2)
        for label in [*ROWS, *(["Opacus DP-SGD, pooled"] if given.opacus else [])]:
            if label not in rows:
                rows[label] = measure(task, label, given.opacus)
            if given.results is not None:
                given.results.write_text(json.dumps(table))
            cells = " | ".join(f"{100 * a:.1f} ± {100 * s:.1f} % ({loss:.3f})" for a, s, loss in rows[label])
            print(f"| {label} | {cells} |", flush=True)
    support = sparse()
    print("\n| support | " + " | ".join(f"epsilon {e:g}" for e in support) + " |\n|" + " --- |" * (len(support) + 1))
    for i, label in enumerate(("F1", "precision", "recall")):
        print(f"| {label} | " + " | ".join(f"{v[i]:.2f}" for v in support.values()) + " |")
    if given.figure is not None:
        draw(table, support, given.figure)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
