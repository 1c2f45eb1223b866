"""Canopy's client: drafting, the decode loop, acceptance, chains and the front doors. Never holds target layers.

    from client import Swarm
    with Swarm.connect("path-or-hub-id", peers=[…], draft="path-or-hub-id") as swarm:
        for piece in swarm.stream("It was a dark night", max_new_tokens=128, temperature=0.8, seed=7):
            print(piece.text, end="")

Names load on first use, so that the command line starts without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from client.aio import AsyncSwarm
    from client.chat import AsyncChat
    from client.conversation import Message
    from client.options import Options
    from client.session import Piece
    from client.stats import Result, Stats, SweepStats
    from client.sync import Chat, Swarm

__all__ = [
    "AsyncChat",
    "AsyncSwarm",
    "Chat",
    "Message",
    "Options",
    "Piece",
    "Result",
    "Stats",
    "Swarm",
    "SweepStats",
]

_HOMES = {
    "AsyncChat": "client.chat",
    "AsyncSwarm": "client.aio",
    "Chat": "client.sync",
    "Message": "client.conversation",
    "Options": "client.options",
    "Piece": "client.session",
    "Result": "client.stats",
    "Stats": "client.stats",
    "Swarm": "client.sync",
    "SweepStats": "client.stats",
}


def __getattr__(name: str) -> object:
    """Load a public name from its module."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
