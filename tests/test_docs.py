"""What the documents show must work, and must not lag behind the code."""

import re
import runpy
from pathlib import Path

import pytest

from fedcomposite import algorithms

ROOT = Path(__file__).parent.parent


def blocks(name):
    return re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(encoding="utf-8"), re.S)


@pytest.mark.parametrize(
    "name",
    [
        "README.md",
        "docs/add-a-method.md",
        "docs/analyst.md",
        "docs/callbacks.md",
        "docs/estimators.md",
        "docs/metrics.md",
        "docs/own-data.md",
        "docs/preparation.md",
        "docs/privacy.md",
        "docs/robust.md",
        "docs/training.md",
    ],
)
def test_python_blocks_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scope = {"__name__": "shown"}
    for block in blocks(name):
        # a dataclass looks its annotations up in its module, so the block gets a real one
        path = tmp_path / "shown.py"
        path.write_text(block)
        scope = {**scope, **runpy.run_path(str(path), init_globals=scope, run_name="shown")}


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


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("plot_*.py")), ids=lambda p: p.stem)
def test_examples_run(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(path), run_name="__main__")
    assert list(tmp_path.glob("*.png"))


@pytest.mark.parametrize(
    "path",
    sorted(p for p in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]),
    ids=lambda p: p.name,
)
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)#]+)", path.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (path.parent / target).exists(), f"{path.name} links to {target}"
