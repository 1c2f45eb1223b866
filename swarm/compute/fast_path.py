"""Chooses a model's path: graphs where device, compiler and model allow them, else the next slower one, and says why.

graphs + kernels   our own kernels, held as CUDA graphs; layers compiled where their class allows it
kernels            the same kernels, started one by one: on a CPU, for tests
plain              what the model's class does
"""

from __future__ import annotations

import gc
import logging
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from swarm.base.files import cache_folder
from swarm.base.layers import Span
from swarm.compute.kernels.support import KERNEL_VERSION, kernel_support
from swarm.compute.recurrent.static_mixer import lacks_steps
from swarm.compute.static_forward import INDUCTOR, StaticLimits, keep_programs
from swarm.compute.tree_attention import AttentionStep, chunk_of
from swarm.files.families import GROWING_ROPE
from swarm.files.pretrained import first_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from swarm.compute.ragged_batch import RaggedModel
    from swarm.compute.static_proof import PlainTrial


PLAIN = "default"


logger = logging.getLogger(__name__)
BUCKETS = (16, 32, 64, 128, 256, 512)
"""Numbers of rows that are run. Fewer than 16 cost what 16 cost; and a compiler would make another program of 1."""
SESSIONS = 64
"""Sessions that have a line of the address table; more take turns, at a small copy each."""
MAX_TOKENS = 131_072
"""Tokens of a session that a full bucket has room for at most; longer ones run in smaller pieces."""
GRAPHS, KERNELS = "graphs + kernels", "kernels"
COMPILER = INDUCTOR
LINEAR = {"Linear", "Conv1D"}
"""Classes of layers that are exchanged."""
OwnLayer = tuple[nn.Module, str, nn.Module]
"""Where a linear layer of the model's class was, its name there, and itself."""


def use_plain_rotary(model: nn.Module) -> int:
    """Stop growing rotary embeddings from looking at positions; their values within the window stay.

    Returns:
        how many modules were changed.
    """
    changed = 0
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, dict) and GROWING_ROPE & {*kind.values()}:  # one for each type of layer
            module.rope_type = {layers: PLAIN if one in GROWING_ROPE else one for layers, one in kind.items()}  # type: ignore[assignment]
        elif isinstance(kind, str) and kind in GROWING_ROPE:
            module.rope_type = PLAIN  # type: ignore[assignment]
        else:
            continue
        changed += 1
    return changed


class FastPathRefused(Exception):
    """A model cannot run by the fast path."""


def use_static(
    model: RaggedModel,
    max_tokens: int | None = None,
    sessions: int = SESSIONS,
    buckets: tuple[int, ...] = BUCKETS,
    *,
    forced: bool = False,
) -> None:
    """Let a model run by the fastest path that its device and class allow; its `path` and `path_reason` say which.

    Takes seconds; nothing else may use the model meanwhile. Whatever goes wrong, the plain path is left.

    Args:
        max_tokens: of a session, live nodes included; None is the model's own limit.
        sessions: that run together at most.
        buckets: numbers of rows, rising.
        forced: take the kernels on a CPU too, where Triton interprets them: for tests.
    """
    if reason := _refusal(model, forced=forced):
        model.use_plain(reason)
        return
    room = min(max_tokens or model.max_positions or MAX_TOKENS, MAX_TOKENS)
    limits = StaticLimits(room, sessions, buckets)
    support = kernel_support(model.device, interpreted=forced)
    from swarm.compute.static_proof import plain_trial

    own = _linear_layers(model)
    try:
        trial = plain_trial(model)
        for part in (model.model, *model.layers):
            use_plain_rotary(part)
        use_row_invariant_products(model)
        model.use_plain("")
    except Exception as failure:  # noqa: BLE001 - whatever it is, the plain path stays
        _give_up(model, first_line(failure), own)
        return
    reasons: list[str] = []
    for backend in (COMPILER, None) if support.compiled else (None,):
        try:
            reasons += _try(model, limits, backend, trial)
        except FastPathRefused as refused:
            reasons.append(f"its layers are not compiled: {refused}" if backend else str(refused))
        else:
            break
    if model.static is None:
        _give_up(model, reasons[-1], own)
        return
    if reasons:
        logger.warning("%s: %s", model.config.model_type, "; ".join(reasons))
    model.path = KERNELS if forced else GRAPHS
    model.path_reason = "; ".join(reasons if support.compiled else [support.reason, *reasons])


def use_row_invariant_products(model: RaggedModel) -> None:
    """Exchange linear layers of 16 or 32 bits, and experts, for ones that add up in fixed ranges.

    A library chooses its kernel, and so the order of a sum, by the number of rows. Layers that were packed when they
    were loaded stay as they are.
    """
    from swarm.compute.packed_layers import pack_head, pack_layer

    bits = 8 * model.dtype.itemsize
    for index, layer in zip(range(model.span.start, model.span.end), model.layers, strict=True):
        pack_layer(layer, partial(_run_alone, model, Span(index, index + 1)), bits, with_kernels=True)
    for root, name, head in _head(model):
        packed = pack_head(head, bits, with_kernels=True)
        if packed is not None:
            root.set_submodule(name, packed)


def _linear_layers(model: RaggedModel) -> list[OwnLayer]:
    """Those of the model's class, to put back where a path fails."""
    parts = ((layer, name, part) for layer in model.layers for name, part in layer.named_modules())
    return [*(place for place in parts if type(place[2]).__name__ in LINEAR), *_head(model)]


def _head(model: RaggedModel) -> list[OwnLayer]:
    """The output matrix, if the span has one."""
    root = cast("nn.Module", model.model)
    has_head = model.span.end == model.num_layers
    head: nn.Module | None = cast("Any", root).get_output_embeddings() if has_head else None
    names = [name for name, part in root.named_modules() if part is head]
    return [(root, name, head) for name in names if head is not None]


@torch.inference_mode()
def _run_alone(model: RaggedModel, sub: Span) -> None:
    """Run one row of zeros through some layers; no KV is stored."""
    zero = torch.zeros(1, dtype=torch.long, device=model.device)
    row = torch.zeros(1, model.hidden_size, dtype=model.dtype, device=model.device)
    model.run_layers(AttentionStep(), sub, row if sub.start else zero, zero)


def _refusal(model: RaggedModel, *, forced: bool) -> str:
    """Why a model must run by the plain path; empty if it need not."""
    if model.stored_as and not model.reads_codes:
        return f"kernels do not read all weights in {model.stored_as}; --weights bf16, int8 or int4 run them"
    if model.has_host_experts:
        return "experts are computed by the CPU, which no graph can wait for"
    support = kernel_support(model.device, interpreted=forced)
    if not support.kernels:
        return support.reason
    kept = {layer.index for layer in model.layout.layers}
    if len(model.layout.rows) > len(model.mixers) or (len(kept) < len(model.span) and not model.mixers):
        return "kernels know attention and mixers, and this model's layers do more"
    if lacks := next(filter(None, (lacks_steps(mixer.module) for mixer in model.mixers)), ""):
        return lacks
    if model.attends_itself:
        return "this model's class computes attention itself"
    if model.asks_length or model.needs_ids or any(chunk_of(module) for module in model.attention):
        return "this model's attention asks for more than kernels know"
    return ""


def _try(model: RaggedModel, limits: StaticLimits, backend: str | None, trial: PlainTrial) -> list[str]:
    """Record and prove; the model runs by it then.

    Returns:
        why a text may depend on more than model, prompt and seed, if it may.

    Raises:
        FastPathRefused: it cannot be recorded, or fails its proof.
    """
    from swarm.compute.kernels.packed_product import prepare
    from swarm.compute.static_forward import StaticForward
    from swarm.compute.static_proof import late_failure, prove

    if backend is not None:
        keep_programs(cache_folder() / "programs")
    try:
        prepare(model.device)
        static = StaticForward(model, limits, backend=backend)
        static.record()
        verdict = prove(static, model, trial)
    except Exception as failure:  # an untested class or a compiler may raise anything, and all of it means no
        raise FastPathRefused(first_line(failure)) from failure
    if verdict.failure:
        static.close()
        raise FastPathRefused(verdict.failure)
    static.prove_late = lambda key: late_failure(static, model, key.sub, key.bucket) if key.sub else ""
    model.static, model.kernel_version = static, 0
    if verdict.variance:
        return [f"texts may depend on the tree's size: {verdict.variance}"]
    if backend is None and model.device.type == "cuda":
        # Compiled layers round less often than the class's own; both in one numeric class would be two sorts of bits.
        return ["texts may change when another machine takes over"]
    model.kernel_version = KERNEL_VERSION
    return []


def _give_up(model: RaggedModel, reason: str, own: Sequence[OwnLayer]) -> None:
    """Leave the plain path, with the model's own layers: our products may be what fails here."""
    logger.warning("%s runs by the plain path: %s", model.config.model_type, reason)
    for part, name, module in own:
        part.set_submodule(name, module)
    model.use_plain(reason)
    if model.device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
