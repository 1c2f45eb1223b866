"""When a node pauses and when it goes on: by causes that flicker, by several at once, by sensors that fall silent."""

from __future__ import annotations

import pytest

from node.autostart.pausing import UNKNOWN_S, PauseCause, PauseJudge


class Scene:
    """A judge of two causes whose clock and sensors the test sets."""

    def __init__(self, begin_s: float = 10.0, end_s: float = 60.0) -> None:
        self.now = 1_000.0
        self.seen: dict[str, bool | None] = {"a game": False, "on battery": False}
        causes = [
            PauseCause("a game", lambda: self.seen["a game"], begin_s, end_s),
            PauseCause("on battery", lambda: self.seen["on battery"], begin_s, end_s),
        ]
        self.judge = PauseJudge(causes, lambda: self.now)

    def look(self, after_s: float = 0.0, game: bool | None = False, battery: bool | None = False) -> str | None:
        self.now += after_s
        self.seen = {"a game": game, "on battery": battery}
        return self.judge.look()


def test_a_cause_must_last_to_begin_and_be_away_to_end() -> None:
    scene = Scene()
    assert scene.look() is None
    assert scene.look(5, game=True) is None
    assert scene.look(9, game=True) is None
    assert scene.look(2, game=True) == "a game"
    assert scene.look(5) == "a game"
    assert scene.look(59) == "a game"
    assert scene.look(2) is None


def test_a_cause_that_flickers_neither_begins_nor_ends() -> None:
    scene = Scene()
    scene.look()
    assert [scene.look(6, game=bool(step % 2)) for step in range(20)] == [None] * 20
    scene.look(5, game=True)
    assert scene.look(10, game=True) == "a game"
    assert {scene.look(40, game=bool(step % 2)) for step in range(20)} == {"a game"}


def test_what_is_on_at_the_first_look_holds_at_once() -> None:
    assert Scene().look(battery=True) == "on battery"


def test_the_second_look_is_no_first_one() -> None:
    scene = Scene()
    assert scene.look(game=None) is None
    assert scene.look(5, game=True) is None


def test_all_causes_are_told_and_the_last_one_ends_the_pause() -> None:
    scene = Scene(begin_s=0.0, end_s=0.0)
    assert scene.look(1, game=True, battery=True) == "a game and on battery"
    assert scene.look(1, battery=True) == "on battery"
    assert scene.look(1) is None


def test_a_sensor_that_falls_silent_changes_nothing_for_a_while_and_holds_nothing_for_ever() -> None:
    scene = Scene()
    scene.look(game=True)
    assert scene.look(1, game=None) == "a game"
    assert scene.look(UNKNOWN_S - 1, game=None) == "a game"
    assert scene.look(2, game=None) is None
    assert scene.look(UNKNOWN_S, game=None) is None


def test_an_unknown_moment_breaks_a_beginning() -> None:
    scene = Scene()
    scene.look()
    scene.look(1, game=True)
    scene.look(8, game=None)
    assert scene.look(8, game=True) is None


@pytest.mark.parametrize("count", [0, 1])
def test_without_causes_there_is_nothing_to_look_for(count: int) -> None:
    judge = PauseJudge([PauseCause("x", lambda: False, 0, 0)] * count, lambda: 0.0)
    assert judge.is_needed == bool(count)
    assert judge.look() is None
