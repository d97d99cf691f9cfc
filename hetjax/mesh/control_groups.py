"""What Linux's control groups leave to this process: processor time and memory, versions 1 and 2.

A group is limited by itself and by every group around it that can be seen from here.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

_PROCESS = Path("/proc/self")


def cpu_quota(process: Path = _PROCESS) -> float | None:
    """How many processors' time this process may use.

    Args:
        process: the process's folder under ``/proc``.

    Returns:
        Processors, such as 0.5; infinity where nothing limits it; None where it is in a group
        whose limit cannot be seen, as after ``ip netns exec``, which mounts ``/sys`` anew.
    """
    groups = list(_groups("cpu", process))
    if not groups and _membership("cpu", process) not in (None, "/"):
        return None
    return min((_quota_of(group) for group in groups), default=math.inf)


def memory_limit(process: Path = _PROCESS) -> float:
    """How many bytes of memory this process may use.

    Args:
        process: the process's folder under ``/proc``.

    Returns:
        Bytes; infinity where nothing limits it. A limit of version 1 that nobody has set is a
        number larger than any memory.
    """
    files = ("memory.max", "memory.limit_in_bytes")
    groups = _groups("memory", process)
    limits = [_number(text) for group in groups for name in files if (text := _read(group / name))]
    return min(limits, default=math.inf)


def _quota_of(group: Path) -> float:
    """A group's own quota in processors."""
    quota, period = _read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")
    if whole := _read(group / "cpu.max"):
        quota, _, period = whole.partition(" ")
    if not quota or not period or _number(quota) <= 0:
        return math.inf
    return _number(quota) / _number(period)


def _groups(controller: str, process: Path) -> Iterator[Path]:
    """The folders of the groups that hold this process, from its own to the outermost."""
    for mount, root, names in _mounts(process):
        # Version 2 has one hierarchy, whose line names no controller.
        path = _membership(controller if controller in names else "", process)
        if path is None or (names and controller not in names):
            continue
        # In a container the mount may show a part of the hierarchy, and the path the whole of it.
        below = os.path.relpath(path, root)
        group = mount if below.startswith("..") else mount / below
        yield group
        yield from (outer for outer in group.parents if outer.is_relative_to(mount))


def _membership(controller: str, process: Path) -> str | None:
    """The path of this process's group in the hierarchy of a controller, else in version 2's."""
    lines = [line.split(":", 2) for line in _read(process / "cgroup").splitlines()]
    paths = {name: path for _, names, path in lines for name in names.split(",")}
    return paths.get(controller, paths.get(""))


def _mounts(process: Path) -> Iterator[tuple[Path, str, set[str]]]:
    """Where hierarchies are mounted, which part, and of which controllers; version 2 names none."""
    for line in _read(process / "mountinfo").splitlines():
        mounted, _, kind = line.partition(" - ")
        fields, (filesystem, _, options) = mounted.split(), kind.split(" ", 2)
        if filesystem == "cgroup":
            yield Path(fields[4]), fields[3], set(options.split(","))
        elif filesystem == "cgroup2":
            yield Path(fields[4]), fields[3], set()


def _number(text: str) -> float:
    return math.inf if text == "max" else float(text)


def _read(file: Path) -> str:
    """A file's text; none where there is no such file or it may not be read."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""
