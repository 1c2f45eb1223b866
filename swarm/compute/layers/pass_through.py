"""What stands where a layer does not run, and how rows enter and leave a class's hidden states. Runs nothing itself.

[1, R, width]            hidden states as nearly every class has them
[1, R, streams, width]   several streams beside each other: a row has them all, one after the other
[streams, 1, R, width]   the same in another order
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from swarm.base.errors import UnsupportedModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class PassThroughLayer(nn.Module):
    """Stands where a layer is not used: passes hidden states on, or replaces them by rows from elsewhere.

    Attributes:
        rows: [batch, rows, width], what enters here; None where nothing does, of no width where it is not known yet.
        as_tuple: whether the class's layers return a tuple, hidden states first.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        for name, value in (_of_classes(type(layer)) | vars(layer)).items():  # which models read
            if not name.startswith("_") and name != "forward":
                setattr(self, name, value)
        for name, part in layer.named_children():  # and some write what they compute into buffers of its parts
            if part._non_persistent_buffers_set:
                self.add_module(name, _buffers_of(part))
        self.rows: torch.Tensor | None = None
        self.as_tuple = False

    def forward(
        self, hidden_states: torch.Tensor, *_: object, **__: object
    ) -> torch.Tensor | tuple[torch.Tensor, None]:
        """Return what came in, or the rows from elsewhere."""
        enters = self.rows is not None and self.rows.shape[-1]
        hidden = as_hidden(self.rows, hidden_states) if enters else hidden_states  # type: ignore[arg-type]
        return (hidden, None) if self.as_tuple else hidden


def _of_classes(kind: type[nn.Module]) -> dict[str, object]:
    """What a layer's classes set for all of its objects: words and numbers alone."""
    own = [vars(one) for one in reversed(kind.__mro__) if issubclass(one, nn.Module) and one is not nn.Module]
    return {name: value for part in own for name, value in part.items() if isinstance(value, (str, int, float))}


def _buffers_of(part: nn.Module) -> nn.Module:
    """A module that does nothing and has those buffers of a part that no checkpoint holds."""
    alone = nn.Module()
    for name in part._non_persistent_buffers_set:
        alone.register_buffer(name, part.get_buffer(name), persistent=False)
    return alone


def find_layers(model: PreTrainedModel) -> str:
    """Name of the module list that holds the decoder layers: the outermost one of the right length.

    Raises:
        UnsupportedModel: there is none.
    """
    count = model.config.num_hidden_layers
    lists: list[str] = [
        name for name, part in model.named_modules() if isinstance(part, nn.ModuleList) and len(part) == count
    ]
    if not lists:
        raise UnsupportedModel(f"{model.config.model_type}: {_why_no_list(model, count)}; choose another model")
    return min(lists, key=lambda name: name.count("."))


def _why_no_list(model: PreTrainedModel, count: int) -> str:
    """What a class has in place of one list of so many layers."""
    lists = {name: len(part) for name, part in model.named_modules() if isinstance(part, nn.ModuleList)}
    depth = min((name.count(".") for name in lists), default=0)
    layers = sum(length for name, length in lists.items() if name.count(".") == depth)
    if layers and layers < count and count % layers == 0:
        return f"its layers attend several times for a token: {count} sets of keys and values belong to {layers} layers"
    return f"its class has no list of {count} layers"


def as_rows(hidden: torch.Tensor, batch: int, rows: int) -> torch.Tensor:
    """A class's hidden states as rows [batch, rows, width].

    Raises:
        UnsupportedModel: they have no row per token.
    """
    if hidden.shape[:2] == (batch, rows) and hidden.ndim in {3, 4}:
        return hidden.flatten(2)
    if hidden.ndim == 4 and hidden.shape[1:3] == (1, rows):
        return hidden.movedim(2, 0).reshape(1, rows, -1)
    raise UnsupportedModel("its layers do not return hidden states alone")


def as_hidden(rows: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Rows [batch, rows, width] in the form of a class's hidden states."""
    if like.shape[:2] == rows.shape[:2]:
        return rows.reshape(*rows.shape[:2], *like.shape[2:])
    return rows.reshape(rows.shape[1], like.shape[0], 1, like.shape[3]).movedim(0, 2)
