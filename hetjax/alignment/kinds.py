"""The kinds that are aligned: what a person calls one, where it runs, and in what it multiplies.

A kind is written ``[NAME=]DEVICE[:DTYPE]``. DEVICE is a platform of JAX's (``cpu``, ``gpu``,
``tpu``) or a device kind that hetjax knows (``H100``). DTYPE is what the operands of matrix
products and convolutions are rounded to before they are multiplied, where they have more bits;
sums are of float32, and of float64 where the result is.
Without it products are as the platform has them unless a program says otherwise: float32 on CPUs,
TF32 on NVIDIA's cards, bfloat16 on TPUs. Nothing here imports JAX.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from hetjax.errors import InputError, shown, unknown_name
from hetjax.limits import check_name
from hetjax.mesh.kinds import PLATFORMS, DeviceKind
from hetjax.mesh.published_kinds import KINDS

PRODUCT_DTYPES = ("float32", "bfloat16", "float16")
"""What operands of products can be rounded to."""

_WRITTEN = re.compile(r"(?:(?P<name>[^=]*)=)?(?P<device>[^:=]*)(?::(?P<products>[^:=]*))?")


@dataclass(frozen=True)
class AlignedKind:
    """One of the kinds that are compared; the first of them is the reference.

    Args:
        name: what reports call it.
        platform: JAX's name for what drives it: ``"cpu"``, ``"gpu"`` or ``"tpu"``.
        products: what operands of products are rounded to, one of `PRODUCT_DTYPES`; None for what
            the platform does.
        device_kind: the device kind that it must be, None for any of the platform.

    Raises:
        InputError: naming the kind, the value and what is allowed.

    Example:
        >>> AlignedKind("half", "cpu", "bfloat16").products
        'bfloat16'
    """

    name: str
    platform: str
    products: str | None = None
    device_kind: DeviceKind | None = None

    def __post_init__(self) -> None:
        check_name(self.name, "kind: name: ")
        if self.platform not in PLATFORMS:
            raise InputError(
                unknown_name(f"kind {self.name!r}: platform", self.platform, PLATFORMS)
            )
        if self.products is not None:
            if self.products not in PRODUCT_DTYPES:
                what = f"kind {self.name!r}: dtype of products"
                raise InputError(unknown_name(what, self.products, PRODUCT_DTYPES))
            if self.device_kind is not None:
                check_dtypes(self, self.device_kind)


def check_dtypes(
    aligned: AlignedKind, device: DeviceKind, dtypes: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Check that a device kind computes in the dtypes that are asked for.

    Args:
        aligned: the kind that is compared; its products' dtype is one of them.
        device: what it is.
        dtypes: other dtypes by NumPy name, and what has each, for the error.

    Raises:
        InputError: it does not; the message names the dtypes that it has.

    Example:
        >>> from hetjax.mesh import kind
        >>> check_dtypes(AlignedKind("a", "gpu"), kind("V100"), {"bfloat16": "operator 3"})
        Traceback (most recent call last):
        hetjax.errors.InputError: kind 'a': operator 3: 'bfloat16' is not allowed: V100 has no \
bfloat16. Allowed: float16, float32
    """
    asked = dict(dtypes)
    if aligned.products is not None:
        asked[aligned.products] = "dtype of products"
    for dtype, what in asked.items():
        # Host processors are rated for float32 alone and compute, slowly, in every other.
        if device.platform != "cpu" and dtype not in device.peak_flops:
            raise InputError(
                f"kind {aligned.name!r}: {what}: {dtype!r} is not allowed: {device.name} has no "
                f"{dtype}. Allowed: {', '.join(device.peak_flops)}"
            )


def parse_kinds(texts: Sequence[str], least: int = 2) -> tuple[AlignedKind, ...]:
    """The kinds that a person names, the reference first.

    Args:
        texts: each of the form ``[NAME=]DEVICE[:DTYPE]``.
        least: how many there must be.

    Returns:
        The kinds.

    Raises:
        InputError: there are too few, two have one name, or one is not of that form.

    Example:
        >>> [each.name for each in parse_kinds(["cpu:float32", "half=cpu:bfloat16"])]
        ['cpu:float32', 'half']
        >>> parse_kinds(["cpu", "V100:bfloat16"])
        Traceback (most recent call last):
        hetjax.errors.InputError: kind 'V100:bfloat16': dtype of products: 'bfloat16' is not \
allowed: V100 has no bfloat16. Allowed: float16, float32
    """
    if len(texts) < least:
        raise InputError(
            f"--kinds names {len(texts)}; {least} or more are needed, the reference first, such as "
            f"cpu:float32 cpu:bfloat16"
        )
    kinds = tuple(map(_parse_kind, texts))
    names = [each.name for each in kinds]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InputError(
            f"--kinds names {shown(twice)} twice; call one of them otherwise, such as "
            f"other={texts[-1]}"
        )
    return kinds


def _parse_kind(text: str) -> AlignedKind:
    found = _WRITTEN.fullmatch(text)
    if found is None or not found["device"] or "" in (found["name"], found["products"]):
        raise InputError(f"--kinds {shown(text)} is not of the form [NAME=]DEVICE[:DTYPE]")
    name, device, products = found["name"] or text, found["device"], found["products"]
    if device in PLATFORMS:
        return AlignedKind(name, device, products)
    if device not in KINDS:
        what = f"device of --kinds {shown(text)}:"
        raise InputError(unknown_name(what, device, (*PLATFORMS, *KINDS)))
    return AlignedKind(name, KINDS[device].platform, products, KINDS[device])
