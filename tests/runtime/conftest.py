from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from hetjax.runtime.ray_cluster import RayOptions, connect_to_ray

TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[None]:
    """A Ray cluster of its own for the tests of a module; its workers can import their helpers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(TESTS))
        assert connect_to_ray(RayOptions("local"))
        yield
        ray.shutdown()
