"""What does a prompt of 32,000 tokens take on three nodes, and what do others notice of it?

The demo target, grown to SmolLM2's width and with a rope that reaches far enough (`grown`), on three node
processes on loopback, a thread each. While one client's prompt is read, another client goes on with a short text of its
own, a token per sweep. The long text is compared with that of transformers in one process.

    python -m benchmarks long --record
    python -m benchmarks long --tokens 4000         # in half a minute
"""

from __future__ import annotations

import asyncio
import json
import re
import tempfile
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, replace
from itertools import cycle, islice, pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import tyro
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from benchmarks.emulation.swarm import ServeOptions, covered, local_swarm
from benchmarks.sheet import Recording, Sheet
from benchmarks.speed.grown import SHAPES, grow
from client.library.aio import AsyncSwarm
from client.tools.demo.programs import RunningProgram
from swarm.base.cli import make_console
from swarm.base.library_logging import quiet_libraries
from swarm.demo import PASSAGES, TARGET

OTHER_TOKENS = 48
"""Of the other client's prompt."""
ALONE_TOKENS = 64
"""That it writes before the long prompt comes."""


@dataclass(frozen=True, slots=True)
class Options(Recording):
    """Measure a long prompt."""

    tokens: int = 32_000
    """Of the prompt."""
    layers: int = 12
    """Of the model, at least the demo target's 12; SmolLM2 has 30."""
    new_tokens: int = 16
    """That follow the prompt."""
    threads: int = 1
    """Of the process that computes the text for comparison."""


@dataclass(frozen=True, slots=True)
class LongRun:
    """What was seen.

    Attributes:
        first_token_s: From the prompt's beginning to the first token.
        next_ms: Between the tokens that follow, median.
        alone_ms: Between the other client's tokens before.
        beside_ms: Between its tokens while the prompt was read.
        resting_mib: Memory of each node before the prompt.
        peak_mib: The most that each took.
        is_same: Whether the text is that of one process.
    """

    first_token_s: float
    next_ms: float
    alone_ms: list[float]
    beside_ms: list[float]
    resting_mib: list[float]
    peak_mib: list[float]
    is_same: bool = False


def make_model(folder: Path, options: Options) -> list[int]:
    """Write the model; returns the prompt."""
    grow(folder, replace(SHAPES["135M"], num_hidden_layers=options.layers))
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    reach = options.tokens + 1024
    config["rope_parameters"] |= {"rope_type": "linear", "factor": reach / config["max_position_embeddings"]}
    path.write_text(json.dumps(config | {"max_position_embeddings": reach}), encoding="utf-8")
    lines = (json.loads(line)["text"] for line in PASSAGES.read_text(encoding="utf-8").splitlines())
    ids = Tokenizer.from_file(str(TARGET / "tokenizer.json")).encode("\n".join(lines)).ids
    return list(islice(cycle(ids), options.tokens))


def memory_mib(nodes: Sequence[RunningProgram], field: str) -> list[float]:
    """`VmRSS` or `VmHWM` of each node."""
    found = []
    for node in nodes:
        status = Path(f"/proc/{node.process.pid}/status").read_text(encoding="utf-8")
        line = re.search(rf"{field}:\s+(\d+) kB", status)
        assert line is not None, "the kernel says it"
        found.append(int(line[1]) / 1024)
    return found


async def times_of(client: AsyncSwarm, prompt: list[int], new_tokens: int, text: list[int]) -> list[float]:
    """When each token of a text came, the prompt's beginning first; `text` takes the tokens."""
    times = [time.perf_counter()]
    async with aclosing(client.stream(prompt, max_new_tokens=new_tokens, temperature=0, end_tokens=())) as pieces:
        async for piece in pieces:
            times += [time.perf_counter()] * len(piece.tokens)
            text += piece.tokens
    return times


def gaps_ms(times: list[float]) -> list[float]:
    return [(after - before) * 1e3 for before, after in pairwise(times)]


async def run(folder: Path, prompt: list[int], options: Options) -> tuple[LongRun, list[int]]:
    third = options.layers // 3
    spans = (f"0-{third}", f"{third}-{2 * third}", f"{2 * third}-{options.layers}")
    served = ServeOptions(folder / "model", spans, ("--device", "cpu", "--dtype", "float32"))
    async with local_swarm(folder, served) as (peer, nodes):
        await asyncio.gather(*(node.wait_for("serving at") for node in nodes))
        connecting = AsyncSwarm.connect(folder / "model", peers=[peer], lookup=False, siblings=False)
        async with connecting as client, asyncio.TaskGroup() as tasks:
            await covered(client)
            other = prompt[-OTHER_TOKENS:]
            alone = gaps_ms((await times_of(client, other, ALONE_TOKENS, []))[1:])
            resting, text, beside = memory_mib(nodes, "VmRSS"), list[int](), list[float]()
            long = tasks.create_task(times_of(client, prompt, options.new_tokens, text))
            while not long.done():
                beside += gaps_ms((await times_of(client, other, ALONE_TOKENS, []))[1:])
            times = await long
            peak = memory_mib(nodes, "VmHWM")
    after = median(gaps_ms(times[1:]))
    return LongRun(times[1] - times[0], after, alone, beside, resting, peak), text


def by_one_process(model: Path, prompt: list[int], options: Options) -> list[int]:
    """The text that transformers write."""
    torch.set_num_threads(options.threads)
    whole: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ids = torch.tensor([prompt])
    made = whole.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=options.new_tokens, eos_token_id=None
    )
    return list(map(int, made[0, len(prompt) :]))


def make_sheet(seen: LongRun, options: Options) -> Sheet:
    def spread(values: list[float]) -> str:
        return f"{median(values):.0f} ({quantiles(values, n=20)[-1]:.0f}, {max(values):.0f}) ms"

    sheet = Sheet(
        "long",
        f"A prompt of {options.tokens:,} tokens, {options.layers} layers on three nodes of a thread, two shared cores",
        ("what", "measured"),
        measured={"options": asdict(options), **asdict(seen)},
    )
    sheet.rows += [
        ("text of one process", "the same" if seen.is_same else "**another**"),
        (
            "until the first token",
            f"{seen.first_token_s:.0f} s, {options.tokens / seen.first_token_s:.0f} prompt tokens/s",
        ),
        ("each token after it", f"{seen.next_ms:.0f} ms"),
        ("another client's token, before: median (95 %, most)", spread(seen.alone_ms)),
        ("another client's token, meanwhile: median (95 %, most)", spread(seen.beside_ms)),
        ("memory of a node, at rest", ", ".join(f"{one:.0f}" for one in seen.resting_mib) + " MiB"),
        ("memory of a node, at most", ", ".join(f"{one:.0f}" for one in seen.peak_mib) + " MiB"),
    ]
    return sheet


def main() -> None:
    options = tyro.cli(Options)
    quiet_libraries()
    with tempfile.TemporaryDirectory(prefix="canopy-long-") as temporary:
        folder = Path(temporary)
        prompt = make_model(folder / "model", options)
        seen, text = asyncio.run(run(folder, prompt, options))
        seen = replace(seen, is_same=text == by_one_process(folder / "model", prompt, options))
    make_sheet(seen, options).finish(make_console(), options)


if __name__ == "__main__":
    main()
