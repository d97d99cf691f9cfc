"""What steps have in common that look alike, found once for each of them."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

from hetjax import _compat
from hetjax.pipeline.program.costs import share_cost, step_cost
from hetjax.pipeline.program.traced_program import Step


@dataclass(frozen=True, eq=False)
class Form:
    """What a step does, and the shapes of what it reads and makes.

    There is one of each, so that many can be compared at once, as a stage's are.

    Args:
        key: what makes it this one.
    """

    key: Hashable


_forms: WeakKeyDictionary[Step, Form] = WeakKeyDictionary()
"""The forms of steps that were looked at before: every step is in several runs."""

_known: WeakValueDictionary[Hashable, Form] = WeakValueDictionary()
"""The forms that some step has."""


def form_of(step: Step) -> Form:
    """The form of a step.

    Args:
        step: a step of a program.

    Returns:
        One object for all steps of that form.
    """
    form = _forms.get(step)
    if form is None:
        shapes = () if step.equation is None else shapes_of(step.equation)
        key = step.name, step.iterations, step_cost(step), shapes, step.beside
        form = _forms[step] = _known.setdefault(key, Form(key))
    return form


def share_form(step: Step, like: Step) -> None:
    """Says that a step has the form of another one, so that it need not be found.

    Args:
        step: a step.
        like: one with the same equation, which may have other inputs and outputs.
    """
    share_cost(step, like)
    _forms[step] = form_of(like)


def shapes_of(equation: _compat.JaxprEqn) -> tuple[str, ...]:
    """The shapes and dtypes of what an equation reads and makes, as JAX writes them.

    Args:
        equation: the jaxpr equation.
    """
    return tuple(_written(variable.aval) for variable in (*equation.invars, *equation.outvars))


@functools.lru_cache(maxsize=1 << 14)
def _written(aval: Any) -> str:
    return str(aval)
