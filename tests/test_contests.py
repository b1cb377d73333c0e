"""Comparisons from Python: equal budgets, values chosen inside of what was tried, intervals, profiles, pictures."""

import math
import tomllib
from dataclasses import dataclass

import numpy as np
import pandas as pd
import pytest
from scipy import stats

import fedcomposite as fc
from fedcomposite.algorithms import FedAvg, FedDA, FedNMap, ProximalGradient
from fedcomposite.experiments import Sweep, comparison
from fedcomposite.experiments.allowances import Allowance
from fedcomposite.experiments.tables import joined, latex
from fedcomposite.experiments.tuning import Attempt, TuningError, search, settle

SILOS = fc.data.load("synthetic", clients=4, features=6, samples=20)
PROBLEM = fc.Problem(SILOS, regularizer=fc.regularizers.L1(0.01))
SPENT = {
    "rounds": ("round",), "bytes": ("bytes_up", "bytes_down"), "gradients": ("gradient_evaluations",),
    "proxes": ("prox_evaluations",),
}  # fmt: skip


def chosen(grid, score, refuse=lambda p: "", extensions=2):
    """The end of a search whose points come to score(point)."""
    made = search(grid, extensions)
    return settle({"one": made}, lambda batch: [Attempt(p, score(p), refuse(p)) for _, p in batch])["one"]


def test_a_search_ends_inside_or_says_where_it_is_at_an_end():
    inside = chosen({"step": [0.1, 0.2, 0.4]}, lambda p: (p["step"] - 0.2) ** 2)
    assert (inside.point, inside.edges, len(inside.attempts)) == ({"step": 0.2}, (), 3)
    beyond = chosen({"step": [0.1, 0.2]}, lambda p: (p["step"] - 0.4) ** 2)
    assert (beyond.point, beyond.edges) == ({"step": 0.4}, ())  # 0.4 and 0.8 were tried as well
    assert [a.point["step"] for a in beyond.attempts] == [0.1, 0.2, 0.4, 0.8]
    far = chosen({"step": [1.0, 10.0]}, lambda p: -p["step"])
    assert (far.point, far.edges) == ({"step": 1000.0}, ("step",))
    assert "end of what was tried" in far.notes[0]
    low = chosen({"step": [1.0, 10.0], "local_steps": [2, 4]}, lambda p: p["step"] + p["local_steps"], extensions=1)
    assert low.point == {"step": 1.0, "local_steps": 1}  # the sums were 3, then 2.0 and 2.1
    assert low.edges == ("step",)  # nothing is below one local step


def test_what_cannot_be_run_is_an_end_that_was_found():
    made = chosen(
        {"step": [0.5, 1.0, 2.0]},
        lambda p: math.inf if p["step"] > 1 else -p["step"],
        lambda p: "step * rho = 2, must be below 1" if p["step"] > 1 else "",
    )
    assert (made.point, made.edges) == ({"step": 1.0}, ())
    assert made.notes == ["step = 2 was skipped: step * rho = 2, must be below 1"]
    with pytest.raises(TuningError, match="too large"):
        chosen({"step": [1.0]}, lambda p: math.inf, lambda p: "too large")


@pytest.mark.parametrize("unit", SPENT)
def test_budgets_are_equal_for_all_and_nothing_beyond_is_told(unit):
    amount = {"rounds": 20, "bytes": 20_000, "gradients": 500, "proxes": 90}[unit]
    methods = [FedNMap(5, 0.5, gamma=2.0), ProximalGradient(1.0), FedAvg(3, 0.5)]
    found = fc.compare(PROBLEM, methods if unit != "proxes" else methods[:2], budget={unit: amount})
    for runs in found.histories[""].values():
        spent = [sum(r[k] for k in SPENT[unit]) for r in runs[0]]
        assert spent[-1] <= amount
        assert spent[-1] + 2 * max(np.diff(spent)) > amount  # and it is used up, to a record or two
    assert set(found.to_frame()["status"]) == {"completed"}


def test_seconds_are_a_budget_too():
    found = fc.compare(PROBLEM, [ProximalGradient(1.0)], budget={"seconds": 0.2})
    assert found.histories[""]["ProximalGradient"][0][-1]["seconds"] <= 0.2


def test_numbers_are_those_of_simulate():
    methods = {"mine": FedNMap(5, 0.5, gamma=2.0), "other": FedAvg(3, 0.5)}
    found = fc.compare(PROBLEM, methods, budget=30, seeds=[3, 4], batch_size=5)
    run = fc.simulate(PROBLEM, methods["mine"], rounds=30, seed=4, batch_size=5)
    assert found.histories[""]["mine"][1][-1]["objective"] == run.history[-1].objective
    assert found.seeds == [3, 4]


def test_tuned_values_are_chosen_with_a_seed_of_their_own():
    made = fc.tune(PROBLEM, FedAvg(2, 0.1), {"step": [0.01, 0.1]}, budget=20)
    ends = {
        s: fc.simulate(PROBLEM, FedAvg(2, s), rounds=20, seed=1000).history[-1].objective
        for s in made.to_frame()["step"]
    }
    assert made.method.step == min(ends, key=ends.get)
    assert made.method.step > 0.1
    assert "tried" in repr(made)
    found = fc.compare(
        PROBLEM, [FedAvg(2, 0.1), FedNMap(2, 0.5, gamma=2.0)], tune={"FedAvg": {"step": [0.01, 0.1]}}, budget=20
    )
    assert found.points[""] == {"FedAvg": {"step": made.method.step}, "FedNMap": {}}
    wide = fc.Problem(SILOS, regularizer=fc.regularizers.MCP(0.01, theta=2.0))  # rho = 0.5
    said = fc.tune(wide, ProximalGradient(1.0), {"step": [0.5, 1.0, 4.0]}, budget=20).notes
    assert any("step = 4 was skipped" in note for note in said)


def test_methods_that_cannot_take_a_problem_are_left_out_and_named():
    scad = fc.Problem(SILOS, regularizer=fc.regularizers.SCAD(0.1))
    found = fc.compare({"l1": PROBLEM, "scad": scad}, [FedDA(2, 0.1), FedAvg(2, 0.1)], budget=5)
    assert set(found.histories["scad"]) == {"FedAvg"}
    assert "convex" in found.skipped["scad"]["FedDA"]
    assert any("left out" in note for note in found.notes)
    with pytest.raises(fc.UserError, match="convex"):
        fc.compare(scad, [FedDA(2, 0.1)])


def test_paired_intervals_are_student_s():
    methods = {"slow": FedAvg(1, 0.05), "quick": FedAvg(1, 0.5)}
    found = fc.compare(PROBLEM, methods, seeds=range(5), budget=30, batch_size=4)
    [row] = found.tests("objective").to_dict("records")
    ends = {k: np.array([h[-1]["objective"] for h in runs]) for k, runs in found.histories[""].items()}
    best = min(ends, key=lambda k: ends[k].mean())
    other = next(k for k in ends if k != best)
    theirs = stats.ttest_rel(ends[other], ends[best])
    low, high = theirs.confidence_interval()
    assert (row["method"], row["against"]) == (other, best)
    assert [row["lower"], row["upper"], row["p"]] == pytest.approx([low, high, theirs.pvalue])
    assert row["verdict"] == ("worse" if theirs.pvalue < 0.05 else "undecided")
    alone = fc.compare(PROBLEM, methods, seeds=[0, 1], budget=10)  # full gradients: seeds change nothing
    assert list(alone.tests()["verdict"]) == ["seeds do not tell"]


def test_profiles_are_ratios_to_the_least():
    problems = {"a": PROBLEM, "b": fc.Problem(SILOS, regularizer=fc.regularizers.L1(0.003))}
    found = fc.compare(problems, {"quick": FedNMap(5, 0.3, gamma=1.5), "slow": ProximalGradient(1.0)}, budget=300)
    table = found.profile(1e-1, "rounds")
    assert (table.min(axis=1) == 1).all()
    for name in problems:
        costs = {}
        for label, runs in found.histories[name].items():
            first = runs[0][0]["stationarity"]
            costs[label] = next((r["round"] for r in runs[0] if r["stationarity"] <= 1e-1 * first), math.inf)
        want = {k: c / min(costs.values()) for k, c in costs.items()}
        assert table.loc[(name, 0)].to_dict() == pytest.approx(want)
    assert (found.anytime("rounds").diff().dropna() <= 1e-12).all(axis=None)
    assert len(found.plot(kind="profile").axes[0].get_lines()) == 2
    assert len(found.plot(kind="anytime").axes[0].get_lines()) == 2


def test_tables_have_numbers_and_no_dust(tmp_path):
    found = fc.compare(PROBLEM, [ProximalGradient(2.0), FedAvg(2, 0.5)], seeds=[0, 1, 2], budget=400)
    table = found.to_frame()
    assert not table.isna().all().any()
    plain = found.to_frame().drop(columns=["seconds", "seconds ±"])
    assert "±" not in joined(plain).to_string()  # full gradients: all seeds are the same
    assert found.to_markdown().count("\n") == 3
    assert "nan" not in found.to_latex().lower()
    tiny = latex(pd.DataFrame({"method": ["A"], "gap": [2.5e-16], "gap ±": [1e-17], "rounds": [None]}))
    assert "$2.5 \\times 10^{-16} \\pm 1 \\times 10^{-17}$ & --" in tiny
    assert "{lrr}" in tiny
    figure = found.plot(tmp_path / "p.pdf")
    assert figure.axes[0].get_xscale() == "log"
    assert "gradients" in figure.axes[0].get_xlabel()
    html = found._repr_html_()
    assert "data:image/png;base64," in html
    assert len(repr(found)) < 120


@dataclass(frozen=True)
class Notebook:
    """Not a method."""


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"budget": {"byte": 1e6}}, "did you mean 'bytes'"),
        ({"budget": 0}, "must be a positive number"),
        ({"seeds": [0, 0]}, "each once"),
        ({"seeds": 1}, "seeds = 1, must be a list of seeds, such as [0] or range(3)"),
        ({"seeds": [1000]}, "not the one that values are chosen with"),
        ({"tune": {"stepp": [1.0]}}, "no method has a field 'stepp'"),
        ({"tune": {"FedAvgg": {"step": [1.0]}}}, "no method is called 'FedAvgg'"),
        ({"tune": {"step": []}}, "must be a list of values"),
        ({"methods": ["FedAvgg"]}, "FedAvgg"),
        ({"methods": [Notebook()]}, "no method, class or name"),
        ({"problems": "heart"}, "must be a Problem"),
        ({"references": {"x": 1.0}}, "no problem is called 'x'"),
        ({"seed": 3}, "follow from seeds and budget"),
    ],
)
def test_wrong_arguments_are_told(change, said):
    given = {"problems": PROBLEM, "methods": [FedAvg(1, 0.1)], "budget": 3} | change
    with pytest.raises(ValueError, match=r"\w") as error:
        fc.compare(given.pop("problems"), given.pop("methods"), **given)
    assert said in str(error.value)


TEXT = """
name = "small"
[data]
name = "synthetic"
clients = 4
features = 6
samples = 20
[regularizer]
name = "MCP"
lam = 0.01
theta = 2.0
[[algorithms]]
name = "ProximalGradient"
step = {tune = [0.5, 1.0, 4.0]}
[[algorithms]]
name = "FedAvg"
local_steps = 2
step = {tune = [0.001, 0.01]}
[run]
rounds = 1000
budget = {gradients = 160}
"""


def test_the_command_has_the_same_engine(tmp_path):
    """Values past 1/rho are skipped and named, an end extends the grid, the budget ends runs; a repeat does nothing."""
    sweep = Sweep(tomllib.loads(TEXT), "small")
    sweep.check()
    found = comparison.compared(sweep, tmp_path)
    problem = fc.Problem(SILOS, regularizer=fc.regularizers.MCP(0.01, theta=2.0))
    ours = fc.compare(
        problem,
        [ProximalGradient(0.5), FedAvg(2, 0.001)],
        tune={"ProximalGradient": {"step": [0.5, 1.0, 4.0]}, "FedAvg": {"step": [0.001, 0.01]}},
        budget={"gradients": 160},
        evaluate_every=1,
    )
    assert ours.points[""] == found.points[""]
    assert ours.notes == found.notes
    columns = [c for c in ours.to_frame() if "seconds" not in c]
    assert ours.to_frame()[columns].equals(found.to_frame()[columns])
    before = {p: p.stat().st_mtime_ns for p in tmp_path.glob("**/summary.json")}
    again = comparison.compared(sweep, tmp_path)
    assert again.points == found.points
    assert {p: p.stat().st_mtime_ns for p in tmp_path.glob("**/summary.json")} == before
    assert len(comparison.finished(sweep, tmp_path)) == 2


def test_a_budget_of_a_file_is_checked(tmp_path):
    bad = TEXT.replace("gradients = 160", "gradient = 160")
    with pytest.raises(fc.UserError, match="did you mean 'gradients'"):
        Sweep(tomllib.loads(bad), "small").check()
    assert str(Allowance.of({"bytes": 1e6})) == "1e+06 bytes"
