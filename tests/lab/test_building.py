"""What the lab would do to the machine, without doing it."""

import doctest
import importlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from lab import commands, hosts, names, network, nodes, read_specification, system
from lab.cgroups import CpuGroups, find_cpu_groups
from lab.memory_groups import MemoryGroups, find_memory_groups

from hetjax.errors import InputError

MODULES = """
    building cgroups hosts lab memory_groups names network nodes specification state system
""".split()
TWO = read_specification("two_hosts")


@pytest.mark.parametrize("module", MODULES)
def test_examples(module):
    assert doctest.testmod(importlib.import_module(f"lab.{module}")).failed == 0


def test_addresses_are_of_one_subnet_that_has_no_way_out():
    addresses = [names.address(TWO, host.name) for host in TWO.hosts]
    assert addresses == ["10.77.0.1", "10.77.0.2"]
    assert names.ray_address(TWO) == "10.77.0.1:6379"


def test_names_tell_the_lab():
    everything = ["hetlab-two-a", "hetlab-two_more-a", "hetlab-two-b", "docker0", "hetlab-two"]
    assert names.groups_of("two", everything) == ["hetlab-two-a", "hetlab-two-b"]


def test_interfaces_have_names_that_linux_allows():
    assert all(len(names.interface(node)) <= 15 for node in ["a", "a23456789"])


@pytest.mark.parametrize(("rate", "burst"), [(1.25e6, 16384), (25e6, 50_000), (125e6, 250_000)])
def test_what_a_link_lets_through_at_once_is_little_of_its_rate(rate, burst):
    end = network.LinkEnd("space", "to-b")
    [command] = network.rate_commands(end, rate, limited=True)
    assert command[:3] == ["tc", "-n", "space"]
    assert command[-6:] == ["rate", f"{8 * rate:.0f}bit", "burst", str(burst), "latency", "50ms"]


def test_a_limit_is_taken_away_where_there_is_one():
    end = network.LinkEnd("space", "to-b")
    assert network.rate_commands(end, None, limited=False) == []
    [command] = network.rate_commands(end, None, limited=True)
    assert " ".join(command) == "tc -n space qdisc del dev to-b root"


def test_ray_nodes():
    head, other = (nodes.start_command(TWO, host) for host in TWO.hosts)
    assert {"--head", "--port=6379", "--node-ip-address=10.77.0.1"} < set(head)
    assert {"--address=10.77.0.1:6379", "--node-ip-address=10.77.0.2"} < set(other)
    assert '--resources={"host:b": 1000}' in other
    assert "--temp-dir=/run/hetlab/two_hosts/b" in other


def test_environment_has_the_labs_cluster_and_no_other(monkeypatch):
    monkeypatch.setenv("RAY_NAMESPACE", "elsewhere")
    monkeypatch.setenv("https_proxy", "http://elsewhere")
    monkeypatch.setenv("EDITOR", "ed")
    found = nodes.environment(TWO)
    assert found["RAY_ADDRESS"] == "10.77.0.1:6379"
    assert found["RAY_AUTH_MODE"] == "token"
    assert found["EDITOR"] == "ed"
    assert not {"RAY_NAMESPACE", "https_proxy"} & set(found)
    assert "RAY_ADDRESS" not in nodes.start_environment(TWO)


def test_token(monkeypatch, tmp_path):
    monkeypatch.setattr(names, "STATE", tmp_path)
    (tmp_path / "two").mkdir()
    nodes.make_token("two")
    token = tmp_path / "two" / "token"
    assert token.stat().st_mode & 0o777 == 0o600
    assert len(text := token.read_text()) == 64
    nodes.make_token("two")
    assert token.read_text() == text


def cgroup_folder(root: Path, version: int, subtree: str = "") -> CpuGroups:
    (root / "hetlab-two-a").mkdir()
    if version == 2:
        (root / "cgroup.subtree_control").write_text(subtree)
    return CpuGroups(root, version)


def test_quota_version_1(tmp_path):
    groups = cgroup_folder(tmp_path, 1)
    groups.create("hetlab-two-a")
    assert (tmp_path / "hetlab-two-a" / "cpu.shares").read_text() == "102400"
    groups.set_quota("hetlab-two-a", 0.5)
    assert (tmp_path / "hetlab-two-a" / "cpu.cfs_quota_us").read_text() == "5000"
    assert (tmp_path / "hetlab-two-a" / "cpu.cfs_period_us").read_text() == "10000"
    assert groups.quota("hetlab-two-a") == 0.5
    groups.set_quota("hetlab-two-a", None)
    assert groups.quota("hetlab-two-a") is None


def test_quota_version_2(tmp_path):
    groups = cgroup_folder(tmp_path, 2)
    groups.create("hetlab-two-a")
    assert (tmp_path / "cgroup.subtree_control").read_text() == "+cpu"
    assert (tmp_path / "hetlab-two-a" / "cpu.weight").read_text() == "10000"
    groups.set_quota("hetlab-two-a", 1.5)
    assert (tmp_path / "hetlab-two-a" / "cpu.max").read_text() == "15000 10000"
    assert groups.quota("hetlab-two-a") == 1.5
    groups.set_quota("hetlab-two-a", None)
    assert (tmp_path / "hetlab-two-a" / "cpu.max").read_text() == "max 10000"
    assert groups.quota("hetlab-two-a") is None


@pytest.mark.parametrize("version", [1, 2])
def test_memory_of_a_host(tmp_path, version):
    (tmp_path / "cgroup.subtree_control").write_text("cpu")
    groups = MemoryGroups(tmp_path, version)
    groups.create("hetlab-two-b", 2e9)
    limit, most = {
        1: ("memory.limit_in_bytes", "memory.max_usage_in_bytes"),
        2: ("memory.max", "memory.peak"),
    }[version]
    folder = tmp_path / "hetlab-two-b"
    assert (folder / limit).read_text() == "2000000000"
    assert ("+memory" in (tmp_path / "cgroup.subtree_control").read_text()) == (version == 2)
    (folder / most).write_text("7")
    assert groups.most_used("hetlab-two-b") == 7
    assert groups.entry("hetlab-two-b") == folder / "cgroup.procs"
    with pytest.raises(InputError, match="cannot limit memory"):
        groups.create("no/such", 1e9)


def test_where_the_memory_groups_are(tmp_path):
    (tmp_path / "cgroup.controllers").write_text("cpu memory")
    unified = f"cgroup2 {tmp_path} cgroup2 rw 0 0\n"
    assert find_memory_groups(unified) == MemoryGroups(tmp_path, 2)
    first = f"{unified}cgroup /one/memory cgroup rw,memory 0 0\n"
    assert find_memory_groups(first) == MemoryGroups(Path("/one/memory"), 1)
    (tmp_path / "cgroup.controllers").write_text("cpu")
    assert find_memory_groups(unified) is None


def test_groups_of_a_lab(tmp_path):
    groups = cgroup_folder(tmp_path, 1)
    (tmp_path / "other").mkdir()
    assert groups.groups("two") == ["hetlab-two-a"]
    assert groups.processes("hetlab-two-a") == []
    groups.entry("hetlab-two-a").write_text(f"7\n{os.getpid()}\n")
    assert groups.processes("hetlab-two-a") == [7]


def test_where_the_groups_are():
    both = "cgroup2 /two cgroup2 rw 0 0\ncgroup /one/cpu cgroup rw,cpu,cpuacct 0 0\n"
    assert find_cpu_groups(both) == CpuGroups(Path("/one/cpu"), 1)
    assert find_cpu_groups("none /two cgroup2 rw 0 0") == CpuGroups(Path("/two"), 2)
    with pytest.raises(InputError, match="no cgroups with a CPU quota"):
        find_cpu_groups("proc /proc proc rw 0 0")


def test_a_process_enters_a_host_and_is_the_command():
    groups = CpuGroups(Path("/groups"), 1)
    command = hosts.enter_command(groups, "two_hosts", TWO.hosts[1], ["true", "a b"])
    assert command[:2] == ["sh", "-c"]
    assert command[3:] == [
        "/groups/hetlab-two_hosts-b/cgroup.procs", "1", "/var/run/netns/hetlab-two_hosts-b",
        "true", "a b",
    ]  # fmt: skip


def test_a_process_enters_the_memory_group_of_a_host_too(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hosts, "memory_groups", lambda: MemoryGroups(Path("/memory"), 1))
    host = TWO.hosts[1].model_copy(update={"memory": 1e9})
    command = hosts.enter_command(CpuGroups(Path("/groups"), 1), "two_hosts", host, ["true"])
    groups = [f"/{root}/hetlab-two_hosts-b/cgroup.procs" for root in ("groups", "memory")]
    assert command[3] == " ".join(groups)
    assert command[2].count("exec") == 1


def test_states_of_processes():
    assert hosts.state(os.getpid()) == "R"
    assert hosts.program(os.getpid()) == Path(sys.orig_argv[0]).name
    with subprocess.Popen(["sleep", "60"]) as process:
        process.send_signal(signal.SIGSTOP)
        assert system.wait_until(lambda: hosts.state(process.pid) == "T", 10)
        process.kill()
        assert system.wait_until(lambda: hosts.state(process.pid) == "Z", 10)
    assert hosts.state(process.pid) is None
    assert hosts.program(process.pid) == ""


def test_a_command_that_takes_too_long_or_fails_is_an_error():
    with pytest.raises(system.LabError, match=r"`sleep 60` did not end within 0.1 s"):
        system.run_command(["sleep", "60"], deadline=0.1)
    with pytest.raises(system.LabError, match=r"`ls /no/where` failed with 2: .*No such file"):
        system.run_command(["ls", "/no/where"])


def test_one_at_a_time():
    with system.only_one("hetlab-test"):
        with (
            pytest.raises(system.LabError, match="changing 'hetlab-test' for 0 s"),
            system.only_one("hetlab-test", deadline=0),
        ):
            pass
        with system.only_one("hetlab-other", deadline=0):
            pass
    with system.only_one("hetlab-test", deadline=0):
        pass


def test_interrupts_wait():
    done = []

    def interrupted():
        with system.uninterrupted():
            signal.raise_signal(signal.SIGINT)
            done.append(True)

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert done


def outcome(capsys, *arguments):
    before = signal.getsignal(signal.SIGTERM)
    try:
        code = commands.main(arguments)
    finally:
        signal.signal(signal.SIGTERM, before)
    return code, capsys.readouterr().err


def test_refused_without_root(monkeypatch, capsys):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    code, error = outcome(capsys, "up", "two_hosts")
    assert code == 2
    assert error == "error: the lab makes network namespaces and cgroups, and only root may\n"


@pytest.mark.parametrize("tool", ["ip", "tc"])
def test_refused_without_tools(monkeypatch, capsys, tool):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(system, "_CAPABILITIES", {})
    monkeypatch.setattr(system.shutil, "which", lambda name: None if name == tool else "/bin/it")
    code, error = outcome(capsys, "up", "two_hosts")
    assert code == 2
    assert f"the command '{tool}' is missing; install the package iproute2" in error


def test_refused_where_root_may_not(monkeypatch, capsys):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(system, "_CAPABILITIES", {"CAP_NONE": 63})
    code, error = outcome(capsys, "up", "two_hosts")
    assert code == 2
    assert "CAP_NONE is missing" in error


def test_cores_that_are_not_there():
    with pytest.raises(InputError, match=r"hosts\[0\].cores: 4096 is no core of this machine"):
        system.check_cores([4096], "hosts[0].cores")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fly"], "invalid choice: 'fly'"),
        (["up", "two_hosts", "--hours", "0"], "--hours: 0 is not allowed"),
        (["up", "two_hosts", "--hour", "1"], "unrecognized arguments: --hour 1"),
        (["up", "one_host"], "unknown lab 'one_host'; did you mean 'two_hosts'"),
    ],
)
def test_wrong_commands(capsys, arguments, message):
    code, error = outcome(capsys, *arguments)
    assert code == 2
    assert message in error
