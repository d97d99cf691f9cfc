"""Stages and pipelines of a plan, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field

from hetjax.file_content import LAST, LEFT_OUT_EMPTY
from hetjax.limits import MAX_BATCH, MAX_MICROBATCHES, Index, Name, Text
from hetjax.mesh.cluster import SubMesh
from hetjax.planner.plan.plan_file import PlannedSchedule
from hetjax.sharding.annotation.rules import MESH_AXES

Spec = tuple[Name | None, ...]
"""A `PartitionSpec` as plain data: for each dimension the mesh axis that divides it, or None."""


@dataclass(frozen=True)
class StagePlan:
    """One stage: which layers run where, and how.

    Args:
        layers: first layer, and the one after the last.
        submesh: the devices.
        mesh_shape: their logical mesh: sizes of the ``data`` and the ``tensor`` axis.
        sharding: the rule that divides its arrays, one of `hetjax.sharding.RULES`.
        parameters: specifications that override the rule, by parameter path.
        values: specifications of values that the stage makes, by their number in the program; how
            the others lie is the compiler's choice.
        recompute: whether forward steps run again in the backward pass instead of keeping what they
            made.
    """

    layers: tuple[int, int]
    submesh: SubMesh
    mesh_shape: tuple[int, int]
    sharding: Name = "data"
    parameters: Mapping[Text, Spec] = field(default_factory=dict)
    recompute: bool = False
    values: Annotated[Mapping[Index, Spec], LEFT_OUT_EMPTY] = field(default_factory=dict)

    @property
    def sharding_text(self) -> str:
        """How its arrays are divided over its devices, and whether it recomputes, for people.

        Example:
            >>> StagePlan((0, 2), SubMesh("fast", 0, (1, 4)), (2, 2), recompute=True).sharding_text
            'data 2 x tensor 2, recompute'
        """
        axes = zip(MESH_AXES, self.mesh_shape, strict=True)
        divided = " x ".join(f"{axis} {size}" for axis, size in axes if size > 1) or "one device"
        rule = "" if self.sharding == "data" else f", {self.sharding.replace('_', ' ')}"
        return divided + rule + (", recompute" if self.recompute else "")


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
    def batch_size(self) -> int:
        """Examples that it computes in a step."""
        return self.num_microbatches * self.microbatch_size
