"""`prpc master`: the master of a job as a process of its own, with a journal to start again
from.
"""

from __future__ import annotations

import argparse
import signal
from typing import TYPE_CHECKING

from prpc_engine import cli
from prpc_engine.master.master import Master

if TYPE_CHECKING:
    from prpc_engine.cli import Commands


def add_parser(commands: Commands) -> None:
    """Describe the command."""
    parser = commands.add_parser(
        "master",
        help=cli.COMMANDS["master"],
        description="Serve names, ids, locks and barriers to the nodes of a job until Ctrl-C or "
        "SIGTERM. "
        "With --journal it can "
        "be killed and started again at the same address: nodes and clients go on, "
        "and calls between nodes never stop.",
    )
    parser.add_argument(
        "--bind",
        default="127.0.0.1:0",
        metavar="HOST:PORT",
        help="where to listen, port 0: any free one (default: %(default)s)",
    )
    parser.add_argument(
        "--journal",
        metavar="DIR",
        help="remember everything in this folder (default: remember nothing)",
    )
    parser.add_argument(
        "--no-sync",
        action="store_true",
        help="do not wait for the disk: a power cut may lose the last seconds, a kill nothing",
    )


def run(args: argparse.Namespace) -> int:
    """Serve; the address on standard output, so that a script can read it."""
    with Master(args.bind, journal=args.journal, sync=not args.no_sync) as master:
        signal.signal(signal.SIGTERM, lambda *_: master.stop_serving())
        print(f"serving at {master.address}", flush=True)
        master.serve_forever()
    return cli.OK
