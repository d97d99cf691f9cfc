"""Random numbers as a pure function of where they are used: seed, stream and counter."""

from __future__ import annotations

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_KEY_STREAM = 1


def hash64(seed: int, stream: int, counters: np.ndarray) -> np.ndarray:
    """Uniform 64-bit integers, one a counter.

    Args:
        seed: any integer in [0, 2**32).
        stream: a small integer that keeps unlike uses of one seed apart.
        counters: [n] integers.

    Returns:
        [n] uint64; equal arguments give equal numbers on every machine.

    Source: Steele, Lea and Flood, 2014, "Fast splittable pseudorandom number generators",
    figure 17 (SplitMix64).

    Example:
        >>> [int(number) % 1000 for number in hash64(0, 0, np.arange(3))]
        [55, 654, 231]
    """
    start = _mix(np.array([(seed << 32) + stream], np.uint64) + _GOLDEN)
    return _mix(start + (counters.astype(np.uint64) + np.uint64(1)) * _GOLDEN)


def example_keys(seed: int, examples: np.ndarray) -> np.ndarray:
    """A threefry key for each example.

    Args:
        seed: of the data set.
        examples: [n] integers, the examples' places in the endless stream of training examples.

    Returns:
        [n, 2] uint32.
    """
    numbers = hash64(seed, _KEY_STREAM, examples)
    halves = (numbers >> np.uint64(32), numbers & np.uint64(0xFFFFFFFF))
    return np.stack(halves, axis=1).astype(np.uint32)


def _mix(number: np.ndarray) -> np.ndarray:
    number = (number ^ (number >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    number = (number ^ (number >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return number ^ (number >> np.uint64(31))
