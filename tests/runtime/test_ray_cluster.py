import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from ray_jobs import HOST, make_trainer

from hetjax import InputError, RayOptions, WorkerLostError, processes
from hetjax.mesh import Link, Subcluster
from hetjax.processes import Process, descendants
from hetjax.runtime.ray.ray_cluster import connect_to_ray, worker_options, worker_resources
from hetjax.runtime.ray.running_clusters import running_clusters, shared_address

TESTS = Path(__file__).parents[1]
LINK = Link(bandwidth=1e9, latency=1e-5)

USER_SCRIPT = """
import json
import jax
import ray
import ray_jobs
from hetjax.runtime.ray.ray_executor import RayOptions

jax.config.update("jax_platforms", "cpu")

def loss(parameters, batch):
    return ray_jobs.loss(parameters, batch)

if __name__ == "__main__":
    with ray_jobs.make_trainer("ray", loss_function=loss) as trainer:
        losses = [trainer.train_step().loss]
        # Another one beside it; what it leaves is still there for the first.
        with ray_jobs.make_trainer("ray", loss_function=loss) as another:
            assert another.train_step().loss == losses[0]
        losses.append(trainer.train_step().loss)
        trainer.switch(ray_jobs.make_plan())
        address = ray.get_runtime_context().gcs_address
    print(json.dumps({"losses": losses, "address": address, "left": not ray.is_initialized()}))
"""


@pytest.fixture(autouse=True)
def not_connected(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert not ray.is_initialized()
    yield
    assert not ray.is_initialized()


@pytest.fixture
def server() -> Iterator[socket.socket]:
    """A listening socket of something that is not Ray."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:
        yield listening


def address_of(server: socket.socket) -> str:
    return f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize(
    "address", ["here", "here:", ":1", "a b:1", "h:0", "h:99999", "http://h:1", "ray://h:1"]
)
def test_an_address_of_another_form_is_refused(address: str):
    with pytest.raises(InputError, match=r"is not 'host:port', 'auto' or 'local'"):
        connect_to_ray(RayOptions(address))


def test_an_address_where_nobody_listens_is_refused():
    with pytest.raises(InputError, match=r"ray address '127.0.0.1:1' does not answer: .*refused"):
        connect_to_ray(RayOptions("127.0.0.1:1"))


def test_an_address_that_never_answers_is_refused(server: socket.socket):
    with pytest.raises(InputError, match=r"does not answer: timed out"):
        connect_to_ray(RayOptions(address_of(server)))


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_an_address_of_something_else_is_refused(server: socket.socket, answer: bytes):
    def serve() -> None:
        connection, _ = server.accept()
        with connection:
            connection.recv(1024)
            connection.sendall(answer)

    thread = threading.Thread(target=serve)
    thread.start()
    with pytest.raises(InputError, match="by something that is not Ray"):
        connect_to_ray(RayOptions(address_of(server)))
    thread.join()


@pytest.mark.parametrize(
    ("address", "is_refused"),
    [
        ("192.0.2.7:6379", False),
        ("192.0.2.7:6380", True),
        ("192.0.2.8:6379", True),
        ("127.0.0.1:6379", False),
        ("no.such.host.invalid:6379", True),
        ("auto", False),
        (None, False),
    ],
)
def test_who_is_connected_to_another_cluster_is_told(
    monkeypatch: pytest.MonkeyPatch, address: str | None, is_refused: bool
):
    context = SimpleNamespace(gcs_address="192.0.2.7:6379")
    with monkeypatch.context() as patch:
        patch.setattr(ray, "is_initialized", lambda: True)
        patch.setattr(ray, "get_runtime_context", lambda: context)
        patch.setattr(ray.util, "get_node_ip_address", lambda: "192.0.2.7")
        if not is_refused:
            assert not connect_to_ray(RayOptions(address))
            return
        with pytest.raises(InputError, match=rf"'{address}', .* connected to '192.0.2.7:6379'"):
            connect_to_ray(RayOptions(address))


def test_the_environment_gives_the_address(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(InputError, match=r"'127.0.0.1:1' does not answer"):
        connect_to_ray(RayOptions())


@pytest.fixture
def start_raylet() -> Iterator[Callable[[str, bool], None]]:
    """Starts what looks like a Ray cluster's process, of one run alone or not."""
    started = []

    def start(address: str, is_private: bool) -> None:
        marks = {"HETJAX_DRIVER": "another"} if is_private else {}
        process = subprocess.Popen(
            ["raylet", "-c", "echo; read line", f"--gcs-address={address}"],
            executable="/bin/sh",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **marks},
        )
        started.append(process)
        assert process.stdout is not None
        process.stdout.readline()

    yield start
    for process in started:
        process.communicate()


def test_a_cluster_that_another_run_has_for_itself_is_not_used(
    monkeypatch: pytest.MonkeyPatch, start_raylet: Callable[[str, bool], None]
):
    others = running_clusters()
    monkeypatch.setattr(
        "hetjax.runtime.ray.running_clusters.running_clusters",
        lambda: [each for each in running_clusters() if each not in others],
    )
    start_raylet("192.0.2.7:6379", False)
    assert [shared_address(each) for each in (None, "auto")] == [None, "auto"]
    start_raylet("192.0.2.7:6380", True)
    given = (None, "auto", "local", "192.0.2.7:6380")
    expected = ["192.0.2.7:6379", "192.0.2.7:6379", "local", "192.0.2.7:6380"]
    assert [shared_address(each) for each in given] == expected


def test_where_all_clusters_are_of_other_runs_one_is_started(
    monkeypatch: pytest.MonkeyPatch, start_raylet: Callable[[str, bool], None]
):
    start_raylet("192.0.2.7:6380", True)
    monkeypatch.setattr(
        "hetjax.runtime.ray.running_clusters.running_clusters",
        lambda: [each for each in running_clusters() if each.address == "192.0.2.7:6380"],
    )
    assert shared_address(None) == "local"
    with pytest.raises(InputError, match="'auto', and all Ray clusters that run here are of other"):
        connect_to_ray(RayOptions("auto"))


@pytest.mark.parametrize(
    ("platform", "mark", "resources"),
    [
        ("cpu", None, {}),
        ("cpu", "hetjax:host-cpu", {"hetjax:host-cpu": 2}),
        ("gpu", None, {"GPU": 2}),
        ("gpu", "accelerator_type:T4", {"GPU": 2, "accelerator_type:T4": 0.001}),
        ("gpu", "hetjax:RTX4090", {"GPU": 2, "hetjax:RTX4090": 2}),
        ("tpu", None, {"TPU": 2}),
    ],
)
def test_a_worker_asks_for_its_devices(platform: str, mark: str | None, resources: dict):
    subcluster = Subcluster("some", replace(HOST, platform=platform), 1, 4, LINK, LINK, mark)
    assert worker_resources(subcluster, 2) == resources
    options = worker_options(subcluster, 2)
    assert options["num_gpus"] == resources.get("GPU", 0)
    assert "GPU" not in options["resources"]


def test_workers_that_are_processors_compile_by_the_flags_of_the_driver(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1 --xla_force_host_platform_device_count=8 --xla_b")

    def variables(platform: str) -> dict[str, str]:
        subcluster = Subcluster("some", replace(HOST, platform=platform), 1, 4, LINK, LINK)
        return worker_options(subcluster, 2)["runtime_env"]["env_vars"]

    flags = "--xla_a=1 --xla_b --xla_force_host_platform_device_count=2"
    assert variables("cpu")["XLA_FLAGS"] == flags
    assert "XLA_FLAGS" not in variables("gpu")


def running_address(folder: Path, process: subprocess.Popen) -> str:
    """The address that ``ray start`` wrote when the cluster was up."""
    end = time.monotonic() + 60
    while not (folder / "ray_current_cluster").exists():
        assert process.poll() is None, "ray start has failed"
        assert time.monotonic() < end, "ray start takes too long"
        time.sleep(0.1)
    return (folder / "ray_current_cluster").read_text().strip()


@pytest.fixture
def running_cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a cluster that another process has started; the environment has its token."""
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", uuid.uuid4().hex)
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as folder:
        command = "start --head --block --port=0 --num-cpus=2 --include-dashboard=false"
        ray_command = [str(Path(sys.executable).parent / "ray"), *command.split()]
        process = subprocess.Popen(
            [*ray_command, "--disable-usage-stats", f"--temp-dir={folder}"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            yield running_address(Path(folder), process)
        finally:
            process.terminate()
            process.wait(60)


@pytest.mark.ray
def test_a_script_trains_on_the_cluster_of_its_environment(running_cluster: str, tmp_path: Path):
    script = tmp_path / "user_script.py"
    script.write_text(USER_SCRIPT)
    done = subprocess.run(
        [sys.executable, script],
        env={**os.environ, "RAY_ADDRESS": running_cluster},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["address"] == running_cluster
    assert result["left"]
    # A machine that is busy may say what it waits for.
    assert all(line.startswith("waiting for ") for line in done.stderr.splitlines())
    with make_trainer("local") as trainer:
        losses = [trainer.train_step().loss for _ in range(2)]
    assert result["losses"] == pytest.approx(losses, rel=1e-6)


def command_of(process: Process) -> str:
    try:
        return Path(f"/proc/{process.number}/cmdline").read_text()
    except OSError:  # It has ended meanwhile.
        return ""


@pytest.mark.ray
def test_what_workers_cannot_import_is_named_and_the_cluster_ended():
    """The workers of a cluster that the trainer starts do not know the folder of the tests."""
    with pytest.raises(InputError, match=r"cannot import .*: No module named 'ray_jobs'"):
        make_trainer(RayOptions("local"))
    assert not ray.is_initialized()
    end = time.monotonic() + 30
    while any(processes.__file__ in command_of(each) for each in descendants(os.getpid())):
        assert time.monotonic() < end, "what guards the cluster is left behind"
        time.sleep(0.1)


@pytest.mark.ray
def test_who_has_closed_the_connection_is_told_and_keeps_the_next(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    with closing(make_trainer(RayOptions("local"))) as trainer:
        trainer.train_step()
        ray.shutdown()
        for use in (trainer.train_step, trainer.evaluate):
            with pytest.raises(WorkerLostError, match="the connection to Ray was closed"):
                use()
        assert not ray.is_initialized()
        assert connect_to_ray(RayOptions("local"))
    assert ray.is_initialized()
    ray.shutdown()
