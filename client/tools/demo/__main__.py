"""`python -m client.tools.demo`: the same as `client demo`."""

from __future__ import annotations

import sys

import tyro

from client.tools.demo.command import Demo, run
from swarm.base.program import exit_code

if __name__ == "__main__":
    sys.exit(exit_code("client", lambda: run(tyro.cli(Demo, prog="client demo"))))
