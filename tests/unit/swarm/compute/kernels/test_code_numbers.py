"""The assembly that only a card runs gives the numbers that codes mean, for every word and both words of a register."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from swarm.compute.kernels.code_numbers import ASSEMBLY, E4M3_NAN, numbers_of
from swarm.compute.kernels.packed_words import disarrange
from tests.kernels import ptx


@pytest.mark.parametrize(("bits", "numbers"), ASSEMBLY)
def test_assembly_unpacks_every_word(bits: int, numbers: str) -> None:
    words = np.arange(1 << 16, dtype=np.uint32)
    other = words[::-1] ^ np.uint32(0x5A5A)
    planes = 16 // bits
    made = [ptx.halves(one) for one in ptx.run(ASSEMBLY[bits, numbers], planes, words | other << np.uint32(16))]
    for place, half in enumerate((words, other)):
        stored = torch.from_numpy(half.astype(np.uint16).view(np.int16).copy())[:, None]
        codes = disarrange(stored, bits, 1, planes)
        wanted, got = numbers_of(codes, numbers), torch.stack([one[:, place].float() for one in made], -1)
        if numbers == "e4m3":  # no number is 480 here; such weights are refused when they are packed
            is_number = codes & E4M3_NAN != E4M3_NAN
            wanted, got = wanted[is_number], got[is_number]
        assert torch.equal(got, wanted)
