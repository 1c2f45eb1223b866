"""An interrupted generation on disk, so that the next run of the program can go on with it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from client.calibration import default_calibration_folder
from swarm.errors import ConfigError, GenerationInterrupted, Unfinished

FORMAT = 1


def default_path() -> Path:
    """Where the command line keeps what was interrupted last."""
    return default_calibration_folder().with_name("interrupted.json")


def save(error: GenerationInterrupted, path: Path) -> bool:
    """Keep what it takes to go on; False when there is nothing to keep, or nowhere."""
    if error.unfinished is None:
        return False
    kept = {"format": FORMAT, "text": error.text, **asdict(error.unfinished)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(kept), encoding="utf-8")
    except OSError:
        return False
    return True


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
