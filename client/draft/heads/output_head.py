"""A target's own head: from the last layer's row to logits, as tails of a class compute them. Drafts nothing.

Of the checkpoint only what stands behind the layers is read. Owns no session.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import nn

from client.draft.heads.files import read_stored
from client.draft.heads.layer_head import empty_model, target_names
from swarm.base.errors import UnsupportedModel
from swarm.compute.layers.pass_through import PassThroughLayer, find_layers
from swarm.compute.packed_layers import hold_linear, pack_head
from swarm.compute.tree_attention import NAME, AttentionStep, use_canopy
from swarm.compute.weights.format import WeightFormat
from swarm.compute.weights.stored_rows import DecodedMatrix, StoredRows
from swarm.files.pretrained import SAYS_WHAT_FITS, first_line, misfit
from swarm.files.stored.source import StoredTensor, decoded
from swarm.files.text_classes import class_of
from swarm.protocol.numeric_class import NumericClass

ROWS_AT_ONCE: Final = 32
"""Rows of a product: a head of 128,000 tokens makes 16 MB of logits of them."""


class OutputHead:
    """A head that is ready to run.

    Attributes:
        dtype: in which it computes.
        hidden_size: values of a row.
    """

    def __init__(self, model: Any, layers: list[PassThroughLayer], dtype: torch.dtype) -> None:  # noqa: ANN401
        self.dtype = dtype
        self.hidden_size: int = model.config.hidden_size
        self._model, self._last = model, layers[-1]

    @torch.inference_mode()
    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """What the class makes of rows, its final norm first.

        Args:
            rows: [n, hidden_size], as they left the last layer.

        Returns:
            float32 [n, vocab_size]
        """
        return torch.cat([self._logits(piece) for piece in torch.split(rows.to(self.dtype), ROWS_AT_ONCE)])

    def _logits(self, rows: torch.Tensor) -> torch.Tensor:
        count = len(rows)
        self._last.rows = rows[None]
        try:
            found: torch.Tensor = self._model(
                inputs_embeds=torch.zeros(1, count, self.hidden_size, dtype=self.dtype),
                position_ids=torch.zeros(1, count, dtype=torch.long),
                use_cache=False,
                **{NAME: AttentionStep()},
            ).logits
        finally:
            self._last.rows = None
        return found[0].float()


def load_output_head(model: str | Path, revision: str | None, numeric_class: NumericClass) -> OutputHead:
    """Load a target's head, on the CPU, with its matrix held as tails of a class hold it.

    Args:
        model: folder, GGUF file or hub id; of the hub what is lacking is fetched.
        revision: on the hub.
        numeric_class: of the tail whose picks are checked: one of which `swarm.trust.pick_gaps` knows a bound.

    Raises:
        UnsupportedModel: its class does more behind its layers than this can run alone, or its tensors do not fit.
        HubError: the hub refuses, cannot be reached, or what it sent cannot be kept.
    """
    dtype: torch.dtype = getattr(torch, numeric_class.dtype)
    names = target_names(model, revision)
    empty, config = empty_model(names.config), copy.deepcopy(names.config)
    where = find_layers(empty)
    is_tied = names.output == names.embedding
    wanted = {name for name, _ in empty.named_parameters() if not name.startswith(f"{where}.")}
    wanted = wanted - {names.embedding} if not is_tied else (wanted | {names.embedding}) - {"lm_head.weight"}
    read = read_stored(model, wanted, revision)
    tensors = decoded(read, dtype)
    use_canopy(config)
    made: list[PassThroughLayer] = []
    base: Any = class_of(config)

    class HeadAlone(base):  # type: ignore[misc]
        def __init__(self, config: Any, *args: object, **kwargs: object) -> None:  # noqa: ANN401
            super().__init__(config, *args, **kwargs)
            layers = self.get_submodule(where)
            for index, layer in enumerate(layers):
                layers[index] = PassThroughLayer(layer)
            made[:] = layers
            if not is_tied:
                self.set_submodule(names.embedding.removesuffix(".weight"), nn.Identity())

    HeadAlone.__name__, HeadAlone.__module__ = base.__name__, base.__module__  # renames of tensors go by these
    try:
        filled, info = HeadAlone.from_pretrained(None, config=config, state_dict=tensors, dtype=dtype, **SAYS_WHAT_FITS)
    except Exception as error:  # any class may raise anything
        raise UnsupportedModel(f"{config.model_type}: its head does not run alone ({first_line(error)})") from error
    if (what := misfit(info)) is not None:
        raise UnsupportedModel(f"{config.model_type}: its head does not run alone: {what}")
    whole = cast("Any", filled).eval().requires_grad_(requires_grad=False)
    output = read[names.output]
    held = _held(whole.get_output_embeddings(), output if isinstance(output, StoredTensor) else None, numeric_class)
    if held is not None:
        where = next(name for name, part in whole.named_modules() if part is whole.get_output_embeddings())
        whole.set_submodule(where, held)
        whole.set_submodule(names.embedding.removesuffix(".weight"), nn.Identity())
    return OutputHead(whole, made, dtype)


def _held(head: nn.Linear, stored: StoredTensor | None, numeric_class: NumericClass) -> nn.Module | None:
    """The head with its matrix as a CPU of a class holds it; None where that is one of the compute type."""
    if numeric_class.weights:
        bits = WeightFormat(head.weight.dtype, numeric_class.weights).ends_bits
        return pack_head(head, bits, with_kernels=False)
    if stored is None or not numeric_class.kernels:
        return None
    rows = StoredRows([DecodedMatrix(stored.matrix, head.weight.data)])
    return hold_linear(head, rows, codes=True)
