"""LiteLLM at a swarm: `pip install litellm`, then `python examples/api/litellm_python.py`."""

from __future__ import annotations

import os

import litellm

stream = litellm.completion(
    model="openai/demo-target",
    api_base=os.environ.get("CANOPY_API", "http://127.0.0.1:8000") + "/v1",
    api_key="none",
    messages=[{"role": "user", "content": "Where is the captain?"}],
    max_tokens=48,
    stream=True,
)
for chunk in stream:
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
