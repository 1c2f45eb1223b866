"""A replay of honest rows agrees in every sweep size, class and span; each liar's stretch differs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.drafting.near_ties import logits as logits_in_sweeps
from node.model.checkpoint import open_checkpoint
from node.model.packed_span import load_packed
from node.model.span import SpanModel, load_span
from swarm.base.errors import ConfigError
from swarm.base.layers import Span
from swarm.compute.path_rules import PathRules
from swarm.compute.ragged_batch import RaggedModel
from swarm.compute.sampling import pick
from swarm.compute.weights.format import WeightFormat
from swarm.demo import TARGET
from swarm.protocol.messages import Sampling
from swarm.protocol.pick_rules import Grammar, PickRules
from swarm.trust.bounds import FLOOR, Agrees, Bounds, Differs, Unclear
from swarm.trust.replay import Pick, Stretch, calibrate, judge, made_up, replayed
from tests.net.three_nodes import prompt

CPU = torch.device("cpu")
LAYERS, TAIL = Span(4, 8), Span(8, 12)
TEXT = prompt(3, 160)
Change = Callable[[torch.Tensor], torch.Tensor]


def rows_of(span: RaggedModel, text: Stretch, sweep: int = 512) -> torch.Tensor:
    return torch.cat(list(replayed(span, text, sweep)))


@pytest.fixture(scope="module")
def stretch(target: RaggedModel) -> Stretch:
    """What entered and left the layers in the middle, honestly."""
    entering = rows_of(target, Stretch(Span(0, LAYERS.start), target.numeric_class, TEXT))
    text = Stretch(LAYERS, target.numeric_class, (), entering)
    return replace(text, leaving=rows_of(target, text))


@pytest.fixture(scope="module")
def span() -> SpanModel:
    return load_span(open_checkpoint(TARGET), LAYERS, torch.float32)


@pytest.mark.parametrize("sweep", [1, 5, 33, 512])
def test_an_honest_stretch_agrees_however_it_was_cut(sweep: int, span: SpanModel, stretch: Stretch) -> None:
    found = judge(span, replace(stretch, leaving=rows_of(span, stretch, sweep)))
    assert isinstance(found, Agrees)
    assert found.count == len(TEXT)
    assert found.largest < found.bound / 5


def test_a_span_and_the_whole_model_judge_alike(span: SpanModel, target: RaggedModel, stretch: Stretch) -> None:
    assert isinstance(judge(target, stretch), Agrees)
    assert calibrate(target, LAYERS).row == FLOOR
    assert calibrate(span).row < 5 * FLOOR, "rows that nobody computed are rounded worse than those of a text"


LIES: dict[str, Change] = {
    "noise": lambda rows: torch.randn(rows.shape, generator=torch.Generator().manual_seed(0)),
    "swapped": lambda rows: rows.flip(0),
    "old rows": lambda rows: torch.cat([rows[:80], rows[:80]]),
    "the next token's": lambda rows: rows.roll(-1, 0),
    "one row": lambda rows: torch.cat([rows[:50], rows[50:51] * 1.001, rows[51:]]),
    "no numbers": lambda rows: rows * torch.nan,
}


@pytest.mark.parametrize("lie", LIES)
def test_changed_rows_differ(lie: str, span: SpanModel, stretch: Stretch) -> None:
    assert stretch.leaving is not None
    assert isinstance(judge(span, replace(stretch, leaving=LIES[lie](stretch.leaving))), Differs)


def test_other_weights_a_skipped_layer_and_another_text_differ(
    span: SpanModel, target: RaggedModel, stretch: Stretch
) -> None:
    skipped = rows_of(target, replace(stretch, layers=Span(4, 7)))
    others = rows_of(target, replace(stretch, layers=TAIL))
    text = Stretch(Span(0, 8), target.numeric_class, prompt(5, 160))
    for leaving in (skipped, others, rows_of(target, text)):
        assert isinstance(judge(span, replace(stretch, leaving=leaving)), Differs)


def packed(bits: int, dtype: torch.dtype = torch.float32, layers: Span = LAYERS) -> SpanModel:
    return load_packed(open_checkpoint(TARGET), layers, WeightFormat(dtype, bits), CPU)


@pytest.mark.parametrize("bits", [8, 4])
def test_rounded_weights_that_pose_as_whole_ones_differ(bits: int, span: SpanModel, stretch: Stretch) -> None:
    posing = replace(stretch, leaving=rows_of(packed(bits), stretch))
    assert isinstance(judge(span, posing), Differs)


def test_rounded_weights_that_say_so_agree_with_their_own_class(stretch: Stretch) -> None:
    model = packed(8)
    honest = replace(stretch, numeric_class=model.numeric_class, leaving=rows_of(model, stretch, 5))
    assert isinstance(judge(model, honest), Agrees)


def test_another_class_is_unclear_unless_float32_was_calibrated_for_it(span: SpanModel, stretch: Stretch) -> None:
    model = load_span(open_checkpoint(TARGET), LAYERS, torch.bfloat16)
    coarse = replace(stretch, numeric_class=model.numeric_class, leaving=rows_of(model, stretch, 5))
    assert isinstance(judge(span, coarse), Unclear)
    assert isinstance(judge(model, stretch), Unclear), "bfloat16 decides nothing of float32"
    assert isinstance(judge(span, coarse, Bounds.known(span.numeric_class, span.numeric_class)), Unclear)
    bounds = calibrate(span, other=model)
    assert isinstance(judge(span, coarse, bounds), Agrees)
    assert isinstance(judge(span, replace(coarse, leaving=rows_of(model, stretch, 5).roll(1, 0)), bounds), Differs)


def test_bfloat16_is_judged_by_its_own_calibration(stretch: Stretch) -> None:
    model = load_span(open_checkpoint(TARGET), LAYERS, torch.bfloat16)
    coarse = replace(stretch, numeric_class=model.numeric_class)
    assert isinstance(judge(model, replace(coarse, leaving=rows_of(model, coarse, 3))), Unclear), "not calibrated"
    bounds = calibrate(model)
    assert isinstance(judge(model, replace(coarse, leaving=rows_of(model, coarse, 3)), bounds), Agrees)
    assert isinstance(judge(model, replace(coarse, leaving=rows_of(packed(4), coarse)), bounds), Differs)


# Tails


@pytest.fixture(scope="module")
def tail(target: RaggedModel) -> Stretch:
    entering = rows_of(target, Stretch(Span(0, TAIL.start), target.numeric_class, TEXT))
    return Stretch(TAIL, target.numeric_class, TEXT, entering)


def picked(target: RaggedModel, sampling: Sampling, first: int = 40) -> tuple[Pick, ...]:
    """What an honest tail names that ran the text in sweeps of 33."""
    logits = logits_in_sweeps(target, list(TEXT), 33)[first:]
    tokens = pick(logits, range(first + 1, len(TEXT) + 1), sampling)
    return tuple(Pick(first + place, token, sampling) for place, token in enumerate(tokens))


@pytest.mark.parametrize(
    "sampling", [Sampling(0, 0.0), Sampling(7, 0.7), Sampling(7, 1.0, top_p=0.8), Sampling(7, 1.0, top_k=8)]
)
def test_honest_picks_agree_and_others_differ(sampling: Sampling, target: RaggedModel, tail: Stretch) -> None:
    picks = picked(target, sampling)
    assert isinstance(judge(target, replace(tail, picks=picks)), Agrees)
    wrong = replace(picks[20], token=(picks[20].token + 1) % target.vocab_size)
    found = judge(target, replace(tail, picks=(*picks[:20], wrong, *picks[21:])))
    assert isinstance(found, Differs)
    assert found.places == (wrong.after + 1,)


def test_another_seed_differs(target: RaggedModel, tail: Stretch) -> None:
    picks = tuple(replace(each, sampling=Sampling(8, 0.7)) for each in picked(target, Sampling(7, 0.7)))
    assert isinstance(judge(target, replace(tail, picks=picks)), Differs)


def test_rules_of_picks_are_followed(target: RaggedModel, tail: Stretch) -> None:
    """Picks under penalties agree by the rules, and differ without them."""
    rules = PickRules(start=40, frequency_penalty=1.5, repetition_penalty=1.4, logit_bias=((17, 3.0),))
    sampling = Sampling(7, 0.7, rules=rules)
    logits = logits_in_sweeps(target, list(TEXT), 33)[40:].clone()
    from swarm.base.ids import TreeNodeId
    from swarm.protocol.session import Limits, SessionState

    state = SessionState.begun(Limits(target.vocab_size, 256, 1, 1), TEXT, ())
    PathRules(rules).apply(logits, list(map(TreeNodeId, range(40, len(TEXT)))), state)
    tokens = pick(logits, range(41, len(TEXT) + 1), sampling)
    picks = tuple(Pick(40 + place, token, sampling) for place, token in enumerate(tokens))
    assert isinstance(judge(target, replace(tail, picks=picks)), Agrees)
    without = tuple(replace(each, sampling=Sampling(7, 0.7)) for each in picks)
    assert isinstance(judge(target, replace(tail, picks=without)), Differs)
    assert isinstance(judge(target, replace(tail, picks=picks, tokens=())), Unclear)


def test_picks_that_cannot_be_repeated_are_unclear(target: RaggedModel, tail: Stretch) -> None:
    grammar = Sampling(7, 0.7, rules=PickRules(40, grammar=Grammar("regex", "a*"), end_tokens=(0,)))
    for sampling in (Sampling(7, 0.7, multistep=True), grammar):
        picks = tuple(replace(each, sampling=sampling) for each in picked(target, Sampling(7, 0.7)))
        assert isinstance(judge(target, replace(tail, picks=picks)), Unclear)
    assert isinstance(judge(target, tail), Unclear)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"layers": Span(3, 8)}, "not within"),
        ({"entering": torch.zeros(0, 192)}, "nothing entered"),
        ({"entering": torch.zeros(160, 5)}, "rows of shape"),
        ({"leaving": torch.zeros(3, 192)}, "rows of shape"),
        ({"picks": (Pick(160, 0, Sampling(0, 0.0)),)}, "no position"),
        ({"tokens": (10**9,)}, "vocabulary"),
    ],
)
def test_what_the_layers_cannot_have_computed_is_refused(
    change: dict[str, Any], reason: str, span: SpanModel, stretch: Stretch
) -> None:
    with pytest.raises(ConfigError, match=reason):
        judge(span, replace(stretch, **change))


def test_made_up_texts_are_the_same_each_time_and_fit(span: SpanModel, tmp_path: Path) -> None:
    one, two = made_up(span, LAYERS), made_up(span, LAYERS)
    assert [each.tokens for each in one] == [each.tokens for each in two]
    assert all(len(each) for each in one)
