"""Methods to generate the same text, measured alike: Canopy plain and with trees, the star, and one machine alone.

Each run is one prompt through one method. Speed is tokens after the first ones, per second after them.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from benchmarks.speed.star import LinearDraft, Star
from client.base.stats import Result
from client.library.aio import AsyncSwarm
from swarm.compute.ragged_batch import load_whole
from swarm.demo import DRAFT, TARGET

TREES = (16, 64)
LINEAR = (4, 10)


@dataclass(frozen=True, slots=True)
class Case:
    """One prompt and how to continue it."""

    prompt: tuple[int, ...]
    temperature: float
    seed: int
    new_tokens: int


@dataclass(frozen=True, slots=True)
class Run:
    """One measured text.

    Attributes:
        tokens: Its new tokens.
        tokens_per_s: Tokens after the first ones, per second after them.
        first_s: Until the first tokens.
        sweep_ms: Of each decode sweep, its draft included; none where several sweeps are in flight.
        acceptance_length: Tokens per sweep.
    """

    tokens: tuple[int, ...]
    tokens_per_s: float
    first_s: float
    total_s: float
    sweep_ms: tuple[float, ...] = ()
    acceptance_length: float | None = None


@dataclass(frozen=True, slots=True)
class Method:
    """One method to generate a text.

    Attributes:
        nodes: Tree nodes per sweep; None where there are no sweeps of ours.
    """

    name: str
    nodes: int | None
    sampled: bool
    run: Callable[[Case], Awaitable[Run]]


def canopy_methods(swarm: AsyncSwarm, sizes: Sequence[int] = TREES) -> list[Method]:
    """Through the swarm: plain decoding, trees of fixed sizes, one at a time, and what the controller chooses."""

    def through(nodes: int | None) -> Callable[[Case], Awaitable[Run]]:
        async def run(case: Case) -> Run:
            result: Result | None = None
            swarm.forget_texts()  # another method generated this very text just now
            async for piece in swarm.stream(
                case.prompt,
                max_new_tokens=case.new_tokens,
                temperature=case.temperature,
                seed=case.seed,
                nodes=nodes,
            ):
                result = piece.result
            assert result is not None, "a stream ends with a result or an error"
            stats = result.stats
            spent = tuple(sweep.draft_ms + sweep.total_ms for sweep in stats.sweeps)
            first_s, total_s = stats.time_to_first_token_s, stats.total_s
            return Run(
                result.tokens,
                stats.tokens_per_s,
                first_s,
                total_s,
                sweep_ms=() if nodes is None else spent,
                acceptance_length=stats.acceptance_length,
            )

        return run

    trees = [Method(f"Canopy, tree of {nodes}", nodes, True, through(nodes)) for nodes in sizes]
    return [Method("Canopy, plain", 0, True, through(0)), *trees, Method("Canopy, chosen", None, True, through(None))]


def star_methods(star: Star) -> list[Method]:
    """Petals' topology, greedy: plain, and with a linear draft."""
    draft = load_whole(DRAFT, torch.float32)

    def through(linear: LinearDraft | None) -> Callable[[Case], Awaitable[Run]]:
        async def run(case: Case) -> Run:
            made = await star.generate(case.prompt, case.new_tokens, linear)
            count = len(made.tokens)
            speed = _speed(count, 1, made.first_s, made.total_s)
            acceptance = (count - 1) / len(made.steps)
            return Run(made.tokens, speed, made.first_s, made.total_s, tuple(made.steps), acceptance)

        return run

    linear = [
        Method(f"star, linear draft of {count}", None, False, through(LinearDraft(draft, count))) for count in LINEAR
    ]
    return [Method("star, plain", None, False, through(None)), *linear]


class _FirstToken(BaseStreamer):
    """Notes when the first new tokens come and how many they are; the first call brings the prompt."""

    def __init__(self) -> None:
        self.calls = 0
        self.first_at = 0.0
        self.first_tokens = 0

    def put(self, value: torch.Tensor) -> None:
        self.calls += 1
        if self.calls == 2:
            self.first_at, self.first_tokens = time.perf_counter(), value.numel()

    def end(self) -> None:
        """Nothing to close."""


def one_machine_methods() -> list[Method]:
    """Hugging Face on one machine with the whole target: `generate`, and assisted by the same draft."""
    target, draft = (_whole(folder) for folder in (TARGET, DRAFT))

    def with_draft(assistant: PreTrainedModel | None) -> Callable[[Case], Awaitable[Run]]:
        async def run(case: Case) -> Run:
            torch.manual_seed(case.seed)
            watch = _FirstToken()
            options: dict[str, Any] = {"do_sample": case.temperature > 0, "max_new_tokens": case.new_tokens}
            if case.temperature > 0:
                options |= {"temperature": case.temperature, "top_k": 0}
            if assistant is not None:
                options |= {"assistant_model": assistant}
            ids = torch.tensor([case.prompt])
            started = time.perf_counter()
            made = cast("Any", target).generate(
                ids, attention_mask=torch.ones_like(ids), streamer=watch, eos_token_id=None, pad_token_id=0, **options
            )
            ended = time.perf_counter()
            tokens = tuple(made[0, len(case.prompt) :].tolist())
            first_s, total_s = watch.first_at - started, ended - started
            return Run(tokens, _speed(len(tokens), watch.first_tokens, first_s, total_s), first_s, total_s)

        return run

    return [
        Method("one machine, HF generate", None, True, with_draft(None)),
        Method("one machine, HF assisted", None, True, with_draft(draft)),
    ]


def _whole(folder: object) -> PreTrainedModel:
    model: PreTrainedModel = cast("Any", AutoModelForCausalLM).from_pretrained(folder, dtype=torch.float32)
    return model


def _speed(tokens: int, first_tokens: int, first_s: float, total_s: float) -> float:
    """Tokens after the first ones, per second after them."""
    later_s = total_s - first_s
    return max(tokens - first_tokens, 0) / later_s if later_s > 0 else 0.0
