"""Evidence of answers: made where a request's header asks for it, and fetched afterwards by the request's name.

A proof ends with its text, so a stream's head cannot carry it: the answer's header says where it will be.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final, get_args

from fastapi import APIRouter, Request
from fastapi.responses import Response
from starlette.types import Scope

from client.api.backend import AnswerEvent, ApiCaller, Finished
from client.api.errors import ApiError, invalid
from client.base.options import ProofChoice
from client.base.stats import Proof

HEADER: Final = "canopy-proof"
SCOPE: Final = "canopy.proof"
"""Where the path of a request's proof stands, in the scope."""
PATH: Final = "/v1/proofs/"
KEPT_S: Final = 600.0
MAX_KEPT: Final = 64
MAX_BYTES: Final = 256 << 20
"""Of all that are kept; the oldest go first."""


@dataclass(frozen=True, slots=True)
class _KeptProof:
    caller: ApiCaller
    proof: Proof
    until_s: float


class ProofShelf:
    """The proofs of answers that are over, for `KEPT_S`; each for the key that asked alone."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kept: OrderedDict[str, _KeptProof] = OrderedDict()

    async def watch(
        self, events: AsyncGenerator[AnswerEvent, None], name: str, caller: ApiCaller
    ) -> AsyncGenerator[AnswerEvent, None]:
        """The same events; their end leaves its proof here under that name."""
        async with aclosing(events):
            async for event in events:
                if isinstance(event, Finished) and event.result.proof is not None:
                    self.keep(name, caller, event.result.proof)
                yield event

    def keep(self, name: str, caller: ApiCaller, proof: Proof) -> None:
        """Keep a proof; the oldest give way to it."""
        self._forget()
        self._kept[name] = _KeptProof(caller, proof, self._clock() + KEPT_S)
        while len(self._kept) > MAX_KEPT or sum(len(one.proof.data) for one in self._kept.values()) > MAX_BYTES:
            self._kept.popitem(last=False)

    def of(self, name: str, caller: ApiCaller) -> Proof:
        """The proof of a request.

        Raises:
            ApiError: none is here (404), or its machines signed nothing that proves it (409).
        """
        self._forget()
        kept = self._kept.get(name)
        if kept is None or kept.caller != caller:
            message = f"There is no proof of {name[:64]} here: it was not asked for, is not over, or is too old."
            raise ApiError(404, message, code="not_found")
        if not kept.proof.data:
            raise ApiError(409, "; ".join(kept.proof.problems) or "nothing was signed", code="no_proof")
        return kept.proof

    def _forget(self) -> None:
        while self._kept and next(iter(self._kept.values())).until_s <= self._clock():
            self._kept.popitem(last=False)


def asked_proof(request: Request) -> ProofChoice:
    """What a request wants to be proved; `none` without the header.

    Raises:
        ApiError: nobody knows how (400).
    """
    asked = request.headers.get(HEADER, "none").strip().lower()
    for choice in get_args(ProofChoice):
        if asked == choice:
            return choice  # type: ignore[no-any-return]  # one of its own values
    raise invalid(f"Header {HEADER}: '{asked[:40]}'; there are {', '.join(get_args(ProofChoice))}.")


def header(scope: Scope) -> list[tuple[bytes, bytes]]:
    """The header that says where a proof will be; none where none was asked for."""
    return [(HEADER.encode(), path.encode()) for path in scope[SCOPE]]


def routes(shelf: ProofShelf, caller: Callable[[Request], ApiCaller]) -> APIRouter:
    """Where proofs are fetched."""
    router = APIRouter(tags=["proofs"])

    @router.get(PATH + "{name}")
    async def proof(request: Request, name: str) -> Response:
        """The evidence of an answer whose request had the header `canopy-proof: signed`, or `rows`, for `swarm verify`.

        It is there from the answer's last event on, for ten minutes; `canopy-proof-notes` says what it lacks.
        """
        found = shelf.of(name, caller(request))
        lacking = [*found.problems, *(f"node {peer} signed nothing" for peer in found.unsigned)]
        headers = {"content-disposition": f'attachment; filename="{name}.proof"'}
        if lacking:
            headers["canopy-proof-notes"] = "; ".join(lacking).encode("ascii", "replace").decode()[:1_000]
        return Response(found.data, media_type="application/octet-stream", headers=headers)

    return router
