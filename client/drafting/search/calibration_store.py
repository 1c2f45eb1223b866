"""Keeps calibrations between runs: one small file per pair of draft and target in the user's cache.

    {"version": 3, "temperatures": […], "fits": [{"weights": [7], "information": [7][7]}, …]}

Nothing here can fail a generation: what cannot be read is learned again, what cannot be written is lost, and a warning
says so. Files appear whole or not at all; of two programs that write, the last one's stays.
"""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import Protocol

import numpy as np

from client.drafting.search.calibration import Calibration, Fit
from client.drafting.search.temperatures import TEMPERATURES
from client.target import Target
from swarm.runtime.files import replace_file

logger = logging.getLogger(__name__)

VERSION = 3
"""Of the file and of what its numbers mean: raise it when features, prior or ranges change."""

MAX_FILE_BYTES = 65_536
MAX_FILES = 64
_PREFIX = "pair-"


class Identified(Protocol):
    """What tells one model or head from another."""

    @property
    def name(self) -> str:
        """Hub id, or the folder's name."""

    @property
    def config_digest(self) -> str:
        """Of its config."""

    @property
    def tokenizer_digest(self) -> str:
        """Of the tokenizer that it was made for."""


def calibration_path(folder: Path, target: Target, draft: Identified) -> Path:
    """The file of one pair; its name depends on the models' short names, configs and tokenizers."""
    both: tuple[Identified, ...] = (target, draft)
    pair = [[model.name.rpartition("/")[2], model.config_digest, model.tokenizer_digest] for model in both]
    return folder / f"{_PREFIX}{hashlib.sha256(json.dumps(pair).encode()).hexdigest()[:32]}.json"


def load_calibration(path: Path) -> Calibration:
    """The calibration of an earlier run; a fresh one where there is no file, or none that can be used."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        return Calibration(_parse(data))
    except FileNotFoundError:
        return Calibration()
    except OSError as error:
        reason = error.strerror or str(error)
    except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError):
        reason = "it holds no calibration that this version knows"
    logger.warning("calibration %s is not used (%s); learning afresh", path, reason)
    return Calibration()


def save_calibration(path: Path, calibration: Calibration) -> None:
    """Replace the file, and remove the oldest where there are too many."""
    fits = [{"weights": fit.weights.tolist(), "information": fit.information.tolist()} for fit in calibration.fits]
    text = json.dumps({"version": VERSION, "temperatures": TEMPERATURES, "fits": fits})
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        replace_file(path, text.encode())
        _remove_oldest(path)
    except OSError as error:
        logger.warning("calibration %s is not kept (%s)", path, error.strerror or error)


def _parse(data: bytes) -> tuple[Fit, ...]:
    """The fits of a file; raises whatever unexpected contents make it raise."""
    if len(data) > MAX_FILE_BYTES:
        raise ValueError("too large")
    content = json.loads(data)
    if content["version"] != VERSION or content["temperatures"] != list(TEMPERATURES):
        raise ValueError("of another version")
    fits = tuple(
        Fit(np.array(fit["weights"], np.float64), np.array(fit["information"], np.float64)) for fit in content["fits"]
    )
    if len(fits) != len(TEMPERATURES) + 1 or not all(fit.is_sound for fit in fits):
        raise ValueError("not what lessons lead to")
    return fits


def _remove_oldest(path: Path) -> None:
    """Keep a file and the newest beside it, `MAX_FILES` in all; those that a killed program left half-written count."""
    others = sorted((file for file in path.parent.glob(f"*{_PREFIX}*") if file != path), key=_written, reverse=True)
    for file in others[MAX_FILES - 1 :]:
        file.unlink(missing_ok=True)


def _written(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except FileNotFoundError:
        return 0.0
