"""Which tokens a draft and a target share. Reads tokenizers, no model.

    aligned      ids that both know mean the same token; those that one side lacks are never drafted
    retokenised  ids differ: tokens of equal bytes are shared, and the draft reads the text by its own tokenizer

Source: Timor et al., Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for Heterogeneous
Vocabularies (arXiv 2502.05202), section 3.3: token-level intersection.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerFast

from client.drafting.vocabulary.contexts import (
    AlignedContext,
    DraftContext,
    DraftEncoder,
    RetokenisedContext,
    spell_by,
)
from client.drafting.vocabulary.token_map import TokenMap
from client.drafting.vocabulary.token_strings import TokenizerKind, added_ids, read_strings
from swarm.errors import IncompatibleDraft


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
