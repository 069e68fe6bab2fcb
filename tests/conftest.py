"""Settings for all tests: several CPU devices, and no time spent on optimising small programs.

`test_transform.py` runs with all of XLA's passes.
"""

import os

import jax
import pytest

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture
def all_passes():
    """Compile as for use, not for a quick test."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)
