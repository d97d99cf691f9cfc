"""How arrays of one stage lie: among its members by shares, inside each by the rule of its plan.

What submeshes share comes from the plan; how each divides its own part, from the rule that the plan
names, or from what it says of single parameters.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Sequence

from jax.sharding import PartitionSpec

from hetjax.errors import InputError
from hetjax.mesh.cluster import Cluster
from hetjax.pipeline.build import PipelinePrograms
from hetjax.pipeline.program.reshards import is_constrained
from hetjax.pipeline.stages.cutting import ParameterPart
from hetjax.planner.plan.member_annotations import union_of_members
from hetjax.planner.plan.module_shares import Share
from hetjax.planner.plan.parameter_names import is_told, told_of
from hetjax.planner.plan.plan import Plan
from hetjax.planner.plan.stage_plan import StagePlan
from hetjax.planner.plan.update_weights import update_weights
from hetjax.sharding.annotation.annotation import DUPLICATE, HSharding
from hetjax.sharding.annotation.rules import (
    DATA,
    TENSOR,
    divides,
    division,
    example_spec,
    parameter_spec,
    state_spec,
)
from hetjax.sharding.annotation.subgroup import axes_of, entries_of

SpecRule = Callable[[tuple[int, ...], tuple[int, int]], PartitionSpec]
"""From the shape of what a member has, and its logical mesh, to how the member divides it."""


class MemberLayouts:
    """How arrays can lie on the members of a stage.

    Args:
        stage: the stage's plan.
        cluster: the devices.
    """

    def __init__(self, stage: StagePlan, cluster: Cluster):
        self._members = stage.members
        self._groups = union_of_members(stage.members, cluster)
        self._known: dict[Hashable, HSharding] = {}

    def lying(self, shape: Sequence[int], share: Share | None, rule: SpecRule) -> HSharding:
        """How an array lies of which each member has a share, divided inside it by a rule.

        Args:
            shape: its shape, whole.
            share: what each member has of it; None: all of it.
            rule: how a member divides its part.
        """
        shapes = [tuple(shape)] * len(self._groups)
        if share is not None:
            before, after = shape[: share.dimension], shape[share.dimension + 1 :]
            shapes = [(*before, size, *after) for size in share.sizes]
        pairs = zip(shapes, self._members, strict=True)
        specs = tuple(rule(each, member.mesh_shape) for each, member in pairs)
        key = specs, share
        if key not in self._known:
            groups = tuple(g.with_spec(s) for g, s in zip(self._groups, specs, strict=True))
            hdim, sizes = (DUPLICATE, ()) if share is None else (share.dimension, share.sizes)
            self._known[key] = HSharding(groups, hdim, sizes)
        return self._known[key]

    def value(self, shape: Sequence[int], share: Share | None, examples: int) -> HSharding:
        """How a value lies of which each member has a share.

        Args:
            shape: its shape, whole.
            share: what each member has of it; None: all of it.
            examples: a microbatch's size: members divide their examples by their data axis.
        """
        leads = bool(shape) and shape[0] == examples

        def rule(shape: tuple[int, ...], mesh_shape: tuple[int, int]) -> PartitionSpec:
            return example_spec(shape, shape[0] if leads else -1, mesh_shape)

        return self.lying(shape, share, rule)


class StageAnnotator:
    """Says how arrays of a stage lie.

    Args:
        pipelines: the pipelines, cut at least.
        plan: the plan.
        stage: which stage.

    Attributes:
        is_union: whether the stage has several members.
        whole: how an array lies that every device has.
    """

    def __init__(self, pipelines: PipelinePrograms, plan: Plan, stage: int):
        self.pipelines, self.stage, self.plan = pipelines, stage, plan.stages[stage]
        self._field = plan.field_of(stage)
        self._place = pipelines.pipeline_of(stage)
        self.pipeline = plan.pipelines[self._place]
        self.held = pipelines.stages[stage].parameters
        self.is_union = len(self.plan.members) > 1
        self._members = MemberLayouts(self.plan, plan.cluster)
        self._lying = self._members.lying
        self._update_weights = update_weights(self.plan, plan.cluster)
        self.whole = self._lying((), None, lambda shape, mesh_shape: PartitionSpec())

    def example(self, shape: Sequence[int]) -> HSharding:
        """Of an array of a microbatch, whose first dimension may be that of examples.

        Args:
            shape: its shape, whole.
        """
        size, sizes = self.pipeline.microbatch_size, self.shares_of_examples(shape)

        def rule(shape: tuple[int, ...], mesh_shape: tuple[int, int]) -> PartitionSpec:
            return example_spec(shape, shape[0] if sizes else size, mesh_shape)

        return self._lying(shape, Share(0, sizes) if sizes else None, rule)

    def passed(self, value: int, shape: Sequence[int]) -> HSharding:
        """Of a value that comes from another stage or goes to it, or of its cotangent.

        Args:
            value: its number in the program.
            shape: its shape, whole.
        """
        split = self.plan.shares.context
        dimension = self.pipelines.traced[self._place].tokens.values.get(value)
        if split is None or dimension is None or not self.is_union:
            return self.example(shape)
        return self._lying(shape, Share(dimension, split.tokens), lambda *of: PartitionSpec())

    def value(self, shape: Sequence[int], share: Share | None) -> HSharding:
        """Of a value inside a microbatch, of which each member has a share.

        Args:
            shape: its shape, whole.
            share: what each member has of it; None: all of it.
        """
        return self._members.value(shape, share, self.pipeline.microbatch_size)

    def shares_of_examples(self, shape: Sequence[int]) -> tuple[int, ...]:
        """How many examples of an array each member has; none where each has the whole array."""
        leads = bool(shape) and shape[0] == self.pipeline.microbatch_size
        return self.plan.shares.batch if leads else ()

    def part(self, part: ParameterPart) -> HSharding:
        """Of what the stage holds of a parameter, or of some of its rows.

        Raises:
            InputError: what the plan says of the parameter does not divide it evenly.
        """
        shape = self.pipelines.part_shape(part).shape
        return self._lying(shape, self._share(part), lambda *of: self._part_spec(part, *of))

    def gradient(self, part: ParameterPart) -> HSharding:
        """Of a gradient when it is summed: as the optimizer's state.

        Unless other stages have summands, too: then as the parameter.
        """
        if part.leaf in self.pipelines.shared_of_leaf:
            return self.part(part)

        def rule(shape: tuple[int, ...], mesh_shape: tuple[int, int]) -> PartitionSpec:
            spec = self._part_spec(part, shape, mesh_shape)
            return state_spec(self.plan.sharding, spec, shape, mesh_shape)

        shape = self.pipelines.part_shape(part).shape
        return self._lying(shape, self._update_share(part, shape), rule)

    def state(self, part: ParameterPart, like: int | None) -> HSharding:
        """Of a part of the optimizer's state: as the parameter that it belongs to, or finer.

        Args:
            part: which part of which leaf of the state.
            like: the parameter's leaf; None where it belongs to none.
        """
        of = None if like is None else ParameterPart(like, part.start, part.stop)

        def rule(shape: tuple[int, ...], mesh_shape: tuple[int, int]) -> PartitionSpec:
            if of is None:
                spec = parameter_spec(self.plan.sharding, shape, mesh_shape)
            else:
                spec = self._part_spec(of, shape, mesh_shape)
            return state_spec(self.plan.sharding, spec, shape, mesh_shape)

        shape = self.pipelines.state_shape(part).shape
        return self._lying(shape, None if of is None else self._update_share(of, shape), rule)

    def partial(self, part: ParameterPart) -> HSharding:
        """Of the sums of a part's gradients, partial along the data axis, in a plain stage."""

        def rule(shape: tuple[int, ...], mesh_shape: tuple[int, int]) -> PartitionSpec:
            return partial_sums(self._part_spec(part, shape, mesh_shape))

        return self._lying(self.pipelines.part_shape(part).shape, None, rule)

    def summed_late(self) -> frozenset[int]:
        """The places of the parameters whose gradients a plain stage reduces once a step.

        Those are the ones that each of several devices along the data axis has whole: of these,
        sums over the examples of all microbatches can stay partial until the last one. Where a
        plan says what the tensor axis divides, the compiler divides the whole program, and reduces
        as it does: deduction does not bring sums along two axes together as GPTs need it.
        """
        plan, (data, _) = self.plan, self.plan.mesh_shape
        says = bool(plan.values) or any(TENSOR in spec for spec in plan.parameters.values())
        says |= is_constrained(self.pipelines.stages[self.stage].steps)
        if data == 1 or self.pipeline.num_microbatches == 1 or says:
            return frozenset()
        specs = {
            place: self.part(self.held[place]).subgroups[0].spec
            for place in self.pipelines.stages[self.stage].trained
        }
        return frozenset(
            place
            for place, spec in specs.items()
            if not any(DATA in axes_of(entry) for entry in spec)
        )

    def _share(self, part: ParameterPart) -> Share | None:
        share = told_of(self.plan.shares.parameters, self._name(part))
        if share is None or share.dimension != 0 or part.stop is None:
            return share
        # A plan shares the rows of the whole parameter: of some, each member has those of its own.
        ends = (min(max(end, part.start), part.stop) for end in itertools.accumulate(share.sizes))
        pairs = itertools.pairwise((part.start, *ends))
        return Share(0, tuple(stop - start for start, stop in pairs))

    def _update_share(self, part: ParameterPart, shape: Sequence[int]) -> Share | None:
        """The share of a parameter that each member updates.

        What all members have is updated by one each, and then given to the others: computed on
        each of unlike devices, it would soon differ in its last bits.
        """
        share = self._share(part)
        if share or not self.is_union or not shape or part.leaf in self.pipelines.shared_of_leaf:
            return share
        if self._is_told(part):
            return told_of(self.plan.shares.updates, self._name(part))
        dimension = max(range(len(shape)), key=lambda place: shape[place])
        unit = self._divided_together(part, tuple(shape), dimension)
        sizes = proportional_sizes(shape[dimension] // unit, self._update_weights)
        return Share(dimension, tuple(unit * size for size in sizes))

    def _divided_together(self, part: ParameterPart, shape: tuple[int, ...], dimension: int) -> int:
        """What sizes are multiples of that every member can divide as it divides all of a part."""
        if told_of(self.plan.parameters, self._name(part)) is None:
            return 1

        def parts(mesh_shape: tuple[int, int]) -> int:
            spec = self._part_spec(part, shape, mesh_shape)
            return division(PartitionSpec(entries_of(spec, len(shape))[dimension]), mesh_shape)

        return math.lcm(*(parts(member.mesh_shape) for member in self.plan.members))

    def updates_alone(self, part: ParameterPart) -> bool:
        """Whether each member updates all of a part by itself, as the plan says."""
        return self._is_told(part) and told_of(self.plan.shares.updates, self._name(part)) is None

    def _is_told(self, part: ParameterPart) -> bool:
        """Whether the plan says how the update of a part is shared."""
        return part.stop is None and is_told(self.plan.shares.updates, self._name(part))

    def _name(self, part: ParameterPart) -> str:
        return self.pipelines.program.parameter_names[part.leaf]

    def _part_spec(
        self, part: ParameterPart, shape: tuple[int, ...], mesh_shape: tuple[int, int]
    ) -> PartitionSpec:
        plan, name = self.plan, self._name(part)
        told = told_of(plan.parameters, name)
        if told is None:
            return parameter_spec(plan.sharding, shape, mesh_shape)
        spec = PartitionSpec(*told)
        if divides(spec, shape, mesh_shape):
            return spec
        if part not in self.held:
            return PartitionSpec(None, *told[1:])
        raise InputError(
            f"{self._field}.parameters[{name!r}] is {list(spec)}, which does not divide its "
            f"shape {shape} evenly on the mesh {list(mesh_shape)}"
        )


def proportional_sizes(total: int, weights: Sequence[int]) -> tuple[int, ...]:
    """Whole numbers that add up to a total, about in proportion to weights.

    Args:
        total: what they add up to.
        weights: 0 or more, not all 0.

    Example:
        >>> proportional_sizes(10, [2, 1]), proportional_sizes(1, [1, 3])
        ((7, 3), (0, 1))
    """
    ends = [round(total * end / sum(weights)) for end in itertools.accumulate(weights, initial=0)]
    return tuple(stop - start for start, stop in itertools.pairwise(ends))


def partial_sums(spec: PartitionSpec) -> PartitionSpec:
    """How partial sums along the data axis lie.

    Args:
        spec: how the whole sums would.

    Example:
        >>> partial_sums(PartitionSpec(None, "tensor"))
        P(None, 'tensor', unreduced={'data'})
    """
    return PartitionSpec(*spec.partitions, unreduced=frozenset({DATA}))
