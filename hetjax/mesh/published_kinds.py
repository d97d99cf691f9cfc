"""The device kinds whose figures are published.

The figures are the peaks that makers publish, without sparsity, and for 16-bit types with
accumulation in float32, as training uses it. ``float32`` is the rate at full float32 precision:
TF32 and one-pass bfloat16 products are faster and less exact, and are not counted. A GB is 1e9
bytes. One device is what JAX calls one device, which matters for cards of two dies.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from hetjax.errors import InputError, unknown_name
from hetjax.mesh.kinds import DeviceKind


def kind(name: str) -> DeviceKind:
    """The device kind of a name.

    Args:
        name: one of the names in `KINDS`.

    Returns:
        The kind.

    Raises:
        InputError: no kind has the name; the message holds the nearest one.

    Example:
        >>> kind("T4").memory_bytes
        16000000000
    """
    if name not in KINDS:
        raise InputError(unknown_name("device kind", name, KINDS))
    return KINDS[name]


def _published(
    name: str,
    memory_gb: int,
    bandwidth_gb: float,
    source: str,
    *,
    float32: float,
    float16: float | None = None,
    bfloat16: float | None = None,
    platform: str = "gpu",
    product: tuple[float, str] | None = None,
) -> DeviceKind:
    """A kind from figures as datasheets print them: GB, GB/s and TFLOP/s.

    ``product`` is what a 16-bit product of the best shape was measured to reach, in TFLOP/s, and
    who measured it.
    """
    rates = {"float32": float32, "float16": float16, "bfloat16": bfloat16}
    peak_flops = {dtype: rate * 1e12 for dtype, rate in rates.items() if rate is not None}
    memory_bytes, bandwidth = memory_gb * 10**9, bandwidth_gb * 1e9
    shares: dict[str, float] = {}
    if product is not None:
        halves = [dtype for dtype in ("float16", "bfloat16") if dtype in peak_flops]
        shares = {dtype: round(product[0] * 1e12 / peak_flops[dtype], 3) for dtype in halves}
    return DeviceKind(
        name=name,
        peak_flops=peak_flops,
        memory_bytes=memory_bytes,
        memory_bandwidth=bandwidth,
        source=source,
        platform=platform,
        product_shares=shares,
        product_source=product[1] if product is not None else "",
    )


def _h2_chip(letter: str, memory_gb: int, float16: float, how: str) -> DeviceKind:
    """A chip of the H2 paper, which publishes its memory and, at best, its FP16 rate."""
    source = (
        f"H2 section 2 and table 5, chip {letter}: {memory_gb} GB; FP16 {how}; not published and "
        "assumed: bfloat16 as FP16, float32 a sixteenth of it, memory bandwidth 1555 GB/s "
        "(both as on an A100-40)"
    )
    return _published(
        f"H2-{letter}",
        memory_gb,
        1555,
        source,
        float32=float16 / 16,
        float16=float16,
        bfloat16=float16,
    )


def _mamf(tflops: float, what: str) -> tuple[float, str]:
    """A rate of the table of the largest products that were measured, and its source."""
    source = (
        "S. Bekman, Machine Learning Engineering, 'Maximum Achievable Matmul FLOPS' (BF16, mean "
        f"of 100 products of the best shape): {what}, {tflops:g} TFLOP/s"
    )
    return tflops, source


_A100_PRODUCT = _mamf(271.2, "A100 SXM, torch 2.6.0+cu126")


_H100_PRODUCT = _mamf(794.5, "H100 SXM, of which the table says that an H200 is the same")


_MI300X_PRODUCT = _mamf(668.4, "MI300X, torch 2.5.1, ROCm 6.3")


_NVIDIA = (
    _published(
        "P100", 16, 732, "NVIDIA Tesla P100 SXM2 datasheet; no bfloat16", float32=10.6, float16=21.2
    ),
    _published(
        "V100", 16, 900, "NVIDIA V100 SXM2 datasheet; no bfloat16", float32=15.7, float16=125
    ),
    _published(
        "V100e",
        32,
        900,
        "Harp table 11 (125 TFLOP/s FP16, 32 GB); the rest from the NVIDIA V100 SXM2 datasheet; "
        "no bfloat16",
        float32=15.7,
        float16=125,
    ),
    _published("T4", 16, 300, "NVIDIA T4 datasheet; no bfloat16", float32=8.1, float16=65),
    _published(
        "A100-40",
        40,
        1555,
        "NVIDIA A100 datasheet (40 GB SXM4)",
        float32=19.5,
        float16=312,
        bfloat16=312,
        product=_A100_PRODUCT,
    ),
    _published(
        "A100-80",
        80,
        2039,
        "NVIDIA A100 datasheet (80 GB SXM4)",
        float32=19.5,
        float16=312,
        bfloat16=312,
        product=_A100_PRODUCT,
    ),
    _published(
        "A800",
        80,
        2039,
        "NVIDIA A800 datasheet (80 GB SXM4): an A100-80 with a slower NVLink",
        float32=19.5,
        float16=312,
        bfloat16=312,
    ),
    _published(
        "H100",
        80,
        3350,
        "NVIDIA H100 datasheet (SXM5), dense",
        float32=67,
        float16=989.5,
        bfloat16=989.5,
        product=_H100_PRODUCT,
    ),
    _published(
        "H800",
        80,
        3350,
        "Hetu table 3 (990 TFLOP/s BF16, 80 GB); the rest as the NVIDIA H100 datasheet (SXM5)",
        float32=67,
        float16=990,
        bfloat16=990,
    ),
    _published(
        "H200",
        141,
        4800,
        "NVIDIA H200 datasheet (SXM), dense",
        float32=67,
        float16=989.5,
        bfloat16=989.5,
        product=_H100_PRODUCT,
    ),
    _published(
        "H20",
        96,
        4000,
        "Hetu table 3 (148 TFLOP/s BF16, 96 GB); float32 and bandwidth as reported of the H20",
        float32=44,
        float16=148,
        bfloat16=148,
    ),
    _published(
        "L4", 24, 300, "NVIDIA L4 datasheet, dense", float32=30.3, float16=121, bfloat16=121
    ),
    _published(
        "L40S", 48, 864, "NVIDIA L40S datasheet, dense", float32=91.6, float16=362, bfloat16=362
    ),
    _published(
        "A6000",
        48,
        768,
        "NVIDIA RTX A6000 datasheet; 16 bits as the Ampere GA102 whitepaper has it, dense",
        float32=38.7,
        float16=154.8,
        bfloat16=154.8,
    ),
)


_GEFORCE = (
    _published(
        "RTX2080Ti",
        11,
        616,
        "NVIDIA Turing whitepaper (reference card); no bfloat16",
        float32=13.4,
        float16=53.8,
    ),
    _published(
        "RTX3080",
        10,
        760,
        "NVIDIA Ampere GA102 whitepaper (10 GB card)",
        float32=29.8,
        float16=59.5,
        bfloat16=59.5,
    ),
    _published(
        "RTX3090",
        24,
        936,
        "NVIDIA Ampere GA102 whitepaper",
        float32=35.6,
        float16=71,
        bfloat16=71,
    ),
    _published(
        "RTX4090",
        24,
        1008,
        "NVIDIA Ada whitepaper",
        float32=82.6,
        float16=165.2,
        bfloat16=165.2,
    ),
    _published(
        "RTX5090",
        32,
        1792,
        "NVIDIA RTX Blackwell whitepaper",
        float32=104.8,
        float16=209.5,
        bfloat16=209.5,
    ),
)


_AMD = (
    _published(
        "MI250",
        64,
        1638.4,
        "AMD Instinct MI250 datasheet, halved: JAX sees each of the card's two dies as a device",
        float32=45.25,
        float16=181,
        bfloat16=181,
    ),
    _published(
        "MI300X",
        192,
        5300,
        "AMD Instinct MI300X datasheet, dense",
        float32=163.4,
        float16=1307.4,
        bfloat16=1307.4,
        product=_MI300X_PRODUCT,
    ),
)


# Google publishes the bfloat16 rate only. A float32 product takes six bfloat16 passes there.
_TPU = tuple(
    _published(
        name,
        memory_gb,
        bandwidth_gb,
        f"Google Cloud TPU documentation, {version}; float32: a sixth of bfloat16 (six passes)",
        float32=bfloat16 / 6,
        bfloat16=bfloat16,
        platform="tpu",
    )
    for name, version, memory_gb, bandwidth_gb, bfloat16 in (
        ("TPUv4", "v4", 32, 1200, 275.0),
        ("TPUv5e", "v5e", 16, 819, 197.0),
        ("TPUv5p", "v5p", 95, 2765, 459.0),
        ("TPUv6e", "v6e", 32, 1640, 918.0),
    )
)


_H2 = (
    _h2_chip("A", 96, 182, "182 TFLOP/s (section 2)"),
    _h2_chip("B", 64, 234, "published as 0.5 to 1.0 of an A100's: the middle is taken"),
    _h2_chip("C", 32, 78, "published as 0.0 to 0.5 of an A100's: the middle is taken"),
    _h2_chip(
        "D",
        32,
        512,
        "published as 1.5 to 2.0 of an A100's; section 2 prints 512 TFLOP/s for a 32 GB chip, "
        "which it calls C but which is in D's range alone",
    ),
)


KINDS: Mapping[str, DeviceKind] = MappingProxyType(
    {each.name: each for each in (*_NVIDIA, *_GEFORCE, *_AMD, *_TPU, *_H2)}
)
"""Every device kind with published figures, by name."""
