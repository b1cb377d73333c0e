"""What the documents show must work, and must not lag behind the code."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def blocks(name):
    return re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(encoding="utf-8"), re.S)


@pytest.mark.parametrize("name", ["README.md", "docs/add-a-method.md", "docs/metrics.md"])
def test_python_blocks_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scope = {"__name__": "shown"}
    for block in blocks(name):
        # a dataclass looks its annotations up in its module, so the block gets a real one
        path = tmp_path / "shown.py"
        path.write_text(block)
        scope = {**scope, **runpy.run_path(str(path), init_globals=scope, run_name="shown")}


def test_tables_of_methods_are_up_to_date():
    tables = runpy.run_path(str(ROOT / "docs" / "make_tables.py"))
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    assert tables["readme"](page) == page, "run python docs/make_tables.py"
    assert tables["methods_page"]() == (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")


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
