"""`prpc bench`: the measurements of perf/, from the command line."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from typing import TYPE_CHECKING

from prpc_engine import cli
from prpc_engine.bundled import benchmarks_package, bundled
from prpc_engine.errors import ConfigError

if TYPE_CHECKING:
    from prpc_engine.cli import Commands

SUBJECTS = {
    "ring": "records between two processes through a ring in shared memory",
    "shard": "calls, lent arrays, wake-ups and idling of a group of shards",
    "growth": "how cost grows with shards, record sizes and a mesh",
    "rpc": "small calls",
    "call": "what a small call executes, in one thread",
    "start": "the first call of a fresh process, in parts",
    "clients": "1 to 1,000 clients on one server over tcp",
    "connections": "1 to 1,000 connections to a server of 1, 2 and 4 shards",
    "mixed": "small calls beside large arrays on one connection",
    "tls": "calls and arrays over tcp with TLS and without",
    "failure": "how soon calls end at a killed server, and are answered after a reset",
    "recovery": (
        "elastic tables after a server was killed: how soon, and whether each push counts once"
    ),
    "tensor": "arrays, by reference and copied",
    "transfer": "arrays of 1 MB to 640 MB over tcp, of 1.25 KB to 1.25 GB over shared memory",
    "fuse": "tensors of one step between two tasks of a cluster, one by one and fused",
    "kv": "pulls and pushes of a key-value table",
    "pslite": "ps-lite's verbs: small pushes, large values over shared memory and tcp, barriers",
    "checkpoint": (
        "saving and restoring key-value tables on tmpfs, beside files; pushes during a save"
    ),
    "tensorflow": "steps of training beside TensorFlow's own gRPC servers, the same script",
}


def add_parser(commands: Commands) -> None:
    """Describe the command."""
    parser = commands.add_parser(
        "bench",
        help=cli.COMMANDS["bench"],
        description="Measure one subject in the same run as multiprocessing.Pipe, a raw tcp "
        "socket, and those of pyzmq, pynng, grpcio and torch that are installed (pip install "
        "'prpc-engine[bench]'; torch by itself).",
        epilog="--compare calls a figure better or worse where the ranges of its repeats, then and "
        "now, do not meet; two runs that differ by chance alone come apart so once in 126 times "
        "with five repeats each, once in ten with --quick. Ratios to a peer of the same run are "
        "compared between any two machines, times and rates only where CPU model, cores, kernel "
        "and Python are the same.",
    )
    parser.add_argument(
        "subject",
        choices=SUBJECTS,
        help="; ".join(f"{name}: {what}" for name, what in SUBJECTS.items()),
    )
    parser.add_argument("--json", action="store_true", help="JSON lines instead of tables")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="fewer and shorter repeats: figures to look at, not to publish",
    )
    parser.add_argument(
        "--record",
        action="store_true",
        help="append the figures to perf/history/<subject>.jsonl of this checkout",
    )
    parser.add_argument(
        "--compare",
        nargs="?",
        const="",
        metavar="COMMIT|FILE",
        help="show the figures beside those of that commit in perf/history/, or of a file that "
        "--json made; without a value: beside the last line of this machine, else the last line",
    )
    parser.add_argument(
        "--from",
        dest="finished",
        type=Path,
        metavar="FILE",
        help="compare or record this run, which --json made, and measure nothing",
    )


def run(args: argparse.Namespace) -> int:
    """Measure, print. Raises ConfigError."""
    if args.finished is not None and not args.record and args.compare is None:
        raise ConfigError("--from takes a finished run for --compare or --record; give one of them")
    package = benchmarks_package()
    try:
        cli_bench = importlib.import_module(f"{package}.cli_bench")
    except ModuleNotFoundError as error:
        if error.name not in (package, f"{package}.cli_bench"):
            raise
        raise ConfigError(
            f"no benchmarks here: {bundled('perf')} is missing; the wheel has them (pip install "
            "prpc-engine), and so does a checkout of the sources"
        ) from error
    code: int = cli_bench.main(
        args.subject,
        json=args.json,
        quick=args.quick,
        record=args.record,
        compare=args.compare,
        finished=args.finished,
    )
    return code
