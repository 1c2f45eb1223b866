"""The services beside a swarm: the hub, which has models and their sizes, and the MQTT broker. Downloads no weights."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import ssl
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import aiomqtt

from swarm.base.errors import ConfigError, HubError, SwarmError, UnknownModel
from swarm.doctor.ladder import Diagnosis, hint, ok, trouble, unknown
from swarm.doctor.probes import Resolve, TcpAnswer, knock, on_thread
from swarm.link.broker_address import BrokerAddress, parse_broker

OFFLINE_VARIABLES: Final = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
_TRUE: Final = {"1", "ON", "YES", "TRUE"}
ANSWER_S: Final = 8.0
_LOG_IN: Final = "hf auth login, or export HF_TOKEN=…"


AskHub = Callable[[], Awaitable["HubAnswer"]]


@dataclass(frozen=True, slots=True)
class HubAnswer:
    """What became of a question to the hub.

    Attributes:
        facts: of the model that was named; None if none was, or it is not known.
        error: why it cannot be had; None if it can.
        is_cached: whether its small files lie in the cache.
    """

    facts: ModelFacts | None = None
    error: SwarmError | None = None
    is_cached: bool = False


async def look_at_hub(
    model: str | None, ask: AskHub, environment: Mapping[str, str], *, is_reached: bool = False
) -> Diagnosis:
    """Whether the hub gives what this machine needs: offline variables, then the hub."""
    if is_here(model):
        return ok("folder", "not needed: the model is on this machine")
    answer = await ask()
    is_needed = model is not None and not answer.is_cached
    if offline := offline_by(environment):
        names, mend = ", ".join(offline), f"unset {' '.join(offline)}"
        if is_needed:
            return trouble("model-offline", f"the model is not in the cache, and {names} forbids to download it", mend)
        return hint("hub-offline", f"{names} forbids downloads: only what is in the cache can be served", mend)
    if answer.error is None:
        return ok("hub", "reachable" if model is None else "the model can be had")
    said = str(answer.error)
    if "cannot be reached" in said and is_reached:
        return unknown("the hub accepts connections, and did not answer in time")
    if "cannot be reached" in said:
        mend = "check the network; behind a proxy: export https_proxy=http://HOST:PORT"
        level = trouble if is_needed else hint
        return level("hub-silent", "the hub cannot be reached", mend)
    if "gated" in said or "token" in said or "private" in said:
        return trouble("hub-token", said, _LOG_IN)
    if isinstance(answer.error, UnknownModel):
        return trouble("no-model", said, "check how the model's name is written")
    return trouble("hub-refuses", said, "wait some minutes, then swarm doctor once more")


def offline_by(environment: Mapping[str, str]) -> list[str]:
    """The variables that forbid downloads."""
    return [name for name in OFFLINE_VARIABLES if environment.get(name, "").upper() in _TRUE]


def is_here(model: str | None) -> bool:
    """Whether a model is a folder or a file on this machine."""
    return model is not None and Path(model).expanduser().exists()


async def ask_hub(model: str | None) -> HubAnswer:
    """Ask the hub for a model's list of files; for nothing but an answer where none is named.

    Its library blocks and may do so for long, so it runs on a thread that nobody waits for.
    """
    return await on_thread(lambda: _ask(model))


def _ask(model: str | None) -> HubAnswer:
    # Here, because they take a second to import, and read the environment when they are imported.
    from huggingface_hub import HfApi, constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.utils import get_session  # type: ignore[attr-defined]  # exported where mypy does not look

    from swarm.files.gguf.naming import split_hub_name
    from swarm.files.hub_errors import FETCH_ERRORS, check_token, explain

    if model is not None and (folder := Path(model).expanduser()).exists():
        return HubAnswer(facts_of_folder(folder) if folder.is_dir() else facts_of_file(folder), is_cached=True)
    if model is not None and (named := split_hub_name(model)) is not None:
        return _ask_for_file(*named)
    cached = None if model is None else _cached(model)
    known = None if cached is None else facts_of_folder(cached, None)
    try:
        check_token()
        if model is None:
            get_session().head(constants.ENDPOINT, timeout=ANSWER_S)
            return HubAnswer()
        info = HfApi().model_info(model, timeout=ANSWER_S, files_metadata=True)
        get_hf_file_metadata(hf_hub_url(model, "config.json"), timeout=ANSWER_S)  # a gated model lists its files to all
    except HubError as error:
        return HubAnswer(known, error, cached is not None)
    except FETCH_ERRORS as error:
        reason = explain(error, model or "the hub")
        return HubAnswer(known, reason, cached is not None)
    sizes = {one.rfilename: one.size or 0 for one in info.siblings or () if one.rfilename.endswith(".safetensors")}
    missing = sum(size for name, size in sizes.items() if cached is None or not (cached / name).exists())
    total = sum(sizes.values()) or None
    facts = ModelFacts(total, missing) if cached is None else facts_of_folder(cached, missing, total)
    return HubAnswer(facts, is_cached=cached is not None)


def _ask_for_file(repo: str, part: str) -> HubAnswer:
    """The same for one of the GGUF models of a hub model."""
    from huggingface_hub import HfApi

    from swarm.files.gguf.naming import hub_files
    from swarm.files.hub_errors import FETCH_ERRORS, check_token, explain

    try:
        check_token()
        info = HfApi().model_info(repo, timeout=ANSWER_S, files_metadata=True)
        sizes = {one.rfilename: one.size or 0 for one in info.siblings or ()}
        files = hub_files(repo, part, sizes)
    except FETCH_ERRORS as error:
        return HubAnswer(None, explain(error, repo))
    except SwarmError as error:
        return HubAnswer(None, error)
    total = sum(sizes[name] for name in files) or None
    return HubAnswer(ModelFacts(total, total, growth=1))


def _cached(model: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    try:
        config = try_to_load_from_cache(model, "config.json")
    except ValueError:
        return None
    return Path(config).parent if isinstance(config, str) else None


def hub_cache() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


CPU_GROWTH: Final = 2
"""A CPU computes in fp32: twice the bytes of a checkpoint of 16-bit weights."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The model that was named.

    Attributes:
        total_bytes: of its weights; None if unknown.
        missing_bytes: of them, to be downloaded yet; None if unknown.
        num_layers: None if unknown.
        growth: how many times as much the weights take in a CPU's memory.
    """

    total_bytes: int | None = None
    missing_bytes: int | None = None
    num_layers: int | None = None
    growth: int = CPU_GROWTH

    @property
    def layer_bytes(self) -> int | None:
        """About what a layer takes in a CPU's memory, embeddings shared out among all; None if unknown."""
        if not self.total_bytes or not self.num_layers:
            return None
        return self.growth * self.total_bytes // self.num_layers


def facts_of_folder(folder: Path, missing_bytes: int | None = 0, total_bytes: int | None = None) -> ModelFacts:
    """What a folder with a `config.json` says."""
    if total_bytes is None:
        total_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors")) or None
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        layers = config.get("num_hidden_layers", (config.get("text_config") or {}).get("num_hidden_layers"))
    except (OSError, ValueError, AttributeError):
        layers = None
    return ModelFacts(total_bytes, missing_bytes, layers if isinstance(layers, int) and layers > 0 else None)


def facts_of_file(file: Path) -> ModelFacts:
    """What a GGUF file on this machine says; nothing where it cannot be read."""
    from swarm.files.gguf.container import read_header
    from swarm.files.gguf.naming import local_files

    try:
        files = local_files(file) or [file]
        header = read_header(files[0])
        total = sum(one.stat().st_size for one in files)
    except (SwarmError, OSError):
        return ModelFacts()
    layers = header.number(f"{header.text('general.architecture')}.block_count")
    return ModelFacts(total, 0, layers, growth=1)  # packed weights stay packed


CONNECT_S: Final = 5.0
_REFUSED: Final = ("not authorized", "bad user name or password", "code:4]", "code:5]", "code:134]", "code:135]")
"""What a broker's answer says where it knows no such user or password."""

BrokerLogin = Callable[[BrokerAddress], Awaitable[None]]
"""Connects and says who it is; raises what aiomqtt raises."""


async def look_at_broker(url: str | None, ca: Path | None, find: Resolve, login: BrokerLogin) -> Diagnosis:
    """Whether telemetry would arrive: name, port, TLS, password; the first that fails."""
    if url is None:
        return ok("no-broker", "none was named; a node works without telemetry")
    try:
        address = parse_broker(url, ca)
    except ConfigError as error:
        return trouble("broker-malformed", str(error), "--mqtt mqtt://HOST:PORT")
    found = (await find(address.host)).ips
    if not found:
        return trouble("broker-unnamed", "the broker's name is not found", "check how its name is written in --mqtt")
    if max([await knock(ip, address.port) for ip in found[:2]]) < TcpAnswer.OPEN:
        mend = "check its host and port, whether it runs, and its firewall"
        return trouble("broker-silent", f"nothing answers at the broker's port {address.port}", mend)
    try:
        if address.tls is not None:
            await _shake_hands(address, address.tls)
        await login(address)
    except TimeoutError:
        return unknown("the broker accepts connections and says nothing in time")
    except (aiomqtt.MqttError, OSError) as error:
        return _explained(error, address)
    return ok("broker", "takes telemetry" + (", by TLS" if address.tls is not None else ", in plain text"))


async def _shake_hands(address: BrokerAddress, tls: ssl.SSLContext) -> None:
    """TLS alone, so that its errors are told from the broker's."""
    async with asyncio.timeout(CONNECT_S):
        _, writer = await asyncio.open_connection(address.host, address.port, ssl=tls)
    writer.transport.abort()


def _explained(error: aiomqtt.MqttError | OSError, address: BrokerAddress) -> Diagnosis:
    causes = [error, error.__cause__, error.__context__]
    said = " ".join(str(one) for one in causes if one is not None)
    if any(isinstance(one, ssl.SSLCertVerificationError) for one in causes) or "CERTIFICATE_VERIFY_FAILED" in said:
        return trouble(
            "broker-untrusted", "the broker's certificate is not trusted", "--mqtt-ca FILE, as its operator gave it"
        )
    if "WRONG_VERSION_NUMBER" in said or "record layer failure" in said.lower():
        return trouble(
            "broker-plain",
            "the broker speaks no TLS at this port",
            "--mqtt mqtt://… instead of mqtts://, or its TLS port (8883)",
        )
    if any(sign in said.lower() for sign in _REFUSED):
        what = "this user and password" if address.user else "nobody without a password"
        text = f"the broker does not accept {what}" if address.user else f"the broker accepts {what}"
        return trouble(
            "broker-refuses",
            text,
            "export CANOPY_MQTT=mqtts://USER:PASSWORD@HOST:PORT with those that its operator gave you",
        )
    if address.tls is None:
        mend = "mqtts://… if it wants TLS; else check that it is an MQTT broker"
    else:
        mend = "mqtt://… if it speaks no TLS; else check that it is an MQTT broker"
    return trouble("broker-odd", "what answers at the broker's port does not speak MQTT as expected", mend)


async def login(address: BrokerAddress, limit_s: float = CONNECT_S) -> None:
    """TryConnect as a node does within some seconds, and leave."""
    client = aiomqtt.Client(
        address.host,
        address.port,
        username=address.user,
        password=address.password,
        tls_context=address.tls,
        identifier=f"canopy-doctor-{secrets.token_hex(6)}",
        timeout=limit_s,
        logger=logging.getLogger(f"{__name__}.mqtt"),
    )
    async with client:
        pass
