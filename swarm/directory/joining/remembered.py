"""The swarms that this machine joined, so that a command needs no address the next time. Owns one file and a folder.

`swarms.json` beside the machine's identity holds for each swarm its id, the peers that were met there, the addresses of
this machine's own, the model, its fingerprint, the broker and the name of the network key; the key itself lies in
`networks/NAME.key`. All are open to their user alone. The file is written whole or not at all. One that cannot be read
is put aside and begun anew; trouble with it is one line and never stops a command.

A swarm is known by its id, or by its network key. Release 0.2 knew neither id nor `here`: what it wrote is one swarm by
the peers in common, until the first of them says an id. A peer stands in one open swarm, where it was met last.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Final

from swarm.base.declared import Broken, JsonForm, Printable, Rule, Size
from swarm.base.errors import ConfigError, RemoteProtocolError
from swarm.base.files import replace_file, strict_json
from swarm.base.ids import SWARM_ID_BYTES, SwarmId
from swarm.directory.dht.addresses import check_join_address
from swarm.directory.identity import default_identity_path
from swarm.link.broker_address import parse_broker
from swarm.link.network_key import NetworkKey

MAX_SWARMS: Final = 16
MAX_PEERS: Final = 16
"""Addresses per swarm; those met last come first."""
MAX_FILE_BYTES: Final = 256 << 10
MAX_ASIDE: Final = 3
"""Damaged files that are kept."""
MAX_HERE: Final = 8
"""Addresses of this machine's own peers."""
_FORMAT: Final = 2
_FORMATS: Final = (1, 2)
"""What is read: release 0.2 wrote 1, in which a swarm has no id, and this machine is one of its peers."""
_MAX_TEXT: Final = 1_024
_NETWORK: Final = re.compile(r"[0-9a-f]{16}")
_SWARM: Final = re.compile(rf"[0-9a-f]{{{2 * SWARM_ID_BYTES}}}")
_NONE: Final = "none"
"""In place of a file's name in `CANOPY_SWARMS`: nothing is remembered."""

logger = logging.getLogger(__name__)


def _passes(check: Callable[[str], object], text: str) -> bool:
    try:
        check(text)
    except ConfigError:
        return False
    return True


_TEXT: Final = Printable(_MAX_TEXT, 1)
_PeerAddress = Annotated[str, Printable(_MAX_TEXT), Rule("a peer's address", partial(_passes, check_join_address))]


@dataclass(frozen=True, slots=True)
class RememberedSwarm:
    """A swarm that was joined.

    Attributes:
        peers: multiaddresses to join through, those met last first; none of this machine's own.
        model: hub id or folder that was served or used; None where no model was named.
        fingerprint: how the model's begins; None where it is not known.
        broker: URL of its MQTT broker, its password included.
        network: name of the network key of a private swarm.
        joined_at: Unix seconds.
        swarm: the id of an open swarm, in hex; None in a private one, and where no peer has said one.
        here: multiaddresses of this machine's own peers of the swarm, for other programs of it.
    """

    peers: Annotated[tuple[_PeerAddress, ...], Size(MAX_PEERS)]
    model: Annotated[str, _TEXT] | None = None
    fingerprint: Annotated[str, _TEXT] | None = None
    broker: Annotated[str, _TEXT, Rule("a broker's URL", partial(_passes, parse_broker))] | None = field(
        default=None, repr=False
    )
    network: Annotated[str, Printable(_MAX_TEXT, form=_NETWORK)] | None = None
    joined_at: int = 0
    swarm: Annotated[str, Printable(_MAX_TEXT, form=_SWARM)] | None = None
    here: Annotated[tuple[_PeerAddress, ...], Size(MAX_HERE)] = ()

    def check(self) -> None:
        """Refuse one without a peer or a time.

        Raises:
            Broken: it is such.
        """
        if not (self.peers or self.here) or not self.joined_at:
            raise Broken("swarms", "a swarm has no peers, or no time")

    @property
    def peer_ids(self) -> frozenset[str]:
        return frozenset(map(peer_of, self.peers))

    @property
    def own_ids(self) -> frozenset[str]:
        return frozenset(map(peer_of, self.here))

    @property
    def swarm_id(self) -> SwarmId | None:
        return None if self.swarm is None else SwarmId(bytes.fromhex(self.swarm))

    def is_same(self, other: RememberedSwarm) -> bool:
        """Whether both are one swarm: of one network key or id, and where one has no id, with a peer in common.

        A machine of this user's own says nothing: it may have been in both.
        """
        if self.network != other.network:
            return False
        if self.network is not None:
            return True
        if None not in (self.swarm, other.swarm):
            return self.swarm == other.swarm
        own = self.own_ids | other.own_ids
        return bool((self.peer_ids & other.peer_ids) - own)

    def without(self, peers: Collection[str]) -> RememberedSwarm:
        """The same without some peers, by their ids."""
        kept, here = ([one for one in each if peer_of(one) not in peers] for each in (self.peers, self.here))
        return replace(self, peers=tuple(kept), here=tuple(here))

    def merged(self, earlier: RememberedSwarm) -> RememberedSwarm:
        """What is known of it now, and of what was known before whatever it does not replace."""
        met = self.peer_ids  # their earlier addresses may lead nowhere by now
        here = (*self.here, *(one for one in earlier.here if peer_of(one) not in self.own_ids))[:MAX_HERE]
        own = frozenset(map(peer_of, here))
        known = (*self.peers, *(peer for peer in earlier.peers if peer_of(peer) not in met))
        peers = tuple(one for one in known if peer_of(one) not in own)[:MAX_PEERS]
        same_model = self.model is None or self.model == earlier.model
        return replace(
            self,
            peers=peers,
            model=self.model or earlier.model,
            fingerprint=self.fingerprint or (earlier.fingerprint if same_model else None),
            broker=self.broker or earlier.broker,
            swarm=self.swarm or earlier.swarm,
            here=here,
        )


def peer_of(address: str) -> str:
    return address.rpartition("/")[2]


class SwarmMemory:
    """The file of remembered swarms; every method reads it anew, since other programs write it too.

    Attributes:
        path: of the file; None remembers nothing.
        clock: Unix seconds.
    """

    def __init__(self, path: Path | None, clock: Callable[[], float] = time.time) -> None:
        """Use a file, which need not be there."""
        self.path = path
        self.clock = clock
        self._has_complained = False

    @classmethod
    def of_user(cls) -> SwarmMemory:
        """The user's own; `CANOPY_SWARMS` names another file, or "none"."""
        named = os.environ.get("CANOPY_SWARMS")
        if named == _NONE:
            return cls(None)
        return cls(Path(named).expanduser() if named else default_identity_path().with_name("swarms.json"))

    def swarms(self) -> list[RememberedSwarm]:
        """Those that are remembered, the one joined last first; none where the file cannot be used."""
        try:
            return self._read()
        except _OfNewerRelease as error:
            self._complain(str(error))
        except OSError as error:
            self._complain(f"{self.path}: {error.strerror or error}; no swarm is remembered")
        return []

    def remember(
        self, swarm: RememberedSwarm, *, is_look: bool = False, others: Iterable[tuple[SwarmId, str]] = ()
    ) -> None:
        """Put a swarm first, with the time; never raises for trouble with the file.

        Args:
            is_look: it was only looked at: it does not come before those that this machine takes part in.
            others: peers that say that they are of other swarms: whose, and the address.
        """
        if self.path is None or not (swarm.peers or swarm.here):
            return
        try:
            with self._locked() as known:
                now = round(self.clock())
                found = _with(known, replace(swarm, joined_at=now), is_look=is_look)
                for other, address in others:
                    said = RememberedSwarm((address,), swarm=other.hex(), joined_at=now)
                    if not {peer_of(address)} & {peer for one in found for peer in one.own_ids}:
                        found = _with(found, said, is_look=True)
                self._write(found[:MAX_SWARMS])
        except _OfNewerRelease as error:
            self._complain(str(error))
        except OSError as error:
            self._complain(f"{self.path}: {error.strerror or error}; this swarm is not remembered")

    def forget(self, chosen: Sequence[RememberedSwarm]) -> None:
        """Forget swarms, and the keys that no other one has.

        Raises:
            ConfigError: the file cannot be written.
        """
        try:
            with self._locked() as known:
                left = [one for one in known if one not in chosen]
                self._write(left)
        except (OSError, _OfNewerRelease) as error:
            raise ConfigError(f"{self.path}: {getattr(error, 'strerror', None) or error}") from error
        used = {one.network for one in left}
        for name in {one.network for one in chosen} - used - {None}:
            with suppress(OSError):
                self.key_path(str(name)).unlink()

    def key_path(self, name: str) -> Path:
        """Where the network key of this name lies."""
        assert self.path is not None, "whoever keeps keys has a file"
        return self.path.parent / "networks" / f"{name}.key"

    def key(self, name: str) -> NetworkKey:
        """A network key.

        Raises:
            ConfigError: it is not there any more, or cannot be used.
        """
        found = NetworkKey.load(self.key_path(name))
        if found.name != name:
            raise ConfigError(f"network key {self.key_path(name)} is not the one of its name")
        return found

    def keep_key(self, key: NetworkKey) -> None:
        """Write a network key's file, unless it is there; trouble is one line."""
        if self.path is None:
            return
        try:
            key.save(self.key_path(key.name))
        except ConfigError as error:
            self._complain(str(error))

    def _read(self) -> list[RememberedSwarm]:
        if self.path is None:
            return []
        try:
            with self.path.open("rb") as file:
                data = file.read(MAX_FILE_BYTES + 1)
        except FileNotFoundError:
            return []
        try:
            return _parsed(data)
        except (ValueError, RemoteProtocolError) as error:
            aside = self._put_aside()
            self._complain(f"{self.path} is damaged ({error}) and was put aside as {aside}; no swarm is remembered")
            return []

    def _put_aside(self) -> Path:
        """Move the damaged file to a free name, or over the last of them."""
        assert self.path is not None, "it was read"
        names = [self.path.with_name(f"{self.path.name}.damaged-{number}") for number in range(1, MAX_ASIDE + 1)]
        aside = next((one for one in names if not one.exists()), names[-1])
        self.path.replace(aside)
        return aside

    @contextmanager
    def _locked(self) -> Iterator[list[RememberedSwarm]]:
        """What is remembered, while nobody else changes it."""
        if self.path is None:
            raise OSError("CANOPY_SWARMS=none")
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with self.path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield self._read()

    def _write(self, swarms: Iterable[RememberedSwarm]) -> None:
        assert self.path is not None, "it was read"
        text = json.dumps({"format": _FORMAT, "swarms": [asdict(one) for one in swarms]}, indent=1)
        replace_file(self.path, f"{text}\n".encode())

    def _complain(self, text: str) -> None:
        """Say it once: a node looks again and again."""
        if not self._has_complained:
            self._has_complained = True
            logger.warning("%s", text)


def _with(known: Sequence[RememberedSwarm], swarm: RememberedSwarm, *, is_look: bool) -> list[RememberedSwarm]:
    """What is remembered once a swarm was met: in one entry, and whoever was met there in no other open one."""
    like = [one for one in known if one.is_same(swarm)]
    same = [
        one for one in like if one.swarm == swarm.swarm
    ] or like  # one without an id is another, if this one is known
    merged = swarm.merged(RememberedSwarm(()))
    for one in same:
        merged = merged.merged(one)
    place = 0 if not is_look else known.index(same[0]) if same else len(known)
    left = [*known[:place], merged, *(one for one in known[place:] if one not in same)]
    moved = swarm.own_ids | (swarm.peer_ids if swarm.network is None else frozenset())
    own = frozenset(peer for one in left for peer in one.own_ids)
    apart = [one if one is merged else one.without(moved if one.network is None else swarm.own_ids) for one in left]
    none_of_own = [replace(one, peers=tuple(peer for peer in one.peers if peer_of(peer) not in own)) for one in apart]
    return [one for one in none_of_own if one.peers or one.here]


class _OfNewerRelease(Exception):
    """The file is another release's, and must not be overwritten."""


_SWARMS: Final = JsonForm(RememberedSwarm, name="swarms")


def _parsed(data: bytes) -> list[RememberedSwarm]:
    """The swarms in a file.

    Raises:
        ValueError, RemoteProtocolError: it holds something else.
        _OfNewerRelease: a later release wrote it.
    """
    if len(data) > MAX_FILE_BYTES:
        raise ValueError(f"more than {MAX_FILE_BYTES} bytes")
    found = strict_json(data)
    if not isinstance(found, dict) or type(found.get("format")) is not int:
        raise ValueError("no list of swarms")
    if found["format"] not in _FORMATS:
        raise _OfNewerRelease("the remembered swarms are of a newer release of Canopy: update this one, or use --join")
    swarms = found.get("swarms")
    if not isinstance(swarms, list) or len(swarms) > MAX_SWARMS:
        raise ValueError("no list of swarms")
    return [_SWARMS.decode(one) for one in swarms]
