"""Which parameters an optimizer leaves as they are, and whose gradients it does not read."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from hetjax.errors import InputError
from hetjax.pipeline.update.unchanged_leaves import frozen_leaves

WEIGHTS = {
    "half": jnp.ones(3, jnp.bfloat16),
    "matrix": jnp.ones((4, 4)),
    "scale": jnp.ones(()),
    "vector": jnp.ones(4),
}
FROZEN = ("half", "scale", "vector")
MASK = {name: name in FROZEN for name in WEIGHTS}
RATES = optax.cosine_decay_schedule(1e-3, 100)


def labelled(trained: optax.GradientTransformation) -> optax.GradientTransformation:
    labels = {name: "frozen" if is_frozen else "trained" for name, is_frozen in MASK.items()}
    return optax.multi_transform({"trained": trained, "frozen": optax.set_to_zero()}, labels)


def masked_first(rate: Any) -> optax.GradientTransformation:
    return optax.chain(optax.masked(optax.set_to_zero(), MASK), optax.sgd(rate))


def by_unknown_zero() -> optax.GradientTransformation:
    """Zeros that are known in a step alone."""
    return optax.GradientTransformation(
        lambda params: jnp.zeros(()),
        lambda updates, state, params=None: (jax.tree.map(lambda g: g * state, updates), state),
    )


CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(RATES))

# The optimizer, whether gradients of what is masked are left out, and whether updates are.
CASES: Mapping[str, tuple[optax.GradientTransformation, bool, bool]] = {
    "all trained": (optax.adamw(1e-3), False, False),
    "labelled": (labelled(optax.adamw(RATES)), True, True),
    "clipped inside": (labelled(CLIPPED), True, True),
    "clipped before": (
        optax.chain(optax.clip_by_global_norm(1.0), labelled(CLIPPED)),
        False,
        False,
    ),
    "selective": (
        optax.transforms.selective_transform(optax.adam(1e-3), freeze_mask=MASK),
        True,
        True,
    ),
    "gradients masked": (masked_first(1e-3), True, True),
    "gradients masked, with a rate of its own in each step": (masked_first(RATES), True, False),
    "gradients masked, with a state for all": (
        optax.chain(optax.masked(optax.set_to_zero(), MASK), optax.adamw(1e-3)),
        True,
        False,
    ),
    "updates masked, with a state for all": (
        optax.chain(optax.adamw(1e-3), optax.masked(optax.set_to_zero(), MASK)),
        False,
        False,
    ),
    "raw gradients where it does not apply": (
        optax.masked(optax.adam(1e-3), {name: not each for name, each in MASK.items()}),
        False,
        False,
    ),
    "tested for infinities": (optax.apply_if_finite(labelled(CLIPPED), 3), False, False),
    "by a zero that is not known": (by_unknown_zero(), False, False),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_left_out_is_found_in_the_trace(name: str):
    optimizer, no_gradient, no_update = CASES[name]
    places = frozenset(place for place, each in enumerate(sorted(WEIGHTS)) if each in FROZEN)
    found = frozen_leaves(optimizer, WEIGHTS)
    assert found.without_gradient == (places if no_gradient else frozenset())
    assert found.without_update == (places if no_update else frozenset())


def test_an_optimizer_that_trains_nothing_is_refused():
    with pytest.raises(InputError, match="no gradient of the 4 parameter leaves"):
        frozen_leaves(optax.set_to_zero(), WEIGHTS)


def test_how_much_state_parameters_have():
    """Of leaves that are updated, by the arrays that live with them."""
    leaves = {"half": jnp.ones(8, jnp.bfloat16), "long": jnp.ones((4, 2)), "wide": jnp.ones((2, 4))}
    labels = {"half": "moments", "long": "moments", "wide": "plain"}
    mixed = optax.multi_transform({"moments": optax.adam(1e-3), "plain": optax.sgd(1e-3)}, labels)
    # Two moments in two bytes each, two in four, none.
    assert frozen_leaves(mixed, leaves).state_shares == (1.0, 2.0, 0.0)
    frozen = optax.multi_transform(
        {"moments": optax.sgd(1e-3, 0.9), "plain": optax.set_to_zero()}, labels
    )
    assert frozen_leaves(frozen, leaves).state_shares == pytest.approx((2 / 3, 4 / 3, 0.0))
    whole = {"long": leaves["long"], "wide": leaves["wide"]}
    assert frozen_leaves(optax.adam(1e-3), whole).state_shares == ()
    assert frozen_leaves(optax.sgd(1e-3), leaves).state_shares == ()


def test_state_that_is_of_no_parameter_is_of_all_alike():
    def init(params: Any) -> tuple[Any, Any]:
        return jnp.zeros(48), jax.tree.map(jnp.zeros_like, params["matrix"])

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        rate, mean = state
        mean = mean + updates["matrix"]
        return {**updates, "matrix": mean}, (rate + 1.0, mean)

    weights = {"matrix": jnp.ones((4, 4)), "vector": jnp.ones((32,))}
    shares = frozen_leaves(optax.GradientTransformation(init, update), weights).state_shares
    mean = (48 + 16) / 48
    assert shares == pytest.approx((2 / mean, 1 / mean))
