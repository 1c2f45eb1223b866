"""A health service's state as `swarm top` reads it: checked, bounded, and every text made harmless. Pure.

All of it comes from strangers, through a server that may be the wrong one: a state of another form is refused as a
whole, unknown fields are left out, and no text can move a terminal's cursor or change its colours. The fields are those
of `/api/v1/state`.
"""

from __future__ import annotations

import unicodedata
from typing import Annotated, Final

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from swarm.base.errors import RemoteProtocolError
from swarm.directory.coverage import is_serve_line

MAX_TEXT: Final = 2_000
MAX_LAYERS: Final = 4_096
MAX_REFUTERS: Final = 64
_HIDDEN: Final = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Mn", "Me"})
"""Unicode categories that a terminal interprets, or that pile up in one cell: controls, directions, lone marks."""


def harmless(text: str) -> str:
    """The text as one line of ordinary characters; each one that is not is shown as �."""
    composed = unicodedata.normalize("NFC", text[:MAX_TEXT])
    return "".join("�" if unicodedata.category(one) in _HIDDEN else one for one in composed)


def copyable(lines: tuple[str, ...]) -> tuple[str, ...]:
    """The lines that serve layers, and no others: `swarm top` offers them to copy."""
    return tuple(line for line in lines if len(line) <= MAX_TEXT and is_serve_line(line))


SafeText = Annotated[str, AfterValidator(harmless)]
LayerIndex = Annotated[int, Field(ge=0, le=MAX_LAYERS)]
Range = tuple[LayerIndex, LayerIndex]
"""A range of layers, half-open."""


class _StateModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class SourceShown(_StateModel):
    """The service's connection to the broker or the DHT."""

    state: SafeText
    since: float = 0.0


class Sources(_StateModel):
    """Where the service gets its data from."""

    broker: SourceShown | None = None
    dht: SourceShown | None = None


class RefutedShown(_StateModel):
    """Who says that a node's work is wrong, and since when."""

    short: SafeText
    at: float
    text: SafeText = ""
    evidence: SafeText = ""


class NodeShown(_StateModel):
    peer: SafeText
    short: SafeText
    name: SafeText | None = None
    span: Range
    state: SafeText
    device: SafeText | None = None
    numeric_class: SafeText | None = None
    reach: SafeText | None = None
    path: SafeText | None = None
    version: SafeText | None = None
    started_at: float | None = None
    seen_at: float | None = None
    busy: float | None = None
    kv_free: int | None = None
    kv_total: int | None = None
    sessions: int | None = None
    preferred_sessions: int | None = None
    contributor_sessions: int | None = None
    probed_ms: float | None = None
    agrees: bool | None = None
    named: bool = False
    refuted: Annotated[tuple[RefutedShown, ...], Field(max_length=MAX_REFUTERS)] = ()

    @property
    def label(self) -> str:
        """The name that its owner gave it, or the end of its peer id."""
        return self.name or self.short


class HopShown(_StateModel):
    """One hop of a probe's sweep."""

    peer: SafeText
    short: SafeText
    span: Range
    link_ms: float | None = None
    queue_ms: float | None = None
    compute_ms: float | None = None


class ProbeShown(_StateModel):
    """The latest canary generation."""

    at: float
    ok: bool
    error: SafeText | None = None
    ttft_ms: float | None = None
    tokens_per_s: float | None = None
    acceptance_length: float | None = None
    sweep_ms: float | None = None
    hops: tuple[HopShown, ...] = ()
    return_ms: float | None = None


class ModelShown(_StateModel):
    """One model and its machines."""

    name: SafeText
    fingerprint: SafeText
    num_layers: LayerIndex
    verdict: SafeText
    reason: SafeText
    since: float
    missing: tuple[Range, ...]
    fixes: Annotated[tuple[str, ...], AfterValidator(copyable)]
    margin: int
    replicas: Annotated[tuple[int, ...], Field(max_length=MAX_LAYERS)]
    nodes: tuple[NodeShown, ...]
    probe: ProbeShown | None = None

    @property
    def serving(self) -> int:
        """How many machines serve."""
        return sum(node.state == "serving" for node in self.nodes)


class AlertShown(_StateModel):
    """Something that an operator should see."""

    severity: SafeText
    model: SafeText | None = None
    text: SafeText
    since: float


class EventShown(_StateModel):
    at: float
    model: SafeText | None = None
    short: SafeText | None = None
    kind: SafeText
    text: SafeText


class ContributorShown(_StateModel):
    """A peer for which clients signed."""

    short: SafeText
    name: SafeText | None = None
    layer_tokens: int
    share: float


class State(_StateModel):
    v: int
    at: float
    started_at: float
    swarm: SafeText = ""
    sources: Sources = Sources()
    models: tuple[ModelShown, ...]
    alerts: tuple[AlertShown, ...] = ()
    events: tuple[EventShown, ...] = ()
    contributors: tuple[ContributorShown, ...] = ()


def read_state(text: str | bytes) -> State:
    """Read a state's JSON.

    Raises:
        RemoteProtocolError: it is no state, or of another version.
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
