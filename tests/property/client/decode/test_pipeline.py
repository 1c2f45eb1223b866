"""The decode loop with several sweeps in flight, over a simulated chain: any tree, any delays, always the plain text.

Texts and trees are random: at each token the draft knows how the text goes on for some levels, among wrong siblings.
The chain's own `SessionState` refuses what the protocol forbids.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean, harmonic_mean
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from benchmarks.control.cells_worker import TimedDrafter
from benchmarks.control.replay import OneAtATime, ReplaySetup, replay_text, replay_texts
from benchmarks.simulation.chain import HOPS, Costs, RecordedDrafter, SimulatedSweep, VirtualChain
from benchmarks.simulation.profiles import PROFILES
from benchmarks.simulation.recorded import ModelPair, RecordedSearch, RecordedText, picks_of, prompts_of, record_trees
from client.base.stats import SweepMeasurement
from client.chain.answers import Answer
from client.decode.goodput import Goodput
from client.decode.policy import FixedPolicy, PipelineState, SpeculationPlan
from client.decode.state import GenerationState
from client.decode.text_stream import FastTokenizer
from client.draft.drafter import NO_PICKS, ModelDrafter, expansions
from client.draft.search.source import DraftPass
from client.draft.search.tree import NO_LIMIT, DraftTree, Picks, StopRule
from client.draft.sources.model import LocalSession
from swarm.compute.ragged_batch import load_whole
from swarm.demo import DRAFT, TARGET
from swarm.protocol.messages import Sampling, Sweep
from swarm.routing.costs import DEFAULT_LINK_MBIT_PER_S, RouteForecast

PROMPT, NEW, VOCABULARY = 40, 60, 900
ROUNDS = 2
NEAR, FAR = Costs(1, 1_000), Costs(50, 20)
OTHERWISE = dict(zip(PROFILES, (0.9, 0.4, 0.4, 0.4, 0.9), strict=True))
"""What another draft knows. One that is right now and then wins least where links are neither fast nor far."""


@pytest.fixture(scope="module")
def tokenizer() -> FastTokenizer:
    found: FastTokenizer = AutoTokenizer.from_pretrained(TARGET)
    return found


def recorded(seed: int, knows: float) -> RecordedText:
    """A text whose draft is right about the next token with the chance `knows`."""
    rng = random.Random(seed)
    text = tuple(rng.randrange(3, VOCABULARY) for _ in range(PROMPT + NEW))
    return RecordedText(
        text[:PROMPT], text, Sampling(1), {n: tree(rng, text, n, knows) for n in range(PROMPT, len(text))}
    )


def tree(rng: random.Random, text: Sequence[int], length: int, knows: float) -> DraftTree:
    """The true path as far as the draft knows it, and wrong nodes; best first."""
    nodes: list[tuple[float, int, int | None]] = []
    parent: int | None = None
    probability = 1.0
    for depth in range(12):
        probability *= knows
        if length + depth < len(text) and rng.random() < knows:
            nodes.append((probability, text[length + depth], parent))
            parent = len(nodes) - 1
        else:
            break
    for _ in range(40):
        under = rng.choice([None, *range(len(nodes))]) if nodes else None
        above = 1.0 if under is None else nodes[under][0]
        siblings = {token for _, token, other in nodes if other == under}
        token = rng.randrange(3, VOCABULARY)
        if token not in siblings:
            nodes.append((above * rng.uniform(0.05, 0.4), token, under))
    order = sorted(range(len(nodes)), key=lambda node: (-nodes[node][0], node))
    place: dict[int | None, int] = {node: index for index, node in enumerate(order)}
    return DraftTree(
        tuple(nodes[node][1] for node in order),
        tuple(None if nodes[node][2] is None else place[nodes[node][2]] for node in order),
        tuple(nodes[node][0] for node in order),
    )


class Reckless(Goodput):
    """Sends whatever may be right, as deep as the credits allow: what it costs does not matter."""

    def max_nodes(self, route: Hashable, temperature: float, room: int, pipeline: PipelineState) -> int:
        """A few."""
        return min(room, 1 + self.latency_model(route).sweeps % 7)

    def extend(self, route: Hashable, probabilities: Sequence[float], pipeline: PipelineState) -> SpeculationPlan:
        """All, whenever one of them is more likely than not."""
        return SpeculationPlan(len(probabilities) if max(probabilities, default=0.0) > 0.5 else 0, 1e9, "deeper")


@pytest.mark.parametrize(("seed", "knows"), [(0, 0.0), (1, 0.5), (2, 0.5), (0, 0.9), (1, 0.9), (2, 1.0)])
async def test_the_text_is_the_plain_one(seed: int, knows: float, tokenizer: FastTokenizer) -> None:
    """`replay_text` compares the text; and tokens came from below nodes that were not verified when they were sent."""
    text = recorded(seed, knows)
    for costs in (NEAR, FAR):
        for policy in (FixedPolicy(0), FixedPolicy(9), FixedPolicy(7, 3), Goodput(24), Reckless(5)):
            _, _, sizes = await replay_text(text, costs, policy, tokenizer)
            assert len(sizes) > 0


async def test_a_walk_that_stays_inside_what_is_on_its_way_costs_no_trip(tokenizer: FastTokenizer) -> None:
    """With a draft that is always right the text comes faster than one trip per tree."""
    text = recorded(1, 1.0)
    count, alone_s, _ = await replay_text(text, FAR, FixedPolicy(5), tokenizer)
    again, pipe_s, _ = await replay_text(text, FAR, Reckless(5), tokenizer)
    assert pipe_s / again < 0.7 * alone_s / count


@pytest.mark.parametrize("profile", PROFILES)
def test_the_full_pipe_never_loses_to_plain_decoding(profile: str, tokenizer: FastTokenizer) -> None:
    """Also with a draft that is always wrong, once that is known; that is where least is to be won."""
    costs = PROFILES[profile]
    for knows in (0.0, OTHERWISE[profile]):
        texts = [recorded(seed, knows) for seed in range(3)]
        plain = replay_texts(texts, costs, FixedPolicy(0), tokenizer).tokens_per_s
        pipe, alone = (_settled(texts, costs, control, tokenizer) for control in (Goodput(32), OneAtATime(32)))
        assert pipe >= 0.97 * plain
        assert pipe >= 0.95 * alone


def said(costs: Costs, mbit: float) -> RouteForecast:
    """What routing says, where it takes the links for so fast."""
    return replace(costs, mbit=mbit).forecast()


@pytest.mark.parametrize("costs", [Costs(20, 100, 40, 0.05, row_bytes=16_384), Costs(30, 2, 20, row_bytes=8_192)])
@pytest.mark.parametrize("mbit", [None, 1_000.0])
def test_links_that_take_longer_than_machines_are_not_flooded(
    costs: Costs, mbit: float | None, tokenizer: FastTokenizer
) -> None:
    """Rows of a large model over home links, whatever their rate was said to be: from a client's first texts on."""
    setup = ReplaySetup(forecast=Costs.forecast if mbit is None else partial(said, mbit=mbit))
    for knows in (0.4, 0.9):
        texts = [recorded(seed, knows) for seed in range(3)]
        plain = replay_texts(texts, costs, FixedPolicy(0), tokenizer).tokens_per_s
        alone, pipe = (
            replay_texts(texts, costs, control, tokenizer, setup).tokens_per_s
            for control in (OneAtATime(32), Goodput(32))
        )
        assert pipe >= 0.97 * plain
        assert pipe >= 0.95 * alone


@pytest.mark.parametrize(
    ("costs", "pass_ms", "knows"), [(NEAR, 20.0, 0.0), (NEAR, 100.0, 0.9), (Costs(25, 100), 200.0, 0.9)]
)
def test_a_slow_draft_costs_nothing(costs: Costs, pass_ms: float, knows: float, tokenizer: FastTokenizer) -> None:
    """Where plain decoding is best, replies do not wait for a draft that takes longer than a trip."""
    texts, slow = [recorded(seed, knows) for seed in range(3)], replace(costs, pass_ms=pass_ms)
    plain = replay_texts(texts, slow, FixedPolicy(0), tokenizer).tokens_per_s
    assert _settled(texts, slow, Goodput(32), tokenizer) >= 0.97 * plain


async def test_a_reply_waits_for_one_pass_of_the_draft_at_most(
    tokenizer: FastTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else drafting would go on below what the reply may say is wrong."""
    costs, back, waited = Costs(25, 100, forward_ms=30.0), list[float](), list[float]()
    come_back, answer = VirtualChain._come_back, VirtualChain.answer

    def noted(self: VirtualChain, flight: SimulatedSweep, hop: int) -> None:
        back.append(self._clock.now_ms)
        come_back(self, flight, hop)

    async def heard(self: VirtualChain) -> Answer:
        answered = await answer(self)
        waited.append(self._clock.now_ms - back[len(waited)])
        return answered

    monkeypatch.setattr(VirtualChain, "_come_back", noted)
    monkeypatch.setattr(VirtualChain, "answer", heard)
    control, texts = Goodput(512), [recorded(seed, 0.9) for seed in range(3)]
    for text in (*texts, *texts):
        back, waited = [], []
        await replay_text(text, costs, control, tokenizer)
    assert max(waited) > 0, "drafting goes on while sweeps are on their way"
    assert max(waited) <= costs.pass_ms


def _settled(texts: list[RecordedText], costs: Costs, control: Goodput, tokenizer: FastTokenizer) -> float:
    """Speed once the draft is known; several rounds, for a single one is a matter of luck."""
    replay_texts(texts, costs, control, tokenizer)
    return harmonic_mean([replay_texts(texts, costs, control, tokenizer).tokens_per_s for _ in range(ROUNDS)])


def test_a_recording_learns_every_pick_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a client does that has one sweep on its way, whatever trees are recorded in between."""
    target, draft = load_whole(TARGET, torch.float32), load_whole(DRAFT, torch.float32)
    taught: list[int] = []
    learn = ModelDrafter.learn

    def listen(self: ModelDrafter, tree: DraftTree, picks: Picks, others: Picks = NO_PICKS) -> None:
        taught.append(len(picks))
        learn(self, tree, picks, others)

    monkeypatch.setattr(ModelDrafter, "learn", listen)
    [made] = record_trees(ModelPair(target, draft, 24), prompts_of("repetitive", 1), [Sampling()], nodes=32)
    assert len(made.trees) == 24
    assert sum(taught) == 24
    assert max(taught) > 2


def test_a_search_of_a_recorded_tree_knows_more_with_every_pass() -> None:
    whole = recorded(3, 0.8).trees[PROMPT + 3]
    search = RecordedSearch(whole, (), set())
    before = 0
    for passes in range(6):
        part = search.go_on(30, 3, StopRule(go_on=partial(operator.gt, min(passes, 1))))
        assert before <= len(part) <= 30
        assert all(parent is None or parent < node for node, parent in enumerate(part.parents))
        assert part.depth <= min(search.passes, 3)
        before = len(part)
    assert part.is_settled
    assert set(part.tokens) <= set(whole.tokens)


@pytest.mark.parametrize("nodes", [64, 640])
def test_a_search_of_a_recorded_tree_expands_as_many_nodes_in_a_pass_as_a_drafter(nodes: int) -> None:
    width = 200
    parents = (*(None,) * width, *range(width))
    whole = DraftTree((*range(width), *range(width)), parents, (0.9 / width,) * width + (0.1 / width,) * width)
    search = RecordedSearch(whole, (), set())
    search.go_on(nodes, 2)
    assert search.rows[1] == expansions(nodes) == {64: 16, 640: 40}[nodes]


def test_the_passes_of_a_drafter_are_noted_tree_by_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    draft, scoring, passes = load_whole(DRAFT, torch.float32), LocalSession.scoring, list[int]()

    def count(self: LocalSession, sweep: Sweep, last: int) -> DraftPass:
        passes.append(len(sweep.tokens))
        return scoring(self, sweep, last)

    monkeypatch.setattr(LocalSession, "scoring", count)
    timed, text = TimedDrafter(ModelDrafter(draft, draft.vocab_size, 512)), [5, 6, 7]
    for sequence, nodes in ((text, 4), (text, 24), ([*text, 8], 24), ([*text, 9, 8], 48), (text, 4)):
        timed.grow(sequence, nodes, 8, Sampling())
    assert min(noted for _, noted, *_ in timed.grown) > 0
    assert sum(noted for _, noted, *_ in timed.grown) == len(passes)


def test_a_search_of_a_recorded_tree_goes_on_below_what_was_picked() -> None:
    """As the drafter does: what was expanded below the pick takes no pass again."""
    text = recorded(3, 1.0)
    first = RecordedSearch(text.trees[PROMPT], (), set())
    first.go_on(30, 12)
    passed = text.tokens[PROMPT : PROMPT + 2]
    search = RecordedSearch(text.trees[PROMPT + 2], (), first.below(passed))
    fresh = RecordedSearch(text.trees[PROMPT + 2], (), set())
    assert search.passes == 0
    assert search.go_on(30, 12) == fresh.go_on(30, 12)
    assert 0 <= search.passes < fresh.passes
    later = RecordedSearch(text.trees[PROMPT + 3], (), search.below(text.tokens[PROMPT + 2 : PROMPT + 3]))
    assert later.passes == 0, "also what the search before the last one expanded"
    assert RecordedSearch(text.trees[PROMPT + 3], (), first.below((1, 2))).passes == 1


def test_picks_are_known_along_the_text_only() -> None:
    text = recorded(4, 1.0)
    picks = picks_of(text.trees[PROMPT], text.tokens, PROMPT)
    assert picks[None] == text.tokens[PROMPT]
    true = [node for node in picks if node is not None]
    assert [text.trees[PROMPT].tokens[node] for node in sorted(true)] == list(text.tokens[PROMPT : PROMPT + len(true)])


@pytest.mark.parametrize("profile", PROFILES)
def test_who_is_alone_finds_no_load(profile: str, tokenizer: FastTokenizer) -> None:
    """Neither behind the parts of its own prompt, nor behind sweeps of its own that a walk has left."""
    control = Goodput(64)
    replay_texts([recorded(seed, 0.9) for seed in range(3)], PROFILES[profile], control, tokenizer)
    assert control.latency_model("virtual").sharers == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("knows", [0.0, 0.9])
def test_a_load_that_went_away_is_believed_in_no_longer(knows: float, tokenizer: FastTokenizer) -> None:
    """Sweeps that should still be in each other's way are not, once they are back.

    Else each seems to have met the one before it, which teaches nothing of load.
    """
    control, texts = Goodput(32), [recorded(seed, knows) for seed in range(4)]
    replay_texts(texts[:1], replace(NEAR, others=(4.0,) * HOPS), control, tokenizer)
    assert control.latency_model("virtual").load > 3
    for _ in range(3):
        replay_texts(texts, NEAR, control, tokenizer)
    assert control.latency_model("virtual").load < 1.5


def test_what_drafting_takes_is_counted(tokenizer: FastTokenizer) -> None:
    texts = [recorded(seed, 0.8) for seed in range(3)]
    free = replace(NEAR, pass_ms=0.0)
    speeds = [
        replay_texts(texts, costs, FixedPolicy(8), tokenizer).tokens_per_s
        for costs in (
            free,
            replace(free, pass_ms=4.0),
            replace(free, pass_row_ms=4.0),
            replace(free, grow_ms=4.0),
            replace(free, learn_ms=4.0),
        )
    ]
    assert all(speed < speeds[0] for speed in speeds[1:4])
    assert speeds[2] < speeds[1], "a pass has a row at least"
    assert speeds[0] > speeds[4], "what a reply taught is learned before the next tree grows"
    slow = replay_texts(texts, replace(free, learn_ms=1e3), FixedPolicy(8), tokenizer).tokens_per_s
    assert slow < speeds[1], "nobody hears its reply before one has learned"


async def test_a_tree_grows_by_what_the_reply_before_it_taught(tokenizer: FastTokenizer) -> None:
    """Where a guess was wrong, the reply that says so tells most of what follows."""
    events: list[str] = []

    class Noting(RecordedDrafter):
        def grow(
            self, sequence: Sequence[int], nodes: int, depth: int, sampling: Sampling, worth: StopRule = NO_LIMIT
        ) -> DraftTree:
            events.append("grow")
            return super().grow(sequence, nodes, depth, sampling, worth)

        def learn(self, tree: DraftTree, picks: Picks, others: Picks = NO_PICKS) -> None:
            events.append("learn")

    text = recorded(2, 0.5)
    setup = ReplaySetup(lambda clock: Noting(text, FAR, clock))
    await replay_text(text, FAR, FixedPolicy(8), tokenizer, setup)
    assert len(events) > 20
    assert events[:20] == ["grow", "learn"] * 10


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[GenerationState]:
    """All that a replay makes."""
    made: list[GenerationState] = []

    def kept(*given: Any, **named: Any) -> GenerationState:  # noqa: ANN401 - a job's own
        made.append(GenerationState(*given, **named))
        return made[-1]

    monkeypatch.setattr("benchmarks.control.replay.GenerationState", kept)
    return made


@pytest.mark.parametrize("paces", [(1.0, 1.0, 1.0), (6.0, 1.0, 1.0), (1.0, 1.0, 6.0)])
@pytest.mark.parametrize("is_said", [True, False])
def test_nothing_is_sent_before_every_hop_can_take_it(
    *, is_said: bool, paces: tuple[float, ...], tokenizer: FastTokenizer, jobs: list[GenerationState]
) -> None:
    """With drafts that cost nothing there is always more to send; what waits at a hop can no longer be chosen.

    Also where one machine is slower than the others, whether or not routing knew of it.
    """
    costs = replace(PROFILES["25 ms, 100 Mbit/s"], pass_ms=0.0, row_ms=1.0, paces=paces)
    texts, slowest = [recorded(seed, 0.9) for seed in range(4)], paces.index(max(paces))
    setup = ReplaySetup(
        forecast=lambda costs: replace(costs.forecast(), bottleneck_share=costs.forecast().bottleneck_share * is_said)
    )
    replay_texts(texts, costs, Goodput(512), tokenizer, setup)
    parts = [sweep.hops[slowest] for job in jobs for sweep in job.sweeps if sweep.is_part]
    assert len(parts) > 40
    assert fmean(hop.queue_ms for hop in parts) < 0.5 * fmean(hop.compute_ms for hop in parts)


def test_who_shares_one_core_is_slower(tokenizer: FastTokenizer, jobs: list[GenerationState]) -> None:
    texts = [recorded(seed, 0.8) for seed in range(3)]
    speeds = [
        replay_texts(texts, replace(NEAR, cores=cores, handling_ms=handling), FixedPolicy(8, 3), tokenizer).tokens_per_s
        for cores, handling in ((None, 0.0), (4, 0.0), (1, 0.0), (1, 20.0))
    ]
    assert speeds[0] == speeds[1], "four things can go on at once: a draft and three hops"
    assert speeds[1] > speeds[2] > speeds[3]
    hops = [hop for job in jobs for sweep in job.sweeps for hop in sweep.hops]
    assert max(hop.compute_ms for hop in hops) <= NEAR.compute_ms(9) + 1e-6, "a core that others have is waited for"


async def test_uplinks_that_are_far_slower_than_said_are_known_from_the_prompt(tokenizer: FastTokenizer) -> None:
    """Sixteen nodes of 8 KiB over 512 kbit/s take as long as a dozen plain tokens; nobody had measured the links."""

    class Told(Goodput):
        """Counts the prompt's tokens that it hears of, and notes what it makes of links then."""

        read, row_ms = 0, 0.0

        def observe_sweep(self, route: Hashable, spent: SweepMeasurement) -> None:
            super().observe_sweep(route, spent)
            if spent.is_prompt:
                self.read, self.row_ms = self.read + spent.nodes, self.latency_model(route).links.b

    slow = Costs(10, 0.5, 20, 0.1, 6, row_bytes=8_192)
    setup = ReplaySetup(forecast=lambda costs: replace(costs, mbit=DEFAULT_LINK_MBIT_PER_S).forecast())
    for seed in range(3):
        text, policy = recorded(seed, 0.3), Told(64)
        plain, plain_s, _ = await replay_text(text, slow, FixedPolicy(0), tokenizer)
        ours, ours_s, _ = await replay_text(text, slow, policy, tokenizer, setup)
        assert policy.read == PROMPT - 1
        assert policy.row_ms == pytest.approx(2 * slow.transfer_ms(1), rel=0.1)
        assert ours / ours_s > 0.9 * plain / plain_s
