"""Mending: missing reshards are put in where they move little, and it is said what they do."""

from random import Random

import jax
import jax.numpy as jnp
import pytest
from cases import examples
from deducing import check, drawn, random_annotation, random_union, run
from hypothesis import given
from hypothesis import strategies as st
from jax.extend.core import jaxpr_as_fun
from jax.sharding import PartitionSpec as P

from hetjax.errors import InputError
from hetjax.pipeline.program.traced_program import Constant, Operand
from hetjax.pipeline.stages import told_moves
from hetjax.sharding import PARTIAL, HSharding, Subgroup, deduce
from hetjax.sharding.deduction.annotated_program import Move
from hetjax.sharding.deduction.bottom_tier import OperandError
from hetjax.sharding.deduction.computing import EquationLayouts
from hetjax.sharding.deduction.opening import EXTREMA, deduce_opened, opened_program
from hetjax.sharding.resolution.resolve import moved_elements

TWO = Subgroup((0, 1), (("tensor", 2),), P())
ONE = Subgroup((2,), (), P())
WHOLE = HSharding((TWO, ONE))


def moved_bytes(program):
    return sum(
        moved_elements(node.source, node.destination, program.shapes[node.input].shape)
        * program.shapes[node.input].dtype.itemsize
        for node in program.nodes
        if isinstance(node, Move)
    )


def test_an_operand_goes_where_the_other_one_is():
    """Rows in other shares are brought to these shares; nothing is gathered."""
    unlike = HSharding((TWO, ONE), 0, (4, 2)), HSharding((TWO, ONE), 0, (3, 3))
    inputs = drawn((6, 8), (6, 8))
    found, specialized = run(jnp.add, inputs, unlike, mend=True)
    check(found, jnp.add(*inputs))
    mends = specialized.program.mends
    assert {mend.destination.hdim for mend in mends} == {0}
    assert len({mend.destination.sizes for mend in mends}) == 1
    # One row of one operand: the third device has it from the others, or they have it from it.
    told = sum(mend.num_bytes for mend in mends)
    assert told == moved_bytes(specialized.program) <= 2 * 8 * 4


def test_a_sum_is_scattered_where_the_next_operand_is_divided():
    weight = HSharding((TWO, ONE), 0, (5, 3))
    x = HSharding((TWO, ONE), 1, (5, 3))
    other = HSharding((TWO, ONE), 0, (4, 2))
    inputs = drawn((6, 8), (8, 4), (6, 4))
    found, specialized = run(
        lambda x, w, y: jnp.tanh(x @ w) * y, inputs, [x, weight, other], mend=True
    )
    check(found, jnp.tanh(inputs[0] @ inputs[1]) * inputs[2])
    (mend,) = specialized.program.mends
    assert mend.source.hdim == PARTIAL
    assert (mend.destination.hdim, mend.destination.sizes) == (0, (4, 2))
    assert "submeshes have summands of it" in mend.reason


def test_a_sum_is_added_up_before_it_grows():
    x, weight = HSharding((TWO, ONE), 1, (5, 3)), HSharding((TWO, ONE), 0, (5, 3))
    inputs = drawn((6, 8), (8, 1))

    def program(x, w):
        return jnp.tanh(jnp.broadcast_to(x @ w, (6, 50)))

    found, specialized = run(program, inputs, [x, weight], mend=True)
    check(found, program(*inputs))
    assert moved_bytes(specialized.program) <= 4 * 2 * 2 * 6


def test_a_value_that_is_needed_twice_moves_once():
    rows, others = HSharding((TWO, ONE), 0, (4, 2)), HSharding((TWO, ONE), 0, (2, 4))
    inputs = drawn((6, 3), (6, 50), (6, 50))

    def program(x, y, z):
        return (x[:, :1] * y) + (jnp.tanh(x[:, :1]) * z)

    found, specialized = run(program, inputs, [rows, others, others], mend=True)
    check(found, program(*inputs))
    assert moved_bytes(specialized.program) <= 2 * 2 * 2 * 3 * 4


@pytest.mark.parametrize(
    "program",
    [
        lambda x: jnp.fft.fft(x, axis=0).real,
        lambda x: jnp.linalg.cholesky(x @ x.T + 8 * jnp.eye(6)),
        lambda x: jnp.sort(x, axis=0),
        lambda x: x[1:5] * 2.0,
        lambda x: x.at[jnp.asarray([1, 3])].set(0.0),
    ],
    ids=["fft", "cholesky", "sort", "slice", "scatter"],
)
def test_what_cannot_be_divided_is_brought_together_and_said(program):
    rows = HSharding((TWO, ONE), 0, (4, 2))
    inputs = drawn((6, 6))
    with jax.numpy_dtype_promotion("standard"):
        found, specialized = run(program, inputs, [rows], mend=True)
        check(found, program(*inputs), tolerance=1e-4)
    mends = specialized.program.mends
    assert any(mend.reason for mend in mends)
    assert sum(mend.num_bytes for mend in mends) == moved_bytes(specialized.program) > 0
    assert all(f"{mend.num_bytes} bytes move from" in str(mend) for mend in mends)


def test_a_primitive_without_a_rule_says_so_and_what_it_costs():
    rows = HSharding((TWO, ONE), 0, (4, 2))
    closed = jax.make_jaxpr(lambda x: jax.lax.linalg.qr(x)[0])(jnp.eye(6))
    with pytest.raises(InputError, match=r"qr has no rule for that[\s\S]*moves \d+ bytes"):
        deduce(closed, [rows])


def last_rows(x):
    """Three rows of six, from a start that is clamped."""
    return jax.lax.dynamic_slice(x, (x[0, 0].astype(jnp.int32) + 5, 0), (3, 4))


@pytest.mark.parametrize(
    "function",
    [
        last_rows,
        jax.grad(lambda x: jnp.sum(last_rows(x) ** 2)),
        lambda x: jax.lax.pad(x, 1.0, ((-1, 2, 1), (0, 0, 0))),
        lambda x: jnp.abs(jnp.linalg.qr(x.reshape(6, 2, 2))[1]),
    ],
    ids=["dynamic_slice", "its gradient", "pad", "qr"],
)
@pytest.mark.parametrize("count", [2, 3])
def test_what_is_not_divided_is_brought_together_inside_a_submesh(function, count):
    """JAX lets some of it be divided; XLA's numbers are then wrong, or its process ends."""
    group = Subgroup(tuple(range(count)), (("tensor", count),), P("tensor"))
    inputs = drawn((6, 4))
    found, specialized = run(function, inputs, [HSharding((group,))], mend=True)
    check(found, jax.jit(function)(*inputs), tolerance=1e-4)
    assert any("is divided over ['tensor']" in each.reason for each in specialized.program.mends)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: jax.lax.dynamic_slice(x, (jnp.int32(5), jnp.int32(1)), (6, 2)),
        lambda x: jax.nn.softmax(x, axis=0),
        lambda x: jnp.argmax(x, axis=0),
        lambda x: jnp.split(x, 3)[1] * 2.0,
    ],
    ids=["dynamic_slice", "softmax", "argmax", "split"],
)
def test_what_is_divided_inside_a_submesh_stays_so(function):
    rows = HSharding((TWO.with_spec(P("tensor")),))
    inputs = drawn((6, 4))
    found, specialized = run(function, inputs, [rows])
    check(found, jax.jit(function)(*inputs))
    assert not list(specialized.program.moves)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, u: x.at[jnp.asarray([4, 1])].set(u),
        lambda x, u: x.at[jnp.asarray([4, 1])].set(u, unique_indices=True),
        lambda x, u: x.at[jnp.asarray([4, 1])].multiply(u),
        lambda x, u: x.at[jnp.asarray([4, 1])].min(u),
        lambda x, u: x.at[jnp.asarray([4, 1])].max(u),
    ],
    ids=["set", "set unique", "multiply", "min", "max"],
)
def test_scatters_are_divided_along_what_they_take_whole(function):
    columns = HSharding((TWO.with_spec(P(None, "tensor")), ONE), 1, (4, 2))
    inputs = drawn((6, 6), (2, 6))
    found, specialized = run(function, inputs, [columns, columns])
    check(found, function(*inputs))
    assert not list(specialized.program.moves)
    assert found[0].annotation == columns


@examples(usual=15, full=200)
@given(st.integers(0, 2**32 - 1))
def test_wrong_annotations_give_the_dense_result(number: int):
    """Chains of products, sums and functions of one element, with inputs that lie at random."""
    rng = Random(number)
    union = random_union(rng)
    steps = [rng.choice(("product", "sum", "tanh", "maximum", "turn")) for _ in range(4)]
    count = 1 + sum(step in ("product", "sum", "maximum") for step in steps)
    inputs = drawn(*[(12, 12)] * count)

    def program(x, *others):
        rest = list(others)
        for step in steps:
            match step:
                case "product":
                    x = x @ rest.pop()
                case "sum":
                    x = x + rest.pop()
                case "maximum":
                    x = jnp.maximum(x, rest.pop())
                case "turn":
                    x = x.T
                case _:
                    x = jnp.tanh(x)
        return x

    annotations = [random_annotation(rng, union, (12, 12)) for _ in inputs]
    found, specialized = run(program, inputs, annotations, mend=True)
    check(found, program(*inputs), tolerance=1e-4)
    told = sum(mend.num_bytes for mend in specialized.program.mends)
    assert told == moved_bytes(specialized.program)


def test_axes_of_one_device_divide_nothing():
    """An operand that names one is divided as one that does not, and can be computed with it."""
    pair = Subgroup((0, 1), (("data", 1), ("tensor", 2)), P())
    single = Subgroup((2,), (("data", 1), ("tensor", 1)), P())
    x = HSharding(
        (single.with_spec(P(None, ("data", "tensor"))), pair.with_spec(P(None, "tensor"))),
        hdim=1,
        sizes=(5, 2),
    )
    inputs = drawn((4, 7), (8, 7))

    def product(x, w):
        return jnp.tanh(jax.lax.dot_general(x, w, (((1,), (1,)), ((), ()))))

    # Of 7 columns two devices cannot have even parts: only a part of them is divided inside.
    found, specialized = run(product, inputs, [x, HSharding((single, pair))], mend=True)
    check(found, product(*inputs))
    assert all(
        size > 1
        for annotation in specialized.program.annotations
        for group in (annotation.subgroups if annotation is not None else ())
        for name, size in group.axes
        if name in str(group.spec)
    )


def test_what_is_wrong_with_one_submesh_is_not_said_of_another():
    """Unions of the same submeshes in another order: what is remembered is of each its own."""
    problem = OperandError(1, "it is a partial sum", P("tensor"))
    first, second = problem.at(2), problem.at(0)
    assert (first.place, second.place, problem.place) == (2, 0, 0)
    assert (second.operand, second.spec) == (1, P("tensor"))


def test_what_a_told_program_moves_inside_bodies_is_found_again():
    """A scan whose body adds up inside a submesh: no reshard of it can be told."""
    weights = HSharding((TWO.with_spec(P(None, "tensor")), ONE))
    x = HSharding((TWO.with_spec(P(None, "tensor")), ONE), 0, (4, 2))

    def loss(x, stacked):
        def step(x, w):
            return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + w), None

        return jax.lax.scan(step, x, stacked)[0]

    closed = jax.make_jaxpr(loss)(*drawn((6, 8), (3, 8)))
    told = told_moves.told(deduce(closed, [x, weights], mend=True, sums_stay=True))

    def again(*arrays):
        values: dict[Operand, jax.Array] = dict(zip(told.inputs, arrays, strict=True))
        for step in told.steps:
            taken = (
                each.value if isinstance(each, Constant) else values[each] for each in step.inputs
            )
            values.update(zip(step.outputs, step.evaluate(*taken), strict=True))
        return [values[value] for value in told.outputs]

    program = jax.make_jaxpr(again)(*closed.in_avals)
    with pytest.raises(InputError, match="partial sum"):
        deduce(program, [x, weights], sums_stay=True)
    found = deduce(program, [x, weights], mend_bodies=True, sums_stay=True)
    assert not found.mends


@pytest.mark.parametrize("reduce", [jnp.max, jnp.min])
@pytest.mark.parametrize("shape", [(6, 2048), (2, 1031), (4096,), (3, 1024, 5)])
def test_a_long_extremum_is_that_of_its_parts(reduce, shape):
    """Where no number of parts divides it, it stays as it is."""
    (x,) = drawn(shape)
    program = jax.make_jaxpr(lambda x: reduce(x, axis=len(shape) // 2))(x)
    opened = opened_program(program, EXTREMA)
    names = [each.primitive.name for each in opened.jaxpr.eqns]
    assert len(names) == (1 if 1031 in shape else 3)
    expected = reduce(x, axis=len(shape) // 2)
    for each in (program, opened):
        (found,) = jaxpr_as_fun(each)(x)
        assert (found == expected).all()


def test_a_loss_over_a_divided_vocabulary_moves_no_logits():
    """Its maxima are taken by parts, of which members give each other few."""
    two = HSharding((ONE, Subgroup((3,), (), P())), 1, (1024, 3072))

    def loss(x):
        return -jnp.sum(jax.nn.log_softmax(x) * jax.nn.one_hot(jnp.arange(8), 4096))

    found = deduce_opened(jax.make_jaxpr(loss)(*drawn((8, 4096))), [two])
    assert sum(mend.num_bytes for mend in found.mends) < 8 * 4096 * 4 / 8


FOUR = Subgroup((0, 1, 2, 3), (("data", 2), ("tensor", 2)), P())


def on_four(*entries):
    return HSharding((FOUR.with_spec(P(*entries)),))


def embedding_gradients(table, weight, tokens):
    def loss(table, weight):
        return jnp.sum(jnp.tanh(table[tokens] @ weight))

    return jax.grad(loss, argnums=(0, 1))(table, weight)


def convolution_gradients(kernel, weight, x):
    def loss(kernel, weight):
        found = jax.lax.conv_general_dilated(
            x, kernel, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
        )
        return jnp.sum(jnp.tanh(found @ weight))

    return jax.grad(loss, argnums=(0, 1))(kernel, weight)


@pytest.mark.parametrize("sums_stay", [False, True])
@pytest.mark.parametrize(
    ("function", "shapes", "divided"),
    [
        (embedding_gradients, [(5, 4), (4, 6), (8,)], P("data")),
        (convolution_gradients, [(3, 4, 4), (4, 6), (8, 5, 4)], P("data")),
    ],
    ids=["embedding", "convolution"],
)
def test_a_sum_over_examples_of_what_is_a_sum_over_features_loses_neither(
    function, shapes, divided, sums_stay
):
    """The cotangent of a product by columns is a partial sum, and its examples are divided."""
    first, weight, last = drawn(*shapes)
    last = (jnp.abs(last) * 3).astype(jnp.int32) % 5 if last.ndim == 1 else last
    inputs = [first, weight, last]
    given = [on_four(), on_four(None, "tensor"), on_four(*divided)]
    found, _ = run(function, inputs, given, mend=True, sums_stay=sums_stay)
    check(found, function(*inputs))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: jnp.expand_dims(x, 2) * 2.0,
        lambda x: x.reshape(6, 4, 1) * 2.0,
        lambda x: jnp.broadcast_to(x[:, :, None], (6, 4, 3)) * 2.0,
        lambda x: jax.lax.slice(x[:, :, None] * jnp.ones(3), (0, 0, 1), (6, 4, 3)),
    ],
    ids=["expand_dims", "reshape", "broadcast", "slice"],
)
def test_ranges_of_several_dimensions_change_all_of_their_sizes(function):
    alone = tuple(Subgroup((device,), (), P()) for device in range(4))
    ranges = tuple((rows, columns) for rows in ((0, 2), (2, 6)) for columns in ((0, 3), (3, 4)))
    (x,) = drawn((6, 4))
    found, specialized = run(function, [x], [HSharding(alone, hdim=(0, 1), ranges=ranges)])
    check(found, function(x))
    assert not list(specialized.program.moves)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, u: jnp.tile(x, (1, 2)) + 0 * jnp.sum(u),
        lambda x, u: x.at[jnp.asarray([4, 1])].subtract(u),
    ],
    ids=["tile", "subtract"],
)
def test_what_jax_has_since_0_10_is_divided(function):
    rows = HSharding((TWO, ONE), 0, (4, 2))
    columns = HSharding((TWO.with_spec(P(None, "tensor")), ONE), 1, (4, 2))
    inputs = drawn((6, 6), (2, 6))
    tiles = jax.make_jaxpr(function)(*inputs).jaxpr.eqns
    lies = rows if any(each.primitive.name == "tile" for each in tiles) else columns
    found, specialized = run(function, inputs, [lies, lies if lies is columns else None])
    check(found, function(*inputs))
    assert not list(specialized.program.moves)


@pytest.mark.parametrize("sums_stay", [False, True])
@pytest.mark.parametrize("is_partial", [(True, True), (True, False)], ids=["both", "the base"])
def test_a_partial_sum_that_others_are_added_to_counts_once(is_partial, sums_stay):
    def function(x, w, u, v, places):
        base = x @ w
        return base.at[places].add(u @ v if is_partial[1] else u[:, :1] * v[:1])

    columns, rows = on_four(None, "tensor"), on_four("tensor")
    inputs = [*drawn((5, 4), (4, 6), (8, 4), (4, 6)), jnp.arange(8) % 5]
    updates = on_four("data", "tensor") if is_partial[1] else on_four("data")
    given = [columns, rows, updates, rows if is_partial[1] else on_four(), on_four("data")]
    found, _ = run(function, inputs, given, mend=True, sums_stay=sums_stay)
    check(found, function(*inputs))


def test_what_was_found_for_one_program_is_known_of_the_next(monkeypatch):
    asked = []
    computing = EquationLayouts.__call__

    def counted(self, equation, shapes, annotations):
        asked.append(equation.primitive.name)
        return computing(self, equation, shapes, annotations)

    monkeypatch.setattr(EquationLayouts, "__call__", counted)
    rows, inputs = HSharding((TWO, ONE), 0, (4, 3)), drawn((7, 7), (7, 7))

    def scaled(scale: float):
        return lambda x, w: jnp.tanh(x @ w) * scale + x.T @ (x @ w)

    _, first = run(scaled(2.0), inputs, [rows, WHOLE], mend=True)
    assert asked
    asked.clear()
    found, again = run(scaled(3.0), inputs, [rows, WHOLE], mend=True)
    assert not asked
    assert again.program.annotations == first.program.annotations
    assert moved_bytes(again.program) == moved_bytes(first.program) > 0
    # What is computed is the second program all the same.
    check(found, scaled(3.0)(*inputs))
