"""`prpc bench`: the measurements of perf/, from the command line."""

from __future__ import annotations

import argparse
import importlib
from typing import TYPE_CHECKING

from prpc_engine import cli
from prpc_engine.bundled import benchmarks_package

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
        "socket, "
        "and those of "
        "pyzmq, pynng, grpcio and torch that are installed (pip install 'prpc-engine[bench]'; "
        "torch by itself).",
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


def run(args: argparse.Namespace) -> int:
    """Measure, print."""
    cli_bench = importlib.import_module(f"{benchmarks_package()}.cli_bench")
    code: int = cli_bench.main(args.subject, json=args.json, quick=args.quick)
    return code
