"""The page of dialects is made from the table of fields, and its bounds are those of the code."""

from __future__ import annotations

from client.api.responses.routes import MAX_AGE_S, MAX_BYTES, MAX_RESPONSE_BYTES, MAX_RESPONSES
from tools.request_fields import PAGE, with_tables

TEXT = PAGE.read_text(encoding="utf-8")


def test_the_tables_are_those_of_the_code() -> None:
    assert with_tables(TEXT) == TEXT, "python -m tools.request_fields writes them"


def test_the_bounds_are_those_of_the_code() -> None:
    assert f"| {MAX_RESPONSES:,} |" in TEXT
    assert f"| {MAX_BYTES >> 20} MiB |" in TEXT
    assert f"| {MAX_RESPONSE_BYTES >> 20} MiB |" in TEXT
    assert f"| {MAX_AGE_S / 3600:.0f} hours |" in TEXT
