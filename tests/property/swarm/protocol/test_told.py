"""A tail that gets structure from the chain and tokens from the client does what one does that gets both at once (P17).

The two ways have paces of their own. At some point a new tail may take the place of the first: the chain gives it a
snapshot of structure, which is older than the client's log or as new, and the client tells it its log anew.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from client.chain.tells import TellLog, parts_of, tell_of
from swarm.protocol.hop_log import HopLog, SweepWork
from swarm.protocol.journal import Journal
from swarm.protocol.messages import Sampling, Sweep, SweepFrame, Want
from swarm.protocol.session import SessionState
from swarm.protocol.told import Told
from tests.property.swarm.protocol.test_session import LIMITS, Model, Step, agree, logs, play


def dressed(log: list[Step], chance: random.Random) -> list[Sweep]:
    """The sweeps of a log, some with a setting or a wish; replies to some are held when the next one leaves."""
    sweeps, acked = list[Sweep](), 0
    for sweep in play(Model(), log):
        acked = chance.randint(acked, sweep.sequence - 1)
        sampling = Sampling(seed=chance.randrange(9)) if chance.random() < 0.4 else None
        want = Want(log_probs=True) if chance.random() < 0.4 else None
        sweeps.append(replace(sweep, sampling=sampling, want=want, acked=acked))
    return sweeps


@given(logs, st.integers(0, 2**32))
def test_a_tail_that_is_told_runs_what_it_would_run(log: list[Step], seed: int) -> None:
    chance = random.Random(seed)
    sweeps = dressed(log, chance)
    whole, tail = HopLog(LIMITS), HopLog(LIMITS, Told(is_new=True))
    frames = deque(SweepFrame(sweep.structure()) for sweep in sweeps)
    tells = deque(tell for sweep in sweeps for tell in parts_of(tell_of(sweep)))
    for sweep in sweeps:
        whole.receive(SweepFrame(sweep))
    expected = list(iter(whole.next_work, None))
    found: list[SweepWork] = []
    while frames or tells or len(tail):
        if frames and chance.random() < 0.4:
            tail.receive(frames.popleft())
        elif tells and chance.random() < 0.6:
            tail.hear(tells.popleft())
        elif (work := tail.next_work()) is not None:
            assert tail.untold is None or work.frame.sweep.sequence < tail.untold
            found.append(work)
    assert [work.frame.sweep for work in found] == [work.frame.sweep for work in expected]
    assert (tail.executed.committed, tail.executed.live) == (whole.executed.committed, whole.executed.live)
    assert tail.executed.sampling == whole.executed.sampling


@given(logs, st.integers(0, 2**32))
def test_a_new_tail_finds_a_token_for_each_node(log: list[Step], seed: int) -> None:
    """Whoever gives it the structure has every sweep whose reply the client holds, and some later ones."""
    chance = random.Random(seed)
    sweeps = dressed(log, chance)
    count = chance.randint(1, len(sweeps))  # that have left when the new tail is told
    told = TellLog(SessionState(LIMITS))
    for sweep in sweeps[:count]:
        told.note(sweep)
    given_at = chance.randint(sweeps[count - 1].acked, count)
    before = SessionState(LIMITS)
    journal = Journal(before, is_bare=True)
    for sweep in sweeps[:given_at]:
        before.apply(sweep.structure())
        journal.note(sweep)
    snapshot = replace(journal.snapshot(), rows=None)
    tail = HopLog(LIMITS, Told(is_new=False))
    tells = deque([*told.all(), *(tell for sweep in sweeps[count:] for tell in parts_of(tell_of(sweep)))])
    frames = deque(SweepFrame(sweep.structure()) for sweep in sweeps[given_at:])
    is_restored = False
    while not is_restored or frames or tells or len(tail):
        if not is_restored and chance.random() < 0.5:
            tail.restore(snapshot)
            is_restored = True
        elif is_restored and frames and chance.random() < 0.4:
            tail.receive(frames.popleft())
        elif tells and chance.random() < 0.6:
            tail.hear(tells.popleft())
        else:
            tail.next_work()
    model = Model()
    for _ in play(model, log):
        pass
    agree(tail.executed, model)
    last = Sampling()
    for sweep in sweeps:
        last = sweep.sampling or last
    assert tail.executed.sampling == last
