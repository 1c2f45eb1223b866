"""The noise law: published Philox vectors, golden values, the tails; every way of asking gives the same number."""

from __future__ import annotations

import math

import numpy as np
import pytest

from swarm.compute import gumbel as noise
from swarm.compute.gumbel import gumbel, gumbel_row, philox
from tests.oracle import oracle_gumbel, oracle_philox

# Random123's kat_vectors, "philox4x32 10": counter, key, result.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
GOLDEN = [
    (0, 0, 0, -0.753587287417819),
    (0, 0, 1, 0.07247377066683777),
    (1, 0, 0, -0.8112842541412238),
    (7, 41, 31_999, 2.342749240749173),
    (16_045_690_984_503_111_693, 131_071, 128_255, -0.41848898743806034),
    (18_446_744_073_709_551_615, 4_294_967_295, 1_048_576, 1.4528659441897522),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_published_vectors(
    counter: tuple[int, int, int, int], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    words = [np.full(3, word, dtype=np.uint64) for word in counter]
    got = philox((words[0], words[1], words[2], words[3]), key)
    for word, wanted in zip(got, expected, strict=True):
        assert word.tolist() == [wanted] * 3
    assert oracle_philox(counter, key) == expected


@pytest.mark.parametrize(("seed", "position", "token", "expected"), GOLDEN)
def test_golden_values(seed: int, position: int, token: int, expected: float) -> None:
    assert gumbel(seed, position, np.array([token]))[0] == pytest.approx(expected, rel=1e-14, abs=1e-15)
    assert oracle_gumbel(seed, position, token) == pytest.approx(expected, rel=1e-14, abs=1e-15)


@pytest.mark.parametrize("vocab_size", [0, 1, 2, 7, 2 * noise._CHUNK_BLOCKS, 2 * noise._CHUNK_BLOCKS + 3, 50_257])
def test_any_subset_and_any_padding_give_the_same_bits(vocab_size: int) -> None:
    row = gumbel_row(11, 5, vocab_size)
    assert row.shape == (vocab_size,)
    assert np.array_equal(gumbel_row(11, 5, vocab_size + 1)[:vocab_size], row)
    ids = np.random.default_rng(0).permutation(vocab_size)[:1000]
    assert np.array_equal(gumbel(11, 5, ids), row[ids])
    assert all(gumbel(11, 5, ids[i : i + 1])[0] == row[ids[i]] for i in range(min(5, len(ids))))


@pytest.mark.parametrize("kind", [np.uint8, np.int32, np.int64, np.uint64])
def test_ids_of_any_integer_type(kind: type[np.integer]) -> None:
    ids = [3, 200, 3, 0]
    assert gumbel(9, 1, np.array(ids, dtype=kind)).tolist() == gumbel_row(9, 1, 201)[ids].tolist()


def test_each_part_of_the_key_matters() -> None:
    rows = [gumbel_row(seed, position, 64) for seed in (0, 1, 1 << 32, 1 << 63) for position in (0, 1, 2**32 - 1)]
    assert len({row.tobytes() for row in rows}) == len(rows)
    assert len(set(rows[0].tolist())) == 64


@pytest.mark.parametrize("word", [0, 1, 2**32 - 1])
@pytest.mark.parametrize("high", [0, 1, 2**31, 2**32 - 2, 2**32 - 1])
def test_the_ends_of_the_uniform_are_finite(high: int, word: int) -> None:
    lo, hi = (np.array([value], dtype=np.uint64) for value in (word, high))
    uniform = noise._uniform(lo, hi)
    assert uniform[0] == min((float((high << 32) + word) + 0.5) * 2.0**-64, 1 - 2.0**-53)
    got = noise._gumbel_from_uniform(uniform)[0]
    assert -3.61 < got < 45.06
    assert math.isfinite(got)


def test_the_right_tail_keeps_its_64_bits() -> None:
    """24-bit uniforms would end at 17.3 and take few values there; neighbours at the far end must stay apart."""
    lo = np.arange(4, dtype=np.uint64)
    tail = noise._gumbel_from_uniform(noise._uniform(lo, np.zeros(4, dtype=np.uint64)))
    assert tail[0] == pytest.approx(65 * math.log(2))
    assert (np.diff(tail) < -0.3).all()


def test_moments() -> None:
    """Mean γ and variance π²/6 of 2¹⁸ values, within 5 standard errors each: a false alarm once in 10⁶ seeds."""
    values = np.concatenate([gumbel_row(2024, position, 2**14) for position in range(16)])
    variance = math.pi**2 / 6
    assert abs(values.mean() - np.euler_gamma) < 5 * math.sqrt(variance / len(values))
    kurtosis = 5.4  # of the Gumbel distribution
    assert abs(values.var() - variance) < 5 * variance * math.sqrt((kurtosis - 1) / len(values))


@pytest.mark.parametrize(
    ("seed", "position", "token", "name"),
    [
        (-1, 0, 0, "seed"),
        (2**64, 0, 0, "seed"),
        (0, -1, 0, "position"),
        (0, 2**32, 0, "position"),
        (0, 0, -1, "ids"),
        (0, 0, 2**33, "ids"),
    ],
)
def test_what_does_not_fit_the_counter_is_refused(seed: int, position: int, token: int, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        gumbel(seed, position, np.array([token]))


@pytest.mark.parametrize("vocab_size", [-1, 2**33 + 1])
def test_a_vocabulary_outside_the_counter_is_refused(vocab_size: int) -> None:
    with pytest.raises(ValueError, match="vocab_size"):
        gumbel_row(0, 0, vocab_size)
