"""Talk with a model of a swarm: `python examples/chat.py MODEL PEER`; an empty line ends it.

The conversation stays in the nodes' memory between turns, so only new tokens are sent.
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
    tokens: Annotated[int, arg(metavar="N")] = 64,
) -> None:
    """Talk with a model of a swarm; an empty line ends it.

    Args:
        model: hub id or folder of the target model.
        peer: multiaddress of a peer of the swarm.
        draft: hub id or folder of a small model with the same tokenizer.
        tokens: maximum length of one answer.
    """
    with (
        Swarm.connect(model, peers=[peer], draft=draft) as swarm,
        swarm.chat("Be brief.", max_new_tokens=tokens, temperature=0.7) as chat,
    ):
        while text := input("you: "):
            for piece in chat.stream(text):
                print(piece.text, end="", flush=True)
            print()


if __name__ == "__main__":
    tyro.cli(main)
