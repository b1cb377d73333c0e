"""Reproductions: every name works in its reduced form, goes on where it was interrupted, and is not repeated."""

import importlib
import json
import math
import re
import shutil
import sys
import tomllib
from pathlib import Path

import cvxpy as cp
import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.image import imread

import fedcomposite as fc
from fedcomposite import UserError, papers
from fedcomposite.experiments import Config, Sweep
from fedcomposite.papers import (
    fedcanon_fig1,
    fedcanon_table1,
    fedcanon_table6,
    fedcanon_table7,
    fedmls_fig1,
    fednmap_fig3,
    fedprox_rates,
)
from fedcomposite.papers.base import digest_of, first_at, read_state, relative, slope, split
from fedcomposite.papers.reproduce import commit, judge
from fedcomposite.papers.verdicts import (
    EQUAL,
    FAILS,
    HOLDS,
    NOT_JUDGED,
    NOT_TESTABLE,
    VERDICTS,
    Claim,
    Row,
    against,
    ahead,
    decide,
    fact,
    holm,
    interval,
    lead,
    multiplicity,
    open_claim,
    over_rows,
    tellable,
    told,
)

TINY = {  # a fraction of the reduced form
    "fedcanon-fig1": ["data.name=breast_cancer", "run.rounds=2", "settings.rounds=2", "settings.betas=[0.01, 0.02]"],
    "fedcanon-fig2": ["run.rounds=1", "run.evaluate_every=1", "model.evaluation_samples=200"],
    "fedcanon-fig3": ["algorithms.0.local_steps=2", "algorithms.1.local_steps=2", "algorithms.2.local_steps=2"],
    "fedcanon-table1": ["settings.sizes={MLP=1000, CNN=2000}"],
    "fedcanon-table3": ["run.rounds=2"],
    "fedcanon-table6": ["model.evaluation_samples=50", "partition.clients=2"],
    "fedmls-fig1": ["settings.rounds=6", "settings.seeds=2"],
    "fednmap-fig2": ["settings.rounds=3", "model.evaluation_samples=100"],
    "fednmap-fig3": ["settings.rounds=2", "settings.every=1", "model.evaluation_samples=100"],
    "fednmap-fig4": ["settings.rounds=2", "settings.every=1", "model.evaluation_samples=100"],
    "fednmap-fig5": ["settings.rounds=2", "settings.every=1", "model.evaluation_samples=100"],
    "fedprox-rates": ["settings.rounds=[2, 4, 6]", "settings.clients=[1, 2]"],
    "remarks": ["settings.rounds=4", "settings.longer=4"],
    "shootout": ["settings.data=[{name='synthetic', clients=4, features=5, samples=10}]", "settings.rounds=5"],
    "zhang-fig4": ["run.rounds=1", "run.evaluate_every=1", "model.evaluation_samples=100", "partition.clients=2"],
    "zhang-fig2": ["settings.rounds=[4, 2]", "settings.every=2"],
    "zhang-fig3": ["settings.rounds=4", "settings.near.rounds=4", "settings.every=2", "data.samples=30"],
}
HOME = Path(papers.__file__).parent
reproducing = importlib.import_module("fedcomposite.papers.reproduce")  # the function has its name
LONG = (  # networks, in their smallest form still seconds each; fednmap-fig4 is one that is always run
    "fedcanon-fig2", "fedcanon-fig3", "fedcanon-table6", "fedcanon-table7", "fednmap-fig2", "fednmap-fig3",
    "fednmap-fig5", "zhang-fig4",
)  # fmt: skip


def listed(file):
    """The rows of the table of claims in a file, the marks of bold verdicts taken off."""
    lines = [line for line in file.read_text().splitlines() if line.startswith("| ")]
    cells = [[" ".join(c.split()) for c in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return [(*row[:-1], row[-1].removeprefix("**").removesuffix("**")) for row in cells if row[-1].startswith("**")]


def rows(claims):
    """Claims as such rows."""
    return [
        tuple(" ".join(cell.replace("|", "\\|").split()) for cell in (c.says, c.measured, c.verdict)) for c in claims
    ]


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
    assert {claim.verdict for claim in done.claims} == {NOT_JUDGED}
    assert [row[1:] for row in listed(folder / "verdict.md")] == rows(done.claims)
    assert "no verdict on the paper" in (folder / "verdict.md").read_text()
    data = pd.read_csv(folder / "data.csv")
    assert judge(done.paper, data, quick=True) == done.claims  # from the stored data alone
    assert imread(folder / "figure.png")[..., :3].std() > 0  # something is drawn
    assert (folder / "figure.pdf").read_bytes().startswith(b"%PDF-")
    if {"run", "round"} <= set(data):  # a run is one run
        assert not data.duplicated(["run", "round"]).any()
    link = f"[{name}]({name}/verdict.md) (quick){' (other settings)' if name in TINY else ''}"
    assert listed(papers.write_report(tmp_path)) == [(link, *row) for row in rows(done.claims)]


@pytest.mark.parametrize("name", papers.names())
def test_both_forms_of_every_name_are_valid_experiments(name):
    paper = papers.load(name)
    assert {"title", "source", "about", "minutes"} <= set(paper.card)
    for quick in (False, True):
        experiment, _ = split(paper.experiment(quick=quick))
        if "run" in experiment:
            Sweep(experiment, name).check()
        elif experiment:
            Config.model_validate({**experiment, "run": {"rounds": 0}})
    assert (HOME / f"{name}.toml").read_text().startswith("# ")


def test_an_interrupted_reproduction_goes_on_and_a_finished_one_is_not_repeated(tmp_path):
    said = []
    options = {"quick": True, "overrides": ["run.rounds=4"], "say": said.append}

    def stop(line):
        said.append(line)
        if len(said) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        papers.reproduce("fedcanon-table3", tmp_path, **{**options, "say": stop})
    assert read_state(tmp_path / "fedcanon-table3")["complete"] is False
    there = papers.reproduce("fedcanon-table3", tmp_path, **options, partial=True)
    assert pd.read_csv(there.folder / "data.csv")["run"].nunique() == 3
    del said[:]
    first = papers.reproduce("fedcanon-table3", tmp_path, **options)
    assert len(said) == 11  # of fourteen
    del said[:]
    data = (first.folder / "data.csv").read_bytes()
    again = papers.reproduce("fedcanon-table3", tmp_path, **options)
    assert said == []
    assert again.claims == first.claims
    assert (first.folder / "data.csv").read_bytes() == data
    other = papers.reproduce("fedcanon-table3", tmp_path / "copy", **options)
    assert (
        pd.read_csv(other.folder / "data.csv")
        .drop(columns="seconds")
        .equals(pd.read_csv(first.folder / "data.csv").drop(columns="seconds"))
    )


def test_partial_data_without_their_runs_are_kept(tmp_path):
    """As those of docs/reproductions, where the runs themselves are not."""
    options = {"quick": True, "overrides": ["run.rounds=2"], "say": lambda _: None, "partial": True}
    folder = papers.reproduce("fedcanon-table3", tmp_path, **{**options, "partial": False}).folder
    whole = (folder / "data.csv").read_bytes()
    state = folder / "state.json"
    state.write_text(state.read_text().replace('"complete": true', '"complete": false'))
    shutil.rmtree(folder / "runs")
    done = papers.reproduce("fedcanon-table3", tmp_path, **options)
    assert (folder / "data.csv").read_bytes() == whole
    assert len(done.claims) > 1
    assert done.state["complete"] is False


def test_finished_runs_of_another_device_are_taken_as_they_are(tmp_path):
    said = []
    options = {"quick": True, "overrides": ["run.rounds=2"], "say": said.append}
    folder = papers.reproduce("fedcanon-table3", tmp_path, **options).folder
    runs = sorted(folder.glob("runs/**/seed-*/config.toml"))
    for config in runs:
        text = config.read_text()
        assert 'device = "cpu"' in text
        config.write_text(text.replace('device = "cpu"', 'device = "cuda"').replace('mode = "auto"', 'mode = "record"'))
    (runs[0].parent / "summary.json").unlink()  # one that did not end
    (folder / "state.json").unlink()
    del said[:]
    with pytest.raises(UserError, match=r"was run with run\.device = 'cuda', not 'cpu'"):
        papers.reproduce("fedcanon-table3", tmp_path, **options)
    shutil.rmtree(runs[0].parent)
    papers.reproduce("fedcanon-table3", tmp_path, **options)
    assert len(said) == 1  # the others were not repeated


def test_kept_trials_choose_where_their_runs_are_not_and_their_commit_is_told(tmp_path, monkeypatch):
    said = []
    options = {"quick": True, "overrides": TINY["fedmls-fig1"], "say": said.append}
    monkeypatch.setattr(reproducing, "commit", lambda: "first")
    folder = papers.reproduce("fedmls-fig1", tmp_path, **options).folder
    whole, trials, made = pd.read_csv(folder / "data.csv"), (folder / "tuning.csv").read_bytes(), len(said)
    state = folder / "state.json"
    state.write_text(state.read_text().replace('"complete": true', '"complete": false'))
    shutil.rmtree(folder / "runs")
    monkeypatch.setattr(reproducing, "commit", lambda: "second")
    del said[:]
    again = papers.reproduce("fedmls-fig1", tmp_path, **options)
    assert len(said) == 10 < made  # five methods, two seeds: no trials
    assert (folder / "tuning.csv").read_bytes() == trials
    assert pd.read_csv(folder / "data.csv").equals(whole)
    assert again.state["commit"] == "first and second"
    (folder / "state.json").unlink()  # a table of other settings chooses nothing
    shutil.rmtree(folder / "runs")
    del said[:]
    assert papers.reproduce("fedmls-fig1", tmp_path, **options).state["commit"] == "second"
    assert len(said) == made


def test_commands(tmp_path, cli, monkeypatch):
    monkeypatch.chdir(tmp_path)
    listed = cli("list", "papers", check=0).out
    assert all(name in listed for name in papers.names())
    assert "did you mean 'fedcanon-table3'" in cli("reproduce", "fedcanon-table32", check=2).err
    done = cli("reproduce", "fedcanon-table3", "--quick", "--set", "run.rounds=2", check=0)
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
    one = tomllib.loads("[run]\nrounds = 2\ndevice = 'cuda'")
    assert digest_of(one) == digest_of({"run": {"rounds": 2}})


def test_the_optimum_of_the_svm_is_that_of_cvxpy(real_data):
    parts, lowest = fedmls_fig1.clients(0)
    rows = np.concatenate(parts)
    assert rows.shape[1] == 10
    assert 1 <= np.abs(rows[:, :9]).min() <= np.abs(rows[:, :9]).max() <= 10  # raw features
    w = cp.Variable(rows.shape[1])
    best = cp.Problem(cp.Minimize(cp.sum(cp.pos(1 - rows @ w)))).solve(solver=cp.CLARABEL)
    assert lowest == pytest.approx(best, rel=1e-6)
    assert float(fedmls_fig1.objective(parts, w.value[None])[0]) == pytest.approx(best, rel=1e-5)
    assert len(fedmls_fig1.clients(1)[0][0]) != len(parts[0])  # another split, other clusters


def test_usual_formulas_of_the_proxes_are_the_proxes():
    v = torch.linspace(-3, 3, 601, dtype=torch.float64)
    for name, h in fedcanon_table1.PENALTIES.items():
        torch.testing.assert_close(fedcanon_table1.usual(name, v, 0.7), h.prox(v, 0.7))


def series(*values):
    return pd.Series(values, index=range(len(values)), dtype=float)


def verdict_of(*claims, **options):
    return [c.verdict for c in decide(claims, **options)]


def test_a_method_is_ahead_if_paired_seeds_say_so():
    ours, close, far = series(3.0, 5.1, 4.0, 6.0), series(2.0, 4.0, 3.1, 5.0), series(1.0, 0.9, 1.2, 1.1)
    assert verdict_of(ahead("", {"a": ours, "b": close, "c": far})) == [HOLDS]  # though the seeds differ by more
    assert verdict_of(ahead("", {"b": close, "a": ours})) == [FAILS]
    assert verdict_of(ahead("", {"b": close, "a": ours}, lower=True)) == [HOLDS]
    assert verdict_of(ahead("", {"a": ours, "b": close}, least=2.0)) == [EQUAL]  # less than can be told
    assert verdict_of(ahead("", {"a": ours, "b": ours + series(0.1, -0.1, 0.2, -0.2)})) == [EQUAL]
    assert verdict_of(ahead("", {"a": ours, "b": 0.9 * ours}, ratio=True, least=0.05)) == [HOLDS]
    assert verdict_of(ahead("", {"a": ours, "b": 0.99 * ours}, ratio=True, least=0.05)) == [EQUAL]


def test_one_seed_settles_no_order_and_has_no_deviation():
    assert verdict_of(ahead("", {"a": series(5.0), "b": series(1.0)})) == [NOT_TESTABLE]
    assert "±" not in told(series(5.0))
    assert math.isnan(interval([1.0])[0])
    assert interval([-40.0] * 3) == (-40.0, -40.0, 0.25)  # counted where records are: three signs decide nothing


def test_quick_runs_and_missing_numbers_are_not_judged():
    good = ahead("", {"a": series(2.0, 2.1, 2.0), "b": series(1.0, 1.1, 0.9)})
    assert verdict_of(good, fact("", True, Row("x", "1")), quick=True) == [NOT_JUDGED, NOT_JUDGED]
    assert verdict_of(fact("", False, Row("x", "nan"))) == [NOT_JUDGED]
    assert verdict_of(ahead("", {"a": series(math.nan, math.nan), "b": series(1.0, 2.0)})) == [NOT_JUDGED]
    assert verdict_of(ahead("", {"a": series(), "b": series(1.0, 2.0)})) == [NOT_JUDGED]
    assert verdict_of(fact("", True)) == [NOT_JUDGED]  # nothing was measured
    assert verdict_of(open_claim("", Row("x", "1"), note="")) == [NOT_TESTABLE]


def test_many_comparisons_are_corrected_by_holm():
    from statsmodels.stats.multitest import multipletests

    values = [0.001, 0.04, 0.03, 0.2, 0.012]
    np.testing.assert_allclose(holm(values), multipletests(values, method="holm")[1])
    assert math.isnan(holm([0.01, math.nan])[1])
    assert holm([0.01, math.nan])[0] == 0.01
    rng = np.random.default_rng(0)
    one = ahead("", {"a": series(0.9, 1.3, 1.0, 1.1), "b": series(0.5, 0.6, 0.7, 0.3)})
    noise = [ahead("", {"a": series(*rng.normal(size=4)), "b": series(*rng.normal(size=4))}) for _ in range(40)]
    assert verdict_of(one) == [HOLDS]
    assert verdict_of(one, *noise)[0] == NOT_TESTABLE  # four seeds cannot tell anything beside forty others
    assert "1.59 with 4 seeds" in multiplicity([one])


@pytest.mark.parametrize(("pairs", "comparisons"), [(3, 1), (3, 30), (10, 30), (20, 5)])
def test_what_can_be_told_is_significant_and_no_less(pairs, comparisons):
    """Differences of mean d and standard deviation 1: the first of Holm's p-values crosses 5 % at d = tellable()."""
    from scipy import stats

    shape = np.random.default_rng(pairs).normal(size=pairs)
    shape = (shape - shape.mean()) / shape.std(ddof=1)
    limit = tellable(pairs, comparisons)
    for factor, significant in ((1.001, True), (0.999, False)):
        p = stats.ttest_1samp(shape + factor * limit, 0.0).pvalue
        assert bool(holm([p, *[1.0] * (comparisons - 1)])[0] < 0.05) is significant


def test_claims_that_nothing_could_decide_are_not_testable():
    close = ahead("", {"a": series(1.0, 1.2, 1.1), "b": series(1.1, 1.0, 1.1)})
    assert verdict_of(close) == [EQUAL]
    assert verdict_of(close, close) == [NOT_TESTABLE] * 2
    clear = ahead("", {"a": series(5.0, 5.1, 5.05), "b": series(1.0, 1.1, 1.06)})
    assert verdict_of(clear, close) == [HOLDS, NOT_TESTABLE]  # what is decided all the same stays so


def test_rows_together_are_judged_by_signed_ranks():
    from scipy import stats

    rng = np.random.default_rng(0)
    ours = series(*(0.9 + 0.01 * rng.normal(size=12)))
    theirs = ours - series(*rng.uniform(0.004, 0.1, 12))
    assert verdict_of(over_rows("", {"a": ours, "b": theirs}, least=0.003)) == [HOLDS]
    assert verdict_of(over_rows("", {"b": theirs, "a": ours}, least=0.003)) == [FAILS]
    assert verdict_of(over_rows("", {"a": ours, "b": theirs}, least=0.2)) == [EQUAL]
    mixed = ours + series(*rng.normal(size=12))
    found = over_rows("", {"a": ours, "b": mixed})
    assert found.rows[1].lead.p == stats.wilcoxon(ours - mixed).pvalue
    assert verdict_of(found) == [EQUAL]


def test_intervals_are_those_of_scipy():
    from scipy import stats

    differences = [0.3, 0.1, 0.4, 0.2, -0.1]
    low, high, p = interval(differences)
    found = stats.ttest_1samp(differences, 0.0)
    assert p == pytest.approx(found.pvalue)
    np.testing.assert_allclose((low, high), found.confidence_interval(0.95))
    assert "ratio 2 (2 to 2)" in lead(series(2.0, 4.0), series(1.0, 2.0), ratio=True).text


def test_a_number_against_a_level():
    assert verdict_of(against("", "slope", series(-1.2, -1.3, -1.25), -1.0, above=False)) == [HOLDS]
    assert verdict_of(against("", "slope", series(-0.7, -0.8, -0.75), -1.0, above=False)) == [FAILS]
    assert verdict_of(against("", "slope", series(-0.7, -1.3, -1.1), -1.0, above=False)) == [EQUAL]
    assert verdict_of(against("", "slope", series(-0.7, -1.3), -1.0, above=False)) == [NOT_TESTABLE]  # nine deviations


def test_states_name_the_commit(tmp_path, monkeypatch):
    commit.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))  # no git here
    monkeypatch.setenv("FEDCOMPOSITE_COMMIT", "abc")
    assert commit() == "abc"
    commit.cache_clear()


def test_a_slope_that_one_value_makes_is_told():
    """Stationarity that falls once, from tau = 1 to 2, is no speedup in tau."""

    def data(levels):
        rng = np.random.default_rng(0)
        rows = [
            (f"{t} {s}", r, v * np.exp(0.01 * rng.normal()), t, s, 10)
            for t, v in levels.items() for s in range(5) for r in (0, 10, 20)
        ]  # fmt: skip
        table = pd.DataFrame(rows, columns=["run", "round", "stationarity", "local_steps", "seed", "clients"])
        return table.assign(**{"class": "FedNMap", "label": "FedNMap"})

    taus = (1, 2, 5, 10, 20)
    once = dict(zip(taus, (1.0, 0.3, 0.29, 0.28, 0.27), strict=True))
    assert verdict_of(*fednmap_fig3.speedup(data(once), "local_steps", "tau"))[1:] == [HOLDS, FAILS]
    steady = data({t: t**-0.4 for t in taus})
    assert verdict_of(*fednmap_fig3.speedup(steady, "local_steps", "tau")) == [HOLDS] * 3


def test_runs_of_table_vii_that_diverged_are_told_and_left_out():
    lost = {("FedDR", 2), ("FedADMM", 1), ("FedADMM", 2), ("FedADMM", 3)}
    rows = [
        ("mnist mlp", "iid 10", m, s, r, math.nan if r and (m, s) in lost else 0.1, 0.9 + s / 100)
        for m in fedcanon_table7.METHODS for s in (1, 2, 3) for r in (0, 20)
    ]  # fmt: skip
    data = pd.DataFrame(rows, columns=["what", "partition", "method", "seed", "round", "loss", "test_accuracy"])
    (row,) = [c for c in fedcanon_table7.claims(data) if c.says == "mnist mlp, iid: FedCanon is best"]
    assert [(r.quantity, r.seeds) for r in row.rows] == [("FedCanon", 3), ("FedDR", 2)]
    assert row.note == "FedADMM diverged with 3 seeds, FedDR diverged with 1 seed"


def test_fedcanon_leaves_a_minimum_by_its_residual_and_a_saddle_for_good(real_data):
    content = papers.load("fedcanon-fig1").experiment()
    sections = {k: content[k] for k in ("data", "partition", "problem", "regularizer")}
    rule = {"name": "FedCanon", "local_steps": 5, "step": 0.02, "server_step": 1.0}
    problem = Config.check({**sections, "algorithm": rule, "run": {"rounds": 0}}).make_problem()
    saddle, x = fc.solve(problem, tolerance=1e-12).solution, fedcanon_fig1.minimum(problem)
    h = problem.regularizer
    bent = (saddle != 0) & (saddle.abs() < h.theta * h.lam)
    assert bent.sum() == 1
    assert problem.objective(x) < problem.objective(saddle)
    method, options = fc.algorithms.FedCanon(5, 0.02, 1.0), {"rounds": 20, "evaluate_every": 20, "progress": False}
    beside = torch.where(bent, 0.95 * saddle, saddle)  # 0.0023 away
    there, gone = (fc.simulate(problem, method, x0=start, **options) for start in (x, beside))
    assert (there.solution - x).norm() < 2e-3
    assert (gone.solution - saddle).norm() > 0.02
    assert (gone.solution[bent] == 0).all()
    slope_ = problem.gradient(x)
    turned = (problem.gradient(x + 1e-6 * slope_) - slope_) / 1e-6
    formula = 0.02 / 2 * 4 * float(turned[x != 0].norm())
    assert there.history[-1]["stationarity"] == pytest.approx(formula, rel=0.03)


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
    assert [c.verdict for c in done.claims] == [NOT_JUDGED]


DONE = sorted(p.parent for p in Path(__file__).parent.parent.glob("docs/reproductions/*/state.json"))


@pytest.mark.parametrize("folder", DONE, ids=lambda f: f.name)
def test_verdicts_in_the_docs_are_those_of_their_data(folder):
    paper, state = papers.load(folder.name), json.loads((folder / "state.json").read_text())
    data = pd.read_csv(folder / "data.csv")
    claims = judge(paper, data)
    assert re.match(r"[0-9a-f]{40}\b", state["commit"])
    if (folder / "tuning.csv").is_file():  # a number at the end of its grid is told
        trials = pd.read_csv(folder / "tuning.csv").query("chosen")
        text = (folder / "verdict.md").read_text()
        assert ("all lie inside their grids" in text) == trials["inside"].all()
        assert all(label in text for label in trials["search"][~trials["inside"]])
    assert state["seeds"]
    assert set(state["versions"]) == {"fedcomposite", "torch", "python"}
    assert "run" not in data or not data.duplicated(["run", "round"]).any()
    assert [row[1:] for row in listed(folder / "verdict.md")] == rows(claims)
    every = listed(folder.parent / "README.md")
    assert [row[1:] for row in every if row[0].startswith(f"[{folder.name}](")] == rows(claims)
    assert {claim.verdict for claim in claims} <= set(VERDICTS)
    for claim in claims:
        assert claim.rows or not state["complete"], claim.says


@pytest.mark.parametrize("weak", [False, True])
def test_the_gradient_of_the_envelope_is_that_of_a_solver(weak):
    """The prox of the mean hinge loss plus h by its dual, beside a grid of starts of a derivative-free solver."""
    from scipy.optimize import minimize

    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(12, 2)), np.where(rng.random(12) < 0.5, -1.0, 1.0)
    h = fedprox_rates.WEAK if weak else None
    problem = fc.Problem(fc.Silos.from_arrays([(X[:6], y[:6]), (X[6:], y[6:])]), loss="hinge", regularizer=h)
    w = torch.tensor([0.3, -0.05], dtype=torch.float64)
    radius = 0.99 if weak else 1.0

    def objective(x):
        near = ((x - w.numpy()) ** 2).sum() / (2 * radius)
        return np.maximum(1 - y * (X @ x), 0).mean() + near + float(problem.regularizer.value(torch.from_numpy(x)))

    options = {"xatol": 1e-10, "fatol": 1e-14, "maxiter": 4000}
    found = min(
        (minimize(objective, start, method="Nelder-Mead", options=options) for start in rng.normal(size=(6, 2))),
        key=lambda one: one.fun,
    )
    assert fedprox_rates.envelope(problem, w) == pytest.approx(np.linalg.norm(w.numpy() - found.x) / radius, abs=1e-5)
