"""Interrupted generations on disk, one file each, so that a later run of the program can resume one.

The files hold prompts and answers, so only the user may read them. Owns no generation.
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
        descriptor, name = tempfile.mkstemp(dir=folder, prefix=".")  # readable by the user alone
        partial = Path(name)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump(content, file)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
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
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise ConfigError(f"{path}: was written by another version; start the generation again")
        interrupted = GenerationInterrupted("resumed", str(content["text"]), tuple(map(int, content["tokens"])))
        interrupted.unfinished = Unfinished(
            tuple(map(int, content["prompt"])), dict(content["options"]), interrupted.tokens
        )
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: is not an interrupted generation") from error
    return interrupted
