"""Texts in bf16 through real nodes: promised where every forward runs kernels, and refused where it does not."""

from __future__ import annotations

from typing import Any

import pytest

from client import Result
from node.life import span_host
from node.model.span import SpanModel
from swarm.base.errors import ConfigError, RouteError
from swarm.demo import TARGET
from tests.devices import DEVICE
from tests.in_process_swarm import InProcessSwarm, in_process_swarm

SPANS = ("0-12",)


async def told(swarm: InProcessSwarm, **options: Any) -> Result:  # noqa: ANN401
    """A short text; options are the connection's."""
    async with swarm.client(**options) as client:
        return await client.generate("It was", max_new_tokens=2)


async def test_bf16_promises_a_text_with_kernels_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async with in_process_swarm(TARGET, SPANS, dtype="bfloat16") as plain:
        stats = (await told(plain)).stats
        assert (stats.numeric_class, stats.reproducible) == (f"{DEVICE}-bfloat16", False)
        with pytest.raises(RouteError, match=rf"layers 0…11.*also computes in {DEVICE}-bfloat16"):
            await told(plain, reproducible=True)

    def with_kernels(model: SpanModel, **_: object) -> None:
        """Say that forwards run kernels: what they do is tested elsewhere."""
        model.kernel_version = 7

    monkeypatch.setattr(span_host, "make_ready", with_kernels)
    async with in_process_swarm(TARGET, SPANS, dtype="bfloat16") as running:
        stats = (await told(running, reproducible=True)).stats
        assert stats.numeric_class.endswith("-bfloat16-k7")
        assert stats.reproducible
        assert not (await told(running, codec="int8")).stats.reproducible
        with pytest.raises(ConfigError, match="codec int8"):
            await told(running, codec="int8", reproducible=True)
        async with running.client(reproducible=True) as client:
            with pytest.raises(ConfigError, match="multistep"):
                await client.generate("It was", max_new_tokens=2, multistep=True, temperature=1.0)
            assert (await client.generate("It was", max_new_tokens=2, multistep=True)).stats.reproducible
