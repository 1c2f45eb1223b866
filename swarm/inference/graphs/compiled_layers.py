"""Layers that were compiled once: small operations between the products become few kernels. Knows no family."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
RECOMPILE_LIMIT = 256
"""Kinds of layers and shapes that one class may be compiled for."""
INDUCTOR = "inductor"
SAME_BITS = {"deterministic": True, "batch_invariant": True, "split_reductions": False}
"""Inductor's settings, those of them that it has: it chooses no kernel by timing, which differs from card to card, and
cuts no sum by how many rows there are."""


class CompiledLayers:
    """Layers whose forward can be exchanged for a compiled one, the same program for all layers of a kind."""

    def __init__(self, layers: Sequence[nn.Module], backend: str | None) -> None:
        """Prepare them; each is compiled when it first runs.

        Args:
            layers: of the model class, and other parts of it that compute.
            backend: torch's name of the compiler; None leaves the layers as they are.
        """
        self.backend = backend
        self._forwards = {}
        if backend is not None:
            options = _known_settings() if backend == INDUCTOR else None
            # One program for all numbers of rows: one for each would sum in another order.
            self._forwards = {
                layer: torch.compile(layer.forward, dynamic=True, fullgraph=True, backend=backend, options=options)
                for layer in layers
            }

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within, the layers run compiled."""
        if not self._forwards:
            yield
            return
        for layer, forward in self._forwards.items():
            layer.forward = forward
        try:
            limits: dict[str, Any] = dict.fromkeys(("recompile_limit", "accumulated_recompile_limit"), RECOMPILE_LIMIT)
            with torch._dynamo.config.patch(limits):
                yield
        finally:
            for layer in self._forwards:
                del layer.forward


def _known_settings() -> dict[str, str | int | bool | Callable[..., object]]:
    import torch._inductor.config as settings  # loads the compiler

    return {name: value for name, value in SAME_BITS.items() if hasattr(settings, name)}


def keep_programs(folder: Path) -> None:
    """Keep compiled programs in a folder, so that a restart need not compile; a user's own choice stays."""
    os.environ.setdefault(CACHE_VARIABLE, str(folder))
