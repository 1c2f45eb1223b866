"""`client bench`: which prompts are read, and what is said about runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from client.base.options import Options
from client.tools.bench.runner import AS_ASKED, PLAIN, Measured, Prompt, Run, read_prompts, report, table, ways
from swarm.base.errors import ConfigError

RUN = Run(
    prompt="a",
    turn=0,
    way=AS_ASKED,
    seed=1,
    tokens=(1, 2, 3),
    tokens_per_s=20.0,
    acceptance_length=3.0,
    ms_per_sweep=100.0,
    time_to_first_token_s=0.2,
    sweeps=1,
    prompt_tokens=9,
    reused_tokens=0,
    numeric_class="cpu-float32",
    reproducible=True,
)


def test_texts_and_turns_are_read_in_order(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    lines = ['{"id": "x", "text": "one"}', "", '{"question_id": 81, "category": "writing", "turns": ["two", "three"]}']
    path.write_text("\n".join([*lines, '{"text": "four"}']))
    expected = [Prompt("x", "one"), Prompt("81", turns=("two", "three")), Prompt(f"{path}:4", "four")]
    assert read_prompts(path, 10) == expected
    assert read_prompts(path, 2) == expected[:2]


def test_without_a_file_there_are_passages() -> None:
    assert [bool(prompt.text) for prompt in read_prompts(None, 3)] == [True] * 3


@pytest.mark.parametrize(
    "line", ["no json", "[]", "{}", '{"text": ""}', '{"text": 3}', '{"turns": []}', '{"turns": ["a", 1]}', '"text"']
)
def test_what_is_no_prompt_is_named_by_its_line(line: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"text": "fine"}\n' + line)
    with pytest.raises(ConfigError, match=r"prompts\.jsonl:2: is no prompt"):
        read_prompts(path, 10)


@pytest.mark.parametrize("line", [r'{"text": "lone \ud83d half"}', r'{"turns": ["fine", "\udc80"]}'])
def test_what_is_no_text_is_named_by_its_line(line: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(line)
    with pytest.raises(ConfigError, match=r"prompts\.jsonl:1: is not valid text"):
        read_prompts(path, 10)


def test_files_that_cannot_be_and_limits_that_cannot_be(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.write_text("\n")
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    for path, reason in ((tmp_path / "none", "cannot be read"), (empty, "holds no prompt"), (binary, "cannot be read")):
        with pytest.raises(ConfigError, match=reason):
            read_prompts(path, 10)
    with pytest.raises(ConfigError, match="limit"):
        read_prompts(None, 0)


def test_plain_is_the_same_without_a_tree() -> None:
    options = Options(temperature=0.5, nodes=9)
    assert ways(options, "none") == {AS_ASKED: options}
    assert ways(options, "plain") == {AS_ASKED: options, PLAIN: replace(options, nodes=0)}


def measured(*speeds: tuple[float, float], tokens: tuple[int, ...] = (1, 2, 3)) -> Measured:
    found = Measured("model", "draft", Options())
    for number, (ours, plain) in enumerate(speeds):
        mine = replace(RUN, prompt=str(number), tokens_per_s=ours)
        other = replace(mine, way=PLAIN, tokens_per_s=plain, tokens=tokens)
        found.runs += [mine, other] if number % 2 else [other, mine]
    return found


def test_ways_are_compared_pair_by_pair_in_whatever_order_they_ran() -> None:
    found = measured((20, 10), (60, 20), (8, 2)).comparison
    assert found is not None
    assert (found.speedup.value, found.same_text, found.pairs) == (3.0, 3, 3)
    assert Measured("model", "draft", Options(), runs=[RUN]).comparison is None


def test_another_text_is_wrong_where_texts_are_reproducible() -> None:
    same, other = measured((20, 10)), measured((20, 10), tokens=(1, 2, 4))
    assert not same.is_wrong
    assert other.is_wrong
    other.runs = [replace(run, reproducible=False) for run in other.runs]
    assert not other.is_wrong


def test_where_no_speed_could_be_measured_none_is_shown() -> None:
    console = Console(width=160, record=True)
    console.print(table([replace(RUN, tokens=(1,), tokens_per_s=0.0)]))
    said = console.export_text()
    assert "–" in said
    assert "0.0" not in said


def test_the_report_and_the_json_hold_what_was_measured() -> None:
    found = measured(*[(20.0 + n, 10.0) for n in range(6)])
    found.skipped = ["long", "long"]
    console = Console(width=160, record=True)
    for shown in report(found):
        console.print(shown)
    said = console.export_text()
    assert "2.25 (2.00 … 2.50) × as fast, median of 6 pairs" in said
    assert "same text in 6 of 6" in said
    assert said.count("long") == 1
    read = json.loads(found.to_json())
    assert read["comparison"]["speedup"] == {"value": 2.25, "low": 2.0, "high": 2.5}
    assert len(read["runs"]) == 12
