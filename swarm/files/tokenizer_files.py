"""A model's tokenizer from its files, compared with what its tokenizer.json itself does.

Classes of transformers build some tokenizers anew from a vocabulary, by the class's name alone. Where that name is not
the vocabulary's, texts would be split as no model was trained: then tokenizer.json is taken as it is.
"""

from __future__ import annotations

import json
import logging
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from swarm.base.errors import UnknownModel, UnsupportedModel
from swarm.files.pretrained import check_own_code, first_line

if TYPE_CHECKING:
    from pathlib import Path

logger = logging.getLogger(__name__)

TOKENIZER: Final = "tokenizer.json"
OTHERS: Final = {"tokenizer.model", "vocab.json", "merges.txt"}
OLD_TEMPLATE: Final = "chat_template.json"
"""Where processors of images kept the chat template once."""
ELSEWHERE: Final = "add the tokenizer.json that the same model has elsewhere"
PROBES: Final = (
    "The quick brown fox, and 12 others.",
    "  two spaces\n\tand a tab\n\n",
    "it's MixedCase_and-punctuation (f(x) = 2**10);",
    "naïve Übergröße, 東京 in 2026, привет 🙂",
)
"""Texts that a tokenizer and its file split alike."""


def check_tokenizer(folder: Path, model: str) -> None:
    """Refuse a tokenizer in a form that nothing installed reads.

    Raises:
        UnsupportedModel: says which file there is and what to do.
    """
    present = {path.name for path in folder.iterdir()}
    if TOKENIZER in present:
        return
    if "tokenizer.model" in present and find_spec("sentencepiece") is None:
        found = "it has tokenizer.model alone, which only sentencepiece reads"
        raise UnsupportedModel(f"{model}: needs {TOKENIZER}; {found}; {ELSEWHERE}, or `pip install sentencepiece`")
    if "tekken.json" in present and not present & OTHERS:
        raise UnsupportedModel(f"{model}: needs {TOKENIZER}; it has tekken.json, Mistral's own; {ELSEWHERE}")
    if "vocab.json" in present and not present & {"tokenizer.model", "merges.txt"}:
        raise UnsupportedModel(f"{model}: needs {TOKENIZER}; it has vocab.json without merges.txt; {ELSEWHERE}")


def load_tokenizer(folder: Path, model: str) -> PreTrainedTokenizerFast:
    """The tokenizer of a model, which splits texts as its tokenizer.json says.

    Raises:
        UnknownModel: it cannot be read.
        UnsupportedModel: it has no fast tokenizer, needs code of its own, or is no whole vocabulary.
    """
    raw = _raw(folder, model)
    try:
        found = _by_class(AutoTokenizer, folder, model)
    except UnknownModel:
        if raw is None:
            raise
        found = None  # the class that is named reads no such vocabulary
    if raw is None and not isinstance(found, PreTrainedTokenizerFast):
        raise UnsupportedModel(f"{model}: needs a fast tokenizer ({TOKENIZER})")
    if raw is not None and not (isinstance(found, PreTrainedTokenizerFast) and _is_alike(found, raw)):
        found = _by_class(PreTrainedTokenizerFast, folder, model)
        if not _is_alike(found, raw):
            reason = f"tokenizer_config.json changes how {TOKENIZER} splits texts"
            raise UnsupportedModel(f"{model}: {reason}; remove it, or {ELSEWHERE}")
        reason = "the class that tokenizer_config.json names splits texts otherwise"
        logger.warning("%s: %s is followed: %s", model, TOKENIZER, reason)
    tokenizer: PreTrainedTokenizerFast = found
    if tokenizer.chat_template is None:
        tokenizer.chat_template = _old_template(folder / OLD_TEMPLATE)
    return tokenizer


def _by_class(kind: Any, folder: Path, model: str) -> Any:  # noqa: ANN401 - of transformers, which annotates neither
    try:
        return kind.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # what transformers and tokenizers raise on damaged files may be anything
        check_own_code(folder / "tokenizer_config.json", model)
        raise UnknownModel(f"{model}: its tokenizer cannot be read ({first_line(error)})") from error


def _raw(folder: Path, model: str) -> Tokenizer | None:
    """What tokenizer.json says by itself; None where there is none.

    Raises:
        UnknownModel: it cannot be read.
        UnsupportedModel: its words cannot be made of their pieces.
    """
    file = folder / TOKENIZER
    if not file.exists():
        return None
    try:
        content = json.loads(file.read_bytes())
        kind, added = content["model"], {one["content"] for one in content.get("added_tokens") or ()}
        if kind.get("type") == "BPE" and not kind.get("merges") and not kind.get("ignore_merges"):
            whole = [word for word in kind["vocab"] if len(word) > 1 and word not in added and not word.startswith("<")]
            if whole:
                reason = f"{TOKENIZER} has no merges, of which words such as {whole[0]!r} are made"
                raise UnsupportedModel(f"{model}: {reason}; {ELSEWHERE}")
        raw = Tokenizer.from_file(str(file))
        raw.no_truncation()
        raw.no_padding()
    except UnsupportedModel:
        raise
    except Exception as error:  # tokenizers raises Exception itself
        check_own_code(folder / "tokenizer_config.json", model)
        raise UnknownModel(f"{model}: {TOKENIZER} cannot be read ({first_line(error)}); {ELSEWHERE}") from error
    return raw


def _is_alike(tokenizer: PreTrainedTokenizerFast, raw: Tokenizer) -> bool:
    """Whether the two split and write texts alike."""
    decode = tokenizer.backend_tokenizer.decode
    try:
        for text in PROBES:
            ids = raw.encode(text, add_special_tokens=False).ids
            if tokenizer(text, add_special_tokens=False)["input_ids"] != ids or decode(ids) != raw.decode(ids):
                return False
    except Exception:  # noqa: BLE001 - tokenizers raises Exception itself, such as on a vocabulary of another kind
        return False
    return True


def _old_template(file: Path) -> str | None:
    try:
        template = json.loads(file.read_bytes())["chat_template"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return template if isinstance(template, str) else None
