"""How rungs are asked: in causal order, bounded, and none of them can stop the others. And how findings are shown."""

from __future__ import annotations

import asyncio
import io
import json
import re
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final

import pytest

import node.cli
import swarm.cli
import swarm.doctor
from swarm.base.cli import PlainConsole, make_console
from swarm.doctor import command
from swarm.doctor.command import as_json, named_peers, private_of, redacted, show
from swarm.doctor.ladder import (
    Diagnoses,
    Diagnosis,
    Level,
    Once,
    Rung,
    climb,
    first_cause,
    hint,
    ok,
    trouble,
    unknown,
)
from swarm.doctor.options import Doctor
from swarm.doctor.probes import on_thread, run_program
from swarm.doctor.redaction import PrivateWords
from swarm.doctor.rungs import RUNGS

ROOT = Path(__file__).parents[4]
REFERENCE = ROOT / "docs/reference/doctor.md"
FULL: Final = trouble("disk-full", "0.1 GiB is free for models in /home/anna/hub", "hf cache prune")
SLOW: Final = hint("symmetric", "symmetric: every peer sees another port, so no hole can be made", "forward a TCP port")


def rung(name: str, outcome: Diagnoses | Exception | Callable[[], Awaitable[Diagnoses]], *after: str) -> Rung[None]:
    """Finds this, or fails so."""

    async def look(_: None) -> Diagnoses:
        if isinstance(outcome, Exception):
            raise outcome
        return await outcome() if callable(outcome) else outcome

    return Rung(name, "", (), look, after)


async def hang() -> Diagnoses:
    await asyncio.Event().wait()
    raise AssertionError


async def test_what_stands_on_a_trouble_is_not_asked_and_names_it() -> None:
    rungs = [
        rung("link", trouble("link-down", "down", "plug it in")),
        rung("route", AssertionError(), "link"),
        rung("dns", AssertionError(), "route"),
        rung("disk", FULL),
    ]
    found = await climb(rungs, None)
    assert [(one.rung, one.level.value, one.text) for one in found[:3]] == [
        ("link", "trouble", "down"),
        ("route", "not-asked", "because of link"),
        ("dns", "not-asked", "because of link"),
    ]
    assert first_cause(found) is found[0]


async def test_what_is_not_known_is_no_trouble_and_stops_nothing() -> None:
    rungs = [rung("dns", hang), rung("route", unknown("late")), rung("peers", [SLOW, ok("peers", "2")], "dns", "route")]
    found = await climb(rungs, None, limit_s=0.05)
    assert [one.level for one in found] == [Level.NOT_KNOWN, Level.NOT_KNOWN, Level.HINT, Level.OK]
    assert first_cause(found) is None


async def test_a_rung_that_fails_or_hangs_stops_no_other() -> None:
    done: list[int] = []
    rungs = [rung("one", hang), rung("two", RuntimeError("odd\n\x1b[2J")), rung("three", FULL)]
    hanging, failed, full = await climb(rungs, None, limit_s=0.05, on_progress=done.append)
    assert (hanging.level, hanging.kind, hanging.rung) == (Level.NOT_KNOWN, "not-known", "one")
    assert (failed.level, failed.text) == (Level.NOT_KNOWN, "not known: RuntimeError: odd \ufffd[2J")
    assert (full.rung, full.kind, done) == ("three", "disk-full", [1, 2, 3])


async def test_an_answer_is_asked_for_once_and_its_error_is_for_all() -> None:
    asked = []

    async def ask() -> str:
        asked.append(1)
        raise ConnectionError("nobody")

    once = Once(ask)

    async def look() -> Diagnoses:
        return ok("x", await once())

    found = await climb([rung("one", look), rung("two", look)], None)
    assert [one.text for one in found] == ["not known: ConnectionError: nobody"] * 2
    assert asked == [1]


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


FOUND: Final = [
    rung("room", ok("room", "90 GiB free")),
    rung("disk", FULL),
    rung("router", SLOW),
    rung("relay", AssertionError(), "disk"),
]


async def test_in_a_pipe_each_finding_is_one_line() -> None:
    found = await climb(FOUND, None)
    assert shown(found).splitlines() == [
        "trouble   disk       0.1 GiB is free for models in /home/anna/hub → hf cache prune",
        "hint      router     symmetric: every peer sees another port, so no hole can be made → forward a TCP port",
        "not asked, because of disk: relay",
        "well: room",
        "first cause: disk: 0.1 GiB is free for models in /home/anna/hub",
        "1 trouble, 1 hint; this output can be pasted into an issue as it is",
    ]
    lines = shown(found, verbose=True).splitlines()
    assert lines[0] == "ok        room       90 GiB free"
    assert lines[3] == "not-asked relay      because of disk"


async def test_on_a_terminal_the_mend_stands_below_and_nothing_is_wider() -> None:
    found = await climb(FOUND[:3], None)
    lines = [line.rstrip() for line in shown(found, columns=78).splitlines()]
    assert lines == [
        "trouble  disk    0.1 GiB is free for models in /home/anna/hub",
        "                 → hf cache prune",
        "hint     router  symmetric: every peer sees another port, so no hole can be",
        "                 made",
        "                 → forward a TCP port",
        "well: room",
        "first cause: disk: 0.1 GiB is free for models in /home/anna/hub",
        "1 trouble, 1 hint; this output can be pasted into an issue as it is",
    ]
    assert shown([]).splitlines() == ["nothing is in the way"]
    assert shown([SLOW, unknown("late")]).splitlines()[-1] == "nothing is in the way; 1 hint, 1 not known"


def test_json_has_the_fields_of_the_reference() -> None:
    report = json.loads(as_json(redacted([SLOW, FULL], PrivateWords("/home/anna")), 1.23))
    said = {
        "check": "",
        "level": "trouble",
        "kind": "disk-full",
        "text": "0.1 GiB is free for models in ~/hub",
        "mend": "hf cache prune",
    }
    assert report["findings"][1] == report["first_cause"] == said
    assert (report["v"], report["took_s"], report["troubles"], report["hints"]) == (2, 1.2, 1, 1)
    assert json.loads(as_json([SLOW], 1.0))["first_cause"] is None
    page = REFERENCE.read_text(encoding="utf-8")
    documented = set(re.findall(r"^\| `(\w+)` \|", page.partition("## JSON")[2], re.MULTILINE))
    assert documented == set(report) | set(said)
    assert all(f"`{level.value}`" in page for level in Level)


def test_the_reference_has_the_rungs_as_they_are() -> None:
    page = REFERENCE.read_text("utf-8")
    rows = re.findall(r"^\| `([a-z0-9-]+)` \| (.+?) \| (.*?) \| (.+?) \|$", page, re.MULTILINE)

    def listed(names: Sequence[str]) -> str:
        return ", ".join(f"`{name}`" for name in names)

    assert rows == [(one.name, one.asks, listed(one.after), listed(one.finds)) for one in RUNGS]
    assert page.index("## Beside the ladder") > page.index(
        f"| `{[one.name for one in RUNGS if not one.is_beside][-1]}`"
    )


def test_every_kind_is_one_rungs_and_every_rung_stands_on_those_before_it() -> None:
    folder = Path(swarm.doctor.__path__[0])
    sources = "\n".join(path.read_text("utf-8") for path in folder.glob("*.py") if path.name != "rungs.py")
    kinds = set(re.findall(r"\b(?:ok|hint|trouble|level)\(\s*\"([a-z0-9-]+)\"", sources))
    kinds |= set(re.findall(r"\"(peer-[a-z]+)\"", sources)) | {"hip", "xpu", "no-way-in", "no-relay"}
    declared = [kind for one in RUNGS for kind in one.finds]
    assert (len(declared), set(declared)) == (len(set(declared)), kinds)
    names = [one.name for one in RUNGS]
    assert len(names) == len(set(names)) == 30
    beside = {one.name for one in RUNGS if one.is_beside and not one.after}
    assert all(set(one.after) <= beside | set(names[:place]) for place, one in enumerate(RUNGS))


def test_no_mend_replaces_a_build_that_works_and_none_deletes() -> None:
    folder = Path(swarm.doctor.__path__[0])
    sources = "\n".join(path.read_text("utf-8") for path in folder.glob("*.py"))
    forced = re.findall(r"--force-reinstall[^\"]*", sources)
    assert forced
    assert all(one.startswith("--force-reinstall --no-deps") for one in forced)
    assert re.search(r"\brm -|\bpip uninstall|--purge", sources) is None


def test_names_in_options_are_private_whatever_they_are() -> None:
    options = Doctor(
        join=("/dns4/boot.friends.example/tcp/1/p2p/QmcFc6EWdY8jCqJvdoGZbgTgqkkYbC2dSSc8BtGVRTMxYJ", "rubbish"),
        mqtt="mqtt://[",
    )
    peers = named_peers(options)
    assert [peer.host for peer in peers] == ["boot.friends.example", ""]
    assert "boot.friends.example" in private_of(options, peers, {}).names


@pytest.mark.parametrize(("program", "main"), [("swarm", swarm.cli.main), ("node", node.cli.main)])
def test_both_programs_have_the_command(
    program: str, main: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Doctor] = []

    def run_doctor(options: Doctor, *_: object) -> int:
        asked.append(options)
        return 1

    monkeypatch.setattr(command, "run_doctor", run_doctor)
    word = "canopy://AAAA"
    monkeypatch.setattr("sys.argv", [program, "doctor", word, "--json", "--port", "31338", "--port", "31339"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 1
    (options,) = asked
    assert (options.join, options.port, options.json) == ((word,), (31_338, 31_339), True)


async def test_a_whole_look_prints_and_says_how_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    output = io.StringIO()
    monkeypatch.setattr(command, "RUNGS", FOUND[:2])
    assert await command.doctor(Doctor(), make_console(output, soft_wrap=True), environment={}) == 1
    line = "trouble   disk       0.1 GiB is free for models in /home/<user>/hub → hf cache"
    assert output.getvalue().startswith(line)
    monkeypatch.setattr(command, "RUNGS", [FOUND[2]])
    assert await command.doctor(Doctor(), make_console(output, soft_wrap=True), environment={}) == 0
