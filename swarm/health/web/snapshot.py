"""The page as files for any static host: state, history and badges as they are now, and a page that shows their age.

Every file is written beside its place and renamed into it, so a reader never gets half of one; links are never
followed. Only a folder that is new, empty or a snapshot's is written to.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

import httpx2
from jinja2 import Environment

from swarm.base.errors import ConfigError, RegistryError, RemoteProtocolError
from swarm.base.files import replace_file, strict_json
from swarm.health.remote.client import STATE, TIMEOUT, ask_bytes, service_url
from swarm.health.remote.state import copyable, read_state
from swarm.health.web.badge import badge

PAGE: Final = Path(__file__).parent / "page"
WINDOWS: Final = ("1h", "24h", "30d")
MARK: Final = 'name="canopy-snapshot"'
FOLDERS: Final = ("page", "history", "badge")
OWN: Final = frozenset({*FOLDERS, "state.json"})
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'"
)
"""The service's own policy, without `frame-ancestors`, which a page cannot set for itself."""
_FINGERPRINT: Final = re.compile(r"[0-9a-f]{8,128}")
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9._-]+")

ReadHistory = Callable[[str, str], Awaitable[Mapping[str, Any]]]
"""A model's history for a window; KeyError where there is none."""

_HEAD: Final = Environment(autoescape=True).from_string(
    """\
<meta http-equiv="Content-Security-Policy" content="{{ policy }}">
<meta name="canopy-snapshot" content="{{ taken }}">"""
)
_STILL: Final = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(
    """\
<section id="still">
  <p class="banner is-warning"><span>This is a <strong>snapshot</strong> of
  <time datetime="{{ taken }}">{{ date }}</time>, and not a live view. The rest of the page draws itself
  with JavaScript, from a web server; the same facts are in <a href="state.json">state.json</a>.</span></p>
  {% for model in models %}
  <article class="panel still">
    <h2>{{ model.name }}</h2>
    <p>At that time: <strong>{{ model.verdict }}</strong>: {{ model.reason }}</p>
    {% for fix in model.fixes[:1] %}
    <div class="command"><pre><code>{{ fix }}</code></pre></div>
    {% endfor %}
  </article>
  {% else %}
  <p class="panel">At that time nobody served a model.</p>
  {% endfor %}
</section>"""
)


@dataclass(frozen=True, slots=True)
class PageSnapshot:
    """A state and its histories, by (fingerprint, window)."""

    state: Mapping[str, Any]
    histories: Mapping[tuple[str, str], Mapping[str, Any]] = field(default_factory=dict)

    @classmethod
    async def take(cls, state: Mapping[str, Any], points: ReadHistory) -> PageSnapshot:
        """Collect it; a model of which nothing is recorded has no history."""
        found: dict[tuple[str, str], Mapping[str, Any]] = {}
        for fingerprint in _fingerprints(state):
            for window in WINDOWS:
                try:
                    found[fingerprint, window] = await points(fingerprint, window)
                except KeyError:
                    continue
        return cls(state, found)

    def files(self, page: Path = PAGE) -> dict[str, bytes]:
        """Every file by its path; those that others refer to come first."""
        found = {f"page/{path.name}": path.read_bytes() for path in sorted(page.iterdir()) if path.suffix != ".html"}
        for (fingerprint, window), history in self.histories.items():
            found[f"history/{fingerprint}.{window}.json"] = _json(history)
        for name, fingerprint in self._badges().items():
            found[f"badge/{name}.svg"] = badge(self.state, fingerprint).svg.encode()
        found["state.json"] = _json(self.state)
        found["index.html"] = self.index((page / "index.html").read_text(encoding="utf-8")).encode()
        return found

    def index(self, live: str) -> str:
        """The page's HTML, marked as a snapshot."""
        at = datetime.fromtimestamp(self.state["at"], UTC)
        taken = at.strftime("%Y-%m-%dT%H:%M:%SZ")
        still = _STILL.render(taken=taken, date=at.strftime("%d %B %Y, %H:%M UTC"), models=self.state["models"])
        text = _between(live, "live", "")
        text = text.replace("<!-- snapshot: head -->", _HEAD.render(policy=POLICY, taken=taken))
        text = text.replace("<!-- snapshot: body -->", still).replace('<div id="loading"', '<div hidden id="loading"')
        return text.replace('"api/v1/state"', '"state.json"')

    def _badges(self) -> dict[str, str]:
        """File names of badges, and the fingerprint of each: one by the fingerprint, one by the name made harmless."""
        names: dict[str, str] = {}
        for model in self.state["models"]:
            if _FINGERPRINT.fullmatch(model["fingerprint"]):
                names.setdefault(_UNSAFE.sub("--", model["name"]).strip(".-")[:100], model["fingerprint"])
        names.pop("", None)
        return names | {fingerprint: fingerprint for fingerprint in _fingerprints(self.state)}


def check_folder(directory: Path) -> None:
    """Make sure that a snapshot may be written there; changes nothing.

    Raises:
        ConfigError: it holds other files, or cannot be read.
    """
    try:
        if not directory.exists():
            return
        index = directory / "index.html"
        if index.exists():
            if MARK not in index.read_text(encoding="utf-8", errors="replace"):
                raise ConfigError(f"--snapshot {directory}: its index.html is no snapshot's; name an empty folder")
        elif others := sorted(
            path.name for path in directory.iterdir() if path.name not in OWN and path.name[0] != "."
        ):
            raise ConfigError(f"--snapshot {directory}: it holds {others[0]} and no snapshot; name an empty folder")
        for name in FOLDERS:
            if (directory / name).is_symlink():
                raise ConfigError(f"--snapshot {directory}: {name} in it is a link; name a folder of its own")
    except OSError as error:
        raise ConfigError(f"--snapshot {directory}: {error.strerror or error}") from error


def write(directory: Path, snapshot: PageSnapshot) -> None:
    """Bring the folder up to date; index.html, which leads to the rest, comes last.

    Raises:
        ConfigError: it cannot be written to.
    """
    check_folder(directory)
    files = snapshot.files()
    try:
        for folder in FOLDERS:
            (directory / folder).mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            _put(directory / name, data)
        for folder in FOLDERS:
            for old in (directory / folder).iterdir():
                if f"{folder}/{old.name}" not in files and old.suffix in {".json", ".svg", ".js", ".css", ".part"}:
                    old.unlink()
    except OSError as error:
        raise ConfigError(f"--snapshot {directory}: {error.strerror or error}") from error


def _put(path: Path, data: bytes) -> None:
    if path.is_file() and not path.is_symlink() and path.read_bytes() == data:
        return
    replace_file(path, data, mode=0o644)


def _between(text: str, name: str, instead: str) -> str:
    """The text with what stands between a pair of markers replaced."""
    return re.sub(f"<!-- {name}: begin -->.*?<!-- {name}: end -->", instead, text, flags=re.DOTALL)


def _fingerprints(state: Mapping[str, Any]) -> list[str]:
    return [one for model in state["models"] if _FINGERPRINT.fullmatch(one := model["fingerprint"])]


def _json(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode("utf-8", "replace")


logger = logging.getLogger(__name__)

EVERY_S: Final = 60.0
POLL_S: Final = 1.0
UP: Final = frozenset({"ok", "connected"})


async def snapshot_of(address: str, directory: Path) -> int:
    """Write a running service's page into a folder; returns how many models it shows.

    Raises:
        ConfigError: the address or the folder cannot be used.
        RegistryError: nobody answers there, or no health service.
    """
    url = service_url(address)
    check_folder(directory)
    async with httpx2.AsyncClient(timeout=TIMEOUT) as client:
        text = await ask_bytes(client, url, STATE)
        try:
            datetime.fromtimestamp(read_state(text).at, UTC)
        except (RemoteProtocolError, OverflowError, ValueError, OSError) as error:
            raise RegistryError(f"{url} is no health service of this version: {error}") from error

        async def points(fingerprint: str, window: str) -> Mapping[str, Any]:
            query = urlencode({"model": fingerprint, "window": window})
            return _points(await ask_bytes(client, url, f"api/v1/history?{query}"), url)

        state = json.loads(text)
        for model in state["models"]:  # a visitor may copy them, and they are another machine's words
            model["fixes"] = copyable(model["fixes"])
        snapshot = await PageSnapshot.take(state, points)
    await asyncio.to_thread(write, directory, snapshot)
    return len(snapshot.state["models"])


def _points(text: bytes, url: httpx2.URL) -> Mapping[str, Any]:
    try:
        found = strict_json(text)
    except ValueError as error:
        raise RegistryError(f"{url} is no health service: its history is no JSON") from error
    if not isinstance(found, dict) or not isinstance(found.get("points"), list):
        raise RegistryError(f"{url} is no health service: its history has no points")
    return found


async def keep_snapshot(
    directory: Path,
    state: Callable[[], Mapping[str, Any]],
    points: ReadHistory,
    pauses_s: tuple[float, float] = (EVERY_S, POLL_S),
) -> None:
    """Write one a minute, for ever; a failure is logged once, and tried again.

    Before the broker or the DHT has answered nothing is known, and an old snapshot is better than an empty one.
    """
    every_s, poll_s = pauses_s
    is_known = is_reported = False
    while True:
        is_known = is_known or any(link["state"] in UP for link in state().get("sources", {}).values())
        if not is_known:
            await asyncio.sleep(poll_s)
            continue
        try:
            snapshot = await PageSnapshot.take(state(), points)
            await asyncio.to_thread(write, directory, snapshot)
            is_reported = False
        except ConfigError as error:
            if not is_reported:
                logger.warning("%s; the snapshot there is old", error)
                is_reported = True
        await asyncio.sleep(every_s)
