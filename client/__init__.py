"""Canopy's client: drafting, the decode loop, chains, the library and the commands. Never holds target layers.

    from client import Swarm
    with Swarm.connect("path-or-hub-id", peers=[…], draft="path-or-hub-id") as swarm:
        for piece in swarm.stream("It was a dark night", max_new_tokens=128, temperature=0.8, seed=7):
            print(piece.text, end="")

Names load on first use, so that the command line starts without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from client.base.options import Options
    from client.base.stats import Result, Stats, SweepMeasurement
    from client.dialogue.messages import Message
    from client.library.aio import AsyncSwarm
    from client.library.chat import AsyncChat
    from client.library.session import Piece
    from client.library.sync import Chat, Swarm
    from client.library.transformers_style import AsyncDistributedModel, DistributedModel
    from swarm.base.errors import SwarmError

__all__ = [
    "AsyncChat",
    "AsyncDistributedModel",
    "AsyncSwarm",
    "Chat",
    "DistributedModel",
    "Message",
    "Options",
    "Piece",
    "Result",
    "Stats",
    "Swarm",
    "SwarmError",
    "SweepMeasurement",
]

_HOMES = {
    "AsyncChat": "client.library.chat",
    "AsyncDistributedModel": "client.library.transformers_style",
    "AsyncSwarm": "client.library.aio",
    "Chat": "client.library.sync",
    "DistributedModel": "client.library.transformers_style",
    "Message": "client.dialogue.messages",
    "Options": "client.base.options",
    "Piece": "client.library.session",
    "Result": "client.base.stats",
    "Stats": "client.base.stats",
    "Swarm": "client.library.sync",
    "SwarmError": "swarm.base.errors",
    "SweepMeasurement": "client.base.stats",
}


def __getattr__(name: str) -> object:
    """Load a public name from its module."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
