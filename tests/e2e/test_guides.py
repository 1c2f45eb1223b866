"""The guides, done as they say by newcomers on clean machines: network namespaces on one bridge. One swarm for all."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.forked.program import FORKED, ForkedPopen, shared_server
from tools import follow
from tools.follow import MODULES, follower, in_order
from tools.guide import GuideError, read

FOLDER = Path(__file__).parents[2] / "docs/guides"
GUIDES = sorted(set(FOLDER.glob("*.md")) - {FOLDER / "private-swarm.md"})
"""The private swarm has networks and a test of its own: test_private_swarm.py."""

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_program("ip", "iproute2")]


def start(arguments: Sequence[str], **options: Any) -> subprocess.Popen[Any]:  # noqa: ANN401 - as Popen
    """In place of Popen: nodes and clients are forked with their libraries imported, in their machine's network."""
    variables: Mapping[str, str] = options["env"]
    typed = shlex.split(arguments[-1])
    words = [variables.get(word[1:], word) if word.startswith("$") else word for word in typed]
    if arguments[-3:-1] != ["bash", "-c"] or MODULES.get(words[0]) not in FORKED:
        return subprocess.Popen(arguments, **options)
    assert not any(set(word) & set("$&;|<>*?`~#") for word in words), "such a command is a shell's"
    network = f"/proc/{arguments[arguments.index('--target') + 1]}/ns/net"
    options["preexec_fn"] = None  # no fork has one; what would outlive the test is found after it
    return ForkedPopen(shared_server(), [MODULES[words[0]], *words[1:]], namespaces=[network], **options)


@pytest.mark.crossing
@pytest.mark.timeout(290)  # a minute on a machine that does nothing else
def test_the_guides_do_what_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": start}))
    said: list[str] = []
    with follower(said.append, skipped_flags={"slow"}) as following:
        for guide in in_order(GUIDES):
            following.follow(guide)
    assert any("every layer is served" in text for text in said)
    assert any("reproducible" in text for text in said)


WRONG = {
    "<!-- run: you -->\n```console\n$ echo nobody serves\nevery layer is served\n```": "does not show",
    "<!-- run: you -->\n```console\n$ false\n```": "ended with status 1",
    "<!-- run: you, fails -->\n```console\n$ true\n```": "ended with status 0",
    "<!-- run: you, stays -->\n```console\n$ echo ready\nready to serve\n```": "should go on running",
    "<!-- run: you -->\n```console\n^C\n```": "nothing runs on you",
    "<!-- run: you -->\n```console\n$ echo /ip4/203.0.113.1/tcp/31337/p2p/Qm…\n```": "no output has named",
    "<!-- run: you -->\n```console\n$ echo canopy://…\n```": "no output has shown an invite",
}


def test_what_is_not_as_the_guide_says_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "guide.md"
    with follower(lambda _: None) as following:
        for block, says in WRONG.items():
            path.write_text(block, encoding="utf-8")
            with pytest.raises(GuideError, match=says):
                following.follow(read(path))
            following.end()


PLAIN = """
<!-- run: anna, stays -->
```console
$ trap 'echo leaving; exit 0' INT; echo ready; while :; do read -t .05 <> <(:); done
ready
```
<!-- run: you -->
```console
$ GREETING=hello          # remembered on this machine only
$ echo canopy://word
canopy://word
$ echo again canopy://…
again canopy://word
$ cat; ip -brief address show dev eth0; echo $GREETING $HOME
› typed
typed
eth0… 203.0.113.7/24
hello …/you
$ (exec 3<>/dev/tcp/203.0.113.11/9) 2>&1 | grep refused
```
<!-- run: anna -->
```console
^C
leaving
```
"""


def test_hosts_are_apart_reach_each_other_and_leave_nothing(tmp_path: Path) -> None:
    path = tmp_path / "guide.md"
    path.write_text(PLAIN, encoding="utf-8")
    before = subprocess.run(("ip", "-brief", "link"), capture_output=True, text=True, check=True).stdout
    with follower(lambda _: None) as following:
        following.follow(read(path))
        assert following.background == {"anna": []}
    after = subprocess.run(("ip", "-brief", "link"), capture_output=True, text=True, check=True).stdout
    assert after == before
