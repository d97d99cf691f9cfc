"""The planner of HexiSeq: one stage whose members share the tokens and heads of long sequences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from hetjax.errors import DoesNotFitError, InputError, unknown_name
from hetjax.mesh.cluster import SubMesh
from hetjax.pipeline.schedules.warm_up import one_f_one_b
from hetjax.planner.hexiseq.context_devices import ContextDevices
from hetjax.planner.hexiseq.context_model import ContextModel, work_flops
from hetjax.planner.hexiseq.context_pace import ContextPace, context_paces
from hetjax.planner.hexiseq.context_work import ContextWork
from hetjax.planner.hexiseq.program_work import attending_layers, context_work
from hetjax.planner.hexiseq.scheduler import ContextSchedule, schedule_context, schedule_even
from hetjax.planner.plan.plan import Plan
from hetjax.planner.plan.stage_plan import Member, PipelinePlan, Shares, StagePlan
from hetjax.planner.problem.problem import PlanningProblem
from hetjax.sharding.context.context_split import ContextSplit

EVEN_SYSTEMS = ("ring", "ulysses", "usp")
"""What all devices have as many tokens and heads by, as `schedule_even` knows them."""


@dataclass(frozen=True)
class ContextChoice:
    """A context split for a problem, with what its layers do in the backward pass.

    Args:
        schedule: the split, and what it is predicted to take.
        model: the cost model that it was found by, whose work says whether layers are made again,
            and how many sequences there are at once.
    """

    schedule: ContextSchedule
    model: ContextModel


@dataclass(frozen=True)
class HexiSeqPlanner:
    """Plans one stage whose members, single devices, share tokens and heads unevenly.

    Layers are made again in the backward pass where that is the only way to fit, or is faster.
    Devices that would only be in the way are left out.

    Args:
        system: ``"hexiseq"``, or the even system that the plan is to be of: ``"ring"``,
            ``"ulysses"`` or ``"usp"``.

    Raises:
        InputError: there is no such system.

    Source: HexiSeq, section 4.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import hetjax
        >>> from hetjax.mesh import Cluster, Link, Subcluster, kind
        >>> link = Link(25e9, 1e-5)
        >>> parts = tuple(Subcluster(n, kind(n), 1, 1, link, link) for n in ("H100", "A100-80"))
        >>> cluster = Cluster("two cards", parts, (("H100", "A100-80", link),))
        >>> def loss(weight, x):
        ...     heads = (x @ weight).reshape(*x.shape[:2], 8, 64)
        ...     return jnp.mean(hetjax.attention(heads, heads, heads, causal=True) ** 2)
        >>> made = hetjax.plan(
        ...     loss,
        ...     jax.ShapeDtypeStruct((512, 512), jnp.float32),
        ...     jax.ShapeDtypeStruct((1, 2**16, 512), jnp.float32),
        ...     cluster=cluster,
        ...     optimizer=optax.sgd(1e-3),
        ...     num_microbatches=1,
        ...     planner=HexiSeqPlanner(),
        ... )
        >>> made.stages[0].shares.context.tokens, made.stages[0].devices_text
        ((49704, 15832), 'H100[0:1] 1x1 + A100-80[0:1] 1x1')
    """

    system: str = "hexiseq"

    def __post_init__(self) -> None:
        systems = ("hexiseq", *EVEN_SYSTEMS)
        if self.system not in systems:
            raise InputError(unknown_name("system", self.system, systems))

    def plan(self, problem: PlanningProblem) -> Plan:
        """A plan for the problem.

        Args:
            problem: what to plan; its program was traced with `divides_sequences`.

        Returns:
            A valid plan.

        Raises:
            InputError: the model has no attention, or something that goes along the sequence, or it
                fits in no way that was tried.
        """
        return context_plan(problem, self.choose(problem))

    def choose(self, problem: PlanningProblem) -> ContextChoice:
        """The best context split.

        Args:
            problem: as for `plan`.

        Returns:
            The split, whether layers are made again, and what it is predicted to take.

        Raises:
            InputError: as for `plan`.
        """
        return self.choices(problem)[0]

    def choices(self, problem: PlanningProblem) -> tuple[ContextChoice, ...]:
        """The best context splits of layers that are kept, and of layers that are made again.

        Args:
            problem: as for `plan`.

        Returns:
            Those that fit, the fastest first; one or more.

        Raises:
            InputError: as for `plan`.
        """
        return _choices(_models(problem), self.system)

    def beside(self, problem: PlanningProblem) -> Mapping[str, ContextChoice]:
        """Ring attention, Ulysses and USP at their best, by the same model.

        Args:
            problem: as for `plan`.

        Returns:
            Those that are legal and fit, by name.

        Raises:
            InputError: the model has no attention, or something that goes along the sequence.
        """
        models, found = _models(problem), {}
        for system in EVEN_SYSTEMS:
            try:
                found[system] = _choices(models, system)[0]
            except DoesNotFitError:
                continue
        return found


def context_plan(problem: PlanningProblem, choice: ContextChoice) -> Plan:
    """The plan that a context split makes of a problem.

    Args:
        problem: the problem.
        choice: the split, by the numbers of the cluster's devices.

    Returns:
        One stage, whose members are the split's devices in the order of its groups.
    """
    split, count = choice.schedule.split, problem.num_microbatches
    places = map(choice.model.devices.place, split.devices)
    stage = StagePlan(
        (0, problem.num_layers),
        tuple(Member(SubMesh(*place, (1, 1)), (1, 1)) for place in places),
        shares=Shares(context=_by_places(split)),
        recompute_layers=attending_layers(problem) if choice.model.work.is_recomputed else (),
    )
    pipeline = PipelinePlan((stage,), count, problem.microbatch_size, one_f_one_b(1, count))
    return Plan(
        problem.program.fingerprint,
        problem.layers,
        problem.cluster,
        (pipeline,),
        planner="HexiSeq",
        lost_devices=tuple(sorted(problem.lost)),
    )


def _models(problem: PlanningProblem) -> list[ContextModel]:
    """The cost models of a problem: of layers that are kept, and that are made again."""
    kept = context_work(problem)
    may_repeat = problem.options.allow_recompute and attending_layers(problem)
    works = [kept, replace(kept, is_recomputed=True)] if may_repeat else [kept]
    paces = context_paces(problem, kept)
    return [_model(problem, work, paces) for work in works]


def _model(
    problem: PlanningProblem, work: ContextWork, paces: Mapping[str, ContextPace]
) -> ContextModel:
    step = work_flops(work)
    rates = {name: step / pace.step_seconds(work) for name, pace in paces.items()}
    devices = ContextDevices(problem.cluster, problem.dtype, lost=problem.lost, rates=rates)
    return ContextModel(devices, work, paces)


def _choices(models: list[ContextModel], system: str) -> tuple[ContextChoice, ...]:
    found: list[ContextChoice] = []
    errors: list[DoesNotFitError] = []
    for model in models:
        try:
            if system == "hexiseq":
                schedule = schedule_context(model)
            else:
                schedule = schedule_even(model, system)
        except DoesNotFitError as error:
            errors.append(error)
            continue
        found.append(ContextChoice(schedule, model))
    if not found:
        raise errors[-1]
    return tuple(sorted(found, key=lambda each: each.schedule.seconds))


def _by_places(split: ContextSplit) -> ContextSplit:
    """A split whose devices are their places among all of its devices."""
    groups, first = [], 0
    for group in split.groups:
        stop = first + len(group.devices)
        groups.append(replace(group, devices=tuple(range(first, stop))))
        first = stop
    return replace(split, groups=tuple(groups))
