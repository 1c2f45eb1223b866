"""Coding agents, by the shape of what they send: every request is answered, and streams have all that they read.

`agents/codex.json` and `agents/claude_code.json` were recorded from the programs named in them; the texts are our own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx2
import pytest

from client.api.openai.models import CODEX_INSTRUCTIONS
from client.dialogue.messages import Message, ToolCall, ToolCallDelta
from tests.net.client.api.json_shapes import mismatch
from tests.scripted_backend import ScriptedBackend, saying

HERE = Path(__file__).parent / "agents"
CODEX, CLAUDE = (json.loads((HERE / name).read_text()) for name in ("codex.json", "claude_code.json"))
IMAGE = "[Here was an image; this model reads text only.]"
PATCH = 'begin\n+café "é" \\\nend\n'


def send(http: httpx2.Client, recorded: dict[str, Any], number: int) -> httpx2.Response:
    asked = recorded["requests"][number]
    return http.request(asked["method"], asked["path"], headers=recorded["headers"], json=asked.get("body"))


def events(answer: httpx2.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    found: list[dict[str, Any]] = []
    for block in answer.text.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines())
        if lines:
            found.append(json.loads(lines["data"]))
            assert lines["event"] == found[-1]["type"]
    return found


def named(answer: httpx2.Response) -> list[str]:
    """What the answer goes without, beside fields."""
    words = answer.headers["canopy-left-out"].split(", ")
    return [word for word in words if not word.startswith("field ")]


@pytest.mark.parametrize("number", range(len(CODEX["requests"])))
def test_codex_is_answered(http: httpx2.Client, backend: ScriptedBackend, number: int) -> None:
    backend.script = saying("Hello")
    assert send(http, CODEX, number).status_code == 200


def test_codex_is_told_of_the_model(http: httpx2.Client) -> None:
    told = send(http, CODEX, 0).json()
    assert [model["id"] for model in told["data"]] == ["demo-model"]
    shape = {
        **{"slug": "demo-model", "display_name": "demo-model", "description": None, "visibility": "list"},
        **{"supported_reasoning_levels": list, "shell_type": "unified_exec", "supported_in_api": True, "priority": int},
        **{"availability_nux": None, "upgrade": None, "base_instructions": CODEX_INSTRUCTIONS},
        **{"supports_reasoning_summaries": bool, "support_verbosity": False, "default_verbosity": None},
        **{"apply_patch_tool_type": "freeform", "truncation_policy": {"mode": "tokens", "limit": 1_000}},
        **{"supports_parallel_tool_calls": True, "context_window": 2_048, "experimental_supported_tools": []},
        **{"input_modalities": ["text"]},
    }
    assert mismatch(told["models"], [shape]) == ""
    assert "models" not in http.get("/v1/models").json()


def test_codex_is_told_what_it_goes_without(http: httpx2.Client, backend: ScriptedBackend) -> None:
    backend.script = saying("Hello")
    answer = send(http, CODEX, 2)
    assert named(answer) == ["tool web_search", "part input_image"]
    assert {"exec_command", "apply_patch", "mcp__demo__weather", "multi_agent_v1__close_agent"} < {
        tool.name for tool in backend.last.tools
    }
    assert list(backend.last.messages[-6:]) == [
        Message("assistant", "", tool_calls=(ToolCall("call_0", "mcp__demo__weather", '{"town": "Ulm"}'),)),
        Message("tool", "Wall time: 0.1 seconds\nOutput:mild in Ulm", tool_call_id="call_0", name="mcp__demo__weather"),
        Message(
            "assistant",
            "",
            tool_calls=(ToolCall("call_1", "apply_patch", json.dumps({"input": PATCH}, ensure_ascii=False)),),
        ),
        Message("tool", "Exit code: 0\nOutput:\nDone.\n", tool_call_id="call_1", name="apply_patch"),
        Message("assistant", "", tool_calls=(ToolCall("call_2", "view_image", '{"path": "boat.png"}'),)),
        Message("tool", IMAGE, tool_call_id="call_2", name="view_image"),
    ]


def test_codex_reads_a_text(http: httpx2.Client, backend: ScriptedBackend) -> None:
    backend.script = saying("Two ", "oars.")
    told = events(send(http, CODEX, 1))
    assert [event["type"].removeprefix("response.") for event in told] == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *("output_text.delta", "output_text.delta", "output_text.done", "content_part.done", "output_item.done"),
        "completed",
    ]
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    usage = {
        **{"input_tokens": 7, "input_tokens_details": {"cached_tokens": 3}, "output_tokens": 2, "total_tokens": 9},
        "output_tokens_details": {"reasoning_tokens": 0},
    }
    item = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Two oars."}]}
    assert mismatch(told[-1]["response"], {"id": str, "status": "completed", "output": [item], "usage": usage}) == ""


def test_codex_reads_calls_as_it_declared_them(http: httpx2.Client, backend: ScriptedBackend) -> None:
    patch = json.dumps({"input": PATCH})
    backend.script = saying(
        ToolCallDelta(0, "call_8", "mcp__demo__weather", '{"town":"Ulm"}'),
        ToolCallDelta(1, "call_9", "apply_patch", patch[:20]),
        *(ToolCallDelta(1, "", "", character) for character in patch[20:]),
        reason="tool_calls",
    )
    told = events(send(http, CODEX, 2))
    done = [event["item"] for event in told if event["type"] == "response.output_item.done"]
    weather = {"type": "function_call", "call_id": "call_8", "name": "weather", "namespace": "mcp__demo"}
    edit = {"type": "custom_tool_call", "call_id": "call_9", "name": "apply_patch", "input": PATCH}
    assert mismatch(done, [{**weather, "arguments": '{"town":"Ulm"}'}, edit]) == ""
    assert told[-1]["response"]["output"] == done
    inputs = [event for event in told if event["type"].startswith("response.custom_tool_call_input")]
    assert "".join(event["delta"] for event in inputs[:-1]) == inputs[-1]["input"] == PATCH
    assert len(inputs) > 10  # it streams
    assert {event["item_id"] for event in inputs} == {done[1]["id"]}


@pytest.mark.parametrize("number", range(len(CLAUDE["requests"])))
def test_claude_code_is_answered(http: httpx2.Client, backend: ScriptedBackend, number: int) -> None:
    backend.script = saying("Hello")
    assert send(http, CLAUDE, number).status_code == 200


def test_claude_code_counts(http: httpx2.Client, backend: ScriptedBackend) -> None:
    body = {name: CLAUDE["requests"][2]["body"][name] for name in ("model", "messages", "system", "tools", "thinking")}
    answer = http.post("/v1/messages/count_tokens?beta=true", headers=CLAUDE["headers"], json=body)
    assert answer.json() == {"input_tokens": 7}


def test_claude_code_s_prompt_begins_alike_in_every_conversation(http: httpx2.Client, backend: ScriptedBackend) -> None:
    backend.script = saying("Hello")
    send(http, CLAUDE, 2)
    assert list(backend.last.messages) == [
        Message("system", "You are an agent.\nHelp with the boat."),
        Message("user", "<system-reminder>\nIt is Monday.\n</system-reminder>\nPaint the boat."),
        Message("system", "There are no other agents."),
    ]


def test_claude_code_replays_an_image(http: httpx2.Client, backend: ScriptedBackend) -> None:
    backend.script = saying("Hello")
    answer = send(http, CLAUDE, 3)
    assert named(answer) == ["part image"]
    assert backend.last.messages[-1] == Message("tool", IMAGE, tool_call_id="call_0", name="Read")


def test_claude_code_reads_a_call(http: httpx2.Client, backend: ScriptedBackend) -> None:
    arguments = '{"command":"ls"}'
    backend.script = saying(
        "I look.",
        ToolCallDelta(0, "call_8", "Bash", arguments[:5]),
        ToolCallDelta(0, "", "", arguments[5:]),
        reason="tool_calls",
    )
    told = events(send(http, CLAUDE, 2))
    assert [(event["type"], event.get("index")) for event in told] == [
        *(("message_start", None), ("ping", None)),
        *(("content_block_start", 0), ("content_block_delta", 0), ("content_block_stop", 0)),
        *(("content_block_start", 1), ("content_block_delta", 1), ("content_block_delta", 1)),
        *(("content_block_stop", 1), ("message_delta", None), ("message_stop", None)),
    ]
    block = {"type": "tool_use", "id": "call_8", "name": "Bash", "input": {}}
    assert told[5]["content_block"] == block
    assert "".join(event["delta"]["partial_json"] for event in told[6:8]) == arguments
    end = {"delta": {"stop_reason": "tool_use", "stop_sequence": None}, "usage": {"output_tokens": 3}}
    assert mismatch(told[9], end) == ""
