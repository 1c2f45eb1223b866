"""Machines of one network join each other by a word and no address: real programs, on hosts joined by a bridge."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.follow import follower
from tools.guide import read

pytestmark = [pytest.mark.needs_root, pytest.mark.needs_program("ip", "iproute2")]

NO_ADDRESS = """
<!-- run: anna, stays -->
```console
$ cd swarm/demo && node serve demo-target --num-layers 6
no terminal to ask at: no swarm was looked for in the local network (--lan yes joins one)
layers: the swarm needs layers 0…5 of 12 most, for nobody holds them; 6: as you asked
serving at 203.0.113.11:…
```
<!-- run: ben, stays -->
```console
$ cd swarm/demo && node serve --lan yes --num-layers 6
joins a swarm that serves demo-target (eda0bef3c78a) at 203.0.113.11, found in the local network
model: demo-target (12 layers, fingerprint eda0bef3c78a), the one that this swarm serves
layers: the swarm needs layers 6…11 of 12 most, for nobody holds them; 6: as you asked
serving at 203.0.113.12:…
```
<!-- run: you -->
```console
$ cd swarm/demo && client generate --lan yes --prompt "It is" --max-new-tokens 4 --stats
joins a swarm that serves demo-target
reproducible
```
"""


@pytest.mark.timeout(180)
def test_a_second_machine_and_a_client_join_without_an_address(tmp_path: Path) -> None:
    path = tmp_path / "guide.md"
    path.write_text(NO_ADDRESS, encoding="utf-8")
    with follower(lambda _: None) as following:
        following.follow(read(path))
