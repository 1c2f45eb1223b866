"""What `node serve` refuses before anything slow begins: spans, ports, counts, addresses, devices and types."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from node.model.config import ServeConfig
from node.model.loading import check_compute, check_dtype, pick_device
from swarm.base.errors import ConfigError, LayersError

GOOD = ServeConfig(layers="0-4", host="127.0.0.1")


def refusal(config: ServeConfig) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        config.check()
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize(
    "layers", ["8-4", "4-4", "-1-3", "4--1", "abc", "", "4", "0-4-8", "0:4", "1e3-2e3", "0-9999999"]
)
def test_a_span_is_two_rising_numbers(layers: str) -> None:
    error = refusal(replace(GOOD, layers=layers))
    assert isinstance(error, LayersError)
    assert "start-end" in str(error)


@pytest.mark.parametrize(
    ("option", "given"),
    [
        ("--port", {"port": 65_536}),
        ("--port", {"port": -1}),
        ("--dht-port", {"dht_port": 70_000}),
        ("--threads", {"threads": 0}),
        ("--threads", {"threads": 4_000_000}),
        ("--kv-tokens", {"kv_tokens": 0}),
        ("--num-layers", {"layers": "auto", "num_layers": 0}),
        ("--layers auto", {"num_layers": 4}),
        ("--name", {"name": "a\nb\x1b[31m"}),
        ("--name", {"name": 65 * "a"}),
        ("--quiet-hours", {"quiet_hours": "evening"}),
        ("--quiet-hours", {"quiet_hours": "24:00-07:00"}),
        ("--prefer", {"prefer": ("nobody",)}),
        ("--prefer", {"prefer": ("192.0.2.0/99",)}),
        ("--max-mbit", {"max_mbit": 0.5}),
        ("--max-mbit", {"max_mbit": float("nan")}),
        ("--max-mbit", {"max_mbit": float("inf")}),
        ("--host", {"host": "banana"}),
        ("--join", {"join": ("192.0.2.1:80",)}),
        ("--announce-address", {"announce_address": "no port"}),
        ("--announce-address", {"announce_address": "192.0.2.1:0"}),
        ("--announce-address", {"announce_address": "http://host:80"}),
        ("--insecure", {"host": "0.0.0.0", "insecure": True}),
        ("--insecure", {"host": "::", "insecure": True}),
        ("--insecure", {"host": "192.0.2.1", "insecure": True}),
        ("--insecure", {"insecure": True, "announce_address": "192.0.2.1:80"}),
        ("--insecure", {"insecure": True, "announce_address": "node.example:80"}),
    ],
)
def test_what_cannot_be_names_its_option(option: str, given: dict[str, Any]) -> None:
    assert option in str(refusal(replace(GOOD, **given)))


def test_sensible_options_pass() -> None:
    GOOD.check()
    config = replace(GOOD, host="::", announce_address="[2001:db8::1]:80", threads=1, kv_tokens=1, port=65_535)
    config.check()
    replace(GOOD, layers="auto").check()
    replace(GOOD, quiet_hours="22:00-07:00", max_mbit=1, pause_when_busy=True, pause_on_battery=True).check()
    replace(GOOD, layers="auto", num_layers=4).check()
    for host, announced in (("127.0.0.1", None), ("::1", "[::1]:80"), ("127.0.0.1", "127.0.0.1:80")):
        replace(GOOD, host=host, announce_address=announced, insecure=True).check()
    assert config.dht().announce_host == "[2001:db8::1]"


@pytest.mark.parametrize("device", ["banana", "", "cuda:99", "meta", "cpu:x"])
def test_a_device_that_is_not_there_is_one_line(device: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_compute(replace(GOOD, device=device))
    assert repr(device) in str(caught.value)
    assert "cpu" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_half_precision_on_a_cpu_is_refused_with_what_to_use() -> None:
    with pytest.raises(ConfigError, match="use float32, or bfloat16"):
        check_compute(replace(GOOD, device="cpu", dtype="float16"))
    for dtype in ("auto", "float32", "bfloat16"):
        check_compute(replace(GOOD, device="cpu", dtype=dtype))
    assert pick_device("cpu").type == "cpu"


def test_bfloat16_needs_a_gpu_that_computes_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda:1")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Old GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    check_dtype(torch.float16, gpu)
    with pytest.raises(ConfigError, match=r"cuda:1 \(Old GPU\) .* use --dtype float16"):
        check_dtype(torch.bfloat16, gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    check_dtype(torch.bfloat16, gpu)
