"""The steps of a learned recipe, and of a query, held against the recipe of the experiment.

What was learned are constants: means, levels, knots. Which columns they are of, in which order, and which rows are left
out is the recipe's word, which the site's people can read; steps that say something else are refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from fedcomposite.data import FittedRecipe, Recipe
from fedcomposite.data.chained import ConditionalModels
from fedcomposite.data.queries import LevelCounts, Rules
from fedcomposite.data.sheets import Sheet
from fedcomposite.data.spec import ConstantFill
from fedcomposite.data.steps import (
    Absent,
    Chained,
    Complete,
    Impute,
    Interact,
    Log,
    OneHot,
    PerSite,
    SiteTerms,
    Spline,
    Standardize,
    Step,
    logarithm,
)
from fedcomposite.federation.site.policy import DataRefusalError, RefusalError

_ORDER = (
    "absent",
    "complete",
    "impute",
    "chained",
    "one_hot",
    "site",
    "log",
    "spline",
    "interact",
    "standardize",
    "per_site",
)


def check_steps(recipe: Recipe, steps: Sequence[Step], target: str | None = None) -> None:
    """Refuse steps that are none of a recipe's; ``target`` is the column to predict, where it is known."""
    kinds = [str(getattr(step, "kind", "")) for step in steps]
    if not set(kinds) <= set(_ORDER) or kinds != sorted(set(kinds), key=_ORDER.index):
        raise RefusalError("the steps are not those of a recipe")
    for kind, step in zip(kinds, steps, strict=True):
        if not _of_recipe(recipe, step, target):
            raise RefusalError(f"the step {kind!r} is not that of the experiment's recipe")


def _of_recipe(recipe: Recipe, step: Step, target: str | None) -> bool:
    match step:
        case Absent():
            return True
        case Complete(columns=columns):
            return _left_out(recipe, columns, target)
        case Impute():
            return _filled(recipe, step)
        case Chained(chain=chain, copy_number=number):
            return number == 0 and drawn_as(recipe, chain, target)
        case OneHot(columns=columns, unknown=unknown):
            wanted = recipe.one_hot_columns
            alike = all(wanted[k] in ("", v.reference) for k, v in columns.items() if k in wanted)
            return columns.keys() == wanted.keys() and alike and unknown == recipe.unknown
        case SiteTerms(reference=reference):
            wish = recipe.site
            return reference is None if wish == "all" else wish is True or reference == wish
        case Log(offsets=offsets):
            return offsets in (recipe.log_offsets, recipe.log_offsets | ({recipe.time: 0.0} if recipe.time else {}))
        case Spline(knots=knots):
            at = {logarithm(k, recipe.log_offsets[k]) if k in recipe.log_offsets else k: v
                  for k, v in recipe.splines.items()}  # fmt: skip
            return knots.keys() == at.keys() and all(
                len(knots[k]) == v if isinstance(v, int) else knots[k] == list(v) for k, v in at.items()
            )
        case Interact(pairs=pairs):
            return all(
                any(_made(recipe, x, a) and _made(recipe, y, b) for a, b in recipe.interactions) for x, y in pairs
            )
        case Standardize(mean=mean, sd=sd):
            return recipe.standardize is not False and mean.keys() == sd.keys()
        case PerSite(columns=columns):
            each = recipe.per_site
            return each is True or all(any(_made(recipe, one, name) for name in each or ()) for one in columns)
    return False


def _left_out(recipe: Recipe, columns: Sequence[str], target: str | None) -> bool:
    """Whether rows without a value in these columns are left out by the recipe."""
    special = [columns[0], *recipe.special] if recipe.missing_target == "drop" and columns else []
    rest = list(columns[len(special) :])
    named = list(columns[: len(special)]) == special and (not special or target in (None, special[0]))
    return named and len(set(columns)) == len(columns) and all(recipe.filling(name) == "complete" for name in rest)


def drawn_as(recipe: Recipe, chain: ConditionalModels, target: str | None = None) -> bool:
    """Whether conditional models are those of the recipe, but for what was learned: scales, levels, parameters."""
    outcomes = [*([recipe.time] if recipe.time else [])]
    logs = recipe.log_offsets | ({recipe.time: 0.0} if recipe.time else {})
    return (
        all(recipe.filling(name) == "chained" for name in chain.equations)
        and (chain.copies, chain.iterations) == (recipe.copies, recipe.iterations)
        and chain.logs == logs
        and chain.levels == recipe.target
        and chain.outcomes[1:] == outcomes
        and (target is None or chain.outcomes[0] == target)
    )


def _filled(recipe: Recipe, step: Impute) -> bool:
    """Whether gaps are filled as the recipe says: by its constants, or by something that is learned."""
    for name, value in step.values.items():
        way = recipe.filling(name)
        text = name in recipe.one_hot_columns
        if way is None:
            return False
        if isinstance(way, ConstantFill) and value != (str(way.constant) if text else way.constant):
            return False
        if isinstance(way, int | float) and value != (f"{way:g}" if text else way):
            return False
    flagged = recipe.indicators
    return flagged is True or set(step.indicators) <= set(flagged if isinstance(flagged, list) else ())


def _made(recipe: Recipe, term: str, column: str) -> bool:
    """Whether a term is a column, or was made from it."""
    base = logarithm(column, recipe.log_offsets[column]) if column in recipe.log_offsets else column
    return term in (column, base) or term.startswith((f"{column}=", f"{base} spline "))


def ways_of(chain: ConditionalModels) -> dict[str, list[float]]:
    """Digests of what draws hang on that an asker may choose: how models are written, and parameters of each visit."""
    ways = {"models by which gaps are drawn": chain.digest}
    for visit, drawn in enumerate(chain.draws):
        name = chain.borrowed[visit % len(chain.borrowed)]
        ways[f"parameters of visit {visit + 1} to {name!r}"] = hashlib.sha256(repr(drawn).encode()).hexdigest()
    return {name: [float(int(digest[:12], 16))] for name, digest in ways.items()}


def fillings(sheet: Sheet, steps: Sequence[Step], least: int) -> dict[str, float | str]:
    """What the gaps of columns are filled with of which a table has some, and fewer than ``least``, by its file."""
    before = sheet
    for step in steps:
        if isinstance(step, Impute):
            few = {name: int(before.missing(name).sum()) for name in step.values if name in before.columns}
            return {sheet.origin(name).name: step.values[name] for name, count in few.items() if 0 < count < least}
        before = step.apply(before)
    return {}


def check_learned(recipe: Recipe, learned: FittedRecipe, sheet: Sheet, rules: Rules) -> None:
    """Refuse a learned recipe that is not the experiment's, or whose levels lack one that this site would tell of."""
    if learned.recipe.model_dump() != recipe.model_dump():
        raise RefusalError("the learned recipe is not the one of the experiment")
    check_steps(recipe, learned.steps, learned.target)
    for i, step in enumerate(learned.steps):
        if isinstance(step, OneHot):
            before = sheet
            for one in learned.steps[:i]:
                before = one.apply(before)
            names = [name for name in step.columns if name in before.columns]
            told = LevelCounts(columns=names).ask(before, rules)
            if any(not set(told[f"levels:{name}"]) <= set(step.columns[name].levels) for name in names):
                raise DataRefusalError("the learned levels of a category are not all that this site has told")
