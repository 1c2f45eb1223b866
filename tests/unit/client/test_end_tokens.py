"""Which tokens end a text, and how a model samples, whatever its side files say."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
from transformers import PreTrainedConfig, PreTrainedTokenizerFast

from client.base.options import sampling_of
from client.base.target import end_tokens, read_generation_config
from tests.property.tiny_tokenizers import byte_level

OWN = byte_level().token_to_id("</s>")


def ends(folder: Path, written: str | bytes | None, configured: int | list[int] | None = 5) -> frozenset[int]:
    if written is not None:
        (folder / "generation_config.json").write_bytes(written.encode() if isinstance(written, str) else written)
    tokenizer: Any = cast("Any", PreTrainedTokenizerFast)(tokenizer_object=byte_level(), eos_token="</s>")
    config: Any = PreTrainedConfig()
    config.eos_token_id = configured
    return end_tokens(read_generation_config(folder), config, tokenizer)


@pytest.mark.parametrize(
    ("written", "configured", "want"),
    [
        ('{"eos_token_id": 7}', 5, {7, OWN}),
        ('{"eos_token_id": [7, 8]}', 5, {7, 8, OWN}),
        ("{}", 5, {5, OWN}),
        ('{"eos_token_id": null}', [5, 6], {5, 6, OWN}),
        (None, None, {OWN}),
    ],
    ids=["one", "several", "none", "null", "no file"],
)
def test_a_turn_ends_at_the_generation_config_s_tokens_and_the_tokenizer_s(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    written: str | None,
    configured: int | list[int] | None,
    want: set[int],
) -> None:
    assert ends(tmp_path, written, configured) == want
    assert not caplog.records


@pytest.mark.parametrize(
    "written",
    ["{", "", "[]", b"\xff\xfe", '{"eos_token_id": "x"}', '{"eos_token_id": [1, "a"]}', '{"eos_token_id": true}'],
    ids=["cut", "empty", "list", "bytes", "text", "mixed", "bool"],
)
def test_a_broken_generation_config_is_one_line_and_the_tokenizer_s_own_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, written: str | bytes
) -> None:
    assert ends(tmp_path, written) == {5, OWN}
    (record,) = caplog.records
    line = record.getMessage()
    assert "generation_config.json" in line
    assert "\n" not in line
    if "eos_token_id" in str(written):
        assert "eos_token_id" in line


@pytest.mark.parametrize(
    ("stated", "sampling"),
    [
        ({}, {}),
        ({"temperature": 0.6, "top_p": 0.95, "top_k": 20}, {"temperature": 0.6, "top_p": 0.95, "top_k": 20}),
        ({"min_p": 0.1, "repetition_penalty": 1.05}, {"min_p": 0.1, "repetition_penalty": 1.05}),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"do_sample": True, "temperature": 0.6}, {"temperature": 0.6}),
        ({"do_sample": False, "temperature": 0.6}, {"temperature": 0.0}),
        ({"top_k": 0, "temperature": None}, {"top_k": 0}),
    ],
)
def test_a_generation_config_says_how_to_sample(stated: dict[str, Any], sampling: dict[str, float]) -> None:
    assert sampling_of(stated) == sampling


@pytest.mark.parametrize(
    "stated",
    [
        {"temperature": "hot"},
        {"temperature": -1},
        {"temperature": float("nan")},
        {"top_p": 1.5},
        {"top_k": True},
        {"top_k": 2.5},
        {"min_p": [0.1]},
        {"repetition_penalty": 0},
    ],
    ids=str,
)
def test_a_number_that_cannot_be_is_left_aside_with_one_line(
    stated: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    assert sampling_of({**stated, "do_sample": None}) == {}
    (record,) = caplog.records
    assert next(iter(stated)) in record.getMessage()
