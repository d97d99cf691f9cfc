"""Tests run on eight host CPU devices, with strict promotion and warnings as errors."""

import gc
import os
import signal
from collections.abc import Iterator

# Most time goes to compiling small programs, which this makes several times as fast, also in the
# processes that tests start. The full profile compiles as users do.
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = str(os.environ.get("HYPOTHESIS_PROFILE") != "full")
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        *(
            ("--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=1")
            if os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] == "True"
            else ()
        ),
    ]
)
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import pytest
from hypothesis import HealthCheck, settings

jax.config.update("jax_numpy_dtype_promotion", "strict")

# What is traced lives long. Looked for so often, garbage among it takes an eighth of the time.
gc.set_threshold(20_000, 20, 20)

# A shell starts what it puts in the background with Ctrl-C ignored, and nohup with SIGHUP; children
# inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# "ci" draws the same few cases every time, so that its verdict is about the change alone and comes
# soon; "full" draws many new ones.
settings.register_profile(
    "ci",
    max_examples=40,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=True,
)
settings.register_profile("full", settings.get_profile("ci"), max_examples=300, derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture(scope="module", autouse=True)
def few_objects() -> Iterator[None]:
    """Every module begins with what it needs.

    Programs and compiled code of modules before would slow down all that follow: Python looks
    through all objects again and again for what is garbage.
    """
    yield
    jax.clear_caches()
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Ray does not wait for all processes that it ends, which Python finds out at any time."""
    forgiving = pytest.mark.filterwarnings("ignore:subprocess [0-9]+ is still:ResourceWarning")
    for item in items:
        if item.get_closest_marker("ray"):
            item.add_marker(forgiving)
