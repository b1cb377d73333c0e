"""Minimum counts of analyses: what a site looks at before it tells a sum over samples, or counts of its table.

A sum over few samples is about them, and so is one over all but a few, or one in which a column is zero for all but a
few: a row of its Hessian is then those few rows. These are refused. Bins of few samples are joined with others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedcomposite.data import Recipe
from fedcomposite.data.queries import Below, Query, enough
from fedcomposite.data.sheets import Sheet
from fedcomposite.data.steps import Complete, Local, Log, Step, prepared
from fedcomposite.federation import policy
from fedcomposite.federation.policy import Limits, RefusalError
from fedcomposite.problems.loss import Loss
from fedcomposite.problems.requests import ALL, RESIDUALS, Request, Silo, Sums, answer

_MOST_EDGES = 4096
_MEASURES = ("scores", "residuals")
_ORDER = ("absent", "complete", "impute", "one_hot", "log", "spline", "interact", "standardize")


def width(silo: Silo) -> int:
    """Coordinates of a model."""
    return silo.X.shape[1] * (1 if silo.b.ndim == 1 else silo.b.shape[1])


def check_samples(limits: Limits, silo: Silo, request: Request) -> None:
    """Refuse sums over few samples, over all but a few, and at models that single samples out."""
    own = silo.of_part(request.part)
    inside = own.weights(request.rows) > 0
    count = int(inside.sum())
    for number, what in ((count, "behind"), (len(own.X) - count, "left out of")):
        if 0 < number < limits.min_samples:
            remedy = "; take fewer folds (--folds)" if request.rows.kind == "fold" else ""
            least = f"fewer than min_samples = {limits.min_samples}"
            raise RefusalError(f"{number} samples are {what} a sum, {least}{remedy}")
    if request.part != "train":
        check_classes(limits, own, request.part)
    if request.name in ("newton", "information") and request.rows.kind == "fold" and request.rows.held:
        _check_columns(limits, own.X[inside], " of a fold")  # models are fitted to the others
    if request.name == "losses" and request.numbers.get("errors"):
        _check_errors(limits, own, request)
    edges = request.arrays.get("edges", torch.zeros(0))
    if (request.name == "scores" or len(edges)) and not _rising(edges):
        raise RefusalError(f"the edges of bins must rise and be at most {_MOST_EDGES}")
    if policy.affine(silo.loss):
        return
    for x in request.arrays.get("models", request.arrays.get("x", torch.zeros(0))).view(-1, width(silo)):
        if len(own.X) and not float(own.margins(x).abs().max()) <= limits.max_margin:
            raise RefusalError(f"samples have margins beyond this site's max_margin = {limits.max_margin:g}")


def _rising(edges: Tensor) -> bool:
    return 0 < len(edges) <= _MOST_EDGES and bool((edges.diff() > 0).all())


def check_classes(limits: Limits, own: Silo, part: str) -> None:
    """Refuse a held-out part in which a class is rare."""
    if own.loss.classifier and len(own.b):
        counts = torch.unique(own.labels(own.b), return_counts=True)[1]
        if int(counts.min()) < limits.min_class:
            raise RefusalError(f"a class has fewer {part} samples here than min_class = {limits.min_class}")


def worth_telling(limits: Limits, loss: Loss, targets: Tensor) -> bool:
    """Whether so many outcomes of new patients are known that sums over them may be told."""
    if len(targets) < max(limits.min_samples, limits.min_evaluation):
        return False
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
    if not silo.loss.classifier and not enough(silo.b[inside].numpy(), limits.min_class):
        raise RefusalError(f"fewer than min_class = {limits.min_class} targets differ from the commonest one")


def _check_columns(limits: Limits, X: Tensor, where: str, names: Sequence[str] = ()) -> None:
    columns = X.double().numpy()
    rare = [j for j in range(columns.shape[1]) if not enough(columns[:, j], limits.min_count)]
    if rare:
        told = ", ".join(names[j] for j in rare[:5] if j < len(names))
        raise RefusalError(
            f"fewer than min_count = {limits.min_count} samples{where} differ from the others in {told or 'a column'}; "
            f"{_remedy(limits)}"
        )


def _remedy(limits: Limits) -> str:
    return f"put rare = {limits.min_count} under [recipe] in the experiment (it is then constant here), or drop it"


def check_own(limits: Limits, few: Sequence[str]) -> None:
    """Refuse features in which a few patients could be told from the gaps that the asker's recipe has filled."""
    if few:
        raise RefusalError(
            f"beside filled gaps, fewer than min_count = {limits.min_count} samples differ from the others in "
            f"{', '.join(few[:5])}; {_remedy(limits)}"
        )


def _check_errors(limits: Limits, own: Silo, request: Request) -> None:
    """Refuse errors where the metric is not allowed, and small counts of wrong predictions, or of right ones."""
    policy.listed("accuracy" if own.loss.classifier else "mae", limits.metrics, "metrics")
    if not own.loss.classifier:
        return
    sums = answer(own.counted(request.rows), Request("losses", request.arrays, request.numbers, ALL))
    share, total = sums["weight"].tolist()
    for wrong in (sums["error"] * (total / share if share else 0.0)).round().tolist():
        if 0 < wrong < limits.min_count or 0 < total - wrong < limits.min_count:
            raise RefusalError(
                f"fewer than min_count = {limits.min_count} samples of a part are wrongly or rightly predicted; "
                "take the score 'deviance' or 'auc'"
            )


def told(limits: Limits, silo: Silo, requests: Sequence[Request]) -> list[Sums]:
    """The answers, with bins of fewer than ``min_count`` samples joined with their neighbours, whatever these weigh.

    Scores and residuals on different folds are told as one, in the place of the first: each sample by the model of its
    fold, in bins that need not be as coarse as a fold is small. Residuals are zeros where the metric "r2" is not
    allowed, and so are absolute errors without "mae".
    """
    made = [dict(answer(silo, one)) for one in requests]
    for places in _together(requests):
        one = requests[places[0]]
        if one.name == "residuals":
            _tell_residuals(limits, [made[i] for i in places])
        key = "counts" if one.name in _MEASURES else "histogram"
        if key not in made[places[0]] or not made[places[0]][key].numel():
            continue
        plain = [_counted(silo, requests[i])[key] for i in places]
        sums, counts = torch.stack([made[i][key] for i in places]).sum(0), torch.stack(plain).sum(0)
        for i in places[1:]:
            made[i][key] = torch.zeros_like(sums)
        made[places[0]][key] = _joined_bins(sums, counts, limits.min_count)
    return made


def _tell_residuals(limits: Limits, answers: Sequence[Sums]) -> None:
    """Leave the sums of all in the first, as far as they may be told."""
    first, *others = [one["sums"] for one in answers]
    for one in others:
        first += one
        one.zero_()
    if not policy.allows("mae", limits.metrics):
        first[RESIDUALS.index("absolute")] = 0.0
    if not policy.allows("r2", limits.metrics):
        for answered in answers:
            for sums in answered.values():
                sums.zero_()


def _together(requests: Sequence[Request]) -> list[list[int]]:
    """Places of requests whose counts are told as one: measures on folds of one division, each fold once."""
    made = list[list[int]]()
    for i, one in enumerate(requests):
        fold = one.name in _MEASURES and one.rows.kind == "fold" and one.rows.held
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
    return alike and torch.equal(one.arrays["edges"], others[0].arrays["edges"])


def _counted(silo: Silo, request: Request) -> Sums:
    """The answer if every sample of the rows counted one."""
    own = silo.of_part(request.part)
    numbers = {**request.numbers, "errors": 0}
    return answer(own.counted(request.rows), Request(request.name, request.arrays, numbers, ALL))


def _joined_bins(sums: Tensor, counts: Tensor, least: int) -> Tensor:
    """Joined counts of scores or residuals ``(classes, bins, sums)``, or histograms of models ``(models, 2 bins)``."""
    if sums.ndim == 3:
        return joined(sums, least, counts[..., 0])
    shape = len(sums), 2, -1
    halves, plain = sums.view(*shape, 1), counts.view(*shape)
    each = [joined(one, least, count) for one, count in zip(halves, plain, strict=True)]
    return torch.stack(each).view_as(sums)


def joined(sums: Tensor, least: int, counts: Tensor | None = None) -> Tensor:
    """Sums in bins ``(classes, bins, sums)``, neighbours joined until each class has none or ``least`` samples in one.

    The classes are joined alike, so that pairs within a group are ties: curves of the groups say less than those of the
    bins, but nothing else, and the bounds of their areas hold. A group's sums are told in its bin in the middle of the
    samples. A class below ``least`` in all is left out. ``counts`` are the numbers of samples ``(classes, bins)``; the
    first of the sums, unless samples have weights.
    """
    numbers = sums[..., 0] if counts is None else counts
    large = numbers.sum(1) >= least
    made, kept = torch.zeros_like(sums), numbers[large]
    for group in _groups(kept.T.tolist(), least):
        before = kept[:, group].sum(0).cumsum(0)
        middle = group[int((before < before[-1] / 2).sum())]
        made[large, middle] = sums[large][:, group].sum(1)
    return made


def _groups(bins: Sequence[Sequence[float]], least: int) -> list[list[int]]:
    """Bins that are told as one, from left to right; what remains at the end joins those before it."""
    groups, group, inside = list[list[int]](), list[int](), [0.0]
    for at in [i for i, each in enumerate(bins) if sum(each) > 0]:
        inside = [a + b for a, b in zip(inside, bins[at], strict=True)] if group else list(bins[at])
        group.append(at)
        if not _few(inside, least):
            groups.append(group)
            group = []
    while group and groups:
        group = groups.pop() + group
        if not _few([sum(kind) for kind in zip(*(bins[i] for i in group), strict=True)], least):
            groups.append(group)
            group = []
    return groups


def _few(numbers: Sequence[float], least: int) -> bool:
    return any(0 < number < least for number in numbers)


def check_steps(limits: Limits, sheet: Sheet, query: Query, recipe: Recipe) -> None:
    """Refuse steps of a query that no recipe asks for: by their choice counts of single values could be had.

    A site marks values as missing and changes units by itself; logarithms fail below a value, so that they are the
    experiment's; a step that comes twice would make powers; rows that are left out are none or many; quantiles are of
    columns as they are, since a shift would move the fixed edges, behind which the largest value hides.
    """
    steps: Sequence[Step] = query.steps
    kinds = [str(getattr(step, "kind", "")) for step in steps]
    if isinstance(query, Below) and not set(kinds).isdisjoint(_ORDER[-3:]):
        raise RefusalError("a histogram is of columns before they are shifted, scaled or multiplied")
    if any(isinstance(step, Local) for step in steps) or kinds != sorted(set(kinds), key=_ORDER.index):
        raise RefusalError("the steps of a query are not those of a recipe")
    for i, step in enumerate(steps):
        if isinstance(step, Log) and not step.offsets.items() <= recipe.log_offsets.items():
            raise RefusalError("the logarithms of a query are not those of the experiment's recipe")
        if isinstance(step, Complete):
            before = prepared(sheet, steps[:i])
            left = before.rows - step.apply(before).rows
            if 0 < left < limits.min_count:
                raise RefusalError(
                    f"fewer than min_count = {limits.min_count} rows have no value in {step.columns[0]!r}; "
                    "the site's people may take them out of the file"
                )
