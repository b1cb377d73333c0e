"""Minimum counts of analyses: what a site looks at before it tells a sum over samples, or counts of its table.

A sum over few samples is about them, and so is one over all but a few, or one in which a column is zero for all but a
few: a row of its Hessian is then those few rows. These are refused. Bins of few samples are joined with others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedcomposite.data import Recipe, Silos
from fedcomposite.data.chained import State
from fedcomposite.data.queries import Below, Conditional, Lacking, LevelCounts, Outside, Query, enough
from fedcomposite.data.sparse import SparseRows, tensors_only
from fedcomposite.experiments.config import TableOneSection
from fedcomposite.federation.secure.masking import seal
from fedcomposite.federation.site import event_times, policy
from fedcomposite.federation.site.learned_steps import check_steps, drawn_as
from fedcomposite.federation.site.noise import SHIFT, deviation
from fedcomposite.federation.site.policy import DataRefusalError, Limits, RefusalError
from fedcomposite.problems.losses import Cox, Loss
from fedcomposite.problems.risk_sets import EVENT
from fedcomposite.runtime.protocol import ALL, HIGHEST, NEW, RESIDUALS, Request, Rows, Silo, Sums, answer, answer_all

_MOST_EDGES = 4096
_AMPLE = 4  # times the least count of every class: a group of so many is not made larger
_PER_GROUP = 1e-5  # what one more group is worth, in pairs; all of them are worth less than one pair
_KINDS = 10  # different outcomes at most that are classes
_TALLIED = 64  # edges of a table of scores with noise
MEASURES = ("scores", "tallies", "calibration", "residuals", "rates")
"""Questions about folds that are told as one."""
_SHIFTED = ("spline", "interact", "standardize")
_CODED = {"one_hot", "log", *_SHIFTED}


Ints = npt.NDArray[np.int64]
Apart = Callable[[str, Ints, Ints, list[int]], list[bool]]
"""Of a part, the bins of its samples, their classes and the last bins of groups: which ends may be told."""


Blur = Callable[[str, str, int], npt.NDArray[np.float64] | None]
"""Of a part, the digest of a question about it and the number of bins: noise of two classes in these."""


def _all_apart(part: str, places: Ints, classes: Ints, ends: list[int]) -> list[bool]:
    return [True] * len(ends)


def _no_blur(part: str, question: str, bins: int) -> None:
    return None


def _no_shift(part: str, question: str) -> float:
    return 0.0


def _any_margin(x: Tensor) -> float:
    return math.inf


def _no_divisions(request: Request) -> Sequence[Rows]:
    return ()


class AnswerGuard(NamedTuple):
    """What a site remembers, and what is random about it, as far as answers to questions need it."""

    apart: Apart = _all_apart
    blur: Blur = _no_blur
    most: Callable[[Tensor], float] = _any_margin
    """The largest margin at a model."""
    shift: Callable[[str, str], float] = _no_shift
    """Of a part and the digest of a question: what is taken from one class's sum of probabilities to the other's."""
    divisions: Callable[[Request], Sequence[Rows]] = _no_divisions
    """Those of the samples into parts that times are joined for."""


NO_GUARD = AnswerGuard()


def width(silo: Silo) -> int:
    """Coordinates of a model."""
    return silo.X.shape[1] * silo.loss.outputs


def check_samples(
    limits: Limits, silo: Silo, request: Request, most: Callable[[Tensor], float], looked_at: set[tuple[str, Rows]]
) -> None:
    """Refuse sums over few samples, over all but a few, and at models that single samples out.

    ``looked_at`` are the rows whose columns were found to be had by enough of them.
    """
    own = silo.of_part(request.part)
    inside = own.weights(request.rows) > 0
    count = int(inside.sum())
    for number, what in ((count, "behind"), (len(own.X) - count, "left out of")):
        if 0 < number < limits.min_samples:
            remedy = "; take fewer folds (--folds)" if request.rows.kind == "fold" else ""
            least = f"fewer than min_samples = {limits.min_samples}"
            raise DataRefusalError(
                f"few samples are behind a sum, or left out of it: {least}{remedy}", f"{number} {what} it"
            )
    if request.part != "train":
        check_classes(limits, own, request.part)
    if isinstance(silo.loss, Cox):
        event_times.check(limits, own, request)
    elif request.name in event_times.QUESTIONS:
        raise RefusalError("a question about times to an event, and the experiment is about something else")
    fold = request.name in ("newton", "information") and request.rows.kind == "fold" and request.rows.held
    if fold and (request.part, request.rows) not in looked_at:
        _check_columns(limits, own.X[inside], " of a fold")  # models are fitted to the others
        looked_at.add((request.part, request.rows))
    if request.name == "losses" and request.numbers.get("errors"):
        _check_errors(limits, own, request)
    edges, most_edges = request.arrays.get("edges", torch.zeros(0)), _MOST_EDGES
    if request.name == "losses" and request.numbers.get("bins") and blurs(limits):
        raise RefusalError(
            "histograms at a model end at single samples: this site tells none for score = 'auc' (exact_counts = true "
            "would); take the score 'deviance', or the quality, which has an AUROC"
        )
    if request.name == "scores" and blurs(limits):
        raise RefusalError("scores are exact counts at a model; this site tells tallies of them, which have noise")
    if request.name == "tallies" and blurs(limits):
        most_edges = _TALLIED
    if (request.name in ("scores", "tallies") or len(edges)) and not _rising(edges, most_edges):
        raise RefusalError(f"the edges of bins must rise and be at most {most_edges}")
    if policy.affine(silo.loss):
        return
    for x in request.arrays.get("models", request.arrays.get("x", torch.zeros(0))).view(-1, width(silo)):
        if len(own.X) and not _within(limits, counted_margins(own.loss, own.margins(x)), most, x):
            raise DataRefusalError(f"samples have margins beyond this site's max_margin = {limits.max_margin:g}")


def counted_margins(loss: Loss, z: Tensor) -> Tensor:
    """Margins as they are limited: those of a Cox model, which has no intercept, count from the least of them."""
    return z - z.min() if isinstance(loss, Cox) and len(z) else z


def check_conditional(limits: Limits, state: State, query: Conditional, most: Callable[[Tensor], float]) -> None:
    """Refuse coefficients of a category's model at which its sums are those over the rows beyond a plane."""
    name, points = query.equation, np.array(query.points)
    if name in state.lacking or not state.chain.columns[name]:  # of numbers it is the columns' products at any point
        return
    if not _within(limits, torch.from_numpy(state.margins(name, points)), most, torch.from_numpy(points.ravel())):
        raise DataRefusalError(
            f"margins of the conditional model of {name!r} are beyond this site's max_margin = {limits.max_margin:g}"
        )


def check_summed(limits: Limits, request: Request) -> None:
    """Refuse what is only a few sites' sum, in an exchange where nobody may see these: of some sites, of a part."""
    if request.rows.kind == "sites" or (request.rows.kind == "site" and not limits.left_out):
        raise RefusalError(
            "a sum over some of the sites; secure sums are over all of them: take a number of folds, or agree to it by "
            "left_out = true in the [limits] of all sites"
        )
    if request.part not in ("train", NEW):
        raise RefusalError(f"a sum over {request.part} samples, which one site alone may have; not in secure sums")


def _rising(edges: Tensor, most: int) -> bool:
    return 0 < len(edges) <= most and bool((edges.diff() > 0).all())


def blurs(limits: Limits) -> bool:
    """Whether a site puts noise on what it counts at a model."""
    return not limits.exact_counts and limits.min_count > 1


def check_classes(limits: Limits, own: Silo, part: str) -> None:
    """Refuse a held-out part in which a class is rare."""
    if own.loss.classifier and len(own.b):
        classes, counts = torch.unique(own.labels(own.b), return_counts=True)
        if int(counts.min()) < limits.min_class:
            here = f"class {int(classes[counts.argmin()])} has {int(counts.min())}"
            raise DataRefusalError(f"a class has fewer {part} samples here than min_class = {limits.min_class}", here)


def worth_telling(limits: Limits, loss: Loss, targets: Tensor) -> bool:
    """Whether so many outcomes of new patients are known that sums over them may be told."""
    if len(targets) < max(limits.min_samples, limits.min_evaluation):
        return False
    if isinstance(loss, Cox):
        events = int((targets[:, EVENT] > 0).sum())
        return events >= limits.min_events and len(targets) - events >= limits.min_class
    if not loss.classifier:
        return enough(targets.numpy(), limits.min_class)
    return int(torch.unique(targets, return_counts=True)[1].min()) >= limits.min_class


def told_apart(limits: Limits, own: Silo, x: Tensor) -> bool:
    """Whether a model tells none or enough samples from the others: that of one rare column is about those few."""
    return not len(own.X) or enough(own.margins(x).double().numpy(), limits.min_count)


def check_columns(limits: Limits, silo: Silo, names: Sequence[str]) -> None:
    """Refuse samples of which a few alone differ from the others in a column, or in a target that is no class."""
    inside = silo.importance > 0
    _check_columns(limits, silo.X[inside], "", names)
    if silo.loss.by_sample and not silo.loss.classifier and not enough(silo.b[inside].numpy(), limits.min_class):
        raise DataRefusalError(f"fewer than min_class = {limits.min_class} targets differ from the commonest one")


def columns_of(silos: Silos) -> npt.NDArray[np.float64]:
    """All that is multiplied with each other in the sums over some samples: features and targets.

    Offsets are among them, and everything as it counts, beside what it is: means of the recipe have no weights.
    """
    X = tensors_only(silos.features, "a table").double().flatten(1)
    columns = [X, silos.targets.double().view(len(X), -1)]
    if silos.margin_offsets is not None:
        columns.append(silos.margin_offsets.double().unsqueeze(1))
    if silos.weights is not None:
        weighted = [torch.ones(len(X), 1, dtype=torch.float64), *columns]
        columns += [silos.weights.double().unsqueeze(1) * one for one in weighted]
    return torch.cat(columns, 1).numpy()


def products_with_levels(silos: Silos) -> npt.NDArray[np.float64] | None:
    """Levels that are in products, and these, for each outcome alone: a gradient has their sums over it.

    Beside the levels of a category there is the one that these are compared with. None if there are no products.
    """
    X, made = tensors_only(silos.features, "a table").double().flatten(1), dict[tuple[str, str], Tensor]()
    own = dict(zip(silos.feature_names, X.T, strict=True))
    pairs = [name.split(":") for name in own if ":" in name]
    for one, other in [pair for a, b in pairs for pair in ((a, b), (b, a))]:
        if one not in own or other not in own or len(torch.unique(own[one])) != 2:
            continue
        kin = [column for name, column in own.items() if ":" not in name and name.split("=")[0] == one.split("=")[0]]
        level = (own[one] != own[one].min()).double()
        rest = 1 - torch.stack([(column != column.min()).double() for column in kin]).sum(0)
        for name, inside in ((one, level), (f"none of {one.split('=')[0]}", rest)):
            made |= {(name, ""): inside, (name, other): inside * own[other]}
    return by_outcome(torch.stack(list(made.values()), 1), silos.targets) if made else None


def columns_by_outcome(silos: Silos) -> npt.NDArray[np.float64]:
    """An intercept and the columns, for each outcome alone: squares of residuals are sums over either."""
    X = tensors_only(silos.features, "a table").double().flatten(1)
    return by_outcome(torch.cat([torch.ones(len(X), 1, dtype=torch.float64), X], 1), silos.targets)


def by_outcome(X: Tensor, targets: Tensor) -> npt.NDArray[np.float64]:
    """Columns, and these times each outcome; of outcomes that are no classes, times these and their squares."""
    y = targets.double() if targets.ndim == 1 else targets[:, EVENT].double()
    kinds = torch.unique(y)
    each = [(y == kind).double() for kind in kinds[1:]] if len(kinds) <= _KINDS else [y, y.square()]
    return torch.cat([X, *(X * one.unsqueeze(1) for one in each)], 1).numpy()


def expected_outer(silo: Silo, request: Request, sums: Sums) -> Tensor:
    """What the outer products of the samples' gradients come to if the model is right: what the Hessian says already.

    At a model of the asker's choice their sum is one over each class, and with a level that few of a class have it
    holds the rows of these.
    """
    weights = silo.of_part(request.part).weights(request.rows)
    each = float(weights.square().sum() / weights.sum().square()) if float(weights.sum()) > 0 else 0.0
    spread = 2 * sums["loss"] if policy.affine(silo.loss) else sums["weight"][:1]  # times the share
    return sums["hessian"] * each * spread


def check_features(limits: Limits, silos: Silos, names: Sequence[str]) -> None:
    """The same for the rounds of a method: a gradient and a Hessian have a coordinate for each column."""
    features = silos.features
    if isinstance(features, SparseRows):
        others = np.bincount(features.indices, minlength=features.width)
        _refuse_rare(limits, np.flatnonzero((others > 0) & (others < limits.min_count)), "", names)
    elif isinstance(features, Tensor) and features.ndim == 2:
        _check_columns(limits, features, "", names)


def _check_columns(limits: Limits, X: Tensor, where: str, names: Sequence[str] = ()) -> None:
    columns = X.double().numpy()
    _refuse_rare(
        limits, [j for j in range(columns.shape[1]) if not enough(columns[:, j], limits.min_count)], where, names
    )


def _refuse_rare(limits: Limits, rare: Sequence[int] | Ints, where: str, names: Sequence[str]) -> None:
    if len(rare):
        raise DataRefusalError(
            f"fewer than min_count = {limits.min_count} samples{where} differ from the others in a column; "
            f"{_remedy(limits)}",
            ", ".join(names[j] for j in rare if j < len(names)),
        )


def _remedy(limits: Limits) -> str:
    return (
        f"put rare = {limits.min_count} under [recipe] in the experiment (it is then constant here), or ask the site's "
        "people, whose log names it"
    )


def check_own(limits: Limits, few: Sequence[str]) -> None:
    """Refuse features in which a few patients could be told from the gaps that the asker's recipe has filled."""
    if few:
        raise DataRefusalError(
            f"beside filled gaps, fewer than min_count = {limits.min_count} samples differ from the others in a "
            f"column; {_remedy(limits)}",
            ", ".join(few),
        )


def _check_errors(limits: Limits, own: Silo, request: Request) -> None:
    """Refuse errors where the metric is not allowed, and small counts of wrong predictions, or of right ones."""
    policy.listed("accuracy" if own.loss.classifier else "mae", limits.metrics, "metrics")
    if not own.loss.classifier or blurs(limits):
        return
    sums = answer(own.counted(request.rows), Request("losses", request.arrays, request.numbers, ALL))
    share, total = sums["weight"].tolist()
    for wrong in (sums["error"] * (total / share if share else 0.0)).round().tolist():
        if 0 < wrong < limits.min_count or 0 < total - wrong < limits.min_count:
            raise DataRefusalError(
                f"fewer than min_count = {limits.min_count} samples of a part are wrongly or rightly predicted; "
                "take the score 'deviance' or 'auc'"
            )


def told(limits: Limits, silo: Silo, requests: Sequence[Request], guard: AnswerGuard = NO_GUARD) -> list[Sums]:
    """The answers, with bins of fewer than ``min_count`` samples joined with their neighbours, whatever these weigh.

    Measures on different folds are told as one, in the place of the first: each sample by the model of its fold, in
    bins that need not be as coarse as a fold is small. Residuals and rates are zeros where the metric "r2" is not
    allowed, absolute errors without "mae", and rates and calibrations where they take a margin beyond ``max_margin``.
    ``guard`` says which of some sets of samples, those below the ends of groups, may be told beside what was told
    before, and has the noise of tallies.
    """
    if any(one.name in event_times.TIMED for one in requests):
        made = [dict(answer(event_times.coarse(limits, silo, one, guard.divisions(one)), one)) for one in requests]
    else:
        made = [dict(sums) for sums in answer_all(silo, requests)]
    for places in _together(requests):
        asked, answers = [requests[i] for i in places], [made[i] for i in places]
        match asked[0].name:
            case "scores":
                _tell_scores(limits, silo, asked, answers, guard.apart)
            case "tallies":
                _tell_tallies(limits, silo, asked, answers, guard)
            case "calibration":
                _tell_calibration(limits, silo, asked, answers, guard.most)
            case "residuals":
                _tell_residuals(limits, silo, asked, answers, guard.apart)
            case "rates":
                _tell_rates(limits, silo, asked, answers, guard.most)
            case "horizon":
                event_times.tell_horizon(limits, silo, asked, answers, joined)
            case "losses" if answers[0]["histogram"].numel():
                plain = _counted(silo, asked[0])["histogram"]
                answers[0]["histogram"] = _histograms(answers[0]["histogram"], plain, limits.min_count)
    return made


def _first_of_all(answers: Sequence[Sums], key: str) -> Tensor:
    """Leave the sum of all answers in the first, and zeros in the others."""
    first, *others = [one[key] for one in answers]
    for one in others:
        first += one
        one.zero_()
    return first


def _numbers(silo: Silo, asked: Sequence[Request]) -> Tensor:
    """How many samples are in each bin, whatever they weigh, ``(classes, bins)``."""
    return torch.stack([_counted(silo, one)["counts"][..., 0] for one in asked]).sum(0)


def _places(silo: Silo, asked: Sequence[Request]) -> Ints:
    """The bin of each sample at the model of its part; -1 for those that are in none."""
    own = silo.of_part(asked[0].part)
    made = np.full(len(own.X), -1)
    for one in asked:
        inside = (own.weights(one.rows) > 0).numpy()
        at = torch.bucketize(own.margins(one.arrays["x"]), one.arrays["edges"], right=True).numpy()
        made[inside] = at[inside]
    return made


def _tell_scores(limits: Limits, silo: Silo, asked: Sequence[Request], answers: Sequence[Sums], apart: Apart) -> None:
    sums, numbers = _first_of_all(answers, "counts"), _numbers(silo, asked)
    own = silo.of_part(asked[0].part)
    told_as_one = partial(apart, asked[0].part, _places(silo, asked), own.labels(own.b).numpy())
    answers[0]["counts"] = joined(sums, limits.min_count, numbers, HIGHEST, told_as_one)
    _first_of_all(answers, "squares")[numbers.sum(1) < limits.min_count] = 0.0


def _tell_tallies(
    limits: Limits, silo: Silo, asked: Sequence[Request], answers: Sequence[Sums], guard: AnswerGuard
) -> None:
    """Counts with noise that adds up to nothing over all bins, and probabilities with one that does over classes."""
    counts, totals = _first_of_all(answers, "tallies"), _first_of_all(answers, "totals")
    own, places = silo.of_part(asked[0].part), _places(silo, asked)
    if not len(own.X):
        return
    labels, heaviest = own.labels(own.b).numpy(), max(float(own.weights(one.rows).max()) for one in asked)
    rare = _rare_classes(limits, labels[places >= 0])
    question = asked[0].part, _question(own, asked)
    if len(rare) < 2 and (noise := guard.blur(*question, counts.shape[1])) is not None:
        counts += heaviest * torch.from_numpy(noise)
        answers[0]["variance"][0] += (heaviest * deviation(limits.min_count)) ** 2
    if shift := guard.shift(*question):
        shift = min(max(heaviest * shift, -float(totals[1, 1])), float(totals[0, 1]))
        totals[:, 1] += totals.new_tensor([-shift, shift])
        answers[0]["variance"][1] += (heaviest * SHIFT) ** 2
    if not rare:  # nobody needs them by class
        totals[:, 2] = totals[:, 2].sum() * totals.new_tensor([1.0, 0.0])
    counts[rare], totals[rare] = 0.0, 0.0


def _question(own: Silo, asked: Sequence[Request]) -> str:
    """The models, edges and samples as they were asked about.

    Any other ones are another question: that two have the same answer would say that nobody is between their edges.
    """
    inside = [np.packbits((own.weights(one.rows) > 0).numpy()).tobytes() for one in asked]
    return seal(*inside, *(t.numpy().tobytes() for one in asked for t in (one.arrays["x"], one.arrays["edges"])))


def _rare_classes(limits: Limits, labels: Ints) -> list[int]:
    """Which of two classes too few samples have for anything to be told of them."""
    return [kind for kind in (0, 1) if (labels == kind).sum() < limits.min_count]


def _tell_calibration(
    limits: Limits,
    silo: Silo,
    asked: Sequence[Request],
    answers: Sequence[Sums],
    most: Callable[[Tensor], float],
) -> None:
    """Sums without classes of few samples, and without lines at which a margin is too large."""
    own = silo.of_part(asked[0].part)
    labels, inside = own.labels(own.b).numpy(), torch.stack([own.weights(one.rows) > 0 for one in asked]).any(0).numpy()
    if rare := _rare_classes(limits, labels[inside]):
        mask = torch.from_numpy(~np.isin(labels, rare)).double()
        kept = {rows: weights * mask for rows, weights in own.kept.items()}
        some = replace(own, importance=own.importance * mask, kept=kept)
        for one, told_of in zip(asked, answers, strict=True):
            told_of["sums"] = answer(some, replace(one, part="train"))["sums"]
    sums = _first_of_all(answers, "sums")
    for one in asked if len(own.X) else []:
        x, z = one.arrays["x"], own.margins(one.arrays["x"])
        for k, line in enumerate(asked[0].arrays["lines"]):
            if not _within(limits, line[0] + line[1] * z, most, x, line):
                sums[k] = 0.0


def _within(limits: Limits, z: Tensor, most: Callable[[Tensor], float], *model: Tensor) -> bool:
    """Whether margins at a model are within the largest ones at which something is told."""
    largest = float(z.abs().max())
    return largest <= limits.max_margin or largest <= most(torch.cat(model))  # which is never less


def _tell_residuals(
    limits: Limits, silo: Silo, asked: Sequence[Request], answers: Sequence[Sums], apart: Apart
) -> None:
    first, sums = _first_of_all(answers, "sums"), _first_of_all(answers, "counts")
    places = _places(silo, asked)
    told_as_one = partial(apart, asked[0].part, places, np.zeros(len(places), np.int64))
    answers[0]["counts"] = joined(sums, limits.min_count, _numbers(silo, asked), None, told_as_one)
    if not policy.allows("mae", limits.metrics):
        first[RESIDUALS.index("absolute")], first[RESIDUALS.index("kept")] = 0.0, first[RESIDUALS.index("weight")]
    if not policy.allows("r2", limits.metrics):
        for one in answers[0].values():
            one.zero_()


def _tell_rates(
    limits: Limits,
    silo: Silo,
    asked: Sequence[Request],
    answers: Sequence[Sums],
    most: Callable[[Tensor], float],
) -> None:
    sums = _first_of_all(answers, "sums")
    if not policy.allows("r2", limits.metrics):
        sums.zero_()
    own = silo.of_part(asked[0].part)
    for one in asked if len(own.X) else []:
        x, z = one.arrays["x"], own.linear(one.arrays["x"])
        for k, slope in enumerate(asked[0].arrays["slopes"]):
            if not _within(limits, slope * z + own.shift, most, x, slope.view(1)):
                sums[k] = 0.0


def _together(requests: Sequence[Request]) -> list[list[int]]:
    """Places of requests whose counts are told as one: measures on folds of one division, each fold once."""
    made = list[list[int]]()
    for i, one in enumerate(requests):
        fold = one.name in (*MEASURES, "horizon") and one.rows.kind == "fold" and one.rows.held
        if fold and made and _same_division(requests, made[-1], one):
            made[-1].append(i)
        else:
            made.append([i])
    return made


def _same_division(requests: Sequence[Request], places: Sequence[int], one: Request) -> bool:
    others = [requests[i] for i in places]
    if any(other.name != one.name or other.rows.number == one.rows.number for other in others):
        return False
    alike = replace(one.rows, number=others[0].rows.number) == others[0].rows and one.part == others[0].part
    given = {"rates": ["slopes"], "calibration": ["lines"], "horizon": ["edges", "groups"]}.get(one.name, ["edges"])
    alike = alike and one.numbers.get("at") == others[0].numbers.get("at")
    return alike and all(torch.equal(one.arrays[at], others[0].arrays[at]) for at in given)


def _counted(silo: Silo, request: Request) -> Sums:
    """The answer if every sample of the rows counted one."""
    own = silo.of_part(request.part)
    numbers = {**request.numbers, "errors": 0}
    return answer(own.counted(request.rows), Request(request.name, request.arrays, numbers, ALL))


def _histograms(sums: Tensor, counts: Tensor, least: int) -> Tensor:
    """Joined histograms ``(models, 2, 2, bins)``: at the lowest and at the highest bin of each group."""
    each = [joined(h.movedim(0, -1), least, n[0], HIGHEST).movedim(-1, 0) for h, n in zip(sums, counts, strict=True)]
    return torch.stack(each)


def joined(
    sums: Tensor,
    least: int,
    counts: Tensor,
    highest: int | None = None,
    apart: Callable[[list[int]], list[bool]] = lambda ends: [True] * len(ends),
) -> Tensor:
    """Sums in bins ``(classes, bins, sums)``, neighbours joined until each class has none or ``least`` samples in one.

    The classes are joined alike. ``counts`` are the numbers of samples ``(classes, bins)``. A class below ``least`` in
    all is left out. A bin with enough samples stands for itself. A group of several is told at the lowest bin of its
    range, and its sum number ``highest`` at the highest one: so everyone knows between which bins its samples are, and
    bounds of ranks follow from the sums of several sites. The range says nothing about single samples: it
    reaches to the bins that stand for themselves, between two groups to the middle of the gap between their samples,
    and beyond the least and the largest sample to the first and the last bin. ``apart`` is told the last bins of the
    groups but the last one, and says where two neighbours must be told as one because of earlier answers.
    """
    large = counts.sum(1) >= least
    made, kept = torch.zeros_like(sums), counts[large]
    groups = _groups(kept, least)
    if least > 1 and len(groups) > 1:
        divided = apart([group[-1] for group in groups[:-1]])
        merged = [groups[0]]
        for group, alone in zip(groups[1:], divided, strict=True):
            merged = [*merged, group] if alone else [*merged[:-1], merged[-1] + group]
        groups = merged
    for group, (low, high) in zip(groups, _ranges(groups, sums.shape[1]), strict=True):
        total = sums[large][:, group].sum(1)
        made[large, low] = total
        if highest is not None:
            made[large, low, highest] = 0.0
            made[large, high, highest] = total[:, highest]
    return made


def _ranges(groups: Sequence[Sequence[int]], bins: int) -> list[tuple[int, int]]:
    """The first and the last bin of each group's range."""
    ends = []
    for left, right in pairwise(groups):
        alone = len(left) == 1 or len(right) == 1
        between = left[-1] if len(left) == 1 else right[0] - 1 if alone else (left[-1] + right[0]) // 2
        ends.append(between)
    outer = zip(groups, [-1, *ends], [*ends, bins - 1], strict=True) if groups else []
    return [(g[0], g[0]) if len(g) == 1 else (before + 1, last) for g, before, last in outer]


def _groups(counts: Tensor, least: int) -> list[list[int]]:
    """Bins that are told as one, from left to right, of ``counts`` in classes and bins; empty bins are in none.

    Of all ways to join neighbours it is one with the fewest pairs of different classes within a group, whose order
    nobody will know, and among these one with the most groups; groups of many times ``least`` of every class are not
    looked at, since they can be divided.
    """
    some = torch.nonzero(counts.sum(0)).flatten().tolist()
    if least <= 1 or not some:
        return [[place] for place in some]
    before = np.concatenate([np.zeros((1, len(counts))), counts.T[some].numpy().cumsum(0)])
    best, first = np.full(len(some) + 1, np.inf), np.zeros(len(some) + 1, int)
    best[0] = 0.0
    ample = [np.searchsorted(kind, kind - _AMPLE * least, "right") - 1 for kind in before.T]
    starts = np.maximum(np.min(ample, axis=0), 0)
    for end in range(1, len(some) + 1):
        start = starts[end]
        inside = before[end] - before[start:end]
        cost = best[start:end] + (inside.prod(1) if len(counts) > 1 else 0.0)
        cost[((inside > 0) & (inside < least)).any(1)] = np.inf
        place = int(cost.argmin())
        if math.isinf(cost[place]) and start and not (before[end] < least).any():  # all that is before, then
            first[end], best[end] = 0, before[end].prod()
        else:
            first[end], best[end] = start + place, cost[place] - _PER_GROUP
    groups, end = list[list[int]](), len(some)
    while end > 0:
        groups.append(some[first[end] : end])
        end = first[end]
    return groups[::-1]


def check_query(query: Query, recipe: Recipe, table_one: TableOneSection | None = None) -> None:
    """Refuse steps of a query that no recipe asks for: by their choice counts of single values could be had.

    Rows are divided by the one column that the experiment names, before its gaps are filled by anybody's choice.

    Quantiles are of columns as they are, since a shift would move the fixed edges, behind which the largest value
    hides; whether there are other levels is asked of the recipe's categories, before these are coded.
    """
    if isinstance(query, Conditional | Lacking) and not drawn_as(recipe, query.chain):
        raise RefusalError("the conditional models are not those of the experiment's recipe")
    kinds = [str(getattr(step, "kind", "")) for step in query.steps]
    if isinstance(query, Below) and not set(kinds).isdisjoint(_SHIFTED):
        raise RefusalError("a histogram is of columns before they are shifted, scaled or multiplied")
    if isinstance(query, LevelCounts) and not set(kinds).isdisjoint(_CODED):
        raise RefusalError("levels are told of columns before they are coded, scaled or multiplied")
    if query.only is not None and (
        table_one is None or query.only[0] != table_one.by or not {*kinds} <= {"absent", "complete"}
    ):
        raise RefusalError("rows are told apart by the column that `by` of [table_one] in the experiment names alone")
    check_steps(recipe, query.steps)
    if isinstance(query, Outside) and not (
        query.known.keys() <= recipe.one_hot_columns.keys() and not set(kinds) & _CODED
    ):
        raise RefusalError("whether there are other levels is told of the recipe's categories, before they are coded")
