"""What users of JAX, Equinox and Optax bring: callable pytrees, typed keys, aux, `value`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import hetjax
from hetjax.errors import InputError
from hetjax.pipeline.program.loss import makes_parameters
from hetjax.pipeline.program.tracing import trace

CLUSTER = Path(__file__).parents[2] / "configs" / "clusters" / "quickstart.yaml"
SHAPES = [(4, 8), (8, 8), (8, 2)]


@jax.tree_util.register_dataclass
@dataclass
class Network:
    """A pytree that can be called, as a module of Equinox is."""

    weights: list[jax.Array]

    def __call__(self, x: jax.Array) -> jax.Array:
        for weight in self.weights:
            x = jnp.tanh(x @ weight)
        return x


def network() -> Network:
    rng = np.random.default_rng(0)
    return Network([jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in SHAPES])


def batch(examples: int = 8) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    return {
        "x": rng.normal(size=(examples, 4)).astype(np.float32),
        "y": rng.normal(size=(examples, 2)).astype(np.float32),
    }


def squares(net: Network, batch: Any) -> jax.Array:
    return jnp.mean((net(batch["x"]) - batch["y"]) ** 2)


def with_figures(net: Network, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
    loss = squares(net, batch)
    return loss, {"error": jnp.sqrt(loss), "examples": jnp.sum(jnp.ones_like(batch["x"][:, 0]))}


def noisy(net: Network, batch: Any) -> jax.Array:
    noise = jax.vmap(lambda key: jax.random.normal(key, (4,)))(batch["key"])
    return jnp.mean((net(batch["x"] + noise) - batch["y"]) ** 2)


def planned(loss: Any, data: Any, optimizer: Any = optax.sgd(0.1), **options: Any) -> hetjax.Plan:  # noqa: B008
    return hetjax.plan(
        loss,
        network(),
        data,
        cluster=str(CLUSTER),
        optimizer=optimizer,
        num_microbatches=2,
        options=hetjax.PlanOptions(min_stages=2, max_pipelines=1),
        **options,
    )


def test_a_callable_pytree_is_parameters_and_a_cluster_may_be_a_path():
    data, optimizer = batch(), optax.sgd(0.1)
    with hetjax.Trainer(planned(squares, data), squares, network(), optimizer, data) as trainer:
        metrics = trainer.train_step(data)
        after = trainer.parameters()
    expected, gradients = jax.value_and_grad(squares)(network(), data)
    np.testing.assert_allclose(metrics.loss, expected, rtol=1e-5)
    assert isinstance(after, Network)
    for new, old, gradient in zip(after.weights, network().weights, gradients.weights, strict=True):
        np.testing.assert_allclose(new, old - 0.1 * gradient, rtol=1e-4, atol=1e-6)


def test_functions_make_parameters_and_pytrees_are_them():
    assert makes_parameters(network)
    assert not makes_parameters(network())
    assert not makes_parameters({"w": jnp.ones(2)})


def test_a_leaf_that_is_no_array_is_refused():
    with pytest.raises(InputError, match=r"parameter 'f' is .*not an array; .*equinox\.partition"):
        trace(lambda p, x: jnp.sum(x), {"f": jnp.tanh, "w": jnp.ones(2)}, jnp.ones(4))


def test_a_module_of_equinox_trains():
    eqx = pytest.importorskip("equinox")
    module = eqx.nn.MLP(4, 2, 8, 2, key=jax.random.key(0))
    arrays, static = eqx.partition(module, eqx.is_inexact_array)

    def loss(arrays: Any, batch: Any) -> jax.Array:
        found = jax.vmap(eqx.combine(arrays, static))(batch["x"])
        return jnp.mean((found - batch["y"]) ** 2)

    data = batch()
    cluster = hetjax.Cluster.from_file(CLUSTER)
    optimizer = optax.sgd(0.1)
    plan = hetjax.plan(loss, arrays, data, cluster=cluster, optimizer=optimizer, num_microbatches=2)
    with hetjax.Trainer(plan, loss, arrays, optimizer, data) as trainer:
        np.testing.assert_allclose(trainer.train_step(data).loss, loss(arrays, data), rtol=1e-5)


def test_typed_keys_are_a_leaf_of_the_batch():
    data = batch() | {"key": jax.random.split(jax.random.key(3), 8)}
    plan = planned(noisy, data)
    with hetjax.Trainer(plan, noisy, network(), optax.sgd(0.1), data) as trainer:
        np.testing.assert_allclose(trainer.train_step(data).loss, noisy(network(), data), rtol=1e-5)
    with pytest.raises(InputError, match=r"'key' is a scalar: .*give every example a key"):
        trace(noisy, network(), batch() | {"key": jax.random.key(3)})


def test_figures_beside_the_loss_are_means_over_microbatches():
    data, optimizer = batch(), optax.sgd(0.1)
    plan = planned(with_figures, data, has_aux=True)
    with hetjax.Trainer(plan, with_figures, network(), optimizer, data, has_aux=True) as trainer:
        metrics = trainer.train_step(data)
    halves = [jax.tree.map(lambda leaf: leaf[rows], data) for rows in (slice(4), slice(4, 8))]  # noqa: B023
    expected = [with_figures(network(), half)[1] for half in halves]
    np.testing.assert_allclose(
        metrics.aux["error"], np.mean([float(each["error"]) for each in expected]), rtol=1e-5
    )
    assert metrics.aux["examples"] == 4.0
    np.testing.assert_allclose(metrics.loss, squares(network(), data), rtol=1e-5)


@pytest.mark.parametrize(
    ("loss", "has_aux", "message"),
    [
        (lambda p, x: (jnp.sum(x @ p), jnp.sum(p)), False, "second scalar depends on parameter"),
        (lambda p, x: (jnp.sum(x @ p), {"a": jnp.sum(p)}), False, "give has_aux=True"),
        (lambda p, x: jnp.sum(x @ p), True, r"must return a pair \(loss, aux\)"),
        (lambda p, x: (jnp.sum(x @ p), {"a": x @ p}), True, "aux leaf 'a' is"),
    ],
)
def test_pairs_that_are_refused(loss: Any, has_aux: bool, message: str):
    with pytest.raises(InputError, match=message):
        trace(loss, jnp.ones((4, 2)), jnp.ones((8, 4)), has_aux=has_aux)


def test_a_count_beside_a_total_in_one_scan_is_no_mistake():
    def loss(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        def body(sums: Any, row: jax.Array) -> tuple[Any, None]:
            return (sums[0] + jnp.sum(row @ w), sums[1] + jnp.sum(row > 0)), None

        return jax.lax.scan(body, (jnp.float32(0), jnp.int32(0)), x)[0]

    assert trace(loss, jnp.ones((4, 2)), jnp.ones((8, 4))).aux_tree is None


def test_an_optimizer_that_asks_for_the_loss_gets_it():
    data, steps = batch(), 4
    optimizer = optax.chain(
        optax.sgd(3.0), optax.contrib.reduce_on_plateau(factor=0.5, patience=1, rtol=0.5)
    )
    plan = planned(squares, data, optimizer)
    with hetjax.Trainer(plan, squares, network(), optimizer, data) as trainer:
        found = [trainer.train_step(data).loss for _ in range(steps)]
    params: Any = network()
    expected: list[float] = []
    state = optimizer.init(params)
    with jax.numpy_dtype_promotion("standard"):
        for _ in range(steps):
            value, gradients = jax.value_and_grad(squares)(params, data)
            updates, state = optimizer.update(gradients, state, params, value=value)
            params = optax.apply_updates(params, updates)
            expected.append(float(value))
    np.testing.assert_allclose(found, expected, rtol=1e-4)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (optax.lbfgs(0.1), r"optax\.lbfgs .*'grad' and 'value_fn'"),
        (optax.contrib.sophia(0.1), "the optimizer's update fails: obj_fn must be provided"),
        (optax.lookahead(optax.sgd(0.1), 2, 0.5), "update fails: AttributeError: .* 'fast' .it is"),
        (optax.masked(optax.sgd(0.1), {"a": True}), "the optimizer's init fails: .* structure"),
        (
            optax.stateless(lambda updates, params: 1 // 0),
            "the optimizer's update fails: ZeroDivisionError: ",
        ),
    ],
)
def test_optimizers_that_fail_or_want_more_are_refused_by_name(optimizer: Any, message: str):
    data = batch()
    with pytest.raises(InputError, match=message):
        hetjax.Trainer(planned(squares, data), squares, network(), optimizer, data)
