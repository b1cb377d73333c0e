"""Patients with gaps, at sites."""

from itertools import pairwise

import numpy as np
import pandas as pd


def patients(n=600, seed=0):
    """Numbers, a category and a yes or no, with gaps that hang on what is seen."""
    g = np.random.default_rng(seed)
    age = g.normal(60, 10, n)
    pressure = 130 + 0.8 * (age - 60) + g.normal(0, 8, n)
    grade = np.array(["a", "b", "c"], object)[
        (np.column_stack([0 * age, (age - 60) / 8, -(pressure - 130) / 12]) + g.gumbel(size=(n, 3))).argmax(1)
    ]
    smoker = (g.random(n) < 1 / (1 + np.exp((age - 60) / 10))).astype(float)
    y = (g.random(n) < 1 / (1 + np.exp(-((age - 60) / 10 + 0.05 * (pressure - 130) - 0.5 * smoker)))).astype(float)
    whole = pd.DataFrame({"age": age, "pressure": pressure, "smoker": smoker, "grade": grade, "y": y})
    seen = whole.copy()
    seen.loc[g.random(n) < 0.15 + 0.25 * y, "pressure"] = np.nan
    seen.loc[g.random(n) < 0.2, "smoker"] = np.nan
    seen.loc[g.random(n) < 0.1 + 0.1 * (age > 60), "grade"] = None
    return whole, seen


def at_sites(frame, cuts=(250, 400)):
    ends = [0, *cuts, len(frame)]
    return {f"s{i}": frame.iloc[a:b] for i, (a, b) in enumerate(pairwise(ends))}
