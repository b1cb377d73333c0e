"""Reports and predictions: the numbers of the run, on one page that needs nothing from outside."""

import json
import re
import tomllib
from html.parser import HTMLParser

import numpy as np
import pandas as pd
import pytest
import torch
from browser import DESKTOP, PHONE
from safetensors.torch import load_file
from sklearn.metrics import balanced_accuracy_score, log_loss, mean_absolute_error, r2_score, roc_auc_score
from typer.testing import CliRunner

import fedcomposite as fc
from fedcomposite.analysis.prediction import predict
from fedcomposite.cli.main import app
from fedcomposite.data import DataError
from fedcomposite.experiments import Config
from fedcomposite.experiments.store import StoreError
from fedcomposite.plots.inline import Picture
from fedcomposite.reports import read_run, write_report
from fedcomposite.reports.page import html

PAPER = (680, 960)  # A4 without its margins, in pixels


def command(*arguments, code=0):
    done = CliRunner().invoke(app, [str(a) for a in arguments])
    assert done.exit_code == code, done.output + str(done.exception)
    return done.output


@pytest.fixture(scope="module")
def messy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("consortium")
    fc.data.messy_consortium(folder / "hospitals")
    experiment = folder / "hospitals" / "experiment.toml"
    command("cv", experiment, "--folds", 3, "--count", 15, "--out", folder / "run")
    return folder / "hospitals", folder / "run"


class Page(HTMLParser):
    """Checks that tags match; collects them, and what they point to."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.links, self.words = [], [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.links += [v for k, v in attrs if k in ("src", "href", "action", "data", "xlink:href")]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.words.append(data)


def test_a_page_is_whole_and_asks_for_nothing(messy):
    _, run = messy
    command("report", run)
    text = (run / "report.html").read_text()
    page = Page(text)
    assert all(link.startswith("#") for link in page.links)  # parts of the page itself
    assert text.count("url(") == text.count("url(#")
    assert "@import" not in text
    assert text.count("http") == text.count('xmlns="http://www.w3.org/2000/svg"') + text.count("http-equiv")
    assert sum(tag == "svg" for tag, _ in page.tags) == 8  # effect curves of its spline among them
    said = " ".join(page.words)
    for heading in ("Data", "Coefficients", "Quality", "Path", "Configuration"):
        assert heading in said
    for part in ("@media print", "data-name", "Content-Security-Policy"):
        assert part in text
    traces = {a["data-name"] for tag, a in page.tags if a.get("class") == "trace"}
    names = json.loads((run / "analysis.json").read_text())["coordinates"]
    assert traces <= set(names[:-1])
    assert len(traces) > 3


def test_everything_drawn_is_inside_its_picture(messy):
    _, run = messy
    write_report(run)
    page = Page((run / "report.html").read_text())
    width = height = seen = 0
    for tag, given in page.tags:
        if tag == "svg":
            width, height = map(float, given["viewbox"].split()[2:])
        if tag == "path" and "id" not in given:  # those with one are drawn where they are used
            numbers = list(map(float, re.findall(r"-?[\d.]+", given["d"])))
            points = list(zip(numbers[::2], numbers[1::2], strict=True))
        else:
            points = [(float(given["x"]), float(given["y"]))] if tag == "use" else []
        seen += len(points)
        assert all(-0.5 <= a <= width + 0.5 and -0.5 <= b <= height + 0.5 for a, b in points), (tag, given)
    assert seen > 500


@pytest.mark.slow
def test_a_page_is_the_same_again(messy):
    found = read_run(messy[1])
    assert html(found) == html(found)


@pytest.mark.parametrize(
    ("size", "media"), [(DESKTOP, ""), (PHONE, ""), (PAPER, "print")], ids=["desk", "phone", "paper"]
)
def test_a_page_in_chromium(messy, browser, size, media):
    """No line on the console, no request but for the page itself, nothing cut, hidden or on top of another."""
    _, run = messy
    write_report(run)
    browser.open(run / "report.html", size, media=media)
    seen = browser.seen()
    assert (seen["cut"], seen["wide"]) == ([], 0)
    assert (browser.overlaps(), browser.faint()) == ([], [])
    scales = browser.run("return [...document.querySelectorAll('svg')].map(s => s.getScreenCTM().a)")
    assert all(0.7 < scale <= 1 for scale in scales)  # words of smaller pictures cannot be read
    assert browser.console() == []
    assert browser.requests() == [(run / "report.html").resolve().as_uri()]


def test_words_of_marks_stay_in_the_picture_and_apart(tmp_path, browser):
    picture = Picture((560, 340), ("lambda", "deviance"), log_x=True)
    picture.axes.set_xlim(1.0, 1e-3)
    picture.mark(1e-3, "min")
    picture.mark(1.1e-3, "1se")
    (tmp_path / "marks.html").write_text(picture.svg("two marks at the right edge"))
    browser.open(tmp_path / "marks.html")
    assert browser.overlaps() == []


def test_names_are_no_formulas_and_stay_in_legends():
    picture = Picture((560, 340), ("x", "cost in $ per $"))
    for name in ("a$b$c_{1}", "_under"):
        picture.line([(0, 1), (1, 2)], "#000000", name)
    picture.ends([("5$ or 7$", 2.0, "#000000")])
    picture.axes.legend()
    words = [word.strip("\u200b\n ") for word in Page(picture.svg("names")).words]
    for name in ("a$b$c_{1}", "_under", "5$ or 7$", "cost in $ per $"):
        assert name in words


def test_a_pointer_on_the_path_names_the_line_on_screen_and_not_on_paper(messy, browser):
    _, run = messy
    write_report(run)
    browser.open(run / "report.html")
    browser.point("path.trace")
    tip = "const tip = document.getElementById('tip'); return [tip.checkVisibility(), tip.textContent, "
    tip += "[...document.querySelectorAll('.trace')].filter(e => getComputedStyle(e).opacity < 1).length]"
    shown, name, faded = browser.run(tip)
    assert shown
    assert name == browser.one("path.trace").get_attribute("data-name")
    assert name in json.loads((run / "analysis.json").read_text())["coordinates"]
    assert faded > 2
    browser.emulate(media="print")
    assert browser.run(tip)[::2] == [False, 0]
    browser.pdf(run / "report.pdf")
    assert (run / "report.pdf").read_bytes().startswith(b"%PDF")


def test_the_tables_have_the_numbers_of_the_analysis(messy, tmp_path):
    folder, run = messy
    experiment = Config.read(folder / "experiment.toml")
    problem = experiment.make_problem()
    cv = fc.cross_validate(problem, folds=3, count=15, seed=experiment.seed)
    x = cv.solution("1se")
    found = read_run(run)
    table = found.tables["Coefficients"].set_index("name")
    exact = fc.confidence(problem, x)
    for ours, theirs in {"coefficient": "coefficient", "debiased": "estimate", "from": "lower", "to": "upper"}.items():
        np.testing.assert_allclose(table.loc[exact.index, ours], exact[theirs], rtol=1e-9, atol=1e-12)
    measured = fc.quality(problem, cv, choice="1se").table
    np.testing.assert_allclose(found.tables["Quality"].set_index("site")["AUROC"], measured["auroc"], rtol=1e-12)
    np.testing.assert_allclose(found.tables["Path"]["cv deviance"], cv.mean, rtol=1e-12)
    assert set(found.tables["Data"].columns) == {"feature", *problem.silos.names}
    written = write_report(run, tmp_path)
    assert {p.name for p in written} >= {"report.html", "report.md", "report.tex", "report-quality.csv"}
    assert pd.read_csv(tmp_path / "report-quality.csv")["AUROC"].tolist() == found.tables["Quality"]["AUROC"].tolist()
    assert (table.loc[exact.index, "original"] == 0).tolist() == (exact["coefficient"] == 0).tolist()
    for ours, theirs in {
        "OR per unit": "unit_odds_ratio",
        "OR from": "unit_odds_lower",
        "p per unit": "unit_p",
    }.items():
        np.testing.assert_allclose(table.loc[exact.index, ours], exact[theirs], rtol=1e-9)
    assert (tmp_path / "report.tex").read_text().count("\\begin{tabular}") == 3
    assert (tmp_path / "report.md").read_text().count("\n## ") == 4


@pytest.mark.slow
def test_a_reader_is_told_what_was_done(messy, tmp_path):
    """In every format: who was studied, how the model was chosen, on whom it was measured, and what a ratio is of."""
    folder, run = messy
    write_report(run, tmp_path)
    texts = {p.suffix: " ".join(p.read_text().replace("\\", "").split()) for p in tmp_path.glob("report.*")}
    assert set(texts) == {".html", ".md", ".tex"}
    for text in texts.values():
        assert "Measured on held-out folds: every sample by a model of the other folds" in text
        assert "strength were learned from all samples" in text
        assert "per unit of the column (one year, 1 against 0)" in text
        assert "not adjusted for the number of coefficients" in text
    for text in (texts[".html"], texts[".md"]):
        assert "600, 273 of them of class 1 (events), at 4 sites" in text
        assert "3 folds, dealt out within each site" in text
        assert "within one standard error of the best cross-validated deviance" in text
    assert read_run(run).tables["Data"].set_index("feature").loc["(rows)"].tolist() == ["220", "160", "130", "90"]
    command("fit", folder / "experiment.toml", "--out", tmp_path / "fit")
    write_report(tmp_path / "fit")
    for name in ("report.html", "report.md", "report.tex"):
        assert "Apparent performance: measured on training samples" in (tmp_path / "fit" / name).read_text()


@pytest.mark.slow
def test_another_run_in_the_folder_leaves_nothing_of_the_first(messy, tmp_path):
    """Neither its recipe, by which new patients would be prepared, nor its tables."""
    folder, _ = messy
    run, experiment = tmp_path / "run", folder / "experiment.toml"
    command("fit", experiment, "--out", run)
    command("report", run)
    command("fit", "heart-recipe", "--set", "recipe.standardize=false", "--out", run, "--overwrite")
    assert json.loads((run / "recipe.json").read_text())["target"] == "num"
    command("report", run)
    command("solve", "heart-recipe", "--out", run, "--overwrite")
    assert not list(run.glob("report*"))
    assert not (run / "analysis.json").exists()
    frame = pd.DataFrame(np.random.default_rng(0).normal(size=(60, 2)), columns=["a", "b"]).assign(y=[0, 1] * 30)
    frame.to_csv(tmp_path / "n.csv", index=False)
    silos = fc.Silos.from_csv([tmp_path / "n.csv"], target="y")
    problem = fc.Problem(silos, regularizer=fc.regularizers.L1(0.01), bias=True)
    found = fc.analyse(problem, "fit")
    with pytest.raises(StoreError, match="already holds files; use overwrite=True, or another folder"):
        found.save(run)
    assert (run / "recipe.json").exists()
    found.save(run, overwrite=True)
    assert not (run / "recipe.json").exists()
    assert not (run / "history.jsonl").exists()
    assert predict(run, tmp_path / "n.csv").measures is None  # the run's problem names no target
    assert (tmp_path / "n.csv").exists()


@pytest.mark.slow
def test_names_that_are_markup_stay_names(messy, tmp_path):
    _, run = messy
    for path in run.iterdir():
        if path.is_file():
            (tmp_path / path.name).write_bytes(path.read_bytes())
    wrong = "<script>alert(1)</script>"
    content = json.loads(
        (run / "analysis.json").read_text().replace("north", "NORTH").replace('"age"', json.dumps(wrong))
    )
    (tmp_path / "analysis.json").write_text(json.dumps(content))
    write_report(tmp_path)
    text = (tmp_path / "report.html").read_text()
    assert wrong not in text
    assert text.count("<script>") == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fit", "path"])
def test_a_fit_and_a_path_have_a_report(kind, tmp_path):
    options = ["--count", 8, "--ratio", 0.05] if kind == "path" else []
    command(kind, "heart-recipe", *options, "--out", tmp_path / "run")
    command("report", tmp_path / "run")
    page = Page((tmp_path / "run" / "report.html").read_text())
    said = " ".join(page.words)
    assert ("duality gap" in said) == (kind == "fit")
    assert "switzerland" in said


def test_a_solved_run_has_a_report(tmp_path):
    command("solve", "heart-recipe", "--out", tmp_path / "run")
    write_report(tmp_path / "run")
    said = " ".join(Page((tmp_path / "run" / "report.html").read_text()).words)
    assert "stationarity" in said
    assert "duality gap" in said
    with pytest.raises(StoreError, match="missing or unreadable"):
        write_report(tmp_path)


def test_predictions_are_those_of_the_model(messy, tmp_path):
    folder, run = messy
    problem = Config.read(folder / "experiment.toml").make_problem()
    x = torch.tensor(json.loads((run / "analysis.json").read_text())["model"], dtype=torch.float64)
    command("predict", run, folder / "south.csv", "--site", "south", "--out", tmp_path / "scored.csv")
    scored = pd.read_csv(tmp_path / "scored.csv")
    south = problem.silos.names.index("south")
    X, y = problem.silos[south]
    expected = torch.sigmoid(X @ x[:-1] + x[-1])
    np.testing.assert_allclose(scored["prediction"], expected, rtol=1e-10)
    made = predict(run, folder / "south.csv", site="south")
    assert made.measures["auroc"][0] == pytest.approx(roc_auc_score(y, expected), abs=1e-12)
    assert made.measures["brier"][0] == pytest.approx(float(((expected - (y > 0).double()) ** 2).mean()), abs=1e-12)


def test_a_file_called_after_a_site_is_read_as_that_sites(messy, tmp_path):
    """Target and style as well as features, which went by the file's name alone."""
    folder, run = messy
    named, asked = predict(run, folder / "south.csv"), predict(run, folder / "south.csv", site="south")
    pd.testing.assert_frame_equal(named.table, asked.table)
    pd.testing.assert_frame_equal(named.measures, asked.measures)
    assert named.site == "south"
    said = command("predict", run, folder / "south.csv", "--out", tmp_path / "s.csv")
    assert "with the names and units of south" in said
    assert predict(run, folder / "north.csv").site is None


def test_new_samples_without_a_target_and_with_strange_levels(messy, tmp_path):
    folder, run = messy
    raw = pd.read_csv(folder / "north.csv", sep=None, engine="python", dtype=str)
    target = tomllib.loads((folder / "experiment.toml").read_text())["data"]["target"]
    raw.drop(columns=target).to_csv(tmp_path / "new.csv", index=False)
    made = predict(run, tmp_path / "new.csv", site="north")
    assert made.measures is None
    assert len(made.table) == len(raw)
    assert "no target" in command("predict", run, tmp_path / "new.csv", "--site", "north", "--out", tmp_path / "s.csv")
    raw.assign(sex="unheard of").to_csv(tmp_path / "odd.csv", index=False)
    with pytest.raises(DataError, match="sex"):
        predict(run, tmp_path / "odd.csv", site="north")
    with pytest.raises(DataError, match="the run's sites are"):
        predict(run, tmp_path / "new.csv", site="nowhere")


def test_a_run_without_a_recipe_predicts_by_column_names(tmp_path):
    g = np.random.default_rng(0)
    frame = pd.DataFrame(g.normal(size=(60, 3)), columns=["a", "b", "c"])
    frame["y"] = frame["a"] * 2 - frame["b"] + g.normal(size=60) / 10
    for name, part in (("n", frame[:30]), ("s", frame[30:])):
        part.to_csv(tmp_path / f"{name}.csv", index=False)
    (tmp_path / "e.toml").write_text(
        f'[data]\nfiles = ["{tmp_path}/n.csv", "{tmp_path}/s.csv"]\ntarget = "y"\n[problem]\nloss = "least_squares"\n'
        'bias = true\n[regularizer]\nname = "L1"\nlam = 0.01\n'
    )
    command("fit", tmp_path / "e.toml", "--out", tmp_path / "run")
    shuffled = frame[["c", "y", "a", "b"]]
    shuffled.to_csv(tmp_path / "new.csv", index=False)
    made = predict(tmp_path / "run", tmp_path / "new.csv")
    x = json.loads((tmp_path / "run" / "analysis.json").read_text())["model"]
    np.testing.assert_allclose(made.table["prediction"], frame[["a", "b", "c"]] @ x[:3] + x[3], rtol=1e-12)
    assert made.measures["r2"][0] > 0.98
    write_report(tmp_path / "run")


CLASSES = (3, 5, 9)


@pytest.fixture
def three_classes(tmp_path):
    """Two sites' files with three classes, a run of them, and the pooled table."""
    g = np.random.default_rng(0)
    frame = pd.DataFrame(g.normal(size=(150, 3)), columns=["a", "b", "c"])
    margins = frame.to_numpy() @ g.normal(size=(3, 3)) * 2
    frame["y"] = np.take(CLASSES, (margins + g.gumbel(size=margins.shape)).argmax(1))
    for name, part in (("n", frame[:80]), ("s", frame[80:])):
        part.to_csv(tmp_path / f"{name}.csv", index=False)
    (tmp_path / "e.toml").write_text(
        f'[data]\nfiles = ["{tmp_path}/n.csv", "{tmp_path}/s.csv"]\ntarget = "y"\n[problem]\nloss = "multinomial"\n'
        'bias = true\n[regularizer]\nname = "L1"\nlam = 0.01\n'
    )
    return tmp_path, frame


@pytest.mark.parametrize("recipe", ["", "[recipe]\nstandardize = true\n"], ids=["plain", "recipe"])
def test_a_model_of_several_classes_predicts(three_classes, recipe):
    folder, frame = three_classes
    with (folder / "e.toml").open("a") as file:
        file.write(recipe)
    command("fit", folder / "e.toml", "--out", folder / "run")
    frame[["c", "y", "a", "b"]].to_csv(folder / "new.csv", index=False)
    said = command("predict", folder / "run", folder / "new.csv", "--out", folder / "scored.csv")
    assert "accuracy" in said
    scored = pd.read_csv(folder / "scored.csv")
    problem = Config.read(folder / "e.toml").make_problem()
    x = torch.tensor(json.loads((folder / "run" / "analysis.json").read_text())["model"], dtype=torch.float64)
    margins = problem.predict(x, problem.silos.features.double())
    np.testing.assert_allclose(scored[[f"margin[{c}]" for c in CLASSES]], margins, rtol=1e-9, atol=1e-12)
    p = torch.softmax(margins, -1).numpy()
    np.testing.assert_allclose(scored[[f"prediction[{c}]" for c in CLASSES]], p, rtol=1e-9)
    np.testing.assert_array_equal(scored["class"], np.take(CLASSES, p.argmax(1)))
    measured = predict(folder / "run", folder / "new.csv").measures.iloc[0]
    assert measured["accuracy"] == pytest.approx(np.mean(scored["class"] == frame["y"]))
    assert measured["balanced_accuracy"] == pytest.approx(balanced_accuracy_score(frame["y"], scored["class"]))
    assert measured["log_loss"] == pytest.approx(log_loss(frame["y"], p))
    write_report(folder / "run")
    frame.assign(y=4).to_csv(folder / "odd.csv", index=False)
    with pytest.raises(DataError, match=r"odd\.csv: the target has classes that the run does not know: 4"):
        predict(folder / "run", folder / "odd.csv")


def test_counts_are_measured_on_their_own_scale(tmp_path):
    g = np.random.default_rng(0)
    frame = pd.DataFrame(g.normal(size=(90, 2)), columns=["a", "b"])
    frame["y"] = g.poisson(np.exp(0.5 + frame["a"] - 0.5 * frame["b"]))
    for name, part in (("n", frame[:50]), ("s", frame[50:])):
        part.to_csv(tmp_path / f"{name}.csv", index=False)
    (tmp_path / "e.toml").write_text(
        f'[data]\nfiles = ["{tmp_path}/n.csv", "{tmp_path}/s.csv"]\ntarget = "y"\n[problem]\nloss = "poisson"\n'
        'bias = true\n[regularizer]\nname = "L1"\nlam = 0.01\n'
    )
    command("fit", tmp_path / "e.toml", "--out", tmp_path / "run")
    frame.to_csv(tmp_path / "new.csv", index=False)
    made = predict(tmp_path / "run", tmp_path / "new.csv")
    np.testing.assert_allclose(made.table["prediction"], np.exp(made.table["margin"]), rtol=1e-12)
    assert made.measures["r2"][0] == pytest.approx(r2_score(frame["y"], made.table["prediction"]))
    wrong = mean_absolute_error(frame["y"], made.table["prediction"])
    assert made.measures["mae"][0] == pytest.approx(wrong)


@pytest.mark.parametrize("loss", ["poisson", "logistic"])
def test_new_samples_have_their_offset(tmp_path, loss):
    """Exposures of new samples count as those of the fit did: the run's own margins, and its measures."""
    g = np.random.default_rng(1)
    frame = pd.DataFrame(g.normal(size=(120, 2)), columns=["a", "b"]).assign(at_risk=g.normal(size=120))
    margin = 0.5 + frame["a"] - 0.5 * frame["b"] + frame["at_risk"]
    frame["y"] = g.poisson(np.exp(margin)) if loss == "poisson" else (g.random(120) < 1 / (1 + np.exp(-margin))) * 1
    frame.to_csv(tmp_path / "n.csv", index=False)
    (tmp_path / "e.toml").write_text(
        f'[data]\nfiles = ["{tmp_path}/n.csv"]\ntarget = "y"\noffset = "at_risk"\n[problem]\nloss = "{loss}"\n'
        'bias = true\n[regularizer]\nname = "L1"\nlam = 0.01\n'
    )
    command("fit", tmp_path / "e.toml", "--out", tmp_path / "run")
    problem = Config.read(tmp_path / "e.toml").make_problem()
    x = load_file(tmp_path / "run" / "model.safetensors")["x"]
    frame.rename(columns={"at_risk": "exposure"}).to_csv(tmp_path / "other.csv", index=False)
    made = predict(tmp_path / "run", tmp_path / "n.csv")
    named = predict(tmp_path / "run", tmp_path / "other.csv", offset="exposure")
    by_hand = frame[["a", "b"]].to_numpy() @ x[:2].numpy() + float(x[2]) + frame["at_risk"]
    for one in (made, named):
        np.testing.assert_allclose(one.table["margin"], by_hand, rtol=1e-10)
    with pytest.raises(DataError, match="no column 'at_risk'"):
        predict(tmp_path / "run", tmp_path / "other.csv")
    if loss == "poisson":
        assert made.measures["r2"][0] == pytest.approx(r2_score(frame["y"], np.exp(by_hand)))
    else:
        assert made.measures["auroc"][0] == pytest.approx(roc_auc_score(frame["y"], by_hand))
        assert made.measures["auroc"][0] == pytest.approx(fc.quality(problem, x, exact=True).overall.auroc)


def test_what_is_no_run_is_called_so(messy, tmp_path):
    with pytest.raises(StoreError, match=r"nowhere: there is no such folder; give the folder of a run"):
        write_report(tmp_path / "nowhere")
    with pytest.raises(StoreError, match=r"this is not the folder of a run"):
        write_report(messy[0])
    used = CliRunner().invoke(app, ["cv", str(messy[0] / "experiment.toml"), "--out", str(messy[1])])
    assert "use --overwrite or another --out" in str(used.exception)
    assert "--resume" not in str(used.exception)


@pytest.mark.slow
def test_a_test_part_is_measured_and_reported(messy, tmp_path):
    experiment = messy[0] / "experiment.toml"
    said = command("cv", experiment, "--set", "data.test=0.3", "--folds", 3, "--count", 8, "--out", tmp_path / "run")
    assert "on the test part" in said
    problem = Config.read(experiment, ["data.test=0.3"]).make_problem()
    x = torch.tensor(json.loads((tmp_path / "run" / "analysis.json").read_text())["model"], dtype=torch.float64)
    X, y = problem.silos.test
    owner = problem.silos.held_by["test"].numpy()
    scores, y = problem.predict(x, X).numpy(), (y > 0).numpy()
    write_report(tmp_path / "run")
    table = pd.read_csv(tmp_path / "run" / "report-test.csv").set_index("site")
    assert table.loc["all", "samples"] == len(y)
    assert table.loc["all", "AUROC"] == pytest.approx(roc_auc_score(y, scores), abs=1e-2)
    for i, site in enumerate(problem.silos.names):
        assert table.loc[site, "samples"] == (owner == i).sum()
        assert table.loc[site, "Brier"] == pytest.approx(np.mean((1 / (1 + np.exp(-scores)) - y)[owner == i] ** 2))
    for one in json.loads((tmp_path / "run" / "analysis.json").read_text())["test"].values():
        assert 2 <= len(one["calibration"]) <= min(10, one["samples"] / 10)
    page = (tmp_path / "run" / "report.html").read_text()
    for expected in ("<h2>Test</h2>", "ROC curves on the test part", "Calibration on the test part"):
        assert expected in page
    assert sum(tag == "svg" for tag, _ in Page(page).tags) == 11
