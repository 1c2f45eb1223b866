"""A tokenizer.json of somebody else is tried in a worker before this program reads it: to load, and on a text.

Its expressions and replacements may take any time, or any memory, for a few letters.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from swarm.base.errors import UnsupportedModel
from swarm.base.workers import WorkerEnded, WorkLease, new_worker

LOADING: Final = WorkLease(cpu_s=30.0, wall_s=90.0)
"""One of 256,000 tokens takes a second or two."""
ENCODING: Final = WorkLease(cpu_s=2.0, wall_s=10.0)
"""Of `PROBE`, which takes a millisecond as a rule."""
TRIAL_BYTES: Final = 2 << 30
PROBE: Final = " ".join(
    [*(letter * 64 for letter in "aA0 .-_(\n\té字"), "The sea, 1984: it's <b>\u0000 \U0001f30a</b> don't\r\n"]
)
"""Runs of every kind of letter, on which expressions that try everything come to an end late, and some text."""
_HANDLER: Final = "swarm.files.tokenizer_trial:handle"
_loaded: list[Any] = []


def check_encodes(folder: Path, name: str) -> None:
    """Raise unless a model's tokenizer.json, where it has one, loads and encodes within its lease.

    Raises:
        UnsupportedModel: it does not.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        return
    try:
        worker = new_worker(TRIAL_BYTES)
        try:
            for step, lease in (("load", LOADING), ("encode", ENCODING)):
                said, _ = worker.call(_HANDLER, {"step": step, "path": str(file)}, lease=lease)
                if "refused" in said:
                    raise UnsupportedModel(f"{name}: its tokenizer.json fails ({said['refused']})")
        finally:
            worker.close()
    except WorkerEnded as error:
        raise UnsupportedModel(f"{name}: its tokenizer.json {error}: to load, or to encode a line") from error


def handle(head: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes]:
    """One step, in a worker."""
    from tokenizers import Tokenizer

    try:
        if head["step"] == "load":
            _loaded[:] = [Tokenizer.from_file(head["path"])]
        else:
            encoded = _loaded[0].encode(PROBE)
            _loaded[0].decode(encoded.ids)
    except BaseException as error:  # noqa: BLE001 (a panic of the library is no Exception)
        return {"refused": str(error).strip().partition("\n")[0][:200]}, b""
    return {}, b""
