"""Each kind of behaviour of a chain once more over gRPC; in their own files these tests have their links in memory."""

from __future__ import annotations

import pytest

from tests.net.client.chain.test_hedge import hedge
from tests.net.client.chain.test_hedge import test_when_one_dies_the_other_goes_on_without_a_replay as one_of_two_dies
from tests.net.client.chain.test_packed_rows import arrived, far, test_a_snapshot_travels_packed
from tests.net.client.chain.test_prefix import test_it_outlives_a_machine as a_beginning_outlives
from tests.net.client.chain.test_repair import (
    test_a_broken_reply_stream_is_opened_again,
    test_a_death_with_a_sweep_in_flight,
    test_several_deaths_at_once,
)
from tests.net.client.chain.test_repair_waits import (
    test_a_machine_that_leaves_serves_until_its_sessions_have_moved,
    test_the_lost_machine_itself_comes_back,
)
from tests.net.client.chain.test_strangers import (
    hasty,
    test_a_tail_whose_replies_answer_nothing_is_gone_around,
    test_who_refuses_is_gone_around,
    test_who_swallows_sweeps_is_found,
)
from tests.net.client.decode.test_aux_rows import notes, test_a_death_in_mid_text
from tests.net.killable_nodes import KillableNodes

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(90),
    pytest.mark.over_grpc,
    pytest.mark.crossing(part=(0, 3)),
]

__all__ = [
    "arrived",
    "far",
    "hasty",
    "notes",
    "test_a_broken_reply_stream_is_opened_again",
    "test_a_death_in_mid_text",
    "test_a_death_with_a_sweep_in_flight",
    "test_a_machine_that_leaves_serves_until_its_sessions_have_moved",
    "test_a_snapshot_travels_packed",
    "test_a_tail_whose_replies_answer_nothing_is_gone_around",
    "test_several_deaths_at_once",
    "test_the_lost_machine_itself_comes_back",
    "test_who_refuses_is_gone_around",
    "test_who_swallows_sweeps_is_found",
]


async def test_when_one_of_two_dies_the_other_goes_on(nodes: KillableNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    hedge(nodes, monkeypatch)
    await one_of_two_dies("replica", 1, nodes)


async def test_what_a_session_began_with_outlives_a_machine(nodes: KillableNodes) -> None:
    await a_beginning_outlives(nodes, "a1", 3)
