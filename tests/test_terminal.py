"""What commands print on terminals of 60, 80 and 120 columns, and for machines."""

import functools
import io
import json
import re

import pandas as pd
import pytest
from rich.console import Console
from typer.main import get_command

from fedcomposite.cli import console, lists
from fedcomposite.cli.main import app
from fedcomposite.experiments.toml import locate
from fedcomposite.runtime.callbacks.progress import make_bar, room_beside, short, summary

WIDTHS = (60, 80, 120)
KINDS = get_command(app).commands["list"].params[0].type.choices
LISTINGS = [["list", kind] for kind in KINDS] + [["data", "list"], ["data", "describe", "heart_disease"]]
TELL_NOTHING = {  # commands that make a file or serve, or whose output is a format of its own
    "plot", "cite", "data fetch", "data messy", "data survivors",
    "federation init", "federation serve", "federation join",
    "federation revoke", "federation reinstate", "federation add-site", "federation admit", "federation rekey",
    "federation rotate", "federation renew", "federation enrol", "federation approve", "federation reject",
    "federation demo",
}  # fmt: skip


ALGORITHMS = functools.cache(lists.algorithm_table)  # it measures all methods


@pytest.fixture
def narrow(cli, monkeypatch):
    """Commands as on a terminal of so many columns."""
    monkeypatch.setattr(lists, "algorithm_table", ALGORITHMS)

    def call(width, *words):
        monkeypatch.setattr(console, "_WIDTH", None)
        monkeypatch.setattr(console.out, "_width", width)
        return cli(*words, check=0).out

    return call


def table_of(text):
    """Head and rows of cells of a printed table, each a list of the lines that the cell has."""
    grid = [re.split("[│┃]", line)[1:-1] for line in text.splitlines() if line[:1] in ("│", "┃")]
    head = [line for line in text.splitlines() if line[:1] == "┃"]
    names = [" ".join(part.strip() for part in column).strip() for column in zip(*grid[: len(head)], strict=True)]
    return names, [[cell.strip() for cell in line] for line in grid[len(head) :]]


@pytest.mark.parametrize("words", LISTINGS, ids=" ".join)
def test_listings_keep_to_the_width_and_break_no_number(narrow, words):
    told = json.loads(narrow(400, *words, "--json"))
    told = told["silos"] if isinstance(told, dict) else told
    whole, _ = table_of(narrow(400, *words))
    for width in WIDTHS:
        text = narrow(width, *words)
        names, lines = table_of(text)
        assert all(len(line.rstrip()) <= width for line in text.splitlines())
        gone = [name for name in whole if name not in names]
        left_out = re.search(r"no room for (.*?) in \d+ columns", " ".join(text.split()))
        assert (left_out is not None) == bool(gone)
        assert not gone or left_out[1].split(", ") == gone
        for column, name in enumerate(names):
            seen = " ".join(line[column] for line in lines)
            for row in told:
                for word in str(row.get(name) or "").split():
                    if any(c.isdigit() for c in word) and not isinstance(row[name], float):
                        assert word in seen.split(), (width, name, word)
        assert len({line[0] for line in lines if line[0]}) == len(told)  # names are whole, so none is there twice


def test_numbers_are_never_broken_and_columns_go_from_the_right(monkeypatch, capsys):
    frame = pd.DataFrame(
        {
            "name": ["first", "second"],
            "spread": ["0.6188 ± 0.0012", "12.25 ± 0.5"],
            "prose": ["a sentence that is long enough to be wrapped more than once", "short"],
            "value": [-1234.5678, float("nan")],
            "count": [123456789, 1],
        }
    )
    monkeypatch.setattr(console, "_WIDTH", None)
    for width, gone in ((100, []), (64, []), (50, ["count"]), (40, ["value", "count"])):
        monkeypatch.setattr(console.out, "_width", width)
        console.print_frame(frame)
        text = capsys.readouterr().out
        assert max(map(len, text.splitlines())) <= width
        names, lines = table_of(text)
        assert [n for n in frame.columns if n not in names] == gone
        cells = [cell for line in lines for cell in line]
        for column, number in {"spread": "0.6188 ± 0.0012", "value": "-1235", "count": "123456789"}.items():
            assert (number in cells) == (column not in gone)
        assert "–" in cells or "value" in gone
    console.print_frame(frame, drop=("prose",))
    assert "no room for prose, count" in " ".join(capsys.readouterr().out.split())


def test_a_pipe_loses_nothing(monkeypatch, capsys):
    monkeypatch.setattr(console, "_WIDTH", 120)
    monkeypatch.setattr(console.out, "_width", 120)
    monkeypatch.setattr(type(console.out), "is_terminal", False)
    frame = pd.DataFrame({f"column {i}": [123456.789 * 10**i] for i in range(20)})
    console.print_frame(frame)
    assert table_of(capsys.readouterr().out)[0] == list(frame.columns)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("label", ["Zhang", "a method with a long label, step 0.25, seed 12, and more words"])
def test_progress_keeps_round_and_time_left(width, label):
    record = {"objective": 0.618769, "stationarity": 6e-5, "nonzeros": 12345, "bytes_up": 9e9, "bytes_down": 8e9}
    record |= {"test_accuracy": 0.98765, "epsilon": 1.25}
    stream = io.StringIO()
    screen = Console(file=stream, width=width, force_terminal=True, color_system=None)
    name = short(label, screen)
    with make_bar(screen) as bar:
        task = bar.add_task(name, total=20000, seen="")
        bar.update(task, completed=12345, seen=summary(record, room_beside(name, 20000, screen)))
    last = [line for line in stream.getvalue().splitlines() if "20000" in line][-1]
    assert "12345/20000" in last
    assert re.search(r"[-\d]:[-\d]{2}:[-\d]{2}", last)
    assert name in last
    assert "F 0.618769" in last or width == 60
    shown = last.rpartition(":")[2].split("  ")
    assert all(part.strip() in summary(record).split("  ") for part in shown[1:] if part.strip())


def commands(group, above=""):
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{above}{name} ")
        else:
            yield above + name, command


def test_every_command_that_tells_something_tells_it_to_machines():
    flags = {name: any("--json" in p.opts for p in command.params) for name, command in commands(get_command(app))}
    assert {name for name, machine in flags.items() if not machine} == TELL_NOTHING


def test_results_as_json(narrow, cli, tmp_path):
    small = ["--set", "run.rounds=2"]
    ran = json.loads(narrow(80, "run", "heart-recipe", *small, "--out", tmp_path / "a", "--json"))
    assert ran["last"]["round"] == 2
    assert {"status", "message", "folder", "coefficients"} <= set(ran)
    both = json.loads(narrow(80, "compare", "demo", *small, "--out", tmp_path / "b", "--json"))
    assert [row["method"] for row in both["methods"]] == ["FedAvg", "Zhang", "FedCanon", "FedNMap"]
    written = json.loads(narrow(80, "export", tmp_path / "a", "--format", "csv", "--json"))
    assert written["nonzeros"] <= written["parameters"]
    solved = json.loads(narrow(80, "solve", "demo", "--json"))
    assert solved["status"] == "converged"
    assert len(solved["coefficients"]) == solved["last"]["nonzeros"]
    noise = json.loads(narrow(80, "privacy", "--rounds", "10", "--epsilon", "2", "--samples", "100", "--json"))
    assert noise["epsilon"] == pytest.approx(2, abs=0.01)
    assert noise["deviation"] == pytest.approx(noise["noise"] / 100)
    assert cli("solve", "demo", "--set", "nothing.rounds=1", "--json", check=2).out == ""


@pytest.mark.slow
def test_the_demonstration_warns_of_nothing_and_ends_with_what_it_means(cli, tmp_path):
    short = tmp_path / "demo.toml"
    short.write_text(locate("demo").read_text().replace("rounds = 600", "rounds = 1"))
    told = cli("compare", short, "--out", tmp_path / "demo", check=0)
    assert "warning" not in told.err
    last = told.out.strip().splitlines()[-1]
    assert last.startswith("After 600 rounds FedAvg is away from the answer")
    assert "next: fedcomposite solve demo" in last
    changed = cli("compare", short, "--set", "run.rounds=0", "--out", tmp_path / "other", check=0)
    assert "After 600 rounds" not in changed.out  # it would not be true


def test_json_has_no_numbers_that_json_does_not_have(capsys):
    console.print_json({"a": [float("nan"), {"b": float("inf")}], "c": (1.5, None)})
    assert json.loads(capsys.readouterr().out) == {"a": [None, {"b": None}], "c": [1.5, None]}
