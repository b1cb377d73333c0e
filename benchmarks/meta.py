"""How often the 95 % prediction interval of ``fc.meta_analysis`` holds the effect of a hospital that was left out.

    python -m benchmarks.meta                     # some minutes of one core
    python -m benchmarks.meta --draws 200         # rougher

The hospitals' true effects are normal around a mean; each tells an estimate with a normal error, whose deviation goes
with the root of its number of patients, 50 to 1000, or alike in all. ``i2`` is the share of the variance of a typical
estimate that is between hospitals. Held against the interval is the true effect of a further hospital; beside that the
same with ``prediction="t"``, the interval at the one estimated variance, and the mean against its confidence interval.
"""

from __future__ import annotations

import argparse

import numpy as np
import pandas as pd

import fedcomposite as fc


def row(hospitals: int, i2: float, alike: bool, draws: int, seed: int) -> dict[str, float | int | str]:
    """Coverage in percent over so many draws."""
    draw = np.random.default_rng([seed, hospitals, round(100 * i2), alike])
    patients = (
        np.full((hospitals, draws), 300.0) if alike else draw.integers(50, 1000, (hospitals, draws)).astype(float)
    )
    errors = 2 / np.sqrt(patients)
    tau = 2 / np.sqrt(300) * np.sqrt(i2 / (1 - i2))
    truth = 0.5 + tau * draw.normal(size=(hospitals + 1, draws))
    estimates = truth[:-1] + errors * draw.normal(size=errors.shape)
    found = fc.meta_analysis(estimates, errors)
    new = (found["predict_lower"] <= truth[-1]) & (truth[-1] <= found["predict_upper"])
    mean = (found["lower"] <= 0.5) & (found["upper"] >= 0.5)
    plain = fc.meta_analysis(estimates, errors, prediction="t")
    at_one = (plain["predict_lower"] <= truth[-1]) & (truth[-1] <= plain["predict_upper"])
    held = {"left-out hospital": new, "with t": at_one, "mean": mean}
    made = {"hospitals": hospitals, "i2": 100 * i2, "sizes": "alike" if alike else "50 to 1000"}
    return made | {name: 100 * float(one.mean()) for name, one in held.items()} | {"draws": draws}


def main(argv: list[str] | None = None) -> pd.DataFrame:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hospitals", type=int, nargs="+", default=[4, 8, 16, 32])
    given = parser.parse_args(argv)
    cases = [(k, i2, alike) for k in given.hospitals for i2 in (0.3, 0.6, 0.9) for alike in (True, False)]
    made = pd.DataFrame([row(*case, given.draws, given.seed) for case in cases])
    print(made.round(1).to_string(index=False))
    return made


if __name__ == "__main__":
    main()
