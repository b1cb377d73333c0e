"""Ideas of a fifth kind: functions that one patient outweighs, and models that are asked about beside the fit's.

    python -m benchmarks.fifth_adversary
    python -m benchmarks.fifth_adversary --ideas steep,tails

The sites are hospitals of the Heart Disease data, as in :mod:`benchmarks.second_adversary`; the asker wants something
about patients of Cleveland. Each idea is tried where sites opt out of what stands in its way, at default limits, and
in secure sums of sites with default limits (secure = "required"). Printed are questions asked, and what came of them.
"""

from __future__ import annotations

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
from benchmarks.fourth_adversary import Tables
from benchmarks.second_adversary import Hospitals, everywhere, tell
from fedcomposite.data.chained import ConditionalModels
from fedcomposite.data.queries import Conditional
from fedcomposite.data.steps import Impute, natural_spline
from fedcomposite.federation.coordinator.delivery import FederationError, Settings
from fedcomposite.federation.coordinator.inquiry import Inquiry
from fedcomposite.federation.engines.local import InProcess
from fedcomposite.federation.shape import parse
from fedcomposite.federation.site.client_states import StateStore
from fedcomposite.federation.site.policy import Limits
from fedcomposite.federation.site.site import Site
from fedcomposite.runtime import Driver
from fedcomposite.runtime.protocol import risk_sums

Floats = npt.NDArray[np.float64]
COLUMNS = ["age", "trestbps", "thalach"]
VALUES = ["sex", "exang"]


def steep(**limits: Any) -> str:
    """The model by which gaps of a category are drawn, at planes on either side of the oldest patient."""
    one = Tables(**limits)
    recipe = {"drop": ["cp", "restecg", "exang"], "one_hot": ["sex"], "impute": {"default": 0.0, "sex": "chained"}}
    chain = ConditionalModels(
        columns={**{name: [] for name in COLUMNS}, "sex": ["0", "1"]}, equations=["sex"], borrowed=["sex"],
        scale={**{name: (0.0, 1.0) for name in COLUMNS}, "num": (0.0, 1.0)}, start={"sex": "0"},
        outcomes=["num"], levels={"0": 0.0, "1": 1.0, "2": 1.0, "3": 1.0, "4": 1.0}, copies=5, iterations=5,
    )  # fmt: skip

    def beyond(age: float) -> Floats | None:
        """Sums of the columns over those who are older, less those over the women."""
        at = [1e4, 0.0, 0.0, 0.0, -1e4 * age]
        filled = Impute(values=dict.fromkeys(COLUMNS, 0.0))
        got = one.ask(
            Conditional(chain=chain, equation="sex", points=[at] * 5, steps=[filled]),
            {**recipe, "copies": 5, "iterations": 5},
        )
        return None if got is None else got[0]["gradient"].reshape(5, -1)[0]

    frames = one.sites.frames.values() if "secure" in limits else [one.sites.frames["cleveland"]]
    oldest = max(float(frame["age"].astype(float).max()) for frame in frames)
    sums = [beyond(oldest - 0.5), beyond(oldest + 0.5)]
    if sums[0] is None or sums[1] is None:
        return f"refused: {one.said.rpartition('refuses: ')[2]:.110}"
    row = sums[0] - sums[1]
    count = row[-1]
    told = (row[:4] / count).round(2).tolist()
    return f"{one.questions} questions: of {count:.0f} patients of {oldest:g} years the mean row {told}"


TAILS: dict[str, tuple[float, list[list[float]]]] = {
    "thalach": (71.0, [[88.0, 95.7, 103.3, 111.0], [88.0, 104.0, 120.0, 136.0], [96.0, 114.0, 132.0, 150.0]]),
    "age": (29.0, [[34.0, 35.7, 37.3, 39.0], [35.0, 39.0, 43.0, 47.0], [38.0, 43.0, 48.0, 53.0]]),
    "trestbps": (200.0, [[172.0, 182.0, 192.0], [150.0, 165.0, 180.0], [130.0, 150.0, 170.0]]),
}
"""Of a column its extreme value in Cleveland, and knots among the values next to it, and less so."""


def tails(**limits: Any) -> str:
    """A spline with knots among the values next to the extreme one: a combination of its terms is nearly one patient.

    Of all functions of the column that are one at the extreme value it is the one with the least sum of squares, which
    the answer tells. What it sums of other columns is taken for the patient's, but for their means.
    """
    secure, asked, right, said = "secure" in limits, 0, list[bool](), 0
    for name, (extreme, ladder) in TAILS.items():
        here = Hospitals(**limits)
        chosen = list(here.frames) if secure else ["cleveland"]
        every = pd.concat([here.frames[site] for site in chosen]).astype(float)
        every["num"] = (every["num"] > 0).astype(float)
        for knots in ladder:
            asked += 1
            try:
                H, slope, names = here.sums({"drop": ["cp", "restecg"], "splines": {name: knots}})
            except FederationError:
                said += 1
                continue
            at = [i for i, k in enumerate(names) if k.split(" spline")[0] in (name, "(1)")]
            X = np.r_[H, [(2 * H[-1] - slope) / 4]] / H[-1, -1] * len(every)  # X'X, and X'y below it
            point = np.r_[extreme, natural_spline(np.array([extreme]), knots)[0], 1.0]
            v = np.linalg.solve(X[np.ix_(at, at)], point)
            v /= float(point @ v)  # one for the patient
            others = float(X[-2, at] @ v) - 1
            patient = every[every[name] == extreme].iloc[0]
            for k in [*VALUES, "num"]:
                total = float(X[-1 if k == "num" else names.index(k)][at] @ v)
                right.append(round(min(max(total - others * every[k].mean(), 0), 1)) == patient[k])
            break
    return f"{asked} questions, {said} refused: {sum(right)} of {len(right)} yes or no of patients with extreme values"


def outermost(**limits: Any) -> str:
    """Sums of exp(margin) over those at risk, at sixteen lengths of a Cox model: exponentials, whose largest is told.

    Along forty directions at one hospital; a length is tried, and shortened by a tenth until it is not refused.
    """
    if "secure" in limits:
        return "not tried: the sums are of all hospitals, and so is the outermost patient"
    silos = fc.data.load("survival", clients=3, samples=600)
    X, y = silos[0]
    patients = torch.as_tensor(X).double()
    patients = (patients - patients.mean(0)) / patients.std(0)
    own = fc.Silos.from_arrays([(patients, y)], names=["a"], feature_names=silos.feature_names)
    site = Site("a", own, StateStore(Path(tempfile.mkdtemp(prefix="fedcomposite-"))),
                Limits(**{**limits, "min_parties": 1}))  # fmt: skip
    content = {"run": {"rounds": 1},
               "problem": {"loss": "cox", "weights": "samples", "loss_options": {"least_at_risk": 5}},
               "algorithm": {"name": "ProxNewton"}, "regularizer": {"name": "L1", "lam": 0.01}}  # fmt: skip
    grid = InProcess([site])
    asking = Inquiry(grid, ["a"], grid.permitted, parse(tomli_w.dumps(content)), "job", Settings())
    asking.meet()
    driver, draw, off, questions = Driver(asking), np.random.default_rng(0), list[float](), 0
    lengths = np.linspace(1.0, 0.6, 16)

    def told(x: Floats) -> Floats | None:
        """Of all patients the sum of exp(margin), and of it times each column."""
        nothing, first = torch.zeros(len(x), dtype=torch.bool), torch.tensor([1e-6], dtype=torch.float64)
        try:
            (got,) = driver.ask([risk_sums(torch.from_numpy(x), first, nothing)])
        except FederationError:
            return None
        share, total = got["weight"][:2].tolist()
        made: Floats = np.r_[got["sizes"].numpy(), got["firsts"].numpy()[0]] * total / share
        return made

    for _ in range(40):
        u = draw.normal(size=patients.shape[1])
        z = patients.numpy() @ u
        length = 1.1 * min(20.0, site.limits.max_margin) / float(z.max() - z.min())
        sums: list[Floats | None] = [None]
        while sums[-1] is None:
            length, sums = length / 1.1, []
            for one in lengths:
                sums.append(told(one * length * u))
                questions += 1
                if sums[-1] is None:
                    break
        row = _leading(lengths[::-1], np.stack([one for one in sums[::-1] if one is not None]))
        off.append(float(np.abs(row - patients.numpy()[z.argmax()]).max()))
    near = int((np.array(off) < 0.1).sum())
    return f"{questions} questions: in {near} of 40 directions the outermost patient's row to 0.1 deviations"


def _leading(lengths: Floats, sums: Floats) -> Floats:
    """The mean row behind the largest of the exponentials that sums at rising lengths are made of (Prony's method)."""
    half, step = len(lengths) // 2, lengths[1] - lengths[0]
    before, after = (np.stack([sums[i + k : i + k + half, 0] for i in range(half)]) for k in (0, 1))
    U, sizes, V = np.linalg.svd(before)
    rank = int((sizes > 1e-12 * sizes[0]).sum())
    values = np.linalg.eigvals((U[:, :rank].T @ after @ V[:rank].T) / sizes[:rank, None])
    rates = np.sort(np.log(values[(np.abs(values.imag) < 1e-9) & (values.real > 0)].real) / step)[::-1]
    made = np.exp(np.outer(lengths, rates))
    scale = made.max(1, keepdims=True)
    found = np.linalg.lstsq(made / scale, sums / scale, rcond=None)[0]
    row: Floats = found[0, 1:] / found[0, 0]
    return row


def honest(**limits: Any) -> str:
    """No idea, but what a rule about the number of models would have to let through: an honest path's weightings.

    A Hessian at a model weighs patients by p (1 - p). ``crossed`` of the fourth adversary needs eight independent ones.
    """
    if limits:
        return "the same: it follows from the models"
    frame = Tables().sites.frames["cleveland"].astype(float)
    X = pd.get_dummies(frame.drop(columns="num"), columns=["cp", "restecg"], drop_first=True).astype(float)
    silos = fc.Silos.from_arrays([(X.to_numpy(), (frame["num"] > 0).to_numpy(float))], names=["cleveland"])
    problem = fc.Problem(silos.standardize(), loss="logistic", bias=True, regularizer=fc.regularizers.L1(0.01))
    features = np.c_[silos.standardize()[0][0].double().numpy(), np.ones(len(X))]
    said = []
    for strengths in (20, 100):
        margins = np.asarray(fc.path(problem, count=strengths, ratio=0.01).solutions) @ features.T
        sizes = np.linalg.svd(1 / (2 + 2 * np.cosh(margins)), compute_uv=False)
        said.append(f"{strengths} strengths {int((sizes > 1e-6 * sizes[0]).sum())}")
    return f"weightings of patients that are independent to six digits: {', '.join(said)}"


IDEAS: dict[str, Callable[..., str]] = {"steep": steep, "tails": tails, "outermost": outermost, "honest": honest}


def main(arguments: Sequence[str] | None = None) -> None:
    """Try the ideas and print what came of each."""
    tell(list(IDEAS), lambda name: everywhere(IDEAS[name]), arguments)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
