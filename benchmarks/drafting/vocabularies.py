"""What does a draft bring whose vocabulary is not the target's?

In one process. The demo draft gets other tokenizers, trained on the passages, and for each of their tokens the mean of
the embedding rows that its text had: so it knows the same, in other tokens. The text is compared with plain decoding's.

    python -m benchmarks vocabularies --record --also FOLDER

`--also` adds a target of another tokenizer, for which the demo draft drafts as it is.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean

import torch
import tyro
from rich.progress import track

from benchmarks.drafting.other_tokenizers import byte_level, metaspace, passages, save_speaking
from benchmarks.sheet import Recording, Sheet
from benchmarks.simulation.acceptance import Size, generate
from client.base.target import Target, load_target
from client.draft.drafter import NoDrafter, TreeDrafter
from client.draft.search.calibration import Calibration
from client.draft.search.ranking import Ranker
from client.draft.sources.model import ModelSource
from client.draft.vocabulary.matching import ModelVocabulary, SharedVocabulary, match_vocabularies
from swarm.base.cli import make_console
from swarm.base.library_logging import quiet_libraries
from swarm.compute.ragged_batch import RaggedModel, load_whole
from swarm.demo import DRAFT, TARGET
from swarm.protocol.messages import Sampling

TEMPERATURES = (0.0, 1.0)
FIRST_SEED = 11
PROMPT_TOKENS = 96
FEW_ROWS = 3_000


@dataclass(frozen=True, slots=True)
class Options(Recording):
    """Measure drafts of other vocabularies."""

    prompts: int = 8
    """How many passages; every second one."""
    new_tokens: int = 48
    """New tokens of each text."""
    nodes: int = 16
    """Tree nodes per sweep (K)."""
    also: Path | None = None
    """A further target, for which the demo draft drafts."""
    also_prompts: int = 4
    """How many passages for that one."""
    threads: int = 1
    """Threads of torch."""


@dataclass(frozen=True, slots=True)
class Pair:
    name: str
    model: RaggedModel
    shared: SharedVocabulary


@dataclass(frozen=True, slots=True)
class VocabularyScore:
    """What one draft brought at one temperature."""

    name: str
    temperature: float
    shared: int
    known: int
    tokens_per_sweep: float
    same_text: int
    texts: int


def demo_pairs(target: Target, folder: Path) -> Iterator[Pair]:
    """The demo target with drafts of other vocabularies, which are saved in a folder."""
    ours, demo = ModelVocabulary(target.tokenizer, target.vocab_size), load_whole(DRAFT, torch.float32)
    yield Pair("the target's tokenizer", demo, match_vocabularies(ours, ours))
    few = ModelVocabulary(target.tokenizer, FEW_ROWS)
    yield Pair(f"the target's, {FEW_ROWS:,} rows", demo, match_vocabularies(ours, few))
    for make, size in ((byte_level, 3_000), (byte_level, 1_500), (metaspace, 3_000), (metaspace, 1_500)):
        tokenizer = make(passages(), size)
        model = load_whole(save_speaking(tokenizer, folder / f"{make.__name__}-{size}"), torch.float32)
        name = f"{make.__name__.replace('_', '-')}, {len(tokenizer):,} tokens"
        yield Pair(name, model, match_vocabularies(ours, ModelVocabulary(tokenizer, model.vocab_size)))


def measure(target: RaggedModel, known: Target, pair: Pair, options: Options, count: int) -> Iterator[VocabularyScore]:
    """One draft at each temperature; it begins with nothing learned."""
    prompts = [known.tokenizer.encode(text)[:PROMPT_TOKENS] for text in passages()[::2][:count]]
    for temperature in TEMPERATURES:
        ranker = Ranker(pair.shared.vocab_tokens, Calibration())
        window = PROMPT_TOKENS + options.new_tokens + 256
        drafter = TreeDrafter([ModelSource(pair.model, pair.shared, window, ranker, adapt=True)])
        lengths, same = [], 0
        for number, prompt in enumerate(prompts):
            sampling = Sampling(seed=FIRST_SEED + number, temperature=temperature)
            run = generate(target, drafter, prompt, sampling, Size(options.new_tokens, options.nodes))
            plain = generate(target, NoDrafter(), prompt, sampling, Size(options.new_tokens, 0))
            lengths.append(run.emitted / run.sweeps)
            same += run.tokens == plain.tokens
        shared = pair.shared
        yield VocabularyScore(pair.name, temperature, shared.shared, shared.known, mean(lengths), same, len(prompts))


def sheet(scores: list[VocabularyScore], options: Options) -> Sheet:
    made = Sheet(
        "vocabularies",
        f"Drafts of other vocabularies: tokens per sweep, K = {options.nodes}",
        ("target, the draft's tokenizer", "tokens shared", *(f"T = {one:g}" for one in TEMPERATURES), "same text"),
        measured={"scores": [asdict(score) for score in scores]},
    )
    for first in range(0, len(scores), len(TEMPERATURES)):
        row = scores[first : first + len(TEMPERATURES)]
        same, texts = sum(score.same_text for score in row), sum(score.texts for score in row)
        lengths = (f"{score.tokens_per_sweep:.2f}" for score in row)
        shared = f"{row[0].shared:,} of {row[0].known:,}"
        made.rows.append((row[0].name, shared, *lengths, f"{same} of {texts}"))
    return made


def main() -> None:
    """Measure, print, and fail if any text differs from plain decoding's."""
    options = tyro.cli(Options)
    torch.set_num_threads(options.threads)
    quiet_libraries()
    console, scores = make_console(), list[VocabularyScore]()
    known, target = load_target(TARGET), load_whole(TARGET, torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        for pair in track(list(demo_pairs(known, Path(folder))), "demo target", console=console):
            named = Pair(f"demo, {pair.name}", pair.model, pair.shared)
            scores += measure(target, known, named, options, options.prompts)
    if options.also is not None:
        other, model, draft = load_target(options.also), load_whole(options.also, torch.float32), load_target(DRAFT)
        small = load_whole(DRAFT, torch.float32)
        ours, theirs = (
            ModelVocabulary(other.tokenizer, model.vocab_size),
            ModelVocabulary(draft.tokenizer, small.vocab_size),
        )
        pair = Pair(f"{options.also.name}, the demo draft's", small, match_vocabularies(ours, theirs))
        scores += measure(model, other, pair, options, options.also_prompts)
    sheet(scores, options).finish(console, options)
    if any(score.same_text < score.texts for score in scores):
        sys.exit("vocabularies: a text differs from plain decoding's")
