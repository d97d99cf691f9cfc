"""What a run of layers computes, as a digest that is the same in every process."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

import jax

from hetjax.pipeline.program.traced_program import Program
from hetjax.pipeline.stages.cutting import crossing_values, cut
from hetjax.planner.work.run_structure import part_shape

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def structure_digest(
    program: Program, layers: Sequence[int], run: tuple[int, int], cotangents: Sequence[int]
) -> str:
    """The digest of a run of layers.

    Args:
        program: the traced loss function.
        layers: the positions where layers begin, and the end.
        run: first layer, and the one after the last.
        cotangents: which of the values that it sends have a cotangent, by place.

    Returns:
        64 hexadecimal digits: the same for runs that compute the same on arrays of the same shapes,
        in whatever model and process, and of which the same is trained.
    """
    first, end = layers[run[0]], layers[run[1]]
    boundaries = sorted({0, first, end, program.num_positions})
    stage = cut(program, boundaries)[boundaries.index(first)]
    jaxpr = jax.make_jaxpr(stage.function)(
        [part_shape(program, part) for part in stage.parameters],
        [program.avals[program.batch[leaf]] for leaf in stage.batch],
        list(crossing_values(program, first)) if first else [],
    )
    text = f"{_ADDRESS.sub('', str(jaxpr))}\n{list(cotangents)}"
    if program.frozen.without_gradient:
        text += f"\n{stage.trained} {stage.moving}"
    return hashlib.sha256(text.encode()).hexdigest()
