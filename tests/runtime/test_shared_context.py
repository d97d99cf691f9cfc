"""Stages that share the context train as one device does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from context_jobs import (
    JOB,
    LENGTH,
    MICROBATCHES,
    QUERY_HEADS,
    SIZE,
    WIDTH,
    Tokens,
    context_plan,
    dense,
    in_chunks,
    loss,
    one_device_losses,
    scanned,
    split_of,
    stacked,
    written_out,
)
from one_device import TOLERANCE
from ray_jobs import RUNTIMES

import hetjax
from hetjax import Trainer
from hetjax.errors import InputError
from hetjax.mesh import Cluster, Subcluster, SubMesh
from hetjax.planner import Member, Share, Shares
from hetjax.planner.plan.plan import Plan, validate
from hetjax.runtime.instructions.buffers import OptimizerState, Parameter
from hetjax.runtime.workers.instruction_run import InstructionRun
from hetjax.runtime.workers.job import Job, build

UNEVEN = split_of(((7, (0, 4)), (5, (4, 6))), ((8, (0, 6)),))
"""Two members with unlike tokens and heads, whose heads divide a head of keys, and one beside."""
RING = split_of(((13, (0, 6)),), ((7, (0, 6)),))
EXCHANGE = split_of(((17, (2, 6)), (3, (0, 2))))


def losses(runtime: str, plan: Plan, steps: int = 3) -> list[float]:
    with Trainer(**JOB, plan=plan, runtime=RUNTIMES[runtime]) as trainer:
        return [trainer.train_step().loss for _ in range(steps)]


@pytest.mark.parametrize(
    ("splits", "changes"),
    [((UNEVEN,), {"recompute_layers": ((0, 1),)}), ((RING, EXCHANGE), {"recompute": True})],
    ids=["made again layer by layer", "pipeline, recomputed"],
)
def test_it_trains_as_one_device_does(splits: Any, changes: dict[str, Any], tmp_path: Path):
    context_plan(*splits, **changes).save(tmp_path / "plan.json")
    plan = Plan.load(tmp_path / "plan.json")
    np.testing.assert_allclose(losses("local", plan), one_device_losses(3), rtol=TOLERANCE)


def test_members_on_processors_run_their_programs_one_by_one(monkeypatch: pytest.MonkeyPatch):
    """A program that ran beside another one would be done later than what others wait for."""
    left: list[bool] = []
    compute = InstructionRun.compute

    def watched(run: Any, instruction: Any) -> None:
        left.extend(not each.is_deleted() and not each.is_ready() for each in run.latest)
        compute(run, instruction)

    monkeypatch.setattr(InstructionRun, "compute", watched)
    losses("local", context_plan(RING), steps=2)
    assert left
    assert not any(left)


def held_by_members(trainer: Trainer, kind: Any) -> list[list[np.ndarray]]:
    """What each member of the only stage has of a kind of buffer."""
    executor: Any = trainer._executor
    return [
        [
            np.asarray(each.buffers[name])
            for name in sorted(n for n in each.buffers if type(n) is kind)
        ]
        for each in executor.workers
    ]


def num_bytes(arrays: list[np.ndarray]) -> int:
    return sum(each.nbytes for each in arrays)


def on_unlike_hosts(plan: Plan) -> Plan:
    """A plan of two members, of which the second has three times the memory of the first."""
    (host,), link = plan.cluster.subclusters, plan.cluster.subclusters[0].inter_node
    kind = replace(host.kind, name="large", memory_bytes=3 * host.kind.memory_bytes)
    large = Subcluster("large", kind, 1, 1, link, link)
    cluster = Cluster("two", (replace(host, nodes=1), large), links=((host.name, "large", link),))
    first, _ = plan.stages[0].members
    second = Member(SubMesh("large", 0, (1, 1)), (1, 1))
    return replace(with_stage(plan, 0, members=(first, second)), cluster=cluster)


def test_losses_come_in_chunks_and_the_update_is_divided_by_memory():
    job, plan = {**JOB, "loss_function": in_chunks}, context_plan(RING, function=in_chunks)
    with Trainer(**job, plan=on_unlike_hosts(plan)) as trainer:
        found = [trainer.train_step().loss for _ in range(2)]
        first, second = held_by_members(trainer, Parameter)
        states = [num_bytes(each) for each in held_by_members(trainer, OptimizerState)]
    np.testing.assert_allclose(found, one_device_losses(2), rtol=TOLERANCE)
    # Every member has the same bits.
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    # Two moments of each parameter, and a counter; rows are not cut.
    assert sum(states) == pytest.approx(2 * num_bytes(first), rel=1e-3)
    assert states[0] / sum(states) == pytest.approx(1 / 4, abs=0.02)


def test_parameters_may_be_divided_unlike_the_tokens():
    """Each is gathered before it is used; here the member with fewer tokens has more of all."""
    leaves = jax.tree_util.tree_leaves_with_path(JOB["parameters"]())
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
    parts = {
        name: Share(0, (len(leaf) // 3, len(leaf) - len(leaf) // 3))
        for name, (_, leaf) in zip(names, leaves, strict=True)
    }
    shares = Shares(context=RING, parameters=parts)
    with Trainer(**JOB, plan=context_plan(RING, shares=shares)) as trainer:
        found = [trainer.train_step().loss for _ in range(2)]
        for kind in (Parameter, OptimizerState):
            first, second = map(num_bytes, held_by_members(trainer, kind))
            assert first / (first + second) == pytest.approx(1 / 3, abs=0.02)
    np.testing.assert_allclose(found, one_device_losses(2), rtol=TOLERANCE)


def test_attention_that_is_written_out_becomes_a_ring():
    # There keys are repeated for every query head before they are used.
    plan = context_plan(replace(RING, key_value_heads=QUERY_HEADS), function=written_out)
    with Trainer(**{**JOB, "loss_function": written_out}, plan=plan) as trainer:
        found = [trainer.train_step().loss for _ in range(2)]
    np.testing.assert_allclose(found, one_device_losses(2), rtol=TOLERANCE)


def test_blocks_that_are_scanned_over_share_the_context():
    plan = context_plan(RING, function=scanned, parameters=stacked)
    job = {**JOB, "loss_function": scanned, "parameters": stacked}
    with Trainer(**job, plan=plan) as trainer:
        found = [trainer.train_step().loss for _ in range(2)]
    np.testing.assert_allclose(found, one_device_losses(2), rtol=TOLERANCE)


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_on_ray_it_computes_what_one_process_does():
    plan = context_plan(UNEVEN)
    assert losses("ray", plan) == losses("local", plan)


def with_stage(plan: Plan, stage: int, **changes: Any) -> Plan:
    stages = list(plan.stages)
    stages[stage] = replace(stages[stage], **changes)
    return plan.with_stages(stages)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: with_stage(context_plan(RING, EXCHANGE), 1, shares=Shares()),
            r"stages\[1\].shares.context is not given, and that of another stage is",
        ),
        (
            lambda: with_stage(context_plan(RING), 0, shares=Shares(batch=(1, 1), context=RING)),
            r"shares.context is given beside shares.batch \[1, 1\]",
        ),
        (
            lambda: with_stage(context_plan(UNEVEN), 0, shares=Shares(context=RING)),
            r"groups have the devices \[0, 1\]; allowed: .* \[0, 1, 2\]",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(make: Any, message: str):
    with pytest.raises(InputError, match=message):
        validate(make())


def test_a_split_of_another_model_is_refused():
    longer = replace(
        RING, length=LENGTH + 1, groups=(replace(RING.groups[0], tokens=(14,)), RING.groups[1])
    )
    arguments = {name: each for name, each in JOB.items() if name != "source"}
    message = rf"shares.context.length is {LENGTH + 1}, and the model's attentions have {LENGTH}"
    with pytest.raises(InputError, match=message):
        build(Job(**arguments, plan=context_plan(longer)))


def test_keys_go_round_in_both_passes_while_members_compute():
    arguments = {name: each for name, each in JOB.items() if name != "source"}
    programs = build(Job(**arguments, plan=context_plan(RING))).divided[0]
    for name in ("forward", "backward"):
        steps = cast(Any, programs[name].steps)
        early = [i for i in programs[name].moves if steps[i].moves[0].is_early]
        # Of two blocks keys and values go one turn, and backward their gradients another one.
        assert len(early) == {"forward": 2, "backward": 4}[name]
        for place in early[:1]:
            first = steps[place].moves[0].output
            member = steps[place + 1].submesh
            own, *others = [s for s in steps[place + 1 :] if getattr(s, "submesh", 0) == member]
            assert first not in own.inputs
            assert first in others[0].inputs


DECAY = np.float32(0.9) ** np.abs(np.arange(LENGTH)[:, None] - np.arange(LENGTH, dtype=np.float32))


def mixed(parameters: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    """The loss of a model that mixes values by how far apart their tokens are."""

    def near(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        value = jnp.einsum("st,bthd->bshd", DECAY, value)
        return hetjax.attention(query, key, value, causal=True)

    return loss(parameters, batch, near)


def test_what_mixes_tokens_is_in_their_order_along_both_dimensions():
    job = {**JOB, "loss_function": mixed}
    with Trainer(**job, plan=context_plan(RING, function=mixed)) as trainer:
        found = [trainer.train_step().loss for _ in range(2)]
    assert found == pytest.approx(one_device_losses(2, mixed), rel=TOLERANCE)


def with_softmaxes(parameters: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    """The loss of a model with softmaxes that are no attention beside one that is written out."""
    block, table = parameters["blocks"][0], parameters["embedding"]
    size = WIDTH // QUERY_HEADS
    keys, experts = block["up"][:size, :3], block["out"].reshape(size, -1, size)[:, :3]

    def among(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        y = dense(query, key, value)
        gates = jax.nn.softmax(y @ keys)
        y += jnp.einsum("bthe,bthed->bthd", gates, jnp.einsum("bthc,ced->bthed", y, experts))
        y += jax.nn.softmax(y @ keys) @ keys.T
        of_heads = jax.nn.softmax(jnp.einsum("bthd,d->bth", y, keys[:, 0]), axis=-1)
        y *= 1 + of_heads[..., None]
        places = jax.nn.softmax(jnp.einsum("bthd,d->bth", y, keys[:, 1]), axis=1)
        y += jnp.einsum("bth,bthd->bhd", places, y)[:, None]
        x = y.reshape(*y.shape[:2], -1)
        return y + (jax.nn.softmax(x @ table.T) @ table).reshape(y.shape)

    return loss(parameters, batch, among)


def test_softmaxes_of_each_token_alone_and_sums_over_tokens_are_no_attention():
    job = {**JOB, "loss_function": with_softmaxes}
    plan = context_plan(replace(RING, key_value_heads=QUERY_HEADS), function=with_softmaxes)
    with Trainer(**job, plan=plan) as trainer:
        found = [trainer.train_step().loss for _ in range(2)]
    assert found == pytest.approx(one_device_losses(2, with_softmaxes), rel=TOLERANCE)


Segments = Callable[[Any], Any]
CONSTANT = np.repeat(np.arange(4, dtype=np.int32), LENGTH // 4)
SEGMENTS: dict[str, Segments] = {
    "a leaf": lambda batch: batch["segments"],
    "of a leaf": lambda batch: batch["segments"] * 2,
    "a sum along tokens": lambda batch: jnp.cumsum(batch["starts"], 1),
    "a constant": lambda batch: jnp.broadcast_to(CONSTANT, batch["segments"].shape),
}


def packed(parameters: Any, batch: Any, segments: Segments) -> tuple[jax.Array, jax.Array]:
    """The loss of sequences that hold several texts, which do not see each other."""
    ids = segments(batch)

    def within(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return hetjax.attention(query, key, value, causal=True, segment_ids=ids)

    return loss(parameters, batch, within)


@pytest.mark.parametrize("name", SEGMENTS)
def test_segments_lie_as_tokens_do_wherever_they_come_from(name: str):
    function = partial(packed, segments=SEGMENTS[name])
    rng = np.random.default_rng(0)
    starts = (rng.random((MICROBATCHES * SIZE, LENGTH)) < 0.3).astype(np.int32)
    segments = np.cumsum(starts, axis=1, dtype=np.int32)
    batch = {**Tokens().batch(0, MICROBATCHES * SIZE), "segments": segments, "starts": starts}
    total, count = jax.jit(function)(JOB["parameters"](), batch)
    job = {**JOB, "loss_function": function, "batch": batch, "source": None}
    plan = context_plan(RING, function=function, batch=batch)
    with Trainer(**job, plan=plan) as trainer:
        found = trainer.train_step(batch).loss
    assert found == pytest.approx(float(total / count), rel=TOLERANCE)
