"""Machines that give equal bits have one mark, others another: instructions count, threads and oneDNN do not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from swarm.compute.position_attention import attend_by_positions
from swarm.compute.rounding import rounding_of
from swarm.protocol.numeric_class import NumericClass, with_rounding, without_rounding
from swarm.trust.bounds import FAR_MEDIAN, FLOOR, Bounds

CONFIG: Any = SimpleNamespace(hidden_size=128, num_attention_heads=6, num_key_value_heads=2, head_dim=64)
CLASS = "cpu-bfloat16-k2+gguf"


def test_threads_and_libraries_that_give_the_same_bits_give_the_same_mark() -> None:
    threads, marks = torch.get_num_threads(), set[str]()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            marks.add(rounding_of(CONFIG))
            with cast("Any", torch.backends.mkldnn).flags(enabled=False, allow_tf32=None):
                marks.add(rounding_of(CONFIG))
    finally:
        torch.set_num_threads(threads)
    assert len(marks) == 1
    parsed = NumericClass.parse(with_rounding(CLASS, marks.pop()))
    assert parsed is not None
    assert parsed.rounding
    assert without_rounding(str(parsed)) == CLASS


def test_other_instructions_give_another_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    own = rounding_of(CONFIG)
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "of another machine")
    assert rounding_of(CONFIG) != own


def test_one_bit_of_any_number_makes_another_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever chose the instructions: the numbers themselves count."""
    own = rounding_of(CONFIG)

    def otherwise(*given: Any) -> torch.Tensor:  # noqa: ANN401 - as the attention's
        made = attend_by_positions(*given).contiguous()
        made.view(torch.int16).view(-1)[-1] ^= 1
        return made

    monkeypatch.setattr("swarm.compute.rounding.attend_by_positions", otherwise)
    assert rounding_of(CONFIG) != own


def test_rows_of_one_mark_are_judged_one_by_one_and_others_by_medians() -> None:
    one, other = f"{CLASS}~0123abcd", f"{CLASS}~89ab4567"
    assert Bounds.known(one, one) == Bounds(one, one, FLOOR)
    for pair in ((one, other), (one, CLASS), (CLASS, CLASS)):
        known = Bounds.known(*pair)
        assert known is not None
        assert known.median == FAR_MEDIAN
    assert Bounds.known(one, "cpu-bfloat16-k1+gguf") is None
