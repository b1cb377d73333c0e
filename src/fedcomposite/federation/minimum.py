"""Minimum counts of analyses: what a site looks at before it tells a sum over samples, or counts of its table.

A sum over few samples is about them, and so is one over all but a few, or one in which a column is zero for all but a
few: a row of its Hessian is then those few rows. These are refused. Bins of few samples are joined with others.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedcomposite.data import Recipe
from fedcomposite.data.queries import enough
from fedcomposite.data.sheets import Sheet
from fedcomposite.data.steps import Complete, Local, Log, Step, prepared
from fedcomposite.federation import policy
from fedcomposite.federation.policy import Limits, RefusalError
from fedcomposite.problems.loss import Loss
from fedcomposite.problems.requests import ALL, Request, Silo, Sums, answer

_MOST_EDGES = 4096
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
            raise RefusalError(f"{number} samples are {what} a sum, fewer than min_samples = {limits.min_samples}")
    if request.part != "train":
        check_classes(limits, own, request.part)
    if request.name in ("newton", "information") and request.rows.kind == "fold" and request.rows.held:
        _check_columns(limits, own.X[inside], " of a fold")  # models are fitted to the others
    if request.name == "losses" and request.numbers.get("errors"):
        _check_errors(limits, own, request)
    if request.name == "residuals":
        policy.listed("r2", limits.metrics, "metrics")
    if request.name == "scores" and not _rising(request.arrays["edges"]):
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
            "drop it, or have the recipe make what is rare constant (rare = ...)"
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


def within(limits: Limits, silo: Silo, request: Request, sums: Sums) -> Sums:
    """The sums, with bins of fewer than ``min_count`` samples joined with their neighbours, whatever these weigh."""
    made, least = dict(sums), limits.min_count
    if "counts" not in sums and not ("histogram" in sums and sums["histogram"].numel()):
        return made
    own = silo.of_part(request.part)
    numbers = {**request.numbers, "errors": 0}
    plain = answer(own.counted(request.rows), Request(request.name, request.arrays, numbers, ALL))
    if "counts" in sums:
        made["counts"] = joined(sums["counts"], least, plain["counts"][..., 0])
        return made
    shape = len(sums["histogram"]), 2, -1
    halves, counts = sums["histogram"].view(*shape, 1), plain["histogram"].view(*shape)
    each = [joined(one, least, count) for one, count in zip(halves, counts, strict=True)]
    made["histogram"] = torch.stack(each).view_as(sums["histogram"])
    return made


def joined(sums: Tensor, least: int, counts: Tensor | None = None) -> Tensor:
    """Sums in bins ``(classes, bins, sums)``, bins of fewer than ``least`` samples joined with their neighbours.

    From left to right, in each class by itself, until a group is large enough; what remains at the end joins the last.
    A group's sums are told in its bin in the middle of the samples. A class below ``least`` in all is left out.
    ``counts`` are the numbers of samples ``(classes, bins)``; the first of the sums, unless samples have weights.
    """
    made = torch.zeros_like(sums)
    for kind, (bins, out) in enumerate(zip(sums[..., 0] if counts is None else counts, made, strict=True)):
        weight = bins.tolist()
        groups, group = list[list[int]](), list[int]()
        for at in [i for i, w in enumerate(weight) if w > 0]:
            group.append(at)
            if sum(weight[i] for i in group) >= least:
                groups.append(group)
                group = []
        if group and groups:
            groups[-1] += group
        for group in groups:
            before = torch.tensor([weight[i] for i in group]).cumsum(0)
            middle = group[int((before < before[-1] / 2).sum())]
            out[middle] = sums[kind, group].sum(0)
    return made


def check_steps(limits: Limits, sheet: Sheet, steps: Sequence[Step], recipe: Recipe) -> None:
    """Refuse steps of a query that no recipe asks for: by their choice counts of single values could be had.

    A site marks values as missing and changes units by itself; logarithms fail below a value, so that they are the
    experiment's; a step that comes twice would make powers; rows that are left out are none or many.
    """
    kinds = [str(getattr(step, "kind", "")) for step in steps]
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
