"""Counter-based random numbers."""

import numpy as np
import pytest
import torch

from fedcomposite import rng


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        (0x00000000, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (0xFFFFFFFF, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ],
)
def test_philox_known_answers(word, expected):
    """The known-answer vectors published with the Random123 library, in NumPy and in torch."""
    for value in (np.full(1, word, np.uint64), torch.full((1,), word)):
        got = rng.philox((value,) * 4, (word, word))
        assert tuple(int(g[0]) for g in got) == expected


def test_numpy_and_torch_agree():
    clients, steps = np.arange(7), np.arange(5)
    ours = rng.words(11, rng.Use.BATCH, clients[None].astype(np.uint64), 3, steps[:, None].astype(np.uint64), 10)
    theirs = rng.words(11, rng.Use.BATCH, torch.arange(7)[None], 3, torch.arange(5)[:, None], 10)
    assert np.array_equal(ours.astype(np.int64), theirs.numpy())


def test_batches_depend_on_the_counter_alone():
    sizes = np.asarray([5, 100, 17], np.uint64)
    clients = np.arange(3, dtype=np.uint64)
    whole = rng.batches(0, clients, sizes, 4, range(6), 9)
    assert whole.shape == (6, 3, 9)
    assert (whole < sizes[None, :, None]).all()
    one = rng.batches(0, clients[1:2], sizes[1:2], 4, range(2, 3), 9)
    assert np.array_equal(one[0, 0], whole[2, 1])
    assert not np.array_equal(whole, rng.batches(1, clients, sizes, 4, range(6), 9))
    assert not np.array_equal(whole, rng.batches(0, clients, sizes, 5, range(6), 9))


def test_batches_are_uniform():
    drawn = rng.batches(3, np.zeros(1, np.uint64), np.asarray([10], np.uint64), 0, range(200), 500)
    counts = np.bincount(drawn.ravel().astype(int), minlength=10)
    expected = drawn.size / 10
    assert ((counts - expected) ** 2 / expected).sum() < 30  # chi-squared, 9 degrees of freedom: p < 5e-4


@pytest.mark.parametrize("batch", [1, 4, 13])
def test_epochs_see_every_sample_once(batch):
    sizes = np.asarray([12, 5], np.uint64)
    drawn = rng.epochs(0, np.arange(2, dtype=np.uint64), sizes, 2, range(24), batch)
    for j, m in enumerate((12, 5)):
        stream = drawn[:, j].ravel()
        whole = stream[: len(stream) // m * m].reshape(-1, m)
        assert (np.sort(whole, axis=1) == np.arange(m)).all()
    later = rng.epochs(0, np.arange(2, dtype=np.uint64), sizes, 2, range(7, 9), batch)
    assert np.array_equal(later, drawn[7:9])


def test_cohorts_are_distinct_sorted_and_uniform():
    counts = np.zeros(20)
    for r in range(2000):
        chosen = rng.choose(0, r, 20, 5)
        assert len(set(chosen)) == 5
        assert (np.diff(chosen) > 0).all()
        counts[chosen] += 1
    assert ((counts - 500) ** 2 / 500).sum() < 50  # about chi-squared with 19 degrees of freedom
    assert len(rng.choose(0, 0, 10**9, 100)) == 100  # cost does not grow with the number of clients
    assert len(set(rng.choose(0, 1, 3, 50, replace=True))) == 3


def test_uniforms_stay_inside_the_unit_interval():
    drawn = rng.uniforms(0, rng.Use.METHOD, torch.arange(50), 0, 0, 100)
    assert drawn.shape == (50, 100)
    assert 0 < float(drawn.min()) < float(drawn.max()) < 1
    assert abs(float(drawn.mean()) - 0.5) < 0.02
