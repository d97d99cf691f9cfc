"""Plain attention found in a traced program, and put in one equation.

What is found: a product of queries and keys, scaled, masked, a softmax, and a product with values,
as `jax.nn.dot_product_attention`, `flax.nnx.dot_product_attention` or a person writes it; in loops,
branches and checkpointed regions too. The last are opened: where attention is shared, the plan says
what is made again. A softmax between two products in which there is anything else is refused, with
the line and the reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from hetjax import _compat
from hetjax.errors import InputError
from hetjax.sharding.attention.forms import (
    Counting,
    Data,
    Distance,
    Region,
    Same,
    Uniform,
    computed,
    counts_exactly,
    form_of_constant,
    moved,
)
from hetjax.sharding.attention.plain_attention import (
    PlainAttention,
    UnknownAttentionError,
    plain_attention,
)
from hetjax.sharding.attention.primitive import attention_line
from hetjax.sharding.attention.softmax_chain import (
    OF_RULE,
    OF_SUM,
    OF_WEIGHTS,
    Followed,
    Scores,
    Total,
    aligned,
    combined,
    placed,
    scores_of_product,
    total_of,
)


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
        """Check that all attention is in one equation now, as a divided sequence needs.

        Raises:
            InputError: some is not; each is named with its line and the reason.
        """
        refused = [each for each in self.found if each.refused]
        if attention_line([self.program.jaxpr]) is not None:
            # Beside attention that is known, these may be gates or features. If they are attention
            # too, what follows tokens refuses it.
            refused = [each for each in refused if each.refused not in (OF_RULE, OF_SUM)]
        if refused:
            said = Counter(
                f"attention that ends with {each.equation} at {each.line}: {each.refused}"
                for each in refused
            )
            told = (
                f"{what} ({count} times)" if count > 1 else what for what, count in said.items()
            )
            raise InputError(
                f"loss_function: the sequence cannot be divided: {'; '.join(told)}. Allowed: "
                "hetjax.attention, or a softmax of scaled scores with such a mask"
            )


def match_attention(program: _compat.ClosedJaxpr) -> MatchedProgram:
    """Find plain attention in a program, and put each in one equation.

    Args:
        program: what `jax.make_jaxpr` gives of a forward pass.

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
    return MatchedProgram(_matched(program, found), tuple(found))


def _matched(
    program: _compat.ClosedJaxpr, found: list[FoundAttention], given: Sequence[Followed] = ()
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


def _opened(program: _compat.ClosedJaxpr, given: Sequence[Followed]) -> _Walk:
    """A walk over a program without calls, and without checkpointed regions that attend."""
    walk = _Walk(_compat.without_calls(program), given)
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
        walk = _Walk(flat, given, constants)
        if not attending:
            return walk


def _attends(program: _compat.ClosedJaxpr, given: Sequence[Followed]) -> bool:
    """Whether a body has attention in one equation, or such as can be put in one."""
    if attention_line([program.jaxpr]) is not None:
        return True
    walk = _Walk(_compat.without_calls(program), given)
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
    equation: _compat.JaxprEqn, given: Sequence[Followed], found: list[FoundAttention]
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


@dataclass
class _Walk:
    """Goes over the equations of a program without calls.

    Args:
        program: the program.
        given: what is known of its first inputs, if anything.
        forms: what is known of each variable, at first of constants that are known already.
    """

    program: _compat.ClosedJaxpr
    given: Sequence[Followed] = ()
    forms: dict[Any, Followed] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.forms.update(zip(self.program.jaxpr.invars, self.given, strict=False))
        pairs = zip(self.program.jaxpr.constvars, self.program.consts, strict=True)
        for variable, array in pairs:
            if variable not in self.forms:
                self.forms[variable] = form_of_constant(array) or _data(variable)

    def follow(self, equation: _compat.JaxprEqn) -> PlainAttention | str | None:
        """Go over an equation.

        Returns:
            The attention that it ends, or why it is none that can be taken; None where it ends
            none.
        """
        inner = _compat.inlined_jaxpr(equation)
        if inner is not None and equation.primitive.name.startswith("custom"):
            self._rule(equation, inner)
            return None
        if equation.primitive.name == "dot_general":
            self.forms[equation.outvars[0]] = scores_of_product(equation)
            return self._ended(equation)
        for variable in equation.outvars:
            self.forms[variable] = _data(variable)
        if len(equation.outvars) == 1:
            form = self._form(equation)
            if form is not None:
                self.forms[equation.outvars[0]] = form
        return None

    def entering(self, equation: _compat.JaxprEqn) -> list[Followed]:
        """What is known of the first inputs of an equation's bodies.

        Of a checkpointed region that is all of its operands, as it is opened where it attends. A
        loop stays: its constants are known where no array outside of it is needed to tell them.
        """
        if _compat.checkpointed_jaxpr(equation) is not None:
            return [self._read(atom) for atom in equation.invars]
        if equation.primitive.name != "scan":
            return []
        number, _ = _compat.scan_sizes(equation.params)
        forms = [self._read(atom) for atom in equation.invars[:number]]
        return [form if _is_without_arrays(form) else None for form in forms]

    def _rule(self, equation: _compat.JaxprEqn, inner: _compat.ClosedJaxpr) -> None:
        """Go over a function with a derivative of its own, such as a softmax."""
        # Anybody else's derivative may be another than that of what is computed.
        is_known = _compat.has_rule_of_jax(equation)
        walk = _Walk(inner, [self._read(atom) for atom in equation.invars])
        for each in inner.jaxpr.eqns:
            walk.follow(each)
        names: dict[Any, Any] = {}
        for variable, atom in zip(equation.outvars, inner.jaxpr.outvars, strict=True):
            form = walk._read(atom)
            is_own = isinstance(form, Data) and form.base not in self.forms
            if isinstance(form, Scores | Total) and form.exponentials is not None:
                # Equal calls have their variables inside in common.
                own = form.exponentials
                known = own if own in self.forms else names.setdefault(own, variable)
                form = replace(form, exponentials=known)
            if isinstance(form, Scores) and not is_known:
                form = replace(form, problem=OF_RULE)
            self.forms[variable] = _data(variable) if form is None or is_own else form

    def _ended(self, equation: _compat.JaxprEqn) -> PlainAttention | str | None:
        forms = [self._read(atom) for atom in equation.invars]
        for place, weights in enumerate(forms):
            if not isinstance(weights, Scores) or weights.exponentials is None:
                continue
            if weights.summed is None:
                if self._sums(weights, equation.params["dimension_numbers"][0][place]):
                    return OF_SUM
                continue
            try:
                return plain_attention(equation, place, weights)
            except UnknownAttentionError as error:
                return str(error)
        return None

    def _sums(self, weights: Scores, dims: Sequence[int]) -> bool:
        """Whether exponentials are summed anywhere along dimensions, or come of a log-softmax."""
        wanted = {weights.dims[dim] for dim in dims}
        if (weights.lowered,) in wanted:
            return True
        form = self.forms.get(weights.exponentials)
        # Where they are of a call, it may have more results than exponentials.
        return isinstance(form, Scores) and any(
            each.primitive.name == "reduce_sum"
            and each.invars[0] is weights.exponentials
            and wanted & {form.dims[axis] for axis in each.params["axes"]}
            for each in self.program.jaxpr.eqns
        )

    def _read(self, atom: Any) -> Followed:
        if isinstance(atom, _compat.Literal):
            return Uniform(np.asarray(atom.val)[()])
        form = self.forms.get(atom)
        return _data(atom) if form is None else form

    def _form(self, equation: _compat.JaxprEqn) -> Followed:
        name, params = equation.primitive.name, equation.params
        out: Any = equation.outvars[0].aval
        if name == "iota":
            if not counts_exactly(out.dtype):
                return None
            return Counting(((params["dimension"], 1),), 0.0)
        if not equation.invars:
            return None
        forms = [self._read(atom) for atom in equation.invars]
        avals: list[Any] = [atom.aval for atom in equation.invars]
        first = forms[0]
        if name == "reduce_sum" and isinstance(first, Scores):
            return None if first.exponentials is None else total_of(first, params["axes"])
        if isinstance(first, Scores | Total) and len(forms) == 1:
            kept = placed(first, equation)
            if kept is not None or name in _MOVING:
                return kept
        places = _places(equation)
        if places is not None and not isinstance(first, Scores | Total):
            return moved(first, places)
        if any(
            tuple(aval.shape) not in ((), out.shape) and aval.ndim != out.ndim for aval in avals
        ):
            return None
        found = [
            aligned(form, aval.shape, out.shape) for form, aval in zip(forms, avals, strict=True)
        ]
        scores = [i for i, each in enumerate(found) if isinstance(each, Scores)]
        if not scores:
            for form, aval in zip(found, avals, strict=True):
                if isinstance(form, Total) and tuple(aval.shape) == tuple(out.shape):
                    return replace(form, is_changed=True)
            known = [None if isinstance(each, Total | Scores) else each for each in found]
            return computed(name, known, out.shape, out.dtype)
        (place, *others) = scores
        of = found[place]
        assert isinstance(of, Scores)
        if others:
            return of.refused(OF_WEIGHTS) if of.summed is not None else None
        if name.startswith(("reduce", "arg", "dynamic", "gather", "concatenate", "slice")):
            return None
        return combined(equation, place, of, found)


_MOVING = frozenset("transpose reshape squeeze expand_dims broadcast_in_dim".split())


def _data(variable: Any) -> Data:
    return Data(variable, tuple(range(len(variable.aval.shape))))


def _is_without_arrays(form: Followed) -> bool:
    if isinstance(form, Region):
        return not any(isinstance(each, Same) for each in form.conditions)
    return isinstance(form, Uniform | Counting | Distance)


def _places(equation: _compat.JaxprEqn) -> Mapping[int, int | None] | None:
    """Where the dimensions of an operand go; None where an equation does more than move them."""
    name, params = equation.primitive.name, equation.params
    before: Any = equation.invars[0].aval
    after: Any = equation.outvars[0].aval
    match name:
        case "transpose":
            return {old: new for new, old in enumerate(params["permutation"])}
        case "broadcast_in_dim":
            pairs = enumerate(params["broadcast_dimensions"])
            return {i: int(p) if before.shape[i] == after.shape[p] else None for i, p in pairs}
        case "reshape" | "squeeze" | "expand_dims":
            old = [i for i, size in enumerate(before.shape) if size != 1]
            new = [i for i, size in enumerate(after.shape) if size != 1]
            if [before.shape[i] for i in old] != [after.shape[i] for i in new]:
                return None
            found: dict[int, int | None] = dict.fromkeys(range(before.ndim))
            return {**found, **dict(zip(old, new, strict=True))}
    return None
