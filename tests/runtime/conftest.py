import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ray

from hetjax.runtime.ray import ray_carriers
from hetjax.runtime.ray.ray_cluster import RayOptions, connect_to_ray

TESTS = Path(__file__).parents[1]
_MARK = "HETJAX_TEST_CLUSTER"


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[Callable[[], list[int]]]:
    """A Ray cluster for the tests of a module, whose workers can import the tests' helpers.

    It gives a function that finds the workers of the Ray runtime that are left on the cluster.
    """
    mark = f"{_MARK}={uuid.uuid4()}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(TESTS))
        patch.setenv(*mark.split("="))
        # Measuring links takes longer than all else that a small job does.
        patch.setattr(ray_carriers, "MEASURING_SECONDS", 0.5)
        assert connect_to_ray(RayOptions("local"))
        yield lambda: _workers(mark.encode())
        ray.shutdown()


def _workers(mark: bytes) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            title, environment = ((folder / name).read_bytes() for name in ("cmdline", "environ"))
        except OSError:  # It has ended meanwhile.
            continue
        if title.startswith(b"ray::HostWorker") and mark in environment.split(b"\0"):
            found.append(int(folder.name))
    return found
