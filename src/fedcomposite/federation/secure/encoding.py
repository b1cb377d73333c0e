"""What is summed in a secure federation: a site's round, evaluation or introduction as a vector and some scalars.

Every list of scalars begins with 1 and the site's weight. The sum of the ones is the number of parties, exactly: had
the masks not cancelled, it would be any number. It ends with the share of the range that the site's numbers need: a sum
that needs more than all of it is thrown away.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedcomposite.federation.orders import Introduction
from fedcomposite.federation.secure.masking import WIDE, WIDEST, MaskError, Numbers, needed
from fedcomposite.federation.wire import Form, Vectors
from fedcomposite.problems.measures import PARTS, Counts, Measures

SCALARS = {"introduce": 9, "train": 4, "evaluate": 5}
"""Scalars of each kind of sum, beside counts."""
ANALYSIS = "analysis"
"""The purpose of a sum of answers to an analysis."""
Part = tuple[npt.NDArray[np.float64], npt.ArrayLike]
"""A vector and scalars."""


class IntroductionSums(NamedTuple):
    """The sums of all introductions."""

    samples: int
    smoothness: float | None
    weighted_smoothness: float | None  # by samples
    scale: float | None
    weighted_scale: float | None

    def mean_constant(self, sites: int, weighting: str) -> float:
        """The weighted mean of the sites' smoothness constants."""
        by_samples = weighting == "samples"
        found = self.weighted_smoothness if by_samples else self.smoothness
        if found is None:
            found = self.weighted_scale if by_samples else self.scale
        return (found or 0.0) / (self.samples if by_samples else sites)


def _joined(vectors: list[Tensor], weight: float) -> npt.NDArray[np.float64]:
    if not vectors:
        return np.zeros(0)
    flat = torch.cat([v.detach().cpu().double().reshape(-1) for v in vectors])
    return (flat * weight).numpy()


# -- a site's part ----------------------------------------------------------------------------------------------------


def with_share(part: Part, width: int) -> Part:
    """A site's part with the share of the range that it needs."""
    vector, scalars = part
    return vector, np.append(np.asarray(scalars, np.float64).reshape(-1), needed(vector, scalars, width))


def of_introduction(said: Introduction) -> Part:
    """Samples and constants."""
    samples = float(said.samples or 0)
    values = [samples]
    for constant in (said.smoothness, said.scale):
        known = constant is not None and math.isfinite(constant)
        value = constant if known and constant is not None else 0.0
        values += [float(known), value, samples * value]
    return np.zeros(0), [1.0, 1.0, *values]


def of_round(report: Mapping[str, float], vectors: Vectors, weight: float) -> Part:
    """A decoded reply and its buffers, times the site's weight; the work."""
    sent = [v for k, v in vectors.items() if k.startswith("reply.")]
    return _joined([*sent, vectors["buffers"]], weight), [1.0, weight, report["gradients"], report["proxes"]]


def of_evaluation(report: Mapping[str, float], vectors: Vectors, weight: float, measures: Measures) -> Part:
    """Gradient and loss, times the weight; counts as if all samples had been seen."""
    bad = not math.isfinite(report["loss"])
    counts: list[float] = []
    lost = False
    for part in PARTS:
        samples = vectors.get(f"counts.{part}/samples")
        seen, held = (0.0, 0.0) if samples is None else samples[0].tolist()
        for name, width in widths(vectors, measures).items():
            row = vectors.get(f"counts.{part}/{name}")
            factor = 1.0 if name == "samples" or seen == held else held / seen
            counts += [0.0] * width if row is None else (row[0].double() * factor).tolist()
            lost |= row is None and samples is not None and (part, name) != ("train", "loss")
    scalars = [1.0, weight, float(bad), float(lost), 0.0 if bad else weight * report["loss"], *counts]
    return _joined([vectors["gradient"]], 0.0 if bad else weight), scalars


def of_analysis(told: Vectors) -> Part:
    """The arrays of an answer, one after another; all of them have the long form."""
    return np.zeros(0), np.concatenate([[1.0], *(v.numpy().reshape(-1) for v in told.values())])


def widths(vectors: Mapping[str, Tensor | Form], measures: Measures) -> dict[str, int]:
    """How many counts each metric has, in a fixed order."""
    found = {k.split("/")[1]: v.shape[1] for k, v in vectors.items() if k.startswith("counts.train/")}
    return dict(sorted((found | ({"loss": 2} if measures.loss else {})).items()))


def tensors(numbers: Numbers) -> Vectors:
    """Masked numbers as they travel."""
    wide = torch.frombuffer(bytearray(numbers.wide_bytes()), dtype=torch.uint8)
    return {"words": torch.from_numpy(numbers.words.view(np.int64)), "wide": wide}


def forms(purpose: str, words: int, scalars: int) -> dict[str, Form]:
    """What they must look like."""
    return {
        f"{purpose}.words": Form((words,), torch.int64),
        f"{purpose}.wide": Form((8 * width_of(purpose) * (scalars + 1),), torch.uint8),
    }


def width_of(purpose: str) -> int:
    """Words of the wide numbers of a sum."""
    return WIDEST if purpose == ANALYSIS else WIDE


def numbers_of(purpose: str, vectors: Vectors) -> Numbers:
    """Masked numbers that have arrived."""
    words = vectors[f"{purpose}.words"].numpy().view(np.uint64)
    return Numbers(words, Numbers.read_wide(vectors[f"{purpose}.wide"].numpy().tobytes(), width_of(purpose)))


# -- the sum ----------------------------------------------------------------------------------------------------------


def checked(total: Numbers, parties: int) -> list[float]:
    """The scalars of a sum that is open; an error if it is not."""
    *scalars, share = total.scalars().tolist()
    if scalars[0] != parties:
        raise MaskError("the masks of a secure sum do not cancel; it is thrown away")
    if not 0 <= share <= 1:
        raise MaskError(f"the numbers of {parties} sites are together beyond the range of a secure sum; change units")
    return list(scalars)


def analysis_of(total: Numbers, parties: int, like: Mapping[str, Form]) -> Vectors:
    """The sums of an analysis, in the form of its answers."""
    flat, at, found = torch.tensor(checked(total, parties)[1:], dtype=torch.float64), 0, {}
    for name, form in like.items():
        size = math.prod(form.shape)
        found[name], at = flat[at : at + size].reshape(form.shape), at + size
    return found


def moments(total: Numbers, parties: int) -> IntroductionSums:
    """What the introductions come to; constants that some site has not are left out."""
    _, _, samples, *rest = checked(total, parties)
    (known, L, wL), (there, scale, wscale) = rest[:3], rest[3:]
    return IntroductionSums(
        int(samples), *((L, wL) if known == parties else (None, None)),
        *((scale, wscale) if there == parties else (None, None)),
    )  # fmt: skip


class RoundSums(NamedTuple):
    """What a round comes to."""

    mean: Any
    buffers: Tensor
    gradients: int
    proxes: int


def round_of(total: Numbers, parties: int, like: Any, buffers: Tensor) -> RoundSums:
    """The mean reply, in the form of ``like``, and the mean buffers."""
    _, weight, gradients, proxes = checked(total, parties)
    flat, at, fields = torch.from_numpy(total.vector()), 0, []
    for one in like:
        fields.append((flat[at : at + one.numel()] / parties).reshape(one.shape).to(one.dtype))
        at += one.numel()
    mean = (flat[at:] / weight).reshape(buffers.shape).to(buffers.dtype)
    return RoundSums(type(like)(*fields), mean, int(gradients), int(proxes))


def evaluation_of(
    total: Numbers, parties: int, like: Tensor, widths: Mapping[str, int]
) -> tuple[Tensor, Tensor, Counts]:
    """Mean loss (infinite if a site's is), mean gradient, and counts in one row."""
    _, weight, bad, lost, loss, *rest = checked(total, parties)
    gradient = (torch.from_numpy(total.vector()) / weight).to(like.dtype)
    counts: Counts = {}
    for part in PARTS:
        rows = {}
        for name, width in widths.items():
            rows[name], rest = torch.tensor([rest[:width]], dtype=torch.float64), rest[width:]
        if float(rows["samples"][0, 0]) > 0:
            left = {k: v for k, v in rows.items() if k == "samples" or not lost}
            counts |= {f"{part}/{k}": v for k, v in left.items() if (part, k) != ("train", "loss")}
    return torch.tensor(math.inf if bad else loss / weight, dtype=torch.float64), gradient, counts
