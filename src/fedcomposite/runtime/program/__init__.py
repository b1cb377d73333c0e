"""Rounds as programs: recorded as CUDA graphs, their gradients and proxes compiled."""

from typing import Literal

from fedcomposite.runtime.program.program import Program
from fedcomposite.runtime.program.prox import CompiledProx

Mode = Literal["eager", "record", "compile"]


class EagerWarning(UserWarning):
    """A round could not be recorded as one GPU program, and why."""


__all__ = ["CompiledProx", "EagerWarning", "Mode", "Program"]
