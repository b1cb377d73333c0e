"""What a command will ask of every site at most: kinds of answers and their numbers, said before the first exchange.

Where approval is required the site's people see this list, a yes is for it, and the site counts what is used of it.
Restarted sites may be asked a second time, so that there is some room.
"""

from __future__ import annotations

from collections.abc import Iterable

Plan = dict[str, int]

_DESCRIBE: Plan = {"schema": 2, "gaps": 2, "levels": 4, "moments": 4, "below": 4}
_RECIPE: Plan = {"schema": 2, "gaps": 4, "levels": 8, "outside": 2, "moments": 8, "below": 40}
_QUALITY = {"scores": 4, "residuals": 6, "rates": 40, "concordance": 4, "horizon": 4}
_TIMES: Plan = {"timetable": 20, "logrank": 4, "schoenfeld": 4, "risk_sums": 4000}
_PARTS = ("fold", "site", "half", "sites", "bootstrap", "test", "validation", "new")


def _together(plans: Iterable[Plan]) -> Plan:
    made: Plan = {}
    for plan in plans:
        made |= {kind: made.get(kind, 0) + count for kind, count in plan.items()}
    return made


def _in(part: str, plan: Plan, times: int = 1) -> Plan:
    return {f"{kind} ({part})": times * count for kind, count in plan.items()}


_FIT = _together([_DESCRIBE, _RECIPE, {"newton": 4000, "losses": 400, "information": 8}, _QUALITY, _TIMES])
_PATH = _together([_FIT, {"newton": 16_000, "losses": 4000}])
_FOLDS: Plan = {"newton": 2000, "losses": 800, **_QUALITY}
_MORE: Plan = {"scores": 400, "residuals": 400, "rates": 4000, "concordance": 400, "horizon": 400}
_EVERYTHING: Plan = {"newton": 40_000, "losses": 20_000, "information": 400, **_MORE}

PLANS: dict[str, Plan] = {
    "describe": _DESCRIBE,
    "recipe": _RECIPE,
    "fit": _FIT,
    "path": _PATH,
    "cv": _together([_PATH, _in("fold", _FOLDS, 20), _in("site", _FOLDS, 20)]),
    "predict": _in("new", {"scores": 2, "residuals": 2, "concordance": 2, "horizon": 2}),
    "analysis": _together([_PATH, _EVERYTHING, *(_in(part, _EVERYTHING) for part in _PARTS)]),
}
"""By command; ``analysis`` is whatever an analysis may ask."""
