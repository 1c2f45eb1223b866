"""The live view without a terminal: every size, every state, keys, and what is old is said to be."""

from __future__ import annotations

import json

import pytest
from rich.cells import cell_len

from benchmarks.operations import page_states
from swarm.health.remote.state import State, read_state
from swarm.health.top.feed import STALE_S, LatestState
from swarm.health.top.live import LiveView
from swarm.health.top.screen import in_order


def read(state: page_states.State) -> State:
    return read_state(json.dumps(state))


class Still:
    """A view of one state, and a clock that stands."""

    def __init__(self, name: str) -> None:
        self.now = 50.0
        self.view = LiveView(LatestState(lambda: None, lambda: self.now), None)
        self.view.watched.take(read(getattr(page_states, name)()))

    def lines(self, width: int = 100, height: int = 24) -> list[str]:
        return [line.plain.rstrip() for line in self.view.lines(width, height)]

    def said(self, width: int = 100, height: int = 24) -> str:
        return "\n".join(self.lines(width, height))


@pytest.mark.parametrize("name", ["broken", "empty", "crowd", "several"])
def test_every_state_is_drawn_at_every_size(name: str) -> None:
    for pane in "12345":
        still = Still(name)
        still.view.press(pane)
        for width, height in ((80, 24), (150, 45), (20, 6), (8, 3), (1, 1)):
            lines = still.view.lines(width, height)
            assert len(lines) == height
            assert max(cell_len(line.plain) for line in lines) <= width
    assert ("no machine serves a model here yet" in still.said()) == (name == "empty")


def test_a_large_terminal_shows_all_panes() -> None:
    screen = Still("serving").said(150, 45)
    assert all(title in screen for title in ("1 layers", "2 nodes", "3 probe", "4 alerts and events"))
    assert all(shown in screen for shown in ("machines", "KV free", "one sweep: ", "Events"))


def test_what_is_old_is_said_to_be_and_a_broken_stream_too() -> None:
    still = Still("serving")
    watched = still.view.watched
    assert "● live" in still.lines()[0]
    watched.fail("the connection broke")
    assert "reconnecting" in still.lines()[0]
    assert still.lines()[1] == "the connection broke; trying again"
    still.now += STALE_S + 1
    assert "✗ STALE" in still.lines()[0]
    assert still.lines()[1].startswith("STALE: no news for 16 s (the connection broke)")
    assert "last known: SERVING" in still.said()
    watched.take(read(page_states.later(page_states.serving())))
    assert "● live" in still.lines()[0]
    assert "STALE" not in still.said()


def test_keys_choose_panes_and_models() -> None:
    still = Still("several")
    assert "BROKEN  demo-target" in still.said()
    still.view.press("\x1b[C")
    assert "SERVING  Qwen/Qwen3-32B" in still.said()
    still.view.press("\x1b[D\x1bOD")
    assert "SERVING  openai/gpt-oss-120b" in still.said()
    still.view.press("\t")
    assert "KV free" in still.said()
    still.view.press("\x1b[Z3")
    assert "one sweep: " in still.said()
    still.view.press("?")
    assert "✗ and ╎ no machine" in still.said()
    still.view.press("x\x1b[1;5C")
    assert not still.view.is_over
    still.view.press("q")
    assert still.view.is_over


def test_the_command_is_never_cut() -> None:
    fix = page_states.broken()["models"][0]["fixes"][0]
    said = Still("broken").said(60)
    assert "".join(fix.split()) in "".join(said.split())


def test_a_place_in_a_long_list_is_kept() -> None:
    still = Still("crowd")
    still.view.press("\x1b[F")
    before = still.lines()
    model = still.view.model
    assert model is not None
    last = in_order(model.nodes)[-1]
    assert before[-2].split()[1] == last.label
    still.view.watched.take(read(page_states.later(page_states.crowd())))
    assert still.lines()[-10:] == before[-10:]
    still.view.press("\x1b[A")
    assert still.lines()[-2] == before[-3]
    still.view.press("\x1b[H")
    assert in_order(model.nodes)[0].label in still.said()
