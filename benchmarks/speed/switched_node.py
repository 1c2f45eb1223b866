"""`node serve` that commits to nothing after SIGUSR1, and to everything again after SIGUSR2. All else is as it is."""

from __future__ import annotations

import signal
from typing import Any

from node.cli import main
from node.session.settle import HopCommitments
from node.session.sweep_run import SweepRun

_METHODS: list[tuple[type, str]] = [(HopCommitments, name) for name in ("received", "sent", "computed", "replied")]
_METHODS.append((SweepRun, "_keep_answered"))
_REAL = {(kind, name): getattr(kind, name) for kind, name in _METHODS}


def _nothing(*_: Any, **__: Any) -> None:  # noqa: ANN401
    pass


def _off(number: int, frame: object) -> None:
    for kind, name in _METHODS:
        setattr(kind, name, _nothing)


def _on(number: int, frame: object) -> None:
    for (kind, name), real in _REAL.items():
        setattr(kind, name, real)


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, _off)
    signal.signal(signal.SIGUSR2, _on)
    main()
