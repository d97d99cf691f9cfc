"""The CPU cgroup of each host: its quota, and which processes are its own."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hetjax.errors import InputError
from lab import names
from lab.system import LabError, wait_until

PERIOD_SECONDS = 0.01
"""How often a host gets its quota: short beside an operation of a pipeline."""

WEIGHT = 100
"""How many times as much as another process a host gets of a core that both want, up to its quota:
what else the machine does should not change a host's speed."""

REMOVE_SECONDS = 10.0
"""How long killed processes may take to be gone."""


@dataclass(frozen=True)
class CpuGroups:
    """Where the kernel keeps the cgroups that limit the processor.

    Args:
        root: the folder under which a group is a folder.
        version: 1 or 2.
    """

    root: Path
    version: int

    def create(self, name: str) -> None:
        """Make a group without a limit that goes before others, if there is none of this name."""
        if self.version == 2:
            self._delegate()
        try:
            (self.root / name).mkdir(exist_ok=True)
        except OSError as error:
            raise InputError(f"the cgroup {self.root / name} cannot be made: {error}") from None
        file, usual = ("cpu.weight", 100) if self.version == 2 else ("cpu.shares", 1024)
        (self.root / name / file).write_text(str(WEIGHT * usual))

    def _delegate(self) -> None:
        """Let groups under the root have a CPU limit."""
        control = self.root / "cgroup.subtree_control"
        if "cpu" in control.read_text().split():
            return
        try:
            control.write_text("+cpu")
        except OSError as error:
            raise InputError(
                f"the cgroups under {self.root} cannot have a CPU limit: {error}"
            ) from None

    def set_quota(self, name: str, cores: float | None) -> None:
        """Limit how much of the processor a group has.

        Args:
            name: the group.
            cores: the number of cores, e.g. 0.5; None for no limit.
        """
        period = round(1e6 * PERIOD_SECONDS)
        quota = None if cores is None else round(period * cores)
        folder = self.root / name
        if self.version == 2:
            (folder / "cpu.max").write_text(f"{quota or 'max'} {period}")
            return
        (folder / "cpu.cfs_period_us").write_text(str(period))
        (folder / "cpu.cfs_quota_us").write_text(str(quota or -1))

    def quota(self, name: str) -> float | None:
        """How many cores a group has; None for no limit."""
        folder = self.root / name
        if self.version == 2:
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu.cfs_period_us").read_text()
        return None if quota in ("max", "-1") else int(quota) / int(period)

    def entry(self, name: str) -> Path:
        """The file to which a process that enters a group writes ``0``."""
        return self.root / name / "cgroup.procs"

    def processes(self, name: str) -> list[int]:
        """The processes of a group, other than this one."""
        try:
            found = self.entry(name).read_text().split()
        except OSError:  # The group is gone.
            return []
        return [int(number) for number in found if int(number) != os.getpid()]

    def groups(self, lab: str) -> list[str]:
        """The groups of a lab that there are."""
        return names.groups_of(lab, self.all_groups())

    def all_groups(self) -> list[str]:
        """All groups under the root."""
        return [path.name for path in self.root.iterdir() if path.is_dir()]

    def remove(self, lab: str) -> None:
        """Remove all groups of a lab, whose processes have been killed.

        Raises:
            LabError: one cannot be removed.
        """
        # A lab that has lived too long is taken down by a process of its own.
        if any(str(os.getpid()) in self.entry(n).read_text().split() for n in self.groups(lab)):
            (self.root / "cgroup.procs").write_text("0")
        for name in self.groups(lab):
            if not wait_until(lambda folder=self.root / name: removed(folder), REMOVE_SECONDS):
                raise LabError(f"the cgroup {name} cannot be removed: it has processes")


def find_cpu_groups(mounts: str | None = None) -> CpuGroups:
    """Find the kernel's CPU cgroups.

    Args:
        mounts: the table of mounts; the kernel's unless given.

    Returns:
        Where they are.

    Raises:
        InputError: there are none.

    Example:
        >>> find_cpu_groups("cgroup /sys/fs/cgroup/cpu cgroup rw,cpu 0 0")
        CpuGroups(root=PosixPath('/sys/fs/cgroup/cpu'), version=1)
    """
    text = Path("/proc/self/mounts").read_text() if mounts is None else mounts
    unified = None
    for line in text.splitlines():
        _, place, kind, options, *_ = line.split()
        if kind == "cgroup" and "cpu" in options.split(","):
            return CpuGroups(Path(place), 1)
        if kind == "cgroup2":
            unified = CpuGroups(Path(place), 2)
    if unified is None:
        raise InputError("no cgroups with a CPU quota are mounted on this machine")
    return unified


def send_signal(processes: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to processes; those that are gone already do not matter."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)


def removed(folder: Path) -> bool:
    """Remove the folder of a group; whether it is gone, as it is where it has no processes.

    Args:
        folder: the group's.
    """
    with contextlib.suppress(FileNotFoundError):
        try:
            folder.rmdir()
        except OSError:
            return False
    return True
