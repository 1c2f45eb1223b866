"""The guides, done as they say by newcomers on clean machines: network namespaces on one bridge. One swarm for all."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tools.follow import follower, in_order
from tools.guide import GuideError, read

FOLDER = Path(__file__).parents[2] / "docs/guides"
GUIDES = sorted(set(FOLDER.glob("*.md")) - {FOLDER / "private-swarm.md"})
"""The private swarm has networks and a test of its own: test_private_swarm.py."""

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_program("ip", "iproute2")]


@pytest.mark.timeout(290)  # a minute on a machine that does nothing else
def test_the_guides_do_what_they_say() -> None:
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
