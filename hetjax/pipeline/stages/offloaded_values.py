"""What a microbatch's activations leave the devices with, where a stage offloads them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from hetjax.pipeline.program.traced_program import num_bytes
from hetjax.pipeline.stages.backward import Shapes, StagePrograms

_LEFT_BEHIND = 0.01
"""Of the bytes that a microbatch keeps, the share that small arrays may stay with on the devices:
a copy of its own costs each of them more than its memory is worth."""


@dataclass(frozen=True)
class OffloadedValues:
    """Of what a stage's backward pass reads of a microbatch, what travels; each by place.

    Args:
        batch: batch leaves.
        received: values received.
        residuals: residuals, which a stage that recomputes has none of before that.
    """

    batch: tuple[int, ...] = ()
    received: tuple[int, ...] = ()
    residuals: tuple[int, ...] = ()


def offloaded_values(programs: StagePrograms) -> OffloadedValues:
    """Choose what travels: all that is kept, but for the smallest arrays.

    Parameters are no part of it, nor cotangents, nor what a recomputation makes.

    Args:
        programs: the stage's programs.

    Returns:
        The values; none in a stage without a backward pass.
    """
    if not programs.has_backward:
        return OffloadedValues()
    reads = (programs.recompute_reads, programs.backward_reads)
    again = programs.recompute is not None
    kept = {
        "batch": _read(programs.batch, [each.batch for each in reads]),
        "received": _read(programs.received, [each.received for each in reads]),
        "residuals": {} if again else dict(enumerate(map(num_bytes, programs.residuals))),
    }
    sizes = [(size, name, place) for name, each in kept.items() for place, size in each.items()]
    smallest = sorted(sizes)
    allowed = _LEFT_BEHIND * sum(size for size, _, _ in sizes)
    sums = itertools.accumulate(size for size, _, _ in smallest)
    stays = {each[1:] for each, total in zip(smallest, sums, strict=True) if total <= allowed}
    return OffloadedValues(
        **{
            name: tuple(place for place in sorted(each) if (name, place) not in stays)
            for name, each in kept.items()
        }
    )


def _read(shapes: Shapes, reads: Sequence[Sequence[int]]) -> dict[int, int]:
    """The bytes of those that are read, by place."""
    return {place: num_bytes(shapes[place]) for each in reads for place in each}
