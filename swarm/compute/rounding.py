"""How a CPU rounds where its numeric class leaves that open: a mark, the same for machines that give equal bits.

A class of a CPU in bfloat16 names no processor, and one's sums may go another way than another's. So each computes the
same made-up numbers on loading, in the sizes of its model: attention along positions, products with integers and
without, norms, rotary embeddings. The mark is a digest of all bits that came, and of what chose the instructions.
"""

from __future__ import annotations

import platform
from hashlib import sha256
from typing import TYPE_CHECKING, Final

import torch
from torch.nn.functional import linear, rms_norm, silu

from swarm.compute.position_attention import POSITIONS, SeenRows, attend_by_positions, cut, in_fours
from swarm.compute.weights.codes_weight import GROUPS, HALF, TILE
from swarm.protocol.numeric_class import ROUNDING_DIGITS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedConfig

PAST: Final = 2 * POSITIONS + 45
"""Certain tokens before the trial's rows: the last block is not full."""
ROWS: Final = (1, 7, 16, 64, 300)
"""Rows of the trial's sweeps: torch cuts fewer than 192 otherwise than more."""
HEADS: Final = 16
"""Heads that are tried, at most: each is computed alike."""
COLUMNS: Final = 4_096
"""Of a row, as far as it is tried."""


@torch.inference_mode()
def rounding_of(config: PreTrainedConfig) -> str:
    """The mark of this processor for models of a config.

    Args:
        config: of the layers; its sizes decide into which parts sums are cut.

    Returns:
        `ROUNDING_DIGITS` hex digits.
    """
    chosen = (torch.__version__.partition("+")[0], platform.machine(), torch.backends.cpu.get_cpu_capability())
    digest = sha256("\n".join(chosen).encode())
    draw = torch.Generator().manual_seed(0)
    for made in (*_attention(config, draw), *_rows(config, draw)):
        digest.update(made.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:ROUNDING_DIGITS]


def _attention(config: PreTrainedConfig, draw: torch.Generator) -> Iterator[torch.Tensor]:
    """Chains of rows behind a text, and a tree."""
    groups = config.num_attention_heads // config.num_key_value_heads
    kv_heads = min(config.num_key_value_heads, max(1, HEADS // groups))
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for count in ROWS:
        for is_chain in (True, False) if count > 1 else (True,):
            above = torch.ones(count, count, dtype=torch.bool).tril()
            depths = torch.arange(count)
            if not is_chain:  # every second row is another one's leaf
                above[:, 1::2] = False
                above |= torch.eye(count, dtype=torch.bool)
                depths = (depths + 1) // 2
            visible = torch.cat((torch.ones(count, PAST, dtype=torch.bool), above), 1)
            positions = torch.cat((torch.arange(PAST), PAST + depths))
            pieces = cut(SeenRows(visible, above, positions, PAST, None), (kv_heads, groups), width)
            room = -(-(PAST + count) // POSITIONS) * POSITIONS
            query, keys, values = (
                _drawn(draw, heads, rows, width).bfloat16()
                for heads, rows in ((kv_heads * groups, count), (kv_heads, room), (kv_heads, room))
            )
            yield attend_by_positions(pieces, query, keys, values, width**-0.5)


def _rows(config: PreTrainedConfig, draw: torch.Generator) -> Iterator[torch.Tensor]:
    """What else is done to rows."""
    columns = min(config.hidden_size, COLUMNS) // GROUPS[-1] * GROUPS[-1] or GROUPS[-1]
    rows = _drawn(draw, 2 * HALF, columns)
    few = rows.bfloat16()
    yield rms_norm(rows, (columns,), eps=1e-6)
    yield rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + 1e-6)
    yield silu(few)
    angles = torch.arange(2 * POSITIONS).float()[:, None] * 1e4 ** (-torch.arange(0, 64, 2).float() / 64)
    yield torch.cat((angles.cos(), angles.sin())).bfloat16()
    yield rows.exp()
    yield linear(in_fours(few[:3]), _drawn(draw, TILE, columns).bfloat16())
    for group in (one for one in GROUPS if columns % one == 0):
        codes = torch.randint(0, 16, (TILE, columns), generator=draw, dtype=torch.int32)
        words = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
        pairs = _drawn(draw, columns // group, TILE, 2).bfloat16()
        for some in (few[:1], few):
            yield torch.ops.aten._weight_int4pack_mm_for_cpu(some, words, group, pairs)


def _drawn(draw: torch.Generator, *shape: int) -> torch.Tensor:
    """Numbers from -2 to 2 that no processor computes in its own way."""
    return torch.randint(-2_048, 2_049, shape, generator=draw).float() / 1_024
