"""HeteroAuto as a planner: from a traced program and a cluster to an ordinary plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hetjax.errors import DoesNotFitError, InputError
from hetjax.mesh.cluster import SubMesh
from hetjax.mesh.quantities import format_bytes, format_seconds
from hetjax.pipeline.schedules.warm_up import one_f_one_b
from hetjax.planner.h2.heteroauto import ChipKind, ChipStrategy, find_strategy
from hetjax.planner.h2.layer_division import GroupShare, GroupWay
from hetjax.planner.h2.module_ways import Modules, ModuleWays, stage_shape
from hetjax.planner.h2.refine import refine
from hetjax.planner.harp.candidate_plans import pipeline_plan
from hetjax.planner.harp.microbatches import divisors
from hetjax.planner.plan.plan import Plan, validate
from hetjax.planner.plan.prediction import Prediction, StagePrediction
from hetjax.planner.plan.stage_plan import Member, Offloaded, StagePlan
from hetjax.planner.predictions.scheduled_memory import has_room, leaves_room
from hetjax.planner.problem.problem import PlanningProblem
from hetjax.planner.work.rates import USABLE_MEMORY
from hetjax.planner.work.repeating_layers import repeated_in


@dataclass(frozen=True)
class HeteroAuto:
    """Plans a pipeline in which each kind of devices has stages of its own, all alike.

    All devices are used. Kinds of more memory come first. Within a kind, or a group of its nodes,
    stages have the same tensor parallelism, the same number of modules, and make them again in the
    backward pass or not; the width of data parallelism is the same for all.

    Args:
        alpha: how much of a microbatch's pass the pipeline stands still; see
            `hetjax.planner.h2.layer_division.divide_layers`.
        is_grouped: whether groups of nodes of a kind may run unlike.

    Source: H2, section 4.3.
    """

    alpha: float = 1.0
    is_grouped: bool = True

    def plan(self, problem: PlanningProblem) -> Plan:
        """A plan for the problem, refined by hetjax's own schedules; see `refine`.

        Args:
            problem: what to plan.

        Returns:
            A valid plan with its prediction; its notes say what refining it has gained.

        Raises:
            InputError: devices are lost, the program repeats no module, or there are more stages
                than modules however devices are divided.
            DoesNotFitError: the model fits in no way.
        """
        return self.refined(problem)[0]

    def refined(self, problem: PlanningProblem) -> tuple[Plan, ChipStrategy]:
        """What `plan` makes, and the strategy that it is made of.

        Args:
            problem: what to plan.

        Raises:
            InputError: as for `plan`.
            DoesNotFitError: as for `plan`.
        """
        plan, strategy = self.find(problem)
        both = refine(plan, problem)
        first, last = both.found.predicted, both.refined.predicted
        if not leaves_room(last):
            raise DoesNotFitError(_over_memory(last))
        schedule = problem.options.schedule
        is_last = schedule == problem.warm_up_schedule
        note = (
            f"HeteroAuto: {format_seconds(strategy.step_time)} a step by its own model; "
            f"{format_seconds(first.step_time)} by the timeline of its 1F1B schedule; "
            f"{format_seconds(last.step_time)} refined, which is this plan"
            f"{'' if is_last else f' before it got the schedule {schedule!r}'}"
        )
        return replace(both.refined, notes=(note,)), strategy

    def find(self, problem: PlanningProblem) -> tuple[Plan, ChipStrategy]:
        """The plan as the paper has it, with a 1F1B schedule, and the strategy that it is made of.

        Args:
            problem: what to plan.

        Raises:
            InputError: as for `plan`.
            DoesNotFitError: as for `plan`; a finer count of memory may still say so of the plan.
        """
        if problem.lost:
            raise InputError(
                f"planner.name is 'heteroauto', which uses all devices, and {len(problem.lost)} "
                f"are lost ({', '.join(map(str, sorted(problem.lost)))}); set planner.name = 'harp'"
            )
        modules = Modules.of(problem)
        kinds = ModuleWays(problem, modules).kinds()
        widths = divisors(problem.microbatch_size)
        found = find_strategy(
            kinds,
            len(modules.runs),
            lambda width: problem.num_microbatches,
            widths,
            self.alpha,
            is_grouped=self.is_grouped,
        )
        if found is None:
            raise _why_not(problem, modules, kinds, widths)
        return _plan_of(problem, modules, found), found


def _why_not(
    problem: PlanningProblem, modules: Modules, kinds: Sequence[ChipKind], widths: Sequence[int]
) -> InputError:
    """Why there is no strategy: too many stages, or too little memory."""
    cluster, size = problem.cluster, problem.microbatch_size
    fewest = min(_fewest_stages(kinds, width) for width in widths)
    if fewest > len(modules.runs):
        return InputError(
            f"planner.name is 'heteroauto', by which the {cluster.num_devices} devices of cluster "
            f"{cluster.name!r} are {fewest} stages or more with microbatches of {_counted(size)}, "
            f"of which data parallelism of {', '.join(map(str, widths))} has equal parts, and the "
            f"program repeats {len(modules.runs)} modules; allowed: a module for each stage, or "
            f"planner.name = 'harp'"
        )
    return DoesNotFitError(
        f"the model does not fit on cluster {cluster.name!r} by HeteroAuto's plans, which use all "
        f"devices, with {problem.num_microbatches} microbatches of {_counted(size)}; what would "
        f"help: {'more microbatches, ' if size > 1 else ''}an optimizer with less state, or "
        f"planner.name = 'harp'"
    )


def _over_memory(prediction: Prediction) -> str:
    """What does not fit of a plan that a coarser count of memory has let through."""

    def needs(stage: StagePrediction) -> str:
        usable = int(USABLE_MEMORY * stage.memory_limit_bytes)
        of_device, limit = map(format_bytes, (stage.memory_bytes, usable))
        of_host, host_limit = map(format_bytes, (stage.all_host_bytes, stage.host_limit_bytes))
        host = f" and {of_host} of its host's {host_limit}" if stage.all_host_bytes else ""
        return f"needs {of_device} of a device's {limit} that may be used{host}"

    stages = enumerate(prediction.stages)
    over = "; ".join(f"stage {s} {needs(each)}" for s, each in stages if not has_room(each))
    return (
        f"HeteroAuto's best plan does not fit: {over}. Stages of a kind are alike in its plans; "
        f"set planner.name = 'harp', where each may have layers and ways of its own"
    )


def _counted(examples: int) -> str:
    return "1 example" if examples == 1 else f"{examples} examples"


def _fewest_stages(kinds: Sequence[ChipKind], width: int) -> float:
    """The fewest stages that all devices can be; infinite where a kind is not divided."""
    of_kinds = ((way.stages for way in kind.ways(width, kind.chips)) for kind in kinds)
    return sum(min(stages, default=float("inf")) for stages in of_kinds)


def _plan_of(problem: PlanningProblem, modules: Modules, found: ChipStrategy) -> Plan:
    parts = {part.name: part for part in problem.cluster.subclusters}
    shares = found.division.shares
    counts = modules_of_stages(shares, len(modules.runs))
    runs = modules.layers_of(counts)
    owners = [
        (group.name, share.way)
        for group, share in zip(found.groups, shares, strict=True)
        for _ in range(share.way.stages)
    ]
    starts = dict.fromkeys(parts, 0)
    stages = []
    for (name, way), layers in zip(owners, runs, strict=True):
        devices = found.width * way.tensor
        shape = stage_shape(parts[name], devices)
        assert shape is not None, "a way has a shape"
        member = Member(SubMesh(name, starts[name], shape), (found.width, way.tensor))
        rule = "state_sharded" if found.width > 1 else "data"
        again = repeated_in(problem.repeatable_layers, layers) if way.repeats else ()
        away = _offload(way)
        stages.append(StagePlan(layers, (member,), rule, recompute_layers=again, offload=away))
        starts[name] += devices
    schedule = one_f_one_b(len(stages), problem.num_microbatches)
    plan = pipeline_plan(problem, stages, schedule, HeteroAuto.__name__)
    validate(plan)
    return plan


def _offload(way: GroupWay) -> tuple[Offloaded, ...]:
    """What stages have in their hosts' memory."""
    activations: tuple[Offloaded, ...] = ("activations",) if way.offloads_activations else ()
    return (*activations, "optimizer_state") if way.host_bytes else activations


def modules_of_stages(shares: Sequence[GroupShare], num_modules: int) -> list[int]:
    """How many modules each stage has.

    A group's stages have as many as its share says, the last one fewer by what the loss takes. If
    these are too many, one is taken from the last stage first, then from the first one, which
    embeds, and then from those that take the longest.

    Args:
        shares: of each group its way, and how many modules a stage has at most.
        num_modules: how many there are.

    Returns:
        The modules of each stage, group by group; of the last one there may be none.
    """
    most = [share.layers for share in shares for _ in range(share.way.stages)]
    ways = [share.way for share in shares for _ in range(share.way.stages)]
    counts = [*most[:-1], most[-1] - shares[-1].way.last_layers]
    most[-1], last = counts[-1], len(counts) - 1

    def order(stage: int) -> tuple[int, float]:
        edge = {last: 0, 0: 1}.get(stage, 2) if counts[stage] == most[stage] else 3
        return edge, -ways[stage].stage_seconds(counts[stage])

    for _ in range(sum(counts) - num_modules):
        counts[min((s for s, count in enumerate(counts) if count > 1), key=order)] -= 1
    return counts
