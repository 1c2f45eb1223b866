"""OpenAI's Python client at a swarm: `pip install openai`, then `python examples/api/openai_python.py`."""

from __future__ import annotations

import os

from openai import OpenAI

client = OpenAI(base_url=os.environ.get("CANOPY_API", "http://127.0.0.1:8000") + "/v1", api_key="none")
stream = client.chat.completions.create(
    model="demo-target",
    messages=[{"role": "user", "content": "Where is the captain?"}],
    max_completion_tokens=48,
    stream=True,
)
for chunk in stream:
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
