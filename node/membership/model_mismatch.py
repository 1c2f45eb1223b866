"""Models of one name that are not the same: other weights, config or tokenizer. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from swarm.errors import ModelMismatch
from swarm.ids import ModelIdentity


def compare_twins(own: ModelIdentity, known: Sequence[ModelIdentity], *, must_match: bool) -> str | None:
    """What to tell the user of models that are called like this node's and differ; None if there is nothing to tell.

    Raises:
        ModelMismatch: they differ, and this node asked for the swarm's own.
    """
    twins = [model for model in known if model.name == own.name]
    if not twins or any(twin.fingerprint == own.fingerprint for twin in twins):
        return None
    line = (
        f"{own.name} here is {own.fingerprint[:12]}, in the swarm it is "
        f"{', '.join(sorted(twin.fingerprint[:12] for twin in twins))}: other weights, config or tokenizer"
    )
    if must_match:
        raise ModelMismatch(line)
    return f"note: {line}; a chain never mixes them"
