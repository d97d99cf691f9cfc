"""What a worker is given of a batch that the driver has: the rows that its member loads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hetjax.runtime.instructions.placement import Placement


@dataclass(frozen=True, eq=False)
class GivenRows:
    """Rows of a step's batch, for one worker.

    Args:
        pieces: of each piece the number of its first row in the batch, and its rows of every leaf;
            a leaf that the worker does not read has none.
    """

    pieces: tuple[tuple[int, tuple[np.ndarray, ...]], ...]

    def __call__(self, first: int, end: int) -> Sequence[np.ndarray]:
        """Some of the rows, as a feed gives them.

        Args:
            first: the first row's number in the batch.
            end: the number after the last row's.
        """
        having = [
            (start, leaves)
            for start, leaves in self.pieces
            if start <= first and end <= start + max(map(len, leaves))
        ]
        assert having, "a worker loads rows that its member has"
        start, leaves = having[-1]
        return [leaf[first - start : end - start] for leaf in leaves]


def given_rows(
    placement: Placement, stages: Sequence[int], member: int, leaves: Sequence[np.ndarray]
) -> GivenRows:
    """The rows of a batch that a member of a stage loads, or stages that share devices.

    Args:
        placement: where arrays lie.
        stages: which stage, or which stages.
        member: which of its members.
        leaves: the batch of a step, whole.
    """
    read = {leaf for stage in stages for leaf in placement.pipelines.stages[stage].batch}
    if not read:
        return GivenRows(())
    stage = stages[0]
    pipeline = placement.pipeline_plan(stage)
    size, begin = pipeline.microbatch_size, placement.first_example(stage)
    first, end = placement.examples_of(stage, member)
    if (first, end) == (0, size):
        spans = [(begin, begin + pipeline.num_microbatches * size)]
    else:
        bases = [begin + number * size for number in range(pipeline.num_microbatches)]
        spans = [(base + first, base + end) for base in bases]

    def rows(start: int, stop: int) -> tuple[np.ndarray, ...]:
        return tuple(leaf[start:stop] if i in read else leaf[:0] for i, leaf in enumerate(leaves))

    return GivenRows(tuple((start, rows(start, stop)) for start, stop in spans))
