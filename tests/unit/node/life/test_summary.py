"""The six lines in which a node says what it does and why."""

from __future__ import annotations

import io
import threading
from dataclasses import replace
from typing import Any, cast

import torch
from rich.console import Console

from node.life.joining import ClassChoice, LayerCount
from node.life.planning import ServingPlan
from node.life.summary import ServingSummary, TerminalSay
from node.model.config import ServeConfig
from node.model.loading import READ_SILENTLY_BYTES, ShowsProgress, progress_lines, reading_lines
from node.session.measure import LayerSpeed
from swarm.base.ids import PeerId
from swarm.base.layers import Span
from swarm.compute.weights.format import WeightFormat
from swarm.directory.node_record import NodeRecord
from tests.sample_records import MODEL, sample_record

SPEED = LayerSpeed(2.0, {1: 2.0, 8: 3.0, 64: 9.0}, 0.84, "measured on 2 synthetic layers", is_measured=True)
PLAN = ServingPlan(
    order=ServeConfig(),
    layout=cast("Any", None),
    records=(),
    compute=(torch.device("cpu"), torch.float32, "auto"),
    kind=ClassChoice("cpu-float32", "its own choice, as nobody serves the model yet"),
    count=LayerCount(4, "as many as its memory holds"),
    form=WeightFormat(torch.float32),
    speed=SPEED,
)
FIRST = ServingSummary(MODEL, "swarm/demo/demo", (), PLAN, Span(0, 4), "at 192.0.2.7:31338, by its own port")


def held(start: int, end: int) -> NodeRecord:
    return sample_record(PeerId(f"p{start}"), span=Span(start, end))


def test_the_first_machine_says_what_it_begins() -> None:
    assert FIRST.lines() == [
        f"model: swarm/demo/demo (12 layers, fingerprint {MODEL.fingerprint[:12]}), as you asked",
        "swarm: nobody serves it yet; this machine begins a swarm",
        "layers: the swarm needs layers 0…3 of 12 most, for nobody holds them; 4: as many as its memory holds",
        "computes: on cpu in float32, its own choice, as nobody serves the model yet; KV for 8,192 tokens or more: "
        "50% of the memory that is free then, 262,144 at most",
        "reached: at 192.0.2.7:31338, by its own port",
        "gives: about 14.0 ms per sweep of 8, at most 100 tokens/s in plain decoding (measured on 2 synthetic layers "
        "in 0.8 s)",
    ]


def test_who_named_the_model_is_said() -> None:
    assert replace(FIRST, why="as the invite says").lines()[0].endswith("), as the invite says")


def test_a_later_one_says_what_the_swarm_lacks_and_what_stands_in_its_way() -> None:
    plan = replace(
        PLAN,
        order=ServeConfig(kv_tokens=4_096),
        records=(held(0, 4), held(8, 12)),
        kind=ClassChoice("cpu-float32", "its own choice", "no chain can use it yet"),
        speed=None,
    )
    lines = replace(FIRST, asked=None, join=("/ip4/…",), plan=plan, span=Span(4, 8)).lines()
    assert lines[0].startswith("model: demo (") and lines[0].endswith("), the one that this swarm serves")  # noqa: PT018
    assert lines[1] == "swarm: 2 nodes serve it already, and nobody holds layers 4…7"
    assert lines[2].startswith("layers: the swarm needs layers 4…7 of 12 most, for nobody holds them")
    assert lines[3].endswith("KV for 4,096 tokens, as you asked")
    assert lines[5] == "gives: what is measured once the layers are loaded"
    assert lines[6:] == ["note: no chain can use it yet"]


def test_layers_that_the_user_chose_are_not_explained() -> None:
    plan = replace(PLAN, order=ServeConfig(layers="0-4"), records=(held(0, 12),), speed=None)
    lines = replace(FIRST, plan=plan).lines()
    assert len(lines) == 6
    assert lines[1] == "swarm: 1 node serves it already, and every layer is held"
    assert lines[2] == "layers: layers 0…3 of 12, as you asked"


# What a node shows on a terminal while files come and layers load, and in plain lines elsewhere.


def terminal() -> tuple[Console, io.StringIO]:
    written = io.StringIO()
    return Console(file=written, force_terminal=True, width=100, color_system=None), written


def test_a_terminal_shows_a_bar_that_ends_with_the_download() -> None:
    console, written = terminal()
    threads = threading.active_count()
    with TerminalSay(console) as say:
        assert isinstance(say, ShowsProgress)
        report = progress_lines(say)
        report("model-00001-of-00002.safetensors", 0, 2 << 20)
        report("model-00002-of-00002.safetensors", 1 << 20, 2 << 20)
        say("a line in between")
        report("model-00002-of-00002.safetensors", 2 << 20, 2 << 20)
        assert threading.active_count() == threads
    assert "a line in between" in written.getvalue()
    assert "fetching model-00002-of-00002.safetensors" in written.getvalue()


def test_what_failed_in_the_middle_leaves_no_bar() -> None:
    console, _ = terminal()
    threads = threading.active_count()
    try:
        with TerminalSay(console) as say:
            say.fetching("model.safetensors", 1, 10)
            raise OSError
    except OSError:
        pass
    assert threading.active_count() == threads


def test_loading_shows_that_something_goes_on() -> None:
    console, written = terminal()
    with TerminalSay(console) as say, say.working("loading 9 MiB of weights"):
        pass
    assert "loading 9 MiB of weights" in written.getvalue()


def test_elsewhere_there_are_few_plain_lines() -> None:
    lines: list[str] = []
    report = progress_lines(lines.append)
    for here in range(0, 1_001):
        report("model.safetensors", here, 1_000)
    assert 20 <= len(lines) <= 22
    assert lines[-1].startswith("fetching model.safetensors")


def test_reading_weights_is_told_where_it_takes_long() -> None:
    lines: list[str] = []
    for total in (READ_SILENTLY_BYTES - 1, 4 << 30):
        report = reading_lines(lines.append)
        for read in range(0, total + 1, 1 << 20):
            report("model.safetensors", read, total)
    assert len(lines) == 11
    assert lines[-1] == "reading the weights once, to know them by their contents: 4.0 of 4.0 GiB"
    console, written = terminal()
    with TerminalSay(console) as say:
        report = reading_lines(say)
        for read in (1 << 30, 4 << 30):
            report("model.safetensors", read, 4 << 30)
    assert "reading model.safetensors once" in written.getvalue()
