"""Names: ours, those of a file dropped into the package, and those of other packages."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import ClassVar, NamedTuple

import pytest
import torch

import fedcomposite as fc
from fedcomposite import _version
from fedcomposite.algorithms import REGISTRY, Algorithm, Empty, Info
from fedcomposite.cli import cite
from fedcomposite.experiments import Config
from fedcomposite.experiments.config import ConfigError
from fedcomposite.registry import Registry, RegistryError, of_class
from fedcomposite.testing import LAWS, check_algorithm

ROOT = Path(__file__).parent.parent
TUTORIAL = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "add-a-method.md").read_text(encoding="utf-8"), re.S)[0]

OTHERS = '''
"""A regularizer, a loss, a model, a data set and a partition."""
from dataclasses import dataclass

import numpy as np
from torch import nn

from fedcomposite import Silos
from fedcomposite.problems.losses import LeastSquares
from fedcomposite.regularizers import L1


@dataclass(frozen=True)
class DoubleL1(L1):
    """Twice the l1 norm."""

    def scaled(self, kappa):
        return DoubleL1(kappa * self.lam)


@dataclass(frozen=True)
class Halved(LeastSquares):
    """Least squares under another name."""


def ward(*, patients: int = 30) -> Silos:
    """Two wards."""
    rng = np.random.default_rng(0)
    return Silos.from_arrays([(X := rng.normal(size=(patients, 4)), X @ [1.0, 0.0, 0.0, 2.0])])


def alternating(silos, clients, minimum, rng):
    """Every other sample."""
    return [np.arange(i, len(silos.targets), clients) for i in range(clients)]


def net(shape, classes, width=3):
    """A small network."""
    return nn.Sequential(nn.Flatten(), nn.Linear(shape[0], width), nn.Tanh(), nn.Linear(width, classes))


number = 3
'''

ENTRIES = """
[fedcomposite.algorithms]
ServerMomentum = hospital.momentum:ServerMomentum
Gone = hospital.nowhere:Gone
Quits = hospital.quits:Quits
Renamed = hospital.momentum:ServerMomentum
Number = hospital.others:number
[fedcomposite.regularizers]
DoubleL1 = hospital.others:DoubleL1
[fedcomposite.losses]
halved = hospital.others:Halved
[fedcomposite.datasets]
ward = hospital.others:ward
[fedcomposite.partitions]
alternating = hospital.others:alternating
[fedcomposite.models]
ward-net = hospital.others:net
"""

CONFIG = """
[data]
name = "ward"
patients = 20
[partition]
name = "alternating"
clients = 4
[problem]
loss = "halved"
[regularizer]
name = "doublel1"
lam = 0.01
[algorithm]
name = "servermomentum"
steps = "auto"
[run]
rounds = 5
"""


def install(folder, name, version, entries, **modules):
    """Lay a package out as pip would: its modules, and a dist-info folder with its entry points."""
    for module, text in modules.items():
        path = folder / name / f"{module}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(entries)
    return folder


def installed_hospital(folder):
    return install(
        folder, "hospital", "1.2", ENTRIES, __init__="", momentum=TUTORIAL, others=OTHERS, quits="raise SystemExit(3)"
    )


@pytest.fixture(scope="module")
def hospital(tmp_path_factory):
    """A package that offers one of each kind, and some that cannot be used."""
    folder = installed_hospital(tmp_path_factory.mktemp("site"))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield folder
    for name in [name for name in sys.modules if name.split(".")[0] == "hospital"]:
        del sys.modules[name]


def command(*arguments, path=(), cwd=None):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *map(str, path)])}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment, cwd=cwd)


# -- other packages --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_names_of_another_package_in_a_configuration(tmp_path):
    """From a file to a run folder, in a process that never heard of the package."""
    folder = installed_hospital(tmp_path / "site")
    (tmp_path / "ward.toml").write_text(CONFIG)
    done = command("-m", "fedcomposite", "run", "ward.toml", "--out", "run", path=[folder], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "ServerMomentum on Silos(4 clients, 5 samples each, 4 features)" in done.stdout
    written = tomllib.loads((tmp_path / "run" / "config.toml").read_text())
    assert (written["algorithm"]["name"], written["data"]["patients"]) == ("ServerMomentum", 20)


def test_nothing_is_imported_before_it_is_named(hospital):
    assert REGISTRY["Zhang"] is fc.algorithms.Zhang
    assert "ServerMomentum" in REGISTRY.names()
    assert not any(name.split(".")[0] == "hospital" for name in sys.modules)
    assert REGISTRY["servermomentum"].__module__ == "hospital.momentum"
    assert "hospital.others" not in sys.modules


def test_every_kind(hospital):
    assert REGISTRY.origin("SERVERMOMENTUM") == "hospital 1.2"
    assert REGISTRY.origin("zhang") == "fedcomposite"
    for registry, name, line in (
        (fc.regularizers.REGISTRY, "DoubleL1", "Twice the l1 norm. (of hospital 1.2)"),
        (fc.problems.LOSSES, "halved", "Least squares under another name. (of hospital 1.2)"),
        (fc.data.DATASETS, "ward", "Two wards. (of hospital 1.2)"),
        (fc.data.PARTITIONERS, "alternating", "Every other sample. (of hospital 1.2)"),
        (fc.models.MODELS, "ward-net", "A small network. (of hospital 1.2)"),
    ):
        assert list(registry)[-1] == name
        assert registry.summary()[name] == line
        assert registry.problems() == {}
    config = Config.check(tomllib.loads(CONFIG))
    problem = config.make_problem()
    assert type(problem.smooth().loss).__name__ == "Halved"
    assert type(config.make_algorithm(config.specs[0], problem)).__name__ == "ServerMomentum"
    assert "title = {Server momentum for composite problems}" in fc.algorithms.cite("ServerMomentum")


def test_names_of_another_package_are_listed(hospital, cli):
    listed = cli("list", "algorithms", check=0)
    assert "(hospital 1.2)" in " ".join(listed.out.split())
    assert "the algorithm 'Gone' of hospital 1.2 cannot be used: ModuleNotFoundError" in listed.err


def test_a_method_of_another_package_is_under_contract(hospital):
    check_algorithm(REGISTRY["ServerMomentum"].auto(0.25, local_steps=3))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Gone", r"ModuleNotFoundError: No module named 'hospital.nowhere' \(hospital.nowhere:Gone\)"),
        ("quits", "SystemExit: 3"),
        ("Renamed", "the entry point must have the name of its class, ServerMomentum"),
        ("Number", "it must be a dataclass that derives from Algorithm"),
    ],
)
def test_what_cannot_be_used_says_so_when_it_is_named(hospital, name, reason):
    with pytest.raises(RegistryError, match=reason) as error:
        REGISTRY[name]
    assert "of hospital 1.2 cannot be used" in str(error.value)
    assert "\n" not in str(error.value)
    content = {**tomllib.loads(CONFIG), "algorithm": {"name": name, "step": 0.1}}
    with pytest.raises(ConfigError, match=r"^config: \[algorithm\] the algorithm .*" + reason):
        Config.check(content)
    assert name not in REGISTRY
    assert set(REGISTRY.names()) - set(REGISTRY) == {"Gone", "Quits", "Renamed", "Number"} == set(REGISTRY.problems())
    assert REGISTRY["FedAvg"] is fc.algorithms.FedAvg


def test_a_name_belongs_to_one(tmp_path, monkeypatch):
    two = "\n[fedcomposite.algorithms]\nzhang = one:Zhang\nTwice = one:Twice\n"
    install(tmp_path, "one", "2.0", two)
    install(tmp_path, "other", "0.3", "[fedcomposite.algorithms]\ntwice = other:Twice\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(RegistryError, match=r"'Zhang' is offered by fedcomposite and by one 2.0: one of them has to"):
        REGISTRY["Zhang"]
    with pytest.raises(RegistryError, match=r"'TWICE' is offered by \w+ \d\.\d and by \w+ \d\.\d") as error:
        REGISTRY["TWICE"]
    assert "one 2.0" in str(error.value)
    assert "other 0.3" in str(error.value)
    with pytest.raises(ConfigError, match=r"offered by fedcomposite and by one 2\.0"):
        Config.check({"data": {"name": "wine"}, "algorithm": {"name": "Zhang"}, "run": {"rounds": 1}})
    assert "Zhang" not in REGISTRY  # nobody takes one for the other
    assert fc.algorithms.Zhang(local_steps=1, step=0.1)
    assert set(fc.algorithms._OURS) - set(REGISTRY) == {"Zhang"}


# -- the mapping -----------------------------------------------------------------------------------------------------


def test_a_registry_is_a_mapping():
    colours = Registry("colour", {"Red": 1, "dark_blue": 2}, group="fedcomposite.colours")
    assert dict(colours) == {"Red": 1, "dark_blue": 2}
    assert (colours["RED"], colours["Dark-Blue"], colours.get("green"), "red" in colours) == (1, 2, None, True)
    assert colours.canonical("DARK-blue") == "dark_blue"
    with pytest.raises(RegistryError, match=r"^unknown colour 'dark_bleu'; did you mean 'dark_blue'\? \(known: Red"):
        colours["dark_bleu"]
    with pytest.raises(ValueError, match=r"unknown colour \['Red'\]"):
        colours[["Red"]]
    with pytest.raises(TypeError):
        colours["green"] = 3


@pytest.mark.parametrize(
    ("registry", "name", "suggestion"),
    [
        (fc.data.DATASETS, "heart_diseas", "heart_disease"),
        (fc.data.PARTITIONERS, "dirichle", "dirichlet"),
        (fc.problems.LOSSES, "Logistics", "logistic"),
        (fc.models.MODELS, "zhang-cn", "zhang-cnn"),
        (fc.regularizers.REGISTRY, "l11", "L1"),
        (REGISTRY, "fednmapp", "FedNMap"),
    ],
)
def test_unknown_names_come_with_a_suggestion(registry, name, suggestion):
    with pytest.raises(RegistryError, match=f"unknown {registry.kind} '{name}'; did you mean '{suggestion}'"):
        registry[name]
    assert registry[suggestion.upper()] is registry[suggestion]


def test_names_whatever_their_case():
    silos = fc.data.load("Wine").partition("IID", clients=2)
    assert len(silos) == 2
    with pytest.raises(fc.DataError, match="unknown data set 'whine'; did you mean 'wine'"):
        fc.data.load("whine")
    with pytest.raises(fc.DataError, match="unknown partition 'idi'"):
        silos.partition("idi", clients=2)


def test_entry_points_must_lead_to_what_is_registered():
    accept = of_class(Algorithm)
    assert accept("zhang", fc.algorithms.Zhang) is fc.algorithms.Zhang
    with pytest.raises(TypeError, match="dataclass that derives from Algorithm"):
        accept("L1", fc.regularizers.L1)


# -- one file --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dropped(tmp_path_factory):
    """A copy of the package with the tutorial's file in it, and nothing else changed."""
    root = tmp_path_factory.mktemp("clone")
    source = Path("src", "fedcomposite")
    shutil.copytree(ROOT / source, root / source, ignore=shutil.ignore_patterns("__pycache__"))
    (root / source / "algorithms" / "momentum.py").write_text(TUTORIAL)
    shutil.copy(ROOT / "pyproject.toml", root)
    return root


@pytest.mark.slow
def test_a_method_in_one_file(dropped):
    """Found and configurable, without regenerating anything."""
    (dropped / "probe.py").write_text(
        "import fedcomposite as fc\n"
        "from fedcomposite.experiments import Config\n"
        f"assert fc.__file__.startswith({str(dropped)!r})\n"
        "assert fc.algorithms.REGISTRY['servermomentum'] is fc.algorithms.ServerMomentum\n"
        "assert fc.algorithms.ServerMomentum.__module__ == 'fedcomposite.algorithms.momentum'\n"
        "content = {'data': {'name': 'wine'}, 'run': {'rounds': 1}}\n"
        "config = Config.check({**content, 'algorithm': {'name': 'ServerMomentum', 'step': 0.1}})\n"
        "assert config.labels == ['ServerMomentum']\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(dropped / "src")}
    done = subprocess.run([sys.executable, "probe.py"], capture_output=True, text=True, env=environment, cwd=dropped)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_method_in_one_file_is_under_contract(dropped):
    """And no trouble for the tables."""
    environment = {**os.environ, "PYTHONPATH": str(dropped / "src")}
    tests = [str(ROOT / "tests" / name) for name in ("test_contract.py", "test_docs.py")]
    chosen = ["-q", "-p", "no:cacheprovider", "-k", "ServerMomentum or tables"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *tests, *chosen], capture_output=True, text=True, env=environment, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_the_tutorials_file_passes_the_linters(dropped):
    pytest.importorskip("mypy", reason="the linters are not installed")
    file = "src/fedcomposite/algorithms/momentum.py"
    environment = {**os.environ, "PYTHONPATH": ""}
    for arguments in (
        ["ruff", "check", "--no-cache", file],
        ["ruff", "format", "--no-cache", "--check", file],
        ["mypy", "--strict", "--cache-dir", str(ROOT / ".mypy_cache"), "-m", "fedcomposite.algorithms.momentum"],
    ):
        done = subprocess.run(
            [sys.executable, "-m", *arguments], capture_output=True, text=True, env=environment, cwd=dropped
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_unknown_attributes_are_errors():
    with pytest.raises(AttributeError, match="has no attribute 'FedAgv'"):
        fc.algorithms.FedAgv  # noqa: B018
    assert not hasattr(fc.algorithms, "zhangg")


def test_type_checkers_see_every_method():
    """Every file's class is really imported, so that no checker needs to know of the registry."""
    text = (ROOT / "src" / "fedcomposite" / "algorithms" / "__init__.py").read_text()
    assert "globals()" not in text
    ours = {name: cls for name, cls in REGISTRY.items() if cls.__module__.startswith("fedcomposite.algorithms.")}
    assert "ChordNewton" in ours
    for name, cls in ours.items():
        assert name in fc.algorithms.__all__, f"import {name} in algorithms/__init__.py, and name it in __all__"
        assert vars(fc.algorithms).get(name) is cls


# -- the contract ----------------------------------------------------------------------------------------------------


class Model(NamedTuple):
    x: torch.Tensor


@dataclass
class Careless(Algorithm[Model, Empty, Model, Model]):
    """Not frozen, and random: it breaks several laws at once."""

    info: ClassVar[Info] = Info("Nobody: Nothing", 2026, regularizer="none", participation="full", exact=False)
    step: float = 0.1

    def init(self, x0, h):
        return Model(x0), Empty()

    def broadcast(self, server):
        return server

    def local_round(self, message, client, grad, h):
        return Model(grad(message.x, 0) + torch.randn_like(message.x)), client

    def aggregate(self, server, reply, share, h):
        return Model(server.x - self.step * reply.x)

    def solution(self, server, h):
        return server.x


def test_every_broken_law_is_reported():
    with pytest.raises(AssertionError) as error:
        check_algorithm(Careless())
    lines = str(error.value).splitlines()
    names = [line.partition(":")[0] for line in lines[1:]]
    assert lines[0] == f"Careless breaks {len(names)} of {len(LAWS)} laws:"
    assert {"frozen_dataclass", "stacked_equals_loop", "deterministic", "resume_is_exact"} <= set(names)
    assert "must be frozen" in lines[1]


# -- papers ----------------------------------------------------------------------------------------------------------


def references():
    text = resources.files("fedcomposite").joinpath("references.bib").read_text(encoding="utf-8")
    return {key: dict(re.findall(r"^  (\w+) = \{(.*)\},?$", body, re.M)) for key, body in re.findall(
        r"^@\w+\{(\w+),\n(.*?)^\}$", text, re.M | re.S
    )}  # fmt: skip


@pytest.mark.parametrize("name", fc.algorithms._OURS)
def test_every_method_can_be_cited(name, capsys):
    info = REGISTRY[name].info
    cite.cite(name.lower())
    printed = capsys.readouterr().out.strip()
    assert printed == fc.algorithms.cite(name)
    assert printed.count("{") == printed.count("}")
    if not info.bibtex:
        assert f"year = {{{info.year}}}" in printed
        return
    entry = references()[info.bibtex]
    assert printed.splitlines()[0].endswith(f"{{{info.bibtex},")
    assert {"author", "title", "year"} <= set(entry)
    assert entry["year"] == str(info.year)
    assert (entry.get("doi", ""), entry.get("eprint", "")) == (info.doi, info.arxiv)
    assert info.doi or re.fullmatch(r"\d{4}\.\d{5}", info.arxiv)
    plain = re.sub(r"\{\\.(\w)\}|[{}]", r"\1", entry["author"])
    firsts = [author.partition(",")[0].split()[-1] for author in plain.split(" and ")]
    assert info.paper.startswith(firsts[0].partition("-")[0])


def test_references_are_used_and_found():
    used = {cls.info.bibtex for cls in REGISTRY.values()} - {""}
    assert used == set(references())


def test_secondary_sources_are_marked():
    marked = {name for name, cls in REGISTRY.items() if cls.info.secondary}
    assert marked >= {"FedAvgM", "ScaffoldM", "Mime", "MimeLite", "STEM", "GradSkip", "EControlDA"}
    said = {name for name, cls in fc.algorithms._OURS.items() if "from memory" in sys.modules[cls.__module__].__doc__}
    assert said <= marked


def test_citation_file_has_what_the_format_requires():
    lines = (ROOT / "CITATION.cff").read_text(encoding="utf-8").splitlines()
    fields = {line.partition(":")[0] for line in lines if line[:1].isalpha()}
    assert {"cff-version", "message", "title", "authors"} <= fields
    assert "cff-version: 1.2.0" in lines
    assert f"version: {_version.__version__}" in lines
    assert any(line.startswith("  - name: ") for line in lines)


def test_citing_an_unknown_method_is_a_wrong_usage(capsys):
    with pytest.raises(SystemExit) as ended:
        cite.cite("FedNobody")
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("error: unknown algorithm 'FedNobody'")


MORE = '''
"""A metric, an aggregator, a compressor, a callback, a schedule and a loss that is a function."""
from dataclasses import dataclass

from fedcomposite.aggregators import CoordinateMedian
from fedcomposite.callbacks import Callback
from fedcomposite.compressors import Identity
from fedcomposite.metrics import Accuracy
from fedcomposite.schedules import Schedule


@dataclass(frozen=True)
class Hits(Accuracy):
    """Accuracy under another name."""

    name = "hits"


@dataclass(frozen=True)
class Middle(CoordinateMedian):
    """The median under another name."""


@dataclass(frozen=True)
class Whole(Identity):
    """All of it."""


@dataclass(frozen=True)
class Brief(Callback):
    """Ends a run."""

    after: int = 2

    def __call__(self, view):
        if view.round >= self.after:
            view.stop("brief")


@dataclass(frozen=True)
class Saw(Schedule):
    """High, low, high, low."""

    high: float

    def formula(self, round):
        return self.high / (1 + round % 2)


def squares(z, b):
    """Half of the squares."""
    return (z - b).square() / 2
'''

MORE_ENTRIES = """
[fedcomposite.metrics]
hits = clinic.more:Hits
[fedcomposite.aggregators]
Middle = clinic.more:Middle
[fedcomposite.compressors]
Whole = clinic.more:Whole
[fedcomposite.callbacks]
Brief = clinic.more:Brief
[fedcomposite.schedules]
saw = clinic.more:Saw
[fedcomposite.losses]
squares = clinic.more:squares
"""

MORE_CONFIG = """
[data]
name = "synthetic"
clients = 5
[problem]
loss = "squares"
[algorithm]
name = "FedAvg"
local_steps = 2
step = { schedule = "saw", high = 0.1 }
[[callbacks]]
name = "Brief"
[run]
rounds = 5
"""


def test_entry_points_of_every_other_kind(tmp_path, monkeypatch):
    """By name in a file: what Python takes as an object or a function."""
    install(tmp_path, "clinic", "0.1", MORE_ENTRIES, __init__="", more=MORE)
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        content = tomllib.loads(MORE_CONFIG)
        config = Config.check(content)
        problem = config.make_problem()
        step = config.make_algorithm(config.specs[0], problem).step
        assert (step(0), step(1)) == (0.1, 0.05)
        assert step.table == content["algorithm"]["step"]
        x = torch.ones(problem.dimension).double()
        plain = fc.Problem(problem.silos, loss="least_squares")
        torch.testing.assert_close(problem.gradient(x), plain.gradient(x))
        made = config.make_callbacks(tmp_path)
        assert (
            fc.simulate(problem, config.make_algorithm(config.specs[0], problem), rounds=5, callbacks=made).rounds == 2
        )
        robust = Config.check(content | {"run": {"rounds": 2, "aggregator": {"name": "Middle"}}})
        assert type(robust.make_aggregator()).__name__ == "Middle"
        algorithm = content["algorithm"] | {"compressor": {"name": "Whole"}}
        sent = Config.check(content | {"algorithm": algorithm, "problem": {"metrics": ["hits"]}})
        assert type(sent.make_algorithm(sent.specs[0], None).compressor).__name__ == "Whole"
        assert "train_hits" in sent.make_problem().evaluate(x).metrics
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "clinic"]:
            del sys.modules[name]
