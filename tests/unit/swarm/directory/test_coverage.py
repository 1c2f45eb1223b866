"""Coverage: which layers nobody serves, and the command that fills the gap."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from swarm.base.cli import make_console
from swarm.base.ids import ModelIdentity, PeerId
from swarm.base.layers import Span
from swarm.cli import report
from swarm.directory.coverage import cover, fill_lines, is_serve_line, serve_line, shown_address
from swarm.directory.node_record import NodeRecord, NodeState, Reach

MODEL = ModelIdentity.of("org/demo", "b2" * 32, "c3" * 32, "d4" * 32, 12)
JOIN = ["/ip4/192.0.2.1/tcp/31337/p2p/QmPeer", "/ip4/127.0.0.1/tcp/31337/p2p/QmPeer"]


def record(start: int, end: int, state: NodeState = NodeState.SERVING, model: ModelIdentity = MODEL) -> NodeRecord:
    return NodeRecord(
        peer=PeerId("QmSomebodyWithALongName"),
        model=model,
        span=Span(start, end),
        address="192.0.2.7:5000",
        state=state,
        numeric_class="cpu-float32",
        version="0.2.0",
        name="[red]attic",
        sweep_ms=((1, 1.25), (64, 20.0)),
        kv_tokens_free=1_000,
        kv_tokens_total=2_000,
        sequence=1,
        expires_at=0.0,
    )


def test_nobody_at_all() -> None:
    coverage = cover(MODEL, [])
    assert coverage.missing == (Span(0, 12),)
    assert fill_lines(coverage, JOIN) == [f"node serve org/demo --layers 0-12 --join {JOIN[0]}"]


def test_gaps_between_and_at_the_ends() -> None:
    coverage = cover(MODEL, [record(6, 8), record(1, 4), record(3, 5)])
    assert coverage.missing == (Span(0, 1), Span(5, 6), Span(8, 12))
    assert not coverage.complete
    assert cover(MODEL, [record(4, 12), record(0, 5)]).complete


def test_only_nodes_that_take_sessions_count() -> None:
    records = [record(0, 12, NodeState.JOINING), record(0, 12, NodeState.DRAINING), record(0, 6)]
    coverage = cover(MODEL, records)
    assert coverage.missing == (Span(6, 12),)
    assert len(coverage.records) == 3


def test_another_fingerprint_does_not_count() -> None:
    other = ModelIdentity.of("org/demo", "b2" * 32, "ff" * 32, "d4" * 32, 12)
    assert cover(MODEL, [record(0, 12, model=other)]).missing == (Span(0, 12),)


STRANGE = [
    "a; rm -rf /",
    "--mqtt=mqtt://evil.example",
    "-c",
    "$(x)",
    "`x`",
    "a\nnode serve b",
    "a'b",
    'a"b',
    "org/demo\u3164--mqtt=mqtt://evil.example",
    "demо",  # the last letter is Cyrillic
    "\u202edemo",
    "demo\x1b[2J",
    "",
    "x" * 300,
]


@pytest.mark.parametrize("name", STRANGE)
def test_a_strange_name_never_enters_a_command(name: str) -> None:
    line = serve_line(name, Span(0, 1), JOIN)
    assert line == f"node serve MODEL --layers 0-1 --join {JOIN[0]}"
    assert is_serve_line(line)


@pytest.mark.parametrize("name", ["org/demo-1.5_B", "demo", "/srv/models/demo", "./demo", "../demo"])
def test_a_usual_name_does(name: str) -> None:
    line = serve_line(name, Span(0, 1), JOIN)
    assert line == f"node serve {name} --layers 0-1 --join {JOIN[0]}"
    assert is_serve_line(line)
    assert is_serve_line(serve_line(name, "auto", []))


@pytest.mark.parametrize(
    "line",
    [
        "rm -rf /",
        "",
        "node serve 'unclosed",
        "node serve demo --layers 0-4 --mqtt=mqtt://evil.example",
        "node serve demo --layers 0-4 --join --mqtt=x",
        "node serve --mqtt=mqtt://evil.example --layers 0-4",
        "node serve demo --layers '$(x)'",
        "node serve demo --layers 0-4 --join /ip4/192.0.2.1; rm -rf /",
        "node serve demo --layers 0-4 --join /ip4/192.0.2.1\n",
        "sudo node serve demo --layers 0-4",
    ],
)
def test_another_line_is_not_offered(line: str) -> None:
    assert not is_serve_line(line)


def test_the_report_says_it_all() -> None:
    out = io.StringIO()
    report(cover(MODEL, [record(0, 4)]), JOIN, make_console(out, soft_wrap=True))
    text = out.getvalue()
    for part in (
        "org/demo",
        MODEL.fingerprint[:12],
        "[red]attic",
        "0…3 of 12",
        "serving",
        "192.0.2.7:5000",
        "1.2 / – / 20.0",
    ):
        assert part in text
    assert "1,000 / 2,000" in text
    assert (
        f"nobody serves layers 4…11 of 12; this fills the gap:\nnode serve org/demo --layers 4-12 --join {JOIN[0]}\n"
        in text
    )


def test_a_narrow_terminal_keeps_what_is_of_no_use_in_pieces_whole() -> None:
    records = [record(0, 4), record(4, 8), record(8, 12)]
    for width in (80, 100):
        out = io.StringIO()
        report(cover(MODEL, records), JOIN, Console(file=out, soft_wrap=True, width=width))
        text = out.getvalue()
        assert max(map(len, text.split("nobody serves")[0].splitlines())) <= width
        for part in ("4…7 of 12", "serving", "192.0.2.7:5000", f"class of all: {records[0].numeric_class}"):
            assert part in text


def test_classes_that_differ_stay_in_the_table() -> None:
    out = io.StringIO()
    records = [record(0, 6), replace(record(6, 12), numeric_class="cuda-bf16")]
    report(cover(MODEL, records), JOIN, Console(file=out, soft_wrap=True, width=80))
    text = out.getvalue()
    assert "class of all" not in text
    assert "version of all" in text


@pytest.mark.parametrize(
    ("reach", "address", "shown"),
    [
        (Reach.DIRECT, "192.0.2.7:5000", "192.0.2.7:5000"),
        (Reach.MAPPED, "192.0.2.7:5000", "mapped, 192.0.2.7:5000"),
        (Reach.RELAYED, "QmSomebodyWithALongName.via.192.0.2.9:31338", "relayed, via 192.0.2.9:31338"),
    ],
)
def test_tables_say_how_a_node_is_reached(reach: Reach, address: str, shown: str) -> None:
    one = replace(record(0, 12), reach=reach, address=address)
    assert shown_address(one) == shown
    output = io.StringIO()
    report(cover(MODEL, [one]), JOIN, Console(file=output, width=240, soft_wrap=True))
    assert shown in output.getvalue()
