"""Stream one text through a swarm: `python examples/generate.py MODEL PEER --draft DRAFT`.

MODEL is a hub id or a folder. PEER is the address that `swarm bootstrap` or a node prints after `--join`.
"""

from __future__ import annotations

from typing import Annotated

import tyro
from tyro.conf import Positional, arg

from client import Swarm


def main(
    model: Annotated[Positional[str], arg(metavar="MODEL")],
    peer: Annotated[Positional[str], arg(metavar="PEER")],
    draft: Annotated[str | None, arg(metavar="DRAFT")] = None,
    prompt: Annotated[str, arg(metavar="TEXT")] = "It was a dark night, and the old captain",
    tokens: Annotated[int, arg(metavar="N")] = 64,
) -> None:
    """Stream one text through a swarm.

    Args:
        model: hub id or folder of the target model.
        peer: multiaddress of a peer of the swarm.
        draft: hub id or folder of a small model with the same tokenizer.
        prompt: text to continue.
        tokens: maximum length of the text.
    """
    with Swarm.connect(model, peers=[peer], draft=draft) as swarm:
        print(prompt, end="", flush=True)
        result = None
        for piece in swarm.stream(prompt, max_new_tokens=tokens, temperature=0.7, seed=11):
            print(piece.text, end="", flush=True)
            result = piece.result
    if result is not None:
        stats = result.stats
        print(f"\n\n{stats.tokens_per_s:.1f} tokens/s, {stats.acceptance_length:.1f} tokens per tree")


if __name__ == "__main__":
    tyro.cli(main)
