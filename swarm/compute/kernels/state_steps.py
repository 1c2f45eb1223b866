"""Recurrent layers over trees of several sessions in one launch: convolutions, the gated delta rule and Mamba 2.

A row goes on from the state after its parent: of the row before it, in registers; of another row of the batch, in a
scratch; or of an entry that its session kept. Programs of a recurrence take a session's rows one after the other,
parents first, so a row's bits depend on its own path alone. The launch depends on the number of rows alone: what
differs lies in a `StateStep` (`swarm.compute.state_step`), at fixed addresses. The oracle is the model's
class, level by level (`swarm.compute.recurrent`).
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from swarm.compute.kernels.arithmetic import rounded
from swarm.compute.kernels.support import is_interpreted, on_device

_CHANNELS: Final = 256
_STATE_BLOCK: Final = 4_096
"""Numbers of a state that one program holds. Bits depend on it: it belongs to KERNEL_VERSION."""


@triton.jit
def _store(  # noqa: PLR0913 - a kernel's
    rows: tl.tensor, addresses: tl.tensor, line: tl.tensor, slot: tl.tensor, width: tl.tensor, block: tl.constexpr
) -> None:
    """rows [B, width] to where each one's session keeps them, [capacity, width]."""
    r, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * block + tl.arange(0, block)
    owner = tl.load(line + r)
    if owner >= 0:
        kept = tl.load(addresses + owner).to(tl.pointer_type(rows.dtype.element_ty))
        values = tl.load(rows + r * width + c, mask=c < width)
        tl.store(kept + tl.load(slot + r).to(tl.int64) * width + c, values, mask=c < width)


@triton.jit
def _source(  # noqa: PLR0913 - a kernel's
    x: tl.tensor,
    state: tl.tensor,
    source: tl.tensor,
    entry: tl.tensor,
    c: tl.tensor,
    channels: tl.tensor,
    x_row: tl.tensor,
    x_channel: tl.tensor,
    kept: tl.constexpr,
) -> tl.tensor:
    """An input before a row, float32 [block]."""
    here = c < channels
    of_batch = tl.load(x + source.to(tl.int64) * x_row + c * x_channel, mask=here & (source >= 0), other=0.0)
    at = (entry.to(tl.int64) * channels + c) * kept + kept + 1 + source
    of_base = tl.load(state + at, mask=here & (source < -1), other=0.0)
    return tl.where(source >= 0, of_batch, of_base).to(tl.float32)


@triton.jit
def _convolve(  # noqa: PLR0913 - a kernel's
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    addresses: tl.tensor,
    line: tl.tensor,
    base: tl.tensor,
    keep: tl.tensor,
    sources: tl.tensor,
    channels: tl.tensor,
    x_row: tl.tensor,
    x_channel: tl.tensor,
    taps: tl.tensor,
    width: tl.constexpr,
    kept: tl.constexpr,
    has_bias: tl.constexpr,
    block: tl.constexpr,
    interpreted: tl.constexpr,
) -> None:
    """A program per row and `block` channels."""
    r, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * block + tl.arange(0, block)
    here, owner = c < channels, tl.load(line + r)
    acc = tl.zeros([block], tl.float32)
    if owner >= 0:
        state = tl.load(addresses + owner).to(tl.pointer_type(out.dtype.element_ty))
        entry, keeping = tl.load(base + r), tl.load(keep + r)
        own = tl.load(x + r * x_row + c * x_channel, mask=here, other=0.0).to(tl.float32)
        if has_bias:
            acc = tl.load(bias + c, mask=here, other=0.0).to(tl.float32)
        for back in tl.static_range(width - 1, 0, -1):
            source = tl.load(sources + r * taps + back - 1)
            value = _source(x, state, source, entry, c, channels, x_row, x_channel, kept)
            w = tl.load(weight + c * width + width - 1 - back, mask=here, other=0.0).to(tl.float32)
            acc = tl.fma(value, w, acc)
        acc = tl.fma(own, tl.load(weight + c * width + width - 1, mask=here, other=0.0).to(tl.float32), acc)
        if keeping >= 0:
            into = state + (keeping.to(tl.int64) * channels + c) * kept + kept - 1
            tl.store(into, own.to(out.dtype.element_ty), mask=here)
            for back in tl.static_range(1, kept):
                source = tl.load(sources + r * taps + back - 1)
                value = _source(x, state, source, entry, c, channels, x_row, x_channel, kept)
                tl.store(into - back, value.to(out.dtype.element_ty), mask=here)
    tl.store(out + r * channels + c, rounded(acc, out.dtype.element_ty, interpreted), mask=here)


@triton.jit
def _before(  # noqa: PLR0913 - a kernel's
    held: tl.tensor,
    r: tl.tensor,
    parent: tl.tensor,
    base: tl.tensor,
    spill: tl.tensor,
    scratch: tl.tensor,
    state: tl.tensor,
    at: tl.tensor,
    inside: tl.tensor,
    numbers: tl.tensor,
) -> tl.tensor:
    """The state that a row goes on from; `held` is that after the row before it."""
    above = tl.load(parent + r)
    if above != r - 1:
        held = tl.zeros_like(held)
        if above >= 0:
            place = tl.load(spill + above).to(tl.int64)
            held = tl.load(scratch + place * numbers + at, mask=inside, other=0.0)
        else:
            entry = tl.load(base + r).to(tl.int64)
            if entry >= 0:
                held = tl.load(state + entry * numbers + at, mask=inside, other=0.0).to(tl.float32)
    return held


@triton.jit
def _after(  # noqa: PLR0913 - a kernel's
    held: tl.tensor,
    r: tl.tensor,
    keep: tl.tensor,
    spill: tl.tensor,
    scratch: tl.tensor,
    state: tl.tensor,
    at: tl.tensor,
    inside: tl.tensor,
    numbers: tl.tensor,
) -> None:
    """Write a row's state where it is asked for."""
    place, entry = tl.load(spill + r).to(tl.int64), tl.load(keep + r).to(tl.int64)
    if place >= 0:
        tl.store(scratch + place * numbers + at, held, mask=inside)
        tl.debug_barrier()  # other threads may read it
    if entry >= 0:
        tl.store(state + entry * numbers + at, held.to(state.dtype.element_ty), mask=inside)


@triton.jit
def _unit(values: tl.tensor) -> tl.tensor:
    """A vector of length 1, as the classes make it."""
    return values * tl.rsqrt(tl.sum(values * values, 0) + 1e-6)


@triton.jit(do_not_specialize_on_alignment=["q", "k", "v"])
def _delta(  # noqa: PLR0913 - a kernel's
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    decay: tl.tensor,
    beta: tl.tensor,
    out: tl.tensor,
    addresses: tl.tensor,
    line: tl.tensor,
    parent: tl.tensor,
    base: tl.tensor,
    keep: tl.tensor,
    spill: tl.tensor,
    segments: tl.tensor,
    scratch: tl.tensor,
    scale: tl.tensor,
    q_row: tl.tensor,
    k_row: tl.tensor,
    v_row: tl.tensor,
    heads: tl.constexpr,
    key_heads: tl.constexpr,
    key: tl.constexpr,
    value: tl.constexpr,
    padded: tl.constexpr,
    block: tl.constexpr,
    interpreted: tl.constexpr,
) -> None:
    """A program per session, head and `block` values: S ← S·e^g; S ← S + k ⊗ β(v − Sᵀk); out = Sᵀq."""
    session, head = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(segments + 2 * session), tl.load(segments + 2 * session + 1)
    i, j = tl.arange(0, padded), tl.program_id(2) * block + tl.arange(0, block)
    own, theirs = i < key, j < value
    inside = own[:, None] & theirs[None, :]
    at = head * key * value + i[:, None] * value + j[None, :]
    held = tl.zeros([padded, block], tl.float32)
    if begin < end:
        numbers = heads * key * value
        state = tl.load(addresses + tl.load(line + begin)).to(tl.pointer_type(tl.float32))
        shared = head // (heads // key_heads)
        for r in range(begin, end):
            held = _before(held, r, parent, base, spill, scratch, state, at, inside, numbers)
            row = tl.full([], 0, tl.int64) + r
            query = _unit(tl.load(q + row * q_row + shared * key + i, mask=own, other=0.0).to(tl.float32)) * scale
            keys = _unit(tl.load(k + row * k_row + shared * key + i, mask=own, other=0.0).to(tl.float32))
            values = tl.load(v + row * v_row + head * value + j, mask=theirs, other=0.0).to(tl.float32)
            held = held * tl.exp(tl.load(decay + row * heads + head).to(tl.float32))
            missing = values - tl.sum(held * keys[:, None], 0)
            held += keys[:, None] * (missing * tl.load(beta + row * heads + head).to(tl.float32))[None, :]
            made = tl.sum(held * query[:, None], 0)
            result = rounded(made, out.dtype.element_ty, interpreted)
            tl.store(out + (row * heads + head) * value + j, result, mask=theirs)
            _after(held, r, keep, spill, scratch, state, at, inside, numbers)


@triton.jit(do_not_specialize_on_alignment=["x", "b", "c"])
def _scan(  # noqa: PLR0913 - a kernel's
    x: tl.tensor,
    dt: tl.tensor,
    a: tl.tensor,
    b: tl.tensor,
    c: tl.tensor,
    d: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    like: tl.tensor,
    addresses: tl.tensor,
    line: tl.tensor,
    parent: tl.tensor,
    base: tl.tensor,
    keep: tl.tensor,
    spill: tl.tensor,
    segments: tl.tensor,
    scratch: tl.tensor,
    x_row: tl.tensor,
    dt_row: tl.tensor,
    b_row: tl.tensor,
    c_row: tl.tensor,
    heads: tl.constexpr,
    groups: tl.constexpr,
    width: tl.constexpr,
    size: tl.constexpr,
    padded: tl.constexpr,
    block: tl.constexpr,
    interpreted: tl.constexpr,
) -> None:
    """A program per session, head and `block` of its width: S ← S·e^(Δ·A) + Δ·B ⊗ x; out = S·C + D·x."""
    session, head = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(segments + 2 * session), tl.load(segments + 2 * session + 1)
    i, j = tl.program_id(2) * block + tl.arange(0, block), tl.arange(0, padded)
    own, theirs = i < width, j < size
    inside = own[:, None] & theirs[None, :]
    at = head * width * size + i[:, None] * size + j[None, :]
    held = tl.zeros([block, padded], tl.float32)
    if begin < end:
        numbers = heads * width * size
        state = tl.load(addresses + tl.load(line + begin)).to(tl.pointer_type(like.dtype.element_ty))
        group = head // (heads // groups)
        rate, skip = tl.load(a + head).to(tl.float32), tl.load(d + head).to(tl.float32)
        shift = tl.load(bias + head).to(tl.float32)
        for r in range(begin, end):
            held = _before(held, r, parent, base, spill, scratch, state, at, inside, numbers)
            row = tl.full([], 0, tl.int64) + r
            step = tl.load(dt + row * dt_row + head).to(tl.float32) + shift
            step = tl.where(step > 20.0, step, tl.log(1.0 + tl.exp(step)))
            entering = tl.load(x + row * x_row + head * width + i, mask=own, other=0.0).to(tl.float32)
            into = tl.load(b + row * b_row + group * size + j, mask=theirs, other=0.0).to(tl.float32)
            outof = tl.load(c + row * c_row + group * size + j, mask=theirs, other=0.0).to(tl.float32)
            held = held * tl.exp(step * rate) + entering[:, None] * (step * into)[None, :]
            # Rounded as an entry is, or a row's bits would depend on whether its state was kept.
            held = rounded(held, like.dtype.element_ty, interpreted).to(tl.float32)
            made = tl.sum(held * outof[None, :], 1) + skip * entering
            result = rounded(made, out.dtype.element_ty, interpreted)
            tl.store(out + (row * heads + head) * width + i, result, mask=own)
            _after(held, r, keep, spill, scratch, state, at, inside, numbers)


@torch.library.custom_op("canopy::store_state_rows", mutates_args=())
def store_state_rows(
    rows: torch.Tensor, addresses: torch.Tensor, line: torch.Tensor, slot: torch.Tensor
) -> torch.Tensor:
    """Keep rows [B, width] beside their sessions' KV. Returns them, so that a compiler keeps the call."""
    rows = rows.contiguous()
    grid = len(rows), triton.cdiv(rows.shape[1], _CHANNELS)
    with on_device(rows.device):
        _store[grid](rows, addresses, line, slot, rows.shape[1], _CHANNELS)
    return rows.clone()


@store_state_rows.register_fake
def _(rows: torch.Tensor, addresses: torch.Tensor, line: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
    return rows.new_empty(rows.shape)


@torch.library.custom_op("canopy::convolve_paths", mutates_args=())
def convolve_paths(  # noqa: PLR0913 - an op's
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    addresses: torch.Tensor,
    kept: int,
    line: torch.Tensor,
    base: torch.Tensor,
    keep: torch.Tensor,
    sources: torch.Tensor,
) -> torch.Tensor:
    """A causal convolution along each row's path, in the depth: [B, channels].

    Args:
        x: [B, channels] of the type of the states.
        weight: [channels, width]
        bias: [channels]
        addresses: int64 [lines] of each session's states [entries, channels, kept].
        kept: inputs that a state has.
        line: and what follows: as in `StateStep`.
    """
    rows, channels = x.shape
    out = x.new_empty(rows, channels)
    weight = weight.contiguous()
    with on_device(x.device):
        _convolve[rows, triton.cdiv(channels, _CHANNELS)](
            *(x, weight, weight if bias is None else bias, out, addresses, line, base, keep, sources),
            *(channels, x.stride(0), x.stride(1), sources.shape[1]),
            width=weight.shape[1],
            kept=kept,
            has_bias=bias is not None,
            block=_CHANNELS,
            interpreted=is_interpreted(),
        )
    return out


@convolve_paths.register_fake
def _(x: torch.Tensor, *_: object) -> torch.Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("canopy::delta_paths", mutates_args=())
def delta_paths(  # noqa: PLR0913 - an op's
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    addresses: torch.Tensor,
    line: torch.Tensor,
    parent: torch.Tensor,
    base: torch.Tensor,
    keep: torch.Tensor,
    spill: torch.Tensor,
    segments: torch.Tensor,
    scratch: torch.Tensor,
) -> torch.Tensor:
    """The gated delta rule along each row's path: [B, heads, value].

    Args:
        q: [B, key_heads, key]
        k: the same
        v: [B, heads, value]
        decay: logarithms, [B, heads]
        beta: [B, heads]
        addresses: int64 [lines] of each session's states, float32 [entries, heads, key, value].
        line: and what follows: as in `StateStep`.
    """
    (rows, heads, value), (key_heads, key) = v.shape, q.shape[1:]
    out = torch.zeros(rows, heads, value, dtype=v.dtype, device=v.device)
    padded = triton.next_power_of_2(key)
    block = max(1, min(triton.next_power_of_2(value), _STATE_BLOCK // padded))
    q, k, v = (each.reshape(rows, -1).contiguous() for each in (q, k, v))
    with on_device(v.device):
        _delta[len(segments), heads, triton.cdiv(value, block)](
            *(q, k, v, decay.contiguous(), beta.contiguous(), out, addresses),
            *(line, parent, base, keep, spill, segments, scratch),
            *(key**-0.5, q.stride(0), k.stride(0), v.stride(0)),
            heads=heads,
            key_heads=key_heads,
            key=key,
            value=value,
            padded=padded,
            block=block,
            interpreted=is_interpreted(),
        )
    return out


@delta_paths.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: object) -> torch.Tensor:
    return v.new_empty(v.shape)


@torch.library.custom_op("canopy::scan_paths", mutates_args=())
def scan_paths(  # noqa: PLR0913 - an op's
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
    bias: torch.Tensor,
    like: torch.Tensor,
    addresses: torch.Tensor,
    line: torch.Tensor,
    parent: torch.Tensor,
    base: torch.Tensor,
    keep: torch.Tensor,
    spill: torch.Tensor,
    segments: torch.Tensor,
    scratch: torch.Tensor,
) -> torch.Tensor:
    """Mamba 2's state space along each row's path: [B, heads, width].

    Args:
        x: [B, heads, width]
        dt: steps before their bias and softplus, [B, heads]
        a: [heads], negative.
        b: [B, groups, size]
        c: the same
        d: [heads], of the input that is added.
        bias: [heads], of the steps.
        like: a tensor of the states' type.
        addresses: int64 [lines] of each session's states [entries, heads, width, size].
        line: and what follows: as in `StateStep`.
    """
    (rows, heads, width), (groups, size) = x.shape, b.shape[1:]
    out = torch.zeros(rows, heads, width, dtype=x.dtype, device=x.device)
    padded = triton.next_power_of_2(size)
    block = max(1, min(triton.next_power_of_2(width), _STATE_BLOCK // padded))
    x, dt, b, c = (each.reshape(rows, -1).contiguous() for each in (x, dt, b, c))
    with on_device(x.device):
        _scan[len(segments), heads, triton.cdiv(width, block)](
            *(x, dt, a.contiguous(), b, c, d.contiguous(), bias.contiguous(), out, like, addresses),
            *(line, parent, base, keep, spill, segments, scratch),
            *(x.stride(0), dt.stride(0), b.stride(0), c.stride(0)),
            heads=heads,
            groups=groups,
            width=width,
            size=size,
            padded=padded,
            block=block,
            interpreted=is_interpreted(),
        )
    return out


@scan_paths.register_fake
def _(x: torch.Tensor, *_: object) -> torch.Tensor:
    return x.new_empty(x.shape)
