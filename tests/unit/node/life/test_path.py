"""How layers run on a device, and why no faster way: said at load, published, kept for `node status`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

import node.life.planning
from node.life.autostart.show import describe_running
from node.life.autostart.state_file import LocalStatus, Stage
from node.life.joining import ClassChoice
from node.life.planning import Compute, NodeResources, ServingPlan, _benchmark, _classes
from node.life.publisher import Outbox
from node.life.report import NodeDescription, NodeReport, NodeSnapshot
from node.life.span_host import SpanHost
from node.model.config import ServeConfig
from node.model.device import Device
from node.model.span import SpanModel
from node.session.counters import NodeCounters
from node.session.measure import LayerSpeed
from node.session.receipts import ReceiptBook
from swarm.base.ids import PeerId
from swarm.base.layers import Span
from swarm.compute import devices
from swarm.compute.kernels.support import KERNEL_VERSION, KernelSupport
from swarm.compute.weights import format as weights_format
from swarm.compute.weights.format import BITS
from swarm.directory.node_record import NodeState
from swarm.files.stored.source import SafetensorsSource, WeightSource
from swarm.protocol.numeric_class import ORDERED
from swarm.status.messages import Stamp
from tests.sample_records import MODEL

GRAPHS, REASON = "graphs + kernels", "no C compiler: install gcc"
CARD, PLAIN = f"cuda-sm90-bfloat16-k{KERNEL_VERSION}", "cuda-bfloat16"


def loaded(device: str, path: str, reason: str, kind: str, planned: str = "") -> tuple[SpanHost, list[str]]:
    """A host that has loaded a model which runs so, and what it said."""
    said: list[str] = []
    host = SpanHost(cast("NodeResources", SimpleNamespace(config=None, say=said.append)))
    host.numeric_class = planned
    held = torch.device(device)
    model = SimpleNamespace(device=held, path=path, path_reason=reason, numeric_class=kind, rounding="")
    host._note_path(cast("SpanModel", model))
    assert host.numeric_class == kind
    return host, said


@pytest.mark.parametrize(
    ("path", "reason", "kind", "lines"),
    [
        (GRAPHS, "", CARD, [f"path: {GRAPHS}"]),
        ("plain", REASON, PLAIN, [f"path: plain ({REASON})", f"note: this node computes in {PLAIN}, and was planned"]),
    ],
)
def test_loading_says_the_path_and_what_keeps_from_a_faster_one(
    path: str, reason: str, kind: str, lines: list[str]
) -> None:
    host, said = loaded("cuda", path, reason, kind, CARD)
    assert [one[: len(line)] for one, line in zip(said, lines, strict=True)] == lines
    assert f"path: {host.path_words}" == lines[0]


def test_a_cpu_runs_one_way_of_which_nothing_is_said() -> None:
    host, said = loaded("cpu", "plain", "cpu runs the plain path", "cpu-float32", "cpu-float32")
    assert (host.path_words, said) == ("", [])


@pytest.mark.parametrize(
    ("kind", "is_judged"), [(CARD, False), (PLAIN, True), ("cpu-float32+w4z", True), ("cpu-float32+mxfp4", False)]
)
def test_the_plain_paths_speed_judges_no_card_that_will_run_kernels(
    kind: str, monkeypatch: pytest.MonkeyPatch, *, is_judged: bool
) -> None:
    speed = LayerSpeed(0.0, {1: 1.0, 8: 1.0, 64: 1.0}, 1.0, "measured", is_measured=True)
    monkeypatch.setattr(node.life.planning, "benchmark", lambda *_: speed)
    about = {"order": SimpleNamespace(threads=None), "layout": None, "form": None, "compute": (None, None, None)}
    plan = cast("ServingPlan", SimpleNamespace(kind=ClassChoice(kind, ""), **about))
    found = _benchmark(plan)
    assert found.is_measured is is_judged
    assert ("by the plain path" in found.how or "not quantised" in found.how) is not is_judged


def test_a_card_can_do_without_kernels_where_the_swarm_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "kernel_support", lambda _: KernelSupport(kernels=True, compiled=True))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    cpu: Compute = (torch.device("cpu"), torch.float32, "auto")
    card: Compute = (torch.device("cuda"), torch.bfloat16, "auto")
    config = ServeConfig(layers="auto")
    found = _classes(config, [card, cpu], source(""))
    assert found == {CARD: (card, True), "cpu-float32": (cpu, True), PLAIN: (card, False)}
    assert next(iter(found)) == CARD, "its own choice"
    for plain in (replace(config, offload=True), replace(config, no_graphs=True)):
        assert list(_classes(plain, [card, cpu], source(""))) == [PLAIN, "cpu-float32"]


def source(encoding: str, *, has_codes: bool = False) -> WeightSource:
    """One of weights in a format."""
    return SafetensorsSource(Path(), "", {}, encoding=encoding, has_codes=has_codes)


def test_a_cpu_computes_with_the_promise_or_without_it_whatever_it_prefers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_format, "computes_bfloat16", lambda _: True)
    cpu: Compute = (torch.device("cpu"), torch.bfloat16, "auto")
    gguf = source("gguf", has_codes=True)
    promised, fast = "cpu-bfloat16-k2+gguf", "cpu-bfloat16-k1+gguf"
    assert list(_classes(ServeConfig(), [cpu], gguf, codes=ORDERED))[:2] == [promised, fast]
    assert list(_classes(ServeConfig(no_promise=True), [cpu], gguf, codes=ORDERED))[:2] == [fast, promised]
    assert promised not in _classes(ServeConfig(), [cpu], gguf), "of another family"


def test_a_quantised_checkpoint_stays_as_it_is_or_is_rounded_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "kernel_support", lambda _: KernelSupport(kernels=True, compiled=True))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    able: list[Compute] = [(torch.device("cuda"), torch.bfloat16, weights) for weights in BITS]
    found = _classes(ServeConfig(layers="auto"), able, source("mxfp4"))
    assert list(found)[:2] == [f"{CARD}+mxfp4", CARD], "its own choice runs the kernels"
    assert found[f"{PLAIN}+mxfp4"] == (able[0], False), "and another class without them"
    unread = _classes(ServeConfig(layers="auto"), able, source("bnbfp4"), reads_codes=False)
    assert list(unread)[:2] == [f"{PLAIN}+bnbfp4", CARD], "codes that kernels do not read run the plain path"
    assert {f"{CARD}+w8", f"{CARD}+w4z", f"{PLAIN}+w4z"} < found.keys()
    assert [compute[2] for compute, _ in found.values()].count("auto") == 2


def test_the_path_is_published_without_its_reason() -> None:
    snapshot = NodeSnapshot(Span(0, 4), NodeState.SERVING, CARD, ())
    shown = [snapshot]
    about = NodeDescription(
        MODEL, None, Device(torch.device("cpu")), NodeCounters(), lambda: shown[0], ReceiptBook(PeerId("Qm"))
    )
    report, stamp = NodeReport(about, Outbox()), Stamp("0" * 32, 1, 1_800_000_000.0)
    assert report.status(stamp, is_birth=True, leaving=False).path is None
    shown[0] = replace(snapshot, path=loaded("cuda", "plain", REASON, PLAIN)[0].path)
    assert report.status(stamp, is_birth=False, leaving=False).path == "plain"


def test_the_status_of_a_card_has_a_line_for_it() -> None:
    status = LocalStatus("key", 1, "0.2.0", Stage.SERVING, 1.0, 2.0)
    assert not [line for line in describe_running(status, 3.0) if "path" in line]
    assert f"  path: {GRAPHS}" in list(describe_running(replace(status, path=GRAPHS), 3.0))
    assert LocalStatus.of_json(replace(status, path=GRAPHS).as_json()).path == GRAPHS
