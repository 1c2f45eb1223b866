"""`node install` and `node uninstall`: a node that starts by itself, as a service of this user. Installs no program."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Final

import tyro

import node
from node.model.config import ServeConfig
from swarm.base.cli_types import Name, headed
from swarm.base.errors import ConfigError
from swarm.base.files import replace_file

DEFAULT_NAME: Final = "canopy-node"
COMMAND_S: Final = 600.0
"""For one command: a node that is restarted lets its sessions move first."""
_NAMES: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_USERS_OWN: Final = ServeConfig(layers="auto", pause_when_busy=True, pause_on_battery=True)
"""What a service does unless it is told otherwise: a machine that is somebody's desk comes first."""


@headed(service=("service", "linger", "dry_run"), serve=("serve",))
@dataclass(frozen=True, slots=True)
class InstallService:
    """Let a node start by itself at every boot, as a service of this user, with the options of node serve."""

    serve: Annotated[ServeConfig, tyro.conf.arg(name="")] = field(default_factory=lambda: _USERS_OWN)
    service: Name = DEFAULT_NAME
    """Name of the service; each of several nodes on one machine has its own."""
    linger: bool = True
    """Start it at boot; without it, when this user logs in."""
    dry_run: bool = False
    """Change nothing: print the file and the commands."""


@dataclass(frozen=True, slots=True)
class UninstallService:
    """Stop a node that node install made a service, and remove the service."""

    service: Name = DEFAULT_NAME
    """Name of the service."""
    dry_run: bool = False
    """Change nothing: print the commands."""


@dataclass(frozen=True, slots=True)
class ServiceHost:
    """Where a service is installed."""

    platform: str
    """`sys.platform`."""
    home: Path
    environment: Mapping[str, str]
    user_id: int
    run: Callable[[Sequence[str]], tuple[int, str]]
    """Runs a command; its exit status and what it printed."""

    def systemctl(self, *words: str) -> None:
        """Tell this user's systemd something.

        Raises:
            ConfigError: it refuses.
        """
        status, said = self.run(systemctl(*words))
        if status != 0:
            raise ConfigError(f"{' '.join(systemctl(*words))} failed: {_first_line(said) or f'exit status {status}'}")

    def unit_file(self, name: str) -> Path:
        """Where the unit of this name belongs.

        Raises:
            ConfigError: nothing that is known here starts services.
        """
        if self.platform != "linux":
            raise ConfigError(f"there is no service for {self.platform}; start `node serve` with what starts programs")
        base = Path(self.environment.get("XDG_CONFIG_HOME") or self.home / ".config")
        return base / "systemd" / "user" / f"{name}.service"

    def check(self) -> None:
        """Refuse where there is nothing that could start the service.

        Raises:
            ConfigError: what is missing, and what to do.
        """
        if self.user_id == 0:
            raise ConfigError(
                "this is root, and a node needs no root: run this as the user that it is to belong to "
                "(deploy/systemd has units for a machine that only serves)"
            )
        status, said = self.run(systemctl("show-environment"))
        if status == 127:
            raise ConfigError("this machine has no systemd; start `node serve` with what starts programs here")
        if status != 0:
            raise ConfigError(
                f"systemd does not answer for this user ({_first_line(said)}); "
                "sign in on the machine or by ssh, and not with su or sudo"
            )

    def version(self) -> int:
        """systemd's; 0 where it does not say."""
        found = re.match(r"systemd (\d+)", self.run(("systemctl", "--version"))[1])
        return int(found[1]) if found else 0


def systemctl(*words: str) -> tuple[str, ...]:
    """A command for this user's systemd."""
    return ("systemctl", "--user", *words)


def this_machine(platform: str, environment: Mapping[str, str]) -> ServiceHost:
    """The machine that this program runs on."""
    return ServiceHost(platform, Path.home(), environment, os.geteuid(), run_command)


def run_command(command: Sequence[str]) -> tuple[int, str]:
    """Run a command; its exit status (127: there is none such) and its output."""
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
            timeout=COMMAND_S, check=False,
        )  # fmt: skip
    except FileNotFoundError:
        return 127, "no such program"
    except (OSError, subprocess.TimeoutExpired) as error:
        return 126, str(error)
    return done.returncode, done.stdout.strip()


def install(order: InstallService, machine: ServiceHost, say: Callable[[str], None]) -> None:
    """Write the service's file, enable it and start it; again is harmless.

    Raises:
        ConfigError: what stands in the way; nothing was changed then.
    """
    order.serve.check()
    path, unit = _place(order.service, machine)
    program = service_program(order.serve, machine.environment)
    if order.dry_run:
        say(f"{path}:\n{unit_text(order.service, program, machine.version())}")
        for command in (*(systemctl(*words) for words in _start(unit)), *_linger(order)):
            say(f"$ {' '.join(command)}")
        return
    machine.check()
    data = unit_text(order.service, program, machine.version()).encode()
    before = _own_file(path)
    is_changed = before != data
    if is_changed:
        _write(path, data)
    try:
        for words in _start(unit, "restart" if is_changed else "start"):
            machine.systemctl(*words)
    except ConfigError:
        if is_changed:
            _put_back(path, before)
        raise
    at_boot = all(machine.run(command)[0] == 0 for command in _linger(order)) and order.linger
    for line in _report(order, program, is_changed=is_changed, at_boot=at_boot):
        say(line)


def uninstall(order: UninstallService, machine: ServiceHost, say: Callable[[str], None]) -> None:
    """Stop and disable the service, and remove its file; again is harmless.

    Raises:
        ConfigError: what stands in the way.
    """
    path, unit = _place(order.service, machine)
    stop, after = ("disable", "--now", unit), ("daemon-reload",)
    if order.dry_run:
        for command in (systemctl(*stop), ("rm", str(path)), systemctl(*after)):
            say(f"$ {' '.join(command)}")
        return
    if _own_file(path) is None:
        say(f"there is no service {order.service} to remove: {path} does not exist")
        return
    machine.check()
    machine.systemctl(*stop)
    try:
        path.unlink()
    except OSError as error:
        raise ConfigError(f"{path} cannot be removed: {error.strerror}") from error
    machine.systemctl(*after)
    say(f"removed: {order.service} has stopped and will not start again; identity, models and what it gave are kept")


def _place(name: str, machine: ServiceHost) -> tuple[Path, str]:
    """The unit's file, and its name for systemd."""
    if not _NAMES.fullmatch(name):
        raise ConfigError(f"--service {name!r}: give up to 64 letters, digits and . _ -")
    return machine.unit_file(name), f"{name}.service"


def _start(unit: str, verb: str = "restart") -> tuple[tuple[str, ...], ...]:
    return ("daemon-reload",), ("enable", unit), (verb, unit)


def _linger(order: InstallService) -> tuple[tuple[str, ...], ...]:
    """Let this user's services run without a login, from boot on."""
    return (("loginctl", "enable-linger"),) if order.linger else ()


def _own_file(path: Path) -> bytes | None:
    """What `node install` wrote there before; None where there is nothing.

    Raises:
        ConfigError: something else is there, or it cannot be read.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    if MARK.encode() not in data:
        raise ConfigError(f"{path} was not written by `node install`: move it away, or choose another --service")
    return data


def _write(path: Path, data: bytes) -> None:
    """Replace a file at once; for the owner's eyes, since it may hold a password.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, data)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error


def _put_back(path: Path, before: bytes | None) -> None:
    """As it was before a start that failed."""
    if before is None:
        path.unlink(missing_ok=True)
    else:
        _write(path, before)


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0][:200]


def _report(order: InstallService, program: ServiceProgram, *, is_changed: bool, at_boot: bool) -> list[str]:
    """At most four lines: what was done, how it behaves, where to look, how to end it."""
    name = order.service
    done = "installed" if is_changed else "installed already, and unchanged"
    when = "now and at every boot" if at_boot else "now and when you log in"
    if order.linger and not at_boot:
        when += "; for every boot: sudo loginctl enable-linger $USER"
    config = order.serve
    pauses = [
        *(["while other programs need the machine"] if config.pause_when_busy else []),
        *(["on battery"] if config.pause_on_battery else []),
        *([f"in quiet hours {config.quiet_hours}"] if config.quiet_hours else []),
    ]
    habits = f"it pauses {' and '.join(pauses)}, and" if pauses else "it"
    return [
        f"{done}: {name}.service runs `{program.shown}`, {when}",
        f"{habits} updates nothing by itself",
        f"what it does and has given: node status · its log: journalctl --user -u {name} -f",
        f"stop: systemctl --user stop {name} (its sessions move first) · remove: node uninstall",
    ]


CARRIED: Final = (
    *("CC", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"),
    *("HF_ENDPOINT", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_TOKEN"),
    *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"),
    *("CANOPY_JOIN", "CANOPY_LOG", "CANOPY_MODEL", "CANOPY_NETWORK_KEY", "CANOPY_SWARMS"),
    *("SSL_CERT_FILE", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME"),
)
"""Variables that decide what `node serve` does: where they are set, the service has them too."""
PROGRAM: Final = "swarm-node"
"""The name of the installed program; another package may own the name `node`."""


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
    """The program that serves with these options, as it runs without this shell and folder."""
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
    options = [one for one in option_fields() if one.name not in ("model", "more")]
    return [
        *([config.model] if config.model else []),
        *config.more,
        *(word for one in options for word in _of(config, one)),
    ]


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
    models = [_absolute(model) for model in (*([] if config.model is None else [config.model]), *config.more)]
    return replace(config, model=next(iter(models), None), more=tuple(models[1:]), **paths)


def _absolute(model: str) -> str:
    path = Path(model).expanduser()
    return str(path.absolute()) if path.exists() else model


MARK: Final = "# Written by `node install`"
GROWING_RESTARTS: Final = 254
"""The first systemd whose waits between restarts grow."""
STOP_SLACK_S: Final = 30
"""What a node may take to stop beyond its drain."""


def unit_text(name: str, program: ServiceProgram, version: int) -> str:
    """The unit's text."""
    longer = ", and waits longer each time" if version >= GROWING_RESTARTS else ""
    growing = "RestartSteps=8\nRestartMaxDelaySec=10min\n" if version >= GROWING_RESTARTS else ""
    start, *arguments = program.command  # no variable can stand in the path of the program
    environment = {"PYTHONUNBUFFERED": "1", **program.environment}
    return f"""\
{MARK}, which writes it anew each time, and removed by `node uninstall`.
# Changes of your own: systemctl --user edit {name}
[Unit]
Description=Canopy node
# The network may be away for hours: the node is tried again for ever{longer}.
StartLimitIntervalSec=0

[Service]
Type=exec
ExecStart={" ".join([quoted(start), *(quoted(word.replace("$", "$$")) for word in arguments)])}
{"".join(f"Environment={quoted(f'{key}={value}')}{chr(10)}" for key, value in sorted(environment.items()))}\
# SIGTERM to the node alone: it lets its sessions move and ends its own helpers. A second signal ends it at once.
KillMode=mixed
KillSignal=SIGTERM
TimeoutStopSec={program.drain_s + STOP_SLACK_S:.0f}
# 2: an option that does not exist; trying again would not help
RestartPreventExitStatus=2
Restart=on-failure
RestartSec={10 if growing else 60}
{growing}
# It makes way: for processor and disk it comes last, and where memory runs out it goes first.
Nice=10
CPUWeight=20
IOSchedulingClass=idle
IOWeight=20
OOMScoreAdjust=500
TasksMax=1024
LimitNOFILE=16384

# What it cannot do
UMask=0077
NoNewPrivileges=yes
LockPersonality=yes
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX AF_NETLINK
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
SystemCallArchitectures=native

[Install]
WantedBy=default.target
"""


def quoted(word: str) -> str:
    """A word as systemd reads it back: its escapes and specifiers mean nothing in it."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return '"' + escaped.replace("\n", "\\n").replace("\t", "\\t") + '"'
