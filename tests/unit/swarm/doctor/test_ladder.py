"""How checks are run: at once, bounded, and none of them can stop the others. And how their findings are shown."""

from __future__ import annotations

import asyncio
import io
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

import node.cli
import swarm.cli
import swarm.doctor
from swarm.doctor import command
from swarm.doctor.command import Checkup, make_checkup, private_of
from swarm.doctor.diagnosis import Diagnosis, DoctorCheck, Level, Shared, examine, hint, ok, trouble
from swarm.doctor.options import Doctor
from swarm.doctor.processes import on_thread, run_program
from swarm.doctor.redaction import PrivateWords
from swarm.doctor.report import as_json, redacted, show
from swarm.runtime.console import PlainConsole, make_console

ROOT = Path(__file__).parents[4]
REFERENCE = ROOT / "docs/reference/doctor.md"
FULL = trouble("disk-full", "0.1 GiB is free for models in /home/anna/hub", "hf cache prune")
SLOW = hint("symmetric", "symmetric: every peer sees another port, so no hole can be made", "forward a TCP port")


@dataclass(frozen=True)
class PlantedCheck:
    """Finds this, or fails so."""

    name: ClassVar[str] = "planted"
    outcome: Diagnosis | Exception

    async def look(self) -> Sequence[Diagnosis]:
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return [self.outcome]


class HangingCheck:
    """Never ends."""

    name: ClassVar[str] = "hanging"

    async def look(self) -> Sequence[Diagnosis]:
        await asyncio.Event().wait()
        raise AssertionError


async def test_a_check_that_fails_or_hangs_stops_no_other() -> None:
    checks: list[DoctorCheck] = [HangingCheck(), PlantedCheck(RuntimeError("odd\n\x1b[2J")), PlantedCheck(FULL)]
    hanging, failed, full = await examine(checks, limit_s=0.05)
    assert (hanging.level, hanging.kind, hanging.check) == (Level.HINT, "not-known", "hanging")
    assert (failed.level, failed.text) == (Level.HINT, "not known: RuntimeError: odd \ufffd[2J")
    assert (full.check, full.kind) == ("planted", "disk-full")


async def test_an_answer_is_asked_for_once_and_its_error_is_for_all() -> None:
    asked = []

    async def ask() -> str:
        asked.append(1)
        raise ConnectionError("nobody")

    shared = Shared(ask)

    @dataclass(frozen=True)
    class AskingCheck:
        name: ClassVar[str] = "asking"

        async def look(self) -> Sequence[Diagnosis]:
            return [ok("x", await shared.get())]

    done: list[int] = []
    found = await examine([AskingCheck(), AskingCheck()], [shared], on_progress=done.append)
    assert [one.text for one in found] == ["not known: ConnectionError: nobody"] * 2
    assert (asked, done) == ([1], [1, 2])


async def test_an_answer_that_never_comes_ends_with_the_time() -> None:
    shared = Shared(asyncio.Event().wait)

    @dataclass(frozen=True)
    class WaitingCheck:
        name: ClassVar[str] = "waiting"

        async def look(self) -> Sequence[Diagnosis]:
            await shared.get()
            raise AssertionError

    (found,) = await examine([WaitingCheck()], [shared], limit_s=0.05)
    assert found.kind == "not-known"


async def test_calls_that_block_and_programs_that_hang_are_left_behind() -> None:
    assert await on_thread(lambda: 7) == 7
    with pytest.raises(OSError, match="no such name"):
        await on_thread(_no_name)
    assert await run_program(["sleep", "60"], limit_s=0.05) is None
    assert await run_program(["no-such-program"]) is None
    ran = await run_program(["sh", "-c", "echo said; echo wrong >&2; exit 3"])
    assert ran is not None
    assert (ran.status, ran.output.split()) == (3, ["said", "wrong"])


def _no_name() -> int:
    raise OSError("no such name")


def shown(found: Sequence[Diagnosis], *, verbose: bool = False, columns: int | None = None) -> str:
    output = io.StringIO()
    if columns is None:
        console = make_console(output, soft_wrap=True)
    else:
        console = PlainConsole(file=output, force_terminal=True, width=columns, no_color=True, highlight=False)
    show(found, console, verbose=verbose)
    return re.sub(r"\x1b\[[\d;]*m", "", output.getvalue())


FOUND = [ok("room", "90 GiB free"), FULL, SLOW]


async def test_in_a_pipe_each_finding_is_one_line() -> None:
    found = await examine([PlantedCheck(one) for one in FOUND])
    assert shown(found).splitlines() == [
        "trouble  planted    0.1 GiB is free for models in /home/anna/hub → hf cache prune",
        "hint     planted    symmetric: every peer sees another port, so no hole can be made → forward a TCP port",
        "well: planted",
        "1 trouble, 1 hint; this output can be pasted into an issue as it is",
    ]
    assert shown(found, verbose=True).splitlines()[0] == "ok       planted    90 GiB free"


async def test_on_a_terminal_the_mend_stands_below_and_nothing_is_wider() -> None:
    found = await examine([PlantedCheck(one) for one in FOUND])
    lines = [line.rstrip() for line in shown(found, columns=80).splitlines()]
    assert lines == [
        "trouble  planted  0.1 GiB is free for models in /home/anna/hub",
        "                  → hf cache prune",
        "hint     planted  symmetric: every peer sees another port, so no hole can be",
        "                  made",
        "                  → forward a TCP port",
        "well: planted",
        "1 trouble, 1 hint; this output can be pasted into an issue as it is",
    ]
    assert shown([]).splitlines() == ["nothing is in the way"]
    assert shown([SLOW]).splitlines()[-1] == "nothing is in the way; 1 hint"


def test_json_has_the_fields_of_the_reference() -> None:
    report = json.loads(as_json(redacted([FULL], PrivateWords("/home/anna")), 1.23))
    assert report["findings"] == [
        {
            "check": "",
            "level": "trouble",
            "kind": "disk-full",
            "text": "0.1 GiB is free for models in ~/hub",
            "mend": "hf cache prune",
        }
    ]
    assert (report["v"], report["took_s"], report["troubles"], report["hints"]) == (1, 1.2, 1, 0)
    page = REFERENCE.read_text(encoding="utf-8")
    documented = set(re.findall(r"^\| `(\w+)` \|", page.partition("## JSON")[2], re.MULTILINE))
    assert documented == set(report) | set(report["findings"][0])


def test_every_kind_and_every_check_is_in_the_reference() -> None:
    sources = "\n".join(path.read_text("utf-8") for path in Path(swarm.doctor.__path__[0]).glob("*.py"))
    kinds = set(re.findall(r"\b(?:ok|hint|trouble|level)\(\s*\"([a-z0-9-]+)\"", sources))
    checks = {check.name for check in make_checkup(Doctor(), {}).checks}
    rows = re.findall(r"^\| `([a-z0-9]+)` \| (.+?) \| (.+?) \|$", REFERENCE.read_text("utf-8"), re.MULTILINE)
    assert {name for name, _, _ in rows} == checks
    named = {kind for _, _, cell in rows for kind in re.findall(r"`([a-z0-9-]+)`", cell)}
    assert len(kinds) > 60
    assert {kind for kind in kinds if kind != "not-known"} == named


def test_names_in_options_are_private_whatever_they_are() -> None:
    options = Doctor(
        join=("/dns4/boot.friends.example/tcp/1/p2p/Qm", "rubbish", "/ip4/x/tcp/99999999"), mqtt="mqtt://["
    )
    checkup: Checkup = make_checkup(options, {})
    assert len({check.name for check in checkup.checks}) == len(checkup.checks) == 22
    assert "boot.friends.example" in private_of(options, {}).names


@pytest.mark.parametrize(("program", "main"), [("swarm", swarm.cli.main), ("node", node.cli.main)])
def test_both_programs_have_the_command(
    program: str, main: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Doctor] = []

    def run_doctor(options: Doctor, *_: object) -> int:
        asked.append(options)
        return 1

    monkeypatch.setattr(command, "run_doctor", run_doctor)
    monkeypatch.setattr("sys.argv", [program, "doctor", "--json", "--port", "31338", "--port", "31339"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 1
    assert asked == [Doctor(port=(31_338, 31_339), json=True)]


async def test_a_whole_look_prints_and_says_how_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    output = io.StringIO()
    checkup = Checkup([PlantedCheck(FULL), PlantedCheck(FOUND[0])], ())
    monkeypatch.setattr(command, "make_checkup", lambda *_: checkup)
    assert await command.doctor(Doctor(), make_console(output, soft_wrap=True), environment={}) == 1
    assert output.getvalue().startswith("trouble  planted    0.1 GiB is free for models in /home/<user>/hub → hf cache")
    checkup = Checkup([PlantedCheck(SLOW)], ())
    assert await command.doctor(Doctor(), make_console(output, soft_wrap=True), environment={}) == 0
