"""Answers of a site under a budget for a whole study: charged to its ledger, computed, noised.

Nothing else that leaves depends on the samples. No minimum count is looked at, since a refusal would say something that
the ledger does not know about: what hides a sample is the noise. Folds are drawn by the site's secret.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from fedcomposite.data import DataError, FittedRecipe, Silos
from fedcomposite.data.census import noised_census
from fedcomposite.data.queries import Answer, Census, Query, one_by_one
from fedcomposite.data.sheets import Sheet
from fedcomposite.experiments.config import Config
from fedcomposite.federation.orders import Order, Question
from fedcomposite.federation.secure.keys import place
from fedcomposite.federation.secure.masked_answers import taken_down
from fedcomposite.federation.site.policy import RefusalError
from fedcomposite.federation.wire import Form, Vectors
from fedcomposite.privacy import BudgetError, StudyBudget
from fedcomposite.runtime.noised_sums import STRAYED, cost, noised
from fedcomposite.runtime.protocol import NEW, Request, Silo
from fedcomposite.runtime.transports.noised_silos import noise_of

if TYPE_CHECKING:
    from fedcomposite.federation.site.site import Site


def forms(question: Question, d: int) -> dict[str, dict[str, Form]]:
    """The vectors of noised requests about models of d coordinates."""
    x, edges, times = (Form((n,), torch.float64) for n in (d, question.count, question.times))
    return {
        "quadratic": {"x": x},
        "placed": {"scored": Form((question.groups, d), torch.float64), "edges": edges},
        "strayed": {"scored": Form((question.groups, d), torch.float64)},
        "lasting": {"x": x, "edges": edges, "times": times},
    }


def shapes(question: Question, d: int) -> dict[str, dict[str, tuple[int, ...]]]:
    """The shapes of their answers."""
    groups = question.count + 1
    return {
        "quadratic": {"count": (1,), "loss": (1,), "gradient": (d,), "hessian": (d * (d + 1) // 2,)},
        "placed": {"counts": (2, groups)},
        "strayed": dict.fromkeys(STRAYED, (1,)),
        "lasting": {"counts": (groups, question.causes + 1, question.times + 1)},
    }


def check_samples(silos: Silos, config: Config) -> None:
    """Refuse samples that a budget does not protect, by the form that they have."""
    if config.budget is not None and silos.weights is not None:
        raise RefusalError("[privacy] level = 'study': its samples have weights, and they would have to count alike")
    if config.budget is not None and silos.targets.ndim == 2 and silos.targets.shape[1] > 2:
        raise RefusalError("[privacy] level = 'study': there are no late entries and no strata of times to an event")


def told(
    site: Site,
    order: Order,
    config: Config,
    budget: StudyBudget,
    silo: Silo,
    requests: list[Request],
    content: str,
    kinds: Mapping[str, int],
) -> Vectors:
    """The noised answers to the requests of one exchange, of some kinds, which has the digest ``content``."""
    assert order.analysis is not None
    check_samples(site.silos, config)
    try:
        queries = cost(requests, silo.loss)
    except BudgetError as error:
        raise RefusalError(str(error)) from None
    if any(one.part == NEW for one in requests):
        raise RefusalError("[privacy] level = 'study': nothing is told of new patients")
    number = place(order) if order.secure else 0
    site.gate.admit(order, number, taken_down(order, content), kinds, evaluations=queries)
    site.account.charge_study(order, config, budget, queries)
    normal = noise_of(site.source, order.client, order.analysis.number)
    made = noised(silo, [_own(site, one) for one in requests], budget, config.problem.bias, normal)
    return {f"{i}.{key}": value.double() for i, sums in enumerate(made) for key, value in sums.items()}


def tables(
    site: Site, sheet: Sheet, order: Order, config: Config, budget: StudyBudget, queries: Sequence[Query]
) -> list[tuple[Query, Answer]]:
    """The noised answers to queries about a table; a census is the only one there is."""
    assert order.analysis is not None
    wanted = {
        name: [float(v) if not isinstance(v, str) else v for v in given] for name, given in budget.columns.items()
    }
    for query in queries:
        if not isinstance(query, Census) or query.columns != wanted or query.cells != budget.cells:
            raise RefusalError("[privacy] level = 'study': a table is told by a census of its columns only")
    site.account.charge_study(order, config, budget, len(queries))
    normal = noise_of(site.source, order.client, order.analysis.number)
    return [(query, noised_census(sheet, query, budget, normal)) for query in queries if isinstance(query, Census)]


def readable(learned: FittedRecipe, sheet: Sheet, budget: StudyBudget) -> Sheet:
    """The rows of a sheet that a recipe can prepare, each looked at by itself.

    Whether one of them can be prepared must not change what becomes of the others, nor how long it takes: numbers are
    read one by one, and every row is tried by itself.
    """
    numbers = [name for name, given in budget.columns.items() if given and not isinstance(given[0], str)]
    sheet = sheet.having({k: one_by_one(v) if k in numbers else v for k, v in sheet.columns.items()})
    return sheet.taking(np.array([_prepares(learned, sheet, i) for i in range(sheet.rows)], bool))


def _prepares(learned: FittedRecipe, sheet: Sheet, row: int) -> bool:
    try:
        learned.table(sheet.taking(np.arange(sheet.rows) == row))
    except DataError:
        return False
    return True


def _own(site: Site, request: Request) -> Request:
    """The request with the site's own division into folds, the same in all jobs."""
    if request.rows.kind != "fold" or site.limits.reproducible_parts:
        return request
    seed = site.ledger.secret_seed("coins")
    return dataclasses.replace(request, rows=dataclasses.replace(request.rows, seed=seed))
