"""Measuring a real Ray cluster of two nodes on this machine."""

import logging
import warnings
from collections.abc import Iterator

import pytest
import ray
from ray.cluster_utils import Cluster as RayCluster

from hetjax.commands.devices import configured_cluster
from hetjax.configuration import ClusterSettings, RuntimeSettings
from hetjax.errors import InputError, WorkerLostError
from hetjax.runtime import measure_cluster
from hetjax.runtime.ray import ray_measure
from hetjax.runtime.ray.ray_cluster import check_resources, worker_resources
from hetjax.runtime.workers import waiting

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[None]:
    with warnings.catch_warnings():
        # Ray starts its processes by fork and exec at once, which JAX's threads do not mind.
        warnings.filterwarnings("ignore", message=r".*fork\(\)")
        cluster = RayCluster()
        for _ in range(2):
            cluster.add_node(num_cpus=1, object_store_memory=80_000_000, include_dashboard=False)
        ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    yield
    ray.shutdown()
    cluster.shutdown()


def test_without_ray_nothing_can_be_measured():
    assert not ray.is_initialized()
    with pytest.raises(InputError, match=r"ray\.init"):
        measure_cluster()


@pytest.mark.usefixtures("two_nodes")
def test_nodes_and_their_link_are_measured_and_can_be_addressed(
    capsys: pytest.CaptureFixture[str],
):
    cluster = configured_cluster(ClusterSettings(measure=True), RuntimeSettings(name="ray"))
    first, second = cluster.subclusters
    assert "measuring link 1 of 1" in capsys.readouterr().err
    assert first.ray_resource == second.ray_resource == "node:" + first.name
    # They share this machine, whose cores have one speed.
    assert 0.5 < first.kind.flops("float32") / second.kind.flops("float32") < 2
    link = cluster.link(first.name, second.name)
    assert 1e7 < link.bandwidth < 1e12
    assert 0 < link.latency < 0.1
    assert all(0 <= each.transfer_load < 1e-6 for each in cluster.subclusters)
    assert all(0 <= each.message_load < 0.1 for each in cluster.subclusters)
    workers = [(each.name, worker_resources(each, 1)) for each in cluster.subclusters]
    assert workers[0][1] == {first.ray_resource: 0.001}
    check_resources(workers)


@pytest.mark.usefixtures("two_nodes")
def test_a_measurement_that_takes_too_long_names_the_nodes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ray_measure, "CALL_SECONDS", 1e-3)
    with pytest.raises(WorkerLostError, match=r"the measurement on \S+ is lost: .* 0\.001 s"):
        measure_cluster()


@pytest.mark.usefixtures("two_nodes")
def test_nodes_that_are_awaited_are_said_with_their_addresses(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(waiting, "TELL_SECONDS", 0.0)
    monkeypatch.setattr(ray_measure, "START_SECONDS", 1e-3)
    said: list[str] = []
    with pytest.raises(WorkerLostError, match=r"took longer than 0\.001 s"):
        measure_cluster(said.append)
    address = ray.util.get_node_ip_address()
    assert said[1].startswith(f"waiting for {address}")
    assert "to start a process that measures: 0 s of at most 0.001; this machine" in said[1]
