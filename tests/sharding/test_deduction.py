"""Deduction and specialization: whatever the annotations, the programs compute what one would."""

from dataclasses import replace
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import examples, random_model
from deducing import check, drawn, random_annotation, random_union, run
from hypothesis import given
from hypothesis import strategies as st
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from small_models import Model, make_batch

from hetjax import HArray, InputError, reshard
from hetjax.runtime.local.local_program import LocalProgram
from hetjax.sharding import DUPLICATE, PARTIAL, HSharding, Subgroup
from hetjax.sharding.annotation.annotation import HDim
from hetjax.sharding.deduction.annotated_program import Compute
from hetjax.sharding.deduction.deduce import deduce
from hetjax.sharding.deduction.specialize import Segment, specialize


def gradients_of(model: Model, leaves, batch):
    tree = jax.tree.structure(model.init())
    return jax.value_and_grad(lambda p: model.mean_loss(jax.tree.unflatten(tree, p), batch))(leaves)


@examples(usual=4, full=300)
@given(st.integers(0, 2**32 - 1))
def test_specialized_programs_equal_the_whole_one(number: int):
    """Loss and gradients, with annotations drawn for every input, and reshards put in."""
    rng = Random(number)
    model = random_model(rng, max_blocks=1)
    batch, leaves = make_batch(rng.randint(3, 6)), jax.tree.leaves(model.init())
    names = sorted(batch)
    inputs = [*leaves, *(jnp.asarray(batch[name]) for name in names)]
    unions = [random_union(rng) for _ in range(rng.choice((1, 1, 2)))]

    def program(*values):
        batch = dict(zip(names, values[len(leaves) :], strict=True))
        return gradients_of(model, list(values[: len(leaves)]), batch)

    annotations = [
        None if rng.random() < 0.2 else random_annotation(rng, rng.choice(unions), value.shape)
        for value in inputs
    ]
    with jax.numpy_dtype_promotion("standard"):
        found = deduce(jax.make_jaxpr(program)(*inputs), annotations, mend=True)
        expected = jax.tree.leaves(jax.jit(program)(*inputs))
    runner = LocalProgram(specialize(found))
    results = runner(
        *(
            value if annotation is None else HArray.of(value, annotation)
            for value, annotation in zip(inputs, annotations, strict=True)
        )
    )
    tolerance = 1e-5 if model.exact else 0.05
    for result, whole in zip(results, expected, strict=True):
        array = result.numpy() if isinstance(result, HArray) else np.asarray(result)
        scale = max(float(np.max(np.abs(whole.astype(np.float32)))), 1e-3)
        error = np.max(np.abs(array.astype(np.float32) - np.asarray(whole, np.float32)))
        assert error <= tolerance * scale, (model, error / scale)


FOUR = Subgroup((0, 1, 2, 3), (("tensor", 4),), P())
TWO = Subgroup((4, 5), (("tensor", 2),), P())
ONE = Subgroup((6,), (), P())
COLUMNS = HSharding((FOUR.with_spec(P(None, "tensor")), TWO.with_spec(P(None, "tensor")), ONE))
ROWS = HSharding((FOUR.with_spec(P("tensor")), TWO.with_spec(P("tensor")), ONE))
EXAMPLES = HSharding((FOUR, TWO, ONE), hdim=0, sizes=(7, 3, 2))


def test_gradients_under_unequal_tensor_parallelism():
    """Tensor parallelism of 4 beside 2 beside 1: each weight's gradient is the dense one."""

    def loss(weights, x):
        hidden = jnp.tanh(x @ weights[0])
        return jnp.sum(jnp.square(hidden @ weights[1]))

    def program(first, second, x):
        return jax.value_and_grad(loss)([first, second], x)

    inputs = drawn((8, 16), (16, 8), (12, 8))
    found, specialized = run(program, inputs, [COLUMNS, ROWS, EXAMPLES], mend=True)
    check(found, program(*inputs))
    value, first, second = (each.annotation for each in found)
    assert value.hdim == first.hdim == second.hdim == PARTIAL
    # Each gradient lies inside its submeshes as its weight does: nothing was gathered.
    assert [group.spec for group in first.subgroups] == [g.spec for g in COLUMNS.subgroups]
    assert not list(specialized.program.moves)


def test_a_partial_sum_in_the_wrong_place_is_refused_with_what_mends_it():
    def program(weight, x):
        return jnp.tanh(x @ weight)

    weight = HSharding((FOUR.with_spec(P("tensor", None)),))
    x = HSharding((FOUR.with_spec(P(None, "tensor")),))
    inputs = drawn((8, 4), (6, 8))
    with pytest.raises(InputError) as refused:
        deduce(jax.make_jaxpr(program)(*inputs), [weight, x])
    message = str(refused.value)
    assert message.startswith(f"tanh at {__file__}:")
    assert "cannot take operand 0 as it lies: it is a partial sum" in message
    assert "P(unreduced={'tensor'})" in message
    assert message.endswith("HSharding(devices [0-3] as tensor=4: P())")

    def mended(weight, x):
        return jnp.tanh(reshard(x @ weight, HSharding((FOUR.with_spec(P()),))))

    found, _ = run(mended, inputs, [weight, x])
    check(found, program(*inputs))


def two_stages(first, second, x, labels=None):
    hidden = jnp.tanh(x @ first)
    return jnp.sum(jnp.square(reshard(hidden, [LATER, TOGETHER]) @ second))


EARLY = HSharding((Subgroup((0, 1), (("data", 2),), P("data")), Subgroup((2,), (), P())), 0, (4, 2))
LATER = HSharding((Subgroup((3,), (), P()), Subgroup((4, 5), (("data", 2),), P("data"))), 0, (2, 4))
TOGETHER = HSharding((Subgroup((6, 7), (("data", 2),), P("data")),))


def whole_on(annotation: HSharding) -> HSharding:
    return HSharding(tuple(group.with_spec(P()) for group in annotation.subgroups))


@pytest.mark.parametrize(("strategy", "later"), [(0, LATER), (1, TOGETHER)])
def test_a_value_moves_on_and_its_gradient_comes_back(strategy: int, later: HSharding):
    program = jax.grad(two_stages, argnums=(0, 1))
    inputs = drawn((4, 8), (8, 4), (6, 4))
    annotations = [whole_on(EARLY), whole_on(later), EARLY]
    found, specialized = run(program, inputs, annotations, strategy=strategy)
    check(found, program(*inputs))
    assert found[0].annotation.devices == EARLY.devices
    assert found[1].annotation.devices == later.devices
    forward, backward = specialized.program.moves
    assert forward.destination == later
    assert backward.source is not None
    assert (backward.source.devices, backward.destination) == (later.devices, EARLY)
    # A submesh of one stage computes nothing of the other.
    primitives = {
        submesh.devices: [
            node.equation.primitive.name
            for step in specialized.steps
            if isinstance(step, Segment) and {*step.submesh.devices} & {*submesh.devices}
            for node, _ in step.nodes
            if isinstance(node, Compute)
        ]
        for submesh in (EARLY.subgroups[0], later.subgroups[0])
    }
    assert "tanh" in primitives[EARLY.subgroups[0].devices]
    assert "tanh" not in primitives[later.subgroups[0].devices]


def test_a_strategy_that_is_not_there_is_refused():
    inputs = drawn((4, 8), (8, 4), (6, 4))
    closed = jax.make_jaxpr(two_stages)(*inputs)
    with pytest.raises(InputError, match=r"strategy: 2 is not allowed: .* of 2 strategies"):
        deduce(closed, [whole_on(EARLY), whole_on(LATER), EARLY], strategy=2)
    with pytest.raises(InputError, match="annotations: 1 are given, and the program has 3 inputs"):
        deduce(closed, [EARLY])
    with pytest.raises(InputError, match=r"annotations\[2\]: sizes: .* dimension 0 of shape"):
        deduce(closed, [whole_on(EARLY), whole_on(LATER), replace(EARLY, sizes=(9, 9))])


def test_sizes_may_be_symbols_until_the_input_comes():
    symbolic = replace(EARLY, sizes=("2*batch", "batch"))
    (x,) = drawn((6, 4))
    closed = jax.make_jaxpr(jnp.tanh)(x)
    found = deduce(closed, [symbolic], symbols={"batch": 2})
    assert found.annotations[found.outputs[0]] == EARLY
    with pytest.raises(InputError, match="batch"):
        deduce(closed, [symbolic])


def test_a_coarse_union_is_written_over_a_finer_one():
    coarse = HSharding((Subgroup((0, 1, 2), (("data", 3),), P("data")),))
    parts = tuple(Subgroup((device,), (), P()) for device in range(3))
    fine = HSharding(parts, 0, (2, 2, 2))
    found, specialized = run(jnp.add, drawn((6, 2), (6, 2)), [coarse, fine])
    assert found[0].annotation == fine
    check(found, jnp.add(*drawn((6, 2), (6, 2))))
    assert len(list(specialized.program.moves)) == 1


def mixture(parameters, x):
    """A mixture of experts: each token goes to its two best of four."""
    weights, chosen = jax.lax.top_k(jax.nn.softmax(x @ parameters[0]), 2)
    places = jax.nn.one_hot(chosen, 4)
    expert_inputs = jnp.einsum("nke,nd->end", places, x)
    hidden = jax.nn.gelu(jnp.einsum("end,edf->enf", expert_inputs, parameters[1]))
    out = jnp.einsum("nke,enf,nk->nf", places, hidden, weights)
    load = jnp.cumsum(places.sum((0, 1)))
    return jnp.mean(jnp.square(out)) + 0.01 * jnp.max(load)


def convolutions(parameters, x):
    """A small CNN, with pooling of both kinds."""
    numbers = ("NHWC", "HWIO", "NHWC")
    y = jax.lax.conv_general_dilated(x, parameters[0], (1, 1), "SAME", dimension_numbers=numbers)
    y = jax.nn.relu((y - y.mean((1, 2), keepdims=True)) * jax.lax.rsqrt(y.var() + 1.0))
    window = ((1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    best = jax.lax.reduce_window(y, -jnp.inf, jax.lax.max, *window)
    mean = jax.lax.reduce_window(y, 0.0, jax.lax.add, *window)
    return jnp.sum((best + mean).reshape(x.shape[0], -1) @ parameters[1])


def training_step(parameters, moments, x):
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))
    tree = jax.tree.structure(optimizer.init(parameters))
    state = jax.tree.unflatten(tree, moments)
    gradients = jax.grad(mixture)(parameters, x)
    updates, state = optimizer.update(gradients, state, parameters)
    return optax.apply_updates(parameters, updates), jax.tree.leaves(state)


@examples(usual=1, full=100)
@given(st.integers(0, 2**32 - 1))
def test_a_mixture_of_experts_a_network_of_convolutions_and_a_training_step(number: int):
    rng = Random(number)
    union = random_union(rng)
    cases = (
        (jax.value_and_grad(mixture), (drawn((8, 4), (4, 8, 8)), drawn((12, 8))[0])),
        (jax.value_and_grad(convolutions), (drawn((3, 3, 4, 8), (32, 3)), drawn((6, 4, 4, 4))[0])),
        (
            training_step,
            (
                drawn((8, 4), (4, 8, 8)),
                [jnp.zeros((), jnp.int32), *[jnp.zeros(s) for s in ((8, 4), (4, 8, 8)) * 2]],
                drawn((12, 8))[0],
            ),
        ),
    )
    for function, arguments in cases:
        leaves, tree = jax.tree.flatten(arguments)

        def program(*values, function=function, tree=tree):
            return function(*jax.tree.unflatten(tree, values))

        annotations = [random_annotation(rng, union, leaf.shape) for leaf in leaves]
        with jax.numpy_dtype_promotion("standard"):
            found, _ = run(program, leaves, annotations, mend=True)
            check(found, jax.jit(program)(*leaves), tolerance=1e-4)


def test_reshard_lays_arrays_out_and_moves_them():
    value = np.arange(6.0)
    halves = HSharding((Subgroup((0,), (), P()), Subgroup((1,), (), P())), 0, (4, 2))
    array = reshard(value, halves)
    np.testing.assert_array_equal(array[1], [4, 5])
    np.testing.assert_array_equal(reshard(array, whole_on(halves))[1], value)
    with pytest.raises(InputError, match="2 are given; outside of a trace there is one"):
        reshard(value, [halves, halves])
    with pytest.raises(InputError, match="none is given"):
        reshard(value, [])
    with pytest.raises(InputError, match="sizes: "):
        reshard(value[:4], halves)


def test_numpy_and_jax_take_the_whole_of_a_union_array():
    value = np.arange(6, dtype=np.float32)
    halves = HSharding((Subgroup((0,), (), P()), Subgroup((3,), (), P())), 0, (4, 2))
    array = HArray.of(value, halves)
    for whole in (np.asarray(array), jnp.asarray(array), np.asarray(array, np.float64)):
        np.testing.assert_array_equal(whole, value)
    assert np.asarray(array, np.float64).dtype == np.float64
    with pytest.raises(InputError, match="copy: False is not allowed"):
        np.asarray(array, copy=False)
    odd: Any = array
    with pytest.raises(TypeError, match="'HArray' object is not iterable"):
        list(odd)
    for device in (1, "a", slice(0, 2), [0]):
        with pytest.raises(InputError, match=r"has no shard; allowed: devices \[0, 3\]"):
            odd[device]


def test_an_input_must_lie_as_its_annotation_says():
    program = specialize(deduce(jax.make_jaxpr(jnp.tanh)(np.ones(6, np.float32)), [EARLY]))
    runner = LocalProgram(program)
    with pytest.raises(InputError, match=r"inputs\[0\]: it must be a HArray that lies as"):
        runner(np.ones(6, np.float32))
    with pytest.raises(InputError, match=r"devices .* are not there; there are 1"):
        LocalProgram(program, jax.devices()[:1])


HALVES = HSharding((Subgroup((0,), (), P()), Subgroup((1,), (), P())), 0, (2, 2))
INSIDE = HSharding((Subgroup((0, 1), (("x", 2),), P("x")),))
NUMBERS = jnp.asarray([0.5, -2.0, 0.75, 3.5], jnp.float32)


def sum_of(x):
    return jnp.sum(x, 0)


@pytest.mark.parametrize("annotation", [HALVES, INSIDE], ids=["among submeshes", "inside one"])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: sum_of(x).astype(jnp.int32),
        lambda x: sum_of(x) / 3.0,
        lambda x: 3.0 / sum_of(x),
        lambda x: jax.lax.div(sum_of(x.astype(jnp.int32)), 2),
        lambda x: sum_of(x).astype(bool),
        lambda x: jax.lax.reduce_precision(sum_of(x), 8, 2),
        lambda x: jnp.pad(sum_of(jnp.stack([x, x], 1)), 1, constant_values=1.0),
        lambda x: (
            sum_of(jnp.stack([x, x], 1)).at[jnp.asarray([0, 7])].get(mode="fill", fill_value=5.0)
        ),
        lambda x: jnp.take(sum_of(jnp.stack([x, x], 1).astype(jnp.int32)), jnp.asarray([1, 9])),
        lambda x: jnp.clip(sum_of(x), -1.0, 1.0),
        lambda x: jnp.where(sum_of(x) > 0, sum_of(x), x[0]),
        lambda x: jnp.stack([sum_of(x), 2.0 * sum_of(x) - x[1], -sum_of(x)]),
        lambda x: jnp.square(jax.lax.complex(sum_of(x), x[0])).imag,
        lambda x: jnp.abs(jnp.conj(jax.lax.complex(x, sum_of(x) + x))),
        lambda x: jnp.unstack(jnp.stack([x, 2.0 * x], 1) ** 2, axis=1),
        lambda x: sum_of(jax.grad(lambda y: jnp.sum(jnp.stack([y, y * y], -1) ** 3))(x)),
        lambda x: jnp.abs(jnp.fft.fft(jnp.stack([x, -x, x * x], 1)).sum(0)),
        lambda x: jnp.fft.rfft(jnp.stack([x, 1.0 - x], 0)).real,
        lambda x: sum_of(x) * sum_of(x),
        lambda x: jax.lax.scan(lambda c, _: (c + c, jnp.abs(c)), sum_of(x), None, length=2),
        lambda x: jax.lax.fori_loop(0, 3, lambda _, c: jnp.maximum(c + c, 1.0), sum_of(x)),
        lambda x: jax.lax.scan(lambda c, row: (c + sum_of(row), c), 0.0, jnp.stack([x, -x])),
        lambda x: jax.lax.cond(x[0] > 0, lambda y: sum_of(y), lambda y: jnp.max(y), x),
        lambda x: jax.lax.optimization_barrier((x, sum_of(x))),
        lambda x: jax.lax.cumsum(x, reverse=True),
        lambda x: jax.lax.bitcast_convert_type(x, jnp.uint8),
        lambda x: jax.lax.reduce_window(
            jnp.stack([x, x], 1), 0.0, jax.lax.add, (1, 1), (1, 1), "VALID", base_dilation=(2, 1)
        ),
    ],
)
def test_sums_of_parts_go_through_linear_functions_alone(function, annotation):
    """Numbers whose sum is another one than what a nonlinear function makes of the parts."""
    with jax.numpy_dtype_promotion("standard"):
        found, _ = run(function, [NUMBERS], [annotation], mend=True)
        expected = jax.jit(function)(NUMBERS)
    check(found, expected, tolerance=1e-6)


def symmetric(x):
    return x @ x.swapaxes(1, 2) + jnp.eye(3)


@pytest.mark.parametrize("annotation", [HALVES, INSIDE], ids=["among submeshes", "inside one"])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: jnp.linalg.cholesky(symmetric(x)),
        lambda x: jnp.linalg.eigh(symmetric(x))[0],
        lambda x: jnp.linalg.svd(x, compute_uv=False),
        lambda x: jnp.abs(jnp.linalg.eigh(symmetric(x))[1]),
        lambda x: jnp.abs(jnp.linalg.svd(x)[2]),
        lambda x: jax.lax.linalg.lu(symmetric(x)),
        lambda x: jax.scipy.linalg.solve_triangular(jnp.tril(symmetric(x)), x, lower=True),
        lambda x: jax.lax.approx_max_k(x, 2, reduction_dimension=2)[0],
        lambda x: jax.scipy.special.i0e(x) + jax.scipy.special.i1e(x),
        lambda x: checkpoint_name(x, "x") + jnp.fft.irfft(jnp.fft.rfft(x), 3),
        lambda x: jnp.stack(jnp.unstack(x, axis=2)[::-1], -1),
    ],
)
def test_each_matrix_is_computed_by_itself(function, annotation):
    matrices = jax.random.normal(jax.random.key(0), (4, 3, 3))
    found, _ = run(function, [matrices], [annotation])
    check(found, jax.jit(function)(matrices), tolerance=1e-5)
    assert [each.annotation for each in found] == [annotation] * len(found)


def test_a_function_that_is_called_often_brings_each_gradient_back():
    early, late, other = (HSharding((Subgroup((device,), (), P()),)) for device in (0, 1, 2))
    moved = jax.jit(lambda x: reshard(x, other))
    program = jax.grad(lambda a, b: jnp.sum(moved(a) * moved(b)), argnums=(0, 1))
    inputs = drawn((4,), (4,))
    found, _ = run(program, inputs, [early, late])
    check(found, program(*inputs))
    assert [each.annotation for each in found] == [early, late]


def test_submeshes_of_unlike_axes_meet():
    one = HSharding((Subgroup((2, 3), (("b", 2),), P()),))
    other = HSharding((Subgroup((0, 1), (("a", 2),), P("a")),))
    inputs = drawn((4,), (4,))
    found, _ = run(jnp.add, inputs, [one, other], mend=True)
    check(found, jnp.add(*inputs))


@pytest.mark.parametrize(("axis", "hdim", "spec"), [(0, 2, P(None, "x")), (1, 2, P("x"))])
def test_under_vmap_each_value_lies_as_annotated(axis: int, hdim: int, spec: P):
    two, one = Subgroup((0, 1), (("x", 2),), P("x")), Subgroup((2,), (), P())
    lies = HSharding((two, one), hdim=1, sizes=(3, 1))
    (matrices,) = drawn((4, 4, 4))

    def each(matrix):
        return jnp.sum(jnp.square(reshard(matrix, lies)))

    mapped = jax.vmap(lambda x: reshard(x, lies) * 2.0, in_axes=axis, out_axes=axis)
    found, _ = run(mapped, [matrices], [whole_on(lies)])
    check(found, 2.0 * matrices)
    stacked = HSharding((two.with_spec(spec), one), hdim=hdim, sizes=(3, 1))
    assert found[0].annotation == stacked
    gradient = jax.grad(lambda x: jnp.sum(jax.vmap(each, axis)(x)))
    found, _ = run(gradient, [matrices], [whole_on(lies)])
    check(found, 2.0 * matrices)
    np.testing.assert_allclose(
        jax.hessian(lambda x: jnp.sum(reshard(x, lies) ** 3))(matrices[0]),
        jax.hessian(lambda x: jnp.sum(x**3))(matrices[0]),
        rtol=1e-6,
    )


def test_a_reshard_inside_a_body_stays_on_its_submeshes():
    (x,) = drawn((2, 4))

    def program(x):
        return jax.lax.scan(lambda c, row: (c, reshard(row, HALVES) * 2.0), 0.0, x)[1]

    with pytest.raises(InputError, match="a value must come to other submeshes"):
        deduce(jax.make_jaxpr(program)(x), [None])


def test_inputs_are_checked():
    runner = LocalProgram(specialize(deduce(jax.make_jaxpr(jnp.tanh)(NUMBERS), [HALVES])))
    with pytest.raises(InputError, match="inputs: 0 are given, and the program has 1"):
        runner()
    with pytest.raises(InputError, match=r"inputs\[0\]: it is float32\[3\], and the program takes"):
        runner(HArray.of(NUMBERS[:3], replace(HALVES, sizes=(2, 1))))
    even = replace(HALVES, sizes=())
    (found,) = runner(HArray.of(NUMBERS, even))
    check([found], jnp.tanh(NUMBERS))


def test_a_submesh_that_has_nothing_takes_summands_of_nothing():
    pair, third = Subgroup((0, 1), (("x", 2),), P()), Subgroup((2,), (), P())
    rows = HSharding((pair, third), 0, (0, 4))
    sums = HSharding((pair.with_spec(P(unreduced=frozenset({"x"}))), third), 0, (0, 4))
    x, y = drawn((4, 12), (4, 6))
    found, _ = run(lambda x, y: x.T @ y, [x, y], [rows, sums], sums_stay=True)
    check(found, x.T @ y)


def test_what_is_made_of_little_is_made_again_where_it_is_read():
    """One-hot labels do not go from segment to segment: the labels do."""
    hosts = Subgroup((0,), (), P()), Subgroup((1,), (), P())
    rows = HSharding(hosts, 0, (4, 2))

    def function(x, labels):
        chosen = jax.nn.one_hot(labels, 64)
        # A sum among the submeshes, of which all need the whole: what follows is another segment.
        total = jnp.tanh(jnp.sum(x * chosen, 0))
        return jnp.sum(x * total * chosen, 1)

    (x,), labels = drawn((6, 64)), jnp.arange(6, dtype=np.int32)
    inputs = x, labels
    found, specialized = run(function, inputs, [rows, rows], mend=True)
    check(found, function(x, labels))
    program = specialized.program
    segments = [each for each in specialized.steps if isinstance(each, Segment)]
    assert len(segments) > 2
    handed_on = {value for each in segments for value in each.outputs} - {*program.outputs}
    assert all(program.shapes[value].shape != (6, 64) for value in handed_on)


def halvings(x: jax.Array, limits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Halves each row until it adds up to less than its limit; how often, too."""

    def of_one(row: jax.Array, limit: jax.Array) -> Any:
        return jax.lax.while_loop(
            lambda carry: jnp.sum(carry[1]) > limit,
            lambda carry: (carry[0] + 1, carry[1] / 2),
            (0, row),
        )

    return jax.vmap(of_one)(jnp.exp(x), limits)


UNEVEN = (
    Subgroup((0, 1, 2, 3), (("data", 2), ("tensor", 2)), P()),
    Subgroup((4, 5), (("data", 2), ("tensor", 1)), P()),
)


@pytest.mark.parametrize("are_limits_divided", [False, True])
@pytest.mark.parametrize(
    ("hdim", "sizes", "spec"),
    [
        (DUPLICATE, (), P()),
        (DUPLICATE, (), P("data", "tensor")),
        (0, (4, 2), P("data", "tensor")),
        (0, (4, 2), P()),
        (1, (4, 2), P("data", "tensor")),
    ],
)
def test_each_example_of_a_batched_loop_goes_on_by_itself(
    hdim: HDim, sizes: tuple[int, ...], spec: P, are_limits_divided: bool
):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(6, 6)).astype(np.float32)) * jnp.arange(6.0)[:, None]
    limits = jnp.asarray(rng.uniform(1, 4, 6).astype(np.float32))
    lies = HSharding(tuple(group.with_spec(spec) for group in UNEVEN), hdim, sizes)
    of_limits = replace(lies, hdim=0, sizes=(4, 2), subgroups=UNEVEN) if sizes else None
    annotations = [lies, of_limits if are_limits_divided else None]
    found, _ = run(halvings, [x, limits], annotations, mend=True)
    check(found, halvings(x, limits))
