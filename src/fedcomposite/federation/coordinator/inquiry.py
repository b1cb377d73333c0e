"""The transport of analyses over the network: requests for sums, and queries about tables, as orders to the sites."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from flwr.app import RecordDict
from flwr.serverapp import Grid

from fedcomposite.data import DataError, FittedRecipe, Recipe
from fedcomposite.data.queries import Answer, Query, parse_answer
from fedcomposite.data.steps import known
from fedcomposite.experiments.config import Config, ConfigError
from fedcomposite.federation import wire
from fedcomposite.federation.coordinator.delivery import Delivery, FederationError, Settings
from fedcomposite.federation.coordinator.transport import check_refusal
from fedcomposite.federation.orders import Analysis, Introduction, Order, Question, Samples, Shape
from fedcomposite.federation.shape import agree, skeleton, write
from fedcomposite.federation.site import analyses
from fedcomposite.federation.site.policy import pair
from fedcomposite.federation.wire import Vectors, WireError
from fedcomposite.problems import Counter, Loss, Problem
from fedcomposite.runtime import Driver
from fedcomposite.runtime.protocol import Introduce, Request, Sums
from fedcomposite.runtime.transports.silos import added

_AT_ONCE = 100  # requests in one message: their names have to fit into its header


class Inquiry:
    """One analysis across registered sites; every site takes part in every exchange.

    See :class:`fedcomposite.runtime.transports.Parties`: an analysis asks through a driver on it.

    Parameters
    ----------
    grid, sites, nodes, job, settings, log, stop
        As for :class:`fedcomposite.federation.coordinator.coordinator.Coordinator`.
    config : Config
        The experiment; its method is not looked at.
    """

    centre = None
    by_site = True

    def __init__(
        self,
        grid: Grid,
        sites: Sequence[str],
        nodes: Callable[[], Mapping[str, int]],
        config: Config,
        job: str,
        settings: Settings | None = None,
        *,
        log: Callable[[str], None] = lambda line: None,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.names, self.config, self.job = list(sites), config.only({"name": "ProxNewton"}, config.seed), job
        self.post = Delivery(grid, nodes, settings or Settings(), log, stop)
        self.ids = list(range(len(self.names)))
        self.exchanges, self.counter = 0, Counter()
        self.recipe: FittedRecipe | None = None
        self._shape: Shape | None = None
        self._text = write(self.config)

    def _send(self, orders: Mapping[str, Order], vectors: bytes | None, check: Callable[[str, RecordDict], Any]) -> Any:
        """One exchange: what the sites answered, in their order."""
        more = {} if vectors is None else {"vectors": vectors}
        requests = {s: wire.content(order=o.model_dump_json(), **more) for s, o in orders.items()}  # type: ignore[arg-type]

        def counted(site: str, content: RecordDict) -> Any:
            check_refusal(content)
            made = check(site, content)
            self.counter.bytes_up += wire.weight(content)
            return made

        self.counter.bytes_down += sum(wire.weight(r) for r in requests.values())
        self.exchanges += 1
        found = self.post.collect(requests, f"analysis-{self.exchanges}", counted, "wait")
        return [found[s] for s in self.names]

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
        told = iter([self._tell(one) for one in requests if not isinstance(one, Request)])
        made = iter(self._each([one for one in requests if isinstance(one, Request)]))
        return [_wanted(one, next(made)) if isinstance(one, Request) else next(told) for one in requests]

    def recalled(self, requests: Sequence[Request | Query | Introduce]) -> None:
        """The numbers of exchanges go on after those that the sites have had."""
        sums = sum(isinstance(one, Request) for one in requests)
        self.exchanges += len(requests) - sums - (-sums // _AT_ONCE)

    # -- tables -------------------------------------------------------------------------------------------------------

    def _tell(self, one: Query | Introduce) -> list[Any]:
        """What every site says to a query, or of itself."""
        if isinstance(one, Introduce):
            return list(
                self._send(self._orders(analysis=Analysis(number=self.exchanges + 1)), None, self._introduction)
            )
        analysis = Analysis(number=self.exchanges + 1, queries=[one.model_dump_json()])
        return list(self._send(self._orders(analysis=analysis), None, lambda site, content: _answer(content)))

    # -- samples ------------------------------------------------------------------------------------------------------

    def meet(self, driver: Driver | None = None) -> Problem:
        """Hear the sites' introductions; returns the problem without their samples, but with their names."""
        [told] = (driver or Driver(self)).ask([Introduce()])
        met = [Introduction.read(text) for text in told]
        self._shape = agree(met)
        problem = skeleton(self.config, self._shape)
        if not isinstance(problem.loss, Loss):
            raise ConfigError(f"[problem] {problem.loss}: analyses over sites are for linear models")
        silos = dataclasses.replace(problem.silos, recipe=self.recipe)
        if any(one.weight is not None for one in met):  # intervals of weighted samples are other ones
            silos = dataclasses.replace(silos, weights=torch.ones(len(silos.targets), dtype=torch.float64))
        return self.config.make_problem(silos)

    def _introduction(self, site: str, content: RecordDict) -> str:
        text = wire.text(content, "introduction")
        met = Introduction.read(text)
        if met.site != site:
            raise WireError(f"introduces itself as {wire.clean(met.site, 60)!r}")
        if pair(self.config) and not any(set(met.labels) <= two for two in ({-1.0, 1.0}, {0.0, 1.0})):
            raise WireError(f"has labels {wire.clean(met.labels, 60)}; this loss is for -1 and 1, or 0 and 1")
        return text

    def _each(self, requests: Sequence[Request]) -> list[list[Sums]]:
        """The sites' answers to each request."""
        made: list[list[Sums]] = []
        for start in range(0, len(requests), _AT_ONCE):
            made += map(list, zip(*self._part(requests[start : start + _AT_ONCE]), strict=True))
        return made

    def _part(self, requests: Sequence[Request]) -> list[list[Sums]]:
        if self._shape is None:
            raise FederationError("the sites have not been met")
        questions = [_question(one) for one in requests]
        vectors = {f"{i}.{k}": v.contiguous() for i, one in enumerate(requests) for k, v in one.arrays.items()}
        expected: dict[str, wire.Form] = {}
        for i, (question, one) in enumerate(zip(questions, requests, strict=True)):
            expected |= analyses.answer_forms(question, dict(one.arrays), i)
        analysis = Analysis(number=self.exchanges + 1, questions=questions)
        found = self._send(
            self._orders(analysis=analysis, shape=self._shape),
            wire.block(vectors),
            lambda site, content: wire.unpack(content, expected),
        )
        return [[_sums(one, i) for i in range(len(requests))] for one in found]


def _wanted(request: Request, each: list[Sums]) -> Sums | list[Sums]:
    return each if request.by_site else added(each)


def _question(request: Request) -> Question:
    arrays = request.arrays
    count = next((len(arrays[key]) for key in ("models", "edges", "slopes") if key in arrays), 0)
    return Question(
        name=request.name,  # type: ignore[arg-type]
        width=float(request.numbers.get("width", 0.0)),
        bins=int(request.numbers.get("bins", 0)),
        errors=bool(request.numbers.get("errors", 0)),
        count=count,
        threshold=float(request.numbers.get("threshold", 0.5)),
        rows=Samples(**dataclasses.asdict(request.rows)),
        part=request.part,  # type: ignore[arg-type]
    )


def _sums(vectors: Vectors, place: int) -> Sums:
    return {k.partition(".")[2]: v for k, v in vectors.items() if k.partition(".")[0] == str(place)}


def _answer(content: RecordDict) -> Answer:
    """A site's answer to one query."""
    said = wire.text(content, "answers")
    try:
        (one,) = json.loads(said)
        return parse_answer(one)
    except (ValueError, TypeError, RecursionError, DataError):
        raise WireError("its answer to a query cannot be read") from None


def learn(driver: Driver, config: Config, target: str, absent: Sequence[str] = ()) -> FittedRecipe | None:
    """Learn an experiment's recipe, if it has one, from the sites' counts and sums; it may name absent sites, too."""
    if config.recipe is None:
        return None
    recipe = Recipe(**config.recipe)
    known("recipe: sites", recipe.sites, [*driver.names, *absent])
    return recipe.learn(lambda query: list(driver.ask([query])[0]), driver.names, target)
