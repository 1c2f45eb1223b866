"""Hugging Face's client at a swarm: `pip install huggingface_hub`, then `python examples/api/huggingface_python.py`."""

from __future__ import annotations

import os

from huggingface_hub import InferenceClient

client = InferenceClient(base_url=os.environ.get("CANOPY_API", "http://127.0.0.1:8000") + "/v1", api_key="none")
stream = client.chat_completion(
    [{"role": "user", "content": "Where is the captain?"}],
    model="demo-target",
    max_tokens=48,
    stream=True,
)
for chunk in stream:
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
