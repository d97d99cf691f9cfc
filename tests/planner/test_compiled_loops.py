"""Compiled loops and NumPy find the same, to the last digit."""

from __future__ import annotations

import importlib.util
import itertools
import shutil
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from cases import examples
from hypothesis import given
from hypothesis import strategies as st

from hetjax.pipeline.schedules.schedule import WARM_UP_SCHEDULES
from hetjax.planner.harp import compiled
from hetjax.planner.harp.counted_reach import CountedReach
from hetjax.planner.harp.fixed_pace import FixedPace
from hetjax.planner.harp.search import search
from hetjax.planner.harp.stage_table import StageTable
from tests.planner.test_search import random_table

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("numba") is None, reason="needs the extra 'fast'"
)

CLUSTERS = (((2, 2), (1, 2)), ((3, 4), (2, 2), (1, 1)), ((2, 3),))
NEVER = sys.maxsize


@st.composite
def tables(draw: st.DrawFn) -> StageTable:
    """Tables of any schedule, with lost devices, a fixed order, and limits on the stages."""
    nodes = draw(st.sampled_from(CLUSTERS))
    lost = [tuple(draw(st.integers(0, m)) for _ in range(n)) for n, m in nodes]
    min_stages = draw(st.integers(1, 3))
    return random_table(
        draw(st.integers(0, 2**32)),
        num_layers=draw(st.integers(1, 8)),
        nodes=nodes,
        num_microbatches=draw(st.integers(1, 8)),
        schedule=draw(st.sampled_from(WARM_UP_SCHEDULES)),
        order=draw(st.none() | st.permutations(range(len(nodes))).map(tuple)),
        min_stages=min_stages,
        max_stages=draw(st.none() | st.integers(min_stages, 4)),
        lost=draw(st.just(()) | st.just(tuple(lost))),
    )


@examples(usual=40, full=300)
@given(
    table=tables(),
    pace=st.floats(0.5, 8.0),
    told=st.integers(1, 8),
    reached=st.integers(1, 8),
    knows_reach=st.booleans(),
)
def test_one_pace_is_the_same(table, pace, told, reached, knows_reach):
    gpipe, least = table.schedule == "gpipe", table.num_microbatches
    counts = (least,) if gpipe else tuple(range(1, told + 1))
    arguments = (table, pace, least, 1) if gpipe else (table, pace, 1, reached)
    every = []
    for worth in (0, NEVER):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(compiled, "WORTH", worth)
            reach = CountedReach(*arguments)
            every.append((reach, FixedPace(table, counts, pace, reach if knows_reach else None)))
    (one_reach, one), (other_reach, other) = every
    assert one_reach.behind.keys() == other_reach.behind.keys()
    for key, layers in one_reach.behind.items():
        np.testing.assert_array_equal(layers, other_reach.behind[key])
    for others, (place, _) in itertools.product(range(8), enumerate(table.nodes)):
        used = others % (1 << len(table.nodes)) & ~(1 << place)
        of_one, of_other = (each.before(used, place) for each in (one_reach, other_reach))
        np.testing.assert_array_equal(of_one, of_other)
    assert one.best.keys() == other.best.keys()
    for head, suffixes in one.best.items():
        assert suffixes[:2] == other.best[head][:2]
        np.testing.assert_array_equal(suffixes.values, other.best[head].values)
    assert one.solution() == other.solution()
    firsts = [list(itertools.islice(each.pipelines(), 4)) for each in (one, other)]
    assert firsts[0] == firsts[1]


@given(table=tables())
def test_a_search_is_the_same(table):
    found = []
    for worth in (0, NEVER):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(compiled, "WORTH", worth)
            found.append(search(table))
    assert found[0] == found[1]


def test_only_what_is_large_is_compiled(monkeypatch: pytest.MonkeyPatch):
    small, large = (
        random_table(0, num_layers=2, nodes=((nodes, 8),) * 2, num_microbatches=4)
        for nodes in (4, 64)
    )
    assert not compiled.is_worth_compiling(small)
    assert compiled.is_worth_compiling(large)
    monkeypatch.setattr(compiled, "_has_numba", lambda: False)
    assert not compiled.is_worth_compiling(large)


def test_the_planner_does_not_load_numba():
    found = "import sys, hetjax.planner; print('numba' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", found], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_where_a_disk_is_full_nothing_is_kept(monkeypatch: pytest.MonkeyPatch):
    def loop(values):
        return values[0]

    function: Any = compiled.compiled(loop)
    assert function.stats.cache_path is not None
    usage = shutil.disk_usage(".")._replace(free=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    function = compiled.compiled(loop)
    assert function.stats.cache_path is None


def test_loops_are_compiled_where_nothing_can_be_kept(monkeypatch: pytest.MonkeyPatch):
    import numba

    def njit(*functions, cache=False):
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return functions[0]

    monkeypatch.setattr(numba, "njit", njit)
    assert compiled.compiled(max) is max
