"""What runs between two accepts, in the client and three nodes: so many files, functions and calls.

The bounds are what it takes today (71 files, 832 to 840 functions, 4,200 to 4,250 calls for a sweep) with some room for
chance. A change lowers them; one that must raise them says in a decision what for (0093). They keep a token's way short
enough to be read, which no cap on files or lines does.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType

from tests.net.three_nodes import three_nodes

ROOT = f"{Path(__file__).parents[2]}/"
SHIPPED = tuple(f"{ROOT}{name}/" for name in ("swarm", "node", "client"))
PROMPT = "It was a dark night, and the old"
FIRST, LAST = 3, 20
"""Pieces of the text between which calls are counted."""
SWEEP = "Walk._sweep"
"""Is called once for each sweep."""
MAX_FILES, MAX_FUNCTIONS, MAX_CALLS = 72, 850, 4_300
"""Of what is called in every sweep; what runs now and then, such as pings and renewals, is left out."""
TEXTS = 3
"""The least that any of these took counts: a busy machine wakes some more often."""


class Recorder:
    """Counts calls of shipped functions in all threads while it is on."""

    def __init__(self) -> None:
        self.is_on = False
        self.calls: Counter[tuple[str, str, int]] = Counter()

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if self.is_on and event == "call" and code.co_filename.startswith(SHIPPED):
            self.calls[code.co_filename.removeprefix(ROOT), code.co_qualname, code.co_firstlineno] += 1


async def test_what_runs_between_two_accepts_grows_no_more() -> None:
    recorder, counted = Recorder(), list[Counter[tuple[str, str, int]]]()
    before = sys.getprofile()
    threading.setprofile(recorder)
    sys.setprofile(recorder)
    try:
        async with three_nodes() as running:
            await running.client.generate("It was a dark night, and", max_new_tokens=24, seed=1, temperature=0.7)
            for _ in range(TEXTS):
                number, result = 0, None
                recorder.calls = Counter()
                async for piece in running.client.stream(PROMPT, max_new_tokens=96, nodes=4, seed=2, temperature=0.7):
                    number += 1
                    recorder.is_on = FIRST <= number < LAST
                    result = piece.result
                assert result is not None
                counted.append(recorder.calls)
    finally:
        sys.setprofile(before)
        threading.setprofile(before)
    (sweeps,) = {sum(calls for (_, name, _), calls in one.items() if name == SWEEP) for one in counted}
    assert sweeps > 1
    least = {function: min(one[function] for one in counted) for function in counted[0]}
    steady = {function: calls for function, calls in least.items() if calls >= sweeps}
    files = {file for file, _, _ in steady}
    assert len(files) <= MAX_FILES, sorted(files)
    assert len(steady) <= MAX_FUNCTIONS
    assert sum(steady.values()) <= MAX_CALLS * sweeps
