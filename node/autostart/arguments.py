"""From options back to a command line, and what of the environment goes with it: a service runs what was asked for.

Generic over the fields of the dataclass that the command line is built from. Starts nothing.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import node
from node.config import ServeConfig

CARRIED: Final = (
    *("CC", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"),
    *("HF_ENDPOINT", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_TOKEN"),
    *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"),
    *("CANOPY_JOIN", "CANOPY_LOG", "CANOPY_MODEL", "CANOPY_NETWORK_KEY", "CANOPY_SWARMS"),
    *("SSL_CERT_FILE", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME"),
)
"""Variables that decide what `node serve` does: where they are set, the service has them too."""
PROGRAM: Final = "swarm-node"
"""Nobody else's name, as `node` may be."""


@dataclass(frozen=True, slots=True)
class ServiceProgram:
    """What a service runs.

    Attributes:
        command: absolute path and arguments.
        environment: variables that it has besides the system's own; secrets may be among them.
        drain_s: how long it may take to stop.
        shown: the command as a person would type it.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str]
    drain_s: float
    shown: str


def service_program(config: ServeConfig, environment: Mapping[str, str]) -> ServiceProgram:
    """The program that serves with these options, as it runs without this shell and folder.

    Args:
        config: the options, checked.
        environment: of this shell.
    """
    carried = {name: environment[name] for name in CARRIED if environment.get(name)}
    if config.mqtt is not None:  # others of the machine can read a command line, and it may hold a password
        carried["CANOPY_MQTT"] = config.mqtt
    rest = ["serve", *arguments(_settled(replace(config, mqtt=None)))]
    script = Path(sys.executable).with_name(PROGRAM)
    if script.exists():
        start = [str(script)]
    else:
        start = [sys.executable, "-m", "node.cli"]
        carried["PYTHONPATH"] = str(Path(node.__file__).absolute().parents[1])
    return ServiceProgram((*start, *rest), carried, config.drain, " ".join(["node", *rest]))


def arguments(config: ServeConfig) -> list[str]:
    """The arguments from which the command line would be read as this."""
    options = [one for one in option_fields() if one.name != "model"]
    return [*([config.model] if config.model else []), *(word for one in options for word in _of(config, one))]


def option_fields() -> list[dataclasses.Field[Any]]:
    """The fields of `node serve` that its command line sets; one of a type `Found[…]` it does not."""
    return [one for one in dataclasses.fields(ServeConfig) if not str(one.type).startswith("Found[")]


def _of(config: ServeConfig, one: dataclasses.Field[Any]) -> Iterator[str]:
    value, option = getattr(config, one.name), f"--{one.name.replace('_', '-')}"
    if value is None or value == one.default:
        return
    if isinstance(value, bool):
        yield option if value else option.replace("--", "--no-", 1)
        return
    for item in value if isinstance(value, tuple) else (value,):
        word = f"{item:g}" if isinstance(item, float) and float(f"{item:g}") == item else str(item)
        if word.startswith("-"):
            yield f"{option}={word}"
        else:
            yield from (option, word)


def _settled(config: ServeConfig) -> ServeConfig:
    """The same wherever it is started: paths are absolute, a model's folder or file too."""
    paths: dict[str, Any] = {
        one.name: value.expanduser().absolute()
        for one in dataclasses.fields(config)
        if isinstance(value := getattr(config, one.name), Path)
    }
    model = config.model
    if model is not None and Path(model).expanduser().exists():
        model = str(Path(model).expanduser().absolute())
    return replace(config, model=model, **paths)
