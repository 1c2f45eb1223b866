"""What a newcomer takes from strangers: a checkpoint's template and tokenizer, what the network announces, invites."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Final

import base58
import msgpack
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from zeroconf.asyncio import AsyncServiceInfo, AsyncZeroconf

from benchmarks.redteam.attack import Fight, Kind, attack
from benchmarks.redteam.attacks.api import CHAT
from benchmarks.redteam.fuzzing.mutations import mutate_bytes, mutate_packed
from benchmarks.redteam.local_api import local_api
from client.base.target import load_target
from client.dialogue.rendering import RENDERING
from client.tools.demo.programs import start_program
from swarm.base.errors import ConfigError, SwarmError
from swarm.base.ids import SwarmId
from swarm.base.plain_text import plain_line
from swarm.demo import TARGET
from swarm.directory.dht.registry import DhtConfig, DhtRegistry
from swarm.directory.identity import Identity
from swarm.directory.joining.invite import Invite, read_invite, seal_invite
from swarm.directory.joining.lan import SERVICE, LanSwarm, browse, txt_of
from swarm.directory.joining.remembered import RememberedSwarm, SwarmMemory, peer_of
from swarm.directory.joining.resolve import SwarmFinder, SwarmRequest, User

LOOPBACK: Final = ["127.0.0.1"]
SLACK_S: Final = 2.0
"""Other programs run too."""
HOUR_S: Final = 3_600
NEWCOMER_S: Final = 60.0
"""In so long a newcomer knows whether it is in."""
NOBODY: Final = User(word=lambda: "")
"""A user who cannot be asked."""


# Templates


@asynccontextmanager
async def checkpoint(**files: str | bytes) -> AsyncIterator[Path]:
    """A copy of the honest model's folder in which some files are others."""
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / TARGET.name
        shutil.copytree(TARGET, made)
        for name, content in files.items():
            path = made / {"template": "chat_template.jinja", "tokenizer": "tokenizer.json"}[name]
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        yield made


async def ask_with(fight: Fight, template: str, count: int = 2) -> None:
    """Conversations over a hostile checkpoint, while the API's own page is looked at and an honest caller asks."""
    async with checkpoint(template=template) as folder, local_api(fight, folder) as api:
        for _ in range(count):
            async with asyncio.TaskGroup() as group:
                asking = group.create_task(api.ask("/v1/chat/completions", CHAT))
                still_s = await api.stands_still_s(asking)
            reason = asking.result().reason
            fight.note(f"{asking.result().status}: {reason[:90]}; the API's page took {still_s:.1f} s at most")
            if still_s > RENDERING.wall_s + SLACK_S:
                fight.breach(f"the API stands still for {still_s:.1f} s")
            if not reason or plain_line(reason) != reason:
                fight.breach(f"the error is no line: {reason[:90]!r}")
        await fight.stay()


@attack("template-loops", Kind.TEMPLATES, lasts_s=15.0)
async def template_loops(fight: Fight) -> None:
    """A checkpoint whose chat template never ends, used beside honest callers."""
    inner = "{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}"
    await ask_with(fight, "{% for a in range(99999) %}" + inner + "{% endfor %}")


@attack("template-memory", Kind.TEMPLATES, lasts_s=15.0)
async def template_memory(fight: Fight) -> None:
    """A checkpoint whose chat template makes a text of more memory than there is."""
    await ask_with(
        fight, "{% set n = namespace(a='aaaaaaaa') %}{% for b in range(60) %}{% set n.a = n.a ~ n.a %}{% endfor %}"
    )


@attack("template-escapes", Kind.TEMPLATES, lasts_s=15.0)
async def template_escapes(fight: Fight) -> None:
    """A checkpoint whose chat template refuses with terminal escapes, line ends and a megabyte of text."""
    await ask_with(
        fight, "{{ raise_exception('\\x1b]0;a\\x07\\u202e\\r' ~ 'a' * 1000000 ~ '\\nclient: all is well') }}"
    )


@attack("hostile-tokenizers", Kind.TEMPLATES)
async def hostile_tokenizers(fight: Fight) -> None:
    """Checkpoints whose tokenizers nest too deep, lie about their kind, or match for ever, read by a client."""
    honest = json.loads((TARGET / "tokenizer.json").read_text())
    slow = {"type": "Split", "pattern": {"Regex": "(a+)+(a+)+$"}, "behavior": "Isolated", "invert": False}
    added = {
        "content": "a",
        "special": True,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": True,
    }
    hostile: dict[str, object] = {
        "nothing": "",
        "depth": "[" * 100_000,
        "a list": [],
        "no model": honest | {"model": {}},
        "another kind": honest | {"model": honest["model"] | {"type": "Unigram"}},
        "ids below zero": honest | {"model": honest["model"] | {"vocab": {"a": -1}}},
        "ids of 64 bits": honest | {"added_tokens": [added | {"id": 2**63}]},
        "many ids": honest | {"added_tokens": [added | {"id": 2**32 - 1}]},
        "a slow pattern": honest | {"pre_tokenizer": slow},
        "a long pattern": honest | {"pre_tokenizer": slow | {"pattern": {"Regex": "(" * 50_000 + ")" * 50_000}}},
    }
    await fight.go()
    for name, content in hostile.items():
        text = content if isinstance(content, str) else json.dumps(content)
        async with checkpoint(tokenizer=text) as folder:
            fight.tally.acts += 1
            began = time.monotonic()
            try:
                await asyncio.to_thread(load_target, folder)
                fight.note(f"a tokenizer with {name} is read in {time.monotonic() - began:.1f} s")
            except SwarmError as error:
                fight.tally.refused += 1
                if "\n" in str(error):
                    fight.breach(f"the error of a tokenizer with {name} is no line: {str(error)[:200]!r}")
            except asyncio.CancelledError:
                raise
            except BaseException as error:  # noqa: BLE001 (a reader in Rust panics with one that is no Exception)
                fight.breach(f"a tokenizer with {name} ends in {type(error).__name__}: {str(error)[:100]}")


# What machines of the local network announce


@asynccontextmanager
async def announced(swarms: Sequence[dict[str, str]]) -> AsyncIterator[None]:
    """Services that a stranger announces, here on loopback."""
    mdns = AsyncZeroconf(interfaces=LOOPBACK)
    try:
        for number, txt in enumerate(swarms):
            info = AsyncServiceInfo(SERVICE, f"r{number}.{SERVICE}", port=1, properties=txt, parsed_addresses=LOOPBACK)
            await mdns.async_register_service(info, cooperating_responders=True)
        yield
    finally:
        await mdns.async_close()


async def fakes(fight: Fight, *, answers: bool) -> list[LanSwarm]:
    """Announcements of the bootstrap peer's id, and of 40 others, at an address of the attacker's."""

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if answers:
            writer.write(b"\x13/multistream/1.0.0\n\x0b/tls/1.0.0\n" + b"\x16\x03\x03" * 500)
        with suppress(OSError):
            await reader.read()

    server = await fight.kit.hold(await asyncio.start_server(listen, "127.0.0.1", 0))
    port = server.sockets[0].getsockname()[1]
    model, digits = fight.ground.model, fight.ground.model.fingerprint[:12]
    peers = [peer_of(fight.ground.join), *(who.peer_id for who in fight.kit.identities(40))]
    places = [f"/ip4/127.0.0.1/tcp/{port}/p2p/{peer}" for peer in peers]
    return [
        LanSwarm((place,), model.name, digits, swarm=SwarmId(sha256(place.encode()).digest()[:16])) for place in places
    ]


async def browse_beside(fight: Fight, swarms: Sequence[dict[str, str]], honest: LanSwarm | None) -> None:
    """A newcomer listens again and again; only the honest machine counts."""
    await fight.go()
    async with announced([*([] if honest is None else [txt_of(honest)]), *swarms]):
        while True:
            fight.tally.acts += 1
            began = time.monotonic()
            found = await browse(LOOPBACK)
            if (took_s := time.monotonic() - began) > 10.0:
                fight.breach(f"a newcomer listens for {took_s:.0f} s")
            for one in found:
                if one.join != (fight.ground.join,):
                    fight.breach(f"a newcomer is offered {one.join[0]}, which proved nothing")
            if honest is not None:
                fight.note("the honest machine is heard" if honest in found else "the honest machine is not heard")


def honest_machine(fight: Fight) -> LanSwarm:
    """What the bootstrap peer would announce."""
    return LanSwarm((fight.ground.join,), swarm=SwarmId(bytes(16)))


@attack("lan-fakes", Kind.LAN, lasts_s=8.0)
async def lan_fakes(fight: Fight) -> None:
    """Eight machines of the local network announce an honest peer's id, and others', at an address of their own."""
    made = await fakes(fight, answers=True)
    beside = replace(
        made[0], join=(*made[0].join, fight.ground.join)
    )  # the honest address proves nothing for the first
    await browse_beside(fight, [txt_of(one) for one in (beside, *made[:7])], honest_machine(fight))


@attack("lan-flood", Kind.LAN, lasts_s=12.0)
async def lan_flood(fight: Fight) -> None:
    """41 announcements in the local network, at an address that takes connections and says nothing."""
    await browse_beside(fight, [txt_of(one) for one in await fakes(fight, answers=False)], None)


@attack("lan-odd-texts", Kind.LAN, lasts_s=8.0)
async def lan_odd_texts(fight: Fight) -> None:
    """Twelve announcements in the local network with mutated texts; an honest one beside them."""
    rng = random.Random(1)
    made = []
    for one in (await fakes(fight, answers=True))[:12]:
        txt = txt_of(one)
        key = rng.choice(list(txt))
        made.append(txt | {key: mutate_bytes(rng, txt[key].encode())[:200].decode("latin-1")})
    await browse_beside(fight, made, honest_machine(fight))


# Invites


def machine(folder: str) -> SwarmMemory:
    """A machine that has joined nothing yet."""
    return SwarmMemory(Path(folder) / "swarms.json")


def word_of(peers: Sequence[str], **said: object) -> str:
    return seal_invite(Invite(tuple(peers), int(time.time()) + HOUR_S, **said), Identity.ephemeral())  # type: ignore[arg-type]


async def join(memory: SwarmMemory, *words: str) -> str:
    """Join as commands do; what it says where it is refused."""
    choice = SwarmFinder(memory, {}, user=NOBODY).find(SwarmRequest(words))
    try:
        async with DhtRegistry.open(DhtConfig(choice.join, client_mode=True, membership=choice.membership)) as registry:
            await registry.models()
    except SwarmError as error:
        return str(error)
    return ""


@attack("invite-to-another", Kind.INVITES, lasts_s=20.0)
async def invite_to_another(fight: Fight) -> None:
    """Invites that name another swarm's id, or peers of two swarms as those of one; a machine must not join both."""
    folder = Path(fight.ground.folder)
    here = ("swarm.cli", "bootstrap", "--host", "127.0.0.1", "--port", "0", "--identity", str(folder / "another.key"))
    another = await (await fight.kit.hold(start_program("another", here, folder))).wait_for(r"/ip4/\S+")
    honest = fight.ground.join
    with tempfile.TemporaryDirectory() as home:
        memory = machine(home)
        await join(memory, honest)
        (known,) = memory.swarms()
        await fight.go()
        tries = {
            "of an id that nobody has": word_of([honest], swarm=SwarmId(bytes(16))),
            "of its own id at another's peer": word_of([another], swarm=known.swarm_id),
            "of one id with peers of both": word_of([honest, another], swarm=known.swarm_id),
            "of no id with peers of both": word_of([another, honest]),
        }
        for name, word in tries.items():
            fight.tally.acts += 1
            said = await join(memory, word)
            fight.note(f"an invite {name}: {said[:120] or 'joined'}")
            for one in memory.swarms():
                if {peer_of(honest), peer_of(another)} <= one.peer_ids | one.own_ids:
                    fight.breach(f"an invite {name} makes one swarm of two")
            if known.swarm not in {one.swarm for one in memory.swarms()}:
                fight.breach(f"an invite {name} changes the id of a swarm that was known")
        await fight.stay()


@attack("invite-other-pins", Kind.INVITES)
async def invite_other_pins(fight: Fight) -> None:
    """Invites to a known swarm with other weights, another broker or other peers; without a yes nothing may change."""
    with tempfile.TemporaryDirectory() as home:
        memory, swarm = machine(home), SwarmId(bytes(range(16)))
        model, pin = fight.ground.model.name, fight.ground.model.fingerprint[:32]
        known = RememberedSwarm((fight.ground.join,), model, pin, "mqtt://broker.example", swarm=swarm.hex())
        memory.remember(known)
        assert memory.path is not None
        before = memory.path.read_bytes()
        await fight.go()
        other = pin[::-1]
        for said in ({"model": model, "fingerprint": other}, {"broker": "mqtt://evil.example"}):
            for at in ({"swarm": swarm}, {}):
                fight.tally.acts += 1
                request = SwarmRequest((word_of([fight.ground.join], **said, **at),))
                try:
                    choice = SwarmFinder(memory, {}, user=NOBODY).find(request)
                    fight.breach(f"an invite with {said} is taken: {choice.fingerprint} {choice.mqtt}")
                except ConfigError:
                    fight.tally.refused += 1
        if memory.path.read_bytes() != before:
            fight.breach("an invite changes what is remembered before it is taken")


def resealed(rng: random.Random, key: Ed25519PrivateKey) -> str:
    """A mutated invite with a right signature and checksum."""
    body = [["/dns/a.example/tcp/1/p2p/" + "Q" * 46], int(time.time()) + HOUR_S, key.public_key().public_bytes_raw()]
    said = b"\x01" + mutate_packed(rng, msgpack.packb([*body, "a/b", bytes(16), "mqtt://a", bytes(32), bytes(16)]))
    signed = said + key.sign(b"canopy-invite-1\n" + said)
    return "canopy://" + base58.b58encode(signed + sha256(signed).digest()[:4]).decode()


@attack("invite-mutants", Kind.INVITES)
async def invite_mutants(fight: Fight) -> None:
    """50 mutated invites a second, half of them signed anew; each is refused in a line that holds nothing of it."""
    rng, key = random.Random(1), Ed25519PrivateKey.generate()
    word = word_of([fight.ground.join], swarm=SwarmId(bytes(16)))
    await fight.go()
    async for number in fight.pace(50.0):
        made = resealed(rng, key) if number % 2 else mutate_bytes(rng, word.encode()).decode("latin-1")
        fight.tally.acts += 1
        try:
            read_invite(made)
        except ConfigError as error:
            fight.tally.refused += 1
            if plain_line(str(error)) != str(error) or (len(made) > 40 and made[9:40] in str(error)):
                fight.breach(f"the error of a mutated invite is no line of ours: {str(error)[:100]!r}")
        except Exception as error:  # noqa: BLE001 (that is what is looked for)
            fight.breach(f"a mutated invite ends in {type(error).__name__}: {made[:200]!r}")


@attack("invite-dead-peers", Kind.INVITES, lasts_s=20.0)
async def invite_dead_peers(fight: Fight) -> None:
    """Four invites with 32 peers that take connections and say nothing, beside one honest peer that is remembered."""

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            await reader.read()

    server = await fight.kit.hold(await asyncio.start_server(listen, "127.0.0.1", 0))
    port = server.sockets[0].getsockname()[1]
    peers = [f"/ip4/127.0.0.1/tcp/{port}/p2p/{who.peer_id}" for who in fight.kit.identities(32)]
    with tempfile.TemporaryDirectory() as home:
        memory = machine(home)
        await join(memory, fight.ground.join)
        assert memory.path is not None
        (known,) = memory.swarms()
        await fight.go()
        words = [word_of(peers[at : at + 8], swarm=known.swarm_id) for at in range(0, 32, 8)]
        fight.tally.acts += len(words)
        began = time.monotonic()
        said = await join(memory, *words)
        fight.note(f"with 32 dead peers: {said[:120] or 'joined'} in {time.monotonic() - began:.1f} s")
        if time.monotonic() - began > NEWCOMER_S:
            fight.breach(f"a newcomer waits {time.monotonic() - began:.0f} s for dead peers")
        if {peer_of(one) for one in peers} & {peer for one in memory.swarms() for peer in one.peer_ids}:
            fight.breach("peers that never answered are remembered")
        await fight.stay()
