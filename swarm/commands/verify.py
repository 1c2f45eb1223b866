"""`swarm verify`: recomputes what the machines of a text signed, and says who computed something else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

from swarm.base.cli_types import File, Layers, Model
from swarm.base.errors import ConfigError, ModelMismatch
from swarm.base.layers import Span

if TYPE_CHECKING:
    from swarm.compute.ragged_batch import RaggedModel
    from swarm.trust.verify import Claim, Claims, JudgedClaim

WHOLE: Final = "whole"


@dataclass(frozen=True, slots=True)
class VerifyText:
    """Compute once more what the machines of a text signed, and print who computed something else.

    The exit status is 0 where all that could be computed agrees, 1 where something differs, a signature does not hold,
    or the file or the model cannot be used, 2 where nothing could be decided.

    Attributes:
        file: evidence of a text, as `client generate --proof` writes it, or of one machine, as an audit keeps it.
        model: folder, GGUF file or hub id with the model's weights, which are computed with as the text's machines did
            (default: signatures are checked, and nothing is computed).
        layers: which layers to compute, such as 4-8, or whole: all of the text, and each machine's part of which rows
            were kept.
    """

    file: tyro.conf.Positional[File]
    model: Model | None = None
    layers: Layers = WHOLE


ReadClaims = Callable[[Path], "Claims"]
"""Reads a file of evidence; raises SwarmError where it is none, or a signature does not hold."""
LoadInClass = Callable[[str, str, Span | None], "RaggedModel"]
"""Loads layers of a model (None: all), to compute in a numeric class; raises ConfigError where this machine cannot."""


def load_plain(name: str, numeric_class: str, layers: Span | None) -> RaggedModel:
    """Load a whole model with weights of the compute type: all that this package knows without a node's loader."""
    import torch

    from swarm.base.library_logging import bars_hidden
    from swarm.compute.ragged_batch import load_whole
    from swarm.protocol.numeric_class import NumericClass

    found = NumericClass.parse(numeric_class)
    with bars_hidden():
        return load_whole(name, getattr(torch, "float32" if found is None else found.dtype))


def verify_text(command: VerifyText, console: Console, read: ReadClaims, load: LoadInClass) -> int:
    """Print what follows, one line per claim; returns the exit status.

    Raises:
        SwarmError: the file is no evidence, a signature does not hold, or the model is another one.
    """
    from swarm.trust.verify import exit_status, undecided, verify  # brings torch, which nothing else here needs

    found = read(command.file)
    layers = None if command.layers == WHOLE else Span.parse(command.layers)
    wanted = [claim for claim in found.claims if layers is None or layers.contains(claim.layers)]
    if not wanted:
        raise ConfigError(f"--layers {command.layers}: no machine of this text had just these layers")
    console.print(Text(f"model {found.fingerprint[:12]}, computed in {found.numeric_class}"))
    for note in found.notes:
        console.print(Text(note))
    if command.model is None:
        for claim in wanted:
            console.print(Text(f"signed: layers {claim.layers} by {_names(claim)}"))
        console.print(Text("signatures hold; give --model to compute what they are of"))
        return exit_status(())
    _check_identity(command.model, found)
    try:
        model = load(command.model, found.numeric_class, layers)
    except ConfigError as error:
        findings = undecided(wanted, str(error))
    else:
        findings = list(verify(model, wanted))
    _show(findings, console)
    return exit_status(findings)


def _check_identity(name: str, found: Claims) -> None:
    """Refuse another model.

    Raises:
        ModelMismatch: it is one.
        UnknownModel: there is none of that name.
    """
    from swarm.files.fingerprint import known_identity, model_identity
    from swarm.files.hub import find_model

    folder, hub = find_model(name)
    own = (known_identity(folder, hub=hub) or model_identity(folder)).fingerprint
    if own != found.fingerprint:
        raise ModelMismatch(f"{name} is model {own[:12]}, the evidence is of {found.fingerprint[:12]}")


def _show(findings: Sequence[JudgedClaim], console: Console) -> None:
    from swarm.trust.verify import in_words

    table = Table()
    for title in ("layers", "signed by", "verdict"):
        table.add_column(title)
    for finding in findings:
        cells = (str(finding.claim.layers), _names(finding.claim), in_words(finding.verdict))
        table.add_row(*map(Text, cells))
    console.print(table, soft_wrap=False)


def _names(claim: Claim) -> str:
    return ", ".join(peer[-8:] for peer in claim.peers)
