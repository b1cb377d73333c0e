"""Losses of linear models, as functions of the margin z = a'x and the target b of one sample.

All but one have a single margin per sample. The multinomial loss has one per class: margins are ``(..., C)``, the
coefficients a ``(features, C)`` matrix, and targets are rows of an identity matrix.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import annotated_types as at
import numpy as np
import torch
from torch import Tensor

from fedcomposite._validation import Count, Positive, suggest, validate
from fedcomposite.data.arrays import NO_ENTRY
from fedcomposite.data.silos import DataError, Silos
from fedcomposite.problems.metrics import CLASSIFIERS, Kind
from fedcomposite.problems.products import hessians
from fedcomposite.problems.risk_sets import CAUSE, ENTRY, EVENT, STRATUM, TIME, RiskSets
from fedcomposite.problems.sparse_products import Stack
from fedcomposite.registry import Registry

LossFunction = Callable[[Tensor, Tensor], Tensor]
"""Of margins, or a model's outputs, and targets."""


class Loss(ABC):
    """A loss phi(z, b): value, derivative in z, and bounds on its first two derivatives.

    Subclasses are frozen dataclasses: their fields are the loss's options, validated from their annotations.
    """

    curvature: float
    """Bound on phi'': the smoothness constant of a client is curvature * lambda_max(X'X / m). Infinite if none."""
    slope: float
    """Bound on |phi'|, which makes a sample's loss slope * ||a||-Lipschitz. Infinite if there is none."""
    classifier: bool = False
    probabilistic: bool = False
    """Whether margins are logarithms of odds, which metrics of probabilities need."""
    smooth: bool = True
    """False for losses with kinks, whose :meth:`derivative` is a subgradient."""
    nonnegative: bool = False
    """Whether phi is convex in z and its infimum is 0 for every target, which makes duality gaps computable."""
    attained: bool = True
    """Whether phi has a least value for every target: where it only nears one, F need not have a minimiser."""
    reduction: Literal["mean", "sum"] = "mean"
    """Whether f_i is the mean of its samples' losses or their sum."""
    by_sample: bool = True
    """Whether a sample's loss depends on its own margin alone. A partial likelihood's depends on those of all samples
    at risk: it has no minibatches, and :meth:`total`, :meth:`slopes` and :meth:`hessians` of all samples only."""

    def __post_init__(self) -> None:
        validate(self)

    @property
    def outputs(self) -> int:
        """Margins per sample."""
        return 1

    @property
    def twice(self) -> bool:
        """Whether it has a second derivative, which Newton steps need."""
        return type(self).second is not Loss.second

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of problems that its metrics are for."""
        if not self.classifier:
            return ("regression",)
        return {1: ("binary",), 2: CLASSIFIERS}.get(self.outputs, ("multiclass",))

    def adapt(self, silos: Silos) -> Loss:
        """The loss with what it has to know of the data filled in."""
        return self

    def prepare(self, silos: Silos, targets: Tensor) -> Tensor:
        """Check targets and bring them to the form that :meth:`value` expects (float64): any numbers, as they are."""
        return targets.double()

    @abstractmethod
    def value(self, z: Tensor, b: Tensor) -> Tensor:
        """phi(z, b) of each sample."""

    @abstractmethod
    def derivative(self, z: Tensor, b: Tensor) -> Tensor:
        """The derivative of phi in z, of each sample, as a new tensor."""

    def second(self, z: Tensor, b: Tensor) -> Tensor:
        """The second derivative of phi in z: a number per sample, or a C x C matrix ``(..., C, C)``.

        Where phi' has a kink it is one of the values that make phi' semismooth.
        """
        raise TypeError(f"{self} has no second derivative, which a Newton step needs; use a first-order method")

    def lowest(self, b: Tensor) -> Tensor | None:
        """The infimum of phi over z, of each sample; None where phi is not convex or it is not known."""
        return None

    def response(self, z: Tensor) -> Tensor:
        """What margins say about targets: themselves, for most losses."""
        return z

    def apart(self, b: Tensor, owner: Tensor) -> Tensor:
        """Prepared targets of pooled samples such that those of different owners are not compared."""
        return b

    # -- sums over the samples of stacked clients ---------------------------------------------------------------------

    def placed(self, b: Tensor) -> Any:
        """Prepared targets of n clients, ``(n, m, ...)``, as sums over their samples take them."""
        return b

    def total(self, z: Tensor, b: Any, w: Tensor) -> Tensor:
        """Weighted sums of the samples' losses, ``(n,)``, from margins ``(n, m, ...)`` and weights ``(n, m)``."""
        value = self.value(z, b)
        return (value * w.view(value.shape)).sum(1)

    def slopes(self, z: Tensor, b: Any, w: Tensor | float) -> Tensor:
        """The derivatives of these sums in the margins, ``(n, m, ...)``."""
        return self.derivative(z, b).mul_(w)

    def together(self, z: Tensor, b: Any, w: Tensor) -> tuple[Tensor, Tensor]:
        """The losses and slopes of :meth:`total` and :meth:`slopes`; a loss may share work between them."""
        return self.total(z, b, w), self.slopes(z, b, w)

    def hessians(self, X: Tensor | Stack, z: Tensor, b: Any, w: Tensor, at: Tensor) -> Tensor:
        """Their second derivatives in the coordinates ``at`` of the coefficients, ``(n, k, k)``."""
        return hessians(X, self.second(z, b), w, at, self.outputs)


class _Binary(Loss):
    """Two labels, {-1, +1} or {0, 1}; the sign of the margin is the prediction."""

    classifier = True

    def prepare(self, silos: Silos, targets: Tensor) -> Tensor:
        """Check that there are two labels, {-1, +1} or {0, 1} (one of a pair is fine for one silo)."""
        found = set(torch.unique(silos.targets).tolist()) | set(torch.unique(targets).tolist())
        if not (found <= {-1.0, 1.0} or found <= {0.0, 1.0}):
            shown = ", ".join(f"{v:g}" for v in sorted(found)[:5]) + (", ..." if len(found) > 5 else "")
            name = next((k for k, v in LOSSES.items() if type(v) is type(self)), type(self).__name__).replace("_", " ")
            raise DataError(
                f"the {name} loss needs labels in {{-1, +1}} or {{0, 1}}, found {len(found)} kinds: {shown}; "
                "map them to two, or choose another loss"
            )
        b = targets.double()
        return b if -1.0 in found or 0.0 not in found else 2 * b - 1


@dataclass(frozen=True)
class Logistic(_Binary):
    """phi(z, b) = log(1 + exp(-b z)), b in {-1, +1}; labels 0 and 1 are read as -1 and +1."""

    nonnegative = True
    attained = False
    curvature = 0.25
    slope = 1.0
    probabilistic = True

    def value(self, z: Tensor, b: Tensor) -> Tensor:
        """log(1 + exp(-b z)), without overflow."""
        return -torch.nn.functional.logsigmoid(b * z)

    def derivative(self, z: Tensor, b: Tensor) -> Tensor:
        """-b / (1 + exp(b z))."""
        return torch.sigmoid_(b * z * -1).mul_(b).neg_()

    def second(self, z: Tensor, b: Tensor) -> Tensor:
        """The variance p (1 - p) with p = 1 / (1 + exp(-z))."""
        return torch.sigmoid(z) * torch.sigmoid(-z)


@dataclass(frozen=True)
class Multinomial(Loss):
    """phi(z, b) = log sum_c exp(z_c) - z_b, one margin per class.

    x is the ``(features, C)`` matrix of coefficients, row by row: the weights of one feature lie side by side, and with
    an intercept the C biases are the last coordinates. ``labels`` are the classes in order; left out, they are the
    integers found in the silos. Name them where a site may hold some of the classes only.
    """

    labels: tuple[int, ...] | None = None

    nonnegative = True
    attained = False
    curvature = 0.5
    slope = math.sqrt(2.0)
    classifier = True
    probabilistic = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.labels is not None and (len(self.labels) < 2 or len(set(self.labels)) < len(self.labels)):
            raise ValueError(f"Multinomial: labels = {self.labels}, must be at least two different integers")

    @property
    def outputs(self) -> int:
        """The number of classes, known once the loss is adapted to data."""
        if self.labels is None:
            raise ValueError("Multinomial: the classes are not known yet; give labels, or adapt(silos) first")
        return len(self.labels)

    def adapt(self, silos: Silos) -> Multinomial:
        """Take the classes from the data unless they were named."""
        if self.labels is not None:
            return self
        found = torch.unique(silos.targets.double())
        if len(found) < 2 or not bool((found == found.round()).all()):
            shown = ", ".join(f"{v:g}" for v in found[:5].tolist()) + (", ..." if len(found) > 5 else "")
            raise DataError(
                f"the multinomial loss needs two or more classes, numbered by integers; found: {shown}; "
                "encode them, or name all classes with the option `labels`"
            )
        return Multinomial(tuple(int(v) for v in found.tolist()))

    def prepare(self, silos: Silos, targets: Tensor) -> Tensor:
        """One row of the identity per sample; a label outside the classes is refused."""
        classes = torch.tensor(self.adapt(silos).labels, dtype=torch.float64)
        rows = (targets.double().unsqueeze(1) == classes).double()
        unknown = targets[rows.sum(1) == 0]
        if len(unknown):
            shown = ", ".join(f"{v:g}" for v in classes.tolist())
            raise DataError(f"the multinomial loss met the label {float(unknown[0]):g}, but its classes are {shown}")
        return rows

    def value(self, z: Tensor, b: Tensor) -> Tensor:
        """The logarithm of 1 + sum_c exp(z_c - z_b) over the other classes, without overflow: exact also near 0."""
        ahead = (z - (z * b).sum(-1, keepdim=True)).masked_fill(b > 0, -math.inf)
        return torch.logaddexp(torch.logsumexp(ahead, -1), z.new_zeros(()))

    def derivative(self, z: Tensor, b: Tensor) -> Tensor:
        """The softmax of z minus the row of the class, whose entry is minus the sum of the others: exact near 0."""
        others = torch.softmax(z, -1).masked_fill(b > 0, 0.0)
        return others - b * others.sum(-1, keepdim=True)

    def second(self, z: Tensor, b: Tensor) -> Tensor:
        """diag(p) - p p' with the softmax p of z."""
        p = torch.softmax(z, -1)
        return torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)


@dataclass(frozen=True)
class LeastSquares(Loss):
    """phi(z, b) = (z - b)^2 / 2."""

    nonnegative = True
    curvature = 1.0
    slope = math.inf

    def value(self, z: Tensor, b: Tensor) -> Tensor:
        """Half the squared residual."""
        return (z - b).square_().div_(2)

    def derivative(self, z: Tensor, b: Tensor) -> Tensor:
        """The residual."""
        return z - b

    def second(self, z: Tensor, b: Tensor) -> Tensor:
        """1."""
        return torch.ones_like(z)


@dataclass(frozen=True)
class Hinge(_Binary):
    """phi(z, b) = max(0, 1 - b z), b in {-1, +1}: support vector machines.

    ``reduction="sum"`` (the loss ``"hinge_sum"``) makes f_i the sum over a client's samples, as FedMLS has it;
    minibatch gradients are then multiplied by m_i / (batch size).
    """

    reduction: Literal["mean", "sum"] = "mean"

    nonnegative = True
    curvature = math.inf
    slope = 1.0
    smooth = False

    def value(self, z: Tensor, b: Tensor) -> Tensor:
        """max(0, 1 - b z)."""
        return (1 - b * z).clamp_(min=0)

    def derivative(self, z: Tensor, b: Tensor) -> Tensor:
        """-b where b z < 1, else 0 (0 at the kink)."""
        return torch.where(b * z < 1, -b, 0.0)


@dataclass(frozen=True)
class SquaredHinge(_Binary):
    """phi(z, b) = max(0, 1 - b z)^2, b in {-1, +1}."""

    nonnegative = True
    curvature = 2.0
    slope = math.inf

    def value(self, z: Tensor, b: Tensor) -> Tensor:
        """The square of the hinge loss."""
        return (1 - b * z).clamp_(min=0).square_()

    def derivative(self, z: Tensor, b: Tensor) -> Tensor:
        """-2 b max(0, 1 - b z)."""
        return (1 - b * z).clamp_(min=0).mul_(b).mul_(-2)

    def second(self, z: Tensor, b: Tensor) -> Tensor:
        """2 where b z < 1, else 0."""
        return 2.0 * (b * z < 1).to(z)


@dataclass(frozen=True)
class Absolute(Loss):
    """phi(z, b) = |z - b|: regression to the median."""

    nonnegative = True
    curvature = math.inf
    slope = 1.0
    smooth = False

    def value(self, z: Tensor, b: Tensor) -> Tensor:
        """|z - b|."""
        return (z - b).abs_()

    def derivative(self, z: Tensor, b: Tensor) -> Tensor:
        """The sign of the residual, 0 at the kink."""
        return (z - b).sign_()


@dataclass(frozen=True)
class Huber(Loss):
    """phi(z, b) = r^2 / 2 for |r| <= delta, delta (|r| - delta / 2) beyond, with r = z - b."""

    delta: Positive = 1.0

    nonnegative = True
    curvature = 1.0

    @property
    def slope(self) -> float:  # type: ignore[override]
        """The threshold delta."""
        return self.delta

    def value(self, z: Tensor, b: Tensor) -> Tensor:
        """Both cases at once: c (|r| - c / 2) with c = min(|r|, delta)."""
        r = (z - b).abs_()
        c = r.clamp(max=self.delta)
        return c * (r - c / 2)

    def derivative(self, z: Tensor, b: Tensor) -> Tensor:
        """The residual, cut to [-delta, delta]."""
        return (z - b).clamp_(-self.delta, self.delta)

    def second(self, z: Tensor, b: Tensor) -> Tensor:
        """1 up to delta, 0 beyond."""
        return ((z - b).abs() <= self.delta).to(z)


@dataclass(frozen=True)
class Quantile(Loss):
    """phi(z, b) = max(tau r, (tau - 1) r) with r = b - z: regression to the tau-quantile (pinball loss)."""

    tau: Annotated[float, at.Gt(0), at.Lt(1)] = 0.5

    nonnegative = True
    curvature = math.inf
    smooth = False

    @property
    def slope(self) -> float:  # type: ignore[override]
        """max(tau, 1 - tau)."""
        return max(self.tau, 1 - self.tau)

    def value(self, z: Tensor, b: Tensor) -> Tensor:
        """max(tau r, (tau - 1) r)."""
        r = b - z
        return torch.maximum(self.tau * r, (self.tau - 1) * r)

    def derivative(self, z: Tensor, b: Tensor) -> Tensor:
        """-tau below the target, 1 - tau above it, 0 at the kink."""
        sign = (z - b).sign_()
        return sign.add(sign.abs(), alpha=1 - 2 * self.tau).div_(2)


@dataclass(frozen=True)
class Poisson(Loss):
    """phi(z, b) = exp(z) - b z: counts b >= 0 with mean exp(z) (the term log b! does not depend on x).

    Its curvature exp(z) has no bound, so no step is safe everywhere: there is no smoothness constant. On a region where
    all margins stay below B it is exp(B) lambda_max(X'X / m).
    """

    attained = False
    curvature = math.inf
    slope = math.inf

    def prepare(self, silos: Silos, targets: Tensor) -> Tensor:
        """Check that no count is negative."""
        if bool((targets < 0).any()):
            raise DataError(
                f"the poisson loss needs counts >= 0, found {float(targets.min()):g}; "
                "choose another loss for targets of both signs"
            )
        return targets.double()

    def value(self, z: Tensor, b: Tensor) -> Tensor:
        """exp(z) - b z."""
        return z.exp() - b * z

    def derivative(self, z: Tensor, b: Tensor) -> Tensor:
        """exp(z) - b."""
        return z.exp().sub_(b)

    def second(self, z: Tensor, b: Tensor) -> Tensor:
        """exp(z)."""
        return z.exp()

    def lowest(self, b: Tensor) -> Tensor:
        """B - b log b, approached as z goes to log b."""
        least: Tensor = b - torch.special.xlogy(b, b)
        return least

    def response(self, z: Tensor) -> Tensor:
        """The mean exp(z)."""
        return z.exp()


@dataclass(frozen=True)
class Cox(Loss):
    """Minus the logarithm of Cox's partial likelihood over the number of samples: times to an event.

    Targets have a row per sample: time, event (1) or not (0), and if wanted the time of entry and the number of a
    stratum. A site has its own baseline hazard, and so has each of its strata: f_i is

        (1/m_i) sum over events j of log(sum over k at risk at t_j of o_k exp(z_k)) - z_j,

    where k is at risk at t if it entered before t and left at t or later. There is no intercept: it is part of the
    baseline. Weights o_k of samples count relative to their mean.

    ``ties`` says what events at the same time are to each other: all at risk at each of them (``"breslow"``), or each
    to a share, as if they had happened one after another (``"efron"``). Where events have causes 1, 2, ..., ``cause``
    is the one whose hazard is modelled; the others count as censored. Events with fewer than ``least_at_risk`` samples
    at risk do not count: sites of a federation have a minimum, since the term of an event with few others is about
    them.
    """

    ties: Literal["breslow", "efron"] = "breslow"
    cause: Count | None = None
    least_at_risk: Count = 1

    attained = False
    curvature = 1.0
    slope = math.inf
    by_sample = False

    @property
    def twice(self) -> bool:
        """It has, by :meth:`hessians`."""
        return True

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Times to an event."""
        return ("survival",)

    def prepare(self, silos: Silos, targets: Tensor) -> Tensor:
        """Five columns: time, event, entry (minus infinity if there is none), stratum, and the number of the cause."""
        b = targets.double()
        if b.ndim != 2 or not 2 <= b.shape[1] <= 4:
            raise DataError(
                f"the cox loss needs targets with the columns time and event, and if wanted entry and stratum; these "
                f"have shape {tuple(b.shape)}"
            )
        known = b[:, EVENT].clamp(0, None if self.cause else 1)
        if bool((strange := b[:, EVENT] != known.round()).any()):
            found, wanted = float(b[strange][0, EVENT]), "numbers of causes, 0 if censored" if self.cause else "0 and 1"
            hint = "" if self.cause else "; with several causes choose one by the option `cause`"
            raise DataError(f"the cox loss needs events of {wanted}, found {found:g}{hint}")
        absent = [b.new_full((len(b), 1), -math.inf), b.new_zeros(len(b), 1)]
        made = torch.cat([b, *absent[b.shape[1] - ENTRY :], b[:, EVENT : EVENT + 1]], 1)
        made[made[:, ENTRY] <= NO_ENTRY, ENTRY] = -math.inf
        time, entry = made[:, TIME], made[:, ENTRY]
        if bool((late := entry >= time).any()):
            row = int(late.nonzero()[0])
            times = f"entry {float(entry[row]):g}, time {float(time[row]):g}"
            raise DataError(
                f"{int(late.sum())} sample(s) enter when they leave, or later: the first {_place(silos, row)}, {times}"
            )
        if bool((early := (time < 0) & entry.isinf()).any()):
            row = int(early.nonzero()[0])
            raise DataError(
                f"{int(early.sum())} sample(s) have a time below 0, where nobody was observed: the first "
                f"{_place(silos, row)}, time {float(time[row]):g}; mend it, or say when observation began (entry)"
            )
        made[:, EVENT] = (b[:, EVENT] == (self.cause or 1)).double()
        return made

    def placed(self, b: Tensor) -> RiskSets:
        """The samples sorted by time, with the risk sets of their events."""
        return RiskSets.of(b, self.ties == "efron", self.least_at_risk)

    def total(self, z: Tensor, b: RiskSets, w: Tensor) -> Tensor:
        """Minus the logarithms of the clients' partial likelihoods."""
        return b.terms(z, w).sum(1)

    def slopes(self, z: Tensor, b: RiskSets, w: Tensor | float) -> Tensor:
        """Events that were expected less those that were."""
        return b.slopes(z, w if isinstance(w, Tensor) else torch.full_like(z, w))

    def together(self, z: Tensor, b: RiskSets, w: Tensor) -> tuple[Tensor, Tensor]:
        """Both in one pass."""
        return b.together(z, w)

    def hessians(self, X: Tensor | Stack, z: Tensor, b: RiskSets, w: Tensor, at: Tensor) -> Tensor:
        """Covariances of the features over the risk sets."""
        return b.hessians(X, z, w, at)

    def value(self, z: Tensor, b: Tensor) -> Tensor:
        """What each of some samples adds, among themselves."""
        return self.placed(b[None]).terms(z[None], torch.ones_like(z)[None])[0]

    def derivative(self, z: Tensor, b: Tensor) -> Tensor:
        """The derivative of the sum of these values."""
        return self.placed(b[None]).slopes(z[None], torch.ones_like(z)[None])[0]

    def apart(self, b: Tensor, owner: Tensor) -> Tensor:
        """With the samples of every owner in strata of their own."""
        pairs = torch.stack([owner.to(b), b[:, STRATUM]], 1)
        stratum = torch.unique(pairs, dim=0, return_inverse=True)[1]
        return torch.cat([b[:, :STRATUM], stratum.to(b).unsqueeze(1), b[:, CAUSE:]], 1)


@dataclass(frozen=True, repr=False)
class Written(Loss):
    """A function of margins and targets with a value for each sample; its derivative is automatic.

    Nothing else is known of it: no bounds, no classes, and no second derivative, so that first-order methods take it.
    """

    function: LossFunction

    curvature = math.inf
    slope = math.inf

    def __repr__(self) -> str:
        return getattr(self.function, "__qualname__", type(self.function).__qualname__)

    def prepare(self, silos: Silos, targets: Tensor) -> Tensor:
        """As they are, after a try with two of them."""
        b = targets.double()
        self.value(torch.zeros_like(b[:2]), b[:2])
        return b

    def value(self, z: Tensor, b: Tensor) -> Tensor:
        """The function, which has to give a value for each margin."""
        values = self.function(z, b)
        shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        if shape != tuple(z.shape):
            raise ValueError(
                f"the loss {self} gives {shape} for margins {tuple(z.shape)}, must be a value for each of them: no "
                "mean or sum (reduction='none')"
            )
        return values

    def derivative(self, z: Tensor, b: Tensor) -> Tensor:
        """That of the sum, since each value depends on its own margin."""
        made: Tensor = torch.func.grad(lambda at: self.value(at, b).sum())(z)
        return made


def _place(silos: Silos, row: int) -> str:
    """Where a row of the targets is."""
    at = int(np.searchsorted(silos.offsets, row, side="right")) - 1
    return f"at {silos.names[at]}, row {row - silos.offsets[at]}" if at < len(silos) else f"in row {row}"


def _instance(name: str, thing: Any) -> Loss:
    """A loss that another package offers: an instance, a class whose options all have defaults, or a function."""
    if isinstance(thing, type):
        thing = thing() if issubclass(thing, Loss) else None
    if not (isinstance(thing, Loss) or callable(thing)):
        raise TypeError("it must derive from fedcomposite.problems.Loss, or be a function of margins and targets")
    return _whole(thing) if isinstance(thing, Loss) else Written(thing)


def _whole(loss: Loss) -> Loss:
    """A loss that says all that is needed of it."""
    for name, what in (("curvature", "bound on its second derivative"), ("slope", "bound on its first derivative")):
        if not hasattr(loss, name):
            raise ValueError(
                f"the loss {type(loss).__name__} lacks {name}, a {what}: {name} = math.inf if there is none"
            )
    return loss


LOSSES: Registry[Loss] = Registry(
    "loss",
    {
        "absolute": Absolute(),
        "cox": Cox(),
        "hinge": Hinge(),
        "hinge_sum": Hinge(reduction="sum"),
        "huber": Huber(),
        "least_squares": LeastSquares(),
        "logistic": Logistic(),
        "multinomial": Multinomial(),
        "poisson": Poisson(),
        "quantile": Quantile(),
        "squared_hinge": SquaredHinge(),
    },
    group="fedcomposite.losses",
    accept=_instance,
)


def get_loss(loss: str | Loss | LossFunction, options: Mapping[str, Any] | None = None) -> Loss:
    """Look a loss up by name and set its options; a :class:`Loss` is taken as it is, a function as :class:`Written`.

    >>> get_loss("huber", {"delta": 2})
    Huber(delta=2.0)
    """
    if not (options is None or isinstance(options, Mapping)):
        raise ValueError(f"loss_options = {options!r:.60}, must be a dictionary, such as {{'delta': 2.0}}")
    options = dict(options or {})
    if isinstance(loss, type):
        raise ValueError(f"loss = {loss.__name__} is a class: make one of it, loss={loss.__name__}()")
    if not isinstance(loss, str):
        made = _whole(loss) if isinstance(loss, Loss) else Written(loss)
        if options:
            raise ValueError(f"loss_options = {options} go with the name of a loss; {made} has its options already")
        return made
    default: Any = LOSSES[loss]
    known = [f.name for f in dataclasses.fields(default)]
    for given in options:
        if given not in known:
            its = f"its options: {', '.join(known)}" if known else "it has none"
            raise ValueError(f"the loss {loss!r} has no option {given!r}{suggest(given, known)} ({its})")
    chosen: Loss = dataclasses.replace(default, **options)
    return chosen
