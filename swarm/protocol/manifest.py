"""The files that hold a model's weights, by their contents: what tells models apart, wherever they come from. Pure.

A model's weights are named by the digest of this list. Whoever has the list can prove a file by itself, so a machine
needs no other files than those of its layers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, Final, Self

from swarm.base.declared import Printable, Rule, Size, Within, Written
from swarm.base.ids import json_digest

MAX_WEIGHT_FILES: Final = 4_096
"""Files of one model; the largest on the hub have some hundreds."""
MAX_FILE_NAME: Final = 255
"""Characters of a file's name."""
MAX_FILE_BYTES: Final = 1 << 50
MAX_MANIFEST_BYTES: Final = 1 << 20
"""Of a manifest on the wire or on disk."""
SHA256: Final = re.compile(r"[0-9a-f]{64}")
COMMIT: Final = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, order=True)
class WeightFile:
    """One file of weights, in whatever format.

    Attributes:
        name: in its folder or repository. For people: files are compared by their contents, and no path is made of it.
        size_bytes: of the whole file.
        sha256: 64 hex digits, of all its bytes.
    """

    name: Annotated[str, Printable(MAX_FILE_NAME, 1)]
    size_bytes: Annotated[int, Within(0, MAX_FILE_BYTES)]
    sha256: Annotated[str, Printable(64, 64, SHA256), Written(hex=True)]


BY_NAME: Final = Rule(
    "in the order of their names, none twice",
    lambda files: all(one.name < other.name for one, other in pairwise(files)),
)


@dataclass(frozen=True, slots=True)
class Manifest:
    """All weight files of a model.

    Attributes:
        files: in the order of their names.
        commit: of the hub, from which they are; a hint, which says nothing about the weights. Empty where unknown.
    """

    files: Annotated[tuple[WeightFile, ...], Size(MAX_WEIGHT_FILES, 1), BY_NAME]
    commit: Annotated[str, Printable(64, 0, re.compile(f"(?:{COMMIT.pattern})?"))] = field(default="", compare=False)

    @classmethod
    def of(cls, files: Iterable[WeightFile], commit: str = "") -> Self:
        """The manifest of these files, in whatever order they come."""
        return cls(tuple(sorted(files)), commit)

    @property
    def digest(self) -> str:
        """Hex SHA-256 over sizes and contents: names, commits and the order of files change nothing."""
        return json_digest({"files": sorted([file.sha256, file.size_bytes] for file in self.files)})

    def strangers(self, files: Iterable[WeightFile]) -> list[str]:
        """Names of those files that are none of this model's, in order."""
        known = {(file.sha256, file.size_bytes) for file in self.files}
        return sorted(file.name for file in files if (file.sha256, file.size_bytes) not in known)
