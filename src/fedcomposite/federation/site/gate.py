"""The one gate through which every path out of a site passes: rounds, measurements, analyses, tables, introductions.

What a job is about is bound when it is first seen: its experiment, its columns and their order, the site's number, its
recipe as learned, its start, and what it said that it would ask. An order that differs in one of these is of another
job. All of it is kept in the site's ledger, so that a restart forgets nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from fedcomposite.choice import AUTO
from fedcomposite.experiments.config import Config
from fedcomposite.federation.orders import Order
from fedcomposite.federation.secure.masking import seal
from fedcomposite.federation.shape import write
from fedcomposite.federation.site.approval import Rule
from fedcomposite.federation.site.ledger import Ledger
from fedcomposite.federation.site.policy import RefusalError


class Gate:
    """What one site has let through, and lets through."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def bind(self, order: Order, config: Config) -> None:
        """Hold what a job is about; refuse an order of the same job that is about something else."""
        if not order.tells:
            return
        held = {"experiment": seal(write(config.only({"name": AUTO}, config.seed)))}
        if order.shape is not None:
            held["method"] = seal(order.config)
            held["shape"] = seal(order.shape.model_dump_json())
            held["client number"] = seal(order.client)
        if order.recipe:
            held["recipe"] = seal(order.recipe)
        if order.analysis is not None:
            held["plan"] = seal(*(f"{kind} {count}" for kind, count in sorted(order.analysis.plan.items())))
        self._ledger.bind(order.job, held)

    def allow(self, order: Order, rule: Rule | None) -> None:
        """Count a job that needs no further word because of a rule."""
        if rule is not None:
            self._ledger.grant(order.job, seal(rule.model_dump_json())[:16], rule.max_jobs, rule.max_evaluations)

    def start(self, order: Order, digest: str) -> None:
        """Hold the vectors from which a job's rounds begin."""
        self._ledger.bind(order.job, {"start": digest})

    def admit(self, order: Order, number: int, asked: Mapping[str, str], kinds: Mapping[str, int], **work: int) -> None:
        """Take an analysis down: its digests, its work, and the kinds of its answers, of which the plan has so many."""
        assert order.analysis is not None
        if (plan := order.analysis.plan) and (odd := [kind for kind in kinds if kind not in plan]):
            raise RefusalError(f"{odd[0]!r} is not among what this job said that it would ask")
        self._ledger.admit(order.job, number, dict(asked), {k: (n, plan.get(k)) for k, n in kinds.items()}, **work)
