"""`prpc master`: the master of a job as a process of its own, with a journal to start again
from.
"""

from __future__ import annotations

import signal

import click

from prpc_engine import cli
from prpc_engine.cli.commands import command, path
from prpc_engine.master.master import Master


@command(
    "master",
    "Serve names, ids, locks and barriers to the nodes of a job until Ctrl-C or SIGTERM. With "
    "--journal it can be killed and started again at the same address: nodes and clients go on, "
    "and calls between nodes never stop.",
)
@click.option(
    "--bind",
    default="127.0.0.1:0",
    metavar="HOST:PORT",
    help="where to listen, port 0: any free one",
)
@click.option(
    "--journal",
    type=path(file_okay=True),
    metavar="DIR",
    help="remember everything in this folder (default: remember nothing)",
)
@click.option(
    "--no-sync",
    is_flag=True,
    help="do not wait for the disk: a power cut may lose the last seconds, a kill nothing",
)
def run(bind: str, journal: str | None, no_sync: bool) -> int:
    """Serve; the address on standard output, so that a script can read it."""
    with Master(bind, journal=journal, sync=not no_sync) as master:
        signal.signal(signal.SIGTERM, lambda *_: master.stop_serving())
        print(f"serving at {master.address}", flush=True)
        master.serve_forever()
    return cli.OK
