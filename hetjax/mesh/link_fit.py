"""From the times of transfers to a link."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hetjax.errors import InputError
from hetjax.mesh.links import Link


def fit_link(sizes: Sequence[float], seconds: Sequence[float]) -> Link:
    """The link that explains how long messages took: ``latency + size / bandwidth``.

    The line goes through the smallest message and has the slope of least squares, by which the
    largest ones count most. A line that is free at both ends would be led astray by the messages
    between: links let bursts of some tens of kilobytes pass faster than they can go on.

    Args:
        sizes: bytes of each message; of two sizes at least, one of them next to nothing.
        seconds: how long each took, more than 0.

    Returns:
        The link; its latency is 0 where the line's is negative. Where larger messages took no
        longer, its bandwidth is that of the fastest one.

    Raises:
        InputError: all messages are of one size.

    Example:
        >>> fit_link([1, 1_000_001, 4_000_001], [0.002, 0.102, 0.402])
        Link(bandwidth=10000000.0, latency=0.002)
    """
    n, t = np.asarray(sizes, float), np.asarray(seconds, float)
    smallest = int(np.argmin(n))
    larger, longer = n - n[smallest], t - t[smallest]
    if not larger.any():
        raise InputError(f"sizes: {list(sizes)}: a link is fitted to messages of unlike sizes")
    per_byte = np.sum(larger * longer) / np.sum(larger**2)
    if per_byte <= 0:
        per_byte = np.min(t / n)
    latency = max(0.0, t[smallest] - n[smallest] * per_byte)
    return Link(bandwidth=_digits(1 / per_byte), latency=_digits(latency))


def _digits(figure: float) -> float:
    """Rounds to four digits, more than a measurement is worth."""
    return float(f"{figure:.3e}")
