"""What a path varies: the coordinates that a strength moves, and the least one at which they are zero."""

from __future__ import annotations

import torch
from torch import Tensor

from fedcomposite.regularizers import Blocks, Box, ElasticNet, L2Squared, On, Regularizer
from fedcomposite.regularizers.factors import strength, varied

_NO_TOP = 1e3  # a ridge has no strength at which all is zero: it starts at so many times the largest slope


def varies(h: Regularizer) -> bool:
    """Whether h has a strength: constraints have none, and no term at all."""
    inner = h.parts if isinstance(h, Blocks) else (h,)
    return any(bool((part.h if isinstance(part, On) else part).coefficients) for part in inner)


def check_modulus(h: Regularizer) -> None:
    """Refuse an h that jumps, where Newton steps are all there is."""
    if not h.weakly_convex:
        raise ValueError(
            f"{h} is not weakly convex, which Newton steps need: give the problem to fc.solve, which takes it with a "
            "smooth loss, or take MCP or SCAD"
        )


def regularized(h: Regularizer, dimension: int) -> Tensor:
    """Mask of the coordinates that a very strong h moves."""
    strong = varied(h, 1e6)
    step = min(1.0, 0.5 / strong.rho) if strong.rho > 0 else 1.0
    signs = torch.where(torch.arange(dimension) % 2 == 0, 1.0, -1.0).double()  # total variation leaves constants alone
    probe = 1e-30 * signs  # below where MCP and SCAD are flat, and inside every box
    return torch.as_tensor(strong.prox(probe, step) != probe) & strong.acts_on(dimension)


def only(free: Tensor) -> Regularizer | None:
    """The constraint that all other coordinates are zero; None where there are none."""
    return None if bool(free.all()) else Box(0.0, 0.0).on(~free)


def largest_factor(h: Regularizer, x: Tensor, gradient: Tensor, acted_on: Tensor) -> float:
    """The least factor at which the coordinates that h acts on stay zero, at a model x where they are zero."""

    def stays(factor: float) -> bool:
        some = varied(h, factor)
        step = min(1.0, 0.5 / some.rho) if some.rho > 0 else 1.0
        return not bool(some.prox(x - step * gradient, step)[acted_on].any())

    slope = float(gradient[acted_on].abs().max()) if bool(acted_on.any()) else 0.0
    if not slope > 0:
        raise ValueError("no strength to begin with: all regularized features have a slope of zero")
    if _never_zero(h):
        return _NO_TOP * slope / strength(h)
    low = high = slope / strength(h)
    for _ in range(200):
        if stays(high):
            break
        low, high = high, 2 * high
    else:
        raise ValueError(f"{h} sets no coordinate to zero, however strong: give the strengths with `lambdas`")
    while stays(low) and low > 0:
        high, low = low, low / 2
    for _ in range(100):
        middle = (low + high) / 2
        if not low < middle < high:
            break
        low, high = (low, middle) if stays(middle) else (middle, high)
    return high


def _never_zero(h: Regularizer) -> bool:
    inner = h.h if isinstance(h, On) else h
    return isinstance(inner, L2Squared) or (isinstance(inner, ElasticNet) and inner.l1 == 0)
