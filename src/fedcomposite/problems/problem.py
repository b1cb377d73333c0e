"""The problem: silos, a loss or a model, and a regularizer."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import EllipsisType
from typing import Any, Literal, Self, cast, final, get_args

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from torch import Tensor, nn

from fedcomposite._validation import as_vector, buffers_of, suggest
from fedcomposite.data.arrays import as_tensor
from fedcomposite.data.augmentation import Augmentation
from fedcomposite.data.faults import DataError
from fedcomposite.data.silos import Silos
from fedcomposite.data.sparse import Features, is_sparse, sparse_rows
from fedcomposite.problems.base import Evaluation, RoundInputs, Slot, Smooth, measuring_step
from fedcomposite.problems.linear import Linear
from fedcomposite.problems.losses import Loss, LossFunction, get_loss
from fedcomposite.problems.measures import Measures, Part
from fedcomposite.problems.metrics import Metric
from fedcomposite.problems.network import (
    IGNORED,
    ModelLoss,
    Network,
    NetworkOptions,
    Plain,
    layout,
    model_loss,
    named_loss,
)
from fedcomposite.problems.network.graph import UntraceableError, connected
from fedcomposite.regularizers import REGISTRY, On, Ramped, Regularizer, SparsityTarget, Support, Zero
from fedcomposite.regularizers.algebra import Blocks, Named
from fedcomposite.regularizers.connected import FilterTarget
from fedcomposite.regularizers.factors import Deviations, PenaltyFactor, factored, factors_of, sharing
from fedcomposite.regularizers.target import Structure
from fedcomposite.schedules import Schedule

Weights = Literal["uniform", "samples"]


class OneClassWarning(UserWarning):
    """All training samples of a classifier have the same label."""


class Problem:
    """minimise over x  F(x) = sum_i w_i f_i(x) + h(x).

    The class is chosen by ``model``: a :class:`LinearProblem` without, a :class:`NetworkProblem` with one.

    Parameters
    ----------
    silos : Silos
        The clients' data.
    loss : str or Loss or callable
        A name of :data:`fedcomposite.problems.LOSSES`, for example ``"logistic"``, ``"least_squares"``, ``"huber"``;
        a :class:`Loss`; or a function of (margins, targets) that gives a value per sample, whose derivative is then
        automatic, for first-order methods. With a model: a name of :data:`fedcomposite.problems.MODEL_LOSSES`, for
        example ``"cross_entropy"`` or ``"mse"``, or a function of (outputs, targets) that gives a value per sample, or
        their mean. ``"logistic"`` if left out, ``"cross_entropy"`` with a model.
    loss_options : mapping, optional
        Options of a loss given by name: ``loss="huber", loss_options={"delta": 1.0}``.
    regularizer : Regularizer
        The term h; zero if left out. Of a model it acts on the weights, the parameters with two axes or more, and
        leaves biases and normalisation layers alone; ``h.on("*.weight")`` chooses by name.
    bias : bool
        Add an intercept as the last coordinate (one per class as the last ones); h does not act on it.
    weights : {"uniform", "samples"}
        w_i = 1/n (the papers' objective), or proportional to the clients' sample counts (the pooled objective), or to
        the sums of their samples' weights where the silos have some.
    penalty_factor : mapping or sequence of float, optional
        What the term of each feature is multiplied by, for terms that act on each coordinate by itself: a number per
        feature, or ``{"age": 0.0}`` for some by name (a column's name stands for all features that a recipe made of
        it) or place, 1 for the others. 0 leaves a feature alone. It is not rescaled, as glmnet does.
    deviations : {"l1", "group", "fused"}, optional
        Of silos whose recipe has ``per_site``: how what each site's own coefficients differ by is regularized, beside
        ``regularizer`` on the common ones: each by itself, those of a feature as a group, or so that few of them
        differ, from the common one and from each other (:func:`fedcomposite.regularizers.factors.sharing`).
        ``regularizer`` acts on all alike if left out.
    deviation_ratio : float
        Strength of that, as a share of the regularizer's; a path varies both.
    class_weight : "balanced" or mapping, optional
        What samples of each class count, times what they counted before, as in scikit-learn: by label, 1 for labels
        that are not named; ``"balanced"`` is samples / (classes * samples of the class), over all clients. Measures
        on training samples count them so, too. Of a model it multiplies the cross-entropy of each label, wherever a
        loss is measured.
    model : torch.nn.Module, optional
        A network instead of a linear model; x is its trainable parameters, flattened in their order (:attr:`layout`),
        and its own values are the start. It is copied, never modified.
    gradients : {"auto", "vmap", "loop", "streams"}
        How a model's gradients are computed for all clients: vectorised, client by client, on a GPU's streams, or by
        a rule on the module and the shapes (:mod:`fedcomposite.problems.network`).
    chunk : int, optional
        Clients that are vectorised together, to bound memory; chosen from the sizes if left out.
    microbatch : int, optional
        Samples of a client's batch that one pass of a model takes, to bound memory; gradients add up to the batch's. A
        batch norm sees these samples alone.
    named_inputs : mapping, optional
        Names and shapes of a model's inputs, where it has several: it is called with the pieces of a flat sample by
        name, ``{"input_ids": (16,), "attention_mask": (16,)}``.
    class_axis : {1, -1}, optional
        Where a model's classes are among its outputs, for targets of several labels: second as in torch, (batch,
        classes, d1, ...), or last. Told from the shapes where they allow one of them only.
    normalization : (mean, std), optional
        Numbers, or one per channel, subtracted from and dividing the inputs, batch by batch. Samples stored as
        bytes (uint8) are first brought to [0, 1].
    transform : callable, optional
        Applied to every batch of inputs after that, in training and evaluation.
    augment : Augmentation or callable, optional
        Applied to a client's batches in training only: one of :mod:`fedcomposite.data.augmentation`, or a function
        that may draw from torch's generator, which is seeded by (seed, client, round, k).
    precision : {"full", "bf16"}
        bfloat16 autocast of a model's passes on a GPU. Runs on a CPU refuse it; what is measured there is in full.
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

    silos: Silos
    loss: Loss | ModelLoss
    model: nn.Module | None
    measures: Measures
    """What is measured of models, beside loss and gradient."""
    layout: tuple[Slot, ...]
    """Where each tensor of parameters lies in x."""
    dimension: int
    regularizer: Regularizer
    """The term h on its coordinates."""

    def __init__(
        self,
        silos: Silos,
        *,
        loss: str | Loss | LossFunction | ModelLoss | None = None,
        loss_options: Mapping[str, Any] | None = None,
        regularizer: Regularizer | None = None,
        bias: bool = False,
        weights: Weights = "uniform",
        penalty_factor: PenaltyFactor | None = None,
        deviations: Deviations | None = None,
        deviation_ratio: float = 1.0,
        class_weight: Literal["balanced"] | Mapping[float, float] | None = None,
        model: nn.Module | None = None,
        gradients: Literal["auto", "vmap", "loop", "streams"] = "auto",
        chunk: int | None = None,
        microbatch: int | None = None,
        named_inputs: Mapping[str, tuple[int, ...]] | None = None,
        class_axis: Literal[1, -1] | None = None,
        normalization: tuple[Any, Any] | None = None,
        transform: Callable[[Tensor], Tensor] | None = None,
        augment: Augmentation | Callable[[Tensor], Tensor] | None = None,
        precision: Literal["full", "bf16"] = "full",
        evaluation_samples: int | None = 2000,
        metrics: Sequence[str | Metric] = (),
    ) -> None:
        _check_kinds(silos, regularizer, bias, weights, model)
        if type(self) is Problem:  # not in a __new__, whose arguments tools would show in place of these
            from fedcomposite.problems.problem import LinearProblem, NetworkProblem

            self.__class__ = cast(type[Self], LinearProblem if model is None else NetworkProblem)
        of_classes = None if class_weight is None else _class_weights(silos, class_weight)
        silos = silos.class_weighted(of_classes) if of_classes is not None and model is None else silos
        self.silos, self.bias, self.weighting = silos, bool(bias), weights
        self._placed: dict[tuple[torch.dtype, torch.device], Smooth] = {}
        self._smoothness: dict[str, float] = {}
        self.options = NetworkOptions(
            gradients, chunk, microbatch, named_inputs, class_axis, normalization, transform, augment, precision,
            evaluation_samples,
        )  # fmt: skip
        self.model = None if model is None else copy.deepcopy(model)
        self._set_up(loss, loss_options, metrics, None if model is None else of_classes)
        self.dimension = self.layout[-1].stop
        h = Zero() if regularizer is None else regularizer
        if deviations is not None:
            self.regularizer = self._sharing(h, penalty_factor, deviations, deviation_ratio)
        else:
            self.regularizer = self._restricted(h if penalty_factor is None else self._factored(h, penalty_factor))
        if model is None:
            # a term for another number of coordinates says so here
            self.regularizer.value(torch.zeros(self.dimension, dtype=torch.float64))
        whole = silos.ids == tuple(range(len(silos)))  # a part of a federation may have one class
        labels = silos.targets.flatten()
        if whole and self.loss.classifier and bool((labels == labels[0]).all()):
            warnings.warn(
                f"all {len(silos.targets)} training samples have the label {float(labels[0]):g}: "
                "a classifier has nothing to tell apart",
                OneClassWarning,
                stacklevel=2,
            )

    # -- what the two kinds have of their own -------------------------------------------------------------------------

    def _set_up(
        self,
        loss: str | Loss | LossFunction | ModelLoss | None,
        options: Mapping[str, Any] | None,
        metrics: Sequence[str | Metric],
        of_classes: Mapping[float, float] | None,
    ) -> None:
        """Set loss, measures and layout; weights of classes are for a model's loss: samples of others have them."""
        raise NotImplementedError

    def _place(self, dtype: torch.dtype, device: torch.device) -> Smooth:
        """The smooth part on a device in a dtype."""
        raise NotImplementedError

    def _regularized(self) -> tuple[str, ...]:
        """Names of the parameters that h acts on, unless it says otherwise."""
        raise NotImplementedError

    def _curvature(self) -> float:
        """The constant L that the default step is made from."""
        raise NotImplementedError

    @property
    def dtype(self) -> torch.dtype:
        """What runs compute in, unless told otherwise."""
        return torch.float64 if self.model is None else torch.float32

    @property
    def coordinate_names(self) -> tuple[str, ...]:
        """A name per coordinate of x."""
        raise NotImplementedError

    @property
    def described(self) -> str:
        """The model, its options and a digest of its tensors, for telling runs apart; empty for linear models."""
        return ""

    def module(self, x: Any, buffers: Tensor | None = None) -> nn.Module:
        """A copy of the model with the parameters x, in evaluation mode, on x's device and in its dtype."""
        raise ValueError("this problem has a linear model, not a module")

    def predict(self, x: Any, features: Any, buffers: Tensor | None = None) -> Tensor:
        """Outputs for some samples: margins a'x (+ intercept) of a linear model, a module's outputs otherwise."""
        raise NotImplementedError

    def dead(self, x: Tensor, buffers: Tensor | None = None) -> str:
        """A sentence on a network whose outputs are the same for all samples; empty for any other model."""
        return ""

    # -- the parts of the objective -----------------------------------------------------------------------------------

    def _restricted(self, h: Regularizer) -> Regularizer:
        """The term h on its coordinates: where it was set, or away from intercepts, biases and normalisation layers."""
        if isinstance(h, Ramped):
            return Ramped(self._restricted(h.h), h.strength)
        if isinstance(h, SparsityTarget):
            made = dataclasses.replace(h, h=self._restricted(h.h))
            return (self._of_units(made) if h.structure == "filters" else made).resolve(self.layout)
        if isinstance(h, Zero | On | Named | Blocks):
            return h.resolve(self.layout)
        if len(self.layout) == 1 and self.model is None:
            shape = self.layout[0].shape
            return h.for_shape(shape) if len(shape) == 2 else h
        names = self._regularized()
        if not names:
            raise ValueError(f"{h} would act on parameters with two axes or more; this model has none: say h.on('*')")
        return Named(h, names).resolve(self.layout)

    def _of_units(self, h: SparsityTarget) -> SparsityTarget:
        """The same in whole filters and neurons, with all that goes with them."""
        raise ValueError(
            "structure = 'filters' is for networks; a linear model has no units between inputs and outputs"
        )

    def _factored(self, h: Regularizer, given: PenaltyFactor, core: int | None = None) -> Regularizer:
        """The term h with a factor for every coordinate; intercepts are left alone."""
        if self.model is not None:
            raise ValueError(
                "penalty_factor is for linear models; give each layer a term: a.on('*.weight') + b.on(...)"
            )
        (features, *outputs), recipe = self.layout[0].shape, self.silos.recipe
        features = features if core is None else core
        names = self.silos.feature_names[:features]
        each = factors_of(given, names, features, {} if recipe is None else recipe.sources)
        return factored(h, np.repeat(each, math.prod(outputs)), self.dimension)

    def _sharing(self, h: Regularizer, given: PenaltyFactor | None, kind: Deviations, ratio: float) -> Regularizer:
        """The term h on the common coefficients, and one of a kind on what those of the sites differ by."""
        if kind not in get_args(Deviations):
            raise ValueError(f"deviations = {kind!r}, must be one of {', '.join(map(repr, get_args(Deviations)))}")
        if not (isinstance(ratio, int | float) and 0 < ratio < math.inf):
            raise ValueError(f"deviation_ratio = {ratio!r}, must be a number > 0")
        recipe = self.silos.recipe
        if recipe is None or (step := recipe.per_site) is None:
            raise ValueError(
                "deviations: no feature has coefficients for each site; prepare silos with per_site = true"
            )
        (features, *outputs) = self.layout[0].shape
        each, n = math.prod(outputs), len(step.sites)
        if kind == "fused" and outputs:
            raise ValueError("deviations = 'fused' is for models with one output; take 'group', or 'l1'")
        core = features - n * len(step.columns)
        own = h.for_shape((core, each)) if outputs else h
        own = own if given is None else self._factored(own, given, core)
        return sharing(own, core * each, n * each, features * each, kind, float(ratio))

    def on_support(self, kept: Tensor, x: Tensor, buffers: Tensor | None = None) -> Self:
        """The same problem without h, on the coordinates that ``kept`` marks: the others are zero and stay so.

        A network starts at x, with these buffers.
        """
        if not isinstance(kept, Tensor) or kept.shape != (self.dimension,):
            raise ValueError(f"kept = {kept!r:.60}, must be a mask with {self.dimension} entries")
        made = copy.copy(self)
        made._placed, made.regularizer = {}, Support(kept.cpu())
        if self.model is not None:
            made.model = self.module(x, buffers)
        return made

    def with_zeros(
        self, share: float, structure: Structure = "weights", *, rounds: int = 0, ramp: Schedule | None = None
    ) -> Self:
        """The same problem where a share of all parameters is zero, which is reached over the middle of ``rounds``.

        A ``ramp`` says for each round how much of the share is asked for; without it and rounds it is all from the
        start. See :class:`fedcomposite.regularizers.SparsityTarget`; h stays what it was.
        """
        if isinstance(self.regularizer, SparsityTarget | Ramped):
            raise ValueError(f"sparsity = {share:g}, but {self.regularizer} has a share of zeros or a ramp of its own")
        made, target = copy.copy(self), SparsityTarget(share, structure, self.regularizer, ramp)
        made.regularizer = self._restricted(target.growing(rounds) if rounds else target)
        return made

    @property
    def weights(self) -> npt.NDArray[np.float64]:
        """The clients' weights w_i, which sum to 1."""
        n, silos = len(self.silos), self.silos
        if self.weighting == "uniform":
            return np.full(n, 1 / n)
        each = silos.sizes if silos.weights is None else np.add.reduceat(silos.weights.numpy(), silos.offsets[:-1])
        return np.asarray(each / each.sum())

    def smooth(self, dtype: torch.dtype = torch.float64, device: str | torch.device = "cpu") -> Smooth:
        """The smooth part, placed on a device in a dtype (kept for the next call)."""
        place = dtype, torch.device(device)
        if place not in self._placed:
            self._placed[place] = self._place(*place)
        return self._placed[place]

    def _at(self, x: Any, buffers: Any = None) -> tuple[Tensor, Smooth]:
        """The point x, and the smooth part in its dtype with these buffers, or a run's own, or those before it."""
        point = as_vector(x)
        if point.shape != (self.dimension,):
            raise ValueError(f"x has shape {tuple(point.shape)}, expected ({self.dimension},)")
        smooth = self.smooth(point.dtype, point.device)
        own, buffers = smooth.buffers(), buffers_of(x) if buffers is None else buffers
        given = own if buffers is None else torch.as_tensor(buffers).to(point)
        if given.shape != own.shape:
            raise ValueError(f"buffers have shape {tuple(given.shape)}, expected {tuple(own.shape)}: take run.buffers")
        return point, smooth.during(RoundInputs(given[None]))

    # -- looking at a model -------------------------------------------------------------------------------------------

    def evaluate(
        self, x: Any, buffers: Tensor | None = None, *, evaluation_samples: int | EllipsisType | None = ...
    ) -> Evaluation:
        """Loss and gradient of f at x, and metrics.

        Parameters
        ----------
        x : array, Run or estimator
            The model, ``(d,)``, or what has one; a list is read in float64.
        buffers : Tensor, optional
            A network's running statistics, ``run.buffers``; those of the run, or of the untrained module, if left out.
        evaluation_samples : int, optional
            How many training samples a network is measured on, None for all; the problem's own number if left out.
            A linear model is measured on all of them. ``.samples`` of the result says how many they were.
        """
        point, smooth = self._at(x, buffers)
        return self._measured(smooth, evaluation_samples).evaluate(point)

    def _measured(self, smooth: Smooth, samples: int | EllipsisType | None) -> Smooth:
        return smooth if isinstance(samples, EllipsisType) else smooth.measured_on(samples)

    def objective(
        self, x: Any, *, buffers: Tensor | None = None, evaluation_samples: int | EllipsisType | None = ...
    ) -> float:
        """F(x), on the samples and with the buffers of :meth:`evaluate`."""
        point, smooth = self._at(x, buffers)
        seen = self._measured(smooth, evaluation_samples).evaluate(point)
        return float(seen.loss) + float(self.regularizer.value(point))

    def gradient(
        self, x: Any, *, buffers: Tensor | None = None, evaluation_samples: int | EllipsisType | None = ...
    ) -> Tensor:
        """The gradient of the smooth part f at x, on the samples and with the buffers of :meth:`evaluate`."""
        return self.evaluate(x, buffers, evaluation_samples=evaluation_samples).gradient

    def stationarity(
        self,
        x: Any,
        step: float | None = None,
        *,
        buffers: Tensor | None = None,
        evaluation_samples: int | EllipsisType | None = ...,
    ) -> float:
        """||x - P_step(x - step grad f(x))|| / step: zero exactly at stationary points.

        The default step is :meth:`default_step`; samples and buffers are those of :meth:`evaluate`.
        """
        point, smooth = self._at(x, buffers)
        step = self.default_step() if step is None else step
        gradient = self._measured(smooth, evaluation_samples).evaluate(point).gradient
        return float(prox_gradient_norm(point, gradient, self.regularizer, step))

    def optimality(
        self, x: Any, *, buffers: Tensor | None = None, evaluation_samples: int | EllipsisType | None = ...
    ) -> float:
        """Distance from -grad f(x) to the subdifferential of h at x; see :meth:`evaluate` for the rest."""
        point, smooth = self._at(x, buffers)
        gradient = self._measured(smooth, evaluation_samples).evaluate(point).gradient
        return float(self.regularizer.optimality(point, gradient))

    def scores(self, x: Any, buffers: Tensor | None = None) -> pd.DataFrame:
        """The metrics on all samples: one row per silo and one for all of them, a column per part and metric.

        Samples are at hand, so that nothing is binned. A held-out part has rows of silos where it is known whose its
        samples are (:meth:`Silos.split` knows).
        """
        point, smooth = self._at(x, buffers)
        silos = self.silos
        everyone = torch.from_numpy(np.repeat(np.arange(len(silos)), silos.sizes))
        parts: list[tuple[Part, tuple[Features, Tensor], Tensor | None, Tensor | None]]
        parts = [("train", (silos.features, silos.targets), everyone, silos.margin_offsets)]
        for held, pair in silos.held_out.items():
            parts.append((held, pair, silos.held_by.get(held), silos.held_margin_offsets.get(held)))
        table = pd.DataFrame(index=pd.Index([*silos.names, "all"], name="silo"))
        for part, (X, y), owner, offset in parts:
            outputs, targets = (v.cpu() for v in smooth.scored(point, X, y, offset))
            who = torch.full((len(y),), -1) if owner is None else owner
            targets = self.loss.apart(targets, who) if isinstance(self.loss, Loss) else targets
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
        point = as_vector(x).detach().double().cpu()
        rows = []
        for slot in self.layout:
            v = point[slot.start : slot.stop]
            zeros, size, norm = int((v == 0).sum()), len(v), float(v.norm())
            hoyer = (size**0.5 - float(v.abs().sum()) / norm) / (size**0.5 - 1) if size > 1 and norm > 0 else 1.0
            rows.append((slot.name, slot.shape, size, zeros, zeros / size, hoyer))
        return pd.DataFrame(rows, columns=["name", "shape", "size", "zeros", "sparsity", "hoyer"])

    # -- constants ----------------------------------------------------------------------------------------------------

    def smoothness(self, of: Literal["clients", "mean"] = "clients") -> float:
        """Smoothness constant L: the largest over the clients, or that of the mean loss (``of="mean"``).

        An upper bound, exact for up to 512 features or samples and at most 1 % too large otherwise.
        """
        if of not in self._smoothness:
            self._smoothness[of] = self.smooth().smoothness(of)
        return self._smoothness[of]

    def default_step(self) -> float:
        """1/L of the mean loss, and at most half of 1/rho: the step at which stationarity is measured.

        A loss without smoothness constant (hinge, absolute, quantile, poisson) is measured as if its curvature were 1,
        a network at the fixed step :data:`NETWORK_STEP`.
        """
        return measuring_step(self._curvature(), self.regularizer.rho)


def _class_weights(silos: Silos, given: object) -> dict[float, float]:
    """What samples count by their class, as in scikit-learn; labels that are not named count 1."""
    targets = silos.targets[silos.targets != IGNORED]  # of several per sample each counts for itself
    if silos.classes is None and not (silos.targets.ndim > 1 and not targets.is_floating_point()):
        raise ValueError(f"class_weight = {given!r:.60}: the targets are not classes")
    labels, at = torch.unique(targets, return_inverse=True)
    each = torch.ones(len(labels), dtype=torch.float64)
    known = {float(label): i for i, label in enumerate(labels)}
    if given == "balanced":
        counted = torch.ones(len(at), dtype=torch.float64) if silos.weights is None else silos.weights
        each = counted.sum() / (len(labels) * torch.zeros_like(each).index_add_(0, at, counted))
    elif isinstance(given, Mapping) and all(
        key in known and isinstance(w, int | float | np.number) and 0 < w < math.inf for key, w in given.items()
    ):
        for key, w in given.items():
            each[known[key]] = float(w)
    else:
        shown = ", ".join(f"{label:g}" for label in list(known)[:10])
        raise ValueError(f"class_weight = {given!r:.60}, must be 'balanced' or have numbers > 0 by label ({shown})")
    return dict(zip(known, each.tolist(), strict=True))


def _check_kinds(silos: Any, regularizer: Any, bias: Any, weights: Any, model: Any) -> None:
    """Refuse arguments of the wrong kind in one line."""
    if not isinstance(silos, Silos):
        raise ValueError(f"silos = {silos!r:.60}, must be Silos; make them with fc.Silos.from_arrays([(X, y), ...])")
    if regularizer is not None and not isinstance(regularizer, Regularizer):
        known = suggest(regularizer, REGISTRY) if isinstance(regularizer, str) else ""
        raise ValueError(
            f"regularizer = {regularizer!r:.60}, must be a Regularizer, such as fc.regularizers.L1(0.1){known}"
        )
    if not isinstance(bias, bool | np.bool_):
        raise ValueError(f"bias = {bias!r:.60}, must be True or False")
    if not isinstance(weights, str) or weights not in ("uniform", "samples"):
        raise ValueError(f"weights = {weights!r:.60}, must be 'uniform' or 'samples'")
    if model is not None and not isinstance(model, nn.Module):
        raise ValueError(f"model = {model!r:.60}, must be a torch.nn.Module; fc.models builds some by name")


def prox_gradient_norm(x: Tensor, gradient: Tensor, h: Regularizer, step: float) -> Tensor:
    """||G_step(x)||, the norm of the prox-gradient mapping."""
    moved: Tensor = torch.linalg.vector_norm(x - h.prox(x - step * gradient, step), dim=-1)
    return moved / step


_LOOKED_AT, _ALIKE = 16, 1e-6  # samples whose outputs tell whether a network is alive, and how far apart they must be


def _alike(outputs: Tensor) -> bool:
    """Whether all samples have the same finite outputs."""
    return bool(outputs.isfinite().all()) and not bool(((outputs - outputs[:1]).abs() > _ALIKE * outputs.abs()).any())


NETWORK_STEP = 0.1
"""The step at which a network's stationarity is measured, since its smoothness constant is unknown."""


@final
class LinearProblem(Problem):
    """A problem with a linear model; :class:`Problem` documents the parameters."""

    loss: Loss

    def _set_up(
        self,
        loss: str | Loss | LossFunction | ModelLoss | None,
        options: Mapping[str, Any] | None,
        metrics: Sequence[str | Metric],
        of_classes: Mapping[float, float] | None,
    ) -> None:
        if self.model is not None:
            raise ValueError("a LinearProblem takes no model; Problem(..., model=...) is a NetworkProblem")
        if self.options != NetworkOptions():
            given = {k: v for k, v in vars(self.options).items() if v != getattr(NetworkOptions(), k)}
            raise ValueError(f"{', '.join(given)}: only for a problem with a model")
        if isinstance(loss, ModelLoss) or not (loss is None or isinstance(loss, str | Loss) or callable(loss)):
            raise ValueError(f"loss = {loss!r:.60}, must be a name, a Loss, or a function of margins and targets")
        self.loss = get_loss("logistic" if loss is None else loss, options)
        if self.silos.targets.ndim > 1 and self.loss.by_sample:
            shape = tuple(self.silos.targets.shape)
            raise DataError(f"targets have shape {shape}, expected ({shape[0]},): a linear model has one per sample")
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
        self,
        loss: str | Loss | LossFunction | ModelLoss | None,
        options: Mapping[str, Any] | None,
        metrics: Sequence[str | Metric],
        of_classes: Mapping[float, float] | None,
    ) -> None:
        if self.bias:
            raise ValueError("bias is for linear models; build it into the model")
        if options and not isinstance(loss, str | None):
            raise ValueError(f"loss_options = {options} go with the name of a loss; {loss} has its options already")
        if self.silos.weights is not None:
            raise ValueError("weights of samples are for linear models; a model's loss can weigh its classes")
        if self.silos.margin_offsets is not None:
            raise ValueError("margin offsets are for linear models; a module can add an input to its outputs")
        if isinstance(loss, Loss):
            raise ValueError(f"{loss} is for linear models; with a model use 'cross_entropy', 'mse' or a function")
        self.layout = layout(self._module)
        given = named_loss(loss or "cross_entropy", options) if isinstance(loss, str | None) else loss
        self.loss = model_loss(given, self._module, self.silos, self.options)
        if of_classes is not None:
            self.loss = self.loss.weighted(of_classes)
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
        digest = hashlib.sha256()
        for tensor in self._module.state_dict().values():
            digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return f"{self.model} {self.layout} {self.options} {digest.hexdigest()}"

    def _of_units(self, h: SparsityTarget) -> SparsityTarget:

        held = self.silos.features[:2]
        samples: Any = held if isinstance(held, Tensor) else held.read()  # type: ignore[union-attr]  # not sparse
        inputs = self.options.inputs(samples, next(self._module.parameters()).dtype)
        try:
            found = connected(self.plain(self._module), inputs, self.layout)
        except UntraceableError as error:
            raise ValueError(f"structure = 'filters': {error}; take 'weights'") from error
        return FilterTarget(h.share, "filters", h.h, h.ramp, connected=found)

    def module(self, x: Any, buffers: Tensor | None = None) -> nn.Module:
        point, network = self._network(x, buffers)
        made = copy.deepcopy(self._module).to(point.device, point.dtype)
        made.load_state_dict({k: v.detach() for k, v in network.state(point).items()}, strict=False)
        return made.eval()

    def predict(self, x: Any, features: Any, buffers: Tensor | None = None) -> Tensor:
        """The module's outputs for some samples, in evaluation mode."""
        point, network = self._network(x, buffers)
        return network.predict(point, torch.as_tensor(features))

    def outputs(self, module: nn.Module, samples: Tensor) -> Tensor:
        """What a module like the model gives for samples as they are stored."""
        dtype = next(module.parameters()).dtype
        with torch.no_grad():
            made: Tensor = self.plain(module)(self.options.inputs(samples, dtype))
        return made

    def plain(self, module: nn.Module) -> nn.Module:
        """A module like the model that takes one tensor of samples, as prepared, and gives one."""
        return Plain(module, self.options)

    def dead(self, x: Tensor, buffers: Tensor | None = None) -> str:
        held = self.silos.features[:_LOOKED_AT]
        samples: Any = held if isinstance(held, Tensor) else held.read()  # type: ignore[union-attr]  # not sparse
        if bool((samples == samples[:1]).all()):  # the coordinator of a federation has zeros in their place
            if not samples.is_floating_point():
                return ""
            samples = torch.randn(_LOOKED_AT, *samples.shape[1:], generator=torch.Generator().manual_seed(0))
        if not _alike(self.predict(x, samples, buffers)) or not self._dead_in_training(x, buffers, samples):
            return ""
        gone = [s.name for s in self.layout if len(s.shape) > 1 and not x[s.start : s.stop].count_nonzero()]
        where = f" ({', '.join(gone)}: all zero)" if gone else ""
        return (
            f"the network is dead: its outputs are the same for all samples{where}; ask for fewer zeros, give h less "
            "strength or a longer ramp, or take smaller steps"
        )

    def _dead_in_training(self, x: Tensor, buffers: Tensor | None, samples: Tensor) -> bool:
        """Whether outputs are the same with a batch's own statistics, too: those of few rounds say little."""
        module = self.module(x, buffers)
        norms = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        for norm in norms:
            norm.train()
        with torch.no_grad():
            return not norms or _alike(self.outputs(module, samples.to(x.device)))

    def _network(self, x: Any, buffers: Tensor | None) -> tuple[Tensor, Network]:
        point, smooth = self._at(x, buffers)
        assert isinstance(smooth, Network)
        return point, smooth
