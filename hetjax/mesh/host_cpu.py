"""The device kind of a host's own processor, measured: no datasheet knows what we share it with.

The measurement uses NumPy, so that reading a cluster file neither imports JAX nor fixes how many
devices it has.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import threadpoolctl

from hetjax.errors import InputError
from hetjax.mesh.control_groups import cpu_quota, memory_limit
from hetjax.mesh.kinds import DeviceKind

HOST_DEVICES = "--xla_force_host_platform_device_count"
"""XLA's flag for how many devices a host's processor plays."""

HOST_CPU = "host-cpu"
"""The name of the measured kind."""

_MATRIX_SIZE = 512
_COPY_BYTES = 64 * 10**6
_PATIENCE = 10
"""How many times its seconds of processor time a measurement may take."""

_PERIODS = 0.5
"""Seconds in which processor time is counted: whole periods of a quota, of 0.1 s unless set."""

_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class HostCpu:
    """What a process gets of the processor that it runs on.

    Args:
        machine: tells machines apart; processes on one share its cores.
        cores: the numbers of the cores that it may run on.
        quota: how many cores' time it may use of them; infinity for all.
        core_flops: FLOP/s of a float32 matrix product on one core.
        copy_bandwidth: bytes/s of a copy in memory, read and written, by one core.
        memory_bytes: bytes of memory that it may use.
    """

    machine: str
    cores: tuple[int, ...]
    quota: float
    core_flops: float
    copy_bandwidth: float
    memory_bytes: int

    def kind(
        self, name: str, source: str, *, cores: float | None = None, sharing: int = 1
    ) -> DeviceKind:
        """This processor as a device kind.

        Args:
            name: the kind's name.
            source: where its figures come from.
            cores: how many cores' time its own cores give, where others share them; None for all.
            sharing: among how many its memory is divided.

        Returns:
            The kind. More cores compute faster, and less than one also copies slower.
        """
        usable = min(len(self.cores) if cores is None else cores, self.quota)
        return DeviceKind(
            name=name,
            peak_flops={"float32": _three_digits(self.core_flops * usable)},
            memory_bytes=self.memory_bytes // sharing,
            memory_bandwidth=_three_digits(self.copy_bandwidth * min(1.0, usable)),
            source=source,
            platform="cpu",
        )


def measure_host() -> HostCpu:
    """Measures this host as this process sees it.

    The speed is measured once in a process, in about a quarter of a second of processor time: a
    float32 matrix product and a copy of memory, each on one core. Cores, quota and memory are what
    the process is allowed now; a quota that cannot be seen is measured too.

    Returns:
        The measurement.
    """
    flops, bandwidth = _core_speed()
    cores, quota = tuple(sorted(os.sched_getaffinity(0))), cpu_quota()
    return HostCpu(
        machine=machine_name(),
        cores=cores,
        quota=_busy_cores(len(cores)) if quota is None else quota,
        core_flops=flops,
        copy_bandwidth=bandwidth,
        memory_bytes=host_memory_bytes(),
    )


def usable_cores() -> float:
    """How many cores' time this process may use, as far as affinity and control groups say.

    Example:
        >>> usable_cores() > 0
        True
    """
    cores, quota = len(os.sched_getaffinity(0)), cpu_quota()
    return float(cores) if quota is None else min(cores, quota)


def host_memory_bytes() -> int:
    """Bytes of memory that this process may use, by its host and by its control groups.

    Example:
        >>> host_memory_bytes() > 10**8
        True
    """
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(min(pages, memory_limit()))


def measure_host_cpu(num_devices: int = 1) -> DeviceKind:
    """The device kind of one of the host devices that share what this process gets of its host.

    Its speed, that of a core times the cores that this process may use (by affinity and by the
    quotas of control groups), and its memory are divided evenly. See `measure_host`.

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
    source = f"measured on this host, which {num_devices} host device(s) share"
    whole = measure_host().kind(HOST_CPU, source)
    return DeviceKind(
        name=HOST_CPU,
        peak_flops={"float32": whole.flops("float32") / num_devices},
        memory_bytes=whole.memory_bytes // num_devices,
        memory_bandwidth=whole.memory_bandwidth / num_devices,
        source=source,
        platform="cpu",
    )


def machine_name() -> str:
    """What tells this machine from others: the number of its boot, the same in all its namespaces.

    Example:
        >>> machine_name() == machine_name()
        True
    """
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return os.uname().nodename


@functools.cache
def _core_speed() -> tuple[float, float]:
    """FLOP/s of a float32 matrix product and bytes/s of a copy, on one core."""
    a = np.ones((_MATRIX_SIZE, _MATRIX_SIZE), np.float32)
    product = np.empty_like(a)
    source = np.ones(_COPY_BYTES, np.uint8)
    target = np.empty_like(source)
    # One thread: NumPy's threads wait for each other where the host is busy.
    with threadpoolctl.threadpool_limits(limits=1):
        products = _calls_per_second(lambda: np.matmul(a, a, out=product), seconds=0.15)
    copies = _calls_per_second(lambda: np.copyto(target, source), seconds=0.08)
    # A copy reads every byte and writes it.
    return 2 * _MATRIX_SIZE**3 * products, 2 * _COPY_BYTES * copies


@functools.cache
def _busy_cores(num_threads: int) -> float:
    """How many cores' time so many busy threads get."""
    done = threading.Event()

    def work() -> None:
        a = np.ones((_MATRIX_SIZE, _MATRIX_SIZE), np.float32)
        while not done.is_set():
            np.matmul(a, a)

    def work_for(seconds: float) -> float:
        a = np.ones((_MATRIX_SIZE, _MATRIX_SIZE), np.float32)
        start, used = time.monotonic(), time.process_time()
        while (elapsed := time.monotonic() - start) < seconds:
            np.matmul(a, a)
        return (time.process_time() - used) / elapsed

    others = [threading.Thread(target=work) for _ in range(num_threads - 1)]
    with threadpoolctl.threadpool_limits(limits=1):
        for thread in others:
            thread.start()
        work_for(_PERIODS / 2)  # What was saved up while the process was idle is spent first.
        busy = work_for(_PERIODS)
        done.set()
        for thread in others:
            thread.join()
    return busy


def _calls_per_second(call: Callable[[], object], seconds: float) -> float:
    """Calls per second of processor time, which stands still while others have the core."""
    call()  # The first call pays for page faults and for starting threads.
    calls, start, end = 0, time.thread_time(), time.monotonic() + _PATIENCE * seconds
    while (used := time.thread_time() - start) < seconds and (time.monotonic() < end or not calls):
        call()
        calls += 1
    return calls / used


def _three_digits(figure: float) -> float:
    """Rounds to three digits, more than a measurement of a shared machine is worth."""
    return float(f"{figure:.2e}")
