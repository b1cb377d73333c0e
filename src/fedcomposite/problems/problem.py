"""The problem: silos, a loss or a model, and a regularizer."""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from torch import Tensor, nn

from fedcomposite.data.silos import Silos
from fedcomposite.problems.base import Evaluation, Local, Slot, Smooth, measuring_step
from fedcomposite.problems.linear import Linear
from fedcomposite.problems.losses import Loss, get_loss
from fedcomposite.problems.measures import Measures, Part
from fedcomposite.problems.metrics import Metric
from fedcomposite.problems.network import LossFunction, ModelLoss, Network, NetworkOptions, layout, model_loss
from fedcomposite.regularizers import On, Regularizer, Zero
from fedcomposite.regularizers.algebra import Blocks, Named

Weights = Literal["uniform", "samples"]

NETWORK_STEP = 0.1
"""The step at which a network's stationarity is measured, since its smoothness constant is unknown."""


class Problem:
    """minimise over x  F(x) = sum_i w_i f_i(x) + h(x).

    Parameters
    ----------
    silos : Silos
        The clients' data.
    loss : str or Loss or callable
        A name of :data:`fedcomposite.problems.LOSSES`, for example ``"logistic"``, ``"least_squares"``, ``"huber"``;
        or a :class:`Loss`. With a model: ``"cross_entropy"``, ``"mse"`` or a function of (outputs, targets) that
        gives a value per sample, or their mean. ``"logistic"`` if left out, ``"cross_entropy"`` with a model.
    loss_options : mapping, optional
        Options of a loss given by name: ``loss="huber", loss_options={"delta": 1.0}``.
    regularizer : Regularizer
        The term h; zero if left out. Of a model it acts on the weights, the parameters with two axes or more, and
        leaves biases and normalisation layers alone; ``h.on("*.weight")`` chooses by name.
    bias : bool
        Add an intercept as the last coordinate (one per class as the last ones); h does not act on it.
    weights : {"uniform", "samples"}
        w_i = 1/n (the papers' objective), or proportional to the clients' sample counts (the pooled objective).
    model : torch.nn.Module, optional
        A network instead of a linear model; x is its trainable parameters, flattened in their order (:attr:`layout`),
        and its own values are the start. It is copied, never modified.
    gradients : {"auto", "vmap", "loop"}
        How a model's gradients are computed for all clients: vectorised, client by client, or by a rule on the module
        and the shapes (:mod:`fedcomposite.problems.network`).
    chunk : int, optional
        Clients that are vectorised together, to bound memory; chosen from the sizes if left out.
    normalization : (mean, std), optional
        Numbers, or one per channel, subtracted from and dividing the inputs, batch by batch. Samples stored as
        bytes (uint8) are first brought to [0, 1].
    transform : callable, optional
        Applied to every batch of inputs after that, in training and evaluation.
    augment : callable, optional
        Applied to a client's batches in training only; it may draw from torch's generator, which is seeded
        by (seed, client, round, k).
    precision : {"full", "bf16"}
        bfloat16 autocast of a model on a GPU; a CPU ignores it.
    evaluation_samples : int, optional
        Training samples, spread evenly over the clients (at least one each), on which a model's loss, gradient and
        accuracy are measured, and the most test samples; None takes all. A record says how many it used.
    metrics : list of str or Metric
        What is measured beside the loss and, for classifiers, accuracy: names of
        :data:`fedcomposite.metrics.METRICS`, for example ``["auc", "log_loss"]``, or metrics of your own
        (:class:`fedcomposite.metrics.Metric`).

    Examples
    --------
    >>> import fedcomposite as fc
    >>> silos = fc.data.load("synthetic", clients=3, features=4, samples=10)
    >>> problem = fc.Problem(silos, loss="logistic", regularizer=fc.regularizers.L1(0.01))
    >>> round(problem.objective(torch.zeros(4)), 4)
    0.6931
    """

    def __init__(
        self,
        silos: Silos,
        *,
        loss: str | Loss | LossFunction | None = None,
        loss_options: Mapping[str, Any] | None = None,
        regularizer: Regularizer | None = None,
        bias: bool = False,
        weights: Weights = "uniform",
        model: nn.Module | None = None,
        gradients: Literal["auto", "vmap", "loop"] = "auto",
        chunk: int | None = None,
        normalization: tuple[Any, Any] | None = None,
        transform: Callable[[Tensor], Tensor] | None = None,
        augment: Callable[[Tensor], Tensor] | None = None,
        precision: Literal["full", "bf16"] = "full",
        evaluation_samples: int | None = 2000,
        metrics: Sequence[str | Metric] = (),
    ) -> None:
        if weights not in ("uniform", "samples"):
            raise ValueError(f"weights = {weights!r}, must be 'uniform' or 'samples'")
        self.silos, self.bias, self.weighting = silos, bias, weights
        self._placed: dict[tuple[torch.dtype, torch.device], Linear | Network] = {}
        self._smoothness: dict[str, float] = {}
        self.options = NetworkOptions(
            gradients, chunk, normalization, transform, augment, precision, evaluation_samples
        )
        self.model = None if model is None else copy.deepcopy(model)
        self.loss: Loss | ModelLoss
        if self.model is not None:
            if bias or loss_options:
                raise ValueError("bias and loss_options are for linear models; build them into the model and its loss")
            if isinstance(loss, Loss):
                raise ValueError(f"{loss} is for linear models; with a model use 'cross_entropy', 'mse' or a function")
            self.layout = layout(self.model)
            self.loss = model_loss("cross_entropy" if loss is None else loss, self.model, silos, self.options)
            self.measures = Measures.of(self.loss, metrics, clients=True)
        else:
            if self.options != NetworkOptions():
                given = {k: v for k, v in vars(self.options).items() if v != getattr(NetworkOptions(), k)}
                raise ValueError(f"{', '.join(given)}: only for a problem with a model")
            if loss is not None and not isinstance(loss, str | Loss):
                raise ValueError(f"loss = {loss!r}: a function of outputs and targets needs a model")
            self.loss = get_loss("logistic" if loss is None else loss, loss_options)
            self.measures = Measures.of(self.loss.adapt(silos), metrics)
            self.layout = self._linear_layout()
        self.dimension = self.layout[-1].stop
        self.regularizer: Regularizer = self._restricted(regularizer or Zero())

    def _linear_layout(self) -> tuple[Slot, ...]:
        smooth = self._linear()
        inner = smooth.dimension - smooth.bias_coordinates
        shape = (inner,) if smooth.outputs == 1 else (inner // smooth.outputs, smooth.outputs)
        weight = Slot("weight", 0, inner, shape)
        return (weight, Slot("bias", inner, smooth.dimension, (smooth.outputs,))) if self.bias else (weight,)

    def _restricted(self, h: Regularizer) -> Regularizer:
        """H on its coordinates: where it was set, or away from intercepts, biases and normalisation layers."""
        if isinstance(h, Zero | On | Named | Blocks):
            return h.resolve(self.layout)
        if self.model is None and not self.bias:
            shape = self.layout[0].shape
            return h.for_shape(shape) if len(shape) == 2 else h
        weights = tuple(
            s.name for s in self.layout if (s.name == "weight" if self.model is None else len(s.shape) >= 2)
        )
        if not weights:
            raise ValueError(f"{h} would act on parameters with two axes or more; this model has none: say h.on('*')")
        return Named(h, weights).resolve(self.layout)

    def __repr__(self) -> str:
        linear = isinstance(self.loss, Loss)
        what = type(self.loss).__name__ if linear else f"{type(self.model).__name__}, {self.loss}"
        return f"Problem({self.silos}, {what}, {self.regularizer})"

    @property
    def weights(self) -> npt.NDArray[np.float64]:
        """The clients' weights w_i, which sum to 1."""
        n = len(self.silos)
        return self.silos.sizes / self.silos.sizes.sum() if self.weighting == "samples" else np.full(n, 1 / n)

    @property
    def coordinate_names(self) -> tuple[str, ...]:
        """A name per coordinate of x."""
        if self.model is not None:
            return tuple(f"{s.name}[{','.join(map(str, at))}]" for s in self.layout for at in np.ndindex(s.shape))
        features = self.silos.feature_names or tuple(f"x{j}" for j in range(self.silos.features.shape[1]))
        return self._linear().coordinate_names(features)

    @property
    def described(self) -> str:
        """The model, its options and a digest of its tensors, for telling runs apart; empty for linear models."""
        if self.model is None:
            return ""
        digest = hashlib.sha256()
        for tensor in self.model.state_dict().values():
            digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return f"{self.model} {self.layout} {self.options} {digest.hexdigest()}"

    def smooth(self, dtype: torch.dtype = torch.float64, device: str | torch.device = "cpu") -> Smooth:
        """The smooth part, placed on a device in a dtype (kept for the next call)."""
        place = dtype, torch.device(device)
        if place not in self._placed:
            if isinstance(self.loss, Loss):
                self._placed[place] = Linear(
                    self.silos,
                    self.loss,
                    bias=self.bias,
                    weights=self.weights,
                    dtype=dtype,
                    device=place[1],
                    measures=self.measures,
                )
            else:
                assert self.model is not None
                self._placed[place] = Network(
                    self.silos,
                    self.model,
                    self.loss,
                    self.options,
                    weights=self.weights,
                    dtype=dtype,
                    device=place[1],
                    measures=self.measures,
                )
        return self._placed[place]

    def _linear(self) -> Linear:
        smooth = self.smooth()
        assert isinstance(smooth, Linear)
        return smooth

    def _network(self, x: Tensor) -> Network:
        smooth = self.smooth(x.dtype, x.device)
        if not isinstance(smooth, Network):
            raise ValueError("this problem has a linear model, not a module")
        return smooth

    def module(self, x: Any, buffers: Tensor | None = None) -> nn.Module:
        """A copy of the model with the parameters x, in evaluation mode, on x's device and in its dtype."""
        point, _ = self._at(x)
        network = self._network(point)
        made = copy.deepcopy(self.model).to(point.device, point.dtype)  # type: ignore[union-attr]
        start = network.buffers() if buffers is None else buffers.to(point)
        made.load_state_dict({k: v.detach() for k, v in network.state(point, start).items()}, strict=False)
        return made.eval()

    def predict(self, x: Any, features: Any, buffers: Tensor | None = None) -> Tensor:
        """Outputs for some samples: margins a'x (+ intercept) of a linear model, a module's outputs otherwise."""
        point, smooth = self._at(x)
        raw = torch.as_tensor(features)
        if isinstance(smooth, Network):
            start = smooth.buffers() if buffers is None else buffers.to(point)
            return smooth.during(Local(start[None])).predict(point, raw)
        state = {s.name: point[s.start : s.stop].view(s.shape) for s in self.layout}
        margins = raw.to(point) @ state["weight"]
        return margins + (state["bias"] if margins.ndim == 2 else state["bias"][0]) if self.bias else margins

    def evaluate(self, x: Any, buffers: Tensor | None = None) -> Evaluation:
        """Loss and gradient of f at x, and metrics; a model's on ``evaluation_samples`` of the data."""
        point, smooth = self._at(x)
        start = smooth.buffers() if buffers is None else buffers.to(point)
        return smooth.during(Local(start[None])).evaluate(point)

    def scores(self, x: Any, buffers: Tensor | None = None) -> pd.DataFrame:
        """The metrics on all samples: one row per silo and one for all of them, a column per part and metric.

        Samples are at hand, so that nothing is binned. A held-out part has rows of silos where it is known whose its
        samples are (:meth:`Silos.split` knows).
        """
        point, smooth = self._at(x)
        smooth = smooth.during(Local((smooth.buffers() if buffers is None else buffers.to(point))[None]))
        silos = self.silos
        everyone = torch.from_numpy(np.repeat(np.arange(len(silos)), silos.sizes))
        parts: list[tuple[Part, tuple[Tensor, Tensor], Tensor | None]]
        parts = [("train", (silos.features, silos.targets), everyone)]
        parts += [(part, pair, silos.held_by.get(part)) for part, pair in silos.held_out.items()]
        table = pd.DataFrame(index=pd.Index([*silos.names, "all"], name="silo"))
        for part, (X, y), owner in parts:
            outputs, targets = (v.cpu() for v in smooth.scored(point, X, y))
            who = torch.full((len(y),), -1) if owner is None else owner
            rows = [torch.nonzero(who == i).flatten() for i in range(len(silos))] + [torch.arange(len(y))]
            table[f"{part}_samples"] = [len(r) for r in rows]
            for metric in self.measures.metrics:
                table[f"{part}_{metric.name}"] = [
                    metric.exact(outputs[r], targets[r]) if len(r) else math.nan for r in rows
                ]
        return table

    def layers(self, x: Any) -> pd.DataFrame:
        """One row per parameter tensor: shape, size, exact zeros, their share, and the Hoyer measure.

        Hoyer's measure (sqrt(n) - ||v||_1/||v||) / (sqrt(n) - 1) is 1 for a single nonzero and 0 for equal magnitudes.
        """
        point = torch.as_tensor(x).detach().double().cpu()
        rows = []
        for slot in self.layout:
            v = point[slot.start : slot.stop]
            zeros, size, norm = int((v == 0).sum()), len(v), float(v.norm())
            hoyer = (size**0.5 - float(v.abs().sum()) / norm) / (size**0.5 - 1) if size > 1 and norm > 0 else 1.0
            rows.append((slot.name, slot.shape, size, zeros, zeros / size, hoyer))
        return pd.DataFrame(rows, columns=["name", "shape", "size", "zeros", "sparsity", "hoyer"])

    def _at(self, x: Any) -> tuple[Tensor, Smooth]:
        point = torch.as_tensor(x)
        if not point.is_floating_point():
            point = point.double()
        if point.shape != (self.dimension,):
            raise ValueError(f"x has shape {tuple(point.shape)}, expected ({self.dimension},)")
        return point, self.smooth(point.dtype, point.device)

    def objective(self, x: Any) -> float:
        """F(x)."""
        point, smooth = self._at(x)
        return float(smooth.evaluate(point).loss + self.regularizer.value(point))

    def gradient(self, x: Any) -> Tensor:
        """The gradient of the smooth part f at x."""
        point, smooth = self._at(x)
        return smooth.evaluate(point).gradient

    def stationarity(self, x: Any, step: float | None = None) -> float:
        """||x - P_step(x - step grad f(x))|| / step: zero exactly at stationary points.

        The default step is :meth:`default_step`.
        """
        point, smooth = self._at(x)
        step = self.default_step() if step is None else step
        return float(prox_gradient_norm(point, smooth.evaluate(point).gradient, self.regularizer, step))

    def optimality(self, x: Any) -> float:
        """Distance from -grad f(x) to the subdifferential of h at x."""
        point, smooth = self._at(x)
        return float(self.regularizer.optimality(point, smooth.evaluate(point).gradient))

    def smoothness(self, of: Literal["clients", "mean"] = "clients") -> float:
        """Smoothness constant L: the largest over the clients, or that of the mean loss (``of="mean"``)."""
        if of not in self._smoothness:
            self._smoothness[of] = self.smooth().smoothness(of)
        return self._smoothness[of]

    def default_step(self) -> float:
        """1/L of the mean loss, and at most half of 1/rho: the step at which stationarity is measured.

        A loss without smoothness constant (hinge, absolute, quantile, poisson) is measured as if its curvature were 1,
        a network at the fixed step :data:`NETWORK_STEP`.
        """
        rho = self.regularizer.rho
        if isinstance(self.loss, ModelLoss):
            L = 1 / NETWORK_STEP
        else:
            L = self.smoothness("mean") if math.isfinite(self.loss.curvature) else self._linear().scale("mean")
        return measuring_step(L, rho)


def prox_gradient_norm(x: Tensor, gradient: Tensor, h: Regularizer, step: float) -> Tensor:
    """||G_step(x)||, the norm of the prox-gradient mapping."""
    moved: Tensor = torch.linalg.vector_norm(x - h.prox(x - step * gradient, step), dim=-1)
    return moved / step
