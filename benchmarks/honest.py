"""Honest work at sites with default limits: are its numbers those of files at hand, and how slow is it?

    python -m benchmarks.honest                            # heart disease, GUSTO-I, times to an event
    python -m benchmarks.honest --studies heart --analyses 3 --repeats 0

Each study is done by the code of a real site, in this process: description, recipe, path, 5-fold cross-validation,
intervals, quality. Sites of one federation have default limits, those of the other opt out of all that stands between
an asker and exact numbers; both are printed beside a simulation, which has the files. Folds of default sites are their
secret, so that cross-validated numbers differ by that, too. Then ten analyses of the same data follow each other, each
with another penalty, recipe, choice or number of folds. Last the processor time of one whole analysis at either kind of
sites, in turns, with the same folds: both have one secret and one division into blocks. GUSTO-I (40,830 patients in 16
regions, death within 30 days) is FEDCOMPOSITE_DATA/multicentre/gusto.csv.gz.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pandas as pd
import tomli_w
import torch

import fedcomposite as fc
from fedcomposite.data.describing import look_at
from fedcomposite.experiments import Config
from fedcomposite.federation.coordinator.delivery import FederationError
from fedcomposite.federation.coordinator.inquiry import Inquiry, learn
from fedcomposite.federation.coordinator.plans import PLANS
from fedcomposite.federation.engines.local import InProcess
from fedcomposite.federation.shape import parse
from fedcomposite.federation.site import gate
from fedcomposite.federation.site.client_states import StateStore
from fedcomposite.federation.site.policy import Limits
from fedcomposite.federation.site.row_sets import blocks
from fedcomposite.federation.site.table_files import TableFile
from fedcomposite.federation.site.table_site import TableSite
from fedcomposite.runtime import Driver

OPTS_OUT: dict[str, Any] = {
    "min_count": 1, "min_class": 1, "min_events": 1, "exact_counts": True, "reproducible_parts": True,
    "reproducible_batches": True, "evaluations_per_day": 10**6, "gradients_per_day": 10**7,
}  # fmt: skip
PATH: dict[str, Any] = {"count": 20, "ratio": 0.01}
_GUSTO = ("day30", "age", "Killip", "sysbp", "pulse", "miloc", "pmi", "sex", "dia", "htn", "smk", "height", "weight")


@dataclass
class Study:
    """Files of sites, and an experiment on them."""

    files: dict[str, Path]
    content: dict[str, Any]
    options: dict[str, Any]
    target: str
    less: tuple[str, str] = ("age", "sex")  # columns without which there are further analyses

    def text(self, **changes: Any) -> str:
        """The experiment, with another regularizer or another recipe."""
        made = {**self.content, "algorithm": {"name": "ProxNewton"}, **changes}
        return tomli_w.dumps({k: v for k, v in made.items() if k != "name"})

    def sites(self, folder: Path, **limits: Any) -> InProcess:
        """Sites that have the files."""
        own = Limits(**{"gradients_per_day": 10**7, **limits})
        return InProcess(
            [
                TableSite(name, StateStore(folder / name), own, source=TableFile(name, path))
                for name, path in self.files.items()
            ]
        )

    def at_hand(self, **changes: Any) -> fc.Problem:
        """The problem of somebody who has the files."""
        text = self.text(**changes)
        data = {k: v for k, v in self.content["data"].items() if k != "name"}
        data["files"] = [str(path) for path in self.files.values()]
        return Config.check({**tomllib.loads(text), "data": data}).make_problem()


def heart(folder: Path) -> Study:
    """Four hospitals, 920 patients."""
    return _study(folder, dict(fc.data.frames("heart_disease")), tomllib.loads(Config.read("heart-recipe").text))


def gusto(folder: Path) -> Study:
    """Sixteen regions, 40,830 patients."""
    table = pd.read_csv(Path(os.environ["FEDCOMPOSITE_DATA"]) / "multicentre" / "gusto.csv.gz")
    frames = {f"region{number:02d}": part[list(_GUSTO)] for number, part in table.groupby("regl")}
    recipe = {"one_hot": ["Killip", "miloc", "pmi", "sex", "smk"], "splines": {"age": 3}, "rare": 5}
    problem = {"loss": "logistic", "bias": True, "weights": "samples"}
    content = {"data": {"target": "day30"}, "recipe": recipe, "problem": problem,
               "regularizer": {"name": "L1", "lam": 0.001}, "run": {"rounds": 100}}  # fmt: skip
    return _study(folder, frames, content)


def cox(folder: Path) -> Study:
    """Three hospitals with times to an event, 600 patients."""
    files = fc.data.survivor_files(folder, clients=3, samples=200)
    here = Config.read(folder / "experiment.toml")
    own = {name: Path(path) for name, path in files.items()}
    return Study(own, tomllib.loads(here.text), {"horizon": 60.0}, here.data["target"], ("age", "size"))


def _study(folder: Path, frames: dict[str, pd.DataFrame], content: dict[str, Any]) -> Study:
    files = {name: folder / f"{name}.csv" for name in frames}
    for name, frame in frames.items():
        frame.to_csv(files[name], index=False)
    return Study(files, content, {}, content["data"]["target"])


STUDIES: dict[str, Callable[[Path], Study]] = {"heart": heart, "gusto": gusto, "cox": cox}


class Work(NamedTuple):
    """An analysis, and how many exchanges it took."""

    found: Any
    exchanges: int


def work(study: Study, sites: InProcess, job: str, kind: str = "cv", **options: Any) -> Work:
    """Description, recipe, path, cross-validation, intervals and quality, by orders to sites."""
    changes = {k: options.pop(k) for k in ("regularizer", "recipe") if k in options}
    config = parse(study.text(**changes), recipe=True)
    asking = Inquiry(sites, list(sites.sites), sites.permitted, config, job, plan=PLANS["cv"])
    driver = Driver(asking)
    look_at(lambda query: driver.ask([query])[0], asking.names)
    asking.recipe = learn(driver, asking.config, study.target)
    found = fc.analyse(asking.meet(), kind, driver=driver, **study.options, **_asked(kind, options))
    return Work(found, asking.exchanges)


def simulated(study: Study, kind: str = "cv", **options: Any) -> Any:
    """The same of files at hand."""
    changes = {k: options.pop(k) for k in ("regularizer", "recipe") if k in options}
    return fc.analyse(study.at_hand(**changes), kind, **study.options, **_asked(kind, options))


def _asked(kind: str, options: dict[str, Any]) -> dict[str, Any]:
    chosen = {} if kind == "fit" else {**PATH, **options}
    return {"folds": 5, **chosen} if kind == "cv" else chosen


def figures(found: Any) -> dict[str, float]:
    """The numbers of an analysis that are compared."""
    one = found.quality.overall
    if hasattr(one, "c_index"):
        return {"C-index": one.c_index, "AUROC": one.auroc, "Brier": one.brier}
    return {"AUROC": one.auroc, "off by at most": one.auroc_error, "slope": one.calibration_slope, "Brier": one.brier}


def variants(study: Study) -> list[dict[str, Any]]:
    """Ten analyses of the same data."""
    recipe = study.content["recipe"]
    with_less = [{**recipe, "drop": [*recipe.get("drop", []), name]} for name in study.less]
    with_less = [{**r, "one_hot": [c for c in r["one_hot"] if c not in r["drop"]]} for r in with_less]
    for one in with_less:
        one["splines"] = {k: v for k, v in one.get("splines", {}).items() if k not in one["drop"]}
    elastic = {"name": "ElasticNet", "l1": 0.01, "l2": 0.01}
    return [
        {}, {"kind": "fit"}, {"choice": "min"}, {"folds": 4}, {"regularizer": elastic}, {"recipe": with_less[0]},
        {"recipe": with_less[1]}, {"kind": "path", "choice": "bic"}, {"choice": 0.003},
        {"regularizer": elastic, "choice": "min"},
    ]  # fmt: skip


def one_after_another(study: Study, folder: Path, count: int) -> pd.DataFrame:
    """So many analyses of the same sites, beside the simulation."""
    sites, rows = study.sites(folder / "sites"), []
    for i, options in enumerate(variants(study)[:count]):
        said = ", ".join(f"{k} {v if not isinstance(v, dict) else v.get('name', 'less')}" for k, v in options.items())
        try:
            there, here = work(study, sites, f"job{i}", **dict(options)).found, simulated(study, **dict(options))
        except FederationError as error:
            print(f"{said or 'cv'}: {error}", flush=True)
            continue
        off = float((torch.as_tensor(there.x) - torch.as_tensor(here.x)).abs().max())
        ours = {f"{k}, at hand": v for k, v in figures(here).items() if k != "off by at most"}
        rows.append({"analysis": said or "cv", **figures(there), **ours, "model off": off})
    return pd.DataFrame(rows)


def seconds(study: Study, folder: Path, repeats: int) -> pd.DataFrame:
    """The processor time of whole analyses at sites with default limits and at ones that opt out, in turns.

    Both have the same secret, and blocks as at default sites, so that folds and models are the same ones.
    """
    alike = {**OPTS_OUT, "reproducible_parts": False}
    rows = []
    for i in range(repeats):
        for name, limits in (("default", {}), ("opts out", alike)):
            own = folder / f"{name}{i}"
            for site in study.files:
                (own / site).mkdir(parents=True)
                (own / site / "secret").write_bytes(bytes([i]) * 32)
            sites = study.sites(own, **limits)
            began = time.process_time()
            with mock.patch.object(gate, "blocks", lambda secret, rows, _: blocks(secret, rows, Limits().min_count)):
                exchanges = work(study, sites, "job").exchanges
            rows.append({"sites": name, "seconds": time.process_time() - began, "exchanges": exchanges})
    return pd.DataFrame(rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--studies", default=",".join(STUDIES))
    parser.add_argument("--analyses", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for name in given.studies.split(","):
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            study = STUDIES[name](folder)
            print(f"{name}: {len(study.files)} sites with default limits, one analysis after another", flush=True)
            table = one_after_another(study, folder, given.analyses)
            print(table.to_string(index=False, float_format=lambda v: f"{v:.4f}"), flush=True)
            if given.repeats:
                taken = seconds(study, folder, given.repeats)
                print(f"processor time of whole analyses with the same folds, {given.repeats} in turns", flush=True)
                for name, each in taken.groupby("sites"):
                    said = ", ".join(f"{v:.2f}" for v in each["seconds"])
                    print(f"{name}: {said} s, {each['exchanges'].tolist()} exchanges", flush=True)
                medians = taken.groupby("sites")["seconds"].median()
                print(f"medians: {100 * (medians['default'] / medians['opts out'] - 1):+.1f} %", flush=True)


if __name__ == "__main__":
    np.set_printoptions(precision=4)
    main()
