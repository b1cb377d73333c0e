"""What is loaded only when it is used: the names of the package, and the commands."""

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.main import get_command

import fedcomposite as fc
from fedcomposite.cli import lazy
from fedcomposite.cli.main import Commands, app

HEAVY = ("torch", "numpy", "pandas", "scipy", "sklearn", "matplotlib", "pydantic", "flwr", "nvflare")


@pytest.mark.parametrize("words", [["--help"], ["--version"], [], ["runn"]], ids=" ".join)
def test_help_loads_nothing_heavy(words):
    code = (
        "import sys, atexit; from fedcomposite.cli import main; sys.argv = ['fedcomposite', *sys.argv[1:]]; "
        f"atexit.register(lambda: print('loaded:', [n for n in {HEAVY} if n in sys.modules])); main()"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    assert done.returncode == (0 if words[:1] in (["--help"], ["--version"]) else 2), done.stderr
    assert done.stdout.strip().splitlines()[-1] == "loaded: []"


def test_help_says_what_the_commands_say_themselves():
    """The words of the help page are known before a command is loaded; they are the first paragraph of its own."""
    group = get_command(app)
    assert list(group.commands) == group.list_commands(None) == list(Commands.entries)
    for name, entry in Commands.entries.items():
        command = group.commands[name]
        assert command.name == name
        assert " ".join(inspect.cleandoc(command.help).split("\n\n")[0].split()) == entry.help


def test_a_command_that_cannot_be_imported_is_an_error_of_its_own():
    entry = lazy.LazyCommand("fedcomposite.cli.no_such_module:run", "Run.")
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        lazy.CommandTable({"run": entry})["run"]


def test_parties_of_a_federation_load_neither_pictures_nor_engines():
    """Each of them is a process that has to start; garbage is looked for again afterwards."""
    code = (
        "import gc, sys; from fedcomposite.cli.lazy import load; load('fedcomposite.cli.federation:federation_app'); "
        "heavy = ('matplotlib', 'scipy.stats', 'sklearn', 'nvflare', 'flwr'); "
        "print(gc.isenabled(), [n for n in heavy if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True []"


LIGHT = {
    "serve": tuple(name for name in HEAVY if name != "pydantic"),
    "join": ("sklearn", "matplotlib", "fedcomposite.analysis"),
}


@pytest.mark.parametrize("party", LIGHT)
def test_parties_that_start_with_machines_load_little(party):
    code = (
        "import sys, atexit; from fedcomposite.cli import main; "
        f"sys.argv = ['fedcomposite', 'federation', '{party}', 'nowhere']; "
        f"atexit.register(lambda: print('loaded:', [n for n in {LIGHT[party]} if n in sys.modules])); main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "nowhere: no " in done.stderr
    assert done.stdout.strip().splitlines()[-1] == "loaded: []"


def test_every_public_name_is_found_where_a_type_checker_finds_it():
    """Three lists say what the package offers: imports for type checkers, `__all__`, and where a name lives."""
    tree = ast.parse(Path(fc.__file__).read_text())
    (typed,) = [n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    seen = {}
    for node in typed.body:
        for alias in node.names:
            seen[alias.name] = node.module
    assert {*seen, "UserError", "__version__"} == set(fc.__all__)
    for name, module in seen.items():
        found = getattr(fc, name)
        if module != "fedcomposite":
            __import__(module)
            assert found is getattr(sys.modules[module], name)
        else:
            assert found is sys.modules[f"fedcomposite.{name}"]
    assert set(fc.__all__) <= set(dir(fc))


def test_callbacks_are_imported_by_their_short_name():
    """`from fedcomposite.callbacks import X` needs a module; its names are the runtime's, and it loads on demand."""
    from fedcomposite.callbacks import EarlyStopping
    from fedcomposite.runtime import callbacks

    assert EarlyStopping is callbacks.EarlyStopping is fc.callbacks.EarlyStopping
    assert fc.callbacks.__all__ == callbacks.__all__
    for name in callbacks.__all__:
        assert getattr(fc.callbacks, name) is getattr(callbacks, name)
    code = "import sys, fedcomposite; print([n for n in ('torch', 'fedcomposite.callbacks') if n in sys.modules]); "
    code += "from fedcomposite.callbacks import *; print(BestModel.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["[]", "BestModel"]


def test_names_that_are_not_there():
    with pytest.raises(AttributeError, match="module 'fedcomposite' has no attribute 'Problme'"):
        fc.Problme  # noqa: B018
    with pytest.raises(ImportError, match="Problme"):
        from fedcomposite import Problme  # noqa: F401
    assert not hasattr(fc, "__wrapped__")
    assert isinstance(app, typer.Typer)


def test_a_module_that_lacks_a_package_says_which(monkeypatch):
    monkeypatch.delitem(sys.modules, "fedcomposite.aggregators", raising=False)
    monkeypatch.delattr(fc, "aggregators", raising=False)
    monkeypatch.setitem(sys.modules, "fedcomposite.registry", None)
    with pytest.raises(ModuleNotFoundError, match="registry"):
        fc.aggregators  # noqa: B018


def test_a_simulation_needs_no_more_than_the_core_of_the_core():
    """Without command line, pictures and scikit-learn: what CONTRIBUTING says of the dependencies."""
    code = """
import sys
for name in ("matplotlib", "rich", "sklearn", "tomli_w", "typer", "click"):
    sys.modules[name] = None
import fedcomposite as fc
silos = fc.data.load("synthetic", clients=3, features=4, samples=10, seed=0)
problem = fc.Problem(silos, loss="logistic", regularizer=fc.regularizers.L1(0.01))
print(fc.simulate(problem, fc.algorithms.Zhang(local_steps=2, step=0.1), rounds=3).status)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "completed", done.stderr


def test_the_old_name_of_the_analyst_s_room_still_works_and_warns():
    from fedcomposite import estimators

    with pytest.warns(DeprecationWarning, match="fedcomposite.analysis.solve"):
        assert estimators.solve is fc.solve
