"""Synthesised programs: whatever members compute and move, it is the loss of one device."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from bench_hap import STATE
from cases import CLUSTER, Case, examples
from execution import job_of, one_device_steps, running, train
from hypothesis import given
from hypothesis import strategies as st
from one_device import check_gradients, float64, tolerance_of
from random_programs import (
    chain_of_program,
    random_pipeline_case,
    random_program_case,
    random_stage,
)
from random_unions import HOSTS
from ray_jobs import RUNTIMES
from small_models import make_batch

from hetjax import Trainer
from hetjax.mesh import Link, SubMesh
from hetjax.pipeline.program.tracing import trace
from hetjax.pipeline.schedules.warm_up import one_f_one_b
from hetjax.planner import HapPlanner, Member, PipelinePlan, Plan, plan
from hetjax.planner.hap.chain_search import ChainSearch
from hetjax.planner.hap.forced import COLUMNS, DATA_PARALLEL, GATHERED_FACTORS, ROWS, Forced
from hetjax.planner.hap.synthesis import synthesise_at
from hetjax.planner.hap.writing import shares_of
from hetjax.planner.module_programs.rates import DirectNetwork, MemberSpeed, Rates
from hetjax.planner.module_programs.reading import read_programs
from hetjax.planner.plan.module_shares import Share
from hetjax.planner.plan.stage_plan import StagePlan

NUMBERS = st.integers(0, 2**32 - 1)
MEMBERS = (
    Member(SubMesh("first", 0, (1, 1)), (1, 1)),
    Member(SubMesh("second", 0, (1, 2)), (2, 1)),
)
RATES = Rates(
    (MemberSpeed(1e9, 1e9, 1e9), MemberSpeed(2e9, 1e9, 1e9)), DirectNetwork((1e8, 1e8), 1e-5)
)
CLIPPED = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2, eps=1e-5))


@pytest.mark.parametrize("part", range(3))
@examples(usual=1, full=70)
@given(number=NUMBERS)
def test_random_programs_give_the_loss_and_gradients_of_one_device(part: int, number: int):
    check_gradients(random_program_case(Random(3 * number + part)), evaluates=True)


@examples(usual=2, full=100)
@given(number=NUMBERS)
def test_pipelines_that_end_in_a_program_give_the_gradients_of_one_device(number: int):
    check_gradients(random_pipeline_case(Random(number)), evaluates=True)


@examples(usual=1, full=50)
@given(number=NUMBERS)
def test_in_float64_they_do_to_twelve_digits(number: int):
    with float64():
        check_gradients(random_program_case(Random(number), double=True), evaluates=True)


@examples(usual=1, full=200)
@given(number=NUMBERS)
def test_clipped_updates_and_steps_are_those_of_one_device(number: int):
    """In float64: Adam makes much of the last bits, by which one in 200 differs in float32."""
    with float64():
        case = random_program_case(Random(number), double=True)
        batches = [make_batch(case.plan.batch_size, seed) for seed in range(5)]
        with running(job_of(case, CLIPPED)) as executor:
            found = train(executor, batches)
        with jax.numpy_dtype_promotion("standard"):
            expected = one_device_steps(case.model, CLIPPED, batches)
    np.testing.assert_allclose(found, expected, rtol=tolerance_of(case.model))


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
@examples(usual=1, full=20)
@given(number=NUMBERS)
def test_random_programs_compute_on_ray_what_they_do_in_one_process(number: int):
    case = on_hosts(random_program_case(Random(number)))
    batches = [make_batch(case.plan.batch_size, seed) for seed in range(3)]
    found = {}
    for name, runtime in RUNTIMES.items():
        with Trainer(
            plan=case.plan,
            loss_function=case.model.loss,
            parameters=case.model.init,
            optimizer=CLIPPED,
            batch=batches[0],
            runtime=runtime,
        ) as trainer:
            losses = [trainer.train_step(batch).loss for batch in batches]
            found[name] = losses, jax.tree.map(np.asarray, trainer.parameters())
    assert found["ray"][0] == found["local"][0]
    jax.tree.map(np.testing.assert_array_equal, found["ray"][1], found["local"][1])


def on_hosts(case: Case) -> Case:
    """The same on hosts' cores."""
    return replace(case, plan=replace(case.plan, cluster=HOSTS))


def transformer(parameters: Any, batch: Any) -> Any:
    """A block with norms last on embedded positions: the mean loss."""

    def norm(x: Any, scale: Any, bias: Any) -> Any:
        centred = x - x.mean(-1, keepdims=True)
        return centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-3) * scale + bias

    p = parameters
    x = p["tokens"][batch["tokens"]] + p["positions"]
    heads = x.reshape(*x.shape[:2], 2, 4)
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", heads, heads), -1)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, heads).reshape(x.shape)
    x = norm(x + mixed @ p["out"], p["scale"], p["bias"])
    x = norm(x + jax.nn.relu(x @ p["up"]) @ p["down"], p["scale2"], p["bias2"])
    scores = jax.nn.log_softmax(x @ p["head"])
    chosen = jax.nn.one_hot(batch["labels"], scores.shape[-1])
    return -jnp.mean(jnp.sum(scores * chosen, -1))


def transformer_parts() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    shapes = {
        "tokens": (11, 8),
        "positions": (1, 6, 8),
        "out": (8, 8),
        "up": (8, 16),
        "down": (16, 8),
        "head": (8, 11),
    }
    parameters = {
        name: (0.5 * rng.normal(size=shape)).astype(np.float32) for name, shape in shapes.items()
    }
    for name in ("scale", "bias", "scale2", "bias2"):
        parameters[name] = (1 + 0.3 * rng.normal(size=8)).astype(np.float32)
    batch = {name: rng.integers(0, 11, (12, 6), np.int32) for name in ("tokens", "labels")}
    return parameters, batch


def transformer_plan(forced: Forced | None, ratios: tuple[float, float]) -> Plan:
    parameters, batch = transformer_parts()
    program = trace(transformer, parameters, batch)
    chain = chain_of_program(program, 12)
    search = ChainSearch(chain, STATE).among(forced)
    found = synthesise_at(search, RATES, np.array(ratios))
    shares = shares_of(chain, search.dimensions, found, MEMBERS, RATES)
    stage = StagePlan((0, 1), MEMBERS, shares=shares)
    pipeline = PipelinePlan((stage,), 1, 12, one_f_one_b(1, 1))
    return Plan(program.fingerprint, (0, program.num_positions), CLUSTER, (pipeline,))


@pytest.mark.parametrize("ratios", [(0.5, 0.5), (0.34, 0.66), (0.0, 1.0)])
@pytest.mark.parametrize(
    "forced",
    [DATA_PARALLEL, COLUMNS, ROWS, GATHERED_FACTORS, None],
    ids=lambda forced: forced.name if forced else "best",
)
def test_positions_norms_and_clipping_are_those_of_one_device(
    forced: Forced | None, ratios: tuple[float, float]
):
    """What the published code gets wrong: the gradient of the position embedding is not summed,
    norms lose scale, bias and epsilon, and each rank clips by its own norm."""
    parameters, batch = transformer_parts()
    plan = transformer_plan(forced, ratios)
    with Trainer(plan, transformer, parameters, CLIPPED, batch) as trainer:
        found = [trainer.train_step(batch).loss for _ in range(5)]
        trained: Any = jax.tree.map(np.asarray, trainer.parameters())
    with jax.numpy_dtype_promotion("standard"):
        state = CLIPPED.init(parameters)
        step = jax.jit(jax.value_and_grad(transformer))
        expected = []
        for _ in range(5):
            value, gradients = step(parameters, batch)
            updates, state = CLIPPED.update(gradients, state, parameters)
            applied: Any = optax.apply_updates(parameters, updates)
            parameters = applied
            expected.append(float(value))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    for name, leaf in trained.items():
        expected_leaf = np.asarray(parameters[name])
        np.testing.assert_allclose(leaf, expected_leaf, rtol=1e-4, atol=1e-5, err_msg=name)


@examples(usual=10)
@given(number=NUMBERS)
def test_a_plan_reads_as_the_program_that_was_written(number: int):
    rng = Random(number)
    parameters, batch = transformer_parts()
    chain = chain_of_program(trace(transformer, parameters, batch), 12)
    stage = random_stage(rng, chain, MEMBERS)
    read = read_programs(chain, stage.shares, 2, "shares")
    stored = {
        chain.program.parameter_names[part.leaf]: each
        for module, program in zip(chain.modules, read.programs, strict=True)
        for part, each in zip(module.parameters, program.stored, strict=True)
    }
    for name, share in stage.shares.parameters.items():
        assert stored[name].layout == share.dimension
    told = {
        (each.equation, each.operand) for module in stage.shares.modules for each in module.operands
    }
    assert told >= {key for program in read.programs for key in program.operand_layouts}


def losses_of_one_device(loss: Any, parameters: Any, batch: Any) -> list[float]:
    """Four steps of gradient descent, by hand."""
    expected = []
    held: Any = parameters
    for _ in range(4):
        value, gradients = jax.jit(jax.value_and_grad(loss))(held, batch)
        held = jax.tree.map(lambda p, g: p - np.float32(0.1) * g, held, gradients)
        expected.append(float(value))
    return expected


VOCABULARY = 1536


def language_model(parameters: Any, batch: Any) -> Any:
    """A language model whose head is most of the work: the mean loss."""
    x = jnp.tanh(parameters["embedding"][batch["tokens"]] @ parameters["hidden"])
    scores = jax.nn.log_softmax(x @ parameters["head"] + parameters["bias"])
    chosen = jax.nn.one_hot(batch["labels"], VOCABULARY)
    return -jnp.mean(jnp.sum(scores * chosen, -1))


@pytest.mark.parametrize("is_last", [False, True], ids=["alone", "last of two stages"])
def test_a_head_is_divided_by_the_vocabulary_up_to_the_loss(is_last: bool):
    """Logits stay where they are: what crosses is their maxima, sums, and the gradient of what the
    head reads, a sum that the stage before may get."""
    rng = np.random.default_rng(0)
    shapes = {
        "embedding": (11, 8),
        "hidden": (8, 8),
        "head": (8, VOCABULARY),
        "bias": (VOCABULARY,),
    }
    parameters = {
        name: (0.3 * rng.normal(size=shape)).astype("f4") for name, shape in shapes.items()
    }
    batch = {
        "tokens": rng.integers(0, 11, (12, 6), np.int32),
        "labels": rng.integers(0, VOCABULARY, (12, 6), np.int32),
    }
    program = trace(language_model, parameters, batch)
    head = next(i for i, step in enumerate(program.steps) if step.name == "tanh") + 1
    start = head if is_last else 0
    chain = chain_of_program(program, 12, start)
    slow = Rates(RATES.members, DirectNetwork((1e6, 1e6), 1e-5))
    search = ChainSearch(chain, STATE).among(COLUMNS)
    found = synthesise_at(search, slow, np.array([0.25, 0.75]))
    members = (
        MEMBERS
        if not is_last
        else tuple(Member(SubMesh("second", place, (1, 1)), (1, 1)) for place in range(2))
    )
    shares = shares_of(chain, search.dimensions, found, members, slow)
    assert shares.parameters["head"] == Share(1, (384, 1152))
    moved = max(each.move.num_bytes for program in found.program.modules for each in program.moves)
    assert moved < 12 * 6 * VOCABULARY * 4 / 8
    first = int(is_last)
    stages = [StagePlan((first, 1 + first), members, shares=shares)]
    boundaries = [0, program.num_positions]
    if is_last:
        stages.insert(0, StagePlan((0, 1), MEMBERS[:1]))
        boundaries.insert(1, start)
        # What the first stage gets is a sum over the members, and is charged for.
        assert found.program.modules[0].gives_back is not None
        read = read_programs(chain, shares, 2, "shares")
        assert read.programs[0].gives_back == found.program.modules[0].gives_back
        moves = [
            [(each.value, each.before, each.after) for each in program.moves]
            for program in (read.programs[0], found.program.modules[0])
        ]
        assert moves[0] == moves[1]
    schedule = one_f_one_b(len(stages), 1)
    made = Plan(
        program.fingerprint,
        tuple(boundaries),
        CLUSTER,
        (PipelinePlan(tuple(stages), 1, 12, schedule),),
    )
    optimizer = optax.sgd(0.1)
    with Trainer(made, language_model, parameters, optimizer, batch) as trainer:
        losses = [trainer.train_step(batch).loss for _ in range(4)]
    expected = losses_of_one_device(language_model, parameters, batch)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


def recurrent(parameters: Any, batch: Any) -> Any:
    """A recurrent network over time, whose first module only turns the batch around."""
    p = parameters

    def cell(carry: Any, x: Any) -> tuple[Any, Any]:
        hidden, memory = carry
        gates = jnp.split(x @ p["in"] + hidden @ p["again"], 4, -1)
        i, f, o, g = (jax.nn.sigmoid(gate) for gate in gates)
        memory = f * memory + i * jnp.tanh(g)
        hidden = o * jnp.tanh(memory)
        return (hidden, memory), hidden

    zeros = jnp.zeros((batch["x"].shape[0], 8))
    _, made = jax.lax.scan(cell, (zeros, zeros), batch["x"].swapaxes(0, 1))
    return jnp.mean((jnp.swapaxes(made @ p["out"], 0, 1)[..., 0] - batch["y"]) ** 2)


def mixture(parameters: Any, batch: Any) -> Any:
    """Three experts of which each example takes two."""
    x, p = batch["x"], parameters
    top, chosen = jax.lax.top_k(jax.nn.softmax(x @ p["route"]), 2)
    weights = jnp.sum(jax.nn.one_hot(chosen, 3) * top[..., None], 1)
    hidden = jax.nn.relu(jnp.einsum("bw,ewh->beh", x, p["up"]))
    return jnp.mean((jnp.einsum("beh,ehw,be->bw", hidden, p["down"], weights) - batch["y"]) ** 2)


def draw(*shape: int) -> np.ndarray:
    return (0.3 * np.random.default_rng(len(shape)).normal(size=shape)).astype(np.float32)


FOREIGN = {
    "recurrent": (
        recurrent,
        {"in": draw(6, 32), "again": draw(8, 32), "out": draw(8, 1)},
        {"x": draw(12, 5, 6), "y": draw(12, 5)},
    ),
    "mixture": (
        mixture,
        {"route": draw(8, 3), "up": draw(3, 8, 16), "down": draw(3, 16, 8)},
        {"x": draw(12, 8), "y": draw(12, 8)},
    ),
}


@pytest.mark.parametrize("name", FOREIGN)
@pytest.mark.parametrize("bandwidth", [1e6, 1e10])
def test_models_of_others_train_as_on_one_device(name: str, bandwidth: float):
    loss, parameters, batch = FOREIGN[name]
    slow = Link(bandwidth, 1e-5)
    cluster = replace(CLUSTER, links=(("first", "second", slow),))
    optimizer = optax.sgd(0.1)
    made = plan(
        loss,
        parameters,
        batch,
        cluster=cluster,
        optimizer=optimizer,
        num_microbatches=1,
        planner=HapPlanner(),
    )
    with Trainer(made, loss, parameters, optimizer, batch) as trainer:
        found = [trainer.train_step(batch).loss for _ in range(4)]
    expected = losses_of_one_device(loss, parameters, batch)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
