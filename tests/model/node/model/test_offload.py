"""Offloaded spans: the resident span's results bit for bit, two layers' weights held, reading beside computing."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from node.model.checkpoint import open_checkpoint
from node.model.config import ServeConfig
from node.model.loading import load
from node.model.offload import (
    MAX_TRACE_EVENTS,
    Offload,
    OffloadedSpan,
    TraceEvent,
    held_bytes,
    load_offloaded,
    overlaps,
)
from node.model.span import SpanModel, dissect, load_span
from node.session.measure import OFFLOADED_ROWS, step_cost
from swarm.base.errors import ConfigError, NotEnoughSpace
from swarm.base.ids import TreeNodeId
from swarm.base.layers import Span
from swarm.compute.kv_cache import KvCache
from swarm.compute.ragged_batch import SessionRows
from swarm.compute.weights.format import WeightFormat
from swarm.demo import TARGET
from tests.devices import DEVICES
from tests.in_process_swarm import in_process_swarm
from tests.model.recurrent_models import recurrent_model
from tests.model.tiny_models import chain, save_sharded, tiny_model

CPU = torch.device("cpu")
WHOLE = Span(0, 12)


@contextmanager
def offloaded(
    model: Path, span: Span, dtype: torch.dtype = torch.float32, device: torch.device = CPU
) -> Iterator[OffloadedSpan]:
    with closing(load_offloaded(open_checkpoint(model), span, dtype, device, Offload())) as loaded:
        yield loaded


def sweeps(model: SpanModel) -> list[torch.Tensor]:
    """A prompt, and a tree below it: the rows, and the logits where there is a head."""
    kv_cache = KvCache(model.layout, 64)
    ids = torch.arange(3, 19)
    prompt = chain(kv_cache, ids)
    nodes = [TreeNodeId(16 + number) for number in range(5)]
    parents, positions = [None, nodes[0], nodes[0], nodes[1], None], [16, 17, 17, 18, 16]
    tree = SessionRows(kv_cache, nodes, parents, positions, ids[:5])
    if model.span.start:
        rows = torch.randn(21, model.hidden_size, generator=torch.Generator().manual_seed(1)).to(model.dtype)
        prompt = SessionRows(kv_cache, prompt.node_ids, prompt.parents, prompt.positions, rows=rows[:16])
        tree = SessionRows(kv_cache, nodes, parents, positions, rows=rows[16:])
    first = model.forward([prompt])
    kv_cache.commit(prompt.node_ids, [])
    found = [first, model.forward([tree])]
    return [*found, model.logits(found[1])] if model.span.end == model.num_layers else found


class Watched(deque[TraceEvent]):
    """Moments for which one can wait."""

    def __init__(self) -> None:
        super().__init__(maxlen=MAX_TRACE_EVENTS)
        self._changed = threading.Condition()

    def append(self, event: TraceEvent) -> None:
        with self._changed:
            super().append(event)
            self._changed.notify_all()

    def wait_ahead(self, index: int) -> None:
        """Until reading of a layer began that was not computed since."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.count(("read", index)) > self.count(("run", index)), 10)


def weight_bytes(model: nn.Module) -> int:
    """What the weights of a model take now, each storage counted once."""
    storages = {weight.untyped_storage().data_ptr(): weight.untyped_storage().nbytes() for weight in model.parameters()}
    return sum(storages.values())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", ["llama", "gemma2", "deepseek_v3"])
@pytest.mark.parametrize("span", [Span(0, 6), Span(1, 5)])
def test_results_are_the_resident_spans_bit_for_bit(family: str, span: Span, device: str, tmp_path: Path) -> None:
    """Plain, tied with two kinds of attention, and experts behind dense layers, of which sizes differ."""
    whole = save_sharded(tiny_model(family), tmp_path / "whole")
    resident = load_span(open_checkpoint(whole), span, torch.float32, torch.device(device))
    with offloaded(whole, span, device=torch.device(device)) as streamed:
        for _ in range(2):
            for ours, theirs in zip(sweeps(streamed), sweeps(resident), strict=True):
                assert torch.equal(ours, theirs)


def test_layers_that_keep_states_are_streamed_too(tmp_path: Path) -> None:
    """Mixers run single rows, whose last bits depend on where a weight lies: a resident one lies as in its file."""
    whole = save_sharded(recurrent_model("qwen3_next"), tmp_path / "whole")
    resident = load_span(open_checkpoint(whole), Span(1, 5), torch.float32)
    with offloaded(whole, Span(1, 5)) as streamed:
        for ours, theirs in zip(sweeps(streamed), sweeps(resident), strict=True):
            assert (ours - theirs).abs().max() <= 1e-5


@pytest.mark.parametrize("device", DEVICES)
def test_the_demo_target_in_bfloat16_is_the_resident_one_too(device: str) -> None:
    resident = load_span(open_checkpoint(TARGET), WHOLE, torch.bfloat16, torch.device(device))
    with offloaded(TARGET, WHOLE, torch.bfloat16, torch.device(device)) as streamed:
        assert streamed.numeric_class == resident.numeric_class
        for ours, theirs in zip(sweeps(streamed), sweeps(resident), strict=True):
            assert torch.equal(ours, theirs)


def test_two_layers_weights_are_held_at_a_time_and_reading_runs_beside_computing() -> None:
    """Computing a layer waits here until the reader is seen at another one: without overlap it would wait in vain."""
    layout = dissect(open_checkpoint(TARGET).config)
    layer = 4 * layout.weights["model.layers.0"]
    others = 4 * (layout.weights_in(WHOLE) - sum(layout.weights[f"model.layers.{index}"] for index in range(12)))
    with offloaded(TARGET, WHOLE) as streamed:
        held: list[int] = []
        streamed.streamer._reader.submit(lambda: None).result()  # what was read ahead when it was loaded is there
        watched, loading = Watched(), list(streamed.streamer.trace)
        watched.extend(loading)
        streamed.streamer.trace = watched

        def look(index: int) -> None:
            held.append(weight_bytes(streamed.model))
            watched.wait_ahead((index + 1) % 12)

        for index in range(12):
            streamed._owned[index].get_submodule("self_attn").register_forward_hook(lambda *_, index=index: look(index))
        sweeps(streamed)
        assert len(held) == 24, "two sweeps"
        room = 64 * 16  # weights begin at multiples of 64 bytes
        assert max(held) <= others + layer + room, "one layer computes, the other one's bytes hang from no weight"
        assert weight_bytes(streamed.model) <= others + room
        assert streamed.weight_bytes <= others + 2 * (layer + room)
        assert streamed.streamer.resident_bytes <= 2 * (layer + room)
        assert streamed.weight_bytes < (others + 12 * layer) / 3
        assert abs(held_bytes(layout, WHOLE, WeightFormat(torch.float32))[0] - streamed.weight_bytes) <= 2 * room
        assert streamed.streamer.reads >= 24
        assert overlaps(watched) - overlaps(loading) == 24


def test_a_rate_makes_a_sweep_take_what_reading_its_layers_takes(tmp_path: Path) -> None:
    """What `node serve --offload` loads; the rate's arithmetic is tested with a clock of its own."""
    said: list[str] = []
    config = ServeConfig(
        "4-9", str(TARGET), threads=1, offload=True, offload_mb_per_s=400.0, offload_folder=tmp_path, device="cpu"
    )
    config.check()
    model = load(open_checkpoint(TARGET), config, said.append)
    assert isinstance(model, OffloadedSpan)
    with closing(model):
        assert any(f"offloaded {model.stored_bytes / 2**20:.1f} MiB" in line for line in said)
        assert [path.name.startswith("canopy-offload-") for path in tmp_path.iterdir()] == [True]
        started = len(model.streamer.trace)
        sweeps(model)
        assert len(model.streamer.trace) > started
        assert model.streamer.waited_s >= 0.3 * model.stored_bytes / 400e6
    assert not list(tmp_path.iterdir()), "nothing is left behind"


def test_a_failed_forward_leaves_the_span_able_to_go_on(tmp_path: Path) -> None:
    whole = save_sharded(tiny_model("llama"), tmp_path / "whole")
    with offloaded(whole, Span(0, 6)) as streamed:
        before = sweeps(streamed)
        breaking = streamed._owned[3].get_submodule("self_attn").register_forward_pre_hook(_raise)
        with pytest.raises(ArithmeticError):
            sweeps(streamed)
        breaking.remove()
        for ours, theirs in zip(sweeps(streamed), before, strict=True):
            assert torch.equal(ours, theirs)


def _raise(*_: object) -> None:
    raise ArithmeticError


def test_a_full_disk_is_told_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("node.model.offload.save_file", full)
    with pytest.raises(NotEnoughSpace, match=r"no room for the offloaded layers \(No space left on device\)"):
        load_offloaded(open_checkpoint(TARGET), WHOLE, torch.float32, CPU, Offload(folder=tmp_path))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"offload_mb_per_s": 5.0}, "--offload-mb-per-s goes with --offload"),
        ({"offload_folder": Path()}, "--offload-folder goes with --offload"),
        ({"offload": True, "layers": "auto"}, "--offload needs --layers START-END"),
        ({"offload": True, "offload_mb_per_s": 0.0}, "--offload-mb-per-s 0: give more than 0"),
        ({"offload": True, "offload_mb_per_s": float("nan")}, "--offload-mb-per-s nan"),
        ({"offload": True, "offload_folder": Path("nowhere")}, "--offload-folder nowhere: there is no such folder"),
    ],
)
def test_options_that_cannot_be_are_named(given: dict[str, object], complaint: str) -> None:
    values: dict[str, object] = {"layers": "0-4", "host": "127.0.0.1", **given}
    with pytest.raises(ConfigError, match=complaint):
        ServeConfig(**values).check()  # type: ignore[arg-type]


def test_a_tree_is_never_cut_where_every_forward_reads_all_weights() -> None:
    measured = ((1, 200.0), (8, 201.0), (64, 230.0))
    assert step_cost(measured).rows_within(50.0) < 2_049
    assert step_cost(measured, offloaded=True).rows_within(50.0) >= OFFLOADED_ROWS >= 2_049
    assert step_cost(((1, 20.0), (8, 40.0), (64, 200.0)), offloaded=True).rows_within(-10.0) >= 2_049


async def test_a_swarm_with_an_offloaded_node_gives_the_same_text() -> None:
    texts = []
    for offload in (False, True):
        async with in_process_swarm(TARGET, ["0-12"], offload=offload) as here, here.client() as client:
            result = await client.generate("The river", max_new_tokens=8, seed=3, temperature=0.8, nodes=0)
            texts.append(result.tokens)
            model = here.nodes[0].running.host.model
            assert isinstance(model, OffloadedSpan) is offload
            if isinstance(model, OffloadedSpan):
                assert model.streamer.reads >= 8 * 10
    assert texts[0] == texts[1]
