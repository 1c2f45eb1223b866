"""OpenAI's Responses API by the official client, against its documented shapes: stored responses."""

from __future__ import annotations

import json

import openai
import pytest

from client.dialogue.messages import Message, ReasoningDelta, ToolCall
from tests.net.client.api.json_shapes import mismatch
from tests.net.client.api.responses.questions import CALL, KEYS, WEATHER
from tests.scripted_backend import ScriptedBackend, saying


def test_a_response_goes_on_without_the_instructions(client: openai.OpenAI, backend: ScriptedBackend) -> None:
    backend.script = saying(ReasoningDelta("hm"), "Fine.", *CALL, reason="tool_calls")
    first = client.responses.create(model="demo-model", input="Hi", instructions="First.", tools=[WEATHER])  # type: ignore[list-item]
    backend.script = saying("Sun.")
    second = client.responses.create(
        model="demo-model",
        previous_response_id=first.id,
        input=[{"type": "function_call_output", "call_id": "call_7", "output": "sun"}],
        instructions="Second.",
    )
    answer = Message(
        "assistant", "Fine.", reasoning="hm", tool_calls=(ToolCall("call_7", "weather", '{"town":"Ulm"}'),)
    )
    result = Message("tool", "sun", tool_call_id="call_7", name="weather")
    assert list(backend.last.messages) == [Message("system", "Second."), Message("user", "Hi"), answer, result]
    assert second.previous_response_id == first.id
    client.responses.create(model="demo-model", previous_response_id=second.id, input="Thanks")
    assert list(backend.last.messages) == [
        Message("user", "Hi"),
        answer,
        result,
        Message("assistant", "Sun."),
        Message("user", "Thanks"),
    ]


def test_a_streamed_response_is_stored_when_it_ends(client: openai.OpenAI, backend: ScriptedBackend) -> None:
    backend.script = saying("Hello")
    with client.responses.create(model="demo-model", input="Hi", stream=True) as stream:
        *_, last = stream
    assert last.type == "response.completed"
    assert client.responses.retrieve(last.response.id).output_text == "Hello"


def test_stored_responses_are_read_and_forgotten(client: openai.OpenAI, backend: ScriptedBackend) -> None:
    backend.script = saying("Hello")
    made = client.responses.create(model="demo-model", input="Hi")
    assert client.responses.retrieve(made.id).to_dict() == made.to_dict()
    items = client.responses.input_items.list(made.id)
    assert (
        mismatch(
            [item.to_dict() for item in items.data],
            [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}], "id": str}],
        )
        == ""
    )
    raw = client.responses.with_raw_response.delete(made.id)
    assert json.loads(raw.text) == {"id": made.id, "object": "response", "deleted": True}
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.delete(made.id)


def test_nobody_reads_the_response_of_another_key(client: openai.OpenAI, backend: ScriptedBackend) -> None:
    backend.script = saying("Secret")
    made = client.responses.create(model="demo-model", input="Hi")
    stranger = client.with_options(api_key=KEYS[1])
    for ask in (stranger.responses.retrieve, stranger.responses.delete, stranger.responses.input_items.list):
        with pytest.raises(openai.NotFoundError):
            ask(made.id)
    with pytest.raises(openai.BadRequestError, match="not found"):
        stranger.responses.create(model="demo-model", input="What?", previous_response_id=made.id)
    assert client.responses.retrieve(made.id).output_text == "Secret"


def test_store_false_keeps_nothing(client: openai.OpenAI, backend: ScriptedBackend) -> None:
    backend.script = saying("Hello")
    made = client.responses.create(model="demo-model", input="Hi", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)
