"""`python -m jattn`: versions, devices, and whether attention is right here."""

import argparse
import importlib.metadata
import platform
import sys
import time
from collections.abc import Sequence

import jax

import jattn
from jattn import selfcheck
from jattn.foreign import in_one_line

PACKAGES = ("jax", "jaxlib", "numpy", "flax", "optax", "chex")


def main(argv: Sequence[str] | None = None) -> int:
    """Prints all of it; the exit code is 1 if a check fails."""
    parser = argparse.ArgumentParser(prog="python -m jattn", description=__doc__)
    parser.add_argument(
        "--no-check", action="store_true", help="leave out the self-check"
    )
    arguments = parser.parse_args(argv)
    _print("jattn", jattn.__version__)
    _print("python", platform.python_version())
    for package in PACKAGES:
        _print(package, _version(package))
    _print("backend", jax.default_backend())
    for line in _devices():
        _print("devices", line)
    return 0 if arguments.no_check else _check()


def _check() -> int:
    failed = []
    for name, check in selfcheck.checks().items():
        start = time.perf_counter()
        try:
            result = check() or "ok"
        except Exception as error:  # whatever it is, it is reported
            failed.append(name)
            result = f"FAILED: {in_one_line(error)}"
        _print(name, f"{result} ({time.perf_counter() - start:.1f} s)")
    if failed:
        print(f"{len(failed)} checks failed: {'; '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _devices() -> list[str]:
    """The devices of the default backend, those of a kind together."""
    kinds: dict[str, int] = {}
    for device in jax.devices():
        memory = (device.memory_stats() or {}).get("bytes_limit")
        shown = f", {memory / 1e9:.3g} GB each" if memory else ""
        kind = f"{device.device_kind}{shown}"
        kinds[kind] = kinds.get(kind, 0) + 1
    return [f"{count} x {kind}" for kind, count in kinds.items()]


def _print(name: str, text: str) -> None:
    print(f"{name:<28}{text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
