"""What `swarm top` says of a state: harmless text, the map at every width, lines that fit, freshness, addresses."""

from __future__ import annotations

import copy
import json

import pytest
from rich.cells import cell_len

from benchmarks.operations import page_states
from swarm.base.errors import ConfigError, RemoteProtocolError
from swarm.base.layers import Span, name_layers
from swarm.health.remote.client import service_url
from swarm.health.remote.state import MAX_TEXT, State, harmless, read_state
from swarm.health.top.feed import STALE_S, LatestState
from swarm.health.top.screen import (
    COLUMNS,
    GAP,
    LABEL,
    Columns,
    choose,
    duration,
    fitted,
    fitting,
    head,
    journal,
    row,
    screen,
    table_head,
    table_row,
    verdict,
    waterfall,
)

ESCAPE = "\x1b[2J\x1b]0;owned\x07"


def read(state: page_states.State) -> State:
    return read_state(json.dumps(state))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("greenhouse", "greenhouse"),
        (ESCAPE, "�[2J�]0;owned�"),
        ("a\nb\tc\r", "a�b�c�"),
        ("\u202egnp.exe", "�gnp.exe"),
        ("z\u0300\u0301\u0302\u0303", "z����"),
        ("e\u0301", "é"),
        ("\x9b31m", "�31m"),
        ("模型", "模型"),
        ("x" * 5_000, "x" * MAX_TEXT),
    ],
)
def test_a_strangers_text_moves_no_cursor(text: str, shown: str) -> None:
    assert harmless(text) == shown


def test_no_text_of_a_state_reaches_a_terminal_unchecked() -> None:
    def poisoned(value: object) -> object:
        match value:
            case str():
                return value if value in {"serving", "broken"} else f"{value}{ESCAPE}[red]"
            case list():
                return [poisoned(one) for one in value]
            case dict():
                return {name: poisoned(one) for name, one in value.items()}
        return value

    state = read_state(json.dumps(poisoned(page_states.degraded())))
    text = "\n".join(line.plain for line in screen(state, state.models[0], 200))
    assert not [one for one in text if one != "\n" and (ord(one) < 32 or 127 <= ord(one) < 160)]
    assert "[red]" in text


def test_only_a_line_that_serves_layers_is_offered_to_copy() -> None:
    state = page_states.broken()
    (line,) = state["models"][0]["fixes"]
    state["models"][0]["fixes"] = [f"{line} --mqtt=mqtt://evil.example", f"{line}\n", "x" * 5_000, line]
    assert read_state(json.dumps(state)).models[0].fixes == (line,)


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.update(v=2),
        lambda state: state.pop("models"),
        lambda state: state.update(at="soon"),
        lambda state: state["models"][0]["nodes"][0].update(span=[0, 10**9]),
        lambda state: state["models"][0].update(replicas=[1] * 5_000),
    ],
)
def test_what_is_no_state_is_refused(change: object) -> None:
    assert callable(change)
    state = page_states.serving()
    change(state)
    with pytest.raises(RemoteProtocolError):
        read(state)


@pytest.mark.parametrize("num_layers", [1, 12, 80, 126, 400])
@pytest.mark.parametrize("room", [20, 64, 79, 200])
def test_the_map_fits_and_shows_every_gap(num_layers: int, room: int) -> None:
    nodes = [page_states.node(1, (0, num_layers))]
    for gone in range(0, num_layers, 37):
        model = page_states.model(nodes, num_layers, missing=[[gone, gone + 1]], replicas=[1] * num_layers)
        model["replicas"][gone] = 0
        shown = read(page_states.state(model)).models[0]
        axis, counts = head(shown, room)
        bar = row(shown.nodes[0], shown, room)
        for text in (axis, counts, bar):
            assert cell_len(text.plain) <= room
        assert "✗" in counts.plain[LABEL:]
        assert axis.plain[LABEL] == "0"


def test_columns_share_the_room() -> None:
    assert Columns.fit(12, 64).cells((4, 8)) == (20, 40)
    many = Columns.fit(400, 50)
    assert [many.layers(cell) for cell in (0, 49)] == [range(8), range(392, 400)]
    assert many.cells((399, 400)) == (49, 50)
    covered = {layer for cell in range(50) for layer in many.layers(cell)}
    assert covered == set(range(400))


def test_a_gap_runs_through_all_rows_and_signs_need_no_colour() -> None:
    model = read(page_states.broken()).models[0]
    rows = {node.label: row(node, model, 80).plain for node in model.nodes}
    assert rows["greenhouse"][LABEL:] == "█" * 20 + GAP * 20 + " " * 20
    assert rows["attic"].startswith("✗")
    assert "offline 4…7" in rows["attic"]
    assert "░" in rows["new-one"]


def test_a_broken_model_has_no_number_of_machines_to_spare() -> None:
    state = read(page_states.broken())
    text = "\n".join(line.plain for line in verdict(state.models[0], state.at, is_stale=False))
    assert "  broken: layers 4…7 missing · " in text
    assert "to spare" not in text
    working = read(page_states.serving())
    assert "to spare" in verdict(working.models[0], working.at, is_stale=False)[2].plain


@pytest.mark.parametrize("width", [20, 40, 79, 120, 200])
@pytest.mark.parametrize("name", ["serving", "degraded", "broken", "dht_only", "several", "crowd"])
def test_every_line_fits(name: str, width: int) -> None:
    state = read(getattr(page_states, name)())
    model = state.models[0]
    for node in model.nodes[:30]:
        assert cell_len(table_row(node, state.at, width).plain) <= width
    assert cell_len(table_head(width).plain) <= width
    assert all(fitting(width)[place] is column for place, column in enumerate(COLUMNS[: len(fitting(width))]))
    if width >= 79:
        assert all(cell_len(line.plain) <= width for line in waterfall(model, state.at, width)[1:])


def test_the_verdict_says_what_is_missing_in_the_pages_words() -> None:
    model = read(page_states.broken()).models[0]
    lines = [line.plain for line in verdict(model, model.since + 75, is_stale=False)]
    assert lines[0].startswith("✗ BROKEN  demo-target")
    assert lines[0].endswith("for 1 min")
    assert lines[-1] == "  missing: layers 4…7; on any machine, run:"
    assert "last known" in verdict(model, model.since, is_stale=True)[0].plain


def test_a_probe_that_failed_gives_no_dash_for_a_speed() -> None:
    state = page_states.broken()
    for probe, said in (
        (None, "not probed yet"),
        ({"at": page_states.AT, "ok": False, "error": "nobody serves it"}, "its last probe gave no speed"),
        ({"at": page_states.AT, "ok": True, "tokens_per_s": 9.87}, "9.9 tokens/s probed"),
    ):
        state["models"][0]["probe"] = probe
        assert verdict(read(state).models[0], page_states.AT, is_stale=False)[2].plain.endswith(f" · {said}")


def test_a_model_is_found_by_name_fingerprint_or_beginning_and_the_worst_is_the_first() -> None:
    state = read(page_states.several())
    names = [choose(state, wanted) for wanted in ("Qwen/Qwen3-32B", "c3" * 16, "c3c3", "openai", None)]
    assert [model and model.name for model in names] == [
        "Qwen/Qwen3-32B", "openai/gpt-oss-120b", "openai/gpt-oss-120b", "openai/gpt-oss-120b", "demo-target"
    ]  # fmt: skip
    assert choose(state, "nobody's") is None
    assert choose(read(page_states.empty()), None) is None


def test_a_command_is_never_cut() -> None:
    state = read(page_states.broken())
    assert any(line.plain.endswith(page_states.JOIN) for line in screen(state, state.models[0], 40))


def test_a_state_that_is_told_again_renews_nothing() -> None:
    now, drawn = [100.0], [0]

    def changed() -> None:
        drawn[0] += 1

    watched = LatestState(changed, lambda: now[0])
    before = page_states.serving()
    watched.take(read(before))
    now[0] += STALE_S + 1
    watched.take(read(before))
    assert (watched.is_stale, drawn) == (True, [1])
    older = copy.deepcopy(before)
    older["at"] -= 5
    watched.take(read(older))
    assert watched.is_stale
    watched.fail("the connection broke")
    watched.take(read(page_states.later(before)))
    assert (watched.is_stale, watched.trouble, drawn) == (False, None, [3])
    now[0] += 2
    assert watched.now == before["at"] + 2.5
    watched.take(read({**older, "started_at": 1.0}))  # the service was started anew, by another clock
    assert watched.state is not None
    assert watched.state.started_at == 1.0


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("http://h:8080", "http://h:8080/"),
        ("https://h/swarm/?x=1#y", "https://h/swarm/"),
        ("http://[::1]:8080/a", "http://[::1]:8080/a/"),
    ],
)
def test_an_address_is_completed(given: str, meant: str) -> None:
    assert str(service_url(given)) == meant


@pytest.mark.parametrize(
    "given", ["", "h:8080", "ftp://h/", "http://", "http://h:port", "/ip4/1.2.3.4", "http://h:99999999"]
)
def test_an_address_that_is_none_is_said(given: str) -> None:
    with pytest.raises(ConfigError, match="--url"):
        service_url(given)


def test_words() -> None:
    assert [duration(seconds) for seconds in (0.4, 61, 3_700, 90_000, None, -5)] == [
        "0 s",
        "1 min",
        "1 h 1 min",
        "1 d 1 h",
        "–",
        "0 s",
    ]
    assert [fitted("模型模型", width) for width in (0, 1, 4, 8, 10)] == ["", "…", "模 …", "模型模型", "模型模型  "]


@pytest.mark.parametrize(
    ("spans", "said"),
    [
        ([Span(3, 4)], "layer 3"),
        ([Span(4, 8)], "layers 4…7"),
        ([Span(0, 1), Span(3, 4)], "layers 0 and 3"),
        ([Span(0, 4), Span(6, 7), Span(8, 12)], "layers 0…3, 6 and 8…11"),
    ],
)
def test_layers_are_said_as_people_count(spans: list[Span], said: str) -> None:
    assert name_layers(spans) == said
    assert spans[0].describe(12) == f"{name_layers(spans[:1])} of 12"


def test_contributors_are_listed_by_what_clients_signed_for() -> None:
    state = page_states.serving()
    shown = [one.plain for one in journal(read(state), state["at"])]
    first = shown.index("Contributors by layer-tokens that clients signed for")
    assert shown[first + 1].split()[-1] == (state["contributors"][0]["name"] or state["contributors"][0]["short"])
    assert shown[first + 6] == "", "five, and no more"
