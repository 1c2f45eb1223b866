"""When probes are made, what they may cost, and what becomes of their answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from swarm.base.errors import ConfigError, RemoteProtocolError
from swarm.base.ids import PeerId
from swarm.base.layers import Span
from swarm.directory.dht.addresses import OPEN_SWARM, Membership
from swarm.health.alerts.rules import Finding
from swarm.health.options import Health
from swarm.health.service import check
from swarm.health.state.node import NodeView
from swarm.health.state.overview import Overview
from swarm.health.tasks.prober import PROBE_TOKENS, RETRY_S, SETTLE_S, Prober
from swarm.link.network_key import NetworkKey
from tests.telemetry_messages import FINGERPRINT, NOW, status

EVERY_S = 300.0
JOIN = "/ip4/192.0.2.1/tcp/31337/p2p/QmYwAPJzv5CZsnA625s3Xf2nemtYgPpHdWEz79ojWnPbdG"


@dataclass
class World:
    """A swarm of three, a clock, and what `client.terminal.probe` would print."""

    now: float = NOW
    wrong_s: float = 0.0
    budget: int = 1_000
    says: list[str | Exception] = field(default_factory=list)
    asked: list[Sequence[str]] = field(default_factory=list)
    insecure: bool = False
    membership: Membership = OPEN_SWARM
    overview: Overview = field(default_factory=lambda: Overview([JOIN], "canopy", NOW))

    def __post_init__(self) -> None:
        clocks = (lambda: self.now + self.wrong_s, lambda: self.now)
        command = Health(
            probe_every=EVERY_S, probe_budget=self.budget, insecure=self.insecure, membership=self.membership
        )
        self.prober = Prober(self.overview, command, self.run, clocks)

    async def run(self, arguments: Sequence[str]) -> str:
        self.asked.append(arguments)
        said = self.says.pop(0)
        if isinstance(said, Exception):
            raise said
        return said

    def hear(self, *spans: tuple[int, int], numeric_class: str = "cpu-float32") -> None:
        for number, span in enumerate(spans):
            now = self.now + self.wrong_s
            body = status(at=now, span=Span(*span), numeric_class=numeric_class)
            self.overview.knowledge.apply_telemetry(PeerId(f"QmNode{number}"), FINGERPRINT, body, now)
            self.overview.knowledge.slots.enter(FINGERPRINT, True, now)

    def later(self, seconds: float) -> None:
        self.now += seconds
        self.hear((0, 6), (6, 12), (6, 12))

    async def turn(self, *says: str | Exception) -> None:
        """Make the probe that is due."""
        self.says = list(says)
        due = self.prober.due()
        assert due is not None
        await self.prober.probe(*due)
        assert not self.says

    def alerts(self) -> list[Finding]:
        return [alert.finding for alert in self.overview.alerts.open()] if self.overview.assess(self.now) else []

    def node(self, number: int) -> NodeView:
        _, nodes = self.overview.knowledge.nodes(self.now)[FINGERPRINT]
        return next(node for node in nodes if node.peer == f"QmNode{number}")


FINE = json.dumps({"ok": True, "tokens": 32})


def compared(peer: str, other: str, agrees: bool | None) -> str:
    return json.dumps({"peer": peer, "others": [other], "agrees": agrees})


async def test_only_a_complete_model_is_probed_and_not_before_its_time() -> None:
    world = World()
    world.hear((0, 6))
    assert world.prober.due() is None
    world.later(0)
    assert world.prober.due() is None
    world.later(SETTLE_S)
    await world.turn(FINE, compared("QmNode1", "QmNode2", True))
    assert world.prober.due() is None
    world.later(EVERY_S)
    assert world.prober.due() is not None
    assert world.asked[0] == ["--fingerprint", FINGERPRINT, "--tokens", "16", "--join", JOIN]


async def test_a_private_swarms_key_is_no_argument() -> None:
    world = World(membership=Membership(NetworkKey(bytes(range(32)))))
    world.later(0)
    assert world.prober.due() is None
    world.later(SETTLE_S)
    await world.turn(FINE, compared("QmNode1", "QmNode2", True))
    for arguments in world.asked:
        given = arguments[arguments.index("--network-key") + 1]
        assert given == "-"  # it is read from standard input


async def test_an_insecure_swarm_is_probed_in_plain_text() -> None:
    world = World(insecure=True)
    world.later(0)
    assert world.prober.due() is None
    world.later(SETTLE_S)
    await world.turn(FINE, compared("QmNode1", "QmNode2", True))
    assert [arguments.count("--insecure") for arguments in world.asked] == [1, 1]


async def test_a_clock_that_jumps_and_comes_back_changes_no_schedule_and_no_budget() -> None:
    world = World(budget=100)
    world.later(0)
    assert world.prober.due() is None
    for wrong_s in (0.0, 40 * 86_400.0, -40 * 86_400.0, 0.0):
        world.wrong_s = wrong_s
        world.later(3_600.0)
        await world.turn(FINE, compared("QmNode1", "QmNode2", True))
        assert world.prober.due() is None


async def test_machines_with_a_stand_in_are_compared_in_turn() -> None:
    world = World()
    world.later(0)
    assert world.prober.due() is None
    for peer, other, agrees in (("QmNode1", "QmNode2", True), ("QmNode2", "QmNode1", None)):
        world.later(EVERY_S)
        await world.turn(FINE, compared(peer, other, agrees))
    assert [arguments[-1] for arguments in world.asked[1::2]] == ["QmNode1", "QmNode2"]
    assert [world.node(number).agrees for number in range(3)] == [None, True, True]
    world.later(EVERY_S)
    await world.turn(FINE, compared("QmNode1", "QmNode2", False))
    assert [world.node(number).agrees for number in range(3)] == [None, False, False]


@pytest.mark.parametrize("numeric_class", ["cuda-bfloat16", "cuda-sm90-bfloat16", "of-a-later-release"])
async def test_only_exact_arithmetic_is_compared(numeric_class: str) -> None:
    """Where nobody has just the same layers: else they are audited, in any class."""
    world = World()
    world.hear((0, 12), (0, 6), (6, 12), numeric_class=numeric_class)
    assert world.prober.due() is None
    world.now += SETTLE_S
    await world.turn(FINE)
    world.hear((0, 12), (0, 6), (6, 12), (6, 12), numeric_class=numeric_class)
    world.now += EVERY_S
    world.hear((0, 12), (0, 6), (6, 12), (6, 12), numeric_class=numeric_class)
    await world.turn(FINE, compared("QmNode2", "QmNode3", True))


async def test_the_one_of_three_that_differs_is_named_and_the_others_are_not() -> None:
    """By an audit of a canary's own text as by one that was asked for."""
    world = World()
    world.hear((0, 12), (0, 12), (0, 12))
    assert world.prober.due() is None
    world.now += SETTLE_S
    named = {"peer": "QmNode0", "others": ["QmNode1", "QmNode2"], "agrees": False, "named": "QmNode1"}
    await world.turn(json.dumps({"ok": True, "tokens": 32, "audit": named}), OSError("no process"))
    assert [world.node(number).agrees for number in range(3)] == [True, False, True]
    assert [world.node(number).is_named for number in range(3)] == [False, True, False]
    (alert,) = [one for one in world.alerts() if one.about == "audit"]
    assert "QmNode1 computes something else than two other holders" in alert.text
    assert not [one for one in world.alerts() if one.about == "difference"], "who lies is known"
    world.now += EVERY_S
    world.hear((0, 12), (0, 12), (0, 12))
    await world.turn(FINE, compared("QmNode1", "QmNode0", True))
    assert not world.node(1).is_named


@pytest.mark.parametrize("numeric_class", ["cuda-sm90-bfloat16-k1", "cuda-sm89-bfloat16-k1+w4z", "rocm-float32"])
async def test_any_class_that_promises_texts_is_compared(numeric_class: str) -> None:
    world = World()
    world.hear((0, 12), (0, 12), numeric_class=numeric_class)
    assert world.prober.due() is None
    world.now += SETTLE_S
    await world.turn(FINE, compared("QmNode1", "QmNode2", True))
    assert world.node(1).agrees


@pytest.mark.parametrize(("numeric_class", "is_compared"), [("cpu-float32", True), ("cpu-bfloat16-k2+gguf", False)])
def test_kinds_of_processors_that_round_otherwise_are_not_compared_by_texts(
    numeric_class: str, is_compared: bool
) -> None:
    world = World()
    world.hear((0, 6), (6, 12), (0, 12), numeric_class=numeric_class)
    ((model, nodes),) = world.overview.knowledge.nodes(world.now).values()
    assert (world.prober.next_compared(model, nodes) is not None) == is_compared
    world.hear((0, 12), (0, 12), (0, 12), numeric_class=numeric_class)
    ((model, nodes),) = world.overview.knowledge.nodes(world.now).values()
    assert world.prober.next_compared(model, nodes) is not None, "twins are audited"


async def test_a_failure_is_looked_at_again_soon() -> None:
    world = World()
    world.later(0)
    assert world.prober.due() is None
    for failures, trouble in (
        (1, TimeoutError()),
        (2, '{"ok": false, "error": "nobody"}'),
        (2, RemoteProtocolError("x", "y")),
    ):
        world.later(2 * RETRY_S)
        await world.turn(trouble)
        assert world.overview.probes[FINGERPRINT].failures == failures
    world.later(3 * RETRY_S)
    assert world.prober.due() is None, "each failure doubles the pause"
    world.later(RETRY_S)
    await world.turn(FINE, OSError("no process"))
    assert world.overview.probes[FINGERPRINT].failures == 0


def test_a_model_of_which_telemetry_alone_speaks_is_not_probed() -> None:
    world = World()
    world.later(0)
    world.overview.knowledge.slots.leave(FINGERPRINT)
    world.overview.knowledge.slots.enter(FINGERPRINT, False, world.now)
    for _ in range(2):
        world.now += 4
        assert world.prober.due() is None
    world.overview.knowledge.slots.enter(FINGERPRINT, True, world.now)
    assert world.prober.due() is None
    world.now += 4
    assert world.prober.due() is not None


async def test_the_budget_is_kept() -> None:
    world = World(budget=2 * PROBE_TOKENS + 1)
    world.later(0)
    assert world.prober.due() is None
    for _ in range(2):
        world.later(EVERY_S)
        await world.turn(FINE)
    world.later(EVERY_S)
    assert world.prober.due() is None
    world.later(3_600)
    assert world.prober.due() is not None


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"join": ()}, "which swarm"),
        ({"join": ("here",)}, "is no peer address"),
        ({"prefix": "a/#"}, "prefix"),
        ({"mqtt": "mqtt://x", "embedded_broker": True}, "choose one"),
        ({"probe_every": -1.0}, "negative"),
    ],
)
def test_misuse_is_told_before_anything_slow(options: dict[str, object], says: str) -> None:
    usual: dict[str, object] = {"join": (JOIN,)}
    with pytest.raises(ConfigError, match=says):
        check(Health(**{**usual, **options}))  # type: ignore[arg-type]
