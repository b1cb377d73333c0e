"""Benchmarks run: every CPU workload for two rounds, ours against the loop, which must do the same work."""

import importlib.metadata
import json
import re
import runpy
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks import __main__ as command
from benchmarks import (
    adversary,
    analyst,
    cifar,
    coverage,
    fifth_adversary,
    filters,
    findings,
    fourth_adversary,
    honest,
    inference,
    meta,
    newton,
    prox,
    resume,
    sparse,
    streaming,
    table6,
    third_adversary,
    workloads,
)
from benchmarks.peers import common

import fedcomposite as fc
from fedcomposite.regularizers import L1, MCP, SCAD, ElasticNet, memory

ROOT = Path(__file__).parents[1]
CPU = [name for name, work in workloads.WORKLOADS.items() if not work.gpu]


def problem_of(name):
    try:
        return workloads.WORKLOADS[name].problem(quick=True)
    except fc.data.DataError as error:
        pytest.skip(str(error).splitlines()[0])


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * n.endswith("-64")) for n in CPU])
def test_ours_and_the_loop_do_the_same_work(name):
    problem = problem_of(name)
    steps = 1 if name == "fashion-cnn-64" else 2  # fashion-cnn, which takes two, at another batch
    work = replace(workloads.WORKLOADS[name], dtype=torch.float64, local_steps=steps)  # nothing hides in rounding
    mine, theirs = (run(work, problem, "cpu", 2) for run in (workloads.ours, workloads.loop))
    start = problem.smooth(work.dtype).start()
    assert (mine.solution - start).norm() > 0
    torch.testing.assert_close(theirs.solution, mine.solution, rtol=1e-11, atol=1e-13)
    assert min(mine.seconds, theirs.seconds, workloads.central(work, problem, "cpu", 2).seconds) > 0


@pytest.mark.slow
def test_methods_of_table_6_equal_their_loops():
    problem_of("fashion-cnn")
    rows = table6.measure("cpu", quick=True)
    assert [(r["K"], r["method"]) for r in rows] == [(K, m) for K in (2, 3) for m in table6.METHODS]
    assert all(r["difference"] < 1e-5 for r in rows if r["difference"] is not None)
    assert {r["method"] for r in rows if r["difference"] is not None} == set(table6.METHODS)
    proxes = {r["method"]: r["proxes"] for r in rows if r["K"] == 3}
    assert proxes == {"FedCanon": 1, "FedMid": 31, "FedDA": 30, "Zhang": 31}


@pytest.mark.parametrize("name", ["sparse-logistic", "mnist-mlp"])
def test_an_exported_task_holds_the_same_work(name, tmp_path):
    # What the peers read: followed here by hand, without their frameworks.
    problem = problem_of(name)
    work = replace(workloads.WORKLOADS[name], dtype=torch.float64, local_steps=3)
    workloads.export(work, problem, "cpu", 2, tmp_path)
    task = common.Task(str(tmp_path))
    module = task.module()
    for r in range(2):
        start, models = task.get(module), []
        for position in range(len(task.cohorts[r])):
            task.put(module, start)
            task.train(module, task.optimizer(module), task.batches(r, position))
            models.append(task.get(module))
        task.put(module, torch.stack(models).mean(0))
        task.server_prox(module)
    mine = workloads.ours(work, problem, "cpu", 2)
    torch.testing.assert_close(task.get(module), mine.solution, rtol=1e-11, atol=1e-13)


def test_the_command_prints_and_writes(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "HERE", tmp_path)  # no peer is installed there
    names = ["sparse-logistic", "cifar-resnet18", "prox"]
    assert (
        command.main([*names, "--quick", "--json", str(tmp_path / "a.json"), "--chart", str(tmp_path / "a.png")]) == 0
    )
    out = capsys.readouterr().out
    assert out.count("not installed (make bench-peers)") == 3
    assert "skipped: it takes a GPU" in out
    written = json.loads((tmp_path / "a.json").read_text())
    assert {r["name"] for r in written["workloads"]} == {"ours", "loop", "flower", "pfl", "fluke", "centralised"}
    assert [(r["prox"], r["dtype"]) for r in written["prox"]] == [
        (n, d) for d in ("float32", "float64") for n in prox.CASES
    ]
    assert (tmp_path / "a.png").stat().st_size > 1000


def test_different_work_is_told(monkeypatch, capsys):
    def wrong(work, problem, device, rounds):
        found = workloads.loop(work, problem, device, rounds)
        found.solution = found.solution * 1.1
        return found

    monkeypatch.setattr(command, "loop", wrong)
    assert command.main(["sparse-logistic", "--quick", "--no-peers"]) == 1
    assert "NOT THE SAME WORK" in capsys.readouterr().out


def test_a_peer_that_fails_is_told(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "HERE", tmp_path)
    for name in ("flower", "pfl", "fluke"):
        python = tmp_path / ".peers" / name / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text("#!/bin/sh\necho broken >&2; exit 3\n")
        python.chmod(0o755)
    assert command.main(["sparse-logistic", "--quick"]) == 0
    assert capsys.readouterr().out.count("failed: broken") == 3


def test_naive_proxes_beat_a_grid():
    # The oracle of the loops: each formula against the best point of a fine grid.
    grid = torch.linspace(-4, 4, 80001, dtype=torch.float64)
    v = torch.linspace(-3, 3, 61, dtype=torch.float64)
    for h, spec in (
        (L1(0.7), {"name": "l1", "lam": 0.7}),
        (MCP(0.7, 2.0), {"name": "mcp", "lam": 0.7, "theta": 2.0}),
        (SCAD(0.7, 3.0, 0.9), {"name": "scad", "lam": 0.7, "a": 3.0, "kappa": 0.9}),
    ):
        cost = h.value(grid.unsqueeze(-1)) + (grid - v.unsqueeze(-1)).square() / (2 * 0.8)
        np.testing.assert_allclose(common.prox_of(spec)(v, 0.8), grid[cost.argmin(-1)], atol=1e-4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: it would run for minutes")
@pytest.mark.parametrize("name", ["gpu", "gpu_training", "cifar"])
def test_gpu_benchmarks_say_that_they_need_one(name, monkeypatch):
    monkeypatch.setattr(sys, "argv", [name])
    with pytest.raises(SystemExit) as ended:  # with a text, which goes to stderr, and the status is 1
        runpy.run_path(str(ROOT / "benchmarks" / f"{name}.py"), run_name="__main__")
    assert re.fullmatch(rf"benchmarks.{name}\S* needs a CUDA GPU.*", ended.value.code)


@pytest.mark.slow
def test_filters_on_a_cpu(monkeypatch, tmp_path):
    rng = np.random.default_rng(0)
    X, y = rng.integers(0, 256, (200, 3, 32, 32), dtype=np.uint8), np.arange(200) % 10
    monkeypatch.setattr(fc.data, "load", lambda name: fc.Silos.from_arrays([(X, y)], test=(X[:4], y[:4])))
    monkeypatch.setattr(cifar, "TURNS", 1)
    monkeypatch.setattr(cifar, "MULTIPLES", (1, 8))
    monkeypatch.setattr(sys, "argv", ["filters", "--device=cpu", "--rounds=0", "--share=0.9", f"--out={tmp_path}"])
    filters.main()
    (row,) = filters.collect(tmp_path).to_dict("records")
    assert row["parameters"] < 0.11 * 11_173_962
    assert row["flops"] > 3


@pytest.mark.slow
def test_cifar_on_a_cpu(monkeypatch, tmp_path):
    """It ends in time, goes on where it was, and has on disk what it knows."""
    rng = np.random.default_rng(0)
    X, y = rng.integers(0, 256, (20, 3, 32, 32), dtype=np.uint8), np.arange(20) % 10
    monkeypatch.setattr(fc.data, "load", lambda name: fc.Silos.from_arrays([(X, y)], test=(X[:4], y[:4])))
    command = "cifar --device cpu --images 20 --rounds 1 --refit 1 --local-steps 1 --batch 2 --clients 2"
    monkeypatch.setattr(cifar, "TURNS", 1)
    monkeypatch.setattr(cifar, "MULTIPLES", (1, 8))
    files = {"json": "c.json", "figure": "c.png", "checkpoint": "c.safetensors"}
    written = [part for option, name in files.items() for part in (f"--{option}", str(tmp_path / name))]

    def run(*options):
        monkeypatch.setattr(sys, "argv", [*command.split(), *written, *options])
        cifar.main()
        return json.loads((tmp_path / "c.json").read_text())

    short = run("--limit", "0")
    assert [r["round"] for r in short["curve"]] == [0]
    assert "refit" not in short
    whole = run()
    assert [r["round"] for r in whole["curve"]] == [0, 1]
    assert whole["curve"][0] == short["curve"][0]
    assert [r["round"] for r in whole["refit"]] == [0, 1]
    for found in (whole["pruned"], whole["refit_pruned"]):
        assert [*found["accuracy"]] == ["dense", *(f"pruned, multiples of {m}" for m in cifar.MULTIPLES)]
        assert len(set(found["accuracy"].values())) == 1
    assert (tmp_path / "c.png").stat().st_size > 1000
    monkeypatch.setattr(sys, "argv", [*command.split(), "--plain", "--limit", "0"])
    cifar.main()  # it needs none of the files


# -- the prox of very large vectors, which threads share ------------------------------------------------------------


@pytest.mark.parametrize("h", [L1(0.3), ElasticNet(0.3, 0.2), MCP(0.3, 2.0), SCAD(0.3)], ids=lambda h: type(h).__name__)
def test_threads_change_neither_the_prox_nor_the_setting(h):
    v = torch.randn(3, 1 << 19, generator=torch.Generator().manual_seed(1))
    each = torch.tensor([[0.1], [0.2], [0.4]])
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = [h.prox(v, s) for s in (0.4, each)]
        torch.set_num_threads(3)
        shared = [h.prox(v, s) for s in (0.4, each)]
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(alone, shared, strict=True))
    small = torch.cat([h.prox(part, 0.4) for part in v.split(1 << 15, dim=1)], dim=1)
    assert torch.equal(alone[0], small)


@pytest.mark.parametrize("threads", [1, 2, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("h", [ElasticNet(0.3, 0.2), MCP(0.3, 2.0), SCAD(0.3)], ids=lambda h: type(h).__name__)
def test_what_a_thread_works_on_stays_in_its_cores_cache(h, dtype, threads, monkeypatch):
    v = torch.randn(5 << 19, dtype=dtype, generator=torch.Generator().manual_seed(1))
    expected, before, seen, workers = h.formula(v, 0.4), torch.get_num_threads(), [], set()

    def watched(function):
        def call(*args, out, **kwargs):
            seen.append(out.nbytes)
            workers.add((threading.get_ident(), torch.get_num_threads()))
            return function(*args, out=out, **kwargs)

        return call

    monkeypatch.setattr(memory, "_DIRECTED", {name: watched(f) for name, f in memory._DIRECTED.items()})
    try:
        torch.set_num_threads(threads)
        found = h.prox(v, 0.4)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found, expected)
    assert max(seen) <= threads << 20
    assert workers == {(threading.get_ident(), threads)}  # torch shares out every operation


def test_a_shared_prox_works_in_inference_mode_and_in_place():
    h, v = SCAD(0.3), torch.randn(1 << 21, generator=torch.Generator().manual_seed(1))
    expected, before = h.prox(v, 0.4), torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        with torch.inference_mode():
            inner = v.clone()
            assert h.prox(inner, 0.4, out=inner) is inner
            assert torch.equal(h.prox(v, 0.4), expected)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(inner, expected)


def test_a_differentiated_prox_keeps_its_graph():
    size = 2 * memory._WHOLE
    v = torch.linspace(-3, 3, size, dtype=torch.float64).requires_grad_()
    L1(1.0).prox(v, 0.5).sum().backward()
    assert torch.equal(v.grad, (v.abs() > 0.5).double())


def test_concave_regularizers_leave_large_entries_alone():
    v = torch.randn(1 << 18, generator=torch.Generator().manual_seed(2)) * 5
    for h, beyond in ((MCP(0.3, 4.0), 1.2), (SCAD(0.3), 3.7 * 0.3)):
        large = v.abs() > beyond
        torch.testing.assert_close(h.prox(v, 0.4)[large], v[large], rtol=2**-23, atol=0)  # to one rounding


def test_adapters_name_pinned_peers():
    lines = {
        name: (command.HERE / "peers" / f"requirements-{name}.txt").read_text() for name in ("flower", "pfl", "fluke")
    }
    assert all("==" in text for text in lines.values())
    pinned = (command.HERE / "peers" / "constraints.txt").read_text()
    assert f"torch=={importlib.metadata.version('torch').split('+')[0]}" in pinned


def test_sparse_samples_are_measured(capsys):
    assert sparse.main(["--quick"]) == 0
    text = capsys.readouterr().out
    assert text.count("converged: ") == 2
    assert text.count("%") == 4


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is read from /proc")
@pytest.mark.parametrize("apart", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_samples_in_a_file_and_in_memory_give_one_model(apart, capsys, monkeypatch):
    """Each way in a process of its own, as the benchmark has it, or all of them in this one."""
    if not apart:
        monkeypatch.setattr(streaming, "in_a_process", streaming.measure)
        monkeypatch.setattr(streaming.reading, "AHEAD", streaming.reading.AHEAD)  # one of them changes it
    assert streaming.main(["--quick"]) == 0
    shown = capsys.readouterr().out
    assert "models are equal bit by bit" in shown
    assert [line.split("  ")[0] for line in shown.splitlines() if line.startswith("m")][:2] == ["memory", "mapped"]


@pytest.mark.slow  # skglm is compiled for it
def test_newton_is_right_beside_skglm(capsys):
    assert newton.newton("heart, l1", newton.PROBLEMS["heart, l1"]())
    text = capsys.readouterr().out
    assert "F - skglm" in text
    assert "same support" in text


def test_newton_is_right_where_it_is_compared(capsys):
    assert newton.wide_path(features=1200, samples=15, count=4, least=0.5)
    newton.against("synthetic, l1", newton.PROBLEMS["synthetic, l1"](), rounds=3)
    text = capsys.readouterr().out
    for expected in ("4 strengths, 1200 features", "FISTA", " >3 "):
        assert expected in text


@pytest.mark.slow  # exports to ONNX
def test_inference_with_zeros():
    """Every variant gives what the dense network gives, which the benchmark checks before it takes a time."""
    table = inference.measure(quick=True)
    assert {"dense", "pruned", "CSR"} <= set(table["variant"])
    assert (table["ms"] > 0).all()
    assert (table.loc[table["variant"] == "dense", "dense / this"] == 1).all()


@pytest.mark.slow
def test_paths_are_compared_with_pooled_references(capsys):
    assert analyst.compare("wisconsin", count=4, ratio=0.05, folds=2)
    text = capsys.readouterr().out
    assert "(4 of 4 models are unique)" in text
    assert "same lambda.min: True, same lambda.1se: True" in text
    apart = [float(v) for v in re.findall(r"coefficients (\S+)", text)]
    assert len(apart) == 2
    assert max(apart) < 1e-6
    assert max(float(v) for v in re.findall(r"KKT (\S+)", text)) < 1e-10


def test_coverage_at_chosen_strengths_is_measured_beside_statsmodels():
    """The same intervals at both strengths, and those of statsmodels: the regularizer leaves no trace."""
    rows = [coverage.chosen(model, 10, True, 3, 0).split("|") for model in coverage.LOSSES]
    assert [row[1].strip() for row in rows] == ["linear", "logistic", "poisson"]
    for row in rows:
        shares = [float(cell.strip(" %")) for cell in row[5:11]]
        assert shares[:2] == shares[2:4] == shares[4:]
        assert min(shares) > 70
        assert "3 sets, 0 without a maximum" in row[11]


def test_the_pooled_reference_knows_when_a_model_is_not_unique():
    generator = np.random.default_rng(0)
    X = generator.normal(size=(60, 3))
    y = X[:, 0] + generator.normal(size=60) / 5
    lambdas = np.array([0.3, 0.1])
    for columns, unique in ((X, True), (np.column_stack([X, X[:, 0]]), False)):
        data = analyst.Pooled(columns, y, "least_squares")
        for lam, x in zip(lambdas, data.path(lambdas), strict=True):
            assert data.violation(x, lam) < 1e-12
            assert data.unique(x, lam) == unique
    seen = analyst.Apart()
    data = analyst.Pooled(np.column_stack([X, X[:, 0]]), y, "least_squares")
    x = data.path(lambdas[:1])[0]
    shared = (x[0] + x[3]) / 2  # the copies share their coefficient in another way
    seen.see(data, 0.3, x, np.array([shared, x[1], x[2], shared, x[4]]))
    assert seen.unique == [False]
    assert seen.coefficient == 0
    assert seen.margin < 1e-12
    assert seen.objective < 1e-12


def test_what_takes_more_than_newton_steps_is_measured(capsys):
    newton.solved(rounds=3, tolerance=0.2)
    text = capsys.readouterr().out
    assert text.count("rounds") == 9
    assert "hinge, group lasso" in text
    assert "features from 0.01 to 100, as they are" in text


def test_bounds_of_quality_hold_for_small_sites():
    """Three of the random splits: every number that sites tell is within its bounds."""
    pytest.importorskip("statsmodels")
    from benchmarks import quality

    table = quality.compare(splits=3, seed=1).set_index("measure")
    assert not table["violations"].any(), table
    assert {"auroc (all)", "calibration_slope (site)", "calibration_slope of counts (all)"} <= set(table.index)
    assert table.loc["calibration_slope of counts (all)", "largest difference"] < 1e-8
    assert table["told"].sum() > 150


@pytest.mark.slow
def test_killed_and_resumed(tmp_path):
    """The study of kills at random points, with one of them and few models."""
    fc.data.messy_consortium(tmp_path / "hospitals")
    given = [str(tmp_path / "hospitals" / "experiment.toml"), "--folds", "2", "--count", "4"]
    found = resume.study(["cv"], given, tmp_path, points=1, seed=0)
    assert found["same"].all()


@pytest.mark.parametrize("name", ["FedCanon", "Zhang", "FedNMap"])
def test_methods_as_printed_are_the_methods(name):
    """In double precision, where the drift of single precision is not seen yet."""
    given = findings.problem()
    s = 0.5 / given.smoothness() / findings.TAU
    models, c = findings.printed(name, given, s, 40, 1, torch.float64)
    run = fc.simulate(given, findings.as_here(s)[name], rounds=40, keep_solutions=True, progress=False)
    torch.testing.assert_close(run.solutions[1:], models, rtol=0, atol=1e-11)
    assert c.sum(0).abs().max() < 1e-10


def test_findings_without_a_figure(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["findings", "--rounds", "80"])
    findings.main()
    lines = [re.split(r" {2,}|(?<=\D) (?=[0-9.e+-]+$)", line.strip()) for line in capsys.readouterr().out.splitlines()]
    found = {what: float(value) for what, value in lines}
    assert found["FedMid, one client, one step: distance to argmin f + 2h"] < 1e-10
    assert found["FedMid, one client, one step: distance to argmin f + h"] > 0.1
    assert all(value < 1e-11 for what, value in found.items() if what.startswith("FedDR(1)"))
    assert found["FedCanon - SCAFFOLD, h = 0, double precision: largest difference"] < 1e-12
    assert found["Zhang, 3.5, n = 10: factor of sigma^2 / (n tau b), from the proof"] == pytest.approx(66.7, abs=0.05)


def test_times_to_an_event(capsys):
    from benchmarks import survival

    survival.coverage(1, 0, [1], 1)
    head, _, row = capsys.readouterr().out.strip().splitlines()
    assert row.count("|") == head.count("|")
    assert row.startswith("| 11 | 240 |")
    survival.speed(300, 3)
    assert len(capsys.readouterr().out.strip().splitlines()) == 2 + 2 * 2 * 2


def test_ideas_of_an_adversary(capsys):
    """Two of them: what comes of each at a site that opts out, and by default."""
    adversary.main(["--ideas", "shifted,seeds"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert "labels of 59 of 59" in lines[0]
    assert "score_tables = 20" in lines[1]
    assert "95 different sums" in lines[2]
    assert " 1 different sums" in lines[3] or "of a fold differ" in lines[3]  # by the secret of the site, rarely


def test_the_third_adversary_finds_what_it_says(capsys):
    """A row from one question at a site that opts out; values of few who have a level, at any site."""
    third_adversary.main(["--ideas", "residues,lens"])
    lines = capsys.readouterr().out.splitlines()
    assert ["row exactly" in line for line in lines[:3]] == [True, False, False]
    told = [int(re.search(r"(\d+) of 20 values", line).group(1)) for line in lines[3:]]
    assert min(told[:2]) >= 10  # 12 to 16: a system of equations is solved, with rounding
    assert told[2] <= 4


def test_the_fourth_adversary_finds_what_it_says(capsys):
    """A histogram at a site that opts out; rows of patients who alone have four levels, at any site."""
    fourth_adversary.main(["--ideas", "knots,crossed"])
    lines = capsys.readouterr().out.splitlines()
    assert ["14 counts exactly" in line for line in lines[:3]] == [True, False, False]
    assert all("448 questions: 3 patients' rows" in line for line in lines[3:5])
    assert "448 questions: 1 patients' rows" in lines[5]


def test_the_fifth_adversary_finds_what_it_says(capsys):
    """A row by a conditional model where a site opts out; yes or no of patients with extreme values, at any site."""
    fifth_adversary.main(["--ideas", "steep,tails"])
    lines = capsys.readouterr().out.splitlines()
    assert ["of 1 patients of 77 years the mean row [77.0, 125.0" in line for line in lines[:3]] == [True, False, False]
    assert "3 questions, 0 refused: 9 of 9 yes or no" in lines[3]
    assert "3 questions, 0 refused" not in "".join(lines[4:])


@pytest.mark.slow
def test_honest_work_at_default_limits(tmp_path, monkeypatch):
    """A fit, and one with another recipe: bounds hold, and the model is that of files at hand."""
    study = honest.heart(tmp_path)
    monkeypatch.setattr(honest, "variants", lambda study: [{"kind": "fit"}, {"kind": "fit", "recipe": less}])
    less = {**study.content["recipe"], "drop": [*study.content["recipe"]["drop"], "age"]}
    table = honest.one_after_another(study, tmp_path, 2)
    assert (table["model off"] < 1e-8).all()
    assert ((table["AUROC"] - table["AUROC, at hand"]).abs() <= table["off by at most"]).all()
    np.testing.assert_allclose(table["slope"], table["slope, at hand"], atol=1e-4)
    taken = honest.seconds(study, tmp_path / "timed", 1)
    assert taken["sites"].tolist() == ["default", "opts out"]
    assert (taken["seconds"] > 0).all()


def test_prediction_intervals_are_held_against_a_hospital_that_was_left_out():
    found = meta.row(16, 0.9, True, 40, 0)
    assert found["draws"] == 40
    assert 75 < found["left-out hospital"] <= 100
