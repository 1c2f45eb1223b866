"""Keeps other libraries' progress bars out of a command's output, which says in lines of its own what takes time."""

from __future__ import annotations

from huggingface_hub.utils import logging as hub_logging
from transformers.utils import logging as transformers_logging


def quiet_libraries() -> None:
    """Called by commands only, never by the library."""
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    hub_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
