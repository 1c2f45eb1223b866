"""The target as its client knows it: config, tokenizer and identity, never weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoTokenizer, GenerationConfig, PreTrainedConfig, PreTrainedTokenizerFast

from swarm.errors import ModelMismatch, RouteError, UnknownModel, UnsupportedModel
from swarm.ids import ModelIdentity
from swarm.models.families import max_positions
from swarm.models.fingerprint import client_identity
from swarm.models.hub import find_model
from swarm.models.pretrained import UNREADABLE, check_own_code, first_line, read_config
from swarm.routing.route import RouteQuery, no_route

MODELS_NAMED = 8
"""Other models that a message names, at most."""


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


def load_target(model: str | Path, revision: str | None = None) -> Target:
    """Read a model's small files from a folder or the hub; its weights are neither needed nor opened.

    Raises:
        UnknownModel: no such model.
        UnsupportedModel: it has no fast tokenizer, or needs code of its own.
        HubError: the hub refuses, cannot be reached, or what it sent cannot be kept.
    """
    folder, hub = find_model(model, revision)
    name, config_digest, tokenizer_digest = client_identity(folder)
    config = read_config(folder, str(model))
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except UNREADABLE as error:
        check_own_code(folder / "tokenizer_config.json", str(model))
        raise UnknownModel(f"{model}: its tokenizer cannot be read ({first_line(error)})") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise UnsupportedModel(f"{model}: needs a fast tokenizer (tokenizer.json)")
    text = config.get_text_config()
    return Target(
        name=name if hub is None else hub.repo,
        config_digest=config_digest,
        tokenizer_digest=tokenizer_digest,
        tokenizer=tokenizer,
        eos_ids=_eos_ids(folder, config),
        vocab_size=text.vocab_size,
        num_layers=text.num_hidden_layers,
        max_positions=max_positions(config),
        hidden_size=text.hidden_size,
    )


def find_in_swarm(target: Target, models: Sequence[ModelIdentity], join: tuple[str, ...]) -> ModelIdentity:
    """The swarm's model with the target's config and tokenizer.

    Raises:
        ModelMismatch: the swarm's model of this name is another one, or several differ only in their weights.
        RouteError: nobody serves it.
    """
    same = [
        model
        for model in models
        if (model.config_digest, model.tokenizer_digest) == (target.config_digest, target.tokenizer_digest)
    ]
    named = [model for model in same if model.name == target.name] or same
    if len(named) == 1:
        return named[0]
    if named:
        prints = " and ".join(sorted(model.fingerprint[:12] for model in named))
        raise ModelMismatch(f"the swarm serves {target.name} with different weights ({prints}); use a swarm with one")
    for model in models:
        if model.name == target.name:
            ours = f"config {target.config_digest[:12]}, tokenizer {target.tokenizer_digest[:12]}"
            theirs = f"config {model.config_digest[:12]}, tokenizer {model.tokenizer_digest[:12]}"
            raise ModelMismatch(f"{target.name} here has {ours}; the swarm's has {theirs}")
    nobody = no_route(RouteQuery(target.name, target.num_layers, join=join), [(0, target.num_layers)])
    if models:
        names = ", ".join(sorted({model.name for model in models})[:MODELS_NAMED])
        raise RouteError(f"{nobody}; this swarm serves {names}", nobody.missing)
    raise nobody


def _eos_ids(folder: Path, config: PreTrainedConfig) -> frozenset[int]:
    """All ids that end a text, from the generation config first, as Hugging Face does."""
    ids = config.get_text_config().eos_token_id
    if (folder / "generation_config.json").exists():
        ids = GenerationConfig.from_pretrained(folder).eos_token_id or ids
    if ids is None:
        return frozenset()
    return frozenset([ids] if isinstance(ids, int) else ids)
