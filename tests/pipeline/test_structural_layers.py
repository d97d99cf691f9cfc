"""Layers that follow a program's repeated modules."""

import itertools
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hetjax.models import RECIPES, model_of, recipe
from hetjax.pipeline.layers.cost_layers import crossing_bytes, position_flops
from hetjax.pipeline.layers.modules import find_modules
from hetjax.pipeline.layers.structural_layers import StructuralLayers, structural_layers
from hetjax.pipeline.program.traced_program import Program
from hetjax.pipeline.program.tracing import trace

WIDTH = 16


def shapes_of(make: Any) -> Any:
    return jax.eval_shape(make)


def recipe_program(name: str) -> Program:
    model = model_of(RECIPES[name])
    parameters = jax.eval_shape(lambda: model.init(jax.random.key(0)))
    return trace(model.loss, parameters, model.batch_shapes(1))


def attention(weights: Any, x: jax.Array) -> jax.Array:
    q, k, v = (x @ weights[name] for name in ("q", "k", "v"))
    scores = jax.nn.softmax(jnp.einsum("bsd,btd->bst", q, k))
    return x + jnp.einsum("bst,btd->bsd", scores, v) @ weights["o"]


def dense_block(weights: Any, x: jax.Array) -> jax.Array:
    x = attention(weights, x)
    return x + jax.nn.gelu(x @ weights["up"]) @ weights["down"]


def expert_block(weights: Any, x: jax.Array) -> jax.Array:
    x = attention(weights, x)
    chosen = jax.nn.softmax(x @ weights["router"])
    hidden = jax.nn.gelu(jnp.einsum("bsd,edf->bsef", x, weights["experts_up"]))
    return x + jnp.einsum("bsef,efd,bse->bsd", hidden, weights["experts_down"], chosen)


def block_shapes(*, experts: bool) -> dict[str, jax.ShapeDtypeStruct]:
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys("qkvo", (WIDTH, WIDTH))
    if experts:
        shapes |= {
            "router": (WIDTH, 2),
            "experts_up": (2, WIDTH, 4 * WIDTH),
            "experts_down": (2, 4 * WIDTH, WIDTH),
        }
    else:
        shapes |= {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}


def mixture_of_experts(pairs: int = 8) -> Program:
    """Blocks with two experts and dense ones in turn."""

    def loss(parameters, batch):
        x = parameters["embedding"][batch["tokens"]]
        for weights in parameters["blocks"]:
            x = (expert_block if "router" in weights else dense_block)(weights, x)
        return jnp.mean(jax.nn.logsumexp(x @ parameters["embedding"].T, axis=-1))

    blocks = [block_shapes(experts=place % 2 == 0) for place in range(2 * pairs)]
    embedding = jax.ShapeDtypeStruct((64, WIDTH), jnp.float32)
    tokens = jax.ShapeDtypeStruct((2, 8), jnp.int32)
    return trace(loss, {"embedding": embedding, "blocks": blocks}, {"tokens": tokens})


def check_layers(program: Program, found: StructuralLayers) -> None:
    """They cover the program, none is empty, and those of one module are at the same places."""
    positions = found.positions
    assert positions[0] == 0
    assert positions[-1] == program.num_positions
    assert list(positions) == sorted(set(positions))
    inside: dict[int, set[tuple[int, ...]]] = {}
    for each in found.sections:
        if each.section.module is not None:
            places = tuple(start - each.section.start for start in each.starts)
            inside.setdefault(each.section.module, set()).add(places)
    assert all(len(places) == 1 for places in inside.values())


def module_counts(found: StructuralLayers) -> Counter[int | None]:
    return Counter(each.section.module for each in found.sections)


def test_a_deep_gpt_has_as_many_layers_as_harp_finds():
    program = recipe_program("gpt-39b")
    found = structural_layers(program)
    check_layers(program, found)
    assert found.num_layers == 146
    assert module_counts(found) == {0: 48, None: 2}
    edges = {each.bytes_in for each in found.sections[1:]}
    assert edges == {1024 * 8192 * 2.0}, "between blocks only the residual stream crosses"
    flops = np.add.reduceat(position_flops(program), found.positions[:-1])[1:-1]
    assert max(flops) / min(flops) < 1.1


def test_blocks_with_experts_and_dense_ones_in_turn():
    program = mixture_of_experts()
    found = structural_layers(program)
    check_layers(program, found)
    assert 40 <= found.num_layers <= 60
    counts = module_counts(found)
    assert max(counts.values()) == 16 or set(counts) - {None} == {0}


def test_modules_end_where_the_residual_stream_alone_crosses():
    """Attention is alike in all blocks, and so is the norm after it, whose result is for others."""
    model = model_of(recipe("moe-quickstart", blocks=6))
    parameters = jax.eval_shape(model.init, jax.random.key(0))
    found = structural_layers(trace(model.loss, parameters, model.batch_shapes(2)))
    assert module_counts(found)[0] == 6
    stream = 2 * 128 * 128 * 4
    edges = [each.bytes_in for each in found.sections]
    after = [
        edge
        for each, edge in zip(found.sections, edges[1:], strict=False)
        if each.section.module == 0
    ]
    # Beside the stream the loss of balance crosses.
    assert max(after) <= 1.01 * stream


def test_iterations_of_a_scan_are_layers():
    def loss(parameters, batch):
        def block(x, weights):
            return jnp.tanh(x @ weights["a"]) @ weights["b"], None

        x, _ = jax.lax.scan(block, batch["x"] @ parameters["first"], parameters["blocks"])
        return jnp.mean(x**2)

    matrix = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
    stacked = jax.ShapeDtypeStruct((6, WIDTH, WIDTH), jnp.float32)
    parameters = {"first": matrix, "blocks": {"a": stacked, "b": stacked}}
    batch = {"x": jax.ShapeDtypeStruct((4, WIDTH), jnp.float32)}
    program = trace(loss, parameters, batch)
    found = structural_layers(program)
    check_layers(program, found)
    assert module_counts(found)[0] == 6
    assert found.num_layers == 14


def test_a_network_of_convolutions_has_a_layer_for_each():
    program = recipe_program("vgg-19")
    found = structural_layers(program)
    check_layers(program, found)
    convolutions = [step.name == "conv_general_dilated" for step in program.steps]
    inside = np.add.reduceat(convolutions, found.positions[:-1])
    # The first one is light, and goes with the second; the dense layers are light, too.
    assert inside.tolist() == [2, *[1] * 14, 0]


def test_residual_blocks_are_modules():
    program = recipe_program("resnet-50")
    found = structural_layers(program)
    check_layers(program, found)
    counts = module_counts(found)
    assert [counts[module] for module in range(4)] == [2, 3, 5, 2], "all but each group's first"
    streams = [each.bytes_in for each in found.sections if each.section.module is not None]
    sizes = [56 * 56 * 256, 28 * 28 * 512, 14 * 14 * 1024, 7 * 7 * 2048]
    expected = np.repeat(sizes, [2, 3, 5, 2]) * 4
    # Beside them scalars may cross, for the mean of the batch.
    np.testing.assert_allclose(streams, expected, rtol=1e-3)
    assert {len(each.starts) for each in found.sections if each.section.module is not None} == {2}
    assert 32 <= found.num_layers <= 40
    flops = np.add.reduceat(position_flops(program), found.positions[:-1])
    assert max(flops) < 0.05 * sum(flops)


def test_a_vision_transformer_has_three_layers_a_block():
    program = recipe_program("vit-base")
    found = structural_layers(program)
    check_layers(program, found)
    assert module_counts(found) == {0: 12, None: 2}
    assert found.num_layers == 1 + 12 * 3 + 1


def test_a_program_that_repeats_nothing_is_cut_by_cost():
    widths = [8, 16, 24, 40, 56]
    weights = [jax.ShapeDtypeStruct(pair, jnp.float32) for pair in itertools.pairwise(widths)]

    def loss(weights, x):
        for weight in weights:
            x = x @ weight
        return jnp.mean(x)

    program = trace(loss, weights, jax.ShapeDtypeStruct((4, 8), jnp.float32))
    found = structural_layers(program, otherwise=2)
    assert found.num_layers == 2
    assert not found.sections


@pytest.mark.parametrize("min_products", [1, 2, 3, 6])
def test_sections_cover_the_program(min_products: int):
    program = mixture_of_experts(pairs=3)
    sections = find_modules(program, crossing_bytes(program), min_products)
    assert sections[0].start == 0
    assert sections[-1].stop == program.num_positions
    assert all(a.stop == b.start for a, b in itertools.pairwise(sections))
    lengths: dict[int, set[int]] = {}
    for section in sections:
        if section.module is not None:
            lengths.setdefault(section.module, set()).add(section.stop - section.start)
    assert all(len(each) == 1 for each in lengths.values())
