"""What all estimators have in common: options, silos from arrays, the term h, the fit."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal, Self, TypedDict, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import Tensor

from fedcomposite._validation import Count, Natural, Positive, ZeroOrMore, renamed
from fedcomposite.analysis.cross_validation import cross_validate
from fedcomposite.analysis.newton import fit_any, plan_of
from fedcomposite.analysis.paths import Several
from fedcomposite.analysis.solve import KINK_ROUNDS, NEWTON_ROUNDS, explained
from fedcomposite.analysis.strengths import varies
from fedcomposite.data import Silos
from fedcomposite.problems import Loss, Problem
from fedcomposite.regularizers import L1, L2Squared, Regularizer
from fedcomposite.regularizers.factors import PenaltyFactor, strength, varied
from fedcomposite.runtime.driver import Driver, driver_of
from fedcomposite.runtime.fit import check_given

Array = npt.NDArray[Any]
Choice = Literal["min", "1se", "aic", "bic", "ebic"] | Positive

_TOLD_BY_PROBLEM = ("regularizer",)
_NAMED: dict[str, Regularizer] = {"l1": L1(1.0), "l2": L2Squared(1.0)}


def without_penalty(features: Any) -> dict[Any, float]:
    """The factors of features that are left alone."""
    if features is None or not isinstance(features, Iterable):
        raise ValueError(f"unpenalised = {features!r}, must be a list of features, by number or name")
    return dict.fromkeys([features] if isinstance(features, str) else features, 0.0)


def is_pooled(weights: Any) -> bool:
    """Whether sites count by their samples, in the words of a problem."""
    if weights not in ("samples", "uniform"):
        raise ValueError(f"weights = {weights!r}, must be 'samples' or 'uniform'; give pooled=True or False")
    return bool(weights == "samples")


class Options(TypedDict, total=False):
    """The options of every estimator, as :class:`LinearModel` tells them."""

    regularizer: Literal["l1", "l2"] | Regularizer | None
    penalty_factor: PenaltyFactor | None
    fit_intercept: bool
    pooled: bool
    folds: Literal["sites"] | Several
    choice: Choice
    scoring: Literal["deviance", "auc", "error"]
    count: Several
    seed: Natural
    tolerance: ZeroOrMore
    rounds: Count | None
    seconds: Positive | None


_Init = TypeVar("_Init", bound=Callable[..., None])


def with_options(base: Callable[..., None]) -> Callable[[_Init], _Init]:
    """Spell ``**options``, which a constructor passes on to ``base``, out in its signature: scikit-learn reads it."""

    def decorate(init: _Init) -> _Init:
        own, shared = inspect.signature(init), inspect.signature(base).parameters
        named = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
        more = [p for name, p in shared.items() if name not in own.parameters]
        init.__signature__ = own.replace(parameters=[*named, *more])  # type: ignore[attr-defined]
        return init

    return decorate


class LinearModel(BaseEstimator):  # type: ignore[misc]
    """A linear model over sites.

    Parameters
    ----------
    lam : float or "cv", optional
        The strength of the regularizer; ``"cv"`` chooses it by cross-validation. Left out, it is the regularizer's
        own.
    regularizer : {"l1", "l2"} or Regularizer, optional
        The term h, which does not act on intercepts: ``"l1"`` is lam times the sum of absolute values (the lasso),
        ``"l2"`` is lam times half the sum of squares (ridge); or any convex or weakly convex term. None if left out:
        the loss alone is minimised.
    penalty_factor : mapping or sequence of float, optional
        What each feature's term is multiplied by, for terms that act on each coordinate by itself: a number for each,
        or ``{"age": 0.0}`` for some by name or place. 0 leaves a feature alone; see :class:`fedcomposite.Problem`.
    fit_intercept : bool
        Whether to add an intercept; a model of times to an event has none in any case.
    pooled : bool
        Whether sites count by their samples, as if these were pooled, or alike: ``weights="samples"`` or ``"uniform"``
        of a :class:`fedcomposite.Problem`.
    folds, scoring, count, seed
        Of the cross-validation; see :func:`fedcomposite.cross_validate`.
    choice : str or float
        Which of its models: ``"1se"``, the strongest regularizer within a standard error of the best score; ``"min"``,
        the best score; ``"aic"``, ``"bic"``, ``"ebic"``; or a strength.
    tolerance : float
        Of the optimality measure, relative to the first gradient.
    rounds : int, optional
        Most exchanges; 100, or 500 where the loss has kinks, if left out.
    seconds : float, optional
        Most time; the best model by then is kept, and ``converged_`` says whether it is the solution.

    Attributes
    ----------
    coef_, intercept_ : array
        As in scikit-learn.
    solution_ : array
        The model as a :class:`fedcomposite.Problem` has it.
    n_iter_ : int
        Exchanges that the fit took.
    converged_ : bool
        Whether a certificate says that it is the solution; if not, ``fit`` warns and says why.
    lam_ : float
        The strength, chosen or given; 0 for a constraint, which has none.
    cv_scores_ : DataFrame
        The scores of a cross-validation; with ``lam="cv"`` only.
    """

    @renamed(
        penalty_factors="penalty_factor",
        unpenalised=("penalty_factor", without_penalty),
        weights=("pooled", is_pooled),
        max_rounds="rounds",
    )
    def __init__(
        self,
        lam: ZeroOrMore | Literal["cv"] | None = None,
        *,
        regularizer: Literal["l1", "l2"] | Regularizer | None = None,
        penalty_factor: PenaltyFactor | None = None,
        fit_intercept: bool = True,
        pooled: bool = True,
        folds: Literal["sites"] | Several = 10,
        choice: Choice = "1se",
        scoring: Literal["deviance", "auc", "error"] = "deviance",
        count: Several = 100,
        seed: Natural = 0,
        tolerance: ZeroOrMore = 1e-8,
        rounds: Count | None = None,
        seconds: Positive | None = None,
    ) -> None:
        self.lam = lam
        self.regularizer = regularizer
        self.penalty_factor = penalty_factor
        self.fit_intercept = fit_intercept
        self.pooled = pooled
        self.folds = folds
        self.choice = choice
        self.scoring = scoring
        self.count = count
        self.seed = seed
        self.tolerance = tolerance
        self.rounds = rounds
        self.seconds = seconds

    # -- what the kinds have of their own -----------------------------------------------------------------------------

    def _loss(self) -> Loss:
        raise NotImplementedError

    def _driver(self, problem: Problem) -> Driver:
        return driver_of(problem)

    @property
    def _with_intercept(self) -> bool:
        return bool(self.fit_intercept)

    def _learn(self, y: Array) -> None:
        """Look at the targets before they are coded: classifiers set ``classes_``."""

    def _class_weight(self) -> Literal["balanced"] | Mapping[float, float] | None:
        """What samples of a class count, by its code."""
        return None

    def _coded(self, y: Array) -> Array:
        """Targets as the loss takes them."""
        try:
            return np.asarray(y, float)
        except (TypeError, ValueError):
            raise ValueError(f"y has {y[0]!r} in it; {type(self).__name__} needs numbers") from None

    # -- fitting ------------------------------------------------------------------------------------------------------

    def fit(self, X: Any, y: Any = None, *, sites: Any = None, sample_weight: Any = None) -> Self:
        """Fit the model.

        Parameters
        ----------
        X : Silos or array
            The sites' data; or features, ``(samples, features)``.
        y : array, optional
            Targets, with an array of features.
        sites : array, optional
            The site of each sample, with an array of features; one site if left out.
        sample_weight : array, optional
            What each sample counts, with an array of features.
        """
        options = {name: value for name, value in self.get_params(False).items() if name not in _TOLD_BY_PROBLEM}
        check_given(LinearModel.__init__, options)
        if self.regularizer is None and self.lam not in (None, 0):
            warnings.warn(
                f"{type(self).__name__}: lam = {self.lam!r} is the strength of no regularizer; say regularizer='l1', "
                "which this version still takes",
                DeprecationWarning,
                stacklevel=2,
            )
        if isinstance(X, Silos):
            if not (y is None and sites is None and sample_weight is None):
                raise ValueError("fit: silos have targets, sites and weights of their own; leave y and the others out")
            self._learn(X.targets.numpy())
            silos = self._recoded(X)
            self.n_features_in_ = silos.features.shape[1]
            if silos.feature_names:
                self.feature_names_in_ = np.asarray(silos.feature_names, object)
        else:
            silos = self._silos(X, y, sites, sample_weight)
        problem = self._posed(silos, self.lam)
        return self._solved(problem, self._driver(problem))

    def problem(self, silos: Silos) -> Problem:
        """The problem that :meth:`fit` solved, on such silos: for confidence intervals and quality of the model.

        Its regularizer has the strength ``lam_``, also where cross-validation chose it.
        """
        check_is_fitted(self)
        if not isinstance(silos, Silos):
            raise ValueError(
                f"silos = {silos!r:.60}, must be Silos; make them with fc.Silos.from_arrays([(X, y), ...])"
            )
        if silos.features.shape[1] != self.n_features_in_:
            raise ValueError(f"silos have {silos.features.shape[1]} features, the model {self.n_features_in_}")
        return self._posed(self._recoded(silos), self.lam_ if self.lam == "cv" else self.lam)

    def _posed(self, silos: Silos, lam: float | str | None) -> Problem:
        return Problem(
            silos,
            loss=self._loss(),
            regularizer=self._penalty(lam),
            penalty_factor=self.penalty_factor,
            class_weight=self._class_weight(),
            bias=self._with_intercept,
            weights="samples" if self.pooled else "uniform",
        )

    def _recoded(self, silos: Silos) -> Silos:
        held: dict[str, Any] = {
            part: (X, torch.from_numpy(self._coded(y.numpy()))) for part, (X, y) in silos.held_out.items()
        }
        return replace(silos, targets=torch.from_numpy(self._coded(silos.targets.numpy())), **held)

    def _silos(self, X: Any, y: Any, sites: Any, sample_weight: Any) -> Silos:
        names = _names(X)
        if names and (text := [name for name in names if not _numeric(X[name])]):
            raise ValueError(
                f"X: {', '.join(map(repr, text[:5]))} has text; code it first, as fc.Recipe(one_hot=...) does"
            )
        X, y = self._checked(X, y)
        label = np.zeros(len(y), int) if sites is None else np.asarray(sites)
        if label.shape != y.shape[:1]:
            raise ValueError(f"sites has shape {label.shape}, expected {y.shape[:1]}: the site of each sample")
        keep = np.ones(len(y), bool)
        weight = None
        if sample_weight is not None:
            weight = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
            keep = weight > 0
        self._learn(y)
        y = self._coded(y)
        groups = [np.flatnonzero((label == one) & keep) for one in np.unique(label[keep])]
        return Silos.from_arrays(
            [(X[g], y[g]) for g in groups],
            names=[str(one) for one in np.unique(label[keep])],
            feature_names=names,
            weights=None if weight is None else [weight[g] for g in groups],
        )

    def _checked(self, X: Any, y: Any) -> tuple[Array, Array]:
        """Features and targets of arrays, as scikit-learn checks them."""
        made: tuple[Array, Array] = validate_data(
            self, X, y, dtype=np.float64, y_numeric=isinstance(self, RegressorMixin)
        )
        return made

    def _penalty(self, given: float | str | None) -> Regularizer | None:
        """The term h with the strength that is given; its own where that is None or ``"cv"``."""
        base = self._term(given)
        if base is None:
            return None
        if given is not None and not isinstance(given, str):
            if given == 0:
                return None
            if not strength(base) > 0:
                raise ValueError(f"lam = {given!r}: {base} has strength 0, which cannot be multiplied; take L1(1.0)")
            base = varied(base, given / strength(base))
        return base

    def _term(self, given: float | str | None) -> Regularizer | None:
        """The term h before its strength is set."""
        match self.regularizer:
            case None:
                return None if given in (None, 0) else L1(1.0)  # as it was before a term had to be named
            case str(name):
                if name not in _NAMED:
                    known = ", ".join(map(repr, _NAMED))
                    raise ValueError(
                        f"regularizer = {name!r:.60}, must be {known}, a Regularizer such as L1(0.1), or none"
                    )
                if given is None:
                    raise ValueError(f"regularizer = {name!r} has no strength: give lam=0.1, or lam='cv'")
                return _NAMED[name]
        return self.regularizer

    def _solved(self, problem: Problem, driver: Driver) -> Self:
        if self.lam == "cv":
            options: dict[str, Any] = {"folds": self.folds, "seed": self.seed, "scoring": self.scoring}
            options |= {"count": self.count, "tolerance": self.tolerance, "rounds": self._most(problem)}
            options |= {"seconds": self.seconds}
            cv = cross_validate(problem, driver=driver, **options)
            x, self.lam_ = cv.solution(self.choice), float(cv.lambdas[cv.index(self.choice)])
            self.cv_scores_ = cv.scores
            self.lambda_min_, self.lambda_1se_ = cv.lambda_min, cv.lambda_1se
            whole = len(cv.lambdas) == self.count
            self.converged_ = bool(cv.path.converged.all()) and whole
            open_ends = int((~cv.path.converged).sum()) + self.count - len(cv.lambdas)
            reason = (
                "" if self.converged_ else f"{open_ends} of {self.count} strengths did not converge, or not in time"
            )
        else:
            most, ends = self._most(problem), driver.deadline(self.seconds)
            plan = plan_of(problem, driver.centre, tolerance=self.tolerance, rounds=most, deadline=ends)
            start = torch.zeros(problem.dimension, dtype=torch.float64)
            [made] = driver.run([fit_any(problem, start, plan)])
            x, self.converged_ = made.x, made.converged
            reason = "" if made.converged else explained(problem, made.end, made.rounds, made.grown)
            self.lam_ = strength(problem.regularizer) if varies(problem.regularizer) else 0.0
        if reason:
            warnings.warn(f"{type(self).__name__}: {reason}", ConvergenceWarning, stacklevel=3)
        self.n_iter_ = max(driver.exchanges, 1)
        self.solution_ = x.numpy()
        self._split(problem, x)
        return self

    def _most(self, problem: Problem) -> int:
        return self.rounds or (NEWTON_ROUNDS if problem.loss.smooth else KINK_ROUNDS)

    def _split(self, problem: Problem, x: Tensor) -> None:
        """Set coefficients and intercept from a model."""
        slot = problem.layout[0]
        self.coef_ = x[slot.start : slot.stop].view(slot.shape).numpy().T.copy()
        rest = x[slot.stop :].numpy()
        self.intercept_: Any = rest.copy() if problem.bias else np.zeros(self.coef_.shape[0] if slot.shape[1:] else 1)

    def _margins(self, X: Any) -> Array:
        check_is_fitted(self)
        X = validate_data(self, X, dtype=np.float64, reset=False)
        return np.asarray(X @ self.coef_.T + self.intercept_)


def _numeric(column: Any) -> bool:
    try:
        np.asarray(column, float)
    except (TypeError, ValueError):
        return False
    return True


def _names(X: Any) -> list[str]:
    columns = getattr(X, "columns", None)
    return [] if columns is None or not all(isinstance(c, str) for c in columns) else list(columns)
