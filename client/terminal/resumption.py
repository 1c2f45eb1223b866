"""Interrupted generations on disk, one file each, so that the next run of the program can go on with one of them.

They hold what was asked and answered: nobody but the user may read them.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from client.drafting.search.calibration_store import default_calibration_folder
from swarm.errors import ConfigError, GenerationInterrupted, Unfinished

FORMAT = 1
MAX_FILES = 16
_PREFIX = "interrupted-"


def default_folder() -> Path:
    """Where the command line keeps what was interrupted."""
    return default_calibration_folder().with_name("interrupted")


def save(error: GenerationInterrupted, folder: Path) -> Path | None:
    """Keep what it takes to go on in a new file, and only the newest files; None when there is nothing, or nowhere."""
    if error.unfinished is None:
        return None
    kept = {"format": FORMAT, "text": error.text, **asdict(error.unfinished)}
    path = folder / f"{_PREFIX}{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor, name = tempfile.mkstemp(dir=folder, prefix=".")  # which nobody but the user may read
        draft = Path(name)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump(kept, file)
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
        for old in sorted(folder.glob(f"{_PREFIX}*.json"))[:-MAX_FILES]:
            old.unlink(missing_ok=True)
    except OSError:
        return None
    return path


def load(path: Path) -> GenerationInterrupted:
    """What `save` kept.

    Raises:
        ConfigError: the file is not there, or is no such file.
    """
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        if kept["format"] != FORMAT:
            raise ConfigError(f"{path}: was written by another version; start the generation again")
        error = GenerationInterrupted("resumed", str(kept["text"]), tuple(map(int, kept["tokens"])))
        error.unfinished = Unfinished(tuple(map(int, kept["prompt"])), dict(kept["options"]), error.tokens)
    except OSError as trouble:
        raise ConfigError(f"{path}: cannot be read ({trouble.strerror})") from trouble
    except (ValueError, KeyError, TypeError) as trouble:
        raise ConfigError(f"{path}: is not an interrupted generation") from trouble
    return error
