"""Prefixes that beams share, against a dictionary of tuples."""

from __future__ import annotations

import random

import pytest
import torch

from client.draft.sources.recurrent import EMPTY, shared_prefixes


@pytest.mark.parametrize("seed", range(10))
def test_every_prefix_is_found_once_with_its_parent_before_it(seed: int) -> None:
    rng = random.Random(seed)
    levels = rng.randint(1, 6)
    beams = [[rng.randrange(3) for _ in range(rng.randint(1, levels))] for _ in range(rng.randint(1, 20))]
    padded = torch.tensor([beam + [EMPTY] * (levels - len(beam)) for beam in beams])
    found = shared_prefixes(padded)
    expected = {tuple(beam[: end + 1]) for beam in beams for end in range(len(beam))}
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(found.tokens.tolist(), found.parents.tolist(), strict=True):
        assert parent < len(paths)
        paths.append((*(paths[parent] if parent != EMPTY else ()), token))
    assert len(paths) == len(set(paths))
    assert set(paths) == expected
    assert [len(path) for path in paths] == sorted(len(path) for path in paths)
    for beam, row in zip(beams, found.place.tolist(), strict=True):
        assert [paths[place] for place in row[: len(beam)]] == [tuple(beam[: end + 1]) for end in range(len(beam))]
        assert set(row[len(beam) :]) <= {EMPTY}
        end = rng.randint(1, len(beam))
        assert found.find(torch.tensor([beam[:end]])).tolist() == [paths.index(tuple(beam[:end]))]
