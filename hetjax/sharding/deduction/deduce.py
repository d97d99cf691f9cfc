"""Deduction: from annotations of some values of a program to annotations of all.

The submeshes of a value change only where a program says so (`hetjax.reshard`); an equation is
computed on the union that its operands lie on. Its results are divided among the submeshes as
its signature tells, and inside each submesh as JAX's explicit sharding says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hetjax import _compat
from hetjax.errors import InputError
from hetjax.sharding.annotation.annotation import HSharding
from hetjax.sharding.deduction.annotated_program import AnnotatedProgram
from hetjax.sharding.deduction.search import Settings, deduce_program
from hetjax.sharding.deduction.signature import shapes_of
from hetjax.sharding.deduction.top_tier import sized


def deduce(
    program: _compat.ClosedJaxpr,
    annotations: Sequence[HSharding | None],
    *,
    strategy: int = 0,
    symbols: Mapping[str, int] | None = None,
    mend: bool = False,
    mend_bodies: bool = False,
    mend_scalars: bool = False,
    sums_stay: bool = False,
    message_bytes: int = 0,
) -> AnnotatedProgram:
    """Deduce how every value of a program lies.

    Args:
        program: what `jax.make_jaxpr` gives, with `hetjax.reshard` where values change submeshes.
        annotations: for each input how it lies; None for one that is known everywhere.
        symbols: numbers for the symbols that annotations have; see `HSharding.bind`.
        strategy: which of the annotations that a `hetjax.reshard` carries is meant.
        mend: whether to put in the reshards that are missing, in place of an error.
        mend_bodies: whether to do so inside scans, conditionals and loops, where nothing leaves a
            submesh; where `mend` is given it is done there too.
        mend_scalars: whether to do so for values without dimensions, which cost next to nothing;
            one by one as they are needed, without a search for what is cheapest.
        sums_stay: whether inside submeshes all sums over divided dimensions stay partial until
            something needs them whole, as those of contractions do; else only contractions' do.
        message_bytes: what a move costs beside its bytes, in bytes: what a link carries within its
            latency. The more, the fewer and larger moves are put in.

    Returns:
        The annotated program.

    Raises:
        InputError: an annotation does not fit its input; or a value cannot be taken as it lies,
            then the message names the equation, its source line, how its operands lie, and the
            reshard that mends it.

    Source: Hetu v2, section 5.2.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from jax.sharding import PartitionSpec
        >>> from hetjax.sharding import Subgroup
        >>> closed = jax.make_jaxpr(lambda x, w: x @ w)(jnp.ones((6, 4)), jnp.ones((4, 2)))
        >>> one, two = Subgroup((0,), (), PartitionSpec()), Subgroup((1,), (), PartitionSpec())
        >>> uneven = HSharding((one, two), hdim=0, sizes=(4, 2))
        >>> found = deduce(closed, [uneven, HSharding((one, two))])
        >>> found.annotations[found.outputs[0]] == uneven
        True
    """
    variables = program.jaxpr.invars
    if len(annotations) != len(variables):
        raise InputError(
            f"annotations: {len(annotations)} are given, and the program has {len(variables)} "
            f"inputs"
        )
    bound: list[HSharding | None] = []
    pairs = zip(annotations, shapes_of(variables), strict=True)
    for place, (annotation, shape) in enumerate(pairs):
        try:
            found = annotation and sized(annotation.bind(symbols or {}), shape)
            if found is not None:
                found.shards(shape)
            bound.append(found)
        except InputError as error:
            raise InputError(f"annotations[{place}]: {error}") from None
    settings = Settings(
        strategy,
        symbols or {},
        mend=mend,
        mend_bodies=mend or mend_bodies,
        mend_scalars=mend_scalars,
        sums_stay=sums_stay,
        message_bytes=message_bytes,
    )
    return deduce_program(program, bound, settings)
