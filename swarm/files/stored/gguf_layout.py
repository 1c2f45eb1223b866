"""How a class lays out its weights where llama.cpp lays them out otherwise, found by asking the class itself."""

from __future__ import annotations

import copy
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers.pytorch_utils import Conv1D

from swarm.files.gguf.architectures import HALVES, NEIGHBOURS

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class ClassLayout:
    """The tensors of a class, and how each lies.

    Attributes:
        shapes: of each tensor of the class.
        tied: names of heads that are the embedding.
        turned: weights with columns for rows.
        mixed: gate and up of experts row by row.
        plus_one: norms that add one to their weight, which llama.cpp stores added.
        is_reordered: whether a file has the halves of a head of queries and keys mixed.
        is_other_rope: whether the class turns other numbers of a head, and no order of rows makes up for it.
    """

    shapes: Mapping[str, tuple[int, ...]]
    tied: frozenset[str]
    turned: frozenset[str]
    mixed: frozenset[str]
    plus_one: frozenset[str]
    is_reordered: bool
    is_other_rope: bool

    @classmethod
    def of(cls, model: Any, family: str) -> ClassLayout:  # noqa: ANN401 - any of transformers' classes
        """The layout of a model without values, of a file of this architecture."""
        turned, mixed, plus_one = set(), set(), set()
        answers: dict[tuple[type, int], bool] = {}
        for name, module in model.named_modules():
            if isinstance(module, Conv1D):
                turned.add(f"{name}.weight")
            if isinstance(getattr(module, "w2", None), torch.nn.Parameter):
                turned.add(f"{name}.w2")  # DBRX's, whose experts lie in one matrix
            if hasattr(module, "gate_up_proj") and hasattr(module, "down_proj") and module.down_proj is not None:
                own = {f"{name}.gate_up_proj", f"{name}.down_proj"}
                turned |= own if _is_turned(module) else set()
                mixed |= set() if getattr(module, "is_concatenated", True) else own | {f"{name}.gate_up_proj_bias"}
            key = (type(module), sum(one.numel() for one in module.parameters(recurse=False)))
            if key not in answers and not list(module.children()):
                answers[key] = _adds_one(module)
            if answers.get(key):
                plus_one.add(f"{name}.weight")
        halves, has_rope = _turns_halves(model), getattr(model.config, "rope_parameters", None) is not None
        return cls(
            {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()},
            frozenset(model._tied_weights_keys or ()) if model.config.tie_word_embeddings else frozenset(),
            frozenset(turned),
            frozenset(mixed),
            frozenset(plus_one),
            family in NEIGHBOURS and halves,
            has_rope and family in HALVES and not halves,
        )


def _is_turned(experts: Any) -> bool:  # noqa: ANN401
    gate_up, down = experts.gate_up_proj, experts.down_proj
    if not isinstance(gate_up, torch.nn.Parameter) or gate_up.ndim < 3:
        return False
    return bool(gate_up.shape[2] == 2 * down.shape[1])


def _turns_halves(model: Any) -> bool:  # noqa: ANN401
    """Whether a class turns a number of a head's first half with one of its second, instead of neighbours."""
    own = vars(sys.modules[type(model).__module__])
    if getattr(model.config, "rope_interleave", False):
        return False
    with torch.device("cpu"):
        head, none, whole = torch.arange(4.0)[None], torch.zeros(1, 2), torch.ones(1, 2)
        if "rotate_half" in own:
            turned = own["rotate_half"](head)
        elif "_apply_rotary_emb" in own:
            turned = own["_apply_rotary_emb"](head, none, whole)
        else:
            return False
        return bool(torch.equal(turned, torch.tensor([[-2.0, -3.0, 0.0, 1.0]])))


def _adds_one(norm: torch.nn.Module) -> bool:
    """Whether a norm multiplies by its weight plus one: with weights of zero it then gives something else than zero."""
    weight = getattr(norm, "weight", None)
    if not isinstance(weight, torch.nn.Parameter) or weight.ndim != 1:
        return False
    tried = copy.deepcopy(norm).to_empty(device="cpu")
    for one in tried.parameters():
        torch.nn.init.zeros_(one)
    try:
        with torch.no_grad():
            return bool(tried(torch.arange(1.0, len(weight) + 1)[None]).any())
    except (TypeError, RuntimeError):  # it takes more than rows: no plain norm
        return False
