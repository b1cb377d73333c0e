"""A path with cross-validation over TLS: four hospitals as processes of their own, compared with files at hand.

python -m benchmarks.analysis --lambdas 50 --folds 5
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
import time
from pathlib import Path

import numpy as np
import tomli_w
from typer.testing import CliRunner

import fedcomposite as fc
from fedcomposite.cli.federation import federation_app
from fedcomposite.cli.main import app
from fedcomposite.experiments import Config
from fedcomposite.federation.demo import party, wait_for
from fedcomposite.federation.folders import FederationFolder


def main() -> None:
    """Time both and print a line of a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lambdas", type=int, default=50)
    parser.add_argument("--folds", type=int, default=5)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as stack:
        folder = Path(place)
        files = {name: folder / f"{name}.csv" for name in fc.data.frames("heart_disease")}
        for name, frame in fc.data.frames("heart_disease").items():
            frame.to_csv(files[name], index=False)
        content = Config.read("heart-recipe").model_dump(exclude_none=True)
        content["data"] = {"files": [str(path) for path in files.values()], "target": "num"}
        experiment = folder / "experiment.toml"
        experiment.write_text(tomli_w.dumps({k: v for k, v in content.items() if v != []}))
        fed = FederationFolder.create(folder / "fed", "127.0.0.1", 0, list(files))
        starting = [("serve", "serving on", ["serve", str(fed.path)])]
        for name, path in files.items():
            site = fed.path / "sites" / name
            text = (site / "site.toml").read_text().replace("[data]", f'[data]\nfile = "{path}"\nrecipe = true', 1)
            (site / "site.toml").write_text(text + "reproducible_parts = true\n")  # the folds of files at hand
            starting.append((name, "waiting for work", ["join", str(site)]))
        for name, sign, command in starting:
            process = stack.enter_context(party(folder / f"{name}.log", *command))
            if name == "serve":
                wait_for(folder / "serve.log", sign, process)
        for name in files:
            wait_for(folder / f"{name}.log", "waiting for work", process)
        options = ["--folds", str(chosen.folds), "--count", str(chosen.lambdas)]
        seconds = {}
        for kind, command, where in (("TLS", federation_app, [str(fed.path)]), ("here", app, [])):
            began = time.monotonic()
            done = CliRunner().invoke(command, ["cv", *where, str(experiment), *options, "--out", str(folder / kind)])
            seconds[kind] = time.monotonic() - began
            if done.exit_code not in (0, 3):
                raise SystemExit(done.output)
        there, here = (json.loads((folder / kind / "analysis.json").read_text()) for kind in ("TLS", "here"))
        apart = np.abs(np.array(there["path"]["solutions"]) - np.array(here["path"]["solutions"])).max()
        sent = there["communication"]
        asked = f"{chosen.lambdas} strengths, {chosen.folds} folds | {sent['exchanges']} exchanges"
        took = f"{seconds['TLS']:.1f} s over TLS, {seconds['here']:.1f} s on files"
        print(f"| {asked} | {took} | {sent['bytes_up'] / 1e6:.1f} MB up | {apart:.1e} apart |")


if __name__ == "__main__":
    main()
