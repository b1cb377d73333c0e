"""Ten more ideas of a coordinator that follows no protocol, and wants a patient: what does each recover?

    python -m benchmarks.second_adversary
    python -m benchmarks.second_adversary --ideas reference,grown

The sites are hospitals of the Heart Disease data, Cleveland first, whose tables the asker's recipes prepare. Each idea
is tried where sites opt out of what stands in its way, at default limits, and where it is about them in secure sums of
sites with default limits (secure = "required"). Printed is what came of it.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import tomli_w
import torch
from cryptography.hazmat.primitives.asymmetric import ec

import fedcomposite as fc
from benchmarks.adversary import OPEN, Hospital
from fedcomposite.data import Recipe
from fedcomposite.federation.coordinator.delivery import FederationError, Settings
from fedcomposite.federation.coordinator.inquiry import Inquiry, learn
from fedcomposite.federation.engines.local import InProcess
from fedcomposite.federation.secure.keys import MaskKeys
from fedcomposite.federation.shape import parse
from fedcomposite.federation.site.client_states import StateStore
from fedcomposite.federation.site.noised_answers import readable
from fedcomposite.federation.site.policy import Limits
from fedcomposite.federation.site.site import Site
from fedcomposite.federation.site.table_files import TableFile
from fedcomposite.federation.site.table_site import TableSite
from fedcomposite.privacy import StudyBudget
from fedcomposite.runtime import Driver
from fedcomposite.runtime.protocol import ALL, newton

Floats = npt.NDArray[np.float64]
LOOSE: dict[str, Any] = {**OPEN, "min_class": 1, "min_parties": 1, "foreign_reading": True, "refusals": 10**6}
SECURE: dict[str, Any] = {"secure": "required"}
COLUMNS = ["age", "sex", "cp", "trestbps", "restecg", "thalach", "exang", "num"]
LABELS = {"0": 0.0, "1": 1.0, "2": 1.0, "3": 1.0, "4": 1.0}


class Hospitals:
    """Four sites with tables, and an analysis of them by hand."""

    def __init__(self, target: str = "num", **limits: Any) -> None:
        self.target = target
        frames = fc.data.frames("heart_disease")
        self.frames = {name: frame[COLUMNS] for name, frame in frames.items()}
        self.folder, self.limits = Path(tempfile.mkdtemp(prefix="fedcomposite-")), Limits(**limits)
        self.secure = Settings(secure=True) if self.limits.secure == "required" else Settings()
        self.keys = {name: ec.generate_private_key(ec.SECP256R1()) for name in self.frames}
        self.jobs = (f"job{i}" for i in itertools.count())

    def sums(self, recipe: dict[str, Any], **frames: pd.DataFrame) -> tuple[Floats, Floats, list[str]]:
        """X'X and X'y of a recipe's columns with an intercept, from one question: of Cleveland, or of the sum."""
        asking = self.ready(recipe, **frames)
        names = [*asking.recipe.features, "(1)"] if asking.recipe else []
        x, d = torch.zeros(len(names), dtype=torch.float64), len(names)
        asked = newton(x, torch.ones(d, dtype=torch.bool), ALL)
        told = asking.ask([asked])[0] if asking.assembly else Driver(asking).each([asked])[0][0]
        H = np.zeros((d, d))
        H[np.triu_indices(d)] = told["hessian"].numpy()
        return H + np.triu(H, 1).T, told["gradient"].numpy(), names

    def begun(self, recipe: dict[str, Any], **frames: pd.DataFrame) -> Inquiry:
        """A job at sites that have heard nothing of it yet."""
        given = {"target": LABELS, "standardize": False, "impute": 0.0, "unknown": "reference", **recipe}
        content = {"data": {"target": self.target}, "problem": {"loss": "logistic", "bias": True, "weights": "samples"},
                   "algorithm": {"name": "ProxNewton"}, "run": {"rounds": 1}, "recipe": given}  # fmt: skip
        sites = list[Site | TableSite]()
        for name, frame in (self.frames | frames).items():
            path = self.folder / f"{name}.csv"
            frame.to_csv(path, index=False)
            peers = {k: v.public_key() for k, v in self.keys.items() if k != name}
            vault = MaskKeys(name, self.limits, self.keys[name], peers)
            store, source = StateStore(self.folder / name), TableFile(name, path)
            sites.append(TableSite(name, store, self.limits, source=source, vault=vault))
        grid = InProcess(sites)
        return Inquiry(grid, list(self.frames), grid.permitted, parse(tomli_w.dumps(content), recipe=True),
                       next(self.jobs), self.secure)  # fmt: skip

    def ready(self, recipe: dict[str, Any], **frames: pd.DataFrame) -> Inquiry:
        """A job whose recipe was learned, at sites that met the asker."""
        asking = self.begun(recipe, **frames)
        asking.recipe = learn(Driver(asking), asking.config, self.target)
        asking.meet()
        return asking


def refused(error: FederationError) -> str:
    """What a site said."""
    return f"refused: {str(error).splitlines()[0].rpartition('refuses: ')[2]:.110}"


def reference(**limits: Any) -> str:
    """A level that few have is what the others are compared with: a level less its products is those few."""
    recipe = {"drop": ["sex", "exang"], "one_hot": {"cp": "1", "restecg": "1"}, "interactions": [["cp", "restecg"]]}
    here = Hospitals(**limits)
    try:
        H, _, names = here.sums(recipe)
    except FederationError as error:
        return refused(error)
    frame, right = here.frames["cleveland"], 0
    for level in ("2", "3", "4"):
        v = np.zeros(len(names))
        v[names.index(f"cp={level}")] = 1
        v[[i for i, name in enumerate(names) if name.startswith(f"cp={level}:restecg=")]] = -1
        row = H @ v / (v @ H @ v)
        some = frame[(frame["cp"].astype(float) == int(level)) & (frame["restecg"].astype(float) == 1)]
        told = [float(row[names.index(name)]) for name in ("age", "trestbps", "thalach")]
        right += len(some) == 1 and bool(np.allclose(told, some[["age", "trestbps", "thalach"]].astype(float)))
    return f"1 question: {right} patients' rows"


def filled(**limits: Any) -> str:
    """One value that is missing, filled with 0 and with 1: the difference of the sums is that patient."""
    here = Hospitals(**limits)
    one = here.frames["cleveland"].copy()
    one["thalach"] = one["thalach"].astype(object)
    one.loc[17, "thalach"] = "?"
    try:
        made = [here.sums({"drop": ["cp", "restecg"], "impute": {"default": 0.0, "thalach": v}}, cleveland=one)
                for v in (0.0, 1.0)]  # fmt: skip
    except FederationError as error:
        return refused(error)
    (before, _, names), (after, _, _) = made
    row = (after - before)[names.index("thalach")]
    told = row[[names.index("age"), names.index("trestbps")]] / row[-1]
    right = np.allclose(told, one.loc[17, ["age", "trestbps"]].astype(float))
    return f"2 questions: the patient's row {'exactly' if right else 'not'}"


def grown(**limits: Any) -> str:
    """The file of today has one patient more than that of yesterday."""
    here = Hospitals(**limits)
    now = here.frames["cleveland"]
    try:
        made = [here.sums({"drop": ["cp", "restecg"]}, cleveland=frame) for frame in (now.iloc[:-1], now)]
    except FederationError as error:
        return refused(error)
    (before, _, names), (after, _, _) = made
    first, second = (302, 303) if here.limits.secure != "required" else (919, 920)
    row = second * after[-1] / after[-1, -1] - first * before[-1] / before[-1, -1]
    told = row[[names.index("age"), names.index("trestbps")]]
    right = np.allclose(told, now.iloc[-1][["age", "trestbps"]].astype(float), atol=1e-3)
    return f"2 questions: the patient's row {'exactly' if right else 'not'}"


def there(**limits: Any) -> str:
    """Wrong predictions at planes on either side of a point: are they of other numbers where a patient is?"""
    one, draw = Hospital(**limits), np.random.default_rng(0)
    points = np.concatenate([one.X[draw.choice(len(one.X), 40, replace=False)], draw.normal(size=(40, len(one.names)))])
    member, guessed = np.arange(80) < 40, np.zeros(80)
    for i, point in enumerate(points):
        across = draw.normal(size=(10, len(one.names))) / 6
        across -= np.outer(across @ point, point) / (point @ point)
        models = np.concatenate([across - 1e-9 * point, across + 1e-9 * point])
        got = one.question("losses", {"models": models}, errors=True, count=20, job=f"j{i}")
        if got is None:
            return f"refused at question {one.asked}: {one.refused:.110}"
        below, above = got["0.error"].view(2, -1)
        guessed[i] = float((below != above).double().mean())
    cut = np.median(guessed) if guessed.min() > 0 else 0.0
    right = int(((guessed > cut) == member).sum())
    return f"{20 * one.asked} models: of 40 patients and 40 who are none {right} told apart"


def ends(**limits: Any) -> str:
    """Groups of a histogram of scores end between two patients: at 13 models, the mean of their rows."""
    one, told = Hospital(**limits), list[Floats]()
    x = np.random.default_rng(0).normal(size=len(one.names)) / 3
    models = np.stack([x, *(x + 0.02 * e for e in np.eye(len(x)))])
    for i, model in enumerate(models):
        got = one.question("losses", {"models": model[None]}, bins=4096, count=1, job=f"j{i}")
        if got is None:
            return f"refused at question {one.asked}: {one.refused:.110}"
        low = np.flatnonzero(got["0.histogram"].numpy()[0, 0].sum(0))
        u = low / 2048 - 1
        told.append(u / (1 - np.abs(u)))
    z = np.sort(one.X @ x)
    spread = float(np.mean([np.abs(z - v).min() for v in told[0][1:-1]]))
    return f"{one.asked} models: {len(told[0])} ends of groups, off by {spread:.3f} from a patient's margin"


def scanned(**limits: Any) -> str:
    """The scale at which a model is refused, by 60 bisections at models that differ a little: the least of them."""
    one, found, answered = Hospital(**limits), list[float](), 0
    e = np.r_[1.0, np.zeros(len(one.names) - 1)]
    for i in range(60):
        low, high = 1.0, 20.0
        for _ in range(15):
            middle = (low + high) / 2 * (1 + 1e-9 * i)
            refusal = one.model(middle * e, answered) is None
            answered += 1
            if refusal and "refusals" in one.refused:
                best = f"{100 * abs(10 / min(found) / np.abs(one.X[:, 0]).max() - 1):.0f} %" if found else "nothing"
                return f"all is refused after {one.asked} questions; till then off by {best}"
            low, high = (low, middle) if refusal else (middle, high)
        found.append(low)
    off = abs(10 / min(found) / np.abs(one.X[:, 0]).max() - 1)
    return f"{one.asked} questions: the largest value of a column, off by {100 * off:.0f} %"


def replayed(**limits: Any) -> str:
    """One question in 50 jobs, and again in each: does noise average out?"""
    one = Hospital(**limits)
    x, seen = np.random.default_rng(0).normal(size=len(one.names)) / 3, set[float]()
    for i in range(50):
        for _ in range(2):
            got = one.question("losses", {"models": x[None]}, errors=True, count=1, job=f"j{i}")
            seen.add(float(got["0.error"][0]) if got is not None else np.nan)
    wrong = float((((one.X @ x) > 0) != (one.y > 0)).mean())
    return f"{one.asked} questions: {len(seen)} different answers, off by {len(one.y) * abs(seen.pop() - wrong):.1f}"


def alone(**limits: Any) -> str:
    """One site's sums: a term of its own, a level that it alone has, and the sum of all sites less the others'."""
    said = list[str]()
    sexes = {"0": "woman", "1": "man"}
    for name, recipe in (
        ("its own term", {"site": "all", "interactions": [["site", "age"]]}),
        ("its own level", {"one_hot": ["sex"], "sites": {"cleveland": {"recode": {"sex": sexes}}}}),
        ("units of nothing elsewhere", {"sites": {k: {"units": {"age": {"scale": 1e-30}}}
                                                  for k in ("hungary", "switzerland", "longbeach")}}),
    ):  # fmt: skip
        here = Hospitals(**limits)
        try:
            here.sums({"drop": ["cp", "restecg"], **recipe})
            said.append(f"{name}: told")
        except FederationError as error:
            said.append(f"{name}: {refused(error):.60}")
    return "; ".join(said)


def folders(**limits: Any) -> str:
    """Two coordinators with a folder each ask one hospital for tables of scores."""
    count = 0
    for folder in range(2):
        one = Hospital(**limits)
        for i in range(25):
            edges = np.linspace(-1, 1, 9) + i / 1000
            x = np.ones(len(one.names)) / 9
            count += one.question("tallies", {"x": x, "edges": edges}, count=9, job=f"f{folder}-{i}") is not None
    return f"50 questions: {count} tables with noise of their own; 20 where the folders share books"


def slow(**limits: Any) -> str:
    """How long a site takes to prepare a table under a budget for a study: rows that cannot be are looked at singly."""
    here, taken = Hospitals(epsilon=1.0), list[float]()
    columns = {"age": [20, 90], "thalach": [60, 210], "num": ["0", "1", "2", "3", "4"]}
    oldest = 78.0 if not limits else 60.0
    frame = here.frames["cleveland"][["age", "thalach", "num"]]
    budget = StudyBudget(epsilon=1.0, columns=columns)
    for off in (0.0, -oldest):
        recipe = Recipe(drop=[], target=LABELS, impute="mean", missing_target="drop", unknown="reference",
                        log={"age": off})  # fmt: skip
        learned = Recipe(**recipe.model_dump() | {"log": {"age": 0.0}}).fit({"cleveland": frame}, target="num")
        steps = [replace_log(step, off) for step in learned.steps]
        (sheet,) = recipe.sheets({"cleveland": frame})
        began = time.process_time()
        readable(learned.model_copy(update={"steps": steps}), sheet, budget)
        taken.append(time.process_time() - began)
    return f"seconds of a logarithm that all patients have {taken[0]:.3f}, and that some have not {taken[1]:.3f}"


def replace_log(step: Any, off: float) -> Any:
    """The step with another offset, if it is a logarithm."""
    return step.model_copy(update={"offsets": {"age": off}}) if getattr(step, "kind", "") == "log" else step


IDEAS: dict[str, tuple[Callable[..., str], bool]] = {
    "reference": (reference, True), "filled": (filled, True), "grown": (grown, True), "there": (there, False),
    "ends": (ends, False), "scanned": (scanned, False), "replayed": (replayed, False), "alone": (alone, True),
    "folders": (folders, False), "slow": (slow, False),
}  # fmt: skip


def tries(name: str) -> Iterator[tuple[str, str]]:
    """At which sites an idea is tried, and what came of it."""
    idea, secure = IDEAS[name]
    loose = {**LOOSE, "max_margin": 10.0, "exact_counts": False} if name == "scanned" else LOOSE
    yield "opts out", idea(**loose)
    yield "default", idea()
    if secure:
        yield "secure", idea(**SECURE)


def everywhere(idea: Callable[..., str]) -> Iterator[tuple[str, str]]:
    """Try an idea at sites that opt out, at default ones and in secure sums."""
    for where, limits in (("opts out", LOOSE), ("default", {}), ("secure", SECURE)):
        try:
            yield where, idea(**limits)
        except FederationError as error:
            yield where, refused(error)


def tell(
    ideas: Sequence[str], tries: Callable[[str], Iterator[tuple[str, str]]], arguments: Sequence[str] | None
) -> None:
    """Try the ideas, or those of ``--ideas``, and print what came of each."""
    parser = argparse.ArgumentParser(description="Ideas of an adversary, and what came of each.")
    parser.add_argument("--ideas", default=",".join(ideas))
    for name in parser.parse_args(arguments).ideas.split(","):
        for where, said in tries(name):
            print(f"{name:10} {where + ':':10} {said}", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Try the ideas and print what came of each."""
    tell(list(IDEAS), tries, arguments)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
