"""Grammars that are short to send and dear to compile or to match, all of them within what a node takes."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress

from benchmarks.redteam.attack import Fight, Kind, attack
from benchmarks.redteam.attacks.frames import ENDED
from benchmarks.redteam.kit import RawLink
from swarm.protocol.messages import Close, Fault, Sampling
from swarm.protocol.pick_rules import Grammar, PickRules

PER_S = 4.0
NODES = 64
"""Nodes of a sweep whose picks are asked for."""

MakeGrammar = Callable[[int], Grammar]


def repeats(number: int) -> Grammar:
    """29 bytes; one mask took 7 s and 245 MB."""
    return Grammar("regex", "((((a{30}){30}){30}){30}){30}".replace("a", chr(97 + number % 26)))


def conjunction(number: int) -> Grammar:
    """40 expressions that must all match; it compiled for more than a minute."""
    parts = " & ".join(f"/(.*{chr(97 + (place + number) % 26)}.{{{place + 5}}})*/" for place in range(40))
    return Grammar("lark", f"start: A\nA: {parts}")


def schema(number: int) -> Grammar:
    """The largest schema that fits; it compiles for a second, and takes no more than it may."""
    properties = {f"p{number}x{place}": {"type": "string"} for place in range(2_000)}
    return Grammar("json_schema", json.dumps({"properties": properties}, separators=(",", ":")))


def choices(number: int) -> Grammar:
    """Gaps between many words: every mask goes through much of the vocabulary."""
    words = "|".join(f"{chr(97 + (place + number) % 26)}[^x]{{0,{50 + place}}}x" for place in range(60))
    return Grammar("regex", f"({words}){{1,40}}")


async def ask(fight: Fight, make: MakeGrammar, number: int, source: str) -> None:
    """A session of one's own through the honest chain, whose first sweep brings a grammar; until it ends."""
    kit = fight.kit
    attach = kit.attach(open=kit.opening(window=256, sweeps=4, nodes=128))
    link, is_ready = await kit.session(attach, source)
    if not is_ready:
        return
    rules = PickRules(1, grammar=make(number), end_tokens=(2,))
    await link.send(kit.sweep(1, range(1, NODES + 1), sampling=Sampling(rules=rules)))
    fight.tally.acts += 1
    await _end(link, fight)


async def _end(link: RawLink, fight: Fight) -> None:
    """Wait until it is refused, or the attack is over."""
    while (heard := await link.read()) is not None:
        if isinstance(heard, Fault):
            fight.tally.refused += 1
            if "try again" in heard.reason:
                fight.note("refused after three")
            break
    with suppress(*ENDED):
        await link.send(Close("done"))


async def flood(fight: Fight, make: MakeGrammar, sources: int) -> None:
    """So many a second, at most 16 at a time of each address."""
    await fight.go()

    async def quietly(number: int) -> None:
        with suppress(*ENDED):
            await ask(fight, make, number, fight.kit.strangers[number % sources])

    async for number in fight.pace(PER_S):
        fight.kit.scope.spawn(quietly(number))


@attack("grammar-repeats", Kind.GRAMMARS)
async def grammar_repeats(fight: Fight) -> None:
    """Four sessions a second of one address, each with an expression of nested repeats."""
    await flood(fight, repeats, 1)


@attack("grammar-repeats-of-many", Kind.GRAMMARS)
async def grammar_repeats_of_many(fight: Fight) -> None:
    """Four sessions a second of 16 addresses, each with an expression of nested repeats."""
    await flood(fight, repeats, 16)


@attack("grammar-conjunction", Kind.GRAMMARS)
async def grammar_conjunction(fight: Fight) -> None:
    """Four sessions a second of one address, each with 40 expressions that must all match."""
    await flood(fight, conjunction, 1)


@attack("grammar-schemas", Kind.GRAMMARS)
async def grammar_schemas(fight: Fight) -> None:
    """Four sessions a second of one address, each with another schema of 64 KiB."""
    await flood(fight, schema, 1)


@attack("grammar-masks", Kind.GRAMMARS)
async def grammar_masks(fight: Fight) -> None:
    """Four sessions a second of one address, each with an expression whose masks are dear."""
    await flood(fight, choices, 1)
