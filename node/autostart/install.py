"""`node install` and `node uninstall`: a node that starts by itself, as a service of this user. Installs no program."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final, Literal

import tyro

from node.autostart.arguments import ServiceProgram, service_program
from node.autostart.other_systems import UNTESTED, launchd_plist, windows_task
from node.autostart.systemd import MARK, unit_text
from node.config import ServeConfig
from swarm.errors import ConfigError
from swarm.runtime.cli_types import Name, headed
from swarm.runtime.files import replace_file

System = Literal["systemd", "launchd", "windows"]
SYSTEMS: Final[Mapping[str, System]] = {"linux": "systemd", "darwin": "launchd", "win32": "windows"}
"""By `sys.platform`."""
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
    """Where a service is installed.

    Attributes:
        platform: `sys.platform`.
        home: the user's folder.
        environment: of this shell.
        user_id: 0 is root.
        run: runs a command; its exit status and what it printed.
    """

    platform: str
    home: Path
    environment: Mapping[str, str]
    user_id: int
    run: Callable[[Sequence[str]], tuple[int, str]]

    @property
    def system(self) -> System:
        """What starts services here.

        Raises:
            ConfigError: nothing that is known here.
        """
        system = SYSTEMS.get(self.platform)
        if system is None:
            raise ConfigError(f"there is no service for {self.platform}; start `node serve` with what starts programs")
        return system


@dataclass(frozen=True, slots=True)
class ServicePlan:
    """What is written, and what is run.

    Attributes:
        path: of the file.
        data: its content.
        start: commands that enable and start it once it is written.
        stop: commands that stop and disable it while it is there.
        after: commands once it is removed.
    """

    path: Path
    data: bytes
    start: tuple[tuple[str, ...], ...]
    stop: tuple[tuple[str, ...], ...]
    after: tuple[tuple[str, ...], ...] = ()


def this_machine(platform: str, environment: Mapping[str, str]) -> ServiceHost:
    """The machine that this program runs on."""
    user_id = os.geteuid() if hasattr(os, "geteuid") else 1
    return ServiceHost(platform, Path.home(), environment, user_id, run_command)


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
    _check_name(order.service)
    program = service_program(order.serve, machine.environment)
    if order.dry_run:
        plan = _plan(machine, order.service, program, _version(machine))
        shown = plan.data.decode("utf-16" if machine.system == "windows" else "utf-8")
        say(f"{plan.path}:\n{shown}")
        for command in (*plan.start, *_linger(order, machine)):
            say(f"$ {' '.join(command)}")
        return
    _check_manager(machine)
    plan = _plan(machine, order.service, program, _version(machine))
    before = _own_file(plan.path, machine.system)
    changed = before != plan.data
    if changed:
        _write(plan.path, plan.data)
    try:
        for command in plan.start:
            _run(machine, ("systemctl", "--user", "start", command[-1])
                 if not changed and command[:3] == ("systemctl", "--user", "restart") else command)  # fmt: skip
    except ConfigError:
        if changed:
            _put_back(plan.path, before)
        raise
    at_boot = all(machine.run(command)[0] == 0 for command in _linger(order, machine)) and order.linger
    for line in _report(order, machine, program, changed=changed, at_boot=at_boot):
        say(line)


def uninstall(order: UninstallService, machine: ServiceHost, say: Callable[[str], None]) -> None:
    """Stop and disable the service, and remove its file; again is harmless.

    Raises:
        ConfigError: what stands in the way.
    """
    _check_name(order.service)
    plan = _plan(machine, order.service, ServiceProgram(("",), {}, 0.0, ""), 0)
    if order.dry_run:
        for command in (*plan.stop, ("rm", str(plan.path)), *plan.after):
            say(f"$ {' '.join(command)}")
        return
    if _own_file(plan.path, machine.system) is None:
        say(f"there is no service {order.service} to remove: {plan.path} does not exist")
        return
    _check_manager(machine)
    for command in plan.stop:
        _run(machine, command)
    try:
        plan.path.unlink()
    except OSError as error:
        raise ConfigError(f"{plan.path} cannot be removed: {error.strerror}") from error
    for command in plan.after:
        _run(machine, command)
    say(f"removed: {order.service} has stopped and will not start again; identity, models and what it gave are kept")


def _plan(machine: ServiceHost, name: str, program: ServiceProgram, version: int) -> ServicePlan:
    home = machine.home
    match machine.system:
        case "systemd":
            base = Path(machine.environment.get("XDG_CONFIG_HOME") or home / ".config")
            unit, control = f"{name}.service", ("systemctl", "--user")
            return ServicePlan(
                base / "systemd" / "user" / unit,
                unit_text(name, program, version).encode(),
                start=((*control, "daemon-reload"), (*control, "enable", unit), (*control, "restart", unit)),
                stop=((*control, "disable", "--now", unit),),
                after=((*control, "daemon-reload"),),
            )
        case "launchd":
            path = home / "Library" / "LaunchAgents" / f"{name}.plist"
            target = f"gui/{machine.user_id}"
            data = launchd_plist(name, program, str(home / "Library" / "Logs" / f"{name}.log"))
            return ServicePlan(
                path,
                data,
                start=(("launchctl", "bootstrap", target, str(path)),),
                stop=(("launchctl", "bootout", f"{target}/{name}"),),
            )
        case "windows":
            path = Path(machine.environment.get("LOCALAPPDATA") or home) / "Canopy" / f"{name}.xml"
            return ServicePlan(
                path,
                windows_task(program),
                start=(
                    ("schtasks", "/Create", "/F", "/TN", name, "/XML", str(path)),
                    ("schtasks", "/Run", "/TN", name),
                ),
                stop=(("schtasks", "/End", "/TN", name), ("schtasks", "/Delete", "/F", "/TN", name)),
            )


def _check_name(name: str) -> None:
    if not _NAMES.fullmatch(name):
        raise ConfigError(f"--service {name!r}: give up to 64 letters, digits and . _ -")


def _check_manager(machine: ServiceHost) -> None:
    """Refuse where there is nothing that could start the service.

    Raises:
        ConfigError: names what is missing, and what to do.
    """
    if machine.system != "systemd":
        return
    if machine.user_id == 0:
        raise ConfigError(
            "this is root, and a node needs no root: run this as the user that it is to belong to "
            "(deploy/systemd has units for a machine that only serves)"
        )
    status, said = machine.run(("systemctl", "--user", "show-environment"))
    if status == 127:
        raise ConfigError("this machine has no systemd; start `node serve` with what starts programs here")
    if status != 0:
        raise ConfigError(
            f"systemd does not answer for this user ({_first_line(said)}); "
            "sign in on the machine or by ssh, and not with su or sudo"
        )


def _version(machine: ServiceHost) -> int:
    """systemd's; 0 where it does not say."""
    if machine.system != "systemd":
        return 0
    found = re.match(r"systemd (\d+)", machine.run(("systemctl", "--version"))[1])
    return int(found[1]) if found else 0


def _linger(order: InstallService, machine: ServiceHost) -> tuple[tuple[str, ...], ...]:
    """Let this user's services run without a login, from boot on."""
    return (("loginctl", "enable-linger"),) if order.linger and machine.system == "systemd" else ()


def _own_file(path: Path, system: System) -> bytes | None:
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
    mark = {"systemd": MARK.encode(), "launchd": UNTESTED.encode(), "windows": UNTESTED.encode("utf-16-le")}[system]
    if mark not in data:
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


def _run(machine: ServiceHost, command: tuple[str, ...]) -> None:
    status, said = machine.run(command)
    if status != 0:
        raise ConfigError(f"{' '.join(command)} failed: {_first_line(said) or f'exit status {status}'}")


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0][:200]


def _report(
    order: InstallService, machine: ServiceHost, program: ServiceProgram, *, changed: bool, at_boot: bool
) -> list[str]:
    """At most four lines: what was done, how it behaves, where to look, how to end it."""
    name = order.service
    if machine.system != "systemd":
        return [UNTESTED, f"installed: {name} runs `{program.shown}` now and when you log in", "remove: node uninstall"]
    done = "installed" if changed else "installed already, and unchanged"
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
