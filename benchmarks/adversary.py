"""Ideas of a coordinator that follows no protocol, tried on a hospital of 303 patients: what does each recover?

    python -m benchmarks.adversary                   # a site with default limits, and one that opts out
    python -m benchmarks.adversary --ideas halves,knots

The hospital is Cleveland of the Heart Disease data; the asker knows the package, the site's limits and its columns.
Each idea is tried on a site that opts out of what stands in its way, so that it is a real one, and on a site with
default limits. Printed are questions asked and what came of them.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import tomli_w
import torch

import fedcomposite as fc
from fedcomposite.data.queries import Moments, parse_answer
from fedcomposite.data.steps import Spline
from fedcomposite.federation import wire
from fedcomposite.federation.orders import Order, Shape
from fedcomposite.federation.site.client_states import StateStore
from fedcomposite.federation.site.policy import Limits
from fedcomposite.federation.site.site import Site
from fedcomposite.federation.site.table_files import TableFile
from fedcomposite.federation.site.table_site import TableSite
from fedcomposite.runtime.protocol import Rows
from fedcomposite.runtime.sparse_messages import SHAPE, decode

Floats = npt.NDArray[np.float64]
OPEN: dict[str, Any] = {
    "min_count": 1, "reproducible_parts": True, "reproducible_batches": True, "exact_counts": True, "min_batch": 1,
    "evaluations_per_job": 10**6, "evaluations_per_day": 10**6, "gradients_per_job": 10**6, "gradients_per_day": 10**6,
    "jobs_per_day": 10**6, "max_margin": float("inf"), "score_tables": 10**6,
}  # fmt: skip


def hospital() -> tuple[Floats, Floats, list[str]]:
    """Features and labels of Cleveland, standardized."""
    silos = fc.data.load("heart_disease").standardize()
    X, y = silos[0]
    return X.double().numpy(), y.double().numpy(), list(silos.feature_names)


class Hospital:
    """One site, and what it answers to orders by hand."""

    def __init__(self, **limits: Any) -> None:
        self.X, self.y, self.names = hospital()
        silos = fc.Silos.from_arrays([(self.X, self.y)], names=["a"], feature_names=self.names)
        self.folder = Path(tempfile.mkdtemp(prefix="fedcomposite-"))
        self.site = Site("a", silos, StateStore(self.folder), Limits(**limits))
        self.asked = 0

    def _config(self, loss: str, seed: int = 0, **run: Any) -> str:
        content: dict[str, Any] = {"problem": {"loss": loss}, "run": {"rounds": 90_000, "dtype": "float64", **run}}
        content |= {"algorithm": {"name": "FedAvg", "local_steps": 1, "step": 1.0}, "seed": seed}
        return tomli_w.dumps(content)

    def _answer(self, order: dict[str, Any], vectors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor] | None:
        """The vectors of an answer; None for a refusal."""
        self.asked += 1
        shape = Shape(features=[len(self.names)], dtype="float64", names=self.names, clients=3, sites=["a", "b", "c"],
                      labels=[0.0, 1.0] if "logistic" in order["config"] else [])  # fmt: skip
        text = Order.model_validate({"site": "a", "shape": shape.model_dump(), **order}).model_dump_json()
        answer = self.site.answer(wire.content(order=text, vectors=vectors))
        if wire.kind(answer) == "refusal":
            self.refused = wire.text(answer, "refusal")
            return None
        told = wire.deserialise(answer["vectors"])
        for name in [key.removesuffix(SHAPE) for key in told if key.endswith(SHAPE)]:
            parts = {key.removeprefix(name): told.pop(key) for key in list(told) if key.startswith(f"{name}/")}
            told[name] = decode(parts, tuple(parts[SHAPE].tolist()))
        return told

    def question(
        self,
        name: str,
        vectors: dict[str, Any],
        rows: Rows | None = None,
        loss: str = "logistic",
        job: str = "job",
        **fields: Any,
    ) -> dict[str, torch.Tensor] | None:
        """One question of an analysis."""
        chosen = rows or Rows()
        asked = {"name": name, "rows": {k: v for k, v in vars(chosen).items() if k != "copy_number"}, **fields}
        order = {"job": job, "config": self._config(loss, chosen.seed), "analysis": {"questions": [asked]}}
        return self._answer(order, {f"0.{k}": torch.as_tensor(v) for k, v in vectors.items()})

    def model(self, x: Floats, number: int, loss: str = "logistic", job: str = "job") -> dict[str, torch.Tensor] | None:
        """Loss and gradient at a model."""
        order = {"job": job, "config": self._config(loss), "round": number, "evaluate": True}
        return self._answer(order, {"buffers": torch.zeros(0, dtype=torch.float64), "model": torch.as_tensor(x)})

    def batch(self, x: Floats, number: int, size: int) -> Floats:
        """The gradient of least squares on a minibatch."""
        order = {"job": "job", "config": self._config("least_squares", batch_size=size), "round": number, "train": True,
                 "cohort": 3}  # fmt: skip
        given = torch.as_tensor(x)
        got = self._answer(order, {"buffers": given[:0], "message.x": given, "start": given})
        assert got is not None, self.refused
        return -got["reply.dx"].numpy()


def halves(**limits: Any) -> str:
    """Sums over many random halves: a linear system for the rows, where it is known who is in which half."""
    one, told = Hospital(**limits), []
    zero, off = np.zeros(len(one.names)), np.zeros(len(one.names), bool)
    for number in range(400):
        rows = Rows("half", number, seed=0)
        got = one.question("newton", {"x": zero, "working": off}, rows, "least_squares")
        if got is None:
            return f"refused at question {one.asked}: {one.refused}"
        guess = rows.counts(0, np.zeros(len(one.X), np.int64))
        told.append((guess, -got["0.gradient"].numpy() * guess.sum()))
    found = np.linalg.lstsq(np.stack([c for c, _ in told]), np.stack([v for _, v in told]), rcond=None)[0]
    right = int((np.abs(found - one.X * one.y[:, None]).max(1) < 1e-6).sum())
    return f"{one.asked} questions: {right} of {len(one.X)} rows with their labels"


def seeds(**limits: Any) -> str:
    """A fold by another seed in each of 95 jobs."""
    one, found = Hospital(**limits), set()
    for seed in range(95):
        got = one.question("newton", {"x": np.zeros(len(one.names)), "working": np.zeros(len(one.names), bool)},
                           Rows("fold", 0, 5, True, seed), "least_squares", f"j{seed}")  # fmt: skip
        if got is None:
            return f"refused at question {one.asked}: {one.refused}"
        found.add(tuple(np.round(got["0.gradient"].numpy(), 9)))
    return f"{one.asked} questions: {len(found)} different sums"


def shifted(**limits: Any) -> str:
    """Scores on either side of an edge that moves from patient to patient: who is it, and of which class?"""
    one, right, before = Hospital(**limits), 0, None
    x = np.random.default_rng(0).normal(size=len(one.names)) / 3
    order = np.argsort(one.X @ x)
    z = (one.X @ x)[order]
    for tried, k in enumerate(range(100, 160)):
        got = one.question("tallies", {"x": x, "edges": np.array([(z[k] + z[k + 1]) / 2])}, count=1, job=f"j{k}")
        if got is None:
            return (
                f"refused at question {one.asked}: {one.refused}; labels of {right} of {tried - 1} patients till then"
            )
        now = got["0.tallies"].numpy()[:, 0]
        if before is not None:
            zeros, ones = now - before
            right += (ones > zeros) == (one.y[order[k]] > 0)
        before = now
    return f"{one.asked} questions: labels of {right} of 59 patients guessed right"


def around(**limits: Any) -> str:
    """Edges below and above each of 32 patients whose features are known, at one random model after another.

    Those below are one table and those above the next one, since edges in one must be apart. Five hospitals with
    secrets of their own.
    """
    right, asked = np.zeros(3, int), 0
    for number in range(5):
        one, draw = Hospital(**limits), np.random.default_rng(number)
        known, seen = draw.choice(len(one.X), 32, replace=False), np.zeros(32)
        while one.asked < 40:
            x = draw.normal(size=len(one.names)) / 3
            z = one.X[known] @ x
            order = np.argsort(z)
            apart = [order[0]]
            for i in order[1:]:
                apart += [i] if z[i] - z[apart[-1]] > 0.011 * (one.X @ x).std() else []
            given = [{"x": x, "edges": z[apart] + off} for off in (-1e-7, 1e-7)]
            got = [one.question("tallies", v, count=len(apart), job=f"j{one.asked}") for v in given]
            if any(g is None for g in got):
                break
            below, above = (g["0.tallies"].numpy()[:, :-1].cumsum(1) for g in got if g is not None)
            zeros, ones = above - below
            seen[apart] += ones - zeros
        p = _probabilities(one)[known]
        both = np.log(p / (1 - p)) + seen / (2 * 6.25)  # the evidence of differences of +1 or -1, each with its noise
        right += [int((v == (one.y[known] > 0)).sum()) for v in (seen > 0, p > 0.5, both > 0)]
        asked += one.asked
    said = f"{asked / 5:g} questions: labels of {right[0]} of 160 patients guessed right"
    return f"{said}; {right[1]} by the model, {right[2]} by both"


def _probabilities(one: Hospital) -> Floats:
    """What a fitted model says of each patient, which needs no adversary."""
    problem = fc.Problem(fc.Silos.from_arrays([(one.X, one.y)]), loss="logistic", bias=True)
    z = problem.predict(fc.solve(problem).solution, one.X).double()
    return np.clip(torch.sigmoid(z).numpy(), 0.01, 0.99)


def features(**limits: Any) -> str:
    """Everybody's features are known, and counts at random models are a linear system for all labels."""
    one, draw, rows, counts = Hospital(**limits), np.random.default_rng(0), [], []
    while len(rows) < 20:
        x = draw.normal(size=len(one.names)) / 3
        z = one.X @ x
        edges = z.mean() + z.std() * np.linspace(-2.5, 2.5, 64)
        got = one.question("tallies", {"x": x, "edges": edges}, count=64, job=f"j{one.asked}")
        if got is None:
            return f"refused at question {one.asked}: {one.refused}"
        rows.append(z[None] < edges[:, None])
        counts.append(got["0.tallies"].numpy()[1, :-1].cumsum())
    A, b = np.concatenate(rows).astype(float), np.concatenate(counts)
    p = _probabilities(one)  # what the model says is where the guess begins
    noise = 6.25 if not limits else 1e-3
    guess = p + np.linalg.solve(A.T @ A / noise + np.diag(1 / (p * (1 - p))), A.T @ (b - A @ p) / noise)
    right, model = (int(((v > 0.5) == (one.y > 0)).sum()) for v in (guess, p))
    said = f"{one.asked} questions: labels of {right} of {len(one.y)} patients guessed right"
    return f"{said}; {model} by the model"


def scaled(**limits: Any) -> str:
    """Wrong predictions at planes on either side of a patient, each asked at 20 models that differ in length only."""
    one, draw, right = Hospital(**limits), np.random.default_rng(0), 0
    u, v = draw.normal(size=(2, len(one.names))) / 10
    turn = np.arctan2(-(one.X @ u), one.X @ v) % np.pi
    order = np.argsort(turn)[100:122]
    between = (turn[order][1:] + turn[order][:-1]) / 2
    wrong = []
    for i, angle in enumerate(between):
        models = np.outer(1 + np.arange(20) / 1e6, np.cos(angle) * u + np.sin(angle) * v)
        got = one.question("losses", {"models": models}, errors=True, count=20, job=f"j{i}")
        if got is None:
            return f"refused at question {one.asked}: {one.refused}"
        wrong.append(float(got["0.error"].mean()) * len(one.X))
    passed = order[1:-1]
    above = (one.X[passed] * (np.cos(between[1:, None]) * u + np.sin(between[1:, None]) * v)).sum(1) > 0
    right = int((np.where(np.diff(wrong) < 0, above, ~above) == (one.y[passed] > 0)).sum())
    return f"{20 * one.asked} models: labels of {right} of {len(passed)} patients guessed right"


def bisected(**limits: Any) -> str:
    """The scale at which a model is refused, by bisection: the largest margin in a direction."""
    one = Hospital(**limits)
    low, high, e = 0.0, 100.0, np.r_[1.0, np.zeros(len(one.names) - 1)]
    for i in range(45):
        middle = (low + high) / 2
        low, high = (low, middle) if one.model(middle * e, i) is None else (middle, high)
    off = abs(10.0 / low / np.abs(one.X[:, 0]).max() - 1)
    return f"{one.asked} questions: the largest value of a column, off by {off:.1g} of it"


def outlier(**limits: Any) -> str:
    """Minibatches of unknown rows: those in which a large value shows have its patient."""
    one = Hospital(**limits)
    column = int(np.abs(one.X).max(0).argmax())
    far = int(np.abs(one.X[:, column]).argmax())
    sums = -10 * np.stack([one.batch(np.zeros(len(one.names)), i, 10) for i in range(2000)])  # of y x
    row = one.X[far] * one.y[far]
    shown = np.sign(row[column]) * sums[:, column] > 0.75 * abs(row[column])
    off = np.abs(sums[shown].mean(0) - sums[~shown].mean(0) - row)
    return (
        f"{one.asked} gradients: the patient with the largest value, each column off by {np.median(off):.1f} deviations"
    )


def planes(**limits: Any) -> str:
    """The outermost patient in 40 directions, from gradients at the steepest models that are answered."""
    one, errors, number = Hospital(**limits), [], 0
    draw = np.random.default_rng(0)
    for _ in range(40):
        e = draw.normal(size=len(one.names))
        e /= np.linalg.norm(e)
        reach = np.abs(one.X @ e).max()
        got = [one.model(s * e, number + i) for i, s in enumerate((9.9 / reach, 9.8 / reach))]
        number += 2
        if any(g is None for g in got):
            continue
        g = [v["gradient"].numpy() for v in got if v is not None]
        row = (g[0] - g[1]) / max(1e-12, float(np.abs(g[0] - g[1]).max())) * reach
        outer = one.X[np.abs(one.X @ e).argmax()]
        errors.append(min(np.abs(row - outer).max(), np.abs(row + outer).max()))
    return f"{one.asked} gradients: the outermost patient off by {np.median(errors):.1f} deviations (median)"


def labels(**limits: Any) -> str:
    """Wrong predictions at planes on either side of each patient whose features are known."""
    one, draw = Hospital(**limits), np.random.default_rng(0)
    u, v = draw.normal(size=(2, len(one.names))) / 10
    turn = np.arctan2(-(one.X @ u), one.X @ v) % np.pi  # where the plane passes each patient
    order = np.argsort(turn)[100:141]
    between = (turn[order][1:] + turn[order][:-1]) / 2
    wrong = []
    for i, angle in enumerate(between):
        models = (np.cos(angle) * u + np.sin(angle) * v)[None]
        got = one.question("losses", {"models": models}, errors=True, count=1, job=f"j{i}")
        if got is None:
            return f"refused at question {one.asked}: {one.refused}"
        wrong.append(float(got["0.error"][0]) * len(one.X))
    passed = order[1:-1]
    after = (np.cos(between[1:, None]) * u + np.sin(between[1:, None]) * v) * 1.0
    above = (one.X[passed] * after).sum(1) > 0  # on which side the patient is now
    guess = np.where(np.diff(wrong) < 0, above, ~above)
    right = int((guess == (one.y[passed] > 0)).sum())
    return f"{one.asked} questions: labels of {right} of {len(passed)} patients guessed right"


def turned(**limits: Any) -> str:
    """Wrong predictions at 40 pairs of planes close to each of 20 patients whose features are known."""
    one, draw, right = Hospital(**limits), np.random.default_rng(0), 0
    known = draw.choice(len(one.X), 20, replace=False)
    for i in known:
        row = one.X[i] / np.linalg.norm(one.X[i])
        across = draw.normal(size=(40, len(one.names))) / 3
        across -= np.outer(across @ row, row)
        models = np.concatenate([across - 1e-7 * row, across + 1e-7 * row])
        got = one.question("losses", {"models": models}, errors=True, count=80, job=f"j{i}")
        if got is None:
            return f"refused at question {one.asked}: {one.refused}"
        below, above = got["0.error"].view(2, -1).mean(1).tolist()
        right += (above < below) == (one.y[i] > 0)
    return f"{80 * one.asked} models: labels of {right} of 20 patients guessed right"


def table(
    folder: Path, recipe: dict[str, Any], **limits: Any
) -> tuple[TableSite, Callable[[Any, str, int], Any], Floats]:
    """Cleveland's table as a site, a way to ask it, and its ages."""
    frame = fc.data.frames("heart_disease")["cleveland"]
    frame.to_csv(folder / "a.csv", index=False)
    site = TableSite("a", StateStore(folder / "a"), Limits(**limits), source=TableFile("a", folder / "a.csv"))

    def ask(query: Any, job: str, number: int) -> Any:
        content = {
            "problem": {"loss": "logistic"},
            "algorithm": {"name": "ProxNewton"},
            "run": {"rounds": 1},
            "recipe": recipe,
        }
        analysis = {"number": number, "queries": [query.model_dump_json()]}
        order = Order.model_validate({"job": job, "site": "a", "config": tomli_w.dumps(content), "analysis": analysis})
        answer = site.answer(wire.content(order=order.model_dump_json()))
        if wire.kind(answer) == "refusal":
            return wire.text(answer, "refusal")
        return parse_answer(json.loads(wire.text(answer, "answers"))[0])

    return site, ask, pd.to_numeric(frame["chol"]).to_numpy(float)


def knots(**limits: Any) -> str:
    """Sums of a spline term with knots around a number: its second difference counts the patients there."""
    with tempfile.TemporaryDirectory() as folder:
        _, ask, values = table(Path(folder), {"splines": {"chol": 3}}, **limits)
        grid = np.arange(200.5, 260.5, 0.5)
        sums = []
        for i, v in enumerate(grid):
            steps = [Spline(knots={"chol": [v - 1e-3, v, v + 1e-3]})]
            told = ask(Moments(columns=["chol spline 1"], steps=steps), "job", i + 1)
            if isinstance(told, str):
                return f"refused at question {i + 1}: {told}"
            sums.append(float(told["sum"][0]))
        second = np.diff(sums, 2)
        counts = np.rint(second / np.median(second[second > 0.3 * second.max()])) if second.max() > 0 else second
        true = np.histogram(values, np.append(grid, grid[-1] + 0.5) - 0.25)[0][1:-2]
        right = int((np.sign(counts[: len(true)]) == np.sign(true)).sum())
        return f"{len(grid)} questions: {right} of {len(true)} cells of half a unit known to be empty or not"


IDEAS: dict[str, tuple[Callable[..., str], dict[str, Any]]] = {
    "halves": (halves, OPEN),
    "seeds": (seeds, OPEN),
    "shifted": (shifted, OPEN),
    "around": (around, OPEN),
    "features": (features, OPEN),
    "scaled": (scaled, OPEN),
    "bisected": (bisected, {**OPEN, "max_margin": 10.0}),
    "outlier": (outlier, OPEN),
    "planes": (planes, {**OPEN, "max_margin": 10.0}),
    "labels": (labels, OPEN),
    "turned": (turned, OPEN),
    "knots": (knots, OPEN),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Try the ideas and print what came of each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--ideas", default=",".join(IDEAS))
    for name in parser.parse_args(arguments).ideas.split(","):
        idea, loose = IDEAS[name]
        print(f"{name:8} opts out: {idea(**loose)}", flush=True)
        print(f"{'':8} default:  {idea()}", flush=True)


if __name__ == "__main__":
    main()
