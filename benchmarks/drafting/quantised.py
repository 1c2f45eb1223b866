"""What do weights in fewer bits change in a model's texts, and what do they take?

In one process on the CPU in float32, a whole model per format, against the same model with float32 weights. Logits are
teacher-forced over held-out passages: divergence, share of tokens with the same argmax, perplexity of the passages.
Texts are greedy, from the first tokens of every second passage. Acceptance length: tokens per sweep with trees of 16 by
the demo's draft, which keeps float32. Memory: the weights' bytes by arithmetic, as a share of bfloat16's; and what the
process grew by, where a model is large enough for that to tell.

    python -m benchmarks quantised --prompts 4
    python -m benchmarks quantised --also FOLDER        # rows of another model, without a draft
    python -m benchmarks quantised --also FOLDER --shift 16     # and of the same one with its channels rolled: for a
                                                        # folder whose weights were in groups of 32 before
"""

from __future__ import annotations

import gc
import json
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Final

import psutil
import torch
import tyro
from rich.console import Console
from rich.progress import track
from tokenizers import Tokenizer

from benchmarks.drafting.rolled_channels import rolled
from benchmarks.sheet import Recording, Sheet
from benchmarks.simulation.acceptance import Size, generate
from client.draft.drafter import ModelDrafter, NoDrafter
from node.model.checkpoint import open_checkpoint
from node.model.malloc_trim import trim_heap
from node.model.packed_span import load_packed
from node.model.span import SpanModel, dissect
from swarm.base.cli import make_console
from swarm.base.ids import TreeNodeId
from swarm.base.layers import Span
from swarm.base.library_logging import quiet_libraries
from swarm.compute.kv_cache import KvCache
from swarm.compute.ragged_batch import SessionRows, load_whole
from swarm.compute.weights.format import BITS, WeightFormat, WeightsName
from swarm.demo import DRAFT, PASSAGES, TARGET
from swarm.protocol.messages import Sampling

CPU: Final = torch.device("cpu")
TREE: Final = 16
LARGE_MIB: Final = 128
"""Where weights take less in bfloat16, what the process held before hides them."""
PROMPT_TOKENS: Final = 64
PASSAGE_TOKENS: Final = 128
Cases = tuple[list[list[int]], list[list[int]]]
"""Passages and prompts."""


@dataclass(frozen=True, slots=True)
class Options(Recording):
    """Measure weight formats."""

    prompts: int = 24
    """How many texts, and twice as many passages."""
    new_tokens: int = 48
    """New tokens of each text."""
    also: Path | None = None
    """A folder with another model, measured with half of the passages and a sixth of the texts."""
    shift: int = 0
    """By how much to roll the channels of that model, a Llama, in a second series of rows."""
    threads: int = 1
    """Threads of torch."""


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """What a model does with one format.

    Attributes:
        memory_bytes: What the process grew by when it was loaded.
        log_probs: Of each passage: [tokens, vocab].
        texts: Greedy, without a tree.
        tree_texts: With a tree; empty without a draft.
        acceptance: Tokens per sweep; None without a draft.
    """

    weight_bytes: int
    memory_bytes: int
    log_probs: list[torch.Tensor]
    texts: list[tuple[int, ...]]
    tree_texts: list[tuple[int, ...]]
    acceptance: float | None


@dataclass(frozen=True, slots=True)
class FormatEffect:
    """What a format changes in a model, against float32.

    Attributes:
        of_bf16: The weights' bytes as a share of bfloat16's.
        bf16_mib: The weights in bfloat16, in MiB.
        memory_mib: What the process grew by, in MiB.
        kl: Mean divergence per token, in nats.
        argmax: Share of tokens with the same argmax.
        perplexity: Of the passages.
        of_float32: The same as a multiple of float32's.
        equal_tokens: Share of equal tokens at equal places of greedy texts.
        same_text: Texts that are float32's.
        tree_text: Texts that trees leave as plain decoding in the same format makes them; None without a draft.
        acceptance: Tokens per sweep; None without a draft.
    """

    model: str
    weights: str
    of_bf16: float
    bf16_mib: float
    memory_mib: float
    kl: float
    argmax: float
    perplexity: float
    of_float32: float
    equal_tokens: float
    same_text: int
    tree_text: int | None
    texts: int
    acceptance: float | None


def held_bytes() -> int:
    """What the process holds of the machine's memory."""
    gc.collect()
    trim_heap()
    return int(psutil.Process().memory_info().rss)


def load(folder: Path, weights: WeightsName) -> SpanModel:
    """A whole model in a format."""
    checkpoint = open_checkpoint(folder)
    span = Span(0, dissect(checkpoint.config).num_layers)
    return load_packed(checkpoint, span, WeightFormat.of(weights, torch.float32, CPU), CPU)


def log_probs(model: SpanModel, ids: Sequence[int]) -> torch.Tensor:
    """After every token of a passage: [tokens, vocab]."""
    nodes = [TreeNodeId(number) for number in range(len(ids))]
    work = SessionRows(KvCache(model.layout, len(ids)), nodes, [None, *nodes[:-1]], range(len(ids)), torch.tensor(ids))
    return model.logits(model.forward([work])).log_softmax(-1)


def run(
    load_model: Callable[[], SpanModel],
    cases: tuple[list[list[int]], list[list[int]]],
    new_tokens: int,
    *,
    drafts: bool,
) -> ModelOutput:
    """Everything that is compared of one model in one format.

    Args:
        cases: passages and prompts, as ids.
        drafts: whether the demo's draft is one for it.
    """
    before = held_bytes()
    model = load_model()
    grown = held_bytes() - before
    passages, prompts = cases
    plain = [generate(model, NoDrafter(), ids, Sampling(), Size(new_tokens, 0)).tokens for ids in prompts]
    runs = []
    if drafts:
        draft = load_whole(DRAFT, torch.float32)
        drafter = ModelDrafter(draft, model.vocab_size, draft.max_positions or 2048)
        runs = [generate(model, drafter, ids, Sampling(), Size(new_tokens, TREE)) for ids in prompts]
    return ModelOutput(
        weight_bytes=model.weight_bytes,
        memory_bytes=grown,
        log_probs=[log_probs(model, ids) for ids in passages],
        texts=plain,
        tree_texts=[one.tokens for one in runs],
        acceptance=mean(one.emitted / one.sweeps for one in runs) if runs else None,
    )


def cases_of(folder: Path, passages: int, prompts: int) -> Cases:
    """Passages and prompts of the held-out text, by the model's own tokenizer."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    lines = PASSAGES.read_text(encoding="utf-8").splitlines()[:passages]
    ids = [tokenizer.encode(json.loads(line)["text"]).ids for line in lines]
    return [one[:PASSAGE_TOKENS] for one in ids], [one[:PROMPT_TOKENS] for one in ids[::2]][:prompts]


def effect_of(
    about: tuple[str, str, int], passages: list[list[int]], plain: ModelOutput, ours: ModelOutput
) -> FormatEffect:
    """How a format differs from float32.

    Args:
        about: the model's name, the format's, and how many weights the model has.
        plain: with float32 weights.
    """
    kl, same, own, rise = [], [], [], []
    for ids, theirs, mine in zip(passages, plain.log_probs, ours.log_probs, strict=True):
        kl += (theirs.exp() * (theirs - mine)).sum(-1).tolist()
        same += (theirs.argmax(-1) == mine.argmax(-1)).tolist()
        following = torch.tensor(ids[1:])[:, None]
        own += (-mine[:-1].gather(-1, following))[:, 0].tolist()
        rise += (theirs[:-1].gather(-1, following) - mine[:-1].gather(-1, following))[:, 0].tolist()
    tokens = [pair for texts in zip(plain.texts, ours.texts, strict=True) for pair in zip(*texts, strict=True)]
    pairs = list(zip(plain.texts, ours.texts, strict=True))
    trees = list(zip(ours.tree_texts, ours.texts, strict=bool(ours.tree_texts)))
    name, weights, count = about
    return FormatEffect(
        model=name,
        weights=weights,
        of_bf16=ours.weight_bytes / (2 * count),
        bf16_mib=2 * count / 2**20,
        memory_mib=ours.memory_bytes / 2**20,
        kl=mean(kl),
        argmax=mean(same),
        perplexity=math.exp(mean(own)),
        of_float32=math.exp(mean(rise)),
        equal_tokens=mean(old == new for old, new in tokens),
        same_text=sum(old == new for old, new in pairs),
        tree_text=sum(tree == text for tree, text in trees) if trees else None,
        texts=len(pairs),
        acceptance=ours.acceptance,
    )


def measure(folder: Path, cases: Cases, new_tokens: int, console: Console) -> list[FormatEffect]:
    count = sum(dissect(open_checkpoint(folder).config).weights.values())
    load(folder, "int8")  # what is made once, such as scratch memory, is no format's
    outputs: dict[WeightsName, ModelOutput] = {}
    for weights in track(BITS, f"{folder.name}: formats", console=console):
        outputs[weights] = run(lambda: load(folder, weights), cases, new_tokens, drafts=folder == TARGET)  # noqa: B023 - called at once
    return [
        effect_of((folder.name, weights, count), cases[0], outputs["auto"], ours) for weights, ours in outputs.items()
    ]


def make_sheet(changes: Sequence[FormatEffect], options: Options) -> Sheet:
    sheet = Sheet(
        "quantised",
        "Weights in fewer bits, on a CPU in float32, against float32 weights",
        (
            *("model, weights", "of bf16", "MiB grown", "KL, nats", "same argmax"),
            *("perplexity", "of float32's", "equal tokens", "same text"),
            *("tree = plain", "tokens per sweep"),
        ),
    )
    for one in changes:
        trees = "–" if one.tree_text is None else f"{one.tree_text} of {one.texts}"
        sheet.rows.append(
            (
                f"{one.model}, {'float32' if one.weights == 'auto' else one.weights}",
                f"{one.of_bf16:.3f}",
                f"{one.memory_mib:.1f}" if one.bf16_mib >= LARGE_MIB else "–",
                f"{one.kl:.1e}",
                f"{one.argmax:.2%}",
                f"{one.perplexity:.2f}",
                f"{one.of_float32:.3f}",
                f"{one.equal_tokens:.1%}",
                f"{one.same_text} of {one.texts}",
                trees,
                "–" if one.acceptance is None else f"{one.acceptance:.2f}",
            )
        )
    also = None if options.also is None else options.also.name
    sheet.measured = {"options": asdict(options) | {"also": also}, "changes": [asdict(one) for one in changes]}
    return sheet


def main() -> None:
    options = tyro.cli(Options)
    torch.set_num_threads(options.threads)
    quiet_libraries()
    console = make_console()
    cases = cases_of(TARGET, 2 * options.prompts, options.prompts)
    changes = measure(TARGET, cases, options.new_tokens, console)
    if options.also is not None:
        cases = cases_of(options.also, options.prompts, max(1, options.prompts // 6))
        changes += measure(options.also, cases, options.new_tokens, console)
        if options.shift:
            with tempfile.TemporaryDirectory() as made:
                changes += measure(rolled(options.also, options.shift, Path(made)), cases, options.new_tokens, console)
    make_sheet(changes, options).finish(console, options)
