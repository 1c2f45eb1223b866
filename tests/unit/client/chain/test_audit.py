"""The coin of audits, and what is compared of picks without any machine."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from client.chain import evidence_files
from client.chain.audit import (
    AuditedText,
    Auditor,
    AuditOwner,
    _bounds_between,
    _compared,
    _compared_picks,
    _Picked,
    coin,
)
from client.chain.evidence_files import FILES_KEPT, keep_evidence
from swarm.base.tasks import TaskScope
from swarm.compute.gumbel import gumbel_row
from swarm.compute.row_codec import encode_rows
from swarm.protocol.messages import Codec, Sampling
from swarm.trust.bounds import FEWEST, Agrees, Bounds, Differs, Unclear

GREEDY, WARM = Sampling(0, 0.0), Sampling(5, 0.9)
BOUNDS = Bounds("cpu-float32", "cpu-float32")
BEST = {7: -0.5, 8: -0.5001, 9: -4.0}


def test_the_coin_falls_as_often_as_it_should() -> None:
    """Of 20,000 throws, with odds of 10^-9 of being off by more than six deviations."""
    count = sum(coin(0.05) for _ in range(20_000))
    assert abs(count - 1_000) < 6 * math.sqrt(1_000)
    assert not any(coin(0.0) for _ in range(1_000))
    assert all(coin(1.0) for _ in range(1_000))


@pytest.mark.parametrize(("doubt", "share"), [(0.0, 0.02), (0.5, 0.51), (1.0, 1.0)])
async def test_a_doubted_route_is_audited_more_often(doubt: float, share: float) -> None:
    """As often as its most doubtful machine says; the coin alone decides."""
    tossed: list[float] = []

    def toss(chance: float) -> bool:
        tossed.append(chance)
        return False

    route = SimpleNamespace(hops=[SimpleNamespace(peer=peer) for peer in ("a", "b", "c")])
    text = cast("AuditedText", SimpleNamespace(route=route, committed=[None] * FEWEST))
    owner = cast(
        "AuditOwner", SimpleNamespace(doubt={"a": 0.0, "b": doubt, "c": 0.0}.__getitem__, refuted=lambda _: 0.0)
    )
    async with TaskScope() as scope:
        await Auditor(owner, scope, 0.02, toss).text_is_over(text)
    assert tossed == [pytest.approx(share)]


async def test_what_others_say_adds_audits_of_whom_they_mean_and_takes_none_away() -> None:
    """The own coin is thrown first, and says which hop as ever; only where it says no, hearsay may have one audited."""
    route = SimpleNamespace(hops=[SimpleNamespace(peer=peer) for peer in ("a", "b", "c")])
    said = {"a": 0.0, "b": 0.5, "c": 0.0}
    owner = cast("AuditOwner", SimpleNamespace(doubt=lambda _: 0.0, refuted=said.__getitem__))
    async with TaskScope() as scope:
        for answers, place in (((True,), 2), ((False, True), 1), ((False, False), None)):
            falls, tossed = iter(answers), list[float]()

            def toss(share: float, tossed: list[float] = tossed, falls: Iterator[bool] = falls) -> bool:
                tossed.append(share)
                return next(falls)

            assert Auditor(owner, scope, 0.02, toss, draw=lambda _: 2)._place(route.hops) == place
            assert tossed == [0.02, 0.5][: len(answers)]
        said["b"] = 0.0
        assert Auditor(owner, scope, 0.02, lambda share: share > 0.4)._place(route.hops) is None


def test_evidence_is_kept_for_its_user_alone_and_the_oldest_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "state" / "evidence"
    kept = [keep_evidence(bytes([number]) * 8, folder) for number in range(FILES_KEPT + 2)]
    for age, file in enumerate(reversed(kept)):
        if file is not None and file.exists():
            os.utime(file, (1_000.0 - age, 1_000.0 - age))
    newest = keep_evidence(b"newest", folder)
    assert newest is not None
    assert newest.read_bytes() == b"newest"
    assert newest.stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700
    assert len(list(folder.iterdir())) == FILES_KEPT
    assert keep_evidence(b"newest", folder) == newest, "one file, whoever finds it again"
    monkeypatch.setattr(evidence_files, "BYTES_KEPT", 20)
    assert keep_evidence(bytes(21), folder) is None
    last = keep_evidence(bytes(14), folder)
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 20
    assert last in set(folder.iterdir())
    (tmp_path / "file").touch()
    assert keep_evidence(b"x", tmp_path / "file" / "no") is None


def picked(token: int, sampling: Sampling = GREEDY, best: dict[int, float] | None = None) -> _Picked:
    return _Picked(sampling, {4: token}, {} if best is None else {4: best})


def test_a_near_tie_agrees_and_a_worse_token_differs() -> None:
    ours = picked(7, best=BEST)
    assert isinstance(_compared_picks(ours, picked(7), BOUNDS), Agrees)
    assert isinstance(_compared_picks(ours, picked(8), BOUNDS), Agrees)
    found = _compared_picks(ours, picked(9), BOUNDS)
    assert isinstance(found, Differs)
    assert (found.what, found.places, found.count) == ("picks", (5,), 1)
    assert found.largest == pytest.approx(3.5)
    assert isinstance(_compared_picks(ours, picked(77), BOUNDS), Differs), "one that is not among the likeliest"


def test_where_nobody_tells_of_other_tokens_another_pick_differs() -> None:
    assert isinstance(_compared_picks(picked(7), picked(8), BOUNDS), Differs)


def test_the_noise_counts_at_a_temperature() -> None:
    """Of two tokens that are as likely, the one with more noise is better, by their noise times the temperature."""
    noise, even = gumbel_row(WARM.seed, 5, 9), {7: -1.0, 8: -1.0}
    better, worse = (7, 8) if noise[7] > noise[8] else (8, 7)
    found = _compared_picks(picked(better, WARM, even), picked(worse, WARM), BOUNDS)
    assert isinstance(found, Differs)
    assert found.largest == pytest.approx(0.9 * abs(noise[7] - noise[8]))
    assert isinstance(_compared_picks(picked(worse, WARM, even), picked(better, WARM), BOUNDS), Agrees)


def test_picks_by_filters_agree_or_say_nothing() -> None:
    filtered = Sampling(5, 0.9, top_p=0.8)
    assert isinstance(_compared_picks(picked(7, filtered), picked(7, filtered), BOUNDS), Agrees)
    assert isinstance(_compared_picks(picked(7, filtered), picked(8, filtered), BOUNDS), Unclear)


async def test_two_machines_of_one_kind_do_not_make_a_liar_of_an_honest_third() -> None:
    """Both replay a text in chunks, and get the same bits; what was decoded in sweeps is rounded otherwise."""
    rng = torch.Generator().manual_seed(0)
    values = torch.randn(80, 64, generator=rng)
    alike = encode_rows(values, Codec.BF16)
    honest = encode_rows(values + 1e-2 * torch.randn(80, 64, generator=rng), Codec.BF16)
    liar = encode_rows(values + 0.2 * torch.randn(80, 64, generator=rng), Codec.BF16)
    bounds = await _bounds_between(alike, alike, "cpu-bfloat16")
    assert bounds is not None
    assert isinstance(await _compared(alike, honest, bounds), Agrees)
    assert isinstance(await _compared(alike, liar, bounds), Differs)
