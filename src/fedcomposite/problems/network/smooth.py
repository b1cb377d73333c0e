"""The functions of clients that train a network."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Literal, NoReturn, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from fedcomposite import rng
from fedcomposite.data.mapped import MappedRows, in_memory
from fedcomposite.data.silos import DataError, Silos
from fedcomposite.data.sparse import Features, not_sparse
from fedcomposite.problems.base import Evaluation, RoundInputs, Smooth, UnsuitableError
from fedcomposite.problems.measures import Measures
from fedcomposite.problems.network.evaluation import Evaluator, Selection
from fedcomposite.problems.network.flat import COMPILED_LAYERS, FlatModule
from fedcomposite.problems.network.gradients import Gradients
from fedcomposite.problems.network.options import ModelLoss, NetworkOptions
from fedcomposite.problems.network.samples import Held, Window


class Network(Smooth):
    """f_i(x) = (1/m_i) sum_j phi(model(x; a_ij), b_ij)."""

    def __init__(
        self,
        silos: Silos,
        module: nn.Module,
        loss: ModelLoss,
        options: NetworkOptions,
        *,
        weights: npt.NDArray[np.float64],
        dtype: torch.dtype,
        device: torch.device,
        measures: Measures | None = None,
    ) -> None:
        loss = loss.placed(dtype, device)
        self.loss, self.options, self.dtype, self.device = loss, options, dtype, device
        self.measures = Measures.of(loss, clients=True) if measures is None else measures
        self.flat = FlatModule(module, options, dtype, device)
        self.layout, self.dimension = self.flat.layout, self.flat.dimension
        self._local: RoundInputs | None = None
        self._silos, self._weights = silos, weights
        self._widest = 0
        self.X, self.b = self._placed(not_sparse(silos.features, "a model"), silos.targets)
        self.sizes = silos.sizes.astype(np.uint64)
        self.offsets = np.asarray(silos.offsets[:-1], np.uint64)
        self.ids = np.asarray(silos.ids, np.uint64)
        self._samples: Held | Window
        if isinstance(self.X, MappedRows):
            self._samples = Window(self.X, self.b.cpu(), dtype, device)
        else:
            self._samples = Held(self.X, self.b)
        self.gradients = Gradients(self.flat, loss, options, self._samples)
        self._evaluator = Evaluator(self.flat, loss, options, self.measures, self.X, self.b)
        self._chosen = self._select(options.evaluation_samples)
        if self.flat.fits_channels_last and self.flat.convolves:
            self.gradients.try_one_client()

    def _placed(self, features: Tensor | MappedRows, targets: Tensor) -> tuple[Tensor | MappedRows, Tensor]:
        """On the device; samples in a file stay there."""
        X = features
        if isinstance(X, Tensor):
            X = X.to(self.device, self.dtype if X.is_floating_point() else None)
        b = self.loss.prepare(targets, self._outputs(X))
        return X, b.to(self.device, self.dtype) if b.is_floating_point() else b.to(self.device)

    def _select(self, most: int | None) -> Selection:
        chosen = Selection.of(self._silos, self._weights, most, self.dtype, self.device)
        for part, (X, b, rows) in chosen.held.items():
            chosen.held[part] = *self._placed(X, b), rows
        return chosen

    def _outputs(self, X: Tensor | MappedRows) -> int:
        """Width of the module's output."""
        first, state = in_memory(X[:2]).to(self.device), self.flat.state(self.start(), self.buffers())
        inputs = self.options.inputs(first, self.dtype)
        with torch.no_grad(), self.flat.watched(lambda v: self._note(v.numel() // len(first))):
            try:
                made = self.flat.forward(state, inputs, train=False)
            except RuntimeError:  # a view of what has channels last in memory, perhaps
                if not self.flat.restore_layout():
                    raise
                made = self.flat.forward(state, inputs, train=False)
        return int(made.shape[1 if self.loss.classes_second else -1])

    def _note(self, width: int) -> None:
        """Remember the most numbers that a layer makes of a sample, or is given of it."""
        self._widest = max(self._widest, width)

    def reach(self, rows: int, clients: int) -> int:
        """The values between two layers, or all parameters: an MLP's products have many terms and few numbers."""
        return clients * max(rows * self._widest, self.dimension)

    def start(self) -> Tensor:
        """The module's own parameters, flattened."""
        return self.flat.start()

    def buffers(self) -> Tensor:
        """The module's own persistent buffers, flattened."""
        return self.flat.buffers()

    def state(self, x: Tensor) -> dict[str, Tensor]:
        """The module's tensors by name, with the parameters x and the buffers of now."""
        return self.flat.state(x, self._statistics)

    # -- gradients ----------------------------------------------------------------------------------------------------

    def during(self, local: RoundInputs) -> Self:
        """The same functions with the clients' buffers and counters."""
        view = copy.copy(self)
        view._local = local
        return view

    def ready(self, compile: bool) -> Self:
        """Refuse what cannot be recorded; compile the vectorised gradient if asked."""
        if not self.gradients.determined:
            raise UnsuitableError("random layers or augmentation draw from torch's generator in every step")
        way = self.gradients.mode(max(2, len(self.sizes)), 2)
        if way == "loop":
            raise UnsuitableError("the model's gradients are computed one client at a time")
        self.flat.module.train(True)
        mapped = isinstance(self._samples, Window)
        deep = self.flat.layers > COMPILED_LAYERS
        compile = compile and not (mapped or way == "streams" or self.gradients.counted or deep)
        if not (compile or mapped):
            return self
        view = copy.copy(self)  # the problem's other runs go on without compiled passes, and with a window of their own
        view.gradients = self.gradients.for_recording(compile)
        view._samples = view.gradients.samples
        return view

    @property
    def rows_on(self) -> torch.device:
        """The host, where samples are read from a file."""
        return self._samples.rows_on

    def expect(self, rows: Tensor, after: Callable[[], Tensor] | None = None) -> None:
        self._samples.expect(rows, after)

    def stage(self, rows: Tensor) -> Tensor:
        """Bring samples that are in a file."""
        return self._samples.stage(rows)

    def minibatch(self, x: Tensor, rows: Tensor) -> Tensor:
        """Gradients on the given rows, in training mode."""
        return self.gradients.minibatch(x, rows, self._state_of(np.arange(len(rows), dtype=np.uint64)))

    def full(self, clients: rng.Ints) -> Callable[[Tensor], Tensor]:
        """Gradients on all samples, in training mode."""
        sizes, first = self.sizes[clients].astype(np.int64), self.offsets[clients].astype(np.int64)
        return lambda x: self.gradients.full(x, sizes, first, self._state_of(clients))

    def check_private(self) -> None:
        """Refuse layers through which samples change each other's gradients, and random ones."""
        flat = self.flat
        if flat.batch_norm or self.buffers().numel():
            raise ValueError("privacy: batch norm mixes the samples of a batch; use group norm, or none")
        if flat.random or self.options.augment is not None:
            raise ValueError("privacy: random layers and augmentation have no clipped gradients; leave them out")

    def check_batches(self, size: int | None, silos: Silos) -> None:
        """Refuse batches of one sample where a batch norm finds a single value per channel in it."""
        alone = np.flatnonzero(silos.sizes == 1)
        if not self.flat.batch_norm or not (size == 1 or len(alone)):
            return
        first = in_memory(not_sparse(silos.features, "a model")[:1]).to(self.device)
        if (layer := self.flat.starved(self.options.inputs(first, self.dtype))) is None:
            return
        what = f"{layer} of the model cannot take the variance of a batch of one sample"
        if len(alone):
            more = f" and {len(alone) - 1} more have" if len(alone) > 1 else " has"
            where = f"{silos.names[alone[0]]!r}{more} no more than one"
            raise DataError(f"{what}, and {where}; leave such silos out, join them with others, or use nn.GroupNorm")
        raise DataError(f"{what}: batch_size = 1; take 2 or more, or use nn.GroupNorm")

    def clipped(self, x: Tensor, rows: Tensor, mask: Tensor, clip: float) -> Tensor:
        return self.gradients.clipped(x, rows, mask, clip)

    def clipped_losses(self, x: Tensor, rows: Tensor, mask: Tensor, clip: float) -> Tensor:
        """Values in evaluation mode, cut off at ``clip``."""
        each = zip(x, rows, mask, strict=True)
        sums = [w @ self.loss.of_rows(self.predict(one, self.X[r]), self.b[r]).clamp(-clip, clip) for one, r, w in each]
        return torch.stack(sums).unsqueeze(1)

    def seen(self, x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The module's outputs, and class numbers or targets."""
        return self.loss.shown(self.predict(x, self.X[rows])), self.b[rows]

    def _state_of(self, clients: rng.Ints) -> RoundInputs:
        """The round's state, or a fresh one outside rounds."""
        return self._local or RoundInputs(self.buffers().repeat(len(clients), 1), clients)

    # -- evaluation ---------------------------------------------------------------------------------------------------

    @property
    def _statistics(self) -> Tensor:
        return self.buffers() if self._local is None else self._local.buffers[0]

    def predict(self, x: Tensor, features: Tensor | MappedRows) -> Tensor:
        """The module's outputs for some samples, in evaluation mode."""
        return self._evaluator.predict(x, self._statistics, features)

    def measured_on(self, samples: int | None) -> Self:
        """The same functions, evaluated on so many training samples spread over the clients, or on all."""
        if samples is not None and (isinstance(samples, bool) or not isinstance(samples, int) or samples < 1):
            raise ValueError(f"evaluation_samples = {samples!r}, must be an integer >= 1, or None for all")
        view = copy.copy(self)
        view._chosen = self._select(samples)
        return view

    def evaluate(self, x: Tensor) -> Evaluation:
        """Loss, gradient and counts in evaluation mode, on ``evaluation_samples`` spread evenly over the clients."""
        return self._evaluator.evaluate(x, self._statistics, self._chosen)

    def scored(
        self, x: Tensor, features: Features, targets: Tensor, offset: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The module's outputs, and class numbers or targets."""
        outputs = self.predict(x, not_sparse(features, "a model"))
        b = self.loss.prepare(targets, outputs.shape[1 if self.loss.classes_second else -1])
        return self.loss.shown(outputs), b.to(self.device, self.dtype if b.is_floating_point() else None)

    def smoothness(self, of: Literal["clients", "mean", "samples"] = "clients") -> NoReturn:
        """Refused: a network's smoothness constant is unknown."""
        raise ValueError(
            "a network's smoothness constant is unknown: give the steps yourself, for example step = 0.01 to 0.1, "
            "and halve them if the run diverges"
        )
