"""Of which parameters an optimizer's initial state is made, and whether stages have these."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jaxtyping import PyTree

from hetjax import _compat
from hetjax.errors import InputError, together


@dataclass(frozen=True, eq=False)
class InitialState:
    """The initial state of an optimizer, traced.

    Args:
        traced: from the leaves of the parameters to those of the state.
        shapes: the state's pytree.
        given: for each leaf of the state the leaves that it may be made of, whatever is called to
            make it.
    """

    traced: _compat.ClosedJaxpr
    shapes: PyTree
    given: Sequence[Collection[int]]

    @classmethod
    def of(cls, init: Callable[[PyTree], PyTree], parameters: PyTree) -> InitialState:
        """Trace it.

        Args:
            init: makes the state of the parameters.
            parameters: pytree of shapes.
        """
        traced, shapes = jax.make_jaxpr(init, return_shape=True)(parameters)
        reached: dict[Any, set[int]] = {
            variable: {leaf} for leaf, variable in enumerate(traced.jaxpr.invars)
        }

        def given(atom: Any) -> set[int]:
            return set() if isinstance(atom, _compat.Literal) else reached.get(atom, set())

        for equation in traced.jaxpr.eqns:
            leaves = set().union(*map(given, equation.invars))
            reached |= dict.fromkeys(equation.outvars, leaves)
        return cls(traced, shapes, [given(atom) for atom in traced.jaxpr.outvars])

    def check(self, leaf: int, known: Collection[int], names: Sequence[str]) -> None:
        """Check that a stage has what a leaf of the state is made of.

        Args:
            leaf: which leaf of the state.
            known: the leaves of the parameters that the stage has.
            names: of the leaves of the parameters.

        Raises:
            InputError: the leaf is made of others, too.
        """
        if all(each in known for each in self.given[leaf]):
            return
        # What is called may use less than it is given.
        depends = _compat.depends_on(self.traced, leaf)
        told = [repr(name) for name, is_used in zip(names, depends, strict=True) if is_used]
        if all(each in known for each, is_used in enumerate(depends) if is_used):
            return
        raise InputError(
            f"the optimizer's initial state is made of {together(told, 3)}, which some of "
            f"the stages with that state do not have; it can be used with a plan of one stage"
        )
