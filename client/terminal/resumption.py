"""Interrupted generations on disk, one file each, so that a later run of the program can resume one.

The files hold prompts and answers, so only the user may read them. Owns no generation.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict
from pathlib import Path

from client.base.options import default_calibration_folder
from swarm.base.errors import ConfigError, GenerationInterrupted, Unfinished
from swarm.base.files import replace_file, strict_json

FORMAT = 1
MAX_FILES = 16
MAX_BYTES = 64 * 2**20
MAX_TOKEN = 2**31
_PREFIX = "interrupted-"


def default_folder() -> Path:
    """Where the command line keeps interrupted generations."""
    return default_calibration_folder().with_name("interrupted")


def save(error: GenerationInterrupted, folder: Path) -> Path | None:
    """Write an interrupted generation to a new file, and delete all but the newest `MAX_FILES`.

    Returns:
        The file; None if there is nothing to resume, or the folder cannot be written.
    """
    if error.unfinished is None:
        return None
    content = {"format": FORMAT, "text": error.text, **asdict(error.unfinished)}
    path = folder / f"{_PREFIX}{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        replace_file(path, json.dumps(content).encode())
        others = sorted(one for one in folder.glob(f"{_PREFIX}*.json") if one != path)
        for old in others[: -(MAX_FILES - 1)]:  # by name, thus by time; but never this one, whatever the clock says
            old.unlink(missing_ok=True)
    except OSError:
        return None
    return path


def load(path: Path) -> GenerationInterrupted:
    """Read what `save` wrote.

    Raises:
        ConfigError: the file cannot be read, or holds something else.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        content = strict_json(data) if len(data) <= MAX_BYTES else None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise _not_one(path) from error
    match content:
        case {"format": int(number)} if number != FORMAT:
            raise ConfigError(f"{path}: was written by another version; start the generation again")
        case {
            "format": int(),
            "text": str(text),
            "prompt": [*prompt],
            "tokens": [*tokens],
            "options": dict(options),
        } if all(map(_is_token, (*prompt, *tokens))):
            interrupted = GenerationInterrupted("resumed", text, tuple(tokens))
            interrupted.unfinished = Unfinished(tuple(prompt), options, interrupted.tokens)
            return interrupted
        case _:
            raise _not_one(path)


def _is_token(value: object) -> bool:
    return type(value) is int and 0 <= value < MAX_TOKEN


def _not_one(path: Path) -> ConfigError:
    return ConfigError(f"{path}: is not an interrupted generation")
