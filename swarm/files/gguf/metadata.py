"""A family's own metadata, with note of what was read of it: what nobody reads might change the text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from swarm.files.gguf.container import GgufHeader, MetadataValue

EPSILONS: Final = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon")
MEANINGLESS: Final[Mapping[str, str]] = {
    "audio.": "parts that hear",
    "expert_shared_count": "said by the shape of their weights too",
    "expert_shared_feed_forward_length": "said by the shape of their weights too",
    "mm.": "parts that see",
    "n_deepstack_layers": "layers that rows of images enter",
    "pooling_type": "how rows become one, of models that embed texts",
    "rope.dimension_sections": "axes of places in images: a text has one",
    "rope.scaling.finetuned": "whether the model was trained with its stretched positions",
    "tensor_data_layout": "how weights lay in files of before this format",
    "vision.": "parts that see",
    "vocab_size": "said by the embedding's rows too",
}
"""Keys, or how they begin, that change no text, and why."""
NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {
    "attention.causal": (True,),
    "attention.layer_norm_epsilon": (1e-5,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.sliding_window": (0,),
    "expert_count": (0,),
    "ssm.dt_b_c_rms": (False,),
    "expert_gating_func": (0, 1),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_shared_count": (0,),
    "expert_used_count": (0,),
    "expert_weights_scale": (0.0, 1.0),
    "leading_dense_block_count": (0,),
    "nextn_predict_layers": (0,),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (1.0,),
}
"""Values by which a key says nothing: what classes do that have no name for it."""


@dataclass(frozen=True, slots=True)
class OwnFields:
    """A family's own metadata, with note of what was read: what nobody reads might change the text.

    Attributes:
        values: by key, without the family.
    """

    family: str
    values: Mapping[str, MetadataValue]
    read: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, header: GgufHeader, family: str) -> OwnFields:
        begins = f"{family}."
        own = {key.removeprefix(begins): one for key, one in header.metadata.items() if key.startswith(begins)}
        return cls(family, {key: _short(value) for key, value in own.items()})

    def get(self, key: str) -> MetadataValue | None:
        """The value of a key; None where there is none."""
        self.read.add(key)
        return self.values.get(key)

    def whole(self, key: str, default: int = 0) -> int:
        value = self.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else default

    def unread(self) -> dict[str, MetadataValue]:
        """What nobody read, of the values that change texts; of the two epsilons converters write one may be read."""
        read = self.read | (set(EPSILONS) if self.read & self.values.keys() & set(EPSILONS) else set())
        return {
            key: self.values[key]
            for key in sorted(self.values.keys() - read)
            if not key.startswith(tuple(MEANINGLESS))
            and not any(self.values[key] == one for one in NEUTRAL.get(key, ()))
        }


def _short(value: MetadataValue) -> MetadataValue:
    """A float32 as its shortest decimal: what the converter read, and the same in float32."""
    return float(str(numpy.float32(value))) if isinstance(value, float) else value


@dataclass(frozen=True, slots=True)
class FileFacts:
    """What a file says.

    Attributes:
        layers: how many there are, without those that predict further tokens.
        vector: reads a small tensor.
    """

    name: str
    given: OwnFields
    layers: int
    header: GgufHeader
    vector: Callable[[str], Sequence[float]]

    @classmethod
    def of(cls, header: GgufHeader, family: str, name: str, vector: Callable[[str], Sequence[float]]) -> FileFacts:
        given = OwnFields.of(header, family)
        layers = given.whole("block_count") - given.whole("nextn_predict_layers")
        return cls(name, given, layers, header, vector)

    def kinds(self, *signs: str) -> list[str]:
        """Of each layer the first of some names that one of its tensors has; the last name where it has none."""
        return [
            next((sign for sign in signs if f"blk.{layer}.{sign}.weight" in self.header.tensors), signs[-1])
            for layer in range(self.layers)
        ]
