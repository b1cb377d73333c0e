"""Experiments that wait for the people of a site: nothing is computed before they said yes.

An experiment is known by the digest of its configuration, written in one way: what the coordinator fills in later
(default values) does not change it, any other number does. The parties of its secure sums belong to it, too. Waiting,
approved and rejected experiments lie in
``state/approvals/DIGEST.json``, with their text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from fedcomposite import algorithms, theory
from fedcomposite._validation import UserError
from fedcomposite.choice import AUTO
from fedcomposite.experiments.config import Config
from fedcomposite.federation.orders import Order, Secure
from fedcomposite.federation.secure.masking import seal
from fedcomposite.federation.shape import parse, write
from fedcomposite.federation.site.policy import RefusalError, UnapprovedError
from fedcomposite.files import write_atomic
from fedcomposite.problems.losses import LOSSES
from fedcomposite.registry import fold
from fedcomposite.runtime import Cohorts

Status = Literal["pending", "approved", "rejected"]
_MOST = 1000  # experiments that wait at once


class Rule(BaseModel):
    """``[[approval.allow]]`` of site.toml: a class of experiments that need no further word; all of it must fit."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    methods: list[str] = Field(min_length=1)
    """The methods that are meant."""
    losses: list[str] = Field(min_length=1)
    """The losses that are meant."""
    max_rounds: int = Field(ge=1)
    """Most rounds of the experiment."""
    max_evaluations: int = Field(ge=1)
    """Evaluated rounds of the experiment."""
    max_features: int | None = Field(default=None, ge=1)
    """Most features of the samples."""
    max_epsilon: float | None = Field(default=None, gt=0)
    """What a whole experiment may cost of the privacy budget; those without noise are then not meant."""
    secure: bool = True
    """Whether only secure sums are meant."""
    analyses: bool = False
    """Whether describing, paths, cross-validation and the like are meant too."""
    max_jobs: int = Field(default=3, ge=1)
    """Jobs of this class that are begun in a day."""

    def fits(self, config: Config, order: Order, features: int, cost: Callable[[], float | None]) -> bool:
        """Whether an experiment is one of these; ``cost()`` is its epsilon."""
        chosen, run = config.specs[0]["name"], config.run
        if config.model is not None or chosen == AUTO or (self.secure and order.secure is None):
            return False
        if order.analysis is not None and not self.analyses:
            return False
        names = {fold(algorithms.lookup(chosen).__name__)}, {fold(LOSSES.canonical(config.problem.loss or "logistic"))}
        return (
            names[0] <= set(map(fold, self.methods))
            and names[1] <= set(map(fold, self.losses))
            and run.rounds <= self.max_rounds
            and run.rounds // run.evaluate_every + 2 <= self.max_evaluations
            and (self.max_features is None or features <= self.max_features)
            and (self.max_epsilon is None or ((spent := cost()) is not None and spent <= self.max_epsilon))
        )


class Approval(BaseModel):
    """``[approval]`` of site.toml."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    required: bool = False
    """Whether experiments wait for the site's people."""
    allow: list[Rule] = []
    """Classes of experiments that need no further word."""


def digest(config: Config, secure: Secure | None = None, *, plan: Mapping[str, int] | None = None) -> str:
    """The name of an experiment: a digest of its configuration, written in one way, and of what its sums are over.

    Two sums over different parties say more than either, and numbers that are not summed say more still: the same
    experiment with other parties, with changing ones, or without secure sums is another experiment. So is an analysis,
    whose ``plan`` says which kinds of answers, and how many of each, a yes is for.
    """
    spec = dict(config.specs[0])
    if spec["name"] != AUTO and "steps" not in spec:
        label = {"label": spec["label"]} if "label" in spec else {}
        spec = algorithms.spec(config.make_algorithm(spec, None)) | label
    over = ["plain"] if secure is None else ["changing"] if secure.recover else ["sums", *secure.parties]
    if plan is not None:
        kinds = [f"{kind} {count}" for kind, count in sorted(plan.items())]
        over = ["analysis", *kinds, *(over if secure is not None else [])]
    return seal("experiment", write(config.only(spec, config.seed)), *over)


def only_steps(spec: Mapping[str, Any], left_open: Mapping[str, Any], clients: int, config: Config) -> bool:
    """Whether a method is one whose steps were left open, with steps filled in and every other field as it was.

    Steps are the fields that change with the constants of the data.
    """
    fields = {k: v for k, v in left_open.items() if k not in ("name", "label", "steps")}
    cohort = Cohorts(clients, config.run.participation).size
    some = theory.Constants(L=1.0, n=clients, cohort=cohort, batch=config.run.batch_size, rounds=config.run.rounds)
    each = [some, replace(some, L=3.0), replace(some, rho=0.01), replace(some, scale=7.0)]
    try:
        made = [
            algorithms.spec(theory.choose(algorithms.lookup(left_open["name"]), left_open["steps"], one, fields))
            for one in each
        ]
    except (ValueError, TypeError):
        return False
    free = {k for k in made[0] for one in made[1:] if one.get(k) != made[0][k]}
    return spec.keys() == made[0].keys() and all(spec[k] == v for k, v in made[0].items() if k not in free)


class Approvals:
    """The experiments that were asked for at one site, and what its people said."""

    def __init__(self, state: Path, approval: Approval) -> None:
        self._folder, self._approval = state / "approvals", approval

    def check(
        self, config: Config, order: Order, features: int, cost: Callable[[], float | None] = lambda: None
    ) -> Rule | None:
        """Have an experiment that is not approved wait, or refuse it if it was rejected; returns a rule that allows it.

        A yes is for one job, the first that comes with it (or for as many as the site's people say), and for the kinds
        and numbers of answers in the plan of an analysis. ``features`` are those of the site's samples; ``cost()`` is
        what the experiment would cost of its budget.
        """
        if not self._approval.required:
            return None
        if found := [rule for rule in self._approval.allow if rule.fits(config, order, features, cost)]:
            return found[0]
        if order.secure is not None and order.secure.phase in ("shares", "open"):
            return None  # they go on with keys that were made for an approved experiment
        if order.analysis is not None and not order.analysis.plan:
            raise RefusalError("an analysis that does not say what it will ask cannot be approved")
        name = digest(config, order.secure, plan=None if order.analysis is None else order.analysis.plan)
        known = self._read(name)
        if known is None and (before := self._filled_in(config, order)) is not None:
            name, known = before, self._read(before)
        if known is None:
            known = self._keep(name, config, order)
        if known["status"] == "rejected":
            raise RefusalError(f"experiment {name[:16]} was rejected by the site's people")
        if known["status"] != "approved":
            raise UnapprovedError(f"experiment {name[:16]} waits for approval at the site")
        self._use(name, known, order.job)
        return None

    def _use(self, name: str, known: dict[str, Any], job: str) -> None:
        """Count a job that a yes is used for."""
        begun = known.get("jobs", [])
        if job in begun:
            return
        if len(begun) >= known.get("granted", 1):
            raise UnapprovedError(
                f"experiment {name[:16]} waits for approval at the site once more: it was approved for "
                f"{known.get('granted', 1)} job(s), which have begun"
            )
        self._write(name, {**known, "jobs": [*begun, job]})

    def _filled_in(self, config: Config, order: Order) -> str | None:
        """The approved experiment whose steps were left to the coordinator, if this is it with nothing but these."""
        plan = None if order.analysis is None else order.analysis.plan
        for name, entry in self.all().items():
            if entry["status"] != "approved":
                continue
            open_spec = parse(entry["experiment"], recipe=True).specs[0]
            as_asked = config.only(open_spec, config.seed)
            if "steps" not in open_spec or digest(as_asked, order.secure, plan=plan) != name:
                continue
            method = algorithms.spec(config.make_algorithm(config.specs[0], None))
            if only_steps(method, open_spec, 1 if order.shape is None else order.shape.clients, config):
                return name
        return None

    def _keep(self, name: str, config: Config, order: Order) -> dict[str, Any]:
        if len(self.all()) >= _MOST:
            raise RefusalError("too many experiments wait for approval at the site")
        made = {
            "status": "pending",
            "asked": f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S}",
            "job": order.job,
            "secure": order.secure is not None,
            "parties": [] if order.secure is None else order.secure.parties,
            "analysis": order.analysis is not None,
            "plan": {} if order.analysis is None else order.analysis.plan,
            "experiment": write(config),
        }
        self._write(name, made)
        return made

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.json"

    def _read(self, name: str) -> dict[str, Any] | None:
        try:
            found: dict[str, Any] = json.loads(self._path(name).read_text(encoding="utf-8"))
            return {"status": found["status"], **found}
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, OSError):
            raise RefusalError("what was approved here cannot be read; the site's people have to look at it") from None

    def _write(self, name: str, entry: dict[str, Any]) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomic(self._path(name), json.dumps(entry, indent=2).encode())

    # -- for the site's people ----------------------------------------------------------------------------------------

    def all(self) -> dict[str, dict[str, Any]]:
        """Everything that was asked for, by digest."""
        found = {p.stem: self._read(p.stem) for p in sorted(self._folder.glob("*.json"))}
        return {k: v for k, v in found.items() if v is not None}

    def decide(self, start: str, status: Status, jobs: int = 1) -> str:
        """Approve, for so many more jobs, or reject the experiment whose digest begins so; returns the digest."""
        names = [k for k in self.all() if re.fullmatch("[0-9a-f]{6,64}", start) and k.startswith(start)]
        if len(names) != 1:
            many = "several experiments begin" if names else "no experiment begins"
            raise UserError(f"{many} with {start!r} (give at least six characters of its digest)")
        entry = self.all()[names[0]]
        now, granted = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S}", len(entry.get("jobs", [])) + jobs
        self._write(names[0], {**entry, "status": status, "granted": granted, "decided": now})
        return names[0]
