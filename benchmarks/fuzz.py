"""Random problems, and whether what says "converged" is right.

    python -m benchmarks.fuzz                        # 2,000 problems of seed 0
    python -m benchmarks.fuzz --seed 3 --cases 300 --kind solve
    python -m benchmarks.fuzz --seed 0 --case 17     # one of them again

Estimators, ``fc.solve``, ``fc.path`` and ``fc.confidence`` on all losses and regularizers, few and many samples and
features, sites of very different sizes, awkward scales, weights and offsets. A convex answer's objective, in extended
precision, is set beside the minimum that cvxpy finds on pooled samples in standard units; any feasible point below the
answer proves it wrong. An answer to a nonconvex problem must be stationary, that is, minimise the convex problem with
its own slopes. Where a linear program finds a direction along which the loss falls for ever there is no minimiser, and
nothing may converge. Intervals are set beside those of least squares and maximum likelihood. One in nine is of times to
an event, with ties, late entries and strata; ``--loss cox`` takes these alone.

Failures: ``wrong`` (converged, above the minimum by more than 1e-6 of max(1, |F|, F(0) - F)), ``endless`` (converged
where there is no minimiser), ``denied`` (a convex problem is said to have no solution, and has one), ``bound`` (a
duality gap below the true gap), ``slow`` (over ten seconds of one core) and ``crash``. Others are counted: ``open``
(not converged, though there is a minimiser), ``none`` (not converged, and there is none), ``reference`` (cvxpy's point
is worse than ours), ``refused`` (an error that says so).
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import torch

import fedcomposite as fc
from benchmarks.fuzz_draw import KINDS, LOSSES, TERMS, Case, draw
from benchmarks.fuzz_oracle import Pooled, attained, convexified, minimised, polished, wald
from benchmarks.fuzz_terms import CONSTRAINTS, Array
from fedcomposite.analysis import UndeterminedWarning

FAILURES = ("wrong", "endless", "denied", "bound", "slow", "crash")
OTHERS = ("ok", "open", "none", "reference", "refused")
TOLERANCE, SECONDS, LIMIT = 1e-6, 10.0, 30
EVENTS = 5  # for each coefficient of a Cox model, from which on its intervals are Wald's by themselves
ROUNDED = 1e-10  # of an estimate: its error where a light sample has it to itself, without a residual, is rounding
REFUSALS = (  # Newton steps do not go with a prox that jumps, and nothing goes with that and a kink
    "is not weakly convex, which Newton steps need",
    "no method here takes both",
    "sets no coordinate to zero",  # total variation alone has no first strength
    "no strength to begin with",  # neither have targets that are all alike
)
NONE = "there is no solution"
_ESTIMATORS = {
    "least_squares": fc.LinearRegression,
    "logistic": fc.LogisticRegression,
    "multinomial": fc.MultinomialRegression,
    "poisson": fc.PoissonRegression,
    "huber": fc.HuberRegression,
    "quantile": fc.QuantileRegression,
    "hinge": fc.LinearSVC,
    "squared_hinge": fc.LinearSVC,
    "cox": fc.CoxRegression,
}


@dataclass(frozen=True)
class Answer:
    """A model that was found for a problem, and what was said of it."""

    x: Array
    converged: bool
    pooled: Pooled
    value: float  # F(x) by the package
    bound: float | None = None  # on F(x) - min F
    denied: bool = False  # whether it says that there is no solution


@dataclass(frozen=True)
class Verdict:
    """What became of a case."""

    number: int
    kind: str
    outcome: str
    seconds: float
    gap: float  # above the reference, relative to max(1, |F|, F(0) - F)
    words: str
    loose: bool = False  # within tolerance, but not relative to |F| and F(0) - F alone

    @property
    def close(self) -> bool:
        """Whether an answer that does not say converged is right all the same."""
        return self.outcome == "open" and self.gap <= TOLERANCE

    @property
    def failed(self) -> bool:
        """Whether it must not be."""
        return self.outcome in FAILURES


class LateError(BaseException):
    """The hard limit of a case; not an Exception, which something might catch."""


def _late(*_: Any) -> None:
    raise LateError


# -- asking the package -----------------------------------------------------------------------------------------------


def asked(case: Case) -> list[Answer]:
    """The package's answers; a path has several."""
    if case.kind == "estimator":
        return [_estimated(case)]
    problem = case.problem()
    if case.kind == "solve":
        run = fc.solve(problem)
        gap = run.certificate is not None and run.certificate.kind == "duality gap"
        bound = run.certificate.value if gap and run.certificate is not None else None
        x = run.solution.double()
        denied = NONE in (run.message or "")
        return [Answer(x.numpy(), run.status == "converged", case.pooled(), problem.objective(x), bound, denied)]
    path = fc.path(problem, count=6)
    pooled = case.pooled()
    chosen = []
    for k in (1, 3, 5):
        term, x = case.term.multiplied(float(path.lambdas[k]) / case.term.strength), path.solutions[k]
        value = replace(case, term=term).problem().objective(x)
        chosen.append(Answer(x.numpy(), bool(path.converged[k]), replace(pooled, term=term), value))
    return chosen


def _estimated(case: Case) -> Answer:
    options: dict[str, Any] = {"pooled": case.weighting == "samples"}
    if case.loss == "cox":
        options["ties"] = case.ties
    else:
        options["fit_intercept"] = case.bias
    if case.loss in ("hinge", "squared_hinge"):
        options["loss"] = case.loss
    elif case.loss in ("quantile", "huber"):
        options[{"quantile": "quantile", "huber": "delta"}[case.loss]] = case.option
    term = case.term
    weights = term.fields.get("weights") if term.name == "L1" else None
    if term.name == "Zero":
        options["lam"] = 0.0
    elif weights is not None and case.classes == 1 and case.unpenalised:
        options |= {"lam": term["lam"], "regularizer": "l1", "penalty_factor": list(weights)}
    else:
        options["regularizer"] = term.build()
    model = _ESTIMATORS[case.loss](**options)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if case.as_arrays and case.offsets is None:
            X, y = (np.concatenate([one[k] for one in case.arrays]) for k in (0, 1))
            sites = np.repeat(np.arange(len(case.arrays)), [len(b) for _, b in case.arrays])
            v = None if case.weights is None else np.concatenate(case.weights)
            model.fit(X, y, sites=sites, sample_weight=v)
        else:
            model.fit(case.silos())
    x, denied = np.asarray(model.solution_), any(NONE in str(one.message) for one in said)
    return Answer(x, bool(model.converged_), case.pooled(), case.problem().objective(x), denied=denied)


# -- judging ----------------------------------------------------------------------------------------------------------


def judged(answer: Answer) -> tuple[str, float, str, bool]:
    """The outcome, the relative gap, what to say, and whether the gap is small only beside 1."""
    p, x = convexified(answer.pooled, answer.x), answer.x
    if not np.isfinite(x).all():
        return ("wrong", np.inf, "not finite", False) if answer.converged else ("open", np.inf, "not finite", False)
    own = p.value(x)
    if not np.isfinite(own) and answer.pooled.term.name in CONSTRAINTS:
        outside = not np.isfinite(answer.pooled.term.value(p.split(x)[0].ravel()))
        word = "outside the constraint's set" if outside else "the loss overflows"
        return ("wrong", np.inf, word, False) if answer.converged else ("open", np.inf, word, False)
    if p is not answer.pooled and answer.converged:  # nonconvex: no minimum can be asked for, but some descent
        first, now = answer.pooled.value(p.start()), answer.pooled.value(x)
        if now > first + TOLERANCE * max(1.0, abs(first)):
            return "wrong", (now - first) / max(1.0, abs(first)), f"F = {now:.9g}, at zero {first:.9g}", False
    whole = answer.pooled.value(x)
    lost = 0.0 if answer.converged else answer.pooled.rounding(x)  # far out, which no solution may be
    if abs(whole - answer.value) > TOLERANCE * max(1.0, abs(whole)) + lost:
        return "wrong", np.inf, f"the objective is {answer.value:.9g}, by its formula {whole:.9g}", False
    exists = attained(p)
    if exists is False:
        return ("endless" if answer.converged else "none"), 0.0, f"F = {own:.6g}, |x| = {abs(x).max():.3g}", False
    point, status = reference(p, own)
    best = p.value(point)
    scale = max(abs(best), p.value(p.start()) - best)
    gap, relative = (own - best) / max(1.0, scale), (own - best) / max(scale, 1e-300)
    said = f"F = {own:.9g}, reference {best:.9g} ({status})"
    if answer.bound is not None and p is answer.pooled and own - best > answer.bound + 1e-10 * max(1.0, abs(own)):
        return "bound", gap, f"{said}, bound {answer.bound:.2g}", False
    if answer.denied and exists and p is answer.pooled and "optimal" in status:
        return "denied", gap, f"{said} at |x| = {abs(point).max():.3g}", False
    if gap > TOLERANCE:
        return ("wrong" if answer.converged else "open"), gap, said, False
    if gap < -TOLERANCE:
        return "reference", gap, said, False
    return ("ok" if answer.converged else "open"), gap, said, relative > TOLERANCE


def reference(p: Pooled, own: float) -> tuple[Array, str]:
    """The best point that is found, and cvxpy's word; a second try where the first is no better than ours."""
    x, status = minimised(p)
    x = min((x, p.start()), key=p.value)
    if status != "optimal" or p.value(x) > own + TOLERANCE * max(1.0, abs(own)):
        again, second = minimised(p, tol_gap_abs=1e-8, tol_gap_rel=1e-8, tol_feas=1e-8)
        x, status = polished(p, min((x, again), key=p.value)), f"{status}, {second}"
    return x, status


@dataclass(frozen=True)
class Intervals:
    """Tables of intervals, or why there are none."""

    table: pd.DataFrame | None  # of Wald's
    steps: pd.DataFrame | None  # by default, which are others where a Cox model has few events
    said: list[warnings.WarningMessage]
    refused: str = ""


def tabulated(case: Case) -> Intervals:
    """The package's intervals."""
    p, problem = case.pooled(), case.problem()
    # with fewer events, as samples' weights count them, two steps take the place of Wald's, which have to be asked for
    v = p.o if case.weights is None else np.concatenate(case.weights)
    least = [(v > 0).sum() * (w @ (p.y[:, 1] > 0)) / w.sum() for w in (p.o, v)] if case.loss == "cox" else [np.inf]
    told = min(least) >= EVENTS * p.d
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        x = fc.solve(problem).solution
        try:
            table = fc.confidence(problem, x, jeffreys=0, inverse="auto" if told else "exact")
            steps = table if told else fc.confidence(problem, x, jeffreys=0)
        except ValueError as error:
            return Intervals(None, None, [], str(error).splitlines()[0][:100])
    return Intervals(table, steps, said)


def beside_likelihood(case: Case, found: Intervals) -> tuple[str, float, str, bool]:
    """Whether the intervals of a regularized model are those of the unregularized one."""
    table, steps, said = found.table, found.steps, found.said
    if table is None or steps is None:
        return "refused", 0.0, found.refused, False
    p = replace(case.pooled(), term=replace(case.term, name="Zero", fields={}))
    exists = attained(p)
    if exists is not True:
        quiet = exists is False and bool(np.isfinite(table["se"]).all()) and not said
        return ("endless" if quiet else "none"), 0.0, "intervals without a maximum of the likelihood", False
    right = wald(p, robust=case.weighting == "uniform" or case.weights is not None)
    lost, none = np.isnan(table["se"].to_numpy()), np.isnan(right.se)
    if (none != lost).any():
        return "wrong", np.inf, f"NaN where {lost.tolist()}, not {none.tolist()}", False
    if lost.any() and not any(issubclass(one.category, UndeterminedWarning) for one in said):
        return "wrong", np.inf, "NaN without a warning", False
    known = ~none
    if not np.isfinite(steps[["estimate", "se"]].to_numpy()[known]).all():
        return "wrong", np.inf, "two steps end nowhere", False
    if not known.any():
        return "ok", 0.0, "", False
    size = np.maximum(abs(right.estimate), right.se)[known]
    off = float((abs(table["estimate"].to_numpy() - right.estimate)[known] / size).max())
    least = np.maximum(right.se, 1e-12 * abs(right.estimate))
    wrong = abs(table["se"].to_numpy() - right.se) / least
    zero = np.maximum(table["se"].to_numpy(), right.se) < ROUNDED * abs(right.estimate)
    wide = float(np.where(zero, 0.0, wrong)[known].max())
    words = f"estimates off by {off:.1e}, errors by {wide:.1e}"
    return ("wrong" if max(off, wide) > 1e-5 else "ok"), max(off, wide), words, False


def run(seed: int, number: int) -> Verdict:
    """Draw a case, ask, and judge."""
    torch.set_num_threads(1)
    case = draw(seed, number)
    signal.signal(signal.SIGPROF, _late)
    signal.setitimer(signal.ITIMER_PROF, LIMIT)
    began = time.process_time()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            answers = [tabulated(case)] if case.kind == "confidence" else asked(case)
            seconds = time.process_time() - began
            signal.setitimer(signal.ITIMER_PROF, 4 * LIMIT)
            found = [beside_likelihood(case, a) if isinstance(a, Intervals) else judged(a) for a in answers]
    except LateError:
        return Verdict(number, case.kind, "slow", time.process_time() - began, 0.0, f"{case}: over {LIMIT} s")
    except Exception as error:
        if any(words in str(error) for words in REFUSALS):
            return Verdict(number, case.kind, "refused", time.process_time() - began, 0.0, f"{case}: {error!s:.100}")
        place = traceback.extract_tb(error.__traceback__)[-1]
        words = f"{case}: {type(error).__name__} {str(error)[:100]!r} at {place.filename.split('/')[-1]}:{place.lineno}"
        return Verdict(number, case.kind, "crash", time.process_time() - began, 0.0, words)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    rank = [*FAILURES, "reference", "open", "refused", "none", "ok"]
    outcome, gap, words, loose = min(found, key=lambda one: rank.index(one[0]))
    if seconds > SECONDS and outcome not in FAILURES:
        outcome = "slow"
    return Verdict(number, case.kind, outcome, seconds, gap, f"{case}: {words}", loose)


# -- the command ------------------------------------------------------------------------------------------------------


def verdicts(seed: int, numbers: list[int], jobs: int) -> Iterator[Verdict]:
    """All of them, as they come."""
    if jobs == 1:
        yield from (run(seed, k) for k in numbers)
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(run, [seed] * len(numbers), numbers, chunksize=4)


def show(found: list[Verdict]) -> None:
    """The summary."""
    heads = ("cases", *FAILURES, *OTHERS, "open,right", "loose", "seconds")
    print(f"\n{'':<12}" + "".join(f"{name:>11}" for name in heads))
    for kind in (*KINDS, "all"):
        own = [v for v in found if kind in (v.kind, "all")]
        if own:
            count = Counter(v.outcome for v in own)
            cells = [len(own), *(count[name] for name in (*FAILURES, *OTHERS))]
            cells += [sum(v.close for v in own), sum(v.loose for v in own)]
            print(f"{kind:<12}" + "".join(f"{c:>11}" for c in cells) + f"{sum(v.seconds for v in own):>11.1f}")
    share, slowest = sum(v.outcome == "open" for v in found) / len(found), max(v.seconds for v in found)
    print(f"\nnot converged though there is a minimiser: {100 * share:.1f} %; slowest {slowest:.1f} s")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--case", type=int, help="this one only")
    parser.add_argument("--kind", choices=KINDS)
    parser.add_argument("--loss", choices=(*LOSSES, "cox"))
    parser.add_argument("--term", choices=sorted(set(TERMS)), help="the regularizer")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--all", action="store_true", help="print every case, not failures alone")
    given = parser.parse_args(argv)
    numbers = list(range(given.first, given.first + given.cases)) if given.case is None else [given.case]
    wanted = (given.kind, given.loss, given.term)
    if given.case is None and any(wanted):
        cases = {k: draw(given.seed, k) for k in numbers}
        own = {k: (c.kind, c.loss, c.term.name) for k, c in cases.items()}
        numbers = [k for k in numbers if all(w in (None, o) for w, o in zip(wanted, own[k], strict=True))]
    found = []
    for v in verdicts(given.seed, numbers, given.jobs):
        found.append(v)
        if v.failed or given.all or given.case is not None:
            line = f"{v.outcome:<10} gap {v.gap:8.1e} {v.seconds:5.1f} s  {v.words}"
            print(f"{line}  # python -m benchmarks.fuzz --seed {given.seed} --case {v.number}", flush=True)
    if given.case is None and found:
        show(found)
    return int(any(v.failed for v in found))


if __name__ == "__main__":
    sys.exit(main())
