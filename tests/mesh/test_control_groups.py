"""Quotas and limits are read as the kernel shows them, in both versions and through containers."""

import math
from pathlib import Path

import pytest

from hetjax.mesh.control_groups import cpu_quota, memory_limit


class Host:
    """A pretended host: hierarchies under `tmp_path`, and the process's own two files."""

    def __init__(self, folder: Path):
        self.folder, self.process = folder, folder / "process"
        self.process.mkdir()
        self.lines: dict[str, list[str]] = {"cgroup": [], "mountinfo": []}
        self._write()

    def mount(self, controllers: str, membership: str, root: str = "/") -> Path:
        """Mounts a hierarchy; of version 2 where `controllers` is empty."""
        number = len(self.lines["cgroup"])
        mount = self.folder / f"mount{number}"
        kind, options = ("cgroup", f"rw,{controllers}") if controllers else ("cgroup2", "rw")
        self.lines["cgroup"].append(f"{number}:{controllers}:{membership}")
        self.lines["mountinfo"].append(
            f"{number} 1 0:1 {root} {mount} rw,nosuid shared:9 - {kind} none {options}"
        )
        self._write()
        return mount

    def _write(self) -> None:
        for name, lines in self.lines.items():
            (self.process / name).write_text("\n".join(lines))


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def write(group: Path, **files: str) -> None:
    group.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (group / name.replace("__", ".")).write_text(f"{text}\n")


def test_without_groups_nothing_is_limited(host: Host):
    assert cpu_quota(host.process) == memory_limit(host.process) == math.inf
    assert cpu_quota(host.folder / "nowhere") == math.inf


def test_the_second_version(host: Host):
    mount = host.mount("", "/lab/a")
    write(mount / "lab/a", cpu__max="50000 100000", memory__max="max")
    write(mount / "lab", cpu__max="max 100000", memory__max="3000000")
    assert cpu_quota(host.process) == 0.5
    assert memory_limit(host.process) == 3e6


def test_the_first_version(host: Host):
    cpu, memory = host.mount("cpu,cpuacct", "/lab/a"), host.mount("memory", "/")
    write(cpu, cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    write(cpu / "lab/a", cpu__cfs_quota_us="150000", cpu__cfs_period_us="100000")
    write(memory, memory__limit_in_bytes="2000000")
    assert cpu_quota(host.process) == 1.5
    assert memory_limit(host.process) == 2e6


def test_a_group_around_limits_too(host: Host):
    mount = host.mount("cpu", "/lab/a")
    write(mount / "lab", cpu__cfs_quota_us="20000", cpu__cfs_period_us="100000")
    write(mount / "lab/a", cpu__cfs_quota_us="90000", cpu__cfs_period_us="100000")
    assert cpu_quota(host.process) == 0.2


@pytest.mark.parametrize(("root", "membership"), [("/docker/1", "/docker/1"), ("/", "/../2")])
def test_in_a_container_the_mount_is_its_own_group(host: Host, root: str, membership: str):
    write(host.mount("cpu", membership, root), cpu__cfs_quota_us="70000", cpu__cfs_period_us="1e5")
    assert cpu_quota(host.process) == 0.7


def test_both_versions_at_once(host: Host):
    host.mount("", "/")
    host.mount("name=systemd", "/")
    mount = host.mount("cpu", "/x")
    write(mount / "x", cpu__cfs_quota_us="50000", cpu__cfs_period_us="100000")
    assert cpu_quota(host.process) == 0.5


@pytest.mark.parametrize("controllers", ["", "cpu"])
def test_a_group_that_cannot_be_seen_is_not_taken_for_none(host: Host, controllers: str):
    host.mount(controllers, "/lab/a")
    (host.process / "mountinfo").unlink()
    assert cpu_quota(host.process) is None
    (host.process / "cgroup").write_text("0::/")
    assert cpu_quota(host.process) == math.inf
