"""A site's account of its privacy: what an answer is worth to whoever gets to see it, and what has been spent.

An answer that leaves as it is has the noise that this site adds. In a secure sum, n sites may add a share each of the
noise's variance (``share`` of ``[privacy]``); of the sum's noise somebody who works together with c of the sites can
take theirs away, so what is left is n - c shares. How many sites are taken to be honest, this one included, is the
site's own word: ``honest_parties`` of its ``[limits]``. Without that word it takes no part in shared noise.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fedcomposite.experiments.config import Config
from fedcomposite.federation.orders import Order, Secure
from fedcomposite.federation.site.ledger import Ledger
from fedcomposite.federation.site.policy import Limits, RefusalError
from fedcomposite.privacy import Query, SampleLevel, Source, StudyBudget
from fedcomposite.problems import Problem
from fedcomposite.runtime.records import planned_queries


def level(config: Config) -> SampleLevel | None:
    """How an experiment protects samples."""
    found = config.make_privacy()
    return found if isinstance(found, SampleLevel) else None


class PrivacyAccount:
    """What one site's answers have cost, in its ledger."""

    def __init__(self, ledger: Ledger, limits: Limits) -> None:
        self._ledger, self._limits, self._charged = ledger, limits, False

    def query(self, order: Order, config: Config) -> Query | None:
        """One answer to this order as the accountant sees it; None where nothing is noised."""
        if (privacy := level(config)) is None:
            return None
        if order.secure is None or privacy.share == 1:
            return privacy.query()
        honest = self._honest(order, order.secure, config, privacy.share)
        if not config.make_algorithm(config.specs[0], None).linear_replies:
            shared = f"share = {privacy.share:g} of the noise"
            raise RefusalError(f"{shared}: shares add up only in replies that are linear, as of ProximalGradient")
        return privacy.query(honest)

    def charge_study(self, order: Order, config: Config, budget: StudyBudget, count: int) -> None:
        """Take noised requests of a study down, before they are computed."""
        self.charge(order.job, self._study_query(order, config, budget), count)

    def study_cost(self, order: Order, config: Config) -> float | None:
        """Epsilon of all requests of a study; None for any other experiment."""
        if (budget := config.budget) is None:
            return None
        return self._ledger.price(self._study_query(order, config, budget), budget.requests)

    def _study_query(self, order: Order, config: Config, budget: StudyBudget) -> Query:
        if order.secure is None or budget.share == 1:
            return budget.query()
        return budget.query(self._honest(order, order.secure, config, budget.share))

    def _honest(self, order: Order, secure: Secure, config: Config, share: float) -> int:
        """How many shares of noise are in a sum that nobody can take away; refuses sums in which that is not known."""
        shared, honest = f"share = {share:g} of the noise", self._limits.honest_parties
        if honest is None:
            raise RefusalError(f"{shared}: this site has not said how many honest_parties (in its [limits]) it assumes")
        if honest > len(secure.parties):
            raise RefusalError(f"{shared} in a sum of {len(secure.parties)}: its honest_parties = {honest} are more")
        if secure.recover or (order.train and secure.trainers != secure.parties):
            raise RefusalError(f"{shared}: every sum must have all of them (policy 'wait', participation 1)")
        if config.problem.weights != "samples":
            raise RefusalError(f"{shared} hides a sample only if all count alike: weights = 'samples'")
        return honest

    def planned(self, order: Order, config: Config, problem: Problem) -> int:
        """How many answers an experiment asks for."""
        run, method = config.run, config.make_algorithm(config.specs[0], None)
        asked = planned_queries(method, problem.smooth().start(), problem.regularizer, run.rounds, order.cohort)
        return asked + run.rounds // run.evaluate_every + 1 + (run.rounds % run.evaluate_every > 0)

    def cost(self, order: Order, config: Config, problem: Problem) -> float | None:
        """Epsilon of a whole experiment, at this site's delta; None where nothing is noised."""
        query = self.query(order, config)
        if query is None:
            return None
        return self._ledger.price(query, self.planned(order, config, problem), self._of_samples(config))

    def afford(self, order: Order, config: Config, problem: Problem) -> None:
        """Refuse an experiment that this site's privacy budget would not last for."""
        query = self.query(order, config)
        if query is not None and self._limits.epsilon is not None:
            self._ledger.afford(order.job, query, self.planned(order, config, problem), self._of_samples(config))

    def samples(self, config: Config, sizes: Mapping[str, int], source: Source) -> dict[str, int]:
        """How many samples each part has, as they are told: their numbers, or with noise where there is a budget.

        That is one query of the experiment's noise and rate, told once and charged as any other: a sample is in one
        part, and adds 1 to the number there. Sites that share noise in a sum add their whole noise to this number.
        """
        if (query := self._of_samples(config)) is None:
            return dict(sizes)

        def made() -> dict[str, int]:
            normal = source.normal(np.zeros(1, np.uint64), 0, 0, len(sizes))[0]
            told = {}
            for (part, size), noise in zip(sizes.items(), normal.tolist(), strict=True):
                (there,) = source.chosen(np.zeros(1, np.uint64), np.asarray([size], np.uint64), 0, 0, query.rate)
                about = (len(there) + query.noise * noise) / query.rate
                told[part] = int(min(max(round(about), self._limits.min_samples), 2**40))
            return told

        made_once = self._ledger.once(query, made)
        self._charged = True
        return made_once

    def _of_samples(self, config: Config) -> Query | None:
        """The query that numbers of samples are; None where they are told as they are."""
        privacy = level(config)
        if privacy is None or self._limits.epsilon is None or self._limits.exact_counts:
            return None
        return Query(privacy.noise, privacy.rate)

    def charge(self, job: str, query: Query, count: int = 1) -> None:
        """Take noised answers down, before they are computed."""
        self._ledger.charge(job, query, count)
        self._charged = True

    def told(self) -> float | None:
        """Epsilon of all answers so far, if there was one since this was asked last: for the audit log."""
        charged, self._charged = self._charged, False
        return self._ledger.spent() if charged else None
