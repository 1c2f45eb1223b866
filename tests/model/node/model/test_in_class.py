"""What nodes of a class signed is recomputed in that class: GGUF files, and weights that were rounded on load."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from rich.console import Console

from client.draft.heads.output_head import load_output_head
from node.model.checkpoint import open_checkpoint
from node.model.in_class import load_in_class
from node.model.loading import format_of
from node.model.packed_span import load_packed
from node.model.span import SpanModel, dissect
from swarm.base.errors import ConfigError
from swarm.base.ids import PeerId
from swarm.base.layers import Span
from swarm.commands.verify import VerifyText, verify_text
from swarm.compute.sampling import pick
from swarm.compute.weights.format import WeightsName, computes_bfloat16
from swarm.files.fingerprint import model_identity
from swarm.files.hub import find_model
from swarm.protocol.messages import Sampling
from swarm.protocol.numeric_class import NumericClass
from swarm.trust.replay import Pick, Stretch, replayed
from swarm.trust.verify import AGREES, DIFFERS, UNDECIDED, Claim, Claims
from tests.model.gguf_files import VOCAB, TinyGguf

CPU = torch.device("cpu")
__test__ = computes_bfloat16(CPU)  # elsewhere such files are multiplied in float32, and nothing here is collected
TEXT = tuple(torch.randint(0, VOCAB, (80,), generator=torch.Generator().manual_seed(0)).tolist())
CUTS = (Span(0, 2), Span(2, 3))
PEERS = (PeerId("Qm" + "a" * 44), PeerId("Qm" + "b" * 44))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return TinyGguf.of("llama", "llama", lambda *_: Kind.Q4_K, max_position_embeddings=256).write(path)


def node(file: Path, layers: Span, weights: WeightsName = "auto", *, ordered: bool = True) -> SpanModel:
    """A span as a node loads it."""
    checkpoint = open_checkpoint(file)
    form = format_of(checkpoint, dissect(checkpoint.config), weights, torch.bfloat16, CPU)
    return load_packed(checkpoint, layers, form, CPU, ordered=ordered)


def signed(nodes: tuple[SpanModel, ...]) -> tuple[Claim, ...]:
    """What two machines sign of a text that came in sweeps of five, and the text of both."""
    sampling = Sampling(7, 0.7)
    kind = nodes[0].numeric_class
    first = Stretch(CUTS[0], kind, TEXT)
    first = replace(first, leaving=torch.cat(list(replayed(nodes[0], first, 5))))
    last = Stretch(CUTS[1], kind, TEXT, first.leaving)
    final = torch.cat(list(replayed(nodes[1], last, 5)))[20:]
    tokens = pick(nodes[1].logits(final), range(21, len(TEXT) + 1), sampling)
    picks = tuple(Pick(20 + place, token, sampling) for place, token in enumerate(tokens))
    whole = Stretch(Span(0, 3), kind, TEXT, picks=picks)
    stretches = (first, replace(last, picks=picks), whole)
    return tuple(Claim(PEERS, one.layers, one) for one in stretches)


def verified(file: Path, claims: tuple[Claim, ...], layers: str = "whole") -> tuple[int, str]:
    assert claims[0].stretch is not None
    found = Claims(model_identity(find_model(file)[0]).fingerprint, claims[0].stretch.numeric_class, claims)
    console = Console(record=True, width=200)
    command = VerifyText(Path("proof"), str(file), layers)
    return verify_text(command, console, lambda _: found, load_in_class), console.export_text()


@pytest.mark.parametrize(
    ("weights", "ordered", "kind"),
    [
        ("auto", True, "cpu-bfloat16-k2+gguf"),
        ("auto", False, "cpu-bfloat16-k1+gguf"),
        ("int8", True, "cpu-bfloat16+w8"),
        ("int4", True, "cpu-bfloat16+w4z"),
    ],
)
def test_each_machine_and_the_whole_text_agree_in_their_own_class(
    file: Path, weights: WeightsName, ordered: bool, kind: str
) -> None:
    claims = signed((node(file, CUTS[0], weights, ordered=ordered), node(file, CUTS[1], weights, ordered=ordered)))
    assert claims[0].stretch is not None
    assert claims[0].stretch.numeric_class == kind
    status, shown = verified(file, claims)
    assert status == AGREES, shown
    assert shown.count("agrees at") == 3
    status, shown = verified(file, claims[:1], layers="0-2")
    assert status == AGREES, shown


@pytest.mark.parametrize("weights", ["auto", "int8"])
def test_a_clients_head_gives_a_tails_own_bits(file: Path, weights: WeightsName) -> None:
    tail = node(file, CUTS[1], weights)
    rows = torch.randn(33, tail.hidden_size, generator=torch.Generator().manual_seed(1)).bfloat16()
    found = NumericClass.parse(tail.numeric_class)
    assert found is not None
    assert torch.equal(load_output_head(file, None, found).logits(rows), tail.logits(rows))
    whole = load_output_head(file, None, NumericClass("cpu", "bfloat16"))
    assert not torch.equal(whole.logits(rows), tail.logits(rows)), "whole weights round otherwise"


def test_another_file_of_the_model_differs(file: Path, tmp_path: Path) -> None:
    """A machine that has rounded the weights again, to four bits of its own, and says that it has the file."""
    honest = signed((node(file, CUTS[0]), node(file, CUTS[1])))
    lying = signed((node(file, CUTS[0], "int4"), node(file, CUTS[1], "int4")))
    assert honest[0].stretch is not None
    kind = honest[0].stretch.numeric_class
    posing = tuple(replace(one, stretch=replace(one.stretch, numeric_class=kind)) for one in lying if one.stretch)
    status, shown = verified(file, posing[:1])
    assert status == DIFFERS, shown
    assert "rows" in shown


def test_an_altered_row_differs(file: Path) -> None:
    (first, *_) = signed((node(file, CUTS[0]), node(file, CUTS[1])))
    assert first.stretch is not None
    assert first.stretch.leaving is not None
    altered = first.stretch.leaving.clone()
    altered[40] *= 1.5
    status, shown = verified(file, (replace(first, stretch=replace(first.stretch, leaving=altered)),))
    assert status == DIFFERS, shown
    assert "rows at 40" in shown


@pytest.mark.parametrize("kind", ["cuda-sm90-bfloat16-k2+gguf", "cpu-float16", "cpu-bfloat16", "of a later release"])
def test_a_class_that_a_cpu_does_not_compute_in_is_undecided_with_why(file: Path, kind: str) -> None:
    claims = (Claim(PEERS, Span(0, 2), Stretch(Span(0, 2), kind, TEXT, leaving=torch.zeros(80, 256))),)
    status, shown = verified(file, claims)
    assert status == UNDECIDED, shown
    assert "unclear" in shown
    assert kind in shown.replace("\n", "") or "float16" in shown


def test_a_class_of_another_device_is_refused_by_name(file: Path) -> None:
    with pytest.raises(ConfigError, match="no CPU's class"):
        load_in_class(str(file), "cuda-bfloat16")
