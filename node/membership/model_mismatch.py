"""Models of one name that are not the same: other weights, config or tokenizer. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from swarm.errors import ModelMismatch
from swarm.ids import ModelIdentity


def check_same_model(own: ModelIdentity, known: Sequence[ModelIdentity], *, must_match: bool) -> str | None:
    """What to tell the user of models that are called like this node's and differ; None if there is nothing to tell.

    Raises:
        ModelMismatch: they differ, and this node asked for the swarm's own.
    """
    replicas = [model for model in known if model.name == own.name]
    if not replicas or any(replica.fingerprint == own.fingerprint for replica in replicas):
        return None
    line = (
        f"{own.name} here is {own.fingerprint[:12]}, in the swarm it is "
        f"{', '.join(sorted(replica.fingerprint[:12] for replica in replicas))}: other weights, config or tokenizer"
    )
    if must_match:
        raise ModelMismatch(line)
    return f"note: {line}; a chain never mixes them"
