"""All attacks, from all modules of `benchmarks.redteam.attacks`."""

from __future__ import annotations

import pkgutil
from importlib import import_module

import benchmarks.redteam.attacks
from benchmarks.redteam.attack import ATTACKS, Attack, Kind
from swarm.base.errors import ConfigError


def all_attacks() -> dict[str, Attack]:
    """Every attack by name, kind by kind."""
    for module in pkgutil.iter_modules(benchmarks.redteam.attacks.__path__):
        import_module(f"benchmarks.redteam.attacks.{module.name}")
    return dict(sorted(ATTACKS.items(), key=lambda one: list(Kind).index(one[1].kind)))


def find_attack(name: str) -> Attack:
    """The attack of that name.

    Raises:
        ConfigError: there is none.
    """
    found = all_attacks().get(name)
    if found is None:
        raise ConfigError(f"no attack is called {name}; `python -m benchmarks redteam --list` names them")
    return found
