"""A private swarm's folder, and mosquitto as deploy/ configures it with that folder, for tests."""

from __future__ import annotations

import io
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from swarm.commands.private_swarm import Private, private

DEPLOY = Path(__file__).parents[1] / "deploy"
HOST = "127.0.0.1"


def make_private_swarm(command: Private) -> str:
    """Run `swarm private`; returns what it prints."""
    output = io.StringIO()
    private(command, Console(file=output, width=400))
    return output.getvalue()


def env_settings(env: Path) -> dict[str, str]:
    """The variables of an env file."""
    return dict(line.split("=", 1) for line in env.read_text().splitlines())


@contextmanager
def mosquitto_for(folder: Path, port: int) -> Iterator[int]:
    """Run mosquitto with the configuration of deploy/, except paths, address and user; yields its process id."""
    text = (DEPLOY / "mosquitto" / "mosquitto.conf").read_text()
    for deployed, local in (
        ("/etc/canopy/broker", str(folder / "broker")),
        ("/etc/canopy/mosquitto", str(DEPLOY / "mosquitto")),
        ("listener 8883\n", f"listener {port} {HOST}\nuser root\n"),
    ):
        assert deployed in text, deployed
        text = text.replace(deployed, local)
    config, log = folder / "mosquitto.conf", folder / "mosquitto.log"
    config.write_text(text)
    with log.open("w") as output:
        process = subprocess.Popen(["mosquitto", "-c", str(config)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        assert process.stderr is not None
        try:
            while b"running" not in (line := process.stderr.readline()):
                output.write(line.decode())
                assert line, log.read_text()
            yield process.pid
        finally:
            process.terminate()
            process.wait(10)
            output.write(process.stderr.read().decode())
            process.stderr.close()
