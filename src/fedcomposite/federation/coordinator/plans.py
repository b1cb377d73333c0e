"""What a command will ask of every site at most: kinds of answers and their numbers, said before the first exchange.

Where approval is required the site's people see this list, a yes is for it, and the site counts what is used of it.
Restarted sites may be asked a second time, so that there is some room.
"""

from __future__ import annotations

from collections.abc import Iterable

from fedcomposite.data import Recipe
from fedcomposite.experiments.config import Config

Plan = dict[str, int]

_DESCRIBE: Plan = {"schema": 2, "gaps": 2, "levels": 4, "moments": 4, "below": 4}
_RECIPE: Plan = {"schema": 2, "gaps": 4, "levels": 8, "outside": 2, "moments": 8, "below": 40}
_QUALITY = {"scores": 4, "tallies": 4, "calibration": 60, "residuals": 6, "rates": 40, "concordance": 4, "horizon": 4}
_TIMES: Plan = {"timetable": 20, "logrank": 4, "schoenfeld": 4, "risk_sums": 4000}
_STUDY: Plan = {"census": 2, "quadratic": 40, "quadratic (fold)": 200, "lasting": 4}
_STUDY |= {f"{kind}{part}": 20 for kind in ("placed", "strayed") for part in ("", " (fold)", " (test)")}
_OF_COPIES = ("newton", "information")  # tables of estimates ask about each copy
_PARTS = ("fold", "site", "half", "sites", "bootstrap", "test", "validation", "new")


def _together(plans: Iterable[Plan]) -> Plan:
    made: Plan = {}
    for plan in plans:
        made |= {kind: made.get(kind, 0) + count for kind, count in plan.items()}
    return made


def _in(part: str, plan: Plan, times: int = 1) -> Plan:
    return {f"{kind} ({part})": times * count for kind, count in plan.items()}


_FIT = _together([_STUDY, _DESCRIBE, _RECIPE, {"newton": 4000, "losses": 400, "information": 404}, _QUALITY, _TIMES])
_BY_SITE: Plan = {"newton": 4000, "information": 100}
_TABLE_ONE: Plan = {"schema": 2, "gaps": 100, "levels": 200, "moments": 200, "below": 1500}
_PATH = _together([_FIT, {"newton": 16_000, "losses": 4000}])
_FOLDS: Plan = {"newton": 2000, "losses": 800, "risk_sums": 4, **_QUALITY}  # a baseline for the site that is left out
_MORE: Plan = {kind: 100 * count for kind, count in _QUALITY.items()}
_EVERYTHING: Plan = {"newton": 40_000, "losses": 20_000, "information": 4000, **_MORE}

_ONE_BASELINE: Plan = {"risk_sums": 60_000}
"""Of Cox models with one baseline for all sites, in place of gradients and losses."""

PLANS: dict[str, Plan] = {
    "describe": _together([_DESCRIBE, {"census": 2}]),
    "table_one": _together([_TABLE_ONE, {"census": 2}]),
    "recipe": _together([_RECIPE, {"census": 2}]),
    "fit": _together([_FIT, _in("site", _BY_SITE)]),
    "path": _together([_PATH, _in("site", _BY_SITE)]),
    "cv": _together([_PATH, _in("fold", _FOLDS, 20), _in("site", _together([_FOLDS, _BY_SITE]), 20)]),
    "predict": _in("new", {kind: 2 for kind in _QUALITY} | {"calibration": 60}),
    "analysis": _together(
        [
            _PATH,
            _EVERYTHING,
            *(_in(part, _EVERYTHING) for part in _PARTS),
            _ONE_BASELINE,
            *(_in(part, _ONE_BASELINE) for part in ("fold", "site")),
        ]
    ),
}
"""By command; ``analysis`` is whatever an analysis may ask."""


def plan_of(command: str, config: Config) -> Plan:
    """What a command will ask, also for Table 1 and for gaps that are imputed by draws."""
    table = config.table_one is not None and command != "table_one"
    plan = _together([PLANS[command], PLANS["table_one"]]) if table else PLANS[command]
    if config.problem.baseline == "common" and command in ("fit", "path", "cv"):
        parts = ("fold", "site") if command == "cv" else ()
        plan = _together([plan, _ONE_BASELINE, *(_in(part, _ONE_BASELINE) for part in parts)])
    recipe = Recipe(**(config.recipe or {}))
    if not recipe.draws or command in ("describe", "table_one"):
        return plan
    plan = {kind: count * (recipe.copies if kind.split(" ")[0] in _OF_COPIES else 1) for kind, count in plan.items()}
    return _together([plan, {"lacking": 2, "conditional": 100 * recipe.iterations}])
