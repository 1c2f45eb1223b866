"""States of a health service, as its page may meet them: JSON by the service's own contract, always the same."""

from __future__ import annotations

import copy
import hashlib
import random
from collections.abc import Sequence
from typing import Any

State = dict[str, Any]
"""The service's state, or a part of it, as JSON."""

AT = 1_790_000_000.0
HOUR = 3_600.0
FINGERPRINT = "4e5f17c2a9b04d6e8f1a2b3c4d5e6f70"
JOIN = "/ip4/198.51.100.7/tcp/31337/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
MARKUP = "<img src=x onerror=alert(1)>"
DEVICES = ("NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 3060", "cpu", "NVIDIA A100-SXM4-40GB")
ALPHABET = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"


def peer_id(number: int) -> str:
    """A peer id that looks like one."""
    digest = hashlib.sha512(str(number).encode()).digest()
    return "Qm" + "".join(ALPHABET[byte % len(ALPHABET)] for byte in digest[:44])


def node(number: int, span: Sequence[int], name: str | None = None, **changes: object) -> State:
    peer, draw = peer_id(number), random.Random(number)
    compute = draw.uniform(4, 12)
    claimed = [[1, round(compute * 0.8, 1)], [8, round(compute, 1)], [64, round(compute * 2.2, 1)]]
    device = DEVICES[number % len(DEVICES)]
    return {
        "peer": peer,
        "short": peer[-8:],
        "name": name,
        "span": list(span),
        "state": "serving",
        "device": device,
        "numeric_class": "cpu-float32" if device == "cpu" else "cuda-bfloat16",
        "version": "0.2.0",
        "started_at": AT - draw.uniform(600, 400_000),
        "seen_at": AT - 2,
        "source": "both",
        "busy": round(draw.uniform(0.02, 0.8), 2),
        "kv_free": draw.randrange(1_000, 16_000),
        "kv_total": 16_384,
        "sweeps_per_s": round(draw.uniform(0.5, 6), 1),
        "layer_tokens": draw.randrange(10_000, 4_000_000),
        "claimed_ms": claimed,
        "probed_ms": round(compute * draw.uniform(0.9, 1.6), 1),
        "agrees": True,
        **changes,
    }


def probe(nodes: Sequence[State], **changes: object) -> State:
    hops = [
        {
            "peer": one["peer"],
            "short": one["short"],
            "span": one["span"],
            "link_ms": 18.0 + 3 * place,
            "queue_ms": 0.4 * place,
            "compute_ms": one["probed_ms"],
        }
        for place, one in enumerate(nodes)
    ]
    figures = {"ttft_ms": 214.0, "tokens_per_s": 18.8, "acceptance_length": 4.02, "sweep_ms": 131.0}
    return {"at": AT - 42, "ok": True, "error": None, **figures, "hops": hops, "return_ms": 22.5, **changes}


def model(nodes: Sequence[State], num_layers: int, name: str = "demo-target", **changes: object) -> State:
    """A model whose verdict follows from its machines."""
    spans = [range(*one["span"]) for one in nodes if one["state"] == "serving"]
    replicas = [sum(layer in span for span in spans) for layer in range(num_layers)]
    least = min(replicas, default=0)
    verdict = "broken" if least == 0 else "serving"
    weak = [[layer, layer + 1] for layer, n in enumerate(replicas) if n == least]
    merged: list[list[int]] = []
    for start, end in weak:
        if merged and merged[-1][1] == start:
            merged[-1][1] = end
        else:
            merged.append([start, end])
    fixes = [f"node serve {name} --layers {start}-{end} --join {JOIN}" for start, end in merged[:2]]
    reasons = {
        "broken": "no machine serves some of its layers",
        "serving": f"every layer has at least {least} machines" if least > 1 else "no machine to spare",
    }
    return {
        "name": name,
        "fingerprint": FINGERPRINT,
        "num_layers": num_layers,
        "verdict": verdict,
        "reason": reasons[verdict],
        "since": AT - 754,
        "missing": merged if verdict == "broken" else [],
        "fixes": fixes if verdict != "serving" else [],
        "margin": max(least - 1, 0),
        "replicas": replicas,
        "nodes": list(nodes),
        "probe": probe(nodes[:3]) if nodes else None,
        **changes,
    }


def events(nodes: Sequence[State], name: str) -> list[State]:
    said = (
        ("joined", "serves layers 0…3"),
        ("moved", "moved from layers 2…5 to 4…7"),
        ("restored", "serving again after 40 s without a broker"),
        ("left", "drained 2 sessions and left"),
    )
    return [
        {
            "at": AT - 60 - 190 * place,
            "model": name,
            "peer": one["peer"],
            "short": one["short"],
            "kind": said[place % 4][0],
            "text": said[place % 4][1],
        }
        for place, one in enumerate([*nodes, *nodes][:16])
    ]


def state(*models: State, alerts: Sequence[State] = (), **changes: object) -> State:
    """The whole state, broker and DHT well."""
    nodes = [one for each in models for one in each["nodes"]]
    total = sum(one["layer_tokens"] for one in nodes) or 1
    ranked = sorted(nodes, key=lambda one: -one["layer_tokens"])[:50]
    return {
        "v": 1,
        "at": AT,
        "started_at": AT - 9 * HOUR,
        "swarm": "canopy",
        "sources": {"broker": {"state": "connected", "since": AT - HOUR}, "dht": {"state": "ok", "since": AT - HOUR}},
        "refused": {"forged": 0, "replayed": 0},
        "models": list(models),
        "alerts": list(alerts),
        "events": events(nodes[:16], models[0]["name"]) if nodes else [],
        "contributors": [
            {
                "peer": one["peer"],
                "short": one["short"],
                "name": one["name"],
                "layer_tokens": one["layer_tokens"],
                "share": one["layer_tokens"] / total,
            }
            for one in ranked
        ],
        **changes,
    }


def alert(kind: str, severity: str, text: str, since: float = AT - 754) -> State:
    return {
        "id": f"{kind} {text}",
        "severity": severity,
        "kind": kind,
        "model": "demo-target",
        "text": text,
        "since": since,
    }


def swarm_of_six() -> list[State]:
    """Six machines, each of the 12 layers twice."""
    return [
        node(1, (0, 4), "greenhouse"),
        node(2, (4, 8), "attic"),
        node(3, (8, 12)),
        node(4, (0, 6), "lab-4"),
        node(5, (6, 12), "bakery"),
        node(6, (2, 7)),
    ]


def serving() -> State:
    return state(model(swarm_of_six(), 12))


def degraded() -> State:
    """Layers 8…11 hang on one machine; one claims more than it holds, one answers otherwise, others found one wrong."""
    nodes = swarm_of_six()
    nodes[4] = {**nodes[4], "state": "draining"}
    nodes[2] = {**nodes[2], "probed_ms": nodes[2]["claimed_ms"][-1][1] * 2.4}
    nodes[5] = {**nodes[5], "agrees": False, "state": "stale"}
    said = [
        {
            "peer": nodes[3]["peer"],
            "short": nodes[3]["short"],
            "at": AT - 200,
            "text": "",
            "evidence": "1e8075420a6c" * 5,
        },
        {"peer": nodes[2]["peer"], "short": nodes[2]["short"], "at": AT - 7_500, "text": "", "evidence": ""},
    ]
    nodes[1] = {**nodes[1], "agrees": False, "named": True, "refuted": said}
    found = alert("last-holder", "warning", "layers 8…11 hang on one machine")
    return state(
        model(nodes, 12, verdict="degraded", reason="broker and DHT disagree about 1 machine"),
        alerts=[found, alert("version", "info", "2 machines run an older version")],
        refused={"forged": 3, "skewed": 12},
    )


def broken(**changes: object) -> State:
    """Nobody serves layers 4…7; broker and DHT are well."""
    nodes = [
        node(1, (0, 4), "greenhouse"),
        node(2, (4, 8), "attic", state="offline"),
        node(3, (8, 12)),
        node(7, (0, 4), MARKUP),
        node(8, (4, 8), "new-one", state="joining", probed_ms=None, agrees=None),
    ]
    failed = probe(
        [],
        ok=False,
        error="no chain over all layers: 4…7 are missing",
        tokens_per_s=None,
        ttft_ms=None,
        acceptance_length=None,
        sweep_ms=None,
    )
    gap = alert("gap", "critical", "nobody serves layers 4…7", AT - 12)
    return state(model(nodes, 12, since=AT - 12, probe=failed), alerts=[gap], **changes)


def dht_only() -> State:
    """The broker is down: no load, no counters."""
    bare = {"busy": None, "kv_free": None, "kv_total": None, "started_at": None, "sweeps_per_s": None, "source": "dht"}
    sources = {"broker": {"state": "down", "since": AT - 95}, "dht": {"state": "ok", "since": AT - HOUR}}
    down = alert("broker", "warning", "the broker has been down for 95 s", AT - 95)
    return state(
        model(
            [{**one, **bare} for one in swarm_of_six()],
            12,
            verdict="degraded",
            reason="the broker is down: known from the DHT alone",
        ),
        alerts=[down],
        sources=sources,
    )


def empty() -> State:
    return state()


def several() -> State:
    nodes = swarm_of_six()
    first = broken()["models"][0]
    second = model(nodes, 12, "Qwen/Qwen3-32B", fingerprint="b2" * 16)
    third = model(nodes[:3], 12, "openai/gpt-oss-120b", fingerprint="c3" * 16)
    return state(first, second, third)


def crowd(machines: int = 1_000, num_layers: int = 80) -> State:
    """One large model held by very many."""
    draw = random.Random(7)
    nodes = []
    for number in range(machines):
        length = draw.choice((2, 4, 4, 8, 8, 10, 16, 20))
        start = draw.randrange(0, num_layers - length + 1)
        condition = draw.choices(("serving", "joining", "draining", "stale", "offline"), (94, 1, 1, 2, 2))[0]
        nodes.append(
            node(number, (start, start + length), f"volunteer-{number}" if number % 3 == 0 else None, state=condition)
        )
    return state(model(nodes, num_layers, "meta-llama/Llama-3.3-70B-Instruct"))


def later(before: State, seconds: float = 0.5, **changes: object) -> State:
    """The same swarm a moment later, every machine with another load."""
    after = copy.deepcopy(before)
    after.update(at=before["at"] + seconds, **changes)
    draw = random.Random(after["at"])
    for each in after["models"]:
        for one in each["nodes"]:
            one["busy"] = round(draw.random(), 2)
            one["kv_free"] = draw.randrange(16_384)
    return after


def history(window: str) -> State:
    """Any window: a stretch that is broken a quarter of the time, one without records, a probed speed that wanders."""
    step, seconds = {"1h": (5, 3_600), "24h": (60, 86_400), "30d": (900, 30 * 86_400)}[window]
    draw, speed, points = random.Random(11), 18.0, []
    for place in range(seconds // step):
        share = place * step / seconds
        speed = min(max(speed + draw.uniform(-0.4, 0.4), 9), 24)
        if 0.3 < share < 0.33:
            continue
        verdict = "broken" if 0.62 < share < 0.64 else "degraded" if 0.58 < share < 0.68 else "serving"
        mixed = {"serving": step * 0.75, "broken": step * 0.25} if verdict == "broken" else {verdict: step}
        known = None if verdict == "broken" else round(speed, 1)
        points.append(
            {
                "at": AT - seconds + place * step,
                "verdict": verdict,
                "seconds": mixed,
                "min_replicas": {"broken": 0, "degraded": 1}.get(verdict, 2),
                "machines": 6,
                "tokens_per_s": known,
                "ttft_ms": 210.0,
                "sweeps_per_s": 3.0,
            }
        )
    return {"v": 1, "model": FINGERPRINT, "window": window, "step_s": step, "points": points}
