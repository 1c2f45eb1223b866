"""Chooses a model's path: graphs where device, compiler and model allow them, else the next slower one, and says why.

    graphs    kernels of our own, held as CUDA graphs; layers compiled where their class allows it
    kernels   the same kernels, started one by one: on a CPU, for tests
    plain     what the model's class does
"""

from __future__ import annotations

import gc
import logging
from functools import partial
from typing import TYPE_CHECKING

import torch

from swarm.inference.graphs.compiled_layers import keep_programs
from swarm.inference.graphs.fixed_memory import StaticLimits
from swarm.inference.graphs.plain_rotary import use_plain_rotary
from swarm.kernels.support import kernel_support
from swarm.models.pretrained import first_line
from swarm.runtime.cache_folder import cache_folder

if TYPE_CHECKING:
    from collections.abc import Callable

    from swarm.inference.graphs.captures import GraphKey
    from swarm.inference.ragged_batch import RaggedModel
    from swarm.inference.static_forward import StaticForward
    from swarm.inference.static_proof import PlainTrial

logger = logging.getLogger(__name__)

BUCKETS = (16, 32, 64, 128, 256, 512)
"""Numbers of rows that are run. Fewer than 16 cost what 16 cost; and a compiler would make another program of 1."""
SESSIONS = 64
"""Sessions that have a line of the address table; more take turns, at a small copy each."""
MAX_TOKENS = 131_072
"""Tokens of a session that there is room for, where a model knows no limit."""
GRAPHS, KERNELS = "graphs", "kernels"
COMPILER = "inductor"


def use_static(
    model: RaggedModel,
    max_tokens: int | None = None,
    sessions: int = SESSIONS,
    buckets: tuple[int, ...] = BUCKETS,
    *,
    forced: bool = False,
) -> None:
    """Let a model run by the fastest path that its device and class allow; `path` and `why` of the model say which.

    Takes seconds; nothing else may use the model meanwhile. Whatever goes wrong, the plain path is left.

    Args:
        model: fully loaded.
        max_tokens: of a session, live nodes included; None is the model's own limit.
        sessions: that run together at most.
        buckets: numbers of rows, rising.
        forced: take the kernels on a CPU too, where Triton interprets them: for tests.
    """
    if reason := _refusal(model, forced=forced):
        model.use_plain(reason)
        return
    limits = StaticLimits(max_tokens or model.max_positions or MAX_TOKENS, sessions, buckets)
    support = kernel_support(model.device)
    why = support.reason if model.device.type == "cuda" else ""
    from swarm.inference.static_proof import plain_trial

    try:
        trial = plain_trial(model)
        use_plain_rotary(model.model)
        use_row_invariant_products(model)
    except Exception as failure:  # noqa: BLE001 - whatever it is, the plain path stays
        _give_up(model, first_line(failure))
        return
    for backend in (COMPILER, None) if support.compiled else (None,):
        if not (reason := _try(model, limits, backend, trial)):
            break
        if backend is not None:
            why = f"its layers are not compiled: {reason}"
            logger.warning("%s: %s", model.config.model_type, why)
    else:
        _give_up(model, reason)
        return
    model.path = GRAPHS if model.device.type == "cuda" else KERNELS
    model.why = "; ".join(filter(None, (why, model.why)))


def use_row_invariant_products(model: RaggedModel) -> None:
    """Let linear layers sum in ranges that do not depend on how many rows there are."""
    # A library chooses its kernel, and so the order of a sum, by the number of rows. This is where each linear layer
    # of 16 or 32 bits is to be exchanged for one of `swarm.kernels.packed_product`.


def _refusal(model: RaggedModel, *, forced: bool) -> str:
    """Why a model must run by the plain path; empty if it need not."""
    support = kernel_support(model.device)
    if model.device.type != "cuda" and not forced:
        return f"{model.device.type} runs the plain path"
    return "" if support.kernels else support.reason


def _try(model: RaggedModel, limits: StaticLimits, backend: str | None, trial: PlainTrial) -> str:
    """Record and prove; the model runs by it then. Returns why not, empty if it does."""
    from swarm.inference.static_forward import StaticForward
    from swarm.inference.static_proof import late_failure, prove

    if backend is not None:
        keep_programs(cache_folder() / "programs")
    model.use_plain()
    try:
        static = StaticForward(model, limits, backend=backend)
        static.record()
        verdict = prove(static, model, trial)
    except Exception as failure:  # noqa: BLE001 - an untested class or a compiler may raise anything
        logger.debug("no graphs", exc_info=True)
        return first_line(failure)
    if verdict.failure:
        static.close()
        return verdict.failure
    static.is_row_invariant = not verdict.variance
    static.prove_late = lambda key: late_failure(static, model, key.sub, key.bucket) if key.sub else ""
    model.static = static
    if verdict.variance:
        model.why = f"texts may depend on the tree's size: {verdict.variance}"
        logger.warning("%s: %s", model.config.model_type, model.why)
    return ""


def _give_up(model: RaggedModel, reason: str) -> None:
    logger.warning("%s runs by the plain path: %s", model.config.model_type, reason)
    model.use_plain(reason)
    if model.device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
