"""Rotary embeddings that look at positions on the host, in their plain form: a graph cannot look.

"dynamic" and "longrope" change their frequencies with the longest text of a batch. Canopy holds sessions to the
original window (`swarm.models.families.max_positions`), where both are the frequencies that they begin with.
"""

from __future__ import annotations

from torch import nn

from swarm.models.families import GROWING_ROPE

PLAIN = "default"


def use_plain_rotary(model: nn.Module) -> int:
    """Stop growing rotary embeddings from looking at positions; their values within the window stay.

    Returns:
        how many modules were changed.
    """
    changed = 0
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, dict) and GROWING_ROPE & {*kind.values()}:  # one for each type of layer
            module.rope_type = {layers: PLAIN if one in GROWING_ROPE else one for layers, one in kind.items()}  # type: ignore[assignment]
        elif isinstance(kind, str) and kind in GROWING_ROPE:
            module.rope_type = PLAIN  # type: ignore[assignment]
        else:
            continue
        changed += 1
    return changed
