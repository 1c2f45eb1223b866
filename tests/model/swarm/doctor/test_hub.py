"""Troubles of the hub, each planted on a small hub: offline, unreachable, gated, another name; and a model's size."""

from __future__ import annotations

from collections.abc import Awaitable
from functools import partial
from pathlib import Path

import pytest
from huggingface_hub import constants, hf_hub_download

from swarm.doctor.hub import ask_hub, hub_cache, look_at_hub
from swarm.doctor.ladder import Diagnosis
from tests.fake_hub import MODEL, FakeHub, Repo
from tests.model.gguf_files import TinyGguf
from tests.one_diagnosis import assert_hint, assert_ok, assert_trouble, assert_unknown


def check(model: str | None = MODEL, *, is_reached: bool = False, **environment: str) -> Awaitable[Diagnosis]:
    return look_at_hub(model, partial(ask_hub, model), environment, is_reached=is_reached)


async def test_a_model_that_can_be_had(hub: FakeHub, whole: Path) -> None:
    await assert_ok(check(), "hub")
    await assert_ok(check(None), "hub")
    await assert_ok(check(str(whole)), "folder")
    assert hub.fetched() == set(), "nothing is downloaded"


async def test_a_models_size_is_known_before_it_is_here(hub: FakeHub) -> None:
    sizes = [len(data) for name, data in hub.repos[MODEL].files.items() if name.endswith(".safetensors")]
    facts = (await ask_hub(MODEL)).facts
    assert facts is not None
    assert (facts.total_bytes, facts.missing_bytes, facts.num_layers) == (sum(sizes), sum(sizes), None)
    hf_hub_download(MODEL, "config.json")
    answer = await ask_hub(MODEL)
    assert answer.is_cached
    assert answer.facts is not None
    assert answer.facts.num_layers is not None
    for name in hub.repos[MODEL].files:
        hf_hub_download(MODEL, name)
    facts = (await ask_hub(MODEL)).facts
    assert facts is not None
    assert facts.missing_bytes == 0
    assert hub_cache().is_dir()


async def test_a_gguf_model_that_can_be_had(hub: FakeHub, tmp_path: Path) -> None:
    here = TinyGguf.of("llama", "llama").write(tmp_path / "Tiny-Q8_0.gguf")
    size = here.stat().st_size
    hub.repos["org/gguf"] = Repo({here.name: here.read_bytes()})
    await assert_ok(check(str(here)), "folder")
    facts = (await ask_hub(str(here))).facts
    assert facts is not None
    assert (facts.total_bytes, facts.num_layers, facts.layer_bytes) == (size, 3, size // 3)
    await assert_ok(check("org/gguf:Q8_0"), "hub")
    facts = (await ask_hub("org/gguf:Q8_0")).facts
    assert facts is not None
    assert (facts.total_bytes, facts.missing_bytes) == (size, size)
    await assert_trouble(check("org/gguf:Q2_K"), "no-model", "no file 'Q2_K'; it has org/gguf:Q8_0", "check how")
    assert hub.fetched() == set(), "nothing is downloaded"


async def test_a_hub_that_variables_forbid(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hf_hub_download(MODEL, "config.json")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    text = "HF_HUB_OFFLINE forbids downloads"
    await assert_hint(check(HF_HUB_OFFLINE="1"), "hub-offline", text, "unset HF_HUB_OFFLINE")
    other = check("org/other", HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="yes")
    mend = "unset HF_HUB_OFFLINE TRANSFORMERS_OFFLINE"
    await assert_trouble(other, "model-offline", "the model is not in the cache", mend)


async def test_a_hub_that_cannot_be_reached(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    await assert_trouble(check(), "hub-silent", "the hub cannot be reached", "check the network")
    await assert_hint(check(None), "hub-silent", "the hub cannot be reached", "export https_proxy=")
    await assert_unknown(check(is_reached=True), "did not answer in time")


async def test_a_model_that_is_gated_or_wants_a_token(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repos[MODEL].token, hub.repos[MODEL].gated = "another", True
    await assert_trouble(check(), "hub-token", "gated; accept its licence", "hf auth login")
    monkeypatch.setenv("HF_TOKEN", "hf_wrongwrongwrong")
    await assert_trouble(check(), "hub-token", "does not accept your token", "hf auth login")


async def test_a_model_that_is_not_there_and_a_hub_in_trouble(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.tokens.add("hf_goodgoodgood")
    monkeypatch.setenv("HF_TOKEN", "hf_goodgoodgood")
    await assert_trouble(check("org/other"), "hub-token", "no such model", "hf auth login")
    await assert_trouble(check("a/b/c"), "no-model", "neither a folder nor a hub id", "how the model's name is written")
    hub.status = 500
    await assert_trouble(check(), "hub-refuses", "is in trouble (HTTP 500)", "wait some minutes")
