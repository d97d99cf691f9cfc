"""Unlike hosts that share the images of a ResNet: the plan made by default trains, for real."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
import yaml
from images_trainer import ImageSize
from lab.memory_groups import find_memory_groups
from lab_images import unlike_memories, unlike_speeds
from labs import MARKS, NOTHING, named_lab, traces

pytestmark = [*MARKS, pytest.mark.ray]


@pytest.fixture(autouse=True, scope="module")
def nothing_left() -> Iterator[None]:
    yield
    assert traces() == NOTHING


def cluster_file(folder: Path, speed: float) -> str:
    """The lab's cluster, so that the plan depends on no measurement."""
    near = {"bandwidth": "5 GB/s", "latency": "20 us"}
    subclusters: list[dict[str, Any]] = [
        {
            "name": name,
            "kind": kind,
            "nodes": 1,
            "devices_per_node": 1,
            "intra_node": near,
            "ray_resource": f"host:{name}",
        }
        for name, kind in (("a", "host-cpu"), ("b", "second"))
    ]
    content = {
        "name": "lab",
        "kinds": {"second": {"like": "host-cpu", "speed": speed}},
        "subclusters": subclusters,
        "links": [{"between": ["a", "b"], **near}],
    }
    file = folder / "cluster.yaml"
    file.write_text(yaml.safe_dump(content))
    return str(file)


def test_a_slow_host_has_fewer_images(tmp_path: Path):
    size = ImageSize(batch=48, image_size=32)
    with jax.numpy_dtype_promotion("standard"):
        found = unlike_speeds(named_lab("two_hosts"), size, 0.5, 1, cluster_file(tmp_path, 0.5))
    planned, even = found["rows"]
    assert planned["microbatches"] == 1
    assert "the fewest that fit" in planned["notes"][0]
    fast, slow = planned["shares"]
    assert fast + slow == 48
    assert 1.7 <= fast / slow <= 2.3
    assert even["shares"] == [24, 24]
    assert found["even_over_planned"] > 0


@pytest.mark.skipif(find_memory_groups() is None, reason="no cgroups limit memory here")
def test_a_small_host_has_what_fits(tmp_path: Path):
    """Half of the images do not: its worker is killed."""
    with jax.numpy_dtype_promotion("standard"):
        found = unlike_memories(
            named_lab("two_hosts"), ImageSize(batch=320), cluster_file(tmp_path, 1.0)
        )
    planned, even = found["rows"]
    assert planned["microbatches"] == even["microbatches"] == 1
    assert planned["lost"] is None
    assert planned["fits"]
    assert planned["shares"][1] < 160 < planned["shares"][0]
    assert found["planned_over_limit"] < 1 < found["even_over_limit"]
    assert even["shares"] == [160, 160]
    assert not even["fits"]
    assert even["lost"] == "stage 0, member 1"
