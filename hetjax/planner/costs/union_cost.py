"""What a data-parallel stage of several members takes: unlike devices that share its examples.

Each member computes its examples of a microbatch; the stage takes what the slowest takes, and what
they exchange inside the microbatch. Once a step the members add up their gradients, each the part
in proportion to its examples, update these and give them to the others: a reduce-scatter and an
all-gather in uneven shares.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from hetjax.mesh.cluster import Cluster
from hetjax.mesh.links import Link
from hetjax.pipeline.update.state_groups import STATE_GROUPS
from hetjax.planner.costs.cost_model import Estimate, estimate
from hetjax.planner.costs.exchange_cost import exchange_bandwidth
from hetjax.planner.costs.update_cost import sum_factor, update_seconds
from hetjax.planner.plan.stage_plan import StagePlan
from hetjax.planner.plan.update_weights import update_weights
from hetjax.planner.problem.problem import PlanningProblem
from hetjax.planner.work.arrays import FloatArray
from hetjax.planner.work.execution import Execution, parameter_bytes
from hetjax.planner.work.layer_runs import Runs
from hetjax.planner.work.rates import TASK_SECONDS, collective_link
from hetjax.planner.work.repeating_layers import Repetition
from hetjax.sharding.annotation.rules import REDUCTION_GROUPS


@dataclass(frozen=True)
class UnionExecution:
    """How a data-parallel stage of several members runs.

    Args:
        members: how each runs its share.
        move: the slowest link between two members.
        exchanges: for each member what it reaches the others over at the end of a step: the
            slowest of its links, with all that works side by side.
    """

    members: tuple[Execution, ...]
    move: Link
    exchanges: tuple[Link, ...]

    @property
    def repeats(self) -> Repetition:
        """What forward steps run again in the backward pass."""
        return self.members[0].repeats

    @property
    def examples(self) -> tuple[float, ...]:
        """What share of a microbatch each member computes."""
        return tuple(member.examples for member in self.members)


@dataclass(frozen=True, eq=False)
class UnionEstimate:
    """What runs of layers take on the members of a stage, and together.

    Args:
        members: each by itself.
        forward_seconds: the forward pass of one microbatch.
        backward_seconds: its backward pass, recomputation included.
        update_seconds: the optimizer's update, with the exchange.
        exchange_seconds: of that, the exchanges inside the members and among them.
    """

    members: tuple[Estimate, ...]
    forward_seconds: FloatArray
    backward_seconds: FloatArray
    update_seconds: FloatArray
    exchange_seconds: FloatArray


def executions_of(cluster: Cluster, stage: StagePlan) -> tuple[Execution, ...]:
    """How each member of a stage runs what it has of it.

    Args:
        cluster: the devices.
        stage: the stage, whose members share the examples, or their tokens.

    Returns:
        One for each member.
    """
    return tuple(_execution_of(cluster, stage, m) for m in range(len(stage.members)))


def _execution_of(cluster: Cluster, stage: StagePlan, place: int) -> Execution:
    """How a member of a stage runs."""
    member, batch, context = stage.members[place], stage.shares.batch, stage.shares.context
    subcluster = cluster.subcluster(member.submesh.subcluster)
    share = updates = batch[place] / sum(batch) if batch else 1.0
    if context is not None:
        share = context.tokens[place] / context.length
        weights = update_weights(stage, cluster)
        updates = weights[place] / sum(weights)
    execution = Execution(
        kind=subcluster.kind,
        link=collective_link(cluster, member.submesh),
        mesh_shape=member.mesh_shape,
        sharding=stage.sharding,
        repeats=stage.repeats,
        parameters=stage.parameters,
        subcluster=subcluster.name,
        shape=member.submesh.shape,
        examples=share,
        updates=updates,
        members=len(stage.members),
    )
    if "activations" in stage.offload:
        execution = execution.offloading_activations(subcluster)
    return execution.offloaded(subcluster) if "optimizer_state" in stage.offload else execution


def union_execution(cluster: Cluster, stage: StagePlan) -> UnionExecution:
    """How a data-parallel stage of several members runs.

    Args:
        cluster: the devices.
        stage: the stage, whose members share nothing but the examples.
    """
    submeshes = stage.submeshes
    links = {
        (a, b): cluster.link_between(submeshes[a], submeshes[b])
        for a in range(len(submeshes))
        for b in range(len(submeshes))
        if a != b
    }

    def exchange(member: int) -> Link:
        others = [other for other in range(len(submeshes)) if other != member]
        return Link(
            min(exchange_bandwidth(cluster, submeshes[member], submeshes[o]) for o in others),
            max(links[member, other].latency for other in others),
        )

    return UnionExecution(
        executions_of(cluster, stage),
        Link(
            min(link.bandwidth for link in links.values()),
            max(link.latency for link in links.values()),
        ),
        tuple(map(exchange, range(len(submeshes)))),
    )


def estimate_union(problem: PlanningProblem, runs: Runs, union: UnionExecution) -> UnionEstimate:
    """Estimate runs of layers on the members of a stage.

    Args:
        problem: the planning problem.
        runs: the work; where the stage recomputes, the backward pass has the repetition in it.
        union: where and how.

    Returns:
        The estimate.
    """
    each = tuple(estimate(problem, runs, member) for member in union.members)
    forward, backward = move_seconds(problem, runs, union)
    update, exchange = union_update_seconds(problem, runs, union)
    return UnionEstimate(
        members=each,
        forward_seconds=_slowest(member.forward_seconds for member in each) + forward,
        backward_seconds=_slowest(member.backward_seconds for member in each) + backward,
        update_seconds=update,
        exchange_seconds=exchange,
    )


def union_update_seconds(
    problem: PlanningProblem, runs: Runs, union: UnionExecution
) -> tuple[FloatArray, FloatArray]:
    """Estimate what runs of layers do once a step on the members of a stage.

    Args:
        problem: the planning problem.
        runs: the work.
        union: where and how.

    Returns:
        Seconds of the optimizer's update, and of that the exchanges inside the members and among
        them.
    """
    inside = [update_seconds(problem, runs, member) for member in union.members]
    among = member_exchange_seconds(problem, runs, union)
    updates, exchanges = zip(*inside, strict=True)
    return _slowest(updates) + among, _slowest(exchanges) + among


def move_seconds(
    problem: PlanningProblem, runs: Runs, union: UnionExecution
) -> tuple[FloatArray, FloatArray]:
    """What members wait for each other inside a microbatch.

    Each exchange ends a program, and every member gives what it has to every other one.

    Args:
        problem: the planning problem.
        runs: the work.
        union: where and how.

    Returns:
        Seconds of the forward pass, and of the backward pass.
    """
    others = len(union.members) - 1
    byte_load, message_load = _loads(problem, union)
    each = TASK_SECONDS + union.move.latency + 2 * others * message_load
    a_byte = others / union.move.bandwidth + 2 * others * byte_load
    return (
        (runs.forward_moves + runs.given_moves) * each
        + (runs.forward_moved + runs.given_moved) * a_byte,
        runs.backward_moves * each + runs.backward_moved * a_byte,
    )


def member_exchange_seconds(
    problem: PlanningProblem, runs: Runs, union: UnionExecution
) -> FloatArray:
    """What members exchange once a step: gradients, and the parameters that are made of them.

    Args:
        problem: the planning problem.
        runs: the work.
        union: where and how.

    Returns:
        Seconds, of the slowest member.
    """
    others = len(union.members) - 1
    byte_load, message_load = _loads(problem, union)
    # Gradients are reduced in groups; parameters come together, or as groups are updated.
    is_streamed = any(member.host_link is not None for member in union.members)
    messages = REDUCTION_GROUPS + (STATE_GROUPS if is_streamed else 1)

    def of_member(member: Execution, link: Link) -> FloatArray:
        of = parameter_bytes(problem.program, problem.optimizer_bytes, runs, member)
        # Others update a share of what has gradients; all devices of a member give their parts.
        values = of.trained * member.mesh_shape[1]
        sums, mine = values * sum_factor(runs), member.updates
        given = (1 - mine) * sums, others * mine * values
        taken = others * mine * sums, (1 - mine) * values
        one_way = np.maximum(given[0], taken[0]) + np.maximum(given[1], taken[1])
        handled = byte_load * (sum(given) + sum(taken)) + 2 * others * messages * message_load
        return one_way / link.bandwidth + messages * (TASK_SECONDS + link.latency) + handled

    pairs = zip(union.members, union.exchanges, strict=True)
    return _slowest(of_member(*pair) for pair in pairs)


def _loads(problem: PlanningProblem, union: UnionExecution) -> tuple[float, float]:
    """What a byte and a message cost devices that see to transfers themselves: the slowest."""
    subclusters = [problem.cluster.subcluster(member.subcluster) for member in union.members]
    return (
        max(each.transfer_load for each in subclusters),
        max(each.message_load for each in subclusters),
    )


def _slowest(seconds: Iterable[FloatArray]) -> FloatArray:
    return functools.reduce(np.maximum, seconds)
