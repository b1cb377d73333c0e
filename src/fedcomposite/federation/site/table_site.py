"""Sites whose file is a table as people have it: an experiment's recipe makes features of it, at the site."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from fedcomposite.data import DataError, FittedRecipe, Recipe, Silos
from fedcomposite.data.chained import Drawing
from fedcomposite.data.queries import Answer, Query, Rules, write_answer
from fedcomposite.data.sheets import Sheet
from fedcomposite.data.spec import SitePart
from fedcomposite.experiments.config import Config
from fedcomposite.federation import wire
from fedcomposite.federation.orders import AnalysisOrder, Order
from fedcomposite.federation.secure.keys import MaskKeys
from fedcomposite.federation.secure.masked_answers import Sums, Told
from fedcomposite.federation.site import analyses, minimum_counts, noised_answers, policy
from fedcomposite.federation.site.approval import Approvals
from fedcomposite.federation.site.audit import Audit
from fedcomposite.federation.site.client_states import StateStore
from fedcomposite.federation.site.data_versions import DataVersions
from fedcomposite.federation.site.gate import Gate
from fedcomposite.federation.site.learned_steps import check_learned, check_steps, fillings
from fedcomposite.federation.site.ledger import Ledger
from fedcomposite.federation.site.policy import DataRefusalError, Limits, RefusalError
from fedcomposite.federation.site.privacy_account import PrivacyAccount
from fedcomposite.federation.site.row_sets import KeptRows
from fedcomposite.federation.site.site import Site, reconcile
from fedcomposite.federation.site.table_files import Newcomers, TableFile, marks_of, reading
from fedcomposite.federation.wire import Content
from fedcomposite.privacy import Source, StudyBudget, System


class _Prepared(Site):
    """A site with the features of a learned recipe; in the ledger its data are the table's file."""

    def __init__(self, digest: str, kept: KeptRows | None, *given: Any, **more: Any) -> None:
        self._file = digest
        super().__init__(*given, **more)
        self.kept = kept

    def _digest(self) -> str:
        return self._file

    def _check_version(self, config: Config) -> None:
        pass  # of the table's rows


class TableSite(Site):
    """One party with a table: it answers queries about it, and work on the features that a learned recipe makes."""

    def __init__(
        self,
        name: str,
        store: StateStore,
        limits: Limits | None = None,
        log: Callable[[str], None] = lambda line: None,
        classes: Sequence[float] | None = None,
        *,
        source: TableFile,
        vault: MaskKeys | None = None,
        approvals: Approvals | None = None,
        audit: Audit | None = None,
        newcomers: Newcomers | None = None,
        device: str = "cpu",
    ) -> None:
        self.newcomers, self.device = newcomers, device
        self.name, self.store, self.limits, self._log = name, store, limits or Limits(), log
        self._source, self._classes, self._vault = source, classes, vault or MaskKeys(name, self.limits)
        self._approvals, self._audit, self._waiting, self._noticed = approvals, audit, set(), {}
        self.head = (lambda: "") if audit is None else audit.signed_head
        self.ledger = Ledger(store.folder, self.limits, source.digest)
        reconcile(self.ledger, audit)
        self._file = source.digest
        self.gate = Gate(self.ledger, self.limits, store.folder, self._file)
        self._versions = DataVersions(store.folder, self._file, self.limits.min_count, self.ledger, source.rows)
        self._sums = Sums(self._vault, self.ledger, self.limits)
        self.account = PrivacyAccount(self.ledger, self.limits)
        self.source: Source = System()
        self._parsed: tuple[str, Config] | None = None
        self._file_read: tuple[str, Sheet] | None = None
        self._read: tuple[str, Sheet] | None = None
        self._drawing = Drawing(self.ledger.secret_seed("gaps", self._file), self.limits.min_count)
        self._taken_down: str | None = None  # the recipe whose reading is in the book
        self._prepared: tuple[str, Site] | None = None

    def summary(self) -> pd.DataFrame:
        """What the site's own people see of it; empty if the file cannot be read before a recipe says how."""
        try:
            sheet = self._source.sheet(Recipe())
        except DataError as error:
            self._log(f"{error}; a recipe may say what that means")
            return pd.DataFrame(columns=["column", "kind", "rows", "missing"])
        gaps = [int(sheet.missing(c).sum()) for c in sheet.columns]
        kinds = [sheet.kind(c) for c in sheet.columns]
        return pd.DataFrame({"column": list(sheet.columns), "kind": kinds, "rows": sheet.rows, "missing": gaps})

    def answer(self, request: Content) -> Content:
        made, here = self._judged(request)
        number, other = self._number(), None if self._prepared is None else self._prepared[1].account
        spent = self.account.told() if other is None else other.told() or self.account.told()
        return self._noted(request, made, spent, number, here)

    def _number(self) -> int:
        """The number of the ledger, whoever of the two that write it was last."""
        books = [self.ledger] if self._prepared is None else [self.ledger, self._prepared[1].ledger]
        number = max(book.number for book in books)
        for book in books:
            book.number = number
        return number

    def _answer(self, request: Content) -> Content:
        order, config = self._order_of(request)
        self._check_reading(Recipe(**(config.recipe or {})), order)
        keys = order.secure is not None and order.secure.phase in ("keys", "shares")
        if not keys and (order.analysis is None or not order.analysis.queries):
            if self._approvals is not None and config.privacy is None:  # before its recipe is in any book
                self._approvals.check(config, order, len(self._table(config).columns))
            return self._features(order, config)._answer(request)
        analyses.check_allowed(self.limits, config, order)
        policy.permit(self.limits, config, order)
        if self._approvals is not None:
            columns, cost = len(self._table(config).columns), partial(self.account.study_cost, order, config)
            self.gate.allow(order, self._approvals.check(config, order, columns, cost))
        if order.secure is None:
            policy.check_plain(self.limits)
        self.gate.bind(order, config)
        if order.secure is not None:
            return self._sums.answer(order, order.secure, config, request, self)
        assert order.analysis is not None
        answers = self._queries(order, order.analysis, config)
        made = wire.content(answers=json.dumps([write_answer(one) for _, one in answers]))
        said = f"{analyses.asked(order.analysis)}; {wire.weight(made) / 1e3:.1f} kB sent"
        self._log(f"job {order.job}: exchange {order.analysis.number}: {said}")
        return made

    def _queries(self, order: Order, analysis: AnalysisOrder, config: Config) -> list[tuple[Query, Answer]]:
        sheet = self._table(config)
        if config.budget is not None:
            return analyses.answered_queries(self, sheet, order, analysis, config)
        if sheet.rows < self.limits.min_samples:
            raise DataRefusalError(f"it has fewer rows than its min_samples = {self.limits.min_samples}")
        self._versions.check()
        self._own_table(config)
        return analyses.answered_queries(self, sheet, order, analysis, config)

    def tell(self, order: Order, analysis: AnalysisOrder, config: Config, request: Content) -> Told:
        """Answer queries about the table."""
        self._log(f"job {order.job}: exchange {analysis.number}: {analyses.asked(analysis)}; in a secure sum")
        return analyses.divided(analysis, self._queries(order, analysis, config))

    def _table(self, config: Config) -> Sheet:
        """The table with the names and units of an experiment."""
        if self._read is None or self._read[0] != repr(config.recipe):
            recipe = Recipe(**(config.recipe or {}))
            self._read = repr(config.recipe), recipe.local(self.name).apply(self._sheet(recipe))
        return self._read[1]

    def _sheet(self, recipe: Recipe) -> Sheet:
        """The file, which must be the one that the site was started with: books are of that."""
        if self._source.digest != self._file:
            raise RefusalError("its file has changed since the site was started; its people have to start it anew")
        if self._file_read is None or self._file_read[0] != repr(recipe):
            self._file_read = repr(recipe), replace(self._source.sheet(recipe), drawing=self._drawing)
        return self._file_read[1]

    def _own_table(self, config: Config) -> Sheet:
        """The same, for an answer: how it is read is taken down, since the difference of two readings says much."""
        recipe = Recipe(**(config.recipe or {}))
        if self._taken_down != repr(config.recipe):
            self.gate.rows.read_as(reading(self._sheet(recipe), recipe.local(self.name)))
            self._taken_down = repr(config.recipe)
        return self._table(config)

    def _check_reading(self, recipe: Recipe, order: Order) -> None:
        """Refuse an experiment that says how this site's file is written, or in a secure sum treats sites unlike."""
        if order.secure is not None and (recipe.site or recipe.per_site) and not self.limits.left_out:
            raise RefusalError(
                "site or per_site in the [recipe]: the sum over a site's own column is that site's answer; in secure "
                "sums it needs left_out = true in the [limits] of all sites"
            )
        for role in ("weight", "offset"):
            if getattr(recipe, role) != getattr(self._source, role):
                named = getattr(self._source, role)
                said = f"{role} = {named!r}, and this experiment's [recipe] has to" if named else f"no {role}"
                raise RefusalError(
                    f"{role} in the [recipe]: which samples count, and for how much, is the site's word; the [data] of "
                    f"its site.toml says {said}"
                )
        if self.limits.foreign_reading:
            return
        style, own = recipe.sites.get(self.name, SitePart()).style, self._source.style or {}
        if foreign := [option for option, value in style.items() if own.get(option) != value]:
            raise RefusalError(
                f"how its file is written ({foreign[0]}) is the site's word: put it under [data] in its site.toml"
            )
        if order.secure is not None and recipe.sites:
            raise RefusalError(
                "[recipe.sites] in a secure sum could make one site's rows differ from all others': what is special "
                "about a site belongs into its site.toml"
            )

    def _check_labels(self, target: str, silos: Silos, kept: KeptRows | None) -> None:
        """Take down which label each row has: another one for few of them would tell who they are."""
        targets = silos.targets.tolist()
        labels = marks_of([tuple(t) if isinstance(t, list) else t for t in targets])  # a time and an event are one
        if kept is not None:
            every = np.zeros(kept.of, np.int64)
            every[kept.places] = labels
            labels = every
        self.gate.rows.read_as({f"target {target}": labels})

    def _features(self, order: Order, config: Config) -> Site:
        """The site with the features of a learned recipe; it has the same ledger and approvals."""
        if config.recipe is None or not order.recipe:
            raise RefusalError("its table needs a recipe: use an experiment with a [recipe] (or recipe = false there)")
        if self.limits.epsilon is not None and config.budget is None:  # whether steps fit would tell on its rows
            raise RefusalError(
                f"this site has a privacy budget (epsilon = {self.limits.epsilon:g}): for a table that a recipe "
                "prepares [privacy] level = 'study' is needed"
            )
        if self._prepared is None or self._prepared[0] != order.recipe:
            learned, recipe = FittedRecipe.parse(order.recipe), Recipe(**config.recipe)
            if config.budget is not None:
                self._prepared = order.recipe, self._noised_features(config.budget, learned, recipe)
                self._number()
                return self._prepared[1]
            self._versions.check()
            sheet, table = self._sheet(recipe), self._own_table(config)
            check_learned(recipe, learned, table, Rules(self.limits.min_count))
            self.gate.look_at(table, learned.steps)
            self.gate.rows.fill(fillings(table, learned.steps, self.limits.min_count), table.rows)
            silos = learned.silos([sheet])
            minimum_counts.check_own(self.limits, learned.few(sheet, self.limits.min_count))
            kept = analyses.kept_rows(table, learned.steps)
            self._check_labels(learned.target, silos, kept)
            self.gate.columns.tell(minimum_counts.columns_of(silos), kept)
            if (products := minimum_counts.products_with_levels(silos)) is not None:
                self.gate.products.tell(products, kept)
            self._prepared = order.recipe, self._made(silos, kept)
            self._number()
        return self._prepared[1]

    def _made(self, silos: Silos, kept: KeptRows | None, limits: Limits | None = None) -> Site:
        made = _Prepared(
            self._source.digest, kept, self.name, silos, self.store, limits or self.limits, self._log, self._classes,
            vault=self._vault, approvals=self._approvals, newcomers=self.newcomers, device=self.device,
        )  # fmt: skip
        made.source, made.head = self.source, self.head
        return made

    def _noised_features(self, budget: StudyBudget, learned: FittedRecipe, recipe: Recipe) -> Site:
        """The same under a budget, where nothing may depend on what single rows are."""
        if learned.recipe.model_dump() != recipe.model_dump():
            raise RefusalError("the learned recipe is not the one of the experiment")
        check_steps(recipe, learned.steps, learned.target)
        sheet = replace(noised_answers.readable(learned, self._sheet(recipe), budget), drawing=None)
        few = self.limits.model_copy(update={"min_samples": 1, "min_evaluation": 1})
        return self._made(learned.silos([sheet]), None, few)
