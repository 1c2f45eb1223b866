"""`generate(**inputs)`: what transformers' arguments mean here, and what is refused by name."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, Unpack, cast

import pytest
import torch
from transformers import BatchEncoding, GenerationConfig

from client import DistributedModel, Piece, Result, Swarm
from client.base.options import GenerateOptions, make_options
from client.library.transformers_style import read_call
from swarm.base.errors import ConfigError


def configured(**values: Any) -> GenerationConfig:  # noqa: ANN401
    return GenerationConfig(**values)  # type: ignore[no-untyped-call]


def options(**arguments: Any) -> GenerateOptions:  # noqa: ANN401 (what a caller passes)
    return read_call([5, 6, 7], arguments).options


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, {"max_new_tokens": 20}),
        ({"max_new_tokens": 3, "temperature": 0.7, "top_k": 5}, {"max_new_tokens": 3}),
        ({"max_length": 10}, {"max_new_tokens": 7}),
        ({"max_length": 10, "max_new_tokens": 2}, {"max_new_tokens": 2}),
        (
            {"do_sample": True, "seed": 4, "top_p": 0.9},
            {"max_new_tokens": 20, "temperature": 1.0, "top_k": 50, "top_p": 0.9, "min_p": None, "seed": 4},
        ),
        (
            {"do_sample": True, "temperature": 0.5, "top_k": 0, "min_p": 0.1, "seed": 4},
            {"max_new_tokens": 20, "temperature": 0.5, "top_k": 0, "top_p": None, "min_p": 0.1, "seed": 4},
        ),
        ({"repetition_penalty": 1.2, "nodes": 4}, {"max_new_tokens": 20, "repetition_penalty": 1.2, "nodes": 4}),
        ({"eos_token_id": 9}, {"max_new_tokens": 20, "end_tokens": [9]}),
        ({"eos_token_id": torch.tensor([9, 2])}, {"max_new_tokens": 20, "end_tokens": [9, 2]}),
        ({"stop_strings": ["\n"], "tokenizer": object()}, {"max_new_tokens": 20, "stop": ["\n"]}),
        ({"num_beams": 1, "use_cache": True, "pad_token_id": 2, "output_scores": False}, {"max_new_tokens": 20}),
        ({"generation_config": configured(max_new_tokens=8)}, {"max_new_tokens": 8}),
        ({"generation_config": configured(max_new_tokens=8), "max_new_tokens": 4}, {"max_new_tokens": 4}),
        ({"generation_config": configured(eos_token_id=[3, 4])}, {"max_new_tokens": 20, "end_tokens": [3, 4]}),
    ],
)
def test_arguments_mean_what_they_mean_there(arguments: dict[str, Any], expected: GenerateOptions) -> None:
    found = options(**arguments)
    assert found == expected
    make_options(found).check()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"num_beams": 4}, "num_beams=4"),
        ({"num_return_sequences": 2}, "num_return_sequences=2"),
        ({"no_repeat_ngram_size": 3}, "no_repeat_ngram_size=3"),
        ({"min_new_tokens": 3}, "min_new_tokens=3"),
        ({"return_dict_in_generate": True}, "return_dict_in_generate=True"),
        ({"logits_processor": [len]}, "logits_processor="),
        ({"assistant_model": object()}, "assistant_model="),
        ({"bad_words_ids": [[1]]}, "bad_words_ids="),
        ({"max_new_token": 3}, "max_new_token=3"),
        ({"generation_config": configured(num_beams=3)}, "num_beams=3"),
        ({"max_length": 3}, "max_length: 3; the prompt has 3 tokens"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"input_ids": [1]}, "give token ids once"),
        ({"attention_mask": [1, 1, 0]}, "attention_mask"),
        ({"attention_mask": [1, 1]}, "attention_mask"),
    ],
)
def test_what_is_not_offered_is_refused_by_name(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        options(**arguments)


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        ([[1, 2], [3, 4]], "a batch of 2"),
        ([[1, 2], [3]], "give token ids"),
        ([0.5], "torch.float32"),
        ("text", "give token ids"),
        (7, "give token ids"),
    ],
)
def test_only_one_sequence_of_ids_is_taken(ids: Any, says: str) -> None:  # noqa: ANN401 (what a caller passes)
    with pytest.raises(ConfigError, match=says):
        read_call(ids, {})


@pytest.mark.parametrize("ids", [[2, 2, 5, 6], [[2, 2, 5, 6]], torch.tensor([[2, 2, 5, 6]])])
def test_padding_before_the_prompt_stays_in_the_sequence_and_out_of_the_prompt(ids: Any) -> None:  # noqa: ANN401
    call = read_call(None, {"input_ids": ids, "attention_mask": [[0, 0, 1, 1]]})
    assert (call.prompt, call.input_ids.tolist()) == ((5, 6), [[2, 2, 5, 6]])


def test_a_seed_is_the_generators_or_torchs_own() -> None:
    assert options(do_sample=True, generator=torch.Generator().manual_seed(11)).get("seed") == 11
    torch.manual_seed(3)
    first, second = (options(do_sample=True).get("seed") for _ in range(2))
    torch.manual_seed(3)
    assert options(do_sample=True).get("seed") == first != second
    assert "seed" not in options(do_sample=False)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, {"temperature": 0.7, "top_k": 20}),
        ({"do_sample": True, "temperature": 0.5}, {"temperature": 0.5, "top_k": 20}),
        ({"do_sample": False}, {"temperature": 0.0}),
    ],
)
def test_the_models_own_sampling_holds_where_no_argument_says(
    arguments: dict[str, Any], expected: dict[str, float]
) -> None:
    found = read_call([5], arguments, {"temperature": 0.7, "top_k": 20}).options
    assert {name: value for name, value in found.items() if name in ("temperature", "top_k")} == expected


class FakeSwarm:
    """Goes on with 8 and 9, then 2."""

    def __init__(self) -> None:
        self.prompts: list[Sequence[int]] = []

    defaults: GenerateOptions = {}  # noqa: RUF012

    def stream(self, prompt: Sequence[int], **_: Unpack[GenerateOptions]) -> Generator[Piece, None, None]:
        self.prompts.append(prompt)
        yield Piece("a b", tokens=(8, 9))
        yield Piece("", Result("a b", (8, 9, 2), "eos", cast("Any", None)), tokens=(2,))


class Recorder:
    """A streamer."""

    def __init__(self) -> None:
        self.took: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.took.append(value.tolist())

    def end(self) -> None:
        self.took.append("end")


def test_a_streamer_gets_the_prompt_and_then_every_token() -> None:
    fake, streamer = FakeSwarm(), Recorder()
    model = DistributedModel(cast("Swarm", fake))
    inputs = BatchEncoding({"input_ids": torch.tensor([[5, 6]]), "attention_mask": torch.tensor([[1, 1]])})
    whole = model.generate(**inputs.to(model.device), streamer=streamer)
    assert whole.tolist() == [[5, 6, 8, 9, 2]]
    assert whole.dtype == torch.long
    assert streamer.took == [[[5, 6]], [8], [9], [2], "end"]
    assert fake.prompts == [(5, 6)]
