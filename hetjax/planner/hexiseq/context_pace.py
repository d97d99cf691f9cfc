"""What members take for the tokens and the pairs of a traced program, as predictions of plans say.

A search over context splits cannot predict each as a plan is predicted. It costs tokens, and pairs
of a query and a key, by what these take in a step of the whole program on one member of each kind:
a device, or several that have a tensor axis.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hetjax.pipeline.program.costs import step_cost
from hetjax.pipeline.program.traced_program import Step
from hetjax.pipeline.program.work_classes import Work, attention_classes, step_work
from hetjax.planner.costs.cost_model import computing_seconds
from hetjax.planner.costs.member_rates import PassSpeed, pass_speeds
from hetjax.planner.hexiseq.context_work import ContextWork
from hetjax.planner.problem.problem import PlanningProblem
from hetjax.planner.work.execution import Execution
from hetjax.planner.work.layer_runs import Runs, one_run
from hetjax.planner.work.stage_work import measure
from hetjax.sharding.attention.primitive import ATTENTION
from hetjax.sharding.attention.work import attention_work


@dataclass(frozen=True)
class ContextPace:
    """Seconds of a member, of one layer where nothing else is said.

    Args:
        token_forward: the forward pass of a token, but for what attends.
        token_backward: its backward pass.
        pair_forward: the forward pass of a pair of a query head and a key, whether or not a mask
            hides it.
        pair_backward: its backward pass.
        logit: both passes of the logits of a token.
    """

    token_forward: float
    token_backward: float
    pair_forward: float
    pair_backward: float
    logit: float

    def step_seconds(self, work: ContextWork) -> float:
        """What a step takes the member by itself.

        Args:
            work: the model and its sequences.
        """
        again = 2 if work.is_recomputed else 1
        tokens, pairs = work.length, work.query_heads * work.length**2
        layer = tokens * (again * self.token_forward + self.token_backward)
        layer += pairs * (again * self.pair_forward + self.pair_backward)
        return work.rounds * (work.layers * layer + tokens * self.logit)


def context_paces(
    problem: PlanningProblem, work: ContextWork, tensor: Mapping[str, int] | None = None
) -> Mapping[str, ContextPace]:
    """The paces of a cluster's devices.

    Args:
        problem: the planning problem, with its profile.
        work: its program's work.
        tensor: how many devices are one member, by subcluster; one unless given.

    Returns:
        By the name of the subcluster.
    """
    program = problem.program
    (whole,) = measure(program, (0, program.num_positions), known=problem.known)
    run = one_run(program, whole, 0, (0, problem.num_layers))
    steps = [step for step in program.steps if step.name == ATTENTION.name]
    speeds = pass_speeds(problem)
    paces = {}
    for part in problem.cluster.subclusters:
        shape = 1, (tensor or {}).get(part.name, 1)
        link = part.intra_node
        execution = Execution(part.kind, link, shape, subcluster=part.name, shape=shape)
        paces[part.name] = _pace(problem, work, execution, run, steps, speeds(part.name, shape))
    return paces


def _pace(
    problem: PlanningProblem,
    work: ContextWork,
    execution: Execution,
    run: Runs,
    attentions: list[Step],
    speed: PassSpeed,
) -> ContextPace:
    attending, devices = [0.0, 0.0], execution.mesh_shape[1]
    for step in attentions:
        for way, (flops, moved, of_classes) in enumerate(_work_of(step)):
            seconds = speed.seconds(flops, moved, tuple(of_classes.items()), way)
            attending[way] += seconds / devices
    # What a task takes beside its work does not grow with tokens.
    passes = computing_seconds(problem, run, execution)
    others = [max(0.0, all_ - some) for all_, some in zip(passes, attending, strict=True)]
    # A microbatch has as many sequences as are there at once.
    tokens, pairs = work.length * work.layers, work.query_heads * work.length**2 * work.layers
    logits = 2 * work.width * work.vocabulary
    share = logits / ((logits + work.layers * work.token_flops) or 1.0)
    forward, backward = ((1 - share) * each / tokens for each in others)
    return ContextPace(
        token_forward=forward,
        token_backward=backward,
        pair_forward=attending[0] / pairs,
        pair_backward=attending[1] / pairs,
        logit=share * sum(others) / work.length,
    )


def _work_of(step: Step) -> list[tuple[float, float, Work]]:
    """FLOPs, bytes and work by class of an attention's forward and its backward pass."""
    assert step.equation is not None, "an attention is an equation"
    cost, backward = step_cost(step), attention_work(step.equation, is_backward=True)
    assert backward is not None, "it is one"
    return [
        (cost.matmul_flops, cost.bytes, step_work(step)),
        (backward.products, backward.traffic, attention_classes(backward)),
    ]
