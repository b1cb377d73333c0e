"""Which coordinates h couples: h is the sum over its parts, and a separable prox takes a step per coordinate."""

import pytest
import torch

from fedcomposite import regularizers as reg
from fedcomposite.regularizers.wrapped import restricted

D = 12
MASK = [True] * 4 + [False] * 2 + [True] * 6
CASES = {
    "zero": reg.Zero(), "l1": reg.L1(0.3), "weighted l1": reg.L1(0.3, tuple(range(D))), "l2": reg.L2Squared(0.3),
    "elastic net": reg.ElasticNet(0.3, 0.2), "positive part": reg.PositivePart(0.2), "mcp": reg.MCP(0.4, 3.0),
    "scad": reg.SCAD(0.4), "box": reg.Box(-0.5, 0.6), "non-negative": reg.NonNegative(),
    "on": reg.L1(0.3).on(MASK), "weighted on": reg.L1(0.3, tuple(range(10))).on(MASK),
    "scad on": reg.SCAD(0.4).on(MASK),
    "few": reg.MCP(0.4, 3.0).on([True] * 3 + [False] * 9),
    "blocks": reg.L1(0.3).on([True] * 4 + [False] * 8) + reg.MCP(0.4, 3.0).on([False] * 6 + [True] * 6),
}  # fmt: skip
BESIDE = reg.GroupLasso(0.3, groups=2).on([True] * 4 + [False] * 8) + reg.FusedLasso(0.2).on([False] * 8 + [True] * 4)
GROUPED = {
    "groups": (reg.GroupLasso(0.3, groups=3), [0, 0, 0, 3, 3, 3, 6, 6, 6, 9, 9, 9]),
    "sizes": (reg.GroupLasso(0.3, groups=(5, 4, 3)), [0] * 5 + [5] * 4 + [9] * 3),
    "columns": (reg.SparseGroupLasso(0.1, 0.2, groups="columns", shape=(3, 4)), [0, 1, 2, 3] * 3),
    "2:4": (reg.Sparsity2to4(0.2), [0] * 4 + [4] * 4 + [8] * 4),
    "groups on": (reg.GroupLasso(0.3, groups=5).on(MASK), [0] * 4 + [4, 5, 0] + [7] * 5),
    "beside": (BESIDE, [0, 0, 2, 2, 4, 5, 6, 7, 8, 8, 8, 8]),
    "fused": (reg.FusedLasso(0.2), [0] * 12), "ball": (reg.L1Ball(1.0), [0] * 12),
    "linf": (reg.LinfNorm(0.2), [0] * 12),
}  # fmt: skip


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("name", CASES)
def test_separable_terms_take_a_step_per_coordinate(name):
    h = CASES[name]
    assert torch.equal(h.coupling(D), torch.arange(D))
    v, steps = draw(3, D), 0.1 + draw(D, seed=1).abs()
    one_by_one = torch.stack([h.prox(v, float(s))[:, j] for j, s in enumerate(steps)], dim=1)
    torch.testing.assert_close(h.prox(v, steps), one_by_one, rtol=1e-13, atol=1e-15)
    torch.testing.assert_close(h.prox(v, steps.expand(3, D)), one_by_one, rtol=1e-13, atol=1e-15)
    target = v.clone()
    torch.testing.assert_close(h.prox(target, steps, out=target), one_by_one, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("name", GROUPED)
def test_parts_are_named_by_their_first_coordinate(name):
    h, want = GROUPED[name]
    assert h.coupling(D).tolist() == want


@pytest.mark.parametrize("name", [*CASES, *GROUPED])
def test_h_is_the_sum_over_its_parts_and_its_prox_acts_on_each(name):
    h = CASES[name] if name in CASES else GROUPED[name][0]
    parts = h.coupling(D)
    x = h.prox(draw(D), 0.3)
    pieces = [torch.where(parts == label, x, 0.0) for label in parts.unique()]
    torch.testing.assert_close(sum(h.value(p) for p in pieces), h.value(x), rtol=1e-12, atol=1e-14)
    v, other = draw(D, seed=2), draw(D, seed=3)
    for label in parts.unique():
        mixed = torch.where(parts == label, v, other)
        torch.testing.assert_close(h.prox(mixed, 0.3)[parts == label], h.prox(v, 0.3)[parts == label])


@pytest.mark.parametrize("name", [*CASES, *GROUPED])
def test_among_whole_parts_a_term_is_that_of_the_whole_vector(name):
    h = CASES[name] if name in CASES else GROUPED[name][0]
    labels, x = h.coupling(D), h.prox(draw(D), 0.1)
    for chosen in (h.acts_on(D), torch.isin(labels, labels.unique()[::2]), torch.isin(labels, labels.unique()[1::2])):
        at = chosen.nonzero().squeeze(1)
        if len(at) == 0:
            continue
        part, u, v = restricted(h, x, at), *(h.prox(x.index_copy(0, at, draw(len(at), seed=k)), 0.2) for k in (1, 2))
        torch.testing.assert_close(part.prox(u[at], 0.3), h.prox(u, 0.3)[at], rtol=0, atol=1e-15)
        torch.testing.assert_close(part.value(u[at]) - part.value(v[at]), h.value(u) - h.value(v), rtol=0, atol=1e-12)
