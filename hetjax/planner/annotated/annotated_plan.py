"""A plan from annotations alone: pipelines, stages, members and shares."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jaxtyping import PyTree

from hetjax.errors import InputError
from hetjax.mesh.cluster import Cluster
from hetjax.pipeline.program.loss import abstract, parameter_shapes
from hetjax.pipeline.program.reshards import reshards_of
from hetjax.pipeline.program.traced_program import Program, with_examples
from hetjax.pipeline.program.tracing import trace
from hetjax.pipeline.schedule_search.named_schedules import make_schedule
from hetjax.pipeline.schedules.schedule import Schedule
from hetjax.pipeline.schedules.warm_up import h_1f1b
from hetjax.pipeline.stages.cutting import cut
from hetjax.planner.annotated.annotated_stages import AnnotatedStage, find_stages
from hetjax.planner.annotated.input_annotations import InputAnnotations, input_annotations
from hetjax.planner.annotated.stage_members import (
    AnnotatedArray,
    StageArrays,
    annotated_stage_plan,
)
from hetjax.planner.plan.member_annotations import Wider, restricted
from hetjax.planner.plan.obeyed_reshards import obey_reshards
from hetjax.planner.plan.plan import Plan, validate, validate_for
from hetjax.planner.plan.stage_plan import PipelinePlan, StagePlan
from hetjax.planner.problem.options import DEFAULTS, PlanOptions, check_options
from hetjax.planner.problem.problem import trace_microbatch
from hetjax.sharding.annotation.annotation import DUPLICATE, HSharding
from hetjax.sharding.annotation.subgroup import Subgroup
from hetjax.sharding.annotation.symbol_numbers import numbers_of
from hetjax.sharding.deduction.annotated_program import Union, union_of
from hetjax.sharding.resolution.pipelines import find_pipelines


def plan_of_annotations(
    loss_function: Callable[..., Any],
    parameters: PyTree,
    batch: PyTree,
    annotations: Any,
    *,
    cluster: Cluster,
    num_microbatches: int,
    has_aux: bool = False,
    options: PlanOptions = DEFAULTS,
) -> Plan:
    """The plan that annotations say, without a search and without a prediction.

    Args:
        loss_function: ``loss_function(parameters, batch)``, with `hetjax.reshard` where a value
            shall come to lie in another way.
        parameters: pytree of arrays or shapes, or a function without arguments that makes it.
        batch: the batch of a whole step, pytree of arrays or shapes.
        annotations: a pair of pytrees of `HSharding`, of the parameters and of the batch.
        cluster: the devices, whose numbers the annotations use.
        num_microbatches: into how many microbatches the batch is divided.
        has_aux: whether the loss function returns a pair of the loss and a pytree of scalars.
        options: of these the schedule counts alone; without times, H-1F1B is 1F1B.

    Returns:
        The plan.

    Raises:
        InputError: the annotations do not fit the program, the batch or the cluster, or say what a
            plan cannot hold; the message names what is annotated, how, and what is allowed.

    Source: Hetu v2, sections 3 and 5.4.

    Example:
        >>> import jax.numpy as jnp
        >>> from jax.sharding import PartitionSpec
        >>> from hetjax.mesh import Link, Subcluster, kind
        >>> from hetjax.sharding import Subgroup
        >>> link = Link(1e9, 1e-5)
        >>> parts = [Subcluster(name, kind("T4"), 1, 2, link, link) for name in ("fast", "slow")]
        >>> cluster = Cluster("home", tuple(parts), (("fast", "slow", link),))
        >>> fast = Subgroup((0, 1), (("tensor", 2),), PartitionSpec(None, "tensor"))
        >>> slow = Subgroup((2,), (), PartitionSpec())
        >>> weight, batch = jax.ShapeDtypeStruct((4, 6), "float32"), jnp.ones((8, 4))
        >>> made = plan_of_annotations(
        ...     lambda w, x: jnp.mean((x @ w) ** 2), weight, batch,
        ...     (HSharding((fast, slow), 1, (4, 2)), None), cluster=cluster, num_microbatches=2,
        ... )
        >>> [stage] = made.stages
        >>> stage.devices_text, stage.shares.parameters[""]
        ('fast[0:2] 1x2 + slow[0:1] 1x1', Share(dimension=1, sizes=(4, 2)))
    """
    check_options(options)
    if options != PlanOptions(schedule=options.schedule):
        raise InputError(
            "options: where annotations say what the plan is, there is nothing else to choose; "
            "allowed: schedule"
        )
    shapes, examples = parameter_shapes(parameters), abstract(batch)
    program, size = trace_microbatch(
        loss_function, shapes, examples, num_microbatches, has_aux=has_aux
    )
    given = input_annotations(annotations, shapes, examples, program.leaves)
    reading = _Reading(program, given, examples, find_stages(program, given), size)
    made = _PlanMaker(reading, cluster, num_microbatches, options.schedule).plan()
    validate(made)
    validate_for(made, program, size * num_microbatches)
    if len(made.pipelines) == 1:
        obey_reshards(made, made.pipeline, program)
        return made

    def program_of(num_examples: int) -> Program:
        wanted = with_examples(examples, num_examples)
        return trace(loss_function, shapes, wanted, has_aux=has_aux)

    return _for_pipelines(made, program, program_of)


def _for_pipelines(plan: Plan, program: Program, program_of: Callable[[int], Program]) -> Plan:
    """A plan of the program that its pipelines compute, for microbatches of their own sizes.

    Args:
        plan: a plan of several pipelines.
        program: the program whose positions it names.
        program_of: traces the loss function for a number of examples.
    """
    sizes = list(dict.fromkeys(each.microbatch_size for each in plan.pipelines))
    programs = [program_of(size) for size in sizes]
    positions = [[step.name for step in each.steps] for each in (program, *programs)]
    is_one = all(each.fingerprint == programs[0].fingerprint for each in programs)
    if not is_one or any(each != positions[0] for each in positions):
        raise InputError(
            f"annotations: pipelines have microbatches of {' and '.join(map(str, sizes))} examples "
            f"of {program.num_examples}, and the loss is traced to other equations for another "
            f"number, as it often is for one example and where it loops over examples; allowed: "
            f"sizes for which it is not; change num_microbatches, or the sizes of the batch"
        )
    return replace(plan, model=programs[0].fingerprint)


@dataclass(frozen=True)
class _Reading:
    """What was read of a program and its annotations.

    Args:
        program: the traced loss function, at the size of a microbatch.
        given: the annotations of its inputs.
        batch: shapes of the batch of a whole step.
        stages: the stages.
        size: examples in a microbatch.
    """

    program: Program
    given: InputAnnotations
    batch: PyTree
    stages: tuple[AnnotatedStage, ...]
    size: int

    @property
    def share_devices(self) -> bool:
        """Whether stages have devices in common, without being the same."""
        pairs = itertools.combinations(self.stages, 2)
        return any(a.devices & b.devices for a, b in pairs)

    @property
    def leaves(self) -> list[AnnotatedArray]:
        """The leaves of the batch that are annotated."""
        shapes = jax.tree.leaves(self.batch)
        return [
            AnnotatedArray(
                f"batch leaf {self.program.batch_names[place]!r}",
                tuple(shapes[place].shape),
                annotation,
                examples="must",
            )
            for place, annotation in self.given.batch.items()
        ]

    def values(self, stage: AnnotatedStage) -> Iterator[AnnotatedArray]:
        """The values that a stage reshards."""
        for found in reshards_of(self.program):
            if stage.start <= found.start < stage.stop:
                shape = tuple(found.shape.shape)
                what, annotation = f"hetjax.reshard at {found.line}", self.given.meant(found)
                try:
                    annotation = annotation.bind(numbers_of([annotation], [shape], {}))
                except InputError as error:
                    raise InputError(f"{what}: {error}") from None
                yield AnnotatedArray(f"the value of {what}", shape, annotation)


class _PlanMaker:
    def __init__(self, reading: _Reading, cluster: Cluster, num_microbatches: int, schedule: str):
        self.read, self.cluster, self.schedule = reading, cluster, schedule
        self.num_microbatches = num_microbatches
        self.layers = (0, *(stage.stop for stage in reading.stages))
        self.wider: Wider = "pipelines" if reading.share_devices else "stages"
        self._check_batch()

    def plan(self) -> Plan:
        """The plan."""
        several = self.read.share_devices
        pipelines = tuple(self._pipelines()) if several else (self._pipeline(),)
        return Plan(
            self.read.program.fingerprint,
            self.layers,
            self.cluster,
            pipelines,
            planner="annotations",
        )

    def _pipeline(self) -> PipelinePlan:
        """The one pipeline of stages that have no device in common."""
        stages = [
            self._stage((place, place + 1), stage.devices, list(self.read.values(stage)))
            for place, stage in enumerate(self.read.stages)
        ]
        return self._with_schedule(stages, self.read.size)

    def _pipelines(self) -> Iterator[PipelinePlan]:
        """A pipeline for each submesh that the batch is shared among."""
        lies = self._examples_by_stage()
        whole = self.read.size * self.num_microbatches
        try:
            found = find_pipelines(lies, (whole,))
        except InputError as error:
            raise InputError(
                f"annotations: stages have devices in common, so they must be of several "
                f"pipelines; but {error}"
            ) from None
        for chain, examples in zip(found, _sizes(lies[0], whole), strict=True):
            stages = [
                self._stage(layers, frozenset(group.devices), [_lying_on(group)])
                for layers, group in _stretches(lies, chain)
            ]
            yield self._with_schedule(stages, examples // self.num_microbatches)

    def _examples_by_stage(self) -> list[HSharding]:
        """How the examples of a step are shared among the submeshes of each stage."""
        batch, sizes = self._shared_examples()
        found: list[HSharding] = []
        groups = union_of(batch.annotation)
        for stage in self.read.stages:
            _check_whole(stage)
            groups = _in_order(stage, groups)
            if len(groups) != len(sizes):
                raise InputError(
                    f"annotations: {stage.uses[0].what}, is on {len(groups)} submeshes, and "
                    f"{batch.what} on {len(sizes)}; allowed: one of each for each pipeline"
                )
            found.append(HSharding(groups, 0, sizes) if len(groups) > 1 else HSharding(groups))
        return found

    def _shared_examples(self) -> tuple[AnnotatedArray, tuple[int, ...]]:
        """A leaf of the batch, and how many examples of a step each pipeline has."""
        leaves = self.read.leaves
        if not leaves:
            raise InputError(
                "annotations: stages have devices in common, so they must be of several "
                "pipelines; but no leaf of the batch is annotated, which says who has which "
                "examples"
            )
        shares = [
            _sizes(leaf.annotation, leaf.shape[0]) if leaf.annotation.hdim == 0 else ()
            for leaf in leaves
        ]
        for leaf, share in zip(leaves, shares, strict=True):
            if not share or share != shares[0]:
                raise InputError(
                    f"annotations: {leaf.what} lies as {leaf.annotation}; where stages are of "
                    f"several pipelines, these share the examples of all leaves alike"
                )
        if any(size % self.num_microbatches or not size for size in shares[0]):
            raise InputError(
                f"annotations: {leaves[0].what} is shared in {list(shares[0])} examples among "
                f"pipelines; allowed: multiples of num_microbatches, {self.num_microbatches}"
            )
        return leaves[0], shares[0]

    def _stage(
        self, layers: tuple[int, int], devices: frozenset[int], values: Sequence[AnnotatedArray]
    ) -> StagePlan:
        read, program = self.read, self.read.program
        boundaries = sorted({0, *(self.layers[place] for place in layers), program.num_positions})
        place = boundaries.index(self.layers[layers[0]])
        held = [part.leaf for part in cut(program, boundaries)[place].parameters]
        names, given = program.parameter_names, read.given.parameters
        parameters = {
            names[leaf]: AnnotatedArray(
                f"annotations: parameter {names[leaf]!r}",
                program.avals[program.parameters[leaf]].shape,
                given[leaf],
            )
            for leaf in held
            if leaf in given
        }
        leaves = [
            leaf
            for leaf in read.leaves
            if restricted(leaf.annotation, devices, self.wider) is not None
        ]
        return annotated_stage_plan(
            StageArrays(
                layers,
                devices,
                parameters,
                [names[leaf] for leaf in held if leaf not in given],
                leaves or self._received(values),
                values,
                self.wider,
            ),
            self.cluster,
            self.num_microbatches,
        )

    def _received(self, values: Sequence[AnnotatedArray]) -> list[AnnotatedArray]:
        """The first value of a stage that tells how its examples are shared, as of a whole step."""
        for value in values:
            lies = value.annotation
            leads = bool(value.shape) and value.shape[0] == self.read.size
            if not leads or lies.hdim not in (0, DUPLICATE):
                continue
            if any(size > 1 for g in lies.subgroups for size in g.divisions(len(value.shape))[1:]):
                continue
            count = self.num_microbatches
            sizes = tuple(size * count for size in lies.sizes if isinstance(size, int))
            shape = (value.shape[0] * count, *value.shape[1:])
            lies = replace(lies, sizes=sizes)
            return [replace(value, shape=shape, annotation=lies, examples="preferred")]
        return []

    def _with_schedule(self, stages: Sequence[StagePlan], size: int) -> PipelinePlan:
        count = self.num_microbatches
        schedule = _schedule(self.schedule, len(stages), count)
        return PipelinePlan(tuple(stages), count, size, schedule)

    def _check_batch(self) -> None:
        """Check that each leaf of the batch is annotated on the devices of a stage."""
        known = frozenset[int]().union(*(stage.devices for stage in self.read.stages))
        for leaf in self.read.leaves:
            strange = sorted(set(leaf.annotation.devices) - known)
            fits = self.wider == "pipelines" or any(
                restricted(leaf.annotation, stage.devices, "stages") for stage in self.read.stages
            )
            if strange or not fits:
                stages = ", ".join(str(sorted(stage.devices)) for stage in self.read.stages)
                raise InputError(
                    f"annotations: {leaf.what} is on devices {sorted(leaf.annotation.devices)}, "
                    f"which are no stage's; the stages are on {stages}"
                )


def _check_whole(stage: AnnotatedStage) -> None:
    """Check that submeshes of several pipelines have parameters whole, or their own examples."""
    for use in stage.uses:
        hdim = use.annotation.hdim
        if hdim != DUPLICATE and not (use.is_value and hdim == 0):
            raise InputError(
                f"annotations: {use.what}, lies as {use.annotation}: submeshes of several "
                f"pipelines have the whole of a parameter each, and their own examples"
            )


def _in_order(stage: AnnotatedStage, before: Union) -> Union:
    """The submeshes of a stage in the order of pipelines, of which those before are known.

    A value that is shared along its examples tells it; where each has the whole, those that stay
    keep their places, and the others have the places that are left.
    """
    uses = (use for use in stage.uses if use.is_value and use.annotation.hdim == 0)
    telling = next(uses, None)
    groups = union_of((telling or stage.uses[0]).annotation)
    if telling is not None or len(groups) != len(before):
        return groups
    places = {group.devices: group for group in groups}
    kept = [places.pop(each.devices, None) for each in before]
    new = iter(places.values())
    return tuple(each or next(new) for each in kept)


def _stretches(
    lies: Sequence[HSharding], chain: Sequence[tuple[int, ...]]
) -> Iterator[tuple[tuple[int, int], Subgroup]]:
    """The layers of each stage of a pipeline, with its submesh."""
    start = 0
    for devices in chain:
        here = [{group.devices: group for group in each.subgroups} for each in lies[start:]]
        count = len(list(itertools.takewhile(lambda groups, own=devices: own in groups, here)))
        yield (start, start + count), here[0][devices]
        start += count


def _lying_on(group: Subgroup) -> AnnotatedArray:
    """What says of a stage that it is on a submesh, where nothing else may."""
    return AnnotatedArray("what it gets", (), HSharding((group,)))


def _sizes(annotation: HSharding, examples: int) -> tuple[int, ...]:
    """How many examples each submesh has."""
    return tuple(stop - start for ((start, stop),) in annotation.regions((examples,)))


def _schedule(name: str, num_stages: int, num_microbatches: int) -> Schedule:
    """A schedule before anything is known of times: H-1F1B then takes links for fast."""
    if name == "h_1f1b":
        return h_1f1b(num_stages, num_microbatches, [1.0] * num_stages, [0.0] * (num_stages - 1))
    return make_schedule(name, num_stages, num_microbatches)
