"""Plans as data: what is valid, what a file keeps, and what every bad edit is told."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_versions import version_1
from visible_text import VISIBLE

from hetjax.errors import InputError
from hetjax.mesh import Cluster, DeviceKind, Link, Subcluster, SubMesh
from hetjax.pipeline.program.traced_program import Program
from hetjax.pipeline.program.tracing import trace
from hetjax.pipeline.schedules.schedule import EXPLICIT, WARM_UP_SCHEDULES, Schedule, Task
from hetjax.pipeline.schedules.warm_up import from_warm_up_counts, gpipe, one_f_one_b
from hetjax.planner.plan.module_shares import Share
from hetjax.planner.plan.plan import Plan, as_plan, validate, validate_for
from hetjax.planner.plan.prediction import Prediction, StagePrediction
from hetjax.planner.plan.stage_plan import Member, PipelinePlan, Shares, StagePlan
from hetjax.sharding.annotation.rules import RULES

KIND = DeviceKind("test", {"float32": 1e12}, 10**9, 1e11, source="made up")
LINK = Link(1e9, 1e-5)
PAPERS = Path(__file__).parents[2] / "configs" / "papers"


def cluster_of(*sizes: tuple[int, int]) -> Cluster:
    names = [f"sub{place}" for place in range(len(sizes))]
    return Cluster(
        "test",
        tuple(Subcluster(n, KIND, *size, LINK, LINK) for n, size in zip(names, sizes, strict=True)),
        tuple((a, b, LINK) for i, a in enumerate(names) for b in names[i + 1 :]),
    )


def plan_of_two_stages() -> Plan:
    stages = (
        StagePlan.on((0, 2), SubMesh("sub0", 0, (1, 4)), (4, 1)),
        StagePlan.on((2, 3), SubMesh("sub1", 0, (1, 2)), (1, 2), "fully_sharded", recompute=True),
    )
    return Plan(
        model="abc",
        layers=(0, 5, 9, 12),
        cluster=cluster_of((1, 4), (1, 2)),
        pipelines=(PipelinePlan(stages, 4, 8, one_f_one_b(2, 4)),),
    )


@st.composite
def submeshes(draw: Any, cluster: Cluster) -> list[SubMesh]:
    """Submeshes that do not overlap, at least one."""
    found = []
    for subcluster in cluster.subclusters:
        for node in range(subcluster.nodes):
            start = node * subcluster.devices_per_node
            end = start + subcluster.devices_per_node
            while start < end:
                devices = draw(st.integers(1, end - start))
                found.append(SubMesh(subcluster.name, start, (1, devices)))
                start += devices
    return draw(st.lists(st.sampled_from(found), min_size=1, unique=True))


@st.composite
def schedules(draw: Any, num_stages: int, num_microbatches: int) -> Schedule:
    steps = draw(st.lists(st.integers(0, 3), min_size=num_stages, max_size=num_stages))
    counts = [1 + sum(steps[stage:]) for stage in range(num_stages)]
    name = draw(st.sampled_from(WARM_UP_SCHEDULES))
    schedule = from_warm_up_counts(counts, num_microbatches, name)
    if draw(st.booleans()):
        return schedule
    # Microbatches may come in any order that all stages follow.
    microbatches = draw(st.permutations(range(num_microbatches)))
    order = tuple(
        tuple(Task(task.kind, microbatches[task.microbatch]) for task in tasks)
        for tasks in schedule.order
    )
    return Schedule(EXPLICIT, order)


def groups(draw: Any, submeshes: list[SubMesh]) -> list[list[SubMesh]]:
    """The submeshes of each stage."""
    found = [submeshes[:1]]
    for submesh in submeshes[1:]:
        if draw(st.booleans()):
            found.append([submesh])
        else:
            found[-1].append(submesh)
    return found


def mesh_shape_of(draw: Any, submesh: SubMesh) -> tuple[int, int]:
    devices = submesh.num_devices
    data = draw(st.sampled_from([d for d in range(1, devices + 1) if devices % d == 0]))
    return data, devices // data


def shares_of(draw: Any, members: int, microbatch_size: int) -> Shares:
    """Shares of several members, such that every data axis divides those of the batch."""
    if members == 1:
        return Shares()
    cuts = draw(st.lists(st.integers(0, microbatch_size // 12), min_size=members - 1))
    edges = [0, *sorted(cuts[: members - 1]), microbatch_size // 12]
    batch = tuple(12 * (end - start) for start, end in pairwise(edges))
    sizes = st.lists(st.integers(0, 9), min_size=members, max_size=members).filter(any).map(tuple)
    share = st.builds(Share, st.integers(0, 3), sizes)
    return Shares(
        draw(st.sampled_from([(), batch])),
        draw(st.dictionaries(st.text(VISIBLE, max_size=5), share, max_size=2)),
        draw(st.dictionaries(st.integers(0, 99), share, max_size=2)),
    )


@st.composite
def plans(draw: Any) -> Plan:
    sizes = st.tuples(st.integers(1, 2), st.integers(1, 4))
    cluster = cluster_of(*draw(st.lists(sizes, min_size=1, max_size=3)))
    places = groups(draw, draw(submeshes(cluster)))
    cuts = sorted(draw(st.sets(st.integers(1, 30), min_size=len(places) - 1)))
    chosen = sorted(draw(st.permutations(range(len(cuts))))[: len(places) - 1])
    edges = [0, *(place + 1 for place in chosen), len(cuts) + 1]
    microbatch_size = 24 * draw(st.integers(1, 3))
    stages = []
    for found, first, end in zip(places, edges, edges[1:], strict=False):
        axes = st.sampled_from([[], ["data"], ["tensor"], ["tensor", "data"], ["data", "tensor"]])
        specs = axes.map(lambda used: (None, *used))
        stages.append(
            StagePlan(
                (first, end),
                tuple(Member(submesh, mesh_shape_of(draw, submesh)) for submesh in found),
                draw(st.sampled_from(sorted(RULES))),
                draw(st.dictionaries(st.text(VISIBLE, max_size=5), specs, max_size=2)),
                draw(st.booleans()),
                shares=shares_of(draw, len(found), microbatch_size),
            )
        )
    num_microbatches = draw(st.integers(1, 6))
    schedule = draw(schedules(len(stages), num_microbatches))
    seconds, sizes = st.floats(0, 1e3), st.integers(0, 10**12)
    prediction = st.builds(
        Prediction,
        seconds,
        seconds,
        st.lists(
            st.builds(StagePrediction, *[seconds] * 8, *[sizes] * 7, seconds),
            min_size=len(stages),
            max_size=len(stages),
        ).map(tuple),
    )
    return Plan(
        model=draw(st.text(VISIBLE, max_size=8)),
        layers=(0, *cuts, 31),
        cluster=cluster,
        pipelines=(PipelinePlan(tuple(stages), num_microbatches, microbatch_size, schedule),),
        planner=draw(st.text(VISIBLE, max_size=8)),
        prediction=draw(st.none() | prediction),
    )


@given(plan=plans())
def test_a_plan_comes_back_from_its_json_as_it_was(plan):
    validate(plan)
    text = json.dumps(plan.to_json_dict())
    assert Plan.from_json_dict(json.loads(text)) == plan


def test_a_prediction_of_other_stages_is_left_out():
    """As of a file in which a person has added a stage, or taken one away."""
    plan = replace(
        plan_of_two_stages(), prediction=Prediction(2.0, 1.0, (prediction_of_a_stage(1),) * 2)
    )
    assert Plan.from_json_dict(plan.to_json_dict()) == plan
    data = plan.to_json_dict()
    data["prediction"]["stages"].pop()
    assert Plan.from_json_dict(data) == replace(plan, prediction=None)


def test_a_stage_of_a_file_of_version_1_has_one_member():
    plan = plan_of_two_stages()
    data = version_1(plan)
    assert data["version"] == 1
    assert data["pipelines"][0]["stages"][0] == {
        "layers": [0, 2],
        "submesh": {"subcluster": "sub0", "start": 0, "shape": [1, 4]},
        "mesh_shape": [4, 1],
        "sharding": "data",
        "parameters": {},
        "recompute": False,
    }
    assert Plan.from_json_dict(data) == plan


@pytest.mark.parametrize("path", sorted(PAPERS.glob("*/*.json")), ids=lambda path: path.stem)
def test_stored_plans_are_as_they_are_written_and_were_so_in_version_1(path, tmp_path):
    plan = Plan.load(path)
    plan.save(tmp_path / "plan.json")
    assert (tmp_path / "plan.json").read_text() == path.read_text()
    assert Plan.from_json_dict(version_1(plan)) == plan


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (
            "members",
            [],
            r"pipelines\[0\].stages\[1\].members: version 1 of the file.*make version 2",
        ),
        ("shares", {}, r"stages\[1\].shares: version 1 of the file.* has no such field"),
        ("submesh", ..., r"stages\[1\].members\[0\].submesh: the field is missing"),
        ("mesh_shape", 4, r"stages\[1\].members\[0\].mesh_shape: 4 is not allowed"),
        ("colour", "red", r"stages\[1\]: unknown field 'colour'"),
    ],
)
def test_a_bad_edit_of_a_file_of_version_1_is_told_its_field(field, value, message):
    data = version_1(plan_of_two_stages())
    edit(f"{STAGES}/1/{field}", value)(data)
    with pytest.raises(InputError, match=message):
        Plan.from_json_dict(data)


@pytest.mark.parametrize("pipelines", [None, [3], [{"stages": 3}], [{"stages": [3]}], {"a": 1}])
def test_what_is_no_plan_of_version_1(pipelines):
    with pytest.raises(InputError, match="pipelines"):
        Plan.from_json_dict({**version_1(plan_of_two_stages()), "pipelines": pipelines})


def test_a_plan_comes_back_from_its_file_as_it_was(tmp_path):
    plan = plan_of_two_stages()
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_a_file_of_before_stages_told_what_they_exchange():
    both = tuple(replace(prediction_of_a_stage(1), sharing_seconds=0.5) for _ in range(2))
    plan = replace(plan_of_two_stages(), prediction=Prediction(2.0, 1.0, both))
    data = plan.to_json_dict()
    assert list(data["prediction"]) == ["step_time", "lower_bound", "sharing_seconds", "stages"]
    for stage in data["prediction"]["stages"]:
        del stage["sharing_seconds"]
    assert Plan.from_json_dict(data) == plan
    data["prediction"]["sharing_seconds"] = "much"
    with pytest.raises(InputError, match=r"^plan: prediction.sharing_seconds: 'much' is not"):
        Plan.from_json_dict(data)


def test_the_parts_of_a_plan_that_follow_from_others():
    plan = plan_of_two_stages()
    assert plan.batch_size == 32
    assert plan.boundaries(plan.pipeline) == (0, 9, 12)
    other = plan.with_schedule(gpipe(2, 4))
    assert other.pipeline.schedule.name == "gpipe"
    assert other.prediction is None
    assert other.pipeline.stages == plan.pipeline.stages


def edit(path: str, value: Any) -> Callable[[Any], None]:
    """An edit that sets one field of a plan's JSON, or removes it where the value is ...."""

    def apply(data: Any) -> None:
        *parents, last = [int(key) if key.isdecimal() else key for key in path.split("/")]
        for key in parents:
            data = data[key]
        if value is ...:
            del data[last]
        else:
            data[last] = value

    return apply


STAGES = "pipelines/0/stages"
FIRST, SECOND = (f"{STAGES}/{stage}/members/0" for stage in (0, 1))
SCHEDULE = "pipelines/0/schedule"

BAD_EDITS = [
    ("version", 3, "version: 3 is not allowed: it must be 1 or 2"),
    ("version", ..., "version: the field is missing"),
    ("colour", "red", "unknown field 'colour'"),
    (f"{STAGES}/0/colour", "red", r"pipelines\[0\].stages\[0\]: unknown field 'colour'"),
    (f"{STAGES}/0/layers", ..., r"pipelines\[0\].stages\[0\].layers: the field is missing"),
    (f"{STAGES}/0/recompute", "yes", r"stages\[0\].recompute: 'yes' is not allowed.*boolean"),
    (
        f"{FIRST}/submesh/start",
        -1,
        r"submesh.start: -1 is not allowed.*greater than or equal to 0",
    ),
    ("pipelines/0/num_microbatches", 4.5, r"num_microbatches: 4.5 is not allowed.*integer"),
    ("pipelines", [], "pipelines is empty"),
    (STAGES, [], r"pipelines\[0\].stages is empty"),
    ("layers", [1, 5, 12], r"layers is \[1, 5, 12\]; it must begin with 0"),
    ("layers", [0, 9, 5, 12], "increase"),
    ("layers", [0], "must begin with 0 and increase"),
    ("layers", [0, 5, 9, 11, 12], "ends at layer 3, the model has 4 layers"),
    (f"{STAGES}/1/layers", [1, 3], r"stages\[1\].layers is \[1, 3\]; it overlaps"),
    (f"{STAGES}/0/layers", [0, 1], "layers 1 to 1 are in no stage"),
    (f"{STAGES}/0/layers", [0, 0], "a stage has one layer or more"),
    (f"{STAGES}/1/layers", [2, 4], "ends at layer 4, the model has 3"),
    (f"{FIRST}/submesh/subcluster", "sub9", "unknown subcluster 'sub9'.*Allowed: sub0, sub1"),
    (f"{SECOND}/submesh/start", 1, r"stages\[1\].members\[0\].submesh.*device 2 is not there"),
    (f"{FIRST}/submesh/shape", [2, 2], "device|neither within one node"),
    (f"{FIRST}/mesh_shape", [2, 1], r"mesh_shape is \[2, 1\]; its product .* 4"),
    (f"{FIRST}/mesh_shape", [-4, -1], "mesh_shape is"),
    (f"{STAGES}/0/sharding", "dada", "unknown .*sharding 'dada'; did you mean 'data'"),
    (
        f"{STAGES}/0/parameters",
        {"w": ["row"]},
        "unknown .*parameters.*'row'. Allowed: data, tensor",
    ),
    (f"{STAGES}/0/parameters", {"w": ["data", "data"]}, "an axis may divide one dimension"),
    (f"{FIRST}/mesh_shape", [0, 4], r"mesh_shape is \[0, 4\]"),
    ("pipelines/0/num_microbatches", 0, "1 or more"),
    ("pipelines/0/microbatch_size", 0, "microbatch_size is 0; it must be 1 or more"),
    ("pipelines/0/microbatch_size", 6, r"microbatch_size is 6, which the data axis of stages\[0\]"),
    (f"{SCHEDULE}/name", "1f2b", "unknown .*schedule.name '1f2b'; did you mean '1f1b'"),
    (f"{SCHEDULE}/warm_up_counts", ..., "either warm_up_counts or order"),
    (f"{SCHEDULE}/order", [["F0"], ["F0"]], "either warm_up_counts or order"),
    (f"{SCHEDULE}/warm_up_counts", [1, 2], "deadlock"),
    (f"{SCHEDULE}/warm_up_counts", [3, 2, 1], "schedule has 3 stages, the pipeline has 2"),
    (SCHEDULE, {"name": "explicit", "order": [["F0", "B0"], ["B0", "F0"]]}, "microbatches"),
    (SCHEDULE, {"name": "explicit", "order": [["G0"], ["F0"]]}, "task 'G0' is not one of F, R, B"),
    ("cluster/subclusters", [], "subclusters"),
]


@pytest.mark.parametrize(("path", "value", "message"), BAD_EDITS)
def test_a_bad_edit_is_told_its_field(path, value, message):
    data = json.loads(json.dumps(plan_of_two_stages().to_json_dict()))
    edit(path, value)(data)
    with pytest.raises(InputError, match=message):
        Plan.from_json_dict(data)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_microbatches": "4"}, r"num_microbatches: '4' is not allowed: .* integer"),
        ({"microbatch_size": 8.0}, r"microbatch_size: 8.0 is not allowed: .* integer"),
        ({"schedule": "1f1b"}, r"schedule: '1f1b' is not allowed: .* instance of Schedule"),
        ({"schedule": replace(gpipe(2, 4), order=(["F0"],))}, "stage 0: 'F0' is no Task"),
        ({"stages": 2}, "stages: 2 is not allowed: .* tuple"),
    ],
)
def test_types_of_a_plan_made_in_python_are_told_by_their_field(changes, message):
    plan = plan_of_two_stages()
    bad = replace(plan, pipelines=(replace(plan.pipeline, **changes),))
    for take in (validate, as_plan):
        with pytest.raises(InputError, match=f"^plan: .*{message}"):
            take(bad)
    assert as_plan(replace(plan, layers=list(plan.layers)))


def test_lost_devices_are_named_in_the_file_and_no_stage_has_one():
    whole = plan_of_two_stages()
    assert "lost_devices" not in whole.to_json_dict()
    assert Plan.from_json_dict(whole.to_json_dict()).lost_devices == ()
    alone = Member(SubMesh("sub1", 0, (1, 1)), (1, 1))
    last = replace(whole.pipeline.stages[1], members=(alone,))
    pipeline = replace(whole.pipeline, stages=(whole.pipeline.stages[0], last))
    plan = replace(whole, pipelines=(pipeline,), lost_devices=(5,))
    written = plan.to_json_dict()
    assert written["lost_devices"] == [5]
    assert Plan.from_json_dict(written) == plan
    assert "a step, without device 5, made" in str(plan)
    for value, message in (
        ([3], r"lost_devices has 3, which pipelines\[0\].stages\[0\].members\[0\] has; allowed: "),
        ([6], r"lost_devices has 6, which is no device of cluster 'test'; allowed: 0 to 5"),
        ([5, 5], r"lost_devices is \[5, 5\]; it has each device once, in increasing order"),
        ([-1], r"lost_devices\[0\]: -1"),
        ("5", "lost_devices: '5'"),
    ):
        with pytest.raises(InputError, match=message):
            Plan.from_json_dict({**written, "lost_devices": value})


def test_two_stages_on_one_device():
    data = copy.deepcopy(plan_of_two_stages().to_json_dict())
    edit(f"{SECOND}/submesh", {"subcluster": "sub0", "start": 3, "shape": [1, 1]})(data)
    edit(f"{SECOND}/mesh_shape", [1, 1])(data)
    with pytest.raises(InputError, match=r"has device 3, which .*stages\[0\].members\[0\] has too"):
        Plan.from_json_dict(data)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is not JSON: .* in line 1"),
        (b"\xff\xfe", "is not UTF-8"),
        (b"[]", "plan: the content: .* it must be a mapping"),
        (b"3", "plan: the content: .* it must be a mapping"),
    ],
)
def test_a_file_that_is_no_plan(tmp_path, content, message):
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        Plan.load(path)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(InputError, match="cannot be read: No such file"):
        Plan.load(tmp_path / "plan.json")


def small_program() -> Program:
    parameters = {"w": jnp.ones((4, 2))}
    return trace(lambda w, x: jnp.mean((x @ w["w"]) ** 2), parameters, jnp.ones((8, 4)))


def test_a_plan_for_another_model():
    program = small_program()
    stage = StagePlan.on((0, 1), SubMesh("sub0", 0, (1, 1)), (1, 1))
    plan = Plan(
        program.fingerprint,
        (0, program.num_positions),
        cluster_of((1, 1)),
        (PipelinePlan((stage,), 2, 8, gpipe(1, 2)),),
    )
    validate_for(plan, program, batch_size=16)
    with pytest.raises(InputError, match="16 examples a step, and the batch has 8"):
        validate_for(plan, program, batch_size=8)
    other = trace(lambda w, x: jnp.mean((x @ w) ** 2), jnp.ones((4, 2)), jnp.ones((8, 4)))
    with pytest.raises(InputError, match="made for another model"):
        validate_for(plan, other)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"v": ("data",)}, "parameters: parameter 'v'"),
        ({"w": (None, None, "data")}, r"parameters\['w'\] is .* the parameter's shape \(4, 2\)"),
    ],
)
def test_a_specification_that_fits_no_parameter(parameters, message):
    program = small_program()
    stages = [StagePlan.on((0, 1), SubMesh("sub0", i, (1, 1)), (1, 1)) for i in range(2)]
    stages[1] = replace(stages[1], parameters=parameters)
    plan = Plan(
        program.fingerprint,
        (0, program.num_positions),
        cluster_of((1, 2)),
        tuple(PipelinePlan((stage,), 2, 8, gpipe(1, 2)) for stage in stages),
    )
    assert plan.field_of(1) == "plan: pipelines[1].stages[0]"
    with pytest.raises(InputError, match=rf"pipelines\[1\].stages\[0\].{message}"):
        validate_for(plan, program)


def test_more_tasks_than_can_be_put_in_order_are_refused():
    data = json.loads(json.dumps(plan_of_two_stages().to_json_dict()))
    for count, message in (
        (10**15, r"num_microbatches: 1000000000000000 is not allowed: .* 16384"),
        (10**4 * 7, r"num_microbatches: 70000 is not allowed"),
    ):
        data["pipelines"][0]["num_microbatches"] = count
        with pytest.raises(InputError, match=message):
            Plan.from_json_dict(data)
    with pytest.raises(InputError, match=r"16384 in a pipeline of 8 stages; it must be 8192"):
        from_warm_up_counts([1] * 8, 2**14)


def test_a_plan_is_printed_in_a_few_lines() -> None:
    plan = plan_of_two_stages()
    assert str(plan).splitlines() == [
        "Plan on cluster test: 2 stages on 6 of 6 devices, 32 examples a step, made by hand",
        "  4 microbatches of 8 examples, schedule 1f1b",
        "    stage 0: layers 0-1 on sub0[0:4] 1x4, data 4",
        "    stage 1: layer 2 on sub1[0:2] 1x2, tensor 2, fully sharded, recompute",
        "  without a prediction",
    ]
    fits, not_fits = (prediction_of_a_stage(needed) for needed in (4 * 10**8, 2 * 10**9))
    prediction = Prediction(0.0412, 0.038, (fits, not_fits))
    *_, first, second, whole = str(replace(plan, prediction=prediction)).splitlines()
    assert first.endswith(", data 4, 400 MB of 1 GB")
    assert second.endswith(", recompute, 2 GB of 1 GB, which is too little")
    assert whole == "  predicted step time 41.2 ms, lower bound 38 ms"


def test_pipelines_of_a_printed_plan_are_numbered_and_their_stages_too() -> None:
    one = PipelinePlan(
        (StagePlan.on((0, 3), SubMesh("sub0", 0, (1, 1)), (1, 1)),), 1, 1, one_f_one_b(1, 1)
    )
    other = PipelinePlan(
        (StagePlan.on((0, 3), SubMesh("sub1", 0, (1, 1)), (1, 1)),), 2, 3, one_f_one_b(1, 2)
    )
    lines = str(replace(plan_of_two_stages(), pipelines=(one, other))).splitlines()
    assert lines[0].startswith("Plan on cluster test: 2 stages on 2 of 6 devices, 7 examples")
    assert lines[1:5] == [
        "  pipeline 0: 1 microbatch of 1 example, schedule 1f1b",
        "    stage 0: layers 0-2 on sub0[0:1] 1x1, one device",
        "  pipeline 1: 2 microbatches of 3 examples, schedule 1f1b",
        "    stage 1: layers 0-2 on sub1[0:1] 1x1, one device",
    ]


def test_a_notebook_shows_a_plan_as_it_is_printed() -> None:
    from IPython.lib.pretty import pretty

    plan = plan_of_two_stages()
    assert pretty(plan) == str(plan)


def prediction_of_a_stage(memory_bytes: int) -> StagePrediction:
    return StagePrediction(
        forward_seconds=0.1,
        backward_seconds=0.2,
        recompute_seconds=0.0,
        input_gradient_seconds=0.1,
        weight_gradient_seconds=0.1,
        update_seconds=0.1,
        communication_seconds=0.1,
        return_seconds=0.1,
        state_bytes=1,
        working_bytes=1,
        activation_bytes=1,
        recomputed_bytes=0,
        deferred_bytes=0,
        memory_bytes=memory_bytes,
        memory_limit_bytes=10**9,
        bubble=0.1,
    )
