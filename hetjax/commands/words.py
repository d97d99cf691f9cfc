"""What is said of a plan in words, wherever it is shown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hetjax.commands.prepare import Prepared
from hetjax.mesh.kinds import ASSUMED_EFFICIENCY, USUAL_SHARE, DeviceKind
from hetjax.models import Model
from hetjax.planner import Alternative, Plan, differences
from hetjax.report import OtherPlan


def batches(plan: Plan) -> str:
    """How many microbatches each pipeline of a plan computes, and by which schedule.

    Args:
        plan: the plan.
    """
    said = []
    for first, each in plan.numbered_pipelines():
        last = first + len(each.stages) - 1
        stages = f"stages {first} to {last}" if last > first else f"stage {first}"
        where = f"{stages}: " if len(plan.pipelines) > 1 else ""
        count = f"{each.num_microbatches} microbatch{'es' if each.num_microbatches > 1 else ''}"
        said.append(f"{where}{count} of {each.microbatch_size}, schedule {each.schedule.name}")
    return "; ".join(said)


def batch_words(batch_size: int, model: Model) -> str:
    """What a batch has.

    Args:
        batch_size: examples in it.
        model: what reads it.
    """
    count = model.units_per_example
    return f"{batch_size} x {count} {model.unit}" if count > 1 else f"{batch_size} {model.unit}"


def rate_lines(prepared: Prepared) -> Iterator[str]:
    """What is to be known of the rates that a plan was made with.

    Args:
        prepared: a plan.

    Yields:
        A line for each kind without a rate for the model's dtype; how near to their peaks kinds are
        taken to come.
    """
    if prepared.planned is None:
        return
    problem = prepared.planned.problem
    kinds = dict.fromkeys(subcluster.kind for subcluster in problem.cluster.subclusters)
    for kind in kinds:
        said = kind.slow_path(problem.dtype)
        if said is not None:
            yield said
    if not problem.profile.corrects_costs:
        yield from _efficiency_lines(tuple(kinds), problem.dtype)


def _efficiency_lines(kinds: Sequence[DeviceKind], dtype: str) -> Iterator[str]:
    """How near to the peak products are taken to come, of each kind; where that is known from."""
    assumed = [kind for kind in kinds if kind.assumes_efficiency(dtype)]
    if assumed:
        yield (
            f"nothing was measured: matrix products are assumed to reach "
            f"{ASSUMED_EFFICIENCY:.0%} of the peak on {', '.join(kind.name for kind in assumed)}"
        )
    for kind in kinds:
        if kind not in assumed:
            yield (
                f"matrix products are taken to reach {kind.product_efficiency(dtype):.0%} of the "
                f"peak on {kind.name}, {USUAL_SHARE:.0%} of the best one that was measured "
                f"({kind.product_source or 'the cluster file'})"
            )


def told_alternatives(prepared: Prepared, alternatives: Sequence[Alternative]) -> list[OtherPlan]:
    """What other plans do differently.

    Args:
        prepared: the plan that was chosen.
        alternatives: the others.

    Returns:
        What is different of each, and what it costs.
    """
    if prepared.planned is None or not alternatives:
        return []
    found = prepared.planned.found
    # The chosen plan's prediction knows more than the search; the others' is scaled alike.
    scale = prepared.prediction.step_time / found.step_time
    return [
        OtherPlan(
            differences(found.plan, each.plan), scale * each.step_time, each.score / found.score
        )
        for each in alternatives
    ]
