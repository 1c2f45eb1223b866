"""A machine's libp2p identity: one RSA key file, the peer id that it hashes to, signatures. Owns no network.

The file has libp2p's own format, so the p2p daemon runs under the very same identity. Beside it lies one that says
which swarm the identity is of, so that a swarm that began here stays the same one.
Source: https://github.com/libp2p/specs/blob/master/peer-ids/peer-ids.md
"""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Final

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from swarm.base.errors import IdentityError
from swarm.base.files import create_file, replace_file, why_unusable
from swarm.base.ids import SWARM_ID_BYTES, PeerId, SwarmId, as_swarm_id
from swarm.protocol.peer_keys import is_usual, peer_id_of, unwrap_key, wrap_key
from swarm.protocol.succession import seal_succession

_SWARM_FILE_BYTES: Final = 64


def fresh_swarm_id() -> SwarmId:
    """The id of a swarm that begins although its first peer was of another one."""
    return SwarmId(secrets.token_bytes(SWARM_ID_BYTES))


def swarm_file(identity: Path) -> Path:
    return identity.with_suffix(".swarm")


def kept_swarm(identity: Path | None) -> SwarmId | None:
    """The swarm that an identity was of last; None where it is not known."""
    if identity is None:
        return None
    try:
        with swarm_file(identity).open("rb") as file:
            return as_swarm_id(bytes.fromhex(file.read(_SWARM_FILE_BYTES).decode("ascii").strip()))
    except (OSError, ValueError):
        return None


def keep_swarm(identity: Path | None, swarm: SwarmId) -> None:
    """Keep it; where it cannot be written, the next swarm that begins here is the identity's own."""
    if identity is not None and kept_swarm(identity) != swarm:
        with suppress(OSError):
            replace_file(swarm_file(identity), f"{swarm.hex()}\n".encode())


def forget_swarm(identity: Path, swarm: SwarmId) -> None:
    if kept_swarm(identity) == swarm:
        with suppress(OSError):
            swarm_file(identity).unlink()


_MAX_FILE_BYTES = 16_384
MAX_SUCCESSIONS: Final = 3


def succession_file(identity: Path) -> Path:
    """Beside an identity's file: what keys that it held before signed of those that took their places."""
    return identity.with_suffix(".succession")


def kept_successions(identity: Path | None) -> tuple[bytes, ...]:
    """The newest successions of an identity's file, oldest first; none where they cannot be read."""
    try:
        raw = b"" if identity is None else succession_file(identity).read_bytes()[: 2 * _MAX_FILE_BYTES]
        return tuple(bytes.fromhex(line) for line in raw.decode("ascii").split())[-MAX_SUCCESSIONS:]
    except (OSError, ValueError):
        return ()


def default_identity_path() -> Path:
    """Where this machine keeps its identity: `canopy/identity.key` in the user's configuration folder."""
    base = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(base).expanduser() / "canopy" / "identity.key"


class Identity:
    """An RSA key and the peer id that belongs to it.

    Attributes:
        path: the key's file; None for an identity in memory.
    """

    def __init__(self, key: rsa.RSAPrivateKey, path: Path | None = None) -> None:
        self._key = key
        self.path = path

    @classmethod
    def ephemeral(cls) -> Identity:
        return cls(rsa.generate_private_key(public_exponent=65537, key_size=2048))

    @classmethod
    def load(cls, path: Path) -> Identity | None:
        """Read the identity file; None where there is none.

        Raises:
            IdentityError: as `load_or_create`.
        """
        try:
            is_there = path.exists()
        except OSError as error:  # its folder is closed
            raise _unusable(path, error) from error
        return cls.load_or_create(path) if is_there else None

    @classmethod
    def load_or_create(cls, path: Path) -> Identity:
        """Read the identity file, or make one (mode 0400) where there is none.

        Raises:
            IdentityError: the file cannot be read or written, holds something else, or is open to other users.
        """
        try:
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                cls.ephemeral().save(path)
            with path.open("rb") as file:
                data, about = file.read(_MAX_FILE_BYTES + 1), os.fstat(file.fileno())
        except OSError as error:
            raise _unusable(path, error) from error
        identity = cls(_parse_private_key(data, path), path)
        # What is another user's is a secret that an orchestrator mounted: the group is how it is meant to be read.
        closed = 0o077 if about.st_uid == os.geteuid() else 0o007
        if about.st_mode & closed:
            raise IdentityError(f"identity file {path} is open to other users, who could pose as it: chmod 600 {path}")
        return identity

    def save(self, path: Path) -> None:
        """Write the identity's file (mode 0400), unless there is one: an existing file is never changed."""
        der = self._key.private_bytes(
            serialization.Encoding.DER,
            serialization.PrivateFormat.TraditionalOpenSSL,
            serialization.NoEncryption(),
        )
        with suppress(FileExistsError):
            create_file(path, wrap_key(der), mode=0o400)

    def rotate(self) -> Identity:
        """Make a new key and put it in this one's file; this one signs that, and stays beside it under its peer id.

        Raises:
            IdentityError: a program runs under this identity, or the files cannot be written; the key is as it was.
        """
        assert self.path is not None, "it was read from a file"
        heir = Identity.ephemeral()
        old, drafted = self.path.with_suffix(f".{self.peer_id}"), self.path.with_suffix(f".{heir.peer_id}")
        sealed = seal_succession(self.public_key, self.sign, heir.peer_id)
        lines = [one.hex() for one in (*kept_successions(self.path), sealed)][-MAX_SUCCESSIONS:]
        with self.lock():
            try:
                heir.save(drafted)
                self.save(old)
                replace_file(succession_file(self.path), "\n".join(lines).encode(), is_durable=True)
                drafted.replace(self.path)
            except OSError as error:
                raise _unusable(self.path, error) from error
        return Identity.load_or_create(self.path)

    @cached_property
    def public_key(self) -> bytes:
        """The public key as libp2p encodes it; its hash is the peer id."""
        der = self._key.public_key().public_bytes(
            serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        return wrap_key(der)

    @cached_property
    def peer_id(self) -> PeerId:
        """The machine's name in the swarm."""
        return peer_id_of(self.public_key)

    def sign(self, data: bytes) -> bytes:
        """Sign as libp2p does (RSA, PKCS #1 v1.5, SHA-256). Callers put a distinct prefix before their data."""
        return self._key.sign(data, padding.PKCS1v15(), hashes.SHA256())

    def derive(self, purpose: bytes) -> bytes:
        """32 secret bytes that belong to this identity and to one purpose: the same ones each time."""
        der = self._key.private_bytes(
            serialization.Encoding.DER, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        info = b"canopy-identity-1/" + purpose
        return HKDF(algorithm=hashes.SHA256(), length=32, salt=None, info=info).derive(der)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Lock this identity for one running program of this machine; the lock ends with the process.

        Raises:
            IdentityError: another program runs under the same identity file.
        """
        if self.path is None:
            yield
            return
        with self.path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise IdentityError(
                    f"identity file {self.path} is in use by another program on this machine; "
                    "stop that one, or give this one its own file with --identity FILE"
                ) from error
            yield


def _unusable(path: Path, error: OSError) -> IdentityError:
    return IdentityError(f"identity file {why_unusable(error, path)}; or choose another with --identity")


def _parse_private_key(data: bytes, path: Path) -> rsa.RSAPrivateKey:
    try:
        key = serialization.load_der_private_key(unwrap_key(data), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise IdentityError(
            f"identity file {path} holds no libp2p key; move it away or choose another with --identity"
        ) from error
    if not isinstance(key, rsa.RSAPrivateKey) or not is_usual(key.public_key()):
        raise IdentityError(f"identity file {path}: the key must be RSA with 2048 to 4096 bits and exponent 65537")
    return key
