"""Hours of each day in which a machine is left alone, by the clock on the wall. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime, time
from typing import Self

from swarm.base.errors import ConfigError

_HOURS = re.compile(r"(\d{1,2}):(\d{2})-(\d{1,2}):(\d{2})")


@dataclass(frozen=True, slots=True)
class QuietHours:
    """A half-open range of the day, which may pass midnight.

    Only what the clock shows counts. So an hour that comes twice in autumn is quiet twice, and one that spring leaves
    out is not waited for.
    """

    begin: time
    """The first minute of quiet, local time."""
    end: time
    """The first minute after it."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `22:00-07:00`.

        Raises:
            ConfigError: it is something else.
        """
        found = _HOURS.fullmatch(text.strip())
        try:
            begin_hour, begin_minute, end_hour, end_minute = map(int, found.groups() if found else ())
            hours = cls(time(begin_hour, begin_minute), time(end_hour, end_minute))
        except ValueError:
            raise ConfigError(f"--quiet-hours {text!r}: write two times of the day, such as 22:00-07:00") from None
        if hours.begin == hours.end:
            raise ConfigError(f"--quiet-hours {text}: they would never end, or never begin")
        return hours

    def holds(self, now: datetime) -> bool:
        """Whether it is quiet at this local time."""
        clock = now.time()
        if self.begin < self.end:
            return self.begin <= clock < self.end
        return clock >= self.begin or clock < self.end

    def __str__(self) -> str:
        return f"{self.begin:%H:%M}-{self.end:%H:%M}"
