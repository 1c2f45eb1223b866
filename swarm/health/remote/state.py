"""A health service's state as `swarm top` believes it: checked, bounded, and every text made harmless. Pure.

All of it comes from strangers, through a server that may be another than one thinks: what has another form is refused
as a whole, unknown fields are left out, and no text can move a terminal's cursor or change its colours.
"""

from __future__ import annotations

import unicodedata
from typing import Annotated, Final

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from swarm.errors import RemoteProtocolError

MAX_TEXT: Final = 2_000
MAX_LAYERS: Final = 4_096
_HIDDEN: Final = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Mn", "Me"})
"""Categories that a terminal would act upon, or that pile up in one cell: controls, directions, lone marks."""


def harmless(text: str) -> str:
    """The text as one line of ordinary characters; each one that is not is shown as �."""
    composed = unicodedata.normalize("NFC", text[:MAX_TEXT])
    return "".join("�" if unicodedata.category(one) in _HIDDEN else one for one in composed)


Said = Annotated[str, AfterValidator(harmless)]
Layer = Annotated[int, Field(ge=0, le=MAX_LAYERS)]
Range = tuple[Layer, Layer]
"""Half-open."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class SourceShown(_Part):
    """The way to the broker or the DHT."""

    state: Said
    since: float = 0.0


class Sources(_Part):
    """Where the service's knowledge comes from."""

    broker: SourceShown | None = None
    dht: SourceShown | None = None


class NodeShown(_Part):
    """One machine."""

    peer: Said
    short: Said
    name: Said | None = None
    span: Range
    state: Said
    device: Said | None = None
    numeric_class: Said | None = None
    version: Said | None = None
    started_at: float | None = None
    seen_at: float | None = None
    busy: float | None = None
    kv_free: int | None = None
    kv_total: int | None = None
    probed_ms: float | None = None
    agrees: bool | None = None

    @property
    def called(self) -> str:
        """The name that its owner gave it, or the end of its peer id."""
        return self.name or self.short


class HopShown(_Part):
    """One hop of a probe's sweep."""

    peer: Said
    short: Said
    span: Range
    link_ms: float | None = None
    queue_ms: float | None = None
    compute_ms: float | None = None


class ProbeShown(_Part):
    """The latest canary generation."""

    at: float
    ok: bool
    error: Said | None = None
    ttft_ms: float | None = None
    tokens_per_s: float | None = None
    acceptance_length: float | None = None
    sweep_ms: float | None = None
    hops: tuple[HopShown, ...] = ()
    return_ms: float | None = None


class ModelShown(_Part):
    """One model and its machines."""

    name: Said
    fingerprint: Said
    num_layers: Layer
    verdict: Said
    reason: Said
    since: float
    missing: tuple[Range, ...]
    fixes: tuple[Said, ...]
    margin: int
    replicas: Annotated[tuple[int, ...], Field(max_length=MAX_LAYERS)]
    nodes: tuple[NodeShown, ...]
    probe: ProbeShown | None = None

    @property
    def serving(self) -> int:
        """Machines that serve."""
        return sum(node.state == "serving" for node in self.nodes)

    @property
    def away(self) -> int:
        """How many machines must go before it breaks: the margin says how many may."""
        return 0 if self.verdict == "broken" else self.margin + 1


class AlertShown(_Part):
    """Something that an operator should see."""

    severity: Said
    model: Said | None = None
    text: Said
    since: float


class EventShown(_Part):
    """Something that happened."""

    at: float
    model: Said | None = None
    short: Said | None = None
    kind: Said
    text: Said


class State(_Part):
    """Everything."""

    v: int
    at: float
    started_at: float
    swarm: Said = ""
    sources: Sources = Sources()
    models: tuple[ModelShown, ...]
    alerts: tuple[AlertShown, ...] = ()
    events: tuple[EventShown, ...] = ()


def read_state(text: str | bytes) -> State:
    """Read a state's JSON.

    Raises:
        RemoteProtocolError: it is none, or of another version.
    """
    try:
        state = State.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = harmless(".".join(map(str, first["loc"]))) or "the whole"
        raise RemoteProtocolError("state", f"not a health service's state ({where}: {first['type']})") from error
    if state.v != 1:
        raise RemoteProtocolError("state", f"a state of version {state.v}; this program reads version 1")
    return state
