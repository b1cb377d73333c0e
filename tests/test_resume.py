"""Analyses that were killed go on from the log of answers: the same bits, nothing asked twice, nothing mixed up."""

import contextlib
import io
import json
import os
import random
import re
import signal
import stat
import subprocess
import sys
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import fedcomposite as fc
from fedcomposite._faults import UserError
from fedcomposite.cli.main import app
from fedcomposite.data.queries import Moments
from fedcomposite.experiments import FolderLock
from fedcomposite.runtime.answers import AnswerLog, ResumeError, identity_of
from fedcomposite.runtime.driver import Driver
from fedcomposite.runtime.protocol import Introduce, Request, Rows
from fedcomposite.runtime.transports import SiloTransport

ASKED = {"data": "a" * 64, "folds": "10"}


def request(value=0.5, **fields):
    x = torch.full((3,), value, dtype=torch.float64)
    return Request("newton", {"x": x, "working": x > 0}, {"width": 0.0}, Rows("fold", 1, 5, seed=2), **fields)


def sums(seed):
    source = torch.Generator().manual_seed(seed)
    made = {"weight": torch.tensor([1.0, 40.0, 40.0]).double(), "empty": torch.zeros(0, 2, dtype=torch.float64)}
    return made | {"hessian": torch.randn(4, 3, generator=source, dtype=torch.float64).T / 3}


def same_bits(one, two):
    assert type(one) is type(two)
    if isinstance(one, list):
        assert len(one) == len(two)
        for a, b in zip(one, two, strict=True):
            same_bits(a, b)
    elif isinstance(one, dict):
        assert list(one) == list(two)
        for key in one:
            same_bits(one[key], two[key])
    elif isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape) == (two.dtype, two.shape)
        assert one.numpy().tobytes() == two.numpy().tobytes()
    elif isinstance(one, np.ndarray):
        assert (one.dtype, one.shape) == (two.dtype, two.shape)
        assert one.tobytes() == two.tobytes()
    else:
        assert one == two or (one != one and two != two)  # a slope that cannot be told is nan both times


EXCHANGES = [
    ([Introduce()], [['{"site": "north", "samples": 7}', "{}"]]),
    ([Moments(columns=["age"])], [[{"sum:age": np.array([0.1 + 0.2, -0.0]), "count:age": np.array([3, 5])},
                                  {"levels:sex": np.array(["f", "m"])}]]),
    ([request(), request(0.1, by_site=True)], [sums(0), [sums(1), sums(2)]]),
    ([request(0.3)], [sums(3)]),
]  # fmt: skip


@pytest.fixture
def opened():
    """Opens logs, which are closed at the end."""
    with contextlib.ExitStack() as stack:
        yield lambda *given, **more: stack.enter_context(contextlib.closing(AnswerLog(*given, **more)))


@pytest.fixture
def written(tmp_path):
    """A log of all kinds of answers, closed as by a process that is gone."""
    log = AnswerLog(tmp_path / "answers.log", ASKED)
    for k, (asked, answers) in enumerate(EXCHANGES):
        log.append(asked, answers, 1.5 * k, (100 * k, 7))
    log.close()
    return log.path


def test_answers_come_back_bit_for_bit(opened, written):
    assert stat.S_IMODE(written.stat().st_mode) == 0o600
    assert identity_of(written) == ASKED
    log = opened(written, ASKED)
    for k, (asked, answers) in enumerate(EXCHANGES):
        said, seconds, sent = log.recall(asked)
        same_bits(said, [one if not isinstance(one, dict) else {k: v.contiguous() for k, v in one.items()}
                         for one in answers])  # fmt: skip
        assert (seconds, sent) == (1.5 * k, (100 * k, 7))
    assert log.recall(EXCHANGES[0][0]) is None
    assert log.recalled == 4


def test_read_back_arrays_lie_in_memory_as_fresh_ones_do(opened, written):
    """A product of a matrix read from the middle of a file may have other last bits than that of an aligned one."""
    log = opened(written, ASKED)
    for asked, _ in EXCHANGES[:2]:
        log.recall(asked)
    said, *_ = log.recall(EXCHANGES[2][0])
    for value in said[0].values():
        assert value.is_contiguous()
        assert value.data_ptr() % 64 == 0 or not value.numel()


@pytest.mark.parametrize("cut", [1, 31, 48, 60, 300])
def test_a_half_written_exchange_is_cut_off_and_written_again(opened, written, cut):
    whole = written.read_bytes()
    os.truncate(written, len(whole) - cut)
    log = opened(written, ASKED)
    for asked, answers in EXCHANGES[:3]:
        same_bits(len(log.recall(asked)[0]), len(answers))
    assert log.recall(EXCHANGES[3][0]) is None
    log.append(*EXCHANGES[3], 4.5, (300, 7))
    log.close()
    assert written.read_bytes() == whole


def test_a_damaged_exchange_ends_the_log_before_it(opened, written):
    content = bytearray(written.read_bytes())
    content[-5] ^= 1
    written.write_bytes(bytes(content))
    log = opened(written, ASKED)
    assert [log.recall(asked) is None for asked, _ in EXCHANGES] == [False, False, False, True]


def test_what_is_not_this_analysis_is_refused_and_left_alone(opened, written, tmp_path):
    before = written.read_bytes()
    with pytest.raises(ResumeError, match=r"folds \(10 there, 5 here\)"):
        opened(written, {**ASKED, "folds": "5"})
    log = opened(written, ASKED)
    with pytest.raises(ResumeError, match="exchange 1 asked something else"):
        log.recall([request()])
    log.close()
    assert written.read_bytes() == before
    other = tmp_path / "notes.txt"
    other.write_text("mine")
    for resume in (True, False):
        with pytest.raises(ResumeError, match="not a log of answers"):
            opened(other, ASKED, resume=resume)
    assert other.read_text() == "mine"


@pytest.mark.parametrize("change", ["value", "sign of zero", "rows", "part", "by_site", "name"])
def test_every_bit_of_a_question_counts(opened, tmp_path, change):
    asked = request(0.0)
    other = {
        "value": request(5e-324), "sign of zero": request(-0.0), "part": request(0.0, part="test"),
        "rows": Request("newton", asked.arrays, asked.numbers, Rows("fold", 1, 5, seed=3)),
        "by_site": request(0.0, by_site=True), "name": Request("losses", asked.arrays, asked.numbers, asked.rows),
    }[change]  # fmt: skip
    log = opened(tmp_path / "a.log", ASKED)
    log.append([asked], [sums(0)], 0.0, (0, 0))
    log.close()
    with pytest.raises(ResumeError):
        opened(log.path, ASKED).recall([other])


def test_what_can_be_computed_again_is_not_written_without_end(opened, tmp_path):
    log = opened(tmp_path / "a.log", ASKED, most=1000)
    for _ in range(20):
        log.append([request()], [sums(0)], 0.0, (0, 0))
    assert 1000 < log.path.stat().st_size < 3000
    log.close()
    again, count = opened(log.path, ASKED, most=1000), 0
    while again.recall([request()]) is not None:
        count += 1
    assert 0 < count < 20


# -- analyses ---------------------------------------------------------------------------------------------------------


def problem(loss="logistic", seed=0, **options):
    silos = fc.data.load("synthetic", clients=4, features=6, samples=40, seed=seed)
    return fc.Problem(silos, loss=loss, regularizer=fc.regularizers.L1(1.0), bias=True, weights="samples", **options)


class KilledError(Exception):
    """As if the process had been."""


class Watched(SiloTransport):
    """Counts what it is really asked."""

    asked = 0

    def ask(self, requests):
        Watched.asked += 1
        return super().ask(requests)


ANALYSES = {
    "analyse": lambda **o: fc.analyse(problem(), "cv", folds=3, count=8, **o).content(),
    "fit": lambda **o: fc.analyse(problem(), "fit", **o).content(),
    "path": lambda **o: fc.path(problem(), count=8, **o).solutions,
    "cross_validate": lambda **o: fc.cross_validate(problem(), folds=3, count=8, **o).models,
    "stability": lambda **o: fc.stability(problem(), draws=4, count=8, **o).share,
    "bootstrap": lambda **o: fc.bootstrap(problem(), np.zeros(7), draws=4, **o).to_numpy(),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ANALYSES)
def test_an_analysis_goes_on_with_the_same_bits(name, tmp_path, monkeypatch):
    monkeypatch.setattr("fedcomposite.runtime.driver.SiloTransport", Watched)
    analysis, log = ANALYSES[name], tmp_path / "answers.log"
    seen = []
    whole = analysis(on_exchange=lambda driver: seen.append((driver.exchanges, driver.tasks, driver.seconds)))
    assert [k for k, *_ in seen] == list(range(1, len(seen) + 1))
    for stop in random.Random(name).sample(range(1, len(seen)), min(3, len(seen) - 1)):

        def kill(driver, stop=stop):
            if driver.exchanges == stop:
                raise KilledError

        Watched.asked = 0
        with pytest.raises(KilledError):
            analysis(checkpoint=log, on_exchange=kill)
        assert log.is_file()
        again = analysis(checkpoint=log, resume=True)
        assert Watched.asked == len(seen)
        same_bits(again, whole)
        assert not log.exists()


def test_the_log_of_another_analysis_is_refused(tmp_path):
    def stop(driver):
        raise KilledError

    log = tmp_path / "answers.log"
    with pytest.raises(KilledError):
        fc.path(problem(), count=8, checkpoint=log, on_exchange=stop)
    for what, call in {
        "count": lambda: fc.path(problem(), count=9, checkpoint=log, resume=True),
        "data": lambda: fc.path(problem(seed=1), count=8, checkpoint=log, resume=True),
        "analysis": lambda: fc.cross_validate(problem(), count=8, checkpoint=log, resume=True),
        "loss": lambda: fc.path(problem("least_squares"), count=8, checkpoint=log, resume=True),
    }.items():
        with pytest.raises(ResumeError, match=what):
            call()
    fc.path(problem(), count=5, checkpoint=log)  # without resume it is replaced
    assert not log.exists()


def test_held_out_samples_belong_to_the_analysis(tmp_path):
    def stop(driver):
        raise KilledError

    silos = problem().silos
    tests = [(torch.randn(20, 6, generator=torch.Generator().manual_seed(s)).double(), silos.targets[:20])
             for s in (0, 1)]  # fmt: skip
    first, second = (fc.Problem(replace(silos, test=t), regularizer=fc.regularizers.L1(0.1), bias=True) for t in tests)
    with pytest.raises(KilledError):
        fc.analyse(first, "fit", checkpoint=tmp_path / "a.log", on_exchange=stop)
    with pytest.raises(ResumeError, match="held"):
        fc.analyse(second, "fit", checkpoint=tmp_path / "a.log", resume=True)


def test_what_is_refused_leaves_no_log(tmp_path):
    with pytest.raises(ValueError, match="kinks"):
        fc.path(problem("hinge"), checkpoint=tmp_path / "a.log")
    with pytest.raises(ValueError, match="checkpoint=PATH"):
        fc.path(problem(), resume=True)
    with pytest.raises(ValueError, match="driver"):
        fc.path(problem(), checkpoint=tmp_path / "a.log", driver=Driver(SiloTransport(problem())))
    assert not list(tmp_path.iterdir())


def test_a_deadline_goes_by_the_time_that_the_analysis_took(tmp_path, monkeypatch):
    """What was killed has the rest of its time left, and does again what it did in the first part."""
    clock = [0.0]
    monkeypatch.setattr("fedcomposite.runtime.driver.time.monotonic", lambda: clock[0])

    def tick(driver):
        clock[0] += 1.0

    def kill(driver):
        clock[0] += 1.0
        if driver.exchanges == 10:
            raise KilledError

    options = {"count": 50, "seconds": 20.5, "checkpoint": tmp_path / "a.log"}
    whole = fc.path(problem(), **options, on_exchange=tick)
    assert 20 <= whole.exchanges <= 23
    assert len(whole.lambdas) < 50
    clock[0] = 0.0
    with pytest.raises(KilledError):
        fc.path(problem(), **options, on_exchange=kill)
    clock[0] = 1e6  # days later
    again = fc.path(problem(), **options, resume=True, on_exchange=tick)
    same_bits(again.solutions, whole.solutions)
    assert again.exchanges == whole.exchanges


# -- commands ---------------------------------------------------------------------------------------------------------

TOML = """
name = "few"
[data]
name = "synthetic"
clients = 4
features = 12
samples = 60
[problem]
loss = "logistic"
bias = true
weights = "samples"
[regularizer]
name = "L1"
lam = 0.02
"""


def command(*words):
    """A command in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "fedcomposite", *map(str, words)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def done(*words, code=0):
    """What a command says, which is done here: it takes seconds to load."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == code, result.output + str(result.exception)
    return result.output


def refused(*words):
    """Why a command is refused."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert isinstance(result.exception, UserError), result.output
    return str(result.exception)


def killed(size, log, *words, by=signal.SIGKILL):
    """A command that is killed as soon as its log has so many bytes; what it said."""
    running = command(*words)
    while running.poll() is None and not (log.exists() and log.stat().st_size >= size):
        time.sleep(0.001)
    running.send_signal(by)
    said = running.communicate()[0]
    assert running.returncode, said  # it was not at its end
    return said


def left(folder):
    """What an analysis leaves, apart from the time that it took."""
    found = json.loads((folder / "analysis.json").read_text())
    found.pop("seconds")
    files = {name: (folder / name).read_bytes() for name in ("model.safetensors", "config.toml", "coefficients.csv")}
    return files, json.dumps(found)


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    """An experiment, the options of its analysis, a run that was left alone, and the bytes of its log at the end."""
    folder = tmp_path_factory.mktemp("few")
    (folder / "few.toml").write_text(TOML)
    options = ["--folds", 5, "--count", 30, "--set", "seed=3"]
    done("cv", folder / "few.toml", *options, "--out", folder / "whole")
    return folder / "few.toml", options, left(folder / "whole")


@pytest.mark.slow
def test_a_killed_command_goes_on_with_the_same_bits(few, tmp_path):
    config, options, whole = few
    out = tmp_path / "run"
    log = out / "answers.log"
    killed(1, log, "cv", config, *options, "--out", out)
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    size = log.stat().st_size
    for share in sorted(random.Random(7).random() for _ in range(2)):  # of the 3 MB that it comes to
        size = max(size + 1, int(share * 3e6))
        killed(size, log, "cv", "--resume", out)
    said = done("cv", "--resume", out)
    assert "going on after" in said
    assert left(out) == whole
    assert not log.exists()
    assert "finished already" in done("cv", "--resume", out)
    assert left(out) == whole


@pytest.mark.slow
def test_ctrl_c_says_how_to_go_on(few, tmp_path):
    config, options, whole = few
    out = tmp_path / "run"
    said = killed(1e5, out / "answers.log", "cv", config, *options, "--out", out, by=signal.SIGINT)
    assert f"fedcomposite cv --resume {out}" in said
    done("cv", "--resume", out)
    assert left(out) == whole


def begun(few, out):
    """An analysis that was stopped on its way, here."""
    config, options, _ = few

    def stop(driver):
        if driver.exchanges == 20:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedcomposite.cli.analysis.AtHand.followed", lambda *_: contextlib.nullcontext(stop))
        result = CliRunner().invoke(app, [str(word) for word in ("cv", config, *options, "--out", out)])
    assert "interrupted after 20 exchanges" in str(result.exception)
    return content(out)


def content(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir()}


@pytest.mark.slow
def test_a_refused_command_changes_nothing(few, tmp_path):
    config, _, whole = few
    out = tmp_path / "run"
    before = begun(few, out)
    assert list(before) == ["answers.log"]
    assert "--resume or --overwrite or another --out" in refused("cv", config, "--out", out)
    assert "begun with 5" in refused("cv", "--resume", out, "--folds", 10)
    assert "an analysis of `cv`" in refused("path", "--resume", out)
    for words in (["--set", "seed=4"], ["--out", tmp_path / "other"], ["--overwrite"]):
        assert f"{words[0]} cannot be given with --resume" in refused("cv", "--resume", out, *words)
    assert "give a CONFIG, or --resume RUN" in refused("cv")
    assert "give a CONFIG, or --resume RUN" in refused("cv", config, "--resume", out)
    assert "for the sites of a --federation" in refused("cv", "--resume", out, "--give-up", 5)
    assert "no answers.log" in refused("cv", "--resume", tmp_path)
    kinked = ["--overwrite", "--set", 'problem.loss="hinge"']
    assert "kinks" in refused("cv", config, *kinked, "--out", out)  # and the log is not begun anew
    with FolderLock(out):
        other = threading.Thread(target=lambda: refusals.append(refused("cv", "--resume", out)))
        refusals = []
        other.start()
        other.join()
    assert "in use" in refusals[0]
    assert content(out) == before
    done("cv", "--resume", out, "--folds", 5)
    assert left(out) == whole


@pytest.mark.slow
def test_other_data_or_another_version_are_refused(few, tmp_path, monkeypatch):
    config, options, whole = few
    out = tmp_path / "run"
    before = begun(few, out)
    with monkeypatch.context() as patch:
        patch.setattr("fedcomposite.runtime.driver.__version__", "0.0.1")
        assert "version" in refused("cv", "--resume", out)
    load = fc.data.load
    with monkeypatch.context() as patch:
        patch.setattr("fedcomposite.data.load", lambda *a, **k: load(*a, **{**k, "heterogeneity": 0.7}))
        assert "data" in refused("cv", "--resume", out)
    assert content(out) == before
    done("cv", config, *options, "--out", out, "--overwrite")
    assert left(out) == whole


@pytest.mark.slow
def test_a_terminal_shows_how_far_an_analysis_is(few, tmp_path, monkeypatch):
    config, options, _ = few
    screen = io.StringIO()
    monkeypatch.setattr("fedcomposite.cli.analysis.err", Console(file=screen, force_terminal=True, width=100))
    done("cv", config, *options, "--out", tmp_path / "run")
    found = json.loads((tmp_path / "run" / "analysis.json").read_text())
    assert f"{found['communication']['exchanges']} exchanges" in screen.getvalue()
    assert all(len(line) <= 100 for line in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|\r", "\n", screen.getvalue()).splitlines())
