"""EAGLE heads as they are published: numbers of a plain computation, exact texts, and clear refusals."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional as F  # noqa: N812
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from benchmarks.simulation.acceptance import Size, generate
from client.base.options import DraftOptions
from client.base.target import load_target
from client.draft.drafter import NoDrafter, TreeDrafter
from client.draft.heads.eagle import load_eagle
from client.draft.loading import load_drafter
from client.draft.search.source import Source
from swarm.base.errors import IncompatibleDraft, UnsupportedModel
from swarm.base.ids import TreeNodeId
from swarm.compute.kv_cache import KvCache
from swarm.compute.ragged_batch import SessionRows, load_whole
from swarm.demo import TARGET
from swarm.protocol.messages import Sampling
from tests.model.published_eagle3 import KNOWN as KNOWN_TOKENS
from tests.model.published_eagle3 import PublishedForward, publish_eagle3, told

WIDTH, VOCAB, HEADS, INNER = 32, 128, 2, 48
KNOWN = torch.tensor([3, 5, 8, 13, 21, 34, 55, 89, 90, 91])
"""The target's tokens that the EAGLE-3 head knows."""
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "max_position_embeddings": 256,
}
CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose text depends on its last token above all."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("target")
    model: Any = LlamaForCausalLM(LlamaConfig(**{**CONFIG, "num_hidden_layers": 3, "model_type": "llama"}))
    for name, weight in model.named_parameters():
        weight.data += torch.randn_like(weight) * 0.1
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.data *= 0.02
    model.save_pretrained(folder)
    shutil.copy(TARGET / "tokenizer.json", folder)
    return folder


def layer_tensors(prefix: str, entering: int, scale: float) -> Tensors:
    shapes = {f"self_attn.{name}_proj.weight": (WIDTH, entering) for name in "qkv"}
    shapes |= {"self_attn.o_proj.weight": (WIDTH, WIDTH), "mlp.down_proj.weight": (WIDTH, INNER)}
    shapes |= {f"mlp.{name}_proj.weight": (INNER, WIDTH) for name in ("gate", "up")}
    made = {prefix + name: torch.randn(shape) * scale for name, shape in shapes.items()}
    return made | {f"{prefix}post_attention_layernorm.weight": 1 + torch.randn(WIDTH) * 0.1}


def first_tensors() -> Tensors:
    return layer_tensors("layers.0.", WIDTH, 0.2) | {"fc.weight": torch.randn(WIDTH, 2 * WIDTH) * 0.2}


def third_tensors() -> Tensors:
    torch.manual_seed(2)
    known = torch.zeros(VOCAB, dtype=torch.bool)
    known[KNOWN] = True
    norms = {
        name: 1 + torch.randn(WIDTH) * 0.1 for name in ("midlayer.input_layernorm", "midlayer.hidden_norm", "norm")
    }
    return {
        **layer_tensors("midlayer.", 2 * WIDTH, 0.2),
        **{f"{name}.weight": value for name, value in norms.items()},
        "lm_head.weight": torch.randn(len(KNOWN), WIDTH),
        "d2t": KNOWN - torch.arange(len(KNOWN)),
        "t2d": known,
    }


def publish(folder: Path, tensors: Tensors, **changes: object) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    return folder


def norm(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    made = LlamaRMSNorm(WIDTH, 1e-6)
    made.weight.data = weight
    found: torch.Tensor = made(rows)
    return found


def layer(tensors: Tensors, prefix: str, entering: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """A Llama layer on a chain [n, …], written out."""
    count = len(entering)
    model = cast("Any", LlamaForCausalLM(LlamaConfig(**CONFIG))).model
    turns = model.rotary_emb(entering[None], torch.arange(count)[None])
    part = {name: (entering @ tensors[f"{prefix}self_attn.{name}_proj.weight"].T) for name in "qkv"}
    q, k, v = (part[name].view(1, count, HEADS, -1).transpose(1, 2) for name in "qkv")
    q, k = apply_rotary_pos_emb(q, k, *turns)
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(count, WIDTH)
    rows = residual + attended @ tensors[f"{prefix}self_attn.o_proj.weight"].T
    inner = norm(rows, tensors[f"{prefix}post_attention_layernorm.weight"])
    gate, up, down = (tensors[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return rows + (F.silu(inner @ gate.T) * (inner @ up.T)) @ down.T


TOKENS = torch.tensor([3, 17, 99, 4, 64, 5])
ROWS = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(3))


def run(folder: Path, target: Path) -> tuple[torch.Tensor, torch.Tensor]:
    head = load_eagle(folder, target, None, CPU, torch.float32)
    nodes: Sequence[TreeNodeId] = [TreeNodeId(node) for node in range(6)]
    work = SessionRows(KvCache(head.model.layout, 16), nodes, [None, *nodes[:-1]], range(6))
    with torch.inference_mode():
        return head.run(work, TOKENS, head.normed(ROWS), 6)


@pytest.mark.parametrize("is_before", [False, True])
@torch.no_grad()
def test_a_head_computes_what_is_published(is_before: bool, target: Path, tmp_path: Path) -> None:
    tensors = third_tensors()
    changes = {"draft_vocab_size": len(KNOWN), "norm_before_residual": is_before}
    logits, rows = run(publish(tmp_path / "eagle", tensors, **changes), target)
    model: Any = LlamaForCausalLM.from_pretrained(target)
    embedded, normed = model.model.embed_tokens(TOKENS), model.model.norm(ROWS)
    parts = (embedded, "midlayer.input_layernorm.weight"), (normed, "midlayer.hidden_norm.weight")
    entering = torch.cat([norm(values, tensors[name]) for values, name in parts], dim=1)
    residual = norm(normed, tensors["midlayer.hidden_norm.weight"]) if is_before else normed
    wanted = layer(tensors, "midlayer.", entering, residual)
    assert (rows - wanted).abs().max() < 1e-4
    own = norm(wanted, tensors["norm.weight"]) @ tensors["lm_head.weight"].T
    assert (logits[:, KNOWN] - own).abs().max() < 1e-4
    assert int(logits.isfinite().sum()) == 6 * len(KNOWN), "no other token can be guessed"


@pytest.mark.parametrize("is_before", [False, True])
@pytest.mark.parametrize("has_own", [False, True])
@torch.no_grad()
def test_three_rows_are_read_as_published(has_own: bool, is_before: bool, target: Path, tmp_path: Path) -> None:
    """With a vocabulary and an embedding of its own, or with the target's."""
    folder = publish_eagle3(tmp_path / "eagle", target, own_vocabulary=has_own, own_embedding=has_own)
    told(folder, eagle_aux_hidden_state_layer_ids=[1, 2, 1], norm_before_residual=is_before)
    head = load_eagle(folder, target, None, CPU, torch.float32)
    assert (head.aux_layers, head.row_width) == ((1, 2, 1), 3 * WIDTH)
    nodes: Sequence[TreeNodeId] = [TreeNodeId(node) for node in range(6)]
    work = SessionRows(KvCache(head.model.layout, 16), nodes, [None, *nodes[:-1]], range(6))
    rows = torch.randn(6, 3 * WIDTH, generator=torch.Generator().manual_seed(4))
    with torch.inference_mode():
        logits, _ = head.run(work, TOKENS, head.normed(rows), 6)
    wanted = PublishedForward(folder, target, (1, 2, 1)).of_rows(TOKENS, rows)
    found = logits[:, logits[0].isfinite()]
    assert found.shape == wanted.shape == (6, KNOWN_TOKENS if has_own else VOCAB)
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        ({}, (2, 6, 9)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 4, 8], "use_aux_hidden_state": True}}, (2, 5, 9)),
        ({"eagle_aux_hidden_state_layer_ids": [2, 5, 9]}, (2, 5, 9)),
    ],
    ids=["usual", "as outputs", "as inputs"],
)
def test_which_layers_it_reads(config: dict[str, Any], layers: tuple[int, ...], tmp_path: Path) -> None:
    folder = told(publish_eagle3(tmp_path / "eagle", TARGET), **config)
    assert load_eagle(folder, TARGET, None, CPU, torch.float32).aux_layers == layers


def test_sources_get_the_rows_that_they_read() -> None:
    """Of several that read different layers a session asks for all, and each gets its own."""

    class Reader(Source):
        def __init__(self, *layers: int) -> None:
            self.aux_layers, self.got = layers, list[list[float]]()

        def observe(self, sequence: Sequence[int], rows: torch.Tensor) -> None:
            self.got = rows.tolist()

    last, two, one = Reader(), Reader(3, 1), Reader(1)
    drafter = TreeDrafter([last, two, one])
    assert drafter.aux_layers == (1, 3)
    drafter.observe((7,), torch.tensor([[0.0, 0.0, 1.0, 1.0, 3.0, 3.0]]))
    assert (last.got, two.got, one.got) == ([[0.0, 0.0]], [[3.0, 3.0, 1.0, 1.0]], [[1.0, 1.0]])


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(seed=5, temperature=1.0)], ids=["greedy", "sampled"])
def test_texts_stay_the_plain_ones(sampling: Sampling, target: Path, tmp_path: Path) -> None:
    folder = publish(tmp_path, third_tensors())
    whole, prompt = load_whole(target, torch.float32), TOKENS.repeat(6).tolist()
    plain = generate(whole, NoDrafter(), prompt, sampling, Size(20, 0))
    options = DraftOptions((folder,), "cpu", lookup=False, siblings=False)
    drafter = load_drafter(target, load_target(target), options).drafter
    assert isinstance(drafter, TreeDrafter)
    drafted = generate(whole, drafter, prompt, sampling, Size(20, 16))
    assert drafted.tokens == plain.tokens


def test_what_a_swarm_cannot_feed_or_does_not_fit_is_refused(target: Path, tmp_path: Path) -> None:
    def load(folder: Path) -> None:
        load_drafter(target, load_target(target), DraftOptions((folder,), "cpu"))

    three_rows = third_tensors() | {"fc.weight": torch.randn(WIDTH, 3 * WIDTH)}
    with pytest.raises(UnsupportedModel, match="reads what enters layers 2, 1, 0 of 3; a swarm sends"):
        load(publish(tmp_path / "three", three_rows))
    for ids, says in (([1, 3], "enters layers 1, 3"), ("1", "no list of layers"), ([1.0], "no list"), ([1, 2], "fc")):
        with pytest.raises(UnsupportedModel, match=says):
            load(publish(tmp_path / "three", three_rows, eagle_aux_hidden_state_layer_ids=ids))
    with pytest.raises(UnsupportedModel, match=r"'input_norm\.weight', which this version does not know"):
        load(publish(tmp_path / "more", third_tensors() | {"input_norm.weight": torch.ones(WIDTH)}))
    with pytest.raises(UnsupportedModel, match="d2t does not lead"):
        load(publish(tmp_path / "astray", third_tensors() | {"d2t": torch.full((len(KNOWN),), VOCAB)}))
    wrong = third_tensors()
    del wrong["midlayer.mlp.up_proj.weight"]
    with pytest.raises(UnsupportedModel, match="does not fit its class: 1 missing keys"):
        load(publish(tmp_path / "part", wrong))
    with pytest.raises(IncompatibleDraft, match="for rows of 32 values and 96 tokens"):
        load(publish(tmp_path / "small", third_tensors(), vocab_size=96))
    for prefix in ("", "model."):
        named = {f"{prefix}{name}": value for name, value in first_tensors().items()}
        with pytest.raises(UnsupportedModel, match="an EAGLE-1 or EAGLE-2 head, which this version does not run"):
            load(publish(tmp_path / f"first{prefix}", named))
