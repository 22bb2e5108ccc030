"""The machine that measures: how many threads it may use, and what it is."""

import os
import platform
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from experiments.config import ConfigError


def limit_threads(threads: int) -> str:
    """Keep this process to so many CPU cores; 0 leaves it as it is.

    JAX sizes its thread pools when it starts, so this has to come before it does.

    Returns:
        What was done, in words.

    Raises:
        ConfigError: there are fewer cores.
    """
    # Else JAX takes most of a GPU's memory when it starts, and torch finds none.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if not hasattr(os, "sched_setaffinity"):
        return "as many as there are: this system pins no process"
    cores = sorted(os.sched_getaffinity(0))
    if threads > len(cores):
        raise ConfigError(
            f"threads = {threads} is more than the {len(cores)} cores of this process"
        )
    if threads == 0:
        return f"{len(cores)}, as many as there are"
    if "jax" in sys.modules:
        return f"{len(cores)}: JAX had started before it could be kept to {threads}"
    os.sched_setaffinity(0, cores[-threads:])
    if threads == 1:
        flags = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
    return f"{threads}, each on a core of its own" if threads > 1 else "1, on one core"


def describe(threads: str) -> dict[str, Any]:
    """Processor, versions, date and load of this moment."""
    import jax

    device = jax.devices()[0]
    return {
        "cpu": _cpu_model(),
        "cpu_count": os.cpu_count(),
        "threads": threads,
        "device": device.device_kind,
        "backend": device.platform,
        "python": platform.python_version(),
        **{name: _version(name) for name in ("jax", "flax", "torch")},
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "load_average": load_average(),
    }


def load_average() -> float | None:
    """Processes that wanted to run in the last minute, on average."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def _cpu_model() -> str:
    path = Path("/proc/cpuinfo")
    for line in path.read_text().splitlines() if path.exists() else ():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
