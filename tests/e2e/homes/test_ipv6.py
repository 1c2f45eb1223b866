"""Machines that have IPv6 alone, behind routers that let nothing in: a relay lists them, and a hole joins them."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.emulation import homes_swarm
from benchmarks.emulation.homes import Home, HomesNetwork, HomesPlan
from benchmarks.emulation.homes_swarm import open_homes_swarm
from tests.e2e.homes.paths import HomesPath
from tests.forked.machines import forked_json_program, forked_program

TOKENS, ATTEMPTS = 6, 4
LEG_MS = 25.0


@pytest.mark.crossing
@pytest.mark.needs_root
@pytest.mark.needs_program("nft", "nftables")
@pytest.mark.needs_program("conntrack", "conntrack")
async def test_machines_with_ipv6_alone_serve_from_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(homes_swarm, "start_program", forked_program)
    monkeypatch.setattr(homes_swarm, "json_program", forked_json_program)
    homes = (Home("A", ipv4=False), Home("B", ipv4=False))
    async with HomesNetwork(HomesPlan(homes, ipv6=True)) as world, open_homes_swarm(world, tmp_path) as swarm:
        peer = await swarm.bootstrap("P", ipv6=True)
        for home in homes:
            await swarm.serve(home.name, "0-12", [peer])
        client = await swarm.client("C", [peer])
        near, far = swarm.peers["A"], swarm.peers["B"]
        await client.wait_up(near, far)
        assert client.listed[far]["address"].startswith(f"{far}.via.[{world.address6('P')}]:")
        whole = await client.generate({"hops": [[near, "0-12"]], "new_tokens": TOKENS})
        for _ in range(ATTEMPTS):
            told = await client.generate({"hops": [[near, "0-6"], [far, "6-12"]], "new_tokens": TOKENS})
            assert told["error"] is None
            assert told["tokens"] == whole["tokens"]
            if told["links_ms"] and HomesPath.PUNCHED.fits(told["links_ms"][1], LEG_MS):
                break
        assert told["links_ms"], told
        assert HomesPath.PUNCHED.fits(told["links_ms"][1], LEG_MS), told
        assert any(world.address6("B") in other for _, other in await world.connections("A"))
