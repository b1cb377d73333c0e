"""Ideas of a fourth kind: what answers and refusals say of a value that one patient has; sums over several levels.

    python -m benchmarks.fourth_adversary
    python -m benchmarks.fourth_adversary --ideas named,crossed

The sites are hospitals of the Heart Disease data, as in :mod:`benchmarks.second_adversary`; the asker wants something
about patients of Cleveland. Each idea is tried where sites opt out of what stands in its way, at default limits, and
in secure sums of sites with default limits (secure = "required"). Printed are questions asked, and what came of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.second_adversary import Hospitals, everywhere, tell
from benchmarks.third_adversary import Asker
from fedcomposite.data.queries import Below, Moments, Outside, Query
from fedcomposite.data.steps import OTHER, Impute, Levels, Log, OneHot, Spline, logarithm, natural_spline
from fedcomposite.federation.coordinator.delivery import FederationError
from fedcomposite.federation.coordinator.inquiry import Inquiry

Floats = npt.NDArray[np.float64]
VALUES = ["trestbps", "thalach", "num"]
RECIPE: dict[str, Any] = {"drop": ["sex", "cp", "restecg", "exang"], "rare": 5}


class Tables:
    """Queries about the hospitals' tables by hand; those of one recipe are one job."""

    def __init__(self, **limits: Any) -> None:
        self.sites, self.questions, self.said = Hospitals(**limits), 0, ""
        self._jobs = dict[str, Inquiry]()

    def ask(self, query: Query, recipe: dict[str, Any]) -> list[dict[str, Any]] | None:
        """Every site's answer, or in secure sums their sum; None where it is refused."""
        self.questions += 1
        if repr(recipe) not in self._jobs:
            self._jobs[repr(recipe)] = self.sites.begun(recipe)
        asking = self._jobs[repr(recipe)]
        asking.plan = {}
        try:
            return list(asking.ask([query])[0])
        except FederationError as error:
            self.said = str(error)
            return None

    def column(self, name: str, site: str = "cleveland") -> Floats:
        """A column of a hospital."""
        made: Floats = self.sites.frames[site][name].astype(float).dropna().to_numpy()
        return made


def _members(told: Callable[[Tables, int], bool], one: Tables) -> str:
    """How many of some values are rightly said to be those of a patient, or of none."""
    have = np.concatenate([one.column("thalach", site) for site in one.sites.frames])
    every, right = range(60, 210), 0
    for value in every:
        right += told(one, value) == bool((have == value).any())
        if "used up" in one.said:
            return f"all is refused after {one.questions} questions; {right} values rightly told till then"
    return f"{one.questions} questions: {right} of {len(every)} values are rightly said to be somebody's or nobody's"


def named(**limits: Any) -> str:
    """Are there other levels than all but one? Whether somebody has it."""

    def told(one: Tables, value: int) -> bool:
        levels = [str(v) for v in range(301) if v != value]
        got = one.ask(Outside(known={"thalach": levels}), {**RECIPE, "one_hot": ["thalach"]})
        return got is not None and any(int(a["outside:thalach"][0]) for a in got)

    return _members(told, Tables(**limits))


def withheld(**limits: Any) -> str:
    """A level of the asker's choice as a column: its mean is told if nobody has it, and withheld if few have."""

    def told(one: Tables, value: int) -> bool:
        coding = {"thalach": Levels(levels=[str(value), OTHER], reference=OTHER)}
        steps = [Impute(values={"thalach": "0"}), OneHot(columns=coding, unknown="reference")]
        got = one.ask(Moments(columns=[f"thalach={value}"], steps=steps), {**RECIPE, "one_hot": ["thalach"]})
        return got is not None and any(int(a["withheld"][0]) or float(a["sum"][0]) for a in got)

    return _members(told, Tables(**limits))


def shifted(**limits: Any) -> str:
    """Groups of five values end at numbers with few digits: other units, and they end elsewhere."""
    one, found = Tables(**limits), 0
    truth = one.column("trestbps")
    for sign, extreme in ((1, truth.min()), (-1, truth.max())):
        low, high = 0.0, 400.0  # an edge at 500 of what is shifted, below which nothing is told of the least value
        for _ in range(12):
            shift = 500.0 - sign * (low + high) / 2
            recipe = {**RECIPE, "sites": {"cleveland": {"units": {"trestbps": {"scale": sign, "shift": shift}}}}}
            got = one.ask(Below(edges={"trestbps": [499.99]}), recipe)
            if got is None:
                return f"refused: {one.said.rpartition('refuses: ')[2]:.90}"
            beyond = int(got[0]["high:trestbps"][0]) == 0  # nobody is below
            if (sign > 0) == beyond:
                low = (low + high) / 2
            else:
                high = (low + high) / 2
        found += abs((low + high) / 2 - extreme) < 0.2
    return f"{one.questions} questions: {found} of the least and the largest value exactly"


def logarithms(**limits: Any) -> str:
    """A logarithm that not all values have is refused: whose is the least?"""
    one = Tables(**limits)
    low, high, secure = 0.0, 256.0, "secure" in limits
    truth = (
        min(one.column("thalach", site).min() for site in one.sites.frames) if secure else one.column("thalach").min()
    )
    for _ in range(9):
        middle = (low + high) / 2
        offset = -middle if secure else 0.0
        step = Log(offsets={"thalach": offset})
        recipe: dict[str, Any] = {**RECIPE, "log": {"thalach": offset}}
        if not secure:
            recipe["sites"] = {"cleveland": {"units": {"thalach": {"shift": -middle}}}}
        got = one.ask(Moments(columns=[logarithm("thalach", offset)], steps=[step]), recipe)
        if "more would tell" in one.said:
            break
        low, high = (low, middle) if got is None else (middle, high)
    return f"{one.questions} questions: the least value, {truth:g}, is known to be from {low:g} to {high:g}"


def knots(**limits: Any) -> str:
    """A spline with a knot at every year: its terms' sums are a histogram of the ages."""
    one, ages = Tables(**limits), np.arange(20.0, 86.0)
    step = Spline(knots={"age": ages.tolist()})
    got = one.ask(Moments(columns=step.terms("age"), steps=[step]), {**RECIPE, "splines": {"age": ages.tolist()}})
    if got is None:
        return f"refused: {one.said.rpartition('refuses: ')[2]:.90}"
    sites = list(one.sites.frames) if "secure" in limits else ["cleveland"]
    every = np.concatenate([one.column("age", site) for site in sites])
    truth, told = (every[:, None] == ages).sum(0), got[0]["withheld"] == 0
    sums = np.vstack([natural_spline(ages, ages.tolist()).T[told], np.ones((1, len(ages)))])
    found = np.rint(np.linalg.lstsq(sums, np.append(got[0]["sum"][told], len(every)), rcond=1e-13)[0])
    few = (truth > 0) & (truth < 5)
    return (
        f"1 question: of {few.sum()} ages that one to four patients have {(found == truth)[few].sum()} counts exactly"
    )


def crossed(**limits: Any) -> str:
    """Sums over all who have three levels, from models of these: those who have a fourth one, too, may be one patient.

    Levels are none of the recipe's products, and each has many patients. At a model of three of them the weights of a
    Hessian are eight numbers, so that eight models give the sums over each of eight groups.
    """
    decades = {str(age): f"{min(max(age // 10, 4), 6)}0s" for age in range(20, 90)}
    recipe = {"one_hot": ["age", "cp", "restecg", "exang"], "recode": {"age": decades}, "rare": 5}
    one = Asker({**recipe, "target": {"0": 0.0, "1": 1.0}}, "sex", **limits)
    here = one.sites.frames if one.asking.assembly else {"cleveland": one.sites.frames["cleveland"]}
    patients = np.concatenate([frame[VALUES].astype(float).fillna(0).to_numpy() for frame in here.values()])
    groups = np.array(list(itertools.product((0, 1), repeat=3)))
    weights = 1 / (2 + 2 * np.cosh(groups * (1, 2, 4) @ groups.T))  # of each group at each model
    levels, right = [name for name in one.names if "=" in name], set[tuple[float, ...]]()
    for three in itertools.combinations(levels, 3):
        made = [one.model(**dict(zip(three, map(float, on * (1, 2, 4)), strict=True))) for on in groups]
        sums = np.stack(one.hessians(made))
        inside = np.linalg.solve(weights, sums.reshape(len(sums), -1))[-1].reshape(sums[0].shape)
        for fourth in set(levels) - {*three}:
            row = inside[one.at(fourth)]
            told = np.array([row[one.at(name)] for name in VALUES])
            if abs(row[-1] - 1) < 1e-3 and (np.abs(patients - told) < 0.1).all(1).any():
                right.add(tuple(told.round()))
    return f"{one.questions} questions: {len(right)} patients' rows, with whether they are sick"


IDEAS: dict[str, Callable[..., str]] = {
    "named": named, "withheld": withheld, "shifted": shifted, "logarithms": logarithms, "knots": knots,
    "crossed": crossed,
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Try the ideas and print what came of each."""
    tell(list(IDEAS), lambda name: everywhere(IDEAS[name]), arguments)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
