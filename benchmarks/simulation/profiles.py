"""Networks that benchmarks simulate or emulate, and the first seed of their texts. Pure values."""

from __future__ import annotations

from benchmarks.simulation.chain import HOPS, Costs

PROFILES = {
    "1 ms, 1 Gbit/s": Costs(1, 1_000),
    "10 ms, 200 Mbit/s": Costs(10, 200),
    "25 ms, 100 Mbit/s": Costs(25, 100),
    "50 ms, 20 Mbit/s": Costs(50, 20),
    "100 ms, 50 Mbit/s": Costs(100, 50),
}

CARD_ROW_BYTES = 8_192
"""Of hidden rows of an 8B model in 16 bits."""
CARD_STEPS = ((16, 4.66), (32, 4.87), (64, 5.29), (128, 7.3), (256, 11.3), (512, 19.3))
"""A card's forward of such a model, in milliseconds by the rows of a bucket. Synthetic: 16 and 64 rows are a
prototype's on an H200; 32 lie between them, and beyond 64 rows the arithmetic of 64 more is taken to be 2 ms."""
_HOP_STEPS = tuple((rows, round(ms / HOPS, 3)) for rows, ms in CARD_STEPS)

CARDS = {
    "cards, 1 ms, 1 Gbit/s": Costs(1, 1_000, pass_ms=1.0, row_bytes=CARD_ROW_BYTES, steps=_HOP_STEPS),
    "cards, 25 ms, 100 Mbit/s": Costs(25, 100, pass_ms=1.0, row_bytes=CARD_ROW_BYTES, steps=_HOP_STEPS),
}
"""The same networks between cards that hold a third of such a model each. Synthetic."""

FIRST_SEED = 11
"""Seeds of a benchmark's texts count from here."""
