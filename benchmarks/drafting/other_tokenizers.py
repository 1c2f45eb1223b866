"""The demo draft with other tokenizers, trained here: it guesses about as well, in other tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import torch
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from client.draft.vocabulary.token_strings import read_strings
from swarm.demo import DRAFT, PASSAGES, TARGET

TOKENS = 1_500
"""Of a tokenizer that is trained here."""


def fast_tokenizer(tokenizer_object: Tokenizer, **names: str) -> PreTrainedTokenizerFast:
    """A tokenizer as transformers wraps it, with the names of its control tokens."""
    made: PreTrainedTokenizerFast = cast("Any", PreTrainedTokenizerFast)(tokenizer_object=tokenizer_object, **names)
    return made


def demo_tokenizer() -> PreTrainedTokenizerFast:
    return fast_tokenizer(Tokenizer.from_file(str(TARGET / "tokenizer.json")), bos_token="<s>", eos_token="</s>")


def passages() -> list[str]:
    return [json.loads(line)["text"] for line in PASSAGES.read_text(encoding="utf-8").splitlines()]


def byte_level(texts: list[str], size: int = TOKENS) -> PreTrainedTokenizerFast:
    """Byte-level BPE with merges of its own and control tokens of other names."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = cast("Any", pre_tokenizers.ByteLevel(add_prefix_space=False))
    tokenizer.decoder = cast("Any", decoders.ByteLevel())
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(
        vocab_size=size, special_tokens=["<pad>", "<end>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return fast_tokenizer(tokenizer, eos_token="<end>", pad_token="<pad>")


def metaspace(texts: list[str], size: int = TOKENS) -> PreTrainedTokenizerFast:
    """BPE over text with `▁` for a space, bytes for what has no token, and a space before the first word."""
    tokenizer = Tokenizer(BPE(byte_fallback=True, unk_token="<unk>"))
    marks = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = cast("Any", normalizers.Sequence(cast("Any", marks)))
    tokenizer.pre_tokenizer = cast("Any", pre_tokenizers.Split("▁", "merged_with_next"))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = cast("Any", decoders.Sequence(cast("Any", steps)))
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = BpeTrainer(vocab_size=size, special_tokens=["<unk>", "<s>", "</s>", *bytes_], show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if not token["content"].startswith("<0x")]
    return fast_tokenizer(Tokenizer.from_str(json.dumps(state)), bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def save_speaking(tokenizer: PreTrainedTokenizerFast, folder: Path) -> Path:
    """Save the demo draft with another tokenizer: a token's row is the mean of the rows that its text had."""
    usual = demo_tokenizer()
    strings = read_strings(tokenizer, len(tokenizer)).by_id
    model = cast("Any", AutoModelForCausalLM).from_pretrained(DRAFT, dtype=torch.float32)
    old = model.get_input_embeddings().weight.detach().clone()
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    rows = model.get_input_embeddings().weight
    with torch.no_grad():
        for token, (_, data) in strings.items():
            ids = usual.encode(data.decode("utf-8", "replace"), add_special_tokens=False)
            rows[token] = old[ids].mean(dim=0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
