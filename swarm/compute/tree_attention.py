"""The one attention function: new rows of several sessions against each session's own KV, the tree's shape included.

Hugging Face calls it for every layer as the attention implementation "canopy" and builds no mask for it. It stores the
new keys and values in each session's KV cache, then each row attends to all committed tokens and to its own ancestors.
The running step travels as the keyword argument `canopy` of the model's forward: there is no state here.
Source: SpecInfer (arXiv 2305.09781), tree attention.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from swarm.base.errors import UnsupportedModel
from swarm.compute.kv_cache import LayerKv
from swarm.compute.position_attention import MOST_ROWS, CutRows, SeenRows, attend_by_positions, cut
from swarm.files.families import CHUNKED, AttentionBy, attention_by

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from transformers import PreTrainedConfig

    from swarm.compute.kv_cache import KvCache
    from swarm.compute.state_step import StateStep

NAME = "canopy"

OF_CLASS = "eager"
"""The attention of a class that computes it itself: the one implementation that every class has."""

ADDRESSES = "canopy_addresses"
"""Buffer of an attention module: int64 [lines, 3], where each session's keys and values of its layer lie."""

MAX_FOLDED_ROWS = 16
"""Up to this many rows, the query heads of a KV head share one product, so that K is read once."""

MAX_SCORES_BYTES = 64 << 20
"""Memory that the scores of the explicit path may take at a time."""


class AttentionReach(NamedTuple):
    """How far back the rows of a layer see.

    Attributes:
        window: positions that a row sees, None for all.
        chunk: positions of a chunk; a row sees those of its own only. None where there are no chunks.
    """

    window: int | None = None
    chunk: int | None = None


@dataclass(slots=True)
class SessionRange:
    """One session's rows `[start, end)` within a step.

    Attributes:
        start: its first row in the forward.
        end: the row after its last one.
        visible: bool [end - start, used], on the CPU: which slots each row sees, sliding windows aside.
        positions: int64 [used], on the CPU: of every slot.
        is_prefill: whether the rows are a chain into an empty session, which sees exactly the lower triangle.
    """

    kv_cache: KvCache
    start: int
    end: int
    visible: torch.Tensor
    positions: torch.Tensor
    is_prefill: bool
    _masks: dict[tuple[AttentionReach, int], torch.Tensor] = field(default_factory=dict, init=False, repr=False)
    _pieces: dict[tuple[AttentionReach, tuple[int, int], int], tuple[CutRows, ...]] = field(
        default_factory=dict, init=False, repr=False
    )

    @property
    def rows(self) -> int:
        """New rows of this session."""
        return self.end - self.start

    @property
    def used(self) -> int:
        """Slots in use, new rows included."""
        return self.visible.shape[1]

    def is_causal(self, reach: AttentionReach) -> bool:
        """Whether the mask is the lower triangle: a chain into an empty session, no longer than it reaches."""
        return self.is_prefill and all(bound is None or self.used <= bound for bound in reach)

    def mask(self, reach: AttentionReach, like: torch.Tensor) -> torch.Tensor:
        """Which slots each row sees, made once per step.

        Args:
            like: a tensor on the device that is asked for.

        Returns:
            bool [rows, used]
        """
        if (reach, 0) not in self._masks:
            seen, own = self.visible, self.positions[-self.rows :, None]
            if reach.window is not None:
                seen = seen & (own - self.positions[None] < reach.window)
            if reach.chunk is not None:
                seen = seen & (own // reach.chunk == self.positions[None] // reach.chunk)
            self._masks[reach, 0] = seen.to(like.device)
        return self._masks[reach, 0]

    def pieces(self, reach: AttentionReach, heads: tuple[int, int], width: int) -> Iterable[CutRows]:
        """The rows as `attend_by_positions` takes them; kept for the step's other layers where they are few."""
        if (reach, heads, width) not in self._pieces:
            committed = self.kv_cache.slots.committed
            above = self.visible[:, -self.rows :]
            seen = SeenRows(self.mask(reach, self.visible), above, self.positions, committed, reach.window)
            pieces = cut(seen, heads, width)
            if self.rows * heads[1] > MOST_ROWS:
                return pieces
            self._pieces[reach, heads, width] = tuple(pieces)
        return self._pieces[reach, heads, width]

    def bias(self, reach: AttentionReach, like: torch.Tensor, times: int = 1) -> torch.Tensor:
        """The mask as 0 and -inf, which CPUs add faster than they apply a bool mask; made once per step.

        Args:
            like: a tensor of the dtype and on the device that is asked for.
            times: how often to repeat the rows.

        Returns:
            [times · rows, used]
        """
        if (reach, times) not in self._masks:
            mask = self.mask(reach, like)
            bias = torch.zeros_like(mask, dtype=like.dtype).masked_fill_(~mask, -torch.inf)
            self._masks[reach, times] = bias.repeat(times, 1)
        return self._masks[reach, times]


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """One forward.

    Attributes:
        parts: the rows of each session, one after the other; empty in a probing forward.
        ids: token ids [R], where rows enter layers that need them (`swarm.files.families.needs_ids`).
        seen: what each layer keeps, written down by a probing forward.
    """

    parts: Sequence[SessionRange] = ()
    ids: torch.Tensor | None = None
    seen: list[LayerKv] = field(default_factory=list)
    modules: list[torch.nn.Module] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class StaticStep:
    """One forward whose rows are described at fixed addresses, for kernels (`swarm.compute.kernels.batch_plan`).

    An attention module finds its layer's addresses of KV in its own buffer `ADDRESSES`, so nothing here knows layers.

    Attributes:
        plan: int32 [n], what the kernels read of the batch.
        part_out: float32, room for partial results.
        part_ml: float32, room for their weights.
        tile: rows of a session that one work item takes.
        states: what mixers read of the batch; None where there are none.
    """

    plan: torch.Tensor
    part_out: torch.Tensor
    part_ml: torch.Tensor
    tile: int
    states: StateStep | None = None


def use_canopy(config: PreTrainedConfig) -> None:
    """Make models of this config attend with `attend`, or, where their class must attend itself, plainly."""
    from transformers import AttentionInterface  # brings every model's base, 2 s: a client without a draft needs none

    AttentionInterface.register(NAME, attend)
    # cuDNN's attention, which torch prefers on Hopper and Blackwell, is planned anew for every shape
    # (pytorch/pytorch#191576), and KV grows with every sweep. Nothing else changes for this process.
    torch.backends.cuda.enable_cudnn_sdp(False)
    config._attn_implementation = NAME if attention_by(config) is AttentionBy.INTERFACE else OF_CLASS


@dataclass(frozen=True, slots=True)
class _Rules:
    """How one layer weighs what it sees.

    Attributes:
        reach: how far back a row sees.
        softcap: bound on scores, None for none.
        sinks: [heads] a score per head that takes probability and adds no value, None for none.
    """

    scale: float
    reach: AttentionReach
    softcap: float | None
    sinks: torch.Tensor | None


def chunk_of(module: torch.nn.Module) -> int | None:
    """Positions of a chunk in an attention module's layer; None where it has none. Classes tell by a mask alone."""
    config: Any = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None)
    if not kinds or kinds[module.layer_idx] != CHUNKED:
        return None
    chunk: int = config.attention_chunk_size
    return chunk


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,  # noqa: ANN401 - what each family passes on
) -> tuple[torch.Tensor, None]:
    """Store the new rows and attend; the signature is Hugging Face's.

    Args:
        query: [1, heads, R, key_width]
        key: [1, kv_heads, R, key_width]
        value: [1, kv_heads, R, value_width]
        attention_mask: must be None.
        options: what the family passes on, the running `AttentionStep` or `StaticStep` among it.

    Returns:
        [1, R, heads, value_width] and no weights.

    Raises:
        UnsupportedModel: the model class does not pass the step on, or brings a mask of its own.
    """
    step = options.get(NAME)
    if isinstance(step, StaticStep) and attention_mask is None:
        return _attend_by_kernels(module, step, (query, key, value), options), None
    if not isinstance(step, AttentionStep) or attention_mask is not None:
        raise UnsupportedModel(f"{type(module).__name__}: this attention does not go through AttentionInterface alone")
    if options.get("position_bias") is not None:
        raise UnsupportedModel(f"{type(module).__name__}: it adds to scores what its class knows of a text in order")
    layer: int = module.layer_idx  # type: ignore[assignment]
    heads, width = query.shape[1], value.shape[-1]
    if not step.parts:
        step.seen.append(LayerKv(layer, key.shape[1], key.shape[-1], width))
        step.modules.append(module)
        return query.new_zeros(1, query.shape[2], heads, width), None
    scale = options.get("scaling")
    rules = _Rules(
        scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
        reach=AttentionReach(options.get("sliding_window"), chunk_of(module)),
        softcap=options.get("softcap"),
        sinks=options.get("s_aux"),
    )
    outputs = []
    for part in step.parts:  # sessions one after the other; together they have all R rows
        rows = slice(part.start, part.end)
        part.kv_cache.store(layer, part.used - part.rows, key[0, :, rows], value[0, :, rows])
        keys, values = part.kv_cache.view(layer, part.used)
        is_plain = rules.softcap is None and rules.sinks is None
        weigh = _explicit if not is_plain else _in_order if part.kv_cache.layout.by_positions else _fused
        outputs.append(weigh(part, query[0, :, rows], keys, values, rules).transpose(0, 1))
    output = outputs[0].contiguous() if len(outputs) == 1 else torch.cat(outputs)
    return output[None], None


def _attend_by_kernels(
    module: torch.nn.Module,
    step: StaticStep,
    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    options: dict[str, Any],
) -> torch.Tensor:
    """The same through one custom op, which stores the rows too; it looks at no value, so a compiler can pass it."""
    query, key, value = rows
    scale = options.get("scaling")
    output: torch.Tensor = torch.ops.canopy.tree_attention(
        query,
        key,
        value,
        getattr(module, ADDRESSES),
        step.plan,
        step.part_out,
        step.part_ml,
        options.get("s_aux"),
        step.tile,
        query.shape[-1] ** -0.5 if scale is None else float(scale),
        options.get("sliding_window") or 0,
        options.get("softcap") or 0.0,
    )
    return output


def _fused(
    part: SessionRange, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rules: _Rules
) -> torch.Tensor:
    """Torch's own attention, K and V shared by the query heads of a group.

    Args:
        query: [heads, r, key_width]
        keys: [kv_heads, used, key_width]
        values: [kv_heads, used, value_width]
        rules: without soft cap and sinks.

    Returns:
        [heads, r, value_width]
    """
    heads, rows, width = query.shape
    groups = heads // keys.shape[0]
    if rows <= MAX_FOLDED_ROWS:
        bias = part.bias(rules.reach, query, groups)
        folded = query.reshape(1, -1, groups * rows, width)  # [1, kv_heads, groups · r, key_width]
        out = scaled_dot_product_attention(folded, keys[None], values[None], attn_mask=bias, scale=rules.scale)
        return out.reshape(heads, rows, -1)
    is_causal = part.is_causal(rules.reach)
    out = scaled_dot_product_attention(
        query.reshape(-1, groups, rows, width),
        keys[:, None].expand(-1, groups, -1, -1),
        values[:, None].expand(-1, groups, -1, -1),
        attn_mask=None if is_causal else part.bias(rules.reach, query),
        is_causal=is_causal,
        scale=rules.scale,
    )
    return out.reshape(heads, rows, -1)


def _in_order(
    part: SessionRange, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rules: _Rules
) -> torch.Tensor:
    """The same where sums go along positions."""
    pieces = part.pieces(rules.reach, (len(keys), len(query) // len(keys)), keys.shape[2])
    return attend_by_positions(pieces, query, keys, values, rules.scale)


def _explicit(
    part: SessionRange, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rules: _Rules
) -> torch.Tensor:
    """The same with the softmax written out, for soft caps and sinks; a few rows at a time, to bound memory."""
    heads, rows, width = query.shape
    groups = heads // keys.shape[0]
    mask = part.mask(rules.reach, query)
    grouped = query.reshape(-1, groups, rows, width)
    exact = torch.promote_types(query.dtype, torch.float32)
    at_once = max(1, MAX_SCORES_BYTES // (4 * heads * part.used))
    pieces = []
    for start in range(0, rows, at_once):
        piece = slice(start, min(start + at_once, rows))
        scores = (grouped[:, :, piece] @ keys[:, None].transpose(-1, -2)).to(exact) * rules.scale
        if rules.softcap is not None:
            scores = torch.tanh(scores / rules.softcap) * rules.softcap
        scores = scores.masked_fill(~mask[piece], -torch.inf)
        if rules.sinks is not None:
            sinks = rules.sinks.to(exact).reshape(-1, groups, 1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, sinks], dim=-1)
        probs = scores.softmax(dim=-1)[..., : part.used]
        pieces.append(probs.to(values.dtype) @ values[:, None])
    return torch.cat(pieces, dim=2).reshape(heads, rows, -1)
