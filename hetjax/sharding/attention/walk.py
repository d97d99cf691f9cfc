"""A walk over the equations of a program: what is known of each value, and which attentions end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from hetjax import _compat
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
class Given:
    """What is known of an input of a program, or of a body.

    Args:
        form: its form; None where it is unknown.
        is_fixed: whether it comes of parameters and constants alone.
    """

    form: Followed = None
    is_fixed: bool = False


@dataclass
class Walk:
    """Goes over the equations of a program without calls.

    Args:
        program: the program.
        given: what is known of its first inputs, if anything.
        forms: what is known of each variable, at first of constants that are known already.
        fixed: the variables that come of parameters and constants alone.
    """

    program: _compat.ClosedJaxpr
    given: Sequence[Given] = ()
    forms: dict[Any, Followed] = field(default_factory=dict)
    fixed: set[Any] = field(default_factory=set)

    def __post_init__(self) -> None:
        for variable, known in zip(self.program.jaxpr.invars, self.given, strict=False):
            self.forms[variable] = known.form
            if known.is_fixed:
                self.fixed.add(variable)
        self.fixed.update(self.program.jaxpr.constvars)
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
        if all(map(self._is_fixed, equation.invars)):
            self.fixed.update(equation.outvars)
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

    def entering(self, equation: _compat.JaxprEqn) -> list[Given]:
        """What is known of the first inputs of an equation's bodies.

        Of a checkpointed region that is all of its operands, as it is opened where it attends. A
        loop stays: its constants are known where no array outside of it is needed to tell them.
        """
        if _compat.checkpointed_jaxpr(equation) is not None:
            return self._given(equation)
        if equation.primitive.name != "scan":
            return []
        constants, carried = _compat.scan_sizes(equation.params)
        given = [
            each if _is_without_arrays(each.form) else replace(each, form=None)
            for each in self._given(equation)
        ]
        rows = [replace(each, form=None) for each in given[constants + carried :]]
        return [*given[:constants], *[Given()] * carried, *rows]

    def _given(self, equation: _compat.JaxprEqn) -> list[Given]:
        return [Given(self._read(atom), self._is_fixed(atom)) for atom in equation.invars]

    def _is_fixed(self, atom: Any) -> bool:
        return isinstance(atom, _compat.Literal) or atom in self.fixed

    def _rule(self, equation: _compat.JaxprEqn, inner: _compat.ClosedJaxpr) -> None:
        """Go over a function with a derivative of its own, such as a softmax."""
        # Anybody else's derivative may be another than that of what is computed.
        is_known = _compat.has_rule_of_jax(equation)
        walk = Walk(inner, self._given(equation))
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
            is_between_tokens = self._is_between_tokens(weights.product)
            if weights.summed is None:
                dims = equation.params["dimension_numbers"][0][place]
                if is_between_tokens and self._sums(weights, dims):
                    return OF_SUM
                continue
            try:
                attention = plain_attention(equation, place, weights)
            except UnknownAttentionError as error:
                return str(error) if is_between_tokens else None
            return attention if self._is_of_tokens(attention) else None
        return None

    def _is_between_tokens(self, product: _compat.JaxprEqn) -> bool:
        """Whether both sides of a product come of tokens, or those of one whose heads it mixes."""
        of_tokens = [atom for atom in product.invars if not self._is_fixed(atom)]
        mixed = (self._read(atom) for atom in of_tokens)
        return len(of_tokens) == 2 or any(
            isinstance(form, Scores) and not any(map(self._is_fixed, form.product.invars))
            for form in mixed
        )

    def _is_of_tokens(self, attention: PlainAttention) -> bool:
        """Whether tokens attend to tokens; learned queries or keys may stand for as many."""
        operands = attention.q, attention.k, attention.v
        q, k, v = (not self._is_fixed(each.variable) for each in operands)
        return (k or v) and ((q and k) or attention.is_square)

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
