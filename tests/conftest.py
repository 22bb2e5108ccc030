"""Settings of all tests: several CPU devices, nothing broadcast by accident."""

import jax
import pytest

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield
