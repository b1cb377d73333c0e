"""Problems that several tests share."""

import os
import signal
import sys
from pathlib import Path

import pytest
import torch

import fedcomposite as fc

pytest.register_assert_rewrite("analyst")
torch.set_num_threads(1)
# Tests kill processes, which lose nothing that they wrote; only a power cut would, and waiting for disks takes long.
os.fsync = lambda descriptor: None

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A job started in the background ignores Ctrl-C, and so would the processes that the tests start and interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Modules that tests share have no tests of their own, and some need an extra: without it they are not opened.
collect_ignore = [p.name for p in Path(__file__).parent.glob("*.py") if not p.name.startswith("test_")]

PROCESSES = (
    "test_federation_real.py", "test_federation_analysis_real.py", "test_secure_real.py",
    "test_operations.py", "test_federation_survival_real.py", "test_consortium_real.py",
)  # fmt: skip
LONGEST = (
    *PROCESSES, "test_docs.py", "test_federation.py", "test_contract.py", "test_auto.py", "test_benchmarks.py",
    "test_papers.py", "test_methods_second.py", "test_cli.py", "test_federation_analysis.py", "test_regularizers.py",
    "test_methods_first.py", "test_secure.py",
)  # fmt: skip


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """What takes longest comes first, so that the other workers run beside it; real processes have a mark."""
    rank = {name: i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.name, len(LONGEST)))
    for item in items:
        if item.path.name in PROCESSES:
            item.add_marker("processes")
        if item.path.name == "test_site.py":
            item.add_marker("site")


@pytest.fixture
def double(monkeypatch):
    """Networks in float64 unless told otherwise, for tests that compare to the last digits."""
    monkeypatch.setattr(fc.Problem, "dtype", torch.float64)


@pytest.fixture
def two_threads():
    """A process whose user has set two threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def silos():
    """The heterogeneous silos of the acceptance tests: n = 30, d = 20, m = 100."""
    return fc.data.load("synthetic", clients=30, features=20, samples=100, alpha=1.0, beta=1.0, seed=0)


@pytest.fixture(scope="session")
def lasso(silos):
    """Sparse logistic regression on them."""
    return fc.Problem(silos, loss="logistic", regularizer=fc.regularizers.L1(0.003))


@pytest.fixture(scope="session")
def real_data():
    """The folder of real data sets, or a skip that says how to get it."""
    folder = os.environ.get("FEDCOMPOSITE_DATA", "")
    if not folder or not Path(folder).is_dir():
        pytest.skip("FEDCOMPOSITE_DATA does not name a folder with the real data sets")
    return Path(folder)


@pytest.fixture(scope="session")
def browser():
    """A real browser, or a skip that says what is missing."""
    import browser as module

    if reason := module.missing():
        pytest.skip(reason)
    with module.started() as made:
        yield made


@pytest.fixture
def cli(capsys, monkeypatch):
    """The command's entry point without the price of a new process: checks the exit code, returns what was printed."""
    from fedcomposite import cli as module

    for console in (module.out, module.err):
        monkeypatch.setattr(console, "_width", 400)

    def call(*arguments, check):
        monkeypatch.setattr(sys, "argv", ["fedcomposite", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            module.main()
        seen = capsys.readouterr()
        assert stop.value.code == check, seen
        return seen

    return call
