"""Which tokens end a text, whatever a model's side files say."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
from transformers import PreTrainedConfig, PreTrainedTokenizerFast

from client.target import end_tokens
from tests.property.tiny_tokenizers import byte_level

OWN = byte_level().token_to_id("</s>")


def ends(folder: Path, written: str | bytes | None, configured: int | list[int] | None = 5) -> frozenset[int]:
    if written is not None:
        (folder / "generation_config.json").write_bytes(written.encode() if isinstance(written, str) else written)
    tokenizer: Any = cast("Any", PreTrainedTokenizerFast)(tokenizer_object=byte_level(), eos_token="</s>")
    config: Any = PreTrainedConfig()
    config.eos_token_id = configured
    return end_tokens(folder, config, tokenizer)


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
