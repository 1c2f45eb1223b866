"""`node serve` that says on demand whether its books are right: after SIGUSR1, one line of JSON.

Nothing else of the node is changed. Each session's KV is checked when it ends, before its blocks are filed.
"""

from __future__ import annotations

import asyncio
import json
import signal

from node.cli import main
from node.session.hop_session import HopSession
from node.session.table import SessionTable
from swarm.base.errors import SwarmError
from swarm.protocol.limits import BLOCK_TOKENS

_tables: list[SessionTable] = []
_wrong: list[str] = []
_begin, _file = SessionTable.__init__, HopSession.file


def _noted_begin(table: SessionTable, *arguments: object) -> None:
    _begin(table, *arguments)  # type: ignore[arg-type]
    _tables.append(table)
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, _tell)


async def _checked_file(hop: HopSession) -> None:
    kv = hop._kv_cache
    if kv is not None and hop.is_closed:
        try:
            await hop._context.engine.on_thread(kv.check_integrity)
        except SwarmError as error:
            _wrong.append(f"KV: {error}")
    await _file(hop)


def _tell() -> None:
    table = _tables[-1]
    try:
        table.pool.check_integrity()
    except SwarmError as error:
        _wrong.append(f"pool: {error}")
    said = {
        "wrong": _wrong,
        "sessions": len(table),
        "free": table.kv_tokens_free,
        "kv_tokens": table.kv_tokens,
        "pool_tokens": table.pool.tokens,
        "kept_tokens": table.counters.kept_tokens,
        "block_tokens": BLOCK_TOKENS * len(table.pool),
    }
    print(f"books: {json.dumps(said)}", flush=True)  # noqa: T201 - the benchmark reads it


if __name__ == "__main__":
    SessionTable.__init__ = _noted_begin  # type: ignore[assignment, method-assign]
    HopSession.file = _checked_file  # type: ignore[assignment, method-assign]
    main()
