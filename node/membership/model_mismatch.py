"""Which model a node serves that was told none, and models of one name that are not the same.

In a file of its own so that it is tested without a node.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from swarm.errors import ModelMismatch, UnknownModel
from swarm.ids import ModelIdentity
from swarm.routing.served import ServedModels

FILES_NAMED: Final = 3
"""Files that a line names."""


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


def describe_mismatch(own: ModelIdentity, theirs: ModelIdentity, files: Sequence[str] = (), why: str = "") -> str:
    """A line about two models of one name.

    Args:
        own: what lies here.
        theirs: what the swarm has.
        files: weight files of the swarm's model that are not here, or not with these contents.
        why: why this machine does not take the swarm's, where that can be said.
    """
    differ = own.unlike(theirs) or "number of layers"
    named = f" ({name_files(files)})" if files else ""
    reason = f"; {why}" if why else ""
    prints = f"{own.name} here is {own.fingerprint[:12]}, in the swarm it is {theirs.fingerprint[:12]}"
    return f"{prints}: they differ in {differ}{named}{reason}"


def name_files(names: Sequence[str]) -> str:
    """The first files by name, and how many more there are."""
    more = f" and {len(names) - FILES_NAMED} more" if len(names) > FILES_NAMED else ""
    return ", ".join(names[:FILES_NAMED]) + more


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
