"""What does an agent wait for, turn after turn, and what is computed again?

Two agents with one API key, one system prompt and tools of their own talk to a model through `client api`, side by
side; each turn brings a tool's output. Then an agent with another key asks what the first one asked. At last requests
come with an opening in common, one after the other, and as many with a second one at once. Three nodes and the server
are programs on loopback, a delay on every link; the model is the demo target, grown to SmolLM2's width, with a rope
that reaches far enough.

    python -m benchmarks agents --record
    python -m benchmarks agents --tokens 6000       # in two minutes
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from itertools import cycle, islice, pairwise
from pathlib import Path
from statistics import median
from typing import Any

import httpx2
import tyro

from benchmarks.operations.api_overhead import api_program
from benchmarks.sheet import Recording, Sheet
from benchmarks.speed.grown import SHAPES, grow
from client.tools.demo.swarm import demo_swarm
from swarm.base.cli import make_console
from swarm.base.errors import ConfigError
from swarm.base.library_logging import quiet_libraries
from swarm.demo import PASSAGES

KEY, OTHER_KEY = "agents-key", "another-key"
TOKENS_PER_WORD = 1.7
"""Of these passages in the demo target's vocabulary, about; the answers say how many there were."""


@dataclass(frozen=True, slots=True)
class Options(Recording):
    """Measure agents' turns."""

    tokens: int = 32_000
    """Of each conversation at its end."""
    turns: int = 20
    """Of each agent."""
    layers: int = 12
    """Of the model, at least the demo target's 12; SmolLM2 has 30."""
    delay_ms: float = 25.0
    """One way, of every link."""
    common: int = 1_000
    """Tokens of the system prompt that both agents have, about."""
    new_tokens: int = 32
    """Of each answer."""
    requests: int = 32
    """With one opening of `common` tokens."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn as its agent saw it.

    Attributes:
        prompt: Tokens of the prompt.
        reused: Of them, those that no machine computed for this turn.
        first_s: Until the first characters.
        answer: Tokens of the answer.
    """

    prompt: int
    reused: int
    first_s: float
    answer: int


@dataclass(frozen=True, slots=True)
class Seen:
    """All turns.

    Attributes:
        agents: Each agent's.
        stranger: Of the one with another key.
        in_turn: With one opening, one after the other.
        at_once: With another opening, at once.
    """

    agents: list[list[Turn]]
    stranger: Turn
    in_turn: list[Turn]
    at_once: list[Turn]


def make_model(folder: Path, options: Options) -> None:
    grow(folder, replace(SHAPES["135M"], num_hidden_layers=options.layers))
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    reach = options.tokens * 5 // 4 + 1_024
    config["rope_parameters"] |= {"rope_type": "linear", "factor": reach / config["max_position_embeddings"]}
    path.write_text(json.dumps(config | {"max_position_embeddings": reach}), encoding="utf-8")


def words_from(place: int, tokens: int) -> str:
    """Running text of about so many tokens, another one from each place."""
    lines = (json.loads(line)["text"] for line in PASSAGES.read_text(encoding="utf-8").splitlines())
    words = cycle(word for line in lines for word in line.split())
    return " ".join(islice(words, 97 * place, 97 * place + int(tokens / TOKENS_PER_WORD)))


async def ask(
    http: httpx2.AsyncClient, model: str, messages: list[dict[str, str]], new_tokens: int
) -> tuple[Turn, str]:
    """One turn, streamed."""
    body = {"model": model, "messages": messages, "max_tokens": new_tokens, "temperature": 0, "stream": True}
    body["stream_options"] = {"include_usage": True}
    started, first, text, usage = time.perf_counter(), 0.0, "", dict[str, Any]()
    async with http.stream("POST", "/v1/chat/completions", json=body) as sent:
        if sent.is_error:
            raise ConfigError((await sent.aread()).decode())
        async for line in sent.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            said = "".join(choice["delta"].get("content") or "" for choice in event["choices"])
            first = first or (time.perf_counter() - started if said else 0.0)
            text, usage = text + said, event.get("usage") or usage
    reused = usage["prompt_tokens_details"]["cached_tokens"]
    first = first or time.perf_counter() - started
    return Turn(usage["prompt_tokens"], reused, first, usage["completion_tokens"]), text


async def work(http: httpx2.AsyncClient, model: str, agent: int, options: Options) -> list[Turn]:
    """All turns of one agent."""
    messages = first_messages(agent, options)
    share = (options.tokens - options.common) // options.turns - options.new_tokens
    turns = []
    for turn in range(options.turns):
        if turn:
            messages += [{"role": "user", "content": f"Output of tool {agent}: {words_from(40 * agent + turn, share)}"}]
        seen, text = await ask(http, model, messages, options.new_tokens)
        messages += [{"role": "assistant", "content": text}]
        turns.append(seen)
    return turns


def first_messages(agent: int, options: Options) -> list[dict[str, str]]:
    """The common system prompt, then the agent's own tools and task."""
    share = (options.tokens - options.common) // options.turns - options.new_tokens
    own = f"You may call these tools of agent {agent}: {words_from(40 * agent, share)}"
    return [{"role": "system", "content": words_from(7, options.common)}, {"role": "user", "content": own}]


async def ask_alike(http: httpx2.AsyncClient, model: str, options: Options, *, at_once: bool) -> list[Turn]:
    """Requests with one opening; what the first one took is the price of an opening that nobody holds."""
    opening = words_from(200 + at_once, options.common)

    async def one(number: int) -> Turn:
        messages = [{"role": "system", "content": opening}, {"role": "user", "content": words_from(300 + number, 40)}]
        return (await ask(http, model, messages, options.new_tokens // 4))[0]

    if at_once:
        return list(await asyncio.gather(*map(one, range(options.requests))))
    return [await one(number) for number in range(options.requests)]


async def run(folder: Path, options: Options) -> Seen:
    third, model = options.layers // 3, folder / "model"
    spans = (f"0-{third}", f"{third}-{2 * third}", f"{2 * third}-{options.layers}")
    console = make_console(stderr=True)
    async with (
        demo_swarm(options.delay_ms, console, model, spans) as peer,
        api_program(peer, folder, (KEY, OTHER_KEY), model=model, draft=None) as api,
        api.http(KEY) as http,
        api.http(OTHER_KEY) as other,
    ):
        name = (await http.get("/v1/models")).json()["data"][0]["id"]
        seen = await asyncio.gather(*(work(http, name, agent, options) for agent in range(2)))
        stranger, _ = await ask(other, name, first_messages(0, options), options.new_tokens)
        alike = [await ask_alike(http, name, options, at_once=at_once) for at_once in (False, True)]
    return Seen(list(seen), stranger, alike[0], alike[1])


def kept(turns: list[Turn]) -> list[float]:
    """Of each turn but the first: what was reused of what the turn before held."""
    return [now.reused / (before.prompt + before.answer - 1) for before, now in pairwise(turns)]


def cells(turn: Turn, share: str) -> tuple[str, ...]:
    return f"{turn.prompt:,}", f"{turn.reused:,}", share, f"{turn.first_s:.1f} s"


def make_sheet(seen: Seen, options: Options) -> Sheet:
    sheet = Sheet(
        "agents",
        f"Two agents of {options.turns} turns, {options.layers} layers on three nodes, {options.delay_ms:g} ms one way",
        ("turn", "prompt tokens", "reused", "of what was held", "first token"),
        measured={"options": asdict(options), **asdict(seen)},
    )
    for agent, turns in enumerate(seen.agents):
        shares = [0.0, *kept(turns)]
        for place in sorted({0, 1, 2, len(turns) // 2, len(turns) - 1} & set(range(len(turns)))):
            share = f"{shares[place]:.3f}" if place else ""
            sheet.rows.append((f"agent {agent + 1}, {place + 1}", *cells(turns[place], share)))
    sheet.rows.append(("another key, 1", *cells(seen.stranger, "")))
    shares = [share for turns in seen.agents for share in kept(turns)]
    slower = ", ".join(f"{turns[-1].first_s / turns[1].first_s:.1f}" for turns in seen.agents)
    sheet.notes.append(f"Of what the turn before held: least {min(shares):.3f}, median {median(shares):.3f}.")
    sheet.notes.append(f"First token, last turn over the second: {slower}.")
    cold, after = seen.in_turn[0], seen.in_turn[1:]
    for what, others in (("one after the other", after), ("at once", seen.at_once)):
        reused = sum(one.reused for one in others) / sum(one.prompt for one in others)
        first_s = median(one.first_s for one in others)
        sheet.notes.append(
            f"{len(others)} requests with an opening of {options.common:,} tokens, {what}: {reused:.3f} of all prompt "
            f"tokens reused; first token after {first_s:.2f} s in the median, {first_s / cold.first_s:.2f} of the "
            f"{cold.first_s:.2f} s of a first request."
        )
    return sheet


def main() -> None:
    options = tyro.cli(Options)
    quiet_libraries()
    with tempfile.TemporaryDirectory(prefix="canopy-agents-") as temporary:
        folder = Path(temporary)
        make_model(folder / "model", options)
        seen = asyncio.run(run(folder, options))
    make_sheet(seen, options).finish(make_console(), options)


if __name__ == "__main__":
    main()
