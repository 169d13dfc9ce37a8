"""`prpc version`: this package, and what its behaviour depends on."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
from typing import TYPE_CHECKING

import prpc_engine
from prpc_engine import cli

if TYPE_CHECKING:
    from prpc_engine.cli import Commands

DEPENDENCIES = ("numpy", "msgspec", "multiprocess", "posix_ipc", "psutil", "rich")


def add_parser(commands: Commands) -> None:
    """Describe the command."""
    parser = commands.add_parser(
        "version", help=cli.COMMANDS["version"], description="Say which versions these are."
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")


def versions() -> dict[str, str]:
    """Name -> version."""
    found = {"prpc": prpc_engine.__version__, "python": platform.python_version()}
    found["system"] = f"{platform.system()} {platform.release()} {platform.machine()}"
    for name in DEPENDENCIES:
        found[name] = importlib.metadata.version(name)
    return found


def run(args: argparse.Namespace) -> int:
    """Print them."""
    found = versions()
    if args.json:
        print(json.dumps(found))
        return cli.OK
    for name, version in found.items():
        print(f"{name} {version}")
    return cli.OK
