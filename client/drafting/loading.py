"""From what `--draft` names to a drafter: models and trained heads, each with its calibration of earlier runs.

A head's config.json has the field `canopy_head`, an EAGLE head is known by its tensors, and `mtp` is the layer
that comes with the target's checkpoint; any other folder or hub id is a model.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from client.drafting.drafter import Drafter, NoDrafter, TreeDrafter
from client.drafting.heads.eagle import is_eagle, load_eagle
from client.drafting.heads.files import load_head, read_head_config
from client.drafting.heads.modules import HeadConfig
from client.drafting.heads.mtp import MTP, has_mtp, load_mtp
from client.drafting.search.calibration import Calibration
from client.drafting.search.calibration_store import Identified, calibration_path, load_calibration, save_calibration
from client.drafting.search.ranking import Ranker
from client.drafting.search.source import Source
from client.drafting.sources.dgf import DgfSource
from client.drafting.sources.layer_head import LayerHeadSource
from client.drafting.sources.lookup import Lookup, LookupSource
from client.drafting.sources.model import ModelSource
from client.drafting.sources.redrafter import ReDrafterSource
from client.drafting.sources.sibling_index import CrossBranchCache
from client.drafting.sources.siblings import SiblingSource
from client.drafting.vocabulary.matching import ModelVocabulary, SharedVocabulary, match_vocabularies
from client.options import DraftOptions
from client.target import Target, load_target
from swarm.errors import ConfigError, IncompatibleDraft
from swarm.inference.devices import default_device, has_float64, open_device, refused_dtype
from swarm.inference.fast_path import use_static
from swarm.inference.ragged_batch import load_whole
from swarm.models.hub import find_model

logger = logging.getLogger(__name__)

DRAFT_WINDOW = 32_768
"""Tokens of the longest sequence, for drafts that know no limit."""
MAX_DRAFTS = 8
"""Models and heads that draft together."""

ModelName = str | Path

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedDrafter:
    """A drafter, and how to save what it learned.

    Attributes:
        drafter: the first one.
        make_another: makes a further one, which shares models and calibrations.
        savers: save one calibration each.
        notes: how much of the target's vocabulary each draft model knows, for people.
    """

    drafter: Drafter
    make_another: Callable[[], Drafter]
    savers: tuple[Callable[[], None], ...] = ()
    notes: tuple[str, ...] = ()

    def save_calibrations(self) -> None:
        """Write down what was learned."""
        for save in self.savers:
            save()


def load_drafter(model: ModelName, target: Target, options: DraftOptions, revision: str | None = None) -> LoadedDrafter:
    """Load everything that drafts for a target.

    Args:
        model: the target by folder or hub id; a head may borrow its tensors.
        target: the same as its client knows it.
        options: what drafts.
        revision: the target's, on the hub.

    Raises:
        ConfigError: too many drafts, or no such device.
        IncompatibleDraft: a head that was made for other tokens, or a draft that shares none with the target.
        SwarmError: a draft that cannot be found or loaded.
    """
    if len(options.draft) > MAX_DRAFTS:
        raise ConfigError(f"draft: {len(options.draft)} of them; at most {MAX_DRAFTS} work together")
    device = find_device(options.draft_device)
    makers: list[Callable[[], Source]] = [lambda: LookupSource(Lookup())] if options.lookup else []
    if options.siblings and (makers or options.draft):
        makers.append(lambda: SiblingSource(CrossBranchCache()))
    savers: list[Callable[[], None]] = []
    drafts: list[Identified] = []
    notes: list[str] = []
    if not options.draft and has_mtp(model, revision):
        logger.warning("%s comes with a layer that predicts further tokens: --draft %s drafts with it", model, MTP)
    for name in options.draft:
        component = _component(name, (model, revision), target, device, adapt=options.adapt)
        drafts.append(component.identity)
        notes += [component.note] if component.note else []
        path = None
        if options.calibration is not None:
            path = calibration_path(options.calibration, target, identity_among(drafts))
        calibration = load_calibration(path) if path is not None else Calibration()
        makers.append(partial(_source, component, calibration))
        if path is not None:
            savers.append(partial(save_calibration, path, calibration))
    make_another = partial(_drafter, makers)
    return LoadedDrafter(make_another(), make_another, tuple(savers), tuple(notes))


def _drafter(makers: Sequence[Callable[[], Source]]) -> Drafter:
    return TreeDrafter([make() for make in makers]) if makers else NoDrafter()


def find_device(name: str | None) -> torch.device:
    """A device that drafts can run on.

    Raises:
        ConfigError: there is no such device here.
    """
    if name is None:
        return default_device()
    try:
        return open_device(name)
    except ConfigError as error:
        raise ConfigError(f"draft {error}") from None


def draft_dtype(device: torch.device) -> torch.dtype:
    """In which type a draft model computes: nobody's text depends on it."""
    if device.type == "cpu":
        return torch.float32
    return torch.float16 if refused_dtype(torch.bfloat16, device) else torch.bfloat16


@dataclass(frozen=True, slots=True)
class DraftIdentity:
    """What tells one head, or one draft that works behind others, from another; as `Target` does for models."""

    name: str
    config_digest: str
    tokenizer_digest: str


def identity_among(drafts: Sequence[Identified]) -> Identified:
    """The identity of the last of some drafts; what it learns holds only beside the others."""
    *_, last = drafts
    if len(drafts) == 1:
        return last
    digest = hashlib.sha256(" ".join(draft.config_digest for draft in drafts).encode()).hexdigest()
    return DraftIdentity("+".join(draft.name for draft in drafts), digest, last.tokenizer_digest)


@dataclass(frozen=True, slots=True)
class DraftComponent:
    """A loaded model or head.

    Attributes:
        source: makes a source of it.
        identity: names its calibration.
        vocab_tokens: ids of the target that it can propose are below it.
        note: how much of the target's vocabulary a draft model knows, for people; empty for a head.
    """

    source: Callable[[Ranker], Source]
    identity: Identified
    vocab_tokens: int
    note: str = ""


def _component(
    name: ModelName, of: tuple[ModelName, str | None], target: Target, device: torch.device, *, adapt: bool
) -> DraftComponent:
    """Load whatever a name stands for."""
    if str(name) == MTP:
        return _mtp(of, target, device)
    if (config := read_head_config(name)) is not None:
        return _head((name, config), of, target, device)
    return _eagle(name, of, target, device) if is_eagle(name) else _model(name, target, device, adapt=adapt)


def _source(component: DraftComponent, calibration: Calibration) -> Source:
    return component.source(Ranker(component.vocab_tokens, calibration))


def _model(name: ModelName, target: Target, device: torch.device, *, adapt: bool) -> DraftComponent:
    model = load_whole(name, draft_dtype(device), device)
    small = load_target(name)
    try:
        shared = match_vocabularies(
            ModelVocabulary(target.tokenizer, target.vocab_size), ModelVocabulary(small.tokenizer, model.vocab_size)
        )
    except IncompatibleDraft as error:
        raise IncompatibleDraft(f"{small.name}: {error}") from None
    _tell_coverage(small.name, shared)
    window = model.max_positions or DRAFT_WINDOW
    use_static(model, window)
    note = f"draft {small.name} {shared.coverage}"
    return DraftComponent(
        lambda ranker: ModelSource(model, shared, window, ranker, adapt=adapt), small, shared.vocab_tokens, note
    )


def _tell_coverage(name: str, shared: SharedVocabulary) -> None:
    """One line where a draft does not have all of the target's tokens."""
    if shared.translation is not None and not shared.translation.is_aligned:
        logger.warning("draft %s: another tokenizer than the target's; it %s", name, shared.coverage)
    elif shared.shared < shared.known:
        logger.info("draft %s %s", name, shared.coverage)


def _mtp(of: tuple[ModelName, str | None], target: Target, device: torch.device) -> DraftComponent:
    head = load_mtp(*of, device, draft_dtype(device))
    if (head.model.hidden_size, head.model.vocab_size) != (target.hidden_size, target.vocab_size):
        raise IncompatibleDraft(f"{target.name}: its MTP layer is of another width or vocabulary; draft with a model")
    logger.info("%s: its MTP layer drafts, %d bytes of weights", target.name, head.model.weight_bytes)
    identity = DraftIdentity(MTP, target.config_digest, target.tokenizer_digest)
    return DraftComponent(lambda ranker: LayerHeadSource(head, ranker), identity, len(target.tokenizer))


def _eagle(name: ModelName, of: tuple[ModelName, str | None], target: Target, device: torch.device) -> DraftComponent:
    head = load_eagle(name, *of, device, draft_dtype(device))
    folder, hub = find_model(name)
    digest = hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()
    identity = DraftIdentity(folder.name if hub is None else hub.repo, digest, target.tokenizer_digest)
    return DraftComponent(lambda ranker: LayerHeadSource(head, ranker), identity, len(target.tokenizer))


def _head(
    named: tuple[ModelName, HeadConfig], of: tuple[ModelName, str | None], target: Target, device: torch.device
) -> DraftComponent:
    name, config = named
    if config.tokenizer != target.tokenizer_digest or config.vocab_size != target.vocab_size:
        raise IncompatibleDraft(
            f"{name}: this head was trained for another tokenizer than {target.name}'s; train one for it "
            "(client train-draft), or draft with a model"
        )
    if config.hidden_size != target.hidden_size:
        raise IncompatibleDraft(
            f"{name}: this head reads hidden rows of {config.hidden_size} values and {target.name} has "
            f"{target.hidden_size}; train one for it (client train-draft)"
        )
    # Beams are weighed in float64, which not every GPU has; a head is small.
    head = load_head(name, config, *of).to(device if has_float64(device) else "cpu")
    folder, hub = find_model(name)
    digest = hashlib.sha256(json.dumps(config.to_json(), sort_keys=True).encode()).hexdigest()
    identity = DraftIdentity(folder.name if hub is None else hub.name, digest, config.tokenizer)
    kind = ReDrafterSource if config.canopy_head == "redrafter" else DgfSource
    return DraftComponent(lambda ranker: kind(head, ranker), identity, len(target.tokenizer))
