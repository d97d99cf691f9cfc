"""Which values a forward pass keeps for the backward pass: a minimum cut.

A value that the backward pass needs can be kept, or computed again from kept ones by cheap steps
(elementwise arithmetic, changes of shape). Keeping the fewest bytes such that no expensive step
runs twice is a minimum cut between the expensive steps and what the backward pass needs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from hetjax.pipeline.program.traced_program import Step

# Flow capacities are 32-bit: bytes are counted in units that keep their sum below this.
_LARGEST = 2**30


def choose_residuals(
    steps: Sequence[Step],
    free: Collection[int],
    needed: Collection[int],
    size: Callable[[int], int],
    expensive: Callable[[Step], bool],
) -> frozenset[int]:
    """Choose the values to keep.

    Args:
        steps: the forward steps, in order.
        free: values at hand in the backward pass anyway: the stage's inputs.
        needed: values that the backward pass reads.
        size: a value's size in bytes.
        expensive: whether a step must not run twice.

    Returns:
        The values to keep, of the smallest total size; where several choices are as small, the
        one that computes the least again.
    """
    made = {output for step in steps for output in step.outputs}
    targets = [value for value in needed if value in made]
    if not targets:
        return frozenset()
    values = sorted(made)
    place = {value: i for i, value in enumerate(values)}
    source, sink = 2 * len(values), 2 * len(values) + 1
    unit = max(1.0, sum(size(value) for value in values) / _LARGEST * 2)
    edges: list[tuple[int, int, int]] = [
        (2 * i, 2 * i + 1, max(1, int(size(value) / unit))) for i, value in enumerate(values)
    ]
    for step in steps:
        costly = expensive(step)
        for output in step.outputs:
            if costly:
                edges.append((source, 2 * place[output], _LARGEST))
                continue
            edges.extend(
                (2 * place[value] + 1, 2 * place[output], _LARGEST)
                for value in step.values()
                if value in place and value not in free
            )
    edges.extend((2 * place[value] + 1, sink, _LARGEST) for value in targets)
    sink_side = _sink_side(edges, source, sink)
    return frozenset(
        value for i, value in enumerate(values) if 2 * i not in sink_side and 2 * i + 1 in sink_side
    )


def _sink_side(edges: list[tuple[int, int, int]], source: int, sink: int) -> set[int]:
    """The nodes that can still reach the sink when the flow is at its maximum."""
    unique: dict[tuple[int, int], int] = {}
    for a, b, capacity in edges:
        unique[a, b] = max(capacity, unique.get((a, b), 0))
    rows, columns = np.array(list(unique)).T
    capacity = np.array(list(unique.values()), dtype=np.int32)
    shape = (sink + 1, sink + 1)
    graph = csr_array((capacity, (rows, columns)), shape=shape, dtype=np.int32)
    flow = maximum_flow(graph, source, sink).flow
    residual = csr_array(graph - flow)
    residual.eliminate_zeros()
    backwards = csr_array(residual.T)
    return {int(node) for node in breadth_first_order(backwards, sink, return_predecessors=False)}
