"""LangChain at a swarm: `pip install langchain-openai`, then `python examples/api/langchain_python.py`."""

from __future__ import annotations

import os

from langchain_openai import ChatOpenAI

model = ChatOpenAI(
    base_url=os.environ.get("CANOPY_API", "http://127.0.0.1:8000") + "/v1",
    api_key="none",
    model="demo-target",
    max_completion_tokens=48,
)
for chunk in model.stream("Where is the captain?"):
    print(chunk.text, end="", flush=True)
print()
