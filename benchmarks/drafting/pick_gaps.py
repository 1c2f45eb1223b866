"""How far below the best score may an honest pick lie?

In one process, on the bundled demo target or another model. Final rows of passages are computed once. A tail picks from
them in sweeps of 33 rows; a checker repeats each pick from the same row, alone, on other threads, by other products. In
coarser types it also computes in fp32: two honest machines lie at most twice as far apart as one from that.

    python -m benchmarks pick_gaps --gguf FILE --record     # the target, and a file that is multiplied as it is
    python -m benchmarks pick_gaps --model FOLDER

Then the sequential test of routes: how often it doubts an honest one, and after how many picks another model.
"""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import tyro
from rich.console import Console
from rich.progress import track
from tokenizers import Tokenizer

from benchmarks.sheet import Recording, Sheet
from client.chain.doubts import Doubts
from client.draft.heads.output_head import OutputHead, load_output_head
from client.draft.sources.model import LocalSession
from node.model.in_class import load_in_class
from swarm.base.cli import make_console
from swarm.base.ids import TreeNodeId
from swarm.compute.ragged_batch import RaggedModel, load_whole
from swarm.compute.sampling import pick
from swarm.demo import PASSAGES, TARGET
from swarm.files.hub import find_model
from swarm.protocol.messages import Sampling
from swarm.protocol.numeric_class import NumericClass
from swarm.protocol.session import Limits, Parent
from swarm.trust.pick_gaps import NamedPicks, bound_of, pick_gaps

SWEEP = 33
TEMPERATURES = 0.0, 0.7, 1.0
CLASSES = "float32", "bfloat16", "float16", "float32+w8", "bfloat16+w8", "bfloat16+w4z"
OF_FILES = ("bfloat16-k2+gguf",)
DOUBTED = 1_000_000
"""Picks of an honest route."""


@dataclass(frozen=True, slots=True)
class Options(Recording):
    """Measure gaps of picks."""

    model: Path = TARGET
    """Folder of the target."""
    gguf: Path | None = None
    """A file of integers, for whose products a CPU has a class of its own; needs one that computes in bfloat16."""
    passages: int = 12
    """How many passages."""
    tokens: int = 160
    """Of each, at most."""


@contextmanager
def without_onednn() -> Iterator[None]:
    with torch.backends.mkldnn.flags(enabled=False):
        yield


@contextmanager
def two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    try:
        yield
    finally:
        torch.set_num_threads(1)


def final_rows(target: RaggedModel, text: Sequence[int]) -> torch.Tensor:
    """Of the last layer, after every token of a text, in sweeps: [n, width]."""
    session = LocalSession(target, Limits(target.vocab_size, len(text), 1, SWEEP))
    last: Parent = None
    found: list[torch.Tensor] = []
    for start in range(0, len(text), SWEEP):
        tokens, first = text[start : start + SWEEP], session.state.next_id
        chain: list[Parent] = [None, *(TreeNodeId(first + place) for place in range(len(tokens) - 1))]
        found.append(session.run(session.next(tokens, chain, commit_to=last)))
        last = TreeNodeId(first + len(tokens) - 1)
    return torch.cat(found)


def in_sweeps(head: OutputHead | RaggedModel, rows: torch.Tensor) -> torch.Tensor:
    return torch.cat([head.logits(piece) for piece in torch.split(rows, SWEEP)])


def one_by_one(head: OutputHead, rows: torch.Tensor) -> torch.Tensor:
    return torch.cat([head.logits(row[None]) for row in rows])


def within(context: Callable[[], object]) -> Callable[[OutputHead, torch.Tensor], torch.Tensor]:
    def computed(head: OutputHead, rows: torch.Tensor) -> torch.Tensor:
        with context():  # type: ignore[attr-defined]
            return in_sweeps(head, rows)

    return computed


CHECKERS = {"alone": one_by_one, "oneDNN off": within(without_onednn), "2 threads": within(two_threads)}


def alarms(less: float, picks: int, rng: random.Random) -> list[int]:
    """After how many picks each alarm came, where log-odds are so much less than a calibration says."""
    doubts, found, was = Doubts(), [], False
    for number in range(picks):
        said = rng.betavariate(2.0, 1.2)
        odds = math.log(said / (1 - said)) - less
        doubts.note(("tail",), said, is_picked=rng.random() < 1 / (1 + math.exp(-odds)))
        is_one = doubts.of("tail") == 1.0
        if is_one and not was:
            found.append(number + 1)
        was = is_one
    return found


def tail_of(model: Path, kind: str) -> RaggedModel:
    """As a node of that class loads it; a CPU's node refuses float16, which is here for what cards round."""
    return load_whole(model, torch.float16) if kind == "float16" else load_in_class(str(model), f"cpu-{kind}")


def head_of(model: Path, kind: str) -> OutputHead:
    found = NumericClass.parse(f"cpu-{kind}")
    assert found is not None
    return load_output_head(model, None, found)


def measure(made: Sheet, model: Path, kinds: Sequence[str], options: Options, console: Console) -> None:
    """Add a model's gaps in some classes."""
    tokenizer = Tokenizer.from_file(str(find_model(model)[0] / "tokenizer.json"))
    lines = PASSAGES.read_text(encoding="utf-8").splitlines()[: options.passages]
    texts = [tokenizer.encode(json.loads(line)["text"]).ids[: options.tokens] for line in lines]
    valid = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    for kind in kinds:
        bound = bound_of(f"cpu-{kind}")
        assert bound is not None
        target, head = tail_of(model, kind), head_of(model, kind)
        checkers = {label: (head, by) for label, by in CHECKERS.items()}
        if not kind.startswith("float32"):
            checkers["fp32"] = (head_of(model, re.sub("b?float16(-k2)?", "float32", kind)), in_sweeps)
        found: dict[str, list[float]] = {label: [] for label in checkers}
        for number, text in enumerate(track(texts, kind, console=console)):
            rows = final_rows(target, text)
            said = in_sweeps(target, rows)
            logits = {label: by(of, rows) for label, (of, by) in checkers.items()}
            for temperature in TEMPERATURES:
                sampling = Sampling(number, temperature)
                picks = pick(said, range(1, len(rows) + 1), sampling, valid)
                named = NamedPicks([0, *picks], range(len(picks)), sampling, valid)  # as if each followed the other
                for label in checkers:
                    found[label] += pick_gaps(logits[label].clone(), named, bound)
        for label, gaps in found.items():
            turned, largest = sum(gap > 0 for gap in gaps), max(max(gaps), 0.0)
            made.rows.append((kind, label, f"{len(gaps):,}", f"{turned}", f"{largest:.2g}", f"{bound:g}"))
            made.measured[f"{kind}, {label}"] = {"picks": len(gaps), "turned": turned, "largest": largest}


def main() -> None:
    options = tyro.cli(Options)
    torch.set_num_threads(1)
    console = make_console()
    files = f"; {', '.join(OF_FILES)}: {options.gguf.name}" if options.gguf else ""
    made = Sheet(
        "pick_gaps",
        f"{options.model.name}: picks of a tail, repeated from its final rows{files}",
        ("tail", "checker", "picks", "turned", "largest gap", "bound"),
    )
    measure(made, options.model, CLASSES, options, console)
    if options.gguf is not None:
        measure(made, options.gguf, OF_FILES, options, console)
    rng = random.Random(3)
    for less in (0.0, 0.25, 0.5):
        count = len(alarms(less, DOUBTED, rng))
        made.measured[f"alarms, {less:g} less"] = count
        console.print(f"log-odds {less:g} below the calibration: {count} alarms in {DOUBTED:,} picks")
    for less in (1.5, 2.0, 3.0):
        first = sorted((alarms(less, 3_000, rng) or [3_000])[0] for _ in range(200))
        made.measured[f"named, {less:g} less"] = [median(first), first[197]]
        console.print(f"{less:g} below it: an alarm after {median(first):g} picks, 99 % within {first[197]}")
    made.finish(console, options)


if __name__ == "__main__":
    main()
