"""Pipelines that are nearly the best by the closed form, for a simulation to choose among."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from hetjax.planner.harp.fixed_pace import FixedPace, Place
from hetjax.planner.harp.search import all_paces
from hetjax.planner.harp.stage_table import StageTable

_NUM_PACES = 8
"""At so many paces, each the same share below the one before, pipelines are looked for."""


def near_best(table: StageTable, most: float, number: int) -> Iterator[tuple[Place, ...]]:
    """Pipelines through which one microbatch is quick, at each of a few paces.

    Warm-up counts are left out of account: a pipeline may turn out not to fit.

    Args:
        table: what stages and transfers cost.
        most: a step that is known to be possible, in seconds: what has a slower pace or takes
            longer for one microbatch is left out.
        number: how many pipelines there are at most.

    Yields:
        The places of their stages; some of them several times.
    """
    if number < _NUM_PACES:
        return
    paces = all_paces(table)
    low, high = float(paces[0]), min(float(paces[-1]), most / table.num_microbatches)
    count = (table.num_microbatches,) if table.schedule == "gpipe" else (1,)
    for pace in np.geomspace(high, low, _NUM_PACES + 1)[:-1] if low < high else (high,):
        pipelines = FixedPace(table, count, float(pace)).pipelines(most)
        found = list(itertools.islice(pipelines, number // _NUM_PACES))
        yield from (places for _, places in found)
        if not found:
            # What no pipeline keeps up with, none does that has less time.
            return
