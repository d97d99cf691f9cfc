"""Where the iterations of loops stand in programs that have them opened."""

from __future__ import annotations

from hetjax.pipeline.program.traced_program import Program


def positions_in_loops(program: Program) -> list[int]:
    """The positions of steps that are of an opened loop."""
    return [
        position
        for position, step in enumerate(program.steps)
        if any(call.primitive.name == "scan" for call in step.calls)
    ]


def iteration_starts(program: Program, count: int) -> list[int]:
    """Where each of so many iterations of the program's one opened loop begins, and the end."""
    inside = positions_in_loops(program)
    assert inside == list(range(inside[0], inside[-1] + 1)), "iterations follow each other"
    # What nothing reads of an iteration is not there, so that some are shorter than others.
    first = program.steps[inside[0]]
    starts = [p for p in inside if program.steps[p].equation is first.equation]
    assert len(starts) == count, "each iteration begins with the same step"
    return [*starts, inside[-1] + 1]
