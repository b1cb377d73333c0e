"""From a method and the constants of a problem to steps, conditions and bounds."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from fedcomposite._validation import check_fields, suggest
from fedcomposite.algorithms import REGISTRY, AnyAlgorithm, lookup
from fedcomposite.registry import make
from fedcomposite.schedules import Schedule, read
from fedcomposite.theory.base import Correction, Floats, Theorem
from fedcomposite.theory.beck import ProximalGradientDescent
from fedcomposite.theory.fedcanon import FedCanon1, FedCanon2
from fedcomposite.theory.feddr import DouglasRachford
from fedcomposite.theory.fedmls import FedMLS32
from fedcomposite.theory.fedprox import FedMSPP3, FedProx1, ProximalPointNonSmooth
from fedcomposite.theory.measured import Constants
from fedcomposite.theory.proxskip import ProxSkip
from fedcomposite.theory.scaffold import Scaffold
from fedcomposite.theory.zhang import Zhang35, Zhang36, Zhang38


class Recorded(Protocol):
    """A run, as far as its records go."""

    @property
    def history(self) -> Sequence[Mapping[str, Any]]:
        """One record per evaluated round."""


THEOREMS: dict[str, dict[str, Theorem]] = {
    "ProximalGradient": {"10.15": ProximalGradientDescent()},
    "Zhang": {"3.5": Zhang35(), "3.6": Zhang36(), "3.8": Zhang38()},
    "FedCanon": {"1": FedCanon1(), "2": FedCanon2()},
    "FedCanonII": {"1": FedCanon1(), "2": FedCanon2()},
    "FedMLS": {"3.2": FedMLS32()},
    "FedProx": {"1": FedProx1(), "2": ProximalPointNonSmooth("Yuan & Li (2022), Theorem 2")},
    "FedMSPP": {"3": FedMSPP3(), "4": ProximalPointNonSmooth("Yuan & Li (2022), Theorem 4")},
    "Scaffnew": {"3.6": ProxSkip()},
    "ProxScaffnew": {"3.6": ProxSkip()},
    "Scaffold": {"VII": Scaffold()},
    "FedDR": {"3.1": DouglasRachford()},
}
"""Theorems by method and number; the first is the one meant when no number is given (the second of FedProx and FedMSPP
when the loss is not smooth)."""


def find(name: str, constants: Constants | None = None, number: str | None = None) -> Theorem:
    """The theorem on a method, by number, or the one that fits the constants."""
    known = THEOREMS.get(REGISTRY.canonical(name))
    if known is None:
        meant = "" if name in REGISTRY else suggest(name, REGISTRY)  # what is a method's name is what was meant
        raise ValueError(
            f"no theorem on {name!r}{meant}: take practical steps (steps = 'auto', theory.auto) or give your own "
            f"(there are theorems on: {', '.join(THEOREMS)})"
        )
    if number is None:
        rough = constants is not None and constants.L is None and name in ("FedProx", "FedMSPP")
        number = list(known)[1 if rough else 0]
    if number not in known:
        raise ValueError(f"no theorem {number!r} on {name} (known: {', '.join(known)})")
    return known[number]


def steps(name: str, constants: Constants, local_steps: int = 10, theorem: str | None = None) -> dict[str, Any]:
    """The fields of a method with the largest steps that a theorem allows.

    >>> c = Constants(L=1.0, n=32)
    >>> {k: round(v, 6) for k, v in steps("Zhang", c, local_steps=5).items()}
    {'local_steps': 5, 'step': 0.01, 'server_step': 2.0}
    """
    return _largest(name, constants, local_steps, theorem)


def _largest(name: str, constants: Constants, local_steps: int, theorem: str | None = None) -> dict[str, Any]:
    if math.isinf(constants.rho):
        raise ValueError("the regularizer is not even weakly convex, so no theorem gives steps; choose them yourself")
    return find(name, constants, theorem).steps(constants, local_steps)


def auto(name: str, constants: Constants, local_steps: int = 10) -> AnyAlgorithm:
    """The method with practical steps, larger than theory's: the class's own ``auto``.

    Losses without smoothness constant are treated as if their curvature were 1. With minibatches L is
    :attr:`Constants.of_batches`, that of few samples at a time. When a round's clients may weigh more
    than on average, the steps are for clients that much less smooth. When only some take part in a round, methods with
    a form for that (``partial_participation``) come in it, with the smaller steps that it needs.
    """
    return _practical(lookup(name), constants, local_steps, constants.participants < constants.n)


def _practical(cls: type[AnyAlgorithm], constants: Constants, local_steps: int, some: bool) -> AnyAlgorithm:
    """The class's own choice; ``some`` says that not all clients take part."""
    own = cls.auto_partial if some else cls.auto
    return own(_curvature(constants) * constants.amplification, constants.rho, local_steps)


def choose(cls: type[AnyAlgorithm], steps: str, constants: Constants | None, fields: Mapping[str, Any]) -> AnyAlgorithm:
    """The method with the fields that are given and, for those that are left out, steps from the constants.

    The one function behind ``steps = "auto"`` and ``"theory"`` of a configuration, wherever the constants come from.

    Parameters
    ----------
    cls : type
        The method.
    steps : {"auto", "theory"}
        Practical steps (:func:`auto`), or the largest that the method's theorem allows
        (:func:`fedcomposite.theory.steps`).
    constants : Constants or None
        None only checks: names and values of the fields, and that there is something to choose. What is returned then
        has practical steps for L = 1.
    fields : mapping
        A given field replaces the chosen one, and what excludes it (``p`` or ``local_steps``). ``constants`` may be
        among them, a table of constants that are known better, or that cannot be measured.

    Examples
    --------
    >>> from fedcomposite.algorithms import FedNMap
    >>> choose(FedNMap, "auto", Constants(L=2.0), {"local_steps": 5, "constants": {"L": 4.0}})
    FedNMap(local_steps=5, step=0.125, server_step=1.0, gamma=0.625, partial_participation=False)
    """
    given = {name: value for name, value in fields.items() if name != "constants"}
    known = fields.get("constants", {})
    _check_choice(cls, steps, given, known)
    local_steps = given.get("local_steps") or 10
    name, better = cls.__name__, dataclasses.replace(constants or Constants(L=1.0), **known)
    if steps == "theory" and constants is not None:
        chosen = _largest(name, better, local_steps)
    else:
        some = better.participants < better.n or bool(given.get("partial_participation"))
        chosen = {
            k: v for k, v in vars(_practical(cls, better, local_steps, some)).items() if k != "partial_participation"
        }
    optional = {f.name for f in dataclasses.fields(cls) if f.default is None}  # type: ignore[arg-type]
    excluded = {b for a, b in (("p", "local_steps"), ("local_steps", "p")) if given.get(a) is not None} & optional
    algorithm: AnyAlgorithm = make(cls, {k: v for k, v in chosen.items() if k not in excluded} | given)
    return algorithm


def _check_choice(cls: type[AnyAlgorithm], steps: str, given: Mapping[str, Any], known: Any) -> None:
    """Refuse what cannot be chosen, whatever the constants are."""
    if steps not in ("auto", "theory"):
        raise ValueError(f"steps = {steps!r}, must be 'auto' or 'theory' (or leave it out and give the steps)")
    if not isinstance(known, Mapping):
        raise ValueError(f"constants = {known!r}, must be a table such as {{distance = 3.0}}")
    check_fields(cls, {k: v for k, v in given.items() if not isinstance(read(v), Schedule)})
    check_fields(Constants, known)
    if steps == "theory":
        wanted = find(cls.__name__).chooses
    else:
        one, two = vars(cls.auto(1.0)), vars(cls.auto(4.0))
        wanted = tuple(name for name in one if one[name] != two[name])
    left = [name for name in wanted if name not in given and not (name == "p" and "local_steps" in given)]
    if not left and (wanted or given):
        own = (
            f"{', '.join(wanted)} {'is' if len(wanted) == 1 else 'are'}"
            if wanted
            else "it has no steps, and fields are"
        )
        raise ValueError(f"steps = {steps!r} has nothing left to choose: {own} given; leave out either")


def _curvature(constants: Constants) -> float:
    """L as minibatches feel it, or what it would be if a loss without one had curvature 1."""
    return constants.need("scale")[0] if constants.of_batches is None else constants.of_batches


def outside(algorithm: AnyAlgorithm, constants: Constants, theorem: str | None = None) -> list[str]:
    """A sentence for every condition of the method's theorem that does not hold; none where there is no theorem.

    >>> from fedcomposite.algorithms import build
    >>> outside(build("ProximalGradient", step=3.0), Constants(L=1.0))
    ['step = 3 is above 2 / (L + rho) = 2']
    """
    name = type(algorithm).__name__
    if name not in THEOREMS:
        return []
    if math.isinf(constants.rho):
        return ["the regularizer is not even weakly convex, so no theorem applies"]
    found = find(name, constants, theorem).violations(algorithm, constants)
    if not constants.uniform:
        found = [*found, "the clients weigh by their samples, the theorem is about equal weights"]
    return found


def corrections(algorithm: AnyAlgorithm, constants: Constants, theorem: str | None = None) -> list[Correction]:
    """The constants of the method's theorem that its paper prints otherwise than the proof gives them.

    >>> from fedcomposite.algorithms import build
    >>> method = build("FedCanon", local_steps=5, step=0.01, server_step=0.1)
    >>> (one,) = corrections(method, Constants(L=1.0))
    >>> one.what, one.printed, one.derivable
    ('sigma^2 / (b tau)', 50.0, 56.0)
    """
    return find(type(algorithm).__name__, constants, theorem).corrections(algorithm, constants)


def bound(run: Recorded, algorithm: AnyAlgorithm, constants: Constants, theorem: str | None = None) -> Floats:
    """The theorem's right-hand side for every record of a run's history.

    What it limits, in expectation, is told by the theorem's ``bounds``: ``"stationarity"``, the mean over the models so
    far of the squared stationarity, measured at the theorem's own step (:meth:`Theorem.measured_at`; other steps are
    refused); ``"objective"``, F - min F; or ``"distance"``, ||x - x*||^2.

    Raises
    ------
    ValueError
        When a constant is missing (it says which), when a condition is violated, or when the paper gives no number.
    """
    chosen = find(type(algorithm).__name__, constants, theorem)
    rounds = np.asarray([record["round"] for record in run.history], np.float64)
    values = chosen.bound(algorithm, constants, rounds)
    if broken := outside(algorithm, constants, theorem):
        raise ValueError(f"{chosen} does not apply: {'; '.join(broken)}")
    if (step := chosen.measured_at(algorithm)) is not None:
        used = run.history[0]["stationarity_step"]
        if not math.isclose(used, step, rel_tol=1e-9):
            raise ValueError(
                f"{chosen} bounds the prox-gradient mapping at step {step:.6g}, this run measured it at {used:.6g}; "
                f"simulate with stationarity_step = {step!r}"
            )
    return values
