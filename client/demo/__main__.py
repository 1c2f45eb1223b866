"""`python -m client.demo`: the same as `client demo`."""

from __future__ import annotations

import sys

import tyro

from client.demo.command import Demo, run
from swarm.errors import SwarmError

if __name__ == "__main__":
    try:
        sys.exit(run(tyro.cli(Demo, prog="client demo")))
    except SwarmError as error:
        sys.exit(f"client: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
