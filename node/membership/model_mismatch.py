"""Which model a node serves that was told none, and models of one name that are not the same.

In a file of its own so that it is tested without a node.
"""

from __future__ import annotations

from collections.abc import Sequence

from swarm.errors import ModelMismatch, UnknownModel
from swarm.ids import ModelIdentity
from swarm.routing.served import ServedModels


async def swarms_model(served: ServedModels, known: Sequence[ModelIdentity]) -> str:
    """The name of the swarm's only model: of several that are listed, the only one that is served.

    Raises:
        UnknownModel: none is listed, or none or several of those that are listed are served.
    """
    names = {model.name for model in known}
    if len(names) > 1:
        names = {model.name for model in await served.served(known)}
    if len(names) == 1:
        return names.pop()
    listed = ", ".join(sorted(f"{model.name} ({model.fingerprint[:8]})" for model in known)) or "none"
    raise UnknownModel(f"say which MODEL to serve; models in this swarm: {listed}")


def check_same_model(own: ModelIdentity, known: Sequence[ModelIdentity], *, must_match: bool) -> str | None:
    """A line for the user when models of the same name differ from this node's; None when there is nothing to report.

    Raises:
        ModelMismatch: they differ, and this node asked for the swarm's own.
    """
    same_name = [model for model in known if model.name == own.name]
    if not same_name or any(model.fingerprint == own.fingerprint for model in same_name):
        return None
    line = (
        f"{own.name} here is {own.fingerprint[:12]}, in the swarm it is "
        f"{', '.join(sorted(model.fingerprint[:12] for model in same_name))}: other weights, config or tokenizer"
    )
    if must_match:
        raise ModelMismatch(line)
    return f"note: {line}; a chain never mixes them"


def check_invited_model(identity: ModelIdentity, fingerprint: str | None) -> None:
    """Refuse other weights than whoever invites has, or the swarm had that was joined last.

    Args:
        identity: what lies here.
        fingerprint: how the other one's begins; None where it is not known.

    Raises:
        ModelMismatch: they differ.
    """
    if fingerprint is not None and not identity.fingerprint.startswith(fingerprint):
        raise ModelMismatch(
            f"{identity.name} here is {identity.fingerprint[:12]}, and this machine is to serve {fingerprint[:12]}: "
            "other weights, config or tokenizer; update your copy, or name MODEL to serve yours"
        )
