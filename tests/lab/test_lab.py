"""Real labs. Each test leaves the machine as it found it."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest
from lab import Lab, names
from lab.building import take_down
from lab.system import wait_until
from labs import MARKS, NOTHING, SCRIPT, command, named_lab, rays_processes, traces

from hetjax.errors import InputError

SPECIFICATION = named_lab("two_hosts")

pytestmark = MARKS

WHERE = """
import json, ray
ray.init(log_to_driver=False, logging_level="ERROR")

@ray.remote
def where():
    local = open("/proc/self/net/fib_trie").read()
    return ray.util.get_node_ip_address(), local.count("10.77.0.1\\n")

alive = [node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]]
found = [where.options(resources={f"host:{host}": 1}).remote() for host in "ab"]
print(json.dumps([sorted(alive), ray.get(found, timeout=60)]))
"""
RECEIVE = """
import socket, time
server = socket.create_server(("10.77.0.2", 5001))
print("ready", flush=True)
connection, _ = server.accept()
connection.recv(1)
start, count = time.perf_counter(), 0
while part := connection.recv(1 << 16):
    count += len(part)
print(count / (time.perf_counter() - start))
"""
SEND = """
import socket, sys
with socket.create_connection(("10.77.0.2", 5001), timeout=30) as connection:
    connection.sendall(bytes(int(sys.argv[1])))
"""
USE = """
import time
start, used = time.perf_counter(), time.process_time()
while time.perf_counter() - start < 1.0:
    pass
print((time.process_time() - used) / (time.perf_counter() - start))
"""


def python(lab, host, program, *arguments):
    command = [sys.executable, "-c", program, *arguments]
    done = lab.run(host, command, timeout=120, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def throughput(lab, size):
    """Bytes per second of a transfer from a to b."""
    receive = [sys.executable, "-c", RECEIVE]
    with lab.start("b", receive, stdout=subprocess.PIPE, text=True) as receiver:
        assert receiver.stdout.readline() == "ready\n"
        python(lab, "a", SEND, str(size))
        return float(receiver.communicate(timeout=60)[0])


@pytest.fixture(scope="module")
def lab():
    with Lab.up(SPECIFICATION, lifetime=1200) as lab:
        yield lab
    assert traces() == NOTHING


@pytest.fixture(autouse=True)
def as_specified(request):
    """After every test the shared lab is as its specification says."""
    yield
    if "lab" in request.fixturenames:
        Lab.up(SPECIFICATION, lifetime=1200)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "test_lab.yaml"
    path.write_text(SPECIFICATION.model_dump_json())
    return path


def states(lab):
    return [host.ray for host in lab.host_status()]


def test_hosts_have_addresses_of_their_own_and_no_way_out(lab):
    shown = [lab.run(host, ["ip", "-4", "-o", "addr"], timeout=10, capture_output=True, text=True)
             for host in "ab"]  # fmt: skip
    assert "10.77.0.1/24" in shown[0].stdout
    assert "10.77.0.2/24" not in shown[0].stdout
    assert "10.77.0.2/24" in shown[1].stdout
    for host in "ab":
        routes = lab.run(host, ["ip", "route"], timeout=10, capture_output=True, text=True).stdout
        assert [line.split()[0] for line in routes.splitlines()] == ["10.77.0.0/24"]
    assert "to-b" not in subprocess.run(["ip", "link"], capture_output=True, text=True).stdout


@pytest.mark.ray
def test_a_ray_job_spans_the_hosts(lab):
    alive, found = json.loads(python(lab, "a", WHERE))
    assert alive == ["10.77.0.1", "10.77.0.2"]
    assert [address for address, _ in found] == alive
    assert [own_namespace > 0 for _, own_namespace in found] == [True, False]


def test_ray_wants_the_token(lab):
    environment = {**lab.environment(), "RAY_AUTH_MODE": "disabled"}
    words = [sys.executable, "-c", "import ray; ray.init()"]
    with lab.start("a", words, env=environment, stderr=subprocess.PIPE, text=True) as process:
        # Ray goes on asking for long.
        refused = any("authentication" in line.lower() for line in process.stderr)
        process.kill()
    assert refused


def test_links_have_the_rate_that_is_set(lab):
    # A frame of 1514 bytes carries 1448.
    assert throughput(lab, 25_000_000) == pytest.approx(0.956 * 25e6, rel=0.15)
    lab.set_link("b-a", "40mbit")
    assert [link.rate for link in lab.link_status()] == [5e6]
    assert throughput(lab, 5_000_000) == pytest.approx(0.956 * 5e6, rel=0.15)
    lab.set_link("a-b", "unlimited")
    assert throughput(lab, 100_000_000) > 3 * 25e6
    with pytest.raises(InputError, match="unknown link 'a-c'"):
        lab.set_link("a-c", "40mbit")


def test_hosts_have_the_speed_that_is_set(lab):
    def used() -> float:
        return median(float(python(lab, "b", USE)) for _ in range(3))

    whole = used()
    lab.set_speed("b", 0.3)
    assert [host.speed for host in lab.host_status()] == [1.0, 0.3]
    assert used() < min(0.36, 0.7 * whole)
    for host, core in (("a", 0), ("b", 1)):
        assert eval(python(lab, host, "import os; print(os.sched_getaffinity(0))")) == {core}


def test_a_second_up_changes_nothing_and_resets_what_was_set(lab, file):
    before = [(link.rate, link.connected) for link in lab.link_status()]
    raylets = rays_processes()
    lab.set_link("a-b", "10mbit")
    lab.set_speed("a", 0.5)
    done = command("up", file, "--hours", "0.3")
    assert done.returncode == 0, done.stderr
    assert [(link.rate, link.connected) for link in lab.link_status()] == before
    assert [host.speed for host in lab.host_status()] == [1.0, 1.0]
    assert set(raylets) <= set(rays_processes())


def test_another_lab_of_the_name_is_refused(lab):
    three = named_lab("three_hosts")
    with pytest.raises(InputError, match="is up with other hosts or links"):
        Lab.up(three)
    assert states(lab) == ["up", "up"]


def test_commands_end_as_what_they_run(lab):
    assert command("run", "--lab", "test_lab", "b", "--", "sh", "-c", "exit 7").returncode == 7
    words = [sys.executable, str(SCRIPT), "run", "--lab", "test_lab", "b", "sh", "-c",
             "trap 'exit 9' TERM; echo ready; while true; do sleep 0.1; done"]  # fmt: skip
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        assert process.wait(timeout=30) == 9
    wrong = command("run", "--lab", "test_lab", "q", "true")
    assert (wrong.returncode, wrong.stderr) == (2, "error: unknown host 'q'. Allowed: a, b\n")
    shown = command("status", "--lab", "test_lab").stdout
    assert re.search(r"^b +10.77.0.2 +1 +1.00 +\d+  up$", shown, re.MULTILINE)
    assert re.search(r"^a-b +200 Mbit/s$", shown, re.MULTILINE)


@pytest.mark.ray
def test_a_killed_host_comes_back(lab):
    lab.kill("b")
    assert states(lab) == ["up", "down"]
    Lab.up(SPECIFICATION)
    assert states(lab) == ["up", "up"]
    lab.kill("a")
    Lab.up(SPECIFICATION)
    alive, _ = json.loads(python(lab, "a", WHERE))
    assert alive == ["10.77.0.1", "10.77.0.2"]


def test_a_stopped_host_stands_still_and_goes_on(lab):
    with lab.start("b", ["sh", "-c", "while true; do sleep 0.05; done"]) as process:
        lab.stop("b")
        assert states(lab) == ["up", "stopped"]
        lab.resume("b")
        assert states(lab) == ["up", "up"]
        assert process.poll() is None
        lab.kill("b")
        assert process.wait(timeout=10) == -signal.SIGKILL


def test_a_link_is_cut_and_mended(lab):
    connect = "import socket; socket.create_connection(('10.77.0.2', 5001), timeout=1)"
    words = [sys.executable, "-c", connect]
    lab.cut("a-b")
    assert [link.connected for link in lab.link_status()] == [False]
    cut = lab.run("a", words, timeout=30, capture_output=True, text=True)
    assert "timed out" in cut.stderr or "unreachable" in cut.stderr or "No route" in cut.stderr
    lab.mend("a-b")
    mended = lab.run("a", words, timeout=30, capture_output=True, text=True)
    assert "refused" in mended.stderr
    assert throughput(lab, 5_000_000) < 25e6


# Labs of their own. The shared one is down when these run: they have its name.

MOMENTS = {
    "a namespace is there": lambda: bool(traces()["namespaces"]),
    "Ray starts": lambda: any(
        "raylet" in Path(f"/proc/{p}/comm").read_text() for p in rays_processes()
    ),
}


@pytest.fixture
def nothing_left():
    take_down("test_lab")
    yield
    assert traces() == NOTHING


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.usefixtures("nothing_left")
def test_an_interrupted_up_leaves_nothing(file, moment, number, code):
    with subprocess.Popen([sys.executable, str(SCRIPT), "up", str(file)]) as process:
        assert wait_until(MOMENTS[moment], 30)
        process.send_signal(number)
        assert process.wait(timeout=60) == code


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.usefixtures("nothing_left")
def test_a_crashed_up_is_cleared_away(file, moment):
    with subprocess.Popen([sys.executable, str(SCRIPT), "up", str(file)]) as process:
        assert wait_until(MOMENTS[moment], 30)
        process.kill()
    (names.state_folder("test_lab") / "specification.json").unlink(missing_ok=True)
    assert command("down", "test_lab").returncode == 0


@pytest.mark.usefixtures("nothing_left")
def test_a_crashed_up_is_taken_up(file):
    with subprocess.Popen([sys.executable, str(SCRIPT), "up", str(file)]) as process:
        assert wait_until(MOMENTS["a namespace is there"], 30)
        process.kill()
    done = command("up", file)
    assert done.returncode == 0, done.stderr
    assert states(Lab.attach("test_lab")) == ["up", "up"]
    assert command("down", "test_lab").returncode == 0


@pytest.mark.usefixtures("nothing_left")
def test_a_lab_that_is_forgotten_goes_down():
    Lab.up(SPECIFICATION, lifetime=1)
    assert wait_until(lambda: traces() == NOTHING, 60)
