"""What a FLOP or a byte of each class takes on a device, fitted to the runs measured there.

The runs may be of any model: what was measured of one tells of models that nothing was measured of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from hetjax.pipeline.program.work_classes import Work
from hetjax.planner.work.rates import expected_rate

_SHORT_SECONDS = 2e-3
"""Runs that are shorter count less: their beginning and end are a large part of them."""

_DOUBT = 0.01
"""What a class counts for that is twice as slow as all others, beside a run that is twice as long:
one that is a thousandth of all runs should not take up what they are measured wrongly by."""


@dataclass(frozen=True)
class MeasuredPass:
    """A pass of a run of layers.

    Args:
        work: FLOPs and bytes by class.
        seconds: what it took on one device.
    """

    work: Work
    seconds: float


def fit_class_rates(
    passes: Sequence[MeasuredPass], flops: float, bandwidth: float
) -> Mapping[str, float]:
    """What classes of work take on a device.

    It is the least-squares fit of relative errors with no rate below 0. A class that few passes
    tell of stays near what the device's figures say, by as much slower as all work is.

    Args:
        passes: what was measured there.
        flops: the device's FLOP/s of products.
        bandwidth: its memory's bytes/s.

    Returns:
        Seconds of a FLOP, or of a byte, by class.

    Example:
        >>> passes = [MeasuredPass({"product 512": 1e9}, 0.02), MeasuredPass({"moved": 1e8}, 0.05)]
        >>> found = fit_class_rates(passes, 1e11, 1e10)
        >>> {name: f"{1e9 * rate:.1g}" for name, rate in found.items()}
        {'moved': '0.5', 'product 512': '0.02'}
    """
    names = sorted({name for each in passes for name in each.work})
    expected = np.array([expected_rate(name, flops, bandwidth) for name in names])
    work = np.array([[each.work.get(name, 0.0) for name in names] for each in passes])
    seconds = np.array([each.seconds for each in passes])
    weights = 1 / np.maximum(seconds, _SHORT_SECONDS)
    told, taken = work * expected * weights[:, None], seconds * weights
    (slower,), _ = nnls(told.sum(axis=1, keepdims=True), taken)
    near = _DOUBT / (slower or 1.0)
    rows = np.concatenate([told, near * np.eye(len(names))])
    factors, _ = nnls(rows, np.concatenate([taken, np.full(len(names), _DOUBT)]))
    return {name: float(rate) for name, rate in zip(names, factors * expected, strict=True)}
