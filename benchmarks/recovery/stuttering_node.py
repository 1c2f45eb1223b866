"""`node serve` on a machine whose owner does other things: at times, a forward waits for a while before it begins.

python -m benchmarks.recovery.stuttering_node CHANCE SECONDS serve …
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Sequence

from node.cli import main
from node.engine.sweep_run import SweepRun


def stutter(chance: float, seconds: float) -> None:
    """Let each forward wait `seconds` with this probability, all else of the machine with it."""
    rng, advance = random.Random(0), SweepRun.advance

    def stuttering(run: SweepRun, count: int, others: Sequence[SweepRun] = ()) -> dict[SweepRun, Exception]:
        if rng.random() < chance:
            time.sleep(seconds)
        return advance(run, count, others)

    SweepRun.advance = stuttering  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    stutter(float(sys.argv[1]), float(sys.argv[2]))
    sys.argv[1:3] = []
    main()
