"""The rooms of the house: imports point down, and a function fits a screen."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import fedcomposite

HOME = Path(fedcomposite.__file__).parent
FILES = sorted(HOME.rglob("*.py"))
FLOORS = [  # from the ground up; rooms of one floor may use each other only where a line says so
    ["_version", "_faults", "_validation", "fields", "rng", "files", "plots", "results"],
    ["registry", "schedules"],
    ["regularizers", "compressors", "data", "aggregators", "privacy"],
    ["models", "algorithms"],
    ["problems"],
    ["theory", "metrics"],
    ["runtime", "choice"],
    ["callbacks", "exporting"],
    ["experiments"],
    ["federation"],
    ["analysis", "papers"],
    ["testing", "reports"],
    ["cli"],
]
LEVEL = {room: level for level, floor in enumerate(FLOORS) for room in floor}
NEIGHBOURS = {
    ("_validation", "_faults"),
    ("fields", "_validation"),
    ("rng", "_validation"),
    ("files", "_validation"),
    ("compressors", "regularizers"),
    ("metrics", "theory"),
    ("papers", "analysis"),
}
ENTRANCES = {"__init__", "__main__", "py", "estimators", "errors"}  # the package's own front doors see everything


def room_of(file):
    parts = file.relative_to(HOME).parts
    return parts[0].removesuffix(".py")


def imported(file):
    """Modules of the package that a file imports, anywhere in it, except for annotations alone."""
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.startswith("fedcomposite."))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "fedcomposite":
            if node.module == "fedcomposite":
                yield from (f"fedcomposite.{a.name}" for a in node.names)
            else:
                yield node.module


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(HOME)))
def test_imports_point_down(file):
    here = room_of(file)
    if here in ENTRANCES:
        return
    for name in imported(file):
        there = name.split(".")[1]
        if there.startswith("__"):  # the version
            continue
        allowed = there == here or LEVEL[there] < LEVEL[here] or (here, there) in NEIGHBOURS
        assert allowed, f"{file.relative_to(HOME)} is on floor {LEVEL[here]} and imports {name} of floor {LEVEL[there]}"


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(HOME)))
def test_a_function_fits_a_screen(file):
    """At most 60 lines of code, the signature among them, the docstring not; a file is as long as its one concept."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            said = node.body[0]
            told = said.end_lineno - said.lineno + 1 if ast.get_docstring(node) is not None else 0
            lines = node.end_lineno - node.lineno + 1 - told
            assert lines <= 60, f"{node.name} has {lines} lines"


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(HOME)))
def test_old_ways_are_gone(file):
    text = file.read_text()
    assert "globals().update" not in text
    if room_of(file) != "runtime":
        assert "is_compiling" not in text


def test_the_package_starts_without_the_compiler():
    """PyTorch's compiler takes as long to import as all the rest; only what compiles pays for it."""
    code = "import sys; from fedcomposite import *; import fedcomposite.cli.runs, fedcomposite.cli.data; "
    code += "print('torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
