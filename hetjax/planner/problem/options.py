"""What a plan may be, and what it makes least: asked of every planner alike."""

from __future__ import annotations

from dataclasses import dataclass

from hetjax.errors import InputError, check_count, check_flag, shown, unknown_name
from hetjax.limits import MAX_PASSES
from hetjax.pipeline.schedules.schedule import SCHEDULES
from hetjax.planner.plan.prices import OBJECTIVES

MAX_PIPELINES = 4
"""How many pipelines a plan has at most, unless it is said otherwise."""


@dataclass(frozen=True)
class PlanOptions:
    """What a plan may be, and what it makes least.

    Args:
        schedule: the name of the schedule, one of `hetjax.pipeline.SCHEDULES`.
        num_layers: into how many layers of similar cost the model is divided at most; None for
            layers that follow its structure (`hetjax.pipeline.structural_layers`).
        allow_recompute: whether stages may recompute to save memory.
        min_stages: how many stages a pipeline has at least.
        max_stages: how many it has at most; None for any number.
        max_pipelines: how many pipelines the plan has at most.
        union_stages: whether a stage may have unlike devices, of several subclusters, that share
            the examples of a microbatch in uneven shares.
        synthesised_stages: whether the last stage of a pipeline may be a program over unlike
            devices that is synthesised for it; that is searched for some seconds longer.
        max_passes: how often a pipeline may pass its submeshes, from 1 to 4; more than once where
            the schedule is ``"search"`` and that is predicted to be faster.
        objective: what the plan makes least, one of `hetjax.planner.OBJECTIVES`: seconds of a step,
            or its cost, the price of the nodes that are used in that time.

    Raises:
        InputError: a count is none or out of range, the schedule or the objective is unknown, or
            what is asked by whether is neither True nor False.

    Example:
        >>> PlanOptions(schedule="1f1b", max_pipelines=1).allow_recompute
        True
    """

    schedule: str = "h_1f1b"
    num_layers: int | None = None
    allow_recompute: bool = True
    min_stages: int = 1
    max_stages: int | None = None
    max_pipelines: int = MAX_PIPELINES
    objective: str = "step_time"
    union_stages: bool = True
    synthesised_stages: bool = False
    max_passes: int = MAX_PASSES

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise InputError(unknown_name("objective", self.objective, OBJECTIVES))
        if self.schedule not in SCHEDULES:
            raise InputError(unknown_name("schedule", self.schedule, SCHEDULES))
        for name in ("min_stages", "max_pipelines", "max_passes"):
            check_count(name, getattr(self, name))
        for name in ("num_layers", "max_stages"):
            value = getattr(self, name)
            if value is not None:
                check_count(name, value)
        for name in ("allow_recompute", "union_stages", "synthesised_stages"):
            check_flag(name, getattr(self, name))
        if self.max_passes > MAX_PASSES:
            raise InputError(f"max_passes is {self.max_passes}; it must be from 1 to {MAX_PASSES}")
        if self.max_stages is not None and self.max_stages < self.min_stages:
            raise InputError(
                f"max_stages is {self.max_stages}; it must be at least min_stages, which is "
                f"{self.min_stages}"
            )


def check_options(options: object) -> None:
    """Check that what a plan may be is said by `PlanOptions`.

    Args:
        options: what was given.

    Raises:
        InputError: it is something else.

    Example:
        >>> check_options({"schedule": "1f1b"})
        Traceback (most recent call last):
        hetjax.errors.InputError: options is {'schedule': '1f1b'}; it must be a PlanOptions
    """
    if not isinstance(options, PlanOptions):
        raise InputError(f"options is {shown(options)}; it must be a PlanOptions")


DEFAULTS = PlanOptions()
"""What a plan may be unless it is said otherwise."""
