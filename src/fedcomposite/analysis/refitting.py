"""The surviving weights of a sparse model once more, without the regularizer that shrank them."""

from __future__ import annotations

from typing import Any, Unpack, overload

from torch import Tensor

from fedcomposite._validation import ZeroOrMore, as_vector, buffers_of, check_call
from fedcomposite.algorithms import AnyAlgorithm
from fedcomposite.analysis.newton import on_support, plan_of
from fedcomposite.problems import Problem
from fedcomposite.runtime import Run, simulate
from fedcomposite.runtime.driver import Driver, driver_of
from fedcomposite.runtime.fit import check_given
from fedcomposite.runtime.simulator import SimulateOptions


@overload
def refit(problem: Problem, x: Any, *, driver: Driver | None = None, tolerance: float = 1e-10) -> Tensor: ...
@overload
def refit(
    problem: Problem, x: Any, algorithm: AnyAlgorithm, *, rounds: int, **settings: Unpack[SimulateOptions]
) -> Run: ...
def refit(
    problem: Problem,
    x: Any,
    algorithm: AnyAlgorithm | None = None,
    *,
    driver: Driver | None = None,
    tolerance: ZeroOrMore = 1e-10,
    **settings: Any,
) -> Tensor | Run:
    """The model without its regularizer, on the coordinates that x has and on those that were not regularized.

    Zeros stay exactly zero. A linear model is solved for, or trained in rounds if a method is given; a network is
    trained.

    Parameters
    ----------
    problem : Problem
        With the regularizer that made the zeros.
    x : Tensor, array, Run, Best or estimator
        The sparse model: a solution, an estimator, a run, or a run's best model, whose running statistics a network
        goes on with.
    algorithm : Algorithm, optional
        A method with a prox; for a network a small step, for example ``FedMid(5, 0.01)``, which is FedAvg here.
    driver : Driver, optional
        Who answers, where a linear model is solved for.
    tolerance : float
        Of that solution.
    settings
        With a method: those of :func:`fedcomposite.simulate`, ``rounds`` among them.

    Returns
    -------
    Tensor or Run
        The solution; with a method the run, whose objective is the loss alone.
    """
    named = {} if algorithm is None else {"algorithm": algorithm}
    check_given(refit, {"problem": problem, "x": x, "driver": driver, "tolerance": tolerance, **named})
    point = as_vector(x)
    if algorithm is None:
        if problem.model is not None:
            raise ValueError("a network is refitted in rounds: refit(problem, run, FedMid(5, 0.01), rounds=20)")
        if settings:
            raise ValueError(f"refit: {', '.join(settings)} without a method; give one, for example FedNMap")
        driver = driver_of(problem, driver)
        plan = plan_of(problem, driver.centre, tolerance=tolerance)
        return driver.run([on_support(point.double(), problem.regularizer, plan)])[0].x
    if driver is not None:
        raise ValueError("refit: a driver is for linear models, which are solved for; leave it or the method out")
    check_call("refit", simulate, settings)
    kept = (point != 0).cpu() | ~problem.regularizer.acts_on(len(point))
    settings.setdefault("dtype", point.dtype)
    return simulate(problem.on_support(kept, point, buffers_of(x)), algorithm, x0=point, **settings)
