"""Anthropic's Python client at a swarm: `pip install anthropic`, then `python examples/api/anthropic_python.py`."""

from __future__ import annotations

import os

from anthropic import Anthropic

client = Anthropic(base_url=os.environ.get("CANOPY_API", "http://127.0.0.1:8000"), api_key="none")
with client.messages.stream(
    model="demo-target",
    messages=[{"role": "user", "content": "Where is the captain?"}],
    max_tokens=48,
) as stream:
    for text in stream.text_stream:
        print(text, end="", flush=True)
print()
