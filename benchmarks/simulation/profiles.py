"""Networks that benchmarks simulate or emulate, and the first seed of their texts. Pure values."""

from __future__ import annotations

from benchmarks.simulation.chain import Costs

PROFILES = {
    "1 ms, 1 Gbit/s": Costs(1, 1_000),
    "10 ms, 200 Mbit/s": Costs(10, 200),
    "25 ms, 100 Mbit/s": Costs(25, 100),
    "50 ms, 20 Mbit/s": Costs(50, 20),
    "100 ms, 50 Mbit/s": Costs(100, 50),
}

FIRST_SEED = 11
"""Seeds of a benchmark's texts count from here."""
