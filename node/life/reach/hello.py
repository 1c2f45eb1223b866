"""Answers Hello before the model is loaded, so that peers can say whether they reach this machine. Serves nothing else.

It shares the bound port with the node's service, which answers every call once it is there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import grpc
import grpc.aio

from swarm.base.quota import OverQuota, Quota, QuotaLimits, RateLimit, address_key
from swarm.directory.address_proof import HELLO_METHOD, NONCE_BYTES, hello_response
from swarm.directory.identity import Identity

_CALLS: Final = "calls"
_LIMITS: Final = QuotaLimits(rates={_CALLS: RateLimit(per_key=10, burst=50, total=100, total_burst=200)})
"""A signature takes about a millisecond; whoever asks before the node is listed is a peer that dials back."""


class HelloOnly(grpc.GenericRpcHandler):
    """A gRPC handler for Hello alone, until it is closed."""

    def __init__(self, identity: Identity, digest: bytes, clock: Callable[[], float] = time.monotonic) -> None:
        self._identity = identity
        self._digest = digest
        self._quota = Quota(_LIMITS, clock)
        self._handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(self._hello)
        self._is_closed = False

    def close(self) -> None:
        """Answer no more: the service behind this one does."""
        self._is_closed = True

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes] | None:
        """Which handler answers a call; None: another one of the server."""
        is_mine = not self._is_closed and handler_call_details.method == HELLO_METHOD
        return self._handler if is_mine else None

    async def _hello(self, request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        if len(request) != NONCE_BYTES:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"a nonce has {NONCE_BYTES} bytes")
        if not self._quota.spend(_CALLS, address_key(context.peer())):
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(OverQuota(_CALLS)))
        return hello_response(self._identity, request, self._digest)
