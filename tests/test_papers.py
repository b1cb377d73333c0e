"""Reproductions: every name works in its reduced form, goes on where it was interrupted, and is not repeated."""

import json
import math
import re
import shutil
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import cvxpy as cp
import pandas as pd
import pytest
import torch
from matplotlib.image import imread

from fedcomposite import UserError, papers
from fedcomposite.experiments import Sweep
from fedcomposite.papers import fedcanon_table1, fedcanon_table6, fedmls_fig1, fednmap_fig3, fedprox_rates
from fedcomposite.papers.base import (
    EQUAL,
    FAILS,
    HOLDS,
    NOT_JUDGED,
    NOT_RUN,
    Claim,
    ahead,
    digest_of,
    first_at,
    judged,
    relative,
    slope,
    split,
)  # fmt: skip
from fedcomposite.papers.reproduce import judge, read_state

TINY = {  # a fraction of the reduced form
    "fedcanon-fig1": ["data.name=breast_cancer", "run.rounds=2", "settings.rounds=2"],
    "fedcanon-fig2": ["run.rounds=1", "run.evaluate_every=1", "model.evaluation_samples=200"],
    "fedcanon-fig3": ["algorithms.0.local_steps=2", "algorithms.1.local_steps=2", "algorithms.2.local_steps=2"],
    "fedcanon-table1": ["settings.sizes={MLP=1000, CNN=2000}"],
    "fedcanon-table3": ["run.rounds=2"],
    "fedcanon-table6": ["model.evaluation_samples=50", "partition.clients=2"],
    "fedmls-fig1": ["settings.rounds=6", "settings.seeds=2"],
    "fednmap-fig2": ["algorithms.0.gamma={tune=[1.0]}", "algorithms.1.gamma={tune=[1.0]}", "run.rounds=3"],
    "fednmap-fig3": ["run.rounds=2", "run.evaluate_every=1", "model.evaluation_samples=100"],
    "fednmap-fig4": ["run.rounds=2", "run.evaluate_every=1", "model.evaluation_samples=100"],
    "fednmap-fig5": ["run.rounds=2", "run.evaluate_every=1", "model.evaluation_samples=100"],
    "fedprox-rates": ["settings.rounds=[2, 4, 6]", "settings.clients=[1, 2]"],
    "shootout": [
        "settings.data=[{name='synthetic', clients=4, features=5, samples=10}]",
        "settings.regularizers=[{name='L1', lam=0.001}]",
        "algorithms.0.constants.L={tune=[0.25, 1.0]}",
        "run.rounds=5",
        "trials.rounds=2",
    ],
    "zhang-fig4": ["run.rounds=1", "run.evaluate_every=1", "model.evaluation_samples=100", "partition.clients=2"],
    "zhang-fig2": ["run.rounds=4", "run.evaluate_every=2"],
    "zhang-fig3": ["run.rounds=4", "run.evaluate_every=2", "data.samples=30", "settings.near.rounds=4"],
}
HOME = Path(papers.__file__).parent
LONG = (  # networks, in their smallest form still seconds each; fednmap-fig4 is one that is always run
    "fedcanon-fig2", "fedcanon-fig3", "fedcanon-table6", "fedcanon-table7", "fednmap-fig2", "fednmap-fig3",
    "fednmap-fig5", "zhang-fig4",
)  # fmt: skip


def told(file):
    """The rows of the table of claims in a file, the marks of bold verdicts taken off."""
    lines = [line for line in file.read_text().splitlines() if line.startswith("| ")]
    cells = [[" ".join(c.split()) for c in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return [(*row[:-1], row[-1].removeprefix("**").removesuffix("**")) for row in cells if row[-1].startswith("**")]


def rows(claims):
    """Claims as such rows."""
    return [tuple(" ".join(cell.replace("|", "\\|").split()) for cell in claim) for claim in claims]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n in LONG else []) for n in papers.names()]
)
def test_every_name_in_a_small_form(name, tmp_path, request):
    if re.search("(?i)mnist|a9a|heart|wisconsin", (HOME / f"{name}.toml").read_text()):
        request.getfixturevalue("real_data")
    done = papers.reproduce(name, tmp_path, quick=True, overrides=TINY.get(name, []), say=lambda _: None)
    folder = tmp_path / name
    assert done.claims
    assert all(isinstance(claim, Claim) and claim.measured for claim in done.claims)
    assert {claim.verdict for claim in done.claims} <= {NOT_JUDGED, NOT_RUN}
    assert told(folder / "verdict.md") == rows(done.claims)
    assert "no verdict on the paper" in (folder / "verdict.md").read_text()
    data = pd.read_csv(folder / "data.csv")
    assert judge(done.paper, data, quick=True) == done.claims  # from the stored data alone
    assert imread(folder / "figure.png")[..., :3].std() > 0  # something is drawn
    assert (folder / "figure.pdf").read_bytes().startswith(b"%PDF-")
    if {"run", "round"} <= set(data):  # a run is one run
        assert not data.duplicated(["run", "round"]).any()
    link = f"[{name}]({name}/verdict.md) (quick)"
    assert told(papers.write_report(tmp_path)) == [(link, *row) for row in rows(done.claims)]


@pytest.mark.parametrize("name", papers.names())
def test_both_forms_of_every_name_are_valid_experiments(name):
    paper = papers.load(name)
    assert {"title", "source", "about", "minutes"} <= set(paper.card)
    for quick in (False, True):
        experiment, _ = split(paper.experiment(quick=quick))
        if experiment:
            Sweep(experiment, name).check()
    assert (HOME / f"{name}.toml").read_text().startswith("# ")


def test_an_interrupted_reproduction_goes_on_and_a_finished_one_is_not_repeated(tmp_path):
    said = []
    options = {"quick": True, "overrides": ["run.rounds=4"], "say": said.append}

    def stop(line):
        said.append(line)
        if len(said) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        papers.reproduce("zhang-fig2", tmp_path, **{**options, "say": stop})
    assert read_state(tmp_path / "zhang-fig2")["complete"] is False
    there = papers.reproduce("zhang-fig2", tmp_path, **options, partial=True)
    assert pd.read_csv(there.folder / "data.csv")["run"].nunique() == 3
    del said[:]
    first = papers.reproduce("zhang-fig2", tmp_path, **options)
    assert len(said) == 6  # of nine
    del said[:]
    data = (first.folder / "data.csv").read_bytes()
    again = papers.reproduce("zhang-fig2", tmp_path, **options)
    assert said == []
    assert again.claims == first.claims
    assert (first.folder / "data.csv").read_bytes() == data
    other = papers.reproduce("zhang-fig2", tmp_path / "copy", **options)
    assert (
        pd.read_csv(other.folder / "data.csv")
        .drop(columns="seconds")
        .equals(pd.read_csv(first.folder / "data.csv").drop(columns="seconds"))
    )


def test_partial_data_without_their_runs_are_kept(tmp_path):
    """As those of docs/reproductions, where the runs themselves are not."""
    options = {"quick": True, "overrides": ["run.rounds=2"], "say": lambda _: None, "partial": True}
    folder = papers.reproduce("zhang-fig2", tmp_path, **{**options, "partial": False}).folder
    whole = (folder / "data.csv").read_bytes()
    state = folder / "state.json"
    state.write_text(state.read_text().replace('"complete": true', '"complete": false'))
    shutil.rmtree(folder / "runs")
    done = papers.reproduce("zhang-fig2", tmp_path, **options)
    assert (folder / "data.csv").read_bytes() == whole
    assert len(done.claims) > 1
    assert done.state["complete"] is False


def test_finished_runs_of_another_device_are_taken_as_they_are(tmp_path):
    said = []
    options = {"quick": True, "overrides": ["run.rounds=2"], "say": said.append}
    folder = papers.reproduce("zhang-fig2", tmp_path, **options).folder
    runs = sorted(folder.glob("runs/**/seed-*/config.toml"))
    for config in runs:
        text = config.read_text()
        assert 'device = "cpu"' in text
        config.write_text(text.replace('device = "cpu"', 'device = "cuda"').replace('mode = "auto"', 'mode = "record"'))
    (runs[0].parent / "summary.json").unlink()  # one that did not end
    (folder / "state.json").unlink()
    del said[:]
    with pytest.raises(UserError, match=r"was run with run\.device = 'cuda', not 'cpu'"):
        papers.reproduce("zhang-fig2", tmp_path, **options)
    shutil.rmtree(runs[0].parent)
    papers.reproduce("zhang-fig2", tmp_path, **options)
    assert len(said) == 1  # the others were not repeated


def test_commands(tmp_path, cli, monkeypatch):
    monkeypatch.chdir(tmp_path)
    listed = cli("list", "papers", check=0).out
    assert all(name in listed for name in papers.names())
    assert "did you mean 'zhang-fig2'" in cli("reproduce", "zhang-fig22", check=2).err
    done = cli("reproduce", "zhang-fig2", "--quick", "--set", "run.rounds=2", check=0)
    assert "verdict" in done.out
    assert (tmp_path / "reproductions-quick" / "README.md").is_file()


def test_what_is_missing_is_told_before_anything_runs(tmp_path, cli, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refused = cli("reproduce", "zhang-fig2", "--quick", "--device", "cuda", check=2).err
    assert refused.strip() == "error: device = 'cuda', but this torch sees no GPU; use device = 'cpu'"
    assert not list(tmp_path.iterdir())

    def absent(name):
        if name == "fashion_mnist":
            raise UserError("fashion_mnist was not found")

    monkeypatch.setattr(sys.modules["fedcomposite.papers.reproduce"], "_found", absent)
    for names in (["fedcanon-table7"], ["zhang-fig2", "fednmap-fig6"]):  # not its first data set, not the first name
        assert "fashion_mnist was not found" in cli("reproduce", *names, check=2).err
        assert not list(tmp_path.iterdir())


def test_functions_of_the_data():
    data = pd.DataFrame({"run": ["a"] * 3 + ["b"] * 3, "round": [0, 1, 2] * 2, "stationarity": [4, 2, 1, 8, 8, 8.0]})
    assert list(relative(data)) == [1, 0.5, 0.25, 1, 1, 1]
    reached = first_at(data, relative(data), 0.5)
    assert reached["a"] == 1
    assert reached["b"] != reached["b"]
    found, half = slope([1, 10, 100], [5, 0.5, 0.05])
    assert found == pytest.approx(-1)
    assert half == pytest.approx(0, abs=1e-6)
    assert judged(True, [1]) == HOLDS
    assert judged(True, []) == "not run"
    one = tomllib.loads("[run]\nrounds = 2\ndevice = 'cuda'")
    assert digest_of(one) == digest_of({"run": {"rounds": 2}})


def test_the_optimum_of_the_svm_is_that_of_cvxpy():
    A, counts, real, lowest = fedmls_fig1.samples()
    w = cp.Variable(A.shape[2])
    rows = A[real].numpy()
    best = cp.Problem(cp.Minimize(cp.sum(cp.pos(1 - rows @ w)))).solve(solver=cp.CLARABEL)
    assert lowest == pytest.approx(best, rel=1e-7)
    assert int(counts.sum()) == len(rows)
    assert float(fedmls_fig1.objective(torch.from_numpy(w.value)[None])) == pytest.approx(best, rel=1e-6)


def test_the_uncorrected_scaffnew_is_fedavg_at_random_times():
    """As long as every iteration communicates, both are subgradient steps on the mean."""
    made = {
        c: next(iter(fedmls_fig1.scaffnew(0.01, 1, fedmls_fig1.Oracle([0]), corrected=c)))[1] for c in (True, False)
    }
    assert torch.equal(made[True], made[False])
    oracle = fedmls_fig1.Oracle([0])
    start = torch.zeros(1, oracle.cohort, oracle.A.shape[2], dtype=torch.float64)
    torch.testing.assert_close(made[True], -0.01 * oracle(start, 0).mean(1))


@pytest.mark.parametrize("method", fedmls_fig1.CLASSES)
def test_seeds_of_the_svm_that_run_together_are_those_that_run_alone(method):
    cell = {"method": method, "first": 0.01, "rounds": 12}
    both = fedmls_fig1.run({**cell, "from": 3, "seeds": 2})
    for seed in (3, 4):
        alone = fedmls_fig1.run({**cell, "from": seed, "seeds": 1})
        pd.testing.assert_frame_equal(
            both[both["seed"] == seed].reset_index(drop=True), alone.reset_index(drop=True), rtol=1e-12
        )
        assert alone["round"].max() <= 12


def test_usual_formulas_of_the_proxes_are_the_proxes():
    v = torch.linspace(-3, 3, 601, dtype=torch.float64)
    for name, h in fedcanon_table1.PENALTIES.items():
        torch.testing.assert_close(fedcanon_table1.usual(name, v, 0.7), h.prox(v, 0.7))


def test_a_method_is_ahead_if_it_is_so_with_every_seed():
    def of(*values):
        return pd.Series(values, index=range(len(values)), dtype=float)

    assert ahead(of(3, 5), [of(2, 4), of(1, 1)]) == HOLDS
    assert ahead(of(3, 5), [of(2, 6), of(1, 1)]) == EQUAL
    assert ahead(of(3, 5), [of(4, 6), of(1, 1)]) == FAILS
    assert ahead(of(3, 5), [of(4, 6)], lower=True) == HOLDS
    assert ahead(of(3.0, 5.0), [of(2.9, 4.9)], least=0.2) == EQUAL  # less than can be told
    assert ahead(of(2.9, 4.9), [of(3.0, 5.0)], least=0.2) == EQUAL
    assert ahead(of(), [of(1)]) == NOT_RUN


def test_a_slope_that_one_value_makes_is_told():
    """Stationarity that falls once, from tau = 1 to 2, is no speedup in tau."""

    def data(levels):
        rows = [(f"{t} {s}", r, v, t, s) for t, v in levels.items() for s in (0, 1) for r in (0, 10, 20)]
        table = pd.DataFrame(rows, columns=["run", "round", "stationarity", "local_steps", "seed"])
        return table.assign(**{"class": "FedNMap", "method": "FedNMap"})

    once = fednmap_fig3.speedup(data({1: 1.0, 2: 0.3, 5: 0.29, 10: 0.28, 20: 0.27}), "local_steps", "tau")
    assert "only if tau = 1 counts" in once[1].verdict
    steady = fednmap_fig3.speedup(data({t: t**-0.4 for t in (1, 2, 5, 10, 20)}), "local_steps", "tau")
    assert [c.verdict for c in steady] == [HOLDS, HOLDS]


def test_bounds_and_ratios_are_the_papers():
    assert fedprox_rates.bound_at(1024, 1) / fedprox_rates.bound_at(1024, 5) == pytest.approx(5**0.5)
    assert fedprox_rates.bound_at(1024, 5) / fedprox_rates.bound_at(1024, 25) < 1.5  # T^-2/3 is larger there
    for k, row in fedcanon_table6.RATIOS.items():
        for method, ratio in row.items():
            seconds = fedcanon_table6.PAPER[k]
            assert ratio == pytest.approx(seconds[method] / seconds["FedCanon"], abs=0.015)


@pytest.mark.parametrize("name", papers.names())
def test_partial_with_nothing_done_tells_so(name, tmp_path):
    done = papers.reproduce(name, tmp_path, quick=True, partial=True, say=lambda _: None)
    assert [c.verdict for c in done.claims] == [NOT_RUN]


DONE = sorted(p.parent for p in Path(__file__).parent.parent.glob("docs/reproductions/*/state.json"))


def test_what_is_not_measured_is_not_judged():
    """A comparison with nan is false, which is no verdict."""
    paper = SimpleNamespace(module=SimpleNamespace(claims=lambda data: [
        Claim("a", "3 rounds against nan", FAILS), Claim("b", "3 rounds against 4", HOLDS), Claim("c", "nan", NOT_RUN),
    ]))  # fmt: skip
    table = pd.DataFrame({"x": [1.0]})
    assert [c.verdict for c in judge(paper, table)] == [NOT_JUDGED, HOLDS, NOT_RUN]
    assert [c.verdict for c in judge(paper, table, quick=True)] == [NOT_JUDGED, NOT_JUDGED, NOT_RUN]
    empty = pd.Series([math.nan, math.nan])
    assert ahead(pd.Series([1.0, 2.0]), [empty]) == ahead(empty, [pd.Series([1.0, 2.0])]) == NOT_JUDGED


@pytest.mark.parametrize("folder", DONE, ids=lambda f: f.name)
def test_verdicts_in_the_docs_are_those_of_their_data(folder):
    paper, state = papers.load(folder.name), json.loads((folder / "state.json").read_text())
    data = pd.read_csv(folder / "data.csv")
    claims = judge(paper, data)
    assert "run" not in data or not data.duplicated(["run", "round"]).any()
    assert told(folder / "verdict.md") == rows(claims)
    every = told(folder.parent / "README.md")
    assert [row[1:] for row in every if row[0].startswith(f"[{folder.name}](")] == rows(claims)
    for claim in claims:
        assert claim.verdict != "not run" or not state["complete"], claim.says
