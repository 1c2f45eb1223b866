"""The version of this program. Read once: it stands in a file, and a program may run out of those."""

from __future__ import annotations

from importlib.metadata import version

VERSION = version("canopy-swarm")
