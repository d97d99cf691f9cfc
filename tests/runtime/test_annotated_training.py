"""Plans of annotations train: the losses of one device, whatever the annotations say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import CLUSTER, examples
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from one_device import TOLERANCE

import hetjax
from hetjax import HSharding, Plan, Subgroup, Trainer, reshard

EXAMPLES, MICROBATCHES, WIDTH, HIDDEN = 12, 2, 6, 12
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))

PAIR = Subgroup((0, 1), (("x", 2),), P())
THIRD = Subgroup((2,), (), P())
LATER = Subgroup((4, 5), (("data", 2),), P())
LAST = Subgroup((6,), (), P())

BOTH = HSharding((PAIR, THIRD))
COLUMNS = HSharding((PAIR.with_spec(P(None, "x")), THIRD), 1, (8, 4))
ROWS = HSharding((PAIR.with_spec(P("x")), THIRD), 0, (8, 4))
EXAMPLES_OF_BOTH = HSharding((PAIR.with_spec(P("x")), THIRD), 0, (8, 4))


def parameters() -> Any:
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> np.ndarray:
        return (0.5 * rng.normal(size=shape)).astype(np.float32)

    layers = [{"up": draw(WIDTH, HIDDEN), "down": draw(HIDDEN, WIDTH)} for _ in range(2)]
    return {"layers": layers, "head": draw(WIDTH, WIDTH)}


def batch_of(step: int) -> Any:
    rng = np.random.default_rng(step)
    draw = rng.normal(size=(2, EXAMPLES, WIDTH)).astype(np.float32)
    return {"x": draw[0], "y": draw[1]}


def loss_through(*between: HSharding | None, tied: bool = False) -> Callable[..., Any]:
    """A loss of two layers; what comes before each and after them may be resharded."""

    def told(place: int, x: Any) -> Any:
        annotation = between[place] if place < len(between) else None
        return x if annotation is None else reshard(x, annotation)

    def loss(parameters: Any, batch: Any) -> Any:
        x = batch["x"] @ parameters["head"] if tied else batch["x"]
        for place, layer in enumerate(parameters["layers"]):
            x = told(2 * place, x)
            x = x + told(2 * place + 1, jnp.tanh(x @ layer["up"]) @ layer["down"])
        return jnp.mean((x @ parameters["head"] - batch["y"]) ** 2)

    return loss


def planned(loss: Callable[..., Any], annotations: Any, **changes: Any) -> Plan:
    given = {"num_microbatches": MICROBATCHES, "optimizer": OPTIMIZER, "cluster": CLUSTER}
    return hetjax.plan(
        loss, parameters(), batch_of(0), annotations=annotations, **{**given, **changes}
    )


def losses_of_one_device(steps: int, *, tied: bool = False) -> list[float]:
    loss = loss_through(tied=tied)
    held, found = jax.tree.map(jnp.asarray, parameters()), []
    with jax.numpy_dtype_promotion("standard"):
        state = OPTIMIZER.init(held)
        for step in range(steps):
            value, gradients = jax.jit(jax.value_and_grad(loss))(held, batch_of(step))
            updates, state = OPTIMIZER.update(gradients, state, held)
            held = optax.apply_updates(held, updates)
            found.append(float(value))
    return found


def check_trains(loss: Callable[..., Any], plan: Plan, steps: int = 4, **expected: Any) -> None:
    with Trainer(plan, loss, parameters(), OPTIMIZER, batch_of(0)) as trainer:
        found = [trainer.train_step(batch_of(step)).loss for step in range(steps)]
    np.testing.assert_allclose(found, losses_of_one_device(steps, **expected), rtol=TOLERANCE)


def devices_of(plan: Plan) -> list[list[str]]:
    return [[stage.devices_text for stage in each.stages] for each in plan.pipelines]


PRODUCTS = {"up": COLUMNS, "down": ROWS}


def test_columns_and_rows_as_megatron_has_them():
    loss = loss_through(BOTH, BOTH, BOTH, BOTH)
    plan = planned(loss, ({"layers": [PRODUCTS] * 2, "head": BOTH}, None))
    (stage,) = plan.stages
    assert [member.mesh_shape for member in stage.members] == [(1, 2), (1, 1)]
    assert stage.shares.parameters["layers/1/down"].sizes == (8, 4)
    check_trains(loss, plan)


def test_examples_of_both_submeshes():
    loss = loss_through()
    plan = planned(loss, (BOTH, EXAMPLES_OF_BOTH))
    (stage,) = plan.stages
    assert [member.mesh_shape for member in stage.members] == [(2, 1), (1, 1)]
    assert stage.shares.batch == (4, 2)
    check_trains(loss, plan)


def test_stages_of_unlike_submeshes_whose_shares_change_between_them():
    """Columns on three devices, then examples shared three to nine."""
    shared = HSharding((LATER.with_spec(P("data")), LAST), 0, (4, 2))
    loss = loss_through(None, BOTH, shared)
    later = HSharding((LATER, LAST))
    first, *_ = plan = planned(
        loss, ({"layers": [PRODUCTS, later], "head": later}, {"x": BOTH, "y": None})
    ).stages
    assert first.shares.batch == ()
    assert plan[1].shares.batch == (4, 2)
    assert [member.mesh_shape for member in plan[1].members] == [(2, 1), (1, 1)]
    check_trains(loss, planned(loss, ({"layers": [PRODUCTS, later], "head": later}, None)))


def test_stages_without_reshards_are_cut_where_least_is_sent():
    loss, later = loss_through(), HSharding((LAST,))
    plan = planned(loss, ({"layers": [BOTH, later], "head": later}, {"x": BOTH, "y": later}))
    assert devices_of(plan) == [["first[0:2] 1x2 + first[2:3] 1x1", "second[2:3] 1x1"]]
    check_trains(loss, plan)


def test_a_parameter_of_two_stages_is_held_by_both():
    loss = loss_through(tied=True)
    one, other = HSharding((PAIR,)), HSharding((LAST,))
    tied = HSharding((PAIR.with_spec(P(None, "x")), LAST))
    plan = planned(loss, ({"layers": [one, other], "head": tied}, None))
    assert [stage.parameters.get("head") for stage in plan.stages] == [(None, "tensor"), None]
    check_trains(loss, plan, tied=True)


def test_pipelines_are_found_where_stages_share_devices():
    """The weak submesh hands on to another one, the strong one has all layers."""
    loss, later = loss_through(), HSharding((PAIR, LAST))
    plan = planned(loss, ({"layers": [BOTH, later], "head": later}, EXAMPLES_OF_BOTH))
    assert devices_of(plan) == [["first[0:2] 1x2"], ["first[2:3] 1x1", "second[2:3] 1x1"]]
    assert [pipeline.microbatch_size for pipeline in plan.pipelines] == [4, 2]
    check_trains(loss, plan)


def test_pipelines_obey_reshards_of_their_own_examples():
    sizes = ("n - n//3", "n//3")
    loss = loss_through(None, None, HSharding((PAIR.with_spec(P("x")), LAST), 0, sizes))
    later = HSharding((PAIR, LAST))
    plan = planned(loss, ({"layers": [BOTH, later], "head": later}, EXAMPLES_OF_BOTH))
    assert [len(pipeline.stages) for pipeline in plan.pipelines] == [1, 2]
    check_trains(loss, plan)


def test_a_stage_fans_out_to_unlike_submeshes():
    one, shared = HSharding((THIRD,)), HSharding((LATER.with_spec(P("data")), LAST), 0, (4, 2))
    loss, later = loss_through(None, None, shared), HSharding((LATER, LAST))
    plan = planned(loss, ({"layers": [one, later], "head": later}, one))
    assert [len(stage.members) for stage in plan.stages] == [1, 2]
    assert plan.stages[1].shares.batch == (4, 2)
    check_trains(loss, plan)


def test_examples_and_columns_on_a_mesh_of_two_axes():
    four = Subgroup((0, 1, 2, 3), (("rows", 2), ("columns", 2)), P())
    columns = HSharding((four.with_spec(P(None, "columns")), LAST))
    rows = HSharding((four.with_spec(P("columns")), LAST))
    whole = HSharding((four, LAST))
    batch = HSharding((four.with_spec(P("rows")), LAST), 0, (8, 4))
    inside = HSharding((four.with_spec(P("rows")), LAST), 0, (4, 2))
    loss = loss_through(inside, inside, inside, inside)
    plan = planned(loss, ({"layers": [{"up": columns, "down": rows}] * 2, "head": whole}, batch))
    (stage,) = plan.stages
    assert [member.mesh_shape for member in stage.members] == [(2, 2), (1, 1)]
    assert stage.parameters["layers/0/up"] == (None, "tensor")
    check_trains(loss, plan)


@pytest.mark.parametrize("schedule", ["gpipe", "zb_h1"])
def test_any_schedule_will_do(schedule: str):
    loss, later = loss_through(), HSharding((LAST,))
    options = hetjax.PlanOptions(schedule=schedule)
    annotations = {"layers": [BOTH, later], "head": later}, EXAMPLES_OF_BOTH
    plan = planned(loss, annotations, options=options)
    assert plan.pipeline.schedule.name == schedule
    check_trains(loss, plan)


def test_a_switch_follows_the_strategies_of_reshards(tmp_path: Path):
    """A loss that is annotated for two clusters, and a checkpoint from one plan to the other."""
    fewer = HSharding((PAIR,))

    def loss(parameters: Any, batch: Any) -> Any:
        x = batch["x"]
        for layer in parameters["layers"]:
            change = jnp.tanh(reshard(x, [BOTH, fewer]) @ layer["up"]) @ layer["down"]
            x = x + reshard(change, [BOTH, fewer])
        return jnp.mean((x @ parameters["head"] - batch["y"]) ** 2)

    all_of = {"up": HSharding((PAIR.with_spec(P(None, "x")),)), "down": fewer}
    wide = planned(loss, ({"layers": [PRODUCTS] * 2, "head": BOTH}, None))
    narrow = planned(loss, ({"layers": [all_of] * 2, "head": fewer}, None))
    assert [len(plan.stages[0].members) for plan in (wide, narrow)] == [2, 1]
    expected = losses_of_one_device(6)
    rest = loss, parameters(), OPTIMIZER, batch_of(0)
    with Trainer(wide, *rest, workdir=tmp_path) as trainer:
        found = [trainer.train_step(batch_of(step)).loss for step in range(2)]
        trainer.switch(narrow)
        found += [trainer.train_step(batch_of(step)).loss for step in range(2, 4)]
        trainer.save()
    with Trainer(wide, *rest, workdir=tmp_path) as trainer:
        trainer.resume()
        found += [trainer.train_step(batch_of(step)).loss for step in range(4, 6)]
    np.testing.assert_allclose(found, expected, rtol=TOLERANCE)


@examples(usual=4)
@given(number=st.integers(0, 2**32 - 1))
def test_random_annotations_train(number: int):
    """Each parameter lies in a way of its own, and values as deduction finds it."""
    rng = Random(number)
    batch = rng.choice([None, EXAMPLES_OF_BOTH, BOTH])
    is_inside = batch is not EXAMPLES_OF_BOTH

    def lies(*shape: int) -> HSharding:
        dimension = rng.randrange(3)
        if dimension == 2:
            return BOTH
        size = 2 * rng.randint(0, shape[dimension] // 2)
        spec = P(*[None] * dimension, "x") if is_inside and rng.random() < 0.7 else P()
        sizes = size, shape[dimension] - size
        return HSharding((PAIR.with_spec(spec), THIRD), dimension, sizes)

    layers = [{"up": lies(WIDTH, HIDDEN), "down": lies(HIDDEN, WIDTH)} for _ in range(2)]
    told = [rng.choice([None, None, BOTH]) for _ in range(4)]
    loss = loss_through(*told)
    plan = planned(loss, ({"layers": layers, "head": lies(WIDTH, WIDTH)}, batch))
    check_trains(loss, plan, steps=2)
