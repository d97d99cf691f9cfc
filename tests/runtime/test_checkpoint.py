import json
import os
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import settings
from jax.sharding import Mesh
from one_pipeline import one_pipeline
from opened_loops import iteration_starts

from hetjax.errors import CheckpointError
from hetjax.mesh.cluster import Cluster, SubMesh
from hetjax.mesh.hetero import HeteroMesh
from hetjax.mesh.links import Link
from hetjax.mesh.published_kinds import kind
from hetjax.mesh.subcluster import Subcluster
from hetjax.pipeline.program.tracing import trace
from hetjax.pipeline.schedules.warm_up import one_f_one_b
from hetjax.planner.plan.plan import Plan
from hetjax.planner.plan.stage_plan import PipelinePlan, StagePlan
from hetjax.runtime.checkpoints.checkpoint import StageSaver, check_leaves
from hetjax.runtime.checkpoints.checkpoint_files import (
    CheckpointFolder,
    SaveFailure,
    StageRecord,
    read_manifest,
)
from hetjax.runtime.checkpoints.manifest import DataPosition, SavedFile, SavedPart
from hetjax.runtime.checkpoints.traced_model import TracedModel
from hetjax.runtime.compilation.compiled_stage import CompiledStage
from hetjax.runtime.compilation.compiling import put_whole
from hetjax.runtime.compilation.state import StageState, initial_state
from hetjax.runtime.instructions.buffers import OptimizerState, Parameter
from hetjax.runtime.instructions.placement import Placement
from hetjax.runtime.local.local_executor import LocalExecutor
from hetjax.runtime.workers.job import Job
from hetjax.sharding.annotation.rules import MESH_AXES

VOCABULARY, WIDTH, BLOCKS, MICROBATCHES, SIZE = 16, 8, 5, 2, 4

local = Link(10e9, 1e-6)
cluster = Cluster(
    "test",
    (
        Subcluster("fast", kind("A100-40"), 1, 4, local, local),
        Subcluster("slow", kind("T4"), 1, 4, local, local),
    ),
    (("fast", "slow", Link(1e8, 1e-4)),),
)


def loss(parameters, batch):
    tokens = batch["tokens"]
    hidden = parameters["embedding"][tokens[:, :-1]]

    def block(hidden, weights):
        return hidden + jnp.tanh(hidden @ weights["in"]) @ weights["out"] + weights["bias"], None

    hidden, _ = jax.lax.scan(block, hidden, parameters["blocks"])
    scores = jax.nn.log_softmax(hidden @ parameters["embedding"].T)
    targets = jnp.take_along_axis(scores, tokens[:, 1:, None], -1)
    return -jnp.sum(targets), jnp.float32(targets.size)


def make_parameters():
    rng = np.random.default_rng(0)

    def weights(*shape):
        return (0.3 * rng.normal(size=shape)).astype(np.float32)

    blocks = {
        "in": weights(BLOCKS, WIDTH, 2 * WIDTH),
        "out": weights(BLOCKS, 2 * WIDTH, WIDTH),
        "bias": weights(BLOCKS, WIDTH),
    }
    return {"embedding": weights(VOCABULARY, WIDTH), "blocks": blocks}


def make_batch(step):
    rng = np.random.default_rng(step)
    return {"tokens": rng.integers(0, VOCABULARY, (MICROBATCHES * SIZE, 7), np.int32)}


ADAM: optax.GradientTransformation = optax.chain(
    optax.clip_by_global_norm(0.5),
    optax.adamw(optax.linear_schedule(1e-2, 1e-3, 10), mu_dtype=jnp.bfloat16),
)
PROGRAM = trace(
    loss, make_parameters(), {"tokens": jax.ShapeDtypeStruct((SIZE, 7), np.dtype("int32"))}
)
STARTS = iteration_starts(PROGRAM, BLOCKS)
END = PROGRAM.num_positions

THREE = (
    ((0, STARTS[2], STARTS[3], END)),
    (
        (SubMesh("fast", 0, (1, 4)), (2, 2), "fully_sharded"),
        (SubMesh("slow", 0, (1, 1)), (1, 1), "data"),
        (SubMesh("slow", 2, (1, 2)), (1, 2), "data"),
    ),
)
TWO = (
    (0, STARTS[4], END),
    (
        (SubMesh("slow", 0, (1, 2)), (2, 1), "fully_sharded"),
        (SubMesh("fast", 0, (1, 2)), (1, 2), "fully_sharded"),
    ),
)
ONE = ((0, END), ((SubMesh("fast", 1, (1, 2)), (2, 1), "data"),))


def make_placement(
    layout, optimizer: optax.GradientTransformation = ADAM, program=PROGRAM, parameters=None
):
    boundaries, places = layout
    stages = tuple(
        StagePlan.on((i, i + 1), submesh, mesh_shape, sharding)
        for i, (submesh, mesh_shape, sharding) in enumerate(places)
    )
    pipelines = one_pipeline(
        program,
        parameters or make_parameters(),
        optimizer,
        boundaries=boundaries,
        recompute=[False] * len(stages),
    )
    schedule = one_f_one_b(len(stages), MICROBATCHES)
    pipeline = PipelinePlan(stages, MICROBATCHES, SIZE, schedule)
    return Placement.of(pipelines, Plan(program.fingerprint, boundaries, cluster, (pipeline,)))


def stages_of(placement):
    """Each stage with its shardings, without compiling anything."""
    plans = placement.plan.stages
    union = HeteroMesh.bind(cluster, tuple(plan.submesh for plan in plans), jax.devices())
    for stage, plan in enumerate(plans):
        mesh = union.mesh(stage, MESH_AXES, plan.mesh_shape)
        yield stage, compiled_for(placement, stage, mesh)


def compiled_for(placement, stage, mesh):
    parameters, state = (
        placement.leaves(stage, kind).on(mesh) for kind in (Parameter, OptimizerState)
    )
    return CompiledStage(mesh, {}, parameters, state, {})


def random_leaves(placement):
    """Leaves of any bits at all: not-a-numbers and denormals too."""
    rng = np.random.default_rng(1)
    pipelines = placement.pipelines
    return [
        [
            survivable(
                np.frombuffer(rng.bytes(max(s.size, 1) * s.dtype.itemsize), s.dtype)
            ).reshape(s.shape)
            for s in shapes
        ]
        for shapes in (pipelines.parameter_shapes, pipelines.state_shapes)
    ]


def survivable(array):
    """An array with the usual not-a-number for every other one, unless programs are as users'.

    A bfloat16 copy compiled quickly keeps no bits of a not-a-number.
    """
    if settings.get_current_profile_name() == "full" or array.dtype != jnp.bfloat16:
        return array
    with np.errstate(invalid="ignore"):
        return np.where(np.isnan(array), array.dtype.type(np.nan), array)


def take(placement, stage, leaves):
    pipelines = placement.pipelines
    held = (pipelines.stages[stage].parameters, pipelines.updates[stage].state)
    return [
        [part.take(whole[part.leaf]) for part in parts]
        for parts, whole in zip(held, leaves, strict=True)
    ]


def put(arrays, shardings):
    return [put_whole(a, s) for a, s in zip(arrays, shardings, strict=True)]


def save(folder, step, placement, states):
    """Save all stages as a driver would."""
    target = folder.begin(step)
    savers = [StageSaver(placement, stage) for stage in range(len(states))]
    for saver, state in zip(savers, states, strict=True):
        saver.save(target, state)
    path = folder.commit(step, [saver.wait() for saver in savers], DataPosition(0, 1), {})
    for saver in savers:
        assert saver.done()
        saver.close()
    return path


def random_states(placement):
    leaves = random_leaves(placement)
    states = []
    for stage, compiled in stages_of(placement):
        parameters, optimizer = take(placement, stage, leaves)
        states.append(
            StageState(put(parameters, compiled.parameters), put(optimizer, compiled.state))
        )
    return states


def assert_same_bits(array, expected, sharding):
    assert array.sharding == sharding
    found = np.asarray(array)
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert found.tobytes() == expected.tobytes()


def assert_holds(placement, path):
    """A checkpoint, loaded for a placement, has every bit of the random leaves."""
    leaves = random_leaves(placement)
    for stage, compiled in stages_of(placement):
        state = StageSaver(placement, stage).load(path, compiled)
        for arrays, expected, shardings in zip(
            (state.parameters, state.optimizer),
            take(placement, stage, leaves),
            (compiled.parameters, compiled.state),
            strict=True,
        ):
            for case in zip(arrays, expected, shardings, strict=True):
                assert_same_bits(*case)


@pytest.fixture(scope="module")
def placements():
    return {name: make_placement(globals()[name]) for name in ("ONE", "TWO", "THREE")}


@pytest.fixture(scope="module")
def saved(placements, tmp_path_factory):
    """For each plan, a checkpoint of the same random state."""
    return {
        name: save(
            CheckpointFolder(tmp_path_factory.mktemp(name)), 7, placement, random_states(placement)
        )
        for name, placement in placements.items()
    }


def test_the_plans_cut_the_loop_and_tie_the_embedding(placements):
    names = PROGRAM.parameter_names
    for name in ("TWO", "THREE"):
        pipelines = placements[name].pipelines
        first, *_, last = ({names[p.leaf] for p in s.parameters} for s in pipelines.stages)
        assert "blocks/in[0]" in first - last
        assert "blocks/in[4]" in last - first
        assert [names[part.leaf] for part in pipelines.shared] == ["embedding"]


@pytest.mark.parametrize("source", ["ONE", "TWO", "THREE"])
@pytest.mark.parametrize("target", ["ONE", "TWO", "THREE"])
def test_every_bit_survives_a_change_of_plan(placements, saved, source, target):
    check_leaves(saved[source], placements[target].pipelines)
    assert_holds(placements[target], saved[source])


def test_a_tied_leaf_and_a_shared_count_are_saved_once(saved):
    manifest = read_manifest(saved["THREE"])
    items = {}
    for part in manifest.parts:
        items.setdefault(part.path, []).append(part.item)
    assert items["embedding"] == ["stage_0"]
    assert items["1/0/count"] == ["stage_0"]
    assert items["blocks/in"] == [f"stage_{stage}" for stage in (0, 0, 1, 2, 2)]
    keys = [part.key for part in manifest.parts if part.path == "1/0/mu/blocks/in"]
    assert keys == [f"optimizer/1/0/mu/blocks/in[{rows}]" for rows in range(BLOCKS)]


def test_losses_after_resuming_are_those_of_the_uninterrupted_run(placements, tmp_path):
    placement = placements["TWO"]
    folder = CheckpointFolder(tmp_path)
    plan = placement.plan
    job = Job(loss, make_parameters(), make_batch(0), ADAM, plan)
    executor = LocalExecutor(job, placement)
    executor.start()

    def records(executor):
        return [each for each in executor.wait_saved() if not isinstance(each, SaveFailure)]

    def losses(first, end):
        return [executor.train_step(k, make_batch(k))[-1].loss for k in range(first, end)]

    losses(0, 2)
    executor.save(str(folder.begin(2)))
    uninterrupted = losses(2, 5)  # these steps donate the arrays while they are being written
    folder.commit(2, records(executor), DataPosition(0, 1), {})

    found = folder.newest_whole(TracedModel(1, lambda _: PROGRAM.model))
    assert found is not None
    with folder.reading(found.step):
        executor.load(str(found.path))
    assert losses(2, 5) == uninterrupted

    for step in (5, 6):  # in quick succession
        executor.save(str(folder.begin(step)))
        folder.commit(step, records(executor), DataPosition(0, 1), {})
    assert folder.steps() == (2, 5, 6)
    executor.close()


def test_a_save_that_fails_does_not_stop_the_next(placements, tmp_path):
    placement, folder = placements["ONE"], CheckpointFolder(tmp_path)
    (state,) = random_states(placement)
    saver = StageSaver(placement, 0)
    saver.save(folder.begin(1), state)  # never waited for
    blocked = tmp_path / "a file"
    blocked.touch()
    saver.save(blocked, state)
    with pytest.raises(OSError, match="Not a directory"):
        saver.wait()
    saver.save(folder.begin(2), state)
    assert_holds(placement, folder.commit(2, [saver.wait()], DataPosition(0, 1), {}))
    saver.close()


def test_donating_an_array_does_not_change_what_is_saved(placements, tmp_path):
    placement = placements["THREE"]
    overwrite = jax.jit(lambda arrays: [0 * a for a in arrays], donate_argnums=0)
    _, compiled = next(iter(stages_of(placement)))
    state = random_states(placement)[0]
    expected = [np.array(array) for array in state.parameters]
    saver = StageSaver(placement, 0)
    folder = CheckpointFolder(tmp_path)
    target = folder.begin(1)
    saver.save(target, state)
    jax.block_until_ready(overwrite(overwrite(state.parameters)))
    rest = [StageSaver(placement, stage) for stage in (1, 2)]
    for other, state in zip(rest, random_states(placement)[1:], strict=True):
        other.save(target, state)
    path = folder.commit(1, [s.wait() for s in (saver, *rest)], DataPosition(0, 1), {})
    loaded = saver.load(path, compiled)
    for array, before in zip(loaded.parameters, expected, strict=True):
        assert np.asarray(array).tobytes() == before.tobytes()


def test_random_keys_scalars_and_leaves_without_elements(tmp_path):
    parameters = {"w": jnp.ones((4, 2)), "scale": jnp.ones(()), "none": jnp.ones((0, 3))}

    def loss(p, batch):
        return jnp.sum((batch @ p["w"]) ** 2) * p["scale"] + jnp.sum(p["none"])

    program = trace(loss, parameters, jax.ShapeDtypeStruct((SIZE, 4), jnp.float32))
    optimizer = optax.add_noise(0.1, 0.5, jax.random.key(3))
    layout = ((0, program.num_positions), ONE[1])
    placement = make_placement(layout, optimizer, program, parameters)
    ((_, compiled),) = stages_of(placement)
    before = initial_state(placement, 0, 0, compiled, parameters)
    path = save(CheckpointFolder(tmp_path), 1, placement, [before])
    after = StageSaver(placement, 0).load(path, compiled)

    is_key = [jnp.issubdtype(array.dtype, jax.dtypes.prng_key) for array in after.optimizer]
    assert sum(is_key) == 1
    pairs = [*zip(before.parameters, after.parameters, strict=True)]
    pairs += zip(before.optimizer, after.optimizer, strict=True)
    for old, new in pairs:
        assert (old.dtype, old.shape, old.sharding) == (new.dtype, new.shape, new.sharding)
        if jnp.issubdtype(old.dtype, jax.dtypes.prng_key):
            old, new = jax.random.key_data(old), jax.random.key_data(new)
        np.testing.assert_array_equal(old, new)


def test_a_stage_without_state_writes_no_item(tmp_path):
    parameters = {"w": jnp.ones((4, 2))}
    program = trace(
        lambda p, x: jnp.mean(jnp.tanh(x @ p["w"])),
        parameters,
        jax.ShapeDtypeStruct((SIZE, 4), jnp.float32),
    )
    layout = ((0, 1, program.num_positions), TWO[1])
    placement = make_placement(layout, optax.sgd(0.1), program, parameters)
    assert not placement.pipelines.stages[1].parameters
    path = save(CheckpointFolder(tmp_path), 1, placement, random_states(placement))
    assert [entry.name for entry in path.iterdir() if entry.is_dir()] == ["stage_0"]
    for stage, compiled in stages_of(placement):
        state = StageSaver(placement, stage).load(path, compiled)
        assert len(state.parameters) == 1 - stage


def test_leaves_of_another_model_or_optimizer(saved, placements):
    path = saved["ONE"]
    with pytest.raises(CheckpointError, match=r"holds optimizer leaf '1/0/count', which"):
        check_leaves(path, make_placement(ONE, optax.sgd(0.1)).pipelines)
    with pytest.raises(CheckpointError, match=r"has no optimizer leaf '0/0/count'"):
        check_leaves(path, make_placement(ONE, optax.chain(optax.adam(0.1))).pipelines)
    single = optax.chain(optax.clip(1.0), optax.adamw(optax.constant_schedule(0.1)))
    other = make_placement(ONE, single)
    message = r"leaf '1/0/mu/blocks/bias' is \[5, 8\] bfloat16, \[5, 8\] float32 expected"
    with pytest.raises(CheckpointError, match=message):
        check_leaves(path, other.pipelines)
    ((stage, compiled),) = stages_of(other)
    with pytest.raises(CheckpointError, match=message):
        StageSaver(other, stage).load(path, compiled)


def load_and_save(process, port, source, target, told):
    """What each of two processes does that hold one stage together."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, process)
    placement = make_placement(((0, END), ((SubMesh("fast", 0, (1, 4)), (2, 2), "fully_sharded"),)))
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), MESH_AXES)
    compiled = compiled_for(placement, 0, mesh)
    saver = StageSaver(placement, 0)
    saver.save(Path(target), saver.load(Path(source), compiled))
    record = saver.wait()
    assert (record is None) == (process != 0)
    if record is not None:
        Path(told).write_text(json.dumps(asdict(record)))
    saver.close()
    jax.distributed.shutdown()


@pytest.mark.slow
def test_two_processes_that_share_a_stage(placements, saved, tmp_path):
    folder = CheckpointFolder(tmp_path)
    target = folder.begin(9)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    code = "import sys; sys.path.insert(0, sys.argv[1]); import test_checkpoint as t; "
    code += "t.load_and_save(int(sys.argv[2]), *sys.argv[3:])"
    told = tmp_path / "record.json"
    arguments = (port, saved["THREE"], target, told)
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, *map(str, (Path(__file__).parent, i, *arguments))],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    try:
        for process in processes:
            _, errors = process.communicate(timeout=120)
            assert process.returncode == 0, errors
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    record = json.loads(told.read_text())
    parts = tuple(SavedPart(**{**part, "shape": tuple(part["shape"])}) for part in record["parts"])
    files = tuple(SavedFile(**file) for file in record["files"])
    path = folder.commit(9, [StageRecord(record["model"], 1, parts, files)], DataPosition(0, 1), {})
    assert_holds(placements["ONE"], path)
