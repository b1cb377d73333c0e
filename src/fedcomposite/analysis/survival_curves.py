"""Curves of times to an event, and tests about them, from counts and sums that add up over sites.

Curves come from the numbers at risk and of events at the times of a grid. Samples at hand have all of their own times
in it, so that nothing is rounded; sites of a federation tell counts on the grid that is asked for, and no time besides.
Tests are sums that every site makes from its own times, which never leave it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pandas as pd
import scipy  # which loads what is used of it
import torch
from torch import Tensor

from fedcomposite._validation import Inside, as_vector
from fedcomposite.problems import Problem
from fedcomposite.problems.event_tables import kaplan_meier, steps
from fedcomposite.problems.losses import Cox
from fedcomposite.problems.risk_sets import CAUSE, TIME
from fedcomposite.results import Result, counted
from fedcomposite.runtime.driver import Driver, driver_of
from fedcomposite.runtime.fit import check_given
from fedcomposite.runtime.protocol import ALL as EVERYONE
from fedcomposite.runtime.protocol import Silo, Sums, logrank, newton, risk_sums, schoenfeld, timetable
from fedcomposite.runtime.transports.silo_answers import SiloTransport

Floats = npt.NDArray[np.float64]
Transform = Literal["rank", "identity", "log", "km"]


@dataclass(frozen=True, repr=False)
class EventCurves(Result):
    """Kaplan-Meier and Nelson-Aalen curves, and of several causes Aalen and Johansen's."""

    table: pd.DataFrame
    """A row per site, group and time: ``at_risk``, ``censored`` and ``events`` there, ``survival`` and
    ``cumulative_hazard`` behind it with their bounds; with several causes ``events_1``, ..., and ``incidence_1``, ...
    with ``incidence_1_lower`` and ``incidence_1_upper``. The site "all" is the sum of all."""
    level: float

    def of(self, site: str = "all", group: str | None = None) -> pd.DataFrame:
        """The curve of a site and a group."""
        chosen = self.table[self.table["site"] == site]
        if chosen.empty:
            raise ValueError(f"site = {site!r}, must be one of {', '.join(self.table['site'].unique())}")
        groups = list(chosen["group"].unique())
        if group is None and len(groups) > 1:
            raise ValueError(f"there are {len(groups)} groups: choose one of {', '.join(groups)}")
        return chosen[chosen["group"] == (groups[0] if group is None else group)].reset_index(drop=True)

    def at(self, time: float, site: str = "all", group: str | None = None) -> pd.Series[Any]:
        """The last row until a time: of survival and hazards what they are then."""
        curve = self.of(site, group)
        before = curve[curve["time"] <= time]
        if before.empty:
            raise ValueError(f"time = {time:g} is before the first time of the curve, {curve['time'].iloc[0]:g}")
        return before.iloc[-1]

    def median(self, site: str = "all", group: str | None = None) -> float:
        """The first time at which survival is one half or less; infinite if there is none."""
        curve = self.of(site, group)
        low = curve["survival"] <= 0.5
        return float(curve["time"][low].iloc[0]) if low.any() else math.inf

    def to_frame(self) -> pd.DataFrame:
        return self.table

    def _line(self) -> str:
        total = self.table[self.table["site"] == "all"]
        said = [counted(self.table["site"].nunique() - 1, "site"), counted(total["time"].nunique(), "time")]
        said += [f"{total['events'].sum():g} events"]
        return ", ".join(said)


def event_curves(
    problem: Problem,
    *,
    times: Sequence[float] | None = None,
    by: str | int | None = None,
    cuts: Sequence[float] | None = None,
    causes: int | None = None,
    part: Literal["train", "validation", "test"] = "train",
    level: Inside = 0.95,
    driver: Driver | None = None,
) -> EventCurves:
    """Survival, cumulated hazard and incidence over time, at each site and over all; in one exchange.

    Bands of survival are Greenwood's on the scale of log(-log), those of the hazard on the scale of its logarithm.
    Those of incidences are of the delta method.

    Parameters
    ----------
    problem : Problem
        With the loss ``"cox"``.
    times : sequence of float, optional
        The grid. All times of the samples if left out, which sites of a federation do not tell.
    by, cuts : str or int, sequence of float
        Groups by a feature, and where these are cut; between its values if left out and there are at most ten.
    causes : int, optional
        How many causes events have; the largest number among samples at hand if left out.
    part : {"train", "validation", "test"}
        Whose samples.
    level : float
        Of the bands.
    driver : Driver, optional
        Who answers.
    """
    driver = driver_of(_of_events(problem), driver)
    at_hand = _at_hand(driver)
    grid = _grid(times, at_hand, part)
    x, edges, names = _groups(problem, by, cuts, at_hand)
    if causes is None:
        causes = 1 if at_hand is None else max(1, *(int(s.b[:, CAUSE].max()) for s in at_hand if len(s.b)))
    told = driver.told([timetable(grid, x, edges, causes, part)])
    each = {site: one["counts"] for site, (one,) in told.items()}
    if "all" not in each:
        each["all"] = torch.stack(list(each.values())).sum(0)
    rows = [_curve(site, name, counts[k], grid, level)
            for site, counts in each.items() for k, name in enumerate(names)]  # fmt: skip
    return EventCurves(pd.concat(rows, ignore_index=True), level)


def _curve(site: str, group: str, counts: Tensor, grid: Tensor, level: float) -> pd.DataFrame:
    """The rows of one group from what is at risk, censored, and has events of each cause."""
    half = float(scipy.special.ndtri((1 + level) / 2))
    at_risk, censored, *causes = counts.numpy()
    events = np.sum(causes, axis=0)
    n, d = np.maximum(at_risk, 1e-300), events
    survival = kaplan_meier(counts[0], torch.from_numpy(events)).numpy()
    hazard = np.cumsum(d / n)
    with np.errstate(divide="ignore", invalid="ignore"):
        greenwood = np.cumsum(np.where(n > d, d / (n * (n - d)), 0.0))
        logs = np.log(survival)
        width = half * np.sqrt(greenwood) / logs
        low, high = (np.exp(-np.exp(np.log(-logs) + sign * width)) for sign in (-1.0, 1.0))
        relative = half * np.sqrt(np.cumsum(d * (n - d) / n**3)) / hazard
        none = hazard == 0
        bounds = [np.where(none, 0.0, hazard * np.exp(sign * relative)) for sign in (-1.0, 1.0)]
    gone = survival <= 0
    columns: dict[str, Any] = {"site": site, "group": group, "time": grid.numpy(), "at_risk": at_risk}
    columns |= {"censored": censored, "events": events, "survival": survival}
    columns["survival_lower"] = np.where(none, 1.0, np.where(gone, 0.0, low))
    columns["survival_upper"] = np.where(none, 1.0, np.where(gone, 0.0, high))
    columns |= {"cumulative_hazard": hazard, "hazard_lower": bounds[0], "hazard_upper": bounds[1]}
    if len(causes) > 1:
        columns |= _incidences(n, events, causes, survival, half)
    return pd.DataFrame(columns)


def _incidences(
    n: Floats, events: Floats, causes: Sequence[Floats], survival: Floats, half: float
) -> dict[str, Floats]:
    """Aalen and Johansen's curves: the probability that an event of each cause has happened, with bounds."""
    before = np.concatenate([[1.0], survival[:-1]])
    made: dict[str, Floats] = {}
    for k, own in enumerate(causes, 1):
        incidence = np.cumsum(before * own / n)
        with np.errstate(divide="ignore", invalid="ignore"):
            greenwood = np.where(n > events, events / (n * (n - events)), 0.0)
            spread = before**2 * (n - own) * own / n**3
            cross = before * own / n**2
        # sums over earlier times u of (F(t) - F(u))^2 a_u + b_u - 2 (F(t) - F(u)) c_u, by their moments
        F, A, AF, AFF = (
            incidence,
            greenwood.cumsum(),
            (greenwood * incidence).cumsum(),
            (greenwood * incidence**2).cumsum(),
        )
        C, CF = cross.cumsum(), (cross * incidence).cumsum()
        variance = np.maximum(F**2 * A - 2 * F * AF + AFF + spread.cumsum() - 2 * (F * C - CF), 0.0)
        with np.errstate(divide="ignore", invalid="ignore"):
            logs = np.log(-np.log(F))
            width = half * np.sqrt(variance) / (F * np.log(F))
            low, high = (np.exp(-np.exp(logs + sign * width)) for sign in (1.0, -1.0))
        inside = (F > 0) & (F < 1)
        made |= {f"events_{k}": own, f"incidence_{k}": F}
        made |= {f"incidence_{k}_lower": np.where(inside, np.minimum(low, high), F)}
        made |= {f"incidence_{k}_upper": np.where(inside, np.maximum(low, high), F)}
    return made


# -- tests ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class LogRank(Result):
    """A log-rank test between groups."""

    statistic: float
    degrees: int
    p: float
    table: pd.DataFrame
    """A row per group: events ``observed``, and ``expected`` if all groups had the same hazard."""

    def to_frame(self) -> pd.DataFrame:
        return self.table

    def _line(self) -> str:
        return f"chi-squared {self.statistic:.4g} with {counted(self.degrees, 'degree')} of freedom, p = {self.p:.3g}"


def logrank_test(
    problem: Problem,
    by: str | int,
    *,
    cuts: Sequence[float] | None = None,
    driver: Driver | None = None,
) -> LogRank:
    """Whether groups of a feature have the same hazard; groups are compared within sites and strata, in one exchange.

    Parameters
    ----------
    problem : Problem
        With the loss ``"cox"``.
    by, cuts : str or int, sequence of float
        The feature, and where it is cut into groups; between its values if left out and there are at most ten.
    driver : Driver, optional
        Who answers.
    """
    driver = driver_of(_of_events(problem), driver)
    x, edges, names = _groups(problem, by, cuts, _at_hand(driver))
    [sums] = driver.ask([logrank(x, edges)])
    excess, V = (sums["observed"] - sums["expected"]).numpy(), sums["covariance"].numpy()
    there = V.diagonal() > 0
    degrees = max(int(there.sum()) - 1, 0)
    statistic = float(excess[there] @ np.linalg.pinv(V[there][:, there], hermitian=True) @ excess[there])
    table = pd.DataFrame({"group": names, "observed": sums["observed"].numpy(), "expected": sums["expected"].numpy()})
    p = float(scipy.special.chdtrc(degrees, statistic)) if degrees else math.nan
    return LogRank(statistic if degrees else math.nan, degrees, p, table)


def schoenfeld_test(
    problem: Problem,
    x: Any,
    *,
    transform: Transform = "rank",
    times: Sequence[float] | None = None,
    driver: Driver | None = None,
) -> pd.DataFrame:
    """Whether hazards are proportional: whether coefficients change with a function g of time; in two exchanges.

    A row per coefficient and one for all: ``slope`` (how b changes with g), ``statistic``, ``p``. For single
    coefficients the covariances at risk are taken as the same at all events (Grambsch & Therneau 1994); the row
    "(all)" is the score test with each event's own.

    Parameters
    ----------
    problem : Problem
        With the loss ``"cox"``.
    x : Tensor, array, Run or estimator
        The maximum of the partial likelihood: the solution without a regularizer.
    transform : {"rank", "identity", "log", "km"}
        g: how many events there were until then, the time, its logarithm, or one minus survival.
    times : sequence of float, optional
        The grid on which g is known to the sites; all times of the samples if left out, which sites do not tell.
    driver : Driver, optional
        Who answers.
    """
    check_given(schoenfeld_test, {"transform": transform})
    driver, x = driver_of(_of_events(problem), driver), as_vector(x).double()
    grid = _grid(times, _at_hand(driver), "train")
    none = torch.zeros(0, dtype=torch.float64)
    everything = torch.ones(len(x), dtype=torch.bool)
    counts, look = driver.ask([timetable(grid, torch.zeros_like(x), none), newton(x, everything, EVERYONE)])
    g = _function(transform, grid, counts["counts"][0])
    [sums] = driver.ask([schoenfeld(x, grid, g)])
    i, j = torch.triu_indices(len(x), len(x))
    H = x.new_empty(len(x), len(x))
    H[i, j] = H[j, i] = look["hessian"] / look["weight"][0] * look["weight"][1]
    events, total, squares = sums["events"].tolist()
    mean = total / events
    centred = squares - total * mean
    u = sums["residuals"] - mean * sums["total"]
    V = torch.linalg.pinv(H, hermitian=True)
    move = V @ u
    statistic = events * move.square() / (V.diagonal() * centred)
    first, second = sums["covariances"]
    spread = second - 2 * mean * first + mean**2 * H
    drift = first - mean * H
    spread = spread - drift @ V @ drift
    whole = float(u @ torch.linalg.pinv(spread, hermitian=True) @ u)
    rows = {"slope": (events * move / centred).numpy(), "statistic": statistic.numpy()}
    table = pd.DataFrame(rows, index=list(problem.coordinate_names))
    table["p"] = scipy.special.chdtrc(1, table["statistic"])
    degrees = int(torch.linalg.matrix_rank(spread, hermitian=True))  # less than columns, where some are constant
    table.loc["(all)"] = [math.nan, whole, float(scipy.special.chdtrc(degrees, whole))]
    return table


def _function(transform: Transform, grid: Tensor, counts: Tensor) -> Tensor:
    """The values of g at the times of a grid, from what is at risk, censored and has events there."""
    at_risk, _, events = counts
    match transform:
        case "identity":
            return grid
        case "log":
            if not bool((grid > 0).all()):
                raise ValueError("transform = 'log' needs times above 0")
            return grid.log()
        case "km":
            return 1 - kaplan_meier(at_risk, events)
    ranks: Tensor = events.cumsum(0)
    return ranks


def baseline_hazard(
    problem: Problem, x: Any, *, times: Sequence[float] | None = None, driver: Driver | None = None
) -> pd.DataFrame:
    """Breslow's cumulated baseline hazard at each site, and over all as if they had one: a row per site and time.

    Strata within a site count as one here.

    Parameters
    ----------
    problem : Problem
        With the loss ``"cox"``.
    x : Tensor, array, Run or estimator
        The model.
    times : sequence of float, optional
        The grid; all times of samples at hand if left out.
    driver : Driver, optional
        Who answers; one exchange.
    """
    driver, x = driver_of(_of_events(problem), driver), as_vector(x).double()
    grid = _grid(times, _at_hand(driver), "train")
    told = {site: one for site, (one,) in driver.told([risk_sums(x, grid)]).items() if float(one["weight"][2]) > 0}
    if "all" not in told:
        told["all"] = {k: torch.stack([one[k] for one in told.values()]).sum(0) for k in ("events", "sizes")}
    return pd.concat([_hazard_rows(site, one, grid) for site, one in told.items()], ignore_index=True)


def _hazard_rows(site: str, sums: Sums, grid: Tensor) -> pd.DataFrame:
    hazard = steps(sums["events"], sums["sizes"]).cumsum(0)
    columns = {"time": grid.numpy(), "events": sums["events"].numpy(), "cumulative_hazard": hazard.numpy()}
    return pd.DataFrame({"site": site, **columns})


# -- what is asked ----------------------------------------------------------------------------------------------------


def _of_events(problem: Problem) -> Problem:
    if not isinstance(problem.loss, Cox):
        raise ValueError(f"this is about times to an event: give Problem(..., loss='cox'), not {problem.loss}")
    return problem


def _at_hand(driver: Driver) -> list[Silo] | None:
    return driver.transport.silos if isinstance(driver.transport, SiloTransport) else None


def _grid(times: Sequence[float] | None, silos: list[Silo] | None, part: str) -> Tensor:
    """A grid that was given, or all times of the samples at hand."""
    if times is not None:
        made = torch.as_tensor(np.asarray(times, float))
        if made.ndim != 1 or not len(made) or not bool(torch.isfinite(made).all() & (made.diff() > 0).all()):
            raise ValueError(f"times = {times!r:.60}, must be rising numbers")
        return made
    if silos is None:
        raise ValueError("times: sites tell counts on a grid only; give one, such as range(30, 1800, 30)")
    every: Tensor = torch.unique(torch.cat([silo.of_part(part).b[:, TIME] for silo in silos]))
    return every


def grid_of(times: Sequence[float] | None, driver: Driver) -> Tensor:
    """A grid that was given, or all times of the training samples at hand."""
    return _grid(times, _at_hand(driver), "train")


def _groups(
    problem: Problem, by: str | int | None, cuts: Sequence[float] | None, silos: list[Silo] | None
) -> tuple[Tensor, Tensor, list[str]]:
    """The model and the edges that make groups, and the names of these."""
    x = torch.zeros(problem.dimension, dtype=torch.float64)
    if by is None:
        return x, torch.zeros(0, dtype=torch.float64), ["all"]
    known = problem.coordinate_names
    place = known.index(by) if by in known else by
    if not isinstance(place, int) or not 0 <= place < len(known):
        raise ValueError(f"by = {by!r}, must be a feature: {', '.join(known[:10])}{', ...' * (len(known) > 10)}")
    x[place] = 1.0
    name = known[place]
    if cuts is not None:
        edges = np.asarray(cuts, float)
        if edges.ndim != 1 or not len(edges) or not (np.diff(edges) > 0).all():
            raise ValueError(f"cuts = {cuts!r:.60}, must be rising numbers")
        ends = [
            f"{name} < {edges[0]:g}",
            *(f"{a:g} <= {name} < {b:g}" for a, b in itertools.pairwise(edges)),
        ]
        return x, torch.from_numpy(edges), [*ends, f"{name} >= {edges[-1]:g}"]
    if silos is None:
        raise ValueError(f"cuts: sites do not tell the values of {name!r}; say where it is cut, such as [0.5]")
    values = torch.unique(torch.cat([silo.X[:, place] for silo in silos]))
    if len(values) > 10:
        raise ValueError(f"by = {by!r} has {len(values)} values: say where it is cut into groups (cuts=[...])")
    return x, (values[1:] + values[:-1]) / 2, [f"{name} = {v:g}" for v in values.tolist()]
