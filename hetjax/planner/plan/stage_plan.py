"""Stages and pipelines of a plan, as data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from hetjax.errors import InputError
from hetjax.file_content import LAST, LEFT_OUT_EMPTY
from hetjax.limits import MAX_BATCH, MAX_MICROBATCHES, Index, Name, Text
from hetjax.mesh.cluster import Cluster, SubMesh
from hetjax.planner.plan.module_shares import ModuleShares, OperandShare, Share
from hetjax.planner.plan.plan_file import PlannedSchedule
from hetjax.sharding.annotation.rules import MESH_AXES
from hetjax.sharding.context.context_split import ContextSplit

Offloaded = Literal["optimizer_state", "activations"]
"""What a stage may keep in its hosts' memory while its devices do not work on it."""

Spec = tuple[Name | None, ...]
"""A `PartitionSpec` as plain data: for each dimension the mesh axis that divides it, or None."""


@dataclass(frozen=True)
class Member:
    """One submesh of a stage.

    Args:
        submesh: the devices.
        mesh_shape: their logical mesh: sizes of the ``data`` and the ``tensor`` axis.
    """

    submesh: SubMesh
    mesh_shape: tuple[int, int]

    @property
    def axes_text(self) -> str:
        """How arrays are divided over its devices, for people.

        Example:
            >>> Member(SubMesh("fast", 0, (1, 4)), (2, 2)).axes_text
            'data 2 x tensor 2'
        """
        axes = zip(MESH_AXES, self.mesh_shape, strict=True)
        return " x ".join(f"{axis} {size}" for axis, size in axes if size > 1) or "one device"


@dataclass(frozen=True)
class Shares:
    """What members of a stage are told of how values lie among them.

    The rest is deduced; what nothing is told or deduced of is the same on each member.

    Args:
        batch: how many examples of a microbatch each member computes; where empty, every member
            computes all of them.
        parameters: how parameters lie, by their path; sizes are of the whole parameter, and where a
            stage has some of its rows, each member has those of its own.
        values: how values lie that the stage makes, by their number in the program.
        updates: how the update is shared of parameters that every member has whole, by their path;
            None where every member makes all of it. What is not told of is shared as the examples
            are; where members share the context, as their devices have memory.
        modules: the moves inside the stage's modules; where given, they are all of the stage.
        context: which tokens of a sequence and which heads of its attentions each member has; its
            devices are the members' places.

    Example:
        >>> bool(Shares()), bool(Shares(batch=(6, 2)))
        (False, True)
    """

    batch: Annotated[tuple[Index, ...], LEFT_OUT_EMPTY] = ()
    parameters: Annotated[Mapping[Text, Share], LEFT_OUT_EMPTY] = field(default_factory=dict)
    values: Annotated[Mapping[Index, Share], LEFT_OUT_EMPTY] = field(default_factory=dict)
    updates: Annotated[Mapping[Text, Share | None], LEFT_OUT_EMPTY] = field(default_factory=dict)
    modules: Annotated[tuple[ModuleShares, ...], LEFT_OUT_EMPTY] = ()
    context: Annotated[ContextSplit | None, LEFT_OUT_EMPTY] = None

    def __bool__(self) -> bool:
        return self != Shares()

    @property
    def module_runs(self) -> list[tuple[tuple[int, int], tuple[OperandShare, ...]]]:
        """The positions of each module, in order, with its operands that are moved."""
        return sorted(
            ((run, module.operands) for module in self.modules for run in module.runs),
            key=lambda pair: pair[0],
        )

    @property
    def module_edges(self) -> list[int]:
        """The positions where the stage's modules begin, and its end; none where none are told.

        Example:
            >>> Shares(modules=(ModuleShares(((4, 9),)), ModuleShares(((0, 4),)))).module_edges
            [0, 4, 9]
        """
        runs = [run for run, _ in self.module_runs]
        return [*(start for start, _ in runs), *(stop for _, stop in runs[-1:])]


@dataclass(frozen=True)
class StagePlan:
    """One stage: which layers run where, and how.

    Args:
        layers: first layer, and the one after the last.
        members: the submeshes that compute it together, with their logical meshes; mostly one.
        sharding: the rule that divides its arrays inside a member, one of `hetjax.sharding.RULES`.
        parameters: specifications that override the rule, by parameter path.
        recompute: whether forward steps run again in the backward pass instead of keeping what they
            made.
        values: specifications of values that the stage makes, by their number in the program; how
            the others lie is the compiler's choice.
        shares: how values lie among its members, where it has several.
        recompute_layers: runs of its layers, each the first and the one after the last, that keep
            only what goes in; each is computed again right before its own backward pass, where
            `recompute` makes all of the stage again before the first.
        offload: what is kept in the memory of the devices' hosts, and comes to the devices when
            they work on it.

    Example:
        >>> members = (
        ...     Member(SubMesh("fast", 0, (1, 2)), (2, 1)),
        ...     Member(SubMesh("slow", 0, (1, 1)), (1, 1)),
        ... )
        >>> stage = StagePlan((0, 3), members, shares=Shares(batch=(6, 2)))
        >>> stage.num_devices
        3
        >>> stage.submesh
        Traceback (most recent call last):
        hetjax.errors.InputError: the stage of layers 0-2 has 2 members, fast[0:2] 1x2 + \
slow[0:1] 1x1; this works on stages of one
    """

    layers: tuple[int, int]
    members: tuple[Member, ...]
    sharding: Name = "data"
    parameters: Mapping[Text, Spec] = field(default_factory=dict)
    recompute: bool = False
    values: Annotated[Mapping[Index, Spec], LEFT_OUT_EMPTY] = field(default_factory=dict)
    shares: Annotated[Shares, LEFT_OUT_EMPTY] = field(default_factory=Shares)
    recompute_layers: Annotated[tuple[tuple[Index, Index], ...], LEFT_OUT_EMPTY] = ()
    offload: Annotated[tuple[Offloaded, ...], LEFT_OUT_EMPTY] = ()

    @classmethod
    def on(
        cls,
        layers: tuple[int, int],
        submesh: SubMesh,
        mesh_shape: tuple[int, int],
        sharding: str = "data",
        parameters: Mapping[str, Spec] | None = None,
        recompute: bool = False,
        values: Mapping[int, Spec] | None = None,
    ) -> StagePlan:
        """A stage of one member.

        Args:
            layers: first layer, and the one after the last.
            submesh: the devices.
            mesh_shape: their logical mesh: sizes of the ``data`` and the ``tensor`` axis.
            sharding: the rule that divides its arrays, one of `hetjax.sharding.RULES`.
            parameters: specifications that override the rule, by parameter path.
            recompute: whether forward steps run again in the backward pass.
            values: specifications of values that the stage makes, by their number in the program.

        Returns:
            The stage.

        Example:
            >>> StagePlan.on((0, 2), SubMesh("fast", 0, (1, 4)), (2, 2)).mesh_shape
            (2, 2)
        """
        member = Member(submesh, mesh_shape)
        return cls(layers, (member,), sharding, parameters or {}, recompute, values or {})

    @property
    def submesh(self) -> SubMesh:
        """The submesh of a stage of one member.

        Raises:
            InputError: the stage has several.
        """
        return self._only_member.submesh

    @property
    def mesh_shape(self) -> tuple[int, int]:
        """The logical mesh of a stage of one member.

        Raises:
            InputError: the stage has several.
        """
        return self._only_member.mesh_shape

    @property
    def submeshes(self) -> tuple[SubMesh, ...]:
        """The submeshes of its members."""
        return tuple(member.submesh for member in self.members)

    @property
    def num_devices(self) -> int:
        """How many devices its members have together."""
        return sum(submesh.num_devices for submesh in self.submeshes)

    def device_ids(self, cluster: Cluster) -> tuple[int, ...]:
        """The number, over the whole cluster, of each of its devices, member by member.

        Args:
            cluster: the cluster.

        Returns:
            The numbers.

        Raises:
            InputError: a submesh is not in the cluster.
        """
        return tuple(d for submesh in self.submeshes for d in cluster.device_ids(submesh))

    @property
    def devices_text(self) -> str:
        """Its submeshes, for people.

        Example:
            >>> StagePlan.on((0, 2), SubMesh("fast", 0, (1, 4)), (2, 2)).devices_text
            'fast[0:4] 1x4'
        """
        return " + ".join(map(str, self.submeshes))

    @property
    def subclusters_text(self) -> str:
        """The names of the subclusters of its devices, for people.

        Example:
            >>> StagePlan.on((0, 2), SubMesh("fast", 0, (1, 4)), (2, 2)).subclusters_text
            'fast'
        """
        return " + ".join(dict.fromkeys(submesh.subcluster for submesh in self.submeshes))

    @property
    def sharding_text(self) -> str:
        """How its arrays are divided over its devices, and whether it recomputes, for people.

        Example:
            >>> submesh = SubMesh("fast", 0, (1, 4))
            >>> StagePlan.on((0, 2), submesh, (2, 2), recompute=True).sharding_text
            'data 2 x tensor 2, recompute'
        """
        axes = " + ".join(member.axes_text for member in self.members)
        if self.shares.context is not None and self.num_devices == len(self.members) > 1:
            return ", ".join((*self._shares_text, *self.rule_words))
        return ", ".join((axes, *self._shares_text, *self.rule_words))

    @property
    def repeats(self) -> Literal["nothing", "stage", "layers"]:
        """What forward steps run again in the backward pass."""
        if self.recompute:
            return "stage"
        return "layers" if self.recompute_layers else "nothing"

    @property
    def is_predictable(self) -> bool:
        """Whether the cost model knows it.

        It has one member, or they share the examples alone or the context alone, or it is told of
        its modules.
        """
        shares = self.shares
        if len(self.members) == 1 or shares.modules:
            return True
        alone = (Shares(batch=shares.batch), Shares(context=shares.context))
        return bool(shares) and shares in alone

    @property
    def members_share_context(self) -> bool:
        """Whether it has several members, which share one sequence."""
        return self.shares.context is not None and len(self.members) > 1

    @property
    def rule_words(self) -> tuple[str, ...]:
        """What is to be said of its rule, recomputation and offload; mostly nothing."""
        rule = () if self.sharding == "data" else (self.sharding.replace("_", " "),)
        again = ("recompute",) if self.recompute else self._recompute_words
        return (*rule, *again, *(f"offload {each.replace('_', ' ')}" for each in self.offload))

    @property
    def _recompute_words(self) -> tuple[str, ...]:
        count = sum(end - first for first, end in self.recompute_layers)
        return (f"recompute {count} of {self.layers[1] - self.layers[0]}",) if count else ()

    @property
    def _shares_text(self) -> tuple[str, ...]:
        batch, modules = self.shares.batch, self.shares.modules
        examples = (f"{' + '.join(map(str, batch))} examples",) if batch else ()
        if self.shares.context is not None and len(self.members) > 1:
            return (*examples, *_context_words(self.shares.context))
        return (*examples, "tensor by tensor") if modules else examples

    @property
    def _only_member(self) -> Member:
        if len(self.members) != 1:
            first, end = self.layers
            raise InputError(
                f"the stage of layers {first}-{end - 1} has {len(self.members)} members, "
                f"{self.devices_text}; this works on stages of one"
            )
        return self.members[0]


def _context_words(split: ContextSplit) -> tuple[str, str]:
    """Which tokens and heads members have, group by group.

    Example:
        >>> from hetjax.sharding.context import ContextGroup
        >>> fast = ContextGroup((0, 1), (3, 2), ((0, 4), (4, 8)))
        >>> slow = ContextGroup((2,), (3,), ((0, 8),))
        >>> _context_words(ContextSplit(8, 8, 2, (fast, slow)))
        ('(3 + 2) + 3 tokens', '(4 + 4) + 8 heads')
    """
    counts = [group.head_counts for group in split.groups]
    tokens = _sum_words([group.tokens for group in split.groups])
    return f"{tokens} tokens", f"{_sum_words(counts)} heads"


def _sum_words(groups: Sequence[Sequence[int]]) -> str:
    words = [" + ".join(map(str, group)) for group in groups]
    if len(groups) == 1:
        return words[0]
    pairs = zip(words, groups, strict=True)
    return " + ".join(each if len(group) == 1 else f"({each})" for each, group in pairs)


@dataclass(frozen=True)
class PipelinePlan:
    """An ordered list of stages that together hold the whole model.

    Args:
        stages: the stages.
        num_microbatches: how many microbatches it computes in a step.
        microbatch_size: examples in each.
        schedule: the order of tasks on every stage.
    """

    stages: Annotated[tuple[StagePlan, ...], LAST]
    num_microbatches: Annotated[int, Field(le=MAX_MICROBATCHES)]
    microbatch_size: Annotated[int, Field(le=MAX_BATCH)]
    schedule: PlannedSchedule

    @property
    def num_devices(self) -> int:
        """How many devices its stages are on."""
        return sum(self.stages[group[0]].num_devices for group in self.schedule.sharing)

    @property
    def shares_context(self) -> bool:
        """Whether members of its stages share the tokens of sequences."""
        return any(stage.shares.context is not None for stage in self.stages)

    @property
    def batch_size(self) -> int:
        """Examples that it computes in a step."""
        return self.num_microbatches * self.microbatch_size
