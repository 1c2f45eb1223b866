"""`swarm private`: a folder with all that the machines of a private swarm need: keys, certificate, passwords.

The network key is for the swarm itself: who has it not is no member. Certificates and passwords are for the broker.

Existing files stay: running it again adds what is missing. Only the broker's password file is rewritten, and keeps its
lines. Owns files, no network.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import tyro
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding
from rich.console import Console
from rich.text import Text

from swarm.base.cli_types import Count, Folder, Host, Peer, Port
from swarm.base.errors import ConfigError
from swarm.base.files import replace_file
from swarm.commands.certificates import (
    authority,
    broker_certificate,
    general_name,
    key_pem,
    names_in,
    new_key,
    new_password,
    password_line,
    read_key,
)
from swarm.directory.identity import Identity
from swarm.link.egress.streams import bracketed
from swarm.link.network_key import NetworkKey
from swarm.protocol.peer_keys import is_peer_id

MAX_NODES = 1_000
HEALTH_USER = "health"

_Parsed = TypeVar("_Parsed")


@dataclass(frozen=True, slots=True)
class Private:
    """Make the keys of a private swarm, and the broker's certificate and passwords; run again, add what is missing.

    Attributes:
        folder: where they are kept; it holds every secret of the swarm.
        host: IP address or name under which nodes reach the broker; may be repeated, nodes get the first.
        bootstrap_host: IP address or name of the bootstrap peer, where it differs (default: the broker's).
        nodes: how many nodes get an identity made here.
        peer: peer id of a node that keeps its own identity; may be repeated (default: none).
        broker_port: TCP port of the broker.
        bootstrap_port: TCP port of the bootstrap peer.
    """

    folder: tyro.conf.Positional[Folder]
    host: tyro.conf.UseAppendAction[tuple[Host, ...]]
    bootstrap_host: Host | None = None
    nodes: Count = 3
    peer: tyro.conf.UseAppendAction[tuple[Peer, ...]] = ()
    broker_port: Port = 8_883
    bootstrap_port: Port = 31_337

    def check(self) -> None:
        """Refuse wrong options.

        Raises:
            ConfigError: names the option.
        """
        if not self.host:
            raise ConfigError("under which name do nodes reach the broker? give --host NAME")
        for host in (*self.host, *([self.bootstrap_host] if self.bootstrap_host else [])):
            general_name(host)
        for peer in self.peer:
            if not is_peer_id(peer):
                raise ConfigError(f"--peer {peer[:80]!r} is no peer id; `node serve` prints it as it starts: Qm…")
        if not 0 <= self.nodes <= MAX_NODES:
            raise ConfigError(f"--nodes {self.nodes}: give 0 to {MAX_NODES}")
        for option, port in (("--broker-port", self.broker_port), ("--bootstrap-port", self.bootstrap_port)):
            if not 0 < port < 65_536:
                raise ConfigError(f"{option} {port}: a TCP port is 1 to 65535")


def private(command: Private, console: Console) -> None:
    """Make what is missing, and print what goes to which machine.

    Raises:
        ConfigError: an option is wrong, or a file cannot be used.
    """
    command.check()
    try:
        made = PrivateFolder(command).fill()
    except OSError as error:
        raise ConfigError(f"{error.filename or command.folder}: {error.strerror}") from error
    console.print(Text(f"{made} files made in {command.folder}; those that were there are as they were"))
    for line in _placements(command.folder):
        console.print(Text(line))


def _placements(folder: Path) -> list[str]:
    members = sorted((path.parent.name for path in folder.glob("*/node.env")), key=_by_number)
    return [
        f"  {folder}/broker     to the broker's machine",
        f"  {folder}/bootstrap  to the bootstrap peer's machine",
        f"  {folder}/health     to the health page's machine",
        *(f"  {folder}/{name}     to that node's machine" for name in members),
        f"{folder}/ca.key stays here: whoever has it can pose as the broker",
        f"{folder}/network.key makes its owner a member; `swarm invite` passes it on to clients",
    ]


def _by_number(name: str) -> tuple[bool, int, str]:
    last = name.rsplit("-", 1)[-1]
    return (not last.isdigit(), int(last) if last.isdigit() else 0, name)


class PrivateFolder:
    """The files of one private swarm."""

    def __init__(self, command: Private) -> None:
        self._command = command
        self._folder = command.folder
        self._created = 0
        self._now = datetime.datetime.now(datetime.UTC)

    def fill(self) -> int:
        """Make what is missing; returns how many files that were.

        Raises:
            ConfigError: a file there holds something else.
            OSError: a file cannot be read or written.
        """
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for name in ("broker", "bootstrap", "health"):
            (self._folder / name).mkdir(exist_ok=True, mode=0o700)
        self._certify()
        self._write(self._network_key, NetworkKey.fresh().file_line)
        self._identity("bootstrap")
        self._admit("bootstrap")
        self._write(self._folder / "compose.env", f"CANOPY_JOIN={self._join}\n".encode())
        self._member("health", HEALTH_USER, "health.env")
        for number in range(1, self._command.nodes + 1):
            name = f"node-{number}"
            (self._folder / name).mkdir(exist_ok=True, mode=0o700)
            self._member(name, self._identity(name).peer_id, "node.env")
        for peer in self._command.peer:
            name = f"node-{peer[-8:]}"
            (self._folder / name).mkdir(exist_ok=True, mode=0o700)
            self._member(name, peer, "node.env")
        return self._created

    @cached_property
    def _join(self) -> str:
        host = self._command.bootstrap_host or self._command.host[0]
        name = general_name(host)
        kind = f"ip{name.value.version}" if isinstance(name, x509.IPAddress) else "dns"
        return f"/{kind}/{host}/tcp/{self._command.bootstrap_port}/p2p/{self._identity('bootstrap').peer_id}"

    @property
    def _network_key(self) -> Path:
        return self._folder / "network.key"

    def _admit(self, name: str) -> None:
        """Make a machine a member."""
        NetworkKey.load(self._network_key)  # refuses a damaged one before it is handed on
        self._write(self._folder / name / "network.key", self._network_key.read_bytes())

    def _certify(self) -> None:
        ca, own = self._folder / "ca", self._folder / "broker" / "broker"
        for base in (ca, own):
            if not base.with_suffix(".key").exists():
                self._write(base.with_suffix(".key"), key_pem(new_key()))
        ca_key, own_key = (_parsed(base.with_suffix(".key"), read_key) for base in (ca, own))
        if not ca.with_suffix(".crt").exists():
            self._write(ca.with_suffix(".crt"), _pem(authority(ca_key, self._now)), 0o644)
        issuer = _parsed(ca.with_suffix(".crt"), x509.load_pem_x509_certificate)
        if issuer.public_key() != ca_key.public_key():
            raise ConfigError(f"{ca}.crt and {ca}.key do not belong together")
        path = own.with_suffix(".crt")
        if not path.exists():
            made = broker_certificate(own_key.public_key(), self._command.host, (issuer, ca_key), self._now)
            self._write(path, _pem(made), 0o644)
        self._check_broker(path, _parsed(path, x509.load_pem_x509_certificate))

    def _check_broker(self, path: Path, certificate: x509.Certificate) -> None:
        known = names_in(certificate)
        missing = [host for host in self._command.host if general_name(host) not in known]
        if missing:
            raise ConfigError(f"{path} is not for {', '.join(missing)}: delete it to have a new one made")
        if certificate.not_valid_after_utc - self._now < datetime.timedelta(days=30):
            ends = certificate.not_valid_after_utc
            raise ConfigError(f"{path} ends on {ends:%Y-%m-%d}: delete it to have a new one made, and copy that")

    def _identity(self, name: str) -> Identity:
        path = self._folder / name / "identity.key"
        if not path.exists():
            self._created += 1
        return Identity.load_or_create(path)

    def _member(self, name: str, user: str, file: str) -> None:
        """Give a user a password and the settings with which a program finds the swarm."""
        self._admit(name)
        self._write(self._folder / name / "ca.crt", (self._folder / "ca.crt").read_bytes(), 0o644)
        env = self._folder / name / file
        if env.exists():
            return
        password = new_password()
        self._set_password(user, password)  # first: a password in an env file must work
        url = f"mqtts://{user}:{password}@{bracketed(self._command.host[0])}:{self._command.broker_port}"
        self._write(env, f"CANOPY_JOIN={self._join}\nCANOPY_MQTT={url}\n".encode())

    def _set_password(self, user: str, password: str) -> None:
        path = self._folder / "broker" / "passwords"
        lines = _parsed(path, bytes.decode).splitlines() if path.exists() else []
        kept = [line for line in lines if not line.startswith(f"{user}:")]
        _replace(path, "\n".join([*kept, password_line(user, password), ""]).encode(), 0o600)

    def _write(self, path: Path, data: bytes, mode: int = 0o600) -> None:
        if not path.exists():
            _replace(path, data, mode)
            self._created += 1


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(Encoding.PEM)


def _parsed(path: Path, read: Callable[[bytes], _Parsed]) -> _Parsed:
    """What a file holds.

    Raises:
        ConfigError: something else.
    """
    try:
        return read(path.read_bytes())
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise ConfigError(f"{path} cannot be read as what its name says; move it away to have a new one made") from None


def _replace(path: Path, data: bytes, mode: int) -> None:
    """Write a file atomically; its owner is that of its folder."""

    def write(draft: Path) -> None:
        draft.write_bytes(data)
        if os.geteuid() == 0:
            folder = path.parent.stat()
            os.chown(draft, folder.st_uid, folder.st_gid)

    replace_file(path, write, mode=mode)
