"""What is no JSON, or no number, is one kind of error."""

from __future__ import annotations

import pytest

from swarm.base.files import strict_json


@pytest.mark.parametrize(
    "text", ["", "[1", "[" * 100_000, "1e400", "-1e400", "NaN", "Infinity", "1" * 5_000, b"\xff", '{"a": [1e999]}']
)
def test_what_is_no_json_is_one_error(text: str | bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        strict_json(text)


def test_the_rest_is_read() -> None:
    assert strict_json('{"a": [1, 2.5e300, null, "é"]}') == {"a": [1, 2.5e300, None, "é"]}
