"""`prpc gc`: remove shared memory of this user whose process is gone."""

from __future__ import annotations

import click

import shard
from prpc_engine import cli
from prpc_engine.cli.commands import command


@command(
    "gc",
    "Remove the named rings that this user's dead processes left in /dev/shm; nothing else ever "
    "lies there. Those of other users and of living processes are never touched: a process holds a "
    "lock on what it made, which is seen from any container that shares this /dev/shm.",
)
@click.option("--dry-run", is_flag=True, help="only say what would be removed")
def run(dry_run: bool) -> int:
    """Do it; a name a line."""
    names = shard.find_garbage() if dry_run else shard.collect_garbage()
    for name in names:
        print(shard.escaped(name))  # any user may have chosen the name
    what = "would be removed" if dry_run else "removed"
    print(f"{len(names)} segment{'' if len(names) == 1 else 's'} {what}")
    return cli.OK
