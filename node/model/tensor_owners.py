"""Which module of a model class each tensor of its checkpoint belongs to. Reads names alone.

A checkpoint may leave out the first parts of a name (`layers.0.…` for `model.layers.0.…`), add others before it, or
hold what the class does not have: layers that predict further tokens, parts that see or hear.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache


def find_owners(tensors: Iterable[str], layers: str, ends: Sequence[str], base: str) -> dict[str, str | None]:
    """The module that owns each tensor.

    A name that the class itself has decides. Only for layers, or a module, that no tensor names so do names with other
    parts before them count: `mtp.norm.weight` is no `model.norm` beside `model.norm.weight`.

    Args:
        tensors: names in a checkpoint, all of them.
        layers: name of the list of decoder layers.
        ends: names of what runs before and after the layers.
        base: the class's own prefix of all but the head.

    Returns:
        The name of a layer or of one of `ends`, or None for a tensor that the class has no place for by its name.
    """
    owners = {tensor: own_module(tensor, layers, tuple(ends)) for tensor in tensors}
    found = set(owners.values())
    has_layers = any(owner is not None and owner not in ends for owner in found)
    absent = [end for end in ends if end not in found]
    list_name = re.compile(rf"(?:^|\.){layers.rpartition('.')[2]}\.(\d+)\.")
    for tensor in [tensor for tensor, owner in owners.items() if owner is None]:
        if layer := list_name.search(tensor):
            owners[tensor] = None if has_layers else f"{layers}.{int(layer[1])}"
        else:
            module = f".{tensor}".rpartition(".")[0]
            owners[tensor] = next((end for end in absent if module.endswith(f".{end.removeprefix(f'{base}.')}")), None)
    return owners


def own_module(tensor: str, layers: str, ends: tuple[str, ...]) -> str | None:
    """The module that owns a tensor by a name that the class has, without its first parts at most."""
    found = _names(layers, ends).match(tensor)
    if found is None:
        return None
    if found["layer"] is not None:
        return f"{layers}.{int(found['layer'])}"
    return next(end for end in ends if f".{end}".endswith(f".{found['end']}"))


def is_numbered(tensor: str) -> bool:
    """Whether a tensor is one of a list's: no embedding, norm or head is."""
    return re.search(r"\.\d+\.", tensor) is not None


@lru_cache(16)
def _names(layers: str, ends: tuple[str, ...]) -> re.Pattern[str]:
    own = sorted({shorter for end in ends for shorter in _shorter(end)}, key=len, reverse=True)
    lists = "|".join(map(re.escape, _shorter(layers)))
    return re.compile(rf"(?:(?:{lists})\.(?P<layer>\d+)|(?P<end>{'|'.join(map(re.escape, own))}))\.")


def _shorter(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[start:]) for start in range(len(parts))]
