"""Masks and shares by themselves: exact sums, one-time pads, thresholds."""

import itertools
import math
import secrets
from fractions import Fraction

import numpy as np
import pytest

pytest.importorskip("cryptography")

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from fedcomposite.federation.secure import masking, shamir
from fedcomposite.federation.secure.masking import Mask, MaskError, Numbers


def parties(names):
    """Pair seeds of some parties, from real keys."""
    keys = {n: X25519PrivateKey.generate() for n in names}
    return {
        a: {b: masking.pair_seed(keys[a], masking.public(keys[b]), a, b, "epoch") for b in names if b != a}
        for a in names
    }


@pytest.mark.parametrize("count", [2, 3, 7])
def test_masks_cancel_and_the_sum_is_exact_to_half_a_digit(count):
    rng = np.random.default_rng(0)
    names = [f"s{i}" for i in range(count)]
    vectors = {n: rng.normal(size=50) * 10.0 ** rng.integers(-12, 5, 50) for n in names}
    scalars = {n: list(rng.normal(size=3) * 1e12) for n in names}
    seeds = parties(names)
    hidden = [masking.conceal(Numbers.of(vectors[n], scalars[n]), n, seeds[n], None, b"context") for n in names]
    total = masking.total(hidden)
    np.testing.assert_allclose(total.vector(), sum(vectors.values()), rtol=1e-15, atol=count * 2.0**-41 + 1e-18)
    assert total.scalars().tolist() == [math.fsum(column) for column in zip(*scalars.values(), strict=True)]


@pytest.mark.parametrize("width", [masking.WIDE, masking.WIDEST])
def test_wide_numbers_are_those_of_whole_numbers_of_any_length(width):
    """Rounding to integers, their sums and the floats closest to them, as Python's own integers have them."""
    rng, bits = np.random.default_rng(1), 32 * width
    ring = 1 << 2 * bits
    tiny = [2.0**-bits, 2.0 ** -(bits + 1), -3 * 2.0 ** -(bits + 1), masking.reach(width), -masking.reach(width)]
    values = np.concatenate([rng.normal(size=500) * 2.0 ** rng.integers(-bits - 9, bits - 6, 500), [0, -1, 1], tiny])

    def integers(wide):
        return [int.from_bytes(row.tobytes(), "little") for row in wide]

    made = Numbers.of(np.zeros(0), values, width).wide
    assert integers(made) == [round(Fraction(float(v)) * (1 << bits)) % ring for v in values]
    lengths = rng.integers(1, 2 * bits + 1, 1000).tolist()
    whole = [secrets.randbits(size) for size in lengths]
    whole += [
        0,
        1,
        ring - 1,
        ring // 2,
        ring // 2 - 1,
        (1 << 64) - 1,
        1 << 64,
        (1 << 53) + 1,
        ((1 << 53) + 1 << 64) + 1,
    ]
    wide = Numbers.read_wide(b"".join(n.to_bytes(8 * width, "little") for n in whole), width)
    signed = [n - ring if n >= ring // 2 else n for n in whole]
    assert Numbers(np.zeros(0, np.uint64), wide).scalars().tolist() == [math.ldexp(float(n), -bits) for n in signed]
    other = np.roll(wide, 1, axis=0)
    both = masking.total([Numbers(np.zeros(0, np.uint64), part) for part in (wide, other)])
    assert integers(both.wide) == [(a + b) % ring for a, b in zip(whole, integers(other), strict=True)]


def test_the_range_is_the_stated_one_and_belongs_to_the_sum():
    """A party's number may be beyond it: what is summed is right as long as the sum is within, which all are told."""
    edge, wide = masking.REACH / 4, masking.reach(masking.WIDE) / 4
    parts = [Numbers.of(np.array([edge, -edge]), [wide]) for _ in range(4)]
    assert masking.total(parts).vector().tolist() == [masking.REACH, -masking.REACH]
    assert masking.total(parts).scalars().tolist() == [masking.reach(masking.WIDE)]
    far = [Numbers.of(np.array([v, -v]), [v * 2.0**60]) for v in (7e13, -7e13, 3.0)]
    assert masking.total(far).vector().tolist() == [3.0, -3.0]
    assert masking.total(far).scalars().tolist() == [3.0 * 2.0**60]
    assert masking.needed(np.array([edge, -edge]), [wide], masking.WIDE) == 0.25
    assert masking.needed(np.array([1e300]), [], masking.WIDE) == 2.0**30
    for vector, scalars in [([np.nan], []), ([np.inf], []), ([], [np.inf]), ([], [np.nan])]:
        with pytest.raises(MaskError, match="left the finite range"):
            Numbers.of(np.array(vector), scalars)


def test_any_smaller_sum_looks_uniform():
    """One of three missing: the words that are left pass for random ones, though all numbers are zero."""
    names, zero = ["a", "b", "c"], Numbers.of(np.zeros(20_000), [0.0] * 100)
    seeds = parties(names)
    hidden = {n: masking.conceal(Numbers(zero.words.copy(), zero.wide), n, seeds[n], None, b"context") for n in names}
    for some in (["a"], ["b"], ["c"], ["a", "b"], ["a", "c"], ["b", "c"]):
        left = masking.total([hidden[n] for n in some])
        octets = np.frombuffer(left.words.tobytes() + left.wide_bytes(), np.uint8)
        seen = np.bincount(octets, minlength=256)
        expected = len(octets) / 256
        assert ((seen - expected) ** 2 / expected).sum() < 255 + 8 * 510**0.5  # 8 standard deviations
        assert abs(np.unpackbits(octets).mean() - 0.5) < 8 * 0.5 / (8 * len(octets)) ** 0.5
    assert not masking.total(list(hidden.values())).words.any()


def test_a_stream_belongs_to_its_seed_and_context():
    zero = Numbers.of(np.zeros(8), [0.0])
    seen = set()
    for seed, where in itertools.product([bytes(32), b"\1" * 32], [masking.frame("a", "bc"), masking.frame("ab", "c")]):
        seen.add(Mask(seed, where).add(Numbers(zero.words.copy(), zero.wide), 1).words.tobytes())
    assert len(seen) == 4


def test_a_key_of_low_order_gives_no_seed():
    with pytest.raises(MaskError, match="cannot be used"):
        masking.agree(X25519PrivateKey.generate(), "00" * 32, b"")


@pytest.mark.parametrize(("count", "threshold"), [(1, 1), (3, 3), (4, 3), (7, 5)])
def test_any_t_shares_give_the_secret_and_fewer_do_not(count, threshold):
    secret = secrets.token_bytes(32)
    shares = dict(enumerate(shamir.split(secret, count, threshold), 1))
    for chosen in itertools.combinations(shares, threshold):
        assert shamir.join({x: shares[x] for x in chosen}, threshold) == secret
    with pytest.raises(MaskError, match="are needed"):
        shamir.join(dict(list(shares.items())[: threshold - 1]), threshold)


def test_fewer_shares_fit_every_secret():
    """t - 1 shares and any other secret lie on some polynomial: they say nothing about the one that was shared."""
    shares = dict(enumerate(shamir.split(bytes(32), 5, 3), 1))
    known = {x: int.from_bytes(shares[x], "big") for x in (2, 5)}
    other = int.from_bytes(secrets.token_bytes(32), "big")
    points = {0: other, **known}
    third = 0  # the value at 1 of the polynomial through these points, by Lagrange
    for x, y in points.items():
        factor = 1
        for z in points:
            if z != x:
                factor = factor * (1 - z) * pow(x - z, -1, shamir.PRIME) % shamir.PRIME
        third = (third + y * factor) % shamir.PRIME
    made = {1: third.to_bytes(shamir.SIZE, "big"), **{x: shares[x] for x in known}}
    assert shamir.join(made, 3) == other.to_bytes(32, "big")


def test_a_changed_share_is_no_secret_or_another():
    secret = secrets.token_bytes(32)
    shares = dict(enumerate(shamir.split(secret, 4, 3), 1))
    shares[2] = bytes([shares[2][0]]) + secrets.token_bytes(65)
    with pytest.raises(MaskError, match="do not belong together"):
        shamir.join(shares, 3)


@pytest.mark.parametrize("n", range(2, 40))
def test_two_groups_that_reach_the_threshold_share_more_than_a_third(n):
    """So no coordinator gets both shares of a site from sites of which fewer than a third help it."""
    t = shamir.least(n)
    assert t <= n
    assert 2 * t - n > (n - 1) // 3 or n < 4
    assert 2 * t > n


def test_all_but_one_together_open_the_last():
    """What no sum can stop: b and c give their seeds to the coordinator."""
    seeds, secret = parties(["a", "b", "c"]), np.array([3.25])
    numbers = masking.conceal(Numbers.of(secret, [7.0]), "a", seeds["a"], None, b"context")
    for other in ("b", "c"):
        numbers = Mask(seeds[other]["a"], b"context").add(numbers, -masking.side("a", other))
    assert numbers.vector() == secret
    assert numbers.scalars().tolist() == [7.0]
