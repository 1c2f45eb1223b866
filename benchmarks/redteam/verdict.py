"""What honest users felt of an attack, and the verdict. Pure: measurements in, numbers and words out."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from benchmarks.redteam.honest import HonestText

HELD_RATIO = 0.8
"""Of the undisturbed speed, while an attack lasts."""
BACK_RATIO = 0.9
"""Of the undisturbed speed, in the seconds after it: 1, less what two medians of few texts differ by."""
GROWTH_MB = 150.0
"""What a program's memory may have grown by when an attack is over."""
FILES_SHARE = 0.9
"""Of the files that a program may open, those that an attack may take."""
LOG_KB_PER_S = 20.0
"""What a stranger may make a program write while it attacks."""
SLOW_SHARE = 0.05


class Verdict(enum.StrEnum):
    HELD = "held"
    SLOWED = "slowed"
    BROKEN = "broken"
    NAMED = "named"
    FAILED = "not run"
    CONTROL = "control"


@dataclass(frozen=True, slots=True)
class Window:
    """A stretch of time, in seconds of the day."""

    began: float
    ended: float

    def holds(self, text: HonestText) -> bool:
        """Whether a text lies wholly inside."""
        return self.began <= text.began and text.ended <= self.ended

    def touches(self, text: HonestText) -> bool:
        """Whether some of a text lies inside."""
        return text.began < self.ended and text.ended > self.began


@dataclass(frozen=True, slots=True)
class Pair:
    """Undisturbed, then attacked.

    Attributes:
        quiet: Texts of the undisturbed time, of each user.
        attacked: Texts that the attack touched, of each user.
    """

    quiet: Sequence[Sequence[HonestText]]
    attacked: Sequence[Sequence[HonestText]]

    @property
    def ratio(self) -> float:
        """Speed under attack of the speed before, of the user who felt it most."""
        return _of_speeds(self.attacked, self.quiet)

    @property
    def first_ratio(self) -> float:
        """The same of the first user, who keeps its connection."""
        return _of_speeds(self.attacked[:1], self.quiet[:1])

    @property
    def slow_ratio(self) -> float:
        """The same of the slowest texts of all users: the speed that 95 of 100 texts exceed."""
        base = share([text.tokens_per_s for some in self.quiet for text in some], SLOW_SHARE)
        return share([text.tokens_per_s for some in self.attacked for text in some], SLOW_SHARE) / base if base else 0.0


@dataclass(slots=True)
class Felt:
    """Everything that was seen of one attack.

    Attributes:
        after: Texts that began when it was over, of each user.
        growth_mb: Memory after it, less memory before; by program.
        files: Most open files of a program while it lasted, and how many it may open; by program.
        log_kb_per_s: What a program wrote into its log while it lasted; by program.
        page: Looks at the health page while it lasted: how many, and how many were answered rightly.
        troubles: Why the attack could not be carried out.
    """

    pairs: list[Pair] = field(default_factory=list)
    after: Sequence[Sequence[HonestText]] = ()
    ended: Sequence[str] = ()
    growth_mb: dict[str, float] = field(default_factory=dict)
    files: dict[str, tuple[int, int]] = field(default_factory=dict)
    log_kb_per_s: dict[str, float] = field(default_factory=dict)
    page: tuple[int, int] = (0, 0)
    breaches: Sequence[str] = ()
    troubles: Sequence[str] = ()

    @property
    def ratio(self) -> float:
        return median([pair.ratio for pair in self.pairs]) if self.pairs else 0.0

    @property
    def first_ratio(self) -> float:
        """Median of the pairs, of the user who keeps its connection."""
        return median([pair.first_ratio for pair in self.pairs]) if self.pairs else 0.0

    @property
    def newcomers_s(self) -> float:
        """How many seconds longer a text took those who connect anew: a median of texts less a median of texts."""
        attacked = [text.seconds for pair in self.pairs for some in pair.attacked[1:] for text in some]
        quiet = [text.seconds for pair in self.pairs for some in pair.quiet[1:] for text in some]
        return median(attacked) - median(quiet) if attacked and quiet else 0.0

    @property
    def slow_ratio(self) -> float:
        """Median of the pairs' slowest texts."""
        return median([pair.slow_ratio for pair in self.pairs]) if self.pairs else 0.0

    @property
    def after_ratio(self) -> float:
        """Speed when it was over, of the undisturbed speed, of the user who felt it most."""
        users = range(len(self.after))
        return _of_speeds(self.after, [[text for pair in self.pairs for text in pair.quiet[user]] for user in users])

    @property
    def touched(self) -> list[HonestText]:
        """All texts that the attack touched, and those after it."""
        attacked = [text for pair in self.pairs for some in pair.attacked for text in some]
        return attacked + [text for some in self.after for text in some]

    @property
    def wrong(self) -> list[str]:
        """Texts that were lost or not the right ones, as one line for each way in which they were."""
        lost = [text.error or f"another text, {text.repairs} repairs" for text in self.touched if not text.right]
        return [f"{lost.count(line)} × {line}" for line in dict.fromkeys(lost)]

    @property
    def broken(self) -> list[str]:
        found = [*self.wrong, *(f"{name} ended" for name in self.ended), *self.breaches]
        found += [f"{name} grew by {grown:.0f} MB" for name, grown in self.growth_mb.items() if grown > GROWTH_MB]
        for name, (files, limit) in self.files.items():
            if files > FILES_SHARE * limit:
                found.append(f"{name} had {files} of {limit} files open")
        for name, rate in self.log_kb_per_s.items():
            if rate > LOG_KB_PER_S:
                found.append(f"{name} writes {rate:.0f} kB/s into its log")
        looks, answered = self.page
        if looks > answered:
            found.append(f"the page answered {answered} of {looks} times")
        return found

    def verdict(self, limit: str, slows: str = "") -> Verdict:
        """The word for it.

        Args:
            limit: why it may change texts or slow them, and do nothing else; empty where it may not.
            slows: why it may slow those who connect anew, and do nothing else; likewise.
        """
        if self.troubles:
            return Verdict.FAILED
        is_slow = self.ratio < HELD_RATIO or self.after_ratio < BACK_RATIO
        if not self.broken and not is_slow:
            return Verdict.HELD
        is_borne = not self.broken and self.first_ratio >= HELD_RATIO and self.after_ratio >= BACK_RATIO
        if (slows and is_borne) or (limit and self.broken == self.wrong):
            return Verdict.NAMED
        return Verdict.BROKEN if self.broken else Verdict.SLOWED


def share(values: Sequence[float], part: float) -> float:
    """The value below which this share of the values lies, interpolated; 0 without any."""
    if not values:
        return 0.0
    ordered = sorted(values)
    place = part * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def speed(texts: Sequence[HonestText]) -> float:
    """Tokens per second over some texts of one user; those that were lost took their time and brought nothing."""
    seconds = sum(text.ended - text.began for text in texts)
    return sum(text.tokens for text in texts if not text.error) / seconds if seconds else 0.0


def _of_speeds(some: Sequence[Sequence[HonestText]], reference: Sequence[Sequence[HonestText]]) -> float:
    """The least of all users' speeds, each of its own in the reference."""
    pairs = [(speed(one), speed(base)) for one, base in zip(some, reference, strict=True)]
    return min((one / base for one, base in pairs if base), default=0.0)
