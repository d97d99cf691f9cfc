"""How much of an optimizer's state belongs to each parameter."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection

from hetjax.pipeline.program.traced_program import FlatJaxpr, num_bytes
from hetjax.pipeline.stages.cutting import ParameterPart
from hetjax.pipeline.update.update_analysis import UpdateAnalysis


def state_shares(flat: FlatJaxpr, count: int, without_update: Collection[int]) -> tuple[float, ...]:
    """Find how much of an optimizer's state each parameter has, by where a divided update has it.

    Args:
        flat: the trace of an update, with all gradients, as one device computes it.
        count: of how many parameter leaves.
        without_update: those that have no part in it, by place.

    Returns:
        For each leaf how many times as many bytes an element of it has as one of all that are
        updated; scalars are left out, and arrays that are no leaf's belong to all alike. Empty
        where each has as many.
    """
    shapes = [flat.avals[value] for value in flat.inputs[:count]]
    whole = [ParameterPart(leaf) for leaf in range(count)]
    analysis = UpdateAnalysis(flat, shapes, [whole], [str(leaf) for leaf in range(count)], 1)
    updated = [leaf for leaf in range(count) if leaf not in without_update]
    together: dict[int, list[int]] = {}
    for leaf in updated:
        together.setdefault(analysis.component(analysis.parameters[leaf]), []).append(leaf)
    held: Counter[tuple[int, ...]] = Counter()
    for place, value in enumerate(analysis.state):
        if flat.avals[value].shape:
            like = analysis.parameter_like(place)
            owners = [like] if like in updated else together.get(analysis.component(value), updated)
            held[tuple(owners)] += num_bytes(flat.avals[value])
    sizes = [math.prod(shape.shape) for shape in shapes]
    mean = held.total() / max(sum(sizes[leaf] for leaf in updated), 1)
    shares = [0.0] * count
    for owners, size in held.items():
        each = size / max(sum(sizes[leaf] for leaf in owners), 1) / mean
        for leaf in owners:
            shares[leaf] += each
    return tuple(shares) if any(shares[leaf] != 1.0 for leaf in updated if mean) else ()
