"""The referee: a stranger's file, its page, and what it says of drift, residuals and broken laws."""

import pytest
from pages import blocks

import fedcomposite as fc
from fedcomposite.testing.arena import ARENA, optimum, twin
from fedcomposite.testing.referee import Level, entered, judge


@pytest.fixture
def file(tmp_path):
    """The page's own method."""
    code = next(b.text for b in blocks("docs/add-a-method.md") if b.kind == "python")
    path = tmp_path / "momentum.py"
    path.write_text(code)
    return path


def test_the_arena_has_what_it_promises():
    assert len(ARENA) == 12
    assert len({bout.what for bout in ARENA.values()}) == 12
    options = [bout.options for bout in ARENA.values()]
    assert {"participation", "batch_size", "dtype"} <= {key for one in options for key in one}
    drift, same = ARENA["drift"].make(), twin()
    x = fc.solve(drift, tolerance=1e-10).solution
    assert float(same.objective(x)) == pytest.approx(optimum("drift").value, abs=1e-12)  # the same optimum
    assert float(same.stationarity(x)) < 1e-8
    assert optimum("drift").bound < 1e-10
    assert optimum("mcp").bound != optimum("mcp").bound


@pytest.mark.slow
def test_optima_are_certified():
    for name, bout in ARENA.items():
        known, problem = optimum(name), bout.make()
        if name not in ("mcp", "scad", "float32"):
            assert 0 <= known.bound <= 1e-7 * max(1.0, known.value)
        assert known.value < float(problem.objective(problem.smooth().start()))


def test_a_stranger_s_file_gets_its_page(file, tmp_path, cli):
    shown = cli(
        "referee", file, "--out", tmp_path / "v", "--jobs", 1,
        "--budget", 400, "--problem", "drift", "--problem", "mcp",
        "--against", "FedNMap", "--against", "FedDA", check=0,
    ).out  # fmt: skip
    page = (tmp_path / "v" / "ServerMomentum" / "verdict.md").read_text()
    assert "none is broken" in page
    assert "| mcp |" in page
    assert "| participation | any | not in this round |" in page
    assert "of 2 problems" in page
    assert "\n\n* full: " in page  # a list, also for programs that want an empty line before it
    assert "\n* full, half the step: " in page
    assert " inf " not in page
    assert "duality gap" in page
    assert "ServerMomentum" in shown
    for name in ("profile.png", "anytime.png", "results.csv"):
        assert (tmp_path / "v" / "ServerMomentum" / name).stat().st_size > 0


@pytest.mark.slow
def test_drift_is_told_from_slowness():
    """What drift leaves goes where all sites have the same samples, what a prox too many leaves stays."""
    FedMid, FedNMap = fc.algorithms.FedMid, fc.algorithms.FedNMap
    methods = FedMid(10, 2.0, server_prox_only=True), FedMid(10, 0.5), FedNMap.auto(0.25)
    drifting, twice, exact = (
        judge(method, problems=["drift"], against=["ProximalGradient"], budget=20_000)[0] for method in methods
    )
    assert drifting.drifts
    assert "It is drift" in drifting.to_markdown()
    assert twice.levels["equal sites"].stalled
    assert "It is not drift alone" in twice.to_markdown()
    assert exact.levels["full"].reached < 0.1 * drifting.levels["full"].reached
    assert not exact.drifts
    assert exact.levels["minibatches of 8"].reached > exact.levels["minibatches of 32"].reached
    assert exact.to_frame()["of"].to_list() == [2]
    assert isinstance(exact.levels["full"], Level)


def test_broken_laws_are_told(file, tmp_path, cli):
    """A method that keeps something to itself."""
    text = (
        file.read_text()
        .replace("dtype=x0.dtype", "")
        .replace("torch.zeros_like(x0)", "torch.zeros(x0.shape, dtype=torch.float64)")
    )
    file.write_text(text)
    done = cli("referee", file, "--out", tmp_path / "v", "--jobs", 1, "--budget", 50, "--problem", "alike",
               "--against", "FedAvg", check=1)  # fmt: skip
    assert "inputs_are_kept" in done.out + done.err


@pytest.mark.parametrize(
    ("text", "said"),
    [("x = 1\n", "has no method"), ("import nothing_there\n", "cannot be imported"), (None, "no such file")],
)
def test_files_without_a_method_are_refused(tmp_path, text, said):
    path = tmp_path / "m.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises(fc.UserError, match=said):
        entered(path)


def test_the_benchopt_benchmark_measures_what_we_do(monkeypatch):
    """Its three files under a stand-in for benchopt's base classes: parameters are attributes."""
    import runpy
    import sys
    import types
    from pathlib import Path

    class Base:
        def __init__(self, **parameters):
            vars(self).update(parameters)

    stand_in = types.ModuleType("benchopt")
    stand_in.BaseObjective = stand_in.BaseDataset = stand_in.BaseSolver = Base
    monkeypatch.setitem(sys.modules, "benchopt", stand_in)
    home = Path(__file__).parents[1] / "benchmarks" / "benchopt"
    objective, dataset, solver = (
        runpy.run_path(str(home / name))[kind]
        for name, kind in (
            ("objective.py", "Objective"),
            ("datasets/arena.py", "Dataset"),
            ("solvers/methods.py", "Solver"),
        )
    )
    measured = objective()
    measured.set_data(**dataset(problem="drift").get_data())
    one = solver(method="ProximalGradient")
    assert one.skip(**measured.get_objective()) == (False, None)
    one.set_objective(**measured.get_objective())
    gaps = []
    for rounds in (0, 100, 1000):
        one.run(rounds)
        gaps.append(measured.evaluate_result(**one.get_result())["value"])
    assert gaps[0] > gaps[1] > gaps[2] >= 0
    assert measured.evaluate_result(**measured.get_one_result())["value"] == pytest.approx(gaps[0])
    skipped, why = solver(method="FedDyn").skip(**measured.get_objective())
    assert skipped
    assert "no rule for a regularizer" in why
