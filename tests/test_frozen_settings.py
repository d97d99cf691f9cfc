"""Parameters frozen by patterns of their names."""

import jax
import jax.numpy as jnp
import optax
import pytest

from hetjax.configuration import read_configuration
from hetjax.configuration.frozen import with_frozen
from hetjax.configuration.make import make_ingredients
from hetjax.errors import InputError
from hetjax.pipeline.program.loss import path_names
from hetjax.pipeline.update.unchanged_leaves import frozen_leaves

SMALL = ["model.blocks = 2", "model.width = 24", "model.heads = 2", "data.kind = 'synthetic'"]
WEIGHTS = {"blocks": [jnp.ones(2) for _ in range(11)], "embedding": jnp.ones(2)}


def frozen_names(*patterns: str) -> set[str]:
    optimizer = with_frozen(optax.adam(1e-3), WEIGHTS, patterns)
    found = frozen_leaves(optimizer, WEIGHTS).without_update
    names = path_names(WEIGHTS)
    return {names[leaf] for leaf in found}


def test_a_pattern_stands_for_names_and_what_they_begin_with():
    assert frozen_names("embed*") == {"embedding"}
    assert frozen_names("blocks/1") == {"blocks/1"}
    assert frozen_names("blocks/1*") == {"blocks/1", "blocks/10"}
    assert frozen_names("blocks") == {f"blocks/{i}" for i in range(11)}
    assert frozen_names("blocks/[0-3]", "embedding") == {
        "embedding",
        *(f"blocks/{i}" for i in range(4)),
    }


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (["embd*"], r"train\.frozen has 'embd\*', which matches no parameter.*'embedding'"),
        (["blocks/1", "block/2"], "has 'block/2', which matches no parameter.*'blocks/2'"),
        (["*"], "matches all 12 parameters"),
        (["blocks", "embedding"], "matches all 12 parameters"),
    ],
)
def test_patterns_that_freeze_nothing_or_all_are_refused(patterns: list[str], message: str):
    with pytest.raises(InputError, match=message):
        with_frozen(optax.adam(1e-3), WEIGHTS, patterns)


def test_a_configuration_freezes_parameters_of_its_model():
    bindings = [*SMALL, "train.frozen = ('*_embedding', 'blocks/0')", "optimizer.clip_norm = 1.0"]
    ingredients = make_ingredients(read_configuration(None, bindings))
    found = frozen_leaves(ingredients.optimizer, ingredients.parameter_shapes)
    names = path_names(ingredients.parameter_shapes)
    starts = ("token_embedding", "position_embedding", "blocks/0/")
    expected = {leaf for leaf, name in enumerate(names) if name.startswith(starts)}
    assert found.without_update == found.without_gradient == expected
    state = jax.eval_shape(ingredients.optimizer.init, ingredients.parameter_shapes)
    arrays = [each for each in jax.tree.leaves(state) if each.shape]
    assert len(arrays) == 2 * (len(names) - len(expected))
    with pytest.raises(InputError, match=r"train\.frozen has 'block/0'"):
        make_ingredients(read_configuration(None, [*SMALL, "train.frozen = 'block/0'"]))
