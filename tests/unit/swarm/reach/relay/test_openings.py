"""Openings: what is one comes back whole, and everything else is refused by name."""

from __future__ import annotations

import secrets
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.base.errors import RemoteProtocolError
from swarm.base.ids import PeerId
from swarm.directory.identity import Identity
from swarm.reach.relay.openings import Opening, Verb, check_presence, parse_opening, prove_presence

ME, OTHER = Identity.ephemeral(), Identity.ephemeral()
PEER, TOKEN = "QmYwAPJzv5CZsnA625s3Xf2nemtYgPpHdWEz79ojWKGrQD", "0f" * 16
"""Both stand in names of tests, which must be the same in every process."""


@pytest.mark.parametrize(
    ("line", "opening"),
    [
        (f"HERE {PEER}\n", Opening(Verb.HERE, PeerId(PEER))),
        (f"CONNECT {PEER}:1 HTTP/1.1\r\n", Opening(Verb.CONNECT, PeerId(PEER))),
        (f"TAKE {TOKEN}\n", Opening(Verb.TAKE, token=TOKEN)),
        ("SEEN\n", Opening(Verb.SEEN)),
        (
            f"PUNCH {PEER} 192.0.2.1:5,[2001:db8::1]:6\n",
            Opening(Verb.PUNCH, PeerId(PEER), addresses=("192.0.2.1:5", "[2001:db8::1]:6")),
        ),
        (f"CALL {PEER} 192.0.2.1:5 {TOKEN}\n", Opening(Verb.CALL, PeerId(PEER), TOKEN, ("192.0.2.1:5",))),
        ("LOAD", Opening(Verb.LOAD)),
        (f"WHO {TOKEN}\n", Opening(Verb.WHO, nonce=bytes([15] * 16))),
    ],
)
def test_an_opening_is_read(line: str, opening: Opening) -> None:
    assert parse_opening(line.encode()) == opening


@pytest.mark.parametrize(
    "line",
    [
        "",
        "\n",
        "here x\n",
        "HERE Qm\n",
        f"HERE {PEER} {PEER}\n",
        f"HERE  {PEER}\n",
        f"CONNECT {PEER}:2 HTTP/1.1\n",
        f"CONNECT {PEER}:1 HTTP/2\n",
        "CONNECT example.org:443 HTTP/1.1\n",
        f"TAKE {TOKEN.upper()}\n",
        f"TAKE {TOKEN}00\n",
        f"PUNCH {PEER} localhost:5\n",
        f"PUNCH {PEER} 192.0.2.1:0\n",
        f"PUNCH {PEER} {','.join(['192.0.2.1:5'] * 7)}\n",
        f"CALL {PEER} 192.0.2.1:5,192.0.2.2:5 {TOKEN}\n",
        f"HERE {PEER}\x1b[2J\n",
        "GET / HTTP/1.1\r\n",
        "WHO\n",
        f"WHO {TOKEN.upper()}\n",
        f"WHO {TOKEN}00\n",
        f"SEEN{' ' * 600}\n",
    ],
)
def test_no_opening_is_refused(line: str) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        parse_opening(line.encode())
    assert "\n" not in str(caught.value)


@given(st.binary(max_size=600))
def test_no_bytes_make_it_raise_anything_else(line: bytes) -> None:
    with suppress(RemoteProtocolError):
        parse_opening(line)


def test_a_proof_of_presence_is_good_for_one_machine_one_relay_and_one_nonce() -> None:
    nonce = secrets.token_bytes(16)
    proof = prove_presence(ME, OTHER.peer_id, nonce)
    assert check_presence(ME.peer_id, OTHER.peer_id, nonce, *proof)
    assert not check_presence(OTHER.peer_id, OTHER.peer_id, nonce, *proof)
    assert not check_presence(ME.peer_id, ME.peer_id, nonce, *proof)
    assert not check_presence(ME.peer_id, OTHER.peer_id, secrets.token_bytes(16), *proof)
    assert not check_presence(ME.peer_id, OTHER.peer_id, nonce, "no base 64", proof[1])
