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
        kinds = set(kind.values()) if isinstance(kind, dict) else {kind}
        if kinds & GROWING_ROPE:
            plain = (
                {name: PLAIN if one in GROWING_ROPE else one for name, one in kind.items()}
                if isinstance(kind, dict)
                else PLAIN
            )
            module.rope_type = plain  # type: ignore[assignment]
            changed += 1
    return changed
