"""`pick` against the specification in `tests/oracle.py`, over logits full of ties and every mix of filters."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarm.compute.gumbel import gumbel
from swarm.compute.picks import filters as module
from swarm.compute.sampling import check, pick
from swarm.protocol.messages import Sampling
from tests.oracle import oracle_gumbel, oracle_pick

samplings = st.builds(
    Sampling,
    seed=st.integers(0, 2**64 - 1),
    temperature=st.sampled_from([0.0, 0.01, 0.3, 0.7, 1.0, 1.7, 50.0]),
    top_k=st.none() | st.integers(1, 70),
    top_p=st.none() | st.sampled_from([0.25, 0.5, 1.0]) | st.floats(0.001, 1.0),
    min_p=st.none() | st.sampled_from([0.0, 1.0]) | st.floats(0.0, 1.0),
)


@given(
    sampling=samplings,
    shape=st.tuples(st.integers(1, 5), st.integers(1, 60)),
    levels=st.sampled_from([1, 2, 4, 1000]),
    numbers=st.randoms(use_true_random=False),
    head=st.sampled_from([1, 4, 1024]),
)
def test_pick_is_the_specification(
    sampling: Sampling, shape: tuple[int, int], levels: int, numbers: Random, head: int
) -> None:
    rows, vocab_size = shape
    values = [[numbers.randrange(levels) * 8 / levels - 4 for _ in range(vocab_size)] for _ in range(rows)]
    logits = torch.tensor(values, dtype=torch.float32)
    positions = [numbers.choice([0, 1, 77, 2**32 - 1]) for _ in range(rows)]
    check(sampling, vocab_size)
    expected = [oracle_pick(row.numpy(), position, sampling) for row, position in zip(logits, positions, strict=True)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_HEAD_TOKENS", head)
        assert pick(logits, positions, sampling) == expected


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**31))
def test_noise_is_the_specification(seed: int, position: int, token: int) -> None:
    got = gumbel(seed, position, np.array([token]))[0]
    assert got == pytest.approx(oracle_gumbel(seed, position, token), rel=1e-13, abs=1e-15)
