"""The plan: how one training step is divided over a cluster, as data."""

from __future__ import annotations

import bisect
import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from hetjax.checked_files import read_json
from hetjax.errors import InputError, shown, unknown_name
from hetjax.file_content import LEFT_OUT_EMPTY, check_fields
from hetjax.files import replacing
from hetjax.limits import Index, Text
from hetjax.pipeline.program.traced_program import Program
from hetjax.pipeline.schedules.schedule import Schedule, check_tasks
from hetjax.pipeline.stages.cutting import cut, made_between
from hetjax.planner.plan.checks import check_pipeline
from hetjax.planner.plan.context_checks import check_context_for, check_contexts
from hetjax.planner.plan.parameter_names import leaf_name, parameters_meant
from hetjax.planner.plan.plan_file import PlannedCluster, checked_plan, plan_content
from hetjax.planner.plan.plan_text import plan_text
from hetjax.planner.plan.prediction import Prediction, StagePrediction
from hetjax.planner.plan.share_checks import check_module_runs, check_shares_for
from hetjax.planner.plan.stage_plan import PipelinePlan, StagePlan


@dataclass(frozen=True)
class Plan:
    """A whole plan, complete in itself: a file of it can be read, edited, compared and replayed.

    Args:
        planner: what made it.
        model: fingerprint of the program that it was made for.
        layers: positions in the program where layers begin, and the program's end.
        cluster: the cluster.
        pipelines: the pipelines.
        shard_optimizer_state: whether stages that hold the same parameters divide the optimizer's
            state among them (ZeRO-1 across pipelines); else each of them has all that belongs to
            what it holds, and a pipeline that is lost takes nothing with it.
        lost_devices: devices of the cluster that are gone, in its numbers and in order: a switch to
            this plan asks nothing of them.
        notes: what is to be known of it, in sentences.
        prediction: what the cost model expects of it, where one was asked.

    Example:
        >>> plan = Plan.load("plan.json")  # doctest: +SKIP
        >>> print(plan)  # doctest: +SKIP
        Plan on cluster home: 2 stages on 6 of 6 devices, 16 examples a step, made by hand
          4 microbatches of 4 examples, schedule h_1f1b
            stage 0: layers 0-4 on fast[0:2] 1x2, data 2, 1.2 GB of 16 GB
            stage 1: layers 5-9 on slow[0:4] 1x4, data 4, 1.1 GB of 16 GB
          predicted step time 412 ms, lower bound 380 ms
    """

    planner: Text = field(default="by hand", kw_only=True)
    model: Text
    layers: tuple[int, ...]
    cluster: PlannedCluster
    pipelines: tuple[PipelinePlan, ...]
    shard_optimizer_state: bool = field(default=False, kw_only=True)
    lost_devices: Annotated[tuple[Index, ...], LEFT_OUT_EMPTY] = field(default=(), kw_only=True)
    notes: Annotated[tuple[Text, ...], LEFT_OUT_EMPTY] = field(default=(), kw_only=True)
    prediction: Prediction | None = field(default=None, kw_only=True)

    @property
    def has_unions(self) -> bool:
        """Whether a stage has several members."""
        return any(len(stage.members) > 1 for stage in self.stages)

    @property
    def is_predictable(self) -> bool:
        """Whether the cost model knows all stages; see `StagePlan.is_predictable`."""
        return all(stage.is_predictable for stage in self.stages)

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
        return sum(pipeline.batch_size for pipeline in self.pipelines)

    def numbered_pipelines(self) -> Iterator[tuple[int, PipelinePlan]]:
        """The pipelines, each with the number of its first stage."""
        first = 0
        for pipeline in self.pipelines:
            yield first, pipeline
            first += len(pipeline.stages)

    def field_of(self, stage: int) -> str:
        """What errors call a stage.

        Args:
            stage: its number among those of all pipelines.

        Returns:
            Its field in the plan's file, such as ``"plan: pipelines[0].stages[1]"``.
        """
        starts = [first for first, _ in self.numbered_pipelines()]
        place = bisect.bisect_right(starts, stage) - 1
        return f"plan: pipelines[{place}].stages[{stage - starts[place]}]"

    def predicted_pipelines(
        self,
    ) -> Iterator[tuple[int, PipelinePlan, tuple[StagePrediction, ...]]]:
        """The pipelines of a plan that has a prediction, each with what its stages take.

        Yields:
            The number of its first stage, the pipeline, and the prediction of each of its stages.
        """
        stages = self.predicted.stages
        for first, pipeline in self.numbered_pipelines():
            yield first, pipeline, tuple(stages[first : first + len(pipeline.stages)])

    @property
    def predicted(self) -> Prediction:
        """The prediction of a plan that has one.

        Raises:
            InputError: it has none.
        """
        if self.prediction is None:
            raise InputError("the plan has no prediction; make one with hetjax.planner.predict")
        return self.prediction

    @property
    def sharing(self) -> tuple[tuple[int, ...], ...]:
        """The stages on each set of devices, counted over all pipelines: mostly one."""
        return tuple(
            tuple(first + stage for stage in group)
            for first, pipeline in self.numbered_pipelines()
            for group in pipeline.schedule.sharing
        )

    @property
    def leads(self) -> dict[int, int]:
        """For each stage the first one on its devices, mostly itself."""
        return {stage: group[0] for group in self.sharing for stage in group}

    @property
    def num_devices(self) -> int:
        """How many devices its stages are on."""
        return sum(pipeline.num_devices for pipeline in self.pipelines)

    @property
    def shares_context(self) -> bool:
        """Whether members of its stages share the tokens of sequences."""
        return any(pipeline.shares_context for pipeline in self.pipelines)

    def boundaries(self, pipeline: PipelinePlan) -> tuple[int, ...]:
        """The positions where a pipeline's stages begin, and the program's end."""
        return (*(self.layers[stage.layers[0]] for stage in pipeline.stages), self.layers[-1])

    def recompute_positions(self, stage: StagePlan) -> tuple[tuple[int, int], ...]:
        """The runs of positions that a stage makes again in its backward pass."""
        return tuple((self.layers[a], self.layers[b]) for a, b in stage.recompute_layers)

    def with_schedule(self, schedule: Schedule) -> Plan:
        """This plan with another schedule, and without a prediction."""
        pipeline = replace(self.pipeline, schedule=schedule)
        return replace(self, pipelines=(pipeline,), prediction=None)

    def with_stages(self, stages: Sequence[StagePlan]) -> Plan:
        """This plan with other stages, those of one pipeline after the other, and no prediction."""
        left = iter(stages)
        pipelines = (
            replace(pipeline, stages=tuple(next(left) for _ in pipeline.stages))
            for pipeline in self.pipelines
        )
        return replace(self, pipelines=tuple(pipelines), prediction=None)

    def __str__(self) -> str:
        parts = self.cluster, self.pipelines, self.planner, self.prediction
        return plan_text(*parts, self.lost_devices, self.notes)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """What IPython shows of a plan that a cell ends with; its `repr` would fill pages."""
        printer.text(str(self))

    def save(self, path: str | Path) -> None:
        """Write the plan to a JSON file, at once or not at all.

        Args:
            path: where to; an existing file is replaced.
        """
        with replacing(path) as temporary:
            temporary.write_text(json.dumps(self.to_json_dict(), indent=1) + "\n")

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
        content = read_json(path, f"plan file {str(path)!r}")
        try:
            return cls.from_json_dict(content)
        except InputError as error:
            raise InputError(f"{path}: {error}") from None

    def to_json_dict(self) -> dict[str, Any]:
        """The plan as plain JSON values, those of its file."""
        return plan_content(self)

    @classmethod
    def from_json_dict(cls, data: object) -> Plan:
        """Reads what `to_json_dict` wrote, or a person edited, and validates it.

        A prediction of other stages, as where somebody has added one, is left out.

        Args:
            data: the content, as `json` gives it.

        Returns:
            The plan.

        Raises:
            InputError: a field is missing, unknown, of the wrong type or impossible.
        """
        plan = checked_plan(cls, data)
        validate(plan)
        return replace(plan, prediction=None) if _is_of_others(plan) else plan


def _is_of_others(plan: Plan) -> bool:
    """Whether a plan's prediction is one of other stages, or of other members."""
    if plan.prediction is None:
        return False
    told = plan.prediction.stages
    return len(told) != len(plan.stages) or any(
        len(predicted.members) not in (0, len(stage.members))
        for predicted, stage in zip(told, plan.stages, strict=True)
    )


def as_plan(plan: Plan | str | os.PathLike[str]) -> Plan:
    """A plan, or the one that a file has.

    Args:
        plan: the plan, or the path of its file.

    Returns:
        The plan.

    Raises:
        InputError: it is neither, the file has no valid plan, or a field is of a wrong type.
    """
    if isinstance(plan, str | os.PathLike):
        return Plan.load(Path(plan))
    if not isinstance(plan, Plan):
        raise InputError(f"plan is {shown(plan)}; it must be a Plan, or the path of a plan file")
    _check_types(plan)
    return plan


def _check_types(plan: Plan) -> None:
    """Check that what a plan made in Python has is what its hints say."""
    try:
        check_fields(plan)
        for pipeline in plan.pipelines:
            check_tasks(pipeline.schedule)
    except InputError as error:
        raise InputError(f"plan: {error}") from None


def validate(plan: Plan) -> None:
    """Check a plan in itself: the types of its fields, layers, devices, meshes, schedules.

    Args:
        plan: the plan.

    Raises:
        InputError: naming the field, its value and what is allowed.
    """
    _check_types(plan)
    if not plan.pipelines:
        raise InputError("plan: pipelines is empty; a plan has one or more")
    _validate_layers(plan)
    seen: dict[int, str] = {}
    for p, pipeline in enumerate(plan.pipelines):
        where = f"plan: pipelines[{p}]"
        check_pipeline(pipeline, len(plan.layers) - 1, plan.cluster, where)
        check_contexts(pipeline, where)
        for s in (group[0] for group in pipeline.schedule.sharing):
            stage = pipeline.stages[s]
            for m, submesh in enumerate(stage.submeshes):
                place = f"pipelines[{p}].stages[{s}].members[{m}]"
                for device in plan.cluster.device_ids(submesh):
                    if device in seen:
                        raise InputError(
                            f"plan: {place}.submesh {submesh} has device {device}, which "
                            f"{seen[device]} has too; submeshes must not overlap, unless they are "
                            f"of stages of one pipeline and the same, and its schedule has turns "
                            f"of these stages"
                        )
                    seen[device] = place
    _validate_lost(plan, seen)


def _validate_lost(plan: Plan, used: Mapping[int, str]) -> None:
    """Check that lost devices are devices of the cluster, and that no stage has one."""
    lost, count = plan.lost_devices, plan.cluster.num_devices
    if list(lost) != sorted(set(lost)):
        raise InputError(
            f"plan: lost_devices is {list(lost)}; it has each device once, in increasing order"
        )
    for device in lost:
        if device >= count:
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
            f"the plan computes {plan.batch_size} examples a step, and the batch has "
            f"{batch_size}; make them equal"
        )
    shapes = [program.avals[value] for value in program.parameters]
    meant = dict(zip(map(leaf_name, program.parameter_names), shapes, strict=True))
    meant |= dict(zip(program.parameter_names, shapes, strict=True))
    for p, pipeline in enumerate(plan.pipelines):
        for s, stage in enumerate(pipeline.stages):
            where = f"plan: pipelines[{p}].stages[{s}]"
            for name, spec in stage.parameters.items():
                if name not in meant:
                    what = f"{where}.parameters: parameter"
                    raise InputError(unknown_name(what, name, meant))
                shape = meant[name].shape
                if len(spec) > len(shape):
                    raise InputError(
                        f"{where}.parameters[{name!r}] is {list(spec)}, of more dimensions than "
                        f"the parameter's shape {shape}"
                    )
            _validate_values(plan, stage, program, f"{where}.values")
            _check_made(plan, stage, stage.shares.values, program, f"{where}.shares.values")
            check_shares_for(stage, pipeline.microbatch_size, program, where)
            check_context_for(stage, program, where)
            first, end = (plan.layers[layer] for layer in stage.layers)
            check_module_runs(stage, (first, end), f"{where}.shares")
            _check_held(plan, pipeline, s, program, f"{where}.shares.parameters")


def _check_held(
    plan: Plan, pipeline: PipelinePlan, place: int, program: Program, where: str
) -> None:
    """Check that a stage uses the parameters whose shares it is told."""
    stage = pipeline.stages[place]
    if not stage.shares.parameters:
        return
    parts = cut(program, plan.boundaries(pipeline))[place].parameters
    held = [program.parameter_names[part.leaf] for part in parts]
    for name in stage.shares.parameters:
        if not parameters_meant(name, held):
            raise InputError(
                f"{where} has {name!r}, which layers {stage.layers[0]} to {stage.layers[1] - 1} "
                f"do not use; allowed: {', '.join(held)}"
            )


def _check_made(
    plan: Plan, stage: StagePlan, values: Collection[int], program: Program, where: str
) -> None:
    """Check that a stage makes the values that it is told of."""
    if not values:
        return
    first, end = (plan.layers[layer] for layer in stage.layers)
    made = made_between(program, first, end)
    for value in values:
        if value not in made:
            raise InputError(
                f"{where} has {value}, which is no value that layers {stage.layers[0]} to "
                f"{stage.layers[1] - 1} make"
            )


def _validate_values(plan: Plan, stage: StagePlan, program: Program, where: str) -> None:
    """Check that a stage makes the values that it is told of, and that they have the dimensions."""
    _check_made(plan, stage, stage.values, program, where)
    for value, spec in stage.values.items():
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
