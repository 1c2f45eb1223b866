"""What a client knows of its tail's picks: who gave which token, and whether a final row gives it (P10).

    a sweep leaves   a tail's first ones ask for final rows
    its reply        no rows: some picks are drawn now, and the tail is asked for the rows of those
    rows             of the text's own nodes ──▶ a thread: the head, rules, noise ──▶ gaps
    a gap too large  the tail is refuted: everything that it picked is taken back
    none too large   what it gives may be shown at once, in this text and in the client's later ones

`HeadChecker` is a client's thread, heads and tails that passed; `PickWatch` is one generation's. No sweep waits for a
check: what does not fit its queue is not checked. Owns no text and no route.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

import torch

from client.base.stats import PickChecks
from client.chain.answers import MAX_ROWS, Answer
from client.chain.doubts import Doubts
from client.decode.pipeline import InFlightSweep
from client.decode.walk import Walk, positions_of_rows
from client.draft.heads.layer_head import target_names
from client.draft.search.tree import DraftTree
from swarm.base.errors import PicksRefuted, SwarmError, UnsupportedModel
from swarm.base.ids import TreeNodeId
from swarm.base.library_logging import bars_hidden
from swarm.compute.compute_thread import use_threads
from swarm.compute.path_rules import NodeMasks
from swarm.compute.row_codec import decode_rows
from swarm.files.fingerprint import known_identity, model_identity
from swarm.files.hub import find_model
from swarm.protocol.messages import RouteHop, Rows, Sampling
from swarm.protocol.numeric_class import NumericClass
from swarm.routing.route import Route
from swarm.trust.pick_gaps import NamedPicks, bound_of, pick_gaps, why_unjudged

if TYPE_CHECKING:
    from client.draft.heads.output_head import OutputHead

FIRST_PICKS: Final = 8
"""Of each tail of a text, so many picks are checked at first, whatever the share."""
MAX_WAITING: Final = 16
"""Replies that wait for their check; further ones are not checked."""
MAX_WITHHELD: Final = 3
"""A tail that so many times does not send the row of a sweep's first node, which it must have, is left."""
AUTO_BYTES: Final = 1 << 30
"""The largest output matrix that is loaded unasked."""
AUTO_READ_BYTES: Final = 4 << 30
"""So many bytes of weights are read unasked to learn whether they are the swarm's."""
MAX_LATE: Final = 4
"""Times that tails are asked at once for rows after which they picked."""
SETTLE_S: Final = 10.0
"""How long the end of a text waits for its checks, where all of them were asked for."""
HOLD_S: Final = 2.0
"""What a tail gives that never passed a check is not shown for so long after its first pick, or until one passed."""
MAX_PASSED: Final = 64
"""Tails that passed which a client remembers, the newest."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HeadFiles:
    """Where a client's copy of the target's head is.

    Attributes:
        model: folder, GGUF file or hub id.
        revision: on the hub.
        fingerprint: of the swarm's model: other weights have another head.
        is_asked: the user named it; else it is taken where it lies here whole, is of that model, and small enough.
    """

    model: str | Path
    revision: str | None
    fingerprint: str
    is_asked: bool = False

    def warm_up(self) -> None:
        """Read what a head needs beside weights; errors are those of `load`, which tells them."""
        from swarm.files.text_classes import class_of  # brings every model's base, 2 s

        with suppress(SwarmError, OSError):
            class_of(target_names(self.model, self.revision).config)

    def load(self, numeric_class: NumericClass) -> OutputHead:
        """Load it, as tails of a class hold it.

        Raises:
            SwarmError: why it cannot be used.
        """
        from client.draft.heads.output_head import load_output_head  # brings every model's base, 2 s

        folder, hub = find_model(self.model, self.revision)
        if not self.is_asked:
            config = target_names(self.model, self.revision).config
            dtype: torch.dtype = getattr(torch, numeric_class.dtype)
            if config.vocab_size * config.hidden_size * dtype.itemsize > AUTO_BYTES:
                raise UnsupportedModel("its head is larger than 1 GiB; name it to load it (--head)")
        known = known_identity(folder, hub=hub)
        if known is None and not self.is_asked:
            size = sum(file.stat().st_size for file in folder.glob("*") if file.suffix in {".safetensors", ".gguf"})
            if hub is not None or not 0 < size <= AUTO_READ_BYTES:
                raise UnsupportedModel("its weights are not here whole; name a copy of them (--head)")
            known = model_identity(folder)
        if known is not None and known.fingerprint != self.fingerprint:
            raise UnsupportedModel("the weights here are not those that the swarm serves")
        with bars_hidden():
            return load_output_head(self.model, self.revision, numeric_class)


@dataclass(frozen=True, slots=True)
class _CertainText:
    """Every certain token, and in which class the picks among them were computed."""

    sequence: Sequence[int]
    numeric_class: str


@dataclass(frozen=True, slots=True)
class _PickJob:
    """Picks of one reply, to be checked.

    Attributes:
        rows: as they travelled.
        places: [n] which of them.
        named: the picks.
        numeric_class: in which the tail computes.
        bound: the largest gap of an honest pick.
    """

    rows: Rows
    places: Sequence[int]
    named: NamedPicks
    numeric_class: NumericClass
    bound: float


class Tails(Protocol):
    """What the checks of a text need of its chain."""

    def refute(self, error: PicksRefuted, /) -> None:
        """Leave a tail; called once for each."""

    def beside(self, work: Coroutine[object, object, None], /) -> object:
        """Start work that ends with the chain."""

    async def final_rows(self, tail: RouteHop, nodes: Sequence[TreeNodeId], /) -> Rows | None:
        """The final rows after which it picked; None where it does not show them."""


def _parsed(numeric_class: str) -> NumericClass:
    kind = NumericClass.parse(numeric_class)
    assert kind is not None, "it has a bound"
    return kind


class HeadChecker:
    """Checks picks of all of a client's texts, one reply after the other, on a thread of its own.

    Attributes:
        share: of the picks, how many are checked beside each tail's first ones.
        valid_tokens: ids from here on are padding.
        reason: why nothing can be checked; empty while that may be.
        passed: tails whose first checked picks were right, the newest last.
    """

    def __init__(self, files: HeadFiles, share: float, valid_tokens: int) -> None:
        """Load no weights yet."""
        self.share, self.valid_tokens, self.reason = share, valid_tokens, ""
        self.passed: dict[str, None] = {}
        self._files = files
        self._heads: dict[NumericClass, OutputHead] = {}
        usual = torch.get_num_threads()
        self._thread = ThreadPoolExecutor(1, "picks", initializer=use_threads, initargs=(1, usual))
        self._thread.submit(files.warm_up)  # and the thread lives as long as its client
        self._waiting = 0

    def bound(self, numeric_class: str) -> float | None:
        """The largest gap of an honest pick of such a tail; None where its picks cannot be checked."""
        return None if self.reason or not self.share else bound_of(numeric_class)

    def expect(self, fingerprint: str) -> None:
        """The swarm serves this model: other weights have another head."""
        self._files = replace(self._files, fingerprint=fingerprint)

    def prepare(self, numeric_class: str) -> None:
        """Load the head beside the opening of a route of such machines: its first text is held for the first check."""
        if self.bound(numeric_class) is not None:
            self._thread.submit(self._head, _parsed(numeric_class))

    def has_passed(self, peer: str) -> None:
        """Remember that what a tail gave first was right."""
        self.passed.pop(peer, None)
        self.passed[peer] = None
        if len(self.passed) > MAX_PASSED:
            del self.passed[next(iter(self.passed))]

    def check(self, job: _PickJob) -> asyncio.Future[list[float]] | None:
        """Check picks; None where too many wait."""
        if self._waiting >= MAX_WAITING:
            return None
        self._waiting += 1
        future = self._thread.submit(self._gaps, job)
        loop = asyncio.get_running_loop()
        future.add_done_callback(lambda _: _tell(loop, self._done))
        return asyncio.wrap_future(future)

    def _done(self) -> None:
        self._waiting -= 1

    def _head(self, numeric_class: NumericClass) -> OutputHead | None:
        """On the thread; None where there is none."""
        try:
            if not self.reason and numeric_class not in self._heads:  # one at a time: texts are of one class mostly
                self._heads = {numeric_class: self._files.load(numeric_class)}
        except (SwarmError, OSError, MemoryError, RuntimeError) as error:
            self.reason = str(error).partition("\n")[0]
            logger.info("picks are not checked: %s", self.reason)
        return None if self.reason else self._heads[numeric_class]

    def _gaps(self, job: _PickJob) -> list[float]:
        """On the thread."""
        head = self._head(job.numeric_class)
        if head is None:
            return []
        rows = decode_rows(job.rows, head.dtype)[list(job.places), : head.hidden_size]
        return pick_gaps(head.logits(rows), job.named, job.bound)

    def close(self) -> None:
        """End with the check that runs; what waits is dropped."""
        self._thread.shutdown(wait=True, cancel_futures=True)


def _best_child(tree: DraftTree, parent: int | None) -> tuple[int, float] | None:
    """The token that the draft takes for likeliest there, and how likely; None where it has none."""
    children = [place for place, above in enumerate(tree.parents) if above == parent]
    if not children:
        return None
    best = max(children, key=tree.acceptance_probs.__getitem__)
    before = 1.0 if parent is None else tree.acceptance_probs[parent]
    return tree.tokens[best], tree.acceptance_probs[best] / before if before else 0.0


def _tell(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(call)


class PickWatch:
    """One generation's picks: which tail gave each token of its text, and which tails were refuted.

    Attributes:
        checks: what came of checking them.
        refuted: the tails that were convicted, with why, until the text goes on without what they gave.
    """

    def __init__(
        self,
        checker: HeadChecker | None,
        doubts: Doubts,
        sampling: Sampling,
        given: int,
        tails: Tails,
    ) -> None:
        """Begin.

        Args:
            checker: None where no pick is to be checked.
            doubts: hear how often picks are what the draft lets expect.
            sampling: how the tail picks.
            given: tokens of the text that are there already.
            tails: of the text's chain.
        """
        self.checks = PickChecks()
        self.refuted: dict[str, PicksRefuted] = {}
        self._checker = None if sampling.multistep and sampling.temperature else checker
        self._doubts, self._sampling, self._tails = doubts, sampling, tails
        self._rng = random.SystemRandom()  # nobody else may foresee what is checked
        self._authors: list[RouteHop | None] = [None] * given
        self._by: dict[TreeNodeId, RouteHop | None] = {}
        self._seen: Counter[str] = Counter()
        self._withheld: Counter[str] = Counter()
        self._missed: Counter[str] = Counter()
        self._late = 0
        self._asked: dict[int, TreeNodeId | None] = {}
        self._open: set[asyncio.Future[list[float]]] = set()  # of what the text has now
        self._held: dict[str, float] = {}  # until when, at most, by tail

    @property
    def holds(self) -> bool:
        """Whether the text has tokens of a tail that never passed a check, and may soon pass one: show nothing yet."""
        return bool(self._held) and time.monotonic() < max(self._held.values())

    # What is asked for

    def asks(self, route: Route) -> bool:
        """Whether the next sweep, over this route, is to bring final rows because picks are checked.

        A tail knows that before it picks. So it is asked later, but where its first picks are checked, or all are, or
        it does not show rows later.
        """
        if self._checker is None:
            return False
        if self._checker.bound(route.numeric_class) is None:
            self.checks = replace(self.checks, reason=self._checker.reason or why_unjudged(route.numeric_class))
            return False
        peer = route.hops[-1].peer
        is_new, is_mute = self._seen[peer] < FIRST_PICKS, self._missed[peer] >= MAX_WITHHELD
        return is_new or is_mute or self._checker.share >= 1

    def asked(self, sequence: int, root: TreeNodeId | None) -> None:
        """A sweep left that asks for them. Its root, where it has one, hangs from the tip: its row must come."""
        self._asked[sequence] = root

    # What comes

    def note(self, answer: Answer, walk: Walk, sequence: Sequence[int], counted: int, numeric_class: str) -> None:
        """An answer was taken.

        Args:
            answer: as the walk accepted it.
            walk: after it.
            sequence: every certain token.
            counted: tokens that the text took of those that became certain.
            numeric_class: of its tail.
        """
        for node, _ in answer.reply.picks:
            self._by.setdefault(node, answer.tail)
        self._authors += [self._by.get(node) for node in walk.passed[:counted]]
        drawn = answer.reply.sequence in self._asked
        root = self._asked.pop(answer.reply.sequence, None)
        if answer.tail is not None and self._checker is not None:
            peer = answer.tail.peer
            if peer not in self._checker.passed and self._checker.bound(numeric_class) is not None:
                self._held.setdefault(peer, time.monotonic() + HOLD_S)
            self._count_withheld(answer, root)
            text = _CertainText(sequence, numeric_class)
            self._check(answer, text, walk, is_drawn=drawn)
            if answer.reply.rows is None and self._late < MAX_LATE:
                self._draw_late(answer, text, walk.passed[:counted])
        certain, live = walk.certain, walk.state.live
        self._by = {node: tail for node, tail in self._by.items() if node in live or node == certain}

    def compare(
        self, route: Route, sweep: InFlightSweep, picks: Mapping[TreeNodeId, int], passed: Collection[TreeNodeId]
    ) -> None:
        """Compare certain picks with what the draft let expect, where nothing but the model decides them.

        Args:
            route: that picked.
            sweep: as it left, with the draft's tree.
            picks: of its reply.
            passed: nodes whose picks became certain with it.
        """
        if self._sampling.rules is not None or (self._sampling.multistep and self._sampling.temperature):
            return
        peers = [hop.peer for hop in route.hops]
        for node in passed:
            if (
                node in sweep.places
                and node in picks
                and (best := _best_child(sweep.tree, sweep.places[node])) is not None
            ):
                token, said = best
                self._doubts.note(peers, said, is_picked=picks[node] == token)
        doubt = max(map(self._doubts.of, peers), default=0.0)
        self.checks = replace(self.checks, doubt=doubt)

    def _count_withheld(self, answer: Answer, root: TreeNodeId | None) -> None:
        tail = answer.tail
        assert tail is not None
        came = answer.reply.row_ids
        if root is None or root in came or len(came) >= MAX_ROWS:  # the deepest ones alone
            return
        self._withheld[tail.peer] += 1
        if self._withheld[tail.peer] == MAX_WITHHELD:
            self._convict(tail, "does not send the final rows that its picks follow from")

    def _check(self, answer: Answer, text: _CertainText, walk: Walk, *, is_drawn: bool) -> None:
        """Have picks of one reply checked: all of a sweep that asked for its rows, else those that are drawn."""
        rows, tail, checker = answer.reply.rows, answer.tail, self._checker
        bound = None if checker is None else checker.bound(text.numeric_class)
        if rows is None or tail is None or checker is None or bound is None:
            return
        if is_drawn:
            row_bytes = len(answer.reply.row_ids) * rows.codec.row_bytes(rows.width)
            self.checks = replace(self.checks, row_bytes=self.checks.row_bytes + row_bytes)
        share = 1.0 if is_drawn else checker.share
        own = {node for node, _ in answer.reply.picks}  # a row of any other says nothing of what was picked here
        pairs = zip(answer.reply.row_ids, positions_of_rows(answer.reply, walk), strict=True)
        positions = [position if node in own else None for node, position in pairs]
        chosen = self._drawn(positions, (text.sequence, tail), share)
        if not chosen:
            return
        named = self._named(answer, text.sequence, [(answer.reply.row_ids[at], position) for at, position in chosen])
        self._submit(tail, _PickJob(rows, [at for at, _ in chosen], named, _parsed(text.numeric_class), bound))

    def _named(self, answer: Answer, sequence: Sequence[int], nodes: Sequence[tuple[TreeNodeId, int]]) -> NamedPicks:
        """What was picked after these nodes of an answer, each with its place in the text."""
        assert self._checker is not None, "it is asked by who checks"
        masks = answer.masks
        if masks is not None:
            of_place = {TreeNodeId(position): masks.rows[node] for node, position in nodes}
            masks = NodeMasks(of_place, masks.bits)
        places = [position for _, position in nodes]
        return NamedPicks(sequence, places, self._sampling, self._checker.valid_tokens, masks)

    def _draw_late(self, answer: Answer, text: _CertainText, passed: Sequence[TreeNodeId]) -> None:
        """Draw some picks that just came, and ask their tail for the rows before them: it could not know which."""
        tail, checker = answer.tail, self._checker
        bound = None if checker is None else checker.bound(text.numeric_class)
        if tail is None or checker is None or bound is None:
            return
        start, own = len(text.sequence) - len(passed) - 1, {node for node, _ in answer.reply.picks}
        nodes = [
            (node, start + place)
            for place, node in enumerate(passed)
            if node in own and self._by.get(node) == tail and self._rng.random() < checker.share
        ]
        if nodes:
            named = self._named(answer, text.sequence, nodes)
            self._late += 1
            self._tails.beside(self._check_late(tail, [node for node, _ in nodes], named, text.numeric_class))

    async def _check_late(
        self, tail: RouteHop, nodes: Sequence[TreeNodeId], named: NamedPicks, numeric_class: str
    ) -> None:
        before, bound = self._open, bound_of(numeric_class)
        try:
            rows = await self._tails.final_rows(tail, nodes)
        finally:
            self._late -= 1
        if rows is None:
            self._missed[tail.peer] += 1
        elif self._open is before and bound is not None:  # else the text went on without these picks
            self.checks = replace(self.checks, row_bytes=self.checks.row_bytes + len(rows.data))
            self._submit(tail, _PickJob(rows, range(len(nodes)), named, _parsed(numeric_class), bound))

    def _submit(self, tail: RouteHop, job: _PickJob) -> None:
        assert self._checker is not None, "it is asked by who checks"
        future = self._checker.check(job)
        count = len(job.places)
        if future is None:
            self.checks = replace(self.checks, left_out=self.checks.left_out + count)
            return
        self._seen[tail.peer] += count
        self._open.add(future)
        future.add_done_callback(lambda done: self._judge(done, tail, job.named, job.bound))

    def _drawn(
        self, positions: Sequence[int | None], said: tuple[Sequence[int], RouteHop], share: float
    ) -> list[tuple[int, int]]:
        """Which rows are checked, each with its token's place in the text; of picks that this tail gave first."""
        sequence, tail = said
        prompt = len(sequence) - len(self._authors)
        own = [
            (index, position)
            for index, position in enumerate(positions)
            if position is not None and prompt <= position + 1 < len(sequence)
            if self._authors[position + 1 - prompt] == tail
        ]
        first = max(FIRST_PICKS - self._seen[tail.peer], 0)
        return [one for count, one in enumerate(own) if count < first or self._rng.random() < share]

    def _judge(self, done: asyncio.Future[list[float]], tail: RouteHop, named: NamedPicks, bound: float) -> None:
        if done not in self._open:  # the text went on without these picks
            return
        self._open.discard(done)
        if done.cancelled() or done.exception() is not None or not (gaps := done.result()):
            reason = "" if self._checker is None else self._checker.reason
            left_out = self.checks.left_out + len(named.places)
            self.checks = replace(self.checks, reason=reason, left_out=left_out)
            if reason:  # nobody will ever pass
                self._held.clear()
            return
        worst = max(range(len(gaps)), key=gaps.__getitem__)
        largest = max(self.checks.largest_gap, gaps[worst])
        self.checks = replace(self.checks, judged=self.checks.judged + len(gaps), largest_gap=largest)
        if gaps[worst] > bound:
            place = named.places[worst]
            what = "excludes it" if math.isinf(gaps[worst]) else f"has one that is {gaps[worst]:.3g} better"
            token = named.tokens[place + 1]
            self._convict(
                tail, f"picked token {token} at position {place + 1}, and its own final row {what} (honest: {bound:g})"
            )
        elif self._checker is not None and tail.peer not in self.refuted:
            self._checker.has_passed(tail.peer)
            self._held.pop(tail.peer, None)

    def _convict(self, tail: RouteHop, reason: str) -> None:
        if tail.peer in self.refuted:
            return
        if self._checker is not None:
            self._checker.passed.pop(tail.peer, None)
        error = self.refuted[tail.peer] = PicksRefuted(tail.peer, str(tail.span), reason)
        self.checks = replace(self.checks, refuted=(*self.checks.refuted, tail.peer))
        self._tails.refute(error)

    # What follows

    async def settle(self) -> None:
        """At the end of a text: wait for its checks, where every pick is to be checked, or nothing was shown yet."""
        if self._open and self._checker is not None and (self._checker.share >= 1 or self.holds):
            limit_s = SETTLE_S if self._checker.share >= 1 else max(self._held.values()) - time.monotonic()
            await asyncio.wait(self._open, timeout=limit_s)

    def right_tokens(self) -> int:
        """Tokens of the text before the first one that a refuted tail gave."""
        given = enumerate(self._authors)
        first = next((place for place, tail in given if tail is not None and tail.peer in self.refuted), None)
        return len(self._authors) if first is None else first

    def go_back(self, tokens: int) -> None:
        """The text has its first tokens alone, and goes on from there."""
        self._authors = self._authors[:tokens]
        self._by, self._asked = {}, {}
        for peer in self.refuted:
            self._seen[peer] = 0
        self.refuted, self._open, self._held = {}, set(), {}
