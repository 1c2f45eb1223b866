"""What one peer of the directory holds for others, and whose turn it is when that is full. Pure; time is a parameter.

An item is taken only from the peer that signed it, under a key that it belongs to, and until the signed expiry. Within
those rules anybody may file items, so places are shared: first among the addresses that items come from, then among
the signers of one address. Where all places are taken, a newcomer of an address (signer) that holds at least two fewer
than the one that holds most takes the place of that one's youngest item; every other newcomer is refused. So what is
there stays, whoever floods the directory, and one more place costs a stranger one more address.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, TypeVar

from swarm.base.ids import PeerId, SwarmId
from swarm.directory.model_pointer import open_pointer
from swarm.directory.node_record import open_sealed
from swarm.directory.registry import StorageKey, item_key, models_key, record_keys, storage_key
from swarm.directory.sealing import RecordError
from swarm.protocol.peer_keys import is_peer_id

_Party = TypeVar("_Party")

SWEEP_S: Final = 1.0
"""Items that have expired are looked for this often."""
OVERHEAD_BYTES: Final = 256
"""What an item takes in memory beyond its data, as it is counted here."""


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """How much one peer holds.

    Attributes:
        total_bytes: of all items.
        key_bytes: of the records under one key; two such keys travel in one answer.
        list_bytes: of the pointers under one key; eight such keys travel in one answer.
        key_items: items under one key.
        pointers_per_model: nodes that vouch for a model, and whose pointers are kept.
        pointers_per_signer: models that one node may list.
        records_per_signer: keys under which one node's records may lie: two spans of the deepest model, and its own.
    """

    total_bytes: int = 32 << 20
    key_bytes: int = 1 << 20
    list_bytes: int = 256 << 10
    key_items: int = 1_024
    pointers_per_model: int = 3
    pointers_per_signer: int = 8
    records_per_signer: int = 66


@dataclass(frozen=True, slots=True)
class FiledItem:
    """Something that may lie in the directory: a node's record, or its pointer to a model.

    Attributes:
        key: where it lies.
        subkey: which of the items there it is.
        signer: whose word it is.
        expires_at: DHT time in seconds.
        data: the sealed bytes.
        left: whether it takes back what was said before.
        group: the fingerprint, for a pointer; empty for a record.
        origin: where it came from: a site, or whatever stands for one.
        address: whose of that site's it is.
        swarm: the open swarm that its signer is of, where it says so.
    """

    key: StorageKey
    subkey: str
    signer: PeerId
    expires_at: float
    data: bytes
    left: bool = False
    group: str = ""
    origin: str = ""
    address: str = ""
    swarm: SwarmId | None = None

    @property
    def cost(self) -> int:
        return len(self.data) + OVERHEAD_BYTES


def open_item(key: StorageKey, subkey: object, data: bytes, expires_at: float, now: float) -> FiledItem:
    """Check that something may lie where it lies: signed, for exactly the signed time, under a key of its own.

    Args:
        subkey: a peer id for a record, fingerprint and peer id for a pointer.
        expires_at: the expiry with which it is stored.
        now: DHT time in seconds.

    Raises:
        RecordError: it may not.
    """
    if not isinstance(subkey, str) or len(subkey) > 256:
        raise RecordError("subkey", "must be a short text")
    if is_peer_id(subkey):
        record = open_sealed(data, now)
        item = FiledItem(key, record.peer, record.peer, record.expires_at, data, record.left, swarm=record.swarm)
        belongs = any(storage_key(name) == key for name in record_keys(record))
    else:
        pointer = open_pointer(data, now)
        group = pointer.model.fingerprint
        item = FiledItem(
            key, pointer.subkey, pointer.peer, pointer.expires_at, data, pointer.left, group, swarm=pointer.swarm
        )
        belongs = storage_key(models_key(group)) == key
    if item.subkey != subkey:
        raise RecordError("subkey", f"{item.signer} cannot speak for {subkey!r:.100}")
    if item.expires_at != expires_at:
        raise RecordError("expires_at", "not the signed one")
    if not belongs:
        raise RecordError("key", "it does not belong there")
    return item


class RecordStore:
    """The items that one peer holds; under each key, the one that came first stands first, also once it is renewed."""

    def __init__(self, limits: StoreLimits | None = None) -> None:
        self._limits = limits or StoreLimits()
        self._keys: dict[StorageKey, dict[str, FiledItem]] = {}
        self._alone: dict[StorageKey, FiledItem] = {}
        self._bytes = 0
        self._swept_at = float("-inf")
        self._origins: Counter[str] = Counter()
        self._records: Counter[PeerId] = Counter()
        self._pointers: Counter[PeerId] = Counter()

    def __len__(self) -> int:
        """Items held, expired ones included that were not looked for yet."""
        return len(self._alone)

    @property
    def bytes_held(self) -> int:
        return self._bytes

    def put(self, item: FiledItem, now: float) -> bool:
        """Take an item that `open_item` has checked.

        Args:
            item: with its `origin`.
            now: DHT time in seconds.

        Returns:
            Whether it is held now; also True for a pointer of whose model enough others are held.
        """
        self._sweep(now)
        if item.expires_at <= now:
            return False
        there = self._keys.get(item.key, {})
        known = there.get(item.subkey)
        if known is not None:
            return self._renew(known, item)
        if not self._within_own(item):
            return False
        if item.group:
            rivals = [one for one in there.values() if one.group == item.group]
            if len(rivals) >= self._limits.pointers_per_model and not self._displace(rivals, item):
                return True
        return self._make_room(item, item.cost) and self._add(item)

    def get(self, key: StorageKey, now: float) -> list[FiledItem]:
        """What lies under a key, or the one item that has this key of its own; the oldest first."""
        self._sweep(now)
        there = self._keys.get(key)
        if there is not None:
            return [item for item in there.values() if item.expires_at > now]
        alone = self._alone.get(key)
        return [alone] if alone is not None and alone.expires_at > now else []

    def _renew(self, known: FiledItem, item: FiledItem) -> bool:
        """Put a later word of the same signer in the place of the earlier one."""
        if known.expires_at >= item.expires_at:
            return known.data == item.data
        if item.cost > known.cost and not self._make_room(item, item.cost - known.cost, keep=known):
            return False
        if self._keys.get(item.key, {}).get(item.subkey) is not known:
            return False
        self._count(known, -1)
        self._keys[item.key][item.subkey] = item  # a dictionary keeps the place of a key that it has
        self._alone[item_key(item.key, item.subkey)] = item
        self._count(item, 1)
        return True

    def _within_own(self, item: FiledItem) -> bool:
        """Whether the signer may have one more."""
        if item.group:
            return self._pointers[item.signer] < self._limits.pointers_per_signer
        return self._records[item.signer] < self._limits.records_per_signer

    def _make_room(self, item: FiledItem, cost: int, keep: FiledItem | None = None) -> bool:
        """Give others' places away until the item fits under its key and in all; False if it has no right to more."""
        limits, more = self._limits, keep is None
        key_bytes = limits.list_bytes if item.group else limits.key_bytes
        while True:
            there = self._keys.get(item.key, {})
            full = more and len(there) >= limits.key_items
            if not full and sum(one.cost for one in there.values()) + cost <= key_bytes:
                break
            if not self._displace([one for one in there.values() if one is not keep], item):
                return False
        while self._bytes + cost > limits.total_bytes:
            if not self._may_displace(item) or not self._displace(
                [one for one in self._alone.values() if one is not keep], item
            ):
                return False
        return True

    def _may_displace(self, item: FiledItem) -> bool:
        """A cheap look before all items are gone through: most of a flood ends here."""
        fullest = max(self._origins.values(), default=0)
        return fullest > self._origins[item.origin] + 1 or self._origins[item.origin] == fullest

    def _displace(self, scope: list[FiledItem], item: FiledItem) -> bool:
        """Give one place in `scope` away; False where the newcomer's own site, address and signer hold as many as any.

        Places are shared among sites, those of a site among its addresses, and those of an address among signers.
        """
        gone = next((one for one in scope if one.left), None) or _surplus(scope, item)
        if gone is None:
            return False
        self._remove(gone)
        return True

    def _add(self, item: FiledItem) -> bool:
        self._keys.setdefault(item.key, {})[item.subkey] = item
        self._alone[item_key(item.key, item.subkey)] = item
        self._count(item, 1)
        return True

    def _remove(self, item: FiledItem) -> None:
        there = self._keys[item.key]
        del there[item.subkey]
        if not there:
            del self._keys[item.key]
        del self._alone[item_key(item.key, item.subkey)]
        self._count(item, -1)

    def _count(self, item: FiledItem, sign: int) -> None:
        self._bytes += sign * item.cost
        _add_to(self._origins, item.origin, sign)
        _add_to(self._pointers if item.group else self._records, item.signer, sign)

    def _sweep(self, now: float) -> None:
        if 0 <= now - self._swept_at < SWEEP_S:
            return
        self._swept_at = now
        for item in [one for one in self._alone.values() if one.expires_at <= now]:
            self._remove(item)


def _add_to(counter: Counter[_Party], holder: _Party, count: int) -> None:
    counter[holder] += count
    if not counter[holder]:
        del counter[holder]


_SHARERS: tuple[Callable[[FiledItem], str], ...] = (
    lambda one: one.origin,
    lambda one: one.address,
    lambda one: one.signer,
)
"""Who shares places, and within whom others share."""


def _surplus(scope: list[FiledItem], item: FiledItem) -> FiledItem | None:
    """The youngest item of who holds more than the newcomer, at the first level at which somebody does."""
    crowd: list[FiledItem] | None = None
    for holder in _SHARERS:
        if crowd is None:
            crowd = _crowd(scope, holder, holder(item))
            scope = [one for one in scope if holder(one) == holder(item)]
        else:
            counts = Counter(map(holder, crowd))
            most = max(counts.values())
            last = next(holder(one) for one in reversed(crowd) if counts[holder(one)] == most)
            crowd = [one for one in crowd if holder(one) == last]
    return None if crowd is None else crowd[-1]


def _crowd(scope: Iterable[FiledItem], holder: Callable[[FiledItem], _Party], own: _Party) -> list[FiledItem] | None:
    """The items of the holder that has most of `scope`, if that is at least two more than the newcomer's holder has."""
    items: dict[_Party, list[FiledItem]] = {}
    for one in scope:
        items.setdefault(holder(one), []).append(one)
    others = [held for name, held in items.items() if name != own]
    fullest = max(others, key=len, default=[])
    return fullest if len(fullest) > len(items.get(own, ())) + 1 else None
