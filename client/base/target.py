"""The target as its client knows it: config, tokenizer and identity, never weights."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedTokenizerFast

from swarm.base.errors import ConfigError, ModelMismatch, RouteError
from swarm.base.ids import ModelIdentity, PeerId
from swarm.base.plain_text import plain_line
from swarm.directory.node_record import NodeRecord
from swarm.directory.registry import Registry
from swarm.files.families import max_positions, needs_ids, why_shorter
from swarm.files.fingerprint import client_identity, known_identity
from swarm.files.hub import find_model
from swarm.files.model_config import read_config
from swarm.files.pretrained import first_line
from swarm.files.tokenizer_files import check_tokenizer, load_tokenizer
from swarm.files.tokenizer_trial import check_encodes
from swarm.routing.latency import measure_delays
from swarm.routing.route import RouteQuery, no_route
from swarm.routing.served import ServedModels

MODELS_NAMED = 8
"""Other models that a message names, at most."""
GENERATION_CONFIG = "generation_config.json"
_FINGERPRINT = re.compile(r"[0-9a-f]{8,64}")


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelSearch:
    """How a target is looked for in a swarm.

    Attributes:
        join: addresses of the swarm, for commands in errors.
        fingerprint: how the fingerprint begins that is wanted, and no other; None takes what is served.
        probe: measures delays to machines, in milliseconds; those that do not answer are left out.
    """

    join: tuple[str, ...] = ()
    fingerprint: str | None = None
    probe: Callable[[Sequence[NodeRecord]], Awaitable[dict[PeerId, float]]] = measure_delays


@dataclass(frozen=True, slots=True)
class Target:
    """A model as its client knows it, and what tells it from others in the swarm.

    Attributes:
        name: hub id, or the folder's name.
        config_digest: of its config.
        tokenizer_digest: of its tokenizer.
        tokenizer: from text to ids and back.
        eos_ids: ids that end a text.
        vocab_size: rows of its embedding.
        num_layers: layers that the swarm serves.
        max_positions: its context in tokens; None when nothing limits it.
        hidden_size: values of a hidden row.
        needs_ids: whether layers behind the first read token ids, so that these travel through the chain (P17).
        fingerprint: of the model with its weights; None where only the weights themselves could tell.
        generation: its generation config, as it was read.
        valid_tokens: ids that its tokenizer knows are below it; further ones are padding, which nobody picks. 0: it is
            not known.
    """

    name: str
    config_digest: str
    tokenizer_digest: str
    tokenizer: PreTrainedTokenizerFast
    eos_ids: frozenset[int]
    vocab_size: int
    num_layers: int
    max_positions: int | None
    hidden_size: int = 0
    needs_ids: bool = False
    fingerprint: str | None = None
    generation: Mapping[str, Any] = field(default_factory=dict)
    valid_tokens: int = 0

    def is_like(self, model: ModelIdentity) -> bool:
        """Whether a swarm's model has this config, tokenizer and number of layers, whatever its weights."""
        ours = (self.config_digest, self.tokenizer_digest, self.num_layers)
        return (model.config_digest, model.tokenizer_digest, model.num_layers) == ours


def load_target(model: str | Path, revision: str | None = None) -> Target:
    """Read a model's small files from a folder or the hub; its weights are neither needed nor opened.

    Raises:
        UnknownModel: no such model.
        UnsupportedModel: it has no fast tokenizer, one that takes too long, or needs code of its own.
        HubError: the hub refuses, cannot be reached, or what it sent cannot be kept.
    """
    folder, hub = find_model(model, revision)
    config = read_config(folder, str(model))
    check_tokenizer(folder, str(model))
    name, config_digest, tokenizer_digest = client_identity(folder)
    check_encodes(folder, str(model))
    tokenizer = load_tokenizer(folder, str(model))
    text = config.get_text_config()
    if (note := why_shorter(config)) is not None:
        logger.warning("%s: %s", model, note)
    known = known_identity(folder, hub=hub)
    generation = read_generation_config(folder)
    return Target(
        name=name if hub is None else hub.name,
        config_digest=config_digest,
        tokenizer_digest=tokenizer_digest,
        tokenizer=tokenizer,
        eos_ids=end_tokens(generation, config, tokenizer),
        vocab_size=text.vocab_size,
        num_layers=text.num_hidden_layers,
        max_positions=max_positions(config),
        hidden_size=text.hidden_size,
        needs_ids=needs_ids(text),
        fingerprint=None if known is None else known.fingerprint,
        generation=generation,
        valid_tokens=min(text.vocab_size, max(tokenizer.get_vocab().values(), default=text.vocab_size - 1) + 1),
    )


def check_fingerprint(fingerprint: str | None) -> str | None:
    """Return the beginning of a fingerprint, if it can be one.

    Raises:
        ConfigError: it cannot.
    """
    if fingerprint is not None and _FINGERPRINT.fullmatch(fingerprint) is None:
        raise ConfigError(f"--fingerprint {fingerprint[:80]!r}: give 8 to 64 of its hex digits")
    return fingerprint


async def find_in_swarm(target: Target, registry: Registry, search: ModelSearch) -> ModelIdentity:
    """The swarm's model with the target's config, tokenizer and number of layers.

    What is only listed refuses nobody. Among models that differ in nothing but their weights, the one whose fingerprint
    this machine could compute is taken, if it is listed; else the one that is served best.

    Raises:
        ConfigError: several listed models begin with the fingerprint that was asked for.
        ModelMismatch: the swarm's model of this name, or with this fingerprint, is another one.
        RouteError: nobody serves it.
    """
    models = await registry.models()
    same = [model for model in models if target.is_like(model)]
    if search.fingerprint is not None:
        return _asked_for(target, models, search)
    own = [model for model in same if model.fingerprint == target.fingerprint]
    named = own or [model for model in same if model.name == target.name] or same
    if named:
        taken = await ServedModels(registry, search.probe).best(named)
        _tell_others(target, taken, same)
        return taken
    for model in models:
        if model.name == target.name:
            raise ModelMismatch(f"{target.name} here has {_described(target)}; the swarm's has {_described(model)}")
    nobody = no_route(RouteQuery(target.name, target.num_layers, join=search.join), [(0, target.num_layers)])
    if models:
        names = ", ".join(sorted({model.name for model in models})[:MODELS_NAMED])
        raise RouteError(f"{nobody}; this swarm serves {names}", nobody.missing)
    raise nobody


def _asked_for(target: Target, models: Sequence[ModelIdentity], search: ModelSearch) -> ModelIdentity:
    """The one model whose fingerprint begins as was asked for."""
    asked = str(search.fingerprint)
    found = [model for model in models if model.fingerprint.startswith(asked)]
    if not found:
        why = f"nobody serves {target.name} with the fingerprint {asked}; where the weights have changed, name MODEL"
        raise RouteError(f"{why} to take those that it serves now", [(0, target.num_layers)])
    like = [model for model in found if target.is_like(model)]
    if not like:
        raise ModelMismatch(f"{target.name} here has {_described(target)}; {asked} has {_described(found[0])}")
    if len(like) > 1:
        prints = ", ".join(sorted(model.fingerprint for model in like)[:MODELS_NAMED])
        raise ConfigError(f"--fingerprint {asked}: several models begin so, give all of it: {prints}")
    return like[0]


def _tell_others(target: Target, taken: ModelIdentity, same: Sequence[ModelIdentity]) -> None:
    """One line where the choice is not the only one that there is, or not the model that lies here."""
    if target.fingerprint not in (None, taken.fingerprint):
        logger.warning(
            "%s: the swarm serves it as %s, here it is %s: other weights",
            *(target.name, taken.fingerprint[:12], str(target.fingerprint)[:12]),
        )
    elif len(same) > 1 and target.fingerprint is None:
        others = ", ".join([model.fingerprint[:12] for model in same if model is not taken][:MODELS_NAMED])
        logger.warning(
            "%s: %s is taken, which is served best; listed with other weights: %s (--fingerprint names one)",
            *(target.name, taken.fingerprint[:12], others),
        )


def _described(model: Target | ModelIdentity) -> str:
    digests = f"config {model.config_digest[:12]}, tokenizer {model.tokenizer_digest[:12]}"
    return f"{digests}, {model.num_layers} layers"


def read_generation_config(folder: Path) -> dict[str, Any]:
    """A model's generation config; one that is broken is left aside with one line that says so."""
    path = folder / GENERATION_CONFIG
    try:
        value = json.loads(path.read_bytes()) if path.exists() else {}
    except (OSError, ValueError, RecursionError) as error:
        logger.warning("%s: cannot be read (%s); it is left aside", path, first_line(error))
        return {}
    if not isinstance(value, dict):
        logger.warning("%s: is no JSON object; it is left aside", path)
        return {}
    return value


def end_tokens(
    generation: Mapping[str, Any], config: PreTrainedConfig, tokenizer: PreTrainedTokenizerFast
) -> frozenset[int]:
    """All ids that end a text: the generation config's, else the config's, and the tokenizer's own."""
    named = generation.get("eos_token_id")
    given = named if isinstance(named, list) else [] if named is None else [named]
    if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in given):
        shown = plain_line(json.dumps(named))[:80]
        logger.warning(
            "%s: eos_token_id: %s: no token ids; the tokenizer's own end token ends a text", GENERATION_CONFIG, shown
        )
        given = []
    if not given:
        configured = config.get_text_config().eos_token_id
        given = [] if configured is None else [configured] if isinstance(configured, int) else list(configured)
    own = tokenizer.eos_token_id
    return frozenset([*given, *([own] if isinstance(own, int) else [])])
