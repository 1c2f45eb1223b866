"""`client bench`: measures the user's own prompts through any swarm. Owns the order of runs and what is recorded.

Two ways of decoding are measured in turns (A B, B A, A B, …) with one seed per prompt, and compared within each pair.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import mean, median
from typing import Literal

from rich.table import Table

from client.base.options import Options, check_text
from client.base.stats import Result
from client.library.aio import AsyncSwarm
from client.tools.bench.paired_ratio import Median, median_of, ratios
from client.tools.bench.plot import Point, WaterfallStage, parts_of
from swarm.base.errors import ConfigError, ContextFull
from swarm.demo import PASSAGES

MAX_PROMPTS_BYTES = 64 << 20
MAX_SEED = 2**63
AS_ASKED, PLAIN = "as asked", "plain"
PLOTTED = (0, 1, 4, 16, 64)
"""Tree sizes that a plot compares."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt.

    Attributes:
        text: to continue; None for a conversation.
        turns: what the user says in a conversation.
    """

    name: str
    text: str | None = None
    turns: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Run:
    """One measured answer; the fields that `client.Stats` has too mean the same.

    Attributes:
        turn: of the conversation, from 0.
        way: name of the way of decoding.
        tokens: ids, by which two ways of decoding are compared.
        nodes: K as asked for; None where it was chosen.
        parts: stages of a sweep, medians.
    """

    prompt: str
    turn: int
    way: str
    seed: int
    tokens: tuple[int, ...]
    tokens_per_s: float
    acceptance_length: float
    ms_per_sweep: float
    time_to_first_token_s: float
    sweeps: int
    prompt_tokens: int
    reused_tokens: int
    numeric_class: str
    reproducible: bool
    nodes: int | None = None
    parts: tuple[WaterfallStage, ...] = ()


def read_prompts(path: Path | None, limit: int) -> list[Prompt]:
    """The first prompts of a file of JSON lines, each with `text`, or `turns` as in Spec-Bench.

    Raises:
        ConfigError: the file cannot be read, or names the line that is no prompt.
    """
    if limit < 1:
        raise ConfigError(f"limit: {limit}; ask for at least 1 prompt")
    path = path or PASSAGES
    try:
        if path.stat().st_size > MAX_PROMPTS_BYTES:
            raise ConfigError(f"{path}: more than {MAX_PROMPTS_BYTES >> 20} MiB of prompts; give a smaller file")
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: prompts cannot be read ({error})") from error
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()][:limit]
    if not numbered:
        raise ConfigError(f"{path}: holds no prompt; write JSON lines with a text or turns")
    return [_prompt(line, f"{path}:{number}") for number, line in numbered]


def _prompt(line: str, place: str) -> Prompt:
    try:
        match json.loads(line):
            case {"text": str(text), **rest} if text:
                return Prompt(str(rest.get("id", place)), text=check_text(text, place))
            case {"turns": [str(), *_] as turns, **rest} if all(isinstance(turn, str) and turn for turn in turns):
                turns = tuple(check_text(turn, place) for turn in turns)
                return Prompt(str(rest.get("question_id", rest.get("id", place))), turns=turns)
    except (ValueError, RecursionError):
        pass
    raise ConfigError(f'{place}: is no prompt; each line is JSON such as {{"text": "…"}} or {{"turns": ["…", "…"]}}')


def cut(swarm: AsyncSwarm, prompts: Sequence[Prompt], tokens: int | None) -> list[Prompt]:
    """The prompts with only the first `tokens` tokens of each text.

    Raises:
        ConfigError: not even one token.
    """
    if tokens is None:
        return list(prompts)
    if tokens < 1:
        raise ConfigError(f"prompt_tokens: {tokens}; ask for at least 1")
    tokenizer = swarm.target.tokenizer
    texts = [None if prompt.text is None else tokenizer(prompt.text)["input_ids"][:tokens] for prompt in prompts]
    return [
        prompt if ids is None else replace(prompt, text=str(tokenizer.decode(ids, skip_special_tokens=True)))
        for prompt, ids in zip(prompts, texts, strict=True)
    ]


def ways(options: Options, compare: Literal["none", "plain"], *, plotted: bool = False) -> dict[str, Options]:
    """The ways of decoding to measure, by name."""
    sizes = [0] if compare == "plain" else []
    sizes += [size for size in PLOTTED if size not in sizes] if plotted else []
    found = {AS_ASKED: options}
    return found | {(PLAIN if size == 0 else f"K = {size}"): replace(options, nodes=size) for size in sizes}


async def measure(
    swarm: AsyncSwarm, prompts: Sequence[Prompt], ways: dict[str, Options]
) -> AsyncIterator[tuple[Prompt, str, list[Run]]]:
    """Measure every prompt in every way; yields each as it is done, without a run if it exceeds the context."""
    base = next(iter(ways.values())).seed
    base = secrets.randbits(62) if base is None else base
    for number, prompt in enumerate(prompts):
        order = list(ways.items())
        for way, options in order if number % 2 == 0 else reversed(order):
            seeded = replace(options, seed=(base + number) % MAX_SEED)
            results: list[Result] = []
            swarm.forget_texts()  # another way generated the same text just now
            with suppress(ContextFull):
                results += [result async for result in _answers(swarm, prompt, seeded)]
            runs = [_run(prompt, turn, way, result) for turn, result in enumerate(results)]
            yield prompt, way, [replace(run, nodes=options.nodes) for run in runs]


async def warm_up(swarm: AsyncSwarm) -> None:
    """Generate a few tokens, so that the first measured run finds connections open."""
    await swarm.generate("It was", max_new_tokens=4)


async def _answers(swarm: AsyncSwarm, prompt: Prompt, options: Options) -> AsyncIterator[Result]:
    if prompt.text is not None:
        yield await swarm.generate(prompt.text, **asdict(options))
        return
    async with swarm.chat(**asdict(options)) as chat:
        for turn in prompt.turns:
            yield await chat.say(turn)


def _run(prompt: Prompt, turn: int, way: str, result: Result) -> Run:
    stats = result.stats
    return Run(
        prompt=prompt.name,
        turn=turn,
        way=way,
        seed=stats.seed,
        tokens=result.tokens,
        tokens_per_s=stats.tokens_per_s,
        acceptance_length=stats.acceptance_length,
        ms_per_sweep=stats.ms_per_sweep,
        time_to_first_token_s=stats.time_to_first_token_s,
        sweeps=len(stats.sweeps),
        prompt_tokens=stats.prompt_tokens,
        reused_tokens=stats.reused_tokens,
        numeric_class=stats.numeric_class,
        reproducible=stats.reproducible,
        parts=parts_of(stats),
    )


@dataclass(frozen=True, slots=True)
class PairedComparison:
    """The first way against the second, pair by pair.

    Attributes:
        same_text: pairs whose answers are equal token for token.
    """

    speedup: Median
    same_text: int
    pairs: int


@dataclass(slots=True)
class Measured:
    """All that was measured, and with what.

    Attributes:
        route: the chain at the beginning.
        skipped: names of prompts that exceed the context.
    """

    model: str
    draft: str
    options: Options
    route: list[str] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    @property
    def comparison(self) -> PairedComparison | None:
        """The two ways that were measured against each other; None if there was one."""
        ours, theirs = (
            {(run.prompt, run.turn): run for run in self.runs if run.way == way} for way in (AS_ASKED, PLAIN)
        )
        pairs = [(ours[key], theirs[key]) for key in ours.keys() & theirs.keys()]
        speedups = ratios([a.tokens_per_s for a, _ in pairs], [b.tokens_per_s for _, b in pairs])
        same = sum(a.tokens == b.tokens for a, b in pairs)
        return PairedComparison(median_of(speedups), same, len(pairs)) if speedups else None

    @property
    def is_wrong(self) -> bool:
        """Whether texts differ although all were reproducible, and computed in one class on processors of one mark."""
        found, promised = self.comparison, {run.numeric_class if run.reproducible else None for run in self.runs}
        return found is not None and found.same_text < found.pairs and len(promised) == 1 and None not in promised

    def to_json(self) -> str:
        found = self.comparison
        return json.dumps({**asdict(self), "comparison": None if found is None else asdict(found)}, indent=2)


def report(measured: Measured) -> Iterator[str | Table]:
    """The report, as lines and tables for a terminal."""
    yield f"{measured.model} through {' → '.join(measured.route)}"
    if measured.skipped:
        yield f"skipped, because they exceed the model's context: {', '.join(dict.fromkeys(measured.skipped))}"
    yield table(measured.runs)
    found = measured.comparison
    if found is not None:
        yield (
            f"as asked against plain decoding: {found.speedup} × as fast, "
            f"median of {found.pairs} pair{'' if found.pairs == 1 else 's'}"
            f"{'' if found.speedup.low is None else ' and its 95 % interval'}; "
            f"same text in {found.same_text} of {found.pairs}"
        )


def table(runs: Sequence[Run]) -> Table:
    shown = Table(title="medians over prompts; acceptance length is a mean")
    for title in ("", "answers", "tokens", "tokens/s", "acceptance length", "ms per sweep", "first token, s"):
        shown.add_column(title, justify="right" if title else "left")
    for way in dict.fromkeys(run.way for run in runs):
        chosen = [run for run in runs if run.way == way]
        shown.add_row(
            way,
            str(len(chosen)),
            str(sum(len(run.tokens) for run in chosen)),
            f"{speed:.1f}" if (speed := median(run.tokens_per_s for run in chosen)) else "–",
            f"{mean(run.acceptance_length for run in chosen):.2f}",
            f"{median(run.ms_per_sweep for run in chosen):.0f}",
            f"{median(run.time_to_first_token_s for run in chosen):.2f}",
        )
    return shown


def points(runs: Sequence[Run]) -> list[Point]:
    """A plot's points: plain decoding and fixed trees by size, then the way that was asked for."""
    found = []
    for way in sorted({run.way for run in runs}, key=lambda way: (way == AS_ASKED, _size(runs, way))):
        chosen = [run for run in runs if run.way == way]
        speed, accepted = (
            median(run.tokens_per_s for run in chosen),
            mean(run.acceptance_length for run in chosen),
        )
        is_chosen = way == AS_ASKED and chosen[0].nodes is None
        found.append(Point("chosen" if is_chosen else str(chosen[0].nodes), speed, accepted))
    return found


def _size(runs: Sequence[Run], way: str) -> int:
    return next(run.nodes or 0 for run in runs if run.way == way)


def usual_parts(runs: Sequence[Run]) -> list[WaterfallStage]:
    """Stages of a sweep, medians over the answers of the way that was asked for."""
    some = [run.parts for run in runs if run.way == AS_ASKED and run.parts]
    usual = max({len(parts) for parts in some}, key=[len(parts) for parts in some].count, default=0)
    alike = [parts for parts in some if len(parts) == usual]
    return [replace(column[0], ms=median(part.ms for part in column)) for column in zip(*alike, strict=True)]
