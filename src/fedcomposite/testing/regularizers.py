"""The laws of a regularizer, as checks that anyone can run on their own.

``check_regularizer(MyRegularizer(...), dimension=12)`` runs every law and reports all that are broken; those of the
package pass the same list.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedcomposite.regularizers import Regularizer
from fedcomposite.regularizers.base import Step

_DTYPES = torch.float32, torch.float64


@dataclasses.dataclass(frozen=True)
class Probe:
    """A regularizer with points and steps to try it at; the same ones for the same seed."""

    h: Regularizer
    dimension: int
    seed: int = 0

    def draw(self, count: int, scale: float = 1.0, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
        """Normal points in rows; some have entries of equal size, some have zeros."""
        generator = torch.Generator().manual_seed(1000 * self.seed + seed)
        v = torch.randn(count, self.dimension, generator=generator, dtype=torch.float64)
        v[1::4] = v[1::4].sign()
        v[2::4] = v[2::4] * (v[2::4].abs() > 0.7)
        return (scale * v).to(dtype)

    def magnitudes(self, dtype: torch.dtype) -> Tensor:
        """Points of every size from 1e-20 to 1e20: about zero, far from it and close together, and of all sizes."""
        sizes = 10.0 ** torch.arange(-20, 21, 2, dtype=torch.float64)
        about = torch.cat([size * self.draw(4, seed=i) for i, size in enumerate(sizes.tolist())])
        together = torch.cat([size * (1 + 1e-3 * self.draw(2, seed=i)) for i, size in enumerate(sizes.tolist())])
        mixed = self.draw(40, seed=99) * 10.0 ** self.draw(40, scale=7.0, seed=98).clamp(-20, 19)
        return torch.cat([about, together, mixed, torch.zeros_like(mixed[:1])]).to(dtype)

    @property
    def steps(self) -> tuple[float, float, float]:
        """Small, middling, and close to the limit where there is one."""
        limit = 1 / self.h.rho if 0 < self.h.rho < math.inf else 1.0
        return 0.01 * limit, 0.3 * limit, 0.97 * limit


Law = Callable[[Probe], None]
REGULARIZER_LAWS: list[Law] = []


def _law(check: Law) -> Law:
    REGULARIZER_LAWS.append(check)
    return check


def check_regularizer(h: Regularizer, dimension: int, *, seed: int = 0) -> None:
    """Run every law on a regularizer.

    Parameters
    ----------
    h : Regularizer
        The regularizer.
    dimension : int
        The length of the vectors it is tried on.
    seed : int
        Of the random points.

    Raises
    ------
    AssertionError
        Names every law that is broken, and how.
    """
    broken = []
    for law in REGULARIZER_LAWS:
        try:
            law(Probe(h, dimension, seed))
        except AssertionError as error:
            broken.append(f"{law.__name__}: {error}")
        except Exception as error:  # what a law did not expect is a breach as well
            broken.append(f"{law.__name__}: {type(error).__name__}: {error}")
    if broken:
        lines = "\n".join("  " + " ".join(line.split()) for line in broken)
        raise AssertionError(f"{h} breaks {len(broken)} of {len(REGULARIZER_LAWS)} laws:\n{lines}")


def _first(wrong: Tensor) -> int | None:
    """The first row that is wrong, if any."""
    found = wrong.nonzero()
    return int(found[0, 0]) if len(found) else None


def _shown(x: Tensor) -> str:
    return str([float(f"{float(t):.4g}") for t in x[:8]]) + ("..." if len(x) > 8 else "")


def _candidates(probe: Probe, v: Tensor, p: Tensor, step: float) -> Iterator[Tensor]:
    """Points that may be better than the prox p of v: near it, on the way to v, with other zeros, and other proxes."""
    yield torch.stack([v, torch.zeros_like(v), p])
    for i, scale in enumerate((1e-4, 1e-2, 0.3)):
        noise = probe.draw(60, scale=scale, seed=i + 7)
        yield p + noise
        yield p + noise * (p != 0)
        yield probe.h.prox(v + noise, step)
    yield p + torch.linspace(-0.2, 1.2, 57, dtype=v.dtype).unsqueeze(1) * (v - p)
    keep = 1 - torch.eye(len(v), dtype=v.dtype)
    yield p * keep
    yield torch.where(keep == 0, v, p)
    if len(v) <= 2:
        line = torch.linspace(-1, 1, 201, dtype=v.dtype) * (2 * float(v.abs().max()) + 1)
        yield torch.cartesian_prod(*[line] * len(v)).reshape(-1, len(v))


@_law
def prox_is_the_minimiser(probe: Probe) -> None:
    """No candidate has a lower h(u) + ||u - v||^2 / (2 step) than the prox."""
    for step in probe.steps:
        for v in torch.cat([probe.draw(3, scale=0.3), probe.draw(3, scale=2.0, seed=1)]):
            p = probe.h.prox(v, step)

            def cost(u: Tensor, v: Tensor = v, step: float = step) -> Tensor:
                return probe.h.value(u) + (u - v).square().sum(-1) / (2 * step)

            ours = float(cost(p))
            assert math.isfinite(ours), f"h is {ours} at prox({_shown(v)}, {step:g})"
            for u in _candidates(probe, v, p, step):
                costs = cost(u)
                better = _first(costs < ours - 1e-10 * (1 + abs(ours)))
                assert better is None, (
                    f"prox({_shown(v)}, {step:g}) = {_shown(p)} costs {ours:.8g}, "
                    f"but {_shown(u[better or 0])} costs {float(costs[better or 0]):.8g}"
                )


@_law
def prox_is_lipschitz(probe: Probe) -> None:
    """Points move apart by 1/(1 - rho step) at most."""
    if not probe.h.weakly_convex:
        return
    for step in probe.steps:
        for scale in (0.01, 1.0):
            a = probe.draw(100, seed=1)
            b = a + probe.draw(100, seed=2, scale=scale)
            moved = (probe.h.prox(a, step) - probe.h.prox(b, step)).norm(dim=-1)
            allowed = (a - b).norm(dim=-1) / (1 - probe.h.rho * step)
            wrong = _first(moved > allowed * (1 + 1e-9) + 1e-12)
            assert wrong is None, f"step {step:g}: points {_shown(a[wrong or 0])}, {_shown(b[wrong or 0])} move apart"


@_law
def steps_out_of_range_are_refused(probe: Probe) -> None:
    """A step that is negative, not a number or at least 1/rho raises a ValueError."""
    v = probe.draw(2)
    bad: list[Step] = [-0.1, math.nan, torch.tensor([[0.1 * probe.steps[0]], [-0.1]])]
    if 0 < probe.h.rho < math.inf:
        limit = 1 / probe.h.rho
        bad += [limit, 5 * limit, torch.tensor([[0.1 * limit], [1.01 * limit]])]
    for step in bad:
        try:
            probe.h.prox(v, step)
        except ValueError:
            continue
        raise AssertionError(f"step {step} is accepted; rho is {probe.h.rho:g}")


@_law
def batch_equals_loop(probe: Probe) -> None:
    """Several vectors at once give what each of them gives by itself, with one step or with one for each."""
    h, v, g = probe.h, probe.draw(6).reshape(2, 3, -1), probe.draw(6, seed=1).reshape(2, 3, -1)
    step = probe.steps[1]
    steps = step * torch.linspace(0.1, 1.0, 6, dtype=v.dtype).reshape(2, 3, 1)
    one, own = h.prox(v, step), h.prox(v, steps)
    values, distances = h.value(one), h.optimality(one, g)
    for i in range(2):
        for j in range(3):
            for name, together, alone in (
                ("prox", one[i, j], h.prox(v[i, j], step)),
                ("prox with a step for each", own[i, j], h.prox(v[i, j], float(steps[i, j]))),
                ("value", values[i, j], h.value(one[i, j])),
                ("optimality", distances[i, j], h.optimality(one[i, j], g[i, j])),
            ):
                assert torch.allclose(together, alone, rtol=1e-11, atol=1e-12, equal_nan=True), f"{name} differs"
    assert h.prox(v[:0], step).shape == v[:0].shape, "no vectors at all change their shape"


@_law
def inputs_are_kept_and_out_is_filled(probe: Probe) -> None:
    """Nothing but ``out`` is modified; ``out`` holds what would be returned, also where it is v itself."""
    h, step, wide = probe.h, probe.steps[1], torch.cat([probe.draw(4), probe.draw(4, seed=1)], dim=1)
    for v in (wide[:, : probe.dimension].clone(), wide[:, ::2], wide[:, : probe.dimension]):
        before = v.clone()
        expected = h.prox(v, step)
        h.value(v), h.optimality(v, before)
        out = torch.full_like(v, math.nan)
        assert h.prox(v, step, out=out) is out, "prox(v, step, out=out) does not return out"
        assert torch.equal(v, before), "an input was modified"
        assert torch.equal(out, expected), "out does not hold what is returned without it"
        same = v.clone()
        expected = h.prox(same, step)
        h.prox(same, step, out=same)
        assert torch.equal(same, expected), "out=v does not hold what is returned without it"


@_law
def formula_is_the_prox(probe: Probe) -> None:
    """The pure formula gives the bits of the prox, for few vectors and for as many as are worked through in blocks."""
    h, step, many = probe.h, probe.steps[1], 1 + (1 << 18) * min(torch.get_num_threads(), 8) // probe.dimension
    for v in (probe.draw(5), *([probe.draw(many, dtype=torch.float32)] if h.grain else [])):
        before = v.clone()
        expected = h.formula(v, step)
        assert expected.data_ptr() != v.data_ptr(), "the formula does not return a new tensor"
        assert torch.equal(v, before), "the formula modified its input"
        assert torch.equal(h.prox(v, step), expected), f"{len(v)} vectors: formula and prox differ"


@_law
def optimality_is_zero_at_fixed_points_only(probe: Probe) -> None:
    """Zero where x = prox(x - step g), and at least (1 - rho step) / step times what such a step moves x by."""
    h = probe.h
    for step in probe.steps:
        v = torch.cat([probe.draw(4, scale=s) for s in (0.1, 1.0, 4.0)])
        p = h.prox(v, step)
        distance = h.optimality(p, (p - v) / step)
        wrong = _first(~(distance <= 1e-10 / step))
        assert wrong is None, f"{float(distance[wrong or 0]):g} at prox({_shown(v[wrong or 0])}, {step:g})"
        if h.weakly_convex:
            g = probe.draw(len(p), seed=5)
            moved = (p - h.prox(p - step * g, step)).norm(dim=-1) / step
            wrong = _first(h.optimality(p, g) < (1 - h.rho * step) * moved - 1e-9 / step)
            assert wrong is None, f"a step moves {_shown(p[wrong or 0])} further than its optimality allows"


@_law
def value_of_a_prox_is_finite(probe: Probe) -> None:
    """From 1e-20 to 1e20, in float32 and float64; infinite only where the number does not fit its dtype."""
    for dtype in _DTYPES:
        v = probe.magnitudes(dtype)
        for step in (*probe.steps, 1e-9):
            p = probe.h.prox(v, step)
            wrong = _first(~p.isfinite())
            assert wrong is None, f"{dtype}: prox({_shown(v[wrong or 0])}, {step:g}) = {_shown(p[wrong or 0])}"
            exact = probe.h.value(probe.h.prox(v.double(), step))
            value = probe.h.value(p)
            wrong = _first(~value.isfinite() & ~(exact > torch.finfo(dtype).max / 8))
            assert wrong is None, f"{dtype}: h is {float(value[wrong or 0])} at prox({_shown(v[wrong or 0])}, {step:g})"


@_law
def what_is_not_finite_stays_so(probe: Probe) -> None:
    """A vector with an entry that is infinite or not a number gives one: no exception, and no sound numbers."""
    for dtype in _DTYPES:
        for bad in (math.nan, math.inf, -math.inf):
            v = probe.draw(probe.dimension, dtype=dtype).fill_diagonal_(bad)
            for step in (probe.steps[1], torch.full((len(v), 1), probe.steps[1], dtype=dtype)):
                p = probe.h.prox(v, step)
                wrong = _first(p.isfinite().all(-1))
                assert wrong is None, f"prox({_shown(v[wrong or 0])}) = {_shown(p[wrong or 0])}"
            probe.h.value(v), probe.h.optimality(p, v)


@_law
def dtype_is_that_of_the_vector(probe: Probe) -> None:
    """Whatever the type of the step: a number of Python or NumPy, or a tensor of any dtype, one or one for each."""
    step, ones = probe.steps[1], torch.ones(4, 1, dtype=torch.float64)
    for dtype in _DTYPES:
        v = probe.draw(4, dtype=dtype)
        expected = probe.h.prox(v, step)
        same: list[Any] = [np.float32(step), np.float64(step)]
        for given in same + [(step * t).to(d) for t in (ones, ones[0], ones[0, 0]) for d in _DTYPES]:
            p = probe.h.prox(v, given)
            assert p.dtype == dtype, f"a step of type {getattr(given, 'dtype', type(given))} makes {dtype} {p.dtype}"
            torch.testing.assert_close(p, expected, rtol=1e-4, atol=1e-5)
        whole = probe.h.prox(v, 1 if not 1 <= probe.h.rho < math.inf else 0)
        results = whole, probe.h.value(whole), probe.h.optimality(whole, v)
        assert all(t.dtype == dtype for t in results), f"{dtype} becomes {[t.dtype for t in results]}"


@_law
def scaled_is_kappa_times_h(probe: Probe) -> None:
    """The value and the modulus are kappa times those of h, the prox is that of h with kappa times the step."""
    h, step, v = probe.h, 0.2 * probe.steps[1], probe.draw(6)
    points = torch.cat([v, h.prox(v, step)])
    for kappa in (0.3, 2.0):
        scaled = h.scaled(kappa)
        torch.testing.assert_close(scaled.value(points), kappa * h.value(points), rtol=1e-11, atol=0)
        torch.testing.assert_close(scaled.prox(v, step), h.prox(v, kappa * step), rtol=0, atol=1e-11)
        assert math.isclose(scaled.rho, kappa * h.rho), f"rho is {scaled.rho:g}, not {kappa:g} * {h.rho:g}"
    for kappa in (0.0, -1.0, math.nan):
        try:
            h.scaled(kappa)
        except ValueError:
            continue
        raise AssertionError(f"kappa = {kappa} is accepted")


@_law
def on_a_mask_it_acts_there_only(probe: Probe) -> None:
    """Restricted to some coordinates of a longer vector it gives the same there, and leaves the others alone."""
    h, d, step = probe.h, probe.dimension, probe.steps[1]
    scattered = [j % 3 != 1 for j in range(2 * d)]
    scattered = [flag and sum(scattered[:j]) < d for j, flag in enumerate(scattered)]
    scattered += [True] * (d - sum(scattered))
    for mask in ([False] * 2 + [True] * d, [True] * d + [False], scattered):
        there, part = torch.tensor(mask), h.on(mask)
        v = Probe(h, len(mask), probe.seed).draw(4)
        p = part.prox(v, step)
        assert torch.equal(p[:, ~there], v[:, ~there]), "coordinates outside the mask change"
        torch.testing.assert_close(p[:, there], h.prox(v[:, there], step), rtol=0, atol=1e-12)
        torch.testing.assert_close(part.value(p), h.value(p[:, there]), rtol=1e-12, atol=1e-12)
        assert part.rho == h.rho
