"""Vectors with many zeros travel without them: nothing is lost, nothing false is put together, bytes are counted."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

import fedcomposite as fc
from fedcomposite.algorithms import FedMid
from fedcomposite.federation import wire
from fedcomposite.regularizers import TopK
from fedcomposite.runtime import sparse_messages


def drawn(n: int, share: float, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    made = torch.Generator().manual_seed(seed)
    return torch.where(torch.rand(n, generator=made) < share, torch.randn(n, generator=made), 0.0).to(dtype)


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 9000), st.floats(0, 1), st.sampled_from([torch.float32, torch.float64]), st.integers(0, 99)
)  # fmt: skip
def test_the_same_bits_come_out(n: int, share: float, dtype: torch.dtype, seed: int) -> None:
    x = drawn(n, share, dtype, seed)
    x[: n // 3] = -x[: n // 3]  # zeros with a sign are no zeros
    block = wire.block({"x": x})
    back = wire.unpack({"vectors": block}, wire.form({"x": x}))["x"]
    assert back.numpy().tobytes() == x.numpy().tobytes()
    assert len(block) <= sparse_messages.sizes(x) + 600
    assert sparse_messages.sizes(x) <= x.nbytes


@pytest.mark.parametrize(("share", "times"), [(0.05, 15.7), (0.03, 25.9), (0.3, 3.0)])
def test_zeros_weigh_little(share: float, times: float) -> None:
    x = drawn(200_000, share)
    assert x.nbytes / len(wire.block({"x": x})) > 0.95 * times


def test_rows_that_are_full_and_shapes_of_more_axes() -> None:
    x = torch.zeros(40, 255, 2)
    x[7] = 1.0
    x[-1, -1, -1] = 2.0
    back = wire.unpack({"vectors": wire.block({"a": x, "b": x[:3]})}, {**wire.form({"a": x, "b": x[:3]})})
    assert torch.equal(back["a"], x)
    assert torch.equal(back["b"], x[:3])


def test_a_shorter_vector_where_one_may_be() -> None:
    form = {"x": wire.Form((9000,), torch.float64, exact=False)}
    x = drawn(5000, 0.01, torch.float64)
    assert torch.equal(wire.unpack({"vectors": wire.block({"x": x})}, form)["x"], x)
    with pytest.raises(wire.WireError):
        wire.unpack({"vectors": wire.block({"x": drawn(9001, 0.01, torch.float64)})}, form)


def broken(x: torch.Tensor, **parts: torch.Tensor | None) -> bytes:
    """A block in which parts of a vector are others."""
    whole = sparse_messages.encode({"x": x}) | {f"x/{k}": v for k, v in parts.items()}
    return wire.files.pack({k: v for k, v in whole.items() if v is not None})


FALSE = {
    "another shape": {"shape": torch.tensor([10**15])},
    "a negative length": {"shape": torch.tensor([-1, -5000])},
    "a number too few": {"values": torch.ones(3)},
    "another type": {"values": torch.ones(50, dtype=torch.float64)},
    "no places": {"places": None},
    "a part too many": {"bits": torch.zeros(625, dtype=torch.uint8)},
    "counts beyond the end": {"counts": torch.full((20,), 255, dtype=torch.uint8)},
    "a longer count": {"counts": torch.zeros(10**6, dtype=torch.uint8)},
    "not finite": {"values": torch.full((50,), torch.nan)},
    "the vector itself, too": {"": torch.ones(5000)},
}


@pytest.mark.parametrize("parts", FALSE.values(), ids=FALSE)
def test_what_does_not_fit_is_refused(parts: dict[str, torch.Tensor | None]) -> None:
    x = torch.zeros(5000)
    x[::100] = 1.0
    block = broken(x, **parts)
    if "" in parts:
        block = wire.files.pack({**sparse_messages.encode({"x": x}), "x": torch.ones(5000)})
    with pytest.raises(wire.WireError):
        wire.unpack({"vectors": block}, wire.form({"x": x}))


def test_places_out_of_order_are_refused() -> None:
    x = torch.zeros(5000)
    x[[3, 9]] = 1.0
    for places in ([9, 3], [3, 3], [3, 255]):
        with pytest.raises(wire.WireError):
            wire.unpack({"vectors": broken(x, places=torch.tensor(places, dtype=torch.uint8))}, wire.form({"x": x}))


def test_a_simulation_counts_what_is_sent() -> None:
    X = torch.randn(40, 6000, generator=torch.Generator().manual_seed(1))
    silos = fc.Silos.from_arrays([(X[:20].numpy(), (X[:20, 0] > 0).numpy()), (X[20:].numpy(), (X[20:, 0] > 0).numpy())])
    problem = fc.Problem(silos, regularizer=TopK(50))
    run = fc.simulate(problem, FedMid(local_steps=1, step=0.1), rounds=3)
    down = run.history[-1].bytes_down - run.history[-2].bytes_down
    assert down == 2 * (50 * 8 + 50 + 24)  # 50 numbers, their places and a count for each of 24 rows
