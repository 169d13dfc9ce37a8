"""`prpc gc`: remove shared memory of this user whose process is gone."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import shard
from prpc_engine import cli

if TYPE_CHECKING:
    from prpc_engine.cli import Commands


def add_parser(commands: Commands) -> None:
    """Describe the command."""
    parser = commands.add_parser(
        "gc",
        help=cli.COMMANDS["gc"],
        description="Remove the named rings that this user's dead processes left in /dev/shm; "
        "nothing else ever lies there. "
        "Those of other users and of living processes are never touched: "
        "a process holds a lock on what it made, which is seen "
        "from any container that shares this /dev/shm.",
    )
    parser.add_argument("--dry-run", action="store_true", help="only say what would be removed")


def run(args: argparse.Namespace) -> int:
    """Do it; a name a line."""
    names = shard.find_garbage() if args.dry_run else shard.collect_garbage()
    for name in names:
        print(name)
    what = "would be removed" if args.dry_run else "removed"
    print(f"{len(names)} segment{'' if len(names) == 1 else 's'} {what}")
    return cli.OK
