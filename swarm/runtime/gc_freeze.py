"""Keeps imported libraries out of garbage collection, which stops every thread while it runs.

Torch and transformers are hundreds of thousands of objects, and a full collection walks them all. On a busy machine
that can take longer than the silence after which peers count a machine as dead (`swarm.transport.liveness`), and large
trees make full collections frequent. It is a module of its own because programs call it before anything else of theirs.
"""

from __future__ import annotations

import gc


def freeze_imports() -> None:
    """Exempt every object that exists now from collection: a program calls it after its imports, before it loads."""
    gc.collect()
    gc.freeze()
