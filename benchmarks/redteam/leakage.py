"""What can a machine read out of the hidden rows that pass it?

In one process. Somebody with the model's public weights lets the model write texts, and fits from rows after a layer to
the embeddings of the tokens that they belong to: a ridge regression. Held-out passages that people wrote are then read
from their rows: of each row, the token whose embedding is nearest. The *search* computes the layers itself: it tries
tokens one after the other, likely ones first, until one gives the row.

    python -m benchmarks leakage --record
    python -m benchmarks leakage --model FOLDER
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import tyro
from rich.progress import track
from tokenizers import Tokenizer

from benchmarks.sheet import Recording, Sheet
from swarm.base.cli import make_console
from swarm.base.cli_types import Folder
from swarm.base.ids import TreeNodeId
from swarm.base.layers import Span
from swarm.compute.int8 import pack, unpack
from swarm.compute.kv_cache import KvCache
from swarm.compute.ragged_batch import RaggedModel, SessionRows, load_whole
from swarm.demo import PASSAGES, TARGET

LENGTH = 128
"""Tokens of a text that the model writes."""
RIDGE = 1e-4
"""Of the mean square of a row's values."""
SAME = {"fp32": 1e-4, "bf16": 1e-2, "int8": 3e-2, "noise": 0.6}
"""A candidate whose row is that near, in relation to its size, is taken for the token."""
SEARCHED_ROWS = (16, 64, 256, 512, 512, 512, 512, 512, 512)
"""Candidates of each forward for a token; a token that is not among them is not found."""
TOP = 10


@dataclass(frozen=True, slots=True)
class Options(Recording):
    """Measure what rows tell."""

    model: Folder = TARGET
    """Folder of the model."""
    fitted: int = 160
    """Texts that the model writes."""
    depths: tuple[int, ...] = ()
    """After which layers (default: the first, each third, the last but one)."""
    searched: int = 20
    """Tokens that the search reads, from the start of a passage."""
    threads: int = 1
    """Threads of torch."""


@dataclass(frozen=True, slots=True)
class Probe:
    """A fit from rows to embeddings.

    Attributes:
        weights: [width, width].
        row_mean: [width] of rows of length 1.
        embedding_mean: [width] of embeddings of length 1.
        embeddings: [vocabulary, width], each of length 1.
    """

    weights: torch.Tensor
    row_mean: torch.Tensor
    embedding_mean: torch.Tensor
    embeddings: torch.Tensor

    @classmethod
    def fit(cls, rows: torch.Tensor, ids: torch.Tensor, embeddings: torch.Tensor) -> Probe:
        """From rows [n, width] and their tokens [n]."""
        inputs, outputs, known = unit(rows), unit(embeddings[ids]), unit(embeddings)
        row_mean, embedding_mean = inputs.mean(0), outputs.mean(0)
        centred = (inputs - row_mean).double()
        square, across = centred.T @ centred, centred.T @ (outputs - embedding_mean).double()
        ridge = RIDGE * square.diagonal().mean() * torch.eye(len(square), dtype=torch.float64)
        return cls(torch.linalg.solve(square + ridge, across).float(), row_mean, embedding_mean, known)

    def best(self, rows: torch.Tensor, count: int) -> torch.Tensor:
        """The likeliest tokens [n, count] of rows [n, width], best first."""
        guessed = unit((unit(rows) - self.row_mean) @ self.weights + self.embedding_mean)
        return (guessed @ self.embeddings.T).topk(count, 1).indices


def unit(rows: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(rows, dim=1)


def embeddings_of(model: RaggedModel) -> torch.Tensor:
    """[vocabulary, width]"""
    return next(part for part in model.model.modules() if isinstance(part, torch.nn.Embedding)).weight.detach().float()


class Texts:
    """Texts that grow together in a model's KV, one token each."""

    def __init__(self, model: RaggedModel, count: int, tokens: int) -> None:
        self.model = model
        self.caches = [KvCache(model.layout, tokens) for _ in range(count)]

    def grow(self, ids: torch.Tensor, position: int) -> torch.Tensor:
        """Logits [count, vocabulary] after one more token [count] of each."""
        node = TreeNodeId(position)
        batch = [
            SessionRows(cache, [node], [None], [position], ids[place : place + 1])
            for place, cache in enumerate(self.caches)
        ]
        logits = self.model.logits(self.model.forward(batch))
        for cache in self.caches:
            cache.commit((node,), ())
        return logits


def written(model: RaggedModel, count: int) -> list[torch.Tensor]:
    """Texts that the model writes, each from a token drawn at random: [LENGTH] ids each."""
    generator = torch.Generator().manual_seed(1)
    texts = Texts(model, count, LENGTH)
    ids = [torch.randint(model.vocab_size, (count,), generator=generator)]
    for position in track(range(LENGTH - 1), "the model writes", console=make_console()):
        probabilities = texts.grow(ids[-1], position).softmax(1)
        ids.append(torch.multinomial(probabilities, 1, generator=generator)[:, 0])
    return list(torch.stack(ids, 1))


def leaving(model: RaggedModel, texts: list[torch.Tensor], depths: list[int]) -> list[torch.Tensor]:
    """Rows [n, width] after each depth, of all texts one behind the other."""
    borders = [0, *depths]
    parts = [Span(start, end) for start, end in pairwise(borders)]
    found: list[list[torch.Tensor]] = [[] for _ in depths]
    for ids in texts:
        nodes = [TreeNodeId(place) for place in range(len(ids))]
        work = SessionRows(KvCache(model.layout, len(ids)), nodes, [None, *nodes[:-1]], range(len(ids)), ids)
        for rows, part in zip(found, model.forward_parts([work], parts), strict=True):
            rows.append(part.float())
    return [torch.cat(rows) for rows in found]


def sent(rows: torch.Tensor, codec: str) -> torch.Tensor:
    """What arrives of rows."""
    if codec == "noise":  # half as large as the row itself
        sizes = rows.square().mean(1, keepdim=True).sqrt()
        return rows + 0.5 * sizes * torch.randn(rows.shape, generator=torch.Generator().manual_seed(3))
    if codec == "bf16":
        return rows.bfloat16().float()
    return unpack(pack(rows), rows.shape[1], "cpu").float() if codec == "int8" else rows


@dataclass(slots=True)
class Search:
    """Reads a text from its rows after a depth, token by token.

    Attributes:
        right: tokens that it read rightly.
        tried: candidates that it computed.
        seconds: that it took.
    """

    model: RaggedModel
    probe: Probe
    depth: int
    right: int = 0
    tried: int = 0
    seconds: float = 0.0

    def read(self, rows: torch.Tensor, ids: torch.Tensor, same: float) -> None:
        """Read tokens [n] of rows [n, width]. The first one is given: chats begin with a token that all know."""
        began_s = time.perf_counter()
        cache = KvCache(self.model.layout, len(ids) + max(SEARCHED_ROWS) + 1)
        node = 0
        for position, row in enumerate(rows):
            count = min(sum(SEARCHED_ROWS), self.model.vocab_size)
            order = ids[:1] if position == 0 else self.probe.best(row[None], count)[0]
            best, distance, start = int(order[0]), float("inf"), 0
            for size in SEARCHED_ROWS:
                candidates = order[start : start + size]
                if not len(candidates) or distance < same:
                    break
                there = self._run(cache, candidates, position, node)
                node, start = node + len(candidates), start + size
                apart = (there - row).norm(dim=1) / row.norm()
                if float(apart.min()) < distance:
                    distance, best = float(apart.min()), int(candidates[apart.argmin()])
                cache.commit((), ())
            self.tried += min(start, len(order))
            self.right += best == int(ids[position])
            self._run(cache, torch.tensor([best]), position, node)
            cache.commit((TreeNodeId(node),), ())
            node += 1
        self.seconds += time.perf_counter() - began_s

    def _run(self, cache: KvCache, ids: torch.Tensor, position: int, first: int) -> torch.Tensor:
        nodes = [TreeNodeId(first + place) for place in range(len(ids))]
        work = SessionRows(cache, nodes, [None] * len(ids), [position] * len(ids), ids)
        return self.model.forward([work], Span(0, self.depth)).float()


def main() -> None:
    options = tyro.cli(Options)
    torch.set_num_threads(options.threads)
    console = make_console()
    model, name = load_whole(options.model, torch.float32), Path(options.model).name
    tokenizer = Tokenizer.from_file(str(Path(options.model) / "tokenizer.json"))
    passages = [json.loads(line)["text"] for line in PASSAGES.read_text(encoding="utf-8").splitlines()]
    held_out = [torch.tensor(tokenizer.encode(text).ids[:LENGTH]) for text in passages]
    layers = model.num_layers
    depths = sorted(set(options.depths or (1, layers // 3, 2 * layers // 3, layers - 1)))
    own = written(model, options.fitted)
    ids, wanted = torch.cat(own), torch.cat(held_out)
    fitted, read = leaving(model, own, depths), leaving(model, held_out, depths)
    embeddings = embeddings_of(model)
    unseen, inner = ~torch.isin(wanted, ids), torch.cat([torch.arange(len(one)) > 0 for one in held_out])
    commonest = float(wanted.bincount().max() / len(wanted))
    sheet = Sheet(
        "leakage",
        f"{name}, {layers} layers: {len(wanted):,} tokens of passages; fitted on {len(ids):,} that it wrote",
        (
            "after layer",
            "read",
            f"among {TOP}",
            "kinds never fitted",
            "search: fp32",
            "bf16",
            "int8",
            "half noise",
            "candidates",
            "ms",
        ),
    )
    sheet.notes.append(
        f"The commonest token alone is {commonest:.1%}. Candidates and milliseconds: of each token, fp32."
    )
    for depth, known, rows in zip(depths, fitted, read, strict=True):
        probe = Probe.fit(known, ids, embeddings)
        hit = torch.cat([probe.best(part, TOP) for part in torch.split(rows, 512)]) == wanted[:, None]
        shares = [float(part.float().mean()) for part in (hit[inner, 0], hit[inner].any(1), hit[inner & unseen, 0])]
        searches: dict[str, Search] = {}
        count = min(options.searched, len(held_out[0]))
        for codec, same in SAME.items():
            searches[codec] = search = Search(model, probe, depth)
            search.read(sent(rows[:count], codec), held_out[0][:count], same)
        plain = searches["fp32"]
        read_by_search = [f"{search.right}/{count}" for search in searches.values()]
        per_token = f"{plain.tried / count:,.0f}", f"{plain.seconds / count * 1e3:,.0f}"
        sheet.rows.append((str(depth), *(f"{share:.1%}" for share in shares), *read_by_search, *per_token))
        found: dict[str, Any] = {codec: [one.right, one.tried, one.seconds] for codec, one in searches.items()}
        sheet.measured[str(depth)] = {"read": shares, "search": found}
    sheet.finish(console, options)
