"""Callbacks: they see every record, may stop a run cleanly, and change nothing else."""

import csv
import json
import multiprocessing
import sys
import threading
import types

import pytest
import torch

import fedcomposite as fc
from fedcomposite import callbacks
from fedcomposite.algorithms import FedAvg, Scaffold, Zhang
from fedcomposite.experiments import Config
from fedcomposite.runtime.callbacks import progress
from fedcomposite.testing import small_problem


@pytest.fixture
def problem():
    return small_problem(Zhang(2, 0.5))


def histories_equal(one, two):
    assert [{**r, "seconds": 0} for r in one] == [{**r, "seconds": 0} for r in two]


def test_a_function_sees_every_record_and_may_stop(problem, tmp_path):
    seen = []

    def watch(view):
        seen.append(view.record)
        if view.round == 6:
            view.stop("six is enough")

    run = fc.simulate(problem, Zhang(2, 0.5), rounds=50, evaluate_every=2, callbacks=[watch], checkpoint=tmp_path / "c")
    assert run.status == "stopped"
    assert run.message == "stopped after round 6: six is enough"
    assert [r.round for r in seen] == [0, 2, 4, 6]
    histories_equal(seen, run.history)
    whole = fc.simulate(problem, Zhang(2, 0.5), rounds=50, evaluate_every=2)
    again = fc.simulate(problem, Zhang(2, 0.5), rounds=50, evaluate_every=2, checkpoint=tmp_path / "c", resume=True)
    assert torch.equal(again.solution, whole.solution)
    histories_equal(again.history, whole.history)


def test_a_stop_in_the_last_round_is_no_stop(problem):
    run = fc.simulate(problem, Zhang(2, 0.5), rounds=3, callbacks=[lambda view: view.round == 3 and view.stop("late")])
    assert run.status == "completed"


def test_a_callback_changes_nothing_else(problem):
    def meddle(view):
        view.solution.zero_()
        view.record["objective"] = 0.0
        view.history.clear()
        with pytest.raises(AttributeError):
            view.round = 99

    quiet = fc.simulate(problem, FedAvg(2, 0.5), rounds=5)
    meddled = fc.simulate(problem, FedAvg(2, 0.5), rounds=5, callbacks=[meddle])
    assert torch.equal(quiet.solution, meddled.solution)
    histories_equal(quiet.history, meddled.history)


def test_begin_and_end_are_called_around_the_rounds_also_after_an_error(problem):
    class Watch(callbacks.Callback):
        def __init__(self):
            self.calls = []

        def begin(self, view):
            self.calls.append("begin")

        def __call__(self, view):
            self.calls.append(view.round)
            if view.round == 2:
                raise RuntimeError("out of paper")

        def end(self, view):
            self.calls.append("end")

    watch = Watch()
    with pytest.raises(RuntimeError, match="out of paper"):
        fc.simulate(problem, FedAvg(2, 0.5), rounds=5, callbacks=[watch])
    assert watch.calls == ["begin", 0, 1, 2, "end"]


def test_what_is_no_callback_is_refused(problem):
    with pytest.raises(TypeError, match="neither a Callback nor a function"):
        fc.simulate(problem, FedAvg(2, 0.5), rounds=5, callbacks=["progress"])


# -- early stopping -------------------------------------------------------------------------------------------------


def test_early_stopping_equals_its_definition_and_survives_a_resume(problem, tmp_path):
    method, settings = Scaffold(4, 0.8), {"rounds": 200, "batch_size": 3, "evaluate_every": 3}
    whole = fc.simulate(problem, method, **settings)
    stop = callbacks.EarlyStopping("train_accuracy", patience=4)
    values, best, expected = [r.train_accuracy for r in whole.history], 0, None
    for i, value in enumerate(values):
        best = i if value > values[best] else best
        if i - best >= 4:
            expected = i
            break
    assert expected is not None
    run = fc.simulate(problem, method, callbacks=[stop], **settings)
    assert run.status == "stopped"
    assert len(run.history) == expected + 1
    assert "train_accuracy has not improved for 4 records" in run.message
    middle = whole.history[expected - 2].round
    fc.simulate(problem, method, checkpoint=tmp_path / "c", **{**settings, "rounds": middle})
    for _ in range(2):  # one that has stopped stays where it is
        parts = fc.simulate(problem, method, checkpoint=tmp_path / "c", resume=True, callbacks=[stop], **settings)
        assert (parts.rounds, parts.status, parts.message) == (run.rounds, "stopped", run.message)
        assert torch.equal(parts.solution, run.solution)


def test_early_stopping_looks_at_each_record_once():
    """A thousand records cost a thousand looks, and the past of a resumed run one each; NaN is never the best."""
    looks = []

    class Looked(dict):
        def __getitem__(self, key):
            looks.append(key)
            return super().__getitem__(key)

    class Run:
        history, reason = [], ""
        record = property(lambda self: self.history[-1])

        def stop(self, reason):
            self.reason = self.reason or reason

    def run(values, past=0):
        one, stop = Run(), callbacks.EarlyStopping("loss", patience=400)
        one.history = [Looked(round=i, loss=v) for i, v in enumerate(values[:past])]
        stop.begin(one)
        for i, value in enumerate(values[past:], past):
            one.history.append(Looked(round=i, loss=value))
            stop(one)
        return one.reason

    falling = [float("nan"), *(1 / (i + 1) for i in range(599)), *[1.0] * 400]
    expected = "loss has not improved for 400 records (best 0.00166945 in round 599)"
    assert run(falling) == run(falling, past=700) == expected
    assert len(looks) < 6 * len(falling)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"metric": "accuracy"}, r"no 'accuracy' in the records \(they have: .*train_accuracy"),
        ({"metric": "loss", "patience": 0}, "patience = 0, must be an integer >= 1"),
        ({"metric": "loss", "mode": "up"}, "mode = 'up'"),
        ({"metric": "loss", "min_delta": -1.0}, "min_delta = -1.0"),
    ],
)
def test_wrong_early_stopping(problem, fields, message):
    with pytest.raises(ValueError, match=message):
        fc.simulate(problem, FedAvg(2, 0.5), rounds=2, callbacks=[callbacks.EarlyStopping(**fields)])


# -- files and trackers ---------------------------------------------------------------------------------------------


def in_two_parts(problem, path, make):
    """A run that was continued, with a fresh callback each time."""
    for rounds in (3, 6):
        run = fc.simulate(
            problem, Zhang(2, 0.5), rounds=rounds, checkpoint=path, checkpoint_every=2, resume=True, callbacks=[make()]
        )
    return run


def test_json_lines(problem, tmp_path):
    run = in_two_parts(problem, tmp_path / "c", lambda: callbacks.JsonLines(str(tmp_path / "h.jsonl")))
    assert [json.loads(line) for line in (tmp_path / "h.jsonl").read_text().splitlines()] == run.history


def test_csv(problem, tmp_path):
    run = in_two_parts(problem, tmp_path / "c", lambda: callbacks.Csv(str(tmp_path / "h.csv")))
    with (tmp_path / "h.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [{k: float(v) for k, v in row.items()} for row in rows] == run.history


def test_tensorboard(problem, tmp_path):
    pytest.importorskip("tensorboard", reason="the extra [tensorboard] is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = str(tmp_path / "board")
    run = fc.simulate(problem, Zhang(2, 0.5), rounds=4, callbacks=[callbacks.TensorBoard(folder)])
    events = EventAccumulator(folder).Reload()
    logged = {e.step: e.value for e in events.Scalars("objective")}
    assert logged == pytest.approx({r.round: r.objective for r in run.history}, rel=1e-6)


@pytest.mark.filterwarnings("ignore")  # of mlflow's own use of its database
def test_mlflow(problem, tmp_path):
    mlflow = pytest.importorskip("mlflow", reason="the extra [mlflow] is not installed")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    callback = callbacks.MLflow("heart", uri=uri, name="first")
    run = fc.simulate(problem, Zhang(2, 0.5), rounds=4, callbacks=[callback])
    client = mlflow.MlflowClient(tracking_uri=uri)
    (found,) = client.search_runs([client.get_experiment_by_name("heart").experiment_id])
    assert found.info.status == "FINISHED"
    assert found.data.params["method"] == "Zhang"
    logged = {m.step: m.value for m in client.get_metric_history(found.info.run_id, "objective")}
    assert logged == {r.round: r.objective for r in run.history}


def test_weights_and_biases_offline(problem, tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="the extra [wandb] is not installed")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = fc.simulate(
        problem, Zhang(2, 0.5), rounds=2, callbacks=[callbacks.WandB("heart", folder=str(tmp_path / "w"))]
    )
    assert run.status == "completed"
    (kept,) = (tmp_path / "w").rglob("*.wandb")
    assert kept.stat().st_size > 0


def test_weights_and_biases_do_not_write_where_one_stands(problem, tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="the extra [wandb] is not installed")
    here, cache, named = (tmp_path / name for name in ("here", "cache", "named"))
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("FEDCOMPOSITE_CACHE", str(cache))
    monkeypatch.delenv("WANDB_DIR", raising=False)
    fc.simulate(problem, Zhang(2, 0.5), rounds=1, callbacks=[callbacks.WandB()])
    assert len(list(cache.rglob("*.wandb"))) == 1
    monkeypatch.setenv("WANDB_DIR", str(named))
    fc.simulate(problem, Zhang(2, 0.5), rounds=1, callbacks=[callbacks.WandB()])
    assert len(list(named.rglob("*.wandb"))) == 1
    assert list(here.iterdir()) == []


def test_weights_and_biases_of_an_experiment_lie_in_the_run_s_folder(problem, tmp_path, monkeypatch):
    """Also where W&B is not installed: a stand-in is told where to write, and which run it is."""
    asked = []

    def init(**options):
        asked.append(options)
        return types.SimpleNamespace(log=lambda numbers, step: None, finish=lambda: None)

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    monkeypatch.setenv("WANDB_DIR", str(tmp_path / "elsewhere"))
    content = {"data": {"name": "synthetic"}, "algorithm": {"name": "Zhang", "local_steps": 2, "step": 0.5},
               "run": {"rounds": 1}}  # fmt: skip
    run, named = tmp_path / "run", tmp_path / "named"
    for given, folder in [({}, run), ({"folder": "w"}, run / "w"), ({"folder": str(named)}, named)]:
        (made,) = Config.check({**content, "callbacks": [{"name": "WandB", **given}]}).make_callbacks(run)
        fc.simulate(problem, Zhang(2, 0.5), rounds=1, callbacks=[made])
        assert asked[-1]["dir"] == str(folder)
        assert folder.is_dir()
        assert asked[-1]["config"].items() >= {"seed": "0", "part": "run"}.items()
    assert len(asked) == 3


def _track(uri, together, fails):
    import mlflow  # noqa: F401  # it takes seconds, and the race is at the database

    try:
        problem = fc.Problem(fc.data.load("synthetic", clients=3, samples=20), loss="logistic")
        together.wait(timeout=120)
        fc.simulate(problem, Zhang(2, 0.5), rounds=1, callbacks=[callbacks.MLflow("shared", uri=uri)])
        fails.put("")
    except Exception as error:
        fails.put(str(error))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of mlflow's own use of its database
def test_processes_may_begin_an_mlflow_database_together(tmp_path):
    """As compare --jobs does: two at a new database left it with half of its tables, for good."""
    mlflow = pytest.importorskip("mlflow", reason="the extra [mlflow] is not installed")
    uri, context = f"sqlite:///{tmp_path}/mlflow.db", multiprocessing.get_context("spawn")
    together, fails = context.Barrier(2), context.Queue()
    both = [context.Process(target=_track, args=(uri, together, fails)) for _ in range(2)]
    for process in both:
        process.start()
    assert [fails.get(timeout=240) for _ in both] == ["", ""]
    for process in both:
        process.join()
    client = mlflow.MlflowClient(tracking_uri=uri)
    found = client.search_runs([client.get_experiment_by_name("shared").experiment_id])
    assert [run.info.status for run in found] == ["FINISHED"] * 2


def test_a_missing_tracker_says_how_to_get_it(problem, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(callbacks.MissingPackageError, match=r"pip install 'fedcomposite\[wandb\]'"):
        fc.simulate(problem, Zhang(2, 0.5), rounds=1, callbacks=[callbacks.WandB()])


# -- progress, and the process ----------------------------------------------------------------------------------------


def test_progress_is_shown_on_a_terminal_only(problem, capsys, monkeypatch):
    fc.simulate(problem, Zhang(2, 0.5), rounds=3)
    assert capsys.readouterr().err == ""
    fc.simulate(problem, Zhang(2, 0.5), rounds=3, progress=True)
    assert "3/3" in capsys.readouterr().err
    monkeypatch.setattr("fedcomposite.runtime.simulator.somebody_watches", lambda: True)
    fc.simulate(problem, Zhang(2, 0.5), rounds=3)
    assert "Zhang" in capsys.readouterr().err


class Kernel:
    """A stand-in for IPython in a notebook's process: what was displayed, and with what that was replaced."""

    def __init__(self, monkeypatch, kernel):
        self.shown = []
        ipython, module = types.ModuleType("IPython"), types.ModuleType("IPython.display")
        ipython.get_ipython = lambda: types.SimpleNamespace(kernel=kernel)
        module.display = self.display
        monkeypatch.setitem(sys.modules, "IPython", ipython)
        monkeypatch.setitem(sys.modules, "IPython.display", module)

    def display(self, content, raw, display_id):
        assert (raw, display_id) == (True, True)
        self.shown.append([content])
        return types.SimpleNamespace(update=lambda content, raw: self.shown[-1].append(content))


def test_progress_in_a_notebook_is_one_display_that_changes(problem, capsys, monkeypatch):
    """By itself, as on a terminal; a few times a second at most, and the last state stays."""
    kernel, clock = Kernel(monkeypatch, kernel=object()), [0.0]
    monkeypatch.setattr(progress, "time", types.SimpleNamespace(monotonic=lambda: clock[0]))

    def tick(view):
        clock[0] += 0.1

    run = fc.simulate(problem, Zhang(2, 0.5), rounds=20, callbacks=[tick])
    [line] = kernel.shown
    assert [text["text/plain"].split("  ")[2] for text in line] == [
        "0/20",
        *(f"{k}/20" for k in (2, 5, 8, 11, 14, 17, 20)),
        "20/20",
    ]
    assert "0:01 left" in line[2]["text/plain"]
    last = line[-1]
    assert last["text/plain"].startswith("Zhang  [####################]  20/20  in 0:02  F ")
    assert f"F {run.history[-1].objective:.6g}" in last["text/plain"]
    assert '<progress value="20" max="20"></progress>' in last["text/html"]
    fc.simulate(problem, Zhang(2, 0.5), rounds=2, callbacks=[fc.callbacks.Progress("<b>")], progress=False)
    assert len(kernel.shown) == 2
    assert "&lt;b&gt;" in kernel.shown[1][-1]["text/html"]
    fc.simulate(problem, Zhang(2, 0.5), rounds=2, progress=False)
    assert len(kernel.shown) == 2
    assert capsys.readouterr().err == ""


def test_ipython_on_a_terminal_is_no_notebook(problem, capsys, monkeypatch):
    kernel = Kernel(monkeypatch, kernel=None)
    fc.simulate(problem, Zhang(2, 0.5), rounds=2)
    fc.simulate(problem, Zhang(2, 0.5), rounds=2, progress=True)
    assert kernel.shown == []
    assert "2/2" in capsys.readouterr().err


def test_progress_that_ends_with_an_error_stays(problem, monkeypatch):
    kernel = Kernel(monkeypatch, kernel=object())

    def fail(view):
        raise ArithmeticError("of its own")

    with pytest.raises(ArithmeticError):
        fc.simulate(problem, Zhang(2, 0.5), rounds=2, callbacks=[fail])
    assert "0/2  in 0:00" in kernel.shown[0][-1]["text/plain"]


def test_the_process_is_left_alone_off_the_main_thread_or_when_asked(problem, monkeypatch):
    """No signal handler, no thread setting, no malloc setting."""
    from fedcomposite.runtime import process

    used = []
    for name in ("threads", "interrupts", "keep_memory"):
        real = getattr(process, name)
        monkeypatch.setattr(process, name, lambda *a, real=real, name=name: used.append(name) or real(*a))
    fc.simulate(problem, Zhang(2, 0.5), rounds=2)
    assert sorted(used) == ["interrupts", "keep_memory", "threads"]
    used.clear()
    fc.simulate(problem, Zhang(2, 0.5), rounds=2, process_settings=False)
    worker = threading.Thread(target=lambda: fc.simulate(problem, Zhang(2, 0.5), rounds=2))
    worker.start()
    worker.join()
    assert used == []


# -- from TOML --------------------------------------------------------------------------------------------------------

EXPERIMENT = """
[data]
name = "synthetic"
clients = 4
features = 5
samples = 20

[algorithm]
name = "FedAvg"
local_steps = 2
step = 0.5

[run]
rounds = 300

[[callbacks]]
name = "EarlyStopping"
metric = "{metric}"
patience = 4
min_delta = 1e-3

[[callbacks]]
name = "Csv"
path = "records.csv"
"""


def test_callbacks_of_an_experiment_leave_a_whole_run_folder(cli, tmp_path):
    (tmp_path / "e.toml").write_text(EXPERIMENT.format(metric="objective"))
    said = cli("run", tmp_path / "e.toml", "--out", tmp_path / "run", check=0)
    assert "objective has not improved for 4 records" in said.out
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "stopped"
    assert summary["message"].startswith("stopped after round ")
    lines = (tmp_path / "run" / "history.jsonl").read_text().splitlines()
    assert len(lines) == summary["rounds"] + 1 < 300
    assert len((tmp_path / "run" / "records.csv").read_text().splitlines()) == len(lines) + 1
    assert (tmp_path / "run" / "coefficients.csv").is_file()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("objective", "accuracy"), "no 'accuracy' in the records"),
        (('"EarlyStopping"', '"EarlyStoping"'), "unknown callback 'EarlyStoping'; did you mean 'EarlyStopping'?"),
        (("patience = 4", "patience = 0"), "patience = 0, must be an integer >= 1"),
    ],
)
def test_wrong_callbacks_are_refused_before_anything_is_written(cli, tmp_path, change, message):
    (tmp_path / "e.toml").write_text(EXPERIMENT.format(metric="objective").replace(*change))
    assert message in cli("run", tmp_path / "e.toml", "--out", tmp_path / "run", check=2).err
    assert not (tmp_path / "run").exists()


def test_a_simulator_ends_with_its_last_reference(problem):
    """No cycle keeps it: on a GPU a recorded round that is freed late would break the recording of another."""
    import gc
    import weakref

    from fedcomposite.problems import Batches
    from fedcomposite.runtime import Plan, Simulator

    gc.disable()
    try:
        sim = Simulator(problem, Zhang(2, 0.5), batches=Batches())
        sim.run(Plan(3, callbacks=[lambda view: None]))
        ended = weakref.ref(sim)
        del sim
        assert ended() is None
    finally:
        gc.enable()
