"""Ideas of a third kind: what the outcome has to do with a level that few have, and many models at a level of few.

    python -m benchmarks.third_adversary
    python -m benchmarks.third_adversary --ideas residues,lens

The sites are hospitals of the Heart Disease data, as in :mod:`benchmarks.second_adversary`. The asker looks at those of
Cleveland whose age is 41: ten patients, of whom one is sick. Each idea is tried where sites opt out of what stands in
its way, at default limits, and in secure sums of sites with default limits (secure = "required"), where it is about all
hospitals at once. Printed are questions asked, and what came of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy.optimize import least_squares

from benchmarks.second_adversary import Hospitals, everywhere, tell
from fedcomposite.federation.coordinator.inquiry import Inquiry
from fedcomposite.runtime import Driver
from fedcomposite.runtime.protocol import ALL, Request, Sums, calibration, information, losses, newton, tallies

Floats = npt.NDArray[np.float64]
LEVEL, VALUES = "age=few", ["trestbps", "thalach"]
RECIPE: dict[str, Any] = {
    "drop": ["sex", "cp", "restecg", "exang"], "one_hot": {"age": "others"}, "rare": 5,
    "recode": {"age": {str(age): "few" if age == 41 else "others" for age in range(20, 90)}},
}  # fmt: skip


class Asker:
    """One job at the hospitals, with a column for the level; answers are of Cleveland, or in secure sums of all."""

    def __init__(self, recipe: dict[str, Any], target: str = "num", **limits: Any) -> None:
        self.sites = Hospitals(target, **limits)
        self.asking: Inquiry = self.sites.ready(recipe)
        assert self.asking.recipe is not None
        self.names = [*self.asking.recipe.features, "(1)"]
        self.d, self.questions = len(self.names), 0

    def at(self, name: str) -> int:
        """The place of a column."""
        return self.names.index(name)

    def model(self, **coefficients: float) -> torch.Tensor:
        """A model with some coefficients; ``b`` is the intercept, ``level`` that of the level."""
        x = torch.zeros(self.d, dtype=torch.float64)
        for name, value in coefficients.items():
            x[self.at({"b": "(1)", "level": LEVEL}.get(name, name))] = value
        return x

    def ask(self, requests: Sequence[Request]) -> list[Sums]:
        """Answers to some requests."""
        self.questions += len(requests)
        if self.asking.assembly:
            return list(self.asking.ask(requests))
        return list(Driver(self.asking).each(requests)[0])

    def hessians(self, models: Sequence[torch.Tensor]) -> list[Floats]:
        """Sums of p (1 - p) x x' over all samples."""
        made = []
        for told in self.ask([newton(x, torch.ones(self.d, dtype=torch.bool), ALL) for x in models]):
            H = np.zeros((self.d, self.d))
            H[np.triu_indices(self.d)] = told["hessian"].numpy()
            made.append(H + np.triu(H, 1).T)
        return made

    def truth(self, sick: bool | None = True) -> Floats:
        """Values of the patients with the level, in Cleveland; ``sick`` chooses among them."""
        frame = self.sites.frames["cleveland"]
        chosen = frame["age"].astype(float) == 41
        if sick is not None:
            chosen &= (frame["num"].astype(float) > 0) == sick
        made: Floats = frame.loc[chosen, VALUES].to_numpy(float)
        return made


def _said(one: Asker, row: Floats) -> str:
    """Whether a row is that of the one patient."""
    right = np.allclose(row, one.truth()[0], rtol=1e-3)
    return f"{one.questions} questions: the patient's row {'exactly' if right else 'not'} ({row.round(1).tolist()})"


def residues(**limits: Any) -> str:
    """Squares of residuals at a model of an intercept alone: sums over either class."""
    one, p = Asker(RECIPE, **limits), 1 / (1 + np.exp(-1.0))
    (told,) = one.ask([information(one.model(b=1.0))])
    share, total = told["weight"][:2].tolist()
    every = told["hessian"].numpy() * total / share / (p * (1 - p))
    sick = (told["outer"].numpy() * (total / share) ** 2 - p**2 * every) / ((1 - p) ** 2 - p**2)
    row = sick[one.at(LEVEL)]
    return _said(one, row[[one.at(name) for name in VALUES]] / row[-1])


def products(**limits: Any) -> str:
    """Products of the level with other columns: their sums over the sick are in one gradient."""
    pairs = [["age", name] for name in VALUES]
    one = Asker({**RECIPE, "interactions": pairs}, **limits)
    (told,) = one.ask([newton(one.model(), torch.ones(one.d, dtype=torch.bool), ALL)])
    (H,) = one.hessians([one.model()])
    share, total = told["weight"][:2].tolist()
    sick = (2 * H[-1] - told["gradient"].numpy()) * total / share  # X'1 / 2 - X'(1/2 - y)
    at = [next(i for i, n in enumerate(one.names) if LEVEL in n and name in n) for name in VALUES]
    return _said(one, sick[at] / sick[one.at(LEVEL)])


def faint(**limits: Any) -> str:
    """Sums of p over the sick at a model that is nearly zero beside the level: logistic functions of one patient."""
    one = Asker(RECIPE, **limits)
    edges, row = torch.linspace(-5, 5, 9, dtype=torch.float64), []
    for name in VALUES:
        sums = []
        for level in (6.0, 0.0):
            (told,) = one.ask([tallies(one.model(**{"b": -7.0, "level": level, name: 0.01}), edges, "train", ALL)])
            sums.append(float(told["totals"][1, 1]))
        p = min(max(sums[0] - sums[1], 1e-9), 1 - 1e-9)
        row.append((np.log(p / (1 - p)) - (-7.0 + 6.0)) / 0.01)
    right = np.allclose(row, one.truth()[0], rtol=0.03)
    return (
        f"{one.questions} questions: the patient's row {'within 3 %' if right else 'not'} ({np.round(row, 1).tolist()})"
    )


def lens(**limits: Any) -> str:
    """Forty models of the level and one column: sums of logistic functions of ten values, which give the values."""
    one = Asker(RECIPE, **limits)
    found = []
    for name in VALUES:
        slopes = np.linspace(-0.05, 0.05, 40)
        told = one.hessians([one.model(**{name: float(s)}) for s in slopes])
        at = one.at(LEVEL)
        sums, first = np.array([H[at, at] for H in told]), int(np.abs(slopes).argmin())
        sums, count = sums / sums[first], len(one.truth(None))

        def off(values: Floats, sums: Floats = sums, slopes: Floats = slopes, first: int = first) -> Floats:
            means = (1 / (2 + 2 * np.cosh(np.outer(slopes, values)))).mean(1)
            return 1e6 * (means / means[first] - sums)

        def turned(values: Floats, slopes: Floats = slopes, first: int = first) -> Floats:
            margins = np.outer(slopes, values)
            weights = 1 / (2 + 2 * np.cosh(margins))
            means, moved = weights.mean(1), -2 * np.sinh(margins) * weights**2 * slopes[:, None] / len(values)
            return 1e6 * (moved / means[first] - np.outer(means, moved[first]) / means[first] ** 2)

        mean = told[0][at, one.at(name)] / told[0][at, at]
        tries = [least_squares(off, mean * np.random.default_rng(k).normal(1, 0.15, count), turned, xtol=1e-15,
                               ftol=1e-15, gtol=1e-15, max_nfev=3000) for k in range(3)]  # fmt: skip
        found.append(np.sort(min(tries, key=lambda t: t.cost).x))
    truth = np.sort(one.truth(None), axis=0).T
    off_by = np.abs(np.stack(found) - truth)
    return f"{one.questions} questions: {int((off_by < 1).sum())} of {truth.size} values to one unit"


def wrong(**limits: Any) -> str:
    """Wrong predictions where only those with the level are above: how many of them are sick."""
    one = Asker(RECIPE, **limits)
    models = torch.stack([one.model(b=-1.0, level=2.0), one.model(b=-1.0)])
    (told,) = one.ask([losses(models, ALL, errors=True)])
    share, total = told["weight"].tolist()
    below, above = (told["error"] * total / share).tolist()
    healthy = len(one.truth(False))
    return f"{one.questions} questions: {below - above:.0f} more wrong, of {healthy} healthy less 1 sick"


def curves(**limits: Any) -> str:
    """Lines of the calibration at a margin of the level alone: which outcomes go with it."""
    one = Asker(RECIPE, **limits)
    lines = torch.tensor([[0.0, 1.0], [1.0, 1.0]], dtype=torch.float64)
    (told,) = one.ask([calibration(one.model(level=1.0), lines, "train", ALL)])
    sick = float(told["sums"][0, 4])
    return f"{one.questions} questions: {sick:.3g} sick patients with the level (a cell of the table of both)"


IDEAS: dict[str, Callable[..., str]] = {
    "residues": residues, "products": products, "faint": faint, "lens": lens, "wrong": wrong, "curves": curves,
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Try the ideas and print what came of each."""
    tell(list(IDEAS), lambda name: everywhere(IDEAS[name]), arguments)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
