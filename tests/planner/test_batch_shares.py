"""A batch shared out among pipelines: no other numbers and sizes of microbatches are faster."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from hypothesis import given
from hypothesis import strategies as st

from hetjax.planner.harp.batch_shares import BatchShare, share_out

SIZES = (1, 2, 3, 4, 6, 12)


class Pipelines:
    """Made-up times of pipelines, which rise with the number of microbatches of a size."""

    def __init__(self, costs: Sequence[Sequence[Sequence[float]]]):
        self.times = [[list(itertools.accumulate(each)) for each in row] for row in costs]
        self.asked: list[tuple[int, BatchShare]] = []

    def seconds(self, pipeline: int, share: BatchShare, most: float = float("inf")) -> float:
        self.asked.append((pipeline, share))
        return min(most, self.times[pipeline][SIZES.index(share.size)][share.count - 1])


def every_share(total: int, sizes: Sequence[Sequence[int]]) -> Iterator[tuple[BatchShare, ...]]:
    """Every way to share out a batch."""
    if not sizes:
        yield from [()] if total == 0 else []
        return
    for size in sizes[0]:
        for count in range(1, total // size + 1):
            for rest in every_share(total - count * size, sizes[1:]):
                yield (BatchShare(count, size), *rest)


COSTS = st.lists(st.floats(0.1, 2.0), min_size=12, max_size=12)


@given(
    total=st.integers(3, 12),
    costs=st.lists(
        st.lists(COSTS, min_size=len(SIZES), max_size=len(SIZES)), min_size=2, max_size=3
    ),
    sizes=st.lists(
        st.lists(st.sampled_from(SIZES), min_size=1, max_size=4, unique=True),
        min_size=3,
        max_size=3,
    ),
    most=st.sampled_from([float("inf"), 10.0, 3.0, 1.0]),
)
def test_no_other_shares_are_faster(total, costs, sizes, most):
    pipelines, sizes = Pipelines(costs), sizes[: len(costs)]
    least = [[0.1] * len(each) for each in sizes]
    found = share_out(total, sizes, least, pipelines.seconds, most)
    assert len(pipelines.asked) == len(set(pipelines.asked))

    def slowest(shares: Sequence[BatchShare]) -> float:
        return max(pipelines.seconds(place, share) for place, share in enumerate(shares))

    best = min(map(slowest, every_share(total, sizes)), default=float("inf"))
    if found is None:
        assert best >= most
    else:
        assert sum(share.count * share.size for share in found) == total
        assert slowest(found) == best


def test_few_numbers_have_to_be_planned():
    asked = []

    def seconds(pipeline: int, share: BatchShare, most: float) -> float:
        asked.append(share)
        start, pace = [(3.0, 1.0), (5.0, 2.5)][pipeline]
        return min(most, start + pace * share.count * share.size**0.9)

    sizes = [1, 2, 4, 8]
    found = share_out(1024, [sizes, sizes], [[0.1 * each for each in sizes]] * 2, seconds)
    assert found is not None
    assert [share.size for share in found] == [8, 8]
    assert len(asked) < 24


def test_what_fits_with_no_number_is_not_asked_for_all():
    asked: list[int] = []

    def seconds(pipeline: int, share: BatchShare, most: float) -> float:
        asked.append(share.count)
        return float("inf") if pipeline == 0 else float(share.count)

    assert share_out(10**5, [[1], [1]], [[1e-3], [1e-3]], seconds) is None
    assert len(asked) < 10
