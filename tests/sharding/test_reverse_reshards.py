"""Reverse reshards: a cotangent lies as its value did, and goes whole to every summand of a sum."""

import jax
import jax.numpy as jnp
import pytest
from deducing import check, drawn, run
from jax.sharding import PartitionSpec as P

from hetjax import reshard
from hetjax.errors import InputError
from hetjax.sharding import PARTIAL, HSharding, Subgroup, deduce
from hetjax.sharding.deduction.top_tier import cotangent_of

FOUR = Subgroup((0, 1, 2, 3), (("tensor", 4),), P())
TWO = Subgroup((4, 5), (("tensor", 2),), P())
ONE = Subgroup((6,), (), P())
EXAMPLES = HSharding((FOUR, TWO, ONE), hdim=0, sizes=(7, 3, 2))
COLUMNS = HSharding((FOUR.with_spec(P(None, "tensor")), TWO.with_spec(P(None, "tensor")), ONE))
ROWS = HSharding((FOUR.with_spec(P("tensor")), TWO.with_spec(P("tensor")), ONE))


def stacked(annotation: HSharding) -> HSharding:
    """The annotation of several such arrays, one a row."""
    return HSharding(tuple(g.with_spec(P(None, *g.spec)) for g in annotation.subgroups))


def block(x, first, second):
    """A Megatron block: its input is whole inside each submesh, and so is what it gives."""
    inside = reshard(x, EXAMPLES)
    return x + reshard(jnp.tanh(inside @ first) @ second, EXAMPLES)


def one_block(first, second, x):
    return jnp.sum(block(block(x, first, second), first, second) ** 2)


def scanned(first, second, x):
    x, _ = jax.lax.scan(lambda x, weights: (block(x, *weights), None), x, (first, second))
    return jnp.sum(x**2)


def recomputed(first, second, x):
    return jnp.sum(jax.checkpoint(block)(block(x, first, second), first, second) ** 2)


def called_in_a_branch(first, second, x):
    def branch(scale):
        return lambda x: scale * block(x, first, second)

    return jnp.sum(jax.lax.cond(jnp.sum(first) > 0, branch(1.0), branch(2.0), x) ** 2)


@pytest.mark.parametrize("loss", [one_block, scanned, recomputed])
def test_no_activation_moves_among_submeshes(loss):
    """Tensor parallelism of 4, 2 and 1: forward and backward sum inside each submesh alone."""
    shapes = ((8, 16), (16, 8), (12, 8))
    annotations = [COLUMNS, ROWS, EXAMPLES]
    if loss is scanned:
        shapes = (*((3, *shape) for shape in shapes[:2]), shapes[2])
        annotations = [stacked(COLUMNS), stacked(ROWS), EXAMPLES]
    inputs = drawn(*shapes)
    program = jax.value_and_grad(loss, argnums=(0, 1, 2))
    found, specialized = run(program, inputs, annotations)
    check(found, program(*inputs), tolerance=1e-4)
    assert not list(specialized.program.moves)
    assert found[3].annotation == EXAMPLES


def test_summands_among_submeshes_get_the_whole_cotangent():
    """What a contraction divided among submeshes gives is a sum; its cotangent each must have."""
    one, two = Subgroup((0,), (), P()), Subgroup((1, 2), (("tensor", 2),), P())
    features = HSharding((one, two), hdim=1, sizes=(3, 5))
    weights = HSharding((one, two), hdim=0, sizes=(3, 5))
    together = HSharding((one, two), hdim=0, sizes=(2, 4))

    def loss(x, weight):
        return jnp.sum(jnp.tanh(reshard(x @ weight, together)))

    inputs = drawn((6, 8), (8, 4))
    program = jax.value_and_grad(loss, argnums=(0, 1))
    found, _ = run(program, inputs, [features, weights])
    check(found, program(*inputs))
    forward, backward = deduce(jax.make_jaxpr(program)(*inputs), [features, weights]).moves
    assert forward.source is not None
    assert forward.source.hdim == PARTIAL
    assert backward.destination == cotangent_of(forward.source) == HSharding((one, two))
    assert [each.annotation for each in found[1:]] == [features, weights]


def test_a_backward_pass_alone_is_refused():
    """It does not say how the values lay, so nothing brings their cotangents back."""
    (x,) = drawn((12, 8))
    backward = jax.make_jaxpr(jax.linear_transpose(lambda x: reshard(x, EXAMPLES), x))(x)
    with pytest.raises(InputError, match=r"hetjax.reshard at .*backward pass alone"):
        deduce(backward, [EXAMPLES])


def test_each_call_in_a_branch_brings_its_own_cotangent_back():
    inputs = drawn((8, 16), (16, 8), (12, 8))
    closed = jax.make_jaxpr(jax.grad(called_in_a_branch, argnums=2))(*inputs)
    whole = HSharding((FOUR, TWO, ONE))
    found = deduce(closed, [whole, whole, EXAMPLES])
    assert found.annotations[found.outputs[0]] == EXAMPLES
    assert not list(found.moves)


def test_a_refusal_in_the_backward_pass_names_the_forward_line_and_what_mends_it():
    """Two uses of a value: the gradient of one is a sum of parts, and cannot meet the other's."""

    def without(first, second, x):
        y = 2.0 * x
        hidden = jnp.tanh(y @ first)
        return jnp.sum((y + reshard(hidden @ second, EXAMPLES)) ** 2)

    inputs = drawn((8, 16), (16, 8), (12, 8))
    annotations = [COLUMNS, ROWS, EXAMPLES]
    closed = jax.make_jaxpr(jax.grad(without, argnums=(0, 1, 2)))(*inputs)
    with pytest.raises(InputError) as refused:
        deduce(closed, annotations)
    message = str(refused.value)
    line = without.__code__.co_firstlineno + 2
    assert "in the backward pass, cannot take operand" in message
    assert f"of operand 0 of dot_general at {__file__}:{line}, float32[12, 8]" in message
    assert "before that line, put x = hetjax.reshard(x, ...)" in message
    assert message.endswith(f"brings its gradient back to lie as\n  {EXAMPLES}")

    def mended(first, second, x):
        y = 2.0 * x
        inside = reshard(y, EXAMPLES)
        hidden = jnp.tanh(inside @ first)
        return jnp.sum((y + reshard(hidden @ second, EXAMPLES)) ** 2)

    program = jax.grad(mended, argnums=(0, 1, 2))
    found, specialized = run(program, inputs, annotations)
    check(found, program(*inputs), tolerance=1e-4)
    assert not list(specialized.program.moves)
