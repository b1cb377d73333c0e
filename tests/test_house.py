"""The rooms of the house: imports point down, and a function fits a screen."""

import ast
import collections
import functools
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fedcomposite

HOME = Path(fedcomposite.__file__).parent
PER_METHOD = {"Server", "Client", "Message", "Reply", "Model"}  # what a method's file calls its own tuples
FILES = sorted(HOME.rglob("*.py"))
FLOORS = [  # from the ground up; rooms of one floor may use each other only where a line says so
    ["_version", "_faults", "_validation", "fields", "rng", "durable", "files", "locks", "plots", "results"],
    ["registry", "schedules"],
    ["regularizers", "compressors", "data", "aggregators", "privacy"],
    ["models", "algorithms"],
    ["problems", "compressed"],
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
    ("files", "durable"),
    ("schedules", "registry"),
    ("locks", "_faults"),
    ("compressors", "regularizers"),
    ("data", "privacy"),
    ("metrics", "theory"),
    ("papers", "analysis"),
}
IMPORTED_TESTS = re.compile(r"^\s*(?:from|import) +(test_\w+)")  # also in programs that a test writes into a string
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


def test_methods_are_documented_where_they_are_first_named():
    """A method or property that overrides a documented one needs no docstring; any other public one has its own."""
    bare = []
    for found in pkgutil.walk_packages(fedcomposite.__path__, "fedcomposite."):
        if found.name.endswith("__main__"):
            continue
        try:
            module = importlib.import_module(found.name)
        except ModuleNotFoundError as error:
            if str(error.name).startswith("fedcomposite"):
                raise
            continue  # an extra that is not installed
        own = [c for c in vars(module).values() if inspect.isclass(c) and c.__module__ == found.name]
        for cls in (c for c in own if not c.__name__.startswith("_") and not getattr(c, "_is_protocol", False)):
            for name, thing in vars(cls).items():
                code = isinstance(thing, property | functools.cached_property) or inspect.isroutine(thing)
                said = any(vars(base)[name].__doc__ for base in cls.__mro__ if name in vars(base))
                if code and not said and not name.startswith("_") and getattr(thing, "__name__", name) == name:
                    bare.append(f"{found.name}.{cls.__qualname__}.{name}")
    for file in (HOME / "algorithms").glob("*.py"):  # where a method's tuples are told by their fields
        found = [n for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.ClassDef)]
        told = (n for n in found if not n.name.startswith("_") and n.name not in PER_METHOD)
        bare += [f"{file.stem}.{n.name}" for n in told if not ast.get_docstring(n)]
    assert bare == []


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(HOME)))
def test_old_ways_are_gone(file):
    text = file.read_text()
    assert "globals().update" not in text
    if room_of(file) != "runtime":
        assert "is_compiling" not in text


ON_TWO_FLOORS = {"Query"}  # a table's and an accountant's


def test_one_name_is_one_thing():
    """No two public classes have one name, but for a method's tuples and the theory of a method, and no two modules."""
    classes, modules = collections.defaultdict(set), collections.Counter()
    for file in (f for f in FILES if room_of(f) != "theory"):
        modules[file.stem] += 1
        found = [n.name for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.ClassDef)]
        for name in (n for n in found if not n.startswith("_") and n not in PER_METHOD | ON_TWO_FLOORS):
            classes[name].add(str(file.relative_to(HOME)))
    assert {name: files for name, files in classes.items() if len(files) > 1} == {}
    again = {name for name, count in modules.items() if count > 1}
    assert again <= {"__init__", "base", "estimators", "errors", "metrics"}  # the last three are front doors


def test_no_test_module_imports_another():
    """What several of them use is in a module of its own beside them, so that any file of tests runs alone."""
    for file in Path(__file__).parent.glob("*.py"):
        found = [n for line in file.read_text().splitlines() for n in IMPORTED_TESTS.findall(line)]
        assert not found, f"{file.name} imports {found}"


def test_the_package_starts_without_the_compiler():
    """PyTorch's compiler takes as long to import as all the rest; only what compiles pays for it."""
    code = "import sys; from fedcomposite import *; import fedcomposite.cli.runs, fedcomposite.cli.data; "
    code += "print('torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
