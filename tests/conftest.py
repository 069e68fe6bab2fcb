"""Settings for all tests: several CPU devices, and no time spent on optimising small programs."""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
