"""Losses and gradients that are not finite: what of a step was not, and where.

Whether a step is applied is decided on the devices, by `hetjax.pipeline.update.update_function`;
here it is put into words.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hetjax.pipeline.build import PipelinePrograms
from hetjax.runtime.step_report import StepReport


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
    held = {
        leaf: tuple(
            place
            for place, stage in enumerate(pipelines.stages)
            if any(part.leaf == leaf for part in stage.parameters)
        )
        for leaf in report.nonfinite_leaves
    }
    # Backward passes carry infinities from the loss to the inputs: the last stage had them first.
    leaf = max(held, key=lambda each: max(held[each]))
    name = pipelines.program.parameter_names[leaf]
    return Nonfinite(report.loss, report.gradient_norm, name, held[leaf], len(held))
