"""What a tensor axis costs by position: of alike modules alike, and what Megatron's would cost."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hetjax.models import GPTConfig, language_model
from hetjax.pipeline.layers.cost_layers import crossing_bytes
from hetjax.pipeline.layers.modules import find_modules
from hetjax.pipeline.program.traced_program import Program
from hetjax.pipeline.program.tracing import trace
from hetjax.planner.intra_op.tensor_axis import TensorAxis, TensorCosts

BLOCKS, WIDTH, SEQUENCE, EXAMPLES = 6, 512, 128, 4


@pytest.fixture(scope="module")
def program() -> Program:
    config = GPTConfig(vocabulary=512, blocks=BLOCKS, width=WIDTH, heads=8, sequence=SEQUENCE)
    model = language_model(config)
    parameters = jax.eval_shape(model.init, jax.random.key(0))
    return trace(model.loss, parameters, model.batch_shapes(EXAMPLES))


def costs_of(program: Program, devices: int, *, by_module: bool) -> TensorCosts:
    sections = find_modules(program, crossing_bytes(program)) if by_module else ()
    found = TensorAxis(program, EXAMPLES, sections).costs(devices)
    assert found is not None
    return found


def test_modules_that_are_decided_once_cost_what_they_cost_together(program: Program):
    once = costs_of(program, 4, by_module=True)
    together = costs_of(program, 4, by_module=False)
    for name, values in vars(once).items():
        expected = getattr(together, name).sum()
        # The model's ends may decide otherwise where they see less of it.
        assert values.sum() == pytest.approx(expected, rel=0.05), name


def test_a_block_divides_all_its_products_and_sends_what_megatrons_sends(program: Program):
    costs = costs_of(program, 4, by_module=True)
    blocks = [s for s in find_modules(program, crossing_bytes(program)) if s.module is not None]
    assert len(blocks) == BLOCKS
    middle = slice(blocks[2].start, blocks[2].stop)
    activation = 4 * EXAMPLES * SEQUENCE * WIDTH
    # Two all-reduces forward and two backward, each of two passes.
    assert costs.bytes[middle].sum() / activation == pytest.approx(8, rel=0.02)
    assert costs.flops[middle].sum() == pytest.approx(0, abs=1)


def test_costs_of_layers_add_up_to_those_of_positions(program: Program):
    costs = costs_of(program, 2, by_module=True)
    layers = (0, 7, 50, program.num_positions)
    by_layer = costs.of_layers(layers)
    for name, values in vars(by_layer).items():
        assert values.shape == (3,)
        assert values.sum() == pytest.approx(getattr(costs, name).sum()), name


def test_a_loop_that_is_one_step_tells_nothing():
    def loss(weights, x):
        x, _ = jax.lax.scan(lambda x, _: (jnp.tanh(x @ weights), None), x, None, length=4)
        return jnp.mean(x**2)

    shapes = jax.ShapeDtypeStruct((8, 8), np.float32), jax.ShapeDtypeStruct((2, 8), np.float32)
    assert TensorAxis(trace(loss, *shapes), 2, ()).costs(2) is None
