"""The mistakes that the tests must catch stand in the code of today, each beside a test of today."""

from __future__ import annotations

import pytest

from tools.mutations import MUTATIONS, ROOT, Mutation, find


@pytest.mark.parametrize("mutation", MUTATIONS, ids=[one.room for one in MUTATIONS])
def test_it_can_be_made(mutation: Mutation) -> None:
    assert find(mutation.old, ROOT).is_file()
    assert mutation.new != mutation.old
    assert (ROOT / mutation.caught_by.partition("::")[0]).is_file()
