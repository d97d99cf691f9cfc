"""Plain attention is found however it is written, and computes the same; or it is refused."""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import hetjax
from hetjax import InputError, _compat
from hetjax.pipeline.program.tracing import trace
from hetjax.sharding.attention.forms import form_of_constant
from hetjax.sharding.attention.match import match_attention

plain = jax.nn.dot_product_attention


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


Q, K, V = normal(0, 2, 5, 4, 8), normal(1, 2, 5, 2, 8), normal(2, 2, 5, 2, 8)
SEGMENTS = jnp.array([[0, 0, 1, 1, 1], [0, 1, 1, 2, 2]])


def names_in(jaxpr: Any) -> list[str]:
    inner = [names_in(each) for e in jaxpr.eqns for each in _compat.inner_jaxprs(e)]
    return [e.primitive.name for e in jaxpr.eqns] + [name for names in inner for name in names]


def by_hand(q: Any, k: Any, v: Any, *, hidden: float = -1e9, adds: bool = False) -> jax.Array:
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / jnp.sqrt(q.shape[-1])
    seen = jnp.tril(jnp.ones(scores.shape[-2:]))
    masked = scores + (1 - seen) * hidden if adds else jnp.where(seen == 0, hidden, scores)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(masked, axis=-1), v)


def heads_first(q: Any, k: Any, v: Any) -> jax.Array:
    """With a constant for a mask, and products written with @."""
    q, k, v = (each.swapaxes(1, 2) for each in (q, k, v))
    seen = np.tri(q.shape[2], dtype=bool)
    scores = jnp.where(seen, q @ k.swapaxes(-1, -2) * 0.3, -jnp.inf)
    return (jax.nn.softmax(scores) @ v).swapaxes(1, 2)


def one_head(q: Any, k: Any, v: Any) -> jax.Array:
    """Of one sequence, with a window, and a softmax of its own."""
    place = jnp.arange(q.shape[0])
    near = (place[:, None] >= place) & (place[:, None] - place < 3)
    scores = jnp.where(near, q @ k.T, -1e30)
    weights = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
    return weights / jnp.sum(weights, axis=-1, keepdims=True) @ v


def masked(of_scores: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]) -> Any:
    """Attention whose scores are masked by a function of them, and of queries' and keys' places."""

    def attend(q: Any, k: Any, v: Any) -> jax.Array:
        scores, place = jnp.einsum("bqhd,bkhd->bhqk", q, k), jnp.arange(q.shape[1])
        weights = jax.nn.softmax(of_scores(scores, place[:, None], place))
        return jnp.einsum("bhqk,bkhd->bqhd", weights, v)

    return attend


def of_some(weigh: Callable[[jax.Array, jax.Array], jax.Array]) -> Any:
    """Attention whose weights are a function of scores, and of which keys a query sees."""

    def attend(q: Any, k: Any, v: Any) -> jax.Array:
        place = jnp.arange(q.shape[1])
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
        return jnp.einsum("bhqk,bkhd->bqhd", weigh(scores, place[:, None] >= place), v)

    return attend


def by_exponentials(scores: jax.Array, seen: jax.Array, *, multiplied: bool = False) -> jax.Array:
    found = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
    found = found * seen.astype(found.dtype) if multiplied else jnp.where(seen, found, 0)
    return found / jnp.sum(found, axis=-1, keepdims=True)


def of_some_segments(q: Any, k: Any, v: Any) -> jax.Array:
    same = SEGMENTS[:, None, :, None] == SEGMENTS[:, None, None, :]
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k), where=same)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def of_kinds(q: Any, k: Any, v: Any, *, dtype: str) -> jax.Array:
    """Packed, by numbers that are the same once they are narrower."""
    kinds = (256 * SEGMENTS + SEGMENTS % 2).astype(dtype)
    return plain(q, k, v, mask=kinds[:, None, :, None] == kinds[:, None, None, :])


def packed(q: Any, k: Any, v: Any) -> jax.Array:
    same = SEGMENTS[:, None, :, None] == SEGMENTS[:, None, None, :]
    return plain(q, k, v, mask=same, is_causal=True)


def over_examples(attend: Callable[..., jax.Array], *arrays: Any) -> jax.Array:
    rows = tuple(each[:, None] for each in arrays)
    return jax.lax.scan(lambda carry, x: (carry, attend(*x)), 0, rows)[1]


def by_mask(seen: Any, q: Any, k: Any, v: Any) -> jax.Array:
    scores = jnp.where(seen, jnp.einsum("bqhd,bkhd->bhqk", q, k), -1e9)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


def masked_outside_of_a_loop(q: Any, k: Any, v: Any, *, again: bool = False) -> jax.Array:
    seen = jnp.tril(jnp.ones((5, 5), bool))
    attend = jax.checkpoint(by_mask) if again else by_mask
    return over_examples(functools.partial(attend, seen), q, k, v)


def masked_outside_of_a_region(q: Any, k: Any, v: Any) -> jax.Array:
    same = SEGMENTS[:, None, :, None] == SEGMENTS[:, None, None, :]
    return jax.checkpoint(by_mask)(jnp.tril(jnp.ones((5, 5), bool)) & same, q, k, v)


def masked_by_numpy(q: Any, k: Any, v: Any) -> jax.Array:
    """In a region inside of another one."""
    inner = jax.checkpoint(functools.partial(by_mask, np.tri(5, dtype=bool)))
    return jax.checkpoint(lambda *x: jax.jit(inner)(*x) + 1)(q, k, v)


FLAX = nnx.split(nnx.MultiHeadAttention(4, 8, decode=False, rngs=nnx.Rngs(0)))


def of_flax(q: Any, **options: Any) -> jax.Array:
    return nnx.merge(*FLAX)(q[:, :, 0], **options)


FOUND: dict[str, tuple[Callable[..., Any], list[Any]]] = {
    "jax.nn": (plain, [Q, K, V]),
    "jax.nn, causal": (lambda q, k, v: plain(q, k, v, is_causal=True), [Q, K, V]),
    "jax.nn, window": (lambda q, k, v: plain(q, k, v, local_window_size=(1, 2)), [Q, K, V]),
    "jax.nn, packed": (packed, [Q, K, V]),
    "flax.nnx": (of_flax, [Q]),
    "flax.nnx, causal": (lambda q: of_flax(q, is_causal=True), [Q]),
    "flax.nnx, mask": (lambda q: of_flax(q, mask=nnx.make_causal_mask(q[:, :, 0, 0])), [Q]),
    "by hand": (by_hand, [Q, Q, Q]),
    "by hand, infinite": (lambda q, k, v: by_hand(q, k, v, hidden=-jnp.inf), [Q, Q, Q]),
    "by hand, added": (lambda q, k, v: by_hand(q, k, v, adds=True), [Q, Q, Q]),
    "later hidden": (masked(lambda s, i, j: jnp.where(j > i, -jnp.inf, s)), [Q, Q, Q]),
    "not later": (masked(lambda s, i, j: jnp.where(~(j > i), s, -1e9)), [Q, Q, Q]),
    "near": (masked(lambda s, i, j: jnp.where(jnp.abs(i - j) <= 1, s, -1e9)), [Q, Q, Q]),
    "far hidden": (masked(lambda s, i, j: jnp.where(jnp.abs(j - i) > 2, -1e9, s)), [Q, Q, Q]),
    "near, of any": (masked(lambda s, i, j: jnp.where(jnp.abs(i - j) < 9, s, -1e9)), [Q, Q, Q]),
    "outside hidden": (
        masked(lambda s, i, j: jnp.where((j > i) | (j < i - 1), -1e9, s)),
        [Q, Q, Q],
    ),
    "taken away": (masked(lambda s, i, j: s - jnp.where(j > i, 1e9, 0.0)), [Q, Q, Q]),
    "scaled when hidden": (masked(lambda s, i, j: jnp.where(j > i, -1e4, s) / 16), [Q, Q, Q]),
    "shifted": (masked(lambda s, i, j: jnp.where(j > i, -1e9, s + 3.0)), [Q, Q, Q]),
    "softmax of some": (of_some(lambda s, seen: jax.nn.softmax(s, where=seen)), [Q, Q, Q]),
    "softmax of some segments": (of_some_segments, [Q, Q, Q]),
    "exponentials of some": (of_some(by_exponentials), [Q, Q, Q]),
    "exponentials, multiplied": (
        of_some(lambda s, seen: by_exponentials(s, seen, multiplied=True)),
        [Q, Q, Q],
    ),
    "hidden, and weights again": (
        of_some(lambda s, see: jax.nn.softmax(jnp.where(see, s, -1e9)) * see.astype(s.dtype)),
        [Q, Q, Q],
    ),
    "narrow segments": (functools.partial(of_kinds, dtype="uint8"), [Q, K, V]),
    "wide segments": (functools.partial(of_kinds, dtype="int32"), [Q, K, V]),
    "heads first": (heads_first, [Q, Q, Q]),
    "one head": (one_head, [Q[0, :, 0], K[0, :, 0], V[0, :, 0]]),
    "vmap": (jax.vmap(one_head), [Q[:, :, 0], K[:, :, 0], V[:, :, 0]]),
    "scan": (functools.partial(over_examples, by_hand), [Q, Q, Q]),
    "checkpoint": (jax.checkpoint(by_hand), [Q, Q, Q]),
    "jit": (jax.jit(by_hand), [Q, Q, Q]),
    "scan, masked outside": (masked_outside_of_a_loop, [Q, Q, Q]),
    "scan and checkpoint, masked outside": (
        functools.partial(masked_outside_of_a_loop, again=True),
        [Q, Q, Q],
    ),
    "checkpoint, masked outside": (masked_outside_of_a_region, [Q, Q, Q]),
    "checkpoint, masked by numpy": (masked_by_numpy, [Q, Q, Q]),
}


@pytest.mark.parametrize("name", FOUND)
def test_it_is_put_in_one_equation_that_computes_the_same(name: str):
    function, arrays = FOUND[name]
    program = jax.make_jaxpr(function)(*arrays)
    matched = match_attention(program)
    matched.check()
    names = names_in(matched.program.jaxpr)
    assert names.count("attention") == 1
    assert "exp" not in names
    found, expected = (
        jax.jit(lambda *arrays, each=each: _compat.eval_jaxpr(each, *arrays))(*arrays)
        for each in (matched.program, program)
    )
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5, atol=1e-5)


def dropping(q: Any, k: Any, v: Any) -> jax.Array:
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
    keep = jax.random.bernoulli(jax.random.key(0), 0.5, weights.shape)
    return jnp.einsum("bhqk,bkhd->bqhd", jnp.where(keep, weights / 0.5, 0), v)


def capped(q: Any, k: Any, v: Any) -> jax.Array:
    weights = jax.nn.softmax(jnp.tanh(jnp.einsum("bqhd,bkhd->bhqk", q, k)))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def blind(q: Any, k: Any, v: Any) -> jax.Array:
    place = jnp.arange(5)
    scores = jnp.where(place[:, None] > place, jnp.einsum("bqhd,bkhd->bhqk", q, k), -1e9)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


def unsigned(q: Any, k: Any, v: Any) -> jax.Array:
    """Causal: whoever is later is very far."""
    place = jnp.arange(5, dtype=jnp.uint32)
    return plain(q, k, v, mask=((place[:, None] - place) < 3)[None, None])


def of_dtypes(operands: Any, scores: Any, result: Any = jnp.float32) -> Any:
    """Attention whose products take narrow numbers, and make others."""

    def attend(q: Any, k: Any, v: Any) -> jax.Array:
        if operands is not None:
            q, k, v = (jnp.round(4 * each).astype(operands) for each in (q, k, v))
        of_pairs = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=scores)
        weights = jax.nn.softmax(of_pairs.astype(jnp.float32) / 16)
        sides = ((3,), (1,)), ((0, 1), (0, 2))
        mixed = jax.lax.dot_general(weights, v, sides, preferred_element_type=result)
        return mixed.swapaxes(1, 2)

    return attend


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "scores that round": (of_dtypes(None, jnp.float8_e4m3fn), "its scores are float8_e4m3fn, in"),
    "scores that wrap": (of_dtypes(jnp.int8, jnp.int8), "its scores are int8, in which they round"),
    "scores as wide": (of_dtypes(jnp.int32, jnp.int32), "its scores are int32, in which they"),
    "whole results": (of_dtypes(None, jnp.float32, jnp.int8), "its result is int8"),
    "bias": (lambda q, k, v: plain(q, k, v, bias=q[:1, :, :, :5].transpose(0, 2, 1, 3)), "a bias"),
    "mask": (lambda q, k, v: plain(q, k, v, mask=q[:, None, :, 0, :5] > 0), "its mask is not full"),
    "padding": (
        lambda q, k, v: plain(q, k, v, key_value_seq_lengths=jnp.array([3, 4], jnp.int32)),
        "its mask is not full",
    ),
    "dropout": (dropping, "attention dropout"),
    "weights alone hidden": (
        of_some(lambda s, seen: jnp.where(seen, jax.nn.softmax(s), 0)),
        "its weights are dropped",
    ),
    "numbers that wrap": (unsigned, "its mask is not full"),
    "cap": (capped, "tanh is between the scores and the softmax"),
    "hidden and scaled": (
        masked(lambda s, i, j: jnp.where(j <= i, s, -1e4) / 1e3),
        "what is hidden -10 beside the scores",
    ),
    "hidden and turned": (
        masked(lambda s, i, j: jnp.where(j <= i, s, -1e9) * -1.0),
        r"what is hidden 1e\+09 beside the scores",
    ),
    "shifted lower": (
        masked(lambda s, i, j: jnp.where(j <= i, s - 2e4, -1e4)),
        "its mask is not full",
    ),
    "taken away": (
        masked(lambda s, i, j: s - jnp.where(j <= i, 0.0, -1e9)),
        "its mask is added",
    ),
    "made twice": (
        masked(lambda s, i, j: jnp.where(i // 2 == j // 2, s, -1e9)),
        "its mask compares queries' segments with another array",
    ),
    "far": (
        masked(lambda s, i, j: jnp.where(jnp.abs(i - j) > 1, s, -1e9)),
        "its mask is not full",
    ),
    "whole numbers": (
        of_some(lambda s, _: jax.nn.softmax(s.astype(jnp.int32).astype(s.dtype))),
        "convert_element_type is between the scores and the softmax",
    ),
    "heads mixed": (
        of_some(lambda s, _: jax.nn.softmax(jnp.einsum("bhqk,hg->bgqk", s, jnp.eye(4)))),
        "its softmax goes over a dimension that is not the keys'",
    ),
    "blind": (blind, "queries that its mask lets see nothing"),
}


straight_through = jax.custom_jvp(jax.nn.softmax, nondiff_argnums=(1,))
straight_through.defjvp(lambda axis, x, t: (straight_through(*x, axis), t[0]))


def test_a_function_of_jax_with_another_derivative_stays():
    program = jax.make_jaxpr(of_some(lambda s, _: straight_through(s, -1)))(Q, Q, Q)
    assert "attention" not in names_in(match_attention(program).program.jaxpr)


def damped(softmax: Any) -> Any:
    """A softmax with a tenth of its derivative."""
    function = jax.custom_jvp(softmax)
    function.defjvps(lambda t, ans, s: 0.1 * ans * (t - jnp.sum(t * ans, -1, keepdims=True)))
    return function


@jax.custom_gradient
def damped_backward(scores: jax.Array) -> Any:
    weights = jax.nn.softmax(scores)
    return weights, lambda g: 0.1 * weights * (g - jnp.sum(g * weights, -1, keepdims=True))


damped_exp = jax.custom_jvp(jnp.exp)
damped_exp.defjvps(lambda t, ans, s: 0.1 * t * ans)


def of_damped_exp(scores: jax.Array) -> jax.Array:
    found = damped_exp(scores - jnp.max(scores, -1, keepdims=True))
    return found / jnp.sum(found, -1, keepdims=True)


OF_PEOPLE = {
    "defjvps": damped(functools.partial(jax.nn.softmax, axis=-1)),
    "custom_gradient": damped_backward,
    "exponentials": of_damped_exp,
}


@pytest.mark.parametrize("name", OF_PEOPLE)
def test_a_softmax_with_a_derivative_of_somebodys_own_is_refused(name: str):
    """Also where JAX puts a function of its own around the derivative."""
    program = jax.make_jaxpr(of_some(lambda s, _: OF_PEOPLE[name](s)))(Q, Q, Q)
    matched = match_attention(program)
    assert "attention" not in names_in(matched.program.jaxpr)
    with pytest.raises(InputError, match="a function with a derivative of its own is between"):
        matched.check()


def test_segments_of_64_bits_are_told_apart():
    def packed(q: jax.Array, segments: jax.Array) -> jax.Array:
        same = segments[:, None, :, None] == segments[:, None, None, :]
        weigh = of_some(lambda s, _: jax.nn.softmax(jnp.where(same, s, -1e9)))
        return weigh(q, q, q)

    with jax.enable_x64(True):
        given = Q, jnp.asarray(np.asarray(SEGMENTS, np.uint64) << 32)
        program = jax.make_jaxpr(packed)(*given)
        matched = match_attention(program)
        matched.check()
        found, expected = (
            _compat.eval_jaxpr(each, *given)[0] for each in (matched.program, program)
        )
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_exponentials_of_equal_calls_are_told_apart():
    def weigh(scores: jax.Array, seen: jax.Array) -> jax.Array:
        return damped_exp(scores) / jnp.sum(damped_exp(2 * scores), -1, keepdims=True)

    matched = match_attention(jax.make_jaxpr(of_some(weigh))(Q, Q, Q))
    assert "attention" not in names_in(matched.program.jaxpr)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_known_stays_and_is_refused_with_the_line(name: str):
    function, reason = REFUSED[name]
    program = jax.make_jaxpr(function)(Q, Q, Q)
    matched = match_attention(program)
    assert "attention" not in names_in(matched.program.jaxpr)
    with pytest.raises(InputError, match=f"dot_general at {re.escape(__file__)}:.*{reason}"):
        matched.check()


def by_late_sum(q: Any, k: Any, v: Any) -> jax.Array:
    weights = jnp.exp(jnp.einsum("bqhd,bkhd->bhqk", q, k))
    total = jnp.sum(weights, -1).swapaxes(1, 2)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v) / total[..., None]


def by_changed_sum(change: Callable[[jax.Array, jax.Array], jax.Array]) -> Any:
    """Weights made of exponentials and of their sum."""

    def weigh(scores: jax.Array, seen: jax.Array) -> jax.Array:
        weights = jnp.exp(jnp.where(seen, scores, -1e9))
        return change(weights, jnp.sum(weights, -1, keepdims=True))

    return of_some(weigh)


OF_OTHER_SUMS = {
    "late": by_late_sum,
    "reciprocal": by_changed_sum(lambda weights, total: weights * (1 / total)),
    "epsilon": by_changed_sum(lambda weights, total: weights / (total + 1e-9)),
    "detached": by_changed_sum(lambda weights, total: weights / jax.lax.stop_gradient(total)),
    "logsumexp": of_some(
        lambda s, _: jnp.exp(s - jax.scipy.special.logsumexp(s, -1, keepdims=True))
    ),
    "log-softmax": of_some(lambda s, _: jnp.exp(jax.nn.log_softmax(s))),
}


@pytest.mark.parametrize("name", OF_OTHER_SUMS)
def test_weights_that_are_normalised_in_another_way_are_refused(name: str):
    matched = match_attention(jax.make_jaxpr(OF_OTHER_SUMS[name])(Q, Q, Q))
    assert "attention" not in names_in(matched.program.jaxpr)
    with pytest.raises(InputError, match="its exponentials are not divided by their sum"):
        matched.check()


def test_a_softmax_of_a_log_softmax_is_attention():
    weigh = of_some(lambda s, _: jax.nn.softmax(jax.nn.log_softmax(s)))
    matched = match_attention(jax.make_jaxpr(weigh)(Q, Q, Q))
    assert [each.refused for each in matched.found] == [""]


@pytest.mark.parametrize(
    "gate",
    [
        *OF_OTHER_SUMS.values(),
        *(of_some(lambda s, _, f=f: f(s)) for f in OF_PEOPLE.values()),
        *(attend for attend, _ in REFUSED.values()),
    ],
)
def test_what_may_be_attention_may_be_of_gates_beside_what_is(gate: Any):
    def both(q: jax.Array) -> jax.Array:
        gated = gate(q, q, q).astype(q.dtype)
        return hetjax.attention(gated, gated, gated)

    matched = match_attention(jax.make_jaxpr(both)(Q))
    matched.check()
    assert matched.refused.startswith(f"attention that ends with dot_general at {__file__}:")


TABLE, EXPERTS = normal(5, 7, 8), normal(6, 8, 7, 8)
BY_PARAMETERS: dict[str, Callable[[Any, Any, Any], jax.Array]] = {
    "memory": lambda x, w, e: jax.nn.softmax(x @ w.T) @ w,
    "as many": lambda x, w, e: jax.nn.softmax(x @ w[:5].T) @ w[:5],
    "exponentials": lambda x, w, e: jnp.exp(jax.nn.log_softmax(x @ w.T)) @ w,
    "gates": lambda x, w, e: jnp.einsum(
        "bte,bted->btd", jax.nn.softmax(x @ w.T), jnp.einsum("btc,ced->bted", x, e)
    ),
    "pooling": lambda x, w, e: jnp.einsum("bt,btd->bd", jax.nn.softmax(x @ w[0], 1), x),
    "probes": lambda x, w, e: jax.nn.softmax(jnp.broadcast_to(w, (2, 7, 8)) @ x.swapaxes(1, 2)) @ x,
    "in a loop": lambda x, w, e: jax.lax.scan(
        lambda x, w: (x + jax.nn.softmax(x @ w.T) @ w, None), x, e.swapaxes(0, 1)
    )[0],
}


@pytest.mark.parametrize("name", BY_PARAMETERS)
def test_a_softmax_of_a_product_with_parameters_is_no_attention(name: str):
    def ordered(table: Any, experts: Any, x: Any) -> jax.Array:
        return BY_PARAMETERS[name](x, table, experts)

    matched = match_attention(jax.make_jaxpr(ordered)(TABLE, EXPERTS, Q[:, :, 0]), 2)
    assert not matched.found
    assert "attention" not in names_in(matched.program.jaxpr)


@pytest.mark.parametrize("learned", range(3))
def test_learned_queries_keys_or_values_stand_for_as_many_tokens(learned: int):
    def attend(weights: Any, x: Any) -> jax.Array:
        operands = [x, x, x]
        operands[learned] = jnp.broadcast_to(weights, x.shape)
        return plain(*operands, is_causal=True)

    matched = match_attention(jax.make_jaxpr(attend)(Q[:1], Q), 1)
    assert [each.refused for each in matched.found] == [""]


def by_hand_sigmoid(q: Any, k: Any, v: Any) -> jax.Array:
    return (1 / (1 + jnp.exp(-(q @ jnp.ones((8, 3)))))) @ jnp.ones((3, 8))


def by_one_number(q: Any, k: Any, v: Any) -> jax.Array:
    scaled = v / jnp.sum(jnp.exp(q @ jnp.ones((8, 3))))
    return scaled.swapaxes(1, 2) @ jnp.ones((8, 8))


@pytest.mark.parametrize("function", [by_hand_sigmoid, by_one_number])
def test_exponentials_that_weigh_nothing_are_no_attention(function: Any):
    matched = match_attention(jax.make_jaxpr(function)(Q, Q, Q))
    assert not matched.found


@jax.custom_jvp
def tenth(x: jax.Array) -> jax.Array:
    return x


tenth.defjvp(lambda primals, tangents: (primals[0], 0.1 * tangents[0]))
KEY = jax.random.key(0)


def with_rule(q: Any, k: Any, v: Any) -> jax.Array:
    weights = jax.nn.softmax(tenth(jnp.einsum("bqhd,bkhd->bhqk", q, k)))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def of_all(q: Any, k: Any, v: Any) -> jax.Array:
    weights = jnp.exp(q[0, :, 0] @ k[0, :, 0].T)
    return weights / jnp.sum(weights) @ v[0, :, 0] + 0 * jax.random.normal(KEY, (5, 8))


def over_the_batch(q: Any, k: Any, v: Any) -> jax.Array:
    weights = jax.nn.softmax(jnp.einsum("bthd,bthd->bht", q, k))
    return jnp.einsum("bht,bthd->bhd", weights, v)


@pytest.mark.parametrize("function", [with_rule, of_all, over_the_batch])
def test_what_is_no_attention_stays(function: Callable[..., jax.Array]):
    """A derivative of its own, a sum over all, a softmax over what both operands have."""
    matched = match_attention(jax.make_jaxpr(function)(Q, Q, Q))
    assert "attention" not in names_in(matched.program.jaxpr)


@pytest.mark.parametrize("examples", [1, 2])
def test_heads_are_those_of_the_last_dimension_of_the_batch(examples: int):
    x = normal(3, examples, 5, 4, 8)
    matched = match_attention(jax.make_jaxpr(by_hand)(x, x, x)).program.jaxpr
    (found,) = (each for each in matched.eqns if each.primitive.name == "attention")
    assert [atom.aval.shape[-3:] for atom in found.invars[:3]] == [(5, 4, 8)] * 3  # pyright: ignore[reportAttributeAccessIssue]


def test_scores_are_of_the_widest_operand():
    q, v = 8 * normal(4, 2, 5, 4, 8), Q.astype(jnp.bfloat16)

    def mixed(q: Any, k: Any, v: Any) -> jax.Array:
        weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k)).astype(v.dtype)
        return jnp.einsum("bhqk,bkhd->bqhd", weights, v)

    program = jax.make_jaxpr(mixed)(q, q, v)
    matched = match_attention(program)
    matched.check()
    found, expected = (_compat.eval_jaxpr(e, q, q, v)[0] for e in (matched.program, program))
    assert found.dtype == expected.dtype
    ours, theirs = (np.asarray(each, np.float32) for each in (found, expected))
    np.testing.assert_allclose(ours, theirs, atol=0.03)


@pytest.mark.parametrize(
    ("operands", "scores"),
    [(jnp.int8, jnp.int32), (jnp.float8_e4m3fn, jnp.float32), (jnp.float8_e4m3fn, jnp.bfloat16)],
)
def test_products_of_narrow_numbers_are_not_rounded(operands: Any, scores: Any):
    program = jax.make_jaxpr(of_dtypes(operands, scores))(Q, Q, Q)
    matched = match_attention(program)
    assert names_in(matched.program.jaxpr).count("attention") == 1
    found, expected = (_compat.eval_jaxpr(e, Q, Q, Q)[0] for e in (matched.program, program))
    rounded = 1e-5 if scores != jnp.bfloat16 else 0.03
    np.testing.assert_allclose(found, expected, atol=rounded)


def test_exponentials_that_are_hidden_after_their_sum_are_no_softmax():
    def weigh(scores: jax.Array, seen: jax.Array) -> jax.Array:
        found = jnp.exp(scores)
        return jnp.where(seen, found, 0) / jnp.sum(found, axis=-1, keepdims=True)

    matched = match_attention(jax.make_jaxpr(of_some(weigh))(Q, Q, Q))
    assert "attention" not in names_in(matched.program.jaxpr)


def test_a_program_is_matched_only_where_sequences_are_divided():
    def loss(w: Any, batch: Any) -> jax.Array:
        return jnp.mean(by_hand(batch @ w, batch, batch))

    names = [
        [step.name for step in trace(loss, jnp.eye(8), Q, divides_sequences=each).steps]
        for each in (False, True)
    ]
    assert [each.count("attention") for each in names] == [0, 1]
    with pytest.raises(InputError, match="the sequence cannot be divided"):
        trace(lambda w, x: jnp.mean(capped(x @ w, x, x)), jnp.eye(8), Q, divides_sequences=True)


@pytest.mark.parametrize(
    ("numbers", "dtype"),
    [
        ((-np.inf, 0), "float32"),
        ((np.inf, np.inf, 1), "float32"),
        ((-1e308, 1e308), "float64"),
        ((1j, 2), "complex64"),
    ],
)
def test_numbers_without_a_finite_step_between_them_do_not_count(numbers: Any, dtype: str):
    assert form_of_constant(np.array(numbers, dtype)) is None


def test_masks_of_a_million_tokens_are_not_looked_at():
    shape = jax.ShapeDtypeStruct((1, 2**20, 4, 8), jnp.float32)
    program = jax.make_jaxpr(lambda q: plain(q, q, q, is_causal=True))(shape)
    assert names_in(match_attention(program).program.jaxpr).count("attention") == 1
