"""From what `--draft` names to a drafter: models and trained heads, each with its calibration of earlier runs.

A head's config.json has the field `canopy_head`, an EAGLE head is known by its tensors, and `mtp` is the layer
that comes with the target's checkpoint; any other folder or hub id is a model.

Warms a drafter up before the first text: runs a model's slow first passes, and measures how many CPU threads pay.

More threads do not speed up a small draft. Where other programs compute on this machine they slow it down, since
threads that wait for each other also wait for whatever holds their core.

Keeps calibrations between runs: one small file per pair of draft and target in the user's cache.

    {"version": 3, "temperatures": […], "fits": [{"weights": [7], "information": [7][7]}, …]}

Nothing here can fail a generation: what cannot be read is learned again, what cannot be written is lost, and a warning
says so. Files appear whole or not at all; of two programs that write, the last one's stays.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import cycle, product
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from client.base.options import DraftOptions
from client.base.target import Target, load_target
from client.draft.drafter import Drafter, NoDrafter, TreeDrafter
from client.draft.heads.eagle import is_eagle, load_eagle
from client.draft.heads.files import HeadConfig, load_head, read_head_config
from client.draft.heads.mtp import MTP, has_mtp, load_mtp
from client.draft.joined import JoinedDrafting
from client.draft.search.calibration import TEMPERATURES, Calibration, Fit
from client.draft.search.ranking import Ranker
from client.draft.search.source import Source
from client.draft.sources.layer_head import LayerHeadSource
from client.draft.sources.lookup import Lookup, LookupSource
from client.draft.sources.model import ModelSource
from client.draft.sources.recurrent import DgfSource, ReDrafterSource
from client.draft.sources.siblings import CrossBranchCache, SiblingSource
from client.draft.vocabulary.matching import ModelVocabulary, SharedVocabulary, match_vocabularies
from swarm.base.errors import ConfigError, IncompatibleDraft
from swarm.base.files import replace_file
from swarm.compute.compute_thread import use_threads
from swarm.compute.devices import default_device, has_float64, open_device, refused_dtype
from swarm.compute.fast_path import use_static
from swarm.compute.ragged_batch import load_whole
from swarm.files.hub import find_model
from swarm.protocol.messages import Sampling

logger = logging.getLogger(__name__)

VERSION = 3
"""Of the file and of what its numbers mean: raise it when features, prior or ranges change."""

MAX_FILE_BYTES = 65_536
MAX_FILES = 64
_PREFIX = "pair-"


class Identified(Protocol):
    """What tells one model or head from another."""

    @property
    def name(self) -> str:
        """Hub id, or the folder's name."""

    @property
    def config_digest(self) -> str:
        """Of its config."""

    @property
    def tokenizer_digest(self) -> str:
        """Of the tokenizer that it was made for."""


def calibration_path(folder: Path, target: Target, draft: Identified) -> Path:
    """The file of one pair; its name depends on the models' short names, configs and tokenizers."""
    both: tuple[Identified, ...] = (target, draft)
    pair = [[model.name.rpartition("/")[2], model.config_digest, model.tokenizer_digest] for model in both]
    return folder / f"{_PREFIX}{hashlib.sha256(json.dumps(pair).encode()).hexdigest()[:32]}.json"


def load_calibration(path: Path) -> Calibration:
    """The calibration of an earlier run; a fresh one where there is no file, or none that can be used."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        return Calibration(_parse(data))
    except FileNotFoundError:
        return Calibration()
    except OSError as error:
        reason = error.strerror or str(error)
    except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError):
        reason = "it holds no calibration that this version knows"
    logger.warning("calibration %s is not used (%s); learning afresh", path, reason)
    return Calibration()


def save_calibration(path: Path, calibration: Calibration) -> None:
    """Replace the file, and remove the oldest where there are too many."""
    fits = [{"weights": fit.weights.tolist(), "information": fit.information.tolist()} for fit in calibration.fits]
    text = json.dumps({"version": VERSION, "temperatures": TEMPERATURES, "fits": fits})
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        replace_file(path, text.encode())
        _remove_oldest(path)
    except OSError as error:
        logger.warning("calibration %s is not kept (%s)", path, error.strerror or error)


def _parse(data: bytes) -> tuple[Fit, ...]:
    """The fits of a file; raises whatever unexpected contents make it raise."""
    if len(data) > MAX_FILE_BYTES:
        raise ValueError("too large")
    content = json.loads(data)
    if content["version"] != VERSION or content["temperatures"] != list(TEMPERATURES):
        raise ValueError("of another version")
    fits = tuple(
        Fit(np.array(fit["weights"], np.float64), np.array(fit["information"], np.float64)) for fit in content["fits"]
    )
    if len(fits) != len(TEMPERATURES) + 1 or not all(fit.is_sound for fit in fits):
        raise ValueError("not what lessons lead to")
    return fits


def _remove_oldest(path: Path) -> None:
    """Keep a file and the newest beside it, `MAX_FILES` in all; those that a killed program left half-written count."""
    others = sorted((file for file in path.parent.glob(f"*{_PREFIX}*") if file != path), key=_written, reverse=True)
    for file in others[MAX_FILES - 1 :]:
        file.unlink(missing_ok=True)


def _written(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except FileNotFoundError:
        return 0.0


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


NODES, LEVELS = 16, 2
"""Of a small tree."""
CARD_TREES = ((NODES, LEVELS), (4 * NODES, 2 * LEVELS), (16 * NODES, 4 * LEVELS))
"""Nodes and levels of trees that make a CUDA card load its kernels, which differ with the size."""
MIN_SPEEDUP = 1.3
"""Twice as many threads are kept where a tree then grows at least so many times as fast."""
MEASURED_S = 0.015
"""How long trees grow with each number of threads; the fastest tree counts."""


@contextmanager
def drafting_thread() -> Iterator[Executor]:
    """The one thread that loads what drafts, and drafts."""
    drafting = JoinedDrafting()
    try:
        yield drafting
    finally:
        drafting.shutdown(wait=False, cancel_futures=True)


def warm_up(drafting: Executor, drafter: Drafter, hidden_size: int, threads: int | None) -> None:
    """Have the one thread that loaded a drafter, and drafts, warm up. Computations on others keep their CPU threads.

    Args:
        drafting: the thread.
        drafter: to warm up.
        hidden_size: values of the target's hidden rows.
        threads: CPU threads that it computes with; None for as many as pay, at most as many as torch uses here.
    """
    usual = torch.get_num_threads()
    drafting.submit(use_threads, threads or 1, usual)
    if isinstance(drafter, TreeDrafter):
        drafting.submit(_warm_up, drafter, hidden_size, usual, is_free=threads is None)


def _warm_up(drafter: TreeDrafter, hidden_size: int, usual: int, *, is_free: bool) -> None:
    """Grow trees of a made-up text; where the number of threads is free, leave as many as pay, up to `usual`."""
    sequences, row = cycle(((0, 1), (0, 2))), torch.zeros(1, hidden_size * (1 + len(drafter.aux_layers)))

    def grow(nodes: int = NODES, levels: int = LEVELS, temperature: float = 0.0) -> None:
        drafter.observe((0,), row)
        drafter.grow(next(sequences), nodes, levels, Sampling(temperature=temperature))

    try:
        grow()
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            for (nodes, levels), temperature in product(CARD_TREES, (0.0, 1.0)):
                grow(nodes, levels, temperature)
        if is_free:
            keep_fewest(partial(_fastest_s, grow), usual)
    finally:
        drafter.forget()


def keep_fewest(seconds: Callable[[], float], usual: int) -> None:
    """Use as many CPU threads as pay, from 1 to `usual`; `seconds` measures a tree with those in use."""
    threads, took_s = 1, seconds()
    while threads < usual:
        doubled = min(2 * threads, usual)
        use_threads(doubled, usual)
        doubled_s = seconds()
        if took_s < MIN_SPEEDUP * doubled_s:
            use_threads(threads, usual)
            break
        threads, took_s = doubled, doubled_s


def _fastest_s(grow: Callable[[], None]) -> float:
    best_s, ends_s = math.inf, time.perf_counter() + MEASURED_S
    while (started_s := time.perf_counter()) < ends_s:
        grow()
        best_s = min(best_s, time.perf_counter() - started_s)
    return best_s
