"""The prox of h as one compiled kernel."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fedcomposite.regularizers.base import Regularizer, Step
from fedcomposite.regularizers.wrapped import Wrapped


class CompiledProx(Wrapped):
    """h with the formula of its prox compiled into one kernel; steps are checked before they enter it."""

    def __init__(self, h: Regularizer) -> None:
        super().__init__(h)
        self._compiled: Callable[[Tensor, Tensor], Tensor] = torch.compile(h.formula, dynamic=False)
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
