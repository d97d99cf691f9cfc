"""No pipeline that fits goes beyond the layers that devices are said to hold."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetjax.pipeline.schedules.schedule import WARM_UP_SCHEDULES
from hetjax.planner.harp.counted_reach import CountedReach
from hetjax.planner.harp.fixed_pace import Place
from hetjax.planner.harp.stage_table import StageTable
from tests.planner.test_search import CLUSTERS, counts_of, crossed, placements, random_table

Counted = tuple[tuple[Place, ...], list[int]]


def fitting(table: StageTable, pace: float) -> list[Counted]:
    """Every pipeline that fits at a pace, with its warm-up counts."""
    found = []
    for places in placements(table):
        pairs = crossed(table, places)
        if max((each for pair in pairs for each in pair), default=0.0) > pace:
            continue
        counts = counts_of(table, pairs, pace)
        stages = [(table.slices[p.subcluster][p.slice], p.layers) for p in places]
        if all(
            ((cut.seconds_of(layers) <= pace) & (cut.limits_of(layers) >= count)).any()
            for (cut, layers), count in zip(stages, counts, strict=True)
        ):
            found.append((places, counts))
    return found


@given(
    seed=st.integers(0, 2**32),
    num_layers=st.integers(1, 4),
    nodes=st.sampled_from(CLUSTERS),
    schedule=st.sampled_from(WARM_UP_SCHEDULES),
    pace=st.sampled_from([1.0, 2.0, 4.0]),
    told=st.integers(1, 5),
)
def test_every_pipeline_that_fits_is_within_reach(seed, num_layers, nodes, schedule, pace, told):
    table = random_table(
        seed, num_layers=num_layers, nodes=nodes, num_microbatches=5, schedule=schedule
    )
    gpipe = schedule == "gpipe"
    reach = CountedReach(table, pace, 5 if gpipe else 1, 1 if gpipe else told)
    for places, counts in fitting(table, pace):
        rows = [1 if gpipe else min(count, told) for count in counts]
        assert reach.least_count is not None
        assert reach.least_count <= rows[0]
        for stage, (place, row) in enumerate(zip(places, rows, strict=True)):
            ahead = {p.subcluster for p in places[:stage]} - {place.subcluster}
            after = {p.subcluster for p in places[stage:]}
            num_nodes, per_node = table.nodes[place.subcluster]
            left = place.start // per_node
            used = sum(1 << each for each in after)
            held = reach.behind[used, place.subcluster][num_nodes - left][row]
            assert held >= table.num_layers - place.layers[0]
            others = sum(1 << each for each in ahead)
            nodes_left = -(-place.start // per_node)
            assert reach.before(others, place.subcluster)[nodes_left][row] >= place.layers[0]


def test_memory_rules_out_paces_that_time_allows():
    table = random_table(3, num_layers=4, nodes=((4, 1),), num_microbatches=8, schedule="1f1b")
    for cut in table.slices[0]:
        # One layer a stage, and as many microbatches as the third from the end keeps.
        lengths = np.subtract.outer(np.arange(5), np.arange(5)).T.ravel()
        cut.seconds[:] = np.where(lengths == 1, 1.0, np.inf)
        cut.live_limits[:] = 3
    assert CountedReach(table, 2.0, 1, 8).least_count is None
    for cut in table.slices[0]:
        cut.live_limits[:] = 4
        for name in ("fastest_by_length", "bounds_by_length"):
            cut.__dict__.pop(name, None)
    assert CountedReach(table, 2.0, 1, 8).least_count == 4


@pytest.mark.parametrize("num_counts", [1, 2, 8])
def test_fewer_counts_reach_no_less(num_counts):
    table = random_table(5, num_layers=4, nodes=((2, 2), (1, 2)), num_microbatches=8)
    few, many = (CountedReach(table, 3.0, 1, number) for number in (num_counts, 8))
    for key, most in many.behind.items():
        assert (few.behind[key][:, -1] >= most[:, num_counts]).all()
