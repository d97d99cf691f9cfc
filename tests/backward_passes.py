"""Calls a stage's backward programs, without a device mesh."""

from collections.abc import Callable, Sequence
from typing import Any

from hetjax.pipeline.stages.backward import Reads, StagePrograms

Groups = Sequence[Sequence[Any]]
"""Batch, received values, residuals and cotangents."""


def take(reads: Reads, groups: Groups) -> list[list[Any]]:
    """Of each group those that a program reads."""
    places = (reads.batch, reads.received, reads.residuals, reads.cotangents)
    return [[group[i] for i in chosen] for group, chosen in zip(groups, places, strict=True)]


def recomputed(programs: StagePrograms, parameters: Any, batch: Any, received: Any) -> Any:
    """The residuals that a recomputation gives."""
    assert programs.recompute is not None
    inputs = take(programs.recompute_reads, (batch, received, [], []))[:2]
    (residuals,) = programs.recompute(parameters, *inputs)
    return residuals


def whole_backward(programs: StagePrograms, parameters: Any, groups: Groups, sums: Any) -> Any:
    """Returned cotangents and gradient sums of the whole backward pass."""
    return programs.backward(parameters, *take(programs.backward_reads, groups), sums)


def split_backward(
    programs: StagePrograms,
    parameters: Any,
    groups: Groups,
    sums: Sequence[Any],
    jit: Callable[..., Any] = lambda function: function,
) -> tuple[Any, list[Any]]:
    """The same of the split one, each half called through what `jit` makes of it."""
    split = programs.split
    returned, deferred, light = jit(split.input_gradient)(
        parameters,
        *take(split.input_gradient_reads, groups),
        [sums[place] for place in split.light],
    )
    (heavy,) = jit(split.weight_gradient)(
        parameters,
        *take(split.weight_gradient_reads, groups),
        deferred,
        [sums[place] for place in split.heavy],
    )
    found = dict(zip((*split.light, *split.heavy), (*light, *heavy), strict=True))
    return returned, [found[place] for place in range(len(sums))]
