"""`node files`: parts of weight files that lie on this machine, and how to be rid of them. Asks no network.

Whole files lie in Hugging Face's cache, which its own command `hf cache` shows and deletes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from swarm.base.cli_types import Name
from swarm.base.errors import ConfigError
from swarm.files.parts.part_file import KeptPart, kept_parts, parts_folder

ALL: Final = "all"
_LOCK_S: Final = 0.1
_OTHERS: Final = "whole files lie in Hugging Face's cache: hf cache ls"


@dataclass(frozen=True, slots=True)
class ShowFiles:
    """Print which parts of weight files lie on this machine, and what they take; or delete them.

    Attributes:
        delete: hub id of the model whose parts go, ID:FILE for one of them, or all (default: nothing is deleted).
    """

    delete: Name | None = None


def files(order: ShowFiles, is_serving: Callable[[], bool], console: Console) -> None:
    """Print the parts, or delete those that the order names.

    Raises:
        ConfigError: they cannot be deleted; nothing is.
    """
    kept = kept_parts()
    if order.delete is not None:
        _delete(order.delete, kept, is_serving, console)
        return
    if not kept:
        console.print(Text(f"no part of a file is here; {_OTHERS}"))
        return
    table = Table()
    for title in ("model", "file", "here", "of", "fetched"):
        table.add_column(title, justify="right" if title in {"here", "of"} else "left", overflow="fold")
    for part in kept:
        table.add_row(*map(Text, _cells(part)))
    console.print(table)
    console.print(Text(f"{_size(sum(part.file.disk_bytes for part in kept))} in {parts_folder()}\n{_OTHERS}"))


def _delete(wanted: str, kept: Sequence[KeptPart], is_serving: Callable[[], bool], console: Console) -> None:
    chosen = [part for part in kept if wanted == ALL or wanted in _models(part) | _files(part)]
    if not chosen:
        known = ", ".join(sorted({model for part in kept for model in _models(part)}))
        which = f"here are parts of {known}" if known else _OTHERS
        raise ConfigError(f"--delete {wanted}: no part of its files is here; {which}")
    if is_serving():
        raise ConfigError(f"--delete {wanted}: a node runs here and may read its files; stop it first")
    for part in chosen:
        console.print(Text(_deleted(part)))


def _deleted(part: KeptPart) -> str:
    """Delete a part, and say so; or say why it stays."""
    what, taken = " ".join(filter(None, _cells(part)[:2])), part.file.disk_bytes
    try:
        with part.file.locked(_LOCK_S):
            part.file.forget()
    except TimeoutError:
        return f"{what} stays: another program fetches it"
    except OSError as error:
        return f"{what} stays: {error.strerror or error}"
    if part.file.data.exists():
        return f"{what} stays: it cannot be deleted"
    return f"deleted {what}: {_size(taken)}"


def _models(part: KeptPart) -> set[str]:
    return {repo for repo, _, _ in part.origins}


def _files(part: KeptPart) -> set[str]:
    return {f"{repo}:{name}" for repo, _, name in part.origins}


def _cells(part: KeptPart) -> tuple[str, str, str, str, str]:
    repo, _, name = part.origins[-1] if part.origins else ("", "", f"{part.file.digest[:12]}…, its list is damaged")
    whole = _size(part.file.size_bytes) if part.origins else ""
    fetched = datetime.fromtimestamp(part.fetched_at).strftime("%Y-%m-%d %H:%M")
    return repo, name, _size(part.file.disk_bytes), whole, fetched


def _size(count: int) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"
