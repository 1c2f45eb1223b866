"""Who gets a slot on the page: strangers who make up models, and peers, do not crowd out those that are."""

from __future__ import annotations

from dataclasses import replace

from swarm.base.ids import ModelIdentity, PeerId
from swarm.base.layers import Span
from swarm.directory.node_record import NodeRecord, NodeState
from swarm.directory.registry import RECORD_TTL_S
from swarm.health.state.model import MAX_NODES, Knowledge
from swarm.health.state.model_slots import MAX_MODELS, NEW_PER_LOOK, PROVED_S, TRIAL_S, ModelSlots, SlotStanding
from swarm.status.guard import AcceptedMessage, TelemetryGuard
from swarm.status.messages import ServedModel, seal_body
from tests.telemetry_messages import FINGERPRINT, NOW, identity, status, topic

A = PeerId("QmSomebodyAAAAAAAA")
REAL = FINGERPRINT


def made_up(number: int) -> str:
    return f"{number:064x}"


def record(fingerprint: str, peer: PeerId = A, name: str = "real") -> NodeRecord:
    return NodeRecord(
        peer=peer,
        model=ModelIdentity(name, fingerprint, "b2" * 16, "c3" * 16, "d4" * 16, 12),
        span=Span(0, 12),
        address="192.0.2.7:5000",
        state=NodeState.SERVING,
        numeric_class="cpu-float32",
        version="0.2.0",
        name=None,
        sweep_ms=(),
        kv_tokens_free=1,
        kv_tokens_total=2,
        sequence=1,
        expires_at=NOW + RECORD_TTL_S,
    )


def tell(knowledge: Knowledge, fingerprint: str, peer: str = "QmStranger", at: float = NOW) -> None:
    body = status(at=at, model=ServedModel("made up", fingerprint, 12))
    knowledge.apply_telemetry(PeerId(peer), fingerprint, body, at)


def crowd(knowledge: Knowledge, count: int = 10 * MAX_MODELS, first: int = 0) -> None:
    for number in range(first, first + count):
        tell(knowledge, made_up(number))


def test_made_up_telemetry_fills_what_is_free_and_no_more() -> None:
    knowledge = Knowledge()
    crowd(knowledge)
    assert len(knowledge.nodes(NOW)) == MAX_MODELS
    for number in range(5):
        knowledge.apply_records(REAL[:-1] + str(number), [record(REAL[:-1] + str(number))], NOW)
    crowd(knowledge, first=5_000)
    shown = knowledge.nodes(NOW)
    assert len(shown) == MAX_MODELS
    assert all(REAL[:-1] + str(number) in shown for number in range(5))
    assert knowledge.turned_away > 0


def test_a_real_model_keeps_its_slot_whatever_strangers_do() -> None:
    knowledge = Knowledge()
    knowledge.apply_records(REAL, [record(REAL)], NOW)
    knowledge.slots.prove(REAL, NOW)
    for number in range(20 * MAX_MODELS):
        tell(knowledge, made_up(number))
        knowledge.apply_records(
            made_up(number), [record(made_up(number), PeerId(f"QmSybil{number}"))], NOW + 10 * number
        )
    assert REAL in knowledge.nodes(NOW)
    assert len(knowledge.nodes(NOW)) == MAX_MODELS


def test_listed_ones_that_nobody_proved_take_turns() -> None:
    slots = ModelSlots()
    for number in range(MAX_MODELS):
        slots.enter(made_up(number), True, NOW + number)
    assert slots.enter(REAL, True, NOW + 100) == (False, None)
    assert slots.enter(REAL, True, NOW + TRIAL_S) == (True, made_up(0))
    assert slots.enter(made_up(0), False, NOW + 3 * TRIAL_S) == (False, None), "telemetry alone is less"
    slots.prove(made_up(1), NOW)
    assert slots.enter("ff" * 32, True, NOW + 3 * TRIAL_S) == (True, made_up(2)), "a proved one never gives way"


def test_proved_ones_do_not_take_turns() -> None:
    slots = ModelSlots()
    for number in range(MAX_MODELS):
        slots.enter(made_up(number), True, NOW)
        slots.prove(made_up(number), NOW)
    slots.prove(REAL, NOW)
    assert slots.enter(REAL, True, NOW + 2 * TRIAL_S) == (False, None)


def test_what_was_proved_outlives_a_restart_and_not_for_ever() -> None:
    slots, again = ModelSlots(), ModelSlots()
    slots.prove(REAL, NOW)
    for number in range(MAX_MODELS):
        again.enter(made_up(number), True, NOW)
    again.load(slots.dump() | {"bad": None, 7: 7.0})
    assert again.enter(REAL, False, NOW + 1) == (True, made_up(0))
    assert again.standing(REAL) is SlotStanding.PROVED
    late = ModelSlots()
    late.load(slots.dump())
    late.enter(REAL, False, NOW + PROVED_S)
    assert late.standing(REAL) is SlotStanding.REPORTED
    late.load(["nonsense"])


def test_looks_at_the_directory_reach_everybody_in_turn() -> None:
    slots = ModelSlots()
    real = record(REAL).model
    strangers = [replace(real, fingerprint=made_up(number), name=f"!{number}") for number in range(3 * MAX_MODELS)]
    models = [*strangers, real]
    assert len(slots.choose(models, 0)) == MAX_MODELS
    for model in strangers[:MAX_MODELS]:
        slots.enter(model.fingerprint, True, NOW)
    seen = [slots.choose(models, turn) for turn in range(len(models))]
    assert all(len(one) == MAX_MODELS + NEW_PER_LOOK for one in seen)
    assert {model.fingerprint for one in seen for model in one} == {model.fingerprint for model in models}
    slots.prove(REAL, NOW)
    assert slots.choose(models, 0)[0] == real


def test_nodes_that_the_dht_lists_take_the_place_of_strangers() -> None:
    knowledge = Knowledge()
    for number in range(MAX_NODES):
        tell(knowledge, REAL, f"QmSybil{number}")
    tell(knowledge, REAL, "QmOneMore")
    assert knowledge.turned_away == 1
    knowledge.apply_records(REAL, [record(REAL)], NOW)
    model, nodes = knowledge.nodes(NOW)[REAL]
    assert model.name == "real", "what the DHT lists says what the model is, however many say otherwise"
    assert [node.peer for node in nodes] == [A]


def test_a_model_without_nodes_leaves_its_slot() -> None:
    knowledge = Knowledge()
    crowd(knowledge, MAX_MODELS)
    knowledge.forget(NOW + 1_000)
    knowledge.apply_telemetry(A, REAL, status(at=NOW + 1_000), NOW + 1_000)
    assert list(knowledge.nodes(NOW + 1_000)) == [REAL]


def test_the_guard_lets_in_whom_the_dht_lists_although_strangers_fill_it() -> None:
    listed = {identity(2).peer_id}
    guard = TelemetryGuard(
        max_peers=2, is_listed=lambda fingerprint, peer: fingerprint == FINGERPRINT and peer in listed
    )

    def hear(who: int, at: float) -> bool:
        body = status(at=at)
        where = topic(body, who)
        return isinstance(guard.accept(where, seal_body(body, where, identity(who)), False, at), AcceptedMessage)

    assert [hear(who, NOW + who) for who in (0, 1)] == [True, True]
    assert hear(3, NOW + 3) is False
    assert hear(2, NOW + 4) is True
    assert len(guard) == 2
    assert hear(3, NOW + 5) is False
    listed |= {identity(1).peer_id, identity(3).peer_id}
    assert hear(3, NOW + 6) is False, "nobody is put out who is listed himself"
