"""How tokens may be drawn: checked without JAX, before anything heavy is imported."""

from __future__ import annotations

import math

from hetjax.errors import InputError

MAX_TEMPERATURE = 100.0
MAX_LENGTH = 1_000_000
_MAX_SEED = 2**32


def check_draws(length: int, temperature: float, seed: int) -> None:
    """Check how tokens are to be drawn, before anything is read for it.

    Args:
        length: how many tokens to make.
        temperature: as `hetjax.models.generate` has it.
        seed: of the draws.

    Raises:
        InputError: naming the argument, its value and what is allowed.
    """
    if not 1 <= length <= MAX_LENGTH:
        raise InputError(f"length is {length}; it must be 1 to {MAX_LENGTH}")
    if not (math.isfinite(temperature) and 0 <= temperature <= MAX_TEMPERATURE):
        raise InputError(f"temperature is {temperature}; it must be 0 to {MAX_TEMPERATURE:g}")
    if not 0 <= seed < _MAX_SEED:
        raise InputError(f"seed is {seed}; it must be at least 0 and below 2**32")
