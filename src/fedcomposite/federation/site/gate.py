"""The one gate through which every path out of a site passes: rounds, measurements, analyses, tables, introductions.

What a job is about is bound when it is first seen: its experiment, its columns and their order, the site's number, its
recipe as learned, its start, and what it said that it would ask. An order that differs in one of these is of another
job. All of it is kept in the site's ledger, so that a restart forgets nothing.

Which rows count is the site's choice: parts of the samples are unions of blocks that its secret makes, the same in all
jobs. Whatever rows an answer is about are taken down in the data set's book (``row_sets``), which refuses those that
would single few of them out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedcomposite.choice import AUTO
from fedcomposite.data.sheets import Sheet
from fedcomposite.data.steps import Step
from fedcomposite.experiments.config import Config
from fedcomposite.federation.orders import Order
from fedcomposite.federation.secure.masking import seal
from fedcomposite.federation.shape import write
from fedcomposite.federation.site import few_values, minimum_counts
from fedcomposite.federation.site.approval import Rule
from fedcomposite.federation.site.column_spans import ColumnSpans
from fedcomposite.federation.site.ledger import Ledger
from fedcomposite.federation.site.noise import SHIFT, deviation, generator, slack
from fedcomposite.federation.site.policy import DataRefusalError, Limits, RefusalError
from fedcomposite.federation.site.row_sets import (
    BlockBatches,
    Cuts,
    Ints,
    KeptRows,
    RowSets,
    Tables,
    blocks,
    folds_of_blocks,
    small_blocks,
)
from fedcomposite.problems import Batches
from fedcomposite.runtime.protocol import Rows, Silo
from fedcomposite.runtime.tally_noise import factor

_COUNTED = 20_000  # models at which samples are counted, for good
_DIVISIONS = 20
_GROWING = 5  # models after which noise of a count has twice the variance


class Gate:
    """What one site has let through, and lets through."""

    def __init__(self, ledger: Ledger, limits: Limits, folder: Path, data: str) -> None:
        self._ledger, self._limits, self._folder, self._data = ledger, limits, folder, data
        self.rows = RowSets(folder, data, limits.min_count, ledger)
        self.columns = ColumnSpans(folder, data, limits.min_count, ledger)
        self.outcomes = ColumnSpans(folder, data, limits.min_count, ledger, "outcomes")
        """The same with all columns times the outcome among them."""
        self.products = ColumnSpans(folder, data, limits.min_count, ledger, "products", 1 - 1e-6)
        """The same of products with levels, and of these levels."""
        self._experiment = "", ""  # its text as it came, and its digest whatever method is chosen

    def draw(self, *asked: str | bytes) -> np.random.Generator:
        """Random numbers of this site for one question about its data, the same whenever it is asked."""
        return generator(self._ledger.secret_seed("rounding", self._data, seal(*asked)))

    def count_at(self, part: str, model: bytes) -> tuple[np.random.Generator, float]:
        """Random numbers for counts at a model, and the scale of their noise; one model has the same ones always.

        Others have noise of their own: that two models have the same counts would say that nobody is between them.
        So that many do not average out, the scale grows with the square root of their number, over all jobs.
        """
        asked = seal(self._data, part, model)
        if self.scale <= 0:
            return self.draw("counted", asked), 0.0
        book = Tables(self._folder / "rows" / f"{seal(self._data, part, 'counts')[:32]}.json", self._ledger)
        number = book.tell(asked[:16], _COUNTED, "models at which samples were counted")
        return self.draw("counted", asked), self.scale * math.sqrt(1 + number / _GROWING)

    def most(self, x: Tensor) -> float:
        """The largest margin at a model; whether it was exceeded says little about the sample that did."""
        most = self._limits.max_margin
        if self._limits.exact_counts or math.isinf(most):
            return most
        return most * slack(self.draw("margin", x.detach().double().numpy().tobytes()))

    @property
    def scale(self) -> float:
        """The scale of the noise of counts at a model."""
        return 0.0 if self._limits.exact_counts or self._limits.min_count <= 1 else self._limits.min_count / 2

    def _division(self, kept: KeptRows | None) -> int:
        """The secret number by which the samples are divided into blocks."""
        return self._ledger.secret_seed("rows", self._data, "" if kept is None else seal(kept.places.tobytes()))

    def batches(self, config: Config, seed: int, samples: int, kept: KeptRows | None) -> Batches:
        """Minibatches of samples: of whole blocks, unless the asker may know their rows.

        A network's cost time for every row, so that fewer than ``min_count`` rows in all are left out of its blocks.
        """
        run = config.run
        given = seed, run.batch_size, run.sampling, run.clip_norm
        if run.batch_size is None or self._limits.reproducible_batches:
            return Batches(*given)
        block = small_blocks(self._division(kept), samples, self._limits.min_count)
        return BlockBatches(*given, block, max(1, self._limits.min_count), config.model is None)

    def choose(self, silo: Silo, rows: Rows, kept: KeptRows | None) -> Rows:
        """The rows that are meant, as the site has them; their weights are put where the silo looks for them.

        ``kept`` are the places of the silo's samples in the data set, where some of its rows are left out.
        """
        if rows.kind in ("fold", "half", "bootstrap") and not self._limits.reproducible_parts:
            secret = self._division(kept)
            rows = replace(rows, seed=secret)
            if rows not in silo.kept:
                block = blocks(secret, len(silo.X), self._limits.min_count)
                if rows.kind == "fold" and rows.of > int(block.max(initial=0)) + 1:
                    here = f"{int(block.max()) + 1} blocks"
                    raise DataRefusalError(
                        f"{rows.of} folds are more than its samples have blocks; take fewer folds", here
                    )
                for one in (rows, *rows.division):
                    counts = self._counts(one, block, silo.strata)
                    silo.kept[one] = silo.importance * torch.from_numpy(counts[block])
        return rows

    @staticmethod
    def _counts(rows: Rows, block: Ints, strata: Ints) -> npt.NDArray[np.float64]:
        """How often each block counts."""
        if rows.kind == "fold":
            inside = folds_of_blocks(rows.seed, block, strata, rows.of) != rows.number
            return np.asarray(inside != rows.held, np.float64)
        return rows.counts(0, np.bincount(block, weights=strata).astype(np.int64))

    def divide(self, silo: Silo, rows: Rows, kept: KeptRows | None) -> list[Rows]:
        """The divisions whose parts sums over time were told of, in their order, until that of these rows.

        It is taken down, over all jobs there will ever be. One part of each, as the silo has it.
        """
        book = self._book("times of parts", kept)
        place = book.tell(self._division_of(rows), _DIVISIONS, "divisions that sums over time are told of")
        told = [one.split() for one in book.known()[: place + 1]]
        parts = [Rows("fold" if kind == "fold" else "half", int(k), int(of), True, int(s)) for kind, k, of, s in told]
        return [self.choose(silo, one, kept) for one in parts]

    def hold_horizon(self, rows: Rows, early: Tensor, kept: KeptRows | None) -> None:
        """Take down a horizon of folds: who left by then; refuse one of other folds than the first if it is not theirs.

        Between two horizons few patients of a fold of one division are outside a fold of another.
        """
        place = self._book("horizons of parts", kept).tell(self._division_of(rows), _DIVISIONS, "divisions of horizons")
        book, horizon = self._book("horizons", kept), seal(np.packbits(early.numpy()).tobytes())
        if place == 0:
            book.tell(horizon, _COUNTED, "horizons")
        elif horizon not in book.known():
            raise RefusalError(
                "other folds than an earlier answer's are measured at its horizons only: take one of these, or as many "
                "folds as then"
            )

    def _book(self, what: str, kept: KeptRows | None) -> Tables:
        samples = seal(self._data, what, b"" if kept is None else kept.places.tobytes())
        return Tables(self._folder / "rows" / f"{samples[:32]}.json", self._ledger)

    def _division_of(self, rows: Rows) -> str:
        """Its name: all folds, or both halves."""
        seed = rows.seed if self._limits.reproducible_parts else 0
        return f"{rows.kind} {0 if rows.kind == 'fold' else rows.number} {rows.of} {seed}"

    def tell(self, silo: Silo, asked: Iterable[Rows], kept: KeptRows | None) -> None:
        """Take down which rows are behind some answers, before they are computed."""
        for rows in dict.fromkeys(asked):
            chosen = rows.kind in ("fold", "half", "bootstrap")
            counts = np.ones(len(silo.X))
            if chosen:
                heavy = silo.importance > 0
                counts = torch.where(heavy, silo.weights(rows) / silo.importance.where(heavy, 1.0), -1.0).numpy()
            self.let_out(counts, kept)

    def apart(self, kept: KeptRows | None, part: str, places: Ints, classes: Ints, ends: list[int]) -> list[bool]:
        """Which groups of bins may be told apart, beside all that were told of the same samples before."""
        samples = seal(self._data, part, len(places), b"" if kept is None else kept.places.tobytes())
        book = Cuts(self._folder / "rows" / f"{samples[:32]}.npy", self._limits.min_count, self._ledger)
        return book.apart(places, classes, ends)

    def blur(self, part: str, question: str, bins: int) -> npt.NDArray[np.float64] | None:
        """Noise for the numbers of samples of two classes in some bins; None if there is none.

        A question has the same noise whenever it is asked. Different ones have noise of their own, so that no answer
        tells that nobody is between two edges; they are counted, for good, so that little averages out.
        """
        if not minimum_counts.blurs(self._limits):
            return None
        book = Tables(self._folder / "rows" / f"{seal(self._data, part)[:32]}.json", self._ledger)
        book.tell(question, self._limits.score_tables, "score_tables")
        draw = generator(self._ledger.secret_seed("tallies", self._data, part, question))
        made: npt.NDArray[np.float64] = (factor(bins) @ draw.normal(size=(bins - 1, 2))).T
        return deviation(self._limits.min_count) * made

    def shift(self, part: str, question: str) -> float:
        """Noise of a sum of probabilities over a class, for the same question always the same."""
        return SHIFT * float(generator(self._ledger.secret_seed("probabilities", self._data, part, question)).normal())

    def look_at(self, sheet: Sheet, steps: Sequence[Step]) -> None:
        """Take down the offsets of logarithms and the knots among some steps, before these are done to a table."""
        constants, odd = few_values.bends(sheet, steps, self._limits.min_count)
        self.rows.bend(constants, sheet.rows, odd)

    def hint(self, few: Iterable[tuple[str, npt.NDArray[np.bool_]]]) -> None:
        """Count answers that say of a few rows that they are there: as refusals are, and by column; the same once."""
        for name, rows in few:
            told = seal("few", self._data, np.packbits(rows).tobytes())
            self.rows.bend({f"levels of {name!r} that few have": [float(int(told[:12], 16))]}, len(rows))
            self._ledger.refused(told)

    def let_out(self, counts: npt.NDArray[Any], kept: KeptRows | None) -> None:
        """Take down an answer in which samples count so often, and rows that are left out do not."""
        if kept is not None:
            every = np.full(kept.of, -1.0)
            every[kept.places] = counts
            counts = every
        if len(counts) and bool((counts != counts[0]).any()):
            self.rows.tell(counts)

    def bind(self, order: Order, config: Config) -> None:
        """Hold what a job is about; refuse an order of the same job that is about something else."""
        if not order.tells:
            return
        if self._experiment[0] != order.config:
            self._experiment = order.config, seal(write(config.only({"name": AUTO}, config.seed)))
        held = {"experiment": self._experiment[1]}
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
