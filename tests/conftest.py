"""Settings of all tests: several CPU devices, nothing broadcast by accident."""

import random

import jax
import pytest
from hypothesis import HealthCheck, Phase, settings

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")

# What is compiled in a first example takes long, and nothing is kept for a next run.
always = dict(
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
)
settings.register_profile("everyday", max_examples=60, derandomize=True, **always)
settings.register_profile("deep", max_examples=500, derandomize=False, **always)
settings.load_profile("everyday")


def pytest_configure(config):
    """Draws the seed of `pytest -m deep`, here and not in each worker of xdist."""
    if config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = random.SystemRandom().randrange(2**32)


def pytest_report_header(config):
    return f"pytest -m deep --hypothesis-seed={config.option.hypothesis_seed}"


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


@pytest.fixture
def compiled():
    """How long each compilation took."""
    durations = []

    def listen(event, duration, **kwargs):
        if event == "/jax/core/compile/backend_compile_duration":
            durations.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield durations
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.fixture(scope="module")
def quick_compiler():
    """What a module compiles skips LLVM's optimiser, as under `oracle.jit`."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def optimised():
    """What a test compiles runs long enough to be worth optimising."""
    held = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", held)
