"""Which connection of an HTTP server stays, and which makes room."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

from swarm.status.http import ConnectionLimits, Connections


@dataclass(eq=False)
class Caller:
    """A connection that is idle, or is not."""

    idle_since: float | None = 0.0
    ended: list[bool] = field(default_factory=list)

    @property
    def transport(self) -> Caller:
        return self

    def abort(self) -> None:
        self.ended.append(True)


def opened(total: int, per_address: int) -> Connections:
    return Connections(ConnectionLimits(total, per_address), clock=lambda: 0.0)


def admit(connections: Connections, caller: Caller, address: str) -> bool:
    return connections.admit(cast("Any", caller), address)


def test_an_address_has_so_many_and_a_network_that_may_hide_a_proxy_has_more() -> None:
    connections = opened(100, 2)
    assert [admit(connections, Caller(), "8.8.8.8") for _ in range(3)] == [True, True, False]
    assert [admit(connections, Caller(), f"2001:4860::{n}") for n in range(3)] == [True, True, False]
    assert all(admit(connections, Caller(), "172.17.0.1") for _ in range(32))
    assert not admit(connections, Caller(), "172.17.0.1")
    assert admit(connections, Caller(), "1.1.1.1")


def test_where_all_are_taken_the_longest_idle_of_who_has_most_goes() -> None:
    connections = opened(4, 3)
    many = [Caller(3.0), Caller(2.0), Caller(None)]
    one = Caller(1.0)
    assert all(admit(connections, caller, "8.8.8.8") for caller in many)
    assert admit(connections, one, "9.9.9.9")
    assert admit(connections, Caller(), "1.1.1.1")
    assert [bool(caller.ended) for caller in (*many, one)] == [False, True, False, False]


def test_who_has_all_of_an_address_takes_nobodys_place() -> None:
    connections = opened(3, 2)
    callers = {"8.8.8.8": [Caller(), Caller()], "9.9.9.9": [Caller()]}
    assert all(admit(connections, caller, address) for address, some in callers.items() for caller in some)
    assert not admit(connections, Caller(), "8.8.8.8")
    assert not any(caller.ended for some in callers.values() for caller in some)


def test_where_all_are_answered_a_new_one_goes() -> None:
    connections = opened(2, 2)
    busy = [Caller(None), Caller(None)]
    assert all(admit(connections, caller, "8.8.8.8") for caller in busy)
    assert not admit(connections, Caller(), "1.1.1.1")
    connections.leave(cast("Any", busy[0]))
    connections.leave(cast("Any", busy[0]))  # its end is told once more when its socket is closed
    assert admit(connections, Caller(), "1.1.1.1")
