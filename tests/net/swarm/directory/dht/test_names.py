"""A swarm that is joined by a name with addresses of both families, one of which leads nowhere."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[5]
JOIN = """
import asyncio
from swarm.directory.dht.registry import DhtConfig, DhtRegistry
from tests.net.black_hole import black_hole

async def main() -> None:
    async with DhtRegistry.open(DhtConfig(host="127.0.0.1")) as first:
        (address,) = first.join_addresses()
        _, _, _, _, port, _, peer = address.split("/")
        with black_hole("::1", int(port)):
            name = f"/dns/two.example/tcp/{port}/p2p/{peer}"
            async with DhtRegistry.open(DhtConfig(join=(name,), client_mode=True)) as second:
                print(await second.models())

asyncio.run(main())
"""


@pytest.mark.needs_root
@pytest.mark.needs_program("unshare", "util-linux")
def test_a_name_with_one_dead_family_is_joined_by_the_other(tmp_path: Path) -> None:
    """The name is in a hosts file that only the joining program sees."""
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost two.example\n::1 two.example\n")
    (tmp_path / "join.py").write_text(JOIN)
    inside = 'mount --bind "$0" /etc/hosts && exec "$1" "$2"'
    command = ["unshare", "--mount", "sh", "-c", inside, str(hosts), sys.executable, str(tmp_path / "join.py")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=50, env=environment)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
