"""What a run would refuse, found out before anything is written."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fedcomposite._validation import UserError
from fedcomposite.algorithms import AnyAlgorithm
from fedcomposite.experiments.toml import ConfigError
from fedcomposite.problems import Problem
from fedcomposite.regularizers.base import StepError
from fedcomposite.runtime import Cohorts, simulate
from fedcomposite.runtime.callbacks import AnyCallback, BestModel, Callback, EarlyStopping, View
from fedcomposite.runtime.records import rehearse


class _Accepted(BaseException):
    """A run has begun: nothing speaks against it."""


def check_run(
    problem: Problem,
    algorithm: AnyAlgorithm,
    settings: dict[str, Any],
    checkpoint: Path | None = None,
    callbacks: Sequence[Callback] = (),
) -> None:
    """Refuse what cannot be run: method x regularizer x participation x data x settings x checkpoint.

    The run is begun without a place to write, from ``checkpoint`` if there is one, and left at its first record. Of
    the callbacks those are asked that read the records.
    """

    def leave(view: View) -> None:
        raise _Accepted

    watchers: list[AnyCallback] = [*(c for c in callbacks if isinstance(c, BestModel | EarlyStopping)), leave]

    resume = checkpoint is not None and checkpoint.exists()
    quiet = {**settings, "checkpoint": checkpoint if resume else None, "checkpoint_every": 0, "resume": resume}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the run itself will say it
            with contextlib.suppress(_Accepted):
                simulate(problem, algorithm, **quiet, callbacks=watchers, progress=False)
            _try_rules(problem, algorithm, settings["participation"])
    except StepError as error:
        raise ConfigError(str(error)) from error
    except UserError:
        raise
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _try_rules(problem: Problem, algorithm: AnyAlgorithm, participation: float) -> None:
    """One step of the method by one client at zero, for the steps at which it asks for the prox of h."""
    h = problem.regularizer
    if not 0 < h.rho < math.inf:
        return  # any step will do
    cohorts = Cohorts(len(problem.silos), participation)
    algorithm = algorithm.at(0)
    server, client = algorithm.init(torch.zeros(problem.dimension, dtype=torch.float64), h)
    for _ in range(algorithm.exchanges):
        reply, client = rehearse(algorithm, algorithm.broadcast(server), client, h, cohorts.size)
        server = algorithm.aggregate(server, algorithm.decode(reply), cohorts.size / cohorts.clients, h)
    algorithm.solution(server, h)
