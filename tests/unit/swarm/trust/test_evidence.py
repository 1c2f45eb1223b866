"""Files of evidence: a whole one is read and covers its text; an altered one is refused, with the part at fault."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgpack
import pytest

from swarm.base.layers import Span
from swarm.protocol.authority import SessionKey
from swarm.protocol.messages import Codec, Sampling
from swarm.trust.commitment import Committed, leaf, placed, rules_digest
from swarm.trust.evidence import EvidenceError, StreamLeaves, TextEvidence, load, spans_in, verify_signatures
from swarm.trust.settlement import SettledStream, Settlement, SettlingKey
from tests.sample_evidence import ANSWER, PROMPT, SAMPLING, SignedText, identity, peer


@pytest.fixture(scope="module")
def signed() -> SignedText:
    return SignedText()


@pytest.fixture(scope="module")
def whole(signed: SignedText) -> TextEvidence:
    return signed.evidence


def test_a_whole_file_is_read_and_covers_its_text(whole: TextEvidence) -> None:
    found = load(whole.dump())
    assert found == whole
    checked = verify_signatures(found)
    assert checked.signed_picks == len(ANSWER)
    assert not any((checked.unsigned_picks, checked.unsigned, checked.differing, checked.apart))
    assert checked.path == (0, 1, 2, 3, 5, 6)
    assert checked.sampling == SAMPLING
    assert [one.peer for one in checked.settlements] == [peer(0), peer(1), peer(2)]


def test_without_rows_it_covers_the_same(whole: TextEvidence) -> None:
    small = replace(whole, leaves=(), rows=())
    assert verify_signatures(load(small.dump())) == verify_signatures(whole)
    assert len(small.dump()) < len(whole.dump())


def test_each_span_can_be_computed_again_from_a_file_with_rows(signed: SignedText, whole: TextEvidence) -> None:
    first, second, tail = spans_in(whole, verify_signatures(whole))
    assert (first.tokens, first.entering, first.missing) == ((*PROMPT, 4, 5, 6), None, "")
    assert first.leaving is not None
    assert second.entering is not None
    assert second.entering.data == first.leaving.data == signed.rows[0].data
    assert tail.entering is not None
    assert second.leaving is not None
    assert tail.entering.data == second.leaving.data == signed.rows[1].data
    assert tail.leaving is None
    assert tail.picks == ((2, 4), (3, 5), (4, 6), (5, 7))


def test_without_rows_a_file_says_what_it_lacks(whole: TextEvidence) -> None:
    small = replace(whole, leaves=(), rows=())
    lacking = [span.missing for span in spans_in(small, verify_signatures(small))]
    assert lacking[0] == "rows that left them were not kept"
    assert "entered" in lacking[2]


def test_a_machine_that_did_not_sign_is_named(whole: TextEvidence) -> None:
    """A hop that died leaves a gap, and everything else stays."""
    without = replace(whole, settlements=(whole.settlements[0], whole.settlements[2]), rows=(), leaves=())
    without = replace(without, replies=(replace(whole.replies[0], settlement=1),))
    checked = verify_signatures(without)
    assert checked.unsigned == ((0, peer(1)),)
    assert checked.signed_picks == len(ANSWER)


def test_picks_of_a_tail_that_did_not_sign_are_not_covered(whole: TextEvidence) -> None:
    checked = verify_signatures(replace(whole, settlements=whole.settlements[:2], replies=()))
    assert checked.signed_picks == 0
    assert checked.unsigned_picks == tuple(range(len(PROMPT), len(PROMPT) + len(ANSWER)))


def test_two_ends_that_signed_different_heads_blame_their_link(signed: SignedText, whole: TextEvidence) -> None:
    """Both signatures are right, so the file is too; which end is wrong, nothing tells."""
    (stream,) = signed.settlements[1].received
    checked = verify_signatures(signed.with_settlement(1, received=(replace(stream, head=bytes(32)),)))
    (link,) = checked.differing
    assert (link.since, link.sender, link.receiver) == (0, peer(0), peer(1))
    assert verify_signatures(whole).differing == ()


def test_two_ends_that_signed_different_numbers_say_nothing(signed: SignedText) -> None:
    (stream,) = signed.settlements[1].received
    checked = verify_signatures(signed.with_settlement(1, received=(replace(stream, count=2),)))
    assert (checked.differing, len(checked.apart)) == ((), 1)


Alter = Callable[[SignedText, TextEvidence], TextEvidence]


def _resealed(place: int, change: Callable[[list[Any]], None]) -> Alter:
    """Change the body of a settlement without its machine."""

    def alter(_: SignedText, whole: TextEvidence) -> TextEvidence:
        parts = msgpack.unpackb(whole.settlements[place])
        body = msgpack.unpackb(parts[3])
        change(body)
        parts[3] = msgpack.packb(body)
        sealed = list(whole.settlements)
        sealed[place] = msgpack.packb(parts)
        return replace(whole, settlements=tuple(sealed))

    return alter


def _set(place: int, value: Any) -> Callable[[list[Any]], None]:  # noqa: ANN401
    def change(body: list[Any]) -> None:
        body[place] = value

    return change


def _told(**changes: Any) -> Alter:  # noqa: ANN401
    """The client signs another word."""
    return lambda signed, _: signed.signed(replace(signed.told, **changes))


def _tells(place: int, **changes: Any) -> Alter:  # noqa: ANN401
    def alter(signed: SignedText, _: TextEvidence) -> TextEvidence:
        tells = list(signed.told.tells)
        tells[place] = replace(tells[place], **changes)
        return signed.signed(replace(signed.told, tells=tuple(tells)))

    return alter


def _stream(**changes: Any) -> Alter:  # noqa: ANN401
    def alter(signed: SignedText, _: TextEvidence) -> TextEvidence:
        return signed.signed(replace(signed.told, streams=(replace(signed.told.streams[0], **changes),)))

    return alter


def _messages(name: str, part: int, change: Callable[[list[Committed]], object]) -> Alter:
    def alter(_: SignedText, whole: TextEvidence) -> TextEvidence:
        parts: list[StreamLeaves] = list(getattr(whole, name))
        messages = list(parts[part].messages)
        change(messages)
        parts[part] = replace(parts[part], messages=tuple(messages))
        return replace(whole, **{name: tuple(parts)})  # type: ignore[arg-type]

    return alter


def _swap_leaves(messages: list[Committed]) -> None:
    leaves = messages[1].leaves
    messages[1] = replace(messages[1], leaves=leaves[32:64] + leaves[:32] + leaves[64:])


def _swap_nodes(messages: list[Committed]) -> None:
    nodes = messages[1].nodes
    messages[1] = replace(messages[1], nodes=nodes[8:16] + nodes[:8] + nodes[16:])


def _other_pick(messages: list[Committed]) -> None:
    picks = messages[1].picks
    messages[1] = replace(messages[1], picks=(77).to_bytes(4) + picks[4:])


def _other_pick_with_its_leaf(signed: SignedText, whole: TextEvidence) -> TextEvidence:
    """A pick and its leaf agree, and the tail's signature is of another one."""
    message = signed.messages[2][1]
    state = _state(signed)
    places = placed(state, [message.ids[0]])
    assert places is not None
    made = leaf(signed.key.session, places[0], b"p", message.final[:32] + (77).to_bytes(4))
    other = replace(message, picks=(77).to_bytes(4) + message.picks[4:], leaves=made + message.leaves[32:])
    messages = (signed.messages[2][0], other, signed.messages[2][2])
    return replace(whole, replies=(replace(whole.replies[0], messages=messages),))


def _state(signed: SignedText) -> Any:  # noqa: ANN401
    from swarm.protocol.session import Limits, SessionState

    state = SessionState(Limits(100, 64, 8, 64))
    for tell in signed.told.tells:
        state.apply(tell.sweep)
    return state


def _rows(**changes: Any) -> Alter:  # noqa: ANN401
    return lambda _, whole: replace(whole, rows=(replace(whole.rows[0], **changes), whole.rows[1]))


def _flipped(data: bytes) -> bytes:
    return data[:5] + bytes([data[5] ^ 1]) + data[6:]


def _from_another(change: Callable[[TextEvidence, TextEvidence], TextEvidence]) -> Alter:
    return lambda _, whole: change(whole, SignedText().evidence)


def _foreign_voucher(_: SignedText, whole: TextEvidence) -> TextEvidence:
    """Another key signs in the machine's name."""
    parts = msgpack.unpackb(whole.settlements[1])
    body = msgpack.unpackb(parts[3])
    forged = SettlingKey().seal(_settlement(body), identity(7))
    stolen = [parts[0], *msgpack.unpackb(forged)[1:]]
    sealed = (whole.settlements[0], msgpack.packb(stolen), whole.settlements[2])
    return replace(whole, settlements=sealed)


def _settlement(body: list[Any]) -> Settlement:
    from swarm.trust.settlement import FORM

    return FORM.decode(body)


def _other_seed(signed: SignedText, _: TextEvidence) -> TextEvidence:
    """The client names another seed, and claims that its tail picked by that one."""
    other = replace(SAMPLING, seed=6)
    tells = (replace(signed.told.tells[0], sampling=other), *signed.told.tells[1:])
    made = signed.signed(replace(signed.told, tells=tells))
    messages = tuple(replace(one, rules=rules_digest(other)) for one in made.replies[0].messages)
    return replace(made, replies=(replace(made.replies[0], messages=messages),))


def _settles(place: int, **changes: Any) -> Alter:  # noqa: ANN401
    """A machine signs something else."""
    return lambda signed, _: signed.with_settlement(place, **changes)


ALTERED: dict[str, tuple[Alter, str]] = {
    "the client's signature": (lambda _, whole: replace(whole, signature=_flipped(whole.signature)), "signature"),
    "text that is not what was signed": (
        lambda _, whole: replace(whole, told=replace(whole.told, prompt_tokens=2)),
        "text",
    ),
    "another session's word": (_from_another(lambda one, two: replace(one, told=two.told, text=two.text)), "signature"),
    "another session's key": (_told(session_key=SessionKey.fresh().public_key), "signature"),
    "a token of the prompt": (_tells(0, tokens=(1, 8)), "tells"),
    "a token of a tree": (_tells(1, tokens=(3, 4, 8, 5)), "tells"),
    "a parent": (_tells(1, parents=(0, 3, 4, 4)), "tells"),
    "a seed": (_tells(0, sampling=Sampling(seed=6, temperature=0.7)), "replies"),
    "a temperature": (_tells(0, sampling=Sampling(seed=5, temperature=0.8)), "replies"),
    "a tell that is missing": (
        lambda signed, _: signed.signed(replace(signed.told, tells=signed.told.tells[:2])),
        "streams",
    ),
    "a tell that is played again": (
        lambda signed, _: signed.signed(replace(signed.told, tells=(*signed.told.tells, signed.told.tells[2]))),
        "tells",
    ),
    "a stream that ends early": (
        lambda signed, _: signed.signed(
            replace(signed.told, streams=(replace(signed.told.streams[0], messages=((1, False), (2, False))),))
        ),
        "tells",
    ),
    "a sweep that is called a snapshot": (
        lambda signed, _: signed.signed(
            replace(
                signed.told, streams=(replace(signed.told.streams[0], messages=((1, False), (2, True), (3, False))),)
            )
        ),
        "tells",
    ),
    "another generation's stream": (
        lambda signed, _: signed.signed(replace(signed.told, streams=(replace(signed.told.streams[0], since=1),))),
        "tells",
    ),
    "tokens that were adopted": (_told(adopted=(1, 2)), "tells"),
    "a token of the answer": (_told(tokens=(*PROMPT, 4, 5, 6, 8)), "text"),
    "a token of the answer that was committed": (_told(tokens=(*PROMPT, 4, 8, 6, 7)), "text"),
    "a token of the prompt in the text": (_told(tokens=(1, 2, 8, *ANSWER)), "text"),
    "a seed, and by what its tail picked": (_other_seed, "replies"),
    "an answer that goes on": (_told(tokens=(*PROMPT, *ANSWER, 8)), "text"),
    "a prompt that is longer than its text": (_told(prompt_tokens=8), "text"),
    "another model": (_told(fingerprint="e" * 64), "fingerprint"),
    "a route without a machine": (
        lambda signed, _: signed.signed(
            replace(signed.told, routes=(replace(signed.told.routes[0], hops=signed.told.routes[0].hops[:2]),))
        ),
        "route",
    ),
    "a route of another generation": (
        lambda signed, _: signed.signed(replace(signed.told, routes=(replace(signed.told.routes[0], generation=1),))),
        "route",
    ),
    "a settlement's session": (_resealed(1, _set(0, bytes(16))), "settlement"),
    "a settlement's machine": (_resealed(1, _set(1, peer(0))), "settlement"),
    "a settlement's model": (_resealed(1, _set(2, "e" * 64)), "settlement"),
    "a settlement's class": (_resealed(1, _set(3, "cuda-bfloat16")), "settlement"),
    "a settlement's layers": (_resealed(1, _set(4, [4, 12])), "settlement"),
    "a settlement's codec": (_resealed(1, _set(6, "bf16")), "settlement"),
    "a settlement's generation": (_resealed(1, _set(7, 1)), "settlement"),
    "a settlement's adopted tokens": (_resealed(1, _set(8, 64)), "settlement"),
    "a settlement's streams": (_resealed(1, _set(9, [])), "settlement"),
    "a settlement of another session": (
        _from_another(lambda one, two: replace(one, settlements=(*one.settlements[:2], two.settlements[2]))),
        "session",
    ),
    "a settlement twice": (
        lambda _, whole: replace(whole, settlements=(*whole.settlements, whole.settlements[0])),
        "settlements",
    ),
    "settlements in another order": (
        lambda _, whole: replace(whole, settlements=(whole.settlements[2], *whole.settlements[:2])),
        "replies",
    ),
    "a key that nobody vouched for": (_foreign_voucher, "voucher"),
    "a settlement cut short": (
        lambda _, whole: replace(whole, settlements=(whole.settlements[0][:-1], *whole.settlements[1:])),
        "sealed",
    ),
    "a machine that signed another class": (_settles(1, numeric_class="cpu-bfloat16"), "numeric_class"),
    "a machine that signed another codec": (_settles(1, codec=Codec.BF16), "codec"),
    "a machine that signed other layers": (_settles(1, span=Span(4, 9)), "route"),
    "a machine that signed a later generation": (_settles(1, generation=3), "route"),
    "a first machine that received nothing told": (
        lambda signed, _: signed.with_settlement(
            0, received=(replace(signed.settlements[0].received[0], head=bytes(32)),)
        ),
        "tells",
    ),
    "a first machine that was told by another": (
        lambda signed, _: signed.with_settlement(0, received=(SettledStream(0, peer(1), 0, 0, bytes(32)),)),
        "tells",
    ),
    "a pick": (_messages("replies", 0, _other_pick), "replies"),
    "a pick and its leaf": (_other_pick_with_its_leaf, "replies"),
    "a final row's hash": (
        _messages("replies", 0, lambda all_: all_.__setitem__(1, replace(all_[1], final=_flipped(all_[1].final)))),
        "replies",
    ),
    "a reply that is missing": (_messages("replies", 0, lambda all_: all_.pop(2)), "replies"),
    "replies in another order": (_messages("replies", 0, lambda all_: all_.insert(0, all_.pop(2))), "replies"),
    "a tail's replies that are missing": (lambda _, whole: replace(whole, replies=()), "replies"),
    "replies of a machine that picks nothing": (
        lambda _, whole: replace(whole, replies=(*whole.replies, whole.leaves[0])),
        "replies",
    ),
    "leaves in another order": (_messages("leaves", 0, _swap_leaves), "leaves"),
    "nodes in another order": (_messages("leaves", 0, _swap_nodes), "leaves"),
    "a message of leaves that is missing": (_messages("leaves", 1, lambda all_: all_.pop(0)), "leaves"),
    "a message's sequence": (
        _messages("leaves", 1, lambda all_: all_.__setitem__(0, replace(all_[0], sequence=9))),
        "leaves",
    ),
    "leaves of the neighbour": (
        lambda _, whole: replace(
            whole, leaves=(replace(whole.leaves[0], settlement=1), replace(whole.leaves[1], settlement=0))
        ),
        "leaves",
    ),
    "leaves of a stream that nobody has": (
        lambda _, whole: replace(whole, leaves=(replace(whole.leaves[0], stream=4),)),
        "leaves",
    ),
    "one bit of a row": (lambda _, whole: _rows(data=_flipped(whole.rows[0].data))(_, whole), "rows"),
    "a row under another node": (_rows(nodes=(0, 1, 2, 3, 4, 6)), "rows"),
    "a row of a node that nobody sent": (_rows(nodes=(0, 1, 2, 3, 5, 60)), "rows"),
    "rows of the neighbour": (lambda _, whole: replace(whole, rows=(replace(whole.rows[0], settlement=1),)), "rows"),
    "rows of another width": (_rows(width=4), "rows"),
    "rows without leaves": (lambda _, whole: replace(whole, leaves=()), "rows"),
}


@pytest.mark.parametrize("name", list(ALTERED))
def test_an_altered_file_is_refused(name: str, signed: SignedText, whole: TextEvidence) -> None:
    alter, at_fault = ALTERED[name]
    altered = alter(signed, whole)
    assert altered != whole
    with pytest.raises(EvidenceError) as refused:
        verify_signatures(load(altered.dump()) if name != "text that is not what was signed" else altered)
    assert refused.value.field == at_fault


@pytest.mark.parametrize("size", [0, 10, 100, 1_000])
def test_a_file_that_is_cut_short_is_refused(size: int, whole: TextEvidence) -> None:
    data = whole.dump()
    with pytest.raises(EvidenceError):
        load(data[:size])


def test_each_single_byte_matters(whole: TextEvidence) -> None:
    """No byte of a file can be changed: it is read otherwise and refused, or not read at all."""
    data = whole.dump()
    taken = []
    for place in range(0, len(data), 7):
        altered = data[:place] + bytes([data[place] ^ 0x41]) + data[place + 1 :]
        try:
            verify_signatures(load(altered))
        except EvidenceError:
            continue
        taken.append(place)
    assert taken == []


def test_absurd_sizes_are_refused_before_anything_is_checked(whole: TextEvidence) -> None:
    (message, *rest) = whole.replies[0].messages
    torn = replace(message, nodes=message.nodes + bytes(8))
    with pytest.raises(EvidenceError):
        load(replace(whole, replies=(replace(whole.replies[0], messages=(torn, *rest)),)).dump())
