"""Whether a swarm of the local network is joined: asked once, remembered, never without a user."""

from __future__ import annotations

import io
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from swarm.base.errors import ConfigError
from swarm.base.ids import SwarmId
from swarm.directory.dht.addresses import OPEN_SWARM, Membership
from swarm.directory.joining import lan_choice
from swarm.directory.joining.lan import LanSwarm
from swarm.directory.joining.lan_choice import MAX_ANSWERS, LanAnswers, LanSearch, with_lan
from tests.lan_swarms import PEERS, address_of

DEMO = LanSwarm((address_of(0),), "demo-target", "0123456789ab", swarm=SwarmId(bytes(range(16))))
OTHER = LanSwarm((address_of(1),), "owner/large", "aa9876543210", is_private=True)


class Terminal:
    """Types the same answer to every question."""

    def __init__(self, typed: str) -> None:
        self.typed = typed
        self.questions: list[str] = []
        self.lines: list[str] = []

    def ask(self, question: str) -> str:
        self.questions.append(question)
        return self.typed


def search(terminal: Terminal, folder: Path, found: list[LanSwarm], **changes: Any) -> LanSearch:  # noqa: ANN401
    def listen() -> list[LanSwarm]:
        return found

    fields: dict[str, Any] = {
        "mode": "ask",
        "ask": terminal.ask,
        "answers": LanAnswers(folder / "lan.json"),
        "listen": listen,
    }
    return LanSearch(say=terminal.lines.append, **(fields | changes))


def test_the_user_is_asked_once_per_swarm(tmp_path: Path) -> None:
    terminal = Terminal("\n")
    assert search(terminal, tmp_path, [DEMO]).find() == DEMO
    assert terminal.questions == [
        "swarm 00010203 that serves demo-target (0123456789ab) at 192.168.1.7 was found: join it? [Y/n] "
    ]
    assert search(terminal, tmp_path, [DEMO]).find() == DEMO
    assert len(terminal.questions) == 1
    assert terminal.lines[-1].endswith("you said so before")


def test_a_no_is_remembered_too(tmp_path: Path) -> None:
    terminal = Terminal("n")
    assert search(terminal, tmp_path, [DEMO, OTHER]).find() is None
    assert len(terminal.questions) == 2
    assert "a private swarm that serves owner/large" in terminal.questions[1]
    assert search(terminal, tmp_path, [DEMO]).find() is None
    assert len(terminal.questions) == 2


def test_without_a_terminal_nobody_is_asked_and_nothing_heard(tmp_path: Path) -> None:
    terminal = Terminal("y")

    def listen() -> list[LanSwarm]:
        raise AssertionError("nobody is to be heard")

    assert search(terminal, tmp_path, [], ask=None, listen=listen).find() is None
    assert search(terminal, tmp_path, [], mode="no", listen=listen).find() is None
    assert not terminal.lines


def test_yes_joins_the_only_one_and_refuses_to_guess(tmp_path: Path) -> None:
    terminal = Terminal("")
    with pytest.raises(ConfigError, match=f"2 swarms were found.*--join {OTHER.join[0]}"):
        search(terminal, tmp_path, [DEMO, OTHER], mode="yes", ask=None).find()
    assert search(terminal, tmp_path, [DEMO], mode="yes", ask=None).find() == DEMO
    assert search(terminal, tmp_path, [DEMO, OTHER], mode="yes", ask=None).find() == DEMO  # which it joined before
    assert not terminal.questions


def test_an_answer_is_for_one_peer_of_one_swarm(tmp_path: Path) -> None:
    """Whoever announces a swarm's id is asked about anew, and so is a known peer that is of another swarm by now."""
    terminal = Terminal("y")
    here = replace(DEMO, swarm=SwarmId(bytes(16)))
    stranger, moved = replace(OTHER, swarm=here.swarm), replace(here, swarm=SwarmId(bytes([1] * 16)))
    for number, found in enumerate((here, here, stranger, moved)):
        assert search(terminal, tmp_path, [found]).find() == found
        assert len(terminal.questions) == (1, 1, 2, 3)[number]
    assert "swarm 00000000 that serves demo-target" in terminal.questions[0]
    (tmp_path / "lan.json").write_text(f'{{"{PEERS[0]}": true}}')  # as release 0.2 wrote it
    for number, found in enumerate((here, moved)):
        assert search(terminal, tmp_path, [found]).find() == found
        assert len(terminal.questions) == 3 + number


def test_only_swarms_of_the_wanted_model_are_offered(tmp_path: Path) -> None:
    terminal, bare = Terminal("y"), LanSwarm((address_of(2),))
    found = search(terminal, tmp_path, [OTHER, bare], model="/models/demo-target").find()
    assert found == bare
    assert len(terminal.questions) == 1
    assert search(terminal, tmp_path, [DEMO], model="/models/demo-target").find() == DEMO


@pytest.mark.parametrize("content", ["", "[]", "{", '{"x": true}', f'{{"{PEERS[0]}": "yes"}}', "[" * 20_000])
def test_a_damaged_file_of_answers_is_no_answer(content: str, tmp_path: Path) -> None:
    path = tmp_path / "lan.json"
    path.write_text(content)
    assert LanAnswers(path).of(DEMO) is None
    LanAnswers(path).remember(DEMO, answer=True)
    assert LanAnswers(path).of(DEMO) is True


def test_few_answers_are_remembered_and_none_where_the_folder_is_closed(tmp_path: Path) -> None:
    answers = LanAnswers(tmp_path / "new" / "lan.json")
    alphabet = "123456789ABCDEFGHJKLMNPQRSTUVWXYZ"
    peers = [PEERS[0][:-2] + a + b for a in alphabet[:9] for b in alphabet[:9]]
    swarms = [replace(DEMO, join=(DEMO.join[0].replace(PEERS[0], peer),)) for peer in peers]
    for swarm in swarms:
        answers.remember(swarm, answer=True)
    assert 0 < len([swarm for swarm in swarms if answers.of(swarm)]) <= MAX_ANSWERS
    LanAnswers(Path("/proc/nowhere/lan.json")).remember(DEMO, answer=True)


@dataclass(frozen=True)
class Command:
    """What commands that join a swarm have in common."""

    join: tuple[str, ...] = ()
    model: str | None = None
    new: bool = False
    membership: Membership = OPEN_SWARM


@pytest.fixture
def one_swarm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Terminal:
    """A terminal at which everything is answered with Enter, in a network with one swarm."""
    terminal = Terminal("\n")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(lan_choice, "_typed", terminal.ask)
    monkeypatch.setattr(lan_choice, "_heard", lambda: [DEMO])
    monkeypatch.setattr(lan_choice, "can_ask", lambda: True)
    return terminal


def test_a_command_that_names_no_swarm_gets_the_one_of_the_network(one_swarm: Terminal) -> None:
    say = one_swarm.lines.append
    meant = Membership(swarm=DEMO.swarm, is_certain=True)
    assert with_lan(Command(), "ask", say) == Command(DEMO.join, membership=meant)
    assert with_lan(Command(), "ask", say, wants_model=True) == Command(DEMO.join, "demo-target", membership=meant)
    found = with_lan(Command(model="demo-target"), "ask", say)
    assert found == Command(DEMO.join, "demo-target", membership=meant)
    assert found.membership.sources[DEMO.join[0]].text == "found in the local network"
    assert len(one_swarm.questions) == 1


def test_a_command_that_names_one_or_begins_one_is_left_as_it_is(one_swarm: Terminal) -> None:
    for command in (Command((address_of(1),)), Command(new=True)):
        assert with_lan(command, "yes", one_swarm.lines.append) is command
    other = Command(model="another")
    assert with_lan(other, "yes", one_swarm.lines.append) is other
    assert with_lan(Command(), "no", one_swarm.lines.append) == Command()
    assert not one_swarm.questions


def test_without_a_terminal_a_command_goes_on_alone(one_swarm: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lan_choice, "can_ask", lambda: False)
    assert with_lan(Command(), "ask", one_swarm.lines.append) == Command()
    assert not one_swarm.lines


def test_the_end_of_input_is_a_no(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    monkeypatch.setattr(sys, "stderr", asked := io.StringIO())
    assert lan_choice._typed("join it? ") == "no"
    assert asked.getvalue() == "join it? "
