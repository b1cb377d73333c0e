"""The transport of analyses over the network: requests for sums, and queries about tables, as orders to the sites."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import numpy as np
import torch

from fedcomposite.data import DataError, FittedRecipe, Recipe
from fedcomposite.data.queries import Answer, LevelCounts, Query, Schema, parse_answer
from fedcomposite.data.steps import known
from fedcomposite.experiments.config import Config, ConfigError
from fedcomposite.federation import wire
from fedcomposite.federation.coordinator import claims, secure_transport
from fedcomposite.federation.coordinator.delivery import Delivery, FederationError, Settings
from fedcomposite.federation.coordinator.plans import plan_of
from fedcomposite.federation.coordinator.transport import check_refusal
from fedcomposite.federation.engines.engine import Engine
from fedcomposite.federation.orders import AnalysisOrder, Introduction, Order, Question, Samples, Shape
from fedcomposite.federation.secure import encoding
from fedcomposite.federation.secure.assembly import Assembly
from fedcomposite.federation.shape import agree, skeleton, write
from fedcomposite.federation.site import analyses
from fedcomposite.federation.site.policy import pair
from fedcomposite.federation.wire import Content, Vectors, WireError
from fedcomposite.problems import Counter, Loss, Problem
from fedcomposite.runtime import Driver
from fedcomposite.runtime.protocol import Introduce, Request, Sums
from fedcomposite.runtime.transports.silo_answers import added

T = TypeVar("T")
_AT_ONCE = 100  # requests in one message: their names have to fit into its header


class Inquiry:
    """One analysis across registered sites; every site takes part in every exchange.

    See :class:`fedcomposite.runtime.transports.Parties`: an analysis asks through a driver on it. With
    ``settings.secure`` it gets sums under masks: no site's own answer can be asked for, and of a query there is one
    answer, that of all sites together. Names of columns and levels are told as they are.

    Parameters
    ----------
    engine, sites, permitted, job, settings, log, stop
        As for :class:`fedcomposite.federation.coordinator.coordinator.Coordinator`. Exchanges are numbered within a
        job, and in secure sums sites do not go back in them: a second inquiry has a job of its own.
    config : Config
        The experiment; its method is not looked at.
    plan : dict, optional
        What will be asked at most, by kind (:mod:`fedcomposite.federation.coordinator.plans`); any analysis if left
        out.
    """

    centre = None
    noised = False
    means_copies = True

    def __init__(
        self,
        engine: Engine,
        sites: Sequence[str],
        permitted: Callable[[], Collection[str]],
        config: Config,
        job: str,
        settings: Settings | None = None,
        *,
        plan: Mapping[str, int] | None = None,
        log: Callable[[str], None] = lambda line: None,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.plan = dict(plan_of("analysis", config) if plan is None else plan)
        self.names, self.config, self.job = list(sites), config.only(dict(config.specs[0]), config.seed), job
        self.post = Delivery(engine, permitted, settings or Settings(), log, stop)
        self.assembly = Assembly(self.post, job) if self.post.settings.secure else None
        self.ids = list(range(len(self.names)))
        self.exchanges, self.counter = 0, Counter()
        self.recipe: FittedRecipe | None = None
        self._shape: Shape | None = None
        self._heads: dict[str, str] = {}
        self._text = write(self.config)

    @property
    def by_site(self) -> bool:
        """Whether single sites' answers may be asked for."""
        return self.assembly is None

    @property
    def copies(self) -> int:
        """How many completed copies of their samples the sites have."""
        return 1 if self.recipe is None else self.recipe.copies

    def _send(self, orders: Mapping[str, Order], vectors: bytes | None, check: Callable[[str, Content], T]) -> list[T]:
        """One exchange: what the sites answered, in their order."""
        more: dict[str, Any] = {} if vectors is None else {"vectors": vectors}
        requests = {s: wire.content(order=o.model_dump_json(), **more) for s, o in orders.items()}
        self.counter.bytes_down += sum(wire.weight(r) for r in requests.values())
        self.exchanges += 1
        found = self.post.collect(requests, self._counted(check), "wait")
        return [found[s] for s in self.names]

    def _counted(self, check: Callable[[str, Content], T]) -> Callable[[str, Content], T]:
        def counted(site: str, content: Content) -> T:
            check_refusal(content)
            made = check(site, content)
            self.counter.bytes_up += wire.weight(content)
            return made

        return counted

    def _sum(
        self,
        assembled: Assembly,
        orders: Mapping[str, Order],
        vectors: bytes | None,
        form: Mapping[str, wire.Form],
        check: Callable[[str, Content], T],
    ) -> tuple[list[T], Vectors]:
        """One exchange of which only the sum is known, and what the sites say beside it."""
        self.exchanges += 1
        size = sum(math.prod(one.shape) for one in form.values())
        masked = encoding.forms(encoding.ANALYSIS, 0, 1 + size)
        got = secure_transport.summed(
            self.post, assembled, orders, encoding.ANALYSIS, masked, self._counted(check),
            policy="wait", group=f"analysis-{self.exchanges}", vectors=vectors,
        )  # fmt: skip
        self.counter.bytes_down += sum(len(o.model_dump_json()) + len(vectors or b"") for o in orders.values())
        with secure_transport.void():
            return [got.said[s] for s in self.names], encoding.analysis_of(got.sum, len(self.names), form)

    def _orders(self, **fields: Any) -> dict[str, Order]:
        recipe = "" if self.recipe is None else self.recipe.text
        return {
            site: Order(job=self.job, site=site, config=self._text, client=i, recipe=recipe, cohort=1, **fields)
            for i, site in enumerate(self.names)
        }

    def running(self) -> AbstractContextManager[None]:
        """Nothing is computed here."""
        return nullcontext()

    def ask(self, requests: Sequence[Request | Query | Introduce]) -> list[Any]:
        """Sums over the sites, in their order; the list of their answers to anything else, or to a request by site."""
        if self.assembly is not None and any(isinstance(one, Request) and one.by_site for one in requests):
            raise FederationError(
                "answers by site: secure sums have none; run without --secure, where sites allow that"
            )
        told = iter([self._tell(one) for one in requests if not isinstance(one, Request)])
        made = iter(self._answers([one for one in requests if isinstance(one, Request)]))
        return [next(made) if isinstance(one, Request) else next(told) for one in requests]

    def recalled(self, requests: Sequence[Request | Query | Introduce]) -> None:
        """The numbers of exchanges go on after those that the sites have had."""
        sums = sum(isinstance(one, Request) for one in requests)
        self.exchanges += len(requests) - sums - (-sums // _AT_ONCE)
        if self.assembly is not None:  # where names of levels and their counts are two
            self.exchanges += sum(isinstance(one, LevelCounts) and one.known is None for one in requests)

    def _tell(self, one: Query | Introduce) -> list[Any]:
        """What every site says to a query, or of itself."""
        return self._introductions() if isinstance(one, Introduce) else self._query(one)

    # -- tables -------------------------------------------------------------------------------------------------------

    def _query(self, query: Query) -> list[Answer]:
        """The sites' answers to a query; where only sums are known, their sum alone, but names of each."""
        analysis = AnalysisOrder(number=self.exchanges + 1, queries=[query.model_dump_json()], plan=self.plan)
        orders = self._orders(analysis=analysis)
        if self.assembly is None:
            return self._send(orders, None, lambda site, content: _answer(query, content))
        like = query.sums()
        form = {key: wire.Form(value.shape, torch.float64) for key, value in like.items()}
        names, sums = self._sum(self.assembly, orders, None, form, lambda site, content: _names(query, content))
        if not like:
            return [self._levels(query, names)] if isinstance(query, LevelCounts) else names
        return [{key: sums[key].numpy().astype(value.dtype) for key, value in like.items()}]

    def _levels(self, query: LevelCounts, names: Sequence[Answer]) -> Answer:
        """The levels that some site tells of, and how many rows all sites together say have them."""
        known = {name: sorted({str(one) for told in names for one in told[f"levels:{name}"]}) for name in query.columns}
        [counts] = self._query(query.model_copy(update={"known": known}))
        return {**{f"levels:{name}": np.array(levels, np.str_) for name, levels in known.items()}, **counts}

    # -- samples ------------------------------------------------------------------------------------------------------

    def meet(self, driver: Driver | None = None) -> Problem:
        """Have the sites introduce themselves: the problem without their samples, but with their names."""
        [told] = (driver or Driver(self)).ask([Introduce()])
        met = [Introduction.read(text) for text in told]
        self._shape, self.noised = agree(met), any(one.noised for one in met)
        self._heads = {one.site: one.head for one in met if one.head}
        problem = skeleton(self.config, self._shape, self.recipe)
        if not isinstance(problem.loss, Loss):
            raise ConfigError(f"[problem] {problem.loss}: analyses over sites are for linear models")
        if not any(one.weighted for one in met):
            return problem
        ones = torch.ones(
            len(problem.silos.targets), dtype=torch.float64
        )  # intervals of weighted samples are other ones
        return self.config.make_problem(dataclasses.replace(problem.silos, weights=ones), analysed=True)

    def _introductions(self) -> list[str]:
        """The sites' introductions; in secure sums without the numbers that only their sum tells."""
        orders = self._orders(analysis=AnalysisOrder(number=self.exchanges + 1, plan=self.plan))
        if self.assembly is None:
            return self._send(orders, None, self._introduction)
        self.exchanges += 1
        found, _ = secure_transport.introductions(
            self.post, self.assembly, orders, "wait", self._counted(self._introduction)
        )
        return [found[site] for site in self.names]

    def _introduction(self, site: str, content: Content) -> str:
        text = wire.text(content, "introduction")
        met = Introduction.read(text)
        if met.site != site:
            raise WireError(f"introduces itself as {wire.clean(met.site, 60)!r}")
        if pair(self.config) and not any(set(met.labels) <= two for two in ({-1.0, 1.0}, {0.0, 1.0})):
            raise WireError(f"has labels {wire.clean(met.labels, 60)}; this loss is for -1 and 1, or 0 and 1")
        return text

    def _answers(self, requests: Sequence[Request]) -> list[Sums | list[Sums]]:
        """The sums over the sites, or their answers, to each request."""
        made: list[Sums | list[Sums]] = []
        for start in range(0, len(requests), _AT_ONCE):
            made += self._part(requests[start : start + _AT_ONCE])
        return made

    def _part(self, requests: Sequence[Request]) -> list[Sums | list[Sums]]:
        if self._shape is None:
            raise FederationError("the sites have not been met")
        questions = [_question(one) for one in requests]
        vectors = {f"{i}.{k}": v.contiguous() for i, one in enumerate(requests) for k, v in one.arrays.items()}
        expected: dict[str, wire.Form] = {}
        for i, (question, one) in enumerate(zip(questions, requests, strict=True)):
            expected |= analyses.answer_forms(question, dict(one.arrays), i, secure=self.assembly is not None)
        analysis = AnalysisOrder(number=self.exchanges + 1, questions=questions, plan=self.plan)
        heads, self._heads = self._heads, {}  # once
        orders = self._orders(analysis=analysis, shape=self._shape, heads=heads)
        block = wire.block(vectors)
        if self.assembly is not None:
            _, sums = self._sum(self.assembly, orders, block, expected, self._exchange)
            return [_sums(sums, i) for i in range(len(requests))]
        found = self._send(
            orders, block, lambda site, content: self._possible(requests, wire.unpack(content, expected))
        )
        each = [[_sums(one, i) for one in found] for i in range(len(requests))]
        for one, answers in zip(requests, each, strict=True):
            self._familiar(one, answers)
        return [e if one.by_site else added(e) for one, e in zip(requests, each, strict=True)]

    @staticmethod
    def _possible(requests: Sequence[Request], vectors: Vectors) -> Vectors:
        """A site's sums, as they can be."""
        for i, one in enumerate(requests):
            claims.check_sums(one.name, _sums(vectors, i))
        return vectors

    def _familiar(self, request: Request, each: Sequence[Sums]) -> None:
        """Refuse sums that one site alone could spoil everybody's with."""
        names = ("loss", "gradient", "deviance", "error", "sums")
        reports = {
            site: {k: float(v.abs().max()) for k, v in sums.items() if k in names and v.numel()}
            for site, sums in zip(self.names, each, strict=True)
        }
        settings = self.post.settings
        for site, reason in claims.strangers(reports, settings.max_entry, settings.max_ratio).items():
            self.post.refuse(site, f"{request.name}: {reason}", "wait")

    def _exchange(self, site: str, content: Content) -> None:
        """Whether a masked answer is one to this exchange."""
        if wire.numbers(content) != {"exchange": self.exchanges}:
            raise WireError(f"does not answer exchange {self.exchanges}")


def _question(request: Request) -> Question:
    arrays = request.arrays
    rows = dataclasses.asdict(request.rows)
    count = next((len(arrays[key]) for key in ("models", "edges", "slopes", "lines") if key in arrays), 0)
    return Question(
        name=request.name,  # type: ignore[arg-type]
        width=float(request.numbers.get("width", 0.0)),
        bins=int(request.numbers.get("bins", 0)),
        errors=bool(request.numbers.get("errors", 0)),
        count=count,
        threshold=float(request.numbers.get("threshold", 0.5)),
        times=len(arrays.get("times", ())),
        causes=int(request.numbers.get("causes", 1)),
        groups=len(arrays.get("groups", arrays.get("scored", ()))),
        products=request.name == "risk_sums" and "working" in arrays,
        at=float(request.numbers.get("at", 0.0)),
        hazard=float(request.numbers.get("hazard", -1.0)),
        rows=Samples(**rows),
        part=request.part,  # type: ignore[arg-type]
    )


def _sums(vectors: Vectors, place: int) -> Sums:
    return {k.partition(".")[2]: v for k, v in vectors.items() if k.partition(".")[0] == str(place)}


def _answer(query: Query, content: Content) -> Answer:
    """A site's answer to one query, as it can be."""
    told = _told(content)
    claims.check_answer(query, told)
    return told


def _told(content: Content) -> Answer:
    said = wire.text(content, "answers")
    try:
        (one,) = json.loads(said)
        return parse_answer(one)
    except (ValueError, TypeError, RecursionError, DataError):
        raise WireError("its answer to a query cannot be read") from None


def _names(query: Query, content: Content) -> Answer:
    """The names in a site's answer to a query whose sums are masked."""
    told, columns = _told(content), query.columns if isinstance(query, LevelCounts) and query.known is None else []
    wanted = {"columns", "kinds"} if isinstance(query, Schema) else {f"levels:{name}" for name in columns}
    if told.keys() != wanted or any(v.dtype.kind != "U" for v in told.values()):
        raise WireError("its answer to a query says more than names, or fewer")
    if isinstance(query, Schema) and len(told["columns"]) != len(told["kinds"]):
        raise WireError("its columns have not one kind each")
    return told


def target_of(data: Mapping[str, Any] | None, where: str) -> str:
    """The column that an experiment's ``[data]`` names as the one to predict."""
    target = (data or {}).get("target")
    if not isinstance(target, str):
        raise ConfigError(f"{where}: a recipe needs a target: the name of the column to predict")
    return target


def learn(driver: Driver, config: Config, target: str, absent: Sequence[str] = ()) -> FittedRecipe | None:
    """Learn an experiment's recipe, if it has one, from the sites' counts and sums; it may name absent sites, too."""
    if config.recipe is None:
        return None
    recipe = Recipe(**config.recipe)
    known("recipe: sites", recipe.sites, [*driver.names, *absent])
    return recipe.learn(lambda query: list(driver.ask([query])[0]), driver.names, target, config.seed)
