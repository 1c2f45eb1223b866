"""Keeps other libraries' progress bars and warnings out of Canopy's output. Owns no handler of Canopy's own logs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub.utils import logging as hub_logging
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars
from transformers.utils import logging as transformers_logging


def quiet_libraries() -> None:
    """Silence Hugging Face's bars and warnings for the whole process: for commands, never for the Python library."""
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    hub_logging.set_verbosity_error()  # type: ignore[no-untyped-call]


@contextmanager
def bars_hidden() -> Iterator[None]:
    """Hide Hugging Face's bars in a block: for the Python library, whose host program may want them elsewhere."""
    shown, hub_hidden = transformers_logging.is_progress_bar_enabled(), are_progress_bars_disabled()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]
        if hub_hidden:
            disable_progress_bars()
