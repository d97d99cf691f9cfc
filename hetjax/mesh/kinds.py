"""Device kinds: what one accelerator can compute, hold and read in a second.

No matrix product reaches a peak, and kinds are unlike in how near they come: what was measured of a
kind stands beside its peak, with its source. Of all other kinds one share is assumed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import DTypeLike

from hetjax.errors import InputError, unknown_name
from hetjax.limits import check_name

PLATFORMS = ("cpu", "gpu", "tpu")
"""The platforms that a device kind may belong to."""

ASSUMED_EFFICIENCY = 0.7
"""Share of the peak that usual matrix products are taken to reach where nothing was measured."""

USUAL_SHARE = 0.8
"""Share of the best shape's rate that matrix products of usual sizes are taken to reach.

What is published of a kind is its best shape. On an A100 this comes to the share of the peak that
is assumed where nothing was measured.
"""


class ByDtype(Mapping[str, float]):
    """Figures by NumPy dtype name; a mapping that cannot change and can be hashed."""

    def __init__(self, figures: Mapping[str, float]):
        self._figures = dict(sorted(figures.items()))
        self._hash = hash(tuple(self._figures.items()))

    def __getitem__(self, dtype: str) -> float:
        return self._figures[dtype]

    def __iter__(self) -> Iterator[str]:
        return iter(self._figures)

    def __len__(self) -> int:
        return len(self._figures)

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return repr(self._figures)


@dataclass(frozen=True)
class DeviceKind:
    """A type of accelerator.

    Args:
        name: the name by which cluster files, plans and profiles refer to it.
        peak_flops: peak FLOP/s by NumPy dtype name (``"float32"``, ``"bfloat16"``,
            ``"float16"``); ``"float32"`` must be there.
        memory_bytes: bytes of memory of one device.
        memory_bandwidth: bytes/s between the device and its memory.
        source: where the figures come from.
        platform: JAX's name for what drives it: ``"cpu"``, ``"gpu"`` or ``"tpu"``.
        product_shares: by dtype name, the share of the peak that a matrix product of the best
            shape was measured to reach; nothing where that is not known.
        product_source: who measured that.

    Raises:
        InputError: ``"float32"`` is missing, a figure is not positive and finite, a share is over 1
            or of a dtype without a peak, or a name has invisible characters.

    Example:
        >>> half = DeviceKind("half", {"float32": 1e12}, 8 * 10**9, 1e11, source="an example")
        >>> half.flops("bfloat16")
        1000000000000.0
    """

    name: str
    peak_flops: Mapping[str, float]
    memory_bytes: int
    memory_bandwidth: float
    source: str
    platform: str = "gpu"
    product_shares: Mapping[str, float] = field(default_factory=dict)
    product_source: str = ""

    def __post_init__(self) -> None:
        check_name(self.name, "device kind: name: ")
        check_name(self.source, f"device kind {self.name!r}: source: ")
        if self.product_source:
            check_name(self.product_source, f"device kind {self.name!r}: product_source: ")
        if self.platform not in PLATFORMS:
            what = f"device kind {self.name!r}: platform"
            raise InputError(unknown_name(what, self.platform, PLATFORMS))
        object.__setattr__(self, "peak_flops", ByDtype(self.peak_flops))
        object.__setattr__(self, "product_shares", ByDtype(self.product_shares))
        if "float32" not in self.peak_flops:
            raise InputError(
                f"device kind {self.name!r}: peak_flops: 'float32' must be given, "
                f"since it stands in for what is not; given: {', '.join(self.peak_flops) or 'none'}"
            )
        figures = {f"peak_flops.{dtype}": rate for dtype, rate in self.peak_flops.items()}
        figures |= {"memory_bytes": self.memory_bytes, "memory_bandwidth": self.memory_bandwidth}
        for place, figure in figures.items():
            if not (math.isfinite(figure) and figure > 0):
                raise InputError(
                    f"device kind {self.name!r}: {place}: {figure!r} is not allowed: "
                    "it must be more than 0 and finite"
                )
        for dtype, share in self.product_shares.items():
            place = f"device kind {self.name!r}: product_shares.{dtype}"
            if dtype not in self.peak_flops:
                raise InputError(f"{place}: peak_flops has no {dtype!r}")
            if not 0 < share <= 1:
                raise InputError(f"{place}: {share!r} is not allowed: it must be over 0, at most 1")

    @property
    def is_processor(self) -> bool:
        """Whether it is a host's processor, for which XLA compiles in a way of its own."""
        return self.platform == "cpu"

    def flops(self, dtype: DTypeLike) -> float:
        """Peak FLOP/s for matrix products of a dtype.

        A dtype that the kind has no figure for is given the rate of float32: a device without a
        fast path for it converts to float32 and computes there (bfloat16 on a V100 or a P100).

        Args:
            dtype: a dtype or its NumPy name, such as ``"bfloat16"``.

        Returns:
            FLOP/s.

        Example:
            >>> from hetjax.mesh import kind
            >>> kind("A100-40").flops("bfloat16") / kind("V100").flops("bfloat16") > 10
            True
        """
        return self.peak_flops[self._rated_as(dtype)]

    def product_efficiency(self, dtype: DTypeLike) -> float:
        """Share of the peak that matrix products of usual sizes are taken to reach.

        Args:
            dtype: a dtype or its NumPy name.

        Returns:
            From 0 to 1: `USUAL_SHARE` of what the best shape was measured to reach, else
            `ASSUMED_EFFICIENCY`.

        Example:
            >>> from hetjax.mesh import kind
            >>> kind("RTX4090").product_efficiency("bfloat16")
            0.7
            >>> round(kind("MI300X").product_efficiency("bfloat16"), 3)
            0.409
        """
        best = self.product_shares.get(self._rated_as(dtype))
        return ASSUMED_EFFICIENCY if best is None else USUAL_SHARE * best

    def assumes_efficiency(self, dtype: DTypeLike) -> bool:
        """Whether nothing was measured of how near products come to the peak.

        Args:
            dtype: a dtype or its NumPy name.

        Returns:
            Whether `product_efficiency` is `ASSUMED_EFFICIENCY`.
        """
        return self._rated_as(dtype) not in self.product_shares

    def product_flops(self, dtype: DTypeLike) -> float:
        """FLOP/s that matrix products of usual sizes are taken to reach.

        Args:
            dtype: a dtype or its NumPy name.

        Returns:
            The peak's share by `product_efficiency`.
        """
        return self.flops(dtype) * self.product_efficiency(dtype)

    def _rated_as(self, dtype: DTypeLike) -> str:
        """The dtype whose figures count for a dtype."""
        name = dtype if isinstance(dtype, str) else np.dtype(dtype).name
        return name if name in self.peak_flops else "float32"

    def slow_path(self, dtype: DTypeLike) -> str | None:
        """What to know of a dtype that the kind has no rate of its own for.

        Args:
            dtype: a dtype or its NumPy name, such as ``"bfloat16"``.

        Returns:
            That it is rated as float32 is, and what the kind's fastest dtype would give; None where
            the kind has a rate for it.

        Example:
            >>> from hetjax.mesh import kind
            >>> print(kind("T4").slow_path("bfloat16"))
            T4 has no bfloat16 rate: rated as float32, at 8.1 TFLOP/s; float16: 65 TFLOP/s
            >>> kind("T4").slow_path("float16")
        """
        name = dtype if isinstance(dtype, str) else np.dtype(dtype).name
        if name in self.peak_flops:
            return None
        slow = self.peak_flops["float32"]
        said = f"{self.name} has no {name} rate: rated as float32, at {slow / 1e12:g} TFLOP/s"
        best = max(self.peak_flops, key=lambda each: self.peak_flops[each])
        if self.peak_flops[best] > slow:
            said += f"; {best}: {self.peak_flops[best] / 1e12:g} TFLOP/s"
        return said
