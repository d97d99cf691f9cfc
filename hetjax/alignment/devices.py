"""What an operator gives on a kind: the device that it has here, its products, what is put in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hetjax import _compat
from hetjax.alignment.kinds import AlignedKind, check_dtypes
from hetjax.alignment.operators import PRODUCTS, Operator, OperatorProgram
from hetjax.errors import InputError, shown
from hetjax.mesh.jax_devices import is_of_kind, kind_name
from hetjax.mesh.published_kinds import KINDS

Replacement = Callable[[list[Any], list[Any]], list[Any]]
"""From an operator's operands and its results to the results that a kind gives; can be traced."""

_DIGITS = {"float32": (8, 23), "bfloat16": (8, 7), "float16": (5, 10)}
"""Bits of the exponent and of the fraction."""


@dataclass(frozen=True, eq=False)
class KindDevice:
    """A kind, bound to a device of this process.

    Args:
        kind: the kind.
        device: the device.
        replacements: by operator number, what the kind gives in the place of an operator's results,
            to see whether an error would be found.

    Example:
        >>> from hetjax.alignment.kinds import AlignedKind
        >>> half = bind_kind(AlignedKind("half", "cpu", "bfloat16"))
        >>> half.device.platform
        'cpu'
    """

    kind: AlignedKind
    device: Any
    replacements: Mapping[int, Replacement] = field(default_factory=lambda: MappingProxyType({}))

    def put(self, value: Any) -> Any:
        """A value on the device."""
        return jax.device_put(value, self.device)

    def give(self, operator: Operator, operands: Sequence[Any]) -> list[Any]:
        """The results of an operator on operands, which are on the device or traced.

        Args:
            operator: the operator.
            operands: one array for each of its inputs.

        Returns:
            One array for each of its outputs.
        """
        with jax.default_device(self.device):
            results = _multiplied(operator, operands, self.kind)
            if operator.number in self.replacements:
                results = self.replacements[operator.number](list(operands), results)
        return results


def bind_kind(
    kind: AlignedKind,
    replacements: Mapping[int, Replacement] = MappingProxyType({}),
    dtypes: Mapping[str, str] = MappingProxyType({}),
) -> KindDevice:
    """Find a kind's device among those of this process.

    Args:
        kind: the kind.
        replacements: what it gives in the place of operators' results, by their numbers.
        dtypes: what a model multiplies in, and what has each; see `OperatorProgram.product_dtypes`.

    Returns:
        The kind with the first device that is of it.

    Raises:
        InputError: there is no such device here, or it does not compute in one of the dtypes.
    """
    if kind.device_kind is not None:
        check_dtypes(kind, kind.device_kind, dtypes)
    try:
        devices = jax.devices(kind.platform)
    except RuntimeError:
        devices = []
    wanted = kind.device_kind
    fitting = [each for each in devices if wanted is None or is_of_kind(each, wanted)]
    if not fitting:
        what = kind.platform if wanted is None else wanted.name
        there = ", ".join(
            dict.fromkeys(f"{each.platform} ({device_text(each)})" for each in _all())
        )
        raise InputError(
            f"kind {kind.name!r}: this process has no device of {what!r}; it has: {there}. Compare "
            f"machines by --capture on one and --replay on the other"
        )
    found = KINDS.get(kind_name(fitting[0]) or "")
    if found is not None:
        check_dtypes(kind, found, dtypes)
    return KindDevice(kind, fitting[0], replacements)


def _all() -> list[Any]:
    """The devices of all platforms that this process has."""
    first = jax.devices()
    if first[0].platform == "cpu":
        return first
    try:
        return [*first, jax.devices("cpu")[0]]
    except RuntimeError:  # Of a process that was told to have none.
        return first


def device_text(device: Any) -> str:
    """What a device is, for people and files."""
    return kind_name(device) or str(device.device_kind)


def _multiplied(operator: Operator, operands: Sequence[Any], kind: AlignedKind) -> list[Any]:
    """An operator's results, its products in the dtype of a kind."""
    equation = operator.equation
    if kind.products is None or operator.name not in PRODUCTS:
        return _compat.bind(equation, operands)
    (output,) = operator.given
    params = {**equation.params, "preferred_element_type": np.dtype(output.dtype)}
    narrow = _converted
    if kind.products == "float32" or kind.platform == "cpu":
        highest = jax.lax.Precision.HIGHEST
        params["precision"] = (highest, highest)
        # A CPU's own products of two bytes are slow; of rounded operands they are the same.
        narrow = _reduced
    operands = [narrow(operand, kind.products) for operand in operands]
    return _compat.bind_with(equation, params, operands)


def _reduced(operand: Any, dtype: str) -> Any:
    if not _is_wider(operand, dtype):
        return operand
    exponent, fraction = _DIGITS[dtype]
    reduced = jax.lax.reduce_precision(operand, exponent, fraction)
    if dtype != "float16":
        return reduced
    # It makes 0 of what is below the least normal number, and devices a multiple of the least of
    # all. That of bfloat16 is so small that processors have none below it either.
    least = np.asarray(jnp.finfo(dtype).smallest_subnormal, operand.dtype)
    small = jnp.abs(operand) < np.asarray(jnp.finfo(dtype).smallest_normal, operand.dtype)
    return jnp.where(small, jnp.round(operand / least) * least, reduced)


def _converted(operand: Any, dtype: str) -> Any:
    return jax.lax.convert_element_type(operand, dtype) if _is_wider(operand, dtype) else operand


def _is_wider(operand: Any, dtype: str) -> bool:
    own = jnp.result_type(operand)
    return own in (jnp.float32, jnp.float64) and own != dtype


@dataclass(frozen=True)
class Injection:
    """An error put into one operator of one kind, to see that it is found.

    Args:
        operator: the operator's number.
        size: what its results are off by, relative to each of them; may be infinite or NaN.
        step: the only training step, from 1, in which they are off; None for always.
    """

    operator: int
    size: float
    step: int | None = None

    def check(self, program: OperatorProgram) -> None:
        """Check that there is such an operator, and that it makes numbers.

        Raises:
            InputError: naming the operator and what is allowed.
        """
        if not 0 <= self.operator < len(program.operators):
            raise InputError(
                f"--inject: operator {self.operator} is not allowed: there are 0 to "
                f"{len(program.operators) - 1}"
            )
        operator = program.operators[self.operator]
        if not all(jnp.issubdtype(each.dtype, jnp.inexact) for each in operator.given):
            raise InputError(
                f"--inject: operator {self.operator} is not allowed: {shown(operator.signature)} "
                f"does not make numbers of floating dtype"
            )

    def replacement(self, step: Any = None) -> Replacement:
        """What makes the error.

        Args:
            step: the present training step, which may be traced; None where there are no steps.

        Returns:
            A function for `KindDevice.replacements`.
        """
        is_on = True if self.step is None else step is not None and jnp.equal(step, self.step)

        def replaced(_: list[Any], results: list[Any]) -> list[Any]:
            # Added rather than multiplied, so that NaN and infinity reach zeros too.
            return [
                jnp.where(is_on, each + _times(each, self.size), each).astype(each.dtype)
                for each in results
            ]

        return replaced


def _times(value: Any, size: float) -> Any:
    factor = jnp.asarray(size, value.dtype)
    return value * factor if np.isfinite(size) else jnp.broadcast_to(factor, value.shape)
