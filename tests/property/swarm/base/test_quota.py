"""A quota under any order of calls: never more than the limit, nothing lost, nothing unbounded."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.base.quota import HoldingLimit, Quota, QuotaLimits, RateLimit, StrikeRule, address_key

KEYS = st.sampled_from([str(number) for number in range(12)])
CALLS = st.lists(
    st.one_of(
        st.tuples(st.just("take"), KEYS, st.integers(1, 3)),
        st.tuples(st.just("give"), KEYS, st.integers(1, 3)),
        st.tuples(st.just("spend"), KEYS, st.integers(1, 3)),
        st.tuples(st.just("strike"), KEYS, st.integers(1, 3)),
        st.tuples(st.just("wait"), KEYS, st.integers(0, 20)),
    ),
    max_size=120,
)


@settings(max_examples=150, deadline=None)
@given(CALLS, st.integers(1, 8))
def test_no_order_of_calls_passes_a_limit(calls: list[tuple[str, str, int]], max_keys: int) -> None:
    now = 0.0
    limit = HoldingLimit(per_key=4, total=10)
    rate = RateLimit(per_key=0.5, burst=3.0, total=1.5, total_burst=6.0)
    rule = StrikeRule(allowed=1, refuse_s=2.0, longest_s=9.0, forget_s=30.0)
    quota = Quota(QuotaLimits({"kv": limit}, {"bytes": rate}, rule, max_keys), lambda: now)
    held: Counter[str] = Counter()
    spent = 0
    for call, key, amount in calls:
        match call:
            case "take":
                fits = held[key] + amount <= limit.per_key and held.total() + amount <= limit.total
                taken = quota.take("kv", key, amount)
                assert taken <= fits
                assert taken or not fits or sum(1 for count in held.values() if count) >= max_keys
                held[key] += amount * taken
            case "give" if held[key] >= amount:
                quota.give("kv", key, amount)
                held[key] -= amount
            case "spend":
                spent += amount * quota.spend("bytes", key, amount)
            case "strike":
                quota.strike(key)
            case _:
                now += amount
        assert quota.held("kv", key) == held[key]
        assert quota.total("kv") == held.total()
        assert quota.holders("kv") == {key: count for key, count in held.items() if count}
        assert spent <= rate.total_burst + now * rate.total
        assert 0 <= quota.refused_s(key) <= rule.longest_s
        assert len(quota) <= max_keys
    for key, count in held.items():
        if count:
            quota.give("kv", key, count)
    assert quota.total("kv") == 0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 30), st.integers(1, 4)), max_size=60))
def test_one_key_spends_no_more_than_its_rate_and_a_burst(steps: list[tuple[float, int]]) -> None:
    now, spent = 0.0, 0
    rate = RateLimit(per_key=0.7, burst=4.0, total=1e6, total_burst=1e6)
    quota = Quota(QuotaLimits(rates={"lines": rate}), lambda: now)
    for seconds, amount in steps:
        now += seconds
        wait_s = quota.wait_s("lines", "a", amount)
        assert quota.spend("lines", "a", amount) == (wait_s == 0) or wait_s < 1e-9
        spent = spent + amount if wait_s == 0 else spent
        assert spent <= rate.burst + rate.per_key * now + 1e-6


@given(st.text(max_size=40))
def test_any_name_of_a_connection_has_a_key(peer: str) -> None:
    assert len(address_key(peer)) <= 43
