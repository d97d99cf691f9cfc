"""A cluster that is played: whether this machine can, and how that is said."""

from __future__ import annotations

from hetjax.configuration import Configuration
from hetjax.errors import InputError
from hetjax.mesh.host_cpu import host_memory_bytes
from hetjax.planner import Plan
from hetjax.report import format_bytes, format_seconds
from hetjax.runtime import Play

_LONGEST_SECONDS = 3600.0
"""How long a played run may take, unless its scale is given."""

_LATE_SHARE = 0.1
"""The share of tasks that may be late before a person is told."""


def playing(configuration: Configuration, plan: Plan) -> Play | None:
    """How a run plays its cluster.

    Args:
        configuration: its settings.
        plan: its plan, with a prediction.

    Returns:
        What the trainer is told; None where nothing is played.

    Raises:
        InputError: this machine has not the memory for all devices of the plan.
    """
    cluster = configuration.cluster
    if not cluster.play or configuration.runtime.name != "local":
        return None
    pairs = [*zip(plan.stages, plan.predicted.stages, strict=True)]
    firsts = [pairs[group[0]] for group in plan.sharing]
    needed = sum(
        stage.num_devices * (held.memory_bytes + held.all_host_bytes) for stage, held in firsts
    )
    there = host_memory_bytes()
    if needed > there:
        raise InputError(
            f"cluster.play is True, and the plan's devices hold {format_bytes(needed)} together, "
            f"of which this machine has {format_bytes(there)}; choose a smaller model.recipe or "
            f"train.batch_size"
        )
    return Play(cluster.play_scale)


def check_duration(configuration: Configuration, plan: Plan, scale: float, steps: int) -> None:
    """Check that a played run ends within the hour, unless its scale was chosen by a person.

    Args:
        configuration: its settings.
        plan: its plan, with a prediction.
        scale: seconds of this machine for one of the cluster.
        steps: how many steps are left.

    Raises:
        InputError: it would take longer.
    """
    step_seconds = scale * plan.predicted.step_time
    if configuration.cluster.play_scale is None and steps * step_seconds > _LONGEST_SECONDS:
        fewer = max(1, configuration.train.steps - steps + int(_LONGEST_SECONDS / step_seconds))
        raise InputError(
            f"train.steps is {configuration.train.steps}; played {scale_words(scale)}, as fast as "
            f"this machine can, a step takes {format_seconds(step_seconds)} and the run "
            f"{format_seconds(steps * step_seconds)}, more than an hour: set train.steps = "
            f"{fewer}, take a smaller model, or set cluster.play_scale = {scale:g} to wait for it"
        )


def scale_words(scale: float) -> str:
    """At what scale a cluster is played, in words.

    Args:
        scale: seconds of this machine for one of the cluster.

    Returns:
        As maps say it.

    Example:
        >>> scale_words(2.5), scale_words(0.25)
        ('at 1:2.5', 'at 4:1')
    """
    return f"at 1:{scale:g}" if scale >= 1 else f"at {float(f'{1 / scale:.2g}'):g}:1"


def lateness(late_tasks: int, tasks: int, scale: float) -> str | None:
    """What to say of tasks that this machine ended too late; None where they were few."""
    if late_tasks <= _LATE_SHARE * tasks:
        return None
    return (
        f"this machine was late with {late_tasks / tasks:.0%} of the tasks, so that some figures "
        f"are its own, not the cluster's; give it more time: cluster.play_scale = {2 * scale:g}"
    )
