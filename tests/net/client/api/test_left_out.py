"""What a request declares or carries that this server has not is left out and named; the rest is answered."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import httpx2
import pytest

from client.dialogue.messages import Message, ToolCall
from tests.scripted_backend import ScriptedBackend

MODEL = "demo-model"
IMAGE = "[Here was an image; this model reads text only.]"
DOCUMENT = "[Here was a document; this model reads text only.]"
FILE = "[Here was a file; this model reads text only.]"
RECORDING = "[Here was a recording; this model reads text only.]"
SCHEMA = {"type": "object", "properties": {"town": {"type": "string"}}}
USE = {"type": "tool_use", "id": "call_1", "name": "look", "input": {}}


@dataclass(frozen=True)
class Case:
    """A request, what the answer's header names, and what the model is told."""

    path: str
    asks: dict[str, Any]
    named: str
    messages: list[Message] = field(default_factory=lambda: [Message("user", "Hi")])
    tools: list[str] = field(default_factory=list)


def responses(named: str, given: Any = "Hi", /, **expected: Any) -> Case:  # noqa: ANN401
    asks = expected.pop("asks", {})
    return Case("/v1/responses", {"model": MODEL, "input": given, **asks}, named, **expected)


def messages(named: str, *turns: Any, **expected: Any) -> Case:  # noqa: ANN401
    asks = expected.pop("asks", {})
    given = [{"role": role, "content": content} for role, content in turns or [("user", "Hi")]]
    return Case("/v1/messages", {"model": MODEL, "max_tokens": 9, "messages": given, **asks}, named, **expected)


def chat(named: str, *parts: Any, **expected: Any) -> Case:  # noqa: ANN401
    asks = expected.pop("asks", {})
    given = [{"role": "user", "content": list(parts) or "Hi"}]
    return Case("/v1/chat/completions", {"model": MODEL, "messages": given, **asks}, named, **expected)


def ollama(path: str, named: str, asks: dict[str, Any], **expected: Any) -> Case:  # noqa: ANN401
    return Case(path, {"model": MODEL, "stream": False, **asks}, named, **expected)


SERVED = [{"type": "function", "name": "weather", "parameters": SCHEMA}]
HOSTED = (
    *("web_search", "web_search_preview", "local_shell", "shell", "mcp", "image_generation", "tool_search"),
    *("file_search", "code_interpreter", "computer", "apply_patch", "programmatic_tool_calling", "a new one"),
)
ANTHROPIC_TOOLS = (
    *("web_search_20250305", "web_fetch_20250910", "computer_20250124", "bash_20250124"),
    *("text_editor_20250728", "code_execution_20250825", "memory_20250818", "mcp_toolset"),
)
CASES = {
    **{
        f"responses: a tool {kind}": responses(
            f"tool {kind.replace(' ', '?')}",
            asks={"tools": [{"type": kind, "parameters": 7, "name": "x", "tools": 3}, *SERVED]},
            tools=["weather"],
        )
        for kind in HOSTED
    },
    "responses: an allowed tool that is not ours": responses(
        "tool web_search",
        asks={
            "tools": [*SERVED, {"type": "web_search"}],
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "web_search"}, {"type": "function", "name": "weather"}],
            },
        },
        tools=["weather"],
    ),
    "responses: an image": responses(
        "part input_image",
        [{"role": "user", "content": [{"type": "input_text", "text": "See: "}, {"type": "input_image"}]}],
        messages=[Message("user", f"See: {IMAGE}")],
    ),
    "responses: a file and a recording": responses(
        "part input_file, part input_audio",
        [{"role": "user", "content": [{"type": "input_file", "file_data": "x"}, {"type": "input_audio"}]}],
        messages=[Message("user", FILE + RECORDING)],
    ),
    "responses: an image as a tool's output": responses(
        "part input_image",
        [
            {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": "{}"},
            {
                "type": "function_call_output",
                "call_id": "call_1",
                "output": [{"type": "input_image", "detail": "high"}],
            },
        ],
        messages=[
            Message("assistant", "", tool_calls=(ToolCall("call_1", "look", "{}"),)),
            Message("tool", IMAGE, tool_call_id="call_1", name="look"),
        ],
    ),
    "responses: items of servers": responses(
        "item web_search_call, item image_generation_call, item compaction, item mcp_list_tools, "
        "item tool_search_output",
        [
            {
                "type": "web_search_call",
                "id": "ws_1",
                "status": "completed",
                "action": {"type": "search", "query": "x"},
            },
            {"type": "image_generation_call", "id": "ig_1", "result": "aGk="},
            {"type": "compaction", "encrypted_content": "x"},
            {"type": "mcp_list_tools", "server_label": "x", "tools": []},
            {"type": "tool_search_output", "call_id": None, "execution": "server", "tools": SERVED},
            {"role": "user", "content": "Hi"},
        ],
        tools=["weather"],
    ),
    "responses: a screenshot, and calls of tools that are not offered": responses(
        "part computer_screenshot",
        [
            {
                "type": "local_shell_call",
                "call_id": "call_1",
                "status": "completed",
                "action": {"type": "exec", "command": ["ls"]},
            },
            {"type": "local_shell_call_output", "id": "call_1", "output": "a b"},
            {"type": "computer_call", "call_id": "call_2", "action": {"type": "screenshot"}},
            {
                "type": "computer_call_output",
                "call_id": "call_2",
                "output": {"type": "computer_screenshot", "image_url": "x"},
            },
        ],
        messages=[
            Message(
                "assistant",
                "",
                tool_calls=(ToolCall("call_1", "local_shell", '{"action": {"type": "exec", "command": ["ls"]}}'),),
            ),
            Message("tool", "a b", tool_call_id="call_1", name="local_shell"),
            Message(
                "assistant", "", tool_calls=(ToolCall("call_2", "computer", '{"action": {"type": "screenshot"}}'),)
            ),
            Message("tool", IMAGE, tool_call_id="call_2", name="computer"),
        ],
    ),
    **{
        f"messages: a tool {kind}": messages(
            f"tool {kind}",
            asks={"tools": [{"type": kind, "name": "x"}, {"name": "weather", "input_schema": SCHEMA}]},
            tools=["weather"],
        )
        for kind in ANTHROPIC_TOOLS
    },
    "messages: an image and a document": messages(
        "part image, part document",
        (
            "user",
            [
                {"type": "text", "text": "See"},
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}},
                {"type": "document", "source": {"type": "url", "url": "x"}},
            ],
        ),
        messages=[Message("user", f"See\n{IMAGE}\n{DOCUMENT}")],
    ),
    "messages: an image in a tool's result": messages(
        "part image",
        ("assistant", [USE]),
        ("user", [{"type": "tool_result", "tool_use_id": "call_1", "content": [{"type": "image", "source": {}}]}]),
        messages=[
            Message("assistant", "", tool_calls=(ToolCall("call_1", "look", "{}"),)),
            Message("tool", IMAGE, tool_call_id="call_1", name="look"),
        ],
    ),
    "messages: what a server did": messages(
        "part server_tool_use, part web_search_tool_result",
        ("user", "Hi"),
        (
            "assistant",
            [
                {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}},
                {"type": "web_search_tool_result", "tool_use_id": "s", "content": {"type": "an_error"}},
                {"type": "text", "text": "It is mild."},
            ],
        ),
        ("user", "Thanks"),
        messages=[Message("user", "Hi"), Message("assistant", "It is mild."), Message("user", "Thanks")],
    ),
    "chat: a custom tool": chat(
        "tool custom",
        asks={
            "tools": [
                {"type": "custom", "custom": {"name": "x"}},
                {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
            ]
        },
        tools=["weather"],
    ),
    "chat: an image, a recording and a file": chat(
        "part image_url, part input_audio, part file",
        {"type": "text", "text": "See"},
        {"type": "image_url", "image_url": {"url": "data:,"}},
        {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
        {"type": "file", "file": {"file_id": "x"}},
        messages=[Message("user", f"See{IMAGE}{RECORDING}{FILE}")],
    ),
    "ollama: images of a chat": ollama(
        "/api/chat",
        "part image",
        {"messages": [{"role": "user", "content": "See", "images": ["aGk="]}]},
        messages=[Message("user", f"See\n{IMAGE}")],
    ),
    "ollama: images of a prompt": ollama(
        "/api/generate",
        "part image",
        {"prompt": "See", "images": ["aGk="]},
        messages=[Message("user", f"See\n{IMAGE}")],
    ),
    "ollama: a tool that is no function": ollama(
        "/api/chat", "tool web", {"messages": [{"role": "user", "content": "Hi"}], "tools": [{"type": "web"}]}
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_it_is_left_out_and_named(http: httpx2.Client, backend: ScriptedBackend, case: Case) -> None:
    answer = http.post(case.path, json=case.asks)
    assert answer.status_code == 200, answer.text
    assert answer.headers["canopy-left-out"] == case.named
    assert list(backend.last.messages) == case.messages
    assert [tool.name for tool in backend.last.tools] == case.tools


def test_who_lacks_nothing_is_told_nothing(http: httpx2.Client) -> None:
    answer = http.post("/v1/responses", json={"model": MODEL, "input": "Hi", "tools": SERVED})
    assert "canopy-left-out" not in answer.headers


def test_a_stream_says_it_too(http: httpx2.Client) -> None:
    asks = {"model": MODEL, "input": "Hi", "stream": True, "tools": [{"type": "web_search"}]}
    answer = http.post("/v1/responses", json=asks)
    assert answer.headers["canopy-left-out"] == "tool web_search"


def test_the_log_says_it_once(http: httpx2.Client, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "client.api.request_fields"):
        for _ in range(2):
            http.post("/v1/responses", json={"model": MODEL, "input": "Hi", "tools": [{"type": "only here"}]})
    assert [record.getMessage() for record in caplog.records] == ["requests go without: tool only?here"]


DEMANDED = {
    "responses: a hosted tool": ("/v1/responses", {"input": "Hi", "tool_choice": {"type": "web_search"}}),
    "responses: any of none": ("/v1/responses", {"input": "Hi", "tool_choice": "required"}),
    "responses: one of hosted ones": (
        "/v1/responses",
        {
            "input": "Hi",
            "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [{"type": "web_search"}]},
        },
    ),
    "messages: a hosted tool": (
        "/v1/messages",
        {
            "max_tokens": 9,
            "messages": [{"role": "user", "content": "Hi"}],
            "tool_choice": {"type": "tool", "name": "web_search"},
        },
    ),
    "chat: a custom tool": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "Hi"}], "tool_choice": "required"},
    ),
}


@pytest.mark.parametrize(("path", "asks"), DEMANDED.values(), ids=DEMANDED.keys())
def test_what_is_demanded_is_refused(http: httpx2.Client, path: str, asks: dict[str, Any]) -> None:
    answer = http.post(path, json={"model": MODEL, "tools": [{"type": "web_search", "name": "web_search"}], **asks})
    assert answer.status_code == 400
    assert "tool_choice" in answer.text
