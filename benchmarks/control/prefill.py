"""How long does a prompt take through a chain, by its parts and by how its rows travel?

The real decode loop sends the prompt over a chain in virtual time; what is measured ends with the first token. Rows are
those of a model of width 4,096 in bf16. What packing takes is in the machines' time for messages.

    python -m benchmarks prefill --record
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import tyro
from transformers import AutoTokenizer

from benchmarks.sheet import Recording, Sheet
from benchmarks.simulation.chain import Costs, InlineExecutor, RecordedTail, VirtualChain
from benchmarks.simulation.clock import Clock
from benchmarks.simulation.recorded import RecordedText
from client.decode.loop import Generation
from client.decode.policy import SWEEPS_IN_FLIGHT, FixedPolicy
from client.decode.prompt_parts import LARGEST_UNANSWERED, PromptParts
from client.decode.state import GenerationState
from client.decode.text_stream import TextStream
from client.decode.walk import Walk
from client.draft.drafter import NoDrafter
from client.library.jobs import MAX_NODES, PREFILL_CHUNK
from swarm.base.cli import make_console
from swarm.demo import TARGET
from swarm.protocol.messages import Codec, Credits, Sampling
from swarm.protocol.session import Limits

WIDTH = 4_096
VOCABULARY = 1 << 10
PACKED = 0.67
"""Packed bf16 rows over raw ones (docs/decisions/0084-rows-of-prompts-travel-packed.md)."""
PACKING_MS = 0.045
"""Packing and unpacking of one such row, in milliseconds of one core; on the machines' way, though threads do it."""
FORWARD_MS = 5.0
"""Of a hop, without its rows: what smaller parts cost."""


@dataclass(frozen=True, slots=True)
class Options(Recording):
    """Measure prompts in parts."""

    tokens: tuple[int, ...] = (1_000, 16_000)
    """Of the prompts."""
    hops: tuple[int, ...] = (1, 3, 6, 12)
    """Of the chains."""
    delay_ms: float = 12.5
    """Of each link, one way."""
    mbit: float = 40.0
    """Of each link."""
    row_ms: float = 1.0
    """A token in a hop's forward."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One prompt through one chain: virtual seconds until the first token.

    Attributes:
        as_alone: In the parts of a chain of one hop: three of 512.
        chosen: In the parts that the chain has.
        packed: The same, and rows travel packed.
        int8: The same as int8 rows, which are lossy.
        bound: What the busiest link or hop alone takes, with packed rows.
    """

    tokens: int
    hops: int
    parts: str
    as_alone: float
    chosen: float
    packed: float
    int8: float
    bound: float


class InLargeParts(VirtualChain):
    """A chain that gets prompts as one hop alone does."""

    @property
    def hops(self) -> int:
        return 1


async def first_token_s(tokens: int, costs: Costs, kind: type[VirtualChain] = VirtualChain) -> float:
    """Virtual seconds until the first token behind a prompt."""
    clock, prompt = Clock(), tuple(place % VOCABULARY for place in range(tokens))
    credits = Credits(tokens + 64, SWEEPS_IN_FLIGHT, MAX_NODES + LARGEST_UNANSWERED * PREFILL_CHUNK)
    recorded = RecordedText(prompt, (*prompt, 1), Sampling(), {})
    chain = kind(RecordedTail(recorded, credits), costs, clock, credits)
    text = TextStream(AutoTokenizer.from_pretrained(TARGET), prompt, max_new_tokens=1)
    state = GenerationState(
        *(prompt, Sampling(), FixedPolicy(0), PREFILL_CHUNK, 1, text, NoDrafter(), InlineExecutor()),
        clock=clock.seconds,
    )
    walk = Walk(Limits(VOCABULARY, credits.window_tokens, credits.sweeps, credits.nodes), Sampling())
    async for _ in Generation(state, chain, walk).run():
        pass
    return clock.seconds()


def measure(tokens: int, hops: int, options: Options) -> Cell:
    raw_bytes, evenly = Codec.BF16.row_bytes(WIDTH), (1.0,) * hops
    costs = Costs(
        *(options.delay_ms, options.mbit, FORWARD_MS, options.row_ms),
        row_bytes=raw_bytes,
        others=(0.0,) * hops,
        paces=evenly,
    )
    packed = replace(costs, row_bytes=round(PACKED * raw_bytes), handling_row_ms=PACKING_MS * (hops - 1))
    int8 = replace(costs, row_bytes=Codec.INT8.row_bytes(WIDTH))
    parts = PromptParts(PREFILL_CHUNK, hops)
    busiest_ms = max(options.row_ms, packed.transfer_ms(1) if hops > 1 else 0.0)
    runs = ((costs, InLargeParts), (costs, VirtualChain), (packed, VirtualChain), (int8, VirtualChain))
    as_alone, chosen, packed_s, int8_s = (asyncio.run(first_token_s(tokens, each, kind)) for each, kind in runs)
    sizes = f"{parts.unanswered} × {parts.tokens}"
    return Cell(tokens, hops, sizes, as_alone, chosen, packed_s, int8_s, tokens * busiest_ms / 1e3)


def sheet(cells: Sequence[Cell], options: Options) -> Sheet:
    large = f"{LARGEST_UNANSWERED} × {PREFILL_CHUNK}"
    made = Sheet(
        "prefill",
        "Virtual seconds until the first token of a prompt, by its parts and by how rows travel",
        ("tokens, hops", f"{large}, raw", "parts", "in these, raw", "packed", "int8", "busiest alone", "faster"),
    )
    for cell in cells:
        made.rows.append(
            (
                *(f"{cell.tokens:,}, {cell.hops}", f"{cell.as_alone:.1f}", cell.parts, f"{cell.chosen:.1f}"),
                *(
                    f"{cell.packed:.1f}",
                    f"{cell.int8:.1f}",
                    f"{cell.bound:.1f}",
                    f"{cell.as_alone / cell.packed:.2f} ×",
                ),
            )
        )
    made.notes.append(
        f"Links of {options.delay_ms:g} ms and {options.mbit:g} Mbit/s, rows of {WIDTH:,} values in bf16, a hop "
        f"{FORWARD_MS:g} ms + {options.row_ms:g} ms per token. Packed: {PACKED} of the bytes, {PACKING_MS:g} ms per "
        "row and link. Busiest alone: what the slowest hop or link takes for all tokens, with packed rows. Faster: "
        f"{large} with raw rows over the chain's own parts with packed ones."
    )
    made.measured = {"cells": [asdict(cell) for cell in cells]}
    return made


def main() -> None:
    options = tyro.cli(Options)
    cells = [measure(tokens, hops, options) for tokens in options.tokens for hops in options.hops]
    sheet(cells, options).finish(make_console(), options)
