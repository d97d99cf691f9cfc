"""The table of signature rules: one for each primitive that may be divided among submeshes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from hetjax import _compat
from hetjax.sharding.deduction import indexing_rules as indexing
from hetjax.sharding.deduction import own_primitive_rules as own_rules
from hetjax.sharding.deduction import signature_rules as rules
from hetjax.sharding.deduction.region import REGION
from hetjax.sharding.deduction.signature import Rule, Signature


def signature_of(equation: _compat.JaxprEqn) -> Signature | None:
    """The signature of an equation; None where its primitive has no rule.

    Args:
        equation: an equation that holds no jaxpr.

    Returns:
        The signature.

    Source: Hetu v2, section 5.2.

    Example:
        >>> import jax
        >>> closed = jax.make_jaxpr(lambda a, b: a @ b)(jax.numpy.ones((2, 3)), jax.numpy.ones(3))
        >>> signature_of(closed.eqns[0]).summed
        frozenset({0})
    """
    rule = RULES.get(equation.primitive.name)
    return None if rule is None else rule(equation)


class Family(NamedTuple):
    """Primitives with one rule.

    Args:
        names: the primitives.
        rule: their rule.
        meaning: what may be divided, as a sentence.
        linear: of what they are linear functions, in words; empty for none.
    """

    names: tuple[str, ...]
    rule: Rule
    meaning: str
    linear: str = ""


_FIRST, _SECOND = frozenset({0}), frozenset({1})
_UNARY = (
    "abs acos acosh asin asinh atan atanh bessel_i0e bessel_i1e cbrt ceil clz cos cosh digamma erf "
    "erf_inv erfc exp exp2 expm1 floor integer_pow is_finite lgamma log log1p logistic not "
    "population_count reduce_precision round rsqrt sign sin sinh sqrt square tan tanh"
)
_BINARY = (
    "and atan2 clamp eq eq_to ge gt le le_to lt lt_to max min ne nextafter or pow "
    "random_fold_in rem shift_left shift_right_arithmetic shift_right_logical threefry2x32 xor"
)
_REDUCED = "and", "max", "min", "or", "prod", "xor"
_ELEMENTWISE = "every dimension; one of size 1 that is repeated is whole"
_OTHERS = "all dimensions but the one that it goes along"

FAMILIES: tuple[Family, ...] = (
    Family(tuple(f"{_UNARY} {_BINARY}".split()), rules.elementwise_rule(), _ELEMENTWISE),
    Family(
        ("conj", "copy", "imag", "name", "neg", "real", "stop_gradient"),
        rules.elementwise_rule(_FIRST),
        "every dimension",
        "the operand",
    ),
    Family((REGION,), rules.region_rule, "every dimension, of each operand by itself"),
    Family(
        ("convert_element_type",),
        rules.conversion_rule,
        "every dimension",
        "the operand, among floating types, and from integers to integers no wider",
    ),
    Family(("bitcast_convert_type",), rules.keys_rule, "every dimension that keeps its size"),
    Family(
        ("add", "add_any", "complex", "sub"),
        rules.elementwise_rule(_FIRST | _SECOND),
        _ELEMENTWISE,
        "both operands together; a whole one counts once",
    ),
    Family(("mul",), rules.elementwise_rule(_FIRST, _SECOND), _ELEMENTWISE, "either operand"),
    Family(("div",), rules.division_rule, _ELEMENTWISE, "the first operand, but of integers"),
    Family(("select_n",), rules.select_rule, "every dimension", "the cases together"),
    Family(
        ("broadcast_in_dim",),
        rules.broadcast_in_dim_rule,
        "dimensions of the operand that are not repeated",
        "the operand",
    ),
    Family(("tile",), rules.tile_rule, "dimensions that are not repeated", "the operand"),
    Family(
        ("reshape",),
        rules.reshape_rule,
        "of dimensions that are merged or split the first, in whole units of the others",
        "the operand",
    ),
    Family(("squeeze",), rules.squeeze_rule, "dimensions that stay", "the operand"),
    Family(("transpose",), rules.transpose_rule, "every dimension", "the operand"),
    Family(
        ("reduce_sum",),
        rules.reduction_rule(adds=True),
        "every dimension; over one that is summed the result is a partial sum",
        "the operand",
    ),
    Family(
        tuple(f"argmax argmin {' '.join(f'reduce_{each}' for each in _REDUCED)}".split()),
        rules.reduction_rule(adds=False),
        "dimensions that stay",
    ),
    Family(("cumsum",), rules.along_rule("axis", linear=True), _OTHERS, "the operand"),
    Family(("cumlogsumexp", "cummax", "cummin", "cumprod"), rules.along_rule("axis"), _OTHERS),
    Family(("sort",), rules.along_rule("dimension"), _OTHERS),
    Family(("top_k",), rules.top_k_rule, _OTHERS),
    Family(("approx_top_k",), rules.along_rule("reduction_dimension"), _OTHERS),
    Family(
        # Not `qr` and what it is made of: JAX lowers them to selects that it refuses when divided.
        ("cholesky", "eigh", "lu", "svd"),
        rules.leading_rule(),
        "dimensions before those of the matrices",
    ),
    Family(
        ("triangular_solve",),
        rules.leading_rule(_SECOND),
        "dimensions before those of the matrices",
        "the right-hand sides",
    ),
    Family(
        ("lu_pivots_to_permutation",), rules.leading_rule(own=1), "dimensions before the pivots"
    ),
    Family(("rev",), rules.reverse_rule, "dimensions that are not turned", "the operand"),
    Family(
        ("dot_general",),
        rules.dot_general_rule,
        "every dimension; over one that is contracted the result is a partial sum",
        "either operand",
    ),
    Family(
        ("conv_general_dilated",),
        rules.convolution_rule,
        "examples and features; over input features the result is a partial sum",
        "either operand",
    ),
    Family(
        ("attention",),
        own_rules.attention_rule,
        "examples, heads in whole groups, and queries; not keys",
    ),
    Family(
        ("attention_backward",),
        own_rules.attention_backward_rule,
        "examples, heads in whole groups; over queries the gradients of keys and values are "
        "partial sums, over keys those of queries",
        "the cotangent",
    ),
    Family(
        ("linear_cross_entropy",), own_rules.linear_cross_entropy_rule, "tokens; not the vocabulary"
    ),
    Family(
        ("linear_cross_entropy_backward",),
        own_rules.linear_cross_entropy_rule,
        "tokens; over them the gradient of the weights is a partial sum",
        "the cotangent",
    ),
    Family(
        ("concatenate",),
        rules.along_rule("dimension", linear=True),
        _OTHERS,
        "all operands together",
    ),
    Family(("split",), rules.along_rule("axis", linear=True), _OTHERS, "the operand"),
    Family(("stack",), rules.stack_rule, "dimensions of the operands", "all operands together"),
    Family(("unstack",), rules.unstack_rule, "dimensions of the results", "the operand"),
    Family(("fft",), rules.fft_rule, "dimensions that are not transformed", "the operand"),
    Family(("pad",), indexing.pad_rule, "dimensions that keep their size", "the operand"),
    Family(("slice",), indexing.slice_rule, "dimensions that are taken whole", "the operand"),
    Family(
        ("dynamic_slice",),
        indexing.dynamic_slice_rule,
        "dimensions that are taken whole",
        "the operand",
    ),
    Family(
        ("dynamic_update_slice",),
        indexing.dynamic_update_slice_rule,
        "dimensions that are replaced whole",
        "the operand and the update together",
    ),
    Family(
        ("gather",),
        indexing.gather_rule,
        "dimensions of the indices, and of the operand those that are taken whole",
        "the operand, unless what is out of bounds is filled with a value",
    ),
    Family(
        ("scatter-add", "scatter-sub"),
        indexing.scatter_add_rule,
        "as a gather; over dimensions of the indices the result is a partial sum",
        "the operand, which counts once, and the updates together",
    ),
    Family(
        ("scatter",),
        indexing.scatter_rule,
        "dimensions of the operand that are replaced whole",
        "the operand and the updates together, where indices are told to be unique",
    ),
    Family(
        ("scatter-mul",),
        indexing.scatter_rule,
        "dimensions of the operand that are scaled whole",
        "the operand",
    ),
    Family(
        ("scatter-max", "scatter-min"),
        indexing.scatter_rule,
        "dimensions of the operand that are compared whole",
    ),
    Family(
        ("reduce_window_sum",),
        rules.window_rule,
        "dimensions that no window slides over",
        "the operand",
    ),
    Family(
        ("reduce_window_max", "reduce_window_min", "select_and_scatter_add"),
        rules.window_rule,
        "dimensions that no window slides over",
    ),
    Family(
        ("attention_block", "attention_block_backward"),
        own_rules.attention_block_rule,
        "tokens and heads of queries, and of keys, in ranges that each member is told",
    ),
    Family(("random_bits",), rules.random_bits_rule, "dimensions of the keys"),
    Family(
        ("random_split", "random_unwrap", "random_wrap"), rules.keys_rule, "dimensions of the keys"
    ),
)
"""All rules. Equations that hold jaxprs (calls, scans, conditionals, loops) are looked into; any
other primitive is computed by submeshes that have its operands whole."""

RULES: Mapping[str, Rule] = {name: family.rule for family in FAMILIES for name in family.names}


def rules_table() -> str:
    """The rules as a table in Markdown, for the documentation.

    Returns:
        A header and a line for each family.
    """
    rows = [
        f"| {', '.join(f'`{name}`' for name in family.names)} | {family.meaning} "
        f"| {family.linear or 'nothing'} |"
        for family in FAMILIES
    ]
    header = ["| primitives | may be divided | linear in |", "| --- | --- | --- |"]
    return "\n".join((*header, *rows)) + "\n"
