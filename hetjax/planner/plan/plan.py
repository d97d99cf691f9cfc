"""The plan: how one training step is divided over a cluster, as data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hetjax.errors import InputError, unknown_name
from hetjax.mesh.cluster import Cluster, SubMesh
from hetjax.pipeline.program.traced_program import Program
from hetjax.pipeline.schedules.schedule import Schedule, check
from hetjax.pipeline.stages.cutting import made_between
from hetjax.pipeline.timeline.times import StepTimes
from hetjax.sharding.annotation.rules import MESH_AXES, RULES

VERSION = 1

Spec = tuple[str | None, ...]
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
    sharding: str = "data"
    parameters: Mapping[str, Spec] = field(default_factory=dict)
    recompute: bool = False
    values: Mapping[int, Spec] = field(default_factory=dict)

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

    stages: tuple[StagePlan, ...]
    num_microbatches: int
    microbatch_size: int
    schedule: Schedule


@dataclass(frozen=True)
class StagePrediction:
    """What the cost model expects of a stage; times in seconds, of one microbatch.

    Args:
        forward_seconds: the forward pass.
        backward_seconds: the whole backward pass, without recomputation.
        recompute_seconds: the recomputation; 0 where nothing is recomputed.
        input_gradient_seconds: the first half of a split backward pass.
        weight_gradient_seconds: its second half.
        update_seconds: the optimizer's update, once a step.
        sharing_seconds: exchanging what other stages hold too, before it: gradients of parameters
            that are used in several stages or held by several pipelines, and their new values.
        communication_seconds: sending one microbatch's activations to the next stage (Harp's c_i).
        return_seconds: sending their gradients back.
        state_bytes: parameters, gradients and optimizer state on one device.
        working_bytes: what a task needs while it runs, on one device.
        activation_bytes: what one microbatch keeps for its backward pass, on one device.
        recomputed_bytes: what a recomputation adds to that until the backward pass.
        deferred_bytes: what one microbatch keeps between the halves of its backward pass.
        memory_bytes: all of that at the schedule's fullest moment, on one device.
        memory_limit_bytes: what one device has.
        bubble: share of the step in which the stage computes nothing.
    """

    forward_seconds: float
    backward_seconds: float
    recompute_seconds: float
    input_gradient_seconds: float
    weight_gradient_seconds: float
    update_seconds: float
    communication_seconds: float
    return_seconds: float
    state_bytes: int
    working_bytes: int
    activation_bytes: int
    recomputed_bytes: int
    deferred_bytes: int
    memory_bytes: int
    memory_limit_bytes: int
    bubble: float
    sharing_seconds: float = 0.0

    @property
    def compute_seconds(self) -> float:
        """All that the stage computes for one microbatch (Harp's t_i)."""
        return self.forward_seconds + self.recompute_seconds + self.backward_seconds

    @property
    def fits(self) -> bool:
        """Whether a device has the memory that the stage needs."""
        return self.memory_bytes <= self.memory_limit_bytes


@dataclass(frozen=True)
class Prediction:
    """What the cost model expects of a plan.

    Args:
        step_time: seconds a step.
        lower_bound: seconds that no schedule of these stages can go below.
        stages: each stage, those of one pipeline after those of the other.
    """

    step_time: float
    lower_bound: float
    stages: tuple[StagePrediction, ...]

    @property
    def sharing_seconds(self) -> float:
        """Seconds of the step in which stages exchange what several of them hold."""
        return max((stage.sharing_seconds for stage in self.stages), default=0.0)

    @property
    def times(self) -> StepTimes:
        """The times of the step's tasks and transfers, of a plan of one pipeline."""
        return times_of(self.stages)


def times_of(stages: Sequence[StagePrediction]) -> StepTimes:
    """The times of one pipeline's tasks and transfers.

    Args:
        stages: what is predicted of its stages.

    Returns:
        The times.
    """
    return StepTimes(
        forward=[stage.forward_seconds for stage in stages],
        backward=[stage.backward_seconds for stage in stages],
        sends=[stage.communication_seconds for stage in stages[:-1]],
        returns=[stage.return_seconds for stage in stages[1:]],
        update=[stage.update_seconds for stage in stages],
        input_gradient=[stage.input_gradient_seconds for stage in stages],
        weight_gradient=[stage.weight_gradient_seconds for stage in stages],
        recompute=[stage.recompute_seconds for stage in stages],
    )


@dataclass(frozen=True)
class Plan:
    """A whole plan, complete in itself: a file of it can be read, edited, compared and replayed.

    Args:
        model: fingerprint of the program that it was made for.
        layers: positions in the program where layers begin, and the program's end.
        cluster: the cluster.
        pipelines: the pipelines.
        planner: what made it.
        prediction: what the cost model expects of it, where one was asked.
        shard_optimizer_state: whether stages that hold the same parameters divide the optimizer's
            state among them (ZeRO-1 across pipelines); else each of them has all that belongs to
            what it holds, and a pipeline that is lost takes nothing with it.
        lost_devices: devices of the cluster that are gone, in its numbers and in order: a switch to
            this plan asks nothing of them.

    Example:
        >>> plan = Plan.load("plan.json")  # doctest: +SKIP
        >>> print(plan)  # doctest: +SKIP
        Plan on cluster home: 2 stages on 6 of 6 devices, 16 examples a step, made by hand
          4 microbatches of 4 examples, schedule h_1f1b
            stage 0: layers 0-4 on fast[0:2] 1x2, data 2, 1.2 GB of 16 GB
            stage 1: layers 5-9 on slow[0:4] 1x4, data 4, 1.1 GB of 16 GB
          predicted step time 412 ms, lower bound 380 ms
    """

    model: str
    layers: tuple[int, ...]
    cluster: Cluster
    pipelines: tuple[PipelinePlan, ...]
    planner: str = "by hand"
    prediction: Prediction | None = None
    shard_optimizer_state: bool = False
    lost_devices: tuple[int, ...] = ()

    @property
    def pipeline(self) -> PipelinePlan:
        """The one pipeline of a plan that has one.

        Raises:
            InputError: the plan has several.
        """
        if len(self.pipelines) != 1:
            raise InputError(
                f"the plan has {len(self.pipelines)} pipelines, each with a schedule of its own; "
                f"this works on plans of one"
            )
        return self.pipelines[0]

    @property
    def stages(self) -> tuple[StagePlan, ...]:
        """The stages of all pipelines, one pipeline after the other."""
        return tuple(stage for pipeline in self.pipelines for stage in pipeline.stages)

    @property
    def batch_size(self) -> int:
        """Examples in one step, over all pipelines."""
        return sum(p.num_microbatches * p.microbatch_size for p in self.pipelines)

    def numbered_pipelines(self) -> Iterator[tuple[int, PipelinePlan]]:
        """The pipelines, each with the number of its first stage."""
        first = 0
        for pipeline in self.pipelines:
            yield first, pipeline
            first += len(pipeline.stages)

    def boundaries(self, pipeline: PipelinePlan) -> tuple[int, ...]:
        """The positions where a pipeline's stages begin, and the program's end."""
        return (*(self.layers[stage.layers[0]] for stage in pipeline.stages), self.layers[-1])

    def with_schedule(self, schedule: Schedule) -> Plan:
        """This plan with another schedule, and without a prediction."""
        pipeline = replace(self.pipeline, schedule=schedule)
        return replace(self, pipelines=(pipeline,), prediction=None)

    def __str__(self) -> str:
        from hetjax.planner.plan.plan_text import plan_text

        return plan_text(self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """What IPython shows of a plan that a cell ends with; its `repr` would fill pages."""
        printer.text(str(self))

    def save(self, path: str | Path) -> None:
        """Write the plan to a JSON file, at once or not at all."""
        from hetjax.planner.plan.plan_file import save_plan

        save_plan(self, path)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan from a JSON file and validate it.

        Args:
            path: the file.

        Returns:
            The plan.

        Raises:
            InputError: the file is not there or not a valid plan; the message names the field.
        """
        from hetjax.planner.plan.plan_file import load_plan

        return load_plan(path)


def validate(plan: Plan) -> None:
    """Check a plan in itself: layers, devices, meshes, schedules.

    Args:
        plan: the plan.

    Raises:
        InputError: naming the field, its value and what is allowed.
    """
    if not plan.pipelines:
        raise InputError("plan: pipelines is empty; a plan has one or more")
    _validate_layers(plan)
    seen: dict[int, str] = {}
    for p, pipeline in enumerate(plan.pipelines):
        where = f"plan: pipelines[{p}]"
        _validate_coverage(pipeline, len(plan.layers) - 1, where)
        for s, stage in enumerate(pipeline.stages):
            _validate_stage(stage, plan.cluster, f"{where}.stages[{s}]")
            for device in plan.cluster.device_ids(stage.submesh):
                if device in seen:
                    raise InputError(
                        f"{where}.stages[{s}].submesh {stage.submesh} has device {device}, which "
                        f"{seen[device]} has too; submeshes must not overlap"
                    )
                seen[device] = f"pipelines[{p}].stages[{s}]"
        _validate_batch(pipeline, where)
    _validate_lost(plan, seen)


def _validate_lost(plan: Plan, used: Mapping[int, str]) -> None:
    """Check that lost devices are devices of the cluster, and that no stage has one."""
    lost, count = plan.lost_devices, plan.cluster.num_devices
    if list(lost) != sorted(set(lost)):
        raise InputError(
            f"plan: lost_devices is {list(lost)}; it has each device once, in increasing order"
        )
    for device in lost:
        if not 0 <= device < count:
            raise InputError(
                f"plan: lost_devices has {device}, which is no device of cluster "
                f"{plan.cluster.name!r}; allowed: 0 to {count - 1}"
            )
        if device in used:
            raise InputError(
                f"plan: lost_devices has {device}, which {used[device]} has; allowed: devices that "
                f"no stage has"
            )


def validate_for(plan: Plan, program: Program, batch_size: int | None = None) -> None:
    """Check that a plan fits a program.

    Args:
        plan: the plan.
        program: the traced loss function.
        batch_size: examples in a step, where the caller has fixed them.

    Raises:
        InputError: the plan was made for another model or batch.
    """
    if plan.model != program.fingerprint or plan.layers[-1] != program.num_positions:
        raise InputError(
            f"the plan was made for another model: its fingerprint is {plan.model!r} with "
            f"{plan.layers[-1]} positions, this model's is {program.fingerprint!r} with "
            f"{program.num_positions}; plan again"
        )
    if batch_size is not None and plan.batch_size != batch_size:
        raise InputError(
            f"the plan computes {plan.batch_size} examples a step, the configuration asks for "
            f"batch_size = {batch_size}; make them equal"
        )
    names = set(program.parameter_names)
    for pipeline in plan.pipelines:
        for s, stage in enumerate(pipeline.stages):
            for name, spec in stage.parameters.items():
                if name not in names:
                    what = f"plan: stages[{s}].parameters: parameter"
                    raise InputError(unknown_name(what, name, names))
                shape = program.avals[program.parameters[program.parameter_names.index(name)]].shape
                if len(spec) > len(shape):
                    raise InputError(
                        f"plan: stages[{s}].parameters[{name!r}] is {list(spec)}, of more "
                        f"dimensions than the parameter's shape {shape}"
                    )
            _validate_values(plan, stage, program, f"plan: stages[{s}].values")


def _validate_values(plan: Plan, stage: StagePlan, program: Program, where: str) -> None:
    """Check that a stage makes the values that it is told of."""
    if not stage.values:
        return
    first, end = (plan.layers[layer] for layer in stage.layers)
    made = made_between(program, first, end)
    for value, spec in stage.values.items():
        if value not in made:
            raise InputError(
                f"{where} has {value}, which is no value that layers {stage.layers[0]} to "
                f"{stage.layers[1] - 1} make"
            )
        shape = program.avals[value].shape
        if len(spec) > len(shape):
            raise InputError(
                f"{where}[{value}] is {list(spec)}, of more dimensions than the value's shape "
                f"{shape}"
            )


def _validate_layers(plan: Plan) -> None:
    layers = plan.layers
    if len(layers) < 2 or layers[0] != 0 or list(layers) != sorted(set(layers)):
        raise InputError(
            f"plan: layers is {list(layers)}; it must begin with 0 and increase: the positions "
            f"where layers begin, and the program's end"
        )


def _validate_coverage(pipeline: PipelinePlan, num_layers: int, where: str) -> None:
    if not pipeline.stages:
        raise InputError(f"{where}.stages is empty; a pipeline has one or more")
    expected = 0
    for s, stage in enumerate(pipeline.stages):
        first, end = stage.layers
        field_name = f"{where}.stages[{s}].layers is [{first}, {end}]"
        if first < expected:
            raise InputError(
                f"{field_name}; it overlaps the stage before, which ends at {expected}"
            )
        if first > expected:
            raise InputError(f"{field_name}; layers {expected} to {first - 1} are in no stage")
        if end <= first:
            raise InputError(f"{field_name}; a stage has one layer or more")
        expected = end
    if expected != num_layers:
        raise InputError(
            f"{where}: the last stage ends at layer {expected}, the model has {num_layers} layers"
        )


def _validate_batch(pipeline: PipelinePlan, where: str) -> None:
    for name in ("num_microbatches", "microbatch_size"):
        if getattr(pipeline, name) < 1:
            raise InputError(f"{where}.{name} is {getattr(pipeline, name)}; it must be 1 or more")
    schedule = pipeline.schedule
    if schedule.num_stages != len(pipeline.stages):
        raise InputError(
            f"{where}.schedule has {schedule.num_stages} stages, the pipeline has "
            f"{len(pipeline.stages)}"
        )
    if schedule.num_microbatches != pipeline.num_microbatches:
        raise InputError(
            f"{where}.schedule has {schedule.num_microbatches} microbatches, num_microbatches is "
            f"{pipeline.num_microbatches}"
        )
    check(schedule)
    for s, (stage, tasks) in enumerate(zip(pipeline.stages, schedule.order, strict=True)):
        again = next((task for task in tasks if task.kind == "R"), None)
        if again is not None and not stage.recompute:
            raise InputError(
                f"{where}.schedule has task {again} on stage {s}, which does not recompute; remove "
                f"it, or set stages[{s}].recompute to true"
            )
    for s, stage in enumerate(pipeline.stages):
        if pipeline.microbatch_size % stage.mesh_shape[0]:
            raise InputError(
                f"{where}.microbatch_size is {pipeline.microbatch_size}, which the data axis of "
                f"stages[{s}].mesh_shape {list(stage.mesh_shape)} does not divide"
            )


def _validate_stage(stage: StagePlan, cluster: Cluster, where: str) -> None:
    try:
        cluster.check_submesh(stage.submesh)
    except InputError as error:
        raise InputError(f"{where}.submesh: {error}") from None
    data, tensor = stage.mesh_shape
    if data < 1 or tensor < 1 or data * tensor != stage.submesh.num_devices:
        raise InputError(
            f"{where}.mesh_shape is {list(stage.mesh_shape)}; its product must be the number of "
            f"devices of the submesh, {stage.submesh.num_devices}"
        )
    if stage.sharding not in RULES:
        raise InputError(unknown_name(f"{where}.sharding", stage.sharding, RULES))
    for name, spec in stage.parameters.items():
        _validate_spec(spec, f"{where}.parameters[{name!r}]")
    for value, spec in stage.values.items():
        _validate_spec(spec, f"{where}.values[{value}]")


def _validate_spec(spec: Spec, where: str) -> None:
    for axis in spec:
        if axis is not None and axis not in MESH_AXES:
            raise InputError(unknown_name(where, axis, MESH_AXES))
    used = [axis for axis in spec if axis is not None]
    if len(used) > len(set(used)):
        raise InputError(f"{where} is {list(spec)}; an axis may divide one dimension")
