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
    size, rest = divmod(len(inside), count)
    assert rest == 0, "iterations are alike"
    assert inside == list(range(inside[0], inside[-1] + 1)), "iterations follow each other"
    return [inside[0] + place * size for place in range(count + 1)]
