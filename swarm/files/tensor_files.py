"""Which bytes of a hub model's files some tensors need; fetches whole files, or ranges where that saves much.

    tensors ──▶ their files ──┬─▶ here ──────────────────────────────▶ nothing to do
                              ├─▶ ranges save much, and can be kept ──▶ a part of the file in Canopy's cache
                              └─▶ else, or the server sends no ranges ─▶ the whole file in Hugging Face's cache

Whole files are compared with their digests; of a part, only TLS says that it is what the hub has.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from huggingface_hub import constants

from swarm.base.errors import NotEnoughSpace
from swarm.files.hub import Hub, Progress
from swarm.files.parts.byte_ranges import ByteRanges
from swarm.files.parts.part_file import keeps_holes, parts_folder
from swarm.files.parts.range_download import NoRanges

if TYPE_CHECKING:
    from swarm.files.stored.source import WeightSource

GAP_BYTES: Final = 4 << 20
"""Ranges that are closer are fetched in one: about what a request costs in time."""
MIN_SAVED_BYTES: Final = 64 << 20
"""A file is fetched whole if a part would save less."""
MIN_SAVED_SHARE: Final = 10
"""Likewise if it saves less than this fraction of the whole model …"""
MUCH_BYTES: Final = 4 << 30
"""… and than this. So of a model in many files whole ones are fetched."""

FORGET_WAIT_S: Final = 1.0
"""For another program that fetches more of a part which is to go."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FileFetch:
    """What is fetched of a file.

    Attributes:
        size_bytes: of the whole file; 0 where the hub does not say it.
        ranges: what is wanted of it; None: all of it.
    """

    name: str
    size_bytes: int
    missing_bytes: int
    ranges: ByteRanges | None = None

    @property
    def wanted_bytes(self) -> int:
        """How much of it is here afterwards."""
        return self.size_bytes if self.ranges is None else self.ranges.size_bytes

    @property
    def folder(self) -> Path:
        """On whose disk it is kept; it may not be there."""
        return Path(constants.HF_HUB_CACHE) if self.ranges is None else parts_folder()

    def describe(self) -> str:
        """How much is fetched, of how much."""
        wanted, size = self.wanted_bytes / 2**30, self.size_bytes / 2**30
        return (
            f"of {self.name} only the bytes of these layers are fetched: {wanted:,.2f} of {size:,.2f} GiB, of which "
            f"{self.missing_bytes / 2**30:,.2f} are not here. They are as the hub sends them: "
            "its SHA-256 is of the whole file"
        )


def plan_fetch(source: WeightSource, hub: Hub, names: Iterable[str]) -> list[FileFetch]:
    """What is to be fetched for some tensors, file by file; files that are here whole are left out.

    Raises:
        HubError: the header of a file cannot be fetched.
    """
    asked: dict[str, list[str]] = {}
    for name in names:
        for file in source.files[name]:
            asked.setdefault(file, []).append(name)
    total = sum(hub.files[file].size_bytes for file in _all_files(source) if file in hub.files)
    absent = [file for file in sorted(asked) if not (hub.folder / file).exists()]
    return [_plan_file(source, hub, file, asked[file], total) for file in absent]


def fetch_tensors(
    source: WeightSource,
    hub: Hub,
    names: Iterable[str],
    report: Progress | None = None,
    say: Callable[[str], None] = logger.info,
) -> None:
    """Fetch what some tensors need, and is not here.

    Args:
        report: called while bytes arrive.

    Raises:
        UnknownModel: a file is neither here nor on the hub.
        HubError: the hub refuses, cannot be reached, or what it sent cannot be kept.
        NotEnoughSpace: the disk is full.
    """
    asked = set(names)
    plan = plan_fetch(source, hub, asked)
    whole, parts = ([one for one in plan if (one.ranges is None) == is_whole] for is_whole in (True, False))
    before, total = sum(one.wanted_bytes for one in whole), sum(one.wanted_bytes for one in plan)
    hub.fetch([one.name for one in whole], None if report is None else partial(_told, report, total, 0))
    for one in parts:
        told = None if report is None else partial(_told, report, total, before)
        if not _fetched_part(hub, one, told, say):
            hub.fetch([one.name], told)
        before += one.wanted_bytes
    for file in {file for name in asked for file in source.files[name]}:
        _forget_part(hub, file)


def _told(report: Progress, total: int, before: int, name: str, here: int, _: int = 0) -> None:
    report(name, before + here, max(total, before + here))


def _forget_part(hub: Hub, file: str) -> None:
    """Remove the part of a file that is here whole by now, however that came."""
    part = hub.part_file(file) if (hub.folder / file).exists() else None
    if part is not None and part.data.exists():
        with suppress(OSError), part.locked(timeout_s=FORGET_WAIT_S):
            part.forget()


def _all_files(source: WeightSource) -> set[str]:
    return {file for files in source.files.values() for file in files}


def _plan_file(source: WeightSource, hub: Hub, file: str, names: list[str], total: int) -> FileFetch:
    listed = hub.files.get(file)
    whole = FileFetch(file, 0 if listed is None else listed.size_bytes, hub.missing_bytes([file]))
    part = hub.part_file(file)
    least = max(MIN_SAVED_BYTES, min(total // MIN_SAVED_SHARE, MUCH_BYTES))
    if part is None or (part.size_bytes < least and not part.is_here):
        return whole
    needed = source.ranges(names).get(file, ByteRanges())
    if part.here().covers(needed):
        return FileFetch(file, part.size_bytes, 0, needed)
    wanted = ByteRanges.of(needed, GAP_BYTES)
    planned = FileFetch(file, part.size_bytes, wanted.without(part.here()).size_bytes, wanted)
    if listed is None:
        return planned  # the hub does not answer, and says so when it is asked
    saves_much = whole.missing_bytes - planned.missing_bytes >= least
    return planned if saves_much and keeps_holes() and _has_room(planned, whole) else whole


def _has_room(planned: FileFetch, whole: FileFetch) -> bool:
    """Whether there is room for a part, or none for the whole file either: then the part is what to ask room for."""
    return free_disk(planned.folder) >= planned.missing_bytes or free_disk(whole.folder) < whole.missing_bytes


def _fetched_part(
    hub: Hub, one: FileFetch, report: Callable[[str, int], None] | None, say: Callable[[str], None]
) -> bool:
    """Whether the ranges are here now; else the server does not send them."""
    assert one.ranges is not None
    here = one.wanted_bytes - one.missing_bytes
    if report is not None and one.missing_bytes:
        report(one.name, here)
    told = None if report is None else lambda arrived: report(one.name, here + arrived)
    try:
        hub.fetch_ranges(one.name, one.ranges, told)
    except NoRanges as reason:
        say(f"{one.name} is fetched whole, {one.size_bytes / 2**30:,.2f} GiB: {reason}")
        needs = hub.missing_bytes([one.name])
        if (has := free_disk(Path(constants.HF_HUB_CACHE))) < needs:
            space = f"{needs / 2**30:.1f} GiB of disk, {has / 2**30:.1f} GiB are free"
            raise NotEnoughSpace(f"{hub.repo}: {one.name} needs {space}; free some, or set HF_HOME") from None
        return False
    return True


def free_disk(folder: Path) -> int:
    """Free bytes of the disk of a folder, which may not be there."""
    return shutil.disk_usage(existing(folder)).free


def existing(folder: Path) -> Path:
    """The folder, or the innermost one around it that is there."""
    return next(one for one in (folder, *folder.parents) if one.exists())
