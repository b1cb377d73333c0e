"""Problems with a linear model, and problems with a network."""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn

from fedcomposite.data.arrays import as_tensor
from fedcomposite.data.faults import DataError
from fedcomposite.data.sparse import is_sparse, sparse_rows
from fedcomposite.problems.base import Slot, Smooth
from fedcomposite.problems.linear import Linear
from fedcomposite.problems.loss import Loss
from fedcomposite.problems.losses import get_loss
from fedcomposite.problems.measures import Measures
from fedcomposite.problems.metrics import Metric
from fedcomposite.problems.network import LossFunction, ModelLoss, Network, NetworkOptions, layout, model_loss
from fedcomposite.problems.problem import Problem

NETWORK_STEP = 0.1
"""The step at which a network's stationarity is measured, since its smoothness constant is unknown."""


@final
class LinearProblem(Problem):
    """A problem with a linear model; :class:`Problem` documents the parameters."""

    loss: Loss

    def _set_up(
        self, loss: str | Loss | LossFunction | None, options: Mapping[str, Any] | None, metrics: Sequence[str | Metric]
    ) -> None:
        if self.model is not None:
            raise ValueError("a LinearProblem takes no model; Problem(..., model=...) is a NetworkProblem")
        if self.silos.targets.ndim > 1:
            shape = tuple(self.silos.targets.shape)
            raise DataError(f"targets have shape {shape}, expected ({shape[0]},): a linear model has one per sample")
        if self.options != NetworkOptions():
            given = {k: v for k, v in vars(self.options).items() if v != getattr(NetworkOptions(), k)}
            raise ValueError(f"{', '.join(given)}: only for a problem with a model")
        if loss is not None and not isinstance(loss, str | Loss):
            raise ValueError(f"loss = {loss!r}: a function of outputs and targets needs a model")
        self.loss = get_loss("logistic" if loss is None else loss, options)
        self.measures = Measures.of(self.loss.adapt(self.silos), metrics)
        linear = self._linear()
        inner = linear.dimension - linear.bias_coordinates
        shape = (inner,) if linear.outputs == 1 else (inner // linear.outputs, linear.outputs)
        weight = Slot("weight", 0, inner, shape)
        bias = Slot("bias", inner, linear.dimension, (linear.outputs,))
        self.layout = (weight, bias) if self.bias else (weight,)

    def _place(self, dtype: torch.dtype, device: torch.device) -> Smooth:
        return Linear(
            self.silos,
            self.loss,
            bias=self.bias,
            weights=self.weights,
            dtype=dtype,
            device=device,
            measures=self.measures,
        )

    def _linear(self) -> Linear:
        smooth = self.smooth()
        assert isinstance(smooth, Linear)
        return smooth

    def _regularized(self) -> tuple[str, ...]:
        return ("weight",)

    def _curvature(self) -> float:
        return self.smoothness("mean") if math.isfinite(self.loss.curvature) else self._linear().scale("mean")

    def __repr__(self) -> str:
        return f"Problem({self.silos}, {type(self.loss).__name__}, {self.regularizer})"

    @property
    def coordinate_names(self) -> tuple[str, ...]:
        """A name per coordinate of x: its feature's, or ``(intercept)``."""
        features = self.silos.feature_names or tuple(f"x{j}" for j in range(self.silos.features.shape[1]))
        return self._linear().coordinate_names(features)

    def predict(self, x: Any, features: Any, buffers: Tensor | None = None) -> Tensor:
        """Margins a'x (+ intercept) of some samples, dense or sparse, without offsets."""
        point, _ = self._at(x, buffers)
        state = {s.name: point[s.start : s.stop].view(s.shape) for s in self.layout}
        if is_sparse(features):
            margins = sparse_rows(features, "features") @ state["weight"]
        else:
            if not isinstance(features, Tensor):
                features = np.require(features, requirements="W")  # tables of pandas are read-only
            margins = self._samples(features).to(point) @ state["weight"]
        return margins + (state["bias"] if margins.ndim == 2 else state["bias"][0]) if self.bias else margins

    def _samples(self, features: Any) -> Tensor:
        found, wanted = as_tensor(features, "features"), self.silos.features.shape[1]
        if found.ndim == 0 or found.shape[-1] != wanted:
            raise ValueError(f"features have shape {tuple(found.shape)}; the model takes samples of {wanted} features")
        return found


@final
class NetworkProblem(Problem):
    """A problem with a network; :class:`Problem` documents the parameters."""

    loss: ModelLoss

    def _set_up(
        self, loss: str | Loss | LossFunction | None, options: Mapping[str, Any] | None, metrics: Sequence[str | Metric]
    ) -> None:
        if self.bias or options:
            raise ValueError("bias and loss_options are for linear models; build them into the model and its loss")
        if self.silos.weights is not None:
            raise ValueError("weights of samples are for linear models; a model's loss can weigh its classes")
        if self.silos.margin_offsets is not None:
            raise ValueError("margin offsets are for linear models; a module can add an input to its outputs")
        if isinstance(loss, Loss):
            raise ValueError(f"{loss} is for linear models; with a model use 'cross_entropy', 'mse' or a function")
        self.layout = layout(self._module)
        self.loss = model_loss("cross_entropy" if loss is None else loss, self._module, self.silos, self.options)
        self.measures = Measures.of(self.loss, metrics, clients=True)

    @property
    def _module(self) -> nn.Module:
        if self.model is None:
            raise ValueError("a NetworkProblem needs a model; Problem(...) without one is a LinearProblem")
        return self.model

    def _place(self, dtype: torch.dtype, device: torch.device) -> Smooth:
        return Network(
            self.silos,
            self._module,
            self.loss,
            self.options,
            weights=self.weights,
            dtype=dtype,
            device=device,
            measures=self.measures,
        )

    def _regularized(self) -> tuple[str, ...]:
        return tuple(s.name for s in self.layout if len(s.shape) >= 2)

    def _curvature(self) -> float:
        return 1 / NETWORK_STEP

    def __repr__(self) -> str:
        return f"Problem({self.silos}, {type(self.model).__name__}, {self.loss}, {self.regularizer})"

    @property
    def coordinate_names(self) -> tuple[str, ...]:
        """A name per coordinate of x: its tensor's, and its place there."""
        return tuple(f"{s.name}[{','.join(map(str, at))}]" for s in self.layout for at in np.ndindex(s.shape))

    @property
    def described(self) -> str:
        """The model, its options and a digest of its tensors, for telling runs apart."""
        digest = hashlib.sha256()
        for tensor in self._module.state_dict().values():
            digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return f"{self.model} {self.layout} {self.options} {digest.hexdigest()}"

    def module(self, x: Any, buffers: Tensor | None = None) -> nn.Module:
        """A copy of the model with the parameters x, in evaluation mode, on x's device and in its dtype."""
        point, network = self._network(x, buffers)
        made = copy.deepcopy(self._module).to(point.device, point.dtype)
        made.load_state_dict({k: v.detach() for k, v in network.state(point).items()}, strict=False)
        return made.eval()

    def predict(self, x: Any, features: Any, buffers: Tensor | None = None) -> Tensor:
        """The module's outputs for some samples, in evaluation mode."""
        point, network = self._network(x, buffers)
        return network.predict(point, torch.as_tensor(features))

    def _network(self, x: Any, buffers: Tensor | None) -> tuple[Tensor, Network]:
        point, smooth = self._at(x, buffers)
        assert isinstance(smooth, Network)
        return point, smooth
