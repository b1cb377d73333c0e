"""A site's answers in a secure federation: computed as ever, then masked; whose sums are told is taken down before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from fedcomposite import files
from fedcomposite.experiments.config import Config
from fedcomposite.federation import wire
from fedcomposite.federation.orders import AnalysisOrder, Introduction, Order, Secure, Shape
from fedcomposite.federation.secure import encoding
from fedcomposite.federation.secure.encoding import width_of
from fedcomposite.federation.secure.keys import MaskKeys, alike, place, stale
from fedcomposite.federation.secure.masking import Numbers, seal
from fedcomposite.federation.site.ledger import Ledger
from fedcomposite.federation.site.policy import Limits, RefusalError
from fedcomposite.federation.wire import Content, Vectors
from fedcomposite.problems.measures import Measures


class Worked(NamedTuple):
    """An order that was carried out."""

    given: Vectors
    report: dict[str, float]
    vectors: Vectors
    measures: Measures


class Told(NamedTuple):
    """The answer to an analysis, as a site would tell it by itself: its minimum counts are kept."""

    asked: str
    """The digest of all that was asked."""
    sums: Vectors
    """Arrays that add up over sites, in 64-bit floats."""
    names: str | None = None
    """What is no sum, as JSON: names of columns and levels."""


class Computing(Protocol):
    """A site, as far as it is needed here."""

    def introduce(self, order: Order, config: Config) -> Introduction:
        """What it says about its data."""

    def work(self, order: Order, shape: Shape, config: Config, request: Content) -> Worked:
        """Carry out a round, an evaluation, or both."""

    def tell(self, order: Order, analysis: AnalysisOrder, config: Config, request: Content) -> Told:
        """Answer queries about a table, or questions about samples."""

    def said(self, config: Config) -> dict[str, int]:
        """How many samples each part has, as they are told."""


class Sums:
    """One site's part in secure sums."""

    def __init__(self, vault: MaskKeys, ledger: Ledger, limits: Limits) -> None:
        self.vault, self._ledger, self._limits = vault, ledger, limits

    def answer(self, order: Order, secure: Secure, config: Config, request: Content, site: Computing) -> Content:
        """Do what one phase asks."""
        if secure.phase in ("keys", "shares"):
            return self.vault.prepare(order, secure)
        if secure.phase == "open":
            sums = self.vault.survivors(order, secure)
            if sums is None:
                return stale()
            self._take_down(order, sums)
            return self.vault.open(secure)
        whole = wire.digest(request)
        if (before := self.vault.again(order, secure, whole)) is not None:
            return before
        self.vault.check(order, secure)
        if not self._limits.changing_cohorts:
            self._ledger.hold(order.job, "parties", seal(*secure.parties))
        if order.analysis is not None and not order.analysis.introduces:
            made = self._tell(order, secure, site.tell(order, order.analysis, config, request))
        elif order.shape is None:
            if not secure.recover:
                self._take_down(order, {"introduce": (order.recipe, secure.parties)})
            made = self._introduce(order, secure, config, site)
        else:
            made = self._work(
                order, secure, _weight(order, secure, config, site), site.work(order, order.shape, config, request)
            )
        self.vault.remember(secure, whole, made)
        return made

    def _introduce(self, order: Order, secure: Secure, config: Config, site: Computing) -> Content:
        """The introduction, without the numbers that are only told as sums."""
        whole = site.introduce(order, config)
        if whole.weight is not None and order.analysis is None:
            raise RefusalError("weights of samples are not told as secure sums; leave them out, or --secure")
        hidden = whole.model_copy(update=dict.fromkeys(("samples", "smoothness", "scale", "weight")))
        masked = self._masked(order, secure, {"introduce": encoding.of_introduction(whole)}, {"introduce": ""})
        return wire.content(introduction=hidden.model_dump_json(), vectors=masked)

    def _tell(self, order: Order, secure: Secure, told: Told) -> Content:
        """The sums of an analysis under masks; names beside them."""
        masked = self._masked(
            order, secure, {encoding.ANALYSIS: encoding.of_analysis(told.sums)}, {encoding.ANALYSIS: told.asked}
        )
        if told.names is None:
            return wire.content(report={"exchange": place(order)}, vectors=masked)
        return wire.content(answers=told.names, vectors=masked)

    def _work(self, order: Order, secure: Secure, weight: float, done: Worked) -> Content:
        contents = contents_of(done.given, order.train, order.evaluate, alike(secure))
        parts = {"train": encoding.of_round(done.report, done.vectors, weight)} if order.train else {}
        if order.evaluate:
            parts["evaluate"] = encoding.of_evaluation(done.report, done.vectors, weight, done.measures)
        masked = self._masked(order, secure, parts, contents)
        return wire.content(report={"round": order.round}, vectors=masked)

    def _masked(
        self, order: Order, secure: Secure, parts: Mapping[str, encoding.Part], contents: Mapping[str, str]
    ) -> Vectors:
        """The numbers of some sums under their masks."""
        numbers = {k: Numbers.of(*encoding.with_share(part, width_of(k)), width_of(k)) for k, part in parts.items()}
        hidden = {k: self.vault.conceal(order, secure, k, contents[k], n) for k, n in numbers.items()}
        return {f"{k}.{name}": t for k, n in hidden.items() for name, t in encoding.tensors(n).items()}

    def _take_down(self, order: Order, sums: Mapping[str, tuple[str, list[str]]]) -> None:
        """Hold whose sums of what are told: a second one, of others or of something else, would say too much."""
        for purpose, (content, parties) in sums.items():
            told = seal(content, *parties)
            if purpose == "introduce":
                self._ledger.hold(order.job, purpose, told)
            else:
                self._ledger.admit(order.job, order.round, {f"sum-{purpose}": told})


def _weight(order: Order, secure: Secure, config: Config, site: Computing) -> float:
    """What a site's numbers are multiplied by."""
    if config.problem.weights != "samples" or order.shape is None:
        return 1.0
    if secure.samples < (samples := site.said(config)["train"]):
        raise RefusalError("there are said to be fewer samples in all than here")
    return order.shape.clients * samples / secure.samples


def asked_of(order: Order, secure: Secure, asked: Mapping[str, str], given: Vectors) -> dict[str, str]:
    """What the ledger takes down of an order for a sum, before anything is computed; one of each per round.

    First all that the site's answer depends on (``asked`` and some numbers), since masks must not be used for two; then
    whose sum of what is told, which is known later where sites may go away.
    """
    found = {f"content-{k}": seal(v, secure.samples) for k, v in asked.items()}
    if not secure.recover:
        who = {"train": secure.trainers, "evaluate": secure.parties}
        contents = contents_of(given, order.train, order.evaluate, alike(secure))
        found |= {f"sum-{k}": seal(content, *who[k]) for k, content in contents.items()}
    return found


def asked_in(analysis: AnalysisOrder, given: Vectors) -> str:
    """The digest of all that an exchange of an analysis asks: names, numbers, rows, parts and arrays."""
    return seal("analysis", analysis.model_dump_json(), files.digest(given, {}))


def taken_down(order: Order, content: str) -> dict[str, str]:
    """What the ledger takes down of an exchange of an analysis; of plain ones only the work is counted."""
    if order.secure is None:
        return {}
    own = seal(content, *order.depends().values())
    return {"content-analysis": own, "sum-analysis": seal(content, *order.secure.parties)}


def contents_of(sent: Vectors, train: bool, evaluate: bool, same: bool) -> dict[str, str]:
    """The digests of what was broadcast, by what it is for; the same at the coordinator and at every site.

    The start is sent to those who train for the first time; with ``same`` that is everybody or nobody.
    """
    found = {}
    if train:
        without = ("model",) if same else ("model", "start")
        found["train"] = files.digest({k: v for k, v in sent.items() if k not in without}, {})
    if evaluate:
        found["evaluate"] = files.digest({k: sent[k] for k in ("model", "buffers")}, {})
    return found
