"""Tokenizers of others are tried in a worker: what hangs, panics or eats memory there is refused by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import swarm.files.tokenizer_trial
from client.base.target import load_target
from swarm.base.errors import UnsupportedModel
from swarm.base.workers import WorkLease
from swarm.demo import TARGET

TWICE = [{"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}] * 40


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"normalizer": {"type": "Sequence", "normalizers": TWICE}}, "more time or memory"),
        (
            {
                "pre_tokenizer": {
                    "type": "Split",
                    "pattern": {"Regex": "(a+)+$"},
                    "behavior": "Isolated",
                    "invert": False,
                }
            },
            "retry-limit",
        ),
    ],
    ids=["doubling", "backtracking"],
)
def test_a_tokenizer_that_never_ends_is_refused_by_name(
    change: dict[str, Any], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swarm.files.tokenizer_trial, "TRIAL_BYTES", 128 << 20)
    monkeypatch.setattr(swarm.files.tokenizer_trial, "ENCODING", WorkLease(cpu_s=1.0, wall_s=20.0))
    for file in TARGET.glob("*.json"):
        shutil.copy(file, tmp_path)
    raw = json.loads((TARGET / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps({**raw, **change}))
    with pytest.raises(UnsupportedModel, match=f"tokenizer.json .*{says}"):
        load_target(tmp_path)
