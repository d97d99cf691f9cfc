"""The memory cgroup of a host whose memory is limited: its limit, and the most that it has had."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from hetjax.errors import InputError
from lab import names
from lab.cgroups import REMOVE_SECONDS, removed
from lab.system import LabError, wait_until


@dataclass(frozen=True)
class MemoryGroups:
    """Where the kernel keeps the cgroups that limit memory.

    Args:
        root: the folder under which a group is a folder.
        version: 1 or 2; of version 2 they are those that limit the processor.
    """

    root: Path
    version: int

    def create(self, name: str, limit: float) -> None:
        """Make a group with a limit, if there is none of this name, or set the limit of one.

        Args:
            name: the group.
            limit: bytes that its processes may have together; a process is killed where they want
                more.
        """
        folder = self.root / name
        file = "memory.max" if self.version == 2 else "memory.limit_in_bytes"
        try:
            if self.version == 2:
                control = self.root / "cgroup.subtree_control"
                if "memory" not in control.read_text().split():
                    control.write_text("+memory")
            folder.mkdir(exist_ok=True)
            (folder / file).write_text(str(round(limit)))
        except OSError as error:
            raise InputError(f"the cgroup {folder} cannot limit memory: {error}") from None
        # What does not fit into memory shall not go to a disk; a machine without swap has no such.
        with contextlib.suppress(OSError):
            if self.version == 2:
                (folder / "memory.swap.max").write_text("0")
            else:
                (folder / "memory.swappiness").write_text("0")

    def most_used(self, name: str) -> int:
        """The most bytes that a group has had, of its processes and of files that it read."""
        file = "memory.peak" if self.version == 2 else "memory.max_usage_in_bytes"
        return int((self.root / name / file).read_text())

    def entry(self, name: str) -> Path:
        """The file to which a process that enters a group writes ``0``."""
        return self.root / name / "cgroup.procs"

    def remove(self, lab: str) -> None:
        """Remove all groups of a lab, whose processes have been killed.

        Raises:
            LabError: one cannot be removed.
        """
        folders = [path.name for path in self.root.iterdir() if path.is_dir()]
        for name in names.groups_of(lab, folders):
            if not wait_until(lambda folder=self.root / name: removed(folder), REMOVE_SECONDS):
                raise LabError(f"the cgroup {name} cannot be removed: it has processes")


def find_memory_groups(mounts: str | None = None) -> MemoryGroups | None:
    """Find the kernel's memory cgroups.

    Args:
        mounts: the table of mounts; the kernel's unless given.

    Returns:
        Where they are; None where there are none.

    Example:
        >>> find_memory_groups("cgroup /sys/fs/cgroup/memory cgroup rw,memory 0 0")
        MemoryGroups(root=PosixPath('/sys/fs/cgroup/memory'), version=1)
    """
    text = Path("/proc/self/mounts").read_text() if mounts is None else mounts
    unified = None
    for line in text.splitlines():
        _, place, kind, options, *_ = line.split()
        if kind == "cgroup" and "memory" in options.split(","):
            return MemoryGroups(Path(place), 1)
        if kind == "cgroup2" and _has_memory(Path(place)):
            unified = MemoryGroups(Path(place), 2)
    return unified


def memory_groups() -> MemoryGroups:
    """The kernel's memory cgroups.

    Raises:
        InputError: there are none.
    """
    found = find_memory_groups()
    if found is None:
        raise InputError("no cgroups with a memory limit are mounted on this machine")
    return found


def _has_memory(root: Path) -> bool:
    with contextlib.suppress(OSError):
        return "memory" in (root / "cgroup.controllers").read_text().split()
    return False
