"""The prox of h as one compiled kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fedcomposite.regularizers.base import Regularizer, Step
from fedcomposite.regularizers.wrapped import Wrapped


def compiled_formula(h: Regularizer, **options: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """The formula of h's prox, compiled. What it makes at its first call and keeps is made before: a compiler stumbles
    over that (weights as a tensor, groups by size, factors of a matrix).
    """
    program, seen = torch.compile(h.formula, dynamic=False, **options), set()

    def call(v: Tensor, step: Tensor) -> Tensor:
        if (key := (v.shape[-1], v.dtype, v.device)) not in seen:
            h.formula(v, step)
            seen.add(key)
        result: Tensor = program(v, step)
        return result

    return call


class CompiledProx(Wrapped):
    """h with the formula of its prox compiled into one kernel; steps are checked before they enter it."""

    def __init__(self, h: Regularizer) -> None:
        super().__init__(h)
        self._compiled = compiled_formula(h)
        self._steps: dict[tuple[float, torch.dtype], Tensor] = {}

    def prox(self, v: Tensor, step: Step, out: Tensor | None = None) -> Tensor:
        """The prox of h in one pass over memory."""
        if not isinstance(step, Tensor):
            self.h.check_step(step)
            if (step, v.dtype) not in self._steps:  # a tensor, so that another step is not another program
                self._steps[step, v.dtype] = torch.full((1,), step, dtype=v.dtype, device=v.device)
            step = self._steps[step, v.dtype]
        result = self._compiled(v, step.to(v.dtype))
        return result if out is None else out.copy_(result)
