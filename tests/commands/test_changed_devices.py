"""Whether the devices that a plan was made for are still there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hetjax.commands.devices import configured_cluster, has_changed
from hetjax.configuration import ClusterSettings, RuntimeSettings
from hetjax.mesh import Cluster

HOME = Path(__file__).parents[2] / "configs" / "clusters" / "home_laboratory.yaml"
LOCAL = RuntimeSettings(name="local")


def test_a_cluster_file_that_was_edited_is_another_cluster(tmp_path: Path):
    file = tmp_path / "cluster.yaml"
    file.write_text(HOME.read_text())
    settings = ClusterSettings(file=str(file))
    planned = configured_cluster(settings, LOCAL)
    assert not has_changed(planned, settings, LOCAL)
    first, *others = planned.subclusters
    grown = replace(planned, subclusters=(replace(first, nodes=first.nodes + 1), *others))
    assert has_changed(grown, settings, LOCAL)
    slower = tuple(
        (a, b, replace(link, bandwidth=link.bandwidth / 2)) for a, b, link in planned.links
    )
    assert has_changed(replace(planned, links=slower), settings, LOCAL)


def test_devices_that_are_found_may_be_faster_than_before():
    settings = ClusterSettings(file=None)
    planned = Cluster.local()
    (host,) = planned.subclusters
    faster = replace(host, kind=replace(host.kind, memory_bandwidth=2 * host.kind.memory_bandwidth))
    assert not has_changed(replace(planned, subclusters=(faster,)), settings, LOCAL)
    fewer = replace(host, devices_per_node=host.devices_per_node - 1)
    assert has_changed(replace(planned, subclusters=(fewer,)), settings, LOCAL)
