"""The device kind of the host's own processor, measured: no datasheet knows what we share it with.

The measurement uses NumPy, so that reading a cluster file neither imports JAX nor fixes how many
devices it has.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable

import numpy as np
import threadpoolctl

from hetjax.errors import InputError
from hetjax.mesh.kinds import DeviceKind

HOST_CPU = "host-cpu"
"""The name of the measured kind."""

_MATRIX_SIZE = 512
_COPY_BYTES = 64 * 10**6


def measure_host_cpu(num_devices: int = 1) -> DeviceKind:
    """The device kind of one of the host devices that share this host's processor.

    The host is measured once in a process, in about a quarter of a second: a float32 matrix
    product on one core and a copy of memory, to two digits. Its speed, that of the core times the
    cores, and its memory are divided evenly.

    Args:
        num_devices: how many host devices share the host, 1 or more.

    Returns:
        A kind named ``"host-cpu"``.

    Raises:
        InputError: `num_devices` is less than 1.

    Example:
        >>> one, two = measure_host_cpu(), measure_host_cpu(num_devices=2)
        >>> one.flops("float32") == 2 * two.flops("float32")
        True
    """
    if num_devices < 1:
        raise InputError(f"num_devices: {num_devices} is not allowed: it must be 1 or more")
    flops, bandwidth = _measured()
    return DeviceKind(
        name=HOST_CPU,
        peak_flops={"float32": flops / num_devices},
        memory_bytes=_host_memory_bytes() // num_devices,
        memory_bandwidth=bandwidth / num_devices,
        source=f"measured on this host, which {num_devices} host device(s) share",
        platform="cpu",
    )


@functools.cache
def _measured() -> tuple[float, float]:
    """FLOP/s of a float32 matrix product and bytes/s of a copy, on the whole host."""
    a = np.ones((_MATRIX_SIZE, _MATRIX_SIZE), np.float32)
    product = np.empty_like(a)
    source = np.ones(_COPY_BYTES, np.uint8)
    target = np.empty_like(source)
    # One thread, times the cores: NumPy's threads wait for each other where the host is busy.
    with threadpoolctl.threadpool_limits(limits=1):
        products = _calls_per_second(lambda: np.matmul(a, a, out=product), seconds=0.15)
    products *= len(os.sched_getaffinity(0))
    copies = _calls_per_second(lambda: np.copyto(target, source), seconds=0.08)
    # A copy reads every byte and writes it.
    return _two_digits(2 * _MATRIX_SIZE**3 * products), _two_digits(2 * _COPY_BYTES * copies)


def _calls_per_second(call: Callable[[], object], seconds: float) -> float:
    call()  # The first call pays for page faults and for starting threads.
    calls, start = 0, time.perf_counter()
    # The mean of a stretch, not the best call: where a quota holds the process to part of a
    # core, a single call that falls between two pauses runs at the speed of a whole one.
    while (elapsed := time.perf_counter() - start) < seconds or calls == 0:
        call()
        calls += 1
    return calls / elapsed


def _two_digits(figure: float) -> float:
    """Rounds to two digits, which is as much as a measurement of a shared machine is worth."""
    return float(f"{figure:.1e}")


def _host_memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
