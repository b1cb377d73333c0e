"""What the documents show must work, and must not lag behind the code."""

import re
import runpy
import shutil
import tomllib
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pages
import pandas as pd
import pytest
import typer

import fedcomposite as fc
from fedcomposite import algorithms
from fedcomposite.cli.federation import federation_app
from fedcomposite.cli.main import app
from fedcomposite.experiments import Config
from fedcomposite.federation.site_folders import SiteFile

ROOT = Path(__file__).parent.parent


# What a page's commands expect to be there.
EXPERIMENT = """
name = "experiment"
[data]
files = ["north.csv", "south.csv"]
target = "sick"
[problem]
loss = "logistic"
bias = true
[regularizer]
name = "L1"
lam = 0.02
[algorithm]
name = "FedNMap"
local_steps = 2
steps = "auto"
[run]
rounds = 5
"""
SHORTER = {  # added to commands that would take long; what comes last wins
    "fedcomposite compare": ("--set", "run.rounds=2"),
    "fedcomposite cv": ("--folds", "2", "--count", "4"),
}
PLACEHOLDERS = {"NAME": "north"}
BEFORE = {  # run before a page's own
    "README.md": [f"fedcomposite run experiment.toml --out runs/{name}" for name in "ab"],
    "docs/experiments.md": ["fedcomposite run experiment.toml --out FOLDER"],
}


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """A folder with two sites' files, one of new patients and an experiment."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    for name in ("north", "south", "new"):
        table = pd.DataFrame(rng.normal(size=(60, 3)), columns=["age", "pressure", "chol"])
        table["sick"] = (table["age"] + rng.normal(size=60) > 0).astype(int)
        table.to_csv(f"{name}.csv", index=False)
    (tmp_path / "experiment.toml").write_text(EXPERIMENT)
    return tmp_path


def having(kind):
    return [name for name in pages.NAMES if any(b.kind == kind for b in pages.blocks(name))]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*leaves its proven range")
@pytest.mark.parametrize("name", having("python"))
def test_python_blocks_run(name, desk, request):
    if 'load("mnist")' in pages.text_of(name):
        request.getfixturevalue("real_data")
    scope = {"__name__": "shown"}
    for block in pages.blocks(name):
        if block.kind != "python" or block.why_not() is not None:
            continue
        # a dataclass looks its annotations up in its module, so the block gets a real one
        path = desk / "shown.py"
        path.write_text(block.text)
        scope = {**scope, **runpy.run_path(str(path), init_globals=scope, run_name="shown")}


@pytest.mark.filterwarnings("ignore:.*leaves its proven range")
@pytest.mark.parametrize("name", [n for n in pages.NAMES if any(b.commands for b in pages.blocks(n))])
def test_commands_run(name, desk, cli):
    """Each command of a block is carried out, in the order of the page, or a mark before the block says why not."""
    if name == "docs/compare.md":
        (desk / "hospitals.toml").write_text(next(b.text for b in pages.blocks(name) if b.kind == "toml"))
    for command in BEFORE.get(name, []):
        cli(*pages.words(command)[1:], check=0)
    for block in pages.blocks(name):
        for command in block.commands:
            why = block.why_not(command)
            if why is not None:
                assert len(why) > 10, f"{name}: {command}: say why it is not run"
                continue
            assert command.startswith("fedcomposite "), (
                f"{name}: {command}: only commands of the package can be run here"
            )
            more = next((extra for start, extra in SHORTER.items() if command.startswith(start)), ())
            given = [next(map(str, Path().glob(w.replace("...", "*"))), w) for w in pages.words(command)[1:]]
            cli(*(PLACEHOLDERS.get(w, w) for w in given), *more, check=0)
            for request in desk.glob("*/*.csr"):  # which people send to each other
                shutil.copy(request, desk)


@pytest.mark.parametrize("name", pages.NAMES)
def test_commands_exist(name):
    """Also those that are not run, and those in the running text: the command is there, and so are its options."""
    main = typer.main.get_command(app)
    federation = typer.main.get_command(federation_app)
    shown = [c for b in pages.blocks(name) for c in b.commands if c.startswith("fedcomposite ")]
    for command in [*shown, *pages.inline_commands(name)]:
        found, words = main, pages.words(command.partition(" | ")[0])[1:]
        while words and hasattr(found, "commands") and not words[0].startswith("-"):
            found = federation if words[0] == "federation" else found.commands.get(words[0])
            assert found is not None, f"{name}: {command}: there is no {words[0]!r}"
            words = words[1:]
        if words or not hasattr(found, "commands"):
            found.make_parser(typer.Context(found)).parse_args(words)  # refuses what it does not know


@pytest.mark.parametrize("name", having("toml"))
def test_tables_of_files_are_valid(name):
    """A block of TOML is an experiment, part of one, or a part of a site's or a package's file."""
    for block in pages.blocks(name):
        if block.kind != "toml" or block.why_not() is not None:
            continue
        rest = re.sub(r"(?:^|(?<=\n\n))# \[.*?\n(?=\n)", "", block.text, flags=re.S)  # tables that are commented out
        for text in (block.text, re.sub(r"^# (?=\w+ = )", "", rest, flags=re.M)):  # options that could be set
            content = tomllib.loads(text)
            data = content.get("data", {})
            if {"limits", "approval"} & set(content) or {"file", "classes", "database"} & set(data):
                SiteFile.model_validate({"site": {"name": "north", "engine": "nvflare", "address": "a:1"}, **content})
            elif "project" not in content:
                frame = {"data": {"name": "mnist"}, **content, "run": {"rounds": 1, **content.get("run", {})}}
                Config.check(first_values(frame))


def first_values(content):
    """An experiment with the first value of each grid."""
    if isinstance(content, dict):
        if set(content) in ({"grid"}, {"tune"}):
            return next(iter(content.values()))[0]
        return {k: first_values(v) for k, v in content.items()}
    return [first_values(v) for v in content] if isinstance(content, list) else content


def test_tables_of_methods_are_up_to_date():
    """What the tables list is right, and no method that the package imports is left out; a new file may be."""
    tables = runpy.run_path(str(ROOT / "docs" / "make_tables.py"))
    for name, pattern, written in (
        ("README.md", r"^\| `(\w+)`", lambda text, names: tables["readme"](text, names)),
        ("docs/methods.md", r"^\| \[(\w+)\]\(#", lambda _, names: tables["methods_page"](names)),
    ):
        text = (ROOT / name).read_text(encoding="utf-8")
        listed = re.findall(pattern, text, re.M)
        assert written(text, listed) == text, f"{name}: run python docs/make_tables.py"
        shipped = {
            key for key, value in vars(algorithms).items() if isinstance(value, type) and key in algorithms.REGISTRY
        }
        assert shipped <= set(listed), f"{name}: run python docs/make_tables.py"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("plot_*.py")), ids=lambda p: p.stem)
def test_examples_run(path, tmp_path, monkeypatch):
    """Every line of an example is carried out, with few rounds; `make docs` runs them in full."""
    monkeypatch.chdir(tmp_path)
    in_full = fc.simulate

    def few(problem, method, *, rounds, evaluate_every=1, **options):
        rounds = min(rounds, 20)
        return in_full(problem, method, rounds=rounds, evaluate_every=min(evaluate_every, rounds), **options)

    monkeypatch.setattr(fc, "simulate", few)
    with plt.rc_context():
        runpy.run_path(str(path), run_name="__main__")
        plt.close("all")
    assert list(tmp_path.glob("*.png"))
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 60


def test_the_docs_extra_brings_what_the_examples_need():
    """`make docs` runs them in an environment that has the core and this extra, nothing else."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    brought = re.search(r"fedcomposite\[(.*)\]", " ".join(extras["docs"]))[1].split(",")
    examples = [path.read_text(encoding="utf-8") for path in (ROOT / "examples").glob("plot_*.py")]
    needed = {"privacy" for text in examples if "fc.privacy" in text}
    assert needed <= set(brought)


@pytest.mark.parametrize("name", pages.NAMES)
def test_links_lead_somewhere(name):
    """To a file that is there and, if they name one, to a heading of it."""
    page = ROOT / name
    for target, _, place in re.findall(
        r"\]\(([^)#\s]*)(#([^)\s]*))?\)", re.sub(r"<!-- site:.*?-->", "", pages.prose(name), flags=re.S)
    ):
        if "://" in target:
            continue
        aim = (page.parent / target).resolve() if target else page
        assert aim.exists(), f"{name} links to {target}"
        if place and aim.suffix == ".md":
            assert place in pages.anchors(aim), f"{name} links to {target}#{place}"


@pytest.mark.parametrize("name", pages.NAMES)
def test_figures_name_their_command(name):
    """In the section of a picture, or before the first section of its page, there is the command that makes it."""
    opening, *sections = re.split(r"^##+ ", pages.text_of(name), flags=re.M)
    named = re.compile(r"(?:`|^)(?:fedcomposite|make|python(?: -m)?) \w", re.M)
    for section in [opening, *sections]:
        for picture in re.findall(r"!\[[^]]*\]\(([^)]+)\)", section):
            drawn = picture.endswith(".svg")  # written by hand: it is its own source
            assert drawn or named.search(section) or named.search(opening), f"{name}: what makes {picture}?"
