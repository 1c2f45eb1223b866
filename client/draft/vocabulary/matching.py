"""Which tokens a draft and a target share. Reads tokenizers, no model.

    aligned      ids that both know mean the same token; those that one side lacks are never drafted
    retokenised  ids differ: tokens of equal bytes are shared, and the draft reads the text by its own tokenizer

Source: Timor et al., Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for Heterogeneous
Vocabularies (arXiv 2502.05202), section 3.3: token-level intersection.

From a draft's ids to the target's and back, for the tokens that both share. Pure.

A text of the target's tokens as the draft reads it: what the draft's KV holds.

    aligned      both have the same ids: an id that the draft lacks is read as its text, spelt out
    retokenised  the draft's own tokens of the text's bytes, as if it had been given the text

A text grows from sweep to sweep, so only its tail is done again. What a draft reads decides how well it guesses, and
nothing else: a context need not be perfect, only bounded in what it costs.
"""

from __future__ import annotations

import codecs
import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from client.draft.vocabulary.token_strings import TokenizerKind, TokenStrings, added_ids, read_strings
from swarm.base.errors import IncompatibleDraft

NOT_SHARED = -1
"""Stands for an id that the other side does not have."""


class TokenMap:
    """Pairs of ids, one of the target and one of the draft, that mean the same token.

    Attributes:
        width: 1 + the highest id of the target that is shared.
        draft_rows: rows of the draft's embedding.
        draft_of: int64 [width], the draft's id of each of the target's, or `NOT_SHARED`.
        target_of: int64 [draft_rows], the reverse.
        shared: how many pairs there are.
    """

    def __init__(self, pairs: Sequence[tuple[int, int]], draft_rows: int) -> None:
        """Make a map.

        Args:
            pairs: at least one: an id of the target, and the draft's id of the same token. No id stands twice.
            draft_rows: rows of the draft's embedding; the draft's ids are below it.
        """
        target_ids, draft_ids = np.array(pairs, np.int64).T
        self.width = int(target_ids.max()) + 1
        self.draft_rows = draft_rows
        self.draft_of: NDArray[np.int64] = np.full(self.width, NOT_SHARED, np.int64)
        self.target_of: NDArray[np.int64] = np.full(draft_rows, NOT_SHARED, np.int64)
        self.draft_of[target_ids], self.target_of[draft_ids] = draft_ids, target_ids
        self.shared = len(pairs)
        self._is_aligned = bool((target_ids == draft_ids).all())
        missing = self.draft_of == NOT_SHARED
        self._has_gaps = bool(missing.any())
        self._index = torch.from_numpy(np.where(missing, 0, self.draft_of))
        self._missing = torch.from_numpy(missing)

    def draft_id(self, token: int) -> int | None:
        """The draft's id of one of the target's tokens; None where it has none."""
        if not 0 <= token < self.width:
            return None
        found = int(self.draft_of[token])
        return None if found == NOT_SHARED else found

    def target_id(self, token: int) -> int | None:
        """The target's id of one of the draft's tokens; None where it has none."""
        found = int(self.target_of[token])
        return None if found == NOT_SHARED else found

    def target_logits(self, draft_logits: torch.Tensor) -> torch.Tensor:
        """The draft's logits of the target's tokens: what the draft thinks, given that the next token is a shared one.

        A softmax over them is the draft's distribution without the other tokens, renormalised.

        Args:
            draft_logits: [rows, draft_rows]

        Returns:
            [rows, width]: −∞ for tokens that are not shared.
        """
        if self._is_aligned:
            logits = draft_logits[:, : self.width]
            return logits.masked_fill(self._there(logits)[1], -torch.inf) if self._has_gaps else logits
        index, missing = self._there(draft_logits)
        return draft_logits.index_select(1, index).masked_fill_(missing, -torch.inf)

    def _there(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Index and mask on the device of some logits."""
        if self._index.device != logits.device:
            self._index, self._missing = self._index.to(logits.device), self._missing.to(logits.device)
        return self._index, self._missing


MAX_SPELT_TOKENS = 32
"""Tokens of the draft that stand for one token of the target that it lacks, at most."""
PIECE_TOKENS = 256
"""Tokens of the target that are encoded together, about: a text that is cut back is done again from such a place."""
MAX_PIECE_TOKENS = 1_024
"""The same, at most, in a text that has no words."""

Spell = Callable[[int], Sequence[int]]
"""The draft's tokens that stand for an id of the target that it lacks."""


class DraftContext(Protocol):
    """Follows one text. Not for several threads at once."""

    def follow(self, sequence: tuple[int, ...]) -> tuple[int, ...]:
        """The draft's tokens of a text, at least one.

        Args:
            sequence: the target's ids; what it has in common with the last one is not done again.
        """
        ...


class AlignedContext:
    """For a draft with the target's ids: each token is itself, and one that the draft lacks is spelt out."""

    def __init__(self, token_map: TokenMap, spell: Spell, begin: int) -> None:
        """Make one.

        Args:
            token_map: which ids are shared.
            spell: what stands for one that is not.
            begin: the draft's id that stands for a text of which nothing is left.
        """
        self._map, self._spell, self._begin = token_map, spell, begin
        self._sequence: tuple[int, ...] = ()
        self._ids: list[int] = []
        self._ends: list[int] = []  # of `_ids`, after each token of the target

    def follow(self, sequence: tuple[int, ...]) -> tuple[int, ...]:
        """The draft's tokens of a text."""
        known = common_prefix(self._sequence, sequence)
        del self._ends[known:]
        del self._ids[self._ends[-1] if self._ends else 0 :]
        for token in sequence[known:]:
            own = self._map.draft_id(token)
            self._ids += self._spell(token) if own is None else (own,)
            self._ends.append(len(self._ids))
        self._sequence = sequence
        return tuple(self._ids) or (self._begin,)


class DraftEncoder:
    """Encodes parts of a text by a draft's tokenizer, as it would inside of a text.

    Attributes:
        strings: what the draft's tokens stand for.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, strings: TokenStrings) -> None:
        """Make one of a draft's tokenizer, which is copied."""
        self.strings = strings
        backend = copy.deepcopy(tokenizer.backend_tokenizer)
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True  # control tokens that somebody typed are text
        backend.normalizer = _inner(backend.normalizer, normalizers.Sequence([]), "normalizers")
        backend.pre_tokenizer = _inner(backend.pre_tokenizer, pre_tokenizers.Sequence([]), "pretokenizers")
        self._backend: Tokenizer = backend
        self._ids = strings.ids()

    def control_id(self, name: bytes) -> int | None:
        """The draft's control token of that name."""
        return self._ids.get((True, name))

    def ids(self, data: bytes) -> list[int]:
        """The draft's tokens of some bytes; a character that is cut off at their end stays bytes, if it has those."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        text = decoder.decode(data)
        ids = self._backend.encode(text, add_special_tokens=False).ids if text else []
        rest = (self._ids.get((False, bytes([byte]))) for byte in decoder.getstate()[0])
        able = self.strings.by_id
        return [token for token in (*ids, *rest) if token is not None and token in able]


class RetokenisedContext:
    """For a draft of another tokenizer: its own tokens of the text.

    Tokens before an anchor are final. An anchor lies behind a control token, or before a token that begins a word,
    where the draft begins one too. So an extension is encoded together with the text's last word alone.
    """

    def __init__(self, target: TokenStrings, draft: DraftEncoder) -> None:
        self._target, self._draft = target, draft
        self._begin = draft.strings.begins_with
        self._sequence: tuple[int, ...] = ()
        self._ids: list[int] = list(self._begin)
        self._anchors: list[tuple[int, int]] = [(0, len(self._ids))]  # tokens of the target, tokens of the draft

    def follow(self, sequence: tuple[int, ...]) -> tuple[int, ...]:
        """The draft's tokens of a text."""
        known = common_prefix(self._sequence, sequence)
        while len(self._anchors) > 1 and self._anchors[-1][0] >= known:
            self._anchors.pop()
        first, count = self._anchors[-1]
        del self._ids[count:]
        self._extend(sequence, first)
        self._sequence = sequence
        return tuple(self._ids) or (self._stand_in(),)

    def _extend(self, sequence: tuple[int, ...], first: int) -> None:
        """Encode `sequence[first:]`; before it everything is final."""
        piece, word = bytearray(), 0  # the bytes since the last anchor, and how many of them come before the last word
        begun = word_token = first
        by_id = self._target.by_id
        for place in range(self._skipped(sequence) if first == 0 else first, len(sequence)):
            is_control, data = by_id.get(sequence[place], (False, b""))
            if is_control:
                self._close(bytes(piece), place)
                self._ids += self._control(sequence[place], data)
                piece, word, begun = bytearray(), 0, place + 1
                self._anchors.append((begun, len(self._ids)))
                continue
            if _begins_word(data) and not piece[-1:].isspace() and piece:
                word, word_token = len(piece), place
            if place - begun >= (PIECE_TOKENS if word_token == place else MAX_PIECE_TOKENS) and _is_complete(piece):
                self._close(bytes(piece), place)
                piece, word, begun = bytearray(), 0, place
            piece += data
        if word:
            self._close(bytes(piece[:word]), word_token)
        self._ids += self._encode(bytes(piece[word:]))

    def _close(self, data: bytes, place: int) -> None:
        """Encode bytes that are final, and put an anchor at a place of the target's text."""
        self._ids += self._encode(data)
        if place > self._anchors[-1][0]:
            self._anchors.append((place, len(self._ids)))

    def _encode(self, data: bytes) -> list[int]:
        if not data:
            return []
        if len(self._ids) == len(self._begin):  # the text's first word may have a space that is not the text's
            data = data[data.startswith(b" ") and self._target.prepends :]
            if self._draft.strings.prepends and not data.startswith(b" "):
                data = b" " + data
        return self._draft.ids(data)

    def _skipped(self, sequence: tuple[int, ...]) -> int:
        """How many ids at the beginning are the target's own way to begin any text."""
        begins = self._target.begins_with
        return len(begins) if sequence[: len(begins)] == begins else 0

    def _control(self, token: int, name: bytes) -> list[int]:
        """The draft's tokens for a control token: the one of that name, or with that part; else the name as text."""
        draft, target = self._draft, self._target
        own = draft.control_id(name)
        if own is not None:
            return [own]
        if token == target.begin_id and len(self._ids) == len(self._begin):
            return [] if self._begin or draft.strings.begin_id is None else [draft.strings.begin_id]
        if token == target.end_id and draft.strings.end_id is not None:
            return [draft.strings.end_id]
        return draft.ids(name)[:MAX_SPELT_TOKENS]

    def _stand_in(self) -> int:
        """A token for a text of which nothing is left: a draft cannot begin from nothing."""
        strings = self._draft.strings
        known = (token for token in (strings.begin_id, strings.end_id) if token is not None)
        return next(known, min(strings.by_id))


def common_prefix(ours: Sequence[int | None], theirs: Sequence[int]) -> int:
    """How many tokens two sequences have in common at their beginning."""
    least = min(len(ours), len(theirs))
    if ours[:least] == theirs[:least]:
        return least
    return next(place for place in range(least) if ours[place] != theirs[place])


def spell_by(target: PreTrainedTokenizerFast, draft: PreTrainedTokenizerFast, rows: int) -> Spell:
    """Spell ids of the target by their text; each is encoded once.

    Args:
        target: the target's tokenizer.
        draft: the draft's.
        rows: of the draft's embedding.
    """
    known: dict[int, Sequence[int]] = {}

    def spell(token: int) -> Sequence[int]:
        if token not in known:
            text = target.backend_tokenizer.decode([token], skip_special_tokens=False)
            ids = draft.backend_tokenizer.encode(text, add_special_tokens=False).ids
            known[token] = [own for own in ids if own < rows][:MAX_SPELT_TOKENS]
        return known[token]

    return spell


def _begins_word(data: bytes) -> bool:
    return data[:1] == b" " and (data[1:2].isalnum() or data[1:2] >= b"\x80")


def _is_complete(data: bytearray) -> bool:
    """Whether bytes do not end within a character."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(bytes(data[-4:]))
    return not decoder.getstate()[0]


def _inner(component: Any, empty: Any, field: str) -> Any:  # noqa: ANN401 - a normalizer or a pre-tokenizer
    """The same without what it does at a text's beginning."""
    if component is None:
        return None
    state = _without_prefix(json.loads(component.__getstate__()))
    parts = [] if state is None else [state]
    empty.__setstate__(json.dumps({"type": "Sequence", field: parts}).encode())
    return empty


def _without_prefix(state: Any) -> Any:  # noqa: ANN401 - JSON
    match state:
        case {"type": "Prepend"}:
            return None
        case dict():
            kept = {name: _without_prefix(value) for name, value in state.items()}
            kept |= {"add_prefix_space": False} if "add_prefix_space" in kept else {}
            return kept | ({"prepend_scheme": "never"} if "prepend_scheme" in kept else {})
        case list():
            return [part for part in map(_without_prefix, state) if part is not None]
        case _:
            return state


@dataclass(frozen=True, slots=True)
class ModelVocabulary:
    """One model's tokens.

    Attributes:
        tokenizer: of the model.
        rows: of its embedding; ids from here on cannot be used, whether the tokenizer knows them or not.
    """

    tokenizer: PreTrainedTokenizerFast
    rows: int

    @property
    def known(self) -> dict[int, str]:
        """Every token that can be used, by id."""
        return {token_id: token for token, token_id in self.tokenizer.get_vocab().items() if token_id < self.rows}


@dataclass(frozen=True, slots=True)
class Translation:
    """How a draft reads a target's text and names its tokens.

    Attributes:
        token_map: the tokens that both share.
        make_context: begins to follow a text.
        is_aligned: whether shared tokens have the same ids.
    """

    token_map: TokenMap
    make_context: Callable[[], DraftContext]
    is_aligned: bool


@dataclass(frozen=True, slots=True)
class SharedVocabulary:
    """What a draft and a target have in common.

    Attributes:
        vocab_tokens: ids of the target that can be drafted are below it.
        translation: None where both have the same tokens under the same ids.
        shared: tokens that both have.
        known: tokens that the target has.
    """

    vocab_tokens: int
    translation: Translation | None
    shared: int
    known: int

    @property
    def coverage(self) -> str:
        """How much of the target's vocabulary the draft knows, for people."""
        if self.shared == self.known:
            return f"knows all of the target's {self.known:,} tokens"
        percent = min(99.9, max(0.1, 100 * self.shared / self.known))
        return f"knows {percent:.1f} % of the target's tokens ({self.shared:,} of {self.known:,}), and drafts no others"


def match_vocabularies(target: ModelVocabulary, draft: ModelVocabulary) -> SharedVocabulary:
    """Find the tokens that a draft and a target share.

    Raises:
        IncompatibleDraft: ids differ, and tokens cannot be compared as bytes.
    """
    ours, theirs = target.known, draft.known
    both = sorted(ours.keys() & theirs.keys())
    differing = [token_id for token_id in both if ours[token_id] != theirs[token_id]]
    # Makers of fine-tunes rename reserved control tokens; the words stay.
    renamed = added_ids(target.tokenizer) & added_ids(draft.tokenizer)
    if both and renamed.issuperset(differing):
        left = set(differing)
        return _aligned(target, draft, [token_id for token_id in both if token_id not in left])
    why = "no token id is known to both"
    if differing:
        first = differing[0]
        why = f"token id {first} is {ours[first]!r} to the target and {theirs[first]!r} to the draft"
    return _retokenised(target, draft, why)


def _aligned(target: ModelVocabulary, draft: ModelVocabulary, shared: Sequence[int]) -> SharedVocabulary:
    """Both have these ids, and perhaps others that only one side has."""
    ours = target.known
    if not shared:
        raise IncompatibleDraft("this draft shares no token with the target; choose another draft, or none")
    if len(shared) == len(ours) == shared[-1] + 1:
        return SharedVocabulary(len(shared), None, len(shared), len(ours))
    token_map = TokenMap([(token_id, token_id) for token_id in shared], draft.rows)
    spell = spell_by(target.tokenizer, draft.tokenizer, draft.rows)

    def make_context() -> DraftContext:
        return AlignedContext(token_map, spell, shared[0])

    translation = Translation(token_map, make_context, is_aligned=True)
    return SharedVocabulary(token_map.width, translation, len(shared), len(ours))


def _retokenised(target: ModelVocabulary, draft: ModelVocabulary, why: str) -> SharedVocabulary:
    """Tokens of equal bytes are shared, whatever their ids."""
    ours, theirs = (read_strings(side.tokenizer, side.rows) for side in (target, draft))
    by_string = theirs.ids()
    pairs = [(token, by_string[string]) for string, token in ours.ids().items() if string in by_string]
    has_text = any(not ours.by_id[token][0] for token, _ in pairs)
    if TokenizerKind.OTHER in (ours.kind, theirs.kind) or not has_text:
        raise IncompatibleDraft(
            f"this draft cannot serve this target: {why}, and the tokens of {theirs.name} (the draft) and {ours.name} "
            "(the target) have no bytes in common; choose a draft with the target's tokenizer, one of byte-level or "
            "metaspace tokens, or none"
        )
    token_map = TokenMap(pairs, draft.rows)
    encoder = DraftEncoder(draft.tokenizer, theirs)
    translation = Translation(token_map, lambda: RetokenisedContext(ours, encoder), is_aligned=False)
    return SharedVocabulary(token_map.width, translation, len(pairs), len(target.known))
