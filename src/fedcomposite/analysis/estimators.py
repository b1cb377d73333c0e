"""Estimators with scikit-learn's conventions: ``fit(silos)``, or ``fit(X, y, sites=...)``.

Their options are those of :class:`fedcomposite.analysis.estimator.LinearModel`; classifiers also have ``class_weight``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self, Unpack

import numpy as np
import scipy  # which loads what is used of it
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.metrics import d2_tweedie_score
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from fedcomposite._validation import ZeroOrMore
from fedcomposite.analysis.common_baseline import common_baseline
from fedcomposite.analysis.estimator import Array, LinearModel, Options, with_options
from fedcomposite.analysis.survival_curves import baseline_hazard
from fedcomposite.data import Silos
from fedcomposite.data.arrays import NO_ENTRY, as_targets
from fedcomposite.problems import Loss, Problem
from fedcomposite.problems.concordance import pairs
from fedcomposite.problems.losses import (
    Cox,
    Hinge,
    Huber,
    LeastSquares,
    Logistic,
    Multinomial,
    Poisson,
    Quantile,
    SquaredHinge,
)
from fedcomposite.runtime.driver import Driver


class _Regressor(RegressorMixin, LinearModel):  # type: ignore[misc]
    @with_options(LinearModel.__init__)
    def __init__(self, lam: ZeroOrMore | Literal["cv"] | None = None, **options: Unpack[Options]) -> None:
        LinearModel.__init__(self, lam, **options)  # by its name, which editors follow

    def _split(self, problem: Problem, x: Tensor) -> None:
        super()._split(problem, x)
        self.intercept_ = float(self.intercept_[0])

    def predict(self, X: Any) -> Array:
        """The predicted targets."""
        return self._margins(X)


class ClassifierOptions(Options, total=False):
    """Those of a classifier."""

    class_weight: Literal["balanced"] | Mapping[Any, float] | None


class _Classifier(ClassifierMixin, LinearModel):  # type: ignore[misc]
    classes_: Array

    @with_options(LinearModel.__init__)
    def __init__(
        self,
        lam: ZeroOrMore | Literal["cv"] | None = None,
        *,
        class_weight: Literal["balanced"] | Mapping[Any, float] | None = None,
        **options: Unpack[Options],
    ) -> None:
        LinearModel.__init__(self, lam, **options)
        self.class_weight = class_weight

    def _class_weight(self) -> Literal["balanced"] | Mapping[float, float] | None:
        given, codes = self.class_weight, {label: float(code) for code, label in enumerate(self.classes_)}
        if given is None or given == "balanced":
            return given
        shown = ", ".join(map(str, self.classes_))
        if not isinstance(given, Mapping) or not set(given) <= set(codes):
            raise ValueError(f"class_weight = {given!r:.60}, must be 'balanced' or have numbers > 0 by class ({shown})")
        return {codes[label]: weight for label, weight in given.items()}

    def _learn(self, y: Array) -> None:
        check_classification_targets(y)
        self.classes_ = np.unique(y)
        if len(self.classes_) < 2:
            raise ValueError(f"a classifier needs two classes, and all targets are of one class, {self.classes_[0]}")

    def _coded(self, y: Array) -> Array:
        unknown = ~np.isin(y, self.classes_)
        if unknown.any():
            raise ValueError(f"the class {y[unknown][0]!r} is new: the model has {', '.join(map(str, self.classes_))}")
        return np.searchsorted(self.classes_, y)


class _Binary(_Classifier):
    """A model of two classes."""

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_class = False
        return tags

    def _learn(self, y: Array) -> None:
        super()._learn(y)
        if len(self.classes_) > 2:
            raise ValueError(
                "Only binary classification is supported. The type of the target is multiclass, with "
                f"{len(self.classes_)} classes; take MultinomialRegression"
            )

    def _split(self, problem: Problem, x: Tensor) -> None:
        super()._split(problem, x)
        self.coef_ = self.coef_.reshape(1, -1)

    def decision_function(self, X: Any) -> Array:
        """Margins; above zero for the second class."""
        return self._margins(X).ravel()

    def predict(self, X: Any) -> Array:
        """The predicted classes."""
        check_is_fitted(self)
        return np.asarray(self.classes_[(self.decision_function(X) > 0).astype(int)])


class LinearRegression(_Regressor):
    """Least squares: the mean of (z - y)^2 / 2, plus h if a regularizer is given.

    Examples
    --------
    >>> import fedcomposite as fc
    >>> silos = fc.data.load("diabetes").partition("iid", clients=3).standardize()
    >>> plain, lasso = fc.LinearRegression().fit(silos), fc.LinearRegression(5.0, regularizer="l1").fit(silos)
    >>> int((plain.coef_ != 0).sum()), int((lasso.coef_ != 0).sum())
    (10, 5)
    """

    def _loss(self) -> Loss:
        return LeastSquares()


class LogisticRegression(_Binary):
    """Logistic regression for two classes, without a regularizer unless one is given.

    Examples
    --------
    >>> import fedcomposite as fc
    >>> silos = fc.data.load("synthetic", clients=5, features=6, samples=40)
    >>> model = fc.LogisticRegression(0.02, regularizer="l1").fit(silos)
    >>> model.coef_.shape, model.predict_proba(silos.features[:3]).shape, model.n_iter_ < 10
    ((1, 6), (3, 2), True)
    """

    def _loss(self) -> Loss:
        return Logistic()

    def predict_proba(self, X: Any) -> Array:
        """Probabilities of the two classes."""
        p = scipy.special.expit(self.decision_function(X))
        return np.stack([1 - p, p], axis=1)

    def predict_log_proba(self, X: Any) -> Array:
        """Logarithms of the classes' probabilities, finite where a probability rounds to zero."""
        z = self.decision_function(X)
        return np.stack([scipy.special.log_expit(-z), scipy.special.log_expit(z)], axis=1)


class MultinomialRegression(_Classifier):
    """Multinomial logistic regression: a margin per class."""

    def _loss(self) -> Loss:
        return Multinomial(tuple(range(len(self.classes_))))

    def decision_function(self, X: Any) -> Array:
        """Margins, one per class; for two classes that of the second over the first."""
        z = self._margins(X)
        return z[:, 1] - z[:, 0] if z.shape[1] == 2 else z

    def predict(self, X: Any) -> Array:
        """The predicted classes."""
        check_is_fitted(self)
        return np.asarray(self.classes_[self._margins(X).argmax(1)])

    def predict_proba(self, X: Any) -> Array:
        """Probabilities of the classes."""
        return np.asarray(scipy.special.softmax(self._margins(X), axis=1))

    def predict_log_proba(self, X: Any) -> Array:
        """Logarithms of the classes' probabilities, finite where a probability rounds to zero."""
        return np.asarray(scipy.special.log_softmax(self._margins(X), axis=1))


class PoissonRegression(_Regressor):
    """Poisson regression of counts, with the logarithm as link."""

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.positive_only = True
        return tags

    def _loss(self) -> Loss:
        return Poisson()

    def predict(self, X: Any) -> Array:
        return np.exp(self._margins(X))

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """The share of the deviance that is explained."""
        return float(d2_tweedie_score(y, self.predict(X), sample_weight=sample_weight, power=1))


class HuberRegression(_Regressor):
    """Least squares with large residuals counted linearly, from ``delta`` on, in the units of y."""

    @with_options(LinearModel.__init__)
    def __init__(
        self,
        lam: ZeroOrMore | Literal["cv"] | None = None,
        *,
        delta: float = 1.0,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(lam, **options)
        self.delta = delta

    def _loss(self) -> Loss:
        return Huber(self.delta)


class LinearSVC(_Binary):
    """A support vector machine with the squared hinge loss, or with the hinge loss.

    The hinge has a kink: Newton steps follow a barrier whose width falls, and a dual point bounds what is left.
    """

    @with_options(_Classifier.__init__)
    def __init__(
        self,
        lam: ZeroOrMore | Literal["cv"] | None = None,
        *,
        loss: Literal["squared_hinge", "hinge"] = "squared_hinge",
        **options: Unpack[ClassifierOptions],
    ) -> None:
        super().__init__(lam, **options)
        self.loss = loss

    def _loss(self) -> Loss:
        if self.loss not in ("squared_hinge", "hinge"):
            raise ValueError(f"loss = {self.loss!r}, must be 'squared_hinge' or 'hinge'")
        return SquaredHinge() if self.loss == "squared_hinge" else Hinge()


class QuantileRegression(_Regressor):
    """Regression to a quantile of y.

    The loss has a kink: Newton steps follow a barrier whose width falls, and a dual point bounds what is left.
    """

    @with_options(LinearModel.__init__)
    def __init__(
        self,
        lam: ZeroOrMore | Literal["cv"] | None = None,
        *,
        quantile: float = 0.5,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(lam, **options)
        self.quantile = quantile

    def _loss(self) -> Loss:
        return Quantile(self.quantile)


class CoxRegression(LinearModel):
    """Cox's model of times to an event: hazards that are proportional, with a baseline of each site's own.

    Targets have the columns time and event (1, or 0 if censored), and if wanted entry and stratum; or they are a
    structured array as scikit-survival's ``Surv``. There is no intercept. ``baseline="common"`` compares patients of
    different sites as well, as if all had one baseline; see :func:`fedcomposite.analysis.common_baseline`.

    Attributes
    ----------
    baseline_ : DataFrame
        Breslow's cumulated baseline hazard: ``site`` (``"all"`` is of all, as if they had one), ``time``,
        ``cumulative_hazard``.

    Examples
    --------
    >>> import fedcomposite as fc
    >>> silos = fc.data.load("survival", clients=3, samples=100)
    >>> X, y = (v.numpy() for v in silos[0])
    >>> model = fc.CoxRegression(0.02, regularizer="l1").fit(X, y)
    >>> model.predict_survival_function(X[:2], times=[12.0, 60.0]).shape, model.score(X, y) > 0.6
    ((2, 2), True)
    """

    @with_options(LinearModel.__init__)
    def __init__(
        self,
        lam: ZeroOrMore | Literal["cv"] | None = None,
        *,
        ties: Literal["breslow", "efron"] = "breslow",
        baseline: Literal["site", "common"] = "site",
        **options: Unpack[Options],
    ) -> None:
        super().__init__(lam, **options)
        self.ties = ties
        self.baseline = baseline

    @property
    def _with_intercept(self) -> bool:
        return False

    def _loss(self) -> Loss:
        return Cox(self.ties)

    def _driver(self, problem: Problem) -> Driver:
        if self.baseline not in ("site", "common"):
            raise ValueError(f"baseline = {self.baseline!r}, must be 'site' or 'common'")
        return super()._driver(problem) if self.baseline == "site" else common_baseline(problem)

    def _checked(self, X: Any, y: Any) -> tuple[Array, Array]:
        if y is None:
            raise ValueError("requires y to be passed, but the target y is None: give times and events")
        made = validate_data(self, X, dtype=np.float64)
        return made, self._times(y, len(made))

    def _times(self, y: Any, samples: int) -> Array:
        """Targets as numbers, whatever they were given as."""
        made: Array = as_targets(y, "y").double().numpy()
        if made.ndim != 2 or len(made) != samples:
            raise ValueError(
                f"y has shape {made.shape}, expected ({samples}, 2): the time of each sample, and its event"
            )
        return made

    def fit(
        self, X: Any, y: Any = None, *, sites: Any = None, sample_weight: Any = None, entry: Any = None,
        strata: Any = None
    ) -> Self:  # fmt: skip
        """Fit the model.

        Parameters
        ----------
        X : Silos or array
            The sites' data; or features, ``(samples, features)``.
        y : array, optional
            Times and events, with an array of features.
        sites : array, optional
            The site of each sample, with an array of features; one site if left out.
        sample_weight : array, optional
            What each sample counts, with an array of features.
        entry : array, optional
            When each sample came under observation, with an array of features.
        strata : array, optional
            Numbers or texts: samples with different ones have different baselines, also within a site.
        """
        if not isinstance(X, Silos) and y is not None and (entry is not None or strata is not None):
            y = self._times(y, len(X))[:, :2]
            came = np.full(len(y), NO_ENTRY) if entry is None else np.asarray(entry, float)
            groups = np.zeros(len(y)) if strata is None else np.unique(strata, return_inverse=True)[1]
            y = np.column_stack([y, came, groups])
        super().fit(X, y, sites=sites, sample_weight=sample_weight)
        return self

    def _split(self, problem: Problem, x: Tensor) -> None:
        super()._split(problem, x)
        self.intercept_ = 0.0
        self.baseline_ = baseline_hazard(problem, x)

    def predict(self, X: Any) -> Array:
        """Margins a'x, the logarithms of hazards relative to the baseline: larger is earlier."""
        return self._margins(X)

    def predict_cumulative_hazard_function(self, X: Any, times: Any = None, *, site: str = "all") -> Array:
        """Cumulated hazards, ``(samples, times)``, with the baseline of a site, or that of all.

        ``times`` are those of the baseline if left out (``baseline_``).
        """
        margins = self._margins(X)
        own = self.baseline_[self.baseline_["site"] == site]
        if own.empty:
            raise ValueError(f"site = {site!r}, must be one of {', '.join(self.baseline_['site'].unique())}")
        steps, values = own["time"].to_numpy(), np.append(0.0, own["cumulative_hazard"].to_numpy())
        at = steps if times is None else np.asarray(times, float)
        return np.asarray(np.exp(margins)[:, None] * values[np.searchsorted(steps, at, side="right")])

    def predict_survival_function(self, X: Any, times: Any = None, *, site: str = "all") -> Array:
        """Probabilities to be without an event, ``(samples, times)``, with the baseline of a site, or that of all."""
        return np.exp(-self.predict_cumulative_hazard_function(X, times, site=site))

    def score(self, X: Any, y: Any, sites: Any = None) -> float:
        """Harrell's concordance index; pairs are of samples of the same site, where sites are given."""
        z = self.predict(X)
        b = Cox().prepare(None, as_targets(self._times(y, len(z)), "y")).numpy()  # type: ignore[arg-type]
        label = np.zeros(len(z)) if sites is None else np.unique(sites, return_inverse=True)[1]
        group = np.unique(np.stack([label, b[:, 3]], 1), axis=0, return_inverse=True)[1].reshape(-1)
        found = pairs(z, b[:, 0], b[:, 1], b[:, 2], group)
        return float((found.right.sum() + found.tied.sum() / 2) / found.all.sum())
