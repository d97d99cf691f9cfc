"""Members share a microbatch such that the slowest is as fast as it can be."""

from __future__ import annotations

import itertools

from cases import examples
from hypothesis import given
from hypothesis import strategies as st

from hetjax.planner.harp.member_shares import MemberRate, best_shares

RATES = st.builds(
    MemberRate,
    start=st.sampled_from([0.0, 0.5, 2.0]),
    example=st.floats(0.1, 8.0, allow_nan=False).map(lambda seconds: round(seconds, 2)),
    multiple=st.integers(1, 4),
    most=st.integers(0, 24),
)
MEMBERS = st.lists(RATES, min_size=1, max_size=3)


def slowest(members: list[MemberRate], shares: tuple[int, ...]) -> float:
    pairs = zip(members, shares, strict=True)
    return max(float(member.seconds(size)) for member, size in pairs)


def every_way(total: int, members: list[MemberRate]) -> list[tuple[int, ...]]:
    sizes = [range(m.multiple, m.most + 1, m.multiple) for m in members]
    return [shares for shares in itertools.product(*sizes) if sum(shares) == total]


@examples(usual=200)
@given(st.integers(1, 24), MEMBERS)
def test_no_other_shares_are_faster(total: int, members: list[MemberRate]):
    shares, ways = best_shares(total, members), every_way(total, members)
    if shares is None:
        assert not ways
        return
    assert shares in ways
    assert slowest(members, shares) == min(slowest(members, each) for each in ways)


@examples(usual=50)
@given(st.integers(1, 6), MEMBERS)
def test_planned_shares_are_never_slower_than_even_ones(each: int, members: list[MemberRate]):
    roomy = [MemberRate(m.start, m.example, m.multiple, 10**6) for m in members]
    even = tuple(each * member.multiple for member in roomy)
    shares = best_shares(sum(even), roomy)
    assert shares is not None
    assert slowest(roomy, shares) <= slowest(roomy, even)


def test_memory_decides_where_speeds_are_equal():
    small, large = MemberRate(0.0, 1.0, 1, 5), MemberRate(0.0, 1.0, 1, 11)
    assert best_shares(16, [small, large]) == (5, 11)
    assert best_shares(17, [small, large]) is None


def test_large_batches_are_shared_at_once():
    members = [MemberRate(0.0, 1.0 + place, 8, 10**9) for place in range(6)]
    shares = best_shares(2**14, members)
    assert shares is not None
    assert sum(shares) == 2**14
