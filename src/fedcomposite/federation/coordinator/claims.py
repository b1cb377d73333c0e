"""What a site claims, held against what can be: counts within its samples, losses within their bounds, and numbers that
are not a different kind of number from everybody else's.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping

import numpy as np
from torch import Tensor

from fedcomposite.data.queries import Answer, Census, Conditional, LevelCounts, Moments, Query, Schema
from fedcomposite.federation.orders import Order
from fedcomposite.federation.wire import Vectors, WireError, clean
from fedcomposite.problems.losses import LOSSES, Loss, Poisson
from fedcomposite.problems.network import ModelLoss
from fedcomposite.runtime.noised_sums import NOISED

_MOST = 2.0**40  # samples that a site may have
_SUMS = ("loss", "log_loss", "brier", "mae")  # a sum of values >= 0, and samples
_NOT_BELOW_ZERO = ("cross_entropy", "mse", "mae", "huber", "binary_cross_entropy")  # of a network
_PER_CLASS = ("balanced_accuracy", "f1", "auc")


def check_numbers(numbers: Mapping[str, float], order: Order, samples: int, least: float) -> None:
    """A report's numbers: those that were asked for, about this round and these samples, and possible."""
    wanted = {"round", "samples"} | ({"gradients", "proxes"} if order.train else set())
    wanted |= {"loss"} if order.evaluate else set()
    if numbers.keys() != wanted:
        odd = sorted(wanted ^ numbers.keys())[0]
        raise WireError(f"the number {clean(odd, 60)!r} {'is missing' if odd in wanted else 'was not asked for'}")
    if numbers["round"] != order.round:
        raise WireError(f"answers round {numbers['round'] + 1:g} in round {order.round + 1}")
    if numbers["samples"] != samples:
        raise WireError("has another number of samples than it said before the first round")
    if any(not 0 <= v <= _MOST for k, v in numbers.items() if k != "loss"):
        raise WireError("a count in its report is negative, NaN or infinite, or too large")
    if math.isnan(loss := numbers.get("loss", 0.0)):
        raise WireError("its loss is NaN")
    if loss < least:
        raise WireError(f"its loss is {loss:.3g}, which is below {least:g}, the least that this loss can be")


def least_loss(loss: Loss | ModelLoss) -> float:
    """The least value of a loss: 0 for those of the package but one, unknown for others."""
    if isinstance(loss, ModelLoss):
        return 0.0 if loss.name in _NOT_BELOW_ZERO else -math.inf
    known = {type(one) for name, one in LOSSES.items() if LOSSES.origin(name) == "fedcomposite"} - {Poisson}
    return 0.0 if type(loss) in known else -math.inf


def check_counts(vectors: Vectors, samples: int, held: dict[str, float], signed: bool) -> None:
    """Rows of counts that cannot be: of no samples, of more than the site has, of more hits than samples, ...

    ``held`` remembers how many samples a part had; ``signed`` says that losses may be negative.
    """
    rows = {name.removeprefix("counts."): row[0] for name, row in vectors.items() if name.startswith("counts.")}
    seen: dict[str, float] = {}
    for name, row in rows.items():
        part, metric = name.split("/")
        if metric == "samples":
            first, second = row.tolist()
            if not 1 <= first <= second <= _MOST or (part == "train" and second != samples):
                raise WireError(f"its counts of {name} cannot be: {first:g} of {second:g}")
            if held.setdefault(part, second) != second:
                raise WireError(f"has {second:g} {part} samples now, {held[part]:g} before")
            seen[part] = first
    for name, row in rows.items():
        part, metric = name.split("/")
        if part not in seen:
            raise WireError(f"its counts of {name} come without a number of samples")
        if metric != "samples" and (reason := _impossible(metric, row, seen[part], signed)):
            raise WireError(f"its counts of {name} cannot be: {reason}")


def _impossible(metric: str, row: Tensor, seen: float, signed: bool) -> str:
    """What is wrong with a row of counts of so many samples, if anything."""
    if metric == "accuracy":
        hits, of = row.tolist()
        return "" if 0 <= hits <= of == seen else f"{hits:g} of {of:g}"
    if metric in _SUMS:
        total, of = row.tolist()
        low = -math.inf if signed and metric == "loss" else 0.0
        return "" if total >= low and of == seen else f"{total:g} over {of:g} samples of {seen:g}"
    if metric in _PER_CLASS or metric == "calibration_error":
        least, most = row.min().item(), row.max().item()
        return "" if least >= 0 and most <= 2 * seen else f"numbers from {least:g} to {most:g} of {seen:g} samples"
    if metric == "r2":
        return "" if row[0] == seen and row[2] >= 0 and row[3] >= 0 else "its sums do not fit together"
    return ""


def check_answer(query: Query, told: Answer) -> None:
    """An answer about a table: the fields that were asked for, of the right length, and counts that can be."""
    if isinstance(query, Schema):
        like: Answer = {"columns": told.get("columns", _NONE), "kinds": told.get("columns", _NONE), "rows": np.zeros(1)}
    elif isinstance(query, LevelCounts) and query.known is None:
        like = {f"levels:{name}": told.get(f"levels:{name}", _NONE) for name in query.columns}
        like |= {f"counts:{name}": np.zeros(len(like[f"levels:{name}"])) for name in query.columns}
        like |= {f"{key}:{name}": np.zeros(1) for name in query.columns for key in ("rest", "many")}
    else:
        like = (query.model_copy(update={"own": False}) if isinstance(query, Moments) else query).sums()
    if told.keys() != like.keys():
        raise WireError(f"its answer to a query lacks or adds {clean(sorted(like.keys() ^ told.keys())[0], 60)!r}")
    for name, values in told.items():
        text = name.partition(":")[0] in ("columns", "kinds", "levels")
        if values.shape != like[name].shape or (values.dtype.kind == "U") is not text:
            raise WireError(f"{clean(name, 60)!r} in its answer to a query has another form than was asked for")
        if (
            not text
            and not isinstance(query, Census | Conditional)
            and name not in ("sum", "squares")
            and bool((values < 0).any() | (values > _MOST).any())
        ):
            raise WireError(f"{clean(name, 60)!r} in its answer to a query cannot be: a count below 0, or too large")
    if "squares" in told and bool((told["squares"] < 0).any()):
        raise WireError("sums of squares in its answer are below 0")


_NONE = np.zeros(0, np.str_)


def check_sums(name: str, sums: Vectors) -> None:
    """Sums over samples that cannot be: weights, counts or squares below zero; noised ones can be."""
    if name in NOISED:
        return
    never = {field: sums.get(field) for field in ("weight", "histogram", "error", "totals", "variance")}
    if "outer" in sums:
        never["outer"] = sums["outer"].diagonal()
    if "counts" in sums:
        never["counts"] = sums["counts"][..., 0]
    for field, values in never.items():
        if values is not None and values.numel() and float(values.min()) < 0:
            raise WireError(f"{field!r} of its {name} is below 0")


def sizes(numbers: Mapping[str, float], vectors: Vectors) -> dict[str, float]:
    """How large a report's loss and vectors are: the largest entry of each."""
    ends = {k: v.aminmax() for k, v in vectors.items() if _measured(k, v)}
    found = {k: max(-float(low), float(high)) for k, (low, high) in ends.items()}
    return found | ({"loss": abs(numbers["loss"])} if "loss" in numbers else {})


def _measured(name: str, vector: Tensor) -> bool:
    return vector.is_floating_point() and vector.numel() > 0 and not name.startswith("counts.")


def strangers(reports: Mapping[str, Mapping[str, float]], most: float, ratio: float) -> dict[str, str]:
    """Sites whose numbers are beyond all bounds while most others' are not, with the reason.

    Beyond is above ``most``, or above ``ratio`` times the median of the others (at least 1), where there are two or
    more. When more than half of the sites are beyond ``most``, the model has diverged and nobody is a stranger.
    """
    found: dict[str, str] = {}
    for name in dict.fromkeys(k for report in reports.values() for k in report):
        values = {site: report[name] for site, report in reports.items() if name in report}
        beyond = {site for site, value in values.items() if not value <= most}
        if 2 * len(beyond) > len(values):
            continue
        for site, value in values.items():
            others = [v for s, v in values.items() if s != site and s not in beyond]
            limit = ratio * max(1.0, statistics.median(others)) if len(values) > 2 and others else math.inf
            if site in beyond or value > limit:
                what = "loss" if name == "loss" else f"vector {name!r}"
                usual = f", the others' {statistics.median(others):.3g}" if others else ""
                found.setdefault(site, f"its {what} is as large as {value:.3g}{usual}; too large steps, or a lie")
    return found
