"""Mutants: what was not changed is the same, much of what was is still read, and no parser has an accident."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.redteam.fuzzing.mutations import build_wire, mutate_packed, mutate_wire, parse_wire
from benchmarks.redteam.fuzzing.parsers import Subject, all_subjects, fuzz_parsers

MUTANTS = 2_500


@pytest.fixture(scope="module")
def subjects() -> list[Subject]:
    return all_subjects()


def test_every_seed_is_valid(subjects: list[Subject]) -> None:
    for subject in subjects:
        for seed in subject.seeds:
            if subject.name != "part":  # all but the first of a frame
                subject.parse(seed)


def test_what_is_not_changed_is_built_as_it_was(subjects: list[Subject]) -> None:
    for subject in subjects:
        if subject.mutate is mutate_wire:
            for seed in subject.seeds:
                fields = parse_wire(seed)
                assert fields is not None
                assert build_wire(fields) == seed


@given(st.binary(max_size=200), st.integers(0, 2**32))
def test_any_bytes_have_mutants(data: bytes, seed: int) -> None:
    rng = random.Random(seed)
    assert isinstance(mutate_wire(rng, data), bytes)
    assert isinstance(mutate_packed(rng, data), bytes)


@pytest.mark.timeout(60)
def test_no_parser_has_an_accident(subjects: list[Subject]) -> None:
    run = fuzz_parsers(MUTANTS, 7, subjects)
    assert run.accidents == []
    assert run.count == MUTANTS
    for subject in subjects:  # else the mutants are all near, or all far from what is right
        if subject.errors:
            assert run.outcomes[f"{subject.name} refused"] > 10
            assert run.outcomes[f"{subject.name} taken"] > 0


def test_an_accident_is_found() -> None:
    def broken(data: bytes) -> object:
        if data[:1] == b"\x08":
            raise KeyError(data)
        return data[0]

    run = fuzz_parsers(50, 1, [Subject("broken", [b"\x08\x01"], mutate_wire, broken, (IndexError,))])
    assert "KeyError" in run.accidents[0]
