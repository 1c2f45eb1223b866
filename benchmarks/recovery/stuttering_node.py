"""`node serve` on a machine whose owner does other things: at times, a forward waits for a while before it begins.

python -m benchmarks.recovery.stuttering_node CHANCE SECONDS serve …
"""

from __future__ import annotations

import random
import sys
import time

from node.cli import main
from node.engine.scheduler import Batch, Schedulable
from node.engine.sweep_run import SweepRun


def stutter(chance: float, seconds: float) -> None:
    """Let each forward wait `seconds` with this probability, all else of the machine with it."""
    rng, run_batch = random.Random(0), Batch.run

    def stuttering(batch: Batch[Schedulable]) -> dict[SweepRun, Exception]:
        if rng.random() < chance:
            time.sleep(seconds)
        return run_batch(batch)

    Batch.run = stuttering  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    stutter(float(sys.argv[1]), float(sys.argv[2]))
    sys.argv[1:3] = []
    main()
