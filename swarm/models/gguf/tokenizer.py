"""The tokenizer that a GGUF file's metadata stand for, as the files that transformers reads.

transformers makes it of the vocabulary; here is what it leaves out: splits of more vocabularies, the space before a
text, and what begins and ends one.
"""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any, Final

from swarm.errors import UnsupportedModel

if TYPE_CHECKING:
    from pathlib import Path

    from tokenizers import Tokenizer

    from swarm.models.gguf.container import GgufHeader, MetadataValue

logger = logging.getLogger(__name__)

BYTE_LEVEL: Final = "gpt2"
SENTENCE_PIECE: Final = "llama"

AS_GPT2: Final = {"gpt-2", "granite-docling", "mpt", "olmo", "phi-2", "trillion"}
"""Splits (`tokenizer.ggml.pre`) that are GPT-2's."""
DIGIT_BY_DIGIT: Final = {"codeshell", "command-r", "exaone", "minerva-7b", "refact", "smollm", "starcoder"}
"""Splits that are GPT-2's behind one at each digit."""
AS_LLAMA3: Final = {"glm4"}
AS_QWEN2: Final = {"stablelm2"}
UNSPLIT: Final = {"", "default"}
"""Files of before splits were written: llama.cpp guesses for them too."""

BEGUN: Final = {
    "falcon-h1", "falcon3", "lfm2", "llama-bpe", "llama-v3", "llama3", "midm-2.0", "pixtral", "tekken",
}  # fmt: skip
"""Splits of vocabularies whose texts begin with a token of their own unless a file says no, and whose whole words are
taken before any merge."""

CONTROL: Final = 3
"""The type of a token that stands for no text."""
ENDS: Final = {
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>",
    "<EOT>", "<|END_OF_TURN_TOKEN|>", "<|end_of_text|>", "<|end_of_role|>",
}  # fmt: skip
"""Control tokens that end a text or a turn, whether or not the metadata name them.

Source: llama.cpp, `llama-vocab.cpp`.
"""

SPECIAL: Final = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def write_tokenizer(header: GgufHeader, name: str, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json, a chat template if there is one, and generation_config.json.

    Raises:
        UnsupportedModel: the vocabulary is of a kind that is not read, or damaged.
        OSError: a file cannot be written.
    """
    # Here, because these take a second to import, and most models need none of them.
    from transformers import PreTrainedTokenizerFast

    tokens = _texts(header, "tokens", name)
    try:
        backend = _backend(header, name)
        make: Any = PreTrainedTokenizerFast
        fast = make(tokenizer_object=backend, **_settings(header, tokens))
    except UnsupportedModel:
        raise
    except Exception as error:  # what transformers and tokenizers raise on a damaged vocabulary may be anything
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise UnsupportedModel(f"{name}: its tokenizer cannot be read ({reason})") from error
    fast.save_pretrained(folder)
    ends = end_ids(header, tokens)
    generation = {"eos_token_id": ends} if ends else {}
    (folder / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")


def end_ids(header: GgufHeader, tokens: list[str]) -> list[int]:
    """Ids that end a text: those that the metadata name, and control tokens that always do."""
    named = [header.number(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    kinds = header.metadata.get("tokenizer.ggml.token_type")
    types = kinds if isinstance(kinds, list) else []
    usual = [index for index, (token, kind) in enumerate(zip(tokens, types, strict=False)) if _ends(token, kind)]
    return list(dict.fromkeys([*(one for one in named if one is not None), *usual]))


def _ends(token: str, kind: MetadataValue) -> bool:
    return kind == CONTROL and token in ENDS


def _texts(header: GgufHeader, key: str, name: str) -> list[str]:
    value = header.metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise UnsupportedModel(f"{name}: its metadata has no tokenizer.ggml.{key}; convert it again")
    return [str(one) for one in value]


def _backend(header: GgufHeader, name: str) -> Tokenizer:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import (
        GGUF_PRE_TOKENIZER_SPLITS,
        GGUF_TOKENIZER_MAPPING,
        GGUF_TOKENIZER_TYPES,
        convert_gguf_tokenizer,
    )

    kind, split = header.text("tokenizer.ggml.model"), header.text("tokenizer.ggml.pre")
    if kind not in GGUF_TOKENIZER_TYPES:
        known = ", ".join(sorted(GGUF_TOKENIZER_TYPES))
        raise UnsupportedModel(f"{name}: its tokenizer is of kind {kind!r}, which is not read; read are {known}")
    keys = {f"tokenizer.{key}": title for key, title in GGUF_TOKENIZER_MAPPING["tokenizer"].items()}
    vocabulary = {title: header.metadata[key] for key, title in keys.items() if key in header.metadata}
    known_splits = {*GGUF_PRE_TOKENIZER_SPLITS, *AS_GPT2, *DIGIT_BY_DIGIT, *AS_LLAMA3, *AS_QWEN2, *UNSPLIT}
    if kind == BYTE_LEVEL and split not in known_splits:
        known = ", ".join(sorted(known_splits - UNSPLIT))
        raise UnsupportedModel(f"{name}: its text is split by {split!r}, which is not known; known are {known}")
    if kind == BYTE_LEVEL and split in UNSPLIT:
        logger.warning("%s: the file does not say how its text is split; it is split as GPT-2's", name)
    if split in AS_LLAMA3 | AS_QWEN2:
        vocabulary["pre_tokenizer_type"] = "llama3" if split in AS_LLAMA3 else "qwen2"
    backend: Tokenizer = convert_gguf_tokenizer(header.text("general.architecture"), vocabulary)[0]
    _complete(backend, kind, split, has_space=header.metadata.get("tokenizer.ggml.add_space_prefix") is not False)
    return backend


def _complete(backend: Tokenizer, kind: str, split: str, *, has_space: bool) -> None:
    """Put in what transformers leaves out."""
    from tokenizers import Regex, decoders, pre_tokenizers

    parts: Any = backend
    if kind == BYTE_LEVEL and split in DIGIT_BY_DIGIT:
        digits = pre_tokenizers.Split(Regex(r"\p{N}"), behavior="isolated")
        parts.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    if kind == BYTE_LEVEL and split in BEGUN:
        parts.model.ignore_merges = True
    if kind == SENTENCE_PIECE and not has_space and isinstance(parts.pre_tokenizer, pre_tokenizers.Metaspace):
        parts.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="never", split=False)
        parts.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])


def _settings(header: GgufHeader, tokens: list[str]) -> dict[str, Any]:
    """Special tokens, what is put before and behind a text, and the chat template."""
    kind, split = header.text("tokenizer.ggml.model"), header.text("tokenizer.ggml.pre")
    settings: dict[str, Any] = {}
    for title, key in SPECIAL.items():
        token = header.number(f"tokenizer.ggml.{key}_token_id")
        if token is not None and 0 <= token < len(tokens):
            settings[title] = tokens[token]
    begins = header.metadata.get("tokenizer.ggml.add_bos_token")
    if begins is None:
        begins = kind == SENTENCE_PIECE or (kind == BYTE_LEVEL and split in BEGUN)
    settings["add_bos_token"] = bool(begins) and "bos_token" in settings
    settings["add_eos_token"] = header.metadata.get("tokenizer.ggml.add_eos_token") is True and "eos_token" in settings
    if template := header.text("tokenizer.chat_template"):
        settings["chat_template"] = template
    return settings
