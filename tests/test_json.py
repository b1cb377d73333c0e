"""What commands print as JSON has the keys that docs/json.md lists, and no others."""

import json
import re
from pathlib import Path

import pytest
import tomli_w

import fedcomposite as fc

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "json.md").read_text(encoding="utf-8")


def listed(title):
    """The keys of a section of the page: all of them, and those that are always there."""
    section = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)[1]
    keys = re.findall(r"^\| (\*?)`(\w+)`", section, re.MULTILINE)
    return {key for _, key in keys}, {key for mark, key in keys if not mark}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("json")
    fc.data.frames("heart_disease")["hungary"].to_csv(folder / "hungary.csv", index=False)
    content = {"data": {"name": "synthetic", "clients": 3, "samples": 20, "features": 4}, "run": {"rounds": 2}}
    for name, methods in {"one": {"algorithm": "FedAvg"}, "two": {"algorithms": "FedAvg"}}.items():
        spec = {"name": "FedAvg", "local_steps": 2, "steps": "auto"}
        made = {key: spec if key == "algorithm" else [spec] for key in methods}
        (folder / f"{name}.toml").write_text(tomli_w.dumps({**content, **made}))
    return folder


def test_keys_are_those_of_the_page(place, cli):
    ways = [
        ("solve and run", ["solve", "heart-recipe", "--out", place / "solved"]),
        ("solve and run", ["run", place / "one.toml", "--out", place / "ran"]),
        ("compare", ["compare", place / "two.toml", "--out", place / "compared"]),
        ("fit, path and cv", ["fit", "heart-recipe", "--by-site", "--out", place / "fitted"]),
        ("report", ["report", place / "fitted"]),
        ("predict", ["predict", place / "fitted", place / "hungary.csv", "--out", place / "scored.csv"]),
        ("data describe", ["data", "describe", place / "one.toml"]),
        ("data describe --table-one", ["data", "describe", "heart_disease", "--table-one", "--columns", "age"]),
    ]
    for title, words in ways:
        told = json.loads(cli(*words, "--json", check=0).out)
        every, always = listed(title)
        assert always <= told.keys() <= every, words
        assert told["schema"] == 1
    rows = json.loads(cli("data", "list", "--json", check=0).out)
    assert rows[0].keys() == {"name", "what", "where"}
    kept = json.loads((place / "fitted" / "analysis.json").read_text())
    assert kept["schema"] == 1
