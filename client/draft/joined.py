"""The drafting thread: passes of a draft model that several texts wait for run in one forward.

    submit ──▶ a text's search runs until it needs a pass ──▶ passes of one model, joined ──▶ each search goes on

One thread serves all texts, however many. A search is a generator of passes (`client.draft.search.source.Passes`), so
while one waits for its pass the others come to theirs. What concerns one drafter runs in order: a text that ended may
have left it with a search. Nobody's text depends on what was joined: only trees may.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import CancelledError, Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Generic, ParamSpec, TypeVar

import torch

from client.draft.search.source import DraftPass, Passes, alone
from swarm.compute.ragged_batch import HeadOutput, RaggedModel

P = ParamSpec("P")
T = TypeVar("T")

JOINED_ROWS: Final = 64
"""A pass of more rows, which reads a text, runs by itself, one in each round."""


@dataclass(frozen=True, slots=True)
class Searching(Generic[T]):
    """Work for the drafting thread whose passes may be joined; called, it runs them by themselves.

    Attributes:
        drafter: whose state the passes change.
        passes: starts them.
    """

    drafter: object
    passes: Callable[[], Passes[T]]

    def __call__(self) -> T:
        """Run them."""
        with torch.inference_mode():
            return alone(self.passes())


@dataclass(slots=True)
class _WaitingSearch:
    """A search of a drafter that waits for a pass."""

    drafter: object
    passes: Generator[DraftPass, HeadOutput, Any]
    future: Future[Any]
    wanted: DraftPass


class JoinedDrafting(Executor):
    """Runs calls in order on one thread, and `Searching` ones together."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="draft")
        self._waiting: deque[tuple[Future[Any], Callable[[], Any] | Searching[Any], object]] = deque()
        self._searches: deque[_WaitingSearch] = deque()
        self._is_over = False

    def submit(self, call: Callable[P, T], /, *args: P.args, **options: P.kwargs) -> Future[T]:
        """Run a call behind those that were given before; a `Searching` one beside those of other drafters.

        A drafter's method waits for its search, any other function for nobody's.
        """
        future: Future[T] = Future()
        if isinstance(call, Searching):
            self._waiting.append((future, call, call.drafter))
        else:
            self._waiting.append((future, partial(call, *args, **options), getattr(call, "__self__", None)))
        self._thread.submit(self._work)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more; with `cancel_futures` what waits is given up, and what runs ends at its next pass."""
        self._is_over |= cancel_futures
        self._thread.shutdown(wait, cancel_futures=False)

    def _work(self) -> None:
        """Run what waits, and what comes meanwhile."""
        while self._waiting or self._searches:
            self._start_waiting()
            if self._is_over:
                while self._searches:
                    search = self._searches.popleft()
                    search.passes.close()
                    search.future.set_exception(CancelledError())
            elif self._searches:
                self._round()

    def _start_waiting(self) -> None:
        """Start what waits, in order, but what concerns a drafter whose search still runs."""
        kept: list[tuple[Future[Any], Callable[[], Any] | Searching[Any], object]] = []
        for _ in range(len(self._waiting)):
            future, call, drafter = self._waiting.popleft()
            busy = [*(search.drafter for search in self._searches), *(earlier[2] for earlier in kept)]
            if drafter is None or self._is_over or not any(drafter is one for one in busy):
                self._start(future, call)
            else:
                kept.append((future, call, drafter))
        self._waiting.extendleft(reversed(kept))

    def _start(self, future: Future[Any], call: Callable[[], Any] | Searching[Any]) -> None:
        if self._is_over:
            future.cancel()
        elif future.set_running_or_notify_cancel():
            if isinstance(call, Searching):
                passes = call.passes()
                self._step(call.drafter, future, passes, partial(next, passes))
                return
            try:
                future.set_result(call())
            except BaseException as error:  # noqa: BLE001 - raised again where the result is read
                future.set_exception(error)

    def _step(
        self,
        drafter: object,
        future: Future[Any],
        passes: Generator[DraftPass, HeadOutput, Any],
        go_on: Callable[[], DraftPass],
    ) -> None:
        """Let a search go on to its next pass, or to its end."""
        try:
            with torch.inference_mode():
                self._searches.append(_WaitingSearch(drafter, passes, future, go_on()))
        except StopIteration as end:
            future.set_result(end.value)
        except BaseException as error:  # noqa: BLE001 - raised again where the result is read
            future.set_exception(error)

    def _round(self) -> None:
        """Run the passes of one model that several searches wait for, or one that is long."""
        first = self._searches[0]
        chosen = [first]
        if first.wanted.rows <= JOINED_ROWS:
            model = first.wanted.model
            chosen = [one for one in self._searches if one.wanted.model is model and one.wanted.rows <= JOINED_ROWS]
        self._searches = deque(one for one in self._searches if one not in chosen)
        for search, output in zip(chosen, _outputs([one.wanted for one in chosen]), strict=True):
            throws = isinstance(output, BaseException)
            go_on = search.passes.throw if throws else search.passes.send
            self._step(search.drafter, search.future, search.passes, partial(go_on, output))  # type: ignore[arg-type]


def _outputs(passes: Sequence[DraftPass]) -> list[HeadOutput | BaseException]:
    """What each pass gives; where they fail together, each is run by itself."""
    if len(passes) > 1 and passes[0].model.static is None:
        try:
            with torch.inference_mode():
                return [*_joined(passes[0].model, passes)]
        except Exception:  # noqa: BLE001 - one of them is at fault, which it is told below
            pass
    return [_output(one) for one in passes]


def _output(one: DraftPass) -> HeadOutput | BaseException:
    try:
        with torch.inference_mode():
            return one.run()
    except Exception as error:  # noqa: BLE001 - raised again in the search
        return error


def _joined(model: RaggedModel, passes: Sequence[DraftPass]) -> list[HeadOutput]:
    """One forward for all: its hidden rows [R, width], of which the head takes the last ones of each pass."""
    hidden = model.forward([one.work for one in passes])
    pieces = torch.split(hidden, [one.rows for one in passes])
    wanted = torch.cat([piece[-one.last :] for piece, one in zip(pieces, passes, strict=True)])
    with model.entering_head() as entered:
        logits = torch.split(model.logits(wanted), [one.last for one in passes])
    if not entered:
        return [HeadOutput(part, None) for part in logits]
    rows = torch.cat([part.flatten(0, -2) for part in entered]).float()
    own = torch.split(rows, [one.last for one in passes])
    return [HeadOutput(part, of) for part, of in zip(logits, own, strict=True)]
