"""`swarm verify` names who computed something else, and its exit status says so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from node.model.in_class import load_in_class
from swarm.base.errors import ConfigError, ModelMismatch
from swarm.base.ids import PeerId
from swarm.base.layers import Span
from swarm.commands.verify import VerifyText, load_plain, verify_text
from swarm.compute.ragged_batch import RaggedModel
from swarm.compute.sampling import pick
from swarm.demo import TARGET
from swarm.files.fingerprint import model_identity
from swarm.protocol.messages import Sampling
from swarm.trust.replay import Pick, Stretch, replayed
from swarm.trust.verify import AGREES, DIFFERS, UNDECIDED, Claim, Claims
from tests.net.three_nodes import prompt

TEXT = prompt(2, 80)
SPANS = (Span(0, 4), Span(4, 8), Span(8, 12))
PEERS = tuple(PeerId(f"Qm{'x' * 40}{number}abcdefg") for number in range(3))
FILE = Path("proof")


@pytest.fixture(scope="module")
def claims(target: RaggedModel) -> tuple[Claim, ...]:
    """What three honest machines sign: two of them rows, the last one picks; and all of them the text."""
    kind, sampling = target.numeric_class, Sampling(7, 0.7)
    first = Stretch(SPANS[0], kind, TEXT)
    first = replace(first, leaving=torch.cat(list(replayed(target, first))))
    second = Stretch(SPANS[1], kind, (), first.leaving)
    second = replace(second, leaving=torch.cat(list(replayed(target, second))))
    third = Stretch(SPANS[2], kind, TEXT, second.leaving)
    final = torch.cat(list(replayed(target, third)))[20:]
    tokens = pick(target.logits(final), range(21, len(TEXT) + 1), sampling)
    picks = tuple(Pick(20 + place, token, sampling) for place, token in enumerate(tokens))
    third = replace(third, picks=picks)
    whole = Stretch(Span(0, 12), kind, TEXT, picks=picks)
    made = [Claim((peer,), one.layers, one) for peer, one in zip(PEERS, (first, second, third), strict=True)]
    return (*made, Claim(PEERS, whole.layers, whole))


def verified(claims: tuple[Claim, ...], **options: object) -> tuple[int, str]:
    found = Claims(model_identity(TARGET).fingerprint, "cpu-float32", claims, ("3 tokens were taken over",))
    console = Console(record=True, width=200)
    command = VerifyText(**{"file": FILE, "model": str(TARGET)} | options)  # type: ignore[arg-type]
    return verify_text(command, console, lambda path: found, load_in_class), console.export_text()


def test_an_honest_text_agrees_machine_by_machine(claims: tuple[Claim, ...]) -> None:
    status, shown = verified(claims)
    assert status == AGREES
    assert shown.count("agrees at") == 4
    assert "3 tokens were taken over" in shown


def test_who_computed_something_else_is_named(claims: tuple[Claim, ...]) -> None:
    stretch = claims[1].stretch
    assert stretch is not None
    assert stretch.leaving is not None
    lying = replace(claims[1], stretch=replace(stretch, leaving=stretch.leaving * 1.01))
    status, shown = verified((claims[0], lying, claims[2]))
    assert status == DIFFERS
    (line,) = [line for line in shown.splitlines() if "DIFFERS" in line]
    assert PEERS[1][-8:] in line
    status, shown = verified((claims[0], lying, claims[2]), layers="8-12")
    assert status == AGREES, "only what was asked for is computed"


def test_what_rows_were_not_kept_of_is_undecided(claims: tuple[Claim, ...]) -> None:
    without = replace(claims[1], stretch=None, missing="rows were not kept")
    status, shown = verified((without,))
    assert status == UNDECIDED
    assert "rows were not kept" in shown


def test_without_weights_signatures_are_shown_and_nothing_is_decided(claims: tuple[Claim, ...]) -> None:
    status, shown = verified(claims, model=None)
    assert status == UNDECIDED
    assert "signatures hold" in shown


def test_another_model_and_other_layers_are_refused(claims: tuple[Claim, ...]) -> None:
    with pytest.raises(ConfigError, match="no machine of this text"):
        verified(claims, layers="3-5")
    found = Claims("ab" * 32, "cpu-float32", claims)
    with pytest.raises(ModelMismatch, match="the evidence is of abababababab"):
        verify_text(VerifyText(FILE, str(TARGET)), Console(), lambda path: found, load_plain)
