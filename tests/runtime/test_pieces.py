"""Tasks, updates and initial parameters by programs that alike parts of a model share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import CLUSTER, Case, examples, random_cuts, random_pipeline, trace_model
from compilations import counted_compilations
from execution import job_of, running
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from one_device import check_gradients
from small_models import BLOCKS, Model

import hetjax
from hetjax.mesh import Cluster
from hetjax.models import GPTConfig, language_model
from hetjax.pipeline.program.pieces import pieces_of
from hetjax.pipeline.program.stacked_leaves import StackedLeaves, whole_leaves
from hetjax.pipeline.program.tracing import trace
from hetjax.pipeline.stages import traced_stage
from hetjax.pipeline.stages.cutting import ParameterPart
from hetjax.pipeline.update import alike_leaves
from hetjax.pipeline.update.alike_leaves import leafwise_pieces, program_of
from hetjax.pipeline.update.traced_update import trace_update
from hetjax.planner.plan.plan import Plan
from hetjax.runtime.compilation import made_parameters as making
from hetjax.runtime.compilation import partitioners
from hetjax.runtime.compilation.compiling import Argument
from hetjax.runtime.compilation.made_parameters import made_parameters
from hetjax.runtime.compilation.partitioners import MeshPartitioner
from hetjax.runtime.compilation.piecewise_program import PiecewiseProgram


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partitioners, "pieces_of", lambda program: pieces_of(program, 0.0))
    monkeypatch.setattr(
        traced_stage, "pieces_of", lambda program, **given: pieces_of(program, 0.0, **given)
    )
    monkeypatch.setattr(alike_leaves, "_TOGETHER", 4)
    monkeypatch.setattr(alike_leaves, "_FEWEST", 0)


def repeating_case(rng: Random) -> Case:
    """A model of some blocks that are alike, with a random plan."""
    block = rng.choice(sorted(BLOCKS))
    model = Model(blocks=(block,) * rng.randint(4, 6), tied=rng.random() < 0.5)
    layers, held = random_cuts(rng, model, 1, 2)
    pipelines = tuple(random_pipeline(rng, stages, 3) for stages in held)
    program = trace_model(model, pipelines[0].microbatch_size)
    return Case(model, program, Plan(program.fingerprint, layers, CLUSTER, pipelines))


@pytest.mark.usefixtures("small_pieces")
@examples(usual=4, full=60)
@given(number=st.integers(0, 2**32 - 1))
def test_programs_in_pieces_give_the_gradients_of_one_device(number: int):
    check_gradients(repeating_case(Random(number)))


def one_stage_programs(blocks: int) -> dict[str, PiecewiseProgram]:
    """The programs in pieces of a GPT in one stage."""
    model = Model(blocks=("attention",) * blocks)
    rng = Random(0)
    layers, ((stage, *_),) = (
        (0, trace_model(model, 1).num_positions),
        random_cuts(rng, model, 1, 1)[1],
    )
    pipeline = random_pipeline(rng, [stage], 2)
    program = trace_model(model, pipeline.microbatch_size)
    case = Case(model, program, Plan(program.fingerprint, layers, CLUSTER, (pipeline,)))
    with running(job_of(case, optax.adam(1e-3))) as executor:
        found = executor.workers[0].compiled.programs
        return {name: p for name, p in found.items() if isinstance(p, PiecewiseProgram)}


@pytest.mark.usefixtures("small_pieces")
def test_a_deeper_model_compiles_no_more_programs():
    # Of both the leaves that are alike come out even, as calls of three.
    few, many = ({n: p.num_compiled for n, p in one_stage_programs(b).items()} for b in (8, 14))
    assert {"forward", "backward"} <= few.keys()
    assert few == many


@pytest.mark.parametrize("scanned", [False, True])
def test_parameters_that_are_made_alike_are_those_of_one_program(
    monkeypatch: pytest.MonkeyPatch, scanned: bool
):
    compiled: list[int] = []
    compile_leaf = making._compiled
    monkeypatch.setattr(
        making, "_compiled", lambda *given: compiled.append(0) or compile_leaf(*given)
    )
    model = language_model(
        GPTConfig(vocabulary=16, blocks=4, width=8, heads=2, sequence=4, scan_blocks=scanned)
    )

    def init() -> object:
        return model.init(jax.random.key(3))

    made = jax.tree.leaves(jax.jit(init)())
    leaves = trace(
        model.loss, model.parameter_shapes, {"tokens": np.zeros((1, 5), np.int32)}
    ).leaves
    expected = leaves.split(made)
    assert (len(expected) > len(made)) == scanned
    whole = NamedSharding(Mesh(np.array(jax.devices()[:1]), ("d",)), PartitionSpec())
    parts = [ParameterPart(leaf) for leaf in range(len(expected))]
    found = made_parameters(init, parts, [whole] * len(parts), leaves)
    assert len(compiled) < len(parts) / 3
    for ours, theirs in zip(found, expected, strict=True):
        # Two programs may round a product of constants differently in its last bit.
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def test_parameters_that_are_drawn_together_are_drawn_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(making, "_SMALL", 8)

    def init() -> object:
        drawn = jnp.tanh(jax.random.normal(jax.random.key(0), (6, 4)))
        return [*drawn, jnp.ones(3), np.arange(2.0, dtype=np.float32)]

    whole = NamedSharding(Mesh(np.array(jax.devices()[:1]), ("d",)), PartitionSpec())
    found = made_parameters(
        init, [ParameterPart(leaf) for leaf in range(8)], [whole] * 8, whole_leaves(8)
    )
    for ours, theirs in zip(found, jax.tree.leaves(jax.jit(init)()), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_rows_are_those_of_their_leaf_however_it_is_drawn():
    def init() -> dict[str, jax.Array]:
        keys = jax.random.split(jax.random.key(0), 3)
        together = jax.random.normal(keys[0], (3, 4, 4))
        return {
            "each": jax.vmap(lambda key: 0.1 * jax.random.normal(key, (4, 2)))(keys),
            "mixed": jnp.cumsum(together[:, 0], axis=0),
            "repeated": jnp.broadcast_to(jnp.arange(5.0), (3, 5)),
            "together": together,
        }

    leaves = StackedLeaves((3, 3, 3, 3))
    whole = NamedSharding(Mesh(np.array(jax.devices()[:1]), ("d",)), PartitionSpec())
    parts = [ParameterPart(place) for place in range(1, 12)]
    found = made_parameters(init, parts, [whole] * len(parts), leaves)
    expected = leaves.split(jax.tree.leaves(jax.jit(init)()))
    for ours, theirs in zip(found, expected[1:], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


@pytest.mark.usefixtures("small_pieces")
def test_updates_pass_arguments_on_and_make_what_reads_none_on_their_own_devices():
    mesh = Mesh(np.array(jax.devices()[2:4]), ("d",))
    rows = NamedSharding(mesh, PartitionSpec("d"))

    def update(leaves: Sequence[Any], state: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        scale = jnp.exp(jnp.float32(2))
        norm = sum(jnp.sum(leaf * first) for leaf, first in zip(leaves, state, strict=True))
        new = [leaf + scale / norm * first for leaf, first in zip(leaves, state, strict=True)]
        return new, list(state)

    shapes = [jax.ShapeDtypeStruct((4,), jnp.float32)] * 3
    arguments = [Argument(shapes, [rows] * 3, donated=True) for _ in range(2)]
    program, _ = program_of(update, [shapes, shapes])
    pieces = leafwise_pieces(program)[1]
    assert pieces
    assert all(piece.reads for piece in pieces)
    compiled = MeshPartitioner(mesh).update(update, arguments, ([rows] * 3, [rows] * 3))
    assert isinstance(compiled, PiecewiseProgram)
    leaves, state = ([jnp.arange(4.0) + i for i in range(k, k + 3)] for k in (1, 2))
    expected = update(*update(leaves, state))
    held = [[jax.device_put(each, rows) for each in part] for part in (leaves, state)]
    for _ in range(2):
        (found,) = compiled(*held)
        held = [found[:3], found[3:]]
    for ours, theirs in zip(jax.tree.leaves(held), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


@dataclass
class Asked:
    """A model of so many blocks alike, and how often Python went through each of its parts."""

    blocks: int
    calls: Counter[str] = field(default_factory=Counter)

    def init(self) -> list[dict[str, jax.Array]]:
        self.calls["init"] += 1
        keys = jax.random.split(jax.random.key(0), self.blocks)
        return [{"w": jax.random.normal(key, (4, 4)) / 4, "b": jnp.zeros(4)} for key in keys]

    def loss(self, parameters: list[dict[str, jax.Array]], x: jax.Array) -> jax.Array:
        self.calls["loss"] += 1
        for block in parameters:
            x = x + jnp.tanh(x @ block["w"] + block["b"])
        return jnp.mean(x**2)

    def optimizer(self) -> optax.GradientTransformation:
        given = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))

        def update(updates: Any, state: Any, params: Any = None) -> Any:
            self.calls["update"] += 1
            return given.update(updates, state, params)

        return optax.GradientTransformation(given.init, update)


def test_who_plans_and_trains_goes_through_a_model_once():
    model, batch = Asked(2), jnp.ones((4, 4))
    # Functions that live on, as those of a user do: JAX keeps traces as long.
    loss, init, optimizer = model.loss, model.init, model.optimizer()
    cluster = Cluster.local(jax.devices()[:1])
    plan = hetjax.plan(loss, init, batch, cluster=cluster, optimizer=optimizer, num_microbatches=2)
    with hetjax.Trainer(plan, loss, init, optimizer, batch) as trainer:
        trainer.train_step(batch)
    assert model.calls == {"init": 1, "loss": 1, "update": 1}


def test_more_blocks_are_made_by_no_more_programs():
    whole = NamedSharding(Mesh(jax.devices()[:1], "devices"), PartitionSpec())

    def compiled(blocks: int) -> int:
        leaves = range(2 * blocks)
        with counted_compilations() as counter:
            made_parameters(
                Asked(blocks).init,
                [*map(ParameterPart, leaves)],
                [whole] * len(leaves),
                whole_leaves(len(leaves)),
            )
        return sum("backend_compile" in event for event in counter.seen)

    compiled(4)  # What depends on no number of blocks.
    assert compiled(5) == compiled(9) > 0


def test_an_update_squares_gradients_once_for_its_norm_and_for_what_it_clips_by():
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
    shapes = [jax.ShapeDtypeStruct((4, 4), jnp.float32)] * 3
    flat = trace_update(optimizer, shapes, list)
    assert sum(step.name == "reduce_sum" for step in flat.steps) == 3
    assert sum(step.name == "sqrt" for step in flat.steps) == 1
