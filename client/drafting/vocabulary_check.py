"""Whether a draft and a target mean the same tokens. Pure."""

from __future__ import annotations

from typing import Protocol

from swarm.errors import IncompatibleDraft


class Tokens(Protocol):
    """The part of a tokenizer that is compared."""

    def get_vocab(self) -> dict[str, int]:
        """Every token and its id, added ones included."""
        ...


def check_compatible(target: Tokens, draft: Tokens, target_vocab: int, draft_vocab: int) -> None:
    """Check that draft and target map token ids to the same tokens.

    Args:
        target: the target's tokenizer.
        draft: the draft's.
        target_vocab: rows of the target's embedding; ids above the tokenizer's are padding.
        draft_vocab: rows of the draft's.

    Raises:
        IncompatibleDraft: names the first id that differs.
    """
    ours = {token_id: token for token, token_id in target.get_vocab().items()}
    theirs = {token_id: token for token, token_id in draft.get_vocab().items()}
    differing = [token_id for token_id in ours.keys() | theirs.keys() if ours.get(token_id) != theirs.get(token_id)]
    if differing:
        first = min(differing)
        mine, other = (repr(tokens[first]) if first in tokens else "unknown" for tokens in (ours, theirs))
        raise IncompatibleDraft(
            f"this draft cannot serve this target: token id {first} is {mine} to the target and {other} to the draft; "
            "choose a draft with the same tokenizer, or none"
        )
    if max(ours) >= min(target_vocab, draft_vocab):
        raise IncompatibleDraft(
            f"token id {max(ours)} has no embedding: the target has {target_vocab}, the draft {draft_vocab}; "
            "choose another draft, or none"
        )
