"""Plan files: JSON that a person can read and edit.

A plan's fields and what they may be stand in its dataclasses alone. Here is what a file has besides
(a version, one figure for what stages exchange) and what stands in it in other words: a schedule is
told by its warm-up counts where it follows from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import pydantic

from hetjax.checked_files import FileForm, Record, first_problem
from hetjax.errors import InputError, unknown_name
from hetjax.file_content import LAST, from_content, to_content, without_version
from hetjax.limits import Index, Name
from hetjax.mesh.cluster import Cluster
from hetjax.pipeline.schedules.schedule import (
    PLANNED_SCHEDULES,
    WARM_UP_SCHEDULES,
    Schedule,
    Task,
)
from hetjax.pipeline.schedules.warm_up import from_warm_up_counts

VERSION = 2
"""Of plan files: what is written."""

_OF_ONE_SUBMESH = 1
"""The version in which a stage had a ``submesh`` and a ``mesh_shape`` instead of members."""

Data = TypeVar("Data")


class _ScheduleRecord(Record):
    name: Name
    warm_up_counts: list[Annotated[int, pydantic.Field(lt=2**63)]] | None = None
    order: list[list[Name]] | None = None
    turns: list[list[Index]] | None = None


class _Exchange(Record):
    """What a prediction says of all its stages, whatever else it says."""

    model_config = pydantic.ConfigDict(extra="ignore")

    sharing_seconds: float = 0.0
    stages: list[Any]


def plan_content(plan: Any) -> dict[str, Any]:
    """What a file says of a plan.

    Args:
        plan: a `Plan`.

    Returns:
        Plain JSON values.
    """
    content = to_content(plan)
    if content["prediction"] is not None:
        content["prediction"] = _with_exchange(content["prediction"])
    return {"version": VERSION, **content}


def checked_plan(kind: type[Data], content: object) -> Data:
    """Checks the fields of a plan's content, each by itself.

    Args:
        kind: the class of plans.
        content: what `plan_content` gave, or a person edited.

    Returns:
        The plan, of which no field contradicts its hint.

    Raises:
        InputError: a field is missing, unknown or of a wrong type.
    """
    try:
        version, fields = without_version(content, (_OF_ONE_SUBMESH, VERSION))
        if version == _OF_ONE_SUBMESH:
            fields = _with_members(fields)
        return from_content(kind, _told_by_stage(fields))
    except InputError as error:
        raise InputError(f"plan: {error}") from None


def _with_exchange(prediction: dict[str, Any]) -> dict[str, Any]:
    """What a file says of a prediction, before its stages what the longest exchange takes."""
    stages = prediction.pop("stages")
    longest = max((stage["sharing_seconds"] for stage in stages), default=0.0)
    return {**prediction, "sharing_seconds": longest, "stages": stages}


def _with_members(content: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a plan, from one in which each stage is one submesh."""
    read = dict(content)
    if isinstance(pipelines := content.get("pipelines"), list):
        read["pipelines"] = [
            _pipeline_with_members(pipeline, f"pipelines[{p}]")
            for p, pipeline in enumerate(pipelines)
        ]
    return read


def _pipeline_with_members(pipeline: Any, where: str) -> Any:
    if not isinstance(pipeline, Mapping) or not isinstance(pipeline.get("stages"), list):
        return pipeline
    stages = [
        _stage_with_members(stage, f"{where}.stages[{s}]")
        for s, stage in enumerate(pipeline["stages"])
    ]
    return {**pipeline, "stages": stages}


def _stage_with_members(stage: Any, where: str) -> Any:
    if not isinstance(stage, Mapping):
        return stage
    for name in ("members", "shares"):
        if name in stage:
            raise InputError(
                f"{where}.{name}: version {_OF_ONE_SUBMESH} of the file, in which a stage has a "
                f"submesh and a mesh_shape, has no such field; make version {VERSION}"
            )
    member = {name: stage[name] for name in ("submesh", "mesh_shape") if name in stage}
    rest = {name: value for name, value in stage.items() if name not in member}
    return {"members": [member], **rest}


def _told_by_stage(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """The content of a plan, in which stages alone say what they exchange.

    Files of before the exchange was told by stage have one figure for all.
    """
    if not isinstance(content.get("prediction"), Mapping):
        return content
    prediction = dict(content["prediction"])
    if "sharing_seconds" not in prediction:
        return content
    try:
        whole = _Exchange.model_validate(prediction)
    except pydantic.ValidationError as error:
        raise InputError(f"prediction.{first_problem(error, _Exchange)}") from None
    prediction["stages"] = [
        {"sharing_seconds": whole.sharing_seconds, **stage} if isinstance(stage, Mapping) else stage
        for stage in whole.stages
    ]
    del prediction["sharing_seconds"]
    return {**content, "prediction": prediction}


def _read_schedule(record: _ScheduleRecord, pipeline: Mapping[str, Any]) -> Schedule:
    if (record.order is None) == (record.warm_up_counts is None):
        raise InputError("it needs either warm_up_counts or order")
    if record.name not in PLANNED_SCHEDULES:
        raise InputError(unknown_name("schedule.name", record.name, PLANNED_SCHEDULES))
    if record.order is not None:
        order = tuple(tuple(Task.parse(text) for text in tasks) for tasks in record.order)
        return Schedule(record.name, order, tuple(map(tuple, record.turns or ())))
    if record.turns is not None:
        raise InputError("turns: given beside warm_up_counts; stages that share devices need order")
    # Where the number of microbatches is wrong, that is said already.
    num_microbatches = pipeline.get("num_microbatches", 0)
    return from_warm_up_counts(record.warm_up_counts or [], num_microbatches, record.name)


def _schedule_content(schedule: Schedule) -> dict[str, Any]:
    if schedule.name in WARM_UP_SCHEDULES and _follows_from_counts(schedule):
        return {"name": schedule.name, "warm_up_counts": list(schedule.warm_up_counts)}
    return schedule.to_json()


def _follows_from_counts(schedule: Schedule) -> bool:
    counts, num_microbatches = schedule.warm_up_counts, schedule.num_microbatches
    return from_warm_up_counts(counts, num_microbatches, schedule.name) == schedule


PlannedSchedule = Annotated[Schedule, FileForm(_ScheduleRecord, _read_schedule, _schedule_content)]
"""The schedule of a pipeline whose field ``num_microbatches`` stands before it."""

PlannedCluster = Annotated[
    Cluster,
    LAST,
    FileForm(
        dict[str, Any],
        lambda content, _: Cluster.from_json_dict(content),
        Cluster.to_json_dict,
    ),
]
"""The cluster that a plan is for, as in a cluster file."""
