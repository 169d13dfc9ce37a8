"""Finds the files that a checkout keeps at its top level and the wheel inside this package:
`configs/` and `perf/`.
"""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).parent


def bundled(name: str) -> Path:
    """The folder of that name: prpc_engine/<name> where a wheel is installed, <checkout>/<name> in
    a checkout.
    """
    installed = PACKAGE / name
    return installed if installed.is_dir() else PACKAGE.parent / name


def benchmarks_package() -> str:
    """The importable name of the package that holds the benchmarks."""
    return f"{PACKAGE.name}.perf" if (PACKAGE / "perf").is_dir() else "perf"
