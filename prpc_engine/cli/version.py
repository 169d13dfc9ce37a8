"""`prpc version`: this package, and what its behaviour depends on."""

from __future__ import annotations

import importlib.metadata
import json
import platform

import click

import prpc_engine
from prpc_engine import cli
from prpc_engine.cli.commands import command

DEPENDENCIES = ("click", "numpy", "msgspec", "multiprocess", "posix_ipc", "psutil", "rich")


def versions() -> dict[str, str]:
    """Name -> version."""
    found = {"prpc": prpc_engine.__version__, "python": platform.python_version()}
    found["system"] = f"{platform.system()} {platform.release()} {platform.machine()}"
    for name in DEPENDENCIES:
        found[name] = importlib.metadata.version(name)
    return found


@command("version", "Say which versions these are.")
@click.option("--json", "as_json", is_flag=True, help="one JSON object")
def run(as_json: bool) -> int:
    """Print them."""
    found = versions()
    if as_json:
        print(json.dumps(found))
        return cli.OK
    for name, version in found.items():
        print(f"{name} {version}")
    return cli.OK
