"""The training state goes between stages of one and of several members, to files and in memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from cases import CLUSTER, examples, random_model, random_plan, trace_model
from execution import gathered_parameters, gathered_state, one_device_steps
from hypothesis import given
from hypothesis import strategies as st
from random_unions import Most, random_union_plan
from small_models import Model, make_batch
from switched_states import NOISY, OPTIMIZER, assert_same

from hetjax import InputError, Trainer
from hetjax.mesh import SubMesh
from hetjax.mesh.hetero import HeteroMesh
from hetjax.pipeline.schedules.warm_up import one_f_one_b
from hetjax.planner.plan.plan import Plan
from hetjax.planner.plan.stage_plan import Member, PipelinePlan, Shares, StagePlan
from hetjax.runtime.checkpoints.checkpoint import StageSaver, check_leaves
from hetjax.runtime.checkpoints.checkpoint_files import CheckpointFolder
from hetjax.runtime.checkpoints.manifest import DataPosition
from hetjax.runtime.compilation.compiled_stage import CompiledStage
from hetjax.runtime.compilation.compiling import put_whole
from hetjax.runtime.compilation.late_sums import typed_mesh
from hetjax.runtime.compilation.state import StageState
from hetjax.runtime.instructions.buffers import OptimizerState, Parameter
from hetjax.runtime.local.local_executor import LocalExecutor
from hetjax.runtime.moves.stage_leaves import StageLeaves
from hetjax.runtime.moves.state_move import StateMove
from hetjax.runtime.moves.state_switch import all_lost, moved_arrays
from hetjax.runtime.workers.job import Job, lay_out
from hetjax.sharding.annotation.rules import MESH_AXES
from hetjax.sharding.resolution.network import Network
from hetjax.sharding.resolution.switch_transfers import plan_switch

NETWORK = Network.of(CLUSTER)


class Held(NamedTuple):
    """What one member of a stage shall have of the state."""

    stage: int
    member: int
    compiled: CompiledStage
    parameters: list[np.ndarray]
    optimizer: list[np.ndarray]


class Laid:
    """A plan, and the same random state as it lies under any plan of a model; nothing compiles."""

    def __init__(self, model: Model, plan: Plan):
        batch = jax.eval_shape(lambda: make_batch(plan.batch_size))
        self.placement = lay_out(Job(model.loss, model.init(), batch, OPTIMIZER, plan))
        members = [
            (stage, place, member)
            for stage, each in enumerate(plan.stages)
            for place, member in enumerate(each.members)
        ]
        submeshes = tuple(member.submesh for *_, member in members)
        union = HeteroMesh.bind(CLUSTER, submeshes, jax.devices())
        meshes = [
            typed_mesh(union.mesh(i, MESH_AXES, member.mesh_shape))
            for i, (*_, member) in enumerate(members)
        ]
        self.held = [
            self._held(stage, place, mesh)
            for (stage, place, _), mesh in zip(members, meshes, strict=True)
        ]

    def _held(self, stage: int, place: int, mesh: Any) -> Held:
        pipelines = self.placement.pipelines
        rng = np.random.default_rng(0)
        wholes = [
            [_random_bits(rng, shape) for shape in shapes]
            for shapes in (pipelines.parameter_shapes, pipelines.state_shapes)
        ]
        parts = pipelines.stages[stage].parameters, pipelines.updates[stage].state
        shardings, arrays = [], []
        for kind, of_kind, leaves in zip((Parameter, OptimizerState), parts, wholes, strict=True):
            lie = self.placement.leaves(stage, kind)
            shardings.append([each.sharding for each in lie.of_member(place, mesh)])
            held = []
            for part, annotation in zip(of_kind, lie.annotations, strict=True):
                array = part.take(leaves[part.leaf])
                region = annotation.regions(array.shape)[place]
                held.append(array[tuple(slice(*ends) for ends in region)])
            arrays.append(held)
        compiled = CompiledStage(mesh, {}, shardings[0], shardings[1], {})
        return Held(stage, place, compiled, arrays[0], arrays[1])

    def states(self) -> list[StageState]:
        return [
            StageState(
                list(map(put_whole, held.parameters, held.compiled.parameters)),
                list(map(put_whole, held.optimizer, held.compiled.state)),
            )
            for held in self.held
        ]

    def leaves(self) -> list[StageLeaves]:
        devices = dict(enumerate(jax.devices()))
        return [
            StageLeaves(self.placement, held.stage, held.compiled, devices, held.member)
            for held in self.held
        ]

    def assert_has(self, states: Sequence[StageState]) -> None:
        for held, state in zip(self.held, states, strict=True):
            _assert_bits(state.parameters, held.parameters, held.compiled.parameters)
            _assert_bits(state.optimizer, held.optimizer, held.compiled.state)


def _random_bits(rng: np.random.Generator, shape: jax.ShapeDtypeStruct) -> np.ndarray:
    if not np.issubdtype(shape.dtype, np.floating):
        return rng.integers(0, 1 << 20, shape.shape).astype(shape.dtype)
    return rng.normal(size=shape.shape).astype(shape.dtype)


def _assert_bits(arrays: Sequence[Any], expected: Sequence[Any], shardings: Sequence[Any]) -> None:
    for array, wanted, sharding in zip(arrays, expected, shardings, strict=True):
        assert array.sharding == sharding
        assert (array.shape, array.dtype) == (wanted.shape, wanted.dtype)
        assert np.asarray(array).tobytes() == wanted.tobytes()


def random_plans(seed: int) -> tuple[Laid, Laid, Laid]:
    """Two plans with stages of several members, and one without, of one model."""
    rng = Random(seed)
    model = random_model(rng)
    plain = random_plan(rng, model, rng.choice([[(2, 4)], [(2, 4), (1, 8)]]))
    unions = [random_union_plan(rng, model, Most(stages=3, cluster=CLUSTER)) for _ in range(2)]
    return Laid(model, unions[0]), Laid(model, plain), Laid(model, unions[1])


def save(folder: CheckpointFolder, step: int, laid: Laid) -> Path:
    """Save a state as an executor would."""
    target = folder.begin(step)
    savers = [StageSaver(laid.placement, held.stage, member=held.member) for held in laid.held]
    for saver, state in zip(savers, laid.states(), strict=True):
        saver.save(target, state)
    records = [saver.wait() for saver in savers]
    for saver in savers:
        saver.close()
    return folder.commit(step, records, DataPosition(0, 1), {})


def load(path: Path, laid: Laid) -> list[StageState]:
    """Load a state as an executor would."""
    check_leaves(path, laid.placement.pipelines)
    return [
        StageSaver(laid.placement, held.stage, member=held.member).load(path, held.compiled)
        for held in laid.held
    ]


@examples(usual=4, full=60)
@given(seed=st.integers(0, 2**32 - 1))
def test_every_bit_comes_back_from_files_whatever_the_members(
    tmp_path_factory: pytest.TempPathFactory, seed: int
):
    plans = random_plans(seed)
    folder = CheckpointFolder(tmp_path_factory.mktemp("saved"))
    for step, source in enumerate(plans, start=1):
        path = save(folder, step, source)
        for target in plans:
            target.assert_has(load(path, target))


@examples(usual=8, full=100)
@given(seed=st.integers(0, 2**32 - 1))
def test_every_bit_moves_between_plans_and_back(seed: int):
    plans = random_plans(seed)
    states = plans[0].states()
    for source, target in zip(plans, (*plans[1:], plans[0]), strict=True):
        states = moved(source, target, states, and_back=True)
        source.assert_has(states)
        states = moved(source, target, states)
        target.assert_has(states)


def moved(
    source: Laid, target: Laid, states: Sequence[StageState], *, and_back: bool = False
) -> list[StageState]:
    """Move a state to another plan; and undo that, where asked for."""
    arrays = moved_arrays(source.placement, target.placement)
    old, new = source.leaves(), target.leaves()
    for leaves, state in zip(old, states, strict=True):
        leaves.fill(state)
    plan = plan_switch(arrays, NETWORK)
    move = StateMove(plan, old, new, jax.devices(), network=NETWORK)
    move.run()
    if and_back:
        move.undo()
    return [leaves.state() for leaves in (old if and_back else new)]


def union_plan(model: Model, *members: Member, batch: tuple[int, ...]) -> Plan:
    """One stage of several members that share 24 examples, in three microbatches."""
    program = trace_model(model, 8)
    stage = StagePlan((0, 1), members, shares=Shares(batch=batch))
    pipeline = PipelinePlan((stage,), 3, 8, one_f_one_b(1, 3))
    return Plan(program.fingerprint, (0, program.num_positions), CLUSTER, (pipeline,))


def whole_state(trainer: Trainer) -> list[np.ndarray]:
    """Every leaf of a trainer's state; what several members have is the same, to the bit."""
    executor = trainer._executor
    assert isinstance(executor, LocalExecutor)
    return [*gathered_parameters(executor), *gathered_state(executor)]


def test_a_run_goes_on_with_other_members_switched_or_resumed(tmp_path: Path):
    # Of tied weights, several stages have copies of optimizer state, and each rounds for itself.
    model = Model(("dense",), tied=False)
    pair = Member(SubMesh("first", 0, (1, 2)), (2, 1))
    one, other = (Member(SubMesh("second", i, (1, 1)), (1, 1)) for i in (0, 3))
    plans = [
        union_plan(model, pair, one, batch=(6, 2)),
        random_plan(Random(0), model, [(6, 4)]),
        union_plan(model, other, one, batch=(3, 5)),
    ]
    batches = [make_batch(24, seed) for seed in range(6)]

    def made(plan: Plan, workdir: Path | None = None) -> Trainer:
        return Trainer(plan, model.loss, model.init(), NOISY, batches[0], workdir=workdir)

    with made(plans[0], tmp_path) as trainer:
        found = [trainer.train_step(batch) for batch in batches[:2]]
        trainer.save()
        for place, plan in enumerate((plans[1], plans[2], plans[0], plans[2])):
            before = whole_state(trainer)
            trainer.switch(plan)
            assert_same(whole_state(trainer), before)
            if place < 2:
                found.append(trainer.train_step(batches[2 + place]))
        trainer.save(wait=True)
        saved = whole_state(trainer)
    with made(plans[1], tmp_path) as trainer:
        assert trainer.resume()
        assert_same(whole_state(trainer), saved)
        found.append(trainer.train_step(batches[4]))
        trainer.save(wait=True)
        saved = whole_state(trainer)
    with made(plans[0], tmp_path) as trainer:
        assert trainer.resume()
        assert_same(whole_state(trainer), saved)
        found.append(trainer.train_step(batches[5]))
    with jax.numpy_dtype_promotion("standard"):
        expected = one_device_steps(model, NOISY, batches)
    curve = [(metrics.loss, metrics.gradient_norm) for metrics in found]
    np.testing.assert_allclose(curve, expected, rtol=1e-5)


def test_what_only_lost_members_have_is_told():
    model = Model(("dense",), tied=False)
    pair = Member(SubMesh("first", 0, (1, 2)), (2, 1))
    one, other = (Member(SubMesh("second", i, (1, 1)), (1, 1)) for i in (0, 3))
    source = Laid(model, union_plan(model, pair, one, batch=(6, 2)))
    target = Laid(model, union_plan(model, one, other, batch=(4, 4)))
    arrays = moved_arrays(source.placement, target.placement)
    with pytest.raises(InputError, match=r"optimizer/.*no device holds"):
        plan_switch(arrays, NETWORK, lost=all_lost({0, 1}, target.placement.plan))
    with pytest.raises(InputError, match=r"the plan to switch to uses devices \[7\]"):
        all_lost({0, 7}, target.placement.plan)
    # What both devices of the pair have, the other one gives.
    plan = plan_switch(arrays, NETWORK, lost=all_lost({0}, target.placement.plan))
    assert not [piece for phase in plan.phases for piece in phase if piece.sender == 0]
