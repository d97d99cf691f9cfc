"""An update of leaves as one of their rows, where rows are parameters of their own.

The optimizer knows the leaves that the user has. What it does to a leaf that counts as rows it does
to each row, and sums over the leaf are those of its rows added up; only where it mixes rows
otherwise are they stacked.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

from hetjax.pipeline.program.frozen_leaves import FrozenLeaves
from hetjax.pipeline.program.row_steps import StepsByRows, row_function, shape_of
from hetjax.pipeline.program.stacked_leaves import StackedLeaves, whole_leaves
from hetjax.pipeline.program.traced_program import FlatJaxpr, Operand, needed_steps


class UpdateByRows(NamedTuple):
    """An update of parameters, some of which are rows of leaves.

    Args:
        flat: from parameters, summed gradients, optimizer state, summed loss and count to new
            parameters, new state and metrics: these of leaves, all else of what they count as.
        state: which leaves of the optimizer's state count as rows.
    """

    flat: FlatJaxpr
    state: StackedLeaves


@functools.lru_cache(maxsize=2)
def update_by_rows(flat: FlatJaxpr, leaves: StackedLeaves, frozen: FrozenLeaves) -> UpdateByRows:
    """Compute an update row by row.

    Args:
        flat: the update, as `hetjax.pipeline.update.traced_update.trace_update` returns it.
        leaves: which leaves of the parameters count as rows.
        frozen: leaves without a gradient, which are no inputs, and without an update, which are no
            outputs.

    Returns:
        The update of these rows.
    """
    places = range(len(leaves.rows))
    graded = [leaf for leaf in places if leaf not in frozen.without_gradient]
    updated = [leaf for leaf in places if leaf not in frozen.without_update]
    counts = [leaves.rows[leaf] for leaf in (*places, *graded)]
    of_state = flat.inputs[len(counts) : -2]
    given = {v: n for v, n in zip(flat.inputs, counts, strict=False) if n is not None}
    if not given:
        return UpdateByRows(flat, whole_leaves(len(of_state)))
    new_state = flat.outputs[len(updated) : len(updated) + len(of_state)]
    state = _state_in_rows(flat, given, of_state, new_state)
    in_rows = given | state
    made = StepsByRows(flat)
    inputs: list[int] = []
    for value in flat.inputs:
        inputs += made.give(value) if value in in_rows else [value]
    for step in flat.steps:
        made.add(step)
    counts = [*(leaves.rows[leaf] for leaf in updated), *(state.get(v) for v in of_state)]
    outputs: list[Operand] = []
    for operand, count in itertools.zip_longest(flat.outputs, counts):
        outputs += [made.whole(operand)] if count is None else made.rows(operand, count)
    steps = needed_steps(made.steps, outputs)
    return UpdateByRows(
        FlatJaxpr(tuple(made.values.avals), tuple(inputs), steps, tuple(outputs)),
        StackedLeaves(tuple(state.get(value) for value in of_state)),
    )


def may_mix_rows(flat: FlatJaxpr, leaves: StackedLeaves) -> bool:
    """Whether an update does anything else to rows of leaves than to work on each by itself.

    Args:
        flat: the update of leaves, of which each has a gradient and a new value.
        leaves: which of them count as rows.

    Returns:
        Whether it may; scalars that are sums or extrema over rows mix none.
    """
    count = len(leaves.rows)
    of_state = flat.inputs[2 * count : -2]
    new_state = flat.outputs[count : count + len(of_state)]
    rows = zip(flat.inputs, 2 * leaves.rows, strict=False)
    given = {value: number for value, number in rows if number is not None}
    in_rows = given | _state_in_rows(flat, given, of_state, new_state)
    for step in flat.steps:
        if in_rows.keys().isdisjoint(step.values()):
            continue
        by_rows = row_function(step, flat.avals, in_rows)
        if by_rows is None:
            return True
        if by_rows.join is None:
            in_rows[step.outputs[0]] = in_rows[next(v for v in step.values() if v in in_rows)]
        elif flat.avals[step.outputs[0]].shape:
            return True
    return False


def _state_in_rows(
    flat: FlatJaxpr,
    given: dict[int, int],
    state: Sequence[int],
    new_state: Sequence[Operand],
) -> dict[int, int]:
    """The leaves of the state that rows work on, or become, and how many rows they have."""
    found: dict[int, int] = {}
    while True:
        counts = given | found
        touched: dict[int, int] = {}
        for step in flat.steps:
            by_rows = row_function(step, flat.avals, counts)
            if by_rows is None:
                continue
            (count,) = {counts[value] for value in step.values() if value in counts}
            touched |= {v: count for v in step.values() if shape_of(v, flat.avals)[:1] == (count,)}
            if by_rows.join is None:
                counts[step.outputs[0]] = count
        ends = {
            value: counts[new]
            for value, new in zip(state, new_state, strict=True)
            if isinstance(new, int) and new in counts
        }
        more = {v: n for v, n in (touched | ends).items() if v in set(state)} | found
        if more == found:
            return found
        found = more
