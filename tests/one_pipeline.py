"""The programs of one pipeline, for tests that need no plan."""

from __future__ import annotations

from collections.abc import Sequence

import optax
from jaxtyping import PyTree

from hetjax.pipeline.build import PipelineCut, PipelinePrograms, build_pipelines
from hetjax.pipeline.program.traced_program import Program
from hetjax.pipeline.stages.recomputing import Run


def one_pipeline(
    program: Program,
    parameters: PyTree,
    optimizer: optax.GradientTransformation,
    *,
    boundaries: Sequence[int],
    recompute: Sequence[bool],
    recompute_runs: Sequence[Sequence[Run]] = (),
    num_microbatches: int = 2,
) -> PipelinePrograms:
    """Everything that one pipeline computes."""
    runs = tuple(map(tuple, recompute_runs))
    cut = PipelineCut(tuple(boundaries), tuple(recompute), num_microbatches, runs)
    return build_pipelines([program], parameters, optimizer, [cut])
