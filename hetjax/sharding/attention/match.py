"""Plain attention found in a traced program, and put in one equation.

What is found: a product of queries and keys, scaled, masked, a softmax, and a product with values,
as `jax.nn.dot_product_attention`, `flax.nnx.dot_product_attention` or a person writes it; in loops,
branches and checkpointed regions too. The last are opened: where attention is shared, the plan says
what is made again. A softmax between two products in which there is anything else is refused, with
the line and the reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hetjax import _compat
from hetjax.errors import InputError
from hetjax.sharding.attention.plain_attention import PlainAttention
from hetjax.sharding.attention.primitive import attention_line
from hetjax.sharding.attention.walk import Given, Walk


@dataclass(frozen=True)
class FoundAttention:
    """Plain attention in a program.

    Args:
        equation: the primitive of the product with values.
        line: file and line of the user's program that it comes from.
        refused: why it stays as it is; empty where it is one equation now.
    """

    equation: str
    line: str
    refused: str = ""


@dataclass(frozen=True)
class MatchedProgram:
    """A program in which plain attention is one equation.

    Args:
        program: the program, which computes the same.
        found: what was found, in order.
    """

    program: _compat.ClosedJaxpr
    found: tuple[FoundAttention, ...]

    def check(self) -> None:
        """Check that there is no attention, or some in one equation, as a divided sequence needs.

        Raises:
            InputError: there is some, and none in one equation; each is named with its line and
                the reason.
        """
        # Beside attention that is known these may be gates or features. Those that mix tokens are
        # refused by what follows these.
        if self.refused and attention_line([self.program.jaxpr]) is None:
            raise InputError(
                f"loss_function: the sequence cannot be divided: {self.refused}. Allowed: "
                "hetjax.attention, or a softmax of scaled scores with such a mask"
            )

    @property
    def refused(self) -> str:
        """What is not in one equation, with its lines and the reasons; empty for nothing."""
        said = Counter(
            f"attention that ends with {each.equation} at {each.line}: {each.refused}"
            for each in self.found
            if each.refused
        )
        return "; ".join(
            f"{what} ({count} times)" if count > 1 else what for what, count in said.items()
        )


def match_attention(program: _compat.ClosedJaxpr, num_parameters: int = 0) -> MatchedProgram:
    """Find plain attention in a program, and put each in one equation.

    A softmax of what is computed with parameters alone, as that of gates or of a learned memory, is
    none: it is of each token by itself, or sums over tokens.

    Args:
        program: what `jax.make_jaxpr` gives of a forward pass.
        num_parameters: how many of its inputs, the first ones, are parameters.

    Returns:
        The program, and what was found.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> x = jnp.ones((2, 5, 4, 8))
        >>> plain = jax.make_jaxpr(lambda q: jax.nn.dot_product_attention(q, q, q))(x)
        >>> names = {each.primitive.name for each in match_attention(plain).program.eqns}
        >>> sorted(names - {"reshape", "transpose"})
        ['attention']
    """
    found: list[FoundAttention] = []
    given = [Given(is_fixed=True)] * num_parameters
    return MatchedProgram(_matched(program, found, given), tuple(found))


def _matched(
    program: _compat.ClosedJaxpr, found: list[FoundAttention], given: Sequence[Given]
) -> _compat.ClosedJaxpr:
    walk = _opened(program, given)
    flat = walk.program
    equations: list[_compat.JaxprEqn] = []
    consts = list(zip(flat.jaxpr.constvars, flat.consts, strict=True))
    for equation in flat.jaxpr.eqns:
        attention = walk.follow(equation)
        if attention is None:
            equations.append(_inside(equation, walk.entering(equation), found))
            continue
        name, line = equation.primitive.name, _compat.source_line(equation)
        if isinstance(attention, str):
            found.append(FoundAttention(name, line, attention))
            equations.append(equation)
            continue
        found.append(FoundAttention(name, line))
        spliced = _compat.without_calls(attention.traced())
        consts += zip(spliced.jaxpr.constvars, spliced.consts, strict=True)
        equations += _compat.spliced(spliced.jaxpr, attention.operands, equation)
    if not equations:
        return flat
    variables, values = zip(*consts, strict=True) if consts else ((), ())
    jaxpr = flat.jaxpr.replace(constvars=list(variables), eqns=equations)
    return _compat.without_dead_equations(_compat.ClosedJaxpr(jaxpr, list(values)))


def _opened(program: _compat.ClosedJaxpr, given: Sequence[Given]) -> Walk:
    """A walk over a program without calls, and without checkpointed regions that attend."""
    walk = Walk(_compat.without_calls(program), given)
    while True:
        flat, attending = walk.program, dict[int, _compat.ClosedJaxpr]()
        for equation in flat.jaxpr.eqns:
            region = _compat.checkpointed_jaxpr(equation)
            if region is not None and _attends(region, walk.entering(equation)):
                attending[id(equation)] = region
            walk.follow(equation)
        if attending:
            # A region may hold calls, and other regions: those are the next round's.
            flat = _compat.without_calls(
                flat,
                lambda each, known=attending: known.get(id(each)) or _compat.called_jaxpr(each),
            )
        # Constants may be large, and are looked at once.
        constants = {each: walk.forms[each] for each in walk.program.jaxpr.constvars}
        walk = Walk(flat, given, constants)
        if not attending:
            return walk


def _attends(program: _compat.ClosedJaxpr, given: Sequence[Given]) -> bool:
    """Whether a body has attention in one equation, or such as can be put in one."""
    if attention_line([program.jaxpr]) is not None:
        return True
    walk = Walk(_compat.without_calls(program), given)
    for equation in walk.program.jaxpr.eqns:
        known = walk.entering(equation)
        if any(_attends(each, known) for each in _bodies(equation)):
            return True
        if isinstance(walk.follow(equation), PlainAttention):
            return True
    return False


def _bodies(equation: _compat.JaxprEqn) -> list[_compat.ClosedJaxpr]:
    """The bodies of an equation in which attention may be found."""
    if _has_rule(equation):
        return []
    parameters = equation.params.values()
    items = (i for each in parameters for i in (each if isinstance(each, tuple | list) else [each]))
    return [
        each if isinstance(each, _compat.ClosedJaxpr) else _compat.ClosedJaxpr(each, [])
        for each in items
        if isinstance(each, _compat.ClosedJaxpr | _compat.Jaxpr)
    ]


def _has_rule(equation: _compat.JaxprEqn) -> bool:
    """Whether an equation has a derivative of its own, so that what it computes stays as it is."""
    return "custom" in equation.primitive.name


def _inside(
    equation: _compat.JaxprEqn, given: Sequence[Given], found: list[FoundAttention]
) -> _compat.JaxprEqn:
    """An equation with what is in its bodies matched; rules of derivatives stay as they are."""
    if _has_rule(equation) or not _compat.inner_jaxprs(equation):
        return equation

    def matched(parameter: Any) -> Any:
        if type(parameter) in (tuple, list):
            return type(parameter)(map(matched, parameter))
        if isinstance(parameter, _compat.ClosedJaxpr):
            return _matched(parameter, found, given)
        if isinstance(parameter, _compat.Jaxpr):
            closed = _matched(_compat.ClosedJaxpr(parameter, []), found, given)
            return closed.jaxpr if not closed.consts else parameter
        return parameter

    params = {name: matched(value) for name, value in equation.params.items()}
    return equation.replace(params=params)
