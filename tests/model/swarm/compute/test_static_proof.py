"""The proof of a fast path: what it refuses, what it lets through, and what a model falls back to."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import swarm.compute.fast_path
import swarm.compute.static_proof
from swarm.base.layers import Span
from swarm.compute.devices import numeric_class_of
from swarm.compute.fast_path import GRAPHS, KERNELS, use_plain_rotary, use_static
from swarm.compute.kernels.support import KERNEL_VERSION, KernelSupport
from swarm.compute.kv_cache import KvCache
from swarm.compute.ragged_batch import HeadOutput, RaggedModel, SessionRows
from swarm.compute.static_proof import PlainTrial, ProofVerdict, late_failure, plain_trial, prove
from tests.devices import DEVICE
from tests.model.tiny_models import FEW, chain, tiny_model, whole_model

ONE_LAYER = FEW | {"num_hidden_layers": 1}
FORCED = DEVICE == "cpu"
"""A card takes its kernels by itself."""
FAST = KERNELS if FORCED else GRAPHS


@pytest.fixture(scope="module")
def model() -> RaggedModel:
    return whole_model(tiny_model("llama", changes=ONE_LAYER))


@dataclass
class StandIn:
    """A fast path that is the plain one, but for a fault."""

    model: RaggedModel
    fault: str = ""
    has_graphs: bool = True
    buckets: tuple[int, ...] = (16, 32)
    head_buckets: tuple[int, ...] = (16, 32)

    def __post_init__(self) -> None:
        self._seen: dict[tuple[object, ...], torch.Tensor] = {}

    def forward(
        self, batch: Sequence[SessionRows], sub: Span, *, at_least: int = 0, eager: bool = False
    ) -> torch.Tensor:
        rows = self.model.plain_forward(batch, sub).float()
        match self.fault:
            case "wrong":
                return rows * (1 + 3e-5)
            case "nan":
                return rows * torch.nan
            case "replay":
                return rows + 1e-7 * eager
            case "bucket":
                return rows + 1e-7 * (at_least == 32)
            case "company":
                return rows + 1e-7 * len(batch)
            case "path":
                return rows + 1e-7 * (len(rows) == 1)
            case "stale":
                return self._seen.setdefault((len(rows),), rows)
            case "tokens":
                return self._seen.setdefault((*[tuple(work.positions) for work in batch],), rows)
            case "positions":
                return self._seen.setdefault((*[tuple(cast("Any", work.token_ids).tolist()) for work in batch],), rows)
        return rows

    def head(self, rows: torch.Tensor, *, at_least: int = 0, eager: bool = False) -> HeadOutput:
        logits = self.model.run_head(rows.to(self.model.dtype)).float()
        match self.fault:
            case "head":
                logits = logits.flip(1)
            case "head replay":
                logits = logits + 1e-7 * eager
            case "head bucket":
                logits = logits + 1e-7 * (at_least == 32)
            case "head stale":
                logits = self._seen.setdefault(("head",), logits)
        return HeadOutput(logits, None)


@pytest.fixture(scope="module")
def exact() -> RaggedModel:
    """In float64, of which float32 keeps nothing that depends on a forward's size."""
    return whole_model(tiny_model("llama", changes=ONE_LAYER).double())


def verdict(model: RaggedModel, fault: str) -> ProofVerdict:
    plain = plain_trial(model)
    assert plain.logits is not None
    plain = PlainTrial(plain.rows.float(), plain.logits.float())
    return prove(cast("Any", StandIn(model, fault)), model, plain)


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("wrong", "16 rows: 3.0e-05 off the plain path, where 1.0e-05 is allowed"),
        ("nan", "16 rows: values are not finite"),
        ("replay", "16 rows: a replay differs from the kernels that it holds"),
        ("tokens", "other tokens do not change the result"),
        ("positions", "another position does not change the result"),
        ("stale", "other tokens do not change the result"),
        ("head", "head on 16 rows: .* off the plain path"),
        ("head replay", "head on 16 rows: a replay differs"),
        ("head stale", "other rows do not change the head's result"),
    ],
)
def test_what_is_wrong_is_refused(exact: RaggedModel, fault: str, says: str) -> None:
    assert re.match(says, verdict(exact, fault).failure)


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("", ""),
        ("bucket", "32 rows in one forward give other bits than fewer"),
        ("company", "a session's rows depend on another session's"),
        ("path", "a tree's rows are not those of the same tokens one by one"),
        ("head bucket", "the head gives other bits for other numbers of rows"),
    ],
)
def test_what_changes_bits_is_let_through_and_named(exact: RaggedModel, fault: str, says: str) -> None:
    assert verdict(exact, fault) == ProofVerdict("", says)


def test_ids_behind_a_vocabulary_of_which_all_rows_are_alike_prove_nothing_and_refuse_nothing() -> None:
    whole = tiny_model("llama", changes=ONE_LAYER | {"vocab_size": 4_000})
    cast("Any", whole).get_input_embeddings().weight.data[60:] = 0
    padded = whole_model(whole)
    assert verdict(padded, "").failure == ""
    assert "other tokens do not change the result" in verdict(padded, "tokens").failure


def test_a_graph_that_was_recorded_late_is_tried_too() -> None:
    model = whole_model(tiny_model("llama", changes=FEW))
    sub = Span(1, 2)
    found = {
        fault: late_failure(cast("Any", StandIn(model, fault)), model, sub, 16) for fault in ("", "replay", "stale")
    }
    assert found[""] == ""
    assert found["replay"] == "a replay differs from the kernels that it holds"
    assert found["stale"] == "other tokens do not change the result"


def test_a_model_that_passes_runs_by_kernels_and_its_class_says_so() -> None:
    narrow = {"hidden_size": 32, "intermediate_size": 32, "vocab_size": 32}
    model = whole_model(tiny_model("llama", changes=ONE_LAYER | narrow))
    use_static(model, 64, 2, (4, 16), forced=FORCED)
    assert model.static is not None
    linears = [module for layer in model.layers for module in layer.modules() if isinstance(module, torch.nn.Linear)]
    assert not linears, "each adds up in fixed ranges"
    assert model.static.buckets == (4, 16)
    own_class = numeric_class_of(model.device, torch.float32, kernel_version=KERNEL_VERSION)
    assert (model.path, model.numeric_class) == (FAST, str(own_class)), model.path_reason
    assert model.numeric_class.endswith(f"-float32-k{KERNEL_VERSION}")
    model.use_plain("it was told to")
    assert cast("Any", model).static is None
    assert (model.path, model.path_reason) == ("plain", "it was told to")
    assert model.numeric_class == f"{model.device.type}-float32"


@pytest.fixture
def unproven(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """The compilers whose layers would be proven; the proof itself is left out."""
    tried: list[str | None] = []

    def passes(static: Any, model: RaggedModel, _: object) -> ProofVerdict:  # noqa: ANN401
        tried.append(static.layers.backend)
        static.forward([chain(KvCache(model.layout, 4), torch.tensor([5]))], model.span)
        return ProofVerdict()

    monkeypatch.setattr(swarm.compute.static_proof, "prove", passes)
    return tried


def test_layers_that_do_not_compile_run_as_they_are(
    model: RaggedModel, unproven: list[str | None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    able = KernelSupport(kernels=True, compiled=True)
    monkeypatch.setattr(swarm.compute.fast_path, "kernel_support", lambda *_, **__: able)
    monkeypatch.setattr(swarm.compute.fast_path, "COMPILER", "a_compiler_that_is_none")
    use_static(model, 16, 2, (2,), forced=FORCED)
    assert model.static is not None
    assert model.path_reason.startswith("its layers are not compiled: ")
    assert (unproven, len(caplog.records)) == ([None], 1), "proven as they are, and said once"


@pytest.mark.parametrize("fault", ["verdict", "raises"])
def test_a_failure_leaves_the_plain_path_and_is_said_once(
    fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = whole_model(tiny_model("llama", changes=ONE_LAYER))

    def fails(*_: object) -> ProofVerdict:
        if fault == "raises":
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        return ProofVerdict("operation not permitted when stream is capturing")

    monkeypatch.setattr(swarm.compute.static_proof, "prove", fails)
    use_static(model, 16, 2, (2,), forced=FORCED)
    assert (model.static, model.path, model.kernel_version) == (None, "plain", 0)
    assert model.path_reason == "operation not permitted when stream is capturing"
    assert [record.getMessage() for record in caplog.records] == [
        "llama runs by the plain path: operation not permitted when stream is capturing"
    ]
    assert any(isinstance(module, torch.nn.Linear) for module in model.layers[0].modules()), "the class's own are back"
    rows = model.forward([chain(KvCache(model.layout, 4), torch.tensor([5, 6]))])
    assert rows.isfinite().all()


def test_bits_that_vary_cost_the_promise_and_not_the_speed(model: RaggedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swarm.compute.static_proof, "prove", lambda *_: ProofVerdict("", "32 rows give other bits"))
    use_static(model, 16, 2, (2,), forced=FORCED)
    assert model.static is not None
    assert (model.path, model.numeric_class) == (FAST, f"{model.device.type}-float32")
    assert "texts may depend on the tree's size: 32 rows give other bits" in model.path_reason


@pytest.mark.skipif(DEVICE != "cpu", reason="about a CPU, whose kernels only the interpreter runs")
def test_a_cpu_runs_the_plain_path_though_an_environment_variable_says_otherwise(model: RaggedModel) -> None:
    use_static(model)
    assert (model.static, model.path) == (None, "plain")
    assert model.path_reason == f"{model.device.type} runs the plain path"


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotary_embeddings_that_look_at_positions_become_plain_ones_of_the_same_bits(kind: str) -> None:
    few = 8
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0}
    if kind == "longrope":
        rope |= {"original_max_position_embeddings": 64, "short_factor": [1.5] * few, "long_factor": [9.0] * few}
    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 2 * few}
    config = LlamaConfig(**sizes, **heads, max_position_embeddings=64, rope_parameters=rope)
    own = LlamaForCausalLM(config).model.rotary_emb
    positions, like = torch.arange(64)[None], torch.zeros(1, 64, 2 * few)
    wanted = own(like, positions)
    assert use_plain_rotary(own) == 1
    for got, value in zip(own(like, positions), wanted, strict=True):
        assert torch.equal(got, value)
    assert use_plain_rotary(own) == 0
