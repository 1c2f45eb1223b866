"""Small tokenizers of the kinds that language models use, trained on a few lines."""

from __future__ import annotations

import json
from dataclasses import dataclass

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

LINES = [
    "It was a dark night; the wind blew – and nobody slept.",
    "Él dijo: ¿mañana? «Ναι», 東京の夜は暗い。 naïve café",
    "emoji 👩‍👧 🦜🦜 and  two  spaces,\n\nnew lines\tand tabs",
]


@dataclass(frozen=True, slots=True)
class FastTokenizer:
    """What Canopy uses of a Hugging Face fast tokenizer."""

    backend_tokenizer: Tokenizer


def byte_level() -> Tokenizer:
    """As GPT-2, Llama 3 and Qwen: tokens are bytes, so they may end inside a character."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(LINES * 3, trainer)
    return tokenizer


def metaspace() -> Tokenizer:
    """As T5: ▁ stands for a space, and the first one of a text is not shown."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>", "</s>"], show_progress=False)
    tokenizer.train_from_iterator(LINES * 3, trainer)
    return tokenizer


def byte_fallback() -> Tokenizer:
    """As Llama 2: like the former, but characters outside the vocabulary become byte tokens such as `<0x0A>`."""
    trained = json.loads(metaspace().to_str())["model"]
    vocabulary: dict[str, int] = trained["vocab"]
    for value in range(256):
        vocabulary[f"<0x{value:02X}>"] = len(vocabulary)
    merges = [(left, right) for left, right in trained["merges"]]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


KINDS = {"byte_level": byte_level(), "metaspace": metaspace(), "byte_fallback": byte_fallback()}
