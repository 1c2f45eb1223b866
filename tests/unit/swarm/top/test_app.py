"""The live view without a terminal: every size, every state, keys, and what is old is said to be."""

from __future__ import annotations

import asyncio
import json

import pytest
from textual.widgets import Static

from benchmarks.operations import page_states
from swarm.health.remote.state import State, read_state
from swarm.top.app import PANES, LineList, TopApp
from swarm.top.feed import STALE_S, LatestState
from swarm.top.layer_map import in_order


def read(state: page_states.State) -> State:
    return read_state(json.dumps(state))


class Still:
    """A source that brings nothing, and a clock that stands."""

    def __init__(self) -> None:
        self.now = 50.0

    async def run(self, watched: LatestState) -> None:
        """Bring nothing."""
        await asyncio.Event().wait()

    def app(self, name: str, wanted: str | None = None) -> TopApp:
        """An app that shows this state."""
        app = TopApp(self.run, read(getattr(page_states, name)()), wanted)
        app.watched.clock = lambda: self.now
        return app


def said(app: TopApp, name: str) -> str:
    return str(app.query_one(f"#{name}", Static).visual)


def lines(app: TopApp, name: str) -> str:
    shown = app.query_one(f"#{name}", LineList)
    return "\n".join(shown.render_line(y).text for y in range(shown.size.height))


@pytest.mark.parametrize("name", ["broken", "empty", "crowd"])
async def test_every_state_is_drawn_at_every_size(name: str) -> None:
    app = Still().app(name)
    async with app.run_test(size=(80, 24)) as pilot:
        for width, height in ((150, 45), (20, 6), (8, 3)):
            await pilot.resize_terminal(width, height)
            await pilot.pause()
            assert all(
                len(app.query_one(f"#{pane}", LineList)._line(0).plain) < 300 for pane in PANES if name != "empty"
            )
        assert ("nobody serves a model" in said(app, "verdict")) == (name == "empty")
        await pilot.press("q")
    assert app.return_code == 0


async def test_what_is_old_is_said_to_be_and_a_broken_stream_too() -> None:
    still = Still()
    app = still.app("serving")
    async with app.run_test(size=(80, 24)) as pilot:
        assert "● live" in said(app, "top")
        assert not app.query_one("#freshness").has_class("shown")
        app.watched.fail("the connection broke")
        assert "reconnecting" in said(app, "top")
        assert said(app, "freshness") == "the connection broke; trying again"
        still.now += STALE_S + 1
        app.redraw()
        assert "✗ STALE" in said(app, "top")
        assert said(app, "freshness").startswith("STALE: no news for 16 s (the connection broke)")
        assert "last known: SERVING" in said(app, "verdict")
        app.watched.take(read(page_states.later(page_states.serving())))
        assert "● live" in said(app, "top")
        await pilot.press("q")


async def test_keys_choose_panes_models_and_order() -> None:
    app = Still().app("several")
    async with app.run_test(size=(100, 24)) as pilot:
        assert "demo-target" in said(app, "verdict")
        await pilot.press("right")
        assert "Qwen/Qwen3-32B" in said(app, "verdict")
        await pilot.press("left", "left")
        assert "openai/gpt-oss-120b" in said(app, "verdict")
        await pilot.press("right", "right", "tab", "s")
        await pilot.pause()
        model = app.model
        assert model is not None
        by_load = [node.label for node in sorted(model.nodes, key=lambda node: node.busy or 0)]
        assert [line.split()[2] for line in lines(app, "nodes").splitlines()[: len(by_load)]] == by_load
        await pilot.press("r")
        assert [line.split()[2] for line in lines(app, "nodes").splitlines()[: len(by_load)]] == by_load[::-1]
        await pilot.press("c")
        assert app.clipboard == "" if not model.fixes else app.clipboard == model.fixes[0]
        await pilot.press("question_mark")
        assert app.query_one("#help").has_class("shown")
        await pilot.press("escape", "3")
        assert app.query_one("#pane-probe").has_class("chosen")


async def test_the_command_is_copied_whole() -> None:
    app = Still().app("broken")
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("c")
        assert app.clipboard == page_states.broken()["models"][0]["fixes"][0]


async def test_a_place_in_a_long_list_is_kept() -> None:
    app = Still().app("crowd")
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("end")
        await pilot.pause()
        before = lines(app, "map")
        model = app.model
        assert model is not None
        assert before.splitlines()[-1].split()[1] == in_order(model.nodes)[-1].label
        assert app.query_one("#map", LineList).scroll_offset.y > 900
        app.watched.take(read(page_states.later(page_states.crowd())))
        await pilot.pause()
        assert lines(app, "map") == before
