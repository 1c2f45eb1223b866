"""Keyed Gumbel noise: one number per (seed, position, token id), the same on every machine. Owns no state.

The law, which must never change: with `lo, hi` two words of Philox4x32-10 and all arithmetic in float64,

    key      = seed mod 2³², seed >> 32
    counter  = position of the picked token, id >> 1, domain, 0
    x        = lo + 2³²·hi        words 0, 1 of the block for an even id, words 2, 3 for an odd one
    u        = min((x + ½)·2⁻⁶⁴, 1 − 2⁻⁵³)
    g        = −log(−log1p(−u))

Small u makes large g, and float64 is finest near 0, so the right tail, which wins argmaxes, keeps all 64 bits.
The bound on u matters to one x in 2⁵⁴, whose sum rounds to 1: so g lies in [−3.61, 45.06] and is always finite.
Integers are exact everywhere; the two logarithms may differ in their last bit between maths libraries.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]
"""32-bit words held in 64 bits, so that a product keeps its high half."""

PICK_DOMAIN = 0
"""Third counter word of the picks' noise; any other use of a session's seed has another domain."""

MULTISTEP_DOMAIN = 1
"""Third counter word for `swarm.compute.multistep_sampling`; its last counter word is the sweep's sequence."""

_WORD = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
_CHUNK_BLOCKS = 8192  # a chunk's few arrays stay in the L2 cache
_BELOW_ONE = 1.0 - 2.0**-53


def philox(counter: tuple[Words, Words, Words, Words], key: tuple[int, int]) -> tuple[Words, Words, Words, Words]:
    """Philox4x32-10 of every counter block.

    Args:
        counter: four words per block; each is an array of one common shape, or a scalar.
        key: two 32-bit words.

    Returns:
        Four words per block, in the counter's shape.

    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 4.3.
    """
    word0, word1, word2, word3 = counter
    key0, key1 = key
    for _ in range(_ROUNDS):
        product0 = _MULTIPLIERS[0] * word0
        product1 = _MULTIPLIERS[1] * word2
        word0 = product1 >> _SHIFT  # in place from here on: temporaries cost more than the arithmetic
        word0 ^= word1
        word0 ^= np.uint64(key0)
        word2 = product0 >> _SHIFT
        word2 ^= word3
        word2 ^= np.uint64(key1)
        product1 &= _WORD
        product0 &= _WORD
        word1, word3 = product1, product0
        key0 = key0 + _KEY_STEPS[0] & 0xFFFFFFFF
        key1 = key1 + _KEY_STEPS[1] & 0xFFFFFFFF
    return word0, word1, word2, word3


def gumbel(seed: int, position: int, ids: npt.NDArray[np.integer]) -> npt.NDArray[np.float64]:
    """Noise of the given token ids.

    Args:
        seed: the session's, below 2^64.
        position: of the picked token, below 2^32.
        ids: [n] any token ids, repeats allowed.

    Returns:
        [n], in the order of `ids`.

    Raises:
        ValueError: seed outside 64 bits, position outside 32 bits, or an id outside 33 bits.
    """
    ids = np.asarray(ids).astype(np.int64)
    if ids.size and not 0 <= ids.min() <= ids.max() < 2**33:
        raise ValueError(f"token ids must lie in [0, 2**33), got {ids.min()} to {ids.max()}")
    even, odd = _uniforms(seed, position, (ids >> 1).view(np.uint64))
    return _gumbel_from_uniform(np.where(ids & 1, odd, even))


def gumbel_row(seed: int, position: int, vocab_size: int) -> npt.NDArray[np.float64]:
    """Noise of the whole vocabulary: the same numbers as `gumbel`, for less work.

    Returns:
        [vocab_size]

    Raises:
        ValueError: seed outside 64 bits, position outside 32 bits, or a vocabulary above 2**33.
    """
    if not 0 <= vocab_size <= 2**33:
        raise ValueError(f"vocab_size must lie in [0, 2**33], got {vocab_size}")
    blocks = (vocab_size + 1) // 2
    row = np.empty((blocks, 2))
    for start in range(0, blocks, _CHUNK_BLOCKS):
        part = row[start : start + _CHUNK_BLOCKS]
        numbers = np.arange(start, start + len(part), dtype=np.uint64)
        part[:, 0], part[:, 1] = _uniforms(seed, position, numbers)
        _gumbel_from_uniform(part)
    return row.reshape(-1)[:vocab_size]


def uniforms(seed: int, position: int, use: tuple[int, int], count: int) -> npt.NDArray[np.float64]:
    """Numbers in (0, 1) for another use than the picks' noise: the law's u with other counter words.

    Args:
        seed: the session's, below 2^64.
        position: of the picked token, below 2^32.
        use: the last two counter words: a domain, and what distinguishes numbers within it.
    """
    blocks = np.arange((count + 1) // 2, dtype=np.uint64)
    words = philox((_word(position), blocks, _word(use[0]), _word(use[1])), (seed & 0xFFFFFFFF, seed >> 32))
    return np.stack([_uniform(*words[:2]), _uniform(*words[2:])], axis=1).reshape(-1)[:count]


def _word(value: int) -> Words:
    return np.asarray(value, dtype=np.uint64)


def _uniforms(seed: int, position: int, blocks: Words) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Uniforms of the ids `2·blocks` and `2·blocks + 1`."""
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed must lie in [0, 2**64), got {seed}")
    if not 0 <= position < 2**32:
        raise ValueError(f"position must lie in [0, 2**32), got {position}")
    counter = _word(position), blocks, _word(PICK_DOMAIN), _word(0)
    word0, word1, word2, word3 = philox(counter, (seed & 0xFFFFFFFF, seed >> 32))
    return _uniform(word0, word1), _uniform(word2, word3)


def _uniform(lo: Words, hi: Words) -> npt.NDArray[np.float64]:
    """The law's u. Both halves are exact in float64, so `x` is rounded once, as a 64-bit integer would be."""
    uniform = hi.astype(np.float64)
    uniform *= 2.0**32
    uniform += lo
    uniform += 0.5
    uniform *= 2.0**-64
    return np.minimum(uniform, _BELOW_ONE, out=uniform)


def _gumbel_from_uniform(uniform: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The law's g, in place."""
    np.negative(uniform, out=uniform)
    np.log1p(uniform, out=uniform)
    np.negative(uniform, out=uniform)
    np.log(uniform, out=uniform)
    return np.negative(uniform, out=uniform)
