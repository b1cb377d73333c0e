"""The law of refusals: a command that ends with 2 leaves every byte of an existing folder as it was."""

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
from safetensors.numpy import save_file

from fedcomposite.experiments import Config, ConfigError, RunFolder, comparison, execute
from fedcomposite.experiments.comparison import folder_names
from fedcomposite.experiments.sweeps import Sweep

pytestmark = pytest.mark.filterwarnings("ignore:.*leaves its proven range")

HEAD = """
name = "small"
[data]
name = "synthetic"
clients = 4
features = 5
samples = 12
[regularizer]
name = "l1"
lam = 0.003
[run]
rounds = 6
participation = 0.5
checkpoint_every = 2
"""
METHOD = 'name = "FedMid"\nlocal_steps = 4\nstep = 0.5\n'
RUN = f"{HEAD}[algorithm]\n{METHOD}"
COMPARE = f"{HEAD}[[algorithms]]\n{METHOD}[[algorithms]]\n{METHOD}label = 'second'\n"


def digest(folder):
    """Every file and folder with its content."""
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        found.update(str(path.relative_to(folder)).encode() + b"\0")
        found.update(path.read_bytes() if path.is_file() else b"folder")
    return found.hexdigest()


def records(folder):
    return [{**json.loads(line), "seconds": 0} for line in (folder / "history.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A finished run and a finished comparison, with their experiments."""
    place = tmp_path_factory.mktemp("made")
    (place / "run.toml").write_text(RUN)
    (place / "compare.toml").write_text(COMPARE)
    execute(Config.read(place / "run.toml"), RunFolder(place / "run"))
    (place / "compare").mkdir()
    comparison.compare(Config.read(place / "compare.toml"), place / "compare")
    return place


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    """Drawing takes longer than everything else here."""
    monkeypatch.setattr("fedcomposite.plots.draw_histories", lambda histories, path, *_, **__: path.write_bytes(b"x"))


@pytest.fixture
def old(made, tmp_path):
    """A copy of them that a test may change."""
    shutil.copytree(made, tmp_path / "old")
    return tmp_path / "old"


WISHES = {
    "unknown method": (["{m}.name=Fedmidd"], "unknown algorithm 'Fedmidd'"),
    "misspelt field": (["{m}.stepp=1"], "has no field 'stepp'"),
    "wrong value": (["{m}.step=-1"], "step = -1, must be a number > 0"),
    "huge integer": ([f"{{m}}.step={'9' * 400}"], "step is an integer of 400 digits"),
    "huge rounds": ([f"run.rounds={'9' * 400}"], "[run] rounds is an integer of 400 digits"),
    "label of a list": (['{m}.label=["a"]'], "label = ['a'], must be a string"),
    "method of a list": (['{m}.name=["FedMid"]'], "[algorithm] name = ['FedMid'], must be a string"),
    "unknown section": (["running.x=1"], "running is not a known field"),
    "rounds": (["run.rounds=-1"], "[run] rounds = -1"),
    "device": (["run.device=toaster"], "[run] device = 'toaster' cannot be used here"),
    "mode": (["run.mode=record"], "mode = 'record' is for device = 'cuda'"),
    "participation": (["{m}.name=Zhang"], "Zhang needs every client in every round"),
    "no rule for h": (["run.participation=1", "{m}.name=FedAvgM"], "FedAvgM has no rule for a regularizer"),
    "not convex": (["{m}.name=FedDA", "regularizer.name=scad"], "FedDA"),
    "step past 1/rho": (["regularizer.name=scad", "{m}.step=90.0"], "must be below 1/rho"),
    "state at clients": (["run.replace=true", "{m}.name=Scaffold"], "a client must not be drawn twice"),
    "unknown regularizer": (["regularizer.name=l7"], "unknown regularizer 'l7'"),
    "regularizer of a list": (['regularizer.name=["l1"]'], "[regularizer] name = ['l1'], must be a string"),
    "unknown data": (["data.name=synthetik"], "unknown data set 'synthetik'"),
    "data of a list": (['data.name=["synthetic"]'], "[data] name = ['synthetic'], must be a string"),
    "data option": (["data.client=3"], "has no option 'client'"),
    "missing file": (['data={files=["nowhere.csv"],target="y"}'], "nowhere.csv"),
    "labels of a regression": (['data={name="diabetes"}', "run.participation=1"], "[problem]"),
    "partition of a list": (['partition={name=["iid"],clients=3}'], "[partition] name = ['iid'], must be a string"),
    "too many clients": (['partition={name="iid",clients=3000}'], "[partition]"),
    "unknown loss": (["problem.loss=logistik"], "unknown loss 'logistik'"),
    "malformed": (["no"], "--set no: expected section.field=value"),
}
COMMANDS = {
    "run --overwrite": ("run", "algorithm"),
    "run --resume": ("run", "algorithm"),
    "compare --overwrite": ("compare", "algorithms.1"),
    "compare --resume": ("compare", "algorithms.1"),
}


@pytest.mark.parametrize("wish", WISHES)
@pytest.mark.parametrize("how", COMMANDS)
def test_a_wrong_wish_changes_nothing(old, cli, how, wish):
    verb, section = COMMANDS[how]
    settings, message = WISHES[wish]
    folder, before = old / verb, digest(old)
    target = ["--resume", folder] if "resume" in how else [old / f"{verb}.toml", "--out", folder, "--overwrite"]
    stderr = cli(verb, *target, *(f"--set={s.replace('{m}', section)}" for s in settings), check=2).err
    assert digest(old) == before
    assert stderr.startswith("error: ")
    if how == "run --overwrite":  # others may be refused for what is different from what is there
        assert message in stderr


def spoil_checkpoint(old):
    for path in (old / "run", old / "compare" / "second" / "seed-0"):
        (path / "checkpoint.safetensors").write_bytes((path / "checkpoint.safetensors").read_bytes()[:-40])
        (path / "summary.json").unlink()


def foreign_checkpoint(old):
    save_file({}, old / "run" / "checkpoint.safetensors")


def make_file(old):
    (old / "file").write_text("ten years of work")


def make_thesis(old):
    (old / "thesis").mkdir()
    (old / "thesis" / "thesis.txt").write_text("ten years of work")


def spoil_history(old):
    (old / "run" / "history.jsonl").write_text("{}\nnot JSON\n{}\n")


def spoil_model(old):
    (old / "run" / "model.safetensors").write_bytes(b"x")


def nothing(old):
    pass


OTHERS = {
    "another step": (nothing, "run --resume run --set algorithm.step=0.001", "belongs to a run with other data"),
    "another lam": (
        nothing, "compare --resume compare --set regularizer.lam=0.2", "was run with regularizer.lam = 0.003, not 0.2",
    ),
    "more rounds": (nothing, "compare --resume compare --set run.rounds=9", "was run with run.rounds = 6, not 9"),
    "spoilt checkpoint": (spoil_checkpoint, "run --resume run", "not a readable checkpoint"),
    "spoilt checkpoint in a comparison": (spoil_checkpoint, "compare --resume compare", "not a readable checkpoint"),
    "foreign checkpoint": (foreign_checkpoint, "run --resume run", "not a fedcomposite checkpoint"),
    "no folder": (nothing, "run --resume nowhere", "no config.toml there"),
    "both": (nothing, "run run.toml --resume run", "give a CONFIG, or --resume RUN"),
    "out and resume": (nothing, "run --resume run --out other", "--out cannot be given with --resume"),
    "overwrite and resume": (nothing, "run --resume run --overwrite", "--overwrite cannot be given with --resume"),
    "files there": (nothing, "run run.toml --out run", "already holds files"),
    "files there, compare": (nothing, "compare compare.toml --out compare", "already holds files"),
    "not a run": (make_thesis, "run run.toml --out thesis --overwrite", "is not a run folder"),
    "not a comparison": (make_thesis, "compare compare.toml --out thesis --overwrite", "is not a comparison"),
    "a file": (make_file, "run run.toml --out file --overwrite", "is a file; give another folder"),
    "below a file": (make_file, "run run.toml --out file/run", "cannot be created"),
    "run over a comparison": (nothing, "run run.toml --out compare --overwrite", "is a comparison"),
    "comparison over a run": (nothing, "compare compare.toml --out run --overwrite", "the folder of a single run"),
    "comparison from a run": (nothing, "compare --resume run", "the folder of a single run"),
    "run from a comparison": (nothing, "run --resume compare", "needs one [algorithm]"),
    "no such experiment": (nothing, "run nothing --out run --overwrite", "no such file"),
    "damaged history": (spoil_history, "plot run --out run/plot.png", "line 2 is not JSON"),
    "no picture": (nothing, "plot run --out run/plot.doc", "no picture is called .doc"),
    "axis": (nothing, "plot run --out run/plot.png --x miles", ""),
    "own file": (nothing, "export run --format safetensors --out run/model.safetensors", "is the run's own file"),
    "spoilt model": (spoil_model, "export run", "not a readable model"),
    "format": (nothing, "export run --format pickle", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_a_refusal_changes_nothing(old, cli, monkeypatch, name):
    spoil, line, message = OTHERS[name]
    spoil(old)
    before = digest(old)
    monkeypatch.chdir(old)
    assert message in cli(*line.split(), check=2).err
    assert digest(old) == before


def test_a_comparison_is_checked_before_anything_runs(tmp_path, cli):
    """The last of three methods cannot do this; today's first would have been run for nothing."""
    path = tmp_path / "c.toml"
    last = "[[algorithms]]\nname = 'FedDA'\nlocal_steps = 2\nstep = 0.1\n[[algorithms]]\nname = 'Zhang'\n"
    text = COMPARE.replace('"l1"', '"scad"') + last + "local_steps = 2\nstep = 0.1\n"
    path.write_text("seeds = [0, 1]\n" + text)
    lines = cli("compare", path, "--out", tmp_path / "c", check=2).err.splitlines()
    assert [line.split(":")[1] for line in lines] == [" FedDA", " Zhang"]  # both, and once for all seeds
    assert not (tmp_path / "c").exists()


def test_all_mistakes_are_told_at_once(tmp_path, cli):
    path = tmp_path / "c.toml"
    text = RUN.replace("rounds = 6", "rounds = -6\nround = 3").replace('"l1"', '"l7"').replace("clients", "client")
    path.write_text(text.replace("FedMid", "FedMidd") + "[model]\nname = 'mpl'\n")
    lines = cli("run", path, "--out", tmp_path / "r", check=2).err.splitlines()
    wanted = ["rounds = -6", "round is not", "'l7'", "'FedMidd'", "no option 'client'", "unknown model 'mpl'"]
    assert len(lines) == len(wanted)
    for line, words in zip(lines, wanted, strict=True):
        assert line.startswith("error: c.toml: ")
        assert words in line


def test_a_mistake_hides_no_other(tmp_path, cli):
    """Several in one table, wrong types beside wrong names, files, grids, methods that cannot take the regularizer."""
    path = tmp_path / "c.toml"
    path.write_text(
        "seeds = [0, 0]\n"
        "[data]\nfiles = ['no.csv', 'nowhere.csv']\ntarget = 'y'\n"
        "[partition]\nname = 'dirichlet'\nclients = 3\nalpa = 0.5\n"
        "[problem]\nbias = 'yes'\nloss = 'logistik'\nmetrics = ['auk']\n"
        "[regularizer]\nname = 'MCP'\nlam = 0.1\ntheta = 3.0\n"
        "[[algorithms]]\nname = 'FedMidd'\n"
        "[[algorithms]]\nname = 'FedMid'\nlocal_step = 3\nstep = -0.1\n"
        "[[algorithms]]\nname = 'FedDA'\nlocal_steps = 3\nstep = 0.1\n"
        "[[algorithms]]\nname = 'Zhang'\nlocal_steps = 3\nstep = 50.0\n"
        "[[algorithms]]\nname = 'FedAvg'\nlocal_steps = {grid = [3, 3]}\nstep = 0.1\n"
        "[[callbacks]]\nname = 'Csvv'\n[[callbacks]]\nname = 'EarlyStopping'\nmetric = 'loss'\npatience = 0\n"
        "[trials]\nseed = -3\n[run]\nrounds = 'many'\n"
    )
    wanted = [
        "algorithms.4.local_steps: grid = [3, 3] has a value twice",
        "[problem] bias = 'yes'",
        "[trials] seed = -3",
        "[run] rounds = 'many'",
        "unknown algorithm 'FedMidd'",
        "FedMid has no field 'local_step'; did you mean 'local_steps'?",
        "FedMid: step = -0.1, must be a number > 0",
        "seeds = [0, 0]",
        "[partition] partition 'dirichlet' has no option 'alpa'; did you mean 'alpha'?",
        "[problem] unknown loss 'logistik'",
        "[problem] unknown metric 'auk'",
        "[[callbacks]] unknown callback 'Csvv'",
        "[[callbacks]] EarlyStopping: patience = 0",
        "FedDA: FedDA needs a convex h",
        "Zhang: prox of MCP",
        "no.csv: no such file",
        "nowhere.csv: no such file",
    ]
    for command in (
        ("compare", path, "--out", tmp_path / "r"),
        ("run", path, "--out", tmp_path / "r"),
        ("solve", path),
    ):
        lines = cli(*command, check=2).err.splitlines()
        assert all(line.startswith("error: c.toml: ") for line in lines)
        assert not [words for words in wanted if not any(words in line for line in lines)]
        assert len(lines) == len(set(lines)) == len(wanted)
    assert not (tmp_path / "r").exists()


def test_a_federation_hears_all_mistakes_too():
    shape = pytest.importorskip("fedcomposite.federation.shape")
    text = (
        "[data]\nname = 'wine'\nweight = 'w'\n[recipe]\nlogg = ['a']\n[regularizer]\nname = 'l1'\nlam = -1\n"
        "[[algorithms]]\nname = 'FedMidd'\n[run]\nrounds = 3\nreplace = true\n"
    )
    with pytest.raises(ConfigError) as caught:
        shape.parse(text, "c.toml")
    lines = str(caught.value).splitlines()
    for words in ("lam = -1", "'FedMidd'", "logg", "[data] weight", "replace = true", "one [alg"):
        assert sum(words in line for line in lines) == 1, words
    with pytest.raises(ConfigError) as caught:  # nobody learns from it which files a site has
        shape.parse(text.replace("name = 'wine'", "files = ['secret.csv']"), "c.toml")
    assert "secret" not in str(caught.value)


def test_trials_and_recipes_say_all(tmp_path):
    content = {
        "data": {"files": ["a.csv"], "test": 3, "seed": -1, "weight": "w"},
        "recipe": {"drop": 3, "logg": ["a"]},
        "algorithm": {"name": "FedAvg", "local_steps": 0, "step": {"tune": [0.1, "x"]}},
        "trials": {"seed": "first"},
        "run": {"rounds": 1},
    }
    with pytest.raises(ConfigError) as caught:
        Sweep(content, "c").check()
    for words in ("a target", "test = 3", "seed = -1", "drop", "logg", "local_steps = 0", "'x'"):
        assert words in str(caught.value), words
    assert "[trials] seed = 'first'" in str(caught.value)


def test_byte_order_mark_and_endless_integer(tmp_path, cli):
    path = tmp_path / "c.toml"
    path.write_bytes(b"\xef\xbb\xbf" + RUN.encode())
    cli("run", path, "--out", tmp_path / "r", check=0)
    path.write_text(RUN.replace("rounds = 6", f"rounds = {'9' * 5000}"))
    assert "not valid TOML" in cli("run", path, "--out", tmp_path / "s", check=2).err


# -- comparisons -----------------------------------------------------------------------------------------------------


def test_labels_never_share_a_folder():
    labels = ["ours", "ours*", "ours?", "a b", "a-b", "a_b", "Ours", "", "ä", "a\u0308", "x" * 300, "x" * 301, "../up"]
    names = folder_names(labels)
    assert len({n.casefold() for n in names}) == len(labels)
    assert names[0] == "ours"
    assert names[4] == "a-b"
    assert all(len(n) < 100 and "/" not in n and n.strip(".-") for n in names)
    assert folder_names(["FedAvg", "FedNMap-2"]) == ["FedAvg", "FedNMap-2"]


@pytest.mark.parametrize("labels", [("ours", "ours*"), ("a b", "a-b"), ("Ours", "ours")])
def test_methods_with_similar_labels_keep_their_own_numbers(tmp_path, cli, labels):
    path = tmp_path / "c.toml"
    text = HEAD + "".join(
        f"[[algorithms]]\n{METHOD.replace('0.5', step)}label = '{label}'\n"
        for label, step in zip(labels, ("0.5", "0.01"), strict=True)
    )
    path.write_text(text)
    cli("compare", path, "--out", tmp_path / "c", check=0)
    rows = (tmp_path / "c" / "comparison.csv").read_text().splitlines()[1:]
    assert [row.split(",")[0] for row in rows] == list(labels)
    assert rows[0].split(",")[2:] != rows[1].split(",")[2:]
    runs = [p.parent for p in (tmp_path / "c").glob("*/seed-0/history.jsonl")]
    assert len({str(r.parent.name).casefold() for r in runs}) == 2
    assert records(runs[0]) != records(runs[1])


def test_numbered_labels_are_distinct():
    content = {
        "data": {"name": "synthetic"},
        "run": {"rounds": 1},
        "algorithms": [{"name": "FedMid", "local_steps": 1, "step": 0.1, **more} for more in ({}, {}, {"label": "x"})],
    }
    content["algorithms"][2]["label"] = "FedMid (2)"
    assert len(set(Config.check(content).labels)) == 3


# -- crashes ---------------------------------------------------------------------------------------------------------


class Dead(BaseException):
    """The process was killed: nothing that it meant to do is done any more."""


@pytest.fixture
def mortal(monkeypatch):
    """Lets a process die at its n-th change of the disk (replacing or removing a file)."""
    left = [-1]
    real = {name: getattr(os, name) for name in ("replace", "unlink")}

    def change(name):
        def call(path, *rest, **options):
            if Path(path).name == ".lock" or left[0] < 0:  # the kernel releases locks
                return real[name](path, *rest, **options)
            if left[0] <= 1:
                left[0] = 0
                raise Dead
            left[0] -= 1
            return real[name](path, *rest, **options)

        return call

    for name in real:
        monkeypatch.setattr(os, name, change(name))

    def set_to(n):
        left[0] = n

    return set_to


@pytest.mark.slow
@pytest.mark.parametrize("how", ["--overwrite", "--resume"])
def test_a_crash_at_any_time_leaves_the_old_run_or_the_new(made, tmp_path, cli, mortal, how):
    """Killed at its first, second, ... change of the disk; then it is resumed, and is one of the two to the bit."""
    setting = "algorithm.step=0.25" if how == "--overwrite" else "run.rounds=9"
    new = tmp_path / "new.toml"
    new.write_text(RUN)
    cli("run", new, "--out", tmp_path / "wanted", "--set", setting, check=0)
    both = [records(made / "run"), records(tmp_path / "wanted")]
    source = ["--resume"] if how == "--resume" else [new, "--overwrite", "--out"]
    died, outcomes = 0, set()
    for n in range(1, 100):
        folder = tmp_path / f"killed-{n}"
        shutil.copytree(made / "run", folder)
        mortal(n)
        try:
            cli("run", *source, folder, "--set", setting, check=0)
        except Dead:
            died += 1
        else:
            break
        finally:
            mortal(-1)
        seen = records(folder)
        assert seen
        assert any(seen == whole[: len(seen)] for whole in both)
        cli("run", "--resume", folder, check=0)
        assert not list(folder.glob(".*"))  # neither a lock nor a file half-written
        outcomes.add(both.index(records(folder)))
        shutil.rmtree(folder)
    assert died > 5
    assert outcomes == {0, 1}


def test_an_untouched_history_is_not_rewritten(old, cli):
    """A run that has nothing left to do keeps its records, to the last digit of their seconds."""
    before = (old / "run" / "history.jsonl").read_bytes()
    cli("run", "--resume", old / "run", check=0)
    assert (old / "run" / "history.jsonl").read_bytes() == before
    with (old / "run" / "history.jsonl").open("ab") as file:
        file.write(before.splitlines(keepends=True)[-1])  # of a round after the checkpoint
    cli("run", "--resume", old / "run", check=0)
    assert (old / "run" / "history.jsonl").read_bytes() == before


# -- whose mistake ----------------------------------------------------------------------------------------------------


def test_a_bug_is_not_the_users_mistake(made, tmp_path, cli, monkeypatch):
    def broken(*_):
        raise ValueError("a bug")

    monkeypatch.setattr("fedcomposite.algorithms.fedmid.FedMid.local_round", broken)
    arguments = ["run", made / "run.toml", "--out", tmp_path / "r"]
    stderr = cli(*arguments, check=1).err
    assert stderr.splitlines()[-1] == (
        "internal error: ValueError: a bug; run again with --debug and report what it shows"
    )
    assert "Traceback" not in stderr
    for debug in (["--debug", *arguments], [*arguments, "--debug"]):
        shutil.rmtree(tmp_path / "r")
        stderr = cli(*debug, check=1).err
        assert "Traceback" in stderr
        assert "in broken" in stderr
    monkeypatch.setenv("FEDCOMPOSITE_DEBUG", "1")
    stderr = cli("run", made / "run.toml", "--set", "algorithm.step=-1", "--out", tmp_path / "s", check=2).err
    assert "in validate" in stderr  # where it was found, though it was told in other words
    assert stderr.splitlines()[-1].startswith("error: run.toml: [algorithm] FedMid: step = -1")
