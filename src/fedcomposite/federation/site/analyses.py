"""Analyses at a site: sums over its samples and counts of its table, under its own minimum counts.

What is asked is answered by the functions that a simulation calls (``runtime.protocol``, ``data.queries``). Before
that, the site looks at what it would tell: how many samples are behind a sum, and how many are left out of it, since
the difference of two sums is one as well.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from fedcomposite.data import DataError, Recipe, Silos
from fedcomposite.data.chained import State
from fedcomposite.data.queries import (
    Answer,
    Conditional,
    Lacking,
    Query,
    RefusedQueryError,
    Rules,
    parse_query,
    rows_of,
    write_answer,
)
from fedcomposite.data.queries import answer as tell
from fedcomposite.data.sheets import Sheet
from fedcomposite.data.sparse import tensors_only
from fedcomposite.data.steps import Complete, Interact, Step, prepared
from fedcomposite.experiments.config import Config
from fedcomposite.federation import wire
from fedcomposite.federation.orders import AnalysisOrder, Order, Question, Shape
from fedcomposite.federation.secure.keys import place
from fedcomposite.federation.secure.masked_answers import Told, asked_in, taken_down
from fedcomposite.federation.shape import arrange, local_problem, skeleton
from fedcomposite.federation.site import event_times, few_values, minimum_counts, noised_answers, policy
from fedcomposite.federation.site.learned_steps import fillings, ways_of
from fedcomposite.federation.site.noise import noised
from fedcomposite.federation.site.policy import DataRefusalError, Limits, RefusalError
from fedcomposite.federation.site.row_sets import KeptRows
from fedcomposite.federation.wire import Content, Form, Vectors
from fedcomposite.problems.losses import Cox
from fedcomposite.runtime.noised_sums import NOISED
from fedcomposite.runtime.protocol import (
    ALL,
    CALIBRATION,
    NEW,
    RESIDUALS,
    Held,
    Request,
    Rows,
    Silo,
    Sums,
    of_copy,
    own_hazard,
    ranges_of,
    silos_of,
)

if TYPE_CHECKING:
    from fedcomposite.federation.site.site import Site

_DRAWN = ("fold", "half", "bootstrap")  # parts of the site's samples


def asked(analysis: AnalysisOrder) -> str:
    """What an exchange of an analysis is about, in a few words: ``11 newton``."""
    return wire.clean(", ".join(f"{count} {name}" for name, count in kinds(analysis).items())) or "introduction"


def kinds(analysis: AnalysisOrder) -> dict[str, int]:
    """The kinds of answers that an exchange asks for, ``newton (fold)``, and how many of each."""
    parts = [q.part if q.part != "train" else q.rows.kind for q in analysis.questions]
    names = [q.name if p == "all" else f"{q.name} ({p})" for p, q in zip(parts, analysis.questions, strict=True)]
    return dict(collections.Counter([*names, *(_name(text) for text in analysis.queries)]))


def _name(query: str) -> str:
    """What a query is called; whatever its text is, this is no error."""
    try:
        return str(json.loads(query)["name"])[:20]
    except (ValueError, KeyError, TypeError, RecursionError):
        return "?"


def check_prepared(silos: Silos, config: Config) -> None:
    """Refuse to leave an experiment's recipe out."""
    if config.recipe is not None and silos.recipe is None:
        raise RefusalError("its file is not prepared by recipes ([data] recipe = true in its site.toml would do that)")


def forms(question: Question, place: int, d: int) -> dict[str, Form]:
    """The vectors of a question about models of d coordinates."""
    x = Form((d,), torch.float64)
    made = {
        "newton": {"x": x, "working": Form((d,), torch.bool)},
        "losses": {"models": Form((question.count, d), torch.float64)},
        "information": {"x": x},
        "scores": {"x": x, "edges": Form((question.count,), torch.float64)},
        "tallies": {"x": x, "edges": Form((question.count,), torch.float64)},
        "calibration": {"x": x, "lines": Form((question.count, 2), torch.float64)},
        "residuals": {"x": x, "edges": Form((question.count,), torch.float64)},
        "rates": {"x": x, "slopes": Form((question.count,), torch.float64)},
        **noised_answers.forms(question, d),
        **_of_times(question, d),
    }[question.name]
    return {f"{place}.{key}": form for key, form in made.items()}


def _of_times(question: Question, d: int) -> dict[str, dict[str, Form]]:
    """The vectors of questions about times to an event."""
    x, times, edges = (Form((n,), torch.float64) for n in (d, question.times, question.count))
    working = {"working": Form((d,), torch.bool)} if question.products else {}
    return {
        "timetable": {"x": x, "times": times, "edges": edges},
        "logrank": {"x": x, "edges": edges},
        "schoenfeld": {"x": x, "times": times, "values": times},
        "risk_sums": {"x": x, "times": times, **working},
        "concordance": {"x": x},
        "horizon": {"x": x, "edges": edges, "groups": Form((question.groups,), torch.float64)},
    }


def _told_of_times(question: Question, d: int, on: int) -> dict[str, dict[str, tuple[int, ...]]]:
    """The shapes of their answers, for models of d coordinates of which ``on`` are worked on."""
    T, K = question.times, question.count + 1
    sums: dict[str, tuple[int, ...]] = {"weight": (3,), "events": (T,), "sizes": (T,)}
    if question.products:
        sums |= {"margins": (1,), "features": (d,), "firsts": (T, d), "seconds": (T, on * (on + 1) // 2)}
    return {
        "timetable": {"counts": (K, 2 + question.causes, T)},
        "logrank": {"observed": (K,), "expected": (K,), "covariance": (K, K)},
        "schoenfeld": {"events": (3,), "total": (d,), "residuals": (d,), "covariances": (2, d, d)},
        "risk_sums": sums,
        "concordance": {"pairs": (3,), "counts": (3,)},
        "horizon": {"scores": (K, 2), "error": (2,), "groups": (question.groups + 1, 4)},
    }


def answer_forms(question: Question, arrays: Vectors, place: int, *, secure: bool = False) -> dict[str, Form]:
    """The vectors of its answer, by itself or in a secure sum."""
    x = arrays.get("x", torch.zeros(0))
    d, k, bins = len(x), question.count, question.bins
    on = int(arrays["working"].sum()) if "working" in arrays else 0
    shapes: dict[str, dict[str, tuple[int, ...]]] = {
        "newton": {"weight": (3,), "loss": (1,), "gradient": (d,), "hessian": (on * (on + 1) // 2,)},
        "losses": {"weight": (2,), "deviance": (k,), "error": (k * question.errors,), "histogram": (k, 2, 2, bins)},
        "information": {"weight": (3,), "loss": (1,), "gradient": (d,), "hessian": (d, d), "outer": (d, d)},
        "scores": {"squares": (2,), **({"ranges": (2, 2, k + 1, 7)} if secure else {"counts": (2, k + 1, 5)})},
        "tallies": {"tallies": (2, k + 1), "totals": (2, 3), "variance": (2,)},
        "calibration": {"sums": (k, len(CALIBRATION))},
        "residuals": {"sums": (len(RESIDUALS),), "counts": (1, k + 1, 3)},
        "rates": {"sums": (k, 4)},
        **noised_answers.shapes(question, d),
        **_told_of_times(question, d, on),
    }
    return {f"{place}.{key}": Form(shape, torch.float64) for key, shape in shapes[question.name].items()}


def sheet_of(name: str, silos: Silos, target: str = "target") -> Sheet:
    """A site's samples as a table of numbers, to be described."""
    X = tensors_only(silos.features, "a description").double().flatten(1).numpy()
    names = silos.feature_names or [f"x{j}" for j in range(X.shape[1])]
    columns = {column: np.ascontiguousarray(X[:, j]) for j, column in enumerate(names)}
    y = silos.targets.double().numpy()
    told = (
        {target: y} if y.ndim == 1 else {"time": np.ascontiguousarray(y[:, 0]), target: np.ascontiguousarray(y[:, 1])}
    )
    return Sheet(name, {**columns, **told}, len(X))


class Desk:
    """Answers the analyses of one site."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._built: tuple[tuple[str, Shape, int, str], list[Silo]] | None = None
        self._looked_at: list[Silo] = []  # no column of these is rare
        self._folds = set[tuple[str, Rows]]()  # nor of these folds of it

    def answer(self, order: Order, analysis: AnalysisOrder, config: Config, request: Content) -> Content:
        """Do what is asked, or refuse it."""
        site = self._site
        if analysis.queries:
            answers = answered_queries(site, sheet_of(site.name, site.silos), order, analysis, config)
            made = wire.content(answers=json.dumps([write_answer(one) for _, one in answers]))
        else:
            told = self._questions(order, analysis, config, request)
            made = wire.content(report={"questions": len(analysis.questions)}, vectors=told.sums)
        said = f"{asked(analysis)}; {wire.weight(made) / 1e3:.1f} kB sent"
        site._log(f"job {order.job}: exchange {analysis.number}: {said}")
        return made

    def tell(self, order: Order, analysis: AnalysisOrder, config: Config, request: Content) -> Told:
        """The same as sums that are to be masked, and names."""
        site = self._site
        site._log(f"job {order.job}: exchange {analysis.number}: {asked(analysis)}; in a secure sum")
        if analysis.queries:
            return divided(analysis, answered_queries(site, sheet_of(site.name, site.silos), order, analysis, config))
        return self._questions(order, analysis, config, request)

    def _questions(self, order: Order, analysis: AnalysisOrder, config: Config, request: Content) -> Told:
        if order.shape is None:
            raise RefusalError("questions about samples need the agreed columns")
        silos = self._silos(order, order.shape, config)
        d = minimum_counts.width(silos[0])
        expected: dict[str, Form] = {}
        for i, question in enumerate(analysis.questions):
            expected |= forms(question, i, d)
        given = wire.unpack(request, expected)
        requests = [self._request(silos, config, q, i, given) for i, q in enumerate(analysis.questions)]
        content = asked_in(analysis, given)
        if (budget := config.budget) is not None:
            own = noised_answers.told(self._site, order, config, budget, silos[0], requests, content, kinds(analysis))
            return Told(content, own)
        number = place(order) if order.secure else 0  # before anything is looked at: a refusal says something, too
        self._site.gate.admit(order, number, taken_down(order, content), kinds(analysis), **cost(requests))
        if noised := [one for one in requests if one.name in NOISED]:
            raise RefusalError(f"{noised[0].name!r} is told with noise only: [privacy] level = 'study' is needed")
        for one in requests if order.secure is not None else []:
            minimum_counts.check_summed(self._site.limits, one)
        silos = [self._newcomers(order, config, silos[0], requests), *silos[1:]]
        answers: list[list[Sums]] = [[] for _ in requests]
        for k, silo in enumerate(silos):
            asked_of = [i for i, one in enumerate(requests) if k in copies_of(one, len(silos))]
            told = self._told(order.secure is not None, order.shape.names, silo, [requests[i] for i in asked_of])
            for i, sums in zip(asked_of, told, strict=True):
                answers[i].append(sums)
        vectors: Vectors = {}
        for i, each in enumerate(answers):
            means = each[0] if len(each) == 1 else {k: torch.stack([one[k] for one in each]).mean(0) for k in each[0]}
            vectors |= {f"{i}.{key}": value.double() for key, value in means.items()}
        if not all(bool(torch.isfinite(v).all()) for v in vectors.values()):
            raise DataRefusalError("its numbers left the finite range")
        return Told(content, vectors)

    def _told(self, secure: bool, names: Sequence[str], silo: Silo, requests: list[Request]) -> list[Sums]:
        """The answers of one copy of the samples, which are looked at before."""
        if not any(silo is one for one in self._looked_at) and any(one.part != NEW for one in requests):
            minimum_counts.check_columns(self._site.limits, silo, names)
            self._looked_at.append(silo)
        for one in requests:
            minimum_counts.check_samples(self._site.limits, silo, one, self._site.gate.most, self._folds)
        self._site.gate.tell(silo, [one.rows for one in requests if one.part == "train"], self._site.kept)
        gate, kept = self._site.gate, self._site.kept
        shift = functools.partial(self._shift, requests)
        divisions = functools.partial(
            event_times.divisions, self._site.limits, lambda rows: gate.divide(silo, rows, kept)
        )
        guard = minimum_counts.AnswerGuard(functools.partial(gate.apart, kept), gate.blur, gate.most, shift, divisions)
        for one in requests:
            event_times.check_groups(silo, one, guard.apart)
            hold = functools.partial(gate.hold_horizon, kept=kept)
            event_times.check_horizon(self._site.limits, silo, one, guard.apart, hold)
        made = minimum_counts.told(self._site.limits, silo, requests, guard)
        for one, sums in zip(requests, made, strict=True):
            if one.name == "losses":
                self._blur(silo, one, sums)
            elif one.name == "concordance":
                self._blur_pairs(silo, one, sums)
            elif one.name == "information" and not self._outcomes_may_be_told(one):
                sums["outer"] = minimum_counts.expected_outer(silo, one, sums)
            if secure and one.name == "scores":
                sums["ranges"] = ranges_of(sums.pop("counts"))
        return made

    def _blur(self, silo: Silo, request: Request, sums: Sums) -> None:
        """Put noise on what is counted at models of the asker's choice: wrong predictions."""
        share, total = sums["weight"].tolist()
        if not minimum_counts.blurs(self._site.limits) or not silo.loss.classifier or not sums["error"].numel():
            return
        inside = np.packbits((silo.of_part(request.part).weights(request.rows) > 0).numpy()).tobytes()
        for k, x in enumerate(request.arrays["models"] if share > 0 else []):
            draw, scale = self._site.gate.count_at(request.part, inside + x.numpy().tobytes())
            told = noised(sums["error"][k] * (total / share), scale, draw)
            sums["error"][k] = (told * (share / total)).clamp(max=share)

    def _outcomes_may_be_told(self, request: Request) -> bool:
        """Whether sums over the samples of each outcome tell of none or ``min_count`` rows, beside earlier ones."""
        site = self._site
        if not minimum_counts.blurs(site.limits):
            return True
        copies = 1 if self._built is None else len(self._built[1])
        if request.rows != ALL or request.part != "train" or copies > 1:
            return False
        try:
            site.gate.outcomes.tell(minimum_counts.columns_by_outcome(site.silos), site.kept)
        except DataRefusalError as error:
            site._log(f"residuals are told as the model expects them: {error.here} would be known by their outcome")
            return False
        return True

    def _shift(self, requests: Sequence[Request], part: str, question: str) -> float:
        """What is taken from one class's sum of probabilities to the other's, where these could be about few."""
        if all(self._outcomes_may_be_told(one) for one in requests if one.name == "tallies"):
            return 0.0
        return self._site.gate.shift(part, question)

    def _blur_pairs(self, silo: Silo, request: Request, sums: Sums) -> None:
        """Put noise on pairs: two models between which two patients change places would tell who left first."""
        right, tied, every = sums["pairs"].chunk(3)
        inside = np.packbits((silo.of_part(request.part).weights(request.rows) > 0).numpy()).tobytes()
        asked_at = inside + request.arrays["x"].numpy().tobytes()
        draw, scale = self._site.gate.count_at(f"{request.part} pairs", asked_at)
        tied = noised(tied, scale, draw).minimum(every) if float(tied) > 0 else tied
        sums["pairs"] = torch.cat([noised(right, scale, draw).minimum(every - tied), tied, every])

    def _silos(self, order: Order, shape: Shape, config: Config) -> list[Silo]:
        """The samples, or each completed copy of them."""
        key = order.config, shape, order.client, order.job
        if self._built is None or self._built[0] != key:
            site = self._site
            site._told(config)
            policy.judge(site.limits, config, shape, site.known_sizes(config))
            if set(shape.names) != set(site.silos.feature_names):
                raise RefusalError("the experiment's columns are not this site's")
            own = dataclasses.replace(arrange(site.silos, shape.names), ids=(order.client,))
            by_samples, every = config.problem.weights == "samples", list[Silo]()
            try:
                problem = local_problem(skeleton(config, shape, own.recipe), config, shape, own)
                for k in range(max(1, len(own.copies))):
                    made, *rest = silos_of(problem if k == 0 else of_copy(problem, k))
                    every.append(dataclasses.replace(made, parts=(rest or [made])[0].parts, by_samples=by_samples))
            except ValueError as error:
                raise DataError(str(error)) from None
            self._folds.clear()
            self._looked_at.clear()
            self._built = key, every
        return self._built[1]

    def _newcomers(self, order: Order, config: Config, silo: Silo, requests: list[Request]) -> Silo:
        """The silo with new patients as a part, if a request is about them; they are scored here before any is told.

        The part has those with a known outcome, if they are enough of each class to say something about. In a secure
        sum it is empty: one site alone might have such patients.
        """
        asked_for = [one for one in requests if one.part == NEW]
        if not asked_for:
            return silo
        site, shape = self._site, order.shape
        timed = isinstance(silo.loss, Cox)
        possible = site.newcomers is not None and silo.loss.outputs == 1 and (timed or silo.loss.by_sample)
        allowed = ("concordance", "horizon") if timed else minimum_counts.MEASURES[:-1]
        if not possible or any(one.name not in allowed for one in asked_for):
            raise RefusalError("there is nothing to be scored here")
        assert site.newcomers is not None
        assert shape is not None
        new = site.newcomers.patients(site.silos.recipe, shape.names)
        where: Path | None = None
        if scored := [one for one in asked_for if one.name != "calibration"]:
            x, numbers = scored[0].arrays["x"], scored[-1].numbers
            until = scored[-1].name == "horizon"  # the file stays here, and may be of the site's own times
            hazard = own_hazard(silo, silo.weights(ALL), x, numbers["at"], numbers["hazard"]) if until else None
            where = site.newcomers.write(
                order.job, new, x, config.problem.bias, silo.loss, numbers["threshold"], hazard
            )
        known = new.known
        X, y = torch.from_numpy(new.X[known]), torch.from_numpy(new.outcomes[known])
        told: Held = silo.X[:0], silo.b[:0], None
        if order.secure is None and minimum_counts.worth_telling(site.limits, silo.loss, y):
            own = arrange(site.silos, shape.names)
            shifts = dict(own.held_margin_offsets)
            if new.offset is not None:
                shifts["test"] = torch.from_numpy(new.offset[known])
            own = dataclasses.replace(own, test=(X, y), held_by={}, held_margin_offsets=shifts)
            parts = silos_of(local_problem(skeleton(config, shape, own.recipe), config, shape, own))[-1].parts
            told = parts["test"]
        made = dataclasses.replace(silo, parts={**silo.parts, NEW: told})
        if not all(minimum_counts.told_apart(site.limits, made.of_part(NEW), one.arrays["x"]) for one in asked_for):
            made = dataclasses.replace(silo, parts={**silo.parts, NEW: (silo.X[:0], silo.b[:0], None)})
        why = "too few with a known outcome" if order.secure is None else "no part of a secure sum"
        few = "" if len(made.of_part(NEW).X) else f"; {why}, so others do not hear how good it is"
        if where is not None:
            site._log(f"job {order.job}: {len(new.X)} patients scored in {where}, which stays here{few}")
        return made

    def _request(self, silos: list[Silo], config: Config, q: Question, place: int, given: Vectors) -> Request:
        """A question as the function that answers it takes it; draws are nobody else's business."""
        rows = Rows(**q.rows.model_dump())
        if rows.copy_number > len(silos):
            raise RefusalError(f"copy {rows.copy_number} of its samples; there are {len(silos)}")
        if rows.kind in _DRAWN and rows.seed != config.seed:
            raise RefusalError(f"parts by the seed {rows.seed}; the experiment's seed is {config.seed}")
        if config.budget is None:
            for silo in silos[1:]:  # weights are put into each
                self._site.gate.choose(silo, rows, self._site.kept)
            rows = self._site.gate.choose(silos[0], rows, self._site.kept)
        arrays = {k.partition(".")[2]: v for k, v in given.items() if k.partition(".")[0] == str(place)}
        numbers = {"width": q.width, "bins": q.bins, "errors": int(q.errors), "threshold": q.threshold}
        numbers |= {"causes": q.causes, "at": q.at, "hazard": q.hazard}
        return Request(q.name, arrays, numbers, rows, q.part)


def copies_of(request: Request, count: int) -> list[int]:
    """Which completed copies of the samples are asked about: one, or the mean over all; of noised counts the first."""
    if request.rows.copy_number > 0:
        return [request.rows.copy_number - 1]
    return [0] if request.part != "train" or request.name == "tallies" else list(range(count))


_PLACE = "\0place"  # a column that no file has
_EXACT = "analyses, learning a recipe among them, are sums without noise"


def check_allowed(limits: Limits, config: Config, order: Order) -> None:
    """Refuse an analysis where exact sums may not be told, and one that is a round as well."""
    if order.analysis is None:
        return
    if order.train or order.evaluate or (order.analysis.introduces and order.shape is not None):
        raise RefusalError("an order for an analysis and for a round")
    if order.secure is not None and order.secure.recover:
        raise RefusalError("sums of an analysis are over all parties or none (policy 'wait')")
    if config.budget is not None:
        return
    if limits.epsilon is not None:
        raise RefusalError(
            f"this site has a privacy budget (epsilon = {limits.epsilon:g}), and {_EXACT}: [privacy] level = 'study' "
            "is needed"
        )
    if config.privacy is not None:
        raise RefusalError(f"[privacy] of this level is for the rounds of `federation run`; {_EXACT}: take 'study'")


def answered_queries(
    site: Site, sheet: Sheet, order: Order, analysis: AnalysisOrder, config: Config
) -> list[tuple[Query, Answer]]:
    """Counts and sums of a table; each query is an evaluation in the ledger."""
    recipe = Recipe(**(config.recipe or {}))
    rules = Rules(min_count=site.limits.min_count)
    number, taken = (place(order), taken_down(order, asked_in(analysis, {}))) if order.secure else (0, {})
    try:
        asked_for = [parse_query(text) for text in analysis.queries]
    except RefusedQueryError as error:
        site.gate.admit(order, number, taken, kinds(analysis), evaluations=len(analysis.queries))
        raise DataRefusalError(str(error)) from None
    told = sum(q.chain.copies * (1 + q.width) for q in asked_for if isinstance(q, Conditional))  # a Hessian each
    gradients = {"gradients": told} if told else {}
    site.gate.admit(order, number, taken, kinds(analysis), evaluations=len(analysis.queries), **gradients)
    try:
        if (budget := config.budget) is not None:
            return noised_answers.tables(site, sheet, order, config, budget, asked_for)
        for query in asked_for:
            minimum_counts.check_query(query, recipe, config.table_one)
            site.gate.look_at(sheet, query.steps)
            site.gate.rows.fill(fillings(sheet, query.steps, site.limits.min_count), sheet.rows)
            if isinstance(query, Conditional | Lacking):
                site.gate.rows.bend(ways_of(query.chain), sheet.rows)
            if isinstance(query, Conditional):
                state = State(query.chain, prepared(sheet, query.steps))
                site.gate.columns.tell(state.known(), kept_rows(sheet, query.steps))
                minimum_counts.check_conditional(site.limits, state, query, site.gate.most)
            if (factors := multiplied(sheet, query.steps)) is not None:
                site.gate.columns.tell(factors, None)
            if (summed := few_values.told_columns(sheet, query, rules.min_count)) is not None:
                site.gate.columns.tell(summed, kept_rows(sheet, query.steps))
            site.gate.hint(few_values.hinted(sheet, query, rules.min_count))
            chosen = (
                None
                if query.only is None
                else functools.partial(rows_of, column=query.only[0], wanted=query.only[1], rules=rules)
            )
            if (left := kept_rows(sheet, query.steps, chosen)) is not None:
                site.gate.let_out(np.ones(len(left.places)), left)
        return [(query, tell(sheet, query, rules)) for query in asked_for]
    except RefusedQueryError as error:  # without values in its text
        raise DataRefusalError(str(error)) from None


def multiplied(sheet: Sheet, steps: Sequence[Step]) -> npt.NDArray[np.float64] | None:
    """The columns whose products are among those that steps make; None if there are no products."""
    at = next((i for i, step in enumerate(steps) if isinstance(step, Interact)), None)
    if at is None:
        return None
    step, before = steps[at], prepared(sheet, [one for one in steps[:at] if not isinstance(one, Complete)])
    assert isinstance(step, Interact)
    names = [name for name in dict.fromkeys(name for pair in step.pairs for name in pair) if name in before.columns]
    return np.nan_to_num(np.stack([before.numbers(name) for name in names], axis=1)) if names else None


def kept_rows(
    sheet: Sheet, steps: Sequence[Step], only: Callable[[Sheet], npt.NDArray[np.bool_]] | None = None
) -> KeptRows | None:
    """Places of the rows that steps, and a choice after them, leave in a table; None if they leave all."""
    last = max((i for i, step in enumerate(steps) if isinstance(step, Complete)), default=-1)
    if last < 0 and only is None:
        return None
    numbered = sheet.having({**sheet.columns, _PLACE: np.arange(sheet.rows, dtype=np.float64)})
    after = prepared(numbered, steps[: last + 1] if only is None else steps)
    left = (after if only is None else after.taking(only(after)))[_PLACE].astype(np.int64)
    return None if len(left) == sheet.rows else KeptRows(left, sheet.rows)


def divided(analysis: AnalysisOrder, answers: Sequence[tuple[Query, Answer]]) -> Told:
    """Answers to queries as sums, which are masked, and names, which are not."""
    try:
        forms = [query.sums() for query, _ in answers]
    except RefusedQueryError as error:
        raise RefusalError(str(error)) from None
    sums = {
        f"{i}.{key}": torch.from_numpy(told[key].astype(np.float64))
        for i, (form, (_, told)) in enumerate(zip(forms, answers, strict=True))
        for key in form
    }
    names = json.dumps([write_answer(query.names(told)) for query, told in answers])
    return Told(asked_in(analysis, {}), sums, names)


def _products(request: Request) -> int:
    """Gradients that sums of products at the times of a grid are worth."""
    if "working" not in request.arrays:
        return 0
    return len(request.arrays["times"]) * (1 + int(request.arrays["working"].sum()))


def cost(requests: list[Request]) -> dict[str, int]:
    """What an exchange is in the ledger: a Hessian on k coordinates tells as much as k gradients."""
    gradients = evaluations = 0
    for one in requests:
        if one.name == "newton":
            gradients += 1 + int(one.arrays["working"].sum())
        elif one.name == "information":
            gradients += 1 + 2 * len(one.arrays["x"])
        elif one.name in ("schoenfeld", "risk_sums"):  # a covariance each, at every time
            gradients += 1 + (2 * len(one.arrays["x"]) if one.name == "schoenfeld" else _products(one))
        else:
            slopes = len(one.arrays.get("slopes", one.arrays.get("lines", ())))  # ten tell less than one model's bins
            evaluations += len(one.arrays["models"]) if one.name == "losses" else max(1, -(-slopes // 10))
    return {k: v for k, v in {"gradients": gradients, "evaluations": evaluations}.items() if v}
