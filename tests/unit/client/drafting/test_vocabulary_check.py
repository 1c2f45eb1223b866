"""Whether a draft speaks the target's tokens."""

from __future__ import annotations

import re

import pytest

from client.drafting.vocabulary_check import check_compatible
from swarm.errors import IncompatibleDraft


class Vocabulary:
    def __init__(self, *tokens: str) -> None:
        self.tokens = tokens

    def get_vocab(self) -> dict[str, int]:
        return {token: token_id for token_id, token in enumerate(self.tokens)}


def test_equal_tokenizers_are_compatible_whatever_the_padding() -> None:
    check_compatible(Vocabulary("a", "b"), Vocabulary("a", "b"), 64, 2)


@pytest.mark.parametrize(
    ("draft_tokens", "draft_rows", "message"),
    [
        (("a", "c", "d"), 64, "token id 1 is 'b' to the target and 'c' to the draft"),
        (("a", "b"), 64, "token id 2 is 'd' to the target and unknown to the draft"),
        (("a", "b", "d"), 2, "token id 2 has no embedding: the target has 64, the draft 2"),
    ],
)
def test_other_tokenizers_are_refused_in_one_line(draft_tokens: tuple[str, ...], draft_rows: int, message: str) -> None:
    with pytest.raises(IncompatibleDraft, match=re.escape(message)) as refused:
        check_compatible(Vocabulary("a", "b", "d"), Vocabulary(*draft_tokens), 64, draft_rows)
    assert "\n" not in str(refused.value)
