"""Loss, gradient and counts of a network in evaluation mode, on samples spread evenly over the clients."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedcomposite.data.mapped import MappedRows, in_memory
from fedcomposite.data.silos import Silos
from fedcomposite.data.sparse import not_sparse
from fedcomposite.problems.base import Evaluation
from fedcomposite.problems.measures import CountRows, Counts, MeanLoss, Measures, Part
from fedcomposite.problems.network.flat import FlatModule
from fedcomposite.problems.network.options import ModelLoss, NetworkOptions

_PASS = 512  # samples that one pass of an evaluation takes,
_NUMBERS = 2**22  # and more on a GPU, which waits for the next pass otherwise: so many numbers of samples


def spread(size: int, count: int) -> npt.NDArray[np.int64]:
    """``count`` different numbers below ``size``, evenly spaced."""
    return ((2 * np.arange(count) + 1) * size) // (2 * count)


@dataclass(frozen=True)
class Selection:
    """The samples that an evaluation looks at."""

    rows: Tensor  # of the training samples, one client after another
    of_clients: list[int]  # how many of each
    weights: Tensor  # of these samples in f
    train: CountRows
    held: dict[Part, tuple[Tensor | MappedRows, Tensor, CountRows]]  # features, targets, as they are stored

    @classmethod
    def of(
        cls, silos: Silos, weights: npt.NDArray[np.float64], most: int | None, dtype: torch.dtype, device: torch.device
    ) -> Selection:
        """``most`` samples spread over the clients, at least one of each, and ``most`` of each held-out part."""
        counts = silos.sizes if most is None else np.minimum(silos.sizes, -(-most // len(silos)))
        each = [spread(m, c) for m, c in zip(silos.sizes.tolist(), counts.tolist(), strict=True)]
        rows = np.concatenate([o + s for o, s in zip(silos.offsets[:-1], each, strict=True)])
        held: dict[Part, tuple[Tensor | MappedRows, Tensor, CountRows]] = {}
        for part, (features, targets) in silos.held_out.items():
            count = min(most or len(targets), len(targets))
            seen = torch.from_numpy(spread(len(targets), count))
            held[part] = (
                not_sparse(features, "a model")[seen],
                targets[seen],
                CountRows.of([count], [len(targets)], device),
            )
        return cls(
            torch.from_numpy(rows),
            counts.tolist(),
            torch.from_numpy(np.repeat(weights / counts, counts)).to(device, dtype),
            CountRows.of(counts.tolist(), silos.sizes.tolist(), device),
            held,
        )


class Evaluator:
    """Evaluations of a module on the samples X with targets b, pass by pass."""

    def __init__(
        self,
        flat: FlatModule,
        loss: ModelLoss,
        options: NetworkOptions,
        measures: Measures,
        X: Tensor | MappedRows,
        b: Tensor,
    ) -> None:
        self.flat, self.loss, self.options, self.measures, self.X, self.b = flat, loss, options, measures, X, b

    def predict(self, x: Tensor, buffers: Tensor, features: Tensor | MappedRows) -> Tensor:
        """The module's outputs for some samples."""
        size = self._pass
        with torch.no_grad():
            state = self.flat.state(x, buffers)
            parts = [
                self.flat.forward(state, self.options.inputs(raw.to(self.flat.device), self.flat.dtype), train=False)
                for raw in (in_memory(features[a : a + size]) for a in range(0, len(features), size))
            ]
        return torch.cat(parts)

    def evaluate(self, x: Tensor, buffers: Tensor, chosen: Selection) -> Evaluation:
        """Loss, gradient and counts on the chosen samples."""
        leaf, loss, gradient = x.detach().requires_grad_(), x.new_zeros(()), torch.zeros_like(x)
        passed: list[Tensor] = []
        at = 0
        for rows in self._passes(chosen):
            seen = rows.to(self.flat.device)
            with (
                torch.enable_grad(),
                self.flat.differentiable(),
                self.flat.holding(self.flat.state(leaf, buffers), train=False) as module,
            ):
                raw = self.X[seen] if isinstance(self.X, Tensor) else self.X[rows].read().to(self.flat.device)
                outputs = module(self.options.inputs(raw, self.flat.dtype))
                values = self.loss.function(outputs, self.b[seen])
                weight = chosen.weights[at : at + len(rows)]
                part = values @ weight if self.loss.per_sample else values * weight.sum()
                gradient += torch.autograd.grad(part, leaf)[0]
            loss = loss + part.detach()
            passed.append(self.loss.shown(outputs.detach()))
            at += len(rows)
        counts = self.measures.count("train", torch.cat(passed), self.b[chosen.rows.to(self.flat.device)], chosen.train)
        for name, (X, b, held) in chosen.held.items():
            counts |= self._held_out(name, self.predict(x, buffers, X), b, held)
        return Evaluation(loss, gradient, counts, self.measures)

    def _passes(self, chosen: Selection) -> Iterator[Tensor]:
        """The evaluated rows; a mean loss must not mix clients."""
        for rows in [chosen.rows] if self.loss.per_sample else chosen.rows.split_with_sizes(chosen.of_clients):
            yield from (rows[a : a + self._pass] for a in range(0, len(rows), self._pass))

    @property
    def _pass(self) -> int:
        """Samples of one pass."""
        width = self.X[:1].numel() if isinstance(self.X, Tensor) else _NUMBERS
        return max(_PASS, _NUMBERS // max(1, width)) if self.flat.device.type == "cuda" else _PASS

    def _held_out(self, part: Part, outputs: Tensor, b: Tensor, rows: CountRows) -> Counts:
        counts = self.measures.count(part, self.loss.shown(outputs), b, rows)
        if self.measures.loss:
            counts[f"{part}/loss"] = MeanLoss().counts(self.loss.of_rows(outputs, b), b, rows.owner, 1)
        return counts
