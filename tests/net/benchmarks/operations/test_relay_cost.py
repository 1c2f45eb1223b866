"""The relay's benchmark measures a relay: what it carries is what it lends, and nobody is starved."""

from __future__ import annotations

import pytest

from benchmarks.operations import relay_cost
from benchmarks.operations.relay_cost import Options, measure, sheet


async def test_a_row_says_what_a_small_relay_carried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_cost, "ALONE_S", 0.1)
    monkeypatch.setattr(relay_cost, "WARM_UP_S", 0.5)
    options = Options(lent_mbit=(80.0,), circuits=4, seconds=1.0)
    found = await measure(80.0, options)
    assert 20 < found.mbit_per_s < 110
    assert found.fairness > 0.3
    assert 0 < found.cpu < 1
    assert 0 < found.pss_mb < 200
    made = sheet({80.0: found}, options)
    assert len(made.rows[0]) == len(made.columns)
