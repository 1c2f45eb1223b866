"""What does each drafter get accepted, alone and with others, and what does it cost?

    texts       the target's own text and hidden rows, made once per prompt
    following   a drafter grows its tree at the pending token, and the text goes on as far as it is in the tree

A drafter learns from the picks along the text, as a client would; picks off the text, which a client also gets, are
not taught. Draft times are CPU times of the one thread that drafts. Tokens/s: the real decode loop and controller in
virtual time (`benchmarks.simulation.chain`), in which drafting takes as long as it took.

    python -m benchmarks drafters --record
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from statistics import mean, median

import torch
import tyro
from rich.console import Console
from rich.progress import track
from transformers import AutoTokenizer

from benchmarks.control.replay import ReplaySetup, replay_text
from benchmarks.sheet import Recording, Sheet
from benchmarks.simulation.acceptance import Size, generate
from benchmarks.simulation.chain import Costs
from benchmarks.simulation.clock import Clock
from benchmarks.simulation.recorded import KINDS, RecordedText, picks_of, prompts_of
from client.decode.goodput import Goodput
from client.decode.policy import FixedPolicy, SpeculationPolicy
from client.draft.drafter import MAX_LEVELS, NO_PICKS, NoDrafter, TreeDrafter
from client.draft.heads.files import load_head, read_head_config
from client.draft.search.calibration import Calibration
from client.draft.search.ranking import Ranker
from client.draft.search.source import Source
from client.draft.search.tree import NO_LIMIT, DraftTree, Picks, StopRule
from client.draft.sources.lookup import Lookup, LookupSource
from client.draft.sources.model import LocalSession, ModelSource
from client.draft.sources.recurrent import DgfSource, ReDrafterSource
from client.library.jobs import MAX_NODES
from swarm.base.cli import make_console
from swarm.base.ids import TreeNodeId
from swarm.compute.ragged_batch import RaggedModel, load_whole
from swarm.demo import DGF, DRAFT, REDRAFTER, TARGET
from swarm.protocol.messages import Sampling
from swarm.protocol.session import Limits

PROFILE = Costs(25, 100)
SIZES = (16, 64)
FIRST_SEED = 11
WAYS = {
    "look-up": ("look-up",),
    "2-layer draft": ("draft",),
    "ReDrafter": ("redrafter",),
    "DGF": ("dgf",),
    "draft + look-up": ("look-up", "draft"),
    "ReDrafter + look-up": ("look-up", "redrafter"),
    "DGF + look-up": ("look-up", "dgf"),
    "DGF + ReDrafter": ("dgf", "redrafter"),
    "draft + ReDrafter": ("draft", "redrafter"),
    "all": ("look-up", "draft", "redrafter", "dgf"),
}
DEVICES = {
    "a target for which a node costs little (60 ms + 0.1 ms per node)": Costs(1, 1_000, 20, 0.03),
    "a target for which it costs much (60 ms + 12 ms per node)": Costs(1, 1_000, 20, 4.0),
}
"""Three hops on one fast network; virtual."""
RANKED = {"coupled": ("draft",), "by probability": ("draft by probability",)}


@dataclass(frozen=True, slots=True)
class Options(Recording):
    """Measure the drafters."""

    prompts: int = 3
    """Of each kind of text."""
    new_tokens: int = 64
    """New tokens of each text."""
    ranked_prompts: int = 6
    """Passages on which the two rankings are compared."""


@dataclass(frozen=True, slots=True)
class TargetText:
    """One text of the target.

    Attributes:
        tokens: The prompt and what followed it.
        rows: Hidden rows: [tokens, width].
    """

    prompt: int
    tokens: tuple[int, ...]
    sampling: Sampling
    rows: torch.Tensor


@dataclass(frozen=True, slots=True)
class DrafterScore:
    """What a drafter made of some texts.

    Attributes:
        acceptance: Tokens per sweep.
        draft_ms: Milliseconds of drafting per sweep.
    """

    acceptance: float
    draft_ms: float


class TimedDrafter:
    """A real drafter in virtual time, which has the hidden row that the reply before would have brought."""

    def __init__(self, drafter: TreeDrafter, target_text: TargetText, clock: Clock) -> None:
        self._drafter = drafter
        self._told = target_text
        self._clock = clock

    def grow(
        self, sequence: Sequence[int], nodes: int, depth: int, sampling: Sampling, worth: StopRule = NO_LIMIT
    ) -> DraftTree:
        """What the drafter grows; the clock moves on by what that took."""
        known = len(sequence) - 1
        if known >= self._told.prompt:
            self._drafter.observe(sequence[:known], self._told.rows[known - 1 : known])
        started = time.thread_time()
        tree = self._drafter.grow(sequence, nodes, depth, sampling, worth)
        self._clock.wait((time.thread_time() - started) * 1e3)
        return tree

    def learn(self, tree: DraftTree, picks: Picks, others: Picks = NO_PICKS) -> None:
        """While the next sweep is away, so it takes no time; what a virtual chain picks off the text is no pick."""
        self._drafter.learn(tree, picks)


class DrafterFactory:
    """The models, loaded once, and the sources made of them, each of which begins knowing nothing."""

    def __init__(self) -> None:
        self.target, self._draft = load_whole(TARGET, torch.float32), load_whole(DRAFT, torch.float32)
        self._heads = {}
        for name, folder in (("redrafter", REDRAFTER), ("dgf", DGF)):
            config = read_head_config(folder)
            assert config is not None, "it comes with the demo"
            self._heads[name] = load_head(folder, config, TARGET)

    def drafter(self, names: Sequence[str]) -> TreeDrafter:
        vocab, window = self.target.vocab_size, self._draft.max_positions or 2048

        def ranker(*, coupled: bool = True) -> Ranker:
            return Ranker(vocab, Calibration(), coupled=coupled)

        made: dict[str, Callable[[], Source]] = {
            "look-up": lambda: LookupSource(Lookup()),
            "draft": lambda: ModelSource(self._draft, vocab, window, ranker=ranker()),
            "draft by probability": lambda: ModelSource(self._draft, vocab, window, ranker=ranker(coupled=False)),
            "redrafter": lambda: ReDrafterSource(self._heads["redrafter"], ranker()),
            "dgf": lambda: DgfSource(self._heads["dgf"], ranker()),
        }
        return TreeDrafter([made[name]() for name in names])


def text_of(target: RaggedModel, prompt: Sequence[int], sampling: Sampling, new_tokens: int) -> TargetText:
    """The target's text and its hidden rows."""
    plain = generate(target, NoDrafter(), list(prompt), sampling, Size(new_tokens, 0))
    tokens = (*prompt, *plain.tokens)
    session = LocalSession(target, Limits(target.vocab_size, len(tokens), sweeps=1, nodes=len(tokens)))
    chain = [None, *(TreeNodeId(place) for place in range(len(tokens) - 1))]
    return TargetText(len(prompt), tokens, sampling, session.run(session.next(tokens, chain)))


def follow(drafter: TreeDrafter, texts: Sequence[TargetText], nodes: int) -> DrafterScore:
    """Let a drafter guess along the texts, one after the other."""
    lengths, spent_ms = [], []
    for target_text in texts:
        length, before, sweeps = target_text.prompt + 1, target_text.prompt + 1, 0
        while length < len(target_text.tokens):
            started = time.thread_time()
            tree = drafter.grow(target_text.tokens[:length], nodes, MAX_LEVELS, target_text.sampling)
            spent_ms.append((time.thread_time() - started) * 1e3)
            picks = picks_of(tree, target_text.tokens, length)
            drafter.learn(tree, picks)
            after = min(length + len(picks), len(target_text.tokens))
            drafter.observe(target_text.tokens[: after - 1], target_text.rows[length - 1 : after - 1])
            length, sweeps = after, sweeps + 1
        lengths.append((length - before) / sweeps)
    return DrafterScore(mean(lengths), mean(spent_ms))


def replay(
    drafter: TreeDrafter,
    texts: Sequence[TargetText],
    tokenizer: object,
    costs: Costs = PROFILE,
    policy: SpeculationPolicy | None = None,
) -> tuple[float, float]:
    """Tokens per virtual second, and the median tree; a controller that begins knowing nothing chooses by default."""
    policy = policy or Goodput(MAX_NODES)
    tokens, seconds = 0, 0.0
    sizes: list[int] = []
    for target_text in texts:
        recorded = RecordedText(target_text.tokens[: target_text.prompt], target_text.tokens, target_text.sampling, {})
        setup = ReplaySetup(partial(TimedDrafter, drafter, target_text))
        count, took_s, used = asyncio.run(replay_text(recorded, costs, policy, tokenizer, setup))
        tokens, seconds, sizes = tokens + count, seconds + took_s, sizes + used
    return tokens / seconds, median(sizes)


def sheet(shop: DrafterFactory, options: Options, console: Console) -> Sheet:
    made = Sheet(
        "drafters",
        "Drafters of the demo target: tokens per sweep, and what drafting costs",
        (
            *("text, T, drafter", "K = 16", "draft ms", "per draft ms", "K = 64", "draft ms", "per draft ms"),
            *("tokens/s at 25 ms", "median K"),
        ),
    )
    cells: list[dict[str, object]] = []
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    cases = list(product(KINDS, (0.0, 1.0)))
    for kind, temperature in track(cases, "texts", console=console):
        texts = _texts(shop, kind, temperature, options.prompts, options.new_tokens)
        for way, names in WAYS.items():
            found = {size: follow(shop.drafter(names), texts, size) for size in SIZES}
            per_s, chosen = replay(shop.drafter(names), texts, tokenizer)
            shown = [text for size in SIZES for text in _shown(found[size])]
            name = f"{kind}, {temperature:g}, {way}"
            made.rows.append((name, *shown, f"{per_s:.1f}", f"{chosen:g}"))
            cells += [
                {"kind": kind, "temperature": temperature, "way": way, "nodes": size}
                | {"acceptance": one.acceptance, "draft_ms": one.draft_ms, "tokens_per_s": per_s, "chosen": chosen}
                for size, one in found.items()
            ]
    made.measured = {"cells": cells}
    made.notes.append(
        f"{options.prompts} prompts of each kind, {options.new_tokens} new tokens; per draft ms: tokens gained over "
        f"plain decoding; plain decoding: {1e3 / PROFILE.plain_ms():.1f} tokens/s in the 25 ms profile. Draft times "
        "are CPU time of one thread. Calibrations begin empty in every cell."
    )
    return made


def ranked(shop: DrafterFactory, options: Options, made: Sheet, console: Console) -> None:
    """SpecExec's ranking, by draft probability, against the coupled one."""
    gains = []
    for temperature in track((0.6, 1.0), "rankings", console=console):
        texts = _texts(shop, "passages", temperature, options.ranked_prompts, options.new_tokens)
        for size in SIZES:
            found = {way: follow(shop.drafter(names), texts, size).acceptance for way, names in RANKED.items()}
            coupled, plain = found["coupled"], found["by probability"]
            gains.append({"temperature": temperature, "nodes": size, **found})
            made.notes.append(
                f"Ranking at temperature {temperature:g}, K = {size}: by probability (SpecExec) {plain:.2f}, coupled "
                f"{coupled:.2f}: {coupled / plain:.2f} times as many tokens per sweep."
            )
    made.measured["rankings"] = gains


def heterogeneous(shop: DrafterFactory, options: Options, made: Sheet, console: Console) -> None:
    """Dovetail's setting: the draft is quick and the target verifies where every node costs much."""
    texts = _texts(shop, "passages", 0.0, options.prompts, options.new_tokens)
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    for name, costs in track(DEVICES.items(), "devices", console=console):
        plain, _ = replay(shop.drafter(("dgf",)), texts, tokenizer, costs, FixedPolicy(0))
        fixed, _ = replay(shop.drafter(("dgf",)), texts, tokenizer, costs, FixedPolicy(64))
        chosen, nodes = replay(shop.drafter(("dgf",)), texts, tokenizer, costs)
        made.notes.append(
            f"DGF, {name}: the controller's median tree has {nodes:g} nodes: {chosen:.1f} tokens/s, with K = 64 "
            f"{fixed:.1f}, plain {plain:.1f}."
        )
        found = {"devices": name, "nodes": nodes, "chosen": chosen, "fixed": fixed, "plain": plain}
        made.measured.setdefault("devices", []).append(found)


def _shown(found: DrafterScore) -> tuple[str, str, str]:
    gained = (found.acceptance - 1) / max(found.draft_ms, 1e-3)
    return f"{found.acceptance:.2f}", f"{found.draft_ms:.1f}", f"{gained:.3f}"


def _texts(shop: DrafterFactory, kind: str, temperature: float, count: int, new_tokens: int) -> list[TargetText]:
    prompts = prompts_of(kind, count)
    samplings = [Sampling(FIRST_SEED + place, temperature) for place in range(len(prompts))]
    return [text_of(shop.target, *case, new_tokens) for case in zip(prompts, samplings, strict=True)]


def main() -> None:
    options = tyro.cli(Options)
    torch.set_num_threads(1)
    console = make_console()
    shop = DrafterFactory()
    made = sheet(shop, options, console)
    ranked(shop, options, made, console)
    heterogeneous(shop, options, made, console)
    made.finish(console, options)
