"""What is not finite: losses and gradients of a step, and states that are to be saved.

Whether a step is applied is decided on the devices, by
`hetjax.pipeline.update.whole_update.update_function`; here it is put into words.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from hetjax.pipeline.build import PipelinePrograms
from hetjax.pipeline.program.loss import makes_parameters, path_names
from hetjax.runtime.workers.step_report import StepReport


@dataclass(frozen=True)
class Nonfinite:
    """What was not finite in a step, which therefore was not applied.

    Args:
        loss: the mean loss.
        gradient_norm: the global norm of the mean gradient.
        leaf: the path of a parameter whose gradient was not finite, on the stage nearest to the
            loss that has one; None where the loss alone was not finite, or only the sum of all
            squares.
        stages: the stages that hold it, counted over all pipelines.
        num_leaves: how many parameters' gradients were not finite.

    Example:
        >>> print(Nonfinite(2.5, math.inf, "blocks/3/w", (1,), 2))
        loss 2.5, gradient norm inf: the gradient of 'blocks/3/w' (stage 1) and 1 more
    """

    loss: float
    gradient_norm: float
    leaf: str | None = None
    stages: tuple[int, ...] = ()
    num_leaves: int = 0

    def __str__(self) -> str:
        text = f"loss {self.loss:.4g}, gradient norm {self.gradient_norm:.4g}"
        if self.leaf is None:
            return text
        noun = "stage" if len(self.stages) == 1 else "stages"
        stages = ", ".join(map(str, self.stages))
        more = f" and {self.num_leaves - 1} more" if self.num_leaves > 1 else ""
        return f"{text}: the gradient of {self.leaf!r} ({noun} {stages}){more}"


def nonfinite(report: StepReport, pipelines: PipelinePrograms) -> Nonfinite | None:
    """What was not finite in a step.

    Args:
        report: of the stage that knows the loss.
        pipelines: the pipelines' programs.

    Returns:
        What; None where all was finite, and the step was applied.
    """
    assert report.loss is not None
    assert report.gradient_norm is not None
    if math.isfinite(report.loss) and math.isfinite(report.gradient_norm):
        return None
    if not report.nonfinite_leaves:
        return Nonfinite(report.loss, report.gradient_norm)
    places = pipelines.program.leaves.places
    held = {
        leaf: tuple(
            place
            for place, stage in enumerate(pipelines.stages)
            if any(places[part.leaf][0] == leaf for part in stage.parameters)
        )
        for leaf in report.nonfinite_leaves
    }
    # Backward passes carry infinities from the loss to the inputs: the last stage had them first.
    leaf = max(held, key=lambda each: max(held[each]))
    tree = pipelines.parameter_tree
    name = path_names(jax.tree.unflatten(tree, range(tree.num_leaves)))[leaf]
    return Nonfinite(report.loss, report.gradient_norm, name, held[leaf], len(held))


@jax.jit
def are_finite(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Whether each of some arrays has finite elements alone; integers have.

    Args:
        arrays: any.

    Returns:
        A boolean scalar for each.

    Example:
        >>> [bool(each) for each in are_finite([jnp.ones(2), jnp.array([1.0, jnp.inf])])]
        [True, False]
    """
    return [jnp.isfinite(array).all() for array in arrays]


def were_finite(parameters: PyTree | Callable[[], PyTree], leaf: int) -> bool:
    """Whether a parameter had finite elements alone when training began.

    A mask of infinities that a model keeps among its parameters has not.

    Args:
        parameters: what training began with: arrays, or a function that makes them, of which only
            this leaf is computed.
        leaf: which of them.

    Returns:
        Whether it had.
    """

    def finite() -> jax.Array:
        made = parameters() if makes_parameters(parameters) else parameters
        return jnp.isfinite(jax.tree.leaves(made)[leaf]).all()

    return bool(jax.jit(finite)())
