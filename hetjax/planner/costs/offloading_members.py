"""What members of a stage leave in their hosts' memory, and what its way there and back takes."""

from __future__ import annotations

from dataclasses import replace

from hetjax.pipeline.timeline.streamed_update import stream_seconds
from hetjax.planner.costs.union_cost import UnionExecution
from hetjax.planner.costs.update_cost import copies_overlap, update_groups
from hetjax.planner.plan.prediction import StagePrediction
from hetjax.planner.problem.problem import PlanningProblem
from hetjax.planner.work.execution import Execution, offloaded_bytes
from hetjax.planner.work.layer_runs import Runs


def host_figures(
    problem: PlanningProblem, run: Runs, execution: Execution, activation_bytes: float
) -> dict[str, int]:
    """What a device of a member offloads.

    Args:
        problem: the planning problem.
        run: the stage's work on one device.
        execution: how the member runs.
        activation_bytes: what a microbatch keeps for its backward pass.

    Returns:
        Fields of a `hetjax.planner.plan.prediction.MemberPrediction`; none where it offloads
        nothing.
    """
    if not execution.offloads:
        return {}
    host = group = 0.0
    if execution.host_link is not None:
        way = (problem.program, problem.optimizer_bytes, run, execution)
        host, group = map(float, offloaded_bytes(*way))
    return {
        # While one group of the state is updated, the next one is on its way.
        "update_bytes": int(2 * group),
        "host_bytes": int(host),
        "host_limit_bytes": int(execution.host_bytes),
        "offloaded_bytes": int(activation_bytes) if execution.activation_link is not None else 0,
    }


def with_copies(
    predicted: StagePrediction, problem: PlanningProblem, run: Runs, union: UnionExecution
) -> StagePrediction:
    """A stage of several members with what copies to and from their hosts' memory take.

    Members wait for each other: of each direction the slowest member counts, and of an update in
    groups the one that takes longest.

    Args:
        predicted: the stage, as if nothing travelled; its members say what does.
        problem: the planning problem.
        run: the stage's work on one device.
        union: how the members run.

    Returns:
        The stage; as it is where nothing is offloaded.
    """
    members = union.members
    if not any(member.offloads for member in members):
        return predicted
    overlaps = all(map(copies_overlap, members))
    copies = [
        member.activation_link.seconds(held.offloaded_bytes)
        for member, held in zip(members, predicted.members, strict=True)
        if member.activation_link is not None and held.offloaded_bytes
    ]
    copy = max(copies, default=0.0)
    found = replace(predicted, copies_overlap=overlaps, store_seconds=copy, fetch_seconds=copy)
    each = [update_groups(problem, run, member) for member in members]
    groups = max(each, key=lambda groups: stream_seconds(groups, overlaps))
    if not groups:
        return found
    update = stream_seconds(groups, overlaps) + predicted.exchange_seconds
    return replace(found, update_groups=groups, update_seconds=update)
