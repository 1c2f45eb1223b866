"""What does `client api` cost beside the library, in tokens/s and until the first token?

Both are clients of the demo swarm with the same draft, one of them in this process, the other a program behind HTTP on
loopback. Each text is made by both, in turns, and each pair begins with the other one. Neither keeps sessions.

    python -m benchmarks api_overhead --record
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import torch
import tyro
from rich.console import Console

from benchmarks.emulation.swarm import covered
from benchmarks.sheet import Recording, Sheet
from client.base.options import GenerateOptions
from client.library.aio import AsyncSwarm
from client.library.session import Piece
from client.tools.bench.paired_ratio import median_of, ratios
from client.tools.demo.programs import RunningProgram, start_program
from client.tools.demo.swarm import demo_swarm
from swarm.base.cli import make_console
from swarm.base.errors import RegistryError, SwarmError
from swarm.base.library_logging import quiet_libraries
from swarm.demo import DRAFT, PASSAGES, TARGET

COMPLETE_S = 60.0
"""A model whose layers are not all found by then will not be."""


@dataclass(frozen=True, slots=True)
class ApiProgram:
    """The API as it runs.

    Attributes:
        url: its base, without a slash at its end.
    """

    url: str
    running: RunningProgram

    def http(self, key: str) -> httpx2.AsyncClient:
        """A client with this key and connections of its own, as many as it needs."""
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        headers = {"authorization": f"Bearer {key}"}
        return httpx2.AsyncClient(base_url=self.url, headers=headers, limits=limits, timeout=None, trust_env=False)


@asynccontextmanager
async def api_program(
    peer: str, folder: Path, keys: Sequence[str], *options: str, model: Path = TARGET, draft: Path | None = DRAFT
) -> AsyncIterator[ApiProgram]:
    """Start it; the block begins when it finds every layer.

    Args:
        peer: address of the swarm's bootstrap peer.
        folder: for its log and what it learns about the draft.
        options: more of `client api`.

    Raises:
        RegistryError: it did not start, or does not find the model.
    """
    command = ["client.cli", "api", str(model), "--join", peer, "--threads", "1"]
    command += [] if draft is None else ["--draft", str(draft)]
    command += ["--port", "0", *(word for key in keys for word in ("--api-key", key)), *options]
    async with start_program("api", command, folder, ["env", f"XDG_CACHE_HOME={folder}"]) as running:
        url = (await running.wait_for(r"http://\S+/v1")).removesuffix("/v1")
        program = ApiProgram(url, running)
        async with program.http(keys[0]) as http:
            await _complete(http)
        yield program


async def _complete(http: httpx2.AsyncClient) -> None:
    for _ in range(int(COMPLETE_S / 0.2)):
        models = (await http.get("/v1/models")).json()["data"]
        if models and models[0]["health"]["is_complete"]:
            return
        await asyncio.sleep(0.2)
    raise RegistryError(f"the API did not find every layer in {COMPLETE_S:.0f} s")


KEY = "benchmark-key"
KINDS = ("completions", "chat")
PROMPT_WORDS = 40
TEMPERATURE = 0.7
RATIO_LIMIT = 0.97
FIRST_LIMIT_MS = 5.0


@dataclass(frozen=True, slots=True)
class Options(Recording):
    """Measure what the API costs."""

    delay_ms: tuple[float, ...] = (0.0, 25.0)
    """One-way delays of every link, each in turn."""
    pairs: int = 24
    """Texts of each kind at each delay, each made by both."""
    nodes: int = 16
    """Tree nodes per sweep."""
    new_tokens: int = 96
    """New tokens of each text."""


@dataclass(frozen=True, slots=True)
class TextTimes:
    """One text as its reader saw it.

    Attributes:
        first_ms: from asking until its first characters.
    """

    text: str
    tokens: int
    first_ms: float
    rest_s: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.rest_s if self.rest_s > 0 else 0.0


@dataclass(slots=True)
class PairedTexts:
    """The texts of one kind at one delay, pair by pair."""

    library: list[TextTimes] = field(default_factory=list)
    api: list[TextTimes] = field(default_factory=list)

    @property
    def speed_ratios(self) -> list[float]:
        return ratios(*([one.tokens_per_s for one in some] for some in (self.api, self.library)))

    @property
    def added_ms(self) -> list[float]:
        """What the API's first characters took longer."""
        return [api.first_ms - library.first_ms for api, library in zip(self.api, self.library, strict=True)]


async def by_library(swarm: AsyncSwarm, kind: str, prompt: str, options: GenerateOptions) -> TextTimes:
    began = time.perf_counter()
    if kind == "chat":
        async with swarm.chat() as chat:
            return await _read_pieces(chat.stream(prompt, **options), began)
    return await _read_pieces(swarm.stream(prompt, **options), began)


async def _read_pieces(pieces: AsyncGenerator[Piece, None], began: float) -> TextTimes:
    text, tokens, first = "", 0, None
    async with aclosing(pieces):
        async for piece in pieces:
            text += piece.text
            if text and first is None:
                first = time.perf_counter()
            if piece.result is not None:
                tokens = piece.result.stats.tokens
    return _times(text, tokens, began, first)


async def by_api(http: httpx2.AsyncClient, kind: str, prompt: str, options: GenerateOptions) -> TextTimes:
    """Make a text through HTTP.

    Raises:
        httpx2.HTTPError: the API refuses it.
    """
    sampling = {"temperature": options["temperature"], "seed": options["seed"]}
    body: dict[str, Any] = {**sampling, "max_tokens": options["max_new_tokens"], "canopy": {"nodes": options["nodes"]}}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    body |= {"messages": [{"role": "user", "content": prompt}]} if kind == "chat" else {"prompt": prompt}
    path = "/v1/chat/completions" if kind == "chat" else "/v1/completions"
    text, tokens, first = "", 0, None
    began = time.perf_counter()
    async with http.stream("POST", path, json=body) as response:
        response.raise_for_status()
        async for event in httpx2.EventSource(response):
            if event.data == "[DONE]":
                break
            chunk = json.loads(event.data)
            for choice in chunk["choices"]:
                text += choice.get("text") or choice.get("delta", {}).get("content") or ""
            if text and first is None:
                first = time.perf_counter()
            tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
    return _times(text, tokens, began, first)


def _times(text: str, tokens: int, began: float, first: float | None) -> TextTimes:
    now = time.perf_counter()
    first = now if first is None else first
    return TextTimes(text, tokens, (first - began) * 1e3, now - first)


async def measure(options: Options, delay_ms: float, console: Console) -> dict[str, PairedTexts]:
    """Both kinds of texts at one delay.

    Raises:
        SwarmError: a program did not start, or the two made another text.
    """
    lines = PASSAGES.read_text(encoding="utf-8").splitlines()
    prompts = [" ".join(json.loads(line)["text"].split()[:PROMPT_WORDS]) for line in lines]
    found = {kind: PairedTexts() for kind in KINDS}
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="canopy-api-overhead-")))
        peer = await stack.enter_async_context(demo_swarm(delay_ms, console))
        connecting = AsyncSwarm.connect(TARGET, peers=[peer], draft=DRAFT, threads=1, calibration=None)
        swarm = await stack.enter_async_context(connecting)
        await covered(swarm)
        api = await stack.enter_async_context(api_program(peer, folder, [KEY], "--keep", "0"))
        http = await stack.enter_async_context(api.http(KEY))
        for number in range(-1, options.pairs):  # the first pair opens connections and does not count
            given: GenerateOptions = {"max_new_tokens": options.new_tokens, "nodes": options.nodes}
            given |= {"temperature": TEMPERATURE, "seed": number + 1}
            for kind in KINDS:
                prompt = prompts[number % len(prompts)]
                makers = [partial(by_library, swarm), partial(by_api, http)]
                library, api_text = await _pair([partial(make, kind, prompt, given) for make in makers], number)
                if number >= 0:
                    found[kind].library.append(library)
                    found[kind].api.append(api_text)
            if number >= 0 and (number + 1) % 8 == 0:
                console.print(f"{delay_ms:g} ms: {number + 1} of {options.pairs} pairs")
    return found


async def _pair(makers: list[Callable[[], Awaitable[TextTimes]]], number: int) -> list[TextTimes]:
    """A text by the library and by the API; every second time the API begins.

    Raises:
        SwarmError: their texts differ.
    """
    order = range(len(makers)) if number % 2 == 0 else reversed(range(len(makers)))
    made = {place: await makers[place]() for place in order}
    library, api = made[0], made[1]
    if (library.text, library.tokens) != (api.text, api.tokens):
        raise SwarmError(f"text {number} differs: {library.text!r} by the library, {api.text!r} by the API")
    return [library, api]


def sheet(found: dict[float, dict[str, PairedTexts]], options: Options) -> Sheet:
    made = Sheet(
        "api_overhead",
        f"`client api` against the library on the demo swarm, streamed texts of {options.new_tokens} tokens, tree of "
        f"{options.nodes}, {options.pairs} pairs each",
        (
            "",
            "library, tokens/s",
            "API, tokens/s",
            "API / library (95 %)",
            "library, first token, ms",
            "the API adds, ms (95 %)",
        ),
    )
    for delay_ms, kinds in found.items():
        for kind, texts in kinds.items():
            speeds = [median_of([one.tokens_per_s for one in some]).value for some in (texts.library, texts.api)]
            first_ms = median_of([one.first_ms for one in texts.library]).value
            cells = (f"{speeds[0]:.1f}", f"{speeds[1]:.1f}", _shown(texts.speed_ratios, 3))
            made.rows.append(
                (f"{kind}, links of {delay_ms:g} ms", *cells, f"{first_ms:.0f}", _shown(texts.added_ms, 1))
            )
            made.measured[f"{kind} {delay_ms:g}"] = asdict(texts)
    made.notes = [
        f"Asked: {RATIO_LIMIT:.2f} of the library's tokens/s, and at most {FIRST_LIMIT_MS:g} ms more until the first "
        "token. Tokens/s count from the first characters on. Every text was the same by both."
    ]
    made.measured["options"] = asdict(options) | {"json": None}
    return made


def _shown(values: list[float], digits: int) -> str:
    found = median_of(values)
    if found.low is None or found.high is None:
        return f"{found.value:.{digits}f}"
    return f"{found.value:.{digits}f} ({found.low:.{digits}f} … {found.high:.{digits}f})"


async def _run(options: Options, console: Console) -> dict[float, dict[str, PairedTexts]]:
    return {delay_ms: await measure(options, delay_ms, console) for delay_ms in options.delay_ms}


def main() -> None:
    options = tyro.cli(Options)
    torch.set_num_threads(1)
    quiet_libraries()
    console = make_console()
    try:
        found = asyncio.run(_run(options, console))
    except (SwarmError, httpx2.HTTPError) as error:
        raise SystemExit(f"api_overhead: {error}") from None
    sheet(found, options).finish(console, options)
