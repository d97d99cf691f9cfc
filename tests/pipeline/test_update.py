"""The optimizer's update divided over three stages equals the whole one, for many optimizers."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hetjax.errors import InputError
from hetjax.pipeline.stages.cutting import ParameterPart
from hetjax.pipeline.update.divided_update import StageUpdate, divide_update
from hetjax.pipeline.update.whole_update import update_function

Part = ParameterPart
Parts = Sequence[Sequence[ParameterPart]]
TREE = jax.tree.structure({"bias": 0, "cut": 0, "scale": 0, "tied": 0})
NAMES = ("bias", "cut", "scale", "tied")
SHAPES: Mapping[str, tuple[int, ...]] = {
    "bias": (6,),
    "cut": (6, 4, 5),
    "scale": (),
    "tied": (4, 6),
}

CUT: Parts = (
    (Part(1, 0, 2), Part(3)),
    (Part(0), Part(1, 2, 5)),
    (Part(1, 5, 6), Part(2), Part(3)),
)
"""``cut`` in rows over all stages, ``tied`` on the first and the last, the rest on one each."""

WHOLE: Parts = ((Part(3),), (Part(0), Part(1)), (Part(2), Part(3)))
"""No leaf is cut."""


@pytest.fixture(autouse=True)
def standard_promotion() -> Iterator[None]:
    """Optax multiplies floats by integer counts."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def arrays(seed: int, scale: float = 1.0) -> list[jax.Array]:
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=SHAPES[n]) * scale, jnp.float32) for n in NAMES]


def unflatten(leaves: Sequence[Any]) -> Any:
    return jax.tree.unflatten(TREE, leaves)


def divide(optimizer: optax.GradientTransformation, parts: Parts) -> tuple[StageUpdate, ...]:
    shapes = [jax.ShapeDtypeStruct(SHAPES[name], jnp.float32) for name in NAMES]
    return divide_update(optimizer, shapes, parts, NAMES, unflatten)


State = tuple[list[list[Any]], list[list[Any]]]
"""For each stage its parameter parts; for each stage its parts of the optimizer's state."""


def initial(optimizer: optax.GradientTransformation, parts: Parts) -> State:
    leaves = arrays(seed=0)
    state = jax.tree.leaves(optimizer.init(unflatten(leaves)))
    held = [update.state for update in divide(optimizer, parts)]
    return (
        [[part.take(leaves[part.leaf]) for part in stage] for stage in parts],
        [[part.take(state[part.leaf]) for part in stage] for stage in held],
    )


def divided_step(
    updates: Sequence[StageUpdate],
    parts: Parts,
    state: State,
    gradients: Sequence[jax.Array],
    loss: tuple[jax.Array, jax.Array],
) -> tuple[State, list[Any]]:
    """The update by way of the stages' phases and their messages; and what each stage reports."""
    taken = [[part.take(gradients[part.leaf]) for part in stage] for stage in parts]
    vectors: dict[tuple[int, int], Any] = {}
    results: list[Any] = []
    for phase in range(len(updates[0].phases)):
        results = []
        for stage, update in enumerate(updates):
            messages = [
                vectors[earlier, sender]
                for earlier in range(phase)
                for sender in update.receives[earlier]
            ]
            mine = loss if stage == len(parts) - 1 else ()
            run = update.phases[phase]
            results.append(run(state[0][stage], taken[stage], state[1][stage], mine, messages))
        for stage, result in enumerate(results):
            vectors[phase, stage] = result
    parameters, optimizer_state, metrics = zip(*results, strict=True)
    return (list(parameters), list(optimizer_state)), list(metrics)


ADAM = optax.adam(1e-2)


def slowed(updates: Any, state: Any, params: Any = None, *, rate: float = 0.5) -> tuple[Any, Any]:
    """Adam with a keyword of its own, and no ``value``."""
    updates, state = ADAM.update(updates, state, params)
    return jax.tree.map(lambda leaf: rate * leaf, updates), state


OPTIMIZERS: Mapping[str, optax.GradientTransformation] = {
    "adam, noise": optax.chain(optax.add_noise(0.1, 0.5, 0), optax.adam(1e-2)),
    "adamw, schedule, mask": optax.adamw(
        optax.warmup_cosine_decay_schedule(1e-3, 1e-2, 2, 10),
        mask=lambda tree: jax.tree.map(lambda leaf: leaf.ndim > 1, tree),
    ),
    "apply if finite": optax.apply_if_finite(optax.adam(1e-2), 3),
    "clip, adam": optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)),
    "clip by block": optax.chain(optax.clip_by_block_rms(0.1), optax.adam(1e-2)),
    "clip twice": optax.chain(
        optax.clip_by_global_norm(0.5), optax.scale_by_adam(), optax.clip_by_global_norm(0.1)
    ),
    "ema": optax.chain(optax.adam(1e-2), optax.ema(0.9)),
    "every few steps": optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
    "hyperparameters": optax.inject_hyperparams(optax.adamw)(
        learning_rate=optax.linear_schedule(1e-2, 1e-3, 5), b1=0.8
    ),
    "labels": optax.multi_transform(
        {"fast": optax.adam(1e-2), "slow": optax.sgd(1e-3, momentum=0.9)},
        {"bias": "fast", "cut": "slow", "scale": "fast", "tied": "slow"},
    ),
    "lamb": optax.lamb(1e-2),
    "lars": optax.lars(1e-1),
    "lion": optax.lion(1e-3),
    "muon": optax.contrib.muon(1e-2),
    "novograd": optax.novograd(1e-2),
    "normalized": optax.chain(optax.normalize_by_update_norm(), optax.sgd(0.1)),
    "own keywords": optax.GradientTransformationExtraArgs(ADAM.init, slowed),
    "own keywords, in a chain": optax.chain(
        optax.clip_by_global_norm(0.1), optax.GradientTransformationExtraArgs(ADAM.init, slowed)
    ),
    "rmsprop": optax.rmsprop(1e-2, centered=True, momentum=0.9),
    "rprop": optax.rprop(1e-2),
    "sam": optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.05), sync_period=2),
    "schedule free": optax.contrib.schedule_free_adamw(1e-2),
    "sgd, momentum": optax.sgd(1e-1, momentum=0.9, nesterov=True),
    "zero nans, clip": optax.chain(optax.zero_nans(), optax.clip_by_global_norm(1.0), optax.sgd(1)),
}
UNCUT_OPTIMIZERS: Mapping[str, optax.GradientTransformation] = {
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "adaptive clip": optax.chain(optax.adaptive_grad_clip(0.01), optax.sgd(0.1)),
    "prodigy": optax.contrib.prodigy(1e-1),
}
"""They mix the rows of a leaf, so it must not be cut."""


@pytest.mark.parametrize(
    ("optimizer", "parts"),
    [
        *(pytest.param(optimizer, CUT, id=name) for name, optimizer in OPTIMIZERS.items()),
        *(pytest.param(optimizer, WHOLE, id=name) for name, optimizer in UNCUT_OPTIMIZERS.items()),
    ],
)
def test_the_divided_update_equals_the_whole_one(
    optimizer: optax.GradientTransformation, parts: Parts
):
    updates, whole = divide(optimizer, parts), update_function(optimizer, unflatten)
    leaves, state = arrays(seed=0), optimizer.init(unflatten(arrays(seed=0)))
    structure = jax.tree.structure(state)

    @jax.jit
    def both(leaves: Any, state: Any, divided: State, gradients: Any, loss: Any) -> Any:
        return (
            whole(leaves, gradients, state, *loss),
            divided_step(updates, parts, divided, gradients, loss),
        )

    divided = initial(optimizer, parts)
    for step in range(3):
        gradients, loss = arrays(seed=step + 1, scale=7.0), (jnp.float32(3.0), jnp.float32(7.0))
        expected, (divided, reports) = both(leaves, state, divided, gradients, loss)
        leaves, state_leaves, metrics = expected
        state = jax.tree.unflatten(structure, state_leaves)
        for report in reports:
            for ours, theirs in zip(report, metrics, strict=True):
                np.testing.assert_allclose(ours, theirs, rtol=1e-6)
        for stage, update in enumerate(updates):
            assert_parts_equal(parts[stage], divided[0][stage], leaves)
            assert_parts_equal(update.state, divided[1][stage], state_leaves)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_is_not_finite_changes_nothing(name: str):
    """Neither parameters nor state, on no stage, whichever stage's gradient it is."""
    updates = divide(OPTIMIZERS[name], CUT)

    @jax.jit
    def step(state: State, gradients: Any, loss: Any) -> Any:
        return divided_step(updates, CUT, state, gradients, loss)

    loss = (jnp.float32(3.0), jnp.float32(7.0))
    before, _ = step(initial(OPTIMIZERS[name], CUT), arrays(seed=1), loss)
    for leaf, bad in enumerate((np.nan, np.inf, -np.inf, np.nan)):
        gradients = arrays(seed=2)
        gradients[leaf] = gradients[leaf].at[(-1,) * gradients[leaf].ndim].set(bad)
        after, reports = step(before, gradients, loss)
        jax.tree.map(assert_same_bits, after, before)
        for _, norm, squares in reports:
            assert not np.isfinite(norm)
            assert np.flatnonzero(~np.isfinite(squares)).tolist() == [leaf]
    for bad in (np.nan, np.inf):
        after, _ = step(before, arrays(seed=2), (jnp.float32(bad), jnp.float32(7.0)))
        jax.tree.map(assert_same_bits, after, before)


def assert_same_bits(ours: jax.Array, theirs: jax.Array) -> None:
    if jnp.issubdtype(ours.dtype, jax.dtypes.prng_key):
        ours, theirs = jax.random.key_data(ours), jax.random.key_data(theirs)
    assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()


def assert_parts_equal(
    parts: Sequence[ParameterPart], found: Sequence[Any], leaves: Sequence[Any]
) -> None:
    for part, ours in zip(parts, found, strict=True):
        theirs = part.take(leaves[part.leaf])
        if jnp.issubdtype(ours.dtype, jax.dtypes.prng_key):
            ours, theirs = jax.random.key_data(ours), jax.random.key_data(theirs)
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-7)


def test_state_lives_with_its_parameter():
    first, second, third = divide(optax.adam(1e-2), CUT)
    count, mu, nu = [Part(0)], [Part(1 + leaf) for leaf in range(4)], 5
    assert first.state == (
        *count,
        Part(2, 0, 2),
        mu[2],
        mu[3],
        Part(nu + 1, 0, 2),
        Part(7),
        Part(8),
    )
    assert Part(1) in second.state
    assert Part(2, 2, 5) in second.state
    assert Part(1) not in third.state


def test_adam_needs_one_exchange_and_a_norm_of_the_update_another():
    def phases(optimizer: optax.GradientTransformation) -> int:
        return len(divide(optimizer, CUT)[0].phases)

    # The loss and the gradient norm are exchanged in any case: they are reported.
    adam = phases(optax.adam(1e-2))
    assert phases(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))) <= adam + 1
    assert phases(OPTIMIZERS["clip twice"]) > adam


@pytest.mark.parametrize("name", ["clip twice", "lamb"])
def test_what_a_stage_sends_all_others_receive(name: str):
    updates = divide(OPTIMIZERS[name], CUT)
    for phase in range(len(updates[0].phases) - 1):
        senders = {stage for stage, update in enumerate(updates) if update.sends[phase]}
        for stage, update in enumerate(updates):
            assert set(update.receives[phase]) == senders - {stage}


def test_one_stage_exchanges_nothing():
    (update,) = divide(OPTIMIZERS["clip twice"], ([Part(leaf) for leaf in range(4)],))
    assert len(update.phases) == 1
    assert update.sends == ()


def test_a_model_may_have_a_thousand_parameters():
    """A norm is a sum over all of them, deeper than Python's stack."""
    names = [f"w{leaf:04}" for leaf in range(1000)]
    shapes = [jax.ShapeDtypeStruct((2,), jnp.float32)] * len(names)
    parts = [[Part(leaf) for leaf in range(500)], [Part(leaf) for leaf in range(500, 1000)]]
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
    updates = divide_update(optimizer, shapes, parts, names, list)
    state: State = ([[jnp.zeros(2)] * 500] * 2, [[], []])
    gradients = [jnp.ones(2)] * len(names)
    one = (jnp.float32(1.0), jnp.float32(1.0))
    jaxpr = jax.make_jaxpr(lambda given: divided_step(updates, parts, state, given, one))(gradients)
    assert len(jaxpr.out_avals) == len(names) + 6


@pytest.mark.parametrize("name", UNCUT_OPTIMIZERS)
def test_rows_that_depend_on_each_other_are_refused(name: str):
    optimizer = UNCUT_OPTIMIZERS[name]
    with pytest.raises(InputError, match="parameter 'cut', which the plan cuts between stages"):
        divided_step(
            divide(optimizer, CUT),
            CUT,
            initial(optimizer, CUT),
            arrays(seed=1),
            (jnp.float32(1.0), jnp.float32(1.0)),
        )


def test_parameters_mixed_elementwise_across_stages_are_refused():
    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return {**updates, "bias": updates["bias"] + updates["tied"][0]}, state

    optimizer = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    with pytest.raises(InputError, match="lie on different stages: 'bias', 'tied'"):
        divide(optimizer, WHOLE)


def test_state_that_is_only_read_is_where_its_parameter_is():
    """Prodigy compares parameters with the first ones, which it passes on as they are."""
    optimizer = UNCUT_OPTIMIZERS["prodigy"]
    names = [name for name, _ in jax.tree.leaves_with_path(optimizer.init(unflatten(arrays(0))))]
    first = {place for place, path in enumerate(names) if ".params0" in jax.tree_util.keystr(path)}
    assert len(first) == 4
    for update, parts in zip(divide(optimizer, WHOLE), WHOLE, strict=True):
        # All stages have what a scalar's update needs.
        leaves = {part.leaf for part in parts} | {NAMES.index("scale")}
        assert len([part for part in update.state if part.leaf in first]) == len(leaves)
