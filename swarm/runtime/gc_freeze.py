"""Keeps imported libraries out of garbage collection, which stops every thread meanwhile.

Torch and transformers are some 380,000 objects: a full collection walks them for .19 s of CPU; without them it takes
.003 s. On a busy machine .19 s become more than the silence after which others take a machine for dead
(`swarm.transport.liveness`), and large trees make such collections frequent.
"""

from __future__ import annotations

import gc


def settle() -> None:
    """Everything that is there now stays. For programs, once they have imported and before they load what may go."""
    gc.collect()
    gc.freeze()
