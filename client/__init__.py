"""Canopy's client: drafting, the decode loop, acceptance, chains and the front doors. Never holds target layers.

    from client import Swarm
    with Swarm.connect("path-or-hub-id", peers=[…], draft="path-or-hub-id") as swarm:
        for piece in swarm.stream("It was a dark night", max_new_tokens=128, temperature=0.8, seed=7):
            print(piece.text, end="")
"""

from client.aio import AsyncSwarm, Piece
from client.options import Options
from client.stats import Result, Stats, SweepStats
from client.sync import Swarm

__all__ = ["AsyncSwarm", "Options", "Piece", "Result", "Stats", "Swarm", "SweepStats"]
