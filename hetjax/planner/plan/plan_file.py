"""Plan files: JSON that a person can read and edit, validated field by field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from hetjax.checked_files import Record, first_problem, read_json
from hetjax.errors import InputError, unknown_name
from hetjax.files import replacing
from hetjax.limits import MAX_BATCH, MAX_MICROBATCHES, Name, Text
from hetjax.mesh.cluster import Cluster, SubMesh
from hetjax.pipeline.schedules.schedule import (
    EXPLICIT,
    SCHEDULES,
    WARM_UP_SCHEDULES,
    Schedule,
    Task,
)
from hetjax.pipeline.schedules.warm_up import from_warm_up_counts
from hetjax.planner.plan.plan import (
    VERSION,
    PipelinePlan,
    Plan,
    Prediction,
    StagePlan,
    StagePrediction,
    validate,
)

Count = Annotated[int, Field(ge=0, lt=2**63)]
Pair = Annotated[tuple[int, int], Field(strict=False)]
SpecRecord = list[Name | None]


class _SubMesh(Record):
    subcluster: Name
    start: Count
    shape: Pair


class _Stage(Record):
    layers: Pair
    submesh: _SubMesh
    mesh_shape: Pair
    sharding: Name = "data"
    parameters: dict[Text, SpecRecord] = Field(default={})
    recompute: bool = False
    values: dict[Annotated[int, Field(ge=0, lt=2**63, strict=False)], SpecRecord] = Field(
        default={}
    )


class _Schedule(Record):
    name: Name
    warm_up_counts: list[Annotated[int, Field(lt=2**63)]] | None = None
    order: list[list[Name]] | None = None


class _Pipeline(Record):
    num_microbatches: Annotated[int, Field(le=MAX_MICROBATCHES)]
    microbatch_size: Annotated[int, Field(le=MAX_BATCH)]
    schedule: _Schedule
    stages: list[_Stage]


class _StagePrediction(Record):
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
    sharing_seconds: float | None = None


class _Prediction(Record):
    step_time: float
    lower_bound: float
    sharing_seconds: float = 0.0
    stages: list[_StagePrediction]


class _Plan(Record):
    version: Literal[1]
    planner: Text = "by hand"
    model: Text
    layers: list[int]
    cluster: dict[str, Any]
    pipelines: list[_Pipeline]
    shard_optimizer_state: bool = False
    lost_devices: list[Count] = Field(default=[])
    prediction: _Prediction | None = None


def save_plan(plan: Plan, path: str | Path) -> None:
    """Write a plan to a JSON file, at once or not at all.

    Args:
        plan: the plan.
        path: where to; an existing file is replaced.
    """
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(plan_to_json(plan), indent=1) + "\n")


def load_plan(path: str | Path) -> Plan:
    """Read a plan from a JSON file and validate it.

    Args:
        path: the file.

    Returns:
        The plan.

    Raises:
        InputError: the file is not there or not a valid plan; the message names the field.
    """
    value = read_json(path, f"plan file {str(path)!r}")
    try:
        return plan_from_json(value)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """A plan in plain JSON values."""
    return {
        "version": VERSION,
        "planner": plan.planner,
        "model": plan.model,
        "layers": list(plan.layers),
        "pipelines": [_pipeline_to_json(pipeline) for pipeline in plan.pipelines],
        "shard_optimizer_state": plan.shard_optimizer_state,
        **({"lost_devices": list(plan.lost_devices)} if plan.lost_devices else {}),
        "prediction": _prediction_to_json(plan.prediction),
        "cluster": plan.cluster.to_json_dict(),
    }


def plan_from_json(value: Any) -> Plan:
    """Read a plan from plain JSON values and validate it.

    Args:
        value: what `plan_to_json` gave, or a person edited.

    Returns:
        The plan.

    Raises:
        InputError: a field is missing, unknown, of the wrong type or impossible.
    """
    try:
        record = _Plan.model_validate(value)
    except ValidationError as error:
        raise InputError(f"plan: {first_problem(error, _Plan)}") from None
    prediction = record.prediction
    plan = Plan(
        model=record.model,
        layers=tuple(record.layers),
        cluster=Cluster.from_json_dict(record.cluster, source="plan: cluster"),
        pipelines=tuple(_pipeline(pipeline, p) for p, pipeline in enumerate(record.pipelines)),
        shard_optimizer_state=record.shard_optimizer_state,
        lost_devices=tuple(record.lost_devices),
        planner=record.planner,
        prediction=None
        if prediction is None
        else Prediction(
            prediction.step_time,
            prediction.lower_bound,
            tuple(_stage_prediction(stage, prediction) for stage in prediction.stages),
        ),
    )
    validate(plan)
    return plan


def _pipeline_to_json(pipeline: PipelinePlan) -> dict[str, Any]:
    schedule = pipeline.schedule
    order = (
        {"warm_up_counts": list(schedule.warm_up_counts)}
        if schedule.name in WARM_UP_SCHEDULES and _follows_from_counts(schedule)
        else {"order": [[str(task) for task in tasks] for tasks in schedule.order]}
    )
    return {
        "num_microbatches": pipeline.num_microbatches,
        "microbatch_size": pipeline.microbatch_size,
        "schedule": {"name": schedule.name, **order},
        "stages": [_stage_to_json(stage) for stage in pipeline.stages],
    }


def _follows_from_counts(schedule: Schedule) -> bool:
    counts, num_microbatches = schedule.warm_up_counts, schedule.num_microbatches
    return from_warm_up_counts(counts, num_microbatches, schedule.name) == schedule


def _stage_to_json(stage: StagePlan) -> dict[str, Any]:
    submesh = stage.submesh
    return {
        "layers": list(stage.layers),
        "submesh": {
            "subcluster": submesh.subcluster,
            "start": submesh.start,
            "shape": list(submesh.shape),
        },
        "mesh_shape": list(stage.mesh_shape),
        "sharding": stage.sharding,
        "parameters": {name: list(spec) for name, spec in stage.parameters.items()},
        "recompute": stage.recompute,
        **({"values": _values_to_json(stage)} if stage.values else {}),
    }


def _values_to_json(stage: StagePlan) -> dict[str, list[str | None]]:
    return {str(value): list(spec) for value, spec in stage.values.items()}


def _prediction_to_json(prediction: Prediction | None) -> dict[str, Any] | None:
    if prediction is None:
        return None
    return {
        "step_time": prediction.step_time,
        "lower_bound": prediction.lower_bound,
        "sharing_seconds": prediction.sharing_seconds,
        "stages": [vars(stage) for stage in prediction.stages],
    }


def _stage_prediction(record: _StagePrediction, whole: _Prediction) -> StagePrediction:
    # Files of before the exchange was told by stage have one figure for all.
    own = record.sharing_seconds
    sharing = whole.sharing_seconds if own is None else own
    return StagePrediction(**{**record.model_dump(), "sharing_seconds": sharing})


def _pipeline(record: _Pipeline, index: int) -> PipelinePlan:
    where = f"plan: pipelines[{index}]"
    stages = tuple(
        StagePlan(
            layers=stage.layers,
            submesh=SubMesh(stage.submesh.subcluster, stage.submesh.start, stage.submesh.shape),
            mesh_shape=stage.mesh_shape,
            sharding=stage.sharding,
            parameters={name: tuple(spec) for name, spec in stage.parameters.items()},
            recompute=stage.recompute,
            values={value: tuple(spec) for value, spec in stage.values.items()},
        )
        for stage in record.stages
    )
    schedule = _schedule(record.schedule, record.num_microbatches, where)
    return PipelinePlan(stages, record.num_microbatches, record.microbatch_size, schedule)


def _schedule(record: _Schedule, num_microbatches: int, where: str) -> Schedule:
    if (record.order is None) == (record.warm_up_counts is None):
        raise InputError(f"{where}.schedule needs either warm_up_counts or order")
    if record.name not in (*SCHEDULES, EXPLICIT):
        raise InputError(
            unknown_name(f"{where}.schedule.name", record.name, (*SCHEDULES, EXPLICIT))
        )
    if record.order is not None:
        order = tuple(tuple(Task.parse(text) for text in tasks) for tasks in record.order)
        return Schedule(record.name, order)
    return from_warm_up_counts(record.warm_up_counts or [], num_microbatches, record.name)
